"""`specter-sim report`, from a folder of results to a page or to one line of error."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_report import made_row
from toy_traces import toy_trace

from specter_sim.cli.app import app, exit_code_of
from specter_sim.cli.report import NUMBERS, REQUIRED, read_study
from specter_sim.config import build, resolved
from specter_sim.report.html import NEVER_VALIDATED
from specter_sim.sweep import tables
from specter_sim.sweep.store import Record, Store
from specter_traces import save

NOT_RESULTS = ("model", "preset")


def made_record(index: int, slots: int = 8, depth: int = 0, **changes: Any) -> dict[str, Any]:
    """A record as a sweep keeps it, with a result from the crude model of the other reports."""
    policy = {"depth": "fixed", "depth_params": {"depth": depth}} if depth else {}
    row = made_row(slots, depth, **changes)
    return {
        "key": f"{index:016x}",
        "computed_at": f"2026-11-30T21:19:{index:02d}+00:00",
        "config": resolved(build({"memory": {"slots": slots}, "policy": policy})),
        "result": {
            key: row[key] for key in row if "." not in key and key not in ("model", "preset")
        },
    }


def write_tables(folder: Path, records: list[Record], about: dict[str, Any]) -> None:
    """What a sweep leaves that computed these records."""
    keys = [record["key"] for record in records]
    with Store(folder) as store:
        for record in records:
            store.append(record)
        tables.write_tables(store, keys, tables.read_rows(store, keys), about)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a finished sweep of four configurations leaves."""
    path = tmp_path / "swept"
    records = [made_record(slots + depth, slots, depth) for slots in (8, 12) for depth in (0, 2)]
    records.append({"key": "f" * 16, "config": records[0]["config"], "error": "no <room>"})
    write_tables(path, records, {"date": "2026-11-30", "version": "0"})
    return path


