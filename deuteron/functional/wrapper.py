"""The function that stands before a delegated one, written for its signature.

A wrapper for every signature would take ``*args`` and ``**kwargs``: a tuple and a dictionary for
each call, taken apart again for the next one. Where all of a call is 8 µs that shows. So each
function gets a wrapper of its own, as text that is compiled when it is decorated.

All arguments of a wrapper have a place and a default, which Python binds soonest. Those that may be
given by name only come after ``input``, torch's name for the first one. Nobody gives that one by
its place: what stands there is one argument too many.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

from deuteron.errors import DeuteronError

SOURCE = """\
def {name}({parameters}):
    # compiler.is_compiling() in half of the time; Dynamo reads the first as a constant
    if not is_dynamo_compiling() and not compiler._is_compiling_flag:
        try:
            if {tests}:
                found = {call}
                if found is not NotImplemented:
                    return found if not Heard.listeners else heard(found, {name!r}, {first})
        except REFUSALS:
            pass
        if {complete}:
            try:
                return function({arguments})
            except DeuteronError as refusal:
                if not ({otherwise}):
                    raise
                return instead(lambda: {call}, refusal, {name!r}, {first})
    elif {complete}:
        return function({arguments})
    return sorted_out(function, again, dict({every}))
"""


class Missing:
    """Stands for an argument that was not given."""


MISSING = Missing()


def wrapper(
    function: Callable[..., Any],
    call: Callable[..., Any],
    tests: Sequence[str],
    by_name: Collection[str],
    without: Collection[str],
    names: Mapping[str, Any],
) -> Callable[..., Any]:
    """``function``, and before it ``call`` where the ``tests`` hold; ``{x}`` in them is the first
    argument, ``{second}`` the next. ``by_name``: arguments that ``call`` takes by name;
    ``without``: those that it does not have, and is not asked where they are given. ``names``: what
    the text refers to.

    Where ``function`` refuses, ``call`` is asked too if all tests hold but the first, which is
    about the size: what is accepted must not depend on that."""
    parameters = list(inspect.signature(function).parameters.values())
    placed = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    usual = {p.name: p.default for p in parameters if p.default is not p.empty}
    needed = [p.name for p in parameters if p.name not in usual]
    taken = [p.name for p in parameters if p.name not in (*by_name, *without)]
    # a function in Python has the same arguments; one in C++ reads the fewer the sooner
    spare = [] if isinstance(call, FunctionType) else [name for name in taken if name in usual]
    second = placed[1] if len(placed) > 1 else "None"
    text = SOURCE.format(
        name=function.__name__,
        first=placed[0],
        parameters=", ".join(_with_default(name) for name in (*placed, "input", *named)),
        tests=" and ".join(
            [
                *(test.format(x=placed[0], second=second) for test in tests),
                *map(_is_usual, (*without, "input")),
            ]
        ),
        call=_calls(taken, spare, by_name),
        otherwise=" and ".join(
            ["delegation.allowed", *tests[1:], *map(_is_usual, (*without, "input"))]
        ),
        complete=" and ".join(["input is None", *(f"{name} is not MISSING" for name in needed)]),
        arguments=", ".join([*placed, *(f"{name}={name}" for name in named)]),
        every=", ".join(f"{name}={name}" for name in (*placed, "input", *named)),
    )
    scope: dict[str, Any] = {
        f"usual_{name}": usual.get(name, MISSING) for name in (*placed, *named)
    }
    scope |= {"usual_input": None, "function": function, "call": call, "sorted_out": sorted_out}
    scope |= {"MISSING": MISSING, "DeuteronError": DeuteronError, **names}
    place = f"<deuteron.functional.{function.__name__}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    made: dict[str, Any] = {}
    exec(compile(text, place, "exec"), scope, made)
    scope["again"] = made[function.__name__]
    return functools.wraps(function)(scope["again"])


def _with_default(name: str) -> str:
    return f"{name}=usual_{name}"


def _is_usual(name: str) -> str:
    return f"{name} is usual_{name}"


def _calls(taken: list[str], spare: list[str], by_name: Collection[str]) -> str:
    """The call with as few arguments as say the same: without the last of those that may be
    ``spare`` where these have their defaults."""
    given = [f"{name}={name}" for name in by_name]
    found = f"call({', '.join([*taken, *given])})"
    for n in range(1, len(spare) + 1):
        usual = " and ".join(map(_is_usual, spare[-n:]))
        found = f"call({', '.join([*taken[:-n], *given])}) if {usual} else {found}"
    if not by_name:
        return found
    usual = " and ".join(map(_is_usual, by_name))
    return f"({_calls(taken, spare, ())}) if {usual} else {found}"


def sorted_out(
    function: Callable[..., Any], again: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """A call with its first argument by torch's name, or without all that it needs."""
    first, same = next(iter(given)), given.pop("input")
    given = {name: value for name, value in given.items() if value is not MISSING}
    if same is None:
        return function(**given)
    if first in given:
        raise TypeError(
            f"{function.__name__}() got more arguments than it has places for, "
            f"or both '{first}' and 'input'"
        )
    return again(**{first: same}, **given)
