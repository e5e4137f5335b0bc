"""The application: its commands, and how errors become exit codes.

The commands import what is heavy when they run: `--help` imports neither torch nor the simulator.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specter_runtime.cli.bench import bench
from specter_runtime.cli.capture import capture
from specter_runtime.cli.chat import chat
from specter_runtime.cli.coding import coding
from specter_runtime.cli.decode import decode
from specter_runtime.cli.encode import encode
from specter_runtime.cli.generate import generate
from specter_runtime.cli.info import info
from specter_sim.cli.app import InterruptedRunError, exit_code_of


class _Commands(TyperGroup):
    """A group that lets an interrupt through; typer would end without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Do what was asked."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptedRunError from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, bench, info, coding, encode, decode, capture):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        from specter_sim import __version__

        typer.echo(f"specter-run {__version__}")
        raise typer.Exit()


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models that are larger than device memory, token for token."""


def main(arguments: list[str] | None = None) -> None:
    """Run `specter-run` and exit: 0 fine, 1 the run failed, 2 usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # models write any text
    code = exit_code_of(
        lambda: app(args=given, prog_name="specter-run", obj=given, standalone_mode=False)
    )
    sys.exit(code)
