"""What kernels share whose warps divide the work on a Hopper: how numbers lie, and the barriers by
which those who bring them and those who multiply wait for each other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def in_registers(columns):  # type: ignore[no-untyped-def]
    """Sums of 64 lines and more, in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def in_shared(width, rank):  # type: ignore[no-untyped-def]
    """Lines of ``width`` numbers of 16 bits in shared memory, as the copy engine brings them."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of several kinds, ``COUNT`` of each; ``ARRIVALS`` says for every kind how many have
    to arrive at one before it is passed."""
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
    """The next of ``count`` stages; the phase flips when they begin anew."""
    over = stage + 1 == count
    return gl.where(over, 0, stage + 1), gl.where(over, phase ^ 1, phase)


@gluon.jit
def rounded(v, KIND: gl.constexpr):
    """Numbers of float32 in 16 bits, two at a time. Where they are widened again after, the
    compiler by itself would round bfloat16 one by one, which takes four times as long, and of
    float16 read sums while matrix units still add them up, so that these have to wait."""
    if KIND == gl.bfloat16:
        two: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(two, "=r,r,r", [v], gl.bfloat16, is_pure=True, pack=2)
    else:
        two: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(two, "=r,r,r", [v], gl.float16, is_pure=True, pack=2)
