"""Recording a paired trace: the target's text, then target and draft over the same tokens.

The text is written by the target, or given. Then the target reads it once, in one pass, and the
draft reads it once, both as if every token were already decided. One pass over the text gives every
depth and every window start; only the routes behind a rejected proposal stay an approximation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specter_runtime.capture_weights import SwappedWeights, Weights
from specter_runtime.checkpoint import Checkpoint
from specter_runtime.continuation import continue_prompt
from specter_runtime.experts import install
from specter_runtime.next_layer_gate import BlockInputs
from specter_runtime.prompts import Passage, encode
from specter_runtime.quantizer import DraftCode
from specter_runtime.routes import Route, recording
from specter_runtime.sampling import Sampling
from specter_traces import (
    Decoding,
    DraftInfo,
    DraftKind,
    Header,
    SequenceInfo,
    SpecterError,
    Trace,
    UsageError,
    concatenate,
)
from specter_traces.columns import narrow_ids
from specter_traces.statistics import repeated_share

_ROWS_AT_ONCE = 64
"""Positions whose whole distributions are compared at a time: bounds memory for large V."""


@dataclass(frozen=True)
class CaptureSettings:
    """What is recorded.

    `sampling` also defines the distribution of `accept_prob`; with greedy or given text it does
    not choose tokens. `new_tokens`: continuation length at most. `prompt_tokens`: leading tokens
    of a given text that count as prompt. `max_tokens`: where a given text is cut.
    """

    draft: DraftCode
    decoding: Decoding = Decoding.SAMPLED
    sampling: Sampling = field(default_factory=Sampling)
    new_tokens: int = 256
    prompt_tokens: int = 16
    max_tokens: int = 512

    def __post_init__(self) -> None:
        """UsageError for a length from which no window could start."""
        for name in ("new_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens <= self.prompt_tokens:
            raise UsageError(
                f"max_tokens must exceed the {self.prompt_tokens} prompt tokens, "
                f"got {self.max_tokens}"
            )


@dataclass(frozen=True)
class _Text:
    """One token sequence: a prompt of `prompt_length` tokens and what follows."""

    passage: Passage
    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class _Reading:
    """One model's pass over a text: logits [T, V] in FP32 and the route of every MoE layer."""

    logits: Tensor
    routes: list[Route]


