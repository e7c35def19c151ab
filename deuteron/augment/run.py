"""Running a spec on tensors: the operators ``torch.ops.deuteron.augment…`` and their gradient.

On a GPU the kernel of ``kernels/triton/augment.py`` computes the forward pass, a plan the gradient
of the colours, and the kernel of ``augment_grad.py`` the gradient of the gather. On the CPU the
graph of ``emit.py``, or of its gradient, is planned for the shapes at hand, and the plan is kept.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deuteron.augment.draw import table_for
from deuteron.augment.emit import emit, finish
from deuteron.augment.spec import Spec, shown, spec_of
from deuteron.errors import BindError
from deuteron.explain import units
from deuteron.frontends.builder import Graph
from deuteron.functional.context import in_transform, is_watched
from deuteron.functional.explain import RanInstead, Recording
from deuteron.ir import TensorType
from deuteron.ops.evaluate import evaluate
from deuteron.plan import Plan
from deuteron.policy import Policy
from deuteron.target import has_triton, target

# plans without CUDA Graphs of their own, because a caller may capture the whole call in one
EAGER, ORDERED = Policy(cuda_graph=False), Policy(cuda_graph=False, deterministic=True)


def call(x: Tensor, table: Tensor, spec: str) -> Tensor:
    """Apply a spec to images. An operator that is written in Python takes 60 µs to get to its code,
    which for a few small images is most of the time: so it is called only where autograd or a trace
    must see it. Transforms such as vmap get torch's operators; otherwise the code is called
    directly."""
    if in_transform():
        why = "a transform such as vmap must see them"
        Recording.add(RanInstead(f"augment: torch's operators, one by one: {why}"))
        return by_references(x, table, spec)
    learns = (x.requires_grad or table.requires_grad) and torch.is_grad_enabled()
    seen = torch.compiler.is_compiling() or is_watched() or type(x) is not Tensor
    return augment(x, table, spec) if learns or seen else augment_now(x, table, spec)


@torch.library.custom_op("deuteron::augment", mutates_args=())
def augment(x: torch.Tensor, table: torch.Tensor, spec: str) -> torch.Tensor:
    """Apply a spec to images ``x`` [N, C, H, W], with the parameters in ``table`` [N, columns]."""
    return augment_now(x, table, spec)


def augment_now(x: Tensor, table: Tensor, spec: str) -> Tensor:
    """The code of the operator :func:`augment`."""
    _check(spec_of(spec), x, table)
    # kernels read memory as it is, without torch's lazy negation
    x, table = x.resolve_neg(), table.resolve_neg().contiguous()
    if x.shape[0] == 0:
        return empty_result(x, spec)
    if not (x.is_cuda and has_triton()):
        plan = _plan(spec, TensorType.from_tensor(x), x.device, "")
        Recording.add(plan)
        return plan.run(x=x, table=table)["y"]
    from deuteron.augment import gpu

    y = empty_result(x, spec)
    launches = gpu.forward(x, table, y, spec)
    if Recording.active:
        Recording.add(RanInstead(_costs(x, y, launches)))
    return y


def _costs(x: Tensor, y: Tensor, launches: int) -> str:
    machine, moved = target(x.device), x.nbytes + y.nbytes
    least, speed = units.seconds(moved / machine.stream), units.bandwidth(machine.stream)
    return (
        f"augment: {shown(x.dtype, x.shape)} → {shown(y.dtype, y.shape)} on {machine.name}\n"
        f"  {units.count(launches, 'launch', 'launches')} of kernels/triton/augment.py\n"
        f"  {units.size(moved)} read and written: at least {least} at {speed}"
    )


@augment.register_fake
def _augment_fake(x: Tensor, table: Tensor, spec: str) -> Tensor:
    _check(spec_of(spec), x, table)
    return empty_result(x, spec)


@torch.library.custom_op("deuteron::augment_backward", mutates_args=())
def augment_backward(
    grad: torch.Tensor, x: torch.Tensor, table: torch.Tensor, spec: str
) -> torch.Tensor:
    """The gradient for ``x``, given that of the result."""
    made, order = spec_of(spec), _format(_is_nhwc(x))
    if x.shape[0] == 0:
        return torch.empty_like(x, memory_format=order)
    x, table = x.resolve_neg(), table.resolve_neg().contiguous()
    grad = grad.resolve_neg().contiguous(memory_format=_format(made.layout(_is_nhwc(x)) == "nhwc"))
    if not (made.geometric and x.is_cuda and has_triton()):
        plan = _plan(spec, TensorType.from_tensor(x), x.device, "x")
        return plan.run(x=x, table=table, grad_y=grad)["grad_x"].contiguous(memory_format=order)
    return backward_kernel(grad, x, table, torch.empty_like(x, memory_format=order), spec)


def backward_kernel(grad: Tensor, x: Tensor, table: Tensor, dx: Tensor, spec: str) -> Tensor:
    """Fill ``dx`` with the gradient of a spec that has a gather: a plan takes it back through the
    colours, then a kernel through the gather."""
    from deuteron.augment import gpu

    coloured = bool(spec_of(spec).colours)
    if coloured:
        sampled = torch.empty(grad.shape, dtype=table.dtype, device=x.device)
        gpu.sampled(x, table, sampled, spec)
        types = TensorType.from_tensor(sampled), TensorType.from_tensor(grad)
        plan = _finish_plan(spec, *types, x.device)
        grad = plan.run(sampled=sampled, table=table, grad_y=grad)["grad_sampled"]
    gpu.backward(grad, table, dx, spec, scaled=not coloured)
    return dx


@augment_backward.register_fake
def _augment_backward_fake(grad: Tensor, x: Tensor, table: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x, memory_format=_format(_is_nhwc(x)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, ctx.spec = inputs
    ctx.save_for_backward(x, table)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient for images comes from :func:`augment_backward`. That for the table, and one that
    is to be differentiated again, comes from torch's operators."""
    given = x, table = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not wanted[1] and not (wanted[0] and again):
        return augment_backward(grad, x, table, ctx.spec) if wanted[0] else None, None, None
    with torch.enable_grad():
        y = by_references(x, table, ctx.spec)
    if not y.requires_grad:  # no step reads the table
        return None, None, None
    some = [t for t, want in zip(given, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, some, grad, create_graph=again, allow_unused=True))
    return *(next(found) if want else None for want in wanted), None


