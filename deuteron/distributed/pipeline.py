"""A model cut into stages of equal cost, for the pipeline schedules of torch.distributed.

>>> cut = dt.distributed.pipeline(model, (x,), stages=4)         # x: a batch of one micro-batch
>>> print(cut)
>>> work = cut.on_rank("1F1B", microbatches=8, loss_fn=F.cross_entropy, device=device)
>>> optimizer = dt.optim.AdamW(work.parameters())
>>> work.schedule.step(x) if first else work.schedule.step(target=y, losses=losses)

Tracing, sending and the schedules are torch's (``torch.distributed.pipelining``). This module
decides where to cut the model: between repeated blocks, so that the slowest stage takes as little
time as possible, by the estimates of a plan of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from deuteron.distributed.schedule import makespan, orders
from deuteron.distributed.stages import cut_evenly
from deuteron.distributed.trace import blocks, forward_of
from deuteron.errors import GraphError
from deuteron.explain import units as u
from deuteron.frontends.torch_export import import_module
from deuteron.ir.graph import Graph
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import Target
from deuteron.target import target as find_target

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe

ASKED = "a pipeline"
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


@dataclass(frozen=True)
class Work:
    """What one rank runs: a schedule of torch's, and the modules of the rank's stages."""

    schedule: Any
    modules: tuple[nn.Module, ...]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters on this rank, for its optimiser."""
        return [p for module in self.modules for p in module.parameters()]


@dataclass(frozen=True)
class Cut:
    """What :func:`pipeline` returns: a model that is cut into stages. ``begins``: the submodules
    with which the second stage and all later ones begin; ``seconds``: of each stage's forward pass
    for one micro-batch, by estimate; ``sends``: bytes that each stage but the first receives for
    it, and sends back as gradients."""

    begins: tuple[str, ...]
    seconds: tuple[float, ...]
    sends: tuple[int, ...]
    target: Target
    pipe: Pipe

    def efficiency(self, microbatches: int, ranks: int | None = None) -> float:
        """The fraction of the time in which a rank computes, if messages take no time and a
        backward pass takes twice as long as a forward pass. With fewer ``ranks`` than stages each
        rank has several, which fills the pipeline sooner."""
        ranks = ranks or len(self.seconds)
        order = orders(ranks, len(self.seconds), microbatches)
        whole = makespan(order, lambda w: (1 + w.back) * self.seconds[w.stage], lambda message: 0.0)
        return 3 * sum(self.seconds) / ranks * microbatches / whole

    def __str__(self) -> str:
        lines = [f"{len(self.seconds)} stages on {self.target.name}, by estimate"]
        for i, seconds in enumerate(self.seconds):
            begin = "the beginning" if not i else self.begins[i - 1]
            told = f"  {i}: from {begin}, {u.seconds(seconds)} for a micro-batch"
            lines.append(told + (f", sends {u.size(self.sends[i])}" if i < len(self.sends) else ""))
        many = ", ".join(f"{u.percent(self.efficiency(n))} with {n}" for n in (4, 8, 32))
        return "\n".join([*lines, f"  busy {many} micro-batches"])

    def on_rank(
        self,
        kind: str,
        microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None,
        device: torch.device | str,
        *,
        group: dist.ProcessGroup | None = None,
        wrap: Callable[[nn.Module], Any] | None = None,
    ) -> Work:
        """Return what this rank of a process ``group`` runs, as a schedule of torch's. ``kind``:
        "1F1B" or "gpipe" with as many stages as ranks, "interleaved" with a multiple of them.
        ``wrap`` is called with each stage's module and returns what to run for it, as in
        ``wrap=partial(torch.compile, backend=dt.backend)``."""
        from torch.distributed import pipelining

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        count = len(self.seconds)
        if kind.lower() not in SCHEDULES:
            names = ", ".join(SCHEDULES)
            raise GraphError(f"the schedule {kind!r}", asked=ASKED, remedy=f"use one of {names}")
        several = kind.lower() == "interleaved"
        if count % ranks or (count > ranks) != several:
            wrong = f"{count} stages on {ranks} ranks by the schedule {kind!r}"
            remedy = f"cut {'a multiple of ' * several}{ranks} stages"
            raise GraphError(wrong, asked=ASKED, remedy=remedy)
        where, stages, modules = torch.device(device), [], []
        for i in range(rank, count, ranks):
            module: nn.Module = self.pipe.get_stage_module(i).to(where)
            modules.append(module)
            run = module if wrap is None else wrap(module)
            stages.append(pipelining.build_stage(run, i, self.pipe.info(), where, group))
        make = getattr(pipelining, SCHEDULES[kind.lower()])
        schedule = make(stages if several else stages[0], microbatches, loss_fn=loss_fn)
        mine = dict(zip(range(rank, count, ranks), modules, strict=True))
        shared = [Copies.of(names, mine, self.pipe, where) for names in self.pipe.replicated_params]
        if shared:  # torch leaves their gradients as each stage has made them
            schedule.step = partial(_step, schedule.step, shared, group)
        return Work(schedule, tuple(modules))


