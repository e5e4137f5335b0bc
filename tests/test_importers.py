"""Importers read what engines write and refuse what cannot be trusted."""

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_traces import toy_trace

from specter_traces import SpecterError, Trace, UsageError, validate
from specter_traces.importers import (
    Origin,
    import_jsonl,
    import_llamacpp_csv,
    import_npz_folder,
    import_routed_experts,
)

ORIGIN = Origin("log", "toy-moe", num_experts=16, source="here", licence="MIT")


@pytest.fixture
def toy() -> Trace:
    return toy_trace(paired=False)


def check(trace: Trace, toy: Trace) -> None:
    assert validate(trace) == []
    assert np.array_equal(trace.target_ids, toy.target_ids)
    assert trace.target_ids.dtype == np.uint8
    assert trace.header.model == "toy-moe" and trace.header.licence == "MIT"
    assert trace.header.content_hash and not trace.is_paired


# --- .npz folder ------------------------------------------------------------------------------


def write_folder(folder: Path, toy: Trace, **changes: Any) -> Path:
    arrays: dict[str, Any] = {}
    lines = []
    for key, part in enumerate(toy):
        arrays[f"experts_{key}"] = part.target_ids
        arrays[f"probs_{key}"] = part.target_weights
        line = {
            "file": "a.npz",
            "key": key,
            "dataset": f"set{key}",
            "finished": True,
            "repetition": False,
            "n_prompt_tokens": 7,
            "n_tokens": part.num_positions,
            **(changes if key == 1 else {}),
        }
        lines.append(json.dumps({name: value for name, value in line.items() if value != "drop"}))
    np.savez(folder / "a.npz", **arrays)
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_npz_folder(tmp_path: Path, toy: Trace) -> None:
    trace = import_npz_folder(write_folder(tmp_path, toy), ORIGIN)
    check(trace, toy)
    assert trace.target_weights is not None and toy.target_weights is not None
    assert np.array_equal(trace.target_weights, toy.target_weights)
    assert trace.sequence_offsets.tolist() == [0, 40, 65]
    info = trace.header.sequences[1]
    assert (info.name, info.domain, info.unrecorded_prompt_tokens) == ("a/1", "set1", 7)


@pytest.mark.parametrize("change", [{"finished": False}, {"repetition": True}])
def test_npz_keeps_clean_sequences(tmp_path: Path, toy: Trace, change: dict[str, bool]) -> None:
    folder = write_folder(tmp_path, toy, **change)
    assert import_npz_folder(folder, ORIGIN).num_sequences == 1
    everything = import_npz_folder(folder, ORIGIN, clean=False)
    assert everything.header.repetition == (0.0, float(change.get("repetition", False)))


def test_npz_selection(tmp_path: Path, toy: Trace) -> None:
    folder = write_folder(tmp_path, toy)
    only = import_npz_folder(folder, ORIGIN, datasets=["set1"])
    assert [s.domain for s in only.header.sequences] == ["set1"]
    assert import_npz_folder(folder, ORIGIN, limit=1).num_positions == 40
    with pytest.raises(UsageError, match="no dataset 'set9'; there are: set0, set1"):
        import_npz_folder(folder, ORIGIN, datasets=["set9"])
    with pytest.raises(UsageError, match="takes 1 or more"):
        import_npz_folder(folder, ORIGIN, limit=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_tokens": 26}, "has 25 rows, the index says 26; it is cut"),
        ({"key": 5}, "promises experts_5, which is not there"),
        ({"dataset": "drop"}, "line 2 has no 'dataset'"),
        ({"file": "../a.npz"}, "not a file of this folder"),
    ],
)
def test_npz_refusals(tmp_path: Path, toy: Trace, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecterError, match=message):
        import_npz_folder(write_folder(tmp_path, toy, **change), ORIGIN)


