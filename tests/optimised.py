"""A graph after all passes, told the prices of engines as a plan tells them."""

from __future__ import annotations

from deuteron.ir import Graph
from deuteron.passes import PassRecord, run_passes
from deuteron.plan.choose import Survey
from deuteron.plan.decide import context
from deuteron.policy import Policy
from deuteron.target import Target


def optimised(
    graph: Graph, target: Target, policy: Policy | None = None
) -> tuple[Graph, tuple[PassRecord, ...]]:
    return run_passes(graph, context(Survey(target, policy or Policy())))
