"""``if`` on numbers of a tensor, while a module is recorded: both branches become one.

    if not torch.isfinite(x).all():
        x = torch.clamp(x, -limit, limit)

gives one tensor or the other; in a graph it is ``x = torch.where(condition, clamped, x)``. That
works for every ``if`` without ``else`` whose lines give new values to names and do nothing else.
Such lines are found in the source of the function that asks, and are run here, beside the function,
on what its names stand for. The results are put into the names that the function goes on with, and
the function itself is told not to take the branch. Everything else is left for the caller to
refuse: an ``else``, a ``return``, attributes and elements that are set, calls of anything but
torch's functions, results of another shape, random numbers, and writing in place, also later to
what may now be one tensor or two.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import dis
import functools
import linecache
import math
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch

from deuteron.frontends.proxies import Proxy
from deuteron.frontends.refusals import is_fixed, is_of_torch

_ASKS = ("POP_JUMP", "TO_BOOL")  # instructions that ask for the truth of a value
_HARMLESS = (min, max, abs, float, int, bool, len, math.sqrt, torch.finfo, torch.iinfo)
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Pass)
_CALLED = "__deuteron_called__"


class CannotJoin(Exception):
    """An ``if`` whose branches cannot become a ``where``, or whose source cannot be read here."""


def answered(
    frame: FrameType, as_recorded: Callable[[], Any]
) -> tuple[bool, Sequence[tuple[torch.Tensor, ...]]]:
    """Answer a frame that asks for the truth of a stand-in. Where this was its last question, also
    return the tensors that were joined: as the condition holds, as it does not, and both. The
    frame's names stand for the joined ones from now on. ``as_recorded``: the context in which calls
    are recorded."""
    asked, test, body = _found(frame)
    names = _assigned(body)
    if not names <= {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}:
        raise CannotJoin("sets names outside of its function")
    with as_recorded():
        questions: list[tuple[ast.expr, bool]] = []
        outcome = _Test(frame, questions).told(test, False)
        told = [want for leaf, want in questions if leaf is asked]
        if not told:
            raise CannotJoin("asks for what it did not ask for when it was run again")
        if outcome or questions[-1][0] is not asked:  # the test holds anyway, or asks for more
            return told[0], ()
        condition = _Test(frame, []).value(test)
        if isinstance(condition, bool):  # whatever the tensors are, it does not hold
            return told[0], ()
        now = dict(frame.f_locals)
        _run(ast.Module(_checked(body), []), "exec", frame, now)
        before, joined = frame.f_locals, {}
        for name in names & before.keys():
            if _differ(name, before[name], now[name]):
                new, old = now[name], before[name]
                joined[name] = new, old, torch.where(condition, new, old)
    _put(frame, {name: both for name, (_, _, both) in joined.items()})
    return told[0], list(joined.values())


# ---- the source


def _found(frame: FrameType) -> tuple[ast.expr, ast.expr, list[ast.stmt]]:
    """The expression whose truth is asked for, the test it is part of, and the lines that it
    decides about."""
    code = frame.f_code
    before, asks = None, None
    for instruction in dis.get_instructions(code):
        if instruction.offset == frame.f_lasti:
            asks = instruction
            break
        before = instruction
    if asks is None or before is None or not asks.opname.startswith(_ASKS):
        raise CannotJoin("is no 'if' of its own")
    at = before.positions
    if at is None or at.lineno is None or at.col_offset is None:
        raise CannotJoin("has no line in the source")
    place = at.lineno, at.col_offset
    for node in _ifs(code):
        for leaf in _leaves(node.test):
            if _starts(leaf) <= place < _ends(leaf):
                if node.orelse or not all(isinstance(line, _STATEMENTS) for line in node.body):
                    raise CannotJoin("does more than give new values to names")
                return leaf, node.test, node.body
    raise CannotJoin("is no 'if' of its own")


@functools.lru_cache(8)
def _ifs(code: CodeType) -> list[ast.If]:
    """Every ``if`` in the file of a function, if the file is still what the function was compiled
    from."""
    file = code.co_filename
    linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
        inside = [compile(tree, file, "exec", dont_inherit=True)]
    except SyntaxError:
        return []
    for outer in inside:
        inside += [const for const in outer.co_consts if isinstance(const, CodeType)]
    if code not in inside:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.If)]


def _leaves(test: ast.expr) -> list[ast.expr]:
    """The expressions whose truth a test asks for, one after the other."""
    if isinstance(test, ast.BoolOp):
        return [leaf for value in test.values for leaf in _leaves(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _leaves(test.operand)
    return [test]


def _starts(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _ends(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """The names that these lines give new values to; raises CannotJoin if they set anything
    else."""
    names = set()
    for node in (node for line in body for node in ast.walk(line)):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            if not isinstance(node, ast.Name | ast.Tuple):
                raise CannotJoin("sets an attribute or an element")
            names |= {node.id} if isinstance(node, ast.Name) else set()
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda):
            raise CannotJoin("does more than give new values to names")
    return names


# ---- running it


class _Test:
    """A test, run beside the frame that asks for it."""

    def __init__(self, frame: FrameType, questions: list[tuple[ast.expr, bool]]) -> None:
        self._frame, self._questions = frame, questions

    def told(self, node: ast.expr, want: bool) -> bool:
        """The outcome of the test if the frame is answered, at each question, what leads to
        ``want``."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.told(node.operand, not want)
        if isinstance(node, ast.BoolOp):
            every = isinstance(node.op, ast.And)
            outcomes = (self.told(value, want) for value in node.values)
            return all(outcomes) if every else any(outcomes)
        value = self._leaf(node)
        if isinstance(value, bool):
            return value
        self._questions.append((node, want))
        return want

    def value(self, node: ast.expr) -> Any:
        """The condition as one tensor, or a bool where no tensor matters."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(inner, bool) else torch.logical_not(inner)
        if not isinstance(node, ast.BoolOp):
            return self._leaf(node)
        every = isinstance(node.op, ast.And)
        join = torch.logical_and if every else torch.logical_or
        found: Any = every
        for each in node.values:
            value = self.value(each)
            if isinstance(value, bool):
                if value is not every:
                    return value
            else:
                found = value if isinstance(found, bool) else join(found, value)
        return found

    def _leaf(self, node: ast.expr) -> Any:
        expression = ast.Expression(_checked(node))
        value = _run(expression, "eval", self._frame, dict(self._frame.f_locals))
        if isinstance(value, Proxy) and not value.known:
            return value.reshape(()).bool()
        return bool(value)


def _run(tree: Any, kind: str, frame: FrameType, names: dict[str, Any]) -> Any:
    code = compile(ast.fix_missing_locations(tree), frame.f_code.co_filename, kind)
    run = eval if kind == "eval" else exec
    return run(code, {**frame.f_globals, _CALLED: _harmless}, names)


class _Calls(ast.NodeTransformer):
    """Sends every call through a check of the function that is called."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        look = ast.Call(ast.Name(_CALLED, ast.Load()), [node.func], [])
        return ast.copy_location(ast.Call(look, node.args, node.keywords), node)


