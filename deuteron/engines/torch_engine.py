"""``torch``: ATen, node by node. It accepts every region, so that every graph runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.engines.base import BuildContext, Candidate, Kernel, Refusal, Refused
from deuteron.engines.index_checks import Run, explained, lookups
from deuteron.engines.libraries import copy_seconds, separate_seconds
from deuteron.engines.roofline import is_depthwise, is_product, leaves_gaps
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import opaque, table
from deuteron.ops.collective import STARTS, reduced_into, wait
from deuteron.ops.formula import COMPARISONS
from deuteron.ops.opdef import Fusion, promoted
from deuteron.policy import Policy
from deuteron.target import Target

# In-place variants of operators: they overwrite their first input, if nothing else reads it.
INPLACE: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, f"{name}_") for name in "relu sigmoid tanh exp neg".split()},
    **{name: getattr(torch.Tensor, f"{name}_") for name in "add sub mul div".split()},
    **{name: partial(getattr(F, name), inplace=True) for name in "hardswish silu".split()},
    "hardsigmoid": partial(F.hardsigmoid, inplace=True),
    "clamp": lambda x, min, max: table.get("clamp").reference(x, min, max, out=x),
    "leaky_relu": lambda x, negative_slope: F.leaky_relu_(x, negative_slope),
}

# Operators whose scalar operands may be given as Python numbers, which torch keeps in full
# precision; a rank-0 tensor would be rounded to the other operand's type on a GPU.
# (Comparisons are not listed: they take a number only as their second operand.)
TAKES_NUMBERS = frozenset(["add", "sub", "mul", "div", "pow", "remainder", "floor_div", "where"])

# Operators with a real out= variant: the plan's arena can hold their result.
OUT: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in """
    neg abs sign square exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan erf floor
    ceil round trunc add sub mul div pow maximum minimum remainder atan2 eq ne lt le gt ge
    logical_and logical_or logical_xor logical_not sigmoid tanh matmul
    """.split()
}


# Operators whose torch kernels on a GPU add with atomics, so that the order of additions varies.
UNORDERED = frozenset("scatter_add max_pool_grad max_pool_winners_grad avg_pool_grad".split())
UNORDERED |= {"adaptive_avg_pool_grad", "adaptive_max_pool_grad", "resize_grad", "grid_sample_grad"}


# How many algorithms of cuDNN a search tries, the most promising first: each takes 10 ms to set up.
SEARCHED = 5
# Seconds that cuDNN takes to set up a convolution, and to set up a depthwise one or a gradient of
# one, for which it compiles a kernel for each shape.
SET_UP_S = (0.02, 0.2)


@contextmanager
def numerics(policy: Policy, benchmark: bool = False, short: bool = False) -> Iterator[None]:
    """Set TF32 and determinism of cuDNN and cuBLAS for one call, as the policy says. torch caches
    the algorithm for a shape whether it searched for it (``benchmark``) or not, so the first call
    would decide for both ways. For ``short`` numbers, of 16 bits, we keep a search apart by
    flipping the TF32 switch, which means nothing to them."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = policy.allow_tf32
    try:
        how: Any = {"benchmark": benchmark, "benchmark_limit": SEARCHED}
        how |= {"deterministic": policy.deterministic}
        how |= {"allow_tf32": policy.allow_tf32 != (benchmark and short)}
        with torch.backends.cudnn.flags(enabled=True, **how):
            yield
    finally:
        matmul.allow_tf32 = before


