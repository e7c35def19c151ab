"""What all optimisers share: state, batches of tensors, clipping, unscaling, averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypedDict

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiling_frames
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deuteron.errors import BindError, EngineError, GraphError
from deuteron.kernels.optim import MATRICES, Extras, Rule
from deuteron.optim.batch import TensorBatch, capturing, is_dense, moved, same_memory_order
from deuteron.optim.runners import Control, Given, Limits, Runner, explained, runner
from deuteron.optim.sharded import is_spread, spread_of

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GRADIENT = attrgetter("grad")
Group = dict[str, Any]  # a parameter group as torch keeps it: parameters and their settings


class Ours(TypedDict, total=False):
    """Arguments that torch.optim does not have. The optimisers here take them by name.

    max_norm: clip the gradients, taken together, to this 2-norm, as
        torch.nn.utils.clip_grad_norm_ does. ``.grad`` itself is left alone; after the step
        ``optimizer.grad_norm`` holds the norm (a tensor).
    skip_nonfinite: skip the step if the norm is inf or nan.
    ema_decay: keep a moving average of the parameters, state["ema"], in float32 where they have
        16 bits: ema ← decay·ema + (1 − decay)·p, starting at the parameters before the first step.
        ``with optimizer.averaged():`` puts the averages in place of the parameters.
    state_dtype: element type of the state; None is the parameter's own, as in torch.
    master_weights: keep float32 copies of 16-bit parameters, state["master"]. The step updates the
        copies, and rounds the parameters from them.
    """

    max_norm: float | None
    skip_nonfinite: bool
    ema_decay: float | None
    state_dtype: torch.dtype | None
    master_weights: bool


class Batches(NamedTuple):
    """The batches of a group, and the gradients' types and parameters that they were made for."""

    kinds: list[torch.dtype | torch.layout | None]  # of the gradients
    params: list[torch.Tensor]
    batches: list[TensorBatch]


