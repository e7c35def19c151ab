"""Pipelines to test, their meaning in plain torch, and the Triton kernels in the interpreter.

``python -m tests.interpreted tests.augment_cases`` runs the kernels and prints what is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from deuteron.augment import (
    Brightness,
    ColorJitter,
    Contrast,
    Grayscale,
    HorizontalFlip,
    HSVShift,
    Hue,
    Normalize,
    Perspective,
    Pipeline,
    RandomAffine,
    RandomResizedCrop,
    Rotate,
    Saturation,
    ToDtype,
    ToLayout,
    VerticalFlip,
)
from deuteron.augment.step import Step
from tests.tolerances import allowed, error

AFFINE = RandomAffine(30, (0.1, 0.2), (0.8, 1.2), (-5, 5, -3, 3))
CROP = RandomResizedCrop((7, 9), scale=(0.3, 1.0))
JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1)
NORMAL = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF, NHWC = ToDtype(torch.float16), ToLayout("nhwc")

Build = Callable[[], Pipeline]


def _of(*steps: Step, interpolation: str = "bilinear", padding: str | None = None) -> Build:
    return lambda: Pipeline(steps, seed=3, interpolation=interpolation, padding=padding)


GEOMETRY: dict[str, Build] = {
    "affine": _of(AFFINE),
    "rotate": _of(Rotate((20, 70))),
    "perspective": _of(Perspective(0.5, p=1.0)),
    "crop": _of(CROP),
    "flips": _of(HorizontalFlip(), VerticalFlip()),
    "all places": _of(
        AFFINE, CROP, HorizontalFlip(), VerticalFlip(), Rotate(10), Perspective(0.3, p=0.7)
    ),
    "nearest": _of(AFFINE, CROP, interpolation="nearest"),
    "bicubic": _of(AFFINE, CROP, interpolation="bicubic"),
    "border": _of(AFFINE, CROP, padding="border"),
    "nearest border": _of(AFFINE, interpolation="nearest", padding="border"),
    "bicubic border": _of(AFFINE, interpolation="bicubic", padding="border"),
}
COLOURS: dict[str, Build] = {
    "nothing": _of(),
    "brightness": _of(Brightness(0.4)),
    "contrast": _of(Contrast(0.4)),
    "saturation": _of(Saturation(0.4)),
    "hue": _of(Hue(0.5)),
    "hsv": _of(HSVShift(0.3, 0.5, 0.5)),
    "grayscale": _of(Grayscale(0.5)),
    "jitter backwards": _of(Hue(0.1), Saturation(0.4), Contrast(0.4), Brightness(0.4)),
    "normalize": _of(NORMAL),
}
WHOLE: dict[str, Build] = {
    "acceptance": _of(AFFINE, JITTER, NORMAL, HALF, NHWC),
    "everything": _of(
        AFFINE,
        CROP,
        HorizontalFlip(),
        JITTER,
        HSVShift(0.1, 0.2, 0.2),
        Grayscale(0.2),
        NORMAL,
        ToDtype("f32"),
        ToLayout("nchw"),
    ),
    "to bytes": _of(CROP, JITTER, ToDtype(torch.uint8)),
}
PIPELINES = {**GEOMETRY, **COLOURS, **WHOLE}
GRADIENTS = {k: v for k, v in PIPELINES.items() if k not in ("to bytes", "nothing")}


KINDS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS = (torch.float32, torch.float16, torch.float64)
# What runs on a GPU: (pipeline, type, shape, channels last). Each takes a compilation, so types and
# layouts take turns; the acceptance pipeline has all of them.
FORWARD = [
    (name, KINDS[(k + 2 * turn) % 5], shape, nhwc)
    for k, name in enumerate(PIPELINES)
    for turn, (shape, nhwc) in enumerate((((5, 3, 61, 83), False), ((2, 3, 33, 31), True)))
] + [("acceptance", kind, (5, 3, 61, 83), False) for kind in KINDS]
FORWARD = list(dict.fromkeys(FORWARD))
PLANNED = ("contrast", "jitter backwards", "acceptance", "everything")  # gradients of colours
BACKWARD = [(name, FLOATS[k % 3], (3, 3, 37, 41)) for k, name in enumerate((*GEOMETRY, *PLANNED))]


def images(shape: Sequence[int], kind: torch.dtype, nhwc: bool) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1)
    if kind == torch.uint8:
        x = torch.randint(0, 256, tuple(shape), dtype=kind, generator=gen)
    else:
        x = torch.rand(tuple(shape), dtype=torch.float64, generator=gen).to(kind)
    return x.contiguous(memory_format=torch.channels_last) if nhwc else x


# ---- the meaning, from PyTorch's grid functions and torchvision's formulas


def plain(aug: Pipeline, x: torch.Tensor, step: int, wide: bool) -> torch.Tensor:
    """A pipeline step by step in torch: in float64, or in the types that the pipeline uses."""
    spec, n = aug.spec, x.shape[0]
    kind = torch.float64 if wide else spec.compute_dtype(x.dtype)
    drawn = aug.parameters_for(n, step, (x.shape[2], x.shape[3]))
    values = x.to(kind) / 255 if x.dtype == torch.uint8 else x.to(kind)
    if spec.geometric:
        size = spec.result_size((x.shape[2], x.shape[3]))
        grid = _grid(drawn["matrix"], spec.projective, (n, 1, *size), kind)
        values = F.grid_sample(values, grid, spec.interpolation, spec.padding, False)
    for place, colour in spec.colours:
        label = f"{place}.{type(colour).__name__}."
        numbers = [v.to(kind)[:, None, None, None] for k, v in drawn.items() if k.startswith(label)]
        values = _PLAIN[type(colour)](values, *numbers)
    if spec.normalize:
        mean, std = (
            torch.tensor(v, dtype=kind)[:, None, None]
            for v in (spec.normalize.mean, spec.normalize.std)
        )
        values = (values - mean) / std
    result = spec.result_dtype(x.dtype)
    if result == torch.uint8:
        return (values * 255).round().clamp(0, 255).to(kind if wide else result)
    return values if wide else values.to(result)


def _grid(matrix: torch.Tensor, projective: bool, size: tuple[int, ...], kind: torch.dtype):
    if not projective:
        return F.affine_grid(matrix[:, :2].to(kind), list(size), align_corners=False)
    n, _, h, w = size
    at = F.affine_grid(torch.eye(3, dtype=kind)[None, :2], [1, 1, h, w], align_corners=False)
    ones = torch.ones(1, h, w, 1, dtype=kind)
    moved = torch.cat([at, ones], -1).expand(n, h, w, 3) @ matrix.to(kind)[:, None].mT
    return moved[..., :2] / moved[..., 2:]


def _grey(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == 1:
        return x
    r, g, b = x.unbind(1)
    return (0.2989 * r + 0.587 * g + 0.114 * b)[:, None]


def _blend(x: torch.Tensor, other: torch.Tensor | float, factor: torch.Tensor) -> torch.Tensor:
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def _to_hsv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r, g, b = x.unbind(1)
    top, low = x.amax(1), x.amin(1)
    flat, spread = top == low, top - low
    saturation = spread / torch.where(flat, torch.ones_like(top), top)
    part = torch.where(flat, torch.ones_like(top), spread)
    rc, gc, bc = (top - r) / part, (top - g) / part, (top - b) / part
    is_r, is_g = top == r, (top == g) & (top != r)
    hue = torch.where(is_r, bc - gc, torch.where(is_g, 2 + rc - bc, 4 + gc - rc))
    return torch.fmod(hue / 6 + 1, 1), saturation, top


def _from_hsv(h: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    sector = torch.floor(h * 6)
    f = h * 6 - sector
    p, q, t = v * (1 - s), v * (1 - s * f), v * (1 - s * (1 - f))
    rows = ((v, t, p), (q, v, p), (p, v, t), (p, q, v), (t, p, v), (v, p, q))
    choices = torch.stack([torch.stack(row, 1) for row in rows])
    which = (sector.long() % 6)[None, :, None].expand_as(choices[:1])
    return choices.gather(0, which)[0]


def _hsv(
    x: torch.Tensor, turn: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    h, s, v = _to_hsv(x)
    h = (h + turn[:, 0]) % 1
    return _from_hsv(h, (s * saturation[:, 0]).clamp(0, 1), (v * value[:, 0]).clamp(0, 1))


def _hue(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    h, s, v = _to_hsv(x)
    return _from_hsv((h + turn[:, 0]) % 1, s, v)


_PLAIN: dict[type[Step], Callable[..., torch.Tensor]] = {
    Brightness: lambda x, f: (x * f).clamp(0, 1),
    Contrast: lambda x, f: _blend(x, _grey(x).mean((1, 2, 3), keepdim=True), f),
    Saturation: lambda x, f: _blend(x, _grey(x), f),
    Grayscale: lambda x, f: torch.where(f > 0, x, _grey(x).expand_as(x)),
    Hue: _hue,
    HSVShift: _hsv,
}


# ---- the Triton kernels in the interpreter


def interpreted() -> dict[str, str]:
    """Each pipeline forward in every type, and backward, with what is wrong; {} if nothing is."""
    from deuteron.augment import gpu, run

    wrong: dict[str, str] = {}
    kinds = (torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.float16)
    for k, (name, build) in enumerate(PIPELINES.items()):
        kind = kinds[k % len(kinds)]
        x, aug = images((2, 3, 9, 13), kind, k % 2 == 1), build()
        got = run.empty_result(x, aug.spec.text)
        gpu.forward(x, aug.table(x, step=1), got, aug.spec.text)
        exact, same = (plain(aug, x, 1, wide) for wide in (True, False))
        limit = allowed(error(same, exact), got.dtype, 16)
        limit = 1.01 / 255 if got.dtype == torch.uint8 else limit
        if error(got, exact) > limit:
            wrong[f"{name} {kind}"] = f"{error(got, exact):.3g} of {limit:.3g}"
    for name in ("all places", "nearest border", "bicubic", "bicubic border", "everything"):
        x, aug = images((1, 3, 6, 5), torch.float64, False), GRADIENTS[name]()
        table = aug.table(x, step=1)
        exact = x.requires_grad_()
        y = plain(aug, exact, 1, True)
        seed = torch.randn_like(y).to(aug.spec.result_dtype(x.dtype))
        (want,) = torch.autograd.grad(y, exact, seed.to(y.dtype))
        got = torch.empty_like(x)
        run.backward_kernel(seed, x.detach(), table, got, aug.spec.text)
        if error(got, want) > allowed(0.0, seed.dtype, 64):
            wrong[f"gradient of {name}"] = f"{error(got, want):.3g}"
    wrong |= _split_sums()
    return wrong


def _split_sums() -> dict[str, str]:
    """The mean for contrast from parts of an image, and a single channel."""
    from deuteron.augment import gpu

    wrong = {}
    for channels in (1, 3):
        x, aug = images((2, channels, 35, 33), torch.float32, False), PIPELINES["contrast"]()
        table, y = aug.table(x, step=1), torch.empty_like(x)
        launches = gpu.forward(x, table, y, aug.spec.text, split=3)
        found = error(y, plain(aug, x, 1, True))
        if launches != 2 or found > allowed(0.0, torch.float32, 16):
            wrong[f"split, {channels} channels"] = f"{found:.3g} in {launches} launches"
    return wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    json.dump(interpreted(), sys.stdout)
