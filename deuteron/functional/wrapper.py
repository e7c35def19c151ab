"""The function that stands before a delegated one, written for its signature.

All of a small call is 8 µs, and after torch has launched a kernel the processor finds little of
Python where it left it: a step of a wrapper takes some 10 ns there, several times as long as in a
loop of its own. A wrapper for every signature, with ``*args`` and ``**kwargs``, takes a hundred
steps. So each function gets one of its own, as text that is compiled when it is decorated, with no
step that it could do without. What it names are globals of its own: a closure's cells would be
fetched at every call, those that are not needed, too.

All arguments of a wrapper have a place and a default, which Python binds soonest. Those that may be
given by name only come after ``input``, torch's name for the first one. Nobody gives that one by
its place: what stands there, a None too, is one argument too many. Its default is ``...``, which
nobody gives and which takes the fewest steps to compare with.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from traceback import walk_tb
from types import FunctionType
from typing import Any

from torch.fx import Node, Proxy

SOURCE = """\
def direct({parameters}):
    return {call}
def {name}({parameters}):
    # compiler.is_compiling() in half of the time; Dynamo reads the first as a constant
    if not is_dynamo_compiling() and not compiler._is_compiling_flag:
        try:
{body}
        except REFUSALS as wrong:
            if any_symbol(locals()):
                return recorded(again, {names}, locals(), wrong)
        if {complete}:
            try:
                return function({arguments})
            except DeuteronError as refusal:
                if not ({otherwise}):
                    raise
                return instead(direct, dict({every}), refusal, {name!r}, {x})
            except AttributeError:
                a_tensor({name!r}, {x})
                raise
            except TraceError as wrong:
                return recorded(again, {names}, locals(), wrong)
    elif {complete}:
        return function({arguments})
    return sorted_out(function, again, dict({every}))
again = {name}
"""
QUICK = """\
if nbytes <= LEAST and input is ...:
"""
WAY = """\
    if {tests}:
        return {call}
"""
HANDED = """\
if (nbytes <= LEAST or {larger}) and {tests}:
    found = {call}
    if found is not NotImplemented:
        return found if not Heard.listeners else heard(found, {name!r}, {x})
