"""Batch norm with relu keeps the signs of its result for the gradient: how they are packed, who
asks for them, who refuses, and the kernels compiled without a GPU."""

from __future__ import annotations

import math
import re
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.ir import TensorType
from deuteron.ir.region import Region
from deuteron.kernels.triton.batch_norm_tiles import divide
from deuteron.ops.evaluate import evaluate
from deuteron.ops.signs import pack, packing, signs_type, unpack
from deuteron.plan.tensors import errors_of
from tests.optimised import optimised
from tests.ptx import spilled
from tests.test_batch_norm_kernels import (
    BIG,
    BRAIN,
    F32,
    H200,
    HALF,
    block,
    compiled,
    feed_of,
    refusal,
)
from tests.tolerances import allowed, error


def kept(graph: dt.Graph, target=H200) -> tuple[str, ...]:
    """How the batch norms of a graph and their gradients keep signs, after the passes."""
    done, _ = optimised(graph.ir(), target)
    return tuple(n.attrs["packed"] for n in done.nodes if n.op.startswith("batch_norm_act"))


def test_signs_are_kept_for_the_gradient_on_a_gpu_where_they_save_bytes():
    assert kept(block()) == ("channels", "channels")
    assert kept(block(layout="contiguous")) == ("positions", "positions")
    assert kept(block((4096, 64, 9))) == ("positions", "positions")
    assert kept(block((65536, 64), layout="contiguous")) == ("channels", "channels")
    nothing = ("none", "none")
    assert kept(block(), dt.target("cpu")) == nothing
    assert kept(block(residual=False)) == nothing  # x tells them
    assert kept(block(activation="relu6")) == kept(block(activation="silu")) == nothing
    assert kept(block((64, 4, 99, 99))) == nothing  # a byte for four channels
    assert set(kept(block((16, 64, 28, 28)))) == {"none"}  # y is read in no time
    assert set(kept(block(dtype=dt.float64))) <= {"none"}  # or it is written out


def test_signs_take_the_place_of_y_and_change_no_other_output():
    graph = block((16, 64, 56, 40))
    done, records = optimised(graph.ir(), H200)
    forward, backward = done.nodes
    assert backward.inputs[6] is None and backward.inputs[8] == forward.outputs[5]
    assert [n for n, _ in done.outputs] == [n for n, _ in graph.ir().outputs]
    assert next(r.fired for r in records if r.name == "keep signs")
    feed = feed_of(graph)
    want, got = evaluate(graph.ir(), feed), evaluate(done, feed)
    assert all(torch.equal(got[name], t) for name, t in want.items())


def test_a_forward_step_alone_keeps_nothing():
    g = dt.Graph()
    x, r = (g.tensor(n, BIG, dt.float16, layout="nhwc") for n in "xr")
    g.batch_norm_act(x, residual=r, activation="relu")[0].output("y")
    assert kept(g) == ("none",)


@pytest.mark.parametrize("packed", ["channels", "positions"])
@pytest.mark.parametrize(
    "shape", [(2, 9, 3, 5), (3, 8), (2, 16, 8), (1, 1, 1), (0, 8, 3), (2, 5, 0)]
)
def test_signs_come_back_as_they_were(shape, packed):
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()
    if y.numel() > 2:
        y.view(-1)[1] = torch.nan
    signs = pack(y, packed)
    assert TensorType.from_tensor(signs) == signs_type(shape, packed)
    assert torch.equal(unpack(signs, shape, packed), ~(y <= 0))
    if packed == "channels" and shape == (3, 8):
        assert signs.flatten().tolist() == [
            sum((v > 0 or v != v) << k for k, v in enumerate(row)) for row in y.tolist()
        ]


