"""The committed cache: what was taken back leaves no trace, and what cannot be is not believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import PROMPT, WINDOW, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_checkpoints import VOCABULARY
from transformers.cache_utils import DynamicLayer

from specter_runtime.kv_cache import KvCache

FULL, SLIDING, CONVOLUTION, RECURRENT = "mixtral", "gpt-oss", "lfm2-moe", "jamba"
DEEPEST = WINDOW + 2

_windows = st.lists(
    st.integers(0, DEEPEST).flatmap(lambda depth: st.tuples(st.just(depth), st.integers(0, depth))),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forward(cache: KvCache, name: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return cache.forward(model_of(name), torch.tensor(tokens))


def read(name: str, tokens: list[int], record: bool = True) -> KvCache:
    """A cache into which `tokens` were read at once."""
    cache = KvCache(model_of(name), record=record)
    forward(cache, name, tokens)
    cache.keep(len(tokens), len(tokens))
    return cache


@pytest.mark.parametrize("name", [FULL, SLIDING, CONVOLUTION])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(prompt=st.integers(1, 2 * WINDOW), windows=_windows, seed=st.integers(0, 99))
def test_what_was_taken_back_was_never_there(
    name: str, prompt: int, windows: list[tuple[int, int]], seed: int
) -> None:
    """Draft, take it back, verify, keep a part: the cache is that of the kept tokens alone."""
    text = [(seed + 7 * place) % VOCABULARY for place in range(prompt)]
    cache = read(name, text)
    for depth, accepted in windows:
        drafted = [(seed + 11 * len(text) + 5 * step) % VOCABULARY for step in range(depth + 1)]
        for token in drafted[:depth]:
            forward(cache, name, [token])
        cache.keep(depth, 0)
        assert cache.tokens == len(text)
        forward(cache, name, drafted)
        cache.keep(depth + 1, accepted + 1)
        text += drafted[: accepted + 1]
    assert cache.tokens == len(text)
    straight = read(name, text)
    assert_same(cache, straight)
    after = forward(cache, name, [3, 1])
    assert torch.allclose(after, forward(straight, name, [3, 1]), atol=1e-4)


def assert_same(one: KvCache, other: KvCache) -> None:
    """Layer by layer the same tensors, up to rounding in passes of other shapes."""
    for mine, theirs in zip(one.layers(), other.layers(), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                kept = getattr(mine, name)
                assert kept.shape == value.shape, name
                assert torch.allclose(kept, value, atol=1e-4), name


def test_tokens_that_stay_are_not_the_ones_that_went() -> None:
    """The comparison above sees one wrong token."""
    cache, other = read(FULL, [*PROMPT, 3]), read(FULL, [*PROMPT, 4])
    with pytest.raises(AssertionError):
        assert_same(cache, other)


def test_a_sliding_window_stays_small() -> None:
    cache = read(SLIDING, [place % VOCABULARY for place in range(4 * WINDOW)])
    kept = {layer.keys.shape[2] for layer in cache.layers()}
    assert kept == {WINDOW - 1, 4 * WINDOW}


def test_bytes_are_those_of_the_tensors_and_the_peak_outlives_a_roll_back() -> None:
    cache = read(FULL, list(PROMPT))
    layers = len(cache.layers())
    token_bytes = 2 * 2 * 8 * 4  # keys and values of two heads of eight numbers in FP32
    assert cache.nbytes() == cache.peak_bytes == layers * len(PROMPT) * token_bytes
    forward(cache, FULL, [1, 2, 3])
    cache.keep(3, 0)
    forward(cache, FULL, [1])
    cache.keep(1, 1)
    assert cache.nbytes() == layers * (len(PROMPT) + 1) * token_bytes
    assert cache.peak_bytes == layers * (len(PROMPT) + 3) * token_bytes


# --- whom to believe


class WithoutCrop(DynamicLayer):  # type: ignore[no-untyped-call]
    """An architecture's own cache layer, whose `crop` is inherited."""


class WithCrop(DynamicLayer):  # type: ignore[no-untyped-call]
    """An architecture's own cache layer that knows what to take back."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)


@pytest.mark.parametrize(("kind", "obstacle"), [(WithoutCrop, "WithoutCrop"), (WithCrop, "")])
def test_a_foreign_layer_is_believed_only_with_a_crop_of_its_own(
    kind: type[DynamicLayer], obstacle: str
) -> None:
    cache = read(FULL, list(PROMPT))
    assert cache.obstacle() == ""
    cache.layers()[1].__class__ = kind
    assert cache.obstacle() == obstacle


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [
        (RECURRENT, "LinearAttention"),
        ("minimax-attention", "MiniMaxCache"),
        ("deepseek-v4", "DeepseekV4"),
        (SLIDING, None),
        (CONVOLUTION, None),
    ],
)
def test_what_cannot_be_taken_back_is_named(name: str, obstacle: str | None) -> None:
    cache = KvCache(model_of(name))
    forward(cache, name, list(PROMPT))
    assert (obstacle or "") in cache.obstacle() and bool(cache.obstacle()) == bool(obstacle)


def test_a_recurrent_cache_goes_forward_and_refuses_to_go_back() -> None:
    cache: Any = read(RECURRENT, list(PROMPT), record=False)
    expected = forward(read(RECURRENT, [*PROMPT, 1], record=False), RECURRENT, [2])
    forward(cache, RECURRENT, [1])
    with pytest.raises(RuntimeError, match="asked to forget"):
        cache.keep(1, 0)
    cache.keep(1, 1)
    assert cache.tokens == len(PROMPT) + 1
    assert torch.allclose(forward(cache, RECURRENT, [2]), expected, atol=1e-4)
