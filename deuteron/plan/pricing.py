"""Fills in the report: everything that a plan knows about itself, prices included, as plain
data."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from deuteron.engines import Kernel, engine
from deuteron.engines.calibration import how_far_off
from deuteron.engines.recipes import RecipeEngine
from deuteron.engines.roofline import least_bound
from deuteron.explain import Report, report
from deuteron.passes.layout import ORDERS
from deuteron.plan.alternatives import wholes
from deuteron.plan.choose import Choice
from deuteron.plan.decide import Decision, machine, versions
from deuteron.plan.program import MemoryPlan, plan_memory
from deuteron.target import Target


def make_report(
    decision: Decision,
    device: torch.device | None = None,
    memory: MemoryPlan | None = None,
    cuda_graph: str = "",
    notes: tuple[str, ...] = (),
    total_measured_s: float | None = None,
    eager: tuple[float | None, str] = (None, ""),
    packed: int = 0,
    whole: int = 0,
) -> Report:
    """Everything a plan knows about itself, as plain data."""
    if memory is None:  # nothing is built: suppose every kernel can write where it is told
        kernels = [Kernel(lambda: None, writes=True) for _ in decision.choices]
        spots = None if decision.placed is None else decision.placed.spots
        memory = plan_memory(decision.graph, decision.regions, kernels, spots)
    stream = decision.target.stream
    given = {c.data.data_ptr(): c for c in decision.source.constants.values()}
    made = (c for c in decision.graph.constants.values() if c.data.data_ptr() not in given)
    weights = sum(c.type.nbytes for c in given.values())
    packed += sum(c.type.nbytes for c in made)
    return Report(
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
        memory=report.MemoryReport(
            weights, memory.arena, memory.unplanned, memory.separate, packed, whole
        ),
        nodes_before=len(decision.source.nodes),
        nodes_after=len(decision.graph.nodes),
        plan_s=decision.seconds,
        total_measured_s=total_measured_s,
        eager_s=eager[0],
        eager=eager[1],
        inputs=tuple(f"{name} {decision.source.types[name]}" for name in decision.source.inputs),
        machine="" if device is None else machine(device),
        orders=tuple(_orders(decision)),
        versions=versions(device),
        notes=(*decision.notes, *notes),
        wholes=tuple(
            report.AlternativeReport(w.names, w.seconds, w.workspace, w.error, w.changed)
            for w in wholes(decision.choices)
        ),
    )


def _orders(decision: Decision) -> Iterator[report.OrderReport]:
    """Yield the values that the passes converted to another memory order, and why."""
    graph, given = decision.graph, {v for node in decision.source.nodes for v in node.outputs}
    for node in graph.nodes:
        if node.op == "to_layout" and node.output not in given:
            readers = (user.op for user in graph.users.get(node.output, ()))
            why = next((ORDERS[op] for op in readers if op in ORDERS), ORDERS["output"])
            moved = graph.types[node.output].nbytes
            yield report.OrderReport(str(node.inputs[0]), node.attrs["layout"], why, moved)


def _region(choice: Choice, target: Target) -> report.RegionReport:
    region, option, by = choice.region, choice.option, choice.candidate
    made_by = engine(by.engine)
    part = made_by.share(region, target, by) if isinstance(made_by, RecipeEngine) else 1.0
    limit = least_bound(region, target, part)
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
        report.OptionReport(
            str(o.candidate), o.predicted_s, o.measured_s, o.error, o.rejected, o.workspace
        )
        for o in choice.options
    )
    off = how_far_off(region, choice.candidate, target)
    found += (tuple(options), tuple(refused), choice.note, off)
    return report.RegionReport(*named, *cost, *found)
