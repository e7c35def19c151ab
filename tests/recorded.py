"""A CUDA Graph in miniature, on the CPU: operators are written down with the tensors that they read
and write, and done again in the same memory. As in a real one, recording changes nothing, reading a
number on the host is refused, and a number of the host stays what it was."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deuteron.training import capture, host, step

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}


class Recorded(TorchDispatchMode):
    """The operators of a function, in order."""

    now: Recorded | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name.partition("::")[2] in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                new = func(*args, **kwargs)
                for old, made in zip(pytree.tree_leaves(out), pytree.tree_leaves(new), strict=True):
                    if isinstance(old, torch.Tensor) and old is not made:
                        old.copy_(made)


def recorded(
    fn: Any, warmups: int = 0, pool: Any = None, stream: Any = None
) -> tuple[Recorded, Any]:
    """What ``deuteron.plan.cuda_graph.capture`` gives, of this kind."""
    made, random = Recorded(), torch.get_rng_state()
    Recorded.now = made
    try:
        with made:
            result = fn()
    finally:
        Recorded.now = None
        with torch.no_grad():
            for tensor, before in reversed(made.before.values()):
                tensor.copy_(before)
        torch.set_rng_state(random)
    return made, result


def on_the_cpu(monkeypatch) -> None:
    """Steps of models on the CPU are captured, by what is above."""
    nothing = SimpleNamespace(
        wait_stream=lambda _: None, wait_event=lambda _: None, record=lambda _: None
    )
    cuda = {"Stream": lambda _: nothing, "Event": lambda: nothing, "synchronize": lambda: None}
    cuda |= {"current_stream": lambda _: nothing, "graph_pool_handle": lambda: None}
    cuda |= {name: lambda _: contextlib.nullcontext() for name in ("stream", "device")}
    counts = ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated")
    cuda |= {name: lambda: 0 for name in counts}
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made = host.Settings.__init__

    def asked(self, optimizer, device, scaled):
        made(self, optimizer, device, scaled)
        self.note = next(filter(None, map(self._why_not, optimizer.param_groups)), "")

    monkeypatch.setattr(host.Settings, "__init__", asked)
    monkeypatch.setattr(capture, "capture", recorded)
    monkeypatch.setattr(step, "capturing", lambda _: Recorded.now is not None)
