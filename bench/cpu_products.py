"""Single layers on the CPU: generated products against torch and ONNX Runtime, one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, cpu_times, onnx_runtime
from deuteron.engines import BuildContext, engine
from deuteron.passes import fuse
from deuteron.plan.tensors import poisoned, random_tensor

NOTE = (
    "Milliseconds, medians in turns with pauses of 20 ms and 50 ms of calls that are not counted. "
    "`ours` is the fastest candidate of cpu_kernels, named beside it; `eager` is torch in "
    "channels_last, `vendor` the better of packed oneDNN and addmm on transposed weights, `ort` "
    "ONNX Runtime where it is installed. `ratio` is the best of the others over ours. Of bytes "
    "`eager` is torch._int_mm, and `over_f32` our product of float32 of that size over ours. "
    "Recurrent layers are whole plans."
)

# name, channels in and out, size, kernel, stride, groups, activation
CONVS = (
    ("resnet 1x1 64→256 56²", 64, 256, 56, 1, 1, 1, "relu"),
    ("resnet 1x1 256→64 56²", 256, 64, 56, 1, 1, 1, "relu"),
    ("resnet 1x1 1024→256 14²", 1024, 256, 14, 1, 1, 1, "relu"),
    ("resnet 3x3 64 56²", 64, 64, 56, 3, 1, 1, "relu"),
    ("resnet 3x3 128 28²", 128, 128, 28, 3, 1, 1, "relu"),
    ("resnet 3x3 256 14²", 256, 256, 14, 3, 1, 1, "relu"),
    ("resnet 3x3 512 7²", 512, 512, 7, 3, 1, 1, "relu"),
    ("resnet 3x3/2 128 56²", 128, 128, 56, 3, 2, 1, "relu"),
    ("resnet 7x7/2 3→64 224²", 3, 64, 224, 7, 2, 1, "relu"),
    ("mobilenet dw 144 56²", 144, 144, 56, 3, 1, 144, "relu6"),
    ("mobilenet dw/2 96 112²", 96, 96, 112, 3, 2, 96, "relu6"),
    ("mobilenet dw 960 7²", 960, 960, 7, 3, 1, 960, "relu6"),
    ("mobilenet 1x1 24→144 56²", 24, 144, 56, 1, 1, 1, "relu6"),
    ("mobilenet 1x1 160→960 7²", 160, 960, 7, 1, 1, 1, "relu6"),
)
LINEARS = (
    ("bert qkv 128×768→2304", 128, 768, 2304, ""),
    ("bert fc1+gelu 128×768→3072", 128, 768, 3072, "gelu"),
    ("bert fc2 128×3072→768", 128, 3072, 768, ""),
)
BYTES = (("bytes 128×768→3072", 128, 768, 3072), ("bytes 1×4096→4096", 1, 4096, 4096))
# kind, features and units, rows, steps
RECURRENT = (
    ("lstm 256 1×100", torch.nn.LSTM, 256, 1, 100),
    ("lstm 256 8×64", torch.nn.LSTM, 256, 8, 64),
    ("gru 256 1×100", torch.nn.GRU, 256, 1, 100),
    ("gru 256 8×64", torch.nn.GRU, 256, 8, 64),
)
ATTENTIONS = (("attention 12×128×64", 12, 128, 64), ("attention 12×197×64", 12, 197, 64))


class _Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def _ours(graph: dt.Graph) -> dict[str, Callable[[], Any]]:
    """Every candidate of cpu_kernels for a graph of one region, and the vendor's calls."""
    cpu, policy, device = dt.target("cpu"), dt.Policy(), torch.device("cpu")
    built = graph.ir()
    (region,) = fuse(built)[0]
    gen = torch.Generator().manual_seed(0)
    tensors = {
        v: built.constants[v].data
        if v in built.constants
        else random_tensor(region.graph.types[v], device, gen)
        for v in region.inputs
    }
    constants = {v: tensors[v] for v in region.constants}
    ctx = BuildContext(cpu, device, policy, constants)
    args = [tensors[v] for v in region.inputs]
    found: dict[str, Callable[[], Any]] = {}
    for name in ("cpu_kernels", "vendor_fused"):
        if engine(name).refuse(region, cpu, policy) is not None:
            continue
        for candidate in engine(name).candidates(region, cpu, policy):
            kernel = engine(name).build(region, candidate, ctx)
            outs = [poisoned(region.graph.types[v], device) for v in region.outputs]
            found[str(candidate)] = (
                (lambda k=kernel, o=outs: k.fill(args, o))
                if kernel.writes
                else (lambda k=kernel: k.fn(*args))
            )
    return found


