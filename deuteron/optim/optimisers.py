"""The optimisers: the arguments of each, and which rule (``kernels/optim_rules.py``) it runs."""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels import optim_rules as rules
from deuteron.kernels.optim import GROUP, GROUPS, Extras, Rule
from deuteron.kernels.optim_rules import ADAM, SCALES
from deuteron.optim.base import Fused, Group, Ours
from deuteron.optim.batch import TensorBatch, is_dense, same_memory_order
from deuteron.optim.runners import Control, Runner
from deuteron.optim.sharded import per_group

KINDS = dict(zip(ADAM.values(), (torch.int8, torch.uint8), strict=True))


class TorchsArguments(Fused):
    """Base of the optimisers that torch.optim has too. They take the arguments of the installed
    version of torch, and ours."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = [base for base in cls.__bases__ if base.__module__.startswith("torch.optim")]
        if not found:
            return
        torchs: Any = found[0]
        known = inspect.signature(torchs.__init__).parameters

        def init(self: TorchsArguments, *args: Any, **given: Any) -> None:
            ours: Any = {key: given.pop(key) for key in list(given) if key not in known}
            self._set(ours, bool(given.get("differentiable")))
            torchs.__init__(self, *args, **given)

        more = inspect.Parameter("ours", inspect.Parameter.VAR_KEYWORD, annotation="Unpack[Ours]")
        shown = inspect.Signature([*known.values(), more], return_annotation="None")
        init.__signature__ = shown  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[assignment,method-assign]


class OwnArguments(Fused):
    """Base of the optimisers that torch.optim does not have. It checks arguments against the same
    bounds as torch."""

    def __init__(self, params: Any, ours: Ours, **given: Any) -> None:
        betas, decay = given["betas"], ("weight_decay value", given["weight_decay"])
        rate, eps = ("learning rate", given["lr"]), ("epsilon value", given.get("eps", 0.0))
        for name, value in (rate, decay, eps):
            if not float(value) >= 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        if len(betas) != 2:
            raise ValueError(f"Invalid betas: {betas}; there are two of them")
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        self._set(ours)
        super().__init__(params, given)


class SGD(TorchsArguments, torch.optim.SGD):
    """torch.optim.SGD, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_norm=1.0)
    """

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        decay = group["weight_decay"] != 0
        return rules.sgd(group["momentum"] != 0, bool(group["nesterov"]), decay, extras)

    def _fresh(self, group: Group, state: dict[str, Any]) -> bool:
        return group["momentum"] != 0 and state.get("momentum_buffer") is None

    def _constants(self, group: Group, batch: TensorBatch) -> list[Any]:
        momentum, decay = group["momentum"], group["weight_decay"]
        kept = 1.0 if batch.fresh else 1.0 - group["dampening"]
        return ([decay] if decay != 0 else []) + ([momentum, kept] if momentum != 0 else [])

    def _run(self, run: Runner, batch: TensorBatch, group: Group, control: Control | None) -> None:
        """Run the step. The first gradient goes into the momentum buffer without dampening, so we
        must know whether a first step was skipped. Only if there is dampening the host reads that.
        """
        super()._run(run, batch, group, control)
        if batch.fresh:
            asks = group["dampening"] != 0 and control is not None and control.may_skip
            if asks and control is not None and control.pair[1].item():
                self._forget(batch)
            batch.fresh = False

    def _forget(self, batch: TensorBatch) -> None:
        """Delete the buffers after a first step that was skipped, as if it had never been called: a
        state dict that is saved now, and batches made anew, show that the first is still to come.
        """
        for p, state in zip(batch.params, batch.states, strict=True):
            del state["momentum_buffer"]
            if not state:
                del self.state[p]
        self._batches = []


class Adam(TorchsArguments, torch.optim.Adam):
    """torch.optim.Adam, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.
    """

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        decoupled, decay = bool(group["decoupled_weight_decay"]), group["weight_decay"] != 0
        return rules.adam(bool(group["amsgrad"]), decoupled, decay, extras)


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0, ema_decay=0.999)
    """


class Adafactor(TorchsArguments, torch.optim.Adafactor):
    """torch.optim.Adafactor: same arguments, groups and state dict.

    ``foreach`` is accepted and changes nothing. On a GPU all vectors take four launches, and all
    matrices of similar size seven: sums by row and column, moments, the length of the update, the
    update. Nothing is read on the host, so a CUDA Graph may capture a step. On the CPU it is one
    call of generated code for all matrices and one for all vectors. It computes in float32 where
    parameters have 16 bits. Of the further arguments (:class:`deuteron.optim.Ours`) it takes
    ``max_norm``, ``skip_nonfinite`` and ``ema_decay``.
    """

    _row_major = True
    _has_not = ("state_dtype", "master_weights")

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        of_matrices, of_vectors = rules.adafactor_of_matrices, rules.adafactor_of_vectors
        return (of_matrices if p.dim() > 1 else of_vectors)(extras)

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check(p, grad)
        if p.is_complex():
            wrong = f"{p.dtype} has no factored second moment"
            raise BindError(wrong, asked=self._asked(p), remedy="use Adam for it")

    def _like(self, p: torch.Tensor, key: str) -> torch.Tensor:
        shapes: dict[str, Any] = {"row_var": (*p.shape[:-1], 1)}
        shapes["col_var"] = (*p.shape[:-2], 1, *p.shape[-1:])
        return p.new_empty(shapes.get(key, p.shape))

    def _constants(self, group: Group, batch: TensorBatch) -> list[Any]:
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(batch.params[0].dtype).eps if eps1 is None else eps1
        return [group["beta2_decay"], eps1, eps2, group["d"], group["weight_decay"]]


