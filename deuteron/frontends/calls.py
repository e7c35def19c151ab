"""What a call of torch's does besides computing: it writes to its arguments, draws random numbers,
or gives a result whose size is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from deuteron.errors import GraphError
from deuteron.frontends.aten import schema_order
from deuteron.frontends.proxies import NeedsExport, Proxy
from deuteron.frontends.refusals import user_frame

# calls that write to running statistics if their argument 5 says so
LEARNS = {"aten.batch_norm.default", "aten.instance_norm.default"}
# calls that write nothing in eval mode
DROPOUTS = {f"aten.{kind}dropout_.default" for kind in ("", "alpha_", "feature_", "feature_alpha_")}
# calls whose second result follows from their second argument alone: how many sequences have a
# step, and how long each sequence is
SEQUENCES = {f"aten._{kind}_sequence.default" for kind in ("pack_padded", "pad_packed")}
# argument values that turn off a call's random numbers
_OFF = {"p": 0, "dropout_p": 0, "dropout": 0, "train": False, "training": False}


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes random numbers; some do only where an argument asks for it."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = schema_order(func, args, kwargs)
    named = {a.name: value for a, value in zip(func._schema.arguments, given, strict=True)}
    return not any(name in named and named[name] == off for name, off in _OFF.items())


def written_over(func: Any, args: Sequence[Any]) -> Proxy | None:
    """The tensor that a call writes over and returns, if only forward has that tensor."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return None
    own = args[0] if args and isinstance(args[0], Proxy) and args[0].own else None
    return own if func._schema.name.endswith("_") else None


def writing_nothing(func: OpOverload) -> OpOverload:
    """The same call with its result in new memory: ``relu`` for ``relu_``."""
    if func.name().startswith("aten::set_"):  # from then on, both tensors share their memory
        raise NeedsExport(str(func))
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if func.namespace != "aten" or func._overloadname not in (packet.overloads() if packet else ()):
        raise NeedsExport(str(func))
    found: OpOverload = getattr(packet, func._overloadname)
    return found


def sized_by(func: Any, args: Sequence[Any], tensors: Sequence[Proxy]) -> Sequence[Proxy]:
    """The tensors of unknown numbers that decide how large the result of a call is."""
    sizing = tensors if torch.Tag.dynamic_output_shape in func.tags else ()
    if str(func) == "aten.index.Tensor":  # masks do, indices do not
        sizing = [t for t in tensors[1:] if t.dtype in (torch.bool, torch.uint8)]
    elif str(func) == "aten.masked_select.default":
        sizing = tensors[1:]
    elif str(func) == "aten.one_hot.default" and args[1:] and args[1] > 0:
        return ()
    return [t for t in sizing if not t.known]


def size_by_values(func: OpOverload) -> GraphError:
    wrong = f"the size of what {func} gives depends on the values of its inputs"
    remedy = "keep the shape, by torch.where or a product with the mask; or leave it outside"
    return GraphError(wrong, asked="a graph of fixed shapes", where=user_frame(), remedy=remedy)


def elements_on_cpu(answer: Any) -> int:
    tensors = answer if isinstance(answer, list | tuple) else [answer]
    return sum(t.numel() for t in tensors if isinstance(t, torch.Tensor) and t.is_cpu)
