"""Blocks of a network in which a norm, a sum and an activation follow each other: the author's
forward, with one call in place of these.

``torch.fx`` reads the forward of a block, with each child as a single call. Only a forward that
does nothing but call children and functions of torch is taken, so that nothing else it does can be
lost.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import Attribute

from deuteron.functional.context import is_captured, is_differentiated
from deuteron.functional.delegate import may_delegate
from deuteron.nn.authors import BEFORE, COUNT, ENOUGH, counted, ours_from
from deuteron.nn.folded import CONVS, folded, folds
from deuteron.nn.norm import fusing
from deuteron.nn.parts import Part, as_found, asked_for_authors
from deuteron.nn.probe import twin_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
AFTER_SUM = NORMS[:3]  # norms whose fused call adds a residual after the norm
# activations as modules whose arguments do not matter, and below as functions
MODULES: dict[type, str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.ReLU6: "relu6",
}
FUNCTIONS = {F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.hardswish: "hardswish"}
SUMS = (operator.add, torch.add)
STORES = frozenset(op for op in dis.opmap if op.startswith(("STORE_", "DELETE_", "IMPORT_")))
HARMLESS = frozenset({"STORE_FAST", "DELETE_FAST"})
# comparing by "is", which a symbol answers otherwise than a tensor; and "with" and "try"
HARMFUL = (STORES - HARMLESS) | {"IS_OP", "PUSH_EXC_INFO"}
# how names of functions begin that ask or set something besides a tensor
SETTINGS = ("is_", "are_", "get_", "set_", "has_", "use_", "seed", "manual_seed", "initial_seed")


class Site(NamedTuple):
    """A place in a forward where one call replaces several: the name of the norm; whether something
    is added to it (``adds``); the activation that follows, by its name as a function, and the name
    of the child that does it, if a child does; and the convolution before the norm, if nothing else
    reads its result."""

    norm: str
    adds: bool
    activation: str | None
    child: str | None
    conv: str | None = None


class BlockHow(NamedTuple):
    """How a block is run: the places where calls are joined; the names of the children that the
    forward was read with; names and classes of the activations that the joined calls do themselves;
    ``code``, the rewritten forward, which tells blocks of one class apart in which the author's
    forward does different things; ``needs``, how many arguments a call must have for it, none of
    them None; and ``absent``, the names of attributes that were None."""

    sites: tuple[Site, ...]
    children: tuple[str, ...]
    inside: tuple[tuple[str, type], ...]
    code: str = ""
    needs: int = 0
    absent: tuple[str, ...] = ()


class Block(Part, nn.Module):
    """The author's forward, in which norms do what follows them as well. In training, the author's
    own forward runs after :data:`ENOUGH` calls in which all norms were too small for that."""

    _how: ClassVar[BlockHow]
    _read: ClassVar[Any] = None  # the rewritten forward, shared by all modules of the class

    @staticmethod
    def words(how: BlockHow) -> str:
        every = {
            ("convolution" if s.conv else "", "norm", "sum" if s.adds else "", s.activation or "")
            for s in how.sites
        }
        return "one call for " + ", ".join(sorted(" + ".join(filter(None, s)) for s in every))

    def forward(self, *args: Any, **named: Any) -> Any:
        own = self.__dict__
        if self.training and own.get(COUNT, 0) >= ENOUGH:
            return super().forward(*args, **named)
        kind, how = type(self), self._how
        there = own["_modules"]
        names = tuple(there)
        if None in there.values():
            names = tuple([name for name, child in there.items() if child is not None])
        known = names == how.children and not asked_for_authors(args[0] if args else None)
        given = (*args, *named.values())  # the forward was read with a tensor for each argument
        known = known and len(given) >= how.needs and all(each is not None for each in given)
        known = known and all(own.get(name) is None for name in how.absent)
        if not known or not as_found(self, how.inside):
            return super().forward(*args, **named)
        if kind._read is None:  # the module was loaded from a file
            if is_compiling():
                return super().forward(*args, **named)
            self.read()
        found = kind._read(self, *args, **named)
        if self.training and not is_compiling():
            own[COUNT] = count = own.get(COUNT, 0) + 1
            if count >= ENOUGH:
                small = [vars(there[site.norm]).get(COUNT, 0) > 0 for site in how.sites]
                own[COUNT] = count if all(small) else 0
        return found

    def read(self) -> None:
        """Rewrite the forward, once for all modules of the class."""
        kind = type(self)
        if kind._read is None:
            kind._read = staticmethod(_compiled(_rewritten(self, kind._recipe[1])[0]))


def _compiled(graph: Graph) -> Any:
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<block>", "exec"), scope)
    return scope["forward"]


def conv_and_more(
    conv: Any,
    norm: Any,
    x: Tensor,
    other: Any,
    activation: str | None,
    then: nn.Module | None,
    writes: bool = False,
) -> Tensor:
    """Return activation(norm(conv(x)) + other); in evaluation the norm is folded into the weight of
    the convolution where that saves something."""
    if not norm.training and folds(conv, norm, x, other):
        return folded(conv, norm, x, activation, other)
    return norm_and_more(norm, conv(x), other, activation, then, writes)


def norm_and_more(
    norm: Any,
    x: Tensor,
    other: Any,
    activation: str | None,
    then: nn.Module | None,
    writes: bool = False,
) -> Tensor:
    """Return activation(norm(x) + other): by one call if no hooks watch the norm and it is large
    enough, else as the author has it. ``writes``: the author adds in place."""
    y: Tensor
    kind = fusing(norm)
    if kind is None or (other is not None and not _fits(norm, other, x)):
        y = norm(x)
    elif theirs := _torchs_to_train(norm, kind, x, (other is not None) + (activation is not None)):
        y = theirs.forward(norm, x)
    else:
        around = {} if other is None else {"residual": other}
        y = kind.fused(norm, x, activation, **around)
        return y
    if other is not None:
        y = in_place("iadd", y, other) if writes else y + other
    if then is not None:
        y = then(y)
        return y
    return y if activation is None else getattr(F, activation)(y)


def _fits(norm: Any, other: Any, x: Tensor) -> bool:
    """Whether a norm's fused call adds ``other`` after it, as it is."""
    alike = isinstance(other, Tensor) and other.shape == x.shape and other.dtype == x.dtype
    return alike and isinstance(norm, AFTER_SUM)


