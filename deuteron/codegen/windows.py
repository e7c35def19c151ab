"""Windows in scalar programs: pools and their gradients, written out element by element.

A result element reads the few elements of its window, each a load at a shifted address under guards
where it may lie in the padding; so a pool fuses with its neighbours like elementwise work. In a
gradient an element of x reads the few windows that it lies in: the last that begins at or before
it, and those before that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from deuteron.codegen.index import Affine, Index
from deuteron.codegen.scalar import Guard
from deuteron.ir.graph import Attrs, Node
from deuteron.ir.types import Shape
from deuteron.ops.formula import Arg, CannotLower

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering

Guards = tuple[Guard, ...]
Window = Callable[["Lowering", Node, str, Index, Guards], Arg]

MOST = 64  # elements of a window: more are longer code than a loop would be


class Shapes(NamedTuple):
    """Windows over the spatial dimensions of x, and how many of them there are."""

    space: Shape
    windows: Shape
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape


def _shapes(node: Node, x: Shape, y: Shape) -> Shapes:
    size, count, attrs = x[2:], y[2:], node.attrs
    if "kernel" in attrs:
        dilation = attrs.get("dilation", (1,) * len(size))
        found = Shapes(size, count, attrs["kernel"], attrs["stride"], attrs["padding"], dilation)
    elif any(n % c for n, c in zip(size, count, strict=True)):
        raise CannotLower(f"{node.op}: windows of different sizes", "use sizes that divide x's")
    else:
        each, none = tuple(n // c for n, c in zip(size, count, strict=True)), (0,) * len(size)
        found = Shapes(size, count, each, each, none, (1,) * len(size))
    if prod(found.kernel) > MOST:
        raise CannotLower(f"{node.op}: windows of more than {MOST} elements")
    return found


def _inside(places: Index, sizes: Sequence[int]) -> Guards:
    """Guards for those of the places that may lie outside."""
    pairs = zip(places, sizes, strict=True)
    return tuple(Guard(i, 0, n) for i, n in pairs if i.low < 0 or i.high >= n)


def _elements(w: Shapes, window: Index) -> Iterator[tuple[Index, Guards]]:
    """Where the elements of a window lie in x, in order."""
    for steps in product(*map(range, w.kernel)):
        terms = zip(window, w.stride, w.padding, steps, w.dilation, strict=True)
        places = tuple(o * s + (k * d - p) for o, s, p, k, d in terms)
        if all(i.high >= 0 and i.low < n for i, n in zip(places, w.space, strict=True)):
            yield places, _inside(places, w.space)
        else:
            yield places, (Guard(Affine(0), 1, 1),)  # for every window outside


# ---- pools


def _largest(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The largest element, nan before all; with winners also which one it is, the first of equals
    and the last of nans, as in torch. (Their numbers are kept as floats: whole numbers have 64 bits
    in a program, which take a GPU twice as long.)"""
    x, y = low.type(node), low.graph.types[node.outputs[0]]
    w, lead = _shapes(node, x.shape, y.shape), index[:2]
    key = ("window", node.outputs[0], index, guards)
    if key not in low.known:
        best: Any = None
        place: Any = 0.0
        for k, (at, inside) in enumerate(_elements(w, index[2:])):
            v = low.float_at(low.input(node), (*lead, *at), (*guards, *inside))
            if inside:
                v = low.op("select", low.inside(inside), v, -math.inf)
            if best is not None and len(node.outputs) > 1:
                better = low.op("or", low.op("gt", v, best), low.op("ne", v, v))
                place = low.op("select", better, float(k), place)
            best = v if best is None else low.op("maximum", best, v)
        low.known[key] = best
        low.known[*key, "place"] = low.op("to_int", place, kind="int")
    return low.known[key] if value == node.outputs[0] else low.known[*key, "place"]


def _divisor(low: Lowering, w: Shapes, window: Index, attrs: Any) -> Any:
    """What the sum over a window is divided by: a number, or one that changes near the ends."""
    if attrs.get("divisor"):
        return float(attrs["divisor"])
    padded = attrs.get("count_include_pad", True)
    known, changing = 1, list[Arg]()
    for o, s, p, k, n, count in zip(
        window, w.stride, w.padding, w.kernel, w.space, w.windows, strict=True
    ):
        first, last = (-p, n + p) if padded else (0, n)
        sizes = {min(i * s - p + k, last) - max(i * s - p, first) for i in range(count)}
        if len(sizes) == 1:
            known *= sizes.pop()
            continue
        end = low.op("minimum", low.position(o * s + (k - p)), last)
        begin = low.position(o * s + -p)
        changing.append(low.op("sub", end, begin if padded else low.op("maximum", begin, 0)))
    total: Any = float(known)
    for size in changing:
        total = low.op("mul", low.as_float(size), total)
    return total


