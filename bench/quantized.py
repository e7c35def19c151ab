"""Linear layers by weights of 8 and 4 bits against the library's product by 16 bits: steps of
decoding, where reading the weight is all there is to do, and batches beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.target import target

NOTE = (
    "y = x · wᵀ, x [M, K], w [N, K] in groups of 128. On a GPU `torch_us` is F.linear of bfloat16 "
    "(cuBLAS), `ours_us` a plan of linear_quantized; on a CPU both are of float32. GPU "
    "microseconds by CUDA Graph replay, medians of interleaved samples; every call reads another "
    "weight, so many that the cache holds none of them, as the layers of a model do. `faster` is "
    "`torch_us` over `ours_us`, `tb_per_s` what ours reads of weight and scales. `wall` is the "
    "eager function, dt.functional.linear_quantized, with the host. Errors are relative (2-norm) "
    "to float64 by the same dequantised weight; `torch_error` is that of F.linear by it. "
    "`ways` are microseconds of all that our kernel offers, by columns of a tile, warps, stages "
    "and programs; `few`: by warps, turns at once, registers and programs."
)
GROUP = 128
FEW = (1, 2, 4, 8, 16)  # rows of decoding
CASES = {  # steps → columns, and rows of x
    "cuda": ((4096, 4096, FEW), (4096, 14336, (*FEW, 64, 1024))),
    "cpu": ((1024, 4096, (1, 4, 16, 64)),),
}
BARS = {4: 2.5, 8: 1.6}  # what decoding is to reach


def plan_of(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bits: int) -> dt.Plan:
    g = dt.Graph("linear_quantized")
    named = {"x": x, "w": packed, "s": scale}
    handles = [g.tensor(n, t.shape, t.dtype) for n, t in named.items()]
    g.linear_quantized(*handles, bits=bits, group=GROUP).output("y")
    return g.compile(find=True, device=x.device.type, budget_s=5)


def in_turn(call: Callable[[Any], Any], weights: list[Any]) -> Callable[[], None]:
    """A call by each of the weights."""

    def run() -> None:
        for each in weights:
            call(each)

    return run


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("quantized", device, NOTE)
    for steps, columns, several in CASES[device]:
        for bits in (4, 8):
            for rows in several:
                case = f"{rows} × {steps} → {columns}, {bits} bits"
                if record.wants(case):
                    record.add(case=case, **_measured(device, rows, steps, columns, bits))
    return record


def _measured(device: str, rows: int, steps: int, columns: int, bits: int) -> dict[str, Any]:
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    kind = torch.bfloat16 if on_gpu else torch.float32
    stored_bytes = steps * columns * bits // 8
    sets = max(2, -(-2 * int(target(device).cache_bytes) // stored_bytes)) if on_gpu else 1
    x = torch.randn(rows, steps, device=device).to(kind)
    whole = [torch.randn(columns, steps, device=device).to(kind) / 64 for _ in range(sets)]
    stored = [dt.functional.quantize_weight(w, bits, GROUP)[:2] for w in whole]
    plan = plan_of(x, *stored[0], bits)

    def ours(weight: tuple[torch.Tensor, torch.Tensor]) -> Any:
        named = {"x": x, "w": weight[0], "s": weight[1]}
        return plan.program.run([named[n] for n in plan.graph.inputs])

    def eager(weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return dt.functional.linear_quantized(x, *weight, bits=bits, group=GROUP)

    def torchs(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    back = dt.functional.dequantize_weight(*stored[0], bits=bits, group=GROUP)
    exact = x.double() @ back.double().T
    row: dict[str, Any] = {"sets": sets}
    contenders = {"torch": in_turn(torchs, whole), "ours": in_turn(ours, stored)}
    if on_gpu:
        times = replay_times({name: captured(fn) for name, fn in contenders.items()})
    else:
        times = cpu_times(contenders, seconds=3.0)
    times = {name: ms / sets for name, ms in times.items()}
    row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
    row["faster"] = times["torch"] / times["ours"]
    if on_gpu:
        row["bar"] = BARS[bits] if rows in FEW else ""
        moved = sum(t.nbytes for t in stored[0])
        row["tb_per_s"] = moved / times["ours"] / 1e9
        wall = wall_times(
            {"torch": in_turn(torchs, whole), "ours": in_turn(eager, stored)}, calls=4
        )
        row |= {f"{name}_wall_us": ms / sets * 1e3 for name, ms in wall.items()}
    named = {"x": x, "w": stored[0][0], "s": stored[0][1]}
    row["error"] = relative_error(plan.run(**named)["y"], exact)
    row["eager_error"] = relative_error(eager(stored[0]), exact)
    row["torch_error"] = relative_error(torchs(back), exact)
    worst, limit = max(row["error"], row["eager_error"]), 2 * row["torch_error"] + 1e-6
    if not worst <= limit:
        raise AssertionError(f"wrong: off by {worst:.3g}, allowed {limit:.3g}")
    if on_gpu and rows in FEW:
        row["ways"] = _ways(plan, {"x": x}, stored)
    row["plan"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    return row


def _ways(plan: dt.Plan, given: dict[str, torch.Tensor], stored: list[Any]) -> str:
    """What each candidate of our kernel takes, by weights that no cache holds."""
    engine, here, region = TritonKernels(), target("cuda"), plan.decision.choices[0].region
    ctx = BuildContext(here, torch.device("cuda"), dt.Policy(), {})
    out = region.graph.types[region.outputs[0]]
    y = torch.empty(out.shape, dtype=out.dtype.torch, device="cuda")
    graphs = {}
    for candidate in engine.candidates(region, here, dt.Policy()):
        kernel = engine.build(region, candidate, ctx)

        def call(weight: Any, kernel: Any = kernel) -> None:
            named = {**given, "w": weight[0], "s": weight[1]}
            kernel.fill([named[v] for v in region.inputs], [y])

        knobs = dict(candidate.knobs)
        name = "/".join(str(n) for what, n in knobs.items() if what not in ("recipe", "rows"))
        name += " few" * knobs["recipe"].endswith("few")
        graphs[name] = captured(in_turn(call, stored))
    times = replay_times(graphs)
    return ", ".join(f"{name} {ms / len(stored) * 1e3:.2f}" for name, ms in times.items())
