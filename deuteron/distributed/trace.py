"""Traces a training step to graphs, without memory for its tensors and without running it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from deuteron.errors import GraphError
from deuteron.frontends.aten import TABLE
from deuteron.frontends.torch_fx import Importer
from deuteron.functional.core import entries
from deuteron.ir.graph import Graph
from deuteron.ir.types import TensorType
from deuteron.plan.tensors import overlaps

ASKED = "a prediction for several ranks"
SEED = "seed"  # the gradient of the loss, with which the backward pass begins


@dataclass(frozen=True)
class Traced:
    """The graphs of a step. ``forward`` computes the loss; the ``source`` of its nodes is the name
    of the repeated block that they are in. ``joint`` computes the loss, as its first output, and
    from the input :data:`SEED` the gradients. ``params``: name of a parameter → input of the
    graphs; ``grads``: names of the parameters that the loss has a gradient for."""

    forward: Graph
    joint: Graph
    params: Mapping[str, str]
    grads: frozenset[str]

    def goes_back(self, names: Collection[str]) -> bool:
        """Whether the backward pass goes through where these parameters are read: some of them are
        trained, or are read together with values that depend on trained parameters."""
        if not self.grads.isdisjoint(names):
            return True
        own = {self.params[name] for name in names}
        trained = {self.params[name] for name in self.grads}
        for node in self.forward.nodes:
            read = own.intersection(node.uses)
            if read and not trained.isdisjoint(node.uses):
                return True
            if not trained.isdisjoint(node.uses):
                trained.update(node.outputs)
            elif read and own.issuperset(node.uses):  # a view or a cast of one
                own.update(node.outputs)
        return False


def traced(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    example: tuple[Any, ...] | Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> Traced:
    """Trace the step of a batch like ``example``: inputs and, last, the target, or keywords of the
    model; with ``loss_fn=None`` the model returns its loss. Parameters may be on the device "meta".
    ``dtype`` is the element type to assume for floating-point parameters and inputs in place of
    their own."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        wrong = "the model is spread over ranks already"
        raise GraphError(wrong, asked=ASKED, remedy="give the model as it was before")
    named = isinstance(example, Mapping)
    mode, params, buffers, batch = _without_values(model, example, dtype)
    with mode:
        seed = torch.ones(())
    trained = [name for name, p in params.items() if p.requires_grad]
    if not trained:
        wrong = "the model has no parameter that is trained"
        raise GraphError(wrong, asked=ASKED, remedy="call requires_grad_() on some")

    def loss_of(params: Any, buffers: Any, batch: Any) -> torch.Tensor:
        given = batch if named or loss_fn is None else batch[:-1]
        how = ((), given) if named else (given,)
        result = torch.func.functional_call(model, (params, buffers), *how)
        loss = result if loss_fn is None else loss_fn(result, batch if named else batch[-1])
        loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", loss)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            wrong = "the loss is not one number"
            raise GraphError(wrong, asked=ASKED, remedy="give a loss_fn that returns one")
        return loss.float().reshape(())

    def step(params: Any, buffers: Any, batch: Any, seed: Any) -> Any:
        loss = loss_of(params, buffers, batch)
        wanted = [params[name] for name in trained]
        return loss, torch.autograd.grad(loss, wanted, seed, allow_unused=True)

    with _tracing(mode, batch):
        joint = make_fx(step, tracing_mode="real")(params, buffers, batch, seed)
        forward = _by_block(model, loss_of, params, buffers, batch)
    step_graph = _imported(joint, "step")
    made = {name for name, _ in step_graph.outputs}
    grads = frozenset(name for i, name in enumerate(trained) if f"result_{i + 1}" in made)
    return Traced(_imported(forward, "forward"), step_graph, _places(joint, list(params)), grads)


def forward_of(model: nn.Module, example: tuple[Any, ...]) -> tuple[Graph, frozenset[str]]:
    """Return the model's graph for inputs like ``example``, and which of its values are parameters
    and buffers or computed from nothing else. Parameters are inputs of the graph as well, so they
    may be on the device "meta". The ``source`` of a node is the name of its repeated block."""
    mode, params, buffers, batch = _without_values(model, example, None)

    def result(params: Any, buffers: Any, batch: Any) -> Any:
        return torch.func.functional_call(model, (params, buffers), batch)

    with _tracing(mode, batch):
        calls = _by_block(model, result, params, buffers, batch)
    graph, fixed = _imported(calls, "forward"), set(_places(calls, [*params, *buffers]).values())
    for node in graph.nodes:
        if fixed.union(graph.constants).issuperset(node.uses):
            fixed.update(node.outputs)
    return graph, frozenset(fixed)


