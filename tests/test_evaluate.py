"""What a sweep computes for one configuration, and what its identity covers beside it."""

from pathlib import Path
from typing import Any

import pytest
from toy_traces import toy_trace

from specter_sim.config import RunConfig, build, resolved
from specter_sim.sweep import evaluate
from specter_sim.sweep.evaluate import inputs_of
from specter_sim.sweep.twin import drafts, twin_of
from specter_traces import save


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(8, 48, 6, (40,)), path)
    return path


def config(trace: Path, **tables: Any) -> RunConfig:
    return build({"trace": {"path": str(trace), "tokens": 16}, "memory": {"slots": 12}, **tables})


def test_a_row_says_where_it_ran(toy: Path) -> None:
    row = evaluate.evaluate(resolved(config(toy, machine={"link_bandwidth": "80 MB/s"})))
    assert row["tpot_s"] > 0
    assert row["link_bytes_per_s"] == 80e6
    assert row["trace_name"] == "toy"
    assert row["gpu_memory_bytes"] > 0


def test_a_name_out_of_a_file_is_printable_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save(toy_trace(8, 48, 6, (40,)).with_header(name="a\x1b[31m", synthetic=True), path)
    assert evaluate.evaluate(resolved(config(path)))["trace_name"] == "a\\x1b[31m"


def test_equal_configurations_give_equal_rows(toy: Path) -> None:
    table = resolved(config(toy, policy={"depth": 2, "prefetch": "continuous"}))
    assert evaluate.evaluate(table) == evaluate.evaluate(table)


def test_the_identity_follows_the_routes_in_the_file(toy: Path) -> None:
    before = inputs_of(config(toy))
    save(toy_trace(8, 48, 6, (40,), seed=1), toy)
    assert inputs_of(config(toy)) != before


def test_the_identity_follows_the_columns_whatever_the_header_claims(toy: Path) -> None:
    before = inputs_of(config(toy))
    data = bytearray(toy.read_bytes())
    data[-1] ^= 1
    toy.write_bytes(data)
    assert inputs_of(config(toy)) != before


def test_the_identity_follows_the_file_a_machine_starts_from(toy: Path, tmp_path: Path) -> None:
    base, mine = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text('base = "rtx-4090"\n[link]\nlatency_s = "5 us"\n')
    mine.write_text(f'base = "{base}"\nname = "mine"\n')
    before = inputs_of(config(toy, machine={"name": str(mine)}))
    base.write_text('base = "rtx-4090"\n[link]\nlatency_s = "9 us"\n')
    assert inputs_of(config(toy, machine={"name": str(mine)})) != before


def test_the_identity_follows_the_machine_file(toy: Path, tmp_path: Path) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text('base = "rtx-4090"\nname = "mine"\n')
    before = inputs_of(config(toy, machine={"name": str(machine)}))
    machine.write_text('base = "rtx-3090"\nname = "mine"\n')
    assert inputs_of(config(toy, machine={"name": str(machine)})) != before


def test_synthetic_routes_are_told_by_their_source() -> None:
    synthetic = build({"trace": {"path": "synth"}, "model": "olmoe-1b-7b"})
    assert inputs_of(synthetic) == inputs_of(build({"model": "olmoe-1b-7b"}))


def test_the_twin_of_a_drafting_system_keeps_memory_and_form(toy: Path) -> None:
    specter = config(toy, preset="specter")
    twin = twin_of(specter, 10**8)
    assert drafts(specter) and not drafts(twin)
    assert twin.memory.budget == 10**8 and twin.memory.slots is None
    assert (twin.experts.form, twin.policy.prefetch) == ("coded", "none")
    assert (twin.model, twin.trace, twin.machine) == (
        specter.model,
        specter.trace,
        specter.machine,
    )


def test_the_twin_of_plain_decoding_drafts(toy: Path) -> None:
    plain = config(toy, experts={"form": "coded", "draft_bits": "none"})
    twin = twin_of(plain, 10**8)
    assert (twin.policy.depth, twin.policy.prefetch) == ("governor", "continuous")
    assert (twin.experts.form, twin.experts.draft_bits) == ("coded-base", 4)
    assert twin_of(config(toy), 10**8).experts.form == "plain"


def test_a_prefetch_that_follows_no_draft_is_kept(toy: Path) -> None:
    gated = config(toy, policy={"prefetch": "popularity", "depth": 2})
    assert twin_of(gated, 10**8).policy.prefetch == "popularity"
