"""Images at another resolution: resize, the pixel shuffles, and sampling at given places.

Resizing takes the size wanted, or scale factors; PyTorch computes sample positions from the
factors themselves when they are given, so they stay in the node beside the size they lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import at_least, check_grad, one_dtype, per_dim, spatial_dims
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.movement import moving
from deuteron.ops.opdef import Attr, Attributes, Define, Fusion, Types, Vjp, operator
from deuteron.ops.samples import Arg, Sample, samples

# ---- cubic weights, of tensors or of numbers in a formula ------------------------------------


def cubic_near(distance: Any, a: float = -0.75) -> Any:
    """The weight of an element at most one element away."""
    return ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0


def cubic_far(distance: Any, a: float = -0.75) -> Any:
    """The weight of an element between one and two elements away."""
    return ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a


def cubic_weights(t: Any) -> tuple[Any, ...]:
    """The weights of the four elements around a place, which is ``t`` past the second."""
    return cubic_far(t + 1.0), cubic_near(t), cubic_near(1.0 - t), cubic_far(2.0 - t)


# ---- resize ----------------------------------------------------------------------------------

# mode → its spatial dimensions, the elements read per dimension, ATen's name for it
MODES: dict[str, tuple[tuple[int, ...], int, str]] = {
    "nearest": ((1, 2, 3), 1, "upsample_nearest{}d"),
    "nearest-exact": ((1, 2, 3), 1, "_upsample_nearest_exact{}d"),
    "linear": ((1,), 2, "upsample_linear{}d"),
    "bilinear": ((2,), 2, "upsample_bilinear{}d"),
    "trilinear": ((3,), 2, "upsample_trilinear{}d"),
    "bicubic": ((2,), 4, "upsample_bicubic{}d"),
    "area": ((1, 2, 3), 1, ""),
}
_BLENDING = ("linear", "bilinear", "trilinear", "bicubic")
_NEAREST, _SHORT = ("nearest", "nearest-exact"), (torch.float16, torch.bfloat16)
_ONLY_FOR = {"align_corners": _BLENDING, "antialias": ("bilinear", "bicubic")}

_HOW = {
    "align_corners": Attr("bool", False, "map corner centres onto each other, for blending modes"),
    "antialias": Attr("bool", False, "average while shrinking, for bilinear and bicubic"),
    "scale": Attr("any", None, "scale factors, one number or one per spatial dimension"),
}
_MODE = Attr("str", "nearest", "how elements are blended", tuple(MODES))
_MODE_BACK = Attr("str", "nearest", "that of resize", tuple(m for m in MODES if m != "area"))


def _complete(op: str, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    t, scale, back = types[0], attrs["scale"], op == "resize_grad"
    dims = spatial_dims(op, t)
    before, size = (attrs["shape"][2:], t.shape[2:]) if back else (t.shape[2:], attrs["size"])
    if scale is None and size is None:
        raise GraphError("resize needs size or scale", remedy="e.g. size=(64, 64) or scale=2")
    factors = scale if isinstance(scale, tuple) else () if scale is None else (scale,) * dims
    fine = all(isinstance(s, int | float) and isfinite(s) and s > 0 for s in factors)
    if scale is not None and (len(factors) != dims or not fine):
        wrong = f"{op}: scale={scale!r} is not {dims} positive numbers"
        raise GraphError(wrong, remedy="give one factor, or one per spatial dimension")
    factors = tuple(map(float, factors))
    reached = tuple(int(n * s) for n, s in zip(before, factors, strict=False))
    size = per_dim(op, "size", reached if size is None else size, dims)
    if factors and reached != size:
        wrong = f"{op}: scale={factors} makes {before} into {reached}, not {size}"
        remedy = "give only one of size and scale, and the shape they belong to"
        raise GraphError(wrong, remedy=remedy)
    by_size = attrs["mode"] == "area" or attrs["align_corners"] or not factors
    full = attrs | {"scale": None if by_size else factors}  # None: positions follow from the sizes
    return full if back else full | {"size": size}


def _check(op: str, shape: Shape, size: Shape, mode: str, how: Attributes) -> None:
    dims = len(shape) - 2
    if dims not in MODES[mode][0]:
        fitting = ", ".join(name for name, row in MODES.items() if dims in row[0])
        wrong = f"{op}: mode {mode!r} does not resize {dims} spatial dimensions"
        raise GraphError(wrong, remedy=f"use one of {fitting}")
    for name, modes in _ONLY_FOR.items():
        if how[name] and mode not in modes:
            wrong = f"{op}: {name} has no meaning in mode {mode!r}"
            raise GraphError(wrong, remedy=f"leave it out, or use one of {', '.join(modes)}")
    at_least(op, 1, size=size, shape_beside_batch=shape[1:])


def _order(mode: str, t: TensorType) -> str:
    """The memory order of the result: nhwc stays nhwc, but PyTorch returns single rows (except by
    area) and volumes resized by area as contiguous."""
    kept = (1, 2) if mode == "area" else (2, 3)
    return memory_order(t) if t.rank - 2 in kept else "contiguous"


def gradient_faults(x: Tensor, mode: str) -> bool:
    """Whether PyTorch's gradient of resizing by the nearest element must not be called: on some
    processors its kernel for 16-bit volumes, channels last or with one channel, crashes."""
    return x.ndim == 5 and mode in _NEAREST and x.dtype in _SHORT and x.is_cpu


def _resize_reference(x: Tensor, size: Shape, mode: str, scale: Any, **how: Any) -> Tensor:
    corners = how["align_corners"] if mode in _BLENDING else None
    wanted = size if scale is None else None
    followed = x.requires_grad and torch.is_grad_enabled()
    given = x.float() if followed and gradient_faults(x, mode) else x
    y = F.interpolate(given, wanted, scale, mode, corners, antialias=how["antialias"]).to(x.dtype)
    return ordered(y, _order(mode, TensorType.from_tensor(x)))


def _resize_grad_reference(grad: Tensor, shape: Shape, mode: str, scale: Any, **how: Any) -> Tensor:
    dims, order = grad.ndim - 2, _order(mode, TensorType.from_tensor(grad))
    name = MODES[mode][2].format(dims)
    name = f"_{name}_aa_backward" if how["antialias"] else f"{name}_backward"
    corners = [how["align_corners"]] if mode in _BLENDING else []
    given = grad.float() if gradient_faults(grad, mode) else grad
    if dims == 3:  # torch's kernels for nhwc volumes are not to be trusted, in any mode
        given = given.contiguous()
    back = getattr(torch.ops.aten, name)
    dx = back(given, grad.shape[2:], shape, *corners, *(scale or (None,) * dims))
    return ordered(dx.to(grad.dtype), order)


def _resize_vjp(b: Ops, v: Vjp) -> Grads:
    how, shape = {name: v.attrs[name] for name in ("mode", *_HOW)}, v.arg(0).shape
    if "shape" in v.attrs:  # that of resize_grad
        return [b.resize(v.grad, size=shape[2:], **how)]
    if how["mode"] == "area":
        return [b.adaptive_avg_pool_grad(v.grad, shape=shape)]
    return [b.resize_grad(v.grad, shape=shape, **how)]


def _resize_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """A multiplication and an addition per element blended; moving elements costs nothing."""
    x, y = (outs[0], ins[0]) if "shape" in attrs else (ins[0], outs[0])
    if attrs["mode"] == "area":
        return float(max(x.numel, y.numel))
    blended = MODES[attrs["mode"]][1] ** (x.rank - 2)
    for n, m in zip(x.shape[2:], y.shape[2:], strict=True):
        blended *= ceil(n / m) if attrs["antialias"] else 1
    return 2.0 * blended * y.numel if blended > 1 else 0.0


# x, the spatial size of the result, attributes
_CASES = """2x3x4x5 8x10 scale=2 | 2x3x4x5@nhwc 3x7 mode=nearest-exact
    | 2x3x4x3@nhwc 7x5 mode=bilinear | 1x2x4x3@transposed 5x3 mode=bilinear scale=(1.3,1.1)
    | 1x2x4x3@sliced 7x6 mode=bilinear align_corners=True
    | 1x2x5x6@nhwc 3x4 mode=bilinear antialias=True | 2x2x4x3@expanded 6x5 mode=bicubic
    | 1x2x5x6 3x4 mode=bicubic antialias=True | 1x2x4x3 2x6 mode=bicubic align_corners=True
    | 1x2x5x6@sliced 3x3 mode=bilinear antialias=True align_corners=True
    | 2x3x5 8 mode=nearest-exact scale=1.7 | 2x3x5@nhwc 8 mode=linear
    | 1x2x3x2x3@nhwc 4x3x5 mode=trilinear | 1x2x3x2x3@nhwc 4x3x1 | 0x3x4x4 2x2 mode=bilinear
    | 2x3x5x6@nhwc 2x4 mode=area | 1x2x7 3 mode=area"""


def _resize_samples(op: str) -> Iterator[Sample]:
    for s in samples(_CASES)():
        x, size = s.args
        if op == "resize":
            yield Sample((x,), s.attrs if "scale" in s.attrs else {"size": size.shape, **s.attrs})
        elif s.attrs.get("mode") != "area":
            grad = replace(x, shape=(*x.shape[:2], *size.shape))
            yield Sample((grad,), {"shape": x.shape, **s.attrs})


def _resizing(name: str, reference: Callable[..., Tensor], **attrs: Attr) -> Define:
    return operator(
        Fusion.OPAQUE,
        reference,
        attrs=attrs | _HOW,
        complete=partial(_complete, name),
        vjp=_resize_vjp,
        flops=_resize_flops,
        samples=partial(_resize_samples, name),
    )


_SIZE = Attr("ints", None, "the spatial size wanted, one int or one per dimension")
_SHAPE = Attr("ints", doc="the shape of x, whose gradient this is")


@_resizing("resize", _resize_reference, size=_SIZE, mode=_MODE)
def resize(x: TensorType, size: Shape, mode: str, **how: Any) -> TensorType:
    """x [N, C, ...] at another spatial size, given as size or as scale factors."""
    one_dtype("resize", x=x)
    _check("resize", x.shape, size, mode, how)
    return TensorType.of((*x.shape[:2], *size), x.dtype, _order(mode, x))


@_resizing("resize_grad", _resize_grad_reference, shape=_SHAPE, mode=_MODE_BACK)
def resize_grad(grad: TensorType, shape: Shape, mode: str, **how: Any) -> TensorType:
    """The gradient of resize: that of each element goes back to the elements that it blended."""
    one_dtype("resize_grad", grad=grad)
    _check("resize_grad", grad.shape, shape[2:], mode, how)
    if len(shape) != grad.rank or shape[:2] != grad.shape[:2]:
        wrong = f"resize_grad: shape {list(shape)} does not fit the gradient {list(grad.shape)}"
        raise GraphError(wrong, remedy="rank, batch and channels are those of the forward input")
    return TensorType.of(shape, grad.dtype, _order(mode, grad))


# ---- pixel shuffles: channels to places and back ----------------------------------------------


def _shuffled(op: str, x: TensorType, factor: int) -> TensorType:
    at_least(op, 1, factor=(factor,))
    if x.rank < 3:
        raise GraphError(f"{op} takes [..., C, H, W], not {list(x.shape)}", remedy="reshape it")
    (c, h, w), r = x.shape[-3:], factor
    if op == "pixel_shuffle":
        fits, after = c % (r * r) == 0, (c // (r * r), h * r, w * r)
        wrong = f"{c} channels are not a multiple of {r}²"
    else:
        fits, after = h % r == w % r == 0, (c * r * r, h // r, w // r)
        wrong = f"height {h} and width {w} are not multiples of {r}"
    if not fits:
        raise GraphError(f"{op}: {wrong}", remedy="pad x, or use another factor")
    order = memory_order(x) if x.rank == 4 else "contiguous"
    return TensorType.of((*x.shape[:-3], *after), x.dtype, order)


def _shuffle_reference(op: str, x: Tensor, factor: int) -> Tensor:
    t = TensorType.from_tensor(x)
    if x.numel() == 0:  # PyTorch leaves the shape of an empty tensor as it is
        return x.new_empty(_shuffled(op, t, factor).shape)
    y: Tensor = getattr(F, op)(x if x.ndim == 4 else x.contiguous(), factor)
    return y if x.ndim != 4 else ordered(y, memory_order(t))


def _shuffling(name: str, inverse: str, text: str) -> Define:
    return moving(
        partial(_shuffle_reference, name),
        attrs={"factor": Attr("int", doc="how many places per side one pixel becomes or was")},
        vjp=lambda b, v: [b.call(inverse, v.grad, **v.attrs)],
        samples=text,
    )


@_shuffling(
    "pixel_shuffle",
    "pixel_unshuffle",
    """2x8x2x3 factor=2 | 2x8x2x3@nhwc factor=2 | 1x9x1x2@sliced factor=3
    | 2x3x2x2@transposed factor=1 | 8x2x2 factor=2 | 2x2x4x2x1@nhwc factor=2 | 0x4x2x2 factor=2""",
)
def pixel_shuffle(x: TensorType, factor: int) -> TensorType:
    """[..., C·r², H, W] → [..., C, H·r, W·r]: r² channels become r × r places."""
    return _shuffled("pixel_shuffle", x, factor)


@_shuffling(
    "pixel_unshuffle",
    "pixel_shuffle",
    """2x2x4x6 factor=2 | 2x2x4x6@nhwc factor=2 | 1x1x3x6@sliced factor=3
    | 2x3x2x2@transposed factor=1 | 2x4x4 factor=2 | 2x2x1x4x2@nhwc factor=2 | 0x1x4x4 factor=2""",
)
def pixel_unshuffle(x: TensorType, factor: int) -> TensorType:
    """[..., C, H·r, W·r] → [..., C·r², H, W]: r × r places become r² channels."""
    return _shuffled("pixel_unshuffle", x, factor)


# ---- grid_sample -----------------------------------------------------------------------------

# in the order in which ATen numbers them
BLENDS, EDGES = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
_SAMPLE = {
    "mode": Attr("str", "bilinear", "how neighbours are blended", BLENDS),
    "padding_mode": Attr("str", "zeros", "what lies outside x", EDGES),
    "align_corners": Attr("bool", False, "whether ±1 is the corner centres or the outer edges"),
}


def _sampled(op: str, x: TensorType, grid: TensorType, mode: str) -> Shape:
    one_dtype(op, x=x, grid=grid)
    dims = spatial_dims(op, x)
    if dims == 1 or grid.rank != x.rank or grid.shape[-1] != dims or grid.shape[0] != x.shape[0]:
        wrong = f"{op}: grid {list(grid.shape)} does not fit x {list(x.shape)}"
        remedy = "x [N, C, H, W] takes grid [N, h, w, 2], a volume [N, d, h, w, 3]"
        raise GraphError(wrong, remedy=remedy)
    at_least(op, 1, spatial_shape_of_x=x.shape[2:])
    if mode == "bicubic" and dims == 3:
        raise GraphError(f"{op}: bicubic is for images, not volumes", remedy='use mode="bilinear"')
    return (*x.shape[:2], *grid.shape[1:-1])


def _sample_grad_reference(grad: Tensor, x: Tensor, grid: Tensor, **how: Any) -> Any:
    codes = BLENDS.index(how["mode"]), EDGES.index(how["padding_mode"]), how["align_corners"]
    back = getattr(torch.ops.aten, f"grid_sampler_{x.ndim - 2}d_backward")
    return back(grad, x, grid, *codes, [True, True])


_PLACES = samples(  # x and grid
    """2x3x4x5 2x3x2x2 | 2x3x4x5@nhwc 2x3x2x2 padding_mode=border align_corners=True
    | 1x2x4x4@sliced 1x2x3x2 mode=nearest padding_mode=reflection
    | 1x2x4x4@transposed 1x2x3x2 mode=bicubic padding_mode=reflection
    | 1x2x4x4 1x2x3x2 mode=bicubic align_corners=True | 1x2x4x4 1x2x3x2 padding_mode=reflection
    | 1x2x4x4 1x2x3x2 mode=bicubic padding_mode=border
    | 1x2x3x4x3@nhwc 1x2x1x2x3 align_corners=True
    | 1x2x3x4x3 1x2x1x2x3 mode=nearest padding_mode=border
    | 2x1x1x1 2x2x2x2 | 2x2x3x3 2x0x2x2 | 0x2x3x3 0x2x2x2"""
)


def _sample_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """Two operations per neighbour blended; the gradient blends once for x and once for grid."""
    blended = float(MODES[attrs["mode"]][1] ** (ins[-2].rank - 2))
    return 2 * blended * (2 * ins[0].numel if len(outs) == 2 else outs[0].numel)


def _sample_grad_samples() -> Iterator[Sample]:
    for s in _PLACES():
        x, grid = s.args
        yield replace(s, inputs=(Arg((*x.shape[:2], *grid.shape[1:-1])), x, grid))


_sampling = partial(operator, Fusion.OPAQUE, attrs=_SAMPLE, flops=_sample_flops)


@_sampling(
    F.grid_sample,
    vjp=lambda b, v: list(b.grid_sample_grad(v.grad, v.arg(0), v.arg(1), **v.attrs)),
    samples=_PLACES,
)
def grid_sample(x: TensorType, grid: TensorType, mode: str, **how: Any) -> TensorType:
    """x [N, C, H, W] read at the places that grid [N, h, w, 2] names, as (across, down) from −1 to
    1; a volume takes grid [N, d, h, w, 3]."""
    return TensorType.of(_sampled("grid_sample", x, grid, mode), x.dtype)


@_sampling(_sample_grad_reference, samples=_sample_grad_samples)
def grid_sample_grad(
    grad: TensorType, x: TensorType, grid: TensorType, mode: str, **how: Any
) -> tuple[TensorType, TensorType]:
    """The gradients of grid_sample for x and for grid. It has none of its own."""
    one_dtype("grid_sample_grad", grad=grad, x=x)
    check_grad("grid_sample_grad", grad, _sampled("grid_sample_grad", x, grid, mode))
    return TensorType.of(x.shape, x.dtype), TensorType.of(grid.shape, x.dtype)
