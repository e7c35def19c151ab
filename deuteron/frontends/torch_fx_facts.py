"""Facts for the importer: what an fx node says about itself, and what torch says when it is
asked."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from deuteron.errors import GraphError
from deuteron.frontends.aten import SILENT, Site, schema_order
from deuteron.frontends.refusals import written_line
from deuteron.frontends.sparse import is_sparse
from deuteron.ir.types import TensorType, same_strides
from deuteron.ops.emit import Sym
from deuteron.ops.opaque import STRIDES
from deuteron.target import target as find_target

Results = list[TensorType | None]  # of a node
FOLD_LIMIT = 1 << 26  # elements; what is larger is computed when the graph runs

EFFECT = torch.ops.higher_order.with_effects
_CHECK = torch.ops.aten._linalg_check_errors.default

# seconds on a CPU: to call the plans of both halves of a graph (CALLED_S), and what torch takes for
# each operator and its gradient (EACH_S)
CALLED_S, EACH_S = 3e-4, 1.5e-5

STATIC = "use sizes that follow from the shapes of the example inputs; Deuteron plans fixed shapes"


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor that depends on no input of the graph. It enters the graph when it is used."""

    tensor: torch.Tensor
    name: str = "const"

    @property
    def is_sparse(self) -> bool:
        return is_sparse(self.tensor)


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a call that stays ATen's: its value, and the tensor as torch saw it."""

    sym: Sym
    seen: torch.Tensor | None


# ---- what fx says of a node --------------------------------------------------------------------


