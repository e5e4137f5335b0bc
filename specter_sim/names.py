"""Suggest the name that was meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when none is close. Case does not count."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say after "unknown ...": the nearest name, else the whole list."""
    choices = list(known)
    close = nearest(name, choices)
    return f'did you mean "{close}"?' if close else f"known: {', '.join(choices)}"
