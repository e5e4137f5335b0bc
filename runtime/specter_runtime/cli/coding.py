"""`specter-run coding`: what coding a model's experts would take and save. Nothing is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_runtime.cli.options import DtypeOption, JsonOption, print_json, today
from specter_traces.errors import UsageError

if TYPE_CHECKING:
    from specter_runtime.codec import Coding
    from specter_runtime.coding_report import CodingReport, MatrixCoding

ModelToCode = Annotated[
    str, typer.Argument(metavar="MODEL", help="Bundled model, a folder, or a hub id.")
]
BitsOption = Annotated[int, typer.Option(help="Bits of the base, which is the draft: 2, 3 or 4.")]
GroupSizeOption = Annotated[int, typer.Option(help="Weights that share a scale of the base.")]

_RESIDENT = 0.5
_HEADER = f"{'':<22}  base  refinement      limit  above  overflow  in full"


def coding(
    model: ModelToCode = "tiny-moe",
    bits: BitsOption = 4,
    group_size: GroupSizeOption = 64,
    dtype: DtypeOption = "auto",
    layers: Annotated[
        bool, typer.Option("--layers", help="Show every layer, not their means.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say how many bits coded experts would take, and what that saves."""
    from specter_runtime.cli.opening import progress_bar
    from specter_runtime.coding_report import coding_report

    asked = coding_for(bits, group_size)
    with progress_bar("coding") as progress:
        report = coding_report(model, asked, dtype, progress)
    if as_json:
        print_json(_document(report))
    else:
        typer.echo(_table(report, every_layer=layers))


def coding_for(bits: int, group_size: int) -> Coding:
    """The coding with a base of so many bits. Raises UsageError."""
    from specter_runtime.codec import BaseName, Coding

    bases: dict[int, BaseName] = {2: "base2", 3: "base3", 4: "base4"}
    if bits not in bases:
        raise UsageError(f"--bits must be 2, 3 or 4, got {bits}")
    return Coding(bases[bits], group_size)


def _document(report: CodingReport) -> dict[str, Any]:
    return {
        "date": today(),
        "model": report.name,
        "base": report.coding.base,
        "group_size": report.coding.group_size,
        "dtype": _dtype(report),
        "moe_layers": report.layers,
        "experts": list(report.experts),
        "matrices": [_row(matrix) for matrix in report.matrices],
        "total": _row(report.total),
        "stored_bytes": report.stored_bytes,
        "other_bytes": report.other_bytes,
        "resident_share_plain": _RESIDENT,
        "resident_share_drafted": report.drafted_share(_RESIDENT),
        "resident_share_coded": report.slots_share(_RESIDENT),
    }


def _row(matrix: MatrixCoding) -> dict[str, Any]:
    return vars(matrix) | {
        "base_bits": matrix.base_bits,
        "refinement_bits": matrix.refinement_bits,
        "above_limit_bits": matrix.above_limit_bits,
    }


def _table(report: CodingReport, *, every_layer: bool) -> str:
    from specter_runtime.cli.summary import block

    rows = [*(report.matrices if every_layer else report.by_matrix()), report.total]
    lines = [_HEADER, *map(_line, rows), "", block(_savings(report))]
    return "\n".join(lines)


def _line(matrix: MatrixCoding) -> str:
    """One row of 78 columns; long names lose their beginning."""
    layer = "" if matrix.layer is None else f"{matrix.layer} "
    share = matrix.refinement_bytes / matrix.plain_bytes
    return (
        f"{layer + matrix.matrix[-18:]:<22}{matrix.base_bits:>6.2f}"
        f"{matrix.refinement_bits:>6.2f} ({share:.2f}){matrix.limit_bits:>10.2f}"
        f"{matrix.above_limit_bits:>7.2f}{100 * matrix.overflow:>8.1f} %"
        f"{100 * matrix.escapes:>7.2f} %"
    )


def _savings(report: CodingReport) -> list[tuple[str, str]]:
    from specter_sim.units import format_bytes

    total = report.total
    plain, base, refinement = (
        format_bytes(size) for size in (total.plain_bytes, total.base_bytes, total.refinement_bytes)
    )
    experts = sum(report.experts)
    before = report.stored_bytes + report.other_bytes
    after = total.base_bytes + total.refinement_bytes + report.other_bytes
    lines = [
        ("model", _conditions(report)),
        (
            "link",
            f"a load moves {format_bytes(total.refinement_bytes / experts)} instead of "
            f"{format_bytes(total.plain_bytes / experts)}, "
            f"{_percent(total.refinement_bytes, total.plain_bytes)} of it",
        ),
        (
            "slots",
            f"where {100 * _RESIDENT:.0f} % of plain experts fit, or "
            f"{100 * report.drafted_share(_RESIDENT):.0f} % beside a draft of {base}, "
            f"{100 * report.slots_share(_RESIDENT):.0f} % of coded ones fit beside their base, "
            "which is the draft",
        ),
        ("host", f"{refinement} instead of {plain}: the exact weights are stored nowhere"),
        (
            "disk",
            f"{format_bytes(after)} instead of {format_bytes(before)}, "
            f"{_percent(after, before)} of it, everything else included",
        ),
    ]
    if total.uncoded:
        lines.append(("note", f"{total.uncoded} matrices do not gain and stay plain"))
    return lines


def _conditions(report: CodingReport) -> str:
    low, high = min(report.experts), max(report.experts)
    experts = str(low) if low == high else f"{low} to {high}"
    return (
        f"{report.name}, {_dtype(report)}: {report.layers} MoE layers of {experts} experts; "
        f"{report.coding.base} in groups of {report.coding.group_size}; bits a weight, "
        f"and of plain bits; limit: entropy of a weight in its bin; {today()}"
    )


def _dtype(report: CodingReport) -> str:
    return str(report.dtype).removeprefix("torch.")


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"
