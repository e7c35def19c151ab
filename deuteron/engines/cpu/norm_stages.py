"""Norms of images, split into stages, each of which is one kernel of generated code.

    forward    y = act((x − mean) · rstd · weight + bias + residual)
    gradient   dz = grad · act'    hat = (x − mean) · rstd    inner = dz · weight
               dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
               dweight = Σ dz · hat    dbias = Σ dz

    bytes = size · (2 x + residual + y) forward, size · (2 x + 2 grad + 2 y + dx + extra) backward,
    or (2 x + grad + y + 2 dz + dx)

Stages go over the elements in the order of memory: the first sums every channel of every image, a
tiny one combines these sums, and the last then has all that it needs to compute each element. A
single kernel would have to read each set of elements that share statistics by itself, and so jump
through memory where channels lie innermost.

Statistics are computed on differences from a pivot, which is one of the elements of a channel. So a
mean that is large compared with the deviation costs no digits, and equal elements have a variance
of exactly 0.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import nan, prod
from typing import Any

from deuteron.codegen.calls import Room
from deuteron.engines.base import Kernel
from deuteron.engines.cpu.generated import kernel_of, program_of
from deuteron.engines.match import operands, results
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import DType, float32
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.ir.rewrite import start
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.ops.activated import activation
from deuteron.passes.cleanup import dead_code

Kinds = Mapping[str, DType]  # element types of the results that are read, by the kernels' names
Results = dict[str, Sym]
MANY = 16  # images of at least this many positions are summed one by one, smaller ones all together


class Stages:
    """Nodes of a graph under construction, cut into stages; ``x`` is the type of images."""

    def __init__(self, build: GraphBuilder, x: TensorType, source: str = "") -> None:
        self.build, self.b, self.starts = build, Ops(build, source), [0]
        self.images, self.channels, self.positions = x.shape[0], x.shape[1], prod(x.shape[2:])
        self.spatial, self.last = tuple(range(2, x.rank)), not x.is_layout("contiguous")

    def cut(self) -> None:
        """Begin another stage. It reads operands again, and results of earlier stages."""
        self.starts.append(len(self.build.nodes))

    def finish(self) -> tuple[Graph, list[Region]]:
        graph = dead_code(self.build.finish())
        kept, all_nodes = {*map(id, graph.nodes)}, self.build.nodes
        ends = [*self.starts[1:], len(all_nodes)]
        stages = (all_nodes[a:z] for a, z in zip(self.starts, ends, strict=True))
        live = ([node for node in stage if id(node) in kept] for stage in stages)
        cut = (graph.subgraph(f"stage{i}", nodes) for i, nodes in enumerate(live) if nodes)
        return graph, list(map(Region, cut))

    # ---- numbers of channels

    def beside(self, number: Sym) -> Sym:
        """Numbers per channel, or per channel and image, reshaped so that they broadcast to
        images."""
        ones = (1,) * len(self.spatial)
        return self.b.one("reshape", number, shape=(prod(number.shape[:-1]), self.channels, *ones))

    def pivots(self, x: Sym, batch: bool) -> Sym:
        """A pivot for each channel of each image, or with ``batch`` for each channel. It is one of
        the first two elements, the one nearer to 0, so that we do not pick an outlier; 0 if they
        have different signs, or if it is not finite."""
        b, shape = self.b, (self.channels,) if batch else (self.images, self.channels)
        for axis in (0, *self.spatial[:-1]) if batch else self.spatial[:-1]:
            x = b.slice(x, axis=axis, start=0, stop=1)
        ends = (0, min(1, x.shape[-1] - 1))
        two = [b.slice(x, axis=self.spatial[-1], start=k, stop=k + 1) for k in ends]
        low, high = (b.reshape(f(*two), shape=shape) for f in (b.minimum, b.maximum))
        near = b.maximum(low, 0.0) + b.minimum(high, 0.0)
        return b.one("where", b.eq(near - near, 0.0), near, 0.0)

    def sums(self, axes: Sequence[int], *terms: Sym) -> list[Sym]:
        return [self.b.one("sum", term, axes=tuple(axes), keepdim=False) for term in terms]

    def spread(self, d: Sym) -> tuple[Sym, Sym]:
        """For each channel of each image: the mean of ``d``, the differences from a pivot, and the
        sum of squares around that mean."""
        total, squares = self.sums(self.spatial, d, d * d)
        mean = total * (1.0 / self.positions)
        return mean, squares - total * mean

    def joined(self, means: Sym, squares: Sym, axis: int) -> tuple[Sym, Sym]:
        """The mean and the variance of the union of several sets of elements, along ``axis``."""
        b, count = self.b, means.shape[axis]
        mean = b.one("mean", means, axes=(axis,), keepdim=True)
        within = b.one("sum", squares, axes=(axis,), keepdim=True)
        between = b.one("sum", b.square(means - mean), axes=(axis,), keepdim=True)
        total = within + between * float(self.positions)
        return mean, b.maximum(total * (1.0 / (count * self.positions)), 0.0)

    def root(self, variance: Sym, eps: float) -> Sym:
        """1 / √(variance + eps). Where the squares overflowed it is nan: 0 would make the result
        equal to the bias, which looks valid."""
        square = variance + eps
        return self.b.one("where", self.b.isinf(square), nan, self.b.rsqrt(square))

    # ---- groups

    def of_groups(
        self, pivot: Sym, means: Sym, squares: Sym, groups: int, eps: float
    ) -> tuple[Sym, Sym, Sym]:
        """For the group of each channel of each image: the mean minus the pivot; the rounding error
        that this loses when the pivot is added in float32; and rstd."""
        b, lie = self.b, (self.images, groups, self.channels // groups)
        p, m, s = (b.reshape(t, shape=lie) for t in (pivot, means, squares))
        apart = p - b.slice(p, axis=2, start=0, stop=1)  # all relative to one of the pivots
        mean, variance = self.joined(apart + m, s, 2)
        rstd = b.expand(self.root(variance, eps), shape=lie)
        off = mean - apart
        found = (off, off - ((p + off) - p), rstd)
        off, rest, rstd = (b.reshape(t, shape=(self.images, self.channels)) for t in found)
        return off, rest, rstd


# ---- the operators -------------------------------------------------------------------------------


class Operands:
    """The operands of a node, by slot. Every access adds a new node that widens it to float32."""

    def __init__(self, b: Ops, values: Mapping[str, str]) -> None:
        self.b, self.values = b, values

    def __contains__(self, slot: str) -> bool:
        return slot in self.values

    def __call__(self, slot: str) -> Sym:
        return self.b.upcast(self.b.sym(self.values[slot]))

    def scaled(self, x: Sym, slot: str, lie: Callable[[Sym], Sym] = lambda s: s) -> Sym:
        return x * lie(self(slot)) if slot in self else x

    def plus(self, x: Sym, slot: str, lie: Callable[[Sym], Sym] = lambda s: s) -> Sym:
        return x + lie(self(slot)) if slot in self else x


def batch_norm(s: Stages, of: Operands, attrs: Mapping[str, Any], kinds: Kinds) -> Results:
    b, act = s.b, activation(attrs["activation"])
    means, squares = s.spread(of("x") - s.beside(s.pivots(of("x"), batch=True)))
    s.cut()
    off, variance = (b.reshape(t, shape=(s.channels,)) for t in s.joined(means, squares, 0))
    pivot, rstd = s.pivots(of("x"), batch=True), s.root(variance, attrs["eps"])
    mean, count, share = pivot + off, s.images * s.positions, attrs["momentum"]
    made = {"mean": mean, "rstd": rstd}
    for what, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
        if f"running_{what}" in of:
            # two products, as in torch: one of their difference would round small numbers away
            value = of(f"running_{what}") * (1.0 - share) + value * share
        else:
            value = value * 1.0  # makes it a value of its own, as each result has to be
        made[f"new_{what}"] = b.to(value, kinds[f"new_{what}"])
    scale = of.scaled(rstd, "weight")
    # ``shift`` corrects for the digits of the mean that float32 loses. Not where the slope of the
    # activation jumps: there the gradient must recompute exactly this z from the stored mean.
    exact = act is None or not act.jumps or "residual" in of
    shift = (mean - pivot - off) * scale if exact else None
    s.cut()
    z = (of("x") - s.beside(mean)) * s.beside(scale)
    z = z if shift is None else z + s.beside(shift)
    z = of.plus(z, "bias", s.beside)
    z = of.plus(z, "residual")
    return made | {"y": b.to(z if act is None else act(b, z), kinds["y"])}


def batch_norm_grad(s: Stages, of: Operands, attrs: Mapping[str, Any], kinds: Kinds) -> Results:
    b, act = s.b, activation(attrs["activation"])

    def parts() -> tuple[Sym, Sym]:
        """The gradient dz before the activation, and hat."""
        d, rstd, dz = of("x") - s.beside(of("mean")), s.beside(of("rstd")), of("grad")
        if act is not None:
            if "y" in of:
                z = y = of("y")
            else:
                z = of.plus(d * of.scaled(rstd, "weight", s.beside), "bias", s.beside)
                z = of.plus(z, "residual")
                y = act(b, z)
            dz = act.pulled(b, dz, z, y)
        return dz, d * rstd

    dz, hat = parts()
    stored = b.to(dz * 1.0 if act is None else dz, kinds["dz"]) if "dz" in kinds else None
    by_image = s.last and s.positions >= MANY
    level, slope = s.sums(s.spatial if by_image else (0, *s.spatial), dz, dz * hat)
    if by_image:
        s.cut()
        level, slope = s.sums((0,), level, slope)
    made = {"dbias": level, "dweight": slope}
    share = 1.0 / (s.images * s.positions)
    level, slope = (of.scaled(t, "weight") * share for t in (level, slope))
    if s.last:
        s.cut()
        dz, hat = parts()
        dz = dz if stored is None else b.upcast(stored)  # one tensor to read instead of two
    rest = of.scaled(dz, "weight", s.beside) - s.beside(level) - hat * s.beside(slope)
    made["dx"] = b.to(rest * s.beside(of("rstd")), kinds["dx"])
    return made if stored is None else made | {"dz": stored}


def group_norm_grad(s: Stages, of: Operands, attrs: Mapping[str, Any], kinds: Kinds) -> Results:
    b, groups = s.b, attrs.get("groups", s.channels)
    pivot, grad = s.pivots(of("x"), batch=False), of("grad")
    d = of("x") - s.beside(pivot)
    means, squares = s.spread(d)
    level, slope = s.sums(s.spatial, grad, grad * d)
    s.cut()
    off, rest, rstd = s.of_groups(pivot, means, squares, groups, attrs["eps"])
    center, slope = pivot + off, (slope - off * level) * rstd
    lie, share = (s.images, groups, s.channels // groups), groups / (s.channels * s.positions)

    def mean(t: Sym) -> Sym:
        """The mean over a group, repeated for each of its channels."""
        t = b.reshape(of.scaled(t, "weight") * share, shape=lie)
        total = b.expand(b.one("sum", t, axes=(2,), keepdim=True), shape=lie)
        return b.one("reshape", total, shape=(s.images, s.channels))

    # dx as grad · times + (x − center) · lean + flat
    times, lean = of.scaled(rstd, "weight"), mean(slope) * rstd * rstd * -1.0
    flat = mean(level) * rstd * -1.0 - rest * lean
    s.cut()
    totals = zip(("dbias", "dweight"), s.sums((0,), level, slope), strict=True)
    made = {name: b.to(total, kinds[name]) for name, total in totals if name in kinds}
    s.cut()
    times, lean, flat, center = map(s.beside, (times, lean, flat, center))
    dx = of("grad") * times + (of("x") - center) * lean + flat
    return made | {"dx": b.to(of.plus(dx, "extra"), kinds["dx"])}


WRITTEN: dict[str, Callable[[Stages, Operands, Mapping[str, Any], Kinds], Results]] = {
    "batch_norm_act": batch_norm,
    "batch_norm_act_grad": batch_norm_grad,
    "group_norm_grad": group_norm_grad,
    "instance_norm_grad": group_norm_grad,
}


@lru_cache(maxsize=1024)
def staged(region: Region) -> tuple[Graph, list[Region]]:
    """The single node of a region, split into stages."""
    (node,), types = region.nodes, region.graph.types
    build, _ = start(region.graph, table.infer)
    read, made = operands(node), results(region, node)
    s = Stages(build, types[read["x"]], node.source)
    if node.op == "batch_norm_act" and not (s.last and s.positions >= MANY):
        rule = table.get(node.op).expand
        assert rule is not None
        ins = [None if v is None else s.b.sym(v) for v in node.inputs]
        ins += [None] * (len(table.get(node.op).inputs) - len(ins))
        found = dict(zip(node.outputs, rule(s.b, ins, node.attrs), strict=True))
    else:
        kinds = dict.fromkeys(("dx", "y"), types[read["x"]].dtype)
        kinds |= dict.fromkeys(("new_mean", "new_var"), float32)
        kinds |= {name: types[value].dtype for name, value in made.items()}
        by_name = WRITTEN[node.op](s, Operands(s.b, read), node.attrs, kinds)
        found = {value: by_name[name] for name, value in made.items()}
    values = [(name, found[value].name) for name, value in region.graph.outputs]
    assert len({value for _, value in values} - {*region.inputs}) == len(values)
    for name, value in values:
        build.output(name, value)
    return s.finish()


def kernel(region: Region, graph: Graph, stages: Sequence[Region]) -> Kernel:
    """A kernel that runs the stages in order; ``graph`` has the region's inputs and results."""
    tensors = (*region.inputs, *(value for _, value in graph.outputs))
    between = {value for stage in stages for value in stage.outputs} - {*tensors}
    rooms = {v: Room(f"norm {v}", -(-graph.types[v].nbytes // 4)) for v in between}
    return kernel_of(map(program_of, stages), tensors, rooms)
