"""What ranks send one another in a training step: which collectives, how many bytes, and when.

Bytes of a collective are those of the whole tensor on one rank: the one that is summed, or the one
that is gathered to, or the one that is scattered. They are what DDP, FSDP2 and DTensors of torch
send; tests count that.
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
BUCKET_MB = 25  # MiB of gradients that DDP sums at once by default; its first bucket has 1 MiB


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step: ``kind`` (which), ``why`` (of what) and ``when``.

    ``calls`` of them carry ``bytes`` altogether, between ``ranks``. ``hidden``: the work that they
    can overlap with, "forward", "backward" or "" for none. ``every``: they happen in one of so many
    steps. ``waited``: the seconds by which they make a step longer, if known already."""

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
        """Seconds per step, on average, if these collectives are alone on the links."""
        each = self.bytes / max(self.calls, 1)
        return self.calls * collective_seconds(self.kind, each, self.ranks, target) / self.every


def units(model: nn.Module, names: Iterable[str], rest: bool = True) -> list[list[str]]:
    """Lists of those of these parameters that FSDP gathers at once: one list for each repeated
    block of layers, as models are usually wrapped, and last, with ``rest``, one of all others."""
    names = list(names)
    found = [[n for n in names if n.startswith(f"{block}.")] for block in blocks(model)]
    taken = {name for unit in found for name in unit}
    left = [name for name in names if name not in taken] if rest else []
    return [unit for unit in (*found, left) if unit]


def local_bytes(
    model: nn.Module, layout: Layout, split: frozenset[str], dtype: torch.dtype | None
) -> dict[str, int]:
    """Bytes of each parameter on a rank, before FSDP shards it; ``split``: those that tp
    divides."""
    params = model.named_parameters()
    return {n: nbytes(p, dtype) // (layout.tp if n in split else 1) for n, p in params}


def nbytes(t: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a parameter or buffer; floating-point ones as ``dtype``, if that is given."""
    return t.numel() * (t.dtype if dtype is None or not t.is_floating_point() else dtype).itemsize


def padded(p: torch.Tensor, nbytes: int, ranks: int) -> int:
    """Bytes of a parameter after its first axis is padded so that all ranks get equal parts."""
    rows = p.shape[0] if p.ndim else 1
    return nbytes // max(rows, 1) * (-(-rows // ranks) * ranks)


@dataclass(frozen=True)
class Agreeing:
    """How the ranks of data parallelism keep their parameters equal. ``dtype``: the element type
    assumed for parameters; ``reduction``: how gradients are summed, if not as DDP does it, or
    FSDP2's ``reduce_dtype``; ``reshard``: whether FSDP2 frees a block's gathered parameters after
    the block's forward pass; ``ddp``: the model's DDP wrapper, if it has one."""

    accumulate: int = 1
    dtype: torch.dtype | None = None
    reduction: Reduction | None = None
    bucket_mb: int = BUCKET_MB
    reshard: bool = True
    ddp: nn.parallel.DistributedDataParallel | None = None


def of_parameters(
    model: nn.Module, layout: Layout, sizes: Mapping[str, int], graphs: Traced, how: Agreeing
) -> Iterator[Traffic]:
    """The traffic of data parallelism. ``sizes``: bytes of each parameter on a rank before FSDP."""
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
        if ddp is not None and ddp.find_unused_parameters:  # a number each: who uses it
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
    """The traffic of FSDP2: parameters are gathered for each unit, and again for the backward pass;
    gradients are reduced and scattered."""
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
        # backward also prefetches the unit before the one that it is in, whether needed or not
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
    """The traffic of ranks that hold the same parameters. Without a ``reduction`` gradients are
    summed during the backward pass: in so many ``groups`` if DTensors are replicated block by
    block, else in DDP's buckets. With one they are summed as soon as they are made, or all of one
    element type at once after the backward pass (reduction.py)."""
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
            else:  # small ones share a call
                given = kind, "gradients", "backward", nbytes, large + 1, ranks, "backward"
                yield Traffic(*given)


def of_batch_norms(
    model: nn.Module, layout: Layout, dtype: torch.dtype | None, accumulate: int
) -> Iterator[Traffic]:
    """The traffic of batch norms that normalise over the batches of all ranks."""
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
