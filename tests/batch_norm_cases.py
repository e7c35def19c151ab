"""Batch norm kernels by case, against float64 and held to twice PyTorch's own error.

Shared by the tests in Triton's interpreter, ``python -m tests.interpreted tests.batch_norm_cases
some`` or ``all``, and those on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.triton.batch_norm_tiles import divide
from deuteron.ops.batch_norm import batch_norm_act as ACT
from deuteron.ops.batch_norm import batch_norm_act_grad as ACT_GRAD
from deuteron.ops.batch_norm import told_by_result
from deuteron.ops.evaluate import evaluate, implied
from deuteron.ops.signs import pack, side_by_side
from deuteron.passes import fuse
from deuteron.policy import Policy
from deuteron.target import GPUS
from tests.interpreted import tell_claims
from tests.optimised import optimised
from tests.tolerances import allowed, error, rounded_mean

H200 = GPUS["h200"]
FORWARD = ("y", "new_mean", "new_var", "mean", "rstd")  # results, as the kernels call them
ACTIVATIONS = (
    *("none", "relu", "relu6", "leaky_relu(negative_slope=0.1)", "silu", "hardswish"),
    *("leaky_relu(negative_slope=-0.5)", "gelu", "tanh", "sigmoid"),
)


@dataclass(frozen=True)
class Case:
    """A batch norm with what follows it. ``knobs`` go to the division of the work."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    last: bool = False
    activation: str = "relu"
    residual: bool = False
    params: str = "wbr"  # weight, bias, running statistics
    kind: str = "normal"
    knobs: tuple[tuple[str, int], ...] = ()
    signs: bool = False  # relu's are kept as bits

    def __str__(self) -> str:
        order = "last" if self.last else "first"
        knobs = "".join(f" {k}={v}" for k, v in self.knobs) + (" signs" if self.signs else "")
        return (
            f"{'x'.join(map(str, self.shape))} {str(self.dtype)[6:]} {order} {self.activation}"
            f"{' residual' if self.residual else ''} {self.params or 'bare'} {self.kind}{knobs}"
        )

    @property
    def by_y(self) -> bool:
        return self.residual and told_by_result(self.activation)

    @property
    def packed(self) -> str:
        return "none" if not self.signs else "channels" if self.last else "positions"

    def image(self, device: str, generator: torch.Generator) -> torch.Tensor:
        t = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.last and len(self.shape) > 2:
            t = t.movedim(1, -1).contiguous().movedim(-1, 1)
        return t.to(self.dtype).to(device)

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor | None]:
        gen = torch.Generator().manual_seed(hash(self.shape) % 1000)
        c = self.shape[1:2]
        x = self.image(device, gen)
        if self.kind == "offset":
            x = (x.double() + 1000.0).to(self.dtype)
        if self.kind == "edge":  # the first pixel is far from all others
            x = (x.double() + 1000.0).to(self.dtype)
            x.view(-1)[0:1].zero_() if x.is_contiguous() else x[(0,) * x.ndim].zero_()
        if self.kind == "huge":  # numbers of which the squares overflow
            x[:, 0] = (x[:, 0].double() * 1e25).to(self.dtype)
        if self.kind == "odd":
            x[(0,) * x.ndim] = torch.nan
            x[(-1,) * x.ndim] = torch.inf

        def given(letter: str, positive: bool = False) -> torch.Tensor | None:
            t = torch.rand(c, generator=gen) + 0.5 if positive else torch.randn(c, generator=gen)
            return t.to(device) if letter in self.params else None

        return {
            "x": x,
            "weight": given("w"),
            "bias": given("b"),
            "running_mean": given("r"),
            "running_var": given("r", positive=True),
            "residual": self.image(device, gen) if self.residual else None,
            "grad": self.image(device, gen),
        }