augment.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("deuteron::augment_draw", mutates_args=())
def augment_draw(
    x: torch.Tensor, step: torch.Tensor, index: torch.Tensor | None, spec: str, seed: int
) -> torch.Tensor:
    """Draw the table of parameters for images like ``x``, for compiled programs. It is a copy,
    which the caller may write to."""
    table = table_for(spec_of(spec), seed, int(step), x, index)
    return table.clone() if index is None else table


@augment_draw.register_fake
def _draw_fake(x: Tensor, step: Tensor, index: Tensor | None, spec: str, seed: int) -> Tensor:
    made = spec_of(spec)
    return x.new_empty((x.shape[0], made.columns), dtype=made.compute_dtype(x.dtype))


# ---- graphs and plans


def by_references(x: Tensor, table: Tensor, spec: str) -> Tensor:
    """Compute the result by torch's operators, one by one, where autograd or a transform must see
    them."""
    _check(spec_of(spec), x, table)
    graph = _graph(spec, TensorType.from_tensor(x)).ir()
    return evaluate(graph, {"x": x, "table": table}, differentiable=True)["y"]


def _graph(spec: str, images: TensorType) -> Graph:
    """The graph of a spec for images of this type."""
    made, g = spec_of(spec), Graph("augment")
    x = g.tensor("x", images.shape, images.dtype, strides=images.strides)
    emit(g, made, x, g.tensor("table", *table_type(made, images))).output("y")
    return g


@lru_cache(maxsize=256)
def _plan(spec: str, images: TensorType, device: torch.device, wanted: str) -> Plan:
    """The plan of a spec for images of this type. ``wanted``: "" for a plan of the result, or the
    name of the input whose gradient is planned."""
    g = _graph(spec, images)
    return (_gradient_only(g, wanted) if wanted else g).compile(device=device, policy=EAGER)


@lru_cache(maxsize=256)
def _finish_plan(spec: str, sampled: TensorType, result: TensorType, device: torch.device) -> Plan:
    """The plan of the gradient of what follows the gather."""
    made, g = spec_of(spec), Graph("augment_finish")
    values = g.tensor("sampled", sampled.shape, sampled.dtype)
    table = g.tensor("table", (sampled.shape[0], made.columns), sampled.dtype)
    nhwc = result.is_layout("nhwc") and not result.is_layout("contiguous")
    finish(g, made, values, table, result.dtype.torch, nhwc).output("y")
    return _gradient_only(g, "sampled").compile(device=device, policy=ORDERED)


def _gradient_only(g: Graph, wrt: str) -> Graph:
    """A graph with the gradient of y as its only output, so that nothing else is computed."""
    g, name = g.grad("y", wrt=[wrt]), f"grad_{wrt}"
    g.build.outputs = {name: g.build.outputs[name]}
    return g


# ---- tensors


def table_type(spec: Spec, images: TensorType) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and element type of the table for such images."""
    return (images.shape[0], spec.columns), spec.compute_dtype(images.dtype.torch)


def _is_nhwc(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _format(nhwc: bool) -> torch.memory_format:
    return torch.channels_last if nhwc else torch.contiguous_format


def empty_result(x: Tensor, spec: str) -> Tensor:
    made = spec_of(spec)
    shape = (*x.shape[:2], *made.result_size((x.shape[2], x.shape[3])))
    kind, order = made.result_dtype(x.dtype), _format(made.layout(_is_nhwc(x)) == "nhwc")
    return torch.empty(shape, dtype=kind, device=x.device, memory_format=order)


def _check(spec: Spec, x: Tensor, table: Tensor) -> None:
    spec.check_image(x.shape, x.dtype)
    kind, shape = spec.compute_dtype(x.dtype), [x.shape[0], spec.columns]
    fits = table.ndim == 2 and table.shape[0] == shape[0] and table.shape[1] == shape[1]
    if not fits or table.dtype != kind or table.device != x.device:
        given = f"{shown(table.dtype, table.shape)} on {table.device}"
        wrong = f"the table is {given}, not {shown(kind, shape)} on {x.device}"
        raise BindError(wrong, asked="augment", remedy="make it with pipeline.table(x)")
