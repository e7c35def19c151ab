"""A step that torch's autograd wrote, planned as a whole and cut in two."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron import torch_compile
from deuteron.ir import Graph
from deuteron.ops import opaque
from deuteron.ops.evaluate import evaluate
from deuteron.passes import fuse, products, run_passes
from deuteron.passes.context import Context
from deuteron.plan.sample_inputs import made_up
from tests.tolerances import DOUBLE, EPS, SINGLE_LAYERS, error

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@dataclass(frozen=True)
class Decided:
    notes: tuple[str, ...] = ()


class ByReference:
    """In the place of a plan: the graph by torch's operators, one by one."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.binder, self.decision = graph, self, Decided()

    def check(self, tensors: list[torch.Tensor]) -> None:
        pass

    def run_checked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = evaluate(self.graph, dict(zip(self.graph.inputs, tensors, strict=True)))
        return list(found.values())


@pytest.fixture
def for_gpu(monkeypatch):
    """Steps are cut as for an H200, and run here; the halves in order."""
    found: list[Graph] = []

    def planned(graph: Graph, **how):
        found.append(graph)
        return ByReference(graph)

    monkeypatch.setattr(torch_compile, "compile_graph", planned)
    monkeypatch.setattr(torch_compile, "find_target", lambda device: dt.target("h200"))
    return found


class Block(nn.Module):
    """A residual block with a norm on either way, as in a ResNet, and an activation to try."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.act, self.pool, self.last = act, nn.MaxPool2d(2), nn.Linear(16 * 9, 10)

    def forward(self, x, y):
        z = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        z = self.pool(self.act(z + self.bn3(self.conv3(x))))
        return F.cross_entropy(self.last(z.flatten(1)), y)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 9))

    def forward(self, x, y):
        return F.cross_entropy(self.parts(x).float().view(-1, 9), y.view(-1), ignore_index=2)


def both_ways(model: nn.Module, given: tuple[torch.Tensor, ...], **options) -> None:
    """The step through the backend has eager's loss, gradients and statistics."""
    ours = copy.deepcopy(model)
    losses = [model(*given), torch.compile(ours, backend=dt.backend, options=options)(*given)]
    for loss in losses:
        loss.backward()
    how = {"rtol": SINGLE_LAYERS, "atol": SINGLE_LAYERS}
    torch.testing.assert_close(losses[1], losses[0], **how)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **how)
    for mine, theirs in zip(ours.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, **how)


