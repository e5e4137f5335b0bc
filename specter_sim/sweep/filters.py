"""The filter language of sweep files: Python-like conditions over dotted keys.

`memory.slots >= 8 and policy.depth != "never"`. Comparisons, `and`, `or`, `not`, `in`, arithmetic,
numbers, texts and lists; nothing else, and no code is ever executed. A text compared with a number
is read as a quantity: `machine.link_bandwidth >= "8 GB/s"`. An absent value is neither more nor
less than anything.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from specter_sim.names import suggestion
from specter_sim.units import parse_quantity
from specter_traces.errors import UsageError, shown

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ORDERS = {ast.Lt, ast.LtE, ast.Gt, ast.GtE}


class Filter:
    """A condition on the dotted keys of a configuration. Building it checks the language."""

    def __init__(self, text: str) -> None:
        self.text = text
        if not isinstance(text, str):
            raise UsageError(f"a filter is a text like 'memory.slots >= 8', got {shown(text)}")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._error("it is not a condition; write it like memory.slots >= 8") from None

    def accepts(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition holds. Raises UsageError on an unknown key or a senseless step."""
        try:
            return bool(self._evaluate(self._tree, values))
        except RecursionError:
            raise self._error("it is nested too deeply") from None
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise self._error(str(error)) from None

    def _evaluate(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.Name() | ast.Attribute():
                return self._look_up(node, values)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._evaluate(item, values) for item in items]
            case ast.BoolOp(op=ast.And()):
                return all(self._evaluate(part, values) for part in node.values)
            case ast.BoolOp(op=ast.Or()):
                return any(self._evaluate(part, values) for part in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self._evaluate(node.operand, values)
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate(node.operand, values)
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                return self._calculate(node, values)
            case ast.Compare():
                return self._compare(node, values)
        raise self._error(f"{ast.unparse(node)!r} is not part of the filter language")

    def _calculate(self, node: ast.BinOp, values: Mapping[str, Any]) -> Any:
        left, right = self._evaluate(node.left, values), self._evaluate(node.right, values)
        if isinstance(left, str | list) or isinstance(right, str | list):
            raise self._error(f"{ast.unparse(node)!r} calculates with something that is no number")
        return _ARITHMETIC[type(node.op)](left, right)

    def _compare(self, node: ast.Compare, values: Mapping[str, Any]) -> bool:
        left = self._evaluate(node.left, values)
        for op, term in zip(node.ops, node.comparators, strict=True):
            right = self._evaluate(term, values)
            compare = _COMPARISONS.get(type(op))
            if compare is None:
                raise self._error(f"{ast.unparse(node)!r} is not part of the filter language")
            if type(op) in _ORDERS and (left is None or right is None):
                return False
            if not compare(*_alike(left, right)):
                return False
            left = right
        return True

    def _look_up(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        dotted = ast.unparse(node)
        if dotted in values:
            return values[dotted]
        parent = dotted.rpartition(".")[0]
        if parent.endswith("_params"):
            return None  # a parameter that this policy does not have
        if dotted in {"true", "false"}:
            return dotted == "true"
        raise self._error(f'unknown key "{dotted}": {suggestion(dotted, values)}')

    def _error(self, reason: str) -> UsageError:
        return UsageError(f"filter {shown(self.text)}: {reason}")


def _alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Read the text of a text-number pair as a quantity, where it is one."""
    if isinstance(left, str) and _is_number(right):
        return _quantity_or_text(left), right
    if isinstance(right, str) and _is_number(left):
        return left, _quantity_or_text(right)
    return left, right


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quantity_or_text(text: str) -> float | str:
    try:
        return parse_quantity(text)
    except UsageError:
        return text
