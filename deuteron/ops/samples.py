"""Samples: the cases an operator brings along, for tests, fuzzing and benchmarks alike."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from deuteron.ir.dtype import DType, dtype
from deuteron.ir.types import strides_for

_DATA = "normal positive unit distinct away extreme index starts order bool offset".split()


@dataclass(frozen=True)
class Arg:
    """A recipe for one input tensor.

    ``kind``: "normal" (mean 0, std 1), "positive" (0.1 … 2), "unit" (−0.95 … 0.95), "distinct"
    (no two elements closer than 0.05, for max and sort), "away" (normal, but never within 0.1
    of 0), "extreme" (huge, tiny, ±inf, nan, ±0 mixed in), "index" (integers below ``high``),
    "starts" (integers that rise from 0 to ``high``), "order" (integers below ``high``, each once),
    "bool", or "offset" (mean 1000, std 1).
    ``layout`` is "contiguous", "nhwc", "transposed" (last two dims swapped in memory), "sliced"
    (every second element of a larger tensor) or "expanded" (dimension 0 with stride 0).
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    dtype: str | None = None  # None: the float type under test
    layout: str = "contiguous"
    high: int = 0

    def tensor(self, float_type: DType, generator: torch.Generator) -> torch.Tensor:
        values = self._values(generator)
        if self.dtype is not None:
            values = values.to(dtype(self.dtype).torch)
        elif values.is_floating_point():
            values = values.to(float_type.torch)
        return self._laid_out(values)

    def _values(self, gen: torch.Generator) -> torch.Tensor:
        shape, kind = self.shape, self.kind
        if kind == "index":
            return torch.randint(0, max(self.high, 1), shape, generator=gen)
        if kind == "starts":
            inner = torch.randint(0, self.high + 1, shape, generator=gen).sort().values
            inner[0], inner[-1] = 0, self.high
            return inner
        if kind == "order":
            return torch.randperm(self.high, generator=gen)
        if kind == "bool":
            return torch.randint(0, 2, shape, generator=gen).bool()
        normal = torch.randn(shape, generator=gen, dtype=torch.float64)
        if self.dtype is not None and not dtype(self.dtype).is_float:
            return torch.randint(-9, 10, shape, generator=gen)
        if kind in ("positive", "unit"):
            low = 0.1 if kind == "positive" else -0.95
            return torch.rand(shape, generator=gen, dtype=torch.float64) * 1.9 + low
        if kind == "distinct":
            order = torch.randperm(normal.numel(), generator=gen).double()
            return ((order - normal.numel() / 2) * 0.0625).reshape(shape)
        if kind == "extreme":
            odd = [0.0, -0.0, 1e30, -1e30, 1e-30, float("inf"), -float("inf"), float("nan"), 88.0]
            picks = torch.tensor(odd, dtype=torch.float64)
            where = torch.randint(0, 2, shape, generator=gen).bool()
            which = torch.randint(0, len(odd), shape, generator=gen)
            return torch.where(where, picks[which], normal)
        if kind not in _DATA:
            raise ValueError(f"unknown kind of sample data {kind!r}")
        away = normal.sign() * (normal.abs() + 0.1)
        return {"away": away, "offset": normal + 1000.0}.get(kind, normal)

    def _laid_out(self, values: torch.Tensor) -> torch.Tensor:
        shape = tuple(values.shape)
        if self.layout == "nhwc":
            out = torch.empty_strided(shape, strides_for(shape, "nhwc"), dtype=values.dtype)
            return out.copy_(values)
        if self.layout == "transposed":
            return values.transpose(-1, -2).contiguous().transpose(-1, -2)
        if self.layout == "sliced":
            wide = torch.zeros((*shape[:-1], shape[-1] * 2), dtype=values.dtype)
            wide[..., ::2] = values
            return wide[..., ::2]
        return values[:1].expand(shape) if self.layout == "expanded" else values.contiguous()


