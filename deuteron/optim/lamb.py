"""LAMB: Adam with a rate per tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.optim.adam import bias_numbers, moments
from deuteron.optim.base import Ours, OwnArguments
from deuteron.optim.batch import Batch


@lru_cache
def lamb(adapt: bool, extras: Extras) -> Rule:
    """u = Adam's quotient + λ·p;  p ← p − γ·(‖p‖ / ‖u‖)·u. Where the norms count they lie between
    two passes, the second of which makes u again from the moments; else one pass is enough."""

    def direction(b: Any, p: Any, m: Any, v: Any, x: dict[str, Any]) -> Any:
        below = b.sqrt(v) * x["root"] + x["eps"]
        return x["first"] * m / below + x["decay"] * p

    def first(b: Any, p: Any, g: Any, m: Any, v: Any, lr: Any, **x: Any) -> dict[str, Any]:
        made = moments(g, m, v, *(x[k] for k in ("b1", "c1", "b2", "c2")))
        u = direction(b, p, made["m"], made["v"], x)
        return made | ({"pp": p * p, "uu": u * u} if adapt else {"p": p - lr * u})

    def ratio(b: Any, size: Any, pp: Any, uu: Any, **_: Any) -> dict[str, Any]:
        root = b.where(uu > 0.0, b.sqrt(pp / uu), 1.0)
        return {"ratio": b.where(pp > 0.0, root, 1.0)}

    def second(b: Any, p: Any, m: Any, v: Any, lr: Any, ratio: Any, **x: Any) -> dict[str, Any]:
        return {"p": p - lr * (ratio * direction(b, p, m, v, x))}

    def derive(
        b: Any, lr: Any, step: Any, b1: Any, b2: Any, eps: Any, decay: Any
    ) -> dict[str, Any]:
        made = bias_numbers(b, step, b1, b2, eps) | {"first": 1.0 / (1.0 - b1**step)}
        return made | {"decay": decay, "lr": lr}

    more = (("finish", "ratios", ratio), ("pass", "LAMB", second)) if adapt else ()
    return Rule(
        state={"m": "exp_avg", "v": "exp_avg_sq"},
        constants="b1 b2 eps decay",
        derive=derive,
        formulas=(("pass", "moments" if adapt else "LAMB", first), *more),
        extras=extras,
        sums="pp uu" if adapt else "",
        finished="ratio" if adapt else "",
        counts=True,
        on_device=True,
    )


class LAMB(OwnArguments):
    """u = m̂ / (√v̂ + ε) + λ·p;  p ← p − lr · ‖p‖ / ‖u‖ · u, norms per tensor, 1 where one is 0 or
    nan: a nan in one element does not reach the others.

    ("Large Batch Optimization for Deep Learning", 2019.) State: ``step``, ``exp_avg``,
    ``exp_avg_sq``. Groups without decay, such as biases and norms, are not adapted unless
    ``always_adapt``. ``params``, ``lr``, ``betas``, ``eps`` (ε), ``weight_decay`` (λ), ``maximize``
    and ``capturable`` are those of ``torch.optim.AdamW``. Its usual clipping is ``max_norm=1.0``;
    further arguments: see :class:`deuteron.optim.Ours`. The state of float16 parameters is float32:
    squares of gradients underflow in float16, and the norms would not be those of the update.

    >>> opt = dt.optim.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_norm=1.0)

    Three launches per batch on a GPU: moments and sums, ratios, update; one if it is not adapted.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        if ours.get("state_dtype") is torch.float16:
            raise ValueError(
                "LAMB has no state_dtype float16, in which squares of gradients underflow; use "
                "bfloat16 or float32"
            )
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"maximize": maximize, "capturable": capturable}
        super().__init__(params, ours, **given, always_adapt=always_adapt, **flags)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        return lamb(group["weight_decay"] != 0 or bool(group["always_adapt"]), extras)

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        kind = super()._stored_as(p, key)
        return torch.float32 if kind is torch.float16 else kind

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        return [*group["betas"], group["eps"], group["weight_decay"]]
