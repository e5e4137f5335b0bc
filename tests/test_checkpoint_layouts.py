"""Every layout of weight files ends as the same bytes in the expert store, or in one error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_checkpoints import TOYS, write

from specter_runtime import checkpoint
from specter_runtime.checkpoint import Checkpoint, LoadTime, open_checkpoint
from specter_runtime.disk_rate import disk_bytes_per_s
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_runtime.weight_files import INDEX
from specter_traces import SpecterError, UsageError

SINGLE = "model.safetensors"
Weights = dict[str, Tensor]
Experts = dict[tuple[int, int], Weights]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(TOYS["mixtral"], tmp_path / "toy")


def read(folder: Path) -> Weights:
    return load_file(folder / SINGLE)


def put(weights: Weights, path: Path) -> None:
    data = {name: value.clone() for name, value in weights.items()}
    save_file(data, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def mixtral_experts(weights: Weights) -> Experts:
    """What each expert of the toy is, from the checkpoint's own tensors: gate over up, and down."""
    experts: Experts = {}
    for layer in range(3):
        for expert in range(8):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            up = torch.cat([weights[f"{prefix}.w1.weight"], weights[f"{prefix}.w3.weight"]])
            experts[layer, expert] = {
                "gate_up_proj": up,
                "down_proj": weights[f"{prefix}.w2.weight"],
            }
    return experts


def fuse(weights: Weights) -> Weights:
    """The same checkpoint with one tensor a layer for all experts."""
    experts = mixtral_experts(weights)
    fused = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(3):
        for part in ("gate_up_proj", "down_proj"):
            stack = [experts[layer, expert][part] for expert in range(8)]
            fused[f"model.layers.{layer}.mlp.experts.{part}"] = torch.stack(stack)
    return fused


def split(folder: Path, index: bool = True, count: int = 3) -> list[Path]:
    """Spread the single file over `count` shards."""
    weights = read(folder)
    (folder / SINGLE).unlink()
    names = sorted(weights)
    files = [folder / f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(files):
        put({name: weights[name] for name in names[number::count]}, file)
    if index:
        mapped = {name: files[number % count].name for number, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return files


def check(folder: Path, expected: Experts, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Open, take the experts, and compare each one's bytes."""
    opened = open_checkpoint(str(folder))
    store = ExpertStore.take(install(opened.model))
    assert [(la, e) for la in range(store.layers) for e in range(store.experts[la])] == [*expected]
    for place, parts in expected.items():
        found = store.weights(*place)
        assert found.keys() == parts.keys()
        for name, weight in parts.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], weight.to(dtype)), (place, name)
    store.verify()
    return opened


def test_one_tensor_a_matrix(folder: Path) -> None:
    check(folder, mixtral_experts(read(folder)))


def test_a_single_file_of_fused_experts(folder: Path) -> None:
    weights = read(folder)
    put(fuse(weights), folder / SINGLE)
    check(folder, mixtral_experts(weights))


def test_a_single_file_of_another_name(folder: Path) -> None:
    expected = mixtral_experts(read(folder))
    (folder / SINGLE).rename(folder / "weights.safetensors")
    check(folder, expected)


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_an_index(folder: Path, index: bool) -> None:
    expected = mixtral_experts(read(folder))
    split(folder, index)
    check(folder, expected)


def test_an_index_leaves_other_files_alone(folder: Path) -> None:
    expected = mixtral_experts(read(folder))
    split(folder)
    (folder / "consolidated.safetensors").write_bytes(b"another copy, in another layout")
    check(folder, expected)


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_is_missing_is_named(folder: Path, index: bool) -> None:
    split(folder, index)[1].unlink()
    with pytest.raises(UsageError, match=r"lacks 1 of 3 weight files, first model-00002-of-00003"):
        open_checkpoint(str(folder))


def test_shards_of_two_sets_without_an_index_are_refused(folder: Path) -> None:
    split(folder, index=False)[2].rename(folder / "model-00003-of-00004.safetensors")
    with pytest.raises(UsageError, match="shards of 2 sets"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_shard_that_is_truncated_is_named(folder: Path, kept: int) -> None:
    shard = split(folder)[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"00002-of-00003\.safetensors is no whole safetensors"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [31]}, r"'model\.norm\.weight' needs 124 bytes and has 128"),
        ({"dtype": "F64"}, "needs 256 bytes and has 128"),
        ({"dtype": "U64"}, "has number type 'U64'"),
        ({"shape": [-32, -1]}, r"has shape \[-32, -1\]"),
        ({"shape": [32.0]}, r"has shape \[32\.0\]"),
        ({"shape": 32}, "has shape 32"),
        ({"data_offsets": [0, 128]}, "does not start where its neighbour ends"),
        ({"data_offsets": [128]}, r"at \[128\]"),
        ({"data_offsets": None}, "at None"),
    ],
)
def test_a_header_that_contradicts_itself_is_explained(
    folder: Path, entry: dict[str, Any], message: str
) -> None:
    raw = (folder / SINGLE).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["model.norm.weight"] |= entry
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    with pytest.raises(UsageError, match=rf"no whole safetensors file \(.*{message}"):
        open_checkpoint(str(folder))


