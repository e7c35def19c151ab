"""Gradients of parts of one tensor are put side by side.

A slice returns its gradient with zeros all around, and a loop over time adds as many of those as it
has steps: the work grows with the square of its length. Instead, gradients of parts that do not
overlap are concatenated, and those of the same part are added up first:

    pad(a, before) + pad(b, behind) + pad(c, behind) = concat(b + c, a)
"""

from collections.abc import Sequence
from itertools import pairwise

from deuteron.ir.graph import Node
from deuteron.ir.rewrite import Rewriter, Rule
from deuteron.passes.context import by_rules

Span = tuple[int, int, int]  # the axis, where a part begins along it, and where it ends


def _side_by_side(rw: Rewriter, node: Node) -> Sequence[str] | None:
    """Rewrite a tree of sums at its root. Every element is the sum of the same numbers, zeros left
    out; what is not padded with zeros is added last."""
    result, readers = rw.old.types[node.output], rw.old.users.get(node.output, ())
    if len(readers) == 1 and readers[0].op == "add" and node.output not in rw.old.output_values:
        return None
    spans: dict[Span, list[str]] = {}
    others: list[str] = []
    left = [*reversed(node.uses)]
    while left:
        value = left.pop()
        kind, made = rw.build.types[value], rw.made_by(value, "add", "pad")
        alone = rw.only_use(value) and (kind.shape, kind.dtype) == (result.shape, result.dtype)
        span = _span(rw, made) if made is not None and made.op == "pad" and alone else None
        if made is not None and made.op == "add" and alone:
            left += reversed(made.uses)
        elif made is not None and span is not None:
            spans.setdefault(span, []).append(made.uses[0])
        else:
            others.append(value)
    ordered = sorted(spans)
    apart = all(a[0] == b[0] and a[2] <= b[1] for a, b in pairwise(ordered))
    if sum(map(len, spans.values())) < 2 or not apart:
        return None
    axis, end, parts = ordered[0][0], 0, list[str]()
    for span in ordered:
        total, *more = spans[span]
        for value in more:
            total = rw.emit("add", [total, value])
        behind = result.shape[axis] - span[2] if span is ordered[-1] else 0
        parts.append(_with_zeros(rw, total, axis, span[1] - end, behind))
        end = span[2]
    whole = parts[0] if len(parts) == 1 else rw.emit("concat", parts, {"axis": axis})
    for value in others:
        whole = rw.emit("add", [whole, value])
    return [whole]


def _span(rw: Rewriter, pad: Node) -> Span | None:
    """Where a part lies along an axis, if it is padded with zeros along that axis alone; else
    None."""
    low, high = pad.attrs["low"], pad.attrs["high"]
    axes = [i for i, edges in enumerate(zip(low, high, strict=True)) if any(edges)]
    if len(axes) != 1 or pad.attrs["mode"] != "constant" or pad.attrs["value"] != 0:
        return None
    (axis,) = axes
    size = rw.build.types[pad.uses[0]].shape[axis]
    return (axis, low[axis], low[axis] + size) if min(low[axis], high[axis]) >= 0 else None


def _with_zeros(rw: Rewriter, value: str, axis: int, before: int, behind: int) -> str:
    if not before and not behind:
        return value
    rank = rw.build.types[value].rank
    low, high = ([n if i == axis else 0 for i in range(rank)] for n in (before, behind))
    attrs: dict[str, object] = {"low": tuple(low), "high": tuple(high), "mode": "constant"}
    return rw.emit("pad", [value], attrs | {"value": 0.0})


side_by_side = by_rules([Rule("gradients of parts", ("add",), _side_by_side)])
