"""Tensors that step together, and the table of their addresses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from deuteron.errors import EngineError
from deuteron.kernels.optim import Rule, Step, first_of, listed
from deuteron.optim.sharded import Spread, is_spread, local, local_gradient

# A step calls these on hundreds of tensors. Under map() a method takes half as long as in a loop.
ADDRESS, CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
COUNT, STRIDE, NEGATED = torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_neg
CODES = {torch.int64: "q", torch.float64: "d"}


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; wait for it only if that is the host, where Python reads it."""
    return x.to(device, non_blocking=device.type == "cuda")


def capturing(device: torch.device) -> bool:
    """Whether a CUDA Graph is being captured, so that work for the device is recorded, not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Uploads:
    """Copies numbers to a device without waiting for it. They always get new memory there, because
    a kernel that still runs, or a CUDA Graph, may read the last ones.

    A graph copies from pinned host memory at every replay, and that cannot be allocated during a
    capture. So there is a spare piece for each element type, which the graph then keeps for itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spare: dict[torch.dtype, torch.Tensor] = {}
        self.captured: list[torch.Tensor] = []

    def __call__(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        host = torch.frombuffer(array(CODES[dtype], values), dtype=dtype)
        if self.device.type != "cuda":
            return host.to(self.device)
        if not capturing(self.device):
            if dtype not in self.spare:
                self.spare[dtype] = torch.empty_like(host, pin_memory=True)
            return host.pin_memory().to(self.device, non_blocking=True)
        if dtype not in self.spare:
            wrong = "gradients moved, and the memory to say so went to the graph captured before"
            remedy = "call step() once between the two captures"
            raise EngineError(wrong, asked="step() while a CUDA Graph is captured", remedy=remedy)
        kept = self.spare.pop(dtype).copy_(host)
        there = torch.empty_like(host, device=self.device)
        self.captured += [kept, there.copy_(kept, non_blocking=True)]
        return there


def same_memory_order(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether element k in the memory of one tensor is element k in the memory of the other."""
    return x.is_contiguous() if like.is_contiguous() else x.stride() == like.stride()


def is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in whatever order."""
    if x.is_contiguous():
        return True
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _itself(x: Any) -> Any:
    return x


def _changes(x: torch.Tensor) -> int:
    """How often torch's operators have written to a tensor or its views."""
    return 0 if x.is_inference() else x._version


class TensorBatch:
    """Parameters of one group on one device with equal element types, which are updated together.

    The table has, per tensor, the number of elements and the addresses of the parameter and its
    state. Gradients are often reallocated, so their addresses are a separate row, which is uploaded
    again whenever one of them has moved.
    """

    def __init__(
        self,
        rule: Rule,
        params: list[torch.Tensor],
        states: list[dict[str, Any]],
        index: Sequence[int],
        block: int,
        fresh: bool,
        row_major: bool = False,
        spread: Spread | None = None,
    ) -> None:
        """``row_major``: update row-major copies of tensors in any other memory order, and copy
        them back. ``spread``: the ranks that hold the other parts of these tensors, if they are
        sharded.
        """
        self._whole, self.spread = params, spread
        self._counted = [p for p in params if not p.is_inference()]
        assert params[0].grad is not None
        self.grad_dtype = params[0].grad.dtype.to_real()
        self._in_parts = any(map(is_spread, params))  # the parameters are DTensors
        if self._in_parts:
            params = list(map(local, params))
        self.rule, self.params, self.states = rule, params, states
        self.device = params[0].device
        self.index = list(index)  # places of the parameters in the group
        self.fresh = fresh  # its tensors are before their first step, which differs from others
        fits = torch.Tensor.is_contiguous if row_major else is_dense
        plain = torch.contiguous_format if row_major else torch.preserve_format
        self.homes = [
            p.detach() if fits(p) else torch.empty_like(p, memory_format=plain) for p in params
        ]
        self.strays = [i for i, p in enumerate(params) if not fits(p)]
        self.plain = all(h.is_contiguous() and not h.is_complex() for h in self.homes)
        self.tensors = [[local(s[key]) for s in states] for key in rule.keys]
        # element types of the parameter and its state, in the order of the table
        self.dtypes = tuple(row[0].dtype.to_real() for row in (self.homes, *self.tensors))
        # element types in the order of the rule's tensors; scratch tensors have the arithmetic's
        self.kinds = (self.dtypes[0], self.grad_dtype, *self.dtypes[1:])
        self.wide = torch.float64 if torch.float64 in self.kinds else torch.float32
        self.kinds += (self.wide,) * (len(rule.tensors) - len(self.kinds))
        facts: tuple[Callable[[torch.Tensor], Any], ...] = (ADDRESS, COUNT, STRIDE)
        self._facts = [(ask, list(map(ask, params))) for ask in facts]
        self.sizes = [p.numel() * (2 if p.is_complex() else 1) for p in params]
        self.count = len(params)
        self._check_memory()
        self.upload = Uploads(self.device)
        self._lay_out(block)
        self._grad_places: list[int] = []
        self.grads: torch.Tensor
        self.steps = self._adopt_steps()
        on_host = rule.counts and self.steps.is_cpu
        # As numpy: adding to it needs no dispatch and does not change the tensor's version.
        self._counts = self.steps.numpy() if on_host else None
        self.step = float(self.steps[0]) if on_host else 0.0
        self.rows: torch.Tensor | None = None  # the step's numbers, if the device makes them
        self.prepared: dict[Rule, Any] = {}  # what a runner made for this rule, or for another
        self.ran: list[tuple[str, Step | None, int]] = []  # kernel, step, launches since take()
        self.constants: torch.Tensor | None = None
        self._constant_values: list[float] = []

    def _check_memory(self) -> None:
        for p, size in zip(self.params, self.sizes, strict=True):
            if size and not p.data_ptr():
                wrong = f"a {type(p).__name__} of shape {tuple(p.shape)} has no memory of its own"
                remedy = "optimise plain tensors, such as its local part"
                raise EngineError(wrong, asked="a step of an optimiser", remedy=remedy)

    def _lay_out(self, block: int) -> None:
        """Make the list of chunks (the tensor of each, and its place there), the list of each
        tensor's first chunk, and the table."""
        chunks = [-(-size // block) for size in self.sizes]
        self.chunks = sum(chunks)
        self.where, self.firsts = (x.to(self.device) for x in (listed(chunks), first_of(chunks)))
        rows = [self.homes, *self.tensors]
        addresses = [self.sizes, *([t.data_ptr() for t in row] for row in rows)]
        self.table = torch.tensor(addresses, dtype=torch.int64).to(self.device)

    def _adopt_steps(self) -> torch.Tensor:
        """Return one tensor of all step counts. Each state gets a view of its own count, so that it
        looks as in torch."""
        self._step_views: tuple[torch.Tensor, ...] = ()
        self._steps_changed = 0
        if not self.rule.counts:
            return torch.empty(0)
        found = [s["step"] for s in self.states]
        there = self.device.type == "cuda" and not all(t.is_cpu for t in found)
        where = self.device if there else torch.device("cpu")
        steps = torch.stack([t.detach().to(where, torch.float32).reshape(()) for t in found])
        return self._shared(steps)

    def _shared(self, steps: torch.Tensor) -> torch.Tensor:
        self._step_views, self._steps_changed = steps.unbind(), _changes(steps)
        for state, view in zip(self.states, self._step_views, strict=True):
            state["step"] = view
        return steps

    # ---- before each step

    def still_holds(self) -> bool:
        """Whether parameters and state are still the tensors that the table was made for, and
        nobody else has written to the step counts: a state is open to everybody."""
        for ask, before in self._facts:
            if list(map(ask, self.params)) != before:
                return False
        if _changes(self.steps) != self._steps_changed:
            return False
        if self._in_parts and not all(map(is_, map(local, self._whole), self.params)):
            return False
        kept = zip((*self.rule.keys, "step"), (*self.tensors, self._step_views), strict=True)
        here: Callable[[Any], Any] = local if self._in_parts else _itself
        try:
            found = ((map(itemgetter(key), self.states), row) for key, row in kept if row)
            rows = (map(is_, map(here, there), row) for there, row in found)
            return all(map(all, rows))
        except KeyError:  # somebody took a tensor out of the state
            return False

    def take(self, grads: list[torch.Tensor]) -> None:
        """Take the present gradients and their addresses; copy those in another memory order than
        their parameter into its order."""
        if self._in_parts:
            grads = list(map(local_gradient, grads, self._whole))
        if not (self.plain and all(map(CONTIGUOUS, grads)) and not any(map(NEGATED, grads))):
            for i, (g, home) in enumerate(zip(grads, self.homes, strict=True)):
                if not same_memory_order(g, home) or g.is_conj() or g.is_neg():
                    grads[i] = torch.empty_like(home, dtype=g.dtype).copy_(g)
        self.ran = []
        self.held = grads
        places = list(map(ADDRESS, grads))
        if places != self._grad_places:
            self.grads = self.upload(places, torch.int64)
            # a graph fills this row again at every replay, so no other step may use it
            self._grad_places = [] if capturing(self.device) else places
        for i in self.strays:
            self.homes[i].copy_(self.params[i])

    def let_go(self) -> None:
        """Finish a step: copy results back to parameters without dense memory, tell autograd that
        parameters were written to, and release the gradients."""
        for i in self.strays:
            self.params[i].copy_(self.homes[i])
        increment_version(self._counted)
        self.held = []

    def advance(self) -> float:
        """Count one more step on the host, and return the count."""
        if self._counts is not None:
            self._counts += 1.0
            self.step += 1.0
        return self.step

    def count_on_device(self) -> None:
        """Keep the step counts on the device from now on."""
        if self.rule.counts and self.steps.device != self.device:
            self.steps = self._shared(self.steps.to(self.device, non_blocking=True))

    def constants_on_device(self, values: list[float]) -> torch.Tensor:
        if self.constants is None or values != self._constant_values:
            self.constants = self.upload(values, torch.float64)
            self._constant_values = [] if capturing(self.device) else values
        return self.constants

    def in_use(self) -> tuple[Any, ...]:
        """All that a CUDA Graph which is captured now reads and writes, to keep it alive."""
        rows = self.table, self.grads, self.where, self.firsts, self.steps, self.rows
        return *rows, self.constants, self.homes, self.tensors, self.upload, self.prepared
