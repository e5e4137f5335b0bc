"""The machine a configuration describes, and how its device memory is divided."""

from __future__ import annotations

from specter_sim.config import RunConfig
from specter_sim.hardware import (
    ExpertBytes,
    Machine,
    MemoryPlan,
    ModelShape,
    SlotLayout,
    find_machine,
    plan_for_budget,
    plan_for_slots,
)
from specter_sim.units import format_bytes
from specter_traces.errors import UsageError

_OVERRIDES = {
    "link_bandwidth": "link_bytes_per_s",
    "link_latency": "link_latency_s",
    "queue_depth": "link_queue_depth",
    "granularity": "link_granularity_bytes",
    "vram": "gpu_memory_bytes",
    "hbm_bandwidth": "gpu_hbm_bytes_per_s",
    "host_bandwidth": "host_memory_bytes_per_s",
    "host_memory": "host_memory_bytes",
    "launch": "gpu_launch_s",
}


def machine_of(config: RunConfig) -> Machine:
    """The named machine with the configuration's changes."""
    given = config.machine.model_dump()
    changes = {field: given[key] for key, field in _OVERRIDES.items() if given.get(key) is not None}
    return find_machine(config.machine.name).with_(**changes)


def staging_slots(config: RunConfig) -> int:
    """Transient slots of the demand policy."""
    return config.memory.staging_slots if config.policy.demand == "staging" else 0


def draft_bits(config: RunConfig, drafts: bool) -> int | None:
    """Bits of the resident draft or base; None when nothing of the kind is on the device."""
    if config.experts.form == "coded-base":
        return config.experts.draft_bits
    if not drafts:
        return None
    if config.experts.draft_bits is None:
        raise UsageError(
            f'depth "{config.policy.depth}" needs a draft: set experts.draft_bits to 2, 3, 4 or 8'
        )
    return config.experts.draft_bits


def memory_plan(
    config: RunConfig, shape: ModelShape, machine: Machine, sizes: ExpertBytes, context: int
) -> MemoryPlan:
    """Slots from their number, a budget, or all of the machine's memory.

    Staging slots are charged whether the demand policy uses them or not.
    """
    memory = config.memory
    unshared = sizes.has_draft and not config.experts.shared_draft
    staged = memory.staging_slots
    if memory.slots is not None:
        if memory.slots > shape.num_experts:
            raise UsageError(
                f"{shape.name} has {shape.num_experts} experts a layer, got memory.slots = "
                f"{memory.slots}: at most all of them can be resident"
            )
        return plan_for_slots(
            shape, sizes, memory.slots * shape.moe_layers, context, staged, unshared
        )
    elif memory.slots_per_layer is not None:
        _check_each(memory.slots_per_layer, shape)
        return plan_for_slots(shape, sizes, sum(memory.slots_per_layer), context, staged, unshared)
    return plan_for_budget(
        shape,
        sizes,
        memory.budget if memory.budget is not None else machine.gpu.memory_bytes,
        context,
        staged,
        SlotLayout(memory.layout),
        1 if memory.allow_rounds else shape.top_k,
        unshared,
    )


def device_note(plan: MemoryPlan, machine: Machine) -> str:
    """What to tell of a plan that the device has no room for; empty when it fits."""
    if plan.total_bytes <= machine.gpu.memory_bytes:
        return ""
    need, have = format_bytes(plan.total_bytes), format_bytes(machine.gpu.memory_bytes)
    return f"does not fit: {need} of device memory, and {machine.name} has {have}"


def slot_counts(config: RunConfig, shape: ModelShape, plan: MemoryPlan) -> tuple[int, ...]:
    """Slots of each eviction group."""
    if config.memory.slots_per_layer is not None:
        return config.memory.slots_per_layer
    if config.memory.layout == "global":
        return (plan.slots,)
    return (plan.slots // shape.moe_layers,) * shape.moe_layers


def _check_each(slots: tuple[int, ...], shape: ModelShape) -> None:
    if len(slots) != shape.moe_layers or max(slots) > shape.num_experts:
        raise UsageError(
            f"{shape.name} has {shape.moe_layers} MoE layers of {shape.num_experts} experts, got "
            f"{len(slots)} memory.slots_per_layer, the highest {max(slots, default=0)}: give one "
            "number a layer, at most all of its experts"
        )


def check_slots(config: RunConfig, shape: ModelShape, plan: MemoryPlan) -> None:
    """A layer that cannot hold one token's experts runs in rounds: only when asked for."""
    each = config.memory.slots_per_layer
    per_layer = plan.slots // shape.moe_layers if each is None else min(each)
    if per_layer >= shape.top_k or config.memory.allow_rounds:
        return
    raise UsageError(
        f"{shape.name} needs {shape.top_k} slots a layer for one token, got {per_layer}: raise "
        "memory.slots or the budget, or set memory.allow_rounds = true to run a layer in rounds"
    )
