"""What a user allows: everything that may change numbers or memory, in one frozen record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from fnmatch import fnmatchcase
from typing import Any

from deuteron.errors import GraphError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FLOAT32 = ("ieee", "tf32x3", "tf32")  # ways to multiply float32, the most exact first
WORDS = {  # the values that fields of type str may have
    "layout": ("auto", "nhwc", "keep"),
    "shapes": ("any", "fixed"),
    "random": ("torch", "seeded"),
    "float32": FLOAT32,
    "nan": ("propagate", "drop"),
}


def parse_bytes(size: int | str) -> int:
    """``"256MB"`` → 256000000; plain integers are bytes."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise GraphError(f"a size of {size} bytes is negative", remedy="use 0 or more")
        return size
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        remedy = "write e.g. '256MB', '1GiB' or a number of bytes"
        raise GraphError(f"{size!r} is not a size", remedy=remedy)
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class Policy:
    """Limits a plan must keep.

    * ``deterministic``: the same input gives the same bits in every run.
    * ``max_error``: largest error against float64, relative to the largest value of the
      result, that a candidate may show; it is measured, so a limit turns ``find`` on.
      None: at most twice PyTorch's own, checked wherever ``find`` measures.
    * ``max_workspace``: largest scratch memory of one region, e.g. ``"256MB"``. None: no limit.
    * ``max_packed``: most memory for weights in other forms (packed, transposed, transformed) that
      kernels read instead of the originals, over all plans of a model. None: no limit.
    * ``memory``: most memory that the forward half of a training step may keep for the backward
      half; what is not kept is computed again, as far as that saves memory. None: what is quickest,
      except that on a GPU a small share of the time is given up for memory (docs/training.md).
    * ``float32``: how float32 is multiplied on a GPU: "ieee" (rounded as float32 is), "tf32x3" (may
      run on tensor cores: each number is split into a sum of two with 10-bit mantissas, and the
      error of a product stays below 2⁻¹⁸), or "tf32" (each number is replaced by one with a 10-bit
      mantissa, with an error near 10⁻³).
    * ``layout``: "auto" (convolutions use nhwc where that is known to be faster), "nhwc" (those of
      volumes on a GPU as well; our own kernels for them read no other order) or "keep".
    * ``cuda_graph``: replay the whole plan as one CUDA Graph. None: only where that is quicker than
      launching its kernels one by one, since a graph's inputs and results have to be copied.
    * ``shapes``: "any" (an optimised module plans a new size when it first comes) or "fixed" (it
      takes the sizes of its examples and no others).
    * ``max_plans``: how many sizes an optimised module keeps plans for; the least recently used
      is dropped first.
    * ``random``: "torch" (a training step draws the numbers that torch would draw) or "seeded"
      (dropout draws from the position of an element and a seed from torch's generator: the numbers
      differ from torch's, but no mask is stored, and dropout fuses with the nodes around it).
    * ``nan``: "propagate" (as in torch, ReLU, clamp and max pooling give nan where they read it) or
      "drop" (as in cuDNN when told not to propagate it: ReLU turns nan into 0, a clamp into its
      lower bound, and a maximum ignores it; a window of nothing but nan gives −inf).
    * ``engines``: which engines may run a region: their names, ``("torch", "vendor_fused")``, or
      one kind of their kernels, ``"triton_kernels/conv"``, as an explanation lists them; with a
      minus, all but these: ``"-triton_kernels"``. ``"layer1.*: torch"`` applies only to nodes that
      come from that place in the model, as an explanation shows it, or whose result has that name;
      such an entry takes precedence over those for all nodes. None: whichever is quickest.
    """

    deterministic: bool = False
    max_error: float | None = None
    max_workspace: int | str | None = None
    float32: str = "ieee"
    layout: str = "auto"
    cuda_graph: bool | None = None
    max_packed: int | str | None = None
    shapes: str = "any"
    max_plans: int = 256
    memory: int | str | None = None
    engines: str | Sequence[str] | None = None
    random: str = "torch"
    nan: str = "propagate"

    def __post_init__(self) -> None:
        try:
            self._check()
        except GraphError as error:
            error.asked = error.asked or "Policy(…)"
            raise

    def _check(self) -> None:
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                wrong = f"{name}={getattr(self, name)!r} is not known"
                raise GraphError(wrong, remedy=f"use {' or '.join(map(repr, known))}")
        if type(self.max_plans) is not int or self.max_plans < 1:
            wrong = f"max_plans={self.max_plans!r} must be a whole number from 1 on"
            raise GraphError(wrong, remedy="use 1 or more, such as the usual 256")
        for name in ("deterministic", "cuda_graph"):
            unsure = name == "cuda_graph" and self.cuda_graph is None
            if not unsure and not isinstance(getattr(self, name), bool):
                wrong = f"{name}={getattr(self, name)!r} must be True or False"
                raise GraphError(wrong, remedy="use one of them, without quotes")
        limit = self.max_error
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            wrong = f"max_error={limit!r} must be a positive number or None"
            raise GraphError(wrong, remedy="use 1e-3, say")
        for name in ("max_workspace", "max_packed", "memory"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_bytes(size))
        given = self.engines
        given = (given,) if given is not None and not isinstance(given, list | tuple) else given
        if given is not None:
            if not given or not all(isinstance(n, str) and n.strip("-") for n in given):
                remedy = "name engines, or kernels of one: 'torch', '-triton_kernels/conv'"
                raise GraphError(f"engines={self.engines!r} are no names", remedy=remedy)
            object.__setattr__(self, "engines", tuple(given))

    @property
    def by_place(self) -> list[tuple[str, str]]:
        """Entries of ``engines`` as pairs: the pattern of the nodes that an entry is for, "" for
        all nodes, and the name of the engine."""
        parts = (name.rpartition(": ") for name in self.engines or ())
        return [(pattern.strip(), name.strip()) for pattern, _, name in parts]

    def names_for(self, *places: str) -> tuple[str, ...]:
        """The engine names that ``engines`` gives for a node, which has the names ``places``."""
        pairs = ((p, name) for p, name in self.by_place if p)
        return tuple(name for p, name in pairs if any(fnmatchcase(at, p) for at in places))

    def allows(self, engine: str, kernel: str | None = None, own: Sequence[str] = ()) -> bool:
        """Whether an engine may run a region by one kind of its kernels or, if ``kernel`` is None,
        by any. ``own``: entries for the region's own nodes; if they name engines to use, the
        entries for all nodes do not count."""
        fixed = any(not name.startswith("-") for name in own)
        general = () if fixed else [name for pattern, name in self.by_place if not pattern]
        names, given = {engine, f"{engine}/{kernel}"}, (*general, *own)
        if kernel is None:
            names |= {n for n in given if n.startswith(f"{engine}/")}
        only = {n for n in given if not n.startswith("-")}
        left_out = not names.isdisjoint(n[1:] for n in given if n.startswith("-"))
        return not left_out and (not only or not names.isdisjoint(only))

    @property
    def allow_tf32(self) -> bool:
        """Whether a float32 may be cut to a 10-bit mantissa before it is multiplied."""
        return self.float32 == "tf32"

    @property
    def workspace_limit(self) -> float:
        return float("inf") if self.max_workspace is None else float(self.max_workspace)

    @property
    def packed_limit(self) -> float:
        return float("inf") if self.max_packed is None else float(self.max_packed)

    @property
    def memory_limit(self) -> float | None:
        return None if self.memory is None else float(self.memory)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Policy:
        try:
            return Policy(**fields)
        except TypeError:
            known = ", ".join(f.name for f in dataclass_fields(Policy))
            raise GraphError(f"not a policy: {fields!r}", remedy=f"its fields: {known}") from None
