"""From a region to its scalar program, or the reason why there is none.

Values are functions of an index. A node's element is asked for at an index and asks its inputs
in turn: elementwise work passes the index on, movement changes it, so that chains of views,
broadcasts, slices, pads and concatenations end up as nothing but other addresses in the loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deuteron.codegen.index import Affine, Index, Var, flatten, unflatten
from deuteron.codegen.primitives import PRIMITIVES, RECIPES, E
from deuteron.codegen.rows import ROWS_RULES, SPECIAL
from deuteron.codegen.scalar import (
    Arg,
    CannotLower,
    Compute,
    Const,
    Guard,
    Inside,
    Load,
    Reduce,
    ScalarProgram,
    Statement,
    Store,
    merge_axes,
)
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.opdef import Fusion

MOVES = frozenset({"reshape", "permute", "expand", "slice", "flip", "concat", "pad", "to_layout"})
SUMS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod", "any": "any",
        "all": "all", "var": "sum"}  # fmt: skip
ROWS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm", "softmax",
                  "log_softmax"})  # fmt: skip
KINDS = {"float": "float", "int": "int", "uint": "int", "bool": "bool"}


def lower(region: Region) -> ScalarProgram:
    """The scalar program of ``region``; raises CannotLower."""
    return Lowering(region).run()


class Lowering:
    """One region on its way: statements so far, and what has been asked for already."""

    def __init__(self, region: Region) -> None:
        self.region, self.graph = region, region.graph
        self.statements: list[Statement] = []
        self.known: dict[tuple[str, Index, tuple[Guard, ...]], Arg] = {}
        self.kinds: dict[str, str] = {}
        self.reduced: dict[str, Any] = {}
        self.count = 0
        self.e = E(self)
        self._check()
        self.outer, self.inner, self.anchor = self._domain()
        self.rows = tuple(Affine.var(v) for v in self.outer)
        self.cells = tuple(Affine.var(v) for v in self.inner)

    # ---- the domain

    def _check(self) -> None:
        for node in self.region.nodes:
            op = table.get(node.op)
            simple = op.fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST) and (
                node.op in PRIMITIVES or node.op in RECIPES or node.op in SPECIAL
            )
            if not (simple or node.op in MOVES or node.op in SUMS or node.op in ROWS):
                raise CannotLower(f"{node.op} has no scalar form")
            for value in (*node.uses, *node.outputs):
                t = self.graph.types[value]
                if t.dtype.torch is None or (t.dtype.is_float and t.dtype.bits < 16):
                    raise CannotLower(f"element type {t.dtype.short}", "cast to f16 or wider")
        if any(t.numel == 0 for t in self.graph.types.values()):
            raise CannotLower("there is nothing to compute: a size is 0")

    def _domain(self) -> tuple[tuple[Var, ...], tuple[Var, ...], Node | None]:
        """Loop variables: rows outside, reduced axes inside; from the reduction if there is one,
        else the largest output."""
        anchors = [n for n in self.region.nodes if n.op in SUMS or n.op in ROWS]
        if not anchors:
            shape = max((self.graph.types[v] for v in self.region.outputs), key=lambda t: t.numel)
            return tuple(Var(f"i{d}", n) for d, n in enumerate(shape.shape)), (), None
        first = anchors[0]
        outer, inner = self._split(first)
        for other in anchors[1:]:
            if self._split(other) != (outer, inner):
                raise CannotLower(f"{first.op} and {other.op} reduce over different axes or shapes")
        return outer, inner, first

    def _split(self, node: Node) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        x = self._in(node)
        shape = self._space(node)
        axes = self._axes(node, x)
        outer = tuple(Var(f"i{d}", n) for d, n in enumerate(shape) if d not in axes)
        inner = tuple(Var(f"r{d}", n) for d, n in enumerate(shape) if d in axes)
        return outer, inner

    def _in(self, node: Node, slot: int = 0) -> TensorType:
        value = node.inputs[slot]
        assert value is not None
        return self.graph.types[value]

    def _space(self, node: Node) -> tuple[int, ...]:
        """The shape that the reduction works on: groups are an axis of their own."""
        shape = self._in(node).shape
        if node.op == "group_norm":
            groups = node.attrs["groups"]
            return (shape[0], groups, shape[1] // groups, *shape[2:])
        return shape

    def _axes(self, node: Node, x: TensorType) -> tuple[int, ...]:
        rank = len(self._space(node))
        if node.op in ("layer_norm", "rms_norm"):
            return tuple(range(rank - node.attrs["dims"], rank))
        if node.op in ("group_norm", "instance_norm"):
            return tuple(range(2, rank))
        if node.op in ("softmax", "log_softmax"):
            return (node.attrs["axis"] % rank,) if rank else ()
        axes = node.attrs["axes"]
        return tuple(range(rank)) if axes is None else tuple(a % rank for a in axes)

    def cell_index(self, node: Node) -> Index:
        """Where the element of the current row and column lies in the reduction's input."""
        x = self._in(node)
        space, axes = self._space(node), self._axes(node, x)
        rows, cells = iter(self.rows), iter(self.cells)
        index = tuple(next(cells) if d in axes else next(rows) for d in range(len(space)))
        if space == x.shape:
            return index
        return unflatten(flatten(index, space), x.shape)

    # ---- running

    def run(self) -> ScalarProgram:
        stores = []
        for value in self.region.outputs:
            t = self.graph.types[value]
            index = self._output_index(value, t)
            source = self.at(value, index, ())
            offset = Affine()
            for i, stride in zip(index, t.strides, strict=True):
                offset = offset + i * stride
            stores.append(Store(value, offset, source, t.dtype))
        order = {v: i for i, v in enumerate(self.region.inputs)}
        used = {s.tensor for s in self.statements if isinstance(s, Load)}
        wide = any(self.graph.types[v].dtype.short == "f64" for v in self.region.inputs)
        return merge_axes(
            ScalarProgram(
                self.outer, self.inner, (*self.statements, *stores),
                tuple(sorted(used, key=order.__getitem__)), self.region.outputs, wide,
            )
        )  # fmt: skip

    def _output_index(self, value: str, t: TensorType) -> Index:
        """The index of an output in terms of the loops."""
        full = (*self.outer, *self.inner)
        total = 1
        for v in full:
            total *= v.size
        if self.anchor is None:
            shape = tuple(v.size for v in self.outer)
            if t.numel != total:
                raise CannotLower(f"outputs of different sizes: {list(t.shape)} and {list(shape)}")
            return self.rows if t.shape == shape else unflatten(flatten(self.rows, shape), t.shape)
        cell, x = self.cell_index(self.anchor), self._in(self.anchor)
        if t.shape == x.shape:
            return cell
        axes = self._axes(self.anchor, x)
        if self._space(self.anchor) == x.shape:
            kept = tuple(Affine() if d in axes else cell[d] for d in range(x.rank))
            if t.shape == tuple(1 if d in axes else n for d, n in enumerate(x.shape)):
                return kept
            if t.shape == tuple(n for d, n in enumerate(x.shape) if d not in axes):
                return tuple(i for d, i in enumerate(kept) if d not in axes)
        if t.numel == total and self.inner:
            return unflatten(flatten(cell, x.shape), t.shape)
        raise CannotLower(f"an output of shape {list(t.shape)} over rows of {list(x.shape)}")

    def at(self, value: str, index: Index, guards: tuple[Guard, ...]) -> Arg:
        """The element of ``value`` at ``index``; loads under ``guards`` read nothing outside."""
        key = (value, index, guards)
        if key not in self.known:
            self.known[key] = self._at(value, index, guards)
        return self.known[key]

    def _at(self, value: str, index: Index, guards: tuple[Guard, ...]) -> Arg:
        constant = self.graph.constants.get(value)
        if constant is not None:
            return Const(constant.data.item(), KINDS[constant.type.dtype.kind])
        node = self.graph.producer.get(value)
        t = self.graph.types[value]
        if node is None:
            offset = Affine()
            for i, size, stride in zip(index, t.shape, t.strides, strict=True):
                offset = offset + (i * stride if size > 1 else Affine())
            name = self.name("v", KINDS[t.dtype.kind])
            self.statements.append(Load(name, value, offset, t.dtype, guards))
            return name
        if node.op in MOVES:
            return self._moved(node, index, guards)
        if node.op in SUMS or node.op in ROWS:
            return self._row(node, value, index)
        return self._elementwise(node, index, guards)

    def _elementwise(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Arg:
        args: list[Arg | None] = []
        for value in node.inputs:
            if value is None:
                args.append(None)
                continue
            shape = self.graph.types[value].shape
            tail = index[len(index) - len(shape) :]
            own = tuple(Affine() if n == 1 else i for n, i in zip(shape, tail, strict=True))
            args.append(self.at(value, own, guards))
        out = self.graph.types[node.outputs[0]].dtype
        if node.op in SPECIAL:
            return SPECIAL[node.op](self, node, args)
        kind = KINDS[out.kind]
        if kind == "float" or node.op in COMPARES:
            args = self._agree(node, args)
        elif node.op not in INTEGER:
            raise CannotLower(f"{node.op} on {out.short} has no scalar form")
        attrs = dict(node.attrs)
        if node.op in RECIPES:
            return RECIPES[node.op](self.e, *args, **attrs)  # type: ignore[no-any-return]
        return self.op(node.op, *args, kind=kind)

    def _agree(self, node: Node, args: list[Arg | None]) -> list[Arg | None]:
        """Mixed operands meet as floats (the condition of where stays a bool)."""
        start = 1 if node.op == "where" else 0
        present = [a for a in args[start:] if a is not None]
        if not any(self.kind(a) == "float" for a in present) and node.op in COMPARES:
            return args
        return [a if a is None or i < start else self.as_float(a) for i, a in enumerate(args)]

    def as_float(self, a: Arg) -> Arg:
        return a if self.kind(a) == "float" else self.op("to_float", a, kind="float")

    # ---- movement

    def _moved(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Arg:
        if node.op in ("concat", "pad"):
            return (self._concat if node.op == "concat" else self._pad)(node, index, guards)
        value = node.inputs[0]
        assert value is not None
        x = self.graph.types[value]
        a = node.attrs
        if node.op == "reshape":
            position = flatten(index, self.graph.types[node.output].shape)
            if position.low < 0:  # outside a pad or concat, which a division cannot tell apart
                raise CannotLower("a reshape is read at indices shifted by pad or concat")
            index = unflatten(position, x.shape)
        elif node.op == "permute":
            back = [0] * len(index)
            for out, source in enumerate(a["dims"]):
                back[source] = out
            index = tuple(index[b] for b in back)
        elif node.op == "expand":
            tail = index[len(index) - x.rank :]
            index = tuple(Affine() if n == 1 else i for n, i in zip(x.shape, tail, strict=True))
        elif node.op == "slice":
            axis = a["axis"]
            moved = index[axis] * a["step"] + a["start"]
            index = (*index[:axis], moved, *index[axis + 1 :])
        elif node.op == "flip":
            index = tuple(
                i * -1 + (n - 1) if d in a["axes"] else i
                for d, (i, n) in enumerate(zip(index, x.shape, strict=True))
            )
        return self.at(value, index, guards)

    def _concat(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Arg:
        axis, start, result = node.attrs["axis"], 0, None
        float_out = self.graph.types[node.output].dtype.is_float
        for value in node.uses:
            size = self.graph.types[value].shape[axis]
            moved = index[axis] + -start
            inside = Guard(moved, 0, size)
            start += size
            if moved.high < 0 or moved.low >= size:
                continue
            part = self.at(value, (*index[:axis], moved, *index[axis + 1 :]), (*guards, inside))
            part = self.as_float(part) if float_out else part
            if result is None:
                result = part
            else:
                result = self.op("select", self.inside((inside,)), part, result)
        assert result is not None
        return result

    def _pad(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Arg:
        if node.attrs["mode"] != "constant":
            raise CannotLower(f"pad with mode {node.attrs['mode']}", "use mode='constant'")
        value = node.inputs[0]
        assert value is not None
        x = self.graph.types[value]
        moved = tuple(i + -low for i, low in zip(index, node.attrs["low"], strict=True))
        inside = tuple(
            Guard(i, 0, n) for i, n in zip(moved, x.shape, strict=True) if i.low < 0 or i.high >= n
        )
        part = self.at(value, moved, (*guards, *inside))
        if not inside:
            return part
        return self.op("select", self.inside(inside), part, node.attrs["value"])

    def inside(self, guards: tuple[Guard, ...]) -> str:
        key = ("inside", (), guards)
        if key not in self.known:
            name = self.name("g", "bool")
            self.statements.append(Inside(name, guards))
            self.known[key] = name
        found = self.known[key]
        assert isinstance(found, str)
        return found

    # ---- reductions

    def _row(self, node: Node, value: str, index: Index) -> Arg:
        """A reduction's result where the loops are: only in step with them."""
        if node.op in ROWS:
            if index != self.cell_index(node):
                raise CannotLower(f"the result of {node.op} is read in another order")
            return ROWS_RULES[node.op](self, node)
        x = self._in(node)
        axes = self._axes(node, x)
        cell = self.cell_index(node)
        kept = tuple(i for d, i in enumerate(cell) if d not in axes)
        full = tuple(Affine() if d in axes else i for d, i in enumerate(cell))
        if index != (full if node.attrs["keepdim"] else kept):
            raise CannotLower(f"the result of {node.op} is read in another order")
        return self._reduced(node, cell)

    def _reduced(self, node: Node, cell: Index) -> Arg:
        if node.output in self.reduced:
            found: Arg = self.reduced[node.output]
            return found
        value = node.inputs[0]
        assert value is not None
        source = self.at(value, cell, ())
        out = self.graph.types[node.output].dtype
        result: Arg
        if out.is_float:
            source = self.as_float(source)
            n = float(self.columns)
            if node.op == "var":
                mean = self.op("mul", self.reduce("sum", source), 1.0 / n)
                d = self.op("sub", source, mean)
                total = self.reduce("sum", self.op("mul", d, d))
                below = n - node.attrs["correction"]
                result = self.op("div", total, below if below > 0 else 0.0)
            else:
                result = self.reduce(SUMS[node.op], source)
                if node.op == "mean":
                    result = self.op("div", result, n)
        elif out.kind == "bool":
            kind = {"max": "any", "min": "all"}.get(node.op, SUMS[node.op])
            result = self.reduce(kind, self.op("to_bool", source, kind="bool"))
        else:
            if self.kind(source) != "int":
                source = self.op("to_int", source, kind="int")
            result = self.reduce(SUMS[node.op], source)
        self.reduced[node.output] = result
        return result

    @property
    def columns(self) -> int:
        total = 1
        for v in self.inner:
            total *= v.size
        return total

    def reduce(self, op: str, source: Arg) -> Arg:
        """One number per row from the element ``source``."""
        if isinstance(source, Const):  # a constant summed over a row: give it a name first
            source = self.op("add", source, 0.0 if source.kind == "float" else 0)
        assert isinstance(source, str)
        name = self.name("m", self.kind(source))
        self.statements.append(Reduce(name, op, source, self.kind(source)))
        return name

    # ---- the emitter that recipes write through

    def op(self, name: str, *args: Any, kind: str | None = None) -> Arg:
        refs = tuple(self._ref(a) for a in args)
        out = kind or _result_kind(name, [self.kind(r) for r in refs])
        fresh = self.name("v", out)
        self.statements.append(Compute(fresh, name, refs, out))
        return fresh

    def kind(self, value: Any) -> str:
        ref = self._ref(value)
        return ref.kind if isinstance(ref, Const) else self.kinds[ref]

    def _ref(self, value: Any) -> Arg:
        if isinstance(value, str | Const):
            return value
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        return Const(value, kind)

    def name(self, letter: str, kind: str) -> str:
        name = f"{letter}{self.count}"
        self.count += 1
        self.kinds[name] = kind
        return name


COMPARES = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "isnan",
        "isinf",
    ]
)
INTEGER = frozenset(["add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where"])


def _result_kind(name: str, kinds: Sequence[str]) -> str:
    if name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "to_bool"):
        return "bool"
    return kinds[-1] if name == "select" else kinds[0]
