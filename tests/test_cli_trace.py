"""`specter-sim trace` from a user's side: what it prints, writes and refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_traces import toy_trace
from typer.testing import CliRunner, Result

from specter_sim.cli.trace import app
from specter_traces import SpecterError, load, save
from specter_traces.statistics import adjacent_overlap

PNG = b"\x89PNG"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(toy_trace(lengths=(120, 60)), tmp_path / "toy.safetensors")
    return tmp_path / "toy.safetensors"


def run(*arguments: object) -> Result:
    """Run a command; an error for the user stays in `exception`, any other is raised."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SpecterError | SystemExit):
        raise result.exception
    return result


def refusal(*arguments: object) -> str:
    error = run(*arguments).exception
    assert isinstance(error, SpecterError)
    return f"{error.exit_code} {error}"


def test_info_prints_and_plots(file: Path, tmp_path: Path) -> None:
    result = run("info", file, "--plots", tmp_path / "plots")
    for text in ("3 layers x 16 experts, top-3", "acceptance, greedy", "early gate: recall"):
        assert text in result.stdout
    plots = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in plots] == ["draft.png", "locality.png", "popularity.png", "union.png"]
    assert all(p.read_bytes().startswith(PNG) and str(p) in result.stdout for p in plots)


def test_info_as_json_is_one_document(file: Path, tmp_path: Path) -> None:
    document = json.loads(run("info", file, "--json", "--no-plots").stdout)
    assert document["plots"] == [] and document["num_positions"] == 180
    overlap = np.array(document["overlap_by_lag"])
    assert overlap[0] == pytest.approx(adjacent_overlap(load(file)))
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("paired", [True, False])
def test_info_of_the_smallest_trace(tmp_path: Path, paired: bool) -> None:
    save(toy_trace(1, 4, 1, (1,), paired), tmp_path / "one.safetensors")
    result = run("info", tmp_path / "one.safetensors", "--plots", tmp_path)
    assert "-0.00" not in result.stdout and "nan" not in result.stdout
    assert (tmp_path / "locality.png").exists()


