"""Generated Triton: every operator and kind in the interpreter, and compiled without a GPU.

The interpreter is chosen when triton is imported, so each group of cases runs in a process of
its own (``tests/triton_interpreter.py``); here they are only collected.
"""

from __future__ import annotations

import re

import pytest
import torch

import deuteron as dt
from deuteron.codegen.triton_knobs import MOST, choices
from deuteron.codegen.triton_render import Knobs, render
from deuteron.engines.triton.generated import TritonGen
from deuteron.ir.region import Region
from deuteron.ops import TABLE
from deuteron.policy import Policy
from deuteron.target import GPUS, target
from tests.codegen_cases import (
    Case,
    compare,
    graph_of,
    kind_cases,
    norm_case,
    operator_cases,
    random_cases,
    softmax_case,
)
from tests.codegen_kept import kept_cases
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.ptx import spilled
from tests.scalar_interpreter import interpret
from tests.sweeps import one_in

pytest.importorskip("triton")
# The first of each is in every run. The number that follows a type: one sample in so many.
GROUPS = [
    ("operators:f32:5", "operators:f32:1", "operators:f64:1"),
    ("operators:bf16:5", "operators:bf16:1", "operators:f16:1"),
    *(("kinds:f32", "kinds:bf16"), ("kept",), ("random:0-30", "random:30-60")),
]


@pytest.mark.parametrize("group", [case for groups in GROUPS for case in one_in(3, groups)])
def test_in_the_interpreter(group):
    assert_none_failed(found_in_interpreter("tests.triton_interpreter", group), at_least=20)


@pytest.mark.parametrize("first", one_in(2, range(0, 300, 50)))
def test_random_regions_mean_what_the_reference_says(first):
    wrong = {}
    for case in random_cases(range(1000 + first, 1000 + first + 50)):
        outputs = case.empty_outputs()
        interpret(case.program, case.feed, outputs)
        found = compare(case, outputs)
        if found:
            wrong[case.name] = f"{found}\n{case.graph}\n{case.program}"
    assert not wrong, "\n\n".join(f"{k}: {v}" for k, v in wrong.items())


# ---- compiled for GPUs that are not there


def compile_for(case, knobs: Knobs, arch: int) -> list:
    from triton.backends.compiler import GPUTarget

    from deuteron.codegen.triton_load import compiled

    rendered = render(case.program, knobs)
    return [compiled(rendered, k, True, GPUTarget("cuda", arch, 32)) for k in rendered.launches]


HALF, BRAIN = torch.float16, torch.bfloat16
MAIN = {  # the shapes that the table of the H200 holds, each with its first guess
    "norm 256x1024": lambda: norm_case(256, 1024, draw=torch.empty),
    "norm 256x8192": lambda: norm_case(256, 8192, draw=torch.empty),
    "norm 128x64": lambda: norm_case(128, 64, draw=torch.empty),
    "norm 64x768": lambda: norm_case(64, 768, HALF, torch.empty),
    "softmax 512x32768": lambda: softmax_case(512, 32768, BRAIN, torch.empty),
    "softmax 256x131072": lambda: softmax_case(256, 131072, BRAIN, torch.empty),
    "softmax 4x65536": lambda: softmax_case(4, 65536, BRAIN, torch.empty),
    "gelu": lambda: graph_of(
        "gelu",
        lambda g, x, b: g.gelu(g.add(x, b)),
        x=torch.empty(512, 768, dtype=HALF),
        b=torch.empty(768, dtype=HALF),
    ),
    "turn": lambda: graph_of(
        "turn",
        lambda g, x, y: g.add(g.permute(x, dims=(1, 0)), y),
        x=torch.empty(512, 768, dtype=HALF),
        y=torch.empty(768, 512, dtype=HALF),
    ),
    "down": lambda: graph_of(
        "down", lambda g, x: g.sum(x, axes=(0,), keepdim=False), x=torch.empty(512, 768, dtype=HALF)
    ),
    "groups": lambda: groups_case(),
    "pairs": lambda: turned("pairs", True),
    "halves": lambda: turned("halves", False),
}


