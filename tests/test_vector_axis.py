"""The axis of generated CPU code that vectors run along, where no axis is the nearest of all that
is read and written."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.codegen.lower import lower
from deuteron.engines.cpu.generated import CpuGen
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import Ops, infer
from tests.test_engines import Answers, right

llvm_plan = pytest.importorskip("deuteron.codegen.llvm_plan")

ACROSS = {  # what is written, and the shapes of what is read
    "softmax across memory": (
        lambda b, x: b.softmax(b.permute(x, dims=(0, 3, 1, 2)), axis=-1),
        (2, 5, 19, 8),
    ),
    "its largest": (lambda b, x: b.max(b.permute(x, dims=(2, 0, 1)), axes=(-1,)), (5, 19, 9)),
    "turned, with much to do": (lambda b, x: b.to_layout(b.gelu(x), layout="nhwc"), (2, 11, 5, 7)),
    "turned, with a bias of rows": (
        lambda b, x, y: b.reshape(b.add(b.permute(b.exp(x), dims=(1, 0)), y), (21, 13)),
        (13, 21),
        (21, 1),
    ),
    "rows of 2": (lambda b, x: b.softmax(x, axis=-1), (37, 2)),
    "rows of 3": (lambda b, x: b.layer_norm(x, eps=1e-5), (41, 3)),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.each_value
def test_rows_that_lie_apart_are_vectors(name, dtype):
    write, *shapes = ACROSS[name]
    build = GraphBuilder(infer, "across")
    b = Ops(build)
    gen = torch.Generator().manual_seed(0)
    feed = {f"x{i}": torch.randn(s, generator=gen).to(dtype) for i, s in enumerate(shapes)}
    given = [b.sym(build.input(n, TensorType.from_tensor(x))) for n, x in feed.items()]
    write(b, *given).output("y")
    region = Region(build.finish())
    program = lower(region)
    assert llvm_plan.plan(program).vector is not None
    engine, machine = CpuGen(), dt.target("cpu")
    (candidate,) = engine.candidates(region, machine, dt.Policy())
    right(engine, candidate, region, feed, Answers(region, feed))