def test_marks_stand_first(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "synth.safetensors"
    shape = ("--layers", 4, "--experts", 8, "--top-k", 2, "--tokens", 150)
    assert "[synthetic (from toy)]" in run("synth", file, "--out", out, *shape).stdout
    lines = run("info", out, "--no-plots").stdout.splitlines()
    first_row = next(line for line in lines if line.startswith("│"))
    assert "MARKED" in first_row and "synthetic (from toy)" in first_row
    titles = [line for line in lines if line.startswith("by ") or line.startswith("draft [")]
    assert all("synthetic (from toy)" in line for line in titles) and len(titles) == 2
    document = json.loads(run("info", out, "--json", "--no-plots").stdout)
    assert document["marks"] == ["synthetic (from toy)"]


def test_the_shape_can_be_a_model_s(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "synth.safetensors"
    run("synth", file, "--out", out, "--like", "DeepSeek-V2-Lite", "--tokens", 60)
    trace = load(out)
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (26, 64, 6)
    assert "2 give a shape" in refusal("synth", file, "--out", out)


def test_a_draft_can_be_assumed(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "assumed.safetensors"
    save(toy_trace(paired=False), plain)
    assert "[assumed draft]" in run("assume", plain, "--out", out, "--recall", 0.9).stdout
    assert load(out).header.assumed_draft
    assert "draft of its own" in refusal("assume", out, "--out", out)


def test_validate_reports_every_problem(file: Path) -> None:
    result = run("validate", file)
    assert result.exit_code == 0 and "sound, 3 x 16, top-3" in result.stdout
    trace = load(file)
    ids = trace.target_ids.copy()
    ids[:, 2] = ids[:, 1]
    ids[50, 0] = 3
    save(replace(trace, target_ids=ids), file)
    result = run("validate", file)
    assert result.exit_code == 1
    assert "layer 2 is a copy of layer 1" in result.stdout and "[3, 3, 3]" in result.stdout
    result = run("validate", file, "--json")
    assert result.exit_code == 1
    assert [p["column"] for p in json.loads(result.stdout)["problems"]] == ["target_ids"] * 2


def test_import_writes_a_trace(tmp_path: Path) -> None:
    ids = toy_trace().target_ids
    np.save(tmp_path / "log.npy", ids)
    out = tmp_path / "out.safetensors"
    run("import", "routed-experts", tmp_path / "log.npy", "--out", out, "--experts", 16)
    trace = load(out, full=True)
    assert np.array_equal(trace.target_ids, ids)
    assert trace.header.name == "log" and "import routed-experts" in trace.header.created_by
    assert "2 --dataset" in refusal(
        "import", "jsonl", tmp_path / "log.npy", "--out", out, "--unclean"
    )


def test_import_of_a_folder(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    folder = shared / "traces" / "gpt-oss-20b"
    run(
        "import",
        "npz",
        folder,
        "--out",
        out,
        "--experts",
        32,
        "--dataset",
        "mmlu_dev",
        "--limit",
        3,
    )
    assert load(out, full=True).num_sequences == 3


def test_refusals_are_one_line(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-100])
    out = tmp_path / "out.safetensors"
    assert refusal("info", cut).startswith("1 ") and "truncated" in refusal("info", cut)
    assert refusal("validate", tmp_path / "none.safetensors").startswith("2 no trace at")
    assert refusal("info", "no-such-name").startswith("2 no file and no bundled trace")
    assert "top-9 of 8" in refusal(
        "synth", file, "--out", out, "--layers", 2, "--experts", 8, "--top-k", 9
    )
    assert "2 cannot write" in refusal("info", file, "--plots", file / "inside")
    assert not out.exists()


def test_list_names_bundled_traces() -> None:
    from specter_traces import bundled_names

    names = [entry["name"] for entry in json.loads(run("list", "--json").stdout)]
    assert names == bundled_names()
    assert all(name in run("list").stdout for name in names)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import specter_sim.cli.trace; "
        "print(sorted({'numpy', 'matplotlib', 'scipy', 'safetensors'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_model_s_name_means_its_trace(tmp_path: Path) -> None:
    assert "tiny-moe: sound" in run("validate", "tiny-moe").stdout


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--seed", -1, "a seed is a whole number of 0 or more"),
        ("--experts", 70000, "at most 65535 experts, got 70000"),
        ("--layers", 10**9, "at most 1000 layers"),
        ("--tokens", 10**12, "at most 10000000 tokens"),
    ],
)
def test_senseless_shapes_are_refused(
    file: Path, tmp_path: Path, option: str, value: int, says: str
) -> None:
    shape = {"--layers": 2, "--experts": 8, "--top-k": 2} | {option: value}
    words = [word for pair in shape.items() for word in pair]
    told = refusal("synth", file, "--out", tmp_path / "x.safetensors", *words)
    assert told.startswith("2 ") and says in told


def test_a_draft_is_assumed_with_a_possible_seed(tmp_path: Path) -> None:
    save(toy_trace(paired=False), tmp_path / "toy.safetensors")
    out = tmp_path / "x.safetensors"
    told = refusal("assume", tmp_path / "toy.safetensors", "--out", out, "--seed", -1)
    assert told.startswith("2 a seed is")


def test_names_out_of_a_file_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    trace = toy_trace(lengths=(120, 60))
    path = tmp_path / "toy.safetensors"
    save(trace.with_header(name="a\x1b[31m $\\frac$ b", source="red \x1b[31m"), path)
    result = run("info", path, "--plots", tmp_path / "plots")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout and "a\\x1b[31m" in result.stdout


@pytest.mark.parametrize("place", ["/dev/zero", "x" * 300, "nul\0"])
def test_what_cannot_be_a_trace_is_a_usage_error(place: str) -> None:
    assert refusal("info", place).startswith("2 cannot read")
    assert refusal("validate", place).startswith("2 cannot read")