def _linear(weight: torch.Tensor, rows: int) -> dict[str, Callable[[], Any]]:
    g = dt.Graph("layer")
    x = g.tensor("x", (rows, weight.shape[1]), weight.dtype)
    g.linear(x, g.constant(weight)).output("y")
    return {way: run for way, run in _ours(g).items() if way.startswith("cpu_kernels")}


def _row(record: Record, name: str, flops: float, runs: dict[str, Callable[[], Any]]) -> None:
    times = cpu_times(runs, seconds=3.0)
    ours = {k: v for k, v in times.items() if k.startswith("cpu_kernels")}
    vendor = [v for k, v in times.items() if k.startswith("vendor_fused")]
    best = min(ours, key=lambda k: ours[k])
    others = [*vendor, *(times[k] for k in ("eager", "ort") if k in times)]
    wide = [v for k, v in times.items() if k.startswith("f32 ")]
    more = {"over_f32": min(wide) / ours[best]} if wide else {}
    record.add(
        case=name,
        ours=ours[best],
        gflops=flops / ours[best] / 1e6,
        eager=times["eager"],
        vendor=min(vendor, default=float("nan")),
        ort=times.get("ort", float("nan")),
        ratio=min(others) / ours[best],
        candidate=best.removeprefix("cpu_kernels"),
        **more,
    )


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("cpu_products", "cpu", NOTE)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    for name, cin, cout, size, k, stride, groups, act in CONVS:
        if not record.wants(name):
            continue
        conv = torch.nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups).eval()
        conv = conv.to(memory_format=torch.channels_last)
        x = torch.randn(1, cin, size, size).contiguous(memory_format=torch.channels_last)
        layer = torch.nn.Sequential(conv, torch.nn.ReLU() if act == "relu" else torch.nn.ReLU6())
        g = dt.Graph("layer")
        xs = g.tensor("x", tuple(x.shape), dt.float32, layout="nhwc")
        w, b = (g.constant(p.detach()) for p in (conv.weight, conv.bias))
        y = g.conv(xs, w, b, stride=stride, padding=k // 2, groups=groups)
        (g.relu(y) if act == "relu" else g.clamp(y, min=0.0, max=6.0)).output("y")
        runs = _ours(g) | {"eager": lambda layer=layer, x=x: layer(x)}
        peer = onnx_runtime(layer, x.contiguous())
        out = layer(x)
        flops = 2.0 * out.numel() * cin * k * k / groups
        _row(record, name, flops, runs | ({"ort": peer} if peer else {}))
    for name, m, k, n, act in LINEARS:
        if not record.wants(name):
            continue
        linear = torch.nn.Linear(k, n).eval()
        layer = torch.nn.Sequential(linear, torch.nn.GELU()) if act else linear
        x = torch.randn(m, k)
        g = dt.Graph("layer")
        w, b = (g.constant(p.detach()) for p in (linear.weight, linear.bias))
        y = g.linear(g.tensor("x", (m, k), dt.float32), w, b)
        (g.gelu(y) if act else y).output("y")
        runs = _ours(g) | {"eager": lambda layer=layer, x=x: layer(x)}
        peer = onnx_runtime(layer, x)
        _row(record, name, 2.0 * m * k * n, runs | ({"ort": peer} if peer else {}))
    for name, m, k, n in BYTES:
        if not record.wants(name):
            continue
        x8, w8 = (torch.randint(-128, 128, shape).to(torch.int8) for shape in ((m, k), (n, k)))
        runs = _linear(w8, m) | {"eager": partial(torch._int_mm, x8, w8.T)}
        wide = {f"f32 {way}": call for way, call in _linear(w8.float(), m).items()}
        _row(record, name, 2.0 * m * k * n, runs | wide)
    for name, heads, length, d in ATTENTIONS:
        if not record.wants(name):
            continue
        q, k_, v = (torch.randn(1, heads, length, d) for _ in range(3))
        g = dt.Graph("layer")
        parts = [g.tensor(n, (1, heads, length, d), dt.float32) for n in "qkv"]
        g.attention(*parts).output("y")
        runs = _ours(g) | {"eager": partial(F.scaled_dot_product_attention, q, k_, v)}
        peer = onnx_runtime(_Attention(), q, k_, v)
        flops = 4.0 * heads * length * length * d
        _row(record, name, flops, runs | ({"ort": peer} if peer else {}))
    for name, kind, size, rows, steps in RECURRENT:
        if not record.wants(name):
            continue
        layer, x = kind(size, size).eval(), torch.randn(steps, rows, size)
        fast = dt.optimize(layer, (x,))
        runs = {"cpu_kernels plan": partial(fast, x), "eager": partial(layer, x)}
        peer = onnx_runtime(layer, x)
        flops = 2.0 * steps * rows * sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        _row(record, name, flops, runs | ({"ort": peer} if peer else {}))
    return record
