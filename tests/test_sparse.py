"""Sparse matrices times dense ones on a CPU: eager functions, gradients, modules, bad inputs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.errors import BindError, DeuteronError, GraphError
from tests.tolerances import DOUBLE, GRADIENT, SINGLE_LAYERS, allowed, error

f = dt.functional
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
LAYOUTS = ("csr", "csc", "coo", "bsr", "bsc")
KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dense(rows: int = 20, columns: int = 12, kind: torch.dtype = torch.float64) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    here = torch.rand(rows, columns, generator=gen) < 0.3
    here[rows // 3] = False
    return (torch.randn(rows, columns, generator=gen, dtype=torch.float64) * here).to(kind)


def sparse(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    block = {"blocksize": (4, 3)} if layout[0] == "b" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return matrix.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)


def with_values(a: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same structure with other values, which torch differentiates for each layout."""
    if a.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(a.indices(), values, a.shape, is_coalesced=True)
    by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    first = a.crow_indices() if by_rows else a.ccol_indices()
    second = a.col_indices() if by_rows else a.row_indices()
    return torch.sparse_compressed_tensor(first, second, values, a.shape, layout=a.layout)


# ---- eager


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_worse_than_twice_torchs_dense_product(layout, kind):
    matrix, x = dense(kind=kind), torch.randn(12, 7, dtype=torch.float64).to(kind)
    exact = matrix.double() @ x.double()
    bound = allowed(error(matrix @ x, exact), kind)
    assert error(f.spmm(sparse(matrix, layout), x), exact) <= bound
    assert error(f.sparse_linear(x.t(), sparse(matrix, layout)), exact.t()) <= bound


MORE = [pytest.param(each, marks=pytest.mark.sweep) for each in ("csc", "coo", "bsc")]


@pytest.mark.parametrize("layout", ["csr", "bsr", *MORE])
def test_gradients_are_those_of_finite_differences(layout):
    a = sparse(dense(), layout)
    values = a.values().clone().requires_grad_()
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v, x: f.spmm(with_values(a, v), x), (values, x), rtol=GRADIENT)
    line = x.detach().t().reshape(3, 1, 12).requires_grad_()
    linear = lambda v, x, b: f.sparse_linear(x, with_values(a, v), b)  # noqa: E731
    torch.autograd.gradcheck(linear, (values, line, bias), rtol=GRADIENT)


def test_gradients_of_gradients():
    a = sparse(dense(), "csr")
    values = a.values().clone().requires_grad_()
    x = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    product = lambda v, x: f.spmm(with_values(a, v), x)  # noqa: E731
    torch.autograd.gradgradcheck(product, (values, x), rtol=GRADIENT)


@pytest.mark.parametrize("rows,columns,n", [(0, 3, 2), (3, 0, 2), (3, 4, 0), (1, 1, 1), (3, 4, 2)])
def test_empty_sizes_and_no_entries(rows, columns, n):
    a, x = torch.zeros(rows, columns).to_sparse_csr(), torch.ones(columns, n)
    assert torch.equal(f.spmm(a, x), torch.zeros(rows, n))


def test_a_vector_int32_indices_and_an_uncoalesced_matrix():
    matrix, x = dense(kind=torch.float32), torch.randn(12)
    a = sparse(matrix, "csr")
    parts = a.crow_indices().int(), a.col_indices().int(), a.values()
    short = torch.sparse_csr_tensor(*parts, a.shape)
    assert error(f.spmm(short, x), matrix.double() @ x.double()) <= SINGLE_LAYERS
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0], [2, 2, 0]]), torch.ones(3), (2, 3))
    assert torch.equal(f.spmm(twice, torch.eye(3)), twice.to_dense())


def test_indices_are_looked_at_again_once_they_were_written_to():
    a, x = sparse(dense(kind=torch.float32), "csr"), torch.randn(12, 2, requires_grad=True)
    before = f.spmm(a, x)
    a.values().mul_(2)
    assert torch.equal(f.spmm(a, x), 2 * before)
    a.col_indices()[0] = 99
    with pytest.raises(BindError, match="column 99"):
        f.spmm(a, x)


def test_diagonals():
    values, offsets = torch.randn(3, 6, dtype=torch.float64), [0, 2, -3]
    for shape in ((5, 6), (8, 4), (3, 9)):
        want = torch.zeros(shape, dtype=torch.float64)
        for d, offset in enumerate(offsets):
            for j in range(min(6, shape[1])):
                if 0 <= j - offset < shape[0]:
                    want[j - offset, j] = values[d, j]
        assert torch.equal(f.diagonals(values, offsets, shape).to_dense(), want)
    x = torch.randn(6, 2, dtype=torch.float64)
    product = lambda v: f.spmm(f.diagonals(v, offsets, (5, 6)), x)  # noqa: E731
    torch.autograd.gradcheck(product, values.requires_grad_(), rtol=GRADIENT)


