"""Pooling in one, two or three dimensions, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.activation import SHORT_BYTES
from deuteron.functional.autocast import in_float32
from deuteron.functional.context import is_differentiated
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, LOW, delegates, traceable
from deuteron.functional.operators import named, operator
from deuteron.functional.reduce import extreme_is_torchs, mean_is_torchs
from deuteron.functional.small import is_small
from deuteron.ops import Ops, Sym
from deuteron.ops.pool import mean_gradient_faults
from deuteron.ops.pool_taps import fits
from deuteron.target import has_triton

Size = int | Sequence[int]
Output = int | None | Sequence[int | None]
MAX, MAX_WITH_INDICES = operator("max_pool"), operator("max_pool_with_indices")
MAX_WITH_TAPS, AVG = operator("max_pool_with_taps"), operator("avg_pool")
WEIGHTED, PYRAMID = operator("weighted_pool"), operator("pyramid_pool")


def _each(value: Size | None, dims: int, name: str) -> tuple[int, ...] | None:
    """A number for each dimension."""
    if value is None:
        return None
    given = _whole(value, name)
    if len(given) not in (1, dims):
        raise BindError(
            f"{name}={given} has {len(given)} numbers for {dims} dimensions",
            remedy=f"give one number, or {dims}",
        )
    return given * (dims if len(given) == 1 else 1)


def _sizes(dims: int, **given: Size | None) -> dict[str, Any]:
    return {name: _each(value, dims, name) for name, value in given.items()}


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


# ---- windows


def _mean_is_torchs(x: Tensor, *_: Any, **__: Any) -> bool:
    """Whether torch pools on a CPU: what is small, or not in our kernel's types or order."""
    known = x.dtype is torch.float32 or x.dtype in LOW
    return x.nbytes < SHORT_BYTES or not known or not x.is_contiguous()


def _max_is_torchs(x: Tensor, *args: Any, return_indices: bool = False, **_: Any) -> bool:
    """Ours does not know the places, which the gradient needs, too."""
    return return_indices or args[5:] == (True,) or is_differentiated(x) or _mean_is_torchs(x)


def _wants_taps(x: Tensor, dims: int, window: Sequence[int] | None) -> bool:
    """Whether the gradient is to read which tap of each window won, a byte, instead of x: on a GPU,
    where a kernel of ours notes it on the way."""
    known = dims < 3 and window is not None and fits(window)
    return known and x.is_cuda and is_differentiated(x) and has_triton()


def _max_pool(dims: int) -> Callable[..., Any]:
    name = f"max_pool{dims}d"

    def function(
        x: Tensor,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if dims == 3 and not return_indices:  # autocast has no rule for torch's that finds places
            x = in_float32(x, ("cpu",))
        window = _each(kernel_size, dims, "kernel_size")
        keep = not return_indices and _wants_taps(x, dims, window)
        run = MAX_WITH_INDICES if return_indices else MAX_WITH_TAPS if keep else MAX
        sizes = _sizes(dims, stride=stride, padding=padding, dilation=dilation)
        call = partial(run, kernel_size=window, ceil_mode=ceil_mode, **sizes)
        found = _batched(x, dims, call)
        return found[0] if keep else found

    def may_miss(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Size = 0,
        dilation: Size = 1,
        *_: Any,
        **__: Any,
    ) -> bool:
        """Whether a window may step over all of x, from padding to padding: torch's kernels take
        that for a place in memory. Ours looks closer."""
        if dilation == 1 or padding == 0:
            return False
        steps = _each(dilation, dims, "dilation") or ()
        return any(d > n for d, n in zip(steps, x.shape[-dims:], strict=True))

    doc = (
        f"The largest value in each window, as ``torch.nn.functional.{name}``; with\n"
        "``return_indices`` also where it stood."
    )
    on_cpu = ANY if dims == 3 else _max_is_torchs
    handed = delegates(
        getattr(F, name), unless=may_miss, on_cpu=on_cpu, ordered=False, autocast=dims < 3
    )
    return handed(named(function, name, doc))


def mean_gradient_is_wrong(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Size = 0, *_: Any, **__: Any
) -> bool:
    """Of padded windows of channels last, in some versions of torch on a GPU."""
    return padding != 0 and mean_gradient_faults(x) and is_differentiated(x)


def _avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"avg_pool{dims}d"

    def function(
        x: Tensor,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if dims == 3:
            x = in_float32(x, ("cpu",))
        sizes = _sizes(dims, kernel_size=kernel_size, stride=stride, padding=padding)
        means = {"count_include_pad": count_include_pad, "divisor": divisor_override}
        out: Tensor = _batched(x, dims, partial(AVG, ceil_mode=ceil_mode, **sizes, **means))
        return out

    shown: Any = named(
        function, name, f"The mean of each window, as ``torch.nn.functional.{name}``."
    )
    if dims == 1:  # torch's has no divisor
        own = signature(function)
        shown.__signature__ = own.replace(parameters=list(own.parameters.values())[:-1])
    handed = delegates(
        getattr(F, name),
        unless=mean_gradient_is_wrong if dims == 2 else None,
        on_cpu=ANY if dims == 3 else _mean_is_torchs,
        ordered=dims < 3,
        autocast=dims < 3,
    )
    return handed(shown)


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))


