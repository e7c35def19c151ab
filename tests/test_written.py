"""What is written piece by piece, as loops fill a tensor, is joined once, where somebody reads."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import deuteron as dt
from deuteron.frontends.torch_export import import_module
from deuteron.ir.spec import check
from deuteron.ops import table as table_of_operators
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context, run_passes
from deuteron.passes.piecewise_writes import _Writing, joined_once
from tests.sweeps import one_in
from tests.tolerances import allowed, error

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def simplified(module, *given):
    graph = import_module(module, given, {}).graph
    return run_passes(graph, Context(dt.target("cpu"), dt.Policy()))[0]


def right(module, *given):
    with torch.no_grad():
        want, plain = module.double()(*(x.double() for x in given)), module.float()(*given)
        got = dt.optimize(module, given, find=False)(*given)
    assert error(got, want) <= allowed(error(plain, want), torch.float32)


class Loop(nn.Module):
    """``write(out, x, i)`` for each step, into a buffer of zeros."""

    def __init__(self, write, steps=6, like=None):
        super().__init__()
        self.write, self.steps, self.like = write, steps, like

    def forward(self, x):
        out = torch.zeros_like(x) if self.like is None else x.new_zeros(self.like)
        for i in range(self.steps):
            self.write(out, x, i)
        return out.tanh()


def each_row(out, x, i):
    out[:, i] = x[:, i].exp()


def backwards(out, x, i):
    out[:, 5 - i] = x[:, i].exp()


def by_what_was_written(out, x, i):
    out[:, i] = x[:, i] + (out[:, i - 1] if i else 0.0)


def by_the_last_three(out, x, i):
    out[:, i] = x[:, i] + out[:, max(0, i - 3) : i].sum(1)


def two_at_a_time(out, x, i):
    if i % 2 == 0:
        out[:, i : i + 2] = x[:, i : i + 2].exp()


def twice(out, x, i):
    out[:, i] = x[:, i]
    out[:, i] = out[:, i] * x[:, i]


def scattered(out, x, i):
    out[:, (i * 5 + 1) % 6] = x[:, i].exp()


def some(out, x, i):
    if i % 3 != 1:
        out[:, i] = x[:, i].exp()


def of_the_last_axis(out, x, i):
    if i < 3:
        out[..., i] = x[..., 2 - i].sin()


def every_second(out, x, i):
    if i < 2:
        out[:, i::2] = x[:, 1 - i :: 2].exp()


ALL = [
    every_second,
    each_row,
    backwards,
    by_what_was_written,
    by_the_last_three,
    two_at_a_time,
    twice,
]
ALL += [scattered, some, of_the_last_axis]


@pytest.mark.parametrize("write", one_in(2, ALL))
def test_a_loop_that_fills_a_buffer_joins_it_once(write):
    x = torch.randn(2, 6, 3)
    ops = Counter(node.op for node in simplified(Loop(write), x).nodes)
    whole = 3 if write is by_the_last_three else 1  # windows of the last few are joined as well
    assert ops["concat"] <= whole + 2
    right(Loop(write), x)


def table(out, x, i):
    """A table that each cell of which follows from three others, as in dynamic programming."""
    for j in range(4):
        before = (
            [out[i - 1, j - 1]] * (i > 0 < j)
            + [out[i - 1, j]] * (i > 0)
            + [out[i, j - 1]] * (j > 0)
        )
        least = torch.stack(before).amin(0) if before else 0.0
        out[i, j] = x[i, j] + least


def test_a_table_is_read_where_it_was_written():
    x = torch.randn(4, 4)
    graph = simplified(Loop(table, steps=4), x)
    long = [n for n in graph.nodes if n.op == "concat" and graph.types[n.output].numel > 4]
    assert len(long) == 1
    right(Loop(table, steps=4), x)


class Asked(nn.Module):
    """Somebody reads all of the buffer at every step."""

    def forward(self, x):
        out, total = torch.zeros_like(x), 0.0
        for i in range(4):
            out[:, i] = x[:, i] * 2
            total = total + out.exp()
        return total


def test_what_is_read_whole_is_still_made():
    x = torch.randn(2, 4, 3)
    assert sum(node.op == "concat" for node in simplified(Asked(), x).nodes) == 4
    right(Asked(), x)


def test_a_long_loop_takes_time_by_its_length(monkeypatch):
    """Not by the square of it, although every step has one piece more than the one before."""
    count, g, steps = 400, dt.Graph("loop"), list[object]()
    into = _Writing._into
    monkeypatch.setattr(
        _Writing, "_into", lambda self, *given: (steps.append(given), into(self, *given))[1]
    )
    x = g.tensor("x", (count, 2))
    out = x
    for i in range(count):
        row = g.exp(g.slice(x, axis=0, start=i, stop=i + 1))
        rest = [g.slice(out, axis=0, start=0, stop=i)] if i else []
        rest += [row] + ([g.slice(out, axis=0, start=i + 1, stop=count)] if i + 1 < count else [])
        out = g.concat(rest, axis=0)
    g.tanh(out).output("y")
    ctx = Context(dt.target("cpu"), dt.Policy())
    graph = joined_once(g.ir(), ctx)
    (concat,) = [node for node in graph.nodes if node.op == "concat"]
    assert len(concat.uses) == count
    assert len(graph.nodes) == 2 * count + 2 and len(steps) < 10 * count


@pytest.mark.parametrize("axes", [(1, 2), (2, 1), (1, 1)])
def test_what_is_rolled_along_two_axes_stays_as_it_is(axes):
    """Joining it along the other axis first would be as many bytes in more copies."""

    class Rolled(nn.Module):
        def forward(self, x):
            return torch.roll(torch.roll(x, 2, axes[0]), 3, axes[1]).tanh()

    x = torch.randn(2, 7, 9)
    assert sum(node.op == "concat" for node in simplified(Rolled(), x).nodes) <= 2
    right(Rolled(), x)


@st.composite
def cuts(draw):
    """A graph that cuts values and joins parts of them, over and over."""
    g = dt.Graph("cuts")
    values = [g.tensor(f"x{i}", (4, 5, 1)) for i in range(3)]
    for _ in range(draw(st.integers(2, 12))):
        kind, x = draw(st.sampled_from("cut cut join join write view work".split())), values[-1]
        x = draw(st.sampled_from(values)) if kind != "view" else x
        axis = draw(st.integers(0, len(x.shape) - 1))
        low = draw(st.integers(0, x.shape[axis]))
        high = draw(st.integers(low, x.shape[axis]))
        if kind == "cut" and low < high:
            x = g.slice(x, axis=axis, start=low, stop=high)
        elif kind == "join":
            fits = [
                v
                for v in values
                if len(v.shape) == len(x.shape)
                and all(
                    a == b or i == axis
                    for i, (a, b) in enumerate(zip(v.shape, x.shape, strict=True))
                )
            ]
            x = g.concat([draw(st.sampled_from(fits)) for _ in range(2)], axis=axis)
        elif kind == "write" and low < high:
            ends = [(0, low), (low, high), (high, x.shape[axis])]
            parts = [g.slice(x, axis=axis, start=a, stop=b) if a < b else None for a, b in ends]
            parts[1] = g.sin(parts[1])
            x = g.concat([p for p in parts if p is not None], axis=axis)
        elif kind == "view":
            shape = [n for n in x.shape if n != 1]
            shape.insert(draw(st.integers(0, len(shape))), 1)
            x = g.reshape(x, shape=tuple(shape))
        elif kind == "work":
            x = g.sin(x)
        values.append(x)
    for i, x in enumerate(draw(st.lists(st.sampled_from(values[3:]), min_size=1, max_size=3))):
        g.sin(x).output(f"y{i}")
    return g


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_whatever_is_cut_and_joined_means_the_same(g):
    graph = g.ir()
    feed = {f"x{i}": torch.randn(4, 5, 1) for i in range(3)}
    made = joined_once(graph, Context(dt.target("cpu"), dt.Policy()))
    check(made, table_of_operators.infer, "written")
    for name, want in evaluate(graph, feed).items():
        assert torch.equal(evaluate(made, feed)[name], want)
    assert sum(n.op == "concat" for n in made.nodes) <= 2 * len(graph.nodes)
