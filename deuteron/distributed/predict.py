"""Predicts a training step on many machines: its time, what is sent, what overlaps, and memory.

The batch of one rank is traced and planned for the target by estimate, as ``explain(target=…)``
does. Each rank does its part of the products that ranks share. What is sent follows from the layout
(traffic.py) and takes the time that its links need (passes/communication.py). Sums of gradients and
gathers of parameters overlap with the work of the same direction, forward or backward; ranks wait
for whatever is left when that work is done, and for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.distributed import tensor_parallel
from deuteron.distributed.layout import Layout, layouts
from deuteron.distributed.reduction import Reduction
from deuteron.distributed.schedule import Message, Work, makespan, most_begun, orders
from deuteron.distributed.stages import Stages
from deuteron.distributed.tensor_parallel import Shared
from deuteron.distributed.trace import ASKED, SEED, Traced, blocks, traced
from deuteron.distributed.traffic import (
    BUCKET_MB,
    MIB,
    Agreeing,
    Traffic,
    local_bytes,
    of_batch_norms,
    of_parameters,
    units,
)
from deuteron.engines.roofline import region_bound
from deuteron.errors import GraphError
from deuteron.explain import units as u
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.passes.communication import collective_seconds
from deuteron.plan.decide import decide, halves
from deuteron.policy import Policy
from deuteron.target import Target
from deuteron.target import target as find_target

STATE = 8  # bytes of an optimiser's state for each parameter: Adam's two moments in float32
BUCKETS_MB = (1, 2, 4, 8, 16, 25, 32, 64, 128, 256)
MASTER = 4  # and a float32 copy of parameters of 16 bits


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict` returns. Times are in seconds and sizes in bytes, for one rank and one
    step of the optimiser; in a pipeline, for the rank that has most. ``batch``: how many examples
    all ranks together train on; ``batches``: how many batches each trains on one after another;
    ``filling_s``: the time in which a rank of a pipeline waits for other stages."""

    layout: Layout
    target: Target
    batch: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    traffic: tuple[Traffic, ...]
    memory: dict[str, int]
    notes: tuple[str, ...] = ()
    filling_s: float = 0.0
    batches: int = 1

    def waited_s(self, traffic: Traffic) -> float:
        """Seconds of one kind of traffic that no work overlaps, so that ranks wait for it."""
        return self._waited[self.traffic.index(traffic)]

    @cached_property
    def _waited(self) -> list[float]:
        free = {"forward": self.forward_s, "backward": self.backward_s}
        found = []
        for t in self.traffic:
            if t.waited is not None:
                found.append(t.waited)
                continue
            alone = t.seconds(self.target)
            room = free.get(t.hidden, 0.0)
            if t.why == "gradients":  # these are sent with the last batch only
                room = min(room, self.backward_s / self.batches)
            # no work comes before the first gather or after the last sum, to overlap with them
            edge = alone / t.calls if t.hidden else alone
            beside = min(alone - edge, room)
            if t.hidden:
                free[t.hidden] -= beside
            found.append(alone - beside)
        return found

    @property
    def waiting_s(self) -> float:
        return sum(self._waited)

    @property
    def step_s(self) -> float:
        work = self.forward_s + self.backward_s + self.optimizer_s
        return work + self.waiting_s + self.filling_s

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= 0.95 * self.target.memory_bytes

    @property
    def per_second(self) -> float:
        """Examples that are trained on per second."""
        return self.batch / self.step_s

    def volumes(self) -> dict[str, int]:
        """Bytes by kind of collective."""
        found: dict[str, int] = {}
        for t in self.traffic:
            found[t.kind] = found.get(t.kind, 0) + t.bytes
        return found

    @property
    def line(self) -> str:
        """The prediction in one line."""
        fits = "" if self.fits else ", which does not fit"
        return (
            f"{self.layout}: {u.seconds(self.step_s)} per step, {u.number(self.per_second)} "
            f"examples/s, {u.size(self.memory_bytes)} on each{fits}"
        )

    def __str__(self) -> str:
        head = f"{self.layout.ranks} × {self.target.name} as {self.layout}: {self.batch} examples"
        rows = [("collective", "of", "in", "calls", "bytes", "over", "takes", "is waited for")]
        for t in self.traffic:
            over = f"{t.ranks.size} ranks" + (f", {t.ranks.step} apart" if t.ranks.step > 1 else "")
            takes, waits = u.seconds(t.seconds(self.target)), u.seconds(self.waited_s(t))
            rows.append((t.kind, t.why, t.when, str(t.calls), u.size(t.bytes), over, takes, waits))
        work = (("forward", self.forward_s), ("backward", self.backward_s))
        times = [*work, ("optimiser", self.optimizer_s), ("waiting", self.waiting_s)]
        times += [("filling the pipeline", self.filling_s)] if self.filling_s else []
        told = ", ".join(f"{name} {u.seconds(s)}" for name, s in times)
        kept = ", ".join(f"{name} {u.size(n)}" for name, n in self.memory.items())
        room = f"of {u.size(self.target.memory_bytes)}" + ("" if self.fits else ": does not fit")
        lines = [
            head,
            f"  step {u.seconds(self.step_s)} by estimate: {told}",
            f"  {u.number(self.per_second)} examples per second",
            f"  memory {u.size(self.memory_bytes)} {room}: {kept}",
        ]
        if len(rows) > 1:
            lines += [f"  {line}" for line in u.align(rows, "<<<>><>>", 130)]
        return "\n".join((*lines, *(f"  {note}" for note in self.notes)))


