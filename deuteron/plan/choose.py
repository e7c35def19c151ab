"""Choosing by estimate: every engine is asked, the cheapest offer wins, at once."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from deuteron.engines import Candidate, Engine, Refusal, engines
from deuteron.engines.calibration import corrected
from deuteron.engines.recipes import WHOLE
from deuteron.engines.roofline import is_product, leaves_gaps
from deuteron.errors import EngineError
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.follow import NORMALISED
from deuteron.policy import Policy
from deuteron.target import Target

PATIENCE_S = 1.0  # a heuristic plan does not wait for candidates that take longer to build
MARGIN = 0.98  # of a region's time that its parts must stay below
FALLBACKS = ("torch", "inductor")  # engines that take any region, so prove nothing about it
OWN, LIBRARY = ("triton_kernels", "cpu_kernels"), "vendor_fused"  # who multiply


@dataclass(frozen=True)
class Option:
    """A candidate with what is known of it."""

    candidate: Candidate
    predicted_s: float
    measured_s: float | None = None
    error: float | None = None
    rejected: str = ""
    workspace: int = 0  # bytes of scratch memory, known once it is built

    @property
    def best_s(self) -> float:
        if self.measured_s is None:
            return self.predicted_s
        return self.measured_s + self.candidate.unseen_s


@dataclass(frozen=True)
class Choice:
    """A region with the candidate that will run it, and the field it won against."""

    region: Region
    option: Option
    options: tuple[Option, ...] = ()
    refusals: tuple[tuple[str, Refusal], ...] = ()
    torch_error: float | None = None
    reference: str = ""
    note: str = ""

    @property
    def candidate(self) -> Candidate:
        return self.option.candidate

    @property
    def best_s(self) -> float:
        return self.option.best_s


Answer = tuple[tuple[Option, ...], tuple[tuple[str, Refusal], ...]]


@dataclass
class Survey:
    """Asks the engines, remembering answers for equal regions."""

    target: Target
    policy: Policy
    known: dict[str, Answer] = field(default_factory=dict)
    calibrated: bool = True  # estimates are put right by what measurements of like work show
    wishes: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {e.name for e in engines()}
        for _, name in self.policy.by_place:
            if name.lstrip("-").split("/")[0] not in known:
                remedy = f"known: {', '.join(sorted(known))}"
                raise EngineError(f"Policy(engines=…) names {name!r}", remedy=remedy)

    def ask(self, region: Region) -> Answer:
        """(offers, cheapest first; refusals)."""
        if region.text not in self.known:
            self.known[region.text] = self._ask(region)
        return self.known[region.text]

    def wanted(self, region: Region) -> bool:
        """Whether any engine but the fallbacks would run it, at whatever price."""
        if region.text not in self.wishes:
            own = said_of(region)
            allowed = (e for e in engines() if self.policy.allows(e.name, own=own))
            asked = (e for e in allowed if e.name not in FALLBACKS)
            self.wishes[region.text] = any(self._refusal(e, region) is None for e in asked)
        return self.wishes[region.text]

    def _refusal(self, engine: Engine, region: Region) -> Refusal | None:
        knows = getattr(
            engine, "strided", engine.name == FALLBACKS[0]
        )  # what torch makes is copied
        if not knows and leaves_gaps(region):
            return Refusal(WHOLE, quiet=True)
        try:
            return engine.refuse(region, self.target, self.policy)
        except Exception as error:  # a user's engine must not take the plan down
            return self._failed(engine, error)

    def _failed(self, engine: Engine, error: Exception) -> Refusal:
        if engine.name in FALLBACKS:
            raise error
        return Refusal(f"failed: {type(error).__name__}: {error}")

    def _ask(self, region: Region) -> Answer:
        options: list[Option] = []
        refusals: list[tuple[str, Refusal]] = []
        for engine in engines():
            refusal = self._refusal(engine, region)
            try:
                options += self._offers(engine, region) if refusal is None else ()
            except Exception as error:
                refusal = self._failed(engine, error)
            if refusal is not None:
                refusals.append((engine.name, refusal))
        if not options:
            raise EngineError("no engine runs this region", where=region.text)
        return tuple(sorted(options, key=lambda o: o.predicted_s)), tuple(refusals)

    def _offers(self, engine: Engine, region: Region) -> Iterator[Option]:
        for candidate in engine.candidates(region, self.target, self.policy):
            rejected = ""
            if self.policy.deterministic and not candidate.deterministic:
                rejected = "not deterministic"
            recipe = candidate.knobs.get("recipe", "")
            if not self.policy.allows(engine.name, recipe, said_of(region)):
                rejected = "left out by Policy(engines=…)"
            seconds = engine.estimate(region, self.target, candidate)
            if not seconds >= 0:  # nan included: it would upset the order of all
                raise EngineError(f"estimates {seconds!r} seconds")
            if self.calibrated:
                seconds = corrected(region, candidate, self.target, seconds)
            yield Option(candidate, seconds, rejected=rejected)


def said_of(region: Region) -> tuple[str, ...]:
    """What the policy says of nodes of the region, and of no others."""
    return tuple(dict.fromkeys(name for node in region.nodes for name in node.engines))


def marked(graph: Graph, policy: Policy) -> Graph:
    """``graph`` with what the policy says of some nodes written on them: regions of these are not
    equal to others any more. Of what comes from one place the product is meant, if there is one,
    not what lays out its operands."""
    if not any(pattern for pattern, _ in policy.by_place):
        return graph

    def is_heavy(node: Node) -> bool:
        return table.get(node.op).fusion is Fusion.COMPLEX

    multiplied = {node.source for node in graph.nodes if is_heavy(node)}

    def names(node: Node) -> tuple[str, ...]:
        beside = node.source in multiplied and not is_heavy(node)
        return policy.names_for(*node.outputs, *(() if beside else (node.source,)))

    return replace(graph, nodes=tuple(replace(n, engines=names(n)) for n in graph.nodes))


def unmatched(graph: Graph, policy: Policy) -> list[str]:
    """Patterns of the policy that no node answers to."""
    places = [place for node in graph.nodes for place in (node.source, *node.outputs)]
    patterns = dict.fromkeys(pattern for pattern, _ in policy.by_place if pattern)
    return [p for p in patterns if not any(fnmatchcase(place, p) for place in places)]


Pick = Callable[[Region], Choice]


def heuristic(survey: Survey) -> Pick:
    """Pick by estimate among what can be built at once."""

    def pick(region: Region) -> Choice:
        options, refusals = survey.ask(region)
        return Choice(region, at_once(region, options), options, refusals)

    return pick


def at_once(region: Region, options: Sequence[Option], elsewhere: Collection[str] = ()) -> Option:
    """The cheapest offer that is quickly built, or built ``elsewhere``, by processes that work for
    these engines; or the cheapest if none is."""
    usable = [o for o in options if not o.rejected]
    if not usable:
        wrong = "every candidate is ruled out by the policy"
        raise EngineError(
            wrong, where=region.text, remedy="relax Policy(deterministic=…, engines=…)"
        )
    trusted = [o for o in usable if o.candidate.by_estimate] or usable
    offered = [o.candidate for o in trusted]
    quick = (c.build_s <= PATIENCE_S or c.engine in elsewhere for c in offered)
    return next((o for o, soon in zip(trusted, quick, strict=True) if soon), trusted[0])


def splits(region: Region) -> Iterator[tuple[Region, Region]]:
    """Ways to cut a region in two: a product keeps ever less of its epilogue, but nothing of a norm
    that takes statistics of it, and what cannot be generated, such as the largest of windows,
    stands alone. What is widened is so where it is read: half of the bytes go through memory."""
    if region.anchor is None:
        return
    cuts: Iterable[int] = (region.anchor or 1,)
    if is_product(region.nodes[:1]):
        norm = heaviest(region.nodes[1:])
        cuts = range(len(region.nodes) - 1 if norm is None else norm + 1, 0, -1)
        cuts = [cut for cut in cuts if cut == 1 or not _widens(region, region.nodes[cut - 1])]
    for cut in cuts:
        parts = zip("ab", (region.nodes[:cut], region.nodes[cut:]), strict=True)
        head, tail = (region.part(f"{region.name}{x}", n, heaviest(n)) for x, n in parts)
        yield head, tail


def _widens(region: Region, node: Node) -> bool:
    bits = [region.graph.types[v].dtype.bits for v in (*node.uses[:1], *node.outputs[:1])]
    return node.op == "cast" and bits[0] < bits[1]


def each_product(region: Region) -> list[Region]:
    """A region that multiplies twice, or after other work that meets the product, cut into the
    products and all that follows them."""
    heavy = [n for n in region.nodes if table.get(n.op).fusion is Fusion.COMPLEX]
    if len(heavy) < 2 and heavy[:1] in ([], [region.nodes[0]]):
        return []
    alone = [region.part(f"{region.name}{i}", [n], 0) for i, n in enumerate(heavy)]
    rest = [n for n in region.nodes if n not in heavy]
    return [*alone, region.part(f"{region.name}x", rest, None)]


def is_one(region: Region) -> bool:
    """Whether a product in it reads what is made in it, or something is reduced that a product
    made: other regions were joined to it, and it is run whole or not at all. Batch norm in training
    is with a convolution from the start, and may be cut off."""
    made: set[str] = set()
    heavy = False
    for node in region.nodes:
        kind = table.get(node.op).fusion
        if kind is Fusion.COMPLEX and not made.isdisjoint(node.uses):
            return True
        if kind is Fusion.REDUCTION and heavy and node.op not in NORMALISED:
            return True
        heavy = heavy or kind is Fusion.COMPLEX
        made.update(node.outputs)
    return False


def around_odd_nodes(region: Region, survey: Survey) -> list[Region]:
    """The region cut at every node that only a fallback runs: such a node, say an operator without
    a formula, stands alone, and what lies before, between and after can be generated. Empty where
    there is none, or nothing else."""
    pieces: list[list[Node]] = [[]]
    for node in region.nodes:
        if survey.wanted(region.part("alone", [node], heaviest([node]))):
            pieces[-1].append(node)
        else:
            pieces += [[node], []]
    found = [nodes for nodes in pieces if nodes]
    if len(found) == 1 or all(len(nodes) == 1 for nodes in found):
        return []
    return [region.part(f"{region.name}{i}", n, heaviest(n)) for i, n in enumerate(found)]


def in_two(region: Region) -> list[Region]:
    """The region cut about its middle, where the least goes through memory."""
    nodes, types = region.nodes, region.graph.types
    middle, last = len(nodes) // 2, dict[str, int]()  # value → the last that reads it
    for i, node in enumerate(nodes):
        last.update(dict.fromkeys(node.uses, i))

    def crossing(cut: int) -> int:
        made = (v for node in nodes[:cut] for v in node.outputs)
        return sum(types[v].nbytes for v in made if last.get(v, 0) >= cut)

    near = range((middle + 1) // 2, len(nodes) - middle // 2)
    cut = min(near, key=lambda cut: (crossing(cut), abs(cut - middle)))
    halves = enumerate((nodes[:cut], nodes[cut:]))
    return [region.part(f"{region.name}{i}", half, heaviest(half)) for i, half in halves]


def _with_library(region: Region, pick: Pick, survey: Survey, most_s: float) -> list[Choice]:
    """The choices if the product and the most of its epilogue that a library has a call for are
    one part, and what is left another, about which nobody is asked if the first takes ``most_s``
    by itself."""
    for head, tail in splits(region):
        alone = len(head.nodes) == 1
        others = {o.candidate.engine for o in survey.ask(head)[0] if not o.rejected} - {*OWN}
        if others and (alone or LIBRARY in others):
            first = pick(head)
            return [first, *(choose(tail, pick, survey) if first.best_s < most_s else ())]
    return [pick(region)]


def heaviest(nodes: Sequence[Node]) -> int | None:
    """The first node that decides how others are run."""
    heavy = (Fusion.REDUCTION, Fusion.COMPLEX, Fusion.OPAQUE)
    return next((i for i, n in enumerate(nodes) if table.get(n.op).fusion in heavy), None)


def _one_by_one(whole: Choice, parts: Sequence[Choice]) -> float:
    """Seconds of a choice. If that is torch, which runs node by node, and was not measured, it is
    at least what torch takes for the parts: else a part that was measured to be slow would speak
    for the whole, of which it is a part all the same."""
    if whole.candidate.engine != FALLBACKS[0] or whole.option.measured_s is not None:
        return whole.best_s

    def by_torch(part: Choice) -> float:
        its = (o.best_s for o in part.options if o.candidate.engine == FALLBACKS[0])
        return next(its, part.best_s)

    return max(whole.best_s, sum(map(by_torch, parts)))


def _alike(whole: Choice, part: Choice) -> bool:
    """Whether one kernel of ours makes both: what follows a product on a CPU is done in registers,
    and never takes longer than a region of its own."""
    a, b = whole.candidate, part.candidate
    return (a.engine, a.knobs.get("recipe")) == (b.engine, b.knobs.get("recipe"))


def choose(region: Region, pick: Pick, survey: Survey) -> list[Choice]:
    """The region whole, or cut where the parts are faster: if no engine wants it whole, or a kernel
    of ours does what a library may multiply sooner."""
    whole = pick(region)
    if len(region.nodes) == 1 or not whole.best_s or is_one(region):
        return [whole]
    if pieces := each_product(region):
        parts = [*map(pick, pieces[:-1]), *choose(pieces[-1], pick, survey)]
        return parts if sum(c.best_s for c in parts) < whole.best_s * MARGIN else [whole]
    if whole.candidate.engine in OWN and is_product(region.nodes[:1]):
        parts = _with_library(region, pick, survey, whole.best_s * MARGIN)
        if not survey.target.is_cuda and _alike(whole, parts[0]):
            return [whole]  # a measurement that says otherwise was disturbed
        return parts if sum(c.best_s for c in parts) < whole.best_s * MARGIN else [whole]
    if whole.candidate.engine not in FALLBACKS:
        return [whole]
    best, best_s = [whole], whole.best_s * MARGIN
    for head, tail in splits(region):
        if len(head.nodes) > 1 and not survey.wanted(head):
            continue
        first = pick(head)
        if first.candidate.engine in FALLBACKS and len(head.nodes) > 1:
            continue  # nobody wants the longer piece either
        parts = [first, *choose(tail, pick, survey)]
        seconds = sum(c.best_s for c in parts)
        if seconds < (best_s if len(best) > 1 else MARGIN * _one_by_one(whole, parts)):
            best, best_s = parts, seconds
        if first.candidate.engine not in (*FALLBACKS, *OWN):
            break  # the longest piece that a fused call takes
    if not any(refusal.too_long for _, refusal in whole.refusals):
        pieces = around_odd_nodes(region, survey)
    else:
        pieces = in_two(region) if len(best) == 1 else []
    parts = [c for piece in pieces for c in choose(piece, pick, survey)]
    best = parts if parts and sum(c.best_s for c in parts) < best_s else best
    if len(best) > 1:
        best[0] = replace(best[0], note="cut from a longer chain that no engine fuses whole")
    return best
