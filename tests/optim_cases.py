"""Optimisers to compare, and the comparison: ours, PyTorch's in the same type, float64.

The same cases run on the CPU (tests/test_optim.py), in Triton's interpreter (``python -m
tests.interpreted tests.optim_cases``) and on a GPU (tests/test_gpu_optim.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import deuteron as dt
from tests.interpreted import tell_claims
from tests.tolerances import EIGHT_BIT_UPDATE, EPS, FEW_STEPS, SIGNS_TURNED, allowed, error

SHAPES = [(7, 13), (1,), (), (0, 3), (33, 65, 3), (1024,), (2051,), (5, 3, 4, 2)]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper has it, in plain torch."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(
            params, {"lr": lr, "betas": betas, "decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * torch.sign(b1 * m + (1 - b1) * g))
                m.copy_(b2 * m + (1 - b2) * g)


class PlainLamb(torch.optim.Optimizer):
    """LAMB as its paper has it, in plain torch."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=1e-2, always_adapt=False
    ):
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "decay": weight_decay, "always": always_adapt},
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), decay = group["betas"], group["decay"]
            for p in group["params"]:
                s, g = self.state[p], p.grad
                t = s["t"] = s.get("t", 0) + 1
                m, v = (s.setdefault(k, torch.zeros_like(p)) for k in ("m", "v"))
                m.copy_(b1 * m + (1 - b1) * g)
                v.copy_(b2 * v + (1 - b2) * g * g)
                u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + decay * p
                a, b = p.norm(), u.norm()
                adapt = bool(decay or group["always"]) and bool(a) and bool(b)
                p.sub_(group["lr"] * (a / b if adapt else 1.0) * u)


@dataclass
class Case:
    """An optimiser of ours, its reference, and what both are given."""

    name: str
    ours: str
    reference: Callable[..., torch.optim.Optimizer]
    given: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # to ours alone


