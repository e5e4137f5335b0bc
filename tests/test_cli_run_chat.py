"""`specter-run chat`: turns, templates, and Ctrl-C that ends an answer, not the conversation."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from specter_run import InterruptedSession, Told, interrupted, run
from toy_checkpoints import TOYS, write
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specter_runtime.checkpoint import BUNDLED_FOLDER
from specter_runtime.cli.conversation import Continued, Templated, conversation_with
from specter_traces import SpecterError

__all__ = ["interrupted"]

Capture = pytest.CaptureFixture[str]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED_FOLDER / "tiny-moe")
    return loaded


def talk(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, lines: list[str], *options: object
) -> Told:
    """A conversation of these lines, six tokens an answer."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    given = ("--device", "immediate", "--threads", 1, "--new-tokens", 6)
    return run(capsys, "chat", *given, *options)


def test_a_template_frames_the_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    conversation = conversation_with(tokenizer)
    assert isinstance(conversation, Templated)
    assert tokenizer.decode(conversation.ask("How many?")) == "<user>How many?\n<assistant>"
    assert conversation.ask("How many?") == conversation.ask("How many?")
    conversation.answered("How many?", [], "four")
    asked = conversation.ask("Why?")
    assert tokenizer.decode(asked) == ("<user>How many?\n<assistant>four\n<user>Why?\n<assistant>")
    conversation.reset()
    assert tokenizer.decode(conversation.ask("So?")) == "<user>So?\n<assistant>"


def test_a_template_that_refuses_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(SpecterError, match="chat template fails: no users here"):
        conversation_with(tokenizer).ask("Hello")


def test_without_a_template_one_text_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = conversation_with(tokenizer)
    assert isinstance(conversation, Continued)
    assert tokenizer.decode(conversation.ask("And he")) == "And he"
    answer = tokenizer(" went")["input_ids"]
    conversation.answered("And he", [*answer, tokenizer.eos_token_id], " went")
    assert tokenizer.decode(conversation.ask("up")) == "And he went\nup"


def test_lines_are_answered_until_exit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = talk(capsys, monkeypatch, ["And it came", "", "to pass", "/exit", "never asked"])
    assert told.code == 0
    assert told.err.count("no chat template") == 1
    assert "12 in 12 windows" in told.err and "TPOT" in told.err


def test_the_end_of_the_input_ends_it(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = talk(capsys, monkeypatch, [])
    assert told.code == 0 and told.out == "" and "TPOT" not in told.err


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(
    interrupted: type[InterruptedSession],
    tokenizer: PreTrainedTokenizerBase,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = talk(capsys, monkeypatch, ["And it came", "to pass", "/reset", "So"])
    assert told.code == 0 and "(ended by Ctrl-C)" in told.err
    first, second, third = (tokenizer.decode(prompt) for prompt in interrupted.prompts)
    answer = told.out.splitlines()[0]
    assert second == f"{first}{answer}\nto pass"
    assert third == "So"
    assert "14 in 14 windows" in told.err  # 2, then 6 and 6


def test_a_line_too_long_is_told_and_forgotten(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = talk(capsys, monkeypatch, ["all " * 50, "And he"], "--context", 7)
    assert told.code == 0
    assert "error: the conversation has" in told.err and "/reset starts again" in told.err
    assert "4 in 4 windows" in told.err  # behind three tokens there is room for four


def test_there_must_be_words(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = write(TOYS["qwen3-moe"], tmp_path / "toy")
    told = talk(capsys, monkeypatch, ["Hello"], toy)
    assert told.code == 2 and "has no tokenizer.json" in told.err
