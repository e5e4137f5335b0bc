"""The `layer,expert` lines of llama.cpp."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from specter_traces.header import SequenceInfo
from specter_traces.importers.recorded import Origin, Recorded, join, refusal
from specter_traces.importers.texts import read_text
from specter_traces.trace import Trace

MOST_ID = 65535


def import_llamacpp_csv(path: str | os.PathLike[str], origin: Origin) -> Trace:
    """Read llama.cpp's `layer,expert` lines, K per layer and token, layers in ascending order.

    A layer number that falls back starts the next token. The log tells no sequences apart and no
    weights, so the result is one sequence.
    """
    file = Path(path)
    tokens = _split_tokens(file, _layer_expert_lines(file))
    layers = list(tokens[0])
    for number, token in enumerate(tokens):
        _check_token(file, number, token, layers, len(tokens[0][layers[0]]))
    ids = np.array([[token[layer] for layer in layers] for token in tokens], np.int64)
    return join(file, origin, [Recorded(SequenceInfo(file.stem), ids)])


def _layer_expert_lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (line number, layer, expert)."""
    for number, row in enumerate(_rows(file), start=1):
        if not row or (number == 1 and [cell.strip() for cell in row] == ["layer", "expert"]):
            continue
        try:
            layer, expert = (int(cell) for cell in row)
        except ValueError:
            raise refusal(
                file, f"line {number}: expected layer,expert, got {','.join(row)[:60]!r}"
            ) from None
        if not (0 <= layer <= MOST_ID and 0 <= expert <= MOST_ID):
            raise refusal(
                file,
                f"line {number}: layers and experts are numbers of 0 to {MOST_ID}, got "
                f"{','.join(row)[:60]}",
            )
        yield number, layer, expert


def _rows(file: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(read_text(file).splitlines())
    except csv.Error as error:
        raise refusal(file, f"it is not layer,expert lines ({error})") from None


def _split_tokens(file: Path, lines: Iterable[tuple[int, int, int]]) -> list[dict[int, list[int]]]:
    tokens: list[dict[int, list[int]]] = []
    last = None
    for _, layer, expert in lines:
        if last is None or layer < last:
            tokens.append({})
        tokens[-1].setdefault(layer, []).append(expert)
        last = layer
    if not tokens:
        raise refusal(file, "it holds no routes")
    return tokens


def _check_token(
    file: Path, number: int, token: dict[int, list[int]], layers: list[int], top_k: int
) -> None:
    if list(token) != layers:
        missing = sorted(set(layers) ^ set(token))
        reason = f"token {number} has layers {_span(token)}, token 0 {_span(layers)}"
        raise refusal(
            file, f"{reason} (differing: {missing[:4]}); the log starts or ends mid-sequence"
        )
    for layer, experts in token.items():
        if len(experts) != top_k:
            raise refusal(
                file,
                f"token {number}, layer {layer}: {len(experts)} ids, expected {top_k}; "
                "entries were dropped, or several tokens were evaluated at once",
            )


def _span(layers: Iterable[int]) -> str:
    numbers = list(layers)
    return f"{numbers[0]}..{numbers[-1]}"
