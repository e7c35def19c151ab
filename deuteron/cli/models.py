"""Loads what the command line names: a model of the zoo or the user's own, and example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import deuteron as dt
from deuteron.plan import resolve_device

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*|scalar)(?::(\w+))?")


class Loaded(NamedTuple):
    """A model, and the example inputs that it is called with."""

    name: str
    net: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Input(NamedTuple):
    """One ``--input``: its keyword ("" if it is positional), its shape and its element type."""

    keyword: str
    shape: tuple[int, ...]
    kind: dt.DType

    @property
    def sizes(self) -> str:
        """Shape and element type, as they are written on the command line."""
        kind = "" if self.kind == dt.float32 else f":{self.kind.short}"
        return ("x".join(map(str, self.shape)) or "scalar") + kind

    def tensor(self) -> torch.Tensor:
        """A tensor of random numbers; if they are no floats, zeros and ones, as they may be
        indices.
        """
        try:
            if self.kind.is_float:
                return torch.randn(self.shape).to(self.kind.torch)
            return torch.randint(0, 2, self.shape).to(self.kind.torch)
        except (RuntimeError, TypeError):  # torch has no memory for it, or no number for a size
            wrong = f"no tensor of {self.kind.name} and these sizes can be made"
            asked = f"--input {self.keyword and self.keyword + '='}{self.sizes}"
            raise dt.DeuteronError(wrong, asked=asked, remedy="use smaller sizes") from None


def parse_input(text: str) -> Input:
    """Parse ``x=1x3x224x224:f16``; name and element type may be left out."""
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        remedy = "write name=sizes:type, e.g. x=1x3x224x224 or ids=1x128:i64"
        raise dt.DeuteronError(f"{text!r} is not an input", asked=f"--input {text}", remedy=remedy)
    sizes = () if match[2] == "scalar" else tuple(map(int, match[2].split("x")))
    kind = dt.ir.dtype(match[3] or "f32")
    if kind.bits < 8:
        wrong, remedy = f"torch makes no tensors of {kind.name}", "use i8 or wider"
        raise dt.DeuteronError(wrong, asked=f"--input {text}", remedy=remedy)
    return Input(match[1] or "", sizes, kind)


def check_name(model: str) -> None:
    """Raise an error for a model that is not in the zoo, and not written as the user's own."""
    path, colon, attribute = model.partition(":")
    if colon and path and attribute:
        return
    if colon or not model:
        remedy = "write my.py:make or package.module:make, or name a model of the zoo"
        raise dt.DeuteronError(f"{model!r} names no model", remedy=remedy)
    if model not in dt.zoo.names():
        try:
            dt.zoo.build(model)
        except ValueError as error:  # it suggests similar names
            remedy = "name one of these, or your own: my.py:make"
            if model.endswith(".py"):
                remedy = f"name the module in it, or what makes one: {model}:make"
            elif model.endswith(".json"):
                remedy = f"a saved plan is read by Python: dt.load_plan({model!r}).explain()"
            raise dt.DeuteronError(str(error), asked=f"model {model!r}", remedy=remedy) from None


def float_type(name: str) -> torch.dtype:
    """The element type of that name, for the parameters of a model."""
    kind = dt.ir.dtype(name)
    if not kind.is_float:
        wrong, remedy = f"a model cannot be {kind.name}", "use f32, f16 or bf16"
        raise dt.DeuteronError(wrong, asked=f"--dtype {name}", remedy=remedy)
    return kind.torch


