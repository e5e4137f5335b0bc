"""The command line as its users meet it: started as a process, read from its streams."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from toy_traces import toy_trace

from specter_sim.cli.app import app, exit_code_of
from specter_traces import save

COMMAND = [sys.executable, "-c", "from specter_sim.cli import main; main()"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small paired trace of tiny-moe's shape."""
    path = tmp_path_factory.mktemp("trace") / "toy.safetensors"
    save(toy_trace(8, 48, 6, (80, 80)), path)
    return path


def specter_sim(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SPECTER_TRACEBACK"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def printed(*arguments: object, cwd: Path | None = None) -> str:
    done = specter_sim(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(code: int, *arguments: object, cwd: Path | None = None) -> str:
    """The one error line of a command that has to fail with this exit code."""
    done = specter_sim(*arguments, cwd=cwd)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert done.returncode == code, done.stderr
    return lines[0]


# Help and errors


def test_help_lists_every_verb() -> None:
    text = printed("--help")
    for verb in ("run", "sweep", "compare", "trace", "hardware", "models", "policies", "bench"):
        assert re.search(rf"^  {verb} ", text, re.MULTILINE)


@pytest.mark.parametrize("verb", ["run", "sweep", "compare", "policies", "bench"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = [verb, "--help"]
    assert exit_code_of(lambda: app(call, prog_name="specter-sim", standalone_mode=False)) == 0
    assert f"Usage: specter-sim {verb}" in capsys.readouterr().out


def test_no_arguments_is_usage() -> None:
    done = specter_sim()
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: specter-sim")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("swep",), 'unknown command "swep": did you mean "sweep"?'),
        (("run", "--slts", "3"), "--slots"),
        (("run", "--slots", "0"), "memory.slots: should be greater than or equal to 1, got 0"),
        (("run", "--slots", "-4"), "got -4"),
        (("run", "--slots", "5"), "needs 6 slots a layer"),
        (("run", "--set", "policy.evictoin=lru"), 'did you mean "policy.eviction"?'),
        (("run", "--set", "policy.eviction=lruu"), 'did you mean "lru"?'),
        (("run", "--depth", "fixed", "--set", "policy.depth_params.dpth=2"), '"depth"?'),
        (("run", "--set", "machine.link_bandwidth=25 gb/s"), 'did you mean "GB/s"?'),
        (("run", "--machine", "rtx-409"), 'did you mean "rtx-4090"?'),
        (("run", "--model", "mixtral-8x7"), 'did you mean "mixtral-8x7b"?'),
        (("run", "--trace", "tiny-mo"), 'did you mean "tiny-moe"?'),
        (("run", "--budget", "1 kB"), "the smallest budget that works"),
        (("run", "--model", "mixtral-8x7b"), "choose the model it was recorded from"),
        (("run", "--timeline-tokens", "9"), "write it like 0:32"),
        (("run", "absent.toml"), "cannot read absent.toml"),
        (("sweep", "absent.toml"), "cannot read absent.toml"),
        (("sweep", "--axis", "memory.slots=[]"), "axis memory.slots has no values"),
        (("sweep", "--axis", "memory.slot=[1]"), 'did you mean "memory.slots"?'),
        (("sweep", "--workers", "0"), "workers"),
        (("sweep", "--workers", "2", "--cluster", "tcp://a:1"), "a cluster has its own"),
        (("sweep", "--cluster", "a"), "write it like tcp://host:8786"),
        (("run", "--engine", "quick"), "'compiled', 'simpy'"),
        (("run", "--set", "policy.eviction=absent_module:lru"), "cannot import absent_module"),
        (("sweep", "--set", "policy.depth=absent_module:deep"), "cannot import absent_module"),
        (("compare", "--preset", "spectre"), 'did you mean "specter"?'),
        (("compare", "--slots", "many"), "memory.slots"),
        (("run", "--depth", "-1"), "depth must be a whole number or a policy, got -1"),
        (("run", "--model", ""), "model: should have at least 1 character"),
        (("run", "--trace", "x" * 300), "File name too long"),
        (("run", "--trace", "nul\0"), "null byte"),
        (("run", "--model", "x" * 300), "unknown model"),
        (("run", "--model", "nul\0"), "unknown model"),
        (("run", "--machine", "x" * 300 + ".toml"), "File name too long"),
        (("run", "--machine", "nul\0.toml"), "null byte"),
        (("run", "--trace", "/dev/zero"), "a device, not a regular file"),
        (("run", "--timeline-tokens", "0:" + "9" * 5000), "is not a stretch"),
        (("sweep", "--workers", "9" * 400), "workers"),
        (("run", "/dev/zero"), "a device, not a regular file"),
        (("run", "--tokens", "9" * 5000), "trace.tokens"),
        (("sweep", "/dev/zero"), "a device, not a regular file"),
        (("policies", "lruu"), 'did you mean "lru"?'),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: starting one for each of these would take most of the suite's time.
    assert exit_code_of(lambda: app(list(arguments), standalone_mode=False)) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert len(streams.err.splitlines()) == 1
    assert says in streams.err


def test_a_damaged_trace_is_one_line(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(toy.read_bytes()[:5000])
    (tmp_path / "foreign").write_text("not a trace at all, but long enough to have a header")
    for name in ("cut.safetensors", "foreign"):
        assert name in refused(1, "run", "--trace", tmp_path / name)


def test_a_sweep_file_given_to_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[axes]\nmemory.slots = [8]\n")
    assert "use specter-sim sweep" in refused(2, "run", tmp_path / "s.toml")


def test_an_unexpected_failure_is_one_line_until_the_traceback_is_asked_for() -> None:
    code = (
        "from specter_sim.cli.app import exit_code_of\n"
        "import sys\n"
        "sys.exit(exit_code_of(lambda: 1 // 0))"
    )
    for asked in (False, True):
        environment = os.environ | {"SPECTER_TRACEBACK": "1" if asked else ""}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) is asked
        assert "ZeroDivisionError" in done.stderr
        assert asked or len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_one_line() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "policies"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_an_interrupted_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        verb = "specter_sim.cli.run.configuration"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verb, lambda *_: signal.raise_signal(signal.SIGINT))
            return int(app(["run"], standalone_mode=False) or 0)

    assert exit_code_of(interrupted) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = subprocess.Popen(
        [*COMMAND, "policies"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    running.stdout.close()
    _, stderr = running.communicate(timeout=60)
    assert stderr == b""


# run


def test_run_states_everything_and_the_verdict(toy: Path) -> None:
    text = printed("run", "--trace", toy, "--slots", 16, "--tokens", 32, "--preset", "specter")
    for said in (
        "model tiny-moe",
        "trace toy.safetensors",
        "machine emulated-cpu",
        "hit rate",
        "pending hits",
        "useful",
        "bound",
        "at equal memory",
    ):
        assert said in text
    assert re.search(r"speculation pays: x|do not speculate here, because", text)


def test_run_without_a_draft_tells_whether_one_would_pay(toy: Path) -> None:
    text = printed("run", "--trace", toy, "--slots", 40, "--tokens", 32)
    assert "this run does not draft; if it did: " in text


def test_run_json_is_one_document(toy: Path) -> None:
    document = json.loads(printed("run", "--trace", toy, "--slots", 16, "--tokens", 32, "--json"))
    assert document["config"]["memory"]["slots"] == 16
    assert document["result"]["tpot_s"] > 0
    assert document["result"]["distance_to_bound"] >= 1
    assert "policy.eviction" not in document["result"]
    assert document["speculation"]["text"]


def test_a_synthetic_trace_is_marked() -> None:
    text = printed("run", "--trace", "synth", "--model", "olmoe-1b-7b", "--tokens", 16, *_BIG)
    assert "synthetic" in text.splitlines()[0]
    assert "note" in text


_BIG = ("--machine", "rtx-4090", "--depth", "2", "--set", "policy.prefetch=continuous")


def test_run_writes_a_timeline_of_a_stretch(toy: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    stretch = ("--timeline", file, "--timeline-tokens", "8:12")
    text = printed("run", "--trace", toy, "--slots", 8, "--tokens", 32, *stretch)
    events = json.loads(file.read_text())["traceEvents"]
    assert "which draws timelines" in text
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"windows", "gpu", "link", "stalls"} <= tracks
    windows = [event for event in events if event["name"].startswith("window ")]
    assert [event["args"]["first_token"] for event in windows] == [8, 9, 10, 11]


# sweep

SWEEP = """
model = "tiny-moe"
[trace]
path = "{trace}"
tokens = 24
[axes]
memory.slots = [8, 16]
[[axes.zip]]
policy.depth = [0, 2, 4]
policy.prefetch = ["none", "continuous", "continuous"]
"""


@pytest.fixture
def sweep_file(toy: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SWEEP.format(trace=toy))
    return path


def test_the_default_sweep_has_enough_configurations() -> None:
    document = json.loads(printed("sweep", "--dry-run", "--json", "--set", "trace.tokens=16"))
    assert document["configurations"] >= 200
    assert document["estimate_s"] > 0


def test_a_sweep_prints_writes_and_resumes(sweep_file: Path, tmp_path: Path) -> None:
    text = printed("sweep", sweep_file, "--workers", 1, cwd=tmp_path)
    folder = tmp_path / "results" / "small"
    assert "6 configurations: 6 computed, 0 reused" in text
    for name in ("results.csv", "results.json", "best.toml", "tpot_slots.png", "pareto.png"):
        assert f"wrote results/small/{name}" in text
        assert (folder / name).exists()
    again = ("sweep", sweep_file, "--no-plots", "--workers", 1)
    assert "0 computed, 6 reused" in printed(*again, cwd=tmp_path)
    more = printed(*again, "--axis", "memory.slots=[8, 16, 24]", cwd=tmp_path)
    assert "9 configurations: 3 computed, 6 reused" in more


def test_the_best_one_runs_as_it_is(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep = ("sweep", sweep_file, "--out", out, "--no-plots", "--workers", 1, "--json")
    document = json.loads(printed(*sweep))
    best = min(document["results"], key=lambda record: record["result"]["tpot_s"])
    assert document["best"] == best["key"]
    run = json.loads(printed("run", out / "best.toml", "--json"))
    assert run["config"] == best["config"]
    assert run["result"] == best["result"]
    assert tomllib.loads((out / "best.toml").read_text())["model"] == "tiny-moe"


def test_impossible_points_are_told_and_the_others_run(sweep_file: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--no-plots", "--workers", 1)
    text = printed("sweep", sweep_file, "--axis", "memory.slots=[3, 8]", *out)
    assert "3 could not run, the first because tiny-moe needs 6 slots" in text
    every = ("sweep", sweep_file, "--axis", "memory.slots=[3]", "--out", tmp_path / "none")
    assert "none of 3 configurations could run" in refused(1, *every)


def test_an_unwritable_folder_is_refused_before_anything_is_computed(
    sweep_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refused(2, "sweep", sweep_file, "--out", tmp_path / "file" / "x")


def test_ctrl_c_says_how_to_go_on(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    slow = ("--axis", f"trace.tokens={list(range(100, 140))}", "--workers", "2")
    running = subprocess.Popen(
        [*COMMAND, "sweep", str(sweep_file), "--out", str(out), *slow],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    record = out / "results.jsonl"
    deadline = time.monotonic() + 60
    while not (record.exists() and record.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130
    told = f"error: interrupted; what was computed is in {out}: the same command goes on there"
    assert stderr.splitlines()[-1] == told and "Traceback" not in stderr
    assert record.read_text().endswith("\n")


# compare and policies


def test_compare_ranks_the_presets_at_equal_memory_and_slots(toy: Path) -> None:
    presets = [f"--preset={name}" for name in ("on-demand-lru", "coded-lru", "specter")]
    common = ("compare", "--trace", toy, "--tokens", 24, "--slots", 24, *presets)
    document = json.loads(printed(*common, "--workers", 1, "--json"))
    for rows in document["rankings"].values():
        times = [row["tpot_s"] for row in rows]
        assert times == sorted(times)
        assert {row["preset"] for row in rows} == {"on-demand-lru", "coded-lru", "specter"}
    memory = [row["device_bytes"] for row in document["rankings"]["equal memory"]]
    assert max(memory) <= document["budget_bytes"]
    assert {row["slots_per_layer"] for row in document["rankings"]["equal slots"]} == {24.0}
    assert [text.split()[0] for text in document["verdicts"]] == ["specter"]
    text = printed(*common, "--workers", 1)
    assert "at equal memory:" in text and "at equal slots: 24 a layer" in text


def test_compare_takes_slots_and_a_budget_each_for_its_table(toy: Path) -> None:
    limits = ("--budget", "100 MB", "--slots", 12, "--preset", "on-demand-lru")
    common = ("compare", "--trace", toy, "--tokens", 24, *limits, "--workers", 1)
    document = json.loads(printed(*common, "--json"))
    assert (document["budget_bytes"], document["slots"]) == (100_000_000, 12)
    (memory,) = document["rankings"]["equal memory"]
    (slots,) = document["rankings"]["equal slots"]
    assert slots["slots_per_layer"] == 12.0 != memory["slots_per_layer"]


def test_policies_are_listed_and_shown() -> None:
    text = printed("policies")
    for name in ("lru", "belady", "continuous", "governor", "paper-artifact"):
        assert re.search(rf"^{name} ", text, re.MULTILINE)
    assert "policy.depth_params.depth" in printed("policies", "fixed")
    assert "policy.prefetch = 'paper'" in printed("policies", "paper-artifact")
    assert {"eviction", "prefetch", "depth", "presets"} == set(
        json.loads(printed("policies", "--json"))
    )
