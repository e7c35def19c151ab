"""How large the error of a candidate may be: at most twice PyTorch's own in the same type or, where
that is next to nothing, what rounding alone allows. And how errors are measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from deuteron.engines.roofline import is_product, region_cost
from deuteron.ir.region import Region
from deuteron.ops.evaluate import evaluate
from deuteron.plan.choose import Option
from deuteron.plan.tensors import errors_of, same_draws
from deuteron.policy import Policy

EPS = {"f64": 2**-52, "f32": 2**-23, "f16": 2**-10, "bf16": 2**-7, "f8e4m3": 2**-3, "f8e5m2": 2**-2}

EXACT_FLOPS = {"cpu": 2e8, "cuda": 2e11}  # above this a float64 reference takes too long
# and too much memory: above this many bytes on a CPU, above one 64th of the free memory on a GPU
EXACT_BYTES, EXACT_SHARE = 1 << 29, 64
Feed = Mapping[str, torch.Tensor]  # by input
Results = Mapping[int, list[torch.Tensor]]  # by the index of an option
LIBRARIES = ("torch", "vendor_fused")
OF_BYTES = 2.0**-10  # error of matrix units in sums of 8-bit floats, which torch's call has too


def multiplies_bytes(region: Region) -> bool:
    """Whether the region sums up products of 8-bit floats."""
    graph = region.graph
    products = (n for n in region.nodes if is_product([n]) or n.op == "attention_bytes")
    first = (graph.types[n.uses[0]].dtype for n in products)
    return any(kind.is_float and kind.bits == 8 for kind in first)


def too_wrong(
    region: Region, errors: list[float], theirs: list[float] | None, limit: float | None
) -> str:
    """Why these errors of the outputs are not acceptable, or "". ``theirs`` are PyTorch's own
    errors, or None where results are compared with PyTorch's: then its errors are taken to be what
    rounding allows, and a result may be as far from PyTorch's as both together may err. ``limit``
    is the policy's ``max_error``, if it has one."""
    cost = region_cost(region)
    count = max(1, sum(region.graph.types[v].numel for v in region.outputs))
    for i, (value, error) in enumerate(zip(region.outputs, errors, strict=True)):
        if limit is not None:
            if not error <= limit:
                return f"error {error:.1e} is over max_error {limit:.1e}"
            continue
        # a sum of many numbers, say the mean of a batch, is rounded as many times, up and down
        kind = region.graph.types[value]
        often = (math.sqrt(cost.flops / count) / 4, math.sqrt(cost.flops / max(1, kind.numel)) / 16)
        rounding = (4 + max(often)) * EPS.get(kind.dtype.short, 0.0)
        unknown = rounding if kind.dtype.bits >= 32 else 0.0  # others are rounded once, at the end
        unknown += _on_the_way(region, value)
        bound = rounding + 2 * (unknown if theirs is None else theirs[i])
        bound += OF_BYTES if multiplies_bytes(region) else 0.0
        if not error <= bound:
            return f"error {error:.1e} is over twice PyTorch's own"
    return ""


def _on_the_way(region: Region, value: str) -> float:
    """The error from intermediate values that PyTorch rounds to fewer bits than the result has,
    such as a gradient in bfloat16 that is then widened: half of the last bit of each."""
    graph = region.graph
    _, needed = replace(graph, outputs=((value, value),)).needed()
    bits = {v: EPS.get(graph.types[v].dtype.short, 0.0) for v in needed if v in graph.producer}
    return sum(eps for eps in bits.values() if eps > bits.get(value, 0.0)) / 2


# ---- verifying


def verified(
    region: Region,
    feed: Feed,
    results: Results,
    options: Sequence[Option],
    device: torch.device,
    policy: Policy,
) -> tuple[dict[int, float | None], dict[int, str], float | None, str]:
    """Return the errors, the reasons against options that err too much, torch's own error, and the
    name of the reference that results were compared with."""
    with same_draws():
        exact, reference = _reference(region, feed, results, options, device, policy)
    errors = {i: errors_of(region, outs, exact) for i, outs in results.items()}
    plain = next((i for i in results if options[i].candidate.engine == "torch"), None)
    if plain is not None and math.inf in errors[plain]:
        # an overflow, or a comparison of almost equal numbers: torch's answer is then the right one
        reference = "torch"
        errors = {i: errors_of(region, r, results[plain]) for i, r in results.items()}
    theirs: list[float] | None = None
    if reference != "torch":
        theirs = errors[plain] if plain is not None else [0.0] * len(region.outputs)
    limit = policy.max_error
    wrong = {i: too_wrong(region, found, theirs, limit) for i, found in errors.items()}
    largest: dict[int, float | None] = {i: max(e, default=0.0) for i, e in errors.items()}
    if reference == "torch" and plain is not None:
        largest[plain] = None  # it was compared with itself
    wrong = {i: reason for i, reason in wrong.items() if reason}
    return largest, wrong, None if plain is None else largest[plain], reference


def _reference(
    region: Region,
    feed: Feed,
    results: Results,
    options: Sequence[Option],
    device: torch.device,
    policy: Policy,
) -> tuple[list[torch.Tensor], str]:
    # A convolution in float64 is one more that a library has to set up, which takes longer than all
    # else. So results of libraries are compared with torch's, unless the policy limits the error.
    held = device.type == "cuda" and policy.max_error is None
    held = held and all(options[i].candidate.engine in LIBRARIES for i in results)
    held = held and any(options[i].candidate.engine == "torch" for i in results)
    trusted = held and is_product(region.nodes)
    cost = region_cost(region)
    small = cost.flops <= EXACT_FLOPS[device.type] and cost.bytes <= _room(device)
    if small and not trusted:
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN would have to be set up for it
            answer = evaluate(region.graph, feed, float64=True)
        return [answer[v] for v in region.outputs], "float64"
    for i, option in enumerate(options):
        if option.candidate.engine == "torch" and i in results:
            return results[i], "torch"
    answer = evaluate(region.graph, feed)
    return [answer[v] for v in region.outputs], "torch"


def _room(device: torch.device) -> int:
    """Bytes that a region may read and write for its float64 reference to fit in memory."""
    if device.type != "cuda":
        return EXACT_BYTES
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + idle) // EXACT_SHARE
