"""Recurrent layers: networks that carry a state from one step of a sequence to the next.

    rnn         a stack of layers, in one direction or both: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``
    recurrence  the rest of one layer, after all its inputs were multiplied by their weights: h · W
                and the gates, step by step

A stack expands to a linear and a recurrence for each layer. Sequences are time-major, [T, B, …]; if
there are two directions, the second begins at the end. There are G gates, H units and P features of
a state; P is H unless the state is projected. From a = x + b + W h, with its gates in torch's
order, a cell computes:

    lstm  c' = σ(a₁) c + σ(a₀) tanh(a₂),  h' = R (σ(a₃) tanh(c'))       R: the projection, if any
    gru   h' = n + σ(a₁) (h − n),         n = tanh(x₂ + σ(a₀) (b₂ + W₂ h))
    tanh  h' = tanh(a)                    relu  h' = max(a, 0)

A state of 16 bits is kept in float32 between the steps of a recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_shape, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.reference import wide_type

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
CELL = Attr("str", doc=f"one of {', '.join(GATES)}", choices=tuple(GATES))

# ---- one layer, after the products of its inputs -------------------------------------------------


def _recurrence_reference(
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    projection: Tensor | None,
    cell: str,
) -> tuple[Tensor, ...]:
    kind, wide, parts = x.dtype, wide_type(x), x.chunk(weight.shape[0], -1)
    given = (h, weight, c, bias, projection)
    every: list[list[Tensor]] = []
    for d, part in enumerate(parts):
        state, w, memory, shift, project = (None if t is None else t[d].to(wide) for t in given)
        assert state is not None and w is not None
        made: list[Tensor] = []
        for gates in part.to(wide).flip(0) if d else part.to(wide):
            held = state @ w.mT if shift is None else state @ w.mT + shift
            if cell == "lstm":
                i, f, g, o = (gates + held).chunk(4, -1)
                memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
                state = o.sigmoid() * memory.tanh()
                state = state if project is None else state @ project.mT
            elif cell == "gru":
                (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), held.chunk(3, -1)
                new = (n + (r + hr).sigmoid() * hn).tanh()
                state = new + (z + hz).sigmoid() * (state - new)
            else:
                state = (gates + held).tanh() if cell == "tanh" else (gates + held).relu()
            made.append(state)
        steps = torch.stack(made[::-1] if d else made) if made else state.new_empty(0, *h.shape[1:])
        every.append([steps, state, *([] if memory is None else [memory])])
    y, *last = zip(*every, strict=True)
    found = torch.cat(y, -1), *(torch.stack(each) for each in last)
    return tuple(t.to(kind) for t in found)


def _recurrence_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """For each row and step: two operations for each number of the matrices by which the row is
    multiplied, and twenty for each number of its gates."""
    met = sum(t.numel for t in (ins[1], *ins[5:6]) if t is not None)
    rows = ins[0].shape[0] * ins[0].shape[1]
    return float(rows * (2 * met + 20 * ins[0].shape[-1]))


def _back(b: Ops, v: Vjp) -> Grads:
    given = [*v.ins, *[None] * (6 - len(v.ins))]
    grads = [*v.grads, *[None] * (3 - len(v.grads))]
    made = b.call("recurrence_grad", *given, *grads, **v.attrs)
    found = iter(made if isinstance(made, tuple) else (made,))
    return [None if each is None else next(found) for each in v.ins]


_RECURRENCES = """5x2x12 1x12x3 1x2x3 1x2x3 cell=lstm | 3x3x40 2x20x5 2x3x5 2x3x5 2x20 cell=lstm
    | 1x1x4 1x4x1 1x1x1 1x1x1 1x4 cell=lstm | 4x2x24 1x24x2 1x2x2 1x2x6 1x24 1x2x6 cell=lstm
    | 4x2x24@transposed 2x12x3@transposed 2x2x3@sliced 2x2x3 2x12 cell=lstm
    | 4x2x18 2x9x3 2x2x3 _ 2x9 cell=gru | 3x1x15@sliced 1x15x5 1x1x5 cell=gru
    | 4x2x6 2x3x3 2x2x3 _ 2x3 cell=tanh | 4x3x5@expanded 1x5x5 1x3x5 cell=tanh
    | 3x2x5 1x5x5 1x2x5 _ 1x5 cell=relu | 0x2x12 1x12x3 1x2x3 1x2x3 cell=lstm nograd [no steps]"""


@operator(
    Fusion.OPAQUE,
    _recurrence_reference,
    attrs={"cell": CELL},
    vjp=_back,
    flops=_recurrence_flops,
    samples=_RECURRENCES,
)
def recurrence(
    x: TensorType,
    weight: TensorType,
    h: TensorType,
    c: Given,
    bias: Given,
    projection: Given,
    cell: str,
) -> tuple[TensorType, ...]:
    """One recurrent layer over x [T, B, D·G·H], the products of its inputs with their weights, for
    D directions, G gates and H units. weight [D, G·H, P] and bias [D, G·H] are those of the state h
    [D, B, P]; an lstm also has c [D, B, H] and may have a projection [D, P, H]. Returns all states
    [T, B, D·P], the last h, and for an lstm the last c."""
    one_dtype("recurrence", x=x, weight=weight, h=h, c=c, bias=bias, projection=projection)
    for name, t in (("weight", weight), ("x", x), ("h", h)):
        if t.rank != 3:
            wrong = f"recurrence: {name} has rank {t.rank}, not 3"
            raise GraphError(wrong, remedy="x [T, B, D·G·H], weight [D, G·H, P], h [D, B, P]")
    batch, (ways, rows, features), gates = x.shape[1], weight.shape, GATES[cell]
    units = rows // gates
    if rows != units * gates or ways not in (1, 2):
        wrong = f"weight {list(weight.shape)} of a recurrence of kind {cell}"
        raise GraphError(wrong, remedy=f"use [1 or 2 directions, {gates} · units, features]")
    check_shape("x of a recurrence", x, (*x.shape[:2], ways * rows), "a row of all gates each step")
    check_shape("h of a recurrence", h, (ways, batch, features), "give a state for each direction")
    check_shape("bias of a recurrence", bias, (ways, rows), "give one for each row of the weight")
    _check_memory(cell, c, (ways, batch, units))
    if features != units if projection is None else cell != "lstm":
        wrong = f"a state of {features} features of {units} units ({cell})"
        raise GraphError(wrong, remedy="an lstm may have a projection [D, features, units]")
    check_shape("projection of a recurrence", projection, (ways, features, units), "one each way")
    y = TensorType.of((*x.shape[:2], ways * features), x.dtype)
    return y, *(TensorType.of(t.shape, t.dtype) for t in (h, c) if t is not None)


def _check_memory(cell: str, c: Given, shape: tuple[int, ...]) -> None:
    if (cell == "lstm") != (c is not None):
        wrong = f"{cell} with{'' if c is not None else 'out'} a second state c"
        raise GraphError(wrong, remedy="an lstm has the states h and c, other cells have h alone")
    check_shape("c of an lstm", c, shape, "give as many numbers as there are units")


def _grad_reference(*given: Tensor | None, cell: str) -> tuple[Tensor, ...]:
    """By torch's autograd, over the steps as they are written above."""
    kind = next(t.dtype for t in given if t is not None)
    with torch.enable_grad():
        wide = [None if t is None else t.detach().to(wide_type(t)) for t in given]
        ins = [None if t is None else t.clone().requires_grad_() for t in wide[:6]]
        made = recurrence.reference(*ins, cell=cell)
        pairs = [(y, g) for y, g in zip(made, wide[6:], strict=False) if g is not None]
        ys, grads = zip(*pairs, strict=True)
        asked = [t for t in ins if t is not None]
        found = torch.autograd.grad(ys, asked, grads, materialize_grads=True)
    return tuple(g.to(kind).contiguous() for g in found)


