"""Stand-ins for the plan's tests: engines that do as they are told, and the one comparison."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tolerances import allowed, error

import deuteron as dt
from deuteron.ir.graph import Attrs, Graph
from deuteron.ops.evaluate import evaluate


class FakeEngine:
    """Runs the regions it ``wants`` by reference, counting builds and calls.

    ``change`` is applied to each result; ``build_error`` and ``run_error`` are raised;
    ``sleep`` seconds pass in every call. With ``writes`` it fills the outputs it is given.
    """

    def __init__(
        self,
        name: str = "fake",
        wants: Sequence[str] | Callable[[dt.Region], bool] = (),
        *,
        version: str = "1",
        predicted: float = 1e-9,
        change: Callable[[torch.Tensor], Any] | None = None,
        build_error: BaseException | None = None,
        run_error: BaseException | None = None,
        sleep: float = 0.0,
        writes: bool = False,
        workspace: int = 0,
        knobs: Mapping[str, Any] | None = None,
        build_s: float = 0.0,
        deterministic: bool = True,
    ) -> None:
        self.name, self.version, self.predicted = name, version, predicted
        self.wants, self.change, self.sleep = wants, change, sleep
        self.build_error, self.run_error = build_error, run_error
        self.writes, self.workspace = writes, workspace
        self.candidate = dt.Candidate(name, version, Attrs(knobs or {}), build_s, deterministic)
        self.builds = self.calls = 0

    def refuse(self, region: dt.Region, target: dt.Target, policy: dt.Policy) -> dt.Refusal | None:
        wanted = self.wants(region) if callable(self.wants) else set(region.ops) & set(self.wants)
        return None if wanted else dt.Refusal("not asked to")

    def candidates(self, region: dt.Region, target: dt.Target, policy: dt.Policy) -> Any:
        return [self.candidate]

    def estimate(self, region: dt.Region, target: dt.Target, candidate: dt.Candidate) -> float:
        return self.predicted

    def build(self, region: dt.Region, candidate: dt.Candidate, ctx: dt.BuildContext) -> dt.Kernel:
        self.builds += 1
        if self.build_error is not None:
            raise self.build_error
        count = len(region.inputs)

        def results(args: Sequence[torch.Tensor]) -> list[Any]:
            self.calls += 1
            time.sleep(self.sleep)
            if self.run_error is not None:
                raise self.run_error
            answer = evaluate(region.graph, dict(zip(region.inputs, args, strict=True)))
            outs = [answer[v] for v in region.outputs]
            return outs if self.change is None else [self.change(t) for t in outs]

        def writing(*tensors: torch.Tensor) -> None:
            for out, value in zip(tensors[count:], results(tensors[:count]), strict=True):
                out.copy_(value)

        def returning(*tensors: torch.Tensor) -> Any:
            outs = results(tensors)
            return outs[0] if len(outs) == 1 else tuple(outs)

        fn = writing if self.writes else returning
        return dt.Kernel(fn, writes=self.writes, workspace=self.workspace)


@contextmanager
def registered(*added: Any) -> Iterator[None]:
    """The engines compete inside the block only."""
    for engine in added:
        dt.register_engine(engine)
    try:
        yield
    finally:
        for engine in added:
            dt.unregister_engine(engine.name)


def torch_alone(patch: pytest.MonkeyPatch) -> None:
    """Only torch's own operators compete, and what a test registers."""
    room = importlib.import_module("deuteron.engines")  # dt.engines is the function
    patch.setattr(room, "BUILT_IN", tuple(e for e in room.BUILT_IN if e.name == "torch"))


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same type, same shape, same values, nan equal to nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def check_right(
    got: Mapping[str, torch.Tensor],
    graph: Graph,
    feed: Mapping[str, torch.Tensor],
    reduced: int = 4,
) -> None:
    """Every output within what tolerances.py allows of the reference in float64."""
    exact, plain = evaluate(graph, feed, float64=True), evaluate(graph, feed)
    assert list(got) == [name for name, _ in graph.outputs]
    for name, tensor in got.items():
        want = plain[name]
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), name
        if not want.is_floating_point():
            assert torch.equal(tensor, want), name
            continue
        limit = allowed(error(want, exact[name]), want.dtype, reduced)
        assert error(tensor, exact[name]) <= limit, name
