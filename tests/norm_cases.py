"""Cases for the backward kernels of norms: regions of one gradient operator, tensors, the verdict.

``python -m tests.interpreted tests.norm_cases`` runs them in Triton's interpreter; the tests
on a GPU call :func:`wrong` with the device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.dtype import dtype as kind_of
from deuteron.ir.region import Region
from deuteron.ops import TABLE, Ops, infer
from deuteron.ops.evaluate import evaluate
from deuteron.policy import Policy
from deuteron.target import Target
from tests.batch_norm_cases import calm
from tests.tolerances import CANCELLED, EPS, allowed, error

RESULTS = ("dx", "dweight", "dbias")
ENGINE = TritonKernels()


@dataclass(frozen=True)
class Case:
    """One gradient operator on random tensors."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    param: torch.dtype | None = None  # of weight and bias, where it is not that of x
    weight: bool = True
    bias: bool = True
    extra: bool = False
    keep: tuple[str, ...] = RESULTS  # results that somebody reads
    attrs: Mapping[str, Any] = field(default_factory=dict)
    # or "offset" (mean 1000), "edge", "odd" (nan and inf in two rows), "huge" (squares overflow)
    fill: str = "normal"
    activation: str = "none"  # that follows the norm, with the bias as its offset
    around: tuple[str, ...] = ()  # elementwise work that goes with it: "sum", "dropout", "bias"

    @property
    def params(self) -> tuple[int, ...]:
        if "dims" in self.attrs or self.op in ("layer_norm", "rms_norm"):
            return self.shape[-self.attrs.get("dims", 1) :]
        return self.shape[1:2]

    def feed(self) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(0)

        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

        x = draw(self.shape, torch.float64)
        if self.fill == "offset":
            x = x + 1000.0
        if self.fill == "edge":  # the first of each row is far from all others
            x[:, 0] = 1000.0
        if self.fill == "odd":
            flat = x.view(-1)
            flat[0], flat[-1] = torch.nan, torch.inf
        if self.fill == "huge":
            x[1] *= 1e25
        found = {"x": x.to(self.dtype), "grad": draw(self.shape, self.dtype)}
        if self.weight:
            found["weight"] = draw(self.params, self.param or self.dtype)
        if self.extra:
            found["extra"] = draw(self.shape, self.dtype)
        if self.bias and self.activation != "none":
            found["offset"] = draw(self.params, self.param or self.dtype)
        if "sum" in self.around:
            found["other"] = draw(self.rows, torch.bfloat16)
        if "dropout" in self.around:
            found["mask"] = draw(self.shape, torch.float64) > 0
        return found

    @property
    def rows(self) -> tuple[int, int]:
        columns = math.prod(self.params)
        return math.prod(self.shape) // columns, columns

    def before(self, feed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What goes into the activation, exactly."""
        x, w, b = (feed.get(n) for n in ("x", "weight", "offset"))
        params = [None if t is None else t.double() for t in (w, b)]
        given = params[:1] if self.op == "rms_norm" else params
        op = TABLE[self.op]
        return op.reference(x.double(), *given, **op.normalise(self.attrs))

    def region(self, feed: Mapping[str, torch.Tensor] | None = None) -> Region:
        feed = feed or self.feed()
        build = GraphBuilder(infer, self.op)
        ins = [
            build.input(n, TensorType.from_tensor(feed[n])) if n in feed else None
            for n in ("x", "grad", "weight", "extra", "offset")
        ]
        bias = "none"
        if self.bias and self.op != "rms_norm":
            bias = "same" if self.param in (None, self.dtype) else "f32"
        while ins[-1] is None:
            ins.pop()
        b = Ops(build)
        if "sum" in self.around:  # of gradients that lie in another shape, and in 16 bits
            other = b.sym(build.input("other", TensorType.from_tensor(feed["other"])))
            wide = b.cast(b.reshape(other, shape=self.shape), dtype=kind_of(self.dtype).short)
            ins[1] = (wide + b.sym(ins[1])).name
        attrs = {**self.attrs, "bias": bias, "activation": self.activation}
        outs = build.emit(f"{self.op}_grad", ins, attrs)
        names = [
            n
            for n in RESULTS
            if (n != "dweight" or self.weight) and (n != "dbias" or bias != "none")
        ]
        for name, out in zip(names, outs, strict=True):
            if name in self.keep:
                build.output(name, out)
        if "dropout" in self.around:
            mask = b.sym(build.input("mask", TensorType.from_tensor(feed["mask"])))
            kept = b.cast(b.sym(outs[0]), dtype="bf16") * b.cast(mask, dtype="bf16") * 1.25
            rows = b.reshape(kept, shape=self.rows)
            build.output("dropped", rows.name)
            if "bias" in self.around:
                total = b.sum(rows, axes=(0,), keepdim=True)
                build.output("total", b.cast(total, dtype="f32").name)
        done = build.finish()
        return Region(done, anchor=[n.op for n in done.nodes].index(f"{self.op}_grad"))


def wrong(case: Case, target: Target, device: str) -> str:
    """What is wrong with every candidate of the engine on the case, or nothing."""
    feed = case.feed()
    if case.activation != "none":
        feed["grad"] = calm(feed["grad"], case.before(feed))
    region = case.region(feed)
    refusal = ENGINE.refuse(region, target, Policy())
    if refusal is not None:
        return f"refused: {refusal.reason}"
    feed = {n: t.to(device) for n, t in feed.items()}
    exact = evaluate(region.graph, feed, float64=True)
    plain = evaluate(region.graph, feed)
    given = [feed[v] for v in region.inputs]
    ctx = BuildContext(target, torch.device(device), Policy(), {})
    found = []
    for candidate in ENGINE.candidates(region, target, Policy()):
        kernel = ENGINE.build(region, candidate, ctx)
        outs = []
        for value in region.outputs:
            t = region.graph.types[value]
            outs.append(torch.full(t.shape, 99.0, dtype=t.dtype.torch, device=device))
        kernel.fn(*given, *outs)
        again = [torch.full_like(out, 98.0) for out in outs]
        if device != "cpu":  # the interpreter runs one program after the other, always alike
            kernel.fn(*given, *again)
        for (name, _), out, twice in zip(region.graph.outputs, outs, again, strict=True):
            x = exact[name]
            if case.fill == "huge":  # nan is an answer, a number is right or wrong
                out = torch.where(out.isnan(), x.to(out.dtype), out)
            reduced = feed["x"].numel() // (x.numel() if name != "dx" else 1)
            limit = allowed(error(plain[name], x), out.dtype, max(reduced, 1))
            if not x.any():  # exactly 0, which a fused multiply-add misses by a rounding
                fine = float(out.abs().max()) <= CANCELLED * EPS[out.dtype] * float(
                    feed["grad"].abs().max()
                )
            else:
                fine = error(out, x) <= limit
            if not fine:
                found.append(f"{candidate}: {name} off by {error(out, x):.3g}, allowed {limit:.3g}")
            alike = device == "cpu" or torch.equal(out.nan_to_num(), twice.nan_to_num())
            if case.fill != "huge" and not alike:
                found.append(f"{candidate}: {name} differs from run to run")
    return "\n".join(found)


def small_cases() -> Iterator[Case]:
    """Every kind of kernel at sizes that divide by nothing, every type, every choice."""
    half, brain, f64 = torch.float16, torch.bfloat16, torch.float64
    for dtype in (torch.float32, half, brain, f64):
        yield Case("layer_norm", (7, 37), dtype, extra=True)
        yield Case("rms_norm", (33, 20), dtype)
    for dtype in (half, brain):
        yield Case("layer_norm", (5, 64), dtype, torch.float32)
        yield Case("rms_norm", (4, 2, 3, 5), dtype, torch.float32, attrs={"dims": 2}, extra=True)
        yield Case("group_norm", (2, 6, 5, 5), dtype, torch.float32, attrs={"groups": 2})
    for weight, bias in ((False, False), (False, True), (True, False)):
        yield Case("layer_norm", (6, 9), weight=weight, bias=bias, extra=weight)
        yield Case("group_norm", (2, 4, 3), weight=weight, bias=bias, attrs={"groups": 2})
    for keep in (("dx",), ("dweight",), ("dbias",), ("dx", "dbias")):
        yield Case("layer_norm", (40, 16), keep=keep)
        yield Case("instance_norm", (3, 4, 7), keep=keep)
    for dtype in (torch.float32, brain):  # with what is around it
        yield Case("layer_norm", (3, 7, 37), dtype, around=("sum",), extra=True)
        yield Case("layer_norm", (2, 16, 32), dtype, around=("dropout",), keep=("dweight",))
        yield Case("rms_norm", (4, 5, 20), dtype, around=("sum", "dropout", "bias"))
        yield Case("layer_norm", (1, 4, 16), dtype, around=("sum", "dropout", "bias"))
    yield Case("layer_norm", (64, 8), fill="offset")
    for dtype in (half, brain):  # taken relative to a value that lies far from all others
        yield Case("layer_norm", (64, 8), dtype, fill="offset")
        yield Case("layer_norm", (9, 300), dtype, fill="edge")
    yield Case("group_norm", (3, 4, 130), fill="offset", attrs={"groups": 2})
    yield Case("group_norm", (3, 4, 130), half, fill="offset", attrs={"groups": 2})
    yield Case("instance_norm", (2, 3, 5, 7), extra=True, fill="offset")
    yield Case("layer_norm", (6, 10), fill="odd")
    yield Case("rms_norm", (6, 10), fill="odd")
    yield Case("group_norm", (2, 4, 6), fill="odd", attrs={"groups": 2})
    for op in ("layer_norm", "rms_norm", "instance_norm"):
        yield Case(op, (6, 3, 10), fill="huge")
    yield Case("layer_norm", (3, 8200), torch.bfloat16, fill="huge")
    yield Case("layer_norm", (5, 16), attrs={"eps": 0.0})
    yield Case("rms_norm", (37, 12), attrs={"eps": 0.0})
    yield Case("layer_norm", (1, 1))
    yield Case("layer_norm", (5,))
    yield Case("rms_norm", (1, 300))
    yield Case("group_norm", (3, 4), attrs={"groups": 2, "eps": 0.01})
    yield Case("group_norm", (1, 70, 33), attrs={"groups": 1})
    yield Case("group_norm", (2, 6, 600), torch.float16, attrs={"groups": 3})
    for dtype in (torch.float32, brain):  # with what follows; tiles of one channel and of more
        yield Case("group_norm", (2, 6, 5, 5), dtype, attrs={"groups": 2}, activation="silu")
        yield Case(
            "instance_norm",
            (2, 3, 70, 30),
            dtype,
            weight=False,
            bias=False,
            extra=True,
            activation="relu",
        )
    yield Case("instance_norm", (2, 3, 40), activation="leaky_relu(negative_slope=0.2)")
    for act in ("gelu(approximate='tanh')", "sigmoid", "exp"):  # any formula
        yield Case("group_norm", (2, 6, 5, 5), attrs={"groups": 2}, activation=act)
    yield Case(
        "group_norm", (1, 20, 64), brain, torch.float32, activation="hardswish", attrs={"groups": 2}
    )
    yield Case("group_norm", (2, 4, 9), bias=False, activation="relu6", attrs={"groups": 1})
    yield Case("group_norm", (2, 4, 2**13), brain, activation="silu", attrs={"groups": 1})
    for dtype in (torch.float32, half):  # in parts: whole channels, and pieces of one
        yield Case(
            "group_norm",
            (2, 6, 20, 113),
            dtype,
            attrs={"groups": 1},
            extra=True,
            fill="offset",
            activation="relu",
        )
        yield Case("group_norm", (2, 4, 9000), dtype, attrs={"groups": 2}, weight=False)
        # no equal parts: of 15013 positions, a prime, and of 31 channels of 1000
        yield Case("group_norm", (1, 2, 15013), dtype, attrs={"groups": 1}, activation="silu")
        yield Case("group_norm", (2, 31, 1000), dtype, attrs={"groups": 1}, fill="offset")
    for dtype in (torch.float32, brain):
        yield Case("layer_norm", (5, 8200), dtype, extra=True)
        yield Case("rms_norm", (3, 16384), dtype)
    yield Case("layer_norm", (2, 2100), f64, keep=("dweight", "dbias"))


@dataclass(frozen=True)
class Forward:
    """A norm of groups and what follows it, on random tensors."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    act: str | None = None
    affine: bool = True
    fill: str = "normal"
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def feed(self) -> dict[str, torch.Tensor]:
        case = Case(
            self.op,
            self.shape,
            self.dtype,
            weight=self.affine,
            activation="relu",
            bias=self.affine,
            fill=self.fill,
        )
        found = case.feed()
        del found["grad"]
        return found

    def region(self, feed: Mapping[str, torch.Tensor]) -> Region:
        build = GraphBuilder(infer, self.op)
        ins = [build.input(n, TensorType.from_tensor(t)) for n, t in feed.items()]
        (y,) = build.emit(self.op, ins, self.attrs)
        if self.act is not None:
            (y,) = build.emit(self.act, [y], {})
        build.output("y", y)
        return Region(build.finish(), anchor=0)


def wrong_forward(case: Forward, target: Target, device: str) -> str:
    """What is wrong with every candidate of the engine on the case, or nothing."""
    feed = case.feed()
    region = case.region(feed)
    refusal = ENGINE.refuse(region, target, Policy())
    if refusal is not None:
        return f"refused: {refusal.reason}"
    feed = {n: t.to(device) for n, t in feed.items()}
    exact = evaluate(region.graph, feed, float64=True)["y"]
    limit = allowed(error(evaluate(region.graph, feed)["y"], exact), case.dtype)
    found = []
    for candidate in ENGINE.candidates(region, target, Policy()):
        ctx = BuildContext(target, torch.device(device), Policy(), {})
        out = torch.full(case.shape, 99.0, dtype=case.dtype, device=device)
        ENGINE.build(region, candidate, ctx).fn(*(feed[v] for v in region.inputs), out)
        off = error(out, exact)
        if not off <= limit:
            found.append(f"{candidate}: off by {off:.3g}, allowed {limit:.3g}")
    return "\n".join(found)


def forward_cases() -> Iterator[Forward]:
    """Groups that registers hold and parts of groups, tiles of one channel and of many."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Forward("group_norm", (2, 6, 5, 5), dtype, "silu", attrs={"groups": 2})
        yield Forward("instance_norm", (2, 3, 70, 30), dtype, "relu", affine=False)
        yield Forward("group_norm", (2, 6, 20, 113), dtype, fill="offset", attrs={"groups": 1})
        yield Forward("group_norm", (1, 2, 17000), dtype, "hardswish", attrs={"groups": 1})
    yield Forward("group_norm", (1, 2, 15013), torch.float16, "gelu", attrs={"groups": 1})
    yield Forward("group_norm", (2, 31, 1000), fill="offset", attrs={"groups": 1})
    yield Forward("instance_norm", (2, 3, 40), act="leaky_relu", fill="edge")
    yield Forward("group_norm", (2, 4, 6), act="relu6", fill="odd", attrs={"groups": 2})
    yield Forward("group_norm", (3, 4), attrs={"groups": 2, "eps": 0.01})


def quick_tuples() -> None:
    """The interpreter reduces tuples element by element; numpy is quicker."""
    from triton.runtime import interpreter as ti

    slow = ti.ReduceOps.apply_impl

    def apply_impl(self, given):
        if getattr(getattr(self.combine_fn, "fn", None), "__name__", "") not in (
            "_plus2",
            "_plus3",
            "_plus4",
        ):
            return slow(self, given)
        sums = [g.handle.data.sum(axis=self.axis, keepdims=self.keep_dims) for g in given]
        return tuple(self.to_tensor(s, g.dtype) for s, g in zip(sums, given, strict=True))

    ti.ReduceOps.apply_impl = apply_impl


def main() -> None:
    from deuteron.target import GPUS

    quick_tuples()
    tiny = replace(GPUS["h200"], units=2)  # so that programs take several rows
    cases = list(small_cases())
    failed = {str(c): w for c in cases if (w := wrong(c, tiny, "cpu"))}
    failed |= {str(c): w for c in forward_cases() if (w := wrong_forward(c, tiny, "cpu"))}
    print(json.dumps({"count": len(cases), "failed": failed}))


if __name__ == "__main__":
    main()
