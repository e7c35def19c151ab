"""What models write is rewritten as it runs best: chains of reshapes and permutes in the fewest
steps, without copies that nobody needs, products of rows in any order, and attention's masks and
repeated heads.

Each rule holds for every number; what it may change is the order in which a value lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule
from deuteron.ir.types import TensorType, view_strides
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.context import Context, by_rules

Result = Sequence[str] | None
MOVES, MOST = ("reshape", "permute"), 16  # MOST: steps in a row that are looked at
# readers that copy their input themselves if they must, or for which the layout pass does so
LOOKS = ("reshape", "permute", "slice", "to_layout", "attention", "conv")


# ---- movement


@dataclass(eq=False)
class Axis:
    """A dimension of the source, whole or split into an outer and an inner one."""

    size: int
    parts: list[Axis] = field(default_factory=list)

    def split(self, outer: int) -> list[Axis]:
        self.parts = [Axis(outer), Axis(self.size // outer)]
        return self.parts

    def leaves(self) -> list[Axis]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


def _regrouped(dims: list[list[Axis]], shape: Sequence[int]) -> list[list[Axis]] | None:
    """Group axes in row-major order into the dimensions of another shape; None where one would have
    to be split unevenly."""
    flat = [leaf for axes in dims for axis in axes for leaf in axis.leaves()]
    made: list[list[Axis]] = []
    for size in shape:
        made.append([])
        while size > 1:
            axis = flat.pop(0)
            if size % axis.size and axis.size % size:
                return None
            if size % axis.size:
                axis, rest = axis.split(size)
                flat.insert(0, rest)
            made[-1].append(axis)
            size //= axis.size
    return made


@dataclass(frozen=True)
class Movement:
    """What a chain of reshapes and permutes does to a value: the axes of the source, split so that
    every dimension of the result consists of some of them."""

    source: str
    chain: Sequence[Node]
    axes: list[Axis]  # of the source, one for each dimension
    dims: list[list[Axis]]  # of the result; an empty list for a dimension of one element

    @property
    def leaves(self) -> list[list[Axis]]:
        return [[leaf for axis in axes for leaf in axis.leaves()] for axes in self.dims]


def _movement(rw: Rewriter, node: Node | None, past_copies: bool = True) -> Movement | None:
    """Return the movement that ends with ``node``. Unless ``past_copies``, it goes back no further
    than to a copy that others read as well, which is made anyway."""
    chain = list[Node]()
    while node is not None and len(chain) < MOST:
        chain.insert(0, node)
        node = rw.made_by(node.uses[0], *MOVES)
        if node is not None and not past_copies and not rw.only_use(node.output):
            kinds = (rw.build.types[v] for v in (node.uses[0], node.output))
            node = None if _copies(node.op, *kinds) else node
    if not chain or 0 in (shape := rw.build.types[chain[0].uses[0]].shape):
        return None
    axes = [Axis(size) for size in shape]
    dims: list[list[Axis]] | None = [[axis] if axis.size > 1 else [] for axis in axes]
    for step in chain:
        assert dims is not None
        if step.op == "permute":
            dims = [dims[d] for d in step.attrs["dims"]]
        elif (dims := _regrouped(dims, step.attrs["shape"])) is None:
            return None
    assert dims is not None
    return Movement(chain[0].uses[0], chain, axes, dims)


Step = tuple[str, dict[str, Any]]


def _steps(have: Sequence[Axis], want: Sequence[Sequence[Axis]]) -> list[Step]:
    """The steps (split, permute, merge) that turn a tensor with the axes ``have``, in row-major
    order, into one whose dimensions are the lists of axes in ``want``. Dimensions of one element
    are added by the split, so that nothing is left to do after the permute unless axes are
    merged."""
    ones = sum(not axes for axes in want)  # in front, where they do not change the order of others
    place = {id(axis): ones + i for i, axis in enumerate(have)}
    spare, sizes = iter(range(ones)), [*[1] * ones, *(axis.size for axis in have)]
    order = list[int]()
    for axes in want:
        order += [place[id(axis)] for axis in axes] or [next(spare)]
    merged = [math.prod(axis.size for axis in axes) for axes in want]
    split, turn = ("reshape", {"shape": tuple(sizes)}), ("permute", {"dims": tuple(order)})
    return [split, turn, ("reshape", {"shape": tuple(merged)})]


def _merged(
    have: Sequence[Axis], want: Sequence[Sequence[Axis]]
) -> tuple[list[Axis], list[list[Axis]]]:
    """The same, with a single axis for axes that follow each other both before and after."""
    before = {id(axis): i for i, axis in enumerate(have)}
    runs: dict[int, Axis] = {}  # by where they begin
    made: list[list[Axis]] = []
    for axes in want:
        made.append([])
        for axis, last in zip(axes, [None, *axes], strict=False):
            if last is not None and before[id(axis)] == before[id(last)] + 1:
                made[-1][-1].size *= axis.size
            else:
                runs[before[id(axis)]] = Axis(axis.size)
                made[-1].append(runs[before[id(axis)]])
    return [runs[i] for i in sorted(runs)], made


def _planned(kind: TensorType, steps: Sequence[Step]) -> tuple[list[Step], int]:
    """The steps that change something, and how many of them copy."""
    plan, copies = list[Step](), 0
    for op, attrs in steps:
        _, (made,) = table.infer(op, [kind], attrs)
        turned = op == "permute" and list(attrs["dims"]) != sorted(attrs["dims"])
        if turned or made.shape != kind.shape:
            plan.append((op, attrs))
            copies += _copies(op, kind, made)
            kind = made
    return plan, copies


def _best(kind: TensorType, found: Movement) -> tuple[list[Step], int]:
    """Return a movement in the fewest steps, and how many of them copy. Axes that stay side by side
    are merged first, unless that copies: others may read them merged as well."""
    have = [leaf for axis in found.axes if axis.size > 1 for leaf in axis.leaves()]
    early = _planned(kind, _steps(*_merged(have, found.leaves)))
    return early if early[1] == 0 else _planned(kind, _steps(have, found.leaves))


def _copies(op: str, source: TensorType, made: TensorType) -> bool:
    return op == "reshape" and view_strides(source.shape, source.strides, made.shape) is None


def _moved(rw: Rewriter, value: str, plan: Sequence[Step]) -> str:
    for op, attrs in plan:
        value = rw.emit(op, [value], attrs)
    return value


def _in_fewest_steps(rw: Rewriter, node: Node) -> Result:
    """Reshapes and permutes in a row become at most one reshape, one permute and one reshape. What
    is merged and split again on the way is not merged, because that would copy."""
    types, made = rw.build.types, rw.old.types[node.outputs[0]]
    inner, found = rw.made_by(node.uses[0], node.op), _movement(rw, node)
    several = found is not None and len(found.chain) > 1
    if found is not None and several and _best(types[found.source], found)[1]:
        found = _movement(rw, node, past_copies=False)
    if found is not None and len(found.chain) > 1:
        chain, source = found.chain, found.source
        plan, copies = _best(types[source], found)
    elif inner is not None and node.op == "reshape":  # whatever shape is between
        chain, source = [inner, node], inner.uses[0]
        plan, copies = _planned(types[source], [("reshape", {"shape": made.shape})])
    else:
        return None
    kinds = [*(types[step.uses[0]] for step in chain), made]
    had = sum(map(_copies, (step.op for step in chain), kinds, kinds[1:]))
    usual = [op for op, _ in plan] != [step.op for step in chain] and copies <= had
    if (copies, len(plan)) >= (had, len(chain) + usual):
        return None
    return [_moved(rw, source, plan)]


def _copy_for_nobody(rw: Rewriter, node: Node) -> Result:
    """Drop x.contiguous() before views of it, attention or a convolution: a reshape that needs
    another order copies by itself, and the others are given the order that they want."""
    (out,), readers = node.outputs, rw.old.users.get(node.outputs[0], ())
    looked_at = bool(readers) and all(reader.op in LOOKS for reader in readers)
    given = out in rw.old.output_values or node.attrs["layout"] != "contiguous"
    return [node.uses[0]] if looked_at and not given else None


def _rows_as_they_lie(rw: Rewriter, node: Node) -> Result:
    """A product of rows that were permuted becomes a product of the rows as they lie in memory,
    whose result is permuted instead: often the next operation undoes that."""
    found = _movement(rw, rw.made_by(node.uses[0], *MOVES))
    if found is None:
        return None
    kind, weight = rw.build.types[found.source], rw.build.types[node.uses[1]]
    order = sorted(range(kind.rank), key=lambda d: (-kind.strides[d], d))
    _, (laid,) = table.infer("permute", [kind], {"dims": tuple(order)})
    lies = [leaf for d in order if kind.shape[d] > 1 for leaf in found.axes[d].leaves()]
    *rows, features = found.leaves
    count = len(features)
    same = [leaf for axes in rows for leaf in axes] == lies[: len(lies) - count]
    if same or not count or not laid.is_layout("contiguous") or lies[-count:] != features:
        return None
    whole = [Axis(weight.shape[0])] if weight.shape[0] > 1 else []
    outside = lies[: len(lies) - count]
    after = _steps([*outside, *whole], [*rows, whole])
    made = TensorType.of([*(axis.size for axis in outside), weight.shape[0]], kind.dtype)
    plan, copies = _planned(made, after)
    if copies and weight.shape[0] > weight.shape[1]:
        return None  # the copy before the product is the smaller one
    shape = (*(axis.size for axis in outside), weight.shape[1])
    value = _moved(rw, found.source, _planned(kind, [("permute", {"dims": tuple(order)})])[0])
    value = _moved(rw, value, _planned(laid, [("reshape", {"shape": shape})])[0])
    return [_moved(rw, rw.emit("linear", [value, *node.inputs[1:]], dict(node.attrs)), plan)]


def _before_it_is_seen(rw: Rewriter, node: Node) -> Result:
    """Elementwise work on reshaped products, as models see the rows of a matrix as a batch, is done
    on the rows before the reshape, so that the product's kernel can do it; the result is reshaped
    instead."""
    types, out = rw.build.types, rw.old.types[node.outputs[0]]
    seen = [rw.made_by(v, "reshape") for v in node.uses if types[v].rank]
    if len(node.outputs) > 1 or not seen or None in seen:
        return None
    sources = {s.uses[0]: s for s in seen if s is not None}
    rows, shapes = {types[v] for v in sources}, {types[s.output].shape for s in sources.values()}
    dense = all(t.is_layout("contiguous") for t in (*rows, out))
    alike = len({t.shape for t in rows}) == 1 and shapes == {out.shape}
    if not dense or not alike or not any(_of_product(rw, v) for v in sources):
        return None
    before = {s.output: v for v, s in sources.items()}
    given = [None if v is None else before.get(v, v) for v in node.inputs]
    return [rw.emit("reshape", [rw.emit(node.op, given, dict(node.attrs))], {"shape": out.shape})]


def _of_product(rw: Rewriter, value: str) -> bool:
    """Whether a value is a product, or elementwise work on one."""
    asked, looked_at = [value], 0
    while asked and looked_at < MOST:
        made, looked_at = rw.made_by(asked.pop()), looked_at + 1
        if made is not None and made.op in ("linear", "matmul"):
            return True
        if made is not None and made.op in POINTWISE:
            asked += made.uses
    return False


# ---- attention


def _known(rw: Rewriter, value: str | None) -> torch.Tensor | None:
    """The numbers of a constant, or of the constant that was expanded to ``value``; else None."""
    made = rw.made_by(value, "expand")
    value = made.uses[0] if made is not None else value
    return rw.build.constants[value].data if value and rw.is_constant(value) else None


def hides_later(mask: torch.Tensor, queries: int, keys: int) -> bool | None:
    """True if a mask hides from each query exactly the keys that come later, False if it hides
    nothing, None if it does something else. A number added to an infinite score hides nothing, so
    an additive mask is recognised only if it is all zeros."""
    if mask.dtype != torch.bool and bool(mask.any()):
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    if bool(seen.all()):
        return False
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    square = queries == keys and seen.shape[-2:] == triangle.shape
    return True if square and bool((seen == triangle).all()) else None


def _known_mask(rw: Rewriter, node: Node) -> Result:
    """A mask that hides nothing is dropped, and one that hides what comes later becomes
    ``causal``."""
    mask = _known(rw, (*node.inputs, None)[3])
    queries, keys = (rw.build.types[v].shape[-2] for v in node.uses[:2])
    later = None if mask is None else hides_later(mask, queries, keys)
    if later is None or (later and not _side_by_side(node)):
        return None
    attrs = {**node.attrs, "causal": later or node.attrs["causal"]}
    return [rw.emit("attention", [*node.inputs[:3], None, *node.inputs[4:]], attrs)]


def _side_by_side(attention: Node) -> bool:
    """Whether ``causal`` and the window count from where a mask does: query i beside key i."""
    return not attention.attrs["offset"] and attention.attrs["align"] == "start"


def _known_window(rw: Rewriter, node: Node) -> Result:
    """A mask that shows each query the keys around its own position becomes a window: neither the
    mask nor what lies outside of the window needs to be read."""
    mask = _known(rw, (*node.inputs, None)[3])
    queries, keys = (rw.build.types[v].shape[-2] for v in node.uses[:2])
    plain = node.attrs["window"] is None and _side_by_side(node)
    if mask is None or not plain or queries != keys or mask.shape[-2:] != (queries, keys):
        return None
    if mask.dtype != torch.bool or mask.numel() != queries * keys:
        return None
    seen = mask.reshape(queries, keys).cpu()
    left, right = int(seen[-1].sum()) - 1, int(seen[0].sum()) - 1
    band = torch.ones_like(seen).tril(right).triu(-left)
    if min(left, right) < 0 or not bool((seen == band).all()):
        return None
    ends = tuple(-1 if n >= keys - 1 else n for n in (left, right))
    attrs = {**node.attrs, "window": ends}
    if right == 0:
        attrs |= {"causal": True, "window": (ends[0], -1)}
    return [rw.emit("attention", [*node.inputs[:3], None, *node.inputs[4:]], attrs)]


def _grouped(rw: Rewriter, value: str) -> str | None:
    """Keys or values before each of their heads was repeated, in a row, for several heads of
    queries."""
    merged = rw.made_by(value, "reshape")
    repeated = rw.made_by(merged.uses[0], "expand") if merged is not None else None
    if merged is None or repeated is None:
        return None
    types, source = rw.build.types, repeated.uses[0]
    wide, narrow, shape = types[repeated.output].shape, types[source].shape, types[value].shape
    if len(wide) != 5 or len(narrow) != 5 or narrow[2] != 1:
        return None
    batch, heads, times, *rest = wide
    fits = narrow == (batch, heads, 1, *rest) and shape == (batch, heads * times, *rest)
    return source if fits else None


def _grouped_heads(rw: Rewriter, node: Node) -> Result:
    """Attention over heads that were repeated is attention with fewer heads of keys and values."""
    found = [_grouped(rw, value) for value in node.uses[1:3]]
    if None in found or len({rw.build.types[v].shape[1] for v in found if v}) != 1:
        return None
    shapes = {v: rw.build.types[v].shape for v in found if v}
    cut = {v: (*shape[:2], *shape[3:]) for v, shape in shapes.items()}
    less = [rw.emit("reshape", [v], {"shape": cut[v]}) for v in found if v]
    return [rw.emit("attention", [node.inputs[0], *less, *node.inputs[3:]], dict(node.attrs))]


MOVEMENT = Rule("movement in the fewest steps", MOVES, _in_fewest_steps)
SPELLINGS = (
    Rule("copy that nobody needs dropped", ("to_layout",), _copy_for_nobody),
    MOVEMENT,
    Rule("rows multiplied as they lie", ("linear",), _rows_as_they_lie),
    Rule("known mask", ("attention",), _known_mask),
    Rule("repeated heads are grouped", ("attention",), _grouped_heads),
)

POINTWISE = tuple(
    name
    for name, op in table.TABLE.items()
    if op.fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST) and name != "dropout"
)
ON_GPUS = (
    Rule("mask of a window", ("attention",), _known_window),
    Rule("computed on rows of a product", POINTWISE, _before_it_is_seen),
)

_everywhere = by_rules(SPELLINGS)
_on_gpus = by_rules((*SPELLINGS, *ON_GPUS))


def as_models_write(graph: Graph, ctx: Context) -> Graph:
    """Movement, copies and attention as models write them, in the fewest steps."""
    return (_on_gpus if ctx.target.is_cuda else _everywhere)(graph, ctx)
