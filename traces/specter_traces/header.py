"""The JSON header of a trace: what was recorded, from which model, by what."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from specter_traces.errors import SpecterError, printable

SCHEMA_VERSION = 1
METADATA_KEY = "specter"


class Decoding(StrEnum):
    """How the text of a trace was chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    TEXT = "text"
    """An existing text was followed, not written by the target."""
    UNKNOWN = "unknown"


class DraftKind(StrEnum):
    """How the draft's routed experts were made from the target's."""

    SYMMETRIC = "symmetric"
    """Group-wise symmetric integer quantization, stored beside the target."""
    BASE = "base"
    """The base of a coded expert: part of the target's own weights."""


@dataclass(frozen=True)
class DraftInfo:
    """The draft of a paired trace. `group_size` is weights per scale, 0 when there are none."""

    name: str
    bits: int
    kind: DraftKind = DraftKind.SYMMETRIC
    group_size: int = 0


@dataclass(frozen=True)
class SequenceInfo:
    """One sequence of a trace.

    `unrecorded_prompt_tokens` counts the tokens that came before its first recorded position.
    """

    name: str
    domain: str = ""
    unrecorded_prompt_tokens: int = 0


@dataclass(frozen=True)
class Header:
    """Everything a trace says about itself besides its columns.

    `sequences` has one entry per sequence or is empty, and so has `repetition`: the share of
    repeated 8-grams of tokens, 0 or 1 where a log gave only a flag, -1 where unknown.
    `content_hash` is the SHA-256 of the columns, empty for a view that was never saved.
    """

    name: str
    model: str
    num_layers: int
    num_experts: int
    top_k: int
    precision: str = ""
    source: str = ""
    licence: str = ""
    tokenizer_hash: str = ""
    content_hash: str = ""
    decoding: Decoding = Decoding.UNKNOWN
    synthetic: bool = False
    synthesized_from: str = ""
    draft: DraftInfo | None = None
    assumed_draft: bool = False
    sequences: tuple[SequenceInfo, ...] = ()
    repetition: tuple[float, ...] = ()
    created_by: str = ""
    notes: tuple[str, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)

    def to_json(self) -> str:
        """Return the header as one line of JSON, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @property
    def is_writable(self) -> bool:
        """Whether every text in it is valid Unicode: half a surrogate pair is not."""
        try:
            self.to_json().encode()
        except UnicodeEncodeError:
            return False
        return True

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Read `to_json`'s output. Raises SpecterError naming the field that does not fit."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecterError(f"the trace header is not JSON ({error}); record it again") from None
        if not isinstance(raw, dict):
            raise SpecterError(f"the trace header is a JSON object, got {type(raw).__name__}")
        _check_version(raw.get("schema_version"))
        return cls(**{name: _read(raw, name, kind) for name, kind in _required(raw).items()})

    @property
    def marks(self) -> tuple[str, ...]:
        """Words that must stand beside any figure made from this trace."""
        source = printable(self.synthesized_from)
        synthetic = f"synthetic (from {source})" if source else ""
        return tuple(
            mark
            for mark, applies in (
                (synthetic or "synthetic", self.synthetic),
                ("assumed draft", self.assumed_draft),
            )
            if applies
        )


def _check_version(version: object) -> None:
    if version != SCHEMA_VERSION:
        raise SpecterError(
            f"trace schema version {SCHEMA_VERSION} is read here, got {version!r}: "
            "use a matching version of specter"
        )


_COUNTS = frozenset({"num_layers", "num_experts", "top_k", "schema_version"})
_FLAGS = frozenset({"synthetic", "assumed_draft"})
_OBJECTS = frozenset({"draft", "sequences", "repetition", "notes", "decoding"})
_NEEDED = frozenset({"name", "model", "num_layers", "num_experts", "top_k"})


def _required(raw: dict[str, Any]) -> dict[str, type]:
    """Return the type of every field that `raw` gives, refusing unknown and missing ones."""
    known = {f.name for f in fields(Header)}
    unknown, missing = sorted(set(raw) - known), sorted(_NEEDED - set(raw))
    if unknown:
        raise SpecterError(f"unknown field {unknown[0]!r} in the trace header")
    if missing:
        raise SpecterError(f"the trace header has no {missing[0]!r}")
    return {name: _type_of(name) for name in raw}


def _type_of(name: str) -> type:
    if name in _COUNTS:
        return int
    if name in _FLAGS:
        return bool
    return object if name in _OBJECTS else str


def _read(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = raw[name]
    if kind is not object:
        if type(value) is not kind:
            raise SpecterError(
                f"trace header field {name!r}: expected {kind.__name__}, got {value!r:.60}"
            )
        return value
    try:
        return _read_object(name, value)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise SpecterError(f"trace header field {name!r} cannot be read: {value!r:.60}") from None


def _read_object(name: str, value: Any) -> object:
    if name == "draft":
        return None if value is None else _read_draft(value)
    if name == "sequences":
        return tuple(_read_sequence(entry) for entry in value)
    if name == "repetition":
        return tuple(float(entry) for entry in value)
    if name == "notes":
        return tuple(str(entry) for entry in value)
    return Decoding(value)


def _read_draft(value: dict[str, Any]) -> DraftInfo:
    plain = {**value, "kind": DraftKind(value.get("kind", "symmetric")), "bits": int(value["bits"])}
    return DraftInfo(**plain)


def _read_sequence(value: dict[str, Any]) -> SequenceInfo:
    info = SequenceInfo(**value)
    if type(info.unrecorded_prompt_tokens) is not int or not (
        isinstance(info.name, str) and isinstance(info.domain, str)
    ):
        raise ValueError(value)
    return info
