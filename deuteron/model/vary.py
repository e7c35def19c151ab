"""Which axes of a module's inputs may vary, and which vary together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deuteron.errors import BindError
from deuteron.ir.types import TensorType


@dataclass(frozen=True)
class Vary:
    """Names of axes, by argument (as a caller writes it) and axis. Axes of one name have one size;
    axes without a name have the size of the example."""

    names: Mapping[str, Mapping[int, str]]

    @staticmethod
    def of(given: object, paths: Sequence[str], types: Sequence[TensorType]) -> Vary:
        """What a user wrote, checked against the inputs of the example."""
        remedy = "write e.g. vary={'x': {0: 'batch'}}"
        if not isinstance(given, Mapping):
            raise BindError(f"vary is a {type(given).__name__}, not a mapping", remedy=remedy)
        names: dict[str, dict[int, str]] = {}
        ranks = {path: len(t.shape) for path, t in zip(paths, types, strict=True)}
        for path, axes in given.items():
            if path not in ranks:
                wrong = f"vary names {path!r}, which is no tensor of the example"
                raise BindError(wrong, remedy=f"the tensors are: {', '.join(ranks)}")
            if not isinstance(axes, Mapping):
                wrong = f"vary[{path!r}] is a {type(axes).__name__}, not a mapping"
                raise BindError(wrong, remedy=remedy)
            rank = ranks[path]
            for axis, name in axes.items():
                if type(axis) is not int or not -rank <= axis < rank:
                    wrong = f"vary[{path!r}] names axis {axis!r}, and {path} has {rank}"
                    raise BindError(wrong, remedy=f"axes are numbers from 0 to {rank - 1}")
                if not isinstance(name, str):
                    raise BindError(f"vary[{path!r}][{axis}] is {name!r}", remedy=remedy)
                names.setdefault(path, {})[axis % rank] = name
        found = Vary(names)
        found.check(paths, types, types)  # axes of one name agree in the example
        return found

    def check(
        self,
        paths: Sequence[str],
        examples: Sequence[TensorType],
        given: Sequence[TensorType | torch.Tensor],
    ) -> None:
        """Raise BindError where an axis that has no name differs from the example, or two axes of
        one name from each other."""
        sizes: dict[str, tuple[int, str]] = {}
        for path, example, tensor in zip(paths, examples, given, strict=True):
            axes = self.names.get(path, {})
            if len(tensor.shape) != len(example.shape):
                wrong = f"{path} has {len(tensor.shape)} axes, the example {len(example.shape)}"
                raise BindError(wrong, asked="a call of another size", where=path)
            for axis, (size, was) in enumerate(zip(tensor.shape, example.shape, strict=True)):
                if axis not in axes and size != was:
                    raise self._not_allowed(path, axis, size, was)
                if axis in axes:
                    known, where = sizes.setdefault(axes[axis], (size, f"axis {axis} of {path}"))
                    if known != size:
                        name = axes[axis]
                        wrong = f"{name} is {known} on {where}, {size} on axis {axis} of {path}"
                        remedy = "give tensors that agree, or two names in vary"
                        raise BindError(wrong, where=path, remedy=remedy)

    def _not_allowed(self, path: str, axis: int, size: int, was: int) -> BindError:
        may = [f"{p} axis {a} ({n})" for p, axes in self.names.items() for a, n in axes.items()]
        wrong = f"axis {axis} of {path} is {size}, and {was} in the example"
        remedy = f"only these may vary: {', '.join(may) or 'none'}; name more axes in vary"
        return BindError(wrong, asked="a call of another size", where=path, remedy=remedy)
