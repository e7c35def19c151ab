"""Reading the tensors of a call that is written as the example was, and building an answer with
tensors in it, without torch's walk through trees, which takes a microsecond for each container and
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Same = Callable[[Any], bool]  # whether a value that is no tensor equals the example's
Take = Callable[[Any, list[torch.Tensor]], bool]


class Reader:
    """Reads calls of one structure of tuples, lists, dicts and leaves. ``leaves`` has for each leaf
    None if it is a tensor, else a function that tells whether the value is the example's."""

    def __init__(self, spec: pytree.TreeSpec, leaves: Sequence[Same | None]) -> None:
        self._take = _taker(spec, iter(leaves))

    def tensors(self, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """The tensors in the order of the leaves; None for a call that is not known to be written
        so."""
        found: list[torch.Tensor] = []
        return found if self._take((args, kwargs), found) else None


def _taker(spec: pytree.TreeSpec, leaves: Iterator[Same | None]) -> Take:
    if spec.is_leaf():
        same = next(leaves)
        return _tensor if same is None else lambda given, found: same(given)
    takers = [_taker(child, leaves) for child in spec.children()]
    if spec.type is dict:
        return _of_dict(list(zip(spec.context, takers, strict=True)))
    if spec.type in (tuple, list):
        return _of_row(spec.type, takers)
    return lambda given, found: False


def _tensor(given: Any, found: list[torch.Tensor]) -> bool:
    found.append(given)
    return isinstance(given, torch.Tensor)


def _of_dict(entries: list[tuple[Any, Take]]) -> Take:
    def take(given: Any, found: list[torch.Tensor]) -> bool:
        if type(given) is not dict or len(given) != len(entries):
            return False
        return all(key in given and one(given[key], found) for key, one in entries)

    return take


def _of_row(kind: Any, takers: list[Take]) -> Take:
    def take(given: Any, found: list[torch.Tensor]) -> bool:
        if type(given) is not kind or len(given) != len(takers):
            return False
        return all(one(value, found) for one, value in zip(takers, given, strict=True))

    return take


def builder(spec: pytree.TreeSpec, leaves: Sequence[tuple[bool, Any]]) -> Callable[..., Any]:
    """Return a function that puts a list of tensors into the structure ``spec``. ``leaves`` says
    for each leaf whether it is one of the tensors, and if not, its value. The function is one
    expression."""
    space: dict[str, Any] = {}
    text = _written(spec, iter(leaves), (f"r[{i}]" for i in range(len(leaves))), space)
    made: Callable[..., Any] = eval(f"lambda r: {text}", space)  # holds only names made here
    return made


def _written(
    spec: pytree.TreeSpec,
    leaves: Iterator[tuple[bool, Any]],
    tensors: Iterator[str],
    space: dict[str, Any],
) -> str:
    def kept(value: Any) -> str:
        space[f"v{len(space)}"] = value
        return f"v{len(space) - 1}"

    if spec.is_leaf():
        is_tensor, value = next(leaves)
        return next(tensors) if is_tensor else kept(value)
    parts = [_written(child, leaves, tensors, space) for child in spec.children()]
    if spec.type is dict:
        pairs = zip(map(kept, spec.context), parts, strict=True)
        return f"{{{', '.join(f'{key}: {part}' for key, part in pairs)}}}"
    listed = "".join(f"{part}, " for part in parts)
    if spec.type in (tuple, list):
        return f"({listed})" if spec.type is tuple else f"[{listed}]"
    make = kept(pytree.SUPPORTED_NODES[spec.type].unflatten_fn)
    return f"{make}([{listed}], {kept(spec.context)})"
