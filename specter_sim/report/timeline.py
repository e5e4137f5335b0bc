"""Timelines of a run in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specter_sim.results import Span
from specter_traces.files import write_atomic


def write_timeline(path: Path, spans: Sequence[Span], about: Mapping[str, str]) -> Path:
    """Write spans as complete events, one thread a track, with the run's conditions beside them.

    Times in the file are microseconds. Raises UsageError when the file cannot be written.
    """
    tracks = {track: number for number, track in enumerate(_tracks(spans), start=1)}
    document = {
        "displayTimeUnit": "ms",
        "otherData": dict(about),
        "traceEvents": [
            _name("process_name", 0, "specter-sim"),
            *(_name("thread_name", number, track) for track, number in tracks.items()),
            *(_event(span, tracks[span.track]) for span in spans),
        ],
    }
    return write_atomic(path, json.dumps(document, separators=(",", ":")) + "\n")


def _tracks(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.track for span in spans))


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}


def _event(span: Span, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": span.name,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": dict(span.args),
    }
