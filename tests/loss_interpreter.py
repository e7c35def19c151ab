"""The kernel of cross-entropy in Triton's interpreter.

``python -m tests.interpreted tests.loss_interpreter f32`` tells what fails in a type.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import deuteron as dt
from deuteron.engines import BuildContext, engine
from deuteron.ir.region import Region
from deuteron.ops.evaluate import evaluate
from tests.interpreted import tell
from tests.tolerances import allowed, error

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
H200, POLICY = dt.target("h200"), dt.Policy()
NAMES = ("loss", "lse", "grad")


def wrong(
    x: torch.Tensor,
    y: torch.Tensor,
    gives: tuple[str, ...] = NAMES,
    in_place: bool = False,
    widened: bool = False,
    padded: int = 0,
    how: dict[str, Any] | None = None,
    **beside: torch.Tensor,
) -> str:
    """What is wrong with the kernel's results for these tensors, or nothing. Some rows count not at
    all, and two programs share the rows. ``widened``: logits and gradient are of 16 bits, and the
    operator is asked for float32. ``padded``: so many zeros follow each row of the gradient."""
    g = dt.Graph("loss")
    given = {"x": x, "y": y, **beside}
    syms = {n: g.tensor(n, t.shape, t.dtype, strides=t.stride()) for n, t in given.items()}
    logits = g.cast(syms["x"], dtype="f32") if widened else syms["x"]
    rest = {n: syms[n] for n in beside}
    results = g.cross_entropy_with_grad(logits, syms["y"], **rest, **(how or {}))
    for name, result in zip(NAMES, results, strict=True):
        if name in gives:
            narrow = widened and name == "grad"
            last = g.cast(result, dtype=x.dtype) if narrow else result
            if padded and name == "grad":
                last = g.pad(last, low=(0, 0), high=(0, padded), value=0.0)
            last.output(name)
    region = Region(g.ir())
    kernels = engine("triton_kernels")
    (candidate,) = kernels.candidates(region, H200, POLICY)
    knobs = {**candidate.knobs, "programs": min(2, candidate.knobs["programs"])}
    candidate = dt.Candidate("triton_kernels", candidate.version, knobs)
    context = BuildContext(H200, torch.device("cpu"), POLICY, {})
    kernel = kernels.build(region, candidate, context)
    exact = evaluate(region.graph, given, float64=True)
    plain = evaluate(region.graph, given)
    outs = []
    for (_, value), name in zip(region.graph.outputs, gives, strict=True):
        t = region.graph.types[value]
        over = in_place and name == "grad"
        assert not in_place or kernel.over
        outs.append(x if over else torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch))
    kernel.fill([given[v] for v in region.inputs], outs)
    for got, name in zip(outs, gives, strict=True):
        off = error(got, exact[name])
        bound = allowed(error(plain[name], exact[name]), got.dtype)
        if not off <= bound:
            return f"{name} of {list(x.shape)} {x.stride()} {how} {list(beside)}: {off} > {bound}"
    return ""


def targets(rows: int, classes: int) -> torch.Tensor:
    y = torch.randint(classes, (rows,))
    y[1::4] = -100
    return y


def failures(dtype: torch.dtype) -> Iterator[str]:
    """Rows in both sizes of tile, that start anywhere or at multiples of 16."""
    torch.manual_seed(0)
    for classes in (4099, 33001, 33008):
        x, y = (2 * torch.randn(4, classes)).to(dtype), targets(4, classes)
        yield wrong(x, y)
        yield wrong(x, y, scale=torch.tensor(0.25), z=torch.tensor(0.01))
        yield wrong(x, y, ("loss",), how={"label_smoothing": 0.1})
        yield wrong(x, y.abs(), ("grad",), how={"label_smoothing": 0.1, "ignore_index": 100})
        yield wrong(x, y.int(), weight=torch.rand(classes), scale=torch.rand(4))
        yield wrong(x.clone(), y, in_place=True, how={"label_smoothing": 0.1})
        yield wrong(x.clone(), y, ("grad",), in_place=True, scale=torch.tensor(0.5))
        if dtype != torch.float32:
            yield wrong(x, y, widened=True)
    wide = torch.randn(4, 9000).to(dtype)
    for x in (wide[:, 3:5012], wide[:, 16:5012], wide.view(2, 2, 9000).transpose(1, 2)):
        rows = (x.shape[0], *x.shape[2:])
        yield wrong(x, torch.randint(x.shape[1], rows))
    yield wrong(wide[:, :8989], targets(4, 8989), padded=11)  # rows that start alike
    yield wrong(wide[:, :8989], targets(4, 8989), padded=40, scale=torch.tensor(0.5))
    for classes, step in ((8989, 9008), (33001, 33024), (33000, 33008), (32773, 32784)):
        x, y = torch.randn(4, step).to(dtype)[:, :classes], targets(4, classes)  # that end anywhere
        yield wrong(x, y, padded=step - classes, scale=torch.tensor(0.5))
        yield wrong(x, y, ("loss",), how={"label_smoothing": 0.1})
    yield wrong(torch.randn(5000).to(dtype), torch.tensor(7))
    yield from strange(dtype)


def strange(dtype: torch.dtype) -> Iterator[str]:
    """Nan and infinities as torch has them; a class that does not exist makes its row nan."""
    x = torch.randn(6, 5000).to(dtype)
    x[0, 1], x[1, 1], x[2, 0], x[3, 2] = float("nan"), float("inf"), -float("inf"), -float("inf")
    x[4] = -float("inf")
    for smoothing in (0.0, 0.1):
        y = torch.tensor([1, 1, 1, 2, 0, 3])
        yield wrong(x, y, ("loss",), how={"label_smoothing": smoothing})
    g = dt.Graph("unknown")
    logits, y = g.tensor("x", (4, 5000)), g.tensor("y", (4,), "i64")
    for name, result in zip(NAMES, g.cross_entropy_with_grad(logits, y), strict=True):
        result.output(name)
    region, kernels = Region(g.ir()), engine("triton_kernels")
    (candidate,) = kernels.candidates(region, H200, POLICY)
    kernel = kernels.build(region, candidate, BuildContext(H200, torch.device("cpu"), POLICY, {}))
    loss, lse, grad = torch.empty(4), torch.empty(4), torch.empty(4, 5000)
    kernel.fill([torch.randn(4, 5000), torch.tensor([1, 5000, -1, -100])], [loss, lse, grad])
    nan = [False, True, True, False]
    right = loss.isnan().tolist() == nan == grad.isnan().all(1).tolist() and not grad[3].any()
    yield "" if right else f"classes that do not exist: {loss} {grad}"


def main() -> None:
    tell((1, [text] if text else []) for text in failures(TYPES[sys.argv[1]]))


if __name__ == "__main__":
    main()
