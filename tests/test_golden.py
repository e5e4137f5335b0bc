"""Golden rows: policy x slots on one fixed trace. ``--rewrite-golden`` writes them anew.

A changed row is a changed decision: review the diff of tests/golden/*.json like code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from routes import random_trace, run_of

from specter_sim.policies import DEPTH, EVICTION, PREFETCH

GOLDEN = Path(__file__).parent / "golden"
COUNTS = (
    "demands",
    "hits",
    "pending_hits",
    "misses",
    "demand_loads",
    "prefetch_loads",
    "evictions",
    "useful_prefetches",
    "late_prefetches",
    "wasted_prefetches",
    "windows",
)
SECONDS = ("tpot_s", "run_s", "draft_s", "stall_demand_s", "stall_late_s", "stall_join_s")
SLOTS = (3, 4, 6)


def evictions() -> dict[str, dict[str, Any]]:
    return {
        f"{name} depth {depth}": {"policy.eviction": name, "policy.depth": depth}
        for name in EVICTION
        for depth in (0, 3)
    }


def prefetches() -> dict[str, dict[str, Any]]:
    return {
        name: {
            "policy.prefetch": name,
            "policy.depth": 4,
            "memory.layout": "global" if name == "stream" else "per-layer",
        }
        for name in PREFETCH
    }


def depths() -> dict[str, dict[str, Any]]:
    return {
        f"{name} {prefetch}": {"policy.depth": name, "policy.prefetch": prefetch}
        for name in DEPTH
        for prefetch in ("none", "continuous")
        if name != "never" or prefetch == "none"
    }


def systems() -> dict[str, dict[str, Any]]:
    base = {"policy.depth": 4, "policy.prefetch": "continuous", "policy.eviction": "predicted"}
    return {
        "global budget": {**base, "memory.layout": "global"},
        "staging": {**base, "policy.demand": "staging", "memory.staging_slots": 3},
        "one by one": {**base, "experts.grouped": False},
        "coded base": {**base, "experts.form": "coded-base"},
        "cold requests": {**base, "trace.between": "cold", "memory.initial": "popular"},
        "deep queue": {**base, "machine.queue_depth": 8, "machine.link_latency": "200 us"},
        "paper": {**base, "policy.prefetch": "paper", "memory.initial": "highest"},
    }


FAMILIES = {
    "eviction": evictions,
    "prefetch": prefetches,
    "depth": depths,
    "systems": systems,
}


def rows_of(family: str) -> dict[str, dict[str, float]]:
    trace = random_trace(40, layers=3, experts=8, sequences=2, prompt=5, seed=11)
    rows = {}
    for name, settings in FAMILIES[family]().items():
        keys = {key.replace(".", "__"): value for key, value in settings.items()}
        for slots in SLOTS:
            # 2.5 ms a load: neither the link nor the device is idle for long.
            given = {"machine__link_bandwidth": "10 MB/s", **keys}
            result = run_of(trace, memory__slots=slots, **given).result.row()
            row = {field: int(result[field]) for field in COUNTS}
            seconds = {field: float(f"{float(result[field]):.9g}") for field in SECONDS}
            rows[f"{name}, {slots} slots"] = {**row, **seconds}
    return rows


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_golden(family: str, request: pytest.FixtureRequest) -> None:
    rows, path = rows_of(family), GOLDEN / f"{family}.json"
    if request.config.getoption("--rewrite-golden"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in rows)
        path.write_text(f"{{\n{lines}\n}}\n")
        return
    known = json.loads(path.read_text())
    assert list(rows) == list(known)
    for name, row in rows.items():
        assert row == pytest.approx(known[name], rel=1e-6, abs=1e-12), name


def test_golden_rows_tell_the_policies_apart() -> None:
    """A file full of equal rows would guard nothing."""
    for family in FAMILIES:
        known = json.loads((GOLDEN / f"{family}.json").read_text())
        tight = [json.dumps(row) for name, row in known.items() if name.endswith("4 slots")]
        assert len(set(tight)) > 0.7 * len(tight), family
