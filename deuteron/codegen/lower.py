"""From a region to its scalar program, or the reason why there is none.

Values are functions of an index. To find a node's element at an index, the elements of its inputs
are found in turn: elementwise work passes the index on, movement changes it, so that chains of
views, broadcasts, slices, pads and concatenations end up as nothing but other addresses in the
loads.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

from deuteron.codegen import scalar
from deuteron.codegen.index import Affine, Dynamic, Index, Var, flatten, unflatten
from deuteron.codegen.places import PLACES, has_input
from deuteron.codegen.reductions import ROWS, Walk, is_reduction
from deuteron.codegen.scalar import KINDS, Guards, Load, Reduce, ScalarProgram, Statement, Store
from deuteron.codegen.windows import WINDOWS, refuse_sum_of_channels
from deuteron.ir.dtype import DType
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import Shape, TensorType
from deuteron.ops import table
from deuteron.ops.formula import COMPARISONS, Arg, CannotLower, Const, Scalars, is_scalar
from deuteron.ops.fp8 import overflows
from deuteron.ops.opdef import promoted

T = TypeVar("T")
# each operand is tested by itself for being zero, nan or infinite: they need no common type
LOGIC = frozenset("logical_and logical_or logical_xor logical_not isnan isinf".split())
# operators on integers: those that change nothing, those whose result may leave a narrow type, all
UNCHANGED = frozenset("floor ceil round trunc".split())
OVERFLOWS = frozenset("add sub mul neg abs square pow floor_div".split())
WHOLE = UNCHANGED | OVERFLOWS | set("maximum minimum where sign relu clamp remainder".split())
# A program can double with every node if values are read at ever more places, or places are found
# by dividing what was divided before. Above these bounds it compiles and runs longer than copies in
# between would take.
MOST_STEPS = 1024  # statements, and results that were remembered on the way to them
MOST_TERMS = 32  # loop variables in one index
# arithmetic on booleans, as logic
BOOLEAN = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "where": "where"}


def lower(region: Region) -> ScalarProgram:
    """The scalar program of ``region``; raises CannotLower."""
    return Lowering(region).run()


class Lowering(Scalars):
    """The lowering of one region: its statements so far, and what has been computed already."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region, self.graph = region, region.graph
        self.statements: list[Statement] = []
        self.known: dict[tuple[Any, ...], Any] = {}  # results, by rule and arguments
        self._check()
        made = (*region.inputs, *(v for node in region.nodes for v in node.outputs))
        self.wide = any(self.graph.types[v].dtype.short == "f64" for v in made)
        self.outer, self.inner, self.anchor = self._domain()
        self.rows = tuple(Affine.var(v) for v in self.outer)
        self.cells = tuple(Affine.var(v) for v in self.inner)

    # ---- the domain

    def _check(self) -> None:
        for node in self.region.nodes:
            written = any(node.op in forms for forms in (PLACES, ROWS, WINDOWS))
            if not written and not is_scalar(table.get(node.op)):
                raise CannotLower(f"{node.op} has no scalar form")
            if node.op in ("conv", "conv_dx"):
                refuse_sum_of_channels(self, node)
            for value in (*node.uses, *node.outputs):
                t = self.graph.types[value]
                if t.dtype.torch is None:
                    raise CannotLower(f"element type {t.dtype.short}", "cast to f16 or wider")
                if remedy := overflows(self.graph, value):
                    raise CannotLower(f"a cast to {t.dtype.short} may overflow", remedy)
        if any(t.numel == 0 for t in self.graph.types.values()):
            raise CannotLower("there is nothing to compute: a size is 0")

    def _domain(self) -> tuple[tuple[Var, ...], tuple[Var, ...], Node | None]:
        """Loop variables: rows outside, reduced axes inside; from the reduction if there is one,
        else the largest output."""
        anchors = [n for n in self.region.nodes if is_reduction(n)]
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
        walk = self.walk(node)
        outer = tuple(Var(f"i{d}", n) for d, n in enumerate(walk.space) if d not in walk.axes)
        inner = tuple(Var(f"r{d}", n) for d, n in enumerate(walk.space) if d in walk.axes)
        return outer, inner

    def walk(self, node: Node) -> Walk:
        """The shape and the axes of a reduction."""
        return ROWS[node.op][0](self, node)

    def input(self, node: Node, slot: int = 0) -> str:
        value = node.inputs[slot]
        assert value is not None
        return value

    def type(self, node: Node, slot: int = 0) -> TensorType:
        return self.graph.types[self.input(node, slot)]

    def cell_index(self, node: Node) -> Index:
        """Return where the element of the current row and column is in the reduction's input."""
        walk = self.walk(node)
        rows, cells = iter(self.rows), iter(self.cells)
        index = tuple(next(cells) if d in walk.axes else next(rows) for d in range(len(walk.space)))
        if walk.space == walk.shape:
            return index
        return unflatten(flatten(index, walk.space), walk.shape)

    def cell(self, node: Node) -> Arg:
        """The element of the current row and column."""
        return self.at(self.input(node), self.cell_index(node), ())

    @property
    def columns(self) -> int:
        return prod(v.size for v in self.inner)

    # ---- running

    def run(self) -> ScalarProgram:
        stores = []
        for value in self.region.outputs:
            t = self.graph.types[value]
            index = self._output_index(t)
            source = self.at(value, index, ())
            steps = zip(index, t.strides, strict=True)
            offset = sum((i * stride for i, stride in steps), Affine())
            stores.append(Store(value, offset, source, t.dtype))
        order = {v: i for i, v in enumerate(self.region.inputs)}
        used = {s.tensor for s in self.statements if isinstance(s, Load)}
        inputs, outputs = tuple(sorted(used, key=order.__getitem__)), self.region.outputs
        statements = (*self.statements, *stores)
        program = ScalarProgram(self.outer, self.inner, statements, inputs, outputs, self.wide)
        return scalar.merge_axes(program)

    def _output_index(self, t: TensorType) -> Index:
        """The index of an output in terms of the loops."""
        if self.anchor is None:
            shape = tuple(v.size for v in self.outer)
            if t.numel != prod(shape):
                raise CannotLower(f"outputs of different sizes: {list(t.shape)} and {list(shape)}")
            return self.rows if t.shape == shape else unflatten(flatten(self.rows, shape), t.shape)
        found = self._row_index(self.anchor, t)
        if found is not None:
            return found
        walk = self.walk(self.anchor)
        if t.numel == prod(walk.space) and self.inner:
            return unflatten(flatten(self.cell_index(self.anchor), walk.shape), t.shape)
        raise CannotLower(f"an output of shape {list(t.shape)} over rows of {list(walk.shape)}")

    def _row_index(self, node: Node, t: TensorType) -> Index | None:
        """Return the index of a value shaped like a reduction's input, or like its result."""
        walk, cell = self.walk(node), self.cell_index(node)
        if t.shape == walk.shape:
            return cell
        if walk.space != walk.shape:
            return None
        kept = tuple(Affine() if d in walk.axes else i for d, i in enumerate(cell))
        if t.shape == tuple(1 if d in walk.axes else n for d, n in enumerate(walk.shape)):
            return kept
        if t.shape == tuple(n for d, n in enumerate(walk.shape) if d not in walk.axes):
            return tuple(i for d, i in enumerate(kept) if d not in walk.axes)
        if t.numel == prod(tuple(v.size for v in self.outer)) == 1:
            return (Affine(),) * t.rank
        return None

    # ---- values at an index

    def at(self, value: str, index: Index, guards: Guards) -> Arg:
        """Return the element of ``value`` at ``index``; under ``guards`` nothing outside is
        read."""
        return self.once(Lowering._at, value, index, guards)

    def once(self, rule: Callable[..., T], *given: Any) -> T:
        """Return ``rule(self, *given)``, which is computed only the first time."""
        if (key := (rule, *given)) not in self.known:
            self.known[key] = rule(self, *given)
        found: T = self.known[key]
        return found

    def float_at(self, value: str, index: Index, guards: Guards) -> Arg:
        return self.as_float(self.at(value, index, guards))

    def _at(self, value: str, index: Index, guards: Guards) -> Arg:
        if len(self.statements) + len(self.known) > MOST_STEPS:
            raise CannotLower(f"more than {MOST_STEPS} steps for an element", too_long=True)
        if any(i.size > MOST_TERMS for i in index):
            raise CannotLower("elements are moved too often to say from where", too_long=True)
        if value in self.graph.constants:
            return self._known_number(value)
        node = self.graph.producer.get(value)
        if node is None:
            return self._load(value, index, guards)
        if is_reduction(node):
            return self._row(node, value, index)
        if node.op in PLACES:
            return PLACES[node.op](self, node, index, guards)
        if node.op in WINDOWS:
            return WINDOWS[node.op](self, node, value, index, guards)
        return self._elementwise(node, index, guards)

    def _known_number(self, value: str) -> Const:
        constant = self.graph.constants[value]
        first = constant.data.flatten()[0]
        if constant.data.numel() > 1 and not bool((constant.data == first).all()):
            shape = list(constant.type.shape)
            wrong = f"the constant {value} of shape {shape} is part of the region"
            raise CannotLower(wrong, "hand it over as an input of the region")
        return Const(first.item(), KINDS[constant.type.dtype.kind])

    def _load(self, value: str, index: Index, guards: Guards) -> Arg:
        t = self.graph.types[value]
        steps = zip(index, t.shape, t.strides, strict=True)
        offset = sum((i * stride for i, size, stride in steps if size > 1), Affine())
        return self.put(Load, "v", KINDS[t.dtype.kind], value, offset, t.dtype, guards)

    def _row(self, node: Node, value: str, index: Index) -> Arg:
        """Return a reduction's result. It can be read only at the index at which the loops are."""
        if index != self._row_index(node, self.graph.types[value]):
            raise CannotLower(f"the result of {node.op} is read in another order")
        return self.once(ROWS[node.op][1], node, value)

    # ---- elementwise work

    def _elementwise(self, node: Node, index: Index, guards: Guards) -> Arg:
        def element(value: str) -> Arg:
            own = self.broadcast(index, self.graph.types[value].shape)
            return self.at(value, own, guards)

        args = [value if value is None else element(value) for value in node.inputs]
        out = self.graph.types[node.outputs[0]].dtype
        op, kind = node.op, KINDS[out.kind]
        if op not in LOGIC:
            args = self._agree(node, args, out)
        if kind == "bool" and op not in COMPARISONS and op not in LOGIC:
            if op not in BOOLEAN:
                raise CannotLower(f"{op} on bool has no scalar form")
            op = BOOLEAN[op]
        elif kind == "int" and op not in WHOLE:
            raise CannotLower(f"{op} on {out.short} has no scalar form", "cast to a float first")
        attrs = dict(node.attrs)
        if kind == "int" and op == "clamp":  # its bounds are numbers of that type
            given = {k: Const(v, "float") for k, v in attrs.items() if v is not None}
            attrs |= {k: _converted_number(v, out).value for k, v in given.items()}
        if kind == "int" and op in UNCHANGED:
            result: Any = args[0]
        elif op in BOOLEAN.values() and op != "where":
            result = self.op(op, *args, kind=kind)
        else:
            result = self.formula(op, *args, **attrs)
        if kind == "int" and self.kind(result) != "int":
            result = self.op("to_int", result, kind="int")
        return self._wrapped(result, out) if op in OVERFLOWS else result

    def broadcast(self, index: Index, shape: Shape) -> Index:
        """``index`` for an operand of ``shape`` that is stretched to the result."""
        tail = index[len(index) - len(shape) :]
        return tuple(Affine() if n == 1 else i for n, i in zip(shape, tail, strict=True))

    def _agree(self, node: Node, args: Sequence[Arg | None], out: DType) -> list[Arg | None]:
        """Convert operands to their common type (the condition of where stays a bool)."""
        start = 1 if node.op == "where" else 0
        given = [None if v is None else self.graph.types[v] for v in node.inputs]
        common = promoted(*given[start:]) if node.op in COMPARISONS else out
        return [
            a if a is None or t is None or i < start else self.converted(a, t.dtype, common)
            for i, (a, t) in enumerate(zip(args, given, strict=True))
        ]

    def converted(self, a: Arg, given: DType, out: DType) -> Arg:
        """Convert ``a`` from type ``given`` to type ``out``: floats are not rounded, integers are,
        or wrap around."""
        if isinstance(a, Const):
            return _converted_number(a, out)
        if out.is_float:
            exact = self.kind(a) != "int" or given.bits == 8 or not out.is_low
            return self.as_float(a) if exact else self.rounded(self.as_float(a), out)
        if out.kind == "bool":
            return a if self.kind(a) == "bool" else self.op("to_bool", a, kind="bool")
        if self.kind(a) != "int":
            a = self.op("to_int", a, kind="int")
        wider = given.bits < out.bits and (given.kind, out.kind) != ("int", "uint")
        return a if given.kind == "bool" or wider or given == out else self._wrapped(a, out)

    def rounded(self, a: Arg, dtype: DType) -> Arg:
        return self.op("rounded", a, kind="float", attrs=(("dtype", dtype.short),))

    def _wrapped(self, a: Arg, dtype: DType) -> Arg:
        """Wrap a number around to the range of ``dtype``: arithmetic has 64 bits."""
        if dtype.kind not in ("int", "uint") or dtype.bits == 64:
            return a
        if isinstance(a, Const):
            return _converted_number(a, dtype)
        return self.op("wrapped", a, kind="int", attrs=(("dtype", dtype.short),))

    def as_float(self, a: Arg) -> Arg:
        if isinstance(a, Const):
            return Const(float(a.value), "float")
        return a if self.kind(a) == "float" else self.op("to_float", a, kind="float")

    def affine(self, node: Node, slot: int, y: Arg, index: Index, guards: Guards) -> Arg:
        """y · weight + bias, inputs ``slot`` and the one after it; either may be absent."""
        for at, op in ((slot, "mul"), (slot + 1, "add")):
            if has_input(node, at):
                y = self.op(op, y, self.float_at(self.input(node, at), index, guards))
        return y

    # ---- statements

    def put(self, make: Callable[..., Statement], letter: str, kind: str, *given: Any) -> str:
        """Add a statement that makes a value of this kind, and return the value's name."""
        name = self.name(letter, kind)
        self.statements.append(make(name, *given))
        return name

    def inside(self, guards: Guards) -> Arg:
        return self.once(Lowering.put, scalar.Inside, "g", "bool", guards)

    def position(self, index: Affine) -> Arg:
        """An index as a number."""
        if not index.terms:
            return Const(index.const, "int")
        return self.once(Lowering.put, scalar.Position, "p", "int", index)

    def dynamic(self, value: Arg, size: int, given: bool = True) -> Affine:
        """Return a number below ``size`` as an index; ``given`` by a caller, who may be wrong
        there."""
        if isinstance(value, Const):
            return Affine(int(value.value))
        return Affine.var(Dynamic(value, size, given))

    def reduce(self, op: str, source: Arg, seldom: Arg = "") -> Arg:
        """One number per row from the element ``source``; see :class:`Reduce` for ``seldom``."""
        if isinstance(source, Const):  # a constant summed over a row: give it a name first
            source = self.op("select", Const(True, "bool"), source, source, kind=source.kind)
        assert isinstance(source, str) and isinstance(seldom, str)
        kind = self.kind(source)
        return self.put(Reduce, "m", kind, op, source, kind, seldom)


def _converted_number(a: Const, out: DType) -> Const:
    if out.is_float or out.kind == "bool":
        return scalar.number(a.value, out.kind)
    value = int(a.value) & ((1 << out.bits) - 1)
    if out.kind == "int" and value >> (out.bits - 1):
        value -= 1 << out.bits
    return Const(value, "int")