def turned(name: str, interleaved: bool) -> Case:
    """What becomes of pairs of neighbours, or of elements half a row apart, side by side."""

    def write(b, x, cos, sin):
        how = {"axis": 2, "interleaved": interleaved, "dims": 128, "base": 1e4, "offset": 0}
        return TABLE["rope"].expand(b, [x, None, cos, sin, None], how | {"inverse": False})[0]

    tables = {name: torch.empty(512, 64) for name in ("cos", "sin")}
    return graph_of(name, write, x=torch.empty(2, 8, 512, 128, dtype=HALF), **tables)


def groups_case() -> Case:
    """Rows of 8 channels of 12544 pixels."""
    return graph_of(
        "groups",
        lambda g, x, w, b: g.silu(g.group_norm(x, w, b, groups=8)),
        x=torch.empty(32, 64, 112, 112, dtype=HALF),
        w=torch.empty(64, dtype=HALF),
        b=torch.empty(64, dtype=HALF),
    )


def test_a_weight_is_read_once_for_all_pixels_of_its_channel():
    case = groups_case()
    knobs = choices(case.program, 132)[0]
    last = render(case.program, knobs).source.split("for stretch in range(8):")[1]
    before, inside = last.split("for o in range(")
    weights = [n for n in ("x1", "x2") if f"tl.load({n} +" in before]
    assert knobs.kind == "loop" and weights == ["x1", "x2"]
    assert "tl.load(x0 +" in inside and "tl.load(x1 +" not in inside


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("name", MAIN)
def test_main_kernels_compile_without_spills_and_load_16_bytes(name, arch):
    case = MAIN[name]()
    kernels = compile_for(case, choices(case.program, 132)[0], arch)
    most = 0 if arch == 90 else 40  # bytes: the first guess is the H200's
    assert all(spilled(kernel, arch) <= most for kernel in kernels)
    wide = re.search(r"ld\.global[.\w:]*v4\.b32", kernels[0].asm["ptx"])
    assert wide or name == "norm 128x64"
    if name in ("pairs", "halves"):
        moves = re.findall(r"(?:ld|st)\.global[.\w:]*", kernels[0].asm["ptx"])
        assert all(move.endswith("v4.b32") for move in moves), moves


