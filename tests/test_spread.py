"""Models that do not fit: blocks that come over for each call, blocks that the host computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.distributed.spread import HOST, LIBRARY, RESIDENT, STREAMED, Stream, _ways
from tests.tolerances import NETWORK


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x + shift)))


class Net(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.shift, self.last = nn.Parameter(torch.randn(width)), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, shift=self.shift)
        return self.last(x)


def made(blocks: int = 6, width: int = 32, rows: int = 8) -> tuple[Net, torch.Tensor, int, int]:
    """A model, an input, the bytes of a block and those of all that is around blocks."""
    torch.manual_seed(0)
    net, x = Net(blocks, width).eval(), torch.randn(rows, width)
    each = sum(t.nbytes for t in (*net.blocks[0].parameters(), *net.blocks[0].buffers()))
    around = net.shift.nbytes + sum(p.nbytes for p in net.last.parameters())
    return net, x, each, around + 4 * 4 * rows * 4 * width + LIBRARY


def test_ways_keep_within_memory():
    assert _ways([10] * 4, 40)[0] == (RESIDENT,) * 4
    assert _ways([10] * 4, 30)[0] == (STREAMED, STREAMED, RESIDENT, STREAMED)
    for left in (0, 15, 25, 30):
        for way in _ways([10] * 4, left):
            streamed = min(2, way.count(STREAMED))
            assert 10 * (way.count(RESIDENT) + streamed) <= left
    assert _ways([10] * 4, 0) == [(HOST,) * 4] and not _ways([10] * 4, -1)


@pytest.mark.parametrize("fit", [6, 4, 0], ids=["all", "some", "none"])
def test_a_model_that_is_spread_computes_the_same(fit):
    net, x, each, around = made()
    want = net(x)
    device = copy.deepcopy(net)
    found = dt.distributed.spread(device, (x,), around + fit * each, "cpu", target="h200")
    memory = sum(found.memory.values())
    assert memory <= around + fit * each and str(found).startswith("6 blocks on h200")
    assert found.where.count(RESIDENT) == max(0, {6: 6, 4: 2, 0: 0}[fit])
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(device(x), want)
    states = zip(device.state_dict().values(), net.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    with pytest.raises(dt.GraphError, match="do not hold what is around"):
        dt.distributed.placement(net, (x,), around // 2, "h200")


def test_a_model_without_values_is_placed():
    """As the same model with values, by a graph in which weights are inputs."""
    net, x, each, around = made()
    with torch.device("meta"):
        same = Net().eval()
    for fit in (4, 0):
        one, other = (
            dt.distributed.placement(m, (x,), around + fit * each, "h200") for m in (net, same)
        )
        assert (one.where, one.memory, one.sent) == (other.where, other.memory, other.sent)


def test_streamed_blocks_may_be_called_out_of_turn():
    net, x, *_ = made(5)
    want = [block(x, net.shift) for block in net.blocks]
    stream = Stream(list(net.blocks), torch.device("cpu"))
    stream.begin()
    for i in (0, 1, 4, 2, 2, 3, 0):
        stream.arrive(net.blocks[i])
        assert torch.equal(net.blocks[i](x, net.shift), want[i])
        stream.leave(net.blocks[i])


@pytest.mark.gpu
def test_a_gpu_holds_no_more_than_it_was_told():
    net, x, each, around = made(16, 1024, 64)
    fit = around + 6 * each
    want = net.double()(x.double()).float()
    net.float()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = dt.distributed.spread(net, (x,), fit, "cuda", target="h200")
    with torch.inference_mode():
        for _ in range(3):
            got = net(x.cuda())
    assert {STREAMED, RESIDENT} <= set(found.where)
    assert torch.cuda.max_memory_allocated() - before <= fit + x.nbytes
    assert (got.cpu() - want).abs().max() <= NETWORK * want.abs().max()
