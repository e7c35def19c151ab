"""What norms of channels compute for a few elements, whichever way these lie in memory: in
``channel_norm.py`` all lanes belong to one channel, in ``channels_last_norm.py`` each to its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deuteron.codegen.llvm import F32, I32, Code, Value, lanes_of, width
from deuteron.codegen.llvm_compute import inline
from deuteron.kernels.cpu.stored import Stored
from deuteron.ops.formula import trace_gradient, trace_op

POINTERS = (
    "x",
    "grad",
    "weight",
    "bias",
    "residual",
    "y",
    "extra",
    "mean",
    "rstd",
    "running_mean",
    "running_var",
    "dx",
    "dz",
    "dweight",
    "dbias",
    "new_mean",
    "new_var",
)


STEPS = frozenset({"relu", "relu6", "leaky_relu"})  # whose gradients hang on a sign


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the types of x, of the parameters and of running statistics,
    whether segments have weights of their own (a group's), which activation follows, which tensors
    there are, the types of dweight and dbias, and leaky_relu's slope."""

    stored: str
    param: str
    running: str
    grouped: bool
    act: str
    given: frozenset[str]
    of_weight: str = "f32"
    of_bias: str = "f32"
    slope: float = 0.0

    @property
    def attrs(self) -> dict[str, float]:
        """Of the activation."""
        return {"negative_slope": self.slope} if self.act == "leaky_relu" else {}

    @property
    def name(self) -> str:
        kind = f"{self.stored} {self.param} {self.running} {self.grouped} {self.act} {self.slope}"
        made = f"{self.of_weight} {self.of_bias}"
        return f"{kind} {sorted(self.given)} {made} of {width()}"


