"""What goes on around a call: whether it is traced, transformed, captured or differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _get_deterministic_algorithms as must_be_ordered
from torch._C import _is_any_autocast_enabled as autocasting
from torch._C import _is_tracing as jit_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.cuda import is_current_stream_capturing

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None without CUDA


def in_transform() -> bool:
    """Whether vmap, jvp, torch.func.grad or dual numbers are active. They must see torch's
    operators, because to them the result of a kernel of ours is a constant."""
    return transforms_active() or forward_ad._current_level >= 0


def are_batched(grads: Iterable[Tensor | None]) -> bool:
    """Whether vmap computes several gradients at once: functorch's, or the older one of
    ``is_grads_batched``, which only marks its tensors."""
    return in_transform() or any(g is not None and is_legacy_batchedtensor(g) for g in grads)


def is_watched() -> bool:
    """Whether operators are recorded, or run on tensors without real data: by a mode of the
    dispatcher (FakeTensorMode, make_fx) or by ``torch.jit.trace``. To those the result of a kernel
    of ours is a constant, so the call has to be an operator of torch's."""
    return dispatch_modes() > 0 or jit_tracing()


def for_onnx() -> bool:
    """Whether the call is being exported to ONNX, which has operators of its own only."""
    return (torch.compiler.is_compiling() or jit_tracing()) and torch.onnx.is_in_onnx_export()


def without_memory(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors has no memory that a kernel could read: a meta tensor, a fake one,
    or one that stands for others, as distributed tensors do. torch's dispatcher knows what to do
    with it."""
    return any(
        isinstance(t, Tensor)
        and (t.is_meta or torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Python))
        for t in tensors
    )


def is_seen() -> bool:
    """Whether anything else has to see the call as an operator: a compiler, a transform, a
    tracer."""
    return (
        torch.compiler.is_compiling()
        or transforms_active()
        or forward_ad._current_level >= 0
        or dispatch_modes() > 0
        or jit_tracing()
    )


def is_special() -> bool:
    """Whether the answer to a call depends on something that torch's comparison of its tensors does
    not see: dual numbers, a mode of the dispatcher, or the demand for deterministic algorithms."""
    return forward_ad._current_level >= 0 or dispatch_modes() > 0 or must_be_ordered()


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing but us has to see the call, and all tensors have memory."""
    return not is_seen() and not without_memory(*tensors)


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    return autocasting() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def is_captured(x: Tensor) -> bool:
    """Whether a CUDA Graph records what is done with ``x``. The default stream, number 0, cannot be
    captured; asking CUDA about another one takes a microsecond."""
    return bool(x.is_cuda and raw_stream(x.get_device()) and is_current_stream_capturing())


def is_differentiated(x: Tensor) -> bool:
    """Whether a gradient of ``x`` may follow."""
    return x.requires_grad and is_grad_enabled()


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Whether one of ``values`` is a tensor that requires a gradient."""
    for t in values:  # noqa: SIM110  any() with a generator takes twice as long
        if isinstance(t, Tensor) and t.requires_grad:
            return True
    return False


def gradient_follows(*values: Any) -> bool:
    """Whether a gradient of one of ``values`` may follow while no CUDA Graph is captured. A graph
    is replayed without Python, so there an autograd node written in Python costs nothing."""
    if is_grad_enabled():
        for t in values:
            if isinstance(t, Tensor) and t.requires_grad:
                return not is_captured(t)
    return False
