"""Eager functions that are operators of the table, on the samples that each operator brings along.

The calls are made from the operator's record: whoever adds an operator and a function of its name
has these tests. What a function offers beyond its operator is in test_functional.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from deuteron import functional as f
from deuteron.ir import Graph
from deuteron.ir.dtype import dtype as named
from deuteron.ops import TABLE, OpDef
from deuteron.ops.evaluate import evaluate
from deuteron.ops.samples import Sample
from tests.codegen_cases import one_node
from tests.sweeps import one_in
from tests.tolerances import allowed, error

# names that torch has for what is called otherwise in a graph
RENAMED = {
    "axis": ("dim", "seq_dim"),
    "axes": ("dim",),
    "min": ("min_val",),
    "max": ("max_val",),
    "groups": ("num_groups",),
    "factor": ("upscale_factor", "downscale_factor"),
    "mean": ("running_mean",),
    "var": ("running_var",),
    "dims": ("normalized_shape",),
}
OTHERWISE = {"sinusoidal"}  # makes its positions itself, from a length
FIXED = {"batch_norm": ("mean", "var"), "cross_entropy": ("weight",)}  # torch has no gradient
FUNCTIONS = [name for name in f.__all__ if name in TABLE and name not in OTHERWISE]


def call(op: OpDef, sample: Sample, tensors: list[torch.Tensor | None]) -> dict[str, Any] | None:
    """The arguments of the function by name, or None if the sample asks for what it has not."""
    there = inspect.signature(getattr(f, op.name)).parameters
    given = {n.strip("*?"): t for n, t in zip(op.inputs, tensors, strict=False) if t is not None}
    given |= {n: v for n, v in op.normalise(sample.attrs).items() if v is not None}
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = [n for n in (name, *RENAMED.get(name, ())) if n in there]
        if own == ["normalized_shape"]:
            value = tensors[0].shape[-value:]
        if name == "dtype":
            value = named(value).torch
        if own:
            found[own[0]] = value
        elif name not in op.attrs or value != op.attrs[name].default:
            return None
    if op.name == "embedding" and found["padding_idx"] < 0:
        del found["padding_idx"]
    return found


def results(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def calls(name: str, kind: str) -> list[tuple[Sample, Any, dict[str, torch.Tensor], dict]]:
    op, found = TABLE[name], []
    for sample in op.samples():
        graph, feed = one_node(op, sample, kind)
        tensors = [feed.get(f"x{i}") for i in range(len(op.inputs))]
        arguments = call(op, sample, tensors)
        if arguments is not None:
            found.append((sample, graph, feed, arguments))
    assert found, "no sample of the operator can be given to the function"
    return found


@pytest.mark.parametrize("name", one_in(2, FUNCTIONS))
def test_every_sample(name):
    for sample, graph, feed, arguments in calls(name, "f32"):
        exact, plain = evaluate(graph, feed, float64=True), evaluate(graph, feed)
        longest = max(t.numel for t in graph.types.values())
        ours = results(getattr(f, name)(**arguments))
        for got, (result, value) in zip(ours, graph.outputs, strict=True):
            assert tuple(got.shape) == graph.types[value].shape, sample
            off = error(plain[result], exact[result])
            assert error(got, exact[result]) <= allowed(off, got.dtype, longest), sample


def reference(graph: Graph, feed: dict[str, torch.Tensor], leaves: list[str], dtype) -> list[Any]:
    """Gradients by torch, in the given type; None for an input that has none."""
    given = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in feed.items()}
    given |= {n: given[n].requires_grad_() for n in leaves}
    found = evaluate(graph, given, differentiable=True).values()
    return pulled(list(found), [given[n] for n in leaves])


def pulled(found: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[Any]:
    found = [t for t in found if t.requires_grad]
    seeds = [torch.linspace(0.5, 2, t.numel()).to(t.dtype).reshape(t.shape) for t in found]
    if not found:
        return [None] * len(leaves)
    return list(torch.autograd.grad(found, leaves, seeds, allow_unused=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_samples(name):
    """Of the first three that say they have one."""
    checked = [c for c in calls(name, "f32") if c[0].grad][:3]
    for sample, graph, feed, arguments in checked:
        names = {f"x{i}": slot.strip("*?") for i, slot in enumerate(TABLE[name].inputs)}
        fixed = FIXED.get(name, ())
        leaves = [n for n, t in feed.items() if t.is_floating_point() and names[n] not in fixed]
        exact, plain = (reference(graph, feed, leaves, d) for d in (torch.float64, torch.float32))
        own = {id(feed[n]): feed[n].detach().requires_grad_() for n in leaves}
        with_own = {k: own.get(id(v), v) for k, v in arguments.items()}
        ours = pulled(results(getattr(f, name)(**with_own)), list(own.values()))
        longest = max(t.numel for t in graph.types.values())
        for got, want, torchs in zip(ours, exact, plain, strict=True):
            if got is None or want is None:
                assert all(t is None or not t.any() for t in (got, want)), sample
            else:
                bound = allowed(error(torchs, want), got.dtype, longest)
                assert error(got, want) <= bound, sample
