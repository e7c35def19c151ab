"""Choosing and running: decide → build → program → run.

Read in this order: decide, choose, find, feeds, timing, cache, memory, program, source, cuda_graph,
weights, plan, binding, serialize; tensors has small helpers on tensors that several of them use.
"""

from pathlib import Path

import torch

from deuteron.kinds import checked
from deuteron.plan.cache import Cache
from deuteron.plan.decide import Decision, decide, halves
from deuteron.plan.plan import Plan, compile_graph, resolve_device
from deuteron.plan.serialize import load_decision


@checked("device")
def load_plan(path: str | Path, device: str | torch.device | None = None) -> Plan:
    """Read a plan that ``Plan.save`` wrote. Choices that are not possible here are made anew, and
    ``plan.explain()`` lists them under notes."""
    where = resolve_device(device)
    return Plan(load_decision(Path(path), where), where)


__all__ = ["Cache", "Decision", "Plan", "compile_graph", "decide", "halves", "load_plan"]
__all__ += ["resolve_device"]