class Recorder:
    """Target and draft of one checkpoint, ready to record one sequence after another."""

    def __init__(
        self, checkpoint: Checkpoint, settings: CaptureSettings, weights: Weights | None = None
    ) -> None:
        """Hook the experts and quantize the draft; SpecterError when the model has no MoE layer.

        `weights`: how to compute as target and as draft, where the experts have moved out already.
        """
        self._checkpoint = checkpoint
        self._settings = settings
        self._layers = install(checkpoint.model) if weights is None else weights.layers
        self._inputs = BlockInputs(self._layers)
        self._weights = SwappedWeights(self._layers, settings.draft) if weights is None else weights
        self._notes: set[str] = set()
        self._flips = 0

    def sequences(self, passages: Sequence[Passage]) -> Iterator[Trace]:
        """Record passages one by one; UsageError before the first if any cannot be recorded."""
        prompts = [self._tokenize(passage) for passage in passages]
        for index, (passage, tokens) in enumerate(zip(passages, prompts, strict=True)):
            yield self._record(self._write(passage, tokens, index))

    def join(
        self,
        parts: Sequence[Trace],
        name: str,
        *,
        source: str = "",
        licence: str = "",
        created_by: str = "",
    ) -> Trace:
        """All recorded sequences as one sealed trace called `name`."""
        first = parts[0].header
        header = Header(
            name=name,
            model=first.model,
            num_layers=first.num_layers,
            num_experts=first.num_experts,
            top_k=first.top_k,
            precision=self._checkpoint.precision,
            source=source,
            licence=licence,
            tokenizer_hash=self._checkpoint.tokenizer_hash,
            decoding=self._settings.decoding,
            draft=self._draft_info(),
            sequences=tuple(part.header.sequences[0] for part in parts),
            repetition=tuple(part.header.repetition[0] for part in parts),
            created_by=created_by,
            notes=self._all_notes(),
        )
        return concatenate(header, parts)

    def record_text(self, name: str, tokens: Sequence[int], prompt_length: int) -> Trace:
        """Record one given text, of which the first `prompt_length` tokens are the prompt."""
        passage = Passage(name, "", "", tuple(tokens))
        return self._record(_Text(passage, list(tokens), prompt_length))

    def _tokenize(self, passage: Passage) -> list[int]:
        tokens = encode(passage, self._checkpoint)
        if self._settings.decoding is Decoding.TEXT:
            tokens = tokens[: self._settings.max_tokens]
        self._check_tokens(passage, tokens)
        return tokens

    def _check_tokens(self, passage: Passage, tokens: list[int]) -> None:
        settings, limit = self._settings, self._checkpoint.context_tokens
        following = 0 if settings.decoding is Decoding.TEXT else settings.new_tokens
        vocabulary = self._checkpoint.vocabulary
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise UsageError(
                f"passage {passage.name!r} has no token or one outside the vocabulary "
                f"of {vocabulary}"
            )
        if settings.decoding is Decoding.TEXT and len(tokens) <= settings.prompt_tokens:
            raise UsageError(
                f"text {passage.name!r} has {len(tokens)} tokens, all of them prompt: give a "
                f"longer text or lower --prompt-tokens ({settings.prompt_tokens})"
            )
        if limit is not None and len(tokens) + following > limit:
            raise UsageError(
                f"passage {passage.name!r} needs {len(tokens)} + {following} tokens, the context "
                f"of {self._checkpoint.name} is {limit}: shorten it or lower "
                f"{'--max-tokens' if not following else '--new-tokens'}"
            )

    def _write(self, passage: Passage, tokens: list[int], index: int) -> _Text:
        settings = self._settings
        if settings.decoding is Decoding.TEXT:
            return _Text(passage, tokens, settings.prompt_tokens)
        sampling = settings.sampling if settings.decoding is Decoding.SAMPLED else None
        new = continue_prompt(self._checkpoint.model, tokens, settings.new_tokens, sampling, index)
        return _Text(passage, tokens + new, len(tokens))

    def _record(self, text: _Text) -> Trace:
        with torch.inference_mode():
            with self._weights.target(), self._inputs.listening():
                target = self._read(text.tokens)
            with self._weights.target():
                gate = self._inputs.gate_ids()
            with self._weights.draft():
                draft = self._read(text.tokens)
            tokens = _token_columns(text, target, draft, self._settings.sampling)
        if self._settings.decoding is Decoding.GREEDY:
            self._flips += count_flips(text.tokens, text.prompt_length, tokens["target_tokens"])
        if gate is None:
            self._notes.add(f"no next-layer gate: {self._inputs.obstacle or 'one MoE layer'}")
        return self._assemble(text, target, draft, gate, tokens)

    def _read(self, tokens: list[int]) -> _Reading:
        with recording(self._layers) as routes:
            output = self._checkpoint.model(torch.tensor([tokens]), use_cache=False)
        silent = [layer.name for layer in self._layers if layer.index not in routes]
        if silent or any(route.ids.shape[0] != len(tokens) for route in routes.values()):
            raise SpecterError(
                f"{self._checkpoint.name}: {silent[0] if silent else 'an MoE layer'} did not route "
                "every token of a pass: this architecture cannot be captured"
            )
        ordered = [routes[layer.index] for layer in self._layers]
        return _Reading(output.logits[0].float(), ordered)

    def _assemble(
        self,
        text: _Text,
        target: _Reading,
        draft: _Reading,
        gate: Tensor | None,
        tokens: dict[str, NDArray[Any]],
    ) -> Trace:
        experts = self._num_experts
        return Trace(
            header=self._header(text, target),
            sequence_offsets=np.array([0, len(text.tokens)], np.int64),
            prompt_lengths=np.array([text.prompt_length], np.int32),
            target_ids=narrow_ids(_ids(target), experts),
            target_weights=_weights(target),
            draft_ids=narrow_ids(_ids(draft), experts),
            draft_weights=_weights(draft),
            gate_ids=None if gate is None else narrow_ids(gate.numpy(), experts),
            **tokens,
        )

    def _header(self, text: _Text, target: _Reading) -> Header:
        written = text.tokens[text.prompt_length :]
        return Header(
            name=text.passage.name,
            model=self._checkpoint.name,
            num_layers=len(self._layers),
            num_experts=self._num_experts,
            top_k=_common_top_k(target.routes),
            sequences=(SequenceInfo(text.passage.name, text.passage.domain),),
            repetition=(round(repeated_share(np.array(written)), 4),),
        )

    @property
    def _num_experts(self) -> int:
        return max(layer.num_experts for layer in self._layers)

    def _draft_info(self) -> DraftInfo:
        code = self._settings.draft
        kind = code.kind or DraftKind.SYMMETRIC
        return DraftInfo(code.name, code.bits, kind, code.group_size)

    def _all_notes(self) -> tuple[str, ...]:
        distribution = f"accept_prob at {self._settings.sampling.describe()}"
        counts = sorted({layer.num_experts for layer in self._layers})
        uneven = [f"layers have {counts} experts"] if len(counts) > 1 else []
        flips = [
            f"{self._flips} greedy tokens differ between decoding step by step and the one pass"
        ]
        return (distribution, *uneven, *(flips if self._flips else []), *sorted(self._notes))


