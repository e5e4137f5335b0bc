"""`specter-run generate` for real: the target's text, the figures, the files, Ctrl-C, errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live import tiny_moe
from specter_run import InterruptedSession, interrupted, run
from toy_checkpoints import TOYS
from toy_checkpoints import write as write_toy

from specter_runtime.cli.generate import PROMPT, write
from specter_runtime.cli.opening import set_threads
from specter_runtime.cli.options import System
from specter_runtime.cli.summary import given_up
from specter_runtime.continuation import continue_prompt
from specter_runtime.devices import DeviceKind
from specter_runtime.session import Session, SessionOptions
from specter_sim.config import build, to_toml

__all__ = ["interrupted"]

Capture = pytest.CaptureFixture[str]
FAST = ("--device", "immediate", "--threads", 1)


@pytest.fixture(scope="module")
def plain() -> str:
    """What plain decoding writes after the built-in prompt, in FP32."""
    checkpoint = tiny_moe()
    assert checkpoint.tokenizer is not None
    prompt = checkpoint.tokenizer(PROMPT)["input_ids"]
    tokens = continue_prompt(checkpoint.model, prompt, 12, None, 0)
    return str(checkpoint.tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return write_toy(TOYS["qwen3-moe"], tmp_path_factory.mktemp("models") / "toy")


def test_no_arguments_stream_a_text_and_its_figures(capsys: Capture) -> None:
    told = run(capsys, "generate", "--new-tokens", 6)
    assert told.code == 0
    assert told.out.strip() and told.out.endswith("\n")
    for figure in ("TPOT", "TTFT", "tokens/s", "hit rate", "a token over the link", "peak"):
        assert figure in told.err
    for condition in ("tiny-moe, bfloat16", "link 100 MB/s", "slots", "policy lfu + gate"):
        assert condition in " ".join(told.err.split())
    assert told.err.index(PROMPT) < told.err.index("TPOT")
    assert all(len(line) <= 80 for line in told.err.splitlines() if PROMPT not in line)


@pytest.mark.parametrize("options", [(), ("--depth", 3), ("--policy", "paper-artifact")])
def test_the_text_is_the_target_s_own(
    plain: str, options: tuple[object, ...], capsys: Capture
) -> None:
    exact = ("--dtype", "float32", "--new-tokens", 12)
    told = run(capsys, "generate", *exact, *FAST, *options)
    assert told.code == 0 and told.out == f"{plain}\n"


def test_one_document_holds_everything(capsys: Capture) -> None:
    told = run(
        capsys, "generate", "--json", "--new-tokens", 8, "--depth", 2, "--vram", "32 MB", *FAST
    )
    document = told.document()
    assert document["prompt"] == PROMPT and PROMPT not in told.err
    assert len(document["tokens"]) == 8 == document["result"]["committed_tokens"]
    assert document["ended_by"] == "length"
    assert document["result"]["mean_depth"] > 1
    memory = document["memory"]
    parts = ("dense_bytes", "draft_bytes", "slot_bytes", "kv_bytes", "scratch_bytes")
    assert memory["total_bytes"] == sum(memory[part] for part in parts)
    assert memory["peak_device_bytes"] <= memory["total_bytes"] <= memory["cap_bytes"] == 32e6
    assert document["config"]["policy"]["depth_params"] == {"depth": 2}


def test_sampled_text_is_the_seed_s(capsys: Capture) -> None:
    def text(*options: object) -> str:
        sampled = ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.95)
        return run(capsys, "generate", "--new-tokens", 8, *sampled, *options, *FAST).out

    first = text("--seed", 1)
    assert text("--seed", 1) == first != text("--seed", 2)


def test_a_tuned_file_is_under_the_options(tmp_path: Path, capsys: Capture) -> None:
    table = {"memory": {"slots": 9}, "policy": {"eviction": "fifo", "depth": 2}}
    path = tmp_path / "best.toml"
    path.write_text(to_toml(build(table)))
    given = ("generate", "--config", path, "--json", "--new-tokens", 4, *FAST)
    config = run(capsys, *given, "--set", "memory.slots=11").document()["config"]
    assert config["memory"]["slots"] == 11
    assert config["policy"]["eviction"] == "fifo"
    assert config["policy"]["depth_params"] == {"depth": 2}


def test_journal_and_timeline(tmp_path: Path, capsys: Capture) -> None:
    journal, timeline = tmp_path / "journal.jsonl", tmp_path / "timeline.json"
    given = ("--journal", journal, "--timeline", timeline, "--new-tokens", 4)
    told = run(capsys, "generate", *given, "--depth", 2, *FAST)
    assert told.code == 0 and f"wrote {journal}" in told.err and f"wrote {timeline}" in told.err
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    calls = [call for _, call, _, _ in entries]
    assert calls.count("begin_window") == calls.count("end_window") > 0
    assert {"begin_request", "demand", "drafted", "copied", "release"} <= set(calls)
    document = json.loads(timeline.read_text())
    assert "tiny-moe" in document["otherData"]["conditions"]
    assert any(event.get("dur", 0) > 0 for event in document["traceEvents"])


def test_the_text_ends_where_the_model_ends_it(capsys: Capture) -> None:
    prompt = "Question: How many are 3 + 4?\nAnswer: 3 + 4 = 7\n#### 7"
    given = ("--prompt", prompt, "--new-tokens", 12, "--json")
    document = run(capsys, "generate", *given, *FAST).document()
    assert document["ended_by"] == "end of text"
    assert len(document["tokens"]) < 12 and "<|endoftext|>" not in document["text"]


def test_a_model_without_tokenizer_takes_and_writes_ids(
    toy: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompt = tmp_path / "ids.jsonl"
    prompt.write_text(json.dumps({"tokens": [3, 4, 5]}))
    told = run(capsys, "generate", toy, "--prompt-file", prompt, "--new-tokens", 5, *FAST)
    assert told.code == 0 and len([int(word) for word in told.out.split()]) == 5
    told = run(capsys, "generate", toy, *FAST)
    assert told.code == 2 and "has no tokenizer.json" in told.err


def test_ctrl_c_keeps_the_text_so_far(
    interrupted: type[InterruptedSession], capsys: Capture
) -> None:
    told = run(capsys, "generate", "--new-tokens", 500, *FAST)
    assert told.code == 130
    assert told.out.endswith("\n") and 0 < len(told.out) < 40
    assert "2 in 2 windows" in told.err and told.err.endswith("interrupted\n")


def test_ctrl_c_ends_a_document_too(interrupted: type[InterruptedSession], capsys: Capture) -> None:
    told = run(capsys, "generate", "--new-tokens", 500, "--json", *FAST)
    assert told.code == 130
    assert told.document()["ended_by"] == "interrupted" and len(told.document()["tokens"]) == 2


def test_a_second_ctrl_c_does_not_wait(
    interrupted: type[InterruptedSession], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(interrupted, "presses", (2,))
    told = run(capsys, "generate", "--new-tokens", 500, *FAST)
    assert told.code == 130 and told.err.endswith("error: interrupted\n")


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        told = run(capsys, "generate", "--new-tokens", 500, *FAST)
        monkeypatch.setattr(gone, "close", lambda: None)
    assert told.code == 1 and "error" not in told.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("nowhere",), 2, "no model folder nowhere"),
        (("--vram", "10 MB"), 2, "the smallest budget that works is"),
        (("--vram", "many"), 2, "'many' is not a size"),
        (("--vram", "1 GB", "--slots", "9"), 2, "--vram and --slots both"),
        (("--slots", "900"), 2, "at most all of them can be resident"),
        (("--link", "fast", "--device", "emulated"), 2, "'fast' is not a rate"),
        (("--link", "1 GB/s"), 2, "--link paces the emulated device"),
        (("--device", "gpu"), 2, 'unknown device "gpu"'),
        (("--policy", "plane"), 2, 'did you mean "plain"'),
        (("--set", "policy.eviction=belady"), 2, "reads the future"),
        (("--depth", "deep"), 2, 'unknown depth policy "deep"'),
        (("--draft-bits", "5"), 2, "should be 2, 3, 4 or 8, got 5"),
        (("--set", "policy.evict=lru"), 2, 'did you mean "policy.eviction"'),
        (("--config", "none.toml"), 2, "cannot read none.toml"),
        (("--top-k", "5"), 2, "give --temperature too"),
        (("--temperature", "-1"), 2, "temperature must be above 0"),
        (("--prompt", "a", "--prompt-file", "b"), 2, "give one of them"),
        (("--prompt", ""), 2, "the prompt has no token"),
        (("--prompt-file", "starters"), 2, "holds 30 prompts"),
        (("--new-tokens", "0"), 2, "--new-tokens must be at least 1"),
        (("--new-tokens", "9999"), 2, "exceed the context of tiny-moe, 2048"),
        (("--threads", "0"), 2, "--threads must be at least 1"),
        (("--journal", "/absent/journal"), 2, "there is no folder /absent"),
        (("--timeline", "/"), 2, "it is a folder"),
        (("--absent",), 2, "No such option: --absent"),
    ],
)
def test_bad_requests_get_one_line(
    options: tuple[str, ...], code: int, message: str, capsys: Capture
) -> None:
    device = () if "--device" in options else ("--device", "immediate")
    told = run(capsys, "generate", *options, *device)
    lines = [line for line in told.err.splitlines() if not line.startswith("loaded")]
    assert told.code == code and told.out == ""
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_bytes_of_no_character_are_written_at_the_end(capsys: Capture) -> None:
    checkpoint = tiny_moe()
    assert checkpoint.tokenizer is not None
    half = checkpoint.tokenizer("so 🙂")["input_ids"][:-1]

    class Says(Session):
        """A session whose model says what is wanted."""

        def generate(self, *_: object) -> Iterator[list[int]]:
            yield from ([token] for token in half)

    options = SessionOptions(device=DeviceKind.IMMEDIATE, context_tokens=64)
    with Says.of(checkpoint, build(), options) as session:
        written = write(session, [5], len(half), None, streamed=True)
    assert written.text == "so �" and capsys.readouterr().out == "so �\n"


def test_a_governor_that_gave_up_is_told() -> None:
    stopped = given_up([0, 2, 3, 1, *[0] * 9])
    assert "speculation did not pay" in stopped and "the last 9 of 13 windows" in stopped
    assert given_up([2, 3, *[0] * 7]) == ""  # perhaps it only pauses
    assert given_up([0] * 50) == ""  # never drafted: nothing was stopped
    assert given_up([*[0] * 20, 2]) == "" == given_up([])


def test_threads_leave_a_core_to_an_emulated_link() -> None:
    before = torch.get_num_threads()
    try:
        for system, threads in (
            (System(), 3),
            (System(device="immediate"), 4),
            (System(threads=2), 2),
        ):
            torch.set_num_threads(4)
            set_threads(system)
            assert torch.get_num_threads() == threads
        torch.set_num_threads(1)
        set_threads(System())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
