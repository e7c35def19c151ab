"""A step of an optimiser as data: what happens to an element, written once as a formula.

A :class:`Rule` is a list of formulas in the language of :mod:`deuteron.ops.formula`. They name
tensors ("p" is the parameter, "g" its gradient) and numbers that are the same for a whole tensor:

>>> sgd = lambda b, p, g, lr: {"p": p - lr * g}

The same functions run on tensors, are rendered to Triton and to LLVM by the generators in
``optim.py`` in the folders of their kernels, and those that make numbers run in Python.

Every pass reads and writes each tensor that it names once. Bytes per element of fp32: SGD with
momentum 20, Adam 28, amsgrad 36, Lion 20, LAMB 40 and Adafactor 24 to 28 (two norms lie between two
passes), 8-bit Adam 16; an average of the parameters adds 8, float32 master weights of 16-bit
parameters 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from deuteron.codegen.scalar import Reduce
from deuteron.ops import random
from deuteron.ops.formula import TENSORS, Arg, Compute, Formula, Scalar, ScalarOps, Scalars

GROUP = 256  # neighbours that form a row where a pass goes by groups
SEED = 0x3C6EF372  # what a step adds to the seed of the noise

# How a pass walks through a tensor: as one long row, as rows of GROUP elements, or as matrices,
# whose sums by row and by column are made piece by piece.
FLAT, GROUPS, MATRICES = "flat", "groups", "matrices"

# Tensors that live for a step of matrices, with their levels, in the order of the table: sums of
# squares by row and column, what u is multiplied with for its row and column, and the mean moment.
SCRATCH = dict(row_total="row", column_total="column", row="row", column="column", mean="matrix")


# ---- what formulas may call beside the elementwise operators


class _Scalars(ScalarOps):
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


class OnTensors:
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
        like = self.like
        place = torch.arange(like.numel(), device=like.device).view(like.shape)
        bits = random.mix((place + (int(step) * SEED + self.index + salt)) & 0xFFFFFFFF)
        return (bits >> (32 - random.BITS)).to(like.dtype) * 2.0**-random.BITS


ON_NUMBERS = SimpleNamespace(sqrt=math.sqrt, minimum=min)


# ---- formulas as statements


class Body(NamedTuple):
    """The statements of a formula, and the names of its results."""

    statements: tuple[Compute | Reduce, ...]
    results: dict[str, Arg]

    @property
    def reads(self) -> set[Any]:
        """Names that the statements or the results take."""
        used = {a for s in self.statements for a in arguments(s)}
        return used | set(self.results.values())


def arguments(s: Compute | Reduce) -> tuple[Arg, ...]:
    return (s.source,) if isinstance(s, Reduce) else s.args


def traced(formula: Formula, names: Sequence[str]) -> Body:
    """``formula(b, **names)``; what reaches no result is left out."""
    scalars = Scalars()
    scalars.kinds = dict.fromkeys(names, "float")
    made = formula(_Scalars(scalars), **{name: Scalar(scalars, name) for name in names})
    results = {name: value.ref for name, value in made.items()}
    needed, kept = set(results.values()), []
    for s in reversed(scalars.statements):
        if s.name in needed:
            needed.update(arguments(s))
            kept.append(s)
    return Body(tuple(reversed(kept)), results)


# ---- rules


class Names(NamedTuple):
    """What the formulas of a rule may name. ``tensors`` are in the order of the table of their
    addresses, but for "g"; those in ``levels`` have one number for each row, column or matrix."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    sums: tuple[str, ...]
    levels: Mapping[str, str]

    def place(self, tensor: str) -> int:
        """The row of the table that has the addresses; row 0 has the numbers of elements."""
        return 1 + [name for name in self.tensors if name != "g"].index(tensor)


@dataclass(frozen=True, eq=False)  # one object per rule: kernels are looked up by it
class Step:
    """One formula of a rule, and what it is given by name, besides the numbers of the tensor:

    "pass"     the tensors, element by element. What it returns under the name of a tensor is stored
               there; what it returns under another name is added up over the tensor
    "finish"   those sums and the ``size`` of the tensor; it returns one number of the tensor
    "moments"  of every row and column of a matrix the ``old`` moment and the ``mean`` of squares
    """

    kind: str
    name: str
    formula: Formula
    names: Names
    walk: str

    @cached_property
    def body(self) -> Body:
        names = self.names
        given = {"pass": names.tensors, "finish": ("size", *names.sums), "moments": ("old", "mean")}
        return traced(self.formula, (*given[self.kind], *names.numbers))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Those that it needs, with their places among the numbers of a tensor."""
        return {name: k for k, name in enumerate(self.names.numbers) if name in self.body.reads}

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Tensors whose old values count."""
        return tuple(name for name in self.names.tensors if name in self.body.reads)

    @cached_property
    def writes(self) -> dict[str, Arg]:
        return {k: v for k, v in self.body.results.items() if k in self.names.tensors}

    @cached_property
    def touches(self) -> tuple[str, ...]:
        return tuple(n for n in self.names.tensors if n in self.reads or n in self.writes)

    @cached_property
    def sums(self) -> dict[int, Arg]:
        """Values that are added up over the tensor, by their place among the sums of the rule."""
        found = self.body.results.items()
        return {self.names.sums.index(k): v for k, v in found if k in self.names.sums}

    def level(self, tensor: str) -> str:
        return self.names.levels.get(tensor, "element")


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

        def whole(b: Any, p: Any, g: Any, gscale: Any, **more: Any) -> Mapping[str, Any]:
            master, ema, rate = (more.pop(k, None) for k in ("master", "ema", "ema_rate"))
            made = dict(update(b, p=p if master is None else master, g=g * gscale, **more))
            if master is not None and "p" in made:
                made["master"] = made["p"]
            if ema is not None and "p" in made:
                made["ema"] = ema + rate * (made["p"] - ema)
            return made

        return whole


