"""Every kind of convolution on the CPU, with its gradients: plans against torch and ONNX
Runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import deuteron as dt
from bench.harness import Record, cpu_times, onnx_runtime, relative_error

NOTE = (
    "Milliseconds, medians in turns with pauses of 20 ms. `conv` has a bias and a weight that "
    "never changes, `dx` and `dw` are the gradients, whose operands all arrive with the call. "
    "`ours` is a plan with find=True over channels last, `way` who runs it; `eager` the quicker of "
    "torch's call over row-major order and over channels last, `ort` ONNX Runtime over row-major "
    "order. `over_best` is the best of the others over ours, `over_ort` ONNX Runtime's time over "
    "ours. Errors are relative (2-norm) to float64."
)


class Case(NamedTuple):
    """Sizes of x, of the weight, and how it is convolved."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    how: dict[str, Any]


def plain(x: int, out: int, size: int | tuple[int, ...], k: int, **how: Any) -> Case:
    """One image, a square window, padded so that a stride of 1 keeps the size."""
    space = (size, size) if isinstance(size, int) else size
    groups = how.get("groups", 1)
    padding = {"padding": how.get("dilation", 1) * (k // 2)}
    return Case((1, x, *space), (out, x // groups, *[k] * len(space)), {**padding, **how})


def up(x: int, out: int, size: int | tuple[int, ...], k: int, **how: Any) -> Case:
    """A transposed convolution that doubles an image."""
    space = (size, size) if isinstance(size, int) else size
    groups = how.get("groups", 1)
    how = {"stride": 2, "padding": (k - 1) // 2, "transposed": True, **how}
    if k % 2:
        how["output_padding"] = 1
    return Case((1, x, *space), (x, out // groups, *[k] * len(space)), how)


CASES = {
    "3x3 64 56²": plain(64, 64, 56, 3),
    "3x3 128 28²": plain(128, 128, 28, 3),
    "3x3 256 14²": plain(256, 256, 14, 3),
    "3x3 512 7²": plain(512, 512, 7, 3),
    "3x3/2 128 56²": plain(128, 128, 56, 3, stride=2),
    "3x3 dilated 256 28²": plain(256, 256, 28, 3, dilation=4),
    "1x1 64→256 56²": plain(64, 256, 56, 1),
    "1x1 1024→256 14²": plain(1024, 256, 14, 1),
    "3x3 groups of 8, 192 28²": plain(192, 192, 28, 3, groups=24),
    "depthwise 96/2 112²": plain(96, 96, 112, 3, groups=96, stride=2),
    "depthwise 144 56²": plain(144, 144, 56, 3, groups=144),
    "depthwise 384 14²": plain(384, 384, 14, 3, groups=384),
    "depthwise 7x7 96 56²": plain(96, 96, 56, 7, groups=96),
    "depthwise, 2 filters each, 64 56²": plain(64, 128, 56, 3, groups=64),
    "15x15 32 56²": plain(32, 32, 56, 15),
    "31x31 16 64²": plain(16, 16, 64, 31),
    "depthwise 31x31 64 56²": plain(64, 64, 56, 31, groups=64),
    "U-Net up 1024→512 14²": up(1024, 512, 14, 2),
    "U-Net up 512→256 28²": up(512, 256, 28, 2),
    "U-Net up 256→128 56²": up(256, 128, 56, 2),
    "U-Net up 128→64 112²": up(128, 64, 112, 2),
    "up 4x4 256→128 28²": up(256, 128, 28, 4),
    "up 3x3 256→128 28²": up(256, 128, 28, 3),
    "up depthwise 4x4 128 28²": up(128, 128, 28, 4, groups=128),
    "1-D 3 256 1024": plain(256, 256, (1024,), 3),
    "1-D 10/5 64→128 4000": plain(64, 128, (4000,), 10, stride=5, padding=0),
    "1-D depthwise 31 256 1024": plain(256, 256, (1024,), 31, groups=256),
    "1-D up 128→64 512": up(128, 64, (512,), 4),
    "3-D 3x3x3 32 16·28²": plain(32, 32, (16, 28, 28), 3),
    "3-D 3x3x3/2 64 8·28²": plain(64, 64, (8, 28, 28), 3, stride=2),
    "3-D 1x1x1 64→128 8·14²": plain(64, 128, (8, 14, 14), 1),
    "3-D depthwise 64 8·28²": plain(64, 64, (8, 28, 28), 3, groups=64),
    "3-D up 64→32 8·14²": up(64, 32, (8, 14, 14), 2),
}
PARTS = ("conv", "dx", "dw")


def last(t: torch.Tensor) -> torch.Tensor:
    """Channels innermost, in any number of dimensions."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def settings(case: Case) -> list[Any]:
    """As torch's convolutions take them."""
    dims = len(case.x) - 2
    usual = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0}
    full = {**usual, "groups": 1, **case.how}
    return [
        [value] * dims if name not in ("transposed", "groups") else value
        for name, value in full.items()
    ]


def torchs(part: str, case: Case, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """torch's own call for a part."""
    if part == "conv":
        return lambda: torch.convolution(*tensors, *settings(case))
    grad, other = tensors
    of_x = part == "dx"
    unknown = last(torch.empty(case.x if of_x else case.weight, dtype=grad.dtype))
    given = (unknown, other) if of_x else (other, unknown)
    mask = [of_x, not of_x, False]
    call = torch.ops.aten.convolution_backward
    return lambda: call(grad, *given, None, *settings(case), mask)[0 if of_x else 1]


def planned(part: str, case: Case, tensors: list[torch.Tensor]) -> tuple[Callable[[], Any], str]:
    """Our plan for a part, and who runs it."""
    g = dt.Graph(part)
    if part == "conv":
        x, weight, bias = tensors
        given = g.tensor("x", x.shape, strides=x.stride())
        made = g.conv(given, g.constant(weight), g.constant(bias), **case.how)
        feed = {"x": x}
    else:
        names = ("grad", "w" if part == "dx" else "x")
        feed = dict(zip(names, tensors, strict=True))
        both = [g.tensor(name, t.shape, strides=t.stride()) for name, t in feed.items()]
        shape = case.x if part == "dx" else case.weight
        made = getattr(g, f"conv_{part}")(*both, shape=shape, **case.how)
    made.output("y")
    plan = g.compile(device="cpu", find=True, budget_s=4)
    convolved = [c for c in plan.decision.choices if any("conv" in op for op in c.region.ops)]
    way = ", ".join(
        str(c.candidate.knobs.get("recipe", c.candidate.engine)) for c in convolved
    )  # fmt: skip
    return lambda: plan.run(**feed)["y"], way


class Layer(torch.nn.Module):
    """A convolution as ONNX can have it."""

    def __init__(self, case: Case, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        how = dict(case.how)
        spread = "_transpose" if how.pop("transposed", False) else ""
        name = f"conv{spread}{len(case.x) - 2}d"
        self.call: Callable[..., Any] = partial(getattr(torch.nn.functional, name), **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.weight, self.bias)


def operands(part: str, case: Case) -> list[torch.Tensor]:
    """Random ones, channels innermost: x, weight and bias, or the gradient and the other factor."""
    torch.manual_seed(0)
    x, weight = last(torch.randn(case.x)), torch.randn(case.weight)
    fan = weight[:, 0].numel() if case.how.get("transposed") else weight[0].numel()
    weight /= fan**0.5
    if part == "conv":
        each = case.weight[1] * case.how.get("groups", 1)
        return [x, weight, torch.randn(each if case.how.get("transposed") else case.weight[0])]
    meta = torch.convolution(x.to("meta"), weight.to("meta"), None, *settings(case))
    grad = last(torch.randn(meta.shape))
    return [grad, weight if part == "dx" else x]


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("cpu_convolutions", "cpu", NOTE)
    torch.set_grad_enabled(False)
    for name, case in CASES.items():
        for part in PARTS:
            if record.wants(f"{name} {part}") or record.wants(name):
                record.add(case=f"{name} {part}", **_row(part, case))
    return record


def _row(part: str, case: Case) -> dict[str, Any]:
    tensors = operands(part, case)
    ours, way = planned(part, case, tensors)
    rows = [t.contiguous() for t in tensors]
    calls = {
        "ours": ours,
        "eager rows": torchs(part, case, rows),
        "eager last": torchs(part, case, tensors),
    }
    if part == "conv":
        peer = onnx_runtime(Layer(case, *tensors[1:]), rows[0])
        calls |= {"ort": peer} if peer else {}
    times = cpu_times(calls, seconds=1.0)
    exact = torchs(part, case, [t.double() for t in tensors])()
    eager = min(times["eager rows"], times["eager last"])
    ort = times.get("ort", float("nan"))
    return {
        "ours": times["ours"],
        "eager": eager,
        "ort": ort,
        "over_best": min(eager, ort if ort == ort else eager) / times["ours"],
        "over_ort": ort / times["ours"],
        "error": relative_error(ours(), exact),
        "eager_error": relative_error(calls["eager last"](), exact),
        "way": way,
    }
