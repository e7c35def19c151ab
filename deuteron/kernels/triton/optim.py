"""Steps of optimisers over many tensors in one launch, generated from the rules' formulas.

A table of addresses lies on the device. Program i takes chunk i of a list (tensor, chunk of that
tensor), looks its tensor's addresses up, and applies the formula to the elements of the chunk. A
chunk that lies wholly in tensors that start at multiples of 16 bytes takes a branch without masks,
because masked loads do not vectorise. Every element is read once and written once, so the bytes are
those of :mod:`deuteron.kernels.optim` plus 8 per chunk.

Sums are made per chunk and added up by one program in a fixed order: no atomics, so two runs give
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from deuteron.codegen.triton_load import functions
from deuteron.codegen.triton_math import Arithmetic
from deuteron.codegen.triton_render import HEAD
from deuteron.kernels.optim import GROUP, SEED, Body, Rule, Step, level_of, traced
from deuteron.kernels.optim_rules import limited
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops import random

BLOCK = 1024  # elements of a chunk
SPAN = 16  # chunks that one program of a norm adds up
WARPS = {"flat": 4, "groups": 4, "matrices": 8}
Tile = tuple[int, int, int]  # matrices, rows and columns that one program takes


class Math(Arithmetic):
    """Renders quotients and roots with an error of two roundings, at a third of the cost of exact
    ones."""

    def __init__(self, wide: bool) -> None:
        super().__init__(wide, True, *[frozenset()] * 3)

    def _div(self, s, args):
        return f"{args[0]} / {args[1]}"

    def _sqrt(self, s, args):
        return f"tl.sqrt({args[0]})"

    def _pow(self, s, args):
        return f"tl.exp2(tl.log2({args[0]}) * {args[1]})"

    def _noise(self, s, args):
        seed = f"({args[0]}.to(tl.int64) * {SEED} + t + {s.args[1].value})"
        bits = f"{self.need('_mix')}((start + lane + {seed}).to(tl.uint32)) >> {32 - random.BITS}"
        return f"({bits}).to({self.float}) * {2.0**-random.BITS!r}"

    def lines(self, body: Body, walk: Walk | None = None, inside: str = "{}") -> Iterable[str]:
        """Yield the statements. Sums and maxima of rows and columns are reduced as ``walk`` says,
        from values that ``inside`` has masked: the number of a row is kept as it is, for its store,
        and broadcast to the elements for the formulas."""
        for s in body.statements:
            if walk is not None and s.op in walk.reduced:
                yield f"one_{s.name} = {walk.reduced[s.op].format(inside.format(s.source))}"
                yield f"{s.name} = one_{s.name}{walk.widened}"
            else:
                yield f"{s.name} = {self.compute(s, str)}"


def kernel(arguments: str, text: str | Iterable[str], math: Math) -> Launchable:
    """Return a Triton function that can be launched, from the lines of its body."""
    lines = text.splitlines() if isinstance(text, str) else text
    body = "".join(f"    {line}\n" for line in lines)
    made = "\n\n".join((HEAD, *math.helpers(), f"@triton.jit\ndef optimiser({arguments}):\n{body}"))
    return Launchable(functions(made)["optimiser"])


def name_of(dtype: torch.dtype) -> str:
    return f"tl.{str(dtype).removeprefix('torch.')}"


# ---- a pass over the elements


class Walk(NamedTuple):
    """How a pass goes through a tensor, as code: lines that place a chunk in it, and the offsets of
    elements and of the numbers of rows, columns and matrices."""

    place: str
    whole: str  # whether all of the chunk lies in the tensor
    at: dict[str, str]  # by level; "whole" is that of an element of a whole chunk
    masks: dict[str, str]
    reduced: dict[str, str]
    part: dict[str, str]  # what is added to an offset where only a part of a sum is stored
    widened: str = ""  # the index that broadcasts the number of a row to its elements
    total: str = "tl.sum({}, 0)"
    hint: str = ""


_FLAT = Walk(
    place=f"""
