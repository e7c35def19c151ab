"""An ATen call we have no definition for: it runs as it is, alone, and the rest still fuses.

The call is kept as data (operator name and arguments), so that it can be printed, saved and
checked. Only operators that neither write to their inputs nor reach outside the process are
accepted, because such a node may come from a file; operators of other libraries are accepted only
if a module that was imported in this process calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import dtype
from deuteron.ir.text import parse_type
from deuteron.ir.types import TensorType
from deuteron.ops.opdef import Attr, Fusion, operator
from deuteron.ops.samples import samples

NAMESPACES = ("aten", "prims", "torchvision")
CALLED: set[str] = set()  # operators of other libraries that a module in this process has called
FORBIDDEN = ("from_file", "save", "load", "record_stream", "set_", "resize_", "_print")


def encode(value: Any, tensors: list[Any], lookup: Any) -> Any:
    """An argument as plain data; ``lookup(value)`` turns graph values into input names."""
    name = lookup(value)
    if name is not None:
        tensors.append(name)
        return ("in", len(tensors) - 1)
    if isinstance(value, torch.dtype):
        return ("dtype", dtype(value).short)
    if isinstance(value, torch.device):
        return ("device",)
    if isinstance(value, torch.memory_format | torch.layout):
        name = str(value).removeprefix("torch.")
        if name not in _TORCH_NAMES:
            wrong = f"a tensor that is {name}, made by a call, cannot be kept in a graph"
            raise GraphError(wrong, remedy="make it dense, as nn.Embedding(sparse=False) does")
        return ("torch", name)
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    if isinstance(value, list | tuple):
        return ("list", *(encode(v, tensors, lookup) for v in value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    wrong = f"an argument of type {type(value).__name__} cannot be kept in a graph"
    raise GraphError(wrong, remedy="leave it out, or make this call outside of what is optimised")


def decode(value: Any, tensors: Sequence[Any], device: torch.device) -> Any:
    """The argument again, ready for the call."""
    if not isinstance(value, tuple):
        return value
    tag, *rest = value or ("",)
    if tag == "in":
        return tensors[rest[0]]
    if tag == "list":
        return [decode(v, tensors, device) for v in rest]
    if tag == "complex":
        return complex(*rest)
    if tag == "dtype":
        return dtype(rest[0]).torch
    if tag == "device":
        return device
    if tag == "torch" and rest[0] in _TORCH_NAMES:
        return getattr(torch, rest[0])
    raise GraphError(f"an argument of this call is damaged: {value!r}")


_TORCH_NAMES = "contiguous_format preserve_format channels_last channels_last_3d strided".split()


STRIDES = frozenset(
    {"aten.as_strided.default", "aten.as_strided_scatter.default", "aten.view.dtype"}
)


def goes_by_memory(target: str) -> bool:
    """Whether the result of a call may depend on the memory order of its operands: the call looks
    at their strides, or draws random numbers in memory order, or is private to torch and may rely
    on the order in which torch itself passes its operands (weight norm does). Attention does none
    of that."""
    draws = torch.Tag.nondeterministic_seeded in resolve(target).tags
    private = target.split(".")[1].startswith("_")
    return target in STRIDES or ((draws or private) and "attention" not in target)


def resolve(target: str) -> Any:
    """The torch operator called ``target`` ("aten.roll.default"), if it is a harmless one."""
    parts = target.split(".")
    harmless = len(parts) == 3 and parts[0] in NAMESPACES and parts[1] not in FORBIDDEN
    if not harmless and (target not in CALLED or parts[0] == "deuteron"):
        usual = f"operators of {', '.join(NAMESPACES)}, or of a module that is imported here"
        ours = "augment images and compute linear_cross_entropy outside of what is optimised"
        wrong = f"the call {target!r} is not allowed in a graph"
        raise GraphError(wrong, remedy=ours if parts[0] == "deuteron" else usual)
    try:
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        wrong = f"this torch ({torch.__version__}) has no operator {target!r}"
        remedy = "import the package that registers it first, or use another torch version"
        raise GraphError(wrong, remedy=remedy)
    if found._schema.is_mutable:
        raise GraphError(f"{target!r} writes to its inputs", remedy="use its functional variant")
    return found


def is_random(target: str) -> bool:
    """Whether two calls with equal arguments may differ, so that one cannot replace the other."""
    return torch.Tag.nondeterministic_seeded in resolve(target).tags


@cache
def may_show(target: str) -> bool:
    """Whether a call may return a view of an operand's memory: its schema says so, or it is
    composed of other calls, about which its schema says nothing."""
    name = resolve(target).name()
    told = any(r.alias_info is not None for r in resolve(target)._schema.returns)
    made_of = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return told or made_of or not name.startswith("aten::") or "view" in name


def bound(*, target: str, args: Any, kwargs: Any, **types: Any) -> Callable[..., Any]:
    """Return the call as a function of its tensors. What is known beforehand is worked out once,
    here."""
    call, on_host = resolve(target), target in SEEDED
    # of an empty tensor, dropout gives a mask of floats: empty results are cast to these types
    kinds = [parse_type(text).dtype.torch for text in types["out"]]
    count = len(args)
    given = [*args, *(value for _, value in kwargs)]
    names = [key for key, _ in kwargs]
    ready = [None if _is_open(a) else decode(a, (), torch.device("cpu")) for a in given]
    open_at = [(i, a) for i, a in enumerate(given) if _is_open(a)]

    def made(t: Any, kind: torch.dtype | None, device: torch.device) -> Any:
        if t is None:  # a mask of results asked for none, though torch's tracer shows a tensor
            return None
        # kernels read memory as it is, all on one device: there is no number left on the host, and
        # no conjugation or negation that is only flagged
        t = t if t.ndim else t.to(device)
        t = t.resolve_conj().resolve_neg()
        return t if t.numel() else t.to(kind)

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = xs[0].device if xs else torch.get_default_device()
        if on_host and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            xs = tuple(t if t.ndim else t.cpu() for t in xs)
        values = ready.copy()
        for i, a in open_at:
            values[i] = decode(a, xs, device)
        if names:
            result = call(*values[:count], **dict(zip(names, values[count:], strict=True)))
        else:
            result = call(*values)
        if isinstance(result, torch.Tensor):
            return (made(result, kinds[0], device),)
        found = list(result)
        if len(found) > len(kinds):
            found = [t for t in found if isinstance(t, torch.Tensor)]
        return tuple(made(t, k, device) for t, k in zip(found, kinds, strict=True))

    return run


def _is_open(value: Any) -> bool:
    """Whether an argument is known only with the tensors: it is one, or depends on their device."""
    if not isinstance(value, tuple):
        return False
    return value[:1] in (("in",), ("device",)) or (
        value[:1] == ("list",) and any(map(_is_open, value[1:]))
    )


def _reference(*xs: torch.Tensor, **how: Any) -> Any:
    return bound(**how)(*xs)


# Memory-efficient attention returns the seed of its dropout on the host (on the device while a CUDA
# Graph is captured), and its gradient expects the seed in the same place.
_TILED = "efficient_attention_backward.default"
SEEDED = frozenset({f"aten._scaled_dot_product_{_TILED}", f"aten._{_TILED}"})


_ROLL: tuple[Any, ...] = (("in", 0), ("list", 1), ("list", 1))


@operator(
    Fusion.OPAQUE,
    _reference,
    attrs={
        "target": Attr("str", doc="e.g. 'aten.roll.default'"),
        "args": Attr("any", (), "positional arguments as data; ('in', i) is input i"),
        "kwargs": Attr("any", (), "pairs of name and argument"),
        "out": Attr("any", (), "the result types as text"),
        "seen": Attr("any", (), "operand types as text, where their order in memory is a matter"),
    },
    flops=lambda ins, outs, attrs: 0.0,
    samples=samples("3x5:f32 nograd target=aten.roll.default", args=_ROLL, out=("f32[3,5]",)),
)
def aten(*xs: TensorType, target: str, args: Any, kwargs: Any, **types: Any) -> Any:
    """A torch operator without a definition of ours, kept as a call and run as it is."""
    resolve(target)
    for name, texts in types.items():
        if not isinstance(texts, tuple) or not all(isinstance(t, str) for t in texts):
            wrong = f"{name}={texts!r} of {target} is not a list of types"
            raise GraphError(wrong, remedy="('f32[3,5]',)")
    if not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        raise GraphError(f"args={args!r} or kwargs={kwargs!r} of {target} is no list of arguments")
    try:  # the numbers of inputs stand for the inputs
        decode(
            ("list", *args, *(value for _, value in kwargs)), range(len(xs)), torch.device("cpu")
        )
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        given = f"args={args!r}, kwargs={kwargs!r}"
        wrong = f"{given} are no arguments of {target} with {len(xs)} inputs: {error}"
        raise GraphError(wrong) from error
    if types["seen"] and [parse_type(t).shape for t in types["seen"]] != [x.shape for x in xs]:
        raise GraphError(f"seen={types['seen']} of {target} are not the shapes of its operands")
    return tuple(parse_type(t) for t in types["out"])
