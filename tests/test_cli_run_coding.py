"""`specter-run coding`: the bits it tells are those that the codec writes, the limit is entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from specter_run import run
from toy_checkpoints import TOYS, make

from specter_runtime.codec import Coding, encode
from specter_runtime.codec.coding import FORMATS
from specter_runtime.codec.reference import bin_starts, patterns
from specter_runtime.codec.stream import read_header
from specter_runtime.coding_report import coding_report
from specter_runtime.stored_experts import ExpertTensor
from specter_runtime.weight_files import open_weights

Capture = pytest.CaptureFixture[str]
CODING = Coding("base4", 32)


def write_toy(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    make(TOYS[name]).to(dtype).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def write_fused(folder: Path) -> Path:
    """qwen3-moe as some checkpoints are stored: all experts of a layer in one tensor."""
    model = make(TOYS["qwen3-moe"]).to(torch.bfloat16)  # type: ignore[arg-type]
    model.config.save_pretrained(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["lm_head.weight"]  # tied
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expert_rows(folder: Path) -> list[torch.Tensor]:
    """Every expert's matrices as rows of inputs, from the file itself."""
    rows = []
    for name, value in load_file(folder / "model.safetensors").items():
        if ".experts." not in name or name.endswith("bias"):
            continue
        experts = value if value.ndim == 3 else value[None]
        transposed = "gpt" in folder.name
        rows += [matrix.T.contiguous() if transposed else matrix for matrix in experts]
    return rows


@pytest.mark.parametrize("layout", ["one by one", "fused", "gpt-oss"])
def test_the_bits_are_those_that_are_written(layout: str, tmp_path: Path) -> None:
    folder = {
        "one by one": lambda: write_toy("qwen3-moe", tmp_path / "toy"),
        "fused": lambda: write_fused(tmp_path / "toy"),
        "gpt-oss": lambda: write_toy("gpt-oss", tmp_path / "gpt"),
    }[layout]()
    report, rows = coding_report(str(folder), CODING), expert_rows(folder)
    coded = [encode(matrix, CODING) for matrix in rows]
    total = report.total
    assert total.weights == sum(matrix.numel() for matrix in rows)
    assert total.base_bytes == sum(each.base.nbytes for each in coded if each.base is not None)
    assert total.refinement_bytes == sum(len(each.refinement) for each in coded)
    assert report.stored_bytes == total.plain_bytes == 2 * total.weights
    assert report.stored_bytes + report.other_bytes == sum(
        tensor.nbytes for tensor in open_weights(folder).values()
    )
    assert {matrix.layer for matrix in report.matrices} == {0, 1, 2}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_limit_is_the_entropy_in_the_bins(bits: int, tmp_path: Path) -> None:
    """Bin by bin, of the very matrices, counted another way; and what the plane does not hold."""
    folder, coding = write_toy("qwen3-moe", tmp_path / "toy"), Coding(f"base{bits}", 32)  # type: ignore[arg-type]
    file = load_file(folder / "model.safetensors")
    found: dict[int, list[int]] = {}
    overflow = weights = 0
    for expert in range(8):
        rows = file[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        coded = encode(rows, coding)
        assert coded.base is not None
        header = read_header(coded.refinement)
        starts = bin_starts(coded.base.scales, bits, FORMATS[0])
        magnitudes = (patterns(rows) & 0x7FFF).reshape(rows.shape)
        for (row, column), magnitude in np.ndenumerate(magnitudes):
            edges = starts[row, column // 32]
            place = int(np.searchsorted(edges, magnitude, side="right")) - 1
            low, high = int(edges[place]), int(edges[place + 1]) - 1
            r = high - int(magnitude) if place == 0 else int(magnitude) - low
            found.setdefault(place, []).append(r)
            overflow += (high - low) >> header.low_bits > 0 and r >> header.low_bits > 0
            weights += 1
    entropy = 0.0
    for of_bin in found.values():
        counts = np.unique(of_bin, return_counts=True)[1]
        entropy -= float((counts * np.log2(counts / counts.sum())).sum())
    report = coding_report(str(folder), coding)
    line = next(m for m in report.matrices if (m.layer, m.matrix) == (1, "up_proj"))
    assert line.limit_bits == pytest.approx(entropy / weights)
    assert line.overflow == pytest.approx(overflow / weights)
    assert line.above_limit_bits == pytest.approx(line.refinement_bits - entropy / weights)


def test_one_expert_of_a_fused_layer_is_read_at_a_time(tmp_path: Path) -> None:
    stored = open_weights(write_fused(tmp_path))
    name = "model.layers.2.mlp.experts.down_proj"
    whole = stored[name].read()
    tensor = ExpertTensor(stored[name], 2, None, "down_proj")
    for expert in tensor.experts():
        one = tensor.read(expert)
        assert torch.equal(one, whole[expert])
        assert one.untyped_storage().nbytes() == whole[0].nbytes


def test_what_coding_saves_on_the_bundled_model(capsys: Capture) -> None:
    told = run(capsys, "coding", "tiny-moe", "--bits", 3, "--json").document()
    total = told["total"]
    assert total["plain_bytes"] == told["stored_bytes"] == 37_748_736
    assert total["base_bits"] == 3 + 16 / 64
    assert total["refinement_bytes"] <= 0.57 * total["plain_bytes"]
    assert 7.4 < total["limit_bits"] < total["refinement_bits"]
    assert 0 < total["escapes"] < total["overflow"] < 0.5
    left = 0.5 * total["plain_bytes"] - total["base_bytes"]
    assert told["resident_share_coded"] == pytest.approx(left / total["refinement_bytes"])
    assert told["resident_share_drafted"] == pytest.approx(left / total["plain_bytes"])
    assert len(told["matrices"]) == 3 * 8


@pytest.mark.parametrize("options", [(), ("--layers",)])
def test_the_table_fits_a_terminal(
    options: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    folder = write_toy("deepseek-v2", tmp_path / "toy")
    told = run(capsys, "coding", folder, "--group-size", 32, *options)
    assert told.code == 0
    lines = told.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line for line in lines if line.endswith(" %")]
    assert len(rows) == (7 if options else 4)
    for word in ("model", "link", "slots", "host", "disk"):
        assert f"\n{word} " in told.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--dtype"),
        (("--dtype", "float32"), "--dtype"),
        (("--bits", 5), "--bits must be 2, 3 or 4"),
        (("--group-size", 7), "group size must be 32 to 128"),
    ],
)
def test_what_cannot_be_coded_is_refused(
    options: tuple[Any, ...], message: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = write_toy("qwen3-moe", tmp_path / "toy", torch.float32)
    told = run(capsys, "coding", folder, *options)
    assert told.code == 2 and message in told.err
    assert run(capsys, "coding", folder, "--dtype", "bfloat16").code == 0


def test_packed_experts_are_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = write_toy("gpt-oss", tmp_path / "toy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    told = run(capsys, "coding", folder)
    assert told.code == 2 and "more bytes than they do now" in told.err
