"""The model port of the decode loop, played by a real transformer.

Draft and target are one network: router, attention, shared experts, norms, head and the committed
KV cache are shared by construction; only where an expert's weights come from differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_runtime.acceptance import Choice, accept_greedy, accept_sampled
from specter_runtime.devices import LiveDevice
from specter_runtime.draft_weights import DraftWeights
from specter_runtime.experts import ExpertLayer, running
from specter_runtime.kv_cache import KvCache
from specter_runtime.next_layer_gate import BlockInputs
from specter_runtime.passes import DraftPass, TargetPass
from specter_runtime.sampling import Sampling, draw
from specter_runtime.slots import Slots
from specter_runtime.stopwatch import Stopwatch
from specter_runtime.weight_table import Tables, answering
from specter_sim.types import DraftStep


@dataclass(frozen=True)
class Network:
    """A loaded model whose experts have moved out: the network, its MoE layers, their tables."""

    model: PreTrainedModel
    layers: tuple[ExpertLayer, ...]
    tables: Tables


class LiveModel:
    """One request at a time: a text, its cache, and the window being decoded."""

    def __init__(
        self,
        network: Network,
        slots: Slots,
        device: LiveDevice,
        draft: DraftWeights | None,
        *,
        gate: BlockInputs | None = None,
        demand_all: bool = False,
        rolls_back: bool = True,
        stopwatch: Stopwatch,
    ) -> None:
        """`gate`: whose hints to give. `demand_all`: stream layers whole, needed or not."""
        self.unions: list[list[int]] | None = None
        self.stopwatch = stopwatch
        self._network, self._slots, self._device = network, slots, device
        self._gate, self._demand_all, self._rolls_back = gate, demand_all, rolls_back
        self._draft_sources = None if draft is None else draft.sources()
        self._target_sources = slots.sources()
        self._draft = DraftPass(network.layers, slots.experts, device.serve)
        self._target = TargetPass(network.layers)
        self._extra = _last_logits_only(network.model)
        self._text: list[int] = []
        self._last = 0
        self._kv = KvCache(network.model, record=rolls_back)
        self._sampling: Sampling | None = None
        self._generator = torch.Generator()
        self._stops: frozenset[int] = frozenset()
        self._proposals: list[int] = []
        self._beliefs: list[Tensor] = []
        self._logits = torch.empty(0)
        self._prompt_pass = 0
        self._layer = -1
        self._left: set[int] = set()

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len(self._network.layers)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; of the largest, where layers differ."""
        return self._slots.experts

    @property
    def kv(self) -> KvCache:
        """The request's cache."""
        return self._kv

    def begin_request(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        sampling: Sampling | None,
        stops: frozenset[int],
    ) -> None:
        """Start a text: `prompt`, then at most `new_tokens` tokens or one of `stops`."""
        self._text, self._last = list(prompt), len(prompt) + new_tokens
        self._kv = KvCache(self._network.model, record=self._rolls_back)
        self._sampling, self._stops = sampling, stops
        self._generator.manual_seed(0 if sampling is None else sampling.seed)
        self._proposals, self._beliefs, self._prompt_pass = [], [], 0

    def begin_prompt(self, tokens: int) -> None:
        """The next target pass reads `tokens` known tokens."""
        self._prompt_pass = tokens

    def end_prompt(self) -> None:
        """The prompt's tokens are committed."""
        self._kv.keep(self._prompt_pass, self._prompt_pass)
        self._prompt_pass = 0

    def uncached(self) -> int:
        """Tokens of the text that no pass has read; the last one starts the next window."""
        return len(self._text) - self._kv.tokens

    def text(self) -> list[int]:
        """Prompt and everything committed."""
        return list(self._text)

    def finished(self) -> bool:
        """Whether the text has its length, or has ended."""
        return len(self._text) >= self._last

    def position(self) -> int:
        """Position of the next input in the text."""
        return self._kv.tokens

    def limit(self) -> int:
        """Tokens that may be drafted, so that the length comes out exactly; 0 without a draft."""
        if self._draft_sources is None or not self._rolls_back:
            return 0
        return self._last - len(self._text) - 1

    def draft(self, depth: int) -> Iterator[DraftStep]:
        """Draft on the committed prefix; its cache entries are taken back at the end."""
        assert self._draft_sources is not None
        token = self._text[-1]
        for step in range(1, depth + 1):
            with self.stopwatch.drafting(step) as timed:
                token = self._draft_one(token)
            self._proposals.append(token)
            if step == depth:
                self._kv.keep(depth, 0)
            yield DraftStep(step, self._draft.routes, timed.seconds)

    def target_pass(self, visit: Callable[[int], object]) -> None:
        """One target forward over the prompt's next tokens, or over the window."""
        if self._prompt_pass:
            begin = self._kv.tokens
            inputs = self._text[begin : begin + self._prompt_pass]
        else:
            inputs = [self._text[-1], *self._proposals]
        with self.stopwatch.verifying(len(inputs)) as timed:
            self._target.visit = timed.around(visit)
            self._logits = self._forward(inputs)

    def route(self, layer: int) -> Sequence[int]:
        """The union of experts the window needs in the visited layer, ascending."""
        union = self._target.run.union()
        if self.unions is not None:
            self.unions.append(union)
        self._left = set(union)
        if self._demand_all:
            return list(range(self._network.layers[layer].num_experts))
        return union

    def hints(self, layer: int) -> Sequence[int]:
        """What the next layer's router picks for what entered this one."""
        if self._gate is None:
            return ()
        with self.stopwatch.asking():
            return self._gate.next_choice(layer)

    def run(self, layer: int, experts: Sequence[int]) -> None:
        """Apply resident experts to the window's tokens."""
        used = [expert for expert in experts if expert in self._left]
        if not used:
            return
        run = self._target.run
        watched = self.stopwatch.applying(layer, len(used), run.routes(used))
        with watched, self._slots.lease(layer, used):
            if len(used) == len(self._left) and not run.began:
                run.run_all()
            else:
                run.run(used)
        self._left.difference_update(used)

    def verify(self) -> int:
        """Acceptance; commits what stays and one token of the target's own."""
        choice = self._choose()
        passed = len(self._proposals) + 1
        tokens = _until_stop(choice.tokens, self._stops)
        self._text += tokens
        if tokens[-1] in self._stops:
            self._last = len(self._text)
        self._kv.keep(passed, len(tokens))
        self._proposals, self._beliefs = [], []
        return len(tokens) - 1

    def _draft_one(self, token: int) -> int:
        assert self._draft_sources is not None
        self._draft.routes = []
        with running(self._draft), answering(self._network.tables, self._draft_sources):
            logits = self._call([token])[-1]
        if self._sampling is None:
            return int(logits.argmax())
        belief = self._sampling.probabilities(logits)
        self._beliefs.append(belief)
        return draw(belief, self._generator)

    def _forward(self, inputs: list[int]) -> Tensor:
        with running(self._target), answering(self._network.tables, self._target_sources):
            if self._gate is None:
                return self._call(inputs)
            with self._gate.listening():
                return self._call(inputs)

    def _call(self, inputs: list[int]) -> Tensor:
        """Logits [T, V] of a forward over `inputs` behind the cache; [1, V] in a prompt pass."""
        extra = self._extra if self._prompt_pass else {}
        return self._kv.forward(self._network.model, torch.tensor(inputs), **extra)

    def _choose(self) -> Choice:
        if self._sampling is None:
            return accept_greedy(self._proposals, self._logits)
        target = self._sampling.probabilities(self._logits)
        beliefs = torch.stack(self._beliefs) if self._beliefs else target[:0]
        return accept_sampled(self._proposals, beliefs, target, self._generator)


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and with the first stop."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens


def _last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """What to tell a forward of which only the last logits are wanted."""
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}
