"""Optimisers against torch.optim, float64 and plain references: on the CPU, in Triton's
interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch

import deuteron as dt
from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.kernels import optim_rules as rules
from deuteron.kernels.optim import Extras, OnTensors
from deuteron.optim import base, runners
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.optim_cases import FLOATS, OPTIONS, cases, check, scaled, tensors
from tests.ptx import spilled
from tests.sweeps import one_in
from tests.tolerances import EIGHT_BIT_MEAN, EPS, EVEN, FEW_STEPS, SINGLE, STEPS, allowed, error


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
@pytest.mark.each_value
def test_ten_steps(case, dtype):
    assert not (wrong := check(case, dtype)), wrong


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_without_generated_code(case, monkeypatch):
    monkeypatch.setattr(base, "runner", lambda kind: runners.Plain())
    for dtype in (torch.float64, torch.bfloat16):
        assert not (wrong := check(case, dtype)), wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert not (wrong := OPTIONS[name]("cpu")), wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_options_without_generated_code(name, monkeypatch):
    monkeypatch.setattr(base, "runner", lambda kind: runners.Plain())
    assert not (wrong := OPTIONS[name]("cpu")), wrong


# ---- state dicts


DROP_IN = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("Adafactor", {"lr": 0.1}),
]


def stepped(optimizer, params, first: int, count: int) -> None:
    for k in range(first, first + count):
        for p, g in zip(params, tensors(torch.float64, "cpu", k), strict=True):
            if p.numel():
                p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("back", [False, True], ids=["torch to ours", "ours to torch"])
@pytest.mark.parametrize("through_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize(("name", "given"), DROP_IN)
@pytest.mark.each_pair
def test_state_dicts_are_torchs(name, given, back, through_file, dtype):
    pair = [getattr(torch.optim, name), getattr(dt.optim, name)]
    before, after = pair[::-1] if back else pair
    params = [x.requires_grad_() for x in tensors(dtype, "cpu")]
    first = before(params, **given)
    stepped(first, params, 1, 4)
    saved = first.state_dict()
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    second = after(params, lr=0.5)
    second.load_state_dict(saved)
    stepped(second, params, 5, 4)
    whole = pair[0]([x.requires_grad_() for x in tensors(dtype, "cpu")], **given)
    stepped(whole, whole.param_groups[0]["params"], 1, 8)
    for p, q in zip(params, whole.param_groups[0]["params"], strict=True):
        assert error(p, q) <= STEPS * EPS[dtype]
    mine, theirs = second.state_dict(), whole.state_dict()
    assert mine["param_groups"][0].keys() == theirs["param_groups"][0].keys()
    for key, state in theirs["state"].items():
        assert mine["state"][key].keys() == state.keys()
        for name_, value in state.items():
            assert mine["state"][key][name_].shape == value.shape
            assert mine["state"][key][name_].dtype == value.dtype or name_ == "step"
    steps = {float(s["step"]) for s in mine["state"].values() if "step" in s}
    assert steps <= {8.0}


def test_wide_state_survives_loading():
    def fresh():
        params = [x.requires_grad_() for x in tensors(torch.bfloat16, "cpu")]
        return params, dt.optim.AdamW(
            params, lr=0.01, state_dtype=torch.float32, master_weights=True, ema_decay=0.9
        )

    params, optimizer = fresh()
    stepped(optimizer, params, 1, 3)
    again, other = fresh()
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, params, 4, 3)
    stepped(other, again, 4, 3)
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][key]), key


def test_eight_bit_state_survives_loading():
    ends = []
    for through_dict in (False, True):
        torch.manual_seed(3)
        p = torch.randn(6000, requires_grad=True)
        optimizer = dt.optim.AdamW8bit([p], lr=0.01)
        for k in range(6):
            if through_dict and k == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = dt.optim.AdamW8bit([p], lr=0.5)
                optimizer.load_state_dict(saved)
            p.grad = torch.randn(6000)
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == torch.int8
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_copies_keep_their_arguments():
    p = torch.randn(10, requires_grad=True)
    optimizer = dt.optim.AdamW([p], lr=0.1, max_norm=1.0, ema_decay=0.9)
    p.grad = torch.ones(10)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert twin.ours == optimizer.ours
    for x, o in ((p, optimizer), (q, twin)):
        x.grad = torch.ones(10)
        o.step()
    assert torch.equal(p, q) and q is not p


# ---- in use


def test_grad_scaler():
    ends = scaled("cpu", 33)
    assert ends[0][1:] == ends[1][1:]
    assert error(ends[0][0], ends[1][0]) <= FEW_STEPS * EPS[torch.float32]


def test_scheduler_closure_and_cleared_state():
    ends = []
    for home in (dt.optim, torch.optim):
        torch.manual_seed(0)
        p = torch.randn(50, requires_grad=True)
        optimizer = home.Adam([p], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        for k in range(4):
            if k == 2:
                optimizer.state.clear()
            loss = optimizer.step(closure)
            schedule.step()
        ends.append((p.detach(), loss.detach()))
    assert error(ends[0][0], ends[1][0]) <= FEW_STEPS * EPS[torch.float32]
    assert error(ends[0][1], ends[1][1]) <= FEW_STEPS * EPS[torch.float32]


def test_parameters_that_move_are_found_again():
    ends = []
    for home in (dt.optim, torch.optim):
        torch.manual_seed(0)
        p, q = (torch.randn(50, requires_grad=True) for _ in range(2))
        optimizer = home.SGD([p], lr=0.1, momentum=0.9)
        for k in range(4):
            p.grad = torch.full((50,), float(k))
            q.grad = torch.ones(50)
            optimizer.step()
            if k == 1:
                p.data = p.data.clone()
                optimizer.add_param_group({"params": [q], "lr": 0.3})
        ends.append(torch.cat((p, q)).detach())
    assert error(*ends) <= FEW_STEPS * EPS[torch.float32]


def forget_the_last(optimizer):
    optimizer.state.pop(optimizer.param_groups[0]["params"][-1])


def exchange_the_last(optimizer):
    optimizer.param_groups[0]["params"][-1] = torch.ones(7, 7, requires_grad=True)


def turn(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.t()


def set_steps(optimizer):
    for state in optimizer.state.values():
        state["step"] = torch.tensor(20.0)


def clear_steps(optimizer):
    for state in optimizer.state.values():
        state["step"].zero_()


@pytest.mark.parametrize("name", ["Adam", "Adafactor"])
@pytest.mark.parametrize(
    "change", [forget_the_last, exchange_the_last, turn, set_steps, clear_steps]
)
def test_changes_from_outside_are_seen(name, change):
    """Tables of addresses are kept from step to step; nothing outside need know of them."""
    ends = []
    for home in (dt.optim, torch.optim):
        torch.manual_seed(0)
        params = [torch.randn(7, 7, requires_grad=True) for _ in range(3)]
        optimizer = getattr(home, name)(params, lr=0.1)
        for k in range(6):
            if k == 3:
                change(optimizer)
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(7, 7)
            optimizer.step()
        ends.append(torch.stack([p.detach() for p in optimizer.param_groups[0]["params"]]))
    assert error(*ends) <= FEW_STEPS * EPS[torch.float32]


@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("shape", [(100,), (6, 50), (5000,)])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("AdamW", {}),
        ("Adam", {}),
        ("Adafactor", {}),
        ("Lion", {}),
        ("LAMB", {}),
        ("AdamW8bit", {}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_nan_and_inf_go_where_torch_lets_them_go(name, given, shape, generated, monkeypatch):
    """Where torch has no such class: no further than to the element, or in 8 bits to its group."""
    if not generated:
        monkeypatch.setattr(base, "runner", lambda kind: runners.Plain())
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])

    def lost(home) -> torch.Tensor:
        p = torch.ones(shape, requires_grad=True)
        optimizer = getattr(home, name)([p], **given)
        for k in range(3):
            p.grad = torch.linspace(-1.0, 1.0, p.numel()).reshape(shape)
            if k == 1:
                p.grad.view(-1)[7::30][:3] = bad
            optimizer.step()
        return ~p.detach().isfinite()

    found = lost(dt.optim)
    if hasattr(torch.optim, name):
        assert torch.equal(found, lost(torch.optim))
    elif name == "AdamW8bit" and found.numel() >= 4096:
        assert not found.view(-1)[256:].any()
    else:
        assert int(found.sum()) <= 3


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion", "LAMB"])
def test_no_memory_of_larger_gradients_where_none_is_asked_for(name):
    p = torch.zeros(64, requires_grad=True)
    optimizer = getattr(dt.optim, name)([p], betas=(0.0, 0.0))
    for scale in (1e3, 1e-4):
        p.grad = torch.randn(64) * scale
        optimizer.step()
    assert torch.equal(optimizer.state[p]["exp_avg"], p.grad)


def test_a_gradient_whose_signs_are_still_to_be_turned():
    p = torch.zeros(1, requires_grad=True)
    (torch.complex(torch.ones(1), p).conj() * 2.0).imag.sum().backward()
    assert p.grad is not None and p.grad.is_neg()
    dt.optim.SGD([p], lr=1.0).step()
    assert p.item() == -float(p.grad)


def test_types_may_mix_in_a_group():
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)
    ends = []
    for home in (dt.optim, torch.optim):
        torch.manual_seed(0)
        params = [torch.randn(40, dtype=kind, requires_grad=True) for kind in kinds]
        optimizer = home.AdamW(params, lr=0.01, eps=1e-3)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append([p.detach() for p in params])
    for a, b in zip(*ends, strict=True):
        real = [torch.view_as_real(x) if x.is_complex() else x for x in (a, b)]
        assert error(*real) <= FEW_STEPS * EPS[real[0].dtype], a.dtype


def test_nothing_to_do():
    p = torch.randn(3, requires_grad=True)
    assert dt.optim.AdamW([p], max_norm=1.0).step() is None
    empty = torch.randn(0, 4, requires_grad=True)
    empty.grad = torch.zeros(0, 4)
    for cls in (
        dt.optim.AdamW,
        dt.optim.LAMB,
        dt.optim.SGD,
        dt.optim.AdamW8bit,
        dt.optim.Adafactor,
    ):
        cls([empty], max_norm=1.0).step()


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("kinds", ["ours", "ours to torch's", "torch's to ours"])
def test_a_first_step_that_a_scaler_skips_and_a_state_that_is_loaded(kinds, dampening):
    """The first gradient that counts goes into the buffer undamped, before and after loading."""
    first, second = {
        "ours": (dt.optim.SGD, dt.optim.SGD),
        "ours to torch's": (dt.optim.SGD, torch.optim.SGD),
        "torch's to ours": (torch.optim.SGD, dt.optim.SGD),
    }[kinds]
    ends = []
    for classes in ((first, second), (torch.optim.SGD, torch.optim.SGD)):
        torch.manual_seed(0)
        p = torch.randn(5, 3, requires_grad=True)
        made = [c([p], lr=0.1, momentum=0.9, dampening=dampening) for c in classes]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        _scaled_step(scaler, made[0], p, float("inf"))
        made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
        for _ in range(3):
            _scaled_step(scaler, made[1], p, 1.0)
        ends.append(p.detach())
    assert error(*ends) <= FEW_STEPS * EPS[torch.float32]


def _scaled_step(scaler, optimizer, p, factor):
    optimizer.zero_grad()
    scaler.scale((p * torch.randn_like(p) * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_skipped_first_step_leaves_no_buffer():
    p = torch.randn(3, requires_grad=True)
    p.grad = torch.full_like(p, float("inf"))
    optimizer = dt.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5, skip_nonfinite=True)
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    p.grad = torch.ones_like(p)
    optimizer.add_param_group({"params": [torch.randn(2, requires_grad=True)]})
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad)


# ---- errors


def test_a_group_or_a_state_dict_that_asks_for_a_differentiable_step():
    p, q = (torch.randn(3, requires_grad=True) for _ in "pq")
    p.grad = q.grad = torch.ones(3)
    said = torch.optim.AdamW([p], differentiable=True)
    loaded = dt.optim.AdamW([p])
    loaded.load_state_dict(said.state_dict())
    for optimizer in (loaded, dt.optim.AdamW([{"params": [q], "differentiable": True}])):
        before = q.detach().clone()
        with pytest.raises(GraphError, match="which autograd does not see"):
            optimizer.step()
        assert torch.equal(q, before)


def test_errors_say_what_helps():
    p = torch.randn(4, 3, requires_grad=True)
    for name in ("SGD", "Adam", "AdamW"):
        with pytest.raises(GraphError, match=rf"torch\.optim\.{name}\(…, differentiable=True\)"):
            getattr(dt.optim, name)([p], differentiable=True)
    with pytest.raises(TypeError, match="max_norm"):
        dt.optim.AdamW([p], max_nrom=1.0)
    for bad in ({"max_norm": 0.0}, {"ema_decay": 1.5}, {"state_dtype": torch.int8}, {"lr": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            dt.optim.AdamW([p], **bad)
    for cls in (dt.optim.Lion, dt.optim.LAMB, dt.optim.AdamW8bit):
        with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
            cls([p], betas=(0.9, 1.0))
        with pytest.raises(ValueError, match="Invalid betas"):
            cls([p], betas=(0.9, 0.9, 0.9))
    with pytest.raises(ValueError, match="use AdamW"):
        dt.optim.AdamW8bit([p], state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float16, in which squares"):
        dt.optim.LAMB([p], state_dtype=torch.float16)
    with pytest.raises(DeuteronError, match="ema_decay"), dt.optim.AdamW([p]).averaged():
        pass
    with pytest.raises(ValueError, match="Nesterov"):
        dt.optim.SGD([p], nesterov=True)


def test_sparse_gradients_are_refused():
    for cls in (dt.optim.AdamW, dt.optim.SGD, dt.optim.Adafactor):
        p = torch.randn(4, 3, requires_grad=True)
        optimizer = cls([p])
        p.grad = torch.ones(4, 3)
        optimizer.step()
        p.grad = torch.ones(4, 3).to_sparse()
        with pytest.raises(BindError, match="sparse=False"):
            optimizer.step()
    whole = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    whole.grad = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(BindError, match="complex64"):
        dt.optim.Adafactor([whole]).step()


# ---- factored second moments


def factored(home, dtype, rounded=None, threads: int = 2, **given):
    """After three steps; the shapes take several chunks to a matrix, several matrices to a chunk,
    and more than one bundle."""
    gen = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(rounded or dtype).to(dtype)

    shapes = [(300, 500), (4097, 5), (64, 32, 3, 3), (2, 20_000), (3, 20, 2000), (5, 1), (700, 41)]
    params = [made(*shape).requires_grad_() for shape in shapes]
    optimizer = home.Adafactor(params, lr=0.1, eps=(1e-6, 1e-3), **given)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            for p in params:
                p.grad = made(*p.shape)
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    return [[p.detach(), *optimizer.state[p].values()] for p in params]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_matrices_with_factored_moments(dtype):
    ours, plain = (factored(home, dtype) for home in (dt.optim, torch.optim))
    exact = factored(torch.optim, torch.float64, dtype)
    for mine, theirs, wide in zip(ours, plain, exact, strict=True):
        if dtype == torch.float64:  # torch is its own reference there, and its sums less exact
            assert error(mine[0], wide[0]) <= FEW_STEPS * EPS[dtype], mine[0].shape
            continue
        for x, y, z in zip(mine, theirs, wide, strict=True):
            assert error(x, z) <= allowed(error(y, z), dtype), (mine[0].shape, x.shape)


def test_factored_moments_do_not_depend_on_threads():
    one, two = (factored(dt.optim, torch.float32, threads=n, ema_decay=0.5) for n in (1, 2))
    for x, y in zip(one, two, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


# ---- the 8-bit state


def test_levels_keep_the_mean_and_the_stated_error():
    x = torch.rand(64, 256).square()
    top = x.amax(1, keepdim=True)
    b = OnTensors(0, x)
    for moment, levels, power in (("m", 127, 2), ("v", 255, 4)):
        total = torch.zeros_like(x)
        for seed in range(64):
            level = rules.level(b, moment, x, top, b.noise(0, seed * 7919))
            assert level.min() >= 0 and level.max() <= levels
            back = top * (level / levels) ** power
            # one level: the distance to the neighbour above
            gap = top * (((level + 1) / levels) ** power - (level / levels) ** power)
            assert ((back - x).abs() <= gap * 1.001).all()
            total += back
        large = x > 0.01
        off = ((total / 64 - x) / x)[large]
        assert off.mean().abs() < EIGHT_BIT_MEAN
    assert OnTensors(0, torch.empty(1 << 16)).noise(0, 5).mean().sub(0.5).abs() < EVEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eight_bits_are_the_same_with_and_without_generated_code(dtype, monkeypatch):
    """Bit for bit: odd sizes, another memory order, a nan and an inf among the gradients. Where
    torch's roots are not the nearest numbers (MKL's are not always), few differ, by a level."""
    ends = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(base, "runner", lambda kind: runners.Plain())
        gen = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=gen).to(dtype) for n in (4096, 8192 * 4 + 17)]
        params.append(torch.randn(70, 90, generator=gen).to(dtype).t())
        optimizer = dt.optim.AdamW8bit([p.requires_grad_() for p in params], lr=0.01)
        for k in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=gen).to(dtype)
            if k == 2:
                params[0].grad[300], params[1].grad[5] = float("nan"), float("inf")
            optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for ours, theirs in zip(*ends, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            apart = (x.double() - y.double()).nan_to_num().abs()
            few = 0 if _exact_roots() else x.numel() // 100
            assert (apart > 0).sum() <= few and apart.max() <= (
                0.01 if x.is_floating_point() else 1
            )


def _exact_roots():
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    return torch.equal(x.sqrt(), x.double().sqrt().float())


# ---- Triton


def test_in_the_interpreter():
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.optim_cases"), at_least=30)


def compiled(launchable, kinds, arch: int, warps: int = 4):
    """For a GPU that is not there, without spills."""
    from triton.backends.compiler import GPUTarget

    kernel = launchable.compile(kinds, {}, warps, 2, GPUTarget("cuda", arch, 32))
    assert spilled(kernel, arch) == 0
    return kernel


TABLE, WHERE, COUNT, WIDE = (torch.int64, True), (torch.int32, True), ("i32", False), torch.float64
SINGLE_ROWS, PAIR = (torch.float32, True), (WIDE, True)


def compiled_pass(rule, types, arch: int, place: int = 0, on_device: bool = True, tile=None):
    from deuteron.kernels.triton import optim as kernels

    step = rule.steps[place]
    wide = (WIDE if WIDE in types else torch.float32, True)
    given = [wide, PAIR] if on_device else [None, None]
    numbers = [None if on_device else ("fp32", False)] * len(rule.numbers)
    kinds = [TABLE, TABLE, WHERE, COUNT, COUNT, *given, PAIR if step.sums else None, *numbers]
    return compiled(kernels.update(step, types, tile), kinds, arch, kernels.WARPS[rule.walk])


def loads_are_wide(kernel) -> bool:
    return bool(re.search(r"ld\.global[.\w:]*v[24]\.b(32|64)", kernel.asm["ptx"]))


F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
NO, BOTH = Extras(), Extras(master=True, ema=True)
EIGHT = (torch.int8, torch.uint8, F32, F32)
PASSES = {  # each generated variant once: a rule, element types, which pass, numbers on the device
    "adamw f32": (rules.adam(False, True, True, NO), (F32,) * 4, 0, False),
    "adamw f32 on device": (rules.adam(False, True, True, NO), (F32,) * 4, 0, True),
    "adamw bf16": (rules.adam(False, True, True, NO), (B16,) * 4, 0, False),
    "adamw f64": (rules.adam(False, True, True, NO), (torch.float64,) * 4, 0, True),
    "all of adam": (rules.adam(True, False, True, BOTH), (B16, B16) + (F32,) * 5, 0, True),
    "adam in 8 bits": (rules.adam_in_8_bits(NO), (F32, F32, *EIGHT), 0, True),
    "adam in 8 bits, all": (rules.adam_in_8_bits(BOTH), (B16, B16, *EIGHT, F32, F32), 0, True),
    "sgd f16": (rules.sgd(True, True, True, NO), (F16,) * 3, 0, False),
    "lion f32": (rules.lion(NO), (F32,) * 3, 0, False),
    "lamb one": (rules.lamb(True, BOTH), (B16, B16) + (F32,) * 4, 0, True),
    "lamb two": (rules.lamb(True, BOTH), (B16, B16) + (F32,) * 4, 2, True),
    "adafactor one": (rules.adafactor_of_vectors(NO), (F32,) * 3, 0, True),
    "adafactor two": (rules.adafactor_of_vectors(Extras(ema=True)), (B16,) * 3 + (F32,), 2, True),
}


@pytest.mark.parametrize("name", one_in(3, PASSES))
def test_updates_compile_without_spills(name):
    pytest.importorskip("triton")
    rule, types, place, on_device = PASSES[name]
    arch = 80 if list(PASSES).index(name) % 2 else 90
    assert loads_are_wide(compiled_pass(rule, types, arch, place, on_device)), "loads are narrow"


def test_the_other_kernels_compile_without_spills():
    pytest.importorskip("triton")
    from deuteron.kernels.triton import optim as kernels

    compiled(kernels.squares(B16), [TABLE, TABLE, WHERE, COUNT, PAIR], 80)
    limits = [("fp32", False), ("fp32", False)]
    given = [PAIR, COUNT, SINGLE_ROWS, SINGLE_ROWS, *limits, SINGLE_ROWS, PAIR]
    compiled(kernels.control(), given, 90)
    for rule in (rules.lamb(True, NO), rules.adafactor_of_vectors(NO)):
        compiled(kernels.finish(rule.steps[1]), [PAIR, WHERE, COUNT, TABLE, SINGLE_ROWS], 90)
        given = [PAIR, SINGLE_ROWS, SINGLE_ROWS, PAIR, SINGLE_ROWS, COUNT]
        compiled(kernels.numbers(rule), given, 80)


@pytest.mark.parametrize(
    ("arch", "kind", "shape"),
    [
        (80, B16, (4096, 1024)),
        pytest.param(90, F32, (512, 256, 3, 3), marks=pytest.mark.sweep),
        pytest.param(90, WIDE, (4096, 1024), marks=pytest.mark.sweep),
    ],
)
def test_factored_updates_compile_without_spills(arch, kind, shape):
    pytest.importorskip("triton")
    from deuteron.kernels.triton import adafactor as kernels

    wide = WIDE if kind == WIDE else F32
    rule, tile = rules.adafactor_of_matrices(Extras(ema=True)), kernels.tile_for(shape)
    types = (kind,) * 4 + (wide,) * 6
    for place in (0, 2, 4):
        kernel = compiled_pass(rule, types, arch, place, tile=tile)
        assert len(shape) > 2 or loads_are_wide(kernel), "loads are narrow"
    moved, mean = kernels.moments(rule.steps[1], types, tile)
    compiled(moved, [TABLE, WHERE, COUNT, COUNT, (wide, True), PAIR], arch)
    compiled(mean, [TABLE, WHERE, COUNT, COUNT], arch)


# ---- explanations


@pytest.mark.parametrize("generated", [True, False])
def test_a_step_is_explained(generated, monkeypatch):
    """Bytes are those that the rule states: 28 for each element of AdamW, 4 for its norm."""
    if not generated:
        monkeypatch.setattr(base, "runner", lambda kind: runners.Plain())
    p = torch.randn(1000, 1000, requires_grad=True)
    optimizer = dt.optim.AdamW([p], max_norm=1.0)
    assert "no step has been made" in optimizer.explain()
    p.grad = torch.randn(1000, 1000)
    optimizer.step()
    head, *lines = optimizer.explain().splitlines()
    assert head.startswith("AdamW: 3 launches, 32.0 MB, at least")
    found = {line.split()[0]: line.split()[5] for line in lines}
    assert found == {"kernel": "MB", "norm": "4.00", "control": "0", "Adam": "28.0"}


def test_hooks_and_profilers_see_a_step():
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer, seen = dt.optim.SGD([p], lr=0.5), []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    before.remove()
    after.remove()
    optimizer.step()
    assert seen == ["before", "after"] and torch.equal(p.detach(), torch.zeros(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        optimizer.step()
    assert any("SGD.step" in event.name for event in found.events())


def test_a_step_within_torch_compile_is_left_alone():
    """The compiler would trace into generated code, and fail."""
    torch.manual_seed(0)
    ours = torch.nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    fused = dt.optim.AdamW(ours.parameters(), lr=0.01)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)

    @torch.compile(backend="eager")
    def step(x):
        fused.zero_grad()
        loss = ours(x).square().sum()
        loss.backward()
        fused.step()
        return loss

    for x in torch.randn(4, 2, 5):
        step(x)
        plain.zero_grad()
        theirs(x).square().sum().backward()
        plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(a, b) <= SINGLE
