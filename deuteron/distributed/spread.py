"""Inference with a model that does not fit on a GPU: some of its blocks stay there, others are
copied there in each call, and the host computes the rest.

>>> placed = dt.distributed.spread(model.eval(), (x,), memory="8GB", device="cuda")
>>> print(placed)
>>> with torch.inference_mode():
...     y = model(x)

Repeated blocks are placed one by one. As many as fit are *resident* on the GPU. Of the others some
are *streamed*: their weights are in pinned host memory, and are copied to one of two places on the
GPU while the block before is computed. Or the *host* computes them, and only activations are
copied. Which is quicker depends on the batch, as weights are copied once whatever its size. Both
are priced,

    seconds = resident and streamed blocks on the GPU
            + what is left of streamed bytes / rate of the host's link when those are done
            + blocks on the host, and activations there and back

and :func:`placement` says what would be done on a machine that is not present.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deuteron.distributed.pipeline import block_seconds, graph_of
from deuteron.distributed.trace import blocks
from deuteron.errors import GraphError
from deuteron.explain import units as u
from deuteron.ir.graph import Graph
from deuteron.policy import parse_bytes
from deuteron.target import Target
from deuteron.target import target as find_target

ASKED = "a model spread over a GPU and its host"
REACH = 0.8  # the part of the published rate of the host's link that is assumed
ALIGN = 256  # bytes: alignment of the weights of a streamed block
LIBRARY = 2**25  # bytes that cuBLAS takes with its first product and keeps (the size since Hopper)
RESIDENT, STREAMED, HOST = "resident", "streamed", "host"


@dataclass(frozen=True)
class Placement:
    """What :func:`placement` and :func:`spread` return. For each block: its name, ``where`` it is
    ("resident", "streamed" or "host") and, in ``sizes``, the bytes of its weights. ``seconds``: of
    a call, by estimate; ``memory``: bytes on the GPU, by what they are for; ``sent``: bytes that
    are copied to the GPU and back in a call."""

    names: tuple[str, ...]
    where: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    memory: dict[str, int]
    sent: int
    target: Target

    def __str__(self) -> str:
        counts = ", ".join(f"{self.where.count(w)} {w}" for w in (RESIDENT, STREAMED, HOST))
        kept = ", ".join(f"{name} {u.size(n)}" for name, n in self.memory.items())
        total = u.size(sum(self.memory.values()))
        return (
            f"{len(self.names)} blocks on {self.target.name} and its host: {counts}\n"
            f"  {u.seconds(self.seconds)} for a call, by estimate; {u.size(self.sent)} sent\n"
            f"  memory {total}: {kept}"
        )


def placement(
    model: nn.Module, example: tuple[Any, ...], memory: int | str, target: str | Target
) -> Placement:
    """Decide where to compute the repeated blocks of a model with so much ``memory`` on the GPU (a
    number of bytes, or text such as "8GB"), so that a call with inputs like ``example`` is quickest
    by estimate. Nothing is moved. What is around the blocks belongs to the GPU."""
    names, found, room = blocks(model), find_target(target), parse_bytes(memory)
    if not names:
        wrong = "the model has no repeated blocks"
        raise GraphError(wrong, asked=ASKED, remedy="put them in an nn.ModuleList or nn.Sequential")
    sizes = [_nbytes(model.get_submodule(name)) for name in names]
    graph, fixed = graph_of(model, example)
    around = _nbytes(model) - sum(sizes)
    made = {v for node in graph.nodes for v in node.outputs} - fixed
    work = 4 * max(graph.types[v].nbytes for v in made)
    left = room - around - work - LIBRARY
    there = block_seconds(graph, names, found)
    here = block_seconds(graph, names, find_target("cpu"))
    over = _edges(graph, names)
    tried = [_priced(found, there, here, sizes, over, where) for where in _ways(sizes, left)]
    if not tried:
        wrong = f"{u.size(room)} do not hold what is around the blocks"
        least = u.size(around + work + LIBRARY)
        raise GraphError(wrong, asked=ASKED, remedy=f"give more than {least}")
    seconds, sent, where = min(tried)
    held = sum(s for s, w in zip(sizes, where, strict=True) if w == RESIDENT)
    moving = [s for s, w in zip(sizes, where, strict=True) if w == STREAMED]
    parts = {"around the blocks": around, "resident": held, "for streamed": _places(moving)}
    parts |= {"activations": work, "libraries": LIBRARY}
    return Placement(tuple(names), where, tuple(sizes), seconds, parts, sent, found)


def _ways(sizes: Sequence[int], left: float) -> list[tuple[str, ...]]:
    """Placements that fit, one for every number of blocks that the host computes. Those are the
    last blocks. Streamed blocks are spread evenly among the others, so that each copy overlaps
    work."""
    found = []
    for hosted in range(len(sizes) + 1):
        ours = len(sizes) - hosted
        for streamed in range(ours + 1):
            places = {(i + 1) * ours // streamed - 1 for i in range(streamed)}
            where = [STREAMED if i in places else RESIDENT for i in range(ours)]
            kept = sum(s for s, w in zip(sizes, where, strict=False) if w == RESIDENT)
            if kept + _places([sizes[i] for i in places]) <= left:
                found.append((*where, *[HOST] * hosted))
                break  # streaming more of them makes it no quicker
    return found


def _places(streamed: Sequence[int]) -> int:
    """Bytes of the two places on the GPU that streamed blocks are copied to."""
    return sum(sorted(streamed)[-2:]) if len(streamed) < 2 else 2 * max(streamed)


def _priced(
    target: Target,
    there: Sequence[float],
    here: Sequence[float],
    sizes: Sequence[int],
    over: Sequence[int],
    where: tuple[str, ...],
) -> tuple[float, int, tuple[str, ...]]:
    """Seconds of a call with a placement, the bytes that it copies, and the placement itself."""
    on = {w: [i for i, each in enumerate(where) if each == w] for w in (RESIDENT, STREAMED, HOST)}
    weights = sum(sizes[i] for i in on[STREAMED])
    gpu = sum(there[i] for i in (*on[RESIDENT], *on[STREAMED]))
    crossing = over[on[HOST][0]] + over[on[HOST][-1]] if on[HOST] else 0
    rate = REACH * target.host
    waits = max(0.0, weights / rate - gpu)
    host = sum(here[i] for i in on[HOST]) + crossing / rate
    return gpu + waits + host, weights + crossing, where


def _edges(graph: Graph, names: Sequence[str]) -> list[int]:
    """Bytes of what each block passes to the next."""
    found = [0] * len(names)
    for node in graph.nodes:
        for i, name in enumerate(names):
            if f"{node.source}.".startswith(f"{name}."):
                found[i] = graph.types[node.outputs[0]].nbytes
    return found


def _nbytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


# ---- running


def spread(
    model: nn.Module,
    example: tuple[Any, ...],
    memory: int | str,
    device: torch.device | str,
    *,
    target: str | Target | None = None,
) -> Placement:
    """Spread a model over a device and its host, in place, for inference. Afterwards call it as
    before, with inputs on the device; its results are there, too.

    The model must be in host memory. Blocks that are not resident stay there; the weights of
    streamed ones are pinned. Blocks run as the model has them, so for fused ones call
    ``dt.nn.replace(model)`` before. Returns the :class:`Placement`, which is that for ``device``
    unless you name another ``target``.
    """
    where = torch.device(device)
    found = placement(model, example, memory, find_target(where) if target is None else target)
    inside = [model.get_submodule(name) for name in found.names]
    owned = {id(t) for part in inside for t in (*part.parameters(), *part.buffers())}
    for module in model.modules():
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(t) not in owned:
                t.data = t.data.to(where)
    order = list(zip(found.where, inside, strict=True))
    stream = Stream([module for how, module in order if how == STREAMED], where)
    for i, (how, module) in enumerate(order):
        if how == RESIDENT:
            module.to(where)
        home = torch.device("cpu") if how == HOST else where
        module.register_forward_pre_hook(_to(home), with_kwargs=True)
        if how == STREAMED:
            module.register_forward_pre_hook(lambda m, args: stream.arrive(m))
            module.register_forward_hook(lambda m, args, result: stream.leave(m))
        if how == HOST and (i + 1 == len(order) or order[i + 1][0] != HOST):
            module.register_forward_hook(lambda m, args, result: moved(result, where))
    stream.begin()
    return found


def moved(values: Any, device: torch.device) -> Any:
    """Copy all tensors in a nested structure to a device."""
    ahead = device.type == "cuda"
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=ahead), values)


def _to(device: torch.device) -> Any:
    return lambda module, args, kwargs: (moved(args, device), moved(kwargs, device))


class Stream:
    """The weights of streamed blocks, each copied to one of two places on the device while another
    block is computed."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.modules, self.device = list(modules), device
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held = [self._packed(module) for module in self.modules]
        largest = max((len(flat) for flat, _ in self.held), default=0)
        count = min(2, len(self.held))
        self.places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        self.done: list[Any] = [None] * count  # events: the last block in a place was computed
        self.come: dict[int, Any] = {}  # blocks that were sent, and the events of their arrival

    def _packed(self, module: nn.Module) -> tuple[Tensor, list[tuple[Tensor, int]]]:
        """Move all weights of a block into one piece of pinned memory, and make them views of it.
        Return the piece, and each weight with the place where it begins."""
        tensors = list(dict.fromkeys((*module.parameters(), *module.buffers())))
        at, offsets = 0, []
        for t in tensors:
            offsets.append((t, at))
            at += -(-t.nbytes // ALIGN) * ALIGN
        flat = torch.empty(at, dtype=torch.uint8, pin_memory=self.copies is not None)
        for t, begin in offsets:
            home = _view(flat, begin, t)
            home.copy_(t.data)
            t.data = home
        return flat, offsets

    def begin(self) -> None:
        """Send the first two blocks before the first call."""
        for i in range(len(self.places)):
            self._send(i)

    def _send(self, i: int) -> None:
        flat, place = self.held[i][0], i % len(self.places)
        if self.copies is None:
            self.places[place][: len(flat)].copy_(flat)
            self.come[i] = None
            return
        with torch.cuda.stream(self.copies):
            if self.done[place] is not None:
                self.copies.wait_event(self.done[place])
            self.places[place][: len(flat)].copy_(flat, non_blocking=True)
            self.come[i] = self.copies.record_event()

    def arrive(self, module: nn.Module) -> None:
        """Before a block is computed: make its weights views of their copy on the device, and let
        the device's work from now on wait for the copy."""
        i = self.modules.index(module)
        if i not in self.come:  # the model does not call its blocks in order
            self.come = {k: e for k, e in self.come.items() if (k - i) % len(self.places)}
            self._send(i)
        there = self.come[i]
        if there is not None:
            torch.cuda.current_stream(self.device).wait_event(there)
        for t, begin in self.held[i][1]:
            t.data = _view(self.places[i % len(self.places)], begin, t)

    def leave(self, module: nn.Module) -> None:
        """After a block was computed: make its weights views of host memory again, and send the
        block after next, of this call or the next one, to the place that is free now."""
        i = self.modules.index(module)
        flat, offsets = self.held[i]
        for t, begin in offsets:
            t.data = _view(flat, begin, t)
        place = i % len(self.places)
        if self.copies is not None:
            self.done[place] = torch.cuda.current_stream(self.device).record_event()
        del self.come[i]
        later = i + len(self.places)
        self._send(later if later < len(self.modules) else place)


def _view(flat: Tensor, begin: int, like: Tensor) -> Tensor:
    part = flat[begin : begin + like.nbytes].view(like.dtype)
    return part.as_strided(like.shape, like.stride(), part.storage_offset())
