"""The engine ``cpu_kernels``: every candidate against float64, nothing touched but the result."""

import ctypes
import math
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import deuteron as dt
from deuteron.engines import BuildContext, Candidate, Refusal, engine
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import TILES, WINOGRAD_ERROR, shared, teams
from deuteron.ops import FAMILIES, TABLE, table
from deuteron.ops.arithmetic import ndtr
from deuteron.ops.evaluate import evaluate
from deuteron.policy import Policy
from deuteron.target import Target
from tests.sweeps import one_in
from tests.tolerances import allowed, error

pytest.importorskip("llvmlite")

from deuteron.codegen import llvm, llvm_math, openmp
from deuteron.codegen import llvm_text as ir
from deuteron.kernels.cpu.attention import room_per_thread
from deuteron.kernels.cpu.stored import Stored

CPU = dt.target("cpu")
POLICY = Policy()
ENGINE = engine("cpu_kernels")
CANARY = 1232.0  # in every float type


# ---- building regions and running candidates ---------------------------------------------------


def region_of(
    anchor: str,
    inputs: Sequence[tuple[str, TensorType, bool]],
    attrs: dict[str, Any] | None = None,
    act: tuple[str, dict[str, Any]] | None = None,
    residual: bool = False,
) -> Region:
    """``act(anchor(inputs) + residual)``; an input is (name, type, is it a constant)."""
    build = GraphBuilder(table.infer, "test")
    for name, type_, _ in inputs:
        build.input(name, type_)
    (value,) = build.emit(anchor, [name for name, _, _ in inputs], attrs or {})
    if residual:
        build.input("residual", build.types[value])
        (value,) = build.emit("add", [value, "residual"], {})
    if act is not None:
        (value,) = build.emit(act[0], [value], act[1])
    build.output("y", value)
    constants = frozenset(name for name, _, constant in inputs if constant)
    return Region(build.finish(), constants, 0)


def t(*shape: int, layout: str = "contiguous", of: str = "f32") -> TensorType:
    return TensorType.of(shape, of, layout)


def guarded(type_: TensorType, fill: Callable[[torch.Tensor], None]) -> tuple[Any, torch.Tensor]:
    """A tensor of ``type_`` amid canaries, and a check that they are alive."""
    room, size = 256, type_.storage_numel
    block = torch.full((size + 2 * room,), CANARY, dtype=type_.dtype.torch)
    inner = block[room : room + size]
    fill(inner)
    gaps = torch.ones(size, dtype=torch.bool)
    gaps.as_strided(type_.shape, type_.strides).fill_(False)
    before = inner[gaps].clone()

    def alive() -> bool:
        ends = torch.cat([block[:room], block[room + size :]])
        return bool((ends == CANARY).all()) and torch.equal(
            inner[gaps].nan_to_num(7.0), before.nan_to_num(7.0)
        )

    return alive, inner.as_strided(type_.shape, type_.strides)


def feed(region: Region, scale: float = 1.0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    out = {}
    for name in region.inputs:
        type_ = region.graph.types[name]
        if type_.dtype.kind == "bool":
            out[name] = (torch.rand(type_.storage_numel, generator=gen) > 0.4).as_strided(
                type_.shape, type_.strides
            )
            continue

        def fill(flat: torch.Tensor) -> None:
            flat.copy_(torch.randn(flat.shape, generator=gen) * scale)  # rounds to its type

        out[name] = guarded(type_, fill)[1]
    return out


def built(region: Region, candidate: Candidate, tensors: dict[str, torch.Tensor]) -> Any:
    constants = {v: tensors[v] for v in region.constants}
    return ENGINE.build(
        region, candidate, BuildContext(CPU, torch.device("cpu"), POLICY, constants)
    )


def check(region: Region, reduced: int, floor: float = 0.0) -> list[Candidate]:
    """Every candidate is right, fills its output and leaves everything else alone."""
    refusal = ENGINE.refuse(region, CPU, POLICY)
    assert refusal is None, refusal
    tensors = feed(region)
    saved = {name: x.clone() for name, x in tensors.items()}
    exact = evaluate(region.graph, tensors, float64=True)["y"]
    own = error(evaluate(region.graph, tensors)["y"], exact)
    candidates = list(ENGINE.candidates(region, CPU, POLICY))
    assert candidates
    for candidate in candidates:
        assert ENGINE.estimate(region, CPU, candidate) > 0
        kernel = built(region, candidate, tensors)
        assert kernel.writes
        alive, out = guarded(
            region.graph.types[region.outputs[0]], lambda flat: flat.fill_(math.nan)
        )
        for _ in range(2):
            kernel.fill([tensors[v] for v in region.inputs], [out])
        assert alive(), f"{candidate} wrote outside its result"
        bound = max(allowed(own, out.dtype, reduced if out.dtype == torch.float32 else 1), floor)
        if candidate.knobs["recipe"].startswith("winograd"):
            bound = max(bound, WINOGRAD_ERROR[candidate.knobs["tile"]])
        assert error(out, exact) <= bound, f"{candidate}: {error(out, exact):.2e} > {bound:.2e}"
        for name, before in saved.items():
            assert torch.equal(tensors[name], before), f"{candidate} wrote to {name}"
    return candidates


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 7, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (16, 8), (19, 37), (64, 130)])
def test_linear(m: int, n: int, k: int) -> None:
    inputs = [("x", t(m, k), False), ("w", t(n, k), True), ("b", t(n), True)]
    check(region_of("linear", inputs, residual=m % 2 == 1, act=("relu", {})), k)


