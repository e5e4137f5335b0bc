"""The text a run decodes: which sequences of a trace, how far, and what follows from them.

A text depends on the trace, the sections of a configuration about it, and whether a draft is
needed; a sweep over hardware, memory and policies makes it once a process, with everything derived
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specter_sim.config import RunConfig, TraceConfig
from specter_sim.hardware import ModelShape
from specter_sim.setup.sources import whole_trace
from specter_traces import DraftInfo, DraftKind, Trace
from specter_traces.errors import UsageError
from specter_traces.statistics import popularity, union_growth
from specter_traces.synthesize import with_assumed_draft

LEAST_TOKENS_PER_REQUEST = 64
DEFAULT_ASSUMED = 0.9
DEEPEST = 64
_PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


@dataclass(frozen=True)
class Request:
    """One sequence to serve: prompt positions, where decoding starts, and where it ends."""

    begin: int
    prompt_tokens: int
    context: int  # KV tokens before ``begin``
    start: int
    last: int


@dataclass(frozen=True, eq=False)
class Text:
    """The served sequences of a trace.

    Attributes:
        accepted: [T] whether the proposal after each position is kept.
        popularity: [L, E] uses of every expert in the sequences that are not served, as a share
            of positions; of all of them when every one is served.
    """

    trace: Trace
    requests: tuple[Request, ...]
    accepted: NDArray[np.bool_]
    popularity: NDArray[np.float64]

    @cached_property
    def context(self) -> int:
        """KV tokens at the end of the longest request."""
        return max((r.context + r.last - r.begin for r in self.requests), default=0)

    @cached_property
    def accepted_runs(self) -> list[int]:
        """For every position, how many proposals in a row are accepted before its text ends."""
        return accepted_runs(self.accepted.tolist(), self.trace.sequence_offsets.tolist())

    @cached_property
    def accepted_runs_array(self) -> NDArray[np.int64]:
        """The same as an array."""
        return np.array(self.accepted_runs, dtype=np.int64)

    @cached_property
    def unions(self) -> list[float]:
        """Experts a layer needs for a window, by depth; the longest measured stands for more."""
        growth = union_growth(self.trace, list(range(1, DEEPEST + 2))).mean(axis=1)
        longest = float(np.nanmax(growth))
        return [longest if np.isnan(union) else float(union) for union in growth]

    @cached_property
    def flat_target(self) -> NDArray[np.int64]:
        """The target's routes as flat indices, [T, L*K]."""
        return flat_indices(self.trace, self.trace.target_ids)

    @cached_property
    def sorted_target(self) -> NDArray[np.int16]:
        """Target ids, ascending in each row, [T, L, K]."""
        return np.sort(self.trace.target_ids, axis=2).astype(np.int16)

    @cached_property
    def flat_draft(self) -> NDArray[np.int32]:
        """The draft's routes as flat indices, [T, L*K]; empty without a draft."""
        if self.trace.draft_ids is None:
            return np.zeros((0, 0), dtype=np.int32)
        return flat_indices(self.trace, self.trace.draft_ids).astype(np.int32)

    @cached_property
    def gate(self) -> NDArray[np.int16]:
        """Gate predictions with an empty first layer, [T, L, K]; empty when there are none."""
        ids = self.trace.gate_ids
        if ids is None:
            return np.zeros((0, 0, 0), dtype=np.int16)
        first = np.zeros((len(ids), 1, self.trace.top_k), dtype=np.int16)
        return np.concatenate([first, ids.astype(np.int16)], axis=1)

    def future_uses(
        self, requests: Sequence[Request]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When every expert is used: slices by flat index, and ascending positions.

        Only positions that are served count; a use that never comes would hold its expert for
        ever.
        """
        served = np.concatenate([np.arange(r.begin, r.last) for r in requests])
        flat = self.flat_target[served]
        positions = np.repeat(served, flat.shape[1])
        order = np.argsort(flat.ravel(), kind="stable")
        total = self.trace.num_layers * self.trace.num_experts
        counts = np.bincount(flat.ravel(), minlength=total)
        return np.concatenate([[0], np.cumsum(counts)]), positions[order]


def accepted_runs(accepted: Sequence[bool], offsets: Sequence[int]) -> list[int]:
    """For every position, how many proposals in a row are accepted before its sequence ends."""
    runs = [0] * len(accepted)
    for begin, end in pairwise(offsets):
        run = 0
        for position in range(end - 2, begin - 1, -1):
            run = run + 1 if accepted[position] else 0
            runs[position] = run
    return runs


def flat_indices(trace: Trace, ids: NDArray[np.uint8] | NDArray[np.uint16]) -> NDArray[np.int64]:
    """Ids [T, L, K] as flat indices, [T, L*K]."""
    first = trace.num_experts * np.arange(trace.num_layers, dtype=np.int64)
    return (ids.astype(np.int64) + first[None, :, None]).reshape(len(ids), -1)


def text_of(config: RunConfig, shape: ModelShape, drafts: bool) -> Text:
    """The text of a configuration. Raises UsageError when its trace cannot serve."""
    return _text(whole_trace(config, shape), config.trace, drafts)


@lru_cache(maxsize=16)
def _text(whole: Trace, wanted: TraceConfig, drafts: bool) -> Text:
    chosen = served_sequences(wanted, whole)
    rest = sorted(set(range(whole.num_sequences)) - set(chosen))
    trace = whole.select(chosen)
    if drafts:
        trace = with_assumed(wanted, trace)
    uses = popularity(whole.select(rest) if rest else trace)
    return Text(trace, requests_of(wanted, trace), accepted_of(wanted, trace), uses)


def with_assumed(wanted: TraceConfig, trace: Trace) -> Trace:
    """The trace with an assumed draft, where one is asked for and none was recorded."""
    assumed = wanted.assumed_acceptance, wanted.assumed_recall
    if assumed == (None, None):
        return trace
    if trace.is_paired:
        raise UsageError(
            f"trace {wanted.path!r} has a draft, and one is to be assumed: take out "
            "trace.assumed_acceptance and trace.assumed_recall"
        )
    acceptance, recall = (DEFAULT_ASSUMED if value is None else value for value in assumed)
    return with_assumed_draft(trace, acceptance, recall, wanted.seed)


def served_sequences(wanted: TraceConfig, trace: Trace) -> list[int]:
    """Evenly spaced sequences of the wanted part, few enough that each decodes a useful stretch.

    Raises UsageError when the part has none.
    """
    available = trace.num_sequences
    if wanted.sequences is not None:
        available = min(available, wanted.sequences)
    of_part = range(available)[_PARTS[wanted.part]]
    if not of_part:
        raise UsageError(
            f'trace.part = "{wanted.part}" is every second sequence, and there are {available}: '
            'set trace.part = "all"'
        )
    count = max(1, min(len(of_part), wanted.tokens // LEAST_TOKENS_PER_REQUEST))
    return [of_part[i * len(of_part) // count] for i in range(count)]


def requests_of(wanted: TraceConfig, trace: Trace) -> tuple[Request, ...]:
    """One request a sequence; the tokens are spread evenly, as far as each one was recorded."""
    offsets, described = trace.sequence_offsets.tolist(), trace.header.sequences
    prompts = [max(0, length - 1) for length in trace.prompt_lengths.tolist()]
    starts = [begin + prompt for begin, prompt in zip(offsets[:-1], prompts, strict=True)]
    recorded = [end - start for end, start in zip(offsets[1:], starts, strict=True)]
    shares = spread(wanted.tokens, recorded)
    return tuple(
        Request(
            offsets[i],
            prompts[i],
            wanted.context + (described[i].unrecorded_prompt_tokens if described else 0),
            starts[i],
            starts[i] + share,
        )
        for i, share in enumerate(shares)
        if share > 0
    )


def spread(tokens: int, most: Sequence[int]) -> list[int]:
    """Shares of ``tokens``, as even as limits allow; what short ones cannot take goes on."""
    shares = [0] * len(most)
    left = min(tokens, sum(most))
    while left > 0:
        open_ones = [i for i, share in enumerate(shares) if share < most[i]]
        each = max(1, left // len(open_ones))
        for i in open_ones:
            take = min(each, most[i] - shares[i], left)
            shares[i] += take
            left -= take
    return shares


def accepted_of(wanted: TraceConfig, trace: Trace) -> NDArray[np.bool_]:
    """Whether the proposal after each position is kept: greedy agreement, or a seeded draw."""
    if not trace.is_paired:
        return np.zeros(trace.num_positions, dtype=np.bool_)
    mode = wanted.acceptance
    if mode == "auto":
        mode = "greedy" if trace.header.decoding == "greedy" else "sampled"
    if mode == "greedy" and trace.draft_tokens is not None and trace.target_tokens is not None:
        return np.asarray(trace.draft_tokens == trace.target_tokens)
    if trace.accept_prob is None:
        raise UsageError(
            f"trace {wanted.path!r} has no acceptance probabilities: set "
            'trace.acceptance = "greedy", or capture it anew'
        )
    draws = np.random.default_rng(wanted.seed).random(trace.num_positions)
    return np.asarray(draws < trace.accept_prob.astype(np.float64))


def draft_notes(config: RunConfig, recorded: DraftInfo) -> list[str]:
    """Where the recorded draft is not the one whose bytes are charged."""
    kind = DraftKind.BASE if config.experts.form == "coded-base" else DraftKind.SYMMETRIC
    if (recorded.bits, recorded.kind) == (config.experts.draft_bits, kind):
        return []
    return [
        f"acceptance and draft routes are those of a {recorded.bits}-bit {recorded.kind} draft, "
        f"bytes those of a {config.experts.draft_bits}-bit {kind} one"
    ]


def check_text(
    config: RunConfig, text: Text, shape: ModelShape, drafts: bool, needs_gate: bool
) -> None:
    """The trace must have the model's shape and what the policies need."""
    trace = text.trace
    of_trace = (trace.num_layers, trace.num_experts, trace.top_k)
    of_model = (shape.moe_layers, shape.num_experts, shape.top_k)
    if of_trace != of_model:
        raise UsageError(
            f"trace {config.trace.path!r} has {of_trace[0]} layers x {of_trace[1]} experts, "
            f"top-{of_trace[2]}; {shape.name} has {of_model[0]} x {of_model[1]}, "
            f'top-{of_model[2]}: choose the model it was recorded from, or trace.path = "synth"'
        )
    if not text.requests:
        raise UsageError(f"trace {config.trace.path!r} has no position to decode")
    if drafts and not trace.is_paired:
        raise UsageError(
            f"trace {config.trace.path!r} has no draft, and depth is "
            f'"{config.policy.depth}": set policy.depth = "never", or assume a draft with '
            "trace.assumed_acceptance"
        )
    if needs_gate and trace.gate_ids is None:
        raise UsageError(
            f"trace {config.trace.path!r} has no next-layer-gate predictions: "
            "choose another prefetch, or capture them"
        )


def text_notes(config: RunConfig, text: Text, drafts: bool) -> tuple[str, ...]:
    """What a reader of the result must know about its routes."""
    trace = text.trace
    notes, header = [], trace.header
    served = sum(request.last - request.start for request in text.requests)
    if served < config.trace.tokens:
        notes.append(f"{served} of {config.trace.tokens} tokens: the trace ends there")
    if header.synthetic:
        notes.append(f"synthetic routes, fitted to {header.synthesized_from or 'a real trace'}")
    if drafts and header.assumed_draft:
        notes.append("the draft is assumed, not recorded")
    if drafts and header.draft is not None:
        notes += draft_notes(config, header.draft)
    if not trace.prompt_lengths.any():
        notes.append("prompt routes were not recorded: TTFT leaves the prefill out")
    return tuple(notes)
