"""Update rules of optimisers, each written down once.

    SGD    g ← g + λ·p;  b ← μ·b + (1 − τ)·g;  p ← p − γ·(g + μ·b or b)
    Adam   m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²
           p ← (1 − γ·λ)·p − γ / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    Lion   p ← (1 − γ·λ)·p − γ·sign(β₁·m + (1 − β₁)·g);  m ← β₂·m + (1 − β₂)·g
    LAMB   u = Adam's quotient + λ·p;  p ← p − γ·(‖p‖ / ‖u‖)·u
    Adafactor, of vectors   v ← v + w·(g² − v);  u = g / √max(v, ε₁²);  p ← (1 − γ·λ)·p − pace·u

A rule is traced into a short list of statements. Four tables say what a statement means: to Python
(:data:`ON_NUMBERS`), to torch (:data:`ON_TENSORS`), to Triton and to LLVM (``optim.py`` in the
folders of their kernels). So every machine computes the same numbers, up to rounding.

An update reads and writes each tensor once. Bytes per element of fp32: SGD with momentum 20, Adam
28, amsgrad 36, Lion 20, LAMB 40 and Adafactor 28 (two norms lie between two passes); an average of
the parameters adds 8, and float32 master weights of 16-bit parameters add 6.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

Statement = tuple[str, str, tuple[Any, ...]]  # a name, an operation, names or numbers


class Term:
    """A value of a rule while it is traced."""

    def __init__(self, code: list[Statement], name: str) -> None:
        self.code, self.name = code, name

    def emit(self, op: str, *args: Any) -> Term:
        name = f"t{len(self.code)}"
        self.code.append((name, op, tuple(a.name if isinstance(a, Term) else a for a in args)))
        return Term(self.code, name)

    def __add__(self, other: Any) -> Term:
        return self.emit("add", self, other)

    def __sub__(self, other: Any) -> Term:
        return self.emit("sub", self, other)

    def __rsub__(self, other: Any) -> Term:
        return self.emit("sub", other, self)

    def __mul__(self, other: Any) -> Term:
        return self.emit("mul", self, other)

    def __truediv__(self, other: Any) -> Term:
        return self.emit("div", self, other)

    def __rtruediv__(self, other: Any) -> Term:
        return self.emit("div", other, self)

    def __pow__(self, other: Any) -> Term:
        return self.emit("power", self, other)

    def sqrt(self) -> Term:
        return self.emit("sqrt", self)

    def sign(self) -> Term:
        return self.emit("sign", self)

    def larger(self, other: Any) -> Term:
        return self.emit("max", self, other)

    def smaller(self, other: Any) -> Term:
        return self.emit("min", self, other)


ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "power": operator.pow,
    "sqrt": math.sqrt,
    "min": min,
}
ON_TENSORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "sqrt": torch.sqrt,
    "sign": torch.sign,
    "max": torch.maximum,
}


def evaluate(
    body: Sequence[Statement], values: dict[str, Any], table: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """``values`` with the result of every statement added, as ``table`` understands it."""
    for name, op, args in body:
        values[name] = table[op](*[values[a] if isinstance(a, str) else a for a in args])
    return values


@dataclass(frozen=True, eq=False)  # one object per rule: a step looks up its kernel by it
class Program:
    """What happens to one element of every tensor.

    ``roles`` are the tensors that are read, ``g`` the gradient; ``numbers`` are the same for a
    whole tensor. ``writes`` has (role, value); ``sums`` are added up over the tensor.
    """

    roles: tuple[str, ...]
    numbers: tuple[str, ...]
    body: tuple[Statement, ...]
    writes: tuple[tuple[str, str], ...]
    sums: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Roles whose old values count."""
        used = {a for _, _, args in self.body for a in args}
        return tuple(role for role in self.roles if role in used)


@dataclass(frozen=True)
class Numbers:
    """How the numbers of a step follow from a group's constants, its rate and the step count.

    Statements in float64: of Python where the count is on the host, else on the device.
    """

    constants: tuple[str, ...]
    body: tuple[Statement, ...]
    results: tuple[str, ...]

    @cached_property
    def _function(self) -> Callable[..., list[float]]:
        """The statements as one Python function: looking each of them up takes longer than a
        launch."""
        lines = [f"def numbers({', '.join((*self.constants, 'lr', 'step'))}):"]
        for name, op, args in self.body:
            given = ", ".join(a if isinstance(a, str) else repr(a) for a in args)
            lines.append(f"    {name} = _{op}({given})")
        lines.append(f"    return [{', '.join(self.results)}]")
        names: dict[str, Any] = {f"_{op}": fn for op, fn in ON_NUMBERS.items()}
        exec("\n".join(lines), names)
        function: Callable[..., list[float]] = names["numbers"]
        return function

    def on_host(self, constants: Sequence[float], lr: float, step: float) -> list[float]:
        return self._function(*constants, lr, step)


@dataclass(frozen=True)
class Rule:
    """One pass of an optimiser: what happens to an element, and the numbers it takes."""

    program: Program
    numbers: Numbers
    counts: bool = False  # whether the numbers depend on how many steps were made


