"""``help()`` of every public name: a real signature, a first sentence, every argument explained or
said to be torch's, and an example of what torch does not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.augment.step import Step

HOMES = {"nn": torch.nn, "functional": F, "optim": torch.optim, "augment": None}
# calls whatever it is given; and arguments of all optimisers, which the type of ``ours`` names
ANY_ARGUMENTS = {("functional", "explain"), *(("optim", name) for name in dt.optim.__all__)}


def names() -> Iterator[tuple[str, str]]:
    for home in HOMES:
        yield from ((home, name) for name in getattr(dt, home).__all__)


EVERY = pytest.mark.parametrize(("home", "name"), list(names()))


def thing(home: str, name: str) -> Any:
    return getattr(getattr(dt, home), name)


def torchs(home: str, name: str) -> Any:
    """What stands under the same name in torch, or None."""
    found = getattr(HOMES[home], name, None) if HOMES[home] else None
    return found if found or home != "functional" else getattr(torch, name, None)


def own_doc(found: Any) -> str:
    """Its own text, not one that it has from torch's class."""
    return inspect.cleandoc(
        (
            vars(found) if isinstance(found, type) else found.__dict__ | {"__doc__": found.__doc__}
        ).get("__doc__")
        or ""
    )


def calls(found: Any) -> Iterator[Callable[..., Any]]:
    """What a user calls: the thing, and if it is a module its ``forward``."""
    if not is_a_dict(found):
        yield found
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        yield found.forward


def is_a_dict(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, dict)


def pointed_to(text: str) -> Iterator[str]:
    """The texts of functions of ours that a text points to, and of those that they point to."""
    for name in re.findall(r":func:`(\w+)`", text):
        there = own_doc(thing("functional", name))
        yield there
        yield from pointed_to(there)


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(call).parameters.values() if p.name != "self"]


def arguments_of(home: str, name: str) -> set[str]:
    """Names of arguments that torch's has; its documentation explains them. What has no readable
    signature is a function in C++, whose arguments ``torch.overrides`` knows."""
    found = torchs(home, f"{name}_with_indices") or torchs(home, name)
    if found is None:
        return set()
    try:
        known = {p.name for p in parameters(found)}
    except ValueError:
        known = {p.name for p in parameters(torch.overrides.get_testing_overrides()[found])}
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        known |= {p.name for p in parameters(found.forward)}
    return known | {"x", "input", "dim", "dtype", "keepdim"}


@EVERY
def test_a_first_sentence(home, name):
    text = own_doc(thing(home, name))
    first = text.split("\n\n")[0]
    assert re.search(r"[.:]$|\. |;", first), f"{name} says {first!r}"
    assert len(first) > 25, f"{name} says no more than {first!r}"


@EVERY
def test_a_real_signature(home, name):
    for call in calls(thing(home, name)):
        loose = [p for p in parameters(call) if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        assert not loose or (home, name) in ANY_ARGUMENTS, f"{name}{inspect.signature(call)}"


@EVERY
def test_every_argument_is_explained_or_torchs(home, name):
    found = thing(home, name)
    text = own_doc(found)
    known = arguments_of(home, name) if "torch" in text else set()
    text += "".join(pointed_to(text))
    for call in calls(found):
        for p in parameters(call):
            named = re.search(rf"\b{p.name}\b", text + own_doc(call), re.IGNORECASE)
            assert named or p.name in known, f"{name} does not say what {p.name} is"


@EVERY
def test_an_example_of_what_torch_does_not_have(home, name):
    """Steps of an augmentation are shown together, by the pipeline."""
    found = thing(home, name)
    is_step = isinstance(found, type) and issubclass(found, Step)
    if torchs(home, name) is None and not is_a_dict(found) and not is_step:
        many = max(len(parameters(call)) for call in calls(found)) > 1
        assert ">>>" in own_doc(found) or not many, f"{name} shows no example"