def ops_of(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.parametrize("act", [nn.ReLU(), nn.SiLU(), nn.Hardswish()], ids=str)
def test_norms_take_along_what_follows_them_both_ways(act, for_gpu):
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    both_ways(Block(act).to(memory_format=torch.channels_last), (x, torch.randint(0, 10, (4,))))
    _, backward = for_gpu
    joined = [n for n in backward.nodes if n.op == "batch_norm_act_grad"]
    assert len(joined) == 3
    assert sum(n.attrs["activation"] != "none" for n in joined) == 2
    assert "where" not in ops_of(backward), "no slope is written out"
    assert "max_pool_winners_grad" in ops_of(backward)


def test_losses_and_layer_norms_are_recognised(for_gpu):
    torch.manual_seed(0)
    both_ways(Layers(), (torch.randn(5, 24), torch.randint(0, 9, (5,))))
    forward, backward = for_gpu
    assert {"cross_entropy", "layer_norm"} <= set(ops_of(forward))
    assert {"cross_entropy_with_grad", "layer_norm_grad"} <= set(ops_of(backward))
    assert "log_softmax" not in ops_of(backward)


def test_a_gradient_of_the_users_own_is_kept():
    """What the way back does is what autograd was told, not what follows from the way there."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, y):
            return (Straight.apply(self.linear(x)) * y.relu().detach()).sum()

    both_ways(Model(), (torch.randn(4, 6), torch.randn(4, 6)))


def test_images_in_channels_last_have_their_gradients():
    """torch pools them to one pixel by way of their strides."""
    torch.manual_seed(0)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)

        def forward(self, x, y):
            pooled = F.adaptive_avg_pool2d(self.conv(x).relu(), 1)
            return F.cross_entropy(self.last(pooled.flatten(1)), y)

    x = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    model = Pooled().to(memory_format=torch.channels_last)
    both_ways(model, (x, torch.randint(0, 10, (4,))))


def test_memory_that_is_seen_by_its_strides():
    """What fills a tensor is kept as one number, and has no memory to be seen."""

    def written(x):
        zeros = torch.zeros(12)
        return torch.as_strided_scatter(zeros, x * 2, (3, 2), (4, 1)) + 1.0

    x = torch.randn(3, 2)
    assert torch.equal(torch.compile(written, backend=dt.backend)(x), written(x))


def kept(plans: list[dt.Plan]) -> int:
    """Bytes that the forward half leaves for the other."""
    return sum(t.nbytes for name, t in plans[0].outputs.items() if name.startswith("saved_"))


def test_less_memory_by_computing_again():
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32))]
    model = nn.Sequential(*parts)
    x, wanted = torch.randn(64, 32), torch.randn(64, 32)
    sizes = []
    for limit in (None, "60KB", "20KB"):
        torch._dynamo.reset()
        plans: list[dt.Plan] = []
        policy = dt.Policy(memory=limit)
        ours, plain = copy.deepcopy(model), copy.deepcopy(model)
        fast = torch.compile(ours, backend=dt.backend, options={"policy": policy, "plans": plans})
        for each in (fast, plain):
            F.mse_loss(each(x), wanted).backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert error(mine.grad, theirs.grad) <= SINGLE_LAYERS
        sizes.append(kept(plans))
        told = str(plans[0].explain())
        assert "for its gradient" in told and ("it could keep" in told) == (limit is not None)
    assert sizes[1] <= 60_000 < sizes[0] and sizes[2] <= 20_000


def test_a_gradient_can_be_taken_twice():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for each in (model, torch.compile(model, backend=dt.backend)):
        loss = each(x).square().sum()
        found.append([torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)])
    torch.testing.assert_close(found[1], found[0], rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


def test_random_numbers_are_drawn_as_eager_draws_them():
    """Also where an image lies otherwise in memory than eager's does."""
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 16, 4))
    model, x = nn.Sequential(*parts), torch.randn(2, 3, 6, 6)
    found = []
    for each in (model, torch.compile(model, backend=dt.backend)):
        torch.manual_seed(1)
        found.append(each(x))
    torch.testing.assert_close(found[1], found[0], rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_zeros_beside_uneven_rows_change_nothing(op, turned, monkeypatch):
    monkeypatch.setattr(products, "_evens", lambda *_: True)
    g = dt.Graph()
    x = g.tensor("x", (5, 11), "bf16")
    w = g.tensor("w", (13, 11) if op == "linear" or turned else (11, 13), "bf16")
    if op == "linear":
        y = g.linear(x, w, g.tensor("b", (13,), "bf16"))
    else:
        y = g.matmul(x, g.permute(w, dims=(1, 0)) if turned else w)
    y.output("y")
    graph = g.ir()
    ctx = Context(dt.target("h200"), dt.Policy())
    made, _ = run_passes(graph, ctx, (products_pass(),))
    product = next(n for n in made.nodes if n.op == op)
    assert all(made.types[v].shape[-1] % 8 == 0 for v in (*product.uses[:2], product.output))
    feed = {v: torch.randn(t.shape).to(t.dtype.torch) for v, t in graph.types.items() if v in "xwb"}
    want, got = (evaluate(each, feed)["y"] for each in (graph, made))
    torch.testing.assert_close(got, want, rtol=EPS[torch.bfloat16], atol=EPS[torch.bfloat16])


@pytest.mark.parametrize(("size", "whole"), [(13, 16), (16, 16), (4104, 4104), (50257, 50304)])
def test_what_makes_rows_even(size, whole):
    assert size + products._missing(size) == whole


def products_pass():
    from deuteron.passes import Pass

    return Pass("even rows", products.even_rows)


def test_what_only_shows_a_value_is_not_written_again():
    g = dt.Graph()
    rounded = g.cast(g.tensor("w", (6, 8)), dtype="bf16")
    turned = g.permute(rounded, dims=(1, 0))
    g.matmul(g.tensor("x", (3, 8), "bf16"), turned).output("y")
    rounded.output("w16")
    regions, _ = fuse(g.ir())
    assert ("cast",) in [region.ops for region in regions]


def test_who_reads_a_product_widens_it():
    g = dt.Graph()
    y = g.matmul(g.tensor("x", (4, 8), "bf16"), g.tensor("w", (8, 6), "bf16"))
    wide = g.cast(y, dtype="f32")
    g.cast(wide * wide * wide, dtype="bf16").output("y")
    first, *_ = fuse(g.ir())[0]
    assert first.ops == ("matmul",)


IMAGES = ("resnet18", "mobilenet_v2", "mobilenet_v3_large", "unet")
NETWORKS = [("llama_tiny", torch.contiguous_format), ("bert_4l", torch.contiguous_format)]
NETWORKS += [(n, way) for n in IMAGES for way in (torch.contiguous_format, torch.channels_last)]


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["cpu", "h200"])
@pytest.mark.parametrize(("name", "order"), NETWORKS, ids=str)
def test_networks_in_float64_have_eagers_gradients(name, order, target, request):
    """As planned here, and as cut for a GPU and run by torch's operators: no rounding hides a
    mistake of a pass."""
    if target == "h200":
        request.getfixturevalue("for_gpu")
    plain = dt.zoo.build(name).double().train().to(memory_format=order)
    (x,) = dt.zoo.example(name, batch=2, dtype=torch.float64)
    x = x[..., :64, :64].contiguous(memory_format=order) if name in IMAGES else x[:, :16]
    ours = copy.deepcopy(plain)
    for model in (plain, torch.compile(ours, backend=dt.backend)):
        torch.manual_seed(1)
        made = model(x)
        F.softplus((made if torch.is_tensor(made) else made[0]).float()).mean().backward()
    both = ([p.grad for p in m.parameters()] for m in (ours, plain))
    # what the loss does not reach has no gradient, or, as torch.compile has it, one of zeros
    pairs = [(g, torch.zeros_like(g) if h is None else h) for g, h in zip(*both, strict=True)]
    mine, theirs = (torch.cat([g.flatten() for g in grads]) for grads in zip(*pairs, strict=True))
    assert error(mine, theirs) <= SINGLE_LAYERS
    for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
        assert error(mine, theirs) <= SINGLE_LAYERS


