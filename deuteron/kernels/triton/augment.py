"""Image augmentation: one gather through a matrix per image, then colours, in one launch.

With (u, v) the centre of a pixel of the result, from −1 to 1 between the outer edges::

    (a, b, w) = M[n] · (u, v, 1)          M: the geometric steps, multiplied
    place     = (a / w, b / w)            in pixels: ((place + 1) · size − 1) / 2
    rgb       = blend of the neighbours of that place (1, 4 or 16 of them)
    rgb       = steps[k](rgb, numbers[n, k])   in order, in registers
    y         = finish(rgb)               Normalize; then the type and the memory order asked for

Weights of neighbours, colour steps and the finish are formulas of ``augment/``, which are passed as
Triton functions in :class:`Sampling` and :class:`Colouring`.

Bytes: the image is read once and the result written once; a table of some 100 bytes per image.
256×3×224² from uint8 to float16 moves 116 MB, which is 27 µs at 4.25 TB/s. Composed from torch's
operators it takes 21.9 times as long (bench/results/augment-h200.md): generated code has no gather
through a matrix.

Contrast needs the mean of the grey image before that step, a sum over all pixels of the result.
Where the batch fills the GPU, one program has a whole image: it goes through its pixels once for
the sum and once for the result, in one launch; the second time they come from the caches. Where
images are few and large, that would leave most of the GPU idle: a first, small launch then stores
sums of parts, and every program of the second adds those up in a fixed order. Both ways give the
same bits from run to run.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import INT32, Launchable

WHOLE = (1024, 16)  # pixels at a time, and warps, of a program that has a whole image
PIECE = (512, 8)  # the same of a program that has a piece of an image
PARTS = tl.constexpr(64)  # the most parts that a large image is split into
LOOPS = 4  # an image of no more blocks than this is never split


# Height and width of the image, rows and columns of the result; channels; numbers of the table per
# image; programs of an image, and pixels of each program; grey sums of an image.
Work = namedtuple(
    "Work", "height width rows columns channels table programs pixels sums", defaults=(0, 1)
)


class Sampling(NamedTuple):
    """How the image is read at a place. The first three are formulas as Triton functions.

    whole        a place in whole pixels, down or across: the one before it, or the nearest
    weights      how far a place is past that → the weights of its neighbours in that dimension
    hat          how far a pixel is from a place → its weight, where that is simpler to say
    neighbours   in one dimension: 0 where every pixel stays at its place, else 1, 2 or 4
    border       outside the image its edge goes on; else it is 0
    """

    whole: Any = None
    weights: Any = None
    hat: Any = None
    neighbours: int = 0
    border: bool = False
    projective: bool = False
    block: int = 0  # pixels that are computed together
    rgb: bool = False  # of three channels, else of one
    big: bool = False  # distances in memory take 64 bits

    def __hash__(self) -> int:  # called at each launch: hashing functions takes microseconds
        return hash(self[3:])


class Colouring(NamedTuple):
    """What becomes of a pixel: formulas as Triton functions.

    begin         a channel as it is stored → a number from 0 to 1
    steps         (r, g, b, mean of the grey image, three numbers of the table) → (r, g, b)
    grey          (r, g, b) → the grey of a pixel
    finish        (a channel, its scale, its shift) → what is stored
    mean_before   the step that needs the mean of the grey image, or −1
    """

    begin: Any
    steps: tuple[Any, ...]
    grey: Any
    finish: Any
    mean_before: int

    def __hash__(self) -> int:
        return hash((len(self.steps), self.mean_before))


@triton.jit
def place(row, i, j, work, PROJECTIVE: tl.constexpr):
    """Return where pixel (i, j) of the result lies in the image, down and across in pixels."""
    kind: tl.constexpr = row.dtype.element_ty
    u = (2.0 * j + 1.0) / work.columns.to(kind) - 1.0
    v = (2.0 * i + 1.0) / work.rows.to(kind) - 1.0
    px = tl.load(row) * u + tl.load(row + 3) * v + tl.load(row + 6)
    py = tl.load(row + 1) * u + tl.load(row + 4) * v + tl.load(row + 7)
    if PROJECTIVE:
        pw = tl.load(row + 2) * u + tl.load(row + 5) * v + tl.load(row + 8)
        px, py = px / pw, py / pw
    return ((py + 1.0) * work.height - 1.0) * 0.5, ((px + 1.0) * work.width - 1.0) * 0.5


@triton.jit
def within(p, length):
    """Return a place along one dimension, clamped to the image."""
    return tl.minimum(tl.maximum(p, 0.0), length - 1.0)


@triton.jit
def _neighbour(x, fy, fx, weight, rgb, live, work, strides, S: tl.constexpr):
    """Add the pixel at whole numbers (fy, fx) to a blend; outside it is 0, or the image's edge."""
    r, g, b = rgb
    if S.border:
        fy, fx = within(fy, work.height), within(fx, work.width)
        inside = live
    else:
        inside = live & (fy >= 0.0) & (fy < work.height) & (fx >= 0.0) & (fx < work.width)
    row, column = fy.to(tl.int32), fx.to(tl.int32)
    if S.big:
        row, column = row.to(tl.int64), column.to(tl.int64)
    at = x + row * strides[2] + column * strides[3]
    r += weight * tl.load(at, inside, 0).to(r.dtype)
    if S.rgb:
        g += weight * tl.load(at + strides[1], inside, 0).to(r.dtype)
        b += weight * tl.load(at + 2 * strides[1], inside, 0).to(r.dtype)
    return r, g, b


