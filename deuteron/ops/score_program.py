"""A user's function of one score of attention, as a program that an attribute holds as text.

A program is text: one step after another, and at the end the result::

    n0=sub(i,j); f0=read0(h); f1=float(n0); f2=mul(f0,f1); f3=sub(s,f2); f3

Steps are operators of the table on single numbers; the first letter of a name says what it is: f a
float, n a whole number, c a condition. A program may read ``s``, the score, and where it stands:
``b`` batch (or the sequence, where several are packed), ``h`` head, ``i`` query and ``j`` key.
``read0(h)`` is an element of the first tensor that the function captured; ``float`` makes a whole
number or a condition a float.

The same program runs on tensors (the reference) and on scalars, from which kernels are generated;
its derivative follows from those of the operators. Functions become programs in
``functional/score_trace.py``.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ops import table
from deuteron.ops.formula import TENSORS, is_scalar

INPUTS = ("s", "b", "h", "i", "j")
PLACES = ("i", "j")
NEAR = 1 << 22  # float32 can add up a few positions below this exactly, as long as sums are at most
EXACTLY = 1 << 24  # this
EXACT = ("add", "sub", "abs", "minimum", "maximum")  # exact, and a zero result is +0, never −0
READS = 3  # tensors that functions may capture
NUMBERS = {"inf": math.inf, "nan": math.nan}
Read = Callable[[int, Sequence[Any]], Any]  # an element of a captured tensor


class Step(NamedTuple):
    """``name = op(args, **attrs)``: an argument is a name or a number."""

    name: str
    op: str
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [a if isinstance(a, str) else repr(a) for a in self.args]
        given += [f"{k}={v!r}" for k, v in self.attrs]
        return f"{self.name}={self.op}({','.join(given)})"

    @property
    def reads(self) -> int | None:
        """Which captured tensor it reads an element of, if it does."""
        return int(self.op[4:]) if self.op.startswith("read") else None


class Program:
    """The steps of a text, and its result."""

    def __init__(self, steps: Sequence[Step], result: Any) -> None:
        self.steps, self.result = tuple(steps), result

    def __str__(self) -> str:
        end = self.result if isinstance(self.result, str) else repr(self.result)
        return "; ".join([*map(str, self.steps), end])

    @cached_property
    def varying(self) -> frozenset[str]:
        """The floats that depend on the score."""
        found = {"s"}
        for step in self.steps:
            if step.name[0] == "f" and step.op != "float" and not found.isdisjoint(step.args):
                found.add(step.name)
        return frozenset(found)

    def values(
        self,
        b: Any,
        given: Mapping[str, Any],
        read: Read,
        number: Callable[[Any], Any] = lambda n: n,
        widen: Callable[[Any], Any] | None = None,
        near: bool = False,
    ) -> dict[Any, Any]:
        """All values by name, in terms of ``b``: those of the inputs from ``given``, and one for
        each step. ``number`` makes a value of a number. ``near``: positions are below NEAR, so that
        we convert i and j to floats, once for a line, and compute with these exactly; else we would
        compute with integers and convert at every score.
        """
        found: dict[Any, Any] = dict(given)
        widen = widen or (lambda n: b.primitive("to_float", n))
        whole = {step.name: step for step in self.steps if near and step.op in EXACT}
        floats: dict[str, Any] = {}

        def as_float(name: Any) -> Any:
            if not isinstance(name, str):
                return float(name)
            if name not in floats:
                step = whole.get(name)
                if step is None:
                    floats[name] = widen(found[name])
                else:
                    floats[name] = b.call(step.op, *map(as_float, step.args))
            return floats[name]

        for step in self.steps:
            args = [found[a] if isinstance(a, str) else number(a) for a in step.args]
            at = step.reads
            if at is not None:
                found[step.name] = read(at, args)
            elif step.op == "float":
                of = step.args[0]
                few = near and self._largest(of) <= EXACTLY
                found[step.name] = as_float(of) if few else widen(*args)
            else:
                found[step.name] = b.call(step.op, *args, **dict(step.attrs))
        if not isinstance(self.result, str):
            found[self.result] = number(self.result)
        return found

    def _largest(self, of: Any) -> float:
        """A bound of |integer|, if EXACT steps make it of positions and numbers; else infinity."""
        steps = {step.name: step for step in self.steps if step.op in EXACT}

        def largest(name: Any) -> float:
            if not isinstance(name, str):
                return float(abs(name))
            if name in PLACES:
                return NEAR
            if name not in steps:
                return math.inf
            each = list(map(largest, steps[name].args))
            return sum(each) if steps[name].op in ("add", "sub") else max(each)

        return largest(of)

    def slope(
        self, b: Any, found: Mapping[Any, Any], one: Any, number: Callable[[Any], Any] = lambda n: n
    ) -> Any:
        """The derivative of the result with respect to the score, given the values ``found``; a
        number if it is the same everywhere. ``number``: as for :meth:`values`."""
        if self.result not in self.varying:
            return 0.0
        grads: dict[str, Any] = {self.result: one}
        for step in reversed(self.steps):
            if step.name not in grads or step.name not in self.varying:
                continue
            values = [found[a] if isinstance(a, str) else number(a) for a in step.args]
            op = table.get(step.op)
            attrs = op.normalise(dict(step.attrs))
            for slot, a in enumerate(step.args):
                part = None
                if isinstance(a, str) and a in self.varying:
                    part = op.pulled(b, slot, grads[step.name], values, found[step.name], attrs)
                if part is not None:
                    grads[a] = grads[a] + part if a in grads else part
        return grads.get("s", 0.0)


@lru_cache(maxsize=256)
def program(text: str) -> Program:
    """Parse the text of a program; raise a GraphError if it is none."""
    steps: list[Step] = []
    known = set(INPUTS)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Name):
            if node.id in NUMBERS:
                return NUMBERS[node.id]
            if node.id in known:
                return node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            return node.value
        raise ValueError

    try:
        *lines, end = ast.parse(text).body
        for line in lines:
            if not isinstance(line, ast.Assign) or not isinstance(line.value, ast.Call):
                raise ValueError
            call, (name,) = line.value, line.targets
            if not isinstance(call.func, ast.Name) or not isinstance(name, ast.Name):
                raise ValueError
            op, args = call.func.id, tuple(map(value, call.args))
            attrs = tuple((k.arg or "", value(k.value)) for k in call.keywords)
            step = Step(name.id, op, args, attrs)
            read = op.startswith("read") and op[4:].isdigit() and step.reads in range(READS)
            if not read and op != "float" and not is_scalar(table.get(op)):
                raise ValueError
            steps.append(step)
            known.add(name.id)
        if not isinstance(end, ast.Expr):
            raise ValueError
        return Program(steps, value(end.value))
    except (SyntaxError, ValueError):
        remedy = "give dt.functional.attention a function, which makes such a text"
        raise GraphError(f"{text!r} is no program of a score", remedy=remedy) from None


# ---- on tensors ---------------------------------------------------------------------------------


class Place(NamedTuple):
    """The positions of scores: tensors whose shapes broadcast to that of the scores."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor


def on_tensors(text: str, scores: Tensor, at: Place, captured: Sequence[Any]) -> Any:
    """Run a program on scores; return its result and the derivative of the result with respect to
    the scores. Both broadcast to the scores."""
    found = program(text)
    kinds = {bool: torch.bool, int: torch.int32, float: scores.dtype}

    def number(n: Any) -> Tensor:
        return scores.new_full((), n, dtype=kinds[type(n)])

    def read(which: int, places: Sequence[Tensor]) -> Tensor:
        tensor: Tensor = captured[which]
        element = tensor[tuple(p.long() for p in places)] if places else tensor
        return element.to(scores.dtype) if element.is_floating_point() else element

    given = {"s": scores, **at._asdict()}
    values = found.values(TENSORS, given, read, number, lambda x: x.to(scores.dtype))
    slope = found.slope(TENSORS, values, torch.ones_like(scores), number)
    return values[found.result], slope
