"""A sweep before it runs: its file, and the distinct configurations the file asks for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specter_sim.config import (
    RunConfig,
    Table,
    build,
    content_hash,
    flatten,
    load_table,
    nest,
    parse_settings,
    parse_value,
    resolved,
)
from specter_sim.sweep.axes import Axes, filtered, fix_keys, read_axes, replace_axis
from specter_traces.errors import UsageError


@dataclass(frozen=True)
class Task:
    """One configuration to compute: its identity, and the point of the axes that made it."""

    key: str
    config: RunConfig
    point: Table


@dataclass(frozen=True)
class Sweep:
    """A sweep file: the tables every configuration starts from, and the axes."""

    base: tuple[Table, ...]
    axes: Axes

    def configurations(self) -> list[tuple[RunConfig, Table]]:
        """The distinct configurations that pass the filters, in order, each with its point.

        Raises UsageError when nothing is left.
        """
        found: dict[str, tuple[RunConfig, Table]] = {}
        points = self.axes.points()
        for point in points:
            config = build(*self.base, nest(point))
            if filtered(self.axes, flatten(resolved(config))):
                found.setdefault(content_hash(config), (config, point))
        if not found:
            raise UsageError(
                f"the axes expand to nothing: none of {len(points)} combinations passes the filters"
            )
        return list(found.values())


def read_sweep(path: Path, settings: Iterable[str] = (), axes: Iterable[str] = ()) -> Sweep:
    """Read a sweep file; `--set` replaces a key or an axis, `--axis` gives an axis anew."""
    return make_sweep(load_table(path), settings, axes)


def make_sweep(table: Mapping[str, Any], settings: Iterable[str], axes: Iterable[str]) -> Sweep:
    """A sweep from the tables of its file and the command line's changes. Raises UsageError."""
    base = dict(table)
    axes_table = base.pop("axes", {})
    if not isinstance(axes_table, Mapping):
        raise UsageError("axes must be a table: write [axes] above the axes")
    fixed = parse_settings(settings)
    varied = fix_keys(read_axes(axes_table), flatten(fixed))
    for text in axes:
        key, equals, spec = text.partition("=")
        if not equals:
            raise UsageError(f'"{text}" is not an axis: write it like memory.slots=[8, 12]')
        varied = replace_axis(varied, key.strip(), parse_value(spec.strip()))
    if not varied.groups:
        raise UsageError("the sweep has no axes: give it an [axes] table or --axis key=[..]")
    build(base, fixed)  # a wrong key of the base is reported once, before any point is built
    return Sweep((base, fixed), varied)


def make_tasks(sweep: Sweep, inputs: Callable[[RunConfig], str], version: str) -> list[Task]:
    """Every configuration with its identity.

    `inputs` gives the content hash of the files a configuration reads (trace, model, machine), so
    that a result is reused only for the same content.
    """
    return [
        Task(content_hash(config, inputs(config), version), config, point)
        for config, point in sweep.configurations()
    ]
