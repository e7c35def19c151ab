"""Why a module cannot be a graph. Each way to fail has its own reason, remedy and line.

What can be seen in the module or in the call is refused by :func:`check_module` and
:func:`check_call` before anything is traced. Where the quick trace gives up, :func:`tried` runs the
module as it is: an example that the module itself refuses is refused in the module's own words.
What torch.export then cannot do, :func:`untraceable` says.
"""

from __future__ import annotations

import dis
import inspect
import random
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends.sparse import is_sparse
from deuteron.frontends.state import HoldsState, is_state

# Packages whose code is no user's model; "" because torch.fx writes modules without a name.
NOT_THE_USERS = {"torch", "deuteron", "sympy", "numpy", "", *sys.stdlib_module_names}
# Hooks of these packages compute, or record what then becomes a result.
COMPUTING_HOOKS = ("torch", "transformers")
_FOLDERS = ("<", f"{torch.__path__[0]}/", f"{sysconfig.get_path('stdlib')}/")
# Instructions of Python that keep a number, or decide by it what comes next.
_DECIDES = ("POP_JUMP", "JUMP_IF", "STORE", "RETURN", "YIELD", "POP_TOP")
_DISTRIBUTION = torch.distributions.Distribution
_VALIDATES = (_DISTRIBUTION.__init__.__code__, _DISTRIBUTION._validate_sample.__code__)
# torch.export cannot follow what a distribution asserts, and torch.compile leaves it out as well
unchecked = patch.object(_DISTRIBUTION, "_validate_args", False)
SETS_DATA = torch.ops.aten._has_compatible_shallow_copy_type.default  # asked before x.data = y
_SEED = 0x5EED  # an odd one, so that another is noticed
_OUTSIDE = "keep it outside of what is optimised, and optimise the parts before and after it"


def user_frame(error: BaseException | None = None) -> str:
    """The innermost line of the user's code: of what runs now, or of a traceback."""
    for frame, line in users_frames(error):
        return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return ""


def users_frames(error: BaseException | None = None) -> Iterator[tuple[FrameType, int]]:
    """Frames of the user's code with their lines, from inside out."""
    back = walk_stack(sys._getframe()) if error is None else [*walk_tb(error.__traceback__)][::-1]
    for frame, line in back:
        code, home = frame.f_code, frame.f_globals.get("__name__", "")
        if home.startswith("deuteron") and code.co_name == "import_module":
            break  # what lies further out called us
        if home.split(".")[0] not in NOT_THE_USERS:
            yield frame, line


def is_asserted() -> bool:
    """Whether the user's code only asserts something about the number that it asks for now:
    ``assert lengths.max().item() <= size``, or ``torch._check(…)``. A distribution of torch
    asserts that its arguments lie where they may. An ``if`` that raises an error is no assertion:
    who wrote it wants that error in every call."""
    for user, _ in users_frames():
        for frame, _ in walk_stack(sys._getframe()):
            if frame is user:
                break
            if frame.f_code in _VALIDATES:
                return True
            if frame.f_globals is vars(torch) and frame.f_code.co_name.startswith("_check"):
                return True
        ahead = [i.opname for i in dis.get_instructions(user.f_code) if i.offset >= user.f_lasti]
        ends = (i for i, name in enumerate(ahead) if name.startswith(_DECIDES))
        return ahead[next(ends, -1) + 1 :][:1] == ["LOAD_ASSERTION_ERROR"]
    return False


def _place(module: nn.Module, error: BaseException, known: str = "") -> str:
    """The user's line, and the innermost part of the model that was running."""
    paths = {id(part): path for path, part in module.named_modules()}
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
    running = (frame.f_locals.get("self") for frame in frames)
    part = next((p for p in running if isinstance(p, nn.Module) and id(p) in paths), module)
    path = paths.get(id(part), "")
    inside = f"in {path!r}, a {type(part).__name__}" if path else ""
    line = user_frame(error) or written_line(str(error)) or known
    return ", ".join(filter(None, (line, inside))) or type(module).__name__


def written_line(text: str) -> str:
    """The innermost line of the user's code in a traceback that torch wrote down as text."""
    for file, line, name in re.findall(r'File "(.+)", line (\d+), in (.+)', text)[::-1]:
        if not file.startswith(_FOLDERS):
            return f"{file}:{line} in {name}"
    return ""


# ---- what can be seen beforehand -----------------------------------------------------------------


