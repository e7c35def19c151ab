"""The types of ``torch.autocast``. It runs some functions in float32, some in its own type, and
some in the widest type of their arguments. Its lists differ from device to device; these are
torch's lists, for our functions."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from typing import Any

import torch
from torch._C import _is_any_autocast_enabled as autocasting

from deuteron.functional.context import under_autocast
from deuteron.functional.core import Build, Function
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor
_has = torch._C._dispatch_has_kernel_for_dispatch_key
# the devices for which this version of torch has a rule for rms_norm; other versions have none
_RMS = frozenset(d for d in ("cuda", "cpu") if _has("aten::rms_norm", f"Autocast{d.upper()}"))
_ON_GPU = """layer_norm group_norm softmax log_softmax norm op_softplus op_sum op_cumsum op_cumprod
    op_resize"""
# function → the devices on which 16-bit tensors are cast to float32
FLOAT32: dict[str, frozenset[str]] = {
    **dict.fromkeys(_ON_GPU.split(), frozenset({"cuda"})),
    "rms_norm": _RMS,
    "op_prod": frozenset({"cuda", "cpu"}),
    "op_grid_sample": frozenset({"cpu"}),
}


class Cast(Function):
    """A function that autocast runs in float32 on some device. There 16-bit tensors are cast inside
    the same kernel: the graph is written by ``wide`` if it is given, else by ``build`` on widened
    tensors."""

    def __init__(self, name: str, build: Build, *how: Any, wide: Build | None = None) -> None:
        """``how``: a schema and defaults, as for :class:`Function`."""
        super().__init__(name, build, *how)
        wide = wide or _widened(build)
        self.wide = Function(f"{name}_float32", wide, self.schema, self.defaults)

    def __call__(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        if autocasting():
            x = next(t for t in tensors if t is not None)
            if x.device.type in FLOAT32[self.name] and under_autocast(x):
                return self.wide(*tensors, **attrs)
        return super().__call__(*tensors, **attrs)


def _widened(build: Build) -> Build:
    def wide(b: Ops, *tensors: Sym | None, **attrs: Any) -> Any:
        return build(b, *(None if t is None else b.upcast(t) for t in tensors), **attrs)

    return wide


def in_float32(x: Tensor, on: Collection[str]) -> Tensor:
    """Return ``x`` in the type in which autocast runs a function that it wants in float32 on the
    devices ``on``."""
    if autocasting() and x.device.type in on and under_autocast(x) and x.itemsize < 4:
        return x.float()
    return x


def lower(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as autocast casts them for a function that it runs in its own type."""
    if not autocasting() or not under_autocast(tensors[0]):
        return tensors
    kind = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t if t.dtype is torch.float64 else t.to(kind) for t in tensors)


def widest(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as autocast would cast them for a function that it runs, on a GPU, in the
    widest of their types."""
    if not autocasting() or not tensors[0].is_cuda or not under_autocast(tensors[0]):
        return tensors
    kind = reduce(torch.promote_types, (t.dtype for t in tensors))
    return tuple(t.to(kind) for t in tensors)
