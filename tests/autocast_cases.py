"""Calls of ``dt.functional`` and of torch whose types are compared under ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from tests.functional_cases import ACTIVATIONS

f = dt.functional
Given = Callable[..., torch.Tensor]  # the shape of a tensor that the call makes
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Torchs:
    """torch's function of a name, wherever it lives."""

    def __getattr__(self, name: str) -> Any:
        if name == "norm":
            return torch.linalg.vector_norm
        return getattr(F, name, None) or getattr(torch, name)


def _simple(name: str) -> Callable[[Any, Given], Any]:
    return lambda m, t: getattr(m, name)(t(4, 8))


def _along(name: str) -> Callable[[Any, Given], Any]:
    return lambda m, t: getattr(m, name)(t(4, 8), dim=1)


def _pool(name: str, dims: int) -> Callable[[Any, Given], Any]:
    return lambda m, t: getattr(m, name)(t(2, 4, *(4,) * dims), 2)


def _with_places(dims: int) -> Callable[[Any, Given], Any]:
    name = f"max_pool{dims}d"
    return lambda m, t: getattr(m, name)(t(2, 4, *(4,) * dims), 2, return_indices=True)


def _mode(mode: str) -> Callable[[Any, Given], Any]:
    return lambda m, t: m.interpolate(t(2, 3, 4, 4), scale_factor=2, mode=mode)


# t(…) is of the type under test, t.full(…) in float32
CASES: dict[str, Callable[[Any, Any], Any]] = {
    **{n: _simple(n) for n in (*ACTIVATIONS, "glu", "sort")},
    **{
        n: _along(n)
        for n in """softmax log_softmax sum mean prod var amax amin argmax norm cumsum cumprod
            cummax cummin""".split()
    },
    "sum dtype": lambda m, t: m.sum(t(4, 8), dim=1, dtype=torch.bfloat16),
    "softmax dtype": lambda m, t: m.softmax(t(4, 8), 1, dtype=torch.bfloat16),
    "cumsum dtype": lambda m, t: m.cumsum(t(4, 8), 1, dtype=torch.float64),
    "topk": lambda m, t: m.topk(t(4, 8), 2),
    "threshold": lambda m, t: m.threshold(t(4, 8), 0.0, 1.0),
    "dropout": lambda m, t: m.dropout(t(4, 8), 0.0),
    "prelu": lambda m, t: m.prelu(t(4, 8), t.full(8)),
    "prelu same": lambda m, t: m.prelu(t(4, 8), t(8)),
    "layer_norm": lambda m, t: m.layer_norm(t(4, 8), (8,), t.full(8), t.full(8)),
    "layer_norm same": lambda m, t: m.layer_norm(t(4, 8), (8,), t(8), t(8)),
    "layer_norm bare": lambda m, t: m.layer_norm(t(4, 8), (8,)),
    "rms_norm same": lambda m, t: m.rms_norm(t(4, 8), (8,), t(8)),
    "rms_norm bare": lambda m, t: m.rms_norm(t(4, 8), (8,)),
    "group_norm": lambda m, t: m.group_norm(t(2, 4, 3, 3), 2, t.full(4), t.full(4)),
    "group_norm same": lambda m, t: m.group_norm(t(2, 4, 3, 3), 2, t(4), t(4)),
    "instance_norm": lambda m, t: m.instance_norm(t(2, 4, 3, 3)),
    "batch_norm": lambda m, t: m.batch_norm(t(2, 4, 3, 3), t.full(4) * 0, t.full(4)),
    "where": lambda m, t: m.where(t.full(4, 8) > 0, t(4, 8), t.full(4, 8)),
    "permute": lambda m, t: m.permute(t(4, 8), (1, 0)),
    **{
        f"{n}{d}d": _pool(f"{n}{d}d", d)
        for n in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
        for d in (1, 2, 3)
    },
    **{f"max_pool{d}d with places": _with_places(d) for d in (1, 2, 3)},
    **{n: _mode(n) for n in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")},
    "area of volumes": lambda m, t: m.interpolate(t(2, 3, 4, 4, 4), size=2, mode="area"),
    "grid_sample": lambda m, t: m.grid_sample(
        t(2, 3, 4, 4), t.full(2, 4, 4, 2), align_corners=False
    ),
    "grid_sample same": lambda m, t: m.grid_sample(
        t(2, 3, 4, 4), t(2, 4, 4, 2), align_corners=False
    ),
    "pixel_shuffle": lambda m, t: m.pixel_shuffle(t(2, 4, 3, 3), 2),
    "pixel_unshuffle": lambda m, t: m.pixel_unshuffle(t(2, 3, 4, 4), 2),
    "embedding": lambda m, t: m.embedding(t.full(4).long(), t(4, 8)),
    "cross_entropy": lambda m, t: m.cross_entropy(t(4, 8), t.full(4).long()),
    "cross_entropy soft": lambda m, t: m.cross_entropy(t(4, 8), t.full(4, 8)),
}


class Tensors:
    """Makes the tensors of a call."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    def full(self, *shape: int) -> torch.Tensor:
        numbers = torch.linspace(0.1, 0.9, max(1, torch.Size(shape).numel()))
        return numbers.reshape(shape).to(self.device)

    def __call__(self, *shape: int) -> torch.Tensor:
        return self.full(*shape).to(self.dtype)


def types(call: Callable[[Any, Any], Any], m: Any, dtype: torch.dtype, device: str) -> Any:
    """The types of what a call gives under autocast, or that it raises."""
    try:
        with torch.autocast(device, torch.bfloat16):
            found = call(m, Tensors(dtype, device))
    except Exception as wrong:
        return type(wrong)
    return [t.dtype for t in found] if isinstance(found, tuple) else found.dtype


def wrong(name: str, device: str) -> list[str]:
    """Where our types are not torch's, handed on or planned."""
    found = []
    for dtype in TYPES:
        want = types(CASES[name], _Torchs(), dtype, device)
        if isinstance(want, type):
            continue  # torch refuses the types
        for way in (f.delegation(True), f.delegation(False), nullcontext()):
            with way:
                got = types(CASES[name], f, dtype, device)
            if got != want:
                found.append(f"{dtype}: {got} instead of {want}")
    return found
