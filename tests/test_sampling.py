"""The sampled distribution against arithmetic by hand, and transformers' own filters."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specter_runtime.sampling import Sampling, draw
from specter_traces import SpecterError, UsageError

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def probabilities(sampling: Sampling, logits: Tensor = LOGITS) -> list[float]:
    values: list[float] = sampling.probabilities(logits).tolist()
    return values


def test_temperature_sharpens() -> None:
    squares = [0.25, 0.09, 0.0225, 0.0025]
    wanted = [square / sum(squares) for square in squares]
    assert probabilities(Sampling(0.5)) == pytest.approx(wanted)
    assert probabilities(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05])


def test_the_cut_distribution_sums_to_one_again() -> None:
    assert probabilities(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0])
    assert probabilities(Sampling(top_p=0.7)) == pytest.approx([0.625, 0.375, 0, 0])


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # 0.6 is more than the first has of everything, less than it has of the first two.
    assert probabilities(Sampling(top_p=0.6)) == pytest.approx([0.625, 0.375, 0, 0])
    assert probabilities(Sampling(top_k=2, top_p=0.6)) == pytest.approx([1, 0, 0, 0])


def test_temperature_comes_first() -> None:
    # At temperature 0.5 the first token alone has 0.68 of everything.
    assert probabilities(Sampling(0.5, top_p=0.6)) == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 20, 0.8), (1.3, 5, 0.95)])
def test_equal_to_transformers_filters(temperature: float, top_k: int, top_p: float) -> None:
    scores = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 3
    theirs = scores
    for warper in (
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
    ):
        theirs = warper(torch.empty(7, 0, dtype=torch.long), theirs)
    ours = Sampling(temperature, top_k, top_p).probabilities(scores)
    assert torch.equal(ours > 0, theirs > -math.inf)
    assert torch.allclose(ours, theirs.softmax(-1), atol=1e-6)


def test_of_equal_logits_the_lower_ids_stay() -> None:
    assert probabilities(Sampling(top_k=3), torch.zeros(5)) == pytest.approx([1 / 3] * 3 + [0, 0])


def test_a_top_k_beyond_the_vocabulary_cuts_nothing() -> None:
    assert probabilities(Sampling(top_k=9)) == probabilities(Sampling())


def test_the_lowest_temperature_is_greedy() -> None:
    assert probabilities(Sampling(1e-36), LOGITS * 1e6 + 5e6) == [1, 0, 0, 0]


def test_a_masked_token_has_no_probability() -> None:
    masked = torch.tensor([0.0, -math.inf, 0.0])
    assert probabilities(Sampling(0.5), masked) == pytest.approx([0.5, 0, 0.5])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token(broken: float) -> None:
    with pytest.raises(SpecterError, match="logits are not numbers"):
        Sampling().probabilities(torch.tensor([[0.0, 1.0], [0.0, broken]]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0"),
        ({"temperature": math.nan}, "temperature must be above 0 and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be above 0 and finite, got inf"),
        ({"top_k": 0}, "top-k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top-p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top-p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_settings_from_which_nothing_can_be_drawn(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**given)  # type: ignore[arg-type]


def test_draws_follow_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0, 0.0])
    drawn = torch.tensor([draw(weights, generator) for _ in range(3000)])
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert chisquare(counts[[1, 3, 4]].tolist(), [500, 1000, 1500]).pvalue > 0.01


def test_no_uniform_number_reaches_behind_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last number below 1 times the sum of the weights rounds to that sum.
    def highest(*_: object, **__: object) -> Tensor:
        return torch.tensor(1.0, dtype=torch.float64)

    monkeypatch.setattr(torch, "rand", highest)
    assert draw(torch.tensor([0.3, 0.7, 0.0, 0.0]), torch.Generator()) == 1


def test_the_lowest_uniform_number_draws_no_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lowest(*_: object, **__: object) -> Tensor:
        return torch.tensor(0.0, dtype=torch.float64)

    monkeypatch.setattr(torch, "rand", lowest)
    assert draw(torch.tensor([0.0, 0.0, 0.7, 0.3]), torch.Generator()) == 2


def test_the_same_seed_draws_the_same() -> None:
    weights = torch.ones(50)

    def text(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [draw(weights, generator) for _ in range(10)]

    assert text(1) == text(1) != text(2)
