"""``dt.Graph``: say what is to be computed, compile it, run it as often as you like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch

from deuteron import ir
from deuteron.errors import GraphError
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import DType
from deuteron.ir.rewrite import continued
from deuteron.ir.types import TensorType
from deuteron.kinds import checked
from deuteron.ops import REQUIRED, TABLE, OpDef, Ops, Sym, table
from deuteron.ops.reduce import vector_norm
from deuteron.passes import differentiate
from deuteron.plan import Cache, Plan, compile_graph
from deuteron.policy import Policy


class Graph(Ops):
    """A graph of operations, built by calling operators on handles.

    >>> g = Graph("block")
    >>> x = g.tensor("x", (32, 64, 56, 56), "f16", layout="nhwc")
    >>> w = g.tensor("w", (64, 64, 3, 3), "f16")
    >>> y = g.relu(g.conv(x, w, padding=1)).output("y")
    >>> plan = g.compile()                      # heuristic: at once
    >>> plan = g.compile(find=True)             # measured on this machine
    >>> out = plan.run(x=tx, w=tw)["y"]

    Every operator is a method; ``help(dt.Graph.conv)`` shows its inputs and attributes.
    Handles support ``+ - * / ** @`` and comparisons; Python numbers stand for scalars.
    """

    def __init__(self, name: str = "graph") -> None:
        super().__init__(GraphBuilder(table.infer, name))

    @staticmethod
    def of(graph: ir.Graph) -> Graph:
        """A builder that continues an existing graph."""
        out = Graph(graph.name)
        out.build = continued(graph, table.infer)
        out.build.outputs = dict(graph.outputs)
        return out

    @checked("dtype", name="Graph.tensor")
    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DType | torch.dtype | str = "f32",
        *,
        layout: str = "contiguous",
        strides: Sequence[int] | None = None,
    ) -> Sym:
        """Declare an input: name, shape, element type, and layout ("contiguous", "nhwc") or
        strides in elements. Tensors bound to it later must fit exactly."""
        return self.sym(self.build.input(name, TensorType.of(shape, dtype, layout, strides)))

    # ---- what several operators make, under one name

    def norm(
        self, x: Sym, p: float = 2.0, *, axes: Sequence[int] | None = None, keepdim: bool = False
    ) -> Sym:
        """(Σ |x|ᵖ)^(1/p) over ``axes``, all of them if None; for p = ±inf the largest or smallest
        |x|, for p = 0 the number of elements that are not 0."""
        along = None if axes is None else tuple(axes)
        return vector_norm(self, x, p=float(p), axes=along, keepdim=keepdim)

    def swiglu(self, gate: Sym, up: Sym) -> Sym:
        """silu(gate) · up."""
        return self.one("mul", self.silu(gate), up)

    def geglu(self, gate: Sym, up: Sym, *, approximate: str = "none") -> Sym:
        """gelu(gate) · up; ``approximate`` is gelu's, "none" or "tanh"."""
        return self.one("mul", self.gelu(gate, approximate=approximate), up)

    def reglu(self, gate: Sym, up: Sym) -> Sym:
        """relu(gate) · up."""
        return self.one("mul", self.relu(gate), up)

    def ir(self) -> ir.Graph:
        """The graph as it stands, frozen; ``print`` it to read it."""
        return self.build.finish()

    @checked("device", "policy", name="Graph.compile")
    def compile(
        self,
        *,
        device: str | torch.device | None = None,
        find: bool = False,
        budget_s: float = 10.0,
        policy: Policy | None = None,
        cache: Cache | None = None,
        interrupt: str = "raise",
        verbose: bool = False,
    ) -> Plan:
        """Make a plan for ``device`` (the GPU if there is one).

        ``find=True`` measures the candidates of every region on this machine for at most about
        ``budget_s`` seconds, and remembers; without it the choice is by estimate, at once.
        Ctrl-C raises KeyboardInterrupt, what was measured is kept, and the next search goes on from
        there; with ``interrupt="return"`` a plan by what was measured so far is returned instead.
        ``verbose`` prints what the logger "deuteron" says meanwhile.
        """
        frozen = self.ir()
        if not frozen.outputs:
            wrong = "the graph has no outputs"
            raise GraphError(wrong, asked="compile()", remedy="mark one: y.output('y')")
        search: Any = {"find": find, "budget_s": budget_s, "cache": cache, "interrupt": interrupt}
        return compile_graph(frozen, device=device, policy=policy, verbose=verbose, **search)

    @checked(name="Graph.grad")
    def grad(self, of: str | Sym, wrt: str | Sym | Sequence[str | Sym]) -> Graph:
        """A graph that also computes the gradients of output ``of``.

        It has a further output ``grad_<name>`` for each of ``wrt`` and, unless ``of`` has one
        element, a further input ``grad_<of>``. Forward and backward are planned together.
        """
        if isinstance(of, Sym):
            found = [name for name, value in self.build.outputs.items() if value == of.name]
            of = found[0] if found else of.name
        each = [wrt] if isinstance(wrt, str | Sym) else wrt
        names = [w.name if isinstance(w, Sym) else w for w in each]
        return Graph.of(differentiate(self.ir(), of, names))

    def __str__(self) -> str:
        return str(self.ir())

    def __repr__(self) -> str:
        b = self.build
        return f"<Graph {b.name!r}: {len(b.nodes)} nodes, {len(b.outputs)} outputs>"


def parameters(op: OpDef) -> Iterator[Parameter]:
    """The inputs of an operator, then its attributes as keyword-only parameters."""
    for slot in op.inputs:
        kind = Parameter.VAR_POSITIONAL if slot[0] == "*" else Parameter.POSITIONAL_OR_KEYWORD
        default = None if slot[-1] == "?" else Parameter.empty
        yield Parameter(slot.strip("*?"), kind, default=default)
    for name, attr in op.attrs.items():
        default = Parameter.empty if attr.default is REQUIRED else attr.default
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default)


def _method(op: OpDef) -> Callable[..., Any]:
    """A method for one operator, with a signature and a docstring of its own."""

    def method(self: Graph, *args: Any, **kwargs: Any) -> Any:
        return self.call(op.name, *args, **kwargs)

    lines = [op.doc, ""]
    for name, attr in op.attrs.items():
        choices = f" (one of {', '.join(attr.choices)})" if attr.choices else ""
        lines.append(f"    {name}: {attr.kind}{f'; {attr.doc}' if attr.doc else ''}{choices}")
    method.__name__, method.__qualname__ = op.name, f"Graph.{op.name}"
    method.__doc__ = "\n".join(lines).rstrip()
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    method.__signature__ = Signature([own, *parameters(op)])  # type: ignore[attr-defined]
    return method


@checked()
def register_op(op: OpDef) -> OpDef:
    """Add an operator of your own: it is inferred, checked, differentiated, fused by its class
    and priced like the built-in ones, and becomes a method of ``dt.Graph``."""
    if re.fullmatch("[a-z][a-z_0-9]*", op.name) is None:
        wrong = f"{op.name!r} is not a name for an operator"
        remedy = "use lower-case letters, digits and underscores, as in text of graphs"
        raise GraphError(wrong, asked=f"register_op({op.name!r})", remedy=remedy)
    if op.name not in TABLE and hasattr(Graph, op.name):
        wrong = f"dt.Graph has a method {op.name!r} already"
        raise GraphError(wrong, asked=f"register_op({op.name!r})", remedy="choose another name")
    method = _method(op)
    table.add(op)
    setattr(Graph, op.name, method)
    return op


for _op in TABLE.values():
    if not hasattr(Graph, _op.name):
        setattr(Graph, _op.name, _method(_op))
