"""Layers of experts: ours against the loop over experts that models write, against torch's grouped
products, and against both under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times

NOTE = (
    "y = Σ share · down(silu(gate(x)) · up(x)) over the best experts of each token: tokens, how "
    "many experts each goes to, of how many, features → features inside. `loop` is what models "
    "write: a product for each expert, and index_add_; `grouped` the same by torch's grouped "
    "products of sorted rows; `compile` is torch.compile of that. `ours` is dt.functional.experts. "
    "Milliseconds with the host, medians of interleaved samples; `gpu` ones by CUDA Graph replay. "
    "`faster` is the best of the others over ours. bfloat16 on a GPU, float32 on a CPU. Errors are "
    "relative (2-norm) to the loop in float64, of the first tokens; for gradients, of x."
)
CASES = {  # tokens, experts, of a token, features, inside
    "cuda": (
        (4096, 8, 2, 4096, 14336),
        (16, 8, 2, 4096, 14336),
        (4096, 64, 8, 2048, 768),
        (4096, 128, 8, 2048, 768),
        (16, 128, 8, 2048, 768),
    ),
    "cpu": ((256, 8, 2, 512, 1024), (4, 8, 2, 512, 1024), (256, 32, 4, 256, 128)),
}
Tensors = tuple[torch.Tensor, ...]
CHECKED = 256  # tokens that are compared with float64


def loop(x: Any, numbers: Any, shares: Any, w_in: Any, w_out: Any) -> torch.Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(numbers, w_in.shape[0]).permute(2, 1, 0)
    for e in (mask.sum((-1, -2)) > 0).nonzero().flatten().tolist():
        slot, token = torch.where(mask[e])
        gate, up = F.linear(x[token], w_in[e]).chunk(2, -1)
        made = F.linear(F.silu(gate) * up, w_out[e]) * shares[token, slot, None]
        y.index_add_(0, token, made.to(y.dtype))
    return y


def grouped(x: Any, numbers: Any, shares: Any, w_in: Any, w_out: Any) -> torch.Tensor:
    count = numbers.shape[1]
    experts, order = torch.sort(numbers.reshape(-1), stable=True)
    every = torch.arange(w_in.shape[0], device=x.device)
    ends = torch.searchsorted(experts, every, right=True).int()
    gate, up = F.grouped_mm(x[order // count], w_in.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * up, w_out.mT, offs=ends)
    made = made * shares.reshape(-1)[order, None].to(made.dtype)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return made[back].view(len(x), count, -1).sum(1)


def ours(*tensors: torch.Tensor) -> torch.Tensor:
    return dt.functional.experts(*tensors)


def trained(call: Callable[..., torch.Tensor], given: Tensors, seed: torch.Tensor) -> Any:
    x, numbers, shares, *weights = given
    leaves = [t.detach().requires_grad_() for t in (x, shares, *weights)]
    y = call(leaves[0], numbers, *leaves[1:])
    return torch.autograd.grad(y, leaves, seed)


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("moe", device, NOTE)
    for sizes in CASES[device]:
        tokens, experts, count, features, inside = sizes
        case = f"{tokens} tokens, {count} of {experts} experts, {features} → {inside}"
        if record.wants(case):
            record.add(case=case, **_measured(device, sizes, compile_peer))
    return record


def _measured(device: str, sizes: tuple[int, ...], compile_peer: bool) -> dict[str, Any]:
    tokens, experts, count, features, inside = sizes
    torch.manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, features, device=device).to(kind)
    w_in = torch.randn(experts, 2 * inside, features, device=device, dtype=kind) / features**0.5
    w_out = torch.randn(experts, features, inside, device=device, dtype=kind) / inside**0.5
    shares, numbers = dt.functional.route(torch.randn(tokens, experts, device=device), count)
    given = (x, numbers, shares, w_in, w_out)
    seed = torch.randn_like(x)
    calls: dict[str, Callable[..., torch.Tensor]] = {"loop": loop, "ours": ours}
    if hasattr(F, "grouped_mm"):
        calls["grouped"] = grouped
        if compile_peer:
            torch._dynamo.reset()
            calls["compile"] = torch.compile(grouped)
    row = _errors(given, seed, calls)
    with torch.no_grad():
        forward = {name: (lambda f=f: f(*given)) for name, f in calls.items()}
        row |= _times("", forward, device)
        if device == "cuda":
            graphs = {name: captured(fn) for name, fn in forward.items() if name != "loop"}
            row |= {f"{name}_gpu_ms": ms for name, ms in replay_times(graphs).items()}
            del graphs
    both = {name: (lambda f=f: trained(f, given, seed)) for name, f in calls.items()}
    return row | _times("trained_", both, device)


def _times(what: str, contenders: dict[str, Any], device: str) -> dict[str, float]:
    if device == "cuda":
        found = wall_times(contenders, rounds=7, calls=3)
    else:
        found = cpu_times(contenders, seconds=3.0)
    best = min(ms for name, ms in found.items() if name != "ours")
    row = {f"{what}{name}_ms": ms for name, ms in found.items()}
    return row | {f"{what}faster": best / found["ours"]}


def _errors(given: Tensors, seed: torch.Tensor, calls: dict[str, Any]) -> dict[str, Any]:
    """Of all contenders; ours is wrong if it is off by more than twice the loop's."""
    few = (*(t[:CHECKED] for t in given[:3]), *given[3:])
    wide = tuple(t.double() if t.is_floating_point() else t for t in few)
    exact = loop(*wide), trained(loop, wide, seed[:CHECKED].double())[0]
    found = {}
    for name, call in calls.items():
        if name == "compile":
            continue  # the same as what it compiles, and other sizes would be compiled again
        made = call(*few), trained(call, few, seed[:CHECKED])[0]
        found[name] = [relative_error(a, b) for a, b in zip(made, exact, strict=True)]
    for mine, theirs in zip(found["ours"], found["loop"], strict=True):
        if not mine <= 2 * theirs + 1e-6:
            raise AssertionError(f"wrong: off by {mine:.3g}, the loop by {theirs:.3g}")
    keys = ("error", "grad_error")
    return {
        f"{n}_{k}": e for n, several in found.items() for k, e in zip(keys, several, strict=True)
    }
