"""Machines: every number has a source, user files are checked, links and hosts do their sums."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim.hardware import Host, Link, find_machine, machines
from specter_sim.hardware.machines import FIELDS
from specter_traces.errors import UsageError

NAMES = [
    "t4",
    "rtx-3060",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "a100-40g",
    "h100",
    "h200",
    "emulated-cpu",
]
RAW_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}
LINK = find_machine("rtx-4090").link


def test_the_catalogue() -> None:
    assert sorted(machines()) == sorted(NAMES)
    assert all(name == machine.name for name, machine in machines().items())


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    sources = find_machine(name).sources
    assert set(sources) == set(FIELDS)
    assert all(len(text) > 10 and "placeholder" not in text for text in sources.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "emulated-cpu"])
def test_effective_rates_stay_below_the_raw_ones(name: str) -> None:
    machine = find_machine(name)
    assert 0.6 < machine.link.bytes_per_s / RAW_PCIE[machine.link.pcie_generation] < 0.9
    assert machine.gpu.read_bytes_per_s < machine.gpu.hbm_bytes_per_s
    assert machine.link.bytes_per_s < machine.host.memory_bytes_per_s


def test_published_numbers() -> None:
    found = {
        name: (machine.gpu.hbm_bytes_per_s / 1e9, machine.gpu.flops_per_s / 1e12)
        for name, machine in machines().items()
    }
    assert found["t4"] == (320, 65)
    assert found["rtx-3090"] == (936, 71)
    assert found["rtx-4090"] == (1008, 165.2)
    assert found["a100-40g"] == (1555, 312)
    assert found["h200"] == (4800, 989)


# --- link -----------------------------------------------------------------------------------------


def test_one_copy_is_latency_and_data() -> None:
    link = Link(4, 16, 24e9, 10e-6, 1, 1 << 30)
    assert link.copy_s(17_301_504) == pytest.approx(10e-6 + 17_301_504 / 24e9)
    assert link.copy_s(17_301_504, 12e9) == pytest.approx(10e-6 + 17_301_504 / 12e9)


def test_pieces_pay_latency_unless_the_queue_hides_it() -> None:
    alone = Link(4, 16, 1e9, 10e-6, 1, 1_000_000)
    assert alone.pieces(4_000_000) == 4 and alone.pieces(4_000_001) == 5
    assert alone.copy_s(4_000_000) == pytest.approx(4 * (10e-6 + 1e-3))
    deep = dataclasses.replace(alone, queue_depth=2)
    assert deep.copy_s(4_000_000) == pytest.approx(10e-6 + 4e-3)
    # Latency far above the data of a piece: only as much hides as the queue has copies under way.
    slow = dataclasses.replace(deep, latency_s=9e-3)
    assert slow.copy_s(4_000_000) == pytest.approx(10e-3 + 3 * 5e-3)


@given(
    size=st.integers(1, 10**9),
    more=st.integers(0, 10**9),
    depth=st.integers(1, 8),
    granularity=st.integers(10**6, 10**9),
)
def test_a_deeper_queue_or_smaller_load_is_never_slower(
    size: int, more: int, depth: int, granularity: int
) -> None:
    link = dataclasses.replace(LINK, queue_depth=depth, granularity_bytes=granularity)
    deeper = dataclasses.replace(link, queue_depth=depth + 1)
    assert deeper.copy_s(size) <= link.copy_s(size)
    assert link.copy_s(size) <= link.copy_s(size + more) * (1 + 1e-12)
    assert link.copy_s(size) >= link.latency_s + size / link.bytes_per_s * (1 - 1e-12)


# --- host -----------------------------------------------------------------------------------------


def test_what_can_be_pinned() -> None:
    assert Host(100, 1e9, None).pinned_share(80) == 1
    assert Host(100, 1e9, None).pinned_share(200) == 0.5
    assert Host(100, 1e9, 20).pinned_share(80) == 0.25
    assert Host(100, 1e9, 20).pinned_share(0) == 1


# --- overrides and files --------------------------------------------------------------------------


def test_overrides_carry_their_source() -> None:
    base = find_machine("rtx-4090")
    machine = base.with_(link_bytes_per_s="25 GB/s", gpu_memory_bytes="12 GiB", source="--set")
    assert machine.link.bytes_per_s == 25e9 and machine.gpu.memory_bytes == 12 << 30
    assert machine.sources["link.bytes_per_s"] == "--set"
    assert machine.sources["gpu.hbm_bytes_per_s"] == base.sources["gpu.hbm_bytes_per_s"]
    assert base.link.bytes_per_s == 24e9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"link_bandwidth": 1}, 'unknown machine field "link_bandwidth": '),
        ({"gpu_memory": "1 GiB"}, 'did you mean "gpu_memory_bytes"?'),
        ({"link_bytes_per_s": 0}, "machine field link.bytes_per_s: must be above 0, got 0"),
        ({"link_queue_depth": 0}, "whole number of at least 1, got 0"),
        ({"gpu_memory_efficiency": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"gpu_memory_bytes": "24 GX"}, 'unknown unit "GX"'),
        ({"gpu_flops_per_s": "fast"}, "must be a number, got 'fast'"),
    ],
)
def test_impossible_overrides(override: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        find_machine("rtx-4090").with_(**override)  # type: ignore[arg-type]


def test_a_file_that_starts_from_another_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "rtx-3090"\n[link]\nlanes = 8\nbytes_per_s = { value = "11.8 GB/s", '
        'source = "measured on my desk" }\n[host]\npinnable_bytes = "2 GB"\n'
    )
    machine = find_machine(str(file))
    assert machine.name == "mine" and "RTX 3090" in machine.title
    assert (machine.link.lanes, machine.link.bytes_per_s) == (8, 11.8e9)
    assert machine.host.pinnable_bytes == 2_000_000_000
    assert machine.sources["link.bytes_per_s"] == "measured on my desk"
    assert machine.sources["link.lanes"] == "stated in mine.toml"
    assert machine.gpu == find_machine("rtx-3090").gpu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "rtx-3090"\n[link]\nbandwidth = 3', 'unknown key "link.bandwidth": '),
        ('base = "rtx-3090"\n[link]\nlatency = 3', 'did you mean "link.latency_s"?'),
        ('base = "rtx-3090"\n[lnk]\nlanes = 3', 'unknown key "lnk": did you mean "link"?'),
        ('base = "rtx-3095"', 'unknown machine "rtx-3095": did you mean "rtx-3090"?'),
        ('base = "rtx-3090"\nlink = 3', "[link] must be a table, got 3"),
        ('base = "rtx-3090"\n[link]\nlanes = { valu = 3 }', 'did you mean "value"?'),
        ('base = "rtx-3090"\n[link]\nlanes = { source = "me" }', 'link.lanes has no "value"'),
        ("[link]\nlanes = 16", "missing gpu.name, gpu.memory_bytes, "),
        ("lanes = ", "is not TOML"),
    ],
)
def test_files_that_say_nothing_useful(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        find_machine(str(file))
    assert str(file) in str(caught.value)


def test_unknown_machines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='unknown machine "rtx-4900": did you mean "rtx-4090"'):
        find_machine("rtx-4900")
    with pytest.raises(UsageError, match="cannot read the machine file"):
        find_machine(str(tmp_path / "none.toml"))
    assert find_machine("RTX-4090").name == "rtx-4090"


def test_a_base_is_looked_for_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('base = "rtx-4090"\n[link]\nlanes = 3\n')
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n')
    assert find_machine(str(tmp_path / "mine.toml")).link.lanes == 3
    assert find_machine(str(tmp_path / "mine.toml")).name == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('base = "mine.toml"', "leads back to"),
        ('base = "other.toml"', "leads back to"),
        ('base = "absent.toml"', "cannot read the machine file"),
        ("a = " + "[" * 5000, "nested too deeply"),
        (f"a = {'9' * 5000}", "is not TOML"),
        (f'base = "rtx-4090"\n[gpu]\nflops_per_s = {"9" * 400}', "must be a number"),
        (f'base = "rtx-4090"\n[gpu]\nmemory_bytes = {"9" * 400}', "must be finite"),
        (f'base = "rtx-4090"\n[link]\nlanes = {"9" * 400}', "must be at most"),
        ('base = "rtx-4090"\n[link]\nlanes = true', "whole number"),
        ('base = "rtx-4090"\n[gpu]\nflops_per_s = nan', "must be a number"),
    ],
)
def test_impossible_files_are_one_short_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "other.toml").write_text('base = "mine.toml"')
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        find_machine(str(tmp_path / "mine.toml"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_long_row_of_bases_is_refused(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"m{number}.toml").write_text(f'base = "m{number + 1}.toml"')
    with pytest.raises(UsageError, match="more than 16 times"):
        find_machine(str(tmp_path / "m0.toml"))


def test_a_machine_is_a_regular_file() -> None:
    with pytest.raises(UsageError, match="cannot read"):
        find_machine("nul\0.toml")