def program(
    roles: Sequence[str], numbers: Sequence[str], update: Callable[..., Mapping[str, Term]]
) -> Program:
    """Trace ``update(role=…, number=…)``; its answer maps roles to values, and ``sum…`` to sums."""
    code: list[Statement] = []
    made = update(**{name: Term(code, name) for name in (*roles, *numbers)})
    writes = tuple((k, v.name) for k, v in made.items() if not k.startswith("sum"))
    sums = tuple(v.name for k, v in made.items() if k.startswith("sum"))
    return Program(tuple(roles), tuple(numbers), tuple(code), writes, sums)


def numbers(constants: Sequence[str], derive: Callable[..., Mapping[str, Term]]) -> Numbers:
    code: list[Statement] = []
    made = derive(**{name: Term(code, name) for name in (*constants, "lr", "step")})
    return Numbers(tuple(constants), tuple(code), tuple(v.name for v in made.values()))


@dataclass(frozen=True)
class Extras:
    """What may ride along with any rule."""

    master: bool = False  # float32 weights of 16-bit parameters
    ema: bool = False  # a moving average of the parameters

    @property
    def roles(self) -> tuple[str, ...]:
        return ("master",) * self.master + ("ema",) * self.ema

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("ema_rate",) * self.ema


NOTHING_ELSE = Extras()


def _with_extras(update: Callable[..., Mapping[str, Term]]) -> Callable[..., Any]:
    """The rule with its gradient scaled first, and what rides along done last."""

    def whole(p: Term, gscale: Term, **more: Term) -> Mapping[str, Term]:
        master, ema, rate = (more.pop(k, None) for k in ("master", "ema", "ema_rate"))
        if "g" in more:
            more["g"] = more["g"] * gscale
        made = dict(update(p=master or p, **more))
        if master is not None and "p" in made:
            made["master"] = made["p"]
        if ema is not None and "p" in made:
            made["ema"] = ema + rate * (made["p"] - ema)
        return made

    return whole


def _rule(
    roles: Sequence[str],
    names: Sequence[str],
    update: Callable[..., Mapping[str, Term]],
    of: Numbers,
    extras: Extras,
    counts: bool = False,
) -> Rule:
    scalars = ("gscale", *names, *extras.numbers)
    of = Numbers(
        ("gscale", *of.constants, *extras.numbers),
        of.body,
        ("gscale", *of.results, *extras.numbers),
    )
    return Rule(program((*roles, *extras.roles), scalars, _with_extras(update)), of, counts)


@lru_cache
def sgd(momentum: bool, nesterov: bool, decay: bool, extras: Extras = NOTHING_ELSE) -> Rule:
    def update(p: Term, g: Term, **x: Term) -> Mapping[str, Term]:
        d = g + x["decay"] * p if decay else g
        if not momentum:
            return {"p": p - x["lr"] * d}
        buf = x["momentum"] * x["buf"] + x["fresh"] * d
        return {"buf": buf, "p": p - x["lr"] * (d + x["momentum"] * buf if nesterov else buf)}

    names = ("lr", *(("decay",) if decay else ()), *(("momentum", "fresh") if momentum else ()))
    of = numbers(names[1:], lambda lr, step, **c: {"lr": lr, **c})
    return _rule(("p", "g") + ("buf",) * momentum, names, update, of, extras)


def _adam_moments(x: dict[str, Term], g: Term, amsgrad: bool) -> tuple[dict[str, Term], Term]:
    """The new state, and what the quotient divides by."""
    m = x["b1"] * x["m"] + x["c1"] * g
    v = x["b2"] * x["v"] + x["c2"] * (g * g)
    top = x["vmax"].larger(v) if amsgrad else v
    made = {"m": m, "v": v} | ({"vmax": top} if amsgrad else {})
    return made, top.sqrt() * x["root"] + x["eps"]


def _adam_numbers(decoupled: bool) -> Numbers:
    def derive(lr: Term, step: Term, b1: Term, b2: Term, eps: Term, decay: Term) -> Any:
        made = {
            "b1": b1,
            "c1": 1.0 - b1,
            "b2": b2,
            "c2": 1.0 - b2,
            "root": 1.0 / (1.0 - b2**step).sqrt(),
            "eps": eps,
            "size": lr / (1.0 - b1**step),
        }
        return made | ({"keep": 1.0 - lr * decay} if decoupled else {"decay": decay})

    return numbers(("b1", "b2", "eps", "decay"), derive)


_ADAM = ("b1", "c1", "b2", "c2", "root", "eps", "size")


@lru_cache
def adam(amsgrad: bool, decoupled: bool, decay: bool, extras: Extras = NOTHING_ELSE) -> Rule:
    def update(p: Term, g: Term, **x: Term) -> Mapping[str, Term]:
        if decay and not decoupled:
            g = g + x["decay"] * p
        made, below = _adam_moments(x, g, amsgrad)
        kept = x["keep"] * p if decoupled else p
        return made | {"p": kept - x["size"] * (made["m"] / below)}

    names = (*_ADAM, "keep" if decoupled else "decay")
    roles = ("p", "g", "m", "v", *(("vmax",) if amsgrad else ()))
    return _rule(roles, names, update, _adam_numbers(decoupled), extras, counts=True)


