"""Norms as models write them out become one operator each:

    x · rsqrt(mean(x²) + ε) · w                       → rms_norm(x, w)
    (x − mean(x)) / √(mean((x − mean(x))²) + ε) · w + b → layer_norm(x, w, b)

The variance may come from ``var`` or be written by hand, with a quotient by √ or a product with
rsqrt, and with casts to float32 and back around all of it. The norm may go over the last axis or,
for images that will lie channels last, over the channels. The operator reads x once, and rounds
once; the parts of a layer norm are two passes over memory. The rule does not apply if anything else
reads a part, such as a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deuteron.ir.dtype import DType
from deuteron.ir.graph import Graph, Node
from deuteron.ops import Ops, Sym
from deuteron.passes.cleanup import dead_code
from deuteron.passes.combine import only_reader
from deuteron.passes.context import Context, replaced
from deuteron.passes.layout import wants_nhwc


@dataclass
class _Norm:
    """A norm of ``x`` along ``axis``: its nodes, of which the last gives the result."""

    op: str
    x: str
    axis: int
    eps: float
    nodes: list[Node] = field(default_factory=list)
    params: list[str] = field(default_factory=list)  # weight, then bias


def join_norms(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with norms as one operator."""
    graph = dead_code(graph)  # dead code would count as a reader
    images = any(node.op == "conv" for node in graph.nodes)
    chosen: dict[str, _Norm] = {}
    for node in graph.nodes:
        for norm in _norms(graph, node):
            kind = graph.types[norm.x]
            last = norm.axis == kind.rank - 1
            laid = images and norm.axis == 1 and wants_nhwc(kind, ctx)
            if (last or laid) and _is_closed(graph, norm) and _take_along(graph, norm):
                chosen[norm.nodes[-1].output] = norm
                break
    if not chosen:
        return graph
    ctx.fired.update(f"{norm.op.replace('_', ' ')} written out" for norm in chosen.values())
    return dead_code(replaced(graph, chosen, _joined))


def _joined(b: Ops, norm: _Norm, names: Mapping[str, str]) -> Sym:
    x, params = b.sym(names[norm.x]), [b.sym(names[v]) for v in norm.params]
    rank, size = x.rank, x.shape[norm.axis]
    flat = [p if p.shape == (size,) else b.one("reshape", p, shape=(size,)) for p in params]
    if norm.axis == rank - 1:
        return b.one(norm.op, x, *flat, eps=norm.eps)
    turned = b.one("permute", x, dims=(0, *range(2, rank), 1))
    made = b.one(norm.op, turned, *flat, eps=norm.eps)
    return b.one("permute", made, dims=(0, rank - 1, *range(1, rank - 1)))


# ---- what was written ----------------------------------------------------------------------------


def _made(graph: Graph, value: str | None, *ops: str) -> Node | None:
    node = graph.producer.get(value or "")
    return node if node is not None and node.op in ops else None


def _norms(graph: Graph, node: Node) -> Iterator[_Norm]:
    """What ``node`` may end: a product with 1/√(mean + ε), or a quotient by √(mean + ε)."""
    if node.op not in ("mul", "div"):
        return
    ways = (node.uses[::-1], node.uses) if node.op == "mul" else (node.uses[::-1],)
    for divisor, x in ways:
        root = _made(graph, divisor, "rsqrt" if node.op == "mul" else "sqrt")
        added = _made(graph, root.uses[0], "add") if root is not None else None
        if root is None or added is None:
            continue
        for value, number in (added.uses, added.uses[::-1]):
            eps, spread = graph.scalar(number), _made(graph, value, "mean", "var")
            if eps is None or spread is None or isinstance(eps, bool) or eps < 0:
                continue
            norm = _of(graph, x, spread, float(eps))
            if norm is not None:
                norm.nodes += [spread, added, root, node]
                yield norm


