"""What one forward without experts tells of a model: top-k, cache, dense bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from toy_checkpoints import VOCABULARY, make

from specter_runtime.experts import install
from specter_runtime.kv_cache import KvCache
from specter_runtime.survey import Survey, survey
from specter_traces import SpecterError

SAMPLE = ("mixtral", "gpt-oss", "deepseek-v3", "lfm2-moe", "glm-moe-dsa", "gemma4", "jamba")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def survey_of(name: str) -> Survey:
    model = make(ARCHITECTURES[name])
    return survey(model, install(model))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_cache_of_a_text_is_never_larger_than_said(name: str) -> None:
    """Read at once, then token by token, then a window that is taken back."""
    found, model = survey_of(name), model_of(name)
    for tokens in (4, 5, 33):
        cache = KvCache(model, record=not found.obstacle)
        passes = [tokens, 1, 1] if found.obstacle else [tokens, 1, 6]
        for number in passes:
            inputs = torch.arange(number) % VOCABULARY
            with torch.inference_mode():
                cache.forward(model, inputs)
            assert cache.nbytes() <= found.kv_bytes(cache.tokens + number)
            cache.keep(number, number if found.obstacle else 1)
        assert 0 < cache.peak_bytes <= found.kv_bytes(tokens + sum(passes[1:]))


def test_a_cache_of_keys_alone_is_said_exactly() -> None:
    found = survey_of("mixtral")
    token_bytes = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, numbers, FP32
    assert (found.kv_token_bytes, found.kv_base_bytes, found.cache_layers) == (token_bytes, 0, 3)
    assert found.kv_bytes(100) == 100 * token_bytes + 100 * token_bytes // 3


@pytest.mark.parametrize("name", SAMPLE)
def test_top_k_and_dense_bytes_are_the_models_own(name: str) -> None:
    found, model = survey_of(name), make(ARCHITECTURES[name])
    assert found.top_k == ARCHITECTURES[name].top_k
    experts = {
        value.data_ptr()
        for layer in install(model)
        for value in layer.experts.parameters(recurse=False)
        if value.ndim == 3
    }
    dense = {
        value.data_ptr(): value.nbytes
        for value in [*model.parameters(), *model.buffers()]
        if value.data_ptr() not in experts
    }
    assert found.dense_bytes == sum(dense.values())


def test_a_tied_head_is_counted_once() -> None:
    tied = {**ARCHITECTURES["mixtral"].settings, "tie_word_embeddings": True}
    toy = ARCHITECTURES["mixtral"]
    model = make(type(toy)(toy.model_type, 3, 8, 2, settings=tied))
    head_bytes = VOCABULARY * 32 * 4
    assert survey_of("mixtral").dense_bytes - survey(model, install(model)).dense_bytes == (
        head_bytes
    )


@pytest.mark.parametrize("name", SAMPLE)
def test_only_what_keeps_a_state_stands_in_the_way(name: str) -> None:
    assert bool(survey_of(name).obstacle) == (name == "jamba")


def test_experts_are_not_computed() -> None:
    """A survey works on a model whose experts are gone."""
    model: Any = make(ARCHITECTURES["mixtral"])
    layers = install(model)
    before = survey(model, layers)
    for layer in layers:
        for name in ("gate_up_proj", "down_proj"):
            layer.experts.register_parameter(name, None)
    assert survey(model, layers) == before


def test_a_layer_that_does_not_see_every_token_is_refused() -> None:
    model: Any = make(ARCHITECTURES["mixtral"])
    layers = install(model)
    block = layers[1].block
    block.forward = lambda hidden, **_: hidden
    with pytest.raises(SpecterError, match="did not route every token"):
        survey(model, layers)
