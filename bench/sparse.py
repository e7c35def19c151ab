"""Sparse matrices times dense ones: a plan and the eager function against torch.sparse and a dense
product, for rows of one length, rows of very different lengths, and blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times

NOTE = (
    "A [n, n] · x [n, 256] with n = 16384 on a GPU and 4096 on a CPU. `csr` has 1 % of all "
    "entries, at random places; `skewed` about as many, but row i has a share of 1 / (i + 1): the "
    "first rows are full. `bsr32` and `bsr64` have a tenth of all blocks. `torch` is `a @ x` of "
    "the sparse tensor (on a CPU `torch.sparse.mm(a, x, 'sum')`, which is quicker and has every "
    "element type), `dense` the product of the matrix with its zeros. `ours` is a plan in which "
    "the matrix is constant, `eager` is `dt.functional.spmm`. GPU microseconds by CUDA Graph "
    "replay where a call can be captured, `wall_…` with launches; medians of interleaved samples. "
    "`speedup` is torch over ours. `step_…` is wall time of the product and its gradients for the "
    "values and x. Errors are relative (2-norm) to float64."
)
SIZE, COLUMNS = {"cuda": 16384, "cpu": 4096}, 256
CASES = ("csr", "skewed", "bsr32", "bsr64")
Thunk = Callable[[], Any]


def matrix(case: str, n: int, kind: torch.dtype, device: str) -> torch.Tensor:
    """The dense form, zeros where the sparse one has no entry."""
    gen = torch.Generator(device).manual_seed(0)
    d = torch.randn(n, n, generator=gen, device=device, dtype=torch.float32)
    side = int(case.removeprefix("bsr")) if case.startswith("bsr") else 1
    rows = n // side
    share = torch.full((rows, 1), 0.1 if side > 1 else 0.01, device=device)
    if case == "skewed":
        share = 1.0 / torch.arange(1, rows + 1, device=device)[:, None]
        share = (share * (0.01 * rows / share.sum())).clamp(max=1.0)
    here = torch.rand(rows, rows, generator=gen, device=device) < share
    d *= here.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return d.to(kind)


def sparse(case: str, d: torch.Tensor) -> torch.Tensor:
    side = int(case.removeprefix("bsr")) if case.startswith("bsr") else 0
    return d.to_sparse_bsr((side, side)) if side else d.to_sparse_csr()


def plan_of(a: torch.Tensor, x: torch.Tensor) -> dt.Plan:
    g = dt.Graph("spmm")
    parts = (a.crow_indices(), a.col_indices(), a.values())
    held = [
        g.constant(t.detach(), n)
        for n, t in zip(("starts", "columns", "values"), parts, strict=True)
    ]
    g.spmm_csr(*held, g.tensor("x", x.shape, x.dtype)).output("y")
    return g.compile(find=True, device=x.device.type, budget_s=20)


def run(device: str, compile_peer: bool = True) -> Record:
    warnings.filterwarnings("ignore", "Sparse")
    record = Record("sparse", device, NOTE)
    for case in CASES:
        for kind in (torch.float32, torch.bfloat16):
            if record.wants(case):
                _measure(record, device, case, kind)
    return record


def _theirs(a: torch.Tensor, x: torch.Tensor) -> Thunk:
    by_rows = x.is_cpu and a.layout is torch.sparse_csr
    return (lambda: torch.sparse.mm(a, x, "sum")) if by_rows else (lambda: a @ x)


def _runs(fn: Thunk) -> bool:
    try:
        fn()
    except (RuntimeError, NotImplementedError):  # torch has no such product on this machine
        return False
    return True


def _captured(fn: Thunk) -> Thunk:
    try:
        return captured(fn)
    except RuntimeError:
        torch.cuda.synchronize()
        return fn


def _step(product: Callable[..., torch.Tensor], a: torch.Tensor, x: torch.Tensor) -> Thunk:
    leaf, dense = a.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    grad = torch.ones(a.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    return lambda: torch.autograd.grad(product(leaf, dense), (leaf, dense), grad)


def _measure(record: Record, device: str, case: str, kind: torch.dtype) -> None:
    n = SIZE[device]
    d = matrix(case, n, kind, device)
    a, x = sparse(case, d), torch.randn(n, COLUMNS, device=device).to(kind)
    plan = plan_of(a, x)
    contenders: dict[str, Thunk] = {
        "ours": lambda: plan.program.run([x]),
        "eager": lambda: dt.functional.spmm(a, x),
        "torch": _theirs(a, x),
    }
    if device == "cuda" or kind == torch.float32:  # 16-bit products of a CPU may take minutes
        contenders["dense"] = lambda: d @ x
    contenders = {name: fn for name, fn in contenders.items() if _runs(fn)}
    row: dict[str, Any] = {"case": case, "dtype": str(kind).removeprefix("torch.")}
    row |= {"n": n, "entries": a.values().numel()}
    if device == "cuda":
        times = replay_times({name: _captured(fn) for name, fn in contenders.items()})
        row |= {f"wall_{name}_us": ms * 1e3 for name, ms in wall_times(contenders).items()}
    else:
        times = cpu_times(contenders, seconds=3.0)
    row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
    if "torch" in times:
        row["speedup"] = times["torch"] / times["ours"]
    steps = {"ours": _step(dt.functional.spmm, a, x), "torch": _step(torch.sparse.mm, a, x)}
    steps = {name: fn for name, fn in steps.items() if _runs(fn)}
    timed = wall_times(steps) if device == "cuda" else cpu_times(steps, seconds=3.0)
    row |= {f"step_{name}_us": ms * 1e3 for name, ms in timed.items()}
    few = slice(0, 256)
    exact = d[few].double() @ x.double()
    row["error"] = relative_error(plan.run(x=x)["y"][few], exact)
    if "torch" in contenders:
        row["torch_error"] = relative_error(contenders["torch"]()[few], exact)
    row["plan"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    record.add(**row)
