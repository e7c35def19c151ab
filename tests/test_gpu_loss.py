"""Cross-entropy and linear + cross-entropy on a real GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy
from tests.loss_cases import SHAPES, cases, wrong
from tests.sweeps import every_pair
from tests.tolerances import EPS, allowed, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chosen", [every_pair, pytest.param(list, marks=pytest.mark.sweep)])
def test_combinations_against_torch(chosen, shape, dtype):
    found = [bad for case in chosen(cases(shape)) if (bad := wrong(case, dtype, "cuda"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (9, 1000),
        (300, 10),
        (5, 4096),
        (5, 4097),
        (6, 32768),
        (6, 50257),
        (4, 128256),
        (2, 1048583),
        (3, 21, 33, 35),
        (2, 150, 17, 64),
        (2, 21, 200, 200),
        (4, 5000, 6),
    ],
    ids=str,
)
def test_sizes(shape, dtype):
    found = []
    for kind, weighted, reduction, smoothing, z in (
        ("classes", False, "mean", 0.0, 0.0),
        ("classes", True, "sum", 0.1, 0.01),
        ("int32", False, "none", 0.1, 0.0),
        ("probabilities", False, "mean", 0.0, 0.0),
        ("probabilities", True, "none", 0.1, 0.01),
    ):
        case = (shape, kind, weighted, reduction, smoothing, z)
        for inplace in (False, True):
            bad = wrong(case, dtype, "cuda", inplace_backward=inplace)
            found += [f"{bad} in place: {inplace}"] if bad else []
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(9, 5).t(),
        lambda: torch.randn(5, 9000)[:, 3:5012],
        lambda: torch.randn(5, 9008)[:, 16:5012],
        lambda: torch.randn(10, 9)[::2],
        lambda: torch.randn(3, 4, 7).transpose(1, 2),
        lambda: torch.randn(3, 4, 7000).transpose(1, 2),
        lambda: torch.randn(3, 4, 5, 7).permute(0, 3, 2, 1),
        lambda: torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 4, 5, 8)[::2, :, :, ::2],
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_that_are_views(view, inplace):
    torch.manual_seed(0)
    whole = view()
    x = torch.empty_strided(whole.shape, whole.stride(), device="cuda").copy_(whole)
    y = torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]), device="cuda")
    exact = x.double().requires_grad_()
    want = F.cross_entropy(exact, y)
    (right,) = torch.autograd.grad(want, exact)
    mine = x.detach().requires_grad_()
    loss = cross_entropy(mine, y, inplace_backward=inplace)
    (grad,) = torch.autograd.grad(loss, mine)
    off = error(loss, want), error(grad, right)
    assert max(off) <= 8 * EPS[torch.float32], off
    assert (grad.data_ptr() == x.data_ptr()) == inplace


def test_nan_and_infinity_as_torch():
    nan, inf = float("nan"), float("inf")
    for columns in (4, 5000, 40000):
        for smoothing in (0.0, 0.1):
            x = torch.randn(6, columns, device="cuda")
            x[0, 1], x[1, 1], x[2, 0], x[3, 2] = nan, inf, -inf, -inf
            x[4] = -inf
            y = torch.tensor([1, 1, 1, 2, 0, 3], device="cuda")
            a, b = (x.clone().requires_grad_() for _ in range(2))
            ours = cross_entropy(a, y, reduction="none", label_smoothing=smoothing)
            want = F.cross_entropy(b, y, reduction="none", label_smoothing=smoothing)
            assert error(ours, want) <= 8 * EPS[torch.float32], (columns, smoothing, ours, want)
            ga, gb = (torch.autograd.grad(f.nansum(), v)[0] for f, v in ((ours, a), (want, b)))
            assert torch.equal(ga.isnan(), gb.isnan()), (columns, smoothing, ga, gb)


@pytest.mark.parametrize("columns", [9, 5000, 128256])
def test_classes_that_do_not_exist_and_rows_that_do_not_count(columns):
    x = torch.randn(4, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.tensor([1, columns, -1, -100], device="cuda")
    loss = cross_entropy(x, y, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == [False, True, True, False], loss
    assert grad.isnan().all(1).tolist() == [False, True, True, False] and not grad[3].any()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        z = x.detach().to(dtype).requires_grad_()
        nothing = cross_entropy(z, torch.full_like(y, -100))
        (grad,) = torch.autograd.grad(nothing, z)
        assert nothing.isnan() and not grad.any(), (dtype, nothing, grad)


def test_more_than_two_to_the_31_elements():
    columns = 128256
    rows = 2**31 // columns + 2
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    y = torch.full((rows,), 5, device="cuda")
    exact = x[-1:].double().requires_grad_()
    want = F.cross_entropy(exact, y[-1:], reduction="sum")
    (right,) = torch.autograd.grad(want, exact)
    x.requires_grad_()
    loss = cross_entropy(x, y, reduction="none", inplace_backward=True)
    assert error(loss[-1:], want[None]) <= 4 * EPS[torch.bfloat16]
    (grad,) = torch.autograd.grad(loss.sum(), x)
    off = error(grad[-1:], right)
    assert off <= 4 * EPS[torch.bfloat16], off
    del x, loss, grad, exact, right
    torch.cuda.empty_cache()
    image = torch.zeros(1, 3, 2**30, device="cuda", dtype=torch.bfloat16)
    image[0, 2, -1] = 4.0
    places = torch.zeros(1, 2**30, device="cuda", dtype=torch.uint8)
    places[0, -1] = 2
    loss, lse = cross_entropy(image, places, reduction="none", return_lse=True)
    right = torch.tensor([0.0, 0.0, 4.0]).exp().sum().log()
    assert error(lse[0, -1:].cpu(), right[None]) <= 4 * EPS[torch.float32], lse[0, -1]
    assert error(loss[0, -1:].cpu(), right[None] - 4.0) <= 4 * EPS[torch.bfloat16], loss[0, -1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("chunk", [64, None])
def test_the_product(dtype, reduction, kind, chunk):
    torch.manual_seed(0)
    tokens, hidden, classes = 200, 64, 5003
    h = torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(classes, hidden, device="cuda") / 8).to(dtype).requires_grad_()
    b = torch.randn(classes, device="cuda").to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,), device="cuda")
    y[::7] = -100
    if kind == "probabilities":
        y = torch.randn(tokens, classes, device="cuda").softmax(1).to(dtype)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    wide = [t.detach().double().requires_grad_() for t in (h, w, b)]
    target = y.double() if kind == "probabilities" else y
    results = []
    for loss, of in (
        (linear_cross_entropy(h, w, y, b, chunk=chunk, **options), (h, w, b)),
        (F.cross_entropy(F.linear(h, w, b), y, **options), (h, w, b)),
        (F.cross_entropy(F.linear(*wide), target, **options), wide),
    ):
        up = torch.linspace(0.5, 2.0, max(1, loss.numel()), device="cuda").to(loss)
        results.append((loss, *torch.autograd.grad(loss, of, up.view(loss.shape))))
    found = {}
    for what, mine, theirs, right in zip(
        ("loss", "hidden", "weight", "bias"), *results, strict=True
    ):
        reduced = tokens if dtype == torch.float64 else 1
        found[what] = error(mine, right), allowed(error(theirs, right), dtype, reduced)
    assert all(off <= bound for off, bound in found.values()), found


@pytest.mark.parametrize("chunk", [256, None])
def test_errors_of_the_product_are_those_of_the_plain_composition(chunk):
    """No slack for roundings here: many tokens and classes, every gradient rounded once."""
    torch.manual_seed(0)
    tokens, hidden, classes = 2048, 512, 32000
    h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, hidden, device="cuda").mul_(0.05).bfloat16().requires_grad_()
    y = torch.randint(classes, (tokens,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (h, w)]
    right = torch.autograd.grad(F.cross_entropy(F.linear(*wide), y), wide)
    theirs = torch.autograd.grad(F.cross_entropy(F.linear(h, w), y), (h, w))
    ours = torch.autograd.grad(linear_cross_entropy(h, w, y, chunk=chunk), (h, w))
    found = [(error(a, e), error(b, e)) for a, b, e in zip(ours, theirs, right, strict=True)]
    assert all(mine <= 2 * plain for mine, plain in found), found


def test_memory_of_the_product():
    tokens, hidden, classes = 8192, 4096, 128256
    h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, hidden, device="cuda").mul_(0.02).bfloat16().requires_grad_()
    y = torch.randint(classes, (tokens,), device="cuda")
    peaks = {}
    for name, f in (
        ("plain", lambda: F.cross_entropy(F.linear(h, w), y)),
        ("exact", lambda: linear_cross_entropy(h, w, y, accumulate="exact")),
        ("fast", lambda: linear_cross_entropy(h, w, y, accumulate="fast")),
    ):
        f().backward()  # whatever is allocated once
        h.grad = w.grad = None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        f().backward()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        h.grad = w.grad = None
    assert max(peaks["exact"], peaks["fast"]) <= peaks["plain"] / 5, peaks


def test_captured_in_a_cuda_graph():
    x = torch.randn(64, 50000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    h = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(50000, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(50000, (64,), device="cuda")
    for f, of in ((lambda: cross_entropy(x, y), x), (lambda: linear_cross_entropy(h, w, y), w)):
        want = torch.autograd.grad(f(), of)[0].clone()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.autograd.grad(f(), of)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            (grad,) = torch.autograd.grad(f(), of)
        grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert error(grad, want) <= EPS[torch.bfloat16]


def test_under_torch_compile():
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(32, 5000, device="cuda", dtype=dtype, requires_grad=True)
        h = torch.randn(32, 64, device="cuda", dtype=dtype, requires_grad=True)
        w = torch.randn(500, 64, device="cuda", dtype=dtype, requires_grad=True)
        y = torch.randint(500, (32,), device="cuda")

        def plain(x, y=y):
            return cross_entropy(x * 2, y, label_smoothing=0.1)

        def product(h, w, y=y):
            return linear_cross_entropy(h * 2, w, y)

        for f, args in ((plain, (x,)), (product, (h, w))):
            torch._dynamo.reset()
            ours, want = torch.compile(f, fullgraph=True)(*args), f(*args)
            assert error(ours, want) <= EPS[dtype]
            pairs = zip(
                torch.autograd.grad(ours, args), torch.autograd.grad(want, args), strict=True
            )
            off = [error(mine, theirs) for mine, theirs in pairs]
            assert max(off) <= 2 * EPS[dtype], (f.__name__, dtype, off)


@pytest.mark.parametrize("up", [1.0, 0.25])
def test_the_gradient_is_scaled_by_what_comes_from_above(up):
    x = torch.randn(300, 40000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(40000, (300,), device="cuda")
    loss = cross_entropy(x, y) * up
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    (whole,) = torch.autograd.grad(cross_entropy(x, y), x)
    assert torch.equal(first, whole * up)
