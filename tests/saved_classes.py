"""Containers that a saved call may have; a process that loads it finds them by this name."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Output(OrderedDict):
    """A dict whose class is its own, as those of libraries are."""


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Sneaky(list):
    """A container that is more than its fields."""


pytree.register_dataclass(Answer)
pytree.register_pytree_node(
    Output, lambda d: (list(d.values()), list(d)), lambda v, keys: Output(zip(keys, v, strict=True))
)
pytree.register_pytree_node(Sneaky, lambda s: (list(s), None), lambda v, _: Sneaky(v))


class Model(nn.Module):
    """Keywords, nested containers and values that are no tensors, in and out."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x, *, pair, options=None, scale=1.0, name="plain"):
        x = self.norm(self.conv(x + pair.left)) * scale
        logits = self.out(x.mean(-1)) + options["bias"]
        whole = Answer(logits, None if name == "plain" else x)
        return Output(answer=whole, parts=[(pair.right.sin(), None, 3)], name=name)


def call(rows: int, long: int):
    """Arguments for it."""
    gen = torch.Generator().manual_seed(rows)
    x, left, right = (torch.randn(rows, 4, long, generator=gen) for _ in range(3))
    bias = torch.randn(5, generator=gen)
    named = {"pair": Pair(left, right), "options": {"bias": bias}, "scale": 2.5, "name": "all"}
    return (x,), named


def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    nn.init.uniform_(made.norm.running_mean)
    nn.init.uniform_(made.norm.running_var, 0.5, 2.0)
    return made.eval()