def cases() -> list[Case]:
    def of(name: str, reference: Any, *options: dict[str, Any]) -> list[Case]:
        return [
            Case(f"{name} {' '.join(f'{k}={v}' for k, v in o.items())}", name, reference, o)
            for o in options
        ]

    t = torch.optim
    return [
        *of(
            "SGD",
            t.SGD,
            {"lr": 0.1},
            {"lr": 0.1, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True},
        ),
        *of(
            "Adam",
            t.Adam,
            {"eps": 1e-4},
            {"eps": 1e-4, "weight_decay": 0.1, "lr": 0.01},
            {"eps": 1e-4, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
            {"eps": 1e-4, "betas": (0.0, 0.99), "decoupled_weight_decay": True},
        ),
        *of(
            "AdamW",
            t.AdamW,
            {"eps": 1e-4},
            {"eps": 1e-4, "amsgrad": True, "lr": 0.01},
            {"eps": 1e-4, "maximize": True, "weight_decay": 0.0},
        ),
        *of("Lion", PlainLion, {"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
        *of(
            "LAMB",
            PlainLamb,
            {"lr": 0.01, "eps": 1e-4},
            {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.0},
            {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.0, "always_adapt": True},
        ),
        *of(
            "Adafactor",
            t.Adafactor,
            {"lr": 0.1, "eps": (1e-6, 1e-3)},
            {"lr": 0.1, "eps": (1e-6, 1e-3), "weight_decay": 0.1, "maximize": True, "d": 2.0},
        ),
    ]


def tensors(dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=gen, dtype=torch.float64) for s in SHAPES]
    # a seventh of the first is exactly 0: a tie for signs, a nothing for squares
    made[0][0] = 0.0
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return [x.to(device, dtype) for x in made]


def trained(
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    rounded: torch.dtype,
    device: str,
    steps: int,
    **given: Any,
) -> list[torch.Tensor]:
    """Parameters after some steps; start and gradients are values of ``rounded``."""
    params = [x.to(dtype).requires_grad_() for x in tensors(rounded, device)]
    optimizer = make(params, **given)
    for k in range(steps):
        for p, g in zip(params, tensors(rounded, device, k + 1), strict=True):
            if p.numel() or make is not torch.optim.Adafactor:  # which divides by the size
                p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


def check(case: Case, dtype: torch.dtype, device: str = "cpu", steps: int = 10) -> str:
    """What is wrong, or nothing."""
    given = {**case.given, **case.extra}
    ours = trained(getattr(dt.optim, case.ours), dtype, dtype, device, steps, **given)
    plain = trained(case.reference, dtype, dtype, device, steps, **case.given)
    exact = trained(case.reference, torch.float64, dtype, device, steps, **case.given)
    wrong = []
    for shape, a, b, c in zip(SHAPES, ours, plain, exact, strict=True):
        off, bound = error(a, c), allowed(error(b, c), dtype)
        if case.ours == "Lion" and dtype != torch.float64:
            # a sign that rounding turned moves an element by two rates
            turned = ((a.double() - c).abs() > bound).double().mean() if a.numel() else 0.0
            off = off if turned > SIGNS_TURNED else 0.0
        if not off <= bound:
            wrong.append(f"{tuple(shape)}: {off:.3g} > {bound:.3g}")
    return "; ".join(wrong)


# ---- what rides along; each answers with what is wrong, or nothing


def _pair(dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    one, two = (tensors(dtype, device) for _ in range(2))
    return [x.requires_grad_() for x in one], [x.requires_grad_() for x in two]


def _give(params: list[torch.Tensor], seed: int, factor: float = 1.0) -> None:
    device = str(params[0].device)
    for p, g in zip(params, tensors(torch.float64, device, seed), strict=True):
        p.grad = (g * factor).to(p.dtype)


def _differ(
    a: Any, b: Any, dtype: torch.dtype = torch.float32, roundings: float | None = None
) -> str:
    roundings = FEW_STEPS if roundings is None else roundings
    off = [error(x, y) for x, y in zip(a, b, strict=True)]
    return f"off by {off}" if max(off) > roundings * EPS[dtype] else ""


def clipping(device: str) -> str:
    a, b = _pair(torch.float32, device)
    ours = dt.optim.AdamW(a, lr=0.01, max_norm=0.5)
    plain = torch.optim.AdamW(b, lr=0.01)
    for k in range(3):
        _give(a, k + 1, 10.0**-k)  # the last is shorter than the limit
        _give(b, k + 1, 10.0**-k)
        before = [p.grad.clone() for p in a]
        norm = torch.nn.utils.clip_grad_norm_(b, 0.5)
        ours.step()
        plain.step()
        if wrong := _differ([ours.grad_norm], [norm]):
            return f"norm {ours.grad_norm} for {norm}: {wrong}"
        if any(not torch.equal(p.grad, g) for p, g in zip(a, before, strict=True)):
            return "gradients were written"
    return _differ(a, b)


def unscaling(device: str) -> str:
    a, b = _pair(torch.float32, device)
    ours, plain = dt.optim.Adam(a, lr=0.01), torch.optim.Adam(b, lr=0.01)
    for k in range(4):
        _give(a, k + 1, 1024.0)
        _give(b, k + 1)
        bad = k in (0, 2)
        ours.grad_scale = torch.tensor(1024.0, device=device)
        ours.found_inf = torch.tensor(float(bad), device=device)
        ours.step()
        if not bad:
            plain.step()
    steps = {float(s["step"]) for s in ours.state.values()}
    return f"steps {steps}" if steps != {2.0} else _differ(a, b)


def skipping(device: str) -> str:
    a, b = _pair(torch.float32, device)
    optimizer = dt.optim.SGD(a, lr=0.1, momentum=0.9, dampening=0.5, skip_nonfinite=True)
    plain = torch.optim.SGD(b, lr=0.1, momentum=0.9, dampening=0.5)
    for k in range(4):
        _give(a, k + 1)
        _give(b, k + 1)
        if k in (0, 2):
            a[4].grad.view(-1)[200] = float("nan") if k else float("inf")
        else:
            plain.step()
        optimizer.step()
    return _differ(a, b)


def averages(device: str) -> str:
    a, b = _pair(torch.float32, device)
    ours, plain = dt.optim.Lion(a, lr=0.01, ema_decay=0.9), PlainLion(b, lr=0.01)
    mean = [p.detach().clone() for p in b]
    for k in range(3):
        _give(a, k + 1)
        _give(b, k + 1)
        ours.step()
        plain.step()
        mean = [0.9 * m + 0.1 * p.detach() for m, p in zip(mean, b, strict=True)]
    now = [p.detach().clone() for p in a]
    with ours.averaged():
        wrong = _differ(a, mean)
    if any(not torch.equal(p, q) for p, q in zip(a, now, strict=True)):
        return "the parameters did not come back"
    return wrong


def master_weights(device: str) -> str:
    """Small steps on bfloat16 parameters are those on float32 ones, rounded."""
    params = [x.requires_grad_() for x in tensors(torch.bfloat16, device)]
    wide = [p.detach().float().requires_grad_() for p in params]
    ours = dt.optim.AdamW(
        params, lr=1e-4, master_weights=True, ema_decay=0.5, state_dtype=torch.float32
    )
    plain = torch.optim.AdamW(wide, lr=1e-4)
    for k in range(3):
        _give(params, k + 1)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        ours.step()
        plain.step()
    kinds = {k: v.dtype for k, v in ours.state[params[0]].items()}
    if set(kinds.values()) != {torch.float32}:
        return f"types of the state: {kinds}"
    if wrong := _differ([ours.state[p]["master"] for p in params], wide):
        return wrong
    rounded = [ours.state[p]["master"].to(torch.bfloat16) for p in params]
    same = all(torch.equal(p, r) for p, r in zip(params, rounded, strict=True))
    return "" if same else "a parameter is not the rounding of its master"


def groups_and_gaps(device: str) -> str:
    """Two groups, gradients that come later, a rate that changes, a rate in a tensor."""
    a, b = _pair(torch.float32, device)
    made = []
    for params, cls in ((a, dt.optim.AdamW), (b, torch.optim.AdamW)):
        rate = torch.tensor(0.02, device=device if cls is dt.optim.AdamW else "cpu")
        made.append(
            cls([{"params": params[:3]}, {"params": params[3:], "lr": rate, "weight_decay": 0.0}])
        )
    for k in range(4):
        for params, optimizer in zip((a, b), made, strict=True):
            _give(params, k + 1)
            for i in (0, 5) if k in (0, 2) else ():
                params[i].grad = None
            optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)
            optimizer.step()
    return _differ(a, b)


def odd_memory(device: str) -> str:
    """Gradients in another order or expanded, parameters with gaps or off by an element."""

    def params() -> list[torch.Tensor]:
        gen = torch.Generator().manual_seed(0)
        base = torch.randn(64, 70, generator=gen).to(device)
        flat = torch.randn(5000, generator=gen).to(device)
        number = torch.randn(700, generator=gen, dtype=torch.complex64).to(device)
        views = [base[:, 3:40], base.t()[50:60], flat[1:4100], number, flat[4200:4204]]
        return [v.detach().requires_grad_() for v in views]

    a, b = params(), params()
    ours, plain = (
        dt.optim.Adam(a, lr=0.01, amsgrad=True),
        torch.optim.Adam(b, lr=0.01, amsgrad=True),
    )
    gen = torch.Generator().manual_seed(1)
    for k in range(3):
        for p, q in zip(a, b, strict=True):
            g = torch.randn(p.shape, generator=gen, dtype=p.dtype)
            g = g.t().contiguous().t() if p.dim() == 2 and k else g
            g = g[:1].expand(p.shape) if k == 2 else g
            p.grad, q.grad = g.to(device), g.to(device)
        ours.step()
        plain.step()
    parts = [[torch.view_as_real(x) if x.is_complex() else x for x in y] for y in (a, b)]
    return _differ(*parts)


def eight_bits(device: str) -> str:
    """Close to AdamW, the same in every run, small tensors exactly AdamW."""
    ends = []
    for cls in (dt.optim.AdamW8bit, dt.optim.AdamW8bit, torch.optim.AdamW):
        gen = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=gen).to(device) for n in (5000, 100, 8192)]
        params = [p.requires_grad_() for p in params]
        optimizer = cls(params, lr=0.01)
        start = [p.detach().clone() for p in params]
        for _ in range(8):
            for p in params:
                p.grad = torch.randn(p.shape, generator=gen).to(device)
            optimizer.step()
        ends.append([p.detach() - s for p, s in zip(params, start, strict=True)])
    one, two, plain = ends
    if any(not torch.equal(x, y) for x, y in zip(one, two, strict=True)):
        return "two runs differ"
    if wrong := _differ(one[1:2], plain[1:2], roundings=64):
        return f"the small tensor: {wrong}"
    off = [float((x - y).norm() / y.norm()) for x, y in zip(one, plain, strict=True)]
    return f"off by {off}" if max(off) > EIGHT_BIT_UPDATE else ""


