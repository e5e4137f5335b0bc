"""Your own policies: rules in plain Python, named ``module:attribute`` in a configuration.

The module is an installed one or a file in the current folder. The attribute is a rule as the
catalogue's are (an eviction key ``(state, index) -> number``, a ``PrefetchRule``, a
``DepthRule``), or its entry (``EvictionInfo``, ``PrefetchInfo``, ``DepthInfo``) where it has
parameters or needs. Own rules run interpreted, so only on the SimPy engine.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from specter_sim.policies.catalogue import DepthInfo, EvictionInfo, PolicyInfo, PrefetchInfo
from specter_sim.policies.depth import DepthRule
from specter_sim.policies.prefetch import PrefetchRule
from specter_traces.errors import SpecterError, UsageError

P = TypeVar("P", bound=PolicyInfo)
SUMMARY = "your own, in plain Python"
ALLOWED_NEEDS = frozenset({"gate", "paired"})
_PACKAGE = str(Path(__file__).parents[1])


def is_own(name: str) -> bool:
    """Whether a policy's name means one of the user's own."""
    return ":" in name


def own_eviction(name: str) -> EvictionInfo:
    """The eviction policy ``module:attribute``. Raises UsageError when there is none."""
    found = _imported(name)
    if callable(found) and not isinstance(found, type):
        found = EvictionInfo(name, SUMMARY, rule=found)
    wanted = "a function (state, index) -> number or an EvictionInfo"
    info = _checked(name, found, EvictionInfo, wanted)
    return replace(info, rule=_guarded(name, info.rule, _number))


def own_prefetch(name: str) -> PrefetchInfo:
    """The prefetch policy ``module:attribute``. Raises UsageError when there is none."""
    found = _imported(name)
    if isinstance(found, PrefetchRule):
        found = PrefetchInfo(name, SUMMARY, rule=found)
    info = _checked(name, found, PrefetchInfo, "a PrefetchRule or a PrefetchInfo")
    moments: dict[str, Any] = {
        moment.name: _guarded(name, function)
        for moment in fields(info.rule)
        if callable(function := getattr(info.rule, moment.name))
    }
    return replace(info, rule=replace(info.rule, **moments))


def own_depth(name: str) -> DepthInfo:
    """The depth policy ``module:attribute``. Raises UsageError when there is none."""
    found = _imported(name)
    if isinstance(found, DepthRule):
        found = DepthInfo(name, SUMMARY, rule=found)
    info = _checked(name, found, DepthInfo, "a DepthRule or a DepthInfo")
    rule = DepthRule(_guarded_choice(name, info.rule.choose), _guarded(name, info.rule.ended))
    return replace(info, rule=rule, needs=info.needs | {"paired"})


def source_of(name: str) -> Path | None:
    """The file an own policy comes from, where it is one."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return Path(file) if file else None


def _imported(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise UsageError(f'"{name}" names no policy: write your own like my_module:my_rule')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here never hides an installed module
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"policy {name}: cannot import {module_name} ({_told(error)}): it must be installed, "
            f"or be a file in {here}"
        ) from error
    if not hasattr(module, attribute):
        raise UsageError(f"policy {name}: {module_name} has no {attribute}")
    return getattr(module, attribute)


def _checked(name: str, found: Any, kind: type[P], wanted: str) -> P:
    if not isinstance(found, kind):
        raise UsageError(f"policy {name} must be {wanted}, got {type(found).__name__}")
    if found.needs - ALLOWED_NEEDS:
        asked, allowed = ", ".join(sorted(found.needs)), ", ".join(sorted(ALLOWED_NEEDS))
        raise UsageError(f"policy {name} needs {asked}: an own policy can only be given {allowed}")
    return replace(found, name=name)


def _guarded(
    name: str, rule: Callable[..., Any], checked: Callable[[Any], Any] = lambda answer: answer
) -> Callable[..., Any]:
    """The rule; what it raises, and an answer that is none, become one line."""

    @functools.wraps(rule)
    def call(*arguments: Any) -> Any:
        try:
            return checked(rule(*arguments))
        except SpecterError:
            raise
        except Exception as error:
            raise SpecterError(f"policy {name} failed: {_told(error)}{_place(error)}") from error

    return call


def _guarded_choice(name: str, choose: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    """The rule's choice, which must be a depth that the text allows."""

    def chosen(m: Any, limit: int) -> int:
        depth = operator.index(choose(m, limit))
        if not 0 <= depth <= limit:
            raise ValueError(f"it chose depth {depth} where 0 to {limit} are possible")
        return depth

    return _guarded(name, chosen)


def _number(key: Any) -> float:
    number = float(key)
    if math.isnan(number):
        raise ValueError("it returned nan, which is neither more nor less than any other key")
    return number


def _told(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code, in brackets."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    return f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own else ""
