"""Containers and plain values of a call as data, and back. Nothing in the data is run.

A structure of torch's pytrees is None for a leaf, else the name of its container, what that needs
to know (such as the keys of a dict), and the structures inside. A class is named by the module that
defines it, which is imported. The class must be one that torch knows as a container, and that holds
nothing but fields: a dataclass, a named tuple or a dict.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deuteron.errors import DeuteronError, FileError
from deuteron.frontends.torch_export import Fixed
from deuteron.ir.text import literal, parse_literal

PLAIN: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict}
PLAIN |= {"OrderedDict": collections.OrderedDict, "namedtuple": collections.namedtuple}


def structure_data(spec: pytree.TreeSpec) -> Any:
    """A structure as plain data."""
    if spec.type is None:
        return None
    inside = [structure_data(child) for child in _children(spec)]
    context, name = spec._context, next((n for n, t in PLAIN.items() if t is spec.type), "")
    if name == "namedtuple":
        return {"of": "namedtuple", "class": _name_of(context), "inside": inside}
    if not name:
        _refuse_class(spec.type, DeuteronError)
    if json.loads(json.dumps(context, default=str)) != context:
        wrong = f"a {spec.type.__name__} with keys {context!r} cannot be saved"
        raise DeuteronError(wrong, asked="save", remedy="use text as keys")
    found = {"of": name} if name else {"of": "class", "class": _name_of(spec.type)}
    return {**found, "context": context, "inside": inside}


def structure_of(data: Any) -> pytree.TreeSpec:
    """The structure that :func:`structure_data` wrote."""
    if data is None:
        return pytree.tree_structure(0)
    try:
        kind, inside = data["of"], [structure_of(child) for child in data["inside"]]
        if kind == "namedtuple":
            return pytree.TreeSpec(PLAIN[kind], _class_of(data["class"]), inside)
        found = _class_of(data["class"]) if kind == "class" else PLAIN[kind]
        context = data["context"]
        if kind in ("dict", "OrderedDict") and len(context) != len(inside):
            raise FileError("a dict has more keys than values, or fewer")
        return pytree.TreeSpec(found, context, inside)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise FileError(f"the structure of the call is damaged: {error!r}") from None


def _children(spec: pytree.TreeSpec) -> Sequence[pytree.TreeSpec]:
    return list(spec._children)


def _name_of(found: type) -> str:
    return f"{found.__module__}:{found.__qualname__}"


def _class_of(name: str) -> Any:
    """The class of a name, if it is one that only holds fields."""
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise FileError(f"{name!r} is not the name of a class")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        wrong = f"the class {name!r} of the call is not here: {error}"
        remedy = f"install or define {module}, and register the class, before loading"
        raise FileError(wrong, remedy=remedy) from None
    _refuse_class(found, FileError)
    return found


def _refuse_class(found: Any, kind: type[DeuteronError]) -> None:
    plain = isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or issubclass(found, dict)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
        or found.__module__ == "torch.return_types"
    )
    named = plain and issubclass(found, tuple)
    if not plain or (found not in pytree.SUPPORTED_NODES and not named):
        wrong = f"{found!r} is not a dataclass, named tuple or dict that torch knows as a container"
        remedy = "register it with torch.utils._pytree.register_dataclass first"
        raise kind(wrong, remedy=remedy)


# ---- values that are no tensors


def values_data(values: Sequence[str | Fixed]) -> list[Any]:
    """Names, and fixed values, as plain data."""
    return [given if isinstance(given, str) else {"fixed": _value(given.value)} for given in values]


def values_of(data: Any, device: torch.device) -> tuple[str | Fixed, ...]:
    """What :func:`values_data` wrote; tensors among them come to ``device``."""
    try:
        pairs = (d if isinstance(d, str) else Fixed(_value_of(d["fixed"], device)) for d in data)
        return tuple(pairs)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise FileError(f"the values of the call are damaged: {error!r}") from None


def _value(value: Any) -> str:
    if isinstance(value, torch.dtype | torch.device):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, torch.Tensor):  # of a few whole numbers
        return f"tensor:{value.dtype}:{literal((value.shape, value.flatten().tolist()))}"
    if value is None or type(value) in (bool, int, float, str):
        return literal(value)
    wrong = f"the call has an argument or a result that is a {type(value).__name__}"
    raise DeuteronError(wrong, asked="save", remedy="tensors, numbers and text can be saved")


def _value_of(text: str, device: torch.device) -> Any:
    kind, _, name = text.partition(":")
    if kind == "tensor":
        dtype, _, numbers = name.partition(":")
        shape, flat = parse_literal(numbers)
        how: Any = {"dtype": _value_of(f"dtype:{dtype}", device), "device": device}
        return torch.tensor(flat, **how).reshape(shape)
    if kind == "device":
        return torch.device(name)
    if kind == "dtype":
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        raise FileError(f"{name!r} is no element type")
    return parse_literal(text)
