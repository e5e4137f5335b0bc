"""The offloader: the schedule plus its rules, told and asked, with no idea what time it is.

Sans-I/O. A driver tells it what happened (``drafted``, ``demand``, ``release``, ``copied``,
``end_window``) and asks what to do (``begin_window``, ``next_load``, ``must_join``). The SimPy
world and the runtime are two drivers of this one class.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from specter_sim.offload import schedule
from specter_sim.offload.journal import Journal
from specter_sim.policies.depth import DepthRule
from specter_sim.policies.prefetch import PrefetchRule
from specter_sim.policies.state import LOADING, PREFETCHING, RESIDENT, State, VictimKey
from specter_sim.types import Copied, DraftStep, Load, LoadKind, WindowOutcome

_KINDS = (LoadKind.DEMAND, LoadKind.PREFETCH)


@dataclass(frozen=True)
class Rules:
    """The three choices of a schedule, with the memory they start from.

    A prefetch rule starts every request anew; a depth rule keeps what it learned for the run.
    """

    victim_key: VictimKey
    prefetch: PrefetchRule
    depth: DepthRule
    prefetch_memory: tuple[float, ...] = ()
    depth_memory: tuple[float, ...] = ()


class Offloader:
    """Decides which expert to copy next and which slot it takes."""

    def __init__(
        self,
        state: State,
        rules: Rules,
        journal: Journal | None = None,
        before: Offloader | None = None,
    ) -> None:
        """Start on a device in ``state``; ``before`` hands on what its depth rule has learned."""
        self.state = state
        self.rules = rules
        self.journal = journal
        self._key, self._prefetch, self._depth = rules.victim_key, rules.prefetch, rules.depth
        self._prefetch_memory: list[float] = []
        learned = rules.depth_memory if before is None else before._depth_memory
        self._depth_memory: list[float] = list(learned)
        self.begin_request()

    def begin_request(self) -> None:
        """A new prompt: prefetch estimates restart from their priors; residents stay."""
        self._prefetch_memory = list(self.rules.prefetch_memory)
        self._note("begin_request", (), None)

    def begin_window(self, position: int, limit: int) -> int:
        """How many tokens to draft in the window at ``position``; at most ``limit``."""
        depth = self._depth.choose(self._depth_memory, limit)
        end = schedule.window_end(self.state, position, depth)
        self._begin(position, depth, end)
        self._note("begin_window", (position, limit), depth)
        return depth

    def begin_pass(self, position: int, tokens: int) -> None:
        """A pass over ``tokens`` known tokens, as in prefill: nothing is drafted."""
        self._begin(position, tokens - 1, position + tokens)
        self._note("begin_pass", (position, tokens), None)

    def drafted(self, step: DraftStep) -> None:
        """A draft forward ended."""
        schedule.drafted(self.state, step.routes, 0, len(step.routes))
        self._prefetch.drafted(self.state, self._prefetch_memory, step.step, step.seconds)
        self._note("drafted", (step,), None)

    def demand(self, layer: int, experts: Sequence[int], hints: Sequence[int] = ()) -> None:
        """Hold the experts (ids in the layer) that a layer needs; absent ones will be loaded."""
        schedule.demand(self.state, layer, experts, len(experts), hints, len(hints))
        self._prefetch.routed(self.state, self._prefetch_memory)
        self._note("demand", (layer, tuple(experts), tuple(hints)), None)

    def release(self, index: int) -> None:
        """The window is done with this expert; its slot may be taken."""
        schedule.release(self.state, index)
        self._note("release", (index,), None)

    def next_load(self) -> Load | None:
        """What the link should copy next, None to idle. The slot is reserved from now on."""
        index, slot, kind, victim = schedule.next_load(self.state, self._key)
        load = Load(index, slot, _KINDS[kind], victim) if index >= 0 else None
        self._note("next_load", (), load)
        return load

    def copied(self, copied: Copied) -> None:
        """A load arrived."""
        schedule.copied(self.state, copied.load.expert, copied.load.kind)
        self._prefetch.copied(self.state, self._prefetch_memory, copied.load.kind, copied.seconds)
        self._note("copied", (copied,), None)

    def must_join(self) -> bool:
        """Whether verification has to wait for prefetches still under way."""
        join = self._prefetch.joins and self.state.counters[PREFETCHING] > 0
        self._note("must_join", (), join)
        return join

    def end_window(self, outcome: WindowOutcome) -> None:
        """The window was verified."""
        schedule.end_window(self.state)
        self._depth.ended(
            self._depth_memory,
            outcome.depth,
            outcome.accepted,
            outcome.draft_s,
            outcome.verify_s,
            outcome.demands,
            outcome.loads,
        )
        self._note("end_window", (outcome,), None)

    def end_pass(self) -> None:
        """A pass over known tokens is over."""
        schedule.end_window(self.state)
        self._note("end_pass", (), None)

    def put_hits_first(self, layer: int, experts: MutableSequence[int]) -> None:
        """Reorder a layer's experts in place: resident ones first, else as they were."""
        schedule.put_hits_first(self.state, layer, experts, len(experts))

    def is_resident(self, index: int) -> bool:
        """Whether the expert may be used now."""
        return self.state.residency[index] == RESIDENT

    def is_loading(self, index: int) -> bool:
        """Whether the expert is on its way."""
        return self.state.residency[index] == LOADING

    def _begin(self, position: int, depth: int, end: int) -> None:
        schedule.begin_window(self.state, position, depth, end)
        self._prefetch.began(self.state, self._prefetch_memory)

    def _note(self, call: str, args: tuple[object, ...], answer: object) -> None:
        if self.journal is not None:
            self.journal.record(call, args, answer)
