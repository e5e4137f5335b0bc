"""The live device over every copier: pacing, order, faults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from live import store_of

from specter_runtime.devices import DeviceKind, Faults, LiveDevice, device, make_copier
from specter_runtime.devices.copier import Completion
from specter_runtime.expert_store import ExpertStore
from specter_runtime.slots import Slots
from specter_sim.hardware import find_machine
from specter_sim.types import Copied, Load, LoadKind
from specter_traces.errors import SpecterError

SLOTS = 8


@pytest.fixture(scope="module")
def store() -> ExpertStore:
    return store_of()


def device_of(
    store: ExpertStore, kind: DeviceKind, faults: Faults | None = None, **given: Any
) -> LiveDevice:
    link = find_machine("emulated-cpu").with_(link_bytes_per_s=20e6, link_latency_s=1e-4).link
    slots = Slots(store, [SLOTS] * store.layers, poison=True)
    return LiveDevice(make_copier(kind, link, faults), slots, 4, **given)


def loads(count: int) -> list[Load]:
    return [Load(slot, slot, LoadKind.DEMAND, -1) for slot in range(count)]


def copy_all(live: LiveDevice, wanted: Sequence[Load]) -> list[Copied]:
    waiting = list(wanted)
    arrived: list[Copied] = []
    while waiting or len(arrived) < len(wanted):
        while waiting and live.can_start():
            live.start(waiting.pop(0))
        arrived += live.wait()
    return arrived


@pytest.mark.parametrize("kind", DeviceKind)
def test_every_load_arrives_once_with_the_right_bytes(store: ExpertStore, kind: DeviceKind) -> None:
    live = device_of(store, kind)
    arrived = copy_all(live, loads(SLOTS))
    assert [copied.load.expert for copied in arrived] == list(range(SLOTS))
    assert all(live._slots.matches(slot, slot) for slot in range(SLOTS))
    assert live.moved_bytes == SLOTS * store.expert_bytes[0]
    assert not live.poll() and live.can_start()
    live.close()


def test_the_queue_has_its_depth(store: ExpertStore) -> None:
    live = device_of(store, DeviceKind.EMULATED)
    for load in loads(4):
        assert live.can_start()
        live.start(load)
    assert not live.can_start()
    live.abandon()
    assert live.can_start()
    live.close()


def test_an_emulated_link_takes_its_time(store: ExpertStore) -> None:
    live = device_of(store, DeviceKind.EMULATED)
    began_s = time.monotonic()
    copy_all(live, loads(SLOTS))
    least_s = SLOTS * store.expert_bytes[0] / 20e6
    assert time.monotonic() - began_s >= least_s
    assert least_s <= live.link_busy_s <= 3 * least_s + 0.1
    live.close()


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize(
    "faults",
    [
        Faults(late=0.5, reordered=0.5, seed=1),
        Faults(failed=0.3, seed=2),
        Faults(partial=0.3, seed=3),
        Faults(late=0.2, reordered=0.2, failed=0.1, partial=0.1, seed=4),
    ],
)
def test_reported_faults_are_made_good(
    store: ExpertStore, kind: DeviceKind, faults: Faults
) -> None:
    live = device_of(store, kind, faults)
    for _ in range(3):
        arrived = copy_all(live, loads(SLOTS))
        assert sorted(copied.load.expert for copied in arrived) == list(range(SLOTS))
        assert all(live._slots.matches(slot, slot) for slot in range(SLOTS))
    assert bool(live.failed_copies) is bool(faults.failed or faults.partial)
    live.close()


def test_faults_reorder(store: ExpertStore) -> None:
    live = device_of(store, DeviceKind.IMMEDIATE, Faults(late=0.3, reordered=0.5, seed=5))
    order = [copied.load.expert for _ in range(4) for copied in copy_all(live, loads(SLOTS))]
    assert order != list(range(SLOTS)) * 4
    live.close()


def test_a_copy_that_is_alone_is_kept_back_once(store: ExpertStore) -> None:
    live = device_of(store, DeviceKind.IMMEDIATE, Faults(reordered=1.0, late_s=1e-3))
    for load in loads(3):
        assert [copied.load for copied in copy_all(live, [load])] == [load]


def test_only_a_checked_device_notices_what_a_link_hides(store: ExpertStore) -> None:
    for check in (True, False):
        live = device_of(store, DeviceKind.IMMEDIATE, Faults(damaged=0.4, seed=6), check=check)
        copy_all(live, loads(SLOTS))
        assert all(live._slots.matches(slot, slot) for slot in range(SLOTS)) is check
        live.close()


def test_a_link_that_never_delivers_ends_the_request(store: ExpertStore) -> None:
    live = device_of(store, DeviceKind.IMMEDIATE, Faults(failed=1.0))
    live.start(loads(1)[0])
    with pytest.raises(SpecterError, match="expert 0 of MoE layer 0 did not arrive in 8 tries"):
        live.wait()
    assert live.failed_copies == 8


def test_a_dead_link_is_told(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def submit(self, tag: int, destination: int, source: int, size: int) -> None: ...

        def poll(self) -> Sequence[Completion]:
            return []

        def wait(self, timeout_s: float) -> Sequence[Completion]:
            time.sleep(timeout_s)
            return []

        def close(self) -> None: ...

    monkeypatch.setattr(device, "PATIENCE_S", 0.05)
    live = LiveDevice(Dead(), Slots(store, [SLOTS] * store.layers), 2)
    live.start(loads(1)[0])
    with pytest.raises(SpecterError, match="the link is dead"):
        live.wait()


def test_waiting_for_nothing_is_a_bug(store: ExpertStore) -> None:
    with pytest.raises(RuntimeError, match="nothing under way"):
        device_of(store, DeviceKind.IMMEDIATE).wait()
