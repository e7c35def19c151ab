"""Whether forward asks for a number only to make sure of something, and raises an error if not.

Such a question is answered by the example's number, and the graph has nothing of it: ``assert
lengths.max().item() <= size``, ``if x.isnan().any(): raise …``, ``torch._check(…)``, and what
torch's own functions and distributions look at before they compute. Where a ``try`` of forward's
might catch the error it is no assertion, because forward would go on in another way.
"""

from __future__ import annotations

import dis
import sys
from traceback import walk_stack
from types import FrameType
from unittest.mock import patch

import torch

from deuteron.frontends.refusals import users_frames

# Instructions of Python that keep a number, or decide by it what comes next.
_DECIDES = ("POP_JUMP", "JUMP_IF", "STORE", "RETURN", "YIELD", "POP_TOP")
_ENDS = (*_DECIDES[2:5], "JUMP", "FOR_ITER", "RERAISE")  # there is no error further ahead
_DISTRIBUTION = torch.distributions.Distribution
_VALIDATES = (_DISTRIBUTION.__init__.__code__, _DISTRIBUTION._validate_sample.__code__)
# torch.export cannot follow what a distribution asserts, and torch.compile leaves it out as well
unchecked = patch.object(_DISTRIBUTION, "_validate_args", False)


def is_asserted() -> bool:
    """Whether forward only asserts something about the number that it asks for now."""
    users = [frame for frame, _ in users_frames()]
    for frame, _ in walk_stack(sys._getframe()):
        if users and frame is users[0]:
            break
        if frame.f_code in _VALIDATES:
            return True
        if frame.f_globals is vars(torch) and frame.f_code.co_name.startswith("_check"):
            return True
        if _is_of_torch(frame) and _raises_or_goes_on(frame, at_once=True):
            return not any(map(_may_catch, (frame, *users)))
    if not users:
        return False
    if _asserts(users[0]):
        return True
    return _raises_or_goes_on(users[0]) and not any(map(_may_catch, users))


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch.nn.")


def _ahead(frame: FrameType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(frame.f_code) if i.offset >= frame.f_lasti]


def _asserts(frame: FrameType) -> bool:
    ahead = [i.opname for i in _ahead(frame)]
    decides = next((i for i, name in enumerate(ahead) if name.startswith(_DECIDES)), -1)
    return ahead[decides + 1 :][:1] == ["LOAD_ASSERTION_ERROR"]


def _raises_or_goes_on(frame: FrameType, at_once: bool = False) -> bool:
    """Whether the next thing that a frame decides is to raise an error, or not to. ``at_once``: it
    decides it by the instruction that it is at, and not by what it computes from the answer."""
    ahead = _ahead(frame)
    if at_once and not ahead[0].opname.startswith(("POP_JUMP", "TO_BOOL")):
        return False
    at = next((k for k, i in enumerate(ahead) if i.opname.startswith(_DECIDES)), None)
    if at is None or not ahead[at].opname.startswith("POP_JUMP"):
        return False
    code = {i.offset: i for i in dis.get_instructions(frame.f_code)}
    here, there = ahead[at + 1].offset, ahead[at].argval
    return _raises(code, here, there) or _raises(code, there, here)


def _raises(code: dict[int, dis.Instruction], start: int, other: int) -> bool:
    """Whether all ways from ``start`` lead to an error, but for those that lead to ``other``."""
    for offset in (offset for offset in code if offset >= start):
        name = code[offset].opname
        if name == "RAISE_VARARGS":
            return True
        if name.startswith("POP_JUMP"):
            ways = {code[offset].argval, min(o for o in code if o > offset)}
            further = (way for way in ways - {other} if way > offset)
            return other in ways and any(_raises(code, way, other) for way in further)
        if name.startswith(_ENDS):
            return False
    return False


def _may_catch(frame: FrameType) -> bool:
    """Whether an error that is raised in a frame, or in what it calls now, may end there."""
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)
