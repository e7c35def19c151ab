"""Programs of scores (``ops/score_program.py``) as Triton functions that attention's kernels call.

Each is a function of s (a mask has none), b, h, i, j and the three tensors that may be captured.
Whole numbers have 32 bits. An element of a captured tensor is loaded from where it lies: positions
below 0 count from the end, and one that is not in the tensor reads as nan, or as 0 if the tensor
holds no floats, and so do those of queries and keys that only fill up a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen.scalar import needed
from deuteron.codegen.triton_load import functions
from deuteron.codegen.triton_math import Arithmetic
from deuteron.codegen.triton_render import HEAD
from deuteron.ir.types import TensorType
from deuteron.ops.formula import Compute, Const, Scalar, ScalarOps, Scalars
from deuteron.ops.score_program import INPUTS, NEAR, READS, program

TENSORS = tuple(f"t{i}" for i in range(READS))


@dataclass
class _Math(Arithmetic):
    """Arithmetic with whole numbers of 32 bits, and with elements of tensors."""

    tensors: Sequence[TensorType | None] = ()

    def type(self, kind: str) -> str:
        return "tl.int32" if kind == "int" else super().type(kind)

    def literal(self, c: Const, bare: bool = True) -> str:
        """A number as text that Gluon knows, too."""
        return super().literal(c, bare).replace("tl.full((), ", "tl.cast(")

    def _read(self, s: Compute, args: Sequence[str]) -> str:
        (_, at), *_ = s.attrs
        t = self.tensors[at]
        assert t is not None
        place, inside = list[str](), list[str]()
        wide = sum((n - 1) * step for n, step in zip(t.shape, t.strides, strict=True)) >= 1 << 31
        for arg, n, step in zip(args, t.shape, t.strides, strict=True):
            own = arg in INPUTS  # those are never below 0
            low, turned = (
                ("0", arg) if own else (f"{-n}", f"tl.where({arg} < 0, {arg} + {n}, {arg})")
            )
            inside.append(f"({arg} >= {low}) & ({arg} < {n})")
            place.append(f"{turned}{'.to(tl.int64)' if wide else ''} * {step}")
        other = 'float("nan")' if s.kind == "float" else "0"
        value = f"tl.load(t{at})"
        if args:
            where, mask = " + ".join(place), " & ".join(inside)
            value = f"tl.load(t{at} + ({where}), mask={mask}, other={other})"
        return f"({value} != 0)" if s.kind == "bool" else f"{value}.to({self.type(s.kind)})"


def score_functions(
    score: str, mask: str, tensors: Sequence[TensorType | None], back: bool, longest: int
) -> tuple[Any, Any, Any]:
    """Return the Triton functions of a score, of its derivative where a gradient is computed, and
    of a mask; None for what is absent. ``longest``: queries or keys, with those that fill up a
    block."""

    def made(text: str, kind: str) -> Any:
        return functions(source(text, tensors, kind, longest < NEAR))["formula"] if text else None

    return made(score, "score"), made(score if back else "", "slope"), made(mask, "mask")


def source(text: str, tensors: Sequence[TensorType | None], kind: str, near: bool = False) -> str:
    """The source of a Triton function ``formula``: of a "score", its "slope", or a "mask";
    ``near``: places are below NEAR."""
    found, scalars = program(text), Scalars()
    scalars.kinds = dict.fromkeys(INPUTS, "int") | {"s": "float"}
    b = ScalarOps(scalars)

    def read(at: int, places: Sequence[Any]) -> Scalar:
        t = tensors[at]
        assert t is not None
        of = "float" if t.dtype.is_float else "bool" if t.dtype.kind == "bool" else "int"
        return Scalar(scalars, scalars.op("read", *places, kind=of, attrs=(("tensor", at),)))

    given = {name: Scalar(scalars, name) for name in INPUTS}
    values = found.values(b, given, read, near=near)
    result = values[found.result]
    if kind == "slope":
        result = found.slope(b, values, Scalar(scalars, Const(1.0, "float")))
    ref = _ref(result)
    math = _Math(False, False, tensors=tensors)
    lines = [f"    {s.name} = {math.compute(s, str)}\n" for s in needed(scalars.statements, [ref])]
    out = ref if isinstance(ref, str) else math.literal(ref, bare=False)
    names = (*INPUTS[kind == "mask" :], *TENSORS)
    head = f"@triton.jit\ndef formula({', '.join(names)}):\n"
    return "\n\n".join((HEAD, *math.helpers(), f"{head}{''.join(lines)}    return {out}\n"))


def _ref(value: Any) -> Any:
    if isinstance(value, Scalar):
        return value.ref
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return value if isinstance(value, str | Const) else Const(value, kind)
