"""Running a scalar program with torch, slowly: the reference that renderers are held against.

Every loop variable is a dimension, so that a statement is one torch call on the whole domain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deuteron.codegen.index import Affine, Atom, Quotient, Var
from deuteron.codegen.scalar import Guard, Inside, Load, Position, Reduce, ScalarProgram, Store
from deuteron.ir.dtype import dtype
from deuteron.ops.arithmetic import ndtr
from deuteron.ops.formula import Arg, Compute, Const
from deuteron.ops.random import BITS, words

OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda x, y, z: x * y + z,
    "neg": operator.neg,
    "abs": torch.abs,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "pow": torch.pow,
    "select": torch.where,
    "fmod": torch.fmod,
    "atan2": torch.atan2,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "to_bool": lambda x: x != 0,
    "to_int": lambda x: x.to(torch.int64),
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "ndtr": lambda x: ndtr(x.double()).to(x.dtype),
    "quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "power": torch.pow,
    "random": lambda seed, place: words(seed, place) >> (32 - BITS),
}

REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d, keepdim=True),
    "max": lambda x, d: x.amax(d, keepdim=True),
    "min": lambda x, d: x.amin(d, keepdim=True),
    "any": lambda x, d: x.any(d, keepdim=True),
    "all": lambda x, d: x.all(d, keepdim=True),
}


def interpret(
    program: ScalarProgram, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> None:
    """Fill ``outputs`` (tensors of the right type and strides)."""
    kind = torch.float64 if program.wide else torch.float32
    axes = [*program.outer, *program.inner]
    grid = {v: torch.arange(v.size).reshape([-1 if w is v else 1 for w in axes]) for v in axes}
    reduced = tuple(range(len(program.outer), len(axes)))
    env: dict[str, torch.Tensor] = {}

    def index(e: Affine) -> torch.Tensor:
        total = torch.full([1] * len(axes), e.const)
        for atom, f in e.terms:
            total = total + atom_value(atom) * f
        return total

    def atom_value(atom: Atom) -> torch.Tensor:
        if isinstance(atom, Quotient):
            inner = index(atom.of)
            return inner % atom.by if atom.rest else inner // atom.by
        return grid[atom] if isinstance(atom, Var) else env[atom.name]

    def inside(guards: tuple[Guard, ...]) -> torch.Tensor:
        ok = torch.ones([1] * len(axes), dtype=torch.bool)
        for g in guards:
            i = index(g.index)
            ok = ok & (i >= g.low) & (i < g.high)
        return ok

    def value(a: Arg) -> torch.Tensor:
        if isinstance(a, Const):
            return torch.tensor(
                a.value, dtype={"float": kind, "int": torch.int64, "bool": torch.bool}[a.kind]
            )
        return env[a]

    for s in program.statements:
        if isinstance(s, Load):
            t = inputs[s.tensor]
            span = 1 + sum((n - 1) * k for n, k in zip(t.shape, t.stride(), strict=True))
            flat = t.as_strided((span,), (1,))
            ok, at = inside(s.guards), index(s.offset)
            ok, at = torch.broadcast_tensors(ok, at)
            got = flat[torch.where(ok, at, 0)]
            got = torch.where(ok, got, torch.zeros((), dtype=got.dtype))
            env[s.name] = (
                got.to(kind)
                if s.dtype.is_float
                else got
                if s.dtype.kind == "bool"
                else got.to(torch.int64)
            )
        elif isinstance(s, Inside):
            env[s.name] = inside(s.guards)
        elif isinstance(s, Position):
            env[s.name] = index(s.index)
        elif isinstance(s, Compute):
            args = [value(a) for a in s.args]
            if s.op in ("rounded", "wrapped"):
                narrow = args[0].to(dtype(dict(s.attrs)["dtype"]).torch)
                env[s.name] = narrow.to(kind if s.op == "rounded" else torch.int64)
            elif s.op == "to_float":
                env[s.name] = args[0].to(kind)
            else:
                env[s.name] = OPS[s.op](*args)
        elif isinstance(s, Reduce):
            full = env[s.source].expand([v.size for v in axes])
            if s.op == "prod":
                out = full
                for d in reduced:
                    out = out.prod(d, keepdim=True)
                env[s.name] = out
            else:
                env[s.name] = REDUCE[s.op](full, reduced) if reduced else full
        elif isinstance(s, Store):
            t = outputs[s.tensor]
            span = 1 + sum((n - 1) * k for n, k in zip(t.shape, t.stride(), strict=True))
            flat = t.as_strided((span,), (1,))
            at, got = torch.broadcast_tensors(index(s.offset), value(s.source))
            flat[at.reshape(-1)] = got.reshape(-1).to(t.dtype)
