"""Machines: a GPU, the link that feeds it, and the host memory behind the link.

Built-in machines are the TOML files of `data/machines`, users' own are files of the same form.
A number there is a quantity with units, or `{ value = ..., source = "..." }`; `base = "rtx-4090"`
starts from another machine.
"""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specter_sim.names import suggestion
from specter_sim.units import parse_bytes, parse_rate, parse_time
from specter_traces.errors import UsageError, shown
from specter_traces.files import refuse_irregular

FOLDER = Path(__file__).parent / "data" / "machines"
MOST_COUNT = 10**9
MOST_BASES = 16  # files that start from one another


@dataclass(frozen=True)
class Gpu:
    """The device that computes."""

    name: str
    memory_bytes: int
    hbm_bytes_per_s: float  # peak
    flops_per_s: float  # peak, dense, 16-bit inputs, 32-bit sums
    memory_efficiency: float  # share of the peak that a large read reaches
    compute_efficiency: float
    launch_s: float  # floor of one kernel, or of one grouped launch, issued by the host
    graph_launch_s: float  # floor of one kernel inside a captured graph
    sync_s: float  # device to host and back: the routes arrive, the host decides
    expand_bytes_per_s: float  # 16-bit weights produced from coded ones, beyond reading them

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes a second that kernels read."""
        return self.hbm_bytes_per_s * self.memory_efficiency

    @property
    def compute_flops_per_s(self) -> float:
        """Operations a second that matrix kernels reach."""
        return self.flops_per_s * self.compute_efficiency


@dataclass(frozen=True)
class Link:
    """PCIe in one direction, host to device."""

    pcie_generation: int
    lanes: int
    bytes_per_s: float  # effective, large pinned copies
    latency_s: float  # of one copy
    queue_depth: int  # copies submitted at once
    granularity_bytes: int  # the largest single copy; a larger load is cut

    def pieces(self, load_bytes: int) -> int:
        """How many copies a load of `load_bytes` takes."""
        return max(1, math.ceil(load_bytes / self.granularity_bytes))

    def copy_s(self, load_bytes: int, bytes_per_s: float | None = None) -> float:
        """Seconds one load takes on an idle link, at `bytes_per_s` (the link's own rate if None).

        Every piece pays the latency when one copy is submitted at a time. With a deeper queue a
        later piece's latency hides behind the data of the pieces before it, as far as that lasts.
        """
        pieces = self.pieces(load_bytes)
        piece_s = load_bytes / pieces / (bytes_per_s or self.bytes_per_s)
        alone_s = self.latency_s + piece_s
        return alone_s + (pieces - 1) * max(piece_s, alone_s / self.queue_depth)


@dataclass(frozen=True)
class Host:
    """Host memory; its bandwidth is shared by copies and by work on the CPU."""

    memory_bytes: int
    memory_bytes_per_s: float  # sustained, reads and writes together
    pinnable_bytes: int | None  # None: as much as there is

    def pinned_share(self, wanted_bytes: int) -> float:
        """The share of `wanted_bytes` that can be pinned; the rest is copied through a bounce."""
        limit = self.memory_bytes if self.pinnable_bytes is None else self.pinnable_bytes
        return min(1.0, limit / wanted_bytes) if wanted_bytes else 1.0


@dataclass(frozen=True)
class Machine:
    """One GPU in one host. `sources` says where each number comes from, by dotted field."""

    name: str
    title: str
    gpu: Gpu
    link: Link
    host: Host
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_(self, source: str = "override", **overrides: Any) -> "Machine":
        """This machine with some fields replaced, named `gpu_memory_bytes=`, `link_bytes_per_s=`.

        Values are numbers or text with units; `source` is recorded for each. Raises UsageError for
        an unknown field or an impossible value.
        """
        machine = self
        for key, value in overrides.items():
            part, _, name = key.partition("_")
            dotted = f"{part}.{name}"
            if dotted not in FIELDS:
                known = (known.replace(".", "_", 1) for known in FIELDS)
                raise UsageError(f'unknown machine field "{key}": {suggestion(key, known)}')
            machine = _replaced(machine, dotted, value, source)
        return machine


def machines() -> dict[str, Machine]:
    """The built-in machines by name, slowest memory first."""
    found = [_builtin(path.stem) for path in sorted(FOLDER.glob("*.toml"))]
    found.sort(key=lambda machine: machine.gpu.hbm_bytes_per_s)
    return {machine.name: machine for machine in found}


def find_machine(name_or_path: str) -> Machine:
    """A built-in machine by name (case does not count), or one read from a TOML file.

    Raises UsageError for an unknown name, naming the nearest, and for a file with unknown keys,
    missing numbers or impossible values.
    """
    if name_or_path.casefold() in _names():
        return _builtin(name_or_path.casefold())
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return _read_file(path, ())
    hint = suggestion(name_or_path, _names())
    raise UsageError(f'unknown machine "{name_or_path}": {hint} (or give a TOML file)')


# --- fields ---------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"must be a text, got {shown(value)}")
    return value


def _positive(parse: Callable[[Any], float]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = parse(value)
        if number <= 0:
            raise UsageError(f"must be above 0, got {shown(value)}")
        return number

    return read


def _number(value: Any) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise UsageError(f"must be a number, got {shown(value)}")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"must be a whole number of at least 1, got {shown(value)}")
    if value > MOST_COUNT:
        raise UsageError(f"must be at most {MOST_COUNT}, got {shown(value)}")
    return value


def _share(value: Any) -> float:
    number = _number(value)
    if not 0 < number <= 1:
        raise UsageError(f"must be above 0 and at most 1, got {shown(value)}")
    return number


def _pinnable(value: Any) -> int | None:
    return None if value == "all" else parse_bytes(value)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "gpu.name": _text,
    "gpu.memory_bytes": _positive(parse_bytes),
    "gpu.hbm_bytes_per_s": _positive(parse_rate),
    "gpu.flops_per_s": _positive(_number),
    "gpu.memory_efficiency": _share,
    "gpu.compute_efficiency": _share,
    "gpu.launch_s": parse_time,
    "gpu.graph_launch_s": parse_time,
    "gpu.sync_s": parse_time,
    "gpu.expand_bytes_per_s": _positive(parse_rate),
    "link.pcie_generation": _count,
    "link.lanes": _count,
    "link.bytes_per_s": _positive(parse_rate),
    "link.latency_s": parse_time,
    "link.queue_depth": _count,
    "link.granularity_bytes": _positive(parse_bytes),
    "host.memory_bytes": _positive(parse_bytes),
    "host.memory_bytes_per_s": _positive(parse_rate),
    "host.pinnable_bytes": _pinnable,
}
PARTS: dict[str, type[Any]] = {"gpu": Gpu, "link": Link, "host": Host}
TOP_KEYS = ("name", "title", "base", *PARTS)


def _parsed(dotted: str, value: Any) -> Any:
    try:
        return FIELDS[dotted](value)
    except UsageError as error:
        raise UsageError(f"machine field {dotted}: {error}") from None


def _replaced(machine: Machine, dotted: str, value: Any, source: str) -> Machine:
    part, _, name = dotted.partition(".")
    changed = dataclasses.replace(getattr(machine, part), **{name: _parsed(dotted, value)})
    sources = {**machine.sources, dotted: source}
    return dataclasses.replace(machine, **{part: changed}, sources=sources)


# --- files ----------------------------------------------------------------------------------------


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def _builtin(name: str) -> Machine:
    return _read_file(FOLDER / f"{name}.toml", ())


def _read_file(path: Path, above: tuple[Path, ...]) -> Machine:
    """The machine of a file; ``above`` are the files that start from it."""
    refuse_irregular(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the machine file {path}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{path} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # also of texts that are not UTF-8, and of endless integers
        raise UsageError(f"{path} is not TOML: {error}") from None
    try:
        return _machine(document, path, above)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _base(name: str, path: Path, above: tuple[Path, ...]) -> Machine:
    """What a file starts from: a machine by name, or a file beside it."""
    base = path.parent / name
    if name.casefold() in _names() or base.suffix != ".toml":
        return find_machine(name)
    files = (*above, path.resolve())
    if base.resolve() in files:
        raise UsageError(f'base = "{name}" leads back to {base}: start from another machine')
    if len(files) > MOST_BASES:
        raise UsageError(f"its base has a base, and so on, more than {MOST_BASES} times")
    return _read_file(base, files)


def _machine(document: Mapping[str, Any], path: Path, above: tuple[Path, ...]) -> Machine:
    values, sources = _values(document, default_source=f"stated in {path.name}")
    name = _text(document.get("name", path.stem))
    if "base" in document:
        machine = _base(_text(document["base"]), path, above)
        title = _text(document.get("title", f"{name} ({machine.title}, changed)"))
        machine = dataclasses.replace(machine, name=name, title=title)
        for dotted, value in values.items():
            machine = _replaced(machine, dotted, value, sources[dotted])
        return machine
    missing = [dotted for dotted in FIELDS if dotted not in values]
    if missing:
        raise UsageError(
            f'missing {", ".join(missing)}: state them, or start from a machine with base = "..."'
        )
    parts = {part: _part(part, values) for part in PARTS}
    return Machine(name=name, title=_text(document.get("title", name)), **parts, sources=sources)


def _part(part: str, values: Mapping[str, Any]) -> Any:
    own = {dotted: value for dotted, value in values.items() if dotted.startswith(f"{part}.")}
    return PARTS[part](**{dotted.split(".")[1]: _parsed(dotted, own[dotted]) for dotted in own})


def _values(
    document: Mapping[str, Any], default_source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The document's values and sources by dotted field; unknown keys are refused."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, table in document.items():
        if key not in TOP_KEYS:
            raise UsageError(f'unknown key "{key}": {suggestion(key, TOP_KEYS)}')
        if key not in PARTS:
            continue
        if not isinstance(table, Mapping):
            raise UsageError(f"[{key}] must be a table, got {shown(table)}")
        for name, entry in table.items():
            dotted = f"{key}.{name}"
            if dotted not in FIELDS:
                raise UsageError(f'unknown key "{dotted}": {suggestion(dotted, FIELDS)}')
            values[dotted], sources[dotted] = _entry(dotted, entry, default_source)
    return values, sources


def _entry(dotted: str, entry: Any, default_source: str) -> tuple[Any, str]:
    if not isinstance(entry, Mapping):
        return entry, default_source
    for key in entry:
        if key not in ("value", "source"):
            hint = suggestion(key, ("value", "source"))
            raise UsageError(f'unknown key "{dotted}.{key}": {hint}')
    if "value" not in entry:
        raise UsageError(f'{dotted} has no "value"')
    return entry["value"], _text(entry.get("source", default_source))
