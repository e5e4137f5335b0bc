"""Coded experts through the runtime: fewer bytes everywhere, and the very same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live import plain_text, session_of, text_of, tiny_moe, toy_checkpoint
from toy_checkpoints import TOYS, make

from specter_runtime.codec import BaseName, Coding
from specter_runtime.coded_store import CodedStore
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_sim.offload.journal import replay
from specter_sim.offload.offloader import Offloader
from specter_traces import SpecterError, UsageError

TOKENS = 24
BASES: tuple[BaseName | None, ...] = ("base2", "base3", "base4", None)


def experts_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return install(make(TOYS[name]).to(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v2"])
def test_every_expert_comes_back_to_the_bit(name: str, base: BaseName | None) -> None:
    plain = ExpertStore.take(experts_of(name))
    coded = CodedStore.take(experts_of(name), Coding(base, 32))
    assert coded.experts == plain.experts and coded.parts == plain.parts
    for layer in range(plain.layers):
        for expert in range(plain.experts[layer]):
            exact, again = plain.weights(layer, expert), coded.weights(layer, expert)
            assert exact.keys() == again.keys()
            assert all(torch.equal(again[part], exact[part]) for part in exact)
            assert coded.run(layer, expert).numel() <= coded.expert_bytes[layer]
    assert coded.nbytes < plain.nbytes
    assert coded.load_bytes == pytest.approx(coded.nbytes / sum(coded.experts))
    coded.verify()


def test_a_changed_byte_is_found() -> None:
    coded = CodedStore.take(experts_of("qwen3-moe"), Coding("base4", 32))
    coded.run(1, 2)[-1] ^= 1
    with pytest.raises(SpecterError, match="expert 2 of MoE layer 1"):
        coded.verify()


def test_there_is_no_expert_past_the_last() -> None:
    coded = CodedStore.take(experts_of("qwen3-moe"), Coding("base4", 32))
    for layer, expert in ((0, 8), (3, 0), (-1, 0)):
        with pytest.raises(IndexError):
            coded.run(layer, expert)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.55), (3, 0.57), (2, 0.62)])
def test_tiny_moe_takes_the_bytes_that_were_promised(bits: int, share: float) -> None:
    settings: dict[str, Any] = {"experts__form": "coded-base", "experts__draft_bits": bits}
    with session_of(tiny_moe("bfloat16"), memory__slots=12, **settings) as session:
        store, plan = session.prepared.store, session.budget.plan()
        whole = sum(part.nbytes for part in store.parts[0]) * sum(store.experts)
        assert store.nbytes <= share * whole
        assert plan.host_bytes == store.nbytes
        assert plan.slot_bytes <= 96 * share * whole / sum(store.experts) * 1.01
        assert plan.draft_bytes == pytest.approx(whole / 16 * (bits + 16 / 64), rel=0.01)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return plain_text(toy_checkpoint(dtype=torch.bfloat16), TOKENS)


@pytest.mark.parametrize("form", ["coded-base", "coded"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("slots", [3, 8])
def test_the_text_stays_the_same(
    plain: list[int], form: str, bits: int, depth: int, slots: int
) -> None:
    with session_of(
        toy_checkpoint(dtype=torch.bfloat16),
        {"journal": True, "check": True},
        memory__slots=slots,
        experts__form=form,
        experts__draft_bits=bits,
        experts__group_size=32,
        policy__depth=depth,
        policy__prefetch="continuous" if depth else "none",
    ) as session:
        assert text_of(session, TOKENS) == plain
        result = session.result()
        assert session.device.moved_bytes >= 0.9 * result.loads * session.prepared.load_bytes
        fresh = Offloader(session.prepared.state(), session.rules)
        assert replay(session.journals[0], fresh) is None


def test_the_base_is_charged_even_when_nothing_is_drafted() -> None:
    settings: dict[str, Any] = {"experts__form": "coded-base", "experts__group_size": 32}
    with session_of(toy_checkpoint(dtype=torch.bfloat16), memory__slots=4, **settings) as session:
        assert session.budget.fixed.draft_bytes > 0
        assert session.prepared.draft is None


def test_a_poisoned_slot_is_no_refinement() -> None:
    """What a slot held before cannot be expanded by mistake: its bytes are no stream."""
    settings: dict[str, Any] = {"experts__form": "coded-base", "experts__group_size": 32}
    with session_of(toy_checkpoint(dtype=torch.bfloat16), memory__slots=4, **settings) as session:
        text_of(session, 4)
        views = session.slots._views[0]["down_proj"]
        expert = next(e for e, view in enumerate(views) if view is not None)
        stale = views[expert]
        assert stale is not None
        stale.fill_(0xFF)
        source = session.slots.sources()[0]["down_proj"]
        with pytest.raises(SpecterError):
            source(expert)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts__form": "coded-base", "experts__draft_bits": 8}, "2, 3 or 4"),
    ],
)
def test_a_form_that_cannot_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session_of(toy_checkpoint(dtype=torch.bfloat16), memory__slots=4, **settings)


def test_weights_that_cannot_be_coded_are_refused() -> None:
    with pytest.raises(SpecterError, match="coded weights are bfloat16"):
        session_of(toy_checkpoint(), memory__slots=4, experts__form="coded-base")
