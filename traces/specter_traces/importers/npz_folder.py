"""Folders of .npz files with an `index.jsonl` beside them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from specter_traces.errors import UsageError, shown
from specter_traces.header import SequenceInfo
from specter_traces.importers.recorded import Origin, Recorded, join, refusal
from specter_traces.importers.texts import half, read_arrays, read_json_lines
from specter_traces.trace import Trace

_INDEX_FIELDS = ("file", "key", "dataset", "finished", "repetition")


def import_npz_folder(
    folder: str | os.PathLike[str],
    origin: Origin,
    *,
    datasets: Sequence[str] = (),
    clean: bool = True,
    limit: int | None = None,
) -> Trace:
    """Read a folder of .npz files described by an `index.jsonl`.

    A line of the index names `file`, `key`, `dataset`, `finished`, `repetition` (a flag, so the
    header's shares are 0 or 1), `n_prompt_tokens` and `n_tokens`; the file holds `experts_<key>`
    [token, layer, k] and, if it likes, `probs_<key>`. `clean` keeps sequences that finished
    without repetition; `datasets` keeps the named ones (all when empty); `limit` the first so
    many of those.
    """
    root = Path(folder)
    chosen = [
        row for row in _index(root) if not clean or (row["finished"] and not row["repetition"])
    ]
    chosen = _of_datasets(chosen, datasets)
    if limit is not None and limit < 1:
        raise UsageError(f"--limit takes 1 or more sequences, got {limit}")
    if not chosen:
        raise UsageError(
            f"no sequence of {root} is left: choose other datasets or take unclean ones"
        )
    return join(root, origin, _read_npz(root, chosen[:limit]))


def _index(root: Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in read_json_lines(root / "index.jsonl"):
        missing = [name for name in _INDEX_FIELDS if name not in row]
        if missing:
            raise refusal(root / "index.jsonl", f"line {number} has no {missing[0]!r}")
        rows.append(row)
    return rows


def _of_datasets(rows: list[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    there = sorted({str(row["dataset"]) for row in rows})
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        raise UsageError(f"no dataset {unknown[0]!r}; there are: {', '.join(there)}")
    return [row for row in rows if not wanted or row["dataset"] in wanted]


def _read_npz(root: Path, rows: Sequence[dict[str, Any]]) -> Iterator[Recorded]:
    by_file: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_file[str(row["file"])].append(row)
    for name, members in by_file.items():
        # An index is a foreign file: a name that leaves its folder is not followed.
        if Path(name).name != name:
            raise refusal(root, f"the index names {name!r}, which is not a file of this folder")
        arrays = read_arrays(root / name)
        for row in members:
            yield _npz_sequence(root / name, arrays, row)


def _npz_sequence(file: Path, arrays: dict[str, NDArray[Any]], row: dict[str, Any]) -> Recorded:
    experts, probs = f"experts_{row['key']}", f"probs_{row['key']}"
    if experts not in arrays:
        raise refusal(file, f"the index promises {experts}, which is not there")
    ids = arrays[experts]
    if ids.ndim != 3:
        raise refusal(file, f"{experts} has shape {ids.shape}, expected [token, layer, k]")
    if len(ids) != row.get("n_tokens", len(ids)):
        raise refusal(
            file, f"{experts} has {len(ids)} rows, the index says {row['n_tokens']}; it is cut"
        )
    weights = arrays.get(probs)
    if weights is not None and weights.shape != ids.shape:
        raise refusal(file, f"{probs} has shape {weights.shape}, {experts} {ids.shape}")
    info = SequenceInfo(
        name=f"{file.stem}/{row['key']}",
        domain=str(row["dataset"]),
        unrecorded_prompt_tokens=_prompt(file, row),
    )
    halves = None if weights is None else half(file, probs, weights)
    return Recorded(info, ids, halves, repetition=float(bool(row["repetition"])))


def _prompt(file: Path, row: dict[str, Any]) -> int:
    value = row.get("n_prompt_tokens", 0)
    if type(value) is not int or not 0 <= value < 2**31:
        raise refusal(file, f"the index gives n_prompt_tokens {shown(value)}, no number of tokens")
    return value
