"""How the ranks of a training run divide the work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deuteron.errors import GraphError
from deuteron.passes.communication import Ranks

_PART = re.compile(r"(dp|fsdp|tp|pp)(\d+)(?:v(\d+))?")


@dataclass(frozen=True)
class Layout:
    """How ranks divide a training step, as the product of four kinds of parallelism:

    * ``tp`` (tensor): so many neighbouring ranks share each matrix product;
    * ``fsdp``: so many ranks, tp apart, each keep a part of all parameters;
    * ``dp`` (data): so many groups of tp · fsdp ranks hold the same parameters;
    * ``pp`` (pipeline): so many groups of all these, with ``stages`` stages on each rank.

    Each of dp · fsdp groups trains on batches of its own: one or, in a pipeline, ``pp`` of them,
    the micro-batches that go through it one after another."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    stages: int = 1

    @classmethod
    def of(cls, text: str | Layout) -> Layout:
        """Read a layout from text: "dp4×tp2", "fsdp8", "dp2xfsdp4xtp8"; "pp4" is a pipeline of four
        ranks, and "pp4v2" one with two stages on each rank (interleaved)."""
        if isinstance(text, Layout):
            return text
        words = re.split(r"[×x*]", text.strip().lower())
        found = [match for word in words if (match := _PART.fullmatch(word)) is not None]
        parts = {match[1]: int(match[2]) for match in found}
        several = [match for match in found if match[3] is not None]
        stages = int(several[0][3]) if several else 1
        alone = all(match[1] == "pp" and parts["pp"] > 1 for match in several)
        sizes = all(parts.values()) and stages > 0
        if not (len(parts) == len(words) and sizes and alone):
            wrong = f"{text!r} is no layout"
            remedy = 'write parts of dp, fsdp, tp and pp with their ranks, as in "dp4×tp2"'
            raise GraphError(wrong, asked=f"layout={text!r}", remedy=remedy)
        return cls(**parts, stages=stages)

    @property
    def ranks(self) -> int:
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def batches(self) -> int:
        """How many different batches are trained on at once, not counting those in a pipeline."""
        return self.dp * self.fsdp

    @property
    def tp_ranks(self) -> Ranks:
        return Ranks(self.tp, 1)

    @property
    def fsdp_ranks(self) -> Ranks:
        return Ranks(self.fsdp, self.tp)

    @property
    def dp_ranks(self) -> Ranks:
        return Ranks(self.dp, self.tp * self.fsdp)

    @property
    def batch_ranks(self) -> Ranks:
        return Ranks(self.batches, self.tp)

    @property
    def pp_ranks(self) -> Ranks:
        return Ranks(self.pp, self.tp * self.fsdp * self.dp)

    @property
    def next_stage(self) -> Ranks:
        """Two ranks of a pipeline: one, and the one that has the next stage."""
        return self.pp_ranks._replace(size=2)

    def __str__(self) -> str:
        names = ("pp", "dp", "fsdp", "tp")
        several = {"pp": f"v{self.stages}" if self.stages > 1 else ""}
        sizes = {name: getattr(self, name) for name in names}
        parts = [f"{name}{n}{several.get(name, '')}" for name, n in sizes.items() if n > 1]
        return "×".join(parts) or "dp1"


def layouts(gpus: int, per_node: int = 8, blocks: int = 1) -> Iterator[Layout]:
    """All layouts of so many GPUs, with tensor parallelism only within a node, because over a
    network it never pays. A model with so many repeated ``blocks`` can be cut into as many
    stages."""
    for tp in _divisors(min(gpus, per_node)):
        if gpus % tp:
            continue
        for pp in _divisors(gpus // tp):
            for stages in (1, 2) if pp > 1 else (1,):
                if stages * pp <= max(blocks, 1):
                    for fsdp in _divisors(gpus // tp // pp):
                        yield Layout(gpus // tp // pp // fsdp, fsdp, tp, pp, stages)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
