"""The decode loop: draft a window, verify it layer by layer, keep what agrees.

Both worlds run this code. Verification runs whatever is resident, releases each expert as soon
as it has run, and stalls only when nothing is: awaiting experts in a fixed order would deadlock
as soon as a window needs more experts than there are slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from specter_sim.offload.offloader import Offloader
from specter_sim.offload.ports import Device, Model
from specter_sim.policies.state import DEMAND_LOADS, PREFETCH_LOADS
from specter_sim.types import WindowOutcome


class StallCause(Enum):
    """Why compute waited: for a load demanded now, a late prefetch, or the join before verify."""

    DEMAND = "demand"
    LATE = "late"
    JOIN = "join"


class Stall(NamedTuple):
    """One wait of the compute stream."""

    cause: StallCause
    layer: int
    began_s: float
    seconds: float


class Window(NamedTuple):
    """One decoded window: its outcome, when it began and ended, and its stalls."""

    outcome: WindowOutcome
    began_s: float
    ended_s: float
    stalls: tuple[Stall, ...]


def decode(
    model: Model, device: Device, offloader: Offloader, *, grouped: bool = True
) -> list[Window]:
    """Decode until the model says it is finished.

    Args:
        grouped: run all resident experts of a layer at once; False runs them one by one, and
            gives each one's slot back before the next runs.
    """
    connect(device, offloader)
    windows = []
    while not model.finished():
        windows.append(decode_window(model, device, offloader, grouped))
    return windows


def connect(device: Device, offloader: Offloader) -> None:
    """Have the device feed its link from this offloader whenever a copy ends."""
    device.on_completion = partial(pump, device, offloader)


def decode_window(model: Model, device: Device, offloader: Offloader, grouped: bool) -> Window:
    """Draft, then verify."""
    began_s = device.now()
    loads = loads_so_far(offloader)
    depth = offloader.begin_window(model.position(), model.limit())
    pump(device, offloader)
    draft_window(model, device, offloader, depth)
    drafted_s = device.now()
    stalls: list[Stall] = []
    join_prefetches(device, offloader, stalls)
    demands = run_layers(model, device, offloader, grouped, stalls)
    accepted = model.verify()
    ended_s = device.now()
    outcome = WindowOutcome(
        depth,
        accepted,
        drafted_s - began_s,
        ended_s - drafted_s,
        demands,
        loads_so_far(offloader) - loads,
    )
    offloader.end_window(outcome)
    return Window(outcome, began_s, ended_s, tuple(stalls))


def prefill(
    model: Model, device: Device, offloader: Offloader, tokens: int, *, grouped: bool = True
) -> Sequence[Stall]:
    """One target pass over ``tokens`` known tokens: each expert is loaded at most once a layer."""
    connect(device, offloader)
    stalls: list[Stall] = []
    offloader.begin_pass(model.position(), tokens)
    pump(device, offloader)
    run_layers(model, device, offloader, grouped, stalls)
    offloader.end_pass()
    return stalls


def draft_window(model: Model, device: Device, offloader: Offloader, depth: int) -> None:
    """Draft ``depth`` tokens, prefetching on what they route to."""
    if depth == 0:
        return
    for step in model.draft(depth):
        offloader.drafted(step)
        pump(device, offloader)


def join_prefetches(device: Device, offloader: Offloader, stalls: list[Stall]) -> None:
    """Wait for every prefetch of the window, where the policy asks for it."""
    while offloader.must_join():
        stalls.append(stall(device, offloader, StallCause.JOIN, -1))


def run_layers(
    model: Model, device: Device, offloader: Offloader, grouped: bool, stalls: list[Stall]
) -> int:
    """One target forward through the MoE layers; returns the experts demanded."""
    demands = []

    def visit(layer: int) -> None:
        demands.append(verify_layer(model, device, offloader, layer, grouped, stalls))

    model.target_pass(visit)
    return sum(demands)


def verify_layer(
    model: Model,
    device: Device,
    offloader: Offloader,
    layer: int,
    grouped: bool,
    stalls: list[Stall],
) -> int:
    """Run whatever is resident; stall only when nothing is. Returns the experts demanded.

    One by one, hits come before misses, each in id order, as in the paper's artifact: their slots
    are the first to be given away.
    """
    waiting = list(model.route(layer))
    demands, base = len(waiting), layer * model.experts
    if not grouped:
        offloader.put_hits_first(layer, waiting)
    offloader.demand(layer, waiting, model.hints(layer))
    pending = {e for e in waiting if offloader.is_loading(base + e)}
    pump(device, offloader)
    while waiting:
        ready = [e for e in waiting if offloader.is_resident(base + e)]
        if not ready:
            late = not pending.isdisjoint(waiting)
            cause = StallCause.LATE if late else StallCause.DEMAND
            stalls.append(stall(device, offloader, cause, layer))
            continue
        if not grouped:
            ready = ready[:1]
        model.run(layer, ready)
        for expert in ready:
            offloader.release(base + expert)
        waiting = [e for e in waiting if e not in ready]
        pump(device, offloader)
    return demands


def pump(device: Device, offloader: Offloader) -> None:
    """Book finished copies, then keep the link fed."""
    for copied in device.poll():
        offloader.copied(copied)
    while device.can_start():
        load = offloader.next_load()
        if load is None:
            return
        device.start(load)


def stall(device: Device, offloader: Offloader, cause: StallCause, layer: int) -> Stall:
    """Block until some load finishes."""
    began_s = device.now()
    for copied in device.wait():
        offloader.copied(copied)
    pump(device, offloader)
    return Stall(cause, layer, began_s, device.now() - began_s)


def loads_so_far(offloader: Offloader) -> int:
    """Loads started since the offloader was made."""
    counters = offloader.state.counters
    return counters[DEMAND_LOADS] + counters[PREFETCH_LOADS]
