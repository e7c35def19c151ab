"""Reductions in scalar programs: over which axes they run, and what they are made of.

A :class:`Walk` says in which shape an operator walks its input and which axes of that are reduced.
Every operator here is written with single reductions (sum, max, min …) and arithmetic between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from deuteron.codegen.index import Affine, flatten
from deuteron.codegen.places import has_input, nll_terms, replaced
from deuteron.codegen.scalar import Load
from deuteron.codegen.scalar import number as constant
from deuteron.codegen.windows import weight_grad
from deuteron.ir.graph import Attrs, Node
from deuteron.ir.types import Shape
from deuteron.ops.cross_entropy import class_axis
from deuteron.ops.formula import Arg, CannotLower, Const

if TYPE_CHECKING:
    from deuteron.codegen.lower import Lowering


class Walk(NamedTuple):
    """How a reduction sees its input: ``shape`` as it lies, ``space`` as it is walked."""

    shape: Shape
    space: Shape
    axes: tuple[int, ...]


# ---- which axes are reduced

Walker = Callable[["Lowering", Node], Walk]
Axes = Callable[[int, Attrs], Iterable[int]]  # of a rank, and the attributes


def _over(axes: Axes, slot: int = 0) -> Walker:
    """Return a walker for an input in its own shape."""

    def walk(low: Lowering, node: Node) -> Walk:
        shape = low.type(node, slot).shape
        return Walk(shape, shape, tuple(axes(len(shape), node.attrs)))

    return walk


def _named(rank: int, attrs: Attrs) -> Iterable[int]:
    axes = attrs["axes"]
    return range(rank) if axes is None else (a % rank for a in axes)


def _one_axis(rank: int, attrs: Attrs) -> Iterable[int]:
    axis = attrs["axis"]
    return range(rank) if axis is None else (axis,)[:rank]


_all_but_channels = _over(lambda rank, attrs: (0, *range(2, rank)))


def _groups(low: Lowering, node: Node) -> Walk:
    shape, groups = low.type(node).shape, node.attrs["groups"]
    space = (shape[0], groups, shape[1] // groups, *shape[2:])
    return Walk(shape, space, tuple(range(2, len(space))))


def _classes(low: Lowering, node: Node) -> Walk:
    shape = low.type(node).shape
    if node.attrs.get("reduction", "none") != "none":
        raise CannotLower(
            f"{node.op} reduces over classes and then over positions: the sum waits for all rows, "
            "so that it takes a second kernel",
            "use reduction='none' and join the positions afterwards, as the passes do",
        )
    return Walk(shape, shape, (class_axis(shape),))


# ---- plain reductions

FAR = 16.0  # from so many deviations from 0 on a mean is corrected for rounding
NEXT_TO_NONE = 2.0**-18  # the part of a mean's rounding errors that adding them up may add

SUMS = {op: "sum" if op == "mean" else op for op in "sum mean max min prod any all".split()}


MOST, MOST64 = (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-52) * 2.0**1023


def _plain(low: Lowering, node: Node, value: str) -> Arg:
    op, out = SUMS[node.op], low.graph.types[value].dtype
    if out.kind == "bool":
        op = {"max": "any", "min": "all"}.get(op, op)
    total = low.reduce(op, low.converted(low.cell(node), low.type(node).dtype, out))
    return low.op("div", total, float(low.columns)) if node.op == "mean" else total


def _centred(low: Lowering, x: Arg, mean: Arg | None = None) -> tuple[Arg, Arg, Arg]:
    """Return the mean, each element's distance from it, and the sum of their squares: from centred
    values, so that a mean far larger than the deviation does no harm.

    The mean is off by the rounding errors of a sum. If it is so much larger than the deviation that
    they show, the distances do not add up to 0: the mean of the distances is what the mean is off
    by, and is added to it. The corrected mean is rounded once more: what that loses is subtracted
    from the distances by itself, unless it is no more than the rounding error of the second sum, so
    that equal numbers are exactly 0 from their mean. Numbers of 16 bits as they come from memory do
    not need any of this: their sum has more bits than they have."""
    count = float(low.columns)
    mean = low.op("div", low.reduce("sum", x), count) if mean is None else mean
    d = low.op("sub", x, mean)
    total = low.reduce("sum", low.op("mul", d, d))
    if any(isinstance(s, Load) and s.name == x and s.dtype.is_low for s in low.statements):
        return mean, d, total
    most = low.op("mul", low.op("mul", mean, mean), count / FAR**2)
    shows = low.op("and", low.op("le", total, most), low.op("lt", total, math.inf))
    far = low.op("select", shows, math.inf, 0.0)
    left = low.op("div", low.reduce("sum", d, far), count)
    left = low.op("select", low.op("eq", far, math.inf), left, 0.0)
    right = low.op("add", mean, left)
    rest = low.op("sub", left, low.op("sub", right, mean))
    least = low.op("mul", low.op("abs", left), NEXT_TO_NONE)
    rest = low.op("select", low.op("le", low.op("abs", rest), least), 0.0, rest)
    total = low.op("sub", total, low.op("mul", low.op("mul", left, left), count))
    d = low.op("sub", low.op("sub", x, right), rest)
    return right, d, low.op("maximum", total, 0.0)


def _scaled_squares(
    low: Lowering, x: Arg, total: Arg, mean: Arg | None = None
) -> tuple[Arg, float]:
    """Σ ((x − mean) · scale)² and the scale, for where Σ (x − mean)², the ``total``, is infinite:
    squares overflow long before their root or their mean does, from 2⁶⁴ in float32."""
    scale = 2.0**-540 if low.wide else 2.0**-78  # then 2²⁸ of the largest squares can be added up
    small = low.op("mul", x, scale)
    if mean is not None:
        small = low.op("sub", small, low.op("mul", mean, scale))
        # take out the rounding error of the mean: even of equal numbers its square would overflow
        left = low.op("div", low.reduce("sum", small, total), float(low.columns))
        small = low.op("sub", small, left)
    return low.reduce("sum", low.op("mul", small, small), total), scale


def _var(low: Lowering, node: Node, value: str) -> Arg:
    """Where a sum overflows, the mean is the sum of the numbers, each divided by their count. Where
    even the scaled squares are infinite, the row holds an infinity: nan."""
    x, count = low.as_float(low.cell(node)), float(low.columns)
    mean = low.op("div", low.reduce("sum", x), count)
    over = low.op("select", low.op("lt", low.op("abs", mean), math.inf), 0.0, math.inf)
    parts, most = low.reduce("sum", low.op("div", x, count), over), (MOST64 if low.wide else MOST)
    parts = low.op("minimum", low.op("maximum", parts, -most), most)  # it may be rounded up to inf
    mean = low.op("select", low.op("eq", over, math.inf), parts, mean)
    mean, _, total = _centred(low, x, mean)
    freedom = float(max(low.columns - node.attrs["correction"], 0))
    small, scale = _scaled_squares(low, x, total, mean)
    huge = low.op("div", low.op("add", small, low.op("sub", small, small)), freedom)
    huge = low.op("div", low.op("div", huge, scale), scale)
    return low.op("select", low.op("eq", total, math.inf), huge, low.op("div", total, freedom))


def _arg(low: Lowering, node: Node, value: str) -> Arg:
    """Return the first place that holds the extreme; a nan counts as the extreme if there is
    one."""
    x, walk = low.cell(node), low.walk(node)
    best = low.reduce("max" if node.op == "argmax" else "min", x)
    cell = low.cell_index(node)
    place = cell[walk.axes[0]] if node.attrs["axis"] is not None and walk.axes else None
    position = low.position(flatten(cell, walk.shape) if place is None else place)
    hit = low.op("eq", x, best)
    if low.kind(x) == "float":
        hit = low.op("or", hit, low.op("ne", x, x))
    return low.reduce("min", low.op("select", hit, position, (1 << 63) - 1))


# ---- norms


def _statistics(low: Lowering, node: Node) -> tuple[Arg, Arg, Arg, Arg]:
    """Return mean, x − mean, Σ (x − mean)² and 1 / √(var + eps) of the row.

    If squares overflow, 1 / √inf would be 0 and the row its bias, which looks like any other
    number. So a centred row becomes nan, as it does with an infinity in it; that costs nothing.
    Without a mean the root comes from scaled squares: if the row holds an infinity, only that
    element becomes nan."""
    centred = node.op != "rms_norm"
    mean: Arg = constant(0.0)
    x = d = low.as_float(low.cell(node))
    if centred:
        mean, d, total = _centred(low, x)
        total = low.op("select", low.op("eq", total, math.inf), math.nan, total)
    else:
        total = low.reduce("sum", low.op("mul", x, x))
    var = low.op("div", total, float(low.columns))
    rstd = low.op("div", 1.0, low.op("sqrt", low.op("add", var, node.attrs["eps"])))
    if not centred:
        small, scale = _scaled_squares(low, x, total)
        root = low.op("sqrt", low.op("div", small, float(low.columns)))
        huge = low.op("mul", low.op("div", 1.0, root), scale)
        rstd = low.op("select", low.op("eq", total, math.inf), huge, rstd)
    return mean, d, total, rstd


def _norm(low: Lowering, node: Node, value: str) -> Arg:
    """With a weight and a bias for each element of the last dimensions, or for each channel."""
    _, d, _, rstd = low.once(_statistics, node)
    cell, dims = low.cell_index(node), node.attrs.get("dims")
    own = cell[1:2] if dims is None else cell[len(cell) - dims :]
    return low.affine(node, 1, low.op("mul", d, rstd), own, ())


def _batch_norm_train(low: Lowering, node: Node, value: str) -> Arg:
    """y, the new running mean and variance (unbiased), and the statistics of this batch."""
    which = node.outputs.index(value)
    if which == 0:
        return _norm(low, node, value)
    mean, _, total, rstd = low.once(_statistics, node)
    if which > 2:
        return mean if which == 3 else rstd
    fresh = mean if which == 1 else low.op("div", total, float(low.columns - 1))
    if not has_input(node, which + 2):
        return fresh
    share, channel = node.attrs["momentum"], (low.cell_index(node)[1],)
    old = low.float_at(low.input(node, which + 2), channel, ())
    return low.op("add", low.op("mul", fresh, share), low.op("mul", old, 1.0 - share))


# ---- softmax and losses


def _soft(low: Lowering, node: Node) -> tuple[Arg, Arg, Arg, Arg]:
    """max, x − max, e^(x − max) and the sum of those."""
    x = low.as_float(low.cell(node))
    top = low.reduce("max", x)
    shifted = low.op("sub", x, top)
    power = low.op("exp", shifted)
    return top, shifted, power, low.reduce("sum", power)


def _softmax(low: Lowering, node: Node, value: str) -> Arg:
    _, shifted, power, total = low.once(_soft, node)
    if node.op == "log_softmax":
        return low.op("sub", shifted, low.op("log", total))
    return low.op("div", power, total)


def _nll(low: Lowering, node: Node, value: str) -> Arg:
    loss, weight = nll_terms(low, node, low.cell_index(node), ())
    total = low.reduce("sum", loss)
    if node.attrs["reduction"] == "sum":
        return total
    return low.op("div", total, low.reduce("sum", weight))


def _cross_entropy(low: Lowering, node: Node, value: str) -> Arg:
    """For a row: Σ q · (lse − x) + z · lse², with lse = max + ln Σ e^(x − max); then lse itself,
    and the gradient of each element, (p · (Σ q + 2 · z · lse) − q) · scale. The shares q are
    those of all classes (``every``) and of the target's own (``own``), times their weights. A
    class that does not exist makes its row nan."""
    e, cell, shape = low.op, low.cell_index(node), low.type(node).shape
    axis, classes = class_axis(shape), shape[class_axis(shape)]
    row, smooth = (*cell[:axis], *cell[axis + 1 :]), node.attrs["label_smoothing"]
    top, _, power, total = low.once(_soft, node)
    log_sum = e("log", total)
    lse = e("add", top, log_sum)

    def weighted(x: Arg, at: Affine) -> Arg:
        weight = low.float_at(low.input(node, 2), (at,), ()) if has_input(node, 2) else None
        return x if weight is None else e("mul", x, weight)

    def number(slot: int) -> Any:
        """An input that is one number, or one for each row; None where it is left out."""
        if not has_input(node, slot):
            return None
        return low.float_at(low.input(node, slot), row if low.type(node, slot).rank else (), ())

    def logit(at: Affine) -> Arg:
        return low.float_at(low.input(node), replaced(cell, axis, at), ())

    every: Any = constant(smooth / classes) if smooth else None
    own = valid = target = None
    if low.type(node, 1).dtype.is_float:
        q = low.float_at(low.input(node, 1), cell, ())
        every = e("add", e("mul", q, 1.0 - smooth), every) if smooth else q
    else:
        target = low.at(low.input(node, 1), row, ())
        valid = e("ne", target, node.attrs["ignore_index"])
        known = e("and", e("ge", target, 0), e("lt", target, classes))
        at = low.dynamic(e("select", known, target, 0), classes, given=False)
        own = e("select", known, weighted(constant(1.0 - smooth), at), math.nan)
    uniform = isinstance(every, Const) and not has_input(node, 2)
    shares: Any = constant(smooth)
    if every is not None and not uniform:
        every, key = weighted(every, cell[axis]), ("shares", node)
        if key not in low.known:
            low.known[key] = low.reduce("sum", every)
        shares = low.known[key]
    z, which = number(4), node.outputs.index(value)
    found: Any = lse
    if which == 0:
        found = None if own is None else e("mul", own, e("sub", log_sum, e("sub", logit(at), top)))
        if every is not None:  # sums of differences from one logit: large ones lose no digits
            ref = logit(Affine())
            ref = e("select", e("eq", e("abs", ref), math.inf), 0.0, ref)
            apart = e("sub", low.as_float(low.cell(node)), ref)
            spread = low.reduce("sum", apart if uniform else e("mul", every, apart))
            rest = e("mul", shares, e("add", e("sub", top, ref), log_sum))
            rest = e("sub", rest, e("mul", spread, every) if uniform else spread)
            found = rest if found is None else e("add", found, rest)
        found = found if z is None else e("add", found, e("mul", z, e("mul", lse, lse)))
    elif which == 2:
        scale, slope = number(3), shares if own is None else e("add", shares, own)
        slope = slope if z is None else e("add", slope, e("mul", e("mul", z, 2.0), lse))
        slope, every, own = (
            x if x is None or scale is None else e("mul", x, scale) for x in (slope, every, own)
        )
        found = e("mul", power, e("div", slope, total))
        found = found if every is None else e("sub", found, every)
        if own is not None:
            hit = e("eq", low.position(cell[axis]), target)
            found = e("sub", found, e("select", hit, own, 0.0))
    result: Arg = found if valid is None else e("select", valid, found, 0.0)
    return result


Rule = Callable[["Lowering", Node, str], Arg]

_trailing = _over(lambda rank, attrs: range(rank - attrs["dims"], rank))

ROWS: dict[str, tuple[Walker, Rule]] = {
    **dict.fromkeys(SUMS, (_over(_named), _plain)),
    "var": (_over(_named), _var),
    **dict.fromkeys(("argmax", "argmin"), (_over(_one_axis), _arg)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (_trailing, _norm)),
    "group_norm": (_groups, _norm),
    "instance_norm": (_over(lambda rank, attrs: range(2, rank)), _norm),
    "batch_norm_train": (_all_but_channels, _batch_norm_train),
    "weighted_pool_dw": (_all_but_channels, weight_grad),
    **dict.fromkeys(("softmax", "log_softmax"), (_over(_one_axis), _softmax)),
    "nll_loss": (_over(lambda rank, attrs: range(rank), 1), _nll),
    **dict.fromkeys(("cross_entropy", "cross_entropy_with_grad"), (_classes, _cross_entropy)),
}


def is_reduction(node: Node) -> bool:
    """Whether a node reduces. A loss that does not join positions only gathers: it is
    elementwise."""
    if node.op == "nll_loss":
        return bool(node.attrs["reduction"] != "none")
    return node.op in ROWS
