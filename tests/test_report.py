"""Reports: labels, verdicts, tables, pictures and timelines, from rows made by a small model."""

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from specter_sim.config import build, flatten, resolved
from specter_sim.report.plots import draw_all, pareto
from specter_sim.report.rows import (
    best_by,
    conditions,
    depth_label,
    panels,
    policy_label,
    short_name,
    value_text,
    varying,
)
from specter_sim.report.tables import describe, marks, render, results_table
from specter_sim.report.timeline import write_timeline
from specter_sim.report.verdict import judge
from specter_sim.results import Span
from specter_traces.errors import UsageError

TOKENS = 256


def made_row(
    slots: int = 12, depth: int = 0, eviction: str = "lru", link: float = 16e9, **changes: Any
) -> dict[str, Any]:
    """A row with every column of a real one, from a crude model of decoding."""
    config = {
        "memory": {"slots": slots},
        "machine": {"link_bandwidth": link},
        "policy": {
            "eviction": eviction,
            "depth": "fixed" if depth else "never",
            "depth_params": {"depth": depth} if depth else {},
        },
    }
    miss = (1 - slots / 48) ** (1.3 if eviction == "lru" else 1.0)
    tokens_per_window = 1 + 0.8 * depth / (1 + 0.1 * depth)
    bytes_per_token = 8 * 6 * miss * 221184 * (1 + 0.05 * depth)
    draft_s = TOKENS * 40e-6 * depth / tokens_per_window
    compute_s = TOKENS * 400e-6 / tokens_per_window
    stall_s = TOKENS * max(0.0, bytes_per_token / link - draft_s / TOKENS)
    decode_s = draft_s + compute_s + stall_s
    row: dict[str, Any] = {
        "link_bytes_per_s": link,
        "tpot_s": decode_s / TOKENS,
        "tpot_paper_s": decode_s / (TOKENS - 1),
        "tpot_p50_s": decode_s / TOKENS,
        "tpot_p99_s": 2 * decode_s / TOKENS,
        "ttft_s": 0.01,
        "prefill_s": 0.01,
        "tokens_per_s": TOKENS / decode_s,
        "run_s": decode_s + 0.01,
        "decode_s": decode_s,
        "requests": 1,
        "committed_tokens": TOKENS,
        "windows": round(TOKENS / tokens_per_window),
        "mean_depth": float(depth),
        "acceptance": 0.93 if depth else 0.0,
        "window_utilization": 0.7 if depth else 0.0,
        "tokens_per_window": tokens_per_window,
        "demands": 12288,
        "hits": 9000,
        "pending_hits": 88,
        "misses": 3200,
        "hit_rate": 1 - miss,
        "pending_rate": 0.01,
        "loads": 3500,
        "evictions": 3400,
        "useful_prefetches": 200,
        "late_prefetches": 88,
        "wasted_prefetches": 12,
        "bytes_per_token": bytes_per_token,
        "demand_bytes_per_token": 0.9 * bytes_per_token,
        "useful_bytes_per_token": 0.06 * bytes_per_token,
        "late_bytes_per_token": 0.03 * bytes_per_token,
        "wasted_bytes_per_token": 0.01 * bytes_per_token,
        "draft_s": draft_s,
        "compute_s": compute_s,
        "stall_demand_s": 0.7 * stall_s,
        "stall_late_s": 0.2 * stall_s,
        "stall_join_s": 0.1 * stall_s,
        "idle_s": 0.0,
        "link_busy_s": stall_s,
        "bound_s": 0.6 * decode_s,
        "bound_resource": "link",
        "distance_to_bound": 1 / 0.6,
        "device_bytes": 5_000_000 + slots * 8 * 221184 + (20_000_000 if depth else 0),
        "dense_bytes": 5_000_000,
        "draft_bytes": 20_000_000 if depth else 0,
        "slot_bytes": slots * 8 * 221184,
        "kv_bytes": 1000,
        "buffer_bytes": 0,
        "slots_per_layer": float(slots),
        "host_bytes": 85_000_000,
        "synthetic": False,
        "assumed_draft": False,
        "notes": "",
    }
    return flatten(resolved(build(config))) | row | changes


def made_sweep() -> list[dict[str, Any]]:
    slots, depths = (8, 12, 16, 24, 32), (0, 1, 2, 4, 8)
    rules, links = ("lru", "lfu", "belady"), (4e9, 16e9, 64e9)
    return [made_row(*point) for point in itertools.product(slots, depths, rules, links)]


# Labels


def test_what_varies() -> None:
    rows = made_sweep()
    assert varying(rows) == [
        "machine.link_bandwidth",
        "memory.slots",
        "policy.eviction",
        "policy.depth",
        "policy.depth_params.depth",
    ]
    assert [title for title, _ in panels(rows, 3)] == [
        "link bandwidth 4.00 GB/s",
        "link bandwidth 16.0 GB/s",
        "link bandwidth 64.0 GB/s",
    ]
    assert [len(panel) for _, panel in panels(rows, 2)] == [75, 75]


def test_names_of_policies_and_depths() -> None:
    keys = varying(made_sweep())
    assert policy_label(made_row(eviction="lfu", depth=4), keys) == "lfu"
    assert policy_label(made_row(), []) == "lru + none"
    assert policy_label(made_row(preset="specter"), ["preset", "policy.eviction"]) == "specter"
    bits = ["experts.draft_bits", "policy.eviction"]
    assert policy_label(made_row(), bits) == "draft bits 4 + lru"
    assert policy_label(made_row(eviction="belady"), keys) == "belady (bound)"
    assert depth_label(made_row()) == "0"
    assert depth_label(made_row(depth=4)) == "4"
    assert depth_label({"policy.depth": "governor"}) == "governor"


