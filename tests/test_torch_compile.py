"""``torch.compile(model, backend="deuteron")``, as people train and run with it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron import torch_captured, torch_compile
from deuteron.engines import match
from deuteron.kernels.cpu.dropout import draws_like_torch
from tests.tolerances import SINGLE, SINGLE_LAYERS, allowed, error

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    def forward(self, x, y):
        return F.cross_entropy(self.parts(x), y)


class Words(nn.Module):
    """Attention, dropout, and an embedding that is the last layer's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, x, y):
        hidden = self.layer(self.embed(x))
        return F.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), y.flatten())


CASES = {
    "images": (Images, lambda n: (torch.randn(n, 3, 12, 12), torch.randint(0, 10, (n,)))),
    "words": (Words, lambda n: (torch.randint(0, 50, (n, 7)), torch.randint(0, 50, (n, 7)))),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_eagers(name, halves):
    """Losses, gradients, running statistics and random numbers, step by step."""
    torch.manual_seed(0)
    kind, batch = CASES[name]
    plain = kind()
    ours = copy.deepcopy(plain)
    fast = torch.compile(ours, backend=dt.backend)
    both = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, ours)]
    for seed in range(3):
        given = batch(4)
        losses = []
        for model, optimiser in zip((plain, fast), both, strict=True):
            torch.manual_seed(seed)
            optimiser.zero_grad()
            losses.append(model(*given))
            losses[-1].backward()
            optimiser.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
        for mine, theirs in zip(
            ours.state_dict().values(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    assert len(halves) == 2, "forward and backward, planned once"


def test_inference_casts_breaks_and_writes_to_inputs(halves):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, seen):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.linear(x)
            torch._dynamo.graph_break()
            seen.add_(1)
            return x.float().softmax(-1), seen[:2]

    model = Odd().eval()
    fast = torch.compile(model, backend=dt.backend)
    x, a, b = torch.randn(5, 8), torch.zeros(3), torch.zeros(3)
    with torch.no_grad():
        (got, view), (want, _) = fast(x, a), model(x, b)
    torch.testing.assert_close(got, want, rtol=SINGLE, atol=SINGLE)
    assert torch.equal(a, b) and view.data_ptr() == a.data_ptr()
    assert len(halves) == 2, "one for each piece"


def test_numbers_that_fill_a_tensor_may_be_seen_otherwise():
    def filled(x):
        return x + torch.full((4, 6), 2.0).as_strided((6, 4), (1, 6))

    x = torch.randn(6, 4)
    assert torch.equal(torch.compile(filled, backend=dt.backend)(x), filled(x))


def test_sizes_vary(halves):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
    fast = torch.compile(model, backend=dt.backend, dynamic=True)
    for n in (3, 5, 3, 9):
        x = torch.randn(n, 8, requires_grad=True)
        got, want = fast(x), model(x)
        torch.testing.assert_close(got, want, rtol=SINGLE, atol=SINGLE)
        mine, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(mine, theirs, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    assert len(halves) == 6, "forward and backward of three sizes"


@pytest.mark.parametrize("dynamic", [False, True])
def test_groups_of_16_bits_with_a_weight_of_32_have_eagers_gradients(dynamic):
    """Torch's tracer takes the gradient of such a group norm for one of 32 bits."""
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8))
    ours = copy.deepcopy(plain)
    fast = torch.compile(ours, backend=dt.backend, dynamic=dynamic)
    x, scale = torch.randn(2, 3, 6, 6), torch.randn(2, 8, 4, 4)
    for call in (plain, fast):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        (y * scale).sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert error(mine.grad, theirs.grad) <= 2**-6


