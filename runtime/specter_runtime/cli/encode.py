"""`specter-run encode`: store a checkpoint with coded experts, which the next start reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from specter_runtime.cli.coding import BitsOption, GroupSizeOption, ModelToCode, coding_for
from specter_runtime.cli.options import DtypeOption, tell

OutOption = Annotated[
    Path, typer.Option("--out", "-o", metavar="FOLDER", help="The new folder to write.")
]


def encode(
    model: ModelToCode,
    out: OutOption,
    bits: BitsOption = 4,
    group_size: GroupSizeOption = 64,
    dtype: DtypeOption = "auto",
) -> None:
    """Store a checkpoint with its experts in coded form, ready to run."""
    from specter_runtime.cli.opening import progress_bar
    from specter_runtime.coded_folder import encode_folder
    from specter_sim.units import format_bytes

    coding, began_s = coding_for(bits, group_size), time.perf_counter()
    with progress_bar("reading") as progress:
        sizes = encode_folder(model, out, coding, dtype, progress)
    share = 100 * sizes.after_bytes / sizes.before_bytes
    tell(f"coded in {time.perf_counter() - began_s:.1f} s, every weight verified")
    typer.echo(
        f"{out}: {format_bytes(sizes.after_bytes)} instead of {format_bytes(sizes.before_bytes)} "
        f"({share:.0f} %), {coding.base} in groups of {coding.group_size}"
    )
