"""Modules that take gradients in forward become plans as well."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import deuteron as dt
from tests.tolerances import SINGLE_LAYERS, error


def net(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 24), nn.SiLU(), nn.Linear(24, outputs))


class Force(nn.Module):
    """Energies and forces, as of a potential between atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))
        self.shift = torch.tensor([0.5, 0.0, 0.25])

    def forward(self, x, *, twice=False):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x * self.scale + self.shift).sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x)
        return {"energy": energy.detach(), "force": -2 * force if twice else -force}


class NeedsGradMode(nn.Module):
    """As most write it: it runs only where gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x):
        x.requires_grad_(True)
        return -torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


class Residual(nn.Module):
    """Of a heat equation: u_t − u_xx, by gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(2)

    def forward(self, x, t):
        with torch.enable_grad():
            x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
            u = self.net(torch.stack((x, t), 1)).squeeze(1)
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return u_t - u_xx


class Transformed(nn.Module):
    """torch.func, in the ways there are."""

    def __init__(self, way) -> None:
        super().__init__()
        self.net, self.way = net(3, 2), way

    def forward(self, x):
        if self.way == "grad":
            return grad(lambda t: self.net(t).sum())(x)
        if self.way == "jacobian":
            return vmap(jacrev(self.net))(x)
        if self.way == "hessian, backwards":
            return vmap(jacrev(jacrev(lambda t: self.net(t).sum())))(x)
        if self.way == "hessian":
            return vmap(hessian(lambda t: torch.tanh(self.net(t.sin())).sum()))(x)
        if self.way == "forwards":
            slopes = jvp(self.net, (x,), (torch.ones_like(x),))[1]
            return slopes.sum() * jacfwd(self.net)(x)
        if self.way == "autograd.functional":
            with torch.enable_grad():
                return torch.autograd.functional.jacobian(self.net, x)
        weights = {name: p * 2 for name, p in self.net.named_parameters()}
        return grad(lambda t: functional_call(self.net, weights, t).square().sum())(x)


class Adapted(nn.Module):
    """A step of learning inside: the gradient for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x, y):
        with torch.enable_grad():
            loss = (self.conv(x) - y).square().mean()
            (slope,) = torch.autograd.grad(loss, self.conv.weight)
        return nn.functional.conv2d(x, self.conv.weight - 0.1 * slope, self.conv.bias, padding=1)


class Solves(nn.Module):
    """The gradient of a log-determinant, and a solver that checks its matrix."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.linalg.slogdet(x)[1], x)
        return slope - torch.linalg.inv(x.detach())


WAYS = (
    "grad",
    "jacobian",
    "hessian, backwards",
    "hessian",
    "forwards",
    "autograd.functional",
    "functional_call",
)
CASES = {
    "energies and forces": (Force, lambda: (torch.randn(6, 3),)),
    "in grad mode alone": (NeedsGradMode, lambda: (torch.randn(6, 3),)),
    "second derivatives": (Residual, lambda: (torch.randn(9), torch.randn(9))),
    "the gradient for a weight": (
        Adapted,
        lambda: (torch.randn(2, 2, 6, 5), torch.randn(2, 4, 6, 5)),
    ),
    **{way: (lambda way=way: Transformed(way), lambda: (torch.randn(5, 3),)) for way in WAYS},
}


def results(answer) -> list[torch.Tensor]:
    return list(answer.values()) if isinstance(answer, dict) else [answer]


def check(model, fast, x) -> None:
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "shift"):
        wide.shift = wide.shift.double()
    exact = results(wide(*(t.double() for t in x)))
    with torch.no_grad():
        found = results(fast(*x))
    for got, want in zip(found, exact, strict=True):
        assert not got.requires_grad
        assert error(got, want.detach()) <= SINGLE_LAYERS


@pytest.mark.parametrize(("make", "inputs"), CASES.values(), ids=CASES)
def test_it_is_a_plan(make, inputs):
    model, x = make().eval(), inputs()
    fast = dt.optimize(model, x, find=False)
    check(model, fast, x)
    check(model, fast, tuple(torch.randn_like(t) for t in x))
    assert fast.explain().report.regions
    for p in model.parameters():
        with torch.no_grad():
            p.mul_(1.25)
    fast.refit(model.state_dict())
    check(model, fast, x)


def test_keywords_are_fixed():
    model, x = Force().eval(), torch.randn(4, 3)
    fast = dt.optimize(model, (x,), kwargs={"twice": True}, find=False)
    want = model(x, twice=True)
    assert error(fast(x, twice=True)["force"], want["force"]) <= SINGLE_LAYERS
    with pytest.raises(dt.BindError, match="twice"):
        fast(x, twice=False)


def test_measured_plans_of_what_needs_grad_mode():
    """Such a model cannot run beside its plan, which computes no gradients of its own."""
    model, x = NeedsGradMode().eval(), torch.randn(4, 3)
    fast = dt.optimize(model, (x.clone(),), find=True, budget_s=0.5)
    check(model, fast, (x,))


class AsksTheMode(Force):
    def forward(self, x):
        found = super().forward(x)["force"]
        return found * 2 if torch.is_grad_enabled() else found


def test_the_mode_is_that_of_plans():
    model, x = AsksTheMode().eval(), torch.randn(4, 3)
    fast = dt.optimize(model, (x,), find=False)
    with torch.no_grad():
        assert error(fast(x), model(x)) <= SINGLE_LAYERS


class Branches(Force):
    def forward(self, x):
        found = super().forward(x)
        return found["force"] if found["energy"].sum() > 0 else found["energy"]


class Remembers(Force):
    def forward(self, x):
        self.last = super().forward(x)["force"]
        return self.last


class Drops(Force):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))["force"]


class Writes(Force):
    def forward(self, x):
        found = super().forward(x)["force"]
        x.add_(1.0)
        return found


@pytest.mark.parametrize("kind", [Branches, Remembers, Drops, Writes])
def test_what_is_refused_otherwise_stays_refused(kind):
    x = torch.randn(4, 3)
    with pytest.raises(dt.DeuteronError) as caught:
        dt.optimize(kind().eval(), (x.clone(),), find=False)
    assert "remedy" in str(caught.value)


def test_a_solver_still_checks_its_matrix():
    model, x = Solves().eval(), torch.eye(3) * 2 + torch.rand(3, 3)
    fast = dt.optimize(model, (x,), find=False)
    assert (fast(x) - model(x)).abs().max() <= SINGLE_LAYERS * 4
    with pytest.raises(torch.linalg.LinAlgError):
        fast(torch.zeros(3, 3))
