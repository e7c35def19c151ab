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
from deuteron.functional.delegate import ANY, LOW, delegates, is_small
from deuteron.functional.operators import from_table, operator
from deuteron.functional.reduce import extreme_is_torchs, mean_is_torchs
from deuteron.ops import Ops, Sym
from deuteron.ops.pool import mean_gradient_faults
from deuteron.ops.pool_winners import fits_a_byte
from deuteron.target import has_triton

Size = int | Sequence[int]
MAX_WITH_WINNERS, PYRAMID = operator("max_pool_with_winners"), from_table("pyramid_pool")
WEIGHTED = from_table("weighted_pool")


def _batched(x: Tensor, dims: int, run: Callable[[Tensor], Any]) -> Any:
    """Call ``run`` on x with a batch dimension. An image without one, which torch takes as well,
    gets one for the call."""
    if x.ndim == dims + 2:
        return run(x)
    if x.ndim != dims + 1:
        what = f"x {list(x.shape)} has rank {x.ndim}, pooling in {dims} dimensions needs {dims + 2}"
        raise BindError(what, remedy="x is [batch, channels, …]; the batch may be left out")
    found = run(x.unsqueeze(0))
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


# ---- windows


def _mean_is_torchs(x: Tensor, *_: Any, **__: Any) -> bool:
    """Whether torch pools on a CPU: small tensors, and types that we generate no code for."""
    return x.nbytes < SHORT_BYTES or not (x.dtype is torch.float32 or x.dtype in LOW)


def _max_is_torchs(x: Tensor, *args: Any, return_indices: bool = False, **_: Any) -> bool:
    """Whether torch's max pool answers on a CPU. Ours does not note the places of the largest
    elements, which ``return_indices`` and the gradient need."""
    return return_indices or args[5:] == (True,) or is_differentiated(x) or _mean_is_torchs(x)


def _wants_winners(x: Tensor, dims: int, window: tuple[int, ...]) -> bool:
    """Whether the forward pass should note which element of each window was the largest, in a byte,
    so that the gradient reads that instead of x: on a GPU, where a kernel of ours notes it on the
    way."""
    known = dims < 3 and fits_a_byte(window * (dims if len(window) == 1 else 1))
    return known and x.is_cuda and is_differentiated(x) and has_triton()


