"""Convolution over 1, 2 or 3 spatial dimensions, its transpose, and both of its gradients.

The three operators are one trilinear form in x, the weight and the result: each is the gradient
of the next, so that gradients of gradients need no further operators. Tensors are [N, C, ...]
with any strides; the result is nhwc where PyTorch's is (:func:`memory_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType, same_strides, strides_for
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.matmul import one_dtype
from deuteron.ops.opdef import Attr, CostFn, Fusion, OpDef, Vjp
from deuteron.ops.samples import Sample, samples

# ---- what every operator over images needs ---------------------------------------------------


def spatial_dims(op: str, t: TensorType) -> int:
    """How many spatial dimensions ``t`` has after batch and channels: 1, 2 or 3."""
    if not 3 <= t.rank <= 5:
        raise GraphError(
            f"{op} takes a tensor [N, C, ...] of rank 3 to 5, not {list(t.shape)}",
            remedy="reshape it; a single image needs a batch dimension of 1 in front",
        )
    return t.rank - 2


def per_dim(op: str, name: str, values: Shape, dims: int) -> Shape:
    """``values`` with one entry per spatial dimension; a single one stands for all."""
    if len(values) == 1:
        return values * dims
    if len(values) != dims:
        raise GraphError(
            f"{name}={values} of {op} has {len(values)} entries for {dims} spatial dimensions",
            remedy=f"give one int, or {dims}",
        )
    return values


def at_least(op: str, low: int, **values: Sequence[int]) -> None:
    """Every entry of every attribute is ``low`` or more."""
    for name, entries in values.items():
        if any(entry < low for entry in entries):
            raise GraphError(
                f"{name}={tuple(entries)} of {op} is too small", remedy=f"use {low} or more"
            )


def memory_order(t: TensorType) -> str:
    """ "nhwc" or "contiguous": the order PyTorch gives a result computed from ``t``.

    PyTorch judges by strides alone, those of size-1 dimensions included, and so must inference
    to agree with it. A rank-3 tensor is judged as the image of one row it is made into.
    """
    shape, strides = t.shape, t.strides
    if len(shape) == 3:
        n, c, w = shape
        shape, strides = (n, c, 1, w), (*strides[:2], w * strides[2], strides[2])
    if not 4 <= len(shape) <= 5 or strides[1] == 0:
        return "contiguous"
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return "contiguous"
        least = strides[dim] * shape[dim]
    return "nhwc"


def ordered(t: torch.Tensor, order: str) -> torch.Tensor:
    """``t`` in a memory order. A reference ends with this where PyTorch's own choice depends on
    the element type or the device; elsewhere it changes nothing."""
    shape = tuple(t.shape)
    want = strides_for(shape, order)
    if tuple(t.stride()) == want:
        return t
    if same_strides(shape, tuple(t.stride()), want):
        return t.as_strided(shape, want)
    return t.new_empty_strided(shape, want).copy_(t)


# ---- shapes ----------------------------------------------------------------------------------

_ATTRS = {
    "stride": Attr("ints", (1,), "steps between windows, one int or one per dimension"),
    "padding": Attr("ints", (0,), "zeros around x on both sides"),
    "dilation": Attr("ints", (1,), "distance between the taps of a window"),
    "groups": Attr("int", 1, "channel groups that do not see each other"),
    "transposed": Attr("bool", False, "spread each input over a window; weight is [in, out, ...]"),
    "output_padding": Attr("ints", (0,), "rows added at the end, only if transposed"),
}
_PER_DIM = ("stride", "padding", "dilation", "output_padding")

Complete = Callable[[Sequence[TensorType | None], dict[str, Any]], dict[str, Any]]


def _complete(op: str) -> Complete:
    def complete(types: Sequence[TensorType | None], attrs: dict[str, Any]) -> dict[str, Any]:
        assert types[0] is not None
        dims = spatial_dims(op, types[0])
        return {
            name: per_dim(op, name, value, dims) if name in _PER_DIM else value
            for name, value in attrs.items()
        }

    return complete


def _out_shape(
    op: str,
    x: Shape,
    weight: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int,
    transposed: bool,
    output_padding: Shape,
) -> Shape:
    """The shape of conv(x, weight), or a GraphError that says which sizes do not fit."""
    if len(weight) != len(x):
        raise GraphError(
            f"{op}: x {list(x)} and weight {list(weight)} differ in rank",
            remedy="give both one dimension per spatial dimension after the first two",
        )
    at_least(op, 1, stride=stride, dilation=dilation, groups=(groups,), weight_shape=weight)
    at_least(op, 0, padding=padding, output_padding=output_padding)
    taken = weight[0] if transposed else weight[1] * groups
    if x[1] != taken:
        layout = "[in, out/groups, ...]" if transposed else "[out, in/groups, ...]"
        raise GraphError(
            f"{op}: x {list(x)} has {x[1]} channels, weight {list(weight)} with groups={groups} "
            f"takes {taken}",
            remedy=f"the weight is stored {layout}",
        )
    if weight[0] % groups:
        raise GraphError(
            f"{op}: groups={groups} does not divide the {weight[0]} rows of weight {list(weight)}",
            remedy="choose groups that divides both channel counts",
        )
    if not transposed and any(output_padding):
        raise GraphError(
            f"{op}: output_padding={output_padding} without transposed",
            remedy="leave it out, or set transposed=True",
        )
    sizes = []
    for n, k, s, p, d, extra in zip(
        x[2:], weight[2:], stride, padding, dilation, output_padding, strict=True
    ):
        span = d * (k - 1) + 1
        if transposed and extra >= max(s, d):
            raise GraphError(
                f"{op}: output_padding={output_padding} is not below stride={stride} "
                f"or dilation={dilation}",
                remedy="make it smaller",
            )
        if transposed:
            sizes.append((n - 1) * s - 2 * p + span + extra if n else 0)
        else:
            sizes.append((n + 2 * p - span) // s + 1 if n else 0)
    if min(sizes) < 1:
        raise GraphError(
            f"{op}: x {list(x)} is too small for weight {list(weight)}: it leaves {sizes}",
            remedy="use a larger image, other padding, or a smaller kernel or dilation",
        )
    return (x[0], weight[1] * groups if transposed else weight[0], *sizes)


def _macs_of(op: str) -> CostFn:
    """Two operations each time a weight acts: once per place of the result, or of x where the
    convolution is transposed."""

    def flops(
        ins: Sequence[TensorType | None], outs: Sequence[TensorType], attrs: Mapping[str, Any]
    ) -> float:
        shapes = [t.shape for t in (*ins[:2], outs[0]) if t is not None]
        x, weight, y = (shapes[i] for i in _ROLES[op])
        places = x if attrs["transposed"] else y
        return 2.0 * prod(weight) * places[0] * prod(places[2:])

    return flops


# where x, weight and the result stand among (first input, second input, output)
_ROLES = {"conv": (0, 1, 2), "conv_dx": (2, 1, 0), "conv_dw": (1, 2, 0)}


# ---- conv ------------------------------------------------------------------------------------


def _order(weight: TensorType | None, *images: TensorType) -> str:
    """nhwc if any operand is; in one dimension PyTorch lets only the weight decide."""
    deciding = [t for t in images if t.rank > 3]
    if weight is not None:
        deciding.append(weight)
    return "nhwc" if any(memory_order(t) == "nhwc" for t in deciding) else "contiguous"


def _conv_infer(
    x: TensorType, weight: TensorType, bias: TensorType | None, **attrs: Any
) -> TensorType:
    one_dtype("conv", x=x, weight=weight, bias=bias)
    shape = _out_shape("conv", x.shape, weight.shape, **attrs)
    if bias is not None and bias.shape != shape[1:2]:
        raise GraphError(
            f"the bias of conv is {list(bias.shape)}, not [{shape[1]}]",
            remedy="give one number per output channel",
        )
    return TensorType.of(shape, x.dtype, _order(weight, x))


def _settings(attrs: Mapping[str, Any]) -> list[Any]:
    """The attributes in the order PyTorch's convolutions take them."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [attrs[name] for name in names]


