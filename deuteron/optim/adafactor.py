"""Adafactor: second moments of a matrix as the product of a column and a row."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels.optim import Extras, Rule
from deuteron.kernels.optim_rules import adafactor_of_matrices, adafactor_of_vectors
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch


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
        return (adafactor_of_matrices if p.dim() > 1 else adafactor_of_vectors)(extras)

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
