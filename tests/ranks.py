"""What the processes of test_distributed.py run: ranks that train together and write down what they
end with. One process that does the same alone is what they are compared with.

``python -m tests.ranks RANKS FOLDER CASE …`` runs cases one after another in a process group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import deuteron as dt
from deuteron.ops import collective

WIDTH, HEADS, WORDS, LENGTH, BATCH = 16, 4, 32, 8, 8


class Case(NamedTuple):
    """``model``: gpt, gpt_small, gpt_deep, gpt_tied or resnet; ``layout``: alone, ddp, one of
    :data:`REDUCTIONS`, fsdp, tp, sp, fsdp_tp or dp_tp; ``way``: eager, backend (torch.compile) or
    step (dt.train_step); ``optimizer``: sgd, adamw (torch's), ours or ours_sgd."""

    model: str = "gpt"
    layout: str = "ddp"
    way: str = "step"
    optimizer: str = "sgd"
    accumulate: int = 1
    steps: int = 4

    @property
    def name(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def of(cls, name: str) -> Case:
        *words, accumulate, steps = name.split(",")
        return cls(*words, int(accumulate), int(steps))


# ---- models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # keys have no bias: its gradient is nothing but rounding, which Adam would blow up
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (
            t.view(t.shape[0], LENGTH, -1, WIDTH // HEADS).transpose(1, 2)
            for t in (self.q(h), self.k(h), self.v(h))
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, blocks: int, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("order", torch.arange(LENGTH)[None])
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(self.order)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            wide = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.short = nn.Sequential(wide, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.short(x))


def resnet() -> nn.Module:
    """As ResNet-18, with a block and 8 channels where that has two and 64."""
    stages = (Residual(8 << i >> (i > 0), 8 << i, 1 + (i > 0)) for i in range(3))
    start = (nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*start, *stages, *end)


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    made = {"gpt": lambda: GPT(2), "gpt_small": lambda: GPT(1), "resnet": resnet}
    made["gpt_deep"], made["gpt_tied"] = lambda: GPT(4), lambda: GPT(2, tied=True)
    return made[case.model]().double()


def batches(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of all ranks together, in the order in which one process sees them."""
    torch.manual_seed(1)
    found = []
    for _ in range(case.steps * case.accumulate):
        if case.model != "resnet":
            x = torch.randint(0, WORDS, (BATCH, LENGTH))
            found.append((x, x.roll(1, 1)))
        else:
            x = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64)
            found.append((x, torch.randint(0, 10, (BATCH,))))
    return found


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(result.flatten(0, -2), target.flatten())


# ---- layouts


def _columns(model: GPT, mesh: Any) -> None:
    """Tensor parallel: heads and hidden units on different ranks."""
    ways: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    ways |= {name: RowwiseParallel() for name in ("o", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, ways)


def _sequence(model: GPT, mesh: Any) -> None:
    """The same, with words on different ranks between products, and so is the vocabulary."""
    part: dict[str, Any] = {"input_layouts": Shard(1)}
    ways: dict[str, Any] = {name: ColwiseParallel(**part) for name in ("q", "k", "v", "up")}
    ways |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    ways |= {name: SequenceParallel(use_local_output=True) for name in ("norm_1", "norm_2")}
    for block in model.blocks:
        parallelize_module(block, mesh, ways)
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    outer = {"words": rows, "places": rows, "norm": SequenceParallel(use_local_output=True)}
    outer["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, outer)


def _shard(model: nn.Module, mesh: Any, way: Callable[..., Any] = fully_shard) -> None:
    """FSDP2, or its replicas: every block by itself, then what is around them."""
    for part in model.modules():
        if isinstance(part, Block | Residual):
            way(part, mesh=mesh)
    way(model, mesh=mesh)


def laid_out(case: Case, model: nn.Module, ranks: int) -> tuple[nn.Module, int, int]:
    """The model as it is called, how many ranks have different batches, which of them we are."""
    rank = dist.get_rank() if ranks > 1 else 0
    if case.layout == "alone":
        return model, 1, 0
    if case.model == "resnet":
        model = dt.nn.SyncBatchNorm.convert(model)
    if case.layout.startswith("ddp"):
        return DistributedDataParallel(model), ranks, rank
    if case.layout in ("fsdp_tp", "dp_tp"):
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        _columns(model, mesh["tp"])
        from torch.distributed._composable.replicate_with_fsdp import replicate

        _shard(model, mesh["dp"], fully_shard if case.layout == "fsdp_tp" else replicate)
        return model, ranks // 2, rank // 2
    mesh = init_device_mesh("cpu", (ranks,))
    {"fsdp": _shard, "tp": _columns, "sp": _sequence}[case.layout](model, mesh)
    return (model, ranks, rank) if case.layout == "fsdp" else (model, 1, 0)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-5),
    "ours": lambda params: dt.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-5),
    "ours_sgd": lambda params: dt.optim.SGD(params, lr=0.1, momentum=0.9),
}
MAX_NORM = 0.5
REDUCTIONS = {
    **{f"ddp_{n}": dt.distributed.Reduction(n) for n in ("own", "float16", "bfloat16", "int8")},
    "ddp_every2": dt.distributed.Reduction(every=2),
}


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


class Trainer:
    """A case on this rank: its model, its optimiser, and how a batch is trained on."""

    def __init__(self, case: Case, ranks: int, max_norm: float | None = MAX_NORM) -> None:
        self.case, self.model = case, built(case)
        self.called, self.parts, self.part = laid_out(case, self.model, ranks)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters())
        self.data = [self.own(x, y) for x, y in batches(case)]
        self.step: Any = None
        if case.way == "step":
            how: Any = {"max_norm": max_norm, "accumulate": case.accumulate}
            how["reduction"] = REDUCTIONS.get(case.layout) if ranks > 1 else None
            given = (self.called, loss_of, self.optimizer, self.data[0])
            self.step = dt.train_step(*given, **how)
        compiled = case.way == "backend"
        self.run = torch.compile(self.called, backend=dt.backend) if compiled else self.called

    def own(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.chunk(self.parts)[self.part] for t in tensors)

    def train(self, i: int) -> None:
        """On the i-th batch."""
        x, y = self.data[i]
        if self.step is not None:
            self.step(x, y)
            return
        many = self.case.accumulate
        if i % many == 0:
            self.optimizer.zero_grad()
        (loss_of(self.run(x), y) / many).backward()
        if i % many == many - 1:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {name: whole(t) for name, t in found.items()}


def trained(case: Case, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Parameters and buffers after the steps of a case."""
    trainer = Trainer(case, ranks)
    for i in range(len(trainer.data)):
        trainer.train(i)
    return trainer.state()


# ---- optimisers of ours on parts of parameters

OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: dt.optim.AdamW(p, lr=1e-2, max_norm=0.1, skip_nonfinite=True, amsgrad=True),
    "SGD": lambda p: dt.optim.SGD(p, lr=1e-2, momentum=0.9, max_norm=0.1, ema_decay=0.9),
    "Lion": lambda p: dt.optim.Lion(p, lr=1e-3, max_norm=0.1),
    "AdamW8bit": lambda p: dt.optim.AdamW8bit(p, lr=1e-2, max_norm=0.1, min_8bit_size=64),
}


def stepped(name: str, ranks: int) -> dict[str, Any]:
    """What some steps make of two layers whose sizes no number of ranks divides, how far that is
    from where they began, and the last norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 131), nn.GELU(), nn.Linear(131, 67))
    before = [p.detach().clone() for p in model.parameters()]
    rank = dist.get_rank() if ranks > 1 else 0
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer: Any = OURS[name](model.parameters())
    torch.manual_seed(1)
    for x in torch.randn(6, 8, 65):
        model(x.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [whole(p) for p in model.parameters()]
    moved = sum((a - b).square().sum() for a, b in zip(found, before, strict=True)).sqrt()
    state = {key for kept in optimizer.state.values() for key in kept}
    spread = [kept[k] for kept in optimizer.state.values() for k in state - {"step"} if k in kept]
    assert ranks == 1 or all(isinstance(x, DTensor) for x in spread)
    return {"params": found, "moved": moved, "norm": optimizer.grad_norm}


OPTIMISERS = "optimisers"  # a case of its own


# ---- products in chunks beside collectives


def beside(ranks: int) -> dict[str, tuple[bool, float]]:
    """By the collective: whether a plan has put it beside the product, and how far the result of
    the plan's second run, in which nothing is waited for at once, is off from that of torch's calls
    one after the other. A sum over ranks that other work runs beside is among them."""
    torch.manual_seed(dist.get_rank())
    group, found = dist.group.WORLD.group_name, {}
    x, bias = torch.randn(512, 64, dtype=torch.float64), torch.randn(1024, dtype=torch.float64)
    torch.manual_seed(7)
    weight = torch.randn(1024, 64, dtype=torch.float64)
    for way in ("all_reduce", "reduce_scatter", "all_gather", "scheduled"):
        g = dt.Graph()
        rows, factor = g.tensor("x", (512, 64), dt.float64), g.tensor("w", (1024, 64), dt.float64)
        shift, how = g.tensor("b", (1024,), dt.float64), {"group": group, "ranks": ranks}
        product = F.linear(x, weight, bias)
        if way == "all_gather":
            g.linear(g.all_gather(rows, **how), factor, shift).output("y")
            whole = collective.called("all_gather_into_tensor", x, ranks, group)
            want = F.linear(whole, weight, bias)
        elif way == "scheduled":
            total = g.all_reduce(rows, **how)
            (g.sum(g.linear(rows, factor), axes=(1,)) + g.mean(total)).output("y")
            mean = collective.called("all_reduce", x, "sum", group).mean()
            want = (x @ weight.T).sum(1) + mean
        else:
            getattr(g, way)(g.linear(rows, factor, shift), **how).output("y")
            more = ("sum",) if way == "all_reduce" else ("sum", ranks)
            name = {"reduce_scatter": "reduce_scatter_tensor"}.get(way, way)
            want = collective.called(name, product, *more, group)
        plan = g.compile(device="cpu")
        given = {"x": x, "w": weight, "b": bias}
        given = {name: given[name] for name in plan.decision.graph.inputs}
        for _ in range(2):
            got = plan.run(**given)["y"]
        chunks = any(node.op == "linear_beside" for node in plan.decision.graph.nodes)
        later = any("runs beside" in choice.note for choice in plan.decision.choices)
        off = float((got - want).abs().max() / want.abs().max())
        found[way] = later if way == "scheduled" else chunks, off
    return found


def of_different_models(ranks: int) -> str:
    """What is said of ranks that have parts of layers of different sizes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 + dist.get_rank()))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    x = torch.randn(2, 8)
    try:
        dt.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), (x, x))
    except dt.GraphError as error:
        return str(error)
    return ""


