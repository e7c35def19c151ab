"""``vendor_fused``: library calls that run several operators at once, or one in a better way."""

from deuteron.engines.recipes import RecipeEngine
from deuteron.engines.vendor import copies, cpu, cuda, fft, moe, sparse


class VendorFused(RecipeEngine):
    """cuDNN, cuBLASLt and SDPA on the GPU; oneDNN and packed products on the CPU; torch's sparse
    products on both, its grouped products on Hopper, its copies of many tensors, and Fourier
    transforms for large windows."""

    name = "vendor_fused"
    version = "1"
    every = (*cuda.RECIPES, *cpu.RECIPES, *fft.RECIPES, *sparse.RECIPES, *moe.RECIPES)
    every += copies.COPIES
