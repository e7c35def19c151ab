"""Writing operations: handles with arithmetic, and one method per operator.

Gradient rules, rewrite rules and ``dt.Graph`` all write graphs through :class:`Ops`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import DType, dtype
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops import table
from deuteron.ops.formula import Value
from deuteron.ops.opdef import OpDef


class Sym(Value):
    """A value in a graph under construction. Supports ``+ - * / ** @`` and comparisons."""

    __slots__ = ("name", "ops")

    def __init__(self, ops: Ops, name: str) -> None:
        self.ops, self.name = ops, name

    @property
    def type(self) -> TensorType:
        return self.ops.build.types[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return self.type.rank

    def output(self, name: str | None = None) -> Sym:
        """Make this value an output of the graph, under ``name``."""
        self.ops.build.output(name or self.name, self.name)
        return self

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"

    def __bool__(self) -> bool:
        wrong = f"%{self.name} has no value while the graph is being built"
        asked = "a truth value"
        raise GraphError(wrong, asked=asked, remedy="use where(condition, a, b) instead of if")

    def apply(self, op: str, *args: Any) -> Any:
        return self.ops.call(op, *args)

    def __matmul__(self, other: Sym) -> Any:
        return self.ops.call("matmul", self, other)


class Ops:
    """Emits operations into a GraphBuilder and hands back :class:`Sym` handles.

    Every operator of the table is a method: ``ops.relu(x)``, ``ops.conv(x, w, padding=1)``.
    Python numbers may stand for tensors; they take part in type promotion as in PyTorch.
    """

    def __init__(self, build: GraphBuilder, source: str = "") -> None:
        self.build, self.source = build, source

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in table.TABLE:
            near = difflib.get_close_matches(name, table.TABLE, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise AttributeError(f"there is no operator {name!r}{hint} register_op() adds your own")
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def laid_as(self, x: Sym, want: TensorType) -> Sym:
        """``x`` in the memory order of ``want``, copied unless it has that order already. If
        ``want`` has elements that share memory or gaps between them, the result has neither."""
        if same_strides(x.shape, x.type.strides, want.strides):
            return x
        if want.layout != "strided":
            return self.one("to_layout", x, layout=want.layout)
        seen = torch.empty_strided(want.shape, want.strides, device="meta")
        strides = torch.empty_like(seen).stride()  # a dimension of stride 0 keeps its place
        order = sorted(range(x.rank), key=lambda d: (-strides[d], d))
        back = sorted(range(x.rank), key=lambda d: order[d])
        turned = self.one("permute", x, dims=tuple(order))
        return self.one(
            "permute", self.one("to_layout", turned, layout="contiguous"), dims=tuple(back)
        )

    def sym(self, value: str) -> Sym:
        return Sym(self, value)

    def constant(self, data: torch.Tensor | float | int | bool, name: str = "const") -> Sym:
        """A tensor whose values are known now."""
        tensor = data if isinstance(data, torch.Tensor) else torch.tensor(data)
        return Sym(self, self.build.constant(tensor, name))

    def number(self, value: float | int | bool, like: DType, scalar: bool = False) -> Sym:
        """A Python number as a rank-0 constant that does not widen ``like``.

        Among tensors it is kept in float64, which promotion ignores and no engine rounds; beside
        operands of rank 0 only (``scalar``), where promotion would notice, it takes their type.
        """
        whole = isinstance(value, int)
        if isinstance(value, bool):
            kind: torch.dtype | None = torch.bool
        elif scalar and (like.is_float or (whole and like.kind != "bool")):
            kind = like.torch
        elif whole:
            kind = torch.float64 if like.is_float else torch.int64
        else:
            kind = torch.float64 if like.is_float else torch.float32
        return Sym(self, self.build.constant(torch.tensor(value, dtype=kind)))

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Emit operator ``name``: inputs first, then attributes, by position or keyword."""
        inputs, attrs = bind(table.get(name), args, kwargs)
        syms = [v.type for v in inputs if isinstance(v, Sym)]
        # bool inputs, such as the condition of where, do not decide the type of the result
        voting = [t for t in syms if t.dtype.kind != "bool"] or syms
        kinds = [t.dtype for t in voting] or [dtype("f32")]
        like = next((dt for dt in kinds if dt.is_float), kinds[0])
        scalar = all(t.rank == 0 for t in voting if t.dtype.is_float == like.is_float)
        values: list[str | None] = []
        for slot, value in enumerate(inputs):
            if value is None:
                values.append(None)
            elif isinstance(value, Sym):
                if value.ops.build is not self.build:
                    wrong = f"input {slot} of {name} (%{value.name}) belongs to another graph"
                    raise GraphError(wrong, remedy="use handles of the graph you are building")
                values.append(value.name)
            elif isinstance(value, bool | int | float):
                values.append(self.number(value, like, scalar and bool(syms)).name)
            elif isinstance(value, torch.Tensor):
                values.append(self.build.constant(value))
            else:
                wrong = f"input {slot} of {name} is a {type(value).__name__}"
                remedy = "give a handle from this graph, a tensor or a number"
                raise GraphError(wrong, remedy=remedy)
        while values and values[-1] is None:
            values.pop()
        outs = self.build.emit(name, values, attrs, source=self.source)
        results = tuple(Sym(self, out) for out in outs)
        return results[0] if len(results) == 1 else results

    def one(self, name: str, *args: Any, **kwargs: Any) -> Sym:
        """:meth:`call` for an operator with a single result."""
        result = self.call(name, *args, **kwargs)
        assert isinstance(result, Sym)
        return result

    # ---- small conveniences for gradient and rewrite rules

    def upcast(self, x: Sym) -> Sym:
        """``x`` in float32 if its type is narrower: sums are never kept in 16 bits."""
        return self.one("cast", x, dtype="f32") if x.dtype.is_low else x

    def to(self, x: Sym, dt: DType) -> Sym:
        return x if x.dtype == dt else self.one("cast", x, dtype=dt.short)

    def unbroadcast(self, grad: Sym, like: TensorType) -> Sym:
        """Sum ``grad`` down to the shape it was broadcast from, and give it that dtype."""
        lead = grad.rank - like.rank
        grown = (d for d, size in enumerate(like.shape, lead) if size == 1 and grad.shape[d] != 1)
        axes = (*range(lead), *grown)
        grad = self.call("sum", grad, axes=axes, keepdim=False) if axes else grad
        if grad.shape != like.shape:
            grad = self.call("reshape", grad, shape=like.shape)
        return self.to(grad, like.dtype)

    def zeros(self, like: TensorType) -> Sym:
        """A tensor of zeros of the given type, stored as one element and expanded."""
        zero = self.constant(torch.zeros((), dtype=like.dtype.torch))
        return self.one("expand", zero, shape=like.shape)