@operator(
    Fusion.OPAQUE,
    _grad_reference,
    "x weight h c? bias? projection? dy? dh? dc?",
    attrs={"cell": CELL},
    flops=lambda ins, outs, attrs: 3.0 * _recurrence_flops(ins, outs, attrs),
    samples="""5x2x12 1x12x3 1x2x3 1x2x3 _ _ 5x2x3 cell=lstm nograd
        | 4x2x18 2x9x3 2x2x3 _ 2x9 _ 4x2x6 2x2x3 cell=gru nograd""",
)
def recurrence_grad(*given: Any, cell: str) -> tuple[TensorType, ...]:
    """The gradients of recurrence for all inputs that it was given, from those of its results. It
    has none of its own."""
    *ins, dy, dh, dc = given
    results = recurrence.infer(*ins, cell=cell)
    for name, g, t in zip(("dy", "dh", "dc"), (dy, dh, dc), results, strict=False):  # type: ignore[arg-type]
        check_shape(f"{name} of recurrence_grad", g, t.shape, "use the results of recurrence")
    if all(g is None for g in (dy, dh, dc)):
        raise GraphError("recurrence_grad of no gradient", remedy="give dy, dh or dc")
    return tuple(TensorType.of(t.shape, t.dtype) for t in ins if t is not None)


