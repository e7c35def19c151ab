"""``triton_gen``: any chain of elementwise, movement and reduction operators as generated Triton.

One kernel reads every input once and writes every output once, so its price is the region's
bytes over the bandwidth it reaches, 92 % of a copy's, plus one launch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch

from deuteron.codegen import triton_compile
from deuteron.codegen.phases import in_copies
from deuteron.codegen.scalar import Load, ScalarProgram, overwritable
from deuteron.codegen.triton_body import side_by_side
from deuteron.codegen.triton_index import arranged, rows_contiguous
from deuteron.codegen.triton_knobs import choices, crowded
from deuteron.codegen.triton_passes import Passes
from deuteron.codegen.triton_render import Knobs, Rendered, prepared, render
from deuteron.engines.base import BuildContext, Candidate, Kernel, as_answer, refuse_if
from deuteron.engines.libraries import modelled_seconds
from deuteron.engines.match import places_of, scalar_program
from deuteron.engines.roofline import is_product, main_dtype, region_cost
from deuteron.engines.triton.common import refuse_elsewhere
from deuteron.engines.triton.depthwise import takes_window
from deuteron.ir.graph import Attrs
from deuteron.ir.region import Region
from deuteron.ir.text import restride
from deuteron.ir.types import TensorType, strides_for
from deuteron.ops import table
from deuteron.ops.formula import PRIMITIVES, Compute
from deuteron.ops.opdef import Fusion
from deuteron.policy import Policy
from deuteron.target import Target

NAMED = 5  # most operators that appear in the name of a kernel
BRIEF_S = 1e-6  # seconds: shorter memory traffic is limited by latency, however few programs run
IN_FLIGHT = 48 << 10  # bytes of loads in flight that keep a multiprocessor busy
SHARE = 1.5  # a multiprocessor can draw this many times its equal share of the bandwidth
REACHED = 0.92  # part of the bandwidth of a copy
AGAIN = 0.1  # a further pass over rows that L2 still has costs this part of reading them
AGAIN_APART = 0.4  # the same where passes are kernels, each of which reads all rows before the next
# Part of REACHED in loops over groups: passes wait for L2, and each element looks up its channel.
GROUPED = {"group_norm": 0.48}
STEP_S = 0.2e-6  # least seconds of a step of a loop over a row, which waits for memory, on an H200
SCATTERED = 40  # an element that is a load by itself takes as long as so many operations
WINDOWED = ("conv", "conv_dx")  # generated if they are depthwise
ACROSS = 0.4  # part of REACHED where neighbouring threads hold parts of different columns
CROWDED = 0.65  # part of REACHED where one program fills a multiprocessor: loads and work alternate


def program_of(region: Region) -> ScalarProgram:
    """The region's scalar program; refuses if it has none."""
    same = len({*region.inputs, *region.outputs}) < len(region.inputs) + len(region.outputs)
    refuse_if(same, "an output is also an input or another output")
    types = {**region.graph.types, **_packed(region)}
    graph = region.graph if types == region.graph.types else replace(region.graph, types=types)
    return prepared(scalar_program(replace(region, graph=graph)))


def _packed(region: Region) -> dict[str, TensorType]:
    """The constant weights of depthwise convolutions, with the types in which we store them again:
    weights of neighbouring channels adjacent in memory."""
    found = {}
    for node in region.nodes:
        weight = node.inputs[1] if node.op in WINDOWED else None
        if weight is not None and weight in region.constants:
            t = region.graph.types[weight]
            own = strides_for(t.shape[1:], "contiguous")
            found[weight] = replace(t, strides=(1, *(n * t.shape[0] for n in own)))
    return found


def _with_packed(region: Region, ctx: BuildContext, run: Callable[..., None]) -> Any:
    """``run`` with the weights of :func:`_packed` in place of those that it is called with."""
    stored = {}
    for value, t in _packed(region).items():
        form = ctx.form(value, ("strided", t.strides), partial(restride, type_=t))
        stored[region.inputs.index(value)] = form
    return (lambda *given: run(*map(stored.get, range(len(given)), given))) if stored else run