def load(
    model: str,
    batch: int = 1,
    device: str = "",
    dtype: str = "",
    inputs: Sequence[str] = (),
    *,
    values: bool = True,
) -> Loaded:
    """Load a model with its example inputs, to the device. ``values=False`` is for when only shapes
    matter: then a model of the zoo is on the device "meta", and the user's own stays where it was
    made."""
    where = resolve_device(device or None)
    named = float_type(dtype or ("f16" if where.type == "cuda" else "f32"))
    asked = [parse_input(text) for text in inputs]
    check_name(model)
    if ":" not in model:
        if asked:
            wrong, remedy = f"{model!r} brings its own inputs", "leave --input out, or use --batch"
            raise dt.DeuteronError(wrong, asked=f"--input {inputs[0]}", remedy=remedy)
        if not values:
            with torch.device("meta"):
                net = dt.zoo.MODELS[model].build()
            return Loaded(model, net, dt.zoo.example(model, batch, where, named), {})
        return _of_the_zoo(model, batch, where, named)
    if batch != 1:
        wrong = f"the example of {model!r} has a batch size already"
        remedy = "leave --batch out, and make the example that large"
        raise dt.DeuteronError(wrong, asked=f"--batch {batch}", remedy=remedy)
    kind = named if dtype else None

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.to(where, kind if kind is not None and t.is_floating_point() else t.dtype)

    net, args, kwargs = _own(model, asked)
    if not values:
        return Loaded(type(net).__name__, net, args, kwargs)
    net = (net.to(kind) if kind is not None else net).to(where).eval()
    args, kwargs = pytree.tree_map_only(torch.Tensor, moved, (args, kwargs))
    return Loaded(type(net).__name__, net, args, kwargs)


def _of_the_zoo(model: str, batch: int, where: torch.device, kind: torch.dtype) -> Loaded:
    net = dt.zoo.build(model).to(where).to(kind)
    example = dt.zoo.example(model, batch, where, kind)
    if where.type == "cuda" and any(isinstance(m, torch.nn.Conv2d) for m in net.modules()):
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = tuple(t.contiguous(memory_format=torch.channels_last) for t in example)
    return Loaded(model, net, example, {})


def _own(
    model: str, asked: Sequence[Input]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The user's own module, with inputs as in ``--input`` or the example inputs it comes with."""
    made = _made(model)
    net, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    remedy = "return (module, example inputs), or the module alone and name inputs with --input"
    if not isinstance(net, torch.nn.Module):
        what = f"({type(net).__name__}, …)" if isinstance(made, tuple) else type(made).__name__
        raise dt.DeuteronError(f"{model!r} is {what}, not a module", remedy=remedy)
    if asked:
        positional = tuple(i.tensor() for i in asked if not i.keyword)
        keywords = {i.keyword: i.tensor() for i in asked if i.keyword}
        try:
            inspect.signature(net.forward).bind(*positional, **keywords)
        except TypeError as error:
            takes = f"forward{inspect.signature(net.forward)}"
            wrong = f"{type(net).__name__} cannot be called with these inputs: {error}"
            names = list(inspect.signature(net.forward).parameters)
            write = " ".join(f"--input {n}={i.sizes}" for n, i in zip(names, asked, strict=False))
            remedy = f"name inputs as it does: {write}"
            raise dt.DeuteronError(wrong, where=takes, remedy=remedy) from None
        return net, positional, keywords
    if example is None:
        wrong = f"{model!r} is a {type(net).__name__} without example inputs"
        raise dt.DeuteronError(wrong, remedy=remedy)
    if isinstance(example, dict):
        return net, (), example
    return net, tuple(example) if isinstance(example, tuple | list) else (example,), {}


def _made(model: str) -> Any:
    """Load what ``file.py:name`` or ``package.module:name`` refers to; a function or a class is
    called, and its result returned."""
    path, _, attribute = model.partition(":")
    try:
        found = getattr(_module(path), attribute)
        return found if isinstance(found, torch.nn.Module) or not callable(found) else found()
    except Exception as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        here = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f"{here[-1].filename}, line {here[-1].lineno}" if here else ""
        remedy = "name a module, or a callable that returns (module, example inputs)"
        wrong = f"{model!r} cannot be loaded: {why}"
        raise dt.DeuteronError(
            wrong, asked=f"model {model!r}", where=where, remedy=remedy
        ) from error


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        sys.path.insert(0, ".")
        return importlib.import_module(path)
    file = Path(path).resolve()
    sys.path.insert(0, str(file.parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