@pytest.mark.parametrize("team", [1, 2, 5, 7])
def test_a_team_shares_rows_and_columns(team: int) -> None:
    """The same bits, whoever has which tiles: threads left over by a rectangle have none."""
    inputs = [("x", t(70, 40), False), ("w", t(150, 40), True), ("b", t(150), True)]
    region, found, threads = region_of("linear", inputs), [], torch.get_num_threads()
    tensors, of = feed(region), next(iter(ENGINE.candidates(region, CPU, POLICY)))
    try:
        torch.set_num_threads(team)
        for across in (1, 2, 3, 4, 16):
            candidate = replace(of, knobs={**of.knobs, "across": across})
            alive, out = guarded(t(70, 150), lambda flat: flat.fill_(math.nan))
            built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
            assert alive()
            found.append(out)
    finally:
        torch.set_num_threads(threads)
    assert error(found[0], evaluate(region.graph, tensors, float64=True)["y"]) < 1e-6
    assert all(torch.equal(found[0], other) for other in found)


def test_tiles_fit_in_registers():
    """One more than there are, and sums go to memory and back: 7 × 64 took 1.4 times as long."""
    for floats, registers in {4: 32, 8: 16, 16: 32}.items():
        assert all(rows * n + n + 1 <= registers for rows, n in TILES[floats])


def test_tiles_are_shared_evenly() -> None:
    for down, across, most in ((17, 24, 27), (17, 8, 9), (5, 16, 5), (1, 40, 3), (40, 1, 3)):
        ways = teams(down, across, 16)
        assert shared(down, across, 16, ways[0]) == most
    assert teams(9, 9, 1) == [1]


ACTS = [
    (op.name, attrs)
    for op in (*FAMILIES["activation"], TABLE["clamp"], TABLE["exp"])
    if (len(op.inputs) == 1 and op.formula is not None) or op.name == "exp"
    for attrs in {str(s.attrs): dict(s.attrs) for s in op.samples()}.values()
]


@pytest.mark.parametrize(("name", "attrs"), one_in(2, ACTS))
def test_every_activation(name: str, attrs: dict[str, Any]) -> None:
    inputs = [("x", t(9, 21), False), ("w", t(21, 21), True)]
    check(region_of("linear", inputs, residual=True, act=(name, attrs)), 21)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (6,)])
def test_matmul(shape: tuple[int, ...]) -> None:
    check(region_of("matmul", [("x", t(*shape), False), ("y", t(6, 11), True)]), 6)


def test_rows_with_gaps() -> None:
    x = TensorType.of((5, 12), "f32", strides=(20, 1))
    check(region_of("linear", [("x", x, False), ("w", t(7, 12), True)]), 12)


LOW = ["f16", "bf16"]


@pytest.mark.parametrize("of", LOW)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 3), (1, 70, 131), (7, 19, 37), (33, 64, 130)])
def test_linear_of_16_bits(of: str, m: int, n: int, k: int) -> None:
    inputs = [("x", t(m, k, of=of), False), ("w", t(n, k, of=of), True), ("b", t(n, of=of), True)]
    check(region_of("linear", inputs, residual=m % 2 == 1, act=("relu", {})), k)


@pytest.mark.parametrize("of", LOW)
@pytest.mark.parametrize(("name", "attrs"), one_in(4, ACTS))
def test_every_activation_of_16_bits(of: str, name: str, attrs: dict[str, Any]) -> None:
    inputs = [("x", t(9, 21, of=of), False), ("w", t(21, 21, of=of), True)]
    check(region_of("linear", inputs, residual=True, act=(name, attrs)), 21)


@pytest.mark.parametrize("of", ["f32", *LOW])
@pytest.mark.parametrize("k", [1028, 1536, 2053, 4099])
@pytest.mark.each_value
def test_a_long_k_is_taken_in_stretches(of: str, k: int) -> None:
    inputs = [
        ("x", t(21, k, of=of), False),
        ("w", t(35, k, of=of), True),
        ("b", t(35, of=of), True),
    ]
    check(region_of("linear", inputs, residual=True, act=("gelu", {})), k)


@pytest.mark.parametrize(("m", "k"), [(1, 240), (1, 4099), (4, 1021), (40, 2011)])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_of_every_length_keep_their_digits(m: int, k: int, turned: bool) -> None:
    """A single row, and lengths that cannot be cut into equal parts, lose no more than torch's; of
    operands whose k does not lie side by side as well."""
    x = TensorType.of((m, k), "f32", strides=(1, m)) if turned else t(m, k)
    region = region_of("linear", [("x", x, False), ("w", t(64, k), not turned)])
    tensors = feed(region)
    exact = evaluate(region.graph, tensors, float64=True)["y"]
    mean = (evaluate(region.graph, tensors)["y"] - exact).abs().mean()
    for candidate in ENGINE.candidates(region, CPU, POLICY):
        out = torch.empty(m, 64)
        built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
        assert (out - exact).abs().mean() <= 2 * mean, candidate


@pytest.mark.parametrize("of", ["f32", *LOW])
@pytest.mark.parametrize("m", [1, 6, 13])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (19, 37), (64, 130)])
@pytest.mark.each_pair
def test_a_weight_that_comes_with_the_call(of: str, m: int, n: int, k: int) -> None:
    inputs = [
        ("x", t(m, k, of=of), False),
        ("w", t(n, k, of=of), False),
        ("b", t(n, of=of), m == 6),
    ]
    check(region_of("linear", inputs, residual=True, act=("relu", {})), k)


@pytest.mark.parametrize("of", ["f32", "bf16"])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((4, 6), (6, 11)),
        ((3, 5, 7), (3, 7, 18)),
        ((2, 3, 5, 7), (3, 7, 18)),
        ((2, 1, 5, 7), (1, 3, 7, 4)),
        ((5, 7), (4, 7, 3)),
        ((7,), (4, 7, 3)),
        ((3, 5, 7), (1, 7, 9)),
        ((6,), (6, 17)),
    ],
)
@pytest.mark.each_pair
def test_batched_matmul(x: tuple[int, ...], y: tuple[int, ...], constant: bool, of: str) -> None:
    inputs = [("x", t(*x, of=of), False), ("y", t(*y, of=of), constant)]
    check(region_of("matmul", inputs, residual=True, act=("tanh", {})), y[-2])


