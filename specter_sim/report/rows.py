"""Rows of results as reports see them: what varies, how a policy is called, under which conditions.

A row is flat: the resolved configuration in dotted keys and the metrics of the result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from specter_sim.policies import EVICTION, PREFETCH
from specter_sim.units import format_bytes, format_rate, format_time

Row = Mapping[str, Any]

DEPTH_KEYS = ("policy.depth", "policy.depth_params.depth")
SLOT_KEYS = ("memory.slots", "memory.budget", "machine.vram")
POLICY_KEYS = ("preset", "policy.", "experts.")
_CONFIG_KEYS = ("model", "trace.", "machine.", "memory.", *POLICY_KEYS)
_SHORT_NAMES = {"machine.name": "machine", "trace.path": "trace", "machine.vram": "VRAM"}
_FORMATS: dict[str, Callable[[float], str]] = {
    "machine.link_bandwidth": format_rate,
    "machine.hbm_bandwidth": format_rate,
    "machine.host_bandwidth": format_rate,
    "machine.link_latency": format_time,
    "machine.launch": format_time,
    "machine.vram": format_bytes,  # beside device bytes, which are decimal
    "machine.host_memory": lambda size: format_bytes(size, binary=True),
    "machine.granularity": lambda size: format_bytes(size, binary=True),
    "memory.budget": format_bytes,
}


def varying(rows: Sequence[Row]) -> list[str]:
    """The keys of the configuration that are not the same in every row, in column order."""
    keys = dict.fromkeys(chain.from_iterable(rows))
    return [key for key in keys if key.startswith(_CONFIG_KEYS) and _varies(rows, key)]


def _varies(rows: Sequence[Row], key: str) -> bool:
    first = rows[0].get(key)
    # Most values are the same object in every row, which is seen without looking at them.
    others = (value for row in rows if (value := row.get(key)) is not first)
    told = repr(first)
    return any(repr(value) != told for value in others)


def panel_keys(rows: Sequence[Row]) -> list[str]:
    """The varying keys that say where a run takes place: model, trace, machine; not its memory."""
    places = (key for key in varying(rows) if key.startswith(("model", "trace.", "machine.")))
    return [key for key in places if key not in SLOT_KEYS]


def panels(rows: Sequence[Row], most: int) -> list[tuple[str, list[Row]]]:
    """The rows grouped by where they run, with a title each; at most so many, evenly chosen."""
    keys = panel_keys(rows)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(repr(row.get(key)) for key in keys), []).append(row)
    chosen = list(groups.values())
    if len(chosen) > most:
        steps = max(1, most - 1)
        chosen = [chosen[index * (len(chosen) - 1) // steps] for index in range(most)]
    return [(values_text(group[0], keys), group) for group in chosen]


def values_text(row: Row, keys: Iterable[str]) -> str:
    """ "link bandwidth 8.00 GB/s, queue depth 2": the row's values of some keys."""
    return ", ".join(f"{short_name(key)} {value_text(key, row.get(key))}" for key in keys)


def short_name(key: str) -> str:
    """The last part of a dotted key in words; the rule's own name for its parameters."""
    parent, _, leaf = key.rpartition(".")
    if key in _SHORT_NAMES:
        return _SHORT_NAMES[key]
    owner = parent.rpartition(".")[2].removesuffix("_params") if parent.endswith("_params") else ""
    words = leaf if leaf.startswith(owner) else f"{owner} {leaf}"
    return words.replace("_", " ")


def value_text(key: str, value: Any) -> str:
    """A value of the configuration in human units."""
    if value is None:
        return "none"
    formatted = _FORMATS.get(key)
    if formatted is not None:
        return formatted(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def depth_label(row: Row) -> str:
    """The row's lookahead depth: a number when it is fixed, else the rule's name."""
    rule = row.get("policy.depth")
    if rule == "never":
        return "0"
    fixed = row.get("policy.depth_params.depth")
    return str(fixed) if rule == "fixed" and fixed is not None else str(rule)


def policy_label(row: Row, keys: Iterable[str]) -> str:
    """What the row's policy is called among rows that differ in `keys`; the depth is left out."""
    told = [key for key in keys if key.startswith(POLICY_KEYS) and key not in DEPTH_KEYS]
    bound = " (bound)" if reads_future(row) else ""
    if "preset" in told and row.get("preset") is not None:
        return f"{row['preset']}{bound}"
    parts = []
    for key in told:
        value = row.get(key)
        if value is None or key == "preset":
            continue
        is_name = isinstance(value, str)
        parts.append(str(value) if is_name else f"{short_name(key)} {value_text(key, value)}")
    named = " + ".join(parts) or f"{row.get('policy.eviction')} + {row.get('policy.prefetch')}"
    return f"{named}{bound}"


def reads_future(row: Row) -> bool:
    """Whether the row is a bound: its policies know the routes to come, which no system does."""
    eviction = EVICTION.get(str(row.get("policy.eviction")))
    prefetch = PREFETCH.get(str(row.get("policy.prefetch")))
    return any(rule is not None and "future" in rule.needs for rule in (eviction, prefetch))


def fits(row: Row) -> bool:
    """Whether what the row needs on the device is there."""
    memory_bytes = row.get("gpu_memory_bytes")
    return memory_bytes is None or float(row["device_bytes"]) <= float(memory_bytes)


def best_by(rows: Iterable[Row], metric: str = "tpot_s") -> Row | None:
    """The row with the least of a metric, among those that have it, fit, and are no bounds."""
    possible = (row for row in rows if fits(row) and not reads_future(row))
    known = [row for row in possible if row.get(metric) is not None]
    return min(known, key=lambda row: float(row[metric])) if known else None


def conditions(rows: Sequence[Row], date: str) -> str:
    """Model, trace, machine, link and date of the rows: what every figure has to say."""
    told = [
        f"model {_values(rows, 'model')}",
        f"trace {_trace(rows)}",
        f"machine {_values(rows, 'machine.name')}",
        f"link {_link(rows)}",
        date,
    ]
    return " · ".join(told)


def _values(rows: Sequence[Row], key: str, most: int = 3) -> str:
    values = list(dict.fromkeys(value_text(key, row.get(key)) for row in rows))
    return ", ".join(values) if len(values) <= most else f"{values[0]} … {values[-1]}"


def _trace(rows: Sequence[Row]) -> str:
    marks = [mark for mark in ("synthetic", "assumed_draft") if any(row.get(mark) for row in rows)]
    name = _values(rows, "trace.path").rpartition("/")[2]
    told = f" ({', '.join(mark.replace('_', ' ') for mark in marks)})" if marks else ""
    return f"{name}{told}, {_values(rows, 'trace.tokens')} tokens"


def _link(rows: Sequence[Row]) -> str:
    rates = sorted({float(row["link_bytes_per_s"]) for row in rows if row.get("link_bytes_per_s")})
    if not rates:
        return "of the machine"
    if len(rates) == 1:
        return format_rate(rates[0])
    return f"{format_rate(rates[0])} … {format_rate(rates[-1])}"
