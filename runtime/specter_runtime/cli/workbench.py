"""A loaded model on which systems are measured in turn, and what the simulator expects of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specter_runtime.cli.opening import device_kind, load, set_threads
from specter_runtime.cli.options import System, configuration, policy_name, tell, today
from specter_runtime.cli.summary import stall_share
from specter_runtime.cli.systems import PLAIN
from specter_runtime.codec import Coding
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.prepare import coding_of, plan
from specter_runtime.prompts import Passage, encode
from specter_runtime.quantizer import DraftCode, parse
from specter_runtime.sampling import Sampling
from specter_runtime.session import Session, SessionOptions
from specter_sim import __version__
from specter_sim.config import RunConfig, content_hash
from specter_traces.errors import SpecterError
from specter_traces.statistics import repeated_share

if TYPE_CHECKING:
    from specter_runtime.calibration import Calibration
    from specter_runtime.prediction import Prediction, WrittenText
    from specter_runtime.prepare import Prepared
    from specter_traces import Trace

DRAFTLESS = parse("base4")
"""The draft that is recorded along a text where the system has none: it is not looked at."""


@dataclass(frozen=True)
class Work:
    """What every system writes. `predict`: and what the simulator expects of it."""

    passages: Sequence[Passage]
    source: str
    new_tokens: int
    sampling: Sampling | None
    predict: bool

    def describe(self) -> str:
        """ "30 prompts of starters, 64 tokens each, greedy"."""
        texts = f"{len(self.passages)} prompts of {Path(self.source).name}"
        return f"{texts}, {self.new_tokens} tokens each, {self.drawn()}"

    def drawn(self) -> str:
        """How tokens are chosen."""
        return "greedy" if self.sampling is None else self.sampling.describe()


def key_of(system: System, config: RunConfig, work: Work) -> str:
    """Identity of a row: everything that its figures depend on, but the machine's mood."""
    texts = hashlib.sha256(repr(work.passages).encode()).hexdigest()
    told = (system.device, system.dtype, str(system.threads), str(work.new_tokens))
    drawn = (repr(work.sampling), str(work.predict))
    return content_hash(config, texts, *told, *drawn, __version__)


class Workbench:
    """Loads its model when it is first needed; experts stay in host memory between systems.

    Only one form of them at a time: a system of another coding loads the model again.
    """

    def __init__(self, base: System, work: Work) -> None:
        """`base` is what all systems share: model, device, number type, threads."""
        set_threads(base)
        self._base, self._work = base, work
        self._loaded: LoadedModel | None = None
        self._prompts: list[list[int]] = []
        self._calibrations: dict[tuple[Coding | None, DraftCode | None], Calibration] = {}
        self._traces: dict[tuple[tuple[WrittenText, ...], DraftCode], Trace] = {}

    def half_resident_bytes(self) -> int:
        """Device bytes of half of the experts beside the rest, without a draft."""
        return self._plan(configuration(replace(self._base, policy=PLAIN))).budget.total_bytes

    def about(self, system: System, config: RunConfig) -> dict[str, Any]:
        """The part of a row that is known before it is run."""
        import torch

        from specter_sim.setup.memory import machine_of

        work, emulated = self._work, system.device == "emulated"
        return {
            "key": key_of(system, config, work),
            "date": today(),
            "policy": system.policy or policy_name(system, config),
            "model": config.model,
            "device": system.device,
            "link_bytes_per_s": machine_of(config).link.bytes_per_s if emulated else None,
            "budget_bytes": config.memory.budget,
            "prompts": work.source,
            "sequences": len(work.passages),
            "new_tokens": work.new_tokens,
            "sampling": work.drawn(),
            "threads": torch.get_num_threads(),
        }

    def measure(self, config: RunConfig) -> dict[str, Any]:
        """The figures of one system. UsageError when it cannot run in its memory."""
        prepared = self._plan(config)
        with Session(prepared) as session:
            texts = [self._written(session, index) for index in range(len(self._prompts))]
            result = session.result()
            row = {
                **result.row(),
                "peak_device_bytes": session.peak_device_bytes,
                "repetition": float(np.mean([repeated_share(np.array(text)) for text in texts])),
                "stall_share": stall_share(result),
            }
        return row | (self._expected(prepared, texts) if self._work.predict else {})

    def close(self) -> None:
        """Give the experts' memory back."""
        if self._loaded is not None:
            self._loaded.close()

    def _load(self, coding: Coding | None) -> LoadedModel:
        if self._loaded is None or self._loaded.coding != coding:
            self.close()
            checkpoint = load(self._base, configuration(self._base).model)
            self._prompts = [encode(passage, checkpoint) for passage in self._work.passages]
            self._loaded = LoadedModel.take(checkpoint, coding=coding)
        return self._loaded

    def _plan(self, config: RunConfig) -> Prepared:
        loaded = self._load(coding_of(config))
        return plan(loaded, config, self._options(self._work.new_tokens))

    def _options(self, new_tokens: int) -> SessionOptions:
        longest = max(map(len, self._prompts))
        return SessionOptions(
            self._base.dtype, device_kind(self._base), context_tokens=longest + new_tokens
        )

    def _written(self, session: Session, index: int) -> list[int]:
        work = self._work
        drawn = work.sampling and replace(work.sampling, seed=work.sampling.seed + index)
        windows = session.generate(self._prompts[index], work.new_tokens, drawn)
        return [token for window in windows for token in window]

    def _expected(self, prepared: Prepared, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What the simulator expects of the system; nothing, and why, where it cannot tell."""
        try:
            expected = self._prediction(prepared, texts)
        except SpecterError as error:
            tell(f"no prediction: {error}")
            return {}
        return {
            "predicted_tpot_s": expected.result.tpot_s,
            "predicted_fast_tpot_s": expected.fast.tpot_s,
            "predicted_slow_tpot_s": expected.slow.tpot_s,
            "predicted_bytes_per_token": expected.result.bytes_per_token,
        }

    def _prediction(self, prepared: Prepared, texts: Sequence[Sequence[int]]) -> Prediction:
        from specter_runtime.calibration import TOKENS, calibrate
        from specter_runtime.prediction import WrittenText, predict, record

        drafted = prepared.draft.code if prepared.draft is not None else None
        kind = (coding_of(prepared.config), drafted)
        if kind not in self._calibrations:
            tell("measuring what this machine takes")
            options = self._options(TOKENS)
            self._calibrations[kind] = calibrate(
                prepared.loaded, prepared.config, options, self._prompts[0]
            )
        whole = tuple(
            WrittenText((*prompt, *text), len(prompt))
            for prompt, text in zip(self._prompts, texts, strict=True)
        )
        code = drafted or DRAFTLESS
        if (whole, code) not in self._traces:
            trace = record(prepared.loaded, code, whole, self._work.sampling)
            self._traces[whole, code] = trace
        return predict(prepared, self._traces[whole, code], self._calibrations[kind])
