"""Convolution over 1, 2 or 3 spatial dimensions, its transpose, and both of its gradients.

The three operators are one trilinear form in x, the weight and the result: each is the gradient
of the next, so that gradients of gradients need no further operators. Tensors are [N, C, ...]
with any strides; the result is nhwc where PyTorch's is (:func:`memory_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from operator import add
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType, same_strides, strides_for
from deuteron.ops.checks import at_least, check_grad, check_shape, one_dtype, per_dim, spatial_dims
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.matmul import refuse_bytes, summed_type
from deuteron.ops.opdef import Attr, Attributes, Define, Fusion, Given, Types, Vjp, operator
from deuteron.ops.samples import Sample, samples

# ---- what every operator over images needs ---------------------------------------------------


def memory_order(t: TensorType) -> str:
    """ "nhwc" or "contiguous": the order PyTorch gives a result computed from ``t``.

    PyTorch judges by strides alone, those of size-1 dimensions included, and so must inference
    to agree with it. A rank-3 tensor is judged as an image of one row, as PyTorch computes it.
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


def ordered(t: Tensor, order: str) -> Tensor:
    """Return ``t`` in a memory order. A reference ends with this call if PyTorch's own choice
    depends on the element type or the device; otherwise it changes nothing."""
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
    "padding": Attr("ints", (0,), "zeros on both sides of x; or before it, then behind it"),
    "dilation": Attr("ints", (1,), "distance between the taps of a window"),
    "groups": Attr("int", 1, "channel groups that do not see each other"),
    "transposed": Attr("bool", False, "spread each input over a window; weight is [in, out, ...]"),
    "output_padding": Attr("ints", (0,), "rows added at the end, only if transposed"),
}
_STORED = {False: "[out, in/groups, ...]", True: "[in, out/groups, ...]"}  # by transposed
_PER_DIM = ("stride", "padding", "dilation", "output_padding")


def sides(padding: Shape, dims: int) -> tuple[Shape, Shape]:
    """Return the zeros before and after x along each dimension. If both are the same, ``padding``
    lists them once; else it lists all those before x first, as in ONNX."""
    return padding[:dims], padding[-dims:]


def is_uneven(attrs: Attributes) -> bool:
    """Whether a convolution has more zeros on one side of x than on the other."""
    return len(attrs["padding"]) > len(attrs["stride"])


