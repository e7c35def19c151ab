"""Rows added to a table by index: the recipe around ``kernels/triton/embedding_grad.py``."""

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import MOST as MOST_ROWS
from deuteron.engines.triton.common import one_operator, tensors_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

READS = ("f32", "f16", "bf16")
MOST = 2**17  # most entries: all are compared with each other
COMPARED = 3  # instructions of a thread to compare two entries
LANES, CLOCK = 128, 1.7e9  # instructions of a multiprocessor per cycle, and cycles per second
REACHED = 0.5  # part of the bandwidth of a copy, a guess until it is measured on a GPU


def _refuse(region: Region, node: Node, target: Target) -> None:
    types = region.graph.types
    grad, index = (types[v] for v in node.uses[:2])
    kind = grad.dtype.short
    refuse_if(kind not in READS, f"does not add up {kind}", "cast it to f32 first")
    refuse_if(index.numel > MOST, f"{index.numel} entries are too many", f"at most {MOST}")
    rows = node.attrs["rows"]
    refuse_if(rows > MOST_ROWS, "has more rows than 32 bits count", "split the table")
    apart = not all(types[v].is_layout("contiguous") for v in (*node.uses, node.output))
    refuse_if(apart, "an operand is not row-major", "to_layout(x, 'contiguous') first")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    node, types = region.nodes[0], region.graph.types
    grad, index, table = types[node.uses[0]], types[node.uses[1]], types[node.output]
    compared = COMPARED * index.numel**2 / (target.units * LANES * CLOCK)
    moved = grad.nbytes + 2 * min(grad.nbytes, table.nbytes)
    # zeros are written first; the third input is assumed to be overwritten in place
    begun = 0 if len(node.uses) > 2 else table.nbytes
    launches = 3 + (len(node.uses) == 2)
    streamed = (moved / REACHED + begun) / target.stream
    return float(compared + streamed + launches * target.launch)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.embedding_grad import Size, add_rows

    node, types = region.nodes[0], region.graph.types
    wide = types[node.output].shape[1]
    entries, rows = types[node.uses[1]].numel, node.attrs["rows"]
    run, room = add_rows(Size(entries, wide, rows, node.attrs["padding_idx"]))
    onto = node.uses[2] if len(node.uses) > 2 else None
    given = tensors_of(region, (*node.uses[:2], onto, node.output))
    # the result may not overwrite grad, whose rows are read while others are written
    over = () if onto in (None, node.uses[0]) else ((0, region.inputs.index(onto)),)
    note = f"{3 + (onto is None)} kernels"
    return Kernel(lambda *ts: run(*given(ts)), writes=True, workspace=room, note=note, over=over)


EMBEDDING_GRAD = one_operator(
    "embedding_grad", ("embedding_grad",), _refuse, None, _seconds, _build, 1.0
)