def _checked(part: Any) -> Any:
    parts = part if isinstance(part, list) else [part]
    made = [_Calls().visit(copy.deepcopy(each)) for each in parts]
    return made if isinstance(part, list) else made[0]


def _harmless(function: Any) -> Any:
    """A function that does nothing but compute; any other is refused."""
    of_tensor = isinstance(getattr(function, "__self__", None), torch.Tensor)
    of_torch = isinstance(function, BuiltinFunctionType) and is_of_torch(function)
    of_torch = of_torch or getattr(function, "__module__", "") == "torch.nn.functional"
    if not (of_tensor or of_torch or any(function is known for known in _HARMLESS)):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise CannotJoin(f"calls {name}, which may do more than compute")
    return function


# ---- joining


def _differ(name: str, old: Any, new: Any) -> bool:
    """Whether two values of a name have to be joined; refuses those that cannot be."""
    if old is new or (is_fixed(old) and type(old) is type(new) and old == new):
        return False
    alike = isinstance(old, Proxy) and isinstance(new, Proxy)
    if not alike or _type_of(old) != _type_of(new):
        raise CannotJoin(f"gives {name!r} a value of another kind, shape or order in memory")
    return True


def _type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _put(frame: FrameType, values: dict[str, Any]) -> None:
    """Give local names of a running function new values, as debuggers do."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # where f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