def predict(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    example: Any,
    target: str | Target,
    layout: str | Layout,
    *,
    dtype: torch.dtype | None = None,
    accumulate: int = 1,
    state_bytes: int | None = None,
    reduction: Reduction | None = None,
    bucket_mb: int = BUCKET_MB,
    reshard: bool = True,
) -> Prediction:
    """Predict a training step of ``model`` with ranks in a ``layout`` such as "dp4×tp2", "fsdp8" or
    "pp4×dp2", with "pp4v2" for two stages on each rank.

    ``example`` is the batch of **one** rank, as in ``dt.train_step``: inputs and, last, the target,
    or a dict of keywords. A step has ``accumulate`` such batches for each rank; in a pipeline all
    of them go through it as micro-batches. Nothing is run, and no memory is taken: the model may be
    made under ``torch.device("meta")``. ``dtype``: another element type to assume for parameters
    and inputs. ``state_bytes``: what the optimiser keeps for each parameter; by default 8 (two
    moments in float32), and 4 more for parameters of 16 bits. ``reduction``: how gradients are
    summed, if not in buckets of ``bucket_mb`` MiB as DDP does it; with FSDP2 its ``numbers`` are
    the ``reduce_dtype``. ``reshard=False`` assumes ``fully_shard(…, reshard_after_forward=False)``
    (ZeRO-2).

    >>> print(dt.distributed.predict(model, F.cross_entropy, (x, y), "h200", "dp4×tp2"))
    """
    step = RankStep(model, loss_fn, example, target, dtype, state_bytes)
    return step.laid_out(Layout.of(layout), accumulate, reduction, bucket_mb, reshard)


def ranked(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    example: Any,
    target: str | Target,
    gpus: int,
    *,
    dtype: torch.dtype | None = None,
    state_bytes: int | None = None,
    accumulate: int = 1,
    among: Iterable[str | Layout] | None = None,
) -> list[Prediction]:
    """Predict a step in all layouts of so many ``gpus``, or in those ``among`` which you give. The
    one that trains most examples per second comes first; those that do not fit into memory come
    last. Other arguments are those of :func:`predict`."""
    _from_one(gpus=gpus)
    step = RankStep(model, loss_fn, example, target, dtype, state_bytes)
    given = gpus, step.target.per_node, len(step.blocks)
    tried = layouts(*given) if among is None else map(Layout.of, among)
    found = []
    for layout in tried:
        if layout.tp == 1 or step.shared(layout.tp):
            found.append(step.laid_out(layout, accumulate))
    return sorted(found, key=lambda p: (not p.fits, -p.per_second))


def _from_one(**given: int) -> None:
    for name, value in given.items():
        if type(value) is not int or value < 1:
            remedy = "give a whole number from 1 on"
            raise GraphError(f"{name}={value!r}", asked=ASKED, remedy=remedy)


