"""Graphs as text: what ``print(graph)`` shows is what ``parse_graph`` reads back.

::

    graph block(%x: f16[32,64,56,56]@nhwc) {
      const %w: f16[64,64,3,3] = sha256:5f0c…
      %conv: f16[32,64,56,56]@nhwc = conv(%x, %w, _, stride=(1, 1))  # layer1.0.conv1
      return y=%conv
    }
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from deuteron.errors import FileError
from deuteron.ir.dtype import dtype
from deuteron.ir.graph import Attrs, Constant, Graph, Node
from deuteron.ir.types import TensorType

INLINE = 8  # constants of at most this many elements are written out


def print_graph(graph: Graph, values: bool = True) -> str:
    """The graph as text; without ``values``, the text does not depend on what constants hold."""
    ins = ", ".join(f"{_show(v)}: {graph.types[v]}" for v in graph.inputs)
    lines = [f"graph {json.dumps(graph.name)}({ins}) {{"]
    for value, const in graph.constants.items():
        held = f" = {_constant(const)}" if values else ""
        lines.append(f"  const {_show(value)}: {const.type}{held}")
    for node in graph.nodes:
        outs = ", ".join(f"{_show(v)}: {graph.types[v]}" for v in node.outputs)
        args = [_show(v) if v is not None else "_" for v in node.inputs]
        args += [f"{k}={literal(v)}" for k, v in node.attrs.items()]
        note = f"  # {' '.join(node.source.split())}" if node.source.strip() else ""
        lines.append(f"  {outs} = {node.op}({', '.join(args)}){note}")
    rets = ", ".join(f"{json.dumps(name)}={_show(value)}" for name, value in graph.outputs)
    return "\n".join([*lines, f"  return {rets}", "}"])


_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"%([A-Za-z0-9_.]+|{_QUOTED})"


def _show(value: str) -> str:
    """A value's name; one that is not a plain word is quoted."""
    return f"%{value}" if re.fullmatch(r"[A-Za-z0-9_.]+", value) else f"%{json.dumps(value)}"


