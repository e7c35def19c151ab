"""Whether all that a graph makes of a value is linear in it. Then a factor of the value is a factor
of every result, and a sum over ranks is a mean if whoever starts the backward pass divides by the
number of ranks.

Gradients that the rules of operators write are linear; those of a model's own code need not be: a
hook may clip what passes through it.
"""

from __future__ import annotations

from collections.abc import Iterable

from deuteron.ir.graph import Graph, Node
from deuteron.ops import table
from deuteron.ops.opdef import Fusion

# Operators and the inputs that they are jointly linear in: each of these inputs must depend on the
# value or be zero. Whatever moves elements is linear in what it moves.
TOGETHER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cast", "neg", "sum", "mean", "div"), ("x",)),
    **dict.fromkeys(("add", "sub", "where"), ("x", "y")),
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), ("x",)),
}
# Operators that are linear in one of two inputs, as long as the other does not depend on the value.
EITHER = ("mul", "matmul", "linear", "conv")
# What operators for gradients call their incoming gradients.
GRADIENTS = ("grad", "grad_lse", "extra", "onto", "dy", "dh", "dc")
LOSS = "cross_entropy_with_grad"  # its gradient has the factor, its loss has not


def follows_linearly(graph: Graph, start: str, ends: Iterable[str]) -> bool:
    """Whether ``ends`` are exactly the outputs that depend on ``start``, each is linear in it, and
    no number on the way is a float16, in which smaller ones vanish."""
    known = {start}
    for node in graph.nodes:
        if known.isdisjoint(node.uses):
            continue
        found = _linear(graph, node, known)
        kinds = [graph.types[v].dtype for v in found]
        if not kinds or not all(kind.is_float and kind.short != "f16" for kind in kinds):
            return False
        known.update(found)
    return set(ends) == known & set(graph.output_values)


def _linear(graph: Graph, node: Node, known: set[str]) -> tuple[str, ...]:
    """Results of a node that are linear in the inputs that are ``known`` to be; () if one of the
    results that depend on them may not be."""
    # of torch's own backward operators the first input is the incoming gradient
    if node.op == "aten":
        library, call, *_ = str(node.attrs["target"]).split(".")
        gradient = library == "aten" and call.endswith("_backward")
        return node.outputs if gradient and known.isdisjoint(node.uses[1:]) else ()
    op = table.get(node.op)
    names = [op.inputs[min(i, len(op.inputs) - 1)].rstrip("?") for i in range(len(node.inputs))]
    given = dict(zip(names, node.inputs, strict=False))
    if node.op == LOSS:
        alone = [name for name, v in given.items() if v in known] == ["scale"]
        return node.outputs[2:] if alone else ()
    if node.op in EITHER:
        both = given.pop(names[0]), given.pop(names[1])
        one = len(known.intersection(both)) == 1 and both[0] != both[1]
        return node.outputs if one and not any(given.values()) else ()
    moves = op.fusion is Fusion.INJECTIVE or op.view
    linear = TOGETHER.get(node.op, ("x",) if moves else GRADIENTS)
    if op.variadic:
        linear = tuple(given)
    for name, value in zip(names, node.inputs, strict=False):
        if value is None:
            continue
        if value in known and name not in linear:
            return ()
        if value not in known and name in linear and not _zero(graph, value):
            return ()
    sums = node.attrs.get("reduce", "sum") in ("sum", "avg")
    return node.outputs if sums and not node.attrs.get("value") else ()  # pads with zeros alone


def _zero(graph: Graph, value: str) -> bool:
    """Whether a value is known to be nothing but zeros."""
    while (made := graph.producer.get(value)) is not None and len(made.uses) == 1:
        if made.op not in ("expand", "reshape", "cast"):
            return False
        value = made.uses[0]
    return value in graph.constants and not graph.constants[value].data.any()
