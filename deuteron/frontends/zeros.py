"""Results by shape alone, while a module is traced, for products, convolutions and operators of
ours.

Nobody looks at the numbers, and these calls are nearly all of what running a module costs: a
segmentation network at 512² takes seconds. So they are answered with zeros of the shape and memory
order that torch would give. So are operators of ours, for which a plan of their own would be made
only to be thrown away. Any call that is not plainly of that kind is left to torch, which computes
it, or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from deuteron.errors import GraphError
from deuteron.frontends.aten import schema_order
from deuteron.frontends.sparse import is_sparse
from deuteron.ir.types import TensorType
from deuteron.ops.table import infer


def zeros_like_result(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor | list[torch.Tensor] | None:
    """Zeros in the place of what a call of real tensors would compute; None if the call has to be
    computed."""
    if func.namespace == "deuteron":
        return _zeros_of_ours(func, args, kwargs)
    if any(map(is_sparse, args)):
        return None
    op, names = COSTLY.get(str(func), ("", ""))
    if not op:
        return None
    given = schema_order(func, args, kwargs)
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    first = tensors[0]
    alike = {(t.dtype, t.device) for t in tensors} == {(first.dtype, first.device)}
    images = op == "conv" and first.ndim == 4
    if not alike or not (images or all(t.is_contiguous() for t in tensors)):
        return None
    try:
        types = [None if t is None else TensorType.from_tensor(t) for t in given[:3]]
        _, (made,) = infer(op, types, dict(zip(names.split(), given[3:], strict=True)))
    except GraphError:
        return None
    order = _order_of_images(*given) if images else torch.contiguous_format
    room = torch.empty(made.shape, device=first.device, dtype=first.dtype, memory_format=order)
    return room.zero_()


def _order_of_images(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> torch.memory_format:
    """The memory order in which the library that torch would choose returns its result."""
    steps, edges, apart = (
        [v, v] if isinstance(v, int) else [*v, *v][:2] for v in (stride, padding, dilation)
    )
    how = steps, edges, apart, False, [0, 0], groups
    sizes = None if bias is None else [len(bias)]
    library = torch._C._select_conv_backend(x, weight, bias, *how, sizes)
    return torch._C._conv_determine_backend_memory_format(x, weight, library)


def _zeros_of_ours(func: OpOverload, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
    def like(t: torch.Tensor, device: Any) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    typed = func(*[like(a, "meta") if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    return [like(t, device).zero_() for t in typed]


# call → our operator of x, weight and bias, and its attributes in the order of further arguments
COSTLY = {f"aten.conv{n}d.default": ("conv", "stride padding dilation groups") for n in (1, 2, 3)}
COSTLY["aten.linear.default"] = ("linear", "")
