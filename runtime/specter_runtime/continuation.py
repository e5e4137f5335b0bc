"""Continuing a prompt with the target: greedy or sampled, the same text for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from specter_traces import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; `accept_prob` of a trace is over the same distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """UsageError for a temperature or top-p from which nothing can be drawn."""
        if not self.temperature > 0:
            raise UsageError(
                f"temperature must be above 0, got {self.temperature}: for greedy use --greedy"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def shape(self, logits: Tensor) -> Tensor:
        """Logits [..., V] of the distribution that is sampled: temperature, then top-p."""
        scaled = logits.float() / self.temperature
        if self.top_p == 1:
            return scaled
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = (before >= self.top_p).gather(-1, order.argsort(-1))
        return scaled.masked_fill(dropped, float("-inf"))


def continue_prompt(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling | None,
    index: int,
) -> list[int]:
    """At most `new_tokens` tokens after `prompt`; fewer when the model ends its text.

    Greedy without `sampling`. The text depends on the seed and `index` alone, not on how many
    other prompts were continued before.
    """
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens,
        do_sample=sampling is not None,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    processors = LogitsProcessorList([_Shape(sampling)] if sampling else [])
    ids = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed((sampling.seed if sampling else 0) * 1_000_003 + index)
        generate: Any = model.generate
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=processors,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class _Shape(LogitsProcessor):
    """Our one definition of temperature and top-p, inside transformers' generation."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._sampling.shape(scores)  # type: ignore[return-value]
