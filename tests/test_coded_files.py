"""Coded checkpoints on disk: they run without encoding, and give back the original to the byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live import config_of, plain_text, text_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specter_run import run
from test_cli_run_coding import write_fused, write_toy

from specter_runtime import coded_folder, coded_store
from specter_runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from specter_runtime.codec import Coding
from specter_runtime.coded_files import CODED_FILE
from specter_runtime.coded_folder import decode_folder, encode_folder
from specter_runtime.coded_header import METADATA_KEY
from specter_runtime.coded_store import CodedStore
from specter_runtime.devices import DeviceKind
from specter_runtime.experts import find_layers, install
from specter_runtime.session import Session, SessionOptions
from specter_runtime.survey import survey
from specter_runtime.weight_files import read_header
from specter_runtime.weight_writing import Output, write_weights
from specter_traces import SpecterError, UsageError

Capture = pytest.CaptureFixture[str]
CODING = Coding("base4", 32)
TOKENS = 16


def write_shards(folder: Path) -> Path:
    """mixtral in several files, tensors in an order of their own, with an index."""
    whole = write_toy("mixtral", folder) / "model.safetensors"
    weights, names = load_file(whole), sorted(load_file(whole), reverse=True)
    whole.unlink()
    files = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(files.values())):
        part = [name for name in names if files[name] == file]
        outputs = [
            Output(name, weights[name].dtype, tuple(weights[name].shape), weights[name].clone)
            for name in part
        ]
        write_weights(folder / file, outputs, {"format": "pt", "note": file})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "one by one": lambda folder: write_toy("deepseek-v2", folder),
    "fused": write_fused,
    "gpt-oss": lambda folder: write_toy("gpt-oss", folder),
    "shards": write_shards,
    "float16": lambda folder: write_toy("olmoe", folder, torch.float16),
    "bundled": lambda folder: Path(shutil.copytree(BUNDLED_FOLDER / "tiny-moe", folder)),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy("qwen3-moe", tmp_path_factory.mktemp("original") / "toy")


@pytest.fixture(scope="module")
def coded(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coded") / "toy"
    encode_folder(str(toy), out, CODING)
    return out


def session(folder: Path, **dotted: Any) -> Session:
    options = SessionOptions(device=DeviceKind.IMMEDIATE, poison=True, context_tokens=64)
    given = {"memory__slots": 4, **dotted}
    return Session.open(str(folder), config_of(**given), options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_restores_every_file(layout: str, tmp_path: Path) -> None:
    original = LAYOUTS[layout](tmp_path / "original")
    sizes = encode_folder(str(original), tmp_path / "coded", CODING)
    names = {path.name for path in (tmp_path / "coded").iterdir()}
    assert names == {n for n in contents(original) if "safetensors" not in n} | {CODED_FILE}
    assert sizes.after_bytes == (tmp_path / "coded" / CODED_FILE).stat().st_size
    decode_folder(tmp_path / "coded", tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(original)
    assert {path.name for path in tmp_path.iterdir()} == {"original", "coded", "restored"}


def test_any_reader_of_safetensors_opens_the_file(coded: Path) -> None:
    with safe_open(coded / CODED_FILE, "pt") as file:
        assert file.metadata().keys() == {METADATA_KEY}
        assert file.get_tensor("coded.0.down_proj.scales").dtype is torch.float16
        assert file.get_tensor("model.norm.weight").dtype is torch.bfloat16


def test_tensors_start_where_a_reader_can_map_them(tmp_path: Path) -> None:
    odd, wide = torch.arange(3, dtype=torch.uint8), torch.arange(2)
    outputs = [
        Output("odd", odd.dtype, (3,), odd.clone),
        Output("wide", wide.dtype, (2,), wide.clone),
    ]
    path = write_weights(tmp_path / "x.safetensors", outputs, {})
    assert all(each.begin % each.dtype.itemsize == 0 for each in read_header(path))
    assert torch.equal(load_file(path)["wide"], wide) and torch.equal(load_file(path)["odd"], odd)


def test_the_store_is_the_one_that_encoding_makes(toy: Path, coded: Path) -> None:
    opened = open_checkpoint(str(coded), keep_coded=True)
    assert opened.coded is not None
    made = CodedStore.take(find_layers(open_checkpoint(str(toy)).model), CODING).ready
    for ready, fresh in zip(opened.coded.layers, made.layers, strict=True):
        assert torch.equal(ready.memory, fresh.memory)
        for part in ("name", "parts", "begins", "places", "checksums"):
            assert getattr(ready, part) == getattr(fresh, part)
        for one, other in zip(ready.bases, fresh.bases, strict=True):
            for name, base in one.items():
                same = other[name]
                assert base is not None and same is not None
                assert torch.equal(base.codes, same.codes) and base.table == same.table
                assert torch.equal(base.scales, same.scales) and base.code == same.code


@pytest.mark.parametrize("depth", [0, 4])
def test_it_runs_without_encoding(
    toy: Path, coded: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_text(open_checkpoint(str(toy)), TOKENS)
    monkeypatch.delattr(coded_store, "encode")
    with session(coded, policy__depth=depth) as running:
        assert text_of(running, TOKENS) == expected
        assert isinstance(running.prepared.store, CodedStore)
        assert running.prepared.config.experts.form == "coded-base"
        assert running.prepared.config.experts.group_size == 32
        running.prepared.store.verify()


def test_only_coded_bytes_are_read_and_kept(tmp_path: Path) -> None:
    encode_folder("tiny-moe", tmp_path / "coded", Coding("base3", 64))
    whole = open_checkpoint("tiny-moe")
    kept = open_checkpoint(str(tmp_path / "coded"), keep_coded=True)
    assert whole.loading is not None and kept.loading is not None and kept.coded is not None
    experts = 37_748_736
    assert kept.loading.read_bytes < whole.loading.read_bytes - 0.24 * experts
    assert sum(len(layer.memory) for layer in kept.coded.layers) <= 0.57 * experts
    in_model = sum(p.nbytes for p in kept.model.parameters() if p.device.type == "cpu")
    assert in_model == sum(p.nbytes for p in whole.model.parameters()) - experts
    layers, others = install(kept.model), install(whole.model)
    assert survey(kept.model, layers) == survey(whole.model, others)


def test_without_keeping_it_is_the_original_model(toy: Path, coded: Path) -> None:
    plain = open_checkpoint(str(toy)).model.state_dict()
    again = open_checkpoint(str(coded)).model.state_dict()
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def changed_copy(coded: Path, folder: Path, change: Callable[[bytearray], None]) -> Path:
    shutil.copytree(coded, folder)
    data = bytearray((folder / CODED_FILE).read_bytes())
    change(data)
    (folder / CODED_FILE).write_bytes(data)
    return folder


def assert_unusable(folder: Path, message: str = "cannot be used") -> None:
    """One error however it is opened, and no folder left half done."""
    for keep_coded in (True, False):
        with pytest.raises(UsageError, match=message):
            open_checkpoint(str(folder), keep_coded=keep_coded)
    with pytest.raises(UsageError, match=message):
        decode_folder(folder, folder.parent / "restored")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "coded.checksums",
        "coded.1.refinements",
        "coded.1.sizes",
        "coded.1.checksums",
        "coded.1.down_proj.codes",
        "coded.1.gate_up_proj.scales",
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_changed_byte_anywhere_is_found(
    name: str, place: float, coded: Path, tmp_path: Path
) -> None:
    tensor = next(each for each in read_header(coded / CODED_FILE) if each.name == name)

    def change(data: bytearray) -> None:
        data[tensor.begin + int(place * (tensor.nbytes - 1))] ^= 4

    assert_unusable(changed_copy(coded, tmp_path / "changed", change))


def test_a_file_that_is_cut_short_is_refused(coded: Path, tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        del data[-7:]

    assert_unusable(changed_copy(coded, tmp_path / "changed", change), "no whole safetensors file")


def rewritten(coded: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose header says something else."""
    shutil.copytree(coded, folder)
    path = folder / CODED_FILE
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()[METADATA_KEY])
    text = json.dumps(told | {key: change(told) for key, change in changes.items()})
    save_file(load_file(path), path, metadata={METADATA_KEY: text})
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": lambda told: 2}, "format version 2, this specter reads 1"),
        ({"dtype": lambda told: "float32"}, "no file of coded experts"),
        ({"base": lambda told: "base5"}, "no file of coded experts"),
        ({"base": lambda told: "base3"}, "cannot be used"),
        ({"group_size": lambda told: 64}, "cannot be used"),
        ({"layers": lambda told: told["layers"][:1]}, "no file of coded experts"),
        ({"origins": lambda told: [[*told["origins"][0][:4], 7000, 1, False]]}, "no file of coded"),
        ({"origins": lambda told: [["x", 0, 0, "nothing", 0, 1, False]]}, "no file of coded"),
    ],
)
def test_a_header_that_is_not_true_is_refused(
    changes: dict[str, Any], message: str, coded: Path, tmp_path: Path
) -> None:
    assert_unusable(rewritten(coded, tmp_path / "changed", **changes), message)