def test_a_file_with_more_than_its_header_says_is_refused(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(UsageError, match=r"should be \d+ bytes long and is \d+"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_shards_is_refused(folder: Path, index: bool) -> None:
    files = split(folder, index)
    twice = load_file(files[2])
    name = next(iter(load_file(files[0])))
    put({**twice, name: torch.zeros(3)}, files[2])
    with pytest.raises(UsageError, match=rf"holds {name} twice, in model-00001.* in model-00003"):
        open_checkpoint(str(folder))


def test_a_tensor_listed_twice_in_the_index_is_refused(folder: Path) -> None:
    split(folder)
    text = (folder / INDEX).read_text()
    entry = '"model.norm.weight": "model-00001-of-00003.safetensors", '
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{{entry}'))
    with pytest.raises(UsageError, match=r"'model\.norm\.weight' is listed twice"):
        open_checkpoint(str(folder))


def test_a_tensor_that_only_the_index_knows_is_named(folder: Path) -> None:
    split(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00002-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"lists model\.extra\.weight, which no weight file holds"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (["7.w3"], r"has no .*layers\.1\.block_sparse_moe\.experts\.7\.w3\.weight, one of 8"),
        (["3.w1", "3.w2", "3.w3"], r"has no .*layers\.1\.block_sparse_moe\.experts\.3\.w1"),
        (
            ["7.w1", "7.w2", "7.w3"],
            r"another shape .*layers\.1\.mlp\.experts\.down_proj and 1 more",
        ),
        (
            [f"{e}.w2" for e in range(8)],
            r"no weights for model\.layers\.1\.mlp\.experts\.down_proj",
        ),
    ],
)
def test_an_expert_that_is_missing_is_named(folder: Path, lost: list[str], message: str) -> None:
    weights = read(folder)
    for name in lost:
        del weights[f"model.layers.1.block_sparse_moe.experts.{name}.weight"]
    put(weights, folder / SINGLE)
    with pytest.raises(SpecterError, match=message):
        open_checkpoint(str(folder))


def test_an_expert_left_in_another_number_type_is_cast_and_said(folder: Path) -> None:
    weights = {name: value.bfloat16() for name, value in read(folder).items()}
    odd = "model.layers.1.block_sparse_moe.experts.6.w2.weight"
    weights[odd] = torch.randn(weights[odd].shape)
    put(weights, folder / SINGLE)
    edit_config(folder, dtype="bfloat16")
    opened = check(folder, mixtral_experts(weights), torch.bfloat16)
    assert opened.precision == "bfloat16 and float32 weights, bfloat16 arithmetic"


def test_layers_with_different_numbers_of_experts_stay_apart(tmp_path: Path) -> None:
    """A dense first layer, then routed ones with a shared expert that is not routed."""
    folder = write(TOYS["deepseek-v2"], tmp_path)
    weights = read(folder)
    prefix = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    expected = {
        (layer - 1, expert): {
            "gate_up_proj": torch.cat(
                [weights[prefix.format(layer, expert, part)] for part in ("gate", "up")]
            ),
            "down_proj": weights[prefix.format(layer, expert, "down")],
        }
        for layer in (1, 2)
        for expert in range(8)
    }
    model: Any = check(folder, expected).model
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert torch.equal(model.get_parameter(shared), weights[shared])


def test_fused_experts_with_biases_keep_both(tmp_path: Path) -> None:
    folder = write(TOYS["gpt-oss"], tmp_path)
    weights = read(folder)
    prefix = "model.layers.{}.mlp.experts.{}"
    expected = {
        (layer, expert): {
            part: weights[prefix.format(layer, part)][expert]
            for part in ("gate_up_proj", "down_proj")
        }
        for layer in range(3)
        for expert in range(8)
    }
    model = check(folder, expected).model
    for part in ("gate_up_proj_bias", "down_proj_bias"):
        name = prefix.format(2, part)
        assert torch.equal(model.get_parameter(name), weights[name])


def test_everything_else_is_the_checkpoints_too(folder: Path) -> None:
    weights = read(folder)
    found = dict(open_checkpoint(str(folder)).model.named_parameters())
    for name, value in weights.items():
        if ".experts." not in name:
            assert torch.equal(found[name.replace("block_sparse_moe", "mlp")], value), name


@pytest.mark.parametrize("layers", [2, 0, -1])
def test_a_layer_that_the_config_leaves_out_is_noticed(folder: Path, layers: int) -> None:
    edit_config(folder, num_hidden_layers=layers)
    with pytest.raises(SpecterError, match=r"that config\.json leaves out|num_hidden_layers = "):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 80}, "weights of another shape than config.json says for lm_head"),
        ({"num_local_experts": 4}, r"another shape .*experts\.down_proj and 8 more"),
        ({"num_hidden_layers": 4}, r"has no weights for model\.layers\.3\."),
        ({"vocab_size": 10**9}, r"describes 6\.4e\+10 weights, the files hold"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000, more than"),
        ({"num_local_experts": 10**9}, "num_local_experts = 1000000000, more than"),
        ({"num_experts_per_tok": 9}, "cannot read a token"),
    ],
)
def test_a_config_of_another_model_is_refused_before_it_takes_memory(
    folder: Path, changes: dict[str, int], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(SpecterError, match=message):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_named(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in read(folder).items()}
    weights["model.layers.2.block_sparse_moe.experts.5.w3.weight"][7, 11] = value
    put(weights, folder / SINGLE)
    edit_config(folder, dtype=str(dtype).removeprefix("torch."))
    with pytest.raises(
        SpecterError, match=r"NaN or infinity in model\.layers\.2\.mlp\.experts\.gate.*expert 5"
    ):
        open_checkpoint(str(folder))


def test_weights_too_large_to_compute_with_are_refused(folder: Path) -> None:
    weights = read(folder)
    weights["model.norm.weight"] *= 1e30
    weights["lm_head.weight"] *= 1e20
    put(weights, folder / SINGLE)
    with pytest.raises(SpecterError, match="computes NaN or infinity"):
        open_checkpoint(str(folder))
    with pytest.raises(SpecterError, match=r"NaN or infinity in model\.norm\.weight"):
        open_checkpoint(str(folder), "float16")


def test_a_head_that_a_tied_config_brings_along_is_used(tmp_path: Path) -> None:
    folder = write(TOYS["qwen3-moe"], tmp_path)
    head = torch.randn(96, 32)
    put({**read(folder), "lm_head.weight": head}, folder / SINGLE)
    assert torch.equal(open_checkpoint(str(folder)).model.get_parameter("lm_head.weight"), head)


def test_progress_counts_every_byte_once(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    loading = open_checkpoint(str(folder), progress=lambda *now: seen.append(now)).loading
    total = sum(value.nbytes for value in read(folder).values())
    assert loading is not None
    assert {whole for _, whole in seen} == {total} == {loading.read_bytes}
    done = [done for done, _ in seen]
    assert done == sorted(set(done)) and done[-1] == total
    assert len(seen) == len(read(folder))
    assert loading.disk_bytes_per_s is None  # too small to measure a disk with
    assert str(loading).startswith("loaded 508 kB in ")


def test_the_disks_rate_is_measured_on_the_file_and_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = disk_bytes_per_s(folder / SINGLE)
    assert rate is None or 1e5 < rate < 1e12
    text = str(LoadTime(43_000_000, 0.4, 1.2e9))
    assert text == "loaded 43.0 MB in 0.40 s (108 MB/s; disk read 1.20 GB/s)"
    monkeypatch.setattr(checkpoint, "SAMPLE_BYTES", 200_000)  # so that a toy counts as large
    loading = open_checkpoint(str(folder)).loading
    assert loading is not None and (loading.disk_bytes_per_s is None) is (rate is None)


def test_loading_leaves_the_process_as_it_was(folder: Path, monkeypatch: Any) -> None:
    threads = torch.get_num_threads() + 1
    torch.set_num_threads(threads)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    open_checkpoint(str(folder))
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads - 1)
