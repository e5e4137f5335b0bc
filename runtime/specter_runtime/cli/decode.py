"""`specter-run decode`: restore the checkpoint that was encoded, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specter_runtime.cli.encode import OutOption


def decode(
    coded: Annotated[
        Path, typer.Argument(metavar="CODED", help="A folder that `specter-run encode` wrote.")
    ],
    out: OutOption,
) -> None:
    """Restore the original checkpoint from one with coded experts."""
    from specter_runtime.cli.opening import progress_bar
    from specter_runtime.coded_folder import decode_folder
    from specter_sim.units import format_bytes

    with progress_bar("decoding") as progress:
        sizes = decode_folder(coded, out, progress)
    typer.echo(f"{out}: {format_bytes(sizes.after_bytes)}, as it was encoded")
