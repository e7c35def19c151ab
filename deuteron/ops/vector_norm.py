"""(Σ |x|ᵖ)^(1/p) out of other operators: the norm of vectors, in graphs and functions alike."""

from __future__ import annotations

import math

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops.checks import norm_axes
from deuteron.ops.emit import Ops, Sym


def vector_norm(b: Ops, x: Sym, p: float, axes: tuple[int, ...] | None, keepdim: bool) -> Sym:
    """Along ``axes``; of p = ±inf the largest or smallest |x|, of 0 how many elements are not 0.
    Powers of 16-bit numbers, which overflow soon, are those of float32."""
    if not x.dtype.is_float:
        wrong = f"norm of {x.dtype.name} is not defined"
        raise GraphError(wrong, remedy='cast first: cast(x, dtype="f32")')
    along = {"axes": axes, "keepdim": keepdim}
    wide = b.upcast(x)
    if p < 0.0 or p == math.inf:
        _check_filled(x.type, p, axes)
    if math.isinf(p):
        y = b.one("max" if p > 0 else "min", b.abs(wide), **along)
    elif p == 0.0:
        y = b.one("sum", b.to(b.one("ne", wide, 0.0), wide.dtype), **along)
    elif p == 1.0:
        y = b.one("sum", b.abs(wide), **along)
    elif p == 2.0:
        y = _rooted(b, b.sum(b.square(wide), **along), 2.0)
    else:
        zero = b.one("eq", wide, 0.0)
        powers = b.pow(b.where(zero, 1.0, b.abs(wide)), p)
        y = _rooted(b, b.sum(b.where(zero, 0.0 if p > 0 else math.inf, powers), **along), p)
    return b.to(y, x.dtype)


def _check_filled(x: TensorType, p: float, axes: tuple[int, ...] | None) -> None:
    """Of no elements a sum is 0; the root of a sum that is 0 for p below 0, or the largest of none,
    is nothing."""
    for axis in norm_axes(axes, x.rank):
        if x.shape[axis] == 0:
            raise GraphError(
                f"the {p:g}-norm over axis {axis} of {list(x.shape)}, an empty one, has no answer",
                remedy="reduce over other axes, leave empty tensors out, or a finite p from 0 on",
            )


def _rooted(b: Ops, total: Sym, p: float) -> Sym:
    """total^(1/p), with a slope of 0 at 0, where there is none, as torch has it: else the gradient
    of a row of zeros would be nan."""
    zero = b.one("eq", total, 0.0)
    safe = b.where(zero, 1.0, total)
    root = b.sqrt(safe) if p == 2.0 else b.pow(safe, 1.0 / p)
    return b.one("where", zero, 0.0, root)