def run(*arguments: object) -> int:
    call = ["report", *map(str, arguments)]
    return exit_code_of(lambda: app(call, prog_name="specter-sim", standalone_mode=False))


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert run(*arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_a_real_sweep_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "toy.safetensors", tmp_path / "out"
    save(toy_trace(8, 48, 6, (80, 80)), trace)
    settings = ["--set", f"trace.path={trace}", "--set", "trace.tokens=32", "--no-plots"]
    call = ["sweep", *settings, "--axis", "memory.slots=[12,24]", "--axis", "policy.depth=[0,2]"]
    call += ["--axis", "machine.link_bandwidth=['200 MB/s']", "--out", str(out), "--workers", "1"]
    keys = ("experts.form=plain", "policy.eviction=lru", "policy.prefetch=none")
    call += [part for key in keys for part in ("--set", key)]
    assert exit_code_of(lambda: app(call, prog_name="specter-sim", standalone_mode=False)) == 0
    assert run(out) == 0
    printed = capsys.readouterr().out
    assert f"wrote {out / 'report.html'}" in printed
    rows = read_study(out).rows
    best = min(rows, key=lambda row: row["tpot_s"])
    page = (out / "report.html").read_text()
    assert len(rows) == 4 and f"{best['tokens_per_s']:.1f} tokens/s" in page
    assert "the emulated device of specter-run" in page and NEVER_VALIDATED not in page
    assert "speculation" in printed


def test_json_and_another_place(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--out", tmp_path / "a" / "b.html", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(tmp_path / "a" / "b.html") and Path(told["file"]).is_file()
    best = min(read_study(folder).rows, key=lambda row: row["tpot_s"])
    assert told["best"] == best["key"] and "is the best of 4 configurations" in told["answer"]


def test_failures_are_counted_and_escaped(folder: Path) -> None:
    assert run(folder) == 0
    page = (folder / "report.html").read_text()
    assert "1 could not run, the first because no &lt;room&gt;" in page


def test_the_question_comes_from_the_option_then_from_the_sweep(folder: Path) -> None:
    assert "fastest on emulated-cpu" in _question(folder)
    (folder / "sweep.toml").write_text('question = "How many slots?"\n')
    assert _question(folder) == "How many slots?"
    assert _question(folder, "--question", "Is it & fast?") == "Is it &amp; fast?"


def _question(folder: Path, *options: str) -> str:
    assert run(folder, *options) == 0
    page = (folder / "report.html").read_text()
    return page.partition("<h1>")[2].partition("</h1>")[0]


def test_a_validation_file_is_held_against_the_answer(folder: Path, tmp_path: Path) -> None:
    point = {
        "name": "on demand",
        "date": "2026-11-01",
        "machine": "two cores",
        "source": "a stopwatch",
        "config": {"model": "tiny-moe"},
        "metric": "tpot_s",
        "predicted": 4e-3,
        "measured": 5e-3,
    }
    path = tmp_path / "points.json"
    path.write_text(json.dumps({"points": [point]}))
    assert run(folder, "--validation", path) == 0
    page = (folder / "report.html").read_text()
    assert "20.0% below the measurement" in page and NEVER_VALIDATED not in page


def test_an_unfinished_sweep_is_read_and_marked(folder: Path) -> None:
    (folder / "results.json").unlink()
    records = folder / "results.jsonl"
    again = made_record(99, 8, 0, tpot_s=1.0)  # the first configuration, computed once more
    records.write_text(records.read_text() + json.dumps(again) + '\n{"key": "torn')
    study = read_study(folder)
    assert study.remarks == ["The sweep has not finished: 4 results so far."]
    assert [row["key"] for row in study.rows].count(again["key"]) == 1
    assert len(study.rows) == 4


def test_without_the_trace_the_rows_give_the_verdict(tmp_path: Path) -> None:
    records = [made_record(1, 24), made_record(2, 12, 2)]
    records[1]["result"]["tpot_s"] = records[0]["result"]["tpot_s"] / 2
    records[0]["result"]["device_bytes"] = records[1]["result"]["device_bytes"]
    for record in records:
        record["config"]["trace"]["path"] = "/gone.safetensors"
    write_tables(tmp_path, records, {})
    found = read_study(tmp_path).speculation
    assert found.pays and found.speedup == pytest.approx(2.0)
    assert "the fastest rows of this sweep" in found.text
    write_tables(tmp_path, records[:1], {})
    alone = read_study(tmp_path).speculation
    assert alone.pays is None and "/gone.safetensors" in alone.text


def test_the_numbers_that_are_checked_are_the_results_own() -> None:
    assert set(REQUIRED) < set(NUMBERS) and "tpot_s" in NUMBERS and "notes" not in NUMBERS


# Errors


def test_a_folder_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, 2, tmp_path)
    assert "holds no results of a sweep: run specter-sim sweep --out" in told
    assert "does not exist" in refused(capsys, 2, tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(capsys, 2, tmp_path / "file")
    (tmp_path / "results.jsonl").write_text("")
    assert "holds no result yet" in refused(capsys, 2, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("results.json", b"{", "is not a sweep's table"),
        ("results.json", b"[]", "is not a sweep's table"),
        ("results.json", b'{"results": [{"key": 3}]}', "is not a sweep's table"),
        ("results.json", b'{"results": [{"key": "a", "config": {}}]}', "is not a sweep's table"),
        ("results.json", b'{"results": []}', "is not a sweep's table"),
        ("results.json", b"\xff\xfe", "is not UTF-8 text"),
        ("results.jsonl", b"3\n", "line 1 is not a result"),
        ("results.jsonl", b"nonsense\n", "line 1 is not a result"),
    ],
)
def test_results_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refused(capsys, 2, tmp_path)


@pytest.mark.parametrize(("metric", "value"), [("device_bytes", None), ("tpot_s", "<b>")])
def test_a_metric_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, value: object
) -> None:
    record = made_record(1)
    record["result"][metric] = value
    write_tables(tmp_path, [record], {})
    assert f"has {metric} = {value!r}, which is no number" in refused(capsys, 2, tmp_path)


def test_a_sweep_of_which_nothing_could_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"key": "a", "config": made_record(1)["config"], "error": "no room"}
    write_tables(tmp_path, [failed], {})
    assert "none of 1 configurations could run: no room" in refused(capsys, 1, tmp_path)


def test_a_place_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = folder / "results.csv" / "page.html"
    assert "cannot write" in refused(capsys, 2, folder, "--out", blocked)
    assert "cannot write" in refused(capsys, 2, folder, "--out", folder)
    assert not list(folder.parent.glob(".*"))


def test_a_validation_file_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, 2, folder, "--validation", folder / "gone.json")
    assert "cannot read the validation file" in told
