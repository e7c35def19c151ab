"""The one way to make a graph: emit nodes in order; types are inferred as nodes are added."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from deuteron.errors import DeuteronError, GraphError
from deuteron.ir.graph import Attrs, Constant, Graph, Node
from deuteron.ir.types import TensorType

Types = tuple[TensorType, ...]


class Infer(Protocol):
    """Check one operation; return its completed attributes and the types of its results."""

    def __call__(
        self, op: str, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]
    ) -> tuple[Attrs, Types]: ...


class GraphBuilder:
    """Collects inputs, constants, nodes and outputs, and finishes with a frozen Graph."""

    def __init__(self, infer: Infer, name: str = "graph") -> None:
        self.infer, self.name = infer, name
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node] = []
        self.inputs: list[str] = []
        self.outputs: dict[str, str] = {}  # public name → value
        self.producer: dict[str, Node] = {}
        self._next: dict[str, int] = {}
        self._scalars: dict[tuple[str, str], str] = {}

    def fresh(self, prefix: str) -> str:
        """A value name not yet taken: ``relu``, ``relu_1``, ``relu_2`` …"""
        number = self._next.get(prefix, 0)
        while (name := f"{prefix}_{number}" if number else prefix) in self.types:
            number += 1
        self._next[prefix] = number + 1
        return name

    def input(self, name: str, type_: TensorType) -> str:
        if name in self.types:
            wrong, asked = f"the name {name!r} is taken", f"input {name}: {type_}"
            raise GraphError(wrong, asked=asked, remedy="rename it")
        self.types[name] = type_
        self.inputs.append(name)
        return name

    def constant(self, data: torch.Tensor | Constant, name: str = "const") -> str:
        """Add a tensor known now. Equal scalars share one value."""
        const = data if isinstance(data, Constant) else Constant(data)
        if const.is_scalar and not isinstance(data, Constant):
            key = (const.type.dtype.short, repr(const.data.item()))
            if key not in self._scalars:
                self._scalars[key] = self._add_constant(const, "k")
            return self._scalars[key]
        return self._add_constant(const, name)

    def _add_constant(self, const: Constant, name: str) -> str:
        value = self.fresh(name)
        self.types[value] = const.type
        self.constants[value] = const
        return value

    def emit(
        self,
        op: str,
        inputs: Sequence[str | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        source: str = "",
        names: Sequence[str] | None = None,
    ) -> tuple[str, ...]:
        """Append ``op(inputs, **attrs)``; return the names of its results."""
        ins = tuple(inputs)
        for value in ins:
            if value is not None and value not in self.types:
                raise GraphError(f"no value {value!r} in graph {self.name!r}", asked=f"{op}(…)")
        types = [None if v is None else self.types[v] for v in ins]
        try:
            full, results = self.infer(op, types, attrs or {})
        except DeuteronError as error:
            pairs = zip(ins, types, strict=True)
            shown = ", ".join("_" if t is None else f"{v}: {t}" for v, t in pairs)
            extra = "".join(f", {k}={v!r}" for k, v in (attrs or {}).items())
            error.asked = error.asked or f"{op}({shown}{extra})"
            raise error.at(source or f"node {len(self.nodes)} of graph {self.name!r}") from None
        outs = tuple(names) if names else tuple(self.fresh(op) for _ in results)
        self._append(Node(op, ins, outs, full, source), results)
        return outs

    def copy(self, node: Node, inputs: Sequence[str | None], types: Types) -> tuple[str, ...]:
        """Append a node whose types are already known to be right."""
        outs = tuple(o if o not in self.types else self.fresh(o) for o in node.outputs)
        if (tuple(inputs), outs) != (node.inputs, node.outputs):
            node = Node(node.op, tuple(inputs), outs, node.attrs, node.source)
        self._append(node, types)
        return outs

    def follow(self, node: Node, inputs: Sequence[str | None], graph: Graph) -> tuple[str, ...]:
        """Append ``node`` of ``graph`` with new inputs; its results keep their names where these
        are free. If the inputs have the same types as in ``graph``, the result types are copied,
        else they are inferred again."""
        before = graph.in_types(node)
        if all(v is None or self.types[v] == t for v, t in zip(inputs, before, strict=True)):
            return self.copy(node, inputs, graph.out_types(node))
        names = [o if o not in self.types else self.fresh(o) for o in node.outputs]
        return self.emit(node.op, inputs, node.attrs, source=node.source, names=names)

    def _append(self, node: Node, types: Types) -> None:
        if len(types) != len(node.outputs):
            raise GraphError(f"{node.op} makes {len(types)} results, {len(node.outputs)} named")
        for i, out in enumerate(node.outputs):
            if out in self.types or out in node.outputs[:i]:
                raise GraphError(f"value {out!r} is made twice", remedy="every value is made once")
        self.nodes.append(node)
        for out, type_ in zip(node.outputs, types, strict=True):
            self.types[out] = type_
            self.producer[out] = node

    def output(self, name: str, value: str) -> None:
        if value not in self.types:
            raise GraphError(f"output {name!r} is the unknown value {value!r}")
        if name in self.outputs:
            wrong = f"there is already an output {name!r}"
            raise GraphError(wrong, remedy="give each output its own name")
        self.outputs[name] = value

    def finish(self) -> Graph:
        inputs, outputs = tuple(self.inputs), tuple(self.outputs.items())
        nodes = tuple(self.nodes)
        return Graph(self.name, inputs, outputs, nodes, dict(self.types), dict(self.constants))