@pytest.mark.parametrize("of", ["f32", "f16"])
@pytest.mark.parametrize("which", ["x", "y", "both"])
def test_matmul_of_transposed_views(which: str, of: str) -> None:
    """What gradients of a product look like."""
    x, y = t(2, 9, 13, of=of), t(2, 13, 22, of=of)
    if which != "y":
        x = TensorType.of((2, 9, 13), of, strides=(117, 1, 9))
    if which != "x":
        y = TensorType.of((2, 13, 22), of, strides=(286, 1, 13))
    check(region_of("matmul", [("x", x, False), ("y", y, False)]), 13)


def test_a_factor_with_gaps_everywhere() -> None:
    y = TensorType.of((13, 22), "f32", strides=(90, 3))
    check(region_of("matmul", [("x", t(9, 13), False), ("y", y, False)]), 13)


# ---- convolutions ------------------------------------------------------------------------------

CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 64, 14, 14), (64, 64, 1, 1), {}),
    ((2, 5, 9, 7), (3, 5, 1, 1), {"stride": 2}),
    ((2, 16, 9, 11), (24, 16, 3, 3), {"padding": 1}),
    ((1, 9, 8, 8), (17, 9, 3, 3), {"padding": (1, 0)}),
    ((1, 8, 7, 7), (16, 8, 3, 3), {"padding": 2}),
    ((1, 3, 20, 17), (11, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((2, 6, 12, 9), (8, 6, 3, 2), {"padding": (2, 1), "stride": (2, 1), "dilation": (2, 1)}),
    ((1, 8, 10, 10), (12, 4, 3, 3), {"padding": 1, "groups": 2}),
    ((2, 6, 5, 5), (12, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((1, 4, 6, 6), (4, 4, 3, 3), {"padding": 12, "dilation": 12}),
    ((1, 12, 17, 13), (18, 12, 3, 3), {"padding": 6, "dilation": 6}),
    ((2, 132, 9, 9), (18, 132, 3, 3), {"padding": 4, "dilation": 4}),
    ((2, 3, 9), (5, 3, 4), {"padding": 1, "stride": 2}),
    ((1, 4, 5, 4, 6), (6, 4, 2, 3, 3), {"padding": 1}),
    ((1, 1, 6, 6), (2, 1, 3, 3), {"padding": 1}),
    ((1, 16, 8, 10), (24, 16, 3, 3), {"padding": (0, 0, 1, 1), "stride": 2}),
    ((2, 3, 17, 20), (11, 3, 3, 3), {"padding": (1, 0, 1, 1), "stride": 2}),  # in a frame
    ((1, 12, 9, 8), (16, 12, 3, 3), {"padding": (2, 0, 0, 1)}),
    ((2, 3, 9), (5, 3, 4), {"padding": (3, 0)}),
]


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_conv(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any], extra: bool) -> None:
    inputs = [("x", t(*x, layout="nhwc"), False), ("w", t(*w, layout="nhwc"), True)]
    inputs += [("b", t(w[0]), True)] if extra else []
    act = ("relu6", {}) if extra else None
    check(region_of("conv", inputs, attrs, act, residual=extra), math.prod(w[1:]))


WEIGHTS = product(("f32", *LOW), (False, True), ("contiguous", "nhwc"))


@pytest.mark.parametrize(("of", "known", "layout"), one_in(5, WEIGHTS))
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_conv_of_every_type_and_weight(
    x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any], layout: str, known: bool, of: str
) -> None:
    if len(x) != 4 or x[1] == 1:  # there the weight's layout decides that of the result
        layout = "nhwc"
    inputs = [
        ("x", t(*x, layout="nhwc", of=of), False),
        ("w", t(*w, layout=layout, of=of), known),
        ("b", t(w[0], of=of), known),
    ]
    check(region_of("conv", inputs, attrs, ("relu", {}), residual=True), math.prod(w[1:]))


def test_an_image_with_gaps() -> None:
    x = TensorType.of((2, 3, 9, 7), "f32", strides=(1000, 1, 70, 5))
    for attrs in ({"padding": 1}, {"stride": 2}):
        inputs = [("x", x, False), ("w", t(8, 3, 3, 3, layout="nhwc"), True)]
        check(region_of("conv", inputs, attrs), 27)


@pytest.mark.parametrize("of", LOW)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("channels", [2, 18])
@pytest.mark.each_pair
def test_depthwise_of_16_bits(channels: int, known: bool, of: str) -> None:
    inputs = [
        ("x", t(2, channels, 11, 9, layout="nhwc", of=of), False),
        ("w", t(channels, 1, 3, 3, of=of), known),
        ("b", t(channels, of=of), known),
    ]
    attrs = {"padding": 1, "groups": channels}
    found = check(region_of("conv", inputs, attrs, ("silu", {}), residual=True), 9)
    assert {c.knobs["recipe"] for c in found} == {"depthwise"}


@pytest.mark.parametrize("channels", [1, 5, 16, 18])
@pytest.mark.parametrize(
    ("size", "kernel", "attrs"),
    [
        ((9, 9), (3, 3), {"padding": 1}),
        ((12, 7), (3, 3), {"padding": 1, "stride": 2}),
        ((11, 13), (5, 3), {"padding": (2, 1), "dilation": (1, 2)}),
        ((4, 3), (7, 7), {"padding": 3}),
        ((20,), (3,), {"padding": 1}),
        ((12, 8), (3, 3), {"padding": (0, 0, 1, 1), "stride": 2}),
        ((14, 12), (5, 5), {"padding": (1, 1, 2, 2), "stride": 2}),
        ((20,), (4,), {"padding": (3, 0)}),
    ],
)
@pytest.mark.each_value
def test_depthwise(
    channels: int, size: tuple[int, ...], kernel: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    x, w = t(2, channels, *size, layout="nhwc"), t(channels, 1, *kernel, layout="nhwc")
    inputs = [("x", x, False), ("w", w, True), ("b", t(channels), True)]
    found = check(
        region_of("conv", inputs, attrs | {"groups": channels}, ("silu", {}), residual=True),
        math.prod(kernel),
    )
    assert channels == 1 or {c.knobs["recipe"] for c in found} == {"depthwise"}


@pytest.mark.parametrize("channels", [3, 33, 256])
@pytest.mark.parametrize("filters", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(
    ("size", "kernel", "attrs"),
    [
        ((9, 10), (3, 3), {"padding": 1}),  # pixels of 256 channels: rows in parts
        ((8, 11), (5, 5), {"padding": 2, "stride": 2}),
        ((2, 21), (1, 19), {"padding": (0, 9), "dilation": (1, 2), "stride": (2, 1)}),
        ((3, 4, 5), (2, 3, 2), {"padding": (1, 2, 0)}),
    ],
)
@pytest.mark.each_pair
def test_several_filters_for_each_channel(
    channels: int, filters: int, size: tuple[int, ...], kernel: tuple[int, ...], attrs: Any
) -> None:
    made = channels * filters
    x, w = t(2, channels, *size, layout="nhwc"), t(made, 1, *kernel)
    inputs = [("x", x, False), ("w", w, filters != 2), ("b", t(made), filters != 2)]
    attrs = attrs | {"groups": channels}
    found = check(region_of("conv", inputs, attrs, ("silu", {}), residual=True), math.prod(kernel))
    assert {c.knobs["recipe"] for c in found} == {"depthwise"}


def test_threads_share_lines_of_a_depthwise_convolution() -> None:
    """They share channels as well only where lines are too few; each has something to do."""
    from deuteron.kernels.cpu.depthwise import _wide

    assert [_wide(lines, 2) for lines in (1, 3, 4, 7, 14)] == [2, 2, 1, 1, 1]
    assert [_wide(lines, 16) for lines in (1, 7, 14, 56)] == [13, 2, 1, 1]
    for threads in (1, 2, 3, 16):
        assert all(1 <= _wide(lines, threads) <= threads for lines in range(1, 40))


@pytest.mark.parametrize(("group", "groups"), [(2, 9), (4, 1), (4, 7), (8, 3), (16, 3)])
@pytest.mark.parametrize(
    ("size", "kernel", "attrs"),
    [
        ((9, 15), (3, 3), {"padding": 1}),
        ((12, 31), (3, 3), {"padding": 1, "stride": 2}),
        ((11, 13), (5, 3), {"padding": (2, 1), "dilation": (1, 2)}),
        ((4, 3), (7, 7), {"padding": 3}),  # more taps than are summed up at once
        ((20,), (3,), {"padding": 1}),
        ((12, 8), (3, 3), {"padding": (0, 0, 1, 1), "stride": 2}),
        ((6, 5), (2, 2), {"padding": (3, 4)}),  # windows that lie in the padding
        ((3, 4, 5), (2, 3, 2), {"padding": (1, 2, 0)}),
        ((5, 6), (1, 1), {}),
    ],
)
@pytest.mark.parametrize("of", ["f32", *LOW])
@pytest.mark.each_pair
def test_narrow_groups(
    group: int, groups: int, size: tuple[int, ...], kernel: tuple[int, ...], attrs: Any, of: str
) -> None:
    channels, known = group * groups, groups != 7
    x, w = (t(*s, layout="nhwc", of=of) for s in ((2, channels, *size), (channels, group, *kernel)))
    inputs = [("x", x, False), ("w", w, known), ("b", t(channels, of=of), known)]
    attrs = attrs | {"groups": groups}
    region = region_of("conv", inputs, attrs, ("silu", {}), residual=True)
    found = check(region, group * math.prod(kernel))
    alone = groups == 1 or group > llvm.width()
    assert alone or "grouped" in {c.knobs["recipe"] for c in found}


def test_a_line_of_many_channels_is_shared_out() -> None:
    """A long row has parts, and so have many channels of few pixels, for as many threads."""
    from deuteron.kernels.cpu.depthwise import Shape, _stretch

    def parts(kernel: tuple[int, int, int], breadth: int, channels: int) -> tuple[int, int]:
        shape = Shape(kernel, (1, 1, 1), (1, 1, 1), 7, 4)
        pixels, vectors = _stretch(shape, breadth, 4 * channels)
        return -(-breadth // pixels), -(-channels // 4 // vectors)

    assert parts((1, 1, 31), 1024, 256)[0] > 100
    assert parts((1, 3, 3), 14, 384)[1] > 4
    assert parts((1, 3, 3), 56, 144) == (1, 1)


@pytest.mark.parametrize(("c", "k", "size"), [(8, 8, (5, 5)), (64, 20, (14, 9)), (130, 64, (6, 7))])
def test_winograd_keeps_its_error(c: int, k: int, size: tuple[int, int]) -> None:
    inputs = [("x", t(2, c, *size, layout="nhwc"), False), ("w", t(k, c, 3, 3), True)]
    for padding in (1, (2, 0, 0, 1)):
        attrs = {"padding": padding}
        found = check(region_of("conv", inputs, attrs, ("relu", {}), residual=True), 9 * c)
    assert {f.knobs["tile"] for f in found if f.knobs["recipe"] == "winograd"} == {2, 4}


def test_an_estimate_alone_never_chooses_the_larger_winograd_tile() -> None:
    for c, size in ((64, 56), (128, 28), (512, 7)):
        inputs = [("x", t(1, c, size, size, layout="nhwc"), False), ("w", t(c, c, 3, 3), True)]
        region = region_of("conv", inputs, {"padding": 1})
        offers = ENGINE.candidates(region, CPU, POLICY)
        best = min(offers, key=lambda offer: ENGINE.estimate(region, CPU, offer))
        assert best.knobs.get("tile") != 4
        strict = Policy(max_error=2e-6)
        assert all(o.knobs.get("tile") != 4 for o in ENGINE.candidates(region, CPU, strict))


# ---- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", ["none", "f32", "bool", "row"])
@pytest.mark.parametrize(
    ("lead", "shared", "queries", "keys", "d", "dv"),
    [((2, 4), (2, 2), 9, 21, 7, 5), ((1, 3), (1, 1), 6, 6, 16, 16), ((2,), (2,), 1, 35, 9, 33)],
)
@pytest.mark.each_pair
def test_attention(
    causal: bool, bias: str, lead: Any, shared: Any, queries: int, keys: int, d: int, dv: int
) -> None:
    inputs = [
        ("q", t(*lead, queries, d), False),
        ("k", t(*shared, keys, d), False),
        ("v", t(*shared, keys, dv), False),
    ]
    if bias == "row":
        inputs.append(("bias", t(1, keys), False))
    elif bias != "none":
        inputs.append(("bias", TensorType.of((lead[-1], queries, keys), bias), False))
    check(region_of("attention", inputs, {"causal": causal}), keys)


def test_few_keys_and_values_of_attention_fill_panels_of_their_own() -> None:
    """Else half of what is multiplied for 32 values on AVX-512 would be zeros."""
    n = llvm.width()
    for keys, values in ((n, 2 * n), (8 * n, n), (2 * n, 8 * n)):
        sizes = (keys, 5, values)
        narrow = keys * 5 + values * keys
        room = room_per_thread(*sizes, n)
        assert room <= narrow + TILES[n][0][0] * (keys + 5 + values) + 15
        inputs = [("q", t(7, 5), False), ("k", t(keys, 5), False), ("v", t(keys, values), False)]
        inputs = [(name, t(1, 2, *type_.shape), known) for name, type_, known in inputs]
        check(region_of("attention", inputs), keys)


@pytest.mark.parametrize("of", LOW)
@pytest.mark.parametrize("bias", ["none", "same", "bool"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.each_pair
def test_attention_of_16_bits(causal: bool, bias: str, of: str) -> None:
    inputs = [
        ("q", t(2, 4, 9, 21, of=of), False),
        ("k", t(2, 2, 22, 21, of=of), False),
        ("v", t(2, 2, 22, 7, of=of), False),
    ]
    if bias != "none":
        kind = of if bias == "same" else bias
        inputs.append(("bias", TensorType.of((4, 9, 22), kind), False))
    check(region_of("attention", inputs, {"causal": causal}), 22)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    inputs = [(name, t(1, 1, 5, 4), False) for name in "qkv"]
    inputs.append(("bias", TensorType.of((5, 5), "bool"), False))
    region = region_of("attention", inputs)
    tensors = feed(region)
    tensors["bias"][2] = False
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    out = torch.full((1, 1, 5, 4), math.nan)
    built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
    assert (out[0, 0, 2] == 0).all()
    assert out.isfinite().all()


# ---- not a byte outside, read or written ------------------------------------------------------


def between_pages() -> None:
    """Run everything on tensors with walls before and after them."""
    libc, page, kept = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, []

    def walled(type_: TensorType, at_end: bool) -> torch.Tensor:
        size = type_.dtype.nbytes(type_.storage_numel)
        inner = -(-size // page) * page
        room = mmap.mmap(-1, inner + 2 * page)
        kept.append(room)
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        for wall in (base, base + page + inner):
            assert libc.mprotect(ctypes.c_void_p(wall), page, 0) == 0
        start = page + inner - size if at_end else page
        raw = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=start)
        return raw.view(type_.dtype.torch).as_strided(type_.shape, type_.strides)

    for region in walled_regions():
        tensors = feed(region)
        for candidate in ENGINE.candidates(region, CPU, POLICY):
            kernel = built(region, candidate, tensors)
            for at_end in (False, True):
                args = [
                    walled(region.graph.types[name], at_end).copy_(tensors[name])
                    for name in region.inputs
                ]
                out = walled(region.graph.types[region.outputs[0]], at_end).fill_(math.nan)
                kernel.fill(args, [out])
                assert not out.isnan().any(), candidate
    print("untouched", flush=True)
    os._exit(0)  # nobody takes the walls down


def walled_regions() -> list[Region]:
    """Odd sizes of everything, for the test that puts walls around each tensor."""
    found = [
        region_of(
            "linear", [("x", t(m, k), False), ("w", t(n, k), True)], residual=True, act=(act, {})
        )
        for m, n, k, act in ((1, 5, 3, "relu"), (7, 19, 37, "gelu"), (5, 16, 9, "relu"))
    ]
    for x, w, attrs in (
        *CONVS[1:8],
        ((1, 5, 9, 9), (5, 1, 3, 3), {"padding": 1, "groups": 5}),
        ((1, 18, 7, 5), (18, 1, 5, 5), {"stride": 2, "groups": 18}),
        ((1, 9, 6, 7), (11, 9, 3, 3), {"padding": 0}),
        ((1, 24, 6, 7), (24, 8, 3, 3), {"padding": 1, "groups": 3}),
        ((1, 12, 9, 8), (12, 4, 3, 3), {"stride": 2, "groups": 3}),
    ):
        inputs = [("x", t(*x, layout="nhwc"), False), ("w", t(*w, layout="nhwc"), True)]
        found.append(region_of("conv", inputs, attrs, ("relu", {}), residual=True))
    for of in ("f16", "bf16"):
        inputs = [("x", t(5, 7, of=of), False), ("w", t(19, 7, of=of), False)]
        found.append(region_of("linear", inputs, residual=True, act=("relu", {})))
        inputs = [("x", t(3, 5, 7, of=of), False), ("y", t(3, 7, 18, of=of), False)]
        found.append(region_of("matmul", inputs))
        inputs = [
            ("x", t(1, 3, 9, 7, layout="nhwc", of=of), False),
            ("w", t(5, 3, 3, 3, of=of), False),
        ]
        found.append(region_of("conv", inputs, {"padding": 1}))
    for kind in ("f32", "bool"):
        inputs = [
            ("q", t(1, 4, 7, 5), False),
            ("k", t(1, 2, 21, 5), False),
            ("v", t(1, 2, 21, 19), False),
        ]
        inputs.append(("bias", TensorType.of((4, 7, 21), kind), False))
        found.append(region_of("attention", inputs))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_no_byte_outside_is_read(repo: Path) -> None:
    """In a process of its own, which ends where it touches a wall."""
    walls = [sys.executable, "-m", "tests.test_cpu_kernels"]
    env = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(walls, cwd=repo, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "untouched", (done.returncode, done.stderr[-2000:])


# ---- values that are no numbers ----------------------------------------------------------------


@pytest.mark.parametrize(("name", "attrs"), one_in(6, ACTS))
def test_nan_and_infinity_go_through(name: str, attrs: dict[str, Any]) -> None:
    inputs = [("x", t(9, 21), False), ("w", t(21, 21), True)]  # as above: compiled already
    region = region_of("linear", inputs, residual=True, act=(name, attrs))
    tensors = feed(region)
    tensors["x"][0, 0], tensors["x"][1, 1] = math.nan, math.inf
    exact = evaluate(region.graph, tensors, float64=True)["y"]
    for candidate in ENGINE.candidates(region, CPU, POLICY):
        out = torch.zeros(9, 21)
        built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out.isinf(), exact.isinf())


REFERENCES = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "ndtr": ndtr,
}


# largest errors over all of float32, in units of the last place; of ndtr below 2⁻⁴ as at 2⁻⁴
ERRORS = {"exp": 1.1, "exp2": 1.5, "expm1": 2.0, "log": 1.0, "erf": 1.6, "tanh": 2.5}
ERRORS |= {"sin": 2.0, "cos": 2.0, "ndtr": 5.0}
LEAST = {"ndtr": 2.0**-4}


def over_arrays(module: Any, name: str, of: Callable[..., Any], lanes: int) -> None:
    """A function ``name(x, y, count)``: y = of(x) over arrays, ``count`` a multiple of lanes."""
    c = llvm.Code(module, name, [llvm.PTR, llvm.PTR, llvm.I64])
    x, y, count = c.args
    with c.loop(0, count, lanes) as i:
        c.store(of(c, c.load(c.at(x, i), lanes)), c.at(y, i))
    c.ret()


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [1, 4, 8, 64])
@pytest.mark.parametrize("name", list(llvm_math.FUNCTIONS))
def test_functions_keep_their_error_over_all_of_float32(name: str, lanes: int) -> None:
    step = 4099 if lanes == 4 else 65537
    bits = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]
    x = torch.cat([bits.view(torch.float32), torch.tensor(odd), torch.linspace(-20, 20, 4001)])
    x = x if name != "expm1" else x[~(x > 88)]
    x = x[: len(x) - len(x) % 64].contiguous()
    fn = llvm_math.FUNCTIONS[name]
    loaded = llvm.load(f"test {name} {lanes}", lambda m: over_arrays(m, "f", fn, lanes))
    y = torch.empty_like(x)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    kind(loaded["f"])(x.data_ptr(), y.data_ptr(), len(x))
    exact = REFERENCES[name](x.double())
    near = exact.float()
    assert torch.equal(y.isnan(), near.isnan())
    assert torch.equal(y.isinf(), near.isinf())
    zeros = (x == 0) & (near == 0)
    assert torch.equal(y[zeros].signbit(), near[zeros].signbit())
    finite = near.isfinite()
    least = math.frexp(LEAST.get(name, 2.0**-126))[1]
    exponent = torch.frexp(near[finite])[1].clamp(min=least) - 24
    off = (y[finite].double() - exact[finite]).abs() / torch.exp2(exponent.double())
    assert float(off.max()) <= ERRORS[name], float(x[finite][off.argmax()])


# ---- changes of layout -------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 7, 9), (2, 1, 3, 5), (2, 2, 1, 6), (3, 4, 33), (1, 5, 2, 3, 4), (2, 67, 9, 37)],
    ids=str,
)
@pytest.mark.parametrize("to", ["nhwc", "contiguous"])
def test_a_change_of_layout_moves_every_bit(to: str, shape: tuple[int, ...], of: str) -> None:
    start = "contiguous" if to == "nhwc" else "nhwc"
    region = region_of("to_layout", [("x", t(*shape, layout=start, of=of), False)], {"layout": to})
    if TensorType.of(shape, of, start).layout == TensorType.of(shape, of, to).layout:
        refusal = ENGINE.refuse(region, CPU, POLICY)
        assert refusal is not None and "row-major" in refusal.reason
        return
    tensors = feed(region)
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    alive, out = guarded(region.graph.types[region.outputs[0]], lambda flat: None)
    built(region, candidate, tensors).fill([tensors["x"]], [out])
    assert torch.equal(out, tensors["x"]) and alive()


@pytest.mark.parametrize("to", ["nhwc", "contiguous"])
def test_a_line_that_was_an_image_changes_its_layout(to: str) -> None:
    """Convolutions over lines run over images of one row; reshapes around a move move nothing."""
    build = GraphBuilder(table.infer, "test")
    start, first, then = ("contiguous", (2, 9, 21), (2, 9, 1, 21))
    if to == "contiguous":
        start, first, then = "nhwc", then, first
    build.input("x", t(*first, layout=start))
    (seen,) = build.emit("reshape", ["x"], {"shape": then})
    build.output("y", build.emit("to_layout", [seen], {"layout": to})[0])
    region = Region(build.finish(), frozenset(), 0)
    tensors = feed(region)
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    out = torch.empty_strided(then, region.graph.types[region.outputs[0]].strides)
    built(region, candidate, tensors).fill([tensors["x"]], [out])
    assert torch.equal(out, tensors["x"].reshape(then))


def test_a_reshape_that_is_read_outside_is_no_part_of_a_change_of_layout() -> None:
    """The kernel has one result; it took the image for the first of two and left the other as it
    was."""
    build = GraphBuilder(table.infer, "test")
    build.input("x", t(2, 9, 1, 21, layout="nhwc"))
    (line,) = build.emit("reshape", ["x"], {"shape": (2, 9, 21)})
    (moved,) = build.emit("to_layout", [line], {"layout": "contiguous"})
    build.output(line, line)
    build.output(moved, moved)
    refusal = ENGINE.refuse(Region(build.finish(), frozenset(), 0), CPU, POLICY)
    assert refusal is not None and "2 outputs" in refusal.reason


# ---- threads and files -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["product", "winograd"])
def test_two_threads_run_one_kernel_at_once(way: str) -> None:
    inputs = [("x", t(1, 32, 20, 20, layout="nhwc"), False), ("w", t(32, 32, 3, 3), True)]
    region = region_of("conv", inputs, {"padding": 1})
    tensors = feed(region)
    offers = ENGINE.candidates(region, CPU, POLICY)
    kernel = built(region, next(c for c in offers if c.knobs["recipe"] == way), tensors)
    images = [
        torch.randn(1, 32, 20, 20).contiguous(memory_format=torch.channels_last) for _ in range(2)
    ]
    order = [region.inputs.index("x"), region.inputs.index("w")]

    def once(image: torch.Tensor) -> torch.Tensor:
        args = [tensors["w"], tensors["w"]]
        args[order[0]] = image
        out = torch.empty_like(image)
        kernel.fill(args, [out])
        return out

    alone = [once(image) for image in images]
    wrong: list[int] = []

    def many(which: int) -> None:
        for _ in range(40):
            if not torch.equal(once(images[which]), alone[which]):
                wrong.append(which)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_a_damaged_object_is_compiled_again(damage: str) -> None:
    made: list[str] = []

    def make(name: str) -> Callable[[Any], None]:
        def write(module: Any) -> None:
            made.append(name)
            over_arrays(module, "f", llvm_math.exp, 4)

        return write

    name, other = f"damage {damage}", f"other {damage}"
    llvm.load(name, make(name))
    llvm.load(other, make(other))
    path = llvm.object_path(name)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "flipped": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "foreign": llvm.object_path(other).read_bytes(),
        }[damage]
    )
    llvm.forget()
    llvm.load(name, make(name))
    assert made == [name, other, name]
    assert path.read_bytes()[32:] == whole[32:]
    llvm.forget()
    llvm.load(name, make(name))
    assert made == [name, other, name], "a whole file is loaded, not made"