def _conv():
    return nn.Conv2d(3, 8, 3, bias=False)


def _still(*parts):
    """Layers as they are after ``eval``, or without gradients, amid others that are trained."""
    return [part.requires_grad_(False) for part in parts]


ODD_LAYERS = {
    "norm in evaluation": lambda: [_conv(), nn.BatchNorm2d(8).eval()],
    "behind a frozen layer": lambda: [*_still(_conv()), nn.BatchNorm2d(8).eval()],
    "without weights": lambda: [_conv(), nn.BatchNorm2d(8, affine=False).eval()],
    "frozen norm": lambda: [_conv(), *_still(nn.BatchNorm2d(8).eval())],
    "statistics of a batch": lambda: [nn.BatchNorm2d(3, track_running_stats=False)],
    "norm of each image": lambda: [_conv(), nn.InstanceNorm2d(8, affine=True)],
    "slopes": lambda: [_conv(), nn.PReLU(8), nn.PReLU()],
}


@pytest.mark.parametrize("name", ODD_LAYERS)
def test_layers_are_ours_in_all_their_modes(name):
    layers = ODD_LAYERS[name]()
    for norm in layers:
        if getattr(norm, "track_running_stats", False):
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    plain, plans = nn.Sequential(*layers, nn.Tanh()).double(), []
    ours, x = copy.deepcopy(plain), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    fast = torch.compile(ours, backend=dt.backend, options={"plans": plans})
    for model in (plain, fast):
        model(x).square().mean().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert q.grad is None or error(p.grad, q.grad) <= DOUBLE
    assert not any(node.op == "aten" for plan in plans for node in plan.graph.nodes)


def test_a_call_may_leave_out_results_that_nobody_asked_for():
    """Torch's tracer has a tensor of each."""
    x, one = torch.randn(2, 3, 4, 4), torch.ones(3)
    empty, mask = torch.empty(0), [False, True, True]
    numbers = ("in", 0), ("in", 0), *[("in", 1)] * 3, ("in", 2), ("in", 2), False, 0.1
    how = {"args": (*numbers, ("list", *mask)), "kwargs": (), "seen": ()}
    call = opaque.bound(
        target="aten.native_batch_norm_backward.default",
        out=("f32[2,3,4,4]", "f32[3]", "f32[3]"),
        **how,
    )
    nothing, *found = call(x, one, empty)
    assert nothing is None
    given = x, x, one, one, one, empty, empty, False, 0.1, mask
    torch.testing.assert_close(found, list(torch.ops.aten.native_batch_norm_backward(*given))[1:])


