"""Cross-entropy of long rows with its gradient: the recipe around
``kernels/triton/cross_entropy.py``.

Generated code makes the same passes. Short rows and images are left to it, because it knows their
sizes when it is compiled, and so are targets that are probabilities. For rows of many classes this
kernel takes fewer instructions, loads the next row while it writes this one, writes a row
backwards, starting with what L2 still holds, and reads rows that start anywhere in whole 16 bytes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import modelled_seconds
from deuteron.engines.match import places_of
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton.common import MOST, taken_by
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.cross_entropy import class_axis
from deuteron.policy import Policy
from deuteron.target import Target

OPS = ("cross_entropy", "cross_entropy_with_grad")
LONG = 4096  # with more classes than this, a row is worth a program of its own
LONGEST = 32768  # with more than this, it is worth all warps that a program can have
REACHED = 0.94  # part of the bandwidth of a copy, as measured on an H200


class Work(NamedTuple):
    """A region as one call. ``given``: the names of logits, target, weight, scale and z; ``made``:
    those of loss, lse and gradient; None for inputs that are absent and results that nothing reads.
    ``steps``: the row strides of logits and gradient."""

    given: tuple[str | None, ...]
    made: tuple[str | None, ...]
    attrs: Mapping[str, Any]
    rows: int
    classes: int
    width: int  # length of a row of the gradient, which may be padded with zeros
    steps: tuple[int, int]
    alike: bool  # whether logits and gradient have the same type and row stride

    @property
    def aligned(self) -> bool:
        """Whether all rows start at multiples of 16."""
        return all(n % 16 == 0 for n in self.steps)


def row_step(t: TensorType) -> int | None:
    """The stride from one row of logits [C], [N, C] or [N, C, d1, …] to the next; None if the
    classes of a row are not adjacent, or if rows are at different distances."""
    axis = class_axis(t.shape)
    dims = [d for d in range(t.rank) if d != axis and t.shape[d] > 1]
    apart = any(t.strides[a] != t.shape[b] * t.strides[b] for a, b in pairwise(dims))
    if t.strides[axis] != 1 or apart:
        return None
    return t.strides[dims[-1]] if dims else 0


@lru_cache(maxsize=1024)
def work_of(region: Region) -> Work:
    """The region as a call; refuses any other. The region may cast logits to f32 before, and
    results to other types after it: the kernel reads and writes the types in memory. It may also
    pad each row of the gradient with zeros at its end."""
    nodes = [n for n in region.nodes if n.op in OPS]
    casts = [n for n in region.nodes if n.op == "cast"]
    pads = [n for n in region.nodes if n.op == "pad"]
    more = len(nodes) != 1 or len(casts) + len(pads) + 1 < len(region.nodes)
    refuse_if(more, f"runs {' or '.join(OPS)} alone, or with casts and a gradient that is padded")
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
            refuse_if(True, "a cast is neither of the logits to f32 nor of a result")
    for pad in pads:
        ends = [n for d, n in enumerate(pad.attrs["high"]) if d != class_axis(pad.attrs["high"])]
        plain = pad.attrs["mode"] == "constant" and pad.attrs["value"] == 0
        refuse_if(not plain or any((*pad.attrs["low"], *ends)), "a row is padded with other things")
        apart = len(node.outputs) < 3 or pad.uses[0] != node.outputs[2] or made[2] is not None
        refuse_if(apart, "a pad is not of the gradient alone")
        made[2] = pad.output
    outside = {None, *region.inputs, *region.graph.constants}
    refuse_if(not outside.issuperset(given), "an operand is computed in the region")
    x, wanted, *others = (None if v is None else types[v] for v in given)
    assert x is not None and wanted is not None
    classes = x.shape[class_axis(x.shape)]
    joins = node.attrs.get("reduction", "none") != "none"
    refuse_if(joins, "joins positions, which takes a second kernel", "use reduction='none'")
    short = classes <= LONG or x.numel == 0 or x.dtype.short == "f64"
    refuse_if(short, f"is for more than {LONG} classes, and not for float64")
    odd = wanted.dtype.is_float or (node.attrs["label_smoothing"] and given[2] is not None)
    refuse_if(odd, "is for classes, and not for weights with label_smoothing")
    rows = x.numel // classes
    refuse_if(rows > MOST, "there are more than 2³¹ rows", "split the batch")
    grad = x if made[2] is None else types[made[2]]
    steps: Any = (row_step(x), row_step(grad))
    vectors = [t for t in (wanted, *others) if t is not None]
    contiguous = all(t.is_layout("contiguous") or not any(t.strides) for t in vectors)
    apart = None in steps or not contiguous
    refuse_if(apart, "the classes of a row, or the rows, are not at equal steps", "to_layout(x)")
    width = grad.shape[class_axis(grad.shape)]
    alike = x.dtype == grad.dtype and steps[0] == steps[1]
    sizes = rows, classes, width, steps
    return Work(tuple(given), tuple(made), node.attrs, *sizes, alike)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    """Numbers per lane, lanes and warps. With 32 warps a thread has 64 registers, which is enough
    for rows that start at multiples of 16."""
    work = work_of(region)
    deep, lanes, warps = (4 if work.aligned else 2), 2048, 8
    if work.classes > LONGEST:
        deep = 2 if work.attrs["label_smoothing"] else 4
        lanes, warps = (8192, 32) if work.aligned else (4096, 16)
    programs = work.rows if warps < 32 else min(work.rows, target.units)
    return [{"deep": deep, "lanes": lanes, "warps": warps, "programs": programs}]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    kind = region.graph.types[work_of(region).given[0] or ""].dtype.short
    return modelled_seconds(region_cost(region), kind, REACHED, False, target)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.cross_entropy import ONE_ROW, Given, Terms

    work, types, constants = work_of(region), region.graph.types, region.graph.constants
    programs, warps = knobs["programs"], knobs["warps"]
    ignore, smoothing = work.attrs["ignore_index"], float(work.attrs["label_smoothing"])
    each = int(work.given[3] is not None and any(types[work.given[3]].strides))
    sizes = work.classes, work.width
    terms = Terms(*sizes, ignore, smoothing, work.rows, *work.steps, each)
    fixed = {"R": knobs["deep"], "W": knobs["lanes"], "EVEN": smoothing != 0.0}
    fixed["AHEAD"] = warps == 32 and programs < work.rows
    # rows that start anywhere are read in 16 bytes if logits and gradient start alike
    shifts = not work.aligned and work.alike
    fixed["RAGGED"] = work.aligned and work.classes % 16 > 0
    held = {v: constants[v].data for v in work.given if v is not None and v in constants}
    numbers = {v: torch.tensor([float(t)], device=ctx.device) for v, t in held.items()}
    values = (*region.inputs, *region.outputs)
    order = [values.index(v) if v in values else v for v in (*work.given, *work.made)]

    def run(*tensors: torch.Tensor) -> None:
        given = Given(*(tensors[p] if isinstance(p, int) else numbers.get(p or "") for p in order))
        apart = 0 if given.grad is None else given.x.data_ptr() ^ given.grad.data_ptr()
        shifted = shifts and not apart & 15
        ONE_ROW((programs,), given, terms, warps=warps, SHIFTED=shifted, **fixed)

    grad = work.made[2] if work.alike else None  # the program that writes a row has read it before
    over = () if grad is None else places_of([(grad, work.given[0] or "")], region)
    return Kernel(run, writes=True, over=over)


CROSS_ENTROPY = Recipe("cross_entropy", OPS, taken_by(work_of), _build, _knobs, _seconds, 0.8)
