"""Kernels written in Gluon, in Triton's interpreter.

What a kernel computes does not depend on which thread holds what. So where layouts are left out,
Gluon is Triton, and its kernels run in Triton's interpreter: those that neither copy asynchronously
nor give different warps different work. The few instructions of inline assembly that we write are
carried out too; whether numbers lie in registers as they say is for the compiler to see.

``install`` comes before any kernel in Gluon is imported, in a process of the interpreter's.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import re
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere
from triton.runtime import interpreter as ti
from triton.runtime import jit

from tests import triton_interpreter

LAYOUTS = "BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout"
LAYOUTS += " NVMMASharedLayout SliceLayout"


def install() -> None:
    """For the rest of this process, for kernels in Triton as well."""
    triton_interpreter.install()
    named = jit._normalize_ty  # annotations arrive as they are written
    jit._normalize_ty = lambda kind: named(
        kind.removeprefix("gl.") if isinstance(kind, str) else kind
    )
    gluon.jit, gluon.constexpr_function, ampere.mma_v2 = triton.jit, lambda fn: fn, _mma
    plain = {name: made for name, made in vars(tl).items() if not name.startswith("__")}
    vars(gl).update(plain)
    vars(gl).update(dict.fromkeys(LAYOUTS.split(), lambda *_, **__: None))
    gl.arange = lambda start, end, layout: tl.arange(start, end)
    gl.full = lambda shape, value, dtype, layout: tl.full(shape, value, tl.float32).to(dtype)
    gl.zeros = lambda shape, dtype, layout: tl.zeros(shape, dtype)
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.inline_asm_elementwise = _assembled


def _mma(a: Any, b: Any, c: Any) -> Any:
    """c + a · b, each product exact."""
    found = np.matmul(*(x.to(tl.float32).handle.data for x in (a, b))) + c.handle.data
    return tl.core.tensor(ti.TensorHandle(found.astype(np.float32), tl.float32), c.type)


def _assembled(
    asm: str, constraints: str, args: list[Any], dtype: Any, **_: Any
) -> tuple[Any, ...]:
    """The values of ``$0``, ``$1``, … that are written, those that are read come after them."""
    values = {f"${len(dtype) + i}": x.handle.data.view(np.uint32) for i, x in enumerate(args)}
    for line in re.findall(r"[^;{}]+(?=;)", asm):
        name, _, given = line.strip().partition(" ")
        if name != ".reg":
            to, *of = (a.strip() for a in given.split(","))
            read = (values[a] if a in values else np.uint32(int(a, 0)) for a in of)
            values[to] = INSTRUCTIONS[name](*read)
    kept = (values[f"${i}"].astype(np.uint32).view(np.int32) for i in range(len(dtype)))
    return tuple(tl.core.tensor(ti.TensorHandle(v, tl.int32), args[0].type) for v in kept)


def _logical(a: Any, b: Any, c: Any, table: Any) -> Any:
    """lop3: for the bits of a, b and c one of eight bits of a table."""
    found = np.uint32(0)
    for i in range(8):
        if int(table) >> i & 1:
            one = a if i & 4 else ~a
            one = one & (b if i & 2 else ~b)
            found = found | one & (c if i & 1 else ~c)
    return found


def _pairs(a: Any, b: Any, c: Any) -> Any:
    """a · b + c of two bfloat16 in a word, where nothing is rounded: numbers are of 8 bits."""
    high, low = (
        np.multiply(*(_wide(x, s) for x in (a, b))) + _wide(c, s) for s in (0xFFFF0000, 0xFFFF)
    )
    return high.view(np.uint32) | low.view(np.uint32) >> np.uint32(16)


def _half_pairs(a: Any, b: Any, c: Any) -> Any:
    """The same of two float16."""
    found = np.uint32(0)
    for half in (0, 16):
        x, y, z = ((np.asarray(v) >> half).astype(np.uint16).view(np.float16) for v in (a, b, c))
        found = found | (x * y + z).view(np.uint16).astype(np.uint32) << np.uint32(half)
    return found


def _wide(x: Any, half: int) -> Any:
    bits = np.asarray(x & np.uint32(half), dtype=np.uint32)
    return (bits if half > 0xFFFF else bits << np.uint32(16)).view(np.float32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": _logical,
    "fma.rn.bf16x2": _pairs,
    "fma.rn.f16x2": _half_pairs,
    "bar.warp.sync": lambda: 0,  # there is one thread
}
