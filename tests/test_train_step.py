"""``dt.train_step`` beside the plain loop: every number of it, and what goes wrong."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.errors import BindError, DeuteronError, FileError, GraphError
from deuteron.training import host
from tests.recorded import Recorded, on_the_cpu
from tests.sweeps import one_in
from tests.tolerances import EPS, NETWORK, SINGLE_LAYERS, TRAINED, error
from tests.training_cases import (
    CHANGES,
    RUNS,
    Images,
    Layers,
    Words,
    adamw,
    batches,
    both,
    change,
    gradients,
    images,
    same,
    sgd,
    trained,
    vectors,
    words,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def captured(monkeypatch):
    """As on a GPU: operators are recorded, and replayed with the numbers of then."""
    on_the_cpu(monkeypatch)


LOOPS = {
    "images": (Images, sgd, images, [4, 4, 3, 4], {}),
    "words": (Words, sgd, words, [4, 4], {"max_norm": 0.1}),
    "groups": (Layers, adamw, vectors, [8, 8, 8], {"max_norm": 0.1}),
    "ours": (Layers, partial(adamw, kind=dt.optim.AdamW), vectors, [8, 8, 8], {"max_norm": 0.1}),
    "several": (Layers, adamw, vectors, [8] * 7, {"accumulate": 3, "max_norm": 0.1}),
}


@pytest.mark.parametrize("name", one_in(2, LOOPS))
def test_a_loop_is_eagers(name):
    """With rates that a scheduler changes, and settings that the user changes."""
    model, make, data, sizes, how = LOOPS[name]
    step, plain = both(model, make, next(batches(data, [4])), **how)
    rates = [torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.8) for each in (step, plain)]
    for k, batch in enumerate(batches(data, sizes)):
        same(step, plain, batch, k)
        for rate, each in zip(rates, (step, plain), strict=True):
            if not (k + 1) % how.get("accumulate", 1):
                rate.step()
            each.optimizer.param_groups[0]["weight_decay"] = 0.1 * k
    assert not step.captured and "CPU" in step.note
    assert (step.grad_norm is None) == ("max_norm" not in how)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_casts(autocast):
    """float16 brings a scaler: steps that overflow by its first scale are skipped, and counted."""
    step, plain = both(Layers, sgd, next(batches(vectors, [8])), autocast=autocast)
    if autocast is torch.float16:
        for each in (step, plain):
            each.scaler._init_scale = 2.0**20
    for k, batch in enumerate(batches(vectors, [8] * 5)):
        same(step, plain, batch, k, TRAINED * EPS[autocast] / 16)
    if autocast is torch.float16:
        assert step.skipped == math.log2(2.0**20 / plain.scaler.get_scale()) in (1, 2, 3, 4)
        assert step.scaler.state_dict() == plain.scaler.state_dict()


@pytest.mark.parametrize("name", one_in(2, CHANGES))
def test_what_changes_between_calls_is_not_frozen(name, captured):
    change(name, "cpu")


CAPTURED = {
    "sizes": (sgd, [8, 8, 5, 8, 5, 5, 5, 8, 5], {}),
    "clipped": (adamw, [8] * 4, {"max_norm": 0.1}),
    "several": (adamw, [8] * 12, {"accumulate": 3, "max_norm": 0.1}),
    "scaled": (adamw, [8] * 8, {"accumulate": 2, "autocast": torch.float16, "max_norm": 0.1}),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_loop_is_eagers(name, captured):
    make, sizes, how = CAPTURED[name]
    step, plain = both(Layers, make, next(batches(vectors, [8])), **how)
    allowed = TRAINED * EPS[torch.float16] / 16 if "autocast" in how else NETWORK
    for k, batch in enumerate(batches(vectors, sizes)):
        same(step, plain, batch, k, allowed)
        ended = not (k + 1) % how.get("accumulate", 1)
        assert ended == all(p.grad is None for p in step.model.parameters())
    assert step.captured, step.note


@pytest.mark.parametrize("kind", [torch.optim.AdamW, dt.optim.AdamW])
def test_state_is_not_amid_what_a_step_gives_back(kind, captured, monkeypatch):
    """It would hold pieces of memory that a graph cannot use."""
    monkeypatch.setattr(host, "LOOSE", 0)
    kept: list[list[torch.Tensor]] = []  # or another may get their memory
    step, plain = both(Layers, partial(adamw, kind=kind), next(batches(vectors, [8])))
    update = step._update

    def noted():
        norm = update()
        kept.append([s["exp_avg"] for s in step.optimizer.state.values()])
        return norm

    monkeypatch.setattr(step, "_update", noted)
    for k, batch in enumerate(batches(vectors, [8] * 4)):
        same(step, plain, batch, k)
    places = [[t.data_ptr() for t in tensors] for tensors in kept]
    assert set(places[0]).isdisjoint(places[1]) and places[1] == places[2]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "torch's RMSprop reads its learning rate"),
        (lambda m: sgd(m, foreach=True), "captured if foreach"),
        (lambda m: watched(sgd(m)), "has hooks"),
    ],
)
def test_what_is_not_captured_says_why(make, says, captured):
    step, plain = both(Layers, make, next(batches(vectors, [8])))
    for k, batch in enumerate(batches(vectors, [8] * 3)):
        same(step, plain, batch, k)
    assert not step.captured and says in step.note


def watched(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def test_a_schedule_of_momentum_is_right_and_told(captured):
    step, plain = both(Layers, sgd, next(batches(vectors, [8])))
    cycles = [torch.optim.lr_scheduler.OneCycleLR(each.optimizer, 0.1, 8) for each in (step, plain)]
    for k, batch in enumerate(batches(vectors, [8] * 4)):
        same(step, plain, batch, k)
        for cycle in cycles:
            cycle.step()
    assert not step.captured and step.note.endswith("changed: settings of the optimiser")


class Counts(Layers):
    """A module that counts its calls in Python."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_what_python_counts_is_not_captured(captured):
    step, plain = both(Counts, sgd, next(batches(vectors, [8])))
    for k, batch in enumerate(batches(vectors, [8] * 4)):
        same(step, plain, batch, k)
    assert not step.captured and "changed: in this call, attributes of modules" in step.note


