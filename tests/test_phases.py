"""Elements that differ by whether they are even or odd, in vectors of each kind on the CPU."""

from __future__ import annotations

import re

import pytest
import torch

import deuteron as dt
from deuteron.codegen.lower import lower
from deuteron.codegen.phases import in_copies, in_phases, undivided
from deuteron.codegen.triton_index import arranged
from deuteron.codegen.triton_knobs import LONGEST_CODE, choices
from deuteron.codegen.triton_render import render
from deuteron.engines.cpu.generated import CpuGen
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import TABLE, Ops, infer
from deuteron.ops.evaluate import evaluate
from tests.scalar_interpreter import interpret
from tests.test_engines import Answers, right
from tests.tolerances import allowed, error

POOL = {"kernel": 3, "stride": 2, "padding": 1}


def rope(b: Ops, x, cos, sin):
    how = {"axis": 1, "interleaved": True, "dims": 12, "base": 100.0, "offset": 2, "inverse": True}
    return TABLE["rope"].expand(b, [x, None, cos, sin, None], how)[0]


# what is written, in an even number of columns, and the shapes of what it reads
WRITTEN = {
    "twice as large": (lambda b, x: b.resize(x, size=(10, 44), mode="nearest"), (2, 3, 5, 22)),
    "a mean's gradient": (
        lambda b, x: b.avg_pool_grad(x, shape=(2, 3, 9, 44), **POOL),
        (2, 3, 5, 22),
    ),
    "means at the border": (
        lambda b, x: b.avg_pool_grad(x, shape=(2, 3, 9, 44), count_include_pad=False, **POOL),
        (2, 3, 5, 22),
    ),
    "pairs of neighbours": (rope, (2, 5, 3, 40), (7, 6), (7, 6)),
    "in turns": (
        lambda b, x: b.reshape(b.concat([b.relu(x), b.neg(x)], axis=3), (3, 5, 44)),
        (3, 5, 22, 1),
    ),
}


def merged(b: Ops, x):
    return b.reshape(b.permute(x, dims=(0, 2, 1, 3)), (x.shape[0], x.shape[2], -1))


# where axes are divided by the size of another, and the shapes of what is read
MERGED = {
    "heads": (lambda b, x, y: b.add(merged(b, x), y), (2, 3, 5, 24), (2, 5, 72)),
    "heads as channels": (
        lambda b, x: b.to_layout(
            b.relu(b.reshape(b.permute(x, dims=(0, 1, 3, 2)), (1, 72, 3, 3))), layout="nhwc"
        ),
        (1, 3, 9, 24),
    ),
    "a row of heads": (lambda b, x: b.softmax(merged(b, x), axis=-1), (2, 3, 5, 24)),
    "over heads": (lambda b, x: b.sum(merged(b, x), axes=(1,)), (2, 3, 5, 24)),
    "windows of an image": (
        lambda b, x, y: b.add(
            b.reshape(
                b.permute(b.reshape(x, (1, 3, 4, 2, 5, 6)), dims=(0, 1, 3, 2, 4, 5)), (6, 20, 6)
            ),
            y,
        ),
        (1, 12, 10, 6),
        (6, 20, 6),
    ),
    "twice": (
        lambda b, x: b.relu(
            b.reshape(b.permute(b.reshape(x, (4, 3, 2, 16)), dims=(2, 0, 1, 3)), (2, 192))
        ),
        (12, 32),
    ),
}


def region_of(name: str, dtype: torch.dtype) -> tuple[Region, dict[str, torch.Tensor]]:
    write, *shapes = (WRITTEN | MERGED)[name]
    build = GraphBuilder(infer, "phases")
    b = Ops(build)
    gen = torch.Generator().manual_seed(0)
    feed = {f"x{i}": torch.randn(s, generator=gen).to(dtype) for i, s in enumerate(shapes)}
    given = [b.sym(build.input(n, TensorType.from_tensor(x))) for n, x in feed.items()]
    write(b, *given).output("y")
    return Region(build.finish()), feed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.each_value
def test_the_same_in_vectors(name, dtype):
    plan = pytest.importorskip("deuteron.codegen.llvm_plan").plan
    region, feed = region_of(name, dtype)
    whole = lower(region)
    cut = in_phases(whole)
    assert cut.rows == whole.rows // 2
    assert plan(cut).vector == cut.outer[-1] and plan(whole).vector != whole.outer[-1]
    engine, machine = CpuGen(), dt.target("cpu")
    (candidate,) = engine.candidates(region, machine, dt.Policy())
    right(engine, candidate, region, feed, Answers(region, feed))


@pytest.mark.parametrize("name", WRITTEN)
def test_the_statements_mean_the_same(name):
    region, feed = region_of(name, torch.float32)
    exact = evaluate(region.graph, feed, float64=True)["y"]
    out = {v: torch.full(exact.shape, torch.nan) for v in region.outputs}
    interpret(in_phases(lower(region)), feed, out)
    assert error(out[region.outputs[0]], exact) <= allowed(0.0, torch.float32, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MERGED)
