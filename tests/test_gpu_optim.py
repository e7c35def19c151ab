"""Optimisers on a real GPU: every case and option, GradScaler, CUDA Graphs, long tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import deuteron as dt
from tests.optim_cases import (
    EVERY,
    FLOATS,
    OPTIONS,
    PlainLamb,
    PlainLion,
    cases,
    check,
    few,
    scaled,
    start,
    tensors,
)
from tests.tolerances import EPS, FEW_STEPS, MANY_STEPS, SINGLE_LAYERS, STEPS, TRAINED, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ten_steps(dtype):
    found = {case.name: check(case, dtype, "cuda") for case in cases()}
    wrong = {name: what for name, what in found.items() if what}
    assert not wrong, wrong


def test_ten_steps_counted_on_the_device():
    wrong = {}
    for case in cases():
        if case.ours in ("Adam", "AdamW", "Lion", "LAMB"):
            case.extra = {"capturable": True}
            for dtype in (torch.float32, torch.bfloat16):
                if what := check(case, dtype, "cuda"):
                    wrong[f"{case.name} {dtype}"] = what
    assert not wrong, wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert not (wrong := OPTIONS[name]("cuda")), wrong


def test_grad_scaler():
    ends = scaled("cuda", 3300)
    assert ends[0][1:] == ends[1][1:]
    assert error(ends[0][0], ends[1][0]) <= STEPS * EPS[torch.float32]


GRAPHED = [
    ("AdamW", torch.optim.AdamW, {"capturable": True}),
    ("AdamW", torch.optim.AdamW, {"capturable": True, "max_norm": 0.5}),
    ("Lion", PlainLion, {"capturable": True}),
    ("LAMB", PlainLamb, {"capturable": True}),
    ("SGD", torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("name", "reference", "given"), GRAPHED)
def test_under_a_cuda_graph(name, reference, given):
    """Replays go on counting, and a rate in a tensor is read anew."""
    norm = given.get("max_norm")
    params = [x.requires_grad_() for x in tensors(torch.float32, "cuda")]
    others = [x.detach().clone().requires_grad_() for x in params]
    rate = torch.tensor(0.01, device="cuda")
    optimizer = getattr(dt.optim, name)(params, lr=rate, **given)
    kept = {k: v for k, v in given.items() if k == "momentum"}
    plain = reference(others, lr=0.01, **kept)
    for p in params:
        p.grad = torch.empty_like(p)

    def feed(seed: int) -> None:
        for p, q, g in zip(params, others, tensors(torch.float32, "cuda", seed), strict=True):
            p.grad.copy_(g)
            q.grad = g.clone()
        if norm:
            torch.nn.utils.clip_grad_norm_(others, norm)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for k in range(2):
            feed(k + 1)
            optimizer.step()
            plain.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for k in range(4):
        feed(k + 3)
        rate.fill_(0.01 / (k + 1))
        plain.param_groups[0]["lr"] = 0.01 / (k + 1)
        graph.replay()
        plain.step()
    torch.cuda.synchronize()
    off = {tuple(p.shape): error(p, q) for p, q in zip(params, others, strict=True)}
    assert max(off.values()) <= MANY_STEPS * EPS[torch.float32], off
    if name in ("AdamW", "LAMB"):
        assert {float(s["step"]) for s in optimizer.state.values()} == {6.0}


@pytest.mark.parametrize("name", EVERY)
def test_every_one_can_be_captured(name):
    """Replays of one captured step are steps, to the last bit, clipped and averaged ones too."""
    counts = name not in ("SGD", "Adafactor")  # which have no argument for it
    more = {"ema_decay": 0.9, "max_norm": 5.0} | ({"capturable": True} if counts else {})
    ends = []
    for captured in (False, True):
        params, optimizer = start(name, "cuda", **more)
        for p, g in zip(params, few(torch.float32, "cuda", 1), strict=True):
            p.grad = g

        def feed(seed: int, params=params) -> None:
            for p, g in zip(params, few(torch.float32, "cuda", seed), strict=True):
                p.grad.copy_(g)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        step = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for k in range(3):
            feed(k + 2)
            step()
        torch.cuda.synchronize()
        ends.append([x for p in params for x in (p.detach(), optimizer.state[p]["ema"])])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_backward_and_step_in_one_graph():
    """Gradients are made inside the graph, so their addresses are first known there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3)
    ).cuda()
    twin = copy.deepcopy(model)
    optimizer = dt.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01)
    x = torch.randn(16, 40, device="cuda")

    def train(m, o) -> None:
        o.zero_grad()
        m(x).square().mean().backward()
        o.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(model, optimizer)
    for _ in range(3):
        graph.replay()
    for _ in range(6):
        train(twin, plain)
    torch.cuda.synchronize()
    off = [error(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    assert max(off) <= TRAINED * EPS[torch.float32], off


def test_capture_without_capturable_is_refused():
    p = torch.randn(10, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = dt.optim.AdamW([p])
    optimizer.step()
    with (
        pytest.raises(dt.EngineError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_past_two_to_the_31_elements():
    """bfloat16 Lion: the end of a long tensor moves as its beginning does."""
    free = torch.cuda.mem_get_info()[0]
    n = 2**31 + 1027
    if free < 8 * n:
        pytest.skip(f"needs {8 * n >> 30} GiB, {free >> 30} are free")
    p = torch.ones(n, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.ones_like(p)
    p.grad[-5:] = -1.0
    optimizer = dt.optim.Lion([p], lr=0.125, max_norm=1e9)
    optimizer.step()
    ends = torch.cat((p.detach()[:5], p.detach()[-5:])).float().tolist()
    assert ends == [0.875] * 5 + [1.125] * 5
    middle = p.detach()[2**31 - 8 : 2**31 + 8].float().unique().tolist()
    assert middle == [0.875]
    assert error(optimizer.grad_norm, torch.tensor(float(n)).sqrt()) < SINGLE_LAYERS


def test_eight_bits_past_two_to_the_31_elements():
    """The first step of AdamW is its rate, whatever the gradient's size."""
    n = 2**31 + 1027
    free = torch.cuda.mem_get_info()[0]
    if free < 8 * n:
        pytest.skip(f"needs {8 * n >> 30} GiB, {free >> 30} are free")
    p = torch.ones(n, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.ones_like(p)
    p.grad[-5:] = -1.0
    dt.optim.AdamW8bit([p], lr=0.125, weight_decay=0.0).step()
    ends = torch.cat((p.detach()[:5], p.detach()[-5:])).float().tolist()
    assert ends == [0.875] * 5 + [1.125] * 5


def test_factored_past_two_to_the_31_elements():
    """bfloat16 Adafactor: rows at the end of a large matrix move as those at its beginning."""
    free = torch.cuda.mem_get_info()[0]
    rows, columns = 2**20 + 5, 2**11
    if free < 8 * rows * columns:
        pytest.skip(f"needs {8 * rows * columns >> 30} GiB, {free >> 30} are free")
    p = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.ones_like(p)
    p.grad[-5:] = -1.0
    dt.optim.Adafactor([p], lr=0.125).step()
    assert p.detach()[:5].float().unique().tolist() == [0.875]
    assert p.detach()[-5:].float().unique().tolist() == [1.125]


def test_two_runs_give_the_same_bits():
    ends = []
    for _ in range(2):
        params = [x.requires_grad_() for x in tensors(torch.float32, "cuda")]
        optimizer = dt.optim.LAMB(params, lr=0.01, max_norm=0.1)
        for k in range(3):
            for p, g in zip(params, tensors(torch.float32, "cuda", k + 1), strict=True):
                p.grad = g
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_parameters_on_two_kinds_of_device():
    """One norm over both; each part is stepped where it is."""
    gen = torch.Generator().manual_seed(0)
    start = [torch.randn(500, generator=gen) for _ in range(2)]
    grads = [torch.randn(500, generator=gen) for _ in range(2)]
    split = [start[0].clone().requires_grad_(), start[1].cuda().requires_grad_()]
    whole = [x.clone().requires_grad_() for x in start]
    ours, plain = dt.optim.AdamW(split, lr=0.1, max_norm=1.0), torch.optim.AdamW(whole, lr=0.1)
    for _ in range(2):
        for p, q, g in zip(split, whole, grads, strict=True):
            p.grad, q.grad = g.to(p.device), g.clone()
        torch.nn.utils.clip_grad_norm_(whole, 1.0)
        ours.step()
        plain.step()
    off = [error(p, q) for p, q in zip(split, whole, strict=True)]
    assert max(off) <= FEW_STEPS * EPS[torch.float32], off


def test_state_dicts_are_torchs_fused_ones():
    for back in (False, True):
        params = [x.requires_grad_() for x in tensors(torch.float32, "cuda")]
        whole = [x.detach().clone().requires_grad_() for x in params]
        pair = [torch.optim.AdamW(params, lr=0.01, fused=True), dt.optim.AdamW(params, lr=0.01)]
        first, second = pair[::-1] if back else pair
        straight = torch.optim.AdamW(whole, lr=0.01, fused=True)
        for k in range(6):
            if k == 3:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            for p, q, g in zip(params, whole, tensors(torch.float32, "cuda", k + 1), strict=True):
                p.grad, q.grad = g, g.clone()
            (first if k < 3 else second).step()
            straight.step()
        off = [error(p, q) for p, q in zip(params, whole, strict=True)]
        assert max(off) <= STEPS * EPS[torch.float32], (back, off)


def test_state_goes_between_devices():
    """A state dict with counts on the GPU, loaded for parameters on the CPU, and back."""
    gen = torch.Generator().manual_seed(0)
    start, grads = torch.randn(700, generator=gen), torch.randn(6, 700, generator=gen)
    whole = start.clone().requires_grad_()
    straight = torch.optim.AdamW([whole], lr=0.01)
    p, saved = start.clone().cuda(), None
    for k, device in enumerate(("cuda", "cuda", "cpu", "cpu", "cuda", "cuda")):
        p = p.detach().to(device).requires_grad_()
        optimizer = dt.optim.AdamW([p], lr=0.01, capturable=device == "cuda")
        if saved is not None:
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["capturable"] = device == "cuda"
        p.grad, whole.grad = grads[k].to(device), grads[k].clone()
        optimizer.step()
        straight.step()
        saved = copy.deepcopy(optimizer.state_dict())
    assert error(p, whole) <= FEW_STEPS * EPS[torch.float32]
    assert float(optimizer.state[p]["step"]) == 6.0