BESIDE = "beside"  # a case of its own


# ---- a vocabulary that is spread, and inference

VOCABULARY = "vocabulary"  # a case of its own


def _spread(model: GPT, mesh: Any) -> None:
    """Heads, hidden units, words and logits on different ranks."""
    _columns(model, mesh)
    rows = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"words": rows, "places": rows, "head": head})


def spread_words(ranks: int) -> dict[str, torch.Tensor]:
    """Parameters after some steps with words and logits spread over ranks, the loss too, and inside
    FSDP2 as well; and what ``dt.optimize`` makes of models that are spread in different ways, in
    evaluation mode."""
    case, found = Case("gpt_small", steps=3), {}
    model, inner, mesh = built(case), built(case), init_device_mesh("cpu", (ranks,))
    _spread(model, mesh)
    both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    _spread(inner, both["tp"])
    _shard(inner, both["dp"])
    data = batches(case)
    for each, parts, name in ((model, 1, ""), (inner, ranks // 2, "in fsdp ")):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        own = [[t.chunk(parts)[dist.get_rank() * parts // ranks] for t in pair] for pair in data]
        step = dt.train_step(each, loss_of, optimizer, tuple(own[0]), max_norm=MAX_NORM)
        for x, y in own:
            with loss_parallel():
                step(x, y)
        found |= {name + n: whole(p) for n, p in each.named_parameters()}
    x = data[-1][0]
    parts = built(case)
    _shard(parts, mesh)
    ways = {"tp": model, "fsdp": parts, "ddp": DistributedDataParallel(built(case))}
    for name, each in ways.items():
        fast = dt.optimize(each.eval(), (x,), find=False)
        found[f"optimised {name}"] = whole(fast(x))
    return found


# ---- pipelines

PIPELINE = "pipeline"  # a case of its own
# schedules and models, and in how many stages; in the last words are the output matrix too
PIPELINES = {"1F1B,gpt_deep": 2, "interleaved,gpt_deep": 4, "1F1B,gpt_tied": 2}
MICRO, PIPELINE_STEPS = 4, 2


def piped(kind: str, ranks: int) -> dict[str, Any]:
    """What some steps make of the parameters of this rank's stages, how many bytes it sent in the
    last of them, and how many the cut said."""
    schedule, name = kind.split(",")
    case = Case(name, steps=PIPELINE_STEPS)
    model, data, sent = built(case), batches(case), 0
    cut = dt.distributed.pipeline(model, (data[0][0][: BATCH // MICRO],), PIPELINES[kind])
    wrap = partial(torch.compile, backend=dt.backend)
    work = cut.on_rank(schedule, MICRO, loss_of, "cpu", wrap=wrap)
    optimizer = torch.optim.SGD(work.parameters(), lr=0.1, momentum=0.9)
    first, last = dist.get_rank() == 0, dist.get_rank() == ranks - 1
    for x, y in data:
        given, more = ((x,) if first else ()), ({"target": y} if last else {})
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
            work.schedule.step(*given, **more)
        optimizer.step()
        optimizer.zero_grad()
        sizes = [e.input_shapes for e in seen.events() if e.name == "gloo:send"]
        sent = 8 * sum(torch.Size(shape).numel() for shapes in sizes for shape in shapes)
    params = {n: p.detach() for m in work.modules for n, p in m.named_parameters()}
    # every edge between stages is one between ranks, and bytes go over it both ways
    ahead = sum(n for i, n in enumerate(cut.sends) if i % ranks == dist.get_rank())
    back = sum(n for i, n in enumerate(cut.sends) if (i + 1) % ranks == dist.get_rank())
    return {"params": params, "sent": sent, "told": MICRO * (ahead + back)}


# ---- volumes


def volumes(case: Case, ranks: int) -> dict[str, int]:
    """Bytes of every kind of collective in one step of the optimiser, the third: until then DDP
    tells all ranks the order in which gradients come. Where parameters are averaged, the step in
    which they are."""
    trainer, reduction = Trainer(case, ranks, max_norm=None), REDUCTIONS.get(case.layout)
    last = (3 if reduction is None else 2 * reduction.every) * case.accumulate
    for i in range(last - case.accumulate):
        trainer.train(i)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
        for i in range(last - case.accumulate, last):
            trainer.train(i)
    sent = reduction.sent(10**6, 8, 1).values() if reduction is not None else [8 * 10**6]
    return counted(seen.events(), trainer.parts, min(sent) // 10**6)


# What gloo says that it runs. It scatters sums by summing everything, which counts once.
RUN = {f"gloo:{kind}": kind for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast")}
SCATTERED = {"c10d::_reduce_scatter_base_": 1, "_c10d_functional::reduce_scatter_tensor": 0}


def counted(events: Any, ranks: int, size: int = 8) -> dict[str, int]:
    """Bytes by kind of collective, all elements being of one size but those of buffers, which are
    broadcast: of what is summed, of all that so many ranks gather, of all that is scattered."""
    found: dict[str, int] = dict.fromkeys((*RUN.values(), "reduce_scatter"), 0)
    for event in events:
        counts = [torch.Size(shape).numel() for shape in event.input_shapes]
        if event.name in RUN:
            kind = RUN[event.name]
            each = 8 if kind == "broadcast" else size
            found[kind] += each * sum(counts) * (ranks if kind == "all_gather" else 1)
        if event.name in SCATTERED:
            moved = size * counts[SCATTERED[event.name]]
            found["reduce_scatter"] += moved
            found["all_reduce"] -= moved
    return {kind: n for kind, n in found.items() if n}


# ---- the process


def meet(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    method = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)


VOLUMES = "volumes:"  # before the name of a case of which volumes are wanted


def main(rank: int, ranks: int, folder: str, *names: str) -> None:
    meet(rank, ranks, folder)
    for name in names:
        torch._dynamo.reset()
        if name == PIPELINE:
            made = {kind: piped(kind, ranks) for kind in PIPELINES}
            torch.save(made, Path(folder) / f"{name}{rank}.pt")
            continue
        if name == BESIDE:
            found = beside(ranks), of_different_models(ranks)
            torch.save(found, Path(folder) / f"{name}{rank}.pt")
            continue
        if name == VOCABULARY:
            torch.save(spread_words(ranks), Path(folder) / f"{name}{rank}.pt")
            continue
        if name == OPTIMISERS:
            made = {each: stepped(each, ranks) for each in OURS}
            if rank == 0:
                torch.save(made, Path(folder) / f"{name}.pt")
            continue
        if name.startswith(VOLUMES):
            sent = volumes(Case.of(name.removeprefix(VOLUMES)), ranks)
            if rank == 0:
                torch.save(sent, Path(folder) / f"{name}.pt")
            continue
        found = trained(Case.of(name), ranks)
        if rank == 0:
            torch.save(found, Path(folder) / f"{name}.pt")
        elif rank == ranks - 1:
            torch.save(found, Path(folder) / f"{name}.last.pt")
    dist.destroy_process_group()


def forked(ranks: int, folder: str, *names: str) -> int:
    """All ranks. The others are forks of this process, which has imported what they need."""
    import torch._dynamo  # noqa: F401

    rank, others = 0, []
    for other in range(1, ranks):
        process = os.fork()
        if not process:
            rank, others = other, []
            break
        others.append(process)
    main(rank, ranks, folder, *names)
    return max([0, *(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) != 0 for p in others)])


if __name__ == "__main__":
    sys.exit(forked(int(sys.argv[1]), *sys.argv[2:]))