# ---- the same for every optimiser: each against itself, given what the option should amount to

EVERY: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01, "eps": 1e-4},
    "AdamW": {"lr": 0.01, "eps": 1e-4},
    "Lion": {"lr": 0.01},
    "LAMB": {"lr": 0.01, "eps": 1e-4},
    "Adafactor": {"lr": 0.1},
    "AdamW8bit": {"lr": 0.01, "eps": 1e-4, "min_8bit_size": 60},
}
FEW = [(7, 13), (300,), (3, 5, 4), (40, 32)]


def few(dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(device, dtype) for s in FEW]


def start(
    name: str, device: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[list[torch.Tensor], Any]:
    """Parameters and one of our optimisers over them."""
    params = [x.requires_grad_() for x in few(dtype, device)]
    return params, getattr(dt.optim, name)(params, **EVERY[name] | more)


def _step(params: list[torch.Tensor], optimizer: Any, seed: int, factor: float = 1.0) -> None:
    device, kind = str(params[0].device), params[0].dtype
    for p, g in zip(params, few(torch.float64, device, seed), strict=True):
        p.grad = (g * factor).to(kind)
    optimizer.step()


def _for_all(claim: Callable[[str, str], str]) -> Callable[[str], str]:
    def run(device: str) -> str:
        wrong = {name: claim(name, device) for name in EVERY}
        return "; ".join(f"{name}: {w}" for name, w in wrong.items() if w)

    run.__name__ = claim.__name__
    return run


@_for_all
def every_one_clips(name: str, device: str) -> str:
    """One step: levels of an 8-bit state may fall the other way when a gradient is rounded."""
    a, ours = start(name, device, max_norm=0.5)
    b, plain = start(name, device)
    _step(a, ours, 1)
    for p, g in zip(b, few(torch.float32, device, 1), strict=True):
        p.grad = g
    norm = torch.nn.utils.clip_grad_norm_(b, 0.5)
    plain.step()
    return _differ([ours.grad_norm], [norm]) or _differ(a, b)


@_for_all
def every_one_unscales_and_skips(name: str, device: str) -> str:
    a, ours = start(name, device)
    b, plain = start(name, device)
    for k in range(4):
        bad = k in (0, 2)
        ours.grad_scale = torch.tensor(1024.0, device=device)
        ours.found_inf = torch.tensor(float(bad), device=device)
        _step(a, ours, k + 1, 1024.0)
        if not bad:
            _step(b, plain, k + 1)
    steps = {float(s["step"]) for s in ours.state.values() if "step" in s}
    return f"steps {steps}" if steps - {2.0} else _differ(a, b)


@_for_all
def every_one_leaves_a_bad_step_out(name: str, device: str) -> str:
    a, ours = start(name, device, skip_nonfinite=True)
    b, plain = start(name, device)
    for k in range(3):
        _step(a, ours, k + 1, float("nan") if k == 1 else 1.0)
        if k != 1:
            _step(b, plain, k + 1)
    return _differ(a, b)


@_for_all
def every_one_averages(name: str, device: str) -> str:
    a, ours = start(name, device, ema_decay=0.9)
    mean = [p.detach().clone() for p in a]
    for k in range(3):
        _step(a, ours, k + 1)
        mean = [0.9 * m + 0.1 * p.detach() for m, p in zip(mean, a, strict=True)]
    return _differ([ours.state[p]["ema"] for p in a], mean)


@_for_all
def every_one_keeps_master_weights(name: str, device: str) -> str:
    """Of bfloat16 parameters; what is kept follows float32 ones."""
    if name == "Adafactor":
        return ""  # which says that it has none
    more = {} if name == "AdamW8bit" else {"state_dtype": torch.float32}
    a, ours = start(name, device, torch.bfloat16, master_weights=True, **more)
    b, plain = start(name, device)
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    for k in range(3):
        _step(a, ours, k + 1)
        for p, q in zip(a, b, strict=True):
            q.grad = p.grad.float()
        plain.step()
    masters = [ours.state[p]["master"] for p in a]
    same = all(torch.equal(p, m.to(p.dtype)) for p, m in zip(a, masters, strict=True))
    return _differ(masters, b) if same else "a parameter is not the rounding of its master"


@_for_all
def every_one_has_groups(name: str, device: str) -> str:
    """Two groups are two optimisers; what a group does not say is the optimiser's."""
    make, given = getattr(dt.optim, name), EVERY[name]
    a, b = ([x.requires_grad_() for x in few(torch.float32, device)] for _ in range(2))
    joined = make([{"params": a[:2], "lr": 0.02}, {"params": a[2:], "weight_decay": 0.1}], **given)
    apart = [make(b[:2], **given | {"lr": 0.02}), make(b[2:], **given, weight_decay=0.1)]
    for k in range(3):
        _step(a, joined, k + 1)
        for p, q in zip(a, b, strict=True):
            q.grad = p.grad.clone()
        for one in apart:
            one.step()
    return _differ(a, b, roundings=0)


@_for_all
def every_one_goes_on_from_its_state(name: str, device: str) -> str:
    import copy

    more = {"ema_decay": 0.5}
    a, whole = start(name, device, **more)
    b, part = start(name, device, **more)
    for k in range(4):
        if k == 2:
            saved = copy.deepcopy(part.state_dict())
            again, part = start(name, device, **more | {"lr": 0.5})
            with torch.no_grad():
                for p, q in zip(again, b, strict=True):
                    p.copy_(q)
            b = again
            part.load_state_dict(saved)
        _step(a, whole, k + 1)
        _step(b, part, k + 1)
    kept = [[o.state[p]["ema"] for p in ps] for o, ps in ((whole, a), (part, b))]
    return _differ(a, b, roundings=0) or _differ(*kept, roundings=0)


OPTIONS = {
    f.__name__: f
    for f in (
        clipping,
        unscaling,
        skipping,
        averages,
        master_weights,
        groups_and_gaps,
        odd_memory,
        eight_bits,
        every_one_clips,
        every_one_unscales_and_skips,
        every_one_leaves_a_bad_step_out,
        every_one_averages,
        every_one_keeps_master_weights,
        every_one_has_groups,
        every_one_goes_on_from_its_state,
    )
}


# Small tensors for the interpreter: a whole chunk and the rest of one, a whole tile and parts.
SMALL = [(7, 13), (1,), (), (0, 3), (20, 144), (1030,), (5, 3, 4, 2)]
# What kernels see of an option; what the host does with it is tested on the CPU.
INTERPRETED = (
    clipping,
    unscaling,
    skipping,
    groups_and_gaps,
    odd_memory,
    every_one_unscales_and_skips,
    every_one_averages,
    every_one_keeps_master_weights,
)


def eight_bits_as_by_torch(device: str) -> str:
    """Levels, scales and parameters bit for bit as without kernels."""
    from deuteron.optim import base, runners

    ends, kernels = [], base.runner
    for run in (kernels, lambda kind: runners.Plain()):
        base.runner = run  # type: ignore[assignment]
        gen = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=gen).to(device) for n in (1300, 1024)]
        optimizer = dt.optim.AdamW8bit([p.requires_grad_() for p in params], min_8bit_size=100)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=gen).to(device)
            optimizer.step()
        ends.append([x for p in params for x in (p.detach(), *optimizer.state[p].values())])
    base.runner = kernels  # type: ignore[assignment]
    same = [torch.equal(x, y) for x, y in zip(*ends, strict=True)]
    return "" if all(same) else f"{same}"


