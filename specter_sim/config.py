"""What one simulated run is: the configuration, how it is written, and its identity.

A configuration is built from layers of tables (a TOML file, `--set a.b=c`, a point of a sweep), the
later above the earlier. Unknown keys are refused with the nearest name; every error is one line.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from specter_sim.names import nearest, suggestion
from specter_sim.units import parse_bytes, parse_rate, parse_time
from specter_traces.errors import SpecterError, UsageError, shown
from specter_traces.files import refuse_irregular

MOST = 10**9  # of anything that is counted: far beyond use, far within a machine integer
MOST_BYTES = 2**62
MOST_NESTED = 16  # tables within tables

Scalar = bool | int | float | str
Table = dict[str, Any]


def _quantity(parse: Any) -> BeforeValidator:
    def convert(value: Any) -> Any:
        try:
            return value if value is None else parse(value)
        except SpecterError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(convert)


Bytes = Annotated[int, Field(ge=1, le=MOST_BYTES), _quantity(parse_bytes)]
Rate = Annotated[float, Field(gt=0), _quantity(parse_rate)]
Time = Annotated[float, Field(ge=0), _quantity(parse_time)]


class Section(BaseModel):
    """One table of the configuration: frozen, no unknown keys, "none" for an absent value."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        # TOML has no null; where None means something, the word "none" stands for it.
        if not isinstance(data, dict):
            return data
        for key, value in data.items():
            if isinstance(value, bool) and _is_number(cls, key):
                raise ValueError(f"{key} must be a number, got {str(value).lower()}")
        return {
            key: None if value == "none" and _is_optional(cls, key) else value
            for key, value in data.items()
        }


def _is_optional(section: type[BaseModel], key: str) -> bool:
    field = section.model_fields.get(key)
    return field is not None and type(None) in get_args(field.annotation)


def _is_number(section: type[BaseModel], key: str) -> bool:
    # pydantic reads true as 1.
    field = section.model_fields.get(key)
    kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
    return bool(kinds) and set(kinds) <= {int, float, type(None)}


class TraceConfig(Section):
    """Which routes are replayed, and how much of them."""

    path: str = Field("tiny-moe", min_length=1, description="bundled trace, a file, or 'synth'")
    sequences: int | None = Field(
        None, ge=1, le=MOST, description="use the first so many sequences"
    )
    part: Literal["all", "even", "odd"] = Field(
        "all", description="every second sequence only: tune on one part, check on the other"
    )
    tokens: int = Field(
        256, ge=1, le=MOST, description="decode tokens simulated, over all sequences"
    )
    between: Literal["warm", "cold"] = Field("warm", description="residency between sequences")
    acceptance: Literal["auto", "greedy", "sampled"] = "auto"
    seed: int = Field(0, ge=0, lt=2**63)
    assumed_acceptance: float | None = Field(None, ge=0, le=1, description="assume a draft")
    assumed_recall: float | None = Field(None, ge=0, le=1, description="of the assumed draft")
    context: int = Field(
        0, ge=0, le=MOST, description="KV tokens before each text: timed and charged"
    )


class MachineConfig(Section):
    """A machine by name or TOML file, and what is different about yours."""

    name: str = Field("emulated-cpu", min_length=1)
    link_bandwidth: Rate | None = None
    link_latency: Time | None = None
    queue_depth: int | None = Field(None, ge=1, le=MOST)
    granularity: Bytes | None = None
    vram: Bytes | None = None
    hbm_bandwidth: Rate | None = None
    host_bandwidth: Rate | None = None
    host_memory: Bytes | None = None
    launch: Time | None = None


LIMITS = ("slots", "slots_per_layer", "budget")


class MemoryConfig(Section):
    """How many experts fit: slots (of every MoE layer, or of each), or a device budget.

    With none of them, all of the VRAM.
    """

    slots: int | None = Field(None, ge=1, le=MOST, description="slots per MoE layer")
    slots_per_layer: tuple[Annotated[int, Field(ge=1, le=MOST, strict=True)], ...] | None = Field(
        None, description="slots of each MoE layer, first to last"
    )
    budget: Bytes | None = Field(None, description="device bytes for everything")
    layout: Literal["per-layer", "global"] = "per-layer"
    staging_slots: int = Field(0, ge=0, le=MOST)
    allow_rounds: bool = Field(False, description="fewer slots than top-k: run in rounds")
    initial: Literal["cold", "highest", "popular"] = "cold"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = [key for key in LIMITS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f'{" and ".join(given)} are both given: set one of them to "none"')
        if self.slots_per_layer is not None and self.layout != "per-layer":
            raise ValueError(
                f'slots_per_layer gives every layer its own slots, and layout is "{self.layout}": '
                'set layout to "per-layer", or give a budget'
            )
        return self