def accept_probability(target: Tensor, draft: Tensor, sampling: Sampling) -> Tensor:
    """Chance that a token sampled from the draft is kept: sum over V of the smaller probability.

    target, draft: logits [T, V] of the two models at the same positions; the result is [T].
    """
    parts = [
        torch.minimum(
            sampling.probabilities(target[start : start + _ROWS_AT_ONCE]),
            sampling.probabilities(draft[start : start + _ROWS_AT_ONCE]),
        ).sum(-1)
        for start in range(0, len(target), _ROWS_AT_ONCE)
    ]
    return torch.cat(parts).clamp(0, 1)


def count_flips(tokens: Sequence[int], prompt_length: int, best: NDArray[np.int32]) -> int:
    """Tokens of a greedy continuation that one pass over the whole text would choose otherwise.

    Sums of one token and of many round differently; near ties flip. best: [T], the best token
    after each position in that pass.
    """
    written = np.asarray(tokens[prompt_length:])
    return int((best[prompt_length - 1 : -1] != written).sum())


def _token_columns(
    text: _Text, target: _Reading, draft: _Reading, sampling: Sampling
) -> dict[str, NDArray[Any]]:
    probability = accept_probability(target.logits, draft.logits, sampling)
    return {
        "next_tokens": np.array([*text.tokens[1:], -1], np.int32),
        "target_tokens": target.logits.argmax(-1).numpy().astype(np.int32),
        "draft_tokens": draft.logits.argmax(-1).numpy().astype(np.int32),
        "accept_prob": probability.numpy().astype(np.float16),
    }


def _common_top_k(routes: list[Route]) -> int:
    widths = sorted({route.ids.shape[-1] for route in routes})
    if len(widths) > 1:
        raise SpecterError(
            f"the MoE layers choose {widths} experts a token: a trace needs one top-k"
        )
    return widths[0]


def _ids(reading: _Reading) -> NDArray[np.int64]:
    _common_top_k(reading.routes)
    ids: NDArray[np.int64] = torch.stack([route.ids for route in reading.routes], 1).numpy()
    return ids


def _weights(reading: _Reading) -> NDArray[np.float16]:
    weights = torch.stack([route.weights.float() for route in reading.routes], 1)
    return weights.numpy().astype(np.float16)
