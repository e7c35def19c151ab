"""From an nn.Module and example inputs to a graph.

>>> imported = import_module(model.eval(), (torch.randn(1, 3, 224, 224),))
>>> print(imported.graph)
>>> tensors = imported.flatten_call((image,))          # what the graph's inputs are bound to

A module that only computes is traced by :mod:`deuteron.frontends.torch_trace`, any other by
torch.export, which takes seconds to load; :mod:`deuteron.frontends.torch_fx` turns the calls into
ours.
Shapes and everything that is not a tensor are fixed at what the example has.
"""

import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends import refusals
from deuteron.frontends.aten import TABLE, Entry
from deuteron.frontends.attributes import Attributes
from deuteron.frontends.below_autograd import trace_below_autograd
from deuteron.frontends.call_names import (
    identifier,
    input_names,
    leaf_paths,
    positional,
    result_names,
)
from deuteron.frontends.calls import draws
from deuteron.frontends.containers import Reader, builder
from deuteron.frontends.proxies import NeedsExport, Proxy, TakesGradient, TooSlow, gradients_told
from deuteron.frontends.state import HoldsState, Stateless, closed, opened
from deuteron.frontends.torch_fx import Importer, is_plain
from deuteron.frontends.torch_fx_facts import Known, line_of, source_of
from deuteron.frontends.torch_trace import Trace, trace
from deuteron.ir.graph import Graph
from deuteron.ops.emit import Sym

_AGAIN = "import the module again with these arguments as the example"


@dataclass(frozen=True)
class Fixed:
    """A value that is fixed to that of the example: a call argument or a result that is no tensor,
    or an argument whose numbers decide what is computed."""

    value: Any


