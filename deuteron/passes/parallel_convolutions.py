"""Convolutions of one image whose results are added up become one convolution:

    conv(x, w₁) + s · (conv(x, w₂) + b₂) + x  =  conv(x, w₁ + s·w₂ + 1, s·b₂)

RepVGG, MobileOne, RepViT and FastViT train with several such branches and leave it to whoever
deploys them to add these up. A branch is a convolution with a constant weight, or the image itself;
between the branches and the sum there may be factors and offsets for each channel, and batch norms
with constant statistics. The windows of all branches must lie within the largest one, so that the
one convolution multiplies no more than the largest did alone. Weights are added up in float64 and
rounded once. In 16 bits the image itself is not accepted as a branch: among the small numbers of a
weight, a factor of about 1 for one pixel would be rounded far more coarsely than the pixel that is
added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.ir.graph import Graph, Node
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym
from deuteron.ops.conv import sides
from deuteron.passes.cleanup import dead_code
from deuteron.passes.context import Context, replaced
from deuteron.passes.simplify import factors

ONE = torch.ones((), dtype=torch.float64)


class _Taps(NamedTuple):
    """A window along one dimension: where its first tap lies relative to the pixel that the window
    is for, how many taps there are and how far apart."""

    first: int = 0
    taps: int = 1
    apart: int = 1

    def place(self, small: _Taps) -> int | None:
        """At which tap of this window another one begins; None if it does not lie within."""
        at, between = divmod(small.first - self.first, self.apart)
        fits = small.taps == 1 or small.apart == self.apart
        return at if fits and not between and 0 <= at <= self.taps - small.taps else None


@dataclass(frozen=True)
class _Branch:
    """A convolution by ``weight``, times ``scale`` for each channel or for all. Without a weight it
    is the image itself."""

    scale: Tensor
    window: tuple[_Taps, ...]
    weight: Tensor | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def places(self, small: _Branch) -> tuple[int, ...] | None:
        """The taps at which the window of another branch begins; None if it cannot be added to this
        one."""
        if small.weight is None:
            same = set(self.attrs.get("stride", (1,))) == {1}
        else:
            same = all(small.attrs[name] == self.attrs.get(name) for name in ("stride", "groups"))
        at = [a.place(b) for a, b in zip(self.window, small.window, strict=True)]
        return tuple(t for t in at if t is not None) if same and None not in at else None


@dataclass(frozen=True)
class _Sum:
    """A value as a function of one image: the sum of branches, the first of which has room for all,
    plus a number for each channel. ``within``: intermediate values, which nothing else reads."""

    branches: tuple[_Branch, ...]
    shift: Tensor | float = 0.0
    within: frozenset[str] = frozenset()

    def moved(self, scale: Tensor | float, shift: Tensor | float = 0.0) -> _Sum:
        scaled = tuple(replace(b, scale=b.scale * scale) for b in self.branches)
        return replace(self, branches=scaled, shift=self.shift * scale + shift)

    def plus(self, other: _Sum) -> _Sum | None:
        """The sum of both, if one branch has room for all."""
        shift, within = self.shift + other.shift, self.within | other.within
        for one, two in ((self, other), (other, self)):
            if all(one.branches[0].places(b) is not None for b in two.branches):
                return _Sum(one.branches + two.branches, shift, within)
        return None


def add_convolutions(graph: Graph, ctx: Context) -> Graph:
    """``graph`` in which convolutions of one image that are added up are one convolution."""
    # value → image → the value as a sum of branches of that image
    found: dict[str, dict[str, _Sum]] = {}
    for node in graph.nodes:
        if node.op in ("conv", "batch_norm", "add", "sub", "mul"):
            found[node.output] = _made(graph, node, found)
    chosen: dict[str, tuple[str, _Branch, Tensor]] = {}
    inside: set[str] = set()
    for value in reversed(found):
        sums = {image: s for image, s in found[value].items() if len(s.branches) > 1}
        if value in inside or not sums:
            continue
        image, most = max(sums.items(), key=lambda item: len(item[1].branches))
        added = _added(most, graph.types[value])
        if added is not None:
            chosen[value] = image, *added
            inside |= most.within
    ctx.fired["convolutions of one image added up"] += len(chosen)
    return dead_code(replaced(graph, chosen, _written)) if chosen else graph


def _made(graph: Graph, node: Node, found: Mapping[str, Mapping[str, _Sum]]) -> dict[str, _Sum]:
    """Return a node's result as a sum of branches, for each image that its operands are made of."""
    out, (x, *others) = graph.types[node.output], node.uses
    if not out.dtype.is_float or out.rank < 3:
        return {}
    if node.op == "conv":
        convolution = _convolution(graph, node)
        return {} if convolution is None else {x: convolution}

    def of(value: str) -> dict[str, _Sum]:
        """An operand as itself, and as sums of branches of other images if nothing else reads
        it."""
        if graph.types[value].shape != out.shape or graph.types[value].dtype != out.dtype:
            return {}
        sums = dict[str, _Sum]()
        if not out.dtype.is_low:
            sums[value] = _Sum((_Branch(ONE, (_Taps(),) * (out.rank - 2)),))
        if len(graph.users.get(value, ())) == 1 and value not in graph.output_values:
            inner = found.get(value, {}).items()
            sums |= {image: replace(s, within=s.within | {value}) for image, s in inner}
        return sums

    if node.op == "batch_norm":
        known = factors(node, graph.constants)
        return {} if known is None else {i: s.moved(*known) for i, s in of(x).items()}
    (y,) = others
    sign = -1.0 if node.op == "sub" else 1.0
    for number, value, scale in (
        (_each_channel(graph, y, out), x, 1.0),
        (_each_channel(graph, x, out), y, sign),
    ):
        if number is not None and node.op == "mul":
            return {i: s.moved(number) for i, s in of(value).items()}
        if number is not None:
            shift = number * sign if value == x else number
            return {i: s.moved(scale, shift) for i, s in of(value).items()}
    if node.op == "mul" or x == y:
        return {}
    left, right = of(x), of(y)
    sums = {i: left[i].plus(right[i].moved(sign)) for i in left if i in right}
    return {i: s for i, s in sums.items() if s is not None}