def test_a_foreign_file_is_refused(toy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy, tmp_path / "toy"))
    (folder / "model.safetensors").rename(folder / CODED_FILE)
    assert_unusable(folder, "no file of coded experts")


def test_the_experts_of_another_model_are_refused(coded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(coded, tmp_path / "toy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 48}))
    with pytest.raises(UsageError, match="of another model"):
        open_checkpoint(str(folder), keep_coded=True)


def test_a_header_cannot_write_outside_of_its_folder(coded: Path, tmp_path: Path) -> None:
    def elsewhere(told: dict[str, Any]) -> dict[str, str]:
        return {"../../stolen.safetensors": told["files"]["model.safetensors"]}

    folder = rewritten(coded, tmp_path / "changed", files=elsewhere)
    with pytest.raises(UsageError, match="names a file"):
        decode_folder(folder, tmp_path / "restored")
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]


def test_a_failure_leaves_nothing_behind(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coded_folder, "write_weights", fail)
    with pytest.raises(UsageError, match="No space left"):
        encode_folder(str(toy), tmp_path / "coded", CODING)
    assert not list(tmp_path.iterdir())


def test_a_layout_that_could_not_be_restored_is_not_encoded(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an architecture's would that scales or mixes its weights when it is loaded."""
    opened = open_checkpoint(str(toy))
    find_layers(opened.model)[1].experts.get_parameter("down_proj").data[3, 0, 0] += 1
    monkeypatch.setattr(coded_folder, "open_checkpoint", lambda *given: opened)
    with pytest.raises(SpecterError, match=r"layers\.1\..*experts\.3\.down_proj.* in one piece"):
        encode_folder(str(toy), tmp_path / "coded", CODING)
    assert not list(tmp_path.iterdir())


def test_converted_experts_run_and_are_not_called_the_original(
    tmp_path: Path, capsys: Capture
) -> None:
    original, out = write_toy("qwen3-moe", tmp_path / "toy", torch.float32), tmp_path / "coded"
    told = run(capsys, "encode", original, "-o", out)
    assert told.code == 2 and "--dtype" in told.err and not out.exists()
    assert run(capsys, "encode", original, "-o", out, "--dtype", "bfloat16").code == 0
    with session(out, policy__depth=3) as running:
        text = text_of(running, TOKENS)
    assert text == plain_text(open_checkpoint(str(original), "bfloat16"), TOKENS)
    told = run(capsys, "decode", out, "-o", tmp_path / "restored")
    assert told.code == 2 and "converted from float32 to bfloat16" in told.err
    with pytest.raises(UsageError, match="coded as bfloat16"):
        open_checkpoint(str(out), "float32")


def test_from_the_command_line(toy: Path, tmp_path: Path, capsys: Capture) -> None:
    out, restored = tmp_path / "coded", tmp_path / "restored"
    told = run(capsys, "encode", toy, "-o", out, "--bits", 3, "--group-size", 32)
    assert told.code == 0 and "base3 in groups of 32" in told.out
    assert "is there already" in run(capsys, "encode", toy, "-o", out).err
    assert run(capsys, "encode", out, "-o", tmp_path / "twice").code == 2
    assert run(capsys, "decode", out, "-o", restored).code == 0
    assert contents(restored) == contents(toy)
    assert run(capsys, "decode", toy, "-o", tmp_path / "x").code == 2
    prompt = tmp_path / "ids.jsonl"
    prompt.write_text(json.dumps({"tokens": [3, 4, 5]}))
    asked = ("--prompt-file", prompt, "--new-tokens", 6, "--device", "immediate", "--slots", 4)
    texts = [run(capsys, "generate", each, *asked, "--depth", 2).out for each in (toy, out)]
    assert texts[0] and texts[0] == texts[1]
    facts = run(capsys, "info", out, "--json").document()
    assert facts["draft_bytes"] > 0 and facts["host_bytes"] < 0.7 * 2 * 3 * 8 * 3 * 32 * 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft-bits", 2), "with a base of 4 bits"),
        (("--set", "experts.form=coded-base", "--draft-bits", 4), "asked for base4, groups of 64"),
    ],
)
def test_another_coding_is_refused(
    options: tuple[Any, ...], message: str, coded: Path, capsys: Capture
) -> None:
    told = run(capsys, "info", coded, *options)
    assert told.code == 2 and message in told.err