# ---- a stack of layers ---------------------------------------------------------------------------


def _layers(xs: Sequence[Any], layers: int, ways: int, cell: str) -> Iterator[list[list[Any]]]:
    """The weights of each layer for each direction: of the input and of the state, their biases
    and the projection; None where there is none."""
    weights = xs[3 if cell == "lstm" else 2 :]
    count = len(weights) // (layers * ways)
    for layer in range(layers):
        listed = (weights[(layer * ways + d) * count :][:count] for d in range(ways))
        # by count: 2 weights; 3 with a projection; 4 with two biases; 5 with all of them
        yield [
            [*w[:2], *(w[2:4] if count > 3 else (None, None)), w[-1] if count % 2 else None]
            for w in listed
        ]


def _rnn_reference(*xs: Tensor, cell: str, layers: int, bidirectional: bool) -> tuple[Tensor, ...]:
    memory = cell == "lstm"
    x, h, weights = xs[0], xs[1 : 2 + memory], xs[2 + memory :]
    biased = len(weights) // (layers * (1 + bidirectional)) > 3
    if not len(x):  # torch refuses an empty sequence
        return x.new_empty(0, x.shape[1], (1 + bidirectional) * h[0].shape[2]), *map(torch.clone, h)
    call: Any = getattr(torch, cell if cell in ("lstm", "gru") else f"rnn_{cell}")
    state = h if memory else h[0]
    return tuple(call(x, state, weights, biased, layers, 0.0, False, bidirectional, False))


def _rnn_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    rows = ins[0].shape[0] * ins[0].shape[1]
    return float(2 * rows * sum(t.numel for t in ins[2:] if t.rank == 2))


