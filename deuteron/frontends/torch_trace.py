"""A module's ATen calls, recorded while it runs once on the example, without torch.export.

Loading torch.export's tracer takes longer than planning a network, because it imports all of
torch.compile. A module in eval mode that only computes needs none of it: every call that torch is
about to dispatch is recorded before it is decomposed, ``conv2d`` as ``conv2d``. The calls that take
longest are answered with zeros, because nobody looks at the numbers. A call that writes over a
tensor of forward's own, as ``ReLU(inplace=True)`` does, is recorded as the call that does not
write; the tensor, and every view of its memory, then stands for that result (``proxies.py``).

:func:`trace` raises NeedsExport, and leaves to torch.export, what takes more care: training, values
of inputs that steer Python, autocast, and models that run for longer than torch.export loads. What
no graph can do is refused with the line: writing over arguments, attributes, sizes by values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, getitem
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deuteron.errors import DeuteronError
from deuteron.frontends.aten import FILLS, TABLE, Entry, schema_order
from deuteron.frontends.attributes import Attributes, check_containers, swapped
from deuteron.frontends.branches import CannotJoin, answered
from deuteron.frontends.calls import (
    DROPOUTS,
    LEARNS,
    SEQUENCES,
    draws,
    elements_on_cpu,
    size_by_values,
    sized_by,
    writing_nothing,
    written_over,
)
from deuteron.frontends.proxies import (
    HELD,
    AsksValues,
    NeedsExport,
    Proxy,
    TooSlow,
    among,
    check_places,
    gradients_told,
    lists_stacked,
    mapped,
    memory_of,
    noted_as_view,
    stands_now,
)
from deuteron.frontends.refusals import (
    chance_apart,
    is_asserted,
    is_fixed,
    refuse_changes,
    refuse_special,
    tried,
    user_frame,
    users_frames,
    writes_to,
)
from deuteron.frontends.sparse import is_sparse
from deuteron.frontends.state import HoldsState, Stateless, given_back, holds_state
from deuteron.frontends.torch_fx import is_plain
from deuteron.frontends.torch_fx_facts import without_dead_code
from deuteron.frontends.value_arguments import DecidingArguments, deciding
from deuteron.frontends.zeros import zeros_like_result

# elements that a CPU computes while torch.export is loaded (LIMIT), and while it records one call
# (EACH); where there are more, torch.export is quicker
LIMIT, EACH = 10**9, 3 * 10**6


@dataclass(frozen=True)
class Trace:
    """The calls as an fx graph, and its placeholders: for each flattened argument, None where it is
    no tensor, for each weight, and for tensors that the module holds without a name."""

    graph: fx.Graph
    inputs: Sequence[fx.Node | None]
    weights: Mapping[str, tuple[fx.Node, torch.Tensor]]
    results: Sequence[Any]  # nodes, and plain values
    out_spec: pytree.TreeSpec
    constants: Mapping[str, tuple[fx.Node, torch.Tensor]] = field(default_factory=dict)
    stateful: bool = False  # whether the results hold objects of the module's that are taken apart


class Recorder(ProxyTorchDispatchMode):
    """Records each call on its way into torch's dispatcher.

    Where composite calls are still whole, torch accepts only its own tracing mode, hence the parent
    class; nothing of it is used but its place."""

    def __init__(self, module: nn.Module, entries: Mapping[str, Entry]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack = []
        self.graph, self.entries = fx.Graph(), entries
        self.refused: Exception | None = None
        self.asked: Sequence[Proxy] = ()  # whose values forward asked for when it was refused
        self.constants: dict[Any, tuple[Proxy, torch.Tensor]] = {}
        # memory → a tensor that has it, so that no other tensor gets that memory
        self.given, self.written = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self.joined = dict[int, torch.Tensor]()  # one tensor or another, by an 'if': branches.py
        self.kept: list[torch.Tensor] = []
        self.names: Mapping[int, str] = {}  # of weights, by memory
        self._computed, self._beside = 0, 0  # elements so far; branches run beside forward
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._inside = [""]
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what would skip it imports it first

    def placeholder(self, tensor: torch.Tensor, known: bool = True) -> Proxy:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NeedsExport("torch.func is at work", user_frame())
        whole = tensor.layout is torch.strided or (known and is_sparse(tensor))
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not whole:
            raise NeedsExport(f"{type(tensor).__name__} is a tensor of a special kind")
        self.given[memory_of(tensor)] = tensor
        return Proxy.of(tensor.detach(), self.graph.placeholder("value"), known)

    def standing(self, tensor: torch.Tensor) -> Proxy:
        """What stands for a tensor. A tensor that forward has from elsewhere becomes a constant,
        and so does one of known numbers that was written over, or that comes from another
        recording."""
        if isinstance(tensor, Proxy):
            self.renew(tensor)
        real = tensor.held if isinstance(tensor, Proxy) else tensor
        if isinstance(tensor, Proxy):
            kept = memory_of(real) in self.written or tensor.node.graph is not self.graph
            if not (kept and tensor.known):
                return tensor
        key = id(tensor), real._version
        if key not in self.constants:
            now = real.clone() if real is not tensor else tensor
            self.constants[key] = self.placeholder(now), now
            self.kept.append(tensor)  # or another may get its id
        return self.constants[key][0]

    def renew(self, stand: Proxy) -> None:
        """Take a view once more if its whole was written to since."""
        writes = stand.whole().writes
        if stand.part_of is not None and stand.writes != writes:
            with self:
                again = stand.part_of.again()
            stand.node, stand.known, stand.writes = again.node, again.known, writes

    def _writes_part(self, func: Any, args: Any) -> bool:
        """Whether a call writes to a tensor of forward's own that has views, or some of whose known
        numbers were written over."""
        if not isinstance(func, OpOverload) or not func._schema.is_mutable:
            return False
        if not args or not isinstance(args[0], Proxy) or not func._schema.name.endswith("_"):
            return False
        memory = memory_of(args[0].whole().held)
        return memory not in self.given and (not args[0].own or memory in self.written)

    def _write_part(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Proxy:
        """Record what a part is after a call that writes to it, and the whole with that part in
        it."""
        part: Any = args[0]
        whole = part.whole()
        if self.written.pop(memory_of(whole.held), None) is not None:  # its numbers were known
            now = whole.held.clone()
            constant = self.placeholder(now)
            self.constants[id(constant), 0] = constant, now
            whole.node, whole.writes = constant.node, whole.writes + 1
        with self:
            made: Any = writing_nothing(func)(*args, **kwargs)
            made = made if made.dtype == part.dtype else made.to(part.dtype)
            result, seen = made, part  # from the part outwards
            while seen.part_of is not None:
                result = seen.part_of.put_back(result)
                if result is None:
                    raise NeedsExport(f"{func} writes to what {seen.part_of.func} gives")
                seen = seen.part_of.whole
        with no_python_dispatcher():
            part.held.copy_(made.held)
        whole.node, whole.known, whole.writes = result.node, result.known, whole.writes + 1
        found: Proxy = part
        return found

    def _known(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call on known numbers that writes over a tensor of forward's own, or
        reads one that was written over; NotImplemented for all other calls, which are recorded."""
        tensors = among(torch.Tensor, (args, kwargs))
        stands = [t for t in tensors if isinstance(t, Proxy)]
        if not isinstance(func, OpOverload) or not all(t.known for t in stands):
            return NotImplemented
        memory = [memory_of(t.held) for t in stands if t.held is not None]
        writes = func._schema.is_mutable
        if writes:  # to its first argument, which nobody outside of forward has
            own = args and isinstance(args[0], Proxy) and memory[0] not in self.given
            if not own or not func._schema.name.endswith("_"):
                return NotImplemented
        elif self.written.keys().isdisjoint(memory):
            return NotImplemented
        if draws(func, args, kwargs):
            return NotImplemented
        real_args, real_kwargs = mapped(Proxy, HELD, (args, kwargs))
        with no_python_dispatcher():
            answer = func(*real_args, **real_kwargs)
        for tensor in among(torch.Tensor, answer):
            self.written[memory_of(tensor)] = tensor
        if writes:
            return args[0]
        scrap = fx.Graph()  # for placeholder nodes alone: when read, they become constants

        def standing(made: Any, index: int | None) -> Any:
            if not isinstance(made, torch.Tensor):
                return made
            stand = Proxy.of(made, scrap.placeholder("known"), True)
            return noted_as_view(stand, stands, func, args, kwargs, index)

        if isinstance(answer, list | tuple):
            return type(answer)(standing(made, i) for i, made in enumerate(answer))
        return standing(answer, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._record(func, args, kwargs or {})
        except Exception as error:
            self.refused = self.refused or error  # even if forward catches it
            raise

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._computed > LIMIT + EACH * len(self.graph.nodes):
            raise TooSlow("takes too long to run")
        if torch._C._is_any_autocast_enabled():
            raise NeedsExport("autocast changes what the calls compute")
        for stand in among(Proxy, (args, kwargs)):
            self.renew(stand)
        self._refuse_writing_beside(func, args, kwargs)
        if func is torch.ops.aten.is_nonzero.default and self._asks(args[0]):
            return self._decided(args[0])
        answer = self._known(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if str(func) == "aten.detach_.default" or (str(func) in DROPOUTS and not args[2]):
            return args[0]
        if self._writes_part(func, args):
            return self._write_part(func, args, kwargs)
        args, kwargs = mapped(torch.Tensor, self.standing, (args, kwargs))
        tensors = among(Proxy, (args, kwargs))
        check_places(func, tensors)
        self._refuse_writing(func, args, kwargs)
        over = written_over(func, args)
        if over is not None:
            func = writing_nothing(func)
        if not isinstance(func, OpOverload):
            raise NeedsExport(f"{func} takes functions", user_frame())
        if func._schema.is_mutable:
            raise NeedsExport(str(func))
        sparse = any(is_sparse(t.held) for t in tensors)
        whole = sparse or is_plain(func, self.entries) or str(func) in SEQUENCES  # reads numbers
        if not whole and func._can_decompose():
            with self:  # what it is made of is recorded in its place
                return func.decompose(*args, **kwargs)
        self.asked = sized_by(func, args, tensors)
        if self.asked:
            raise size_by_values(func)
        given = mapped(Proxy, attrgetter("node"), (args, kwargs))
        node = self.graph.call_function(func, *given)
        path = self._inside[-1]
        node.meta["nn_module_stack"], node.meta["line"] = {path: (path, "")}, user_frame()
        real_args, real_kwargs = mapped(Proxy, HELD, (args, kwargs))
        with no_python_dispatcher():
            answer = zeros_like_result(func, real_args, real_kwargs)
            filled = str(func) in FILLS and "empty" not in str(func)  # reads a shape, no numbers
            known = answer is None and (filled or all(t.known for t in tensors))
            known = known and not draws(func, args, kwargs)
            if answer is None:
                answer = func(*real_args, **real_kwargs)
                self._computed += elements_on_cpu(answer)
        for made in among(torch.Tensor, answer):
            if not (known and is_sparse(made)):
                refuse_special(made, f"what {func} gives")
        if answer is None or (isinstance(answer, bool | int | float) and (known or is_asserted())):
            return answer  # it may steer Python, or not; None is of a call that checks something
        same = [t for t in tensors if t.held is answer and over is None]
        if same:  # as x.to(…) is x where nothing has to change
            return same[0]
        if isinstance(answer, torch.Tensor):
            stand = Proxy.of(answer, node, known)
            if over is not None:
                return stands_now(over, stand)
            return noted_as_view(stand, tensors, func, args, kwargs)
        if not isinstance(answer, list | tuple):
            self.asked = tensors
            raise AsksValues(f"{func} gives no tensor", user_frame())
        parts = [self.graph.call_function(getitem, (node, i)) for i in range(len(answer))]
        each = [known] * len(parts)
        if str(func) in SEQUENCES:
            each[1] = tensors[1].known
        several = type(answer)(
            noted_as_view(Proxy.of(*made), tensors, func, args, kwargs, i)
            for i, made in enumerate(zip(answer, parts, each, strict=True))
        )
        node.meta["val"] = [part.meta["val"] for part in parts]
        return several

    def _asks(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Proxy) and not tensor.known and not is_asserted()

    def _decided(self, tensor: Proxy) -> bool:
        """Answer forward's question whether something holds of a tensor, if forward can go on with
        tensors that stand for both branches of its 'if': the answer is not to take the branch."""
        for frame, _ in users_frames():
            self._beside += 1
            try:
                answer, joined = answered(frame, lambda: self)
            except Exception as error:
                self.asked = (tensor,)
                raise AsksValues(f"the 'if' {error}", user_frame()) from error
            finally:
                self._beside -= 1
            several = [t for tensors in joined for t in tensors if isinstance(t, Proxy)]
            self.joined.update((memory_of(t.held), t.held) for t in several)
            return answer
        raise AsksValues("nobody asks")

    def _refuse_writing_beside(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse writes and random draws in a branch that is run beside forward, and later writes
        to what may be the same memory in one of the branches."""
        writes = isinstance(func, OpOverload) and func._schema.is_mutable
        if self._beside and (writes or draws(func, args, kwargs)):
            raise CannotJoin(f"calls {func}")
        if writes and self.joined:
            to = args[:1] if func._schema.name.endswith("_") else (args, kwargs)
            if any(memory_of(t.held) in self.joined for t in among(Proxy, to)):
                raise AsksValues(f"{func} writes to what an 'if' decides about", user_frame())

    def _refuse_writing(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a call that writes to an argument or weight of the module, or to a part of it."""
        learns = str(func) in LEARNS and schema_order(func, args, kwargs)[5]
        if not isinstance(func, OpOverload) or not (func._schema.is_mutable or learns):
            return
        given = schema_order(func, args, kwargs)
        for argument, value in zip(func._schema.arguments, given, strict=True):
            written = argument.is_write or (learns and argument.name == "running_mean")
            if written and isinstance(value, Proxy) and value.held is not None:
                memory = memory_of(value.held)
                if memory in self.given:
                    where = user_frame() or self._inside[-1]
                    raise writes_to(self.names.get(memory), where)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep track of the path of the module that is running."""

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == self._thread:
                self._inside.append(self._paths.get(id(module), self._inside[-1]))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == self._thread:
                self._inside.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    entries: Mapping[str, Entry] = TABLE,
    fixed: Set[int] = frozenset(),
) -> Trace:
    """Record the calls of ``module`` on an example. Raises NeedsExport where torch.export is to be
    tried, which traces the module again and says what is wrong. The numbers of arguments at the
    places ``fixed`` are the example's in every call; so are others that decide what is computed."""
    if any(m.training for m in module.modules()):
        raise NeedsExport("the module is in training mode")
    while True:
        try:
            return _followed(module, args, kwargs, entries, fixed)
        except DecidingArguments as more:
            fixed = fixed | more.places


def _followed(
    module: nn.Module, args: Any, kwargs: Any, entries: Mapping[str, Entry], fixed: Set[int]
) -> Trace:
    before = Attributes(module)
    try:
        found = _trace_either(module, args, kwargs, entries, fixed, before)
        if changed := before.changed(Proxy):
            before.restore()
        if any(changed.values()):  # some modules set themselves up in their first call
            tried(module, (args, kwargs))
            now = Attributes(module)
            found = _trace_either(module, args, kwargs, entries, fixed, now)
            refuse_changes(now.changed(Proxy))
            now.restore()
        return found
    except (DeuteronError, HoldsState, NeedsExport):
        before.restore()
        raise
    except Exception as error:
        before.restore()
        raise NeedsExport(str(error), user_frame(error)) from error


def _trace_either(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    entries: Mapping[str, Entry],
    fixed: Set[int],
    before: Attributes,
) -> Trace:
    """Trace as it is, or else while torch says that it compiles, or exports: many models that look
    at their inputs, to warn of padding for example, leave that out then."""
    asked: AsksValues | None = None
    for flags in ((), ("compiling",), ("compiling", "exporting")):
        try:
            with patch.dict(vars(torch.compiler), {f"_is_{flag}_flag": True for flag in flags}):
                return _trace(module, args, kwargs, entries, fixed)
        except AsksValues as error:
            asked = error  # forward asks for this even so; what it asked before is left out
        except Exception:
            if asked is None:
                raise
        before.restore()
    assert asked is not None
    raise asked


def _trace(
    module: nn.Module, args: Any, kwargs: Any, entries: Mapping[str, Entry], fixed: Set[int]
) -> Trace:
    recorder = Recorder(module, entries)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [a.clone() if i in fixed else a for i, a in enumerate(leaves)]
    given = list(leaves)
    for i, a in enumerate(leaves):
        given[i] = recorder.placeholder(a, i in fixed) if isinstance(a, torch.Tensor) else a
    named = dict((*module.named_parameters(), *module.named_buffers()))
    stands = {name: recorder.placeholder(tensor) for name, tensor in named.items()}
    recorder.names = {memory_of(tensor): name for name, tensor in named.items()}
    call_args, call_kwargs = pytree.tree_unflatten(given, spec)
    replaced = swapped(module, {id(tensor): stands[name] for name, tensor in named.items()})
    around = torch.no_grad(), chance_apart(module), enable_python_dispatcher(), gradients_told()
    with ExitStack() as stack:
        for each in (*around, lists_stacked(), recorder.following(), replaced, recorder):
            stack.enter_context(each)
        try:
            answer = module(*call_args, **call_kwargs)
        except Exception as error:
            if places := deciding(recorder.asked, given):
                raise DecidingArguments(places) from error
            raise
        # e.g. a cache that the module makes; what Stateless returns is taken apart already
        stateful = isinstance(module, Stateless) or holds_state(answer)
        if stateful and not isinstance(module, Stateless):
            answer = given_back(answer)
        for result in among(Proxy, pytree.tree_leaves(answer)):
            recorder.renew(result)
    if recorder.refused:  # and forward went on
        raise recorder.refused
    check_containers((call_args, call_kwargs), given)
    results, out_spec = pytree.tree_flatten(answer, lambda part: isinstance(part, torch.Size))
    others = [r for r in results if not isinstance(r, Proxy) and not is_fixed(r)]
    if others:
        raise NeedsExport("a result is neither a tensor nor a plain value")
    for result in results:
        if isinstance(result, Proxy) and result.held is not None:
            refuse_special(result.held, "what forward returns", "forward")
    made = [recorder.standing(r).node if isinstance(r, Proxy) else r for r in results]
    recorder.graph.output(tuple(r for r in made if isinstance(r, fx.Node)))
    without_dead_code(recorder.graph)
    inputs = [a.node if isinstance(a, Proxy) and not a.known else None for a in given]
    weights = {name: (stands[name].node, tensor) for name, tensor in named.items()}
    constants = enumerate(recorder.constants.values())
    weights |= {f"constant.{i}": (stand.node, tensor) for i, (stand, tensor) in constants}
    weights |= {f"argument.{i}": (given[i].node, leaves[i]) for i in fixed}
    return Trace(recorder.graph, inputs, weights, made, out_spec, stateful=stateful)