@pytest.mark.parametrize("each_case", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_every_kind_compiles_for_both_generations(each_case):
    seen = set()
    for case, knobs in kind_cases("bf16"):
        key = (each_case and case.name.split()[0], knobs.kind)
        if key not in seen:
            seen.add(key)
            compile_for(case, knobs, 80 if len(seen) % 2 else 90)
    assert {kind for _, kind in seen} == {"flat", "tile", "rows", "loop", "split"}


@pytest.mark.sweep
def test_kept_cases_compile():
    """Those that look something up, wrap around or take two numbers, for both generations."""
    count, words = 0, ("gather", "embedding", "wraps", "entropy", "best", "every kind", "rms")
    for case in kept_cases():
        if any(word in case.name for word in words):
            count += 1
            for kernel in compile_for(case, choices(case.program)[0], 90 if count % 2 else 80):
                assert spilled(kernel, 90 if count % 2 else 80) == 0, case.name
    assert count >= 16


@pytest.mark.sweep
def test_every_helper_compiles():
    seen: set[str] = set()
    count = 0
    for case in operator_cases("f32"):
        knobs = choices(case.program)[0]
        source = render(case.program, knobs).source
        used = set(re.findall(r"(?:tl\.\w+|_\w+)\(", source))
        if used - seen:
            seen |= used
            count += 1
            compile_for(case, knobs, 90)
    assert count >= 10 and {"_pow(", "_tanh(", "_random(", "_fmod(", "_atan2("} <= seen


# ---- the engine


def region_of(case) -> Region:
    return Region(case.graph)


def test_offers_few_candidates_and_prices_them():
    engine, h200 = TritonGen(), GPUS["h200"]
    sizes = ((norm_case, 4096, 1024), (softmax_case, 8, 65536), (softmax_case, 512, 32768))
    for case in (make(*size, draw=torch.empty) for make, *size in sizes):
        region = region_of(case)
        assert engine.refuse(region, h200, Policy()) is None
        offered = engine.candidates(region, h200, Policy())
        assert 1 <= len(offered) <= MOST
        for candidate in offered:
            assert 1e-6 < engine.estimate(region, h200, candidate) < 1e-2
            assert "tl.store" in engine.render(region, candidate).source


def test_kernels_are_called_by_what_they_compute():
    """And not by how it is spelled: equal work is one kernel."""
    sources = []
    for shape in ((4, 6), (6, 4)):
        g = dt.Graph()
        moved = g.reshape(g.tensor("x", (4, 6)) + g.tensor("y", (4, 6)), shape=shape)
        g.cast(g.relu(moved), dtype="f16").output("z")
        region, engine = Region(g.ir()), TritonGen()
        candidate = engine.candidates(region, GPUS["h200"], Policy())[0]
        rendered = engine.render(region, candidate)
        assert [launch.function for launch in rendered.launches] == ["add_relu_flat"]
        sources.append(rendered.source)
    assert sources[0] == sources[1]


def test_a_gradient_is_stored_in_the_pass_that_sums_it():
    from deuteron.codegen.triton_passes import Passes

    case = graph_of(
        "bias",
        lambda g, x, y: ((d := x * y), g.sum(d, axes=(0,))),
        x=torch.randn(70, 33),
        y=torch.randn(70, 33),
    )
    assert Passes(case.program).count == 1
    rendered = render(case.program, Knobs("split", 8, 4, 32, splits=4))
    first, second = re.split(r"def \w+_1\(", rendered.source)
    assert "tl.store(y0" in first and "tl.load(x0" not in second
    assert Passes(softmax_case(4, 40000).program).count == 2


@pytest.mark.parametrize(("rows", "columns", "dtype"), [
    (16384, 3072, "bf16"), (8192, 2304, "bf16"), (16384, 768, "f32"), (200704, 64, "f16"),
])  # fmt: skip
def test_sums_down_columns_fill_a_gpu_once(rows, columns, dtype):
    """Programs for one wave, each with loads enough in flight: on an H200 3.0 to 3.8 TB/s where a
    wave and a half of loads one after another reached 1.2 to 2.6."""
    g = dt.Graph("bias")
    g.sum(g.tensor("x", (rows, columns), dtype), axes=(0,)).output("y")
    region = Region(g.ir(), frozenset(), 0)
    first = TritonGen().candidates(region, target("h200"), Policy())[0].knobs
    programs = -(-columns // first["rows"]) * first["splits"]
    assert 5 * 132 < programs <= 8 * 132 and first["unroll"] == 4


@pytest.mark.parametrize(("rows", "columns", "dtype"), [(32, 393216, "f32"), (16, 1000000, "bf16")])
def test_few_long_lines_are_added_without_telling(rows, columns, dtype):
    """A thread adds up its own columns, 16 bytes at a time: on an H200 13.8 and 10 µs where threads
    that share columns take 34 and 77."""
    g = dt.Graph("positions")
    g.sum(g.tensor("x", (rows, columns), dtype), axes=(0,)).output("y")
    region = Region(g.ir(), frozenset(), 0)
    first = TritonGen().candidates(region, target("h200"), Policy())[0].knobs
    each = first["rows"] * first["block"] // (32 * first["warps"])
    assert first["kind"] == "loop" and each == 8 and first["block"] * first["unroll"] == 8


def test_few_channels_of_many_pixels_are_read_whole_by_a_thread():
    """Softmax over classes in NCHW: threads that had parts of many columns took five times as long
    as memory on an H200."""
    g = dt.Graph("classes")
    g.softmax(g.tensor("x", (16, 21, 512, 512), "f32"), axis=1).output("y")
    region, engine, gpu = Region(g.ir(), frozenset(), 0), TritonGen(), target("h200")
    offered = engine.candidates(region, gpu, Policy())
    first = min(offered, key=lambda c: engine.estimate(region, gpu, c)).knobs
    assert (first["kind"], first["block"], first["unroll"]) == ("loop", 1, 21)


def test_refuses_what_it_cannot_run():
    engine = TritonGen()
    region = region_of(norm_case(4, 8))
    assert "GPU" in engine.refuse(region, target("cpu"), Policy()).reason


def test_offsets_past_two_to_the_31_are_64_bit():
    from deuteron.codegen.lower import lower
    from deuteron.ir import GraphBuilder, TensorType
    from deuteron.ir.dtype import dtype
    from deuteron.ops import Ops, infer

    for size, wide in ((2**20, False), (2**32, True)):
        build = GraphBuilder(infer, "long")
        ops = Ops(build)
        x = ops.sym(build.input("x", TensorType((size,), dtype("f16"), (1,))))
        ops.relu(x).output("y")
        source = render(lower(Region(build.finish())), Knobs("flat", 1024)).source
        assert ("int64" in source) == wide
