"""What a world must provide: a device that copies, a model that computes.

Time passes only inside these calls. ``sim`` implements them on a virtual clock, ``runtime`` on
the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from specter_sim.types import Copied, DraftStep, Load


class Device(Protocol):
    """One link and one clock. Every blocking wait of a run happens inside it, so that
    ``on_completion`` can keep the link fed while the model computes.
    """

    on_completion: Callable[[], object]

    def now(self) -> float:
        """Seconds since the run began."""

    def can_start(self) -> bool:
        """Whether the link takes another load now."""

    def start(self, load: Load) -> None:
        """Begin a host-to-device copy. Never blocks."""

    def poll(self) -> Sequence[Copied]:
        """Loads finished since the last call, in finish order. Never blocks."""

    def wait(self) -> Sequence[Copied]:
        """Block until a load finishes; then as ``poll``."""


class Model(Protocol):
    """Draft and target together, one window at a time."""

    @property
    def layers(self) -> int:
        """MoE layers."""

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""

    def finished(self) -> bool:
        """Whether enough tokens are committed."""

    def position(self) -> int:
        """Position of the uncached token, the first input of the next window."""

    def limit(self) -> int:
        """How many tokens may be drafted at most before the text ends."""

    def draft(self, depth: int) -> Iterator[DraftStep]:
        """Draft ``depth`` tokens; after each forward, yield where it routed."""

    def target_pass(self, visit: Callable[[int], object]) -> None:
        """One target forward over the window; ``visit(layer)`` between the router and the experts
        of every MoE layer, in order. ``route``, ``hints`` and ``run`` are called from there.
        """

    def route(self, layer: int) -> Sequence[int]:
        """The union of experts the window needs in the visited layer, ascending."""

    def hints(self, layer: int) -> Sequence[int]:
        """Experts that the next layer's gate expects; empty when nobody uses them."""

    def run(self, layer: int, experts: Sequence[int]) -> None:
        """Apply resident experts (ids in the layer) to the window's tokens."""

    def verify(self) -> int:
        """Head and acceptance: how many drafted tokens were kept. Commits one more."""
