"""``Policy(nan="drop")``: ReLU, clamp and max pooling treat nan as less than any number.

    relu(x)             → clamp_nan(x, min=0)
    max_pool(x)         → max_pool(where(isnan(x), −inf, x))

Nothing else is needed. Kernels use the formula of ``clamp_nan`` like that of any activation;
engines that call libraries, whose ReLU is a different function, do not recognise it. Gradients
written before this pass depend on the result of ReLU, which is 0 where x is nan; the gradient of a
pool reads x again, and then finds −inf there.
"""

import math
from collections.abc import Sequence

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule, rewrite
from deuteron.ops import Ops, table
from deuteron.ops.activated import activation
from deuteron.passes.context import Context

BOUNDS = {"relu": {"min": 0.0}, "relu6": {"min": 0.0, "max": 6.0}}
CLAMPS = (*BOUNDS, "hardtanh", "clamp")
POOLS = tuple(op for op in table.TABLE if "max_pool" in op and "x" in table.get(op).inputs)
ACTIVATED = tuple(op for op in table.TABLE if "activation" in table.get(op).attrs)


def _clamp(rw: Rewriter, node: Node) -> Sequence[str] | None:
    if not rw.build.types[node.uses[0]].dtype.is_float:
        return None  # whole numbers are never nan
    return [rw.emit("clamp_nan", node.inputs, BOUNDS.get(node.op, dict(node.attrs)))]


def _followed(rw: Rewriter, node: Node) -> Sequence[str] | None:
    """A clamp that is the ``activation`` attribute of another operator."""
    act = activation(node.attrs["activation"])
    if act is None or act.op.name not in CLAMPS:
        return None
    bounds = BOUNDS.get(act.op.name, act.attrs)
    text = ", ".join(f"{name}={value}" for name, value in bounds.items() if value is not None)
    attrs = {**node.attrs, "activation": f"clamp_nan({text})"}
    return rw.build.emit(node.op, node.inputs, attrs, source=rw.where)


def _pool(rw: Rewriter, node: Node) -> Sequence[str] | None:
    place = table.get(node.op).inputs.index("x")
    b = Ops(rw.build, rw.where)
    x = b.sym(node.uses[place])
    if node.attrs.get("kind", "max") != "max" or not x.dtype.is_float:
        return None
    given = list(node.inputs)
    given[place] = b.where(b.isnan(x), -math.inf, x).name
    return rw.build.emit(node.op, given, dict(node.attrs), source=rw.where)


RULES = (
    Rule("clamps nan", CLAMPS, _clamp),
    Rule("clamps nan behind it", ACTIVATED, _followed),
    Rule("maximum of numbers", (*POOLS, "pyramid_pool"), _pool),
)


def drop_nan(graph: Graph, ctx: Context) -> Graph:
    """``graph`` as the policy wants it."""
    if ctx.policy.nan == "propagate":
        return graph
    graph, fired = rewrite(graph, RULES, table.infer, rounds=1)
    ctx.fired.update(fired)
    return graph
