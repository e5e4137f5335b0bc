"""What a runtime asks of experts in host memory, in whatever form they are kept there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specter_runtime.expert_store import Part
from specter_runtime.weight_table import Source


class HostExperts(Protocol):
    """All routed experts: one contiguous run of bytes each, which a load copies into a slot."""

    @property
    def layers(self) -> int:
        """MoE layers, L."""

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of each layer."""

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The matrices of an expert as they are computed with, for each layer."""

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """The most bytes that a load copies, for each layer: what a slot has."""

    @property
    def nbytes(self) -> int:
        """Host bytes of all runs."""

    @property
    def load_bytes(self) -> float:
        """Bytes of one load: a mean over all experts."""

    @property
    def scratch_bytes(self) -> int:
        """Device bytes that computing with resident experts takes beyond their slots."""

    def run(self, layer: int, expert: int) -> Tensor:
        """The bytes that a load of this expert copies, uint8; IndexError when there is none."""

    def views(self, layer: int, expert: int, run: Tensor) -> dict[str, Tensor]:
        """What of an expert's run belongs to which matrix; `run` is the slot's copy."""

    def sources(self, views: Sequence[dict[str, list[Tensor | None]]]) -> list[dict[str, Source]]:
        """How to get a resident expert's matrices from the views of its slot, by layer and name."""

    def weights(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The matrices of one expert, straight from host memory."""

    def lock_pages(self, limit_bytes: int | None = None) -> int:
        """Page-lock up to `limit_bytes` (None: all); bytes locked. Never an error."""

    def close(self) -> None:
        """Give the memory back."""
