"""Values of the forward pass that the backward pass computes again, although it could read them.

What products read in both passes is in memory anyway when the forward pass is done with it, so that
keeping it is the quickest (``split.py``). But it takes as many bytes as what it was made of, which
the gradient of a norm or of an activation reads as well: relu(batch_norm(x)) in addition to x,
gelu(h) in addition to h. Made again just before it is read, it takes memory for a moment only.

So some of the kept values are made again: those that follow from other kept values by elementwise
work or a norm over rows, starting with what takes the least time for its bytes, as long as all of
it takes no more than a small share of the step, and each no more than some passes over memory. The
result of a batch norm follows from the statistics that its gradient reads (``OpDef.again``), and
that gradient writes it, where its readers can wait for that: x is read there anyway.

    y, …, mean, rstd = batch_norm_act(x, …)
    dx, … = batch_norm_act_grad(grad, x, …)        dx, …, y = batch_norm_act_grad(…, again=True)
    conv_dw(dz, y)                           →     conv_dw(dz, y)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import Ops, table
from deuteron.ops.activated import activation_text
from deuteron.ops.opdef import Fusion
from deuteron.passes.split import CHEAP, ONCE, Split

LEAST = 1 << 20  # bytes; smaller values are not worth it
DEEP = 8  # a value is made again by at most so many nodes
PASSES = 2.5  # at most so many bytes are moved for each byte that need not be kept
# shares of a step's time: for all of it, and for what takes kernels of its own
SHARE, APART = 0.025, 0.01
GRADIENT = "batch_norm_act_grad"
SLOTS = table.get(GRADIENT).inputs
# A 1×1 convolution with at most so many output channels and weights may get its gradients from one
# kernel with that of its norm, so they cannot wait for that norm's gradient
# (engines/triton/conv_batch_norm_grad.py).
JOINED = 256, 1 << 15


@dataclass(frozen=True)
class Way:
    """How to make ``value`` again: by ``nodes``, in order, which read the values ``reads``; or by
    the ``gradient`` of a norm, which is also given the ``residual`` that follows the norm.
    ``moved``: bytes that are read and written for it."""

    value: str
    nodes: tuple[Node, ...]
    reads: frozenset[str]
    moved: int
    gradient: Node | None = None
    residual: str | None = None


@dataclass(frozen=True)
class Recomputation:
    """A graph whose second half makes values anew; ``values`` are all that it makes for this,
    ``bytes`` is how many need not be kept, ``seconds`` how long it takes."""

    graph: Graph
    values: frozenset[str] = frozenset()
    bytes: int = 0
    seconds: float = 0.0


def made_again(
    split: Split, seconds: Callable[[int, int], float], step: float, fixed: Collection[str]
) -> Recomputation:
    """Return the graph of a split with values made again. ``seconds(bytes, kernels)``: how long it
    takes to move so many bytes with so many more kernels; ``step``: seconds that the whole graph
    takes at least; ``fixed``: inputs that the second half cannot read."""
    size, places = {v: t.nbytes for v, t in split.graph.types.items()}, split.graph.places
    ways = _ways(split, {*fixed})
    # among equals, what is made earlier comes first: it is read last, when most others are gone
    ways.sort(key=lambda w: (round(w.moved / size[w.value], 1), places[w.value]))
    chosen, read, spent, apart = dict[str, Way](), set[str](), 0.0, 0.0
    for way in ways:
        takes = seconds(way.moved, way.gradient is None)
        own = takes if way.gradient is None else 0.0
        free = way.value not in read and way.reads.isdisjoint(chosen)
        if free and spent + takes <= SHARE * step and apart + own <= APART * step:
            chosen[way.value] = way
            read |= way.reads
            spent, apart = spent + takes, apart + own
    if not chosen:
        return Recomputation(split.graph)
    graph, values = _rewritten(split, chosen)
    return Recomputation(graph, frozenset(values), sum(map(size.__getitem__, chosen)), spent)


# ---- what can be made again


def _ways(split: Split, fixed: set[str]) -> list[Way]:
    """Return ways to make those values again that are kept for the second half alone and follow
    from others."""
    cut, graph = split.halves(), split.graph
    there = (set(cut.saved) | set(graph.inputs)) - fixed - split.later
    found = []
    for value in cut.dying - {v for _, v in split.behind}:
        readers = cut.backward.users.get(value, ())
        if graph.types[value].nbytes < LEAST or not all(map(split.is_late, readers)):
            continue
        way = _way(graph, value, there)
        if way is None or way.reads.isdisjoint(cut.dying):  # it is made of weights alone
            continue
        following, residual = _following(way.nodes)
        gradient = _gradient(split, way, following, readers)
        if gradient is not None:
            more = {value, residual} - {None, *gradient.uses}
            moved = sum(graph.types[v].nbytes for v in more if v is not None)
            way = replace(way, moved=moved, gradient=gradient, residual=residual)
        if way.moved <= PASSES * graph.types[value].nbytes:
            found.append(way)
    return found


def _way(graph: Graph, value: str, there: set[str]) -> Way | None:
    """Return how a value follows from the values ``there``; None if it does not, or not cheaply."""
    nodes, reads, asked = dict[int, Node](), set[str](), [value]
    while asked:
        v = asked.pop()
        if (v in there and v != value) or v in graph.constants:
            reads |= {v} - set(graph.constants)
            continue
        node = graph.producer.get(v)
        if node is None or not _is_cheap(graph, node, v) or len(nodes) == DEEP:
            return None
        nodes[graph.places[v]] = node
        asked += node.uses if table.get(node.op).again is None else filter(None, _given(node))
    moved = sum(graph.types[v].nbytes for v in (value, *reads))
    return Way(value, tuple(nodes[i] for i in sorted(nodes)), frozenset(reads), moved)


def _is_cheap(graph: Graph, node: Node, value: str) -> bool:
    if node.op in ONCE:
        return False
    op = table.get(node.op)
    if op.again is not None:
        return value == node.outputs[0]
    alike = bool(node.uses) and graph.types[node.uses[0]].shape == graph.types[value].shape
    return op.fusion in CHEAP or (op.fusion is Fusion.REDUCTION and alike)


def _given(node: Node) -> list[str | None]:
    """The inputs and results of a node from which its first result follows."""
    op = table.get(node.op)
    assert op.again is not None
    names, places, _ = op.again
    inputs = dict(zip(op.inputs, node.inputs, strict=False))
    return [*map(inputs.get, names), *(node.outputs[i] for i in places)]


def _following(nodes: Sequence[Node]) -> tuple[str | None, str | None]:
    """If the nodes are a batch norm in training, perhaps followed by a sum with a residual and by
    an activation, return that activation and the residual; (None, None) if they are something
    else."""
    norm, *rest = nodes
    if norm.op not in ("batch_norm_act", "batch_norm_train"):
        return None, None
    residual = dict(zip(table.get(norm.op).inputs, norm.inputs, strict=False)).get("residual?")
    act, y = norm.attrs.get("activation", "none"), norm.outputs[0]
    for node in rest:
        text, others = activation_text(node.op, node.attrs), [v for v in node.uses if v != y]
        if act != "none" or len(node.uses) != len(others) + 1:
            return None, None
        if node.op == "add" and residual is None and others:
            residual = others[0]
        elif text is not None and not others:
            act = text
        else:
            return None, None
        y = node.outputs[0]
    return act, residual


def _gradient(
    split: Split, way: Way, following: str | None, readers: Sequence[Node]
) -> Node | None:
    """Return the gradient of the batch norm that made a value, if it can make the value again and
    the readers can wait for it: no other such gradient may depend on them."""
    graph, norm = split.graph, way.nodes[0]
    if following is None:
        return None
    x, mean = norm.inputs[0], norm.outputs[3]
    found = [n for n in graph.users.get(mean, ()) if n.op == GRADIENT and n.inputs[1] == x]
    if len(found) != 1 or found[0].attrs["activation"] != following or found[0] in readers:
        return None
    if any(_is_joined(graph, node) for node in readers):
        return None
    late = {v for node in readers for v in node.outputs}
    for node in graph.nodes:
        if not late.isdisjoint(node.uses):
            late.update(node.outputs)
            if node.op == GRADIENT:
                return None
    return found[0]


def _is_joined(graph: Graph, node: Node) -> bool:
    """Whether it is a gradient of weights that one kernel may compute together with others."""
    if node.op != "conv_dw":
        return False
    out, channels, *window = graph.types[node.output].shape
    single = {*window, *node.attrs["stride"], node.attrs["groups"]} == {1}
    return single and out <= JOINED[0] and out * channels <= JOINED[1]


# ---- making it


def _rewritten(split: Split, chosen: Mapping[str, Way]) -> tuple[Graph, set[str]]:
    """Return the graph in which the second half makes values again just before it reads the first
    of them, and all values that are made for that. What reads a value that a gradient makes waits
    for that gradient."""
    graph, new, fresh = split.graph, set[str](), dict[str, str]()
    build, names = start(graph, table.infer)
    by = {id(way.gradient): v for v, way in chosen.items() if way.gradient is not None}

    def follow(node: Node) -> bool:
        """Emit a node if all that it reads is there; return whether it was."""
        late = split.is_late(node)
        for value in (v for v in node.uses if late and v in chosen and v not in fresh):
            if chosen[value].gradient is not None:
                return False
            before = len(build.nodes)
            fresh[value] = _made(build, names, chosen[value], graph)
            new.update(v for made in build.nodes[before:] for v in made.outputs)
        seen = {v: fresh[v] if late and v in fresh else names.get(v) for v in node.uses}
        if None in seen.values():
            return False
        inputs = [None if v is None else seen[v] for v in node.inputs]
        if id(node) in by:
            residual, attrs = chosen[by[id(node)]].residual, {**node.attrs, "again": True}
            inputs = [*inputs, *[None] * (len(SLOTS) - len(inputs))]
            if residual is not None:
                inputs[SLOTS.index("residual?")] = names[residual]
            *made, fresh[by[id(node)]] = build.emit(node.op, inputs, attrs, source=node.source)
        else:
            made = list(build.follow(node, inputs, graph))
        names.update(zip(node.outputs, made, strict=True))
        return True

    waiting: list[Node] = []
    for node in graph.nodes:
        if node.op == GRADIENT:
            waiting = [n for n in waiting if not follow(n)]
        if not follow(node):
            waiting.append(node)
    waiting = [n for n in waiting if not follow(n)]
    assert not waiting, "what waits for a gradient is needed by another"
    return finish(build, names, graph), new


def _made(build: GraphBuilder, names: Mapping[str, str], way: Way, graph: Graph) -> str:
    """Emit a value once more and return its new name, or the old one if the new value would lie in
    another memory order, where it is of no use."""
    own = dict(names)
    for node in way.nodes:
        again = table.get(node.op).again
        if again is None:
            carry(build, own, node, graph)
            continue
        ops = Ops(build, node.source)
        given = [None if v is None else ops.sym(own[v]) for v in _given(node)]
        own[node.outputs[0]] = again[2](ops, given, node.attrs).name
    made = own[way.value]
    return made if build.types[made] == graph.types[way.value] else names[way.value]
