"""What is on the device before a run starts: the hot set, and the initial residents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specter_sim.policies.catalogue import EvictionInfo, PrefetchInfo, Scalar
from specter_sim.policies.state import RESIDENT, State


def hot_set(
    prefetch: PrefetchInfo,
    eviction: EvictionInfo,
    params: Mapping[str, Scalar],
    popularity: NDArray[np.float64],
    slots: Sequence[int],
) -> NDArray[np.int64]:
    """Flags [L*E] of the static hot set: popular experts, or the first layers when streaming.

    popularity: [L, E] uses.
    """
    layers, experts = popularity.shape
    flags = np.zeros((layers, experts), dtype=np.int64)
    total = sum(slots)
    if prefetch.name == "stream":
        resident_layers = max(0, (total - 2 * experts) // experts)
        flags[:resident_layers] = 1
    elif eviction.name == "hot-lru":
        for layer in range(layers):
            # Under one budget for all layers, each gets an even share of it.
            slots_here = slots[layer] * layers if len(slots) > 1 else total
            share = int(float(params["share"]) * slots_here / layers)
            flags[layer, most_popular(popularity[layer], share)] = 1
    return flags.ravel()


def most_popular(uses: NDArray[np.float64], count: int) -> list[int]:
    """The ``count`` most used experts of a layer; ties go to the lower id."""
    order: list[int] = np.argsort(-uses, kind="stable")[:count].tolist()
    return order


def fill(
    s: State,
    initial: str,
    slots: Sequence[int],
    hot: NDArray[np.int64],
    popularity: NDArray[np.float64],
) -> None:
    """Place the initial residents, layer by layer, into the layer's slots or even share.

    ``initial`` is "cold" (the hot set alone), "highest" (the highest-numbered ids, as the paper's
    artifact starts) or "popular".
    """
    if initial == "cold" and not hot.any():
        return
    for layer in range(s.layers):
        group = layer if s.groups > 1 or s.layers == 1 else 0
        share = slots[group] // (1 if s.groups > 1 else s.layers)
        flags = hot[layer * s.experts : (layer + 1) * s.experts]
        for expert in initial_of(s, initial, share, flags, popularity[layer]):
            place(s, group, layer * s.experts + expert)


def initial_of(
    s: State,
    initial: str,
    share: int,
    hot: NDArray[np.int64],
    popularity: NDArray[np.float64],
) -> list[int]:
    """The ids of one layer's initial residents."""
    if initial == "highest":
        return list(range(s.experts - share, s.experts))
    if initial == "popular":
        return most_popular(popularity, share)
    members: list[int] = np.flatnonzero(hot).tolist()
    return members


def place(s: State, group: int, index: int) -> None:
    """Make an expert resident before the run starts."""
    if s.free[group] == 0:
        return
    slot = s.slot_begin[group + 1] - s.free[group]
    s.occupant[slot], s.slot_of[index], s.residency[index] = index, slot, RESIDENT
    s.free[group] -= 1
