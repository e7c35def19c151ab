"""A convolution, batch norm and what follows, as a function and as a module: numbers and gradients
of torch's modules in every mode, and what a plan for a GPU makes of the pair."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.errors import BindError
from deuteron.ir import Region
from deuteron.passes import fuse
from deuteron.plan.choose import Survey, choose, heuristic
from deuteron.policy import Policy
from deuteron.target import target
from tests.launched import assert_none_spill, compiled, last
from tests.tolerances import allowed, error

H200, A100 = target("h200"), target("a100")


def pair(dims: int = 2, transposed: bool = False, **norm: Any) -> nn.Sequential:
    """A convolution and a batch norm of torch's, with statistics that are not those of a start."""
    torch.manual_seed(3)
    turned = "Transpose" if transposed else ""
    conv = getattr(nn, f"Conv{turned}{dims}d")(6, 10, 3, stride=2, padding=1, groups=2)
    bn = getattr(nn, f"BatchNorm{dims}d")(10, **norm)
    for p in bn.parameters():
        nn.init.normal_(p)
    if bn.running_var is not None:
        nn.init.normal_(bn.running_mean)
        nn.init.uniform_(bn.running_var, 0.5, 2.0)
    return nn.Sequential(OrderedDict(conv=conv, bn=bn))


def steps(model: nn.Module, call: Any, like: torch.dtype) -> list[torch.Tensor]:
    """Results and gradients of two steps, and the state after them."""
    torch.manual_seed(5)
    found: list[torch.Tensor] = []
    space = (7,) * (model.conv.weight.dim() - 2)
    for _ in range(2):
        x = torch.randn(3, 6, *space).to(like).requires_grad_()
        with torch.no_grad():
            r = torch.randn_like(model.conv(x))
        r.requires_grad_()
        y = call(model, x, r)
        y.backward(torch.linspace(-1, 2, y.numel()).to(like).view(y.shape))
        found += [y.detach(), x.grad, r.grad]
    found += [p.grad for p in model.parameters()]
    return [*found, *(b for b in model.buffers() if b.is_floating_point())]


@pytest.mark.parametrize(
    ("dims", "transposed", "mode", "norm"),
    [
        (2, False, "training", {}),
        (1, False, "training", {"momentum": None}),
        (2, True, "frozen", {"momentum": 0.3}),
        (2, False, "training", {"track_running_stats": False, "affine": False}),
        pytest.param(3, False, "training", {}, marks=pytest.mark.sweep),
        pytest.param(3, True, "training", {}, marks=pytest.mark.sweep),
        pytest.param(2, False, "frozen", {"eps": 0.1}, marks=pytest.mark.sweep),
    ],
)
def test_gradients_and_statistics_are_those_of_two_modules(dims, transposed, mode, norm):
    theirs = pair(dims, transposed, **norm)
    theirs.bn.train(mode == "training")
    block = dt.nn.ConvBNAct.from_modules(*copy.deepcopy(theirs), nn.SiLU())
    exact = copy.deepcopy(theirs).double()
    plain = lambda m, x, r: torch.nn.functional.silu(m(x) + r)  # noqa: E731
    ours = steps(block, lambda m, x, r: m(x, residual=r), torch.float32)
    torchs, want = steps(theirs, plain, torch.float32), steps(exact, plain, torch.float64)
    assert len(ours) == len(torchs) == len(want)
    if mode == "training":  # a bias before the norm has a gradient of 0, but for rounding: it is
        for found in (ours, torchs, want):  # held to the size of its weight's
            found[6:8] = [torch.cat([g.flatten() for g in found[6:8]])]
    for got, usual, truth in zip(ours, torchs, want, strict=True):
        assert error(got, truth) <= allowed(error(usual, truth), got.dtype, 64)


