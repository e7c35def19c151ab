"""What a step ran: kernels, launches and bytes, and the least time for these on the machine."""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.engines.roofline import bound
from deuteron.explain import units as u
from deuteron.kernels.optim import Step
from deuteron.ops.opdef import Cost
from deuteron.optim.batch import Batch
from deuteron.optim.runners import runner
from deuteron.target import target


def _cost(step: Step | None, batch: Batch) -> Cost:
    """The bytes of a kernel, but for those of sums and numbers."""
    kept = [sum(t.nbytes for t in row) for row in (batch.homes, *batch.tensors)]
    grads = sum(batch.sizes) * batch.grad_dtype.itemsize
    sizes = dict(zip(batch.rule.tensors, (kept[0], grads, *kept[1:]), strict=False))
    moved = [] if step is None else [step.reads, tuple(step.writes)]
    if step is not None and step.kind == "moments":
        moved = [("row_var", "col_var")] * 2
    return Cost(0.0, sum(sizes.get(name, 0) for some in moved for name in some), 0)


def explained(name: str, batches: Sequence[Batch]) -> str:
    """The kernels of the last step as a table below their sums."""
    rows = [("kernel", "by", "device", "tensors", "launches", "MB", "least µs")]
    total = [0.0, 0.0, 0.0]
    for batch in batches:
        machine, by = target(batch.device), runner(batch.device.type).name
        for kernel, step, launches in batch.ran:
            cost = _cost(step, batch)
            least = (
                bound(cost, "f32", False, machine, launches).seconds or launches * machine.launch
            )
            total = [x + y for x, y in zip(total, (launches, cost.bytes, least), strict=True)]
            figures = (str(batch.count), str(launches), u.per(cost.bytes, 1e6), u.per(least, 1e-6))
            rows.append((kernel, by, str(batch.device), *figures))
    if len(rows) == 1:
        return f"{name}: no step has been made yet, or no parameter had a gradient"
    launched = u.count(int(total[0]), "launch", "launches")
    head = (
        f"{name}: {launched}, {u.size(total[1])}, at least {u.seconds(total[2])} at full bandwidth"
    )
    return "\n".join((head, *(f"  {line}" for line in u.align(rows, "<<<>>>>", 100))))
