"""The trace format: files come back as they went, and no damaged file gets through."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as serialize
from toy_traces import toy_trace

from specter_traces import (
    Decoding,
    DraftInfo,
    DraftKind,
    Header,
    SpecterError,
    Trace,
    UsageError,
    bundled,
    bundled_names,
    examine,
    load,
    open_trace,
    save,
    validate,
)
from specter_traces.columns import COLUMNS
from specter_traces.files import refuse_irregular, write_atomic


def same_columns(first: Trace, second: Trace) -> bool:
    a, b = first.columns(), second.columns()
    return list(a) == list(b) and all(
        a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]) for name in a
    )


@given(
    layers=st.integers(1, 4),
    experts=st.integers(4, 20),
    top_k=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    paired=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_file_gives_back_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory,
    layers: int,
    experts: int,
    top_k: int,
    lengths: list[int],
    paired: bool,
) -> None:
    trace = toy_trace(layers, experts, top_k, tuple(lengths), paired)
    path = tmp_path_factory.mktemp("trace") / "toy.safetensors"
    saved = save(trace, path)
    loaded = load(path)
    assert loaded.header == saved.header
    assert loaded.header.content_hash
    assert same_columns(loaded, trace)


def test_every_header_field_survives_json() -> None:
    header = Header(
        name="é",
        model="m",
        num_layers=2,
        num_experts=4,
        top_k=1,
        decoding=Decoding.SAMPLED,
        synthetic=True,
        synthesized_from="x",
        draft=DraftInfo("d", 3, DraftKind.BASE, 64),
        assumed_draft=True,
        repetition=(0.5,),
        notes=("a", "b"),
    )
    again = Header.from_json(header.to_json())
    assert again == header
    assert again.marks == ("synthetic (from x)", "assumed draft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"top_k": "4"}, "'top_k': expected int"),
        ({"synthetic": 1}, "'synthetic': expected bool"),
        ({"schema_version": 9}, "schema version 1 is read here, got 9"),
        ({"decoding": "dreamt"}, "'decoding' cannot be read"),
        ({"draft": {"bits": 4}}, "'draft' cannot be read"),
        ({"sequences": [{"title": "x"}]}, "'sequences' cannot be read"),
        ({"repetition": 5}, "'repetition' cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    raw = {**json.loads(toy_trace().header.to_json()), **change}
    with pytest.raises(SpecterError, match=message):
        Header.from_json(json.dumps(raw))


def test_loading_maps_instead_of_reading(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(), path)
    ids = load(path).target_ids
    assert not ids.flags.owndata and not ids.flags.writeable
    with path.open("r+b") as file:  # the array shows what the file holds now
        content = path.read_bytes()
        file.seek(content.index(ids.tobytes()[:64]))
        file.write(b"\x07")
    assert ids.reshape(-1)[0] == 7


def test_a_sequence_is_a_view_and_a_selection_a_sealed_copy() -> None:
    trace = toy_trace(lengths=(10, 20, 5)).with_header(repetition=(0.1, 0.2, 0.3))
    second = trace.sequence(1)
    assert second.num_positions == 20 and second.num_sequences == 1
    assert np.shares_memory(second.target_ids, trace.target_ids)
    assert second.header.sequences[0].name == "s1" and second.header.repetition == (0.2,)
    chosen = trace.select([2, 1])
    assert chosen.sequence_offsets.tolist() == [0, 5, 25]
    assert same_columns(chosen.sequence(1), second)
    assert second.prompt_lengths.tolist() == [6] and chosen.prompt_lengths.tolist() == [5, 6]
    assert not validate(chosen) and chosen.header.content_hash
    assert [part.num_positions for part in trace] == [10, 20, 5]
    with pytest.raises(UsageError, match=r"sequence 3 .* has 3"):
        trace.sequence(3)
    with pytest.raises(UsageError, match="no sequence"):
        trace.select([])


def test_the_hash_depends_on_every_column() -> None:
    trace = toy_trace()
    hashes = {trace.sealed().header.content_hash}
    for column in COLUMNS:
        changed = getattr(trace, column.name).copy()
        changed.reshape(-1)[0] += 1
        hashes.add(replace(trace, **{column.name: changed}).sealed().header.content_hash)
    assert len(hashes) == 1 + len(COLUMNS)


def test_a_changed_byte_is_found_by_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    load(path)
    with pytest.raises(SpecterError, match="content hash"):
        load(path, full=True)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(lengths=(9,)), path)
    content = path.read_bytes()
    for length in [*range(0, 60), *range(60, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(SpecterError, match=r"toy\.safetensors is not a usable trace"):
            load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(SpecterError, match="follow its last column"):
        load(path)


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "toy.safetensors"
    if not path.exists():
        save(toy_trace(lengths=(4,)), path)
    content = bytearray(path.read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_end))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    try:
        load(damaged, full=True)
    except SpecterError as error:
        assert "\n" not in str(error)


def write_raw(path: Path, entries: dict[str, Any], data: bytes = b"") -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 bytes"),
        (b"PK\x03\x04" + bytes(60), "truncated or no safetensors"),
        (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808 bytes"),
        (struct.pack("<Q", 4) + b"nope", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 3) + b"\xff\xfe}", "not JSON"),
        (struct.pack("<Q", 50_000) + b"[" * 50_000, "not JSON"),
        (struct.pack("<Q", 20) + b'{"__metadata__": 42}', "metadata is not"),
    ],
)
def test_foreign_bytes_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(SpecterError, match=message):
        load(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(serialize({"weight": np.zeros(4, np.float32)}))
    with pytest.raises(SpecterError, match="another kind"):
        load(path)
    with pytest.raises(UsageError, match="no trace at"):
        load(tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Save a toy trace, then change the entries of its safetensors header."""
    save(toy_trace(paired=False, lengths=(6,)), path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    write_raw(path, entries, content[8 + length :])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["target_ids"].update(dtype="F32"), "expected uint8 or uint16, got F32"),
        (lambda e: e["target_ids"].update(shape=[6, 3, 4]), "bytes do not hold"),
        (lambda e: e["target_ids"].update(shape=[6, 9]), r"shape \[T, L, K\]: got \[6, 9\]"),
        (lambda e: e["target_ids"].update(shape=[6, -3, -3]), "broken header entry"),
        (lambda e: e["target_ids"].update(shape=[10**30] * 9), "bytes do not hold"),
        (lambda e: e["target_ids"].update(data_offsets=[0, 54]), "gap or overlap"),
        (lambda e: e["target_ids"].pop("dtype"), "broken header entry"),
        (lambda e: e.update(extra=e["target_ids"]), "unknown column 'extra'"),
        (lambda e: e["__metadata__"].update(specter="{"), "header is not JSON"),
    ],
)
def test_a_broken_column_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(SpecterError, match=message):
        load(rewritten(tmp_path / "toy.safetensors", change))