@pytest.mark.parametrize(("dims", "transposed"), [(2, False), (2, True), (1, False)])
def test_in_evaluation_the_norm_is_folded(dims, transposed):
    theirs = pair(dims, transposed).eval()
    block = dt.nn.ConvBNAct.from_modules(*theirs, "relu")
    assert block.training is False and block.conv is theirs.conv
    x = torch.randn(3, 6, *((3000,) if dims == 1 else (55, 54)))
    with torch.no_grad():
        want = torch.relu(copy.deepcopy(theirs).double()(x.double()))
        assert error(block(x), want) <= allowed(error(torch.relu(theirs(x)), want), x.dtype, 64)
        assert "batch_norm" not in str(dt.functional.explain(block, x))
        swapped = dt.nn.replace(nn.Sequential(*copy.deepcopy(theirs), nn.ReLU())).eval()
        assert torch.equal(swapped(x), block(x))
        with torch.autocast("cpu", torch.bfloat16):
            usual = torch.relu(theirs(x))
            found = block(x)
            assert error(found, want) <= allowed(error(usual, want), usual.dtype, 64)
            assert found.dtype == usual.dtype == torch.bfloat16
    assert block(x).requires_grad  # frozen, not folded: gradients reach all parameters


def test_a_new_block_has_the_state_of_its_children():
    block = dt.nn.ConvBNAct(6, 10, 3, padding=1, activation=None, momentum=None)
    plain = nn.Sequential(OrderedDict(conv=nn.Conv2d(6, 10, 3, bias=False), bn=nn.BatchNorm2d(10)))
    assert [*block.state_dict()] == [*plain.state_dict()]
    plain.load_state_dict(block.state_dict())
    block.load_state_dict(plain.state_dict())
    wide = dt.nn.SeparableConv(6, 10, 3, padding=1, activation="relu6", dims=1)
    assert wide(torch.randn(2, 6, 9)).shape == (2, 10, 9)
    turned = dt.nn.ConvBNAct(6, 10, 2, stride=2, transposed=True)
    assert turned(torch.randn(2, 6, 5, 4)).shape == (2, 10, 10, 8)


def test_a_synchronised_norm_stays_what_it_is():
    theirs = pair()
    sync = dt.nn.SyncBatchNorm.convert(copy.deepcopy(theirs.bn))
    block = dt.nn.ConvBNAct.from_modules(copy.deepcopy(theirs.conv), sync, "relu")
    assert block.bn is sync
    x = torch.randn(3, 6, 7, 7)
    torch.testing.assert_close(block(x, x[:, :1, :4, :4]), torch.relu(theirs(x) + x[:, :1, :4, :4]))
    torch.testing.assert_close(sync.running_var, theirs.bn.running_var)


def test_values_far_from_zero_and_all_the_same():
    """One image, one channel; a mean a thousand deviations away; nothing that varies."""
    far = torch.randn(1, 1, 30, 30) + 1000.0
    for x in (far, torch.full((2, 1, 5, 5), 0.3)):
        own = torch.ones(1, 1, 1, 1), torch.zeros(1), torch.ones(1)
        y = dt.functional.conv_bn_act(x, *own, training=True, momentum=1.0)
        wide = x.double()
        truth = (wide - wide.mean()) / (wide.var(correction=0) + 1e-5).sqrt()
        usual = torch.nn.functional.batch_norm(x, None, None, training=True)
        assert error(y, truth) <= allowed(error(usual, truth), x.dtype, x.numel())
        assert error(own[1], wide.mean((0, 2, 3))) <= allowed(0.0, x.dtype)


def test_what_is_wrong_is_said():
    conv, bn = pair()
    with pytest.raises(BindError, match="no convolution and its norm"):
        dt.nn.ConvBNAct.from_modules(bn, conv)
    with pytest.raises(BindError, match="conv makes 10 channels, bn takes 4"):
        dt.nn.ConvBNAct.from_modules(conv, nn.BatchNorm2d(4))
    with pytest.raises(BindError, match="no activation 'rulu'"):
        dt.nn.ConvBNAct(4, 4, 1, activation="rulu")
    with pytest.raises(BindError, match="Softmax has no name"):
        dt.nn.ConvBNAct.from_modules(conv, bn, nn.Softmax(1))
    with pytest.raises(BindError, match="running_mean and running_var are needed"):
        dt.functional.conv_bn_act(torch.ones(1, 6, 5, 5), conv.weight, None, None, groups=2)
    with pytest.raises(BindError, match="x has 3 dimensions and the weight 4"):
        dt.functional.conv_bn_act(torch.ones(6, 5, 5), conv.weight, None, None, training=True)


