"""``dt.functional`` under what torch does to functions: second derivatives, vmap, jvp, grad,
traces, tensors that are not real."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import deuteron as dt
from tests.functional_cases import CALLS, Call, results
from tests.sweeps import one_in
from tests.tolerances import DOUBLE, DOUBLE_GRADIENT, HARDSIGMOID_SLOPE, SINGLE, error

f = dt.functional


def _name(call: Call) -> str:
    return call.name


EVERY = pytest.mark.parametrize("call", one_in(2, CALLS.values()), ids=CALLS)
LOSSES = ("cross_entropy", "linear_cross_entropy")


def ours(call: Call):
    return lambda *tensors: call.ours(f, *tensors)


@pytest.mark.parametrize(
    "call", one_in(2, [c for n, c in CALLS.items() if n not in LOSSES]), ids=_name
)
def test_second_derivatives(call):
    if call.frozen:
        pytest.skip("its gradient is zero by definition, not by calculus")
    x = [t.requires_grad_() for t in call.tensors()]
    assert torch.autograd.gradgradcheck(ours(call), x, fast_mode=True)


def test_second_derivatives_of_a_bias_of_attention():
    shapes = (2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3), (4, 5, 5)
    x = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    with f.delegation(False):
        assert torch.autograd.gradgradcheck(
            lambda *x: f.attention(*x, causal=True, softcap=4.0), x, fast_mode=True
        )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_refuse_second_derivatives_or_leave_them_to_torch(name):
    call = CALLS[name]
    x = [t.requires_grad_() for t in call.tensors()]
    with pytest.raises(dt.DeuteronError, match="no second derivative"):
        torch.autograd.grad(ours(call)(*x), x, create_graph=True)
    with f.delegation(True):
        assert torch.autograd.gradgradcheck(ours(call), x, fast_mode=True)


def test_gradients_of_gradients_reach_gradients_and_inputs():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for fn, t in ((f.softmax, x), (lambda t: F.softmax(t, -1), y)):
        (g,) = torch.autograd.grad(fn(t).square().sum(), t, create_graph=True)
        g.square().sum().backward()
    assert error(x.grad, y.grad) <= DOUBLE_GRADIENT


@EVERY
def test_several_gradients_at_once(call):
    x = [t.requires_grad_() for t in call.tensors()]
    y = [t for t in results(ours(call)(*x)) if t.requires_grad]
    many = [torch.randn(2, *t.shape, dtype=t.dtype) for t in y]
    found = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    rows = zip(*many, strict=True)
    each = [torch.autograd.grad(y, x, row, retain_graph=True) for row in rows]
    for got, *one in zip(found, *each, strict=True):
        assert error(got, torch.stack(one)) <= DOUBLE_GRADIENT


@EVERY
def test_vmap(call):
    many = [torch.stack((t, t * 0.5, t + 1.0)) for t in call.tensors()]
    found = results(torch.func.vmap(ours(call))(*many))
    each = [results(ours(call)(*(t[i] for t in many))) for i in range(3)]
    for k, got in enumerate(found):
        assert error(got, torch.stack([one[k] for one in each])) <= DOUBLE


def test_vmap_of_attention_over_one_of_its_tensors():
    many, one = torch.randn(2, 1, 2, 5, 4), torch.randn(1, 2, 5, 4)

    def seen(q, k):
        return f.attention(q, k, k, window=(2, 1))

    for places, call in (((0, None), lambda x: seen(x, one)), ((None, 0), lambda x: seen(one, x))):
        given = (many, one) if places[0] == 0 else (one, many)
        found = torch.func.vmap(seen, places)(*given)
        assert error(found, torch.stack([call(x) for x in many]).double()) <= SINGLE


def test_vmap_of_a_histogram():
    x, weight = torch.randn(2, 3, 40)

    def count(x, weight=None):
        return f.histogram(x, 5, -1.0, 1.0, weight=weight)

    assert torch.equal(torch.func.vmap(count)(x), torch.stack([count(row) for row in x]))
    sums = torch.stack([count(*pair) for pair in zip(x, weight, strict=True)])
    assert error(torch.func.vmap(count)(x, weight), sums) <= SINGLE


@EVERY
def test_forward_mode(call):
    if call.name == "grid_sample":
        pytest.skip("torch has no forward derivative of it")
    at = tuple(call.tensors())
    along = tuple(call.tensors(seed=1))
    got, want = (torch.func.jvp(fn, at, along)[1] for fn in (ours(call), call.theirs))
    for a, b in zip(results(got), results(want), strict=True):
        assert error(a, b) <= DOUBLE_GRADIENT


@EVERY
def test_functional_gradients(call):
    def loss(fn):
        return lambda *t: sum(out.sin().sum() for out in results(fn(*t)))

    at = tuple(call.tensors())
    places = tuple(range(len(at)))
    got, want = (torch.func.grad(loss(fn), places)(*at) for fn in (ours(call), call.theirs))
    for a, b in zip(got, want, strict=True):
        limit = DOUBLE_GRADIENT if call.name != "hardsigmoid" else HARDSIGMOID_SLOPE
        assert error(a, b) <= limit


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_losses_in_a_transform_are_the_same(reduction, probabilities):
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    target = torch.randn(5, 7, 3).softmax(1).double() if probabilities else torch.randint(7, (5, 3))
    if not probabilities:
        target[0, 1] = -100
    given = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01, "return_lse": True}
    weight = torch.rand(7, dtype=torch.float64)
    want = f.cross_entropy(x, target, weight, **given)
    got, _ = torch.func.jvp(lambda x: f.cross_entropy(x, target, weight, **given), (x,), (x,))
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= DOUBLE


def test_a_loss_of_a_view_whose_signs_are_still_to_be_turned():
    z = torch.randn(6, 5, dtype=torch.complex128).conj().imag
    assert z.is_neg()
    target = torch.arange(6) % 5
    assert error(f.cross_entropy(z, target), F.cross_entropy(z, target)) <= DOUBLE
    w = torch.randn(4, 5, dtype=torch.complex128).conj().imag
    got = f.linear_cross_entropy(z, w, target % 4)
    assert error(got, F.cross_entropy(z @ w.t(), target % 4)) <= DOUBLE


# these cases hold tensors of their own, which lie on the CPU; all tensors of theirs come below
OWN = (
    "embedding",
    "embedding by frequency",
    "embedding with positions",
    "softmax masked",
    "batch_norm eval",
    *LOSSES,
)


def _moved(t: torch.Tensor, mode: FakeTensorMode | None) -> torch.Tensor:
    return t.to("meta") if mode is None else mode.from_tensor(t)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "meta"])
@pytest.mark.parametrize(
    "call", [c for c in CALLS.values() if c.name not in OWN], ids=lambda c: c.name
)
@pytest.mark.each_value
def test_tensors_without_memory(call, fake):
    """Kernels would read from nowhere; the second time, from a plan that is already known."""
    want = results(ours(call)(*call.tensors()))
    mode = FakeTensorMode() if fake else None
    given = [_moved(t, mode).requires_grad_() for t in call.tensors()]
    found = results(ours(call)(*given))
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        assert type(a) is not torch.Tensor or a.is_meta
    grads = torch.autograd.grad(
        [a for a in found if a.requires_grad],
        given,
        [torch.ones_like(a) for a in found if a.requires_grad],
    )
    assert [g.shape for g in grads] == [t.shape for t in given]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_tensors_without_memory(name):
    with FakeTensorMode():
        x, w = torch.randn(5, 7, requires_grad=True), torch.randn(9, 7, requires_grad=True)
        target = torch.zeros(5, dtype=torch.int64)
        given = (x, target) if name == "cross_entropy" else (x, w, target)
        loss = getattr(f, name)(*given)
        loss.backward()
    assert loss.shape == () and x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@EVERY
def test_a_trace_holds_the_call_and_not_its_result(call):
    example, other = call.tensors(), call.tensors(seed=1)
    traced = torch.jit.trace(ours(call), tuple(example), check_trace=False)
    for a, b in zip(results(traced(*other)), results(ours(call)(*other)), strict=True):
        assert error(a, b) <= DOUBLE


WITH_OTHERS = {
    "embedding": (lambda w, i: f.embedding(i, w), (10, 4), 3),
    "cross_entropy": (f.cross_entropy, (5, 7), 5),
    "linear_cross_entropy": (
        lambda x, t: f.linear_cross_entropy(x, x.new_ones(9, 7), t),
        (5, 7),
        5,
    ),
    "softmax masked": (lambda x, m: f.softmax(x, mask=(m > 0)[:, None]), (5, 7), 5),
    "batch_norm eval": (lambda x, m: f.batch_norm(x, m.float(), m.float() + 1.0), (4, 3, 5), 3),
}


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "meta"])
@pytest.mark.parametrize("name", WITH_OTHERS)
def test_other_tensors_without_memory(name, fake):
    call, shape, count = WITH_OTHERS[name]
    tensors = torch.randn(shape), torch.arange(count) % 3
    mode = FakeTensorMode() if fake else None
    want, found = call(*tensors), call(*(_moved(t, mode) for t in tensors))
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    assert found.device.type == ("cpu" if fake else "meta")
    if not fake:  # one of them somewhere else is said, and nothing is read
        with pytest.raises((dt.DeuteronError, RuntimeError), match="meta"):
            call(_moved(tensors[0], mode), tensors[1])


def test_gradients_of_each_image_in_channels_last():
    x = torch.randn(2, 3, 4, 4, 5, dtype=torch.float64).movedim(-1, 2)
    weight = torch.rand(5, dtype=torch.float64)

    def each(norm):
        def loss(w, x):
            return norm(x, None, None, w, training=True).pow(3).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    assert error(each(f.batch_norm), each(F.batch_norm)) <= DOUBLE_GRADIENT


@pytest.mark.parametrize("name", ["BatchNorm2d", "InstanceNorm2d"])
def test_several_models_at_once_each_with_running_statistics(name):
    """As ``torch.func.stack_module_state`` is used: buffers are written to under vmap."""
    x = torch.randn(3, 4, 2, 5, 5, dtype=torch.float64)
    ends = []
    for home in (dt.nn, torch.nn):
        given = {"track_running_stats": True, "affine": True, "dtype": torch.float64}
        models = [getattr(home, name)(2, **given) for _ in range(3)]
        params, buffers = torch.func.stack_module_state(models)

        def call(params, buffers, x, model=models[0]):
            return torch.func.functional_call(model, (params, buffers), (x,))

        y = torch.func.vmap(call)(params, buffers, x)
        ends.append((y, buffers["running_mean"], buffers["running_var"]))
    for a, b in zip(*ends, strict=True):
        assert error(a, b) <= DOUBLE
