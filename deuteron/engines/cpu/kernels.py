"""``cpu_kernels``: machine code for the CPU, by recipes around the kernels of ``kernels/cpu``.

There are kernels for: products, and convolutions as implicit products, with packed factors;
products of bytes, added in int32; products by weights of 8 and 4 bits; convolutions of bytes; 3×3
convolutions and their gradients by Winograd's algorithm; depthwise convolutions and those in narrow
groups; the gradients of all convolutions; attention; recurrent layers; dropout; the move between
row-major order and nhwc; batch norm in training; group norm of channels last; the gradients of all
norms; and adding elements at indices. The epilogue of the region (bias, residual, activation) runs
inside the kernel. Object code is compiled once per machine and kept.
"""

from collections.abc import Sequence

from deuteron.engines.base import Candidate
from deuteron.engines.cpu.attention import ATTENTION
from deuteron.engines.cpu.conv_quantized import CONV_QUANTIZED
from deuteron.engines.cpu.convolution import DEPTHWISE, GROUPED, WINOGRAD
from deuteron.engines.cpu.dropout import DROPOUT
from deuteron.engines.cpu.filter_grad import DEPTHWISE_GRAD, FILTER_GRAD, WINOGRAD_GRAD
from deuteron.engines.cpu.int8_matmul import BYTES
from deuteron.engines.cpu.norm import GROUP_NORM, NORM
from deuteron.engines.cpu.product import PRODUCT
from deuteron.engines.cpu.quantized import QUANTIZED
from deuteron.engines.cpu.recurrent import RECURRENCE
from deuteron.engines.cpu.scatter_add import SCATTER_ADD
from deuteron.engines.cpu.to_layout import TO_LAYOUT
from deuteron.engines.recipes import RecipeEngine
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

# If another recipe is priced below this part of the direct product's time, one direct product is
# enough to compare it with.
CLEARLY = 0.8


class CpuKernels(RecipeEngine):
    """Products, convolutions and attention in generated machine code."""

    name = "cpu_kernels"
    version = "10"
    kind = "cpu"
    every = (
        PRODUCT,
        BYTES,
        QUANTIZED,
        CONV_QUANTIZED,
        WINOGRAD,
        DEPTHWISE,
        GROUPED,
        FILTER_GRAD,
        WINOGRAD_GRAD,
        DEPTHWISE_GRAD,
        DROPOUT,
        ATTENTION,
        RECURRENCE,
        TO_LAYOUT,
        SCATTER_ADD,
        NORM,
        GROUP_NORM,
    )

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        """A search builds and times every candidate. So where Winograd's F(2×2) should win clearly,
        we keep only the best direct product to be measured against it."""
        found = super().candidates(region, target, policy)
        prices = {c: self.estimate(region, target, c) for c in found}
        direct = [c for c in found if c.knobs["recipe"] == "product"]
        other = [p for c, p in prices.items() if c not in direct]
        if direct and other and min(other) < CLEARLY * prices[direct[0]]:
            return [c for c in found if c not in direct[1:]]
        return found