def test_one_thread_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    inputs = [("x", t(1, 16, 20, 20, layout="nhwc"), False), ("w", t(32, 16, 3, 3), True)]
    check(region_of("conv", inputs, {"padding": 1}), 144)


# ---- refusals ----------------------------------------------------------------------------------


def _linear(dtype: str = "f32", constant: bool = True, act: str = "relu") -> Region:
    x, w = TensorType.of((4, 8), dtype), TensorType.of((4, 8), dtype)
    return region_of("linear", [("x", x, False), ("w", w, constant)], act=(act, {}))


@pytest.mark.parametrize(
    ("region", "target", "says", "remedy"),
    [
        (_linear(), dt.target("h200"), "for the CPU", "cpu"),
        (_linear("f64"), CPU, "f64", "float32"),
        (region_of("linear", [("x", t(0, 8), False), ("w", t(4, 8), True)]), CPU, "empty", "torch"),
        (region_of("linear", [("x", t(3, 0), False), ("w", t(4, 0), True)]), CPU, "empty", "torch"),
        (
            region_of("matmul", [("x", t(3, 8), False), ("y", t(8), False)]),
            CPU,
            "vector",
            "one column",
        ),
        (
            region_of("conv", [("x", t(1, 4, 5, 5), False), ("w", t(3, 4, 3, 3), True)]),
            CPU,
            "not in nhwc",
            "layout",
        ),
    ],
)
def test_refusals_teach(region: Region, target: Target, says: str, remedy: str) -> None:
    refusal = ENGINE.refuse(region, target, POLICY)
    assert isinstance(refusal, Refusal)
    assert says in refusal.reason
    assert remedy in refusal.remedy


