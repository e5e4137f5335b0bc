"""Opening a checkpoint and a session for a command, with progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specter_runtime.cli.options import System, check_count, tell
from specter_traces.errors import UsageError

if TYPE_CHECKING:
    from specter_runtime.checkpoint import Checkpoint
    from specter_runtime.devices import DeviceKind
    from specter_runtime.model_loading import Progress


def load(system: System, model: str, *, keep_coded: bool = False) -> Checkpoint:
    """The checkpoint of a model, in the system's number type; says what loading took.

    `keep_coded`: experts that are stored in coded form stay so. UsageError for another draft then.
    """
    from specter_runtime.checkpoint import open_checkpoint

    with progress_bar("loading") as progress:
        checkpoint = open_checkpoint(model, system.dtype, progress, keep_coded=keep_coded)
    _check_draft(system, checkpoint)
    if checkpoint.loading is not None:
        tell(str(checkpoint.loading))
    return checkpoint


def _check_draft(system: System, checkpoint: Checkpoint) -> None:
    """Coded experts have a draft of their own."""
    code = checkpoint.coded.coding.draft_code if checkpoint.coded else None
    if code is not None and system.draft_bits not in (None, str(code.bits)):
        raise UsageError(
            f"the experts of {checkpoint.name} are coded with a base of {code.bits} bits, which is "
            f"their draft: leave out --draft-bits {system.draft_bits}, or encode the original "
            f"checkpoint with --bits {system.draft_bits}"
        )


def set_threads(system: System) -> None:
    """Compute with as many threads as asked for; to be said once, before anything is loaded.

    Without a number it is torch's own choice, less the core on which an emulated link copies.
    UsageError for less than one, or an unknown device.
    """
    check_count("--threads", system.threads)
    kind = device_kind(system)
    import torch

    own = torch.get_num_threads()
    spare = 1 if kind.value == "emulated" else 0
    torch.set_num_threads(system.threads or max(1, own - spare))


def device_kind(system: System) -> DeviceKind:
    """The device by name. Raises UsageError with the nearest."""
    from specter_runtime.devices import DeviceKind
    from specter_sim.names import suggestion

    kinds = {kind.value: kind for kind in DeviceKind}
    if system.device not in kinds:
        hint = suggestion(system.device, kinds)
        raise UsageError(f'unknown device "{system.device}": {hint}')
    return kinds[system.device]


@contextmanager
def progress_bar(doing: str) -> Iterator[Progress | None]:
    """A bar of bytes; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (doing, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
