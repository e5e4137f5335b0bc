"""A model that is ready to decode: planned, scheduled, and measured as it goes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from specter_runtime.budget import Budget
from specter_runtime.checkpoint import Checkpoint, open_checkpoint
from specter_runtime.devices import DeviceKind, LiveDevice, make_copier
from specter_runtime.live_model import LiveModel
from specter_runtime.next_layer_gate import BlockInputs
from specter_runtime.options import SessionOptions
from specter_runtime.prepare import Prepared, check_config, prepare
from specter_runtime.request import Request, check_request, stops_of
from specter_runtime.sampling import Sampling
from specter_runtime.slots import Slots
from specter_runtime.stopwatch import Stopwatch
from specter_sim.bound import least_loads_of_run
from specter_sim.config import RunConfig
from specter_sim.offload.decode import Window, connect, decode_window, prefill
from specter_sim.offload.journal import Journal
from specter_sim.offload.offloader import Offloader
from specter_sim.policies.state import State
from specter_sim.results import Result, Span
from specter_sim.sim.account import Conditions, Decoded, summarize
from specter_sim.sim.served import Served, decoded
from specter_traces.errors import SpecterError

__all__ = ["Session", "SessionOptions"]


class Session:
    """One prepared model on one device. Requests are served one by one; residents stay.

    Sessions of one loaded model may take turns, but only in one thread: they share its layers.
    """

    def __init__(self, prepared: Prepared, *, owns_model: bool = False) -> None:
        """Make the device. Initial residents are in their slots before the first request.

        `owns_model`: closing the session gives the experts' host memory back.
        """
        self.prepared = prepared
        self._owns_model = owns_model
        self.spans: list[Span] = []
        self.journals: list[Journal] = []
        self._served: list[Served] = []
        self._run_s = 0.0
        self._peak_kv_bytes = 0
        self._closed = self._unfinished = False
        self._turn = 0
        self._request: Request | None = None
        options, timeline = prepared.options, self.spans if prepared.options.timeline else None
        budget = prepared.budget
        self.slots = Slots(prepared.store, budget.groups, budget.staging, poison=options.poison)
        self.device = LiveDevice(
            make_copier(options.device, prepared.link, options.faults),
            self.slots,
            prepared.link.queue_depth,
            check=options.check,
            timeline=timeline,
        )
        self.model = self._new_model(timeline)
        with torch.inference_mode():
            self.rules = prepared.rules()
        self.offloader = self._new_offloader(None)

    @classmethod
    def open(cls, model: str, config: RunConfig, options: SessionOptions) -> Session:
        """Load the model called `model` (see `open_checkpoint`) and prepare it."""
        check_config(config)  # before anything is loaded
        checkpoint = open_checkpoint(model, options.dtype, keep_coded=True)
        return cls.of(checkpoint, config, options)

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig, options: SessionOptions) -> Session:
        """A session of a loaded model, whose experts move into the session's store."""
        return cls(prepare(checkpoint, config, options), owns_model=True)

    @property
    def checkpoint(self) -> Checkpoint:
        """The loaded model."""
        return self.prepared.loaded.checkpoint

    @property
    def budget(self) -> Budget:
        """How device memory is divided."""
        return self.prepared.budget

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of this run."""
        return self.prepared.notes

    @property
    def windows(self) -> tuple[Window, ...]:
        """All windows decoded, over requests."""
        return tuple(window for served in self._served for window in served.windows)

    @property
    def peak_device_bytes(self) -> int:
        """The most device memory that was in use: KV as measured, scratch as planned."""
        fixed = self.budget.fixed
        return self.budget.total_bytes - fixed.kv_bytes + self._peak_kv_bytes

    @property
    def scheduling_s(self) -> float:
        """Seconds of target passes that went into deciding what to load and to run."""
        return self.model.stopwatch.scheduling_s

    def generate(
        self, prompt: Sequence[int], new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[list[int]]:
        """Tokens after `prompt` as they are committed, window by window; greedy without `sampling`.

        Ends after `new_tokens` tokens or the model's end-of-text token. A new request ends one that
        was not read to its end. UsageError for a prompt that cannot be run, SpecterError when the
        link or the arithmetic fails, or the session is closed.
        """
        self._require_open()
        tokens = [operator.index(token) for token in prompt]
        context = self.prepared.options.context_tokens
        check_request(self.checkpoint, tokens, new_tokens, context)
        return self._serve(tokens, new_tokens, sampling)

    def result(self) -> Result:
        """All metrics over the requests served so far; SpecterError when there are none."""
        if not self._served:
            raise SpecterError("nothing was decoded yet: there is no result")
        link = self.prepared.link
        immediate = self.prepared.options.device is DeviceKind.IMMEDIATE
        conditions = Conditions(
            self.budget.plan(),
            self.prepared.load_bytes,
            math.inf if immediate else link.bytes_per_s,
            notes=self.notes,
        )
        requests = [self._decoded(served) for served in self._served]
        return summarize(conditions, requests, self._run_s, self.device.link_busy_s)

    def forget_requests(self) -> None:
        """Start counting anew; residents and what rules have learned stay."""
        self._served, self._run_s = [], 0.0
        self.device.link_busy_s = self.model.stopwatch.scheduling_s = 0.0
        self.spans.clear()

    def close(self) -> None:
        """Stop the link. Nothing can be generated any more; results stay."""
        self._closed = True
        self.device.close()
        if self._owns_model:
            self.prepared.loaded.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _new_model(self, timeline: list[Span] | None) -> LiveModel:
        prepared = self.prepared
        gate = BlockInputs(prepared.loaded.network.layers) if prepared.policies.uses_gate else None
        return LiveModel(
            prepared.loaded.network,
            self.slots,
            self.device,
            prepared.draft,
            gate=gate,
            demand_all=prepared.policies.streams,
            rolls_back=not prepared.survey.obstacle,
            stopwatch=Stopwatch(self.device.now, lambda: self.device.waited_s, timeline),
        )

    def _new_offloader(self, before: Offloader | None) -> Offloader:
        journal = None
        if self.prepared.options.journal:
            journal = Journal()
            self.journals.append(journal)
        state: State = self.prepared.state()
        for slot, index in enumerate(state.occupant):
            if index >= 0:
                self.slots.place(slot, index)
        offloader = Offloader(state, self.rules, journal, before)
        connect(self.device, offloader)
        return offloader

    def _serve(
        self, prompt: list[int], new_tokens: int, sampling: Sampling | None
    ) -> Iterator[list[int]]:
        turn = self._begin()
        self._request = request = Request(self.device, self.offloader, self.model)
        self.model.begin_request(prompt, new_tokens, sampling, stops_of(self.checkpoint))
        try:
            self._read_prompt()
            request.begin_decoding()
            for tokens in self._decode(request, len(prompt)):
                self._unfinished = False  # between windows nothing is held: here one may stop
                yield tokens
                self._require_turn(turn)
                self._unfinished = True
            self._unfinished = False
        finally:
            self._finish(request)

    def _begin(self) -> int:
        """The number of a new request. What one that broke off has left is cleared away."""
        self._require_open()
        if self._request is not None:
            self._finish(self._request)
        if self._unfinished:
            self._start_over()
        elif self._turn:
            self.offloader.begin_request()
        self._unfinished = True
        self._turn += 1
        return self._turn

    def _require_open(self) -> None:
        if self._closed:
            raise SpecterError("the session is closed: open a new one")

    def _require_turn(self, turn: int) -> None:
        self._require_open()
        if turn != self._turn:
            raise SpecterError(
                "another request was started on this session: this one has ended; read each "
                "request to its end, or open a second session"
            )

    def _read_prompt(self) -> None:
        """Target passes over the prompt but its last token, which starts the first window."""
        prepared, model = self.prepared, self.model
        # Recurrent states of some architectures are only right when a prompt is read at once.
        chunk = model.uncached() if prepared.survey.obstacle else prepared.options.chunk_tokens
        grouped = prepared.config.experts.grouped
        while model.uncached() > 1:
            tokens = min(chunk, model.uncached() - 1)
            with torch.inference_mode():
                model.begin_prompt(tokens)
                prefill(model, self.device, self.offloader, tokens, grouped=grouped)
                model.end_prompt()

    def _decode(self, request: Request, read: int) -> Iterator[list[int]]:
        grouped = self.prepared.config.experts.grouped
        while not self.model.finished():
            with torch.inference_mode():
                window = decode_window(self.model, self.device, self.offloader, grouped)
            request.windows.append(window)
            text = self.model.text()
            yield text[read:]
            read = len(text)

    def _finish(self, request: Request) -> None:
        """Count a request, once, as far as it came."""
        if request is not self._request:
            return
        self._request = None
        self._peak_kv_bytes = max(self._peak_kv_bytes, self.model.kv.peak_bytes)
        self._run_s += self.device.now() - request.began_s
        if request.windows:
            self._served.append(request.served())

    def _start_over(self) -> None:
        """A request broke off: nothing is held, loading or resident any more."""
        self.device.abandon()
        self.offloader = self._new_offloader(self.offloader)

    def _decoded(self, served: Served) -> Decoded:
        store = self.prepared.store
        loads = least_loads_of_run(
            served.unions, self.budget.groups, store.layers, max(store.experts), served.resident
        )
        return decoded(served, loads, served.draft_s + served.compute_s)
