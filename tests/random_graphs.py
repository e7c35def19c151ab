"""Random small graphs over the operator table, with tensors to run them on.

Every operator can occur: through one of its own samples, whose inputs are taken from the graph
where the types allow it, or by being tried on whatever values there are. What inference refuses
is simply not emitted, so nothing here restates an operator's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from deuteron.errors import DeuteronError
from deuteron.ir import Graph, GraphBuilder, TensorType
from deuteron.ops import TABLE, OpDef, Sample, infer

SHAPES = ((3, 4), (4, 3), (4, 4), (1, 4), (4,), (), (2, 3, 4), (2, 3, 4, 4), (2, 1, 4, 4), (0, 4))
NUMBERS = (0.0, -0.0, 1.0, 2.0, -1.0, 0.5, 3.0, 8.0)
# What must point into another tensor comes from the operator's own samples.
POINTERS = {"index", "target", "table", "row_starts", "columns", "starts", "order", "places"}
POINTERS |= {"q_lengths", "k_lengths", "blocks", "turned"}
POINTING = frozenset(
    name for name, op in TABLE.items() if POINTERS & {s.strip("*?") for s in op.inputs}
) | {"aten", "max_pool_winners_grad"}
# Results that jump: a last bit of difference before them is a whole number after them.
# (batch_norm_act: the signs of what cancels.)
JUMPS = frozenset(
    """floor ceil round trunc sign remainder floor_div cast aten batch_norm_act eq ne lt le gt
        ge logical_and logical_or logical_xor logical_not isnan isinf argmax argmin hardshrink
        threshold max_pool_with_indices adaptive_max_pool_with_indices max_pool_grad
        max_pool_with_winners adaptive_max_pool_grad cummax cummin sort topk histogram""".split()
)


@dataclass
class Draft:
    """A graph in the making: its builder, the tensors of its inputs, and a source of chance."""

    random: Random
    float_type: str = "f64"
    constants: float = 0.4  # the share of leaves that are constants
    build: GraphBuilder = field(default_factory=lambda: GraphBuilder(infer, "random"))
    feed: dict[str, torch.Tensor] = field(default_factory=dict)

    def leaf(self, tensor: torch.Tensor) -> str:
        """``tensor`` as an input of the graph, or as a constant of it."""
        if self.random.random() < self.constants:
            return self.build.constant(tensor, "c")
        name = self.build.input(self.build.fresh("x"), TensorType.from_tensor(tensor))
        self.feed[name] = tensor
        return name

    def plain(self) -> str:
        gen = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        shape = self.random.choice(SHAPES)
        kind = torch.float64 if self.float_type == "f64" else torch.float32
        return self.leaf(torch.randn(shape, generator=gen, dtype=kind))

    def value(self) -> str:
        """Some value of the graph, mostly a late one. Floats of 8 bits are for products that take
        them by their samples: torch does not even negate one."""
        types = self.build.types.items()
        names = [v for v, t in types if not (t.dtype.is_float and t.dtype.bits == 8)]
        return names[max(self.random.randrange(len(names)), self.random.randrange(len(names)))]

    def by_sample(self, op: OpDef, sample: Sample) -> None:
        """Emit a sample; an input of the same type as an existing value may be that value."""
        if any(arg and arg.dtype in ("f32", "f16", "bf16") for arg in sample.inputs):
            return  # folded ahead of time it is rounded, and would look like a fault
        ins: list[str | None] = []
        for tensor in sample.tensors(self.float_type, seed=self.random.randrange(1 << 30)):
            if tensor is None:
                ins.append(None)
                continue
            type_ = TensorType.from_tensor(tensor)
            fitting = [v for v, t in self.build.types.items() if t == type_ and t.dtype.is_float]
            reuse = bool(fitting) and self.random.random() < 0.8
            ins.append(self.random.choice(fitting) if reuse else self.leaf(tensor))
        self.emit(op, ins, sample.attrs)

    def by_trial(self, op: OpDef) -> None:
        """Try the operator on values that are there, with attributes of one of its samples."""
        count = op.required if not op.variadic else self.random.randint(1, 3)
        attrs = self.random.choice(op.samples()).attrs
        ins = [self.value() for _ in range(count)]
        if count == 2 and self.random.random() < 0.5:
            number = self.random.choice(NUMBERS)
            ins[self.random.randrange(2)] = self.build.constant(torch.tensor(number).double())
        with suppress(DeuteronError):
            self.emit(op, ins, attrs)

    def emit(self, op: OpDef, ins: list[str | None], attrs: Mapping[str, Any]) -> None:
        """Append a node, unless it is known ahead of time and gives a float of another type, as
        the sine of a constant whole number does: folded, it would be rounded to that type."""
        types = [None if v is None else self.build.types[v] for v in ins]
        kinds = {t.dtype.short for t in infer(op.name, types, attrs)[1] if t.dtype.is_float}
        if kinds <= {self.float_type} or not all(v is None or self.foldable(v) for v in ins):
            self.build.emit(op.name, ins, attrs)

    def foldable(self, value: str) -> bool:
        """Whether a value depends on constants alone."""
        made = self.build.producer.get(value)
        return all(map(self.foldable, made.uses)) if made else value in self.build.constants


def random_graph(
    random: Random, nodes: int = 8, without: frozenset[str] = frozenset(), **how: Any
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A graph of about ``nodes`` nodes whose last values are outputs, and tensors for it."""
    draft = Draft(random, **how)
    names = [name for name in TABLE if name not in without]
    for _ in range(3):
        draft.plain()
    for _ in range(4 * nodes):
        if len(draft.build.nodes) >= nodes:
            break
        op = TABLE[random.choice(names)]
        if random.random() < 0.3 or op.name in POINTING:
            draft.by_sample(op, random.choice(op.samples()))
        else:
            draft.by_trial(op)
    build = draft.build
    read = {v for node in build.nodes for v in node.uses}
    ends = [v for v in build.producer if v not in read] or list(build.types)[-1:]
    for i, value in enumerate(
        ends + random.sample(sorted(build.producer), k=min(1, len(build.producer)))
    ):
        build.output(f"y{i}", value)
    return build.finish(), draft.feed


@st.composite
def graphs(draw, nodes: int = 8, without: frozenset[str] = frozenset(), **how: Any):
    """A hypothesis strategy of (graph, tensors); ``how`` goes to :class:`Draft`."""
    seed = draw(st.integers(0, 2**32 - 1))
    return random_graph(Random(seed), draw(st.integers(1, nodes)), without, **how)
