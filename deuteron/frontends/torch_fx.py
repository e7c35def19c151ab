"""From a graph of ATen calls to a graph of ours, one call at a time.

The calls come from torch.export or torch.compile: functional (nothing is written to), with the type
of every result in ``node.meta["val"]``. Each is tried in this order:

1. It checks something and computes nothing: dropped.
2. It depends on no input of the graph: computed now, once.
3. The ATen table has an entry, or the caller brought one for operators of its own, and what the
   entry emits has the shape and type torch says: ours.
4. Otherwise it stays an ATen call, the opaque operator ``aten``, and the reason is kept.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from deuteron.errors import DeuteronError, GraphError
from deuteron.frontends import aten_sparse
from deuteron.frontends import torch_fx_facts as facts
from deuteron.frontends.aten import FILLS, SILENT, TABLE, Entry, Inexpressible, Site, schema_order
from deuteron.frontends.aten_sparse import Sparse
from deuteron.frontends.sparse import is_sparse
from deuteron.frontends.torch_fx_facts import Argument, Known
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import dtype
from deuteron.ir.graph import Constant, Graph, place_of
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.emit import Sym
from deuteron.ops.opaque import CALLED, STRIDES, encode, goes_by_memory
from deuteron.passes.cleanup import dead_code

_CONTROL = "keep control flow such as torch.cond outside the part that is imported"


def is_plain(target: Any, entries: Mapping[str, Entry] = TABLE) -> bool:
    """Whether a call only computes new values, and the table knows it as it is."""
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return str(target) in entries or str(target) in FILLS or str(target) in SILENT


def _reads(arguments: Any) -> bool:
    """Whether a value that is only known when the graph runs is among the arguments."""
    return any(isinstance(v, Sym) for v in pytree.tree_leaves(arguments))


class Importer:
    """Walks an fx graph and writes ours.

    Say what the placeholders are (:meth:`input`, :meth:`weight`, :meth:`bind`), then
    :meth:`run`; afterwards :meth:`value` has the result of any node. ``why`` has a reason for
    each kind of call that stayed ATen's; ``mismatches`` lists the results whose type we inferred
    otherwise than torch, which is a fault of ours, answered by keeping the ATen call.
    """

    def __init__(self, name: str, entries: Mapping[str, Entry] = TABLE) -> None:
        self.build, self.entries = GraphBuilder(table.infer, name), entries
        self.why: dict[str, str] = {}
        self.mismatches: list[str] = []
        self._env: dict[fx.Node, Any] = {}
        self._entered: dict[Known, Sym | Sparse] = {}
        self._known: dict[str, torch.Tensor] = {}
        self._weights: dict[object, Sym] = {}
        self._norms: dict[tuple[str, str], float] = {}
        self._losses: dict[str, Any] = {}
        self._site = Site(self.build)
        self.line = ""  # where forward asks for a value, if the tracer knows it

    # ---- placeholders, and what comes out

    def input(self, node: fx.Node, name: str, tensor: torch.Tensor) -> str:
        """Make a placeholder an input of the graph, with the strides of ``tensor``."""
        value = self.build.input(name, TensorType.from_tensor(tensor))
        self._env[node] = self._site.sym(value)
        return value

    def weight(self, node: fx.Node, name: str, tensor: torch.Tensor) -> None:
        """Make a placeholder a constant; the same tensor under two names is one constant."""
        if is_sparse(tensor):
            self._env[node] = Known(tensor, name)
            return
        seen = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        key = (place_of(tensor), *seen, tensor.is_conj(), tensor.is_neg())
        if key not in self._weights or not tensor.numel():
            try:
                constant = Constant(tensor)
            except GraphError:  # an element type of torch's own, with which torch can compute
                self._env[node] = Known(tensor, name)
                return
            self._weights[key] = self._site.sym(self.build.constant(constant, name))
        self._env[node] = self._weights[key]

    def bind(self, node: fx.Node, value: Any) -> None:
        """Make a placeholder something known now: a number, None, a :class:`Known`."""
        self._env[node] = value

    def value(self, arg: Any) -> Any:
        """An argument of a node, with nodes replaced by their values."""
        return map_arg(arg, self._env.get)

    def entered(self, value: Any) -> Any:
        """``value`` with every :class:`Known` in it made a constant of the graph."""
        if isinstance(value, list | tuple):
            return [self.entered(v) for v in value]
        if isinstance(value, Known):
            if value not in self._entered:
                self._entered[value] = self._enter(value)
            return self._entered[value]
        return value

    def output(self, name: str, node: fx.Node) -> Any:
        """Make the value of a node an output of the graph, if it is a tensor, and return it. A
        number that was expanded to a whole tensor is written out: whoever gets the result may write
        to it."""
        value = self.entered(self.value(node))
        if isinstance(value, Sym):
            promised: Any = getattr(node.meta.get("val"), "stride", tuple)()
            if 0 in value.type.strides and 0 not in promised:
                value = value.ops.one("to_layout", value, layout="contiguous")
            self.build.output(name, value.name)
        return value

    def finish(self) -> Graph:
        """The graph of everything that the outputs need."""
        return dead_code(self.build.finish())

    # ---- the walk

    def run(self, nodes: Iterable[fx.Node]) -> None:
        nodes = list(nodes)
        checks = facts.only_checked(nodes)
        for node in nodes:
            if node.op in ("placeholder", "output") or node in checks:
                continue
            source = facts.source_of(node)
            try:
                self._env[node] = self._convert(node, source)
            except DeuteronError as error:
                line = facts.line_of(node) or self.line
                raise error.at(line or source or f"node {node.name!r}") from None

    def _convert(self, node: fx.Node, source: str) -> Any:
        target = node.target
        if not isinstance(target, OpOverload):
            return self._not_a_call(node)
        name, seen = str(target), facts.results(node)
        if name.endswith("_ex.default"):
            facts.check_at_once(node)
        if not any(isinstance(t, torch.Tensor) for t in seen):
            return self._number(node)
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        ordered = schema_order(target, args, kwargs)
        if name in FILLS:
            how = {"dtype": seen[0].dtype, "device": seen[0].device}
            return Known(torch.full((), FILLS[name](ordered), **how).expand(seen[0].shape))
        sparse = [k for k in pytree.tree_leaves(ordered) if isinstance(k, Known) and k.is_sparse]
        if (sparse or facts.deterministic(node)) and not _reads(ordered):
            return facts.computed(target, args, kwargs)
        if sparse:
            return self._with_sparse(node, ordered, source)
        facts.one_device(node, self._env)
        facts.see_inside(node)
        used = facts.used_results(node)
        want = [facts.type_of(t, needed=i in used) for i, t in enumerate(seen)]
        why = "the ATen table has no entry for it"
        beyond = any(isinstance(v, complex) for v in pytree.tree_leaves(ordered))
        if beyond:
            why = "a complex number among its arguments"
        elif name in self.entries:
            given = self.entered(ordered)
            named = {a.name: v for a, v in zip(target._schema.arguments, given, strict=True)}
            site = Site(self.build, source, want, used, named, self._norms, self._losses)
            site.row_major = facts.row_major(node)
            try:
                answer = self.entries[name](site, *given)
                results = answer if isinstance(answer, tuple) else (answer,)
                results += (None,) * (len(want) - len(results))
                self._check(name, results, want, used)
                return results if isinstance(node.meta["val"], list | tuple) else answer
            except (Inexpressible, GraphError) as reason:
                why = str(reason).splitlines()[0]
        fixed = pytree.tree_map_only(Sym, self._fixed, (args, kwargs))
        if facts.deterministic(node) and not _reads(fixed):  # it reads only weights
            return facts.computed(target, *fixed)
        return self._opaque(node, why, source)

    def _with_sparse(self, node: fx.Node, ordered: list[Any], source: str) -> Any:
        """Convert a call of a sparse tensor and a value of the graph: a product, or it is
        refused."""
        name, given = str(node.target), self.entered(ordered)
        site = Site(self.build, source, [facts.type_of(t) for t in facts.results(node)])
        try:
            if name not in aten_sparse.TABLE:
                raise Inexpressible("it is no product")
            answer = aten_sparse.TABLE[name](site, *given)
            self._check(name, (answer,), list(site.want), {0})
            return answer
        except Inexpressible as reason:
            several = [v for v in pytree.tree_leaves(given) if isinstance(v, Sparse)]
            aten_sparse.refuse(name, several, str(reason))

    def _check(
        self, name: str, got: Sequence[Any], want: facts.Results, used: Iterable[int]
    ) -> None:
        """Check that every result that is read is there, and has the shape and type that torch
        says."""
        for index in sorted(used):
            said, have = want[index], got[index]
            if said is None:
                continue
            if have is None:
                raise Inexpressible(f"result {index} is used")
            if (have.shape, have.dtype) != (said.shape, said.dtype):
                wrong = f"Deuteron infers {have.type}, torch {said}"
                self.mismatches.append(f"{name}: {wrong}")
                raise Inexpressible(wrong)

    # ---- what is not a call on tensors

    def _not_a_call(self, node: fx.Node) -> Any:
        """Picking one of several results, or arithmetic on sizes, which are plain numbers."""
        target, args = node.target, self.value(node.args)
        if node.op == "get_attr":  # the body of a control-flow call, which is refused below
            return None
        if target is facts.EFFECT:  # results that follow a token, which such calls pass on
            if facts.is_checked_at_once(node):
                return (args[0],)
            wrong = f"{args[1]} does more than to compute its results, which a plan would leave out"
            raise GraphError(wrong, remedy="call it outside of what is compiled")
        if target is operator.getitem and isinstance(args[0], list | tuple):
            return args[0][args[1]]
        if node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor):
            if callable(target) and all(isinstance(a, bool | int | float) for a in args):
                return target(*args)
            if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                return self._number(node)
        what = getattr(target, "__name__", str(target))
        raise GraphError(f"{what!r} is not an operation on tensors", remedy=_CONTROL)

    def _number(self, node: fx.Node) -> Any:
        """The answer of a call whose result is no tensor; it must be known by now."""
        value = node.meta.get("val")
        if value is None or isinstance(value, bool | int | float):
            return value
        wrong = f"{node.target} gives a number that is only known when the model runs"
        remedy = "keep it a tensor, without item() or tolist(), or hand it in as a number"
        raise GraphError(wrong, remedy=remedy)

    # ---- constants

    def _enter(self, known: Known) -> Sym | Sparse:
        """Make a tensor a constant; one that is the same number everywhere is stored as that number
        and expanded."""
        tensor, site = known.tensor, self._site
        if known.is_sparse:
            return Sparse(site, tensor, known.name)
        ours = not dtype(tensor.dtype).is_foreign  # other element types cannot be expanded
        if ours and tensor.ndim and tensor.numel() > 1 and facts.uniform(tensor):
            corner = tensor[(slice(1),) * tensor.ndim]
            one = corner.clone(memory_format=torch.contiguous_format)
            found = site.stretched(site.constant(one, known.name), tensor.shape)
        else:
            whole = ours or 0 not in tensor.stride()
            found = site.constant(tensor if whole else tensor.contiguous(), known.name)
        self._known[found.name] = tensor
        return found

    def _fixed(self, value: Sym) -> Sym | Known:
        """A value that depends on no input of the graph, as the tensor it is."""
        constant = self.build.constants.get(value.name)
        tensor = self._known.get(value.name) if constant is None else constant.data
        return value if tensor is None else Known(tensor)

    # ---- the ATen call itself

    def _opaque(self, node: fx.Node, why: str, source: str) -> Any:
        name, site = str(node.target), Site(self.build, source)
        CALLED.add(name)
        strided = goes_by_memory(name)  # refuses, with a reason, what may not be kept in a graph
        names: list[str] = []
        inputs: list[Argument] = []

        def find(value: Any) -> str | None:
            if not isinstance(value, Argument):
                return None
            inputs.append(facts.in_seen_order(site, value, name in STRIDES) if strided else value)
            return inputs[-1].sym.name

        args = tuple(encode(a, names, find) for a in map_arg(node.args, self._argument))
        named = map_arg(node.kwargs, self._argument)
        kwargs = tuple((k, encode(a, names, find)) for k, a in named.items())
        for made in facts.results(node):
            encode(getattr(made, "layout", None), names, find)  # refuses a sparse result
        want = [facts.type_of(t) for t in facts.results(node)]
        if not all(facts.seen_as_is(i) for i in inputs):
            want = facts.infer_again(node, inputs, want)
        present = [t for t in want if t is not None]
        attrs = {"target": name, "args": args, "kwargs": kwargs, "out": tuple(map(str, present))}
        if strided:
            attrs["seen"] = tuple(str(self.build.types[v]) for v in names)
        called = [self.build.fresh(name.split(".")[1].strip("_")) for _ in present]
        outs = self.build.emit("aten", names, attrs, source=source, names=called)
        self.why[name] = why
        syms = iter([site.sym(out) for out in outs])
        answer = tuple(None if t is None else next(syms) for t in want)
        return answer if isinstance(node.meta["val"], list | tuple) else answer[0]

    def _argument(self, node: fx.Node) -> Any:
        """The value of a node, with its tensors as :class:`Argument`."""
        value = self.entered(self._env.get(node))
        if isinstance(value, list):
            return [Argument(v, None) if isinstance(v, Sym) else v for v in value]
        return Argument(value, node.meta.get("val")) if isinstance(value, Sym) else value
