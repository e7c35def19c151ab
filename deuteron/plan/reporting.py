"""Filling in a report from decisions: the plan prices itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from deuteron.engines import Kernel
from deuteron.engines.roofline import region_bound
from deuteron.explain import report
from deuteron.plan.choose import Choice
from deuteron.plan.decide import Decision, versions
from deuteron.plan.program import MemoryPlan, plan_memory
from deuteron.target import Target


def make_report(
    decision: Decision,
    device: torch.device | None = None,
    memory: MemoryPlan | None = None,
    cuda_graph: str = "",
    notes: tuple[str, ...] = (),
    total_measured_s: float | None = None,
) -> report.Report:
    """Everything a plan knows about itself, as plain data."""
    if memory is None:  # nothing is built: suppose every kernel can write where it is told
        kernels = [Kernel(lambda: None, writes=True) for _ in decision.choices]
        memory = plan_memory(decision.graph, decision.regions, kernels)
    stream = decision.target.stream
    weights = sum(c.type.nbytes for c in decision.graph.constants.values())
    return report.Report(
        name=decision.graph.name,
        target=decision.target.name,
        device="" if device is None else str(device),
        mode=decision.mode,
        cuda_graph=cuda_graph,
        regions=tuple(_region(c, decision.target) for c in decision.choices),
        vetoes=tuple(
            report.VetoReport(**asdict(v), seconds=v.bytes / stream) for v in decision.vetoes
        ),
        passes=decision.passes,
        memory=report.MemoryReport(weights, memory.arena, memory.unplanned, memory.separate),
        nodes_before=len(decision.source.nodes),
        nodes_after=len(decision.graph.nodes),
        plan_s=decision.seconds,
        total_measured_s=total_measured_s,
        versions=versions(device),
        notes=(*decision.notes, *notes),
    )


def _region(choice: Choice, target: Target) -> report.RegionReport:
    region, option, by = choice.region, choice.option, choice.candidate
    limit = region_bound(region, target)
    sources = dict.fromkeys(node.source for node in region.nodes if node.source)
    first = region.outputs[0] if region.outputs else None
    shape = str(region.graph.types[first]) if first is not None else ""
    loud = ((name, r) for name, r in choice.refusals if not r.quiet)
    refused = (report.RefusalReport(name, r.reason, r.remedy) for name, r in loud)
    named = (region.name, region.ops, ", ".join(sources), shape, by.engine, str(by))
    cost = (limit.flops, limit.bytes, limit.kind, limit.seconds)
    found: Any = (option.predicted_s, option.measured_s, option.error)
    found += (choice.torch_error, choice.reference)
    options = (
        report.OptionReport(str(o.candidate), o.predicted_s, o.measured_s, o.error, o.rejected)
        for o in choice.options
    )
    found += (tuple(options), tuple(refused), choice.note)
    return report.RegionReport(*named, *cost, *found)
