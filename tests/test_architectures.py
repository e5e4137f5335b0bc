"""The toy architectures are what they claim: hooked, routed, decided, and rolled back or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import (
    ARCHITECTURES,
    CANNOT_SPECULATE,
    EXPERTS,
    NO_TEXT_MODEL,
    PROMPT,
    cache_of,
    model_of,
    plain_text,
)
from toy_checkpoints import VOCABULARY, write
from transformers import AutoConfig, DynamicCache

from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.experts import install
from specter_runtime.routes import Route, recording
from specter_traces import SpecterError

LOOPS_OVER_LAYERS = "inkling2-loop"
DEPTHS_AND_ACCEPTED = ((8, 2), (1, 0), (4, 4), (0, 0), (8, 8))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    """One architecture after the other, so that what one costs is paid once."""
    chosen: str = request.param
    return chosen


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are too small for threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def routes_of(name: str, tokens: Sequence[int]) -> dict[int, Route]:
    """Routes of one pass over `tokens`, by MoE layer."""
    model: Any = model_of(name)
    layers = install(model)
    try:
        with recording(layers) as routes, torch.inference_mode():
            model(torch.tensor([tokens]), use_cache=False)
    finally:
        model.set_experts_implementation("eager")
    return routes


def test_every_family_with_the_experts_interface_is_here_or_excused() -> None:
    folder = Path(transformers.__file__).parent / "models"
    families = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    tested = {
        type(AutoConfig.for_model(toy.model_type)).__module__.split(".")[-2]
        for toy in ARCHITECTURES.values()
    }
    assert tested | NO_TEXT_MODEL == families
    assert not tested & NO_TEXT_MODEL
    assert len(tested) >= 50


def test_a_toy_comes_back_from_disk_with_every_layer_hooked(name: str, tmp_path: Path) -> None:
    toy = ARCHITECTURES[name]
    model: Any = open_checkpoint(str(write(toy, tmp_path / name))).model
    layers = install(model)
    assert [layer.num_experts for layer in layers] == [EXPERTS] * toy.moe_layers
    original: Any = model_of(name)
    with torch.inference_mode():
        answer = model(torch.tensor([PROMPT]), use_cache=False).logits
        expected = original(torch.tensor([PROMPT]), use_cache=False).logits
    assert torch.allclose(answer, expected, atol=2e-5)


def test_one_pass_routes_every_token_once_in_every_layer(name: str) -> None:
    toy = ARCHITECTURES[name]
    if name == LOOPS_OVER_LAYERS:
        with pytest.raises(SpecterError, match="ran twice"):
            routes_of(name, PROMPT)
        return
    tokens = [*PROMPT, *plain_text(name).tokens]
    routes = routes_of(name, tokens)
    assert sorted(routes) == list(range(toy.moe_layers))
    for route in routes.values():
        assert route.ids.shape == (len(tokens), toy.top_k)
        assert all(len(set(row)) == toy.top_k for row in route.ids.tolist())
        assert len(set(route.ids.flatten().tolist())) >= (3 if name == "zaya" else 6)
        assert int(route.ids.max()) < EXPERTS


@pytest.mark.parametrize(
    "grouped", [name for name, toy in ARCHITECTURES.items() if toy.settings.get("n_group", 1) > 1]
)
def test_grouped_routers_stay_within_their_groups(grouped: str) -> None:
    settings = ARCHITECTURES[grouped].settings
    size = EXPERTS // settings["n_group"]
    for route in routes_of(grouped, PROMPT).values():
        groups = [len(set(row)) for row in (route.ids // size).tolist()]
        assert max(groups) <= settings["topk_group"]


def test_shifted_routers_see_nothing_above_zero() -> None:
    logits = router_answers("gpt-oss", "router")
    assert len(logits) == 3 and all(bool((row < 0).all()) for row in logits)
    bias: Any = model_of("deepseek-v3").get_submodule("model.layers.1.mlp.gate")
    scores = router_answers("deepseek-v3", "gate")[0].sigmoid() + bias.e_score_correction_bias
    assert bool((scores < 0).all())


def router_answers(name: str, router: str) -> list[torch.Tensor]:
    """The logits that the routers of the toy called `name` answer to PROMPT, layer by layer."""
    model: Any = model_of(name)
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        for path, module in model.named_modules()
        if path.endswith(f"mlp.{router}")
    ]
    with torch.inference_mode():
        model(torch.tensor([PROMPT]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_plain_text_is_varied_and_far_from_ties(name: str) -> None:
    text = plain_text(name)
    assert len(text.tokens) == 64
    assert len(set(text.tokens)) >= 12
    assert text.margin() > 2e-3


def test_a_window_can_be_taken_back_exactly_where_the_table_says_so(name: str) -> None:
    """Draft, take back, verify, keep a part: logits as in decoding one token at a time."""
    model: Any = model_of(name)
    cache = DynamicCache(config=model.config) if model._supports_default_dynamic_cache() else None
    text = [*PROMPT, *plain_text(name).tokens]
    if name in CANNOT_SPECULATE:
        with pytest.raises(RuntimeError):
            decode_in_windows(model, cache, text)
        return
    decoded = decode_in_windows(model, cache, text)
    expected = plain_text(name).logits
    for place, logits in decoded.items():
        assert torch.allclose(logits, expected[place - len(PROMPT)], atol=1e-4)
    assert len(decoded) == sum(accepted + 1 for _, accepted in DEPTHS_AND_ACCEPTED)


def test_the_table_says_what_caches_keep() -> None:
    assert cache_of("mixtral") == "all keys"
    assert cache_of("mellum") == "sliding window, all keys"
    assert cache_of("zaya") == "sliding window + recurrent state, all keys + recurrent state"
    assert cache_of("deepseek-v4") == "sliding window + compressed keys, sliding window"
    assert cache_of("nemotron-h-attention") == "all keys"


def decode_in_windows(model: Any, cache: Any, text: list[int]) -> dict[int, torch.Tensor]:
    """Logits that chose text[place], decoded by windows that are right in part only."""
    decoded: dict[int, torch.Tensor] = {}
    if cache is not None:
        cache.activate_past_recording()
    with torch.inference_mode():
        cache = model(torch.tensor([PROMPT]), cache=cache, use_cache=True).cache
        if not cache.is_croppable:
            raise RuntimeError("not croppable")
        cache.crop(0)
        place = len(PROMPT)
        for depth, accepted in DEPTHS_AND_ACCEPTED:
            right = text[place : place + accepted + 1]
            wrong = [(token + 1) % VOCABULARY for token in text[place + accepted + 1 :]]
            inputs = [*right, *wrong][: depth + 1]
            for token in inputs[:depth]:
                model(torch.tensor([[token]]), cache=cache, use_cache=True)
            cache.crop(-depth)
            logits = model(torch.tensor([inputs]), cache=cache, use_cache=True).logits[0]
            cache.crop(accepted - depth)
            decoded |= {place + 1 + i: logits[i] for i in range(accepted + 1)}
            place += accepted + 1
    return decoded
