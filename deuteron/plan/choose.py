"""Choosing by estimate: every engine is asked for offers, and the cheapest wins."""

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
from deuteron.passes.after_products import NORMALISED
from deuteron.policy import Policy
from deuteron.target import Target

PATIENCE_S = 1.0  # a heuristic plan does not wait for candidates that take longer to build
MARGIN = 0.98  # share of a region's time that its parts must stay below to replace it
FALLBACKS = ("torch", "inductor")  # engines that take any region, so their offers prove nothing
OWN, LIBRARY = ("triton_kernels", "cpu_kernels"), "vendor_fused"  # engines for matrix products


@dataclass(frozen=True)
class Option:
    """A candidate with what is known about it."""

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
    """A region with the candidate that will run it, and the options it was chosen from."""

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
    calibrated: bool = True  # whether estimates are corrected by measurements of similar work
    wishes: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {e.name for e in engines()}
        for _, name in self.policy.by_place:
            if name.lstrip("-").split("/")[0] not in known:
                remedy = f"known: {', '.join(sorted(known))}"
                raise EngineError(f"Policy(engines=…) names {name!r}", remedy=remedy)

    def ask(self, region: Region) -> Answer:
        """Return the offers, the cheapest first, and the refusals."""
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
        # whether it can write into part of a larger buffer; torch can: its result is copied there
        knows = getattr(engine, "strided", engine.name == FALLBACKS[0])
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
            if not seconds >= 0:  # nan included: it would upset the sorting
                raise EngineError(f"estimates {seconds!r} seconds")
            if self.calibrated:
                seconds = corrected(region, candidate, self.target, seconds)
            yield Option(candidate, seconds, rejected=rejected)


def said_of(region: Region) -> tuple[str, ...]:
    """The entries of ``Policy.engines`` that are for nodes of this region alone."""
    return tuple(dict.fromkeys(name for node in region.nodes for name in node.engines))


def marked(graph: Graph, policy: Policy) -> Graph:
    """Return ``graph`` with entries of ``Policy.engines`` for some nodes attached to these nodes,
    so that their regions are no longer equal to others. If a place in the model gave a product and
    other nodes, such as those that lay out its operands, its entry is for the product alone."""
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
    """Patterns of the policy that match no node."""
    places = [place for node in graph.nodes for place in (node.source, *node.outputs)]
    patterns = dict.fromkeys(pattern for pattern, _ in policy.by_place if pattern)
    return [p for p in patterns if not any(fnmatchcase(place, p) for place in places)]


Pick = Callable[[Region], Choice]


def heuristic(survey: Survey) -> Pick:
    """Return a function that picks by estimate among candidates that can be built at once."""

    def pick(region: Region) -> Choice:
        options, refusals = survey.ask(region)
        return Choice(region, at_once(region, options), options, refusals)

    return pick


def at_once(region: Region, options: Sequence[Option], elsewhere: Collection[str] = ()) -> Option:
    """Return the cheapest offer that is quickly built, or whose engine is one of ``elsewhere``, for
    which other processes build; if there is none, the cheapest. Offers that only a measurement may
    choose are left out, unless there are no others."""
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
    """Yield ways to cut a region in two. A product keeps ever less of its epilogue, and never any
    part of a norm that takes statistics of its result. In other regions the cut is before the
    anchor, or behind it if it comes first, so that an operator that cannot be generated, such as
    max pooling, stands alone. No cut is right behind a widening cast: the region that reads the
    value widens it, so that half of the bytes go through memory."""
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
    """A region with two products, or with one product that does not come first, cut into the
    products, each by itself, and all the rest. Empty for other regions."""
    heavy = [n for n in region.nodes if table.get(n.op).fusion is Fusion.COMPLEX]
    if len(heavy) < 2 and heavy[:1] in ([], [region.nodes[0]]):
        return []
    alone = [region.part(f"{region.name}{i}", [n], 0) for i, n in enumerate(heavy)]
    rest = [n for n in region.nodes if n not in heavy]
    return [*alone, region.part(f"{region.name}x", rest, None)]