def only_checked(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Calls that check something, which a graph leaves out, and all that is computed only for
    these, such as the numbers of ``torch._check_tensor_all(…)``."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if str(node.target) in SILENT or (node.users and found.issuperset(node.users)):
            found.add(node)
    return found


def source_of(node: fx.Node) -> str:
    """The path of the module a call comes from, e.g. "layer1.0.conv1"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].").replace("\n", " ")


def line_of(node: fx.Node) -> str:
    """The line of the user's code that made a call, if the tracer recorded it."""
    return node.meta.get("line") or written_line(node.meta.get("stack_trace") or "")


def results(node: fx.Node) -> list[Any]:
    """What torch says the results are: fake tensors, in a list; shapes must be numbers."""
    value = node.meta.get("val")
    found = list(value) if isinstance(value, list | tuple) else [value]
    for tensor in found:
        if isinstance(tensor, torch.Tensor) and not all(type(n) is int for n in tensor.shape):
            shape = ", ".join(map(str, tensor.shape))
            raise GraphError(f"{node.target} gives a tensor of shape [{shape}]", remedy=STATIC)
    return found


def used_results(node: fx.Node) -> frozenset[int]:
    """Which results are read: those picked, or all where something reads the tuple as a whole."""
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return frozenset({0})
    picked = {user.args[1] for user in node.users if user.target is operator.getitem}
    whole = any(user.target is not operator.getitem for user in node.users)
    every = range(len(value))
    return frozenset(i for i in every if whole or i in picked)


def type_of(seen: Any, needed: bool = True) -> TensorType | None:
    """Our type for one of torch's results; None for what is no tensor, and for element types
    we do not have where the result is not ``needed``."""
    if not isinstance(seen, torch.Tensor):
        return None
    try:
        return TensorType.from_tensor(seen)
    except GraphError:
        if not needed:
            return None
        wrong = f"a tensor of {seen.dtype} cannot be kept in a graph"
        remedy = "compute this part with real numbers, or keep it outside the imported module"
        raise GraphError(wrong, remedy=remedy) from None


def deterministic(node: fx.Node) -> bool:
    """Whether a call gives the same answer every time, and one small enough to keep."""
    target = node.target
    assert isinstance(target, OpOverload)
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    if target.namespace == "_c10d_functional":  # other ranks take part, at every call
        return False
    sizes = [t.numel() for t in results(node) if isinstance(t, torch.Tensor)]
    return sum(sizes) <= FOLD_LIMIT


def row_major(node: fx.Node) -> bool:
    """Whether the first argument of a call is a row-major tensor in torch's memory."""
    first = node.args[0] if node.args else None
    seen = first.meta.get("val") if isinstance(first, fx.Node) else None
    return isinstance(seen, torch.Tensor) and seen.is_contiguous()


def one_device(node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """A graph lives on one device; only rank-0 tensors may come from another."""
    here = getattr(results(node)[0], "device", None)
    for arg in node.all_input_nodes:
        seen = arg.meta.get("val")
        if not isinstance(seen, torch.Tensor) or not isinstance(env.get(arg), Sym):
            continue
        if here is not None and seen.ndim and seen.device != here:
            wrong = f"{node.target} brings a tensor from {seen.device} to {here}"
            raise GraphError(wrong, remedy="put the model and its inputs on one device")


def is_token(node: fx.Node) -> bool:
    """Whether a placeholder only keeps calls with effects in their order. It is bound to None."""
    return bool(node.users) and all(user.target is EFFECT for user in node.users)


def check_at_once(node: fx.Node) -> None:
    """Let a call of linear algebra itself complain about a bad matrix. torch would look at what the
    call found out in another call, which is made for its effect alone."""
    later = [reader for picked in node.users for reader in picked.users]
    effects = (reader for reader in later if reader.target is EFFECT)
    if any(map(_is_check, later)) or any(effect.args[1] is _CHECK for effect in effects):
        node.update_kwarg("check_errors", True)


def _is_check(node: fx.Node) -> bool:
    return node.target is _CHECK


def without_dead_code(graph: fx.Graph) -> None:
    """Remove calls whose results nobody needs, except for those that check a matrix."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or _is_check(node))


def is_checked_at_once(node: fx.Node) -> bool:
    """Whether a call with an effect is the check that :func:`check_at_once` has made
    unnecessary."""
    picked: Any = node.args[2] if node.args[1] is _CHECK else None
    made = picked.args[0] if isinstance(picked, fx.Node) and picked.args else None
    return isinstance(made, fx.Node) and made.kwargs.get("check_errors") is True


def see_inside(node: fx.Node) -> None:
    """Let a call that says where in memory it begins, and how far apart its elements are, begin
    where its tensor does. Refuse one that sees memory outside of that tensor, which in torch may be
    part of a larger one: in a graph each value has memory of its own."""
    target: Any = node.target
    name = str(target)
    if not name.startswith("aten.as_strided"):
        return
    given = schema_order(target, node.args, dict(node.kwargs))
    size, stride, offset = given[-3:]
    seen = given[0].meta["val"]
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if offset not in (None, seen.storage_offset()) or last >= max(seen.numel(), 1):
        wrong = f"{name.split('.')[1]} sees memory beside the tensor that it is given"
        remedy = "begin there: x.flatten()[start:].as_strided(size, stride)"
        raise GraphError(wrong, remedy=remedy)
    node.args, node.kwargs = tuple(given[:-1]), {}


# ---- computing with torch ------------------------------------------------------------------------


def computed(target: Any, args: Any, kwargs: Any) -> Any:
    """The answer of a call on known tensors, as :class:`Known` values."""
    given, named = pytree.tree_map_only(Known, attrgetter("tensor"), (list(args), dict(kwargs)))
    if str(target) in STRIDES:  # a tensor filled with one number is kept as that number, expanded
        given = [t.contiguous() if _is_one_number(t) else t for t in given]
    with torch.no_grad():
        answer = target(*given, **named)
    name = next((k.name for k in args if isinstance(k, Known) and k.is_sparse), "const")
    if isinstance(answer, list | tuple):
        return [Known(t) if isinstance(t, torch.Tensor) else t for t in answer]
    return Known(answer, name) if isinstance(answer, torch.Tensor) else answer


def _is_one_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not any(value.stride())


def uniform(tensor: torch.Tensor) -> bool:
    """Whether all elements are one number, down to the sign of zero."""
    if not any(tensor.stride()):
        return True
    first = tensor.flatten()[0]
    if not bool((tensor == first).all()):
        return False
    if bool(first) or not tensor.is_floating_point():
        return True
    signs = torch.signbit(tensor)
    return bool(signs.all()) or not bool(signs.any())


def seen_as_is(argument: Argument) -> bool:
    """Whether torch saw the argument with the strides it has in our graph."""
    have, seen = argument.sym.type, argument.seen
    return seen is None or same_strides(have.shape, have.strides, tuple(seen.stride()))


def in_seen_order(site: Site, argument: Argument, strict: bool) -> Argument:
    """The argument with the strides that torch saw, if a copy can have them; if not, it is refused
    where ``strict``, else returned with dense strides."""
    seen = argument.seen
    if seen is None or seen_as_is(argument):
        return argument
    want = TensorType.from_tensor(seen)
    if strict and not want.is_dense:
        wrong = "this call reads memory in an order that is not kept"
        raise GraphError(wrong, remedy="use reshape, flatten or slicing in its place")
    return Argument(site.laid_as(argument.sym, want), seen)


def infer_again(node: fx.Node, inputs: Sequence[Argument], want: Results) -> Results:
    """The result types for inputs with our strides, which torch works out on meta tensors."""
    left = iter(inputs)

    def meta(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return torch.device("meta") if isinstance(arg, torch.device) else arg
        t = next(left).sym.type
        return torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device="meta")

    assert isinstance(node.target, OpOverload)
    try:
        args, kwargs = pytree.tree_map(meta, (list(node.args), dict(node.kwargs)))
        answer = node.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, StopIteration):
        return want  # torch has no answer without data; its first one stands
    found = answer if isinstance(answer, list | tuple) else (answer,)
    return [type_of(t) for t in found]


def is_too_little(graph: fx.Graph, device: torch.device) -> bool:
    """Whether calling a plan of what torch.compile has captured takes longer than the plan can
    save: few operators on few bytes. On a GPU calls become a CUDA Graph, which takes no time."""
    if device.type != "cpu":
        return False
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    values = pytree.tree_leaves([node.meta.get("example_value") for node in graph.nodes])
    moved = sum(t.nbytes for t in values if isinstance(t, torch.Tensor))
    return len(calls) * EACH_S + 3 * moved / find_target(device).stream < CALLED_S
