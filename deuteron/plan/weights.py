"""The weights of one model, in memory once however many plans read them."""

import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from deuteron.engines import Forms
from deuteron.ir.graph import Constant, Graph
from deuteron.plan.source import Idle

SMALL = 4096  # elements up to which looking for an equal constant is not worth it


class Weights:
    """What plans of one model share: its own tensors, constants that were computed from them, and
    other forms of either that kernels read (packed, say). On a CPU, where plans run one after
    another, they also share the memory for intermediate values.

    ``own`` are tensors that nobody outside writes to. Any other constant that an import finds is
    copied: changing it later must not change half of a plan.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        self.forms = Forms()
        self.blocks: Idle = {0: []}
        self._own = list(own)
        self._storages = set(map(_storage, self._own))
        self._same: dict[object, Constant] = {}  # by address, so that a tensor is hashed only once
        self._made: dict[object, list[weakref.ref[Constant]]] = {}  # by type and device

    def imported(self, graph: Graph) -> Graph:
        """Return a graph that was imported from a module with constants that are the model's own
        tensors, or copies of others."""

        def own(constant: Constant) -> Constant:
            if _storage(constant.data) in self._storages:
                return self._canonical(constant)
            return self._shared(Constant(constant.data.clone()))

        return replace(graph, constants={n: own(c) for n, c in graph.constants.items()})

    def planned(self, graph: Graph, source: Graph) -> Graph:
        """Return a graph that passes made of ``source``, with each constant that they computed
        replaced by an equal one if another plan has that, so that it is in memory once."""
        given = {_storage(c.data) for c in source.constants.values()}

        def known(constant: Constant) -> Constant:
            place = _storage(constant.data)
            if place in self._storages:
                return self._canonical(constant)
            return constant if place in given else self._shared(constant)

        return replace(graph, constants={n: known(c) for n, c in graph.constants.items()})

    def _canonical(self, constant: Constant) -> Constant:
        return self._same.setdefault((constant.data.data_ptr(), constant.type), constant)

    def _shared(self, constant: Constant) -> Constant:
        if constant.type.numel <= SMALL:
            return constant
        alike = self._made.setdefault((constant.type, constant.data.device), [])
        for other in list(alike):
            known = other()
            if known is None:
                alike.remove(other)
            elif torch.equal(_bits(known.data), _bits(constant.data)):
                return known
        alike.append(weakref.ref(constant))
        return constant


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, so that only equal bits are equal: as floats, −0 equals
    0."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def _storage(tensor: torch.Tensor) -> int:
    """A key that is the same for tensors in the same memory. Tensors without memory, such as sparse
    ones and parameters that have no size yet, have one of their own."""
    with suppress(NotImplementedError, RuntimeError, ValueError):
        return tensor.untyped_storage().data_ptr() or id(tensor)
    return id(tensor)
