"""Products of 8-bit floats against PyTorch's scaled product: by scales of rows and columns with
results of 16 and of 8 bits, by scales of blocks, and how numbers become 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deuteron as dt
from bench.harness import Record, captured, copying, relative_error, replay_times

NOTE = (
    "GPU microseconds by CUDA Graph replay, medians of interleaved samples. `ours_us` is a plan "
    "(find=True) in which our kernels and PyTorch's call compete, named in `plan`; `torch_us` is "
    "torch._scaled_mm by itself, without fast accumulation, `fast_us` with it; it gives bfloat16, "
    "also where ours rounds to 8 bits. Of rounding, `torch_us` is a copy of as many bytes. Errors "
    "are relative (2-norm) to float32 products of the first 128 rows."
)
F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = ((8192, 8192, 8192), (4096, 4096, 14336), (128, 4096, 4096))  # rows, steps, columns


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("fp8", device, NOTE)
    if device != "cuda":
        return record
    for rows, steps, columns in SIZES:
        for kind, measure in (("rows", _rows), ("rows to 8 bits", _rows8), ("blocks", _blocks)):
            case = f"{rows} × {steps} → {columns}, {kind}"
            if record.wants(case):
                record.add(case=case, **measure(rows, steps, columns))
        case = f"{rows} × {steps}, rounded by 1 × 128"
        if record.wants(case):
            record.add(case=case, **_rounded(rows, steps))
    return record


def _factors(rows: int, steps: int, columns: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(n, steps, device="cuda").to(F8) for n in (rows, columns))
    return {"x": x, "w": w}


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def _against(
    write: Callable[..., Any], named: dict[str, torch.Tensor], exact: torch.Tensor, theirs: Any
) -> dict[str, Any]:
    """A plan of what ``write`` makes of tensors, beside PyTorch's calls."""
    g = dt.Graph("fp8")
    write(g, **{n: g.tensor(n, t.shape, t.dtype) for n, t in named.items()}).output("y")
    plan = g.compile(find=True, device="cuda", budget_s=5)
    given = [named[n] for n in plan.graph.inputs]
    contenders = {"ours": lambda: plan.program.run(given), **theirs}
    times = replay_times({name: captured(fn) for name, fn in contenders.items()})
    row = {f"{name}_us": 1e3 * ms for name, ms in times.items()}
    row |= {"faster": times["torch"] / times["ours"]}
    row["error"] = relative_error(plan.run(**named)["y"][:128].float(), exact)
    rounding = relative_error(exact.to(plan.run(**named)["y"].dtype).float(), exact)
    if not row["error"] <= 2 * rounding + 2.0**-10:
        raise AssertionError(f"wrong: off by {row['error']:.3g}, rounding alone {rounding:.3g}")
    row["plan"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    return row


def _by_rows(rows: int, steps: int, columns: int, write: Callable[..., Any], by: float) -> Any:
    given = _factors(rows, steps, columns) | {"r": _scales(rows, 1), "c": _scales(columns)}
    x, w, r, c = given.values()
    exact = (x[:128].float() @ w.float().T) * r[:128] * c * by

    def theirs(fast: bool) -> Any:
        how = {"out_dtype": BF16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(x, w.t(), r, c[None], **how)

    return _against(write, given, exact, {"torch": theirs(False), "fast": theirs(True)})


def _rows(rows: int, steps: int, columns: int) -> dict[str, Any]:
    def write(g: Any, x: Any, w: Any, r: Any, c: Any) -> Any:
        return g.cast(g.linear(x, w) * r * c, dtype="bf16")

    found: dict[str, Any] = _by_rows(rows, steps, columns, write, 1.0)
    return found


def _rows8(rows: int, steps: int, columns: int) -> dict[str, Any]:
    def write(g: Any, x: Any, w: Any, r: Any, c: Any) -> Any:
        y = g.linear(x, w) * r * c * 0.02
        return g.cast(g.clamp(y, min=-448.0, max=448.0), dtype="f8e4m3")

    found: dict[str, Any] = _by_rows(rows, steps, columns, write, 0.02)
    return found


def _blocks(rows: int, steps: int, columns: int) -> dict[str, Any]:
    across = steps // 128
    given = _factors(rows, steps, columns)
    given |= {"r": _scales(rows, across), "c": _scales(columns // 128, across)}
    x, w, r, c = given.values()
    left = dt.functional.dequantize_fp8(x[:128], r[:128])
    exact = left @ dt.functional.dequantize_fp8(w, c, block=(128, 128)).T
    beside = r.t().contiguous().t()  # as PyTorch's call wants them
    theirs = {"torch": lambda: torch._scaled_mm(x, w.t(), beside, c.t(), out_dtype=BF16)}
    return _against(lambda g, x, w, r, c: g.linear_fp8(x, w, r, c), given, exact, theirs)


def _rounded(rows: int, steps: int) -> dict[str, Any]:
    x = torch.randn(rows, steps, device="cuda").to(BF16)
    moved = x.numel() * 3 + rows * steps // 32
    graphs = {"ours": captured(lambda: dt.functional.quantize_fp8(x)), "torch": copying(moved)}
    times = replay_times(graphs)
    return {f"{name}_us": 1e3 * ms for name, ms in times.items()} | {
        "faster": times["torch"] / times["ours"]
    }
