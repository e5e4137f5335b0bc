"""Simulate a setup: serve its requests one after the other on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from specter_sim.offload.decode import decode, prefill
from specter_sim.offload.journal import Journal
from specter_sim.offload.offloader import Offloader
from specter_sim.policies.state import ABSENT
from specter_sim.results import Result, Span
from specter_sim.setup import Request, Setup
from specter_sim.sim.account import conditions_of, counts_of, summarize
from specter_sim.sim.device import SimDevice
from specter_sim.sim.gpu import Gpu
from specter_sim.sim.host import HostMemory
from specter_sim.sim.link import LinkProcess
from specter_sim.sim.profile import with_profiled_depth
from specter_sim.sim.served import Served, decoded_of
from specter_sim.sim.traced_model import TracedModel, read_routes


@dataclass(frozen=True)
class Run:
    """A finished run with everything it was made of."""

    result: Result
    served: tuple[Served, ...]
    offloader: Offloader
    journals: tuple[Journal, ...]


def simulate(setup: Setup, timeline: list[Span] | None = None) -> Result:
    """Serve the setup's requests and return every metric.

    ``timeline``, when given, is filled with one span per operation and copy.
    """
    if setup.depth.name == "profile":
        setup = with_profiled_depth(setup, simulate)
    return World(setup, timeline).serve().result


class World:
    """The reference world: SimPy processes for link and host memory, one GPU stream."""

    def __init__(
        self, setup: Setup, timeline: list[Span] | None = None, *, journal: bool = False
    ) -> None:
        self.setup = setup
        self.env = simpy.Environment()
        self.gpu = Gpu(self.env, timeline)
        self.link = self._link(timeline)
        self.device = SimDevice(self.env, self.link)
        self.model = TracedModel(
            read_routes(setup.trace, setup.text.accepted.tolist(), "gate" in setup.prefetch.needs),
            setup.costs,
            self.gpu,
            demand_all=setup.demand_all,
        )
        self._timeline = timeline
        self._journals: list[Journal] | None = [] if journal else None
        self.offloader = self._new_offloader(setup.requests[0].begin)

    def serve(self) -> Run:
        """Serve every request to its end."""
        served = []
        for number, request in enumerate(self.setup.requests):
            if number > 0:
                self._between_requests(request)
            served.append(self._serve(request))
        requests = [
            decoded_of(self.setup, request, done)
            for request, done in zip(self.setup.requests, served, strict=True)
        ]
        result = summarize(conditions_of(self.setup), requests, self.device.now(), self.link.busy_s)
        journals = tuple(self._journals or ())
        return Run(result, tuple(served), self.offloader, journals)

    def _serve(self, request: Request) -> Served:
        began_s, grouped = self.device.now(), self.setup.config.experts.grouped
        if request.prompt_tokens:
            self.model.begin_prompt(request.begin, request.context, request.prompt_tokens)
            prefill(self.model, self.device, self.offloader, request.prompt_tokens, grouped=grouped)
            self.model.end_prompt()
        start_s, before = self.device.now(), counts_of(self.offloader.state)
        draft_s, compute_s = self.gpu.draft_s, self.gpu.compute_s
        resident = self._on_device()
        self.model.begin_request(request.begin, request.context, request.start, request.last)
        self.model.unions = []
        windows = decode(self.model, self.device, self.offloader, grouped=grouped)
        unions, self.model.unions = self.model.unions, None
        after = counts_of(self.offloader.state)
        return Served(
            began_s,
            start_s,
            tuple(windows),
            {name: after[name] - before[name] for name in after},
            self.gpu.draft_s - draft_s,
            self.gpu.compute_s - compute_s,
            unions,
            resident,
        )

    def _between_requests(self, request: Request) -> None:
        if self.setup.config.trace.between == "cold":
            self._drain()
            self.offloader = self._new_offloader(request.begin, self.offloader)
        else:
            self.offloader.begin_request()

    def _drain(self) -> None:
        """Let copies still under way finish; their slots are about to be forgotten."""
        self.device.on_completion = lambda: None
        while not self.link.idle:
            self.device.wait()
        self.device.poll()

    def _on_device(self) -> list[int]:
        residency = self.offloader.state.residency
        return [index for index, where in enumerate(residency) if where != ABSENT]

    def _new_offloader(self, position: int, before: Offloader | None = None) -> Offloader:
        journal = None
        if self._journals is not None:
            journal = Journal()
            self._journals.append(journal)
        return Offloader(self.setup.new_state(position), self.setup.rules, journal, before)

    def _link(self, timeline: list[Span] | None) -> LinkProcess:
        setup, host = self.setup, self.setup.machine.host
        experts = setup.shape.num_experts
        total = setup.shape.moe_layers * experts
        pinned = int(host.pinned_share(setup.plan.host_bytes) * total)
        return LinkProcess(
            self.env,
            setup.machine.link,
            HostMemory(self.env, host.memory_bytes_per_s),
            setup.costs.load_bytes,
            setup.costs.expand_per_load_s,
            pinned=lambda index: index < pinned,
            bounce_bytes_per_s=host.memory_bytes_per_s / 2,
            name=lambda index: f"layer {index // experts} expert {index % experts}",
            timeline=timeline,
        )
