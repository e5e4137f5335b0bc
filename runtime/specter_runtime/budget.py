"""Device memory as a hard cap: what each purpose takes, and how many slots the rest is.

Dense weights, draft, KV cache and scratch come first; slots get what is left of the budget. A
request that would need more KV than was planned is refused before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specter_runtime.host_experts import HostExperts
from specter_runtime.slots import slot_bytes
from specter_sim.config import MemoryConfig
from specter_sim.hardware import MemoryPlan
from specter_sim.units import format_bytes
from specter_traces.errors import UsageError


@dataclass(frozen=True)
class Fixed:
    """Device bytes that do not depend on the number of slots.

    Attributes:
        kv_bytes: the cache of `context_tokens` tokens, with the copy that growing it makes.
        scratch_bytes: activations of the widest pass, logits, decoded draft weights.
    """

    dense_bytes: int
    draft_bytes: int
    kv_bytes: int
    scratch_bytes: int
    context_tokens: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.dense_bytes + self.draft_bytes + self.kv_bytes + self.scratch_bytes


@dataclass(frozen=True)
class Budget:
    """Device bytes by purpose. `groups`: slots of each layer, or one number for a common pool."""

    fixed: Fixed
    groups: tuple[int, ...]
    staging: int
    slot_bytes: int
    staging_bytes: int
    host_bytes: int
    layers: int
    cap_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Everything on the device."""
        return self.fixed.total_bytes + self.slot_bytes + self.staging_bytes

    def plan(self) -> MemoryPlan:
        """The same as the record that results carry; scratch counts among the buffers."""
        return MemoryPlan(
            dense_bytes=self.fixed.dense_bytes,
            draft_bytes=self.fixed.draft_bytes,
            kv_bytes=self.fixed.kv_bytes,
            buffer_bytes=self.staging_bytes + self.fixed.scratch_bytes,
            slot_bytes=self.slot_bytes,
            slots=sum(self.groups),
            slots_per_layer=sum(self.groups) / self.layers,
            total_bytes=self.total_bytes,
            host_bytes=self.host_bytes,
        )


def plan_budget(
    memory: MemoryConfig, store: HostExperts, fixed: Fixed, top_k: int, name: str
) -> Budget:
    """Slots from their number, from a budget, or half of every layer's experts when none is given.

    Staging slots are there and charged whether the demand policy uses them or not.

    UsageError, naming the smallest budget that works, when not even one token's experts fit.
    """
    least = _groups(memory, store, 1 if memory.allow_rounds else top_k)
    if memory.budget is not None:
        groups = _largest(memory, store, fixed, least, name)
    elif memory.slots_per_layer is not None:
        groups = memory.slots_per_layer
    else:
        groups = _groups(memory, store, memory.slots or max(top_k, max(store.experts) // 2))
    _check(memory, groups, least, store, name)
    return _budget(memory, groups, store, fixed)


def smallest_budget(memory: MemoryConfig, store: HostExperts, fixed: Fixed, top_k: int) -> int:
    """The device bytes below which a model cannot run."""
    return _budget(memory, _groups(memory, store, top_k), store, fixed).total_bytes


def _groups(memory: MemoryConfig, store: HostExperts, each: int) -> tuple[int, ...]:
    """`each` slots a layer, never more than it has experts, as the layout wants them."""
    per_layer = tuple(min(each, experts) for experts in store.experts)
    return (sum(per_layer),) if memory.layout == "global" else per_layer


def _largest(
    memory: MemoryConfig,
    store: HostExperts,
    fixed: Fixed,
    least: tuple[int, ...],
    name: str,
) -> tuple[int, ...]:
    """The most slots that fit the budget."""
    assert memory.budget is not None
    smallest = _budget(memory, least, store, fixed)
    if smallest.total_bytes > memory.budget:
        raise UsageError(_too_small(smallest, memory.budget, name))
    if memory.layout == "global":
        spare = memory.budget - smallest.total_bytes
        return (min(sum(store.experts), least[0] + spare // max(store.expert_bytes)),)
    each = max(least)
    while each < max(store.experts):
        wider = _groups(memory, store, each + 1)
        if _budget(memory, wider, store, fixed).total_bytes > memory.budget:
            break
        each += 1
    return _groups(memory, store, each)


def _budget(
    memory: MemoryConfig, groups: Sequence[int], store: HostExperts, fixed: Fixed
) -> Budget:
    staging = memory.staging_slots
    sizes = slot_bytes(store, groups, staging)
    slots = sum(groups)
    return Budget(
        fixed,
        tuple(groups),
        staging,
        sum(sizes[:slots]),
        sum(sizes[slots:]),
        store.nbytes,
        store.layers,
        memory.budget,
    )


def _check(
    memory: MemoryConfig,
    groups: tuple[int, ...],
    least: tuple[int, ...],
    store: HostExperts,
    name: str,
) -> None:
    if memory.slots is not None and memory.slots > max(store.experts):
        raise UsageError(
            f"{name} has {max(store.experts)} experts a layer, got {memory.slots} slots: at most "
            "all of them can be resident"
        )
    if len(groups) != len(least):
        raise UsageError(
            f"{name} has {store.layers} MoE layers, got {len(groups)} memory.slots_per_layer: "
            "give one number a layer"
        )
    for layer, (given, needed) in enumerate(zip(groups, least, strict=True)):
        if given < needed:
            where = "" if memory.layout == "global" else f" in MoE layer {layer}"
            raise UsageError(
                f"{name} needs {needed} slots{where} for one token, got {given}: raise --slots or "
                "--vram, or set memory.allow_rounds = true to run a layer in rounds"
            )


def _too_small(smallest: Budget, budget: int, name: str) -> str:
    fixed = smallest.fixed
    parts = {
        "dense weights": fixed.dense_bytes,
        "draft": fixed.draft_bytes,
        f"KV of {fixed.context_tokens} tokens": fixed.kv_bytes,
        "scratch": fixed.scratch_bytes,
        f"{sum(smallest.groups)} slots": smallest.slot_bytes,
        f"{smallest.staging} staging slots": smallest.staging_bytes,
    }
    listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items() if size)
    return (
        f"{name} does not run in {format_bytes(budget)}: the smallest budget that works is "
        f"{smallest.total_bytes} B ({format_bytes(smallest.total_bytes)}: {listed})"
    )
