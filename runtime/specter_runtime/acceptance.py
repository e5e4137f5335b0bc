"""Which drafted tokens stay, and the one token that the target adds after them.

Greedy: the text is the target's own greedy text. Sampled: every token follows the target's
distribution exactly, whatever the draft proposes (speculative sampling, arXiv 2211.17192 and
2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specter_runtime.sampling import draw, require_numbers

_NO_MASS = 1e-6
"""Below this the residual of two float32 distributions is rounding, not a difference."""


class Choice(NamedTuple):
    """What one window commits: `accepted` proposals, then the correction or bonus token."""

    accepted: int
    tokens: list[int]


def accept_greedy(proposals: Sequence[int], target: Tensor) -> Choice:
    """Keep proposals while they are the target's best token; then its best token after them.

    target: logits [T+1, V], row j after proposal j (row 0 after the last committed token); of
    equal logits the lowest id counts as the best. SpecterError when the logits are not numbers.
    """
    assert len(target) == len(proposals) + 1
    best, chosen = target.max(-1)
    require_numbers(best)
    own: list[int] = chosen.tolist()
    accepted = _leading([mine == theirs for mine, theirs in zip(own, proposals, strict=False)])
    return Choice(accepted, own[: accepted + 1])


def accept_sampled(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    """Keep a proposal with probability min(1, p/q); replace the first that falls.

    The correction is drawn from max(p - q, 0), or from p where that has no mass; after full
    acceptance the bonus token is drawn from p.

    draft: q, [T, V], the distributions that the proposals were drawn from. target: p, [T+1, V].
    """
    assert len(draft) == len(proposals) == len(target) - 1
    accepted = _leading(_kept(proposals, draft, target, generator))
    rest = target[accepted]
    if accepted < len(proposals):
        rest = _residual(rest, draft[accepted])
    return Choice(accepted, [*proposals[:accepted], draw(rest, generator)])


def _kept(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> list[bool]:
    """Whether each proposal would stay if all before it did."""
    if not proposals:
        return []
    tokens = torch.tensor(proposals, device=target.device).unsqueeze(-1)
    q = draft.gather(-1, tokens).squeeze(-1)
    p = target[:-1].gather(-1, tokens).squeeze(-1)
    uniform = torch.rand(len(proposals), generator=generator, device=generator.device)
    kept: list[bool] = (uniform.to(p.device) * q < p).tolist()
    return kept


def _residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest if float(rest.sum()) > _NO_MASS else p


def _leading(flags: Sequence[bool]) -> int:
    """How many flags are true before the first that is not."""
    return next((count for count, flag in enumerate(flags) if not flag), len(flags))
