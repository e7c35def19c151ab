"""Rotary positions on queries and keys: one launch against the eager composition and
torch.compile, forward and backward, one token of decoding, and within the kernel of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region

NOTE = (
    "Rotate-half RoPE on q [B, S, H, 128] and k [B, S, Hk, 128], bf16 on a GPU, float32 on a CPU. "
    "GPU microseconds by CUDA Graph replay, medians of interleaved samples; `copy_us` moves as "
    "many bytes as q and k are read and written, and `of_a_copy` is its time over ours. The "
    "gradient of rope is rope by the negative angle, a row of its own. `launches` counts the "
    "kernels of one run by the profiler. Errors are relative (2-norm) to float64. `token_wall_us` "
    "is wall time of one decoding step's rope (batch 1, one token), launch included. Rows with "
    "causal attention: `apart_us` is rope and then torch's SDPA; with `q` queries are turned as "
    "our kernel loads them, keys by a launch before, with `qk` both as they are loaded, each "
    "beside its estimate."
)
ATTENTION = (  # batch, length, heads of q and of k, features
    (1, 128, 32, 8, 64),
    (1, 512, 32, 8, 64),
    (1, 2048, 32, 8, 64),
    (32, 197, 12, 12, 64),
    (8, 1024, 32, 8, 128),
    (4, 4096, 32, 8, 128),
)
SHAPES = {  # batch, length, heads of q and of k
    "cuda": ((4, 4096, 32, 8), (1, 512, 32, 8)),
    "cpu": ((1, 1024, 32, 8), (1, 64, 32, 8)),
}
HEAD = 128
Tensors = dict[str, torch.Tensor]


def tables(length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin with each angle twice, as published models keep them, in float32."""
    pace = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * pace
    both = torch.cat([angles, angles], -1).to(device)
    return both.cos().float(), both.sin().float()


