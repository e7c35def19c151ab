"""Pooling in one, two or three dimensions, with the arguments of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.activation import SHORT_BYTES
from deuteron.functional.autocast import in_float32
from deuteron.functional.context import is_differentiated
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, LOW, delegates
from deuteron.functional.operators import from_table, operator
from deuteron.functional.reduce import extreme_is_torchs, mean_is_torchs
from deuteron.functional.small import is_small
from deuteron.ops import Ops, Sym
from deuteron.ops.pool import mean_gradient_faults
from deuteron.ops.pool_taps import fits
from deuteron.target import has_triton

Size = int | Sequence[int]
MAX, MAX_WITH_INDICES = operator("max_pool"), operator("max_pool_with_indices")
MAX_WITH_TAPS, AVG = operator("max_pool_with_taps"), operator("avg_pool")
WEIGHTED, PYRAMID = from_table("weighted_pool"), from_table("pyramid_pool")
ADAPTIVE_MAX, ADAPTIVE_AVG = operator("adaptive_max_pool"), operator("adaptive_avg_pool")
ADAPTIVE_MAX_WITH_INDICES = operator("adaptive_max_pool_with_indices")


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


def _mean_is_torchs(a: Any) -> bool:
    """Whether torch pools on a CPU: what is small, or not in our kernel's types or order."""
    known = a.x.dtype is torch.float32 or a.x.dtype in LOW
    return a.x.nbytes < SHORT_BYTES or not known or not a.x.is_contiguous()


def _max_is_torchs(a: Any) -> bool:
    """Ours does not know the places, which the gradient needs, too."""
    return a.return_indices or is_differentiated(a.x) or _mean_is_torchs(a)


def _wants_taps(x: Tensor, dims: int, window: tuple[int, ...]) -> bool:
    """Whether the gradient is to read which tap of each window won, a byte, instead of x: on a GPU,
    where a kernel of ours notes it on the way."""
    known = dims < 3 and fits(window * (dims if len(window) == 1 else 1))
    return known and x.is_cuda and is_differentiated(x) and has_triton()


def _may_miss(dims: int, a: Any) -> bool:
    """Whether a window may step over all of x, from padding to padding: torch's kernels take that
    for a place in memory. Ours looks closer."""
    if a.dilation in (1, (1,)) or a.padding in (0, (0,)):
        return False
    steps = a.dilation if isinstance(a.dilation, list | tuple) else (a.dilation,) * dims
    return any(d > n for d, n in zip(steps, a.x.shape[-dims:], strict=True))


def _max_pool(dims: int) -> Callable[..., Any]:
    def run(x: Tensor, *, kernel_size: Any, return_indices: bool, **attrs: Any) -> Any:
        if dims == 3 and not return_indices:  # autocast has no rule for torch's that finds places
            x = in_float32(x, ("cpu",))
        taps = not return_indices and _wants_taps(x, dims, kernel_size)
        planned = MAX_WITH_INDICES if return_indices else MAX_WITH_TAPS if taps else MAX
        found = _batched(x, dims, partial(planned, kernel_size=kernel_size, **attrs))
        return found[0] if taps else found

    return _pool(
        f"max_pool{dims}d",
        "max_pool",
        more={"return_indices": False},
        run=run,
        see="With ``return_indices`` also where it stood.",
        unless=partial(_may_miss, dims),
        on_cpu=ANY if dims == 3 else _max_is_torchs,
    )


def mean_gradient_is_wrong(a: Any) -> bool:
    """Of padded windows of channels last, in some versions of torch on a GPU."""
    padded = a.padding not in (0, (0,))
    return padded and mean_gradient_faults(a.x) and is_differentiated(a.x)


def _avg_pool(dims: int) -> Callable[..., Any]:
    def run(x: Tensor, **attrs: Any) -> Any:
        x = in_float32(x, ("cpu",)) if dims == 3 else x
        return _batched(x, dims, partial(AVG, **attrs))

    return _pool(
        f"avg_pool{dims}d",
        "avg_pool",
        rename={"divisor": "divisor_override"},
        run=run,
        unless=mean_gradient_is_wrong if dims == 2 else None,
        on_cpu=ANY if dims == 3 else _mean_is_torchs,
        ordered=dims < 3,
    )


