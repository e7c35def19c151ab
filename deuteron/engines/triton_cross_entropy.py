"""Cross-entropy of long rows with its gradient: the recipe around
``kernels/triton/cross_entropy.py``.

Generated code makes the same passes, and has short rows and images for itself: it knows their sizes
when it is compiled. For rows of many classes this kernel takes fewer instructions, asks for the
next row while it writes this one, writes a row backwards, from what L2 still holds, and reads rows
that start anywhere in whole 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.cross_entropy import class_axis
from deuteron.policy import Policy
from deuteron.target import Target

OPS = ("cross_entropy", "cross_entropy_with_grad")
LONG = 4096  # classes, from where a row is worth a program of its own
LONGEST = 32768  # and from where it is worth all the warps there are
ROWS_LIMIT = 2**31 - 2**20  # rows are counted in 32 bits, with room for the last step
REACHED = 0.94  # of the bandwidth of a copy, as measured on an H200


class Layout(NamedTuple):
    """Where the rows of a tensor are: groups of ``inner`` rows, and the steps between groups and
    between rows."""

    inner: int
    by_group: int
    by_row: int


class Work(NamedTuple):
    """A region as one call. ``given``: the values that are logits, target, weight, scale and z;
    ``made``: those that are loss, lse and gradient; None for what there is not, or nobody reads.
    ``shares``: those of classes besides a target's own, "none", "even" or "each" its own."""

    given: tuple[str | None, ...]
    made: tuple[str | None, ...]
    attrs: Mapping[str, Any]
    rows: int
    classes: int
    where: tuple[Layout, Layout, Layout]  # the rows of logits, gradient and probabilities
    probs: bool
    shares: str
    aligned: bool  # whether all rows start at multiples of 16
    in_place: bool  # whether the gradient has the type of the logits, strides and all


