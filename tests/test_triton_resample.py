"""Resizing and average pooling by hand: which elements are read, in Triton's interpreter, compiled
for GPUs that are not there, and offered.

``python -m tests.interpreted tests.test_triton_resample`` runs the cases in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import prod

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines.base import BuildContext, Candidate
from deuteron.engines.triton.common import settings
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.triton.resample import MOST_READ, OPS, axes
from deuteron.ir import Region, TensorType
from deuteron.kernels.resample_map import AxisMap, resized, windows
from deuteron.kernels.triton.resample_tiles import UNROLLED, ResampleTile, cuts
from deuteron.ops import TABLE
from deuteron.ops.evaluate import evaluate
from deuteron.ops.samples import Arg, Sample
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import Target, target
from tests.by_hand import moved
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.tolerances import SAME_CODE, SINGLE, allowed, error

H200 = target("h200")
KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
# beside the operators' own samples: many reads, wide rows, more channels than a tile takes
MORE = {
    "resize": (
        Sample((Arg((1, 2, 40, 37)),), {"size": (3, 4), "mode": "area"}),
        Sample((Arg((1, 2, 13, 7)),), {"size": (3, 6), "mode": "bicubic", "antialias": True}),
        Sample((Arg((2, 70, 3, 5), layout="nhwc"),), {"scale": 2.0, "mode": "bilinear"}),
        Sample((Arg((1, 1, 5, 300)),), {"size": (9, 290), "mode": "bilinear"}),
        Sample((Arg((1, 5, 33, 9)),), {"size": (61, 7), "mode": "nearest"}),
        Sample((Arg((1, 3, 20, 6), "extreme"),), {"size": (7, 11), "mode": "bilinear"}),
        Sample((Arg((1, 3, 20, 6), "extreme"),), {"size": (7, 5), "mode": "area"}),
        Sample((Arg((1, 3, 20, 6)),), {"size": (10, 6), "mode": "area"}),
        Sample((Arg((2, 6, 10, 6), layout="nhwc"),), {"size": (10, 3), "mode": "area"}),
        Sample((Arg((2, 3, 5, 40)),), {"scale": (3.0, 2.0), "mode": "nearest"}),
        Sample((Arg((2, 70, 3, 5), layout="nhwc"),), {"scale": (2.0, 1.0), "mode": "nearest"}),
    ),
    "resize_grad": (
        Sample((Arg((1, 2, 20, 5)),), {"shape": (1, 2, 2, 3), "mode": "bilinear"}),
        Sample(
            (Arg((2, 70, 6, 10), layout="nhwc"),),
            {"shape": (2, 70, 3, 5), "mode": "bilinear", "scale": 2.0},
        ),
        Sample((Arg((1, 2, 3, 40)),), {"shape": (1, 2, 20, 4), "mode": "nearest-exact"}),
    ),
    "avg_pool": (
        Sample((Arg((2, 3, 9, 64)),), {"kernel": (3, 2), "stride": 2, "padding": (1, 0)}),
        Sample((Arg((2, 70, 9, 12), layout="nhwc"),), {"kernel": 3, "stride": 2, "padding": 1}),
        Sample(
            (Arg((2, 6, 7, 9), layout="nhwc"),),
            {"kernel": (2, 3), "stride": (3, 1), "padding": 1, "count_include_pad": False},
        ),
        Sample((Arg((1, 2, 9, 19), "extreme"),), {"kernel": (5, 3), "stride": 1, "padding": 1}),
        Sample((Arg((1, 3, 30, 24)),), {"kernel": (11, 12), "stride": (3, 4)}),
    ),
    "avg_pool_grad": (
        Sample((Arg((2, 5, 4, 3), layout="nhwc"),), {"shape": (2, 5, 12, 6), "kernel": (3, 2)}),
        Sample((Arg((1, 2, 4, 3)),), {"shape": (1, 2, 12, 6), "kernel": (3, 2)}),
        Sample(
            (Arg((1, 2, 5, 5)),),
            {
                "shape": (1, 2, 13, 13),
                "kernel": 3,
                "stride": 3,
                "padding": 1,
                "count_include_pad": False,
            },
        ),
    ),
}


def samples() -> Iterator[tuple[str, Sample]]:
    for op in OPS:
        yield from ((op, sample) for sample in (*TABLE[op].samples(), *MORE.get(op, ())))


def region_of(op: str, x: torch.Tensor, attrs) -> Region:
    g = dt.Graph(op)
    getattr(g, op)(g.tensor("x", x.shape, x.dtype, strides=x.stride()), **attrs).output("y")
    return Region(g.ir(), frozenset(), 0)


def wrong_with(
    op: str, sample: Sample, kind: str, machine: Target, device: str, seen: set | None = None
) -> list[str]:
    """What the ways offered get wrong, compared with the reference in float64; with ``seen`` only
    those that run a variant of a kernel which is not in it."""
    (x,), engine, bad = sample.tensors(kind), TritonKernels(), []
    assert x is not None
    region = region_of(op, x, sample.attrs)
    refusal = engine.refuse(region, machine, Policy())
    if refusal is not None:
        assert x.ndim == 5 or x.numel() == 0 or "a factor was given" in refusal.reason
        return []
    chosen = engine.candidates(region, machine, Policy())[::2]  # of each kind the first
    if seen is not None:
        chosen = [c for c in chosen if (v := variant(region, c)) not in seen and not seen.add(v)]
    if not chosen:
        return []
    feed = {"x": x}
    exact = evaluate(region.graph, feed, float64=True)["y"]
    try:
        plain = evaluate(region.graph, feed)["y"]
    except NotImplementedError:  # torch smooths no 16-bit images on a CPU
        plain = exact.to(KINDS[kind])
    reduced = max(along.most for along in axes(region)) ** 2
    bound = allowed(error(plain, exact), KINDS[kind], reduced)
    for candidate in chosen:
        ctx = BuildContext(machine, torch.device(device), Policy(), {})
        out = poisoned(region.graph.types[region.outputs[0]], torch.device(device))
        engine.build(region, candidate, ctx).fill([moved(x, device)], [out])
        off = error(out, exact)
        if not off <= bound:
            bad.append(f"{op} {sample} {kind} {candidate}: {off:.3g} > {bound:.3g}")
    return bad


def variant(region: Region, candidate: Candidate) -> tuple:
    """What makes a kernel take another branch: flags, which tables there are, many or few reads."""
    from deuteron.kernels.triton.resample import call

    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    kernel, _, tables, _, constants = call(
        *types, *axes(region), ResampleTile(**settings(candidate.knobs))
    )
    known = constants._asdict()
    flags = [v for v in known.values() if isinstance(v, bool)]
    reads = [
        min(known.get(side, 1), UNROLLED + 1) > most
        for side in ("tall", "broad")
        for most in (1, UNROLLED)
    ]
    given = [t is None for table in tables for t in table]
    return kernel.fn.__name__, *flags, *reads, *given


def all_wrong(machine: Target, device: str, kinds: dict[str, int]) -> list[str]:
    """Of each kind every so-manieth sample."""
    cases = [
        (*case, kind) for kind, nth in kinds.items() for case in islice(samples(), 0, None, nth)
    ]
    return [w for case in cases for w in wrong_with(*case, machine, device)]


def main() -> None:
    seen: set = set()
    small = sorted(samples(), key=lambda case: prod(case[1].inputs[0].shape))
    failed = [w for case in small for w in wrong_with(*case, "f32", H200, "cpu", seen)]
    for kind in ("bf16", "f64"):
        for case in small[20:80:15]:
            failed += wrong_with(*case, kind, H200, "cpu", set())
    tell([(len(seen), failed)])


def test_in_the_interpreter():
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.test_triton_resample"), at_least=20)


# ---- which elements are read ---------------------------------------------------------------------


def matrix(along: AxisMap) -> torch.Tensor:
    """The map as a matrix [results, length]."""
    found = torch.zeros(along.results, along.length, dtype=torch.float64)
    for i, (first, count) in enumerate(
        zip(along.first.tolist(), along.count.tolist(), strict=True)
    ):
        row = torch.ones(count) if along.weights is None else along.weights[:count, i]
        by = 1.0 if along.divisors is None else along.divisors[i]
        found[i, first : first + count] = row.double() / by
    return found


def columns_of(length: int, fn, dtype: torch.dtype) -> torch.Tensor:
    """The same matrix by torch, from images that are 1 in one row each."""
    rows = torch.eye(length, dtype=dtype)[:, None, :, None].expand(-1, 2, -1, 3).contiguous()
    return fn(rows)[:, 1, :, 1].t().double()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_are_those_of_torch_for_all_ratios(mode):
    for length, size in product((1, 2, 3, 5, 7, 31, 100), (1, 2, 3, 4, 9, 17, 33, 99, 224)):
        x = torch.arange(length, dtype=torch.float32).view(1, 1, length)
        want = F.interpolate(x, size, mode=mode).flatten()
        assert torch.equal(
            resized(mode, length, size, False, False, None, False).first.float(), want
        )
    for length, scale in product((4, 7, 31, 100), (0.3, 0.5, 0.77, 1.51, 2.9, 3.3)):
        x = torch.arange(length, dtype=torch.float32).view(1, 1, length)
        want = F.interpolate(x, scale_factor=scale, mode=mode).flatten()
        found = resized(mode, length, int(length * scale), False, False, scale, False)
        assert torch.equal(found.first.float(), want), (length, scale)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_weights_are_those_of_torch(mode, corners, antialias):
    sizes = product((1, 2, 7, 33), (1, 3, 14, 40), (torch.float32, torch.float64))
    for length, size, dtype in sizes:
        how = {"mode": mode, "align_corners": corners, "antialias": antialias}
        double = dtype == torch.float64
        want = columns_of(length, lambda x: F.interpolate(x, (size, 3), **how), dtype)  # noqa: B023
        along = resized(mode, length, size, corners, antialias, None, double)
        bound = (SAME_CODE if double else SINGLE) * max(length, size)
        assert (matrix(along) - want).abs().max() <= bound, (length, size)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("padding_counts", [False, True])
def test_means_are_those_of_torch_and_gradients_their_transpose(ceil_mode, padding_counts):
    for length, kernel, stride, divisor in product((5, 8, 13), (1, 2, 3, 5), (1, 2, 4), (None, 3)):
        for padding in range(kernel // 2 + 1):
            how = (padding, 0), ceil_mode, padding_counts, divisor
            want = columns_of(
                length,
                lambda x: F.avg_pool2d(x, (kernel, 1), (stride, 1), *how),  # noqa: B023
                torch.float64,
            )
            window = (kernel, stride, padding)
            along = windows(length, len(want), window, padding_counts, divisor, True)
            assert torch.allclose(matrix(along), want, rtol=SAME_CODE, atol=0)
            turned = matrix(along.transposed)
            assert torch.allclose(turned, want.t(), rtol=SAME_CODE, atol=0)


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "order"),
    [
        *((80, "bf16", "contiguous"), (90, "bf16", "nhwc")),
        pytest.param(90, "f64", "contiguous", marks=pytest.mark.sweep),
    ],
)
def test_compiles_without_spills(arch, dtype, order, monkeypatch):
    """Upsampling walks down the rows, means and their gradients read all that they need."""
    pytest.importorskip("triton")
    from tests.launched import assert_none_spill, compiled
    from tests.launched import region_of as region

    x = TensorType.of((4, 64, 112, 112), dtype, order)
    y = TensorType.of((4, 64, 56, 56), dtype, order)
    two, three = {"kernel": 2}, {"kernel": 3, "stride": 2, "padding": 1}
    for op, given, attrs in (
        ("resize", y, {"scale": 2, "mode": "bicubic"}),
        ("resize_grad", x, {"scale": 2, "mode": "bilinear", "shape": y.shape}),
        ("avg_pool_grad", y, {**three, "shape": x.shape}),
        ("avg_pool", x, two),
        ("avg_pool_grad", y, {**two, "shape": x.shape}),
    )[: 3 if dtype == "f64" else 5]:
        kernels = compiled(region(op, given, **attrs), arch, monkeypatch)
        assert_none_spill(kernels, arch, op)


# ---- offered -------------------------------------------------------------------------------------


def test_refuses_with_a_reason():
    pytest.importorskip("triton")
    engine, x = TritonKernels(), torch.empty(1, 2, 100, 100)
    for op, given, attrs, reason in (
        ("resize", x, {"size": (1, MOST_READ + 1), "mode": "area"}, "too many"),
        ("resize", x[..., None, :], {"size": (2, 2, 2)}, "volumes"),
        ("resize", x[:0], {"size": (2, 2)}, "nothing"),
        ("resize", x, {"scale": 1.001}, "factor"),
        ("avg_pool", torch.empty(1).expand(1, 2, 2**16, 2**16), {"kernel": 2}, "32 bits"),
    ):
        refusal = engine.refuse(region_of(op, given, attrs), H200, Policy())
        assert refusal is not None and reason in refusal.reason, (op, attrs)


@pytest.mark.parametrize("op", ["resize", "avg_pool", "adaptive_avg_pool"])
def test_is_chosen_by_estimate_forward_and_backward(op):
    pytest.importorskip("triton")
    how = {
        "resize": {"scale": 2, "mode": "bilinear"},
        "avg_pool": {"kernel": 2},
        "adaptive_avg_pool": {"size": 28},
    }[op]
    g = dt.Graph(op)
    y = getattr(g, op)(g.tensor("x", (8, 64, 56, 56), torch.bfloat16), **how)
    y.output("y")
    regions = g.grad("y", wrt="x").compile(device="cpu").explain(target="h200").report.regions
    ours = ["triton_kernels[recipe=resample"]
    ours += ["triton_gen"] if op != "resize" else []  # whose weights it does not know
    assert sum(region.candidate.startswith(tuple(ours)) for region in regions) >= 2


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind):
    failed = all_wrong(target("cuda"), "cuda", {kind: 5 if kind == "f32" else 9})
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
def test_functions_and_their_gradients_on_a_gpu():
    x = torch.randn(4, 64, 56, 56, device="cuda", dtype=torch.float64)
    for name, fn in (
        ("interpolate", lambda f, x: f.interpolate(x, scale_factor=2, mode="bicubic")),
        ("interpolate", lambda f, x: f.interpolate(x, (20, 33), mode="area")),
        ("avg_pool2d", lambda f, x: f.avg_pool2d(x, 3, 2, 1)),
    ):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        with dt.functional.delegation(False):
            found = fn(dt.functional, ours)
        want = fn(F, theirs)
        seed = torch.randn_like(want)
        found.backward(seed)
        want.backward(seed)
        bound = allowed(0.0, torch.float64, 64)
        assert error(found, want) <= bound and error(ours.grad, theirs.grad) <= bound, name


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(huge_images):
    from deuteron.kernels.triton.resample import resample

    x, planes = huge_images, huge_images.shape[1]
    x[0, -2:] = 2.0
    halved = windows(8, 4, (2, 2, 0), True, None, False)
    y = torch.full((1, planes, 4, 4), 7.0, dtype=x.dtype, device="cuda")
    dx = torch.full_like(x, 7.0)
    for given, out, along in ((x, y, halved), (y, dx, halved.transposed)):
        kinds = [TensorType.from_tensor(t) for t in (given, out)]
        for cut in (ResampleTile(32, 4, 8, 4), cuts(kinds[1], along, along)[0]):
            out.fill_(7.0)
            resample(*kinds, (along, along), cut, x.device)(given, out)
            value = 2.0 if along is halved else 0.5
            assert (out[0, -2:] == value).all() and not out[0, :-2].any(), cut


if __name__ == "__main__":
    main()