def _may_miss(
    dims: int,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether a window may step over all of x, from padding to padding: torch's kernels take that
    miss for a place in memory. Ours checks for it."""
    if dilation == 1 or padding == 0:
        return False
    steps = dilation if isinstance(dilation, list | tuple) else (dilation,) * dims
    return any(d > n for d, n in zip(steps, x.shape[-dims:], strict=True))


def mean_gradient_is_wrong(
    dims: int, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *_: Any, **__: Any
) -> bool:
    """Whether torch's gradient is wrong: in some versions, of padded channels last on a GPU."""
    return dims == 2 and padding != 0 and mean_gradient_faults(x) and is_differentiated(x)


def _is_a_large_mean(dims: int, x: Tensor, output_size: Any) -> bool:
    """Whether it is the mean of everything, a reduction, and so large that ours is better."""
    whole = output_size in (1, (1, 1), [1, 1])
    return whole and not is_small(x) and not (x.is_cpu and mean_is_torchs(x))


def _full(x: Tensor, size: Any, called: str, dims: int) -> tuple[int, ...]:
    """Return ``output_size`` as one number for each dimension; None keeps a dimension as it is."""
    given = size if isinstance(size, tuple) else (size,) * dims
    if len(given) != dims or not all(n is None or hasattr(n, "__index__") for n in given):
        wrong = f"output_size={size} is not a whole number, nor {dims} of them"
        remedy = f"give one number, or {dims}; None keeps a dimension as it is"
        raise BindError(wrong, asked=f"{called}(…, output_size={size})", remedy=remedy)
    return tuple(n if s is None else s for n, s in zip(x.shape[-dims:], given, strict=False))


def _pool(kind: str, dims: int) -> Callable[..., Any]:
    """Return a pooling of the table under torch's name, for one number of dimensions."""
    op, called, places = f"{kind}_pool", f"{kind}_pool{dims}d", kind.endswith("max")
    usual, with_places = operator(op), operator(f"{op}_with_indices" if places else op)

    def run(x: Tensor, *, return_indices: bool = False, **attrs: Any) -> Any:
        if dims == 3 and not (kind == "max" and return_indices):  # autocast has no rule for these
            x = in_float32(x, ("cpu",))
        if "size" in attrs:
            attrs["size"] = _full(x, attrs["size"], called, dims)
        plain = kind == "max" and not return_indices
        winners = plain and _wants_winners(x, dims, attrs["kernel_size"])
        planned = with_places if return_indices else MAX_WITH_WINNERS if winners else usual
        found = _batched(x, dims, partial(planned, **attrs))
        return found[0] if winners else found

    rule: Any = {"rename": {"divisor": "divisor_override", "size": "output_size"}, "run": run}
    rule |= PLACES if places else {}
    rule |= {"unless": partial(UNLESS[kind], dims)} if kind in UNLESS else {}
    rule |= {"on_cpu": ON_CPU.get(kind, ANY) if dims < 3 else ANY, "autocast": dims < 3}
    rule |= {} if "adaptive" in kind else {"passes": 25.0}  # 400 µs for 51 MB on an H200
    return from_table(op, called, home=F, ordered=kind == "avg" and dims < 3, **rule)


PLACES: dict[str, Any] = {"more": {"return_indices": False}, "returns": "Any"}
PLACES["see"] = "With ``return_indices`` also where they stood."
UNLESS: dict[str, Callable[..., bool]] = {"max": _may_miss, "avg": mean_gradient_is_wrong}
UNLESS["adaptive_avg"] = _is_a_large_mean
ON_CPU = {"max": _max_is_torchs, "avg": _mean_is_torchs}
KINDS = ("max", "avg", "adaptive_max", "adaptive_avg")
MADE = {f"{kind}_pool{n}d": _pool(kind, n) for kind in KINDS for n in (1, 2, 3)}


# ---- everything, weights, pyramids


def _global(b: Ops, x: Sym, *, kind: str) -> Sym:
    return b.one(kind, x, axes=tuple(range(2, x.rank)), keepdim=True)


GLOBAL = Function("global_pool", _global)


def _over_positions(call: Callable[..., Tensor], x: Tensor) -> Any:
    return call(x, tuple(range(2, x.ndim)), True) if x.ndim > 2 else NotImplemented


@delegates(partial(_over_positions, torch.mean), on_cpu=mean_is_torchs, autocast=True)
def global_avg_pool(x: Tensor) -> Tensor:
    """Return the mean of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="mean")


@delegates(partial(_over_positions, torch.amax), on_cpu=extreme_is_torchs, autocast=True)
def global_max_pool(x: Tensor) -> Tensor:
    """Return the largest element of x over all positions, [N, C, …] to [N, C, 1, …]."""
    return GLOBAL.one(x, kind="max")


def _torch_weighted_pool2d(x: Tensor, weight: Tensor, stride: Any = None, padding: Any = 0) -> Any:
    """torch's convolution in which each channel is by itself (depthwise)."""
    channels, window = x.shape[1], weight.shape
    if x.ndim != 4 or (len(window) != 2 and (len(window) != 3 or window[0] != channels)):
        return NotImplemented
    taps = weight.expand(channels, 1, *window) if len(window) == 2 else weight.unsqueeze(1)
    step = window[-2:] if stride is None else stride
    return F.conv2d(x, taps, None, step, padding, 1, channels)


@delegates(_torch_weighted_pool2d, ordered=False)
def weighted_pool2d(
    x: Tensor, weight: Tensor, stride: Size | None = None, padding: Size = 0
) -> Tensor:
    """Return the weighted sum of each window of x. Weights that add up to 1 give a weighted mean.

    x        [N, C, H, W]; any other rank is refused
    weight   one window [kh, kw] for all channels, or [C, kh, kw]
    stride   the step from one window to the next; by default windows lie side by side
    padding  how many zeros stand around x

    >>> blurred = dt.functional.weighted_pool2d(x, torch.full((3, 3), 1 / 9), stride=1, padding=1)
    """
    if x.ndim != 4:
        wrong = f"x {list(x.shape)} has rank {x.ndim}, weighted_pool2d needs 4"
        remedy = "x is [batch, channels, h, w]; x.unsqueeze(0) gives it a batch"
        raise BindError(wrong, asked="weighted_pool2d(x, weight)", remedy=remedy)
    out: Tensor = WEIGHTED(x, weight, stride=stride, padding=padding)
    return out


@delegates()
def pyramid_pool2d(x: Tensor, sizes: Size = (1, 2, 3, 6), kind: str = "avg") -> Tensor:
    """Pool x over several grids and join the results, as spatial-pyramid pooling does: [N, C, Σ
    s²].

    x      [N, C, H, W]; N may be left out
    sizes  s for each grid, which has s × s cells
    kind   "avg" or "max"

    >>> features = dt.functional.pyramid_pool2d(x, (1, 2, 4), "max").flatten(1)
    """
    out: Tensor = _batched(x, 2, lambda x: PYRAMID(x, sizes=sizes, kind=kind))
    return out