def _torchs_to_train(norm: Any, kind: Any, x: Tensor, more: int) -> Any:
    """Return the norm's own class, by which it is trained if that and ``more`` calls of torch's
    take less on a GPU than one of ours. None where they do not, and for a norm that was made as
    ours."""
    before = vars(norm).get(BEFORE, type(norm))
    if before is kind or not x.is_cuda or not is_differentiated(x) or not may_delegate():
        return None
    least = ours_from(kind._runs, x.get_device(), more, True)  # in a model
    small = x.nbytes <= least and not is_captured(x)
    if not is_compiling():
        counted(norm, small)
    return before if small else None


class _Reader(Tracer):
    """Reads a forward with each child as a single call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: Node) -> Proxy:
        return _Symbol(node, self)


def in_place(operation: str, x: Any, other: Any) -> Any:
    """Do what the operator of this name does: ``x += other`` for "iadd"."""
    return getattr(operator, operation)(x, other)


class _Writing:
    """A symbol of ``torch.fx`` that knows ``x += other`` from ``x + other``."""


def _writes(operation: str) -> Any:
    def write(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", in_place, (operation, self, other), {})

    return write


for _name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(_Writing, f"__i{_name}__", _writes(f"i{_name}"))


class _Symbol(_Writing, Proxy):
    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)


class _Attribute(_Writing, Attribute): ...


def block(module: nn.Module) -> BlockHow | None:
    """Return how a module is run with fewer calls, or None if it is no such block."""
    children = {name: m for name, m in module._modules.items() if m is not None}
    norms = [name for name, m in children.items() if type(m) in NORMS]
    if not norms or module._parameters or module._buffers:
        return None
    try:
        if not _is_plain(module):
            return None
        graph, sites = _rewritten(module, type(module))
    except Exception:  # whatever a forward may raise when it is given symbols
        return None
    calls = (conv_and_more, norm_and_more)
    made = (n.args for n in graph.nodes if n.op == "call_function" and n.target in calls)
    own = {a for args in made for a in args if isinstance(a, Node)}
    if not sites or any(n.op == "get_attr" and n not in own for n in graph.nodes):
        return None  # the second condition: the forward reads a tensor that tracing made
    inside = {s.child: type(children[s.child]) for s in sites if s.child is not None}
    code = graph.python_code("self").src
    known = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needs = len(known) if any(p.default is None for p in known) else 0
    absent = tuple(name for name in _absent(module) if name not in vars(nn.Module()))
    return BlockHow(tuple(sites), tuple(children), tuple(inside.items()), code, needs, absent)


def _rewritten(module: nn.Module, author: type[nn.Module]) -> tuple[Graph, list[Site]]:
    """Return the author's forward with one call for each norm and what follows it, and the places
    of these calls."""
    plain = twin_of(module)
    plain.__class__ = author
    graph = _Reader().trace(plain)
    children = {name: m for name, m in module._modules.items() if m is not None}
    kinds = {name: vars(m).get(BEFORE, type(m)) for name, m in children.items()}
    nodes = list(graph.nodes)
    return graph, [site for node in nodes for site in _site(graph, node, kinds, module)]


def _absent(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if value is None]


def _is_plain(module: nn.Module) -> bool:
    """Whether the forward only calls children and functions of torch, and stores nothing."""
    # A child that is left out is an attribute that is None; where it is there, it is a child.
    own = {*module._modules, *_absent(module)}
    forward = type(module).forward
    return forward is nn.Sequential.forward or _is_harmless(forward, own, module)


def _is_harmless(function: Any, own: set[str], module: nn.Module) -> bool:
    """Whether a function, with the methods it calls, does nothing that rewriting could lose, and
    reads nothing of the module but ``own`` and methods."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    code = function.__code__
    harmful = {i.opname for i in dis.get_instructions(code)} & HARMFUL
    if harmful or any(isinstance(c, types.CodeType) for c in code.co_consts):
        return False
    for name in {*code.co_names} - own:
        method = getattr(type(module), name, None)
        if method is not getattr(nn.Module, name, None):  # the author's, whatever torch has
            known = _is_harmless(method, own, module)
        else:
            known = _is_torchs(name, function.__globals__)
        if name in vars(module) or not known:
            return False
    return True


