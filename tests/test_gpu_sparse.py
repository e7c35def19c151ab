"""Sparse matrices times dense ones on a real GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from tests.sparse_cases import CASES, cases, compare
from tests.test_sparse import CALLS, LAYOUTS, Module, dense, sparse, with_values
from tests.tolerances import DOUBLE_GRADIENT, EPS, SINGLE_LAYERS, allowed, error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse")]
pytest.importorskip("triton")
f = dt.functional
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_every_case(kind):
    wrong, count = [], 0
    for op, case in cases(kind, "cuda"):
        ran, bad = compare(op, case, kind, "cuda", most=3)
        count, wrong = count + ran, wrong + bad
    assert count >= 20 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_eager_products_and_gradients(layout, kind):
    matrix = dense(160, 96, kind)
    a = sparse(matrix, layout).cuda()
    values = a.values().clone().requires_grad_()
    x = torch.randn(96, 33, dtype=torch.float64).to(kind).cuda().requires_grad_()
    y = f.spmm(with_values(a, values), x)
    exact = matrix.cuda().double() @ x.double()
    assert error(y, exact) <= allowed(error(matrix.cuda() @ x, exact), kind)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, (values, x), grad)
    want = matrix.cuda().double().t() @ grad.double()
    assert error(got[1], want) <= allowed(error(matrix.cuda().t() @ grad, want), kind)
    there = with_values(a, torch.ones_like(values)).to_dense() != 0
    meet = (grad.double() @ x.double().t()) * there
    full = with_values(a, got[0].detach()).to_dense()
    assert error(full, meet) <= allowed(EPS[kind], kind, 33)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [0, 32, 64])
def test_large_and_skewed(kind, side):
    from bench.sparse import matrix
    from bench.sparse import sparse as of

    for case in (f"bsr{side}",) if side else ("csr", "skewed"):
        d = matrix(case, 4096, kind, "cuda")
        x = torch.randn(4096, 256, device="cuda").to(kind)
        exact = d.double() @ x.double()
        plain = error(d @ x, exact)
        a = of(case, d)
        for _ in range(2):
            assert error(f.spmm(a, x), exact) <= allowed(plain, kind, 64)


def test_sums_do_not_vary():
    from bench.sparse import matrix

    a = matrix("skewed", 4096, torch.float32, "cuda").to_sparse_csr()
    values = a.values().clone().requires_grad_()
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)

    def step():
        y = f.spmm(with_values(a, values), x)
        return y.detach(), *torch.autograd.grad(y, (values, x), torch.ones_like(y))

    first = step()
    assert all(torch.equal(p, q) for _ in range(5) for p, q in zip(first, step(), strict=True))


def test_nothing_outside_is_read():
    """As in the interpreter: a row with an entry that is none is nan, and the device lives on."""
    feed = {n: t.cuda() for n, t in CASES[0].feed("spmm_csr", torch.float32).items()}
    feed["columns"][4] = 2**40
    y = f.spmm_csr(*feed.values())
    assert y.isnan().any() and torch.ones(3, device="cuda").sum() == 3


def test_a_plan_is_captured_and_uses_the_kernel():
    a = dense(64, 48, torch.float32).cuda().to_sparse_csr()
    g = dt.Graph("sparse")
    parts = [g.constant(t) for t in (a.crow_indices(), a.col_indices(), a.values())]
    x = g.tensor("x", (48, 32))
    g.relu(g.spmm_csr(*parts, x)).output("y")
    plan = g.compile(device="cuda")
    used = [c.candidate.engine for c in plan.decision.choices if "spmm_csr" in c.region.ops]
    assert used == ["triton_kernels"]
    given = torch.randn(48, 32, device="cuda")
    for _ in range(3):
        got = plan.run(x=given)["y"]
    assert error(got, torch.relu(a.to_dense().double() @ given.double())) <= SINGLE_LAYERS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ["torch.sparse.mm", "addmm", "linear", "from the right"])
def test_modules(layout, call):
    shape, fn = CALLS[call]
    x, w = torch.randn(shape).cuda(), sparse(dense(kind=torch.float32), layout)
    model = Module(w, fn, parameter=False).eval().cuda()
    try:
        with torch.no_grad():
            want = model(x)
    except RuntimeError:  # torch has no such product: then there is no plan of one, either
        with pytest.raises(dt.DeuteronError):
            dt.optimize(model, (x,))
        return
    assert error(dt.optimize(model, x, find=False)(x), want) <= SINGLE_LAYERS


def test_two_of_four():
    w = torch.randn(128, 256, device="cuda").half()
    x = torch.randn(64, 256, device="cuda").half()
    if torch.cuda.get_device_capability() < (8, 0):
        with pytest.raises(dt.DeuteronError, match="from Ampere on"):
            f.to_2_4(w)
        return
    pruned = f.to_2_4(w)
    whole = pruned.to_dense()
    assert ((whole.reshape(-1, 4) != 0).sum(1) <= 2).all()
    exact = F.linear(x.double(), whole.double())
    bound = allowed(error(F.linear(x, whole), exact), torch.float16)
    assert error(f.sparse_linear(x, pruned), exact) <= bound
    with pytest.raises(dt.DeuteronError, match="torch refuses"):
        f.to_2_4(torch.randn(4, 8, device="cuda").double())


def test_gradients_in_float64_are_those_of_a_dense_product():
    a = sparse(dense(), "csr").cuda()
    x = torch.randn(12, 5, dtype=torch.float64, device="cuda", requires_grad=True)
    (got,) = torch.autograd.grad(f.spmm(a, x).sum(), x)
    (want,) = torch.autograd.grad((a.to_dense() @ x).sum(), x)
    assert error(got, want) <= DOUBLE_GRADIENT
