"""`specter-sim curve` from a user's side."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from toy_traces import toy_trace
from typer.testing import CliRunner, Result

from specter_sim.cli.app import app
from specter_traces import SpecterError, bundled, save
from specter_traces.synthesize import synthesize

PNG = b"\x89PNG"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(toy_trace(3, 16, 3, (60, 40)), tmp_path / "toy.safetensors")
    return tmp_path / "toy.safetensors"


def run(*arguments: object) -> Result:
    """Run the command; an error for the user stays in `exception`, any other is raised."""
    result = CliRunner().invoke(app, ["curve", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SpecterError | SystemExit):
        raise result.exception
    return result


def refusal(*arguments: object) -> str:
    error = run(*arguments).exception
    assert isinstance(error, SpecterError)
    return f"{error.exit_code} {error}"


def test_the_table_states_its_conditions(file: Path, tmp_path: Path) -> None:
    out = run(file, "--sizes", 3, "--plot", "c.png").stdout
    assert "100 tokens in 2 sequences, each from an empty cache" in out
    assert "batched lookups (a token's experts at once); all layers; 20" in out
    heads = next(line for line in out.splitlines() if line.startswith("slots")).split()
    assert heads == ["slots", "lru", "fifo", "lfu", "random", "least-stale", "belady"]
    assert "lru: knee at " in out and "farthest above the chord" in out
    assert (tmp_path / "c.png").read_bytes().startswith(PNG) and "wrote c.png" in out


def test_sequential_lookups_and_a_warm_cache_are_stated(file: Path) -> None:
    out = run(
        file, "--lookups", "sequential", "--between", "warm", "--layer", 1, "--no-plot"
    ).stdout
    assert "sequential lookups (one after another); layer 1; " in out
    assert "stays warm between them" in out and "wrote" not in out


def test_json_csv_and_table_agree(file: Path, tmp_path: Path) -> None:
    options = ("--no-plot", "--sizes", 4, "--policy", "lru", "--policy", "belady")
    document = json.loads(run(file, *options, "--csv", "all.csv", "--json").stdout)
    assert document["lookups"] == "batched" and document["between"] == "cold"
    assert [c["policy"] for c in document["curves"]] == ["lru", "belady"]
    with (tmp_path / "all.csv").open() as text:
        rows = list(csv.DictReader(text))
    for one in document["curves"]:
        mine = [row for row in rows if row["policy"] == one["policy"]]
        for slots, hits, rate in zip(one["slots"], one["hits"], one["hit_rate"], strict=True):
            by_layer = [int(row["hits"]) for row in mine if int(row["slots"]) == slots]
            assert len(by_layer) == 3 and sum(by_layer) == hits
            assert rate == pytest.approx(hits / one["demands"])
        assert one["demands"] == 100 * 3 * 3
    one_layer = json.loads(run(file, *options, "--layer", 2, "--json").stdout)["curves"][0]
    assert one_layer["demands"] == 300
    in_file = [int(r["hits"]) for r in rows if r["policy"] == "lru" and r["layer"] == "2"]
    assert one_layer["hits"] == in_file


def test_a_synthetic_trace_is_marked(file: Path, tmp_path: Path) -> None:
    save(synthesize(bundled("tiny-moe-base4"), 2, 8, 2, 80, 0), tmp_path / "synth.safetensors")
    out = run("synth.safetensors", "--no-plot", "--policy", "lru").stdout
    assert "[synthetic" in out.splitlines()[0]


def test_only_the_first_sequences(file: Path) -> None:
    document = json.loads(run(file, "--sequences", 1, "--policy", "lru", "--json").stdout)
    assert (document["tokens"], document["sequences"]) == (60, 1)
    assert document["files"] == ["curve-toy.png"]


def test_refusals_are_one_line(file: Path) -> None:
    assert "2 trace 'toy' has 3 MoE layers, got --layer 3: choose 0 to 2" in refusal(
        file, "--layer", 3
    )
    assert '2 no batched curve for policy "lrv": did you mean "lru"' in refusal(
        file, "--policy", "lrv"
    )
    assert "needs the target's routes and nothing else" in refusal(file, "--policy", "hot-lru")
    assert "2 no file and no bundled trace" in refusal("nothing-of-the-kind")
    assert "2 cannot write" in refusal(file, "--policy", "lru", "--plot", file / "inside.png")