"""
# The stream in which all is done unless another is chosen, 0, cannot be captured by a CUDA Graph,
# and to ask CUDA about one takes a microsecond.
CAPTURED = "{x}.is_cuda and raw_stream({x}.get_device()) and is_current_stream_capturing()"


SCOPES: list[dict[str, Any]] = []  # the globals of every wrapper


class Missing:
    """Stands for an argument that was not given."""


MISSING = Missing()


@dataclass(frozen=True)
class Plain:
    """A call in C++, or two or three of them, that answer at once where ``where`` holds and
    arguments that ``text`` does not name have their defaults. ``text``: the call, as an expression
    of the arguments, of ``plain`` and of names that are ``given``. Both may name ``nbytes``, those
    of the first argument. ``learns``: arguments of which
    one has to need a gradient, as for ``several_calls_win``."""

    call: Any  # or a table of calls
    text: str
    where: str = "True"
    given: Mapping[str, Any] = field(default_factory=dict)
    learns: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {node.id for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Name)}

    def called(self, name: str) -> Plain:
        """The same with another name for ``plain``, beside those of other ways."""
        text, where = (re.sub(r"\bplain\b", name, t) for t in (self.text, self.where))
        return Plain(self.call, text, where, {name: self.call, **self.given}, self.learns)

    @property
    def tests(self) -> list[str]:
        if not self.learns:
            return [self.where]
        needed = " or ".join(f"{argument}.requires_grad" for argument in self.learns)
        return [self.where, f"({needed})", f"not ({CAPTURED.format(x=self.learns[0])})"]


class Signature:
    """The arguments of a function, as text."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self.placed = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @property
    def names(self) -> list[str]:
        return [*self.placed, *self.named]

    @property
    def parameters(self) -> str:
        return ", ".join(
            [
                *(f"{p}=usual_{p}" for p in self.placed),
                "input=...",
                *(f"{p}=usual_{p}" for p in self.named),
            ]
        )

    @property
    def arguments(self) -> str:
        return ", ".join([*self.placed, *(f"{p}={p}" for p in self.named)])

    @property
    def every(self) -> str:
        return ", ".join(f"{p}={p}" for p in (*self.placed, "input", *self.named))

    @property
    def complete(self) -> str:
        needed = (p for p in self.names if p not in self.defaults)
        return _all(["input is ...", *(f"{p} is not MISSING" for p in needed)])

    def usual(self, names: Iterable[str]) -> list[str]:
        """That these have their defaults, each in the fewest steps."""
        return [self._is_usual(p) for p in names]

    def _is_usual(self, p: str) -> str:
        default = self.defaults[p]
        if isinstance(default, bool):
            return p if default else f"not {p}"
        if default is None:
            return f"{p} is None"
        # of a small whole number there is one object, and 1.0, which is no axis, is another
        one = isinstance(default, int) and -5 <= default <= 256
        return f"{p} is usual_{p}" if one else f"{p} == usual_{p}"

    def calls(self, taken: list[str], by_name: Collection[str], in_cpp: bool) -> str:
        """The call; one in C++, which takes 0.3 µs to read a number, without the last arguments
        where they have their defaults."""
        also = [f"{p}={p}" for p in by_name]
        found = f"call({', '.join([*taken, *also])})"
        spare = [p for p in taken if p in self.defaults] if in_cpp else []
        for n in range(1, len(spare) + 1):
            short = f"call({', '.join([*taken[:-n], *also])})"
            found = f"{short} if {_all(self.usual(spare[-n:]))} else {found}"
        if not by_name:
            return found
        return f"({self.calls(taken, (), in_cpp)}) if {_all(self.usual(by_name))} else {found}"


def wrapper(
    function: Callable[..., Any],
    call: Callable[..., Any],
    plain: Sequence[Plain],
    larger: str,
    asked: Sequence[str],
    single: str,
    by_name: Collection[str],
    without: Collection[str],
    given: Mapping[str, Any],
    scope: dict[str, Any],
) -> Callable[..., Any]:
    """``function``, and before it the first of ``plain`` that answers, or ``call``, where all that
    is ``asked`` holds.
    ``larger``: whether it may have calls that are not of the smallest; in it ``{x}`` is the first
    argument and ``{second}`` the next. ``single``: whether a gradient need not follow.
    ``by_name``: arguments that ``call`` takes by name; ``without``: those that it does not have,
    and is not called where they are given. ``given``: further names in the text. ``scope``: what
    all wrappers name, with LEAST, the bytes up to which any tensor is small, and fewer than none
    where that is not all there is to know; who changes it does so in ``SCOPES``.

    Where ``function`` refuses, ``call`` is asked too if nothing but the size was against it: what
    is accepted must not depend on that."""
    own, name = Signature(function), function.__name__
    in_cpp = not isinstance(call, FunctionType)  # others may decline
    text = own.calls([p for p in own.names if p not in (*by_name, *without)], by_name, in_cpp)
    tests = ["input is ...", *own.usual(without), *asked]
    x, second = (*own.placed, "None")[:2]
    ways = [each.called(f"plain_{i}") for i, each in enumerate(plain)]
    if in_cpp and not plain:
        ways = [Plain(call, text)]
    larger = larger.format(x=x, second=second)
    handed = HANDED.format(x=x, larger=larger, tests=_all(tests), call=text, name=name)
    at_once = _at_once(own, [way for way in ways if not way.learns], asked)
    later = _at_once(own, [way for way in ways if way.learns], asked) + handed
    size = f"nbytes = {x}.nbytes\n"
    body = size + at_once + _where(single, later) if at_once else _where(single, size + later)
    for way in ways:
        given = {**way.given, **given}
    scope = scope | {f"usual_{p}": own.defaults.get(p, MISSING) for p in own.names}
    scope |= {"function": function, "call": call, **given}
    source = SOURCE.format(
        name=name,
        x=x,
        parameters=own.parameters,
        call=text,
        body=indent(body, " " * 12).rstrip(),
        complete=own.complete,
        otherwise=_all(["delegation.allowed", *tests]),
        arguments=own.arguments,
        every=own.every,
        names=(*own.placed, "input", *own.named),
    )
    exec(compile(source, _kept(name, source), "exec"), scope)
    SCOPES.append(scope)
    return functools.wraps(function)(scope[name])


