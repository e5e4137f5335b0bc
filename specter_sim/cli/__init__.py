"""The command line `specter-sim`. Importing this module costs nothing; `main` imports the rest."""


def main() -> None:
    """Run `specter-sim` and exit: 0 fine, 1 the run failed, 2 usage, 130 interrupted."""
    import sys

    try:
        from specter_sim.cli.app import run_cli

        run_cli()
    except KeyboardInterrupt:  # before the command line could take care of it
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
