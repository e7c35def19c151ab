"""What an entry of the ATen table works with: a place to write to, and a way to say no.

An entry is a function ``entry(site, *arguments)``. The arguments are those of the ATen schema, all
of them, in the schema's order: tensors as :class:`~deuteron.ops.emit.Sym`, everything else as the
plain Python value. ``site.given`` has them by the schema's names. The entry emits operators through
the site and returns one Sym, or a tuple with one Sym per result of the call. None stands for a
result it cannot give; results may also be left out at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import DType, dtype
from deuteron.ir.types import TensorType
from deuteron.ops.emit import Ops, Sym

Entry = Callable[..., Any]
Number = bool | int | float
# Activations with settings: which arguments of the call are attributes of our operator.
SETTINGS = {
    "leaky_relu": "negative_slope",
    "gelu": "approximate",
    "hardtanh": "min_val:min max_val:max",
    "celu": "alpha",
    "softplus": "beta threshold",
    "softshrink": "lambd",
    "hardshrink": "lambd",
    "threshold": "threshold value",
    "glu": "dim:axis",
}


class Inexpressible(Exception):
    """Our operators cannot express this call; it stays an ATen call. The message says why."""


class Site(Ops):
    """:class:`Ops` for one call, with what torch says about the call's results.

    * ``want``: the type of each result (None where it is no tensor we know). Shapes that torch has
      worked out already, such as those of ``view`` or ``squeeze``, are taken from here.
    * ``used``: which results the rest of the graph reads; the others need not be made.
    * ``given``: the arguments of the call, by the names of the ATen schema.
    * ``norms``: the eps of each norm so far, by the names of its x and of its 1/√(var + eps).
    * ``row_major``: whether the first argument was row-major in memory, as torch saw it.
    * ``losses``: for each gradient of log-probabilities so far, by name: the log-probabilities, and
      the other arguments of the loss."""

    def __init__(
        self,
        build: GraphBuilder,
        source: str = "",
        want: Sequence[TensorType | None] = (),
        used: frozenset[int] = frozenset({0}),
        given: Mapping[str, Any] | None = None,
        norms: dict[tuple[str, str], float] | None = None,
        losses: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(build, source)
        self.want, self.used = tuple(want), used
        self.given = given or {}
        self.norms = {} if norms is None else norms
        self.losses = {} if losses is None else losses
        self.row_major = False

    @property
    def out(self) -> TensorType:
        """The type torch gives the first result."""
        first = self.want[0]
        if first is None:
            self.refuse("its first result is no tensor")
        return first

    def refuse(self, why: str) -> NoReturn:
        raise Inexpressible(why)

    def need(self, holds: bool, why: str) -> Any:
        """Return the site if ``holds``; else refuse the call. ``why`` says what stands in the
        way."""
        if not holds:
            self.refuse(why)
        return self

    def settings(self, names: str) -> dict[str, Any]:
        """Arguments of the call as attributes, as far as the call has them. ``names`` are names of
        the ATen schema, with ours behind a colon where it differs: "kernel_size:kernel stride
        padding"."""
        pairs = (word.partition(":") for word in names.split())
        return {ours or name: self.given[name] for name, _, ours in pairs if name in self.given}

    def window(self) -> dict[str, Any]:
        """The attributes of a pool's windows; an empty stride in ATen stands for the windows'
        size."""
        window = "kernel_size:kernel stride padding dilation"
        how = self.settings(f"{window} ceil_mode count_include_pad divisor_override:divisor")
        return how | {"stride": how["stride"] or None}

    def loss_settings(self) -> dict[str, Any]:
        how = {"reduction": ("none", "mean", "sum")[self.given["reduction"]]}
        return how | self.settings("ignore_index label_smoothing")

    # ---- numbers and constants

    def literal(self, value: Number, dt: DType) -> Sym:
        """A number as a rank-0 constant of exactly this element type."""
        try:
            return self.constant(torch.tensor(value, dtype=dt.torch))
        except RuntimeError:
            self.refuse(f"{value} is beyond {dt.torch}")

    def operand(self, value: Sym | Number, like: Sym) -> Sym:
        """``value`` as a tensor to compute with ``like``; numbers promote as PyTorch's do.

        Beside a tensor of rank 1 or more a rank-0 constant takes no part in promotion within
        its category. Beside a rank-0 tensor it would, and a Python number must not.
        """
        if isinstance(value, Sym):
            return value
        if like.rank:
            return self.number(value, like.dtype)
        joined = torch.result_type(torch.empty((), dtype=like.dtype.torch), value)
        return self.literal(value, dtype(joined))

    def scaled(self, x: Sym | Number, factor: Number) -> Any:
        """factor · x, with no node for a factor of 1."""
        if factor == 1 and not isinstance(factor, bool):
            return x
        return self.mul(*self.pair(x, factor)) if isinstance(x, Sym) else x * factor

    def pair(self, x: Sym | Number, y: Sym | Number) -> tuple[Sym, Sym]:
        """Both operands of a binary operation as tensors; one at least is a tensor already."""
        if isinstance(x, Sym):
            return x, self.operand(y, x)
        assert isinstance(y, Sym), "an ATen call between two numbers"
        return self.operand(x, y), y

    # ---- shapes and types

    def shaped(self, x: Sym, shape: Sequence[int] | None = None) -> Sym:
        """``x`` in another shape, by default that of the first result; no node if it has it
        already."""
        new = self.out.shape if shape is None else tuple(shape)
        return x if x.shape == new else self.reshape(x, shape=new)

    def stretched(self, x: Sym, shape: Sequence[int] | None = None) -> Sym:
        """``x`` expanded to a shape, by default that of the first result."""
        new = self.out.shape if shape is None else tuple(shape)
        return x if x.shape == new else self.expand(x, shape=new)

    def typed(self, x: Sym, dt: torch.dtype | None = None) -> Sym:
        """``x`` cast to ``dt``, if one is given: the ``dtype=`` of reductions and softmax."""
        return x if dt is None else self.to(x, dtype(dt))

    def wanted(self, x: Sym, index: int = 0) -> Sym:
        """``x`` in the element type that torch says a result has, by default the first one."""
        want = self.want[index]
        return x if want is None else self.to(x, want.dtype)

    def laid_out(self, x: Sym, memory_format: torch.memory_format | int | None) -> Sym:
        """``x`` copied into a memory order, unless it is in it already. A call that does not name
        an order passes the default of its schema: None, or 0 for row-major order."""
        if memory_format is None or memory_format == torch.preserve_format:
            return x
        layout = "contiguous" if memory_format in (torch.contiguous_format, 0) else "nhwc"
        if x.type.is_layout(layout):
            return x
        return self.to_layout(x, layout=layout)  # type: ignore[no-any-return]

    def part(self, x: Sym, axis: int, start: int, stop: int, step: int = 1) -> Sym:
        """``x[start:stop:step]`` along one axis, with no node where that is all of it."""
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        return self.slice(x, axis=axis, start=start, stop=stop, step=step)  # type: ignore[no-any-return]

    def batched(self, x: Sym, spatial: int) -> Sym:
        """``x`` with a batch dimension, which torch lets single images go without."""
        return self.shaped(x, (1, *x.shape)) if x.rank == spatial + 1 else x

    def join(self, xs: Sequence[Sym], axis: int) -> Sym:
        """The tensors one after another; empty ones are left out where something remains."""
        filled = [x for x in xs if x.shape[axis]] or list(xs[:1])
        return filled[0] if len(filled) == 1 else self.concat(filled, axis=axis)


def axis_of(dim: int, rank: int) -> int:
    """A dimension counted from 0; a scalar counts as having one."""
    return dim % max(rank, 1)