def _conv_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **attrs: Any
) -> torch.Tensor:
    """On a CPU torch starts a transposed sum of 16-bit numbers from the bias and rounds after every
    tap. Beside the bias of a folded batch norm the sum would lose its digits, so it comes last."""
    last = attrs["transposed"] and x.is_cpu and x.element_size() < 4 and bias is not None
    y = torch.convolution(x, weight, None if last else bias, *_settings(attrs))
    if last and bias is not None:
        y = y + bias.view(-1, *[1] * (x.ndim - 2))
    return ordered(y, _order(*map(TensorType.from_tensor, (weight, x))))


def _conv_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x, weight, grad = v.arg(0), v.arg(1), v.grad
    dx = b.conv_dx(grad, weight, shape=x.shape, **v.attrs) if v.needs[0] else None
    dw = b.conv_dw(grad, x, shape=weight.shape, **v.attrs) if v.needs[1] else None
    db = None
    if v.needs[2]:
        axes = (0, *range(2, grad.rank))
        db = b.to(b.sum(b.upcast(grad), axes=axes, keepdim=False), v.arg(2).dtype)
    return [dx, dw, db]


CONV = OpDef(
    name="conv",
    doc=(
        "Convolution of x [N, C, ...] with weight [out, C/groups, ...] over 1, 2 or 3 spatial "
        "dimensions, or its transpose with weight [C, out/groups, ...]."
    ),
    inputs=("x", "weight", "bias?"),
    attrs=_ATTRS,
    complete=_complete("conv"),
    infer=_conv_infer,
    reference=_conv_reference,
    fusion=Fusion.COMPLEX,
    vjp=_conv_vjp,
    flops=_macs_of("conv"),
    samples=samples(
        """2x3x6x5 4x3x3x2 4 stride=(2,1) padding=(1,0) | 2x3x5x4@nhwc 4x3x3x3 _ padding=1
        | 2x3x6x5 2x3x1x1@nhwc _ | 2x3x4x5@sliced 2x3x1x1 2 | 2x4x5x5@nhwc 4x1x3x3 4 groups=4
        | 1x4x6x6 6x2x2x2 _ groups=2 dilation=2 | 2x3x8 4x3x3 4 stride=2 padding=1
        | 2x3x8@nhwc 4x3x3@nhwc _ | 1x2x4x3x4@nhwc 3x2x2x2x2 _
        | 2x4x3x4 4x3x3x3 6 transposed=True stride=2 output_padding=1 padding=1 groups=2
        | 2x3x4 3x2x3 _ transposed=True stride=2 | 0x3x5x5 4x3x3x3 4 [empty]"""
    ),
)