def scaled(device: str, rows: int) -> list[tuple[torch.Tensor, float, float]]:
    """Where our AdamW and torch's end under a GradScaler when some gradients are infinite: the
    parameter, steps and the scale."""
    ends = []
    for ours in (True, False):
        torch.manual_seed(0)
        p = torch.randn(rows, 5, device=device, requires_grad=True)
        fused = {} if ours or device == "cpu" else {"fused": True}
        made = (dt.optim if ours else torch.optim).AdamW([p], lr=0.1, **fused)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        for k in range(6):
            made.zero_grad()
            scale = float("inf") if k in (0, 3) else 1.0
            scaler.scale((p.sin() * scale).sum()).backward()
            scaler.step(made)
            scaler.update()
        ends.append((p.detach(), float(made.state[p]["step"]), scaler.get_scale()))
    return ends


def in_the_interpreter() -> None:
    """Every kernel that is generated, interpreted; prints what failed as JSON."""
    from deuteron.optim import base, gpu

    made = gpu.OnGpu()
    base.runner = lambda kind: made  # type: ignore[assignment]
    SHAPES[:], FEW[:] = SMALL, FEW[:2]
    options = (*INTERPRETED, eight_bits_as_by_torch)
    claims: dict[str, Callable[[], str]] = {f.__name__: partial(f, "cpu") for f in options}
    seen: set[str] = set()
    for case in cases():
        runs: list[tuple[torch.dtype, dict[str, Any]]] = [(torch.float32, {})]
        if case.ours not in seen:  # types and counts on the device: once for every optimiser
            seen.add(case.ours)
            runs += [(torch.bfloat16, {}), (torch.float64, {})]
            if case.ours in ("AdamW", "Lion"):  # others have counts there always, or never
                runs.append((torch.float32, {"capturable": True}))
        elif case.ours == "Adafactor":  # other numbers, but the same kernels
            runs = []
        for dtype, extra in runs:
            one = replace(case, extra=extra)
            claims[f"{case.name} {dtype} {extra}"] = partial(check, one, dtype, steps=2)
    tell_claims(claims)


if __name__ == "__main__":
    in_the_interpreter()