def _without_values(model: nn.Module, example: Any, dtype: torch.dtype | None) -> Any:
    """Return a FakeTensorMode, in which tensors have no values, and in it the parameters, the
    buffers and a batch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def like(t: Any, grad: bool = False) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
        how: Any = {"dtype": kind, "device": "cpu", "requires_grad": grad}
        return torch.empty_strided(t.shape, t.stride(), **how)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        params = {n: like(p.detach(), p.requires_grad) for n, p in model.named_parameters()}
        buffers = {name: like(b.detach()) for name, b in model.named_buffers()}
        given = dict(example) if isinstance(example, Mapping) else tuple(example)
        return mode, params, buffers, pytree.tree_map(like, given)


@contextmanager
def _tracing(mode: Any, batch: Any) -> Iterator[None]:
    """While it is open, calls can be traced, and an error that the model or its loss raises becomes
    a GraphError that names the batch."""
    from torch._dispatch.python import enable_python_dispatcher

    try:
        with mode, enable_python_dispatcher():  # it keeps dropout one operator
            yield
    except GraphError:
        raise
    except Exception as error:
        tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
        where = "a batch of " + ", ".join(str(list(t.shape)) for t in tensors)
        said = next(iter(str(error).splitlines()), "")
        wrong = f"the model or its loss does not take this batch: {type(error).__name__}: {said}"
        remedy = "call both with this batch to see where"
        if type(error).__name__ == "DataDependentOutputException":
            wrong = f"what is computed depends on values, and no value is there: {said}"
            remedy = "leave out the branch or the .item()"
        raise GraphError(wrong, asked=ASKED, where=where, remedy=remedy) from error


def blocks(model: nn.Module) -> list[str]:
    """Names of a model's repeated blocks, in order: children of an ``nn.ModuleList`` or
    ``nn.Sequential`` that have children themselves, and of which there are several of one type."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [(f"{name}.{n}" if name else n, child) for n, child in module.named_children()]
        kinds = [type(child) for _, child in children if next(child.children(), None) is not None]
        found += [n for n, child in children if kinds.count(type(child)) > 1]
    return found


def _by_block(model: nn.Module, f: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Trace the calls of a function, and note for each the repeated block that it is in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def marked(params: Any, buffers: Any, batch: Any) -> Any:  # its arguments name the inputs
        with _marks(model):
            return f(params, buffers, batch)

    with torch.no_grad():
        return make_fx(marked, tracing_mode="real")(*args)


@contextmanager
def _marks(model: nn.Module) -> Iterator[None]:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    nodes, entered = mode.tracer.graph.nodes, list[tuple[int, str]]()
    handles = []
    for name in blocks(model):
        block = model.get_submodule(name)
        mark = lambda *_, name=name: entered.append((len(nodes), name))  # noqa: E731
        handles.append(block.register_forward_pre_hook(mark))
        handles.append(block.register_forward_hook(lambda *_: entered.append((len(nodes), ""))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for (begin, name), (end, _) in pairwise([*entered, (len(nodes), "")]):
        for node in islice(nodes, begin, end):
            node.meta["nn_module_stack"] = {name: (name, None)} if name else {}


def _places(module: fx.GraphModule, names: list[str]) -> dict[str, str]:
    """The inputs of a traced function for these names, which come first and in this order."""
    places = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return dict(zip(names, places, strict=False))


def _imported(module: fx.GraphModule, name: str) -> Graph:
    importer = Importer(name, {**TABLE, **entries()})
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(places):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            importer.bind(node, value)
            continue
        dense = value.contiguous() if overlaps(TensorType.from_tensor(value)) else value
        last = name == "step" and i == len(places) - 1
        importer.input(node, SEED if last else node.name, dense)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            importer.weight(node, node.name, getattr(module, str(node.target)))
        else:
            _without_writing(node)
    importer.run(node for node in module.graph.nodes if node.op != "get_attr")
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    for i, result in enumerate(pytree.tree_leaves(end.args[0])):
        value = importer.entered(importer.value(result))
        if hasattr(value, "name"):
            importer.build.output(f"result_{i}", value.name)
    return importer.finish()


def _without_writing(node: fx.Node) -> None:
    """Replace a call that writes to its operand by the one that returns a new tensor. It costs the
    same, and these graphs are only used for costs and sizes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return
    name = target._schema.name.partition("::")[2]
    for other in (name.rstrip("_"), f"{name}_functional"):
        twin = getattr(torch.ops.aten, other, None)
        kind = "default" if other.endswith("functional") else target._overloadname
        if twin is not None and other != name and kind in twin.overloads():
            node.target = getattr(twin, kind)
            if other.endswith("functional"):  # it also returns what the other overwrites
                args: Any = zip(target._schema.arguments, node.args, strict=False)
                written = (x for a, x in args if a.alias_info and a.alias_info.is_write)
                node.meta["val"] = *node.meta["val"], *(x.meta["val"] for x in written)
