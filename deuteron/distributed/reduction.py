"""How ranks that hold the same parameters make them agree, where a step does that itself.

DistributedDataParallel of torch sums gradients while the way back is still running, from hooks on
the host. A step that is one CUDA Graph cannot wait for the host, and fewer bytes than the numbers
have are nothing that DDP chooses by itself: so a step can leave DDP's hooks out. Where the step is
one graph, its plan has a mean over ranks behind each gradient, begun as soon as that is made and
waited for at the end; else, and for 8-bit numbers, all of it is done here, in a few calls behind
the way back. What is sent is known beforehand, to the byte.

8-bit numbers go the way of an all-reduce in two halves. Every block of :data:`BLOCK` numbers has a
scale, its largest size over 127. Ranks exchange parts, so that each has all of one part, add those
up in float32, and send the mean around. Both times what rounding took away is kept and added to the
next gradient, so that no part of a gradient is lost; it only comes later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deuteron.errors import EngineError, GraphError
from deuteron.ops.collective import called, wait
from deuteron.passes.collective import Means

BLOCK = 256  # numbers of 8 bits that share a scale
SCALE = 4  # bytes of a scale
SMALL = 2**20  # bytes, below which tensors are sent together
SENT = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NUMBERS = ("own", *SENT, "int8")
ASKED = "a reduction of gradients"


@dataclass(frozen=True)
class Reduction:
    """How ranks in DistributedDataParallel make their parameters agree, for ``dt.train_step``.

    >>> step = dt.train_step(ddp, loss_fn, optimizer, batch, reduction=Reduction("int8"))

    * ``numbers``: what gradients are sent in. "own" is their own type, exact but for the order of
      the sum. "float16" and "bfloat16" round every gradient before the sum and after; "float32"
      is for gradients of 16 bits, which are then summed without rounding in between. "int8" is
      one byte for each number and four for every 256, with a rest that is kept and added to the
      next gradient: it takes 4 bytes more for each parameter on every rank.
    * ``every``: so many steps of the optimiser are made by each rank alone; then parameters are
      averaged (local SGD). Gradients are not sent at all.
    """

    numbers: str = "own"
    every: int = 1

    def __post_init__(self) -> None:
        if self.numbers not in NUMBERS:
            wrong = f"numbers={self.numbers!r}"
            raise GraphError(wrong, asked=ASKED, remedy=f"use one of {', '.join(NUMBERS)}")
        if type(self.every) is not int or self.every < 1:
            remedy = "give a whole number from 1 on"
            raise GraphError(f"every={self.every!r}", asked=ASKED, remedy=remedy)
        if self.every > 1 and self.numbers != "own":
            wrong = f"numbers={self.numbers!r} with every={self.every}"
            why = "parameters are averaged, in their own numbers"
            raise GraphError(f"{wrong}: {why}", asked=ASKED, remedy="leave one of them out")

    def sent(self, count: int, itemsize: int, ranks: int) -> dict[str, int]:
        """Bytes by kind of collective for ``count`` gradients of a type."""
        if self.numbers == "int8":
            whole = message(count, ranks) * ranks
            return {"all_to_all": whole, "all_gather": whole}
        size = SENT[self.numbers].itemsize if self.numbers in SENT else itemsize
        return {"all_reduce": count * size}


def message(count: int, ranks: int) -> int:
    """Bytes of the 8-bit numbers and scales that go from one rank to another."""
    blocks = math.ceil(count / (ranks * BLOCK))
    return blocks * (BLOCK + SCALE)


def why_not(model: DistributedDataParallel) -> str:
    """What a model was wrapped with that only DDP's own hooks do; "" where there is nothing."""
    if model._comm_hooks:
        return "it has a communication hook"
    if model.find_unused_parameters:
        return "find_unused_parameters=True"
    if getattr(model, "mixed_precision", None) is not None:
        return "mixed_precision=…"
    if model.parameters_to_ignore:
        return "some parameters are ignored"
    if any(getattr(part, "sparse", False) for part in model.modules()):
        return "gradients of an embedding are sparse"
    return ""


