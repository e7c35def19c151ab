"""Measures on this machine what an eager call costs the host, stage by stage. The call is a small
``swiglu``, whose kernels take next to no time, by a plan of ours and by torch's two calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deuteron.functional.activation import GATE, swiglu
from deuteron.functional.delegate import delegation

CALLS, ROUNDS = 100, 7


class Stage(NamedTuple):
    """Seconds of one stage of our call, and of torch's where torch has the same stage."""

    name: str
    ours: float
    torchs: float | None = None


def host_stages(device: torch.device) -> list[Stage]:
    """Return the stages of a call in order, and sums of them that torch's calls have as well."""
    with torch.enable_grad(), delegation(False):
        gate, up = (torch.ones(64, 64, device=device, requires_grad=True) for _ in range(2))
        came = torch.ones(64, 64, device=device)

        def grads(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(call(), (gate, up), came)

        def ours() -> torch.Tensor:
            return swiglu(gate, up)

        def torchs() -> torch.Tensor:
            return F.silu(gate) * up

        def planned() -> torch.Tensor:
            return GATE.one(gate, up, activation="silu")

        grads(ours)()
        plan = GATE.plan((gate, up), {"activation": "silu"})
        assert plan.ready is not None
        program = plan.ready.plan.program
        memory = _seconds(program.empty(program.graph.outputs[0][1]), device)
        bare = _seconds(lambda: plan.run((gate, up)), device)
        with torch.no_grad():
            found, called = _seconds(planned, device), _seconds(ours, device)
            forward = Stage("forward", called, _seconds(torchs, device))
        kept = Stage(
            "forward, kept for a gradient", _seconds(ours, device), _seconds(torchs, device)
        )
        whole = Stage(
            "forward and backward", _seconds(grads(ours), device), _seconds(grads(torchs), device)
        )
    return [
        Stage("who answers: torch or a plan", called - found),
        Stage("which plan", found - bare),
        Stage("memory for the result", memory),
        Stage("launch", bare - memory),
        forward,
        Stage("a node of autograd", kept.ours - called),
        kept,
        Stage("backward", whole.ours - kept.ours),
        whole,
    ]


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, the least of several rounds, because other work on this machine
    only adds to it. On a GPU the queue is empty before each round, and a round never fills it."""
    call()
    least = float("inf")
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter() - begin) / CALLS)
    return least
