"""How the ranks of a training run divide the work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deuteron.errors import GraphError
from deuteron.passes.communication import Ranks

_PART = re.compile(r"(dp|fsdp|tp)(\d+)")


@dataclass(frozen=True)
class Layout:
    """``tp`` neighbours share each product; ``fsdp`` ranks, a step of tp apart, keep a part of all
    parameters each; ``dp`` such groups hold the same. Each of dp · fsdp has a batch of its own."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, text: str | Layout) -> Layout:
        """From text: "dp4×tp2", "fsdp8", "dp2xfsdp4xtp8"."""
        if isinstance(text, Layout):
            return text
        words = re.split(r"[×x*]", text.strip().lower())
        found = [_PART.fullmatch(word) for word in words]
        names = [match[1] for match in found if match is not None]
        if len(names) < len(words) or len(set(names)) < len(names) or not all(map(_size, words)):
            wrong = f"{text!r} is no layout"
            remedy = 'write parts of dp, fsdp and tp with their ranks, as in "dp4×tp2"'
            raise GraphError(wrong, asked=f"layout={text!r}", remedy=remedy)
        return cls(**{match[1]: int(match[2]) for match in found if match is not None})

    @property
    def ranks(self) -> int:
        return self.dp * self.fsdp * self.tp

    @property
    def batches(self) -> int:
        """How many different batches are trained on at once."""
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

    def __str__(self) -> str:
        parts = [f"{name}{n}" for name, n in vars(self).items() if n > 1]
        return "×".join(parts) or "dp1"


def _size(word: str) -> int:
    match = _PART.fullmatch(word)
    return int(match[2]) if match is not None else 0


def layouts(gpus: int, per_node: int = 8) -> Iterator[Layout]:
    """All of so many ranks, with tensor parallelism within a node: over a network it never pays."""
    for tp in _divisors(min(gpus, per_node)):
        if gpus % tp:
            continue
        for fsdp in _divisors(gpus // tp):
            yield Layout(gpus // tp // fsdp, fsdp, tp)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