def is_one(region: Region) -> bool:
    """Whether a product in the region reads a value made in it, or a reduction follows a product:
    then it was joined from several regions, and is run whole or not at all. Batch norm in training
    is no such case: fusion itself puts it with a convolution, and it may be cut off."""
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
    """The region cut around every node that only a fallback runs: such a node, say an operator
    without a formula, stands alone, and kernels can be generated for the nodes before, between and
    after. Empty if there is no such node, or nothing else."""
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
    """The region cut near its middle, where the fewest bytes go through memory."""
    nodes, types = region.nodes, region.graph.types
    middle, last = len(nodes) // 2, dict[str, int]()  # value → index of the last node that reads it
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
    """Return the choices if the region is cut into the product with as much of its epilogue as a
    library has a call for, and the rest. Engines are not asked about the rest if the first part
    alone takes ``most_s``."""
    for head, tail in splits(region):
        alone = len(head.nodes) == 1
        others = {o.candidate.engine for o in survey.ask(head)[0] if not o.rejected} - {*OWN}
        if others and (alone or LIBRARY in others):
            first = pick(head)
            return [first, *(choose(tail, pick, survey) if first.best_s < most_s else ())]
    return [pick(region)]


def heaviest(nodes: Sequence[Node]) -> int | None:
    """Index of the first reduction, product or opaque operator: it decides how the others run."""
    heavy = (Fusion.REDUCTION, Fusion.COMPLEX, Fusion.OPAQUE)
    return next((i for i, n in enumerate(nodes) if table.get(n.op).fusion in heavy), None)


def _one_by_one(whole: Choice, parts: Sequence[Choice]) -> float:
    """Seconds of a choice. If torch runs it, node by node, and it was not measured, it takes at
    least what torch takes for its parts. Otherwise a part that was measured to be slow would be an
    argument for the whole, although the whole contains that part."""
    if whole.candidate.engine != FALLBACKS[0] or whole.option.measured_s is not None:
        return whole.best_s

    def by_torch(part: Choice) -> float:
        its = (o.best_s for o in part.options if o.candidate.engine == FALLBACKS[0])
        return next(its, part.best_s)

    return max(whole.best_s, sum(map(by_torch, parts)))


def _alike(whole: Choice, part: Choice) -> bool:
    """Whether the same kernel of ours runs both. Then a cut gains nothing: on a CPU the epilogue of
    a product is done in registers, and never takes longer than as a region of its own."""
    a, b = whole.candidate, part.candidate
    return (a.engine, a.knobs.get("recipe")) == (b.engine, b.knobs.get("recipe"))


def choose(region: Region, pick: Pick, survey: Survey) -> list[Choice]:
    """Choose for a region as a whole, or cut it where the parts are faster. Cuts are tried where
    only a fallback runs the whole, where one of our kernels runs a product that a library may run
    faster, and where there are several products."""
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
            continue  # only a fallback would run this piece
        parts = [first, *choose(tail, pick, survey)]
        seconds = sum(c.best_s for c in parts)
        if seconds < (best_s if len(best) > 1 else MARGIN * _one_by_one(whole, parts)):
            best, best_s = parts, seconds
        if first.candidate.engine not in (*FALLBACKS, *OWN):
            break  # this is the longest piece that a fused call takes
    if not any(refusal.too_long for _, refusal in whole.refusals):
        pieces = around_odd_nodes(region, survey)
    else:
        pieces = in_two(region) if len(best) == 1 else []
    parts = [c for piece in pieces for c in choose(piece, pick, survey)]
    best = parts if parts and sum(c.best_s for c in parts) < best_s else best
    if len(best) > 1:
        best[0] = replace(best[0], note="cut from a longer chain that no engine fuses whole")
    return best
