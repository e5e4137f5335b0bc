"""One request under way: what it is measured by, and whether it can be run at all."""

from __future__ import annotations

from collections.abc import Sequence

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.devices import LiveDevice
from specter_runtime.live_model import LiveModel
from specter_sim.offload.decode import Window
from specter_sim.offload.offloader import Offloader
from specter_sim.policies.state import ABSENT
from specter_sim.sim.account import counts_of
from specter_sim.sim.served import Served
from specter_traces.errors import UsageError


class Request:
    """Clock and counters as they stood when the request, and then its decoding, began."""

    def __init__(self, device: LiveDevice, offloader: Offloader, model: LiveModel) -> None:
        self.windows: list[Window] = []
        self.began_s = device.now()
        self._device, self._offloader, self._model = device, offloader, model
        self.begin_decoding()

    def begin_decoding(self) -> None:
        """The prompt is read."""
        state, watch = self._offloader.state, self._model.stopwatch
        self._start_s = self._device.now()
        self._counts = counts_of(state)
        self._draft_s, self._compute_s = watch.draft_s, watch.compute_s
        self._resident = [i for i, where in enumerate(state.residency) if where != ABSENT]
        self._unions: list[list[int]] = []
        self._model.unions = self._unions

    def served(self) -> Served:
        """What the windows so far come to."""
        after, watch = counts_of(self._offloader.state), self._model.stopwatch
        layers = self._model.layers
        return Served(
            self.began_s,
            self._start_s,
            tuple(self.windows),
            {name: after[name] - before for name, before in self._counts.items()},
            watch.draft_s - self._draft_s,
            watch.compute_s - self._compute_s,
            self._unions[: len(self.windows) * layers],
            self._resident,
        )


def stops_of(checkpoint: Checkpoint) -> frozenset[int]:
    """The tokens that end a text."""
    ends = checkpoint.model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def check_request(
    checkpoint: Checkpoint, prompt: Sequence[int], new_tokens: int, planned_tokens: int
) -> None:
    """UsageError for a prompt that the model cannot read, or that memory was not planned for."""
    vocabulary, limit = checkpoint.vocabulary, checkpoint.context_tokens
    if new_tokens < 1:
        raise UsageError(f"a request writes at least 1 token, got {new_tokens}")
    if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise UsageError(f"the prompt has no token, or one outside the vocabulary of {vocabulary}")
    tokens = len(prompt) + new_tokens
    if limit is not None and tokens > limit:
        raise UsageError(
            f"{len(prompt)} prompt tokens and {new_tokens} new ones exceed the context of "
            f"{checkpoint.name}, {limit} tokens: shorten the prompt or lower --new-tokens"
        )
    if tokens > planned_tokens:
        raise UsageError(
            f"KV memory was planned for {planned_tokens} tokens and this request needs {tokens}: "
            "raise --context, shorten the prompt or lower --new-tokens"
        )
