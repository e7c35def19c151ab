"""Statements of a scalar program as lines of a Triton kernel.

A value is a scalar, a column ``(rows, 1)``, a row ``(1, block)`` or a whole tile; Triton's
broadcasting joins them. With one row per program the row axis is left out altogether, so that
what belongs to the row stays in scalar registers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deuteron.codegen import scalar
from deuteron.codegen.index import Affine, Dynamic, Var
from deuteron.codegen.scalar import Guard, Load, Reduce, ScalarProgram, Statement, Store, reads
from deuteron.codegen.triton_index import Space, runs, times
from deuteron.codegen.triton_math import AS_MAX, Arithmetic, across, identity
from deuteron.ops.formula import Arg, Compute, Const

Tokens = frozenset[str]  # the spaces that a value depends on


def arithmetic(program: ScalarProgram) -> Arithmetic:
    """How exact this program must be: 16-bit results forgive the fast exponential."""
    exact = any(not s.dtype.is_low for s in program.stores)
    pairs, shifted = scalar.softmaxes(program)
    totals = frozenset(p.total.name for p in pairs)
    return Arithmetic(program.wide, exact, shifted, totals, _beside_one(program))


def _beside_one(program: ScalarProgram) -> frozenset[str]:
    """Return the exponentials e^x that are read in 1 + e^x alone."""
    found = {s.name for s in program.statements if isinstance(s, Compute) and s.op == "exp"}
    for s in program.statements:
        if not (isinstance(s, Compute) and s.op == "add" and Const(1.0, "float") in s.args):
            found.difference_update(reads(s))
    return frozenset(found)


@dataclass
class Body:
    """The lines of one kernel over ``spaces``, as they are written.

    ``masks`` names, per space, the mask that is true inside (absent where all of it is);
    ``shape`` is the tile. ``hints`` maps a tensor to the eviction policy of its loads. ``once``:
    values along a row that all copies of a loop's body share.
    """

    program: ScalarProgram
    math: Arithmetic
    arguments: Mapping[str, str]
    spaces: tuple[Space, ...]
    shape: tuple[int, ...]
    masks: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    pairs: dict[str, tuple[Load, Load]] = field(default_factory=dict)  # see :func:`side_by_side`
    woven: dict[Store, tuple[Store, Store]] = field(default_factory=dict)  # see :func:`woven`
    program_id: str = ""  # as text
    lines: list[str] = field(default_factory=list)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)  # text → name, indent
    indent: str = "    "

    def line(self, text: str, comment: str = "") -> None:
        self.lines.append(self.indent + text + (f"  # {comment}" if comment else ""))

    def mask(self, space: str, size: int, step: int, name: str = "") -> None:
        """Mask what lies behind the end of a space, if steps do not end there."""
        if size % step:
            self.masks[space] = name or f"inside_{space}"
            self.line(f"{self.masks[space]} = {space} < {size}")

    def _named(self, text: str) -> str:
        """Give a part of an index a name: windows use the same parts in every load, and long text
        takes Python and Triton long to read."""
        if text not in self.parts:
            self.parts[text] = f"at_{len(self.lines)}", self.indent
            self.line(f"{self.parts[text][0]} = {text}")
        return self.parts[text][0]

    def leave(self, outside: str) -> None:
        """Go on at the indent ``outside`` after a loop, and forget the names given within it."""
        self.indent = outside
        known = self.parts.items()
        self.parts = {text: part for text, part in known if len(part[1]) <= len(outside)}

    @property
    def full(self) -> Tokens:
        return frozenset(s.name for s in self.spaces if not s.scalar)

    @property
    def flat_row(self) -> bool:
        return len(self.shape) == 1

    def name(self, value: str, suffix: str = "") -> str:
        element = self.program.inner and self.program.level[value] == "element"
        return value + suffix if element and value not in self.once else value

    def text(self, a: Arg, suffix: str = "") -> str:
        if isinstance(a, Const):
            return self.math.literal(a, bare=False)
        return self.name(a, suffix)

    def emit(self, statements: Iterable[Statement], suffix: str = "") -> None:
        for s in statements:
            if isinstance(s, Load) and s.name in self.pairs:
                self._load_pair(*self.pairs[s.name])
            elif isinstance(s, Store) and s in self.woven:
                self._store_pair(s, *self.woven[s])
            elif isinstance(s, Store):
                self._store(s, suffix)
            elif isinstance(s, Reduce):
                self._reduce(s)
            else:
                text, self.tokens[s.name] = self._value(s, suffix)
                self.line(f"{self.name(s.name, suffix)} = {text}", self._show(s))

    def _value(
        self, s: Load | Compute | scalar.Inside | scalar.Position, suffix: str
    ) -> tuple[str, Tokens]:
        if isinstance(s, Load):
            return self._load(s, suffix)
        if isinstance(s, scalar.Inside):
            conds, tokens = self._condition(s.guards, suffix)
            return " & ".join(conds) or "tl.full((), 1, tl.int1)", tokens
        if isinstance(s, scalar.Position):
            text, tokens = self._offset(s.index, suffix)
            return f"({text}).to(tl.int64)", tokens
        right = self.math.compute(s, lambda a: self.name(a, suffix))
        return right, Tokens().union(*(self.tokens[a] for a in reads(s)))

    def _offset(self, e: Affine, suffix: str) -> tuple[str, Tokens]:
        """``e`` as text and the spaces it depends on; ``suffix`` marks a copy of the column."""
        parts: list[str] = []
        tokens: set[str] = set()
        factors = {a: f for a, f in e.terms if isinstance(a, Var)}
        for space in self.spaces:
            name = space.name + (suffix if space.name == "c" else "")
            found = runs(space, factors, name, self._named)
            parts += found
            if found and not space.scalar:
                tokens.add(space.name)
        for atom, f in e.terms:
            if isinstance(atom, Var):
                continue
            if isinstance(atom, Dynamic):
                text, of = self.name(atom.name, suffix), self.tokens[atom.name]
            else:
                inside, of = self._offset(atom.of, suffix)
                text = self._named(f"({inside}) {'%' if atom.rest else '//'} {atom.by}")
            parts.append(times(text, f))
            tokens |= of
        if e.const or not parts:
            parts.append(str(e.const))
        return " + ".join(parts).replace("+ -", "- "), frozenset(tokens)

    def _condition(self, guards: Iterable[Guard], suffix: str) -> tuple[list[str], Tokens]:
        """The guards as comparisons, those that always hold left out."""
        found: list[str] = []
        tokens = Tokens()
        for g in guards:
            text, of = self._offset(g.index, suffix)
            below = [f"({text} >= {g.low})"] if g.index.low < g.low else []
            above = [f"({text} < {g.high})"] if g.index.high >= g.high else []
            found += below + above
            tokens |= of if below or above else Tokens()
        return found, tokens

    def _show(self, s: Statement) -> str:
        if isinstance(s, Load | Store):
            s = replace(s, tensor=self.arguments[s.tensor])
        return scalar.show(s)

    def _masks(self, tokens: Tokens, suffix: str) -> list[str]:
        used = ((space, mask) for space, mask in self.masks.items() if space in tokens)
        return [mask + (suffix if space == "c" else "") for space, mask in used]

    def _load_pair(self, even: Load, odd: Load) -> None:
        """Write two loads as one of twice the width, when the first of them is due."""
        if even.name in self.tokens:
            return
        at, tokens = self._offset(even.offset, "")
        conds, guarded = self._condition(even.guards, "")
        if conds or even.offset.factor(self.program.outer[-1]) != 2:  # pairs are not contiguous
            conds += self._masks(tokens | guarded, "")
            extra = f", mask=({' & '.join(conds)})[:, None], other=0" if conds else ""
            where = f"{self.arguments[even.tensor]} + ({at})[:, None] + tl.arange(0, 2)[None, :]"
            both = f"tl.load({where}{extra})"
        else:
            where, mask = self._woven_place(even)
            both = f"tl.reshape(tl.load({where}{mask}), ({self.shape[0]}, 2))"
        self.line(f"{even.name}, {odd.name} = tl.split({both})", self._show(even))
        for s in (even, odd):
            self.line(f"{s.name} = {s.name}.to({self.math.float})")
            self.tokens[s.name] = tokens | guarded

    def _load(self, s: Load, suffix: str) -> tuple[str, Tokens]:
        at, own = self._offset(s.offset, suffix)
        conds, guarded = self._condition(s.guards, suffix)
        if not own and guarded:  # a scalar pointer takes no mask that varies
            some = sorted(guarded)[0]
            at += f" + 0 * {some}{suffix if some == 'c' else ''}"
        tokens = own | guarded
        conds += self._masks(tokens, suffix)
        for index in s.offset.lookups:  # as in torch, one out of range ends the program
            name = self.name(index.name, suffix)
            conds.append(f"({name} >= 0) & ({name} < {index.size})")
            self.line(f'tl.device_assert({conds[-1]}, "index out of range")')
        extra = f", mask={' & '.join(conds)}, other=0" if conds else ""
        if s.tensor in self.hints:
            extra += f', eviction_policy="{self.hints[s.tensor]}"'
        value = f"tl.load({self.arguments[s.tensor]} + {_bracket(at)}{extra})"
        kind = scalar.KINDS[s.dtype.kind]
        if f"tl.{s.dtype.name}" != self.math.type(kind) and kind != "bool":
            value += f".to({self.math.type(kind)})"
        return value, tokens

    def _store(self, s: Store, suffix: str) -> None:
        at, tokens = self._offset(s.offset, suffix)
        conds = self._masks(tokens, suffix)
        mask = f", mask={' & '.join(conds)}" if conds else ""
        hint = f', eviction_policy="{self.hints[s.tensor]}"' if s.tensor in self.hints else ""
        value = self.text(s.source, suffix)
        target = f"{self.arguments[s.tensor]} + {_bracket(at)}"
        self.line(f"tl.store({target}, {value}{mask}{hint})", self._show(s))

    def _store_pair(self, s: Store, even: Store, odd: Store) -> None:
        """Write two stores as one of twice the width, in the place of the second."""
        if s is even:
            return
        where, mask = self._woven_place(even)
        values = f"tl.interleave({self.text(even.source)}, {self.text(odd.source)})"
        self.line(f"tl.store({where}, {values}{mask})", self._show(even))

    def _woven_place(self, even: Load | Store) -> tuple[str, str]:
        """Return where the pairs of elements lie for all of a program, as one run, and their mask.
        The index ``k`` goes through the last axis twice as finely as ``i`` does."""
        (space,), (block,) = self.spaces, self.shape
        *others, last = space.axes
        fine = replace(space, axes=(*others, whole := Var(last.name, 2 * last.size)))
        if "k" not in self.tokens:
            self.tokens["k"] = frozenset({"k"})
            self.line(f"k = {self.program_id} * {2 * block} + tl.arange(0, {2 * block})")
            self.mask("k", fine.size, 2 * block)
        factors = {a: f for a, f in even.offset.terms if isinstance(a, Var)}
        parts = runs(fine, {**factors, whole: 1}, "k", self._named)
        parts += [str(even.offset.const)] if even.offset.const else []
        mask = f", mask={self.masks['k']}" if "k" in self.masks else ""
        other = ", other=0" if mask and isinstance(even, Load) else ""
        return f"{self.arguments[even.tensor]} + {_bracket(' + '.join(parts))}", mask + other

    # ---- reductions

    def masked(self, s: Reduce, suffix: str = "") -> str:
        """Return what a reduction adds up, as a whole tile, with its identity outside the row."""
        value = self.name(s.source, suffix)
        tokens = self.tokens[s.source]
        if s.kind == "bool":
            value = f"{value}.to(tl.int32)"
        if "c" in self.masks:
            ident = identity(s.op, s.kind)
            if s.kind == "int":
                ident = f"tl.full((), {ident}, tl.int64)"
            elif self.program.wide and s.kind == "float":
                ident = f"tl.full((), {ident}, tl.float64)"
            value = f"tl.where({self.masks['c']}{suffix}, {value}, {ident})"
            tokens = tokens | {"c"}
        return value if tokens >= self.full else f"tl.broadcast_to({value}, {self.shape})"

    def finish(self, s: Reduce, x: str) -> str:
        """Combine a tile of partial results into one number per row."""
        text = across(s.op, s.kind, x, self.flat_row, self.math)
        return f"{text} != 0" if s.op in AS_MAX else text

    def row_value(self, name: str) -> None:
        self.tokens[name] = frozenset() if self.flat_row else frozenset({"r"})

    def _reduce(self, s: Reduce) -> None:
        if not self.program.inner:  # rows of one element
            self.tokens[s.name] = self.tokens[s.source]
            self.line(f"{s.name} = {s.source}", self._show(s))
            return
        over = ", ".join(f"{v.name}: {v.size}" for v in self.program.inner)
        line = f"{s.name} = {self.finish(s, self.masked(s))}"
        if s.seldom and self.flat_row:  # a row of its own: it can be left out
            self.line(f"{s.name} = {s.seldom}", scalar.show(s, over))
            self.line(f'if {s.seldom} == float("inf"):')
            self.line("    " + line)
        else:
            self.line(line, scalar.show(s, over))
        self.row_value(s.name)


def woven(program: ScalarProgram) -> dict[Store, tuple[Store, Store]]:
    """Return stores to every second element and to those between, each mapped to both."""
    full = frozenset(program.outer)
    whole = [s for s in program.stores if program.varies.get(str(s.source), frozenset()) >= full]
    stores = {(s.tensor, s.offset): s for s in whole}
    found = {}
    for (tensor, place), even in stores.items():
        odd = stores.get((tensor, place + 1))
        if odd is not None and _is_of_pairs(place) and place.factor(program.outer[-1]) == 2:
            found[even] = found[odd] = (even, odd)
    return found


def _is_of_pairs(place: Affine) -> bool:
    """Whether neighbours are two apart, at even places."""
    steps = [factor for _, factor in place.terms]
    return 2 in steps and not any(n % 2 for n in (place.const, *steps))


def side_by_side(program: ScalarProgram) -> dict[str, tuple[Load, Load]]:
    """Loads by name that read an element at an even place and the one after it, under the same
    guards, where neighbours of a result read neighbouring pairs: windows two apart do."""
    floats = (s for s in program.loads if s.dtype.is_float and not s.offset.dynamic)
    loads = {(s.tensor, s.offset, s.guards): s for s in floats}
    found = {}
    for (tensor, place, guards), even in loads.items():
        odd = loads.get((tensor, place + 1, guards))
        if odd is not None and _is_of_pairs(place):
            found[even.name] = found[odd.name] = (even, odd)
    return found


def _bracket(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def closure(program: ScalarProgram, wanted: Iterable[str]) -> list[Statement]:
    """The element statements that ``wanted`` values need, in order; rows are taken as known."""
    elements = [s for name, s in program.made.items() if program.level[name] == "element"]
    return scalar.needed(elements, wanted)


def depths(program: ScalarProgram, together: Iterable[scalar.Softmax] = ()) -> dict[str, int]:
    """Value → how many passes it waits for; reductions found ``together`` are one pass."""
    found: dict[str, int] = {}
    joined = {pair.total.name: pair.top.name for pair in together}
    for s in program.made.values():
        if isinstance(s, Reduce):
            same = joined.get(s.name)
            found[s.name] = found[same] if same else found[s.source] + 1
        else:
            found[s.name] = max((found[name] for name in reads(s)), default=0)
    return found
