"""Convolutions with what follows them, for the hand-written kernels: in the interpreter, and on a
GPU.

``python -m tests.interpreted tests.conv_cases`` runs them in Triton's interpreter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region, TensorType
from deuteron.ir.types import strides_for
from deuteron.ops.evaluate import evaluate
from deuteron.policy import Policy
from deuteron.target import target
from tests import by_hand
from tests.interpreted import tell
from tests.product_cases import compare

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


class Case(NamedTuple):
    """Tensors by name, what a graph makes of them, and whether the weight may be stored anew."""

    name: str
    feed: dict[str, torch.Tensor]
    write: Callable[..., Any]
    known: bool = True
    beside: int = 0  # channels of other values between the pixels of the result

    def region(self) -> Region:
        graph = by_hand.graph_of(self.name, self.feed, self.write)
        if self.beside:
            types = {v: self._apart(graph.types[v]) for _, v in graph.outputs}
            graph = replace(graph, types={**graph.types, **types})
        return Region(graph, frozenset({"w"} if self.known else ()), 0)

    def _apart(self, t: TensorType) -> TensorType:
        whole = (t.shape[0], t.shape[1] + self.beside, *t.shape[2:])
        return replace(t, strides=strides_for(whole, "nhwc"))

    def in_place(self) -> Case:
        """The same with x and the result as parts of larger images."""
        x = self.feed["x"]
        wide = x.new_full((x.shape[0], x.shape[1] + 16, *x.shape[2:]), float("nan"))
        part = wide.contiguous(memory_format=LAST)[:, 8:-8]
        feed = {**self.feed, "x": part.copy_(x)}
        return self._replace(name=f"{self.name}, in place", feed=feed, beside=24)


def _with_mean(g: Any, y: Any) -> Any:
    y.output("all")
    return g.mean(y, axes=(2, 3), keepdim=True)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Sizes that fill no tile, windows of all kinds, groups, few channels, all that may follow."""
    t = by_hand.drawn(0, dtype, last=True)

    def one(
        name: str, x: tuple[int, ...], w: tuple[int, ...], known: bool = True, **how: Any
    ) -> Case:
        feed = {"x": t(*x), "w": t(*w, scale=(w[1] * w[2] * w[3]) ** -0.5)}
        return Case(name, feed, lambda g, x, w: g.conv(x, w, **how), known)

    yield one("3×3", (2, 64, 9, 7), (40, 64, 3, 3), padding=1)
    yield one("uneven padding, two apart", (1, 32, 9, 8), (24, 32, 3, 3), padding=(0, 1, 1, 0),
              stride=2)  # fmt: skip
    yield one("two apart, as Hopper's copy engine reads them", (2, 64, 10, 12), (40, 64, 5, 3),
              padding=(2, 1), stride=2)  # fmt: skip
    yield one("dilated", (1, 32, 15, 13), (16, 32, 3, 3), padding=(4, 6), dilation=(4, 6))
    yield one("channels that fill no step", (2, 20, 6, 5), (18, 20, 3, 2), padding=1)
    yield one("groups of 8", (2, 64, 7, 6), (64, 8, 3, 3), padding=1, groups=8)
    odd = one("groups of 8, one holds infinity and another nan", (2, 64, 7, 6), (64, 8, 3, 3),
              padding=1, groups=8)  # fmt: skip
    odd.feed["x"][0, 10, 3, 3], odd.feed["x"][1, 60, 2, 1] = float("inf"), float("nan")
    yield odd
    yield one("groups of 24, weight unknown", (1, 72, 5, 6), (48, 24, 3, 3), False, padding=1,
              groups=3)  # fmt: skip
    yield one("three channels", (2, 3, 13, 11), (16, 3, 3, 3), padding=1, stride=2)
    yield one("two channels, weight unknown", (2, 2, 9, 8), (16, 2, 3, 3), False, padding=1)
    yield one("three channels, pixels by twos", (2, 3, 13, 12), (16, 3, 7, 7), False, padding=3,
              stride=2)  # fmt: skip
    odd = one("four channels, pixels by twos, infinity and nan", (2, 4, 9, 12), (16, 4, 3, 3),
              padding=1, stride=2)  # fmt: skip
    odd.feed["x"][0, 1, 3, 4], odd.feed["x"][1, 2, 2, 9] = float("inf"), float("nan")
    yield odd
    odd = one("three channels, rows of windows as pixels, infinity and nan", (3, 3, 22, 21),
              (72, 3, 7, 7), padding=(3, 2), stride=2)  # fmt: skip
    odd.feed["x"][0, 1, 3, 4], odd.feed["x"][2, 2, 2, 19] = float("inf"), float("nan")
    yield odd
    yield one("five channels, rows of windows as pixels, weight unknown", (2, 5, 9, 18),
              (64, 5, 3, 3), False, padding=1)  # fmt: skip
    yield one("to one channel", (1, 16, 6, 5), (1, 16, 3, 3), padding=1)
    yield one("patches", (1, 3, 12, 12), (24, 3, 4, 4), stride=4)
    yield one("one pixel, two apart", (2, 16, 7, 7), (32, 16, 1, 1), stride=2)
    yield one("one pixel", (2, 24, 5, 7), (40, 24, 1, 1))
    yield one("7×7", (2, 24, 9, 15), (24, 1, 7, 7), padding=3, groups=24)
    yield one("weight unknown", (1, 16, 10, 11), (16, 1, 7, 7), False, padding=3, groups=16)
    yield one("two apart, uneven", (2, 9, 12, 14), (9, 1, 7, 5), padding=(1, 2, 2, 1), stride=2,
              groups=9)  # fmt: skip
    yield one("with gaps", (1, 8, 15, 19), (8, 1, 3, 9), padding=(3, 8), dilation=(3, 2), groups=8)
    yield Case(
        "no channel sees another; bias, hardswish, a residual and a scale for each image",
        {"x": t(2, 24, 9, 8), "w": t(24, 1, 7, 7, scale=0.14), "b": t(24), "r": t(2, 24, 9, 8),
         "s": t(2, 24, 1, 1), "p": t(2, 1, 9, 8)},
        lambda g, x, w, b, r, s, p: (
            (g.hardswish(g.conv(x, w, b, padding=3, groups=24)) * s + r) * p
        ),
    )  # fmt: skip
    with_bias = {"x": t(2, 32, 6, 7), "w": t(48, 32, 3, 3, scale=0.06), "b": t(48)}
    yield Case("bias and silu", with_bias, lambda g, x, w, b: g.silu(g.conv(x, w, b, padding=1)))
    yield Case(
        "residual, hardswish, a scale for each image",
        with_bias | {"r": t(2, 48, 6, 7), "s": t(2, 48, 1, 1)},
        lambda g, x, w, b, r, s: g.hardswish(g.conv(x, w, b, padding=1) + r) * s,
    )
    yield Case(
        "one pixel with a residual and relu",
        {"x": t(2, 32, 6, 7), "w": t(48, 32, 1, 1), "b": t(48), "r": t(2, 48, 6, 7)},
        lambda g, x, w, b, r: g.relu(g.conv(x, w, b) + r),
    )
    yield Case(
        "scale by channel, exact gelu, a number for each pixel",
        {"x": t(2, 32, 6, 7), "w": t(48, 32, 3, 3, scale=0.06), "c": t(1, 48, 1, 1),
         "p": t(2, 1, 6, 7)},
        lambda g, x, w, c, p: g.gelu(g.conv(x, w, padding=1) * c) * p,
    )  # fmt: skip
    block = {"x": t(2, 40, 9, 7), "d": t(40, 1, 3, 3, scale=0.3), "b": t(40),
             "v": t(24, 40, 1, 1, scale=0.15), "c": t(24)}  # fmt: skip
    yield Case(
        "depthwise, hardswish, pointwise, a residual and a scale for each image",
        block | {"r": t(2, 24, 5, 4), "s": t(2, 24, 1, 1)},
        lambda g, x, d, b, v, c, r, s: (
            g.conv(g.hardswish(g.conv(x, d, b, padding=1, stride=2, groups=40)), v, c) * s + r
        ),
    )
    yield Case(
        "depthwise and pointwise, few pixels and many channels",
        {"x": t(1, 200, 5, 6), "w": t(200, 1, 5, 5, scale=0.2), "v": t(18, 200, 1, 1, scale=0.07)},
        lambda g, x, w, v: g.relu(g.conv(g.relu(g.conv(x, w, padding=2, groups=200)), v)),
    )
    yield Case(
        "a scale for each image and channel on the way in, a bias and a residual on the way out",
        {"x": t(2, 72, 6, 7), "s": t(2, 72, 1, 1), "v": t(24, 72, 1, 1, scale=0.1), "c": t(24),
         "r": t(2, 24, 6, 7)},
        lambda g, x, s, v, c, r: g.conv(x * s, v, c) + r,
    )  # fmt: skip
    yield Case(
        "depthwise with silu, and the mean over each image",
        {"x": t(2, 40, 9, 7), "w": t(40, 1, 3, 3, scale=0.3), "b": t(40)},
        lambda g, x, w, b: _with_mean(g, g.silu(g.conv(x, w, b, padding=1, groups=40))),
    )
    yield Case(
        "a norm and relu on the way in",
        {"x": t(2, 30, 6, 5), "a": t(1, 30, 1, 1), "b": t(1, 30, 1, 1), "v": t(17, 30, 1, 1)},
        lambda g, x, a, b, v: g.conv(g.relu(x * a + b), v),
    )


