"""Reductions over rows that no program can hold: one pass over blocks per dependent reduction.

Traffic for rows of N elements: the first pass reads them from memory and asks L2 to keep them,
the following find them there, the last lets go of them. A softmax needs two passes, not three:
its maximum and sum are found together, the sum rescaled whenever the maximum grows,
``s ← s·e^(m−m′) + Σ e^(x−m′)``, once for all copies of an unrolled body. What is stored along a row
is stored in the first pass that knows it: a gradient beside its own sum is made in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

from deuteron.codegen import scalar
from deuteron.codegen.scalar import Load, Reduce, ScalarProgram, Statement, Store, reads
from deuteron.codegen.triton_body import Body, closure, depths
from deuteron.codegen.triton_index import Space
from deuteron.codegen.triton_math import combine, identity
from deuteron.ops.formula import Const

Kernel = tuple[Body, int, tuple[str, ...]]
KIND = {"float": "f32", "int": "i64", "bool": "i32"}
TOGETHER = 8192  # partial results that a program reads at once
LOWEST = {False: "-3.4028234663852886e+38", True: "-1.7976931348623157e+308"}  # by width


@dataclass(frozen=True)
class Partial:
    """Scratch between the kernels of a split reduction: ``count`` elements of ``dtype``."""

    name: str
    dtype: str
    count: int


class Passes:
    """The passes of one program and how they are written."""

    def __init__(self, program: ScalarProgram, unroll: int = 1, splits: int = 1) -> None:
        self.program, self.unroll, self.splits = program, unroll, max(splits, 1)
        self.shared = 1  # programs that share a row in the kernel being written
        self.pairs: list[scalar.Softmax] = []
        taken: set[str] = set()
        for pair in scalar.softmaxes(program)[0]:  # a reduction belongs to one pair at most
            if pair.top.name not in taken:
                self.pairs.append(pair)
                taken |= {pair.top.name, pair.total.name}
        self.depth = depths(program, self.pairs)
        # passes that reduce: where programs share a row, each leaves partial results for the next
        self.last = max((self.depth[r.name] for r in program.reductions), default=0)

    def _reductions(self, at: int) -> list[Reduce]:
        return [r for r in self.program.reductions if self.depth[r.name] == at]

    @property
    def count(self) -> int:
        """How often the rows are read."""
        return self.last + bool(self._stores(self.last + 1))

    def _stores(self, at: int) -> list[Store]:
        """What is stored along the row in pass ``at``, the first that knows it."""
        return [s for s in self.program.element_stores if 1 + self._known(s) == at]

    def _known(self, s: Store) -> int:
        """The pass after which the stored value is known."""
        return 0 if isinstance(s.source, Const) else self.depth[s.source]

    def _row_statements(self, at: int) -> list[Statement]:
        """What belongs to the row and can be known after pass ``at``."""
        rows = [s for name, s in self.program.made.items() if self.program.level[name] == "row"]
        made = [s for s in rows if self.depth[s.name] == at and not isinstance(s, Reduce)]
        return [*made, *(s for s in self.program.row_stores if self._known(s) == at)]

    # ---- kernels

    def kernels(
        self, start: Callable[..., tuple[Body, int]], block: int, split: bool
    ) -> tuple[list[Kernel], tuple[Partial, ...]]:
        """One kernel with a loop per pass, or with ``split`` one kernel per pass."""
        if not split:
            body, grid = start(block, 1)
            body.emit(self._row_statements(0))
            for at in range(1, self.last + 2):
                self._pass(body, block, at)
                self._close(body, at, "a_")
                body.emit(self._row_statements(at))
            return [(body, grid, ())], ()
        partials: list[Partial] = []
        found: list[Kernel] = []
        for at in range(1, self.last + 2):
            final = at > self.last
            self.shared = self.splits if not final or self._stores(at) else 1
            # a program that reads the results of all others of its row needs registers for them
            width = 1 << max(self.splits - 1, 0).bit_length() if at > 1 else 1
            body, grid = start(block, self.shared, max(1, TOGETHER // width))
            for before in range(at):
                if before:
                    self._combine(body, before)
                rows = self._row_statements(before)
                body.emit(s for s in rows if not isinstance(s, Store) or final)
            self._pass(body, block, at)
            self._close(body, at, "a_", part=True)
            for r in self._reductions(at):
                wide = self.program.wide and r.kind == "float"
                kind = "f64" if wide else KIND[r.kind]
                # one number per row and program, which the next kernel reads
                partials.append(Partial(f"w_{r.name}", kind, self.program.rows * self.splits))
                value = f"{r.name}.to(tl.int32)" if r.kind == "bool" else r.name
                mask = f", mask={body.masks['r']}" if "r" in body.masks else ""
                body.line(f"tl.store(w_{r.name} + r * {self.splits} + part, {value}{mask})")
            found.append((body, grid, tuple(p.name for p in partials)))
        return found, tuple(partials)

    def _loop(self, body: Body, block: int, at: int) -> list[str]:
        """Open a loop over the columns with what pass ``at`` computes and stores in it, once for
        each copy, and give their suffixes. The loads of all copies come first, because a load never
        overtakes a store: a program would wait for each in turn."""
        spaces, statements = body.spaces, [*self._needed(at), *self._stores(at)]
        columns, unroll = self.program.columns, self.unroll
        loads = [s for s in statements if isinstance(s, Load) and not reads(s)]
        once = self._of_a_stretch(loads, block)
        narrow = any(space.narrow for space in spaces if space.name == "c")
        wide = "" if narrow else " + tl.full((), 0, tl.int64)"
        if once:
            *across, along = self.program.inner
            columns, unroll = along.size, min(unroll, -(-along.size // block))
            body.line(f"for stretch in range({self.program.columns // columns}):")
            body.indent += "    "
            body.line(f"q = stretch{wide}")
            body.spaces = (spaces[0], Space("q", tuple(across), True), Space("c", (along,)))
            body.emit(once)
        body.once = frozenset(s.name for s in once)
        body.masks.pop("c", None)
        step, shared = block * unroll, self.shared
        part = -(-columns // (shared * step)) * step
        first = f"0, {part}, {step}"
        if shared > 1:
            first = f"part * {part}, part * {part} + {part}, {step}"
        body.line(f"for o in range({first}):")
        body.indent += "    "
        lift = "" if body.flat_row else "[None, :]"
        copies = [f"_{u}" if unroll > 1 else "" for u in range(unroll)]
        loads = [s for s in loads if s not in once]
        for u, suffix in enumerate(copies):
            shift = f" + {u * block}" if u else ""
            body.line(f"c{suffix} = o{shift} + tl.arange(0, {block}){lift}{wide}")
            if part * shared != columns:
                body.masks["c"] = "inside_c"
                body.line(f"inside_c{suffix} = c{suffix} < {columns}")
            body.emit(loads, suffix)
        for suffix in copies:
            body.emit((s for s in statements if s not in loads and s not in once), suffix)
        return copies

    def _of_a_stretch(self, loads: Sequence[Load], block: int) -> list[Load]:
        """Loads that are the same all along the last axis of the columns, as a channel's weight is
        for all its pixels. Where that axis fills a block and programs do not share rows, the
        columns are walked stretch by stretch, and these are read once in each."""
        if self.shared > 1 or len(self.program.inner) < 2 or self.program.inner[-1].size < block:
            return []
        inner, last = set(self.program.inner), self.program.inner[-1]
        axes = [(s, self.program.axes_of(s.offset) & inner) for s in loads]
        return [s for s, along in axes if along and last not in along and not s.guards]

    def _hints(self, body: Body, at: int) -> None:
        """Ask L2 to keep what a later pass reads again; rows that are read once take no hints."""
        body.hints.clear()
        if self.count == 1:
            return
        outer, passes = set(self.program.outer), map(self._needed, range(at, self.last + 2))
        now, *later = ({s.tensor for s in needed if isinstance(s, Load)} for needed in passes)
        again = set[str]().union(*later)
        for s in self.program.loads:
            if s.tensor in now:
                keep = s.tensor in again or not self.program.axes_of(s.offset) & outer
                body.hints[s.tensor] = "evict_last" if keep else "evict_first"
        for store in self._stores(at):
            body.hints[store.tensor] = "evict_first"

    def _needed(self, at: int) -> list[Statement]:
        totals = {p.total.name for p in self.pairs}
        wanted = [r.source for r in self._reductions(at) if r.name not in totals]
        wanted += [s.source for s in self._stores(at) if isinstance(s.source, str)]
        return closure(self.program, wanted)

    def _pass(self, body: Body, block: int, at: int) -> None:
        """Accumulate every reduction of this pass, lane by lane, and store what it knows. The last
        one only stores, if there is anything left to."""
        if at > self.last and not self._stores(at):
            return
        outside, spaces = body.indent, body.spaces
        self._hints(body, at)
        pairs = [p for p in self.pairs if self.depth[p.top.name] == at]
        paired = {r.name for p in pairs for r in (p.top, p.total)}
        single = [r for r in self._reductions(at) if r.name not in paired]
        for r in self._reductions(at):
            kind = "tl.int32" if r.kind == "bool" else body.math.type(r.kind)
            value = identity(r.op, r.kind)
            if any(r == pair.top for pair in pairs):
                value = LOWEST[self.program.wide]  # finite: no -inf - -inf
            body.line(f"a_{r.name} = tl.full({body.shape}, {value}, {kind})")
        copies = self._loop(body, block, at)
        for suffix in copies:
            for r in single:
                value = body.masked(r, suffix)
                body.line(f"a_{r.name} = {combine(r.op, r.kind, 'a_' + r.name, value)}")
        for pair in pairs:
            self._online(body, pair, copies)
        body.leave(outside)
        body.spaces, body.once = spaces, frozenset()

    def _online(self, body: Body, pair: scalar.Softmax, copies: list[str]) -> None:
        m, s = f"a_{pair.top.name}", f"a_{pair.total.name}"
        xs = []
        for suffix in copies:
            x = f"t_{pair.top.name}{suffix}"
            body.line(f"{x} = {body.masked(pair.top, suffix)}")
            xs.append(x)
        top = reduce(partial(combine, "max", "float"), xs)
        body.line(f"top = {combine('max', 'float', m, top)}")
        e = body.math.exponential
        terms = " + ".join(e(f"{x} - top") for x in xs)
        body.line(f"{s} = {s} * {e(f'{m} - top')} + ({terms})")
        body.line(f"{m} = top")

    def _close(self, body: Body, at: int, prefix: str, part: bool = False) -> None:
        """Tiles of partial results → the row's values, or those of a ``part`` of it."""
        for r in self._reductions(at):
            pair = next((p for p in self.pairs if r in (p.top, p.total)), None)
            tile = f"{prefix}{r.name}"
            if pair is None or r == pair.top:
                body.line(f"{r.name} = {body.finish(r, tile)}", f"{r.op} over the row")
            else:
                top = pair.top.name
                scaled = f"{tile} * {body.math.exponential(f'{prefix}{top} - {top}')}"
                body.line(f"{r.name} = {body.finish(r, scaled)}", "sum of e^(x - max)")
                if not part:
                    low = f'tl.where({r.name} == 0.0, float("-inf"), {top})'
                    body.line(f"{top} = {low}", "where all are -inf")
                    nan = f'tl.where({r.name} == 0.0, float("nan"), {r.name})'
                    body.line(f"{r.name} = {nan}", "-inf - -inf, as without the shift")
            body.row_value(r.name)

    def _combine(self, body: Body, at: int) -> None:
        """Read what all programs of a row found in an earlier pass, in one fixed order."""
        width = 1 << max(self.splits - 1, 0).bit_length()
        lift = "" if body.flat_row else "[None, :]"
        body.line(f"k = tl.arange(0, {width}){lift}")
        for r in self._reductions(at):
            conds = [f"(k < {self.splits})"] if width != self.splits else []
            if "r" in body.masks:
                conds.append(body.masks["r"])
            ident = identity(r.op, r.kind)
            mask = f", mask={' & '.join(conds)}, other={ident}" if conds else ""
            body.line(f"b_{r.name} = tl.load(w_{r.name} + (r * {self.splits} + k){mask})")
        self._close(body, at, "b_")


def dependent_reductions(program: ScalarProgram) -> int:
    """How many reductions of a row wait for one another when the row is in registers."""
    depth = depths(program)
    return max((depth[r.name] for r in program.reductions), default=0)
