"""What goes with a product where its kernel can finish it, though the fusion rules would leave it
outside.

By the rules, elementwise work joins the product before it if nothing else reads that product.
Kernels for products that store several results, and read other tensors of their shape on the way,
can do more: see :func:`follow_products`. Those for convolutions can take the statistics of what
they make, which batch norm in training needs: see :func:`normalise_convolutions`. And those for
gradients of norms can add up gradients before, and do elementwise work and a sum after: see
:func:`around_gradients`.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from deuteron.ops import table
from deuteron.ops.opdef import Fusion

if TYPE_CHECKING:
    from deuteron.ir.graph import Node
    from deuteron.passes.fuse import Fuser, Group

FOLLOWED = ("linear", "matmul")
MAX_LEFT = 3  # values that a product with what follows it may write


def follow(f: Fuser, most: int) -> None:
    """Apply all of these; ``most``: the largest number of nodes in a region."""
    around_gradients(f, most)
    follow_products(f, most)
    normalise_convolutions(f, most)
    add_up_together(f, most)


def follow_products(f: Fuser, most: int) -> None:
    """Merge elementwise work that reads a product, and perhaps other tensors of its shape, into the
    product, so that it is done while the product is on the chip, even if others read the product,
    too: such as a gradient that goes back through a layer and meets the slope of an activation, or
    an activation in training, whose input is kept. The product and this work may write a few
    values."""
    for g in list(f.groups):
        group = f.groups.get(g)
        if group is None or group.kind is not Fusion.COMPLEX or group.anchor is None:
            continue
        left, heavy = _left(f, group), [f.graph.nodes[i].op for i in group.nodes]
        heavy = [op for op in heavy if table.get(op).fusion is Fusion.COMPLEX]
        if len(left) != 1 or len(heavy) != 1 or heavy[0] not in FOLLOWED:
            continue
        users = f.graph.users.get(left[0], ())
        readers = dict.fromkeys(f.group_of(u.outputs[0]) for u in users)
        work = [r for r in readers if r != g and f.groups[r].kind is Fusion.ELEMENTWISE]
        tries = [work, *([r] for r in work)] if len(work) > 1 else [work]
        fitting = (_fitting(f, left[0], g, some, most) for some in tries if some)
        for other in next((found for found in fitting if found), ()):
            f.merge(g, other)


NORMALISED = ("batch_norm_act", "batch_norm_train")


def normalise_convolutions(f: Fuser, most: int) -> None:
    """Merge batch norm in training into the convolution whose result it normalises, if the
    convolution is still alone: a kernel can take the statistics while it convolves, which saves one
    pass over memory. Others may read the convolution as well, as the gradient does."""
    for i, node in enumerate(f.graph.nodes):
        if node.op not in NORMALISED or node.uses[0] not in f.graph.places:
            continue
        made, norm = f.group_of(node.uses[0]), f.find(f.of[i])
        conv = [f.graph.nodes[k] for k in f.groups[made].nodes]
        alone = [n.op for n in conv] == ["conv"] and f.groups[norm].nodes[0] == i
        small = len(f.groups[norm].nodes) < most
        if alone and small and f.path_between(made, norm) is None:
            f.merge(made, norm)
            f.forget_veto(node.uses[0], node)


AROUND = ("layer_norm_grad", "rms_norm_grad")


def around_gradients(f: Fuser, most: int) -> None:
    """Let the gradient of a norm take along the elementwise work that makes its ``grad`` for
    nothing else, such as a sum of gradients where branches meet; then one piece of work on its dx,
    such as the gradient of dropout; and the sum of that down the columns, the gradient of a bias.
    All of it works on elements that the kernel for the norm has in registers."""
    norms = [i for i, node in enumerate(f.graph.nodes) if node.op in AROUND]
    for i in norms:
        grad = f.graph.nodes[i].uses[1]
        made = f.group_of(grad) if grad in f.graph.places else None
        if made is not None and f.reads_alone(made) == f.find(f.of[i]):
            _take_along(f, i, made, most)
    for i in norms:
        dx = f.graph.nodes[i].outputs[0]
        readers = dict.fromkeys(f.group_of(u.outputs[0]) for u in f.graph.users.get(dx, ()))
        taken = next((r for r in readers if _take_along(f, i, r, most)), None)
        if taken is None:
            continue
        group = f.groups[f.find(f.of[i])]
        made_there = [v for k in group.nodes for v in f.graph.nodes[k].outputs]
        sums = (u for v in made_there for u in f.graph.users.get(v, ()) if u.op == "sum")
        next((u for u in sums if _take_sum(f, i, u, most)), None)


def _take_along(f: Fuser, norm: int, other: int, most: int) -> bool:
    """Merge an elementwise group into the gradient of a norm, if all that it reads and makes is
    numbers, or has as many elements as x in the same order. Return whether it was merged."""
    home = f.find(f.of[norm])
    group, types = f.groups[other], f.graph.types
    if other == home or group.kind is not Fusion.ELEMENTWISE:
        return False
    numel, nodes = types[f.graph.nodes[norm].uses[0]].numel, [f.graph.nodes[k] for k in group.nodes]
    values = {v for n in nodes for v in (*n.uses, *n.outputs) if f.graph.scalar(v) is None}
    alike = all(types[v].numel == numel and types[v].is_layout("contiguous") for v in values)
    plain = all(n.op == "reshape" or table.get(n.op).fusion is not Fusion.INJECTIVE for n in nodes)
    return alike and plain and _merged(f, home, other, most)


def _take_sum(f: Fuser, norm: int, total: Node, most: int) -> bool:
    """Merge a sum down the columns of what was made of dx into the gradient of the norm. Return
    whether it was merged."""
    node, other = f.graph.nodes[norm], f.group_of(total.output)
    rows, x = f.graph.types[total.uses[0]], f.graph.types[node.uses[0]]
    columns = x.shape[x.rank - node.attrs["dims"] :]
    down = tuple(total.attrs["axes"]) == tuple(range(rows.rank - 1)) and rows.shape[-1:] == columns
    nodes = [f.graph.nodes[k] for k in f.groups[other].nodes]
    small = all(n is total or n.op in ("cast", "reshape") for n in nodes)
    later = all(f.graph.types[n.output].numel < rows.numel for n in nodes)
    return down and small and later and _merged(f, f.find(f.of[norm]), other, most)


def add_up_together(f: Fuser, most: int) -> None:
    """Merge sums of one kind over several results of one call into one region, such as those over
    the gradients of queries, keys and values for three biases: each alone cannot keep a GPU
    busy."""
    found: dict[object, list[int]] = {}
    for g, group in f.groups.items():
        nodes = [f.graph.nodes[i] for i in group.nodes]
        if group.kind is not Fusion.REDUCTION or nodes[0].op != "sum":
            continue
        call, rest = _call(f, nodes[0].uses[0]), {n.op for n in nodes[1:]}
        if call is not None and rest <= {"cast", "reshape"}:
            kind = f.graph.types[nodes[0].uses[0]]
            found.setdefault((id(call), kind, str(nodes[0].attrs)), []).append(g)
    for first, *others in found.values():
        for other in others:
            _merged(f, first, other, most)


def _call(f: Fuser, value: str) -> Node | None:
    """The opaque call with several results that ``value`` is a view of one of; else None."""
    node = f.graph.producer.get(value)
    while node is not None and node.op in ("reshape", "permute"):
        node = f.graph.producer.get(node.uses[0])
    opaque = node is not None and table.get(node.op).fusion is Fusion.OPAQUE
    return node if opaque and node is not None and len(node.outputs) > 1 else None


def _merged(f: Fuser, home: int, other: int, most: int) -> bool:
    together = len(f.groups[home].nodes) + len(f.groups[other].nodes)
    if together > most or f.path_between(home, other) is not None:
        return False
    f.merge(home, other)
    return True


def _left(f: Fuser, *groups: Group) -> list[str]:
    """The values that leave these groups if they are taken as one."""
    inside = {i for group in groups for i in group.nodes}
    made = (v for i in sorted(inside) for v in f.graph.nodes[i].outputs)
    places, users = f.graph.places, f.graph.users

    def leaves(value: str) -> bool:
        readers = (places[u.outputs[0]] for u in users.get(value, ()))
        return value in f.graph.output_values or any(r not in inside for r in readers)

    return [v for v in made if leaves(v)]


def _fitting(f: Fuser, value: str, product: int, work: list[int], most: int) -> list[int]:
    """Return the groups that the group of a product can take along: the other product of a gate, if
    ``work`` reads it, and ``work`` itself, which is elementwise and reads the product; none if they
    do not fit."""
    first = f.groups[product]
    nodes = [f.graph.nodes[i] for g in work for i in f.groups[g].nodes]
    reads = {f.group_of(v) for n in nodes for v in n.uses if v in f.graph.places}
    others = sorted(reads - {product, *work})
    taken = [*[r for r in others if f.is_gate(first, f.groups[r])][:1], *work]
    parts = [first, *(f.groups[g] for g in taken)]
    types, kind = f.graph.types, f.graph.types[value]
    made = [types[v] for n in nodes for v in n.outputs]
    alike = all(t.shape == kind.shape and t.dtype.is_float for t in made)
    moves = any(table.get(n.op).fusion is Fusion.INJECTIVE for n in nodes)
    if moves or not alike or sum(len(p.nodes) for p in parts) > most:
        return []
    left = [types[v].dtype for v in _left(f, *parts)]
    narrow = all(d.bits <= kind.dtype.bits for d in left)
    one_type = len(left) == 1 or {*left} == {kind.dtype}
    if not narrow or not one_type or len(left) > MAX_LEFT:
        return []
    pairs = combinations((product, *taken), 2)
    return taken if all(f.path_between(a, b) is None for a, b in pairs) else []
