"""What ranks say to one another in a training step: which collective, how many bytes, when.

Bytes are those of the whole on one rank: of the tensor that is summed, of all that is gathered, of
all that is scattered. They are what DDP, FSDP2 and DTensors of torch send, counted in tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from deuteron.distributed.layout import Layout
from deuteron.distributed.reduction import Reduction
from deuteron.distributed.trace import Traced, blocks
from deuteron.errors import GraphError
from deuteron.passes.communication import Ranks, collective_seconds
from deuteron.target import Target

MIB = 2**20
BUCKET_MB = 25  # MiB of gradients that DDP sums at once unless you say; the first bucket has 1 MiB


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of a step. ``calls`` of them carry ``bytes`` altogether; ``hidden``
    says what they can run beside: "forward", "backward", or nothing; ``waited`` are the seconds by
    which it makes a step longer, if they are known. It may be in one of ``every`` so many steps."""

    kind: str
    why: str
    when: str
    bytes: int
    calls: int
    ranks: Ranks
    hidden: str = ""
    every: int = 1
    waited: float | None = None

    def seconds(self, target: Target) -> float:
        """Alone on the links, in a step on average."""
        each = self.bytes / max(self.calls, 1)
        return self.calls * collective_seconds(self.kind, each, self.ranks, target) / self.every


def units(model: nn.Module, names: Iterable[str], rest: bool = True) -> list[list[str]]:
    """Which of these parameters FSDP gathers at once: those of each repeated block of layers, as
    models are usually wrapped, and last, if ``rest``, what is left."""
    names = list(names)
    found = [[n for n in names if n.startswith(f"{block}.")] for block in blocks(model)]
    taken = {name for unit in found for name in unit}
    left = [name for name in names if name not in taken] if rest else []
    return [unit for unit in (*found, left) if unit]


