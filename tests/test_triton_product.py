"""Products with what follows them: in Triton's interpreter, compiled for GPUs that are not there,
what is refused, and when one kernel is taken for all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton.common import from_lines
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.triton.multiplied import as_product
from deuteron.ir import Region
from deuteron.plan.choose import Choice, Survey, choose, heuristic
from deuteron.policy import Policy
from deuteron.target import target
from tests import product_cases
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import assert_none_spill, compiled

pytest.importorskip("triton")
H200 = target("h200")


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.product_cases"), at_least=40)


def region(rows: int = 512, steps: int = 768, columns: int = 3072, dtype: str = "bf16") -> Region:
    """linear + bias, exact gelu, residual."""
    g = dt.Graph()
    x, w = g.tensor("x", (rows, steps), dtype), g.tensor("w", (columns, steps), dtype)
    b, r = g.tensor("b", (columns,), dtype), g.tensor("r", (rows, columns), dtype)
    (g.gelu(g.linear(x, w, b)) + r).output("y")
    return Region(g.ir(), frozenset(), 0)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(90, "bf16"), (80, "bf16"), pytest.param(90, "f16", marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("rows", [8192, pytest.param(16, marks=pytest.mark.sweep)])
def test_compiles_for_matrix_units_without_spills(arch, dtype, rows, monkeypatch):
    kernels = compiled(region(rows, dtype=dtype), arch, monkeypatch, most=2)
    assert_none_spill(kernels, arch)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        if arch == 90 and rows > 64:  # the copy engine brings tiles, four warps multiply together
            assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx
        elif "_add_up" not in kernel.metadata.name:
            assert "cp.async" in ptx and "mma.sync" in ptx


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (product_cases.batched, "a residual, a number for each row"),
        (product_cases.shared_out, "a gradient of a weight, and a residual"),
        pytest.param(
            product_cases.several, "a gate, and both of its products", marks=pytest.mark.sweep
        ),
    ],
)
def test_batches_parts_of_sums_and_several_results_compile(arch, made, name, monkeypatch):
    """Where the GPU is a Hopper, by the copy engine, which knows where a matrix ends."""
    one = next(c for c in made(torch.bfloat16) if c.name == name)
    kernels = compiled(one.region(), arch, monkeypatch, divided=arch == 90)
    assert_none_spill(kernels, arch)
    first, *rest = (k.asm["ptx"] for k in kernels)
    for brought in ("wgmma.mma_async", "cp.async.bulk.tensor") if arch == 90 else ("cp.async.c",):
        assert brought in first
    assert len(rest) == (made is product_cases.shared_out)  # what adds up its parts


@pytest.mark.parametrize(
    ("arch", "kind"), [(90, "f8e4m3"), (80, "i8"), pytest.param(90, "i8", marks=pytest.mark.sweep)]
)
def test_bytes_compile_for_matrix_units(arch, kind, monkeypatch):
    g = dt.Graph()
    x, w = g.tensor("x", (4096, 1024), kind), g.tensor("w", (2048, 1024), kind)
    rows, columns = g.tensor("r", (4096, 1), "f32"), g.tensor("c", (2048,), "f32")
    y = g.linear(x, w)
    (g.cast(y, dtype="f32") * rows * columns if kind == "i8" else y * rows * columns).output("y")
    kernels = compiled(Region(g.ir(), frozenset(), 0), arch, monkeypatch, most=1)
    assert_none_spill(kernels, arch)
    ptx = kernels[0].asm["ptx"]
    assert {("i8", 80): "mma.sync", ("i8", 90): ".s32.s8.s8"}.get((kind, arch), "e4m3") in ptx


@pytest.mark.parametrize(
    ("arch", "way"),
    [(90, "tf32x3"), (80, "tf32"), pytest.param(80, "tf32x3", marks=pytest.mark.sweep)],
)
def test_float32_compiles_for_matrix_units(arch, way, monkeypatch):
    policy = Policy(float32=way)
    g = dt.Graph()
    g.gelu(g.linear(g.tensor("x", (4096, 1024)), g.tensor("w", (2048, 1024)))).output("y")
    region = Region(g.ir(), frozenset(), 0)
    kernels = compiled(region, arch, monkeypatch, policy=policy)
    assert_none_spill(kernels, arch)
    assert ".tf32.tf32" in kernels[0].asm["ptx"]
    refusal = TritonKernels().refuse(region, H200, Policy())
    assert refusal is not None and refusal.remedy == "Policy(float32='tf32x3')"


def test_plans_of_bytes_take_the_kernel_by_estimate():
    g = dt.Graph()
    x, w = g.tensor("x", (4096, 1024), "i8"), g.tensor("w", (2048, 1024), "i8")
    (g.cast(g.linear(x, w), dtype="f32") * 0.01).output("y")
    whole, survey = Region(g.ir(), frozenset(), 0), Survey(H200, Policy())
    assert [c.candidate.engine for c in choose(whole, heuristic(survey), survey)] == [
        "triton_kernels"
    ]
    refusal = TritonKernels().refuse(_bytes("f8e4m3"), target("a100"), Policy())
    assert refusal is not None and "no floats of 8 bits" in refusal.reason


def _bytes(kind: str) -> Region:
    g = dt.Graph()
    g.linear(g.tensor("x", (64, 64), kind), g.tensor("w", (64, 64), kind)).output("y")
    return Region(g.ir(), frozenset(), 0)


def test_what_is_no_product_of_matrices_is_refused():
    def why(write) -> str:
        g = dt.Graph()
        write(g).output("y")
        refusal = TritonKernels().refuse(Region(g.ir(), frozenset(), 0), H200, Policy())
        return "" if refusal is None else refusal.reason

    def linear(g, rows=64, steps=64, columns=64, kind="bf16"):
        return g.linear(g.tensor("x", (rows, steps), kind), g.tensor("w", (columns, steps), kind))

    assert why(linear) == ""
    assert "of f64, not of 16 bits" in why(lambda g: linear(g, kind="f64"))
    assert why(lambda g: linear(g, steps=63)) == why(lambda g: linear(g, columns=50257)) == ""
    assert "do not begin at multiples of 16" in why(lambda g: linear(g, steps=63, kind="i8"))
    assert "a size is 0" in why(lambda g: linear(g, rows=0))
    assert "another shape" in why(lambda g: linear(g) + g.tensor("r", (2, 64, 64), "bf16"))
    assert "of another kind" in why(lambda g: g.cast(linear(g) > 0.0, dtype="bf16"))
    assert "the result is of i32" in why(lambda g: g.cast(linear(g), dtype="i32"))

    def batched(g, kind="bf16", strides=None):
        return g.matmul(*(g.tensor(n, (4, 3, 2, 64, 64), kind, strides=strides) for n in "xy"))

    assert why(batched) == ""
    assert "batch of products of bytes" in why(lambda g: batched(g, "f8e4m3"))
    strides = (4096, 3 * 16384, 9 * 16384, 64, 1)
    assert "more than two steps" in why(lambda g: batched(g, strides=strides))
    vector = lambda g: g.matmul(g.tensor("x", (64,), "bf16"), g.tensor("y", (64, 8), "bf16"))  # noqa: E731
    assert "not a product of a matrix by a matrix" in why(vector)


def test_batches_are_counted_by_two_numbers():
    """Neighbours that every tensor walks by equal steps are one; a bias of heads is not walked by
    images."""
    cases = {c.name: as_product(c.region()) for c in product_cases.batched(torch.float16)}
    windows = cases["windows: heads side by side, a bias for each head, a mask for each image"]
    assert windows.batches == (2, 3) and windows.left.inner == 32 and not windows.even
    assert [kind for _, kind in windows.others] == ["imn", "on"]
    shared = cases["one second factor for all heads, one first factor for all images"]
    assert (shared.left.inner, shared.right.outer) == (0, 0) and shared.batches == (2, 3)
    assert cases["a residual, a number for each row"].batches == (1, 3)


def test_sums_are_shared_out_where_there_are_few_tiles():
    def offered(rows: int, steps: int, columns: int) -> list[int]:
        one = region(rows, steps, columns)
        return [c.knobs["parts"] for c in TritonKernels().candidates(one, H200, Policy())]

    assert max(offered(64, 14336, 4096)) > 1 and max(offered(768, 16384, 768)) > 1
    assert max(offered(16, 4096, 4096)) > 1
    assert max(offered(8192, 4096, 4096)) == 1 == max(offered(64, 256, 4096))


def test_what_follows_is_one_formula():
    work = as_product(region())
    assert [kind for _, kind in work.others] == ["columns", "all"]
    assert work.formula.inputs == ("sums", "o0", "o1") and work.right.turned


def test_one_kernel_is_held_against_a_library_and_a_generated_one(monkeypatch):
    """By what each takes: the whole where it is quicker than its parts."""
    whole = region()
    took = {True: 5e-6, False: 3e-6}  # the whole, and each of its parts

    def pick(part: Region) -> Choice:
        options, _ = survey.ask(part)
        ours = [o for o in options if o.candidate.engine == "triton_kernels"]
        option = ours[0] if part.text == whole.text else options[0]
        return Choice(part, replace(option, measured_s=took[part.text == whole.text]))

    survey = Survey(H200, Policy())
    assert [c.region.ops for c in choose(whole, pick, survey)] == [("linear", "gelu", "add")]
    took[True] = 7e-6
    assert [c.region.ops for c in choose(whole, pick, survey)] == [("linear",), ("gelu", "add")]


def test_plans_by_estimate_leave_products_to_libraries():
    survey = Survey(H200, Policy())
    for rows in (1, 128, 16384):
        chosen = choose(region(rows), heuristic(survey), survey)
        assert "triton_kernels" not in {c.candidate.engine for c in chosen}


def test_tiles_fit_into_shared_memory():
    """A residual comes by tiles as well, for which large ones leave no room; smaller GPUs have
    less of it."""
    plain, more = region(8192), region(8192, dtype="f16")
    for machine, least in ((H200, 128), (target("a100"), 128), (target("l4"), 64)):
        for each in (plain, more):
            offered = TritonKernels().candidates(each, machine, Policy())
            assert offered and all(c.knobs["rows"] >= least for c in offered[:1])


def test_tensors_that_begin_anywhere_are_copied_for_the_copy_engine():
    """With the steps that they have, inputs before and results after."""

    def kernel(x, w, y):
        assert not any(t.data_ptr() % 16 for t in (x, w, y))
        assert (x.stride(), y.stride()) == ((12, 1), (1, 3))
        y.copy_(x[:, :4] @ w)

    memory = torch.arange(64.0)
    x, w = memory[1:37].view(3, 12), memory[:16].view(4, 4)
    y = torch.zeros(16)[3:15].view(4, 3).T
    from_lines(kernel, 2)(x, w, y)
    assert torch.equal(y, x[:, :4] @ w) and torch.equal(memory, torch.arange(64.0))


def test_an_expanded_tensor_that_begins_anywhere_is_copied_once():
    seen = []
    memory = torch.arange(64.0)
    x, y = memory[1:13].view(1, 3, 4).expand(5, 3, 4), torch.zeros(5, 3, 4)

    def kernel(x, y):
        seen.append((x.data_ptr() % 16, x.stride()))
        y.copy_(2 * x)

    from_lines(kernel, 1)(x, y)
    assert seen == [(0, x.stride())] and torch.equal(y, 2 * x)