@lru_cache
def lion(extras: Extras = NOTHING_ELSE) -> Rule:
    def update(p: Term, g: Term, **x: Term) -> Mapping[str, Term]:
        step = (x["b1"] * x["m"] + x["c1"] * g).sign()
        m = x["b2"] * x["m"] + x["c2"] * g
        return {"m": m, "p": x["keep"] * p - x["lr"] * step}

    def derive(lr: Term, step: Term, b1: Term, b2: Term, decay: Term) -> Mapping[str, Term]:
        kept = {"lr": lr, "keep": 1.0 - lr * decay}
        return kept | {"b1": b1, "c1": 1.0 - b1, "b2": b2, "c2": 1.0 - b2}

    of = numbers(("b1", "b2", "decay"), derive)
    return _rule(("p", "g", "m"), ("lr", "keep", "b1", "c1", "b2", "c2"), update, of, extras)


def _lamb_numbers() -> Numbers:
    def derive(
        lr: Term, step: Term, b1: Term, b2: Term, eps: Term, decay: Term, ratio: Term
    ) -> Any:
        return {
            "b1": b1,
            "c1": 1.0 - b1,
            "b2": b2,
            "c2": 1.0 - b2,
            "root": 1.0 / (1.0 - b2**step).sqrt(),
            "eps": eps,
            "first": 1.0 / (1.0 - b1**step),
            "decay": decay,
            "lr": lr,
            "ratio": ratio,
        }

    return numbers(("b1", "b2", "eps", "decay", "ratio"), derive)


_LAMB = ("b1", "c1", "b2", "c2", "root", "eps", "first", "decay", "lr")


@lru_cache
def lamb_moments(extras: Extras = NOTHING_ELSE) -> Rule:
    """First pass: the moments, ‖p‖² and ‖u‖². Its numbers serve both passes."""

    def update(p: Term, g: Term, ratio: Term, lr: Term, **x: Term) -> Mapping[str, Term]:
        made, below = _adam_moments(x, g, False)
        u = x["first"] * made["m"] / below + x["decay"] * p
        return made | {"sum p": p * p, "sum u": u * u}

    return _rule(("p", "g", "m", "v"), (*_LAMB, "ratio"), update, _lamb_numbers(), extras, True)


@lru_cache
def lamb_apply(extras: Extras = NOTHING_ELSE) -> Rule:
    """Second pass: u again from the moments, times the ratio of the norms."""

    def update(p: Term, m: Term, v: Term, lr: Term, ratio: Term, **x: Term) -> Mapping[str, Term]:
        u = x["first"] * m / (v.sqrt() * x["root"] + x["eps"]) + x["decay"] * p
        return {"p": p - lr * (ratio * u)}

    return _rule(("p", "m", "v"), (*_LAMB, "ratio"), update, _lamb_numbers(), extras, True)


def _factor_numbers() -> Numbers:
    def derive(
        lr: Term, step: Term, power: Term, eps1: Term, eps2: Term, d: Term, decay: Term, pace: Term
    ) -> Any:
        return {
            "weight": step**power,
            "rho": lr.smaller(1.0 / step.sqrt()),
            "keep": 1.0 - lr * decay,
            "eps1": eps1,
            "eps2": eps2,
            "d": d,
            "pace": pace,
        }

    return numbers(("power", "eps1", "eps2", "d", "decay", "pace"), derive)


_FACTOR = ("weight", "rho", "keep", "eps1", "eps2", "d", "pace")


@lru_cache
def factor_moments(extras: Extras = NOTHING_ELSE) -> Rule:
    """Adafactor of vectors, first pass: the moment, ‖p‖² and ‖u‖². Its numbers serve the second
    pass too, and the passes over matrices."""

    def update(p: Term, g: Term, v: Term, **x: Term) -> Mapping[str, Term]:
        new = v + x["weight"] * (g * g - v)
        u = g / new.larger(x["eps1"] * x["eps1"]).sqrt()
        return {"v": new, "sum p": p * p, "sum u": u * u}

    return _rule(("p", "g", "v"), _FACTOR, update, _factor_numbers(), extras, counts=True)


@lru_cache
def factor_apply(extras: Extras = NOTHING_ELSE) -> Rule:
    """Second pass: u again from the moment, times the pace: the rate of the tensor."""

    def update(p: Term, g: Term, v: Term, **x: Term) -> Mapping[str, Term]:
        u = g / v.larger(x["eps1"] * x["eps1"]).sqrt()
        return {"p": x["keep"] * p - x["pace"] * u}

    return _rule(("p", "g", "v"), _FACTOR, update, _factor_numbers(), extras, counts=True)


SQUARES = program(("g",), (), lambda g: {"sum g": g * g})
