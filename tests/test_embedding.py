"""Embeddings with all that ``torch.nn.Embedding`` can be asked for: ``max_norm``, gradients divided
by frequency, sparse gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.frontends.builder import Graph
from tests.tolerances import DOUBLE, EPS, allowed, error

f = dt.functional
INDEX = torch.tensor([[1, 1, 3], [0, 4, 1]])
OPTIONS = {
    "max_norm": {"max_norm": 1.0},
    "norm of 1": {"max_norm": 0.5, "norm_type": 1.0},
    "longest": {"max_norm": 0.4, "norm_type": float("inf")},
    "frequency": {"scale_grad_by_freq": True},
    "frequency, padding": {"scale_grad_by_freq": True, "padding_idx": -2},
    "all but sparse": {"max_norm": 0.5, "scale_grad_by_freq": True, "padding_idx": 1},
    "sparse": {"sparse": True},
    "sparse, padding": {"sparse": True, "padding_idx": 1},
    "sparse, max_norm": {"sparse": True, "max_norm": 1.0},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
# a sparse gradient with a padding row torch itself cannot compile, nor take of an index of rank 0
COMPILED = pytest.mark.parametrize(
    "options",
    [o for n, o in OPTIONS.items() if n != "sparse, padding"],
    ids=[n for n in OPTIONS if n != "sparse, padding"],
)


@pytest.fixture(autouse=True)
def handed_on(planned):
    """What only torch's calls do may be handed on to them."""
    with f.delegation(True):
        yield


def pair(options: dict, dtype: torch.dtype = torch.float64) -> tuple[nn.Embedding, nn.Embedding]:
    torch.manual_seed(0)
    theirs = nn.Embedding(5, 4, **options, dtype=dtype)
    ours = dt.nn.Embedding(5, 4, **options, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def trained(module: nn.Module, weight: torch.Tensor, index: torch.Tensor, *more: torch.Tensor):
    """The result, the gradient and what has become of the table."""
    y = module(index, *more)
    (grad,) = torch.autograd.grad(y.sin().sum(), weight)
    return y.detach(), grad, weight.detach()


def same(found, wanted) -> None:
    assert found[1].layout is wanted[1].layout
    for a, b in zip(found, wanted, strict=True):
        assert error(a.to_dense(), b.to_dense()) <= DOUBLE


@EVERY
def test_numbers_gradients_and_the_table_are_torchs(options):
    ours, theirs = pair(options)
    for index in (INDEX, INDEX.t(), INDEX.int(), INDEX[0, :1], INDEX[:0]):
        same(trained(ours, ours.weight, index), trained(theirs, theirs.weight, index))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == repr(theirs)


@EVERY
def test_a_position_may_be_added(options):
    ours, theirs = pair(options)
    where = torch.randn(3, 4, dtype=torch.float64)
    want = trained(lambda i: theirs(i) + where, theirs.weight, INDEX)
    same(trained(ours, ours.weight, INDEX, where), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_plan_divides_gradients_by_frequency(dtype):
    """Each is divided and added in float32: closer than torch's, which rounds every sum."""
    torch.manual_seed(0)
    weight = torch.randn(7, 33).to(dtype).requires_grad_()
    index = torch.randint(0, 7, (9, 21))
    seed = torch.randn(9, 21, 33).to(dtype)
    exact = weight.detach().double().requires_grad_()
    options = {"padding_idx": 2, "scale_grad_by_freq": True}
    F.embedding(index, exact, **options).backward(seed.double())
    theirs = weight.detach().clone().requires_grad_()
    F.embedding(index, theirs, **options).backward(seed)
    with f.delegation(False):
        f.embedding(index, weight, **options).backward(seed)
    assert weight.grad.dtype is dtype
    assert error(weight.grad, exact.grad) <= allowed(error(theirs.grad, exact.grad), dtype)


def test_a_second_derivative_of_one_by_frequency():
    """By finite differences of the first: torch's own forgets the division there."""

    weight = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)

    def gradient(seed):
        with f.delegation(False):
            y = f.embedding(INDEX, weight, scale_grad_by_freq=True)
        return torch.autograd.grad(y, weight, seed, create_graph=True)[0]

    seed = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gradient, seed)


