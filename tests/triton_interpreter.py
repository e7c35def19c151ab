"""Triton's interpreter, put right where it is silently wrong, and cases run in it.

It truncates when it casts to bfloat16, casts to floats of 8 bits as to integers, takes a comparison
of scalars for a number of their type, and reduces with a function of ours element by element in
Python. These are replaced by numpy or torch doing the same thing: rounding to nearest even, bools,
and a reduction in which nan wins.

``TRITON_INTERPRET`` is read when triton is imported, so this module belongs into a process of
its own: ``python -m tests.interpreted tests.triton_interpreter group`` runs a group of cases.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as ti

from deuteron.codegen.scalar import overwritable
from deuteron.codegen.triton_knobs import choices
from deuteron.codegen.triton_load import DTYPES, functions
from deuteron.codegen.triton_render import Knobs, Rendered, render
from tests import quick_interpreter
from tests.codegen_cases import Case, compare, kind_cases, operator_cases, random_cases
from tests.codegen_kept import kept_cases


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def _from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


SHORT = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@cache
def install() -> None:
    """Make the interpreter right in bfloat16 and 8-bit floats, and quick in our reductions."""
    cast, reduce = ti.InterpreterBuilder.cast_impl, ti.ReduceOps.apply_impl

    def cast_impl(self, src, dst_type):
        a, b = src.dtype.scalar, dst_type.scalar
        if a == tl.bfloat16 and b != tl.bfloat16:
            wide = ti.TensorHandle(_from_bf16(src.data).reshape(src.data.shape), tl.float32)
            return wide if b == tl.float32 else cast(self, wide, dst_type)
        if b == tl.bfloat16 and a != tl.bfloat16:
            return ti.TensorHandle(_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        if a in SHORT and b != a:
            data = torch.from_numpy(np.ascontiguousarray(src.data)).view(SHORT[a]).float().numpy()
            wide = ti.TensorHandle(data.reshape(src.data.shape), tl.float32)
            return wide if b == tl.float32 else cast_impl(self, wide, dst_type)
        if b in SHORT and a != b:
            whole = torch.from_numpy(np.ascontiguousarray(src.data, dtype=np.float32))
            data = whole.to(SHORT[b]).view(torch.uint8).numpy().reshape(src.data.shape)
            return ti.TensorHandle(data, b)
        return cast(self, src, dst_type)

    ours = {"_largest": np.max, "_smallest": np.min, "_times": np.prod}

    def apply_impl(self, given):
        fn = ours.get(getattr(getattr(self.combine_fn, "fn", None), "__name__", ""))
        if fn is None:
            return reduce(self, given)
        data = given[0].handle.data
        found = fn(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype)
        return self.to_tensor(found, given[0].dtype)

    binary = ti.InterpreterBuilder.binary_op

    def binary_op(self, lhs, rhs, op):
        out = binary(self, lhs, rhs, op)  # a comparison is no longer of its operands' type
        return ti.TensorHandle(out.data, tl.int1) if out.data.dtype == np.bool_ else out

    ti.InterpreterBuilder.binary_op = binary_op
    ti.InterpreterBuilder.cast_impl = cast_impl
    ti.InterpreterBuilder.create_fp_to_fp = lambda self, src, dst, mode: cast_impl(self, src, dst)
    ti.ReduceOps.apply_impl = apply_impl
    quick_interpreter.install()


def interpreted(
    rendered: Rendered, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
) -> None:
    """Run through Triton's own launch path: the interpreter, where that is switched on."""
    given = {**inputs, **outputs}
    device = next(iter(given.values())).device
    for p in rendered.partials:
        given[f"#{p.name}"] = torch.empty(p.count, dtype=DTYPES[p.dtype], device=device)
    for launch in rendered.launches:
        fn = functions(rendered.source)[launch.function]
        fn[(launch.grid,)](*[given[a] for a in launch.arguments], num_warps=rendered.warps)


def run_case(case: Case, knobs: Knobs | None = None) -> str:
    """The case in the interpreter: what is wrong with it, or nothing."""
    program = case.program
    for way in [knobs] if knobs else ways(case):
        outputs = case.empty_outputs()
        rendered = render(program, way)
        try:
            interpreted(rendered, case.feed, outputs)
        except Exception:
            return f"{way}: {traceback.format_exc(limit=-6)}\n{rendered.source}"
        wrong = compare(case, outputs) or (in_place(case, rendered) if way.kind == "rows" else "")
        if wrong:
            return f"{way}: {wrong}\n{rendered.source}"
    return ""


def in_place(case: Case, rendered: Rendered) -> str:
    """What is wrong where results take the memory of inputs, if there are several of them."""
    over = dict(overwritable(case.program, at_once=True))
    if not over or len(case.program.stores) == 1:
        return ""
    outputs, feed = case.empty_outputs(), dict(case.feed)
    for out, given in over.items():
        if feed[given] is case.feed[given] and outputs[out].stride() == feed[given].stride():
            feed[given] = outputs[out].copy_(feed[given])
    interpreted(rendered, feed, outputs)
    wrong = compare(case, outputs)
    return wrong and f"in place {over}: {wrong}"


def ways(case: Case) -> list[Knobs]:
    """The first two that would be offered, with larger blocks: the interpreter's cost is per
    operation and program."""
    return [few_programs(k) for k in choices(case.program, 4)[:2]]


def few_programs(k: Knobs) -> Knobs:
    if k.kind == "flat":
        return replace(k, block=max(k.block, 4096))
    return replace(k, rows=max(k.rows, 16)) if k.kind == "rows" else k


def cases(group: str) -> Iterator[tuple[Case, Knobs | None]]:
    name, _, rest = group.partition(":")
    if name == "operators":  # whose samples take turns: two ways of each would be all there is
        kind, _, every = rest.partition(":")
        for k, case in enumerate(operator_cases(kind, int(every))):
            offered = ways(case)
            yield case, offered[k % len(offered)]
    elif name == "kinds":
        yield from kind_cases(rest)
    elif name == "kept":
        yield from ((c, None) for c in kept_cases())
    else:
        first, count = map(int, rest.split("-"))
        yield from ((c, None) for c in random_cases(range(first, first + count)))


def main() -> None:
    failed, count = {}, 0
    for case, knobs in cases(sys.argv[1]):
        torch.manual_seed(0)
        count += 1
        wrong = run_case(case, knobs)
        if wrong:
            failed[f"{case.name} {knobs or ''}"] = wrong
    print(json.dumps({"count": count, "failed": failed}))


if __name__ == "__main__":
    main()