class Trap:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_npz_files_are_never_unpickled(tmp_path: Path, toy: Trace) -> None:
    folder = write_folder(tmp_path, toy)
    trap = np.array([Trap(tmp_path / "sprung")], object)
    np.savez(folder / "a.npz", experts_0=trap, experts_1=np.zeros(1))
    with pytest.raises(SpecterError, match="cannot be imported"):
        import_npz_folder(folder, ORIGIN)
    assert not (tmp_path / "sprung").exists()
    (folder / "a.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(SpecterError, match=r"truncated or no \.npz"):
        import_npz_folder(folder, ORIGIN)
    with pytest.raises(UsageError, match="no file"):
        import_npz_folder(tmp_path / "nowhere", ORIGIN)


def test_gpt_oss_clean_subset(shared: Path) -> None:
    folder = shared / "traces" / "gpt-oss-20b"
    trace = import_npz_folder(folder, Origin("gpt-oss", num_experts=32), datasets=["gpqa_diamond"])
    assert validate(trace) == []
    assert {s.domain for s in trace.header.sequences} == {"gpqa_diamond"}
    assert 0 < trace.num_sequences < 24
    assert trace.target_weights is not None
    assert trace.target_weights.astype(float).sum(axis=-1) == pytest.approx(1, abs=5e-3)


# --- serving engines --------------------------------------------------------------------------


def test_npy_and_npz_arrays(tmp_path: Path, toy: Trace) -> None:
    np.save(tmp_path / "one.npy", toy.target_ids.astype(np.int32))
    check(import_routed_experts(tmp_path / "one.npy", ORIGIN), toy)
    parts: dict[str, Any] = {
        f"request{i}": part.target_ids.astype(np.int64) for i, part in enumerate(toy)
    }
    np.savez(tmp_path / "two.npz", **parts)
    trace = import_routed_experts(tmp_path / "two.npz", ORIGIN)
    check(trace, toy)
    assert [s.name for s in trace.header.sequences] == ["request0", "request1"]


def encoded(part: Trace) -> str:
    return base64.b64encode(part.target_ids.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize(
    "form",
    [
        lambda part: {"routed_experts": part.target_ids.tolist()},
        lambda part: {"routed_experts": encoded(part), "shape": list(part.target_ids.shape)},
        lambda part: {"routed_experts": encoded(part), "num_layers": 3, "top_k": 3},
        lambda part: {"meta_info": {"routed_experts": encoded(part), "shape": [-1, 3, 3]}},
        lambda part: {"choices": [{"routed_experts": part.target_ids.tolist()}]},
    ],
)
def test_json_responses(tmp_path: Path, toy: Trace, form: Any) -> None:
    documents = [form(part) for part in toy]
    (tmp_path / "a.json").write_text(json.dumps(documents))
    check(import_routed_experts(tmp_path / "a.json", ORIGIN), toy)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(d) for d in documents))
    check(import_routed_experts(tmp_path / "a.jsonl", ORIGIN), toy)
    (tmp_path / "one.json").write_text(json.dumps(documents[0]))
    assert import_routed_experts(tmp_path / "one.json", ORIGIN).num_positions == 40


def test_prompt_lengths_are_kept_and_missing_prefixes_refused(tmp_path: Path, toy: Trace) -> None:
    document = {
        "routed_experts": toy.target_ids.tolist(),
        "meta_info": {"prompt_tokens": 30, "completion_tokens": 36, "id": "r7"},
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    trace = import_routed_experts(path, ORIGIN)
    assert trace.prompt_lengths.tolist() == [30] and trace.header.sequences[0].name == "r7"
    document["meta_info"]["prompt_tokens"] = 94
    path.write_text(json.dumps(document))
    with pytest.raises(SpecterError, match="65 rows for 129 input tokens; it starts in the middle"):
        import_routed_experts(path, ORIGIN)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "response 1 has no 'routed_experts'"),
        ({"routed_experts": [[[1, 2, 3], [1, 2]]]}, "fewer than k ids in a row"),
        ({"routed_experts": [[[1, 2, -1]]]}, "id -1 is outside 0 to 15; negative ids are padding"),
        ({"routed_experts": [[[1, 2, 16]]]}, "id 16 is outside 0 to 15"),
        ({"routed_experts": [[[1, 2, 2]]]}, "expected 3 distinct experts"),
        ({"routed_experts": [[[1.5, 2, 3]]]}, "not integers"),
        ({"routed_experts": [1, 2, 3]}, "expected .token, layer, k., got shape"),
        ({"routed_experts": []}, "expected .token, layer, k., got shape"),
        ({"routed_experts": "%%"}, "not base64 of int32"),
        ({"routed_experts": "AAAA"}, "not base64 of int32"),
        ({"routed_experts": "AAAAAA=="}, "do not fit shape"),
        ({"routed_experts": "AAAAAA==", "shape": [2, 1, 1]}, "do not fit shape"),
        ([5], "has no 'routed_experts'"),
        ([], "holds no routes"),
        ("text", "has no 'routed_experts'"),
    ],
)
def test_bad_responses_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SpecterError, match=message):
        import_routed_experts(path, ORIGIN)


