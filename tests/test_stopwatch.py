"""Seconds by purpose: nothing is counted twice, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_runtime.stopwatch import Samples, Stopwatch
from specter_sim.results import Span


class Clock:
    """Seconds that pass when they are told to; some of them are waits for loads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0

    def now(self) -> float:
        return self.now_s

    def waited(self) -> float:
        return self.waited_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, seconds: float) -> None:
        self.spend(seconds)
        self.waited_s += seconds


def stopwatch(timeline: list[Span] | None = None) -> tuple[Clock, Stopwatch]:
    clock = Clock()
    return clock, Stopwatch(clock.now, clock.waited, timeline)


_seconds = st.integers(0, 1000).map(float)
_parts = st.lists(st.tuples(st.sampled_from(["apply", "ask", "wait", "decide"]), _seconds))


@given(st.lists(st.tuples(_seconds, _parts), max_size=5), st.lists(_seconds, max_size=5))
def test_times_add_up(
    layers: Sequence[tuple[float, Sequence[tuple[str, float]]]], drafts: Sequence[float]
) -> None:
    clock, watch = stopwatch()
    watch.samples = Samples()
    for step, seconds in enumerate(drafts, 1):
        with watch.drafting(step) as drafted:
            clock.spend(seconds)
        assert drafted.seconds == seconds
    with watch.verifying(3) as timed:
        visit = timed.around(lambda layer: visited(clock, watch, layer, layers[layer][1]))
        for layer, (seconds, _) in enumerate(layers):
            clock.spend(seconds)
            visit(layer)
    spent = dict.fromkeys(("apply", "ask", "wait", "decide"), 0.0)
    for _, parts in layers:
        for kind, seconds in parts:
            spent[kind] += seconds
    outside = sum(seconds for seconds, _ in layers)
    assert watch.draft_s == sum(drafts) == sum(watch.samples.drafts)
    assert watch.compute_s == outside + spent["apply"] + spent["ask"]
    assert watch.scheduling_s == spent["decide"]
    assert clock.waited_s == spent["wait"]
    assert watch.draft_s + watch.compute_s + watch.scheduling_s + clock.waited_s == clock.now_s
    assert watch.samples.passes == [(3, outside, spent["decide"])]
    assert sum(seconds for *_, seconds in watch.samples.runs) == spent["apply"]


def visited(clock: Clock, watch: Stopwatch, layer: int, parts: Sequence[tuple[str, float]]) -> None:
    """One visit that consists of `parts`."""
    for kind, seconds in parts:
        if kind == "apply":
            with watch.applying(layer, 2, 5):
                clock.spend(seconds)
        elif kind == "ask":
            with watch.asking():
                clock.spend(seconds)
        elif kind == "wait":
            clock.wait(seconds)
        else:
            clock.spend(seconds)


def test_a_timeline_has_a_span_for_every_stretch() -> None:
    spans: list[Span] = []
    clock, watch = stopwatch(spans)
    with watch.drafting(1):
        clock.spend(2)
    with watch.verifying(2) as timed:
        clock.spend(1)
        timed.around(lambda layer: visited(clock, watch, layer, [("wait", 3), ("apply", 4)]))(1)
    assert [(span.name, span.start_s, span.end_s) for span in spans] == [
        ("draft 1", 0, 2),
        ("2 experts of layer 1", 6, 10),
        ("target pass", 2, 10),
    ]
    assert [span.args["kind"] for span in spans] == ["draft", "compute", "verify"]
    assert {span.track for span in spans} == {"gpu"}


def test_a_pass_that_is_cut_off_still_adds_up() -> None:
    clock, watch = stopwatch()
    with pytest.raises(KeyboardInterrupt), watch.verifying(1) as timed:
        clock.spend(1)
        timed.around(lambda layer: visited(clock, watch, layer, [("decide", 1), ("apply", 4)]))(0)
        clock.spend(2)
        raise KeyboardInterrupt
    assert watch.compute_s == 7
    assert watch.scheduling_s == 1
