"""Windows in scalar programs: pools and their gradients, written out element by element.

A result element reads the few elements of its window, each a load at a shifted address under guards
where it may lie in the padding; so a pool fuses with its neighbours like elementwise work. In a
gradient an element of x reads the few windows that it lies in: the last that begins at or before
it, and those before that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from deuteron.codegen.index import Affine, Index, flatten
from deuteron.codegen.places import has_input
from deuteron.codegen.scalar import Guard, Guards, guards_of
from deuteron.ir.graph import Attrs, Node
from deuteron.ir.types import Shape
from deuteron.ops.formula import Arg, CannotLower

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering

Window = Callable[["Lowering", Node, str, Index, Guards], Arg]

MOST = 64  # elements of a window: for more, code written out takes longer than a loop would


class Axis(NamedTuple):
    """The windows along one dimension of x. Those of an adaptive pool whose number does not divide
    the ``size`` are ``uneven``: they begin at ⌊o · size / windows⌋ and end before
    ⌈(o + 1) · size / windows⌉, and ``kernel`` is the longest of them."""

    size: int
    windows: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    uneven: bool = False

    def begin(self, o: Affine) -> Affine:
        if self.uneven:
            return (o * self.size).divided(self.windows, False)
        return o * self.stride + -self.padding

    def end(self, o: Affine) -> Affine:
        """The place behind the last element; only for windows without gaps."""
        if self.uneven:
            last = o * self.size + (self.size + self.windows - 1)
            return last.divided(self.windows, False)
        return self.begin(o) + self.kernel

    def guards(self, o: Affine, k: int) -> Guards:
        """Return the guards under which element ``k`` of window ``o`` is in x."""
        place = self.begin(o) + k * self.dilation
        found = guards_of((place,), (self.size,))
        if self.uneven and k >= self.size // self.windows:
            return (*found, Guard(self.end(o) + place * -1, 1, self.size + 1))
        return found


def spans(size: int, count: int) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest of ``count`` windows that cover ``size``:
    ⌊o·size / count⌋ … ⌈(o + 1)·size / count⌉. The remainders of o·size by ``count`` are all
    multiples of their greatest common divisor."""
    common = math.gcd(size, count)
    n, c = size // common, count // common
    return -(-n // c), -(-(n + c - 1) // c)


def _axes(node: Node, x: Shape, y: Shape) -> list[Axis]:
    found, attrs = [], node.attrs
    for d, (size, count) in enumerate(zip(x[2:], y[2:], strict=True)):
        if "kernel" in attrs:
            step = attrs["dilation"][d] if "dilation" in attrs else 1
            given = (attrs["kernel"][d], attrs["stride"][d], attrs["padding"][d], step)
            found.append(Axis(size, count, *given))
        else:
            _, longest = spans(size, count)
            found.append(Axis(size, count, longest, size // count, 0, 1, size % count != 0))
    read = node.op == "conv_dx" or not node.op.endswith(("grad", "dx"))
    if read and prod(axis.kernel for axis in found) > MOST:
        raise CannotLower(f"{node.op}: windows of more than {MOST} elements")
    return found


def _elements(axes: Sequence[Axis], index: Index) -> Iterator[tuple[Index, Guards, Index]]:
    """Where the elements of the window at ``index`` lie in x, in order, and where in the window."""
    for steps in product(*(range(axis.kernel) for axis in axes)):
        each = list(zip(axes, index[2:], steps, strict=True))
        places = (axis.begin(o) + k * axis.dilation for axis, o, k in each)
        guards = tuple(g for axis, o, k in each for g in axis.guards(o, k))
        yield (*index[:2], *places), guards, tuple(map(Affine, steps))


def _element(low: Lowering, value: str, at: Index, guards: Guards, inside: Guards) -> Arg:
    """Return an element of a window, 0 in the padding. A load under guards gives 0 there by itself;
    a value that the region computes has to be replaced: e⁰ is 1."""
    v = low.float_at(value, at, (*guards, *inside))
    held = inside and value in low.graph.producer
    return low.op("select", low.inside(inside), v, 0.0) if held else v


def _added(low: Lowering, terms: Iterable[Arg]) -> Arg:
    """One after another: each sum is written as soon as both of its terms are."""
    return reduce(partial(low.op, "add"), terms)


# ---- pools


def _largest(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    return low.once(_winner, node, index, guards)[node.outputs.index(value)]


def _winner(low: Lowering, node: Node, index: Index, guards: Guards) -> tuple[Arg, Arg]:
    """Return the largest element, where nan counts as the largest; with winners also which one it
    is, the first of equals and the last of nans, as in torch. (The winners' numbers are kept as
    floats: integers have 64 bits in a program, which take a GPU twice as long.)"""
    x, y = low.type(node), low.graph.types[node.outputs[0]]
    axes = _axes(node, x.shape, y.shape)
    best: Any = None
    place: Any = 0.0
    for k, (at, inside, _) in enumerate(_elements(axes, index)):
        v = low.float_at(low.input(node), at, (*guards, *inside))
        if inside:
            v = low.op("select", low.inside(inside), v, -math.inf)
        if best is not None and len(node.outputs) > 1:
            better = low.op("or", low.op("gt", v, best), low.op("ne", v, v))
            place = low.op("select", better, float(k), place)
        best = v if best is None else low.op("maximum", best, v)
    return best, low.op("to_int", place, kind="int")


def _divisor(low: Lowering, axes: Sequence[Axis], window: Index, attrs: Any) -> Any:
    """Return what the sum over a window is divided by: a number, or one that changes near the
    ends."""
    if attrs.get("divisor"):
        return float(attrs["divisor"])
    known, changing = 1, list[Arg]()
    for axis, o in zip(axes, window, strict=True):
        padded = attrs.get("count_include_pad", True)
        first, last = (-axis.padding, axis.size + axis.padding) if padded else (0, axis.size)
        lengths = set(spans(axis.size, axis.windows))
        if not axis.uneven:  # those that hang over the ends, and one that does not
            near, windows = (axis.padding + axis.kernel) // axis.stride + 2, range(axis.windows)
            each = map(Affine, {*windows[:near], *windows[-near:]})
            lengths = {min(axis.end(k).const, last) - max(axis.begin(k).const, first) for k in each}
        if len(lengths) == 1:
            known *= lengths.pop()
            continue
        end = low.op("minimum", low.position(axis.end(o)), last)
        begin = low.op("maximum", low.position(axis.begin(o)), first)
        changing.append(low.as_float(low.op("sub", end, begin)))
    total: Any = float(known)
    return reduce(lambda total, length: low.op("mul", length, total), changing, total)


def _mean(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    axes = _axes(node, low.type(node).shape, low.graph.types[value].shape)
    each = ((at, guards, inside) for at, inside, _ in _elements(axes, index))
    total = _added(low, (_element(low, low.input(node), *at) for at in each))
    return low.op("div", total, _divisor(low, axes, index[2:], node.attrs))


def _weighted(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """Σ weight · x over a window; channels have the same weights, or each its own."""
    axes = _axes(_with_kernel(low, node), low.type(node).shape, low.graph.types[value].shape)
    own = index[1:2] if low.type(node, 1).rank > len(axes) else ()
    return _sum_of_products(low, node, axes, (index, own), guards)


def _sum_of_products(
    low: Lowering,
    node: Node,
    axes: Sequence[Axis],
    at: tuple[Index, Index],
    guards: Guards,
    reverse: bool = False,
) -> Arg:
    """Σ weight · x over a window. ``at``: the index of the window, and that with which those of its
    weights begin; ``reverse``: the weights are taken from the last to the first."""
    total: Any = None
    last = [axis.kernel - 1 for axis in axes]
    for place, inside, step in _elements(axes, at[0]):
        if reverse:
            step = tuple(k * -1 + most for k, most in zip(step, last, strict=True))
        v = _element(low, low.input(node), place, guards, inside)
        factor = low.float_at(low.input(node, 1), (*at[1], *step), guards)
        total = low.op("mul", v, factor) if total is None else low.op("fma", v, factor, total)
    found: Arg = total
    return found


def _convolved(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """A convolution in which no channel reads another; each may have several results. A transposed
    one, and the gradient for x, has its windows in the result."""
    spread = (node.op == "conv_dx") != node.attrs["transposed"]
    total = (_spread if spread else _gathered)(low, node, value, index, guards)
    if not has_input(node, 2):
        return total
    return low.op("add", total, low.float_at(low.input(node, 2), index[1:2], guards))


def _gathered(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    x, weight, groups = low.type(node), low.type(node, 1), node.attrs["groups"]
    axes = _axes(_with_kernel(low, node), x.shape, low.graph.types[value].shape)
    read = index[0], index[1].divided(weight.shape[0] // groups, False), *index[2:]
    own = index[1], Affine()
    return _sum_of_products(low, node, axes, (read, own), guards)


def _spread(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """Σ over the windows that an element lies in, each times the weight that it has there. With
    stride 1 that is a convolution with its taps in reverse."""
    x, out, whole = low.type(node), low.graph.types[value], _with_kernel(low, node)
    own = index[1], Affine()
    if set(node.attrs["stride"]) == {1}:
        kernel = whole.attrs["kernel"]
        each = zip(_axes(whole, x.shape, out.shape), kernel, strict=True)
        axes = [a._replace(padding=(k - 1) * a.dilation - a.padding) for a, k in each]
        return _sum_of_products(low, node, axes, (index, own), guards, reverse=True)

    def share(axes: Sequence[Axis], steps: Index, at: Index, under: Guards, g: Arg) -> Arg:
        return low.op("mul", g, low.float_at(low.input(node, 1), (*own, *steps), under))

    return _gain(low, whole, value, index, guards, share)


def refuse_sum_of_channels(low: Lowering, node: Node) -> None:
    x, out = low.type(node), low.graph.types[node.output]
    several = node.op == "conv_dx" or node.attrs["transposed"]  # results of a channel
    alone = x.shape[1] == node.attrs["groups"] and (not several or out.shape[1] == x.shape[1])
    if not alone:
        raise CannotLower(f"{node.op}: sums over channels have kernels of their own")


def _with_kernel(low: Lowering, node: Node) -> Node:
    """Return a weighted pool, its gradient or a convolution with an attribute ``kernel``: the sides
    of its window, which are those of its weight."""
    weight = low.type(node, 1)
    kernel = weight.shape[weight.rank - (low.type(node).rank - 2) :]
    return replace(node, attrs=Attrs({**node.attrs, "kernel": kernel}))


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
    if node.attrs["mode"] == "area":  # which is an adaptive mean
        return _mean(low, node, value, index, guards)
    factors = _factors(node, low.type(node).shape, low.graph.types[value].shape)
    places = (i.divided(f, False) for i, f in zip(index[2:], factors, strict=True))
    return low.at(low.input(node), (*index[:2], *places), guards)


def _repeated_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The sum over all copies of an element."""
    grad, x = low.type(node).shape, low.graph.types[value].shape
    factors = _factors(node, x, grad)

    def copy(step: Sequence[int]) -> Arg:
        at = (i * f + k for i, f, k in zip(index[2:], factors, step, strict=True))
        return low.float_at(low.input(node), (*index[:2], *at), guards)

    return _added(low, map(copy, product(*map(range, factors))))


# ---- gradients


def _windows(axes: Sequence[Axis], place: Index, op: str) -> Iterator[tuple[Index, Index, Guards]]:
    """Yield windows that may hold an element of x, which of their elements it is along each
    dimension, and the guards under which it is one."""
    if any(axis.dilation != 1 for axis in axes):
        raise CannotLower(f"{op}: windows with gaps")
    along = [list(_windows_along(axis, i)) for axis, i in zip(axes, place, strict=True)]
    if prod(map(len, along)) > MOST:
        raise CannotLower(f"{op}: elements that lie in more than {MOST} windows")
    for each in product(*along):
        windows, steps, guards = zip(*each, strict=True)
        yield windows, steps, tuple(g for gs in guards for g in gs)


def _windows_along(axis: Axis, i: Affine) -> Iterator[tuple[Affine, Affine, Guards]]:
    """Yield the same along one dimension."""
    if axis.uneven:
        first = (i * axis.windows).divided(axis.size, False)
        last = (i * axis.windows + (axis.windows - 1)).divided(axis.size, False)
        n, size = axis.windows, axis.size
        common = math.gcd(n, size)
        most = (size - common + n - 1) // size
        if most >= MOST:
            raise CannotLower(f"elements that lie in more than {MOST} windows")
        for j in range(most + 1):
            o = first + j
            yield o, i + axis.begin(first) * -1, (Guard(last + o * -1, 0, axis.windows),)[:j]
        return
    i = i + axis.padding
    last = i.divided(axis.stride, False)
    for j in range(-(-axis.kernel // axis.stride)):
        o = last + -j
        step = i + o * -axis.stride
        yield o, step, guards_of((o, step), (axis.windows, axis.kernel))


def _gain(low: Lowering, node: Node, value: str, index: Index, guards: Guards, share: Share) -> Arg:
    """Return what an element of x receives from all windows that hold it."""
    axes = _axes(node, low.graph.types[value].shape, low.type(node).shape)

    def received() -> Iterator[Arg]:
        for window, steps, inside in _windows(axes, index[2:], node.op):
            at, under = (*index[:2], *window), (*guards, *inside)
            g = share(axes, steps, at, under, low.float_at(low.input(node), at, under))
            yield low.op("select", low.inside(inside), g, 0.0) if inside else g

    return _added(low, received())


# what a window gives an element; called with the axes, the element's place in the window, the
# window's index, the guards under which it holds the element, and the window's gradient
Share = Callable[[Sequence[Axis], Index, Index, Guards, Arg], Arg]


def _mean_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """Return the gradient of a mean: if all windows have one divisor, their sum is divided by
    it."""
    equal: list[float] = []

    def share(axes: Sequence[Axis], steps: Index, at: Index, under: Guards, g: Arg) -> Arg:
        by = _divisor(low, axes, at[2:], node.attrs)
        if isinstance(by, float):
            equal[:] = [by]
            return g
        return low.op("div", g, by)

    total = _gain(low, node, value, index, guards, share)
    return low.op("div", total, *equal) if equal else total


def _winners_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The gradients of those windows of which this element is the winner."""

    def share(axes: Sequence[Axis], steps: Index, at: Index, under: Guards, g: Arg) -> Arg:
        winner = low.float_at(low.input(node, 1), at, under)
        own = low.position(flatten(steps, tuple(axis.kernel for axis in axes)))
        return low.op("select", low.op("eq", winner, low.as_float(own)), g, 0.0)

    return _gain(low, node, value, index, guards, share)


def _weighted_grad(low: Lowering, node: Node, value: str, index: Index, guards: Guards) -> Arg:
    """The gradients of all windows, each times the weight that this element has in it."""

    def share(axes: Sequence[Axis], steps: Index, at: Index, under: Guards, g: Arg) -> Arg:
        own = at[1:2] if low.type(node, 1).rank > len(axes) else ()
        return low.op("mul", g, low.float_at(low.input(node, 1), (*own, *steps), under))

    return _gain(low, _with_kernel(low, node), value, index, guards, share)


def weight_grad(low: Lowering, node: Node, value: str) -> Arg:
    """Σ grad · x over all windows of a channel, for one of their elements: a reduction of rows."""
    cell, sizes = low.cell_index(node), low.type(node, 1).shape[2:]
    steps = list(product(*map(range, node.attrs["window"])))[node.outputs.index(value)]
    how = zip(cell[2:], node.attrs["stride"], node.attrs["padding"], steps, strict=True)
    places = tuple(o * stride + (k - padding) for o, stride, padding, k in how)
    x = _element(low, low.input(node, 1), (*cell[:2], *places), (), guards_of(places, sizes))
    return low.reduce("sum", low.op("mul", low.as_float(low.cell(node)), x))


WINDOWS: dict[str, Window] = {
    **dict.fromkeys(("max_pool", "max_pool_with_winners", "adaptive_max_pool"), _largest),
    **dict.fromkeys(("avg_pool", "adaptive_avg_pool"), _mean),
    **dict.fromkeys(("avg_pool_grad", "adaptive_avg_pool_grad"), _mean_grad),
    "max_pool_winners_grad": _winners_grad,
    **dict.fromkeys(("conv", "conv_dx"), _convolved),
    "weighted_pool": _weighted,
    "weighted_pool_dx": _weighted_grad,
    "resize": _repeated,
    "resize_grad": _repeated_grad,
}