def test_examine_returns_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    trace = toy_trace(layers=4)
    trace.target_ids[:, 2] = trace.target_ids[:, 1]
    trace.target_ids[20, 3] = 5
    save(trace, path)
    _, problems = examine(path)
    assert [p.what.split(" (")[0] for p in problems] == [
        "ids at [20, 3]",
        "layer 2 is a copy of layer 1",
    ]


def test_saving_refuses_what_could_not_be_loaded(tmp_path: Path) -> None:
    trace = toy_trace()
    trace.target_ids[3, 1, 0] = 16
    with pytest.raises(
        SpecterError, match=r"target_ids: id at \[3, 1, 0\]: got 16, expected below"
    ):
        save(trace, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "deep" / "file", "old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomic(path, fail)
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file"]


def test_an_unwritable_place_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose a folder that can be written") as raised:
        write_atomic(tmp_path / "file" / "inside", b"")
    assert raised.value.exit_code == 2
    with pytest.raises(UsageError, match="cannot write"):
        write_atomic(tmp_path, b"")
    assert os.listdir(tmp_path) == ["file"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="it is a pipe"):
        write_atomic(pipe, b"")
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(UsageError, match="it is a device"):
        write_atomic("/dev/null", b"")
    for name in ("x" * 300, "nul\0"):
        with pytest.raises(UsageError, match="cannot write"):
            write_atomic(tmp_path / name, b"")


def test_pipes_devices_and_folders_are_no_inputs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(UsageError, match=f"is {what}, not a regular file"):
            refuse_irregular(path)
    for name in ("x" * 300, "nul\0"):
        with pytest.raises(UsageError, match="cannot read"):
            refuse_irregular(tmp_path / name)
    refuse_irregular(tmp_path / "absent")  # its reader says that


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        assert write_atomic(tmp_path / "file", b"").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_an_unknown_name_suggests_the_nearest() -> None:
    names = bundled_names()
    with pytest.raises(UsageError, match="no file and no bundled trace"):
        open_trace("surely-not-there")
    if names:
        with pytest.raises(UsageError, match=f"did you mean '{names[0]}'"):
            bundled(names[0] + "x")


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_traces_are_sound(name: str) -> None:
    trace = bundled(name)
    assert validate(trace) == []
    assert trace.header.name == name and trace.is_paired
    assert not trace.header.marks


def test_a_draft_without_bits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(lengths=(4,)), path)
    content = path.read_bytes()
    assert content.count(b'\\"bits\\"') == 1
    path.write_bytes(content.replace(b'\\"bits\\"', b'\\"bitz\\"'))
    with pytest.raises(SpecterError, match="'draft' cannot be read"):
        load(path)
