"""What hand-written kernels of the CPU win over generated code: gradients of norms in row-major
order (``kernels/cpu/norm.py``) and changes of memory order (``kernels/cpu/to_layout.py``)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

import deuteron as dt
from bench.harness import Record
from deuteron.engines.cpu_gemm import CpuGemm
from deuteron.engines.cpu_norm import GROUP_NORM, NORM
from deuteron.engines.cpu_special import TO_LAYOUT
from deuteron.engines.recipes import Recipe
from deuteron.target import Target

NOTE = (
    "Microseconds of a planned call, least of calls in turns on a machine that others used, too: "
    "compare the two of a row, not rows. `kernel_us` is the operator as one kernel of `cpu_gemm`; "
    "`other_us` is written out and planned without that recipe, by the engines under `others`; "
    "`over` is the second over the first: above 1 the kernel wins. Batch norm and norms of "
    "channels last are generated in either case: in stages of their own (`norm_stages.py`), or as "
    "the passes cut the written out form. The others are hand-written: `kernels/cpu/norm.py`, "
    "`to_layout.py`."
)
Inputs = Sequence[tuple[tuple[int, ...], str, str]]
Attrs = dict[str, Any]


def _cases() -> Iterator[tuple[str, Inputs, Attrs]]:
    for kind in ("f32", "bf16"):
        for shape in ((4096, 1024), (256, 4096), (8192, 256)):
            x, w = (shape, kind, "contiguous"), (shape[1:], kind, "contiguous")
            yield "layer_norm_grad", (x, x, w), {"bias": "same", "dims": 1}
            yield "rms_norm_grad", (x, x, w), {"dims": 1}
        for order in ("contiguous", "nhwc"):
            x, w = ((8, 64, 56, 56), kind, order), ((64,), kind, "contiguous")
            yield "group_norm_grad", (x, x, w), {"groups": 32, "bias": "same"}
            if order == "contiguous":
                yield "instance_norm_grad", (x, x, w), {"bias": "same"}
            else:
                yield "group_norm", (x, w, w), {"groups": 32}
            for shape in ((32, 64, 28, 28), (8, 256, 14, 14)):
                x, w = (shape, kind, order), (shape[1:2], "f32", "contiguous")
                act: Attrs = {"activation": "relu"}
                yield "batch_norm_act", (x, w, w, w, w, x), act
                yield "batch_norm_act_grad", (x, x, w, w, w, w, x), act
                yield "batch_norm_act", (x, w, w, w, w), act
                yield "batch_norm_act_grad", (x, x, w, w, w, w), act
        for shape in ((8, 64, 56, 56), (8, 3, 224, 224)):
            for order, to in (("contiguous", "nhwc"), ("nhwc", "contiguous")):
                yield "to_layout", ((shape, kind, order),), {"layout": to}


def _plan(op: str, inputs: Inputs, attrs: Attrs, form: str) -> dt.Plan:
    g = dt.Graph(op)
    ins = [g.tensor(f"x{i}", *t[:2], layout=t[2]) for i, t in enumerate(inputs)]
    made = getattr(g, op)(*ins, **attrs)
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        y.output(f"y{i}")
    recipes = CpuGemm.recipes

    def offered(self: CpuGemm, target: Target) -> tuple[Recipe, ...]:
        without = (NORM, GROUP_NORM, TO_LAYOUT) if form == "written out" else ()
        return tuple(r for r in recipes(self, target) if r not in without)

    cheapest = patch.object(sys.modules["deuteron.passes.expand"], "cheapest", lambda *_: form)
    with cheapest, patch.object(CpuGemm, "recipes", offered):
        return g.compile(device="cpu")


def _least(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Microseconds of each, in turns."""
    least, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < 12 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            least[i] = min(least[i], (time.perf_counter() - begin) * 1e6)
        rounds += 1
    return least


def run(device: str, quick: bool = False, compile_peer: bool = True) -> Record:
    record = Record("cpu_norms", "cpu", NOTE)
    torch.manual_seed(0)
    for op, inputs, attrs in _cases():
        plans = [_plan(op, inputs, attrs, form) for form in ("whole", "written out")]
        feed = {}
        for name, like in ((v, plans[0].decision.graph.types[v]) for v in plans[0].inputs):
            t = torch.empty_strided(like.shape, like.strides, dtype=like.dtype.torch).normal_()
            feed[name] = t.abs() if t.ndim == 1 else t  # variances are among them
        calls = [lambda plan=plan, feed=feed: plan.run(feed) for plan in plans]
        kernel, other = _least(calls, 0.1 if quick else 1.0)
        shape, kind, order = inputs[0]
        joined = " and another image" if inputs[-1] == inputs[0] and "act" in op else ""
        engines = (c.candidate.engine for c in plans[1].decision.choices)
        record.add(
            case=f"{op} {'×'.join(map(str, shape))} {order}{joined}",
            dtype=kind,
            kernel_us=kernel,
            other_us=other,
            over=other / kernel,
            others=" ".join(engines),
        )
    return record
