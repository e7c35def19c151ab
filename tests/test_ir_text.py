"""Graphs as text: what is printed is read back, and what is damaged or hostile is refused."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from deuteron.errors import DeuteronError, FileError
from deuteron.ir import Graph, GraphBuilder, TensorType, check, parse_graph
from deuteron.ir.graph import Constant
from deuteron.ir.text import literal, parse_literal, parse_type, split_args
from deuteron.ops import infer


def tensors(graph: Graph) -> dict[str, torch.Tensor]:
    return {name: constant.data for name, constant in graph.constants.items()}


def block() -> Graph:
    """A graph with every kind of line: constants short and long, options, several results."""
    build = GraphBuilder(infer, 'a "block"')
    build.input("x", TensorType.of((2, 3, 4, 4), "f32", "nhwc"))
    build.input("s", TensorType.of((2, 4), "f32", strides=(8, 2)))
    w = build.constant(torch.arange(108.0).reshape(4, 3, 3, 3), "w")
    k = build.constant(torch.tensor(float("-inf")))
    (y,) = build.emit("conv", ["x", w, None], {"padding": 1}, source="layer1.0 (a, b) # c")
    top = build.emit("max_pool_with_indices", [y], {"kernel": 2})
    (z,) = build.emit("maximum", ["s", k], source="two\nlines")
    for i, value in enumerate((*top, z)):
        build.output(f"out {i}", value)
    return build.finish()


# ---- types and literals ------------------------------------------------------------------------

TYPES = [
    "f32[]",
    "bool[3]",
    "f16[2,0,3]",
    "f16[32,64,56,56]@nhwc",
    "bf16[2,3,4]@nhwc",
    "i4[5]",
    "u8[2,3,4,5,6]@nhwc",
    "f64[2,3]{1,2}",
    "f32[2,3]{0,7}",
    "f8e4m3[1,1]{9,9}",
    "f32[0]{3}",
]


@pytest.mark.parametrize("text", TYPES)
def test_types_read_back(text):
    assert str(parse_type(text)) == text


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=5))
def test_any_strides_read_back(dims):
    shape, strides = [n for n, _ in dims], [s for _, s in dims]
    t = TensorType.of(shape, "f16", strides=strides)
    assert parse_type(str(t)) == t


@pytest.mark.parametrize("text", ["f32", "f32[a]", "f32[2", "f33[2]", "f32[2]{1,2}", "f32[2]@nhwc"])
def test_bad_types_are_refused(text):
    with pytest.raises(DeuteronError):
        parse_type(text)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(PLAIN)
def test_literals_read_back(value):
    text = literal(value)
    assert "\n" not in text and len(split_args(text)) == 1
    assert repr(parse_literal(text)) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "1 + 1",
        "2 ** 99",
        "[1, 2]",
        "{1: 2}",
        "{1}",
        "x",
        "True.real",
        "f'{1}'",
        "b'a'",
        "1j",
        "...",
        "-True",
        "-'a'",
        "(1",
        "",
        "1 if 1 else 2",
        "-" * 100_000 + "1",
        "(" * 5_000,
        "9" * 5_000,
        "'a",
        "not 1",
        "(i for i in (1,))",
        "print",
        "yield",
        "await x",
        "x := 1",
        "1;2",
        "1\n2",
    ],
    ids=lambda text: text[:24],
)
def test_code_is_refused_and_not_run(text):
    with pytest.raises(FileError, match="not a literal"):
        parse_literal(text)


# ---- graphs ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(graphs(nodes=6))
def test_random_graphs_read_back(made):
    graph, _ = made
    again = parse_graph(str(graph), tensors(graph))
    assert again == graph
    assert str(again) == str(graph)
    check(again, infer)


def test_all_kinds_of_line_read_back():
    graph = block()
    text = str(graph)
    assert parse_graph(text, tensors(graph)) == graph
    assert str(parse_graph(text, tensors(graph))) == text
    sources = [node.source for node in parse_graph(text, tensors(graph)).nodes]
    assert sources == ["layer1.0 (a, b) # c", "", "two lines"]


@given(st.text(min_size=1), st.text(min_size=1), st.text())
def test_any_names_read_back(name, value, source):
    build = GraphBuilder(infer, name)
    x = build.input(value, TensorType.of((2,), "f32"))
    (y,) = build.emit("relu", [x], source=source)
    build.output(name, y)
    assert parse_graph(str(build.finish())) == build.finish()


def test_constants_of_every_type_read_back():
    build = GraphBuilder(infer, "constants")
    odd = torch.tensor([[0.0, -0.0, 1e-30], [float("inf"), float("nan"), 0.1]])
    for name in "f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 u8 bool".split():
        kind = TensorType.of((), name).dtype.torch
        for data in (
            odd.nan_to_num(1.0, 2.0, 0.0) if not kind.is_floating_point else odd,
            torch.ones(()),
            torch.zeros(2, 0),
            torch.ones(3, 2).t(),
            torch.ones(20),
        ):
            value = build.constant(data.to(kind), "c")
            if value not in dict(build.outputs):
                build.output(value, value)
    graph = build.finish()
    assert parse_graph(str(graph), tensors(graph)) == graph


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2"])
def test_every_way_to_write_nan_is_the_same_constant(name):
    kind = TensorType.of((), name).dtype
    size = kind.bits // 8
    ways = [bytes([0xFF] * (size - 1) + [high]) for high in (0x7F, 0xFF)]
    numbers = [torch.frombuffer(bytearray(way), dtype=kind.torch) for way in ways]
    assert all(n.double().isnan().all() for n in numbers)
    assert Constant(numbers[0]) == Constant(numbers[1]) != Constant(numbers[0].double().zero_())


def test_a_missing_or_exchanged_tensor_is_noticed():
    graph = block()
    with pytest.raises(FileError, match="not at hand"):
        parse_graph(str(graph))
    with pytest.raises(FileError, match="not the one the graph was made with"):
        parse_graph(str(graph), {"w": graph.constants["w"].data + 1})
    with pytest.raises(FileError, match=r"the graph says f32\[4,3,3,3\]"):
        parse_graph(str(graph), {"w": torch.zeros(4)})
    turned = graph.constants["w"].data.contiguous(memory_format=torch.channels_last)
    assert parse_graph(str(graph), {"w": turned}) == graph


# ---- damage ------------------------------------------------------------------------------------


def read(text: str) -> Graph:
    return check(parse_graph(text, tensors(block())), infer)


def test_text_cut_short_is_refused():
    lines = str(block()).splitlines()
    for count in range(len(lines)):
        with pytest.raises(FileError):
            parse_graph("\n".join(lines[:count]), tensors(block()))
        with pytest.raises(DeuteronError):
            read("\n".join(lines[:count] + lines[count + 1 :]))
    for count in range(len(lines) - 1):  # a line twice
        with pytest.raises(DeuteronError):
            read("\n".join([*lines[: count + 1], *lines[count:]]))


def test_edited_numbers_are_noticed():
    text = str(block())
    for match in re.finditer(r"\d+", text):
        for other in ("7", "0", "99999999999999999999", "-1"):
            changed = text[: match.start()] + other + text[match.end() :]
            if changed == text or "# " in text[text.rfind("\n", 0, match.start()) : match.start()]:
                continue
            with suppress(DeuteronError):
                assert read(changed) != block(), changed


@settings(max_examples=120)
@given(st.data())
def test_damaged_text_never_raises_anything_else(data):
    text = str(block())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 12))
        new = data.draw(st.text('%"(){},=\\_\n-19ab', max_size=2) | st.text(max_size=4))
        text = text[:at] + new + text[at + gone :]
    with suppress(DeuteronError):
        read(text)


@pytest.mark.parametrize(
    "line",
    [
        "const %c: f32[2] = __import__('os')",
        "const %c: f32[2] = 'ab'",
        "const %c: f32[2] = (1,)",
        "const %c: i64[] = 1e400",
        "const %c: i8[] = 999999999999999999999",
        "const %c: f32[2]",
        "const %c: f32[2]{90000000000} = (1, 2)",
        "const %c: f32[2]{2} = (1, 2)",
        "const %c: f32[9999999999999] = 1",
        "const %c: f32[2] = sha256:0",
        "%y: f32[2] = relu(%x, __import__('os'))",
        "%y: f32[2] = relu(%x",
        "%y: f32[2] = relu(%x) and more",
        "%y = relu(%x)",
        "%y: f32[2] = relu(%x, a=1, a=2)",
        "%x: f32[2] = relu(%x)",
        "%y: f32[2] = os.system(%x)",
    ],
)
def test_hostile_lines_are_refused(line):
    with pytest.raises(DeuteronError):
        check(parse_graph(f'graph "g"(%x: f32[2]) {{\n  {line}\n  return "y"=%x\n}}'), infer)


@pytest.mark.parametrize(
    ("target", "out"),
    [
        ("os.system.default", ("f32[2]",)),
        ("aten.roll.overloads", ()),
        ("aten.__class__.mro", ()),
        ("aten.add_.Tensor", ("f32[2]",)),
        ("aten.from_file.default", ()),
        ("aten.roll", ()),
        ("aten.no_such_thing.default", ()),
        ("aten.roll.default", 3),
        ("aten.roll.default", (3,)),
        ("aten.roll.default", ("f32[two]",)),
    ],
)
def test_opaque_calls_reach_harmless_operators_only(target, out):
    call = f'aten(%x, target="{target}", args=(), kwargs=(), out={literal(out)})'
    with pytest.raises(DeuteronError):
        text = f'graph "g"(%x: f32[2]) {{\n  %y: f32[2] = {call}\n  return "y"=%y\n}}'
        check(parse_graph(text), infer)


def test_a_source_of_spaces_is_none():
    build = GraphBuilder(infer, "g")
    build.input("x", parse_type("f32[2]"))
    build.output("y", build.emit("relu", ["x"], source=" ")[0])
    graph = build.finish()
    assert str(parse_graph(str(graph))) == str(graph)