class RankStep:
    """A step as one rank alone would run it; :meth:`laid_out` predicts it in a layout."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        example: Any,
        target: str | Target,
        dtype: torch.dtype | None,
        state_bytes: int | None,
    ) -> None:
        self.ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        model = model if self.ddp is None else self.ddp.module
        batch = tuple(example) if isinstance(example, tuple | list) else example
        batch = batch if isinstance(batch, tuple | Mapping) else (batch,)
        self.model, self.dtype, self.target = model, dtype, find_target(target)
        self.state_bytes = state_bytes
        given = pytree.tree_leaves(batch)
        first = next((t for t in given if isinstance(t, torch.Tensor) and t.ndim), None)
        self.examples = 1 if first is None else first.shape[0]
        self.graphs: Traced = traced(model, loss_fn, batch, dtype)
        policy = Policy()
        first_out = {self.graphs.joint.outputs[0][0]}
        cut, _ = halves(self.graphs.joint, first_out, [SEED], self.target, policy)
        self.kept = cut.kept
        self.seconds = tuple(
            sum(c.best_s for c in decide(half, self.target, policy, prepared=True).choices)
            for half in (cut.forward, cut.backward)
        )
        self.by_tp: dict[int, list[Shared]] = {1: []}
        self.blocks = blocks(model)

    def shared(self, tp: int) -> list[Shared]:
        if tp not in self.by_tp:
            params = self.graphs.params.values()
            self.by_tp[tp] = tensor_parallel.shared(self.graphs.forward, params, tp)
        return self.by_tp[tp]

    def laid_out(
        self,
        layout: Layout,
        accumulate: int,
        reduction: Reduction | None = None,
        bucket_mb: int = BUCKET_MB,
        reshard: bool = True,
    ) -> Prediction:
        _from_one(accumulate=accumulate, bucket_mb=bucket_mb)
        groups, model = self.shared(layout.tp), self.model
        if layout.tp > 1 and not groups:
            wrong = f"no products that {layout.tp} ranks could share were found"
            remedy = "use a layout of dp and fsdp"
            raise GraphError(wrong, asked=f"layout {str(layout)!r}", remedy=remedy)
        inputs = {v for group in groups for v in group.weights}
        split = frozenset(name for name, v in self.graphs.params.items() if v in inputs)
        sizes = local_bytes(model, layout, split, self.dtype)
        part, batches = self._part(groups, layout.tp), accumulate * layout.pp
        share, kept, filled = 1.0, self.kept * part, 0.0
        stages = Stages.of(self.graphs, self.blocks, self.costs, layout)
        traffic, notes = list[Traffic](), list[str]()
        if layout.tp > 1:
            notes.append(self._told(groups, layout.tp, 1 - part))
        if layout.pp > 1:  # parameters stay gathered while batches go through
            copied = stages.copied(sizes)
            reshard, sizes, share = False, stages.held(sizes), stages.busiest
            when = orders(layout.pp, stages.count, batches)
            kept *= most_begun(when, stages.shares)
            filled, waits = self._in_turns(stages, when, layout, part, groups)
            groups = stages.most(groups)
            traffic += self._between(stages, layout, batches, waits)
            if copied:
                total, calls, why = sum(copied.values()), len(copied), "gradients of several stages"
                traffic.append(Traffic("all_reduce", why, "update", total, calls, layout.pp_ranks))
        forward, backward = (batches * s * part * share for s in self.seconds)
        traffic += self._of_products(groups, layout, batches)
        traffic += of_batch_norms(model, layout, self.dtype, batches)
        often = 1 if layout.pp > 1 else accumulate
        how = Agreeing(often, self.dtype, reduction, bucket_mb, reshard, self.ddp)
        traffic += of_parameters(model, layout, sizes, self.graphs, how)
        memory, moved = self._memory(sizes, layout, int(kept), reshard)
        if reduction is not None and reduction.numbers == "int8" and layout.dp > 1:
            named = [(n, self.dtype or p.dtype) for n, p in model.named_parameters() if n in sizes]
            memory["rests of gradients"] = sum(4 * sizes[n] // kind.itemsize for n, kind in named)
        optimizer = moved / self.target.stream + self.target.launch
        batch = self.examples * layout.batches * batches
        given = layout, self.target, batch, forward, backward, optimizer
        found = Prediction(*given, tuple(traffic), memory, (), filled, batches)
        better = self._better_buckets(found) if reduction is None else ()
        return replace(found, notes=(*notes, *better))

    @cached_property
    def costs(self) -> list[float]:
        """Seconds of each node of the forward pass, each alone."""
        return [self._alone(self.graphs.forward, node) for node in self.graphs.forward.nodes]

    def _in_turns(
        self,
        stages: Stages,
        when: list[list[Work]],
        layout: Layout,
        part: float,
        groups: list[Shared],
    ) -> tuple[float, float]:
        """Return the seconds in which the rank with most work waits for other stages, and those by
        which messages between stages make a step longer."""
        each = [[s * part * share for share in stages.shares] for s in self.seconds]
        for stage in range(stages.count):  # sums of shared products are part of a stage's work
            own = [group for group in groups if stages.stage_of(group.columns[0]) == stage]
            for traffic in self._of_products(own, layout, 1):
                each[traffic.when == "backward"][stage] += traffic.seconds(self.target)
        comes = [stages.comes(back) for back in (False, True)]

        def takes(work: Work) -> float:
            return each[work.back][work.stage]

        def sends(message: Message) -> float:
            nbytes = comes[message.back][message.stage]
            return collective_seconds("send", nbytes, layout.next_stage, self.target)

        most = max(sum(map(takes, order)) for order in when)
        alone = makespan(when, takes, lambda message: 0.0)
        return alone - most, makespan(when, takes, sends) - alone

    def _between(
        self, stages: Stages, layout: Layout, batches: int, waits: float
    ) -> Iterator[Traffic]:
        """The messages between stages, of the rank that sends most. ``waits``: the seconds that
        ranks wait for them, which are divided between both directions by bytes."""
        each = batches * layout.stages
        ways = (("forward", stages.sends[0]), ("backward", stages.sends[1]))
        total = sum(nbytes for _, nbytes in ways)
        for when, nbytes in ways:
            given = when, batches * nbytes, each, layout.next_stage
            waited = waits * nbytes / max(total, 1)
            yield Traffic("send", "what stages exchange", *given, waited=waited)

    def _better_buckets(self, found: Prediction) -> Iterator[str]:
        """Name the best bucket size of DDP if ranks wait clearly less with it. Small buckets begin
        more often; of large ones more is waited for, because no work overlaps with the last."""
        summed = [t for t in found.traffic if (t.kind, t.why) == ("all_reduce", "gradients")]
        if not summed or found.layout.fsdp > 1 or found.layout.tp > 1:
            return

        def waits(mb: int) -> float:
            calls = 1 + max(0, math.ceil((summed[0].bytes - MIB) / (mb * MIB)))
            other = replace(found, traffic=(replace(summed[0], calls=calls),))
            return other.waiting_s

        best, now = min(BUCKETS_MB, key=waits), found.waited_s(summed[0])
        if waits(best) < 0.9 * now:
            spared = u.seconds(now - waits(best))
            yield f"DistributedDataParallel(…, bucket_cap_mb={best}) would wait {spared} less"

    def _told(self, groups: list[Shared], tp: int, saved: float) -> str:
        columns, rows = (sum(len(getattr(g, name)) for g in groups) for name in ("columns", "rows"))
        return (
            f"{columns} products are shared by columns and {rows} by rows: each of {tp} ranks is "
            f"spared {u.percent(saved)} of the work"
        )

    def _part(self, groups: list[Shared], tp: int) -> float:
        """The fraction of the work that a rank does: what ranks share forward they also share
        backward."""
        if tp == 1:
            return 1.0
        graph = self.graphs.forward
        inside = {v for group in groups for v in group.between}
        inside |= {node.output for group in groups for node in group.rows}
        nodes = zip(self.costs, graph.nodes, strict=True)
        times = [(seconds, node.outputs[0] in inside) for seconds, node in nodes]
        total = sum(s for s, _ in times)
        split = sum(s for s, within in times if within)
        return 1.0 - split / total * (1.0 - 1.0 / tp)

    def _alone(self, graph: Graph, node: Node) -> float:
        return region_bound(Region(graph.subgraph(node.op, [node])), self.target).seconds

    def _of_products(
        self, groups: list[Shared], layout: Layout, accumulate: int
    ) -> Iterable[Traffic]:
        if layout.tp == 1:
            return
        graph, ranks = self.graphs.forward, layout.tp_ranks
        sums = [graph.types[node.output].nbytes for group in groups for node in group.rows]
        reads = [g for g in groups if not self._is_given(graph, g.x)]
        back = [graph.types[group.x].nbytes for group in reads]
        for when, sizes in (("forward", sums), ("backward", back)):
            total, calls = accumulate * sum(sizes), accumulate * len(sizes)
            yield Traffic("all_reduce", "shared products", when, total, calls, ranks)

    def _is_given(self, graph: Graph, value: str) -> bool:
        """Whether a value depends on no parameter, so that it needs no gradient."""
        params, seen, asked = set(self.graphs.params.values()), set[str](), [value]
        while asked:
            v = asked.pop()
            if v in params:
                return False
            if v not in seen and (node := graph.producer.get(v)) is not None:
                asked += node.uses
            seen.add(v)
        return True

    def _memory(
        self, sizes: dict[str, int], layout: Layout, kept_back: int, reshard: bool
    ) -> tuple[dict[str, int], int]:
        """Bytes on a rank by what they are for, and how many a step of the optimiser moves."""
        params = {name: p for name, p in self.model.named_parameters() if name in sizes}
        own = sum(sizes.values()) // layout.fsdp
        trained = [name for name, p in params.items() if p.requires_grad]
        grads = sum(sizes[name] for name in trained) // layout.fsdp
        state = 0
        for name in trained:
            item = (self.dtype or params[name].dtype).itemsize
            kept = self.state_bytes
            kept = STATE + (MASTER if item == 2 else 0) if kept is None else kept
            state += sizes[name] // item * kept // layout.fsdp
        memory = {"parameters": own, "gradients": grads, "optimiser": state}
        memory["kept for backward"] = kept_back
        if layout.fsdp > 1:  # a unit is gathered while it runs, and so is the next one
            whole = sorted(sum(sizes[n] for n in unit) for unit in units(self.model, params))
            memory["gathered"] = sum(whole[-2:] if reshard else whole)
        return memory, own + grads + 2 * state + own
