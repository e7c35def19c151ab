"""Convolution of 8-bit integers, with exact sums.

    y = Σ (x − zero) · w + bias        in int32

``zero`` is the number that stands for 0 in x; the padding around x has that value, so it adds
nothing. Everything else that a quantised layer does is elementwise and comes after: the sums as
float32 times a scale for each channel, an activation, and for the next layer
``clamp(round(y · (1 / scale)) + zero)`` as int8. ``round`` rounds halves to even, and each of these
operators rounds to float32 by itself, so that every engine gives the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32, int32
from deuteron.ir.types import TensorType
from deuteron.ops import conv
from deuteron.ops.checks import check_shape
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, operator

_PLAIN = {"transposed": False, "output_padding": (0,)}
_SHARED = ("stride", "padding", "dilation", "groups")
_ATTRS = {
    "zero": Attr("int", 0, "what stands for 0 in x"),
    **{name: conv.conv.attrs[name] for name in _SHARED},
}


def _complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    assert conv.conv.complete is not None
    full = conv.conv.complete(types, attrs | _PLAIN)
    return {name: full[name] for name in _ATTRS}


def _as_conv(attrs: Attributes, dims: int) -> dict[str, Any]:
    """The attributes of a convolution that reads the same windows."""
    return {name: attrs[name] for name in _SHARED} | _PLAIN | {"output_padding": (0,) * dims}


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    """Computed in float64, where such sums are exact."""
    dims, wide = x.ndim - 2, x.double() - attrs["zero"]
    y = conv.conv.reference(wide, weight.double(), None, **_as_conv(attrs, dims))
    y = y if bias is None else y + bias.view(-1, *[1] * dims)
    return torch.as_tensor(y, dtype=torch.int32)


def _flops(ins: Types, outs: Types, attrs: Attributes) -> float:
    assert conv.conv.flops is not None
    return conv.conv.flops(ins, outs, {**attrs, **_PLAIN})


@operator(
    Fusion.COMPLEX,
    _reference,
    attrs=_ATTRS,
    complete=_complete,
    flops=_flops,
    samples="""2x3x6x5:i8 4x3x3x2:i8 4:i32 stride=(2,1) padding=(1,0) zero=-7 nograd
        | 2x3x5x4@nhwc:u8 4x3x3x3@nhwc:i8 _ padding=1 zero=128 nograd
        | 2x4x6x5@nhwc:i8 4x1x3x3:i8 4:i32 groups=4 stride=2 padding=(0,0,1,1) zero=3 nograd
        | 1x4x6x6@sliced:i8 6x2x2x2:i8 _ groups=2 dilation=2 nograd
        | 2x3x8:i8 4x3x3:i8 4:i32 padding=1 nograd | 0x3x5x5:i8 4x3x3x3:i8 4:i32 nograd [empty]""",
)
def conv_integer(x: TensorType, weight: TensorType, bias: Given, **attrs: Any) -> TensorType:
    """Convolution of integers: Σ (x − zero) · weight + bias, exactly, in int32. x is int8 or
    uint8, the weight int8, the bias int32. Scales, activations and the rounding to int8 are
    elementwise operators that follow. There is no gradient."""
    for name, t, kinds in (("x", x, ("i8", "u8")), ("weight", weight, ("i8",))):
        if t.dtype.short not in kinds:
            wrong = f"conv_integer: {name} is {t.dtype.name}, not {' or '.join(kinds)}"
            raise GraphError(wrong, remedy="conv is for floats")
    if bias is not None and bias.dtype != int32:
        wrong = f"conv_integer: the bias is {bias.dtype.name}, the sums are int32"
        raise GraphError(wrong, remedy="round it to the scale of the sums, as int32")
    low = 0 if x.dtype.short == "u8" else -128
    if not low <= attrs["zero"] < low + 256:
        wrong = f"conv_integer: zero={attrs['zero']} is no {x.dtype.name}"
        raise GraphError(wrong, remedy=f"use a number from {low} to {low + 255}")
    wide = [TensorType(t.shape, float32, t.strides) for t in (x, weight)]
    made = conv.conv.infer(*wide, None, **_as_conv(attrs, x.rank - 2))
    assert isinstance(made, TensorType)
    one = "give one number per output channel"
    check_shape("the bias of conv_integer", bias, made.shape[1:2], one)
    return TensorType(made.shape, int32, made.strides)
