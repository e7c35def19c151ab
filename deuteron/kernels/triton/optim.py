"""Update rules over many tensors in one launch.

A table of addresses lies on the device. Program i takes chunk i of a list (tensor, chunk of that
tensor), looks its tensor's addresses up and updates BLOCK elements of it. Whole chunks of tensors
that start on 16 bytes take a branch without masks, because masked loads do not vectorise; every
element is read once and written once, so the bytes are those of :mod:`deuteron.kernels.optim`
plus 8 per chunk.

The body of :func:`update` and of :func:`numbers` is the rule's own list of statements, written as
Triton. Norms are sums of squares per program, added up by one program in a fixed order: no
atomics, so two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import functions
from deuteron.codegen.triton_render import HEAD
from deuteron.kernels.optim import Numbers, Program, evaluate
from deuteron.kernels.triton.launch import Launchable

BLOCK, WARPS = 1024, 4
SPAN = 16  # chunks that one program of a norm adds up
FLOATS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
TEXT: dict[str, Callable[..., str]] = {
    "add": "({} + {})".format,
    "sub": "({} - {})".format,
    "mul": "({} * {})".format,
    "div": "({} / {})".format,
    "power": "tl.exp2(tl.log2({}) * {})".format,
    "sqrt": "tl.sqrt({})".format,
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))".format,
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)".format,
    "min": "tl.minimum({}, {})".format,
}


def written(body: Sequence[Any]) -> list[str]:
    """The statements as lines of Triton."""
    names: dict[str, Any] = {a: a for _, _, args in body for a in args if isinstance(a, str)}
    lines = []
    for name, op, args in body:
        evaluate([(name, op, args)], names, TEXT)
        lines.append(f"{name} = {names[name]}")
        names[name] = name
    return lines


# ---- one step of a rule


def _update_lines(program: Program, types: Mapping[str, str], wide: str, masked: bool) -> list[str]:
    """Load, compute and store one chunk."""
    guard = ", mask=mask, other=0.0" if masked else ', eviction_policy="evict_first"'
    keep = ", mask=mask" if masked else ', eviction_policy="evict_first"'
    lines = []
    for role in program.roles:
        pointer = f"a_{role}.to(tl.pointer_type({types[role]}))"
        if not masked:
            pointer = f"tl.multiple_of({pointer}, 16)"
        lines.append(f"at_{role} = {pointer} + start + lane")
    for role in program.reads:
        lines.append(f"{role} = tl.load(at_{role}{guard}).to({wide})")
    lines += written(program.body)
    for role, value in program.writes:
        lines.append(f"tl.store(at_{role}, {value}.to({types[role]}){keep})")
    for k, value in enumerate(program.sums):
        summed = f"tl.where(mask, {value}, 0.0)" if masked else value
        lines.append(f"tl.store(sums + {k} * chunks + i, tl.sum({summed}, 0).to(tl.float64))")
    return lines


@lru_cache
def update_source(program: Program, dtypes: tuple[torch.dtype, ...]) -> str:
    """The kernel for tensors of these types, in the order of the program's roles."""
    types = {
        role: f"tl.{str(d).removeprefix('torch.')}"
        for role, d in zip(program.roles, dtypes, strict=True)
    }
    wide = "tl.float64" if torch.float64 in dtypes else "tl.float32"
    count = len(program.numbers)
    given = "".join(f"v_{name}, " for name in program.numbers)
    lines = [
        "i = tl.program_id(0)",
        "t = tl.load(where + i)",
        "start = tl.load(where + chunks + i).to(tl.int64) * BLOCK",
        "length = tl.load(table + t)",
        "lane = tl.arange(0, BLOCK)",
    ]
    place = 0
    for role in program.roles:
        place += role != "g"
        source = "grads" if role == "g" else f"table + {place} * tensors"
        lines.append(f"a_{role} = tl.load({source} + t)")
    if program.numbers:
        lines.append("if rows is not None:")
        lines += [
            f"    {name} = tl.load(rows + t * {count} + {k}).to({wide})"
            for k, name in enumerate(program.numbers)
        ]
        lines.append("else:")
        lines += [f"    {name} = v_{name}" for name in program.numbers]
    lines += ["skip = 0.0", "if control is not None:", "    skip = tl.load(control + 1)"]
    if "gscale" in program.numbers:
        lines.append(f"    gscale = gscale * tl.load(control).to({wide})")
    aligned = " | ".join(f"a_{role}" for role in program.roles)
    lines += ["if skip == 0.0:", f"    if (start + BLOCK <= length) & ((({aligned}) & 15) == 0):"]
    lines += [f"        {line}" for line in _update_lines(program, types, wide, False)]
    lines += ["    else:", "        mask = lane < length - start"]
    lines += [f"        {line}" for line in _update_lines(program, types, wide, True)]
    head = (
        f"@triton.jit\ndef update(table, grads, where, tensors, chunks, rows, control, sums, "
        f"{given}BLOCK: tl.constexpr):\n"
    )
    return f"{HEAD}\n{head}" + "".join(f"    {line}\n" for line in lines)


