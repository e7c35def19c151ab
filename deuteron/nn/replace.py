"""``replace``, ``restore`` and ``report``: a model whose modules run functions of ours.

A module keeps its parameters, children, attributes and hooks, and its name in the model; only its
class is changed, which ``restore`` undoes. So checkpoints load before and after, and an optimiser
that holds the parameters goes on holding them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from deuteron.errors import BindError
from deuteron.kinds import checked, shown
from deuteron.nn.authors import BEFORE, COUNT, own_class_back
from deuteron.nn.blocks import Block
from deuteron.nn.gains import Gain, gain
from deuteron.nn.parts import Head, Part, part_class
from deuteron.nn.recognise import Found, facts, recognise
from deuteron.target import Target
from deuteron.target import target as find_target

Predicate = Callable[[str, nn.Module], bool]
Choice = str | type[nn.Module] | Predicate
Choices = Choice | Collection[Choice]


@dataclass(frozen=True)
class Row:
    """One module of a model: its path; its class; what stands in for it (``by``), or why nothing
    does; and what it gains in training by that, for a GPU."""

    path: str
    kind: str
    by: str = ""
    why: str = ""
    gain: Gain | None = None


class Report(tuple[Row, ...]):
    """One row for each module that was looked at: ``path``, ``kind`` (its class), and ``by`` (what
    stands in for it) or ``why`` (nothing does). When it is printed, equal rows are counted.

    ``replaced`` and ``kept`` are the rows of modules that have a stand-in, and of those that do
    not; ``iterable``: the rows.

    >>> paths = [row.path for row in dt.nn.report(model).kept]
    """

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self if row.by]

    @property
    def kept(self) -> list[Row]:
        return [row for row in self if not row.by]

    def __str__(self) -> str:
        lines = []
        for title, rows in (("replaced", self.replaced), ("kept", self.kept)):
            alike: dict[tuple[str, str], list[Row]] = {}
            for row in rows:
                text = (row.by or row.why) + ("" if row.gain is None else f", {row.gain}")
                alike.setdefault((row.kind, text), []).append(row)
            lines.append(f"{title}: {len(rows) or 'nothing'}")
            for (kind, text), group in alike.items():
                where = group[0].path or "the model itself"
                where += f" and {len(group) - 1} more" if len(group) > 1 else ""
                lines.append(f"  {kind}  →  {text}  [{where}]" if group[0].by else "")
                lines[-1] = lines[-1] or f"  {kind}: {text}  [{where}]"
        return "\n".join(lines)

    __repr__ = __str__


@checked("include", "exclude")
def replace(model: nn.Module, include: Choices | None = None, exclude: Choices = ()) -> nn.Module:
    """Make every module of ``model`` that can run a function of ours do so, in place, and return
    ``model``. Parameters, hooks, names and state dicts stay as they are.

    These are modules of ``torch.nn`` that ``dt.nn`` has, too (exact classes, never subclasses),
    and, whoever wrote them: RMS and layer norms, activations, gated MLPs, layers of experts,
    dropouts before a residual, blocks of a norm with what follows it, modules that call a function
    for rotary positions, and the layer that makes the logits of a language model, whose
    cross-entropy then needs no memory for them. What a module computes is found out by running it
    on small examples in float64 and comparing the results with the formula; for blocks, by reading
    the forward.

    On a GPU a module stays as it is if its stand-in neither moves less through memory nor saves
    calls of torch's, because it would only cost the host more; an activation that is one call
    already is an example. Naming the module in ``include`` replaces it all the same.

    include, exclude  class names, module paths ("model.layers.0", also "*.mlp"; modules below a
                      path are included), classes, or functions of path and module; one or several.
                      A name that means no module is refused

    >>> dt.nn.replace(model, exclude=["lm_head", "LlamaMLP"])
    >>> print(dt.nn.report(model))
    """
    check_names(model, include=include, exclude=exclude)
    for module, cls, _ in list(_survey(model, include, exclude, _machine(model))):
        vars(module).pop(COUNT, None)
        if isinstance(cls, type):
            vars(module)[BEFORE] = type(module)
            module.__class__ = cls
            if isinstance(module, Block):
                module.read()
    return model


@checked()
def restore(model: nn.Module) -> nn.Module:
    """Give every module of ``model`` that ``replace`` changed its own class back, and return
    ``model``. Modules that were made from ``dt.nn`` stay, and those whose class something else has
    changed since, such as a parametrization."""
    for module in model.modules():
        own_class_back(module)
    return model


@checked("include", "exclude", "target")
def report(
    model: nn.Module,
    include: Choices | None = None,
    exclude: Choices = (),
    *,
    target: str | Target | None = None,
) -> Report:
    """Return what ``replace`` has done to ``model`` and what it would still do with these
    arguments, and what it leaves alone and why. Modules that are of no interest (linear layers,
    containers) have no row. ``include`` and ``exclude`` are those of ``replace``.

    For a model on a GPU, or for the ``target`` that is named ("h200"), rows say what is gained in
    training, by estimate, and from which size of an input on; below that size torch's function
    runs.

    >>> print(dt.nn.report(model))
    """
    check_names(model, include=include, exclude=exclude)
    machine = _machine(model) if target is None else find_target(target)
    return Report(row for *_, row in _survey(model, include, exclude, machine))


def _machine(model: nn.Module) -> Target:
    """Return the machine that a model's parameters are on."""
    return find_target(next((p.device for p in model.parameters() if not p.is_meta), "cpu"))


