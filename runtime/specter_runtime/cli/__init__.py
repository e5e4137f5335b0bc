"""The command line `specter-run`: one module a command, imported by `app`; see `app.main`."""

from specter_runtime.cli.app import main

__all__ = ["main"]
