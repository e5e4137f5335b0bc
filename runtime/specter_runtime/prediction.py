"""What the simulator expects of a live configuration: the same rules, routes and memory, its clock.

Routes are recorded along the very texts, teacher-forced; costs are those measured on this machine.
The link, the order of copies and everything that waits is the simulator's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specter_runtime.calibration import Calibration
from specter_runtime.capture import CaptureSettings, Recorder
from specter_runtime.capture_weights import StoredWeights
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.prepare import Prepared
from specter_runtime.quantizer import DraftCode
from specter_runtime.sampling import Sampling
from specter_sim.config import RunConfig, build, resolved
from specter_sim.hardware import Costs
from specter_sim.results import Result
from specter_sim.setup import resolve
from specter_sim.setup.resolve import Setup
from specter_sim.setup.rules import depth_memory, expected_by_costs, prefetch_memory
from specter_sim.sim import simulate
from specter_traces import Decoding, Trace, save

_TRACE = "routes.safetensors"


@dataclass(frozen=True)
class Prediction:
    """What is expected, and with compute as fast and as slow as the middle half of its timings."""

    result: Result
    fast: Result
    slow: Result


@dataclass(frozen=True)
class WrittenText:
    """A text as a live run wrote it; its first `prompt_tokens` tokens were given."""

    tokens: tuple[int, ...]
    prompt_tokens: int


def record(
    loaded: LoadedModel, code: DraftCode, texts: Sequence[WrittenText], sampling: Sampling | None
) -> Trace:
    """The paired routes along texts."""
    decoding = Decoding.GREEDY if sampling is None else Decoding.SAMPLED
    settings = CaptureSettings(draft=code, decoding=decoding, sampling=sampling or Sampling())
    recorder = Recorder(loaded.checkpoint, settings, StoredWeights(loaded, code))
    parts = [
        recorder.record_text(f"text {number}", text.tokens[:-1], text.prompt_tokens)
        for number, text in enumerate(texts)
    ]
    return recorder.join(parts, "texts of a live run")


def predict(prepared: Prepared, trace: Trace, calibration: Calibration) -> Prediction:
    """Simulate the configuration of a live run over recorded routes."""
    with tempfile.TemporaryDirectory(prefix="specter-") as folder:
        save(trace, Path(folder) / _TRACE)
        setup = resolve(_simulated(prepared, Path(folder), trace))
        setup = replace(setup, plan=prepared.budget.plan(), slots=prepared.budget.groups)
        results = [
            simulate(_with_costs(setup, calibration.scaled(factor)))
            for factor in (1.0, calibration.fast, calibration.slow)
        ]
    return Prediction(*results)


def _simulated(prepared: Prepared, folder: Path, trace: Trace) -> RunConfig:
    """The live configuration with the model's shape, the recorded trace and the slots as planned.

    UsageError when the simulator cannot read the shape off the model's config.
    """
    prepared.checkpoint.model.config.to_json_file(folder / "config.json")
    groups, pooled = prepared.budget.groups, prepared.config.memory.layout == "global"
    slots = {"slots": max(1, groups[0] // prepared.store.layers)} if pooled else {}
    each = {} if pooled else {"slots_per_layer": list(groups)}
    decoded = trace.num_positions - int(trace.prompt_lengths.sum()) + trace.num_sequences
    table = resolved(prepared.config)
    memory = table["memory"] | {"slots": None, "slots_per_layer": None, "budget": None}
    return build(
        table
        | {
            "model": str(folder / "config.json"),
            "trace": {"path": str(folder / _TRACE), "tokens": decoded},
            "memory": memory | slots | each | {"allow_rounds": True},
        }
    )


def _with_costs(setup: Setup, costs: Costs) -> Setup:
    """The setup with other costs, and the rules that start from them."""
    memory = depth_memory(
        setup.depth,
        setup.params["depth"],
        lambda most: expected_by_costs(
            most, setup.text.unions, setup.shape, setup.machine, costs, setup.text.context
        ),
    )
    prefetch = prefetch_memory(setup.prefetch, setup.params["prefetch"], costs.load_bytes)
    rules = replace(setup.rules, depth_memory=memory, prefetch_memory=prefetch)
    return replace(setup, costs=costs, rules=rules)
