"""Logs of one JSON object a line, one per token and layer."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from specter_traces.header import SequenceInfo
from specter_traces.importers.recorded import Origin, Recorded, join, refusal
from specter_traces.importers.texts import grid, half, read_json_lines
from specter_traces.trace import Trace


def import_jsonl(path: str | os.PathLike[str], origin: Origin) -> Trace:
    """Read one JSON object a line: `layer`, `token`, `ids` and, if known, `weights`, `sequence`.

    `token` counts from 0 within its sequence; layers are numbered 0, 1, ... or by any ascending
    numbers that are the same for every token.
    """
    file = Path(path)
    rows: dict[str, dict[tuple[int, int], dict[str, Any]]] = defaultdict(dict)
    for number, row in read_json_lines(file):
        key = (_whole(file, number, row, "token"), _whole(file, number, row, "layer"))
        sequence = rows[str(row.get("sequence", file.stem))]
        if key in sequence:
            raise refusal(file, f"line {number}: token {key[0]}, layer {key[1]} is there twice")
        if not isinstance(row.get("ids"), list) or not row["ids"]:
            raise refusal(file, f"line {number}: expected a list of expert ids in 'ids'")
        sequence[key] = row
    return join(file, origin, [_table(file, name, table) for name, table in rows.items()])


def _table(file: Path, name: str, rows: dict[tuple[int, int], dict[str, Any]]) -> Recorded:
    tokens = sorted({token for token, _ in rows})
    layers = sorted({layer for _, layer in rows})
    if tokens[0] != 0:
        raise refusal(
            file,
            f"sequence {name} starts at token {tokens[0]}, in the middle; record from token 0",
        )
    for token in range(tokens[-1] + 1):
        for layer in layers:
            if (token, layer) not in rows:
                raise refusal(file, f"sequence {name}: token {token}, layer {layer} is missing")
    lines = [[rows[token, layer] for layer in layers] for token in tokens]
    ids = grid(file, f"sequence {name}", [[row["ids"] for row in line] for line in lines])
    weights = None
    if all("weights" in row for line in lines for row in line):
        values = grid(
            file, f"sequence {name}", [[row["weights"] for row in line] for line in lines]
        )
        if values.shape != ids.shape:
            raise refusal(file, f"sequence {name}: weights do not match the ids")
        weights = half(file, f"sequence {name}", values)
    return Recorded(SequenceInfo(name), ids, weights)


def _whole(file: Path, number: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 0:
        raise refusal(
            file, f"line {number}: expected a whole number in {name!r}, got {value!r:.40}"
        )
    return value
