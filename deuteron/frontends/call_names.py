"""What the arguments and results of a module's forward are called, in a graph and in errors."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from deuteron.frontends import refusals


def identifier(name: str) -> str:
    """A name for a value: dots and other signs replaced by underscores."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def input_names(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Names for flattened arguments, as torch.export chooses them: ``batch['mask']`` is
    ``batch_mask``, the first of ``*rest`` is ``rest_0``."""
    kind, parameters = inspect.Parameter.VAR_POSITIONAL, refusals.forward_parameters(module)
    rest = next((name for name, p in parameters.items() if p.kind is kind), "")
    names: list[str] = []
    for path in paths:
        head, *parts = re.findall(r"\w+", path)
        if head == "args" and rest:
            head, parts[0] = rest, str(int(parts[0]) - len(positional(module)))
        _append_new(names, "_".join((head, *parts)).lower())
    return names


def _append_new(names: list[str], name: str) -> None:
    while name in names:
        name += "_"
    names.append(name)


def result_names(spec: pytree.TreeSpec) -> list[str]:
    """Names for flattened results by where they stand: ``output``, ``output_0``, ``logits``."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    try:
        keyed = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a container that cannot name its parts
        return [f"output_{i}" for i in range(spec.num_leaves)]
    names: list[str] = []
    for path in keyed:
        parts = [identifier(str(_key(k))) for k in path]
        name = "_".join(parts) or "output"
        _append_new(names, f"output_{name}" if name[0].isdigit() else name)
    return names


def _key(key: Any) -> Any:
    """The name or number inside a pytree key."""
    return next((getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)), key)


def leaf_paths(call: tuple[Any, ...], parameters: Sequence[str]) -> list[tuple[str, Any]]:
    """Each leaf of a call with how the caller writes it, by parameter name where it has one."""
    try:
        keyed, _ = pytree.tree_flatten_with_path(call)
    except ValueError:  # a container that cannot name its parts: leaves are numbered
        return [(f"argument {i}", leaf) for i, leaf in enumerate(pytree.tree_leaves(call))]
    named = []
    for (side, first, *rest), leaf in keyed:
        key = _key(first)
        if _key(side) == 1:
            head = str(key)
        else:
            head = parameters[key] if key < len(parameters) else f"args[{key}]"
        named.append((head + pytree.keystr(tuple(rest)), leaf))
    return named


def positional(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of forward that may be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = refusals.forward_parameters(module).items()
    return tuple(name for name, p in parameters if p.kind in kinds)
