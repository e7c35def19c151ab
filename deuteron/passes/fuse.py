"""Fusion: nodes are grouped into regions by rules over operator classes.

Nodes are visited in order; each may join the group that makes one of its inputs. :data:`RULES`, a
table over (class of the group, class of the node), decides whether it may. Refusals are kept, so
that a plan can say what did not fuse and what that costs. At the end, elementwise groups that read
the same tensor become one, and elementwise work whose results a single reduction reads joins it.
Two groups are never merged if that would make a cycle through a third.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.lookups import computed_indices
from deuteron.ops.opdef import Fusion
from deuteron.passes.after_products import FOLLOWED, follow
from deuteron.passes.fusion_rules import RULES, B, C, E, M, R, X, after_reduction, goes_along
from deuteron.passes.part_by_size import part_sizes

MAX_NODES = 48  # larger regions compile slowly and gain nothing
GATED = (*FOLLOWED, "grouped_linear")
LOOKED_AT = "an index is in memory before it is used, so that somebody can look at it"
MAX_SEARCH = 256  # groups looked at when checking for a cycle


@dataclass(frozen=True)
class Veto:
    """A value that goes through memory because two nodes were not fused, and why.

    ``bytes`` is what the value costs: one write and one read.
    """

    value: str
    producer: str
    consumer: str
    reason: str
    bytes: int


@dataclass
class Group:
    """Nodes on their way to becoming a region."""

    nodes: list[int]
    kind: Fusion
    anchor: int | None  # index of the reduction, product or opaque node that it is built around
    high: int  # the highest index of a node in it or in any group that it depends on
    # groups it reads from; ids may be stale, so resolve them with ``find``
    preds: set[int] = field(default_factory=set)
    succs: set[int] = field(default_factory=set)  # groups that read from it; likewise


class Fuser:
    """One fusion run over a graph. ``gates``: whether two products of one tensor become one region
    where their results meet."""

    def __init__(self, graph: Graph, gates: bool = False) -> None:
        self.graph, self.gates = graph, gates
        self.groups: dict[int, Group] = {}
        self.of: dict[int, int] = {}  # node index → group id, resolved through `merged`
        self.merged: dict[int, int] = {}
        self.vetoes: list[Veto] = []
        # on a GPU, kernels check most indices themselves as they use them
        self.indices = computed_indices(graph, of_several=gates)

    def find(self, group: int) -> int:
        while group in self.merged:
            parent = self.merged[group]
            if parent in self.merged:
                self.merged[group] = self.merged[parent]
            group = parent
        return group

    def run(self) -> tuple[tuple[Region, ...], tuple[Veto, ...]]:
        for i, node in enumerate(self.graph.nodes):
            self._place(i, node)
        self._share_reads()
        self._widen_where_read()
        self._compute_where_read()
        self._show_apart()
        self._end_where_rows_are()
        if self.gates:
            follow(self, MAX_NODES)
        part_sizes(self)
        values, users = dict.fromkeys(v.value for v in self.vetoes), self.graph.users
        written = {v for v in values if self.is_written(v, users.get(v, ()))}
        return self._regions(), tuple(v for v in self.vetoes if v.value in written)

    def _place(self, i: int, node: Node) -> None:
        kind = table.get(node.op).fusion
        # group → the value that it makes for this node (latest first)
        producers: dict[int, str] = {}
        made = [(self.graph.places[v], v) for v in node.uses if v in self.graph.places]
        for p, value in sorted(made, reverse=True):
            producers.setdefault(self.find(self.of[p]), value)
        home: int | None = None
        for group, value in producers.items():
            reason = self._may_join(group, node, home, producers)
            if reason is not None:
                self._veto(value, node, reason)
            elif home is None:
                home = group
                self._join(group, i, kind)
                self._read(group, producers)
            else:
                self.merge(home, group)
        if home is None:
            base = E if kind in (E, B, M) else kind
            self.groups[i] = Group([i], base, i if kind in (R, C, X) else None, high=i)
            self.of[i] = i
            self._read(i, producers)

    def _may_join(
        self, group: int, node: Node, home: int | None, producers: dict[int, str]
    ) -> str | None:
        g, kind = self.groups[group], table.get(node.op).fusion
        rule = RULES.get((g.kind, kind))
        if rule is None:
            return f"no rule for {kind} work after a {g.kind} region"
        reason = rule(self, g, node, producers[group])
        if reason is not None:
            return reason
        if node.outputs[0] in self.indices.get(producers[group], ()):
            return LOOKED_AT
        other = None if home is None else self.groups[home]
        plain = other is None or g.kind is other.kind is E
        if other is not None and not plain and not self.is_gate(g, other):
            return "the node already joined the region of another input"
        size = len(g.nodes) + (len(self.groups[home].nodes) if home is not None else 1)
        if size > MAX_NODES:
            return f"the region would pass {MAX_NODES} nodes"
        if home is not None:
            return self.path_between(home, group)
        return self._path_to(group, [p for p in producers if p != group])

    def is_gate(self, a: Group, b: Group) -> bool:
        """Whether each of two groups has one product, both of the same tensor by weights of one
        type, as the two halves of a gate do."""
        if not self.gates or a.anchor is None or b.anchor is None:
            return False
        one, two = self.graph.nodes[a.anchor], self.graph.nodes[b.anchor]
        types = self.graph.types
        alike = one.op == two.op in GATED and one.uses[0] == two.uses[0]
        if one.op == "grouped_linear":  # its further inputs are the lists of its groups, not biases
            alike = alike and (one.inputs[2:], one.attrs) == (two.inputs[2:], two.attrs)
        single = sum(self.graph.nodes[i].op in GATED for g in (a, b) for i in g.nodes) == 2
        return alike and single and types[one.uses[1]] == types[two.uses[1]]

    def _path_to(self, group: int, starts: list[int]) -> str | None:
        """Return why not, if ``group`` reaches one of ``starts``, which would close a cycle, or if
        too much would have to be searched. Every group that depends on it has a ``high`` at least
        as large, so most of the graph need not be looked at."""
        floor, seen, stack = self.groups[group].high, set(), list(starts)
        while stack:
            g = self.find(stack.pop())
            if g == group:
                return "fusing would need a value before it is made (a cycle)"
            if g in seen or self.groups[g].high < floor:
                continue
            seen.add(g)
            if len(seen) > MAX_SEARCH:
                return "the graph between them is too large to rule out a cycle"
            preds = {self.find(p) for p in self.groups[g].preds}
            preds.discard(g)
            self.groups[g].preds = preds
            stack.extend(preds)
        return None

    def path_between(self, a: int, b: int) -> str | None:
        """Return why two groups may not be merged: one reaches the other through a third, or uses
        an index that the other computes. None if merging is safe."""
        for source, sink in ((a, b), (b, a)) if self.indices else ():
            made = {v for i in self.groups[source].nodes for v in self.graph.nodes[i].outputs}
            there = {v for i in self.groups[sink].nodes for v in self.graph.nodes[i].outputs}
            if any(there & self.indices[value] for value in made & self.indices.keys()):
                return LOOKED_AT
        for source, sink in ((a, b), (b, a)):
            preds = {self.find(p) for p in self.groups[sink].preds} - {source, sink}
            reason = self._path_to(source, list(preds))
            if reason is not None:
                return reason
        return None

    def _join(self, group: int, i: int, kind: Fusion) -> None:
        g = self.groups[group]
        g.nodes.append(i)
        self.of[i] = group
        if kind is R:
            g.kind, g.anchor = R, i
        self._raise(group, i)

    def _read(self, group: int, producers: Iterable[int]) -> None:
        """Note that ``group`` reads from others."""
        for other in producers:
            if other != group:
                self.groups[group].preds.add(other)
                self.groups[other].succs.add(group)
                self._raise(group, self.groups[other].high)

    def _raise(self, group: int, high: int) -> None:
        """Raise ``high`` of a group, and of every group that depends on it."""
        stack = [group]
        while stack:
            g = self.groups[self.find(stack.pop())]
            if g.high < high:
                g.high = high
                stack.extend(g.succs)

    def merge(self, into: int, group: int) -> None:
        target, gone = self.groups[into], self.groups.pop(group)
        target.nodes = list(heapq.merge(target.nodes, gone.nodes))
        if gone.kind is R:
            target.kind, target.anchor = R, gone.anchor
        target.preds |= gone.preds
        target.succs |= gone.succs
        self.merged[group] = into
        target.high, high = sorted((target.high, gone.high))
        self._raise(into, high)

    def _share_reads(self) -> None:
        """Merge elementwise groups over the same elements that read the same tensor, so that it is
        read once, such as the gradients of a product, each of which needs the other's factor."""
        readers: dict[str, list[int]] = {}
        for g, group in self.groups.items():
            space = self._space(group)
            for value in dict.fromkeys(v for i in group.nodes for v in self.graph.nodes[i].uses):
                outside = value not in self.graph.places or self.group_of(value) != g
                if space is not None and outside and self._order(value) == space:
                    readers.setdefault(value, []).append(g)
        for first, *others in readers.values():
            for other in others:
                a, b = self.find(first), self.find(other)
                if a != b and self._may_share(a, b):
                    self.merge(a, b)
                elif len(self.groups[a].nodes) == MAX_NODES:
                    first = other  # the first one is full: the rest may join this one

    def _space(self, group: Group) -> tuple[tuple[int, ...], ...] | None:
        """Shape and strides of all results of an elementwise group; None if they differ or it moves
        elements."""
        nodes = [self.graph.nodes[i] for i in group.nodes]
        made = {self._order(v) for n in nodes for v in n.outputs}
        moves = any(table.get(n.op).fusion is M for n in nodes)
        return made.pop() if group.kind is E and not moves and len(made) == 1 else None

    def _order(self, value: str) -> tuple[tuple[int, ...], ...]:
        return self.graph.types[value].shape, self.graph.types[value].strides

    def _may_share(self, a: int, b: int) -> bool:
        one, two = self.groups[a], self.groups[b]
        small = len(one.nodes) + len(two.nodes) <= MAX_NODES
        return small and self._space(one) == self._space(two) and self.path_between(a, b) is None

    def _widen_where_read(self) -> None:
        """Move each cast to a wider type into the one group that reads it, if the narrow value
        leaves its group as well, as gradients read it: then only the narrow value goes through
        memory."""
        for i, node in enumerate(self.graph.nodes):
            if node.op == "cast" and node.output not in self.graph.output_values:
                home, to = self.find(self.of[i]), self._only_reader(node)
                if to is not None and to != home and self._leaves(node.uses[0], home):
                    self.groups[home].nodes.remove(i)
                    insort(self.groups[to].nodes, i)
                    self.of[i] = to

    def _only_reader(self, cast: Node) -> int | None:
        """Return the one group that reads a widening cast and can hold it, else None."""
        narrow, wide = self.graph.types[cast.uses[0]].dtype, self.graph.types[cast.output].dtype
        to = self._read_by([cast.output])
        if to is None or wide.bits <= narrow.bits:
            return None
        group = self.groups[to]
        anchor = None if group.anchor is None else self.graph.nodes[group.anchor]
        beside = anchor is not None and cast.output in anchor.inputs[1:]
        return to if group.kind in (E, R) and not beside and len(group.nodes) < MAX_NODES else None

    def _compute_where_read(self) -> None:
        """Merge elementwise work into the one reduction group that reads it, unless the reduction
        itself does: such as a gradient that is widened before the derivative of an activation meets
        it."""
        for g in list(self.groups):
            to = self.reads_alone(g)
            if to is not None and self._fits_beside(self.groups[g], self.groups[to]):
                self.merge(to, g)

    def _show_apart(self) -> None:
        """Give a node a group of its own if it only shows, as a view, a value that its group writes
        anyway: inside the group, it would be written twice. The same goes for a transpose at the
        end of a group, which costs nothing as a view."""
        for i in reversed(range(len(self.graph.nodes))):
            node, g = self.graph.nodes[i], self.find(self.of[i])
            group, value = self.groups[g], (*node.uses, "")[0]
            if len(group.nodes) == 1 or group.kind is not E or value not in self.graph.places:
                continue
            op, types = table.get(node.op), (self.graph.in_types(node), self.graph.out_types(node))
            users = (u for v in node.outputs for u in self.graph.users.get(v, ()))
            readers = {self.group_of(u.outputs[0]) for u in users}
            shown = op.shows(*types) and self.group_of(value) == g and g not in readers
            if shown and ((node.op == "permute" and readers) or self._leaves(value, g)):
                group.nodes.remove(i)
                self.groups[i] = Group([i], E, None, high=group.high, preds={g})
                self.of[i] = i
                for reader in readers:
                    self.groups[reader].preds.add(i)

    def _end_where_rows_are(self) -> None:
        """Merge elementwise work into a reduction if it reads both the reduction's result and rows
        that the reduction has read, such as the end of a norm's gradient."""
        for g in list(self.groups):
            for to in {self.find(p) for p in self.groups[g].preds} - {g}:
                one, two = self.groups[g], self.groups[to]
                fits = one.kind is E and two.kind is R and goes_along(self, one, two)
                fits = fits and len(one.nodes) + len(two.nodes) <= MAX_NODES
                if fits and self.path_between(to, g) is None:
                    self.merge(to, g)
                    break

    def reads_alone(self, g: int) -> int | None:
        """Return the one group that reads what an elementwise group makes; None if that goes
        elsewhere, too."""
        group = self.groups[g]
        made = [v for i in group.nodes for v in self.graph.nodes[i].outputs]
        if group.kind is not E or any(v in self.graph.output_values for v in made):
            return None
        return self._read_by(made, beside=g)

    def _read_by(self, values: Iterable[str], beside: int | None = None) -> int | None:
        """Return the one group, other than ``beside``, that reads any of these values, else
        None."""
        users = (user for value in values for user in self.graph.users.get(value, ()))
        readers = {self.group_of(user.outputs[0]) for user in users} - {beside}
        return readers.pop() if len(readers) == 1 else None

    def _fits_beside(self, group: Group, reduction: Group) -> bool:
        if reduction.kind is not R or len(group.nodes) + len(reduction.nodes) > MAX_NODES:
            return False
        assert reduction.anchor is not None
        given = self.graph.nodes[reduction.anchor].uses
        nodes = [self.graph.nodes[i] for i in group.nodes]
        return not any(
            # a reduction's own inputs would be computed anew for each of its passes
            n.output in given
            or table.get(n.op).fusion is M
            or after_reduction(self, reduction, n, n.output) is not None
            for n in nodes
        )

    def _leaves(self, value: str, home: int) -> bool:
        """Whether a value made in ``home`` is written to memory for readers other than its
        casts."""
        if value not in self.graph.places or self.group_of(value) != home:
            return False
        return self.is_written(value, [u for u in self.graph.users[value] if u.op != "cast"])

    def is_written(self, value: str, users: Iterable[Node]) -> bool:
        """Whether a value goes through memory: for one of these users of it, or as an output."""
        readers = {self.group_of(u.outputs[0]) for u in users}
        return value in self.graph.output_values or bool(readers - {self.group_of(value)})

    def group_of(self, value: str) -> int:
        """The group that makes a value."""
        return self.find(self.of[self.graph.places[value]])

    def _veto(self, value: str, node: Node, reason: str) -> None:
        producer = self.graph.producer[value]
        size = 0 if table.get(node.op).view else 2 * self.graph.types[value].nbytes
        self.vetoes.append(Veto(value, _label(producer), _label(node), reason, size))

    def forget_veto(self, value: str, node: Node) -> None:
        """Drop the veto between a value and a node that were fused after all."""
        reader = _label(node)
        self.vetoes = [v for v in self.vetoes if (v.value, v.consumer) != (value, reader)]

    def _regions(self) -> tuple[Region, ...]:
        """Return the groups as regions in an order that runs, earliest first."""
        preds = {g: {self.find(p) for p in group.preds} - {g} for g, group in self.groups.items()}
        succs: dict[int, list[int]] = {}
        for g, before in preds.items():
            for p in before:
                succs.setdefault(p, []).append(g)
        waiting = {g: len(before) for g, before in preds.items()}
        ready = [(self.groups[g].nodes[0], g) for g, n in waiting.items() if n == 0]
        heapq.heapify(ready)
        regions: list[Region] = []
        while ready:
            _, g = heapq.heappop(ready)
            regions.append(self._region(self.groups[g], len(regions)))
            for s in succs.get(g, ()):
                waiting[s] -= 1
                if waiting[s] == 0:
                    heapq.heappush(ready, (self.groups[s].nodes[0], s))
        assert len(regions) == len(self.groups), "fusion made a cycle"
        return tuple(regions)

    def _region(self, group: Group, number: int) -> Region:
        sub = self.graph.subgraph(f"r{number}", [self.graph.nodes[i] for i in group.nodes])
        constants = frozenset(v for v in sub.inputs if v in self.graph.constants)
        anchor = None if group.anchor is None else group.nodes.index(group.anchor)
        return Region(sub, constants, anchor)


def _label(node: Node) -> str:
    return f"{node.op} ({node.source})" if node.source else node.op


def fuse(graph: Graph, gates: bool = False) -> tuple[tuple[Region, ...], tuple[Veto, ...]]:
    """Regions in an order that runs, and every fusion that was considered and refused. ``gates``:
    see :class:`Fuser`."""
    return Fuser(graph, gates).run()
