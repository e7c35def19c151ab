"""Random regions for generated code: small graphs that have a scalar program, and their tensors.

Operators are tried on values that are there; what inference refuses is not emitted, and neither
is what makes the region lose its scalar program. The same seed gives the same region.

A result that jumps (floor, a comparison, argmax) or has a pole (log, division) is only asked of
*exact* values, which no arithmetic rounds: inputs, and what was moved or selected from them. A
last bit of difference before it would otherwise be a whole number after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from deuteron.codegen.lower import lower
from deuteron.errors import DeuteronError
from deuteron.ir import Graph, GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import infer
from deuteron.ops.formula import CannotLower

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = (
    (3, 4),
    (4, 3),
    (1, 4),
    (3, 1),
    (4,),
    (),
    (2, 3, 4),
    (2, 1, 4),
    (5, 7),
    (2, 3, 4, 4),
    (5, 37),
    (70,),
    (3, 70),
    (33, 9),
    (2, 4, 19),
    (1, 50),
    (2, 4, 3, 18),
    (4, 1, 1, 5),
    (0, 4),
    (1,),
    (1, 1),
    (3, 1030),
    (257, 6),
    (4100,),
    (2, 3, 129),
    (6, 1, 17),
    (2, 2, 3, 2, 5),
)
FLOATS = (torch.float32,) * 3 + (torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ODD = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0)
SCALES = (1.0,) * 6 + (30.0, 1e-4)  # of the numbers in a region

MOVING = frozenset(
    """permute reshape slice pad flip concat expand to_layout gather
        index_select embedding""".split()
)
EXACT = MOVING | set(
    """maximum minimum neg abs relu sign where max min argmax argmin any all
    logical_not eq ne lt le gt ge logical_and logical_or logical_xor isnan isinf""".split()
)


@dataclass
class Draft:
    """A region in the making."""

    seed: int
    random: Random = field(init=False)
    build: GraphBuilder = field(init=False)
    feed: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.gen = torch.Generator().manual_seed(self.seed)
        self.build = GraphBuilder(infer, f"random{self.seed}")
        self.family = self.random.choice(SHAPES)
        self.float = self.random.choice(FLOATS)
        rank = len(self.family)
        self.axes = tuple(
            sorted(self.random.sample(range(rank), self.random.randint(1, rank))) if rank else ()
        )
        self.odd = self.random.random() < 0.15
        self.coarse = self.random.random() < 0.15  # few different numbers: ties and zeros
        self.huge = self.random.random() < 0.03  # and some of which the squares overflow
        self.scale = self.random.choice(SCALES)

    # ---- inputs

    def add(self, tensor: torch.Tensor) -> str:
        name = self.build.input(f"x{len(self.build.inputs)}", TensorType.from_tensor(tensor))
        self.feed[name] = tensor
        self.exact.add(name)
        return name

    def leaf(self, shape: Shape | None = None, dtype: torch.dtype | None = None) -> str:
        if shape is None:
            shape = (
                self.family
                if self.random.random() < 0.7
                else tuple(
                    self.random.choice((n, 1))
                    for n in self.family[self.random.randrange(len(self.family) + 1) :]
                )
            )
        if dtype is None:
            dtype = self.float if self.random.random() < 0.85 else self.random.choice(FLOATS)
        if dtype == torch.bool:
            values = torch.randint(0, 2, shape, generator=self.gen).bool()
        elif not dtype.is_floating_point:
            low = 0 if dtype == torch.uint8 else -100
            values = torch.randint(low, 120, shape, generator=self.gen).to(dtype)
        else:
            values = torch.randn(shape, generator=self.gen, dtype=torch.float64) * self.scale
            if self.coarse:
                values = torch.randint(-2, 3, shape, generator=self.gen).double()
            values = values.to(dtype)
            if self.huge:
                some = torch.rand(shape, generator=self.gen) < 0.1
                values = torch.where(some, values * torch.finfo(dtype).max ** 0.6, values)
            if self.odd:
                picks = torch.tensor(ODD, dtype=dtype)
                which = torch.randint(0, 4 * len(ODD), shape, generator=self.gen)
                values = torch.where(which < len(ODD), picks[which.clamp_max(4)], values)
        return self.add(self.laid(values))

    def parameter(self, shape: Shape) -> str:
        """A weight or a statistic: never infinite, where PyTorch's own formulas differ."""
        values = torch.randn(shape, generator=self.gen, dtype=torch.float64)
        return self.add(self.laid(values.to(self.float)))

    def positive(self, shape: Shape) -> str:
        values = torch.rand(shape, generator=self.gen, dtype=torch.float64) + 0.5
        return self.add(values.to(self.float))

    def index(self, shape: Shape, high: int, dtype: torch.dtype = torch.int64) -> str:
        return self.add(torch.randint(0, high, shape, generator=self.gen).to(dtype))

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """The same values in some order in memory."""
        how = self.random.random()
        if values.ndim == 4 and how < 0.3:
            return values.to(memory_format=torch.channels_last)
        if values.ndim >= 2 and how < 0.45:
            return values.transpose(-1, -2).contiguous().transpose(-1, -2)
        if values.ndim >= 1 and how < 0.55:
            wide = torch.zeros((*values.shape[:-1], values.shape[-1] * 2), dtype=values.dtype)
            wide[..., ::2] = values
            return wide[..., ::2]
        if values.ndim >= 1 and how < 0.6:
            return values[:1].expand(values.shape)
        if values.ndim >= 1 and how < 0.64:
            return values[..., :1].expand(values.shape)
        if values.ndim >= 3 and how < 0.7:
            return values.movedim(0, -1).contiguous().movedim(-1, 0)
        if how < 0.78:  # not at an address that vectors like
            room = torch.zeros(values.numel() + 1, dtype=values.dtype)
            room[1:] = values.flatten()
            return room[1:].reshape(values.shape)
        return values

    # ---- values

    def shape(self, value: str) -> Shape:
        return self.build.types[value].shape

    def is_float(self, value: str) -> bool:
        return self.build.types[value].dtype.is_float

    def value(self, wanted: Callable[[str], bool] = lambda v: True) -> str | None:
        """Some value, mostly a late one."""
        names = [v for v in self.build.types if v not in self.build.constants and wanted(v)]
        if not names:
            return None
        pick = self.random.randrange
        return names[max(pick(len(names)), pick(len(names)))]

    def operand(self) -> str | None:
        """A value, or a number."""
        if self.random.random() < 0.2:
            number = self.random.choice((0.5, 2.0, -1.0, 3.0, 0.0, 0.1, -2.5, 1000.0, 1e-5))
            whole = self.random.random() < 0.5 and number.is_integer()
            tensor = torch.tensor(number, dtype=torch.float64)
            return self.build.constant(tensor.long() if whole else tensor)
        return self.value()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Whatever was added is taken back if something is refused."""
        b = self.build
        kept = (
            dict(b.types),
            dict(b.constants),
            list(b.nodes),
            list(b.inputs),
            dict(b.producer),
            dict(b._scalars),
            dict(self.feed),
            set(self.exact),
        )
        try:
            yield
        except (DeuteronError, CannotLower, RuntimeError, IndexError):
            (
                b.types,
                b.constants,
                b.nodes,
                b.inputs,
                b.producer,
                b._scalars,
                self.feed,
                self.exact,
            ) = kept

    def emit(self, op: str, ins: list[str | None], attrs: dict[str, Any]) -> None:
        outs = self.build.emit(op, ins, attrs)
        given = [v for v in ins if v is not None]
        if op in EXACT and all(v in self.exact or v in self.build.constants for v in given):
            self.exact |= set(outs)
        lower(Region(self.graph()))

    def finished(self) -> Graph:
        """The graph, now and then with an output that others read as well."""
        made = [v for v in self.build.producer if self.random.random() < 0.1]
        if made:
            try:
                lower(Region(self.graph(made)))
                return self.graph(made)
            except CannotLower:
                pass  # of a shape that the loops do not have
        return self.graph()

    def graph(self, also: Sequence[str] = ()) -> Graph:
        """Every value that nobody reads is an output, and so are those in ``also``."""
        read = {v for node in self.build.nodes for v in node.uses} - set(also)
        ends = [v for v in self.build.producer if v not in read]
        self.build.outputs = {f"y{i}": v for i, v in enumerate(ends)}
        return self.build.finish()


Form = Callable[[Draft, str], "tuple[list[str | None], dict[str, Any]] | None"]


def _unary(attrs: Callable[[Random], dict[str, Any]] = lambda r: {}) -> Form:
    return lambda d, v: ([v], attrs(d.random))


def _careful(form: Form) -> Form:
    """For operators that jump or have poles."""
    return lambda d, v: form(d, v) if v in d.exact else None


def _binary(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    ins: list[str | None] = [v, d.operand()]
    if d.random.random() < 0.5:
        ins.reverse()
    return ins, {}


def _careful_binary(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    ins, attrs = _binary(d, v)
    ok = all(x in d.exact or x in d.build.constants for x in ins)
    return (ins, attrs) if ok else None


def _float_binary(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    """Of integers torch refuses a divisor of 0, and so nobody lowers it."""
    found = _careful_binary(d, v)
    return found if found and all(d.is_float(x) for x in found[0]) else None


def _where(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    condition = d.value(lambda x: d.build.types[x].dtype.kind == "bool")
    return [condition or d.leaf(d.shape(v), torch.bool), v, d.operand()], {}


def _reduction(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    shape = d.shape(v)
    if not shape:
        return None
    own = tuple(sorted(d.random.sample(range(len(shape)), d.random.randint(1, len(shape)))))
    axes = d.axes if len(shape) == len(d.family) and d.random.random() < 0.8 else own
    return [v], {"axes": axes, "keepdim": d.random.random() < 0.7}


def _var(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    found = _reduction(d, v)
    return found and (found[0], found[1] | {"correction": d.random.choice((0, 1))})


def _axis(d: Draft, v: str) -> int:
    """The axis of this region's reductions where that makes sense; IndexError for scalars."""
    rank = len(d.shape(v))
    if rank == len(d.family) and d.axes and d.random.random() < 0.7:
        return d.axes[-1]
    return d.random.choice(range(rank))


