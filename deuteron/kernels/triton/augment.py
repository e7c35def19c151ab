"""Image augmentation: one gather through a matrix per image, then colours, in one launch.

With (u, v) the centre of a pixel of the result, from −1 to 1 between the outer edges::

    (a, b, w) = M[n] · (u, v, 1)          M: the geometric steps, multiplied
    place     = (a / w, b / w)            in pixels: ((place + 1) · size − 1) / 2
    rgb       = blend of the neighbours of that place (1, 4 or 16 of them)
    rgb       = steps[k](rgb, numbers[n, k])   in order, in registers
    y         = rgb · scale + shift       Normalize; then the type and the memory order asked for

Bytes: the image is read once and the result written once; a table of some 100 bytes per image.
256×3×224² from uint8 to float16 moves 116 MB, which is 27 µs at 4.25 TB/s.

Contrast needs the mean of the grey image as it is before that step, a sum over all pixels of the
result. Where the batch fills the GPU one program owns an image: it goes through its pixels once
for the sum and once for the result, in one launch; the second time they come from the caches.
Where images are few and large that would leave most of the GPU idle: a first, small launch then
leaves sums of parts, and every program of the second adds those up in a fixed order. Both ways
give the same bits from run to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import INT32, Launchable

MATRIX, WIDTH = 9, 3  # columns of a table: the matrix, turned, then three per colour step
CODES = {"brightness": 1, "contrast": 2, "saturation": 3, "hue": 4, "hsv": 5, "grey": 6}
MODES = {"none": 0, "nearest": 1, "bilinear": 2, "bicubic": 3}
WHOLE = (1024, 16)  # pixels and warps of a program that owns an image
PIECE = (512, 8)  # of one that has a piece of it
PARTS = 64  # sums that a large image is split into
LOOPS = 4  # blocks of an image below which it is never split

_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _unit(x):
    """Between 0 and 1; nan stays nan."""
    return tl.minimum(tl.maximum(x, 0.0, _NAN), 1.0, _NAN)


@triton.jit
def rint(x):
    """The nearest whole number, halves to even as torch and C round."""
    down = tl.floor(x)
    rest = x - down
    odd = down - 2.0 * tl.floor(down * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), down + 1.0, down)


@triton.jit
def _grey(r, g, b, RGB: tl.constexpr):
    if RGB:
        return r * 0.2989 + g * 0.587 + b * 0.114
    else:
        return r


@triton.jit
def _from_hue(hue, offset, top, spread):
    """A channel falls below the largest one by a trapezoid of the hue."""
    at = hue + offset
    at = at - 6.0 * tl.floor(at / 6.0)
    return top - spread * _unit(tl.minimum(at, 4.0 - at, _NAN))


@triton.jit
def _colour(r, g, b, at, mean, CODE: tl.constexpr, RGB: tl.constexpr):
    """One colour step, with its numbers at ``at``; the formulas are those of augment/emit.py."""
    if CODE <= 3 or CODE == 6:
        factor = tl.load(at)
        if CODE == 1:
            rest = 0.0
        elif CODE == 2:
            rest = (1.0 - factor) * mean
        else:
            rest = (1.0 - factor) * _grey(r, g, b, RGB)
        r, g, b = r * factor + rest, g * factor + rest, b * factor + rest
        if CODE <= 3:
            r, g, b = _unit(r), _unit(g), _unit(b)
    else:
        top = tl.maximum(tl.maximum(r, g, _NAN), b, _NAN)
        spread = top - tl.minimum(tl.minimum(r, g, _NAN), b, _NAN)
        whole = tl.where(spread == 0.0, 1.0, spread)
        hue = tl.where(
            top == r,
            (g - b) / whole,
            tl.where(top == g, (b - r) / whole + 2.0, (r - g) / whole + 4.0),
        )
        hue += tl.load(at) * 6.0
        if CODE == 5:
            saturation = spread / tl.where(top == 0.0, 1.0, top)
            top = _unit(top * tl.load(at + 2))
            spread = _unit(saturation * tl.load(at + 1)) * top
        r = _from_hue(hue, 5.0, top, spread)
        g = _from_hue(hue, 3.0, top, spread)
        b = _from_hue(hue, 1.0, top, spread)
    return r, g, b


@triton.jit
def _colours(r, g, b, row, mean, STEPS: tl.constexpr, UNTIL: tl.constexpr, RGB: tl.constexpr):
    """The first UNTIL colour steps; STEPS has their codes, eight to a digit."""
    for k in tl.static_range(UNTIL):
        r, g, b = _colour(r, g, b, row + 9 + 3 * k, mean, (STEPS // 8**k) % 8, RGB)
    return r, g, b


@triton.jit
def place(row, i, j, H, W, HO, WO, PROJECTIVE: tl.constexpr):
    """Where pixel (i, j) of the result lies in the image, down and across in pixels."""
    kind: tl.constexpr = row.dtype.element_ty
    u, v = (2.0 * j + 1.0) / WO.to(kind) - 1.0, (2.0 * i + 1.0) / HO.to(kind) - 1.0
    px = tl.load(row) * u + tl.load(row + 3) * v + tl.load(row + 6)
    py = tl.load(row + 1) * u + tl.load(row + 4) * v + tl.load(row + 7)
    if PROJECTIVE:
        pw = tl.load(row + 2) * u + tl.load(row + 5) * v + tl.load(row + 8)
        px, py = px / pw, py / pw
    return ((py + 1.0) * H - 1.0) * 0.5, ((px + 1.0) * W - 1.0) * 0.5


@triton.jit
def _tap(
    x,
    fy,
    fx,
    weight,
    r,
    g,
    b,
    live,
    H,
    W,
    sc,
    sh,
    sw,
    BORDER: tl.constexpr,
    RGB: tl.constexpr,
    BIG: tl.constexpr,
):
    """Adds a neighbour at whole (fy, fx) to a blend; outside the image it is 0, or the edge."""
    if BORDER:
        fy = tl.minimum(tl.maximum(fy, 0.0), H - 1.0)
        fx = tl.minimum(tl.maximum(fx, 0.0), W - 1.0)
        inside = live
    else:
        inside = live & (fy >= 0.0) & (fy < H) & (fx >= 0.0) & (fx < W)
    row, column = fy.to(tl.int32), fx.to(tl.int32)
    if BIG:
        row, column = row.to(tl.int64), column.to(tl.int64)
    at = x + row * sh + column * sw
    r += weight * tl.load(at, inside, 0).to(r.dtype)
    if RGB:
        g += weight * tl.load(at + sc, inside, 0).to(r.dtype)
        b += weight * tl.load(at + 2 * sc, inside, 0).to(r.dtype)
    return r, g, b


@triton.jit
def cubic(t, k: tl.constexpr):
    """The weight of neighbour k of 4 at a distance t past the second, with a = −3/4."""
    if k == 0:
        d = t + 1.0
        return ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0
    elif k == 1:
        return (1.25 * t - 2.25) * t * t + 1.0
    elif k == 2:
        d = 1.0 - t
        return (1.25 * d - 2.25) * d * d + 1.0
    else:
        d = 2.0 - t
        return ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0


@triton.jit
def _pixels(
    x,
    row,
    i,
    j,
    live,
    H,
    W,
    HO,
    WO,
    sc,
    sh,
    sw,
    MODE: tl.constexpr,
    BORDER: tl.constexpr,
    PROJECTIVE: tl.constexpr,
    RGB: tl.constexpr,
    BYTES: tl.constexpr,
    BIG: tl.constexpr,
):
    """The image where the pixels (i, j) of the result lie, as numbers from 0 to 1."""
    kind: tl.constexpr = row.dtype.element_ty
    r = tl.zeros(i.shape, kind)
    g, b = r, r
    if MODE == 0:
        r, g, b = _tap(
            x, i.to(kind), j.to(kind), 1.0, r, g, b, live, H, W, sc, sh, sw, False, RGB, BIG
        )
    else:
        py, px = place(row, i.to(kind), j.to(kind), H, W, HO, WO, PROJECTIVE)
        if BORDER and MODE != 3:
            px = tl.minimum(tl.maximum(px, 0.0), W - 1.0)
            py = tl.minimum(tl.maximum(py, 0.0), H - 1.0)
        if MODE == 1:
            r, g, b = _tap(
                x, rint(py), rint(px), 1.0, r, g, b, live, H, W, sc, sh, sw, BORDER, RGB, BIG
            )
        else:
            x0, y0 = tl.floor(px), tl.floor(py)
            tx, ty = px - x0, py - y0
            if MODE == 2:
                for k in tl.static_range(4):
                    wy = ty if k // 2 else 1.0 - ty
                    wx = tx if k % 2 else 1.0 - tx
                    r, g, b = _tap(
                        x,
                        y0 + k // 2,
                        x0 + k % 2,
                        wy * wx,
                        r,
                        g,
                        b,
                        live,
                        H,
                        W,
                        sc,
                        sh,
                        sw,
                        BORDER,
                        RGB,
                        BIG,
                    )
            else:
                for k in tl.static_range(16):
                    weight = cubic(ty, k // 4) * cubic(tx, k % 4)
                    r, g, b = _tap(
                        x,
                        y0 + (k // 4 - 1),
                        x0 + (k % 4 - 1),
                        weight,
                        r,
                        g,
                        b,
                        live,
                        H,
                        W,
                        sc,
                        sh,
                        sw,
                        BORDER,
                        RGB,
                        BIG,
                    )
    if BYTES:
        r, g, b = r / 255.0, g / 255.0, b / 255.0
    return r, g, b


@triton.jit
def _grey_sum(
    x,
    row,
    first,
    last,
    H,
    W,
    HO,
    WO,
    sc,
    sh,
    sw,
    STEPS: tl.constexpr,
    CONTRAST: tl.constexpr,
    MODE: tl.constexpr,
    BORDER: tl.constexpr,
    PROJECTIVE: tl.constexpr,
    RGB: tl.constexpr,
    BYTES: tl.constexpr,
    BIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the grey image before the contrast step, over pixels first … last − 1."""
    total = tl.zeros([BLOCK], row.dtype.element_ty)
    for start in range(first, last, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        live = pixel < last
        r, g, b = _pixels(
            x,
            row,
            pixel // WO,
            pixel % WO,
            live,
            H,
            W,
            HO,
            WO,
            sc,
            sh,
            sw,
            MODE,
            BORDER,
            PROJECTIVE,
            RGB,
            BYTES,
            BIG,
        )
        r, g, b = _colours(r, g, b, row, 0.0, STEPS, CONTRAST, RGB)
        total += tl.where(live, _grey(r, g, b, RGB), 0.0)
    return tl.sum(total)


@triton.jit
def _sums(
    x,
    table,
    sums,
    columns,
    H,
    W,
    HO,
    WO,
    sn,
    sc,
    sh,
    sw,
    parts,
    chunk,
    STEPS: tl.constexpr,
    CONTRAST: tl.constexpr,
    MODE: tl.constexpr,
    BORDER: tl.constexpr,
    PROJECTIVE: tl.constexpr,
    RGB: tl.constexpr,
    BYTES: tl.constexpr,
    BIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where images are few: the grey sum of each part of each image."""
    n = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * chunk
    last = tl.minimum(first + chunk, HO * WO)
    total = _grey_sum(
        x + n * sn,
        table + n * columns,
        first,
        last,
        H,
        W,
        HO,
        WO,
        sc,
        sh,
        sw,
        STEPS,
        CONTRAST,
        MODE,
        BORDER,
        PROJECTIVE,
        RGB,
        BYTES,
        BIG,
        BLOCK,
    )
    tl.store(sums + tl.program_id(0), total)


@triton.jit
def _augment(
    x,
    table,
    normal,
    sums,
    y,
    columns,
    H,
    W,
    HO,
    WO,
    sn,
    sc,
    sh,
    sw,
    yn,
    yc,
    yh,
    yw,
    parts,
    chunk,
    channels,
    summed,
    STEPS: tl.constexpr,
    COUNT: tl.constexpr,
    CONTRAST: tl.constexpr,
    MODE: tl.constexpr,
    BORDER: tl.constexpr,
    PROJECTIVE: tl.constexpr,
    RGB: tl.constexpr,
    BYTES: tl.constexpr,
    TO_BYTES: tl.constexpr,
    BIG: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pixels of one part of one image, of its three channels or, without RGB, of one channel."""
    kind: tl.constexpr = table.dtype.element_ty
    groups = 1 if RGB else channels
    image = tl.program_id(0) // parts
    n, channel = (image // groups).to(tl.int64), image % groups
    first = tl.program_id(0) % parts * chunk
    last = tl.minimum(first + chunk, HO * WO)
    row = table + n * columns
    x += n * sn
    y += n * yn
    if not RGB:
        x += channel.to(tl.int64) * sc
        y += channel.to(tl.int64) * yc
    mean = tl.zeros([], kind)
    if CONTRAST >= 0:
        if sums is not None:
            part = tl.arange(0, SUMS)
            mean = tl.sum(tl.load(sums + n * summed + part, part < summed, 0.0))
        else:
            mean = _grey_sum(
                x,
                row,
                0,
                HO * WO,
                H,
                W,
                HO,
                WO,
                sc,
                sh,
                sw,
                STEPS,
                CONTRAST,
                MODE,
                BORDER,
                PROJECTIVE,
                RGB,
                BYTES,
                BIG,
                BLOCK,
            )
        mean = mean / (HO * WO).to(kind)
    for start in range(first, last, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        live = pixel < last
        i, j = pixel // WO, pixel % WO
        r, g, b = _pixels(
            x, row, i, j, live, H, W, HO, WO, sc, sh, sw, MODE, BORDER, PROJECTIVE, RGB, BYTES, BIG
        )
        r, g, b = _colours(r, g, b, row, mean, STEPS, COUNT, RGB)
        if normal is not None:
            scale = normal + channel
            r = r * tl.load(scale) + tl.load(scale + channels)
            if RGB:
                g = g * tl.load(scale + 1) + tl.load(scale + channels + 1)
                b = b * tl.load(scale + 2) + tl.load(scale + channels + 2)
        if TO_BYTES:
            r, g, b = rint(_unit(r) * 255.0), rint(_unit(g) * 255.0), rint(_unit(b) * 255.0)
        if BIG:
            i, j = i.to(tl.int64), j.to(tl.int64)
        at = y + i * yh + j * yw
        tl.store(at, r.to(y.dtype.element_ty), live)
        if RGB:
            tl.store(at + yc, g.to(y.dtype.element_ty), live)
            tl.store(at + 2 * yc, b.to(y.dtype.element_ty), live)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Launchable, Launchable]:
    return Launchable(_sums), Launchable(_augment)


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter: no reason to split
    return torch.cuda.get_device_properties(device).multi_processor_count


def constants(
    x: torch.Tensor,
    y: torch.Tensor,
    kinds: tuple[str, ...],
    mode: str,
    padding: str,
    projective: bool,
) -> dict[str, Any]:
    """What the code of the kernel depends on beside element types."""
    together = x.shape[1] == 3
    span = max(
        sum((size - 1) * abs(s) for size, s in zip(t.shape[1:], t.stride()[1:], strict=True))
        for t in (x, y)
    )
    return {
        "STEPS": sum(CODES[kind] * 8**k for k, kind in enumerate(kinds)),
        "CONTRAST": kinds.index("contrast") if "contrast" in kinds else -1,
        "MODE": MODES[mode],
        "BORDER": padding == "border",
        "PROJECTIVE": projective,
        "RGB": together,
        "BYTES": x.dtype == torch.uint8,
        "BIG": span >= INT32,
    }


def augment(
    x: torch.Tensor,
    table: torch.Tensor,
    y: torch.Tensor,
    normal: torch.Tensor | None,
    kinds: tuple[str, ...],
    mode: str,
    padding: str,
    projective: bool,
    split: int | None = None,
) -> int:
    """Fill ``y`` [N, C, h, w] from images ``x`` [N, C, H, W]; how many launches that took.

    ``table`` [N, columns] and ``normal`` [2, C] (scale, then shift) are in the type that is
    computed in. ``split`` forces the number of parts an image is summed in.
    """
    sums_kernel, kernel = _kernels()
    shared = constants(x, y, kinds, mode, padding, projective)
    (n, channels, height, width), (ho, wo) = x.shape, y.shape[2:]
    sizes = (table.stride(0), height, width, ho, wo, *x.stride())
    groups = 1 if channels == 3 else channels
    pieces = _pieces(n, ho * wo, x.device, split) if shared["CONTRAST"] >= 0 else 1
    sums = None
    if pieces > 1:
        block, warps = PIECE
        chunk = triton.cdiv(ho * wo, pieces * block) * block
        pieces = triton.cdiv(ho * wo, chunk)
        sums = torch.empty(n, pieces, dtype=table.dtype, device=x.device)
        sums_kernel(
            (n * pieces,), x, table, sums, *sizes, pieces, chunk, **shared, BLOCK=block, warps=warps
        )
    whole = shared["CONTRAST"] >= 0 and sums is None
    block, warps = WHOLE if whole else PIECE
    parts, chunk = (1, ho * wo) if whole else (triton.cdiv(ho * wo, block), block)
    kernel(
        (n * groups * parts,),
        x,
        table,
        normal,
        sums,
        y,
        *sizes,
        *y.stride(),
        parts,
        chunk,
        channels,
        pieces,
        **shared,
        COUNT=len(kinds),
        TO_BYTES=y.dtype == torch.uint8,
        SUMS=triton.next_power_of_2(pieces),
        BLOCK=block,
        warps=warps,
    )
    return 1 if sums is None else 2


def _pieces(images: int, pixels: int, device: torch.device, split: int | None) -> int:
    """In how many pieces the grey of an image is summed; 1: by the program that owns it."""
    if split is not None:
        return split
    blocks = triton.cdiv(pixels, WHOLE[0])
    few = blocks > LOOPS and 2 * images < _processors(device)
    return min(PARTS, blocks) if few else 1
