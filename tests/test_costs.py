"""Costs in closed form, and the bytes of every expert form they are built on."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim.hardware import (
    Costs,
    ExpertForm,
    build_costs,
    expert_bytes,
    find_machine,
    find_model,
    machines,
    models,
)
from specter_traces.errors import UsageError

PLAIN, CODED, CODED_BASE = ExpertForm.PLAIN, ExpertForm.CODED, ExpertForm.CODED_BASE
DEEPSEEK = find_model("deepseek-v2-lite")
A100 = find_machine("a100-40g")
ONE = DEEPSEEK.expert_bytes()


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("deepseek-v2-lite", 4_460_544),
        ("qwen1.5-moe-a2.7b", 4_460_544),
        ("phi-3.5-moe", 40_550_400),
    ],
)
def test_a_plain_expert_and_its_draft(name: str, draft: int) -> None:
    shape = find_model(name)
    sizes = expert_bytes(shape, PLAIN, 4)
    assert sizes.per_load == sizes.per_slot == sizes.read_per_use == shape.expert_bytes()
    assert sizes.resident_per_expert == sizes.read_per_draft_use == draft
    alone = expert_bytes(shape, PLAIN, None)
    assert (alone.resident_per_expert, alone.read_per_draft_use, alone.has_draft) == (0, 0, False)


def test_a_coded_expert_without_draft() -> None:
    sizes = expert_bytes(DEEPSEEK, CODED, None)
    assert sizes.per_load == sizes.per_slot == sizes.read_per_use == math.ceil(0.68 * ONE)
    assert sizes.expanded == ONE and sizes.resident_per_expert == 0


@pytest.mark.parametrize(("bits", "share"), [(4, 0.468), (3, 0.516), (2, 0.556)])
def test_a_coded_expert_with_its_base(bits: int, share: float) -> None:
    sizes = expert_bytes(DEEPSEEK, CODED_BASE, bits)
    base = ONE * bits // 16 + 2 * DEEPSEEK.expert_params // 128
    assert sizes.per_load == sizes.per_slot == math.ceil(share * ONE)
    assert sizes.resident_per_expert == sizes.read_per_draft_use == base
    assert sizes.read_per_use == sizes.per_load + base
    assert 0.68 < sizes.read_per_use / ONE < 0.74


def test_groups_end_with_a_row() -> None:
    shape = find_model("gpt-oss-20b:bf16")  # 2880 inputs are 22.5 groups of 128
    scales = 3 * 2880 * 23
    codes = (shape.expert_params - shape.expert_bias_params) // 2
    draft = expert_bytes(shape, PLAIN, 4).resident_per_expert
    assert draft == codes + 2 * scales + 2 * shape.expert_bias_params


def test_only_bf16_experts_can_be_coded() -> None:
    for name in ("gpt-oss-20b", "deepseek-v3"):
        shape = find_model(name)
        for form, bits in ((CODED, None), (CODED_BASE, 4)):
            with pytest.raises(UsageError, match=f'coding is for BF16 experts.*"{name}:bf16"'):
                expert_bytes(shape, form, bits)
            recast = expert_bytes(shape, form, bits, as_16bit=True)
            assert recast == expert_bytes(find_model(f"{name}:bf16"), form, bits)
            assert "treated as BF16" in recast.note
    assert expert_bytes(DEEPSEEK, CODED, None, as_16bit=True).note == ""


def test_a_draft_hardly_smaller_than_its_target_is_remarked() -> None:
    assert "97% of the mxfp4" in expert_bytes(find_model("gpt-oss-20b"), PLAIN, 4).note
    assert expert_bytes(DEEPSEEK, PLAIN, 8).note == ""


@pytest.mark.parametrize(
    ("form", "bits", "group", "message"),
    [
        (CODED_BASE, None, 128, "2, 3 or 4 bits, got None"),
        (CODED_BASE, 8, 128, "2, 3 or 4 bits, got 8"),
        (PLAIN, 5, 128, "2, 3, 4 or 8 bits a weight, got 5"),
        (PLAIN, 0, 128, "2, 3, 4 or 8 bits a weight, got 0"),
        (PLAIN, 4, 0, "group_size must be at least 1, got 0"),
    ],
)
def test_impossible_forms(form: ExpertForm, bits: int | None, group: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        expert_bytes(DEEPSEEK, form, bits, group)


# --- closed forms ---------------------------------------------------------------------------------


def test_experts_are_read_or_computed_whichever_is_slower() -> None:
    costs = build_costs(DEEPSEEK, A100, PLAIN, 4)
    launches_s = 3 * A100.gpu.launch_s
    read_s = ONE / (1555e9 * 0.88)
    assert costs.experts_s(8, 12) == pytest.approx(8 * read_s + launches_s)
    routes = 100_000
    flops_s = routes * 2 * DEEPSEEK.expert_params / (312e12 * 0.75)
    assert costs.experts_s(8, routes) == pytest.approx(flops_s + launches_s)
    assert costs.experts_s(0, 0) == 0


def test_ungrouped_experts_launch_one_by_one() -> None:
    grouped = build_costs(DEEPSEEK, A100, PLAIN, 4)
    each = build_costs(DEEPSEEK, A100, PLAIN, 4, grouped=False)
    assert each.experts_s(1, 1) == pytest.approx(grouped.experts_s(1, 1))
    more_s = each.experts_s(8, 12) - grouped.experts_s(8, 12)
    assert more_s == pytest.approx(7 * 3 * A100.gpu.launch_s)


def test_coded_experts_read_less_and_pay_for_expansion() -> None:
    plain = build_costs(DEEPSEEK, A100, PLAIN, None)
    coded = build_costs(DEEPSEEK, A100, CODED_BASE, 4)
    assert coded.use_s == pytest.approx(plain.use_s * (0.468 + 4.125 / 16 + 1 / 2048), rel=1e-3)
    assert coded.expand_per_use_s == pytest.approx(ONE / 1.6e12)
    assert coded.expand_per_load_s == plain.expand_per_use_s == 0
    expected_s = 5 * (coded.use_s + coded.expand_per_use_s) + 3 * A100.gpu.launch_s
    assert coded.experts_s(5, 5) == pytest.approx(expected_s)


def test_a_layer_reads_its_weights_and_the_cache() -> None:
    costs = build_costs(DEEPSEEK, A100, PLAIN, 4)
    gpu = A100.gpu
    weights = 2 * (
        DEEPSEEK.attention_params_per_layer
        + DEEPSEEK.router_params_per_layer
        + DEEPSEEK.shared_params_per_layer
    )
    cache = 1000 * (512 + 64) * 2
    floor_s = (11 + 3 + 3) * gpu.launch_s + gpu.sync_s
    assert costs.layer_s(1, 1000) == pytest.approx(
        (weights + cache) / gpu.read_bytes_per_s + floor_s
    )
    # A prompt of 4096 tokens is bound by arithmetic.
    flops = 4096 * (weights + 1000 * 2 * 16 * (512 + 64 + 512))
    assert costs.layer_s(4096, 1000) == pytest.approx(flops / gpu.compute_flops_per_s + floor_s)


def test_a_local_layer_reads_its_window_only() -> None:
    shape = find_model("gpt-oss-20b")
    costs = build_costs(shape, A100, PLAIN, None)
    per_position_s = 2 * 512 * 2 / A100.gpu.read_bytes_per_s
    grown_s = costs.layer_s(1, 2128) - costs.layer_s(1, 128)
    assert grown_s == pytest.approx(2000 * per_position_s / 2)


def test_fixed_costs_hold_the_head_and_the_dense_layers() -> None:
    costs = build_costs(DEEPSEEK, A100, PLAIN, 4)
    weights = 2 * (102400 * 2048 + DEEPSEEK.dense_ffn_params + DEEPSEEK.attention_params_per_layer)
    floor_s = (6 + 11 + 3) * A100.gpu.launch_s + A100.gpu.sync_s
    expected_s = weights / A100.gpu.read_bytes_per_s + floor_s
    assert costs.fixed_s(1, 0) == pytest.approx(expected_s)
    tied = find_model("tiny-moe")
    cpu = find_machine("emulated-cpu")
    head_s = 2 * 4096 * 256 / cpu.gpu.read_bytes_per_s
    costs = build_costs(tied, cpu, PLAIN, 4)
    assert costs.fixed_s(1, 512) == pytest.approx(head_s + 6 * cpu.gpu.launch_s + cpu.gpu.sync_s)


def test_a_draft_step_reads_dense_weights_and_quantized_experts() -> None:
    costs = build_costs(DEEPSEEK, A100, PLAIN, 4)
    dense = DEEPSEEK.dense_bytes() - 2 * (102400 * 2048 + 2048)  # no embedding, no last norm
    read = dense + 26 * 6 * 4_460_544
    kernels = 6 + (11 + 3) + 26 * (11 + 3 + 3 + 3)
    expected_s = read / A100.gpu.read_bytes_per_s + kernels * A100.gpu.graph_launch_s
    assert costs.draft_step_s(0) == pytest.approx(expected_s + A100.gpu.sync_s)
    eager = build_costs(DEEPSEEK, A100, PLAIN, 4, grouped_draft=False, captured_draft=False)
    slower_s = eager.draft_step_s(0) - costs.draft_step_s(0)
    more = 26 * 3 * 5 * A100.gpu.launch_s + kernels * (A100.gpu.launch_s - A100.gpu.graph_launch_s)
    assert slower_s == pytest.approx(more)


def test_without_a_draft_drafting_never_ends() -> None:
    costs = build_costs(DEEPSEEK, A100, CODED, None)
    assert costs.draft_step_s(512) == math.inf and not costs.has_draft
    assert build_costs(DEEPSEEK, A100, CODED_BASE, 4).has_draft


def test_the_rough_time_model() -> None:
    """One BF16 expert: 0.72 ms on the link, 11.5 us to read; 0.15 ms a layer for the rest."""
    costs = build_costs(DEEPSEEK, A100, PLAIN, 4)
    assert A100.link.copy_s(costs.load_bytes) == pytest.approx(0.72e-3, rel=0.05)
    assert costs.use_s == pytest.approx(11.5e-6, rel=0.15)
    assert costs.layer_s(1, 512) == pytest.approx(0.15e-3, rel=0.15)


def test_the_emulated_device_is_link_bound_like_a_real_one() -> None:
    machine = find_machine("emulated-cpu")
    costs = build_costs(find_model("tiny-moe"), machine, PLAIN, 4, grouped=False)
    assert machine.link.copy_s(costs.load_bytes) == pytest.approx(1e-3, rel=0.05)
    # Medians measured on 2026-11-30; see the machine's file.
    assert costs.experts_s(1, 1) == pytest.approx(105e-6, rel=0.35)
    assert costs.layer_s(1, 512) == pytest.approx(620e-6, rel=0.35)
    assert costs.layer_s(9, 512) == pytest.approx(620e-6, rel=0.35)


# --- over the whole catalogue ---------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(models()))
@pytest.mark.parametrize("machine", sorted(machines()))
def test_costs_are_plain_numbers(model: str, machine: str) -> None:
    shape, found = find_model(f"{model}:bf16"), find_machine(machine)
    for form, bits in ((PLAIN, 4), (CODED, 4), (CODED_BASE, 2)):
        costs = build_costs(shape, found, form, bits)
        flat = json.loads(json.dumps(dataclasses.asdict(costs)))
        assert all(math.isfinite(value) for value in _scalars(flat))
        assert 0 < costs.experts_s(1, 1) < costs.experts_s(2, 2)
        assert 0 < costs.draft_step_s(512) < 10
        assert costs == build_costs(shape, found, form, bits)


def _scalars(flat: dict[str, object]) -> list[float]:
    scalars: list[float] = []
    for value in flat.values():
        if isinstance(value, dict):
            scalars += _scalars(value)
        else:
            assert isinstance(value, int | float)
            scalars.append(float(value))
    return scalars


SLOW = build_costs(DEEPSEEK, A100, CODED_BASE, 4)
FASTER: dict[str, Any] = {
    "gpu_hbm_bytes_per_s": "2 TB/s",
    "gpu_flops_per_s": 400e12,
    "gpu_launch_s": "2 us",
    "gpu_graph_launch_s": "1 us",
    "gpu_sync_s": "1 us",
    "gpu_expand_bytes_per_s": "9 TB/s",
}


@pytest.mark.parametrize("field", sorted(FASTER))
@given(tokens=st.integers(1, 5000), experts=st.integers(1, 64), context=st.integers(0, 100_000))
def test_better_hardware_is_never_slower(
    field: str, tokens: int, experts: int, context: int
) -> None:
    fast = build_costs(DEEPSEEK, A100.with_(**{field: FASTER[field]}), CODED_BASE, 4)
    better, worse = (_times(costs, tokens, experts, context) for costs in (fast, SLOW))
    assert all(after <= before for after, before in zip(better, worse, strict=True))
    assert better != worse or field == "gpu_flops_per_s"


@given(tokens=st.integers(1, 5000), experts=st.integers(1, 64), context=st.integers(0, 100_000))
def test_more_work_is_never_faster(tokens: int, experts: int, context: int) -> None:
    less = _times(SLOW, tokens, experts, context)
    more = _times(SLOW, tokens + 1, experts + 1, context + 1)
    assert all(before <= after for before, after in zip(less, more, strict=True))


def _times(costs: Costs, tokens: int, experts: int, context: int) -> list[float]:
    return [
        costs.draft_step_s(context),
        costs.layer_s(tokens, context),
        costs.experts_s(experts, max(experts, tokens)),
        costs.fixed_s(tokens, context),
    ]
