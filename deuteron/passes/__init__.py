"""Graph → graph. The whole compiler before regions, top to bottom:

``PASSES`` runs in order, the checker between each; then :func:`fuse` groups what is left.
Differentiation is not in the list: it happens on request, before it.
"""

import time

from deuteron.ir.graph import Graph
from deuteron.ir.spec import Right, check
from deuteron.ops import table
from deuteron.passes.attend import join_attention
from deuteron.passes.batch_norm import join_batch_norm_gradients
from deuteron.passes.beside import products_beside
from deuteron.passes.chains import order_products
from deuteron.passes.cleanup import common_subexpressions, dead_code, fold_constants
from deuteron.passes.collective import in_order, sums_over_ranks
from deuteron.passes.context import Context, Pass, PassRecord
from deuteron.passes.differentiate import differentiate, pullback
from deuteron.passes.expand import expand
from deuteron.passes.fuse import Veto, fuse
from deuteron.passes.gates import gates_into_weights
from deuteron.passes.join import join_cross_entropy, join_products, join_rope
from deuteron.passes.keep import keep_signs, keep_winners
from deuteron.passes.layout import choose_layout
from deuteron.passes.lines import lines_as_images
from deuteron.passes.nan import drop_nan
from deuteron.passes.norms import join_norms
from deuteron.passes.padding import into_windows
from deuteron.passes.parallel_convolutions import add_convolutions
from deuteron.passes.pieces import side_by_side
from deuteron.passes.products import before_enlarging, beside_zeros, even_rows, windows_as_rows
from deuteron.passes.simplify import algebra, canonicalise, fold_batch_norm
from deuteron.passes.spellings import as_models_write
from deuteron.passes.widen import widen_short_numbers
from deuteron.passes.written import joined_once

PASSES: tuple[Pass, ...] = (
    Pass("nan", drop_nan),  # if the policy says that nan ends at ReLU, clamp and max pooling
    Pass("written twice", common_subexpressions),  # a loss and its gradient may each widen logits
    Pass("join cross entropy", join_cross_entropy),  # a loss with its gradient, one read of logits
    Pass("join batch norm", join_batch_norm_gradients),  # and its gradient, with what follows
    Pass("widen short numbers", widen_short_numbers),  # that no machine, or not this one, convolves
    Pass("expand", expand),  # operators that stand for several, where no kernel takes them whole
    Pass("pieces", side_by_side),  # gradients of what was cut out of one tensor
    Pass("dead code", dead_code),  # nothing below should spend time on what nobody reads
    Pass("equal things once", common_subexpressions),  # before rules count who reads a value
    Pass("written in pieces", joined_once),  # as loops fill a buffer: it is joined once
    Pass("canonicalise", canonicalise),  # one form for equal things
    Pass("order of products", order_products),  # weights of low rank, and corrections of them
    Pass("fold constants", fold_constants),  # weights that are only reshaped, masks, tables
    Pass("join attention", join_attention),  # products, softmax and masks, as models write them
    Pass("join norms", join_norms),  # layer and RMS norm, likewise
    Pass("padding", into_windows),  # zeros around an image that its readers can do without
    Pass("parallel convolutions", add_convolutions),  # of one image, added up
    Pass("lines as images", lines_as_images),  # 1-D convolutions get what 2-D ones have
    Pass("windows as rows", windows_as_rows),  # a patch embedding is a product
    Pass("spellings", as_models_write),  # movement, copies and attention as models write them
    Pass("join rope", join_rope),  # rotate-half, as models write it, where a kernel takes it whole
    Pass("join products", join_products),  # of one input: queries, keys and values
    Pass("even rows", even_rows),  # zeros beside matrices that are read number by number otherwise
    Pass("fold batch norm", fold_batch_norm),  # into convolution and linear
    Pass("algebra", algebra),  # rules that keep every number
    Pass("products before enlarging", before_enlarging),  # the head of a segmentation network
    Pass("layout", choose_layout),  # nhwc for convolutions, conversions at the edges
    Pass("gates into weights", gates_into_weights),  # squeeze-and-excite of one image
    Pass("fold weights", fold_constants),  # conversions of what is known
    Pass("expand again", expand),  # what the layout took out of row-major order
    Pass("sums over ranks", sums_over_ranks),  # of sums, and small ones at once
    Pass("products beside them", products_beside),  # in chunks, where that hides what is sent
    Pass("keep signs", keep_signs),  # of batch norm's result, for the gradient on a GPU
    Pass("keep winners", keep_winners),  # of a max pool's windows, likewise
    Pass("fold constants again", fold_constants),  # what was written out of them
    Pass("canonicalise again", canonicalise),  # conversions that cancel
    Pass("common subexpressions", common_subexpressions),
    Pass("beside zeros", beside_zeros),  # what is padded is not written without its zeros as well
    Pass("dead code again", dead_code),
)


def run_passes(
    graph: Graph, ctx: Context, passes: tuple[Pass, ...] = PASSES
) -> tuple[Graph, tuple[PassRecord, ...]]:
    """The graph after every pass, and what each of them did."""
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