def _is_torchs(name: str, known: dict[str, Any]) -> bool:
    """Whether a name in a forward is torch's: a module, a function, or a method of a tensor."""
    if name.startswith(SETTINGS) and not hasattr(Tensor, name):
        return False
    if name not in known:
        return hasattr(Tensor, name) or hasattr(F, name) or hasattr(torch, name)
    value = known[name]
    at = "__name__" if isinstance(value, types.ModuleType) else "__module__"
    return (getattr(value, at, None) or "").split(".")[0] == "torch"


def _site(graph: Graph, node: Node, kinds: dict[str, type], module: nn.Module) -> Iterator[Site]:
    """If ``node`` is a norm, replace it and what follows it by one call, and yield its site."""
    kind = kinds.get(str(node.target)) if node.op == "call_module" else None
    if kind not in NORMS or len(node.args) != 1 or node.kwargs:
        return
    taken, other = [node], None
    after = _only_user(node)
    if after is not None and kind in AFTER_SUM and _is_sum(after, node):
        others = [a for a in after.args if isinstance(a, Node) and a is not node]
        if others:
            other = others[0]
            taken.append(after)
            after = _only_user(after)
    name, child = (None, None) if after is None else _activation(after, taken[-1], kinds)
    if name is not None and after is not None:
        taken.append(after)
    before = _convolution(node, kinds)
    if len(taken) == 1 and before is None:
        return
    if _is_disturbed([*([] if before is None else [before]), *taken], module):
        return
    with graph.inserting_before(taken[-1]):
        norm = graph.create_node("get_attr", str(node.target))
        then = None if child is None else graph.create_node("get_attr", child)
        rest = (other, name, then, other is not None and taken[1].target is in_place)
        if before is None:
            made = graph.call_function(norm_and_more, (norm, node.args[0], *rest))
        else:
            conv = graph.create_node("get_attr", str(before.target))
            made = graph.call_function(conv_and_more, (conv, norm, before.args[0], *rest))
            taken.insert(0, before)
    taken[-1].replace_all_uses_with(made)
    for gone in reversed(taken):
        graph.erase_node(gone)
    first = None if before is None else str(before.target)
    yield Site(str(node.target), other is not None, name, child, first)


