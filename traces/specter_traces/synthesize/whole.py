"""Putting a synthetic trace together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specter_traces import statistics as stats
from specter_traces.columns import narrow_ids
from specter_traces.errors import UsageError, refuse_seed, shown
from specter_traces.header import Header, SequenceInfo
from specter_traces.synthesize.copied import Plan, copied_rows, plan_sequences, weight_rows
from specter_traces.synthesize.emit import emit
from specter_traces.synthesize.fit import fit
from specter_traces.trace import Trace

_MOST = {"layers": 1000, "experts": 65535, "tokens": 10_000_000}


def synthesize(
    trace: Trace, num_layers: int, num_experts: int, top_k: int, tokens: int, seed: int
) -> Trace:
    """Return a trace of another shape with the source's kind of routing, marked synthetic.

    It is paired if the source is and has gate predictions if the source has. `tokens` positions
    are cut into sequences as long as the source's. Raises UsageError when the shape or the
    source cannot serve.
    """
    _check_request(trace, num_layers, num_experts, top_k, tokens, seed)
    generator = np.random.default_rng(seed)
    anchors = fit(trace, num_layers, num_experts, top_k, generator)
    plan = plan_sequences(trace, tokens)
    rows = copied_rows(trace, plan.lengths, generator)
    routes = emit(anchors, num_layers, top_k, plan, rows, generator)
    columns: dict[str, Any] = {
        name: narrow_ids(ids, num_experts) for name, ids in routes.items() if ids is not None
    }
    for name in ("target_weights", "draft_weights"):
        if getattr(trace, name) is not None:
            columns[name] = weight_rows(trace, name, num_layers, top_k, tokens, generator)
    return Trace(
        header=_header(trace, num_layers, num_experts, top_k, plan, seed),
        sequence_offsets=np.cumsum([0, *plan.lengths], dtype=np.int64),
        prompt_lengths=np.array(plan.prompts, np.int32),
        **columns,
        **rows.columns,
    ).sealed()


def _header(
    trace: Trace, num_layers: int, num_experts: int, top_k: int, plan: Plan, seed: int
) -> Header:
    shape = f"{num_layers}x{num_experts} top-{top_k}"
    source = trace.header
    infos = source.sequences or tuple(
        SequenceInfo(str(index)) for index in range(trace.num_sequences)
    )
    return replace(
        source,
        name=f"synthetic-{source.name}-{num_layers}x{num_experts}-top{top_k}",
        model=f"synthetic {shape}",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        content_hash="",
        tokenizer_hash="",
        synthetic=True,
        synthesized_from=source.name,
        sequences=tuple(
            replace(infos[which], name=f"synthetic {number} like {infos[which].name}")
            for number, which in enumerate(plan.sources)
        ),
        repetition=(),
        created_by=f"specter_traces.synthesize, seed {seed}",
    )


def _check_request(
    trace: Trace, layers: int, experts: int, top_k: int, tokens: int, seed: int
) -> None:
    counts = {"layers": layers, "experts": experts, "top-k": top_k}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"a synthetic trace needs at least 1 for {name}, got {value}")
    for name, value in (counts | {"tokens": tokens}).items():
        if value > _MOST.get(name, value):
            raise UsageError(
                f"a synthetic trace has at most {_MOST[name]} {name}, got {shown(value)}"
            )
    refuse_seed(seed)
    if top_k > experts:
        raise UsageError(f"top-{top_k} of {experts} experts is impossible: lower k")
    if tokens < 1:
        raise UsageError(f"a synthetic trace needs at least 1 token, got {tokens}")
    if len(stats.starts_of(trace, 2)) < 100:
        raise UsageError(
            f"trace {trace.header.name!r} has {trace.num_positions} positions, too few to learn "
            "from: give one with at least 100 neighbouring pairs"
        )
