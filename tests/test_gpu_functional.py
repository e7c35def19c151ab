"""``dt.functional`` on a real GPU: every call, small ones by torch's functions and by plans, second
derivatives, views whose signs are still to be turned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.functional import delegate
from deuteron.functional.context import is_captured
from deuteron.functional.norm import LAYER
from tests import autocast_cases
from tests.functional_cases import CALLS, Call, results
from tests.tolerances import SINGLE, SINGLE_LAYERS, allowed, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
f = dt.functional
HERE = (
    "softmax masked",
    "embedding",
    "embedding by frequency",
    "embedding with positions",
    "batch_norm eval",
    "rope",
    "rope of q",
    "cross_entropy",
    "linear_cross_entropy",
)
ELSEWHERE = [c for name, c in CALLS.items() if name not in HERE]  # with tensors of their own


def on_gpu(call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.cuda().requires_grad_() for t in call.tensors(dtype)]


@pytest.mark.parametrize("delegated", [False, True])
@pytest.mark.parametrize("call", ELSEWHERE, ids=lambda call: call.name)
def test_results_and_gradients(call, delegated):
    x, y = on_gpu(call, torch.float32), on_gpu(call, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in x]
    with f.delegation(delegated):
        ours = call.ours(f, *x)
    theirs, exact = call.theirs(*y), call.theirs(*wide)
    found = (results(ours), results(theirs), results(exact))
    for a, b, e in zip(*found, strict=True):
        assert a.dtype == torch.float32
        assert error(a, e) <= allowed(error(b, e), torch.float32, 16)
    weights = [torch.randn_like(e) for e in results(exact)]
    grads = [
        torch.autograd.grad(outs, given, [w.to(o) for w, o in zip(weights, outs, strict=True)])
        for outs, given in zip(found, (x, y, wide), strict=True)
    ]
    for a, b, e in zip(*grads, strict=True):
        assert error(a, e) <= allowed(error(b, e), torch.float32, 64)


@pytest.mark.parametrize("call", ELSEWHERE, ids=lambda call: call.name)
def test_results_without_gradients(call):
    """Some small calls go another way where none follows."""
    x = [t.detach() for t in on_gpu(call, torch.float32)]
    exact = results(call.theirs(*[t.double() for t in x]))
    with f.delegation(True):
        found = results(call.ours(f, *x)), results(call.theirs(*x))
    with torch.no_grad(), f.delegation(True):
        again = results(call.ours(f, *x))
    for a, b, c, e in zip(*found, again, exact, strict=True):
        assert max(error(a, e), error(c, e)) <= allowed(error(b, e), torch.float32, 16)


@pytest.mark.parametrize("name", ["gelu", "layer_norm with all", "softmax", "swiglu", "max_pool2d"])
def test_second_derivatives(name):
    call = CALLS[name]
    assert torch.autograd.gradgradcheck(
        lambda *t: call.ours(f, *t), on_gpu(call, torch.float64), fast_mode=True
    )


def test_views_whose_signs_are_still_to_be_turned():
    z = torch.randn(64, 32, dtype=torch.complex64, device="cuda").conj().imag
    assert z.is_neg()
    target = torch.arange(64, device="cuda") % 32
    assert error(f.cross_entropy(z, target), F.cross_entropy(z, target)) <= SINGLE
    assert error(f.swiglu(z, z), F.silu(z) * z) <= SINGLE
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    up = torch.ones(1, dtype=torch.complex64, device="cuda").mul(1j).conj().imag[0]
    assert up.is_neg()
    (got,) = torch.autograd.grad(f.cross_entropy(x, target), x, up)
    (want,) = torch.autograd.grad(F.cross_entropy(x, target), x, up)
    assert error(got, want) <= SINGLE
    image = z.reshape(2, 4, 16, 16)[:, :3].abs().neg().mul(1j).conj().imag
    aug = dt.augment.Pipeline([dt.augment.RandomAffine(10)])
    table = aug.table(image, step=0)
    assert error(aug.with_table(image, table), aug.with_table(image.clone(), table)) <= SINGLE


@pytest.mark.parametrize("delegated", [False, True])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_running_statistics_of_instance_norm(order, delegated):
    x = (torch.randn(4, 6, 33, 17) * 2.0 + 3.0).to(memory_format=order)
    exact = torch.nn.InstanceNorm2d(6, affine=True, track_running_stats=True).double()
    theirs, ours = (
        c(6, affine=True, track_running_stats=True).cuda()
        for c in (torch.nn.InstanceNorm2d, dt.nn.InstanceNorm2d)
    )
    found = []
    for module, given in ((ours, x.cuda()), (theirs, x.cuda()), (exact, x.double())):
        given = given.detach().requires_grad_()
        with f.delegation(delegated):
            y = module(given)
            grads = torch.autograd.grad(y.sin().sum(), (given, *module.parameters()))
            again = module.eval()(given)
        found.append((y, again, *grads, module.running_mean, module.running_var))
    for a, b, e in zip(*found, strict=True):
        assert error(a, e) <= allowed(error(b, e), torch.float32, 64)


@pytest.mark.parametrize("count", [50, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_with_gradients_by_frequency(count, dtype):
    """The same bits in every run, however many rows are added."""
    index = torch.randint(0, 40, (count,), device="cuda")
    weight, seed = (torch.randn(n, 24, device="cuda").to(dtype) for n in (40, count))
    given = {"padding_idx": 3, "scale_grad_by_freq": True}
    found = []
    for call, t in (
        (f.embedding, weight),
        (f.embedding, weight),
        (F.embedding, weight),
        (F.embedding, weight.double()),
    ):
        t = t.detach().requires_grad_()
        found += torch.autograd.grad(call(index, t, **given), t, seed.to(t.dtype))
    ours, again, theirs, exact = found
    assert torch.equal(ours, again)
    assert error(ours, exact) <= allowed(error(theirs, exact), dtype, 16)


def test_what_else_embeddings_do():
    index = torch.tensor([1, 1, 4], device="cuda")
    weight = torch.randn(9, 16, device="cuda") * 3.0
    other = weight.clone()
    with f.delegation(True):
        assert (
            error(f.embedding(index, weight, max_norm=1.0), F.embedding(index, other, max_norm=1.0))
            <= SINGLE
        )
        y = f.embedding(index, weight.requires_grad_(), sparse=True)
    assert error(weight, other) <= SINGLE
    assert torch.autograd.grad(y.sum(), weight)[0].is_sparse


def test_a_captured_call_of_several_is_one_kernel():
    x, r = (torch.randn(8, 64, device="cuda", requires_grad=True) for _ in range(2))
    with f.delegation(True):
        assert "torch's own function" in f.explain(f.swiglu, x, r)
        f.swiglu(x.detach(), r.detach())
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = f.swiglu(x, r)
    graph.replay()
    assert error(y, F.silu(x) * r) <= SINGLE


@pytest.mark.parametrize("seed", [0, 1, 2**16 - 1, 2**16, -1, 2**62])
def test_a_seed_is_the_same_as_a_number_and_as_a_tensor(seed):
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # which has a table of its own
        got = f.dropout(x, 0.5, seed=seed)
        want = f.dropout(x, 0.5, seed=torch.tensor(seed, device="cuda"))
        assert torch.equal(got, want) and 0 < int((got == 0).sum()) < x.numel()
    with torch.inference_mode():
        assert torch.equal(f.dropout(x, 0.5, seed=seed), want)
    (slope,) = torch.autograd.grad(f.dropout(x, 0.5, seed=seed).sum(), x)
    assert torch.equal(slope != 0, want != 0)


def test_what_is_captured():
    x = torch.zeros(4, device="cuda")
    assert not is_captured(x) and not is_captured(x.cpu())
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not is_captured(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert is_captured(x)


def test_a_gradient_moves_the_limit():
    with f.delegation(True):
        edge = delegate.LIMITS[0] // 4
        far = f.gelu.ours_from(dt.target("cuda:0")) // 4
        for size, needs, torchs in (
            (edge, False, True),
            (edge + 1, False, False),
            (far, True, True),
            (far + 1, True, False),
        ):
            x = torch.zeros(size, device="cuda", requires_grad=needs)
            assert ("torch's own function" in f.explain(f.gelu, x)) == torchs
            with torch.no_grad():
                assert ("torch's own function" in f.explain(f.gelu, x)) == (size == edge)


def test_launches_are_one_native_call_wherever_tensors_lie():
    """A norm and its gradient, which is two launches, three times: checked, on the tape, and with
    an address that is no multiple of 16, where each kernel launches by itself."""
    room = torch.randn(1 + 512 * 96, device="cuda")
    w = torch.randn(96, device="cuda", requires_grad=True)
    grad = torch.randn(512, 96, device="cuda")
    for start in (0, 0, 1):
        x = room[start : start + 512 * 96].view(512, 96).detach().requires_grad_()
        with f.delegation(False):
            y = f.layer_norm(x, 96, w, w)
        found = y, *torch.autograd.grad(y, (x, w), grad)
        wide = [t.detach().double().requires_grad_() for t in (x, w)]
        y = F.layer_norm(wide[0], (96,), wide[1], wide[1])
        exact = y, *torch.autograd.grad(y, wide, grad.double())
        assert all(error(a, b) <= SINGLE_LAYERS for a, b in zip(found, exact, strict=True))
    plans = [p.ready.plan for p in LAYER.planned.values() if p.ready is not None]
    plans += [
        b.ready.plan
        for p in LAYER.planned.values()
        for back in p.backwards.values()
        for b in back.plans.values()
    ]
    assert any("n0(p0(" in plan.program.source for plan in plans)


@pytest.mark.parametrize("call", ELSEWHERE, ids=lambda call: call.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_autocast_changes_no_types(call, dtype):
    tensors = [t.cuda() for t in call.tensors(dtype)]
    with torch.autocast("cuda", torch.float16):
        with f.delegation(False):
            want = results(call.ours(f, *tensors))
        with f.delegation(True):
            got = results(call.ours(f, *tensors))
    assert [t.dtype for t in got] == [t.dtype for t in want]


@pytest.mark.parametrize("name", autocast_cases.CASES)
def test_types_under_autocast_are_torchs(name):
    assert not (found := autocast_cases.wrong(name, "cuda")), found


@pytest.mark.parametrize("size", [6, 120])  # handed to torch, or would be; planned
def test_gradients_of_padded_means_of_channels_last(size):
    """Which torch's own kernel gets wrong in some versions: the CPU's is the reference."""
    x = torch.randn(2, 64, size, size, dtype=torch.float64)
    grads = []
    for given in (x, x.float().cuda().contiguous(memory_format=torch.channels_last)):
        leaf = given.detach().requires_grad_()
        pool = F.avg_pool2d if given is x else f.avg_pool2d
        y = pool(leaf, 3, 2, 1)
        grads.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0].cpu())
    assert error(grads[1], grads[0]) <= SINGLE
