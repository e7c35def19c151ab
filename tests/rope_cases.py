"""Rope cases for the hand-written kernel: in the interpreter, and on a GPU.

``python -m tests.interpreted tests.rope_cases`` runs them in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Graph, GraphBuilder, Region, TensorType
from deuteron.ops import TABLE, Ops, infer
from deuteron.policy import Policy
from deuteron.target import target
from tests import by_hand
from tests.interpreted import tell

NAMES = [name.strip("?") for name in TABLE["rope"].inputs]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One rope: its tensors by name, its attributes."""

    name: str
    feed: Tensors
    attrs: dict[str, Any]

    def graph(self, outputs: tuple[int, ...] = (0, 1)) -> Graph:
        build = GraphBuilder(infer, "rope")
        ops = Ops(build)
        ins = [
            build.input(n, TensorType.from_tensor(self.feed[n])) if n in self.feed else None
            for n in NAMES
        ]
        outs = build.emit("rope", ins, self.attrs)
        for i in outputs[: len(outs)]:
            ops.sym(outs[i]).output(f"y{i}")
        return build.finish()


def cases(kind: str) -> Iterator[Case]:
    """The operator's samples, and strides and sizes that they do not have."""
    for sample in TABLE["rope"].samples():
        pairs = zip(NAMES, sample.tensors(kind), strict=False)
        yield Case(str(sample), {n: x for n, x in pairs if x is not None}, dict(sample.attrs))
    dtype = TensorType.of((), kind).dtype.torch
    gen = torch.Generator().manual_seed(5)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    turned = {"q": t(2, 7, 5, 16).transpose(1, 2), "k": t(2, 7, 2, 16).transpose(1, 2)}
    yield Case("heads first, tokens first in memory", turned, {"axis": 2})
    joined = t(3, 5, 9, 12)  # q and k as parts of one projection, features wider than used
    parts = {"q": joined[:, :, :6, 2:], "k": joined[:, :, 6:8, 2:]}
    yield Case("parts of one tensor, odd start", parts, {"dims": 6, "interleaved": True})
    yield Case("many positions", {"q": t(1, 3, 17, 32)}, {"offset": 123_456_789})
    where = torch.randint(0, 2**30, (2, 5), generator=gen)
    feed = {"q": t(2, 5, 3, 36), "k": t(2, 5, 3, 36), "positions": where}
    yield Case("far positions", feed, {"dims": 34, "inverse": True})
    yield Case("one token", {"q": t(1, 1, 32, 64), "k": t(1, 1, 8, 64)}, {"offset": 4095})


def compare(case: Case, device: str, most: int = 9) -> tuple[int, list[str]]:
    """How many candidates ran, and what is wrong with them."""
    graph = case.graph()
    region = Region(graph, frozenset(), 0)
    refusal = TritonKernels().refuse(region, target("h200"), Policy())
    if refusal is not None:
        fits = all(graph.types[v].strides[3] == 1 for v in graph.inputs[:1])
        wrong = fits and "a size is 0" not in refusal.reason
        return 0, [f"{case.name}: refused, {refusal.reason}"] if wrong else []
    return by_hand.compare(case.name, region, case.feed, device, most)


def main() -> None:
    found = []
    for kind, nth in (("f32", 1), ("bf16", 5), ("f64", 7)):
        for case in list(cases(kind))[::nth]:
            most = 9 if kind == "f32" and "offset" in case.attrs else 1
            count, wrong = compare(case, "cpu", most=most)
            found.append((count, [f"{kind} {w}" for w in wrong]))
    tell(found)


if __name__ == "__main__":
    main()
