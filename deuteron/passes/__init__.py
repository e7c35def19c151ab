"""Passes: graph → graph. This is the whole compiler before regions, from top to bottom:

``PASSES`` run in order, with the checker between them; then :func:`fuse` groups the nodes that are
left into regions. Differentiation is not in the list: it happens on request, before it.
"""

import time

from deuteron.ir.graph import Graph
from deuteron.ir.spec import Right, check
from deuteron.ops import table
from deuteron.passes.attend import join_attention
from deuteron.passes.batch_norm import join_batch_norm_gradients
from deuteron.passes.chains import order_products
from deuteron.passes.cleanup import common_subexpressions, dead_code, fold_constants
from deuteron.passes.collective import in_order, sums_over_ranks
from deuteron.passes.combine import join_cross_entropy, join_products, join_rope
from deuteron.passes.context import Context, Pass, PassRecord
from deuteron.passes.differentiate import differentiate, pullback
from deuteron.passes.expand import expand
from deuteron.passes.fuse import Veto, fuse
from deuteron.passes.gates import gates_into_weights
from deuteron.passes.layout import choose_layout
from deuteron.passes.nan import drop_nan
from deuteron.passes.norms import join_norms
from deuteron.passes.one_dimensional import lines_as_images
from deuteron.passes.overlap import products_beside
from deuteron.passes.padding import into_windows
from deuteron.passes.parallel_convolutions import add_convolutions
from deuteron.passes.piecewise_writes import joined_once
from deuteron.passes.products import before_enlarging, beside_zeros, even_rows, windows_as_rows
from deuteron.passes.saved_results import keep_signs, keep_winners
from deuteron.passes.simplify import algebra, canonicalise, fold_batch_norm
from deuteron.passes.slice_gradients import side_by_side
from deuteron.passes.spellings import as_models_write
from deuteron.passes.widen import widen_short_numbers

PASSES: tuple[Pass, ...] = (
    Pass("nan", drop_nan),  # if the policy says so, nan ends at ReLU, clamp and max pooling
    # for example, a loss and its gradient may each cast the logits
    Pass("written twice", common_subexpressions),
    # compute a loss and its gradient in one read of the logits
    Pass("join cross entropy", join_cross_entropy),
    Pass("join batch norm", join_batch_norm_gradients),  # with the sum and activation that follow
    Pass("widen short numbers", widen_short_numbers),  # 4-bit ints and 8-bit floats to convolve
    # write composite operators in simpler ones where engines price that lower
    Pass("expand", expand),
    Pass("pieces", side_by_side),  # concatenate gradients of slices of one tensor
    Pass("dead code", dead_code),  # later passes should not spend time on unused values
    Pass("equal things once", common_subexpressions),  # before rules count the readers of a value
    Pass("written in pieces", joined_once),  # a buffer that a loop fills is concatenated once
    Pass("canonicalise", canonicalise),  # one form for equal things
    # weights of low rank, and low-rank corrections (LoRA)
    Pass("order of products", order_products),
    Pass("fold constants", fold_constants),  # weights that are only reshaped, masks, tables
    Pass("join attention", join_attention),  # products, masks and softmax, as models write them
    Pass("join norms", join_norms),  # layer and RMS norm, written out by hand
    Pass("padding", into_windows),  # convolutions and pools do the padding of their input
    # those of one image that are added up become one
    Pass("parallel convolutions", add_convolutions),
    Pass("lines as images", lines_as_images),  # 1-D convolutions use what 2-D ones have
    Pass("windows as rows", windows_as_rows),  # a patch embedding is a matrix product
    Pass("spellings", as_models_write),  # reshapes, copies and attention, as models write them
    Pass("join rope", join_rope),  # rotate-half written out, where a kernel takes it whole
    Pass("join products", join_products),  # with one input, such as queries, keys and values
    Pass("even rows", even_rows),  # pad matrices whose rows are misaligned for vector loads
    Pass("fold batch norm", fold_batch_norm),  # into convolution and linear
    Pass("algebra", algebra),  # rules that hold for every number, nan and inf included
    # a 1×1 convolution moves before the resize
    Pass("products before enlarging", before_enlarging),
    Pass("layout", choose_layout),  # nhwc for convolutions, conversions at the edges
    Pass("gates into weights", gates_into_weights),  # squeeze-and-excite at batch size 1
    Pass("fold weights", fold_constants),  # layout conversions of constants
    Pass("expand again", expand),  # operators whose operands changed their memory order
    Pass("sums over ranks", sums_over_ranks),  # sum before all-reduce, and merge small ones
    Pass("products beside them", products_beside),  # in chunks, where that hides the communication
    # bits that relu's gradient reads instead of batch norm's result
    Pass("keep signs", keep_signs),
    # which element of each window won, for a max pool's gradient
    Pass("keep winners", keep_winners),
    Pass("fold constants again", fold_constants),  # constants that the passes above wrote
    Pass("canonicalise again", canonicalise),  # conversions that cancel
    Pass("common subexpressions", common_subexpressions),
    Pass("beside zeros", beside_zeros),  # write a padded matrix only once, with its zeros
    Pass("dead code again", dead_code),
)


def run_passes(
    graph: Graph, ctx: Context, passes: tuple[Pass, ...] = PASSES
) -> tuple[Graph, tuple[PassRecord, ...]]:
    """Run the passes in order; return the final graph and a record of what each pass did."""
    right: Right = {}
    check(graph, table.infer, "import", right)
    ctx.promised = {name: graph.types[value] for name, value in graph.outputs}
    records = []
    for name, run in passes:
        ctx.fired.clear()
        before, begin = len(graph.nodes), time.perf_counter()
        after = run(graph, ctx)
        graph = graph if after is graph else check(after, table.infer, name, right)
        fired = {rule: n for rule, n in ctx.fired.items() if n}
        seconds = time.perf_counter() - begin
        records.append(PassRecord(name, fired, before, len(graph.nodes), seconds))
    return graph, tuple(records)


__all__ = ["PASSES", "Context", "Pass", "PassRecord", "Veto", "differentiate", "fuse", "pullback"]
__all__ += ["in_order", "run_passes"]
