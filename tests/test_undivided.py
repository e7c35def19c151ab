"""Steps of models that FSDP2 has divided among one rank: those of the model itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import deuteron as dt
from deuteron.training.single_shard import is_undivided, units


@pytest.fixture
def mesh(request):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count = getattr(request, "param", 1)
    torch.distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    yield init_device_mesh("cpu", (count,))
    torch.distributed.destroy_process_group()


def built():
    torch.manual_seed(0)
    pair = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))  # noqa: E731
    return nn.Sequential(pair(), nn.GELU(), pair())


def sharded(mesh, **how):
    model = built()
    for part in model[0], model[2]:
        fully_shard(part, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def hooks(model):
    return [[*m._forward_pre_hooks.items(), *m._forward_hooks.items()] for m in units(model)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_that_of_the_model(accumulate, mesh):
    """One graph, the same numbers; parameters, gradients and the model remain FSDP2's."""
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    ends, plans = [], []
    for model in (built(), sharded(mesh)):
        torch._dynamo.reset()
        optimizer = dt.optim.AdamW(model.parameters(), lr=0.1)
        how = {"max_norm": 0.1, "accumulate": accumulate}
        step = dt.train_step(model, F.mse_loss, optimizer, batches[0], **how)
        found = hooks(model)
        for x, y in batches:
            step(x, y)
        assert hooks(model) == found
        plans.append([len(plan.decision.graph.nodes) for plan in step.plans])
        state = (value for kept in optimizer.state.values() for value in kept.values())
        ends.append([whole(t) for t in (*model.parameters(), *model.buffers(), *state)])
        model.eval()
        ends[-1].append(model(batches[0][0]).detach())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert plans[0] == plans[1] and len(plans[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_call_that_fails_leaves_the_hooks(mesh):
    model = sharded(mesh)
    found, x = hooks(model), torch.randn(4, 8)
    assert found[0][0][0] in model._forward_pre_hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, F.mse_loss, optimizer, (x, x))
    with pytest.raises(dt.DeuteronError):
        step(torch.randn(4, 7), x)
    assert hooks(model) == found


def test_what_else_fsdp_does_it_goes_on_doing(mesh):
    assert is_undivided(sharded(mesh)) and not is_undivided(built())
    for numbers in ({"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64}):
        assert not is_undivided(sharded(mesh, mp_policy=MixedPrecisionPolicy(**numbers)))
    divided = sharded(mesh)
    divided[0].set_gradient_divide_factor(2.0)
    hooked = sharded(mesh)
    hooked[0].set_all_reduce_hook(lambda grad: None)
    pair = built()
    fully_shard([pair[0], pair[2]], mesh=mesh)
    partly = built()
    fully_shard(partly[0], mesh=mesh)
    assert not any(map(is_undivided, (divided, hooked, pair, partly)))


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_two_ranks_have_parts(mesh):
    assert not is_undivided(sharded(mesh))