class Tensors:
    """The operands of a kernel, and what is done with a few elements of them, whichever way they
    lie: numbers of a channel are the same in every lane, or each lane has its own."""

    def __init__(self, c: Code, form: Form, words: Value, numbers: Sequence[str]) -> None:
        self.c, self.form = c, form
        self.of, self.param = Stored(c, form.stored), Stored(c, form.param)
        self.at = {name: c.pointer(words, k) for k, name in enumerate(POINTERS)}
        given = {name: c.word(words, len(POINTERS) + k) for k, name in enumerate(numbers)}
        for name in ("eps", "momentum"):
            given[name] = c.b.bitcast(c.b.trunc(given[name], I32), F32)
        self.n = given
        self.parts = c.pointer(words, len(POINTERS) + len(numbers))

    def has(self, name: str) -> bool:
        return name in self.form.given

    def load(self, name: str, at: Value, i: Value, lanes: int) -> Value:
        return self.of.load(self.of.at(self.at[name], at, i), lanes)

    def store(self, value: Value, name: str, at: Value, i: Value) -> None:
        self.of.store(value, self.of.at(self.at[name], at, i))

    def number(self, name: str, at: Value, otherwise: float, lanes: int = 1) -> Value:
        """A parameter of a channel, or of as many as there are lanes."""
        if not self.has(name):
            return self.c.f(otherwise, lanes)
        return self.param.load(self.param.at(self.at[name], at), lanes)

    def root(self, variance: Value) -> Value:
        """1/√(variance + eps); nan where squares overflowed, and not a result that is the bias."""
        c, lanes = self.c, lanes_of(variance)
        root = c.intrinsic("sqrt", c.b.fadd(variance, self.of.lanes(self.n["eps"], lanes)))
        infinite = c.b.fcmp_ordered("==", variance, c.f(math.inf, lanes))
        return c.b.select(infinite, c.f(math.nan, lanes), c.b.fdiv(c.f(1.0, lanes), root))

    def keep(self, channel: Value, mean: Value, variance: Value, rstd: Value, count: Value) -> None:
        """The statistics that somebody reads, from the channel on."""
        c, lanes = self.c, lanes_of(mean)
        for name, value in (("mean", mean), ("rstd", rstd)):
            if self.has(name):
                c.store(value, c.at(self.at[name], channel))
        spread = c.b.fdiv(count, c.b.fsub(count, c.f(1.0)))
        self._move("mean", channel, mean)
        self._move("var", channel, c.b.fmul(variance, self.of.lanes(spread, lanes)))

    def _move(self, what: str, channel: Value, found: Value) -> None:
        """The new running statistic: the old one on its way to what was found. Two products, as in
        torch: one of their difference would round small numbers away beside large old ones."""
        c, new, old, lanes = self.c, f"new_{what}", f"running_{what}", lanes_of(found)
        of = Stored(c, self.form.running)
        if self.has(old):
            before = of.load(of.at(self.at[old], channel), lanes)
            share = of.lanes(self.n["momentum"], lanes)
            kept = c.b.fmul(c.b.fsub(c.f(1.0, lanes), share), before)
            found = c.fma(share, found, kept)
        if self.has(new):
            of.store(found, of.at(self.at[new], channel))

    def affine(self, channel: Value, rest: Value, rstd: Value) -> tuple[Value, Value]:
        """What a distance from the mean is multiplied by, and what is added then."""
        c, lanes = self.c, lanes_of(rstd)
        scale = c.b.fmul(rstd, self.number("weight", channel, 1.0, lanes))
        shift = self.number("bias", channel, 0.0, lanes)
        if self.form.act not in STEPS or self.has("residual"):
            # for nothing; elsewhere the gradient finds relu's signs by the mean as it is stored
            shift = c.fma(c.b.fneg(rest), scale, shift)
        return scale, shift

    def before(
        self, at: Value, i: Value, lanes: int, mean: Value, scale: Value, shift: Value
    ) -> Value:
        """(x − mean) · scale + shift, the same forward and backward."""
        c, wide = self.c, self.of.lanes
        d = c.b.fsub(self.load("x", at, i, lanes), wide(mean, lanes))
        return c.fma(d, wide(scale, lanes), wide(shift, lanes))

    def finish(self, z: Value, at: Value, i: Value) -> None:
        """The result from what the norm gave."""
        c, lanes = self.c, lanes_of(z)
        if self.has("residual"):
            z = c.b.fadd(z, self.load("residual", at, i, lanes))
        if self.form.act != "none":
            z = inline(c, trace_op(self.form.act, self.form.attrs), z)
        self.store(z, "y", at, i)

    def dz(
        self, at: Value, i: Value, lanes: int, mean: Value, rstd: Value, weight: Value, bias: Value
    ) -> Value:
        """The gradient before the activation."""
        c = self.c
        g = self.load("grad", at, i, lanes)
        if self.form.act == "none":
            return g
        if self.has("y"):
            z = self.load("y", at, i, lanes)
        else:
            z = self.before(at, i, lanes, mean, c.b.fmul(rstd, weight), bias)
            if self.has("residual"):
                z = c.b.fadd(z, self.load("residual", at, i, lanes))
        # the result has the sign of z where that is all that the slope depends on
        return inline(c, trace_gradient(self.form.act, self.form.attrs), g, z, z)

    def hat(
        self, at: Value, i: Value, lanes: int, mean: Value, rstd: Value, shift: Value | None = None
    ) -> Value:
        """(x − mean) · rstd; ``shift`` is what a mean that was rounded is off by, times −rstd."""
        if shift is not None:
            return self.before(at, i, lanes, mean, rstd, shift)
        c, wide = self.c, self.of.lanes
        d = c.b.fsub(self.load("x", at, i, lanes), wide(mean, lanes))
        return c.b.fmul(d, wide(rstd, lanes))

    def give(
        self,
        dz: Value,
        hat: Value,
        at: Value,
        i: Value,
        rstd: Value,
        weight: Value,
        level: Value,
        slope: Value,
    ) -> None:
        """dx, where somebody reads it."""
        c, lanes, wide = self.c, lanes_of(dz), self.of.lanes
        if not self.has("dx"):
            return
        rest = c.b.fsub(c.b.fmul(dz, wide(weight, lanes)), wide(level, lanes))
        rest = c.fma(c.b.fneg(hat), wide(slope, lanes), rest)
        out = c.b.fmul(rest, wide(rstd, lanes))
        if self.has("extra"):
            out = c.b.fadd(out, self.load("extra", at, i, lanes))
        self.store(out, "dx", at, i)
