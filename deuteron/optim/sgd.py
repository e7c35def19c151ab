"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.kernels.optim_rules import sgd
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch
from deuteron.optim.runners import Control, Runner


class SGD(Fused, torch.optim.SGD):
    """torch.optim.SGD, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_norm=1.0)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **ours: Unpack[Ours],
    ) -> None:
        self._set(ours, differentiable)
        flags: Any = {"maximize": maximize, "foreach": foreach, "fused": fused}
        given = (lr, momentum, dampening, weight_decay, nesterov)
        torch.optim.SGD.__init__(self, params, *given, **flags)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        decay = group["weight_decay"] != 0
        return sgd(group["momentum"] != 0, bool(group["nesterov"]), decay, extras)

    def _fresh(self, group: dict[str, Any], state: dict[str, Any]) -> bool:
        return group["momentum"] != 0 and state.get("momentum_buffer") is None

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        momentum, decay = group["momentum"], group["weight_decay"]
        kept = 1.0 if batch.fresh else 1.0 - group["dampening"]
        return ([decay] if decay != 0 else []) + ([momentum, kept] if momentum != 0 else [])

    def _run(
        self, run: Runner, batch: Batch, group: dict[str, Any], control: Control | None
    ) -> None:
        """The first gradient goes into the buffer undamped, so whether a first step was skipped
        must be known; only where there is dampening is that read on the host."""
        super()._run(run, batch, group, control)
        if batch.fresh:
            asks = group["dampening"] != 0 and control is not None and control.may_skip
            if asks and control is not None and control.pair[1].item():
                self._forget(batch)
            batch.fresh = False

    def _forget(self, batch: Batch) -> None:
        """After a first step that was skipped there is no buffer, as if it had not been asked for:
        whoever saves the state now, or makes batches anew, finds that the first is still to come.
        """
        for p, state in zip(batch.params, batch.states, strict=True):
            del state["momentum_buffer"]
            if not state:
                del self.state[p]
        self._batches = []
