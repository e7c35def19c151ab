"""Convolutions with what follows them, layer by layer: plans against cuDNN and torch.compile.

``python -m bench.convolutions --batch 1`` measures another batch, ``--group depthwise`` a part, and
``--gradients --batch 128`` the gradients for input and weight of the layers that networks train.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.harness import Record, captured, relative_error, replay_times
from deuteron.engines.roofline import region_bound
from deuteron.ir.region import Region

NOTE = (
    "GPU microseconds of one call by CUDA Graph replay, contenders taking turns, inputs rotating "
    "through 200 MB where they fit (more than L2), float16, channels last, random data. `ours` is "
    "a plan with find=True; `cudnn` is cuDNN's fused call where it has one (bias, residual, ReLU), "
    "else its convolution and the activation in place, algorithms searched; `over_best` the better "
    "of the others over ours. `of_roofline` is the least that bytes and operations take, on vector "
    "units where no channel sees another, over ours. Errors are relative (2-norm) to float64 on "
    "one image. `float32` layers are in float32 as IEEE has it, TF32 off; `winograd` and `fft` are "
    "what the search measured of these algorithms, with their errors, where they take part."
)
NOTE_GRADIENTS = (
    "GPU microseconds of one call by CUDA Graph replay, contenders taking turns, bfloat16, "
    "channels last, random data: the gradient for the input (dx) or for the weight (dw). `ours` "
    "is a plan with find=True, `cudnn` cuDNN's call, algorithms searched. Errors are relative "
    "(2-norm) to float64 on the first image, for dx, and to float32 on all of them, for dw."
)
ROTATE = 200 << 20
TRAINED = ("resnet50", "depthwise", "grouped")
# name: channels in → out, size of x, window, stride, padding, dilation, groups, what follows
LAYERS = {
    "resnet50": """
        stem 3 64 224 7 2 3 1 1 relu   1x1_64_64 64 64 56 1 1 0 1 1 relu
        3x3_64 64 64 56 3 1 1 1 1 relu   1x1_64_256 64 256 56 1 1 0 1 1 add
        1x1_64_256_id 64 256 56 1 1 0 1 1 none   1x1_256_64 256 64 56 1 1 0 1 1 relu
        1x1_256_128 256 128 56 1 1 0 1 1 relu   3x3_128_s2 128 128 56 3 2 1 1 1 relu
        1x1_128_512 128 512 28 1 1 0 1 1 add   1x1_256_512_s2 256 512 56 1 2 0 1 1 none
        1x1_512_128 512 128 28 1 1 0 1 1 relu   3x3_128 128 128 28 3 1 1 1 1 relu
        1x1_512_256 512 256 28 1 1 0 1 1 relu   3x3_256_s2 256 256 28 3 2 1 1 1 relu
        1x1_256_1024 256 1024 14 1 1 0 1 1 add   1x1_512_1024_s2 512 1024 28 1 2 0 1 1 none
        1x1_1024_256 1024 256 14 1 1 0 1 1 relu   3x3_256 256 256 14 3 1 1 1 1 relu
        1x1_1024_512 1024 512 14 1 1 0 1 1 relu   3x3_512_s2 512 512 14 3 2 1 1 1 relu
        1x1_512_2048 512 2048 7 1 1 0 1 1 add   1x1_1024_2048_s2 1024 2048 14 1 2 0 1 1 none
        1x1_2048_512 2048 512 7 1 1 0 1 1 relu   3x3_512 512 512 7 3 1 1 1 1 relu
        """,
    "deeplabv3": """
        3x3_256_d2 256 256 64 3 1 2 2 1 relu   3x3_512_d2 512 512 64 3 1 2 2 1 relu
        3x3_512_d4 512 512 64 3 1 4 4 1 relu   1x1_1024_2048 1024 2048 64 1 1 0 1 1 none
        1x1_512_2048 512 2048 64 1 1 0 1 1 add   1x1_2048_512 2048 512 64 1 1 0 1 1 relu
        1x1_2048_256 2048 256 64 1 1 0 1 1 relu   3x3_2048_d12 2048 256 64 3 1 12 12 1 relu
        3x3_2048_d24 2048 256 64 3 1 24 24 1 relu   3x3_2048_d36 2048 256 64 3 1 36 36 1 relu
        1x1_1280_256 1280 256 64 1 1 0 1 1 relu   3x3_256 256 256 64 3 1 1 1 1 relu
        """,
    "depthwise": """
        v3_16 16 16 112 3 1 1 1 16 relu   v3_64_s2 64 64 112 3 2 1 1 64 relu
        v3_72 72 72 56 3 1 1 1 72 relu   v3_72_5_s2 72 72 56 5 2 2 1 72 relu
        v3_120_5 120 120 28 5 1 2 1 120 relu   v3_240_s2 240 240 28 3 2 1 1 240 hardswish
        v3_480 480 480 14 3 1 1 1 480 hardswish   v3_672 672 672 14 3 1 1 1 672 hardswish
        v3_672_5_s2 672 672 14 5 2 2 1 672 hardswish   v3_960_5 960 960 7 5 1 2 1 960 hardswish
        b0_32 32 32 112 3 1 1 1 32 silu   b0_96_s2 96 96 112 3 2 1 1 96 silu
        b0_144 144 144 56 3 1 1 1 144 silu   b0_144_5_s2 144 144 56 5 2 2 1 144 silu
        b0_240_5 240 240 28 5 1 2 1 240 silu   b0_480_5 480 480 14 5 1 2 1 480 silu
        b0_672_5 672 672 14 5 1 2 1 672 silu   b0_1152_5 1152 1152 7 5 1 2 1 1152 silu
        convnext_96 96 96 56 7 1 3 1 96 none   convnext_192 192 192 28 7 1 3 1 192 none
        convnext_384 384 384 14 7 1 3 1 384 none   convnext_768 768 768 7 7 1 3 1 768 none
        """,
    "grouped": """
        8_of_192_56 192 192 56 3 1 1 1 24 relu   16_of_208_28 208 208 28 3 1 1 1 13 relu
        16_of_384_28 384 384 28 3 1 1 1 24 relu   24_of_432_14 432 432 14 3 1 1 1 18 relu
        24_of_576_14 576 576 14 3 1 1 1 24 relu   24_of_888_7 888 888 7 3 1 1 1 37 relu
        """,
    "first": """
        3_16_s2 3 16 224 3 2 1 1 1 hardswish   3_32_s2 3 32 224 3 2 1 1 1 silu
        3_64_7_s2 3 64 224 7 2 3 1 1 relu   3_96_4_s4 3 96 224 4 4 0 1 1 none
        3_768_patch16 3 768 224 16 16 0 1 1 none
        """,
    "activations": """
        3x3_64_silu 64 64 56 3 1 1 1 1 silu   3x3_128_gelu 128 128 28 3 1 1 1 1 gelu
        1x1_96_silu 24 96 112 1 1 0 1 1 silu   1x1_960_hswish 160 960 7 1 1 0 1 1 hardswish
        """,
    "float32": """
        3x3_64 64 64 56 3 1 1 1 1 relu   3x3_128 128 128 28 3 1 1 1 1 relu
        3x3_256 256 256 14 3 1 1 1 1 relu   3x3_512 512 512 7 3 1 1 1 1 relu
        3x3_128_112 128 128 112 3 1 1 1 1 relu   11x11_16 16 16 64 11 1 5 1 1 none
        15x15_32 32 32 64 15 1 7 1 1 none   31x31_alone 64 64 64 31 1 15 1 64 none
        """,
}  # fmt: skip
# MobileNetV3's blocks without the first product: channels, size of x, window, stride, channels of
# the result, activation, whether x of the block is added
BLOCKS = """
    1 16 112 3 1 16 relu add   2 64 112 3 2 24 relu none   3 72 56 3 1 24 relu add
    4 72 56 5 2 40 relu none   5 120 28 5 1 40 relu add   6 120 28 5 1 40 relu add
    7 240 28 3 2 80 hardswish none   8 200 14 3 1 80 hardswish add
    9 184 14 3 1 80 hardswish add   10 184 14 3 1 80 hardswish add
    11 480 14 3 1 112 hardswish none   12 672 14 3 1 112 hardswish add
    13 672 14 5 2 160 hardswish none   14 960 7 5 1 160 hardswish add
    15 960 7 5 1 160 hardswish add
    """
ACTS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu, "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
SEPARABLE = "separable"


class Layer(NamedTuple):
    name: str
    channels: int
    outs: int
    size: int
    window: int
    stride: int
    padding: int
    dilation: int
    groups: int
    follows: str

    @property
    def how(self) -> dict[str, int]:
        names = ("stride", "padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}


class Block(NamedTuple):
    """A depthwise convolution with its activation, and a pointwise one."""

    name: str
    channels: int
    size: int
    window: int
    stride: int
    outs: int
    act: str
    follows: str

    @property
    def how(self) -> dict[str, int]:
        return {"stride": self.stride, "padding": self.window // 2, "groups": self.channels}


def layers(group: str) -> Iterator[Layer | Block]:
    words = (BLOCKS if group == SEPARABLE else LAYERS[group]).split()
    long = 8 if group == SEPARABLE else 10
    for i in range(0, len(words), long):
        name, *rest = words[i : i + long]
        numbers = [int(word) if word.isdigit() else word for word in rest]
        yield (Block if group == SEPARABLE else Layer)(f"{group} {name}", *numbers)  # type: ignore[arg-type]


def run(
    device: str, compile_peer: bool = True, batch: int = 32, group: str | None = None
) -> Record:
    record = Record("convolutions", device, NOTE)
    if device != "cuda":
        return record
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    for name in (*LAYERS, SEPARABLE) if group is None else (group,):
        for layer in layers(name):
            case = f"{layer.name} b{batch}"
            if record.wants(case):
                torch.manual_seed(0)
                with torch.no_grad():
                    record.add(case=case, **_measured(layer, batch, compile_peer))
                torch.cuda.empty_cache()
    return record


def _dtype(layer: Layer | Block) -> torch.dtype:
    return torch.float32 if layer.name.startswith("float32") else torch.float16


def _image(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(shape, device="cuda") * scale
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def _weights(layer: Layer | Block) -> Tensors:
    def filters(*shape: int) -> torch.Tensor:
        return _image(_dtype(layer), *shape, scale=(2 / math.prod(shape[1:])) ** 0.5)

    def bias(count: int) -> torch.Tensor:
        return torch.randn(count, device="cuda").to(_dtype(layer))

    if isinstance(layer, Block):
        taps = filters(layer.channels, 1, layer.window, layer.window)
        point = filters(layer.outs, layer.channels, 1, 1)
        return {"w": taps, "b": bias(layer.channels), "v": point, "c": bias(layer.outs)}
    window = layer.window, layer.window
    w = filters(layer.outs, layer.channels // layer.groups, *window)
    return {"w": w, "b": bias(layer.outs)}


def _inputs(layer: Layer | Block, batch: int, out: torch.Size | None = None) -> Tensors:
    found = {"x": _image(_dtype(layer), batch, layer.channels, layer.size, layer.size)}
    if out is not None and layer.follows == "add":
        found["r"] = _image(_dtype(layer), *out)
    return found


def _plain(layer: Layer | Block, x: Any, w: Any, b: Any, r: Any = None, **point: Any) -> Any:
    """What a network says."""
    y = F.conv2d(x, w, b, **layer.how)
    if isinstance(layer, Block):
        y = F.conv2d(ACTS[layer.act](y), point["v"], point["c"])
        return y if r is None else y + r
    if layer.follows == "add":
        return F.relu(y if r is None else y + r)
    return ACTS[layer.follows](y) if layer.follows in ACTS else y


def _cudnn(layer: Layer | Block, x: Any, w: Any, b: Any, r: Any = None, **point: Any) -> Any:
    """The fewest calls of cuDNN's library that do the same."""
    if isinstance(layer, Block):
        y = F.conv2d(x, w, b, **layer.how)
        y = F.conv2d(ACTS[layer.act](y, inplace=True), point["v"], point["c"])
        return y if r is None else y.add_(r)
    how = *((n, n) for n in (layer.stride, layer.padding, layer.dilation)), layer.groups
    if layer.groups == layer.channels or layer.follows not in ("relu", "add"):
        y = F.conv2d(x, w, b, **layer.how)
        if layer.follows == "gelu":
            return F.gelu(y)
        return ACTS[layer.follows](y, inplace=True) if layer.follows in ACTS else y
    if layer.follows == "add":
        return torch.cudnn_convolution_add_relu(x, w, r, 1.0, b, *how)
    return torch.cudnn_convolution_relu(x, w, b, *how)