def test_out_of_memory_in_capture_is_told(captured, monkeypatch):
    def full(*_):
        free = "GPU 0 has a total capacity of 8.00 GiB of which 1.25 GiB is free."
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. {free}")

    monkeypatch.setattr("deuteron.training.capture.capture", full)
    step, plain = both(Layers, adamw, next(batches(vectors, [8])), max_norm=0.1)
    for k, batch in enumerate(batches(vectors, [8] * 4)):
        same(step, plain, batch, k)
    assert not step.captured and "2.00 GiB more were wanted, and 1.25 GiB were free" in step.note


def test_a_capture_that_breaks_off_leaves_nothing_behind(captured, monkeypatch):
    step, plain = both(Layers, adamw, next(batches(vectors, [8])), autocast=torch.float16)
    stepped = torch.optim.AdamW.step

    def refused(self, *args):
        if Recorded.now is not None:
            raise RuntimeError("not while a graph is captured")
        return stepped(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", refused)
    for k, batch in enumerate(batches(vectors, [8] * 4)):
        same(step, plain, batch, k, TRAINED * EPS[torch.float16] / 16)
    assert not step.captured and "not while a graph" in step.note


# ---- checkpoints


@pytest.mark.parametrize(
    "autocast", [pytest.param(None, marks=pytest.mark.sweep), torch.float16], ids=str
)
def test_a_run_that_is_resumed_is_equal_bit_for_bit(autocast, tmp_path):
    def made():
        torch.manual_seed(3)
        model = Images()
        optimizer = dt.optim.AdamW(model.parameters(), 0.01)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        example = next(batches(images, [4]))
        step = dt.train_step(model, F.cross_entropy, optimizer, example, autocast=autocast)
        return {"model": model, "optimizer": optimizer, "rates": rates, "step": step}

    def run(parts, some):
        for batch in some:
            parts["step"](*batch)
            parts["rates"].step()

    data, whole, first, second = list(batches(images, [4] * 6)), made(), made(), made()
    torch.manual_seed(7)
    run(whole, data)
    torch.manual_seed(7)
    run(first, data[:3])
    torch.save({name: part.state_dict() for name, part in first.items()}, tmp_path / "last.pt")
    torch.manual_seed(8)
    for name, state in torch.load(tmp_path / "last.pt").items():
        second[name].load_state_dict(state)
    run(second, data[3:])
    for name in ("model", "optimizer", "step"):
        ends = (each[name].state_dict() for each in (whole, second))
        torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_state_that_is_another_steps_is_refused():
    step, _ = both(Layers, sgd, next(batches(vectors, [4])), accumulate=2)
    other, _ = both(Layers, sgd, next(batches(vectors, [4])), autocast=torch.float16)
    with pytest.raises(FileError, match="has a scaler"):
        step.load_state_dict(other.state_dict())
    with pytest.raises(FileError, match="it holds"):
        step.load_state_dict({"model": {}})
    step(*next(batches(vectors, [4])))
    with pytest.raises(GraphError, match="1 of 2 batches are added up"):
        step.state_dict()


# ---- faults


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_an_exception_leaves_everything_as_it_was(where):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("no gradient today")

    def loss_fn(out, y):
        loss = F.cross_entropy(out, y)
        torch._dynamo.graph_break()  # what stands before it has been run
        if broken:
            if where == "loss":
                raise ArithmeticError("no loss today")
            return Broken.apply(loss)
        return loss

    broken, data = False, list(batches(images, [4] * 3))
    model = Images()
    optimizer = sgd(model)
    step = dt.train_step(model, loss_fn, optimizer, data[0])
    step(*data[0])
    parts = (model, optimizer, step)
    before, broken = copy.deepcopy([part.state_dict() for part in parts]), True
    with pytest.raises(ArithmeticError, match="today"):
        step(*data[1])
    torch.testing.assert_close([part.state_dict() for part in parts], before, rtol=0, atol=0)
    broken = False
    step(*data[2])


def test_a_gradient_that_is_not_finite_is_skipped_by_our_optimiser():
    model = Layers()
    optimizer = dt.optim.SGD(model.parameters(), 0.1, skip_nonfinite=True)
    x, y = next(batches(vectors, [4]))
    step = dt.train_step(model, F.cross_entropy, optimizer, (x, y))
    step(x, y)
    before = copy.deepcopy(model.state_dict())
    step(x * float("inf"), y)
    assert step.skipped == 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_cannot_be_trained_is_refused():
    model, (x, y) = Layers(), next(batches(vectors, [4]))
    optimizer = sgd(model)
    make = partial(dt.train_step, model, F.cross_entropy, optimizer)
    for how, says in (
        ({"accumulate": 0}, "accumulate=0"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"autocast": torch.int8}, "autocast=torch.int8"),
    ):
        with pytest.raises(GraphError, match=says):
            make((x, y), **how)
    with pytest.raises(BindError, match="no target"):
        make(x)
    with pytest.raises(GraphError, match="6 parameters of the optimiser are not the model's"):
        dt.train_step(model, F.cross_entropy, sgd(Layers()), (x, y))
    with pytest.raises(GraphError, match="no parameter requires"):
        dt.train_step(Layers().requires_grad_(False), None, optimizer, (x, y))
    clipping = dt.optim.SGD(model.parameters(), 0.1, max_norm=1.0)
    with pytest.raises(GraphError, match=r"the optimiser's is 1\.0"):
        dt.train_step(model, F.cross_entropy, clipping, (x, y), max_norm=2.0)
    with pytest.raises(GraphError, match="LBFGS computes the loss several times"):
        dt.train_step(model, F.cross_entropy, torch.optim.LBFGS(model.parameters()), (x, y))
    step = make((x, y))
    with pytest.raises(DeuteronError, match="cannot be copied"):
        copy.deepcopy(step)
    for batch, says in (
        ((x,), "made for 2 by position, and got 1"),
        ((x, (y, y)), "arranged as"),
        ((x.double(), y), "torch.float64 of 2 dimensions"),
        ((x, y[None]), "torch.int64 of 2 dimensions"),
    ):
        with pytest.raises(BindError, match=says):
            step(*batch)
    for loss_fn, says in (
        (partial(F.cross_entropy, reduction="none"), r"of shape \(4,\)"),
        (lambda out, y: out.detach().sum(), "without a gradient"),
        (lambda out, y: None, "NoneType"),
    ):
        with pytest.raises(GraphError, match=says):
            dt.train_step(model, loss_fn, optimizer, (x, y))(x, y)
    model.eval()
    for call in (lambda: make((x, y)), lambda: step(x, y)):
        with pytest.raises(DeuteronError, match="evaluation mode"):
            call()


