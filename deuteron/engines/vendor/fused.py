"""``vendor_fused``: library calls that do more than one operator, or one in a better way."""

from __future__ import annotations

from deuteron.engines.recipes import Recipe, RecipeEngine
from deuteron.engines.vendor import cpu, cuda
from deuteron.target import Target


class VendorFused(RecipeEngine):
    """cuDNN, cuBLASLt and SDPA on the GPU; oneDNN and packed products on the CPU."""

    name = "vendor_fused"
    version = "1"

    def recipes(self, target: Target) -> tuple[Recipe, ...]:
        return cuda.RECIPES if target.is_cuda else cpu.RECIPES
