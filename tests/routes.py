"""Small random routes and the runs over them, for the tests of schedule and simulator."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from toy_traces import best, falling_weights

from specter_sim.config import build, nest
from specter_sim.hardware.costs import Costs, Roofline
from specter_sim.offload.journal import Journal
from specter_sim.offload.offloader import Offloader, Rules
from specter_sim.offload.residency import access, arrived, reserve
from specter_sim.policies import EVICTION, PREFETCH, paper_planner
from specter_sim.policies.depth import FIXED
from specter_sim.policies.eviction import free_slot
from specter_sim.policies.state import State, group_of
from specter_sim.setup import Setup, resolve
from specter_sim.sim import Run, World
from specter_sim.types import Copied, Load
from specter_traces import Decoding, DraftInfo, Header, SequenceInfo, Trace, save

_FOLDER = tempfile.TemporaryDirectory(prefix="specter-routes-")

# Policies that run on a paired trace with gate predictions; "stream" needs the global layout.
EVICTIONS = tuple(EVICTION)
PREFETCHES = tuple(name for name in PREFETCH if name != "stream")
DRAFTLESS = tuple(name for name in PREFETCHES if "paired" not in PREFETCH[name].needs)


def random_trace(
    tokens: int = 40,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    *,
    sequences: int = 1,
    prompt: int = 0,
    acceptance: float = 0.8,
    fidelity: float = 0.8,
    locality: float = 0.7,
    seed: int = 0,
) -> Trace:
    """A paired trace whose routes drift, whose draft copies most of them, and whose gate errs.

    Args:
        tokens: positions of each sequence.
        prompt: leading positions of each that are its prompt.
        acceptance: share of positions where the draft proposes the target's token.
        fidelity: share of positions and layers where the draft routes like the target.
        locality: how much of a router's score carries over to the next position.
    """
    rng = np.random.default_rng(seed)
    total = tokens * sequences
    score = rng.standard_normal((total, layers, experts))
    for place in range(1, total):
        score[place] = locality * score[place - 1] + (1 - locality) * 2 * score[place]
    ids = best(score, top_k)
    other = best(rng.standard_normal(score.shape), top_k)
    same = rng.random((total, layers, 1)) < fidelity
    return paired_trace(
        ids,
        np.where(same, ids, other),
        rng.random(total) < acceptance,
        experts,
        gate_ids=np.where(same, ids, other)[:, 1:] if layers > 1 else None,
        sequences=sequences,
        prompt=prompt,
    )


def paired_trace(
    target_ids: Any,
    draft_ids: Any,
    accepted: Any,
    experts: int,
    *,
    gate_ids: Any = None,
    sequences: int = 1,
    prompt: int = 0,
) -> Trace:
    """A paired greedy trace of the given routes [T, L, K]; ``accepted`` [T] by proposal."""
    ids = np.asarray(target_ids, np.uint8)
    total, layers, top_k = ids.shape
    kept = np.broadcast_to(np.asarray(accepted, bool), (total,))
    tokens = total // sequences
    return Trace(
        header=Header(
            "routes",
            "routes-moe",
            layers,
            experts,
            top_k,
            decoding=Decoding.GREEDY,
            draft=DraftInfo("routes-draft", 4),
            sequences=tuple(SequenceInfo(f"s{i}") for i in range(sequences)),
        ),
        sequence_offsets=np.arange(sequences + 1, dtype=np.int64) * tokens,
        prompt_lengths=np.full(sequences, prompt, np.int32),
        target_ids=ids,
        target_weights=falling_weights(ids.shape),
        draft_ids=np.asarray(draft_ids, np.uint8),
        draft_weights=falling_weights(ids.shape),
        next_tokens=np.zeros(total, np.int32),
        target_tokens=np.zeros(total, np.int32),
        draft_tokens=np.where(kept, 0, 1).astype(np.int32),
        accept_prob=np.full(total, 0.5, np.float16),
        gate_ids=None if gate_ids is None else np.asarray(gate_ids, np.uint8),
    )


def model_file(trace: Trace) -> str:
    """A config.json of a small Qwen3-MoE with the trace's shape."""
    header = trace.header
    shape = (header.num_layers, header.num_experts, header.top_k)
    path = Path(_FOLDER.name) / "routes-moe-{}x{}-top{}".format(*shape) / "config.json"
    if not path.exists():
        path.parent.mkdir()
        path.write_text(json.dumps(_model_config(*shape)))
    return str(path)


