"""Broken checkpoints: one clear error, or the file's own bytes; never a crash, code run, or text.

Mutations of a tiny folder: bits, lengths, offsets, number types, shapes and JSON that contradict
each other. Whatever opens must hold exactly what the safetensors library reads from the same file.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from toy_checkpoints import Toy, write

from specter_runtime.checkpoint import open_checkpoint
from specter_traces import SpecterError

TINY = Toy(
    "mixtral",
    2,
    2,
    1,
    settings={
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    },
)
WEIGHTS = "model.safetensors"
fuzz = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(TINY, tmp_path_factory.mktemp("tiny") / "toy")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "toy")


def outcome(folder: Path) -> str:
    """The error that opening ends in, one line; "" when it opened, with the file's own bytes."""
    try:
        model = open_checkpoint(str(folder)).model
    except SpecterError as error:
        assert str(error) and len(str(error).splitlines()) == 1, str(error)
        return str(error)
    require_same_bytes(folder, dict(model.named_parameters()))
    return ""


def require_same_bytes(folder: Path, loaded: dict[str, torch.nn.Parameter]) -> None:
    """Every tensor of the file is in the model, bit by bit; the library reads the file here."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no dict
            expected = file.get_tensor(key)
            name, expert = key.replace("block_sparse_moe", "mlp"), None
            if ".experts." in key:
                stem, _, rest = name.partition(".experts.")
                number, matrix, _ = rest.split(".")
                part = "down_proj" if matrix == "w2" else "gate_up_proj"
                name, expert = f"{stem}.experts.{part}", int(number)
            found = loaded[name].detach()
            if expert is not None:
                half = 8 if key.endswith("w3.weight") else 0
                found = found[expert]
                found = found if part == "down_proj" else found[half : half + 8]
            assert torch.equal(found, expected.to(found.dtype)), key


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, rest: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def test_the_tiny_checkpoint_opens(folder: Path) -> None:
    assert outcome(folder) == ""


@fuzz
@given(st.data())
def test_flipped_bits(pristine: Path, folder: Path, data: st.DataObject) -> None:
    raw = bytearray((pristine / WEIGHTS).read_bytes())
    header_bits = 8 * (8 + int.from_bytes(raw[:8], "little"))
    places = st.one_of(st.integers(0, header_bits - 1), st.integers(0, 8 * len(raw) - 1))
    for bit in data.draw(st.lists(places, min_size=1, max_size=3)):
        raw[bit // 8] ^= 1 << bit % 8
    (folder / WEIGHTS).write_bytes(raw)
    outcome(folder)


@fuzz
@given(length=st.integers(0, 20_000))
def test_other_lengths(pristine: Path, folder: Path, length: int) -> None:
    raw = (pristine / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:length].ljust(length, b"\0"))
    assert outcome(folder) != "" or length == len(raw)


@fuzz
@given(length=st.one_of(st.integers(0, 4000), st.integers(0, 2**64 - 1)))
def test_other_header_lengths(pristine: Path, folder: Path, length: int) -> None:
    raw = (pristine / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + raw[8:])
    assert outcome(folder) != "" or raw[:8] == length.to_bytes(8, "little")


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]),
)
VALUES = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    st.floats(),
    st.sampled_from(["", "F32", "BF16", "F16", "I32", "F8_E4M3", "F8_E8M0", "U64", "F4", "nope"]),
    st.lists(NUMBERS, max_size=4),
    st.dictionaries(st.sampled_from(["a", "dtype"]), NUMBERS, max_size=2),
)


@fuzz
@given(st.data())
def test_contradictory_headers(pristine: Path, folder: Path, data: st.DataObject) -> None:
    header, rest = header_of((pristine / WEIGHTS).read_bytes())
    names = sorted(header)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(names))
        entry = header.get(name)
        kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "all", "gone", "name"]))
        if kind == "gone" or not isinstance(entry, dict):
            header.pop(name, None)
        elif kind == "all":
            header[name] = data.draw(VALUES)
        elif kind == "name":
            header[data.draw(st.sampled_from([*names, "", "x", "a.experts.9.b", "\\0"]))] = entry
        else:
            entry[kind] = data.draw(VALUES)
    (folder / WEIGHTS).write_bytes(joined(header, rest))
    outcome(folder)


@fuzz
@given(st.data())
def test_contradictory_configs(pristine: Path, folder: Path, data: st.DataObject) -> None:
    config = json.loads((pristine / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    outcome(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "null", "[]", "3", "{", "[" * 100_000, '{"a": 1e999}', "\0"])
def test_broken_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    found = outcome(folder)
    assert name in found or text == '{"a": 1e999}'


@pytest.mark.parametrize("eos", ["x", [], [1, "2"], {}, 1.5, True])
def test_end_tokens_that_are_no_tokens(folder: Path, eos: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert "token ids are expected" in outcome(folder)


TOKENIZERS: list[str] = [
    "",
    "{}",
    "[" * 100_000,
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
    '{"version": "9.0", "model": null}',
]


@pytest.mark.parametrize("text", TOKENIZERS)
def test_broken_tokenizers(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert "cannot load the tokenizer" in outcome(folder)


def test_names_of_twice_the_same_tensor(folder: Path) -> None:
    header, rest = header_of((folder / WEIGHTS).read_bytes())
    text = json.dumps(header)
    entry = json.dumps(header["lm_head.weight"])
    twice = text.replace("{", f'{{"lm_head.weight": {entry}, ', 1).encode()
    (folder / WEIGHTS).write_bytes(joined(twice, rest))
    assert "'lm_head.weight' is listed twice" in outcome(folder)


class Trap:
    """A pickle that writes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("beside", [True, False])
