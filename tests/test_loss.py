"""Cross-entropy and linear + cross-entropy: against torch in float64, finite differences and
under torch.compile. The kernels are in ``test_loss_triton``."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from deuteron.errors import BindError, DeuteronError, EngineError, GraphError
from deuteron.functional import delegation
from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy
from deuteron.functional.linear_cross_entropy_chunks import classes_at_once, tokens_at_once
from deuteron.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropy
from tests.loss_cases import SHAPES, cases, inputs, reference, wrong
from tests.sweeps import one_in
from tests.tolerances import DOUBLE, EPS, allowed, error

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def grads(loss, *wrt):
    torch.manual_seed(1)
    up = torch.randn(loss.shape, dtype=torch.float64).to(loss.dtype)
    return torch.autograd.grad(loss, wrt, up)


@pytest.mark.parametrize("every", one_in(2, [23, 3]))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_combinations_against_torch(shape, dtype, every):
    """Each is a plan and a kernel of its own: of 72 combinations every shape and type has a few
    others, so that each is tried once at least, in the sweep several times."""
    first = (len(FLOATS) * SHAPES.index(shape) + FLOATS.index(dtype)) % every
    found = [bad for case in list(cases(shape))[first::every] if (bad := wrong(case, dtype))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_by_finite_differences(kind, reduction):
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 4], [-100, 2], [1, 1]])
    if kind == "probabilities":
        target = torch.rand(3, 5, 2, dtype=torch.float64)
    weight = torch.rand(5, dtype=torch.float64) + 0.5

    def f(x):
        return cross_entropy(
            x, target, weight, reduction=reduction, label_smoothing=0.1, z_loss=0.3
        )

    assert torch.autograd.gradcheck(f, (x,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_have_gradients_too(reduction):
    x, target = (torch.rand(3, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(5, dtype=torch.float64) + 0.5
    terms = {"reduction": reduction, "label_smoothing": 0.1}

    def f(x, target):
        return cross_entropy(x, target, weight, z_loss=0.3, **terms)

    def product(x, target):
        rows = x.movedim(1, -1), x.new_ones(5, 5).tril(), target.movedim(1, -1)
        return linear_cross_entropy(*rows, z_loss=0.3, **terms)

    for function in (f, product):
        assert torch.autograd.gradcheck(function, (x, target))
        assert torch.autograd.gradcheck(lambda t, of=function: of(x.detach(), t), (target,))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        grads(compiled(x, target), x, target), grads(f(x, target), x, target), strict=True
    ):
        assert error(a, b) <= allowed(0.0, torch.float64, 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("allow", [True, False])
def test_gradients_of_probabilities_are_torchs(allow, dtype):
    x, target = (torch.rand(7, 5).to(dtype).requires_grad_() for _ in range(2))
    wide = [t.detach().double().requires_grad_() for t in (x, target)]
    exact = grads(F.cross_entropy(*wide), *wide)
    theirs = grads(F.cross_entropy(x, target), x, target)
    with delegation(allow):
        ours = grads(cross_entropy(x, target), x, target)
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        assert error(a, e) <= allowed(error(b, e), dtype, 8)


@pytest.mark.parametrize(
    ("reduction", "accumulate"),
    [("mean", "exact"), ("mean", "fast"), ("sum", "exact"), ("sum", "fast"), ("none", "exact")],
)
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_gradients_of_the_product_by_finite_differences(kind, reduction, accumulate):
    h = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 4, -100], [2, 1, 1]])
    if kind == "probabilities":
        target = torch.rand(2, 3, 5, dtype=torch.float64)
    share = torch.rand(5, dtype=torch.float64) + 0.5

    def f(h, w, b):
        return linear_cross_entropy(
            h,
            w,
            target,
            b,
            class_weight=share,
            reduction=reduction,
            label_smoothing=0.1,
            z_loss=0.3,
            chunk=2,
            accumulate=accumulate,
        )

    assert torch.autograd.gradcheck(f, (h, w, b))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk", one_in(2, [None, 1, 4, 1000]))
@pytest.mark.each_value
def test_the_product_in_chunks(dtype, chunk):
    tokens, hidden, classes = 13, 24, 37
    h = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    w = (torch.randn(classes, hidden) / 4).to(dtype).requires_grad_()
    b = torch.randn(classes).to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,))
    y[[0, 7]] = -100
    kinds = itertools.product(("mean", "sum", "none"), (0.0, 0.1), (None, torch.rand(classes)))
    for reduction, smoothing, share in kinds:
        options = {"reduction": reduction, "label_smoothing": smoothing}
        ours = linear_cross_entropy(h, w, y, b, class_weight=share, chunk=chunk, **options)
        plain_share = None if share is None else share.to(dtype)
        plain = F.cross_entropy(F.linear(h, w, b), y, plain_share, **options)
        wide = [t.detach().double().requires_grad_() for t in (h, w, b)]
        exact_share = None if share is None else share.double()
        exact = F.cross_entropy(F.linear(*wide), y, exact_share, **options)
        results = [
            (loss, *grads(loss, *of))
            for loss, of in ((ours, (h, w, b)), (plain, (h, w, b)), (exact, wide))
        ]
        for what, mine, theirs, right in zip(
            ("loss", "hidden", "weight", "bias"), *results, strict=True
        ):
            same = tokens if dtype == torch.float64 else 1  # the reference rounds as often
            off, bound = error(mine, right), allowed(error(theirs, right), dtype, same)
            assert off <= bound, f"{what} {options} {share is not None}: {off} > {bound}"


def test_only_the_gradients_that_are_needed():
    y = torch.tensor([1, 2])
    for needs in itertools.product((False, True), repeat=3):
        h, w, b = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
        for t, need in zip((h, w, b), needs, strict=True):
            t.requires_grad_(need)
        loss = linear_cross_entropy(h, w, y, b)
        assert loss.requires_grad == any(needs)
        if loss.requires_grad:
            loss.backward()
        assert [t.grad is not None for t in (h, w, b)] == list(needs)


def test_adding_up_over_chunks_costs_a_rounding_for_each():
    tokens, chunk = 64, 4
    for dtype in FLOATS:
        h = torch.randn(tokens, 24).to(dtype).requires_grad_()
        w = (torch.randn(37, 24) / 4).to(dtype).requires_grad_()
        b = torch.randn(37).to(dtype).requires_grad_()
        y = torch.randint(37, (tokens,))
        wide = [t.detach().double().requires_grad_() for t in (h, w, b)]
        right = torch.autograd.grad(F.cross_entropy(F.linear(*wide), y), wide)
        theirs = torch.autograd.grad(F.cross_entropy(F.linear(h, w, b), y), (h, w, b))
        loss = linear_cross_entropy(h, w, y, b, chunk=chunk, accumulate="fast") * 0.5
        ours = [2 * g for g in torch.autograd.grad(loss, (h, w, b), retain_graph=True)]
        again = [2 * g for g in torch.autograd.grad(loss, (h, w, b))]
        assert all(torch.equal(a, c) for a, c in zip(ours, again, strict=True))
        for mine, plain, exact in zip(ours, theirs, right, strict=True):
            bound = allowed(error(plain, exact), dtype, tokens // chunk)
            assert error(mine, exact) <= bound, dtype


def test_sizes_of_pieces():
    assert tokens_at_once(8192, 4096, 128256, None, fast=True) == 512
    assert tokens_at_once(8192, 4096, 128256, None) == 2048
    assert classes_at_once(8192, 4096, 128256, None) == 4096
    assert tokens_at_once(10, 64, 100, None) == 10
    assert classes_at_once(10, 64, 100, None) == 100
    for tokens, classes, chunk in ((1000, 37, 7), (5, 3, 1), (0, 3, 2)):
        assert 1 <= tokens_at_once(tokens, 8, classes, chunk) <= chunk
        held = classes_at_once(tokens, 8, classes, chunk) * tokens
        assert held <= max(chunk * classes, tokens)


# ---- memory, strides, strange numbers


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(9, 5).t(),
        lambda: torch.randn(5, 20)[:, 3:12],
        lambda: torch.randn(10, 9)[::2],
        lambda: torch.randn(3, 4, 7).transpose(1, 2),
        lambda: torch.randn(3, 4, 5, 7).permute(0, 3, 2, 1),
        lambda: torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 1).expand(6, 4),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_that_are_not_contiguous(view, inplace):
    x = view()
    y = torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]))
    if inplace and 0 in x.stride():
        with pytest.raises(BindError, match="share"):
            cross_entropy(x.detach().requires_grad_(), y, inplace_backward=True)
        return
    exact = x.detach().clone().requires_grad_()
    want = F.cross_entropy(exact, y)
    want.backward()
    mine = x.detach().requires_grad_()
    loss = cross_entropy(mine, y, inplace_backward=inplace)
    (grad,) = torch.autograd.grad(loss, mine)
    assert error(loss, want) <= 4 * EPS[torch.float32]
    assert error(grad, exact.grad) <= 4 * EPS[torch.float32]
    assert (grad.data_ptr() == x.data_ptr()) == inplace


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty(reduction):
    for shape in ((0, 5), (0, 5, 3), (2, 5, 0)):
        x = torch.randn(shape, requires_grad=True)
        y = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64)
        ours, want = (f(x, y, reduction=reduction) for f in (cross_entropy, F.cross_entropy))
        assert error(ours, want) == 0.0
        assert torch.autograd.grad(ours.sum(), x)[0].shape == x.shape
    h, w = torch.randn(0, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y = torch.zeros(0, dtype=torch.int64)
    loss = linear_cross_entropy(h, w, y, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ())
    loss.sum().backward()
    assert h.grad.shape == (0, 3) and w.grad.shape == (4, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_row_counts(dtype):
    x = torch.randn(3, 4).to(dtype).requires_grad_()
    y = torch.full((3,), -100)
    loss = cross_entropy(x, y)
    loss.backward()
    assert loss.isnan() and not x.grad.any()
    assert cross_entropy(x, y, reduction="sum") == 0.0


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_nan_and_infinity_as_torch(options):
    nan, inf = float("nan"), float("inf")
    x = torch.randn(7, 4)
    x[0, 1], x[1, 1], x[2, 0], x[3, 2] = nan, inf, -inf, -inf
    x[4] = -inf
    x[5] *= 1e30
    y = torch.tensor([1, 1, 1, 2, 0, 3, 0])
    a, b = (x.clone().requires_grad_() for _ in range(2))
    ours = cross_entropy(a, y, reduction="none", **options)
    want = F.cross_entropy(b, y, reduction="none", **options)
    assert error(ours, want) <= 4 * EPS[torch.float32]
    ga, gb = (torch.autograd.grad(f.nansum(), v)[0] for f, v in ((ours, a), (want, b)))
    assert torch.equal(ga.isnan(), gb.isnan())


def test_large_logits_lose_no_digits():
    x = torch.randn(64, 1000) + 3000.0
    y = torch.randint(1000, (64,))
    for smoothing in (0.0, 0.1):
        want = F.cross_entropy(x.double(), y, label_smoothing=smoothing)
        theirs = error(F.cross_entropy(x, y, label_smoothing=smoothing), want)
        ours = error(cross_entropy(x, y, label_smoothing=smoothing), want)
        assert ours <= allowed(theirs, torch.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_many_classes_lose_no_digits(smoothing):
    """A sum of so many logits of one sign in float32 would be off by hundreds of roundings."""
    torch.manual_seed(0)
    x, target = torch.rand(2, 1 << 19), torch.tensor([3, 1 << 18])
    how = {"label_smoothing": smoothing}
    exact = F.cross_entropy(x.double(), target, **how)
    found = cross_entropy(x, target, **how)
    assert error(found, exact) <= allowed(0.0, torch.float32)


def test_small_gradients_survive_a_scaled_loss_in_float16():
    x = torch.randn(4096, 64).half().requires_grad_()
    y = torch.randint(64, (4096,))
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(exact, y) * 2.0**14, exact)
    (ours,) = torch.autograd.grad(cross_entropy(x, y).float() * 2.0**14, x)
    small = want.abs() < want.abs().max() * 1e-3
    assert small.any() and error(ours[small], want[small]) <= 4 * EPS[torch.float16]


def test_z_loss_and_lse():
    x = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 8, -100, 3, 3, 1])
    lse = torch.logsumexp(x, 1)
    for reduction in ("mean", "sum", "none"):
        z = 0.01 * torch.where(y == -100, 0.0, lse**2)
        z = {"mean": z.sum() / 5, "sum": z.sum(), "none": z}[reduction]
        want = F.cross_entropy(x, y, reduction=reduction) + z
        loss, found = cross_entropy(x, y, reduction=reduction, z_loss=0.01, return_lse=True)
        assert error(loss, want) <= 8 * EPS[torch.float64]
        assert error(found, torch.where(y == -100, 0.0, lse)) <= 4 * EPS[torch.float64]
        assert not found.requires_grad


# ---- autograd


def test_the_gradient_takes_the_memory_of_the_logits():
    leaf = torch.randn(5, 6, requires_grad=True)
    y = torch.randint(6, (5,))
    logits = leaf * 1.0
    kept = logits.detach().clone()
    want = F.cross_entropy(kept.requires_grad_(), y)
    want.backward()
    loss = cross_entropy(logits, y, inplace_backward=True)
    assert error(logits, kept.grad) <= 4 * EPS[torch.float32]
    loss.backward()
    assert error(leaf.grad, kept.grad) <= 4 * EPS[torch.float32]
    squares = torch.tanh(leaf)  # tanh saves its result, which is then overwritten
    loss = cross_entropy(squares, y, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_is_overwritten_without_a_gradient():
    logits = torch.randn(5, 6)
    before = logits.clone()
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), torch.zeros(5).long(), inplace_backward=True)
    assert torch.equal(logits, before)


def test_backward_twice():
    x = torch.randn(5, 6, requires_grad=True)
    y = torch.randint(6, (5,))
    loss = cross_entropy(x, y) * 3.0
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert error(x.grad, 2 * first) <= EPS[torch.float32]
    with pytest.raises(RuntimeError, match="second time"):
        loss = cross_entropy(x, y)
        torch.autograd.grad(loss, x)
        torch.autograd.grad(loss, x)


def test_second_derivatives_are_refused():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y = torch.tensor([0, 1, 2])
    for loss in (cross_entropy(x, y), linear_cross_entropy(x, w, y)):
        with pytest.raises(EngineError, match="second derivative"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_autocast_leaves_float64_alone():
    hidden, weight = torch.randn(5, 8).double(), torch.randn(7, 8).double()
    target = torch.randint(7, (5,))
    with delegation(False), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target)
        want = F.cross_entropy(F.linear(hidden, weight), target)
    assert loss.dtype is want.dtype is torch.float64 and error(loss, want) <= DOUBLE


def test_autocast_is_torchs():
    h, w = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    y = torch.randint(5, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(h, w)
        want, ours = F.cross_entropy(logits, y), cross_entropy(logits, y)
        product = linear_cross_entropy(h, w, y)
    assert ours.dtype == want.dtype == product.dtype == torch.float32
    for loss in (ours, product):
        assert error(loss, want) <= 8 * EPS[torch.float32]
        by_h, by_w = torch.autograd.grad(loss, (h, w), retain_graph=True)
        right = torch.autograd.grad(want, (h, w), retain_graph=True)
        assert by_h.dtype == by_w.dtype == torch.float32
        for mine, theirs in zip((by_h, by_w), right, strict=True):
            assert error(mine, theirs) <= 4 * EPS[torch.bfloat16]


# ---- torch.compile


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.each_value
def test_under_torch_compile(reduction, dtype):
    x = torch.randn(6, 9).to(dtype).requires_grad_()
    h, w = (torch.randn(n, 4).to(dtype).requires_grad_() for n in (6, 9))
    b = torch.randn(9).to(dtype).requires_grad_()
    y = torch.randint(9, (6,))

    def plain(x):
        return cross_entropy(x * 2, y, reduction=reduction, label_smoothing=0.1) * 3

    def product(h, w, b):
        options = {"reduction": reduction, "z_loss": 0.1, "accumulate": "exact"}
        return linear_cross_entropy(h * 2, w, y, b, **options) * 3

    for f, args in ((plain, (x,)), (product, (h, w, b))):
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        ours, want = compiled(*args), f(*args)
        assert error(ours, want) <= EPS[dtype]
        for mine, theirs in zip(grads(ours, *args), grads(want, *args), strict=True):
            assert error(mine, theirs) <= 2 * EPS[dtype]
        with torch.no_grad():
            assert error(compiled(*args), want) <= EPS[dtype]


def test_in_place_is_refused_under_torch_compile():
    torch._dynamo.reset()
    f = torch.compile(lambda x, y: cross_entropy(x, y, inplace_backward=True), fullgraph=True)
    said = r"memory of the logits under torch\.compile|Observed exception"  # torch 2.11 says less
    with pytest.raises(Exception, match=said):
        f(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]))


def test_opcheck():
    x = torch.randn(4, 5, 3, requires_grad=True)
    y = torch.randint(5, (4, 3))
    how = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.1, "dtype": "f32"}
    soft = (torch.rand(4, 5, 3), torch.rand(5), "none")
    for target, weight, reduction in ((y, None, "mean"), soft):
        how |= {"reduction": reduction, "gives": "loss lse"}
        op = torch.ops.deuteron.cross_entropy.default
        torch.library.opcheck(op, (x, target, weight, None, None), how)
    h, w, b = (torch.randn(s, requires_grad=True) for s in ((4, 3), (5, 3), (5,)))
    linear = torch.ops.deuteron.linear_cross_entropy.default
    given, terms = (h, w, b, y[:, 0].contiguous(), None), ("mean", -100, 0.0, 0.1, None)
    torch.library.opcheck(linear, (*given, *terms, torch.float32, True))
    back = torch.ops.deuteron.linear_cross_entropy_backward.default
    plain = [None if t is None else t.detach() for t in given]
    _, lse, _ = linear(*plain, *terms, torch.float32, True)
    torch.library.opcheck(back, (*plain, lse, torch.ones(()), *terms, [True, True]))


# ---- modules and errors


def test_modules_are_torchs():
    share = torch.rand(6)
    ours = CrossEntropyLoss(share, ignore_index=2, label_smoothing=0.1, reduction="sum")
    torchs = torch.nn.CrossEntropyLoss(share, ignore_index=2, label_smoothing=0.1, reduction="sum")
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    x, y = torch.randn(5, 6), torch.randint(6, (5,))
    assert error(ours(x, y), torchs(x, y)) <= 4 * EPS[torch.float32]
    head = torch.nn.Linear(4, 6)
    h = torch.randn(5, 4)
    product = LinearCrossEntropy(share, ignore_index=2, label_smoothing=0.1, reduction="sum")
    assert (
        error(product(h, head.weight, y, head.bias), torchs(head(h), y)) <= 8 * EPS[torch.float32]
    )
    loss, lse = CrossEntropyLoss(return_lse=True, z_loss=0.1)(x, y)
    assert loss.shape == () and lse.shape == (5,)


X, Y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: cross_entropy(X.int(), Y), GraphError, "cross_entropy of int32 is not defined"),
        (lambda: cross_entropy(X[0, 0], Y), GraphError, "scalar: there are no classes"),
        (lambda: cross_entropy(X[:, :0], Y), GraphError, "no classes"),
        (lambda: cross_entropy(X, Y[:2]), GraphError, r"target .* has shape \[2\], not \[3\]"),
        (lambda: cross_entropy(X, Y.short()), GraphError, "int16, not integer classes"),
        (lambda: cross_entropy(X, X[:2]), GraphError, r"probabilities and is f32\[2,4\]"),
        (lambda: cross_entropy(X, X, ignore_index=1), GraphError, "leave ignore_index out"),
        (lambda: cross_entropy(X, Y, torch.ones(3)), GraphError, r"shape \[3\], not \[4\]"),
        (lambda: cross_entropy(X, Y, reduction="max"), GraphError, "'mean', 'sum' or 'none'"),
        (lambda: cross_entropy(X, Y, label_smoothing=1.5), GraphError, "from 0 to 1"),
        (lambda: cross_entropy(X, Y, z_loss=-1.0), GraphError, "z_loss=-1.0"),
        (lambda: cross_entropy(X, Y + 4), GraphError, "class 4 is not one of 4"),
        (lambda: cross_entropy(X, Y - 1), GraphError, "use classes from 0 to 3, or -100"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 3), Y), BindError, r"weight \[C, H\]"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 4).half(), Y), BindError, "one type"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 4), Y[:1]), BindError, r"shape \[3\]"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 4), Y, X), BindError, r"bias \[C\]"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 4), Y + 9), GraphError, "class 9"),
        (lambda: linear_cross_entropy(X, torch.zeros(5, 4), Y, chunk=0), BindError, "chunk=1"),
        (lambda: linear_cross_entropy(X, X, Y, accumulate="slow"), GraphError, "'exact' or 'fast'"),
        (
            lambda: linear_cross_entropy(X, X, Y, accumulate="fast", reduction="none"),
            GraphError,
            "accumulate='exact', or reduction",
        ),
    ],
)
def test_errors_teach(call, kind, says):
    with pytest.raises(kind, match=says) as found:
        call()
    assert isinstance(found.value, DeuteronError) and found.value.remedy


def test_the_reference_is_torch():
    x, target, weight = inputs((3, 4), "classes", True)
    case = ((3, 4), "classes", True, "mean", 0.1, 0.0)
    want = F.cross_entropy(x, target, weight, label_smoothing=0.1)
    assert error(reference(x, target, weight, case), want) == 0.0
