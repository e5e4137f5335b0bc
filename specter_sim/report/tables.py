"""Tables for people, as plain text that survives a pipe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specter_sim.report.rows import Row, depth_label
from specter_sim.units import format_bytes, format_time

Cell = Callable[[Row], str]


def render(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; cells that look like numbers go right."""
    widths = [max(len(cells[index]) for cells in (headers, *rows)) for index in range(len(headers))]
    right = [
        bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        for index in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def _time(key: str) -> Cell:
    return lambda row: "-" if row.get(key) is None else format_time(float(row[key]))


def _size(key: str) -> Cell:
    return lambda row: "-" if row.get(key) is None else format_bytes(float(row[key]))


def _share(key: str) -> Cell:
    return lambda row: "-" if row.get(key) is None else f"{100 * float(row[key]):.1f} %"


def _number(key: str, digits: int = 1) -> Cell:
    return lambda row: "-" if row.get(key) is None else f"{float(row[key]):.{digits}f}"


METRIC_COLUMNS: dict[str, Cell] = {
    "TPOT": _time("tpot_s"),
    "tok/s": _number("tokens_per_s"),
    "depth": depth_label,
    "hits": _share("hit_rate"),
    "pending": _share("pending_rate"),
    "link B/token": _size("bytes_per_token"),
    "useful": lambda row: str(row.get("useful_prefetches", "-")),
    "late": lambda row: str(row.get("late_prefetches", "-")),
    "wasted": lambda row: str(row.get("wasted_prefetches", "-")),
    "device": _size("device_bytes"),
    "x bound": _number("distance_to_bound", 2),
}


def results_table(rows: Sequence[Row], labels: Mapping[str, Cell]) -> str:
    """One line a result: the given labels, then the metrics every result states."""
    columns = {**labels, **METRIC_COLUMNS}
    return render(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def marks(row: Row) -> list[str]:
    """What has to be said about where the routes come from."""
    told = []
    if row.get("synthetic"):
        told.append("synthetic trace: generated from statistics, not recorded")
    if row.get("assumed_draft"):
        told.append("assumed draft: acceptance and recall are given, not measured")
    return told


def describe(row: Row) -> str:
    """Everything one result states, as label and value lines."""
    lines = [
        ("TPOT", _tpot(row)),
        ("TTFT", f"{_time('ttft_s')(row)} (prefill {_time('prefill_s')(row)} over all requests)"),
        ("tokens", _tokens(row)),
        ("experts", _experts(row)),
        ("link", _link(row)),
        ("prefetch", _prefetch(row)),
        ("time", _time_split(row)),
        ("bound", f"x{_number('distance_to_bound', 2)(row)} of {_bound(row)}"),
        ("device", _memory(row)),
    ]
    lines += [("note", note) for note in [*marks(row), *_notes(row)]]
    return "\n".join(f"{label:<9} {text}" for label, text in lines)


def _tpot(row: Row) -> str:
    return (
        f"{_time('tpot_s')(row)} ({_number('tokens_per_s')(row)} tokens/s; "
        f"p50 {_time('tpot_p50_s')(row)}, p99 {_time('tpot_p99_s')(row)}; "
        f"by the paper's definition {_time('tpot_paper_s')(row)})"
    )


def _tokens(row: Row) -> str:
    text = f"{row['committed_tokens']} committed in {row['windows']} windows"
    if not row["mean_depth"]:
        return f"{text}, nothing drafted"
    return (
        f"{text}, {_number('tokens_per_window', 2)(row)} a window at mean depth "
        f"{_number('mean_depth', 2)(row)}; acceptance {_number('acceptance', 3)(row)}, "
        f"window utilization {_number('window_utilization', 3)(row)}"
    )


def _experts(row: Row) -> str:
    return (
        f"{row['demands']} demands: hit rate {_share('hit_rate')(row)}, pending hits "
        f"{_share('pending_rate')(row)}; {row['loads']} loads, {row['evictions']} evictions"
    )


def _link(row: Row) -> str:
    kinds = ("demand", "useful", "late", "wasted")
    split = ", ".join(f"{kind} {_size(f'{kind}_bytes_per_token')(row)}" for kind in kinds)
    return f"{_size('bytes_per_token')(row)} a token: {split}"


def _prefetch(row: Row) -> str:
    kinds = ("useful", "late", "wasted")
    return ", ".join(f"{row[f'{kind}_prefetches']} {kind}" for kind in kinds)


def _time_split(row: Row) -> str:
    total_s = max(float(row["run_s"]), 1e-30)
    parts = {
        "prefill": "prefill_s",
        "draft": "draft_s",
        "compute": "compute_s",
        "stall on demand loads": "stall_demand_s",
        "on late prefetches": "stall_late_s",
        "on the join": "stall_join_s",
        "idle": "idle_s",
    }
    split = ", ".join(f"{name} {_percent(row[key], total_s)}" for name, key in parts.items())
    return f"{format_time(total_s)}: {split}"


def _percent(part: float, whole: float) -> str:
    return f"{abs(round(100 * part / whole, 1))} %"  # abs: no "-0.0" from the last digit


def _bound(row: Row) -> str:
    return f"the least possible {_time('bound_s')(row)} (set by {row['bound_resource']})"


def _memory(row: Row) -> str:
    parts = ("dense", "draft", "slot", "kv", "buffer")
    split = ", ".join(f"{part} {_size(f'{part}_bytes')(row)}" for part in parts)
    slots = _number("slots_per_layer")(row)
    host = _size("host_bytes")(row)
    return f"{_size('device_bytes')(row)}: {split}; {slots} slots a layer; host {host}"


def _notes(row: Row) -> list[str]:
    notes: Any = row.get("notes") or ""
    return [note for note in str(notes).split("; ") if note]
