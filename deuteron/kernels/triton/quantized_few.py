"""y = f(x · wᵀ, …) of few rows, with w[n, k] = (q[n, k] − zero) · scale: as ``quantized.py``, but
numbers never see shared memory.

Up to 8 rows (16 in two halves) take as long as the weight takes to read, K·N / 2 bytes of 4 bits,
if what is done for each number takes less. So every thread reads 16 bytes of a row, 32 numbers of 4
bits or 16 of 8, which the matrix units multiply out of its registers: they add up steps of a sum in
any order, so the order is the one in which numbers come apart, and x, which is small, is put in it.
A word of eight numbers is four pairs by a shift and one logical operation each: 0x4300 | q is
128 + q in bfloat16, 0x6400 | q is 1024 + q in float16.

What is too much in every factor, 128 or 1024, is taken away from the sums, as a zero is: that times
the sum of x, which the matrix units make as well. Sums of infinite x would be nan then. Where a
result is not finite, the program starts again with factors that are exact.

Warps of a program share out the sum, and a program makes the columns of one to four times 16 rows
of the weight; there is no second kernel.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import Follows
from deuteron.kernels.triton.product_hopper import finish

# Rows and columns of the result, steps of the sum, words of a line of the weight, and how many
# groups it has.
Sizes = namedtuple("Sizes", "rows columns steps line groups")
# Rows of x (8 or 16), columns of a program (16, 32 or 64), warps, how many times 128 steps are read
# before any is multiplied, whether the next are on their way meanwhile, how many times 128 steps
# share a scale, the bits of a number, and whether warps have equal parts of the sum.
Tile = namedtuple("Tile", "rows columns warps count ahead times bits even")
STEPS = gl.constexpr(128)


# ---- numbers out of words


@gluon.jit
def _halves(both, KIND: gl.constexpr):
    low = (both & 0xFFFF).to(gl.uint16).to(KIND, bitcast=True)
    high = (both.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(KIND, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _nibbles(word, KIND: gl.constexpr, EXACT: gl.constexpr):
    """Of a word its eight numbers, [half, two, two]."""
    ONES: gl.constexpr = "0x43004300" if KIND == gl.bfloat16 else "0x64006400"
    a, b, c, d = gl.inline_asm_elementwise(
        "{ .reg .b32 m, o, t, u, v; mov.b32 m, 0x000F000F; mov.b32 o, " + ONES + ";"
        "shr.u32 t, $4, 4; shr.u32 u, $4, 8; shr.u32 v, $4, 12;"
        "lop3.b32 $0, $4, m, o, 0xEA; lop3.b32 $1, t, m, o, 0xEA;"
        "lop3.b32 $2, u, m, o, 0xEA; lop3.b32 $3, v, m, o, 0xEA; }",
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    first = gl.join(_halves(a, KIND), _halves(b, KIND))
    found = gl.join(first, gl.join(_halves(c, KIND), _halves(d, KIND)))
    if EXACT:
        found = (found.to(gl.float32) - _too_much(4, KIND, False)).to(KIND)
    return found


@gluon.jit
def _two_words(ASM: gl.constexpr, word, KIND: gl.constexpr):
    """The halves of both words that instructions make of one."""
    a, b = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(_halves(a, KIND), _halves(b, KIND))


@gluon.jit
def _bytes(word, KIND: gl.constexpr, EXACT: gl.constexpr):
    """Of a word its four numbers, [half, two]. bfloat16 has 8 bits of them only as a difference:
    128 + the lower seven, less 128 or 256 by the sign."""
    if KIND == gl.bfloat16:
        found = _two_words(
            "{ .reg .b32 m, n, o, p, i, t, u, v; mov.b32 m, 0x007F007F; mov.b32 n, 0x00800080;"
            "mov.b32 o, 0x43004300; mov.b32 p, 0xC300C300; mov.b32 i, 0x3F803F80;"
            "shr.u32 t, $2, 8; lop3.b32 $0, $2, m, o, 0xEA; lop3.b32 u, $2, n, p, 0xEA;"
            "lop3.b32 $1, t, m, o, 0xEA; lop3.b32 v, t, n, p, 0xEA;"
            "fma.rn.bf16x2 $0, $0, i, u; fma.rn.bf16x2 $1, $1, i, v; }",
            word,
            KIND,
        )
    else:
        found = _two_words(
            "{ .reg .b32 m, o, t, u; mov.b32 m, 0x00FF00FF; mov.b32 o, 0x64006400;"
            "xor.b32 t, $2, 0x80808080; shr.u32 u, t, 8;"
            "lop3.b32 $0, t, m, o, 0xEA; lop3.b32 $1, u, m, o, 0xEA; }",
            word,
            KIND,
        )
        if EXACT:
            found = (found.to(gl.float32) - _too_much(8, KIND, False)).to(KIND)
    return found


@gluon.constexpr_function
def _too_much(bits, kind, exact):
    """How much larger factors are than q less the number that stands for 0."""
    if exact or (bits == 8 and kind == gl.bfloat16):
        return 0
    return (136 if kind == gl.bfloat16 else 1032) if bits == 4 else 1152


# ---- where threads have what


@gluon.constexpr_function
def _of_words(warps, columns, bits):
    """A thread of each four has 16 bytes of a row of the weight at a time."""
    along = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    down = [[0, 8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    more = [[0, 0, 16]] if bits == 8 else []
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    held = [[0, 0, 1], [0, 0, 2], *more, *down]
    return gl.DistributedLinearLayout(held, lanes, along, [], [warps, columns, 4 * bits])


@gluon.constexpr_function
def _of_x(warps, rows, bits):
    """The numbers of x that belong to those words."""
    along = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    each = 128 // bits  # numbers side by side
    held = [[0, 0, 1 << i] for i in range(each.bit_length() - 1)]
    held += [[0, 0, 64]] if bits == 8 else []
    held += [[0, 8, 0]] if rows == 16 else []
    lanes = [[0, 0, each], [0, 0, 2 * each], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(held, lanes, along, [], [warps, rows, 128])


@gluon.constexpr_function
def _of_sums(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _left(word, KIND: gl.constexpr, T: gl.constexpr, MMA: gl.constexpr, EXACT: gl.constexpr):
    """Numbers of 128 steps as the first factor: in the order of words, pairs, threads, halves."""
    if T.bits == 4:
        found = _nibbles(word, KIND, EXACT).reshape(T.warps, T.columns, 4, 4, 2, 2, 2)
        found = found.permute(0, 1, 3, 6, 5, 2, 4)
    else:
        found = _bytes(word, KIND, EXACT).reshape(T.warps, T.columns, 2, 4, 4, 2, 2)
        found = found.permute(0, 1, 2, 4, 6, 3, 5)
    found = found.reshape(T.warps, T.columns, STEPS)
    return gl.convert_layout(found, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _right(x, T: gl.constexpr, MMA: gl.constexpr):
    """x in that order, as the second factor."""
    if T.bits == 4:
        found = x.reshape(T.warps, T.rows, 4, 4, 2, 2, 2).permute(0, 3, 5, 6, 2, 4, 1)
    else:
        found = x.reshape(T.warps, T.rows, 2, 4, 4, 2, 2).permute(0, 2, 4, 6, 3, 5, 1)
    found = found.reshape(T.warps, STEPS, T.rows)
    return gl.convert_layout(found, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _summed_x(x, T: gl.constexpr, MMA: gl.constexpr):
    """The sums of x, the same for every column."""
    ones = gl.full([T.warps, 16, STEPS], 1.0, x.dtype, gl.DotOperandLayout(0, MMA, 2))
    found = mma_v2(ones, x, gl.zeros((T.warps, 16, T.rows), gl.float32, MMA))
    if T.columns >= 32:
        found = gl.join(found, found).permute(0, 3, 1, 2).reshape(T.warps, 32, T.rows)
    if T.columns >= 64:
        found = gl.join(found, found).permute(0, 3, 1, 2).reshape(T.warps, 64, T.rows)
    return gl.convert_layout(found, MMA, assert_trivial=True)


# ---- sums


@gluon.jit
def _asked(at, step, COUNT: gl.constexpr, T: gl.constexpr, ZEROS: gl.constexpr):
    """Words, x, scales and zeros of the next COUNT times 128 steps. Warps that are through take
    0 for x."""
    words, lines, scales, zeros, inside, share, left = at
    word = ()
    x = ()
    by = ()
    off = ()
    for i in gl.static_range(COUNT):
        here = step + i
        there = inside
        if not T.even:
            there = inside & (here < left[1])
        x = x + (gl.load(lines + here * STEPS, mask=there, other=0.0),)
        if T.even:
            word = word + (gl.load(words + here * (4 * T.bits)),)
        else:
            word = word + (gl.load(words + here * (4 * T.bits), mask=here < left[0], other=0),)
        group = share + here
        if not T.even:
            group = share + gl.minimum(here, left[2] - 1)
        group = group // T.times
        by = by + (gl.load(scales + group),)
        if ZEROS:
            off = off + (gl.load(zeros + group),)
    return word, x, by, off


@gluon.jit
def _added(
    sums, got, COUNT: gl.constexpr, T: gl.constexpr, MMA: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr
):  # fmt: skip
    """What was asked for, multiplied and scaled."""
    word, x, by, off = got
    KIND: gl.constexpr = x[0].dtype
    MORE: gl.constexpr = _too_much(T.bits, KIND, EXACT)
    MIDDLE: gl.constexpr = 8 if T.bits == 4 else 0
    for i in gl.static_range(COUNT):
        right = _right(x[i], T, MMA)
        nothing = gl.zeros((T.warps, T.columns, T.rows), gl.float32, MMA)
        found = mma_v2(_left(word[i], KIND, T, MMA, EXACT), right, nothing)
        if ZEROS:
            found -= (off[i].to(gl.float32) + (MORE - MIDDLE)) * _summed_x(right, T, MMA)
        elif MORE > 0:
            found -= MORE * _summed_x(right, T, MMA)
        sums += by[i].to(gl.float32) * found
    return sums


@gluon.jit
def _all(at, count, T: gl.constexpr, MMA: gl.constexpr, ZEROS: gl.constexpr):
    """The sums of a program, those of its warps added up."""
    sums = gl.zeros((T.warps, T.columns, T.rows), gl.float32, MMA)
    if T.ahead:
        got = _asked(at, 0, T.count, T, ZEROS)
        for step in range(T.count, count, T.count):
            next = _asked(at, step, T.count, T, ZEROS)
            sums = _added(sums, got, T.count, T, MMA, ZEROS, False)
            got = next
        sums = _added(sums, got, T.count, T, MMA, ZEROS, False)
    else:
        for step in range(0, count, T.count):
            sums = _added(sums, _asked(at, step, T.count, T, ZEROS), T.count, T, MMA, ZEROS, False)
    return gl.sum(sums, 0)


@gluon.jit
def _exactly(at, count, T: gl.constexpr, MMA: gl.constexpr, ZEROS: gl.constexpr):
    """The same with exact factors, of which nothing has to be taken away."""
    sums = gl.zeros((T.warps, T.columns, T.rows), gl.float32, MMA)
    for step in range(count):
        sums = _added(sums, _asked(at, step, 1, T, ZEROS), 1, T, MMA, ZEROS, True)
    return gl.sum(sums, 0)


@gluon.jit
def _product(x, w, scale, zero, y, others, size, T: gl.constexpr, FINISH: gl.constexpr):
    WORDS: gl.constexpr = _of_words(T.warps, T.columns, T.bits)
    LINES: gl.constexpr = _of_x(T.warps, T.rows, T.bits)
    MMA: gl.constexpr = _of_sums(T.warps)
    first = gl.program_id(0) * T.columns
    blocks = gl.cdiv(size.steps, STEPS)
    # Whole turns of the loop: one that ended inside of a turn would read on into the next warp's.
    share = gl.cdiv(blocks, T.warps * T.count) * T.count
    warp, n, k = _place(WORDS, T.warps, T.columns, 4 * T.bits)
    n = gl.minimum(first + n, size.columns - 1).to(gl.int64)
    words = w.to(gl.pointer_type(gl.int32), bitcast=True)
    words = words + n * size.line + warp * share * (4 * T.bits) + k
    warp_x, m, k = _place(LINES, T.warps, T.rows, STEPS)
    lines = x + m * size.steps + warp_x * share * STEPS + k
    warp_s, n, _m = _place(MMA, T.warps, T.columns, T.rows)
    n = gl.minimum(first + n, size.columns - 1).to(gl.int64)
    ZEROS: gl.constexpr = zero is not None
    scales = scale + n * size.groups
    zeros = scales
    if ZEROS:
        zeros = zero + n * size.groups
    left = (blocks - warp * share, blocks - warp_x * share, blocks - warp_s * share)
    at = words, lines, scales, zeros, m < size.rows, warp_s * share, left
    total = _all(at, share, T, MMA, ZEROS)
    if _too_much(T.bits, x.dtype.element_ty, False) > 0:
        far = gl.max(gl.max(gl.abs(total), 1), 0)  # nan is lost by a maximum, so a sum tells of it
        odd = gl.sum(gl.sum(total, 1), 0)
        if (far == float("inf")) | (odd != odd):
            total = _exactly(at, share, T, MMA, ZEROS)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [T.warps, 1], [1, 0])
    found = gl.convert_layout(total.permute(1, 0), L)
    found = FINISH(found, found, found, others, 0, 0, first, size, T, L, 0)
    row = gl.expand_dims(gl.arange(0, T.rows, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(first + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)
    there = (row < size.rows) & (column < size.columns)
    gl.store(y + row * size.columns + column, found.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _place(L: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Places along three dimensions."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return a[:, None, None], b[None, :, None], c[None, None, :]


_PRODUCT = Launchable(_product)


def product(size: Sizes, tile: Tile, after: Follows) -> Callable[..., None]:
    """A function of x, the weight as it is stored, scale, zero or None, y and the other operands
    of what follows."""
    last = finish(after)
    grid = (-(-size.columns // tile.columns),)

    def run(x: Any, w: Any, scale: Any, zero: Any, y: Any, others: Sequence[Any]) -> None:
        # words are read four at a time
        w, x = (t.clone() if t.data_ptr() & 15 else t for t in (w, x))
        given = (x, w, scale, zero, y, tuple(others), size)
        _PRODUCT(grid, *given, T=tile, FINISH=last, warps=tile.warps, stages=1)

    return run
