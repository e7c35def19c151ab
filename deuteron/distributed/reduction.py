"""How a step keeps the parameters of data-parallel ranks equal, where it does that in place of DDP.

DistributedDataParallel of torch sums gradients during the backward pass, from hooks on the host. A
step that is one CUDA Graph cannot wait for the host, and DDP never chooses to send fewer bytes than
the gradients have: so a step can leave DDP's hooks out. Where the step is one graph, its plan has a
mean over ranks after each gradient (or a sum, where backward can begin with a number that is
divided by the ranks already). The mean begins as soon as its gradient is made and is waited for at
the end. Otherwise, and for 8-bit numbers, all of it is done here, in a few calls after the backward
pass. What is sent is known beforehand, to the byte.

8-bit numbers are summed in the two halves of an all-reduce. Every block of :data:`BLOCK` numbers
has a scale, its largest absolute value over 127. First each rank receives its part of the numbers
from all ranks, and adds these up in float32; then it sends the mean to all. Both times the error of
rounding is kept and added to the next gradient, so that no part of a gradient is lost; it only
comes later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deuteron.errors import EngineError, GraphError
from deuteron.functional.core import Function
from deuteron.ir.dtype import dtype
from deuteron.ops import Ops, Sym
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

    * ``numbers``: the type in which gradients are sent. "own" is their own, exact but for the order
      of the sum. "float16" and "bfloat16" round every gradient before the sum and after; "float32"
      is for gradients of 16 bits, which are then summed without rounding in between. "int8" sends
      one byte for each number and four for every 256; the error of rounding is kept and added to
      the next gradient, which takes 4 bytes more for each parameter on every rank.
    * ``every``: each rank makes so many steps of the optimiser alone; then all ranks average their
      parameters (local SGD). With ``every`` above 1 gradients are not sent at all.
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
        """Bytes by kind of collective for ``count`` gradients of ``itemsize`` bytes each."""
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
    """What about a model only DDP's own hooks can handle, in words; "" if there is nothing."""
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
    """Averages gradients or parameters over the ranks of a DDP model, in place of DDP's hooks."""

    def __init__(self, model: DistributedDataParallel, reduction: Reduction) -> None:
        self.model, self.reduction = model, reduction
        self.ranks = dist.get_world_size(model.process_group)
        # NCCL computes means itself; gloo only sums, and we divide
        self.averages = dist.get_backend(model.process_group) == "nccl"
        self.reduce = "avg" if self.averages else "sum"
        named = model.module.named_parameters()
        self.params = {name: p for name, p in named if p.requires_grad}
        self._eight: dict[torch.dtype, EightBits] = {}

    def move_to(self, stream: torch.cuda.Stream | None) -> None:
        """Let parameters get their gradients on the stream where steps are captured. DDP's reducer
        keeps the autograd nodes that accumulate gradients, and a node runs on the stream on which
        it was made: the default one, which no capture can wait for. So we make the reducer again,
        on this stream."""
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
        """Copy the first rank's buffers to all ranks, if the model's DDP wrapper asks for that."""
        if self.ranks > 1 and self.model.will_sync_module_buffers():
            with torch.no_grad():
                self.model._sync_buffers()

    def inside(self) -> Means | None:
        """Return what a plan must know to average gradients over ranks itself, each as soon as it
        is made; None if that is done after the plan has run."""
        if self.reduction.numbers == "int8" or self.reduction.every > 1 or self.ranks == 1:
            return None
        group = self.model.process_group
        kind = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}.get(self.reduction.numbers)
        params = frozenset(map(id, self.params.values()))
        return Means(params, group.group_name, self.ranks, kind, self.averages, 1 / self.ranks)

    @torch.no_grad()
    def gradients(self, agree: Collection[int] = ()) -> None:
        """Make every ``.grad`` the mean over ranks, except those of the parameters with an id in
        ``agree``, which a plan has averaged already. A single rank changes and rounds nothing."""
        every = [(p, self._gradient(name, p)) for name, p in self.params.items()]
        owners = [(p, grad) for p, grad in every if id(p) not in agree and self.ranks > 1]
        for grads in self._by_type([grad for _, grad in owners]):
            kind, group = grads[0].dtype, self.model.process_group
            if self.reduction.numbers == "int8":
                if kind not in self._eight:
                    total = sum(grad.numel() for grad in grads)
                    self._eight[kind] = EightBits(total, self.ranks, grads[0])
                owned = (p for p, grad in owners if grad.dtype is kind)
                means = self._eight[kind].mean(grads, group)
                for p, grad, mean in zip(owned, grads, means, strict=True):
                    if grad.is_contiguous():
                        p.grad = mean  # saves a copy
                    else:
                        grad.copy_(mean)
            elif self.reduction.numbers in SENT:
                flat, views = flattened(grads, SENT[self.reduction.numbers])
                torch._foreach_copy_(views, grads)
                if not self.averages:
                    flat.div_(self.ranks)
                called("all_reduce_", flat, self.reduce, group.group_name)
                torch._foreach_copy_(grads, views)
            else:
                self._mean_(grads)

    @torch.no_grad()
    def parameters(self) -> None:
        """Make every parameter the mean over ranks, in place."""
        if self.ranks == 1:
            return
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
        """Average tensors of one type over ranks, in place. Large ones are sent from where they
        lie. Small ones only cost the time to begin a call, so they are sent together. All are under
        way before the first is waited for."""
        group, start = self.model.process_group, torch.ops._c10d_functional.all_reduce_
        small = [t for t in tensors if t.nbytes < SMALL or not t.is_contiguous()]
        large = [t for t in tensors if t.nbytes >= SMALL and t.is_contiguous()]
        views: list[Tensor] = []
        if small:
            flat, views = flattened(small, small[0].dtype)
            torch._foreach_copy_(views, small)
            large.append(flat)
        for t in large:
            start(t, self.reduce, group.group_name)
        for t in large:
            wait(t)
        if not self.averages:
            torch._foreach_div_(large, self.ranks)
        if small:
            torch._foreach_copy_(small, views)