def test_unreadable_arrays_are_refused(tmp_path: Path, toy: Trace) -> None:
    np.save(tmp_path / "a.npy", toy.target_ids)
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-9])
    with pytest.raises(SpecterError, match=r"truncated or no \.npy"):
        import_routed_experts(tmp_path / "a.npy", ORIGIN)
    with pytest.raises(UsageError, match=r"come as \.npy"):
        import_routed_experts(tmp_path / "a.csv", ORIGIN)
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(SpecterError, match="not JSON"):
        import_routed_experts(tmp_path / "b.json", ORIGIN)
    np.savez(tmp_path / "c.npz", a=np.zeros((4, 2, 1), int), b=np.zeros((4, 3, 1), int))
    with pytest.raises(SpecterError, match="sequences differ"):
        import_routed_experts(tmp_path / "c.npz", ORIGIN)


def test_traps_are_refused(tmp_path: Path) -> None:
    toy = toy_trace(layers=8, lengths=(600,), paired=False)
    path = tmp_path / "a.npy"
    batch = toy.target_ids.reshape(2, 300, 8, 3).swapaxes(0, 1).reshape(600, 8, 3)
    traps: list[tuple[Any, Any, str]] = [
        (slice(0, 4), toy.target_ids[:1], "constant rows at the start"),
        ((slice(None), 5), toy.target_ids[:, 1], "layer 5 is a copy of layer 1"),
        (slice(None), batch, "interleaved by batch"),
    ]
    for where, rows, message in traps:
        ids = toy.target_ids.copy()
        ids[where] = rows
        np.save(path, ids)
        with pytest.raises(SpecterError, match=message):
            import_routed_experts(path, ORIGIN)


def test_the_number_of_experts_can_be_guessed_and_says_so(tmp_path: Path, toy: Trace) -> None:
    np.save(tmp_path / "a.npy", toy.target_ids.astype(np.int32) + 500)
    trace = import_routed_experts(tmp_path / "a.npy", Origin("a"))
    assert trace.num_experts == 516 and trace.target_ids.dtype == np.uint16
    assert trace.header.notes == ("number of experts taken from the largest id",)


# --- llama.cpp --------------------------------------------------------------------------------


def csv_lines(toy: Trace, first_layer: int = 0) -> list[str]:
    return [
        f"{layer + first_layer},{expert}"
        for row in toy.target_ids
        for layer, experts in enumerate(row)
        for expert in experts
    ]