start = tl.load(where + chunks + i).to(tl.int64) * {BLOCK}
length = tl.load(table + t)
lane = tl.arange(0, {BLOCK})
""",
    whole=f"start + {BLOCK} <= length",
    at={"whole": "start + lane", "element": "start + lane"},
    masks={"element": "lane < length - start"},
    reduced={},
    part={},
    hint=', eviction_policy="evict_first"',
)

_GROUPS = _FLAT._replace(  # the elements of a chunk as rows that share a scale
    place=f"""
start = tl.load(where + chunks + i).to(tl.int64) * {BLOCK}
length = tl.load(table + t)
down = tl.arange(0, {BLOCK // GROUP})
lane = down[:, None] * {GROUP} + tl.arange(0, {GROUP})[None, :]
group = start // {GROUP} + down
""",
    at=_FLAT.at | {"row": "group"},
    masks=_FLAT.masks | {"row": f"group * {GROUP} < length"},
    reduced={"row_max": "tl.max({}, 1)"},
    widened="[:, None]",
    hint="",
)


def _tiles(sizes: int, tile: Tile) -> Walk:
    """Return the walk by tiles: a few matrices, or a piece of one; sums by row and column are those
    of the piece. Row ``sizes`` of the table, and the two after it, have the number of matrices,
    their height and their width."""
    nb, br, bc = tile
    live, rows, columns = "(b < matrices)", "(r < height)", "(c < width)"
    masks = {"element": f"{live} & {rows} & {columns}", "row": f"{live} & {rows}"}
    masks |= {"column": f"{live} & {columns}", "matrix": live}
    return Walk(
        place=f"""
k = tl.load(where + chunks + i)
matrices = tl.load(table + {sizes} * tensors + t)
height = tl.load(table + {sizes + 1} * tensors + t)
width = tl.load(table + {sizes + 2} * tensors + t)
across = tl.cdiv(width, {bc})
down = tl.cdiv(height, {br})
b = (k // (across * down) * {nb} + tl.arange(0, {nb}))[:, None, None]
r = (k // across % down * {br} + tl.arange(0, {br}))[None, :, None]
c = (k % across * {bc} + tl.arange(0, {bc}))[None, None, :]
inside = (tl.max(b) < matrices) & (tl.max(r) < height) & (tl.max(c) < width)
""",
        whole="inside & (width % 16 == 0)",  # the compiler sees this by ``width // 16 * 16``
        at={
            "whole": "(b * height + r) * (width // 16 * 16) + c",
            "element": "(b * height + r) * width + c",
            "row": "b * height + r",
            "column": "b * width + c",
            "matrix": "b",
        },
        masks=masks,
        part={  # parts one after the other, so that the program that adds them up reads neighbours
            "row": "k % across * matrices * height + ",
            "column": "k // across % down * matrices * width + ",
        },
        reduced={
            "row_sum": "tl.sum({}, 2, keep_dims=True)",
            "column_sum": "tl.sum({}, 1, keep_dims=True)",
        },
        total="tl.sum(tl.sum(tl.sum({}, 2), 1), 0)",
    )


class _Pass:
    """The code of a pass. It is made for chunks that are ``whole``, and for those that are not; or,
    with None, every access tests that: the code of tiles is long, and two versions of it would take
    registers that other programs need."""

    def __init__(self, step: Step, types: dict[str, str], math: Math, walk: Walk) -> None:
        self.step, self.types, self.math, self.walk = step, types, math, walk

    def _access(self, call: str, name: str, whole: bool | None, value: str = "") -> list[str]:
        """Return a load or a store, made by ``call`` with an address, a value and a mask."""
        level, walk = level_of(name), self.walk
        pointer = f"a_{name}.to(tl.pointer_type({self.types[name]}))"
        mask = f"{value}, mask={level}_inside" + ("" if value else ", other=0.0")
        if level != "element":
            part = walk.part.get(level, "") if name in self.step.writes else ""
            return [call.format(f"{pointer} + {part}{walk.at[level]}{value if whole else mask}")]
        plain = f"tl.multiple_of({pointer}, 16) + {walk.at['whole']}{value}{walk.hint}"
        masked = f"{pointer} + {walk.at[level]}{mask}"
        if whole is not None:
            return [call.format(plain if whole else masked)]
        asked = f"if whole & ((a_{name} & 15) == 0):"
        return [asked, f"    {call.format(plain)}", "else:", f"    {call.format(masked)}"]

    def chunk(self, whole: bool | None) -> Iterable[str]:
        step, walk, math = self.step, self.walk, self.math
        if not whole:
            yield from (f"{level}_inside = {mask}" for level, mask in walk.masks.items())
        for name in step.reads:
            yield from self._access(f"raw_{name} = tl.load({{}})", name, whole)
            wide = "" if level_of(name) == "element" else walk.widened
            yield f"{name} = raw_{name}{wide}.to({math.float})"
        # where only elements are read, they are 0 outside as loaded
        clean = whole is None and {level_of(name) for name in step.reads} == {"element"}
        inside = "{}" if whole or clean else "tl.where(element_inside, {}, 0.0)"
        yield from math.lines(step.body, walk, inside)
        for name, value in step.writes.items():
            one = "" if level_of(name) == "element" else "one_"
            given = f", {one}{value}.to({self.types[name]})"
            yield from self._access("tl.store({})", name, whole, given)
        for k, value in step.sums.items():
            total = walk.total.format(inside.format(value))
            yield f"tl.store(sums + {k} * chunks + i, {total}.to(tl.float64))"


@lru_cache
def update(step: Step, dtypes: tuple[torch.dtype, ...], tile: Tile | None = None) -> Launchable:
    """Return ``run(table, grads, where, tensors, chunks, rows, control, sums, *numbers)``: the pass
    over tensors of these types, in the order of their names. Numbers are read from ``rows``, or,
    where that is None, given."""
    rule, math = step.rule, Math(torch.float64 in dtypes)
    if tile is not None:
        walk = _tiles(rule.place("mean") + 1, tile)
    else:
        walk = {"flat": _FLAT, "groups": _GROUPS}[rule.walk]
    lines = ["i = tl.program_id(0)", "t = tl.load(where + i)", *walk.place.splitlines()]
    for name in step.touches:
        home = "grads" if name == "g" else f"table + {rule.place(name)} * tensors"
        lines.append(f"a_{name} = tl.load({home} + t)")
    lines.append("if rows is not None:")
    for name, k in step.numbers.items():
        lines.append(f"    {name} = tl.load(rows + t * {len(rule.numbers)} + {k}).to({math.float})")
    lines += ["else:", *(f"    {name} = v_{name}" for name in step.numbers)]
    lines += ["skip = 0.0", "if control is not None:", "    skip = tl.load(control + 1)"]
    if "gscale" in step.numbers:
        lines.append(f"    gscale = gscale * tl.load(control).to({math.float})")
    lines += [f"whole = {walk.whole}", "if skip == 0.0:"]
    types = dict(zip(rule.tensors, map(name_of, dtypes), strict=True))
    text = _Pass(step, types, math, walk)
    if tile is None:
        bits = " | ".join(f"a_{name}" for name in step.touches if level_of(name) == "element")
        lines += [f"    if whole & ((({bits}) & 15) == 0):"]
        lines += [*(f"        {line}" for line in text.chunk(True)), "    else:"]
        lines += [f"        {line}" for line in text.chunk(False)]
    else:
        lines += [f"    {line}" for line in text.chunk(None)]
    given = "".join(f", v_{name}" for name in rule.numbers)
    return kernel(f"table, grads, where, tensors, chunks, rows, control, sums{given}", lines, math)


# ---- numbers of a tensor


@lru_cache
def numbers(rule: Rule) -> Launchable:
    """Return ``run(constants, rate, steps, control, rows, tensors)``: it computes the numbers of a
    step for every tensor, in float64, from the tensor's own step count."""
    math = Math(True)
    lines = ["i = tl.program_id(0) * 128 + tl.arange(0, 128)", "mask = i < tensors"]
    lines += [f"{name} = tl.load(constants + {k})" for k, name in enumerate(rule.given)]
    lines.append("lr = tl.load(rate).to(tl.float64)")
    if rule.counts:
        lines.append("step = tl.load(steps + i, mask=mask, other=0.0).to(tl.float64) + 1.0")
    lines += math.lines(rule.body)
    for k, value in enumerate(rule.body.results.values()):
        lines.append(f"tl.store(rows + i * {len(rule.numbers)} + {k}, {value}, mask=mask)")
    if rule.counts:
        lines += ["skip = 0.0", "if control is not None:", "    skip = tl.load(control + 1)"]
        lines += ["if skip == 0.0:", "    tl.store(steps + i, step.to(tl.float32), mask=mask)"]
    return kernel("constants, rate, steps, control, rows, tensors", lines, math)


@lru_cache
def finish(step: Step) -> Launchable:
    """Return ``run(sums, firsts, chunks, table, rows)``: it computes the numbers of every tensor, a
    program each, that depend on the sums of its chunks."""
    math, sums, row = Math(True), step.rule.sums, f"rows + t * {len(step.rule.numbers)}"
    lines = ["t = tl.program_id(0)", "begin = tl.load(firsts + t)", "end = tl.load(firsts + t + 1)"]
    lines += [f"all_{name} = tl.zeros(({BLOCK},), tl.float64)" for name in sums]
    lines += [f"for first in range(begin, end, {BLOCK}):", f"    i = first + tl.arange(0, {BLOCK})"]
    for k, name in enumerate(sums):
        more = f"tl.load(sums + {k} * chunks + i, mask=i < end, other=0.0)"
        lines.append(f"    all_{name} += {more}")
    lines += [f"{name} = tl.sum(all_{name}, 0)" for name in sums]
    lines.append("size = tl.load(table + t).to(tl.float64)")
    for name, k in step.numbers.items():
        lines.append(f"{name} = tl.load({row} + {k}).to(tl.float64)")
    lines += math.lines(step.body)
    for name, value in step.body.results.items():
        lines.append(f"tl.store({row} + {step.rule.numbers.index(name)}, {value})")
    return kernel("sums, firsts, chunks, table, rows", lines, math)


# ---- the norm of all gradients


@lru_cache
def squares(dtype: torch.dtype) -> Launchable:
    """Return ``run(table, grads, where, chunks, out)``: each program computes Σ g² over SPAN
    chunks; every gradient is read once."""
    math, kind = Math(dtype == torch.float64), name_of(dtype)
    text = f"""
i = tl.program_id(0)
lane = tl.arange(0, {BLOCK})
total = tl.zeros(({BLOCK},), {math.float})
for k in range(i * {SPAN}, tl.minimum(i * {SPAN} + {SPAN}, chunks)):
    t = tl.load(where + k)
    first = tl.load(where + chunks + k).to(tl.int64) * {BLOCK}
    size = tl.load(table + t)
    address = tl.load(grads + t)
    at = address.to(tl.pointer_type({kind})) + first
    if (first + {BLOCK} <= size) & ((address & 15) == 0):
        g = tl.load(tl.multiple_of(at, 16) + lane).to({math.float})
        total += g * g
    else:
        g = tl.load(at + lane, mask=lane < size - first, other=0.0).to({math.float})
        total += g * g
tl.store(out + i, tl.sum(total, 0).to(tl.float64))
"""
    return kernel("table, grads, where, chunks, out", text, math)


@lru_cache
def control() -> Launchable:
    """Return ``run(sums, count, scale, found, most, skips, norm, control)``: control receives the
    factor on gradients, and whether the step is skipped."""
    math, body = Math(True), traced(limited, ("squares", "scale", "found", "most", "skips"))
    text = f"""
total = tl.zeros(({BLOCK},), tl.float64)
if sums is not None:
    for first in range(0, count, {BLOCK}):
        i = first + tl.arange(0, {BLOCK})
        total += tl.load(sums + i, mask=i < count, other=0.0)
squares = tl.sum(total, 0)
one = tl.full((), 1.0, tl.float64)
scale = one if scale is None else tl.load(scale).to(tl.float64)
found = one * 0.0 if found is None else tl.load(found).to(tl.float64)
"""
    lines = [*text.splitlines(), "most = one * most", "skips = one * skips", *math.lines(body)]
    for place, name in (("norm", "norm"), ("control", "factor"), ("control + 1", "skip")):
        lines.append(f"tl.store({place}, {body.results[name]})")
    return kernel("sums, count, scale, found, most, skips, norm, control", lines, math)
