"""Batch normalisation for training in Triton, with a residual and an activation: the kernels.

    forward     z = (x − mean) · rstd · weight + bias + residual        y = act(z)
    gradient    dz = grad · act′(z)       dbias = Σ dz       dweight = rstd · Σ dz · (x − mean)
                dx = weight · rstd · (dz − Σ dz / n − (x − mean) · rstd² · Σ dz · (x − mean) / n)

Bytes, in tensors of the size of x: forward reads x, then x (and the residual) and writes y: 3 (4).
The gradient reads grad and x, then both again, and writes dx: 5. With a residual it reads grad, x
and y, writes dz, which is the residual's gradient, then reads dz and x and writes dx: 7; for relu
the signs of y are enough, which the forward step keeps as bits: 6 and a little. The first pass of
the gradient can write y once more: 1, or with a residual, which it then reads, 2.

x is seen as tiles of [A rows, B lanes], as ``batch_norm_tiles.py`` says. Every element of a tile
keeps its own running mean and squared spread (Welford) over the tiles that a program visits; rows,
then programs, are merged with Chan's formula. All means are kept relative to a pivot: of the
channel's first values the one nearest to 0, or 0 if they lie on both sides of it. It is never much
larger than the mean, so a mean near 0 is not the small difference of two large numbers, and where
it is a thousand times the deviation the pivot takes that away. If the pivot lies far off,
statistics are still as exact as Welford's. There are no atomics: two runs give the same bits.

The first pass goes through the tiles upwards, the second downwards: what the first one read last is
still in L2. A small x takes one launch, where each program has all rows of its channels. Where the
GPU can (CHAIN), the merge and the second pass are launched at once and wait for their turn on the
multiprocessors: a launch costs more than a merge.

Against generated code, which takes a kernel for the statistics, one for y, and for the gradient one
for each sum and for dx: on an H200 forward and backward with relu 1.2 to 1.45 times as fast as
torch.compile, with a residual 1.27 to 1.7 times (bench/results/batch_norm-h200.md).
"""

from collections import namedtuple

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import enter

SAMPLES = tl.constexpr(8)  # values of a channel that its pivot is chosen from


# What kernels read and write; None where there is nothing, or where it is not wanted. parts: of
# each program two numbers for each channel; counts: how many values each part is made of; means: Σ
# dz / n and rstd² · Σ dz · (x − mean) / n of each channel; again: y, which the gradient makes once
# more.
Operands = namedtuple(
    "Operands",
    "x y residual signs weight bias mean rstd running_mean running_var new_mean new_var "
    "grad dz dx dweight dbias parts counts means again",
    defaults=(None,) * 20,
)

# rows: of x; tiles: in a block; channels; units: lanes / V. How x is dealt to programs: across:
# tiles over the positions of a channel (None: one); blocks; splits: programs that share a block in
# the first pass; pieces: parts of a channel; each, groups: tiles of a program, and programs of a
# block, in the second pass.
Size = namedtuple(
    "Size",
    "rows tiles channels units across blocks splits pieces each groups",
    defaults=(None,) * 6,
)

# The share of this batch in running statistics, n / (n − 1), eps, and n or its reciprocal.
Numbers = namedtuple("Numbers", "share unbiased eps count")

# Constants. LAST: channels are the lanes; tiles have A rows by B lanes, of which V may be one
# access; WIDE: offsets need 64 bits; CHAIN: the next kernel is launched before this one has ended.
Tile = namedtuple("Tile", "LAST A B V STAGES WIDE CHAIN")

# (x − mean) · scale + shift, for each channel of a block.
Affine = namedtuple("Affine", "mean scale shift")


# ---- places ------------------------------------------------------------------------------------


@triton.jit
def _channel(block, size, C: tl.constexpr):
    """Return the channels of a block: one for each lane, or a single one."""
    if C.LAST:
        return block * C.B + tl.arange(0, C.B)[None, :]
    elif size.across is None:
        return block
    else:
        return block // size.across


