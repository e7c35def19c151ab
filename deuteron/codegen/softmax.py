"""Softmax as scalar programs have it: what renderers may know about e^(x − max x) and its sum."""

from __future__ import annotations

from dataclasses import dataclass

from deuteron.codegen.scalar import Reduce, ScalarProgram, Store
from deuteron.ops.formula import Compute


@dataclass(frozen=True)
class Softmax:
    """A maximum over a row and the sum of e^(x − maximum) over it: one pass can find both."""

    top: Reduce
    total: Reduce


def softmaxes(program: ScalarProgram) -> tuple[list[Softmax], frozenset[str]]:
    """The pairs in a program, and the names of all exponentials e^(x − max x)."""
    by_name = {s.name: s for s in program.statements if not isinstance(s, Store)}
    pairs, shifted = [], set()
    for s in program.statements:
        if not (isinstance(s, Compute) and s.op == "exp" and isinstance(s.args[0], str)):
            continue
        d = by_name[s.args[0]]
        if not (isinstance(d, Compute) and d.op == "sub" and isinstance(d.args[1], str)):
            continue
        top = by_name[d.args[1]]
        if isinstance(top, Reduce) and top.op == "max" and top.source == d.args[0]:
            shifted.add(s.name)
            for total in program.reductions:
                if total.op == "sum" and total.source == s.name:
                    pairs.append(Softmax(top, total))
    return pairs, frozenset(shifted)