def _of(graph: Graph, x: str, spread: Node, eps: float) -> _Norm | None:
    """The norm of x by a mean of squares or a variance."""
    axes, kind = spread.attrs["axes"], graph.types[spread.uses[0]]
    if not spread.attrs["keepdim"] or len(axes) != 1 or not kind.dtype.is_float or not kind.numel:
        return None
    centre = _made(graph, x, "sub")
    mean = _made(graph, centre.uses[1], "mean") if centre is not None else None
    if spread.op == "var":
        squared, inside = spread.uses[0], []
        if spread.attrs["correction"] != 0 or centre is None or squared != centre.uses[0]:
            return None
    else:
        square = _made(graph, spread.uses[0], "square", "mul", "pow")
        if square is None or not _is_square(graph, square):
            return None
        squared, inside = square.uses[0], [square]
        wide = _made(graph, squared, "cast")
        if wide is not None and wide.uses[0] == x:  # only the square is in float32
            if kind.dtype.bits < 32:
                return None
            return _Norm("rms_norm", x, axes[0], eps, [wide, square])
        if squared == x and (centre is None or mean is None):
            return _Norm("rms_norm", x, axes[0], eps, inside)
        if squared != x:
            return None
    if centre is None or mean is None or centre.uses[0] != mean.uses[0]:
        return None
    if tuple(mean.attrs["axes"]) != tuple(axes) or not mean.attrs["keepdim"]:
        return None
    return _Norm("layer_norm", centre.uses[0], axes[0], eps, [mean, centre, *inside])


def _is_square(graph: Graph, node: Node) -> bool:
    if node.op == "pow":
        return graph.scalar(node.uses[1]) == 2
    return node.op == "square" or node.inputs[0] == node.inputs[1]


def _is_closed(graph: Graph, norm: _Norm) -> bool:
    """Whether nothing else reads what is made on the way, except that casts may have other
    readers."""
    inside = {id(node) for node in norm.nodes}
    values = [node.output for node in norm.nodes[:-1] if node.op != "cast"]
    readers = [reader for value in values for reader in graph.users.get(value, ())]
    return all(id(r) in inside for r in readers) and not graph.output_values.intersection(values)


def _take_along(graph: Graph, norm: _Norm) -> bool:
    """Add the weight, the bias and the cast back to the type of x that follow. Return whether the
    result is of that type."""
    while (node := _next(graph, norm)) is not None:
        if node.op == "cast":
            norm.x = _narrow(graph, norm.x) if _kind(graph, norm.x).short == "f32" else norm.x
        else:
            norm.params += [v for v in node.uses if v != norm.nodes[-1].output]
        norm.nodes.append(node)
    return _kind(graph, norm.x) == _kind(graph, norm.nodes[-1].output)


def _kind(graph: Graph, value: str) -> DType:
    return graph.types[value].dtype


def _narrow(graph: Graph, value: str) -> str:
    """A value before it was widened from 16 bits."""
    node = _made(graph, value, "cast")
    return value if node is None or not _kind(graph, node.uses[0]).is_low else node.uses[0]


def _next(graph: Graph, norm: _Norm) -> Node | None:
    """Return the only reader of the norm, if it can be taken along; else None."""
    last = norm.nodes[-1].output
    node = only_reader(graph, norm.nodes[-1])
    if node is None:
        return None
    x, made = graph.types[norm.x], _kind(graph, node.outputs[0])
    if node.op == "cast":
        return node if made.is_low and made == _kind(graph, _narrow(graph, norm.x)) else None
    slots = ("mul",) if norm.op == "rms_norm" else ("mul", "add")
    if node.op not in slots[len(norm.params) :][:1] or node.uses.count(last) != 1:
        return None
    (other,) = (graph.types[v] for v in node.uses if v != last)
    shape = (1,) * (x.rank - other.rank) + other.shape
    wanted = tuple(n if d == norm.axis else 1 for d, n in enumerate(x.shape))
    alike = {x.dtype, made, _kind(graph, last), other.dtype}
    return node if shape == wanted and len(alike) == 1 else None
