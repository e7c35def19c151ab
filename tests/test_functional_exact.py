"""Calls of ``dt.functional`` on a CPU that PyTorch's own kernel would get wrong, or not survive."""

from __future__ import annotations

import itertools

import pytest
import torch

import deuteron as dt
from tests.tolerances import SINGLE, allowed, error, rounded_mean

f = dt.functional
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=[True, False], ids=["delegated", "planned"])
def delegated(request):
    with f.delegation(request.param):
        yield request.param


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_nearest_volumes_of_16_bits(mode, dtype, delegated):
    """PyTorch's kernel, for one channel or channels last, is an illegal instruction somewhere."""
    orders = (torch.contiguous_format, torch.channels_last_3d)
    for channels, order in itertools.product((1, 3), orders):
        x = torch.randn(2, channels, 1, 11, 5).to(dtype).contiguous(memory_format=order)
        grad = torch.randn(2, channels, 4, 2, 13).to(dtype).contiguous(memory_format=order)
        found = _resized_gradient(x, grad, mode)
        exact = _resized_gradient(x.double(), grad.double(), mode)
        assert found.dtype is dtype and error(found, exact) <= allowed(0.0, dtype)


def _resized_gradient(x, grad, mode):
    x = x.detach().requires_grad_()
    f.interpolate(x, size=grad.shape[2:], mode=mode).backward(grad)
    return x.grad


def test_transforms_of_nearest_volumes_of_16_bits():
    def total(x):
        return f.interpolate(x, size=(4, 2, 13), mode="nearest").float().sum()

    x = torch.randn(1, 1, 1, 11, 5)
    assert torch.equal(torch.func.grad(total)(x.half()), torch.func.grad(total)(x).half())


NORMS = {
    "layer_norm": lambda f, x, w, b: f.layer_norm(x, x.shape[2:]) * w.view(1, -1, 1, 1) + b.sum(),
    "group_norm": lambda f, x, w, b: f.group_norm(x, 4, w, b),
    "instance_norm": lambda f, x, w, b: f.instance_norm(x, weight=w, bias=b),
    "batch_norm": lambda f, x, w, b: f.batch_norm(x, None, None, w, b, training=True),
}
SHAPES = [(4, 16, 24, 24), (2, 16, 3, 5), (3, 8, 1, 4)]
POINTS = (64, 8, 1, 1)  # of which layer and instance norm have nothing to normalise


@pytest.mark.parametrize(
    "name, shape",
    [*itertools.product(NORMS, SHAPES), ("group_norm", POINTS), ("batch_norm", POINTS)],
    ids=str,
)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_norms_of_channels_last_with_a_large_mean(name, shape, mean, delegated):
    """As good as PyTorch's in row-major order, which centres numbers before it squares them."""
    torch.manual_seed(0)
    x, grad = torch.randn(shape) + mean, torch.randn(shape)
    given = (x, torch.randn(shape[1]), torch.randn(shape[1]), grad)
    exact = _trained(NORMS[name], torch.nn.functional, *(t.double() for t in given))
    plain = _trained(NORMS[name], torch.nn.functional, *given)
    last = [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in given]
    found = _trained(NORMS[name], f, *last)
    alone = NORMS[name](f, *last[:3])
    least, reduced = rounded_mean(mean, torch.float32), x.numel() // shape[1]
    for got, torchs, want in zip(
        (alone, *found), plain[:1] + plain, exact[:1] + exact, strict=True
    ):
        torchs_error = max(error(torchs, want), least)
        assert error(got, want) <= allowed(torchs_error, torch.float32, reduced)


def test_norms_of_single_points(delegated):
    """Layer norm leaves nothing of them, and instance norm is refused, by torch as well."""
    x = torch.randn(POINTS) + 1000.0
    assert torch.equal(f.layer_norm(x, (1, 1)), torch.zeros(POINTS))
    with pytest.raises(ValueError, match="one value per channel"):
        f.instance_norm(x)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        torch.nn.functional.instance_norm(x)