@dataclass(frozen=True)
class Sample:
    """One case: inputs (None for one left out), attributes, and whether to check gradients."""

    inputs: tuple[Arg | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = True
    note: str = ""

    @property
    def args(self) -> tuple[Arg, ...]:
        """The inputs that are there."""
        return tuple(arg for arg in self.inputs if arg is not None)

    def tensors(self, float_type: str | DType = "f32", seed: int = 0) -> list[torch.Tensor | None]:
        gen = torch.Generator().manual_seed(seed)
        ft = dtype(float_type)
        return [None if arg is None else arg.tensor(ft, gen) for arg in self.inputs]

    def __str__(self) -> str:
        shown = ", ".join("_" if a is None else _show(a) for a in self.inputs)
        extra = "".join(f", {k}={v}" for k, v in self.attrs.items())
        return f"{shown}{extra}" + (f" [{self.note}]" if self.note else "")


def _show(arg: Arg) -> str:
    shape = "x".join(map(str, arg.shape)) or "scalar"
    tail = "" if arg.layout == "contiguous" else f"@{arg.layout}"
    kind = "" if arg.kind == "normal" else f":{arg.kind}"
    return shape + tail + kind + (f":{arg.dtype}" if arg.dtype else "")


# ---- samples as text -----------------------------------------------------------------------------


def samples(text: str, kind: str = "normal", **attrs: Any) -> Callable[[], tuple[Sample, ...]]:
    """Samples written as text, with bars between them: inputs, attributes, and a note.

        3x5@transposed 4:index<5:i32 _ axis=0 mode=area | scalar nograd [a number alone]

    An input is its sizes joined by x, or ``scalar``; then, unless they have their defaults, its
    ``@layout``, its ``:kind`` of data (an index below 5 is ``:index<5``) and its ``:dtype``. ``_``
    is an input left out. An attribute is a Python literal without spaces, or a word. ``nograd``:
    gradients are not checked. ``kind`` and ``attrs`` are defaults for samples that do not give
    their own; the text may begin with such defaults, too: ``:away p=0.5; 3x5 | 7``.
    """
    usual, is_there, cases = text.partition(";")
    for word in usual.split() if is_there else ():
        name, is_attr, value = word.partition("=")
        kind, attrs = (kind, attrs | {name: _value(value)}) if is_attr else (word[1:], attrs)
    parts = (cases if is_there else text).split("|")
    return lambda: tuple(_sample(part, kind, attrs) for part in parts)


def _sample(text: str, kind: str, attrs: Mapping[str, Any]) -> Sample:
    words, _, note = text.partition("[")
    inputs, given, grad = list[Arg | None](), dict(attrs), True
    for word in words.split():
        name, is_attr, value = word.partition("=")
        if is_attr:
            given[name] = _value(value)
        elif word == "nograd":
            grad = False
        else:
            inputs.append(None if word == "_" else _arg(word, kind))
    return Sample(tuple(inputs), given, grad, note.strip().removesuffix("]"))


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _arg(text: str, kind: str) -> Arg:
    place, *rest = text.split(":")
    sizes, _, layout = place.partition("@")
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    of, high = None, 0
    for word in rest:
        name, _, limit = word.partition("<")
        kind, of, high = (name, of, int(limit or 0)) if name in _DATA else (kind, name, high)
    return Arg(shape, kind, of, layout or "contiguous", high)


_UNARY = """3x5 | scalar [scalar] | 0x4 [empty] | 1x1x7 | 3x5@transposed | 3x5@sliced
    | 2x3x4x5@nhwc | 3x5@expanded | 33:extreme nograd [extreme]"""


def unary_samples(kind: str = "normal", attrs: Any = None) -> tuple[Sample, ...]:
    """Shapes, strides and values that every one-input elementwise operator must take."""
    return samples(_UNARY, kind, **(attrs or {}))()


_NORM = """2x4x3 | 2x4x5:offset | 2x4x3@transposed | 2x4x3@sliced | 2x4x3x2@nhwc
    | 2x4x2x3@transposed | 1x4x2x1x3@nhwc | 2x4x3@expanded | 0x4x3 | 2x4x0"""


def norm_samples(
    slots: Sequence[str], masks: str, attrs: Sequence[Mapping[str, Any]], more: str = ""
) -> Callable[[], Sequence[Sample]]:
    """Samples for a norm: each shape with the next one of ``masks`` ("x": the parameter is there)
    and of ``attrs``; ``more``: shapes to try with the first of both."""

    def case(x: Arg, mask: str, extra: Mapping[str, Any]) -> Sample:
        size = x.shape[-extra["dims"] :] if "dims" in extra else x.shape[1:2]
        params = [Arg(size, "positive" if "var" in slot else "normal") for slot in slots]
        there = (p if m == "x" else None for p, m in zip(params, mask, strict=True))
        return Sample((x, *there), extra)

    def build() -> Sequence[Sample]:
        first = masks.split()[0]
        rows = zip(samples(_NORM)(), cycle(masks.split()), cycle(attrs), strict=False)
        shapes = [case(s.args[0], m, a) for s, m, a in rows]
        shapes += [case(_arg(shape, "normal"), first, attrs[0]) for shape in more.split()]
        wide = (Arg((4,), "positive", "f32") for _ in slots)
        return (*shapes, Sample((Arg((2, 4, 4), dtype="bf16"), *wide), attrs[0], grad=False))

    return build