def test_memory_orders_vary():
    """torch.compile takes the second for a size that varies, and says so by strides alone."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    fast = torch.compile(model, backend=dt.backend)
    x = torch.randn(2, 3, 6, 6)
    for given in (x, x.to(memory_format=torch.channels_last), x):
        got, want = (torch.autograd.grad(f(given).sum(), model[0].weight) for f in (fast, model))
        torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


def test_cells_of_recurrent_networks_are_ours():
    cell, x, plans = nn.GRUCell(4, 6), torch.randn(2, 4), []
    fast = torch.compile(cell, backend=dt.backend, options={"plans": plans})
    params = list(cell.parameters())
    got, want = (torch.autograd.grad(f(x).square().sum(), params) for f in (fast, cell))
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    assert not any(node.op == "aten" for plan in plans for node in plan.graph.nodes)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_of_a_convolution(dim):
    """What torch calls for its gradient reads memory as if the weight's gradient were row-major."""
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    fast, x = torch.compile(layer, backend=dt.backend), torch.randn(2, 4, 7)
    params = list(layer.parameters())
    got, want = (torch.autograd.grad(f(x).sin().sum(), params) for f in (fast, layer))
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


def test_linear_algebra_complains_as_eagers():
    """torch looks at what a factorisation found in a call of its own, made for its effect alone."""

    def spread(x):
        matrix = x @ x.mT + torch.eye(3)
        return torch.linalg.cholesky(matrix).sum() + torch.linalg.inv(x + 3 * torch.eye(3)).sum()

    fast, x = torch.compile(spread, backend=dt.backend), torch.randn(2, 3, 3, requires_grad=True)
    got, want = (torch.autograd.grad(f(x), x)[0] for f in (fast, spread))
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    singular = -3 * torch.eye(3).expand(2, 3, 3)
    for given in (singular, singular.requires_grad_()):
        for f in (spread, fast):
            with pytest.raises(torch.linalg.LinAlgError, match="singular"):
                f(given)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"fast": True}, "no option 'fast'"), ({"budget_s": "2"}, "budget_s is '2'")],
)
def test_options_are_checked(options, says):
    fast = torch.compile(nn.Linear(2, 2), backend=dt.backend, options=options)
    with pytest.raises(Exception, match=says):
        fast(torch.randn(1, 2))


def test_options_are_passed_on(halves):
    options = {"find": True, "budget_s": 0.5, "policy": dt.Policy(deterministic=True)}
    torch.compile(nn.Linear(4, 4), backend=dt.backend, options=options)(torch.randn(2, 4))
    assert all(half.plan.decision.mode == "found" for half in halves)
    assert all(half.plan.decision.policy.deterministic for half in halves)


def test_dropout_draws_what_torch_draws(halves):
    """The same elements are dropped, by whichever kernel, and the generator goes on as torch's."""

    def drop(x):
        return F.dropout(x.relu(), 0.3) * 2

    x = torch.randn(317, 411, requires_grad=True)
    torch.manual_seed(4)
    want, after = drop(x), torch.randn(3)
    for find in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(drop, backend=dt.backend, options={"find": find})
        torch.manual_seed(4)
        assert torch.equal(fast(x), want)
        assert torch.equal(torch.randn(3), after)
    if draws_like_torch():
        recipes = [c.candidate.knobs.get("recipe") for c in halves[0].plan.decision.choices]
        assert "dropout" in recipes


def test_seeded_dropout_stores_no_mask(halves):
    """The gradient finds the dropped elements again, and the seed is torch's generator's."""

    def drop(x):
        return F.dropout(x, 0.3) + F.dropout(x, 0.3, inplace=False)

    fast = torch.compile(drop, backend=dt.backend, options={"policy": dt.Policy(random="seeded")})
    x = torch.ones(64, 96, requires_grad=True)
    found = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        y = fast(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, y)  # ones were given: the result is the mask, and so is its slope
        assert abs(float(y.detach().mean()) - 2.0) < 0.1
        found.append(y)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    outputs = halves[0].plan.graph.outputs
    assert not {"bool", "u8"} & {halves[0].plan.graph.types[v].dtype.short for _, v in outputs}


def _triangle(x, n):
    places = torch.arange(n, device=x.device)
    return places <= places[:, None] + 0