# ---- windows chosen so that a given number remains


def _adaptive_function(name: str) -> Function:
    def build(b: Ops, x: Sym, *, size: tuple[int, ...]) -> Any:
        return b.call(name, x, size=size)

    return Function(name, build)


ADAPTIVE_AVG = _adaptive_function("adaptive_avg_pool")
ADAPTIVE_MAX = _adaptive_function("adaptive_max_pool")
ADAPTIVE_MAX_WITH_INDICES = _adaptive_function("adaptive_max_pool_with_indices")


def _adaptive(run: Function, dims: int, x: Tensor, size: Output) -> Any:
    if dims == 3:
        x = in_float32(x, ("cpu",))
    given = tuple(size) if isinstance(size, list | tuple) else (size,) * dims
    _whole([n for n in given if n is not None], "output_size")
    if len(given) != dims:
        raise BindError(
            f"output_size={given} has {len(given)} numbers for {dims} dimensions",
            remedy=f"give one number, or {dims}",
        )
    full = tuple(n if s is None else s for n, s in zip(x.shape[-dims:], given, strict=True))
    return _batched(x, dims, partial(run, size=full))


def _is_a_large_mean(x: Tensor, output_size: Output) -> bool:
    """The mean of everything is a reduction, and a large one better as ours."""
    whole = output_size == 1 or output_size == (1, 1) or output_size == [1, 1]
    return whole and not is_small(x) and not (x.is_cpu and mean_is_torchs(x))


def _adaptive_avg_pool(dims: int) -> Callable[..., Tensor]:
    name = f"adaptive_avg_pool{dims}d"

    def function(x: Tensor, output_size: Output) -> Tensor:
        out: Tensor = _adaptive(ADAPTIVE_AVG, dims, x, output_size)
        return out

    doc = (
        "The mean of windows chosen so that ``output_size`` remain; None keeps a dimension as it\n"
        f"is. As ``torch.nn.functional.{name}``."
    )
    handed = delegates(
        getattr(F, name), unless=_is_a_large_mean, on_cpu=ANY, ordered=False, autocast=dims < 3
    )
    return handed(named(function, name, doc))


def _adaptive_max_pool(dims: int) -> Callable[..., Any]:
    name = f"adaptive_max_pool{dims}d"

    def function(x: Tensor, output_size: Output, return_indices: bool = False) -> Any:
        run = ADAPTIVE_MAX_WITH_INDICES if return_indices else ADAPTIVE_MAX
        return _adaptive(run, dims, x, output_size)

    doc = (
        "The largest of windows chosen so that ``output_size`` remain; None keeps a dimension as\n"
        f"it is. As ``torch.nn.functional.{name}``. With ``return_indices`` also where they stood."
    )
    handed = delegates(getattr(F, name), on_cpu=ANY, ordered=False, autocast=dims < 3)
    return handed(named(function, name, doc))


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_avg_pool, (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(_adaptive_max_pool, (1, 2, 3))


# ---- everything, weights, pyramids


def _global(b: Ops, x: Sym, *, kind: str) -> Sym:
    return b.one(kind, x, axes=tuple(range(2, x.rank)), keepdim=True)


GLOBAL = Function("global_pool", _global)


def _over_positions(call: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        return call(x, tuple(range(2, x.ndim)), True) if x.ndim > 2 else NotImplemented

    return run


@delegates(_over_positions(torch.mean), on_cpu=mean_is_torchs, autocast=True)
def global_avg_pool(x: Tensor) -> Tensor:
    """The mean of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="mean")


@delegates(_over_positions(torch.amax), on_cpu=extreme_is_torchs, autocast=True)
def global_max_pool(x: Tensor) -> Tensor:
    """The largest of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="max")


def _torch_weighted_pool2d(
    x: Tensor, weight: Tensor, stride: Size | None = None, padding: Size = 0
) -> Any:
    """As a convolution in which no channel sees another."""
    channels, window = x.shape[1], weight.shape
    if x.ndim != 4 or (weight.ndim != 2 and (weight.ndim != 3 or window[0] != channels)):
        return NotImplemented
    taps = weight.expand(channels, 1, *window) if weight.ndim == 2 else weight.unsqueeze(1)
    step = window[-2:] if stride is None else stride
    return F.conv2d(x, taps, None, step, padding, 1, channels)


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
    return WEIGHTED.one(x, weight, **_sizes(2, stride=stride, padding=padding))


@traceable
def pyramid_pool2d(x: Tensor, sizes: Size = (1, 2, 3, 6), kind: str = "avg") -> Tensor:
    """x [N, C, H, W] pooled over grids of several ``sizes``, one result after another, as
    spatial-pyramid pooling wants it: [N, C, Σ s²]; N may be left out. ``kind``: "avg" or "max".

    >>> features = dt.functional.pyramid_pool2d(x, (1, 2, 4), "max").flatten(1)
    """
    grids = _whole(sizes, "sizes")
    out: Tensor = _batched(x, 2, partial(PYRAMID, sizes=grids, kind=kind))
    return out
