"""`specter-run capture` as a user meets it: files, messages, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_checkpoints import TOYS, write

from specter_runtime import cli
from specter_runtime.capture import CaptureSettings, Recorder
from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.cli.capture import record_all
from specter_runtime.prompts import Passage, read_passages
from specter_runtime.quantizer import parse
from specter_traces import Decoding, Trace, bundled, bundled_names, load, statistics, validate

BUNDLED = ("tiny-moe-base2", "tiny-moe-base3", "tiny-moe-base4")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are too small for threads, and the bundled traces were made with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(TOYS["qwen3-moe"], tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"tokens": [3 + i, 4, 5, 6], "name": f"p{i}", "domain": "toy"} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> int:
    """Run `specter-run capture` in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(["capture", *map(str, arguments)])
    code = left.value.code
    assert isinstance(code, int | None)
    return code or 0


def test_prompts_become_a_sound_trace(
    toy: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "t.safetensors"
    arguments = [toy, "--prompts", prompts, "--out", out, "--draft", "base3", "--new-tokens", 9]
    assert run(*arguments, "--group-size", 32, "--licence", "CC0-1.0", "--json") == 0
    trace = load(out, full=True)
    header = trace.header
    assert validate(trace) == []
    assert np.diff(trace.sequence_offsets).tolist() == [13, 13, 13]
    assert trace.prompt_lengths.tolist() == [4, 4, 4]
    assert (header.name, header.model, header.decoding) == ("t", "toy", Decoding.SAMPLED)
    assert [entry.name for entry in header.sequences] == ["p0", "p1", "p2"]
    assert header.licence == "CC0-1.0"
    assert header.draft is not None
    assert (header.draft.name, header.draft.bits, header.draft.group_size) == ("base3", 3, 32)
    assert header.created_by.startswith(f"specter-run capture {toy} --prompts")
    summary = json.loads(capsys.readouterr().out)
    assert summary["positions"] == 39
    assert summary["sampled_acceptance"] == statistics.acceptance(trace).sampled


def test_the_same_command_writes_the_same_bytes(toy: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    arguments = [toy, "--prompts", prompts, "--out", out, "--new-tokens", 9]
    assert run(*arguments) == 0
    first = out.read_bytes()
    assert run(*arguments) == 0
    assert out.read_bytes() == first
    assert run(*arguments, "--seed", 1) == 0
    assert out.read_bytes() != first


def test_a_given_text_is_followed(toy: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    assert run(toy, "--follow", prompts, "--out", out, "--prompt-tokens", 2, "--max-tokens", 3) == 0
    trace = load(out)
    assert trace.header.decoding is Decoding.TEXT
    assert trace.next_tokens is not None
    assert trace.next_tokens[:3].tolist() == [4, 5, -1]
    assert trace.prompt_lengths.tolist() == [2, 2, 2]


def test_a_loop_is_flagged(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "loop.jsonl"
    text.write_text(json.dumps({"tokens": [1, 2, 3, 4] * 25}))
    assert run(toy, "--follow", text, "--out", tmp_path / "t.safetensors") == 0
    assert "8-grams are repeats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "no model folder nowhere"),
        (["{toy}", "--draft", "int5"], 2, "unknown draft 'int5'"),
        (["{toy}", "--group-size", "7"], 2, "32 to 128 weights, got 7"),
        (["{toy}", "--temperature", "0"], 2, "use --greedy"),
        (["{toy}", "--top-p", "1.5"], 2, "top-p must be"),
        (["{toy}", "--new-tokens", "0"], 2, "new_tokens must be at least 1"),
        (["{toy}", "--new-tokens", "500"], 2, "context of toy is 128"),
        (["{toy}", "--prompts", "none.jsonl"], 2, "no prompt file none.jsonl"),
        (["{toy}", "--sequences", "0"], 2, "--sequences must be at least 1"),
        (["{toy}", "--threads", "0"], 2, "--threads must be at least 1"),
        (["{toy}", "--dtype", "int8"], 2, "unknown number type"),
        (["{toy}", "--greedy", "--follow", "{prompts}"], 2, "choose one of them"),
        (["{toy}", "--out", "/proc/t.safetensors"], 2, "cannot write /proc/t.safetensors"),
        (["{toy}", "--out", "{prompts}/t.safetensors"], 2, "cannot write"),
        (["{toy}", "--out", "trace.npz"], 2, "must end in .safetensors"),
        (["{dense}"], 1, "no routed experts"),
    ],
)
def test_bad_requests_get_one_line_and_leave_no_file(
    toy: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    dense = tmp_path / "dense"
    if "{dense}" in arguments:
        write(TOYS["mixtral"].__class__("llama", 0, 0, 0), dense)
    defaults = {"--out": str(tmp_path / "t.safetensors"), "--prompts": str(prompts)}
    filled = [text.format(toy=toy, prompts=prompts, dense=dense) for text in arguments]
    for option, value in defaults.items():
        if option not in filled:
            filled += [option, value]
    assert run(*filled) == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
    assert not (tmp_path / "t.safetensors").exists()


class Interrupted(Recorder):
    """A recorder in front of which somebody presses Ctrl-C after two sequences."""

    def sequences(self, passages: Sequence[Passage]) -> Iterator[Trace]:
        for index, part in enumerate(super().sequences(passages)):
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield part


def test_ctrl_c_keeps_finished_sequences(toy: Path, prompts: Path) -> None:
    settings = CaptureSettings(parse("base4"), new_tokens=5)
    recorder = Interrupted(open_checkpoint(str(toy)), settings)
    parts, interrupted = record_all(recorder, read_passages(str(prompts)))
    assert interrupted
    trace = recorder.join(parts, "t")
    assert validate(trace) == []
    assert [entry.name for entry in trace.header.sequences] == ["p0", "p1"]


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from specter_runtime.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as left:\n    assert not left.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    for command in ("generate", "chat", "bench", "info", "capture"):
        assert command in done.stdout


def test_bundled_traces_are_three_drafts_of_one_text() -> None:
    assert set(BUNDLED) <= set(bundled_names())
    traces = [bundled(name) for name in BUNDLED]
    for trace in traces:
        assert validate(trace) == []
        assert trace.num_positions >= 6000
        assert {entry.domain for entry in trace.header.sequences} == {"code", "maths", "prose"}
        assert float(statistics.repetition(trace).mean()) < 0.05
        for column in ("target_ids", "target_tokens", "next_tokens", "gate_ids"):
            assert np.array_equal(getattr(trace, column), getattr(traces[0], column))


@pytest.mark.parametrize(
    ("name", "agreement", "sampled", "recall"),
    # Measured on held-out text for the same drafts.
    [
        ("tiny-moe-base4", 0.955, 0.97, 0.98),
        ("tiny-moe-base3", 0.917, 0.94, 0.97),
        ("tiny-moe-base2", 0.820, 0.86, 0.92),
    ],
)
def test_bundled_drafts_are_as_good_as_on_held_out_text(
    name: str, agreement: float, sampled: float, recall: float
) -> None:
    trace = bundled(name)
    kept = statistics.acceptance(trace)
    assert kept.greedy == pytest.approx(agreement, abs=0.03)
    assert kept.sampled == pytest.approx(sampled, abs=0.03)
    assert float(statistics.fidelity(trace).recall.mean()) == pytest.approx(recall, abs=0.015)


def test_a_piece_of_a_bundled_trace_can_be_made_again(tmp_path: Path) -> None:
    whole = bundled("tiny-moe-base2")
    words = whole.header.created_by.split()
    assert words[:2] == ["specter-run", "capture"]
    out = tmp_path / "piece.safetensors"
    words[words.index("--out") + 1] = str(out)
    words[words.index("--new-tokens") + 1] = "24"
    assert run(*words[2:], "--sequences", 1) == 0
    again, before = load(out), whole.sequence(0)
    count = again.num_positions
    assert count == int(again.prompt_lengths[0]) + 24
    assert again.next_tokens is not None and before.next_tokens is not None
    # Text, hence all else, is exact on the processor it was made on; sums may round elsewhere.
    assert np.array_equal(again.next_tokens[:-1], before.next_tokens[: count - 1])
    for column in ("target_ids", "draft_ids", "gate_ids"):
        mine, stored = getattr(again, column), getattr(before, column)[:count]
        assert float((mine == stored).mean()) > 0.999


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("capture",), "Missing argument 'model'"),
        (("capture", "tiny-moe"), "Missing option '--out'"),
        (("capture", "tiny-moe", "--out", "x.safetensors", "--seed", "many"), "--seed"),
        (("capture", "tiny-moe", "--absent"), "No such option: --absent"),
        (("record",), "record"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert told.startswith("error: ") and len(told.splitlines()) == 1 and says in told


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2
    told = capsys.readouterr()
    assert "Usage: specter-run" in told.err and told.out == ""