@pytest.mark.sweep
def test_torch_compile_and_operator_checks():
    block = dt.nn.ConvBNAct.from_modules(*pair(), "relu")
    x, shown = torch.randn(2, 6, 7, 7), copy.deepcopy(block)
    fast = torch.compile(shown, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x), block(x))
    fast(x).sum().backward()
    block.eval()
    conv, bn = block.conv.weight.detach(), block.bn
    stats = (bn.running_mean, bn.running_var, bn.weight.detach(), bn.bias.detach(), None)
    how = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 2}
    how |= {"transposed": False, "output_padding": [0, 0], "eps": 1e-5, "activation": "relu"}
    torch.library.opcheck(torch.ops.deuteron.conv_bn_act.default, (x, conv, None, *stats), how)


# ---- in a plan for a GPU


RELU = {"activation": "relu"}


def trained(
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: str = "f16",
    kept: bool = True,
    plain: bool = False,
    **how: Any,
) -> Region:
    """conv + batch_norm_act as fusion makes it one region; the result of conv leaves it. ``plain``:
    batch_norm_train instead, which no activation follows."""
    g = dt.Graph()
    z = g.conv(last(g, "x", x, dtype), last(g, "w", w, dtype), **how)
    params = [g.tensor(name, w[:1], "f32") for name in ("gamma", "beta", "mean", "var")]
    name, activated = ("batch_norm_train", {}) if plain else ("batch_norm_act", RELU)
    y, *statistics = getattr(g, name)(z, *params, **activated)
    for i, value in enumerate((y, *statistics, *((z,) if kept else ()))):
        value.output(f"y{i}")
    regions, vetoes = fuse(g.ir(), gates=True)
    assert [r.ops for r in regions] == [("conv", name)] and not vetoes
    return regions[0]


WINDOWS = {
    "3×3": lambda: trained((64, 64, 56, 56), (64, 64, 3, 3), padding=1),
    "one pixel": lambda: trained((64, 64, 56, 56), (256, 64, 1, 1)),
    "two apart": lambda: trained((64, 64, 56, 56), (128, 64, 3, 3), padding=1, stride=2),
}


def test_who_convolves():
    def by(region: Region, machine: Any) -> set[str]:
        offered = TritonKernels().candidates(region, machine, Policy())
        assert all(c.knobs["recipe"] == "conv_batch_norm" for c in offered)
        return {c.knobs["by"] for c in offered}

    regions = {name: make() for name, make in WINDOWS.items()}
    assert {name: by(r, H200) for name, r in regions.items()} == {
        "3×3": {"conv_hopper"},
        "one pixel": {"product"},
        "two apart": {"conv_hopper"},
    }
    assert all(by(r, A100) == {"conv"} for r in regions.values())


@pytest.mark.parametrize("plain", [False, True])
def test_by_estimate_the_pair_is_cut(plain):
    survey, region = Survey(H200, Policy()), trained((64, 64, 56, 56), (64, 64, 1, 1), plain=plain)
    chosen = choose(region, heuristic(survey), survey)
    assert [c.region.ops for c in chosen] == [region.ops[:1], region.ops[1:]]
    assert chosen[1].candidate.knobs["recipe"] == "batch_norm"


