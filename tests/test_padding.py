"""Pads in front of windows, as models write them: gone where the windows can do without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.frontends.torch_export import import_module
from deuteron.ops.conv import is_uneven
from deuteron.ops.evaluate import evaluate
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from tests.test_spellings import Written, ops, planned
from tests.tolerances import DOUBLE_GRADIENT, allowed, error

CPU = dt.target("cpu")


def tf_same(x, kernel: int, stride: int, value: float = 0.0):
    """As MobileNetV2 of transformers and the models that timm took over from TensorFlow do it."""
    total = [max(kernel - (n % stride or stride), 0) for n in x.shape[2:]]
    height, width = ((t // 2, t - t // 2) for t in total)
    return F.pad(x, (*width, *height), "constant", value)


def on_cpu(module, x):
    """The graph for a CPU; plans for images in several orders give the module's numbers."""
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    kinds = [x, turned] + ([x.to(memory_format=torch.channels_last)] if x.ndim == 4 else [])
    with torch.no_grad():
        made = [dt.optimize(module.eval(), given, find=False) for given in kinds]
        got, plain = [run(given) for run, given in zip(made, kinds, strict=True)], module(x)
        exact = module.double()(x.double())
    limit = allowed(error(plain, exact), x.dtype, 1024)
    assert max(error(y, exact) for y in got) <= limit
    return made[0].plan.decision.graph


# ---- convolutions


def conv(*sizes, **how):
    kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(sizes)]
    window = sizes[2:] if len(sizes) > 3 else sizes[2]
    return kind(sizes[0], sizes[1], window, **how)


EVEN = {
    "ZeroPad2d": (lambda x, c: c(nn.ZeroPad2d(1)(x)), (4, 6, 3, 3), {}, (2, 4, 7, 6)),
    "with padding of its own": (
        lambda x, c: c(F.pad(x, (2, 2, 1, 1))),
        (4, 6, 3, 3),
        {"padding": (0, 1), "stride": 2},
        (2, 4, 7, 6),
    ),
    "depthwise": (
        lambda x, c: c(tf_same(x, 3, 1)),
        (8, 8, 3, 3),
        {"groups": 8, "bias": False},
        (1, 8, 5, 9),
    ),
    "dilated": (
        lambda x, c: c(F.pad(x, (4, 4, 4, 4))),
        (4, 4, 3, 3),
        {"dilation": 4},
        (1, 4, 9, 6),
    ),
    "one dimension": (lambda x, c: c(nn.ConstantPad1d(2, 0.0)(x)), (3, 5, 5), {}, (2, 3, 11)),
    "three": (lambda x, c: c(F.pad(x, (1,) * 6)), (2, 3, 3, 3, 3), {}, (1, 2, 4, 5, 3)),
}


@pytest.mark.parametrize("name", EVEN)
def test_zeros_on_both_sides_are_the_convolutions_own(name):
    written, sizes, how, shape = EVEN[name]
    made = planned(Written(written, c=conv(*sizes, **how)), torch.rand(shape))
    assert "pad" not in ops(made)


