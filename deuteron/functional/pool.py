"""Pooling in one, two or three dimensions, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch._C import _nn
from torch._C._nn import _conv_depthwise2d as depthwise  # type: ignore[attr-defined]

from deuteron.errors import BindError
from deuteron.functional.autocast import in_float32
from deuteron.functional.core import Function
from deuteron.functional.library import (
    ANY,
    LOW,
    SHORT_BYTES,
    delegates,
    is_differentiated,
    is_launch_bound,
    traceable,
)
from deuteron.functional.operators import OPERATORS, call
from deuteron.functional.reduce import extreme_is_torchs, mean_is_torchs
from deuteron.functional.wrapper import Plain
from deuteron.ops import Ops, Sym
from deuteron.ops.pool import mean_gradient_faults
from deuteron.ops.pool_winners import fits
from deuteron.target import has_triton

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")
Size = int | Sequence[int]


def _each(value: Size | None, dims: int, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    given = _whole(value, name)
    if len(given) not in (1, dims):
        raise BindError(
            f"{name}={given} has {len(given)} numbers for {dims} dimensions",
            remedy=f"give one number, or {dims}",
        )
    return given * (dims if len(given) == 1 else 1)


def _whole(value: Any, name: str) -> tuple[int, ...]:
    """One whole number or several, as a tuple."""
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(hasattr(each, "__index__") for each in given):
        raise BindError(
            f"{name}={value!r} is not a whole number, nor several",
            asked=f"pooling with {name}={value!r}",
            remedy=f"give {name} as an int or as a tuple of ints",
        )
    return tuple(index(each) for each in given)


def _batched(x: Tensor, dims: int, run: Callable[[Tensor], Any]) -> Any:
    """``run`` on x with a batch; torch takes an image without one, too."""
    if x.ndim == dims + 2:
        return run(x)
    if x.ndim != dims + 1:
        raise BindError(
            f"x {list(x.shape)} has rank {x.ndim}, pooling in {dims} dimensions needs {dims + 2}",
            remedy="x is [batch, channels, …]; the batch may be left out",
        )
    found = run(x.unsqueeze(0))
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


def _mean_is_torchs(x: Tensor, kernel_size: Size) -> bool:
    """Whether torch pools on a CPU: what is small, or not in our kernel's types or order."""
    known = x.dtype is torch.float32 or x.dtype in LOW
    return x.nbytes < SHORT_BYTES or not known or not x.is_contiguous()


def _max_is_torchs(x: Tensor, return_indices: bool) -> bool:
    """Ours does not know the places, which the gradient needs, too."""
    return return_indices or is_differentiated(x) or _mean_is_torchs(x, 0)


def _max_pool(
    dims: int,
    x: Tensor,
    kernel: Size,
    stride: Size | None,
    padding: Size,
    dilation: Size,
    ceil_mode: bool,
    return_indices: bool,
) -> Any:
    window = _each(kernel, dims, "kernel_size")
    keep = not return_indices and _wants_winners(x, dims, window)
    name = (
        "max_pool_with_indices"
        if return_indices
        else "max_pool_with_winners"
        if keep
        else "max_pool"
    )

    def run(x: Tensor) -> Any:
        found = call(
            name,
            x,
            kernel_size=window,
            stride=_each(stride, dims, "stride"),
            ceil_mode=ceil_mode,
            padding=_each(padding, dims, "padding"),
            dilation=_each(dilation, dims, "dilation"),
        )
        return found[0] if keep else found

    return _batched(x, dims, run)


def _wants_winners(x: Tensor, dims: int, window: Sequence[int] | None) -> bool:
    """Whether the gradient is to read which element of each window won, a byte, instead of x: on a
    GPU, where a kernel of ours notes it on the way."""
    known = dims < 3 and window is not None and fits(window)
    return known and x.is_cuda and is_differentiated(x) and has_triton()


def _may_miss(dims: int, x: Tensor, dilation: Size) -> bool:
    """Whether a window may step over all of x, from padding to padding: torch's kernels take
    that for a place in memory. Ours looks closer."""
    steps = _each(dilation, dims, "dilation") or ()
    return any(d > n for d, n in zip(steps, x.shape[-dims:], strict=True))