class Fused(torch.optim.Optimizer):
    """An optimiser whose step is one launch per group and combination of element types.

    On a GPU that is a Triton kernel over a table of addresses; on the CPU code generated through
    LLVM where llvmlite is installed; elsewhere torch's operators, tensor by tensor.
    """

    _step_supports_amp_scaling = True
    _row_major = False  # whether it updates row-major copies of tensors in other memory orders
    _has_not: tuple[str, ...] = ()  # arguments in Ours that this optimiser does not take
    ours: Ours
    grad_norm: torch.Tensor | None = None
    _batches: list[Batches | None]  # one for each group
    _states: list[dict[str, Any]]  # each parameter's state, as it was when batches were made
    _captured: list[Any]

    # ---- what a subclass defines

    def _rule(self, group: Group, p: torch.Tensor, extras: Extras) -> Rule:
        raise NotImplementedError

    def _constants(self, group: Group, batch: TensorBatch) -> list[Any]:
        """The settings that the rule computes its numbers from, which follow the gradient's factor
        in its list of constants. These are Adam's."""
        return [*group["betas"], group["eps"], group["weight_decay"]]

    def _run(self, run: Runner, batch: TensorBatch, group: Group, control: Control | None) -> None:
        decay = self.ours.get("ema_decay")
        constants = [-1.0 if group.get("maximize") else 1.0]
        constants += map(float, self._constants(group, batch))
        constants += [] if decay is None else [1.0 - decay]
        run.step(batch, Given(constants, group["lr"], bool(group.get("capturable")), control))

    def _fresh(self, group: Group, state: dict[str, Any]) -> bool:
        """Whether a tensor is before its first step, and that step differs from the others."""
        return False

    # ---- arguments

    def _set(self, ours: Ours, differentiable: bool = False) -> None:
        """Check and keep our own arguments; called before torch's constructor."""
        unknown = set(ours) - set(Ours.__annotations__)
        if unknown:
            known = ", ".join(Ours.__annotations__)
            wrong = f"got an unexpected keyword argument {sorted(unknown)[0]!r}"
            besides = f"besides those of torch.optim there are {known}"
            raise TypeError(f"{type(self).__name__} {wrong}; {besides}")
        for name in self._has_not:
            if ours.get(name):
                raise ValueError(f"{type(self).__name__} has no {name}; use AdamW for it")
        if differentiable:
            raise self._not_differentiable(f"{type(self).__name__}(…, differentiable=True)")
        decay, norm, kind = (ours.get(k) for k in ("ema_decay", "max_norm", "state_dtype"))
        if decay is not None and not 0.0 <= decay <= 1.0:  # type: ignore[operator]
            raise ValueError(f"Invalid ema_decay: {decay}; it lies between 0 and 1")
        if norm is not None and not norm > 0.0:  # type: ignore[operator]
            raise ValueError(f"Invalid max_norm: {norm}; it is above 0, or None")
        if kind is not None and kind not in FLOATS:
            raise ValueError(f"Invalid state_dtype: {kind}; it is one of {FLOATS}, or None")
        self.ours = ours
        self._batches, self._states, self._captured = [], [], []

    def _not_differentiable(self, asked: str) -> GraphError:
        wrong = "a fused step writes parameters and state at once, which autograd does not see"
        torchs = f"torch.optim.{type(self).__name__}(…, differentiable=True)"
        out = "leave differentiable out, unless you differentiate through step()"
        remedy = f"{torchs}, whose state dict fits both ways; or {out}"
        return GraphError(wrong, asked=asked, remedy=remedy)

    def _extras(self, p: torch.Tensor) -> Extras:
        short = p.dtype in (torch.bfloat16, torch.float16)
        master = short and bool(self.ours.get("master_weights"))
        return Extras(master=master, ema=self.ours.get("ema_decay") is not None)

    # ---- state

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        """The element type in which a parameter's state is kept."""
        if key in ("master", "ema"):
            return torch.promote_types(p.dtype, torch.float32)
        wanted = self.ours.get("state_dtype")
        return p.dtype if wanted is None or p.is_complex() else wanted

    def _like(self, p: torch.Tensor, key: str) -> torch.Tensor:
        """A tensor of the shape and memory order that the state under ``key`` has."""
        return p.detach() if is_dense(p) else torch.empty_like(p)

    def _state_of(self, p: torch.Tensor, rule: Rule) -> dict[str, Any]:
        """Return a parameter's state, after adding what is missing and converting what has another
        memory order or element type than it should."""
        state: dict[str, Any] = self.state[p]
        if rule.counts and "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for key in rule.keys:
            kind, like, found = self._stored_as(p, key), self._like(p, key), state.get(key)
            if found is None:
                state[key] = torch.zeros_like(like, dtype=kind)
                if key in ("master", "ema"):
                    state[key].copy_(p.detach())
            elif not same_memory_order(found, like) or found.dtype != kind:
                state[key] = torch.empty_like(like, dtype=kind).copy_(found)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, but keep the element types that state has here.

        torch rounds all state to the parameter's type. What ``state_dtype``, ``master_weights`` and
        ``ema_decay`` keep in another type is therefore taken from ``state_dict`` itself.
        """
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    kind = self._stored_as(p, key) if value.is_floating_point() else value.dtype
                    if not value.is_complex() and self.state[p][key].dtype != kind:
                        self.state[p][key] = value.to(p.device, kind)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"ours": self.ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches, self._states = [], []
        self.__dict__.setdefault("_captured", [])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the parameters have the values of their moving averages; at its end they
        get their own values back."""
        if self.ours.get("ema_decay") is None:
            wrong = "no averages are kept"
            raise GraphError(wrong, asked="averaged()", remedy="pass ema_decay=0.999")
        with torch.no_grad():
            saved = [(p, p.detach().clone()) for p in self.state if "ema" in self.state[p]]
            for p, _ in saved:
                p.copy_(self.state[p]["ema"])
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in saved:
                    p.copy_(before)

    def explain(self) -> str:
        """Say what the last step ran: kernels, launches, bytes, and the least time that these bytes
        take at the machine's bandwidth.

        >>> print(optimizer.explain())
        """
        made = [batch for group in self._batches if group is not None for batch in group.batches]
        return explained(type(self).__name__, made)

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what ``closure`` returns."""
        if is_dynamo_compiling() or compiling_frames() is not None:
            return _step_as_it_is(self, closure)
        return _watched_step(self, closure) if self._is_watched() else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: we call the hooks

    def _is_watched(self) -> bool:
        """Whether there are hooks to call, or a profiler is on. This check takes 1 µs. torch's own
        wrapper of step() opens a range for the profiler every time, which takes as long as all the
        rest of a step."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
        )

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self._update()
        finally:
            torch._C._set_grad_enabled(before)
        return loss

    def _update(self) -> None:
        work = self._collect()
        if not work:
            return
        control = self._control([batch for batch, _ in work])
        for batch, group in work:
            held = None if control is None else control[batch.device]
            self._run(runner(batch.device.type), batch, group, held)
            batch.let_go()
            if capturing(batch.device):
                self._captured.append(batch.in_use())

    def _collect(self) -> list[tuple[TensorBatch, Group]]:
        """Return the batches of all groups with the present gradients, and with the group of each.
        Batches are kept from step to step and made anew where they no longer fit."""
        work: list[tuple[TensorBatch, Group]] = []
        same = len(self._states) == len(self.state)
        same = same and all(map(is_, self._states, self.state.values()))
        if not same or len(self._batches) != len(self.param_groups):
            self._batches = [None] * len(self.param_groups)
        for index, group in enumerate(self.param_groups):
            grads = list(map(GRADIENT, group["params"]))
            kinds = [None if g is None else g.layout if g.is_sparse else g.dtype for g in grads]
            made = self._batches[index]
            if made is None or made.kinds != kinds or not self._hold(made, group):
                params, batches = list(group["params"]), self._batch(group)
                made = self._batches[index] = Batches(kinds, params, batches)
                self._states = list(self.state.values())
            for batch in made.batches:
                all_ = len(batch.index) == len(grads)
                batch.take(grads if all_ else [grads[i] for i in batch.index])
                work.append((batch, group))
        return work

    def _hold(self, made: Batches, group: Group) -> bool:
        """Whether batches that were made before still fit the group."""
        return all(map(is_, made.params, group["params"])) and all(
            batch.rule is self._rule(group, p := batch.params[0], self._extras(p))
            and batch.still_holds()
            for batch in made.batches
        )

    def _batch(self, group: Group) -> list[TensorBatch]:
        """The group's parameters, sorted into batches."""
        if group.get("differentiable"):  # set in a group, or by a loaded state dict
            raise self._not_differentiable('a step of a group with "differentiable": True')
        sorted_: dict[Any, tuple[list[int], list[dict[str, Any]]]] = {}
        for i, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            self._check(p, p.grad)
            rule = self._rule(group, p, self._extras(p))
            self._check_spread(p, rule)
            fresh = self._fresh(group, self.state[p])
            state = self._state_of(p, rule)
            kinds = tuple(state[key].dtype for key in rule.keys)
            on_host = rule.counts and (state["step"].is_cpu or not p.is_cuda)
            step = float(state["step"]) if on_host else None
            tile = runner(p.device.type).tile(p) if rule.walk == MATRICES else None
            place = (rule, fresh, p.device, spread_of(p), p.dtype, p.grad.dtype, kinds, step, tile)
            index, states = sorted_.setdefault(place, ([], []))
            index.append(i)
            states.append(state)
        made = []
        for (rule, fresh, device, spread, *_), (index, states) in sorted_.items():
            params = [group["params"][i] for i in index]
            block, rows = runner(device.type).block, self._row_major
            made.append(TensorBatch(rule, params, states, index, block, fresh, rows, spread))
        return made

    def _asked(self, p: torch.Tensor) -> str:
        return f"a step of {type(self).__name__} for a parameter of shape {tuple(p.shape)}"

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        asked = self._asked(p)
        if grad.is_sparse:
            remedy = "make the layer with sparse=False, or use torch.optim.SparseAdam or SGD"
            raise BindError("its gradient is sparse", asked=asked, remedy=remedy)
        if p.dtype.to_real() not in FLOATS:
            wrong = f"{p.dtype} is not a type to optimise in"
            raise BindError(wrong, asked=asked, remedy="use float32, bfloat16, float16 or float64")
        if grad.device != p.device:
            wrong = f"its gradient is on {grad.device}, the parameter on {p.device}"
            raise BindError(wrong, asked=asked, remedy=f"p.grad = p.grad.to({str(p.device)!r})")
        if capturing(p.device):
            wrong = "there are no state and tables yet; a CUDA Graph would make them in each replay"
            asked = "the first step() with these gradients while a CUDA Graph is captured"
            remedy = "call step() once on another stream before the capture"
            raise EngineError(wrong, asked=asked, remedy=remedy)

    def _check_spread(self, p: torch.Tensor, rule: Rule) -> None:
        """Raise an error if the rule needs the whole tensor and this rank has only a part, or if
        only the gradient is a DTensor."""
        if is_spread(p.grad) and not is_spread(p):
            wrong = "its gradient is a DTensor, and the parameter is a plain tensor"
            raise BindError(wrong, asked=self._asked(p), remedy="p.grad = p.grad.full_tensor()")
        if spread_of(p) is not None and (rule.sums or rule.walk == MATRICES):
            wrong = "it is spread over ranks, and the update needs sums over the whole tensor"
            remedy = "use AdamW, Adam, Lion or SGD, whose updates need none"
            raise EngineError(wrong, asked=self._asked(p), remedy=remedy)

    def _control(self, batches: list[TensorBatch]) -> dict[torch.device, Control] | None:
        """Decide over all batches on all devices how to scale gradients (to unscale and clip) and
        whether to skip the step; return that by device, or None if nothing of it is asked for."""
        norm, skip = self.ours.get("max_norm"), bool(self.ours.get("skip_nonfinite"))
        devices = list(dict.fromkeys(batch.device for batch in batches))
        first = devices[0]
        given = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        scale, found = (moved(x, first) if isinstance(x, torch.Tensor) else x for x in given)
        if scale is None and found is None and norm is None and not skip:
            return None
        squares = None
        if norm is not None or skip:
            kinds = dict.fromkeys((batch.device, batch.spread) for batch in batches)
            parts = []
            for kind in kinds:
                some = [b for b in batches if (b.device, b.spread) == kind]
                part, spread = runner(kind[0].type).squares(some), kind[1]
                parts.append(part if spread is None else spread.sum_(part.sum().reshape(1)))
            squares = torch.cat([x.to(first) for x in parts]) if len(parts) > 1 else parts[0]
        made = runner(first.type).control(Limits(squares, scale, found, norm, skip))
        batches[0].ran.append(("control", None, 1))
        self.grad_norm = made.norm
        return {d: made if d == first else made.on(d) for d in devices}


_watched_step = torch.optim.Optimizer.profile_hook_step(Fused._step)
# Inside torch.compile a step runs uncompiled: it is one launch already, of code that cannot be
# traced. Dynamo is disabled for it explicitly, because when the compiler gives up a frame it runs
# that frame as it is, but tries to compile the frames that it calls.
_step_as_it_is = _disable_dynamo(Fused.step)