MASKS = {  # a mask, whether it can do without, and what hides what comes later
    "a triangle": (lambda x, n: _triangle(x, n)[None, None].expand(2, -1, n, n), True, True),
    "all seen": (lambda x, n: (torch.arange(n)[:, None] >= 0).expand(2, 1, n, n), True, False),
    "zeros": (lambda x, n: torch.zeros(n, n), True, False),
    "a window": (lambda x, n: _triangle(x, n) & ~_triangle(x, n).tril(-3), False, False),
    "numbers": (lambda x, n: torch.where(_triangle(x, n), 0.0, -1.0), False, False),
    "given": (lambda x, n: x[0, 0, :, :1] > 0, False, False),
    "drawn": (lambda x, n: torch.rand(n, n) > -1, False, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_known_are_named(name, monkeypatch):
    make, goes, later = MASKS[name]
    said = []

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, make(x, 5), dropout_p=0.25)

    def noted(q, k, v, *rest, **how):
        said.append((rest[0] if rest else how.get("attn_mask"), how.get("is_causal")))
        return F.scaled_dot_product_attention(q, k, v, *rest, **how)

    x = torch.randn(2, 3, 5, 8)
    torch.manual_seed(3)
    want = attend(x)
    monkeypatch.setattr(torch_captured, "_attention", noted)
    torch.manual_seed(3)
    got = torch.compile(attend, backend=dt.backend)(x)
    assert error(got, want) <= SINGLE
    assert [(mask is None, bool(causal)) for mask, causal in said[:1]] == [(goes, later)]


def test_nothing_can_be_dropped_of_nothing():
    fast = torch.compile(lambda x: F.dropout(x, 0.5) + 1, backend=dt.backend)
    assert fast(torch.ones(0, 4, requires_grad=True)).shape == (0, 4)


def test_conditions_are_refused_in_words():
    fast = torch.compile(
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
        backend=dt.backend,
    )
    with pytest.raises(Exception, match=r"torch\.cond and torch\.while_loop hold graphs"):
        fast(torch.ones(3))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_in_words(table):
    fast = torch.compile(table(5, 3, sparse=True), backend=dt.backend)
    with pytest.raises(Exception, match=r"a tensor that is sparse_coo(?s:.*)sparse=False"):
        fast(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("how", ["compile", "optimize"])
def test_zeros_may_be_written_to(how, dtype):
    """A loop after a break of the graph adds to them; the next call has zeros of its own."""

    class Zeros(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x), x * 2

    x, model = torch.ones(4, 5, dtype=dtype), Zeros().eval()
    if how == "optimize":
        made = dt.optimize(model, x, find=False)
    else:
        made = torch.compile(model, backend="deuteron")
    for _ in range(2):
        zeros, _ = made(x)
        assert zeros.stride() == (5, 1) and not zeros.any()
        zeros.index_add_(0, torch.tensor([1]), torch.ones(1, 5, dtype=dtype))


LOSSES = {
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.7),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="sum", delta=1.5),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce weighted": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), y.abs(), reduction="none", pos_weight=y[0] + 3
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_ours(name, kind):
    x, y = (2 * torch.randn(6, 5).to(kind)).requires_grad_(), torch.randn(6, 5).to(kind)
    plans, f = [], LOSSES[name]
    fast = torch.compile(f, backend=dt.backend, options={"plans": plans})
    wide = x.detach().double().requires_grad_()
    right = torch.autograd.grad(f(wide, y.double()).sum(), wide)[0]
    got, theirs = (torch.autograd.grad(g(x, y).sum(), x)[0] for g in (fast, f))
    assert error(got, right) <= allowed(error(theirs, right), kind)
    assert not any(node.op == "aten" for plan in plans for node in plan.graph.nodes)


BY_INDEX = {
    "index_add": lambda x, i, w: torch.zeros(5, 3).index_add(0, i, x * w),
    "to a sum": lambda x, i, w: (x[:5] + 1).index_add(0, i, x * w, alpha=2),
    "columns": lambda x, i, w: torch.zeros(9, 5).index_add(1, i[:3], x * w),
    "scatter_add": lambda x, i, w: torch.zeros(5, 3).scatter_add(0, i[:, None].expand(9, 3), x * w),
    "gather": lambda x, i, w: (x * w)[i - 5] * x,
    "gather pairs": lambda x, i, w: (x * w)[i.view(3, 3)].sin(),
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_sums_by_index_are_ours(name):
    """Messages of a graph that are added up, and gradients of what was looked up."""
    x, i, w = torch.randn(9, 3), torch.randint(0, 5, (9,)), torch.randn(3, requires_grad=True)
    x.requires_grad_()
    plans, f = [], BY_INDEX[name]
    fast = torch.compile(f, backend=dt.backend, options={"plans": plans})
    got, want = (torch.autograd.grad(g(x, i, w).square().sum(), [x, w]) for g in (fast, f))
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    assert not any(node.op == "aten" for plan in plans for node in plan.graph.nodes)


def test_statistics_of_16_bits_stay_in_their_type():
    """Of a model wholly of 16 bits: torch's tracer takes its running statistics for float32."""
    kind = torch.float16
    ours = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to(kind)
    theirs = copy.deepcopy(ours).double()
    x = torch.randn(2, 3, 4, 4).to(kind)
    torch.compile(ours, backend="deuteron")(x).sum().backward()
    theirs(x.double())
    for name, want in theirs[1].named_buffers():
        got = ours[1].get_buffer(name)
        assert got.dtype == (kind if want.is_floating_point() else torch.int64)
        assert error(got, want) <= allowed(0.0, kind, 3)


def test_what_is_computed_without_gradients_can_be_written_to():
    """Rows that a plan sees as a batch are no view to who calls it: autograd refuses to write to
    views that were made without it."""
    model, start = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)), torch.ones(32)
    start.requires_grad_()
    compiled = torch.compile(lambda x: (model(x.transpose(1, 2)), x + 1), backend="deuteron")
    with torch.no_grad():
        y, _ = compiled(torch.randn(2, 16, 9))
    y[:, 0] = start
    y.sum().backward()
    assert start.grad is not None and start.grad.eq(2).all()


