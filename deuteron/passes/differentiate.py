"""Reverse-mode differentiation of graphs: the backward nodes join the forward ones, so that
both are fused and planned together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deuteron.errors import GraphError
from deuteron.ir.graph import Graph
from deuteron.ir.rewrite import start
from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Vjp


def differentiate(graph: Graph, of: str, wrt: Sequence[str]) -> Graph:
    """``graph`` with a further output ``grad_<name>`` for every name in ``wrt``.

    The gradient of output ``of`` is seeded with 1 if it has one element, else with a new
    input ``grad_<of>`` of its shape.
    """
    target = dict(graph.outputs).get(of)
    if target is None:
        have = ", ".join(name for name, _ in graph.outputs) or "none"
        raise GraphError(f"there is no output {of!r}", asked=f"grad({of!r})", remedy=f"use {have}")
    for name in wrt:
        if name not in graph.inputs and name not in graph.constants:
            raise GraphError(
                f"{name!r} is not an input of the graph",
                asked=f"grad({of!r}, wrt={list(wrt)})",
                remedy=f"choose from {', '.join(graph.inputs)}",
            )
        if not graph.types[name].dtype.is_float:
            raise GraphError(
                f"{name!r} is {graph.types[name].dtype.name}: only floats have gradients",
                asked=f"grad({of!r}, wrt={list(wrt)})",
            )
    if not graph.types[target].dtype.is_float:
        raise GraphError(f"output {of!r} is {graph.types[target].dtype.name}, not a float")

    build, _ = start(graph, table.infer)
    for node in graph.nodes:
        build.copy(node, node.inputs, graph.out_types(node))
    build.outputs = list(graph.outputs)
    ops = Ops(build)

    seed_type = graph.types[target]
    if seed_type.numel == 1:
        seed = ops.constant(torch.ones(seed_type.shape, dtype=seed_type.dtype.torch), "one")
    else:
        seed = ops.sym(build.input(f"grad_{of}", seed_type.dense_like()))
    grads = _backward(graph, ops, target, seed, set(wrt))
    for name in wrt:
        grad = grads.get(name)
        zero = ops.zeros(graph.types[name]) if grad is None else grad
        build.output(f"grad_{name}", zero.name)
    return build.finish()


def _backward(graph: Graph, ops: Ops, target: str, seed: Sym, wrt: set[str]) -> dict[str, Sym]:
    needs = set(wrt)  # values that depend on wrt
    for node in graph.nodes:
        if any(v in needs for v in node.uses):
            needs.update(out for out in node.outputs if graph.types[out].dtype.is_float)
    grads: dict[str, Sym] = {target: seed}
    for node in reversed(graph.nodes):
        out_grads = tuple(grads.get(out) for out in node.outputs)
        wants = tuple(v is not None and v in needs for v in node.inputs)
        if not any(wants) or all(g is None for g in out_grads):
            continue
        op = table.get(node.op)
        if op.vjp is None:
            raise GraphError(
                f"{node.op} has no gradient rule",
                where=node.source or f"node → {', '.join(node.outputs)}",
                remedy="leave it outside the differentiated part, or give its OpDef a vjp",
            )
        ops.source = f"grad of {node.source or node.op}"
        ins = tuple(None if v is None else ops.sym(v) for v in node.inputs)
        if not op.variadic:
            ins += (None,) * (len(op.inputs) - len(ins))
            wants += (False,) * (len(ins) - len(wants))
        view = Vjp(ins, tuple(ops.sym(o) for o in node.outputs), out_grads, node.attrs, wants)
        found = list(op.vjp(ops, view))
        for value, want, grad in zip(node.inputs, wants, found, strict=False):
            if value is None or not want or grad is None:
                continue
            expected = graph.types[value]
            if (grad.shape, grad.dtype) != (expected.shape, expected.dtype):
                raise GraphError(
                    f"the gradient of {node.op} for {value!r} is {grad.type}, not {expected}",
                    where=node.source,
                    remedy="this is a fault in the operator's vjp",
                )
            grads[value] = grads[value] + grad if value in grads else grad
    ops.source = ""
    return grads
