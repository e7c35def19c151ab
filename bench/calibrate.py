"""Every engine over a grid of shapes, so that estimates learn by how much they are off.

``python -m bench.calibrate --out bench/results`` measures, on random shapes that are those of no
network; with ``--gradients --count 300`` gradients of convolutions, with ``--grouped --count 80``
those of grouped ones, which join the record.
``python -m bench.calibrate --fit bench/results/calibration-h200.json`` takes the record, estimates
the same work with the code as it is now, which needs no GPU, and writes the ratios to
``deuteron/engines/measured``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.harness import describe
from deuteron.engines import BuildContext
from deuteron.engines.calibration import FOLDER, LEAST, WAYS, Kind, Place, kind_of, place_of
from deuteron.files import write_atomic
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import Ops, infer
from deuteron.ops.emit import Sym
from deuteron.plan.builders import arch_of, builders
from deuteron.plan.cache import Cache, plain_knobs
from deuteron.plan.choose import PATIENCE_S, Option, Survey, heaviest
from deuteron.plan.find import Finder
from deuteron.plan.tensors import random_tensor
from deuteron.plan.timing import timed
from deuteron.policy import Policy
from deuteron.target import GPUS, target

CASES = 1800
ENOUGH = 8  # measurements of a kind that has a correction of its own
FOLDS = 5  # parts that are predicted from the others
LARGEST = 1 << 26  # elements of a tensor
OF_A_WAY = 2  # candidates of an engine's way that are measured
RECORD = "calibration-h200.json"
SECONDS = 0.03  # for one region's contenders
LONG_S = 8e-6  # from which a time tells more than what a launch takes


class Drawn:
    """A region in the making, with sizes drawn at random."""

    def __init__(self, seed: int) -> None:
        self.rng, self.build = random.Random(seed), GraphBuilder(infer, f"case{seed}")
        self.ops, self.fixed = Ops(self.build), set[str]()
        self.dtype = self.one("f16 f16 f16 f16 f16 bf16 f32".split())

    def one(self, of: Any) -> Any:
        return self.rng.choice(list(of))

    def between(self, low: int, high: int) -> int:
        """On a logarithmic scale: as many small ones as large ones."""
        return round(low * (high / low) ** self.rng.random())

    def channels(self, low: int = 8, high: int = 2048) -> int:
        """Mostly multiples of 8, as in networks."""
        step = self.one((8, 8, 8, 16, 16, 32, 32, 64, 64) * 3 + (1,))
        return max(step, self.between(low, high) // step * step)

    def input(self, *shape: int, order: str = "contiguous", dtype: str = "") -> Sym:
        kind = TensorType.of(shape, dtype or self.dtype, order)
        return self.ops.sym(self.build.input(f"x{len(self.build.types)}", kind))

    def weight(self, *shape: int, order: str = "contiguous") -> Sym:
        found = self.input(*shape, order=order)
        self.fixed.add(found.name)
        return found

    def image(self, channels: int = 0) -> Sym:
        batch, side = self.one((1, 1, 2, 4, 8, 16, 32, 32, 64)), self.between(7, 256)
        channels = channels or self.channels()
        other = side if self.rng.random() < 0.8 else self.between(7, 256)
        while batch * channels * side * other > LARGEST:
            batch, side, other = max(1, batch // 2), max(7, side * 2 // 3), max(7, other * 2 // 3)
        order = self.one(("nhwc",) * 6 + ("contiguous",))
        return self.input(batch, channels, side, other, order=order)

    def rows(self, features: int = 0) -> Sym:
        features = features or self.channels(16, 8192)
        count = min(self.between(1, 65536), max(1, LARGEST // features))
        if self.rng.random() < 0.5:
            return self.input(count, features)
        first = self.one(n for n in (1, 2, 4, 8, 16, 32) if n <= count)
        return self.input(first, count // first, features)

    def then(self, x: Sym, several: bool = True) -> Sym:
        """Perhaps an activation, perhaps a residual before it."""
        kind = self.rng.random()
        if kind < 0.25 and several:
            order = "nhwc" if x.rank == 4 and x.type.is_layout("nhwc") else "contiguous"
            x = self.ops.add(x, self.input(*x.shape, order=order))
        names = ("relu", "relu", "silu", "gelu", "hardswish", "sigmoid")
        return getattr(self.ops, self.one(names))(x) if kind < 0.6 else x

    def region(self) -> Region:
        graph = self.build.finish()
        fixed = frozenset(v for v in graph.inputs if v in self.fixed)
        return Region(graph, fixed, heaviest(graph.nodes))


# ---- what is computed


def _convolution(d: Drawn, kernels: Any = (3, 3, 3, 5, 7), groups: Any = (1,)) -> Sym:
    group = d.one(groups)
    width = d.one((8, 16, 24, 32, 48, 64)) if group > 1 else 0
    x = d.image(
        width * group if group > 1 else d.one((3, d.channels(), d.channels(), d.channels()))
    )
    out = x.shape[1] if group > 1 else d.channels(8, 1024)
    k, stride = d.one(kernels), d.one((1, 1, 1, 2))
    while 2 * out * x.type.numel * k * k // group > 4e11:
        k, out = max(1, k // 2), max(group, out // 2 // group * group)
    order = "nhwc" if x.type.is_layout("nhwc") else "contiguous"
    w = d.weight(out, x.shape[1] // group, k, k, order=order)
    bias = d.weight(out) if d.rng.random() < 0.8 else None
    how = {"stride": stride, "padding": k // 2, "groups": group}
    return d.then(d.ops.conv(x, w, bias, **how))


def _pixels(d: Drawn) -> Sym:
    return _convolution(d, (1,))


def _grouped(d: Drawn) -> Sym:
    return _convolution(d, (3,), (2, 4, 8, 9, 16, 24, 32, 63))


def _depthwise(d: Drawn) -> Sym:
    x, k = d.image(), d.one((3, 3, 5, 7))
    w = d.weight(x.shape[1], 1, k, k)
    how = {"stride": d.one((1, 1, 2)), "padding": k // 2, "groups": x.shape[1]}
    return d.then(d.ops.conv(x, w, d.weight(x.shape[1]), **how))


def _transposed(d: Drawn) -> Sym:
    x, k = d.image(d.channels(16, 512)), d.one((2, 4))
    w = d.weight(x.shape[1], d.channels(16, 256), k, k)
    return d.ops.conv(x, w, None, stride=2, padding=(k - 2) // 2, transposed=True)


def _linear(d: Drawn) -> Sym:
    x = d.rows()
    w = d.weight(d.channels(16, 8192), x.shape[-1])
    bias = d.weight(w.shape[0]) if d.rng.random() < 0.7 else None
    return d.then(d.ops.linear(x, w, bias))


def _matmul(d: Drawn) -> Sym:
    batch, m, n, k = d.between(1, 512), *(d.between(8, 2048) for _ in range(3))
    while batch * max(m * n, m * k, k * n) > LARGEST:
        batch = max(1, batch // 2)
        m, n, k = (max(8, s * 3 // 4) for s in (m, n, k))
    x, y = d.input(batch, m, k), d.input(batch, k, n)
    return d.ops.matmul(x, y)


def _attention(d: Drawn) -> Sym:
    batch, heads, width = (
        d.one((1, 2, 4, 8, 32)),
        d.one((4, 8, 12, 16, 32)),
        d.one((32, 64, 80, 128)),
    )
    length = d.between(16, 4096)
    while batch * heads * length * max(width, length // 8) > LARGEST:
        batch, length = max(1, batch // 2), max(16, length * 2 // 3)
    keys = length if d.rng.random() < 0.8 else d.between(16, length)
    heads_of_keys = heads if d.rng.random() < 0.8 else heads // 4
    q = d.input(batch, heads, length, width)
    k, v = (d.input(batch, heads_of_keys, keys, width) for _ in range(2))
    kind = d.rng.random()
    mask = d.input(batch, 1, length, keys) if kind < 0.3 else None
    return d.ops.attention(q, k, v, mask, causal=kind > 0.7)


def _norm(d: Drawn) -> Sym:
    x = d.rows()
    if d.rng.random() < 0.4:
        x = d.ops.add(x, d.input(*x.shape))
    w, b = d.weight(x.shape[-1]), d.weight(x.shape[-1])
    kind = d.one(("layer", "layer", "rms", "softmax"))
    if kind == "layer":
        return d.ops.layer_norm(x, w, b, dims=1)
    return d.ops.rms_norm(x, w, dims=1) if kind == "rms" else d.ops.softmax(x, axis=x.rank - 1)


def _of_groups(d: Drawn) -> Sym:
    x = d.image(32 * d.between(1, 32))
    return d.then(d.ops.group_norm(x, d.weight(x.shape[1]), d.weight(x.shape[1]), groups=32))


def _mean(d: Drawn) -> Sym:
    if d.rng.random() < 0.7:
        return d.ops.mean(d.image(), axes=(2, 3), keepdim=d.rng.random() < 0.5)
    return getattr(d.ops, d.one(("mean", "sum", "max")))(d.rows(), axes=(-1,))


def _chain(d: Drawn) -> Sym:
    image = d.rng.random() < 0.6
    x = d.image() if image else d.rows()
    order = "nhwc" if image and x.type.is_layout("nhwc") else "contiguous"
    for _ in range(d.between(1, 6)):
        kind = d.rng.random()
        if kind < 0.5:
            names = ("relu", "silu", "gelu", "hardswish", "sigmoid", "tanh", "neg", "square")
            x = getattr(d.ops, d.one(names))(x)
        elif kind < 0.7:
            x = d.ops.add(x, d.input(*x.shape, order=order))
        elif kind < 0.85 and image:
            x = d.ops.mul(x, d.input(*x.shape[:2], 1, 1))
        else:
            x = d.ops.mul(x, d.weight(x.shape[1], 1, 1) if image else d.weight(x.shape[-1]))
    return x


def _pool(d: Drawn) -> Sym:
    k, stride = d.one((2, 3, 3, 5)), d.one((1, 2, 2))
    how = {"kernel": k, "stride": stride, "padding": k // 2 if d.rng.random() < 0.6 else 0}
    return getattr(d.ops, d.one(("max_pool", "avg_pool")))(d.image(), **how)


def _resize(d: Drawn) -> Sym:
    x = d.image(d.channels(3, 512))
    by = d.one((2, 2, 4, 0.5))
    size = tuple(max(1, int(s * by)) for s in x.shape[2:])
    while x.type.numel * by * by > LARGEST:
        return d.ops.relu(x)
    return d.ops.resize(x, size=size, mode=d.one(("bilinear", "bilinear", "nearest")))


def _concat(d: Drawn) -> Sym:
    first = d.image(d.channels(8, 256))
    order = "nhwc" if first.type.is_layout("nhwc") else "contiguous"
    sizes = [d.channels(8, 256) for _ in range(d.between(1, 5))]
    others = [d.input(first.shape[0], c, *first.shape[2:], order=order) for c in sizes]
    return d.then(d.ops.concat([first, *others], axis=1), several=False)


def _moved(d: Drawn) -> Sym:
    if d.rng.random() < 0.5:
        x = d.image()
        return d.ops.to_layout(x, "contiguous" if x.type.is_layout("nhwc") else "nhwc")
    batch, length, heads, width = d.one((1, 8, 32)), d.between(16, 2048), d.one((4, 12, 32)), 64
    x = d.input(batch, length, heads * width)
    split = d.ops.permute(d.ops.reshape(x, (batch, length, heads, width)), (0, 2, 1, 3))
    return d.ops.to_layout(split, "contiguous")


def _looked_up(d: Drawn) -> Sym:
    ids = d.input(d.one((1, 8, 32)), d.between(16, 2048), dtype="i64")
    return d.ops.embedding(d.weight(d.between(1000, 60000), d.channels(64, 4096)), ids)


FAMILIES: tuple[Callable[[Drawn], Sym], ...] = (
    *(_convolution, _convolution, _convolution, _convolution, _convolution, _transposed),
    *(_pixels, _pixels, _pixels, _pixels, _grouped, _grouped, _depthwise, _depthwise),
    *(_linear, _linear, _linear, _matmul, _matmul, _attention, _attention, _norm, _norm),
    *(_of_groups, _mean, _mean, _chain, _chain, _chain, _pool, _resize, _concat),
    *(_moved, _looked_up),
)


# ---- what training adds: cases of their own numbers, so that those of a record stay what they were

GRADIENTS = 100_000  # the first of them
GROUPED = 200_000  # and of those with groups of several channels


def _pulled(d: Drawn) -> Sym:
    """A gradient of a convolution, for its input or its weight."""
    alone, of_input = d.rng.random() < 0.3, d.rng.random() < 0.45
    dy = d.image(d.channels(16, 1024))
    outs = dy.shape[1]
    k = d.one((3, 3, 5, 7) if alone else (1, 1, 1, 3, 3, 3, 3, 5, 7))
    stride, channels = d.one((1, 1, 1, 2)), outs if alone else d.channels(16, 1024)
    return _gradient(d, dy, channels, outs if alone else 1, k, stride, of_input)


def _pulled_by_groups(d: Drawn) -> Sym:
    each, groups = d.one((4, 8, 16, 32, 64, 12, 24)), d.one((4, 8, 16, 32))
    dy = d.image(each * groups)
    return _gradient(d, dy, each * groups, groups, 3, d.one((1, 1, 2)), d.rng.random() < 0.5)


def _gradient(
    d: Drawn, dy: Sym, channels: int, groups: int, k: int, stride: int, of_input: bool
) -> Sym:
    batch, outs, *sizes = dy.shape
    alone = groups == outs
    x = (batch, channels, *(n * stride for n in sizes))  # of which the result is that large
    while 2 * channels // groups * dy.type.numel * k * k > 4e11 or math.prod(x) > LARGEST:
        if k == 1 and stride == 1:
            break
        k, stride = (1, stride) if k > 1 and not alone else (k, 1)
        x = (batch, channels, *(n * stride for n in sizes))
    order = "nhwc" if dy.type.is_layout("nhwc") else "contiguous"
    w = (outs, channels // groups, k, k)
    how = {"stride": stride, "padding": k // 2, "groups": groups}
    if of_input:
        return d.ops.one("conv_dx", dy, d.input(*w, order=order), shape=x, **how)
    return d.ops.one("conv_dw", dy, d.input(*x, order=order), shape=w, **how)


ADDED = {GRADIENTS: _pulled, GROUPED: _pulled_by_groups}


def case(seed: int) -> Region | None:
    """Region number ``seed``: always the same. None where what was drawn does not fit together."""
    drawn = Drawn(seed)
    try:
        families = [f for first, f in ADDED.items() if seed >= first]
        (families or [FAMILIES[seed % len(FAMILIES)]])[-1](drawn).output("y")
    except Exception:
        return None
    found = drawn.region()
    large = max(t.numel for t in found.graph.types.values()) > 2 * LARGEST
    return None if large else found


def contenders(survey: Survey, region: Region) -> list[Option]:
    """The most promising of each engine's ways."""
    seen: dict[Any, int] = {}
    found = []
    for option in survey.ask(region)[0]:
        way = kind_of(region, option.candidate)
        seen[way] = seen.get(way, 0) + 1
        searched = any(n.op in ("conv_dx", "conv_dw") for n in region.nodes)
        if searched and not option.candidate.by_estimate:
            continue  # whose estimates only say what a search measures first
        if seen[way] <= OF_A_WAY and option.candidate.build_s <= PATIENCE_S:
            found.append(option)
    return found