class ExpertsConfig(Section):
    """The form experts take on the host, on the link and in slots, and the draft's bits."""

    form: Literal["plain", "coded", "coded-base"] = "plain"
    draft_bits: Literal[2, 3, 4, 8] | None = 4
    group_size: int = Field(64, ge=1, le=MOST)
    shared_draft: bool = Field(True, description="the draft uses the target's dense weights")
    grouped: bool = Field(True, description="one launch for all resident experts")
    grouped_draft: bool = Field(True, description="one launch for a draft layer's experts")
    captured_draft: bool = Field(True, description="draft steps run as one captured graph")


class PolicyConfig(Section):
    """The rules that decide, by name, each with a table of its parameters."""

    eviction: str = "lru"
    prefetch: str = "none"
    depth: str = "never"
    demand: Literal["resident", "staging"] = "resident"
    eviction_params: dict[str, Scalar] = {}
    prefetch_params: dict[str, Scalar] = {}
    depth_params: dict[str, Scalar] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_depth(cls, data: Any) -> Any:
        # One spelling for one thing, or equal runs would have different identities.
        if not isinstance(data, dict):
            return data
        text, given = str(data.get("depth")), data.get("depth_params")
        if text == "fixed" and isinstance(given, dict) and given.get("depth") == 0:
            text = "0"
        if re.fullmatch(r"[+-]\d+|[+-]?\d*\.\d*", text) or len(text) > 80:
            raise ValueError(f"depth must be a whole number or a policy, got {text[:80]}")
        if not text.isdecimal():
            return data
        if int(text) == 0:
            return data | {"depth": "never", "depth_params": {}}
        return data | {"depth": "fixed", "depth_params": {"depth": int(text)}}


class RunConfig(Section):
    """Everything that determines one simulated run."""

    preset: str | None = Field(None, description="a complete system; explicit keys win over it")
    model: str = Field("tiny-moe", min_length=1)
    trace: TraceConfig = TraceConfig()
    machine: MachineConfig = MachineConfig()
    memory: MemoryConfig = MemoryConfig()
    experts: ExpertsConfig = ExpertsConfig()
    policy: PolicyConfig = PolicyConfig()


def build(*layers: Mapping[str, Any]) -> RunConfig:
    """The configuration of tables laid over one another, the last on top.

    A layer that names a preset gets its overrides just below its own keys. A layer that names
    another policy drops the parameters that lower layers gave to the old one. Raises UsageError.
    """
    merged: Table = {}
    for layer in layers:
        _check_tables(layer)
        for part in (_preset_of(layer), layer):
            merged = _lay_over(merged, part)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_one_line(error)) from None


