"""What FSDP2 sends for models of many kinds: the calls that it makes in a process group in which
nobody is on the other side, counted in one process, are those that were predicted, to the byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deuteron as dt
from deuteron.distributed import Reduction
from deuteron.distributed.trace import blocks
from tests import ranks

KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


class Sent(TorchDispatchMode):
    """Calls and bytes by kind of collective: of all that is gathered, scattered or summed."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if kind := KINDS.get(call.name()):
            given = args[0][0] if kind == "all_reduce" else args[:2]
            self.calls[kind] += 1
            self.bytes[kind] += max(t.nbytes for t in ([given] if kind == "all_reduce" else given))
        return call(*args, **(kwargs or {}))


class Blocks(nn.Module):
    """Residual blocks whose sizes no number of ranks divides. Of those that are ``frozen`` nothing
    is trained; ``spare`` is never called; ``tied`` words are read by the last product too."""

    def __init__(self, frozen=(), spare=False, tied=False, again=False, head=True):
        super().__init__()
        self.again, self.tied = again, tied
        self.words = nn.Embedding(19, 13)
        pair = lambda: nn.Sequential(nn.Linear(13, 21), nn.GELU(), nn.Linear(21, 13))  # noqa: E731
        self.blocks = nn.ModuleList(pair() for _ in range(4))
        self.words.requires_grad_(not frozen)
        for i in frozen:
            self.blocks[i].requires_grad_(False)
        self.spare = nn.Linear(13, 4) if spare else None
        self.head = nn.Linear(13, 19, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return self.head(x)


MODELS = {
    "plain": Blocks,
    "the first are frozen": lambda: Blocks(frozen=(0, 1)),
    "one between is frozen": lambda: Blocks(frozen=(2,)),
    "only the head is trained": lambda: Blocks(frozen=range(4)),
    "unused": lambda: Blocks(spare=True),
    "tied": lambda: Blocks(tied=True),
    "computed again": lambda: Blocks(again=True),
    "all in blocks": lambda: nn.Sequential(
        nn.Sequential(nn.Embedding(19, 13), nn.Linear(13, 7)),
        nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 19)),
    ),
}


@pytest.fixture(scope="module")
def four_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def loss_of(result, target):
    return F.cross_entropy(result.flatten(0, 1).float(), target.flatten())


def counted(model, mesh, **how):
    for name in blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    words = torch.randint(0, 19, (2, 5))
    loss_of(model(words), words).backward()  # the first step learns the order of blocks
    with Sent() as sent:
        loss_of(model(words), words).backward()
    return sent


def assert_told(sent, model, layout, **how):
    words = torch.randint(0, 19, (2, 5))
    told = dt.distributed.predict(model, loss_of, (words, words), "h200", layout, **how)
    calls = Counter()
    for each in told.traffic:
        calls[each.kind] += each.calls
    assert told.volumes() == sent.bytes and calls == sent.calls


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_any_model(name, four_ranks):
    sent = counted(MODELS[name](), init_device_mesh("cpu", (4,)))
    assert_told(sent, MODELS[name](), "fsdp4")


BF16 = torch.bfloat16
WAYS = {
    "16 bits": (MixedPrecisionPolicy(BF16), {"dtype": BF16}),
    "summed in 32 bits": (
        MixedPrecisionPolicy(BF16, torch.float32),
        {"dtype": BF16, "reduction": Reduction("float32")},
    ),
    "summed in 16 bits": (MixedPrecisionPolicy(None, BF16), {"reduction": Reduction("bfloat16")}),
}


@pytest.mark.parametrize("name", WAYS)
def test_mixed_precision(name, four_ranks):
    policy, how = WAYS[name]
    sent = counted(Blocks(), init_device_mesh("cpu", (4,)), mp_policy=policy)
    assert_told(sent, Blocks(), "fsdp4", **how)


def test_parameters_that_stay_and_parts_that_are_the_same(four_ranks):
    sent = counted(Blocks(), init_device_mesh("cpu", (4,)), reshard_after_forward=False)
    assert_told(sent, Blocks(), "fsdp4", reshard=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "parts"))
    assert_told(counted(Blocks(spare=True), mesh), Blocks(spare=True), "dp2×fsdp2")


def test_words_in_parts_inside_fsdp_are_looked_up_as_torch_does(four_ranks):
    """The graph is cut at each block, and what adds up the rows that ranks have found would be in
    another one than the table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = ranks.GPT(1)
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"words": rows, "places": rows})
    ranks._shard(model, mesh["dp"])
    words = torch.randint(0, ranks.WORDS, (2, ranks.LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, ranks.loss_of, optimizer, (words, words))
    assert step(words, words).isfinite()
    assert step.plans
