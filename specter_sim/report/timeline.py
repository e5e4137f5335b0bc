"""Timelines of a run in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specter_sim.config import RunConfig
from specter_sim.results import Span
from specter_sim.setup import resolve
from specter_sim.sim import Run, World, simulate
from specter_sim.sim.profile import with_profiled_depth
from specter_traces.errors import UsageError
from specter_traces.files import write_atomic


def spans_of_tokens(config: RunConfig, first: int, last: int) -> list[Span]:
    """Simulate and return what happened while tokens `first` to `last` (not included) were decoded.

    Beside the device's own spans there is one for every window and one for every stall. Raises
    UsageError when the run has fewer tokens.
    """
    setup = resolve(config)
    if setup.depth.name == "profile":
        setup = with_profiled_depth(setup, simulate)
    spans: list[Span] = []
    run = World(setup, spans).serve()
    windows = [span for span in _windows(run) if _overlaps(span, first, last)]
    if not windows:
        raise UsageError(
            f"no token of {first}:{last}: the run commits {run.result.committed_tokens}"
        )
    begin_s, end_s = windows[0].start_s, windows[-1].end_s
    everything = [*windows, *_stalls(run), *spans]
    return [span for span in everything if span.start_s < end_s and span.end_s > begin_s]


def _windows(run: Run) -> Iterator[Span]:
    token = 0
    for number, window in enumerate(window for served in run.served for window in served.windows):
        committed = window.outcome.accepted + 1
        args: dict[str, str | int | float] = {
            "first_token": token,
            "depth": window.outcome.depth,
            "accepted": window.outcome.accepted,
            "demands": window.outcome.demands,
            "loads": window.outcome.loads,
        }
        yield Span("windows", f"window {number}", window.began_s, window.ended_s, args)
        token += committed


def _overlaps(window: Span, first: int, last: int) -> bool:
    begin = int(window.args["first_token"])
    return begin < last and begin + int(window.args["accepted"]) >= first


def _stalls(run: Run) -> Iterator[Span]:
    for served in run.served:
        for stall in (stall for window in served.windows for stall in window.stalls):
            end_s = stall.began_s + stall.seconds
            yield Span("stalls", stall.cause.value, stall.began_s, end_s, {"layer": stall.layer})


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
