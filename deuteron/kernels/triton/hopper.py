"""What the warp-specialised kernels for Hopper share: layouts of registers and shared memory, and
the barriers by which the warp that loads tiles and the warps that multiply wait for each other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def in_registers(columns):  # type: ignore[no-untyped-def]
    """The layout of sums with 64 or more rows in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def in_shared(width, rank):  # type: ignore[no-untyped-def]
    """The layout of rows of ``width`` 16-bit numbers in shared memory that the copy engine (TMA)
    writes."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers of several kinds, ``COUNT`` of each; ``ARRIVALS`` has, for every kind, how
    many arrivals let the waiting warps pass."""
    kinds = ()
    for _ in gl.static_range(len(ARRIVALS)):
        made = gl.allocate_shared_memory(gl.int64, [max(1, COUNT), 1], mbarrier.MBarrierLayout())
        kinds = kinds + (made,)
    for i in gl.static_range(COUNT):
        for kind in gl.static_range(len(ARRIVALS)):
            mbarrier.init(kinds[kind].index(i), count=ARRIVALS[kind])
    return kinds


@gluon.jit
def next_stage(stage, phase, count):
    """Return the stage that follows, of ``count``, and its phase, which flips at each new round."""
    over = stage + 1 == count
    return gl.where(over, 0, stage + 1), gl.where(over, phase ^ 1, phase)


@gluon.jit
def rounded(v, KIND: gl.constexpr):
    """Round float32 to 16 bits, two numbers at a time. If the result is widened again later, the
    compiler on its own would round bfloat16 one by one, which takes four times as long; and with
    float16 it would read sums that matrix units still add to, so that these have to wait."""
    if KIND == gl.bfloat16:
        two: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(two, "=r,r,r", [v], gl.bfloat16, is_pure=True, pack=2)
    else:
        two: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(two, "=r,r,r", [v], gl.float16, is_pure=True, pack=2)