def bind(op: OpDef, args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Sort positional and keyword arguments into inputs and attributes of ``op``."""
    slots = [name.strip("*?") for name in op.inputs]
    attrs = list(op.attrs)
    if op.variadic:
        listed = bool(args) and isinstance(args[0], list | tuple)
        inputs, extra = list(args[0] if listed else args), list(args[1:] if listed else ())
    else:
        inputs, extra = list(args[: len(slots)]), list(args[len(slots) :])
    # a positional attribute may follow directly where optional inputs are left out
    while not op.variadic and len(inputs) > op.required and not isinstance(inputs[-1], OPERANDS):
        extra.insert(0, inputs.pop())
    if len(extra) > len(attrs):
        raise GraphError(f"{op.name} takes at most {len(slots) + len(attrs)} arguments")
    given = dict(zip(attrs, extra, strict=False))
    for name, value in named.items():
        if name in slots and not op.variadic:
            index = slots.index(name)
            if index < len(inputs) and inputs[index] is not None:
                raise GraphError(f"{op.name} was given its input {name!r} twice")
            inputs.extend([None] * (index + 1 - len(inputs)))
            inputs[index] = value
        elif name in given:
            raise GraphError(f"{op.name} was given its attribute {name!r} twice")
        else:
            given[name] = value
    return inputs, given


OPERANDS = Sym | torch.Tensor | int | float | None
Syms = Sequence[Any]  # the inputs of a node: handles, and None for an input left out
Grads = list[Sym | None]
