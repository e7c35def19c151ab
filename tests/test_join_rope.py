"""Rotary positions as published models write them: found, joined, and as exact as the operator."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron import zoo
from deuteron.frontends.torch_export import import_module
from deuteron.ir import Graph
from deuteron.ops.evaluate import evaluate
from tests.optimised import optimised
from tests.replace_cases import rotate_half
from tests.tolerances import allowed, error


def passed(graph: Graph, target: str = "h200") -> Graph:
    return optimised(graph, dt.target(target))[0]


class Rotary(torch.nn.Module):
    """Tables for every position, and queries and keys turned by them; ``before`` is the dimension
    that the tables are widened by, 1 for heads first."""

    def __init__(self, features: int, before: int = 1, apart: float = 0.0) -> None:
        super().__init__()
        pace = 10000.0 ** (-torch.arange(0, features, 2).float() / features)
        self.register_buffer("pace", pace)
        self.before, self.apart = before, apart

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(q.shape[3 - self.before])[None]
        angles = (self.pace[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles + self.apart), dim=-1)
        cos, sin = (t.to(q.dtype).unsqueeze(self.before) for t in (both.cos(), both.sin()))
        return q * cos + rotate_half(q) * sin, rotate_half(k) * sin + cos * k


def heads(before: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 7, count, 16, generator=gen).to(dtype)
    return x.transpose(1, 2) if before == 1 else x


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before", [1, 2], ids=["heads first", "tokens first"])
def test_queries_and_keys_are_one_operator(before, dtype):
    q, k = heads(before, 4, dtype, 0), heads(before, 1, dtype, 1)
    graph = import_module(Rotary(16, before), (q, k), {}).graph
    joined = passed(graph)
    assert [node.op for node in joined.nodes] == ["rope"]
    assert joined.nodes[0].attrs["axis"] == 3 - before
    feed = dict(zip(graph.inputs, (q, k), strict=True))
    got, plain = evaluate(joined, feed), evaluate(graph, feed)
    exact = evaluate(graph, feed, float64=True)
    for name, want in exact.items():
        assert error(got[name], want) <= allowed(error(plain[name], want), dtype), name


def test_what_is_no_rotation_stays():
    q, k = heads(1, 4, torch.float32, 0), heads(1, 1, torch.float32, 1)
    unlike = import_module(Rotary(16, apart=0.5), (q, k), {}).graph  # two angles for a pair
    assert "rope" not in {node.op for node in passed(unlike).nodes}


def test_every_layer_of_a_llama():
    tokens = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(0))
    model = zoo.build("llama_tiny", num_hidden_layers=2).eval()
    graph = import_module(model, (tokens,), {}).graph
    joined = passed(graph)
    ropes = [node for node in joined.nodes if node.op == "rope"]
    assert len(ropes) == 2 and all(len(node.outputs) == 2 for node in ropes)
    assert len({node.inputs[2] for node in ropes}) == 1, "one table serves all layers"
    feed = dict(zip(graph.inputs, (tokens,), strict=True))
    exact, got = evaluate(graph, feed, float64=True), evaluate(joined, feed)
    plain = evaluate(graph, feed)
    for name, want in exact.items():
        assert error(got[name], want) <= allowed(error(plain[name], want), torch.float32, 512)