class Agreement:
    """Makes the parameters of a model that is wrapped in DDP agree over its ranks."""

    def __init__(self, model: DistributedDataParallel, reduction: Reduction) -> None:
        self.model, self.reduction = model, reduction
        self.ranks = dist.get_world_size(model.process_group)
        named = model.module.named_parameters()
        self.params = {name: p for name, p in named if p.requires_grad}
        self._eight: dict[torch.dtype, EightBits] = {}

    def move_to(self, stream: torch.cuda.Stream | None) -> None:
        """Let parameters get their gradients on the stream where steps are captured. DDP's reducer
        keeps the nodes of autograd that add them up, and a node runs on the stream on which it was
        made: the default one, which no capture can wait for. So the reducer is made again."""
        model: Any = self.model
        model.reducer = model.logger = None
        with torch.cuda.stream(stream):
            params, sparse = model._build_params_for_reducer()
            names = model._build_debug_param_to_name_mapping(params)
            model._ddp_init_helper(params, sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()
            model.logger._set_static_graph()

    def buffers(self) -> None:
        """Buffers as those of the first rank, if the model was wrapped so."""
        if self.model.will_sync_module_buffers():
            with torch.no_grad():
                self.model._sync_buffers()

    def inside(self) -> Means | None:
        """What a plan must know to make gradients agree itself, each as soon as it is made; None
        where that is done behind it."""
        if self.reduction.numbers == "int8" or self.reduction.every > 1 or self.ranks == 1:
            return None
        group = self.model.process_group
        kind = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}.get(self.reduction.numbers)
        averages = dist.get_backend(group) == "nccl"
        params = frozenset(map(id, self.params.values()))
        return Means(params, group.group_name, self.ranks, kind, averages)

    @torch.no_grad()
    def gradients(self, agree: Collection[int] = ()) -> None:
        """The mean over ranks of every gradient, in its place, but those of parameters, by their
        identity, that ``agree`` already."""
        every = [(p, self._gradient(name, p)) for name, p in self.params.items()]
        for grads in self._by_type([grad for p, grad in every if id(p) not in agree]):
            kind = grads[0].dtype
            if self.reduction.numbers == "int8":
                if kind not in self._eight:
                    total = sum(g.numel() for g in grads)
                    self._eight[kind] = EightBits(total, self.ranks, grads[0].device)
                flat, views = flattened(grads, torch.float32)
                torch._foreach_copy_(views, grads)
                self._eight[kind].mean_(flat, self.model.process_group)
                torch._foreach_copy_(grads, views)
            elif self.reduction.numbers in SENT:
                flat, views = flattened(grads, SENT[self.reduction.numbers])
                torch._foreach_copy_(views, grads)
                flat.div_(self.ranks)
                called("all_reduce_", flat, "sum", self.model.process_group.group_name)
                torch._foreach_copy_(grads, views)
            else:
                self._mean_(grads)

    @torch.no_grad()
    def parameters(self) -> None:
        """The mean over ranks of every parameter, in its place."""
        for params in self._by_type(list(self.params.values())):
            self._mean_(params)

    def _gradient(self, name: str, p: nn.Parameter) -> Tensor:
        if p.grad is not None and p.grad.layout is torch.strided:
            return p.grad
        wrong = "no gradient" if p.grad is None else f"a gradient that is {p.grad.layout}"
        remedy = "call requires_grad_(False) on what the loss does not depend on before wrapping"
        if p.grad is not None:
            remedy = "use sparse=False"
        raise EngineError(f"{name} has {wrong}", asked=ASKED, remedy=remedy)

    def _by_type(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        for kind in dict.fromkeys(t.dtype for t in tensors):
            yield [t.detach() for t in tensors if t.dtype is kind]

    def _mean_(self, tensors: list[Tensor]) -> None:
        """Large ones where they are, and small ones, which take as long as it takes to begin, in a
        row. All are on their way before the first is waited for."""
        group, start = self.model.process_group, torch.ops._c10d_functional.all_reduce_
        small = [t for t in tensors if t.nbytes < SMALL or not t.is_contiguous()]
        large = [t for t in tensors if t.nbytes >= SMALL and t.is_contiguous()]
        views: list[Tensor] = []
        if small:
            flat, views = flattened(small, small[0].dtype)
            torch._foreach_copy_(views, small)
            large.append(flat)
        averages = dist.get_backend(group) == "nccl"
        for t in large:
            start(t, "avg" if averages else "sum", group.group_name)
        for t in large:
            wait(t)
        if not averages:
            torch._foreach_div_(large, self.ranks)
        if small:
            torch._foreach_copy_(small, views)


def flattened(tensors: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Memory for all of them in a row, and a view of it for each."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=kind, device=tensors[0].device)
    parts = flat.split([t.numel() for t in tensors])
    return flat, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


@dataclass
class EightBits:
    """The mean over ranks of so many numbers, sent in 8 bits, and what rounding has left over: of
    what this rank sends (``own``), and of the part that it adds up (``added``)."""

    count: int
    ranks: int
    device: torch.device
    own: Tensor = field(init=False)
    added: Tensor = field(init=False)

    def __post_init__(self) -> None:
        blocks = math.ceil(self.count / (self.ranks * BLOCK))
        shape = self.ranks, blocks, BLOCK
        self.own = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.added = torch.zeros(shape[1:], dtype=torch.float32, device=self.device)

    def mean_(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Of ``x``, one axis of float32, in its place."""
        self.own.view(-1)[: self.count].add_(x, alpha=1 / self.ranks)
        sent = short_of_(self.own)
        each = [1] * self.ranks  # row to and from every rank
        came = called("all_to_all_single", sent, each, each, group.group_name)
        self.added.add_(long_of(came).sum(0))
        part = short_of_(self.added[None])
        whole = called("all_gather_into_tensor", part, self.ranks, group.group_name)
        x.copy_(long_of(whole).reshape(-1)[: self.count])


def short_of_(x: Tensor) -> Tensor:
    """Rows of blocks in 8 bits, with their scales behind them: rows of bytes. What rounding takes
    away stays in ``x``; of a block with inf or nan nothing does, and nan is what comes out."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    near = torch.where(scale > 0, x / scale, 0).round_()
    x.sub_(near * scale)
    x.copy_(torch.where(scale.isfinite(), x, 0))
    rows = [t.contiguous().view(torch.uint8).flatten(1) for t in (near.to(torch.int8), scale)]
    return torch.cat(rows, 1)


def long_of(rows: Tensor) -> Tensor:
    """The numbers of :func:`short_of_` in float32: row, block, number."""
    blocks = rows.shape[1] // (BLOCK + SCALE)
    near, scale = rows.split([blocks * BLOCK, blocks * SCALE], 1)
    scale = scale.contiguous().view(torch.float32)
    whole: Tensor = near.contiguous().view(torch.int8).reshape(-1, blocks, BLOCK)
    return whole.mul(scale[..., None])
