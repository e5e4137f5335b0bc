"""How a session runs, beside what its configuration decides."""

from __future__ import annotations

from dataclasses import dataclass

from specter_runtime.devices import DeviceKind, Faults


@dataclass(frozen=True)
class SessionOptions:
    """Settings of a live run.

    Attributes:
        context_tokens: the longest text that KV memory is planned for.
        chunk_tokens: prompt tokens that one target pass reads.
        draft: a code by name, instead of the configuration's base code of `draft_bits`.
        poison: fill slots with NaN as their expert leaves.
        check: compare every arrived expert with the host's copy.
        faults: what goes wrong on the link, on purpose.
        lock_bytes: host memory to page-lock at most; None locks none.
        journal, timeline: keep every scheduling decision, every span of work.
    """

    dtype: str = "auto"
    device: DeviceKind = DeviceKind.EMULATED
    context_tokens: int = 1024
    chunk_tokens: int = 128
    draft: str | None = None
    poison: bool = False
    check: bool = False
    faults: Faults | None = None
    lock_bytes: int | None = None
    journal: bool = False
    timeline: bool = False
