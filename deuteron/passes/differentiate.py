"""Reverse-mode differentiation of graphs: backward nodes join the forward ones, so that both are
fused and planned together (:func:`differentiate`), or stand alone (:func:`pullback`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from deuteron.errors import GraphError
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import continued
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Vjp
from deuteron.passes.batch_norm import join_batch_norm
from deuteron.passes.combine import activation_after
from deuteron.passes.expand import written_out

NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm"})


def differentiate(graph: Graph, of: str, wrt: Sequence[str]) -> Graph:
    """``graph`` with a further output ``grad_<name>`` for every name in ``wrt``.

    The gradient of output ``of`` is seeded with 1 if it has one element, else with a new
    input ``grad_<of>`` of its shape. Batch norms in training are joined with what follows them.
    """
    graph = _with_sums(join_batch_norm(written_out(graph)))
    target = dict(graph.outputs).get(of)
    if target is None:
        have = ", ".join(name for name, _ in graph.outputs) or "none"
        raise GraphError(f"there is no output {of!r}", asked=f"grad({of!r})", remedy=f"use {have}")
    asked = f"grad({of!r}, wrt={list(wrt)})"
    for name in wrt:
        if name not in graph.inputs and name not in graph.constants:
            wrong = f"{name!r} is not an input of the graph"
            raise GraphError(wrong, asked=asked, remedy=f"choose from {', '.join(graph.inputs)}")
        if not graph.types[name].dtype.is_float:
            wrong = f"{name!r} is {graph.types[name].dtype.name}: only floats have gradients"
            raise GraphError(wrong, asked=asked)
    if not graph.types[target].dtype.is_float:
        raise GraphError(f"output {of!r} is {graph.types[target].dtype.name}, not a float")

    ops = Ops(build := continued(graph, table.infer))
    build.outputs = dict(graph.outputs)
    seed_type = graph.types[target]
    if seed_type.numel == 1:
        seed = ops.constant(torch.ones(seed_type.shape, dtype=seed_type.dtype.torch), "one")
    else:
        seed = ops.sym(build.input(f"grad_{of}", seed_type.dense_like()))
    _add_gradients(graph, ops, {target: seed}, wrt)
    return build.finish()


def pullback(
    graph: Graph, of: Mapping[str, TensorType], wrt: Sequence[str], kept: Sequence[str] = ()
) -> Graph:
    """Return a graph of the gradients alone. Its inputs are the inputs of ``graph`` that the
    gradients depend on, and one input ``grad_<name>`` for every output named in ``of``; it has an
    output ``grad_<name>`` for every input in ``wrt``. Forward values that the gradients need are
    computed again, except for the outputs in ``kept``: these become inputs, under the names of
    their values (the names in :func:`written_out`, where ``graph`` holds operators without a
    gradient rule).

    ``of`` gives the types in which the gradients arrive, strides included."""
    graph = _with_sums(written_out(graph))
    ops = Ops(build := continued(graph, table.infer))
    values = dict(graph.outputs)
    seeds: dict[str, Sym] = {}
    for name, type_ in of.items():
        seed = ops.sym(build.input(f"grad_{name}", type_))
        value = values[name]
        seeds[value] = seeds[value] + seed if value in seeds else seed
    _add_gradients(graph, ops, seeds, wrt)
    whole = build.finish()
    known = dict.fromkeys(values[name] for name in kept)  # the same order in every process
    nodes, live = whole.needed(known)
    made = {out for node in nodes for out in node.outputs}
    inputs = tuple(v for v in (*whole.inputs, *known) if v in live and v not in made)
    constants = {v: c for v, c in whole.constants.items() if v in live}
    return whole.only(nodes, inputs, whole.outputs, constants)


def _with_sums(graph: Graph) -> Graph:
    """Return ``graph`` with attention that also returns the log-sum-exp of each query's scores,
    which its gradient needs."""
    nodes, types = list[Node](), dict(graph.types)
    for node in graph.nodes:
        if node.op == "attention":
            sums = f"{node.output}_lse"
            while sums in types:
                sums += "_"
            types[sums] = table.infer("attention_lse", graph.in_types(node), node.attrs)[1][1]
            node = replace(node, op="attention_lse", outputs=(node.output, sums))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types)


def _add_gradients(graph: Graph, ops: Ops, seeds: Mapping[str, Sym], wrt: Sequence[str]) -> None:
    """Emit the backward nodes, and their results as outputs ``grad_<name>``."""
    grads = _backward(graph, ops, seeds, set(wrt))
    for name in wrt:
        grad = grads.get(name)
        zero = ops.zeros(graph.types[name]) if grad is None else grad
        ops.build.output(f"grad_{name}", zero.name)


def _backward(graph: Graph, ops: Ops, seeds: Mapping[str, Sym], wrt: set[str]) -> dict[str, Sym]:
    needs = set(wrt)  # values that depend on wrt
    for node in graph.nodes:
        if any(v in needs for v in node.uses):
            needs.update(out for out in node.outputs if graph.types[out].dtype.is_float)
    taken = _activations_after_norms(graph)
    passed = {act.output for act, _ in taken.values()}
    grads: dict[str, Sym] = dict(seeds)
    for node in reversed(graph.nodes):
        out_grads = tuple(grads.get(out) for out in node.outputs)
        wants = tuple(v is not None and v in needs for v in node.inputs)
        if not any(wants) or all(g is None for g in out_grads):
            continue
        if node.outputs[0] in passed:  # the gradient of the norm before it includes this slope
            assert out_grads[0] is not None
            grads[node.uses[0]] = out_grads[0]
            continue
        op = table.get(node.op)
        if op.vjp is None:
            where = node.source or f"node → {', '.join(node.outputs)}"
            remedy = "leave it outside the differentiated part, or give its OpDef a vjp"
            raise GraphError(f"{node.op} has no gradient rule", where=where, remedy=remedy)
        ops.source = f"grad of {node.source or node.op}"
        ins = tuple(None if v is None else ops.sym(v) for v in node.inputs)
        if not op.variadic:
            ins += (None,) * (len(op.inputs) - len(ins))
            wants += (False,) * (len(ins) - len(wants))
        after = taken.get(node.outputs[0])
        attrs = node.attrs if after is None else {**node.attrs, "activation": after[1]}
        view = Vjp(ins, tuple(ops.sym(o) for o in node.outputs), out_grads, attrs, wants)
        for value, want, grad in zip(node.inputs, wants, list(op.vjp(ops, view)), strict=False):
            if value is None or not want or grad is None:
                continue
            expected = graph.types[value]
            if (grad.shape, grad.dtype) != (expected.shape, expected.dtype):
                wrong = f"the gradient of {node.op} for {value!r} is {grad.type}, not {expected}"
                remedy = "this is a fault in the operator's vjp"
                raise GraphError(wrong, where=node.source, remedy=remedy)
            grads[value] = grads[value] + grad if value in grads else grad
    ops.source = ""
    return grads


def _activations_after_norms(graph: Graph) -> dict[str, tuple[Node, str]]:
    """Return the activations that alone read the result of a norm, keyed by that result. One kernel
    then takes the gradient through both, and nothing between them goes through memory."""
    norms = (node for node in graph.nodes if node.op in NORMS)
    found = {node.outputs[0]: activation_after(graph, node) for node in norms}
    return {value: after for value, after in found.items() if after is not None}
