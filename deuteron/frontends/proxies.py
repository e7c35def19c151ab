"""Stand-ins for tensors, while a module is recorded, and what they know of each other.

Where forward writes to ``y[:, 0]`` or to ``y.view(-1)``, all of ``y`` and every other view of it
have other numbers from then on. A graph never writes to a value: instead, the new part is put into
a new whole, and other views are taken from that by the calls that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import OpOverload

from deuteron.frontends.aten import schema_order
from deuteron.frontends.refusals import SETS_DATA, refuse_data, user_frame
from deuteron.frontends.sparse import is_sparse
from deuteron.ir.types import same_strides
from deuteron.ops.opaque import STRIDES


class NeedsExport(Exception):
    """The module does something that only torch.export handles. ``line`` is where forward does
    what torch.export is likely to refuse: ask for the value of a tensor, or use torch.func."""

    def __init__(self, why: str, line: str = "") -> None:
        super().__init__(why)
        self.line = line


class AsksValues(NeedsExport):
    """Forward asks for a number that depends on inputs."""


class TakesGradient(NeedsExport):
    """Forward takes a gradient, of which there is none where calls are recorded before autograd
    sees them."""


class TooSlow(NeedsExport):
    """Running the module takes longer than torch.export, which runs nothing."""


HELD = attrgetter("held")


def mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """As pytree.tree_map_only, but only for what calls take, which are values and lists of them.
    This halves the time to trace a module."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(kind, function, v) for v in value])
    if isinstance(value, dict):
        return {name: mapped(kind, function, v) for name, v in value.items()}
    return value


def among(kind: type, value: Any) -> list[Any]:
    """All objects of a kind among the arguments or results of a call."""
    several: list[Any] = []
    mapped(kind, several.append, value)
    return several


class Proxy(torch.Tensor):
    """Stands for a tensor in forward: what is computed with it is recorded, and Python cannot read
    its numbers."""

    held: Any  # the tensor; None where only the type is of interest
    node: fx.Node
    own: bool  # whether forward made it, and no other tensor shares its memory
    known: bool  # whether its numbers are the same whatever the inputs are, and are held
    part_of: View | None  # how it shows memory of another tensor, if it does
    # how often parts of it were written to; of a view: writes to the whole that its node includes
    writes: int

    @staticmethod
    def of(tensor: torch.Tensor, node: fx.Node, known: bool) -> Proxy:
        """A stand-in for a tensor. ``node.meta["val"]`` gets another one, which keeps no memory
        alive."""
        how: Any = {}
        if not is_sparse(tensor):  # a sparse tensor is taken for a dense one of its shape
            how = {"strides": tensor.stride(), "storage_offset": tensor.storage_offset()}
        how |= {"dtype": tensor.dtype, "device": tensor.device}
        make = torch.Tensor._make_wrapper_subclass
        stand, typed = (make(Proxy, tensor.shape, **how) for _ in range(2))
        assert isinstance(stand, Proxy)
        stand.held, stand.node, node.meta["val"] = tensor, node, typed
        stand.own, stand.known = node.op != "placeholder", known
        stand.part_of, stand.writes = None, 0
        return stand

    def whole(self) -> Proxy:
        """The tensor that all tensors which share this memory are views of."""
        return self if self.part_of is None else self.part_of.whole.whole()  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        """The numbers, one by one; they are known for shapes that a model computes as tensors."""
        return [part.tolist() for part in self.unbind()] if self.ndim else self.item()

    def __getitem__(self, index: Any) -> Any:
        seen, rest = rows(self, index)
        return torch.Tensor.__getitem__(seen, rest) if rest != () else seen

    def select(self, dim: int, index: Any) -> Any:
        """The view at one place along a dimension; that place may be a number that a model
        computes."""
        if not _is_computed(index):
            return torch.Tensor.select(self, dim, index)
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"{dim} is no dimension of a tensor of {self.ndim}")
        return row(self, dim % self.ndim, index.clone())

    def __setitem__(self, index: Any, value: Any) -> None:
        seen, rest = rows(self, index)
        torch.Tensor.__setitem__(seen, rest if rest != () else ..., value)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # x.data: the same memory, seen once more
            twin = Proxy.of(args[0].held, args[0].node, args[0].known)
            args[0].own = twin.own = False
            twin.part_of, twin.writes = View(args[0], func, args, {}), args[0].whole().writes
            return twin
        stands = among(Proxy, (args, kwargs))
        if not all(stand.known for stand in stands):
            raise NeedsExport(f"{func} was reached by a way that is not recorded", user_frame())
        real_args, real_kwargs = mapped(Proxy, HELD, (args, kwargs or {}))
        return func(*real_args, **real_kwargs)  # from a cache of the user's: it holds numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<stands for {list(self.shape)} {self.dtype}>"