# ---- its gradients ---------------------------------------------------------------------------

_SHAPE = Attr("ints", doc="the shape of the tensor whose gradient this is")


def _agrees(op: str, grad: TensorType, x: Shape, weight: Shape, attrs: Mapping[str, Any]) -> None:
    """The gradient has the shape of the result it belongs to."""
    if not grad.rank == len(x) == len(weight):
        raise GraphError(
            f"{op}: the gradient {list(grad.shape)}, x {list(x)} and weight {list(weight)} differ "
            "in rank",
            remedy="use the shape and attributes of the forward convolution",
        )
    expected = _out_shape(op, x, weight, **attrs)
    if grad.shape != expected:
        raise GraphError(
            f"{op}: the gradient is {list(grad.shape)}, but conv of x {list(x)} and weight "
            f"{list(weight)} gives {list(expected)}",
            remedy="use the shape and attributes of the forward convolution",
        )


def _dx_infer(grad: TensorType, weight: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    one_dtype("conv_dx", grad=grad, weight=weight)
    _agrees("conv_dx", grad, shape, weight.shape, attrs)
    return TensorType.of(shape, grad.dtype, _order(weight, grad))


def _dw_infer(grad: TensorType, x: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    one_dtype("conv_dw", grad=grad, x=x)
    _agrees("conv_dw", grad, x.shape, shape, attrs)
    return TensorType.of(shape, grad.dtype, _order(None, x, grad))


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, want: int, attrs: Mapping[str, Any]
) -> torch.Tensor:
    mask = [want == 0, want == 1, False]
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *_settings(attrs), mask)
    result: torch.Tensor = found[want]
    return result


