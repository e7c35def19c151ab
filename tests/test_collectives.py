"""Collectives in graphs: fewer where rules allow, in one order, once; and what layouts cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import deuteron as dt
from deuteron.codegen.scalar import overwritable
from deuteron.distributed import Layout, Reduction, layouts, schedule
from deuteron.distributed.predict import RankStep
from deuteron.distributed.reduction import (
    BLOCK,
    LONG,
    SHORT,
    SHORT_SUM,
    in_rows,
    message,
    of_rows,
    run,
)
from deuteron.distributed.stages import cut_evenly
from deuteron.distributed.tensor_parallel import shared
from deuteron.distributed.trace import traced
from deuteron.engines import torch_engine
from deuteron.engines.triton.generated import program_of
from deuteron.functional.arguments import types_of
from deuteron.ops.collective import COLLECTIVES
from deuteron.passes import Context, in_order, run_passes
from deuteron.passes.communication import Ranks, collective_seconds
from deuteron.passes.split import Split
from deuteron.plan import decide
from tests.tolerances import EPS, SINGLE, error

TWO = {"group": "ranks", "ranks": 2}


def collectives(graph):
    return [node for node in graph.nodes if node.op in COLLECTIVES]


def optimised(g, target="h200"):
    return run_passes(g.ir(), Context(dt.target(target), dt.Policy()))[0]


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_the_sum_of_sums_is_one(op):
    g = dt.Graph()
    x, y, z = (getattr(g, op)(g.tensor(name, (4, 1024, 1024)), **TWO) for name in "xyz")
    (x + y + z).output("out")
    assert [node.op for node in optimised(g).nodes] == ["add", "add", op]


def test_a_sum_that_others_read_stays():
    g = dt.Graph()
    x, y = (g.tensor(name, (4, 1024, 1024)) for name in "xy")
    total = g.all_reduce(x, **TWO)
    (total + g.all_reduce(y, **TWO)).output("out")
    total.output("one")
    assert len(collectives(optimised(g))) == 2


@pytest.mark.parametrize(("size", "left"), [(1000, 1), (10_000_000, 3)])
def test_small_sums_go_together(size, left):
    g = dt.Graph()
    for name in "xyz":
        g.exp(g.all_reduce(g.tensor(name, (size,)), **TWO)).output(f"{name}_out")
    assert len(collectives(optimised(g))) == left


def test_sums_that_need_one_another_do_not():
    g = dt.Graph()
    once = g.all_reduce(g.tensor("x", (10,)), **TWO)
    g.all_reduce(g.exp(once), **TWO).output("out")
    g.all_reduce(g.tensor("y", (10,)), reduce="max", **TWO).output("largest")
    assert len(collectives(optimised(g))) == 3


def test_merged_sums_give_the_same_numbers():
    """A group of one rank computes with nobody, so that the merged graph can be run here."""
    g = dt.Graph()
    x, y = g.tensor("x", (3, 5)), g.tensor("y", (2,))
    g.exp(g.all_reduce(x)).output("a")
    g.neg(g.all_reduce(y)).output("b")
    given = {"x": torch.randn(3, 5), "y": torch.randn(2)}
    plan = g.compile(device="cpu")
    assert len(collectives(plan.decision.graph)) == 1
    found = plan.run(**given)
    torch.testing.assert_close(found["a"], given["x"].exp())
    torch.testing.assert_close(found["b"], -given["y"])


def beside(target: str, way: str, rows: int, wide: int, deep: int) -> list[str]:
    """What becomes of a product and its sum over 8 ranks, with another product or without."""
    g, how = dt.Graph(), {"group": "ranks", "ranks": 8}
    w = g.tensor("w", (wide, deep), dt.bfloat16)
    if way == "all_gather":
        x = g.all_gather(g.tensor("x", (rows // 64, 64, deep), dt.bfloat16), **how)
        g.linear(g.reshape(x, shape=(8 * rows, deep)), w).output("y")
    else:
        x = g.linear(g.tensor("x", (rows, deep), dt.bfloat16), w)
        getattr(g, way)(g.reshape(x, shape=(rows // 64, 64, wide)), **how).output("y")
    nodes = optimised(g, target).nodes
    return [node.op + str(node.attrs.get("chunks", "")) for node in nodes if node.op != "reshape"]


def test_products_go_in_chunks_where_that_hides_what_is_sent():
    """How many chunks follows from published numbers: whole waves of tiles, and a message's
    beginning."""
    assert beside("h200", "all_reduce", 8192, 4096, 4096) == ["linear_beside4"]
    assert beside("h200", "reduce_scatter", 8192, 4096, 4096) == ["linear_beside8"]
    assert beside("h200", "all_gather", 2048, 4096, 4096) == ["linear_beside8"]
    assert beside("h200", "all_reduce", 512, 512, 512) == ["linear", "all_reduce"]  # too little
    g = dt.Graph()
    x, w = g.tensor("x", (8192, 4096), dt.bfloat16), g.tensor("w", (4096, 4096), dt.bfloat16)
    g.all_reduce(g.linear(x, w), group="ranks", ranks=8).output("y")
    g.matmul(g.permute(x, dims=(1, 0)), g.relu(x)).output("z")  # runs beside the whole of it
    assert "linear_beside" not in [node.op for node in optimised(g).nodes]


def test_equal_collectives_are_not_one_and_run_in_order():
    g = dt.Graph()
    x = g.tensor("x", (4, 4))
    for i in range(3):
        g.all_gather(x, **TWO).output(f"out{i}")
    nodes = collectives(in_order(optimised(g)))
    assert [node.inputs[1] for node in nodes] == [None, *(node.output for node in nodes[:2])]


def test_no_collective_is_computed_again_for_a_gradient():
    g = dt.Graph()
    x, late = g.tensor("x", (64, 64)), g.tensor("late", (64, 64))
    total = g.all_reduce(g.exp(x), **TWO)
    total.output("first")
    (total * late).output("second")
    cut = Split(g.ir(), {"first"}, ["late"]).halves(limit=0, price=lambda node: 0.0)
    assert not collectives(cut.backward) and len(collectives(cut.forward)) == 1


def test_a_search_does_not_measure_them():
    """Others would have to take part: a rank that measures alone would wait for ever."""
    g = dt.Graph()
    g.all_reduce(g.tensor("x", (8,)), **TWO).output("out")
    plan = g.compile(device="cpu", find=True, budget_s=0.2)
    (choice,) = plan.decision.choices
    assert "other ranks" in choice.note and choice.option.measured_s is None


def test_seconds_of_a_collective_follow_links_and_nodes():
    h200 = dt.target("h200")
    one, eight, far = (
        collective_seconds("all_reduce", 1e9, ranks, h200)
        for ranks in (Ranks(1), Ranks(8), Ranks(8, 8))
    )
    assert one == 0.0 and eight < far  # eight neighbours, and one of each of eight nodes
    assert eight == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 450e9) + 6 * 3e-6)
    assert far == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 50e9) + 6 * 8e-6)
    gather = collective_seconds("all_gather", 1e9, Ranks(8), h200)
    assert gather == pytest.approx(eight / 2)


@pytest.mark.parametrize(
    "text", ["", "dp", "tp0", "dp2×dp2", "qp4", "dp2+tp2", "dp2v2", "pp1v2", "pp4v0"]
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(dt.GraphError, match="is no layout"):
        Layout.of(text)


def test_layouts_are_all_of_so_many_ranks():
    assert {layout.ranks for layout in layouts(12)} == {12}
    assert Layout.of("dp2xFSDP4×tp8") == Layout(2, 4, 8) and str(Layout(2, 4, 8)) == "dp2×fsdp4×tp8"
    assert {layout.ranks for layout in layouts(12, blocks=8)} == {12}
    piped = {(each.pp, each.stages) for each in layouts(8, blocks=4)}
    assert piped == {(1, 1), (2, 1), (2, 2), (4, 1)}  # no more stages than blocks
    assert Layout.of("tp2×pp4v2") == Layout(tp=2, pp=4, stages=2)
    assert str(Layout(2, tp=2, pp=4, stages=2)) == "pp4v2×dp2×tp2"


class Gated(nn.Module):
    """Products that can be shared, one behind a norm over all features, and an odd one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return x + self.narrow(self.norm(self.wide(x)))


