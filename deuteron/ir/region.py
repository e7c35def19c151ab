"""A region: a piece of a graph that one engine runs as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from deuteron.ir.graph import Graph, Node


@dataclass(frozen=True)
class Region:
    """A self-contained graph, its heaviest node, and which of its inputs never change.

    ``constants`` names inputs whose tensors are known when a plan is built, so that an engine
    may pack or transpose them once. ``anchor`` is the index of the node that decides how the
    region is run (a product or a reduction), or None for pure elementwise work.
    """

    graph: Graph
    constants: frozenset[str] = frozenset()
    anchor: int | None = None

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.graph.inputs

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.graph.outputs)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.op for node in self.nodes)

    @cached_property
    def text(self) -> str:
        """The region with its values renumbered: equal for equal work, whatever the names."""
        return canonical_text(self.graph, self.constants)

    @cached_property
    def key(self) -> str:
        """A short digest of :attr:`text`, under which measurements are remembered."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def plain(self) -> Region:
        """The region with its values named as in :attr:`text`, so that regions that do equal work
        are equal."""
        names = _numbered(self.graph)
        constants = frozenset(names[v] for v in self.constants)
        return Region(self.graph.renamed("region", names), constants, self.anchor)

    def named(self, name: str) -> Region:
        return self if self.name == name else replace(self, graph=replace(self.graph, name=name))

    def part(self, name: str, nodes: Sequence[Node], anchor: int | None) -> Region:
        """A smaller region of some of these nodes. It is cached, because the search for the best
        way to cut a region asks for the same parts again and again."""
        key = name, anchor, *(node.outputs for node in nodes)
        if key not in self._parts:
            graph = self.graph.subgraph(name, nodes)
            constants = frozenset(v for v in graph.inputs if v in self.constants)
            self._parts[key] = Region(graph, constants, anchor)
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[object, Region]:
        return {}


def _numbered(graph: Graph) -> dict[str, str]:
    """Map every value to a name that tells only its kind (a: input, k: constant, v: result of a
    node) and its position."""
    made = (out for node in graph.nodes for out in node.outputs)
    kinds = (("a", graph.inputs), ("k", graph.constants), ("v", made))
    values = [(kind, value) for kind, those in kinds for value in those]
    return {value: f"{kind}{i}" for i, (kind, value) in enumerate(values)}


def canonical_text(graph: Graph, constants: frozenset[str]) -> str:
    """Text of a graph with its values renumbered; inputs that are constants are marked ``!``."""
    names = _numbered(graph)
    lines = []
    for value in graph.inputs:
        lines.append(f"{names[value]}{'!' * (value in constants)}: {graph.types[value]}")
    for value, constant in graph.constants.items():
        lines.append(f"{names[value]}: {constant.type} = {constant.data.tolist()!r}")
    for node in graph.nodes:
        args = [names[v] if v is not None else "_" for v in node.inputs]
        args += [f"{k}={v!r}" for k, v in sorted(node.attrs.items())]
        outs = ", ".join(f"{names[o]}: {graph.types[o]}" for o in node.outputs)
        by = f" by {', '.join(node.engines)}" if node.engines else ""
        lines.append(f"{outs} = {node.op}({', '.join(args)}){by}")
    lines.append("return " + ", ".join(names[v] for _, v in graph.outputs))
    return "\n".join(lines)
