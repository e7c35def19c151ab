"""Small helpers on tensors for planning and running: compare, copy, make up random ones."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops.evaluate import implied

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is private to torch: without it tensors are compared in Python
    TensorGuards = None  # type: ignore[assignment, misc]


def comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that says whether other tensors are like these (of their classes, types,
    devices, shapes, strides, dispatch keys and ``requires_grad``), by torch's native comparison;
    None where torch has none. A tensor that is given twice is like none."""
    if TensorGuards is None:
        return None
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=cast(Any, [list(t.shape) for t in tensors]),
        dynamic_dims_strides=cast(Any, [list(t.stride()) for t in tensors]),
    ).check


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error relative to the largest finite value; inf where nan or inf disagree."""
    if out.shape != exact.shape:
        return math.inf
    if out.numel() == 0:
        return 0.0
    if out.is_complex() and exact.is_complex():
        out, exact = (torch.view_as_real(t.resolve_conj()) for t in (out, exact))
    if not (out.is_floating_point() or exact.is_floating_point()):
        return 0.0 if torch.equal(out, exact.to(out.dtype)) else math.inf
    wide = torch.float32 if exact.dtype != torch.float64 else torch.float64
    a, b = out.to(wide), exact.to(wide)
    difference = (a - b).abs()
    scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())
    worst = float(difference.max())
    if math.isfinite(worst):
        return worst / max(scale, 1e-30) if worst else 0.0
    agree = torch.isclose(a, b, rtol=1e-2, atol=1e-2 * max(scale, 1e-30), equal_nan=True)
    if not bool(agree.all()):
        return math.inf
    return float(difference.nan_to_num(0.0, 0.0, 0.0).max()) / max(scale, 1e-30)


def errors_of(
    region: Region, outs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> list[float]:
    """:func:`relative_error` of every output. An output that follows exactly from other outputs is
    compared with what these imply."""
    follow = implied(region.graph, dict(zip(region.outputs, outs, strict=True)))
    wanted = (follow.get(v, e) for v, e in zip(region.outputs, exact, strict=True))
    return list(map(relative_error, outs, wanted))


def overlaps(type_: TensorType) -> bool:
    """Whether two elements may share a place in memory, as in an expanded tensor."""
    reach = 0
    dims = zip(type_.strides, type_.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in dims if n > 1):
        if stride <= reach:
            return type_.numel > 0
        reach += (size - 1) * stride
    return False


def poisoned(type_: TensorType, device: torch.device) -> torch.Tensor:
    """A tensor for a kernel to write, filled with numbers that cannot pass for a result, also in
    the gaps between its elements."""
    flat = torch.empty(type_.storage_numel, dtype=type_.dtype.torch, device=device)
    return _poison(flat, type_).as_strided(type_.shape, type_.strides)


def is_kept_between(out: torch.Tensor, type_: TensorType) -> bool:
    """Whether a kernel left the gaps between the elements of a :func:`poisoned` tensor alone."""
    if type_.is_dense or overlaps(type_):
        return True
    flat = out.as_strided((type_.storage_numel,), (1,))
    between = torch.ones_like(flat, dtype=torch.bool)
    between.as_strided(type_.shape, type_.strides).fill_(False)
    found, before = flat[between], _poison(flat[between], type_)
    return torch.equal(found.view(torch.uint8), before.view(torch.uint8))


def _poison(out: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Fill ``out`` with poison and return it."""
    if type_.dtype.is_float and type_.dtype.bits >= 16:
        return out.fill_(math.nan)
    if type_.dtype.is_float:
        return out.view(torch.uint8).fill_(0x7F).view(out.dtype)
    return out.fill_(85)


def shown_at(given: torch.Tensor, got: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that takes the same view of tensors laid out like ``given`` as ``got`` is
    of ``given``."""
    shape, strides = got.shape, got.stride()
    further = got.storage_offset() - given.storage_offset()
    return lambda x: x.as_strided(shape, strides, x.storage_offset() + further)


def restrided(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """The tensor in the memory order the plan promised; copied only if it differs.

    Where ``type_`` is expanded, the elements that share a place are taken to be equal.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if same_strides(type_.shape, tensor.stride(), type_.strides):
        return tensor
    out = torch.empty_strided(type_.shape, type_.strides, dtype=tensor.dtype, device=tensor.device)
    once_out, once = out, tensor
    for dim, (size, stride) in enumerate(zip(type_.shape, type_.strides, strict=True)):
        if stride == 0 and size > 1:
            once_out, once = once_out.narrow(dim, 0, 1), once.narrow(dim, 0, 1)
    once_out.copy_(once)
    return out


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own with the very same strides, gaps and overlaps included."""
    type_ = TensorType.from_tensor(tensor)
    if type_.is_dense:
        return tensor.clone()
    span = tensor.as_strided((type_.storage_numel,), (1,))
    return span.clone().as_strided(type_.shape, type_.strides)


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, with one call for all pairs that a torch
    kernel can take together: those with the same element types, and equal strides in each pair."""
    kinds: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for to, of in pairs:
        same = to.stride() == of.stride()
        kinds.setdefault((to.dtype, of.dtype, same), []).append((to, of))
    for alike in kinds.values():
        torch._foreach_copy_([to for to, _ in alike], [of for _, of in alike])


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside this context torch's generator for the CPU starts from the same seed each time, so
    that results that depend on random numbers can be compared. Afterwards it is as it was
    before."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(0)
    try:
        yield
    finally:
        generator.set_state(before)


def random_tensor(
    type_: TensorType, device: torch.device, gen: torch.Generator, high: int = 2
) -> torch.Tensor:
    """Random values in exactly the memory order of ``type_``, stride 0 included."""
    dt = type_.dtype.torch
    count = max(type_.storage_numel, 0)
    if type_.dtype.kind == "bool":
        flat = torch.randint(0, 2, (count,), generator=gen, device=device).bool()
    elif type_.dtype.kind == "complex":
        flat = torch.randn(count, generator=gen, device=device, dtype=dt)
    elif not type_.dtype.is_float:
        flat = torch.randint(0, max(high, 1), (count,), generator=gen, device=device).to(dt)
    else:
        wide = torch.float64 if type_.dtype.bits == 64 else torch.float32
        flat = torch.randn(count, generator=gen, device=device, dtype=wide).to(dt)
    return flat.as_strided(type_.shape, type_.strides)