def test_winograd_is_for_32_bits() -> None:
    inputs = [
        ("x", t(1, 16, 9, 9, layout="nhwc", of="f16"), False),
        ("w", t(16, 16, 3, 3, of="f16"), True),
    ]
    offers = ENGINE.candidates(region_of("conv", inputs, {"padding": 1}), CPU, POLICY)
    assert "winograd" not in {o.knobs["recipe"] for o in offers}


@pytest.mark.parametrize("of", LOW)
def test_16_bits_keep_nan_and_infinity(of: str) -> None:
    region = region_of("linear", [("x", t(3, 2, of=of), False), ("w", t(5, 2, of=of), True)])
    tensors = feed(region)
    tensors["x"][0, 0], tensors["x"][1, 1] = math.nan, math.inf
    exact = evaluate(region.graph, tensors, float64=True)["y"]
    for candidate in ENGINE.candidates(region, CPU, POLICY):
        out = torch.zeros(3, 5, dtype=tensors["x"].dtype)
        built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out.isinf(), exact.isinf())


def test_few_candidates_are_offered() -> None:
    """Each is built and timed by a search, so each must have a chance."""
    for n, most in ((64, 2), (70, 3)):
        region = region_of("linear", [("x", t(40, 64), False), ("w", t(n, 64), True)])
        assert len(ENGINE.candidates(region, CPU, POLICY)) <= most


