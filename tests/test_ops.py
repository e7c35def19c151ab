"""Every operator against its own samples: inference, gradients, and opinions about bad input.

The cases are generated from ``OpDef.samples``; nothing here knows an operator by name.
"""

from __future__ import annotations

from itertools import groupby, islice

import pytest
import torch
from tolerances import GRADIENT

import deuteron as dt
from deuteron.ir import GraphBuilder, TensorType, check, parse_graph
from deuteron.ir.types import same_strides
from deuteron.ops import TABLE, OpDef, Ops, Sample, infer
from deuteron.ops.evaluate import evaluate
from deuteron.passes.differentiate import differentiate

CASES = [(op, s) for op in TABLE.values() for s in op.samples()]
IDS = [f"{op.name}-{s}" for op, s in CASES]


def one_node_graph(op: OpDef, sample: Sample, tensors: list[torch.Tensor | None]):
    """A graph of the one operator, its inputs named x0, x1 …"""
    build = GraphBuilder(infer, op.name)
    ops = Ops(build)
    ins, feed = [], {}
    for i, t in enumerate(tensors):
        if t is None:
            ins.append(None)
            continue
        ins.append(build.input(f"x{i}", TensorType.from_tensor(t)))
        feed[f"x{i}"] = t
    outs = build.emit(op.name, ins, sample.attrs)
    for i, out in enumerate(outs):
        ops.sym(out).output(f"y{i}")
    return build.finish(), feed


def test_every_operator_has_samples_and_a_docstring():
    for op in TABLE.values():
        assert op.samples(), op.name
        assert len(op.doc) > 8, op.name


FIRST = {
    id(s) for _, group in groupby(CASES, lambda case: case[0].name) for _, s in islice(group, 2)
}


IN_ALL = [False, pytest.param(True, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("in_all", IN_ALL)
@pytest.mark.parametrize(("op", "sample"), CASES, ids=IDS)
def test_inference_says_what_the_reference_returns(op, sample, in_all):
    """In a quick run only the first samples of each operator in several types."""
    for ft in ("f32", "f16", "f64") if in_all or id(sample) in FIRST else ("f32",):
        tensors = sample.tensors(ft)
        graph, feed = one_node_graph(op, sample, tensors)
        check(graph, infer)
        assert parse_graph(str(graph)) == graph
        try:
            results = evaluate(graph, feed)
        except (RuntimeError, NotImplementedError) as error:
            if ft == "f16" and "not implemented for" in str(error):
                continue  # this torch has no half kernel on the CPU
            raise
        for name, value in graph.outputs:
            said, got = graph.types[value], TensorType.from_tensor(results[name])
            assert (said.shape, said.dtype) == (got.shape, got.dtype), name
            if not op.view:
                assert said.is_dense or 0 in said.shape
            assert same_strides(said.shape, said.strides, got.strides), (
                f"{name}: inferred {said}, reference gave {got}"
            )


GRAD_CASES = [(op, s) for op, s in CASES if s.grad and op.vjp is not None]


@pytest.mark.parametrize("directions", [1, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("op", "sample"), GRAD_CASES, ids=[f"{op.name}-{s}" for op, s in GRAD_CASES]
)
def test_gradients_match_finite_differences(op, sample, directions):
    tensors = sample.tensors("f64", seed=1)
    graph, feed = one_node_graph(op, sample, tensors)
    wrt = [n for n, t in feed.items() if t.is_floating_point() and t.numel()]
    float_outs = [(n, v) for n, v in graph.outputs if graph.types[v].dtype.is_float]
    for name, value in float_outs[:1] if wrt else []:
        back = differentiate(graph, name, wrt)
        check(back, infer)
        gen = torch.Generator().manual_seed(2)
        shape = graph.types[value].shape
        seed = torch.randn(shape, generator=gen, dtype=torch.float64)
        if graph.types[value].numel == 1:
            seed = torch.ones(shape, dtype=torch.float64)
        feed_back = dict(feed)
        if f"grad_{name}" in back.inputs:
            feed_back[f"grad_{name}"] = seed
        got = evaluate(back, feed_back, float64=True)  # or a cast would round the differences
        for inp in wrt:
            want = directional(graph, feed, name, seed, inp, gen, count=directions)
            for direction, slope in want:
                have = float((got[f"grad_{inp}"] * direction).sum())
                size = max(1.0, abs(slope), float(got[f"grad_{inp}"].abs().max()))
                assert abs(have - slope) <= GRADIENT * size, (inp, have, slope)


def directional(graph, feed, out, seed, inp, gen, step=1e-6, *, count):
    """Central differences of ⟨seed, out⟩ along random directions of one input."""
    base = feed[inp]
    found = []
    for _ in range(count):
        d = torch.randn(base.shape, generator=gen, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            moved = torch.empty_strided(
                base.shape, TensorType.from_tensor(base).dense_like().strides, dtype=base.dtype
            ).copy_(base + sign * step * d)
            result = evaluate(graph, {**feed, inp: moved}, float64=True)[out]
            values.append(float((result * seed).sum()))
        found.append((d, (values[0] - values[1]) / (2 * step)))
    return found


def test_instance_norm_of_no_channels_is_empty():
    """As torch has it; group_norm, by which it is computed, wants one group at least."""
    g = dt.Graph()
    g.instance_norm(g.tensor("x", (2, 0, 3))).output("y")
    assert evaluate(g.ir(), {"x": torch.empty(2, 0, 3)})["y"].shape == (2, 0, 3)
