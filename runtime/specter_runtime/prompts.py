"""Prompts to continue and texts to follow, read from JSON lines or plain text.

A JSON line holds `prompt` (or `question`, or the first of `turns`), or `text`, or token ids as
`tokens`; `name` and `domain` describe it. A plain text file is one prompt.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specter_traces import UsageError

if TYPE_CHECKING:
    from specter_runtime.checkpoint import Checkpoint

BUNDLED_FOLDER = Path(__file__).with_name("prompts")
"""Prompt sets that come with the package, `<name>.jsonl`."""

_TEXT_KEYS = ("prompt", "text", "question", "turns")


@dataclass(frozen=True)
class Passage:
    """One prompt or text: words, or token ids when `tokens` is not empty."""

    name: str
    domain: str
    text: str
    tokens: tuple[int, ...] = ()


def read_passages(source: str) -> tuple[Passage, ...]:
    """The passages of a bundled set or a file, at least one; UsageError says which line is bad."""
    path = _find(source)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        lines = [
            (number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()
        ]
        passages = tuple(_parse(path, number, line) for number, line in lines)
    else:
        passages = (Passage(path.stem, path.stem, content),) if content.strip() else ()
    if not passages:
        raise UsageError(f"{path} holds no text")
    return passages


def encode(passage: Passage, checkpoint: Checkpoint) -> list[int]:
    """The passage's token ids; UsageError when it is words and the model has no tokenizer."""
    if passage.tokens:
        return list(passage.tokens)
    if checkpoint.tokenizer is None:
        raise UsageError(
            f"{checkpoint.name} has no tokenizer.json: give prompts as token ids "
            '(JSON lines with "tokens")'
        )
    tokens: list[int] = checkpoint.tokenizer(passage.text)["input_ids"]
    return tokens


def bundled_sets() -> list[str]:
    """Names of the prompt sets that come with the package, sorted."""
    return sorted(path.stem for path in BUNDLED_FOLDER.glob("*.jsonl"))


def _find(source: str) -> Path:
    if source in bundled_sets():
        return BUNDLED_FOLDER / f"{source}.jsonl"
    path = Path(source)
    if path.is_file():
        return path
    near = difflib.get_close_matches(source, bundled_sets(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"bundled: {', '.join(bundled_sets())}"
    raise UsageError(f"no prompt file {source}; {hint}")


def _parse(path: Path, number: int, line: str) -> Passage:
    try:
        entry = json.loads(line)
    except ValueError:
        raise UsageError(f"{path}, line {number}: not JSON") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{path}, line {number}: expected a JSON object, got {line:.40}")
    name = str(entry.get("name") or f"{path.stem}-{number}")
    domain = str(entry.get("domain") or entry.get("category") or path.stem)
    if "tokens" in entry:
        return Passage(name, domain, "", _token_ids(path, number, entry["tokens"]))
    return Passage(name, domain, _text(path, number, entry))


def _text(path: Path, number: int, entry: dict[str, Any]) -> str:
    for key in _TEXT_KEYS:
        value = entry.get(key)
        if key == "turns" and isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            return value
    raise UsageError(
        f"{path}, line {number}: no text: give one of {', '.join(_TEXT_KEYS)} or tokens"
    )


def _token_ids(path: Path, number: int, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(t) is int for t in value):
        raise UsageError(f"{path}, line {number}: tokens must be a list of whole numbers")
    return tuple(value)
