"""What goes with a product where kernels finish it, though fusion alone would leave it outside.

Fusion lets elementwise work join the product before it if nobody else reads that. Kernels for
products that store several results, and read other tensors of their shape on the way, can do more:
see :func:`follow_products`. Those for convolutions can take the statistics of what they make, which
batch norm in training asks for: see :func:`normalise_convolutions`.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from deuteron.ops import table
from deuteron.ops.opdef import Fusion

if TYPE_CHECKING:
    from deuteron.passes.fuse import Fuser, Group

FOLLOWED = ("linear", "matmul")
MAX_LEFT = 3  # values that may leave a product with what follows it


def follow_products(f: Fuser, most: int) -> None:
    """Elementwise work that reads a product, and perhaps other tensors of its shape, is done
    while the product is on the chip, even if the product is read elsewhere as well: a gradient
    that goes back through a layer and meets the slope of an activation, or an activation in
    training, which keeps what it is of. A few values may leave it. ``most``: nodes of a region."""
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
    """Batch norm in training goes with the convolution whose result it is of, if nothing else
    follows that closely: a kernel can take the statistics while it convolves, and one pass over
    memory less is left. Others may read the convolution as well, as the gradient does."""
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


def _left(f: Fuser, *groups: Group) -> list[str]:
    """What leaves groups as if they were one."""
    inside = {i for group in groups for i in group.nodes}
    made = (v for i in sorted(inside) for v in f.graph.nodes[i].outputs)
    places, users = f.graph.places, f.graph.users

    def leaves(value: str) -> bool:
        readers = (places[u.outputs[0]] for u in users.get(value, ()))
        return value in f.graph.output_values or any(r not in inside for r in readers)

    return [v for v in made if leaves(v)]


def _fitting(f: Fuser, value: str, product: int, work: list[int], most: int) -> list[int]:
    """The groups that the group of a product can take along: elementwise ``work`` that reads its
    result, and the other product of a gate that it reads; none if it cannot."""
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
