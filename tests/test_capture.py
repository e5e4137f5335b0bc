"""Capture on toy checkpoints of many architectures: routes, drafts, gates, texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_checkpoints import TOYS, VOCABULARY, Toy, make, write

from specter_runtime.capture import CaptureSettings, Recorder, accept_probability, count_flips
from specter_runtime.capture_weights import SwappedWeights
from specter_runtime.checkpoint import Checkpoint, open_checkpoint
from specter_runtime.continuation import continue_prompt
from specter_runtime.experts import expert_weights, install
from specter_runtime.prompts import Passage
from specter_runtime.quantizer import parse
from specter_runtime.sampling import Sampling
from specter_traces import Decoding, SpecterError, Trace, UsageError, statistics, validate

TEXTS = (
    Passage("one", "toy", "", tuple(range(5, 45))),
    Passage("two", "toy", "", tuple((7 * i + 3) % VOCABULARY for i in range(30))),
)
every_toy = pytest.mark.parametrize("name", TOYS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are too small for threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checkpoint_of(model: Any) -> Checkpoint:
    return Checkpoint("toy", model, None, "float32", "")


@cache
def toy_checkpoint(name: str) -> Checkpoint:
    return checkpoint_of(make(TOYS[name]))


def follow(checkpoint: Checkpoint, draft: str, **changes: Any) -> Trace:
    settings = CaptureSettings(
        parse(draft, 32), Decoding.TEXT, prompt_tokens=4, **{"max_tokens": 64, **changes}
    )
    recorder = Recorder(checkpoint, settings)
    return recorder.join(list(recorder.sequences(TEXTS)), "toy")


def router_outputs(model: Any, toy: Toy, tokens: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """What the routers themselves answered: logits [T, E], weights and ids [T, K] a layer."""
    seen: list[tuple[Tensor, ...]] = []
    routers = [
        module for path, module in model.named_modules() if path.endswith(f"mlp.{toy.router}")
    ]
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: seen.append(output))
        for router in routers
    ]
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def chosen(toy: Toy, router: nn.Module, logits: Tensor) -> Tensor:
    """Top-k of router logits by the rules of the family, written independently: [T, K] sorted."""
    if toy.model_type == "deepseek_v3":
        bias: Any = router.e_score_correction_bias
        scores = logits.sigmoid() + bias
        scores = only_best_groups(scores, toy, lambda group: group.topk(2, -1).values.sum(-1))
    elif toy.settings.get("topk_method") == "group_limited_greedy":
        scores = only_best_groups(logits, toy, lambda group: group.max(-1).values)
    else:
        scores = logits
    return scores.topk(toy.top_k, -1).indices.sort(-1).values


def only_best_groups(scores: Tensor, toy: Toy, value: Any) -> Tensor:
    groups = scores.reshape(len(scores), toy.settings["n_group"], -1)
    kept = value(groups).topk(toy.settings["topk_group"], -1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, kept, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)


def sorted_ids(ids: Any) -> Any:
    return np.sort(np.asarray(ids), -1)


@every_toy
def test_target_routes_are_those_the_routers_chose(name: str) -> None:
    toy, checkpoint = TOYS[name], toy_checkpoint(name)
    trace = follow(checkpoint, "base4")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (
        toy.moe_layers,
        toy.num_experts,
        toy.top_k,
    )
    assert validate(trace) == []
    for index, text in enumerate(TEXTS):
        part = trace.sequence(index)
        answers = router_outputs(checkpoint.model, toy, text.tokens)
        for layer, (logits, _, _) in enumerate(answers):
            router = install(checkpoint.model)[layer].block.get_submodule(toy.router)
            expected = chosen(toy, router, logits)
            assert np.array_equal(sorted_ids(part.target_ids[:, layer]), expected.numpy())


@every_toy
def test_weights_are_in_rank_order(name: str) -> None:
    trace = follow(toy_checkpoint(name), "base4")
    for weights in (trace.target_weights, trace.draft_weights):
        assert weights is not None
        assert bool((np.diff(weights.astype(np.float32), axis=-1) <= 0).all())


@every_toy
def test_every_expert_keeps_the_weight_that_its_router_gave_it(name: str) -> None:
    checkpoint = toy_checkpoint(name)
    part = follow(checkpoint, "base4").sequence(0)
    assert part.target_weights is not None
    answers = router_outputs(checkpoint.model, TOYS[name], TEXTS[0].tokens)
    for layer, (logits, weights, ids) in enumerate(answers):
        given = torch.zeros_like(logits).scatter(-1, ids, weights)
        mine = np.take_along_axis(given.numpy(), part.target_ids[:, layer].astype(int), -1)
        assert np.array_equal(mine.astype(np.float16), part.target_weights[:, layer])


@every_toy
def test_an_unquantized_draft_is_the_target_exactly(name: str) -> None:
    trace = follow(toy_checkpoint(name), "none")
    assert trace.draft_ids is not None and trace.draft_weights is not None
    assert trace.target_weights is not None and trace.accept_prob is not None
    assert np.array_equal(trace.draft_ids, trace.target_ids)
    assert np.array_equal(trace.draft_weights, trace.target_weights)
    assert statistics.acceptance(trace).greedy == 1
    assert bool((trace.accept_prob == 1).all())


@every_toy
def test_a_draft_is_closer_the_more_bits_it_has(name: str) -> None:
    eight, two = (follow(toy_checkpoint(name), draft) for draft in ("int8", "base2"))
    near, far = statistics.acceptance(eight), statistics.acceptance(two)
    assert near.greedy >= 0.9 and near.sampled >= 0.96
    assert statistics.fidelity(eight).recall.mean() >= 0.97
    assert far.sampled < near.sampled - 0.02
    assert statistics.fidelity(two).recall.mean() < statistics.fidelity(eight).recall.mean()


@every_toy
def test_recording_and_drafting_leave_the_target_as_it_was(name: str) -> None:
    tokens = torch.tensor([TEXTS[0].tokens])
    untouched = make(TOYS[name])
    untouched.set_experts_implementation("eager")
    hooked = toy_checkpoint(name).model
    follow(toy_checkpoint(name), "base2")
    with torch.inference_mode():
        expected = untouched(tokens, use_cache=False).logits
        assert torch.equal(hooked(tokens, use_cache=False).logits, expected)


@every_toy
def test_only_routed_expert_weights_differ_in_the_draft(name: str) -> None:
    model = toy_checkpoint(name).model
    layers = install(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with SwappedWeights(layers, parse("base2", 32)).draft():
        changed = {
            key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
        }
    expected = {
        f"{layer.name}.{weight}" for layer in layers for weight in expert_weights(layer.experts)
    }
    assert changed == expected
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@every_toy
def test_the_gate_is_the_next_router_on_this_layers_input(name: str) -> None:
    toy, checkpoint = TOYS[name], toy_checkpoint(name)
    gate_ids = follow(checkpoint, "base4").sequence(0).gate_ids
    assert gate_ids is not None and gate_ids.shape[1] == toy.moe_layers - 1
    layers = install(checkpoint.model)
    states: list[Tensor] = []
    hooks = [
        layer.block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        for layer in layers
    ]
    with torch.inference_mode():
        checkpoint.model(torch.tensor([TEXTS[0].tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        for layer in layers[1:]:
            router = layer.block.get_submodule(toy.router)
            logits = router(states[layer.index - 1][0])[0]
            expected = chosen(toy, router, logits).numpy()
            assert np.array_equal(sorted_ids(gate_ids[:, layer.index - 1]), expected)


def test_positions_carry_the_token_they_read_and_its_successor() -> None:
    checkpoint = toy_checkpoint("mixtral")
    part = follow(checkpoint, "base4").sequence(1)
    tokens = TEXTS[1].tokens
    assert part.next_tokens is not None and part.target_tokens is not None
    assert part.next_tokens.tolist() == [*tokens[1:], -1]
    assert part.prompt_lengths.tolist() == [4]
    with torch.inference_mode():
        prefix = checkpoint.model(torch.tensor([tokens[:10]]), use_cache=False).logits[0, -1]
    assert part.target_tokens[9] == int(prefix.argmax())


def test_draft_groups_run_along_the_input_of_transposed_experts() -> None:
    layers = install(toy_checkpoint("gpt-oss").model)
    weight = expert_weights(layers[0].experts)["gate_up_proj"]
    assert weight.shape == (8, 32, 96)  # [E, D, 2F]
    code = parse("base2", 32)
    expected = code.draft_weight(weight[3].T).T
    with SwappedWeights(layers, code).draft():
        assert torch.equal(weight[3], expected)


def test_a_block_that_needs_more_than_a_state_has_no_gate_and_says_so() -> None:
    gemma = Toy(
        "gemma4_text",
        3,
        8,
        2,
        settings={
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
        },
    )
    trace = follow(checkpoint_of(make(gemma)), "int8")
    assert trace.gate_ids is None
    assert any("no next-layer gate" in note for note in trace.header.notes)
    assert statistics.fidelity(trace).recall.mean() >= 0.97


def test_layers_of_different_expert_shapes_are_captured() -> None:
    model: Any = make(TOYS["mixtral"])
    config = type(model.config)(**{**model.config.to_dict(), "intermediate_size": 80})
    wider: Any = type(install(model)[1].experts)(config)
    wider.config = model.config
    for weight in wider.parameters():
        nn.init.normal_(weight, std=0.2)
    model.model.layers[1].mlp.experts = wider
    trace = follow(checkpoint_of(model), "int8")
    assert statistics.fidelity(trace).recall.mean() >= 0.97


def test_sampled_text_depends_on_seed_and_index_alone() -> None:
    model = toy_checkpoint("qwen3-moe").model

    def text(seed: int, index: int) -> list[int]:
        return continue_prompt(model, [3, 4, 5], 12, Sampling(top_p=0.95, seed=seed), index)

    first = text(0, 0)
    assert text(0, 0) == first and len(first) == 12
    assert text(1, 0) != first and text(0, 1) != first


def test_greedy_text_is_what_the_target_says() -> None:
    settings = CaptureSettings(parse("base4", 32), Decoding.GREEDY, new_tokens=12)
    recorder = Recorder(toy_checkpoint("olmoe"), settings)
    (trace,) = recorder.sequences(TEXTS[:1])
    assert trace.target_tokens is not None and trace.next_tokens is not None
    prompt = len(TEXTS[0].tokens)
    assert np.array_equal(trace.target_tokens[prompt - 1 : -1], trace.next_tokens[prompt - 1 : -1])


def test_greedy_tokens_that_one_pass_chooses_otherwise_are_counted() -> None:
    best = np.array([9, 3, 4, 8], np.int32)
    assert count_flips([1, 2, 3, 4], 2, best) == 0
    assert count_flips([1, 2, 3, 5], 2, best) == 1
    assert count_flips([1, 2, 3, 5], 1, best) == 2


def test_sampled_tokens_follow_the_stated_distribution() -> None:
    model = toy_checkpoint("mixtral").model
    sampling = Sampling(top_p=0.5)
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 4, 5]]), use_cache=False).logits[0, -1]
    stated = sampling.shape(logits).softmax(-1)
    drawn = [continue_prompt(model, [3, 4, 5], 1, sampling, index)[0] for index in range(60)]
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY)
    assert bool((stated[counts > 0] > 0).all())
    assert float((counts / 60 - stated).abs().sum()) < 0.5


def test_acceptance_is_the_overlap_of_two_distributions() -> None:
    target = torch.log(torch.tensor([[0.5, 0.5, 1e-9], [0.2, 0.3, 0.5]])).repeat(100, 1)
    draft = torch.log(torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]])).repeat(100, 1)
    kept = accept_probability(target, draft, Sampling())
    assert kept.tolist() == pytest.approx([0.5, 1.0] * 100)


def test_a_loop_is_measured() -> None:
    settings = CaptureSettings(parse("none"), Decoding.TEXT, prompt_tokens=4)
    recorder = Recorder(toy_checkpoint("mixtral"), settings)
    loop = Passage("loop", "toy", "", (1, 2, 3, 4) * 20)
    parts = list(recorder.sequences([loop, TEXTS[0]]))
    repetition = recorder.join(parts, "toy").header.repetition
    assert repetition[0] > 0.9 and repetition[1] == 0


@pytest.mark.parametrize(
    ("passage", "decoding", "message"),
    [
        (Passage("long", "", "", (1,) * 120), Decoding.SAMPLED, r"120 \+ 20 .* --new-tokens"),
        (
            Passage("long", "", "", (1,) * 129),
            Decoding.TEXT,
            "context of toy is 128.* --max-tokens",
        ),
        (Passage("alien", "", "", (1, VOCABULARY)), Decoding.SAMPLED, "outside the vocabulary"),
        (Passage("words", "", "hello"), Decoding.SAMPLED, r"no tokenizer\.json"),
        (Passage("short", "", "", (1, 2, 3)), Decoding.TEXT, "3 tokens, all of them prompt"),
    ],
)
def test_a_bad_text_is_refused_before_any_work(
    passage: Passage, decoding: Decoding, message: str
) -> None:
    settings = CaptureSettings(parse("none"), decoding, new_tokens=20)
    recorder = Recorder(toy_checkpoint("mixtral"), settings)
    with pytest.raises(UsageError, match=message):
        next(recorder.sequences([TEXTS[0], passage]))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    toy = Toy("llama", 0, 0, 0)
    write(toy, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecterError, match="no routed experts"):
        Recorder(checkpoint, CaptureSettings(parse("none")))


def test_a_model_that_routes_its_own_way_is_refused() -> None:
    llama4 = Toy("llama4_text", 3, 4, 1, settings={"num_local_experts": 4, "head_dim": 8})
    with pytest.raises(SpecterError, match="choose a mixture-of-experts model that uses it"):
        install(make(llama4))