def test_a_norm_of_its_own_residual_is_refused():
    g = dt.Graph()
    x = g.tensor("x", (2, 64, 8, 8), "f16", strides=(4096, 1, 512, 64))
    w = g.tensor("w", (64, 64, 1, 1), "f16", strides=(64, 1, 64, 64))
    z = g.conv(x, w)
    g.batch_norm_act(z, None, None, None, None, z)[0].output("y")
    (region,), _ = fuse(g.ir(), gates=True)
    refusal = TritonKernels().refuse(region, H200, Policy())
    assert refusal is not None and "reads the convolution" in refusal.reason


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("3×3", 90),
        *(pytest.param(n, a, marks=pytest.mark.sweep) for n, a in (
            ("one pixel", 90), ("two apart", 90), ("two apart", 80))),
    ],
)  # fmt: skip
def test_compiles_without_spills(name, arch, monkeypatch):
    pytest.importorskip("triton")
    kernels = compiled(WINDOWS[name](), arch, monkeypatch, most=1)
    assert len(kernels) == 3  # a convolution with statistics, a merge, a pass
    assert_none_spill(kernels, arch)
    if (name, arch) == ("3×3", 90):
        ptx = kernels[0].asm["ptx"]
        assert "cp.async.bulk.tensor.4d" in ptx and "wgmma.mma_async" in ptx and "setmaxnreg" in ptx


def pulled(x: tuple[int, ...], outs: int, residual: bool) -> Region:
    """The gradient of a norm, and both of the convolution of single pixels that it is of."""
    g = dt.Graph()
    shape = (x[0], outs, *x[2:])
    given, w = last(g, "x", x, "bf16"), last(g, "w", (outs, x[1], 1, 1), "bf16")
    own = [g.tensor(name, (outs,), "f32") for name in ("mean", "rstd", "gamma", "beta")]
    signs = g.tensor("signs", (x[0], *x[2:], outs // 8), "u8") if residual else None
    how = {"activation": "relu", "packed": "channels" if residual else "none"}
    norm = (last(g, "dy", shape, "bf16"), last(g, "z", shape, "bf16"), *own, None, None, signs)
    back, dweight, dbias, dz = g.batch_norm_act_grad(*norm, **how)
    dx, dw = g.conv_dx(back, w, shape=x), g.conv_dw(back, given, shape=(outs, x[1], 1, 1))
    left = (dx, g.cast(dw, "f32"), dweight, dbias, *((dz,) if residual else ()))
    for i, value in enumerate(left):
        value.output(f"y{i}")
    return Region(g.ir(), frozenset(), 0)


@pytest.mark.parametrize(
    ("channels", "outs", "arch"),
    [
        (16, 64, 90),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (
            (64, 256, 90), (256, 64, 90), (256, 128, 90), (24, 72, 90), (64, 64, 80))),
    ],
)  # fmt: skip
def test_a_gradient_that_is_multiplied_where_it_is_made(channels, outs, arch, monkeypatch):
    pytest.importorskip("triton")
    region = pulled((64, channels, 56, 56), outs, residual=outs > 64)
    offered = TritonKernels().candidates(region, H200 if arch == 90 else A100, Policy())
    assert {c.knobs["recipe"] for c in offered} == {"conv_batch_norm_grad"}
    assert not any(c.by_estimate for c in offered)
    kernels = compiled(region, arch, monkeypatch, most=1)
    assert len(kernels) == 4  # sums, a merge, all that is multiplied, and the parts added up
    assert_none_spill(kernels, arch, most=24)  # outside of loops
    assert kernels[2].metadata.shared <= (H200 if arch == 90 else A100).shared_bytes


def test_whose_gradient_is_not_multiplied_there():
    def why(region: Region) -> str:
        refusal = TritonKernels().refuse(region, H200, Policy())
        return "" if refusal is None else refusal.reason

    assert not why(pulled((2, 64, 8, 8), 64, False))
    assert not why(pulled((2, 256, 8, 8), 128, False))
    assert "4 programs would make" in why(pulled((2, 512, 8, 8), 128, False))
    assert "tiles of 512 channels" in why(pulled((2, 64, 8, 8), 512, False))
