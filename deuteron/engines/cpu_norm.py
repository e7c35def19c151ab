"""Gradients of norms in ``cpu_gemm``: the recipe around ``kernels/cpu/norm_grad.py``."""

from __future__ import annotations

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, maybe, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

CENTRED = {"layer_norm_grad": True, "rms_norm_grad": False}
REACHED = 0.25  # of the arithmetic: four passes over the row wait for its first level of cache


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if len(region.nodes) != 1 or region.ops[0] not in CENTRED:
        return Refusal("is not the gradient of a layer_norm or rms_norm alone")
    if region.nodes[0].attrs["activation"] != "none":
        return Refusal("takes no activation along", "leave it outside")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    for value in (*region.inputs, *region.outputs):
        t = region.graph.types[value]
        if t.dtype.short != "f32":
            return Refusal(f"element type {t.dtype.short}, not f32", "cast to float32")
        if not t.is_layout("contiguous"):
            return Refusal(f"{value} is not in row-major order", "call .contiguous()")
    return None


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.norm_grad import LONG, SHORT, Form, prepare_norm_grad

    node, types = region.nodes[0], region.graph.types
    x, grad, weight, extra = (*node.inputs, None, None)[:4]
    shape, dims = types[x or ""].shape, node.attrs["dims"]
    dx, *params = node.outputs
    dweight = params.pop(0) if weight is not None else None
    dbias = params.pop(0) if params else None

    def made(value: str | None) -> bool:
        return value in region.outputs

    rows = columns = 1
    for d, n in enumerate(shape):
        rows, columns = (rows * n, columns) if d < len(shape) - dims else (rows, columns * n)
    form = Form(
        CENTRED[node.op],
        weight is not None,
        extra is not None,
        made(dx),
        made(dweight),
        made(dbias),
        columns < SHORT,
        columns >= LONG,
    )
    calls = prepare_norm_grad(form, rows, columns, node.attrs["eps"])

    def read(value: str | None) -> Argument | int:
        at = maybe(region, value)
        return 0 if at is None else Argument(at)

    def written(value: str | None) -> Argument | int:
        if value is None or not made(value):
            return 0
        return Argument(len(region.inputs) + region.outputs.index(value))

    return Kernel.generated(
        calls(*map(read, (x, grad, weight, extra)), *map(written, (dx, dweight, dbias)))
    )


NORM_GRAD = generated("norm_grad", _refuse, one_way, _seconds, _build)
