"""Devices behind the port of the decode loop: a link into slots, paced, faulty or immediate."""

from __future__ import annotations

from enum import StrEnum

from specter_cuda import CopyThread
from specter_runtime.devices.copier import Copier
from specter_runtime.devices.device import LiveDevice
from specter_runtime.devices.faulty import Faults, FaultyCopier
from specter_runtime.devices.immediate import ImmediateCopier
from specter_sim.hardware import Link

__all__ = ["DeviceKind", "Faults", "LiveDevice", "make_copier"]


class DeviceKind(StrEnum):
    """How copies are made: at once, or paced to a link's bandwidth and latency."""

    IMMEDIATE = "immediate"
    EMULATED = "emulated"


def make_copier(kind: DeviceKind, link: Link, faults: Faults | None = None) -> Copier:
    """The copier of a device; `link` says what an emulated one is paced to."""
    copier: Copier = ImmediateCopier()
    if kind is DeviceKind.EMULATED:
        copier = CopyThread(link.bytes_per_s, link.latency_s, link.granularity_bytes)
    return copier if faults is None else FaultyCopier(copier, faults)
