"""What models write, and what a plan makes of it: fewer copies, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.engines.roofline import node_cost
from deuteron.frontends.torch_export import import_module
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ops import Ops, infer
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context
from deuteron.passes.spellings import as_models_write
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from tests.tolerances import DOUBLE, EPS, error

H200 = dt.target("h200")


class Written(nn.Module):
    """A function as a module, with what it needs in it."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, *args):
        return self.function(*args, **self.parts)


def planned(module, *args, within=1e-12):
    """The graph after the passes, whose numbers are the module's."""
    torch.manual_seed(0)
    module = module.eval()
    graph = import_module(module, args, {}).graph
    made = decide(graph, H200, Policy()).graph
    feed = dict(zip(made.inputs, args, strict=True))
    (got,) = evaluate(made, feed, float64=True).values()
    with torch.no_grad():
        want = module.double()(*(a.double() if a.is_floating_point() else a for a in args))
    assert error(got, want) <= within and got.shape == want.shape
    return made


def ops(graph) -> list[str]:
    return [node.op for node in graph.nodes]


def copies(graph) -> int:
    """Values that lie elsewhere than what they are a view of."""
    from deuteron.ir.types import view_strides

    count = ops(graph).count("to_layout")
    for node in graph.nodes:
        if node.op == "reshape":
            source, made = graph.types[node.uses[0]], graph.types[node.output]
            count += view_strides(source.shape, source.strides, made.shape) is None
    return count


def test_contiguous_is_row_major():
    module = Written(lambda x: x.permute(0, 2, 3, 1).contiguous()).eval()
    made = import_module(module, (torch.rand(2, 3, 4, 5),), {}).graph
    (value,) = made.output_values
    assert made.types[value].is_layout("contiguous")


@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_copies_nothing(batch_first):
    """q, k and v are cut out of one product by views, and heads are put together by a view."""
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    module = Written(lambda x, a: a(x, x, x, need_weights=False)[0], a=attention)
    made = planned(module, torch.rand(3, 7, 32))
    assert ops(made).count("linear") == 2 and "attention" in ops(made)
    assert copies(made) == (0 if batch_first else 1)  # the result is promised in the other order


def test_what_is_merged_and_split_again_is_never_merged():
    def heads(x):  # as torch's own attention does: batch and heads are one dimension for a while
        y = x.reshape(5, 12, 4).transpose(0, 1).reshape(3, 4, 5, 4)
        return y * 2

    made = planned(Written(heads), torch.rand(5, 3, 16))
    assert copies(made) == 0


def test_a_reshape_that_must_copy_still_does():
    made = planned(Written(lambda x: x.transpose(0, 1).reshape(-1) * 2), torch.rand(4, 6))
    assert copies(made) == 1


@pytest.mark.parametrize("sizes", [(6, 4), (1, 24), (2, 12), (8, 3), (24,)])
def test_any_chain_of_movement_keeps_its_meaning(sizes):
    def chain(x):
        y = x.reshape(2, 3, 4).permute(2, 0, 1).reshape(sizes)
        return y.permute(*reversed(range(y.dim()))).reshape(3, 8).t().reshape(4, 1, 6) + 1

    planned(Written(chain), torch.rand(24))


def test_rows_are_multiplied_as_they_lie():
    """Sequence first, as many encoders want it, and back."""
    module = Written(lambda x, a: a(x.transpose(0, 1)).transpose(0, 1) * 2, a=nn.Linear(8, 8))
    made = planned(module, torch.rand(3, 5, 8))
    assert ops(made) == ["linear", "mul"]


def test_rows_as_they_lie_may_be_scored_by_one_number_each():
    """As attention over the steps of a recurrent layer does."""
    module = Written(lambda x, a: a(x.transpose(0, 1)).softmax(1), a=nn.Linear(8, 1))
    planned(module, torch.rand(20, 2, 8))


NO = torch.tensor(False)