def calm(grad: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``grad``, but 0 where z is so near to a corner of an activation that rounding decides on
    which side it lies: there no two ways agree."""
    near = torch.stack([(z - corner).abs() < 0.05 for corner in (-3.0, 0.0, 3.0, 6.0)]).any(0)
    return torch.where(near, 0.0, grad).to(grad.dtype)


def _wide(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.double() if t is not None and t.is_floating_point() else t


def run(case: Case, device: str = "cpu", units: int = 4) -> str:
    """The case through the kernels: what is wrong with it, or nothing."""
    from deuteron.kernels.triton.batch_norm import Operands, backward, forward

    t = case.tensors(device)
    x, grad = t["x"], t.pop("grad")
    assert x is not None and grad is not None
    act, exact_type = (
        {"activation": case.activation, "packed": case.packed},
        case.dtype == torch.float32,
    )
    attrs = {"momentum": 0.3, "eps": 1e-3, **act}
    d = divide(case.shape, case.last, units, **dict(case.knobs))
    types = ACT.infer(
        *(None if v is None else TensorType.from_tensor(v) for v in t.values()), **attrs
    )
    outs = [_filled(like, x) for like in types]
    signs = outs[5] if case.signs else None
    made = dict(zip(FORWARD, outs[:5], strict=True), signs=signs)
    forward(d, 0.3, 1e-3, case.activation, exact_type)(Operands(**t, **made))
    exact = ACT.reference(*map(_wide, t.values()), **attrs)
    theirs = ACT.reference(*t.values(), **attrs)
    names = ("y", "running mean", "running var", "mean", "rstd")
    wrong = _compare(case, names, outs, exact, theirs)
    if signs is not None and not torch.equal(signs, pack(outs[0], case.packed)):
        wrong.append("signs are not those of y")

    flat = ACT.reference(*map(_wide, t.values()), **attrs | {"activation": "none"})[0]
    grad.copy_(calm(grad, flat))
    y, mean, rstd = torch.empty_like(x).copy_(theirs[0]), theirs[3], theirs[4]
    given = {
        "grad": grad,
        "x": x,
        "mean": mean,
        "rstd": rstd,
        "weight": t["weight"],
        "bias": t["bias"],
        "y": y if case.by_y and not case.signs else None,
        "residual": t["residual"] if not case.by_y else None,
        "signs": pack(y, case.packed) if case.signs else None,
    }
    remade = given["y"] is None
    if remade:  # y once more, of x and the residual
        act, given["residual"] = act | {"again": True}, t["residual"]
    types = ACT_GRAD.infer(
        *(None if v is None else TensorType.from_tensor(v) for v in given.values()), **act
    )
    exact = ACT_GRAD.reference(*map(_wide, given.values()), **act)
    theirs = ACT_GRAD.reference(*given.values(), **act)

    def back(given: dict[str, torch.Tensor | None], names: Sequence[str]) -> list[torch.Tensor]:
        outs = [_filled(like, x) for like in types]
        run = backward(d, case.activation, given["y"] is not None, exact_type)
        fifth = {"again": outs[4]} if remade and given["y"] is None else {}
        run(Operands(**given, **dict(zip(names, outs, strict=False)), **fifth))
        return outs

    for with_dz in (True, False) if case.residual else (False,):
        names = ("dx", "dweight", "dbias", "dz")[: 4 if with_dz else 3]
        outs = back(given, names)
        wrong += _compare(case, names, outs, exact, theirs)
        wrong += _compare(case, ("y again",), outs[4:], exact[4:], theirs[4:])
        if case.signs:  # which say the same as y
            again = back(given | {"y": y, "residual": None, "signs": None}, names)
            wrong += [
                f"{name} differs from that by y"
                for name, a, b in zip(names, outs, again, strict=False)
                if not same_bits(a, b)
            ]
    return "; ".join(wrong)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are equal, nan included."""
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


def mean_near_zero(last: bool) -> str:
    """The mean of values around 0, held to a few roundings of its own size as measuring does."""
    from deuteron.kernels.triton.batch_norm import Operands, forward

    case = Case((8, 8, 16, 16), torch.float16, last, "none", False, knobs=SPLIT)
    x = case.image("cpu", torch.Generator().manual_seed(1))
    y, *statistics = torch.empty_like(x), *(torch.empty(8) for _ in range(4))
    d = divide(case.shape, last, 4, **dict(SPLIT))
    made = dict(zip(FORWARD, (y, *statistics), strict=True))
    forward(d, 0.1, 1e-5, "none", False)(Operands(x, **made))
    off = error(statistics[2], x.double().mean((0, 2, 3)))
    bound = allowed(0.0, torch.float32)
    return "" if off <= bound else f"mean is off by {off:.2e}, allowed {bound:.2e}"


def _filled(like: TensorType, x: torch.Tensor) -> torch.Tensor:
    """A tensor to write to, full of what no kernel would write."""
    odd = torch.nan if like.dtype.is_float else 0xA5
    if like.shape == x.shape:
        return torch.full_like(x, odd)
    return torch.full(like.shape, odd, dtype=like.dtype.torch, device=x.device)


def _compare(case, names, outs, exact, theirs) -> list[str]:
    wrong = []
    for name, got, truth, torchs in zip(names, outs, exact, theirs, strict=False):
        if case.kind == "huge":  # nan is an answer, a number is right or wrong
            got = torch.where(got.isnan(), truth.to(got.dtype), got)
        off, bound = error(got, truth), allowed(error(torchs, truth), got.dtype, _depth(case, name))
        if case.kind == "edge" and name == "y":
            # all other channels lie 1000 deviations from 0, and their mean is kept in float32
            bound += rounded_mean(1000, torch.float32)
        if case.kind == "odd":
            off = 0.0 if torch.equal(got.isfinite(), torchs.isfinite()) else off
        if not off <= bound:
            wrong.append(f"{name} is off by {off:.2e}, allowed {bound:.2e}")
    return wrong


def _depth(case: Case, name: str) -> int:
    """How many values a sum has, where the result is one."""
    per_channel = 1
    for size in (case.shape[0], *case.shape[2:]):
        per_channel *= size
    return (
        per_channel
        if name in ("mean", "running mean", "running var", "rstd", "dweight", "dbias")
        else 1
    )


SHAPES = (
    (3, 5, 7),
    (2, 37),
    (5, 3, 7, 9),
    (4, 70, 3, 5),
    (2, 64, 4, 4),
    (2, 6, 2, 3, 5),
    (6, 1, 11, 13),
    (3, 10, 20, 20),
)
# at least 8 channels and 8 positions: rows that are whole bytes and rows that are not
PACKABLE = ((2, 16, 4, 4), (5, 9, 3, 5), (3, 12, 11), (2, 19, 3, 3))
SPLIT = (("tile", 256), ("each", 2), ("once", False))


def cases() -> Iterator[Case]:
    """Small shapes in both orders: every activation, with and without all that may be left out."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    params, kinds = ("wbr", "wb", "", "w"), ("normal", "offset", "edge", "normal", "odd")
    count = 0
    for shape, last, residual in product(SHAPES, (False, True), (False, True)):
        for k in range(2):
            activation = ACTIVATIONS[count % len(ACTIVATIONS)]
            case = Case(
                shape,
                dtypes[count % 3],
                last,
                activation,
                residual,
                params[(count // 2) % 4],
                kinds[(count // 3) % 5],
            )
            if case.kind == "odd" or (case.kind != "normal" and case.dtype == torch.bfloat16):
                case = replace(case, activation="relu" if count % 2 else "none")
            yield replace(case, knobs=SPLIT) if k else case
            count += 1
    for last, knobs in product((False, True), ((), SPLIT)):
        yield Case((3, 5, 7), torch.bfloat16, last, "none", False, "wb", "huge", knobs=knobs)
    for i, (shape, last) in enumerate(product(PACKABLE, (False, True))):
        kind, knobs = ("odd" if i == 4 else "normal"), (SPLIT if i % 3 else ())
        yield Case(
            shape, dtypes[i % 3], last, "relu", i != 5, params[i % 4], kind, knobs=knobs, signs=True
        )


# ---- the same through the engine: every value at its place, other orders converted


def regions() -> Iterator[tuple[str, Region]]:
    """Regions as the planner makes them, some of them with tensors in orders that differ."""
    shape, half = (2, 6, 3, 5), dt.float16
    for order, other in (("nhwc", "nhwc"), ("nhwc", "contiguous"), ("contiguous", "nhwc")):
        g = dt.Graph("act")
        x = g.tensor("x", shape, half, layout=order)
        r = g.tensor("r", shape, half, layout=other)
        w, b, m, v = (g.tensor(n, (6,)) for n in "wbmv")
        y, mean, *_ = g.batch_norm_act(x, w, b, m, v, r, activation="silu")
        y.output("y")
        mean.output("mean")
        back = g.grad("y", wrt=["x", "b", "r"])
        for region in fuse(optimised(back.ir(), H200)[0])[0]:
            yield f"{order} {other} {region.ops}", region
    for order in ("nhwc", "contiguous"):
        for region in _with_signs(order):
            yield f"{order} {region.ops} with signs", region
    g = dt.Graph("train")
    x, r = (g.tensor(n, (3, 4, 5)) for n in "xr")
    y, _, var, *_ = g.batch_norm_train(x, None, g.tensor("b", (4,), strides=(2,)), eps=0.1)
    g.leaky_relu(r + y, negative_slope=0.3).output("y")
    var.output("var")
    for region in fuse(g.ir())[0]:
        yield str(region.ops), region


def _with_signs(order: str) -> Sequence[Region]:
    g = dt.Graph("signs")
    x, r = (g.tensor(n, (2, 12, 3, 5), dt.float16, layout=order) for n in "xr")
    packed = side_by_side(x.type)
    g.batch_norm_act(x, residual=r, activation="relu", packed=packed)[0].output("y")
    done, _ = optimised(g.grad("y", wrt=["x", "r"]).ir(), H200)
    return fuse(done)[0]


def run_region(region: Region, most: int | None = None) -> str:
    """The region built by the engine and run: what is wrong with it, or nothing."""
    engine, types = TritonKernels(), region.graph.types
    gen = torch.Generator().manual_seed(0)

    def tensor(name: str) -> torch.Tensor:
        t = types[name]
        out = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch)
        if not t.dtype.is_float:
            return torch.randint(0, 256, t.shape, generator=gen).to(t.dtype.torch)
        return out.copy_(torch.rand(t.shape, generator=gen) + 0.1)

    feed = {name: tensor(name) for name in region.inputs}
    exact, theirs = evaluate(region.graph, feed, float64=True), evaluate(region.graph, feed)
    ctx = BuildContext(H200, torch.device("cpu"), Policy(), {})
    wrong = []
    for candidate in engine.candidates(region, H200, Policy())[:most]:
        outs = [_filled(types[value], tensor(value)) for value in region.outputs]
        engine.build(region, candidate, ctx).fill(list(feed.values()), outs)
        found = {name: out for (name, _), out in zip(region.graph.outputs, outs, strict=True)}
        exact |= implied(region.graph, found)
        for (name, _), out in zip(region.graph.outputs, outs, strict=True):
            off, bound = (
                error(out, exact[name]),
                allowed(error(theirs[name], exact[name]), out.dtype, 30),
            )
            if not off <= bound:
                wrong.append(f"{candidate} {name} is off by {off:.2e}, allowed {bound:.2e}")
    return "; ".join(wrong)


def main() -> None:
    everything = sys.argv[1] == "all"
    work: dict[str, Callable[[], str]] = {
        str(case): partial(run, case)
        for k, case in enumerate(cases())
        if everything or k % 5 in (0, 2)  # every shape, type, order, activation and division
    }
    most = None if everything else 1
    work |= {name: partial(run_region, region, most) for name, region in regions()}
    work |= {f"mean near 0 {last}": partial(mean_near_zero, last) for last in (True, False)}
    tell_claims(work)


if __name__ == "__main__":
    main()
