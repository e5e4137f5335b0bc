"""The command line `specter-sim`. Importing this module costs nothing; `main` imports the rest."""


def main() -> None:
    """Run `specter-sim` on the process's arguments and exit with its code: 0, 1 run failed, 2 usage."""
    from specter_sim.cli.app import run_cli

    run_cli()