def in_place(dtype: torch.dtype) -> Iterator[Case]:
    """Some of these with x and the result as parts of larger images."""
    some = "3×3", "groups of 8", "one pixel", "residual, hard", "depthwise, hard", "a norm"
    yield from (case.in_place() for case in cases(dtype) if case.name.startswith(some))


VOLUMES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3×3×3": ((2, 32, 4, 5, 3), (24, 32, 3, 3, 3), {"padding": 1}),
    "gaps, steps and groups": ((1, 24, 7, 5, 6), (48, 8, 3, 2, 3),
                               {"padding": (2, 0, 1), "stride": (2, 1, 3), "dilation": (1, 3, 2),
                                "groups": 3}),
    "uneven, three channels": ((1, 3, 6, 5, 4), (17, 3, 2, 3, 3), {"padding": (0, 1, 2, 1, 1, 0)}),
    "transposed": ((2, 16, 3, 2, 4), (16, 9, 3, 2, 4),
                   {"stride": (2, 1, 3), "padding": (1, 0, 2), "output_padding": (1, 0, 2),
                    "transposed": True}),
    "one channel by itself": ((1, 5, 4, 6, 5), (5, 1, 3, 3, 2), {"groups": 5, "stride": 2}),
}  # fmt: skip


def volumes(dtype: torch.dtype) -> Iterator[Case]:
    """Three dimensions of space: forward with what follows, and both gradients."""
    gen = torch.Generator().manual_seed(3)

    def t(*shape: int) -> torch.Tensor:
        scale = math.prod(shape[1:]) ** -0.5 if len(shape) == 5 else 1.0
        made = (torch.randn(shape, generator=gen) * scale).to(dtype)
        return made.contiguous(memory_format=LAST_3D) if len(shape) == 5 else made

    for name, (x, w, how) in VOLUMES.items():
        y = dt.Graph()
        outs = y.conv(y.tensor("x", x, dtype), y.tensor("w", w, dtype), **how).shape
        alone = how.get("groups") == x[1]
        if not alone:  # which is generated
            feed = {"x": t(*x), "w": t(*w), "b": t(outs[1]), "s": t(x[0], outs[1], 1, 1, 1)}
            yield Case(f"{name}: forward", feed, partial(_scaled_volume, how=how))
        if name.startswith("uneven"):
            continue
        feed = {"dy": t(*outs), "w": t(*w), "x": t(*x), "d": t(*w)}
        of_x, of_w = ({v: feed[v] for v in names} for names in (("dy", "w"), ("dy", "x", "d")))
        if not alone:
            yield Case(f"{name}: input", of_x, partial(_input_grad, shape=x, **how), known=False)
        yield Case(f"{name}: weight", of_w, partial(_weight_grad, shape=w, **how), known=False)


