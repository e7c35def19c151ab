"""Objects that hold tensors and change when a module is called: the caches of language models.

A graph takes tensors and gives tensors. So an object among a module's arguments is taken apart
before the call, into its tensors and everything else that it holds, and put together again for the
module. What it holds after the call becomes further results, which :meth:`Opened.update` puts into
the object that the caller gave: for the caller, it has changed as the module would have changed it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.errors import GraphError

WHOLE = (torch.Tensor, nn.Module, torch.Generator, Enum, ModuleType, str, int, float, complex)


@dataclass(frozen=True)
class Parts:
    """How an object is made: its class, and what it holds, by name: further :class:`Parts`, the
    place of a leaf, or a :class:`Value`."""

    kind: type
    held: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Value:
    """Something that is no tensor."""

    value: Any


class Opened:
    """An object taken apart: a container that pytree knows. Its leaves are tensors and, in
    arguments, also the numbers and texts that it consists of."""

    def __init__(self, parts: Any, leaves: Sequence[Any], paths: tuple[str, ...]) -> None:
        self.parts, self.leaves, self.paths = parts, list(leaves), paths

    @staticmethod
    def of(holder: Any, only_tensors: bool = False) -> Opened:
        leaves: list[Any] = []
        paths: list[str] = []
        inside: list[int] = []

        def part(value: Any, path: str) -> Any:
            if not _has_parts(value):
                if not isinstance(value, torch.Tensor) and (only_tensors or not _is_basic(value)):
                    return Value(value)
                leaves.append(value)
                paths.append(path)
                return len(leaves) - 1
            if id(value) in inside:
                wrong = f"a {type(holder).__name__} holds itself, at {path}"
                raise GraphError(wrong, remedy="pass the tensors that it holds instead")
            inside.append(id(value))
            held = tuple((key, part(one, path + at)) for key, one, at in _parts(value))
            inside.pop()
            return Parts(type(value), held)

        return Opened(part(holder, ""), leaves, tuple(paths))

    def closed(self) -> Any:
        """The object, with the leaves that it has now."""

        def made(part: Any) -> Any:
            return _made(part, made) if isinstance(part, Parts) else self._leaf(part)

        return made(self.parts)

    def _leaf(self, part: Any) -> Any:
        return part.value if isinstance(part, Value) else self.leaves[part]

    def update(self, holder: Any) -> None:
        """Make an object hold what this one holds, down to the objects that it consists of."""

        def put(part: Any, old: Any) -> Any:
            if not isinstance(part, Parts):
                return self._leaf(part)
            before = {key: value for key, value, _ in _parts(old)} if _has_parts(old) else {}
            parts = {key: put(inner, before.get(key)) for key, inner in part.held}
            if type(old) is not part.kind or isinstance(old, tuple):
                return _made(Parts(part.kind, tuple(parts.items())), lambda p: p)
            if isinstance(old, list):
                old[:] = parts.values()
            elif isinstance(old, dict):
                old.clear()
                old.update(parts)
            else:
                old.__dict__.clear()
                old.__dict__.update(parts)
            return old

        put(self.parts, holder)


@dataclass(frozen=True)
class Given:
    """Stands for an object that came before. ``place`` is its number: first the caller's objects
    are counted, then others in the order in which they came."""

    place: int


def is_state(value: Any) -> bool:
    """Whether a leaf of a call is an object with parts that may be tensors."""
    plain = isinstance(value, list | tuple | dict | Given | Opened)
    return not plain and _has_parts(value)


def opened(tree: Any) -> tuple[Any, list[Any]]:
    """Return arguments with all such objects taken apart, and these objects, each once."""
    found: list[Any] = []

    def opening(leaf: Any) -> Any:
        if isinstance(leaf, Opened):
            found.append(leaf)
        if not is_state(leaf):
            return leaf
        for place, known in enumerate(found):
            if known is leaf:
                return Given(place)
        found.append(leaf)
        return Opened.of(leaf)

    return pytree.tree_map(opening, tree, is_leaf=_is_ours), found


def holds_state(tree: Any) -> bool:
    """Whether there is such an object in a call."""
    return any(map(is_state, pytree.tree_leaves(tree)))


def _is_ours(value: Any) -> bool:
    return isinstance(value, Opened | Given)


class HoldsState(Exception):
    """A module returns an object that has to be taken apart."""


class Stateless(nn.Module):
    """A module as a function of plain containers: it takes objects that are taken apart, and
    returns its result and what these objects hold afterwards."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)

        @functools.wraps(module.forward)  # keeps the names of its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._called(args, kwargs)

        self.forward = forward
        # errors speak of the module, and torch.export finds its parts under their own names
        self.__class__ = type(type(module).__name__, (Stateless,), {})

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_modules"].get("module")
        return found if name == "module" else getattr(found, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """With the names that the module itself gives to its parts."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _called(self, args: Any, kwargs: Any) -> Any:
        states: list[Any] = []

        def closing(leaf: Any) -> Any:
            if isinstance(leaf, Opened):
                own = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaf.leaves]
                states.append(Opened(leaf.parts, own, leaf.paths).closed())
                return states[-1]
            return states[leaf.place] if isinstance(leaf, Given) else leaf

        args, kwargs = pytree.tree_map(closing, (args, kwargs), is_leaf=_is_ours)
        return given_back(self.module(*args, **kwargs), states)


def given_back(result: Any, states: Sequence[Any] = ()) -> Any:
    """Return a module's result with objects that it made taken apart, each once, and what the
    caller's objects, ``states``, hold now."""
    known = list(states)

    def opening(leaf: Any) -> Any:
        if not is_state(leaf):
            return leaf
        for place, state in enumerate(known):
            if leaf is state:
                return Given(place)
        known.append(leaf)
        return Opened.of(leaf, only_tensors=True)

    after = [Opened.of(state, only_tensors=True) for state in states]
    return pytree.tree_map(opening, result), after


def closed(result: Any, given: Sequence[Any]) -> Any:
    """Return what the module would have returned: its own objects are put together, and the
    caller's objects are updated."""
    answer, after = result
    for holder, new in zip(given, after, strict=True):
        new.update(holder)
    known = list(given)

    def closing(leaf: Any) -> Any:
        if isinstance(leaf, Given):
            return known[leaf.place]
        if isinstance(leaf, Opened):
            known.append(leaf.closed())
            return known[-1]
        return leaf

    return pytree.tree_map(closing, answer, is_leaf=_is_ours)


# ---- what an object consists of


def _is_basic(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _has_parts(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return True
    whole = isinstance(value, WHOLE) or callable(value)
    return not whole and hasattr(value, "__dict__") and _is_open(value.__class__)


@functools.cache
def _is_open(kind: Any) -> bool:
    """Whether objects of a class consist of their attributes, and of nothing that Python does not
    see. Classes that define how they are copied may hold more."""
    ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    usual = all(getattr(kind, way) is getattr(object, way) for way in ways)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return usual and not slots


def _parts(value: Any) -> Iterator[tuple[Any, Any, str]]:
    """Each part with its key, and how it is written after the whole."""
    if isinstance(value, list | tuple):
        yield from ((i, one, f"[{i}]") for i, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((key, one, f"[{key!r}]") for key, one in value.items())
    else:
        yield from ((name, one, f".{name}") for name, one in vars(value).items())


def _made(parts: Parts, make: Any) -> Any:
    held = {key: make(part) for key, part in parts.held}
    if issubclass(parts.kind, list | tuple):
        fields = hasattr(parts.kind, "_fields")
        return parts.kind(*held.values()) if fields else parts.kind(held.values())
    whole = parts.kind.__new__(parts.kind)
    (whole if isinstance(whole, dict) else whole.__dict__).update(held)
    return whole


def _flatten(o: Opened) -> tuple[list[Any], Any]:
    return o.leaves, (o.parts, o.paths)


def _flatten_with_keys(o: Opened) -> tuple[list[Any], Any]:
    keys: list[Any] = [pytree.MappingKey(path.removeprefix(".")) for path in o.paths]
    return list(zip(keys, o.leaves, strict=True)), (o.parts, o.paths)


def _unflatten(leaves: Any, how: tuple[Any, Mapping[str, Any]]) -> Opened:
    return Opened(how[0], leaves, how[1])  # type: ignore[arg-type]


pytree.register_pytree_node(
    Given,
    lambda given: ([], given.place),
    lambda _, place: Given(place),
    serialized_type_name="deuteron.frontends.state.Given",
    flatten_with_keys_fn=lambda given: ([], given.place),
)
pytree.register_pytree_node(
    Opened,
    _flatten,
    _unflatten,
    serialized_type_name="deuteron.frontends.state.Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)