def test_products_that_ranks_can_share_are_found():
    graphs = traced(Gated(), F.mse_loss, (torch.randn(4, 8), torch.randn(4, 8)))
    (group,) = shared(graphs.forward, graphs.params.values(), 2)
    names = {name for name, value in graphs.params.items() if value in group.weights}
    assert names == {"gate.weight", "up.weight", "down.weight", "gate.bias", "up.bias"}
    assert not shared(graphs.forward, graphs.params.values(), 3)  # 16 features on 3 ranks


def test_a_prediction_says_what_is_sent_and_what_fits():
    model = Gated()
    batch = torch.randn(4, 8), torch.randn(4, 8)
    step = RankStep(model, F.mse_loss, batch, "h200", None, None)
    found = step.laid_out(Layout.of("dp2×tp2"), 1)
    halved = 4 * (8 * 16 * 3 + 16 * 2)  # bytes of what is shared
    whole = sum(p.nbytes for p in model.parameters())
    sums = 4 * 8 * 4  # forward; what comes in needs no gradient
    assert found.volumes() == {"all_reduce": sums + whole - halved // 2}
    assert found.batch == 8 and found.fits and "dp2×tp2" in str(found)
    short = step.laid_out(Layout.of("dp2"), 1, reduction=Reduction("bfloat16"))
    assert short.volumes() == {"all_reduce": whole // 2}
    eight = step.laid_out(Layout.of("dp2"), 1, reduction=Reduction("int8"))
    sent = 4 * (BLOCK + 4)  # two blocks for each rank, with their scales
    assert 2 * BLOCK < whole // 4 <= 4 * BLOCK
    assert eight.volumes() == {"all_to_all": sent, "all_gather": sent}
    with pytest.raises(dt.GraphError, match="spread over ranks"):
        step.laid_out(Layout.of("fsdp2"), 1, reduction=Reduction("int8"))
    with pytest.raises(dt.GraphError, match="no products that 3 ranks could share"):
        step.laid_out(Layout.of("tp3"), 1)


class Deep(nn.Module):
    """Four blocks, each of which begins with what has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        parts = ((nn.GELU(), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Sequential(*part) for part in parts)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_a_pipeline_is_predicted():
    """Stages take what torch's pieces of the model take, each rank has its parameters only, and a
    step is as long as its micro-batches and the filling of the pipeline."""
    words, model = torch.randint(0, 16, (2, 6)), Deep()

    def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(result.flatten(0, 1), target.flatten())

    step = RankStep(model, loss_of, (words, words), "h200", None, None)
    cut = dt.distributed.pipeline(model, (words,), 4, target="h200")
    alone, four, twice = (step.laid_out(Layout.of(t), 2) for t in ("dp4", "pp4", "pp2v2"))
    sent = {(t.when, t.bytes, t.calls) for t in four.traffic}
    assert set(cut.sends) == {2 * 6 * 8 * 4}  # one value between any two
    assert sent == {(when, 8 * cut.sends[0], 8) for when in ("forward", "backward")}
    assert four.batch == alone.batch and four.batches == twice.batches * 2 == 8
    ends = sum(p.nbytes for part in (model.head, model.blocks[3]) for p in part.parameters())
    assert four.memory["parameters"] == ends
    work = four.forward_s + four.backward_s
    assert 0.5 * 3 / 8 * work < four.filling_s <= 3 / 8 * work  # less where stages are unequal
    assert twice.filling_s < (twice.forward_s + twice.backward_s) / twice.batches
    exchanged = [t for t in four.traffic if t.kind == "send"]
    alone_s = sum(t.seconds(four.target) for t in exchanged)
    assert 0 < sum(map(four.waited_s, exchanged)) < 2 * alone_s
    assert "filling the pipeline" in str(four) and "what stages exchange" in str(four)
    model.head.weight = model.words.weight  # both ends add their gradients up
    tied = RankStep(model, loss_of, (words, words), "h200", None, None).laid_out(
        Layout.of("pp2"), 1
    )
    assert tied.volumes()["all_reduce"] == model.words.weight.nbytes
    with pytest.raises(dt.GraphError, match="8 stages of a model with 4 repeated blocks"):
        step.laid_out(Layout.of("pp4v2"), 1)
    assert {"pp2", "pp2v2"} <= {
        str(p.layout) for p in dt.distributed.ranked(model, loss_of, (words, words), "h200", 2)
    }


SIZES = [(2, 2, 4), (4, 2, 8), (8, 2, 32), (4, 3, 8), (4, 2, 10), (4, 2, 3), (2, 4, 2)]


@pytest.mark.parametrize(("ranks", "each", "batches"), SIZES)
def test_ranks_do_and_send_what_torch_has_them_do(ranks, each, batches):
    """Interleaved, in the order that torch's own code lays out: work, and beginning to send and to
    receive."""
    from torch.distributed.pipelining import schedules

    names = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    found = schedule.orders(ranks, ranks * each, batches)
    theirs = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = each, ranks, batches
    theirs.number_of_rounds = max(1, batches // ranks)
    theirs.microbatches_per_round = batches // theirs.number_of_rounds
    asked = {r: theirs._calculate_single_rank_operations(r) for r in range(ranks)}
    asked = {r: [a for a in order if a is not None] for r, order in asked.items()}
    for rank, order in asked.items():
        want = [(a.computation_type.name == "FULL_BACKWARD", *a[::2]) for a in order]
        assert [tuple(work) for work in found[rank]] == [(b, *at) for b, *at in want]
    sent = schedules._add_send_recv(asked, lambda stage: stage % ranks, ranks * each)
    for rank, events in enumerate(schedule.at_once(found, ranks * each)):
        told = []
        for event in events:
            if isinstance(event, schedule.Group):
                (message,) = event.messages
                way, comes = "B" if message.back else "F", message.stage % ranks == rank
                stage = message.stage + (0 if comes else 1 if message.back else -1)
                told.append((f"{'RECV' if comes else 'SEND'}_{way}", stage, message.batch))
            elif isinstance(event, schedule.Work):
                told.append(("B" if event.back else "F", event.stage, event.batch))
        assert told == [
            (names.get(a[1].name, a[1].name), a.stage_index, a.microbatch_index) for a in sent[rank]
        ]


def seconds_of(ranks: int, each: int, batches: int, link: float) -> float:
    """Of a step of stages that take 1 second ahead and 2 back on each rank together."""
    order = schedule.orders(ranks, ranks * each, batches)
    return schedule.makespan(order, lambda work: (1 + work.back) / each, lambda message: link)


def test_a_pipeline_fills_and_waits_for_messages():
    """Equal stages fill as published; 1F1B waits for every message between two stages, interleaved
    for those that the pipeline fills and empties by."""
    for ranks, each, batches in ((8, 1, 8), (8, 2, 8), (4, 1, 32), (4, 2, 32), (1, 1, 3)):
        filled = 3 * batches + 3 * (ranks - 1) / each
        assert seconds_of(ranks, each, batches, 0.0) == pytest.approx(filled)
    one, two = (seconds_of(4, each, 32, 0.1) - seconds_of(4, each, 32, 0.0) for each in (1, 2))
    assert one > 4 * two > 0
    # two stages, two batches: F0 F1 B0 B1 on each, and three messages on the way
    assert seconds_of(2, 1, 2, 0.5) == pytest.approx(9 + 3 * 0.5)
    with pytest.raises(dt.GraphError, match="give a multiple of 2"):
        schedule.orders(4, 8, 9)


def test_gradients_hide_behind_the_last_batch_only():
    batch = torch.randn(4, 8), torch.randn(4, 8)
    step = RankStep(Gated(), F.mse_loss, batch, "h200", None, None)
    for layout in ("dp8", "fsdp8"):
        one, many = (step.laid_out(Layout.of(layout), n) for n in (1, 16))
        for a, b in zip(one.traffic, many.traffic, strict=True):
            assert a.why != "gradients" or one.waited_s(a) == pytest.approx(many.waited_s(b))


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent of blocks in 8 bits, and what is left, as torch's operators have it."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    finite = scale.isfinite()
    sent = torch.where(finite & (scale > 0), x / scale, 0).round() * scale
    return sent, torch.where(finite, x - sent, 0)


def test_what_8_bits_leave_out_comes_later():
    """Of each gradient and what was left before it, 8 bits are sent, and the rest is left; a block
    with nan or inf sends nan, and is forgotten."""
    given = torch.randn(6, 2, 3, BLOCK)
    given[3, 0, 1, 5], given[3, 1, 2, 7], given[:, 0, 0] = float("nan"), -float("inf"), 0
    rest, of_sum = torch.zeros(2, 3, BLOCK), torch.zeros(3, BLOCK)
    for x in given:
        want, left = rounded(rest + x / 2)
        rows = in_rows(*run(SHORT, rest, x, share=0.5))
        (sent,) = run(LONG, *of_rows(rows), dtype="f32")
        torch.testing.assert_close(sent, want, rtol=0, atol=0, equal_nan=True)
        assert rows.nbytes == 2 * message(2 * 3 * BLOCK, 2) and torch.equal(rest, left)
        want, _ = rounded(total := of_sum + sent.sum(0))
        near, scale = run(SHORT_SUM, of_sum, *of_rows(rows))
        whole = torch.where(want.isnan(), torch.nan, total)
        close = {"rtol": SINGLE, "atol": SINGLE, "equal_nan": True}
        torch.testing.assert_close(near * scale + of_sum, whole, **close)


@pytest.mark.parametrize("ranks", [1, 4])
def test_8_bits_cost_one_pass_over_the_numbers(ranks):
    """Each way is one kernel, which writes what is left over what was; only the sum over several
    ranks, of one part, is one more."""
    x = torch.zeros(ranks, 1000, BLOCK)
    came = of_rows(in_rows(x.to(torch.int8), x.amax(-1, keepdim=True)))
    for function, *tensors in ((SHORT, x, x), (SHORT_SUM, x[0], *came), (LONG, *came)):
        attrs = {"share": 0.5, "dtype": "f32"}
        graph = function.graph(types_of(tensors), {n: attrs[n] for n in function.attributes})
        *_, last = kernels = decide(graph, dt.target("h200"), dt.Policy()).choices
        assert len(kernels) == 1 + (ranks > 1 and function is SHORT_SUM)
        if "rest" in last.region.inputs:
            over = overwritable(program_of(last.region), last.candidate.knobs["kind"] == "rows")
            assert (dict(graph.outputs)["2"], "rest") in over


@pytest.fixture
def two_ranks():
    """A process group in which nobody is on the other side, so that nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_ddp_takes_our_batch_norm_on_a_cpu(two_ranks):
    model = dt.nn.SyncBatchNorm.convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    nn.parallel.DistributedDataParallel(model)


def test_an_activation_that_would_be_lost_is_refused():
    norm = dt.nn.BatchNorm1d(8, activation="relu")
    with pytest.raises(dt.BindError, match="has no activation 'relu'"):
        dt.nn.SyncBatchNorm.convert(nn.Sequential(nn.Linear(8, 8), norm))


def test_what_a_wrapper_says_is_counted(two_ranks):
    """DDP asks who has a gradient with a number for each parameter, and may leave buffers alone."""
    batch = torch.randn(4, 8), torch.randn(4, 8)
    for how, more in (({}, {"broadcast": 32}), ({"forward_sync_buffers": False}, {})):
        model = Gated()
        model.register_buffer("kept", torch.zeros(8))
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, **how)
        told = dt.distributed.predict(ddp, F.mse_loss, batch, "h200", "dp2").volumes()
        params = list(model.parameters())
        assert told == {"all_reduce": sum(p.nbytes for p in params) + 4 * len(params)} | more


def test_what_batch_norms_write_is_buffers_of_the_model():
    """Traced as calls that write nowhere, they return what they would write."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))
    batch = torch.randn(2, 3, 4, 4), torch.randint(0, 4, (2,))
    given = model, F.cross_entropy, batch, "h200", "dp2"
    told = dt.distributed.predict(*given, dtype=torch.bfloat16)
    sent = 2 * sum(p.numel() for p in model.parameters())
    assert told.volumes() == {"all_reduce": sent, "broadcast": 2 * 2 * 4 + 8}


class Keywords(nn.Linear):
    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) + shift).square().mean()}


def test_batches_of_keywords_are_predicted():
    batch = {"x": torch.randn(4, 8), "shift": torch.randn(8)}
    step = RankStep(Keywords(8, 8), None, batch, "h200", None, None)
    told = step.laid_out(Layout.of("dp2"), 1)
    assert told.volumes() == {"all_reduce": 4 * 72} and told.batch == 8


class Branch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        (nn.Linear(8, 8).requires_grad_(False), {}, "no parameter that is trained"),
        (nn.Linear(9, 8), {}, r"does not take this batch(.|\n)*a batch of \[4, 8\], \[4, 8\]"),
        (Branch(8, 8), {}, "depends on values"),
        (nn.Linear(8, 8), {"accumulate": 0}, "accumulate=0"),
        (nn.Linear(8, 8), {"bucket_mb": 0}, "bucket_mb=0"),
        (nn.Linear(8, 8), {"layout": "pp4"}, "4 stages of a model with 0 repeated blocks"),
        (nn.Linear(8, 8), {"target": "h2000"}, "unknown target 'h2000'"),
    ],
)
def test_what_cannot_be_predicted_is_named(model, how, said):
    given = {"target": "h200", "layout": "dp2"} | how
    batch = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(dt.DeuteronError, match=said):
        dt.distributed.predict(model, F.mse_loss, batch, **given)


def test_models_of_ranks_are_optimised(two_ranks):
    """The model in DDP is one like any other; one in parts keeps its collectives."""
    x, model = torch.randn(4, 8), Gated().eval()
    fast = dt.optimize(nn.parallel.DistributedDataParallel(model), x, find=False)
    torch.testing.assert_close(fast(x), model(x))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel()})
    parallelize_module(model, mesh, {"down": RowwiseParallel()})
    fast = dt.optimize(model, x, find=False)
    assert fast(x).shape == (4, 8) and "all_reduce" in fast.explain(full=True)
    (plan,) = fast.plans
    assert [node.op for node in collectives(plan.decision.graph)] == ["all_reduce"]
    with pytest.raises(dt.BindError, match="follow=… of a model that is spread over ranks"):
        dt.optimize(model, x, follow=True)


@pytest.fixture
def late_sums(monkeypatch):
    """Sums over two ranks of which the other has the same numbers. They come when they are waited
    for; in between, nothing good is in their place."""
    begun = {}

    def begin(x, out, **attrs):
        begun[out.data_ptr()] = 2 * x
        out.fill_(torch.nan)

    def wait(x):
        return x.copy_(begun.pop(x.data_ptr()))

    monkeypatch.setattr(torch_engine, "reduced_into", begin)
    monkeypatch.setattr(torch_engine, "wait", wait)


W = torch.linspace(-1, 1, 64).reshape(8, 8)
SUMMED = {  # what a graph does to an input and a constant, and whether the sum is made in place
    "made for it": (lambda b, x, w, total: b.exp(total(x @ w)), True),
    "turned before": (lambda b, x, w, total: b.exp(total(b.permute(x @ w, dims=(1, 0)))), False),
    "another shape": (lambda b, x, w, total: b.exp(total(b.reshape(x @ w, shape=(64,)))), True),
    "read later": (lambda b, x, w, total: b.exp(total(y := x @ w)) + y, False),
    "sent twice": (lambda b, x, w, total: total(y := x @ w) * total(y, reduce="max"), False),
    "sum of a sum": (lambda b, x, w, total: b.exp(total(total(x @ w))), True),
    "an input": (lambda b, x, w, total: b.exp(total(x)), False),
    "part of an input": (
        lambda b, x, w, total: b.exp(total(b.slice(x, axis=0, start=0, stop=4, step=1))),
        False,
    ),
    "a constant": (lambda b, x, w, total: b.exp(total(w)) + x, False),
}


@pytest.mark.parametrize("case", SUMMED)
def test_sums_over_ranks_take_the_memory_of_what_dies_with_them(case, late_sums):
    """What others read, and what was given, is copied."""
    write, in_place = SUMMED[case]
    g = dt.Graph()
    x, w = g.tensor("x", (8, 8)), g.constant(W, "w")
    write(g, x, w, lambda y, **how: g.all_reduce(y, **TWO, **how)).output("y")
    plan, given = g.compile(device="cpu"), torch.randn(8, 8)
    over = [v for v in plan.program.spots if v.startswith("all_reduce")]
    assert bool(over) == in_place
    once = dt.Graph()
    want = write(once, once.tensor("x", (8, 8)), once.constant(W, "w"), lambda y, **how: y * 2.0)
    want.output("y")
    (want,) = once.compile(device="cpu").run(x=given).values()
    for _ in range(2):
        (found,) = plan.run(x=given).values()
        torch.testing.assert_close(found, want, rtol=SINGLE, atol=SINGLE)


TAKEN = {  # what two ranks that have the same rows make of them
    "all_gather": lambda x: torch.cat([x, x]),
    "reduce_scatter": lambda x: 2 * x[: len(x) // 2],
    "all_to_all": lambda x: torch.cat([x[:4], x[:4]]),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_sent_stays_where_it_is_until_all_of_it_has_come(kind, monkeypatch):
    """A library may read it as late as that, on a thread of its own."""
    begun, of = {}, TAKEN[kind]

    def begin(x, **attrs):
        out = of(torch.full_like(x, torch.nan))
        begun[out.data_ptr()] = x
        return out

    def wait(out):
        return out.copy_(of(begun.pop(out.data_ptr())))

    monkeypatch.setitem(torch_engine.STARTS, kind, begin)
    monkeypatch.setattr(torch_engine, "wait", wait)
    g = dt.Graph()
    x, w = g.tensor("x", (8, 8)), g.constant(W, "w")
    how = {"takes": (4, 4), "gives": (4, 4)} if kind == "all_to_all" else {}
    came, far = getattr(g, kind)(x @ w, **how, **TWO), x
    for _ in range(3):  # each would fit in the place of what is sent
        far = g.tanh(far) @ w
    (g.sum(came, axes=(0,)) + g.sum(far, axes=(0,))).output("y")
    plan, given = g.compile(device="cpu"), torch.randn(8, 8)
    away = given
    for _ in range(3):
        away = away.tanh() @ W
    for _ in range(2):
        (found,) = plan.run(x=given).values()
        want = of(given @ W).sum(0) + away.sum(0)
        torch.testing.assert_close(found, want, rtol=SINGLE, atol=SINGLE)
    assert not begun


def test_what_came_in_16_bits_is_widened_behind_all_else(late_sums):
    """Nothing waits for the first sum before the last is on its way, and then each for its own."""
    g, ways = dt.Graph(), ("sum", "max", "min")  # which are not merged
    x, w = g.tensor("x", (8, 8)), g.constant(W, "w")
    for way in ways:
        x = x @ w
        sent = g.all_reduce(g.cast(x, dtype=dt.bfloat16), reduce=way, **TWO)
        g.cast(sent, dtype=dt.float32).output(way)
    plan, given = g.compile(device="cpu"), torch.randn(8, 8)
    for _ in range(2):
        found = plan.run(x=given)
    want = given
    for way in ways:
        want = want @ W
        assert error(found[way], 2 * want) <= EPS[torch.bfloat16]
    lines = plan.program.source.splitlines()
    calls = [line.split()[-1] if "#" in line else line.strip()[0] for line in lines]
    order = [call for call in calls if call in ("all_reduce", "w", "cast")]
    assert order[-7:] == ["all_reduce", *["w", "cast"] * 3], plan.program.source


class Broken(nn.Linear):
    """A layer that torch.compile leaves to torch."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("numbers", ["own", pytest.param("bfloat16", marks=pytest.mark.sweep)])
def test_a_step_in_one_graph_sums_gradients_as_they_are_made(numbers, two_ranks):
    """Each is sent once, in its place, and waited for behind all products. Where a layer is outside
    the graph, all are summed behind the way back."""
    for last, inside in ((nn.Linear(8, 8), 6), (Broken(8, 8), 0)):
        torch._dynamo.reset()
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*map(nn.Linear, (8, 8), (8, 8)), last)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 8), torch.randn(4, 8)
        step = dt.train_step(model, F.mse_loss, optimizer, batch, reduction=Reduction(numbers))
        for _ in range(2):
            step(*batch)
        (found,) = step._means.values()
        assert len(found) == inside
        if inside:
            graph, lines = step.plans[1].decision.graph, step.plans[1].program.source.splitlines()
            assert sum(graph.types[n.uses[0]].numel for n in collectives(graph)) == 3 * 72
            assert step.plans[1].program.spots.keys() >= {n.output for n in collectives(graph)}
            waits = [i for i, line in enumerate(lines) if line.lstrip().startswith("w")]
            assert waits and waits[0] > max(i for i, line in enumerate(lines) if "matmul" in line)