def check_module(module: nn.Module) -> None:
    """Refuse modules that have no forward in Python to look into, or weights of a special kind."""
    for path, part in module.named_modules():
        name, where = repr(path) if path else "the model", path or type(module).__name__
        if isinstance(part, torch.jit.ScriptModule):
            wrong = f"{name} is a ScriptModule, whose calls torch has compiled already"
            raise GraphError(wrong, where=where, remedy="pass the nn.Module it was made from")
        if type(part).__name__ == "OptimizedModule" and hasattr(part, "_orig_mod"):
            wrong = f"{name} is what torch.compile made of a module"
            remedy = "pass the module itself: model._orig_mod"
            raise GraphError(wrong, where=where, remedy=remedy)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            wrong = f"{name!r} belongs to a lazy module, and has no shape yet"
            remedy = "call the model on the example once: model(*example)"
            raise GraphError(wrong, where=name, remedy=remedy)
        if not is_sparse(tensor):
            refuse_special(tensor, f"{name!r} of the model", name)


def refuse_special(tensor: torch.Tensor, what: str, where: str = "") -> None:
    """Refuse tensors whose numbers do not lie in memory one by one."""
    kind = ""
    if tensor.is_nested:
        kind, remedy = "a nested tensor", "use a padded tensor and a mask"
    elif tensor.layout is not torch.strided:
        kind, remedy = f"a sparse tensor ({tensor.layout})", "use to_dense()"
    elif tensor.is_quantized:
        kind, remedy = f"a quantised tensor ({tensor.dtype})", "use dequantize()"
    if kind:
        where = where or user_frame()
        raise GraphError(f"{what} is {kind}", where=where, remedy=f"{remedy}, or {_OUTSIDE}")


def refuse_export(module: nn.Module, why: Exception, line: str) -> None:
    """Refuse a module with sparse tensors that only torch.export could trace, because torch.export
    does not take these."""
    named = (*module.named_parameters(), *module.named_buffers())
    held = [name for name, tensor in named if is_sparse(tensor)]
    if held:
        wrong = f"the model holds the sparse tensor {held[0]!r}, and cannot be followed: {why}"
        remedy = f"call model.eval() first; or use to_dense(), or {_OUTSIDE}"
        raise GraphError(wrong, where=line or held[0], remedy=remedy)


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of forward; none where Python cannot say."""
    try:
        return inspect.signature(module.forward).parameters
    except ValueError:  # a builtin, or decorated as if it were one
        return {}


def check_call(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], paths: Sequence[str]
) -> None:
    """Refuse an example that does not fit forward's parameters, or holds what cannot be an input.

    ``paths`` says how the caller writes each leaf of the call.
    """
    parameters = forward_parameters(module)
    rewritten = module._forward_pre_hooks or type(module).__call__ is not nn.Module.__call__
    if parameters and not rewritten:
        try:
            inspect.Signature(list(parameters.values())).bind(*call[0], **call[1])
        except TypeError as error:
            names = ", ".join(parameters)
            wrong = f"the example does not fit forward({names}): {error}"
            asked = f"a call with {', '.join(paths) or 'no arguments'}"
            remedy = "give (x, y) for two arguments, and those by keyword as the dict kwargs"
            raise BindError(wrong, asked=asked, where="example", remedy=remedy) from None
    for path, leaf in zip(paths, pytree.tree_leaves(call), strict=True):
        if isinstance(leaf, torch.Tensor):
            refuse_special(leaf, path, path)
        elif not is_fixed(leaf):
            raise _unknown_class(f"{path} is", leaf, "hand over its tensors")


_NUMBERS = (bool, int, float, complex, str, bytes, type(None), Enum, slice, range, torch.Size)
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def is_fixed(value: Any) -> bool:
    """Whether something that is no tensor keeps its meaning, whatever is done to it meanwhile."""
    if isinstance(value, _PLAIN) or callable(value):
        return True
    how: Any = type(value).__hash__
    compared = how is not None and how is not object.__hash__  # by content, not by identity
    held = pytree.tree_leaves(getattr(value, "__dict__", {}))
    return compared and not any(isinstance(v, torch.Tensor) for v in held)


def _unknown_class(what: str, value: Any, otherwise: str) -> GraphError:
    kind = type(value)
    wrong = f"{what} an object of class {kind.__name__}, which torch cannot take apart"
    remedy = f"{otherwise} in a tuple, list or dict"
    if hasattr(kind, "__dataclass_fields__"):
        remedy += f", or register the class: torch.export.register_dataclass({kind.__name__})"
    elif kind.__module__.split(".")[0] not in NOT_THE_USERS:
        remedy += f", or register it: torch.utils._pytree.register_pytree_node({kind.__name__}, …)"
    return GraphError(wrong, where=f"{kind.__module__}.{kind.__qualname__}", remedy=remedy)


def check_results(results: Any) -> None:
    """Refuse results that are neither tensors nor plain values, in containers torch knows."""
    for leaf in pytree.tree_leaves(results):
        if not isinstance(leaf, torch.Tensor) and not is_fixed(leaf):
            if is_state(leaf):
                raise HoldsState
            raise _unknown_class("forward returns", leaf, "return its tensors")


# ---- running the module as it is -----------------------------------------------------------------


def tried(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The module's answer to a copy of the example. Its buffers are left as they were."""
    kept = {buffer: buffer.clone() for buffer in module.buffers()}
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call)
    failed: Exception | None = None
    for grad in (False, True):  # forward may take a gradient
        with chance_apart(module), torch.set_grad_enabled(grad):
            try:
                return module(*args, **kwargs)
            except Exception as error:
                failed = failed or error
            finally:
                for buffer, was in kept.items():
                    buffer.data.copy_(was)
    assert failed is not None
    words = str(failed).strip().splitlines() or [""]
    raise DeuteronError(
        f"{type(module).__name__} itself refuses this example: {type(failed).__name__}: {words[0]}",
        asked="a call of the module as it is, without Deuteron",
        where=_place(module, failed),
        remedy="give an example on which model(*example) runs",
    ) from failed