@pytest.mark.parametrize(("header", "first_layer"), [(["layer,expert"], 0), ([], 1)])
def test_llamacpp(tmp_path: Path, toy: Trace, header: list[str], first_layer: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join([*header, *csv_lines(toy, first_layer)]) + "\n\n")
    check(import_llamacpp_csv(path, ORIGIN), toy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-3], "token 64 has layers 0..1, token 0 0..2 .* mid-sequence"),
        (lambda lines: lines[3:], "token 1 has layers 0..2, token 0 1..2 .* mid-sequence"),
        (lambda lines: lines[:-1], "token 64, layer 2: 2 ids, expected 3; entries were dropped"),
        (lambda lines: [*lines, "x,y"], "line 586: expected layer,expert, got 'x,y'"),
        (lambda lines: [*lines, "0,1,2"], "expected layer,expert"),
        (lambda lines: [], "holds no routes"),
        (lambda lines: [f"{line[0]},{int(line[2:]) + 9}" for line in lines], "outside 0 to 15"),
    ],
)
def test_llamacpp_refusals(tmp_path: Path, toy: Trace, change: Any, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(change(csv_lines(toy))))
    with pytest.raises(SpecterError, match=message):
        import_llamacpp_csv(path, ORIGIN)


def test_llamacpp_batches_are_refused(tmp_path: Path, toy: Trace) -> None:
    batch = [f"{layer},{e}" for layer in range(3) for e in toy.target_ids[:5, layer].reshape(-1)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join([*csv_lines(toy), *batch]))
    with pytest.raises(SpecterError, match=r"15 ids, expected 3; .* several tokens"):
        import_llamacpp_csv(path, ORIGIN)


# --- JSONL ------------------------------------------------------------------------------------


def json_rows(toy: Trace) -> list[dict[str, Any]]:
    assert toy.target_weights is not None
    return [
        {
            "sequence": f"s{number}",
            "token": token,
            "layer": layer,
            "ids": part.target_ids[token, layer].tolist(),
            "weights": part.target_weights[token, layer].tolist(),
        }
        for number, part in enumerate(toy)
        for token in range(part.num_positions)
        for layer in range(toy.num_layers)
        if part.target_weights is not None
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_jsonl(tmp_path: Path, toy: Trace) -> None:
    rows = json_rows(toy)
    trace = import_jsonl(
        write_rows(tmp_path / "a.jsonl", rows[::-1][65:] + rows[::-1][:65]), ORIGIN
    )
    assert sorted(s.name for s in trace.header.sequences) == ["s0", "s1"]
    trace = import_jsonl(write_rows(tmp_path / "a.jsonl", rows), ORIGIN)
    check(trace, toy)
    assert trace.target_weights is not None and toy.target_weights is not None
    assert np.array_equal(trace.target_weights, toy.target_weights)
    for row in rows:
        del row["weights"]
    assert import_jsonl(write_rows(tmp_path / "a.jsonl", rows), ORIGIN).target_weights is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[3:], "sequence s0 starts at token 1, in the middle"),
        (lambda rows: rows[:-1], "sequence s1: token 24, layer 2 is missing"),
        (lambda rows: [*rows, rows[4]], "line 196: token 1, layer 1 is there twice"),
        (lambda rows: rows[7].update(ids=[1, 2]), "fewer than k ids in a row"),
        (lambda rows: rows[7].update(ids="3"), "line 8: expected a list of expert ids"),
        (lambda rows: rows[7].update(layer=1.5), "line 8: expected a whole number in 'layer'"),
        (lambda rows: rows[7].pop("token"), "line 8: expected a whole number in 'token'"),
        (lambda rows: rows[7].update(weights=[1]), "rows differ in length"),
        (lambda rows: rows[7].update(ids=[1, 2, "a"]), "not integers"),
        (lambda rows: rows[7].update(ids=[[1], [2], [3]]), "rows differ in length"),
    ],
)
def test_jsonl_refusals(tmp_path: Path, toy: Trace, change: Any, message: str) -> None:
    rows = json_rows(toy)
    changed = change(rows)
    path = write_rows(tmp_path / "a.jsonl", changed if isinstance(changed, list) else rows)
    with pytest.raises(SpecterError, match=message):
        import_jsonl(path, ORIGIN)


def test_jsonl_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"token": 0}\nnope\n')
    with pytest.raises(SpecterError, match="line 1: expected a whole number in 'layer'"):
        import_jsonl(tmp_path / "a.jsonl", ORIGIN)
    (tmp_path / "a.jsonl").write_text("nope")
    with pytest.raises(SpecterError, match="line 1: not JSON"):
        import_jsonl(tmp_path / "a.jsonl", ORIGIN)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(SpecterError, match="holds no routes"):
        import_jsonl(tmp_path / "a.jsonl", ORIGIN)


