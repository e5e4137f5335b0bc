"""Continuing a prompt with the target: greedy or sampled, the same text for the same seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from specter_runtime.sampling import Sampling


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
    """Our one definition of the sampled distribution, inside transformers' generation."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._sampling.shape(scores)  # type: ignore[return-value]