def eager(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x · cos + rotate_half(x) · sin, in the type of x."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        c, s = (t[:, None].to(x.dtype) for t in (cos, sin))
        first, second = x.chunk(2, -1)
        return x * c + torch.cat([-second, first], -1) * s

    return turn(q), turn(k)


def plan_of(q: torch.Tensor, k: torch.Tensor, inverse: bool, find: bool = True) -> dt.Plan:
    g = dt.Graph("rope")
    handles = [g.tensor(n, x.shape, x.dtype) for n, x in (("q", q), ("k", k))]
    for name, out in zip(("y_q", "y_k"), g.rope(*handles, inverse=inverse), strict=True):
        out.output(name)
    return g.compile(find=find, device=q.device.type, budget_s=10)


def launches(fn: Callable[[], Any]) -> int:
    """Kernels that one call runs on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in seen.events())


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("rope", device, NOTE)
    for shape in SHAPES[device]:
        for inverse in (False, True):
            _measure(record, device, shape, inverse, compile_peer)
    if device == "cuda":
        _one_token(record)
        for shape in ATTENTION:
            _with_attention(record, shape)
    return record


def _measure(
    record: Record, device: str, shape: tuple[int, ...], inverse: bool, compile_peer: bool
) -> None:
    batch, length, heads, others = shape
    torch.manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    q, k = (torch.randn(batch, length, h, HEAD, device=device).to(kind) for h in (heads, others))
    cos, sin = tables(length, device)
    if inverse:
        sin = -sin
    plan = plan_of(q, k, inverse)
    ours = plan.run(q=q, k=k)
    few = slice(0, 64)
    exact = eager(*(x[:, few].double() for x in (q, k)), cos[few].double(), sin[few].double())
    theirs = eager(q, k, cos, sin)
    contenders: dict[str, Callable[[], Any]] = {"eager": lambda: eager(q, k, cos, sin)}
    if compile_peer:
        torch._dynamo.reset()
        fast = torch.compile(eager, dynamic=False)
        contenders["compile"] = lambda: fast(q, k, cos, sin)
    row: dict[str, Any] = {
        "case": f"{batch}x{length}x({heads}+{others})x{HEAD}",
        "direction": "backward" if inverse else "forward",
    }
    if device == "cuda":
        given = [{"q": q, "k": k}[n] for n in plan.graph.inputs]
        contenders["ours"] = lambda: plan.program.run(given)
        source = torch.empty(q.numel() + k.numel(), dtype=kind, device=device)
        target = torch.empty_like(source)
        contenders["copy"] = lambda: target.copy_(source)
        times = replay_times({name: captured(fn) for name, fn in contenders.items()})
        moved = 2 * source.nbytes
        row |= {"of_a_copy": times["copy"] / times["ours"], "tb_per_s": moved / times["ours"] / 1e9}
    else:
        contenders["ours"] = lambda: plan.run(q=q, k=k)
        times = cpu_times(contenders, seconds=3.0)
    row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
    if device == "cuda":
        row["launches"] = launches(contenders["ours"])
    for name, want, peer in zip(("y_q", "y_k"), exact, theirs, strict=True):
        row[f"error_{name}"] = relative_error(ours[name][:, few], want)
        row[f"torch_error_{name}"] = relative_error(peer[:, few], want)
    row["plan"] = " + ".join(str(c.candidate) for c in plan.decision.choices)
    record.add(**row)


def _one_token(record: Record) -> None:
    """A step of decoding: the position is data, so that one plan serves every step."""
    q, k = (torch.randn(1, 1, h, HEAD, device="cuda").bfloat16() for h in (32, 8))
    where = torch.tensor([[4095]], device="cuda")
    g = dt.Graph("token")
    names = {"q": q, "k": k, "positions": where}
    handles = {n: g.tensor(n, x.shape, x.dtype) for n, x in names.items()}
    for name, out in zip(("y_q", "y_k"), g.rope(**handles), strict=True):
        out.output(name)
    plan = g.compile(device="cuda", find=True, budget_s=5)
    cos, sin = tables(4096, "cuda")
    at = where[0]
    wall = wall_times(
        {"eager": lambda: eager(q, k, cos[at], sin[at]), "ours": lambda: plan.run(**names)},
        calls=50,
    )
    exact = eager(q.double(), k.double(), cos[at].double(), sin[at].double())
    record.add(
        case="one token 1x1x(32+8)x128",
        direction="forward",
        eager_token_wall_us=wall["eager"] * 1e3,
        token_wall_us=wall["ours"] * 1e3,
        launches=launches(lambda: plan.program.run([names[n] for n in plan.graph.inputs])),
        error_y_q=relative_error(plan.run(**names)["y_q"], exact[0]),
        plan=" + ".join(str(c.candidate) for c in plan.decision.choices),
    )


def _with_attention(record: Record, shape: tuple[int, ...]) -> None:
    """Every way to run rope(q), rope(k) → causal attention that our kernels offer."""
    batch, length, heads, others, features = shape
    sizes = {
        n: (batch, length, h, features) for n, h in zip("qkv", (heads, others, others), strict=True)
    }
    made = {n: torch.randn(size, device="cuda").bfloat16() for n, size in sizes.items()}
    given = {n: x.transpose(1, 2) for n, x in made.items()}  # as a projection leaves them
    g = dt.Graph("rope in attention")
    q, k, v = (g.tensor(n, x.shape, x.dtype, strides=x.stride()) for n, x in given.items())
    g.attention(*g.rope(q, k, axis=2), v, causal=True).output("y")
    region, policy = Region(g.ir(), frozenset(), 1), dt.Policy()
    engine, gpu, device = TritonKernels(), dt.target("cuda"), torch.device("cuda")
    ins, t = [given[n] for n in region.inputs], region.graph.types[region.outputs[0]]

    def apart() -> torch.Tensor:
        q, k = dt.functional.rope(given["q"], given["k"], seq_dim=2)
        return F.scaled_dot_product_attention(q, k, given["v"], is_causal=True, enable_gqa=True)

    ways: dict[str, Callable[[], Any]] = {"apart": apart}
    row: dict[str, Any] = {}
    for candidate in engine.candidates(region, gpu, policy):
        kernel = engine.build(region, candidate, BuildContext(gpu, device, policy, {}))
        out = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device="cuda")
        way = str(candidate.knobs["rope"])
        ways[way] = partial(kernel.fill, ins, [out])
        row[f"{way}_predicted_us"] = engine.estimate(region, gpu, candidate) * 1e6
        row[f"{way}_plan"] = str(candidate)
        ways[way]()
        row[f"{way}_beside_apart"] = relative_error(out, apart())
    times = replay_times({name: captured(fn) for name, fn in ways.items()})
    row |= {f"{name}_us": ms * 1e3 for name, ms in times.items()}
    case = f"{batch}x{length}x({heads}+{others})x{features}, causal attention"
    record.add(case=case, direction="forward", **row)
