"""Prompt files: JSON lines, plain text, the bundled set."""

import json
from collections import Counter
from pathlib import Path

import pytest

from specter_runtime.prompts import Passage, read_passages
from specter_traces import UsageError


def test_the_bundled_set_covers_code_maths_and_prose() -> None:
    passages = read_passages("starters")
    assert Counter(passage.domain for passage in passages) == {
        "code": 10,
        "maths": 10,
        "prose": 10,
    }
    assert {passage.domain for passage in passages[:3]} == {"code", "maths", "prose"}
    assert len({passage.name for passage in passages}) == len(passages)


def test_lines_may_use_the_keys_of_common_prompt_sets(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "def f():", "name": "a", "domain": "code"},
        {"question": "How many?", "answer": "3"},
        {"turns": ["Hello", "More"], "category": "chat"},
        {"tokens": [1, 2]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert read_passages(str(path)) == (
        Passage("a", "code", "def f():"),
        Passage("mine-3", "mine", "How many?"),
        Passage("mine-5", "chat", "Hello"),
        Passage("mine-7", "mine", "", (1, 2)),
    )


def test_a_text_file_is_one_passage(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once.\nTwice.\n")
    assert read_passages(str(path)) == (Passage("story", "story", "Once.\nTwice.\n"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ('\n{"name": "x"}', "line 2: no text"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"tokens": []}', "list of whole numbers"),
        ('{"tokens": [1.5]}', "list of whole numbers"),
        ("\n", "holds no text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_passages(str(path))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'starters'"):
        read_passages("starter")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read_passages(str(tmp_path / "x.txt"))
