"""What recipes of hand-written Triton kernels launch, compiled for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region, TensorType
from deuteron.kernels.triton import launch
from deuteron.policy import Policy
from deuteron.target import target

META = torch.device("meta")
GPUS = {80: target("a100"), 90: target("h200")}


def region_of(op: str, *given: TensorType | torch.Tensor | None, **attrs: Any) -> Region:
    """The operator alone, with inputs of these types; None for one that is left out."""
    g = dt.Graph(op)
    types = [TensorType.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given]
    syms = [
        None if t is None else g.tensor(f"t{i}", t.shape, t.dtype, strides=t.strides)
        for i, t in enumerate(types)
    ]
    found = getattr(g, op)(*syms, **attrs)
    for i, y in enumerate(found if isinstance(found, tuple) else (found,)):
        y.output(f"y{i}")
    return Region(g.ir(), frozenset(), 0)


def last(g: dt.Graph, name: str, shape: tuple[int, ...], dtype: str = "f16") -> dt.Sym:
    """An image, or windows, with channels last."""
    t = torch.empty(shape, device="meta").contiguous(memory_format=torch.channels_last)
    return g.tensor(name, shape, dtype, strides=t.stride())


def compiled(
    region: Region,
    arch: int,
    monkeypatch: Any,
    most: int = 1,
    policy: Policy | None = None,
    **knobs: Any,
) -> list[Any]:
    """The kernels that the first candidates of a region launch, in order; only candidates with
    these knobs, where some are given."""
    from triton.backends.compiler import GPUTarget

    found: list[Any] = []
    policy = policy or Policy()

    def build(self: Any, grid: Any, *args: Any, warps: int = 4, stages: int = 2, **fixed: Any):
        kinds = launch.described(args)[1]
        where = GPUTarget("cuda", arch, 32)
        found.append(self.compile(kinds, fixed, warps, stages, target=where))

    def settled(self: Any, grid: Any, *numbers: Any, **how: Any):
        return lambda *tensors: build(self, grid, *tensors, *numbers, **how)

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launchable, "__call__", build)
        patch.setattr(launch.Launchable, "settled", settled)
        engine, types = TritonKernels(), region.graph.types
        every = engine.candidates(region, GPUS[arch], policy)
        for candidate in [c for c in every if knobs.items() <= c.knobs.items()][:most]:
            ins, outs = (
                [
                    torch.empty_strided(
                        types[v].shape, types[v].strides, dtype=types[v].dtype.torch, device=META
                    )
                    for v in values
                ]
                for values in (region.inputs, region.outputs)
            )
            known = {v: t for v, t in zip(region.inputs, ins, strict=True) if v in region.constants}
            ctx = BuildContext(GPUS[arch], META, policy, known)
            engine.build(region, candidate, ctx).fill(ins, outs)
    assert found, region.ops
    return found


def assert_none_spill(kernels: list[Any], arch: int, what: Any = "", most: int = 0) -> None:
    """``most``: bytes that do no harm."""
    from tests.ptx import spilled

    found = [spilled(kernel, arch) for kernel in kernels]
    assert max(found) <= most, (what, found)
