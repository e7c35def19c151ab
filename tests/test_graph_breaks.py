"""What would cut the graph of a step in pieces, and does not."""

from __future__ import annotations

import copy
import logging
import warnings
from functools import lru_cache
from unittest import TestCase

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from tests.tolerances import NETWORK, SINGLE_LAYERS, error
from tests.training_cases import Layers, batches, sgd, vectors

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_what_a_model_logs_once_cuts_no_step(monkeypatch):
    """As models of transformers do, by a method that they give to loggers."""
    once = lru_cache(None)(lambda self, *args: self.warning(*args))
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)

    said = logging.getLogger("talks")

    class Talks(Layers):
        def forward(self, x):
            said.warning_once("hear")
            return super().forward(x)

    model, (x, y) = Talks(), next(batches(vectors, [4]))
    with TestCase().assertNoLogs(level=logging.ERROR):
        step = dt.train_step(model, F.cross_entropy, sgd(model), (x, y))
        step(x, y)
    assert len(step.plans) == 2


def test_batch_norm_over_all_batches_cuts_no_step():
    """With ``momentum=None`` torch's forward asks for the number of batches so far."""
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU())
    nets = net, copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in nets)
    step = dt.train_step(net, F.mse_loss, ours, (torch.randn(6, 5), torch.randn(6, 4)))
    for k in range(1, 4):
        x, y = k * torch.randn(6, 5) + k, torch.randn(6, 4)
        step(x, y)
        theirs.zero_grad()
        F.mse_loss(nets[1](x), y).backward()
        theirs.step()
        assert net[1].num_batches_tracked == k
        torch.testing.assert_close(
            net.state_dict(), nets[1].state_dict(), rtol=NETWORK, atol=NETWORK
        )
    ops = {node.op for plan in step.plans for node in plan.graph.nodes}
    assert len(step.plans) == 2 and any(op.startswith("batch_norm") for op in ops)
    assert nn.BatchNorm1d.forward.__module__ == nn.BatchNorm1d.__module__


class Words(nn.Module):
    """As in torch's own examples: nobody says what the masks are."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x, y):
        later = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        states = self.net.encoder(self.embed(x), later[: x.shape[1], : x.shape[1]])
        known = self.net(self.embed(x), self.embed(y), tgt_mask=later, tgt_is_causal=None)
        told = self.net.decoder(self.embed(y), states, later, None, None, None, True)
        return self.out(known + told).flatten(0, 1)


class Warns(Words):
    def forward(self, x, y):
        warnings.warn("mind the gap", UserWarning, stacklevel=2)
        return super().forward(x, y)


@pytest.mark.parametrize("kind", [Words, Warns])
def test_masks_and_warnings_cut_no_step(kind):
    torch.manual_seed(0)
    model, plain = kind(), Words().double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randint(9, (3, 4)), torch.randint(9, (3, 5))
    one, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    step = dt.train_step(model, F.cross_entropy, one, (x, y, y.flatten()))
    for _ in range(3):
        loss = step(x, y, y.flatten())
        other.zero_grad()
        wanted = F.cross_entropy(plain(x, y), y.flatten())
        wanted.backward()
        other.step()
        assert error(loss, wanted) <= SINGLE_LAYERS
    assert len(step.plans) == 2
    assert nn.TransformerEncoder.forward.__module__ == nn.TransformerEncoder.__module__
