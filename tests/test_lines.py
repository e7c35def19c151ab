"""Convolutions over lines: planned as images of one row, with what belongs to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.frontends.torch_export import import_module
from deuteron.ops.evaluate import evaluate
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from tests.sweeps import one_in
from tests.test_padding import on_cpu
from tests.test_spellings import ops


class Residual(nn.Module):
    """Values between two convolutions that others read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 5, padding=2)
        self.scale = nn.Parameter(torch.rand(8, 1) + 0.5)

    def forward(self, x):
        inside = self.one(x).relu() * 0.5
        return self.two(inside + x) * self.scale + inside, inside.mean(-1)


NETS = {
    "as wav2vec2 begins": lambda: nn.Sequential(
        nn.Conv1d(6, 16, 10, stride=5, bias=False),
        nn.GroupNorm(16, 16),
        nn.GELU(),
        nn.Conv1d(16, 16, 3, stride=2),
        nn.GELU(),
    ),
    "norms and pools": lambda: nn.Sequential(
        nn.Conv1d(6, 12, 5, padding=4, dilation=2),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.MaxPool1d(3, 2, padding=1),
        nn.Conv1d(12, 9, 3, groups=3, stride=2),
        nn.SiLU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
    ),
    "depthwise": lambda: nn.Sequential(nn.Conv1d(6, 12, 1), nn.Conv1d(12, 12, 7, groups=12)),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose1d(6, 8, 4, stride=3, padding=1, output_padding=1), nn.Tanh()
    ),
    "patches": lambda: nn.Conv1d(6, 32, 5, stride=5),
}


@pytest.mark.parametrize(
    "dtype", one_in(2, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.each_value
def test_lines_are_images(name, dtype):
    torch.manual_seed(1)
    made = on_cpu(NETS[name]().to(dtype), torch.randn(2, 6, 60, dtype=dtype))
    shapes = [made.types[node.uses[0]].shape for node in made.nodes if node.op == "conv"]
    assert all(len(shape) == 4 and shape[2] == 1 for shape in shapes)


def test_what_is_around_them_stays_an_image():
    x = torch.randn(2, 8, 33)
    module = Residual().eval()
    got, want = dt.optimize(module, x, find=False)(x), module(x)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    made = decide(import_module(module, (x,), {}).graph, dt.target("h200"), Policy()).graph
    between = [n for n in made.nodes if n.op in ("relu", "add", "mul")]
    assert sum(made.types[n.output].is_layout("nhwc") for n in between) >= 3


def test_gradients_of_lines_are_those_of_images_on_a_gpu():
    g = dt.Graph()
    x, w, dy = g.tensor("x", (2, 6, 33)), g.tensor("w", (8, 3, 5)), g.tensor("dy", (2, 8, 16))
    how = {"stride": 2, "padding": 1, "groups": 2}
    g.conv_dx(dy, w, shape=x.shape, **how).output("dx")
    g.conv_dw(dy, x, shape=w.shape, **how).output("dw")
    asked, feed = g.ir(), {"x": (2, 6, 33), "w": (8, 3, 5), "dy": (2, 8, 16)}
    made = decide(asked, dt.target("h200"), Policy()).graph
    assert {made.types[n.uses[0]].rank for n in made.nodes if n.op.startswith("conv")} == {4}
    given = {name: torch.randn(shape) for name, shape in feed.items()}
    want, got = (evaluate(graph, given, float64=True) for graph in (asked, made))
    for name, exact in want.items():
        torch.testing.assert_close(got[name], exact)
        assert got[name].stride() == exact.stride()


def test_orders_that_are_to_be_kept_are():
    graph = import_module(nn.Conv1d(6, 8, 3), (torch.randn(2, 6, 20),), {}).graph
    kept = decide(graph, dt.target("cpu"), Policy(layout="keep")).graph
    assert ops(kept) == ["conv"]