def _is_disturbed(taken: list[Node], module: nn.Module) -> bool:
    """Whether something between nodes that are to be joined writes to what they read."""
    reads = [each for node in taken for each in node.all_input_nodes if each not in taken]
    memory, node = _memory(reads), taken[0]
    while node is not taken[-1]:
        if node not in taken and _writes_to(node, module) & memory:
            return True
        node = node.next
    return False


def _writes_to(node: Node, module: nn.Module) -> set[Node]:
    """Return the nodes in whose memory a node may write."""
    if node.op == "call_module":
        child: Any = module.get_submodule(str(node.target))
        while isinstance(child, nn.Sequential) and len(child):
            child = child[0]  # only the first one is given what the sequence is given
        writes = getattr(child, "inplace", False)
    else:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        named = node.kwargs.get("inplace") or "out" in node.kwargs or True in node.args
        writes = node.target is in_place or bool(named) or name.strip("_") + "_" == name
    return _memory(node.all_input_nodes) if writes else set()


def _memory(nodes: list[Node]) -> set[Node]:
    """Return all nodes in whose memory values of these nodes may lie, such as views of them."""
    left, found = [*nodes], set[Node]()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            made = node.target in (conv_and_more, norm_and_more)
            left += [] if made or node.op == "call_module" else node.all_input_nodes
    return found


def _convolution(node: Node, kinds: dict[str, type]) -> Node | None:
    """Return the convolution that a batch norm reads, if nothing else reads it."""
    before = node.args[0]
    if not isinstance(before, Node) or before.op != "call_module" or len(before.users) != 1:
        return None
    known = kinds.get(str(before.target)) in CONVS and kinds.get(str(node.target)) in AFTER_SUM
    return before if known and len(before.args) == 1 and not before.kwargs else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum(node: Node, of: Node) -> bool:
    """Whether a node is the sum of ``of`` and something else, and writes to nothing else."""
    if node.op != "call_function" or node.kwargs:
        return False
    if node.target is in_place:
        return node.args[:2] == ("iadd", of)
    return node.target in SUMS and len(node.args) == 2


def _activation(node: Node, of: Node, kinds: dict[str, type]) -> tuple[str | None, str | None]:
    """Return the name of the activation that a node is, and the name of the child that does it."""
    if node.args[:1] != (of,):
        return None, None
    if node.op == "call_module":
        target = str(node.target)
        name = MODULES.get(kinds.get(target, object))
        return name, target if name else None
    plain = len(node.args) == 1 and set(node.kwargs) <= {"inplace"}
    if node.op == "call_function" and plain:
        return FUNCTIONS.get(node.target), None  # type: ignore[arg-type]
    return ("relu" if node.op == "call_method" and node.target == "relu" else None), None