@EVERY
def test_copies_pickles_and_pretrained_tables(options):
    ours, theirs = pair(options)
    table = theirs.weight.detach().clone()
    want = theirs(INDEX)
    made = dt.nn.Embedding.from_pretrained(table.clone(), freeze=False, **options)
    for module in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), made):
        assert type(module) is dt.nn.Embedding
        assert error(module(INDEX), want) <= DOUBLE
        assert repr(module) == repr(theirs)


@EVERY
def test_replacing(options):
    theirs = pair(options)[1]
    model = dt.nn.replace(nn.Sequential(copy.deepcopy(theirs)))
    assert type(model[0]) is dt.nn.Embedding
    same(trained(model, model[0].weight, INDEX), trained(theirs, theirs.weight, INDEX))


@COMPILED
def test_compiled_as_torch_compiles_its_own(options):
    found = []
    for module in pair(options):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        compiled(INDEX).sin().sum().backward()
        found.append((module.weight.grad, module.weight.detach()))
    assert found[0][0].layout is found[1][0].layout
    for a, b in zip(*found, strict=True):
        assert error(a.to_dense(), b.to_dense()) <= DOUBLE


def _gradient(call, table):
    return torch.func.grad(lambda w: call(INDEX, w).sin().sum())(table)


def _batched(call, table):
    return torch.func.vmap(lambda w: call(INDEX, w))(torch.stack((table, table + 1.0)))


def _forward(call, table):
    return torch.func.jvp(lambda w: call(INDEX, w), (table,), (table.cos(),))[1]


@EVERY
@pytest.mark.parametrize("transform", [_gradient, _batched, _forward])
def test_transforms_of_torch_func(transform, options):
    found = []
    for call in (f.embedding, F.embedding):
        table = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        got = transform(lambda i, w, call=call: call(i, w, **options), table)
        found.append((got.to_dense(), table))
    for a, b in zip(*found, strict=True):
        assert error(a, b) <= DOUBLE


def test_an_explanation_says_what_was_handed_on():
    weight = torch.randn(5, 4)
    assert "its gradient is sparse" in f.explain(f.embedding, INDEX, weight, sparse=True)
    said = f.explain(f.embedding, INDEX, weight, max_norm=1.0)
    assert "embedding_renorm_" in said and "max_norm writes to weight" in said
    assert weight[INDEX].norm(dim=-1).max() <= 1.0 + 5 * EPS[torch.float32]


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}], ids=str)
def test_what_is_torchs_alone_is_refused_where_that_is_forbidden(options):
    weight = torch.ones(5, 4)
    (name,) = options
    with f.delegation(False), pytest.raises(dt.BindError, match=f"no plan of ours does {name}"):
        f.embedding(INDEX, weight, **options)
    assert torch.equal(weight, torch.ones(5, 4))


def test_a_graph_divides_gradients_by_frequency():
    g = Graph("lookup")
    weight, index = g.tensor("w", (5, 4), dt.float64), g.tensor("i", (2, 3), dt.int64)
    g.embedding(weight, index, scale_grad_by_freq=True).output("y")
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(2, 3, 4, dtype=torch.float64)
    found = g.grad("y", wrt=["w"]).compile(device="cpu").run(w=w.detach(), i=INDEX, grad_y=seed)
    F.embedding(INDEX, w, scale_grad_by_freq=True).backward(seed)
    assert error(found["grad_w"], w.grad) <= DOUBLE


