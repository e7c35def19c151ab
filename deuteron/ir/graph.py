"""Nodes and graphs: frozen, named values, each assigned once.

A graph never changes. Passes build a new one through :class:`deuteron.ir.builder.GraphBuilder`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch

from deuteron.ir.types import TensorType


class Attrs(Mapping[str, Any]):
    """An immutable, hashable mapping from attribute name to a plain value."""

    __slots__ = ("_items", "_text")

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items: dict[str, Any] = dict(items or {})
        self._text: str | None = None

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attrs):
            return NotImplemented
        return self is other or self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """Equal for equal attributes: 1 and 1.0 are two, and nan is one."""
        if self._text is None:
            self._text = repr(sorted(self._items.items()))
        return self._text

    def __repr__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self._items.items())


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: ``outputs = op(inputs, **attrs)``. ``None`` is an optional input left out."""

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=Attrs)
    source: str = field(default="", compare=False)  # where it came from: a module path, a line
    engines: tuple[str, ...] = ()  # who may run it, or may not, where a policy says so of it alone

    @property
    def output(self) -> str:
        """The only output of a one-output node."""
        (only,) = self.outputs
        return only

    @property
    def uses(self) -> tuple[str, ...]:
        """The inputs that are present."""
        if None in self.inputs:
            return tuple(v for v in self.inputs if v is not None)
        return cast("tuple[str, ...]", self.inputs)  # asked for all the time


class Constant:
    """A tensor whose value is known when the graph is compiled: a weight, a table, a scalar.

    Two constants are equal when type and content are; the content is hashed once, on demand.
    """

    __slots__ = ("__weakref__", "_digest", "data", "type")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.detach().resolve_conj().resolve_neg()  # signs that memory does not hold
        self.type = TensorType.from_tensor(self.data)
        if not self.type.is_dense:  # an expanded or sliced tensor is stored on its own
            self.data = self.data.contiguous()
            self.type = TensorType.from_tensor(self.data)
        self._digest: str | None = None

    @property
    def is_scalar(self) -> bool:
        return self.data.ndim == 0

    @property
    def digest(self) -> str:
        if self._digest is None:
            flat = torch.empty(self.type.shape, dtype=self.data.dtype).copy_(self.data).reshape(-1)
            raw = _bytes(flat) if flat.numel() else b""
            head = f"{self.type.dtype.short}{list(self.type.shape)}".encode()
            self._digest = hashlib.sha256(head + raw).hexdigest()
        return self._digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        if self.data is other.data:
            return True
        return self.type == other.type and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"Constant({self.type})"


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin: the same for tensors that share memory. On the device
    meta, where every address is 0, the storage and the offset in it say so."""
    if tensor.is_meta:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    return tensor.data_ptr(), 0


def number_of(constants: Mapping[str, Constant], value: str | None) -> float | int | bool | None:
    """The Python number behind a constant of rank 0, else None."""
    constant = constants.get(value or "")
    if constant is None or not constant.is_scalar:
        return None
    number: float | int | bool = constant.data.item()
    return number


def _bytes(flat: torch.Tensor) -> bytes:
    """The content of a fresh tensor. A machine may write NaN in many ways: here it is one."""
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    raw = flat.view(torch.uint8)
    if flat.is_floating_point():
        nan = flat.float().isnan()
        if nan.any():
            raw.view(flat.numel(), -1)[nan] = 0xFF
    return raw.numpy().tobytes()


@dataclass(frozen=True)
class Graph:
    """A list of nodes in an order that runs, with its inputs, constants, types and outputs."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]  # (public name, value)
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, Constant]

    @cached_property
    def producer(self) -> dict[str, Node]:
        """Value name → the node that makes it (inputs and constants have none)."""
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def places(self) -> dict[str, int]:
        """Value name → the place of the node that makes it."""
        return {out: i for i, node in enumerate(self.nodes) for out in node.outputs}

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """Value name → the nodes that read it, in order, each listed once."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.uses):
                found.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    @cached_property
    def output_values(self) -> frozenset[str]:
        return frozenset(value for _, value in self.outputs)

    def in_types(self, node: Node) -> tuple[TensorType | None, ...]:
        return tuple(None if v is None else self.types[v] for v in node.inputs)

    def out_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.types[v] for v in node.outputs)

    def scalar(self, value: str | None) -> float | int | bool | None:
        """The Python number behind a rank-0 constant, else None."""
        return number_of(self.constants, value)

    def renamed(self, name: str, names: Mapping[str, str]) -> Graph:
        """The same graph with another name, its values and results under other names, too."""
        nodes = tuple(
            replace(
                node,
                inputs=tuple(None if v is None else names[v] for v in node.inputs),
                outputs=tuple(names[v] for v in node.outputs),
            )
            for node in self.nodes
        )
        return replace(
            self,
            name=name,
            inputs=tuple(names[v] for v in self.inputs),
            outputs=tuple((names[v], names[v]) for _, v in self.outputs),
            nodes=nodes,
            types={name: self.types[v] for v, name in names.items()},
            constants={names[v]: c for v, c in self.constants.items()},
        )

    def subgraph(self, name: str, nodes: Sequence[Node]) -> Graph:
        """The graph of ``nodes`` alone: what they read from outside becomes inputs, what is
        read outside (or is an output here) becomes outputs.

        Rank-0 constants travel along, because kernels take them as literals.
        """
        made = dict.fromkeys(out for node in nodes for out in node.outputs)
        inside = {id(node) for node in nodes}
        read = dict.fromkeys(v for node in nodes for v in node.uses if v not in made)
        known = {v: self.constants[v] for v in read if v in self.constants}
        constants = {v: constant for v, constant in known.items() if constant.is_scalar}
        inputs = tuple(v for v in read if v not in constants)
        outside = {v for v in made if any(id(u) not in inside for u in self.users.get(v, ()))}
        outputs = tuple((v, v) for v in made if v in outside or v in self.output_values)
        return replace(self.only(nodes, inputs, outputs, constants), name=name)

    def only(
        self,
        nodes: Sequence[Node],
        inputs: tuple[str, ...],
        outputs: tuple[tuple[str, str], ...],
        constants: Mapping[str, Constant],
    ) -> Graph:
        """The graph of some of its parts, with the types of these alone."""
        made = (out for node in nodes for out in node.outputs)
        types = {v: self.types[v] for v in (*inputs, *constants, *made)}
        return Graph(self.name, inputs, outputs, tuple(nodes), types, constants)

    def needed(self, known: Collection[str] = ()) -> tuple[list[Node], set[str]]:
        """The nodes that the outputs need where some values are known, and all that is read."""
        live, nodes = set(self.output_values), list[Node]()
        for node in reversed(self.nodes):
            if any(out in live and out not in known for out in node.outputs):
                nodes.append(node)
                live.update(node.uses)
        return nodes[::-1], live

    def __str__(self) -> str:
        from deuteron.ir.text import print_graph

        return print_graph(self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.inputs, self.outputs, self.nodes))

    def __hash__(self) -> int:
        return self._hash
