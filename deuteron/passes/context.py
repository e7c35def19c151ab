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
    """Handed to every pass. ``fired`` counts the rules of the pass that is running;
    ``promised`` are the types of the outputs as the user knows them. ``price``: the seconds that a
    plan of a graph would take on the target, by estimate; without it operators stay as they are.
    ``forms``: what it was asked for already. ``later``: inputs that come only after the
    first results are asked for, as in a training step the gradient of the loss."""

    target: Target
    policy: Policy
    fired: Counter[str] = field(default_factory=Counter)
    promised: dict[str, TensorType] = field(default_factory=dict)
    price: Callable[[Graph, float], float] | None = None
    forms: dict[Any, str] = field(default_factory=dict)
    later: frozenset[str] = frozenset()


def by_rules(rules: Sequence[Rule]) -> Callable[[Graph, Context], Graph]:
    """A pass that applies rules wherever they fit."""

    def run(graph: Graph, ctx: Context) -> Graph:
        graph, fired = rewrite(graph, rules, table.infer)
        ctx.fired.update(fired)
        return graph

    return run


def replaced(
    graph: Graph, chosen: Mapping[str, Found], make: Callable[[Ops, Found, dict[str, str]], Sym]
) -> Graph:
    """``graph`` with something else in the place of chosen values: what ``make`` writes for what
    was found there, over the new names of all values before it."""
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