def test_gradients_may_be_part_of_a_loss():
    """As of networks that learn forces, and of penalties on a gradient."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    step, plain = both(Forces, sgd, next(batches(vectors, [4])))
    for k, batch in enumerate(batches(vectors, [4, 4])):
        same(step, plain, batch, k)


def test_an_explanation_of_all_plans():
    step, _ = both(Layers, partial(adamw, kind=dt.optim.AdamW), next(batches(vectors, [4])))
    step(*next(batches(vectors, [4])))
    text = step.explain()
    assert len(step.plans) == 2 == text.count("Plan of step"), "forward and backward"
    assert "no CUDA Graph: the model is on the CPU" in text and "AdamW: " in text


# ---- proof that it trains


@pytest.mark.sweep
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_200_steps_end_where_eagers_end(name, autocast):
    trained(name, "cpu", autocast)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.sweep) for name in RUNS])
def test_gradients_on_the_way_against_float64(name):
    gradients(name, "cpu")


def test_what_the_model_says_to_a_batch_is_told_and_changes_nothing():
    step, _ = both(Layers, adamw, next(batches(vectors, [8])), "cpu")
    x, y = next(batches(vectors, [8]))
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(dt.GraphError, match=r"reduction dim|cannot be multiplied") as told:
        step(torch.randn(8, x.shape[1] + 1), y)
    assert f"[8, {x.shape[1] + 1}]" in told.value.where
    with pytest.raises(dt.BindError, match="no numbers"):
        step(x.to("meta"), y)
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


def test_a_refusal_is_ours():
    """Not wrapped in an error of torch.compile's."""

    class Branches(Layers):
        def forward(self, x):
            y = super().forward(x)
            return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))

    step, _ = both(Branches, sgd, next(batches(vectors, [8])), "cpu")
    with pytest.raises(dt.GraphError, match=r"torch\.cond"):
        step(*next(batches(vectors, [8])))


