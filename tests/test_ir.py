"""The vocabulary: element types, tensor types, the builder, the checker, rewriting, constants.

Graphs as text are in test_ir_text.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deuteron.errors import GraphError
from deuteron.ir import (
    Attrs,
    Constant,
    Graph,
    GraphBuilder,
    Node,
    Region,
    Rule,
    TensorType,
    check,
    dtype,
    rewrite,
)
from deuteron.ir.dtype import ALL, promote
from deuteron.ir.text import restride
from deuteron.ir.types import same_strides, strides_for
from deuteron.ops import infer

REAL = [d for d in ALL if d.bits >= 8 and d.short[:2] != "f8" and not d.is_foreign]
F32 = TensorType.of((2, 3), "f32")


# ---- element types ---------------------------------------------------------------------------


@pytest.mark.parametrize("d", ALL, ids=lambda d: d.short)
def test_every_name_finds_its_type(d):
    for name in (d, d.name, d.short, d.torch):
        assert name is None or dtype(name) is d
    assert repr(d) == f"deuteron.{d.name}"


def test_an_unknown_type_is_refused_with_the_known_ones():
    for odd in ("f31", 3.5, None, [], torch.complex32):
        with pytest.raises(GraphError, match="f16, bf16"):
            dtype(odd)


def test_promotion_is_torchs():
    def sample(d, rank):
        return torch.empty((1,) * rank, dtype=d.torch)

    for a, b in product(product(REAL, (0, 1, 2)), repeat=2):
        assert promote(a, b).torch == torch.result_type(sample(*a), sample(*b)), (a, b)


def test_types_without_a_common_one_say_so():
    with pytest.raises(GraphError, match="float8_e4m3 and float16 have no common type"):
        promote((dtype("f8e4m3"), 1), (dtype("f16"), 1))


def test_small_types_are_packed():
    assert dtype("i4").nbytes(3) == 2
    assert dtype("f8e4m3").nbytes(3) == 3
    assert TensorType.of((5,), "bf16").nbytes == 10


# ---- tensor types ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 4, 5, 6), torch.channels_last_3d),
        ((2, 1, 4, 5), torch.channels_last),
    ],
)
def test_nhwc_is_torchs_channels_last(shape, format):
    t = torch.empty(shape, memory_format=format)
    assert strides_for(shape, "nhwc") == t.stride()
    assert TensorType.from_tensor(t).is_layout("nhwc")


def test_layouts_have_names():
    assert TensorType.of((2, 3, 4), "f32", "nhwc").strides == (12, 1, 3)
    assert TensorType.of((2, 3, 4), "f32").layout == "contiguous"
    assert TensorType.of((2, 3, 4), "f32", "nhwc").layout == "nhwc"
    assert TensorType.of((2, 3), "f32", strides=(1, 2)).layout == "strided"
    pixel = TensorType.of((2, 3, 1, 1), "f32", "nhwc")
    assert pixel.layout == "contiguous"
    assert pixel.is_layout("nhwc") and pixel.is_layout("contiguous")
    assert not TensorType.of((2, 3), "f32").is_layout("nhwc")


@pytest.mark.parametrize(
    ("build", "wrong"),
    [
        (lambda: TensorType.of((2, -1), "f32"), "negative size"),
        (lambda: TensorType.of((2, 3), "f32", strides=(1,)), "1 strides for 2 dimensions"),
        (lambda: TensorType.of((2, 3), "f32", strides=(-3, 1)), "negative stride"),
        (lambda: TensorType.of((2, 3), "f32", "nhwc"), "rank 3, 4 or 5"),
        (lambda: TensorType.of((2, 3), "f32", "chwn"), "unknown layout"),
        (lambda: TensorType.of((2.5, 3), "f32"), "whole numbers"),
        (lambda: TensorType.of("23", "f32"), "whole numbers"),
    ],
)
def test_bad_types_are_refused(build, wrong):
    with pytest.raises(GraphError, match=wrong):
        build()


@st.composite
def strided(draw):
    """A torch tensor of rank 0 to 4: permuted, sliced, expanded, with sizes 0 and 1."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))
    base = torch.empty([n * s for n, s in zip(shape, steps, strict=True)])
    t = base[tuple(slice(None, None, s) for s in steps)].permute(order)
    return t.unsqueeze(0).expand(2, *t.shape) if draw(st.booleans()) and t.ndim < 4 else t