@contextmanager
def chance_apart(module: nn.Module) -> Iterator[None]:
    """Random numbers drawn inside leave no trace outside. Setting the seed is refused."""
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
        torch.default_generator.manual_seed(_SEED)
        yield
        if torch.initial_seed() != _SEED:
            wrong = "forward sets the seed of torch's random numbers"
            raise GraphError(wrong, remedy="set the seed outside of the module")


@contextmanager
def no_chance_of_python() -> Iterator[None]:
    """Refuse code that draws numbers that torch does not know of: a graph would repeat the first
    ones."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    yield
    after = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    drawn = "random" if before[0] != after[0] else ""
    drawn = drawn or ("numpy.random" if repr(before[1]) != repr(after[1]) else "")
    if drawn:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
        raise GraphError(_DRAWS.format(drawn), remedy=_HAND_IN)


_DRAWS = "forward draws from Python's {}, and a graph would repeat the numbers"
_HAND_IN = "draw with torch.rand, or outside and hand the numbers in"
_NUMBERS_OF_CHANCE = ("random", "uniform", "randint", "randrange", "gauss", "normalvariate")


class _Drawn:
    """A number of Python's random that nobody may look at."""

    def _refuse(self, *others: Any) -> Any:
        raise GraphError(_DRAWS.format("random"), where=user_frame(), remedy=_HAND_IN)

    __hash__ = None  # type: ignore[assignment]
    __bool__ = __float__ = __int__ = __index__ = __neg__ = __abs__ = __round__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = _refuse


