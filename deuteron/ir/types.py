"""What is known of a tensor before it exists: element type, shape, strides, layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import index

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, dtype

Shape = tuple[int, ...]
MOST = 2**60  # at most so many elements in a tensor, so that 64 bits can count its bytes


@lru_cache(maxsize=65536)
def strides_for(shape: Shape, layout: str) -> Shape:
    """Dense strides of ``shape`` in ``layout``: "contiguous" (row-major) or "nhwc".

    "nhwc" keeps dimension 0 outermost and puts dimension 1 (channels) innermost, for any
    rank from 3 to 5: NWC, NHWC and NDHWC.
    """
    if layout == "contiguous":
        order = list(range(len(shape)))
    elif layout == "nhwc":
        if not 3 <= len(shape) <= 5:
            wrong = f"layout 'nhwc' needs rank 3, 4 or 5, not {len(shape)}"
            asked = f"shape {list(shape)} in layout 'nhwc'"
            raise GraphError(wrong, asked=asked, remedy="use layout='contiguous'")
        order = [0, *range(2, len(shape)), 1]
    else:
        remedy = "use 'contiguous', 'nhwc' or give strides"
        raise GraphError(f"unknown layout {layout!r}", remedy=remedy)
    return _packed(shape, order)


def _packed(shape: Shape, order: Sequence[int]) -> Shape:
    """Strides without gaps, with the dimensions in this order from outermost to innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides with which the same memory has the shape ``new``, or None if there are none."""
    if 0 in shape:
        return strides_for(new, "contiguous")
    blocks: list[tuple[int, int]] = []  # runs of dimensions that one stride walks through
    for size, stride in zip(shape, strides, strict=True):
        if blocks and blocks[-1][1] == size * stride and size != 1:
            blocks[-1] = (blocks[-1][0] * size, stride)
        elif size != 1:
            blocks.append((size, stride))
    out, left, step = [1] * len(new), 1, 1
    for dim in reversed(range(len(new))):
        if new[dim] != 1:
            if left == 1:
                left, step = blocks.pop()
            if left % new[dim]:
                return None
            out[dim], step, left = step, step * new[dim], left // new[dim]
    return tuple(out)


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two stride lists address the same elements: dims of size 1 do not matter."""
    if a == b or 0 in shape:
        return True
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)


def _whole(what: str, numbers: Sequence[int]) -> Shape:
    try:
        return tuple(index(n) for n in numbers)
    except TypeError:
        raise GraphError(f"{what} {numbers!r} must be a list of whole numbers") from None


@dataclass(frozen=True)
class TensorType:
    """Element type, shape and strides (in elements). Prints as ``f16[32,64,56,56]@nhwc``."""

    shape: Shape
    dtype: DType
    strides: Shape

    @staticmethod
    def of(
        shape: Sequence[int],
        dt: DType | torch.dtype | str,
        layout: str = "contiguous",
        strides: Sequence[int] | None = None,
    ) -> TensorType:
        """Build a type from a shape, an element type and a layout name or explicit strides."""
        sizes = _whole("shape", shape)
        if any(s < 0 for s in sizes):
            remedy = "sizes are fixed and at least 0; -1 is only allowed in reshape"
            raise GraphError(f"negative size in shape {list(sizes)}", remedy=remedy)
        if prod(sizes) > MOST:
            wrong = f"shape {list(sizes)} has more elements than 64 bits can count"
            raise GraphError(wrong, remedy="use smaller sizes")
        if strides is None:
            return TensorType(sizes, dtype(dt), strides_for(sizes, layout))
        given = _whole("strides", strides)
        if len(given) != len(sizes):
            wrong = f"{len(given)} strides for {len(sizes)} dimensions"
            asked = f"shape {list(sizes)}, strides {list(given)}"
            raise GraphError(wrong, asked=asked, remedy="give one per dimension, in elements")
        if any(s < 0 for s in given):
            wrong = f"negative stride in {list(given)}"
            raise GraphError(wrong, remedy="flip the tensor with flip() instead")
        return TensorType(sizes, dtype(dt), given)

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(tensor.shape), dtype(tensor.dtype), tuple(tensor.stride()))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the distinct elements: a dimension of stride 0 is stored once."""
        count = prod(n for n, s in zip(self.shape, self.strides, strict=True) if s != 0)
        return self.dtype.nbytes(count if self.numel else 0)

    @cached_property
    def layout(self) -> str:
        """ "contiguous", "nhwc", or "strided". A tensor that is both counts as contiguous."""
        return next((name for name in ("contiguous", "nhwc") if self.is_layout(name)), "strided")

    def is_layout(self, name: str) -> bool:
        """Whether the memory order is ``name`` (both may hold, as for N×C×1×1)."""
        if name == "nhwc" and not 3 <= self.rank <= 5:
            return False
        return same_strides(self.shape, self.strides, strides_for(self.shape, name))

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements fill one block of memory without gaps or overlap."""
        step = 1
        dims = sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n != 1)
        for stride, size in dims:
            if stride != step:
                return self.numel == 0
            step *= size
        return True

    @cached_property
    def storage_numel(self) -> int:
        """Elements from the first to the last one addressed, gaps included."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @cached_property
    def line(self) -> int | None:
        """The distance in elements from the beginning of one row (along the last dimension) to the
        next, if it is the same for all rows and the elements of a row are adjacent; else None."""
        if not self.rank:
            return None
        wide = self.shape[-1]
        step = next(
            (s for n, s in zip(self.shape[-2::-1], self.strides[-2::-1], strict=True) if n > 1),
            wide,
        )
        rows = TensorType((*self.shape[:-1], step), self.dtype, self.strides)
        return step if step >= wide and rows.is_layout("contiguous") else None

    def with_layout(self, layout: str) -> TensorType:
        return replace(self, strides=strides_for(self.shape, layout))

    def with_dtype(self, dt: DType) -> TensorType:
        return replace(self, dtype=dt)

    def dense_like(self, shape: Shape | None = None, dt: DType | None = None) -> TensorType:
        """A dense type for a result computed elementwise from this one.

        Keeps the order of dimensions in memory when the shape is the same (as torch does),
        else falls back to nhwc for nhwc inputs of the same rank, else contiguous.
        """
        shape, dt = self.shape if shape is None else shape, dt or self.dtype
        if shape == self.shape and self.is_dense:
            return TensorType(shape, dt, self.strides)
        if len(shape) == self.rank and self.layout == "nhwc":
            return TensorType(shape, dt, strides_for(shape, "nhwc"))
        if shape == self.shape and 0 not in self.strides and self.numel:
            order = sorted(range(self.rank), key=lambda d: (-self.strides[d], d))
            return TensorType(shape, dt, _packed(shape, order))
        return TensorType(shape, dt, strides_for(shape, "contiguous"))

    def __str__(self) -> str:
        base = f"{self.dtype.short}[{','.join(map(str, self.shape))}]"
        if self.layout != "strided" and self.strides == strides_for(self.shape, self.layout):
            return base + ("@nhwc" if self.layout == "nhwc" else "")
        return base + "{" + ",".join(map(str, self.strides)) + "}"