# ---- measuring


def measure(seeds: range, out: str, seconds: float = math.inf) -> None:
    """On the GPU that is here, for so long. Rows on file of other cases are kept."""
    device, policy = torch.device("cuda", torch.cuda.current_device()), Policy()
    machine, pool = target("h200"), builders()
    assert pool is not None
    survey, cache, gen = Survey(machine, policy), Cache.open(), torch.Generator(device=device)
    work, begin = [], time.perf_counter()
    for seed in seeds:
        region = case(seed)
        if region is not None:
            work.append((seed, region, contenders(survey, region)))
            for option in work[-1][2]:
                pool.ask(region, option.candidate, machine, policy, arch_of(device))
    print(f"{len(work)} regions ordered in {time.perf_counter() - begin:.0f} s", flush=True)
    rows = [row for row in _rows(out) if row["case"] not in seeds]
    for k, (seed, region, options) in enumerate(work):
        if time.perf_counter() - begin > seconds:
            print(f"{k} of {len(work)} in {seconds:.0f} s")
            break
        types = region.graph.types
        fixed = {v: random_tensor(types[v], device, gen, 100) for v in region.constants}
        finder = Finder(survey, device, fixed, cache, 1e9, pool=pool)
        try:
            feed = finder.inputs(region)
        except RuntimeError:
            continue
        args, ctx = [feed[v] for v in region.inputs], BuildContext(machine, device, policy, fixed)
        thunks = {}
        for i, option in enumerate(options):
            pool.wait(lambda o=option, r=region: pool.is_built(r, o.candidate), 30.0)
            try:
                thunks[i] = finder._ready(region, option, ctx, args)[0]
            except Exception as error:
                print(f"  case {seed} {option.candidate}: {str(error)[:80]}")
        for i, took in timed(thunks, device, SECONDS).items():
            if isinstance(took, float):
                c = options[i].candidate
                knobs = plain_knobs(c.knobs)
                rows.append({"case": seed, "engine": c.engine, "knobs": knobs, "seconds": took})
        if k % 100 == 99:
            spent = time.perf_counter() - begin
            print(f"{k + 1} of {len(work)}, {len(rows)} times, {spent:.0f} s", flush=True)
            _write(out, rows)
    _write(out, rows)


