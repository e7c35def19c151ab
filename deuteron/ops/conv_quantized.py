"""Convolution of 8-bit numbers, together with the steps around it in a quantised network.

    y = act(scale[k] · Σ (x − zero) · w[k] + bias[k])
    q = clamp(round(y · (1 / out_scale)) + out_zero)        where the result is of bytes again

x is uint8 or int8, and its value ``zero`` stands for 0, in the padding as well; w is int8 and
symmetric. ``scale`` has one number for each output channel: the scale of w times the step of x.
Sums are integers and so exact; the rest is computed in float32, number by number in the order
above, and rounds half to even: the result is what an integer program computes, bit for bit, on
every machine.

4-bit weights are uint8 [out, in / 2, …]: a byte holds two neighbours along the input channels, the
even channel in its low half, and 8 stands for 0. They are integers as 8-bit weights are, and are
converted to those when a plan is built.

x and w may both be 8-bit floats instead. Their products are exact as well, and summed in float32;
the result is clamped to the largest such float, and rounded to the nearest.

It is one operator to save memory traffic: written out, the 32-bit sums would be four times as many
bytes to write and to read again as the image. 8-bit numbers have no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, float32, int8, int32, uint8
from deuteron.ir.dtype import dtype as find_dtype
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_shape
from deuteron.ops.conv import (
    _ATTRS,
    _complete,
    _macs,
    _order,
    _out_shape,
    _settings,
    ordered,
    sides,
)
from deuteron.ops.emit import Ops, Sym, Syms
from deuteron.ops.fp8 import MOST
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, operator
from deuteron.ops.quantized import MIDDLE, check_bits

ACTS = ("none", "relu", "relu6")
RANGES = {"u8": (0, 255), "i8": (-128, 127)}
WINDOW = {name: _ATTRS[name] for name in ("stride", "padding", "dilation", "groups")}
PLAIN = {"transposed": False, "output_padding": (0,)}
KINDS = ("u8", "i8", *MOST)  # element types of x; the result may have these, or float32


def _complete_quantized(types: Any, attrs: dict[str, Any]) -> dict[str, Any]:
    full = _complete("conv", types, attrs | PLAIN)
    return {name: value for name, value in full.items() if name not in PLAIN}


def reciprocal(step: float) -> float:
    """1 / step, computed in float32, as in torch's fake quantisation, with which networks are
    trained for this."""
    return float(torch.ones((), dtype=torch.float32) / torch.tensor(step, dtype=torch.float32))


def whole_numbers(weight: Tensor, bits: int) -> Tensor:
    """A weight as it is multiplied: with 4 bits, both halves of each byte are unpacked to int8."""
    if bits == 8:
        return weight
    both = torch.stack((weight & 15, weight >> 4), 2).flatten(1, 2)
    return both.to(torch.int8) - MIDDLE[4]


def _requantized(y: Tensor, kind: DType, step: float, zero: int) -> Tensor:
    """Turn float32 numbers into the 8-bit numbers of the next layer."""
    moved = y * reciprocal(step)
    if kind.is_float:
        return moved.clamp(-MOST[kind.short], MOST[kind.short]).to(kind.torch)
    low, high = RANGES[kind.short]
    return (torch.round(moved) + zero).clamp(low, high).to(kind.torch)


def _reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int,
    zero: int,
    act: str,
    dtype: str,
    out_scale: float,
    out_zero: int,
    **window: Any,
) -> Tensor:
    """Integer sums in float64 are exact: they stay below 2⁵³. The rest is computed in float32,
    whatever precision is asked for."""
    space, order = x.ndim - 2, _order(*map(TensorType.from_tensor, (weight, x)))
    weight = whole_numbers(weight, bits)
    numbers = x.double() - zero
    before, behind = sides(window["padding"], space)
    ends = zip(reversed(before), reversed(behind), strict=True)
    numbers = torch.nn.functional.pad(numbers, [n for pair in ends for n in pair])
    attrs = {**window, "padding": (0,) * space, "transposed": False}
    attrs["output_padding"] = (0,) * space
    sums = torch.convolution(numbers, weight.double(), None, *_settings(attrs))
    each = (-1, *[1] * space)
    y = sums.float() * scale.float().view(each)
    y = y if bias is None else y + bias.float().view(each)
    y = y if act == "none" else y.clamp(min=0) if act == "relu" else y.clamp(0, 6)
    kind = find_dtype(dtype)
    made = y if kind == float32 else _requantized(y, kind, out_scale, out_zero)
    return ordered(made, order)


def _unpacked(b: Ops, weight: Sym) -> Sym:
    """A 4-bit weight as int8, like :func:`whole_numbers`, but as nodes of a graph."""
    out, half, *taps = weight.shape
    pairs = b.reshape(b.to(weight, int32), shape=(out, half, 1, *taps))
    both = b.concat([b.remainder(pairs, 16), b.floor_div(pairs, 16)], axis=2)
    return b.to(b.reshape(both, shape=(out, 2 * half, *taps)) - MIDDLE[4], int8)


def _expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    """The sums are one operator, the rest are elementwise operators."""
    x, weight, scale, bias = ins
    assert x is not None and weight is not None and scale is not None
    window = {name: attrs[name] for name in WINDOW}
    if x.dtype.is_float:
        y = b.one("conv", x, weight, None, **window)
    else:
        weight = _unpacked(b, weight) if attrs["bits"] == 4 else weight
        y = b.to(b.conv_integer(x, weight, zero=attrs["zero"], **window), float32)
    each = (scale.type.numel, *[1] * (x.rank - 2))
    y = y * b.reshape(scale, shape=each)
    y = y if bias is None else y + b.reshape(bias, shape=each)
    if attrs["act"] != "none":
        y = b.clamp(y, min=0.0, max=6.0 if attrs["act"] == "relu6" else None)
    kind = find_dtype(attrs["dtype"])
    if kind == float32:
        return [y]
    moved = y * reciprocal(attrs["out_scale"])
    if kind.is_float:
        low, high = -MOST[kind.short], MOST[kind.short]
    else:
        low, high = map(float, RANGES[kind.short])
        moved = b.round(moved) + float(attrs["out_zero"])
    return [b.to(b.clamp(moved, min=low, max=high), kind)]


@operator(
    Fusion.COMPLEX,
    _reference,
    expand=_expand,
    attrs={
        **WINDOW,
        "bits": Attr("int", 8, "of a weight: 8, or 4, two channels in each uint8"),
        "zero": Attr("int", 0, "the number of x that stands for 0"),
        "act": Attr("str", "none", "what follows: none, relu or relu6"),
        "dtype": Attr("dtype", "f32", "of the result: float32, or of 8 bits again"),
        "out_scale": Attr("float", 1.0, "the step from one byte of the result to the next"),
        "out_zero": Attr("int", 0, "the byte of the result that stands for 0"),
    },
    complete=_complete_quantized,
    flops=lambda ins, outs, attrs: (
        _macs(0, 1, 2, ins, outs, {"transposed": False}) * 8 / attrs["bits"]
    ),
    samples="""2x8x6x5@nhwc:index<256:u8 6x8x3x3:i8 6:positive:f32 6:f32 padding=1 zero=7 nograd
        | 1x3x9x8:i8 5x3x3x2:i8 5:positive:f32 _ stride=(2,1) padding=(1,0) dtype=i8 nograd
        | 1x8x5x4@nhwc:index<256:u8 4x2x3x3:i8 4:positive:f32 4:f32 groups=4 dtype=u8 nograd
        | 2x4x7:i8 6x4x3:i8 6:positive:f32 _ dilation=2 act=relu6 zero=-3 nograd
        | 2x6x5x6@nhwc:i8 4x3x3x3:index<256:u8 4:f32 4:f32 bits=4 padding=1 zero=5 dtype=i8 nograd
        | 1x8x6:index<256:u8 6x2x3:index<256:u8 6:f32 _ bits=4 groups=2 act=relu nograd
        | 2x4x5x6@nhwc:f8e4m3 6x4x3x3:f8e4m3 6:f32 6:f32 padding=1 dtype=f8e4m3 act=relu nograd
        | 1x4x9:f8e5m2 6x2x3:f8e5m2 6:f32 _ groups=2 stride=2 nograd
        | 0x3x5x5:i8 4x3x3x3:i8 4:f32 4:f32 [empty] nograd""",
)
def conv_quantized(
    x: TensorType, weight: TensorType, scale: TensorType, bias: Given, **attrs: Any
) -> TensorType:
    """Convolution of 8-bit x, in which ``zero`` stands for 0, with an int8 weight [out, in/groups,
    …], times a scale for each output channel, plus bias, through ``act``. The result is float32, or
    has 8 bits again, with the step ``out_scale`` and with ``out_zero`` for 0. Sums are exact, the
    rest is float32. With ``bits=4`` the weight is uint8 [out, in/groups/2, …], the even channel in
    the low half of a byte, and 8 stands for 0. x and weight may also both be 8-bit floats, and so
    may the result."""
    whole, bits = uint8 if attrs["bits"] == 4 else int8, attrs["bits"]
    check_bits("conv_quantized", bits)
    fits = weight.dtype == (x.dtype if x.dtype.is_float else whole)
    if x.dtype.short not in KINDS or not fits:
        kinds = f"x is {x.dtype.name} and weight {weight.dtype.name}"
        takes = f"takes uint8 or int8 with a weight of {whole.name} for bits={bits}, or two float8"
        wrong = f"conv_quantized {takes}; {kinds}"
        raise GraphError(wrong, remedy="quantise them, set bits, or use conv for floats")
    if x.dtype.is_float and bits == 4:
        wrong = f"conv_quantized of {x.dtype.name} with bits=4"
        raise GraphError(wrong, remedy="leave bits out: floats of 8 bits are stored as they are")
    for slot, t in (("scale", scale), ("bias", bias)):
        if t is not None and t.dtype != float32:
            wrong = f"{slot} of conv_quantized is {t.dtype.name}, not float32"
            raise GraphError(wrong, remedy=f'cast it: cast({slot}, dtype="f32")')
    if attrs["act"] not in ACTS:
        wrong = f"conv_quantized knows no activation {attrs['act']!r}"
        raise GraphError(
            wrong, remedy=f"use one of {', '.join(ACTS)}, or apply it to float32 later"
        )
    kind = find_dtype(attrs["dtype"])
    if kind != float32 and kind.short not in KINDS:
        wrong = f"the result of conv_quantized cannot be {kind.name}"
        raise GraphError(wrong, remedy="use dtype=float32, uint8, int8 or a float8")
    _check_bytes(x.dtype.short, "zero", attrs["zero"])
    if kind != float32:
        _check_bytes(kind.short, "out_zero", attrs["out_zero"])
        if not 0 < attrs["out_scale"] < float("inf"):
            wrong = f"conv_quantized with out_scale={attrs['out_scale']}"
            raise GraphError(wrong, remedy="give a step above 0")
    full = (weight.shape[0], weight.shape[1] * 8 // bits, *weight.shape[2:])
    shape = _out_shape("conv_quantized", x.shape, full, {**attrs, **_plain(attrs)})
    for slot, t in (("scale", scale), ("bias", bias)):
        check_shape(f"{slot} of conv_quantized", t, shape[1:2], "give one per output channel")
    return TensorType.of(shape, kind, _order(weight, x))


def _plain(attrs: Any) -> dict[str, Any]:
    return {"transposed": False, "output_padding": (0,) * len(attrs["stride"])}


def _check_bytes(kind: str, name: str, value: int) -> None:
    low, high = RANGES.get(kind, (0, 0))  # floats have a 0 of their own: no other is allowed
    if not low <= value <= high:
        wrong = f"conv_quantized with {name}={value}, which is no {kind}"
        remedy = f"use {low} to {high}" if high else "use 0, which it stands for itself"
        raise GraphError(wrong, remedy=remedy)
