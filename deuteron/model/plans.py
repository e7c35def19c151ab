"""The plans of one module, one for each size that its inputs come in."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends.sparse import is_sparse
from deuteron.frontends.torch_export import Fixed, Imported, import_module
from deuteron.functional.core import entries
from deuteron.ir.types import TensorType
from deuteron.model.vary import Vary
from deuteron.plan import Cache, Plan, compile_graph
from deuteron.plan.serialize import chosen, decide_as
from deuteron.plan.tensors import comparison
from deuteron.plan.weights import Weights
from deuteron.policy import Policy

Key = tuple[tuple[int, ...], ...]  # the shape of every input
KIND_S = 2.5  # seconds of a search for calls that are written otherwise
DECIDED = 16  # the most plans for calls that differ in numbers that decide what is computed
DECIDE = (
    "the numbers of {} decide what is computed: this plan is for those of its example, others have "
    f"a plan once they came twice, {DECIDED} at most, and the module is called until then"
)
# after so many lookups by size, a plan no longer becomes the one that calls are compared with
# first: sizes may come in turns
LOOKS = 8


@dataclass(eq=False)
class Planned:
    """A plan for one size, and how calls of the module map to it. ``own``: the module itself is
    called, because that is quicker than running the plan."""

    imported: Imported
    plan: Plan
    used: int = 0  # a number that grows with every call
    own: bool = False
    looks: int = 0  # how often a call was looked up by its size to find this plan

    def __post_init__(self) -> None:
        """``single``: the result is one tensor and nothing around it; ``run``: runs the plan on
        tensors that were checked, in the quickest way from the second time on."""
        self.single = self.imported.out_spec.is_leaf() and isinstance(self.imported.outputs[0], str)
        self.run: Callable[..., list[torch.Tensor]] = self._first_run

    def _first_run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        results = self.plan.run_checked(tensors)
        self.run = self.plan.ready()
        return results

    @property
    def key(self) -> Key:
        return tuple(t.shape for t in self.plan.inputs.values())


@dataclass(frozen=True)
class Kept:
    """A size that can be planned again as it was, when it comes: the types of its inputs, what was
    chosen, what was imported (None where the module has other weights by now), and whether the
    module itself is called instead."""

    types: tuple[TensorType, ...]
    record: Mapping[str, Any]
    imported: Imported | None = None
    own: bool = False


@dataclass(eq=False)
class Plans:
    """A module with its weights, and the plans that were made for it.

    ``module`` is a copy of the user's, so that all sizes are planned with the same weights. Where
    there is none, ``state`` has the weights by their names, and ``missing`` says why there is no
    module and what the user can do. ``call`` says how calls are written, which is the same for
    every size; ``others`` are plans for calls that are written otherwise."""

    module: nn.Module | None
    device: torch.device
    policy: Policy
    call: Imported | None = None
    vary: Vary | None = None
    training: bool = False
    cache: Cache | None = None
    name: str = ""  # in explanations; the name of its class if there is none
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    missing: tuple[str, str] = ("", "")
    made: dict[Key, Planned] = field(default_factory=dict)
    later: dict[Key, Kept] = field(default_factory=dict)
    others: list[Plans] = field(default_factory=list)

    def __post_init__(self) -> None:
        # a test that recognises calls, and the plan for these
        self.known: tuple[Callable[..., bool], Any] = _other, None
        self.weights = Weights(self.tensors())
        self.ticks = itertools.count(1)
        self._once = dict[Any, None]()  # numbers that decide what is computed, and came once
        self._lock = threading.RLock()

    def tensors(self) -> Iterable[torch.Tensor]:
        """All weights that are the model's own."""
        if self.module is None:
            return self.state.values()
        return itertools.chain(self.module.parameters(), self.module.buffers())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by the names that the module gives them."""
        found = self.state if self.module is None else self.module.state_dict()
        return {name: t.detach() for name, t in found.items() if not is_extra(name, t)}

    def extra_state(self) -> dict[str, Any]:
        """Further entries of the module's state, which only the module can read."""
        found = {} if self.module is None else self.module.state_dict()
        return copy.deepcopy({name: t for name, t in found.items() if is_extra(name, t)})

    @property
    def first(self) -> Planned:
        """The plan for the example, which always stays."""
        return next(iter(self.made.values()))

    # ---- making plans

    def imported(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Imported:
        """The module as a graph, for a call."""
        assert self.module is not None
        deciding = self.call.deciding if self.call is not None else frozenset[int]()
        how: Any = {"ours": entries(), "deciding": deciding}
        found = import_module(self.module, tuple(args), kwargs, self.name, **how)
        if self.call is not None and found.deciding != deciding:
            wrong = "numbers of other arguments decide what is computed than in the example"
            raise GraphError(wrong, remedy="make this call the example")
        found = replace(found, graph=self.weights.imported(found.graph))
        self.call = self.call or found.without_graph()
        return found

    def written_otherwise(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plans:
        """Make plans for calls that are written as this one is, by measurement where the example's
        were. Only two kinds of calls may be written otherwise than the example: those with objects
        that change, such as a cache that is empty, full, or not there yet, each kind of which comes
        often; and those with other numbers that decide what is computed, which are planned by
        estimate, as other sizes are."""
        assert self.call is not None
        find = self.first.plan.decision.mode == "found" and not self.call.deciding
        search: dict[str, Any] = {"find": find, "cache": self.cache, "budget_s": KIND_S}
        with self._lock, undisturbed(self.device):
            other = replace(self, call=None, made={}, later={}, others=[])
            other.weights = self.weights
            planned = other.planned(other.imported(args, kwargs), **search)
            other.add(replace(planned, own=self.first.own and bool(self.call.deciding)))
            self.others.append(other)
            del self.others[: -self.policy.max_plans]
        return other

    def decided_otherwise(self, args: Any, kwargs: Any) -> bool:
        """Whether a call has other numbers than the example that decide what is computed."""
        if self.call is None or not self.call.deciding:
            return False
        leaves = self.call.ordered((args, kwargs))
        same = self.call.matched(leaves, self.call.in_spec) is not None
        return not same and self.call.decided_otherwise(leaves)

    def wait(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with other numbers that decide what is computed has to wait for a plan: it
        gets one when these come a second time, as long as there are not too many."""
        assert self.call is not None
        numbers = tuple(
            (leaves[i].shape, tuple(leaves[i].ravel().tolist())) for i in self.call.deciding
        )
        if len(self.others) < DECIDED and numbers in self._once:
            return False
        self._once[numbers] = None
        while len(self._once) > 2 * DECIDED:
            del self._once[next(iter(self._once))]
        return True

    def planned(self, imported: Imported, **search: Any) -> Planned:
        """A plan for what was imported."""
        how: Any = {"device": self.device, "policy": self.policy, "weights": self.weights}
        made = Planned(imported, compile_graph(imported.graph, **(how | search)))
        if imported.deciding:
            named = ", ".join(imported.paths[i] for i in sorted(imported.deciding))
            made.plan.note(DECIDE.format(named))
        return made

    def by_module(self, args: Any, kwargs: Any) -> Any:
        """The answer of the module itself, without gradients and autocast, as a plan would give
        it."""
        assert self.module is not None
        if torch._C._is_any_autocast_enabled():
            with torch.autocast(self.device.type, enabled=False), torch.no_grad():
                return self.module(*args, **kwargs)
        recording = torch.is_grad_enabled()  # what no_grad() does, at a tenth of its cost
        torch._C._set_grad_enabled(False)
        try:
            return self.module(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(recording)

    def add(self, planned: Planned) -> Planned:
        """Keep a plan, in the place of one for the same size if there is one. If there are too
        many, drop the one that was not called for the longest time."""
        planned.used = next(self.ticks)
        self.known = _other, None
        self.made[planned.key] = planned
        self.later.pop(planned.key, None)
        stay = {self.first.key, planned.key}
        while len(self.made) > max(self.policy.max_plans, len(stay)):
            others = (p for key, p in self.made.items() if key not in stay)
            del self.made[min(others, key=lambda p: p.used).key]
        return planned

    def know(self, planned: Planned, given: Sequence[Any], fitted: Sequence[Any]) -> None:
        """Recognise calls like this one from now on by torch's native comparison of tensors, which
        is quicker than looking at each in Python: from the second such call on, and only if nothing
        was converted."""
        planned.looks += 1
        if not 1 < planned.looks <= LOOKS or any(map(is_not, given, fitted)):
            return
        if len({id(t) for t in given}) == len(given) and not any(t.requires_grad for t in given):
            same = comparison(given)
            if same is not None:
                self.known = same, planned

    def new(self, tensors: Sequence[torch.Tensor]) -> Planned:
        """The plan for tensors of a size that there is no plan for, made now."""
        self._refuse_all_but_sizes(tensors)
        key = tuple(tuple(t.shape) for t in tensors)
        with self._lock, undisturbed(self.device):
            if key in self.made:  # another thread was here first
                return self.made[key]
            if key in self.later:
                return self.again(key)
            self._refuse_sizes(tensors)
            try:
                example = map(_like, tensors, self.types)
                found = self.planned(self.imported(*self._call(example)), find=False)
                return self.add(replace(found, own=self.first.own))
            except DeuteronError as error:
                raise BindError(
                    f"no plan can be made for {self._sizes(tensors)}: {error.wrong}",
                    asked="a call of another size than before",
                    where=error.where,
                    remedy=error.remedy or "call the module itself to see what it says",
                ) from error

    def again(self, key: Key) -> Planned:
        """Make the plan that was kept for later, of this module or of what a file holds."""
        kept = self.later[key]
        imported = self.imported_again(kept)
        how = self.device, self.policy, self.weights
        decision = decide_as(kept.record, imported.graph, *how)
        plan = Plan(decision, self.device, weights=self.weights)
        return self.add(Planned(imported, plan, own=kept.own and self.module is not None))

    def imported_again(self, kept: Kept) -> Imported:
        """What a size was imported as, with the present weights."""
        if kept.imported is not None:
            return kept.imported
        zeros = (_empty(t, self.device).zero_() for t in kept.types)
        return self.imported(*self._call(zeros))

    def remade(self, module: nn.Module, weights: Weights | None = None) -> Plans:
        """The same plans with the weights of another copy of the module. The plan of the example,
        and of each other kind of calls, is made now; those of other sizes when they come."""
        later = {key: replace(kept, imported=None) for key, kept in self.kept().items()}
        other = replace(self, module=module, made={}, later=later)
        other.weights = weights or other.weights
        with undisturbed(self.device):
            other.again(self.first.key)
        other.others = [kind.remade(module, other.weights) for kind in self.others]
        return other

    def copied(self) -> Plans:
        """The same plans; others can be added to the copy, and these here stay as they are."""
        with self._lock:
            other = replace(self, made=dict(self.made), later=dict(self.later))
        other.weights = self.weights
        return other

    def kept(self) -> dict[Key, Kept]:
        """Every size, as it can be planned again; that of the example first."""
        with self._lock:
            found = {}
            for key, p in self.made.items():
                types, record = tuple(p.plan.inputs.values()), chosen(p.plan.decision, self.device)
                found[key] = Kept(types, record, p.imported, p.own)
            return found | self.later

    def find(self, **search: Any) -> None:
        """Choose by measurement for every plan that was not; each is replaced when its search is
        done."""
        for planned in list(self.made.values()):
            if planned.plan.decision.mode != "found":
                with self._lock, undisturbed(self.device):
                    how = {"find": True, "cache": self.cache, **search}
                    better = self.planned(planned.imported, **how)
                    better.plan.capture()
                    if planned.key in self.made:
                        self.add(better)
        for other in self.others:
            other.find(**search)

    def pick(self, name: str) -> None:
        """Run another of the plans that a search found, for every size that has one."""
        with self._lock, undisturbed(self.device):
            found = [p for p in self.made.values() if p is self.first or p.plan.alternatives()]
            for planned in [Planned(p.imported, p.plan.pick(name)) for p in found]:
                self.add(planned)
        for other in self.others:
            other.pick(name)

    # ---- what a call may be

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of the tensors of the example."""
        assert self.call is not None
        return tuple(self.call.graph.types[name] for name in self.call.graph.inputs)

    @property
    def paths(self) -> list[str]:
        """How a caller writes each of the tensors."""
        assert self.call is not None
        pairs = zip(self.call.paths, self.call.inputs, strict=True)
        return [path for path, given in pairs if isinstance(given, str)]

    def _call(self, tensors: Iterable[torch.Tensor]) -> tuple[Any, Any]:
        """Positional and keyword arguments of these tensors, written as in the example."""
        assert self.call is not None
        left, call = iter(tensors), self.call
        leaves = [given.value if isinstance(given, Fixed) else next(left) for given in call.inputs]
        args, kwargs = pytree.tree_unflatten(leaves, call.in_spec)
        return args, kwargs

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """A call that differs from the example only in sizes, written as the example is."""
        assert self.call is not None
        tensors = self.call.flatten_call(args, kwargs)
        self._refuse_all_but_sizes(tensors)
        return self._call(tensors)

    def _refuse_all_but_sizes(self, tensors: Sequence[Any]) -> None:
        """Raise BindError if anything but the sizes differs from the example."""
        for i, tensor in enumerate(tensors):
            self.first.plan.binder.check_all_but_size(tensor, i)

    def _refuse_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise BindError where new sizes are not planned, or not these."""
        asked, came = "a call of another size", self._sizes(tensors)
        if self.policy.shapes == "fixed":
            keys = (*self.made, *self.later)
            known = "; ".join(str([list(shape) for shape in key])[1:-1] for key in keys)
            wrong = f"{came} came, and the shapes are fixed at {known}"
            remedy = "give a list of examples, one for each size, or use Policy(shapes='any')"
            raise BindError(wrong, asked=asked, remedy=remedy)
        if self.vary is not None:
            self.vary.check(self.paths, self.types, tensors)
        if self.module is None:
            why, remedy = self.missing
            raise BindError(f"there is no plan for {came}, and {why}", asked=asked, remedy=remedy)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            wrong = f"{came} came for the first time while a CUDA Graph is captured"
            raise BindError(wrong, asked=asked, remedy="call it once with these sizes before")

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> str:
        pairs = zip(self.paths, tensors, strict=True)
        return ", ".join(f"{path} of shape {list(t.shape)}" for path, t in pairs)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Plan as if nothing were around it: no gradients, no autocast, no inference mode."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _other(*tensors: Any) -> bool:
    """The test that recognises no call."""
    return False


def _empty(type_: TensorType, device: torch.device) -> torch.Tensor:
    how: Any = {"dtype": type_.dtype.torch, "device": device}
    return torch.empty_strided(type_.shape, type_.strides, **how)


def _like(tensor: torch.Tensor, example: TensorType) -> torch.Tensor:
    """The same numbers in new memory, in the order that the example has."""
    keep = example.layout != "strided" and tensor.ndim == len(example.shape)
    layout = example.layout if keep else "contiguous"
    type_ = TensorType.of(tensor.shape, example.dtype, layout)
    return _empty(type_, tensor.device).copy_(tensor)


def is_extra(name: str, value: Any) -> bool:
    """Whether this entry of a state_dict is no weight, but what ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor)


def private(module: nn.Module) -> nn.Module | str:
    """A copy that nobody else has, or why there can be none. Tensors that autograd computed, which
    some modules keep beside their parameters, are copied without their history."""
    held = (value for m in module.modules() for value in vars(m).values())
    memo: dict[int, Any] = {}
    for tensor in held:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            memo[id(tensor)] = tensor.detach().clone()
    for tensor in (*module.parameters(), *module.buffers()):
        if is_sparse(tensor):  # which deepcopy does not copy
            own = tensor.detach().clone()
            kept = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if kept else own
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