def _along(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    return [v], {"axis": _axis(d, v)}


def _arg(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    if v not in d.exact:
        return None
    axis = None if d.random.random() < 0.2 else _axis(d, v)
    return [v], {"axis": axis, "keepdim": d.random.random() < 0.5}


def _layer(params: int) -> Form:
    def form(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
        shape = d.shape(v)
        dims = min(d.random.choice((1, 1, 2)), len(shape))
        given = [
            d.parameter(shape[-dims:]) if d.random.random() < 0.5 else None for _ in range(params)
        ]
        return [v, *given], {"dims": dims, "eps": 1e-3}

    return form


def _channels(params: int, **attrs: Any) -> Form:
    def form(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
        size = (d.shape(v)[1],)
        given = [d.parameter(size) if d.random.random() < 0.5 else None for _ in range(params)]
        return [v, *given], {"eps": 1e-3, **attrs}

    return form


def _groups(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    ins, attrs = _channels(2)(d, v)
    return ins, attrs | {"groups": d.random.choice((1, 2))}


def _batch(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    size = (d.shape(v)[1],)
    return [v, d.parameter(size), d.positive(size), *_channels(2)(d, v)[0][1:]], {"eps": 1e-3}


def _batch_train(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    size = (d.shape(v)[1],)
    running = [d.parameter(size), d.positive(size)] if d.random.random() < 0.5 else [None, None]
    return [*_channels(2)(d, v)[0], *running], {"momentum": 0.3, "eps": 1e-3}


def _loss(**attrs: Any) -> Form:
    def form(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
        shape = d.shape(v)
        axis = min(1, len(shape) - 1)
        kind = d.random.choice((torch.int64, torch.int32, torch.uint8))
        target = d.index((*shape[:axis], *shape[axis + 1 :]), shape[axis], kind)
        weight = d.positive((shape[axis],)) if d.random.random() < 0.4 else None
        how = d.random.choice(("none", "none", "mean", "sum"))
        ignored = d.random.choice((-100, 0))
        more = {k: d.random.choice(x) for k, x in attrs.items()}
        return [v, target, weight], {"reduction": how, "ignore_index": ignored, **more}

    return form


def _permute(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    dims = list(range(len(d.shape(v))))
    d.random.shuffle(dims)
    return [v], {"dims": tuple(dims)}


def _reshape(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape = d.shape(v)
    at = d.random.randrange(len(shape) - 1) if len(shape) > 1 else 0
    merged = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    turned = tuple(reversed(shape))
    return [v], {"shape": d.random.choice((merged, turned, (*shape, 1)))}


def _slice(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]] | None:
    shape, axis = d.shape(v), _axis(d, v)
    if shape[axis] < 2:
        return None
    start = d.random.randrange(shape[axis] - 1)
    return [v], {
        "axis": axis,
        "start": start,
        "step": d.random.choice((1, 1, 2, 3)),
        "stop": d.random.randint(start + 1, shape[axis]),
    }


def _pad(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape, r = d.shape(v), d.random
    return [v], {
        "low": tuple(r.choice((0, 0, 1, 2)) for _ in shape),
        "high": tuple(r.choice((0, 0, 1)) for _ in shape),
        "mode": r.choice(("constant", "constant", "reflect", "replicate")),
        "value": r.choice((0.0, 1.5)) if d.is_float(v) else 3.0,
    }


def _flip(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    return [v], {"axes": (_axis(d, v),)}


def _concat(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    ins: list[str | None] = [v, *(d.value() for _ in range(d.random.randint(1, 2)))]
    d.random.shuffle(ins)
    return ins, {"axis": _axis(d, v)}


def _gather(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape, axis = d.shape(v), _axis(d, v)
    size = d.random.choice((shape[axis], 1, 5))
    return [v, d.index((*shape[:axis], size, *shape[axis + 1 :]), shape[axis])], {"axis": axis}


def _index_select(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape, axis = d.shape(v), _axis(d, v)
    kind = d.random.choice((torch.int64, torch.int32))
    return [v, d.index((shape[axis],), shape[axis], kind)], {"axis": axis}


def _embedding(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape = d.shape(v)
    where = d.random.choice(((shape[0],), (2, 3)))
    return [v, d.index(where, shape[0])], {}


def _prelu(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    shape = d.shape(v)
    size = shape[1] if len(shape) > 1 and d.random.random() < 0.7 else 1
    return [v, d.leaf((size,), d.build.types[v].dtype.torch)], {}


def _dropout(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    seed = d.add(torch.tensor(d.random.randrange(-(2**62), 2**62)))
    return [v, seed], {"p": d.random.choice((0.0, 0.3, 0.5, 1.0))}


def _cast(d: Draft, v: str) -> tuple[list[str | None], dict[str, Any]]:
    kinds = ["f32", "f16", "bf16", "f64"]
    if v in d.exact and not (d.odd or d.huge):  # of what does not fit torch's own answers differ
        kinds += ["i64", "i32", "bool", "i16", "i8"]
    if not d.is_float(v):
        kinds += ["i8", "u8", "i16"] * 2
    return [v], {"dtype": d.random.choice(kinds)}


FORMS: dict[str, Form] = {
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum"), _binary),
    **dict.fromkeys(("remainder", "floor_div", "atan2"), _float_binary),
    **dict.fromkeys(
        "div pow eq ne lt le gt ge logical_and logical_or logical_xor".split(), _careful_binary
    ),
    **dict.fromkeys(
        """relu sigmoid tanh abs square silu erf sin cos neg mish softsign hardswish hardsigmoid
            expm1 exp relu6 selu log_sigmoid exp2""".split(),
        _unary(),
    ),
    **dict.fromkeys(
        """sqrt rsqrt reciprocal log log2 log1p tan floor ceil round trunc sign isnan isinf
            logical_not tanhshrink""".split(),
        _careful(_unary()),
    ),
    "gelu": _unary(lambda r: {"approximate": r.choice(("none", "tanh"))}),
    "leaky_relu": _unary(lambda r: {"negative_slope": 0.1}),
    "clamp": _unary(lambda r: {"min": -1.0, "max": r.choice((None, 2.0))}),
    "elu": _unary(lambda r: {"alpha": 0.7}),
    "celu": _unary(lambda r: {"alpha": 1.3}),
    "hardtanh": _unary(lambda r: {"min": -0.5, "max": 1.5}),
    "ndtr": _unary(),
    "softplus": _unary(lambda r: {"beta": 2.0}),
    "softshrink": _unary(lambda r: {"lambd": 0.4}),
    "hardshrink": _careful(_unary(lambda r: {"lambd": 0.4})),
    "threshold": _careful(_unary(lambda r: {"threshold": 0.1, "value": -7.0})),
    "where": _where,
    "cast": _cast,
    **dict.fromkeys(("sum", "mean", "max", "min", "prod"), _reduction),
    **dict.fromkeys(("any", "all"), _careful(_reduction)),
    "var": _var,
    **dict.fromkeys(("argmax", "argmin"), _arg),
    **dict.fromkeys(("softmax", "log_softmax", "glu"), _along),
    "layer_norm": _layer(2),
    "rms_norm": _layer(1),
    "group_norm": _groups,
    "instance_norm": _channels(2),
    "batch_norm": _batch,
    "batch_norm_train": _batch_train,
    "nll_loss": _loss(),
    "cross_entropy": _loss(label_smoothing=(0.0, 0.0, 0.2)),
    "permute": _permute,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "flip": _flip,
    "concat": _concat,
    "expand": lambda d, v: ([v], {"shape": (d.random.choice((2, 3)), *d.shape(v))}),
    "to_layout": _unary(lambda r: {"layout": r.choice(("contiguous", "nhwc"))}),
    "gather": _gather,
    "index_select": _index_select,
    "embedding": _embedding,
    "prelu": _prelu,
    "dropout": _dropout,
}


# what shapes a kernel, and not only fills it, comes up three times as often
SHAPING = MOVING | set(
    """sum mean max min var argmax argmin softmax log_softmax glu layer_norm
    rms_norm group_norm instance_norm batch_norm_train cross_entropy nll_loss""".split()
)
NAMES = tuple(name for name in FORMS for _ in range(3 if name in SHAPING else 1))


def random_region(seed: int, nodes: int = 6) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A graph of up to ``nodes`` nodes that has a scalar program, and tensors for it. Without
    nodes if nothing was accepted, as where a size is 0."""
    d = Draft(seed)
    for _ in range(d.random.randint(1, 3)):
        kind = d.random.random()
        d.leaf(dtype=d.random.choice((*WHOLE, torch.bool)) if kind < 0.25 else None)
    for _ in range(4 * nodes):
        if len(d.build.nodes) >= nodes:
            break
        op = d.random.choice(NAMES)
        with d.attempt():
            value = d.value()
            assert value is not None
            found = FORMS[op](d, value)
            if found is not None:
                d.emit(op, *found)
    return d.finished(), d.feed