def _at_once(own: Signature, ways: Iterable[Plain], asked: Sequence[str]) -> str:
    """The ways to answer the smallest calls, in order."""
    found = ""
    for way in ways:
        rest = own.usual(p for p in own.defaults if p not in way.names)
        found += WAY.format(tests=_all([*rest, *way.tests, *asked]), call=way.text)
    return found and QUICK + found


def _where(single: str, text: str) -> str:
    """The text, for more than a single call only where gradients are recorded."""
    if single == "True":
        return text
    may = "is_grad_enabled()" if single == "False" else f"{single} or is_grad_enabled()"
    return f"if {may}:\n{indent(text, '    ')}"


def _all(tests: Iterable[str]) -> str:
    return " and ".join(tests)


def _kept(name: str, text: str) -> str:
    """The name of a file under which a traceback finds the text."""
    place = f"<deuteron.functional.{name}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    return place


# ---- under torch.fx
#
# Whoever asks a symbol a question gets an error: that is how a symbol is known, at no cost to
# others.


def any_symbol(given: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Proxy) for value in given.values())


def recorded(
    function: Callable[..., Any], names: Sequence[str], here: dict[str, Any], wrong: Exception
) -> Any:
    """The call as one node of the graph that ``torch.fx`` traces. ``here``: what the wrapper knows
    by name. Where it is all that is traced, fx calls a copy of it, all arguments by place, and
    takes it to have as many as ``function``: ``input`` is not one of them, and the last is none.
    """
    given = {name: here[name] for name in names if name in here}
    if len(given) < len(names):
        given = dict(zip((n for n in names if n != "input"), given.values(), strict=True))
    elif given.pop("input") is not ...:
        raise _too_many(function)
    first, *rest = (name for name, value in given.items() if value is not MISSING)
    symbols = [value for value in given.values() if isinstance(value, Proxy)]
    take_back(wrong, {symbol.node for symbol in symbols})
    keywords = {name: given[name] for name in rest}
    return symbols[0].__torch_function__(function, (Proxy,), (given[first],), keywords)


def take_back(wrong: Exception, kept: Collection[Node]) -> None:
    """Take the question that ended in an error out of the graph again: the symbol that was asked,
    and what was made for it alone, but not the arguments themselves."""
    frames = (frame for frame, _ in walk_tb(wrong.__traceback__))
    asked = next((s for f in frames if isinstance(s := f.f_locals.get("self"), Proxy)), None)
    spare = [] if asked is None else [asked.node]
    while spare:
        node = spare.pop()
        if node not in kept and not node.users:
            about = node.all_input_nodes
            node.graph.erase_node(node)
            spare += about


# ---- unusual arguments


def sorted_out(
    function: Callable[..., Any], again: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """A call with its first argument by torch's name, or without all that it needs."""
    first, same = next(iter(given)), given.pop("input")
    given = {name: value for name, value in given.items() if value is not MISSING}
    if same is ...:
        return function(**given)
    if first in given:
        raise _too_many(function)
    return again(**{first: same}, **given)


def _too_many(function: Callable[..., Any]) -> TypeError:
    """Of more arguments than there are places for, or of the first one under both its names."""
    placed, name = Signature(function).placed, function.__name__
    return TypeError(
        f"{name}() takes {len(placed)} positional argument{'s' * (len(placed) > 1)}, and more "
        f"were given, or both '{placed[0]}' and 'input'"
    )