def flattened(tensors: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Allocate memory for all these tensors in a row; return it, and a view of it for each."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=kind, device=tensors[0].device)
    parts = flat.split([t.numel() for t in tensors])
    return flat, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _shortened(b: Ops, x: Sym) -> tuple[Sym, Sym, Sym]:
    """Round blocks to 8 bits; return them, their scales, and the error of rounding. A block with
    inf or nan has no error to keep, and is nan when it is read back."""
    scale = b.one("max", b.abs(x), axes=(-1,), keepdim=True) / 127.0
    finite = scale < math.inf
    near = b.round(b.where(b.logical_and(finite, scale > 0.0), x / scale, 0.0))
    left = b.where(finite, x - near * scale, 0.0)
    return b.cast(near, dtype="i8"), scale, left


def _short(b: Ops, rest: Sym, x: Sym, *, share: float) -> tuple[Sym, Sym, Sym]:
    """Round the error that was kept (``rest``) plus a ``share`` of these numbers."""
    return _shortened(b, rest + b.cast(x, dtype="f32") * share)


def _short_sum(b: Ops, rest: Sym, near: Sym, scale: Sym) -> tuple[Sym, Sym, Sym]:
    """Round the error that was kept (``rest``) plus the sum over ranks of what they have sent."""
    each = near * scale
    one = each.type.shape[0] == 1
    total = b.reshape(each, shape=rest.type.shape) if one else b.one("sum", each, axes=(0,))
    return _shortened(b, rest + total)


def _long(b: Ops, near: Sym, scale: Sym, *, dtype: str) -> Sym:
    return b.one("cast", near * scale, dtype=dtype)


# The new error of rounding (result 2) overwrites the old one; callers get results 0 and 1 only.
_OWN: Any = {"eager": True, "into": {2: "rest"}, "handed": 2}
SHORT = Function("eight_bits", _short, **_OWN)
SHORT_SUM = Function("eight_bits_of_sum", _short_sum, **_OWN)
LONG = Function("from_eight_bits", _long, eager=True)


def run(function: Function, *tensors: Tensor, **attrs: Any) -> Sequence[Tensor]:
    """Run a function's plan, which is made once for these sizes: one pass over the tensors."""
    return function.plan(tensors, attrs).results(tensors)


class EightBits:
    """Averages ``count`` numbers of one type over ranks, sent in 8 bits. It keeps the errors of
    rounding: of what this rank sends (``own``), and of the part that it adds up (``added``)."""

    def __init__(self, count: int, ranks: int, like: Tensor) -> None:
        self.count, self.ranks, self.kind = count, ranks, dtype(like.dtype).short
        blocks = math.ceil(count / (ranks * BLOCK))
        self.own = like.new_zeros((ranks, blocks, BLOCK), dtype=torch.float32)
        self.added = torch.zeros_like(self.own[0])
        self.filled = like.new_zeros(self.own.numel() - count)  # fills up the last block

    def mean(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Return the mean of each of these tensors; the means lie in one piece of memory."""
        x = torch.cat([*(t.reshape(-1) for t in tensors), self.filled]).view(self.own.shape)
        sent = in_rows(*run(SHORT, self.own, x, share=1 / self.ranks))
        each = [1] * self.ranks  # rows to, and from, every rank
        came = called("all_to_all_single", sent, each, each, group.group_name)
        near, scale = run(SHORT_SUM, self.added, *of_rows(came))
        part = in_rows(near[None], scale[None])
        whole = called("all_gather_into_tensor", part, self.ranks, group.group_name)
        (mean,) = run(LONG, *of_rows(whole), dtype=self.kind)
        sizes = [t.numel() for t in tensors]
        parts = mean.view(-1)[: self.count].split(sizes)
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def in_rows(near: Tensor, scale: Tensor) -> Tensor:
    """Pack what goes to each rank as a row of bytes: numbers, then scales."""
    return torch.cat([t.flatten(1).view(torch.uint8) for t in (near, scale)], 1)


def of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the numbers and the scales in such rows, as [row, block, number]."""
    blocks = rows.shape[1] // (BLOCK + SCALE)
    near, scale = rows.split([blocks * BLOCK, blocks * SCALE], 1)
    return near.view(torch.int8).unflatten(1, (blocks, BLOCK)), scale.view(torch.float32)[..., None]