UNEVEN = {
    "stem": (3, 2, 1, (1, 3, 17, 20)),
    "dense": (3, 2, 1, (2, 16, 12, 14)),
    "dense, odd": (3, 2, 1, (1, 24, 11, 14)),
    "depthwise": (3, 2, 32, (1, 32, 14, 12)),
    "depthwise, odd": (3, 2, 19, (2, 19, 13, 16)),
    "depthwise 5×5": (5, 2, 32, (1, 32, 16, 12)),
    "even window": (4, 1, 1, (1, 16, 9, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", UNEVEN)
def test_more_zeros_behind_than_before(name, dtype):
    kernel, stride, groups, shape = UNEVEN[name]
    inner = nn.Conv2d(shape[1], max(32 // groups, 1) * groups, kernel, stride, groups=groups)
    net = Written(lambda x, c: F.relu6(c(tf_same(x, kernel, stride))), c=inner).to(dtype)
    made = on_cpu(net, torch.randn(shape).to(dtype))
    (node,) = [n for n in made.nodes if n.op == "conv"]
    if name != "stem":  # few channels are copied into a frame anyway: either may be cheaper
        assert "pad" not in ops(made) and is_uneven(node.attrs)


def chosen(module, x, target) -> list[str]:
    return ops(decide(import_module(module.eval(), (x,), {}).graph, target, Policy()).graph)


def test_who_takes_an_uneven_edge_is_asked():
    """Depthwise kernels find the edge themselves; cuDNN's fused call pads both sides alike."""
    between = {"a": nn.Conv2d(8, 96, 1), "z": nn.Conv2d(96, 8, 1)}
    x = torch.rand(1, 8, 56, 56)
    for groups, target, pads in ((96, CPU, 0), (1, CPU, 0), (96, "h200", 0), (1, "h200", 1)):
        c = nn.Conv2d(96, 96, 3, 2, groups=groups)
        net = Written(lambda x, a, c, z: z(F.relu(c(tf_same(a(x), 3, 2)))), c=c, **between)
        target = dt.target(target) if isinstance(target, str) else target
        assert chosen(net, x, target).count("pad") == pads


def test_causal_in_one_dimension():
    c = nn.Conv1d(64, 64, 4, groups=64)
    net = Written(lambda x, c: F.silu(c(F.pad(x, (3, 0)))), c=c)
    x = torch.randn(2, 64, 33)
    assert "pad" not in chosen(net, x, dt.target("h200"))
    on_cpu(net, x)


# ---- pools

MAXIMA = {
    "same": lambda x: F.max_pool2d(tf_same(x, 3, 2, -math.inf), 3, 2),
    "both sides": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-math.inf), 3, 2),
    "after relu": lambda x: F.max_pool2d(nn.ZeroPad2d(1)(F.relu(x)), 3, 2),
    "after relu6, same": lambda x: F.max_pool2d(tf_same(F.relu6(x), 3, 2), 3, 2),
    "its own as well": lambda x: F.max_pool2d(F.pad(F.relu(x), (1, 1)), (3, 4), 2, padding=(0, 1)),
    "one dimension": lambda x: F.max_pool1d(F.pad(x.flatten(2), (0, 1), value=-math.inf), 3, 2),
}
MEANS = {
    "both sides": lambda x: F.avg_pool2d(nn.ZeroPad2d(1)(x), 3, 2),
    "same": lambda x: F.avg_pool2d(tf_same(x, 3, 2), 3, 2),
    "same 5×5": lambda x: F.avg_pool2d(tf_same(x, 5, 2), 5, 2),
    "count_include_pad": lambda x: F.avg_pool2d(nn.ZeroPad2d(1)(x), 3, count_include_pad=False),
    "divisor": lambda x: F.avg_pool2d(tf_same(x, 3, 2), 3, 2, divisor_override=5),
    "its own as well": lambda x: F.avg_pool2d(nn.ZeroPad2d(1)(x), 5, 2, padding=1),
}


@pytest.mark.parametrize("shape", [(2, 3, 8, 10), (1, 2, 7, 9), (1, 2, 9, 8)])
@pytest.mark.parametrize("name", [*(("max", n) for n in MAXIMA), *(("mean", n) for n in MEANS)])
def test_pools(name, shape):
    written = {"max": MAXIMA, "mean": MEANS}[name[0]][name[1]]
    made = planned(Written(written), torch.randn(shape))
    assert "pad" not in ops(made)
    if len(shape) == 4:
        on_cpu(Written(written), torch.randn(shape))


# ---- where numbers would differ, or nothing would be saved

OTHERWISE = {
    "another number": lambda x, c: c(F.pad(x, (1, 1, 1, 1), value=0.5)),
    "reflected": lambda x, c: c(F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "repeated": lambda x, c: c(F.pad(x, (1, 1, 1, 1), mode="replicate")),
    "cropped": lambda x, c: c(F.pad(x, (1, 1, -1, -1))),
    "channels": lambda x, c: c(F.pad(x[:, 1:], (0, 0, 0, 0, 0, 1))),
    "read by others": lambda x, c: F.relu(c(y := F.pad(x, (1, 1, 1, 1)))) + y[:, :, 1:-1, 1:-1],
    "transposed": lambda x, c: F.conv_transpose2d(F.pad(x, (1, 1, 1, 1)), c.weight),
    "zeros among negatives": lambda x, c: F.max_pool2d(nn.ZeroPad2d(1)(x), 3, 2),
    "clamped above": lambda x, c: F.max_pool2d(nn.ZeroPad2d(1)(x.clamp(max=1.0)), 3, 2),
    "more than half": lambda x, c: F.max_pool2d(F.pad(x, (2, 2, 2, 2), value=-math.inf), 3, 2),
    "largest with places": lambda x, c: F.max_pool2d(
        F.pad(F.relu(x), (1, 1, 1, 1)), 3, return_indices=True
    )[1].to(x.dtype),
    "its own not counted": lambda x, c: F.avg_pool2d(
        nn.ZeroPad2d(1)(x), 5, 2, padding=1, count_include_pad=False
    ),
    "hanging over": lambda x, c: F.avg_pool2d(nn.ZeroPad2d(1)(x), 3, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_pads_that_stay(name):
    x = torch.randn(2, 4, 8, 9) - 1.0
    made = planned(Written(OTHERWISE[name], c=nn.Conv2d(4, 4, 3)), x)
    assert ops(made).count("pad") == 1


def test_a_pad_that_is_a_result_stays():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = F.pad(x, (1, 1, 1, 1))
            return self.c(y), y

    assert "pad" in chosen(Both(), torch.rand(1, 3, 6, 6), CPU)


def test_several_windows_share_an_edge():
    def both(x, a, b):
        y = F.pad(x, (1, 1, 1, 1))
        return a(y) * b(y)

    net = Written(both, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3, bias=False))
    assert "pad" not in ops(planned(net, torch.rand(1, 3, 6, 7)))


# ---- gradients


@pytest.mark.parametrize("how", ["even", "uneven", "as one"])
def test_gradients(how):
    """Written with a pad, or with an uneven edge from the start."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 7, 8).double(), torch.randn(4, 3, 3, 3).double()
    low, high = ((1, 1), (1, 1)) if how == "even" else ((0, 1), (1, 0))
    g = dt.Graph("train")
    image, weight = g.tensor("x", x.shape, dtype="f64"), g.tensor("w", w.shape, dtype="f64")
    if how == "as one":
        y = g.conv(image, weight, stride=2, padding=(*low, *high))
    else:
        padded = g.pad(image, low=(0, 0, *low), high=(0, 0, *high))
        y = g.conv(padded, weight, stride=2)
    g.sum(g.square(y)).output("loss")
    graph = g.grad("loss", wrt=["x", "w"]).ir()
    made = decide(graph, dt.target("h200"), Policy()).graph
    if how == "even":
        assert not {"pad", "slice"} & set(ops(made))
    got = evaluate(made, {"x": x, "w": w}, float64=True)
    x.requires_grad_(), w.requires_grad_()
    ends = (low[1], high[1], low[0], high[0])
    F.conv2d(F.pad(x, ends), w, stride=2).square().sum().backward()
    assert error(got["grad_x"], x.grad) <= DOUBLE_GRADIENT
    assert error(got["grad_w"], w.grad) <= DOUBLE_GRADIENT
