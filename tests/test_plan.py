"""A plan gives the reference's answer, every time, and leaves everything else alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeEngine, bit_equal, check_right, registered
from tolerances import SINGLE, error

import deuteron as dt
from deuteron.errors import EngineError
from deuteron.frontends.torch_export import import_module

Feed = dict[str, torch.Tensor]
CASES: dict[str, Callable[[], tuple[dt.Graph, Feed]]] = {}


def case(build: Callable[[], tuple[dt.Graph, Feed]]) -> Callable[[], tuple[dt.Graph, Feed]]:
    CASES[build.__name__] = build
    return build


def unary(op: Callable[[dt.Graph, dt.Sym], dt.Sym], tensor: torch.Tensor) -> tuple[dt.Graph, Feed]:
    """A graph of one input, declared exactly as the tensor lies in memory."""
    g = dt.Graph()
    x = g.tensor("x", tensor.shape, tensor.dtype, strides=tensor.stride())
    op(g, x).output("y")
    return g, {"x": tensor}


@case
def several_outputs():
    g = dt.Graph()
    x, w = g.tensor("x", (5, 8)), g.tensor("w", (6, 8))
    h = g.linear(x, w).output("h")
    g.softmax(h, axis=-1).output("p")
    g.sum(g.relu(h)).output("total")
    (h > 0.0).output("mask")
    return g, {"x": torch.randn(5, 8), "w": torch.randn(6, 8)}


@case
def inputs_constants_and_doubles_as_outputs():
    g = dt.Graph()
    x = g.tensor("x", (3, 4)).output("same")
    g.constant(torch.arange(6.0).reshape(2, 3)).output("constant")
    g.constant(torch.tensor(2.5)).output("number")
    y = (x * 2.0).output("y")
    y.output("again")
    return g, {"x": torch.randn(3, 4)}


@case
def views_of_inputs_and_constants_as_outputs():
    g = dt.Graph()
    x, row = g.tensor("x", (4, 6)), g.tensor("row", (1, 6))
    g.slice(x, axis=1, start=1, stop=5, step=2).output("slice")
    g.permute(x, dims=(1, 0)).output("permute")
    g.expand(row, shape=(3, 6)).output("expand")
    g.reshape(x, shape=(2, 12)).output("reshape")
    g.expand(g.constant(torch.tensor(7.0)), shape=(2, 2)).output("sevens")
    g.expand(g.constant(torch.randn(1, 3)), shape=(2, 3)).output("rows")
    return g, {"x": torch.randn(4, 6), "row": torch.randn(1, 6)}


@case
def view_and_base_both_leave():
    g = dt.Graph()
    x, w = g.tensor("x", (4, 4)), g.tensor("w", (4, 4))
    h = (x @ w).output("h")
    turned = g.permute(h, dims=(1, 0)).output("turned")
    (turned + g.relu(h)).output("sum")
    return g, {"x": torch.randn(4, 4), "w": torch.randn(4, 4)}


@case
def no_inputs_at_all():
    g = dt.Graph()
    g.exp(g.constant(torch.linspace(-1, 1, 5))).output("y")
    return g, {}


@case
def an_input_nobody_reads():
    g = dt.Graph()
    g.tensor("idle", (3,))
    g.relu(g.tensor("x", (3,))).output("y")
    return g, {"idle": torch.zeros(3), "x": torch.randn(3)}


@case
def zero_sizes():
    g = dt.Graph()
    x, w = g.tensor("x", (0, 4)), g.tensor("w", (3, 4))
    h = g.relu(g.linear(x, w))
    h.output("h")
    g.sum(h, axes=0).output("sum")
    g.concat([h, g.tensor("z", (2, 3))], axis=0).output("cat")
    return g, {"x": torch.randn(0, 4), "w": torch.randn(3, 4), "z": torch.randn(2, 3)}


@case
def sizes_of_one():
    g = dt.Graph()
    x, w = g.tensor("x", (1, 1, 1, 1)), g.tensor("w", (1, 1, 1, 1))
    (g.relu(g.conv(x, w)) + x).output("y")
    return g, {"x": torch.randn(1, 1, 1, 1), "w": torch.randn(1, 1, 1, 1)}


@case
def scalars():
    g = dt.Graph()
    x, n = g.tensor("x", ()), g.tensor("n", (), "i64")
    (g.exp(x) * 2.0 + n).output("y")
    return g, {"x": torch.tensor(0.5), "n": torch.tensor(3)}


@case
def nan_and_infinities():
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf")], [0.0, -0.0, 1.0]])
    g = dt.Graph()
    x = g.tensor("x", (2, 3))
    g.relu(x).output("relu")
    g.max(x, axes=1).output("max")
    g.softmax(x, axis=1).output("softmax")
    (x * 0.0 + 1.0).output("times_zero")
    g.maximum(x, g.constant(torch.zeros(()))).output("maximum")
    return g, {"x": odd}


@case
def transposed_input():
    return unary(lambda g, x: g.softmax(x * 2.0, axis=-1), torch.randn(6, 4).t())


@case
def sliced_input():
    return unary(lambda g, x: g.cast(x, dtype="f32") + 1.0, torch.randn(4, 9)[:, ::2])


@case
def expanded_input():
    return unary(lambda g, x: g.relu(x) @ x, torch.randn(1, 5).expand(5, 5))


@case
def overlapping_windows():
    return unary(lambda g, x: g.relu(x) - x, torch.randn(9).as_strided((4, 5), (1, 1)))


@case
def dtypes_mixed():
    g = dt.Graph()
    x, n = g.tensor("x", (4, 5), "bf16"), g.tensor("n", (4, 5), "i32")
    g.where(n > 1, g.cast(x, dtype="f32"), g.cast(n, dtype="f32")).output("y")
    g.cast(x * 3.0, dtype="f16").output("half")
    return g, {"x": torch.randn(4, 5).bfloat16(), "n": torch.randint(0, 4, (4, 5)).int()}


@case
def convolution_block():
    g = dt.Graph()
    x, r = g.tensor("x", (2, 6, 9, 7)), g.tensor("r", (2, 8, 9, 7))
    w, b = g.constant(torch.randn(8, 6, 3, 3)), g.constant(torch.randn(8))
    g.relu(g.conv(x, w, b, padding=1) + r).output("y")
    return g, {"x": torch.randn(2, 6, 9, 7), "r": torch.randn(2, 8, 9, 7)}


@case
def attention_and_norm():
    g = dt.Graph()
    q, k, v = (g.tensor(n, (2, 3, 7, 8)) for n in "qkv")
    out = g.attention(q, k, v, causal=True)
    g.layer_norm(out, g.constant(torch.randn(8)), g.constant(torch.randn(8))).output("y")
    return g, {n: torch.randn(2, 3, 7, 8) for n in "qkv"}


@case
def looked_up_through_a_view():
    g = dt.Graph()
    ids, rows = g.tensor("ids", (2, 3), "i32"), g.tensor("rows", (5, 4))
    flat = g.cast(g.reshape(ids, shape=(6,)), dtype="i64")
    g.index_select(rows, flat, axis=0).output("y")
    return g, {"ids": torch.randint(0, 5, (2, 3)).int(), "rows": torch.randn(5, 4)}


@case
def an_opaque_call_between_known_ones():
    g = dt.Graph()
    x = g.tensor("x", (3, 5))
    args = (("in", 0), ("list", 1), ("list", 1))
    rolled = g.aten(x * 2.0, target="aten.roll.default", args=args, out=("f32[3,5]",))
    (rolled + 1.0).output("y")
    return g, {"x": torch.randn(3, 5)}


def another(feed: Feed) -> Feed:
    """Other values in the same memory order."""

    def shuffled(t: torch.Tensor) -> torch.Tensor:
        span = t.untyped_storage()
        flat = torch.empty(0, dtype=t.dtype).set_(span).clone()
        flat = flat.roll(1) if t.is_floating_point() else flat
        return flat.as_strided(t.shape, t.stride(), t.storage_offset())

    return {name: shuffled(t) for name, t in feed.items()}


@pytest.mark.parametrize("find", [False, True], ids=["heuristic", "find"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.each_value
def test_a_plan_gives_the_references_answer(name, find):
    g, feed = CASES[name]()
    plan = g.compile(device="cpu", find=find, budget_s=1.0)
    kept = []
    for _ in range(4):  # the first run is checked and slow, the others are the fast form
        feed = another(feed)
        before = {n: t.clone() for n, t in feed.items()}
        out = plan.run(feed)
        check_right(out, g.ir(), feed)
        assert all(bit_equal(feed[n], t) for n, t in before.items()), "an input was modified"
        for result, type_ in zip(out.values(), plan.outputs.values(), strict=True):
            assert dt.ir.types.same_strides(type_.shape, result.stride(), type_.strides)
        kept.append((out, {n: t.clone() for n, t in out.items()}))
    for out, copies in kept:
        assert all(bit_equal(out[n], t) for n, t in copies.items()), "a result was overwritten"


def test_inputs_are_bound_by_name_and_by_handle():
    g = dt.Graph()
    x, w = g.tensor("x", (2, 3)), g.tensor("w", (3, 2))
    (x @ w).output("y")
    plan = g.compile(device="cpu")
    tx, tw = torch.randn(2, 3), torch.randn(3, 2)
    want = plan.run(x=tx, w=tw)["y"]
    assert torch.equal(plan.run({x: tx, w: tw})["y"], want)
    assert torch.equal(plan.run({"x": tx, w: tw})["y"], want)
    assert torch.equal(plan.run({"w": tw}, x=tx)["y"], want)


def test_writing_to_a_result_harms_no_later_run():
    g, feed = views_of_inputs_and_constants_as_outputs()
    g.constant(torch.ones(3)).output("ones")
    plan = g.compile(device="cpu")
    want = {n: t.clone() for n, t in plan.run(feed).items()}
    for _ in range(2):
        out = plan.run(feed)
        out["ones"].fill_(-1.0)
        out["sevens"].as_strided((1,), (1,)).fill_(-1.0)
        out["rows"].as_strided((3,), (1,)).fill_(-1.0)
    assert all(bit_equal(t, want[n]) for n, t in plan.run(feed).items())


def test_strides_of_single_elements_do_not_reach_the_libraries():
    """[N, 1, H, W] is contiguous and channels_last at once; torch goes by the strides it sees."""
    g = dt.Graph()
    x, w = g.tensor("x", (2, 1, 5, 5)), g.constant(torch.randn(4, 1, 3, 3))
    g.conv(x, w).output("y")
    plan = g.compile(device="cpu", policy=dt.Policy(layout="keep"))
    tensor = torch.randn(2, 1, 5, 5)
    other = tensor.as_strided(tensor.shape, (25, 1, 5, 1))
    for given_ in (tensor, other, tensor):
        out = plan.run(x=given_)
        check_right(out, g.ir(), {"x": given_})
        assert out["y"].stride() == plan.outputs["y"].strides


def chain(length: int) -> tuple[dt.Graph, Callable[[], Feed]]:
    """Products that cannot fuse: all but the last lie in the arena."""
    g = dt.Graph()
    x, w = g.tensor("x", (8, 16)), g.tensor("w", (16, 16))
    for _ in range(length):
        x = g.relu(g.matmul(x, w)) * 0.5
    x.output("y")
    return g, lambda: {"x": torch.randn(8, 16), "w": torch.randn(16, 16) / 4}


@pytest.mark.parametrize("warm", [False, True], ids=["first run raced", "warm"])
def test_threads_do_not_disturb_each_other(warm):
    for _ in range(1 if warm else 8):
        g, feed = chain(5)
        plan = g.compile(device="cpu")
        if warm:
            plan.run(feed())
        feeds = [[feed() for _ in range(6)] for _ in range(3)]
        start, got = threading.Barrier(3), {}

        def work(i, plan=plan, feeds=feeds, start=start, got=got):
            start.wait()
            got[i] = [plan.run(f)["y"] for _ in range(30 if warm else 2) for f in feeds[i]]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for i, mine in enumerate(feeds):
            for j, out in enumerate(got[i]):
                check_right({"y": out}, g.ir(), mine[j % 6])


def test_modes_of_torch_do_not_reach_inside_a_plan():
    g, feed = chain(3)
    f = feed()
    with torch.inference_mode():
        plan = g.compile(device="cpu", find=True, budget_s=1.0)
        plan.run(f)
    want = plan.run(f)["y"]  # outside the mode that the first run was in
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plan.run(f)["y"], want)
    leaf = f["x"].clone().requires_grad_()
    out = plan.run(x=leaf, w=f["w"])["y"]
    assert torch.equal(out, want) and not out.requires_grad and torch.is_grad_enabled()


def test_the_source_of_a_program_can_be_read_and_runs():
    g, feed = chain(2)
    plan = g.compile(device="cpu")
    assert plan.program.source == ""
    f = feed()
    want = plan.run(f)["y"]
    source = plan.program.source
    assert source.startswith("def run(arena, ") and source.count("matmul") == 2
    space = dict(plan.program._fast.__globals__)
    exec(compile(source, "again", "exec"), space)
    (again,) = space["run"](plan.program._taken([])[1], f["x"], f["w"])
    assert torch.equal(again, want)


@pytest.mark.parametrize("find", [False, True], ids=["heuristic", "find"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_results_that_nobody_reads_are_left_out(which, find):
    g = dt.Graph()
    g.batch_norm_train(g.tensor("x", (2, 3, 4, 4)))[which].output("y")
    plan = g.compile(device="cpu", find=find, budget_s=1.0)
    for _ in range(2):
        feed = {"x": torch.randn(2, 3, 4, 4)}
        check_right(plan.run(feed), g.ir(), feed)


def test_an_engine_that_writes_several_results_of_different_types():
    g = dt.Graph()
    x = g.tensor("x", (3, 4))
    g.softmax(x, axis=1)
    y = x * 2.0
    y.output("y")
    (y > 0.0).output("mask")
    engine = FakeEngine(wants=["gt"], writes=True)
    with registered(engine):
        plan = g.compile(device="cpu")
        assert [c.candidate.engine for c in plan.decision.choices] == ["fake"]
        for _ in range(3):
            feed = {"x": torch.randn(3, 4)}
            check_right(plan.run(feed), g.ir(), feed)


@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
def test_windows_fuse_with_elementwise_work_on_either_side(op):
    g = dt.Graph()
    x = g.tensor("x", (8, 64, 56, 56), "f32")
    (g.silu(getattr(g, op)(g.relu(x + 1.0), kernel=2)) * 2.0).output("y")
    plan = g.compile(device="cpu")
    ops = [choice.region.ops for choice in plan.decision.choices]
    assert ops == [("add", "relu", op, "silu", "mul")]
    assert [c.candidate.engine for c in plan.decision.choices] == ["cpu_gen"]
    given = torch.randn(8, 64, 56, 56)
    pooled = getattr(F, f"{op}2d")((given + 1).relu(), 2)
    assert error(plan.run(x=given)["y"], F.silu(pooled.double()) * 2) <= SINGLE


def test_what_cannot_be_built_gives_way_to_the_next_best_and_is_told():
    g = dt.Graph()
    g.softmax(g.tensor("x", (3, 4)), axis=1).output("y")
    failing = FakeEngine(wants=["softmax"], build_error=RuntimeError("pass failed\nin detail"))
    with registered(failing):
        plan = g.compile(device="cpu")
        (choice,) = plan.decision.choices
        assert choice.candidate.engine != "fake"
        assert "fake could not be built: pass failed" in choice.note
        assert "in detail" not in choice.note
        assert "could not be built" in plan.explain("json")
        feed = {"x": torch.randn(3, 4)}
        check_right(plan.run(feed), g.ir(), feed)


@pytest.mark.parametrize("second", ["library", "writes"])
def test_what_cannot_be_loaded_gives_way_in_the_first_run(monkeypatch, second):
    """A kernel that nobody measured is compiled and loaded when it runs for the first time."""
    monkeypatch.setattr("deuteron.plan.plan.BUILT", ("fake",))
    g = dt.Graph()
    x = g.tensor("x", (3, 4))
    (g.softmax(g.relu(x), axis=1) @ g.tensor("w", (4, 5))).output("y")
    failing = FakeEngine(wants=["softmax"], run_error=RuntimeError("no room\nat all"), writes=True)
    others = [FakeEngine("other", ["softmax"], writes=True)] if second == "writes" else []
    with ExitStack() as stack:
        for engine in (failing, *others):
            stack.enter_context(registered(engine))
        plan = g.compile(device="cpu")
        for _ in range(3):
            feed = {"x": torch.randn(3, 4), "w": torch.randn(4, 5)}
            check_right(plan.run(feed), g.ir(), feed)
        assert failing.calls == 1
        (choice,) = [c for c in plan.decision.choices if "softmax" in c.region.ops]
        assert choice.candidate.engine == ("other" if second == "writes" else "cpu_gen")
        assert choice.note.endswith("fake could not be loaded: no room")
        assert "could not be loaded" in plan.explain("json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:1], "f32[1,4]"),
        (lambda t: t.double(), "f64[3,4]"),
        (lambda t: (t, t), "2 results where 1 are due"),
        (lambda t: [t], "a list"),
    ],
    ids=["shape", "dtype", "count", "type"],
)
def test_an_engine_that_breaks_its_contract_is_named(change, says):
    g = dt.Graph()
    g.softmax(g.tensor("x", (3, 4)), axis=1).output("y")
    with registered(FakeEngine(wants=["softmax"], change=change)):
        plan = g.compile(device="cpu")
        for _ in range(2):
            with pytest.raises(dt.EngineError, match="region r0") as caught:
                plan.run(x=torch.randn(3, 4))
            assert says in str(caught.value)


def test_results_share_memory_with_nothing_else():
    """x · 1 is folded away and equal outputs are computed once; whoever gets them may write."""
    g = dt.Graph()
    x = g.tensor("x", (3, 4))
    (x * 1.0).output("same")
    g.relu(x).output("a")
    g.relu(x).output("b")
    plan = g.compile(device="cpu")
    for _ in range(3):
        t = torch.randn(3, 4)
        got = plan.run(x=t)
        places = {v.untyped_storage().data_ptr() for v in (t, *got.values())}
        assert len(places) == 4
        assert torch.equal(got["same"], t) and torch.equal(got["a"], got["b"])


def test_engines_can_be_named_for_some_nodes_alone(tmp_path):
    """Others keep their choice, equal work included; a saved plan keeps to it as well."""
    parts = torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1)
    module = torch.nn.Sequential(parts[0], torch.nn.Sequential(parts[1], torch.nn.SiLU())).eval()
    g = dt.Graph.of(import_module(module, (torch.randn(1, 16, 12, 12),), {}).graph)

    def ran(plan: Any) -> list[str]:
        chosen = [c.candidate for c in plan.decision.choices if "conv" in c.region.ops]
        return [f"{c.engine}/{c.knobs.get('recipe', '')}" for c in chosen]

    free = ran(g.compile(device="cpu"))
    for names, want in (
        (("1.*: torch",), [free[0], "torch/"]),
        (("-cpu_kernels", "0: cpu_kernels/product"), ["cpu_kernels/product", None]),
        (
            tuple(f"0: -cpu_kernels/{n}" for n in ("winograd", "grouped", "product")),
            [None, free[1]],
        ),
    ):
        plan = g.compile(device="cpu", policy=dt.Policy(engines=names))
        got = ran(plan)
        assert all(w in (None, have) for have, w in zip(got, want, strict=True)), (names, got)
        assert None not in want or not got[want.index(None)].startswith("cpu_kernels")
        plan.save(tmp_path / "plan.json")
        assert ran(dt.load_plan(tmp_path / "plan.json", device="cpu")) == got
    noted = g.compile(device="cpu", policy=dt.Policy(engines="layer9.*: torch")).decision.notes
    assert any("layer9.*" in note for note in noted)
    with pytest.raises(EngineError, match="names 'torsch'"):
        g.compile(device="cpu", policy=dt.Policy(engines="0: torsch"))


def test_a_form_that_no_engine_of_the_policy_runs_is_left_out():
    """Whole, or laid out and written out, which only torch could run here."""
    g = dt.Graph("bytes")
    x = g.tensor("x", (1, 7, 6, 6), "u8", layout="nhwc")
    w, scale = torch.ones(7, 1, 3, 3, dtype=torch.int8), torch.ones(7)
    g.conv_quantized(x, g.constant(w, "w"), g.constant(scale, "s"), groups=7).output("y")
    plan = g.compile(device="cpu", policy=dt.Policy(engines="cpu_kernels"))
    ones = torch.ones(1, 7, 6, 6, dtype=torch.uint8).to(memory_format=torch.channels_last)
    assert plan.run(x=ones)["y"].eq(9.0).all()
