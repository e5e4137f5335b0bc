"""Acceptance: greedy text is the target's text, sampled text follows the target's distribution.

The sampled rule is tested over whole windows: a Markov chain of five tokens as the target, another
as the draft, windows drafted, accepted and chained as in decoding. Broken rules fail the same test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

from specter_runtime.acceptance import Choice, accept_greedy, accept_sampled
from specter_runtime.sampling import Sampling, draw
from specter_traces import SpecterError

V = 5
"""Tokens of the vocabulary."""

Rule = Callable[[Sequence[int], Tensor, Tensor, torch.Generator], Choice]


def chain(seed: int, like: Tensor | None = None) -> Tensor:
    """Logits [V, V] of the next token after each token; near `like` where given."""
    noise = torch.randn(V, V, generator=torch.Generator().manual_seed(seed))
    return noise if like is None else like + noise


TARGET = chain(0)
DRAFT = chain(1, TARGET)

SAMPLINGS = {
    "untruncated": Sampling(),
    "top-k": Sampling(1.5, top_k=3),
    "top-p": Sampling(1.2, top_p=0.8),
    "top-k and top-p": Sampling(1.5, top_k=4, top_p=0.9),
}


def decode_text(
    rule: Rule, target: Tensor, draft: Tensor, depth: int, tokens: int, generator: torch.Generator
) -> list[int]:
    """At least `tokens` tokens after token 0, window by window; p and q are [V, V]."""
    text = [0]
    while len(text) <= tokens:
        proposals: list[int] = []
        for _ in range(depth):
            proposals.append(draw(draft[[*text, *proposals][-1]], generator))
        inputs = [text[-1], *proposals]
        choice = rule(proposals, draft[inputs[:-1]], target[inputs], generator)
        text += choice.tokens
    return text


def p_of_transitions(rule: Rule, sampling: Sampling, depth: int, tokens: int = 4000) -> float:
    """Chi-square over every (token, next token) of one long text."""
    target, draft = sampling.probabilities(TARGET), sampling.probabilities(DRAFT)
    generator = torch.Generator().manual_seed(depth)
    text = decode_text(rule, target, draft, depth, tokens, generator)
    counts = np.zeros((V, V))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    return p_value(counts, counts.sum(-1, keepdims=True) * target.double().numpy(), fitted=V)


def p_of_first_two(rule: Rule, sampling: Sampling, depth: int, texts: int = 1200) -> float:
    """Chi-square over the first two tokens of many texts, against their joint distribution."""
    target, draft = sampling.probabilities(TARGET), sampling.probabilities(DRAFT)
    generator = torch.Generator().manual_seed(depth)
    counts = np.zeros((V, V))
    for _ in range(texts):
        first, second = decode_text(rule, target, draft, depth, 2, generator)[1:3]
        counts[first, second] += 1
    joint = (target[0].unsqueeze(-1) * target).double().numpy()
    return p_value(counts, texts * joint, fitted=1)


def p_value(counts: NDArray[np.float64], expected: NDArray[np.float64], fitted: int) -> float:
    """p of a chi-square test; a token that cannot occur and does has p = 0.

    Rare cells are taken together, as the test needs. `fitted`: sums taken from the data.
    """
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    pooled = [(counts[rare].sum(), expected[rare].sum())] if expected[rare].sum() > 0 else []
    cells = [*zip(counts[~rare], expected[~rare], strict=True), *pooled]
    seen, wanted = np.array(cells).T
    wanted *= seen.sum() / wanted.sum()  # float32 probabilities sum to 1 within rounding
    return float(chisquare(seen, wanted, ddof=fitted - 1).pvalue)


def keep_everything(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    return Choice(len(proposals), [*proposals, draw(target[-1], generator)])


def keep_the_first(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    """The first proposal is never verified."""
    rest = accept_sampled(proposals[1:], draft[1:], target[1:], generator)
    return Choice(rest.accepted + 1, [proposals[0], *rest.tokens])


def correct_from_the_target(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    """The correction comes from p, not from what the draft left of it."""
    choice = accept_sampled(proposals, draft, target, generator)
    kept = choice.tokens[: choice.accepted]
    return Choice(choice.accepted, [*kept, draw(target[choice.accepted], generator)])


def bonus_of_one_row_early(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    """The bonus token is drawn from the row before the last."""
    choice = accept_sampled(proposals, draft, target, generator)
    if choice.accepted < len(proposals):
        return choice
    return Choice(choice.accepted, [*proposals, draw(target[-2], generator)])


def draw_again(
    proposals: Sequence[int], draft: Tensor, target: Tensor, generator: torch.Generator
) -> Choice:
    """A proposal stays only if the target draws the very same: exact, but accepts less."""
    tokens = []
    for proposal, row in zip(proposals, target, strict=False):
        tokens.append(draw(row, generator))
        if tokens[-1] != proposal:
            return Choice(len(tokens) - 1, tokens)
    return Choice(len(proposals), [*proposals, draw(target[-1], generator)])


BROKEN = (keep_everything, keep_the_first, correct_from_the_target, bonus_of_one_row_early)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_text_follows_the_target(name: str, depth: int) -> None:
    assert p_of_transitions(accept_sampled, SAMPLINGS[name], depth) > 0.01
    assert p_of_first_two(accept_sampled, SAMPLINGS[name], depth) > 0.01


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_fails_the_same_test(broken: Rule, name: str) -> None:
    assert p_of_transitions(broken, SAMPLINGS[name], depth=2, tokens=2000) < 1e-6
    assert p_of_first_two(broken, SAMPLINGS[name], depth=1, texts=600) < 1e-6


def test_the_test_does_not_ask_for_one_rule() -> None:
    assert p_of_transitions(draw_again, Sampling(), 2) > 0.01
    assert p_of_first_two(draw_again, Sampling(), 2) > 0.01


def test_acceptance_is_the_overlap() -> None:
    # No rule can keep more and stay exact: the sum over tokens of min(p, q).
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.25] * 4])
    q = torch.tensor([[0.1, 0.3, 0.2, 0.4]])
    generator = torch.Generator().manual_seed(0)
    kept = sum(
        accept_sampled([draw(q[0], generator)], q, p, generator).accepted for _ in range(3000)
    )
    assert kept / 3000 == pytest.approx(0.6, abs=0.03)


def test_a_draft_equal_to_the_target_is_always_kept() -> None:
    p = Sampling().probabilities(TARGET)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        first = draw(p[0], generator)
        second = draw(p[first], generator)
        choice = accept_sampled([first, second], p[[0, first]], p[[0, first, second]], generator)
        assert choice.accepted == 2 and choice.tokens[:2] == [first, second]


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    # Token 2 is rejected, and q lies nowhere below p: rounding makes such rows.
    p, q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.5, 1e-9]])
    assert float((p[0] - q[0]).clamp(min=0).sum()) == 0
    generator = torch.Generator().manual_seed(0)
    drawn = [accept_sampled([2], q, p, generator) for _ in range(50)]
    assert {choice.accepted for choice in drawn} == {0}
    assert {choice.tokens[0] for choice in drawn} == {0, 1}


def test_a_token_that_the_target_never_says_is_never_kept() -> None:
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert accept_sampled([0], q, p, generator) == Choice(0, [1])


def test_not_even_the_lowest_uniform_number_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowest(*_: object, **given: Any) -> Tensor:
        return torch.zeros((1,), dtype=given.get("dtype"))

    monkeypatch.setattr(torch, "rand", lowest)
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    assert accept_sampled([0], q, p, torch.Generator()) == Choice(0, [1])


def test_without_proposals_one_token_of_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.0, 0.0, 1.0]])
    assert accept_sampled([], torch.empty(0, 3), p, generator) == Choice(0, [2])
    assert accept_greedy([], p) == Choice(0, [2])


def test_the_same_seed_accepts_the_same() -> None:
    p, q = Sampling().probabilities(TARGET), Sampling().probabilities(DRAFT)
    texts = [
        decode_text(accept_sampled, p, q, 3, 60, torch.Generator().manual_seed(seed))
        for seed in (4, 4, 5)
    ]
    assert texts[0] == texts[1] != texts[2]


def one_hot(*tokens: int) -> Tensor:
    """Target logits that prefer one token each, [T+1, V]."""
    return torch.eye(V)[list(tokens)]


@pytest.mark.parametrize(
    ("proposals", "target", "accepted", "tokens"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3, 4]),  # all kept, and a bonus
        ([1, 2, 3], [1, 2, 4, 0], 2, [1, 2, 4]),  # the correction stands in for the third
        ([1, 2, 3], [4, 2, 3, 4], 0, [4]),  # the first is verified too
        ([1, 2, 3], [4, 1, 2, 3], 0, [4]),  # agreement one row later is none
        ([1, 1, 1], [1, 1, 1, 1], 3, [1, 1, 1, 1]),  # a repeated token is not a doubled one
        ([1, 2, 3], [1, 1, 3, 4], 1, [1, 1]),  # the correction repeats the token before it
        ([1, 2, 2], [1, 2, 3, 2], 2, [1, 2, 3]),  # what was rejected does not come back
        ([4], [4, 4], 1, [4, 4]),
    ],
)
def test_greedy_keeps_what_the_target_says(
    proposals: list[int], target: list[int], accepted: int, tokens: list[int]
) -> None:
    assert accept_greedy(proposals, one_hot(*target)) == Choice(accepted, tokens)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 7, 1000])
def test_greedy_windows_spell_the_target_s_text(depth: int, wrong_every: int) -> None:
    """The target says (7 * last + 3) mod 11; the draft is wrong at every so many positions."""
    text, wanted = [1], [1]
    while len(wanted) < 80:
        wanted.append((7 * wanted[-1] + 3) % 11)
    while len(text) < 60:
        proposals: list[int] = []
        for position in range(len(text), len(text) + depth):
            right = (7 * [*text, *proposals][-1] + 3) % 11
            proposals.append(right if position % wrong_every else (right + 1) % 11)
        inputs = torch.tensor([text[-1], *proposals])
        choice = accept_greedy(proposals, torch.eye(11)[(7 * inputs + 3) % 11])
        assert len(choice.tokens) == choice.accepted + 1 <= depth + 1
        text += choice.tokens
    assert text == wanted[: len(text)]


def test_of_equal_logits_the_lowest_id_wins() -> None:
    level = torch.zeros(2, V, dtype=torch.bfloat16)
    assert accept_greedy([0], level) == Choice(1, [0, 0])
    assert accept_greedy([1], level) == Choice(0, [0])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_give_no_token(broken: float) -> None:
    logits = one_hot(1, 2)
    logits[1, 3] = broken
    with pytest.raises(SpecterError, match="logits are not numbers"):
        accept_greedy([1], logits)