def _written_out(b: Ops, ins: Syms, attrs: Attributes) -> Sequence[Sym]:
    """For each layer one product for the inputs of all steps and directions, then a recurrence."""
    cell, layers, ways = attrs["cell"], attrs["layers"], 1 + attrs["bidirectional"]
    states, last = ins[1 : 3 if cell == "lstm" else 2], list[list[Sym]]()

    def both(parts: Sequence[Sym | None]) -> Sym | None:
        """The weights of all directions, one below the other."""
        there = [p for p in parts if p is not None]
        return b.one("concat", there, axis=0) if len(there) > 1 else (*there, None)[0]

    def of_ways(joined: Sym | None) -> Sym | None:
        if joined is None:
            return None
        return b.one("reshape", joined, shape=(ways, joined.shape[0] // ways, *joined.shape[1:]))

    y = ins[0]
    for i, each in enumerate(_layers(ins, layers, ways, cell)):
        wx, wh, bx, bh, project = (both(parts) for parts in zip(*each, strict=True))
        gates = b.one("linear", y, wx, bx)
        begin = [b.one("slice", s, axis=0, start=i * ways, stop=(i + 1) * ways) for s in states]
        h, c = (*begin, None)[:2]
        weight, bias, projection = (of_ways(w) for w in (wh, bh, project))
        y, *ends = b.call("recurrence", gates, weight, h, c, bias, projection, cell=cell)
        last.append(ends)
    return [y, *(both(parts) for parts in zip(*last, strict=True))]


_RNNS = """5x2x4 1x2x3 1x2x3 12x4 12x3 12 12 cell=lstm
    | 3x2x4 4x2x3 4x2x3 12x4 12x3 12x4 12x3 12x6 12x3 12x6 12x3 cell=lstm layers=2
      bidirectional=True
    | 4x1x3 1x1x2 1x1x5 20x3 20x2 20 20 2x5 cell=lstm [projected]
    | 3x2x4@transposed 2x2x3 9x4 9x3 9 9 9x3 9x3 9 9 cell=gru layers=2
    | 4x2x3@sliced 2x2x5 5x3 5x5 5x3 5x5 cell=tanh bidirectional=True
    | 1x1x1 1x1x1 1x1 1x1 1 1 cell=relu | 0x2x4 1x2x3 1x2x3 12x4 12x3 cell=lstm nograd [no steps]
    | 3x0x4 1x0x3 9x4 9x3 cell=gru nograd [no rows]"""


@operator(
    Fusion.OPAQUE,
    _rnn_reference,
    attrs={
        "cell": CELL,
        "layers": Attr("int", 1, "how many, each over the results of the one before"),
        "bidirectional": Attr("bool", False, "whether each layer goes through time both ways"),
    },
    expand=_written_out,
    flops=_rnn_flops,
    samples=_RNNS,
)
def rnn(*xs: TensorType, cell: str, layers: int, bidirectional: bool) -> tuple[TensorType, ...]:
    """A stack of recurrent layers over x [T, B, features], from the states h [layers · directions,
    B, P], and for an lstm c, which follows h. Then come the weights of each layer and direction, as
    torch lists them: of the input, of the state, their biases or none, a projection or none.
    Returns the states of the last layer [T, B, directions · P], the last h, and for an lstm the
    last c."""
    memory, ways = cell == "lstm", 1 + bidirectional
    count, odd = divmod(len(xs) - 2 - memory, max(layers, 1) * ways)
    if layers < 1 or odd or count not in ((2, 3, 4, 5) if memory else (2, 4)):
        wrong = f"rnn with {len(xs)} inputs for {layers} layers in {ways} directions ({cell})"
        listed = "of each layer and direction two weights, two biases or none, a projection or none"
        raise GraphError(wrong, remedy=f"give x, h{', c' * memory}, and {listed}")
    for i, t in enumerate(xs[1:], 1):
        operands: Any = {"x": xs[0], f"input {i}": t}
        one_dtype("rnn", **operands)
    x, states = xs[0], xs[1 : 2 + memory]
    for t in xs[: 2 + memory]:
        if t.rank != 3 or (t is not x and t.shape[0] != layers * ways):
            wrong = f"rnn of x {list(x.shape)} and a state {list(t.shape)}"
            raise GraphError(wrong, remedy=f"use [T, B, features] and [{layers * ways}, B, units]")

    def one(t: Given) -> Given:
        """A tensor's type as that of a single direction: with 1 as its first dimension."""
        return None if t is None else TensorType.of((1, *t.shape), t.dtype)

    features, inner = states[0].shape[2], x.shape[2]
    h, c = (*(TensorType.of((1, *t.shape[1:]), t.dtype) for t in states), None)[:2]
    for layer in _layers(xs, layers, ways, cell):
        for wx, wh, bx, bh, project in layer:
            rows = wh.shape[:1]
            check_shape("a weight of rnn's inputs", wx, (*rows, inner), "rows of all gates")
            check_shape("a bias of rnn's inputs", bx, rows, "one for each row of the weight")
            gates = TensorType.of((*x.shape[:2], *rows), x.dtype)
            recurrence.infer(gates, one(wh), h, c, one(bh), one(project), cell=cell)
        inner = ways * features
    y = TensorType.of((*x.shape[:2], inner), x.dtype)
    return y, *(TensorType.of(t.shape, t.dtype) for t in states)