def test_a_table_on_the_host_is_updated_where_it_was_read():
    """Rows and updates are those of torch's sparse embedding; other rows are not touched, nor does
    the table move with the model."""
    torch.manual_seed(0)
    table, plain = dt.nn.HostEmbedding(50, 4), nn.Embedding(50, 4, sparse=True)
    plain.load_state_dict(table.state_dict())
    both = [(m, torch.optim.SparseAdam(m.parameters(), lr=0.1)) for m in (table, plain)]
    before, read = table.weight.detach().clone(), set()
    for _ in range(3):
        index, weights = torch.randint(0, 50, (3, 5)), torch.randn(3, 5, 4)
        read |= set(index.flatten().tolist())
        for module, optimizer in both:
            optimizer.zero_grad()
            (module(index) * weights).sum().backward()
            optimizer.step()
        assert table.weight.grad.is_sparse and torch.equal(table.weight, plain.weight)
    changed = (table.weight != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == read
    assert table.double().weight.dtype == torch.float64 and table.to("meta").weight.is_cpu
    assert table(index[:0]).shape == (0, 5, 4)
    with pytest.raises(dt.BindError, match="the table has 50 rows"):
        table(torch.tensor([3, 50]))
    with pytest.raises(dt.BindError, match="the index is torch"):
        table(torch.rand(3))


def test_a_second_derivative_of_a_table_on_the_host_is_refused():
    table, weights = dt.nn.HostEmbedding(10, 4), torch.randn(4, requires_grad=True)
    y = (table(torch.tensor([1, 2])) * weights).sum()
    (grad,) = torch.autograd.grad(y, table.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad.to_dense().square().sum() + weights.sum()).backward()


class Rows(nn.Module):
    """A table and what is computed of its rows."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.last = table, nn.Linear(4, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(index).mean(1))


def assert_steps_update_rows_read(device: str, apart: bool) -> None:
    """As a loop with torch's sparse embedding on the CPU does, with the table in the step's own
    optimiser, whose gradients are clipped together, or ``apart`` in another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours, plain = Rows(dt.nn.HostEmbedding(50, 4)), Rows(nn.Embedding(50, 4, sparse=True))
    plain.load_state_dict(ours.state_dict())
    ours.to(device)
    before, read, sgd = ours.table.weight.detach().clone(), set(), torch.optim.SGD
    own = [m.last.parameters() if apart else m.parameters() for m in (ours, plain)]
    first = dt.optim.SGD(own[0], lr=0.1) if apart else sgd(own[0], lr=0.1)
    steppers = first, sgd(own[1], lr=0.1)
    others = [torch.optim.SparseAdam(m.table.parameters(), lr=0.1) for m in (ours, plain)]
    batches = [(torch.randint(0, 50, (3, 5)), torch.randint(0, 3, (3,))) for _ in range(4)]
    how = {"max_norm": 0.01, "accumulate": 2}
    step = dt.train_step(ours, F.cross_entropy, steppers[0], batches[0], **how)
    for i, (index, target) in enumerate(batches):
        read |= set(index.flatten().tolist())
        step(index, target)
        (F.cross_entropy(plain(index), target) / 2).backward()
        if i % 2:
            rows = plain.table.weight.grad.coalesce()
            plain.table.weight.grad = rows
            dense = [rows.values()] * (not apart) + [p.grad for p in plain.last.parameters()]
            part = min(1.0, 0.01 / float(nn.utils.get_total_norm(dense)))
            for grad in dense:
                grad *= part
            steppers[1].step()
            for other in others * apart:
                other.step()
            plain.zero_grad()
    for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), want)
    changed = (ours.table.weight != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == read and ours.table.weight.is_cpu and ours.last.weight.grad is None
    assert not step.captured and (device == "cpu" or "on the host" in step.note)


@pytest.mark.parametrize(
    "apart", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["one optimiser", "two"]
)
def test_steps_update_the_rows_that_were_read(apart):
    assert_steps_update_rows_read("cpu", apart)


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True], ids=["one optimiser", "two"])
def test_steps_on_a_gpu_update_the_rows_that_were_read(apart):
    assert_steps_update_rows_read("cuda", apart)


@pytest.mark.gpu
def test_rows_of_a_table_on_the_host_come_to_the_gpu():
    table = dt.nn.HostEmbedding(1_000_000, 64).cuda()
    torch.cuda.reset_peak_memory_stats()
    before, index = torch.cuda.memory_allocated(), torch.randint(0, 1_000_000, (4, 16))
    found = table(index)
    assert found.is_cuda and table.weight.is_cpu
    assert torch.cuda.max_memory_allocated() - before < table.weight.nbytes / 100
    torch.testing.assert_close(found.cpu(), F.embedding(index, table.weight))
    found.square().sum().backward()
    want = 2 * found.detach().cpu().flatten(0, 1)
    dense = torch.zeros_like(table.weight).index_add_(0, index.flatten(), want)
    torch.testing.assert_close(table.weight.grad.to_dense(), dense)
