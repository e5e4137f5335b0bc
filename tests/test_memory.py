"""Memory plans: every byte has a purpose, and budgets buy whole slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim.hardware import (
    ExpertBytes,
    ExpertForm,
    Host,
    SlotLayout,
    expert_bytes,
    find_model,
    host_note,
    plan_for_budget,
    plan_for_slots,
)
from specter_traces.errors import UsageError

SHAPE = find_model("deepseek-v2-lite")
FORMS = {
    "plain": expert_bytes(SHAPE, ExpertForm.PLAIN, None),
    "plain with draft": expert_bytes(SHAPE, ExpertForm.PLAIN, 4),
    "coded": expert_bytes(SHAPE, ExpertForm.CODED, None),
    "coded with base": expert_bytes(SHAPE, ExpertForm.CODED_BASE, 4),
}
PLAIN = FORMS["plain with draft"]


def test_a_plan_adds_up() -> None:
    plan = plan_for_slots(SHAPE, PLAIN, 16 * 26, context=144, buffer_slots=32)
    assert plan.dense_bytes == SHAPE.dense_bytes()
    assert plan.draft_bytes == 26 * 64 * 4_460_544
    assert plan.slot_bytes == 16 * 26 * 17_301_504
    assert plan.buffer_bytes == 32 * 17_301_504  # 528 MiB, as the paper's artifact allocates
    assert plan.kv_bytes == 144 * 27 * 576 * 2
    parts = (
        plan.dense_bytes,
        plan.draft_bytes,
        plan.kv_bytes,
        plan.buffer_bytes,
        plan.slot_bytes,
    )
    assert plan.total_bytes == sum(parts)
    assert (plan.slots, plan.slots_per_layer) == (416, 16)
    assert plan.host_bytes == SHAPE.routed_bytes()


def test_at_equal_memory_a_draft_costs_slots_and_coding_gives_them_back() -> None:
    slots = {
        name: plan_for_budget(SHAPE, sizes, 18 * 10**9, 512).slots_per_layer
        for name, sizes in FORMS.items()
    }
    assert slots == {"plain": 34, "plain with draft": 17, "coded": 50, "coded with base": 37}


@given(
    form=st.sampled_from(sorted(FORMS)),
    budget=st.integers(11 * 10**9, 60 * 10**9),
    context=st.integers(0, 4096),
    buffers=st.integers(0, 8),
    layout=st.sampled_from(SlotLayout),
)
def test_a_budget_buys_as_much_as_fits(
    form: str, budget: int, context: int, buffers: int, layout: SlotLayout
) -> None:
    sizes = FORMS[form]
    plan = plan_for_budget(SHAPE, sizes, budget, context, buffers, layout)
    step = SHAPE.moe_layers if layout is SlotLayout.PER_LAYER else 1
    assert plan.total_bytes <= budget
    assert plan.slots % step == 0 and plan.slots <= SHAPE.experts
    if plan.slots < SHAPE.experts:
        assert plan.total_bytes + step * sizes.per_slot > budget
    assert plan == plan_for_slots(SHAPE, sizes, plan.slots, context, buffers)


@pytest.mark.parametrize("layout", SlotLayout)
@pytest.mark.parametrize("least", [1, 6])
def test_the_smallest_budget_is_named_and_works(layout: SlotLayout, least: int) -> None:
    def plan(budget: int) -> int:
        return plan_for_budget(SHAPE, PLAIN, budget, 512, 0, layout, least).slots

    with pytest.raises(UsageError, match="the smallest budget that works is") as caught:
        plan(10**9)
    named = int(str(caught.value).split("works is ")[1].split(" B")[0])
    assert plan(named) == least * SHAPE.moe_layers
    with pytest.raises(UsageError):
        plan(named - 1)


@pytest.mark.parametrize("slots", [-1, 0, 26 * 64 + 1])
def test_impossible_slots(slots: int) -> None:
    with pytest.raises(UsageError, match=f"takes 1 to 1664 slots over its 26 layers, got {slots}"):
        plan_for_slots(SHAPE, PLAIN, slots, 512)


def test_impossible_context_and_buffers() -> None:
    for context, buffers in ((-1, 0), (0, -1)):
        with pytest.raises(UsageError, match="must not be negative"):
            plan_for_slots(SHAPE, PLAIN, 26, context, buffers)


def test_experts_that_do_not_fit_on_the_host_are_remarked() -> None:
    def note(sizes: ExpertBytes, host: Host) -> str | None:
        return host_note(plan_for_slots(SHAPE, sizes, 26, 512), host)

    assert note(PLAIN, Host(64 << 30, 50e9, None)) is None
    assert "26.8 GiB of host memory and the machine has 16.0 GiB" in str(
        note(PLAIN, Host(16 << 30, 50e9, None))
    )
    # Refinements are all a coded expert keeps on the host.
    assert note(FORMS["coded with base"], Host(16 << 30, 50e9, None)) is None
    assert "only 7% of the experts fit in pinned" in str(note(PLAIN, Host(64 << 30, 50e9, 2 << 30)))