def test_the_function_saves_signs_instead_of_y():
    """As it would on a GPU; the references stand in for the kernels."""
    from deuteron.functional.backward import Backward
    from deuteron.functional.batch_norm import TRAIN

    x = TensorType.of((16, 64, 56, 40), "f16").with_layout("nhwc")
    c = TensorType.of((64,), "f32")
    attrs = {"momentum": 0.1, "eps": 1e-5, "activation": "relu"}
    saved = {}
    for keep in (True, False):
        types, needs = (x, c, c, None, None, x), (True, True, True, False, False, True)
        pull = Backward(TRAIN, types, {**attrs, "keep_signs": keep}, needs)
        (node,) = (n for n in pull.usual_graph().nodes if n.op == "batch_norm_act_grad")
        y, _, signs = (*node.inputs, None, None)[6:9]
        assert (y is None, signs is None) == (keep, not keep)
        saved[keep] = pull._price(pull.kept)[1]
        assert [n.op for n in pull.usual_graph().nodes] == ["batch_norm_act_grad"]  # nothing again
    assert saved[False] - saved[True] == x.nbytes


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_function_with_signs_has_torchs_gradients(order, monkeypatch):
    """By the references, first and second gradients, and under torch.compile."""
    function = dt.functional.batch_norm
    module = import_module("deuteron.functional.batch_norm")
    monkeypatch.setattr(module, "_wants_signs", lambda *given, **named: True)
    monkeypatch.setattr("deuteron.ops.signs.WORTH", 0)
    gen = torch.Generator().manual_seed(0)
    x, r, grad = (
        torch.randn(3, 9, 5, 7, generator=gen, dtype=F32).to(memory_format=order) for _ in range(3)
    )
    w, b = torch.randn(9, generator=gen), torch.randn(9, generator=gen)
    leaves = [t.requires_grad_() for t in (x, w, b, r)]

    def ours(x, w, b, r):
        return function(x, None, None, w, b, True, residual=r, activation="relu")

    def torchs(x, w, b, r):
        return F.relu(F.batch_norm(x, None, None, w, b, True) + r)

    def found(f):
        y = f(*leaves)
        first = torch.autograd.grad(y, leaves, grad, create_graph=True)
        return y, *first, *torch.autograd.grad(first[0].square().sum(), leaves[:2])

    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(torchs(*wide), wide, grad.double())
    with dt.functional.delegation(False):
        got, want = found(ours), found(torchs)
        alive = ours(*leaves)
        kept = alive.grad_fn.saved_tensors
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")(*leaves)
        again = torch.autograd.grad(compiled, leaves, grad)
        ones = torch.autograd.grad(ours(*leaves), leaves, grad)
    assert [t.dtype for t in kept].count(torch.uint8) == 1
    for a, other in zip(got, want, strict=True):
        assert error(a, other) <= allowed(0.0, F32, 3 * 5 * 7)
    for a, c, truth, other in zip(ones, again, exact, want[1:5], strict=True):
        limit = allowed(error(other, truth), F32, 3 * 5 * 7)
        assert error(a, truth) <= limit and error(c, truth) <= limit


def test_nothing_is_packed_of_a_vector():
    assert packing(TensorType.of((1 << 22,), "f32")) == "none"


def test_measuring_holds_signs_to_the_result_they_are_of():
    g = dt.Graph()
    x, r = (g.tensor(n, (4, 16, 3, 3)) for n in "xr")
    results = g.batch_norm_act(x, residual=r, activation="relu", packed="positions")
    results[0].output("y"), results[5].output("signs")
    region = Region(g.ir())
    y = torch.randn(4, 16, 3, 3).relu()
    other = torch.where(y > 0, 0.0, 1e-9)
    signs = [pack(t, "positions") for t in (y, other)]
    assert errors_of(region, [y, signs[0]], [other, signs[1]])[1] == 0.0
    assert errors_of(region, [y, signs[1]], [y, signs[1]])[1] == math.inf


def test_kernels_refuse_bits_that_lie_across_a_tile():
    act, nhwc = {"activation": "relu"}, TensorType.of((2, 16, 3, 3), "f32", "nhwc")
    forward = refusal("batch_norm_act", H200, nhwc, packed="channels", **act)
    assert forward is None
    forward = refusal("batch_norm_act", H200, nhwc, packed="positions", **act)
    assert "side by side" in forward.reason and 'packed="channels"' in forward.remedy
    first = nhwc.with_layout("contiguous")
    forward = refusal("batch_norm_act", H200, first, packed="channels", **act)
    assert 'packed="positions"' in forward.remedy
    few = TensorType.of((2, 4, 3, 3), "f32", "nhwc")
    forward = refusal("batch_norm_act", H200, few, packed="channels", **act)
    assert "fewer than 8" in forward.reason and "leave" in forward.remedy


@pytest.mark.parametrize(
    ("last", "dtype", "width", "stages"),
    [
        pytest.param(True, HALF, 64, 5, marks=pytest.mark.sweep),
        (True, HALF, 256, 5),
        pytest.param(False, BRAIN, 256, 5, marks=pytest.mark.sweep),
        pytest.param(True, F32, 64, 0, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
def test_signs_cost_no_spills_and_travel_together(last, dtype, width, stages, arch, monkeypatch):
    """A thread packs what it holds; where a tile has 4 bytes for each, they are fetched ahead."""
    pytest.importorskip("triton")
    d = divide(BIG, last, H200.units, tile=8192 // dtype.itemsize, width=width)
    kernels = compiled(d, dtype, True, "relu", arch, monkeypatch, signs=True, again=False)
    for name, kernel in kernels.items():
        assert spilled(kernel, arch) == 0, name
        ptx = kernel.asm["ptx"]
        if "merge" not in name:
            assert re.search(r"cp\.async\.cg.* 0x10|ld\.global[.\w:]*v4\.b32", ptx), name
    ahead = re.findall(r"cp\.async\.ca.* 0x4,", kernels["backward_sums"].asm["ptx"])
    assert len(ahead) == stages