def _dx_reference(
    grad: torch.Tensor, weight: torch.Tensor, shape: Shape, **attrs: Any
) -> torch.Tensor:
    x = grad.new_empty(1).expand(shape)  # only its shape is looked at
    order = _order(*map(TensorType.from_tensor, (weight, grad)))
    return ordered(_backward(grad, x, weight, 0, attrs), order)


def _dw_reference(grad: torch.Tensor, x: torch.Tensor, shape: Shape, **attrs: Any) -> torch.Tensor:
    weight = grad.new_empty(1).expand(shape)
    order = _order(None, *map(TensorType.from_tensor, (x, grad)))
    return ordered(_backward(grad, x, weight, 1, attrs), order)


def _dx_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    grad, weight, attrs = v.arg(0), v.arg(1), {name: v.attrs[name] for name in _ATTRS}
    return [
        b.conv(v.grad, weight, None, **attrs) if v.needs[0] else None,
        b.conv_dw(grad, v.grad, shape=weight.shape, **attrs) if v.needs[1] else None,
    ]


def _dw_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    grad, x, attrs = v.arg(0), v.arg(1), {name: v.attrs[name] for name in _ATTRS}
    return [
        b.conv(x, v.grad, None, **attrs) if v.needs[0] else None,
        b.conv_dx(grad, v.grad, shape=x.shape, **attrs) if v.needs[1] else None,
    ]


# x, weight and result: the same cases for both gradients
_GRAD_CASES = samples(
    """2x3x6x5 4x3x3x2 2x4x3x4 stride=(2,1) padding=(1,0) | 2x3x5x4@nhwc 4x3x3x3 2x4x5x4 padding=1
    | 2x4x5x5@sliced 4x1x3x3 2x4x3x3 groups=4 | 1x4x6x6 6x2x2x2 1x6x4x4 groups=2 dilation=2
    | 2x3x8@nhwc 4x3x3 2x4x4 stride=2 padding=1 | 1x2x4x3x4@nhwc 3x2x2x2x2 1x3x3x2x3
    | 2x4x3x4 4x3x3x3 2x6x6x8 transposed=True stride=2 output_padding=1 padding=1 groups=2
    | 0x3x5x5 4x3x3x3 0x4x3x3"""
)


def _grad_samples(op: str) -> tuple[Sample, ...]:
    found = []
    for s in _GRAD_CASES():
        x, w, y = (a for a in s.inputs if a is not None)
        ins, of = ((replace(y, layout=x.layout), w), x) if op == "conv_dx" else ((y, x), w)
        found.append(Sample(ins, {"shape": of.shape, **s.attrs}))
    return tuple(found)


GRADIENTS = tuple(
    OpDef(
        name=name,
        doc=doc,
        inputs=("grad", second),
        attrs={"shape": _SHAPE, **_ATTRS},
        complete=_complete(name),
        infer=infer,
        reference=reference,
        fusion=Fusion.COMPLEX,
        vjp=vjp,
        flops=_macs_of(name),
        samples=partial(_grad_samples, name),
    )
    for name, second, infer, reference, vjp, doc in (
        (
            "conv_dx",
            "weight",
            _dx_infer,
            _dx_reference,
            _dx_vjp,
            "The gradient of conv for x: that of the result, pulled back through the weight.",
        ),
        (
            "conv_dw",
            "x",
            _dw_infer,
            _dw_reference,
            _dw_vjp,
            "The gradient of conv for its weight: that of the result against shifted copies of x.",
        ),
    )
)

OPS = (CONV, *GRADIENTS)