# --- what no engine writes --------------------------------------------------------------------


def refused(tmp_path: Path, name: str, content: str | bytes) -> str:
    """How an importer refuses a file of this name and content, in one short line."""
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    readers = {"log.jsonl": import_jsonl, "log.csv": import_llamacpp_csv}
    with pytest.raises(SpecterError) as caught:
        readers.get(name, import_routed_experts)(path, replace(ORIGIN, num_experts=0))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"weights": [1e300, 1.0]}, "NaN or infinite"),
        ({"weights": ["a", "b"]}, "not numbers"),
        ({"weights": [10**400, 1]}, "not numbers"),
        ({"ids": [0, 10**12]}, "1000000000001 experts, at most 65536"),
        ({"ids": [0, 10**400]}, "not integers"),
        ({"sequence": "\ud800"}, "not valid text"),
    ],
)
def test_jsonl_of_senseless_values(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    whole = {"layer": 0, "token": 0, "ids": [0, 1], "weights": [0.5, 0.5]} | row
    assert says in refused(tmp_path, "log.jsonl", json.dumps(whole))


@pytest.mark.parametrize("line", ["0,-1", "-1,3", "0," + "9" * 400, "0," + "9" * 5000])
def test_llamacpp_ids_out_of_range(tmp_path: Path, line: str) -> None:
    assert "line 1: " in refused(tmp_path, "log.csv", line)


@pytest.mark.parametrize("shape", [[float("inf"), 2, 2], "abc", 3, [-1, -1, 2], [10**30, 1, 1]])
def test_shapes_that_are_none(tmp_path: Path, shape: object) -> None:
    ids = base64.b64encode(np.arange(8, dtype="<i4").tobytes()).decode()
    document = json.dumps({"routed_experts": ids, "shape": shape})
    assert "do not fit shape" in refused(tmp_path, "log.json", document)


def test_arrays_without_axes(tmp_path: Path, toy: Trace) -> None:
    np.save(tmp_path / "x.npy", np.int64(3))
    assert "expected [token, layer, k]" in refused(
        tmp_path, "log.npy", (tmp_path / "x.npy").read_bytes()
    )
    folder = write_folder(tmp_path, toy)
    np.savez(folder / "a.npz", experts_0=np.int64(3))
    with pytest.raises(SpecterError, match="expected \\[token, layer, k\\]"):
        import_npz_folder(folder, ORIGIN)


@pytest.mark.parametrize("value", ["many", float("inf"), -1, True, [3], 10**400])
def test_an_index_with_a_senseless_prompt(tmp_path: Path, toy: Trace, value: object) -> None:
    folder = write_folder(tmp_path, toy, n_prompt_tokens=value)
    with pytest.raises(SpecterError, match="n_prompt_tokens"):
        import_npz_folder(folder, ORIGIN)


def test_an_array_file_that_claims_more_than_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 1), np.int64))
    data = (tmp_path / "x.npy").read_bytes().replace(b"(1, 1, 1), }", b"(99999999999999,1,1),}")
    assert "no .npy file" in refused(tmp_path, "log.npy", data)


def test_pipes_are_no_logs(tmp_path: Path) -> None:
    for name, reader in (
        ("log.jsonl", import_jsonl),
        ("log.csv", import_llamacpp_csv),
        ("log.npy", import_routed_experts),
        ("log.npz", import_routed_experts),
    ):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match="a pipe, not a regular file"):
            reader(tmp_path / name, ORIGIN)


def test_texts_are_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    line = {"layer": 0, "token": 0, "ids": [0, 1], "sequence": "größe"}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    code = (
        "import sys; from specter_traces.importers import Origin, import_jsonl\n"
        "print(ascii(import_jsonl(sys.argv[1], Origin('log')).header.sequences[0].name))"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "'gr\\xf6\\xdfe'\n", done.stderr