@given(strided())
def test_a_type_knows_its_memory(t):
    kind = TensorType.from_tensor(t)
    places = torch.zeros((), dtype=torch.int64)
    for n, s in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        places = (torch.arange(n) * s).reshape(-1, *[1] * places.ndim) + places
    found = places.reshape(-1).tolist()
    assert kind.numel == len(found)
    assert kind.storage_numel == (max(found) + 1 if found else 0)
    assert kind.nbytes == 4 * len(set(found)) or 0 not in t.stride()
    assert kind.is_dense == (sorted(found) == list(range(len(found))))
    like = kind.dense_like()
    assert like.is_dense and like.shape == kind.shape
    if 0 not in t.stride():
        assert same_strides(t.shape, like.strides, torch.neg(t).stride())


# ---- the builder -------------------------------------------------------------------------------


def builder() -> GraphBuilder:
    build = GraphBuilder(infer, "g")
    build.input("x", F32)
    return build


@pytest.mark.parametrize(
    ("act", "wrong"),
    [
        (lambda b: b.emit("relu", ["z"]), "no value 'z' in graph 'g'"),
        (lambda b: b.input("x", F32), "'x' is taken"),
        (lambda b: b.output("y", "z"), "unknown value 'z'"),
        (lambda b: (b.output("y", "x"), b.output("y", "x")), "already an output 'y'"),
        (lambda b: b.emit("relu", ["x"], names=["x"]), "'x' is made twice"),
        (lambda b: b.emit("relu", ["x"], names=["a", "b"]), "1 results, 2 named"),
        (lambda b: b.emit("rellu", ["x"]), "no operator 'rellu'"),
        (lambda b: b.emit("relu", ["x"], {"slope": 1}), "no attribute 'slope'"),
        (lambda b: b.emit("relu", ["x", "x"]), "takes inputs"),
        (lambda b: b.emit("matmul", ["x", None]), "needs its input 'y'"),
    ],
)
def test_the_builder_refuses(act, wrong):
    build = builder()
    with pytest.raises(GraphError, match=wrong):
        act(build)
    assert build.nodes == [] and set(build.types) == {"x"}, "a refusal leaves nothing behind"


def test_an_error_says_what_was_asked_and_where():
    with pytest.raises(GraphError) as caught:
        builder().emit("matmul", ["x", "x"], source="layer1.fc")
    assert caught.value.asked == "matmul(x: f32[2,3], x: f32[2,3])"
    assert caught.value.where == "layer1.fc"


def test_fresh_names_are_not_taken():
    build = builder()
    assert [build.emit("relu", ["x"])[0] for _ in range(3)] == ["relu", "relu_1", "relu_2"]
    build.input("neg_1", F32)
    assert [build.emit("neg", ["x"])[0] for _ in range(2)] == ["neg", "neg_2"]


def test_equal_scalars_share_a_value():
    build = builder()
    names = [build.constant(torch.tensor(v)) for v in (1.0, 1.0, 0.0, -0.0, float("nan"))]
    assert names[0] == names[1] and len(set(names)) == 4
    assert build.constant(torch.tensor(1.0, dtype=torch.float64)) not in names


# ---- the checker -------------------------------------------------------------------------------


def good() -> Graph:
    build = builder()
    build.constant(torch.ones(3), "c")
    (a,) = build.emit("add", ["x", "c"])
    (y,) = build.emit("softmax", [a])
    build.output("y", y)
    return check(build.finish(), infer)


def edited(index: int, **fields: object) -> tuple[Node, ...]:
    nodes = list(good().nodes)
    nodes[index] = replace(nodes[index], **fields)
    return tuple(nodes)


def without(name: str) -> dict[str, TensorType]:
    return {v: t for v, t in good().types.items() if v != name}