@triton.jit
def _pixels(
    x, row, pixel, live, mean, work, strides, UNTIL: tl.constexpr, S: tl.constexpr, C: tl.constexpr
):
    """Return these pixels of the result, after the first UNTIL colour steps."""
    kind: tl.constexpr = row.dtype.element_ty
    i, j = (pixel // work.columns).to(kind), (pixel % work.columns).to(kind)
    zero = tl.zeros(i.shape, kind)
    rgb = zero, zero, zero
    if S.neighbours == 0:
        rgb = _neighbour(x, i, j, 1.0, rgb, live, work, strides, S)
    else:
        py, px = place(row, i, j, work, S.projective)
        if S.border and S.neighbours < 4:  # four neighbours are clamped one by one
            py, px = within(py, work.height), within(px, work.width)
        y0, x0 = S.whole(py), S.whole(px)
        if S.neighbours == 1:
            rgb = _neighbour(x, y0, x0, 1.0, rgb, live, work, strides, S)
        else:
            wy, wx = S.weights(py - y0), S.weights(px - x0)
            for i in tl.static_range(S.neighbours):
                for j in tl.static_range(S.neighbours):
                    fy, fx = y0 + (i - S.neighbours // 4), x0 + (j - S.neighbours // 4)
                    rgb = _neighbour(x, fy, fx, wy[i] * wx[j], rgb, live, work, strides, S)
    r, g, b = C.begin(rgb[0]), C.begin(rgb[1]), C.begin(rgb[2])
    for k in tl.static_range(UNTIL):
        at = row + 9 + 3 * k  # after the matrix, three numbers for each step
        r, g, b = C.steps[k](r, g, b, mean, tl.load(at), tl.load(at + 1), tl.load(at + 2))
    return r, g, b


@triton.jit
def _grey_sum(x, row, first, last, work, strides, S: tl.constexpr, C: tl.constexpr):
    """Return the sum of the grey image whose mean a step needs, over pixels first … last − 1."""
    total = tl.zeros([S.block], row.dtype.element_ty)
    for start in range(first, last, S.block):
        pixel = start + tl.arange(0, S.block)
        live = pixel < last
        r, g, b = _pixels(x, row, pixel, live, 0.0, work, strides, C.mean_before, S, C)
        total += tl.where(live, C.grey(r, g, b), 0.0)
    return tl.sum(total)


@triton.jit
def _finished(v, normal, channel, channels, C: tl.constexpr):
    if normal is not None:
        at = normal + channel
        return C.finish(v, tl.load(at), tl.load(at + channels))
    else:
        return C.finish(v, 1.0, 0.0)


@triton.jit
def _augment(x, table, normal, sums, y, work, strides, to, S: tl.constexpr, C: tl.constexpr):
    """Fill pixels of one part of one image, in its three channels or, without rgb, in one channel.
    Without ``y`` store their grey sum in ``sums``."""
    kind: tl.constexpr = table.dtype.element_ty
    groups = 1 if S.rgb else work.channels
    image = tl.program_id(0) // work.programs
    n, channel = (image // groups).to(tl.int64), image % groups
    first, pixels = tl.program_id(0) % work.programs * work.pixels, work.rows * work.columns
    last = tl.minimum(first + work.pixels, pixels)
    row = table + n * work.table
    x += n * strides[0]
    if not S.rgb:
        x += channel.to(tl.int64) * strides[1]
    if y is None:
        total = _grey_sum(x, row, first, last, work, strides, S, C)
        tl.store(sums + tl.program_id(0), total)
    else:
        stored: tl.constexpr = y.dtype.element_ty
        y += n * to[0]
        if not S.rgb:
            y += channel.to(tl.int64) * to[1]
        mean = tl.zeros([], kind)
        if C.mean_before >= 0:
            if sums is not None:
                part = tl.arange(0, PARTS)
                mean = tl.sum(tl.load(sums + n * work.sums + part, part < work.sums, 0.0))
            else:
                mean = _grey_sum(x, row, 0, pixels, work, strides, S, C)
            mean = mean / pixels.to(kind)
        for start in range(first, last, S.block):
            pixel = start + tl.arange(0, S.block)
            live = pixel < last
            r, g, b = _pixels(x, row, pixel, live, mean, work, strides, len(C.steps), S, C)
            i, j = pixel // work.columns, pixel % work.columns
            if S.big:
                i, j = i.to(tl.int64), j.to(tl.int64)
            at = y + i * to[2] + j * to[3]
            tl.store(at, _finished(r, normal, channel, work.channels, C).to(stored), live)
            if S.rgb:
                tl.store(at + to[1], _finished(g, normal, 1, work.channels, C).to(stored), live)
                tl.store(at + 2 * to[1], _finished(b, normal, 2, work.channels, C).to(stored), live)


kernel = Launchable(_augment)


def for_tensors(sampling: Sampling, block: int, *tensors: torch.Tensor) -> Sampling:
    """Return ``sampling`` with what else the code depends on: pixels of a program, and the
    tensors."""
    span = max(
        sum((size - 1) * abs(s) for size, s in zip(t.shape[1:], t.stride()[1:], strict=True))
        for t in tensors
    )
    return sampling._replace(block=block, rgb=tensors[0].shape[1] == 3, big=span >= INT32)


def augment(
    x: torch.Tensor,
    table: torch.Tensor,
    y: torch.Tensor,
    sampling: Sampling,
    colouring: Colouring,
    normal: torch.Tensor | None,
    split: int | None = None,
) -> int:
    """Fill ``y`` [N, C, h, w] from images ``x`` [N, C, H, W]; return how many launches that took.

    ``table`` [N, columns] and ``normal`` [2, C] (scale, then shift) have the type that the kernel
    computes in. ``split`` forces the number of parts an image is summed in.
    """
    (n, channels), pixels = x.shape[:2], y.shape[2] * y.shape[3]
    needs_mean = colouring.mean_before >= 0
    parts = _parts(n, pixels, x.device, split) if needs_mean else 1
    sums, (block, warps) = None, WHOLE if needs_mean and parts == 1 else PIECE
    shape = (*x.shape[2:], *y.shape[2:], channels, table.stride(0))
    strides = (x.stride(), y.stride())
    code = {"S": for_tensors(sampling, block, x, y), "C": colouring, "warps": warps}
    if parts > 1:
        chunk = triton.cdiv(pixels, parts * block) * block
        parts = triton.cdiv(pixels, chunk)
        sums = torch.empty(n, parts, dtype=table.dtype, device=x.device)
        work = Work(*shape, parts, chunk)
        kernel((n * parts,), x, table, None, sums, None, work, *strides, **code)
    each = pixels if block == WHOLE[0] else block
    work = Work(*shape, triton.cdiv(pixels, each), each, parts)
    programs = n * work.programs * (1 if channels == 3 else channels)
    kernel((programs,), x, table, normal, sums, y, work, *strides, **code)
    return 1 if sums is None else 2


def _parts(images: int, pixels: int, device: torch.device, split: int | None) -> int:
    """Return in how many parts the grey of an image is summed; 1: by the program that has it."""
    if split is not None or device.type != "cuda":
        return split or 1
    blocks = triton.cdiv(pixels, WHOLE[0])
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    few = blocks > LOOPS and 2 * images < processors
    return min(PARTS.value, blocks) if few else 1