def under(policy: Policy, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the switches of :func:`numerics` set around every call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with numerics(policy):
            return fn(*args, **kwargs)

    return run


class TorchEngine:
    """Runs every region with torch's own operators, one call per node."""

    name = "torch"
    version = "1"

    def refuse(self, region: Region, target: Target, policy: Policy) -> Refusal | None:
        return None

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        ordered = not target.is_cuda or UNORDERED.isdisjoint(region.ops)
        alone = any(is_depthwise(region.graph, node) for node in region.nodes)
        set_up = target.is_cuda and (alone or "conv" in region.ops)
        build_s = SET_UP_S[alone] if set_up else 0.0
        return [Candidate(self.name, self.version, build_s=build_s, deterministic=ordered)]

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        seconds = separate_seconds(region, target)
        if leaves_gaps(region):  # the plan copies what torch returns into the larger buffer
            seconds += sum(copy_seconds(region.graph.types[v], target) for v in region.outputs)
        return seconds

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        kernel = self._kernel(region, ctx)
        if ctx.device.type == "cuda" and is_product(region.nodes):
            return replace(kernel, fn=under(ctx.policy, kernel.fn))
        return kernel

    def _kernel(self, region: Region, ctx: BuildContext) -> Kernel:
        graph = region.graph
        if len(region.nodes) == 1 and region.nodes[0].op in OUT:
            kernel = _out_kernel(region, region.nodes[0], ctx.device)
            if kernel is not None:
                return kernel
        first = region.nodes[0]
        if first.op in STARTS and first.attrs["ranks"] > 1:
            at, start = region.inputs.index(first.uses[0]), partial(STARTS[first.op], **first.attrs)
            if first.op != "all_reduce":
                return Kernel(lambda *xs: start(xs[at]), wait=wait)
            into = partial(reduced_into, **first.attrs)
            over = ((0, at),) if graph.types[first.uses[0]] == graph.types[first.output] else ()
            return Kernel(lambda *xs: into(xs[at], xs[-1]), writes=True, over=over, wait=wait)
        fn = (_single if len(region.nodes) == 1 else _sequence)(graph, region, ctx.device)
        low = any(graph.types[v].dtype.is_low for v in (*region.inputs, *region.outputs))
        if ctx.device.type == "cpu" and low:
            fn = _or_wider(fn, [graph.types[v].dtype.torch for v in region.outputs])
        if ctx.device.type == "cpu":
            with suppress(Refused):  # the region computes an index itself: keep torch's own error
                fn = explained(fn, lookups(region), region.inputs)
        return Kernel(fn)


def _or_wider(fn: Callable[..., Any], types: list[torch.dtype | None]) -> Callable[..., Any]:
    """``fn``, which falls back to float32 where torch has no CPU kernel for short floats."""

    def wide(x: Any) -> Any:
        low = isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() < 4
        return x.float() if low else x

    def call(*xs: Any) -> Any:
        try:
            return fn(*xs)
        except NotImplementedError:
            found = fn(*map(wide, xs))
        results = found if isinstance(found, tuple) else (found,)
        cast = tuple(r.to(t) for r, t in zip(results, types, strict=True))
        return cast if isinstance(found, tuple) else cast[0]

    return call


def tensors(graph: Graph, node: Node) -> list[str]:
    """The values that a node reads, without constants of the graph."""
    return [v for v in node.uses if v not in graph.constants]


def _operand(graph: Graph, node: Node, value: str | None, device: torch.device) -> tuple[bool, Any]:
    """(True, the literal) for a constant, which becomes a number or a tensor, or for an input that
    is left out; (False, the value's name) for anything else."""
    if value is None:
        return True, None
    constant = graph.constants.get(value)
    if constant is None:
        return False, value
    if _as_number(graph, node, value):
        return True, constant.data.item()
    if tensors(graph, node) and table.get(node.op).fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST):
        return True, constant.data  # rank 0 on the CPU is as good as a number
    return True, constant.data.to(device)


def _as_number(graph: Graph, node: Node, value: str) -> bool:
    """Whether the result still gets the element type that the graph promises if this constant is
    passed as a Python number, which counts less in type promotion than a rank-0 tensor."""
    if node.op == "where" and value == node.inputs[0]:
        return False  # a condition is a tensor
    if node.op in COMPARISONS:
        return value != node.inputs[0] and node.inputs[0] not in graph.constants
    operands = node.inputs[1:] if node.op == "where" else node.inputs
    others = [graph.types[v] for v in operands if v is not None and v not in graph.constants]
    takes = node.op in TAKES_NUMBERS and bool(others)
    return takes and promoted(*others) == graph.types[node.outputs[0]].dtype


def _out_kernel(region: Region, node: Node, device: torch.device) -> Kernel | None:
    """A kernel that writes through ``out=`` into the plan's memory, or None if that is
    impossible."""
    graph = region.graph
    operands = [_operand(graph, node, v, device) for v in node.inputs]
    read = {graph.types[v].dtype for v in tensors(graph, node)}
    if node.op not in COMPARISONS and not read <= {graph.types[node.outputs[0]].dtype}:
        return None
    fn, each = OUT[node.op], table.get(node.op).fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST)
    alike = [graph.types[v] == graph.types[node.output] for v in region.inputs]
    over = tuple((0, i) for i, same in enumerate(alike) if same and each)
    if node.inputs == region.inputs:
        fn = _over_itself(fn, [i for _, i in over]) if over else fn
        return Kernel(fn, writes=True, out_keyword=True, over=over)
    if len(operands) == 2 and operands[1][0] and node.inputs[:1] == region.inputs:
        number = operands[1][1]
        onto = _over_itself(fn, [0]) if over else fn
        return Kernel(lambda x, out: onto(x, number, out=out), writes=True, over=over)
    return None


