"""How numbers lie on a Hopper, for kernels whose warps divide the work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def in_registers(columns):  # type: ignore[no-untyped-def]
    """Sums of 64 lines and more, in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def in_shared(width, rank):  # type: ignore[no-untyped-def]
    """Lines of ``width`` numbers of 16 bits in shared memory, as the copy engine brings them."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank)
