"""What is cut off a product joins the reduction behind it: where that is cheaper, where it may, and
what comes out."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.engines import Candidate
from deuteron.passes import fuse
from deuteron.plan import region_borders
from deuteron.plan.choose import Choice, Option, Survey, heuristic
from deuteron.plan.region_borders import chosen, joins
from deuteron.policy import Policy
from deuteron.target import target
from tests.tolerances import SINGLE_LAYERS


class Layers(nn.Module):
    """Residual streams before and after norms, and one that is read between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.other = nn.LayerNorm(32), nn.RMSNorm(32)

    def forward(self, x):
        if self.kind == "after":
            y = self.norm(x + self.a(x))
            return self.other(y + self.b(y))
        if self.kind == "before":
            x = x + self.a(self.norm(x))
            return x + self.b(self.other(x))
        if self.kind == "softmax":
            return F.softmax(self.a(x) * 0.5 + 1.0, -1)
        s = x + self.a(x)
        return self.norm(s) + self.b(s)  # both read the sum


def graph_of(kind):
    x = torch.randn(4, 32)
    fast = dt.optimize(Layers(kind).eval(), (x,), find=False)
    return fast.plan.decision.graph


def pairs(kind):
    graph = graph_of(kind)
    regions, _ = fuse(graph, gates=True)
    found = joins(graph, regions)
    return [(regions[j.places[0]].ops, *(part.ops for part in j.parts)) for j in found]


def test_what_joins():
    add = (("linear", "add"), ("linear",))
    assert pairs("after") == [(*add, ("add", "layer_norm")), (*add, ("add", "rms_norm"))]
    assert pairs("before") == [(*add, ("add", "rms_norm"))]
    (softmax,) = pairs("softmax")
    assert softmax[1] == ("linear",) and softmax[2][-1] == "softmax"


@pytest.mark.parametrize("kind", ["after", "before", "softmax", "both"])
def test_joined_it_computes_the_same(kind, monkeypatch):
    monkeypatch.setattr(import_module("deuteron.plan.in_place"), "REJOINED", ("cpu",))
    monkeypatch.setattr(region_borders, "MARGIN", 1e9)  # whatever it costs
    torch.manual_seed(0)
    model, x = Layers(kind).eval(), torch.randn(3, 5, 32)
    fast = dt.optimize(model, (x,), find=False)
    assert (fast(x) - model(x)).abs().max() <= SINGLE_LAYERS
    ops = [c.region.ops for c in fast.plan.decision.choices]
    joined = any(len(o) > 1 and o[-1] in ("layer_norm", "rms_norm", "softmax") for o in ops)
    assert joined or kind == "both", ops


def test_on_a_gpu_a_sum_goes_to_the_norm_where_a_library_multiplies():
    g = dt.Graph()
    x, w = g.tensor("x", (64, 768), "bf16"), g.tensor("w", (768, 768), "bf16")
    r = g.tensor("r", (64, 768), "bf16")
    s = g.linear(x, w) + r
    g.rms_norm(s, dims=1).output("y")
    s.output("s")
    graph, survey = g.ir(), Survey(target("h200"), Policy())
    regions, _ = fuse(graph, gates=True)
    found = chosen(regions, joins(graph, regions), heuristic(survey), survey)
    assert [c.region.ops for c in found] == [("linear",), ("add", "rms_norm")]
    assert len(found[1].region.outputs) == 2  # the sum is read elsewhere, too


class Block(nn.Module):
    """As MobileNet has them: expand, weigh each channel by itself, perhaps squeeze and excite,
    project."""

    def __init__(self, squeezes: bool) -> None:
        super().__init__()
        self.squeezes = squeezes
        self.expand, self.project = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 8, 1)
        self.weigh = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.down, self.up = nn.Conv2d(24, 4, 1), nn.Conv2d(4, 24, 1)

    def forward(self, x):
        y = F.hardswish(self.weigh(F.hardswish(self.expand(x))))
        if self.squeezes:
            y = y * torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return x + self.project(y)


