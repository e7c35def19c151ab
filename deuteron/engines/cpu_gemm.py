"""``cpu_gemm``: generated products, convolutions and attention for the CPU.

Each recipe has its own refusals, knobs, estimate and kernel (``deuteron/kernels/cpu``): a packed
implicit product for everything that is one, Winograd's algorithm for 3×3 convolutions, depthwise
convolution, and attention. The epilogue of the region (bias, residual, activation) runs inside.
Object code is compiled once per machine and kept.
"""

from __future__ import annotations

from deuteron.engines.cpu_product import PRODUCT
from deuteron.engines.cpu_special import ATTENTION, DEPTHWISE, WINOGRAD
from deuteron.engines.recipes import Recipe, RecipeEngine
from deuteron.target import Target


class CpuGemm(RecipeEngine):
    """Products, convolutions and attention in generated machine code."""

    name = "cpu_gemm"
    version = "1"

    def recipes(self, target: Target) -> tuple[Recipe, ...]:
        return (PRODUCT, WINOGRAD, DEPTHWISE, ATTENTION)
