"""Arguments whose numbers decide what is computed: the grid of patches of each image, the length of
each sequence, the places of images in a text. In a plan they are fixed, like arguments that are no
tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deuteron.frontends.calls import SEQUENCES
from deuteron.frontends.proxies import AsksValues, Proxy

LIMIT = 4096  # numbers that one such argument may have: they are compared in every call


class DecidingArguments(AsksValues):
    """Forward cannot be traced unless the numbers of these arguments are known."""

    def __init__(self, places: frozenset[int]) -> None:
        super().__init__("arguments decide what is computed")
        self.places = places


def deciding(asked: Sequence[Proxy], given: Sequence[Any]) -> frozenset[int]:
    """The places of the arguments that the numbers asked for depend on; none if one of these
    arguments holds anything but a few whole numbers or booleans."""
    nodes, seen = [stand.node for stand in asked if not stand.known], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += _read_by(node)
    arguments = [(i, a) for i, a in enumerate(given) if isinstance(a, Proxy) and not a.known]
    found = {i: a for i, a in arguments if a.node in seen}
    return frozenset(found if all(map(_are_few, found.values())) else ())


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes that the numbers of ``node`` depend on."""
    made = node.all_input_nodes
    if node.target is operator.getitem and node.args[1] == 1 and str(made[0].target) in SEQUENCES:
        return made[0].all_input_nodes[1:2]
    return made


def _are_few(tensor: torch.Tensor) -> bool:
    real = tensor.is_floating_point() or tensor.is_complex()
    return not real and tensor.numel() <= LIMIT