def memory_of(tensor: torch.Tensor) -> int:
    """An id of a tensor's memory, the same for all tensors that share it."""
    if is_sparse(tensor):
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return int(tensor.untyped_storage()._cdata)


def noted_as_view(
    made: Proxy,
    given: Sequence[Proxy],
    func: OpOverload,
    args: Any,
    kwargs: Mapping[str, Any],
    index: int | None = None,
) -> Proxy:
    """Return ``made``, the result of a call. If one of ``given`` shares its memory, ``made``
    becomes a view of that, and neither of them is ``own`` any more."""
    memory = memory_of(made.held)
    for proxy in given:
        if memory_of(proxy.held) == memory:
            proxy.own = made.own = False
            made.part_of = made.part_of or View(proxy, func, args, kwargs, index)
            made.writes = made.whole().writes
    return made


def stands_now(written: Proxy, result: Proxy) -> Proxy:
    """Return the tensor that was written over, which stands for the result from now on."""
    a, b = written.held, result.held
    assert a is not None and b is not None
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    if not (alike and same_strides(a.shape, a.stride(), b.stride())):
        raise NeedsExport("what is written in place changes its type")
    written.held, written.node, written.known = result.held, result.node, result.known
    return written


@contextmanager
def gradients_told() -> Iterator[None]:
    """Raise :class:`TakesGradient` in functions that would take a gradient that is None for zeros;
    torch.autograd.grad itself refuses to take one here."""

    def take(*_: Any, **__: Any) -> NoReturn:
        raise TakesGradient("forward takes a gradient", user_frame())

    with patch.object(torch.autograd.functional, "_autograd_grad", take, create=True):
        yield