def test_values_are_told_in_human_units() -> None:
    assert value_text("machine.link_bandwidth", 25e9) == "25.0 GB/s"
    assert value_text("memory.slots", None) == "none"
    assert short_name("policy.prefetch_params.recall") == "prefetch recall"
    assert short_name("machine.queue_depth") == "queue depth"


def test_conditions_name_model_trace_machine_link_and_date() -> None:
    told = conditions([made_row(), made_row(link=64e9)], "2026-01-31")
    assert told == (
        "model tiny-moe · trace tiny-moe, 256 tokens · machine emulated-cpu"
        " · link 16.0 GB/s … 64.0 GB/s · 2026-01-31"
    )
    assert "(synthetic, assumed draft)" in conditions(
        [made_row(synthetic=True, assumed_draft=True)], "today"
    )


def test_a_bound_is_never_the_best() -> None:
    rows = [made_row(eviction="belady", tpot_s=1e-9), made_row(tpot_s=None), made_row()]
    assert best_by(rows) is rows[2]
    assert pareto(rows[:1]) == []
    assert best_by(rows[:2]) is None


def test_what_does_not_fit_is_never_the_best() -> None:
    rows = [made_row(tpot_s=1e-9, gpu_memory_bytes=1000), made_row(gpu_memory_bytes=10**12)]
    assert best_by(rows) is rows[1]


# Verdict


def test_speculation_that_pays_says_by_how_much() -> None:
    verdict = judge(made_row(slots=40, depth=8), made_row(slots=44))
    assert verdict.pays
    assert verdict.speedup > 1
    assert verdict.text.startswith(f"speculation pays: x{verdict.speedup:.2f}")


def test_speculation_that_loses_says_why() -> None:
    drafted = made_row(slots=4, depth=8, link=1e9, bytes_per_token=4e6)
    verdict = judge(drafted, made_row(slots=20, link=1e9, bytes_per_token=2e6))
    assert not verdict.pays
    assert verdict.text.startswith("do not speculate here, because it is x")
    assert "waiting for experts +" in verdict.text
    assert "(x2.00 the bytes a token, 4.0 slots a layer against 20.0)" in verdict.text


def test_a_slow_draft_is_named_as_the_cause() -> None:
    drafted = made_row(slots=40, depth=4) | {"draft_s": 1.0, "tpot_s": 1.0}
    assert "because it is" in judge(drafted, made_row(slots=40)).text
    assert "drafting costs +" in judge(drafted, made_row(slots=40)).text


# Tables


def test_a_result_states_everything_that_is_promised() -> None:
    text = describe(made_row(depth=4, synthetic=True, assumed_draft=True, notes="one; two"))
    for said in (
        "hit rate",
        "pending hits",
        "demand ",
        "useful ",
        "late ",
        "wasted ",
        "prefetch  200 useful, 88 late, 12 wasted",
        "bound     x1.67 of the least possible",
        "set by link",
        "acceptance 0.930",
        "stall on demand loads",
        "synthetic trace",
        "assumed draft",
        "note      two",
        "slots a layer",
    ):
        assert said in text, said
    assert "nothing drafted" in describe(made_row())
    assert marks(made_row()) == []


def test_tables_are_aligned() -> None:
    assert render(["name", "n"], [["a", "10"], ["long name", "5"]]) == (
        "name        n\n---------  --\na          10\nlong name   5"
    )
    text = results_table([made_row(), made_row(tpot_s=None)], {"slots": lambda row: "12"})
    assert len(text.splitlines()) == 4
    assert text.splitlines()[-1].split()[1] == "-"


# Pictures


def size_of(png: Path) -> tuple[int, int]:
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_a_sweep_gives_all_figures(tmp_path: Path) -> None:
    drawn = draw_all(made_sweep(), tmp_path, "2026-01-31")
    names = ["tpot_slots.png", "depth_slots.png", "pareto.png", "time.png"]
    assert [path.name for path in drawn] == names
    assert all(min(size_of(path)) > 400 for path in drawn)


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    assert draw_all([made_row(tpot_s=None)], tmp_path, "") == []
    drawn = draw_all([made_row(), made_row(eviction="lfu")], tmp_path, "")
    assert [path.name for path in drawn] == ["pareto.png", "time.png"]


def test_the_pareto_front_is_what_none_beats() -> None:
    rows = [
        {"device_bytes": memory, "tpot_s": tpot}
        for memory, tpot in [(1, 9.0), (2, 9.5), (2, 5.0), (3, 5.0), (4, 1.0)]
    ]
    assert pareto(rows) == [rows[0], rows[2], rows[4]]


# Timelines


def test_a_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    spans = [
        Span("gpu", "verify", 0.001, 0.003, {"tokens": 5}),
        Span("link", "load", 0.0, 0.002, {"layer": 1}),
    ]
    path = write_timeline(tmp_path / "timeline.json", spans, {"model": "tiny-moe"})
    document = json.loads(path.read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert document["otherData"] == {"model": "tiny-moe"}
    assert [names[event["tid"]] for event in events] == ["gpu", "link"]
    assert events[0]["ts"] == pytest.approx(1000)
    assert events[0]["dur"] == pytest.approx(2000)
    assert events[0]["args"] == {"tokens": 5}


def test_a_timeline_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_timeline(tmp_path / "file" / "timeline.json", [], {})