@pytest.mark.skipif(not llvm.has_masks(), reason="needs AVX-512")
def test_of_vectors_that_are_cut_lanes_are_masked() -> None:
    """Neither half of a tile that a group does not fill nor numbers one by one are computed."""
    inputs = [("x", t(1, 32, 5, 5, layout="nhwc"), False), ("w", t(32, 16, 3, 3), True)]
    (best, *_) = check(region_of("conv", inputs, {"padding": (1, 1), "groups": 2}), 16 * 9)
    assert best.knobs["vectors"] == 1
    module = ir.Module("x86_64")
    c = llvm.Code(module, "f", [llvm.PTR, llvm.PTR, llvm.I64])
    of = Stored(c, "f32")
    of.store(llvm_math.exp(c, of.load(c.args[0], 16)), c.args[1], of.first(c.args[2], 16))
    assert "masked.store.v16f32" in str(module)
    assert "scalef.ps.512" in str(module)


def test_without_llvmlite_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "available", lambda: False)
    refusal = ENGINE.refuse(_linear(), CPU, POLICY)
    assert refusal is not None
    assert refusal.remedy == "pip install llvmlite"


# ---- gradients of norms ------------------------------------------------------------------------


def norm_grad(
    op: str, shape: tuple[int, ...], dims: int, given: str, keep: tuple[int, ...] | None = None
) -> tuple[Region, dict[str, torch.Tensor]]:
    """One gradient on numbers far from 0; ``given`` names the inputs beyond x and grad."""
    gen = torch.Generator().manual_seed(0)
    sizes = {"x": shape, "grad": shape, "weight": shape[-dims:], "extra": shape}
    tensors = {
        name: torch.randn(size, generator=gen)
        for name, size in sizes.items()
        if name in ("x", "grad") or name in given
    }
    tensors["x"] += 1000.0
    b = GraphBuilder(table.infer, op)
    for name, tensor in tensors.items():
        b.input(name, TensorType.from_tensor(tensor))
    bias = "same" if "bias" in given else "none"
    ins = [name if name in tensors else None for name in sizes]
    outs = b.emit(op, ins, {"dims": dims, "eps": 1e-5, "bias": bias})
    for k in range(len(outs)) if keep is None else keep:
        b.output(f"y{k}", outs[k])
    return Region(b.finish()), tensors