def _busy(program: ScalarProgram, knobs: Mapping[str, Any], read: float, target: Target) -> float:
    """The part of the bandwidth that programs over rows draw: less if there are fewer programs than
    multiprocessors, or if each has too few loads in flight to hide the latency of memory."""
    per_unit = -(-program.rows // knobs["rows"]) * knobs["splits"] / target.units
    each = read / max(program.rows * program.columns, 1)  # bytes read for an element
    asked = knobs["rows"] * knobs["block"] * knobs["unroll"] * each
    return float(min(1.0, SHARE * per_unit, per_unit * asked / IN_FLIGHT))


def _told(program: ScalarProgram, knobs: Mapping[str, Any]) -> float:
    """Bytes that the programs of a further pass read to learn the results of all programs of the
    pass before that share their rows."""
    programs = -(-program.rows // knobs["rows"]) * knobs["splits"]
    return float(4 * programs * knobs["rows"] * knobs["splits"] * len(program.reductions))


def _steps(program: ScalarProgram, knobs: Mapping[str, Any]) -> int:
    """How many steps a loop over a row takes one after another, however many programs there are."""
    return -(-program.columns // int(knobs["block"] * knobs["unroll"] * knobs["splits"]))


def _instructions(program: ScalarProgram, copies: int) -> float:
    """Instructions for all elements together; unrolled windows take many. Values that are the same
    for all elements of a row count once per row."""
    program = in_copies(arranged(program), copies)
    inner, total = set(program.inner), 0.0
    for s in program.statements:
        each = PRIMITIVES[s.op] if isinstance(s, Compute) else 1.0
        once = isinstance(s, Compute) and inner and not program.varies[s.name] & inner
        total += each * program.rows * (1 if once else program.columns)
    return total


def _scattered(program: ScalarProgram) -> float:
    """How many elements of pointwise work are single loads: neighbouring results read elements that
    are two or more apart, and no other thread reads those between."""
    if program.inner or not program.outer:
        return 0.0
    last, pairs = program.outer[-1], side_by_side(program)
    loads = [s for s in program.statements if isinstance(s, Load) and s.name not in pairs]
    apart = sum((s.offset.factor(last) or 0) > 1 for s in loads)
    return float(apart * program.rows)


def _called(region: Region) -> str:
    """The name of a region's kernels: its operators, each once. Movement and casts are left out if
    there is anything else: they only change addresses and types of loads, and regions that differ
    just in how they write these share a kernel."""
    kinds = {op: table.get(op).fusion for op in region.ops}
    work = [op for op, kind in kinds.items() if kind is not Fusion.INJECTIVE and op != "cast"]
    named = work or ["cast"] * ("cast" in kinds) or list(kinds)
    return "_".join((*named[:NAMED], *(["more"] if len(named) > NAMED else [])))


@lru_cache(maxsize=1024)
def _launcher(
    region: Region, candidate: Candidate, device: torch.device, elsewhere: Any
) -> tuple[Any, str]:
    """The launcher of a candidate's kernels, and a note on how many there are. ``elsewhere``: the
    GPU that they are compiled for, if it is not the one present."""
    from deuteron.codegen.triton_load import Launcher

    rendered = TritonGen().render(region, candidate)
    launcher = Launcher(rendered, (*region.inputs, *region.outputs), device)
    return launcher, f"{len(rendered.launches)} kernel(s), {rendered.warps} warps"


class TritonGen:
    """Writes a Triton kernel for a region of elementwise, movement and reduction operators."""

    name = "triton_gen"
    version = "4"
    strided = True

    @as_answer
    def refuse(self, region: Region, target: Target, policy: Policy) -> None:
        refuse_elsewhere(target)
        sums = is_product([n for n in region.nodes if n.op not in WINDOWED])
        refuse_if(sums, "products have kernels of their own", quiet=True)
        large = any(op in WINDOWED for op in region.ops) and takes_window(region)
        refuse_if(large, "windows of many taps have a kernel of their own", quiet=True)
        short = any(t.dtype.is_float and t.dtype.bits < 16 for t in region.graph.types.values())
        none = f"{target.name} has no floats of 8 bits"
        refuse_if(short and not target.has_fp8, none, "cast to f16 or wider")
        program_of(region)

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        program = program_of(region)
        return [
            Candidate(self.name, self.version, Attrs(asdict(knobs)), build_s=0.4)
            for knobs in choices(program, target.units)
        ]

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        cost, kind = region_cost(region), candidate.knobs["kind"]
        once = modelled_seconds(cost, main_dtype(region), REACHED, False, target)
        program = program_of(region)
        work = _instructions(program, candidate.knobs["copies"]) / (target.rate("f32", False) / 2)
        once = max(once, work + target.launch)
        made = in_copies(arranged(program), candidate.knobs["copies"])
        once += SCATTERED * _scattered(made) / target.rate("f32", False)
        if kind in ("rows", "loop", "split"):
            moving, busy = once - target.launch, _busy(program, candidate.knobs, cost.reads, target)
            once += max(0.0, min(moving / busy - moving, 50 * (moving - BRIEF_S)))
        if kind == "rows" and crowded(program):
            return once / CROWDED
        if kind == "rows" and rows_contiguous(arranged(program)):
            return once + (once - target.launch) * (1 / ACROSS - 1)
        if kind not in ("loop", "split"):
            return once
        once /= min(GROUPED.get(op, 1.0) for op in region.ops)
        # a loop reads its own row again right away; passes that are kernels read all rows each
        share = target.units / max(program.rows, 1) if kind == "loop" else 1.0
        at_once = cost.reads * min(1.0, share)
        held = AGAIN if kind == "loop" else AGAIN_APART
        part = held if at_once < target.cache_bytes / 2 else 1.0
        passes = Passes(program)
        again = part * (passes.count - 1) * cost.reads / target.stream
        again += (passes.count - 1) * _told(program, candidate.knobs) / target.cache_bandwidth
        launches = passes.last if kind == "split" else 0
        steps = passes.count * _steps(program, candidate.knobs)
        return max(once + again, target.launch + STEP_S * steps) + launches * target.launch

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        launcher, note = _launcher(region, candidate, ctx.device, triton_compile.elsewhere)
        program = program_of(region)
        kind = candidate.knobs["kind"]
        alone = kind in ("flat", "tile", "rows")  # the program that reads a row also writes it
        over = places_of(overwritable(program, kind == "rows"), region) if alone else ()
        run = _with_packed(region, ctx, launcher)
        room = launcher.workspace
        return Kernel(run, writes=True, workspace=room, note=note, over=over, launches=True)

    def render(self, region: Region, candidate: Candidate) -> Rendered:
        """The source code of a candidate; ``print(….source)`` shows it."""
        program = program_of(region)
        return render(program, Knobs(**candidate.knobs), _called(region))