def _model_config(layers: int, experts: int, top_k: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def setup_of(trace: Trace, **settings: Any) -> Setup:
    """A run of the trace. Settings are configuration keys with ``__`` for the dot.

    Every recorded token is decoded, rounds are allowed, and there are three slots a layer unless
    a setting says otherwise.
    """
    sealed = trace.sealed()
    path = Path(_FOLDER.name) / f"{sealed.header.content_hash}.safetensors"
    if not path.exists():
        save(sealed, path)
    defaults = {
        "model": model_file(trace),
        "trace.path": str(path),
        "trace.tokens": max(64 * trace.num_sequences, trace.num_positions),
        "memory.allow_rounds": True,
        "memory.slots": 3,
    }
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve(build(nest(defaults), nest(given)))


def run_of(trace: Trace, **settings: Any) -> Run:
    """Serve a trace with a journal."""
    return serve(setup_of(trace, **settings))


def serve(setup: Setup) -> Run:
    """Serve a setup with a journal."""
    return World(setup, journal=True).serve()


def fixed_costs(
    setup: Setup,
    *,
    draft_s: float = 0.0,
    layer_s: float = 0.0,
    end_s: float = 0.0,
    expert_s: float = 0.0,
    load_bytes: int = 1_000_000,
) -> Setup:
    """The setup with round costs: seconds a draft step, a layer, a head, an expert's use."""
    costs = Costs(
        draft=_constant(draft_s),
        layer=_constant(layer_s),
        dense=_constant(0.0),
        end=_constant(end_s),
        route_s=0.0,
        use_s=0.0,
        group_launch_s=0.0,
        expert_launch_s=expert_s,
        expand_per_use_s=0.0,
        expand_per_load_s=0.0,
        load_bytes=load_bytes,
        slot_bytes=load_bytes,
        has_draft=True,
    )
    return replace(setup, costs=costs)


def with_link(
    setup: Setup,
    bytes_per_s: float = 1e9,
    latency_s: float = 0.0,
    queue_depth: int = 1,
    host_bytes_per_s: float = 1e30,
    granularity_bytes: int = 1 << 40,
) -> Setup:
    """The setup on another link, without the limits of a catalogue machine."""
    machine = setup.machine
    link = replace(
        machine.link,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        queue_depth=queue_depth,
        granularity_bytes=granularity_bytes,
    )
    host = replace(machine.host, memory_bytes_per_s=host_bytes_per_s)
    return replace(setup, machine=replace(machine, link=link, host=host))


def _constant(seconds: float) -> Roofline:
    return Roofline(0.0, 0.0, 0.0, 0.0, seconds, 0.0, 0.0)


def unions(trace: Trace, begin: int, tokens: int) -> list[set[int]]:
    """The experts each layer needs for a window, by layer."""
    rows = trace.target_ids[begin : begin + tokens]
    return [set(rows[:, layer].ravel().tolist()) for layer in range(trace.num_layers)]


def loads_of(run: Run) -> list[Any]:
    """Every load a run started, in order, over all its journals."""
    entries = [entry for journal in run.journals for entry in journal]
    return [e.answer for e in entries if e.call == "next_load" and e.answer is not None]


def offloader_of(
    state: State,
    eviction: str = "lru",
    prefetch: str = "none",
    depth: int = 0,
    memory: tuple[float, ...] | None = None,
    journal: Journal | None = None,
) -> Offloader:
    """An offloader over a hand-made state, with default parameters of its rules."""
    defaults: dict[str, tuple[float, ...]] = {
        "popularity": (2.0,),
        "draft-early": (0.2,),
        "draft-late": (1.0,),
        "draft-first": (2.0,),
        "paper": tuple(paper_planner.new_memory(1e6)),
        "oracle": (1.0, 1.0, 0.0),
    }
    given = defaults.get(prefetch, ()) if memory is None else memory
    rules = Rules(EVICTION[eviction].rule, PREFETCH[prefetch].rule, FIXED, given, (float(depth),))
    return Offloader(state, rules, journal)


def drain(offloader: Offloader) -> list[Load]:
    """Start every load the offloader wants, without finishing any."""
    loads = []
    while (load := offloader.next_load()) is not None:
        loads.append(load)
    return loads


def finish(offloader: Offloader, loads: list[Load], seconds: float = 1e-3) -> None:
    """The loads arrive, in order."""
    for load in loads:
        offloader.copied(Copied(load, seconds))


def make_resident(offloader: Offloader, indices: list[int]) -> None:
    """Experts on the device before anything happens, in slots of their group."""
    s = offloader.state
    for index in indices:
        group = group_of(s, index)
        slot = free_slot(s, group)
        reserve(s, group, slot, index)
        arrived(s, index)
        access(s, index)
