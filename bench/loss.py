"""Cross-entropy, and linear + cross-entropy, forward and backward, against PyTorch's.

The gradient of the first rows is compared with float64 before anything is timed. Peak memory is
what a forward and backward pass holds at most beyond its inputs, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import Record, captured, cpu_times, relative_error, replay_times, wall_times
from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy

NOTE = (
    "Forward and backward, milliseconds. GPU: `gpu` by CUDA Graph replay, `wall` with the queue "
    "kept full; CPU: wall. `in place`: the gradient takes the memory of the logits. `error` is "
    "that of the gradient of some rows against float64 (2-norm), torch's own beside it. Peak "
    "memory in MB, beyond the inputs, gradients included. `fast` adds the gradient of the weight "
    "up over chunks of tokens, in its own type."
)
Step = Callable[[], Any]
ROWS = 16  # checked against float64

# name, shape, dtype, label smoothing
GPU_CASES = [
    ("llama 3 head", (8192, 128256), torch.bfloat16, 0.0),
    ("llama 3 head, smoothed", (8192, 128256), torch.bfloat16, 0.1),
    ("llama 2 head", (8192, 32000), torch.bfloat16, 0.0),
    ("gpt 2 head", (8192, 50257), torch.bfloat16, 0.0),
    ("imagenet", (4096, 1000), torch.float32, 0.1),
    ("segmentation", (8, 21, 512, 512), torch.float16, 0.0),
    ("smallest", (8, 10), torch.float32, 0.0),
]
CPU_CASES = [
    ("gpt 2 head", (256, 50257), torch.float32, 0.0),
    ("imagenet", (256, 1000), torch.float32, 0.1),
    ("segmentation", (1, 21, 256, 256), torch.float32, 0.0),
    ("smallest", (8, 10), torch.float32, 0.0),
]


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("loss", device, NOTE)
    for name, shape, dtype, smoothing in GPU_CASES if device == "cuda" else CPU_CASES:
        torch.manual_seed(0)
        try:
            _plain(record, device, name, shape, dtype, smoothing, compile_peer)
        except Exception as error:
            record.add(case=name, failed=f"{type(error).__name__}: {str(error)[:300]}")
        _free(device)
    sizes = (8192, 4096, 128256) if device == "cuda" else (256, 512, 16000)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        _product(record, device, sizes, dtype, compile_peer)
    except Exception as error:
        record.add(case="linear", failed=f"{type(error).__name__}: {str(error)[:300]}")
    _free(device)
    return record


def _free(device: str) -> None:
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def _plain(
    record: Record,
    device: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    smoothing: float,
    compile_peer: bool,
) -> None:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    y = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    scratch = x.detach().clone().requires_grad_()

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, label_smoothing=smoothing)

    def step(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Step:
        return lambda: torch.autograd.grad(f(x), x)[0]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x, y, label_smoothing=smoothing)

    def inplace(x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x, y, label_smoothing=smoothing, inplace_backward=True)

    steps = {"eager": step(torchs, x), "ours": step(ours, x), "in place": step(inplace, scratch)}
    if compile_peer:
        steps["compile"] = step(torch.compile(torchs, dynamic=False), x)
    liger = _liger("liger_cross_entropy")
    if liger is not None and device == "cuda" and len(shape) == 2:
        other = x.detach().clone().requires_grad_()  # it too overwrites the logits
        steps["liger"] = step(lambda x: liger(x, y, label_smoothing=smoothing), other)
    exact = x.detach()[:ROWS].double().requires_grad_()
    part = F.cross_entropy(exact, y[:ROWS], label_smoothing=smoothing, reduction="sum")
    (right,) = torch.autograd.grad(part / y.numel(), exact)
    row: dict[str, Any] = {
        "case": name,
        "shape": "×".join(map(str, shape)),
        "dtype": str(dtype).removeprefix("torch."),
    }
    found = {k: relative_error(steps[k]()[:ROWS], right) for k in ("ours", "in place", "eager")}
    row |= {"error": max(found["ours"], found["in place"]), "torch_error": found["eager"]}
    if device == "cuda":
        graphs = {k: captured(f) for k, f in steps.items()}
        row |= {f"{k}_gpu_ms": v for k, v in replay_times(graphs, rounds=9).items()}
        calls = 3 if x.numel() > 2**24 else 50
        row |= {f"{k}_wall_ms": v for k, v in wall_times(steps, rounds=7, calls=calls).items()}
    else:
        row |= {f"{k}_ms": v for k, v in cpu_times(steps, seconds=5.0).items()}
    record.add(**row)


def _product(
    record: Record, device: str, sizes: tuple[int, int, int], dtype: torch.dtype, compile_peer: bool
) -> None:
    tokens, hidden, classes = sizes
    h = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    w = torch.randn(classes, hidden, device=device).mul_(hidden**-0.5).to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,), device=device)

    def torchs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    losses: dict[str, Callable[..., Any]] = {
        "eager": torchs,
        "ours": lambda h, w: linear_cross_entropy(h, w, y, accumulate="exact"),
        "fast": lambda h, w: linear_cross_entropy(h, w, y, accumulate="fast"),
    }
    if compile_peer:
        losses["compile"] = torch.compile(torchs, dynamic=False)
    liger = _liger("liger_fused_linear_cross_entropy")
    if liger is not None and device == "cuda":
        losses["liger"] = lambda h, w: liger(h, w, y)

    def step(f: Callable[..., Any]) -> Step:
        return lambda: torch.autograd.grad(f(h, w), (h, w))

    steps = {name: step(f) for name, f in losses.items()}
    row: dict[str, Any] = {
        "case": "linear + cross-entropy",
        "shape": f"{tokens}×{hidden}→{classes}",
        "dtype": str(dtype).removeprefix("torch."),
    }
    right = _weight_rows(h, w, y)
    for label, name in (("error", "ours"), ("fast_error", "fast"), ("torch_error", "eager")):
        row[label] = relative_error(steps[name]()[1][:ROWS], right)
    if device == "cuda":
        row |= {f"{k}_peak_mb": _peak_mb(f) for k, f in steps.items()}
        wall = wall_times(steps, rounds=7, calls=2)
        row |= {f"{k}_wall_ms": v for k, v in wall.items()}
    else:
        row |= {f"{k}_ms": v for k, v in cpu_times(steps, seconds=10.0).items()}
    record.add(**row)


def _weight_rows(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The first rows of the weight's gradient in float64, a part of the tokens at a time."""
    right = torch.zeros(ROWS, h.shape[1], dtype=torch.float64, device=h.device)
    wide = w.detach().double()
    for part, target in zip(h.detach().split(256), y.split(256), strict=True):
        share = (part.double() @ wide.t()).softmax(1)[:, :ROWS]
        wanted = target[:, None] == torch.arange(ROWS, device=h.device)
        right += (share - wanted.double()).t() @ part.double()
    return right / h.shape[0]


def _peak_mb(f: Step) -> float:
    f()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _liger(name: str) -> Any:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return getattr(functional, name)
