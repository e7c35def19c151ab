"""Running a recipe on tensors: the operators ``torch.ops.deuteron.augment…`` and their gradient.

On a GPU the forward pass is the kernel of ``kernels/triton/augment.py``, and the gradient of the
gather that of ``augment_grad.py``; the gradient of colours between them is planned. On the CPU the
graph of ``emit.py``, or of its gradient, is planned for the shapes at hand and kept.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from deuteron.augment.draw import table_for
from deuteron.augment.emit import emit, finish
from deuteron.augment.recipe import Recipe, recipe_of, torch_type
from deuteron.errors import BindError
from deuteron.frontends.builder import Graph
from deuteron.functional.context import is_watched
from deuteron.ir import TensorType
from deuteron.ops.evaluate import evaluate
from deuteron.plan import Plan
from deuteron.policy import Policy

# a caller may capture the call in a graph of its own
EAGER, ORDERED = Policy(cuda_graph=False), Policy(cuda_graph=False, deterministic=True)


@torch.library.custom_op("deuteron::augment", mutates_args=())
def augment(x: torch.Tensor, table: torch.Tensor, recipe: str) -> torch.Tensor:
    """Images ``x`` [N, C, H, W] by a recipe, with the parameters in ``table`` [N, columns]."""
    return augment_now(x, table, recipe)


def needs_operator(x: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether autograd, a trace or a transform must see the call. An operator written in Python
    takes 60 µs to get to its code, which for a few small images is most of the time."""
    return (
        ((x.requires_grad or table.requires_grad) and torch.is_grad_enabled())
        or type(x) is not torch.Tensor
        or torch.compiler.is_compiling()
        or is_watched()
    )


def augment_now(x: torch.Tensor, table: torch.Tensor, recipe: str) -> torch.Tensor:
    """What the operator does."""
    made = recipe_of(recipe)
    _check(made, x, table)
    # kernels read memory as it is
    x, table = x.resolve_neg(), table.resolve_neg().contiguous()
    if x.shape[0] == 0:
        return _empty_result(made, x)
    if x.is_cuda and has_triton():
        return forward_kernel(x, table, recipe)
    plan = _plan(recipe, TensorType.from_tensor(x), x.device, "")
    return plan.run(x=x, table=table)["y"]


@augment.register_fake
def _augment_fake(x: torch.Tensor, table: torch.Tensor, recipe: str) -> torch.Tensor:
    made = recipe_of(recipe)
    _check(made, x, table)
    return _empty_result(made, x)


@torch.library.custom_op("deuteron::augment_backward", mutates_args=())
def augment_backward(
    grad: torch.Tensor, x: torch.Tensor, table: torch.Tensor, recipe: str
) -> torch.Tensor:
    """The gradient for ``x``, given that of the result."""
    made = recipe_of(recipe)
    order = _format(_is_nhwc(x))
    if x.shape[0] == 0:
        return torch.empty_like(x, memory_format=order)
    grad, x, table = grad.resolve_neg(), x.resolve_neg(), table.resolve_neg().contiguous()
    grad = grad.contiguous(memory_format=_format(made.layout(_is_nhwc(x)) == "nhwc"))
    if made.geometric and x.is_cuda and has_triton():
        return backward_kernel(grad, x, table, recipe)
    plan = _plan(recipe, TensorType.from_tensor(x), x.device, "x")
    found = plan.run(x=x, table=table, grad_y=grad)["grad_x"]
    return found.contiguous(memory_format=order)