def _pool(
    called: str,
    op: str,
    *,
    rename: Any = None,
    more: Any = None,
    run: Callable[..., Any],
    see: str = "",
    **rule: Any,
) -> Callable[..., Any]:
    """A pooling of the table under torch's name, for one number of dimensions."""
    see = f"As ``torch.nn.functional.{called}``. {see}"
    function = from_table(op, called, rename=rename, more=more, run=run, see=see)
    usual = {"ordered": False, "autocast": not called.endswith("3d")}
    return delegates(getattr(F, called), **(usual | rule))(function)


def _is_a_large_mean(a: Any) -> bool:
    """The mean of everything is a reduction, and a large one better as ours."""
    whole = a.output_size in (1, (1, 1), [1, 1])
    return whole and not is_small(a.x) and not (a.x.is_cpu and mean_is_torchs(a.x))


def _adaptive(kind: str, dims: int) -> Callable[..., Any]:
    """Windows chosen so that a given number of them remains."""

    def run(x: Tensor, *, size: Any, return_indices: bool = False) -> Any:
        x = in_float32(x, ("cpu",)) if dims == 3 else x
        given = size if isinstance(size, tuple) else (size,) * dims
        if len(given) != dims or not all(n is None or hasattr(n, "__index__") for n in given):
            raise BindError(
                f"output_size={size} is not a whole number, nor {dims} of them",
                asked=f"adaptive_{kind}_pool{dims}d(…, output_size={size})",
                remedy=f"give one number, or {dims}; None keeps a dimension as it is",
            )
        full = tuple(n if s is None else s for n, s in zip(x.shape[-dims:], given, strict=True))
        planned = ADAPTIVE_MAX_WITH_INDICES if return_indices else ADAPTIVES[kind]
        return _batched(x, dims, partial(planned, size=full))

    return _pool(
        f"adaptive_{kind}_pool{dims}d",
        f"adaptive_{kind}_pool",
        rename={"size": "output_size"},
        more={"return_indices": False} if kind == "max" else None,
        run=run,
        see="With ``return_indices`` also where they stood." if kind == "max" else "",
        unless=_is_a_large_mean if kind == "avg" else None,
        on_cpu=ANY,
    )


ADAPTIVES = {"max": ADAPTIVE_MAX, "avg": ADAPTIVE_AVG}
max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    _adaptive("avg", dims) for dims in (1, 2, 3)
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (
    _adaptive("max", dims) for dims in (1, 2, 3)
)


# ---- everything, weights, pyramids


def _global(b: Ops, x: Sym, *, kind: str) -> Sym:
    return b.one(kind, x, axes=tuple(range(2, x.rank)), keepdim=True)


GLOBAL = Function("global_pool", _global)


def _over_positions(call: Callable[..., Tensor], a: Any) -> Any:
    return call(a.x, tuple(range(2, a.x.ndim)), True) if a.x.ndim > 2 else NotImplemented


@delegates(
    by=partial(_over_positions, torch.mean), on_cpu=lambda a: mean_is_torchs(a.x), autocast=True
)
def global_avg_pool(x: Tensor) -> Tensor:
    """The mean of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="mean")


@delegates(
    by=partial(_over_positions, torch.amax), on_cpu=lambda a: extreme_is_torchs(a.x), autocast=True
)
def global_max_pool(x: Tensor) -> Tensor:
    """The largest of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="max")


def _torch_weighted_pool2d(a: Any) -> Any:
    """As a convolution in which no channel sees another."""
    channels, window = a.x.shape[1], a.weight.shape
    if a.x.ndim != 4 or (len(window) != 2 and (len(window) != 3 or window[0] != channels)):
        return NotImplemented
    taps = a.weight.expand(channels, 1, *window) if len(window) == 2 else a.weight.unsqueeze(1)
    step = window[-2:] if a.stride is None else a.stride
    return F.conv2d(a.x, taps, None, step, a.padding, 1, channels)


@delegates(by=_torch_weighted_pool2d, ordered=False)
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
    out: Tensor = WEIGHTED(x, weight, stride=stride, padding=padding)
    return out


@delegates()
def pyramid_pool2d(x: Tensor, sizes: Size = (1, 2, 3, 6), kind: str = "avg") -> Tensor:
    """x [N, C, H, W] pooled over grids of several ``sizes``, one result after another, as
    spatial-pyramid pooling wants it: [N, C, Σ s²]; N may be left out. ``kind``: "avg" or "max".

    >>> features = dt.functional.pyramid_pool2d(x, (1, 2, 4), "max").flatten(1)
    """
    out: Tensor = _batched(x, 2, lambda x: PYRAMID(x, sizes=sizes, kind=kind))
    return out
