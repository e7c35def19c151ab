"""A ResNet-18 that learns: blocks of ``dt.nn.ConvBNAct`` against torch's modules, from one seed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt

pytestmark = pytest.mark.sweep
STEPS, CLASSES, SIZE, BATCH = 200, 4, 16, 8
HALF_STEPS = 60  # of which each takes long on a CPU


class Plain(nn.Module):
    """A convolution, a norm, perhaps a sum, perhaps relu, as torch's modules."""

    def __init__(self, ins: int, outs: int, window: int, stride: int, relu: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(ins, outs, window, stride, window // 2, bias=False)
        self.bn = nn.BatchNorm2d(outs)
        self.relu = relu

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.bn(self.conv(x))
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y


class Basic(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first = Plain(ins, outs, 3, stride, True)
        self.second = Plain(outs, outs, 3, 1, True)
        self.short = Plain(ins, outs, 1, stride, False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x), self.short(x))
        return y


def resnet18(width: int = 4) -> nn.Sequential:
    """Eight blocks of two convolutions, a first one and three shortcuts, on small images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Plain(3, width, 3, 1, True)]
    ins = width
    for stage in range(4):
        for i in range(2):
            outs = width << stage
            layers.append(Basic(ins, outs, 2 if stage and not i else 1))
            ins = outs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, CLASSES))


def fused(model: nn.Sequential) -> nn.Module:
    """The same network, parameters copied, of blocks of ours."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Plain):
                act = "relu" if child.relu else None
                setattr(module, name, dt.nn.ConvBNAct.from_modules(child.conv, child.bn, act))
    return model


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images of noise with a bright square, whose quarter of the image is the class."""
    gen = torch.Generator().manual_seed(1)
    made, half = [], SIZE // 2
    for _ in range(STEPS):
        y = torch.randint(0, CLASSES, (BATCH,), generator=gen)
        x = torch.randn(BATCH, 3, SIZE, SIZE, generator=gen)
        at = torch.randint(0, half - 4, (BATCH, 2), generator=gen)
        for image, label, (i, j) in zip(x, y.tolist(), at.tolist(), strict=True):
            i, j = i + label // 2 * half, j + label % 2 * half
            image[:, i : i + 4, j : j + 4] += 1.5
        made.append((x, y))
    return made


def trained(model: nn.Module, step: Any = None) -> list[float]:
    """The losses of all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, losses = batches(), []
    if step is not None:
        run = step(model, F.cross_entropy, optimizer, data[0])
        return [float(run(x, y)) for x, y in data]
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained_in_half(model: nn.Module) -> list[float]:
    """The losses of some steps under torch's autocast, as anybody would write it."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    losses = []
    for x, y in batches()[:HALF_STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.fixture(autouse=True)
def _one_thread():
    """Layers this small have nothing to share out, and threads that wait take time from others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("step", [None, dt.train_step], ids=["loop", "train_step"])
def test_losses_and_statistics_are_those_of_torchs_modules(step):
    """Rounding grows from step to step, in torch's own network as well: as far as three runs of
    that part, whose first weights differ by a rounding, ours may differ from one of them."""
    plain = resnet18()
    ours, others, gen = fused(plain), [copy.deepcopy(plain) for _ in "ab"], torch.Generator()
    gen.manual_seed(2)
    with torch.no_grad():
        for p in (p for moved in others for p in moved.parameters()):
            p.mul_(1 + 2**-21 * torch.randn(p.shape, generator=gen))
    wanted, apart, got = trained(plain), list(map(trained, others)), trained(ours, step)
    assert mean(wanted[-20:]) < 0.5 * mean(wanted[:20])  # it learns
    spread = max(abs(a - b) for losses in apart for a, b in zip(wanted, losses, strict=True))
    assert max(abs(a - b) for a, b in zip(wanted, got, strict=True)) <= 3 * spread + 1e-5
    assert abs(mean(wanted[-50:]) - mean(got[-50:])) <= 3 * spread + 1e-5
    first = [abs(a - b) for a, b in zip(wanted[:5], got[:5], strict=True)]
    assert max(first) <= 1e-4  # before rounding has grown
    beside = [dict(moved.named_buffers()) for moved in others]
    pairs = zip(plain.named_buffers(), ours.named_buffers(), strict=True)
    for (name, a), (same, b) in pairs:
        assert name == same
        if a.is_floating_point():
            room = 3 * max(float((a - c[name]).abs().max()) for c in beside) + 1e-5
            assert float((a - b).abs().max()) <= room, name
        else:
            assert torch.equal(a, b)


def test_losses_in_float16():
    """A planned step of our blocks against a loop over torch's modules, both with a scaler: no
    further apart than two such loops whose first weights differ by half a rounding."""
    plain = resnet18()
    ours, moved, gen = fused(plain), copy.deepcopy(plain), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + 2**-12 * torch.randn(p.shape, generator=gen))
    wanted, apart = trained_in_half(plain), trained_in_half(moved)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    data = batches()[:HALF_STEPS]
    step = dt.train_step(ours, F.cross_entropy, optimizer, data[0], autocast=torch.float16)
    got = [float(step(x, y)) for x, y in data]
    for some in (slice(0, 5), slice(None)):
        spread = max(abs(a - b) for a, b in zip(wanted[some], apart[some], strict=True))
        assert max(abs(a - b) for a, b in zip(wanted[some], got[some], strict=True)) <= 3 * spread
    ends = [mean(losses[-10:]) for losses in (wanted, apart)]
    assert mean(got[-10:]) < max(ends) + spread  # in so few steps not every run learns anything
    pairs = zip(plain.buffers(), ours.buffers(), moved.buffers(), strict=True)
    for a, b, c in pairs:
        if a.is_floating_point():
            assert float((a - b).abs().max()) <= 3 * float((a - c).abs().max()) + 1e-2
