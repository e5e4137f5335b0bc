"""Files that a run leaves on request: every scheduling decision, and a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specter_traces.errors import UsageError
from specter_traces.files import write_atomic

if TYPE_CHECKING:
    from specter_sim.offload.journal import Journal
    from specter_sim.results import Span


def check_writable(*paths: Path | None) -> None:
    """Refuse, before any work is done, a file whose folder is not there."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder; give a file name")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.resolve().parent}")


def write_journals(path: Path, journals: Iterable[Journal]) -> Path:
    """One JSON line a call: the journal it is in, the call, its arguments and its answer."""
    lines = [
        json.dumps([number, entry.call, _plain(entry.args), _plain(entry.answer)])
        for number, journal in enumerate(journals)
        for entry in journal
    ]
    return write_atomic(path, "".join(f"{line}\n" for line in lines))


def write_spans(path: Path, spans: Sequence[Span], conditions: str) -> Path:
    """A timeline that ui.perfetto.dev opens."""
    from specter_sim.report.timeline import write_timeline

    return write_timeline(path, spans, {"conditions": conditions})


def _plain(value: Any) -> Any:
    """A value as JSON has it; records become their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.item() if hasattr(value, "item") else value
