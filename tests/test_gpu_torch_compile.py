"""``torch.compile(model, backend="deuteron")`` on a real GPU: halves as CUDA Graphs, whatever the
loop does with losses and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron import torch_compile
from tests.tolerances import EPS, SINGLE_LAYERS, TRAINED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
STEPS = 9


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*parts, nn.Linear(8 * 36, 16), nn.GELU(), nn.Linear(16, 5)).cuda()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, 3, 8, 8, generator=gen), torch.randint(0, 5, (4,), generator=gen)
    return x.cuda(), y.cuda()


def usual(model, optimizer, k):
    x, y = batch(k)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def kept_gradients(model, optimizer, k):
    """They are added to, and set to zero in place."""
    x, y = batch(k)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if k % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss


def two_before_backward(model, optimizer, k):
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(x), y) for x, y in (batch(k), batch(k + 100))]
    sum(losses).backward()
    optimizer.step()
    return losses[0]


def backward_twice(model, optimizer, k):
    x, y = batch(k)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(batch(k + 50)[0])
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "loop", [usual, kept_gradients, two_before_backward, backward_twice], ids=lambda f: f.__name__
)
def test_a_loop_is_eagers(loop, halves):
    """Losses of all steps are kept, as those who plot them do."""
    plain = network()
    ours = copy.deepcopy(plain)
    fast = torch.compile(ours, backend=dt.backend)
    both = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (plain, ours)]
    losses = [[], []]
    for k in range(STEPS):
        for model, optimizer, kept in zip((plain, fast), both, losses, strict=True):
            kept.append(loop(model, optimizer, k).detach())
    how = {"rtol": TRAINED * EPS[torch.float32], "atol": TRAINED * EPS[torch.float32]}
    torch.testing.assert_close(losses[1], losses[0], **how)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), **how)
    assert any(half.run.captured for half in halves), [half.run.note for half in halves]


def test_parameters_may_move(halves):
    """Loading with assign=True puts other tensors in their places."""
    model = network()
    fast = torch.compile(model, backend=dt.backend)
    for k in range(6):
        fast(batch(k)[0]).sum().backward()
    other = network()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    model.load_state_dict(other.state_dict(), assign=True)
    x = batch(9)[0]
    want = copy.deepcopy(model)(x)
    torch.testing.assert_close(fast(x), want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


def test_without_graphs(halves):
    options = {"policy": dt.Policy(cuda_graph=False)}
    model = network()
    fast = torch.compile(model, backend=dt.backend, options=options)
    for k in range(5):
        fast(batch(k)[0]).sum().backward()
    assert not any(isinstance(half.run, torch_compile.Settled) for half in halves)


def test_casts_and_counters_are_few_launches():
    """Weights are rounded by torch's kernel for lists, gradients widened so, and what batch norm
    changes is not copied one by one."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(12)]
    plain = nn.Sequential(*layers).cuda()
    ours = copy.deepcopy(plain)
    policy = dt.Policy(cuda_graph=False)
    fast = torch.compile(ours, backend=dt.backend, options={"policy": policy})
    x = torch.randn(256, 64, device="cuda")

    def run(model: nn.Module) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(x).sum().backward()

    for _ in range(3):
        run(plain)
        run(fast)
    how = {"rtol": TRAINED * EPS[torch.bfloat16], "atol": TRAINED * EPS[torch.bfloat16]}
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()), **how)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run(fast)
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert any("multi_tensor_apply" in name for name in names), "not torch's kernel for lists"
    copies = [name for name in names if "cast_flat" in name or "cpy" in name or "_copy_" in name]
    assert len(copies) < len(layers), copies