@pytest.mark.each_value
def test_an_axis_that_is_divided_is_two(name, dtype):
    plan = pytest.importorskip("deuteron.codegen.llvm_plan").plan
    region, feed = region_of(name, dtype)
    whole = lower(region)
    cut = undivided(whole)
    assert any("//" in str(e) for e in whole.accesses())
    assert not any("//" in str(e) or "%" in str(e) for e in cut.accesses())
    assert plan(cut).vector is not None
    assert (cut.rows, cut.columns) == (whole.rows, whole.columns)
    out = {
        v: torch.empty_strided((t := region.graph.types[v]).shape, t.strides)
        for v in region.outputs
    }
    exact = evaluate(region.graph, feed, float64=True)["y"]
    interpret(cut, feed, out)
    assert error(out[region.outputs[0]], exact) <= allowed(0.0, dtype, cut.columns)
    engine, machine = CpuGen(), dt.target("cpu")
    (candidate,) = engine.candidates(region, machine, dt.Policy())
    right(engine, candidate, region, feed, Answers(region, feed))


def test_what_no_cut_leaves_undivided_stays_whole():
    build = GraphBuilder(infer, "uneven")
    b = Ops(build)
    x = b.sym(build.input("x", TensorType.of((6, 10), "f32")))
    b.relu(b.reshape(b.permute(x, dims=(1, 0)), (4, 15))).output("y")
    program = lower(Region(build.finish()))
    assert undivided(program) is program


def test_an_odd_number_of_columns_stays_whole():
    build = GraphBuilder(infer, "odd")
    b = Ops(build)
    x = b.sym(build.input("x", TensorType.of((1, 2, 4, 20), "f32")))
    b.avg_pool_grad(x, shape=(1, 2, 7, 39), **POOL).output("y")
    program = lower(Region(build.finish()))
    assert in_phases(program) is program


WINDOWS = {  # what reads windows, and the shapes of x and of what is beside it
    "depthwise": (
        lambda b, x, w: b.conv(x, w, None, groups=6, padding=1),
        (2, 6, 4, 8),
        (6, 1, 3, 3),
    ),
    "strided, two of each": (
        lambda b, x, w: b.conv(x, w, None, groups=6, stride=2, padding=2),
        (2, 6, 8, 16),
        (12, 1, 5, 5),
    ),
    "with gaps": (
        lambda b, x, w: b.conv(x, w, None, groups=4, dilation=(1, 2), padding=(1, 2)),
        (1, 4, 8, 8),
        (4, 1, 3, 3),
    ),
    "largest": (
        lambda b, x, w: b.add(b.max_pool(x, kernel=3, stride=1, padding=1), w),
        (2, 6, 4, 8),
        (6, 1, 1),
    ),
}


@pytest.mark.parametrize("order", ["contiguous", "nhwc"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_share_elements_are_made_together(name, order):
    write, *shapes = WINDOWS[name]
    build = GraphBuilder(infer, "windows")
    b = Ops(build)
    gen = torch.Generator().manual_seed(0)
    feed = {n: torch.randn(s, generator=gen) for n, s in zip("xw", shapes, strict=True)}
    if order == "nhwc":
        feed["x"] = feed["x"].to(memory_format=torch.channels_last)
    given = [b.sym(build.input(n, TensorType.from_tensor(x))) for n, x in feed.items()]
    write(b, *given).output("y")
    region = Region(build.finish())
    exact = evaluate(region.graph, feed, float64=True)["y"]
    whole = arranged(lower(region))
    made = in_copies(whole, 4)
    assert made.rows == whole.rows // 4
    assert len(made.loads) <= 3 * len(whole.loads)
    out = {v: torch.full_like(exact, torch.nan, dtype=torch.float32) for v in region.outputs}
    interpret(made, feed, out)
    assert error(out[region.outputs[0]], exact) <= allowed(0.0, torch.float32, 25)


def in_row_means(window):
    """The means of images after a depthwise convolution, as rows of generated code."""
    build = GraphBuilder(infer, "means")
    b = Ops(build)
    x = b.sym(build.input("x", TensorType.of((32, 96, 56, 56), "f16", "nhwc")))
    w = b.sym(build.input("w", TensorType.of((96, 1, window, window), "f16")))
    y = b.conv(x, w, None, groups=96, padding=window // 2)
    b.mean(b.silu(y), axes=(2, 3)).output("y")
    return lower(Region(build.finish()))


@pytest.mark.parametrize("window", [3, 5])
def test_loops_over_windows_are_short(window):
    """Copies of a loop's body that reads 50 elements took 9 s to compile."""
    program = in_row_means(window)
    for knobs in choices(program):
        each = max(1, knobs.rows * knobs.block // (256 * knobs.warps))
        code = len(program.loads) * len(program.statements) * each * knobs.unroll**2
        assert code <= LONGEST_CODE or knobs.unroll == 1
    assert max(knobs.unroll for knobs in choices(program)) == (4 if window == 3 else 1)


def test_parts_of_an_index_are_written_once():
    """In a loop over windows every load asks for the same quotients and rests."""
    source = render(in_row_means(3), choices(in_row_means(3))[0]).source
    source = source.split("@triton.jit")[1]  # of two kernels
    parts = re.findall(r"(at_\d+) = (.*)", source)
    assert 4 < len(parts) == len({name for name, _ in parts}) == len({text for _, text in parts})
    assert not re.search(r"tl\.load\([^#]*(//|%)", source)