@pytest.mark.parametrize("kind", ["bool", "float", "causal", "causal float", "other"])
def test_masks_that_are_known(kind):
    masks = {
        "bool": torch.ones(6, 6, dtype=torch.bool),
        "float": torch.zeros(1, 1, 6, 6),
        "causal": torch.ones(6, 6, dtype=torch.bool).tril(),
        "causal float": torch.full((6, 6), torch.finfo(torch.float32).min).triu(1),
        "other": torch.ones(6, 6, dtype=torch.bool).index_put(
            (torch.tensor(3), torch.tensor(1)), NO
        ),
    }
    mask = masks[kind]

    def attend(x):
        wide = mask.to(x.dtype) if mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(x, x, x, attn_mask=wide.expand(2, 3, 6, 6))

    made = planned(Written(attend), torch.rand(2, 3, 6, 8))
    (node,) = [n for n in made.nodes if n.op == "attention"]
    # numbers that are added do not hide an infinite score
    assert (len(node.uses) == 3) == (kind in ("bool", "float", "causal"))
    assert node.attrs["causal"] == (kind == "causal")


LENGTHS = {"q_lengths": torch.tensor([5, 6]), "k_lengths": torch.tensor([3, 6])}
BESIDE_A_MASK = {
    "slopes": ({"slopes": torch.tensor([0.5, 0.25])}, {}),
    "dropout": ({"seed": torch.tensor(3)}, {"dropout": 0.5}),
    "lengths": (LENGTHS, {}),
    "lengths from the end": (LENGTHS, {"align": "end"}),
    "offset": ({}, {"offset": 2}),
    "offset and window": ({}, {"offset": -2, "window": (3, 1)}),
}


@pytest.mark.parametrize("seen", ["all", "causal", "window"])
@pytest.mark.parametrize("kind", BESIDE_A_MASK)
def test_what_else_attention_is_told_stays_beside_a_known_mask(kind, seen):
    more, attrs = BESIDE_A_MASK[kind]
    all_ = torch.ones(6, 6, dtype=torch.bool)
    mask = {"all": all_, "causal": all_.tril(), "window": all_.tril(1).triu(-2)}[seen]
    feed = {n: torch.randn(2, 2, 6, 4) for n in "qkv"} | more
    g = dt.Graph()
    given = {n: g.tensor(n, tuple(t.shape), t.dtype) for n, t in feed.items()}
    rest = (given.get(n) for n in ("slopes", "seed", "q_lengths", "k_lengths"))
    qkv = (given[n] for n in "qkv")
    g.attention(*qkv, g.constant(mask, "mask"), *rest, **attrs).output("y")
    made = as_models_write(g.ir(), Context(H200, Policy()))
    want, got = (evaluate(graph, feed, float64=True)["y"] for graph in (g.ir(), made))
    assert error(got, want) <= DOUBLE


def test_repeated_heads_are_grouped():
    def attend(q, k):
        more = k[:, :, None].expand(2, 2, 3, 6, 8).reshape(2, 6, 6, 8)
        return F.scaled_dot_product_attention(q, more, more * 1)

    def both(q, k):
        more = k[:, :, None].expand(2, 2, 3, 6, 8).reshape(2, 6, 6, 8)
        return F.scaled_dot_product_attention(q, more, more)

    made = planned(Written(both), torch.rand(2, 6, 6, 8), torch.rand(2, 2, 6, 8))
    (node,) = [n for n in made.nodes if n.op == "attention"]
    assert [made.types[v].shape[1] for v in node.uses] == [6, 2, 2]
    made = planned(Written(attend), torch.rand(2, 6, 6, 8), torch.rand(2, 2, 6, 8))
    (node,) = [n for n in made.nodes if n.op == "attention"]
    assert [made.types[v].shape[1] for v in node.uses] == [6, 6, 6]