NOTHING_ELSE = Extras()


@dataclass(frozen=True, eq=False)
class Rule:
    """The step of an optimiser: what it keeps, its numbers, and its formulas in order.

    ``state`` has, for every tensor that is kept beside the parameter, its key in the state.
    ``derive(b, lr, step, **constants)`` gives the numbers of a step, ``formulas`` are the kind, the
    name and the formula of each :class:`Step`."""

    state: Mapping[str, str]
    constants: str
    derive: Formula
    formulas: tuple[tuple[str, str, Formula], ...]
    extras: Extras = NOTHING_ELSE
    sums: str = ""
    finished: str = ""  # the number that "finish" makes
    walk: str = FLAT
    levels: Mapping[str, str] = field(default_factory=dict)
    counts: bool = False  # whether the numbers depend on how many steps were made
    on_device: bool = False  # whether a GPU makes the numbers even where the host could

    @property
    def keys(self) -> tuple[str, ...]:
        """Names in the state, in the order of the table of addresses."""
        return (*self.state.values(), *self.extras.tensors)

    @cached_property
    def given(self) -> tuple[str, ...]:
        """Of what the numbers are made, besides the rate and the step count."""
        return ("gscale", *self.constants.split(), *(("ema_rate",) if self.extras.ema else ()))

    def _numbers(self, b: Any, gscale: Any, lr: Any, step: Any, **given: Any) -> dict[str, Any]:
        rate = {k: given.pop(k) for k in ("ema_rate",) if self.extras.ema}
        made = {"gscale": gscale, **self.derive(b, lr=lr, step=step, **given), **rate}
        return made | ({self.finished: gscale} if self.finished else {})  # to be overwritten

    @cached_property
    def body(self) -> Body:
        return traced(self._numbers, (*self.given, "lr", "step"))

    def numbers(self, constants: Sequence[float], lr: float, step: float) -> list[float]:
        """In Python: the formula is a function of numbers like any other."""
        given = dict(zip(self.given, constants, strict=True))
        return list(self._numbers(ON_NUMBERS, lr=lr, step=step, **given).values())

    @cached_property
    def names(self) -> Names:
        scratch = SCRATCH if self.walk == MATRICES else {}
        tensors = ("p", "g", *self.state, *self.extras.tensors, *scratch)
        sums = tuple(self.sums.split())
        return Names(tensors, tuple(self.body.results), sums, {**self.levels, **scratch})

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(
            Step(kind, name, self.extras.around(f) if kind == "pass" else f, self.names, self.walk)
            for kind, name, f in self.formulas
        )


SQUARES = Rule(
    {}, "", lambda b, lr, step: {}, (("pass", "norm", lambda b, p, g: {"gg": g * g}),), sums="gg"
)


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


def matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """How many there are, their height and their width."""
    return prod(shape[:-2]), shape[-2], shape[-1]


def with_scratch(
    table: torch.Tensor,
    shapes: Sequence[Sequence[int]],
    parts: Sequence[tuple[int, int]],
    wide: torch.dtype,
    *more: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of addresses with those of :data:`SCRATCH` added, then sizes of matrices, then
    ``more``; and the scratch memory. ``parts``: the pieces in which sums of rows and columns are
    made."""
    addresses, at = [], 0
    for shape, (across, down) in zip(shapes, parts, strict=True):
        count, height, width = matrices(shape)
        room = (height * across, width * down, height, width, 1)
        addresses.append([])
        for need in room:
            addresses[-1].append(at)
            at += need * count
    memory = torch.empty(at, dtype=wide, device=table.device)
    places = torch.tensor(addresses).t() * memory.element_size() + memory.data_ptr()
    sizes = torch.tensor([matrices(shape) for shape in shapes]).t()
    extra = torch.tensor(more, dtype=torch.int64).view(len(more), len(shapes))
    return torch.cat((table, torch.cat((places, sizes, extra)).to(table.device))), memory
