"""What ``dt.optimize`` returns: a module that runs plans."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C import _are_functorch_transforms_active as transforms_active
from torch.compiler import is_compiling
from torch.nn.modules.module import _global_forward_hooks as _global_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _global_pre_hooks
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError
from deuteron.explain import Explanation
from deuteron.frontends.state import holds_state, opened
from deuteron.frontends.torch_export import Imported
from deuteron.functional.context import is_watched, without_memory
from deuteron.kinds import checked
from deuteron.model.follow import Follower
from deuteron.model.plans import Plans, private
from deuteron.plan import Plan
from deuteron.plan.search import Progress
from deuteron.plan.tensors import restrided
from deuteron.target import Target

_AGAIN = "change the module it came from, and optimise that"


class Optimized(nn.Module):
    """What :func:`optimize` returns: a module for inference, called like the one it came from.

    It has a copy of that module's weights, which all its plans share: what happens to the module
    later does not reach them, unless it was asked to ``follow``. A call of a size that has not come
    before is planned first. ``plan`` is the plan for the example, ``plans`` has those for all sizes
    by their shapes; ``seconds`` says how long each stage took, ``opaque`` which torch operators
    have no definition of ours and run as they are.
    """

    def __init__(
        self, plans: Plans, seconds: Mapping[str, float], follow: Follower | None = None
    ) -> None:
        super().__init__()
        self.seconds = dict(seconds)
        self.training = plans.training
        self._follow = follow
        assert plans.call is not None
        self._single = plans.call.single_tensor_call()
        self._plans = plans  # replaced as a whole: a call that has begun goes on with what it has

    @property
    def plan(self) -> Plan:
        return self._plans.first.plan

    @property
    def plans(self) -> dict[tuple[tuple[int, ...], ...], Plan]:
        return {key: planned.plan for key, planned in self._plans.made.items()}

    @property
    def imported(self) -> Imported:
        """The example's call as a graph."""
        return self._plans.first.imported

    @property
    def opaque(self) -> tuple[str, ...]:
        return self.imported.opaque

    # ---- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` as every module does, but directly where there are no hooks."""
        if self._forward_hooks or self._forward_pre_hooks or _global_hooks or _global_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._follow is not None and self._follow.changed():
            self._catch_up()
        plans = self._plans
        if is_compiling() or transforms_active() or is_watched():
            return self._by_module(args, kwargs)
        holders: list[Any] = []
        if self._single and len(args) == 1 and not kwargs:
            tensors: list[Any] = [args[0]]
        else:
            found = self._given(args, kwargs)
            if found is None:
                return plans.by_module(args, kwargs)
            plans, tensors, holders = found
        same, planned = plans.known
        if not same(*tensors):
            for tensor in tensors:
                if type(tensor) is not torch.Tensor and without_memory(tensor):
                    return self._by_module(args, kwargs)
            key: Any = tuple([getattr(t, "shape", None) for t in tensors])
            planned = plans.made.get(key)
            if planned is None:
                tensors = _numbers_to(plans.device, tensors)
                planned = plans.new(tensors)
            given, tensors = [*tensors], self._fitted(planned.plan, tensors)
            plans.know(planned, given, tensors)
        planned.used = next(plans.ticks)
        if planned.own:
            return plans.by_module(args, kwargs)
        results = planned.run(*tensors)
        if planned.single:
            return results[0]
        return planned.imported.unflatten_result(results, holders)

    def _given(self, args: Any, kwargs: Any) -> tuple[Plans, list[Any], list[Any]] | None:
        """The plans for calls that are written like this one, its tensors, and the objects that
        hold some of them; None if the module itself is to be called."""
        plans, call = self._plans, (args, kwargs)
        assert plans.call is not None
        read = plans.call.read_call(args, kwargs)
        if read is not None:
            return plans, read, []
        several = plans.others or plans.call.deciding or holds_state(call)
        if not (plans.call.stateful or several):
            return plans, plans.call.flatten_call(args, kwargs), []
        tree, holders = opened(call)
        leaves, spec = pytree.tree_flatten(tree)
        decides = bool(plans.call.deciding) and not holders
        if decides:  # arguments of such calls may come in any order
            leaves, spec = plans.call.ordered(tree), plans.call.in_spec
        for other in (plans, *plans.others):
            assert other.call is not None
            tensors = other.call.matched(leaves, spec)
            if tensors is not None:
                return other, tensors, holders
        fixed = plans.policy.shapes == "fixed" or plans.vary is not None or plans.module is None
        decides = decides and plans.call.decided_otherwise(leaves)
        if fixed or not (holders or decides):
            return plans, plans.call.flatten_call(args, kwargs), holders
        if decides and plans.wait(leaves):
            return None
        other = plans.written_otherwise(args, kwargs)
        assert other.call is not None
        return other, other.call.flatten_call(args, kwargs), holders

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of transformers, with plans in the place of the module's forward: one for
        the prompt, one for every token after it. The cache has a fixed size, unless you ask for
        another kind. Only one call may run at a time."""
        module = self._plans.module
        if module is None or not hasattr(module, "generate"):
            wrong = "this model has no generate"
            remedy = "optimise a language model of transformers"
            raise DeuteronError(wrong, asked="generate(…)", remedy=remedy)
        if not kwargs.keys() & {"past_key_values", "cache_implementation", "use_cache"}:
            kwargs |= {"cache_implementation": "static"}
        kwargs.setdefault("disable_compile", True)

        @functools.wraps(module.forward)
        def planned(*args: Any, **kwargs: Any) -> Any:
            del module.forward  # a new size is planned from what the module itself does
            try:
                return self(*args, **kwargs)
            finally:
                module.forward = planned

        module.forward = planned
        try:
            generate: Any = module.generate
            return generate(*args, **kwargs)
        finally:
            del module.forward

    def _by_module(self, args: Any, kwargs: Any) -> Any:
        """For callers that have to see torch's operators: another import, torch.compile, vmap."""
        plans = self._plans
        if plans.module is None:
            wrong = f"this call has to be made of torch's operators, and {plans.missing[0]}"
            asked = "a call inside of a trace or a transform such as vmap"
            raise BindError(wrong, asked=asked, remedy=plans.missing[1])
        return plans.module(*args, **kwargs)

    def _fitted(self, plan: Plan, tensors: list[Any]) -> list[torch.Tensor]:
        """The tensors, checked against the plan. Another memory order is converted, and a number on
        the host is moved to the device, but nothing else."""
        binder = plan.binder
        try:
            binder.check(tensors)
        except BindError:
            tensors = _numbers_to(plan.device, tensors)
            for i, tensor in enumerate(tensors):
                if binder.fits_but_for_strides(tensor, i):
                    tensors[i] = restrided(tensor, binder.types[i])
            binder.check(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            wrong = "an input requires a gradient, but this plan computes none"
            remedy = "call it under torch.no_grad(), or build the graph with dt.Graph and grad()"
            raise BindError(wrong, asked="a call inside autograd", remedy=remedy)
        return tensors

    @checked(name="find")
    def find(self, budget_s: float = 2.5, progress: Progress | None = None) -> None:
        """Choose by measurement, for about ``budget_s`` seconds a size, in every plan that was
        chosen by estimate, as plans of sizes that first came up in a call are. Each plan is
        replaced when the new one is ready. ``progress(stage, done, total)`` is called as a search
        goes on."""
        self._plans.find(budget_s=budget_s, progress=progress)

    @checked(name="pick")
    def pick(self, name: str) -> None:
        """Run another of the plans that the search found, as ``plan.alternatives()`` and
        ``explain(full=True)`` list them: "deterministic", say, or "least workspace". Sizes that
        were not measured keep what they have."""
        self._plans.pick(name)

    # ---- weights

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Copies of the weights, under the names that they have in the module it came from.
        ``destination``, ``prefix`` and ``keep_vars`` are torch's; nothing in here is a variable."""
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        weights = {name: t.clone() for name, t in self._plans.state_dict().items()}
        for name, value in (weights | self._plans.extra_state()).items():
            found[prefix + name] = value
        return found

    @checked(name="refit")
    def refit(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Put other weights into the same plans: those of ``state_dict``, which has the names,
        shapes and element types of this model's own. What was folded and packed is computed again.
        If anything is wrong, nothing changes."""
        other, missing, unknown = self._loaded(state_dict)
        for name in (*missing, *unknown):
            wrong = "is missing" if name in missing else "is no weight of this model"
            raise _unfit(f"{name!r} {wrong}", name)
        self._plans = self._plans.remade(other)

    def _loaded(self, state_dict: Mapping[str, Any]) -> tuple[nn.Module, list[str], list[str]]:
        """A module with these weights, names that are missing, and names that it does not have."""
        plans = self._plans
        if plans.module is None:
            why, remedy = plans.missing
            raise BindError(f"no weights can be put in: {why}", asked="refit", remedy=remedy)
        _check_state(state_dict, plans.state_dict())
        other = _copied(plans.module, "refit")
        return other, *other.load_state_dict(state_dict, strict=False)

    def _catch_up(self) -> None:
        """Take over the weights that the module has now."""
        assert self._follow is not None
        follow = Follower(self._follow.module)
        self._plans = self._plans.remade(_copied(follow.module, "follow"))
        self._follow = follow

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: object,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """``load_state_dict``, of this module or of one that it is part of. It is left to torch to
        refuse or to pass over names that are missing or unknown."""
        mine = {k.removeprefix(prefix): t for k, t in state_dict.items() if k.startswith(prefix)}
        if not mine:
            missing += [prefix + name for name in self._plans.state_dict()]
            return
        try:
            other, lacks, unknown = self._loaded(mine)
            missing += [prefix + name for name in lacks]
            unexpected += [prefix + name for name in unknown]
            if len(mine) > len(unknown):
                self._plans = self._plans.remade(other)
        except DeuteronError as error:
            errors.append(str(error))

    # ---- what a module can do, and this one cannot

    def train(self, mode: bool = True) -> Optimized:
        """Refused where ``mode`` is another than that in which the module was optimised."""
        if mode != self.training:
            was, wanted = ("training", "eval") if self.training else ("eval", "training")
            wrong = f"the plans were made for {was} mode"
            remedy = f"put the module it came from in {wanted} mode, and optimise that"
            raise DeuteronError(wrong, asked=f"train({mode})", remedy=remedy)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Optimized:
        """``to``, ``half``, ``cuda`` and others go through here: refused where anything would
        change."""
        for tensor in self._plans.tensors():
            made = fn(tensor)
            if made.device != tensor.device or made.dtype != tensor.dtype:
                wrong = f"the plans were made for {tensor.dtype} on {tensor.device}"
                asked = f"a conversion to {made.dtype} on {made.device}"
                raise DeuteronError(wrong, asked=asked, remedy=_AGAIN)
        return self

    # ---- explaining and keeping

    def explain(
        self,
        format: str | None = None,
        *,
        target: str | Target | None = None,
        errors: bool = False,
        full: bool = False,
    ) -> Explanation | str:
        """What runs where, what it costs and why; see :meth:`deuteron.Plan.explain`."""
        return self.plan.explain(format, target=target, errors=errors, full=full)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    @checked(name="save")
    def save(self, path: str | Path) -> Path:
        """Write the plans of all sizes as JSON and the weights beside it; :func:`deuteron.load`
        reads them."""
        from deuteron.model.saved import save

        return save(self._plans, Path(path))

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        """A copy that behaves as if it had plans and weights of its own. What is in memory never
        changes, so both share it."""
        other = Optimized.__new__(Optimized)
        other.__dict__.update(self.__dict__)
        for name, value in vars(self).items():  # hooks, that is
            if isinstance(value, dict):
                other.__dict__[name] = value.copy()
        other._plans = self._plans.copied()
        memo[id(self)] = other
        return other

    def __copy__(self) -> Optimized:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        from deuteron.model.saved import pickled

        return pickled(self._plans, self.seconds)

    def __repr__(self) -> str:
        spent = ", ".join(f"{k} {v:.2f} s" for k, v in self.seconds.items())
        more = len(self._plans.made) + len(self._plans.later) - 1
        sizes = f" and {more} for other sizes" if more else ""
        return f"<Optimized {self.plan!r}{sizes}{'; ' if spent else ''}{spent}>"


def _copied(module: nn.Module, asked: str) -> nn.Module:
    found = private(module)
    if isinstance(found, str):
        raise DeuteronError(f"the module cannot be copied: {found}", asked=asked)
    return found


def _numbers_to(device: torch.device, tensors: Sequence[Any]) -> list[Any]:
    """Tensors of rank 0 on the host may meet those of any device, as they may in torch."""
    return [t.to(device) if _is_number(t) else t for t in tensors]


def _is_number(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and not t.ndim and t.device.type == "cpu"


def _unfit(wrong: str, name: str) -> BindError:
    remedy = "give the state_dict of a module like the one that was optimised"
    return BindError(wrong, asked="refit(state_dict)", where=name, remedy=remedy)


def _check_state(given: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
    """Raise BindError unless every tensor of a known name fits."""
    for name, tensor in given.items():
        if name not in own:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise _unfit(f"{name!r} is a {type(tensor).__name__}, not a tensor", name)
        if tensor.shape != own[name].shape:
            shapes = f"{list(tensor.shape)}, this model's {list(own[name].shape)}"
            raise _unfit(f"{name!r} has shape {shapes}", name)
        if tensor.dtype != own[name].dtype:
            raise _unfit(f"{name!r} is {tensor.dtype}, this model's {own[name].dtype}", name)
    places: dict[tuple[int, object], str] = {}
    for name, tensor in own.items():
        if name not in given or not tensor.numel():
            continue
        first = places.setdefault((tensor.data_ptr(), tensor.shape), name)
        if first != name and not torch.equal(given[first], given[name]):
            raise _unfit(f"{first!r} and {name!r} are one weight here, and differ there", name)
