"""Products that are cheaper in another form.

**Matrices of 16-bit numbers whose rows do not begin at multiples of 16 bytes**, such as the logits
of a vocabulary of 50,257 words, are read number by number on a GPU. So they are padded with zeros,
and the additional results are cut off; a weight that is cast just before gets its zeros in the same
step.

**Windows that do not overlap**, as in the patch embedding of a transformer, are the rows of a
matrix: the pixels are reordered window by window once, and a plain matrix product does the rest.

**A 1×1 convolution over a concatenation of enlarged images** mixes the channels of every pixel, and
enlarging mixes the pixels of every channel: in either order the result is the same but for
rounding. So each part is multiplied while it is small, and the products are enlarged and added up;
nothing is concatenated.
"""

from collections.abc import Sequence

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule, carry, finish, start
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.passes.cleanup import dead_code
from deuteron.passes.context import Context, by_rules, replaced

# ---- windows that do not overlap


def windows_as_rows(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with convolutions over windows that do not overlap as products, where those are
    cheaper."""
    chosen = {node.output: node for node in graph.nodes if _rows_win(graph, node, ctx)}

    def make(b: Ops, node: Node, names: dict[str, str]) -> Sym:
        x, weight, *bias = (b.sym(names[v]) for v in node.uses)
        return _product(b, x, weight, bias)

    ctx.fired["windows as rows"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph


def _rows_win(graph: Graph, node: Node, ctx: Context) -> bool:
    if node.op != "conv" or ctx.price is None or ctx.policy.layout == "keep":
        return False
    a, (x, weight) = node.attrs, (graph.types[v] for v in node.uses[:2])
    window = weight.shape[2:]
    apart = tuple(a["stride"]) == window and not any(a["padding"]) and set(a["dilation"]) == {1}
    plain = x.rank == 4 and a["groups"] == 1 and not a["transposed"] and x.numel > 0
    known = node.uses[1] in graph.constants and x.layout in ("contiguous", "nhwc")
    folds = any(reader.op == "batch_norm" for reader in graph.users.get(node.output, ()))
    if not (apart and plain and known) or folds or set(window) == {1}:
        return False
    kinds = tuple(graph.types[v] for v in node.uses)
    key = ("windows as rows", kinds, node.attrs)
    if key not in ctx.forms:
        whole = ctx.price(_alone(kinds, node, False), float("inf"))
        better = ctx.price(_alone(kinds, node, True), whole) < whole
        ctx.forms[key] = "product" if better else "whole"
    return ctx.forms[key] == "product"


def _alone(kinds: Sequence[TensorType], node: Node, product: bool) -> Graph:
    build = GraphBuilder(table.infer, "conv")
    b = Ops(build)
    x, weight, *bias = (b.sym(build.input(f"x{i}", t)) for i, t in enumerate(kinds))
    if product:
        count, channels, *window = weight.shape
        rows = TensorType.of((count, channels * window[0] * window[1]), weight.dtype)
        _product(b, x, b.sym(build.input("rows", rows)), bias, window).output("y")
    else:
        images = x if x.type.is_layout("nhwc") else b.to_layout(x, "nhwc")
        b.one("conv", images, weight, *bias, **node.attrs).output("y")
    return build.finish()


def _product(
    b: Ops, x: Sym, weight: Sym, bias: Sequence[Sym], window: Sequence[int] | None = None
) -> Sym:
    """Emit the convolution as a product; ``window`` is given where the weight is a matrix
    already."""
    channels_last = x.type.is_layout("nhwc") and not x.type.is_layout("contiguous")
    kh, kw = window or weight.shape[2:]
    n, channels, height, width = x.shape
    for axis, (size, step) in enumerate(((height, kh), (width, kw)), 2):
        if size % step:  # pixels at the end that no window reaches
            x = b.slice(x, axis=axis, start=0, stop=size - size % step)
    h, w = height // kh, width // kw
    if channels_last:
        x = b.reshape(b.permute(x, dims=(0, 2, 3, 1)), shape=(n, h, kh, w, kw, channels))
        rows, order = b.permute(x, dims=(0, 1, 3, 2, 4, 5)), (0, 2, 3, 1)
    else:
        x = b.reshape(x, shape=(n, channels, h, kh, w, kw))
        rows, order = b.permute(x, dims=(0, 2, 4, 1, 3, 5)), (0, 1, 2, 3)
    rows = b.reshape(rows, shape=(n, h, w, channels * kh * kw))
    if window is None:
        weight = b.reshape(b.permute(weight, dims=order), shape=(weight.shape[0], -1))
    return b.one("permute", b.linear(rows, weight, *bias), dims=(0, 3, 1, 2))


# ---- rows that begin evenly

LANES = 8  # 16-bit numbers that are read at a time
LONG, LINE = 4096, 64  # rows of more than LONG numbers are padded to whole lines of memory


def even_rows(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with matrices padded with zeros where that makes their products cheaper."""
    chosen = {n.output: n for n in graph.nodes if any(_uneven(graph, n)) and _evens(graph, n, ctx)}

    def make(b: Ops, node: Node, names: dict[str, str]) -> Sym:
        return _evened(b, node, [b.sym(names[v]) for v in node.uses], _uneven(graph, node))

    ctx.fired["rows that begin evenly"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph


def _uneven(graph: Graph, node: Node) -> tuple[int, int, int]:
    """How much to add to the sizes m, k and n of a product [m, k] × [k, n], given how its operands
    lie in memory."""
    if node.op not in ("linear", "matmul"):
        return 0, 0, 0
    x, weight = (graph.types[v] for v in node.uses[:2])
    plain = node.op == "linear" or (x.rank, weight.rank) == (2, 2)
    if not plain or x.rank < 2 or x.dtype.bits != 16 or not x.numel or not weight.numel:
        return 0, 0, 0
    across = x.rank == 2 and x.strides[0] == 1 and x.strides[1] != 1  # a transposed matrix
    by_k = weight.strides[-1 if node.op == "linear" else 0] == 1
    n = weight.shape[0 if node.op == "linear" else 1]
    m, k, n = (_missing(size) for size in (x.shape[0], x.shape[-1], n))
    return m if across else 0, k if by_k or not across else 0, n


def _missing(size: int) -> int:
    """How much to add to a size so that rows of that length begin at multiples of 16 bytes."""
    return -size % (LINE if size > LONG else LANES) if size % LANES else 0


def _evens(graph: Graph, node: Node, ctx: Context) -> bool:
    """Whether the product is cheaper with zeros, by estimate."""
    if not ctx.target.is_cuda or ctx.price is None:
        return False
    kinds = tuple(graph.types[v] for v in node.uses)
    key = ("even rows", node.op, kinds)
    if key not in ctx.forms:
        costs = []
        for more in ((0, 0, 0), _uneven(graph, node)):
            build = GraphBuilder(table.infer, node.op)
            b = Ops(build)
            given = [b.sym(build.input(f"x{i}", t)) for i, t in enumerate(kinds)]
            _evened(b, node, given, more).output("y")
            costs.append(ctx.price(build.finish(), float("inf")))
        ctx.forms[key] = "even" if costs[1] < costs[0] else "plain"
    return ctx.forms[key] == "even"


def _evened(b: Ops, node: Node, given: Sequence[Sym], more: tuple[int, int, int]) -> Sym:
    x, weight, *bias = given
    m, k, n = more
    linear, size = node.op == "linear", weight.shape[0 if node.op == "linear" else 1]
    rows = x.shape[0]
    x = _beside(b, x, {0: m, x.rank - 1: k})
    weight = _beside(b, weight, {0: n, 1: k} if linear else {0: k, 1: n})
    if bias and n:
        bias = [_beside(b, bias[0], {0: n})]
    y: Sym = b.one(node.op, x, weight, *bias)
    y = b.slice(y, axis=-1, start=0, stop=size) if n else y
    return b.slice(y, axis=0, start=0, stop=rows) if m else y


def _beside(b: Ops, x: Sym, more: dict[int, int]) -> Sym:
    """Pad with zeros at the ends of some axes; a matrix that was transposed is padded before
    that."""
    if not any(more.values()):
        return x
    if x.rank == 2 and x.type.strides[0] == 1 and x.type.strides[1] != 1:
        turned = {1 - axis: count for axis, count in more.items()}
        return b.one("permute", _beside(b, b.permute(x, dims=(1, 0)), turned), dims=(1, 0))
    ends = tuple(more.get(axis, 0) for axis in range(x.rank))
    return b.one("pad", x, low=(0,) * x.rank, high=ends, value=0.0)


def beside_zeros(graph: Graph, ctx: Context) -> Graph:
    """Where both a matrix and its copy with zeros at the ends of rows are read, let everybody read
    the copy, or the part of it that is the matrix. Then its producer need not write it twice, and a
    loss writes its gradient straight into the longer rows."""
    padded: dict[str, Node] = {}
    for node in graph.nodes:
        others = graph.users.get((*node.uses, "")[0], ())
        if node.op == "pad" and len(others) > 1 and _at_ends(graph, node):
            padded.setdefault(node.uses[0], node)
    if not padded:
        return graph
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        if node.outputs[0] in names:
            continue  # this pad was emitted together with the matrix
        carry(build, names, node, graph)
        for value in set(node.outputs) & set(padded):
            longer, axis = padded[value], graph.types[value].rank - 1
            carry(build, names, longer, graph)
            part = {"axis": axis, "start": 0, "stop": graph.types[value].shape[axis], "step": 1}
            names[value] = build.emit("slice", [names[longer.output]], part)[0]
            ctx.fired["read beside zeros"] += 1
    return finish(build, names, graph)


def _at_ends(graph: Graph, pad: Node) -> bool:
    """Whether a pad only puts zeros at the ends of rows, of a row-major value that the graph makes
    for itself."""
    x, high = pad.uses[0], pad.attrs["high"]
    if not any(high):  # a single number has no ends
        return False
    plain = not any((*pad.attrs["low"], *high[:-1])) and pad.attrs["value"] == 0.0
    rows = graph.types[x].is_layout("contiguous") and x in graph.producer
    return plain and rows and x not in graph.output_values


# ---- a product before enlarging


def _before_enlarging(rw: Rewriter, node: Node) -> Sequence[str] | None:
    made, types = rw.made_by(node.uses[0], "concat"), rw.build.types
    a, weight = node.attrs, types[node.uses[1]]
    pointwise = set(weight.shape[2:]) == {1} and set(a["stride"]) == {1} and not any(a["padding"])
    if made is None or made.attrs["axis"] != 1 or not pointwise or not rw.is_constant(node.uses[1]):
        return None
    if a["groups"] != 1 or a["transposed"] or not rw.only_use(made.output):
        return None
    if {types[v].dtype for v in made.uses} != {weight.dtype}:
        return None  # the concatenation widens some of them
    parts = [(v, rw.made_by(v, "resize")) for v in made.uses]
    small = [r for v, r in parts if r and 2 * types[r.uses[0]].numel <= types[v].numel]
    count = weight.shape[0]
    if len(small) < 2 or any(count > types[v].shape[1] for v, _ in parts):
        return None  # the products would be larger than what they are made of
    total, at, data = None, 0, rw.build.constants[node.uses[1]].data
    for value, resized in parts:
        end = at + types[value].shape[1]
        share = rw.build.constant(data[:, at:end].contiguous(), f"{node.uses[1]}_part")
        bias = list(node.inputs[2:]) if total is None else []
        at, enlarge = end, resized if resized in small else None
        source = value if enlarge is None else enlarge.uses[0]
        product = rw.emit("conv", [source, share, *bias], dict(a))
        if enlarge is not None:
            product = rw.emit("resize", [product], dict(enlarge.attrs))
        total = product if total is None else rw.emit("add", [total, product])
    return None if total is None else [total]


_enlarging = by_rules((Rule("product before enlarging", ("conv",), _before_enlarging),))


def before_enlarging(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with products of small images. Dead code goes first: it would count as a reader."""
    return _enlarging(dead_code(graph), ctx)
