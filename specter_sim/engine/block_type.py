"""The block as numba sees it: a pointer whose attributes are loads from its cells."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from specter_sim.engine.block import FIELDS, PLACES, Cell

_I64 = ir.IntType(64)
_NUMBA_TYPES = {
    Cell.INT: types.int64,
    Cell.FLOAT: types.float64,
    Cell.INTS: types.CPointer(types.int64),
    Cell.FLOATS: types.CPointer(types.float64),
    Cell.BYTES: types.CPointer(types.int8),
    Cell.SHORTS: types.CPointer(types.int16),
    Cell.WORDS: types.CPointer(types.int32),
}
_ELEMENTS = {
    Cell.INTS: _I64,
    Cell.FLOATS: ir.DoubleType(),
    Cell.BYTES: ir.IntType(8),
    Cell.SHORTS: ir.IntType(16),
    Cell.WORDS: ir.IntType(32),
}


class BlockType(types.Type):
    """The address of a block's cells."""

    def __init__(self) -> None:
        super().__init__(name="SpecterBlock")


block_type = BlockType()


@register_model(BlockType)
class BlockModel(models.PrimitiveModel):  # type: ignore[misc]
    """Represented as a pointer to 8-byte cells."""

    def __init__(self, manager: Any, block: BlockType) -> None:
        super().__init__(manager, block, _I64.as_pointer())


@infer_getattr
class BlockAttributes(AttributeTemplate):
    """Every field is an attribute of its cell's type."""

    key = BlockType

    def generic_resolve(self, ty: Any, attr: Any) -> Any:  # type: ignore[override]
        """The type of a field, None for a name that is none."""
        return _NUMBA_TYPES[FIELDS[attr]] if attr in FIELDS else None


@lower_getattr_generic(BlockType)
def load_field(context: Any, builder: Any, block: BlockType, value: Any, name: str) -> Any:
    """Load a cell. Cells never change during a run, which lets the compiler load each once."""
    kind = FIELDS[name]
    cell = builder.load(builder.gep(value, [ir.Constant(_I64, PLACES[name])]))
    cell.set_metadata("invariant.load", builder.module.add_metadata([]))
    if kind is Cell.INT:
        return cell
    if kind is Cell.FLOAT:
        return builder.bitcast(cell, ir.DoubleType())
    return builder.inttoptr(cell, _ELEMENTS[kind].as_pointer())


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _as_block(typing_context: Any, address: Any) -> Any:
    """The block at an address."""

    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _I64.as_pointer())

    return block_type(types.int64), cast


# To a type checker an intrinsic is called with its typing context, which compiled code does not
# pass.
block_at: Any = _as_block