def load_table(path: Path) -> Table:
    """The tables of a TOML file. Raises UsageError with the file's name and the reason."""
    refuse_irregular(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of texts that are not UTF-8, and of endless integers
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if _nested(table) > MOST_NESTED:
        raise UsageError(f"{path}: its tables are nested more than {MOST_NESTED} deep")
    return table


def _nested(value: Any, depth: int = 0) -> int:
    """How deep tables and lists are nested, told no further than is allowed."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not inner or depth > MOST_NESTED:
        return depth
    return max(_nested(entry, depth + 1) for entry in inner)


def parse_settings(settings: Iterable[str]) -> Table:
    """One layer from `a.b=c` texts. A value is read as TOML where it can be, else as plain text."""
    table: Table = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip() or "\n" in setting:
            raise UsageError(f"{shown(setting)} is not a setting: write it like memory.slots=12")
        put(table, key.strip(), parse_value(text.strip()))
    return table


def parse_value(text: str) -> Any:
    """A TOML scalar, array or inline table; whatever is none of these is text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError, KeyError):
        return text
    if _nested(value) > MOST_NESTED:
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def put(table: Table, dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested tables. Raises UsageError when `a` or `a.b` is no table."""
    *parents, last = dotted.split(".")
    if len(parents) >= MOST_NESTED:
        raise UsageError(f"unknown key {shown(dotted)}: keys have at most three parts")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UsageError(f'"{dotted}" needs "{parent}" to be a table')
    table[last] = value


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested tables; an empty table disappears."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> Table:
    """The inverse of `flatten`."""
    table: Table = {}
    for dotted, value in flat.items():
        put(table, dotted, value)
    return table


def resolved(config: RunConfig) -> Table:
    """The whole configuration as plain JSON values in base units, defaults written out."""
    return config.model_dump(mode="json")


def content_hash(config: RunConfig, *context: str) -> str:
    """Identity of a configuration, and of the `context` it ran in, as 16 hexadecimal digits."""
    text = json.dumps([resolved(config), *context], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_toml(config: RunConfig) -> str:
    """A TOML file that `build` reads back to an equal configuration."""
    return tomli_w.dumps(_without_none(resolved(config)))


def known_keys() -> dict[str, Any]:
    """Every dotted key that has a type of its own, with its field; parameter tables left out."""
    keys: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            keys[name] = field
        else:
            keys |= {f"{name}.{key}": inner for key, inner in section.model_fields.items()}
    return keys


def check_key(dotted: str) -> None:
    """Raise UsageError with the nearest name unless `dotted` is a key a value can be given to."""
    table, _, _ = dotted.rpartition(".")
    keys = known_keys()
    if (dotted in keys and not dotted.endswith("_params")) or table.endswith("_params"):
        return
    if any(key.startswith(f"{dotted}.") for key in keys) or dotted in keys:
        example = next((key for key in keys if key.startswith(f"{dotted}.")), f"{dotted}.NAME")
        raise UsageError(f'"{dotted}" is a table: name one of its keys, like {example}')
    raise UsageError(f'unknown key "{dotted}": {_nearest_key(dotted)}')


def is_integer_key(dotted: str) -> bool:
    """Whether only whole numbers can be given to this key."""
    field = known_keys().get(dotted)
    if field is None:
        return False
    kinds = set(get_args(field.annotation)) or {field.annotation}
    return kinds <= {int, type(None)}


def _section(annotation: Any) -> type[Section] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None


def _preset_of(layer: Mapping[str, Any]) -> Table:
    name = layer.get("preset")
    if name is None or name == "none":
        return {}
    from specter_sim.presets import PRESETS  # only here: most configurations name no preset

    if not isinstance(name, str):
        raise UsageError(f"preset: should be the name of one, got {shown(name)}")
    if name not in PRESETS:
        raise UsageError(f'unknown preset "{name}": {suggestion(str(name), PRESETS)}')
    return nest(PRESETS[name].overrides)


def _check_tables(layer: Mapping[str, Any]) -> None:
    """A layer above must not cover up that a layer below has no table where one belongs."""
    for name, field in RunConfig.model_fields.items():
        value = layer.get(name)
        if value is not None and _section(field.annotation) and not isinstance(value, Mapping):
            raise UsageError(f"{name}: should be a table, got {shown(value)}")


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = _lay_over(_without_stale(under, value), value)
        else:
            merged[key] = value
    return merged


def _without_stale(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    """Drop what the layer above makes meaningless: an old policy's parameters, the other limit."""
    rules = PolicyConfig.model_fields
    stale = {
        f"{name}_params"
        for name in above
        if name in rules and above[name] != below.get(name, rules[name].default)
    }
    given = [key for key in LIMITS if above.get(key) not in (None, "none")]
    if len(given) == 1:
        stale |= set(LIMITS) - set(given)
    return {key: value for key, value in below.items() if key not in stale}


def _without_none(table: Table, path: str = "") -> Table:
    kept: Table = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if value or not path:
                kept[key] = _without_none(value, f"{path}{key}.")
        elif value is not None:
            kept[key] = value
        elif known_keys()[f"{path}{key}"].default is not None:
            kept[key] = "none"
    return kept


def _one_line(error: ValidationError) -> str:
    first, *others = (_describe(details) for details in error.errors())
    return first if not others else f"{first} (and {len(others)} more)"


def _describe(details: ErrorDetails) -> str:
    dotted = ".".join(str(part) for part in details["loc"] if not _is_branch(part))
    if details["type"] == "extra_forbidden" and dotted in known_keys():
        return f'"{dotted}" is in quotes, which makes it one name: write it without'
    if details["type"] == "extra_forbidden":
        return f'unknown key "{dotted}": {_nearest_key(dotted)}'
    message = details["msg"].removeprefix("Value error, ")
    message = message.removeprefix("Input ").removeprefix("String ")
    if details["type"] == "value_error":
        return f"{dotted}: {message}"
    if details["type"] == "model_type":
        message = "should be a table"
    return f"{dotted}: {message}, got {shown(details['input'])}"


def _is_branch(part: int | str) -> bool:
    # pydantic adds the tried branch of a union ("int", "literal[2,3]") to the location.
    return isinstance(part, str) and part in {"bool", "int", "float", "str"}


def _nearest_key(dotted: str) -> str:
    keys = list(known_keys())
    parent, _, leaf = dotted.rpartition(".")
    siblings = [key for key in keys if key.startswith(f"{parent}.")] or list(RunConfig.model_fields)
    same_leaf = (key for key in keys if key.rpartition(".")[2] == leaf)
    close = next(same_leaf, None) or nearest(dotted, siblings) or nearest(dotted, keys)
    return f'did you mean "{close}"?' if close else f"known: {', '.join(siblings)}"
