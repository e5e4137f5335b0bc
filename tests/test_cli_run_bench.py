"""`specter-run bench`: rows at equal memory that no interruption loses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from specter_run import InterruptedSession, Told, interrupted, run
from toy_checkpoints import TOYS, write

from specter_runtime.cli.bench import POLICIES
from specter_runtime.cli.bench_rows import COLUMNS, Rows
from specter_traces import UsageError

__all__ = ["interrupted"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(TOYS["qwen3-moe"], tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"tokens": [3 + i, 4, 5]}) + "\n" for i in range(2)))
    return path


def bench(capsys: Capture, *options: object) -> Told:
    given = ("--new-tokens", 4, "--threads", 1)
    return run(capsys, "bench", *options, *given, "--no-predict")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_policies_share_one_memory(
    toy: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    given = (toy, "--prompts", prompts, "--out", out, "--json", "--device", "immediate")
    coded = ("--dtype", "bfloat16")  # what coding is for
    rows = bench(capsys, *given, *coded, "--vram", "2 MB").document()["rows"]
    by_policy = {row["policy"]: row for row in rows}
    assert list(by_policy) == [row["policy"] for row in read(out)] == list(POLICIES)
    for row in rows:
        assert row["error"] is None and row["peak_device_bytes"] <= row["budget_bytes"] == 2e6
        assert (row["requests"], row["committed_tokens"]) == (2, 8)
    plain, drafted = by_policy["plain"], by_policy["plain-drafted"]
    assert drafted["draft_bytes"] > 0 == plain["draft_bytes"]
    assert by_policy["paper-artifact"]["buffer_bytes"] > plain["buffer_bytes"]


def test_predictions_stand_beside_what_was_measured(
    toy: Path, prompts: Path, capsys: Capture
) -> None:
    given = (toy, "--prompts", prompts, "--vram", "1 MB", "--threads", 1, "--new-tokens", 12)
    told = run(capsys, "bench", *given, "--policy", "plain", "--link", "10 MB/s")
    assert told.code == 0 and all(len(line) <= 80 for line in told.out.splitlines())
    assert "predicted" in told.out
    two = ("--policy", "plain", "--policy", "plain-drafted")
    rows = run(capsys, "bench", *given, *two, "--json").document()["rows"]
    for row in rows:
        assert row["predicted_fast_tpot_s"] <= row["predicted_tpot_s"]
        assert row["predicted_tpot_s"] <= row["predicted_slow_tpot_s"]
        assert 0.1 < row["predicted_bytes_per_token"] / row["bytes_per_token"] < 10
        assert 0.1 < row["predicted_tpot_s"] / row["tpot_s"] < 10


def test_a_tuned_file_is_a_policy_too(
    toy: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "best.toml"
    path.write_text('[policy]\neviction = "fifo"\n')
    given = (toy, "--prompts", prompts, "--config", path, "--vram", "1 MB")
    both = ("--policy", "as-configured", "--policy", "on-demand-lru")
    told = bench(capsys, *given, *both, "--device", "immediate", "--json")
    first, second = told.document()["rows"]
    assert first["policy"].startswith("fifo") and second["policy"] == "on-demand-lru"


def test_without_a_budget_it_is_that_of_half_the_experts(
    toy: Path, prompts: Path, capsys: Capture
) -> None:
    given = (toy, "--prompts", prompts, "--policy", "plain", "--device", "immediate", "--json")
    (row,) = bench(capsys, *given).document()["rows"]
    assert row["slots_per_layer"] == 4 and row["device_bytes"] == row["budget_bytes"]


def test_links_are_rows_and_figures_follow_them(toy: Path, prompts: Path, capsys: Capture) -> None:
    links = ("--link", "1 MB/s", "--link", "10 MB/s")
    told = bench(capsys, toy, "--prompts", prompts, "--policy", "on-demand-lru", *links)
    assert told.code == 0 and all(len(line) <= 80 for line in told.out.splitlines())
    slow, fast = (line.split() for line in told.out.splitlines() if line.startswith("on-demand"))
    assert slow[1:3] == ["1.00", "MB/s"] and fast[1:3] == ["10.0", "MB/s"]
    assert float(slow[3]) > float(fast[3])


def test_rows_that_are_there_are_not_run_again(
    toy: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    given = (toy, "--prompts", prompts, "--out", out, "--device", "immediate")
    lru = ("--policy", "on-demand-lru")
    first = bench(capsys, *given, "--vram", "1 MB", *lru)
    before = read(out)
    again = bench(capsys, *given, "--vram", "1 MB", *lru, "--policy", "plain")
    assert again.err.count("done before") == 1
    assert read(out)[0] == before[0] and len(read(out)) == 2
    assert first.out.splitlines()[-1] in again.out.splitlines()
    other = bench(capsys, *given, "--vram", "1 MB", *lru, "--seed", 1, "--temperature", 1)
    assert "done before" not in other.err and len(read(out)) == 3


def test_ctrl_c_keeps_finished_rows(
    interrupted: type[InterruptedSession],
    toy: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(interrupted, "presses", ())
    out = tmp_path / "rows.csv"
    given = (toy, "--prompts", prompts, "--out", out, "--vram", "1 MB", "--device", "immediate")
    two = ("--policy", "on-demand-lru", "--policy", "plain")
    bench(capsys, *given, *two[:2])
    interrupted.prompts.clear()
    monkeypatch.setattr(interrupted, "presses", (1,))
    told = bench(capsys, *given, *two)
    assert told.code == 130 and told.err.endswith("error: interrupted\n")
    assert "on-demand-lru" in told.out and [row["policy"] for row in read(out)] == [two[1]]
    monkeypatch.setattr(interrupted, "presses", ())
    assert bench(capsys, *given, *two).code == 0
    assert [row["policy"] for row in read(out)] == [two[1], two[3]]


def test_what_cannot_run_is_a_row_and_is_tried_again(
    toy: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    given = (toy, "--prompts", prompts, "--out", out, "--vram", "1 MB", "--device", "immediate")
    some = ("--policy", "paper-artifact", "--policy", "on-demand-lru")
    for done in range(2):
        told = bench(capsys, *given, *some)
        assert told.err.count("done before") == done  # the one that ran
        assert (
            told.code == 0 and "paper-artifact cannot run: toy does not run in 1.00 MB" in told.out
        )
        assert len(read(out)) == 2
    told = bench(capsys, *given, *some[:2])
    assert told.code == 1 and "no policy could run" in told.err


def test_loops_are_told(toy: Path, prompts: Path, capsys: Capture) -> None:
    given = (toy, "--prompts", prompts, "--vram", "1 MB", "--device", "immediate")
    asked = ("--policy", "plain", "--new-tokens", 60, "--no-predict", "--threads", 1)
    assert "8-grams are repeats" in " ".join(run(capsys, "bench", *given, *asked).out.split())
    (row,) = run(capsys, "bench", *given, *asked, "--json").document()["rows"]
    assert row["repetition"] > 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nowhere",), "no model folder nowhere"),
        (("--policy", "none"), 'unknown policy "none"'),
        (("--set", "memory.slots=9"), "give --vram instead of slots"),
        (("--prompts", "none.jsonl"), "no prompt file none.jsonl"),
        (("--sequences", "0"), "--sequences must be at least 1"),
        (("--out", "/absent/rows.csv"), "there is no folder /absent"),
    ],
)
def test_bad_requests_get_one_line(options: tuple[str, ...], message: str, capsys: Capture) -> None:
    told = bench(capsys, *options)
    assert told.code == 2 and told.out == ""
    assert told.err.startswith("error: ") and message in told.err
    assert len(told.err.splitlines()) == 1


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(COLUMNS) | {
        "key": "857ad1337358deed",
        "policy": 'a, "b"',
        "tpot_s": 0.1,
        "hits": 7,
        "synthetic": False,
    }
    Rows(path).add(row)
    assert Rows(path).find("857ad1337358deed") == row
    assert Rows(path).find("other") is None


def test_another_file_is_not_taken_for_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for content in (b"", b"a,b\n1,2\n", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"rows\.csv"):
            Rows(path)
        assert path.read_bytes() == content
