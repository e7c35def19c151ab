"""Networks, data and the plain loop that training steps are held against, on any device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from tests.tolerances import EPS, NETWORK, TRAINED, allowed, error


class Images(nn.Module):
    """Convolutions, batch norms with running statistics, a residual and dropout."""

    def __init__(self, width: int = 8, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                norm(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                norm(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


class Words(nn.Module):
    """A small GPT whose embedding is the last layer's weight as well; it returns its loss."""

    def __init__(self, width: int = 32, layers: int = 1, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        n = ids.shape[1]
        x = self.embed(ids) + self.places(torch.arange(n, device=ids.device))
        mask = torch.full((n, n), float("-inf"), device=ids.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Layers(nn.Module):
    """Three products; the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16))
        self.last = nn.Linear(16, 4)
        self.parts[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.layer_norm(self.parts(x), (16,)))


def images(n: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise in which one quarter of the picture is brighter: which one is the answer."""
    x, y = torch.randn(n, 3, 8, 8, generator=gen), torch.randint(0, 4, (n,), generator=gen)
    for picture, corner in zip(x, y.tolist(), strict=True):
        top, left = 4 * (corner // 2), 4 * (corner % 2)
        picture[:, top : top + 4, left : left + 4] += 1.0
    return x, y


def words(n: int, gen: torch.Generator, length: int = 12) -> dict[str, torch.Tensor]:
    """Sentences by a grammar: each word is the last one plus a step that the first word sets."""
    first = torch.randint(0, 20, (n, 1), generator=gen)
    step = first % 3 + 1
    ids = (first + step * torch.arange(length + 1)) % 20
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def vectors(n: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 6, generator=gen)
    return x, x[:, :4].argmax(1)


def batches(make: Callable[..., Any], sizes: list[int], seed: int = 0) -> Iterator[Any]:
    gen = torch.Generator().manual_seed(seed)
    return (make(n, gen) for n in sizes)


class Plain:
    """The loop that a step stands for, as the documentation of PyTorch writes it."""

    def __init__(self, model, optimizer, autocast=None, scaler=None, max_norm=None, accumulate=1):
        self.model, self.optimizer, self.autocast = model, optimizer, autocast
        self.max_norm, self.accumulate, self.calls = max_norm, accumulate, 0
        self.device = next(model.parameters()).device
        made = torch.amp.GradScaler(self.device.type, enabled=autocast is torch.float16)
        self.scaler = made if scaler is None else scaler

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        args = tuple(x.to(self.device) for x in args)
        named = {name: x.to(self.device) for name, x in named.items()}
        if self.calls % self.accumulate == 0:
            self.optimizer.zero_grad()
        self.calls += 1
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            out = self.model(*args[:-1], **named)
            loss = out["loss"] if named else F.cross_entropy(out, args[-1])
        self.scaler.scale(loss / self.accumulate).backward()
        if self.calls % self.accumulate == 0:
            self.scaler.unscale_(self.optimizer)
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()


# ---- a step of ours beside it


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **more})


def adamw(model, kind=torch.optim.AdamW, **more):
    """In two groups. With this eps, rounding does not decide the sign of an update."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[:1], "lr": 0.03}, {"params": params[1:]}]
    return kind(groups, 0.01, eps=1e-2, **more)


def both(model, make, example, device="cpu", **how):
    """A step of ours and the plain loop, from the same parameters."""
    torch.manual_seed(1)
    ours = model().to(device)
    theirs = copy.deepcopy(ours)
    loss_fn = None if isinstance(example, dict) else F.cross_entropy
    step = dt.train_step(ours, loss_fn, make(ours), example, **how)
    return step, Plain(theirs, make(theirs), **how)


def same(step, plain, batch, seed, tolerance=NETWORK):
    """One call of each with the same random numbers: losses, parameters, statistics, state."""
    losses = []
    for call in (step, plain):
        torch.manual_seed(seed)
        losses.append(called(call, batch))
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(losses[0], losses[1])
    close(step.model.state_dict(), plain.model.state_dict())
    mine, theirs = step.optimizer.state_dict(), plain.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    close(mine["state"], theirs["state"], check_device=False)


def halve(each):
    """Load what was saved, in other memory, with the moments halved."""
    state = each.optimizer.state_dict()
    for kept in state["state"].values():
        kept["exp_avg"] = kept["exp_avg"] / 2
    each.optimizer.load_state_dict(state)


def shrink(each):
    kept = each.model.last.state_dict()
    each.model.last.load_state_dict({name: value / 2 for name, value in kept.items()})


def moved(each):
    each.model.last.bias.data = torch.ones_like(each.model.last.bias)


def swapped(each):
    """Another last layer, which the optimiser is told of."""
    torch.manual_seed(3)
    each.model.last = nn.Linear(16, 4).to(each.model.last.weight.device)
    each.optimizer.add_param_group({"params": list(each.model.last.parameters())})


def hooked(each):
    each.model.last.register_forward_hook(lambda _module, _given, made: made * 2.0)


# What a user may do between two calls of either, and whether a graph that was captured stays.
CHANGES: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "learning rate": (True, lambda each: each.optimizer.param_groups[1].update(lr=0.5)),
    "loss scale": (True, lambda each: each.scaler.update(2.0**10)),
    "parameters": (True, shrink),
    "betas": (False, lambda each: each.optimizer.param_groups[0].update(betas=(0.5, 0.6))),
    "decay": (False, lambda each: each.optimizer.param_groups[0].update(weight_decay=0.5)),
    "dropout": (False, lambda each: setattr(each.model.parts[2], "p", 0.7)),
    "one layer's mode": (False, lambda each: each.model.parts[2].eval()),
    "frozen": (False, lambda each: each.model.last.weight.requires_grad_(False)),
    "state": (False, halve),
    "memory": (False, moved),
    "layer": (False, swapped),
    "hook": (False, hooked),
}


def change(name: str, device: str) -> None:
    """Four calls, a change, and four more, all as the plain loop has it."""
    keeps, changed = CHANGES[name]
    how = {"autocast": torch.float16} if name == "loss scale" else {}
    step, plain = both(Layers, adamw, vectors(8, torch.Generator()), device, **how)
    most = TRAINED * EPS[torch.float16] / 16 if how else NETWORK
    data = list(batches(vectors, [8] * 4))
    for k, batch in enumerate(data):
        same(step, plain, batch, k, most)
        assert step.captured == (k > 1), step.note
    for each in (step, plain):
        changed(each)
    for k, batch in enumerate(data):
        same(step, plain, batch, k + 9, most)
        assert step.captured == (keeps or k > 1), step.note


# ---- proof that it trains: network, data, optimiser, size of a batch

RUNS: dict[str, tuple[Any, ...]] = {
    "images": (partial(Images, 8, 2), images, sgd, 8),
    "words": (partial(Words, 32, 2), words, lambda m: dt.optim.AdamW(m.parameters(), 3e-3), 8),
}


def called(step: Any, batch: Any) -> torch.Tensor:
    return step(**batch) if isinstance(batch, dict) else step(*batch)


def trained(name: str, device: str, autocast: torch.dtype | None, steps: int = 200) -> Any:
    """The losses at the end differ from eager's by no more than eager's with other batches do. From
    there, one step more of both has the same running statistics."""
    make, data, optimizer, size = RUNS[name]

    def run(seed: int, ours: bool) -> tuple[float, Any]:
        torch.manual_seed(0)
        model = make().to(device)
        loss_fn = None if name == "words" else F.cross_entropy
        example = data(size, torch.Generator())
        if ours:
            step = dt.train_step(model, loss_fn, optimizer(model), example, autocast=autocast)
        else:
            step = Plain(model, optimizer(model), autocast)
        torch.manual_seed(seed)
        losses = [float(called(step, batch)) for batch in batches(data, [size] * steps, seed)]
        assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
        return sum(losses[-40:]) / 40, step

    eager = [run(seed, ours=False)[0] for seed in range(4)]
    end, step = run(0, ours=True)
    spread = max(eager) - min(eager)
    assert min(eager) - spread <= end <= max(eager) + spread, (end, eager)
    copied = copy.deepcopy(step.model)
    plain = Plain(copied, torch.optim.SGD(copied.parameters()), autocast)
    batch = data(size, torch.Generator())
    for each in (step, plain):
        torch.manual_seed(1)
        called(each, batch)
    most = NETWORK if autocast is None else EPS[autocast]
    buffers = (dict(each.model.named_buffers()) for each in (step, plain))
    torch.testing.assert_close(*buffers, rtol=most, atol=most)
    return step


def gradients(name: str, device: str) -> None:
    """Of every parameter, before training, early and later, without dropout, which depends on the
    type: at most twice as far from float64 as PyTorch's, and a few roundings."""
    make, data, _, size = RUNS[name]
    model = make().to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    loss_fn = None if name == "words" else F.cross_entropy
    example = data(size, torch.Generator())
    still = dt.train_step(model, loss_fn, sgd(model, lr=0.0), example, accumulate=2)
    train, data = Plain(model, sgd(model)), list(batches(data, [size] * 61))
    for k, batch in enumerate(data):
        if k in (0, 20, 60):
            others = [copy.deepcopy(model).double(), copy.deepcopy(model)]
            called(still, batch)
            mine = {n: 2 * p.grad for n, p in model.named_parameters()}  # by the mean of two
            called(still, batch)
            for other in others:
                wide = next(other.parameters()).dtype
                cast = {n: x.to(wide) if x.is_floating_point() else x for n, x in named(batch)}
                given = cast if isinstance(batch, dict) else tuple(cast.values())
                called(Plain(other, sgd(other, lr=0.0)), given)
            exact, torchs = (dict(other.named_parameters()) for other in others)
            for n, grad in mine.items():
                theirs = error(torchs[n].grad, exact[n].grad)
                assert error(grad, exact[n].grad) <= allowed(theirs, torch.float32, TRAINED), (k, n)
        called(train, batch)


def named(batch: Any) -> Any:
    return batch.items() if isinstance(batch, dict) else enumerate(batch)