def _torch_max_pool(dims: int) -> Callable[..., Any]:
    plain, both = getattr(torch, f"max_pool{dims}d"), getattr(F, f"max_pool{dims}d_with_indices")

    def run(
        x: Tensor,
        kernel_size: Size,
        stride: Size | None,
        padding: Size,
        dilation: Size,
        ceil_mode: bool,
        return_indices: bool,
    ) -> Any:
        if dilation != 1 and padding != 0 and _may_miss(dims, x, dilation):
            return NotImplemented
        if return_indices:
            return both(x, kernel_size, stride, padding, dilation, ceil_mode)
        step = () if stride is None else stride
        return plain(x, kernel_size, step, padding, dilation, ceil_mode)

    return run


@delegates(
    _torch_max_pool(1), ordered=False, keeps_type=True, on_cpu=_max_is_torchs, asks="return_indices"
)
def max_pool1d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest value in each window, as ``torch.nn.functional.max_pool1d``; with
    ``return_indices`` also where it stood."""
    return _max_pool(1, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@delegates(
    _torch_max_pool(2), ordered=False, keeps_type=True, on_cpu=_max_is_torchs, asks="return_indices"
)
def max_pool2d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest value in each window, as ``torch.nn.functional.max_pool2d``; with
    ``return_indices`` also where it stood."""
    return _max_pool(2, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@delegates(_torch_max_pool(3), ordered=False, on_cpu=ANY)
def max_pool3d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest value in each window, as ``torch.nn.functional.max_pool3d``; with
    ``return_indices`` also where it stood."""
    if not return_indices:  # torch's autocast has no rule for the function that finds them, too
        x = in_float32(x, ("cpu",))
    return _max_pool(3, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _avg_pool(
    dims: int,
    x: Tensor,
    kernel: Size,
    stride: Size | None,
    padding: Size,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    out: Tensor = _batched(
        x,
        dims,
        lambda x: call(
            "avg_pool",
            x,
            kernel_size=_each(kernel, dims, "kernel_size"),
            stride=_each(stride, dims, "stride"),
            padding=_each(padding, dims, "padding"),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor=divisor,
        ),
    )
    return out


@delegates(torch.avg_pool1d, keeps_type=True, on_cpu=_mean_is_torchs)
def avg_pool1d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window, as ``torch.nn.functional.avg_pool1d``."""
    return _avg_pool(1, x, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def _torch_avg_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    if padding != 0 and mean_gradient_faults(x) and is_differentiated(x):
        return NotImplemented
    return _nn.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor)


@delegates(
    _torch_avg_pool2d,
    plain=Plain(
        _nn.avg_pool2d, "plain(x, kernel_size) if stride is None else plain(x, kernel_size, stride)"
    ),
    keeps_type=True,
    on_cpu=_mean_is_torchs,
)
def avg_pool2d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window, as ``torch.nn.functional.avg_pool2d``."""
    return _avg_pool(
        2, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


@delegates(_nn.avg_pool3d, ordered=False, on_cpu=ANY)
def avg_pool3d(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window, as ``torch.nn.functional.avg_pool3d``."""
    x = in_float32(x, ("cpu",))
    return _avg_pool(
        3, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


Output = int | None | Sequence[int | None]


def _adaptive(kind: str, dims: int, x: Tensor, size: Output, return_indices: bool = False) -> Any:
    given = tuple(size) if isinstance(size, list | tuple) else (size,) * dims
    _whole([n for n in given if n is not None], "output_size")
    if len(given) != dims:
        raise BindError(
            f"output_size={given} has {len(given)} numbers for {dims} dimensions",
            remedy=f"give one number, or {dims}",
        )
    space = x.shape[-dims:]
    full = tuple(n if s is None else s for n, s in zip(space, given, strict=True))
    name = f"adaptive_{kind}_pool" + ("_with_indices" if return_indices else "")
    return _batched(x, dims, lambda x: ADAPTIVE[name](x, size=full))


def _adaptive_function(name: str) -> Function:
    def build(b: Ops, x: Sym, *, size: tuple[int, ...]) -> Any:
        return b.call(name, x, size=size)

    return Function(name, build)


ADAPTIVE = {
    name: _adaptive_function(name)
    for name in ("adaptive_avg_pool", "adaptive_max_pool", "adaptive_max_pool_with_indices")
}


def _torch_adaptive_avg(dims: int) -> Callable[..., Any]:
    """torch's function in C++, or with a None the one that reads it. The mean of everything is a
    reduction, and a large one better as ours."""
    direct = getattr(torch if dims == 1 else _nn, f"adaptive_avg_pool{dims}d")
    read = getattr(F, f"adaptive_avg_pool{dims}d")

    def run(x: Tensor, output_size: Output) -> Any:
        whole = output_size == 1 or output_size == (1, 1) or output_size == [1, 1]
        if whole and not is_launch_bound(x) and not (x.is_cpu and mean_is_torchs(x, None)):
            return NotImplemented
        return (direct if isinstance(output_size, int) else read)(x, output_size)

    return run


def _torch_adaptive_max(dims: int) -> Callable[..., Any]:
    """torch's function in C++, which always finds the places, too; with a None, the one that
    reads it."""
    direct = getattr(torch if dims == 1 else _nn, f"adaptive_max_pool{dims}d")
    whole = getattr(F, f"adaptive_max_pool{dims}d")

    def run(x: Tensor, output_size: Output, return_indices: bool) -> Any:
        if not isinstance(output_size, int):
            return whole(x, output_size, return_indices)
        found = direct(x, output_size)
        return found if return_indices else found[0]

    return run


def _adaptive_by_torch(kind: str, dims: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Delegation of adaptive pooling, and at once where one number says the size."""
    direct = getattr(torch if dims == 1 else _nn, f"adaptive_{kind}_pool{dims}d")
    whole = _torch_adaptive_avg(dims) if kind == "avg" else _torch_adaptive_max(dims)
    text = "plain(x, output_size)" + ("[0]" if kind == "max" else "")
    return delegates(
        whole,
        plain=Plain(direct, text, where="output_size.__class__ is int"),
        ordered=False,
        keeps_type=dims < 3,
        on_cpu=ANY,
    )


@_adaptive_by_torch("avg", 1)
def adaptive_avg_pool1d(x: Tensor, output_size: Output) -> Tensor:
    """The mean of windows chosen so that ``output_size`` remain. As
    ``torch.nn.functional.adaptive_avg_pool1d``."""
    out: Tensor = _adaptive("avg", 1, x, output_size)
    return out


@_adaptive_by_torch("avg", 2)
def adaptive_avg_pool2d(x: Tensor, output_size: Output) -> Tensor:
    """The mean of windows chosen so that ``output_size`` remain; None keeps a dimension as it is.
    As ``torch.nn.functional.adaptive_avg_pool2d``."""
    out: Tensor = _adaptive("avg", 2, x, output_size)
    return out


@_adaptive_by_torch("avg", 3)
def adaptive_avg_pool3d(x: Tensor, output_size: Output) -> Tensor:
    """The mean of windows chosen so that ``output_size`` remain; None keeps a dimension as it is.
    As ``torch.nn.functional.adaptive_avg_pool3d``."""
    out: Tensor = _adaptive("avg", 3, in_float32(x, ("cpu",)), output_size)
    return out


@_adaptive_by_torch("max", 1)
def adaptive_max_pool1d(x: Tensor, output_size: Output, return_indices: bool = False) -> Any:
    """The largest of windows chosen so that ``output_size`` remain. As
    ``torch.nn.functional.adaptive_max_pool1d``. With ``return_indices`` also where they stood."""
    return _adaptive("max", 1, x, output_size, return_indices)


@_adaptive_by_torch("max", 2)
def adaptive_max_pool2d(x: Tensor, output_size: Output, return_indices: bool = False) -> Any:
    """The largest of windows chosen so that ``output_size`` remain; None keeps a dimension as it
    is. As ``torch.nn.functional.adaptive_max_pool2d``. With ``return_indices`` also where they
    stood."""
    return _adaptive("max", 2, x, output_size, return_indices)


@_adaptive_by_torch("max", 3)
def adaptive_max_pool3d(x: Tensor, output_size: Output, return_indices: bool = False) -> Any:
    """The largest of windows chosen so that ``output_size`` remain; None keeps a dimension as it
    is. As ``torch.nn.functional.adaptive_max_pool3d``. With ``return_indices`` also where they
    stood."""
    return _adaptive("max", 3, in_float32(x, ("cpu",)), output_size, return_indices)


def _global(b: Ops, x: Sym, *, kind: str) -> Sym:
    axes = tuple(range(2, x.rank))
    return b.one("mean" if kind == "avg" else "max", x, axes=axes, keepdim=True)


GLOBAL = Function("global_pool", _global)


def _global_by_torch(
    call: Callable[..., Tensor], on_cpu: Callable[[Tensor, Any], bool]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def run(x: Tensor) -> Any:
        return call(x, SPATIAL[x.ndim], True) if x.ndim in SPATIAL else NotImplemented

    of_images = Plain(call, f"plain(x, {SPATIAL[4]}, True)", where="x.ndim == 4")
    return delegates(run, plain=of_images, keeps_type=True, on_cpu=on_cpu)


SPATIAL = {3: (2,), 4: (2, 3), 5: (2, 3, 4)}  # by rank


@_global_by_torch(torch.mean, mean_is_torchs)
def global_avg_pool(x: Tensor) -> Tensor:
    """The mean of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="avg")


@_global_by_torch(torch.amax, extreme_is_torchs)
def global_max_pool(x: Tensor) -> Tensor:
    """The largest of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="max")


def _torch_weighted_pool2d(x: Tensor, weight: Tensor, stride: Size | None, padding: Size) -> Any:
    """As a convolution in which no channel sees another."""
    shape, window = x.shape, weight.shape
    if len(shape) != 4:
        return NotImplemented
    channels = shape[1]
    if len(window) == 2:
        taps = weight.expand(channels, 1, *window)
    elif len(window) == 3 and window[0] == channels:
        taps = weight.unsqueeze(1)
    else:
        return NotImplemented
    step = window[-2:] if stride is None else stride
    if x.is_cuda and not torch.is_grad_enabled():
        # what conv2d calls in the end, after a look at all the libraries that might do it
        return depthwise(x, taps, window[-2:], None, step, padding, 1)
    return torch.conv2d(x, taps, None, step, padding, 1, channels)


@delegates(_torch_weighted_pool2d, ordered=False)
def weighted_pool2d(
    x: Tensor, weight: Tensor, stride: Size | None = None, padding: Size = 0
) -> Tensor:
    """The sum of each window of x [N, C, H, W], its elements times ``weight``: one window [kh, kw]
    for all channels, or [C, kh, kw]. Weights that add up to 1 give a weighted mean.

    Windows start every ``stride`` (by default next to each other), after ``padding`` zeros.

    >>> blurred = dt.functional.weighted_pool2d(x, torch.full((3, 3), 1 / 9), stride=1, padding=1)
    """
    if x.ndim != 4:
        raise BindError(
            f"x {list(x.shape)} has rank {x.ndim}, weighted_pool2d needs 4",
            asked="weighted_pool2d(x, weight)",
            remedy="x is [batch, channels, h, w]; x.unsqueeze(0) gives it a batch",
        )
    return OPERATORS["weighted_pool"].one(
        x, weight, stride=_each(stride, 2, "stride"), padding=_each(padding, 2, "padding")
    )


@traceable
def pyramid_pool2d(x: Tensor, sizes: Size = (1, 2, 3, 6), kind: str = "avg") -> Tensor:
    """x [N, C, H, W] pooled over grids of several ``sizes``, one result after another, as
    spatial-pyramid pooling wants it: [N, C, Σ s²]; N may be left out. ``kind``: "avg" or "max".

    >>> features = dt.functional.pyramid_pool2d(x, (1, 2, 4), "max").flatten(1)
    """
    grids = _whole(sizes, "sizes")
    out: Tensor = _batched(x, 2, lambda x: OPERATORS["pyramid_pool"].one(x, sizes=grids, kind=kind))
    return out
