"""Binding tensors to a plan's inputs: by name or handle, checked before anything runs."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deuteron.errors import BindError
from deuteron.ir.types import TensorType, same_strides
from deuteron.plan.tensors import comparison, overlaps

# MANY: from here on, one native comparison is quicker than a look at each tensor in Python. TRIES:
# how often tensors are noted for it, which some callers pass in ever new ways.
MANY, TRIES = 4, 4


class Binder:
    """The signature of a plan, ready to check arguments quickly."""

    def __init__(
        self, names: Sequence[str], types: Sequence[TensorType], device: torch.device
    ) -> None:
        self.names, self.types, self.device = tuple(names), tuple(types), device
        self._expect = [
            (name, torch.Size(t.shape), t.dtype.torch, t.strides, t)
            for name, t in zip(names, types, strict=True)
        ]
        self._count = len(self._expect)
        self._like: Callable[..., bool] | None = None  # says whether tensors are as those before
        self._noted = 0 if self._count >= MANY else TRIES

    def by_name(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Tensors in input order from a mapping of names, checked."""
        if len(given) != self._count:
            raise self._names_wrong(given)
        try:
            tensors = [given[name] for name in self.names]
        except KeyError:
            raise self._names_wrong(given) from None
        self.check(tensors)
        return tensors

    def named(
        self, bindings: Mapping[Any, torch.Tensor], named: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors by name from a mapping of names or handles and from keywords."""
        if not isinstance(bindings, Mapping):
            raise BindError(
                f"tensors are bound by name, not by position; a {type(bindings).__name__} came",
                asked="run(…)",
                remedy=f"run({', '.join(f'{n}=…' for n in self.names)})",
            )
        pairs: list[Any] = [(getattr(key, "name", key), tensor) for key, tensor in bindings.items()]
        pairs += named.items()
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            wrong, asked = f"input {twice!r} is bound twice", f"run({', '.join(map(str, names))})"
            remedy = "bind it once: by handle, by name or by keyword"
            raise BindError(wrong, asked=asked, remedy=remedy)
        return dict(pairs)

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Raise BindError unless every tensor fits its input exactly. Every run comes through
        here, so it does no more than it must.

        Strides that differ only where the size is 1 address the same elements; such a tensor
        is replaced in the list by a view with the declared ones, because libraries guess the
        memory order of their results from them.
        """
        if len(tensors) != self._count:
            wrong = f"{len(tensors)} tensors for {self._count} inputs"
            raise BindError(wrong, remedy=f"give them in this order: {', '.join(self.names)}")
        if self._like is not None and self._like(*tensors):
            return
        device, strided, exact = self.device, torch.strided, True
        for i, (name, shape, dt, strides, type_) in enumerate(self._expect):
            tensor = tensors[i]
            try:
                if (
                    tensor.shape == shape
                    and tensor.dtype is dt
                    and tensor.device == device
                    and tensor.layout is strided
                    and not tensor.is_neg()
                    and not tensor.is_conj()
                ):
                    got = tensor.stride()
                    if got == strides:
                        continue
                    if same_strides(shape, got, strides):
                        tensors[i], exact = tensor.as_strided(shape, strides), False
                        continue
            except (AttributeError, RuntimeError):  # not a tensor, or one without strides
                pass
            raise self._misfit(name, tensor, type_)
        if exact and self._noted < TRIES:
            self._like, self._noted = comparison(tensors), self._noted + 1

    def check_all_but_size(self, tensor: Any, index: int) -> None:
        """Raise BindError unless element type, device and layout of the tensor fit the input."""
        name, _, dt, _, type_ = self._expect[index]
        if isinstance(tensor, torch.Tensor):
            strided = tensor.layout is torch.strided
            if strided and tensor.dtype is dt and tensor.device == self.device:
                return
            type_ = TensorType.of(tensor.shape, type_.dtype)  # the error is not about the shape
        raise self._misfit(name, tensor, type_)

    def fits_but_for_strides(self, tensor: Any, index: int) -> bool:
        """Whether only the memory order differs, and can be changed without losing elements."""
        _, shape, dt, _, type_ = self._expect[index]
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == shape
            and tensor.dtype == dt
            and tensor.device == self.device
            and tensor.layout is torch.strided
            and not overlaps(type_)
        )

    def _names_wrong(self, given: Mapping[str, Any]) -> BindError:
        missing = [name for name in self.names if name not in given]
        extra = [str(name) for name in given if name not in self.names]
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        if extra:
            near = difflib.get_close_matches(extra[0], self.names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            parts.append(f"unknown: {', '.join(extra)}{hint}")
        wanted = ", ".join(f"{n}: {t}" for n, t in zip(self.names, self.types, strict=True))
        wrong = f"the tensors do not match the inputs of the plan; {'; '.join(parts)}"
        asked = f"run({', '.join(map(str, given))})"
        return BindError(wrong, asked=asked, remedy=f"bind exactly these: {wanted}")

    def _misfit(self, name: str, tensor: Any, type_: TensorType) -> BindError:
        dt = type_.dtype.torch
        if not isinstance(tensor, torch.Tensor):
            wrong = f"is a {type(tensor).__name__}, not a tensor"
            remedy = "pass a torch.Tensor"
        elif tuple(tensor.shape) != type_.shape:
            wrong = f"has shape {list(tensor.shape)}, the plan was made for {list(type_.shape)}"
            remedy = "pass a tensor of that shape, or compile a plan for this one"
        elif tensor.dtype != dt:
            wrong = f"is {tensor.dtype}, the plan was made for {dt}"
            remedy = f"pass {name}.to({dt})"
        elif tensor.device != self.device:
            wrong = f"is on {tensor.device}, the plan runs on {self.device}"
            remedy = f"pass {name}.to('{self.device}')"
        elif tensor.layout is not torch.strided:
            wrong = f"is {str(tensor.layout).removeprefix('torch.')}, the plan was made for strided"
            remedy = f"pass {name}.to_dense()"
        elif tensor.is_neg() or tensor.is_conj():
            wrong = "is a view whose signs are still to be turned"
            remedy = f"pass {name}.resolve_{'neg' if tensor.is_neg() else 'conj'}()"
        else:
            wrong = f"has strides {tensor.stride()}, the plan was made for {type_.strides}"
            if type_.layout == "nhwc":
                remedy = f"pass {name}.contiguous(memory_format=torch.channels_last)"
            elif type_.layout == "contiguous":
                remedy = f"pass {name}.contiguous(), or compile with the strides you have"
            else:
                remedy = "compile with the strides you have"
        return BindError(f"input {name!r} {wrong}", where=f"input {name!r}: {type_}", remedy=remedy)
