"""Products and attention, alone and with what stands around them: plans against library calls and
torch.compile, and functions that libraries do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import deuteron as dt
from bench.harness import Record, relative_error, wall_times

NOTE = (
    "Wall microseconds of one call with the queue kept full, medians of interleaved samples, "
    "random data, bfloat16 unless the row says otherwise. `ours` is `dt.optimize` of the module, "
    "or the function of ours that the row names; `library` is the fastest single call of a "
    "library that computes the same: cuBLAS, cuBLASLt's fused one, or the best backend of SDPA. "
    "`over_best` is the best of the others over ours. Errors are relative (2-norm) to float64. "
    "`kernels` says what the plan chose."
)
PLAIN = """8192x4096x14336 4096x4096x4096 16384x768x2304 16384x3072x768 6304x768x3072 2048x2048x8192
    2048x8192x2048 512x768x3072 64x4096x4096 16x4096x14336 1x4096x4096 100352x96x384
    16x4096x4096 64x14336x4096 1568x4608x512"""
GRADIENTS = "16384x768x768 16384x3072x768"  # of weights: rows that are summed, columns, lines
ATTENTION = """32x12x12x197x64 32x12x12x512x64 8x12x12x1024x64:causal 1x32x8x2048x64:causal
    4x16x16x4096x128 4x16x16x4096x128:causal 16x12x12x128x64"""


class Case(NamedTuple):
    """A module and its inputs, other ways to compute the same, and whether torch.compile is one."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    others: dict[str, Callable[[], Any]]
    compiled: bool = False


class Called(nn.Module):
    """A function as a module, with its parameters."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function, self.names = function, [f"w{i}" for i in range(len(weights))]
        for name, w in zip(self.names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(w, requires_grad=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *[getattr(self, name) for name in self.names])


def _made(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def _plain() -> Iterator[Case]:
    for text in PLAIN.split():
        m, k, n = map(int, text.split("x"))
        x, w = _made(m, k), _made(n, k, scale=k**-0.5)
        yield Case(
            f"linear {m}×{k}→{n}", Called(F.linear, w), (x,), {"library": _of(F.linear, x, w)}
        )


def _batched() -> Iterator[Case]:
    """Many small products, those of Swin's windows first, and a few large ones with more behind."""
    q, k, v = (_made(2048, 49, 3, 32).transpose(1, 2) for _ in range(3))
    a, b = _made(2048, 3, 49, 49), _made(3, 49, 49)
    biased = Called(lambda q, k, b: torch.matmul(q, k.mT) * 0.18 + b)
    yield Case("windows 6144×49×32×49 + bias", biased, (q, k, b), {}, True)
    plain = Called(torch.matmul)
    yield Case("windows 6144×49×32×49", plain, (q, k.mT), {"library": _of(torch.matmul, q, k.mT)})
    yield Case("windows 6144×49×49×32", plain, (a, v), {"library": _of(torch.matmul, a, v)})
    x, y = _made(16, 1024, 1024), _made(16, 1024, 1024, scale=1 / 32)
    gelu = Called(lambda x, y: F.gelu(torch.matmul(x, y)))
    yield Case("batched+gelu 16×1024×1024×1024", gelu, (x, y), {}, True)


def _weights() -> Iterator[Case]:
    """Gradients of weights: long sums, few tiles."""
    for text in GRADIENTS.split():
        rows, m, n = map(int, text.split("x"))
        dy, x = _made(rows, m), _made(rows, n, scale=rows**-0.5)
        turned = Called(lambda dy, x: torch.matmul(dy.T, x))
        library = {"library": _of(torch.matmul, dy.T, x)}
        yield Case(f"dweight {m}×{n} over {rows}", turned, (dy, x), library)


def _of(function: Callable[..., Any], *given: Any, **how: Any) -> Callable[[], Any]:
    return lambda: function(*given, **how)


def _attended() -> Iterator[Case]:
    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for text in ATTENTION.split():
        sizes, _, causal = text.partition(":")
        b, h, of, s, d = map(int, sizes.split("x"))
        q, k, v = (_made(b, heads, s, d) for heads in (h, of, of))
        how: Any = {"is_causal": bool(causal), "enable_gqa": h != of}

        def by(backend: Any, q: Any = q, k: Any = k, v: Any = v, how: Any = how) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **how)

        module = Called(lambda q, k, v, how=how: F.scaled_dot_product_attention(q, k, v, **how))
        others = {back.name.split("_")[0].lower(): _of(by, back) for back in backends}
        yield Case(f"attention {sizes} {causal}".strip(), module, (q, k, v), others)


def _fused() -> Iterator[Case]:
    x, w, b = _made(8192, 4096), _made(14336, 4096, scale=1 / 64), _made(14336)
    gelu = Called(lambda x, w, b: F.gelu(F.linear(x, w, b)), w, b)
    near = _of(torch._addmm_activation, b, x, w.T, use_gelu=True)  # by tanh: it has no other
    yield Case("linear+gelu 8192×4096→14336", gelu, (x,), {"library": near}, True)
    for k in (768, 3072):
        x, r, w, b = _made(16384, k), _made(16384, 768), _made(768, k, scale=k**-0.5), _made(768)

        def normed(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.layer_norm(F.linear(x, w, b) + r, (768,))

        yield Case(
            f"linear+residual+layer_norm 16384×{k}→768", Called(normed, w, b), (x, r), {}, True
        )
    for rows, deep, wide in ((8192, 4096, 14336), (2048, 2048, 8192)):
        x, w1, w2 = _made(rows, deep), *(_made(wide, deep, scale=deep**-0.5) for _ in range(2))
        w3 = _made(deep, wide, scale=wide**-0.5)

        def gated(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w2), w3)

        yield Case(f"swiglu {rows}×{deep}×{wide}", Called(gated, w1, w2, w3), (x,), {}, True)
    for n in (1, 8, 64):
        yield Case(f"attention block f16 {n}×512×768", Block().cuda().half(), (
            _made(n, 512, 768, dtype=torch.float16),
        ), {}, True)  # fmt: skip


