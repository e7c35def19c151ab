"""A step of an optimiser as data: what happens to an element, written once as a formula.

A :class:`Rule` is a list of formulas in the language of :mod:`deuteron.ops.formula`. They name
tensors ("p" is the parameter, "g" its gradient) and numbers that are the same for a whole tensor:

>>> sgd = lambda b, p, g, lr: {"p": p - lr * g}

The same functions run on tensors, are rendered to Triton and to LLVM by the generators in
``optim.py`` in the folders of their kernels, and those that make numbers run in Python. The rules
themselves are in ``optim_rules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from deuteron.codegen.scalar import Reduce
from deuteron.ops import random
from deuteron.ops.formula import PRIMITIVES, TENSORS, Arg, Compute, Formula, Scalar, ScalarOps
from deuteron.ops.formula import Scalars as Statements

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


# ---- what formulas may call beside the elementwise operators


class Scalars(ScalarOps):
    """As statements, for generated code."""

    def _reduced(self, op: str, x: Scalar) -> Scalar:
        name = self.of.name("v", "float")
        self.of.statements.append(Reduce(name, op, x.ref, "float"))
        return Scalar(self.of, name)

    def row_max(self, x: Scalar) -> Scalar:
        """The largest of a row; of numbers from 0 on."""
        return self._reduced("row_max", x)

    def row_sum(self, x: Scalar) -> Scalar:
        return self._reduced("row_sum", x)

    def column_sum(self, x: Scalar) -> Scalar:
        return self._reduced("column_sum", x)

    def noise(self, step: Scalar, salt: int) -> Scalar:
        """Evenly in [0, 1): a hash of the step, the tensor's number and the element's place."""
        return Scalar(self.of, self.of.op("noise", step, salt, kind="float"))


class Tensors:
    """As torch's operators; rows and columns are those of the last two dimensions. The tensor's
    number, and one ``like`` it, are for noise."""

    def __init__(self, index: int, like: torch.Tensor) -> None:
        self.index, self.like = index, like

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(TENSORS, name)

    def row_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1, keepdim=True)

    def row_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True)

    def column_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-2, keepdim=True)

    def noise(self, step: float, salt: int) -> torch.Tensor:
        place = torch.arange(self.like.numel(), device=self.like.device).view(self.like.shape)
        bits = random.mix((place + (int(step) * SEED + self.index + salt)) & 0xFFFFFFFF)
        return (bits >> (32 - random.BITS)).to(self.like.dtype) * 2.0**-random.BITS


NUMBERS = SimpleNamespace(sqrt=math.sqrt, minimum=min, where=lambda c, x, y: x if c else y)


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
    made = Statements()
    made.kinds = dict.fromkeys(names, "float")
    found = formula(Scalars(made), **{name: Scalar(made, name) for name in names})
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


@dataclass(frozen=True, eq=False)  # one object per rule: kernels are looked up by it
class Rule:
    """The step of an optimiser: what it keeps, its numbers, and its formulas in order.

    ``state`` has, for every tensor that is kept beside the parameter, its key in the state.
    ``derive(b, lr, step, **constants)`` gives the numbers of a step, ``formulas`` are the kind, the
    name and the formula of each :class:`Step`."""

    state: Mapping[str, str]
    constants: str
    derive: Formula
    formulas: tuple[tuple[str, str, Formula], ...]
    extras: Extras = Extras()
    sums: tuple[str, ...] = ()  # over the tensor, for "finish"
    finished: str = ""  # the number that "finish" makes
    walk: str = FLAT
    counts: bool = False  # whether the numbers depend on how many steps were made
    on_device: bool = False  # whether a GPU makes the numbers even where the host could

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names in the state, in the order of the table of addresses."""
        return (*self.state.values(), *self.extras.tensors)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Their names; in the order of the table of addresses, which has no "g"."""
        scratch = SCRATCH if self.walk == MATRICES else ()
        return ("p", "g", *self.state, *self.extras.tensors, *scratch)

    def place(self, tensor: str) -> int:
        """The row of the table that has the addresses; row 0 has the numbers of elements."""
        return 1 + [name for name in self.tensors if name != "g"].index(tensor)

    @cached_property
    def given(self) -> tuple[str, ...]:
        """Of what the numbers are made, besides the rate and the step count."""
        return ("gscale", *self.constants.split(), *(("ema_rate",) if self.extras.ema else ()))

    def _numbers(self, b, gscale, lr, step, ema_rate=None, **constants):
        made = {"gscale": gscale, **self.derive(b, lr=lr, step=step, **constants)}
        made |= {"ema_rate": ema_rate} if self.extras.ema else {}
        return made | ({self.finished: gscale} if self.finished else {})  # to be overwritten

    @cached_property
    def body(self) -> Body:
        return traced(self._numbers, (*self.given, "lr", "step"))

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        return tuple(self.body.results)

    def numbers_of(self, constants: Sequence[float], lr: float, step: float) -> list[float]:
        """In Python: the formula is a function of numbers like any other."""
        given = dict(zip(self.given, constants, strict=True))
        return list(self._numbers(NUMBERS, lr=lr, step=step, **given).values())

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(
            Step(self, kind, name, self.extras.around(f) if kind == "pass" else f)
            for kind, name, f in self.formulas
        )


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def body(self) -> Body:
        rule = self.rule
        given = {"pass": rule.tensors, "finish": ("size", *rule.sums), "moments": ("old", "mean")}
        return traced(self.formula, (*given[self.kind], *rule.numbers))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Those that it needs, with their places among the numbers of a tensor."""
        return {name: k for k, name in enumerate(self.rule.numbers) if name in self.body.reads}

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Tensors whose old values count."""
        return tuple(name for name in self.rule.tensors if name in self.body.reads)

    @cached_property
    def writes(self) -> dict[str, Arg]:
        return {k: v for k, v in self.body.results.items() if k in self.rule.tensors}

    @cached_property
    def touches(self) -> tuple[str, ...]:
        return tuple(n for n in self.rule.tensors if n in self.reads or n in self.writes)

    @cached_property
    def sums(self) -> dict[int, Arg]:
        """Values that are added up over the tensor, by their place among the sums of the rule."""
        found = self.body.results.items()
        return {self.rule.sums.index(k): v for k, v in found if k in self.rule.sums}

    @property
    def flops(self) -> float:
        """Operations for an element."""
        return sum(PRIMITIVES.get(s.op, 1.0) for s in self.body.statements)


def level_of(tensor: str) -> str:
    return LEVELS.get(tensor, "element")


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
    table: torch.Tensor,
    sizes: Sequence[tuple[int, int, int]],
    parts: Sequence[tuple[int, int]],
    wide: torch.dtype,
    *more: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of addresses with those of :data:`SCRATCH` added, then the sizes of matrices (how
    many, height, width), then ``more``; and the scratch memory. ``parts``: the pieces in which sums
    of rows and columns are made."""
    addresses, at = [], 0
    for (count, height, width), (across, down) in zip(sizes, parts, strict=True):
        addresses.append([])
        for need in (height * across, width * down, height, width, 1):
            addresses[-1].append(at)
            at += need * count
    memory = torch.empty(at, dtype=wide, device=table.device)
    places = torch.tensor(addresses).t() * memory.element_size() + memory.data_ptr()
    rows = (places, torch.tensor(sizes).t(), torch.tensor([*map(list, more)] or [[]]))
    made = torch.cat([row for row in rows if row.numel()]).to(table.device)
    return torch.cat((table, made)), memory