@contextmanager
def chance_unread() -> Iterator[None]:
    """Let forward draw numbers from Python's random and NumPy's, as long as nothing looks at them:
    many models draw to decide whether to leave out a layer, but ask first whether they are in
    training. No numbers are used up."""
    thread, drawn = threading.get_ident(), _Drawn()

    def instead(draw: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: drawn if threading.get_ident() == thread else draw(*a, **k)

    numpy = sys.modules.get("numpy")
    with ExitStack() as stack:
        for place in (random, *([numpy.random] if numpy else [])):
            draws = {name for name in _NUMBERS_OF_CHANCE if hasattr(place, name)}
            unread: Any = {name: instead(getattr(place, name)) for name in draws}
            stack.enter_context(patch.multiple(place, **unread))
        yield


# ---- hooks ---------------------------------------------------------------------------------------


def check_hooks(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Refuse hooks that return nothing: they only watch, and a plan has nothing to show them.

    What a hook returns takes the place of a result, and is part of the graph."""
    found: list[tuple[str, dict[int, Any], int, Callable[..., Any]]] = []
    everywhere = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
    several = [("every module", table) for table in everywhere]
    for path, part in module.named_modules():
        tables = (part._forward_hooks, part._forward_pre_hooks)
        several += [(repr(path or type(module).__name__), table) for table in tables]
    for path, table in several:
        for key, hook in table.items():
            if not _comes_from(hook, COMPUTING_HOOKS):
                found.append((path, table, key, hook))
    if not found:
        return
    answered: dict[int, bool] = {}

    def watched(key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call_of(*args: Any, **kwargs: Any) -> Any:
            answer = hook(*args, **kwargs)
            answered[key] = answered.get(key, False) or answer is not None
            return answer

        return call_of

    try:
        for _, table, key, hook in found:
            table[key] = watched(key, hook)
        tried(module, call)
    finally:
        for _, table, key, hook in found:
            table[key] = hook
    for path, _, key, hook in found:
        if not answered.get(key, True):
            name = getattr(hook, "__qualname__", repr(hook))
            wrong = f"the forward hook {name} of {path} returns nothing: a plan never calls it"
            remedy = "remove() the hook; what it records can be returned by forward"
            raise GraphError(wrong, where=_line(hook), remedy=remedy)


def _comes_from(thing: Any, packages: Sequence[str]) -> bool:
    home = getattr(thing, "__module__", None) or type(thing).__module__
    return str(home).split(".")[0] in packages


def is_of_torch(thing: Any) -> bool:
    """Whether a function, or the class of an object, is torch's own."""
    return _comes_from(thing, ("torch",))


def _line(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


# ---- what torch.export says ----------------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_STATE = "return what is new, or hand it in; a graph keeps nothing between calls"
_VALUES = (
    "choose element by element with torch.where, or write an 'if' that does nothing but give "
    "tensors of the same shape to names; or use torch.compile(model, backend='deuteron'), which "
    "plans the parts before and after this line"
)
# Kinds of errors of torch's, by words in them: what is wrong, and the remedy.
_KNOWN = (
    (
        "GuardOnDataDependentSymNode|DataDependentOutputException",
        "forward branches on the values of a tensor, which a graph cannot",
        _VALUES,
    ),
    ("numpy", "forward hands a tensor to numpy, where torch does not see what becomes of it",
     f"compute with torch, or {_OUTSIDE}"),
)  # fmt: skip


def untraceable(module: nn.Module, error: Exception, line: str) -> DeuteronError:
    """The refusal for a module that runs, but that torch.export cannot trace. ``line`` is where
    forward is known to do something unusual."""
    name = type(module).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__} {' '.join(lines)}"
    said = " ".join(lines[:3]).partition("While executing")[0] or type(error).__name__
    wrong = f"torch.export cannot trace {name}: {said}"
    remedy = f"leave this line out of forward: {_OUTSIDE}"
    for words, known, way in _KNOWN:
        if any(word in text for word in words.split("|")):
            wrong, remedy = known, way
            break
    if module.training:  # in eval mode more can be traced
        remedy = f"call model.eval() first; if that does not help, {remedy}"
    where = _place(module, error, line)
    return GraphError(wrong, asked=f"{name} as a graph", where=where, remedy=remedy)


def refuse_changes(changed: Mapping[str, bool]) -> None:
    """Refuse a module that is changed in each call by the user's code."""
    names = [name for name, users in changed.items() if users]
    if names:
        wrong = f"forward changes {', '.join(map(repr, names))} of the module whenever it runs"
        raise GraphError(wrong, where=names[0], remedy=_STATE)


def writes_to(weight: str | None, where: str, what: str = "parameter or buffer") -> GraphError:
    """The refusal for a module that writes to a weight, or, where there is none, to its input."""
    name = f"its {what} {weight!r}" if weight else "its input"
    wrong, asked = f"the module writes to {name}", "a graph, in which nothing is written to"
    remedy = "return the new value instead of writing it in place, or write to a clone()"
    if (weight or "").rpartition(".")[2] in _STATISTICS:
        remedy = "call model.eval() first, or use dt.Graph.grad for training graphs"
    return GraphError(wrong, asked=asked, where=where, remedy=remedy)


def refuse_data(where: str) -> NoReturn:
    """Refuse ``x.data = y``. torch gives x other memory without a call that could be recorded."""
    wrong, asked = "forward sets the data of a tensor", "a graph, in which nothing is written to"
    raise GraphError(wrong, asked=asked, where=where, remedy="write x = y, or return what is new")


def refuse_shared(written: torch.Tensor, func: object, where: str) -> None:
    """Refuse writing to a tensor some of whose elements share memory: exporters put back what was
    written as if each element had memory of its own."""
    sizes = zip(written.shape, written.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in sizes):
        wrong = f"{func} writes to an expanded tensor, some of whose elements share their memory"
        remedy = "write to the tensor before expand(), or to a clone() of what it gives"
        raise GraphError(wrong, where=where or "forward", remedy=remedy)
