"""The largest element of each window, where it stood, and the gradient.

    y[n, c, i, j] = max over taps (t, u) of x[n, c, i·s − p + t·d, j·s − p + u·d]
    dx[n, c, h, w] = Σ over the windows that (h, w) wins of their gradients

Ties go to the first tap, nan to the last, as in torch. What is kept of a winner is the number of
its tap, t · k + u, in a byte: an eighth of an index, and the gradient needs nothing else.

    bytes there = size · (x + y) + y for the taps;  back = size · (dx + grad) + y for the taps

A tile is [OUTER, INNER]: lines of an image and positions along them, or, where channels are
adjacent, positions and their channels. Few of a window's elements come from memory, the others were
read for its neighbours and are in the cache: what costs is the number of instructions. So taps are
written out, steps of two along a line are read and written as pairs, and a program has several rows
of windows, which share rows of x: what these come to along a window is found once.

Backwards a program takes cells of as many elements as a window moves on by, s × s: all elements of
a place in their cell lie at the same taps of the same windows, so a tap is compared with a constant
and a gradient is read once for a whole cell. Where there would be too many of these, an element
looks its windows up one by one. Nothing is added by atomics: two runs agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

Pair = tuple[int, int]
Strides = tuple[int, int, int, int]
UNROLLED = 32  # taps that are written out; more are gone through in a loop


@triton.constexpr_function
def _tap(place, window, stride, padding, dilation, kernel):
    """As which tap the ``place``-th element of a cell lies in a window so many cells on, or -1."""
    along = place + padding - window * stride
    inside = along >= 0 and along % dilation == 0 and along // dilation < kernel
    return along // dilation if inside else -1


@triton.jit
def _places(
    block, tall, wide, channels, lines, OUTER: tl.constexpr, INNER: tl.constexpr, LAST: tl.constexpr
):
    """Image, channel, row and column of a tile; of lines beyond the last, those of the last."""
    along = channels if LAST else wide
    blocks = tl.cdiv(along, INNER)
    outer = block // blocks * OUTER + tl.arange(0, OUTER)[:, None]
    inner = block % blocks * INNER + tl.arange(0, INNER)[None, :]
    live = (outer < lines) & (inner < along)
    outer = tl.minimum(outer, lines - 1)
    if LAST:
        rows = outer // wide
        return rows // tall, inner, rows % tall, outer % wide, live
    else:
        planes = outer // tall
        return planes // channels, planes % channels, outer % tall, inner, live


@triton.jit
def _far(n, c, i, j, sn, sc, sh, sw, STEP: tl.constexpr, LAST: tl.constexpr):
    """Where the lines of a tile begin, known to be multiples of STEP."""
    if LAST:
        far = n.to(tl.int64) * sn + i.to(tl.int64) * sh + j.to(tl.int64) * sw
    else:
        far = n.to(tl.int64) * sn + c.to(tl.int64) * sc + i.to(tl.int64) * sh
    return tl.multiple_of(far, (STEP, STEP))


@triton.jit
def _near(c, j, sc, sw, LAST: tl.constexpr, ADJACENT: tl.constexpr):
    """How far along a line elements are."""
    if LAST:
        return c if ADJACENT else c.to(tl.int64) * sc
    else:
        return j if ADJACENT else j.to(tl.int64) * sw


@triton.jit
def _whole(width, STEP: tl.constexpr):
    """A size that is known to be a multiple of STEP, so that masks hold for whole vectors."""
    return width // STEP * STEP


@triton.jit
def _steps(sh, sw, STEP: tl.constexpr, LAST: tl.constexpr):
    """Strides down and along in 64 bits, which steps of several rows may need; those from line to
    line known to be multiples of STEP."""
    sh, sw = sh.to(tl.int64), sw.to(tl.int64)
    return _whole(sh, STEP), _whole(sw, STEP) if LAST else sw


@triton.jit
def _take(best, tap, v, number, KEEP: tl.constexpr):
    """A tap of every window joins what was found before."""
    if KEEP:
        wins = (v > best) | (v != v)
        return tl.where(wins, v, best), tl.where(wins, number, tap)
    else:
        return tl.maximum(best, v, propagate_nan=tl.PropagateNan.ALL), tap


@triton.jit
def _read(at, inside, WIDE: tl.constexpr, KEEP: tl.constexpr):
    """A tap of every window; outside of x nothing wins. Numbers of bfloat16 that are selected are
    made wide by hand: the compiler, if it sees what they were, selects in 16 bits, and that takes
    longer. Where only the largest is wanted that is quicker."""
    v = tl.load(at, mask=inside, other=float("-inf"))
    if KEEP and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(WIDE)


@triton.jit
def _row(
    line,
    two,
    left,
    first,
    ahead,
    width,
    sw,
    KW: tl.constexpr,
    PW: tl.constexpr,
    DW: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BESIDE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The largest along one row of every window, and its tap in the row; ``first`` is the first one
    inside. PAIRS: of windows two apart, whose taps are read in pairs ``two``. BESIDE: whether taps
    one apart are next to each other in memory."""
    best, tap = float("-inf"), first
    if PAIRS:
        for e in tl.static_range(-PW // 2, (KW - PW + 1) // 2):
            at = two + 2 * e
            inside = ahead & (at < width)
            if e < 0:
                inside = inside & (at >= 0)
            v = _read(line + at, inside, WIDE, KEEP)
            one, other = tl.split(tl.reshape(v, (v.shape[0], v.shape[1] // 2, 2)))
            if 2 * e + PW == 0:
                best = one
            elif 2 * e + PW > 0:
                best, tap = _take(best, tap, one, 2 * e + PW, KEEP)
            if 2 * e + PW + 1 == 0:
                best = other
            elif 2 * e + PW + 1 < KW:
                best, tap = _take(best, tap, other, 2 * e + PW + 1, KEEP)
    else:
        for u in tl.static_range(KW):
            inside = ahead & (left + u * DW >= 0) & (left + u * DW < width)
            v = _read(line + (u * DW if BESIDE else u * DW * sw), inside, WIDE, KEEP)
            if u == 0:
                best = v
            else:
                best, tap = _take(best, tap, v, u, KEEP)
    return best, tap


@triton.jit
def _put(
    y,
    where,
    best,
    tap,
    out,
    live,
    top,
    left,
    width,
    KW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
):
    """What was found of every window."""
    if y is not None:
        tl.store(y + out, best.to(y.dtype.element_ty), mask=live)
    if where is not None:
        if where.dtype.element_ty == tl.int64:
            row, column = top + tap // KW * DH, left + tap % KW * DW
            tl.store(where + out, row.to(tl.int64) * width + column, mask=live)
        else:
            tl.store(where + out, tap.to(tl.uint8), mask=live)


@triton.jit
def _pool(
    x,
    y,
    where,
    channels,
    height,
    width,
    tall,
    wide,
    groups,
    lines,
    sn,
    sc,
    sh,
    sw,
    yn,
    yc,
    yh,
    yw,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    LAST: tl.constexpr,
    X_ADJACENT: tl.constexpr,
    X_STEP: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    Y_STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    WAY: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """y, unless it is None, and into ``where`` the numbers of the winning taps, or, if it is of
    64 bits, the winners' places in their planes. WAY: taps one by one ("taps"), those of windows
    two apart in pairs ("pairs"), or many, or far apart, in a loop ("loop"). A program has ROWS rows
    of windows for each of its lines, which are ``groups`` of rows: what the row of one window comes
    to it does not look at again for the next."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    KEEP: tl.constexpr = where is not None
    if LAST:
        channels = _whole(channels, LINE)
    else:
        wide = _whole(wide, LINE)
    n, c, group, j, live = _places(
        tl.program_id(0), groups, wide, channels, lines, OUTER, INNER, LAST
    )
    sh, sw = _steps(sh, sw, X_STEP, LAST)
    yh, yw = _steps(yh, yw, Y_STEP, LAST)
    width = _whole(width, WIDTH)
    i = group * ROWS
    top, left = i * SH - PH, j * SW - PW
    line = x + _far(n, c, tl.zeros_like(top), left, sn, sc, sh, sw, X_STEP, LAST)
    out = _far(n, c, i, j, yn, yc, yh, yw, Y_STEP, LAST) + _near(c, j, yc, yw, LAST, Y_ADJACENT)
    # before any tap: the first one inside
    first = tl.broadcast_to(tl.cdiv(tl.maximum(-left, 0), DW), (OUTER, INNER))
    two = tl.program_id(0) % tl.cdiv(wide, INNER) * (2 * INNER) + tl.arange(0, 2 * INNER)[None, :]
    ahead = c < channels if LAST else tl.full((1, 1), 1, tl.int1)
    if WAY != "pairs":
        line += _near(c, left, sc, sw, LAST, X_ADJACENT)
    if WAY == "loop":
        best = tl.full((OUTER, INNER), float("-inf"), WIDE)
        tap = first + tl.cdiv(tl.maximum(-top, 0), DH) * KW
        for t in range(KH):
            in_row = (top + t * DH >= 0) & (top + t * DH < height) & ahead
            at = line + (top + t * DH).to(tl.int64) * sh
            for u in range(KW):
                inside = in_row & (left + u * DW >= 0) & (left + u * DW < width)
                best, tap = _take(best, tap, _read(at, inside, WIDE, KEEP), t * KW + u, KEEP)
                at += DW * sw
        _put(y, where, best, tap, out, live, top, left, width, KW, DH, DW)
    else:
        rows, taps, downs = (), (), ()
        for t in tl.static_range((ROWS - 1) * SH + KH):
            # a row outside is the nearest one inside, which its window has as well
            row = tl.minimum(tl.maximum(top + t, 0), height - 1)
            best, tap = _row(
                line + row.to(tl.int64) * sh,
                two,
                left,
                first,
                ahead,
                width,
                sw,
                KW,
                PW,
                DW,
                WIDE,
                WAY == "pairs",
                X_ADJACENT and not LAST,
                KEEP,
            )
            rows, taps, downs = rows + (best,), taps + (tap,), downs + (row - top,)
        for r in tl.static_range(ROWS):
            best, tap = rows[r * SH], taps[r * SH] + (downs[r * SH] - r * SH) * KW
            for t in tl.static_range(r * SH + 1, r * SH + KH):
                number = taps[t] + (downs[t] - r * SH) * KW
                best, tap = _take(best, tap, rows[t], number, KEEP)
            inside = live if ROWS == 1 else live & (i + r < tall)
            at = out if r == 0 else out + r * yh
            _put(y, where, best, tap, at, inside, top + r * SH, left, width, KW, DH, DW)


@triton.jit
def _cells(
    grad,
    where,
    dx,
    channels,
    height,
    width,
    tall,
    wide,
    down,
    across,
    lines,
    gn,
    gc,
    gh,
    gw,
    yn,
    yc,
    yh,
    yw,
    sn,
    sc,
    sh,
    sw,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    OVER: tl.constexpr,
    ON: tl.constexpr,
    LAST: tl.constexpr,
    G_ADJACENT: tl.constexpr,
    G_STEP: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    Y_STEP: tl.constexpr,
    X_ADJACENT: tl.constexpr,
    X_STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    WINDOWS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """dx in cells of SH × SW, ``down`` × ``across`` of them. Elements of cell (i, j) lie in windows
    (i + UP, j + OVER) to (i + DOWN, j + ON)."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    if LAST:
        channels = _whole(channels, LINE)
    else:
        across, wide = _whole(across, LINE), _whole(wide, WINDOWS)
    n, c, i, j, live = _places(tl.program_id(0), down, across, channels, lines, OUTER, INNER, LAST)
    gh, gw = _steps(gh, gw, G_STEP, LAST)
    yh, yw = _steps(yh, yw, Y_STEP, LAST)
    sh, sw = _steps(sh, sw, X_STEP, LAST)
    ahead = c < channels if LAST else tl.full((1, 1), 1, tl.int1)
    g = grad + _far(n, c, i, j, gn, gc, gh, gw, G_STEP, LAST)
    g += _near(c, j, gc, gw, LAST, G_ADJACENT)
    w = where + _far(n, c, i, j, yn, yc, yh, yw, Y_STEP, LAST)
    w += _near(c, j, yc, yw, LAST, Y_ADJACENT)
    done = ()
    for a in tl.static_range(SH):
        for b in tl.static_range(SW):
            total = tl.zeros((OUTER, INNER), WIDE)
            for di in tl.static_range(UP, DOWN + 1):
                for dj in tl.static_range(OVER, ON + 1):
                    t, u = _tap(a, di, SH, PH, DH, KH), _tap(b, dj, SW, PW, DW, KW)
                    if t >= 0 and u >= 0:
                        inside = (i + di >= 0) & (i + di < tall) & (j + dj < wide) & ahead
                        if dj < 0:
                            inside = inside & (j + dj >= 0)
                        # equal reads are merged: no more than one for a window
                        from_g = g + di * gh + (dj if G_ADJACENT and not LAST else dj * gw)
                        from_w = w + di * yh + (dj if Y_ADJACENT and not LAST else dj * yw)
                        v = tl.load(from_g, mask=inside, other=0.0).to(WIDE)
                        winner = tl.load(from_w, mask=inside, other=255)
                        total += tl.where(winner == t * KW + u, v, 0.0)
            done = done + (total.to(dx.dtype.element_ty),)
    width = _whole(width, WIDTH)
    row, column = i * SH, j * SW
    out = dx + _far(n, c, row, column, sn, sc, sh, sw, X_STEP, LAST)
    if PAIRS:
        first = tl.program_id(0) % tl.cdiv(across, INNER) * (2 * INNER)
        two = first + tl.arange(0, 2 * INNER)[None, :]
        real = tl.program_id(0) // tl.cdiv(across, INNER) * OUTER + tl.arange(0, OUTER)[:, None]
        for a in tl.static_range(SH):
            pair = tl.reshape(tl.join(done[2 * a], done[2 * a + 1]), (OUTER, 2 * INNER))
            inside = (two < width) & (row + a < height) & (real < lines)
            tl.store(out + a * sh + two, pair, mask=inside)
    else:
        out += _near(c, column, sc, sw, LAST, X_ADJACENT)
        for a in tl.static_range(SH):
            for b in tl.static_range(SW):
                at = out + a * sh + (b if X_ADJACENT and not LAST else b * sw)
                inside = live & (row + a < height) & (column + b < width)
                tl.store(at, done[a * SW + b], mask=inside)


@triton.jit
def _each(
    grad,
    where,
    dx,
    channels,
    height,
    width,
    tall,
    wide,
    lines,
    gn,
    gc,
    gh,
    gw,
    yn,
    yc,
    yh,
    yw,
    sn,
    sc,
    sh,
    sw,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    LAST: tl.constexpr,
    X_ADJACENT: tl.constexpr,
    X_STEP: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """dx where every element goes through its windows, TALL × BROAD at most."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    n, c, row, column, live = _places(
        tl.program_id(0), height, width, channels, lines, OUTER, INNER, LAST
    )
    total = tl.zeros((OUTER, INNER), WIDE)
    for di in range(TALL):
        i = (row + PH) // SH - di
        down = row + PH - i * SH
        in_row = live & (i >= 0) & (i < tall) & (down % DH == 0) & (down < KH * DH)
        for dj in range(BROAD):
            j = (column + PW) // SW - dj
            along = column + PW - j * SW
            inside = in_row & (j >= 0) & (j < wide) & (along % DW == 0) & (along < KW * DW)
            from_g = _far(n, c, i, j, gn, gc, gh, gw, 1, LAST) + _near(c, j, gc, gw, LAST, False)
            from_w = _far(n, c, i, j, yn, yc, yh, yw, 1, LAST) + _near(c, j, yc, yw, LAST, False)
            v = tl.load(grad + from_g, mask=inside, other=0.0).to(WIDE)
            winner = tl.load(where + from_w, mask=inside, other=255)
            total += tl.where(winner == down // DH * KW + along // DW, v, 0.0)
    out = _far(n, c, row, column, sn, sc, sh, sw, X_STEP, LAST)
    out += _near(c, column, sc, sw, LAST, X_ADJACENT)
    tl.store(dx + out, total.to(dx.dtype.element_ty), mask=live)


pool, cells, each = Launchable(_pool), Launchable(_cells), Launchable(_each)


@dataclass(frozen=True)
class Windows:
    """An image [N, C, H, W] and the windows over it, ``out`` of them; all pairs are (down, along).
    Strides are those of x or of its gradient, ``out_strides`` those of the result."""

    shape: tuple[int, int, int, int]
    strides: Strides
    out: Pair
    out_strides: Strides
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def last(self) -> bool:
        """Whether a tile's lines are channels, which lie side by side."""
        return self.strides[1] == 1 and self.shape[1] > 1

    @property
    def constants(self) -> dict[str, Any]:
        """Of the windows, as all kernels take them."""
        names = ("K", "S", "P", "D")
        pairs = (self.kernel, self.stride, self.padding, self.dilation)
        found: dict[str, Any] = {"LAST": self.last}
        for name, (down, along) in zip(names, pairs, strict=True):
            found |= {f"{name}H": down, f"{name}W": along}
        return found

    def line(self, name: str, strides: Strides, most: int) -> dict[str, Any]:
        """What is known of a tensor's lines: whether elements lie side by side, and how many of
        them a thread may take at once: as many of all tensors, or they change hands."""
        n, c, h, w = strides
        inner, outer = (c, (n, h, w)) if self.last else (w, (n, c, h))
        return {f"{name}_ADJACENT": inner == 1, f"{name}_STEP": gcd(most, *outer)}

    def grid(self, size: Pair, tile: Tile) -> tuple[int, tuple[int]]:
        """Lines of tiles over ``size`` positions of each plane, and programs."""
        n, c, _, _ = self.shape
        lines = n * size[0] * (size[1] if self.last else c)
        return lines, (-(-lines // tile.outer) * -(-self.along(size) // tile.inner),)

    def along(self, size: Pair) -> int:
        """Elements of a line."""
        return self.shape[1] if self.last else size[1]

    @property
    def cells(self) -> Pair:
        """How many steps of the windows x has, down and along."""
        (_, _, height, width), (down, along) = self.shape, self.stride
        return -(-height // down), -(-width // along)

    @property
    def in_pairs(self) -> bool:
        """Whether x can be read or written two elements for a window."""
        return not self.last and self.strides[3] == 1 and self.stride[1] == 2

    @property
    def reach(self) -> tuple[Pair, Pair]:
        """The first and the last window, down and along, that a cell's elements lie in, counted
        from the cell."""
        each = zip(self.kernel, self.stride, self.padding, self.dilation, strict=True)
        down, along = ((-(((k - 1) * d - p) // s), (s - 1 + p) // s) for k, s, p, d in each)
        return down, along

    @property
    def shares_rows(self) -> bool:
        """Whether a window reads rows that the one above it reads, too."""
        return self.kernel[0] > self.stride[0]

    @property
    def in_cells(self) -> bool:
        """Whether taps are few enough to be written out."""
        return self.taps <= UNROLLED and self.stride[0] * self.stride[1] <= 16


@dataclass(frozen=True)
class Tile:
    """Lines, elements of each, and warps of a program; and forwards rows of windows for a line."""

    outer: int
    inner: int
    warps: int
    rows: int = 1


def forward(
    windows: Windows, size: int, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], None]:
    """``run(x, y, where)`` for elements of ``size`` bytes: see :func:`_pool`."""
    w = windows
    in_pairs = w.in_pairs and w.dilation[1] == 1 and w.kernel[1] > 1
    way = "loop" if w.taps > UNROLLED or w.dilation[0] > 1 else "pairs" if in_pairs else "taps"
    rows = tile.rows if w.shares_rows and way != "loop" else 1
    groups = -(-w.out[0] // rows)
    lines, grid = w.grid((groups, w.out[1]), tile)
    numbers = (*w.shape[1:], *w.out, groups, lines, *w.strides, *w.out_strides)
    vector = 16 // size
    of_y = vector // 2 if way == "pairs" else vector if w.last or w.stride[1] == 1 else 1
    constants = w.constants | w.line("X", w.strides, vector) | w.line("Y", w.out_strides, of_y)
    constants |= {
        "WIDTH": gcd(16, w.shape[3]),
        "LINE": gcd(16, w.along(w.out)),
        "WAY": way,
        "ROWS": rows,
        "OUTER": tile.outer,
        "INNER": tile.inner,
    }

    def run(x: torch.Tensor, y: torch.Tensor | None, where: torch.Tensor | None) -> None:
        pool(grid, x, y, where, *numbers, warps=tile.warps, **constants)

    return run


def backward(
    windows: Windows, grad_strides: Strides, size: int, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """``run(grad, where, dx)``, with the numbers of the winning taps."""
    w = windows
    strides, vector = (*grad_strides, *w.out_strides, *w.strides), 16 // size
    constants = w.constants | w.line("X", w.strides, vector)
    constants |= {"OUTER": tile.outer, "INNER": tile.inner}
    if w.in_cells:
        kernel, positions = cells, w.cells
        some = vector // 2 if w.in_pairs else vector if w.last or w.stride[1] == 1 else 1
        constants |= w.line("G", grad_strides, some) | w.line("Y", w.out_strides, some)
        (up, down), (over, on) = w.reach
        constants |= {
            "UP": up,
            "DOWN": down,
            "OVER": over,
            "ON": on,
            "PAIRS": w.in_pairs,
            "WIDTH": gcd(16, w.shape[3]),
            "LINE": gcd(16, w.along(w.cells)),
            "WINDOWS": gcd(16, w.out[1]),
        }
    else:
        kernel, positions = each, w.shape[2:]
        spans = zip(w.kernel, w.dilation, w.stride, strict=True)
        tall, broad = (-(-((k - 1) * d + 1) // s) for k, d, s in spans)
        constants |= {"TALL": tall, "BROAD": broad}
    lines, grid = w.grid(positions, tile)
    some_cells = w.cells if w.in_cells else ()
    numbers = (*w.shape[1:], *w.out, *some_cells, lines, *strides)

    def run(grad: torch.Tensor, where: torch.Tensor, dx: torch.Tensor) -> None:
        kernel(grid, grad, where, dx, *numbers, warps=tile.warps, **constants)

    return run