class Lion(OwnArguments):
    """p ← (1 − lr·λ)·p − lr·sign(β₁·m + (1 − β₁)·g); m ← β₂·m + (1 − β₂)·g, where λ is
    ``weight_decay``.

    ("Symbolic Discovery of Optimization Algorithms", 2023.) State: ``exp_avg``. Decay is decoupled.
    ``params``, ``lr``, ``betas``, ``maximize`` and ``capturable`` are those of
    ``torch.optim.AdamW``; further arguments: see :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, ours, **given, maximize=maximize, capturable=capturable)

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        return rules.lion(extras)

    def _constants(self, group: Group, batch: TensorBatch) -> list[Any]:
        return [*group["betas"], group["weight_decay"]]


class LAMB(OwnArguments):
    """u = m̂ / (√v̂ + ε) + λ·p;  p ← p − lr · ‖p‖ / ‖u‖ · u, with norms per tensor. The ratio is 1
    if one of the norms is 0 or nan, so a nan in one element does not reach the others.

    ("Large Batch Optimization for Deep Learning", 2019.) State: ``step``, ``exp_avg``,
    ``exp_avg_sq``. In parameter groups without weight decay, such as biases and norms, the ratio is
    left out unless ``always_adapt``. ``params``, ``lr``, ``betas``, ``eps`` (ε), ``weight_decay``
    (λ), ``maximize`` and ``capturable`` are those of ``torch.optim.AdamW``. Its usual clipping is
    ``max_norm=1.0``; further arguments: see :class:`deuteron.optim.Ours`. The state of float16
    parameters is float32: squares of gradients underflow in float16, and the norms would not be
    those of the update.

    >>> opt = dt.optim.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_norm=1.0)

    Three launches per batch on a GPU: moments and sums, ratios, update; one without the ratio.
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
            wrong = "LAMB has no state_dtype float16, in which squares of gradients underflow"
            raise ValueError(f"{wrong}; use bfloat16 or float32")
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"maximize": maximize, "capturable": capturable}
        super().__init__(params, ours, **given, always_adapt=always_adapt, **flags)

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        return rules.lamb(group["weight_decay"] != 0 or bool(group["always_adapt"]), extras)

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        kind = super()._stored_as(p, key)
        return torch.float32 if kind is torch.float16 else kind


class AdamW8bit(OwnArguments):
    """AdamW with a quarter of the state: 2.03 bytes per element instead of 8.

    Groups of 256 elements share a float32 scale. The first moment is kept as ±A·(q/127)², the
    second as V·(q/255)⁴, so that both resolve small values better than large ones. One store is off
    by at most one level: 2·√(|m|·A)/127 + A/127² for m, about 4·v/q for v. Levels are rounded up or
    down at random (by a hash of element and step, so runs repeat exactly) so that the mean is kept:
    errors average out instead of adding up; expect single updates to be off by some per cent.
    An inf or nan spoils the state of its whole group of 256.

    Tensors of fewer than ``min_8bit_size`` elements keep their state as
    :class:`deuteron.optim.AdamW` does. On the CPU it saves memory, not time. Of the further
    arguments (:class:`deuteron.optim.Ours`) it takes all but ``state_dtype``; averages and master
    weights are in float32. ``params``, ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize``
    and ``capturable`` are those of ``torch.optim.AdamW``.

    If a parameter is a DTensor, each rank groups its own part. So a checkpoint of such state can
    only be loaded on as many ranks as saved it.

    >>> opt = dt.optim.AdamW8bit(model.parameters(), lr=3e-4)
    """

    _has_not = ("state_dtype",)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = 4096,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        self.min_8bit_size = min_8bit_size
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, ours, **given, maximize=maximize, capturable=capturable)

    def _is_large(self, p: torch.Tensor) -> bool:
        return p.numel() >= max(self.min_8bit_size, 1)

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        if self._is_large(p):
            return rules.adam_in_8_bits(extras)
        return rules.adam(False, True, True, extras)

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check(p, grad)
        if self._is_large(p) and (p.is_complex() or p.dtype == torch.float64):
            wrong = f"8 bits of state do not serve {p.dtype}"
            raise BindError(wrong, asked=self._asked(p), remedy="use AdamW for it")

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        if key in SCALES.values():
            return torch.float32
        return KINDS[key] if key in KINDS and self._is_large(p) else super()._stored_as(p, key)

    def _like(self, p: torch.Tensor, key: str) -> torch.Tensor:
        return per_group(p, GROUP) if key in SCALES.values() else super()._like(p, key)

    def _state_of(self, p: torch.Tensor, rule: Rule) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if rule.walk == GROUPS and "exp_avg_scale" not in state:
            for key in ("step", *ADAM.values()):  # state in another form, of another optimiser
                state.pop(key, None)
        elif rule.walk == GROUPS and is_dense(p) and not same_memory_order(state["exp_avg"], p):
            wrong = "its 8-bit state was saved in another memory order, and scales go by memory"
            remedy = "load the state before the parameter changes its memory format"
            raise BindError(wrong, asked=self._asked(p), remedy=remedy)
        return super()._state_of(p, rule)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"min_8bit_size": self.min_8bit_size}