def _scaled_volume(g: Any, x: Any, w: Any, b: Any, s: Any, how: Any) -> Any:
    return g.silu(g.conv(x, w, b, **how)) * s


def of_short_floats(kind: torch.dtype = torch.float8_e4m3fn) -> Iterator[Case]:
    """Floats of 8 bits, with scales and a bias behind them: few channels, groups, a volume, and
    results that are of 8 bits again."""
    gen, most = torch.Generator().manual_seed(4), torch.finfo(kind).max

    def t(*shape: int, scale: float = 1.0) -> torch.Tensor:
        order = LAST if len(shape) == 4 else LAST_3D
        made = torch.randn(shape, generator=gen) * scale
        return made.contiguous(memory_format=order).to(kind)

    def write(g: Any, x: Any, w: Any, s: Any, b: Any, how: Any, again: bool) -> Any:
        y = g.relu(g.conv(x, w, **how) * s + b)
        return g.cast(g.clamp(y * 0.37, min=-most, max=most), dtype=kind) if again else y

    for name, x, w, how in (
        ("3×3", (2, 32, 6, 5), (24, 32, 3, 3), {"padding": 1}),
        ("three channels", (1, 3, 9, 7), (17, 3, 3, 3), {"padding": 1, "stride": 2}),
        ("groups", (1, 24, 6, 7), (48, 8, 3, 3), {"groups": 3}),
        ("a volume", (1, 16, 3, 4, 5), (8, 16, 2, 2, 2), {}),
    ):
        each = (w[0], *[1] * (len(w) - 2))
        feed = {"x": t(*x), "w": t(*w, scale=0.1), "s": torch.rand(each, generator=gen)}
        feed["b"] = torch.randn(each, generator=gen)
        made = partial(write, how=how, again=name != "three channels")
        yield Case(f"floats of 8 bits: {name}", feed, made)