ROWS = [((64, 1024), 1), ((7, 5), 1), ((3, 4, 33), 2), ((300, 70), 1), ((5, 2), 1), ((1, 129), 1)]
NORMS = [("layer_norm_grad", given) for given in ("weight bias extra", "bias", "")]
NORMS += [("rms_norm_grad", given) for given in ("weight extra", "")]


@pytest.mark.parametrize(("shape", "dims"), ROWS)
@pytest.mark.parametrize(("op", "given"), NORMS)
def test_gradients_of_norms(op: str, given: str, shape: tuple[int, ...], dims: int) -> None:
    region, tensors = norm_grad(op, shape, dims, given)
    check_norm_grad(region, tensors)


@pytest.mark.parametrize("keep", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_norms_that_nobody_reads_are_not_made(keep: tuple[int, ...]) -> None:
    check_norm_grad(*norm_grad("layer_norm_grad", (50, 40), 1, "weight bias", keep))


def test_a_long_row_costs_a_gradient_no_digits() -> None:
    """A sum of a million positive numbers in float32 would be off by hundreds of roundings."""
    region, tensors = norm_grad("rms_norm_grad", (1, 1 << 20), 1, "")
    tensors = {name: tensor.sigmoid() for name, tensor in tensors.items()}
    tensors["x"] = tensors["grad"].flip(1)
    (exact,) = evaluate(region.graph, tensors, float64=True).values()
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    out = torch.full_like(exact, math.nan, dtype=torch.float32)
    built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
    assert error(out, exact) <= allowed(0.0, torch.float32)


def check_norm_grad(region: Region, tensors: dict[str, torch.Tensor]) -> None:
    exact, plain = (evaluate(region.graph, tensors, float64=wide) for wide in (True, False))
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    outs = [torch.full(region.graph.types[v].shape, math.nan) for v in region.outputs]
    built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], outs)
    for out, (name, _) in zip(outs, region.graph.outputs, strict=True):
        bound = allowed(error(plain[name], exact[name]), torch.float32, tensors["x"].numel())
        assert error(out, exact[name]) <= bound


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])  # of which the last has no square
@pytest.mark.parametrize("op", ["layer_norm_grad", "rms_norm_grad"])
def test_gradients_of_norms_spoil_only_their_row(op: str, bad: float) -> None:
    region, tensors = norm_grad(op, (6, 40), 1, "weight", (0,))
    tensors["x"][2, 3] = bad
    (candidate,) = ENGINE.candidates(region, CPU, POLICY)
    out = torch.empty(6, 40)
    built(region, candidate, tensors).fill([tensors[v] for v in region.inputs], [out])
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4, 5]].isfinite().all()


if __name__ == "__main__":
    between_pages()
