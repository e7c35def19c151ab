"""Arguments of kernels written by hand that come together, as tuples."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from deuteron.kernels.triton import launch


class Sizes(NamedTuple):
    count: int
    step: int


class Block(NamedTuple):
    size: int
    times: tuple[float, ...]


@triton.jit
def _apart(x, y, more, count, step, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at * step, mask=at < count, other=0.0) * FIRST
    tl.store(y + at, (value + tl.load(more + at, mask=at < count)) * SECOND, mask=at < count)


@triton.jit
def _together(x, y, tables, sizes, B: tl.constexpr):
    at = tl.program_id(0) * B.size + tl.arange(0, B.size)
    value = tl.load(x + at * sizes.step, mask=at < sizes.count, other=0.0) * B.times[0]
    if tables[1] is None:
        value += tl.load(tables[0] + at, mask=at < sizes.count)
    tl.store(y + at, value * B.times[1], mask=at < sizes.count)


def test_are_compiled_as_if_each_were_given_by_itself():
    from triton.backends.compiler import GPUTarget

    x, where = torch.empty(64), GPUTarget("cuda", 90, 32)
    one = launch.Launchable(_apart)
    kinds = launch.described((x, x, x, 48, 3))[1]
    flat = one.compile(kinds, {"SIZE": 64, "FIRST": 2.0, "SECOND": 0.5}, target=where)
    kinds = launch.described((x, x, (x, None), Sizes(48, 3)))[1]
    assert kinds[2:] == [((torch.float32, True), None), Sizes(("i32", True), ("i32", False))]
    both = launch.Launchable(_together).compile(kinds, {"B": Block(64, (2.0, 0.5))}, target=where)
    code = [
        re.findall(r"^\s+(?:@%p\d+ )?([a-z][\w.:]+)\s", k.asm["ptx"], re.M) for k in (flat, both)
    ]
    assert sorted(code[0]) == sorted(code[1]) and len(code[0]) > 20


def test_are_handed_over_nested(monkeypatch):
    """On a GPU that is not there: what its launcher gets, and that nothing is compiled twice."""
    seen: list = []
    monkeypatch.setattr(launch, "bound", lambda kernel: lambda *args: seen.append(args[4:]))
    monkeypatch.setattr(launch.Launchable, "compile", lambda self, *how: seen.append("compiled"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    kernel, x = launch.Launchable(_together), torch.empty(64)
    block = Block(64, (2.0, 0.5))
    for sizes in (Sizes(48, 3), Sizes(32, 5), Sizes(33, 5)):  # the last is no multiple of 16
        kernel((1,), x, x, (x, None), sizes, B=block)
    at = x.data_ptr()
    made = [(at, at, (at, None), n, block) for n in (Sizes(48, 3), Sizes(32, 5), Sizes(33, 5))]
    assert seen == ["compiled", made[0], made[1], "compiled", made[2]]


def test_sizes_share_a_kernel_and_lines_tell_what_is_moved_at_once():
    def kinds(*numbers: int) -> list:
        return launch.described(numbers)[1]

    assert kinds(launch.Size(48), launch.Size(7)) == [("i32", 1), ("i32", 1)]
    assert kinds(*map(launch.Line, (240, 40, 36, 18, 7))) == [("i32", n) for n in (8, 8, 4, 2, 1)]


def test_numbers_are_looked_at_once_and_equal_ones_of_another_kind_are_not_taken_for_them():
    plain, told = Sizes(48, 7), Sizes(launch.Size(48), launch.Line(7))
    assert plain == told
    for _ in range(2):
        assert launch.described((plain,))[1] == [Sizes(("i32", True), ("i32", False))]
        assert launch.described((told,))[1] == [Sizes(("i32", 1), ("i32", 1))]
    x, y = torch.empty(64), torch.empty(65)[1:]
    for t in (x, y, x):  # of a tuple with a tensor nothing is kept
        assert launch.described(((t, None),))[0] == [(t.data_ptr(), None)]
    for n in range(2 * launch.MOST_NUMBERS):
        launch.described(((n, n),))
    assert len(launch._NUMBERS) <= launch.MOST_NUMBERS
