"""The catalogues on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specter_sim.cli.hardware import hardware_command, models_command
from specter_sim.hardware import find_machine, machines, models
from specter_sim.hardware.machines import FIELDS
from specter_traces.errors import UsageError

APP = typer.Typer()
APP.command("hardware")(hardware_command)
APP.command("models")(models_command)


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(
        APP, arguments, env={"COLUMNS": str(columns)}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_machines_are_listed_in_one_line_each() -> None:
    lines = run("hardware").splitlines()
    for name, machine in machines().items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert f"{machine.link.pcie_generation}.0 x{machine.link.lanes}" in line
    assert all(len(line) <= 80 for line in lines)


def test_a_machine_shows_the_source_of_every_number() -> None:
    shown = run("hardware", "rtx-4090", columns=400)
    for dotted in FIELDS:
        assert dotted in shown
        assert find_machine("rtx-4090").sources[dotted] in shown
    assert "24.0 GB/s" in shown and "165.2 TFLOPS" in shown and "24.0 GiB" in shown


def test_a_machine_file_is_shown_like_a_name(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text('base = "t4"\n[link]\nbytes_per_s = "6 GB/s"\n')
    assert "6.00 GB/s" in run("hardware", str(file))


def test_models_are_listed_in_one_line_each() -> None:
    lines = run("models").splitlines()
    for name, shape in models().items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert f"{shape.moe_layers} x {shape.num_experts}" in line
    assert all(len(line) <= 80 for line in lines)


def test_a_model_shows_its_sizes_and_forms() -> None:
    shown = run("models", "deepseek-v2-lite")
    for text in ("17,301,504 B", "published: 15.7 B", "26 / 27", "coded, 4-bit base", "4.25 MiB"):
        assert text in shown
    fp4 = run("models", "gpt-oss-20b")
    assert "gpt-oss-20b:bf16 treats them so" in fp4
    assert "coded, no draft            -" in fp4


def test_json_is_one_document() -> None:
    assert [entry["name"] for entry in json.loads(run("hardware", "--json"))] == list(machines())
    machine = json.loads(run("hardware", "h100", "--json"))
    assert machine["gpu"]["hbm_bytes_per_s"] == 3350e9
    assert set(machine["sources"]) == set(FIELDS)
    assert [entry["name"] for entry in json.loads(run("models", "--json"))] == list(models())
    assert json.loads(run("models", "tiny-moe", "--json"))["expert_bytes"] == 98_304


@pytest.mark.parametrize("command", ["hardware", "models"])
def test_an_unknown_name_is_a_usage_error(command: str) -> None:
    result = CliRunner().invoke(APP, [command, "nothing-like-it"])
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 2


def test_the_catalogues_import_nothing_heavy() -> None:
    code = "import sys, specter_sim.hardware; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "typer", "torch", "pydantic"} & set(done.stdout.split())
