"""Remainders, floored quotients and angles in generated code: signs, zeros, nan and inf as torch
has them."""

from __future__ import annotations

import math

import pytest
import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.cpu.generated import CpuGen
from deuteron.ir import Region
from deuteron.policy import Policy
from tests.tolerances import allowed, error

ODD = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.5,
    -2.5,
    0.3,
    -0.3,
    5.0,
    7.25,
    -7.25,
    6.0,
    3.0,
    0.1,
    0.7,
    123.75,
    math.inf,
    -math.inf,
    math.nan,
)
CALLS = {"remainder": torch.remainder, "floor_div": torch.floor_divide, "atan2": torch.atan2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_every_pair_of_odd_numbers(op, dtype):
    pytest.importorskip("llvmlite")
    grid = torch.meshgrid(torch.tensor(ODD), torch.tensor(ODD), indexing="ij")
    x, y = (t.flatten().to(dtype) for t in grid)
    g = dt.Graph(op)
    g.call(op, *(g.tensor(n, t.shape, dtype) for n, t in (("x", x), ("y", y)))).output("z")
    region, engine, cpu = Region(g.ir(), frozenset(), 0), CpuGen(), dt.target("cpu")
    assert engine.refuse(region, cpu, Policy()) is None
    out = torch.empty_like(x)
    candidate = engine.candidates(region, cpu, Policy())[0]
    ctx = BuildContext(cpu, torch.device("cpu"), Policy(), {})
    engine.build(region, candidate, ctx).fill([x, y], [out])
    want = CALLS[op](x, y)
    assert torch.equal(out.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(torch.signbit(out[known]), torch.signbit(want[known])), "a zero's sign"
    assert error(out, want) <= (allowed(0.0, dtype) if op == "atan2" else 0.0)


def test_integers_by_a_tensor_are_left_to_torch():
    """Which refuses a divisor of 0."""
    g = dt.Graph("whole")
    g.remainder(*(g.tensor(n, (4,), dt.int64) for n in "xy")).output("z")
    refusal = CpuGen().refuse(Region(g.ir(), frozenset(), 0), dt.target("cpu"), Policy())
    assert refusal is not None and "may hold a 0" in refusal.reason