@dataclass(frozen=True, eq=False)
class Imported:
    """A module as a graph, and how calls of the module map to it.

    * ``inputs``: for each flattened argument the name of a graph input, or :class:`Fixed`.
    * ``outputs``: for each flattened result the name of a graph output, or :class:`Fixed`.
    * ``paths``: for each flattened argument how the caller writes it, e.g. ``batch['mask']``.
    * ``opaque``: the ATen calls in the graph that we have no operator for; ``why`` has the
      reasons. ``mismatches`` counts results whose type we inferred otherwise than torch (a fault
      of Deuteron's; such calls are kept as ATen's, so that numbers are right).
    * ``stateful``: whether arguments or results hold objects such as caches, which are taken apart.
    """

    graph: Graph
    inputs: tuple[str | Fixed, ...]
    outputs: tuple[str | Fixed, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    paths: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    why: Mapping[str, str] | None = None
    mismatches: int = 0
    stateful: bool = False

    @cached_property
    def _only_tensors(self) -> bool:
        """Whether calls are positional tensors and nothing else, which need no flattening."""
        named = all(isinstance(i, str) for i in self.inputs)
        return named and self.in_spec == pytree.tree_structure(((0,) * len(self.inputs), {}))

    @cached_property
    def deciding(self) -> frozenset[int]:
        """The places of tensors whose numbers decide what is computed."""
        fixed = enumerate(b.value if isinstance(b, Fixed) else None for b in self.inputs)
        return frozenset(i for i, value in fixed if isinstance(value, torch.Tensor))

    @cached_property
    def _reader(self) -> Reader:
        fixed = (b if isinstance(b, Fixed) else None for b in self.inputs)
        same = [None if b is None else partial(_is_same, b.value) for b in fixed]
        return Reader(self.in_spec, same)

    @cached_property
    def _builder(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        fixed = ((False, o.value) if isinstance(o, Fixed) else (True, None) for o in self.outputs)
        return builder(self.out_spec, list(fixed))

    def without_graph(self) -> "Imported":
        """A copy without anything that holds weights: how calls are written, and the types of
        inputs."""
        graph = self.graph
        return replace(self, graph=graph.only((), graph.inputs, (), {}), outputs=())

    def single_tensor_call(self) -> bool:
        """Whether the module is called with one positional tensor and nothing else."""
        return self._only_tensors and len(self.inputs) == 1

    def read_call(self, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor] | None:
        """The tensors of a call that is written as the example is; None for any other call, and
        where objects among the arguments have to be taken apart."""
        if self._only_tensors and not kwargs and len(args) == len(self.inputs):
            return list(args) if all(isinstance(a, torch.Tensor) for a in args) else None
        return None if self.stateful else self._reader.tensors(tuple(args), kwargs)

    def flatten_call(self, args: Sequence[Any], kwargs: Any = None) -> list[torch.Tensor]:
        """The tensors of a call in the order of the graph's inputs.

        Keyword arguments and dict entries may come in any order. Raises BindError where the
        structure, or a value that is fixed in the graph, is not that of the example.
        """
        read = self.read_call(args, kwargs or {})
        if read is not None:
            return read
        call = (tuple(args), dict(kwargs or {}))
        leaves = self.ordered(opened(call)[0] if self.stateful else call)
        tensors = []
        for path, bound, given in zip(self.paths, self.inputs, leaves, strict=True):
            if isinstance(bound, Fixed):
                _check_fixed(path, bound.value, given)
            elif isinstance(given, torch.Tensor):
                tensors.append(given)
            else:
                wrong = f"{path} is {_shown(given)}, but was a tensor in the example"
                raise _misfit(path, wrong, f"give a tensor {self.graph.types[bound]}")
        return tensors

    def matched(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> list[torch.Tensor] | None:
        """The tensors of a flattened call that is written exactly as the example is; None for any
        other."""
        if spec != self.in_spec:
            return None
        pairs = list(zip(self.inputs, leaves, strict=True))
        fits = (
            _is_same(bound.value, given)
            if isinstance(bound, Fixed)
            else isinstance(given, torch.Tensor)
            for bound, given in pairs
        )
        return [given for bound, given in pairs if isinstance(bound, str)] if all(fits) else None

    def decided_otherwise(self, leaves: Sequence[Any]) -> bool:
        """Whether a flattened call differs from the example in nothing but sizes and the numbers
        that decide what is computed."""
        return all(
            isinstance(given, torch.Tensor)
            if isinstance(bound, str)
            else _is_alike(bound.value, given) or _is_same(bound.value, given)
            for bound, given in zip(self.inputs, leaves, strict=True)
        )

    def ordered(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """The leaves of a call in the example's order."""
        leaves, spec = pytree.tree_flatten(call)
        return leaves if spec == self.in_spec else self._by_path(call)

    def _by_path(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """The leaves of a call in the example's order, found by their paths."""
        found = dict(leaf_paths(call, self.parameters))
        asked, wanted = ", ".join(found) or "no arguments", f"call with {', '.join(self.paths)}"
        for path in self.paths:
            if path not in found:
                raise _misfit(path, f"{path} is missing", f"{wanted} as in the example", asked)
        for path, given in found.items():
            if path not in self.paths:
                asked = f"{path} = {_shown(given)}"
                raise _misfit(path, f"{path} was not in the example", f"{wanted} only", asked)
        return [found[path] for path in self.paths]

    def unflatten_result(self, results: Sequence[torch.Tensor], holders: Sequence[Any] = ()) -> Any:
        """What the module would have returned, made of the graph's outputs in order. ``holders``,
        the objects among the arguments, are changed to what they would hold after the call."""
        answer = self._builder(results)
        return closed(answer, holders) if self.stateful else answer


# An import traces its module by hooks that apply, meanwhile, to every module of the process. An
# import in another thread would take these for hooks of the user's.
_one_at_a_time = threading.RLock()


def import_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str = "",
    ours: Mapping[str, Entry] | None = None,
    deciding: frozenset[int] = frozenset(),
) -> Imported:
    """Trace ``module`` on an example call and return it as a graph.

    ``ours`` says how to write operators that are no ATen calls, by their names, as the ATen table
    does for those. ``deciding`` are the places of arguments whose numbers are fixed; the trace may
    find more of these.

    The module's training flag is respected; what would write to its buffers or inputs, or draw
    random numbers because of that flag, is refused. Raises GraphError where the module cannot be a
    graph, and DeuteronError with the module's own words where it refuses the example."""
    if not isinstance(args, tuple | list):
        raise BindError(f"args is {_shown(args)}, not a tuple", remedy="write (x,) for one input")
    name, entries = name or type(module).__name__, {**TABLE, **(ours or {})}
    call, holders = opened((tuple(args), dict(kwargs or {})))
    with _one_at_a_time:
        try:
            how = call, name, entries, deciding
            return _imported(Stateless(module) if holders else module, *how)
        except HoldsState:  # torch.export must not see the objects themselves
            return _imported(Stateless(module), *how)


def _imported(
    module: nn.Module,
    call: tuple[Any, Any],
    name: str,
    entries: Mapping[str, Entry],
    deciding: frozenset[int],
) -> Imported:
    parameters = positional(module)
    paths = tuple(path for path, _ in leaf_paths(call, parameters))
    leaves, in_spec = pytree.tree_flatten(call)
    importer = Importer(name, entries)
    refusals.check_module(module)
    refusals.check_call(module, call, paths)
    with _quiet(), refusals.no_chance_of_python():
        refusals.check_hooks(module, call)
        try:
            with refusals.chance_unread():
                traced = trace(module, *call, entries, deciding)
        except NeedsExport as reason:
            if not isinstance(reason, TooSlow):
                refusals.check_results(refusals.tried(module, call))
            refusals.refuse_export(module, reason, reason.line)
            traced = _export(module, call, entries, reason)
            importer.line = reason.line
    inputs = _bind_inputs(importer, traced, leaves, input_names(module, paths))
    importer.run(traced.graph.nodes)
    outputs = _bind_outputs(importer, traced)
    graph = importer.finish()
    opaque = tuple(dict.fromkeys(n.attrs["target"] for n in graph.nodes if n.op == "aten"))
    call_of = (graph, inputs, outputs, in_spec, traced.out_spec, paths, parameters)
    stateful = isinstance(module, Stateless) or traced.stateful
    return Imported(*call_of, opaque, importer.why, len(importer.mismatches), stateful)


# ---- torch.export --------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export's messages, and have attention written out in full."""
    before, fast = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    logging.disable(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        torch.backends.mha.set_fastpath_enabled(fast)


@refusals.unchecked
def _export(
    module: nn.Module, call: tuple[Any, Any], entries: Mapping[str, Entry], reason: NeedsExport
) -> Trace:
    """The module as functional ATen calls, composite ones such as conv2d kept whole unless forward
    takes gradients."""
    if isinstance(reason, TakesGradient):
        return _below_autograd(module, call, refusals.untraceable(module, reason, reason.line))
    before, refused = Attributes(module), None
    try:
        args, kwargs = _all_different(call)
        with gradients_told():
            program = torch.export.export(module, args, kwargs, strict=False)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        training = any(m.training for m in module.modules())
        if training or not all(is_plain(node.target, entries) for node in calls):
            # otherwise nothing is written in place: this costly step can be left out
            program = program.run_decompositions({})
    except Exception as error:
        refusals.check_results(refusals.tried(module, call))
        refused = refusals.untraceable(module, error, reason.line)
        refused.__cause__ = error
    finally:
        changed = before.changed(Proxy)
        before.restore()
    if refused is not None:
        return _below_autograd(module, call, refused)
    refusals.refuse_changes(changed)
    for node in calls:
        line = line_of(node) or source_of(node)
        if node.target is refusals.SETS_DATA and node.args[0] is not node.args[1]:
            refusals.refuse_data(line)
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        written = node.args[0] if writes and node.args else None
        if isinstance(written, fx.Node) and isinstance(written.meta["val"], torch.Tensor):
            refusals.refuse_shared(written.meta["val"], node.target, line)
    if training:
        _refuse_chance(module, program.graph)
    return _traced(program)


def _below_autograd(module: nn.Module, call: tuple[Any, Any], refused: DeuteronError) -> Trace:
    """Trace what torch.export cannot. Where this fails as well, raise ``refused``, which says why
    torch.export could not."""
    before = Attributes(module)
    try:
        traced = trace_below_autograd(module, *call)
    except Exception:
        raise refused from refused.__cause__
    finally:
        changed = before.changed(FakeTensor)
        before.restore()
    refusals.refuse_changes(changed)
    _refuse_chance(module, traced.graph)
    return traced


def _refuse_chance(module: nn.Module, graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            wrong = f"the module is in training mode, and {node.target} draws random numbers"
            where = source_of(node) or type(module).__name__
            raise GraphError(wrong, where=where, remedy="call model.eval() first")


def _all_different(call: Any) -> Any:
    """Copy a tensor that comes again: torch.export would take equal objects for one input."""
    seen: set[int] = set()

    def different(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.detach()

    return pytree.tree_map(different, call)


_WRITES = {
    OutputKind.BUFFER_MUTATION: "buffer",
    OutputKind.USER_INPUT_MUTATION: "input",
    getattr(OutputKind, "PARAMETER_MUTATION", None): "parameter",
}


def _traced(program: torch.export.ExportedProgram) -> Trace:
    """The calls and placeholders of a program; one that writes to something is refused."""
    for spec in program.graph_signature.output_specs:
        what = _WRITES.get(spec.kind)
        if what is None:
            continue
        weight = None if what == "input" else str(spec.target)
        raise refusals.writes_to(weight, str(spec.target), what)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs: list[fx.Node | None] = []
    weights, constants = {}, {}
    for given in program.graph_signature.input_specs:
        node, target = nodes[given.arg.name], str(given.target)
        tensor: Any = program.state_dict.get(target, program.constants.get(target))
        if given.kind == InputKind.USER_INPUT:
            inputs.append(node)
        elif given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            weights[target] = node, tensor
        elif given.kind == InputKind.CONSTANT_TENSOR:
            constants[target] = node, tensor
        else:
            wrong = f"the module holds {target!r}, an object that is no tensor"
            raise GraphError(wrong, remedy="keep it outside the imported module")
    assert program.call_spec.out_spec is not None
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    results = last.args[0]
    return Trace(program.graph, inputs, weights, results, program.call_spec.out_spec, constants)


def _bind_inputs(
    importer: Importer, traced: Trace, leaves: Sequence[Any], names: Sequence[str]
) -> tuple[str | Fixed, ...]:
    """Bind inputs first, so that they keep their names; then weights and constants."""
    inputs: list[str | Fixed] = []
    for node, leaf, name in zip(traced.inputs, leaves, names, strict=True):
        if node is not None and isinstance(leaf, torch.Tensor):
            inputs.append(importer.input(node, name, leaf))
            continue
        inputs.append(Fixed(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf))
        if node is not None:
            importer.bind(node, leaf)
    for target, (node, tensor) in traced.weights.items():
        importer.weight(node, identifier(target), tensor)
    for target, (node, tensor) in traced.constants.items():
        importer.bind(node, Known(tensor, identifier(target)))
    return tuple(inputs)


def _bind_outputs(importer: Importer, traced: Trace) -> tuple[str | Fixed, ...]:
    outputs: list[str | Fixed] = []
    for name, result in zip(result_names(traced.out_spec), traced.results, strict=True):
        value = importer.output(name, result) if isinstance(result, fx.Node) else result
        outputs.append(name if isinstance(value, Sym) else Fixed(value))
    return tuple(outputs)


# ---- values of a call


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_same(expected: Any, given: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return _is_alike(expected, given) and torch.equal(expected, given)
    if isinstance(expected, float | complex):  # nan is nan, and 0.0 is not -0.0
        return type(given) is type(expected) and repr(given) == repr(expected)
    return type(given) is type(expected) and bool(given is expected or given == expected)


def _is_alike(expected: Any, given: Any) -> bool:
    """Whether two tensors differ in nothing but shapes and numbers."""
    tensors = isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor)
    return tensors and (expected.dtype, expected.device) == (given.dtype, given.device)


def _check_fixed(path: str, expected: Any, given: Any) -> None:
    """Raise BindError unless a value that the graph was specialised to comes again, type
    included."""
    if _is_same(expected, given):
        return
    if isinstance(expected, torch.Tensor):
        wrong = f"{path} has not the numbers that the graph was made for, which decide what it is"
        raise _misfit(path, wrong, f"give {expected.tolist()}")
    wrong = f"{path} is {_shown(given)}, but the graph was made for {_shown(expected)}"
    raise _misfit(path, wrong, f"give {_shown(expected)}")


def _misfit(path: str, wrong: str, remedy: str, given: str = "") -> BindError:
    """The error for an argument that is not as it was in the example."""
    asked = f"a call with {given}" if given else "a call of an imported module"
    return BindError(wrong, asked=asked, where=path, remedy=f"{remedy}, or {_AGAIN}")