def by_winograd(dtype: torch.dtype) -> Case:
    """Tiles of 2 × 2 and 4 × 4 that fill no image, with what may follow."""
    t = by_hand.drawn(1, dtype, last=True)
    return Case(
        "by Winograd: uneven padding, bias, silu and a residual",
        {"x": t(2, 40, 9, 7), "w": t(48, 40, 3, 3, scale=0.07), "b": t(48), "r": t(2, 48, 9, 6)},
        lambda g, x, w, b, r: g.silu(g.conv(x, w, b, padding=(1, 0, 1, 1))) + r,
    )


def of_integers() -> Iterator[Case]:
    """Sums alone, as floats, and rounded to bytes; windows of several kinds, groups, few channels,
    numbers that stand for zero."""
    gen = torch.Generator().manual_seed(2)

    def t(low: int, high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        made = torch.randint(low, high, shape, generator=gen).to(dtype)
        return made.contiguous(memory_format=LAST) if len(shape) == 4 else made

    kinds = (
        ((2, 32, 7, 6), (40, 32, 3, 3), {"padding": 1, "zero": -5}),
        ((1, 24, 9, 8), (16, 24, 3, 3), {"padding": (0, 1, 1, 0), "stride": 2, "zero": 100}),
        ((2, 64, 5, 6), (64, 8, 3, 3), {"padding": 1, "groups": 8, "zero": 7}),
        ((2, 3, 9, 9), (16, 3, 3, 3), {"padding": 1, "zero": -128}),
        ((2, 16, 5, 5), (24, 16, 1, 1), {}),
    )
    for i, (x, w, how) in enumerate(kinds):
        short = how.get("zero", 0) == 100
        image = t(0, 256, torch.uint8, *x) if short else t(-128, 128, torch.int8, *x)
        feed = {"x": image, "w": t(-127, 128, torch.int8, *w)}
        feed |= {"b": t(-5000, 5000, torch.int32, w[0])}
        if i == 3:
            yield Case("sums alone", feed, partial(_summed, how=how))
            continue
        feed["s"] = torch.rand(w[0], 1, 1, generator=gen) * 1e-3
        write = _scaled if i == 4 else partial(_rounded, low=0 if short else -128)
        yield Case(f"whole numbers {i}", feed, partial(write, how=how))


def _summed(g: Any, x: Any, w: Any, b: Any, how: Any) -> Any:
    return g.conv_integer(x, w, b, **how)


def _scaled(g: Any, x: Any, w: Any, b: Any, s: Any, how: Any) -> Any:
    return g.relu(g.cast(_summed(g, x, w, b, how), dtype="f32") * s + 0.3)


def _rounded(g: Any, how: Any, low: int, **given: Any) -> Any:
    y = g.round(_scaled(g, how=how, **given) * (1 / 0.037)) + 11.0
    return g.cast(g.clamp(y, min=float(low), max=low + 255.0), dtype="i8" if low else "u8")


def bits_of(case: Case, device: str) -> list[str]:
    """What is wrong with kernels for whole numbers, which are held to the last bit."""
    region = case.region()
    region = Region(region.graph, frozenset({"w", "b"}), 0)
    engine, gpu = TritonKernels(), target("a100" if device == "cpu" else "h200")
    feed = {name: by_hand.moved(t, device) for name, t in case.feed.items()}
    offered = engine.candidates(region, gpu, Policy())[: 1 if device == "cpu" else 9]
    (want,) = evaluate(region.graph, feed).values()
    bad = [] if offered else [f"{case.name}: none"]
    for candidate in offered:
        known = {v: feed[v] for v in region.constants}
        ctx = BuildContext(gpu, torch.device(device), Policy(), known)
        out = torch.empty_like(want)
        engine.build(region, candidate, ctx).fill([feed[v] for v in region.inputs], [out])
        if not torch.equal(out, want):
            bad.append(f"{case.name} {candidate}: {int((out != want).sum())} numbers differ")
    return bad


# x, weight and how: windows side by side and apart, taps that reach nothing, groups, few channels,
# transposed ones, and those in which no channel sees another
PULLED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3×3": ((2, 40, 9, 7), (64, 40, 3, 3), {"padding": 1}),
    "two apart": ((2, 24, 9, 8), (32, 24, 3, 3), {"padding": 1, "stride": 2}),
    "one pixel": ((2, 24, 5, 7), (40, 24, 1, 1), {}),
    "one pixel, two apart": ((2, 16, 7, 8), (32, 16, 1, 1), {"stride": 2}),
    "dilated": ((1, 32, 15, 13), (16, 32, 3, 3), {"padding": (4, 6), "dilation": (4, 6)}),
    "far apart": ((3, 72, 19, 21), (72, 72, 3, 3), {"padding": (9, 12), "dilation": (9, 12)}),
    "gaps and steps": ((2, 6, 12, 9), (8, 6, 3, 2),
                       {"padding": (2, 1), "stride": (2, 3), "dilation": (3, 2)}),
    "gaps of a step": ((1, 16, 9, 9), (24, 16, 3, 2), {"padding": 2, "stride": 2, "dilation": 2}),
    "groups": ((2, 24, 7, 6), (48, 8, 3, 3), {"padding": 1, "groups": 3, "stride": (1, 2)}),
    "three channels": ((1, 3, 20, 17), (11, 3, 7, 7), {"padding": 3, "stride": 2}),
    "three channels, by twos": ((2, 3, 15, 18), (11, 3, 5, 7), {"padding": (2, 3), "stride": 2}),
    "four channels, by threes": ((1, 4, 9, 12), (8, 4, 3, 4), {"padding": 1, "stride": 3}),
    "transposed": ((2, 16, 5, 7), (16, 24, 4, 4),
                   {"padding": 1, "stride": 2, "transposed": True}),
    "transposed, groups": ((2, 32, 5, 4), (32, 8, 3, 2),
                           {"stride": (2, 1), "output_padding": (1, 0), "groups": 2,
                            "transposed": True}),
    "alone": ((2, 18, 9, 7), (18, 1, 3, 3), {"padding": 1, "groups": 18}),
    "alone, two apart": ((2, 20, 11, 12), (20, 1, 5, 5), {"padding": 2, "groups": 20, "stride": 2}),
    "alone, 7×7": ((1, 16, 10, 11), (16, 1, 7, 7), {"padding": 3, "groups": 16}),
    "alone, gaps": ((1, 6, 16, 11), (6, 1, 3, 4),
                    {"padding": (2, 3), "groups": 6, "dilation": (3, 2), "stride": (1, 2)}),
}  # fmt: skip