def test_queries_keys_and_values_are_one_product():
    parts = {
        name: nn.Linear(16, size, bias=name != "k")
        for name, size in (("q", 16), ("k", 8), ("v", 8))
    }

    def attend(x, q, k, v):
        q, k, v = (f(x).view(2, 5, -1, 8).transpose(1, 2) for f in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    made = planned(Written(attend, **parts), torch.rand(2, 5, 16))
    assert ops(made).count("linear") == 1 and copies(made) == 0


def test_products_whose_results_are_needed_apart_stay():
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    module = Written(lambda x, a, b: a(x).softmax(-1) + b(x).softmax(-1), **parts)
    assert ops(planned(module, torch.rand(4, 8))).count("linear") == 2


@pytest.mark.parametrize("size", [32, 35])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windows_that_do_not_overlap_are_rows(size, layout):
    module = Written(lambda x, a: a(x).flatten(2).transpose(1, 2), a=nn.Conv2d(3, 64, 16, 16))
    x = torch.rand(2, 3, size, size).contiguous(memory_format=layout)
    made = planned(module, x)
    if layout is torch.contiguous_format:  # else the convolution reads its windows as they lie
        assert "conv" not in ops(made) and "linear" in ops(made)


def test_windows_that_overlap_stay_a_convolution():
    module = Written(lambda x, a: a(x), a=nn.Conv2d(3, 64, 16, 8))
    assert "conv" in ops(planned(module, torch.rand(2, 3, 32, 32)))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_products_before_enlarging(mode):
    def head(a, b, c, fuse):
        more = {} if mode == "nearest" else {"align_corners": False}
        large = [F.interpolate(x, size=(16, 16), mode=mode, **more) for x in (a, b)]
        return fuse(torch.cat([*large, c], 1))

    fuse = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    made = planned(
        Written(head, fuse=fuse),
        *(torch.rand(1, 8, s, s) for s in (4, 8, 16)),
        within=EPS[torch.float32],
    )  # folded weights are rounded
    assert "concat" not in ops(made) and ops(made).count("conv") == 3
    sizes = {made.types[n.uses[0]].shape[-1] for n in made.nodes if n.op == "conv"}
    assert sizes == {4, 8, 16}


def test_images_of_two_element_types_are_enlarged_before_their_product():
    def head(a, b, fuse):
        return fuse(torch.cat([F.interpolate(x, size=(16, 16)) for x in (a, b)], 1))

    images = torch.rand(1, 4, 4, 4), torch.rand(1, 4, 8, 8).half()
    made = planned(Written(head, fuse=nn.Conv2d(8, 4, 1)), *images)
    assert ops(made).count("conv") == 1


def test_attention_gets_features_side_by_side():
    def attend(x):
        return F.scaled_dot_product_attention(*(x.transpose(-1, -2),) * 3)

    made = planned(Written(attend), torch.rand(2, 3, 8, 6))
    (node,) = [n for n in made.nodes if n.op == "attention"]
    assert all(made.types[v].strides[-1] == 1 for v in node.uses)


def test_a_shifted_window_is_movement():
    module = Written(lambda x: torch.roll(x, (-2, 3), (1, 2)) * 2 + x)
    made = planned(module, torch.rand(2, 8, 8, 4))
    assert set(ops(made)) <= {"slice", "concat", "mul", "add"}


def test_plans_are_right_on_a_cpu():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True).eval()
    x = torch.rand(2, 9, 32)
    fast = dt.optimize(block, x, find=False)
    with torch.no_grad():
        want = block.double()(x.double())
    assert error(fast(x), want) <= 40 * EPS[torch.float32]


def test_a_reshape_that_copies_is_priced_as_a_copy():
    """It costs nothing where strides show the elements in that order, and their bytes elsewhere."""
    b = Ops(build := GraphBuilder(infer, "moves"))
    x = b.sym(build.input("x", TensorType.of((32, 56, 48), "f32")))
    turned = b.permute(x, (0, 2, 1))
    shown, copied = b.reshape(turned, (32, 12, 4, 56)), b.reshape(turned, (32, 48 * 56))
    shown.output("shown"), copied.output("copied")
    graph = build.finish()
    costs = {node.output: node_cost(graph, node).bytes for node in graph.nodes}
    assert costs[shown.name] == 0 and costs[copied.name] == 2 * x.type.nbytes


def test_attention_reads_the_rows_of_its_bias_side_by_side():
    """T5 looks its bias up by distance, heads last, and turns it round."""
    table = nn.Embedding(9, 4)
    places = (torch.arange(6)[:, None] - torch.arange(6)[None, :]).clamp(-4, 4) + 4

    def attend(q, k, v, table):
        bias = table(places).permute(2, 0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    made = planned(Written(attend, table=table), *(torch.rand(2, 4, 6, 8) for _ in range(3)))
    (node,) = (n for n in made.nodes if n.op == "attention")
    assert made.types[node.inputs[3]].strides[-1] == 1


def test_an_image_resized_to_its_own_size_is_left_alone():
    def same(x):
        return F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=False) * 2

    assert "resize" not in ops(planned(Written(same), torch.rand(1, 3, 8, 8)))
    halves = Written(lambda x: F.interpolate(x, scale_factor=(1.05, 1.0), mode="bilinear") * 2)
    assert "resize" in ops(planned(halves, torch.rand(1, 3, 8, 8)))