def _graph(layer: Layer | Block, weights: Tensors, given: Tensors) -> dt.Graph:
    g = dt.Graph("layer")
    syms = {k: g.tensor(k, t.shape, t.dtype, strides=t.stride()) for k, t in given.items()}
    known = {k: g.constant(t, k) for k, t in weights.items()}
    y = g.conv(syms["x"], known["w"], known["b"], **layer.how)
    if isinstance(layer, Block):
        y = g.conv(getattr(g, layer.act)(y), known["v"], known["c"])
        y = y + syms["r"] if "r" in syms else y
    elif layer.follows == "add":
        y = g.relu(y + syms["r"])
    elif layer.follows in ACTS:
        y = getattr(g, layer.follows)(y)
    y.output("y")
    return g


def _measured(layer: Layer | Block, batch: int, compile_peer: bool) -> dict[str, Any]:
    weights = _weights(layer)
    out = _plain(layer, **_inputs(layer, batch), **weights).shape
    first = _inputs(layer, batch, out)
    moved = sum(t.nbytes for t in first.values()) + _dtype(layer).itemsize * out.numel()
    sets = [first, *(_inputs(layer, batch, out) for _ in range(min(7, ROTATE // moved)))]
    plan = _graph(layer, weights, first).compile(find=True, device="cuda", budget_s=10)

    def over_sets(call: Callable[[Tensors], Any]) -> Any:
        return captured(lambda: [call(given) for given in sets])

    ways = {
        "ours": over_sets(lambda t: plan.program.run([t[name] for name in plan.graph.inputs])),
        "cudnn": over_sets(lambda t: _cudnn(layer, **t, **weights)),
    }
    if compile_peer:
        torch._dynamo.reset()
        made = torch.compile(lambda x, r=None: _plain(layer, x, r=r, **weights), dynamic=False)
        ways["compile"] = over_sets(lambda t: made(**t))
    times = {k: 1e3 * t / len(sets) for k, t in replay_times(ways, rounds=9).items()}
    one = {k: t[:1].double() for k, t in first.items()}
    exact = _plain(layer, **one, **{k: t.double() for k, t in weights.items()})
    errors = {
        "error": relative_error(plan.run(**first)["y"][:1], exact),
        "torch_error": relative_error(_plain(layer, **first, **weights)[:1], exact),
    }
    best = min(t for name, t in times.items() if name != "ours")
    least = region_bound(Region(plan.graph, frozenset(), 0), dt.target("cuda")).seconds
    if isinstance(layer, Block) or layer.groups == layer.channels:
        flops, machine = 2.0 * out.numel() * layer.window**2, dt.target("cuda")
        if isinstance(layer, Block):  # what lies between is not moved
            flops = 2.0 * out.numel() // layer.outs * layer.channels * layer.window**2
        least = machine.launch + max(moved / machine.stream, flops / machine.rate("f32", False))
    return {
        **times,
        "over_best": best / times["ours"],
        "over_cudnn": times["cudnn"] / times["ours"],
        "of_roofline": 1e6 * least / times["ours"],
        **errors,
        **_transforms(plan),
        "kernels": " + ".join(str(c.candidate) for c in plan.decision.choices),
    }


def _transforms(plan: Any) -> dict[str, float]:
    """What the search measured of Winograd's and Fourier's algorithms."""
    row: dict[str, float] = {}
    for option in (o for c in plan.decision.choices for o in c.options):
        kind = str(option.candidate.knobs.get("recipe"))
        seconds = option.measured_s
        if kind not in ("winograd", "fft") or seconds is None:
            continue
        if 1e6 * seconds < row.get(kind, math.inf):
            row |= {kind: 1e6 * seconds, f"{kind}_error": option.error}
    return row


# ---- gradients


def run_gradients(device: str, batch: int = 128, group: str | None = None) -> Record:
    record = Record("convolution_gradients", device, NOTE_GRADIENTS)
    if device != "cuda":
        return record
    for name in TRAINED if group is None else (group,):
        for layer in layers(name):
            for op in ("conv_dx", "conv_dw"):
                case = f"{layer.name} {op[5:]} b{batch}"
                first = layer.channels == 3 and op == "conv_dx"  # images have no gradient
                if not first and record.wants(case):
                    torch.manual_seed(0)
                    record.add(case=case, **_pulled(layer, op, batch))
                    torch.cuda.empty_cache()
    return record


def _pulled(layer: Layer, op: str, batch: int) -> dict[str, Any]:
    def image(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(shape, device="cuda") * scale
        return made.bfloat16().contiguous(memory_format=torch.channels_last)

    shape = (layer.outs, layer.channels // layer.groups, layer.window, layer.window)
    x = image(batch, layer.channels, layer.size, layer.size)
    w = image(*shape, scale=(2 / math.prod(shape[1:])) ** 0.5)
    dy = image(*F.conv2d(x, w, **layer.how).shape)
    of_input = op == "conv_dx"
    other, shape = (w, x.shape) if of_input else (x, w.shape)
    g = dt.Graph(op)
    given = [
        g.tensor(n, t.shape, t.dtype, strides=t.stride()) for n, t in (("dy", dy), ("other", other))
    ]
    getattr(g, op)(*given, shape=tuple(shape), **layer.how).output("y")
    plan = g.compile(find=True, device="cuda", budget_s=10)
    how = [(n, n) for n in (layer.stride, layer.padding, layer.dilation)]
    mask = [of_input, not of_input, False]

    def cudnn(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        back = torch.ops.aten.convolution_backward
        found = back(dy, x, w, None, *how, False, (0, 0), layer.groups, mask)
        return found[0] if of_input else found[1]

    torch.backends.cudnn.benchmark = True
    ways = {
        "ours": captured(lambda: plan.program.run([dy, other])),
        "cudnn": captured(lambda: cudnn(dy, x, w)),
    }
    times = {k: 1e3 * t for k, t in replay_times(ways, rounds=9).items()}
    found, theirs = plan.run(dy=dy, other=other)["y"], cudnn(dy, x, w)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False
    if of_input:
        found, theirs = found[:1], theirs[:1]
        exact = cudnn(dy[:1].double(), x[:1].double(), w.double())
    else:
        exact = cudnn(dy.float(), x.float(), w.float())
    return {
        **times,
        "over_cudnn": times["cudnn"] / times["ours"],
        "error": relative_error(found, exact),
        "cudnn_error": relative_error(theirs, exact),
        "kernels": " + ".join(str(c.candidate) for c in plan.decision.choices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure convolutions against cuDNN.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gradients", action="store_true", help="of input and weight, not forward")
    parser.add_argument("--group", choices=(*LAYERS, SEPARABLE))
    parser.add_argument("--out", default="bench/results", help="folder for the records")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    Record.folder = args.out
    if args.gradients:
        run_gradients("cuda", args.batch, args.group)
    else:
        run("cuda", not args.no_compile, args.batch, args.group)


if __name__ == "__main__":
    main()