def _complete(op: str, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """Only ``conv`` itself may have more zeros on one side; its gradient pads x explicitly."""
    dims, padding = spatial_dims(op, types[0]), attrs["padding"]
    before, behind = sides(padding, dims)
    both = op == "conv" and not attrs["transposed"] and len(padding) == 2 * dims
    full = attrs | ({"padding": before} if both else {})
    full |= {name: per_dim(op, name, full[name], dims) for name in _PER_DIM}
    return full | {"padding": padding} if both and before != behind else full


def _out_shape(op: str, x: Shape, weight: Shape, attrs: Attributes) -> Shape:
    """The shape of conv(x, weight), or a GraphError that says which sizes do not fit."""
    groups, transposed = attrs["groups"], attrs["transposed"]
    stride, padding, dilation, output_padding = (attrs[name] for name in _PER_DIM)
    if not len(weight) == len(x) == len(stride) + 2:
        wrong = f"{op}: x {list(x)}, weight {list(weight)} and stride={stride} differ in rank"
        remedy = "give all one dimension per spatial dimension after the first two"
        raise GraphError(wrong, remedy=remedy)
    at_least(op, 1, stride=stride, dilation=dilation, groups=(groups,), weight_shape=weight)
    at_least(op, 0, padding=padding, output_padding=output_padding)
    taken = weight[0] if transposed else weight[1] * groups
    if x[1] != taken:
        takes = f"weight {list(weight)} with groups={groups} takes {taken}"
        wrong = f"{op}: x {list(x)} has {x[1]} channels, {takes}"
        raise GraphError(wrong, remedy=f"the weight is stored {_STORED[transposed]}")
    if weight[0] % groups:
        wrong = f"{op}: groups={groups} does not divide the {weight[0]} rows of {list(weight)}"
        raise GraphError(wrong, remedy="choose groups that divides both channel counts")
    if not transposed and any(output_padding):
        wrong = f"{op}: output_padding={output_padding} without transposed"
        raise GraphError(wrong, remedy="leave it out, or set transposed=True")
    sizes = []
    zeros = map(add, *sides(padding, len(stride)))
    each = zip(x[2:], weight[2:], stride, zeros, dilation, output_padding, strict=True)
    for n, k, s, p, d, extra in each:
        span = d * (k - 1) + 1
        if transposed and extra >= max(s, d):
            limits = f"stride={stride} or dilation={dilation}"
            wrong = f"{op}: output_padding={output_padding} is not below {limits}"
            raise GraphError(wrong, remedy="make it smaller")
        size = (n - 1) * s - p + span + extra if transposed else (n + p - span) // s + 1
        sizes.append(size if n else 0)
    if min(sizes) < 1:
        wrong = f"{op}: x {list(x)} is too small for weight {list(weight)}: it leaves {sizes}"
        remedy = "use a larger image, other padding, or a smaller kernel or dilation"
        raise GraphError(wrong, remedy=remedy)
    return (x[0], weight[1] * groups if transposed else weight[0], *sizes)


def _macs(x: int, weight: int, y: int, ins: Types, outs: Types, attrs: Attributes) -> float:
    """Two operations each time a weight is used: once per position of the result, or of x if the
    convolution is transposed. ``x``, ``weight`` and ``y`` are the places of x, the weight and the
    result of conv in the list [first input, second input, result]."""
    shapes = [t.shape for t in (*ins[:2], outs[0]) if t is not None]
    places = shapes[x if attrs["transposed"] else y]
    return float(2 * prod(shapes[weight]) * places[0] * prod(places[2:]))


# ---- conv ------------------------------------------------------------------------------------


def _order(weight: Given, *images: Given) -> str:
    """nhwc if any operand is; in one dimension PyTorch lets only the weight decide."""
    deciding = [t for t in images if t is not None and t.rank > 3]
    deciding += [] if weight is None else [weight]
    return "nhwc" if any(memory_order(t) == "nhwc" for t in deciding) else "contiguous"


def _settings(attrs: Attributes) -> list[Any]:
    """The attributes in the order PyTorch's convolutions take them."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [attrs[name] for name in names]


def _conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    """On a CPU torch starts the sums of a transposed convolution of 16-bit numbers from the bias
    and rounds after every tap. Beside the bias of a folded batch norm the sum would lose its
    digits, so here the bias is added last."""
    order = _order(*map(TensorType.from_tensor, (weight, x)))
    x, weight = (t.float() if t.element_size() == 1 else t for t in (x, weight))
    if is_uneven(attrs):
        before, behind = sides(attrs["padding"], x.ndim - 2)
        ends = zip(reversed(before), reversed(behind), strict=True)
        x = torch.nn.functional.pad(x, [n for pair in ends for n in pair])
        attrs |= {"padding": (0,) * len(before)}
    last = attrs["transposed"] and x.is_cpu and x.element_size() < 4 and bias is not None
    y = torch.convolution(x, weight, None if last else bias, *_settings(attrs))
    y = y + bias.view(-1, *[1] * (x.ndim - 2)) if last and bias is not None else y
    return ordered(y, order)


def _conv_vjp(b: Ops, v: Vjp) -> Grads:
    x, weight, grad, attrs = v.arg(0), v.arg(1), v.grad, dict(v.attrs)
    refuse_bytes(x)
    before, behind = ((0, 0, *side) for side in sides(attrs["padding"], x.rank - 2))
    if is_uneven(v.attrs):
        x, attrs["padding"] = b.one("pad", x, low=before, high=behind), (0,)
    dx = b.one("conv_dx", grad, weight, shape=x.shape, **attrs) if v.needs[0] else None
    if dx is not None and is_uneven(v.attrs):
        less, fewer = (tuple(-n for n in side) for side in (before, behind))
        dx = b.one("pad", dx, low=less, high=fewer)
    dw = b.conv_dw(grad, x, shape=weight.shape, **attrs) if v.needs[1] else None
    db = None
    if v.needs[2]:
        axes = (0, *range(2, grad.rank))
        db = b.to(b.sum(b.upcast(grad), axes=axes, keepdim=False), v.arg(2).dtype)
    return [dx, dw, db]


@operator(
    Fusion.COMPLEX,
    _conv_reference,
    attrs=_ATTRS,
    complete=partial(_complete, "conv"),
    vjp=_conv_vjp,
    flops=partial(_macs, 0, 1, 2),
    samples="""2x3x6x5 4x3x3x2 4 stride=(2,1) padding=(1,0) | 2x3x5x4@nhwc 4x3x3x3 _ padding=1
        | 2x4x6x5@nhwc 4x1x3x3 4 groups=4 stride=2 padding=(0,0,1,1)
        | 2x3x8 3x1x4 3 groups=3 padding=(3,0) | 2x3x7x6@sliced 4x3x2x5 _ padding=(2,0,1,3)
        | 2x3x6x5 2x3x1x1@nhwc _ | 2x3x4x5@sliced 2x3x1x1 2 | 2x4x5x5@nhwc 4x1x3x3 4 groups=4
        | 1x3x6x8@nhwc 6x1x3x2 6 groups=3 padding=1 stride=(2,1) | 2x3x8 3x1x3 _ groups=3 dilation=2
        | 1x4x6x6 6x2x2x2 _ groups=2 dilation=2 | 2x3x8 4x3x3 4 stride=2 padding=1
        | 2x3x8@nhwc 4x3x3@nhwc _ | 1x2x4x3x4@nhwc 3x2x2x2x2 _
        | 2x4x3x4 4x3x3x3 6 transposed=True stride=2 output_padding=1 padding=1 groups=2
        | 2x3x4 3x2x3 _ transposed=True stride=2 | 0x3x5x5 4x3x3x3 4 [empty]
        | 2x3x5x4@nhwc:f8e4m3 4x3x3x3:f8e4m3 4:f32 padding=1 nograd
        | 1x4x6:f8e5m2 4x2x3:f8e5m2 _ groups=2 padding=(0,2) nograd""",
)
def conv(x: TensorType, weight: TensorType, bias: Given, **attrs: Any) -> TensorType:
    """Convolution of x [N, C, ...] with weight [out, C/groups, ...] over 1, 2 or 3 spatial
    dimensions, or its transpose with weight [C, out/groups, ...]. 8-bit floats are summed in
    float32, which is then the type of the result and of the bias."""
    kind = summed_type(x.dtype)
    one_dtype("conv", least=8, x=x, weight=weight, bias=bias if kind == x.dtype else None)
    if bias is not None and bias.dtype != kind:
        wrong = f"the bias of conv is {bias.dtype.name}, its sums are {kind.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(bias, dtype="{kind.short}")')
    shape = _out_shape("conv", x.shape, weight.shape, attrs)
    check_shape("the bias of conv", bias, shape[1:2], "give one number per output channel")
    return TensorType.of(shape, kind, _order(weight, x))


# ---- its gradients ---------------------------------------------------------------------------


def _grad_reference(op: str, grad: Tensor, other: Tensor, shape: Shape, **attrs: Any) -> Tensor:
    of_x, known = op == "conv_dx", [TensorType.from_tensor(t) for t in (other, grad)]
    order = _order(*known) if of_x else _order(None, *known)
    strides = strides_for(tuple(shape), order)
    unknown = grad.new_empty_strided(shape, strides)  # torch looks only at its type
    x, weight = (unknown, other) if of_x else (other, unknown)
    back, mask = torch.ops.aten.convolution_backward, [of_x, not of_x, False]
    dx, dw, _ = back(grad, x, weight, None, *_settings(attrs), mask)
    return ordered(dx if of_x else dw, order)


def _grad_vjp(op: str, b: Ops, v: Vjp) -> Grads:
    """The incoming gradient takes the place of the tensor (x or the weight) whose gradient ``op``
    computes: then ``grad`` receives conv of both, and the other input conv_dw or conv_dx."""
    (grad, other), attrs = (v.arg(0), v.arg(1)), {name: v.attrs[name] for name in _ATTRS}
    both, rest = ((v.grad, other), "conv_dw") if op == "conv_dx" else ((other, v.grad), "conv_dx")
    return [
        b.conv(*both, None, **attrs) if v.needs[0] else None,
        b.call(rest, grad, v.grad, shape=other.shape, **attrs) if v.needs[1] else None,
    ]


# x, weight and result: the same cases for both gradients
_GRAD_CASES = samples(
    """2x3x6x5 4x3x3x2 2x4x3x4 stride=(2,1) padding=(1,0) | 2x3x5x4@nhwc 4x3x3x3 2x4x5x4 padding=1
    | 2x4x5x5@sliced 4x1x3x3 2x4x3x3 groups=4 | 1x4x6x6 6x2x2x2 1x6x4x4 groups=2 dilation=2
    | 2x3x8@nhwc 4x3x3 2x4x4 stride=2 padding=1 | 1x2x4x3x4@nhwc 3x2x2x2x2 1x3x3x2x3
    | 2x4x3x4 4x3x3x3 2x6x6x8 transposed=True stride=2 output_padding=1 padding=1 groups=2
    | 0x3x5x5 4x3x3x3 0x4x3x3"""
)


def _grad_samples(op: str) -> Iterator[Sample]:
    for s in _GRAD_CASES():
        x, w, y = s.args
        ins, of = ((replace(y, layout=x.layout), w), x) if op == "conv_dx" else ((y, x), w)
        yield Sample(ins, {"shape": of.shape, **s.attrs})


_SHAPE = Attr("ints", doc="the shape of the tensor whose gradient this is")


def _pulling(op: str, x: int, weight: int) -> Define:
    return operator(
        Fusion.COMPLEX,
        partial(_grad_reference, op),
        attrs={"shape": _SHAPE, **_ATTRS},
        complete=partial(_complete, op),
        vjp=partial(_grad_vjp, op),
        flops=partial(_macs, x, weight, 0),
        samples=partial(_grad_samples, op),
    )


@_pulling("conv_dx", x=2, weight=1)
def conv_dx(grad: TensorType, weight: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    """The gradient of conv for x: the gradient of the result, pulled back through the weight."""
    one_dtype("conv_dx", grad=grad, weight=weight)
    check_grad("conv_dx", grad, _out_shape("conv_dx", shape, weight.shape, attrs))
    return TensorType.of(shape, grad.dtype, _order(weight, grad))


@_pulling("conv_dw", x=1, weight=2)
def conv_dw(grad: TensorType, x: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    """The gradient of conv for its weight: the gradient of the result times shifted copies of x,
    summed."""
    one_dtype("conv_dw", grad=grad, x=x)
    check_grad("conv_dw", grad, _out_shape("conv_dw", x.shape, shape, attrs))
    return TensorType.of(shape, grad.dtype, _order(None, x, grad))
