"""The table of operators: name → OpDef, and inference by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from deuteron.errors import GraphError
from deuteron.ir.graph import Attrs
from deuteron.ir.types import TensorType
from deuteron.ops.opdef import OpDef

TABLE: dict[str, OpDef] = {}


def add(op: OpDef) -> OpDef:
    """Put an operator into the table; a name can be taken once."""
    if not (op.name.isascii() and op.name.isidentifier()):
        wrong = f"{op.name!r} cannot name an operator"
        remedy = "use letters, digits and underscores: it becomes a method of dt.Graph"
        raise GraphError(wrong, asked=f"register_op({op.name!r})", remedy=remedy)
    if op.name in TABLE and TABLE[op.name] is not op:
        wrong = f"an operator named {op.name!r} exists already"
        raise GraphError(wrong, asked=f"register_op({op.name!r})", remedy="choose another name")
    TABLE[op.name] = op
    _infer.cache_clear()
    return op


def get(name: str) -> OpDef:
    """The operator called ``name``, or an error that lists the nearest names."""
    op = TABLE.get(name)
    if op is None:
        near = difflib.get_close_matches(name, TABLE, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see deuteron.ops.TABLE"
        wrong = f"there is no operator {name!r}"
        raise GraphError(wrong, remedy=f"{hint} Add your own with register_op()")
    return op


@lru_cache(maxsize=65536)
def _infer(
    name: str, types: tuple[TensorType | None, ...], attrs: Attrs
) -> tuple[Attrs, tuple[TensorType, ...]]:
    op = get(name)
    op.check_arity(len(types))
    if not op.variadic:
        types = types + (None,) * (len(op.inputs) - len(types))
    for slot, type_ in zip(op.inputs, types, strict=False):
        if type_ is None and not slot.endswith("?"):
            raise GraphError(f"{name} needs its input {slot.lstrip('*')!r}")
    _refuse_foreign(op, types)
    full = op.normalise(attrs)
    full = full if op.complete is None else op.complete(types, full)
    result = op.infer(*types, **full)
    results = result if isinstance(result, tuple) else (result,)
    _refuse_foreign(op, results)
    return Attrs(full), results


# operators that never look at elements: calls of torch's own, and collectives
HANDED_ON = ("aten", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _refuse_foreign(op: OpDef, types: Sequence[TensorType | None]) -> None:
    """Raise if an operator, other than those HANDED_ON names, reads or makes an element type that
    only torch computes with."""
    found = next((t for t in types if t is not None and t.dtype.is_foreign), None)
    if found is not None and op.name not in HANDED_ON:
        wrong = f"{op.name} does not compute with {found.dtype.name}"
        raise GraphError(wrong, remedy="keep to real numbers, and to integers of other types")


def infer(
    op: str, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]
) -> tuple[Attrs, tuple[TensorType, ...]]:
    """Return canonical attributes and the types of the results; answers are cached."""
    return _infer(op, tuple(inputs), attrs if isinstance(attrs, Attrs) else Attrs(attrs))


infer.cache_clear = _infer.cache_clear  # type: ignore[attr-defined]
