"""`specter-sim hardware` and `specter-sim models`: what the catalogues hold, and where from."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from specter_sim.hardware import (
    ExpertForm,
    Machine,
    ModelShape,
    StoredFormat,
    expert_bytes,
    find_machine,
    find_model,
    machines,
    models,
    published,
)
from specter_sim.hardware.forms import REFINEMENT_SHARE
from specter_sim.hardware.machines import FIELDS
from specter_sim.hardware.models import AS_16BIT_SUFFIX
from specter_sim.units import format_bytes, format_rate, format_time
from specter_traces.errors import UsageError

DRAFT_GROUP = 128  # weights a scale in the draft sizes shown here

MachineArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="A machine, or a machine's TOML file.")
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A model, a config.json, or a model folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def hardware_command(name: MachineArgument = None, as_json: JsonOption = False) -> None:
    """List the machines, or show one with the source of every number."""
    if name is None:
        found = machines()
        if as_json:
            _print_json([_machine_document(machine) for machine in found.values()])
        else:
            _print_machines(found.values())
        return
    machine = find_machine(name)
    if as_json:
        _print_json(_machine_document(machine))
    else:
        _print_machine(machine)


def models_command(name: ModelArgument = None, as_json: JsonOption = False) -> None:
    """List the models, or show the sizes of one."""
    if name is None:
        found = models()
        if as_json:
            _print_json([_model_document(shape) for shape in found.values()])
        else:
            _print_models(found.values())
        return
    shape = find_model(name)
    if as_json:
        _print_json(_model_document(shape))
    else:
        _print_model(shape)


# --- machines -------------------------------------------------------------------------------------


def _print_machines(found: Iterable[Machine]) -> None:
    rows = [
        (
            machine.name,
            format_bytes(machine.gpu.memory_bytes, binary=True),
            format_rate(machine.gpu.hbm_bytes_per_s),
            f"{machine.gpu.flops_per_s / 1e12:.3g}",
            _pcie(machine),
            format_rate(machine.link.bytes_per_s),
            format_bytes(machine.host.memory_bytes, binary=True),
        )
        for machine in found
    ]
    headings = ("machine", "memory", "reads", "TFLOPS", "PCIe", "link", "host memory")
    _print_table(headings, rows, left=1)
    _print_line(
        "Peak reads and dense 16-bit TFLOPS of the device; the link as large copies see it. "
        "`specter-sim hardware NAME` names the source of every number."
    )


def _print_machine(machine: Machine) -> None:
    _print_line(f"{machine.name}: {machine.title}")
    rows = [
        (dotted, _shown(dotted, _value(machine, dotted)), machine.sources.get(dotted, ""))
        for dotted in FIELDS
    ]
    _print_table(("field", "value", "source"), rows, left=3)


def _machine_document(machine: Machine) -> dict[str, Any]:
    return {**dataclasses.asdict(machine), "sources": dict(machine.sources)}


def _value(machine: Machine, dotted: str) -> Any:
    part, _, name = dotted.partition(".")
    return getattr(getattr(machine, part), name)


def _shown(dotted: str, value: Any) -> str:
    if dotted == "host.pinnable_bytes" and value is None:
        return "all"
    if dotted == "gpu.flops_per_s":
        return f"{value / 1e12:.4g} TFLOPS"
    if dotted.endswith("_bytes_per_s") or dotted == "link.bytes_per_s":
        return format_rate(value)
    if dotted.endswith("_bytes"):
        return format_bytes(value, binary=True)
    if dotted.endswith("_s"):
        return format_time(value)
    return str(value)


def _pcie(machine: Machine) -> str:
    return f"{machine.link.pcie_generation}.0 x{machine.link.lanes}"


# --- models ---------------------------------------------------------------------------------------


def _print_models(found: Iterable[ModelShape]) -> None:
    rows = [
        (
            shape.name,
            f"{shape.moe_layers} x {shape.num_experts}",
            f"{shape.top_k}",
            format_bytes(shape.expert_bytes(), binary=True),
            shape.expert_format.value,
            format_bytes(shape.routed_bytes()),
            _scaled(shape.total_params()),
            _scaled(shape.active_params(_counts_embedding(shape))),
        )
        for shape in found
    ]
    headings = ("model", "experts", "top", "one", "stored", "all", "weights", "active")
    _print_table(headings, rows, left=1)
    _print_line(
        "Layers that have routed experts x experts of one; the size of one and of all. Active: "
        "weights one token uses, counted as the publisher does."
    )


def _print_model(shape: ModelShape) -> None:
    stated = published(shape.name)
    _print_line(f"{shape.name}: {stated.title if stated else 'read from a config'}")
    _print_line(f"source: {shape.source}")
    _print_table(("size", "value"), _model_rows(shape), left=2)
    _print_table(
        ("form of an expert", "load", "slot", "resident", "read a use"), _form_rows(shape), left=1
    )
    _print_line(f"Drafts and bases with one 16-bit scale for {DRAFT_GROUP} weights.")
    if shape.expert_format is not StoredFormat.BF16:
        _print_line(f"Coding is for BF16 experts: {shape.name}{AS_16BIT_SUFFIX} treats them so.")


def _model_rows(shape: ModelShape) -> list[tuple[str, str]]:
    stated = published(shape.name)
    stated_total = f" (published: {_scaled(stated.total)})" if stated else ""
    stated_active = f" (published: {_scaled(stated.active)})" if stated else ""
    active = shape.active_params(_counts_embedding(shape))
    return [
        ("layers with experts / all layers", f"{shape.moe_layers} / {shape.num_layers}"),
        ("experts of a layer, top-k", f"{shape.num_experts}, {shape.top_k}"),
        ("hidden width, expert width", f"{shape.hidden_size}, {shape.expert_width}"),
        ("weights", _scaled(shape.total_params()) + stated_total),
        ("active weights", _scaled(active) + stated_active),
        ("one expert", f"{shape.expert_bytes():,} B, {shape.expert_params:,} weights"),
        ("stored bits of an expert's weight", f"{shape.expert_bits:.4g}"),
        ("all routed experts", _both(shape.routed_bytes())),
        ("everything else", _both(shape.dense_bytes())),
        ("attention of a layer", format_bytes(shape.attention_bytes_per_layer(), binary=True)),
        ("shared experts of a layer", format_bytes(shape.shared_bytes_per_layer(), binary=True)),
        ("one slot in every layer", _both(shape.moe_layers * shape.expert_bytes())),
        ("KV cache of 1024 tokens", format_bytes(shape.kv_bytes(1024), binary=True)),
    ]


def _form_rows(shape: ModelShape) -> list[tuple[str, ...]]:
    forms: list[tuple[str, ExpertForm, int | None]] = [
        ("plain, no draft", ExpertForm.PLAIN, None),
        ("plain, 4-bit draft", ExpertForm.PLAIN, 4),
        ("coded, no draft", ExpertForm.CODED, None),
    ]
    forms += [(f"coded, {bits}-bit base", ExpertForm.CODED_BASE, bits) for bits in REFINEMENT_SHARE]
    rows: list[tuple[str, ...]] = []
    for label, form, bits in forms:
        try:
            sizes = expert_bytes(shape, form, bits, DRAFT_GROUP)
        except UsageError:
            rows.append((label, "-", "-", "-", "-"))
            continue
        counts = (
            sizes.per_load,
            sizes.per_slot,
            sizes.resident_per_expert,
            sizes.read_per_use,
        )
        rows.append((label, *(format_bytes(count, binary=True) for count in counts)))
    return rows


def _model_document(shape: ModelShape) -> dict[str, Any]:
    fields = dataclasses.asdict(shape)
    stated = published(shape.name)
    return {
        **fields,
        "expert_format": shape.expert_format.value,
        "expert_bytes": shape.expert_bytes(),
        "routed_bytes": shape.routed_bytes(),
        "dense_bytes": shape.dense_bytes(),
        "total_params": shape.total_params(),
        "active_params": shape.active_params(_counts_embedding(shape)),
        "published": dataclasses.asdict(stated) if stated else None,
    }


def _counts_embedding(shape: ModelShape) -> bool:
    stated = published(shape.name)
    return stated.active_counts_embedding if stated else True


def _scaled(params: float) -> str:
    return f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"


def _both(size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} ({format_bytes(size_bytes, binary=True)})"


# --- printing -------------------------------------------------------------------------------------


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def _print_line(text: str) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(text)


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> None:
    """A table whose first `left` columns are text and the others numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for index, heading in enumerate(headings):
        table.add_column(
            heading, justify="left" if index < left else "right", no_wrap=heading != "source"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)
