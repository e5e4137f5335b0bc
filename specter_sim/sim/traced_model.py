"""The model port played from a paired trace: routes are recorded, time comes from the costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specter_sim.hardware.costs import Costs
from specter_sim.setup.text import accepted_runs
from specter_sim.sim.gpu import Gpu
from specter_sim.types import DraftStep
from specter_traces import Trace


@dataclass(frozen=True)
class Routes:
    """A trace as plain lists, the fastest thing for the decode loop to index.

    Attributes:
        target: [position][layer] ids, ascending.
        draft: [position] flat indices over all layers; empty without a draft.
        gate: [position][layer] ids that layer's gate expects one layer early; layer 0 is empty.
        accepted_run: [position] proposals accepted in a row from here.
    """

    layers: int
    experts: int
    top_k: int
    target: list[list[list[int]]]
    draft: list[list[int]]
    gate: list[list[list[int]]]
    accepted_run: list[int]


def read_routes(trace: Trace, accepted: Sequence[bool], use_gate: bool) -> Routes:
    """The lists of a trace; ``accepted[p]`` says whether the proposal after input p is kept."""
    layers, experts = trace.num_layers, trace.num_experts
    target: list[list[list[int]]] = np.sort(trace.target_ids, axis=2).tolist()
    draft: list[list[int]] = []
    if trace.draft_ids is not None:
        first = experts * np.arange(layers, dtype=np.int64)
        flat = trace.draft_ids.astype(np.int64) + first[None, :, None]
        draft = flat.reshape(len(flat), -1).tolist()
    gate: list[list[list[int]]] = []
    if use_gate and trace.gate_ids is not None:
        gate = [[[], *row] for row in trace.gate_ids.tolist()]
    run = accepted_runs(accepted, trace.sequence_offsets.tolist())
    return Routes(layers, experts, trace.top_k, target, draft, gate, run)


class TracedModel:
    """One request: windows over recorded positions, each operation taking its modelled time.

    A window may run into positions that a rejection takes back; their routes are those recorded
    along the text, an approximation for drafts that went astray.
    """

    def __init__(self, routes: Routes, costs: Costs, gpu: Gpu, *, demand_all: bool) -> None:
        self._routes, self._costs, self._gpu = routes, costs, gpu
        self._demand_all = demand_all
        self._all = list(range(routes.experts))
        self._position = self._last = 0
        self._begin = self._context = 0
        self._tokens = 1
        self._union: list[int] = []
        self.unions: list[list[int]] | None = None

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self._routes.layers

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return self._routes.experts

    def begin_request(self, begin: int, context: int, position: int, last: int) -> None:
        """Decode from ``position`` to ``last`` (exclusive) of the text that starts at ``begin``.

        ``context`` is the number of KV tokens before ``begin``.
        """
        self._begin, self._context = begin, context
        self._position, self._last = position, last
        self._tokens = 1

    def begin_prompt(self, begin: int, context: int, tokens: int) -> None:
        """The next pass covers ``tokens`` prompt positions."""
        self.begin_request(begin, context, begin, begin + tokens)
        self._tokens = tokens

    def finished(self) -> bool:
        """Whether every token of the request is committed."""
        return self._position >= self._last

    def position(self) -> int:
        """Position of the uncached token."""
        return self._position

    def limit(self) -> int:
        """Tokens that may be drafted, so that the length comes out exactly."""
        return self._last - self._position - 1

    def draft(self, depth: int) -> Iterator[DraftStep]:
        """Draft forwards with the recorded routes."""
        self._tokens = depth + 1
        for step in range(1, depth + 1):
            seconds = self._costs.draft_step_s(self._cached() + step)
            self._gpu.draft(seconds, f"draft {step}")
            yield DraftStep(step, self._routes.draft[self._position + step - 1], seconds)

    def target_pass(self, visit: Callable[[int], object]) -> None:
        """Every layer's attention and router, each followed by its visit."""
        layer_s = self._costs.layer_s(self._tokens, self._cached() + self._tokens)
        for layer in range(self._routes.layers):
            self._gpu.compute(layer_s, f"layer {layer}")
            visit(layer)

    def route(self, layer: int) -> Sequence[int]:
        """The union of the window's routes."""
        self._union = self._union_of(layer)
        if self.unions is not None:
            self.unions.append(self._union)
        return self._all if self._demand_all else self._union

    def hints(self, layer: int) -> Sequence[int]:
        """What the next layer's gate expects for the window."""
        gate = self._routes.gate
        if not gate or layer + 1 >= self._routes.layers:
            return ()
        window = range(self._position, self._position + self._tokens)
        return sorted({expert for place in window for expert in gate[place][layer + 1]})

    def run(self, layer: int, experts: Sequence[int]) -> None:
        """One grouped launch over resident experts; routes are shared evenly over the union."""
        used = len(experts)
        if self._demand_all:
            used = len(set(experts).intersection(self._union))
        routes = self._tokens * self._routes.top_k * used / len(self._union)
        seconds = self._costs.experts_s(used, routes)
        self._gpu.compute(seconds, f"{used} experts of layer {layer}")

    def verify(self) -> int:
        """Head and acceptance; moves on by what was accepted and one more token."""
        self._gpu.compute(self._costs.fixed_s(self._tokens, self._cached()), "head")
        depth = self._tokens - 1
        accepted = min(depth, self._routes.accepted_run[self._position])
        self._position += accepted + 1
        self._tokens = 1
        return accepted

    def end_prompt(self) -> None:
        """Dense layers of a prompt pass, and its head."""
        self._gpu.compute(self._costs.prompt_s(self._tokens, self._cached()), "head")

    def _union_of(self, layer: int) -> list[int]:
        target, position = self._routes.target, self._position
        if self._tokens == 1:
            return target[position][layer]
        rows = target[position : position + self._tokens]
        return sorted({expert for row in rows for expert in row[layer]})

    def _cached(self) -> int:
        return self._context + self._position - self._begin