@pytest.mark.sweep
def test_operators_are_torchs_too():
    a = sparse(dense(), "csr")
    parts = a.crow_indices(), a.col_indices()
    values, x = a.values().clone().requires_grad_(), torch.randn(12, 3).double().requires_grad_()
    known = None, None, None
    torch.library.opcheck(torch.ops.deuteron.op_spmm_csr.default, (*parts, values, x, *known))
    left = torch.randn(20, 3).double().requires_grad_()
    f.sddmm_csr(*parts, left, x)
    how = {"block": ()}
    torch.library.opcheck(torch.ops.deuteron.op_sddmm_csr.default, (*parts, left, x), how)


@pytest.mark.sweep
def test_within_torch_compile():
    a, x = sparse(dense(), "csr"), torch.randn(12, 3).double()
    parts = [t.clone() for t in (a.crow_indices(), a.col_indices(), a.values())]
    whole = torch.compile(lambda x: f.spmm_csr(*parts, x) * 2, backend="eager", fullgraph=True)
    broken = torch.compile(lambda x: f.spmm(a, x) * 2, backend="eager")
    assert error(whole(x), 2 * dense() @ x) <= DOUBLE
    assert error(broken(x), 2 * dense() @ x) <= DOUBLE


def test_a_plan_transposes_a_known_matrix_when_it_is_made():
    a, x = sparse(dense(kind=torch.float32), "csr"), torch.randn(12, 3)
    g = dt.Graph("sparse")
    parts = [g.constant(t) for t in (a.crow_indices(), a.col_indices(), a.values())]
    g.spmm_csr(*parts, g.tensor("x", (12, 3))).output("y")
    plan = g.grad("y", wrt=["x"]).compile(device="cpu")
    assert [c.region.ops for c in plan.decision.choices] == [("spmm_csr",), ("spmm_csr",)]
    got = plan.run(x=x, grad_y=torch.ones(20, 3))
    assert error(got["grad_x"], dense().t() @ torch.ones(20, 3).double()) <= SINGLE_LAYERS


# ---- modules


class Module(nn.Module):
    def __init__(self, w: torch.Tensor, call, parameter: bool) -> None:
        super().__init__()
        self.call = call
        if parameter:
            self.w = nn.Parameter(w)
        else:
            self.register_buffer("w", w)
        self.b = nn.Parameter(torch.randn(20))

    def forward(self, x):
        return self.call(self, x)


CALLS = {
    "torch.sparse.mm": ((12, 5), lambda m, x: torch.sparse.mm(m.w, x)),
    "torch.mm": ((12, 5), lambda m, x: torch.mm(m.w, x)),
    "@": ((12, 5), lambda m, x: m.w @ x),
    "a vector": ((12,), lambda m, x: m.w @ x),
    "addmm": ((12, 5), lambda m, x: torch.addmm(m.b[:, None], m.w, x, beta=0.5, alpha=2)),
    "linear": ((2, 3, 12), lambda m, x: F.linear(x, m.w)),
    "linear with a bias": ((3, 12), lambda m, x: F.linear(x, m.w, m.b)),
    "from the right": ((3, 20), lambda m, x: x @ m.w),
    "transposed": ((20, 3), lambda m, x: m.w.t() @ x),
    "twice": ((12, 5), lambda m, x: torch.sparse.mm(m.w.t(), torch.sparse.mm(m.w, x))),
    "scaled": ((12, 5), lambda m, x: (m.w * 2) @ x),
    "made dense": ((12, 5), lambda m, x: m.w.to_dense() @ x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_with_a_sparse_tensor_gives_eagers_numbers(layout, call):
    shape, fn = CALLS[call]
    x = torch.randn(shape)
    model = Module(sparse(dense(kind=torch.float32), layout), fn, parameter=layout == "csr").eval()
    try:
        with torch.no_grad():
            want = model(x)
    except RuntimeError:  # torch on this machine has no such product: said in its words
        with pytest.raises(DeuteronError, match="itself refuses"):
            dt.optimize(model, x, find=False)
        return
    fast = dt.optimize(model, x, find=False)
    assert error(fast(x), want) <= SINGLE_LAYERS
    ops = [op for c in fast.plan.decision.choices for op in c.region.ops]
    assert "aten" not in ops and ("spmm_csr" in ops) == (call != "made dense")


def test_weights_are_copied_followed_and_saved(tmp_path):
    w, x = sparse(dense(kind=torch.float32), "csr"), torch.randn(12, 5)
    model = Module(w, lambda m, x: m.w @ x, parameter=False).eval()
    fast, follows = (dt.optimize(model, x, find=False, follow=each) for each in (False, True))
    want = model(x).detach()
    fast.save(tmp_path / "plan")
    assert error(dt.load(tmp_path / "plan")(x), want) <= SINGLE_LAYERS
    with torch.no_grad():
        w.values().mul_(3)
    assert error(fast(x), want) <= SINGLE_LAYERS
    assert error(follows(x), 3 * want) <= SINGLE_LAYERS


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, x: m.w + x, r"aten.add.Tensor of the sparse tensor 'w'.*no product"),
        (lambda m, x: (m.w, x)[0], "what forward returns is a sparse tensor"),
        (lambda m, x: x.to_sparse() @ torch.ones(12, 1), "sparse tensor"),
    ],
)
def test_a_module_that_does_something_else_is_refused(call, says):
    model = Module(sparse(dense(kind=torch.float32), "csr"), call, parameter=False).eval()
    with pytest.raises(GraphError, match=says):
        dt.optimize(model, torch.randn(20, 12), find=False)


