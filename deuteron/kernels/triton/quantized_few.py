"""y = f(x · wᵀ, …) of few rows, with w[n, k] = (q[n, k] − zero) · scale: as ``quantized.py``, but
the numbers of the weight never go through shared memory.

Up to 8 rows take as long as reading the weight, K·N / 2 bytes with 4 bits, if enough loads are
under way at any time and the work for each number takes less than its load. So every thread loads
16 bytes of a row, 32 numbers of 4 bits or 16 of 8, for ``ahead`` turns at once, and starts the
loads of the next ``ahead`` turns before it multiplies the first. The assembler gives loads that
cross the end of a loop one counter: who waits for the first of them waits for all. Therefore all of
them, those of x and the scales too, are started where the loop body begins. The matrix units take
their factors from registers. They may add up the steps of a sum in any order, so the order is the
one in which words are unpacked, and the threads of a warp bring x into that order. A word of eight
numbers becomes four pairs, by a shift, a logical operation and a subtraction each: 0x4300 | q is
128 + q in bfloat16, 0x6400 | q is 1024 + q in float16. Factors are exact, and sums are scaled.

A warp's turn, 16 columns by 128 steps, takes about 165 instructions for one row with 4 bits: 32
logical operations, 24 shifts (8 in float16), 32 subtractions, 8 products, 9 loads, and the rest for
x, which the 16 columns share.

To save registers, a compiler would load each word just before it is multiplied. But it moves no
load across a warp's barrier, which costs nothing and waits for no load: see :func:`_ask_before`.

The warps of a program take turns at 128 steps of the sum each, and a program computes 16 columns;
there is no second kernel.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deuteron.kernels.triton.launch import Launchable, chained
from deuteron.kernels.triton.product import EpilogueFormula
from deuteron.kernels.triton.product_hopper import finish

# Rows and columns of the result, steps of the sum; line: words of a row of the weight; groups: of
# steps that share a scale.
Sizes = namedtuple("Sizes", "rows columns steps line groups")
# rows: of x (8); columns: of a program (16); warps; ahead: so many times 128 steps a warp loads at
# once; times: so many times 128 steps share a scale; bits: of a number; given: rows of x that are
# read (1 or all); CHAIN: the next kernel is launched early.
Tile = namedtuple("Tile", "rows columns warps ahead times bits given CHAIN")
STEPS = gl.constexpr(128)


# ---- numbers out of words


@gluon.jit
def _halves(both, KIND: gl.constexpr):
    low = (both & 0xFFFF).to(gl.uint16).to(KIND, bitcast=True)
    high = (both.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(KIND, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _nibbles(word, KIND: gl.constexpr):
    """Unpack a word to its eight numbers − 8, [half, two, two]."""
    # float16 has room for q · 16, which saves a shift: the multiplication by 1/16 undoes it
    APART: gl.constexpr = (
        "mov.b32 o, 0x43004300; mov.b32 i, 0x3F803F80; mov.b32 e, 0xC308C308;"
        "shr.u32 t, $4, 4; shr.u32 u, $4, 8; shr.u32 v, $4, 12;"
        "lop3.b32 $0, $4, m, o, 0xEA; lop3.b32 $1, t, m, o, 0xEA;"
        "lop3.b32 $2, u, m, o, 0xEA; lop3.b32 $3, v, m, o, 0xEA;"
        "fma.rn.bf16x2 $0, $0, i, e; fma.rn.bf16x2 $1, $1, i, e;"
        "fma.rn.bf16x2 $2, $2, i, e; fma.rn.bf16x2 $3, $3, i, e; }"
        if KIND == gl.bfloat16
        else "mov.b32 o, 0x64006400; mov.b32 i, 0x3C003C00; mov.b32 e, 0xE408E408;"
        "mov.b32 v, 0x00F000F0; mov.b32 t, 0x2C002C00; mov.b32 f, 0xD480D480;"
        "shr.u32 u, $4, 8;"
        "lop3.b32 $0, $4, m, o, 0xEA; lop3.b32 $1, $4, v, o, 0xEA;"
        "lop3.b32 $2, u, m, o, 0xEA; lop3.b32 $3, u, v, o, 0xEA;"
        "fma.rn.f16x2 $0, $0, i, e; fma.rn.f16x2 $1, $1, t, f;"
        "fma.rn.f16x2 $2, $2, i, e; fma.rn.f16x2 $3, $3, t, f; }"
    )
    a, b, c, d = gl.inline_asm_elementwise(
        "{ .reg .b32 m, o, i, e, f, t, u, v; mov.b32 m, 0x000F000F;" + APART,
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    first = gl.join(_halves(a, KIND), _halves(b, KIND))
    return gl.join(first, gl.join(_halves(c, KIND), _halves(d, KIND)))


@gluon.jit
def _bytes(word, KIND: gl.constexpr):
    """Unpack a word to its four numbers, [half, two]. bfloat16 can make 8 bits only by a
    difference: 128 + the lower seven bits, less 128 or 256 by the sign."""
    APART: gl.constexpr = (
        "mov.b32 m, 0x007F007F; mov.b32 n, 0x00800080; mov.b32 o, 0x43004300;"
        "mov.b32 p, 0xC300C300; mov.b32 i, 0x3F803F80;"
        "shr.u32 t, $2, 8; lop3.b32 $0, $2, m, o, 0xEA; lop3.b32 u, $2, n, p, 0xEA;"
        "lop3.b32 $1, t, m, o, 0xEA; lop3.b32 v, t, n, p, 0xEA;"
        "fma.rn.bf16x2 $0, $0, i, u; fma.rn.bf16x2 $1, $1, i, v; }"
        if KIND == gl.bfloat16
        else "mov.b32 m, 0x00FF00FF; mov.b32 o, 0x64006400; mov.b32 p, 0xE480E480;"
        "mov.b32 i, 0x3C003C00; xor.b32 t, $2, 0x80808080; shr.u32 u, t, 8;"
        "lop3.b32 $0, t, m, o, 0xEA; lop3.b32 $1, u, m, o, 0xEA;"
        "fma.rn.f16x2 $0, $0, i, p; fma.rn.f16x2 $1, $1, i, p; }"
    )
    a, b = gl.inline_asm_elementwise(
        "{ .reg .b32 m, n, o, p, i, t, u, v;" + APART,
        "=&r,=&r,r",
        [word],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(_halves(a, KIND), _halves(b, KIND))


# ---- layouts: which numbers each thread holds


@gluon.constexpr_function
def _of_words(warps, columns, bits):
    """The weight: four threads share a row, and each holds 16 bytes of it at a time."""
    along = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    down = [[0, 8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    more = [[0, 0, 16]] if bits == 8 else []
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    held = [[0, 0, 1], [0, 0, 2], *more, *down]
    return gl.DistributedLinearLayout(held, lanes, along, [], [warps, columns, 4 * bits])


@gluon.constexpr_function
def _of_x(warps, rows, bits):
    """x: each thread holds the numbers that its words of the weight are multiplied with."""
    along = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    each = 128 // bits  # numbers side by side
    held = [[0, 0, 1 << i] for i in range(each.bit_length() - 1)]
    held += [[0, 0, 64]] if bits == 8 else []
    held += [[0, 8, 0]] if rows == 16 else []
    lanes = [[0, 0, each], [0, 0, 2 * each], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(held, lanes, along, [], [warps, rows, 128])


@gluon.constexpr_function
def _as_read(warps, given):
    """x as it is loaded: each thread holds 16 adjacent bytes."""
    along = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    held = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    held += [[0, 1 << i, 0] for i in range(1, given.bit_length() - 1)]
    lanes = [[0, 0, 8 << i] for i in range(4)] + [[0, int(given > 1), 0]]
    return gl.DistributedLinearLayout(held, lanes, along, [], [warps, given, 128])


@gluon.constexpr_function
def _of_sums(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _left(word, KIND: gl.constexpr, T: gl.constexpr, MMA: gl.constexpr):
    """Unpack 128 steps as the first factor, in the order of words, pairs, threads, halves."""
    if T.bits == 4:
        found = _nibbles(word, KIND).reshape(T.warps, T.columns, 4, 2, 2, 2, 2, 2)
        found = found.permute(0, 1, 3, 7, 6, 4, 2, 5)
    else:
        found = _bytes(word, KIND).reshape(T.warps, T.columns, 2, 4, 2, 2, 2, 2)
        found = found.permute(0, 1, 2, 4, 7, 5, 3, 6)
    found = found.reshape(T.warps, T.columns, STEPS)
    return gl.convert_layout(found, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _paired(x, T: gl.constexpr):
    """Reorder x so that numbers lie side by side that meet a pair out of a word."""
    APART: gl.constexpr = 4 if T.bits == 4 else 2
    shape: gl.constexpr = x.shape
    x = x.reshape(shape[0], shape[1], STEPS // (2 * APART), 2, APART).permute(0, 1, 2, 4, 3)
    return x.reshape(shape)


@gluon.jit
def _right(x, T: gl.constexpr, MMA: gl.constexpr):
    """Return x as the second factor, in the order of :func:`_left`."""
    LINES: gl.constexpr = _of_x(T.warps, T.rows, T.bits)
    x = _paired(x, T)
    x = gl.convert_layout(x, LINES)
    if T.given < T.rows:
        x, _all = gl.broadcast(x, gl.zeros((T.warps, T.rows, STEPS), x.dtype, LINES))
    if T.bits == 4:
        found = x.reshape(T.warps, T.rows, 4, 2, 2, 2, 2, 2).permute(0, 3, 5, 6, 4, 2, 7, 1)
    else:
        found = x.reshape(T.warps, T.rows, 2, 4, 2, 2, 2, 2).permute(0, 2, 4, 6, 5, 3, 7, 1)
    found = found.reshape(T.warps, STEPS, T.rows)
    return gl.convert_layout(found, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _summed_x(x, T: gl.constexpr, MMA: gl.constexpr):
    """Return the sums of x over the steps, the same for every column."""
    ones = gl.full([T.warps, 16, STEPS], 1.0, x.dtype, gl.DotOperandLayout(0, MMA, 2))
    found = mma_v2(ones, x, gl.zeros((T.warps, 16, T.rows), gl.float32, MMA))
    return gl.convert_layout(found, MMA, assert_trivial=True)


# ---- sums


@gluon.jit
def _asked(at, turn, T: gl.constexpr, ZEROS: gl.constexpr):
    """Load the words, x, scales and zeros of a turn, if there is one. x is 0 for warps whose steps
    are used up."""
    words, lines, scales, zeros, block, count = at
    here = turn * T.warps + block[0]
    word = gl.load(words + here * (4 * T.bits), mask=here < count, cache_modifier=".cg")
    here = turn * T.warps + block[2]
    x = gl.load(lines + here * STEPS, mask=block[3] & (here < count), other=0.0)
    group = gl.minimum(turn * T.warps + block[1], count - 1) // T.times
    off = 0
    if ZEROS is not None:
        off = _word(zeros + group)
    return word, x, _word(scales + group), off


@gluon.jit
def _word(at):
    """Load a number of 16 bits into a register of its own. A compiler that sees where it comes from
    would pack two into one register, and to do so wait for both at once; the assembly hides it."""
    HALF: gl.constexpr = at.dtype.element_ty.primitive_bitwidth == 16
    if HALF:
        half = gl.load(at.to(gl.pointer_type(gl.uint16), bitcast=True)).to(gl.int32)
        found = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [half], dtype=(gl.int32,), is_pure=True, pack=1
        )
        found = found[0]
    else:
        found = gl.load(at)
    return found


@gluon.jit
def _number(word, KIND: gl.constexpr):
    HALF: gl.constexpr = KIND.primitive_bitwidth == 16
    if HALF:
        word = word.to(gl.uint16).to(KIND, bitcast=True)
    return word.to(gl.float32)


@gluon.jit
def _added(sums, got, T: gl.constexpr, MMA: gl.constexpr, S: gl.constexpr, ZEROS: gl.constexpr):
    """``sums`` plus the product of what :func:`_asked` loaded, scaled."""
    word, x, by, off = got
    right = _right(x, T, MMA)
    nothing = gl.zeros((T.warps, T.columns, T.rows), gl.float32, MMA)
    found = mma_v2(_left(word, x.dtype, T, MMA), right, nothing)
    if ZEROS is not None:
        found -= (_number(off, ZEROS) - (8 if T.bits == 4 else 0)) * _summed_x(right, T, MMA)
    return sums + _number(by, S) * found


@gluon.jit
def _ask_before():
    """A warp's barrier: the compiler moves no load from before it to after it."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xFFFFFFFF; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=(gl.int32,),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _product(x, w, scale, zero, y, others, size, T: gl.constexpr, FINISH: gl.constexpr):
    WORDS: gl.constexpr = _of_words(T.warps, T.columns, T.bits)
    READ: gl.constexpr = _as_read(T.warps, T.given)
    MMA: gl.constexpr = _of_sums(T.warps)
    ZEROS: gl.constexpr = None if zero is None else zero.dtype.element_ty
    if T.CHAIN:
        gdc_launch_dependents()
        gdc_wait()
    first = gl.program_id(0) * T.columns
    blocks = gl.cdiv(size.steps, STEPS)
    warp, n, k = _place(WORDS, T.warps, T.columns, 4 * T.bits)
    n = gl.minimum(first + n, size.columns - 1).to(gl.int64)
    words = w.to(gl.pointer_type(gl.int32), bitcast=True) + n * size.line + k
    warp_x, m, k = _place(READ, T.warps, T.given, STEPS)
    lines = x + m * size.steps + k
    warp_s, n, _m = _place(MMA, T.warps, T.columns, T.rows)
    n = gl.minimum(first + n, size.columns - 1).to(gl.int64)
    scales = scale + n * size.groups
    zeros = scales
    if ZEROS is not None:
        zeros = zero + n * size.groups
    at = words, lines, scales, zeros, (warp, warp_s, warp_x, m < size.rows), blocks

    sums = gl.zeros((T.warps, T.columns, T.rows), gl.float32, MMA)
    got = ()
    for i in gl.static_range(T.ahead):
        got = got + (_asked(at, i, T, ZEROS),)
    _ask_before()
    turns = gl.cdiv(blocks, T.warps)
    for left in range(-turns, 0, T.ahead):  # counting up from 0 would take 64 bits
        next = ()
        for i in gl.static_range(T.ahead):
            next = next + (_asked(at, turns + left + T.ahead + i, T, ZEROS),)
        _ask_before()
        for i in gl.static_range(T.ahead):
            sums = _added(sums, got[i], T, MMA, scale.dtype.element_ty, ZEROS)
            _ask_before()
        got = next
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [T.warps, 1], [1, 0])
    found = gl.convert_layout(gl.sum(sums, 0).permute(1, 0), L)
    found = FINISH(found, found, found, others, 0, 0, first, size, T, L, 0)
    row = gl.expand_dims(gl.arange(0, T.rows, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(first + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)
    there = (row < size.rows) & (column < size.columns)
    gl.store(y + row * size.columns + column, found.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _place(L: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Return the indices along the three dimensions of a layout."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return a[:, None, None], b[None, :, None], c[None, None, :]


@cache
def _launchable(registers: int) -> Launchable:
    return Launchable(_product, follows=True, registers=registers)


def product(size: Sizes, tile: Tile, after: EpilogueFormula, registers: int) -> Callable[..., None]:
    """Return a function (x, w, scale, zero, y, others); w is the weight as it is stored, zero may
    be None. ``registers``: the most that a thread may use."""
    last = finish(after)
    grid = (-(-size.columns // tile.columns),)
    call = _launchable(registers)

    def run(x: Any, w: Any, scale: Any, zero: Any, y: Any, others: Sequence[Any]) -> None:
        # the kernel reads four words, 16 bytes, at a time
        w, x = (t.clone() if t.data_ptr() & 15 else t for t in (w, x))
        given = (x, w, scale, zero, y, tuple(others), size)
        here = tile._replace(CHAIN=chained(x.device))
        call(grid, *given, T=here, FINISH=last, warps=tile.warps, stages=1)

    return run
