"""How a user's function of a score becomes a program (``ops/score_program.py``).

The function is called once, with values that note what is done to them: arithmetic, comparisons,
functions of torch's, and elements of tensors that it captured, ``slopes[h]`` or ``document[b, i]``.
Kinds of numbers follow torch: a whole number beside a float becomes a float, and ``/`` always gives
a float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from deuteron.errors import BindError
from deuteron.ops import table
from deuteron.ops.formula import is_scalar
from deuteron.ops.score_program import INPUTS, READS, Program, Step

# functions and methods of torch's, and our names for them
NAMES = {
    "absolute": "abs", "multiply": "mul", "subtract": "sub", "divide": "div", "truediv": "div",
    "true_divide": "div", "floordiv": "floor_div", "floor_divide": "floor_div",
    "mod": "remainder", "negative": "neg", "invert": "logical_not", "bitwise_not": "logical_not",
    "and": "logical_and", "bitwise_and": "logical_and", "or": "logical_or", "xor": "logical_xor",
    "bitwise_or": "logical_or", "bitwise_xor": "logical_xor", "greater": "gt", "less": "lt",
    "greater_equal": "ge", "less_equal": "le", "not_equal": "ne", "max": "maximum",
    "min": "minimum", "clip": "clamp",
}  # fmt: skip
COMPARED = frozenset("eq ne lt le gt ge".split())
JOINED = frozenset("logical_and logical_or logical_xor logical_not".split())
WHOLE = frozenset("add sub mul maximum minimum remainder floor_div neg abs sign square".split())
TURNED = frozenset("radd rsub rmul rtruediv rfloordiv rmod rpow rand ror rxor".split())


def _refused(what: str, remedy: str) -> BindError:
    return BindError(what, asked="a function of attention's scores", remedy=remedy)


class Noted:
    """A number inside a function that is being traced. ``kind``: f for a float, n for a whole
    number, c for a condition."""

    __slots__ = ("kind", "of", "ref")

    def __init__(self, of: _Notes, ref: Any, kind: str) -> None:
        self.of, self.ref, self.kind = of, ref, kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.of.call(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.of.call(name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        wrong = "a function of scores asks whether a number is true, which it is not for all"
        raise _refused(wrong, "choose with torch.where, join conditions with & and |")

    def __hash__(self) -> int:
        return id(self)

    def __index__(self) -> int:
        wrong = "a function of scores uses a position where Python needs a number"
        raise _refused(wrong, "index tensors with it, or compute with torch's functions")


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.of.call(name, (self, *args), {})


for _name in """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
    neg abs invert and rand or ror xor rxor eq ne lt le gt ge""".split():
    setattr(Noted, f"__{_name}__", _method(_name))


class _Notes:
    """The steps of a traced function, and the tensors that it reads."""

    def __init__(self, captured: list[Tensor]) -> None:
        self.steps: list[Step] = []
        self.captured, self.count = captured, 0

    def step(self, kind: str, op: str, args: Sequence[Any], **attrs: Any) -> Noted:
        name = f"{kind}{self.count}"
        self.count += 1
        refs = tuple(a.ref if isinstance(a, Noted) else a for a in args)
        self.steps.append(Step(name, op, refs, tuple(attrs.items())))
        return Noted(self, name, kind)

    def noted(self, x: Any) -> Noted:
        """Return a value, a number of Python's or a tensor with one element as a value."""
        if isinstance(x, Noted):
            return x
        if isinstance(x, Tensor):
            if x.numel() != 1:
                wrong = f"a function of scores uses a whole tensor {list(x.shape)}"
                raise _refused(wrong, "use elements of it: tensor[h], tensor[b, i]")
            return self.read(x.reshape(()), ())
        if not isinstance(x, bool | int | float):
            raise _refused(f"a function of scores uses {x!r}", "use numbers and tensors")
        return Noted(self, x, "c" if isinstance(x, bool) else "n" if isinstance(x, int) else "f")

    def read(self, tensor: Tensor, places: Sequence[Any]) -> Noted:
        if tensor.requires_grad:
            wrong = "a function of scores captured a tensor that needs a gradient"
            raise _refused(wrong, "detach it, or give what is learned as a bias")
        same = [n for n, t in enumerate(self.captured) if t is tensor]
        if not same and len(self.captured) == READS:
            wrong = f"functions of scores captured more than {READS} tensors"
            raise _refused(wrong, "join tables in one tensor, and read them at other places")
        if not same:
            self.captured.append(tensor)
        at = same[0] if same else len(self.captured) - 1
        if len(places) != tensor.ndim:
            wrong = f"{len(places)} places in a captured tensor {list(tensor.shape)}"
            raise _refused(wrong, "give a place for each of its dimensions")
        indices = [self.noted(p) for p in places]
        if any(p.kind != "n" for p in indices):
            raise _refused("a place in a captured tensor is no whole number", "use b, h, i and j")
        kind = "f" if tensor.is_floating_point() else "c" if tensor.dtype == torch.bool else "n"
        return self.step(kind, f"read{at}", indices)

    def as_kind(self, x: Noted, kind: str) -> Noted:
        if x.kind == kind:
            return x
        if not isinstance(x.ref, str):
            return self.noted({"f": float, "n": int, "c": bool}[kind](x.ref))
        if kind == "f":
            return self.step("f", "float", [x])
        if kind == "c":
            return self.step("c", "ne", [x, 0.0 if x.kind == "f" else 0])
        if x.kind == "c":
            return self.step("n", "where", [x, 1, 0])
        raise _refused("a function of scores makes a float a whole number", "compute in floats")

    def alike(self, args: Sequence[Noted], least: str) -> tuple[list[Noted], str]:
        """Return the arguments in one kind that holds all, ``least`` or above, and that kind."""
        order = "cnf"
        kind = order[max(order.index(least), *(order.index(a.kind) for a in args))]
        return [self.as_kind(a, kind) for a in args], kind

    def call(self, called: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Note, as a step, what torch would have computed."""
        name = called.strip("_")
        if name in TURNED:
            name, args = name[1:], args[::-1]
        name = NAMES.get(name, name)
        if name in ("to", "type", "float", "double", "half", "bfloat16", "int", "long", "bool"):
            return self._cast(name, *args, **kwargs)
        if name == "div" and kwargs.get("rounding_mode") == "floor":
            name, kwargs = "floor_div", {}
        if name in ("zeros_like", "ones_like"):
            return self.noted(float(name == "ones_like"))
        op = table.TABLE.get(name)
        if op is None or not is_scalar(op):
            wrong = f"a function of scores calls {called}, which is no function of single numbers"
            raise _refused(wrong, "use arithmetic, comparisons, torch.where, exp, tanh, …")
        for key in list(kwargs):
            if key in op.inputs or (key == "other" and len(args) == 1):
                args = [*args, kwargs.pop(key)]
        attrs = kwargs
        if name == "clamp":
            attrs = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            args = args[:1]
        return self._applied(name, [self.noted(a) for a in args], attrs)

    def _applied(self, name: str, given: list[Noted], attrs: Any) -> Noted:
        if name in JOINED:
            if any(a.kind != "c" for a in given):
                wrong = "a function of scores joins bits of numbers"
                raise _refused(wrong, "join conditions, such as (i >= j) & (i - j < 8)")
            return self.step("c", name, given)
        if name in COMPARED:
            return self.step("c", name, self.alike(given, "n")[0])
        if name in ("isnan", "isinf"):
            return self.step("c", name, [self.as_kind(given[0], "f")])
        if name == "where":
            chosen, kind = self.alike(given[1:], "c")
            when = self.as_kind(given[0], "c")
            if kind == "c":
                one, other = chosen
                yes = self.step("c", "logical_and", [when, one])
                no = self.step("c", "logical_and", [self.step("c", "logical_not", [when]), other])
                return self.step("c", "logical_or", [yes, no])
            return self.step(kind, name, [when, *chosen])
        floats = {k: float(v) if isinstance(v, int | float) else v for k, v in attrs.items()}
        args, kind = self.alike(given, "n" if name in WHOLE else "f")
        return self.step(kind, name, args, **{k: v for k, v in floats.items() if v is not None})

    def _cast(self, name: str, x: Any, dtype: Any = None, **_: Any) -> Noted:
        kind = {"int": "n", "long": "n", "bool": "c"}.get(name, "f")
        if name in ("to", "type"):
            if not isinstance(dtype, torch.dtype):
                raise _refused("a function of scores calls to() without a type", "give a dtype")
            whole = "c" if dtype == torch.bool else "n"
            kind = "f" if dtype.is_floating_point else whole
        return self.as_kind(self.noted(x), kind)


class _Following(TorchFunctionMode):
    """Sees ``tensor[h]``, where torch would try to use h as a number."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [a for each in args for a in (each if isinstance(each, tuple) else (each,))]
        if any(isinstance(a, Noted) for a in flat):
            if func is Tensor.__getitem__:  # whose name torch.compile does not know
                return self.notes.read(args[0], args[1] if isinstance(args[1], tuple) else args[1:])
            return self.notes.call(func.__name__, args, kwargs or {})
        return func(*args, **kwargs or {})


def _check_arguments(function: Any, given: Sequence[Any], remedy: str) -> None:
    with suppress(ValueError):  # the function has no signature to read
        try:
            signature(function).bind(*given)
        except TypeError as wrong:
            raise _refused(f"it does not take {len(given)} arguments: {wrong}", remedy) from None


def traced(function: Any, captured: list[Tensor], mask: bool) -> str:
    """Return the program of ``function(s, b, h, i, j)``, or of ``function(b, h, i, j)`` if it is a
    ``mask``. Tensors that it captures are added to ``captured``, unless they are there already. A
    function that is a program already is returned as it is."""
    usual = "give score(s, b, h, i, j) or mask(b, h, i, j)"
    if isinstance(function, str) and function != "causal":
        return function
    if not callable(function):
        more = "; for causal attention write causal=True" if function == "causal" else ""
        raise _refused(f"{function!r} is no function of scores", usual + more)
    notes = _Notes(captured)
    kinds = dict(zip(INPUTS, "fnnnn", strict=True))
    given = [Noted(notes, name, kinds[name]) for name in INPUTS[1 if mask else 0 :]]
    if not is_dynamo_compiling():
        _check_arguments(function, given, usual)
    with _Following(notes):
        made = notes.noted(function(*given))
    made = notes.as_kind(made, "c" if mask else "f")
    return str(Program(notes.steps, made.ref))
