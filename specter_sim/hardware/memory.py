"""Equal-memory accounting: what a configuration takes on the device, and on the host.

Device bytes are the dense weights, the draft or base, the slots, the KV cache and the buffers. A
draft shares the target's dense weights and KV prefix, or has both once more; its scratch of one
window is small and not charged.
"""

from dataclasses import dataclass
from enum import Enum

from specter_sim.hardware.forms import ExpertBytes
from specter_sim.hardware.machines import Host
from specter_sim.hardware.models import ModelShape
from specter_sim.units import format_bytes
from specter_traces.errors import UsageError


class SlotLayout(Enum):
    """Whether every layer has the same whole number of slots, or all layers share one pool."""

    PER_LAYER = "per-layer"
    GLOBAL = "global"


@dataclass(frozen=True)
class MemoryPlan:
    """Device bytes by purpose; the parts add up to `total_bytes`."""

    dense_bytes: int
    draft_bytes: int
    kv_bytes: int
    buffer_bytes: int
    slot_bytes: int  # all slots together
    slots: int  # over all layers
    slots_per_layer: float  # a mean where layers differ or share one pool
    total_bytes: int
    host_bytes: int  # experts in the form they are loaded in


def plan_for_slots(
    shape: ModelShape,
    sizes: ExpertBytes,
    slots_total: int,
    context: int,
    buffer_slots: int = 0,
    unshared_draft: bool = False,
) -> MemoryPlan:
    """The memory of `slots_total` slots over all layers, `context` KV tokens and `buffer_slots`
    transient ones. Raises UsageError for impossible counts.
    """
    if not 1 <= slots_total <= shape.experts:
        raise UsageError(
            f"{shape.name} takes 1 to {shape.experts} slots over its {shape.moe_layers} layers, "
            f"got {slots_total}"
        )
    if buffer_slots < 0 or context < 0:
        raise UsageError(
            f"buffer slots and context must not be negative, got {buffer_slots} and {context}"
        )
    dense = shape.dense_bytes()
    draft = shape.experts * sizes.resident_per_expert
    kv = shape.kv_bytes(context)
    draft += dense + kv if unshared_draft else 0
    buffers, slots = buffer_slots * sizes.per_slot, slots_total * sizes.per_slot
    return MemoryPlan(
        dense_bytes=dense,
        draft_bytes=draft,
        kv_bytes=kv,
        buffer_bytes=buffers,
        slot_bytes=slots,
        slots=slots_total,
        slots_per_layer=slots_total / shape.moe_layers,
        total_bytes=dense + draft + kv + buffers + slots,
        host_bytes=shape.experts * sizes.per_load,
    )


def plan_for_budget(
    shape: ModelShape,
    sizes: ExpertBytes,
    budget_bytes: int,
    context: int,
    buffer_slots: int = 0,
    layout: SlotLayout = SlotLayout.PER_LAYER,
    least_slots_per_layer: int = 1,
    unshared_draft: bool = False,
) -> MemoryPlan:
    """The plan with the most slots that fits `budget_bytes`, never more than there are experts.

    Raises UsageError, naming the smallest budget that works, when not even
    `least_slots_per_layer` slots a layer fit.
    """
    step = shape.moe_layers if layout is SlotLayout.PER_LAYER else 1
    each = least_slots_per_layer
    least = plan_for_slots(
        shape, sizes, each * shape.moe_layers, context, buffer_slots, unshared_draft
    )
    if budget_bytes < least.total_bytes:
        raise UsageError(_too_small(shape, least, budget_bytes, each))
    spare = (budget_bytes - least.total_bytes) // (step * sizes.per_slot)
    slots = min(shape.experts, least.slots + step * spare)
    return plan_for_slots(shape, sizes, slots, context, buffer_slots, unshared_draft)


def host_note(plan: MemoryPlan, host: Host) -> str | None:
    """What to tell the user when the experts do not fit in host memory, or not all pinned."""
    if plan.host_bytes > host.memory_bytes:
        return (
            f"the experts take {format_bytes(plan.host_bytes, binary=True)} of host memory and the "
            f"machine has {format_bytes(host.memory_bytes, binary=True)}: they would be read from "
            "disk, which is not modelled"
        )
    share = host.pinned_share(plan.host_bytes)
    if share < 1:
        return f"only {share:.0%} of the experts fit in pinned memory: other loads are slower"
    return None


def _too_small(shape: ModelShape, least: MemoryPlan, budget_bytes: int, slots: int) -> str:
    parts = {
        "dense weights": least.dense_bytes,
        "draft": least.draft_bytes,
        "KV": least.kv_bytes,
        "buffers": least.buffer_bytes,
        f"{slots} slots a layer": least.slot_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        f"{shape.name} does not fit in {format_bytes(budget_bytes)}: the smallest budget that "
        f"works is {least.total_bytes} B ({format_bytes(least.total_bytes)}: {listed})"
    )