@triton.jit
def _places(t, block, units, size, C: tl.constexpr, B: tl.constexpr, V: tl.constexpr):
    """Return offsets of tile t of a block, and which of its rows and lanes exist. The number of
    lanes is given as units · V, so that the compiler sees how many elements may be one access."""
    lanes = units * V
    row = t * C.A + tl.arange(0, C.A)[:, None]
    if C.LAST:
        lane = block * B + tl.arange(0, B)[None, :]
        at = row * lanes + lane
    else:
        lane = tl.arange(0, B)[None, :]
        if size.across is not None:
            lane += block % size.across * B
        at = (row * size.channels + _channel(block, size, C)) * lanes + lane
    return at, row < size.rows, lane < lanes


@triton.jit
def _tile(t, block, size, C: tl.constexpr):
    """Return offsets of tile t of a block, and which of its elements exist."""
    at, row, lane = _places(t, block, size.units, size, C, C.B, C.V)
    return at, row & lane


@triton.jit
def _bytes(t, block, size, C: tl.constexpr):
    """The same for the signs of a tile, eight lanes to a byte. A row of lanes begins with a byte of
    its own."""
    if C.V >= 8:
        at, row, byte = _places(t, block, size.units, size, C, C.B // 8, C.V // 8)
    else:
        at, row, byte = _places(t, block, (size.units * C.V + 7) // 8, size, C, C.B // 8, 1)
    return at, row & byte


@triton.jit
def _start(size, C: tl.constexpr):
    """Return which part of the rows and which block a program has; int64 where offsets need it."""
    program = tl.program_id(0)
    if C.WIDE:
        program = program.to(tl.int64)
    return program // size.blocks, program % size.blocks


@triton.jit
def _number(of, c, size, default: tl.constexpr):
    """Load a number for each channel, or return a default where the tensor is left out."""
    if of is None:
        return default
    else:
        return tl.load(of + c, mask=c < size.channels, other=0.0).to(tl.float32)


@triton.jit
def _affine(t, c, size):
    scale = _number(t.rstd, c, size, 0.0) * _number(t.weight, c, size, 1.0)
    return Affine(_number(t.mean, c, size, 0.0), scale, _number(t.bias, c, size, 0.0))


@triton.jit
def _total(v, C: tl.constexpr):
    """Return the sum over a tile for each channel."""
    if C.LAST:
        return tl.sum(v, 0, keep_dims=True)
    else:
        return tl.sum(tl.sum(v, 1), 0)


@triton.jit
def _keep_part(t, split, block, first, second, size, C: tl.constexpr):
    """Store two numbers for each channel of a block, as one program's part; return its number."""
    c = _channel(block, size, C)
    part = split
    if not C.LAST:
        part = split * size.across + block % size.across
    there = c < size.channels
    tl.store(t.parts + part * size.channels + c, first, mask=there)
    tl.store(t.parts + (size.pieces + part) * size.channels + c, second, mask=there)
    return part


# ---- the statistics ------------------------------------------------------------------------------


@triton.jit
def _pivot(x, c, size, C: tl.constexpr):
    """Return, for each channel, the number nearest to 0 between the least and the largest of its
    first values. They are compared one after another: nothing crosses threads."""
    lanes = size.units * C.V
    there = c < size.channels
    for k in tl.static_range(SAMPLES):
        if C.LAST:
            at, row = k * lanes + c, k
        else:
            row = k // lanes
            at = (row * size.channels + c).to(tl.int64) * lanes + k % lanes
        v = tl.load(x + at, mask=there & (row < size.rows), other=0.0).to(tl.float32)
        if k == 0:
            least, most = v, v
        else:
            v = tl.where(row < size.rows, v, least)
            least, most = tl.minimum(least, v), tl.maximum(most, v)
    pivot = tl.where(least > 0.0, least, tl.where(most < 0.0, most, 0.0))
    return tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)


@triton.jit
def _statistics(x, first, step, block, size, C: tl.constexpr):
    """Return count, mean relative to the pivot, and squared spread per channel over the tiles
    first, first + step, …"""
    pivot = _pivot(x, _channel(block, size, C), size, C)
    mean = tl.zeros((C.A, C.B), tl.float32)
    spread = tl.zeros((C.A, C.B), tl.float32)
    seen = 0.0
    for t in tl.range(first, size.tiles, step, num_stages=C.STAGES):
        at, inside = _tile(t, block, size, C)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - pivot
        seen += 1.0
        off = tl.where(inside, v - mean, 0.0)
        mean += off * (1.0 / seen)
        spread += off * (v - mean)
    last = first + (size.tiles - 1 - first) // step * step
    _, row, lane = _places(last, block, size.units, size, C, C.B, C.V)
    visits = tl.where(lane, seen - tl.where(row, 0.0, 1.0), 0.0)  # only the last tile has gaps
    count = _total(visits, C)
    centre = _total(visits * mean, C) / count
    away = mean - centre
    return count, centre, _total(spread + visits * away * away, C)


@triton.jit
def _learn(t, c, mean, var, n, size):
    """Store the statistics of this batch and the running ones after it; return 1/√(var + eps).
    Where squares overflowed that is nan: 0 would make y equal to its bias."""
    there, keep = c < size.channels, 1.0 - n.share
    rstd = tl.where(var == float("inf"), float("nan"), 1.0 / tl.sqrt(var + n.eps))
    tl.store(t.mean + c, mean, mask=there)
    tl.store(t.rstd + c, rstd, mask=there)
    if t.new_mean is not None:
        moved = mean
        if t.running_mean is not None:
            moved = keep * _number(t.running_mean, c, size, 0.0) + n.share * mean
        tl.store(t.new_mean + c, moved, mask=there)
    if t.new_var is not None:
        grown = var * n.unbiased
        if t.running_var is not None:
            grown = keep * _number(t.running_var, c, size, 0.0) + n.share * grown
        tl.store(t.new_var + c, grown, mask=there)
    return rstd


# ---- what is done with a tile --------------------------------------------------------------------


@triton.jit
def _normalise(t, i, block, f, size, C: tl.constexpr, ACT: tl.constexpr):
    """Store y of tile i and, if they are wanted, the signs after relu: one bit for each element, 1
    where relu's gradient passes. Eight neighbouring lanes make a byte that no other program writes;
    bits beyond the end are 0."""
    at, inside = _tile(i, block, size, C)
    z = tl.load(t.x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    z = (z - f.mean) * f.scale + f.shift
    if t.residual is not None:
        z += tl.load(t.residual + at, mask=inside, other=0.0).to(tl.float32)
    if ACT is not None:
        z = ACT(z)
    y = z.to(t.y.dtype.element_ty)
    tl.store(t.y + at, y, mask=inside)
    if t.signs is not None:
        at, there = _bytes(i, block, size, C)
        kept = tl.where(inside & ~(y <= 0.0), 1, 0)
        bits = tl.reshape(kept, C.A, C.B // 8, 8) << tl.arange(0, 8)[None, None, :]
        tl.store(t.signs + at, tl.sum(bits, 2).to(tl.uint8), mask=there)


@triton.jit
def _before(t, i, block, at, inside, f, size, C: tl.constexpr, SLOPE: tl.constexpr):
    """Return the gradient before the activation, dz, and x − mean, of tile i."""
    g = tl.load(t.grad + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(t.x + at, mask=inside, other=0.0).to(tl.float32) - f.mean
    if t.signs is not None:
        here, there = _bytes(i, block, size, C)
        byte = tl.load(t.signs + here, mask=there, other=0).to(tl.int32)
        bits = (byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        g = tl.where(tl.reshape(bits, C.A, C.B) == 0, 0.0, g)
    if SLOPE is not None:
        if t.y is not None:
            z = tl.load(t.y + at, mask=inside, other=0.0).to(tl.float32)
        else:
            z = v * f.scale + f.shift
            if t.residual is not None:
                z += tl.load(t.residual + at, mask=inside, other=0.0).to(tl.float32)
        g = SLOPE(g, z)
    return g, v


@triton.jit
def _sums(
    t, first, step, block, f, size, C: tl.constexpr, SLOPE: tl.constexpr, ACT: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Return Σ dz and Σ dz · (x − mean) per channel over the tiles first, first + step, … If dz
    will be read AGAIN, these are sums of its rounded values, or dx would not sum to 0."""
    plain = tl.zeros((C.A, C.B), tl.float32)
    along = tl.zeros((C.A, C.B), tl.float32)
    for i in tl.range(first, size.tiles, step, num_stages=C.STAGES):
        at, inside = _tile(i, block, size, C)
        g, v = _before(t, i, block, at, inside, f, size, C, SLOPE)
        if t.dz is not None:
            rounded = g.to(t.dz.dtype.element_ty)
            tl.store(t.dz + at, rounded, mask=inside)
            if AGAIN:
                g = rounded.to(tl.float32)
        if t.again is not None:
            z = v * f.scale + f.shift
            if t.residual is not None:
                z += tl.load(t.residual + at, mask=inside, other=0.0).to(tl.float32)
            if ACT is not None:
                z = ACT(z)
            tl.store(t.again + at, z.to(t.again.dtype.element_ty), mask=inside)
        g = tl.where(inside, g, 0.0)
        plain += g
        along += g * tl.where(inside, v, 0.0)
    return _total(plain, C), _total(along, C)


@triton.jit
def known_means(t, c, size):
    """Load Σ dz / n and rstd² · Σ dz · (x − mean) / n of channels."""
    return _number(t.means, c, size, 0.0), _number(t.means + size.channels, c, size, 0.0)


@triton.jit
def pulled(t, i, block, at, inside, f, means, size, C: tl.constexpr, SLOPE: tl.constexpr):
    """Return dx of tile i, from dz if that was written, else from grad once more."""
    if t.dz is not None:
        g = tl.load(t.dz + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(t.x + at, mask=inside, other=0.0, eviction_policy="evict_first")
        v = v.to(tl.float32) - f.mean
    else:
        g, v = _before(t, i, block, at, inside, f, size, C, SLOPE)
    return f.scale * (g - means[0] - v * means[1])


# ---- kernels: everything in one launch ---------------------------------------------------------


@triton.jit
def forward_once(t, n, size, C: tl.constexpr, ACT: tl.constexpr):
    """A program owns its channels: statistics over all rows, then all rows once more."""
    block = tl.program_id(0)
    c = _channel(block, size, C)
    count, mean, spread = _statistics(t.x, 0, 1, block, size, C)
    mean += _pivot(t.x, c, size, C)
    rstd = _learn(t, c, mean, spread / count, n, size)
    scale = rstd * _number(t.weight, c, size, 1.0)
    f = Affine(mean, scale, _number(t.bias, c, size, 0.0))
    for i in tl.range(0, size.tiles):
        _normalise(t, size.tiles - 1 - i, block, f, size, C, ACT)


@triton.jit
def backward_once(t, n, size, C: tl.constexpr, SLOPE: tl.constexpr, ACT: tl.constexpr):
    """The same for the gradient. dz, where it is wanted, is written and not read again."""
    block = tl.program_id(0)
    c = _channel(block, size, C)
    f = _affine(t, c, size)
    rstd = _number(t.rstd, c, size, 0.0)
    plain, along = _sums(t, 0, 1, block, f, size, C, SLOPE, ACT, False)
    if t.dweight is not None:
        tl.store(t.dweight + c, along * rstd, mask=c < size.channels)
    if t.dbias is not None:
        tl.store(t.dbias + c, plain, mask=c < size.channels)
    if t.dx is not None:
        centre, lean = plain * n.count, along * rstd * rstd * n.count
        for k in tl.range(0, size.tiles):
            i = size.tiles - 1 - k
            at, inside = _tile(i, block, size, C)
            g, v = _before(t, i, block, at, inside, f, size, C, SLOPE)
            tl.store(t.dx + at, f.scale * (g - centre - v * lean), mask=inside)


# ---- kernels: a pass over x, a merge, a second pass --------------------------------------------


@triton.jit
def forward_statistics(t, size, C: tl.constexpr):
    """Store parts: mean relative to the pivot and squared spread of each program's rows."""
    enter(C.CHAIN, True)
    split, block = _start(size, C)
    count, mean, spread = _statistics(t.x, split, size.splits, block, size, C)
    c = _channel(block, size, C)
    part = _keep_part(t, split, block, mean, spread, size, C)
    tl.store(t.counts + part + 0 * c, count, mask=c == 0)


@triton.jit
def forward_merge(t, n, size, C: tl.constexpr):
    """Merge the parts of B channels, A at a time, by Chan's formula. If the kernel that made x took
    its statistics (x is None), their means are not relative to a pivot, and the mean of the first
    part serves as the pivot."""
    enter(C.CHAIN, False)
    c = (tl.program_id(0) * C.B + tl.arange(0, C.B))[None, :]
    if t.x is None:
        pivot = _number(t.parts, c, size, 0.0)
        above = pivot
    else:
        pivot = _pivot(t.x, c, size, C)
        above = 0.0
    p = tl.arange(0, C.A)[:, None]
    sums = tl.zeros((C.A, C.B), tl.float32)
    for first in tl.range(0, size.pieces, C.A):
        inside = (first + p < size.pieces) & (c < size.channels)
        count = tl.load(t.counts + first + p, mask=first + p < size.pieces, other=0.0)
        at = t.parts + (first + p) * size.channels + c
        sums += count * (tl.load(at, mask=inside, other=0.0) - above)
    mean = tl.sum(sums, 0, keep_dims=True) / n.count
    sums = tl.zeros((C.A, C.B), tl.float32)
    for first in tl.range(0, size.pieces, C.A):
        inside = (first + p < size.pieces) & (c < size.channels)
        count = tl.load(t.counts + first + p, mask=first + p < size.pieces, other=0.0)
        at = t.parts + (first + p) * size.channels + c
        away = tl.load(at, mask=inside, other=0.0) - above - mean
        spread = tl.load(at + size.pieces * size.channels, mask=inside, other=0.0)
        sums += tl.where(inside, spread + count * away * away, 0.0)
    var = tl.sum(sums, 0, keep_dims=True) / n.count
    _learn(t, c, mean + pivot, var, n, size)


@triton.jit
def forward_apply(t, size, C: tl.constexpr, ACT: tl.constexpr):
    """Compute y of ``each`` tiles in a row, the last tiles of x first."""
    enter(C.CHAIN, False)
    split, block = _start(size, C)
    first = (size.groups - 1 - split) * size.each
    f = _affine(t, _channel(block, size, C), size)
    for i in tl.range(first, tl.minimum(first + size.each, size.tiles), num_stages=C.STAGES):
        _normalise(t, i, block, f, size, C, ACT)


@triton.jit
def backward_sums(t, size, C: tl.constexpr, SLOPE: tl.constexpr, ACT: tl.constexpr):
    """Store parts: Σ dz and Σ dz · (x − mean) of each program's rows."""
    enter(C.CHAIN, True)
    split, block = _start(size, C)
    f = _affine(t, _channel(block, size, C), size)
    plain, along = _sums(t, split, size.splits, block, f, size, C, SLOPE, ACT, True)
    _keep_part(t, split, block, plain, along, size, C)


@triton.jit
def backward_merge(t, n, size, C: tl.constexpr):
    """Add up the parts of B channels, A at a time, and store what the second pass needs."""
    enter(C.CHAIN, False)
    c = (tl.program_id(0) * C.B + tl.arange(0, C.B))[None, :]
    p = tl.arange(0, C.A)[:, None]
    there = c < size.channels
    plain = tl.zeros((C.A, C.B), tl.float32)
    along = tl.zeros((C.A, C.B), tl.float32)
    for first in tl.range(0, size.pieces, C.A):
        inside = (first + p < size.pieces) & there
        at = t.parts + (first + p) * size.channels + c
        plain += tl.load(at, mask=inside, other=0.0)
        along += tl.load(at + size.pieces * size.channels, mask=inside, other=0.0)
    rstd = _number(t.rstd, c, size, 0.0)
    dz, lean = tl.sum(plain, 0, keep_dims=True), tl.sum(along, 0, keep_dims=True) * rstd
    if t.dweight is not None:
        tl.store(t.dweight + c, lean, mask=there)
    if t.dbias is not None:
        tl.store(t.dbias + c, dz, mask=there)
    tl.store(t.means + c, dz * n.count, mask=there)
    tl.store(t.means + size.channels + c, lean * rstd * n.count, mask=there)


@triton.jit
def backward_apply(t, size, C: tl.constexpr, SLOPE: tl.constexpr):
    """Compute dx of ``each`` tiles in a row, the last tiles of x first."""
    enter(C.CHAIN, False)
    split, block = _start(size, C)
    first = (size.groups - 1 - split) * size.each
    c = _channel(block, size, C)
    f = _affine(t, c, size)
    m = known_means(t, c, size)
    for i in tl.range(first, tl.minimum(first + size.each, size.tiles), num_stages=C.STAGES):
        at, inside = _tile(i, block, size, C)
        tl.store(t.dx + at, pulled(t, i, block, at, inside, f, m, size, C, SLOPE), mask=inside)