@augment_backward.register_fake
def _augment_backward_fake(
    grad: torch.Tensor, x: torch.Tensor, table: torch.Tensor, recipe: str
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_format(_is_nhwc(x)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, table, ctx.recipe = inputs
    ctx.save_for_backward(x, table)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The kernel knows the gradient for images; that for parameters, and second derivatives, come
    from torch's operators."""
    x, table = ctx.saved_tensors
    of_images, of_table, _ = ctx.needs_input_grad
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if of_table or (of_images and again):
        return *_by_autograd(grad, x, table, ctx.recipe, (of_images, of_table), again), None
    return augment_backward(grad, x, table, ctx.recipe) if of_images else None, None, None


def _by_autograd(
    grad: torch.Tensor,
    x: torch.Tensor,
    table: torch.Tensor,
    recipe: str,
    wanted: tuple[bool, bool],
    again: bool,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for x and table by torch's operators, differentiable if ``again``."""
    with torch.enable_grad():
        y = by_references(x, table, recipe)
    if not y.requires_grad:  # the parameters of no step
        return None, None
    some = [t for t, w in zip((x, table), wanted, strict=True) if w]
    found = iter(torch.autograd.grad(y, some, grad, create_graph=again, allow_unused=True))
    return tuple(next(found) if w else None for w in wanted)


augment.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("deuteron::augment_draw", mutates_args=())
def augment_draw(
    x: torch.Tensor, step: torch.Tensor, index: torch.Tensor | None, recipe: str, seed: int
) -> torch.Tensor:
    """The table of parameters for images like ``x``, a copy of its own; for compiled programs."""
    made = recipe_of(recipe)
    which = x.shape[0] if index is None else index
    size, kind = (x.shape[2], x.shape[3]), made.compute_dtype(x.dtype)
    table = table_for(made, seed, int(step), which, size, kind, x.device)
    return table.clone() if index is None else table


@augment_draw.register_fake
def _augment_draw_fake(
    x: torch.Tensor, step: torch.Tensor, index: torch.Tensor | None, recipe: str, seed: int
) -> torch.Tensor:
    made = recipe_of(recipe)
    return x.new_empty((x.shape[0], made.columns), dtype=made.compute_dtype(x.dtype))


def forward_kernel(x: torch.Tensor, table: torch.Tensor, recipe: str) -> torch.Tensor:
    """The whole recipe by the Triton kernel."""
    from deuteron.kernels.triton.augment import augment as launch

    y = _empty_result(recipe_of(recipe), x)
    launch(x, table, y, *kernel_arguments(recipe, x.shape[1], table.dtype, x.device))
    return y


def backward_kernel(
    grad: torch.Tensor, x: torch.Tensor, table: torch.Tensor, recipe: str
) -> torch.Tensor:
    """The gradient for ``x`` of a recipe with a gather: colours as planned, then the kernel."""
    from deuteron.kernels.triton.augment import augment as launch
    from deuteron.kernels.triton.augment_grad import gather_grad

    made = recipe_of(recipe)
    normal, _, *how = kernel_arguments(recipe, x.shape[1], table.dtype, x.device)
    scale = normal[0] if normal is not None else None
    if made.colours:
        sampled = torch.empty(grad.shape, dtype=table.dtype, device=x.device)
        launch(x, table, sampled, None, (), *how)
        plan = _finish_plan(
            recipe, TensorType.from_tensor(sampled), TensorType.from_tensor(grad), x.device
        )
        grad = plan.run(sampled=sampled, table=table, grad_y=grad)["grad_sampled"]
        scale = None
    dx = torch.empty_like(x, memory_format=_format(_is_nhwc(x)))
    gather_grad(grad, table, dx, scale, *how)
    return dx


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=256)
def kernel_arguments(
    recipe: str, channels: int, kind: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """What the kernel wants to know of a recipe beside the tensors."""
    made = recipe_of(recipe)
    normal = None
    if made.normalize:
        pairs = torch.tensor(made.scale_and_shift(channels), dtype=torch.float64)
        normal = pairs.to(kind).to(device)
    moves = made.interpolation if made.geometric else "none"
    return normal, made.kinds, moves, made.padding, made.projective


def by_references(x: torch.Tensor, table: torch.Tensor, recipe: str) -> torch.Tensor:
    """The result by torch's operators, one by one, for autograd and transforms that must see
    them."""
    _check(recipe_of(recipe), x, table)
    graph = _graph(recipe, TensorType.from_tensor(x)).ir()
    return evaluate(graph, {"x": x, "table": table}, differentiable=True)["y"]


def _graph(recipe: str, images: TensorType) -> Graph:
    """The recipe for images of this type."""
    made = recipe_of(recipe)
    g = Graph("augment")
    x = g.tensor("x", images.shape, images.dtype, strides=images.strides)
    table = g.tensor("table", *table_type(made, images))
    emit(g, made, x, table).output("y")
    return g


@lru_cache(maxsize=256)
def _plan(recipe: str, images: TensorType, device: torch.device, wanted: str) -> Plan:
    """The planned graph for images of this type; ``wanted`` is "" for the result, else the
    input whose gradient it is."""
    g = _graph(recipe, images)
    if wanted:
        g = _gradient_only(g, wanted)
    return g.compile(device=device, policy=EAGER)


@lru_cache(maxsize=256)
def _finish_plan(
    recipe: str, sampled: TensorType, result: TensorType, device: torch.device
) -> Plan:
    """The gradient of what follows the gather."""
    made = recipe_of(recipe)
    g = Graph("augment_finish")
    values = g.tensor("sampled", sampled.shape, sampled.dtype)
    table = g.tensor("table", (sampled.shape[0], made.columns), sampled.dtype)
    nhwc = result.is_layout("nhwc") and not result.is_layout("contiguous")
    finish(g, made, values, table, torch_type(result.dtype), nhwc).output("y")
    return _gradient_only(g, "sampled").compile(device=device, policy=ORDERED)


def _gradient_only(g: Graph, wrt: str) -> Graph:
    """The gradient of y as the only output, so that nothing else is computed."""
    g = g.grad("y", wrt=[wrt])
    g.build.outputs = [pair for pair in g.build.outputs if pair[0] == f"grad_{wrt}"]
    return g


def table_type(recipe: Recipe, images: TensorType) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and element type of the table for such images."""
    return (images.shape[0], recipe.columns), recipe.compute_dtype(torch_type(images.dtype))


def _is_nhwc(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _format(nhwc: bool) -> torch.memory_format:
    return torch.channels_last if nhwc else torch.contiguous_format


def _empty_result(recipe: Recipe, x: torch.Tensor) -> torch.Tensor:
    height, width = recipe.result_size((x.shape[2], x.shape[3]))
    return torch.empty(
        (x.shape[0], x.shape[1], height, width),
        dtype=recipe.result_dtype(x.dtype),
        device=x.device,
        memory_format=_format(recipe.layout(_is_nhwc(x)) == "nhwc"),
    )


def _check(recipe: Recipe, x: torch.Tensor, table: torch.Tensor) -> None:
    recipe.check_image(x.shape, x.dtype)
    kind = recipe.compute_dtype(x.dtype)
    fits = table.ndim == 2 and table.shape[0] == x.shape[0] and table.shape[1] == recipe.columns
    if not fits or table.dtype != kind or table.device != x.device:
        raise BindError(
            f"the table is {str(table.dtype).removeprefix('torch.')}{list(table.shape)} on "
            f"{table.device}, not {str(kind).removeprefix('torch.')}"
            f"{[x.shape[0], recipe.columns]} on {x.device}",
            asked="augment",
            remedy="make it with pipeline.table(x)",
        )
