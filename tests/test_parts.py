"""Reductions of few long rows on the CPU: two programs, in parts that do not depend on threads."""

from __future__ import annotations

import pytest
import torch

from deuteron.codegen.lower import lower
from deuteron.codegen.parts import in_parts
from deuteron.ops.evaluate import evaluate
from tests.scalar_interpreter import interpret
from tests.test_codegen import check_cpu, check_threads, made, run_cpu
from tests.tolerances import allowed, error

ROWS = {  # what is reduced, and the shapes of what it reads
    "everything": (lambda g, x: (g.sum(x), g.max(x)), (160, 192)),
    "one axis": (lambda g, x: (g.min(x),), (3 * 7001,)),
    "few rows": (lambda g, x: (g.mean(x, axes=(1, 2)),), (3, 50, 400)),
    "norm": (lambda g, x: (g.sqrt(g.sum(g.square(x))),), (130, 130)),
    "the middle": (lambda g, x: (g.sum(x, axes=(1,)),), (2, 20000, 3)),
    "beside a row": (
        lambda g, x, v: (g.sum(x * v, axes=(1,)) + g.max(x, axes=(1,)),),
        (2, 16500),
        (16500,),
    ),
    "after a number of the row": (
        lambda g, x, v: (g.max(x * v, axes=(1,), keepdim=True) * v,),
        (4, 16384),
        (4, 1),
    ),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.each_value
def test_parts_come_to_the_whole(name, dtype):
    build, *shapes = ROWS[name]
    region, feed = made(build, shapes, dtype)
    assert in_parts(lower(region)) is not None
    check_cpu(region, feed)


def test_whole_numbers():
    region, feed = made(lambda g, x: (g.sum(x), g.min(x)), [(128, 256)], "i32")
    assert in_parts(lower(region)) is not None
    check_cpu(region, feed)


def test_the_two_programs_mean_what_the_one_does():
    build, *shapes = ROWS["beside a row"]
    region, feed = made(build, shapes, "f64")
    program = lower(region)
    first, second = in_parts(program)
    parts = {name: torch.empty(first.rows, dtype=torch.float64) for name in first.outputs}
    one, two = ({v: torch.empty(2, dtype=torch.float64) for v in program.outputs} for _ in "12")
    interpret(program, feed, one)
    interpret(first, feed, parts)
    interpret(second, feed | parts, two)
    for v in one:
        assert error(two[v], one[v]) <= allowed(0.0, torch.float64, program.columns)


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: (g.var(x),),  # the second sum waits for the first
        lambda g, x: (g.softmax(g.reshape(x, (1, -1))),),  # an element waits for its row
        lambda g, x: (g.any(g.gt(x, 2.0)),),  # bools have no partial results
        lambda g, x: (g.sum(x, axes=(1,)),),  # rows enough
    ],
)
def test_what_one_walk_does_not_do_stays_whole(build):
    region, _ = made(build, [(160, 192)], "f32")
    assert in_parts(lower(region)) is None


def test_a_prime_number_of_elements_has_no_parts():
    region, feed = made(lambda g, x: (g.sum(x),), [(16411,)], "f32")
    assert in_parts(lower(region)) is None
    check_cpu(region, feed)


def test_the_same_bits_on_any_number_of_threads():
    build, *shapes = ROWS["everything"]
    check_threads(*made(build, shapes, "f32"))


def test_nan_and_infinity_reach_the_result():
    region, feed = made(lambda g, x: (g.max(x), g.sum(x)), [(160, 192)], "f32")
    (x,) = feed.values()
    x[100, 7] = torch.inf
    check_cpu(region, feed)
    x[3, 3] = torch.nan
    check_cpu(region, feed)


def test_a_large_mean_does_no_harm():
    region, feed = made(lambda g, x: (g.sum(x), g.mean(x)), [(8192, 257)], "f32")
    (x,) = feed.values()
    x += 1000.0
    exact = evaluate(region.graph, feed, float64=True)
    for out, wanted in zip(run_cpu(region, feed), exact.values(), strict=True):
        assert error(out, wanted) <= allowed(0.0, torch.float32)
