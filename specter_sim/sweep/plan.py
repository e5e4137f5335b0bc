"""A sweep before it runs: its file, and the distinct configurations the file asks for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from specter_sim.sweep.axes import (
    MOST_CONFIGURATIONS,
    Axes,
    filtered,
    fix_keys,
    read_axes,
    replace_axis,
)
from specter_traces.errors import UsageError


@dataclass(frozen=True)
class Task:
    """One configuration to compute, and its identity."""

    key: str
    config: RunConfig


@dataclass(frozen=True)
class Sweep:
    """A sweep file: the tables every configuration starts from, and the axes."""

    base: tuple[Table, ...]
    axes: Axes

    @property
    def most(self) -> int:
        """How many configurations there are, before filters and equal ones are taken out."""
        return self.axes.most

    def configurations(self) -> Iterator[RunConfig]:
        """The distinct configurations that pass the filters, in order, made one by one.

        Raises UsageError when none passes.
        """
        seen: set[str] = set()
        for point in self.axes.points():
            config = build(*self.base, nest(point))
            if self.axes.filters and not filtered(self.axes, flatten(resolved(config))):
                continue
            identity = content_hash(config)
            if identity not in seen:
                seen.add(identity)
                yield config
        if not seen:
            raise UsageError(
                f"the axes expand to nothing: none of {self.most} combinations passes the filters"
            )

    def each_value(self) -> Iterator[RunConfig]:
        """A configuration for every value of every axis, the other axes at their first."""
        firsts = [group[0] for group in self.axes.groups]
        for place, group in enumerate(self.axes.groups):
            for point in group:
                yield build(
                    *self.base, *map(nest, firsts[:place] + firsts[place + 1 :]), nest(point)
                )


def read_sweep(path: Path, settings: Iterable[str] = (), axes: Iterable[str] = ()) -> Sweep:
    """Read a sweep file; `--set` replaces a key or an axis, `--axis` gives an axis anew."""
    return make_sweep(load_table(path), settings, axes)


def make_sweep(table: Mapping[str, Any], settings: Iterable[str], axes: Iterable[str]) -> Sweep:
    """A sweep from the tables of its file and the command line's changes. Raises UsageError."""
    base = dict(table)
    axes_table = base.pop("axes", {})
    base.pop("question", None)  # for the report
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
    if varied.most > MOST_CONFIGURATIONS:
        raise UsageError(
            f"the axes have {varied.most:,} combinations, more than {MOST_CONFIGURATIONS:,}: "
            "take values out"
        )
    build(base, fixed)  # a wrong key of the base is reported once, before any point is built
    return Sweep((base, fixed), varied)


def make_tasks(sweep: Sweep, inputs: Callable[[RunConfig], str], version: str) -> Iterator[Task]:
    """Every configuration with its identity, made one by one.

    `inputs` gives the content hash of the files a configuration reads (trace, model, machine), so
    that a result is reused only for the same content. Raises UsageError for a wrong value of an
    axis before the first task.
    """
    for config in sweep.each_value():
        inputs(config)
    for config in sweep.configurations():
        yield Task(content_hash(config, inputs(config), version), config)