def test_a_pickle_is_not_opened(folder: Path, beside: bool) -> None:
    marker = folder / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Trap(marker)}))
    if not beside:
        (folder / WEIGHTS).unlink()
    assert bool(outcome(folder)) is not beside
    assert not marker.exists()


@pytest.mark.parametrize("model_type", ["mixtral", "own"])
def test_code_is_not_run(folder: Path, model_type: str) -> None:
    marker = folder / "ran"
    code = f"open({str(marker)!r}, 'w')\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    automatic = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "model_type": model_type, "auto_map": automatic}
    path.write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    outcome(folder)
    (folder / "tokenizer.json").write_text("{}")
    outcome(folder)
    assert not marker.exists()


SURVIVE = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from specter_runtime.checkpoint import open_checkpoint
from specter_traces import SpecterError
for folder in sorted(Path({place!r}).iterdir()):
    try:
        open_checkpoint(str(folder))
        print(folder.name, "opened")
    except SpecterError as error:
        print(folder.name, *str(error).splitlines())
"""


def test_no_mutation_ends_the_process(pristine: Path, tmp_path: Path) -> None:
    raw = (pristine / WEIGHTS).read_bytes()
    header, rest = header_of(raw)
    dice = random.Random(4)
    for number in range(40):
        place = shutil.copytree(pristine, tmp_path / f"{number:02}")
        if number % 4 == 0:
            data = bytearray(raw)
            for _ in range(20):
                data[dice.randrange(len(data))] = dice.randrange(256)
        elif number % 4 == 1:
            data = bytearray(raw[: dice.randrange(len(raw))])
        elif number % 4 == 2:
            name = dice.choice(sorted(set(header) - {"__metadata__"}))
            key = dice.choice(["dtype", "shape", "data_offsets"])
            value = dice.choice([[2**62, 4], [0, 2**63 - 1], "F64", [-1, 4], [1] * 1000])
            data = bytearray(joined({**header, name: {**header[name], key: value}}, rest))
        else:
            data = bytearray(raw)
            data[: dice.randrange(1, 9)] = dice.randbytes(dice.randrange(1, 9))
        (place / WEIGHTS).write_bytes(data)
    script = SURVIVE.format(path=sys.path, place=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert [line[:2] for line in lines] == [f"{number:02}" for number in range(40)]
    assert sum(line.endswith("opened") for line in lines) < 10
