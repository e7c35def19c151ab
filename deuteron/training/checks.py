"""Checks of what a training step is given, and the errors that they raise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deuteron.errors import GraphError

ASKED = "a training step"


def check_arguments(
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    autocast: torch.dtype | None,
    max_norm: float | None,
    accumulate: int,
) -> None:
    """Raise an error if these arguments of ``train_step`` cannot make a step."""
    parts = [each for each in (model, loss_fn) if isinstance(each, nn.Module)]
    params = {p: name for part in parts for name, p in part.named_parameters()}
    ours = getattr(optimizer, "ours", {})
    check_mode(model)
    if not any(p.requires_grad for p in params):
        remedy = "call requires_grad_() on what is to be trained"
        raise GraphError("no parameter requires a gradient", asked=ASKED, remedy=remedy)
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in params]
    if others:
        wrong = f"{len(others)} parameters of the optimiser are not the model's"
        where = f"the first is of shape {tuple(others[0].shape)}"
        remedy = "make the optimiser of model.parameters(), after the model was moved and converted"
        raise GraphError(wrong, asked=ASKED, where=where, remedy=remedy)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        wrong = f"{type(optimizer).__name__} computes the loss several times in a step of its own"
        remedy = 'use torch.compile(model, backend="deuteron"), and optimizer.step(closure)'
        raise GraphError(wrong, asked=ASKED, remedy=remedy)
    tables = on_host(parts)
    devices = {p.device: name for p, name in params.items() if p not in tables}
    if len(devices) > 1:
        listed = "; ".join(f"{name} is on {device}" for device, name in devices.items())
        raise GraphError(f"parameters are on several devices: {listed}", asked=ASKED)
    if autocast not in (None, torch.bfloat16, torch.float16):
        remedy = "use torch.bfloat16 or torch.float16"
        raise GraphError(f"autocast={autocast!r}", asked=ASKED, remedy=remedy)
    if max_norm is not None and (not max_norm > 0 or ours.get("max_norm") is not None):
        wrong = f"max_norm={max_norm!r}, and the optimiser's is {ours.get('max_norm')!r}"
        raise GraphError(wrong, asked=ASKED, remedy="give one of them, above 0")
    if type(accumulate) is not int or accumulate < 1:
        wrong = f"accumulate={accumulate!r}"
        raise GraphError(wrong, asked=ASKED, remedy="give a whole number from 1 on")


def on_host(parts: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Parameters that stay on the host, whatever device the rest of a model is on."""
    modules = (m for part in parts for m in part.modules() if getattr(m, "stays_on_host", False))
    return {p for module in modules for p in module.parameters()}


def home(parts: Sequence[nn.Module]) -> torch.device:
    """The device of a model: that of its first parameter that need not stay on the host."""
    params, tables = [p for part in parts for p in part.parameters()], on_host(parts)
    return next((p for p in params if p not in tables), params[0]).device


def check_mode(model: nn.Module) -> None:
    """Raise an error if the model is in evaluation mode, where a validation may have left it."""
    if not model.training:
        remedy = "call model.train() before"
        raise GraphError("the model is in evaluation mode", asked=ASKED, remedy=remedy)


def checked_loss(loss: Any) -> torch.Tensor:
    """Return the loss, or raise an error unless it is one number that has a gradient."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            what = f"of shape {tuple(loss.shape)}" if loss.numel() != 1 else "without a gradient"
        remedy = "return one number that depends on the parameters, such as loss.mean()"
        raise GraphError(f"the loss is {what}", asked=ASKED, remedy=remedy)
    return loss


def refused_by_model(error: Exception, leaves: Sequence[Any]) -> GraphError:
    """The model's or the loss's own complaint about a batch, without the tracer's words around
    it."""
    said = re.search(r"got \w+\((['\"])(.*)\1\)$", str(error), re.M)
    wrong = said[2] if said else str(error).splitlines()[0]
    shapes = ", ".join(str(list(t.shape)) for t in leaves if isinstance(t, torch.Tensor))
    remedy = "call the model and the loss with this batch to see where"
    if "mixed torch.Tensor and DTensor" in wrong:  # mostly from logits that are DTensors
        remedy = "call the step within torch.distributed.tensor.parallel.loss_parallel(), or have "
        remedy += "the last layer return plain tensors (use_local_output=True)"
    return GraphError(wrong, asked=ASKED, where=f"a batch of {shapes}", remedy=remedy)