def _unquoted(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _constant(const: Constant) -> str:
    if const.type.numel <= INLINE:
        plain = const.data.double() if const.type.dtype.is_float else in_pairs(const.data)
        return literal(_tuples(plain.tolist()))
    return f"sha256:{const.digest}"


def in_pairs(data: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which every file can hold."""
    return torch.view_as_real(data) if data.is_complex() else data


def _joined(data: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Undo :func:`in_pairs`: if the type is complex, join pairs of reals to complex numbers."""
    if type_.dtype.kind != "complex" or data.is_complex():
        return data
    try:
        return torch.view_as_complex(data.reshape(*type_.shape, 2).contiguous())
    except RuntimeError:
        raise FileError(f"a constant of {type_} is not in pairs of numbers") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def literal(value: Any) -> str:
    """A plain Python value as text: numbers, strings, booleans, None, tuples, inf and nan."""
    if isinstance(value, tuple | list):
        inner = ", ".join(literal(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return json.dumps(value) if isinstance(value, str) else repr(value)  # floats: nan, inf, -inf


def parse_literal(text: str) -> Any:
    """Read what :func:`literal` wrote. Nothing is evaluated: only literals are accepted."""
    try:
        return _from_ast(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FileError(f"not a literal: {text[:80]!r}") from None


def _from_ast(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # JSON writes a character beyond 16 bits as two halves, which Python does not join
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | None):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_from_ast(e) for e in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _from_ast(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    raise ValueError(ast.dump(node))


_TYPE = re.compile(r"([a-z0-9]+)\[([0-9,]*)\](?:@(nhwc)|\{([0-9,]*)\})?")
_VALUE = re.compile(rf"{_NAME}: (\S+)")
_RETURNED = re.compile(rf"({_QUOTED})={_NAME}")
_CALL = re.compile(r" = ([A-Za-z_0-9]+)\(")


@lru_cache(4096)  # a node that is a call of torch's own asks for its result types at every run
def parse_type(text: str) -> TensorType:
    match = _TYPE.fullmatch(text.strip())
    if match is None:
        raise FileError(f"not a tensor type: {text[:80]!r}", remedy="write e.g. f16[32,64]@nhwc")
    name, dims, layout, strides = match.groups()
    ints = [int(d) for d in dims.split(",") if d]
    if strides is not None:
        return TensorType.of(ints, dtype(name), strides=[int(s) for s in strides.split(",") if s])
    return TensorType.of(ints, dtype(name), layout or "contiguous")


def split_args(text: str) -> list[str]:
    """Split at commas that are outside parentheses, brackets, braces and quotes."""
    parts, begin = [], 0
    for i, depth in _unquoted_places(text):
        if text[i] == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    parts.append(text[begin:].strip())
    return [p for p in parts if p]


def _unquoted_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield every index outside quotes, and how many brackets are open after that character."""
    depth, quoted, skip = 0, False, False
    for i, c in enumerate(text):
        if skip:
            skip = False
        elif quoted:
            skip, quoted = c == "\\", c != '"'
        else:
            quoted = c == '"'
            depth += (c in "([{") - (c in ")]}")
            yield i, depth


def _split_call(body: str) -> tuple[str, str, str, str] | None:
    """The four parts of ``results = op(arguments)  # source``, or None if it is not that."""
    for i, _ in _unquoted_places(body):
        match = _CALL.match(body, i)
        if match is not None:
            for j, depth in _unquoted_places(body[match.end() - 1 :]):
                if depth == 0:
                    arguments, rest = body[match.end() :][: j - 1], body[match.end() + j :]
                    if rest and not rest.startswith("  # "):
                        return None
                    return body[:i], match[1], arguments, rest[4:]
            return None
    return None


def parse_graph(text: str, tensors: Mapping[str, torch.Tensor | Constant] | None = None) -> Graph:
    """Read a graph back. ``tensors`` supplies the constants that the text only names."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return _parse(lines, tensors or {})
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"graph text is damaged: {error}") from None


def _fail(number: int, line: str, wrong: str) -> FileError:
    return FileError(wrong, where=f"line {number}: {line.strip()[:120]!r}")


def _parse(lines: list[str], tensors: Mapping[str, torch.Tensor | Constant]) -> Graph:
    if not lines:
        raise FileError("graph text is empty")
    head = re.fullmatch(rf"graph ({_QUOTED})\((.*)\) {{", lines[0])
    if head is None or lines[-1].strip() != "}":
        raise _fail(1, lines[0], "graph text is cut short or does not start with 'graph'")
    types: dict[str, TensorType] = {}
    constants: dict[str, Constant] = {}
    nodes: list[Node] = []
    outputs: list[tuple[str, str]] | None = None

    def declare(piece: str, number: int, line: str) -> str:
        match = _VALUE.fullmatch(piece)
        if match is None:
            raise _fail(number, line, f"expected '%name: type', found {piece[:60]!r}")
        name = _unquoted(match[1])
        if name in types:
            raise _fail(number, line, f"value {name!r} is made twice")
        types[name] = parse_type(match[2])
        return name

    inputs = [declare(p, 1, lines[0]) for p in split_args(head[2])]
    for number, line in enumerate(lines[1:-1], 2):
        body = line.strip()
        if outputs is not None:
            raise _fail(number, line, "text after 'return'")
        if body.startswith("const "):
            left, equals, right = body[6:].rpartition(" = ")
            if not equals:
                raise _fail(number, line, "expected 'const %name: type = value'")
            name = declare(left, number, line)
            constants[name] = _read_constant(name, types[name], right, tensors)
            types[name] = constants[name].type
        elif body.startswith("return"):
            outputs = []
            for piece in split_args(body[6:]):
                match = _RETURNED.fullmatch(piece)
                if match is None:
                    raise _fail(number, line, f'expected "name"=%value, found {piece[:60]!r}')
                outputs.append((json.loads(match[1]), _unquoted(match[2])))
        else:
            parts = _split_call(body)
            if parts is None:
                raise _fail(number, line, "expected '%out: type = op(…)'")
            results, op, arguments, source = parts
            outs = tuple(declare(p, number, line) for p in split_args(results))
            ins: list[str | None] = []
            attrs: dict[str, Any] = {}
            for piece in split_args(arguments):
                key, equals, value = piece.partition("=")
                if piece == "_":
                    ins.append(None)
                elif piece.startswith("%"):
                    ins.append(_unquoted(piece[1:]))
                elif equals and key not in attrs:
                    attrs[key] = parse_literal(value)
                else:
                    raise _fail(number, line, f"expected name=value, found {piece[:60]!r}")
            nodes.append(Node(op, tuple(ins), outs, Attrs(attrs), source))
    if outputs is None:
        raise FileError("graph text is cut short: there is no 'return'")
    return Graph(json.loads(head[1]), tuple(inputs), tuple(outputs), tuple(nodes), types, constants)


def _read_constant(
    name: str, type_: TensorType, text: str, tensors: Mapping[str, torch.Tensor | Constant]
) -> Constant:
    if not type_.is_dense:
        raise FileError(f"constant {name!r} is {type_}: constants have no gaps in memory")
    if text.startswith("sha256:"):
        if name not in tensors:
            wrong = f"the tensor of constant {name!r} is not at hand"
            raise FileError(wrong, remedy="keep the .safetensors file beside the plan")
        given = tensors[name]
        const = given if isinstance(given, Constant) else Constant(_joined(given, type_))
        if (const.type.shape, const.type.dtype) != (type_.shape, type_.dtype):
            raise FileError(f"constant {name!r} is {const.type}, the graph says {type_}")
        if const.digest != text[7:]:
            wrong = f"the tensor of constant {name!r} is not the one the graph was made with"
            remedy = "restore the .safetensors file that was saved with this plan"
            raise FileError(wrong, remedy=remedy)
        if const.type.strides != type_.strides:
            const = Constant(restride(const.data, type_))
        return const
    try:
        dt = type_.dtype.torch
        data = torch.tensor(parse_literal(text), dtype=dt.to_real() if dt.is_complex else dt)
        data = _joined(data, type_).reshape(type_.shape)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise FileError(f"constant {name!r}: {text[:60]!r} is not a value of {type_}") from None
    return Constant(restride(data, type_))


def restride(data: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """The same values laid out with the strides of ``type_``."""
    if tuple(data.stride()) == type_.strides:
        return data
    out = torch.empty_strided(type_.shape, type_.strides, dtype=data.dtype, device=data.device)
    return out.copy_(data)