@contextmanager
def lists_stacked() -> Iterator[None]:
    """Let ``torch.tensor`` of a list with stand-ins stack these, where torch would ask for their
    numbers."""

    def instead(make: Callable[..., Any]) -> Callable[..., Any]:
        def of(data: Any, *args: Any, **how: Any) -> Any:
            if not isinstance(data, list | tuple) or not among(Proxy, data):
                return make(data, *args, **how)
            parts = [part if isinstance(part, Proxy) else of(part) for part in data]
            return torch.stack(parts).to(**{k: how[k] for k in ("dtype", "device") if k in how})

        return of

    makers: Any = {name: instead(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    with patch.multiple(torch, **makers):
        yield


# ---- views


@dataclass(frozen=True)
class View:
    """Which call made a tensor a view of ``whole``, and which of the call's results it is."""

    whole: torch.Tensor
    func: OpOverload | Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int | None = None

    def again(self) -> Any:
        """Make the same call once more."""
        answer = self.func(*self.args, **self.kwargs)
        return answer if self.index is None else answer[self.index]

    def put_back(self, part: torch.Tensor) -> torch.Tensor | None:
        """A new ``whole`` in which this view would show ``part``; None where it is not known how to
        do that."""
        if not isinstance(self.func, OpOverload):  # it is row(), below
            return _put_row_back(part, *self.args)
        ordered = schema_order(self.func, self.args, dict(self.kwargs))[1:]
        name = str(self.func).removeprefix("aten.")
        if name in _SAME_ORDER:
            return part.reshape(self.whole.shape)
        if self.index is not None:
            ordered.insert(0, self.index)
        return _PUT_BACK[name](self.whole, part, *ordered) if name in _PUT_BACK else None


# ---- rows that a tensor names


def rows(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """``x`` without the dimensions for which ``index`` has a whole number that the model computes,
    and the rest of ``index``. To take a view by such a number, torch would ask for its value."""
    given = tuple(map(_put_together, index if isinstance(index, tuple) else (index,)))
    if not any(map(_is_computed, given)):
        return x, given if isinstance(index, tuple) else index
    missing = x.ndim - sum(map(_dimensions, given))
    dim, found = 0, []
    for part in given:
        if _is_computed(part):
            found.append((dim, part))
        dim += missing if part is Ellipsis else _dimensions(part)
    for dim, number in reversed(found):
        if not -x.ndim <= dim < x.ndim:
            raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
        x = row(x, dim, number.clone())  # a copy keeps the value that it has now
    return x, tuple(part for part in given if not _is_computed(part))


def _is_computed(part: Any) -> bool:
    number = isinstance(part, Proxy) and not part.known and part.ndim == 0
    return number and not (part.is_floating_point() or part.dtype in (torch.bool, torch.uint8))


def _put_together(part: Any) -> Any:
    """A list of places as a tensor, where the model computes one of them."""
    numbers = part if isinstance(part, list) else []
    known = next(filter(_is_computed, numbers), None)
    if known is None:
        return part
    return torch.stack([n if _is_computed(n) else torch.full_like(known, n) for n in numbers])


def _dimensions(part: Any) -> int:
    """How many dimensions of a tensor a part of an index covers."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.ndim if mask else 1


def row(x: torch.Tensor, dim: int, number: torch.Tensor) -> Any:
    """The view of ``x`` at a place that the model computes."""
    seen: Any = x.select(dim, 0)  # its memory is laid out like that view's
    seen.node = torch.ops.aten.index.Tensor(x, _at(dim, number)).squeeze(dim).node
    seen.known, seen.part_of = False, View(x, row, (x, dim, number), {})
    return seen


def check_places(func: Any, stands: Sequence[Proxy]) -> None:
    """Refuse a call that depends on places in memory, where these depend on a computed number, and
    one that gives a tensor the memory of another; a layer may be moved to where it is already."""
    if func is SETS_DATA and stands[0].held is not stands[-1].held:
        refuse_data(user_frame())
    seen = [s.part_of for s in stands] if str(func) in STRIDES else []
    for view in seen:
        if view is not None:
            if view.func is row:
                raise NeedsExport(f"{func} of a row that the model chooses", user_frame())
            seen.append(view.whole.part_of)  # type: ignore[attr-defined]


def _put_row_back(part: Any, x: torch.Tensor, dim: int, number: torch.Tensor) -> torch.Tensor:
    put: Any = torch.ops.aten.index_put.default
    return put(x, _at(dim, number), part.unsqueeze(dim))  # type: ignore[no-any-return]


def _at(dim: int, number: torch.Tensor) -> list[torch.Tensor | None]:
    return [*[None] * dim, number.reshape(1).long()]


# views of all elements in the order that they have in the whole
_SAME_ORDER = set(
    """view.default reshape.default _unsafe_view.default view_as.default reshape_as.default
    flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default
    alias.default detach.default""".split()
)


def _narrow(x: torch.Tensor, part: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return torch.slice_scatter(x, part, dim, start, start + length)


def _permute(x: torch.Tensor, part: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    order = [d % x.ndim for d in dims]
    return part.permute([order.index(d) for d in range(x.ndim)])


def _split(x: torch.Tensor, part: torch.Tensor, i: int, size: int, dim: int) -> torch.Tensor:
    return _narrow(x, part, dim, i * size, part.shape[dim])


def _splits(
    x: torch.Tensor, part: torch.Tensor, i: int, sizes: Sequence[int], dim: int
) -> torch.Tensor:
    return _narrow(x, part, dim, sum(sizes[:i]), sizes[i])


def _chunk(x: torch.Tensor, part: torch.Tensor, i: int, chunks: int, dim: int) -> torch.Tensor:
    return _split(x, part, i, -(-x.shape[dim] // chunks), dim)


_PUT_BACK: dict[str, Callable[..., torch.Tensor]] = {
    "slice.Tensor": torch.slice_scatter,
    "select.int": torch.select_scatter,
    "narrow.default": _narrow,
    "transpose.int": lambda x, part, a, b: part.transpose(a, b),
    "t.default": lambda x, part: part.t(),
    "permute.default": _permute,
    "unbind.int": lambda x, part, i, dim: torch.select_scatter(x, part, dim, i),
    "split.Tensor": _split,
    "split_with_sizes.default": _splits,
    "chunk.default": _chunk,
}