def test_random_numbers_are_drawn_as_the_operand_lies_in_memory():
    """Passes may lay a value out in another order, but not for a call that goes by memory."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            rows = self.first(x.transpose(0, 1).reshape(-1, 8))
            y = rows.view(6, 4, 8).transpose(0, 1)  # strides {8,32,1}
            return self.last(F.dropout(y, 0.5)).square().mean()

    plain = Turned().double()
    ours, x = copy.deepcopy(plain), torch.randn(4, 6, 8, dtype=torch.float64)
    for model in (plain, torch.compile(ours, backend=dt.backend)):
        torch.manual_seed(1)
        model(x).backward()
    torch.testing.assert_close(ours.first.weight.grad, plain.first.weight.grad)


RESIZED = [("bilinear", 2, {"size": 7}), ("nearest", 2, {"scale_factor": 1.7})]
MORE = [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]
MORE = [(*m, {"size": 9, "align_corners": True}) for m in MORE]
RESIZED += [pytest.param(*m, marks=pytest.mark.sweep) for m in MORE]


@pytest.mark.parametrize(("mode", "dims", "how"), RESIZED, ids=str)
def test_resizing_stays_whole(mode, dims, how):
    x, plans, grads = torch.randn(2, 3, *[5] * dims, dtype=torch.float64), [], []

    def loss(x):
        return F.interpolate(2 * x, mode=mode, **how).sin().sum()

    ours = torch.compile(loss, backend=dt.backend, options={"plans": plans})
    for call in (loss, ours):
        given = x.clone().requires_grad_()
        call(given).backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
    forward, backward = (ops_of(plan.decision.graph) for plan in plans)
    assert "resize" in forward and "resize_grad" in backward and "aten" not in forward + backward


def test_a_loss_of_probabilities_that_autocast_rounds():
    """On a GPU softmax is rounded to 16 bits, and the loss widens it."""

    def loss(x, y):
        return F.nll_loss(F.log_softmax(x, -1).float(), y)

    x = torch.randn(6, 11, dtype=torch.bfloat16)
    y, plans, grads = torch.randint(0, 11, (6,)), [], []
    ours = torch.compile(loss, backend=dt.backend, options={"plans": plans})
    for call in (lambda x, y: F.cross_entropy(x.double(), y), ours):
        given = x.clone().requires_grad_()
        call(given, y).backward()
        grads.append(given.grad)
    assert error(grads[1], grads[0]) <= EPS[torch.bfloat16]
    assert all("log_softmax" not in ops_of(plan.decision.graph) for plan in plans)
    assert "cross_entropy_with_grad" in ops_of(plans[1].decision.graph)


def test_what_is_copied_for_two_is_copied_once():
    """Heads laid side by side, for a product and, turned, for the gradient of its weight."""
    g = dt.Graph()
    heads = g.tensor("x", (2, 4, 6, 8))
    rows = g.reshape(g.permute(heads, dims=(0, 2, 1, 3)), shape=(12, 32))
    g.matmul(rows, g.tensor("w", (32, 5))).output("y")
    g.matmul(g.permute(rows, dims=(1, 0)), g.tensor("z", (12, 3))).output("dw")
    ops = ops_of(run_passes(g.ir(), Context(dt.target("h200"), dt.Policy()))[0])
    assert ops.count("reshape") == 1


def test_what_is_scaled_and_repeated_takes_the_order_of_what_it_joins():
    """The gradient of a mean over the image meets that of a convolution, channels last."""
    g = dt.Graph()
    spread = g.expand(g.tensor("m", (2, 8, 1, 1)), shape=(2, 8, 4, 4)) / 3.0
    (spread + g.tensor("x", (2, 8, 4, 4), layout="nhwc")).output("y")
    made = run_passes(g.ir(), Context(dt.target("h200"), dt.Policy()))[0]
    assert ops_of(made)[:3] == ["div", "expand", "add"]
    assert made.types[made.nodes[2].output].is_layout("nhwc")


def test_made_up_places_are_inside_whatever_is_indexed():
    def loss(x, i, j):
        return torch.ops.aten._unsafe_index(x, [None, i, j]).sum()

    graph = []
    x, i, j = torch.randn(9, 2, 2), torch.tensor([0, 1]), torch.tensor([1, 0])
    ours = torch.compile(loss, backend=dt.backend, options={"plans": graph})
    torch.testing.assert_close(ours(x, i, j), loss(x, i, j))
    (region,) = (r for r in fuse(graph[0].decision.graph)[0] if "aten" in r.ops)
    made = made_up(region, {}, torch.device("cpu"))
    assert all(int(t.max()) == 0 for t in made.values() if not t.is_floating_point())


def test_what_is_repeated_is_dropped_as_eager_drops_it():
    """A dimension that repeats has no place in memory; torch draws where it is written."""

    def repeated(x):
        places = torch.arange(20.0).view(4, 1, 5).sin()  # known, so that it is in no graph
        return F.dropout(places.expand(-1, 3, -1), 0.5) * x

    x, drawn = torch.randn(4, 3, 5, requires_grad=True), []
    for f in (torch.compile(repeated, backend=dt.backend), repeated):
        torch.manual_seed(0)
        drawn.append(f(x).detach())
    torch.testing.assert_close(*drawn)