def local_bytes(
    model: nn.Module, layout: Layout, split: frozenset[str], dtype: torch.dtype | None
) -> dict[str, int]:
    """Bytes of each parameter on a rank, before FSDP divides it."""
    params = model.named_parameters()
    return {n: nbytes(p, dtype) // (layout.tp if n in split else 1) for n, p in params}


def nbytes(t: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a parameter or buffer in a model of such numbers."""
    return t.numel() * (t.dtype if dtype is None or not t.is_floating_point() else dtype).itemsize


def padded(p: torch.Tensor, nbytes: int, ranks: int) -> int:
    """Bytes of a parameter whose first axis is filled up until ranks have equal parts."""
    rows = p.shape[0] if p.ndim else 1
    return nbytes // max(rows, 1) * (-(-rows // ranks) * ranks)


@dataclass(frozen=True)
class Agreeing:
    """How ranks of data parallelism make parameters agree. ``dtype``: what parameters are supposed
    to be of; ``reduction``: how gradients are summed where that is not as DDP does, or FSDP2's
    ``reduce_dtype``; ``reshard``: whether FSDP2 lets go of a block's parameters behind the way
    there; ``ddp``: the model's wrapper, if it has one."""

    accumulate: int = 1
    dtype: torch.dtype | None = None
    reduction: Reduction | None = None
    bucket_mb: int = BUCKET_MB
    reshard: bool = True
    ddp: nn.parallel.DistributedDataParallel | None = None


def of_parameters(
    model: nn.Module, layout: Layout, sizes: Mapping[str, int], graphs: Traced, how: Agreeing
) -> Iterator[Traffic]:
    """Of data parallelism, with so many bytes of each parameter on a rank before FSDP."""
    params = {name: p for name, p in model.named_parameters() if name in sizes}
    ddp = how.ddp
    items = {name: (how.dtype or p.dtype).itemsize for name, p in params.items()}
    if layout.fsdp > 1:
        yield from _of_parts(model, params, layout, sizes, items, graphs, how)
    elif layout.dp > 1:
        trained = [name for name, p in params.items() if p.requires_grad]
        groups = list[list[str]]()
        if layout.tp > 1:  # DDP takes no DTensors, and replicate() sends what has a gradient
            trained = [name for name in trained if name in graphs.grads]
            groups = units(model, trained)
        yield from _of_gradients(sizes, items, trained, layout, how, len(groups))
        if ddp is not None and ddp.find_unused_parameters:  # a number for each says who has it
            marks = 4 * len(trained)
            yield Traffic("all_reduce", "unused", "backward", marks, 1, layout.dp_ranks)
        buffers = sum(nbytes(b, how.dtype) for b in model.buffers())
        if buffers and (layout.tp == 1 if ddp is None else ddp.will_sync_module_buffers()):
            yield Traffic("broadcast", "buffers", "forward", buffers, 1, layout.dp_ranks)


def _of_parts(
    model: nn.Module,
    params: Mapping[str, torch.Tensor],
    layout: Layout,
    sizes: Mapping[str, int],
    items: Mapping[str, int],
    graphs: Traced,
    how: Agreeing,
) -> Iterator[Traffic]:
    """Of FSDP2: parameters are gathered for each unit, and again for the way back; gradients are
    scattered."""
    of, ranks = layout.fsdp, layout.fsdp_ranks
    sent = how.reduction or Reduction()
    if sent.numbers == "int8" or sent.every > 1:
        wrong = f"{sent} of parameters that are spread over ranks"
        remedy = 'use Reduction("bfloat16"), which is reduce_dtype of FSDP2'
        raise GraphError(wrong, asked="a prediction for several ranks", remedy=remedy)
    whole = {n: padded(params[n], sizes[n], of) for n in params}
    every, again = units(model, params), list[list[str]]()
    if how.reshard:
        inner = units(model, params, rest=False)
        passed = [graphs.goes_back(unit) for unit in inner]
        # the way back has the unit before the one it is in gathered as well, needed or not
        near = map(max, passed, (*passed[1:], True))
        again = [unit for unit, wanted in zip(inner, near, strict=True) if wanted]
    for when, some in (("forward", every), ("backward", again)):
        total, calls = (how.accumulate * n for n in (_sum(whole, some), len(some)))
        if some:
            yield Traffic("all_gather", "parameters", when, total, calls, ranks, when)
    made = [own for unit in every if (own := [n for n in unit if n in graphs.grads])]
    counts = {n: sent.sent(whole[n] // items[n], items[n], of)["all_reduce"] for n in params}
    total, what, when = _sum(counts, made), "gradients", "backward"
    yield Traffic("reduce_scatter", what, when, total, len(made), ranks, when)
    if layout.dp > 1:  # ranks that hold the same part agree on it
        yield Traffic("all_reduce", what, when, total // of, len(made), layout.dp_ranks, when)


def _sum(sizes: Mapping[str, int], names: Iterable[Iterable[str]]) -> int:
    return sum(sizes[name] for unit in names for name in unit)


def _of_gradients(
    sizes: Mapping[str, int],
    items: Mapping[str, int],
    trained: list[str],
    layout: Layout,
    how: Agreeing,
    groups: int,
) -> Iterator[Traffic]:
    """Of ranks that hold the same parameters: beside the way back, in ``groups`` where DTensors are
    replicated block by block, else in buckets, as DDP does it; as they are made, or all of a type
    at once behind it (reduction.py)."""
    ranks, reduction = layout.dp_ranks, how.reduction
    if reduction is None:
        total = sum(sizes[n] for n in trained)
        calls = groups or 1 + max(0, math.ceil((total - MIB) / (how.bucket_mb * MIB)))
        yield Traffic("all_reduce", "gradients", "backward", total, calls, ranks, "backward")
        return
    for item in dict.fromkeys(items[n] for n in trained):
        own = [n for n in trained if items[n] == item]
        count, large = sum(sizes[n] // item for n in own), sum(sizes[n] >= MIB for n in own)
        for kind, nbytes in reduction.sent(count, item, ranks.size).items():
            if kind != "all_reduce" or reduction.every > 1:
                why = "gradients" if reduction.every == 1 else "parameters"
                yield Traffic(kind, why, "update", nbytes, 1, ranks, every=reduction.every)
            else:  # small ones go together
                given = kind, "gradients", "backward", nbytes, large + 1, ranks, "backward"
                yield Traffic(*given)


def of_batch_norms(
    model: nn.Module, layout: Layout, dtype: torch.dtype | None, accumulate: int
) -> Iterator[Traffic]:
    """Of batch norms over the batches of all ranks."""
    norms = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and hasattr(m, "process_group")
    ]
    if not norms or layout.batches == 1:
        return
    kinds = [dtype or (torch.float32 if m.weight is None else m.weight.dtype) for m in norms]
    sizes = [torch.promote_types(kind, torch.float32).itemsize for kind in kinds]
    rows = sum(s * (2 * m.num_features + 1) for s, m in zip(sizes, norms, strict=True))
    total, calls = rows * layout.batches * accumulate, len(norms) * accumulate
    for kind, when in (("all_gather", "forward"), ("reduce_scatter", "backward")):
        yield Traffic(kind, "statistics of batch norms", when, total, calls, layout.batch_ranks)