def _mean(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    w = _shapes(node, low.type(node).shape, low.graph.types[value].shape)
    total: Any = None
    for at, inside in _elements(w, index[2:]):
        v = low.float_at(low.input(node), (*index[:2], *at), (*guards, *inside))
        total = v if total is None else low.op("add", total, v)
    return low.op("div", total, _divisor(low, w, index[2:], node.attrs))


def _weighted(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """Σ weight · x over a window; the weights are the same for all channels, or of each."""
    weight, x = low.type(node, 1), low.type(node)
    kernel = weight.shape[weight.rank - (x.rank - 2) :]
    given = replace(node, attrs=Attrs({**node.attrs, "kernel": kernel}))
    w = _shapes(given, x.shape, low.graph.types[value].shape)
    own = index[1:2] if weight.rank > len(kernel) else ()
    total: Any = None
    steps = product(*map(range, kernel))
    for (at, inside), step in zip(_elements(w, index[2:]), steps, strict=True):
        v = low.float_at(low.input(node), (*index[:2], *at), (*guards, *inside))
        factor = low.float_at(low.input(node, 1), (*own, *map(Affine, step)), guards)
        v = low.op("mul", v, factor)
        total = v if total is None else low.op("add", total, v)
    found: Arg = total
    return found


def _factors(node: Node, small: Shape, large: Shape) -> Shape:
    """How often the nearest element is repeated, where that is the same for all."""
    factors = tuple(m // n for n, m in zip(small[2:], large[2:], strict=True))
    even = all(n * f == m for n, f, m in zip(small[2:], factors, large[2:], strict=True))
    if not node.attrs["mode"].startswith("nearest") or not even:
        raise CannotLower(f"{node.op}: elements at places of their own")
    if node.attrs["scale"] not in (None, factors):
        raise CannotLower(f"{node.op}: a factor of its own", "leave it out, or give the size")
    return factors


def _repeated(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    factors = _factors(node, low.type(node).shape, low.graph.types[value].shape)
    places = (i.divided(f, False) for i, f in zip(index[2:], factors, strict=True))
    return low.at(low.input(node), (*index[:2], *places), guards)


def _repeated_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The sum over all copies of an element."""
    grad, x = low.type(node).shape, low.graph.types[value].shape
    factors, total = _factors(node, x, grad), None
    for step in product(*map(range, factors)):
        at = (i * f + k for i, f, k in zip(index[2:], factors, step, strict=True))
        g = low.float_at(low.input(node), (*index[:2], *at), guards)
        total = g if total is None else low.op("add", total, g)
    assert total is not None
    return total


# ---- gradients


def _windows(w: Shapes, place: Index, op: str) -> Iterator[tuple[Index, Index, Guards]]:
    """Windows that may hold an element of x, and which of their elements it would be in each
    dimension; the guards are of the windows that there are."""
    if set(w.dilation) != {1}:
        raise CannotLower(f"{op}: windows with gaps", "use dilation=1")
    moved = tuple(i + p for i, p in zip(place, w.padding, strict=True))
    lasts = tuple(i.divided(s, False) for i, s in zip(moved, w.stride, strict=True))
    reach = (-(-k // s) for k, s in zip(w.kernel, w.stride, strict=True))
    for back in product(*map(range, reach)):
        window = tuple(last + -j for last, j in zip(lasts, back, strict=True))
        terms = zip(moved, window, w.stride, strict=True)
        yield window, tuple(i + o * -s for i, o, s in terms), _inside(window, w.windows)


def _mean_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    grad = low.type(node)
    w = _shapes(node, low.graph.types[value].shape, grad.shape)
    total: Any = None
    for window, element, there in _windows(w, index[2:], node.op):
        inside = (*there, *_inside(element, w.kernel))
        g = low.float_at(low.input(node), (*index[:2], *window), (*guards, *inside))
        g = low.op("div", g, _divisor(low, w, window, node.attrs))
        if inside:
            g = low.op("select", low.inside(inside), g, 0.0)
        total = g if total is None else low.op("add", total, g)
    assert total is not None
    found: Arg = total
    return found


def _winners_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The gradients of those windows of which this element is the winner."""
    w = _shapes(node, low.graph.types[value].shape, low.type(node).shape)
    total: Any = None
    for window, element, there in _windows(w, index[2:], node.op):
        inside = (*there, *_inside(element, w.kernel))
        at, under = (*index[:2], *window), (*guards, *inside)
        own = Affine()
        for i, k in zip(element, w.kernel, strict=True):
            own = own * k + i
        winner = low.float_at(low.input(node, 1), at, under)
        hit = low.op("eq", winner, low.as_float(low.position(own)))
        if inside:
            hit = low.op("and", hit, low.inside(inside))
        g = low.op("select", hit, low.float_at(low.input(node), at, under), 0.0)
        total = g if total is None else low.op("add", total, g)
    assert total is not None
    found: Arg = total
    return found


WINDOWS: dict[str, Window] = {
    "max_pool": _largest,
    "max_pool_with_taps": _largest,
    "max_pool_taps_grad": _winners_grad,
    "adaptive_max_pool": _largest,
    "weighted_pool": _weighted,
    "resize": _repeated,
    "resize_grad": _repeated_grad,
    "avg_pool": _mean,
    "avg_pool_grad": _mean_grad,
    "adaptive_avg_pool": _mean,
    "adaptive_avg_pool_grad": _mean_grad,
}
