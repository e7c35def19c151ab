"""Bad inputs of the basic operators (movement, reductions, activations, dropout): each is refused
with a GraphError that names the fault. And the corners where values, not only types, matter."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from tolerances import EPS, error

from deuteron.errors import GraphError
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.text import parse_type
from deuteron.ir.types import same_strides
from deuteron.ops import FAMILIES, TABLE, Fusion, Ops, infer
from deuteron.ops.evaluate import evaluate
from deuteron.passes.differentiate import differentiate

FLAT = {"axis": 0}
ACTIVATIONS = [
    op for op in FAMILIES["activation"] if op.inputs == ("x",) and op.fusion is Fusion.ELEMENTWISE
]

BAD = [
    # operator, input types, attributes, what the message must name
    ("reshape", "f32[3,4]", {"shape": (5, 2)}, "12 elements"),
    ("reshape", "f32[3,4]", {"shape": (-1, -1)}, "not clear"),
    ("reshape", "f32[3,4]", {"shape": (-1, 5)}, "12 elements"),
    ("reshape", "f32[0,4]", {"shape": (-1, 0)}, "0 elements"),
    ("reshape", "f32[3,4]", {"shape": (-2, 6)}, "not clear"),
    ("reshape", "f32[3,4]", {}, "needs the attribute 'shape'"),
    ("reshape", "f32[3,4]", {"shape": "12"}, "not of kind ints"),
    ("permute", "f32[3,4]", {"dims": (0, 0)}, "not an order"),
    ("permute", "f32[3,4]", {"dims": (0, 1, 2)}, "not an order"),
    ("permute", "f32[]", {"dims": (0,)}, "not an order"),
    ("expand", "f32[3,4]", {"shape": (3, 5)}, "does not expand"),
    ("expand", "f32[3,1]", {"shape": (4,)}, "does not expand"),
    ("expand", "f32[3,1]", {"shape": (-1, 3, 4)}, "does not expand"),
    ("expand", "f32[1]", {"shape": (-2,)}, "does not expand"),
    ("slice", "f32[3,4]", {"axis": 2}, "axis 2 is out of range"),
    ("slice", "f32[3,4]", {"axis": 0, "step": 0}, "step=0"),
    ("slice", "f32[3,4]", {"axis": 0, "step": -1}, "step=-1"),
    ("slice", "f32[]", FLAT, "no axis"),
    ("flip", "f32[3,4]", {"axes": (0, 0)}, "one dimension twice"),
    ("flip", "f32[3,4]", {"axes": (5,)}, "5 is out of range"),
    ("concat", "", FLAT, "no axis"),
    ("concat", "f32[]", FLAT, "no axis"),
    ("concat", "f32[2,3] f32[2,4]", FLAT, "input 1 [2, 4]"),
    ("concat", "f32[2,3] f32[2]", {"axis": 1}, "input 1 [2]"),
    ("concat", "f32[2] f32[2]", {"axis": 1}, "axis 1 is out of range"),
    ("concat_in_place", "f32[2,3] f32[2,4]", FLAT, "input 1 [2, 4]"),
    ("pad", "f32[3,4]", {"low": (1,), "high": (1,)}, "rank 2"),
    ("pad", "f32[3,4]", {"low": (-2, 0), "high": (-2, 0)}, "axis 0 of size 3"),
    ("pad", "f32[3,4]", {"low": (0, 4), "high": (0, 0), "mode": "reflect"}, "axis 1 of size 4"),
    ("pad", "f32[3,4]", {"low": (-1, 0), "high": (0, 0), "mode": "replicate"}, "replicate"),
    ("pad", "f32[0,4]", {"low": (1, 0), "high": (0, 0), "mode": "replicate"}, "axis 0 of size 0"),
    ("pad", "f32[4]", {"low": (1,), "high": (0,), "mode": "wrap"}, "mode='wrap'"),
    ("to_layout", "f32[3,4]", {"layout": "nhwc"}, "rank 3, 4 or 5"),
    ("to_layout", "f32[3,4]", {"layout": "nchw"}, "layout='nchw'"),
    ("gather", "f32[3,4] i32[3,4]", FLAT, "int32, not int64"),
    ("gather", "f32[3,4] i64[3]", FLAT, "[3] does not fit"),
    ("gather", "f32[3,4] i64[3,5]", FLAT, "[3, 5] does not fit"),
    ("gather", "f32[3,4]", FLAT, "1 given"),
    ("scatter_add", "i64[3] f32[4]", {"shape": (5,), "axis": 0}, "do not fit"),
    ("scatter_add", "i64[3] f32[3]", {"shape": (5, 5), "axis": 0}, "do not fit"),
    ("scatter_add", "i64[3,4] f32[3,4]", {"shape": (5, 3), "axis": 0}, "larger than shape"),
    ("scatter_add", "f32[3] f32[3]", {"shape": (5,), "axis": 0}, "float32, not int64"),
    ("index_select", "f32[3,4] i64[2,2]", FLAT, "rank 2, not 1"),
    ("index_select", "f32[3,4] bool[3]", FLAT, "the index is bool"),
    ("embedding", "f32[5] i64[2]", {}, "rank 1, not 2"),
    ("embedding", "f32[5,3] f32[2]", {}, "the index is float32"),
    ("embedding", "f32[5,3] i64[2]", {"padding_idx": 5}, "padding_idx=5"),
    ("embedding", "f32[5,3] i64[2]", {"padding_idx": -2}, "padding_idx=-2"),
    ("embedding_grad", "f32[2,3] i64[4]", {"rows": 5}, "grad [2, 3] does not fit"),
    ("embedding_grad", "i64[2,3] i64[2]", {"rows": 5}, "of int64"),
    ("embedding_grad", "f32[2,3] i64[2]", {"rows": 5, "padding_idx": 9}, "padding_idx=9"),
    ("embedding_grad", "f32[2,3] i64[2]", {}, "'rows'"),
    ("embedding_grad", "f32[2,3] i64[2] f32[4,3]", {"rows": 5}, "onto f32[4,3] does not fit"),
    *(
        case
        for name in ("sum", "mean", "prod", "max", "min", "any", "all", "var")
        for case in (
            (name, "f32[3,4]", {"axes": (2,)}, "2 is out of range"),
            (name, "f32[3,4]", {"axes": (0, -2)}, "one dimension twice"),
            (name, "f32[3,4]", {"axes": ()}, "names no dimension"),
            (name, "f32[3,4]", {"axis": 0}, "no attribute 'axis'"),
        )
    ),
    ("mean", "i64[3]", {}, "mean of int64"),
    ("var", "bool[3]", {}, "var of bool"),
    ("var", "f32[3]", {"correction": -1}, "correction=-1"),
    ("max", "f32[0,4]", {}, "max over axis 0"),
    ("min", "f32[3,0]", {"axes": 1}, "min over axis 1"),
    *(
        case
        for name in ("argmax", "argmin")
        for case in (
            (name, "f32[3,4]", {"axis": 2}, "axis 2 is out of range"),
            (name, "f32[0,4]", {}, "empty axis"),
            (name, "f32[3,0]", {"axis": 1}, "empty axis"),
            (name, "bool[3]", {}, f"{name} of bool"),
        )
    ),
    *(
        (
            op.name,
            "bool[3]",
            {"threshold": {"threshold": 0.0, "value": 0.0}, "clamp_nan": {"min": 0.0}}.get(
                op.name, {}
            ),
            f"{op.name} of bool",
        )
        for op in ACTIVATIONS
        if op.name not in ("sigmoid", "tanh")
    ),
    ("sigmoid", "f32[3]", {"beta": 1.0}, "no attribute 'beta'"),
    ("tanh", "f32[3] f32[3]", {}, "2 given"),
    ("gelu", "i32[3]", {}, "gelu of int32"),
    ("gelu", "f32[3]", {"approximate": "erf"}, "approximate='erf'"),
    ("leaky_relu", "f32[3]", {"negative_slope": "a"}, "not of kind float"),
    ("hardtanh", "f32[3]", {"min": 2.0, "max": 1.0}, "min=2.0"),
    ("celu", "f32[3]", {"alpha": 0.0}, "alpha=0.0"),
    ("softplus", "f32[3]", {"beta": 0.0}, "beta=0.0"),
    ("softshrink", "f32[3]", {"lambd": -1.0}, "lambd=-1.0"),
    ("threshold", "f32[3]", {"threshold": 1.0}, "'value'"),
    ("prelu", "f32[2,3] f32[2]", {}, "3 channels"),
    ("prelu", "f32[3] f32[3]", {}, "1 channels"),
    ("prelu", "f32[2,3] f16[3]", {}, "weight float16"),
    ("prelu", "i32[2,3] i32[3]", {}, "prelu of int32"),
    ("glu", "f32[2,3]", {}, "cannot be halved"),
    ("glu", "f32[]", {}, "no axis"),
    ("glu", "i64[2,4]", {}, "glu of int64"),
    ("dropout", "f32[3] i64[]", {"p": 1.5}, "p=1.5"),
    ("dropout", "f32[3] i64[]", {"p": float("nan")}, "p=nan"),
    ("dropout", "f32[3] i64[1]", {}, "the seed is i64[1]"),
    ("dropout", "f32[3] i32[]", {}, "the seed is i32[]"),
    ("dropout", "i64[3] i64[]", {}, "dropout of int64"),
    ("dropout", "f32[3]", {}, "1 given"),
]


@pytest.mark.parametrize(
    ("op", "types", "attrs", "names"), BAD, ids=[f"{c[0]}-{c[1]}-{c[3]}" for c in BAD]
)
def test_bad_input_is_refused_by_name(op, types, attrs, names):
    with pytest.raises(GraphError) as caught:
        infer(op, [parse_type(t) for t in types.split()], attrs)
    assert names in str(caught.value)


def test_every_operator_here_has_a_bad_case():
    families = itertools.chain(*(FAMILIES[f] for f in "movement reduce activation random".split()))
    assert {op.name for op in families} <= {case[0] for case in BAD}


def test_completed_attributes_are_complete():
    families = itertools.chain(*(FAMILIES[f] for f in "movement reduce activation random".split()))
    for op, sample in [(each, s) for each in families for s in each.samples()]:
        types = [TensorType.from_tensor(t) for t in sample.tensors("f32")]
        full, _ = infer(op.name, types, sample.attrs)
        again, _ = infer(op.name, types, full)
        assert full == again, op.name
        assert "-1" not in str({k: full.get(k) for k in ("shape", "axis", "axes", "dims")})


@pytest.mark.parametrize("op", ["gather", "index_select", "embedding"])
def test_an_index_out_of_range_is_seen_when_it_runs(op):
    x, index = torch.randn(3, 2), torch.tensor([7])
    args = (x, index[None]) if op == "gather" else (x, index)
    attrs = {"padding_idx": -1} if op == "embedding" else {"axis": 0}
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        TABLE[op].reference(*args, **attrs)


# ---- values -------------------------------------------------------------------------------------


def emit(op: str, tensors: list[torch.Tensor], attrs: dict):
    build = GraphBuilder(infer, op)
    ins = [build.input(f"x{i}", TensorType.from_tensor(t)) for i, t in enumerate(tensors)]
    (out,) = build.emit(op, ins, attrs)
    Ops(build).sym(out).output("y")
    return build.finish(), dict(zip(ins, tensors, strict=True))


def gradients(op: str, tensors: list[torch.Tensor], attrs: dict, seed: torch.Tensor):
    """The gradients our rule gives, by the references."""
    graph, feed = emit(op, tensors, attrs)
    wrt = [name for name, t in feed.items() if t.is_floating_point()]
    back = differentiate(graph, "y", wrt)
    got = evaluate(back, feed | ({"grad_y": seed} if "grad_y" in back.inputs else {}))
    return [got[f"grad_{name}"] for name in wrt]


def torch_gradients(fn, tensors: list[torch.Tensor], seed: torch.Tensor):
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    wrt = [t for t in leaves if t.requires_grad]
    return torch.autograd.grad(fn(*leaves), wrt, seed)


LANDS_ON_EDGES = torch.tensor(
    [[1.0, 1.0, 1.0, 0.0], [0.0, 2.0, 0.0, 3.0], [4.0, 0.0, 2.0, 2.0]], dtype=torch.float64
)
X4 = torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
AGAINST_TORCH = [
    # operator, inputs, attributes, the same in torch: ties, zeros, borders, repeated indices
    ("max", [LANDS_ON_EDGES], {"axes": 1}, lambda x: x.amax(1)),
    ("max", [LANDS_ON_EDGES], {"axes": (0, 1), "keepdim": True}, lambda x: x.amax((0, 1), True)),
    ("min", [LANDS_ON_EDGES], {"axes": 1}, lambda x: x.amin(1)),
    ("prod", [LANDS_ON_EDGES], {"axes": 1}, lambda x: x.prod(1)),
    ("var", [LANDS_ON_EDGES], {"axes": 0}, lambda x: x.var(0)),
    (
        "pad",
        [X4],
        {"low": (0, 0, 1, 4), "high": (0, 0, 3, 2), "mode": "reflect"},
        lambda x: F.pad(x, (4, 2, 1, 3), mode="reflect"),
    ),
    (
        "pad",
        [X4],
        {"low": (0, 0, 1, 4), "high": (0, 0, 3, 2), "mode": "replicate"},
        lambda x: F.pad(x, (4, 2, 1, 3), mode="replicate"),
    ),
    (
        "pad",
        [X4],
        {"low": (0, 0, -1, 4), "high": (0, 1, 3, -2), "value": 2.0},
        lambda x: F.pad(x, (4, -2, -1, 3, 0, 1), value=2.0),
    ),
    ("slice", [X4], {"axis": 2, "start": 1, "step": 3}, lambda x: x[:, :, 1::3]),
    (
        "index_select",
        [X4, torch.tensor([1, 1, 4], dtype=torch.int32)],
        {"axis": 2},
        lambda x, i: x.index_select(2, i),
    ),
    (
        "embedding",
        [LANDS_ON_EDGES, torch.tensor([0, 2, 2, 1])],
        {"padding_idx": 2},
        lambda w, i: F.embedding(i, w, padding_idx=2),
    ),
    ("relu", [LANDS_ON_EDGES], {}, F.relu),
    ("hardtanh", [LANDS_ON_EDGES], {}, F.hardtanh),
    ("prelu", [LANDS_ON_EDGES - 1.0, torch.tensor(0.3, dtype=torch.float64)], {}, F.prelu),
]


@pytest.mark.parametrize(
    ("op", "tensors", "attrs", "fn"), AGAINST_TORCH, ids=[f"{c[0]}-{c[2]}" for c in AGAINST_TORCH]
)
def test_values_and_gradients_are_those_of_torch(op, tensors, attrs, fn):
    graph, feed = emit(op, tensors, attrs)
    out, want = evaluate(graph, feed)["y"], fn(*tensors)
    # torch's variance is one pass, and ours in float64 is closer to the truth
    assert out.dtype == want.dtype
    assert error(out, want) <= (EPS[torch.float64] if op == "var" else 0.0)
    seed = torch.randn(want.shape, dtype=want.dtype) if want.numel() != 1 else torch.ones_like(want)
    pairs = zip(
        gradients(op, tensors, attrs, seed), torch_gradients(fn, tensors, seed), strict=True
    )
    for got, exact in pairs:
        assert error(got, exact) <= 16 * EPS[torch.float64]


@pytest.mark.parametrize("op", [op.name for op in ACTIVATIONS if op.name != "clamp_nan"])
def test_nan_goes_through_activations_and_16_bit_gradients_round_once(op):
    attrs = {"threshold": 0.5, "value": 1.0} if op == "threshold" else {}
    x = torch.tensor([float("nan")])
    graph, feed = emit(op, [x], attrs)
    expected = getattr(F, {"log_sigmoid": "logsigmoid"}.get(op, op))(x, *attrs.values())
    assert torch.equal(evaluate(graph, feed)["y"].isnan(), expected.isnan())
    x, seed = torch.randn(200).half(), torch.randn(200).half()
    exact = gradients(op, [x.double()], attrs, seed.double())[0]
    got = gradients(op, [x], attrs, seed)[0]
    assert error(got, exact) <= 2 * EPS[torch.float16]


def shapes_of(count: int, gen: torch.Generator) -> list[int]:
    """Random sizes that multiply to ``count``, a few of them 1."""
    sizes = []
    while count > 1:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        sizes.append(divisors[int(torch.randint(0, len(divisors), (), generator=gen))])
        count //= sizes[-1]
    return sizes


def test_reshape_strides_are_those_of_torch_for_any_input():
    gen = torch.Generator().manual_seed(0)
    for trial in range(500):
        count = [1, 4, 6, 12, 24][trial % 5]
        x = torch.zeros([2 * n for n in shapes_of(count, gen)])
        sizes = [n // 2 for n in x.shape]
        for dim, n in enumerate(sizes):
            odd = bool(torch.randint(0, 2, (), generator=gen))
            x = x.narrow(dim, 0, n) if odd else x[(slice(None),) * dim + (slice(None, None, 2),)]
        x = x.permute(torch.randperm(x.ndim, generator=gen).tolist())
        if trial % 3 == 0 and x.ndim:
            x = x[:1].expand(x.shape)
        shape = tuple(shapes_of(count, gen))
        _, (said,) = infer("reshape", [TensorType.from_tensor(x)], {"shape": shape})
        got = x.reshape(shape)
        assert same_strides(shape, said.strides, got.stride()), (x.shape, x.stride(), shape)


def test_views_are_views():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for op in filter(lambda each: each.view, FAMILIES["movement"]):
        for attrs in ({"shape": (2, 3, 4)}, {"dims": (2, 0, 1)}, {"axis": 2, "step": 2}):
            if set(attrs) <= set(op.attrs):
                graph, feed = emit(op.name, [x], attrs)
                assert evaluate(graph, feed)["y"].data_ptr() == x.data_ptr(), op.name


def test_embedding_gradients_do_not_depend_on_the_run():
    grad, index = torch.randn(500, 8), torch.randint(0, 7, (500,))
    runs = [
        TABLE["embedding_grad"].reference(grad, index, None, rows=7, padding_idx=-1) for _ in "ab"
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize(("rest", "named"), [((0, 99), {}), ((0,), {"axis": 1})])
def test_an_operator_of_many_inputs_takes_each_attribute_once(rest, named):
    build = GraphBuilder(infer, "g")
    b = Ops(build)
    x = b.sym(build.input("x", parse_type("f32[2,3]")))
    with pytest.raises(GraphError, match=r"concat (takes at most|was given its attribute)"):
        b.concat([x, x], *rest, **named)