def _convolution(graph: Graph, node: Node) -> _Sum | None:
    """A convolution whose weight and bias are constants, in one element type; else None."""
    _, weight, *bias = node.uses
    kinds = {graph.types[v].dtype for v in (*node.uses, node.output)}
    if node.attrs["transposed"] or len(kinds) > 1:
        return None
    if not all(v in graph.constants for v in (weight, *bias)):
        return None
    data, dims = graph.constants[weight].data, len(node.attrs["stride"])
    before, _ = sides(node.attrs["padding"], dims)
    window = tuple(
        _Taps(-first, count, apart if count > 1 else 1)
        for first, count, apart in zip(before, data.shape[2:], node.attrs["dilation"], strict=True)
    )
    shift = graph.constants[bias[0]].data.double() if bias else 0.0
    return _Sum((_Branch(ONE, window, data, node.attrs),), shift)


def _each_channel(graph: Graph, value: str, out: TensorType) -> Tensor | None:
    """A constant as one number for each channel of a result, or one for all of it; else None."""
    if value not in graph.constants:
        return None
    data = graph.constants[value].data.double()
    if data.numel() == 1:
        return data.reshape(())
    shape = (1,) * (out.rank - data.ndim) + tuple(data.shape)
    return data.reshape(-1) if data.numel() == out.shape[1] == shape[1] else None


def _added(s: _Sum, out: TensorType) -> tuple[_Branch, Tensor] | None:
    """Return the one convolution and its bias; None if no branch has a weight, or if they
    overflow."""
    largest, channels = s.branches[0], out.shape[1]
    if largest.weight is None:
        return None
    total = torch.zeros(largest.weight.shape, dtype=torch.float64, device=largest.weight.device)
    each = total.shape[1]  # channels of the image that a channel of the result sees
    for branch in s.branches:
        weight, places = branch.weight, largest.places(branch)
        assert places is not None
        if weight is None:  # channel c of the result is channel c of the image
            weight = torch.eye(each, dtype=torch.float64, device=total.device)
            weight = weight.repeat(channels // each, 1).reshape(channels, each, *[1] * len(places))
        window = tuple(slice(p, p + n) for p, n in zip(places, weight.shape[2:], strict=True))
        scale = branch.scale.to(total.device).expand(channels)
        total[:, :, *window] += weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    bias = torch.as_tensor(s.shift, dtype=torch.float64, device=total.device).expand(channels)
    weight, bias = (t.to(out.dtype.torch) for t in (total, bias))
    if not all(t.is_meta or bool(t.isfinite().all()) for t in (weight, bias)):
        return None
    return replace(largest, weight=weight), bias


def _written(b: Ops, made: tuple[str, _Branch, Tensor], names: dict[str, str]) -> Sym:
    image, branch, bias = made
    assert branch.weight is not None
    weight, shift = b.constant(branch.weight, "weight_sum"), b.constant(bias, "bias_sum")
    return b.one("conv", b.sym(names[image]), weight, shift, **branch.attrs)