def _over_itself(fn: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``fn``, whose result may take the memory of an operand at ``places``. Then we pass ``out`` as
    that operand too: torch refuses two tensors that share memory if their strides differ, even if
    they have just one element."""

    def run(*xs: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        if out is None:
            return fn(*xs)
        given = list(xs)
        for i in places:
            if xs[i].data_ptr() == out.data_ptr():
                given[i] = out
        return fn(*given, out=out)

    return run


def bound_call(graph: Graph, node: Node, device: torch.device, inplace: bool = False) -> Run:
    """The torch call of one node as a function of its non-literal inputs, with attributes bound."""
    op = table.get(node.op)
    fn: Callable[..., Any] = INPLACE[node.op] if inplace else op.reference
    if node.op == "aten":
        fn = opaque.bound(**node.attrs)
    elif node.attrs:
        fn = partial(fn, **node.attrs)
    operands = [_operand(graph, node, v, device) for v in node.inputs]
    if not op.variadic:
        operands += [(True, None)] * (len(op.inputs) - len(operands))
    while inplace and operands and operands[-1] == (True, None):
        operands.pop()
    if not operands:  # no operand determines the device of the result

        def there() -> Any:
            with device:
                return fn()

        return there
    if not any(is_literal for is_literal, _ in operands):
        return fn
    if all(is_literal for is_literal, _ in operands[1:]) and not operands[0][0]:
        rest = tuple(literal for _, literal in operands[1:])
        return lambda x: fn(x, *rest)

    def call(*given: Any) -> Any:
        values = iter(given)
        return fn(*[literal if is_literal else next(values) for is_literal, literal in operands])

    return call


def _single(graph: Graph, region: Region, device: torch.device) -> Callable[..., Any]:
    node = region.nodes[0]
    fn = bound_call(graph, node, device)
    if node.outputs != region.outputs:  # drop results that nothing reads
        every, kept = fn, [node.outputs.index(v) for v in region.outputs]

        def fn(*xs: Any) -> Any:
            results = every(*xs)
            picked = tuple(results[i] for i in kept)
            return picked[0] if len(picked) == 1 else picked

    order = tensors(graph, node)
    if tuple(order) == region.inputs:
        return fn
    where = [region.inputs.index(v) for v in order]
    return lambda *xs: fn(*[xs[i] for i in where])


def _sequence(graph: Graph, region: Region, device: torch.device) -> Callable[..., Any]:
    """A function that runs the nodes one after another. Values live in a list of registers and are
    released after their last use."""
    slot = {v: i for i, v in enumerate(region.inputs)}
    last = {value: i for i, node in enumerate(region.nodes) for value in node.uses}
    outputs = set(region.outputs)
    owned: set[str] = set()  # values in fresh memory that no other value shares
    steps: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for i, node in enumerate(region.nodes):
        first = node.inputs[0] if node.inputs else None
        free = first in owned - outputs and last[first] == i and node.inputs.count(first) == 1
        like = free and graph.types[first or ""] == graph.types[node.outputs[0]]
        inplace = like and node.op in INPLACE
        fn = bound_call(graph, node, device, inplace)
        for out in node.outputs:
            slot[out] = len(slot)
        op = table.get(node.op)
        if not op.view and op.fusion is not Fusion.OPAQUE:
            owned.update(node.outputs)
        else:
            owned.difference_update(node.uses)  # the result may show the same memory
        reads = tuple(slot[v] for v in tensors(graph, node))
        writes = tuple(slot[v] for v in node.outputs)
        dead = {slot[v] for v in tensors(graph, node) if last[v] == i and v not in outputs}
        steps.append((fn, reads, writes, tuple(dead)))
    size, count = len(slot), len(region.inputs)
    results = [slot[v] for v in region.outputs]
    only = results[0] if len(results) == 1 else None

    def run(*xs: Any) -> Any:
        regs: list[Any] = [*xs, *[None] * (size - count)]
        for fn, reads, writes, dead in steps:
            out = fn(*[regs[r] for r in reads])
            if len(writes) == 1:
                regs[writes[0]] = out if not isinstance(out, tuple) else out[0]
            else:
                for w, value in zip(writes, out, strict=True):
                    regs[w] = value
            for d in dead:
                regs[d] = None
        return regs[only] if only is not None else tuple(regs[r] for r in results)

    return run