def _survey(
    model: nn.Module, include: Choices | None, exclude: Choices, machine: Target
) -> Iterator[tuple[nn.Module, type[nn.Module] | None, Row]]:
    """Yield each module of interest, the class that it is to get (None: it stays), and its row,
    with what it gains on a ``machine``."""
    from deuteron import nn as ours

    heads, absorbed, along = {id(m) for m in _heads(model)}, set[int](), set[int]()
    known: dict[Any, Any] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        before = vars(module).get(BEFORE)
        if before is not None:
            absorbed |= _absorbed(module)
            along |= _along(module)
            yield module, None, _row(path, before.__name__, module, type(module), machine)
            continue
        if type(module) is getattr(nn, kind, None) and type(module) is not nn.Sequential:
            answer: Any = None
            if id(module) in heads and type(module) is nn.Linear:
                answer = Found(Head, ())
            cls = getattr(ours, kind, None) if kind in ours.__all__ else None
            if cls is not None:
                answer = Found(cls, ())
        else:
            cls, key = None, facts(module) or path
            answer = known[key] = known[key] if key in known else recognise(module)
        if answer is None or id(module) in absorbed:
            continue
        why = answer if isinstance(answer, str) else ""
        if not why and not (include is None or chosen(include, path, module)):
            why = "not in include"
        if not why and (chosen(exclude, path, module) or _excludes(exclude, path, module, answer)):
            why = "in exclude"
        if why:
            yield module, None, Row(path, kind, why=why)
            continue
        recipe: Any = (answer.kind, type(module), answer.how)
        cls = cls or part_class(*recipe)
        row = _row(path, kind, module, cls, machine)
        if include is None and row.gain is not None and not row.gain.is_one:
            why = "alone it gains nothing on a GPU: torch's call costs the host less, and moves as "
            why += "much through memory"
            why = "the block that it is in takes it along" if id(module) in along else why
            yield module, None, Row(path, kind, why=why)
            continue
        absorbed |= _absorbed(module, cls)
        along |= _along(module, cls)
        yield module, cls, row


def _excludes(exclude: Choices, path: str, module: nn.Module, answer: Found) -> bool:
    """Whether ``exclude`` means a norm that a block would run together with what follows it."""
    sites = answer.how.sites if answer.kind is Block else ()
    below = [(f"{path}.{site.norm}".lstrip("."), getattr(module, site.norm)) for site in sites]
    return any(chosen(exclude, *each) for each in below)


def _along(module: nn.Module, cls: type[nn.Module] | None = None) -> set[int]:
    """Return the norms that a block calls together with what follows them."""
    kind: Any = cls or type(module)
    sites = kind._how.sites if issubclass(kind, Block) else ()
    return {id(getattr(module, site.norm)) for site in sites}


def _row(path: str, kind: str, module: nn.Module, cls: Any, machine: Target) -> Row:
    return Row(path, kind, _words(cls), gain=gain(cls, module, machine))


def _absorbed(module: nn.Module, cls: type[nn.Module] | None = None) -> set[int]:
    """Return the children whose work the stand-in for a module does itself."""
    how = getattr(cls or type(module), "_how", None)
    return {id(getattr(module, name)) for name, _ in getattr(how, "inside", ())}


def _words(cls: type[nn.Module]) -> str:
    """Return what modules of such a class run, in words."""
    return cls.words(cls._how) if issubclass(cls, Part) else f"dt.nn.{cls.__name__}"


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield layers that make logits: from the features of an embedding to as many classes as it has
    entries, if no other layer of the model does that."""
    sizes = {m.weight.shape for m in model.modules() if isinstance(m, nn.Embedding)}
    for size in sizes:
        fits = [m for m in model.modules() if type(m) is nn.Linear and m.weight.shape == size]
        if len(fits) == 1 and size[0] > size[1]:
            yield fits[0]


def check_names(model: nn.Module, **choices: Choices | None) -> None:
    """Refuse a name in ``include`` or ``exclude`` that means no module."""
    modules = dict(model.named_modules())
    for argument, given in choices.items():
        for choice in () if given is None else _each(given):
            if isinstance(choice, str) and not any(_is(choice, *m) for m in modules.items()):
                known = [*modules, *{_kind(m).__name__ for m in modules.values()}]
                near = difflib.get_close_matches(choice, known, n=3)
                remedy = f"did you mean {' or '.join(map(repr, near))}? " * bool(near)
                remedy += "print(model) shows all of them"
                wrong = f"no module of the model has the path or the class {choice!r}"
                raise BindError(wrong, asked=f"{argument}={shown(given)}", remedy=remedy)


def chosen(choices: Choices, path: str, module: nn.Module) -> bool:
    """Whether ``include`` or ``exclude`` means a module."""
    return any(_is(choice, path, module) for choice in _each(choices))


def _each(choices: Any) -> Collection[Any]:
    several = isinstance(choices, Collection) and not isinstance(choices, str)
    return choices if several else (choices,)


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; if it was replaced, the class that it had before."""
    kind: type[nn.Module] = vars(module).get(BEFORE) or type(module)
    return kind


def _is(choice: Any, path: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        below = fnmatchcase(path, choice) or fnmatchcase(path, f"{choice}.*")
        return below or choice in (_kind(module).__name__, type(module).__name__)
    if isinstance(choice, type):
        return isinstance(module, choice)
    if not callable(choice):
        wrong = f"{choice!r} chooses no modules"
        remedy = "give names of classes, module paths, classes, or functions of path and module"
        raise BindError(wrong, asked="dt.nn.replace(…, include, exclude)", remedy=remedy)
    return bool(choice(path, module))
