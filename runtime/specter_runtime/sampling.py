"""How a token is drawn: temperature, then top-k, then top-p, then one uniform number.

The one definition of the distribution that generation follows, that acceptance compares target
and draft in, and that a captured trace's `accept_prob` is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_traces import SpecterError, UsageError

_COLDEST = 1e-30
"""A lower temperature is greedy as well, and would be zero in float32."""


@dataclass(frozen=True)
class Sampling:
    """A distribution over next tokens: all tokens unless `top_k` or `top_p` cut it."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """UsageError for a temperature, top-k or top-p from which nothing can be drawn."""
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"temperature must be above 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def shape(self, logits: Tensor) -> Tensor:
        """Logits [..., V] of the distribution that is sampled, -inf where nothing is.

        Of equal logits at the edge of top-k or top-p the lower token ids stay.
        """
        logits = logits.float()
        # From the best one down, so that a low temperature does not overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, _COLDEST)
        if self.top_k is None and self.top_p == 1:
            return scaled
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[..., self.top_k :] = -math.inf
        if self.top_p < 1:
            kept = ordered.softmax(-1)
            ordered[kept.cumsum(-1) - kept >= self.top_p] = -math.inf
        return torch.empty_like(scaled).scatter_(-1, order, ordered)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] that sum to 1; SpecterError unless the logits are numbers."""
        probabilities = self.shape(logits).softmax(-1)
        require_numbers(probabilities.sum(-1))
        return probabilities

    def describe(self) -> str:
        """ "temperature 0.7, top-k 20, top-p 0.8"; top-k is left out where there is none."""
        top_k = "" if self.top_k is None else f", top-k {self.top_k}"
        return f"temperature {self.temperature:g}{top_k}, top-p {self.top_p:g}"


def require_numbers(values: Tensor) -> None:
    """SpecterError when a logit, or what was computed from it, is infinite or not a number."""
    if not bool(values.isfinite().all()):
        raise SpecterError(
            "the model's logits are not numbers: its weights or its arithmetic are broken; "
            "verify the checkpoint, or compute in float32 (--dtype float32)"
        )


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """One token with probability in proportion to `weights` [V], from one uniform number."""
    reached = weights.double().cumsum(-1)
    uniform = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)
    # Rounding may carry the number to the very end, behind the last token of any weight.
    point = torch.minimum(uniform.to(reached.device) * reached[-1], reached[-1].nextafter(_ZERO))
    return int(torch.searchsorted(reached, point, right=True))


_ZERO = torch.zeros((), dtype=torch.float64)