def test_a_module_in_training_mode_is_refused():
    model = Module(sparse(dense(kind=torch.float32), "csr"), CALLS["@"][1], parameter=True)
    with pytest.raises(GraphError, match=r"sparse tensor 'w'(?s:.*)model.eval"):
        dt.optimize(model, torch.randn(12, 5), find=False)


# ---- what is wrong is said


def test_bad_inputs_are_refused_before_anything_is_read():
    a, x = sparse(dense(), "csr"), torch.randn(12, 3).double()
    hybrid = torch.sparse_csr_tensor([0, 1], [0], torch.ones(1, 3), (1, 1, 3))
    starts = torch.sparse_csr_tensor(
        torch.tensor([0, 3, 1]), torch.zeros(1).long(), torch.ones(1).double(), (2, 12)
    )
    for call, says in (
        (lambda: f.spmm(dense(), x), "not sparse"),
        (lambda: f.spmm(a, x.float()), "torch.float32"),
        (lambda: f.spmm(a, x[:5]), "12 columns"),
        (lambda: f.spmm(a, x[None]), "rank 3"),
        (lambda: f.spmm(a, sparse(dense(12, 12), "csr")), "dense tensor"),
        (lambda: f.spmm(hybrid, torch.ones(1, 1)), "dense dimensions"),
        (lambda: f.spmm(starts, x), "rise from 0 to 1"),
        (lambda: f.sparse_linear(x.t(), a, torch.ones(3).double()), "bias"),
        (lambda: f.to_2_4(torch.ones(4, 8)), "only GPUs"),
        (lambda: f.to_2_4(torch.ones(4, 7)), "multiple of 4"),
        (lambda: f.diagonals(torch.ones(2, 3), [1], (3, 3)), "each of 1"),
        (lambda: f.diagonals(torch.ones(2, 3), [1, 1], (3, 3)), "twice"),
    ):
        with pytest.raises(BindError) as found:
            call()
        assert says in str(found.value) and "remedy" in str(found.value)


@pytest.mark.parametrize("op", ["spmm_csr", "sddmm_csr"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("bad", [-1, 12, 2**40])
def test_a_plan_refuses_columns_that_are_none(op, known, bad):
    starts, columns = torch.tensor([0, 2, 3]), torch.tensor([0, bad, 1])
    first, x = torch.ones(3) if op == "spmm_csr" else torch.ones(2, 4), torch.ones(12, 4)
    g = dt.Graph(op)
    feed = {"starts": starts, "columns": columns, "first": first, "x": x}
    made = {
        n: g.constant(t, n)
        if known and n in ("starts", "columns")
        else g.tensor(n, t.shape, t.dtype)
        for n, t in feed.items()
    }
    getattr(g, op)(*made.values()).output("y")
    given = {n: t for n, t in feed.items() if not (known and n in ("starts", "columns"))}
    with pytest.raises(DeuteronError, match=f"column {bad} is out of range"):
        g.compile(device="cpu").run(**given)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((3,), (4,), (5,), (6, 2)), "do not fit 4 columns"),
        (((3,), (4,), (4,), (6,)), "rank 1"),
        (((0,), (4,), (4,), (6, 2)), "row_starts is empty"),
        (((3,), (4,), (4, 2, 4), (6, 2)), "no multiple"),
        (((3, 1), (4,), (4,), (6, 2)), "row_starts has rank 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, says):
    g = dt.Graph("bad")
    kinds = (torch.int64, torch.int64, torch.float32, torch.float32)
    given = [g.tensor(f"t{i}", s, k) for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))]
    with pytest.raises(GraphError, match=says):
        g.spmm_csr(*given)


def test_in_inference_mode():
    """Its tensors do not say when they were written to: they are looked at in every call."""
    with torch.inference_mode():
        d = dense(kind=torch.float32)
        a, x = d.to_sparse_csr(), torch.randn(d.shape[1], 3)
        for _ in range(2):
            assert error(f.spmm(a, x), d.double() @ x.double()) <= SINGLE_LAYERS
