"""Adafactor: second moments of a matrix as the product of a column and a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels.optim import FLAT, MATRICES, Extras, Rule
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch


def _derive(
    b: Any, lr: Any, step: Any, power: Any, eps1: Any, eps2: Any, d: Any, decay: Any
) -> dict[str, Any]:
    made = {"weight": step**power, "rho": b.minimum(lr, 1.0 / b.sqrt(step))}
    return made | {"keep": 1.0 - lr * decay, "eps1": eps1, "eps2": eps2, "d": d}


def _moved(b: Any, old: Any, mean: Any, weight: Any, **_: Any) -> dict[str, Any]:
    """A moment, moved towards the mean of squares."""
    return {"new": old + weight * (mean - old)}


def _pace(
    b: Any, size: Any, pp: Any, uu: Any, rho: Any, eps2: Any, d: Any, **_: Any
) -> dict[str, Any]:
    """ρ·max(ε₂, rms p) / max(1, rms u / d). A norm that is nan counts for nothing, as in
    torch.optim.Adafactor: a nan in one element of a vector does not reach the others."""
    large, long = b.sqrt(pp / size), b.sqrt(uu / size) / d
    return {"pace": rho * b.where(large > eps2, large, eps2) / b.where(long > 1.0, long, 1.0)}


def _rule(*formulas: Any, state: str, extras: Extras, walk: str = FLAT) -> Rule:
    return Rule(
        state={name: name for name in state.split()},
        constants="power eps1 eps2 d decay",
        derive=_derive,
        formulas=formulas,
        extras=extras,
        sums="pp uu",
        finished="pace",
        walk=walk,
        counts=True,
        on_device=True,
    )


@lru_cache
def of_vectors(extras: Extras) -> Rule:
    """v ← v + w·(g² − v);  u = g / √max(v, ε₁²);  p ← (1 − γ·λ)·p − pace·u"""

    def quotient(b: Any, g: Any, v: Any, eps1: Any) -> Any:
        return g / b.sqrt(b.maximum(v, eps1 * eps1))

    def first(b: Any, p: Any, g: Any, variance: Any, eps1: Any, **x: Any) -> dict[str, Any]:
        new = _moved(b, variance, g * g, x["weight"])["new"]
        u = quotient(b, g, new, eps1)
        return {"variance": new, "pp": p * p, "uu": u * u}

    def second(b: Any, p: Any, g: Any, variance: Any, eps1: Any, **x: Any) -> dict[str, Any]:
        return {"p": x["keep"] * p - x["pace"] * quotient(b, g, variance, eps1)}

    passes = ("pass", "moments", first), ("finish", "paces", _pace), ("pass", "Adafactor", second)
    return _rule(*passes, state="variance", extras=extras)


@lru_cache
def of_matrices(extras: Extras) -> Rule:
    """row ← row + w·(mean of g² along rows − row), col likewise;  U = row·col / max(mean row, ε₁);
    u = g / √max(U, ε₁²);  p ← (1 − γ·λ)·p − pace·u

    1/√U is a product of two numbers, one of the row and one of the column, so no element costs a
    root or a division."""

    def squares(b: Any, p: Any, g: Any, **_: Any) -> dict[str, Any]:
        return {"row_total": b.row_sum(g * g), "column_total": b.column_sum(g * g), "pp": p * p}

    def direction(b: Any, g: Any, x: dict[str, Any]) -> Any:
        of_row = x["row"] * b.sqrt(b.maximum(x["mean"], x["eps1"]))
        return g * b.minimum(of_row * x["column"], 1.0 / x["eps1"])

    def length(b: Any, p: Any, g: Any, **x: Any) -> dict[str, Any]:
        u = direction(b, g, x)
        return {"uu": u * u}

    def apply(b: Any, p: Any, g: Any, **x: Any) -> dict[str, Any]:
        return {"p": x["keep"] * p - x["pace"] * direction(b, g, x)}

    return _rule(
        ("pass", "sums of squares", squares),
        ("moments", "moments", _moved),
        ("pass", "length", length),
        ("finish", "paces", _pace),
        ("pass", "Adafactor", apply),
        state="row_var col_var",
        extras=extras,
        walk=MATRICES,
    )


class Adafactor(Fused, torch.optim.Adafactor):
    """torch.optim.Adafactor: same arguments, groups and state dict.

    ``foreach`` is accepted and changes nothing. On a GPU all vectors take four launches, and all
    matrices of similar size seven: sums by row and column, moments, the length of the update, the
    update. Nothing is read on the host, so a CUDA Graph may capture a step. On the CPU it is one
    call of generated code for all matrices and one for all vectors. It computes in float32 where
    parameters have 16 bits. Of the further arguments (:class:`deuteron.optim.Ours`) ``max_norm``,
    ``skip_nonfinite`` and ``ema_decay`` are there.
    """

    _row_major = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        for name in ("state_dtype", "master_weights"):
            if ours.get(name):
                raise ValueError(f"Adafactor has no {name}; use AdamW for it")
        self._set(ours)
        flags: Any = {"foreach": foreach, "maximize": maximize}
        torch.optim.Adafactor.__init__(self, params, lr, beta2_decay, eps, d, weight_decay, **flags)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        return of_matrices(extras) if p.dim() > 1 else of_vectors(extras)

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check(p, grad)
        if p.is_complex():
            raise BindError(
                f"{p.dtype} has no factored second moment",
                asked=f"a step of Adafactor for a parameter of shape {tuple(p.shape)}",
                remedy="use Adam for it",
            )

    def _like(self, p: torch.Tensor, key: str) -> torch.Tensor:
        shapes: dict[str, Any] = {"row_var": (*p.shape[:-1], 1)}
        shapes["col_var"] = (*p.shape[:-2], 1, *p.shape[-1:])
        return p.new_empty(shapes.get(key, p.shape))

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(batch.params[0].dtype).eps if eps1 is None else eps1
        return [group["beta2_decay"], eps1, eps2, group["d"], group["weight_decay"]]
