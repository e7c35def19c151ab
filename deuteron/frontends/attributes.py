"""A snapshot of a module, so that what forward does to it, and to what it is given, can be seen and
undone.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.errors import GraphError
from deuteron.frontends.proxies import NeedsExport, Proxy
from deuteron.frontends.refusals import is_of_torch
from deuteron.frontends.state import Stateless

CONTAINERS = (dict, list, set, tuple, deque)


class Attributes:
    """The attributes, parameters and buffers of a module and its submodules at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._held, self._inside, self._users = [], [], {}
        self._helpers, self._kept = (
            [],
            [],
        )  # of objects that modules hold, which may change themselves as they like
        for path, m in module.named_modules():
            if isinstance(m, Stateless):
                continue  # our own wrapper; torch.export takes it for what it holds
            prefix = f"{path}." if path else ""
            hooked = any(is_of_torch(hook) for hook in m._forward_pre_hooks.values())
            self._users[prefix] = not is_of_torch(m) and not hooked
            for now in (vars(m), m._parameters, m._buffers):
                self._held.append((prefix, now, dict(now)))
                self._inside += [(prefix, *lists) for lists in _lists(now)]
            objects = ((f"{prefix}{name}.", v) for name, v in vars(m).items() if _is_helper(v))
            for inside, v in objects:
                self._users[inside] = self._users[prefix]
                self._helpers.append((inside, vars(v), dict(vars(v))))
                self._kept += [(inside, *lists) for lists in _lists(vars(v))]

    def changed(self, stand_in: type[torch.Tensor]) -> dict[str, bool]:
        """What was set to something else since, or is a list or dict whose content changed, or
        holds a stand-in; and whether code of the user's did that. torch's own modules may keep what
        they compute from weights, because it follows from them again."""
        found = []
        for path, now, was in self._held:
            if len(now) != len(was) or not all(map(operator.is_, now.values(), was.values())):
                keys = (k for k in {**was, **now} if not _same(now.get(k, self), was.get(k, self)))
                found += [(path, k) for k in keys]
        for path, now, _ in (*self._held, *self._helpers):
            for name, value in now.items():
                if isinstance(value, stand_in):
                    found.append((path, name))
                elif isinstance(value, dict | list | tuple) and value:
                    leaves = pytree.tree_leaves(value)
                    found += [(path, name) for leaf in leaves if isinstance(leaf, stand_in)]
        found += [
            (path, name) for path, name, v, was in self._inside if not _same(_content(v), was)
        ]
        return {f"{path}{name}": self._users[path] for path, name in found}

    def restore(self) -> None:
        for _, now, was in (*self._held, *self._helpers):
            now.clear()
            now.update(was)
        for _, _, v, content in (*self._inside, *self._kept):
            v.clear()
            (v.update if isinstance(v, dict | set) else v.extend)(content)


def _lists(now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The containers among attributes and inside of these, by the attribute's name, and what is in
    them."""
    found, seen = [(name, v) for name, v in now.items() if isinstance(v, CONTAINERS)], set[int]()
    for name, v in found:
        if id(v) not in seen and not isinstance(v, set):
            several = v.values() if isinstance(v, dict) else v
            found += [(name, inner) for inner in several if isinstance(inner, CONTAINERS)]
        seen.add(id(v))
    return [(name, v, _content(v)) for name, v in found if not isinstance(v, tuple)]


def _content(container: Any) -> Any:
    kind: Any = next((k for k in (dict, set) if isinstance(container, k)), list)
    return kind(container)  # of a plain class, which copy() of a class of the user's may not be


def _is_helper(value: Any) -> bool:
    """Whether something is an object that may keep what it computed."""
    other = isinstance(value, nn.Module | torch.Tensor | ModuleType) or callable(value)
    return hasattr(value, "__dict__") and not other


def _same(now: Any, was: Any) -> bool:
    """Whether plain values are equal, and containers hold the same things."""
    if now is was:
        return True
    if type(now) is not type(was):
        return False
    if isinstance(now, dict):
        return now.keys() == was.keys() and all(_same(now[k], was[k]) for k in was)
    if isinstance(now, list | tuple):
        return len(now) == len(was) and all(map(_same, now, was))
    plain = (bool, int, float, str, set, torch.dtype, torch.device)
    return isinstance(now, plain) and bool(now == was)


def check_containers(call: tuple[Any, Any], given: Sequence[Any]) -> None:
    """Raise GraphError where forward put a tensor into a list or dict of the caller's: after a call
    of a plan, the caller would not find it there."""
    known = {id(leaf) for leaf in given}
    for path, leaf in pytree.tree_flatten_with_path(call)[0]:
        if isinstance(leaf, Proxy) and id(leaf) not in known:
            wrong = "forward puts a tensor into a list or dict that it was given"
            remedy = "return it beside the result, or hand in an object of a class that holds it"
            home = "kwargs" if path[0] == pytree.SequenceKey(1) else "args"
            raise GraphError(wrong, where=home + pytree.keystr(path[1:]), remedy=remedy)


@contextmanager
def swapped(module: nn.Module, stands: Mapping[int, Proxy]) -> Iterator[None]:
    """Put stand-ins in the places of a module's parameters and buffers."""
    tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [(t, dict(t)) for t in tables]
    for table, was in before:
        table.update({name: stands[id(t)] for name, t in was.items() if t is not None})
    try:
        yield
        for table, was in before:
            for name, tensor in table.items():
                if tensor is not None and tensor is not stands.get(id(was.get(name))):
                    raise NeedsExport("forward replaces a weight")
    finally:
        for table, was in before:
            table.clear()
            table.update(was)
