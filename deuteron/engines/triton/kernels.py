"""``triton_kernels``: kernels written by hand in Triton, for operators whose results one generated
loop cannot all compute. Each family has a file of recipes; this is the engine that combines them.
"""

from dataclasses import replace

from deuteron.engines.base import BuildContext, Candidate, Kernel, refuse_if
from deuteron.engines.recipes import RecipeEngine
from deuteron.engines.triton.attention import ATTENTION
from deuteron.engines.triton.attention_bytes import BYTES
from deuteron.engines.triton.batch_norm import BATCH_NORM
from deuteron.engines.triton.common import from_lines, refuse_elsewhere
from deuteron.engines.triton.conv import CONV
from deuteron.engines.triton.conv_batch_norm import CONV_BATCH_NORM
from deuteron.engines.triton.conv_batch_norm_grad import CONV_BATCH_NORM_GRAD
from deuteron.engines.triton.conv_grad import CONV_GRAD
from deuteron.engines.triton.conv_grad_hopper import CONV_GRAD_HOPPER
from deuteron.engines.triton.conv_hopper import CONV_HOPPER
from deuteron.engines.triton.cross_entropy import CROSS_ENTROPY
from deuteron.engines.triton.depthwise import DEPTHWISE
from deuteron.engines.triton.embedding_grad import EMBEDDING_GRAD
from deuteron.engines.triton.fp8 import FP8
from deuteron.engines.triton.group_norm import GROUP_NORM
from deuteron.engines.triton.histogram import HISTOGRAM
from deuteron.engines.triton.max_pool import MAX_POOL
from deuteron.engines.triton.moe import MOE
from deuteron.engines.triton.norm import NORM_BACKWARD
from deuteron.engines.triton.paged_attention import PAGED
from deuteron.engines.triton.product import PRODUCT
from deuteron.engines.triton.quantized import QUANTIZED
from deuteron.engines.triton.resample import RESAMPLE
from deuteron.engines.triton.rope import ROPE
from deuteron.engines.triton.scan import SCAN
from deuteron.engines.triton.separable import SEPARABLE
from deuteron.engines.triton.sparse import SPARSE
from deuteron.engines.triton.winograd import WINOGRAD
from deuteron.ir.region import Region
from deuteron.target import Target


class TritonKernels(RecipeEngine):
    """Group norms, gradients of norms, and batch normalisation in training, also with the
    convolution before it; cross-entropy, rotary positions, scans, resampling, max pooling,
    histograms, gradients of embeddings, sparse matrices times dense ones; products, convolutions
    and their gradients with an epilogue; products of 8-bit floats with block scales, by weights of
    8 and 4 bits, and of rows grouped by expert; attention and its gradients."""

    name = "triton_kernels"
    version = "9"
    kind = "cuda"
    _norms = (NORM_BACKWARD, *GROUP_NORM, *BATCH_NORM)
    _others = (CROSS_ENTROPY, ROPE, SCAN, MAX_POOL, RESAMPLE, HISTOGRAM, SPARSE, EMBEDDING_GRAD)
    _convolutions = (
        *(*CONV, CONV_HOPPER, DEPTHWISE, SEPARABLE, WINOGRAD),
        *(CONV_BATCH_NORM, CONV_BATCH_NORM_GRAD, *CONV_GRAD, CONV_GRAD_HOPPER),
    )
    _attention = (*ATTENTION, PAGED, BYTES)
    every = (*_norms, *_others, *PRODUCT, *_convolutions, *QUANTIZED, *FP8, *MOE, *_attention)

    _hopper = (CONV_HOPPER, CONV_BATCH_NORM, CONV_GRAD_HOPPER)
    _by_lines = frozenset(r.name for r in (*PRODUCT, FP8[0], *_hopper, *ATTENTION))

    _with_calls = frozenset({WINOGRAD.name})  # these do not only launch, but also call libraries

    def check(self, region: Region, target: Target) -> None:
        refuse_elsewhere(target)
        sizes = [region.graph.types[v].numel for v in (*region.inputs, *region.outputs)]
        refuse_if(not all(sizes), "there is nothing to compute: a size is 0")

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        kernel = super().build(region, candidate, ctx)
        if candidate.knobs["recipe"] in self._by_lines:
            kernel = replace(kernel, fn=from_lines(kernel.fn, len(region.inputs)))
        return replace(kernel, launches=candidate.knobs["recipe"] not in self._with_calls)
