"""The augmentation kernels on a GPU: against the planned graph in float64, torchvision, themselves.

Every failure prints the pipeline, the type and the errors, so that one run tells what is wrong.
"""

from __future__ import annotations

import pytest
import torch
from augment_cases import BACKWARD, FORWARD, GRADIENTS, PIPELINES, images, plain
from tolerances import AT_A_CORNER, AT_A_STEP, CORNER, allowed, error

import deuteron as dt
from deuteron.augment import (
    Brightness,
    ColorJitter,
    Contrast,
    Hue,
    Normalize,
    Pipeline,
    RandomAffine,
    RandomResizedCrop,
    Saturation,
    ToDtype,
    ToLayout,
)

pytestmark = pytest.mark.gpu
THEIRS = allowed(0.0, torch.float32, 2**16)  # places in pixels lose bits to the size
JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1)
NORMAL = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def of_places(aug: Pipeline, kind: torch.dtype, size: tuple[int, ...]) -> float:
    """What rounding places does: they are counted in pixels, in the type that is computed in, so
    a rounding is worth as many as a side has pixels."""
    return allowed(0.0, aug.spec.compute_dtype(kind), max(size) ** 2)


def report(
    name: str, kind: torch.dtype, got: torch.Tensor, want: torch.Tensor, limit: float
) -> str:
    difference = (got.double().cpu() - want.double().cpu()).abs()
    worst = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    return (
        f"{name} {kind}: error {error(got, want):.3g} of {limit:.3g}; worst at {worst}: "
        f"{float(got[worst])} for {float(want[worst])}; {int((difference > 0.01).sum())} of "
        f"{difference.numel()} elements are off by 0.01 and more"
    )


@pytest.mark.parametrize(("name", "kind", "size", "nhwc"), FORWARD)
def test_the_kernel_agrees_with_plain_torch(name, kind, size, nhwc):
    aug = PIPELINES[name]()
    x = images(size, kind, nhwc)
    got = aug(x.cuda(), step=1)
    exact, same = (plain(aug, x, 1, wide) for wide in (True, False))
    limit = allowed(error(same, exact), got.dtype, 16) + of_places(aug, kind, size)
    limit *= float(exact.abs().max())
    if got.dtype == torch.uint8:
        limit = 1.0  # a half may round either way
    off = (got.double().cpu() - exact).abs() > limit
    # nearest has steps: a place on one may round to either side
    most = AT_A_STEP if "nearest" in name else 0.0
    assert float(off.double().mean()) <= most, report(name, kind, got, exact, limit)


@pytest.mark.parametrize("n", [1, 3, 300])
def test_contrast_in_one_launch_and_in_two_is_the_same_number(n):
    x = torch.randint(0, 256, (n, 3, 97, 101), dtype=torch.uint8)
    aug = Pipeline([RandomAffine(20), JITTER, NORMAL])
    got, want = aug(x.cuda(), step=2), aug(x, step=2)
    limit = THEIRS  # two ways to compute places
    assert error(got, want) <= limit, report(f"n={n}", x.dtype, got, want, limit)


def kernels_of(call) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in found if "Buffer" not in name]  # the profiler's own


def test_a_batch_is_one_launch():
    x = torch.randint(0, 256, (256, 3, 224, 224), dtype=torch.uint8, device="cuda")
    aug = Pipeline(
        [
            RandomAffine(10, (0.1, 0.1), (0.9, 1.1)),
            JITTER,
            NORMAL,
            ToDtype(torch.float16),
            ToLayout("nhwc"),
        ]
    )
    aug(x)
    found = kernels_of(lambda: aug(x))
    assert len(found) == 1, found


@pytest.mark.parametrize(("name", "kind", "size"), BACKWARD)
def test_gradients_agree_with_plain_torch_and_repeat(name, kind, size):
    aug = GRADIENTS[name]()
    x = images(size, kind, False)
    far = x.cuda().requires_grad_()
    y = aug(far, step=1)
    seed = torch.randn(y.shape).to(y.dtype)
    (got,) = torch.autograd.grad(y, far, seed.cuda(), retain_graph=True)
    (again,) = torch.autograd.grad(y, far, seed.cuda())
    assert torch.equal(got, again), f"{name} {kind}: two runs differ"
    wide, same = x.double().requires_grad_(), x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(plain(aug, wide, 1, True), wide, seed.double())
    (near,) = torch.autograd.grad(plain(aug, same, 1, False), same, seed)
    # at corners of clamp and hue both one-sided slopes are right: few pixels may differ
    off = (got.double().cpu() - exact).abs() > CORNER * exact.abs().max()
    limit = allowed(error(near, exact), kind, 64) + of_places(aug, kind, size)
    fine = error(got, exact) <= limit or float(off.double().mean()) < AT_A_CORNER
    assert fine, report(name, kind, got, exact, limit)