def pulled(dtype: torch.dtype) -> Iterator[Case]:
    """Gradients for the input and for the weight, and the transposed convolutions themselves."""
    gen = torch.Generator().manual_seed(1)

    def t(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        made = (torch.randn(tuple(shape), generator=gen) * scale).to(dtype)
        return made.contiguous(memory_format=LAST)

    for name, (x, w, how) in PULLED.items():
        g = dt.Graph()
        y = g.conv(g.tensor("x", x, dtype), g.tensor("w", w, dtype), **how).shape
        feed = {"dy": t(y), "w": t(w, (w[0] * w[2] * w[3]) ** -0.5)}
        # small windows of a channel by itself are generated
        small = "alone" in name and not (math.prod(w[2:]) > 25 and "stride" not in how)
        if how.get("transposed"):
            given = {"x": t(x), "w": feed["w"], "b": torch.ones(y[1], dtype=dtype)}
            yield Case(f"{name}: forward", given, partial(_transposed, **how))
        if not small:
            dx = partial(_input_grad, shape=x, **how)
            yield Case(f"{name}: input", feed, dx, known=False)
        images = {"dy": feed["dy"], "x": t(x, 0.1), "d": t(w)}
        yield Case(f"{name}: weight", images, partial(_weight_grad, shape=w, **how), known=False)


def _transposed(g: Any, x: Any, w: Any, b: Any, **how: Any) -> Any:
    return g.silu(g.conv(x, w, b, **how))


def _input_grad(g: Any, dy: Any, w: Any, **how: Any) -> Any:
    return g.silu(g.conv_dx(dy, w, **how))


def _weight_grad(g: Any, dy: Any, x: Any, d: Any, **how: Any) -> Any:
    """In float32, on top of another gradient, as an optimiser may want it."""
    return g.cast(g.conv_dw(dy, x, **how), "f32") * 0.5 + d


def normalised(dtype: torch.dtype, large: bool = False) -> Iterator[Case]:
    """A convolution, and batch norm in training of its result: sizes that fill no tile, one image,
    one channel, values far from 0, values that are all the same, windows of all kinds; and
    ``large`` ones, for a GPU."""
    t = by_hand.drawn(1, dtype, last=True)

    def one(
        name: str, x: tuple[int, ...], w: tuple[int, ...], after: str = "relu", kept: bool = True,
        bias: float | None = None, residual: tuple[int, ...] = (), running: bool = True, **how: Any
    ) -> Case:  # fmt: skip
        feed = {"x": t(*x), "w": t(*w, scale=(w[1] * w[2] * w[3]) ** -0.5)}
        if bias is not None:
            feed["b"] = torch.full(w[:1], bias, dtype=dtype)
        feed |= {n: t(w[0], of=torch.float32) for n in ("gamma", "beta")}
        if running:
            feed |= {"mean": feed["beta"].clone(), "var": feed["gamma"].abs() + 0.5}
        if residual:
            feed["r"] = t(*residual)

        def write(g: Any, x: Any, w: Any, gamma: Any, beta: Any, b: Any = None, r: Any = None,
                  mean: Any = None, var: Any = None) -> Any:  # fmt: skip
            z = g.conv(x, w, b, **how)
            given = (z, gamma, beta, mean, var, r)
            packed = "channels" if residual and after == "relu" else "none"
            made = g.batch_norm_act(*given, activation=after, packed=packed, momentum=0.3)
            return (*made, z) if kept else made

        return Case(name, feed, write, False)

    yield one("3×3", (2, 64, 9, 7), (64, 64, 3, 3), padding=1)
    yield one("to channels of two tiles, a residual", (3, 64, 6, 5), (136, 64, 3, 3), padding=1,
              residual=(3, 136, 6, 5))  # fmt: skip
    if large:  # programs that take several tiles, the last of them not whole
        yield one("many tiles", (40, 64, 41, 24), (72, 64, 3, 3), "silu", padding=1, kept=False)
        yield one("many pixels", (40, 64, 29, 28), (200, 64, 1, 1))
        yield one("many, two apart", (40, 64, 41, 24), (72, 64, 3, 3), padding=1, stride=2)
    yield one("one pixel", (2, 64, 9, 7), (136, 64, 1, 1), kept=False, running=False)
    yield one("one pixel, a residual", (1, 72, 9, 15), (64, 72, 1, 1), "hardswish",
              residual=(1, 64, 9, 15))  # fmt: skip
    yield one("two apart, dilated", (1, 32, 17, 15), (24, 32, 3, 3), "none", stride=2, dilation=2)
    yield one("to one channel", (2, 16, 12, 11), (1, 16, 3, 3), padding=1)
    yield one("of three channels", (2, 3, 12, 10), (16, 3, 3, 3), "hardswish", padding=1, stride=2)
    yield one("far from 0", (2, 64, 12, 10), (64, 64, 3, 3), "none", bias=1000.0, padding=1)
    yield one("far from 0, one pixel", (2, 64, 12, 10), (64, 64, 1, 1), "none", bias=-1000.0)
    same = one("all the same", (2, 64, 8, 8), (64, 64, 3, 3), "none", kept=False)
    same.feed["x"].fill_(0.5)
    yield same


def pulled_through_norms(dtype: torch.dtype) -> Iterator[Case]:
    """The gradient of batch norm in training, and of the convolution of single pixels before it:
    sizes that fill no tile, with and without a residual, by signs, what follows the gradients; with
    what the norm had made, and without."""
    t = by_hand.drawn(1, dtype, last=True)

    def one(
        name: str, x: tuple[int, ...], outs: int, after: str, residual: bool = False,
        affine: bool = True,
    ) -> Case:  # fmt: skip
        n, channels, *space = x
        feed = {"x": t(*x), "w": t(outs, channels, 1, 1, scale=channels**-0.5)}
        feed["z"], feed["dy"] = torch.conv2d(feed["x"], feed["w"]), t(n, outs, *space, scale=0.1)
        feed["mean"] = feed["z"].float().mean((0, 2, 3))
        feed["rstd"] = 1 / feed["z"].float().std((0, 2, 3), correction=0)
        if affine:
            feed |= {v: t(outs, of=torch.float32) for v in ("gamma", "beta")}
        how: dict[str, Any] = {"activation": after, "again": after != "relu" or residual}
        if residual and after == "relu":
            feed["signs"] = torch.randint(0, 256, (n, *space, -(-outs // 8)), dtype=torch.uint8)
            how["packed"] = "channels"
        if residual:
            feed["r"] = t(n, outs, *space)
            feed |= {"other": t(*x), "d": t(outs, channels, 1, 1, of=torch.float32)}

        def write(g: Any, x: Any, w: Any, z: Any, dy: Any, mean: Any, rstd: Any, gamma: Any = None,
                  beta: Any = None, r: Any = None, signs: Any = None, other: Any = None,
                  d: Any = None) -> Any:  # fmt: skip
            given = (dy, z, mean, rstd, gamma, beta, None, r, signs)
            back, *rest = g.batch_norm_act_grad(*given, **how)
            dx, dw = g.conv_dx(back, w, shape=x.shape), g.conv_dw(back, x, shape=w.shape)
            if other is None:
                return dx, dw, *rest[:2], *rest[3:]
            return g.silu(dx + other), g.cast(dw, "f32") * 0.5 + d, *rest

        return Case(name, feed, write, False)

    yield one("pulled through relu", (2, 64, 9, 7), 40, "relu")
    yield one("pulled, a residual", (3, 24, 6, 5), 136, "relu", residual=True)
    yield one("pulled, a residual and hardswish", (1, 72, 9, 15), 16, "hardswish", residual=True)
    yield one("pulled through a norm alone", (2, 16, 12, 11), 64, "none", affine=False)
    yield one("pulled to channels of two tiles", (1, 136, 9, 8), 120, "silu")


def main() -> None:
    whole = "pulled" in sys.argv  # all gradients, else a few of them
    rounded = Policy(float32="tf32")
    kinds = torch.float16, torch.float32  # the interpreter multiplies no bfloat16
    short, long = ([list(found(kind)) for found in (cases, pulled)] for kind in kinds)
    here = short[1] if whole else [*short[0], *short[1][::4]]
    wide = long[1][::3] if whole else long[0][::5]  # which it multiplies without rounding
    here += [] if whole else in_place(kinds[0])
    here += [] if whole else [*volumes(kinds[0]), *list(volumes(kinds[1]))[::4]]
    here += [case for case in wide if "one pixel" not in case.name]  # as products are of 16 bits
    if not whole:
        some = [*normalised(torch.float16), *list(normalised(torch.float32))[-3::2]]
        half = torch.float16
        here += [c for c in some if c.feed["x"].dtype == half or "one pixel" not in c.name]
    found = [compare(case, "cpu", 1, rounded) for case in here]
    if not whole:
        others = (*pulled_through_norms(torch.float16), *of_short_floats())
        found += [compare(case, "cpu", 1) for case in others]
        found += [(1, bits_of(case, "cpu")) for case in of_integers()]
        found.append(compare(by_winograd(torch.float32), "cpu", 9))
    tell(found)


if __name__ == "__main__":
    main()
