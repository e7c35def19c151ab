"""Max pooling by hand: in Triton's interpreter, compiled for GPUs that are not there, and offered;
and the operators that keep the winners.

``python -m tests.interpreted tests.test_max_pool`` runs the cases in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.functional.backward import Backward
from deuteron.functional.core import FUNCTIONS
from deuteron.functional.operators import operator
from deuteron.ir import Region, TensorType
from deuteron.ops.evaluate import evaluate
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import Target, target
from tests import by_hand
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.optimised import optimised
from tests.tolerances import allowed, error

f = dt.functional
H200 = target("h200")
Case = tuple[tuple[int, ...], dict[str, Any], str]
CASES: list[Case] = [  # rows in pairs and not, channels last, in a loop; and odd windows
    ((1, 3, 9, 11), {"kernel": 3, "stride": 2, "padding": 1}, "contiguous"),
    ((1, 2, 4, 48), {"kernel": 3, "stride": 2, "padding": 1}, "contiguous"),
    ((2, 3, 7, 6), {"kernel": 3, "stride": 2, "padding": 1}, "nhwc"),
    ((1, 20, 7, 6), {"kernel": 2}, "nhwc"),
    ((1, 2, 6, 7), {"kernel": 3, "stride": 1, "padding": 1}, "contiguous"),
    ((1, 2, 8, 11), {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 0)}, "sliced"),
    ((1, 2, 7, 9), {"kernel": 7, "stride": 1, "padding": 3}, "contiguous"),
    ((1, 2, 9, 8), {"kernel": 3, "stride": 2, "padding": 1, "dilation": 2}, "contiguous"),
]
MORE: list[Case] = [  # on a GPU
    ((2, 3, 13, 11), {"kernel": 2}, "contiguous"),
    ((1, 3, 12, 11), {"kernel": 3, "stride": 2, "padding": 1, "ceil_mode": True}, "contiguous"),
    ((1, 2, 9, 17), {"kernel": (1, 4), "stride": (1, 2), "padding": (0, 2)}, "contiguous"),
    ((1, 4, 9, 10), {"kernel": 3, "stride": 2}, "half of the channels"),
    ((1, 2, 12, 13), {"kernel": 6, "stride": 5, "padding": 1, "dilation": 2}, "nhwc"),
    ((2, 3, 40), {"kernel": 3, "stride": 2, "padding": 1}, "contiguous"),
    ((2, 6, 10), {"kernel": 2, "ceil_mode": True}, "nhwc"),
]
ADAPTIVE: list[Case] = [((1, 3, 6, 9), {"size": (2, 3)}, "contiguous")]


def data(shape: tuple[int, ...], order: str, dtype: torch.dtype) -> torch.Tensor:
    """Ties, what is not a number, and a plane of nothing but −inf."""
    gen = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=gen, dtype=torch.float64) * 2).round() / 2
    x.view(shape[0], shape[1], -1)[0, 0, ::5] = float("nan")
    x[-1, -1] = -float("inf")
    x = x.to(dtype)
    if order == "sliced":
        return torch.cat([x, x], -1)[..., : shape[-1]]
    if order == "half of the channels":
        return _last(torch.cat([x, x], 1))[:, : shape[1]]
    return _last(x) if order == "nhwc" else x


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def region(op: str, feed: dict[str, torch.Tensor], attrs: dict[str, Any]) -> Region:
    def write(build: dt.Graph, **given: Any) -> Any:
        return getattr(build, op)(*given.values(), **attrs)

    return Region(by_hand.graph_of("pool", feed, write), frozenset(), 0)


def regions(case: Case, dtype: torch.dtype) -> Iterator[tuple[Region, dict[str, torch.Tensor]]]:
    """The operators of a case, each with tensors to feed it."""
    shape, attrs, order = case
    x = data(shape, order, dtype)
    base = "adaptive_max_pool" if "size" in attrs else "max_pool"
    for op in (base, f"{base}_with_indices"):
        yield region(op, {"x": x}, attrs), {"x": x}
    y = evaluate(region(base, {"x": x}, attrs).graph, {"x": x})["y0"]
    gen = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=gen, dtype=torch.float64).to(dtype)
    yield region(f"{base}_grad", {"g": grad, "x": x}, attrs), {"g": grad, "x": x}
    if "size" in attrs:
        return
    both = region("max_pool_with_winners", {"x": x}, attrs)
    yield both, {"x": x}
    winners = evaluate(both.graph, {"x": x})["y1"]
    attrs = {**attrs, "shape": shape, "order": "nhwc" if order == "nhwc" else "contiguous"}
    one = grad[:1, :1].expand(grad.shape)  # as the gradient of a sum comes
    for g in (grad, one):
        feed = {"g": g, "winners": winners}
        yield region("max_pool_winners_grad", feed, attrs), feed


def wrong_with(
    machine: Target, device: str, case: Case, dtype: torch.dtype, most: int
) -> list[str]:
    bad = []
    for pool, feed in regions(case, dtype):
        assert TritonKernels().refuse(pool, machine, Policy()) is None
        name = f"{pool.ops} {case} {dtype}"
        bad += by_hand.compare(name, pool, feed, device, most, gpus=(machine,))[1]
    return bad


def main() -> None:
    failed = [
        w for case in CASES + ADAPTIVE for w in wrong_with(H200, "cpu", case, torch.float32, 1)
    ]
    for dtype, case in ((torch.bfloat16, CASES[0]), (torch.float64, CASES[2])):
        failed += wrong_with(H200, "cpu", case, dtype, 2)
    tell([(0, failed)])


def test_in_the_interpreter():
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.test_max_pool"))


@pytest.mark.parametrize(
    ("arch", "dtype", "order", "kernel", "stride"),
    [
        (80, "bf16", "contiguous", 3, 2),
        pytest.param(90, "bf16", "nhwc", 3, 2, marks=pytest.mark.sweep),
        pytest.param(90, "f32", "contiguous", 2, 2, marks=pytest.mark.sweep),
        pytest.param(90, "f64", "nhwc", 7, 4, marks=pytest.mark.sweep),
    ],
)
def test_compiles_without_spills(arch, dtype, order, kernel, stride, monkeypatch):
    """And where steps are short no element changes hands on its way: no barriers."""
    pytest.importorskip("triton")
    from tests.launched import assert_none_spill, compiled, region_of

    x = TensorType.of((4, 64, 112, 112), dtype, order)
    attrs = {"kernel": kernel, "stride": stride, "padding": kernel // 2 if kernel > 2 else 0}
    pool = region_of("max_pool", x, **attrs)
    y = pool.graph.types[pool.outputs[0]]
    kernels = compiled(pool, arch, monkeypatch)
    kernels += compiled(region_of("max_pool_grad", y, x, **attrs), arch, monkeypatch)
    assert len(kernels) == 3
    assert stride > 2 or not any("bar.sync" in k.asm["ptx"] for k in kernels)
    kernels += compiled(region_of("max_pool_with_indices", x, **attrs), arch, monkeypatch)
    assert_none_spill(kernels, arch)


@pytest.mark.parametrize(
    ("shape", "attrs", "reason"),
    [
        ((2, 3, 4, 4, 4), {"kernel": 2}, "volumes"),
        ((2, 3, 40, 40), {"kernel": 16}, "more than 255"),
        ((0, 3, 4, 4), {"kernel": 2}, "a size is 0"),
        ((1, 3, 7, 7), {"size": 3}, "not all of one size"),
    ],
)
def test_what_is_refused(shape, attrs, reason):
    pytest.importorskip("triton")
    op = "adaptive_max_pool" if "size" in attrs else "max_pool"
    pool = region(op, {"x": torch.empty(shape)}, attrs)
    refusal = TritonKernels().refuse(pool, H200, Policy())
    assert refusal is not None and reason in refusal.reason


# ---- the operators that keep winners -------------------------------------------------------------


def with_winners(x: torch.Tensor, *how: Any) -> torch.Tensor:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    run = operator("max_pool_with_winners")
    found: torch.Tensor = run(x, **dict(zip(names, how, strict=False)))[0]
    return found


@pytest.mark.parametrize(
    "how", [(2, None, 0, 1, False), (3, 2, 1, 1, True), ((3, 2), (1, 2), (1, 0), (2, 1), False)]
)
@pytest.mark.parametrize("order", ["contiguous", "nhwc"])
def test_the_gradient_by_winners_is_torchs(how, order):
    kernel, stride, padding, dilation, ceil = [
        (v,) if isinstance(v, int) and not isinstance(v, bool) else v for v in how
    ]
    x = data((2, 3, 9, 8), order, torch.float64).nan_to_num(3.0, neginf=-9.0)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = with_winners(ours, kernel, stride, padding, dilation, ceil)
    z = F.max_pool2d(theirs, *how)
    grad = torch.randn(z.shape, dtype=z.dtype)
    y.backward(grad)
    z.backward(grad)
    assert torch.equal(y, z) and y.stride() == z.stride()
    assert error(ours.grad, theirs.grad) <= allowed(0.0, torch.float64)


@pytest.mark.parametrize("op", ["max_pool", "max_pool_with_winners", "max_pool_with_indices"])
@pytest.mark.parametrize("order", ["contiguous", "nhwc"])
def test_is_chosen_by_estimate(op, order):
    """And so are the gradients, which a function of ours plans by themselves."""
    pytest.importorskip("triton")
    window = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
    attrs, x = {**window, "ceil_mode": False}, TensorType.of((8, 64, 56, 56), "bf16", order)
    function = FUNCTIONS[f"op_{op}"]
    pull = Backward(function, (x,), attrs, (True,))
    back, _ = pull.graph(pull.of, [pull.results[i].dense_like() for i in pull.of])
    for graph in (function.graph((x,), attrs), back):
        (choice,) = decide(graph, H200, Policy()).choices
        assert choice.candidate.engine in ("triton_kernels", "triton_gen"), graph


def test_the_backward_pass_keeps_a_byte_of_each_window():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    y = with_winners(x, (2,))
    (kept,) = y.grad_fn.saved_tensors
    assert kept.dtype is torch.uint8 and kept.shape == y.shape


def test_second_derivatives_go_through_winners():
    x = torch.randn(1, 2, 6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: with_winners(x, (3,), (2,), (1,)).square(), x)


def test_a_window_that_a_byte_cannot_number():
    with pytest.raises(dt.errors.GraphError, match="a byte numbers 255"):
        with_winners(torch.randn(1, 1, 32, 32), (16,))


@pytest.mark.parametrize("places", [False, True], ids=["", "places that nobody reads"])
@pytest.mark.parametrize("layout", ["contiguous", "nhwc"])
def test_a_graph_with_its_gradient_keeps_winners_on_a_gpu(layout, places):
    pytest.importorskip("triton")
    g = dt.Graph("step")
    x = g.tensor("x", (2, 3, 9, 8), "f64", layout=layout)
    how = {"kernel": 3, "stride": 2, "padding": 1}
    first = g.max_pool_with_indices(x, **how)[0] if places else g.max_pool(x, **how)
    pooled = [first, g.max_pool(x, kernel=2)]
    g.sum(g.square(pooled[0])).output("loss")
    pooled[1].output("other")
    graph = g.grad("loss", wrt=["x"]).ir()
    kept, records = optimised(graph, H200)
    assert next(r.fired for r in records if r.name == "keep winners")
    ops = [n.op for n in kept.nodes]
    assert ops.count("max_pool_with_winners") == ops.count("max_pool_winners_grad") == 1
    assert ops.count("max_pool") == 1 and "max_pool_grad" not in ops
    feed = {"x": data((2, 3, 9, 8), layout, torch.float64).nan_to_num(3.0, neginf=-9.0)}
    wanted, found = evaluate(graph, feed), evaluate(kept, feed)
    for name, value in wanted.items():
        assert error(found[name], value) <= allowed(0.0, torch.float64), name
    assert "max_pool_grad" in [n.op for n in optimised(graph, target("cpu"))[0].nodes]


if __name__ == "__main__":
    main()
