"""The errors every package of this project raises for bad input and failed runs."""

from __future__ import annotations

_SHOWN = 80


class SpecterError(Exception):
    """A failure the user can act on: its text says what was wrong, what was got, what to do.

    Command lines print `error: <text>` and leave with `exit_code` (1: the run failed).
    """

    exit_code: int = 1


class UsageError(SpecterError):
    """The request itself cannot be met: an unknown name, an impossible number (exit code 2)."""

    exit_code: int = 2


def shown(value: object) -> str:
    """A value as messages show it: its repr, cut to one short line; never an error itself."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits; deep nesting
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refuse_seed(seed: int) -> None:
    """Raise UsageError for what generators of random numbers do not take."""
    if not 0 <= seed < 2**63:
        raise UsageError(f"a seed is a whole number of 0 or more, below 2^63, got {shown(seed)}")


def printable(text: str) -> str:
    """A text out of a file as a terminal or a figure can show it: one line, nothing to obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
