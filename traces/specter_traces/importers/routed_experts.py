"""The `routed_experts` arrays of serving engines (vLLM, SGLang)."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.errors import UsageError, shown
from specter_traces.files import refuse_irregular
from specter_traces.header import SequenceInfo
from specter_traces.importers.recorded import Origin, Recorded, join, refusal
from specter_traces.importers.texts import (
    BROKEN_ARRAYS,
    grid,
    parse_json,
    read_arrays,
    read_json_lines,
    read_text,
)
from specter_traces.trace import Trace


def import_routed_experts(path: str | os.PathLike[str], origin: Origin) -> Trace:
    """Read the `routed_experts` arrays [token, layer, k] that vLLM and SGLang return.

    `path` is .npy (one sequence), .npz (one sequence per array, in name order), or .json /
    .jsonl: one response per document or line, with `routed_experts` (here or in `meta_info`, or
    in `choices`) as nested lists or as base64 of int32 beside a `shape`. Some engines give base64
    without a shape; then `num_layers` and `top_k` stand beside it.
    """
    file = Path(path)
    reader = {".npy": _read_npy, ".npz": _read_arrays, ".json": _read_json, ".jsonl": _read_json}
    if file.suffix not in reader:
        raise UsageError(f"{file}: routed_experts come as .npy, .npz, .json or .jsonl")
    return join(file, origin, reader[file.suffix](file))


def _read_npy(file: Path) -> Iterator[Recorded]:
    refuse_irregular(file)
    try:
        ids = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"no file {file}") from None
    except BROKEN_ARRAYS as error:
        raise refusal(file, f"it is truncated or no .npy file ({error})") from None
    if not isinstance(ids, np.ndarray):
        raise refusal(file, "it is not a .npy file")
    yield Recorded(SequenceInfo(file.stem), ids)


def _read_arrays(file: Path) -> Iterator[Recorded]:
    for name, ids in read_arrays(file).items():
        yield Recorded(SequenceInfo(name), ids)


def _read_json(file: Path) -> Iterator[Recorded]:
    if file.suffix == ".jsonl":
        documents = list(read_json_lines(file))
    else:
        documents = list(enumerate(_as_list(parse_json(file, read_text(file))), start=1))
    for number, document in documents:
        for index, response in enumerate(_responses(document)):
            where = f"response {number}" + (f", choice {index}" if index else "")
            ids = _decode(file, where, response)
            _refuse_middle(file, where, response, len(ids))
            info = SequenceInfo(str(response.get("id", where)))
            yield Recorded(info, ids, prompt_length=_prompt(response, len(ids)))


def _as_list(document: Any) -> list[Any]:
    return document if isinstance(document, list) else [document]


def _responses(document: Any) -> list[dict[str, Any]]:
    """Return the objects of a response that may hold `routed_experts`, one a sequence."""
    if not isinstance(document, dict):
        return [{}]
    choices = document.get("choices")
    if isinstance(choices, list) and choices:
        return [_flat(choice) for choice in choices if isinstance(choice, dict)]
    return [_flat(document)]


def _flat(response: dict[str, Any]) -> dict[str, Any]:
    inner = response.get("meta_info")
    return {**inner, **response} if isinstance(inner, dict) else response


def _decode(file: Path, where: str, response: dict[str, Any]) -> NDArray[Any]:
    value = response.get("routed_experts")
    if isinstance(value, str):
        return _from_base64(file, where, value, response)
    if not isinstance(value, list):
        raise refusal(file, f"{where} has no 'routed_experts'")
    return grid(file, where, value)


def _from_base64(file: Path, where: str, text: str, response: dict[str, Any]) -> NDArray[Any]:
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise refusal(file, f"{where}: routed_experts is not base64 of int32 ({error})") from None
    shape = response.get("shape") or [-1, response.get("num_layers"), response.get("top_k")]
    try:
        return flat.reshape([int(size) for size in shape])
    except (TypeError, ValueError, OverflowError):
        raise refusal(
            file,
            f"{where}: {flat.size} ids do not fit shape {shown(shape)}; give 'shape', or "
            "'num_layers' and 'top_k', beside routed_experts",
        ) from None


def _prompt(response: dict[str, Any], rows: int) -> int:
    prompt = response.get("prompt_tokens")
    return min(prompt, rows) if isinstance(prompt, int) and prompt > 0 else 0


def _refuse_middle(file: Path, where: str, response: dict[str, Any], rows: int) -> None:
    """Engines leave out rows of a prompt that they found in their cache."""
    prompt, written = response.get("prompt_tokens"), response.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(written, int):
        return
    whole = prompt + written - 1  # the last sampled token is never an input: it has no row
    if rows < whole:
        raise refusal(
            file,
            f"{where}: {rows} rows for {whole} input tokens; it starts in the middle of a "
            "sequence: record without prefix caching",
        )
