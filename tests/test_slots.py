"""Slots: who is where, and what may not happen to memory that is being read."""

from __future__ import annotations

import ctypes

import pytest
import torch
from live import store_of

from specter_runtime.expert_store import ExpertStore
from specter_runtime.slots import Slots, slot_bytes


@pytest.fixture(scope="module")
def store() -> ExpertStore:
    return store_of()


def load(slots: Slots, slot: int, index: int) -> None:
    transfer = slots.begin_load(slot, index)
    ctypes.memmove(transfer.destination, transfer.source, transfer.size)
    slots.arrived(slot, index)


def test_an_arrived_expert_has_the_hosts_weights(store: ExpertStore) -> None:
    slots = Slots(store, [2, 2, 2])
    index = slots.experts + 3
    load(slots, 2, index)
    for name, source in slots.sources()[1].items():
        assert torch.equal(source(3), store.weights(1, 3)[name])
        assert source(3).data_ptr() % 64 == 0
    assert slots.matches(2, index)


def test_an_expert_that_left_is_gone(store: ExpertStore) -> None:
    slots = Slots(store, [1, 1, 1])
    load(slots, 0, 4)
    view = slots.sources()[0]["down_proj"]
    assert view(4) is not None
    slots.begin_load(0, 5)
    assert view(4) is None
    for expert in (4, 5):  # the other one is still on its way
        with (
            pytest.raises(RuntimeError, match=f"{expert} of MoE layer 0 is used but not resident"),
            slots.lease(0, [expert]),
        ):
            pass


def test_a_poisoned_slot_is_not_a_number(store: ExpertStore) -> None:
    for poison, expected in ((True, True), (False, False)):
        slots = Slots(store, [1, 1, 1], poison=poison)
        load(slots, 0, 4)
        stale = slots.sources()[0]["down_proj"](4)
        slots.begin_load(0, 5)
        assert bool(stale.isnan().all()) is expected


def test_a_slot_is_not_overwritten_while_it_is_read(store: ExpertStore) -> None:
    slots = Slots(store, [2, 1, 1])
    load(slots, 0, 4)
    with (
        slots.lease(0, [4]),
        pytest.raises(RuntimeError, match="slot 0 would be overwritten while it is read"),
    ):
        slots.begin_load(0, 5)
    slots.begin_load(0, 5)


def test_a_reader_that_fails_gives_its_slots_back(store: ExpertStore) -> None:
    slots = Slots(store, [1, 1, 1])
    load(slots, 0, 4)
    with pytest.raises(KeyboardInterrupt), slots.lease(0, [4]):
        raise KeyboardInterrupt
    slots.begin_load(0, 5)


def test_a_generation_betrays_a_stale_lease(store: ExpertStore) -> None:
    slots = Slots(store, [1, 1, 1])
    load(slots, 0, 4)
    with slots.lease(0, [4]) as lease:
        pass
    load(slots, 0, 5)
    load(slots, 0, 4)  # the same expert again, in the same place: still another copy
    with pytest.raises(RuntimeError, match="slot 0 changed its expert while it was read"):
        slots.check(lease)


def test_a_copy_that_ends_in_anothers_slot_is_an_error(store: ExpertStore) -> None:
    slots = Slots(store, [1, 1, 1])
    slots.begin_load(0, 4)
    with pytest.raises(RuntimeError, match="a copy of expert 5 ended in slot 0 of another"):
        slots.arrived(0, 5)


def test_a_damaged_slot_does_not_match(store: ExpertStore) -> None:
    slots = Slots(store, [1, 1, 1])
    load(slots, 0, 4)
    slots.bytes_of(0)[7] ^= 1
    assert not slots.matches(0, 4)


def test_bytes_by_layout(store: ExpertStore) -> None:
    each = store.expert_bytes[0]
    assert slot_bytes(store, [2, 1, 3], 1) == [each] * 7
    assert slot_bytes(store, [5], 2) == [each] * 7
    assert Slots(store, [2, 1, 3], 1).nbytes == 7 * each


def test_slots_of_different_sizes_do_not_overlap(store: ExpertStore) -> None:
    slots = Slots(store, [2, 2, 2])
    for slot in range(6):
        load(slots, slot, slot // 2 * slots.experts + slot)
    for slot in range(6):
        assert slots.matches(slot, slot // 2 * slots.experts + slot)