def test_reductions_that_are_none_are_refused():
    with pytest.raises(dt.GraphError, match="use one of own, float16, bfloat16, float32, int8"):
        Reduction("int4")
    with pytest.raises(dt.GraphError, match="parameters are averaged"):
        Reduction("int8", every=2)
    model = Gated()
    batch = torch.randn(4, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dt.GraphError, match="not in DistributedDataParallel"):
        dt.train_step(model, F.mse_loss, optimizer, batch, reduction=Reduction("int8"))


def test_costs_are_cut_evenly():
    assert cut_evenly([5.0, 1.0, 1.0, 2.0, 4.0], 3) == [1, 4]
    assert cut_evenly([1.0, 1.0, 1.0, 9.0], 2) == [3] and cut_evenly([3.0], 1) == []
    with pytest.raises(dt.GraphError, match="with 0 repeated blocks"):
        dt.distributed.pipeline(Gated(), (torch.randn(4, 8),), 2)


@pytest.mark.sweep
def test_the_command_line_ranks_layouts():
    from typer.testing import CliRunner

    from deuteron.cli import app

    told = CliRunner().invoke(app, ["plan-parallel", "llama_tiny", "--gpus", "4", "--best", "2"])
    assert told.exit_code == 0, told.output
    assert "4 × h200 as" in told.output and "layouts that are slower" in told.output


def test_a_step_explains_itself_on_other_machines():
    model = Gated()
    batch = torch.randn(4, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, F.mse_loss, optimizer, batch, accumulate=2)
    told = step.explain(target="h200", ranks=4, layout="fsdp4")
    assert "4 × h200 as fsdp4: 32 examples" in told and "reduce_scatter" in told
    with pytest.raises(dt.GraphError, match="has 4"):
        step.explain(target="h200", ranks=8, layout="fsdp4")
    with pytest.raises(dt.GraphError, match="target without ranks"):
        step.explain(target="h200")