def _trained(norm, functions, x, weight, bias, grad):
    """The result and the gradients."""
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(functions, *given)
    y.backward(grad)
    return y, *(t.grad for t in given)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_keeps_the_digits_of_a_large_mean(order):
    """What a mean was rounded by is taken out of the result, and is none of equal numbers'."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8, 24, 24) + 1000.0, torch.randn(8), torch.randn(8)
    x = x.contiguous(memory_format=order)
    exact = f.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    with f.delegation(False):
        found = f.batch_norm(x, None, None, weight, bias, training=True)
        equal = f.batch_norm(torch.full_like(x, 1000.1), None, None, weight, bias, training=True)
        huge = f.batch_norm((x - 1000.0) * 1e25, None, None, weight, bias, training=True)
    assert error(found, exact) <= allowed(0.0, torch.float32)
    assert torch.equal(equal, bias.view(1, -1, 1, 1).expand_as(equal))
    assert huge.isnan().all()


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "instance_norm"])
def test_norms_and_gradients_keep_the_digits_of_a_large_mean(name):
    """To a few roundings of the result: 3e-5 is what the mean alone is rounded by."""
    torch.manual_seed(0)
    given = (
        torch.randn(4, 8, 24, 24) + 1000.0,
        torch.randn(8),
        torch.randn(8),
        torch.randn(4, 8, 24, 24),
    )
    exact = _trained(NORMS[name], torch.nn.functional, *(t.double() for t in given))
    with f.delegation(False):
        found = _trained(NORMS[name], f, *given)
        equal, none = (
            NORMS[name](f, torch.full_like(given[0], of), *given[1:3]) for of in (1000.1, 0.0)
        )
    for got, want in zip(found, exact, strict=True):
        assert error(got, want) <= allowed(0.0, torch.float32)
    assert torch.equal(equal, none)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_running_statistics_keep_small_numbers_beside_large_old_ones(order, share):
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 8, 8) * 1e-6).contiguous(memory_format=order)
    found = []
    with f.delegation(False):
        for norm in (f.batch_norm, torch.nn.functional.batch_norm):
            old = [torch.tensor([1000.0, INF, -2.0]), torch.tensor([1000.0, INF, 2.0])]
            norm(x if norm is f.batch_norm else x.contiguous(), *old, training=True, momentum=share)
            found.append(old)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=SINGLE, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gaps", [False, True], ids=["weight", "weight with gaps"])
def test_gradients_of_batch_norm_of_one_permuted_image(training, gaps, delegated):
    """[H, W, C] permuted and unsqueezed, whose gradient torch takes for row-major; and weights with
    gaps between them, which torch does not see."""
    torch.manual_seed(0)
    x, grad = torch.randn(1, 6, 4, 5), torch.randn(1, 6, 4, 5)
    image = x[0].permute(1, 2, 0).contiguous().permute(2, 0, 1).unsqueeze(0)
    weight, running = torch.randn(6, 2), [torch.zeros(6), torch.ones(6)]

    def norm(home, x, weight):
        return home.batch_norm(x, *(t.to(x.dtype) for t in running), weight, None, training)

    found = []
    for home, of in ((f, image), (torch.nn.functional, x.double())):
        given = [of.detach().requires_grad_(), weight.to(of.dtype)[:, 0].requires_grad_()]
        y = norm(home, given[0], given[1] if gaps and home is f else given[1].contiguous())
        found.append((y, *torch.autograd.grad(y, given, grad.to(of.dtype))))
    for got, want in zip(*found, strict=True):
        assert error(got, want) <= allowed(0.0, torch.float32, reduced=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_gelu_by_tanh_far_below_0(dtype, delegated):
    """Where the cube of x overflows there is still nothing left of it."""
    x = torch.tensor([-1e18, -1e14, -50.0, 1e14, 1e18], dtype=dtype).repeat(9).requires_grad_()
    (grad,) = torch.autograd.grad(f.gelu(x, approximate="tanh").sum(), x)
    assert torch.equal(grad.abs(), (x > 0).to(dtype))


@pytest.mark.parametrize("name", ["elu", "selu", "celu"])
def test_second_derivatives_where_the_exponential_overflows(name, delegated):
    x = torch.tensor([-1.0, 1.0, 88.0, 100.0, 1e6], dtype=torch.float32).requires_grad_()
    (first,) = torch.autograd.grad(getattr(f, name)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second[0] > 0.0 and not second[1:].any()


def test_gradients_of_group_norm_with_a_bias_alone(delegated):
    """For which torch's own backward pass raises."""
    x, bias = torch.randn(3, 4, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    (by_bias,) = torch.autograd.grad(f.group_norm(x, 2, None, bias).sum(), bias)
    assert torch.equal(by_bias, torch.full((4,), 15.0))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("number", [NAN, INF, -INF, 3.0])
def test_the_gradient_of_a_softmax_of_one_number(name, number, delegated):
    x = torch.tensor(number, requires_grad=True)
    (grad,) = torch.autograd.grad(getattr(f, name)(x, 0), x)
    assert grad.isnan() if number != 3.0 else grad == 0.0


ODD_ROWS = [
    [0.0, INF, 2.0],
    [INF, 0.0, 2.0],
    [0.0, NAN, 2.0],
    [NAN, 0.0, 3.0],
    [0.0, 0.0, INF],
    [0.0, 0.0, NAN],
    [2.0, INF, 3.0],
    [2.0, NAN, 3.0],
    [INF, -INF, 0.0],
    [0.0, 3.0, INF],
    [2.0, 0.0, 3.0],
    [0.0, 2.0, 0.0],
    [INF, 2.0, NAN],
    [-0.0, INF, 1.0],
]


@pytest.mark.each_pair
@pytest.mark.parametrize("row", ODD_ROWS, ids=str)
@pytest.mark.parametrize("name", ["prod", "cumprod"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_products_of_zeros_and_infinities(name, row, dtype, delegated):
    found = []
    for home in (f, torch):
        x = torch.tensor([row], dtype=dtype, requires_grad=True)
        y = getattr(home, name)(x, -1)
        found.append((y, *torch.autograd.grad(y, x, torch.full_like(y, 2.0))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_a_product_without_zeros_beside_one_with_a_zero():
    """A row has its own answer, whatever the others hold."""
    rows = torch.tensor([[0.0, INF, 2.0], [2.0, 3.0, 4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(f.prod(rows, 1).sum(), rows)
    assert grad[1].tolist() == [12.0, 8.0, 6.0] and grad[0].isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("p", [-1.0, -2.5, -INF, INF, 0.0, 2.0])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()], ids=str)
def test_norms_of_nothing_are_refused_where_torch_refuses(p, shape, delegated):
    x = torch.empty(shape)
    for dim in (None, 0, -1):
        try:
            want = torch.linalg.vector_norm(x, p, dim)
        except RuntimeError:
            with pytest.raises(dt.DeuteronError, match="an empty one, has no answer"):
                f.norm(x, p, dim)
        else:
            assert f.norm(x, p, dim).shape == want.shape


MISSED = r"dilation=\(.*\) and padding=\(.*\) the elements of a window step over all of x"


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("with_indices", [False, True])
def test_a_window_wholly_in_the_padding_is_refused(dims, with_indices, delegated):
    """torch's indices of it lie outside of the image, and on a CPU its gradient writes there."""
    x = torch.randn(2, 3, *[2] * dims, requires_grad=True)
    pool, module = getattr(f, f"max_pool{dims}d"), getattr(dt.nn, f"MaxPool{dims}d")
    given = {"padding": 1, "dilation": 3, "return_indices": with_indices}
    for call in (lambda: pool(x, 2, 1, **given), lambda: module(2, 1, **given)(x)):
        with pytest.raises(dt.DeuteronError, match=MISSED):
            call()
    with pytest.raises(dt.DeuteronError, match=MISSED), torch.no_grad():
        pool(x[0], 2, 1, **given)
    assert pool(x, 2, 1, **given | {"dilation": 2}) is not None  # one tap of each meets x


def test_a_window_wholly_in_the_padding_is_refused_in_graphs():
    g = dt.Graph("pool")
    x = g.tensor("x", (2, 3, 1, 9))
    for build in (g.max_pool, g.max_pool_with_indices):
        with pytest.raises(dt.GraphError, match=MISSED):
            build(x, kernel=(2, 2), stride=1, padding=1, dilation=2)


def test_which_windows_miss():
    """Against torch's forward pass, in which such a window is -inf."""
    many = itertools.product(
        range(1, 6), range(2, 6), (1, 2, 3), (1, 2), range(2, 8), (False, True)
    )
    for n, kernel, stride, padding, dilation, ceil in many:
        given = (torch.ones(1, 1, n), kernel, stride, padding, dilation, ceil)
        try:
            missed = bool(torch.max_pool1d(*given).isinf().any())
        except RuntimeError:
            continue
        try:
            f.max_pool1d(*given)
        except dt.DeuteronError as error:
            assert missed and "step over all of x" in str(error), given
        else:
            assert not missed, given


@pytest.mark.parametrize("axes", [-1, 0, (0, 2), None], ids=str)
@pytest.mark.parametrize("scale", [1e18, 1e25, 1e30])
def test_a_variance_whose_squares_overflow(axes, scale, delegated):
    """It is the number that it is, or infinite if there is no such number; never nan."""
    x = torch.randn(7, 11, 300, generator=torch.Generator().manual_seed(0)) * scale
    exact = x.double().var(axes)
    exact = torch.where(exact > torch.finfo(torch.float32).max, INF, exact)
    assert error(f.var(x, axes), exact) <= allowed(0.0, torch.float32, 300)


@pytest.mark.parametrize("correction", [4, 5, 7])
@pytest.mark.filterwarnings("ignore:var")
def test_the_gradient_of_a_variance_without_freedom_is_torchs(correction, delegated):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    found, want = (
        torch.autograd.grad(home.var(x, 1, correction=correction).sum(), x)[0]
        for home in (f, torch)
    )
    assert error(found, want) <= allowed(0.0, torch.float64, 5)