def test_a_plan_keeps_nothing_of_those_who_asked_for_it():
    """An engine says why it refuses a region once; nobody who waited for that, and no tensor of
    theirs, lives as long as the answer. A loss that lived on would keep steps from being captured.
    """
    match._lowered.cache_clear()  # which other tests have filled

    def trains() -> tuple[object, weakref.ref[torch.Tensor]]:
        model, x, y = Images(), torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
        alone = x * 1
        compiled = torch.compile(model, backend="deuteron")
        compiled(x, y).backward()
        return compiled, weakref.ref(alone)

    compiled, alone = trains()
    gc.collect()
    assert alone() is None
    del compiled


@pytest.mark.parametrize("step", [1, 2, 3])
def test_gradients_of_windows_that_overlap(step):
    """AOTAutograd lays the gradient of a result out like the result, and loses numbers there."""

    def windows(x):
        return (x * 2).unfold(1, 3, step)

    x, weight = torch.randn(4, 9), torch.randn(windows(torch.zeros(4, 9)).shape)
    found = []
    for function in (windows, torch.compile(windows, backend="deuteron")):
        given = x.clone().requires_grad_()
        (function(given) * weight).sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0])


def test_torch_export_decomposes_after_it_as_before():
    """It remembers which calls are made of others from when it is first asked, perhaps by a
    compiler within ours."""
    from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace as made_of_others

    made_of_others.cache_clear()
    with torch_compile._whole():
        made_of_others()
    table = torch.export.default_decompositions()
    table.update({torch.ops.aten._upsample_nearest_exact1d.default: lambda *given: given[0]})
    program = torch.export.export(nn.Upsample(scale_factor=2), (torch.randn(1, 2, 4, 4),))
    program.run_decompositions(table)
