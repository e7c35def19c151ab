"""Triton's interpreter without what it does again and again.

Measured on our kernels, four fifths of its time went into things that have nothing to do with what
a kernel computes. They are replaced here by the same thing done once, or done in numpy:

- every call of a jitted function patches the whole language anew (a third of the time);
- every sum and product of integers is checked for overflow by eight operations, the result of
  which is looked at in debug mode only;
- a type of a block is made and named for each operation, and shapes are wrapped number by number;
- values of equal shapes are broadcast to each other, because a list is compared with a tuple;
- what an operation is given is searched for lists, tuples and numbers known ahead, one test each;
- the source of a kernel is read twice, and walked through twice more to number its lines.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti

ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {"__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater}
COMPARISONS |= {"__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal}


def install() -> None:
    """For the rest of this process, which must have no kernels to compile."""
    _patch_the_language_once()
    _skip_checks_without_result()
    _keep_types()
    _leave_equal_types_alone()
    _hand_over_what_is_plain()
    _read_sources_once()


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
    """Two numbers of one type go into an operation as they are, stretched to one shape by numpy;
    one that Python knows takes the type and the shape of the other."""
    agree = TritonSemantic.binary_op_type_checking_impl
    numbers = {"fp32": (int, float), "fp64": (int, float), "int32": (int,), "int64": (int,)}
    known: dict[Any, Any] = {}
    shapes: dict[Any, tuple[int, ...]] = {}

    def agreed(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> tuple[Any, Any]:
        if fits(lhs, rhs):
            return lhs, written(rhs, lhs.type)
        if fits(rhs, lhs):
            return written(lhs, rhs.type), rhs
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            kind = lhs.dtype.name
            if kind in numbers and kind == rhs.dtype.name:
                return broadcasted(self, lhs, rhs)
        return agree(self, lhs, rhs, *how, **more)

    def fits(x: Any, value: Any) -> bool:
        """Whether a number of Python's takes the type of a tensor."""
        kind = type(value)
        if (kind is not int and kind is not float) or not isinstance(x, core.tensor):
            return False
        return kind in numbers.get(x.dtype.name, ()) and abs(value) < 2**31

    def written(value: float, of: Any) -> Any:
        """A number as a tensor of a type; zero has no sign there."""
        key = value, of.name
        if key not in known:
            data = np.full(of.sizes or 1, value or 0, ti._get_np_dtype(of))
            known[key] = core.tensor(ti.TensorHandle(data, of.scalar), of)
        return known[key]

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.sizes == rhs.type.sizes:
            return lhs, rhs
        both = tuple(lhs.type.sizes or ()), tuple(rhs.type.sizes or ())
        shape = shapes.get(both)
        if shape is None:
            shape = shapes[both] = np.broadcast_shapes(*both)
        return stretched(lhs, shape), stretched(rhs, shape)

    def stretched(x: Any, shape: tuple[int, ...]) -> Any:
        data = x.handle.data
        if data.shape == shape and x.type.sizes is not None:
            return x
        if x.type.sizes is None:
            made = np.full(shape, data, ti._get_np_dtype(x.dtype))
        else:
            made = np.broadcast_to(data, shape)
        return core.tensor(ti.TensorHandle(made, x.dtype), core.block_type(x.dtype, shape))

    TritonSemantic.binary_op_type_checking_impl = agreed
    TritonSemantic.broadcast_impl_value = broadcasted

    def at_once(op: Any, slow: Any, compares: bool) -> Any:
        """An operation of numbers of one type, as numpy has it."""

        def quick(x: Any, y: Any) -> Any:
            kind = x.dtype
            if fits(x, y):
                y = written(y, x.type)
            elif kind.name not in numbers or type(y) is not core.tensor or y.dtype != kind:
                return slow(x, y)
            data, scalar = op(x.handle.data, y.handle.data), core.int1 if compares else kind
            if x.type.sizes is None and y.type.sizes is None:
                return core.tensor(ti.TensorHandle(data, scalar), scalar)
            return core.tensor(ti.TensorHandle(data, scalar), core.block_type(scalar, data.shape))

        return quick

    for name, op in ARITHMETIC.items():
        setattr(core.tensor, name, at_once(op, getattr(core.tensor, name), False))
    for name, op in COMPARISONS.items():
        setattr(core.tensor, name, at_once(op, getattr(core.tensor, name), True))


def _hand_over_what_is_plain() -> None:
    unwrap, plain = core._unwrap_if_constexpr, {core.tensor, int, float, type(None), core.dtype}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and not isinstance(dtype, core.pointer_type):
            assert 8 * data.itemsize <= dtype.primitive_bitwidth, (data.dtype, dtype)

    core._unwrap_if_constexpr = unwrapped
    ti.TensorHandle.__init__ = handle


class _Assigned(ti.ASTTransformer):
    def visit_Assign(self, node: ast.Assign) -> Any:
        call: Any = super().visit_Assign(node).value
        for new in (call, call.func, call.func.value, call.args[1]):
            ast.copy_location(new, node)
        return node


def _read_sources_once() -> None:
    def rewritten(self: Any) -> Any:
        try:
            lines, first = inspect.getsourcelines(self.fn)
        except (OSError, TypeError):  # generated, and in no file
            return self.fn
        self.filename, self.def_lineno = self.fn.__code__.co_filename, self._find_def(lines)
        above = "\n" * (first + self.def_lineno - 2)
        parsed = ast.parse(above + self._prepare_source(lines))
        return self._compile_and_exec(_Assigned().visit(parsed))

    ti.FunctionRewriter.rewrite_ast = rewritten