@lru_cache
def update(program: Program, dtypes: tuple[torch.dtype, ...]) -> Launchable:
    return Launchable(functions(update_source(program, dtypes))["update"])


@lru_cache
def numbers_source(of: Numbers, counts: bool) -> str:
    """The numbers of a step for every tensor, computed in float64, from its own step count."""
    lines = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < tensors"]
    lines += [f"{name} = tl.load(constants + {k})" for k, name in enumerate(of.constants)]
    lines.append("lr = tl.load(rate).to(tl.float64)")
    if counts:
        lines.append("step = tl.load(steps + i, mask=mask, other=0.0).to(tl.float64) + 1.0")
    lines += written(of.body)
    for k, name in enumerate(of.results):
        lines.append(f"tl.store(rows + i * {len(of.results)} + {k}, {name}, mask=mask)")
    if counts:
        lines += [
            "skip = 0.0",
            "if control is not None:",
            "    skip = tl.load(control + 1)",
            "if skip == 0.0:",
            "    tl.store(steps + i, step.to(tl.float32), mask=mask)",
        ]
    head = (
        "@triton.jit\ndef numbers(constants, rate, steps, control, rows, tensors, "
        "BLOCK: tl.constexpr):\n"
    )
    return f"{HEAD}\n{head}" + "".join(f"    {line}\n" for line in lines)


@lru_cache
def numbers(of: Numbers, counts: bool) -> Launchable:
    return Launchable(functions(numbers_source(of, counts))["numbers"])


# ---- norms


@triton.jit
def _squares(
    table,
    grads,
    where,
    chunks,
    out,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = Σ g² over SPAN chunks: reads every gradient once."""
    i = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    for k in range(i * SPAN, tl.minimum(i * SPAN + SPAN, chunks)):
        t = tl.load(where + k)
        first = tl.load(where + chunks + k).to(tl.int64) * BLOCK
        size = tl.load(table + t)
        address = tl.load(grads + t)
        at = address.to(tl.pointer_type(TYPE)) + first
        if (first + BLOCK <= size) & ((address & 15) == 0):
            g = tl.load(tl.multiple_of(at, 16) + lane).to(WIDE)
            total += g * g
        else:
            g = tl.load(at + lane, mask=lane < size - first, other=0.0).to(WIDE)
            total += g * g
    tl.store(out + i, tl.sum(total, 0).to(tl.float64))


@triton.jit
def _control(
    partials,
    count,
    grad_scale,
    found_inf,
    max_norm,
    norm,
    control,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """control = (what gradients are multiplied with, whether the step is left out).

    norm = √Σ partials / scale;  factor = min(1, max_norm / (norm + 1e-6)) / scale
    """
    factor = tl.full((), 1.0, tl.float64)
    skip = tl.full((), 0.0, tl.float64)
    if grad_scale is not None:
        factor = factor / tl.load(grad_scale).to(tl.float64)
    if found_inf is not None:
        skip += tl.load(found_inf).to(tl.float64)
    if partials is not None:
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            total += tl.load(partials + i, mask=i < count, other=0.0)
        length = tl.sqrt(tl.sum(total, 0)) * factor
        tl.store(norm, length.to(tl.float32))
        if SKIP:
            skip += tl.where(length < float("inf"), 0.0, 1.0)
        if max_norm is not None:
            ratio = max_norm / (length + 1e-6)
            factor = factor * tl.where(ratio >= 1.0, 1.0, ratio)  # nan stays nan
    tl.store(control, factor)
    tl.store(control + 1, skip)


@triton.jit
def squares_of_chunks(sums, firsts, chunks, t, BLOCK: tl.constexpr):
    """Σ p² and Σ u² of tensor t, from those of its chunks: all of p come first, then all of u."""
    begin = tl.load(firsts + t)
    end = tl.load(firsts + t + 1)
    p = tl.zeros((BLOCK,), tl.float64)
    u = tl.zeros((BLOCK,), tl.float64)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        p += tl.load(sums + i, mask=i < end, other=0.0)
        u += tl.load(sums + chunks + i, mask=i < end, other=0.0)
    return tl.sum(p, 0), tl.sum(u, 0)


@triton.jit
def _ratios(sums, firsts, chunks, rows, width, column, BLOCK: tl.constexpr):
    """A number of tensor t becomes ‖p‖ / ‖u‖; 1 if either is 0 or nan."""
    t = tl.program_id(0)
    pp, uu = squares_of_chunks(sums, firsts, chunks, t, BLOCK)
    ratio = tl.where((pp > 0.0) & (uu > 0.0), tl.sqrt(pp / uu), 1.0)
    tl.store(rows + t * width + column, ratio)


squares, control, ratios = Launchable(_squares), Launchable(_control), Launchable(_ratios)