def layout(t: TensorType) -> Layout | None:
    """The rows of logits [C], [N, C] or [N, C, d1, …] whose classes lie side by side, or None
    where one step for the trailing dimensions does not exist."""
    axis = class_axis(t.shape)
    if t.strides[axis] != 1:
        return None
    tail = [(n, s) for n, s in zip(t.shape[2:], t.strides[2:], strict=True) if n != 1]
    if any(before != n * s for (_, before), (n, s) in pairwise(tail)):
        return None
    first = t.strides[0] if axis else 0
    if not tail:
        return Layout(t.numel // t.shape[axis], 0, first)
    return Layout(math.prod(t.shape[2:]), first, tail[-1][1])


@lru_cache(maxsize=1024)
def work_of(region: Region) -> Work | Refusal:
    """The region as a call. Logits that are widened before and results that are narrowed after it
    are read and written in the type that they have in memory."""
    nodes = [n for n in region.nodes if n.op in OPS]
    casts = [n for n in region.nodes if n.op == "cast"]
    if len(nodes) != 1 or len(casts) + 1 < len(region.nodes):
        return Refusal(f"runs {' or '.join(OPS)} alone, or with casts")
    node, types = nodes[0], region.graph.types
    given = [*node.inputs, *[None] * 5][:5]
    made = [v if v in region.outputs else None for v in (*node.outputs, None, None)[:3]]
    for cast in casts:
        source, wide = cast.uses[0], types[cast.output].dtype.short == "f32"
        if cast.output == given[0] and types[source].dtype.is_low and wide:
            given[0] = source
        elif source in node.outputs and made[node.outputs.index(source)] is None:
            made[node.outputs.index(source)] = cast.output
        else:
            return Refusal("a cast is neither of the logits to f32 nor of a result")
    if any(v is not None and v not in (*region.inputs, *region.graph.constants) for v in given):
        return Refusal("an operand is computed in the region")
    x, wanted, *others = (None if v is None else types[v] for v in given)
    assert x is not None and wanted is not None
    classes = x.shape[class_axis(x.shape)]
    if node.attrs.get("reduction", "none") != "none":
        return Refusal("joins positions, which takes a second kernel", "use reduction='none'")
    if classes <= LONG or x.numel == 0 or x.dtype.short == "f64":
        return Refusal(f"is for more than {LONG} classes, and not for float64")
    if x.numel // classes > ROWS_LIMIT:
        return Refusal("there are more than 2³¹ rows", "split the batch")
    grad, probs = x if made[2] is None else types[made[2]], wanted.dtype.is_float
    where = [layout(t) for t in (x, grad, wanted if probs else x)]
    vectors = [t for t in (*others, None if probs else wanted) if t is not None]
    contiguous = all(t.is_layout("contiguous") or not any(t.strides) for t in vectors)
    if None in where or not contiguous:
        return Refusal("the classes of a row, or the rows, are not at equal steps", "to_layout(x)")
    smooth, weighted = node.attrs["label_smoothing"] != 0.0, given[2] is not None
    shares = "each" if probs or (smooth and weighted) else "even" if smooth else "none"
    rows: Any = tuple(where)
    steps = (classes, *rows[0][1:], *rows[1][1:])
    return Work(
        tuple(given),
        tuple(made),
        node.attrs,
        x.numel // classes,
        classes,
        rows,
        probs,
        shares,
        all(n % 16 == 0 for n in steps),
        grad == x,
    )


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    found = refuse_anywhere(target) or work_of(region)
    return found if isinstance(found, Refusal) else None


def _accepted(region: Region) -> Work:
    work = work_of(region)
    assert isinstance(work, Work)
    return work


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    """Numbers to a lane, lanes and warps. With 32 warps a thread has 64 registers, which is enough
    for rows that start at multiples of 16 and whose shares are not read."""
    work = _accepted(region)
    plain = work.aligned and work.shares != "each"
    deep, lanes, warps = (4 if plain else 2), 2048, 8
    if work.classes > LONGEST:
        deep = 4 if work.shares == "none" else 2
        lanes, warps = (8192, 32) if plain else (4096, 16)
    programs = work.rows if warps < 32 else min(work.rows, target.units)
    return [{"deep": deep, "lanes": lanes, "warps": warps, "programs": programs}]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    kind = region.graph.types[_accepted(region).given[0] or ""].dtype.short
    return modelled_seconds(region_cost(region), kind, REACHED, False, target)


@cache
def _kernel() -> Any:
    from deuteron.kernels.triton.cross_entropy import one_row
    from deuteron.kernels.triton.launch import Launchable

    return Launchable(one_row)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.cross_entropy import Given, Places, Rows, Terms

    work, types, constants = _accepted(region), region.graph.types, region.graph.constants
    kernel, programs, warps, attrs = _kernel(), knobs["programs"], knobs["warps"], work.attrs
    rows = Rows(work.rows, work.where[0].inner, *(Places(*at[1:]) for at in work.where))
    scale = work.given[3]
    per_row = int(scale is not None and any(types[scale].strides))
    terms = Terms(work.classes, attrs["ignore_index"], float(attrs["label_smoothing"]), per_row)
    fixed = {"R": knobs["deep"], "W": knobs["lanes"], "PROBS": work.probs, "SHARES": work.shares}
    fixed["AHEAD"] = programs < work.rows
    # rows that start anywhere are read in 16 bytes if logits and gradient start alike
    shifts = not work.aligned and work.in_place
    held = {v: constants[v].data for v in work.given if v is not None and v in constants}
    numbers = {v: torch.tensor([float(t)], device=ctx.device) for v, t in held.items()}
    values = (*region.inputs, *region.outputs)
    order = [values.index(v) if v in values else v for v in (*work.given, *work.made)]

    def run(*tensors: torch.Tensor) -> None:
        given = Given(*(tensors[p] if isinstance(p, int) else numbers.get(p or "") for p in order))
        apart = 0 if given.grad is None else given.x.data_ptr() ^ given.grad.data_ptr()
        shifted = shifts and not apart & 15
        kernel((programs,), given, rows, terms, warps=warps, SHIFTED=shifted, **fixed)

    over: tuple[tuple[int, int], ...] = ()
    if work.made[2] is not None and work.in_place:
        over = ((region.outputs.index(work.made[2]), region.inputs.index(work.given[0] or "")),)
    return Kernel(run, writes=True, over=over)


CROSS_ENTROPY = Recipe("cross_entropy", _refuse, _build, _knobs, _seconds, build_s=0.8)
