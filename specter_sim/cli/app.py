"""The application: its verbs, imported when they are used, and how errors become exit codes."""

import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

TRACEBACK_VARIABLE = "SPECTER_TRACEBACK"
INTERRUPTED = 130
MOST_SHOWN = 2000  # characters of an error line

# Listed here, so that --help imports none of them.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("specter_sim.cli.run:run", "Simulate one configuration and say what it comes to."),
    "sweep": ("specter_sim.cli.sweep:sweep", "Simulate many configurations, resumably; plot them."),
    "compare": ("specter_sim.cli.compare:compare", "Rank the presets at equal memory and slots."),
    "tune": ("specter_sim.cli.tune:tune", "Choose the best system for a memory budget."),
    "report": ("specter_sim.cli.report:report", "Write a sweep's results as one HTML page."),
    "curve": ("specter_sim.cli.curve:curve", "Hit rate against slots for every eviction policy."),
    "trace": ("specter_sim.cli.trace:app", "Look at router traces, check, import, synthesize."),
    "hardware": ("specter_sim.cli.hardware:hardware_command", "List machines, or show one."),
    "models": ("specter_sim.cli.hardware:models_command", "List models, or show one."),
    "policies": ("specter_sim.cli.policies:policies", "List policies and presets, or show one."),
    "bench": ("specter_sim.cli.bench:bench", "Measure how fast the simulator itself is."),
}


class InterruptedRunError(Exception):
    """Ctrl-C while a command ran."""


class LazyVerbs(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in their order."""
        return list(VERBS)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments. An interrupt is told; typer would say nothing."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise InterruptedRunError from None

    def invoke(self, ctx: Any) -> Any:
        """Do what was asked. An interrupt is told, as above."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptedRunError from None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one verb; None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        return _command_of(getattr(import_module(module), attribute), cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb. An unknown one is a usage error with the nearest name."""
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            from specter_sim.names import suggestion
            from specter_traces.errors import UsageError

            raise UsageError(f'unknown command "{args[0]}": {suggestion(args[0], VERBS)}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of verbs in --help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=LazyVerbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from specter_sim import __version__

        typer.echo(f"specter-sim {__version__}")
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
    """Predict how fast a Mixture-of-Experts model larger than GPU memory will decode.

    Replays recorded routes of a real model on hardware you describe.
    """


def run_cli() -> None:
    """Run the command line and exit: 0 fine, 1 the run failed, 2 usage, 130 interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names out of files are any text
    sys.exit(exit_code_of(lambda: app(prog_name="specter-sim", standalone_mode=False)))


def exit_code_of(work: Callable[[], Any]) -> int:
    """Do the work; turn whatever it raises into one line on stderr and an exit code."""
    try:
        result = work()
        sys.stdout.flush()  # a full disk is told here, not when the interpreter ends
        return result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt, InterruptedRunError):
        return _failed("interrupted", INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _explained(error)


def _explained(error: Exception) -> int:
    from specter_traces.errors import SpecterError

    if isinstance(error, SpecterError):
        return _failed(str(error), error.exit_code)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        # click's exceptions, whichever package they live in: typer has moved them.
        message = error.format_message() or "nothing to do: see --help"
        if message.startswith("Usage:"):  # no arguments at all: the message is the help text
            print(message, file=sys.stderr)
            return int(error.exit_code)
        return _failed(message, error.exit_code)
    if isinstance(error, MemoryError):
        return _failed("there is not enough memory for this: ask for less", 1)
    if isinstance(error, OSError) and error.strerror:
        return _failed_output(error)
    told = f"unexpected {type(error).__name__}: {error}".splitlines()[0]
    return _failed(f"{told} (set {TRACEBACK_VARIABLE}=1 for the traceback)", 1)


def _failed(message: str, code: int) -> int:
    line = " ".join(message.split())
    told = line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."
    print(f"error: {told}", file=sys.stderr)
    return code


def _failed_output(error: OSError) -> int:
    """A file or stdout that the system refused to read or write."""
    if error.filename is not None:
        return _failed(f"{error.filename}: {error.strerror}", 1)
    # What stdout still holds would fail again, with a traceback, when the interpreter ends.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    code = 1
    if error.errno == errno.EPIPE:
        return code  # the reader left: nobody to tell
    return _failed(f"cannot write the output: {error.strerror}", code)


def _command_of(target: Any, name: str) -> Any:
    """A click command from a function or a Typer application."""
    if not isinstance(target, typer.Typer):
        verb = target
        target = typer.Typer(add_completion=False, rich_markup_mode=None)
        target.command(name)(verb)
    target.pretty_exceptions_enable = False
    return typer.main.get_command(target)