@pytest.mark.parametrize("squeezes", [False, True])
def test_two_regions_may_be_one(squeezes, monkeypatch):
    """What they compute stays the same, wherever they run."""
    torch.manual_seed(0)
    model, x = Block(squeezes).eval(), torch.randn(2, 8, 6, 5)
    graph = dt.optimize(model, (x,), find=False).plan.decision.graph
    regions, _ = fuse(graph, gates=True)
    found = [tuple(part.ops for part in j.parts) for j in joins(graph, regions)]
    apart = [(("conv", "hardswish", "conv", "add"),)]
    assert found == ([(("conv", "hardswish", "mean"),), (("mul", "conv", "add"),)] if squeezes
                     else apart)  # fmt: skip
    monkeypatch.setattr(import_module("deuteron.plan.in_place"), "REJOINED", ("cpu",))
    monkeypatch.setattr(region_borders, "MARGIN", 1e9)  # whatever it costs
    fast = dt.optimize(model, (x,), find=False)
    assert (fast(x) - model(x)).abs().max() <= SINGLE_LAYERS
    decision = fast.plan.decision
    assert all(whole in [c.region.ops for c in decision.choices] for (whole,) in found)
    kept = {v for c in decision.choices for v in c.region.outputs}
    assert {veto.value for veto in decision.vetoes} <= kept  # what is joined is not in memory


@pytest.mark.parametrize("dear", ["whole", "apart", "neither"])
def test_what_is_far_dearer_than_what_runs_instead_is_unlikely(dear):
    """A depthwise convolution and the mean of its result, or both in one: of two ways that are
    priced far apart one will probably not be run."""
    plan = dt.optimize(Block(True).eval(), (torch.randn(2, 8, 6, 5),), find=False).plan
    graph = plan.decision.graph
    regions, _ = fuse(graph, gates=True)
    mean, _ = several = joins(graph, regions)

    def pick(region):
        whole, apart = region.text == mean.parts[0].text, region.ops == ("mean",)
        seconds = 100.0 if {"whole": whole, "apart": apart}.get(dear) else 2.0 if whole else 1.0
        return Choice(region, Option(Candidate("cpu_gen", "1"), seconds))

    told = region_borders.unlikely(regions, several[:1], pick, Survey(target("h200"), Policy()))
    texts = {regions[i].text for i in mean.places}
    assert told == {"whole": {mean.parts[0].text}, "apart": texts, "neither": set()}[dear]


def block_with_gradients(residual: bool):
    """Two convolutions of single pixels, a norm behind each; the second may have a residual."""
    g = dt.Graph()
    x, r = g.tensor("x", (2, 4, 3, 5), "f32"), g.tensor("r", (2, 8, 3, 5), "f32")
    names = {"v": (6, 4, 1, 1), "w": (8, 6, 1, 1), "a": (6,), "b": (6,), "c": (8,), "d": (8,)}
    p = {name: g.tensor(name, shape, "f32") for name, shape in names.items()}
    y = g.batch_norm_act(g.conv(x, p["v"]), p["a"], p["b"], activation="silu")[0]
    last = g.batch_norm_act(
        g.conv(y, p["w"]), p["c"], p["d"], None, None, r if residual else None, activation="relu"
    )
    last[0].output("y")
    return g.grad("y", wrt=["x", *names, *(["r"] if residual else [])])


@pytest.mark.parametrize("residual", [False, True])
def test_three_regions_may_be_one(residual, monkeypatch):
    """The gradient of a norm, and both of the convolution that it is of."""
    both = block_with_gradients(residual)
    plain = both.compile(device="cpu")
    graph = plain.decision.graph
    found = [j.parts[0].ops for j in joins(graph, fuse(graph, gates=True)[0])]
    whole = ("batch_norm_act_grad", "conv_dx", "conv_dw")
    assert found.count(whole) == 2, found
    monkeypatch.setattr(import_module("deuteron.plan.in_place"), "REJOINED", ("cpu",))
    monkeypatch.setattr(region_borders, "MARGIN", 1e9)  # whatever it costs
    joined = both.compile(device="cpu")
    assert [c.region.ops for c in joined.decision.choices].count(whole) == 2
    torch.manual_seed(0)
    types = {v: graph.types[v] for v in graph.inputs}
    feed = {v: torch.randn(t.shape).as_strided(t.shape, t.strides) for v, t in types.items()}
    want, got = plain.run(**feed), joined.run(**feed)
    assert all((got[n] - want[n]).abs().max() <= SINGLE_LAYERS for n in want)