@pytest.mark.parametrize("words", [50, 200_000])
def test_torch_runs_what_leaves_too_little_to_plan(words):
    """Around a recurrent layer, which torch.compile does not capture, there is a small loss; with
    many words there is much of it."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.tags = nn.Embedding(10, 8), nn.Linear(8, words)
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.layer(self.embed(x))[0].flatten(0, 1)

    torch.manual_seed(0)
    model = Tagger()
    x, y = torch.randint(0, 10, (2, 3)), torch.randint(0, words, (6,))

    def loss_fn(states, y):
        return F.cross_entropy(model.tags(states), y)

    plain = copy.deepcopy(model)
    one, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
    step = dt.train_step(model, loss_fn, one, (x, y))
    for _ in range(3):
        loss = step(x, y)
        wanted = F.cross_entropy(plain.tags(plain(x)), y)
        wanted.backward()
        other.step()
        other.zero_grad()
        assert error(loss, wanted) <= SINGLE_LAYERS
    assert bool(step.plans) == (words > 50)
    assert ("too little to plan" in step.explain()) == (words == 50)


@pytest.mark.parametrize("how", ["plain", "several", "scaled", "broken", "cut"])
def test_a_loss_makes_its_gradient_in_the_same_pass(how, monkeypatch):
    """Where the step is one graph, and nobody scales the loss by a number that changes."""
    monkeypatch.setattr("deuteron.frontends.torch_fx_facts.CALLED_S", 0.0)  # small pieces as well
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 50), torch.randn(6, 8), torch.randint(0, 50, (6,))
    accumulate = 1 + (how == "several")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaled" else None

    def loss_fn(logits, y):
        loss = F.cross_entropy(logits, y)
        if how == "broken":
            torch._dynamo.graph_break()
        if how == "cut":  # by somebody who allows it; what comes first looks like a loss
            with torch._dynamo.error_on_graph_break(False):
                torch._dynamo.graph_break()
        return loss * 2.0 if how in ("broken", "cut") else loss

    plain = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = dt.train_step(model, loss_fn, optimizer, (x, y), accumulate=accumulate, scaler=scaler)
    for _ in range(accumulate):
        loss = step(x, y)
    wanted = F.cross_entropy(plain(x.double()), y) * (2.0 if how in ("broken", "cut") else 1.0)
    wanted.backward()
    assert error(loss, wanted) <= SINGLE_LAYERS
    for ours, p in zip(model.parameters(), plain.parameters(), strict=True):
        assert error(ours, p - p.grad) <= SINGLE_LAYERS
    made = [[n.op for n in plan.decision.graph.nodes] for plan in step.plans]
    together = ["cross_entropy_with_grad" in ops for ops in made]
    if how not in ("broken", "cut"):
        assert together == [how != "scaled", how == "scaled"]