def _rows(folder: str) -> list[dict[str, Any]]:
    """What is on file."""
    file = Path(folder) / RECORD
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


def _write(folder: str, rows: list[dict[str, Any]]) -> None:
    head = {"about": describe("cuda"), "families": len(FAMILIES)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n'
    write_atomic(Path(folder) / RECORD, text)


# ---- fitting


def ratios(
    path: str, few: Collection[int] | None = None
) -> Iterator[tuple[int, Region, Option, float]]:
    """What was measured, or a ``few`` cases of it, with the estimate of today."""
    rows = json.loads(Path(path).read_text())["rows"]
    rows = [row for row in rows if few is None or row["case"] in few]
    survey = Survey(GPUS["h200"], Policy(), calibrated=False)
    by_case: dict[int, list[Any]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    for seed, found in by_case.items():
        region = case(seed)
        assert region is not None
        offered = {
            (o.candidate.engine, json.dumps(plain_knobs(o.candidate.knobs), sort_keys=True)): o
            for o in survey.ask(region)[0]
        }
        for row in found:
            option = offered.get((row["engine"], json.dumps(row["knobs"], sort_keys=True)))
            if option is not None:
                yield seed, region, option, row["seconds"]


Measured = list[tuple[int, Place, float]]  # a case, its place, log₂ of measured over estimated


def fit(path: str) -> None:
    """What to make of estimates, by kind, for the package."""
    found = [row for row in ratios(path) if row[2].predicted_s > 0]
    kinds = [kind_of(region, option.candidate) for _, region, option, _ in found]
    long = Counter(k[:LEAST] for k, row in zip(kinds, found, strict=True) if row[3] >= LONG_S)
    all_of: dict[Kind, Measured] = {}
    points: dict[str, list[list[float]]] = {}
    for kind, (seed, region, option, seconds) in zip(kinds, found, strict=True):
        if seconds < LONG_S and long[kind[:LEAST]] >= ENOUGH:
            continue  # what takes a few microseconds is all launch, and would decide for the rest
        ratio = round(math.log2(seconds / option.predicted_s), 2)
        points.setdefault("/".join(kind), []).append([*place_of(region), ratio])
        for length in range(LEAST, len(kind) + 1):
            all_of.setdefault(kind[:length], []).append((seed, place_of(region), ratio))
    known = {"/".join(k): _best(rows) for k, rows in all_of.items() if len(rows) >= ENOUGH}
    parts = {"kinds": known, "points": points}
    texts = {
        name: [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(part.items())]
        for name, part in parts.items()
    }
    body = ",\n".join(
        f'"{name}": {{\n' + ",\n".join(lines) + "\n}" for name, lines in texts.items()
    )
    write_atomic(FOLDER / "h200.json", f"{{{body}}}\n")
    print(f"{len(known)} kinds, {sum(map(len, points.values()))} measurements")


def _best(found: Measured) -> list[Any]:
    """Which way predicts measurements that it has not seen; a plainer one if about as good."""
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for part in range(FOLDS):
        seen = [(place, ratio) for seed, place, ratio in found if seed % FOLDS != part]
        middle = statistics.median([ratio for _, ratio in seen] or [0.0])
        for _, place, ratio in (row for row in found if row[0] % FOLDS == part):
            for way, guess in WAYS.items():
                errors[way].append(abs(ratio - guess(place, seen, middle)))
    best = "as it is"
    for way in WAYS:
        best = way if sum(errors[way]) < 0.95 * sum(errors[best]) else best
    factor = 2 ** sorted(errors[best])[len(found) * 7 // 10]
    return [best, statistics.median(ratio for *_, ratio in found), round(factor, 3), len(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=CASES, help="regions to draw")
    parser.add_argument("--gradients", action="store_true", help="draw gradients of convolutions")
    parser.add_argument("--grouped", action="store_true", help="draw those of grouped ones")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to measure for, at most")
    parser.add_argument("--out", default="bench/results", help="folder for the record")
    parser.add_argument("--fit", help="a record to take the ratios from; measures nothing")
    args = parser.parse_args()
    if args.fit:
        fit(args.fit)
    else:
        first = GROUPED if args.grouped else GRADIENTS if args.gradients else 0
        measure(range(first, first + args.count), args.out, args.seconds)


if __name__ == "__main__":
    main()