@dataclass(frozen=True)
class Copies:
    """A parameter that several stages read, such as an embedding that is the output matrix too.
    Each of these stages has a copy; ``own``: the copies on this rank."""

    own: tuple[nn.Parameter, ...]
    like: torch.Tensor

    @classmethod
    def of(
        cls, names: dict[str, str], mine: dict[int, nn.Module], pipe: Pipe, where: torch.device
    ) -> Copies:
        found = {int(stage.rpartition("_")[2]): name for stage, name in names.items()}
        own = [mine[i].get_parameter(name) for i, name in found.items() if i in mine]
        i, name = next(iter(found.items()))
        like = pipe.get_stage_module(i).get_parameter(name).detach()
        return cls(tuple(own), torch.empty_like(like, device=where))

    def grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.own]

    def add_up(self, before: list[torch.Tensor | None], group: dist.ProcessGroup | None) -> None:
        """Sum over all copies what was added to their gradients since ``before``, and add that sum
        to the gradient that every copy had before."""
        total = torch.zeros_like(self.like)
        for p, old in zip(self.own, before, strict=True):
            if p.grad is not None:
                total += p.grad if old is None else p.grad - old
        dist.all_reduce(total, group=group)
        for p, old in zip(self.own, before, strict=True):
            p.grad = total.clone() if old is None else old + total


def _step(
    run: Callable[..., Any],
    shared: Sequence[Copies],
    group: dist.ProcessGroup | None,
    *args: Any,
    **named: Any,
) -> Any:
    """A step of torch's schedule, after which copies of a parameter have the same gradient."""
    before = [copies.grads() for copies in shared]
    result = run(*args, **named)
    for copies, old in zip(shared, before, strict=True):
        copies.add_up(old, group)
    return result


def pipeline(
    model: nn.Module, example: tuple[Any, ...], stages: int, *, target: str | Target | None = None
) -> Cut:
    """Cut ``model`` into ``stages`` of as equal cost as its repeated blocks allow.

    ``example``: inputs of one micro-batch. Costs are estimates of a plan for ``target``, which is
    the machine at hand if you give none. torch.export traces the model.
    """
    from torch.distributed.pipelining import SplitPoint
    from torch.distributed.pipelining import pipeline as torch_pipeline

    names = blocks(model)
    if type(stages) is not int or not 1 <= stages <= max(len(names), 1):
        wrong = f"stages={stages!r} of a model with {len(names)} repeated blocks"
        raise GraphError(wrong, asked=ASKED, remedy=f"give 1 to {max(len(names), 1)} stages")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = find_target(device if target is None else target)
    costs = block_seconds(graph_of(model, example)[0], names, found)
    first = cut_evenly(costs, stages)
    begins = tuple(names[i] for i in first)
    points = dict.fromkeys(begins, SplitPoint.BEGINNING)
    pipe = torch_pipeline(model, tuple(example), split_spec=points)
    edges = [0, *first, len(names)]
    seconds = tuple(sum(costs[a:b]) for a, b in pairwise(edges))
    return Cut(begins, seconds, _sends(pipe), found, pipe)


def block_seconds(graph: Graph, names: Sequence[str], target: Target) -> list[float]:
    """Seconds of each block's forward pass, by estimate. What comes before the first block counts
    as part of it, and what comes after a block as part of that."""
    costs, at = [0.0] * max(len(names), 1), 0
    for choice in decide(graph, target, Policy()).choices:
        sources = [f"{node.source}." for node in choice.region.nodes]
        inside = [i for i, n in enumerate(names) if any(s.startswith(f"{n}.") for s in sources)]
        at = max(at, *inside) if inside else at
        costs[at] += choice.best_s
    return costs


def graph_of(model: nn.Module, example: tuple[Any, ...]) -> tuple[Graph, frozenset[str]]:
    """Return the model's graph in evaluation mode, whose nodes name their submodules; and which of
    its values are parameters (none where they are constants of the graph)."""
    modes = {module: module.training for module in model.modules()}
    try:
        if any(p.is_meta for p in model.parameters()):  # a plan would read the values of constants
            return forward_of(model.eval(), tuple(example))
        return import_module(model.eval(), tuple(example)).graph, frozenset()
    finally:
        for module, mode in modes.items():
            module.training = mode


def _sends(pipe: Pipe) -> tuple[int, ...]:
    """Bytes that every stage but the first receives for one micro-batch."""
    found = []
    for i in range(1, pipe.num_stages):
        graph: Any = pipe.get_stage_module(i).graph
        places = (node for node in graph.nodes if node.op == "placeholder")
        values = (node.meta.get("val") for node in places)
        found.append(sum(v.nbytes for v in values if isinstance(v, torch.Tensor)))
    return tuple(found)