BROKEN = {
    "reads 'softmax' before it is made": {"nodes": edited(0, inputs=("softmax", "c"))},
    "'add' is made twice": {"nodes": (*good().nodes, good().nodes[0])},
    "input is listed twice": {"inputs": ("x", "x")},
    "both input and constant": {"inputs": ("x", "c")},
    "input 'x' has no type": {"types": without("x")},
    "'add' has no type": {"types": without("add")},
    "constant 'c' is f32": {"types": without("c") | {"c": TensorType.of((3,), "f16")}},
    "by inference, the graph says f16": {
        "types": good().types | {"add": TensorType.of((2, 3), "f16")}
    },
    r"by inference, the graph says f32\[2,3\]\{1,2\}": {
        "types": good().types | {"add": TensorType.of((2, 3), "f32", strides=(1, 2))}
    },
    "values that do not exist: .'ghost'": {"types": good().types | {"ghost": F32}},
    "no operator 'addd'": {"nodes": edited(0, op="addd")},
    "has no attribute 'way'": {"nodes": edited(1, attrs=Attrs({"way": 1}))},
    "attributes axis=-1 should be axis=1": {"nodes": edited(1, attrs=Attrs({"axis": -1}))},
    "attributes  should be": {"nodes": edited(1, attrs=Attrs())},
    "makes 1 results, 2 are named": {"nodes": edited(1, outputs=("softmax", "more"))},
    "which nothing makes": {"outputs": (("y", "ghost"),)},
    "two outputs have one name": {"outputs": (("y", "add"), ("y", "softmax"))},
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wrong", BROKEN)
def test_the_checker_catches(wrong, before):
    """Also if nodes were found right where they were before."""
    right, graph = {}, good()
    if before:
        check(graph, infer, "import", right)
    with pytest.raises(GraphError, match=wrong) as caught:
        check(replace(graph, **BROKEN[wrong]), infer, "planting", right)
    assert "after planting" in caught.value.where


def test_a_node_that_was_found_right_is_not_inferred_again():
    asked, right, graph = [], {}, good()

    def counted(op, *how):
        asked.append(op)
        return infer(op, *how)

    check(graph, counted, "import", right)
    first = len(asked)
    check(replace(graph, name="later"), counted, "a pass", right)
    assert first == len(graph.nodes) == len(asked)


# ---- attributes, constants, regions ------------------------------------------------------------


def test_attributes_are_equal_as_written():
    assert Attrs({"a": 1, "b": 2}) == Attrs({"b": 2, "a": 1})
    assert hash(Attrs({"a": 1, "b": 2})) == hash(Attrs({"b": 2, "a": 1}))
    assert Attrs({"a": float("nan")}) == Attrs({"a": float("nan")})
    for x, y in ((1, True), (1, 1.0), (0.0, -0.0), ((1,), [1])):
        assert Attrs({"a": x}) != Attrs({"a": y})
    assert Attrs({"a": 1}) != {"a": 1}


def test_constants_are_equal_by_type_and_content():
    t = torch.randn(2, 3, 4, 4)
    assert Constant(t) == Constant(t.clone())
    assert Constant(t) != Constant(t + 1)
    assert Constant(t) != Constant(t.double())
    turned = Constant(t.contiguous(memory_format=torch.channels_last))
    assert Constant(t).digest == turned.digest and Constant(t) != turned
    assert Constant(torch.zeros(2)) != Constant(-torch.zeros(2))
    assert Constant(torch.full((2,), torch.nan)) == Constant(torch.full((2,), torch.nan))
    assert Constant(torch.zeros(0, 3)).digest != Constant(torch.zeros(3, 0)).digest
    assert Constant(torch.ones(4, 4)[::2]).type == TensorType.of((2, 4), "f32")
    for kind in ("bool", "i64", "f16", "bf16", "f8e4m3"):
        assert Constant(torch.ones(3).to(dtype(kind).torch)) == Constant(
            torch.ones(3).to(dtype(kind).torch)
        )


def test_restride_keeps_the_values():
    t = torch.randn(2, 3, 4, 4)
    turned = restride(t, TensorType.from_tensor(t).with_layout("nhwc"))
    assert torch.equal(t, turned) and turned.stride() == strides_for((2, 3, 4, 4), "nhwc")
    assert restride(t, TensorType.from_tensor(t)) is t


def test_regions_of_equal_work_have_one_key():
    def region(name: str, constant: bool, number: float) -> Region:
        build = GraphBuilder(infer, name)
        x, w = (build.input(name + v, TensorType.of((3, 3), "f32")) for v in "xw")
        (m,) = build.emit("matmul", [x, w])
        (y,) = build.emit("mul", [m, build.constant(torch.tensor(number))])
        build.output("y" + name, y)
        return Region(build.finish(), frozenset([w] if constant else []), 0)

    assert region("a", True, 2.0).key == region("b", True, 2.0).key
    assert len({region("a", c, n).key for c in (True, False) for n in (2.0, 3.0)}) == 4


# ---- rewriting -----------------------------------------------------------------------------------


def chain(*ops: str) -> Graph:
    build = builder()
    value = "x"
    for op in ops:
        (value,) = build.emit(op, [value])
    build.output("y", value)
    return build.finish()


def swap(name: str, old: str, new: str) -> Rule:
    return Rule(name, (old,), lambda rw, node: [rw.emit(new, node.inputs)])


def test_rules_fire_and_are_counted():
    graph, fired = rewrite(chain("relu", "neg", "relu"), [swap("r", "relu", "exp")], infer)
    assert [n.op for n in graph.nodes] == ["exp", "neg", "exp"]
    assert fired == {"r": 2}
    again, fired = rewrite(graph, [swap("r", "relu", "exp")], infer)
    assert again == graph and not fired


def test_the_first_rule_that_fits_wins_and_star_rules_come_last():
    rules = [
        Rule("any", ("*",), lambda rw, node: None if node.op == "abs" else [rw.emit("abs", ["x"])]),
        swap("first", "relu", "exp"),
        swap("second", "relu", "neg"),
    ]
    _, fired = rewrite(chain("relu"), rules, infer, rounds=1)
    assert fired == {"first": 1}
    _, fired = rewrite(chain("tanh"), rules, infer)
    assert fired == {"any": 1}


def test_rules_that_undo_each_other_stop():
    rules = [swap("there", "relu", "neg"), swap("back", "neg", "relu")]
    graph, fired = rewrite(chain("relu"), rules, infer, rounds=5)
    assert fired.total() == 5
    check(graph, infer)


def test_only_use_counts_readers_and_outputs():
    seen: dict[str, bool] = {}

    def look(rw, node):
        seen[node.outputs[0]] = rw.only_use(node.inputs[0])

    build = builder()
    (a,) = build.emit("relu", ["x"])  # x is read here alone, a twice, b once and as an output
    (b,) = build.emit("neg", [a])
    (c,) = build.emit("mul", [a, a])
    (d,) = build.emit("exp", [b])
    for name, value in zip("bcd", (b, c, d), strict=True):
        build.output(name, value)
    rewrite(build.finish(), [Rule("look", ("*",), look)], infer)
    assert seen == {"relu": True, "neg": False, "mul": False, "exp": False}


def test_a_value_that_stands_for_two_has_the_readers_of_both():
    seen = []

    def undo(rw, node):
        inner = rw.made_by(node.inputs[0], "neg")
        return None if inner is None else [inner.inputs[0]]

    rules = [
        Rule("undo", ("neg",), undo),
        Rule("look", ("exp",), lambda rw, node: seen.append(rw.only_use(node.inputs[0]))),
    ]
    build = builder()
    (a,) = build.emit("relu", ["x"])  # read once, until both that undo its negation stand for it
    (n,) = build.emit("neg", [a])
    for i, (value,) in enumerate([build.emit("neg", [n]), build.emit("neg", [n])]):
        build.output(f"y{i}", build.emit("exp", [value])[0])
    rewrite(build.finish(), rules, infer)
    assert seen and not seen[1]


def test_a_rule_may_not_change_what_a_value_is():
    rule = Rule("bad", ("relu",), lambda rw, node: [rw.emit("sum", node.inputs)])
    with pytest.raises(GraphError, match=r"'bad' turned f32\[2,3\] into f32\[\]"):
        rewrite(chain("relu"), [rule], infer)


def test_what_reads_a_changed_memory_order_is_inferred_again():
    build = GraphBuilder(infer, "g")
    build.input("x", TensorType.of((2, 3, 4, 4), "f32"))
    (a,) = build.emit("relu", ["x"])
    (b,) = build.emit("neg", [a])
    build.output("y", b)
    rule = Rule(
        "turn", ("relu",), lambda rw, node: [rw.emit("to_layout", ["x"], {"layout": "nhwc"})]
    )
    graph, _ = rewrite(build.finish(), [rule], infer)
    assert check(graph, infer).types[b].layout == "nhwc"
