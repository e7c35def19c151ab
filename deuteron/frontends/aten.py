"""The table of ATen calls that we can write in our own operators: overload name → entry.

A call that is not here, or that cannot be written for the arguments at hand, stays an ATen call. To
teach Deuteron another one, add an entry to the file it belongs in: :mod:`aten_math` (arithmetic,
activations, reductions), :mod:`aten_shape` (movement, indexing, constants), :mod:`aten_nn`
(products, convolution, normalisation, attention, losses, pooling, resampling), :mod:`aten_grad`
(what autograd writes) or :mod:`aten_collective` (collectives); :mod:`aten_site` says what an entry
gets.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from deuteron.frontends import aten_collective, aten_grad, aten_math, aten_nn, aten_shape
from deuteron.frontends.aten_site import Entry, Inexpressible, Site

V = TypeVar("V")
PARTS = (aten_math, aten_shape, aten_nn, aten_grad)


def _by_name(rows: Mapping[str, V]) -> dict[str, V]:
    """A row may name several calls; give each its own row."""
    return {f"aten.{name}": value for names, value in rows.items() for name in names.split()}


TABLE: dict[str, Entry] = {k: v for part in PARTS for k, v in _by_name(part.TABLE).items()}
TABLE |= {f"_c10d_functional.{name}": entry for name, entry in aten_collective.TABLE.items()}
FILLS = _by_name(aten_shape.FILLS)
# Calls that only check something, or state something about a size, and compute nothing.
_SILENT = """_assert_tensor_metadata.default _assert_async.default _assert_async.msg
    _assert_scalar.default _functional_assert_async.msg _functional_assert_scalar.default
    _linalg_check_errors.default
    sym_constrain_range.default sym_constrain_range_for_size.default"""
SILENT = _by_name({_SILENT: None})


def schema_order(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in the order of its schema, defaults filled in."""
    full = []
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            full.append(args[i])
        elif argument.name in kwargs:
            full.append(kwargs[argument.name])
        else:
            full.append(argument.default_value)
    return full


__all__ = ["FILLS", "SILENT", "TABLE", "Entry", "Inexpressible", "Site", "schema_order"]