def test_a_captured_call_wants_its_table():
    x = torch.rand(4, 3, 32, 32, device="cuda")
    aug = Pipeline([RandomAffine(10), JITTER])
    table = aug.table(x, step=0).clone()
    want = [aug(x, step=s) for s in (0, 1)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = aug.with_table(x, table)
    for step in (0, 1):
        table.copy_(aug.table(x, step=step))
        graph.replay()
        assert torch.equal(y, want[step])
    # the refusal comes before any CUDA call, so that the capture stays whole
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(dt.EngineError, match="captured"):
            aug(x, step=0)
        y.add_(1)


def test_compiled():
    x = torch.rand(4, 3, 32, 40, device="cuda", requires_grad=True)
    aug = Pipeline([RandomAffine(10), JITTER])
    call = torch.compile(lambda v: aug(v) * 2, fullgraph=True)
    want = [aug(x, step=s) * 2 for s in range(3)]
    for step in range(3):
        y = call(x)
        assert torch.equal(y, want[step]), step
        y.sum().backward()


# ---- torchvision, where it is installed


def test_torchvision_agrees():
    F = pytest.importorskip("torchvision.transforms.functional")
    x = torch.rand(2, 3, 48, 64)
    aug = Pipeline([RandomAffine(25, (0.1, 0.2), (0.8, 1.3), (-8, 8, -5, 5))])
    drawn = {k.split(".")[-1]: v for k, v in aug.parameters_for(2, 0, (48, 64)).items()}
    got = aug(x.cuda(), step=0).cpu()
    for i in range(2):
        p = {k: float(v[i]) for k, v in drawn.items() if v.ndim == 1}
        want = F.affine(
            x[i],
            p["angle"],
            [p["translate_x"], p["translate_y"]],
            p["scale"],
            [p["shear_x"], p["shear_y"]],
            F.InterpolationMode.BILINEAR,
        )
        assert error(got[i], want) < THEIRS, report("affine", x.dtype, got[i], want, THEIRS)
    pairs = (
        (Brightness, F.adjust_brightness),
        (Contrast, F.adjust_contrast),
        (Saturation, F.adjust_saturation),
        (Hue, F.adjust_hue),
    )
    for step, their in pairs:
        aug = Pipeline([step(0.4)])
        (values,) = (v for k, v in aug.parameters_for(2, 0).items() if k != "matrix")
        got = aug(x.cuda(), step=0).cpu()
        for i in range(2):
            want = their(x[i], float(values[i]))
            name = step.__name__
            assert error(got[i], want) < THEIRS, report(name, x.dtype, got[i], want, THEIRS)


# ---- past 32 bits, last because they are large


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    n = 2**31 // (3 * 512 * 512) + 3
    x = torch.zeros(n, 3, 512, 512, dtype=torch.uint8, device="cuda")
    x[-1] = torch.randint(0, 256, (3, 512, 512), dtype=torch.uint8, device="cuda")
    aug = Pipeline([RandomResizedCrop(64), Brightness(0.2), ToDtype(torch.float16)])
    last = aug(x, step=0)[-1:]
    alone = aug(x[-1:], index=torch.tensor([n - 1]), step=0)
    assert torch.equal(last, alone)


def test_one_image_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    x = torch.zeros(1, 3, 30000, 30000, dtype=torch.uint8, device="cuda")
    x[:, 2, -64:, -64:] = 200
    y = Pipeline(
        [RandomResizedCrop(100, scale=(1.0, 1.0), ratio=(1.0, 1.0))], interpolation="nearest"
    )(x, step=0)
    whole = Pipeline([Brightness((1.0, 1.0))])(x, step=0)
    assert torch.equal(whole, x) and y.shape == (1, 3, 100, 100)
