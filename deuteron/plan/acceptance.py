"""What error a candidate may have: at most twice that of PyTorch in the same type, and where that
is next to none, what rounding alone allows."""

import math

from deuteron.engines.roofline import is_product, region_cost
from deuteron.ir.region import Region

EPS = {"f64": 2**-52, "f32": 2**-23, "f16": 2**-10, "bf16": 2**-7, "f8e4m3": 2**-3, "f8e5m2": 2**-2}

OF_BYTES = 2.0**-10  # matrix units keep so much of the sums of 8-bit floats, as torch's call has it


def multiplies_bytes(region: Region) -> bool:
    """Whether it sums up products of floats of 8 bits."""
    graph = region.graph
    first = (graph.types[n.uses[0]].dtype for n in region.nodes if is_product([n]))
    return any(kind.is_float and kind.bits == 8 for kind in first)


def too_wrong(region: Region, errors: list[float], theirs: list[float], limit: float | None) -> str:
    """Why these errors of the outputs are not acceptable, or nothing. ``theirs`` are PyTorch's own,
    ``limit`` is what the policy asks for, if it does."""
    cost = region_cost(region)
    count = max(1, sum(region.graph.types[v].numel for v in region.outputs))
    for value, error, other in zip(region.outputs, errors, theirs, strict=True):
        if limit is not None:
            if not error <= limit:
                return f"error {error:.1e} is over max_error {limit:.1e}"
            continue
        # what sums up many numbers, say the mean of a batch, rounds as often, up and down
        kind = region.graph.types[value]
        often = (math.sqrt(cost.flops / count) / 4, math.sqrt(cost.flops / max(1, kind.numel)) / 16)
        bound = 2 * other + (4 + max(often)) * EPS.get(kind.dtype.short, 0.0)
        bound += OF_BYTES if multiplies_bytes(region) else 0.0
        if not error <= bound:
            return f"error {error:.1e} is over twice PyTorch's own"
    return ""
