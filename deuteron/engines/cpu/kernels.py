"""``cpu_kernels``: machine code for the CPU, by recipes around the kernels of ``kernels/cpu``.

A packed implicit product for everything that is one, one of bytes in int32, one by weights of 8 and
4 bits, convolutions of bytes, Winograd's algorithm for 3×3 convolutions and their gradients,
depthwise convolution and such in narrow groups, the gradients of all convolutions, attention,
recurrent layers, dropout, the move between row-major order and nhwc, batch norm in training, group
norm of channels last, the gradients of all norms, and sums of what shares an index. The epilogue of
the region (bias, residual, activation) runs inside. Object code is compiled once per machine and
kept.
"""

from collections.abc import Sequence

from deuteron.engines.base import Candidate
from deuteron.engines.cpu.attention import ATTENTION
from deuteron.engines.cpu.bytes import BYTES
from deuteron.engines.cpu.conv_quantized import CONV_QUANTIZED
from deuteron.engines.cpu.convolution import DEPTHWISE, GROUPED, WINOGRAD
from deuteron.engines.cpu.dropout import DROPOUT
from deuteron.engines.cpu.filter_grad import DEPTHWISE_GRAD, FILTER_GRAD, WINOGRAD_GRAD
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

CLEARLY = 0.8  # of the direct sum's time: then one direct product is enough to compare with


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
        """Every candidate is built and timed by a search: where Winograd's F(2×2) should win
        clearly, only the best direct product stays to be measured against it."""
        found = super().candidates(region, target, policy)
        prices = {c: self.estimate(region, target, c) for c in found}
        direct = [c for c in found if c.knobs["recipe"] == "product"]
        other = [p for c, p in prices.items() if c not in direct]
        if direct and other and min(other) < CLEARLY * prices[direct[0]]:
            return [c for c in found if c not in direct[1:]]
        return found
