"""A whole training step: forward, loss, backward, unscaling, clipping and the optimiser.

The body of a step is that of an ordinary training loop, except that forward and backward run as
plans, made through ``torch_compile``. On a GPU later calls replay the whole body as one CUDA Graph
(``capture.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import is_not
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from deuteron.distributed import Layout, Prediction, Reduction, predict, ranked
from deuteron.errors import EngineError, FileError, GraphError
from deuteron.kinds import checked
from deuteron.optim.base import Fused
from deuteron.optim.batch import capturing
from deuteron.optim.sharded import clip_grad_norm
from deuteron.passes.collective import Means
from deuteron.plan import Plan
from deuteron.policy import Policy
from deuteron.target import Target
from deuteron.target import target as find_target
from deuteron.torch_compile import SecondGraph, Seed, backend
from deuteron.training.batch import Batches, Key, placed
from deuteron.training.capture import Captures
from deuteron.training.checks import (
    ASKED,
    check_arguments,
    check_mode,
    checked_loss,
    home,
    on_host,
    refused_by_model,
)
from deuteron.training.graph_breaks import uncut
from deuteron.training.host import ATTRIBUTES, HostSide, Settings, changes
from deuteron.training.ranks import (
    agreement,
    check_alike,
    gradients_agree,
    look_up_as_torch_does,
    lost_ranks_named,
    why_not_captured,
)
from deuteron.training.single_shard import is_undivided, unhooked, with_its_parts
from deuteron.training.step_parts import clipping, forget_failure, forget_with, loss_of

Gradients = list[torch.Tensor | None]
TOO_LITTLE = "what torch.compile cannot capture leaves too little to plan, and torch runs all of it"


class Outcome(NamedTuple):
    """What the body of a step returns: tensors that a CUDA Graph overwrites at every replay."""

    loss: torch.Tensor
    norm: torch.Tensor | None  # of the gradients; None if neither clipping nor skipping needs it


@checked("example")
def train_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer,
    example: Any,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    reduction: Reduction | None = None,
    policy: Policy | None = None,
    find: bool = False,
    budget_s: float | None = None,
) -> TrainStep:
    """Make one call of a whole training step: forward, loss, backward, clipping and optimiser.

    >>> step = dt.train_step(model, F.cross_entropy, optimizer, (x, y))
    >>> loss = step(x, y)                                      # and the parameters have moved

    >>> step = dt.train_step(model, None, optimizer, batch)    # transformers: the loss is inside
    >>> loss = step(**batch)

    ``model`` must be in training mode; ``optimizer`` is one of torch.optim, dt.optim or your own.
    ``example`` is a batch that looks like those you will pass to the step; the step only looks at
    it and does not run it. If it is a tuple, its last element is the target, and the loss is
    ``loss_fn(model(*inputs), target)``. If it is a dict, it holds keyword arguments of the model,
    and the loss is ``loss_fn(model(**batch), batch)``. With ``loss_fn=None`` the loss is what the
    model returns, or the ``loss`` in that result. Sizes may vary from call to call. Batches on the
    host are copied to the model's device; from pinned memory, while the last step still runs.

    * ``autocast``: torch.bfloat16 or torch.float16, to run forward and loss under torch.autocast.
    * ``scaler``: a torch.amp.GradScaler. If you give none, float16 gets one, ``step.scaler``.
    * ``max_norm``: clip the gradients of the optimiser's parameters, taken together, to this norm.
    * ``accumulate``: the optimiser steps once in this many calls, on the mean of their gradients.
    * ``reduction``: a ``dt.distributed.Reduction``: how ranks sum the gradients of a model in DDP.
    * ``policy``, ``find``, ``budget_s``: how to plan each graph, as for ``dt.optimize``.

    On a GPU the third call with batches of one size captures the step as one CUDA Graph, and later
    calls replay it. ``step.captured`` says whether the last call ran the graph; if it did not,
    ``step.note`` says why. The graph reads learning rates, loss scale and random numbers afresh at
    every replay; after any other change the step is captured again. docs/training.md has the rest.
    """
    search = {"policy": policy, "find": find, "budget_s": budget_s}
    given = {name: value for name, value in search.items() if value is not None}
    check_arguments(model, loss_fn, optimizer, autocast, max_norm, accumulate)
    batches = Batches(example, loss_fn is not None)
    if scaler is None and autocast is torch.float16:
        scaler = torch.amp.GradScaler(home([model]).type)
    how = autocast, scaler, max_norm, accumulate, reduction
    return TrainStep(model, loss_fn, optimizer, batches, *how, given)


class TrainStep:
    """What :func:`train_step` returns. Call it with a batch: it trains on it and returns the loss.

    ``captured``: whether the last call ran a CUDA Graph; ``note``: if it did not, why. ``skipped``:
    how many steps of the optimiser were left out because a gradient was inf or nan. ``grad_norm``:
    the norm of the gradients before the last clipping. ``plans``: those of forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        autocast: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
        max_norm: float | None,
        accumulate: int,
        reduction: Reduction | None,
        search: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.autocast, self.max_norm, self.accumulate = autocast, max_norm, accumulate
        self.plans: list[Plan] = []
        self._batches, self._loss_fn = batches, loss_fn
        parts = [each for each in (model, loss_fn) if isinstance(each, nn.Module)]
        self._device, tables = home(parts), on_host(parts)
        check_alike(model, self._device)
        taken = {p for group in optimizer.param_groups for p in group["params"]}
        self._left = tables - taken  # their gradients are left for another optimiser
        if self._left and scaler is not None:
            wrong = "a loss that is scaled, and a table on the host that another optimiser updates"
            raise GraphError(wrong, asked=ASKED, remedy="use bfloat16, which needs no scale")
        self._settings = Settings(optimizer, self._device, scaler is not None)
        self._host = HostSide(parts, self._settings, scaler)
        policy = search.get("policy", Policy())
        self._agreement = agreement(model, reduction, scaler, self._device, policy)
        refused = why_not_captured(policy, model, self._agreement)
        refused = refused or ("a table on the host is read by the host" if tables else "")
        self.captured, self.note = False, self._settings.note or refused
        self._captures = None if self.note else Captures[Outcome](self._device, self.plans)
        if self._captures is not None:  # its graphs hold the plans, which need none of their own
            search = search | {"policy": replace(policy, cuda_graph=False)}
            if self._agreement is not None:
                self._agreement.move_to(self._captures.side)
        inside = model if self._agreement is None else self._agreement.model.module
        self._undivided = is_undivided(model)
        self._loss = loss_of(with_its_parts(model) if self._undivided else inside, loss_fn)
        self._how: dict[str, Any] = {"backend": backend, "options": {**search, "plans": self.plans}}
        self._compiled: dict[Key, Callable[..., Any]] = {}  # the loss function, by batch size
        self._means: dict[Key, set[int]] = {}  # ids of parameters whose gradients plans average
        self._frozen: dict[str, Any] = {}  # host state that the captured graphs depend on
        self._added: Gradients | None = None  # tensors in which graphs accumulate gradients
        self._calls = 0  # calls since the last step of the optimiser
        self._alone = 0  # optimiser steps since the ranks last averaged their parameters
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self._norm: torch.Tensor | None = None

    # ---- a call

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        """Train on a batch and return its loss; each ``accumulate``-th call steps the optimiser."""
        check_mode(self.model)
        if self._host.is_another():
            self._host.look()
            self._compiled.clear()
        size, leaves = self._batches.taken(args, named)
        ends = self._calls + 1 == self.accumulate
        every = 1 if self._agreement is None else self._agreement.reduction.every
        means = ends and every > 1 and self._alone + 1 == every
        self._settings.upload()
        with lost_ranks_named():
            if self._captures is None:
                outcome = self._body(size, ends, means, placed(leaves, self._device))
            else:
                outcome = self._captured_or_not(self._captures, size, ends, means, leaves)
        self._calls = 0 if ends else self._calls + 1
        self._alone = 0 if means or every == 1 else self._alone + ends
        if ends:
            self._norm = outcome.norm
            self._show([p.grad if p in self._left else None for p in self._host.params])
        return outcome.loss.clone()

    def _captured_or_not(
        self, captures: Captures[Outcome], size: Key, ends: bool, means: bool, leaves: list[Any]
    ) -> Outcome:
        now = self._host.now()
        changed = changes(self._frozen, now)
        if changed:
            captures.begin_anew()
            self._added = None
        if self._added is not None and not self._calls:
            self._clear()
        ready = self.accumulate == 1 or self._added is not None
        key, body = (size, ends, means), partial(self._body, size, ends, means)
        new = not self.optimizer.state
        outcome = captures.run(key, leaves, body, ready)
        self.captured, self.note = captures.captured, captures.note
        if self.captured:
            return outcome
        if new:
            self._settings.settle()
        self._frozen = self._host.now()
        within = changes(now, self._frozen)  # such as optimiser state, which the first step makes
        if within:
            captures.drop()
        if ATTRIBUTES in within:
            captures.seen[key], changed = 0, [f"in this call, {ATTRIBUTES}"]
        if changed:
            self.note += f"; changed: {', '.join(changed)}"
        if ends and self.accumulate > 1 and self._added is None:
            # copies, because the gradients lie between blocks of memory that the step has freed
            grads = (p.grad for p in self._host.params)
            self._added = [None if grad is None else grad.clone() for grad in grads]
        return outcome

    def _body(self, size: Key, ends: bool, means: bool, leaves: list[Any]) -> Outcome:
        """The step itself, like the body of an ordinary training loop; it is run, or captured.
        ``ends``: the optimiser steps; ``means``: afterwards the ranks average their parameters."""
        from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

        args, named = self._batches.call(leaves)
        optimizer, scaler, calls = self.optimizer, self.scaler, self._calls
        forget_failure(optimizer, scaler)
        recorded, kind, cast = capturing(self._device), self._device.type, self.autocast
        undone = nullcontext() if recorded else self._undone()
        apart = unhooked(self.model) if self._undivided else nullcontext()
        with undone, apart, gradients_agree(self.model, ends):
            if not calls and self._added is None:
                self._clear()
            if not calls and self._agreement is not None:
                self._agreement.buffers()
            with torch.autocast(kind, cast) if cast else nullcontext():
                try:
                    loss = checked_loss(self._compiled_for(size)(args, named))
                except TorchRuntimeError as error:  # the model's own error, as the tracer words it
                    raise refused_by_model(error, leaves) from error
                except BackendCompilerFailed as error:  # our refusal, without torch's words
                    raise error.inner_exception from None
            if not recorded:
                self._calls = 0  # if backward fails, the sum of gradients so far is useless
            mean = loss / self.accumulate if self.accumulate > 1 else loss
            torch.autograd.backward(mean if scaler is None else scaler.scale(mean))
            self._calls = calls
        grads = (p.grad for p in self._host.params)
        if recorded and self._added and any(map(is_not, grads, self._added)):
            self._show(self._added)
            wrong = "a parameter that had no gradient so far has one"
            raise EngineError(wrong, remedy="use accumulate=1")
        if ends and self._agreement is not None and self._agreement.reduction.every == 1:
            self._agreement.gradients(self._means.get(size, set()))
        norm = self._update() if ends else None
        if means and self._agreement is not None:
            self._agreement.parameters()
        return Outcome(loss.detach().reshape(()), norm)

    def _update(self) -> torch.Tensor | None:
        """Unscale, clip and step the optimiser; return the gradients' norm if anything needs it."""
        optimizer, scaler, norm = self.optimizer, self.scaler, None
        if self.max_norm is not None and not isinstance(optimizer, Fused):
            if scaler is not None:
                scaler.unscale_(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            norm = clip_grad_norm(params, self.max_norm)
        with self._settings.on_device(), clipping(optimizer, self.max_norm):
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if isinstance(optimizer, Fused):
            norm = optimizer.grad_norm
            if scaler is None and optimizer.ours.get("skip_nonfinite") and norm is not None:
                self._skipped += ~norm.isfinite().to(self._device)
        if scaler is not None and scaler.is_enabled():
            found = scaler._found_inf_per_device(optimizer).values()
            self._skipped += sum(found).to(self._device, torch.bool)
            scaler.update()
        return norm

    def _compiled_for(self, size: Key) -> Callable[..., Any]:
        """Return the compiled loss for batches of one size. torch.compile counts how often it
        compiles a code object, for whatever model and size, and gives up when that is too often:
        so each size gets a copy of the code."""
        if size not in self._compiled:
            means = self._agreement.inside() if self._agreement and self.accumulate == 1 else None
            if means is not None:
                self._means[size] = means.done
            self._compiled[size] = self._whole(size, means)
            return partial(uncut, self._compiled[size])
        return self._compiled[size]

    def _compile(self, **more: Any) -> Callable[..., Any]:
        f: Any = self._loss
        copy = FunctionType(f.__code__.replace(), f.__globals__, closure=f.__closure__)
        how = {**self._how, "options": self._how["options"] | more}
        forget_with(copy, how["options"])
        return torch.compile(copy, dynamic=False, **how)

    def _whole(self, size: Key, means: Means | None) -> Callable[..., Any]:
        """Return the loss, compiled as one graph where that is possible, else as several.

        The gradient of a single graph's result is known, unless a scaler changes it, so forward can
        compute the gradient of the logits together with the loss (:class:`Seed`). The plan can also
        average gradients over ranks. With several graphs it cannot: where another one reads a
        parameter too, the average in the first would leave a part of its gradient out."""
        from torch._dynamo import error_on_graph_break
        from torch._dynamo.exc import BackendCompilerFailed, Unsupported

        known: dict[str, Any] = {} if means is None else {"means": means}
        if self.scaler is None or not self.scaler.is_enabled():
            known["seed"] = Seed(1.0 / self.accumulate)
        compiled = self._compile(**known)

        def whole(*args: Any) -> Any:
            try:
                with error_on_graph_break(True):
                    return compiled(*args)
            except (Unsupported, BackendCompilerFailed) as error:
                failed = getattr(error, "inner_exception", None)
                if failed is not None and not isinstance(failed, SecondGraph):
                    raise
                if means is not None:
                    means.done.clear()
                if dist.is_available():
                    look_up_as_torch_does(self.model)
                planned, self._compiled[size] = len(self.plans), self._compile(rest=True)
                result = self._compiled[size](*args)
                if len(self.plans) == planned:
                    self._compiled[size], self.note = self._loss, f"{self.note}; {TOO_LITTLE}"
                return result

        return whole

    def _clear(self) -> None:
        """Reset gradients before the first batch of an optimiser step: to None, or to zeros where
        captured graphs accumulate in them."""
        self._show(self._added or [None] * len(self._host.params))
        if held := [grad for grad in self._added or () if grad is not None]:
            torch._foreach_zero_(held)

    def _show(self, grads: Gradients) -> None:
        for p, grad in zip(self._host.params, grads, strict=True):
            p.grad = grad

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """While it is open, an exception restores buffers and random generators."""
        buffers = [b for m in self._host.modules for b in m._buffers.values() if b is not None]
        saved, random = [b.clone() for b in buffers], self._generators()
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for buffer, before in zip(buffers, saved, strict=True):
                    buffer.copy_(before)
            self._set_generators(random)
            raise

    # ---- what a user can ask

    @property
    def skipped(self) -> int:
        """How many steps of the optimiser were left out because a gradient was inf or nan."""
        return int(self._skipped)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before the last clipping; None where nothing is clipped."""
        return None if self._norm is None else self._norm.clone()

    def explain(
        self,
        full: bool = False,
        *,
        target: str | Target | None = None,
        ranks: int | None = None,
        layout: str | None = None,
    ) -> str:
        """Say what the plans run, what it costs and why; ``full`` lists every region.

        With a ``layout`` such as "dp4×tp2" (or ``ranks`` alone, for the best layout of that many
        ranks) estimate instead what a step would cost there, on machines like ``target``, which
        need not be present. Each rank is assumed to have a batch like the example. See
        :func:`deuteron.distributed.predict`.
        """
        if layout is not None or ranks is not None:
            return str(self._elsewhere(find_target(target), ranks, layout))
        if target is not None:
            wrong, remedy = "target without ranks or layout", 'add ranks=8, or layout="dp8"'
            raise GraphError(wrong, asked="explain of a training step", remedy=remedy)
        how = "one CUDA Graph" if self.captured else f"no CUDA Graph: {self.note}"
        parts = [f"a training step, {how}", *(str(p.explain(full=full)) for p in self.plans)]
        if isinstance(self.optimizer, Fused):
            parts.append(self.optimizer.explain())
        return "\n\n".join(parts)

    def _elsewhere(self, target: Target, ranks: int | None, layout: str | None) -> Prediction:
        """Estimate a step on other machines."""
        found = None if layout is None else Layout.of(layout)
        if found is not None and ranks not in (None, found.ranks):
            wrong = f"ranks={ranks}, and {layout!r} has {found.ranks}"
            raise GraphError(wrong, asked="explain of a training step", remedy="leave one out")
        args, named = self._batches.call(self._batches.shown)
        how: Any = {"accumulate": self.accumulate}
        given = self.model, self._loss_fn, named or args, target
        if found is not None:
            return predict(*given, found, **how)
        assert ranks is not None
        return predict(*given, ranked(*given, ranks)[0].layout, **how)

    # ---- saving and loading

    def __reduce__(self) -> Any:
        wrong = "it holds compiled code, and cannot be copied or written to a file"
        remedy = "copy model and optimiser and make a step of them; keep step.state_dict()"
        raise GraphError(wrong, asked="a copy of a training step", remedy=remedy)

    def state_dict(self) -> dict[str, Any]:
        """Return what the state dicts of model and optimiser lack: the loss scale, the count of
        skipped steps, and the states of the random generators."""
        if self._calls:
            wrong = f"{self._calls} of {self.accumulate} batches are added up, and would be lost"
            remedy = f"save after each {self.accumulate}th call"
            raise GraphError(wrong, asked="state_dict() of a training step", remedy=remedy)
        if self._alone:
            wrong = f"ranks have made {self._alone} steps alone, and their parameters differ"
            remedy = "save after a step in which they are averaged"
            raise GraphError(wrong, asked="state_dict() of a training step", remedy=remedy)
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"scaler": scaler, "skipped": self.skipped, "generators": self._generators()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if set(state) != {"scaler", "skipped", "generators"}:
            wrong, remedy = f"it holds {sorted(state)}", "give what step.state_dict() returned"
            raise FileError(wrong, asked="load_state_dict of a training step", remedy=remedy)
        if (state["scaler"] is None) != (self.scaler is None):
            wrong = "one of the two steps has a scaler, the other has none"
            remedy = "make the step as it was made"
            raise FileError(wrong, asked="load_state_dict of a training step", remedy=remedy)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._skipped.fill_(state["skipped"])
        self._set_generators(state["generators"])
        self._calls = self._alone = 0

    def _generators(self) -> dict[str, torch.Tensor]:
        found = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self._device)
        return found

    def _set_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"].cpu())
        if self._device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"].cpu(), self._device)
