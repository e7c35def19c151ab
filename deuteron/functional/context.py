"""What is going on around a call: who records it, transforms it or differentiates it."""

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
from torch.autograd import forward_ad
from torch.cuda import is_current_stream_capturing

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # where there is CUDA


def in_transform() -> bool:
    """Whether vmap, jvp, torch.func.grad or dual numbers are at work. They must see torch's
    operators: to them the result of a kernel of ours is a constant."""
    return transforms_active() or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether somebody records operators, or runs them on tensors that are not real: a mode of the
    dispatcher (FakeTensorMode, make_fx) or ``torch.jit.trace``. To them the result of a kernel of
    ours is a constant, so the call has to be an operator of torch's."""
    return dispatch_modes() > 0 or jit_tracing()


def for_onnx() -> bool:
    """Whether the call is on its way into a file of ONNX, which has operators of its own only."""
    return (torch.compiler.is_compiling() or jit_tracing()) and torch.onnx.is_in_onnx_export()


def without_memory(*tensors: Tensor | None) -> bool:
    """Whether a tensor has no memory that a kernel could read: a meta tensor, a fake one, or one
    that stands for others, as distributed tensors do. The dispatcher knows what to do with it."""
    return any(
        isinstance(t, Tensor)
        and (t.is_meta or torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Python))
        for t in tensors
    )


def is_seen() -> bool:
    """Whether somebody besides us has to see the call: a compiler, a transform, who records."""
    return (
        torch.compiler.is_compiling()
        or transforms_active()
        or forward_ad._current_level >= 0
        or dispatch_modes() > 0
        or jit_tracing()
    )


def is_special() -> bool:
    """Whether something besides its arguments says how a call is answered, and torch's comparison
    of tensors does not see it."""
    return forward_ad._current_level >= 0 or dispatch_modes() > 0 or must_be_ordered()


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether nobody but us has to see the call, and all tensors have memory."""
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
    """Whether a gradient of one of ``values`` may follow, and no CUDA Graph is being captured: that
    is replayed without Python, so that a node written in Python costs nothing."""
    if is_grad_enabled():
        for t in values:
            if isinstance(t, Tensor) and t.requires_grad:
                return not is_captured(t)
    return False
