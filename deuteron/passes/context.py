"""What passes share: the machine, the policy, and a record of what each pass did."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from deuteron.ir.graph import Graph
from deuteron.ir.rewrite import Rule, carry, finish, rewrite, start
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.policy import Policy
from deuteron.target import Target

Found = TypeVar("Found")


@dataclass
class Context:
    """Passed to every pass. ``fired`` counts how often each rule of the running pass fired.
    ``promised``: the types of the outputs as the user expects them. ``price(graph, most)``: the
    estimated seconds of a plan of ``graph`` on the target, or infinity where even a lower bound
    reaches ``most``; without it operators stay as they are. ``forms`` caches what was decided by
    ``price``. ``later``: inputs that arrive only after the first results are asked for; in a
    training step, the gradient of the loss."""

    target: Target
    policy: Policy
    fired: Counter[str] = field(default_factory=Counter)
    promised: dict[str, TensorType] = field(default_factory=dict)
    price: Callable[[Graph, float], float] | None = None
    forms: dict[Any, str] = field(default_factory=dict)
    later: frozenset[str] = frozenset()


def by_rules(rules: Sequence[Rule]) -> Callable[[Graph, Context], Graph]:
    """Return a pass that applies these rules wherever they fit."""

    def run(graph: Graph, ctx: Context) -> Graph:
        graph, fired = rewrite(graph, rules, table.infer)
        ctx.fired.update(fired)
        return graph

    return run


def replaced(
    graph: Graph, chosen: Mapping[str, Found], make: Callable[[Ops, Found, dict[str, str]], Sym]
) -> Graph:
    """Return ``graph`` with some nodes replaced. ``chosen`` maps the first output of each such node
    to what was found there; ``make(ops, found, names)`` writes the replacement, where ``names``
    maps the values made so far to their new names."""
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        found = chosen.get(node.outputs[0])
        if found is None:
            carry(build, names, node, graph)
        else:
            names[node.output] = make(Ops(build, node.source), found, names).name
    return finish(build, names, graph)


class Pass(NamedTuple):
    """A named step from graph to graph."""

    name: str
    run: Callable[[Graph, Context], Graph]


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: rules fired, nodes before and after, seconds."""

    name: str
    fired: dict[str, int]
    before: int
    after: int
    seconds: float
