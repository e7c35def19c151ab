"""A step of an optimiser as data: what happens to an element, written once as a formula.

A :class:`Rule` is a list of formulas in the language of :mod:`deuteron.ops.formula`. They name
tensors ("p" is the parameter, "g" its gradient) and numbers that are the same for a whole tensor:

>>> sgd = lambda b, p, g, lr: {"p": p - lr * g}

The same functions run on tensors, are rendered to Triton and to LLVM by the generators in
``optim.py`` in the folders of their kernels, and those that make numbers run in Python. The rules
themselves are in ``optim_rules.py``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from deuteron.codegen.scalar import Reduce
from deuteron.ops import random
from deuteron.ops.formula import TENSORS, Arg, Compute, Formula, Scalar, ScalarOps, Scalars

DTypes, Ints, Shapes = tuple[torch.dtype, ...], Sequence[int], Sequence[Sequence[int]]
GROUP = 256  # neighbours that form a row where a pass goes by groups
SEED = 0x3C6EF372  # what a step adds to the seed of the noise

# How a pass walks through a tensor: as one long row, as rows of GROUP elements, or as matrices,
# whose sums by row and by column are made piece by piece.
FLAT, GROUPS, MATRICES = "flat", "groups", "matrices"

# Tensors that live for a step of matrices, in the order of the table: sums of squares by row and
# column, what u is multiplied with for its row and column, and the mean moment of the rows.
SCRATCH = dict(row_total="row", column_total="column", row="row", column="column", mean="matrix")
# Tensors with one number for each row, column or matrix; all others have one for each element.
LEVELS = {"m_scale": "row", "v_scale": "row", **SCRATCH}


def level_of(tensor: str) -> str:
    return LEVELS.get(tensor, "element")


# ---- what formulas may call beside the elementwise operators


class OnScalars(ScalarOps):
    """As statements, for generated code."""

    def reduced(self, op: str, x: Scalar) -> Scalar:
        """The "row_sum", the "row_max" (of numbers from 0 on) or the "column_sum"."""
        name = self.of.name("v", "float")
        self.of.statements.append(Reduce(name, op, x.ref, "float"))
        return Scalar(self.of, name)

    def noise(self, step: Scalar, salt: int) -> Scalar:
        """Evenly in [0, 1): a hash of the step, the tensor's number and the element's place."""
        return Scalar(self.of, self.of.op("noise", step, salt, kind="float"))


class OnTensors:
    """As torch's operators; rows and columns are those of the last two dimensions. The tensor's
    number, and one ``like`` it, are for noise."""

    def __init__(self, index: int, like: torch.Tensor) -> None:
        self.index, self.like = index, like

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(TENSORS, name)

    def reduced(self, op: str, x: torch.Tensor) -> torch.Tensor:
        axis = -2 if op == "column_sum" else -1
        return x.amax(axis, keepdim=True) if op == "row_max" else x.sum(axis, keepdim=True)

    def noise(self, step: float, salt: int) -> torch.Tensor:
        place = torch.arange(self.like.numel(), device=self.like.device).view(self.like.shape)
        bits = random.mix((place + (int(step) * SEED + self.index + salt)) & 0xFFFFFFFF)
        return (bits >> (32 - random.BITS)).to(self.like.dtype) * 2.0**-random.BITS


ON_NUMBERS = SimpleNamespace(sqrt=math.sqrt, minimum=min, where=lambda c, x, y: x if c else y)


# ---- formulas as statements


class Body(NamedTuple):
    """The statements of a formula, and the names of its results."""

    statements: tuple[Compute | Reduce, ...]
    results: dict[str, Arg]

    @property
    def reads(self) -> set[Any]:
        used = {a for s in self.statements for a in arguments(s)}
        return used | set(self.results.values())

    def needed(self, results: Sequence[Any], known: Sequence[Any] = ()) -> list[Any]:
        """The statements that lead to some of the results, where others are ``known``."""
        needed, kept = set(results), []
        for s in reversed(self.statements):
            if s.name in needed and s.name not in known:
                needed.update(arguments(s))
                kept.append(s)
        return kept[::-1]


def arguments(s: Compute | Reduce) -> tuple[Arg, ...]:
    return (s.source,) if isinstance(s, Reduce) else s.args


def traced(formula: Formula, names: Sequence[str]) -> Body:
    """``formula(b, **names)``; what reaches no result is left out."""
    made = Scalars()
    made.kinds = dict.fromkeys(names, "float")
    found = formula(OnScalars(made), **{name: Scalar(made, name) for name in names})
    body = Body(tuple(made.statements), {name: value.ref for name, value in found.items()})
    return body._replace(statements=tuple(body.needed(list(body.results.values()))))


# ---- rules


@dataclass(frozen=True)
class Extras:
    """What may ride along with any rule."""

    master: bool = False  # float32 weights of 16-bit parameters
    ema: bool = False  # a moving average of the parameters

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("master",) * self.master + ("ema",) * self.ema

    def around(self, update: Formula) -> Formula:
        """The formula with its gradient scaled first, and what rides along done last."""

        def whole(b, p, g, gscale, master=None, ema=None, ema_rate=None, **more):
            made = dict(update(b, p=p if master is None else master, g=g * gscale, **more))
            if master is not None and "p" in made:
                made["master"] = made["p"]
            if ema is not None and "p" in made:
                made["ema"] = ema + ema_rate * (made["p"] - ema)
            return made

        return whole


@dataclass(eq=False)  # one object per rule: kernels are looked up by it
class Rule:
    """The step of an optimiser: what it keeps, its numbers, and its formulas in order.

    ``state`` has, for every tensor that is kept beside the parameter, its key in the state.
    ``derive(b, lr, step, **constants)`` gives the numbers of a step, ``formulas`` are the kind, the
    name and the formula of each :class:`Step`."""

    state: Mapping[str, str]
    constants: str
    derive: Formula
    formulas: Sequence[tuple[str, str, Formula]]
    extras: Extras = Extras()
    sums: tuple[str, ...] = ()  # over the tensor, for "finish"
    finished: str = ""  # the number that "finish" makes
    walk: str = FLAT
    counts: bool = False  # whether the numbers depend on how many steps were made
    on_device: bool = False  # whether a GPU makes the numbers even where the host could

    def __post_init__(self) -> None:
        more = self.extras.tensors
        self.keys = (*self.state.values(), *more)  # in the state, in the order of the table
        self.tensors = ("p", "g", *self.state, *more, *(SCRATCH if self.walk == MATRICES else ()))
        # of what the numbers are made, besides the rate and the step count
        self.given = ("gscale", *self.constants.split(), *["ema_rate"] * self.extras.ema)
        self.body = traced(self._numbers, (*self.given, "lr", "step"))
        self.numbers = tuple(self.body.results)
        self.steps = tuple(
            Step(self, kind, name, self.extras.around(formula) if kind == "pass" else formula)
            for kind, name, formula in self.formulas
        )

    def place(self, tensor: str) -> int:
        """The row of the table that has the addresses; row 0 has the numbers of elements."""
        return 1 + [name for name in self.tensors if name != "g"].index(tensor)

    def _numbers(self, b, gscale, lr, step, ema_rate=None, **constants):
        made = {"gscale": gscale, **self.derive(b, lr=lr, step=step, **constants)}
        made |= {"ema_rate": ema_rate} if self.extras.ema else {}
        return made | ({self.finished: gscale} if self.finished else {})  # to be overwritten

    def numbers_of(self, constants: Sequence[float], lr: float, step: float) -> list[float]:
        """In Python: the formula is a function of numbers like any other."""
        given = dict(zip(self.given, constants, strict=True))
        return list(self._numbers(ON_NUMBERS, lr=lr, step=step, **given).values())


@dataclass(eq=False)
class Step:
    """One formula of a rule, and what it is given by name, besides the numbers of the tensor:

    "pass"     the tensors, element by element. What it returns under the name of a tensor is stored
               there; what it returns under another name is added up over the tensor
    "finish"   those sums and the ``size`` of the tensor; it returns one number of the tensor
    "moments"  of every row and column of a matrix the ``old`` moment and the ``mean`` of squares
    """

    rule: Rule
    kind: str
    name: str
    formula: Formula

    def __post_init__(self) -> None:
        rule, kind = self.rule, self.kind
        given = {"pass": rule.tensors, "finish": ("size", *rule.sums), "moments": ("old", "mean")}
        self.body = traced(self.formula, (*given[kind], *rule.numbers))
        used, results = self.body.reads, self.body.results
        # numbers that it needs, by their places; tensors whose old values count; and what is stored
        self.numbers = {name: k for k, name in enumerate(rule.numbers) if name in used}
        self.reads = tuple(name for name in rule.tensors if name in used)
        self.writes = {name: results[name] for name in rule.tensors if name in results}
        self.touches = [n for n in rule.tensors if n in self.reads or n in self.writes]
        self.sums = {k: results[name] for k, name in enumerate(rule.sums) if name in results}


# ---- tables


def listed(counts: Sequence[int]) -> torch.Tensor:
    """(owner, place) for so many pieces of each owner, as two rows of int32."""
    each = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), each)
    place = torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]
    return torch.stack((owner, place)).to(torch.int32)


def first_of(counts: Sequence[int]) -> torch.Tensor:
    """The first piece of each owner, and how many there are in all."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def with_scratch(
    table: torch.Tensor, sizes: Shapes, parts: Shapes, wide: torch.dtype, *more: Ints
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of addresses with those of :data:`SCRATCH` added, then the sizes of matrices (how
    many, height, width), then ``more``; and the scratch memory. ``parts``: the pieces in which sums
    of rows and columns are made."""
    pairs = zip(sizes, parts, strict=True)
    needs = [[n * h * across, n * w * down, n * h, n * w, n] for (n, h, w), (across, down) in pairs]
    ends = torch.tensor(needs).flatten().cumsum(0)
    memory = torch.empty(int(ends[-1]), dtype=wide, device=table.device)
    begins = (ends - torch.tensor(needs).flatten()).view(-1, len(SCRATCH))
    rows = (begins * memory.element_size() + memory.data_ptr()).t().tolist()
    rows += [*zip(*sizes, strict=True), *more]
    return torch.cat((table, torch.tensor(rows).to(table.device))), memory
