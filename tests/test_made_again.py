"""What a training step makes twice on a GPU instead of keeping it."""

from __future__ import annotations

import pytest
import torch
from test_joint import both_ways, for_gpu
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.ops import signs
from deuteron.passes import recompute
from deuteron.plan import halves

__all__ = ["for_gpu"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def all_of_it(monkeypatch):
    """Values are made again however small they are, and however long that takes."""
    monkeypatch.setattr(recompute, "LEAST", 0)
    monkeypatch.setattr(signs, "WORTH", 0)
    monkeypatch.setattr(recompute, "SHARE", 1e9)
    monkeypatch.setattr(recompute, "APART", 1e9)


class Blocks(nn.Module):
    """Three residual blocks; the second convolution of each is of pixels."""

    def __init__(self, act: nn.Module, width: int = 16) -> None:
        super().__init__()
        parts = [
            nn.ModuleList([nn.Conv2d(width, width, size, padding=size // 2, bias=False), norm])
            for size in (3, 1) * 3
            for norm in (nn.BatchNorm2d(width),)
        ]
        self.parts, self.act, self.last = nn.ModuleList(parts), act, nn.Linear(width, 10)

    def forward(self, x, y):
        for (one, norm), (two, other) in zip(self.parts[::2], self.parts[1::2], strict=True):
            z = self.act(norm(one(x)))
            x = self.act(other(two(z)) + x)
        return F.cross_entropy(self.last(x.mean((2, 3))), y)


def remade(backward: dt.Graph) -> tuple[int, int]:
    """Norms whose gradient makes their result again, and those with a residual among them."""
    found = [n for n in backward.nodes if n.op == recompute.GRADIENT and n.attrs["again"]]
    return len(found), sum(len(n.inputs) > 7 and n.inputs[7] is not None for n in found)


CASES = ((nn.ReLU(), True), (nn.ReLU(), False), (nn.SiLU(), True))


@pytest.mark.parametrize(("act", "waits"), CASES)
def test_gradients_are_eagers(act, waits, for_gpu, all_of_it, monkeypatch):
    """Of small convolutions of pixels, gradients may be one kernel, and wait for nothing: what they
    read is made by itself. Of relu only signs are kept, so that the sum of a block is made again
    where that before it is kept. The slope of silu asks for sums."""
    if waits:
        monkeypatch.setattr(recompute, "JOINED", (0, 0))
    torch.manual_seed(0)
    x = torch.randn(4, 16, 6, 6).to(memory_format=torch.channels_last)
    both_ways(Blocks(act).to(memory_format=torch.channels_last), (x, torch.randint(0, 10, (4,))))
    forward, backward = for_gpu
    sums = int(isinstance(act, nn.ReLU))
    assert remade(backward) == (3 * waits + sums, sums)
    saved = [forward.types[v].shape for n, v in forward.outputs if n.startswith("saved_")]
    assert saved.count((4, 16, 6, 6)) == 6 + 2 - sums, "what convolutions made, and sums of blocks"


def test_of_layers_what_follows_an_activation_is_made_again(for_gpu, all_of_it):
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)
            self.parts = nn.Sequential(nn.LayerNorm(24), *wide, nn.LayerNorm(24), nn.Linear(24, 9))

        def forward(self, x, y):
            return F.cross_entropy(self.parts(x), y)

    torch.manual_seed(0)
    both_ways(Layers(), (torch.randn(32, 24), torch.randint(0, 9, (32,))))
    forward, backward = for_gpu
    assert "gelu" in [n.op for n in backward.nodes]
    wide = [v for n, v in forward.outputs if n.startswith("saved_")]
    assert [forward.types[v].shape for v in wide].count((32, 96)) == 1


def two_products() -> dt.Graph:
    """relu of a product, which products read before and after ``late`` is known."""
    g = dt.Graph()
    x, w, late = (g.tensor(name, (1024, 1024), dt.float16) for name in ("x", "w", "late"))
    h = x @ w
    y = g.gelu(h)
    (y @ w).output("first")
    (y @ late + h * 0.5).output("second")
    return g


def test_a_share_of_the_time_is_spent_and_told(monkeypatch):
    def kept() -> tuple[int, str]:
        given = two_products().ir(), {"first"}, ["late"], dt.target("h200"), dt.Policy()
        cut, (note,) = halves(*given)
        return cut.kept, note

    monkeypatch.setattr(recompute, "APART", 0.0)
    assert kept() == (2 << 21, "keeps 4.19 MB for its gradient")
    monkeypatch.setattr(recompute, "APART", 1.0)
    monkeypatch.setattr(recompute, "SHARE", 1.0)
    size, note = kept()
    assert size == 1 << 21 and "keeps 2.10 MB for its gradient and makes 2.10 MB again" in note


def test_what_forward_writes_over_is_not_read_again(monkeypatch):
    monkeypatch.setattr(recompute, "SHARE", 1.0)
    monkeypatch.setattr(recompute, "APART", 1.0)
    g = dt.Graph()
    x, w, late = (g.tensor(name, (1024, 1024)) for name in ("x", "w", "late"))
    held = g.tensor("held", (1024, 1))
    h = x @ w
    y = g.gelu(h * held)
    (y @ w).output("first")
    (y @ late + h * 0.5).output("second")
    given = g.ir(), {"first"}, ["late"], dt.target("h200"), dt.Policy()
    free, _ = halves(*given)
    fixed, _ = halves(*given, written=("held",))
    assert "held" in free.saved and "held" not in fixed.saved and free.kept < fixed.kept