class Block(nn.Module):
    """q, k and v, attention, projection, residual, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(768, 768) for _ in range(4))
        self.norm = nn.LayerNorm(768)

    def forward(self, x: Tensor) -> Tensor:
        parts = (f(x).unflatten(-1, (12, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)
        found: Tensor = self.norm(x + self.out(y))
        return found


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("products", device, NOTE)
    if device != "cuda":
        return record
    torch.manual_seed(0)
    for group in (_fused, _batched, _weights, _plain, _attended):
        for case in group():
            if record.wants(case.name):
                with torch.no_grad():
                    record.add(case=case.name, **_measured(case, compile_peer))
    for name, row in _functions():
        if record.wants(name):
            record.add(case=name, **row())
    return record


def _measured(case: Case, compile_peer: bool) -> dict[str, Any]:
    module, inputs = case.module.eval(), case.inputs
    fast = dt.optimize(module, inputs)
    ways: dict[str, Callable[[], Any]] = {"ours": lambda: fast(*inputs)}
    ways |= {"eager": lambda: module(*inputs), **case.others}
    if case.compiled and compile_peer:
        torch._dynamo.reset()
        for mode in ("default", "reduce-overhead"):
            made = torch.compile(module, mode=mode)
            ways[mode] = lambda made=made: made(*inputs)
    for call in ways.values():
        for _ in range(3):
            call()
    wall = {name: 1e3 * t for name, t in wall_times(ways, 9, 20).items()}
    exact = module.double()(*(t.double() for t in inputs)) if inputs[0].numel() < 1 << 23 else None
    errors = {}
    if exact is not None:
        module.to(inputs[0].dtype)
        for name in ("ours", "eager"):
            errors[f"{name}_error"] = relative_error(ways[name](), exact)
    best = min(t for name, t in wall.items() if name != "ours")
    kernels = {str(c.candidate).split("[")[0] for c in fast.plan.decision.choices}
    return {
        **wall,
        "over_best": best / wall["ours"],
        **errors,
        "kernels": " ".join(sorted(kernels)),
    }


class FeedForward(nn.Module):
    """linear, gelu, linear; or a gated one."""

    def __init__(self, deep: int, wide: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(deep, wide, not gated), nn.Linear(wide, deep, not gated)
        self.gate = nn.Linear(deep, wide, False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _step(rows: int, deep: int, wide: int, gated: bool) -> dict[str, Any]:
    """Forward and backward of a feed-forward block under torch.compile, by both backends."""
    module = FeedForward(deep, wide, gated).cuda().bfloat16()
    x, grad = _made(rows, deep).requires_grad_(), _made(rows, deep)
    ways, peak = dict[str, Callable[[], Any]](), dict[str, float]()
    for name, how in (("ours", {"backend": "deuteron"}), ("default", {})):
        torch._dynamo.reset()
        made: Any = torch.compile(module, **how)

        def step(made: Any = made) -> Any:
            return torch.autograd.grad(made(x), (x, *module.parameters()), grad)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peak[f"{name}_peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        ways[name] = step
    wall = {name: 1e3 * t for name, t in wall_times(ways, 9, 10).items()}
    return {**wall, "over_best": wall["default"] / wall["ours"], **peak}


def _functions() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for rows, deep, wide, gated in ((16384, 768, 3072, False), (8192, 4096, 14336, True)):
        name = f"{'swiglu' if gated else 'gelu'} {rows}×{deep}×{wide}, forward and backward"
        yield name, partial(_step, rows, deep, wide, gated)
    yield "window 1024 of 32768, 16 heads of 64, forward and backward", _window
    yield "paged decode 64×32/8×4096×128", _paged


def _window() -> dict[str, Any]:
    q, k, v = (_made(1, 16, 32768, 64).requires_grad_() for _ in range(3))
    grad = _made(1, 16, 32768, 64)

    def ours(**how: Any) -> Any:
        y = dt.functional.attention(q, k, v, causal=True, **how)
        return torch.autograd.grad(y, (q, k, v), grad)

    wall = wall_times({"ours": _of(ours, window=(1024, 0)), "dense": ours}, 5, 3)
    pairs = 32768 * 1024 / (32768 * 32768 / 2)
    return {
        "ours": 1e3 * wall["ours"],
        "dense": 1e3 * wall["dense"],
        "rate_over_dense": wall["dense"] * pairs / wall["ours"],
    }


def _paged() -> dict[str, Any]:
    pages, positions = 64 * 64, 64
    keys, values = (_made(pages, positions, 8, 128) for _ in range(2))
    table = torch.randperm(pages, device="cuda").reshape(64, 64).int()
    lengths = torch.full((64,), 4096, device="cuda", dtype=torch.int32)
    q = _made(64, 32, 1, 128)
    k, v = (_made(64, 8, 4096, 128) for _ in range(2))
    ways = {
        "ours": _of(dt.functional.paged_attention, q, keys, values, table, lengths),
        "copy": lambda: (keys.clone(), values.clone()),
        "library": _of(F.scaled_dot_product_attention, q, k, v, enable_gqa=True),
    }
    for call in ways.values():
        call()
    wall = {name: 1e3 * t for name, t in wall_times(ways, 9, 10).items()}
    return {**wall, "of_a_copys_bandwidth": wall["copy"] / 2 / wall["ours"]}
