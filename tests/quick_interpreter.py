"""Triton's interpreter without what it does again and again.

Measured on our kernels, four fifths of its time went into four things that have nothing to do with
what a kernel computes. They are replaced here by the same thing done once, or done in numpy:

- every call of a jitted function patches the whole language anew (a third of the time);
- every sum and product of integers is checked for overflow by eight operations, the result of
  which is looked at in debug mode only;
- a type of a block is made and named for each operation, and shapes are wrapped number by number;
- values of equal shapes are broadcast to each other, because a list is compared with a tuple.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti


def install() -> None:
    """For the rest of this process, which must have no kernels to compile."""
    _patch_the_language_once()
    _skip_checks_without_result()
    _keep_types()
    _leave_equal_types_alone()


def _patch_the_language_once() -> None:
    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inside = getattr(member, "__wrapped__", member)  # without asking whether this is a kernel

        def call(*args: Any, _semantic: Any = None, **more: Any) -> Any:
            return inside(*args, _semantic=ti.interpreter_semantic, **more)

        scope.set_attr(obj, name, call)

    def kernel() -> None: ...

    ti._patch_attr = patch
    ti._patch_lang(type(kernel)(kernel.__code__, {"tl": tl, "core": core}))
    nothing = ti._LangPatchScope()
    ti._patch_lang = lambda fn: nothing


def _skip_checks_without_result() -> None:
    ti.interpreter_builder.options = replace(ti.InterpreterOptions(), sanitize_overflow=False)


def _keep_types() -> None:
    """One record per type of block, with the shape and the size that tensors of that type have."""
    make_block, number = core.block_type.__init__, core.constexpr
    blocks: dict[Any, dict[str, Any]] = {}
    of_scalars = core.tuple([]), number(1)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [n.value if isinstance(n, number) else n for n in shape]
        key = element_ty.name, *sizes
        if key not in blocks:
            make_block(self, element_ty, sizes)
            blocks[key] = self.__dict__ | {
                "sizes": sizes,
                "of_tensors": (core.tuple([number(n) for n in sizes]), number(self.numel)),
            }
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    of_scalar, in_numpy = ti._get_np_dtype, {}

    def numpy_type(type: Any) -> np.dtype[Any]:
        scalar = type.scalar
        if scalar.name not in in_numpy:
            in_numpy[scalar.name] = of_scalar(scalar)
        return in_numpy[scalar.name]

    ti._get_np_dtype = numpy_type
    core.dtype.sizes = None
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor


def _leave_equal_types_alone() -> None:
    """Two numbers of one type and shape go into an operation as they are."""
    agree, broadcast = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
    )
    plain = {"fp32", "fp64", "int32", "int64"}

    def agreed(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> tuple[Any, Any]:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            kind = lhs.dtype.name
            if kind in plain and kind == rhs.dtype.name and lhs.type.sizes == rhs.type.sizes:
                return lhs, rhs
        return agree(self, lhs, rhs, *how, **more)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.type.sizes == rhs.type.sizes else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = agreed
    TritonSemantic.broadcast_impl_value = broadcasted
