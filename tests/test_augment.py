"""Augmentation: every step against plain torch, parameters that repeat, gradients, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from augment_cases import GEOMETRY, GRADIENTS, NORMAL, PIPELINES, WHOLE, images, plain
from tolerances import DOUBLE, GRADIENT, SINGLE, allowed, error

import deuteron as dt
from deuteron.augment import (
    Brightness,
    ColorJitter,
    Contrast,
    Grayscale,
    HorizontalFlip,
    Hue,
    Normalize,
    Perspective,
    Pipeline,
    RandomAffine,
    RandomResizedCrop,
    Rotate,
    Saturation,
    ToDtype,
    ToLayout,
)
from deuteron.augment.spec import spec_of
from tests.interpreted import found_in_interpreter
from tests.sweeps import one_in

KINDS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
X = torch.rand(2, 3, 8, 8)


# ---- the numbers


@pytest.mark.parametrize("name", one_in(4, PIPELINES))
def test_agrees_with_plain_torch(name):
    aug = PIPELINES[name]()
    kinds = {"acceptance": KINDS, "everything": KINDS[1::3], "to bytes": KINDS[::2]}
    for kind in kinds.get(name, (torch.float32,)):
        x = images((3, 3, 11, 13), kind, nhwc=kind == torch.float16)
        got = aug(x, step=1)
        exact, same = (plain(aug, x, 1, wide) for wide in (True, False))
        limit = allowed(error(same, exact), got.dtype, 16)
        if got.dtype == torch.uint8:
            limit = 1.01 / 255  # a half may round either way
        assert got.dtype == same.dtype
        assert error(got, exact) <= limit, kind


def test_affine_is_torchvisions():
    """Its published inverse, entry by entry, for a wide image."""
    aug = Pipeline([RandomAffine(40, (0.3, 0.3), (0.5, 2.0), (-20, 20, -10, 10))])
    size = (30, 50)
    found = {k.split(".")[-1]: v for k, v in aug.parameters_for(5, 7, size).items()}
    rot, sx, sy = (torch.deg2rad(found[k]) for k in ("angle", "shear_x", "shear_y"))
    a = torch.cos(rot - sy) / torch.cos(sy)
    b = -torch.cos(rot - sy) * torch.tan(sx) / torch.cos(sy) - torch.sin(rot)
    c = torch.sin(rot - sy) / torch.cos(sy)
    d = -torch.sin(rot - sy) * torch.tan(sx) / torch.cos(sy) + torch.cos(rot)
    inverse = torch.stack([d, -b, -c, a], -1).reshape(5, 2, 2) / found["scale"][:, None, None]
    move = torch.stack([found["translate_x"], found["translate_y"]], -1)
    half = torch.tensor([size[1] / 2, size[0] / 2], dtype=torch.float64)
    torch.testing.assert_close(found["matrix"][:, :2, :2], inverse * half / half[:, None])
    shift = (inverse @ -move[..., None])[..., 0] / half
    torch.testing.assert_close(found["matrix"][:, :2, 2], shift)


def test_a_quarter_turn_and_a_flip_are_exact():
    x = torch.rand(2, 3, 6, 6)
    turned = Pipeline([Rotate((90, 90))])(x)
    torch.testing.assert_close(turned, torch.rot90(x, 1, (2, 3)))
    assert torch.equal(Pipeline([HorizontalFlip(1.0)], interpolation="nearest")(x), x.flip(3))


def test_a_crop_is_the_box_it_names():
    aug = Pipeline([RandomResizedCrop(4, scale=(0.1, 0.9))], interpolation="nearest")
    x = torch.arange(3.0 * 16 * 24).reshape(1, 3, 16, 24)
    for step in range(8):
        box = {
            k.split(".")[-1]: int(v)
            for k, v in aug.parameters_for(1, step, (16, 24)).items()
            if v.ndim == 1
        }
        y = aug(x, step=step)
        assert box["top"] >= 0 and box["top"] + box["height"] <= 16
        assert box["left"] >= 0 and box["left"] + box["width"] <= 24
        inside = x[..., box["top"] :, box["left"] :][..., : box["height"], : box["width"]]
        assert torch.isin(y, inside).all()


def test_a_perspective_takes_its_corners_to_the_corners():
    found = Pipeline([Perspective(0.6, p=1.0)]).parameters_for(9, 2)
    corners = torch.cat([found["0.Perspective.corners"], torch.ones(9, 4, 1)], -1)
    at = corners @ found["matrix"].mT
    want = torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]]).double().expand(9, 4, 2)
    torch.testing.assert_close(at[..., :2] / at[..., 2:], want)


def test_types_and_layouts():
    x = images((2, 3, 8, 9), torch.uint8, nhwc=True)
    assert Pipeline([Brightness(0.1)])(x).dtype == torch.uint8
    assert Pipeline([Brightness(0.1)])(x).is_contiguous(memory_format=torch.channels_last)
    assert Pipeline([Normalize((0.5,), (0.2,))])(x).dtype == torch.float32
    y = Pipeline([ToDtype(torch.bfloat16), ToLayout("nchw")])(x)
    assert (y.dtype, y.is_contiguous()) == (torch.bfloat16, True)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_numbers_of_channels(channels):
    steps = [RandomAffine(20), Brightness(0.3), Normalize((0.5,), (0.2,))]
    if channels == 1:
        steps.insert(2, Contrast(0.5))
    aug, x = Pipeline(steps), torch.rand(2, channels, 9, 7)
    exact, same = (plain(aug, x, 0, wide) for wide in (True, False))
    assert error(aug(x), exact) <= allowed(error(same, exact), torch.float32, 16)


def test_odd_memory_and_no_images():
    aug = WHOLE["everything"]()
    base = torch.rand(4, 3, 22, 26)
    view = base[::2, :, 1::2, ::2]
    assert torch.equal(aug(view, step=0), aug(view.contiguous(), step=0))
    flat = base[:2].permute(0, 1, 3, 2)
    assert torch.equal(aug(flat, step=0), aug(flat.contiguous(), step=0))
    assert aug(base[:0]).shape == (0, 3, 7, 9)
    assert aug(base[:0].clone().requires_grad_()).sum().backward() is None


def test_nan_stays_where_it_is():
    x = torch.rand(1, 3, 8, 8)
    x[0, 1, 3, 4] = math.nan
    y = Pipeline([Brightness(0.2), Saturation(0.2)])(x)
    assert y[0, :, 3, 4].isnan().all() and int(y.isnan().sum()) == 3


# ---- the parameters


def test_grey_leaves_numbers_outside_0_to_1():
    x = torch.randn(32, 3, 4, 5) * 100
    y = Pipeline([Grayscale(0.5)], seed=1)(x)
    grey = (x * torch.tensor([0.2989, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    kept = (y == x).flatten(1).all(1)
    assert 0 < int(kept.sum()) < len(x)
    assert error(y[~kept], grey.expand_as(x)[~kept]) <= SINGLE


def test_parameters_belong_to_the_image():
    aug = WHOLE["everything"]()
    x = torch.rand(6, 3, 10, 12)
    y = aug(x, step=5)
    order = torch.tensor([4, 0, 5, 2])
    assert torch.equal(aug(x[order], index=order, step=5), y[order])
    assert torch.equal(aug(x[:2], step=5), y[:2])


def test_calls_count_and_state_is_kept():
    x = torch.rand(2, 3, 8, 8)
    aug, again = (Pipeline([RandomAffine(30)], seed=11) for _ in range(2))
    first, second = aug(x), aug(x)
    assert not torch.equal(first, second) and aug.step == 2
    again.load_state_dict(aug.state_dict())
    assert again.step == 2 and torch.equal(again(x), aug(x))
    assert torch.equal(again(x, step=1), second) and again.step == 3
    assert not torch.equal(Pipeline([RandomAffine(30)], seed=12)(x), first)


def test_a_step_far_away_and_a_negative_seed():
    aug = Pipeline([RandomAffine(30)], seed=-5)
    one, two = (aug.parameters_for(3, 10**12 + k)["0.RandomAffine.angle"] for k in range(2))
    assert one.abs().max() <= 30 and not torch.equal(one, two)


def test_draws_fill_their_ranges_and_do_not_repeat():
    aug = Pipeline([RandomAffine(30), HorizontalFlip(0.25), Hue((-0.1, 0.3))])
    found = aug.parameters_for(20000, 1)
    angle, turn = found["0.RandomAffine.angle"], found["2.Hue.turn"]
    assert angle.unique().numel() > 19900
    for drawn, low, high in ((angle, -30, 30), (turn, -0.1, 0.3)):
        within = (drawn - low) / (high - low)
        assert within.min() >= 0 and within.max() < 1
        bins = torch.histc(within, 10, 0, 1) / 20000
        assert (bins - 0.1).abs().max() < 0.01
    assert abs(float(found["1.HorizontalFlip.happens"].double().mean()) - 0.25) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([angle, turn]))[0, 1])) < 0.03


def test_the_text_of_a_recipe_leads_back():
    for build in PIPELINES.values():
        spec = build().spec
        assert spec_of(spec.text) == spec


# ---- gradients, graphs, torch.compile


# along one random direction, and in the sweep every element by itself
FAST = [True, pytest.param(False, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("name", one_in(2, [*GEOMETRY, "jitter backwards", "hsv", "acceptance"]))
def test_gradients(name, fast):
    aug = GRADIENTS[name]()
    if name == "acceptance":  # in float64 all the way, or finite differences see float16
        aug = Pipeline([*aug.spec.steps[:-2]])
    x = images((2, 3, 5, 6), torch.float64, False).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: aug(v, step=2), x, atol=GRADIENT, fast_mode=fast)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("name", ["affine", "all places", "bicubic", "jitter backwards"])
def test_gradients_of_parameters(name, fast):
    aug, x = PIPELINES[name](), images((2, 3, 5, 6), torch.float64, False).requires_grad_()
    table = aug.table(x, step=1).clone().requires_grad_()
    check = partial(torch.autograd.gradcheck, atol=GRADIENT, fast_mode=fast)
    assert check(aug.with_table, (x, table))
    assert check(lambda t: aug.with_table(x.detach(), t), table)


def test_gradients_of_parameters_compiled():
    aug, x = Pipeline([RandomAffine(20), Contrast(0.4), NORMAL]), X.clone().requires_grad_()
    table = aug.table(x, step=1).clone().requires_grad_()
    call = torch.compile(aug.with_table, fullgraph=True, backend="aot_eager")
    for found, want in zip(
        *(torch.autograd.grad(fn(x, table).sum(), (x, table)) for fn in (call, aug.with_table)),
        strict=True,
    ):
        torch.testing.assert_close(found, want)


def test_parameters_of_no_step_have_no_gradient():
    aug, x = Pipeline([]), torch.rand(2, 3, 5, 6)
    table = aug.table(x, step=1).clone().requires_grad_()
    y = aug.with_table(x, table)
    assert torch.autograd.grad(y.sum(), table, allow_unused=True) == (None,)


def test_a_table_of_any_strides():
    aug, x = WHOLE["everything"](), torch.rand(2, 3, 8, 9)
    table = aug.table(x, step=1)
    assert torch.equal(aug.with_table(x, table.t().contiguous().t()), aug.with_table(x, table))


def test_bytes_have_no_gradient():
    with pytest.raises(dt.GraphError, match="x"):
        g = dt.Graph()
        x = g.tensor("x", (2, 3, 8, 8), "u8")
        Pipeline([Brightness(0.1), ToDtype("f32")]).emit(g, x).output("y")
        g.grad("y", wrt=["x"])
    x = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert not Pipeline([ToDtype("f32")])(x).requires_grad


def test_inside_a_graph():
    aug, x = WHOLE["acceptance"](), images((2, 3, 11, 13), torch.uint8, False)
    g = dt.Graph()
    y = aug.emit(g, g.tensor("x", x.shape, x.dtype))
    g.relu(y).output("z")
    plan = g.compile(device="cpu")
    for step in range(2):
        got = plan.run(x=x, augment=aug.table(x, step=step))["z"]
        want = torch.relu(aug(x, step=step))
        assert error(got, want) <= allowed(0.0, torch.float16)


def test_explain_says_what_ran():
    aug = Pipeline([RandomAffine(10), Brightness(0.2)])
    told = aug.explain(X)
    assert aug.step == 0 and "grid_sample" in told and "Where the time goes" in told
    assert told.splitlines()[0] == dt.functional.explain(aug, X, step=0).splitlines()[0]
    with torch.no_grad():
        told = dt.functional.explain(torch.func.vmap(lambda v: aug(v, step=0)), X[None])
    assert "torch's operators" in told and "vmap" in told


def test_the_operators_pass_opcheck():
    aug = Pipeline([RandomAffine(20), Contrast(0.4), NORMAL, ToDtype(torch.float16)])
    for kind in (torch.uint8, torch.float32):
        x = images((2, 3, 8, 9), kind, False).requires_grad_(kind == torch.float32)
        table = aug.table(x, step=0)
        torch.library.opcheck(torch.ops.deuteron.augment, (x, table, aug.spec.text))
    y = aug(x)
    grad = torch.randn_like(y)
    text = aug.spec.text
    torch.library.opcheck(torch.ops.deuteron.augment_backward, (grad, x.detach(), table, text))
    step = torch.tensor(3)
    torch.library.opcheck(torch.ops.deuteron.augment_draw, (x.detach(), step, None, text, 0))


def test_compiled_as_one_graph():
    steps = [RandomAffine(20), ColorJitter(0.2, 0.2, 0.2, 0.1)]
    aug = Pipeline(steps)  # compiled before it was ever called
    x = torch.rand(2, 3, 8, 9, requires_grad=True)
    want = [Pipeline(steps)(x, step=s) * 2 for s in range(3)]
    (grad,) = torch.autograd.grad(want[2].sum(), x)
    call = torch.compile(lambda v: aug(v) * 2, fullgraph=True, backend="aot_eager")
    for step in range(3):
        y = call(x)
        assert torch.equal(y, want[step]), step
    assert aug.step == 3
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], grad)


# ---- errors


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Pipeline([HorizontalFlip(1.5)]), "p=1.5 is not a probability"),
        (lambda: Pipeline([RandomAffine((20, 10))]), "degrees=(20, 10) is not a range"),
        (lambda: Pipeline([RandomAffine(0, translate=(2, 0))]), "translate=(2, 0)"),
        (lambda: Pipeline([RandomAffine(0, translate=0.1)]), "translate=0.1"),
        (lambda: Pipeline([RandomAffine(0, scale=(0, 1))]), "scale=(0, 1)"),
        (lambda: Pipeline([RandomResizedCrop(0)]), "size=0"),
        (lambda: Pipeline([Perspective(1.0)]), "distortion=1.0"),
        (lambda: Pipeline([ColorJitter(hue=0.7)]), "amount=(-0.7, 0.7)"),
        (lambda: Pipeline([ColorJitter(brightness=-1)]), "amount=-1"),
        (lambda: Pipeline([Normalize((0.5,), (0,))]), "std is 0"),
        (lambda: Pipeline([ToDtype(torch.int64)]), "images of i64"),
        (lambda: Pipeline([ToLayout("hwc")]), "layout 'hwc'"),
        (lambda: Pipeline([Hue(0.1), RandomAffine(1)]), "RandomAffine comes after Hue"),
        (lambda: Pipeline([Contrast(0.1), Contrast(0.1)]), "2 steps change the contrast"),
        (lambda: Pipeline([torch.relu]), "is not a step"),
        (lambda: Pipeline([], interpolation="cubic"), "interpolation 'cubic'"),
        (lambda: Pipeline([], padding="wrap"), "padding 'wrap'"),
        (lambda: Pipeline([], seed=0.5), "seed=0.5"),
        (lambda: Pipeline([])(X[0]), "images have 4 dimensions"),
        (lambda: Pipeline([])(X.long()), "images of int64"),
        (lambda: Pipeline([])(X[..., :0]), "no pixels"),
        (lambda: Pipeline([Hue(0.1)])(X[:, :1]), "Hue of 1 channels"),
        (lambda: Pipeline([Normalize((0.5, 0.5), (1, 1))])(X), "2 means for 3 channels"),
        (lambda: Pipeline([])(X, index=torch.arange(3)), "index is int64[3]"),
        (lambda: Pipeline([])(X, index=[0, 1]), "index is a list"),
        (lambda: Pipeline([])(X.numpy()), "x is a ndarray"),
        (lambda: Pipeline([])(X, step=1.5), "step=1.5"),
        (lambda: Pipeline([])(X, step=2**63), "step=9223372036854775808"),
        (lambda: Pipeline([]).parameters_for(-1), "n=-1"),
        (lambda: Pipeline([]).parameters_for(2.5), "n=2.5"),
        (lambda: Pipeline([]).parameters_for(2, size=5), "size=5"),
        (lambda: Pipeline(HorizontalFlip()), "HorizontalFlip is one step"),
        (lambda: Pipeline([RandomResizedCrop(3.5)]), "size=3.5"),
        (
            lambda: Pipeline([Hue(0.1)]).with_table(X, torch.zeros(2, 9)),
            "the table is float32[2, 9]",
        ),
    ],
)
def test_errors_say_what_is_wrong(call, says):
    with pytest.raises(dt.DeuteronError) as caught:
        call()
    assert says in str(caught.value) and caught.value.remedy


# ---- the kernels without a GPU


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    assert found_in_interpreter("tests.augment_cases") == {}


def test_random_numbers_are_those_of_the_operators():
    from deuteron.augment.draw import DRAWS, PLACES, uniform
    from deuteron.ops.random import BITS, words

    steps, images_ = torch.tensor([0, 5, 2**40]), torch.tensor([0, 1, 2**21 - 1, 2**21, 2**45, -3])
    for seed in (0, -7, 2**62 + 5):
        root = torch.tensor(seed)
        key = ((words(root, 2 * steps) << 32) | words(root, 2 * steps + 1))[:, None, None]
        for u, place in zip(
            uniform(seed, steps, images_, [(3, 7), (63, 23)]), (3, 63), strict=True
        ):
            at = (images_[:, None] * PLACES + place) * DRAWS + torch.arange(u.shape[-1])
            assert torch.equal(u, (words(key, at) >> (32 - BITS)).double() * 2.0**-BITS), seed


# ---- under what torch does to functions


def _jittered():
    aug = Pipeline([RandomAffine(10, (0.1, 0.1)), ColorJitter(0.4, 0.4)])
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    table = aug.table(x, step=0)
    return x, lambda v: aug.with_table(v, table)


def test_transforms_see_its_operators():
    x, fn = _jittered()
    many = torch.stack((x, x * 0.5))
    each = torch.stack([fn(one) for one in many])
    assert error(torch.func.vmap(fn)(many), each) <= DOUBLE
    got = torch.func.grad(lambda v: fn(v).square().sum())(x)
    x.requires_grad_()
    (want,) = torch.autograd.grad(fn(x).square().sum(), x)
    assert error(got, want) <= DOUBLE


def test_second_derivatives_of_images():
    x, fn = _jittered()
    (first,) = torch.autograd.grad(fn(x.requires_grad_()).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    step = 1e-6
    ahead, behind = (x.detach() + s * step for s in (1, -1))
    grads = [
        torch.autograd.grad(fn(v.requires_grad_()).square().sum(), v)[0] for v in (ahead, behind)
    ]
    # along the direction of ones, by symmetry of the second derivative
    assert error(second, (grads[0] - grads[1]) / (2 * step)) <= GRADIENT
