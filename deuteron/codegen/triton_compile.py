"""The one way a Triton function is compiled, with what Triton 3.6 and its assembler get wrong
mended.

Fences. Matrix units of Hopper (``wgmma``) read shared memory by a way of their own, the async
proxy, which sees what ``cp.async`` wrote only after ``fence.proxy.async``. Triton puts none between
the two (triton-lang/triton#9610 does, from 3.7.1 on): now and then a product is made of what was
there before. So every thread that has waited for its copies makes them known by a fence.

The ptxas of CUDA 12.8 and 12.9, which Triton brings along, is wrong in two places:

Packed additions. On Hopper LLVM packs two 16-bit additions into ``add.s16x2``, for indices of small
ranges among others. ptxas drops the constant of some of them (``VIADD.16x2 R2, R2, 0x0``) at every
optimisation level above 0: numbers are stored at wrong addresses. So such an addition reaches it as
two plain ones.

Comparisons. ptxas knows that ``|x|`` and ``2^x`` are not negative, and what follows for their sums,
products and choices. With that it takes ``|x| >= -1`` for true, and forgets nan, for which it is
false. It does not do so for the opposite: so where ranges are known, a comparison that is false for
nan reaches it as the opposite of one that is true for nan, which costs no instruction.
"""

import hashlib
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deuteron.errors import EngineError
from deuteron.files import cache_dir, write_atomic

PACKED = re.compile(r"\badd\.[su]16x2\s+(%\w+), (%\w+), (%\w+);")
TWO = (
    "{{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {{%al, %ah}}, {1}; mov.b32 {{%bl, %bh}}, {2}; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 {0}, {{%al, %ah}}; }}"
)
COPIED = re.compile(r"(?m)^(\s*)(cp\.async\.wait_(?:group\s+\d+|all);)(?!\s*fence\.proxy\.async)")
FENCED = r"\1\2\n\1fence.proxy.async.shared::cta;"
RANGED = re.compile(r"\b(?:abs(?:\.ftz)?\.f32|ex2\.approx\b|\w+(?:\.\w+)*\.sat\.)")
COMPARED = re.compile(r"(?m)^(\s*)setp\.(ge|gt|le|lt)\.f32\s+(%\w+), ([^,;\s]+), ([^,;\s]+);")
OPPOSITE = {"ge": "ltu", "gt": "leu", "le": "gtu", "lt": "geu"}
SINGLE = re.compile(r"0f([0-9A-F]{8})")
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s+([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"%\w+")


# A GPU that is not here, for which kernels are compiled into Triton's cache and never launched
elsewhere: Any = None


def compile_triton(source: Any, options: Mapping[str, Any], target: Any = None) -> Any:
    """``source``, an ASTSource, compiled for ``target``, a GPU that need not be there, or for the
    current one."""
    import triton

    target = target or elsewhere or _here()
    try:
        with _mending():
            kernel = triton.compile(source, target=target, options=dict(options))
    except RuntimeError as failure:  # of a pass, after it has printed the program it failed at
        wrong = f"triton {triton.__version__} cannot compile this kernel: {failure}"
        remedy = "report it to Triton with what it printed; other sizes may do"
        raise EngineError(wrong, asked=f"compile {source.name}", remedy=remedy) from failure
    ptx = _ptx(kernel)
    right = mended(ptx)
    if right == ptx:
        return kernel  # else it is out of a cache that others filled
    with _file(right) as path:
        kernel = triton.compile(source, target=target, options={**options, "ir_override": path})
    if mended(_ptx(kernel)) != _ptx(kernel):
        wrong = "a fence, a packed 16-bit addition or a comparison of this kernel is wrong, and"
        wrong += f" triton {triton.__version__} does not let its PTX be replaced"
        asked = f"compile {kernel.name} for sm_{kernel.metadata.target.arch}"
        remedy = "use triton 3.6, whose option ir_override does"
        raise EngineError(wrong, asked=asked, remedy=remedy)
    return kernel


_ours = threading.local()  # whether a thread compiles a kernel of ours


@contextmanager
def _mending() -> Iterator[None]:
    """What this thread compiles is mended on the way to the assembler, which need not run twice."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook
    if not getattr(before, "ours", False):

        def stages_of(backend: Any = None, stages: Any = None, *how: Any) -> Any:
            if stages is None:  # later versions ask so what to add to the key of a kernel
                return before() if before is not None else ("", "")
            if before is not None:
                before(backend, stages, *how)
            if getattr(_ours, "now", False):
                make = stages["ptx"]
                stages["ptx"] = lambda *given: mended(make(*given))
            return None

        stages_of.ours = True  # type: ignore[attr-defined]
        knobs.runtime.add_stages_inspection_hook = stages_of
    _ours.now = True
    try:
        yield
    finally:
        _ours.now = False


def _here() -> Any:
    """The current GPU, without Triton's own driver, which a C compiler would have to write."""
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, 32)


def mended(ptx: str) -> str:
    """PTX that ptxas gets right, and whose matrix units read what was copied."""
    if "wgmma.mma_async" in ptx:
        ptx = COPIED.sub(FENCED, ptx)
    if "16x2" in ptx:
        ptx = PACKED.sub(lambda found: TWO.format(*found.groups()), ptx)
    return turned(ptx) if RANGED.search(ptx) else ptx


def turned(ptx: str) -> str:
    """PTX in which comparisons of numbers with a known range are the opposite of others."""
    direct, known = _ranged(ptx)

    def turn(found: re.Match[str]) -> str:
        space, how, p, a, b = found.groups()
        if a in direct and (number := SINGLE.fullmatch(b)):
            least = int(number[1], 16)  # |x| may be less than a positive number, or more, or 0
            if how in ("lt", "le") or 0 < least < 1 << 31 or (how, least) == ("gt", 0):
                return found[0]
        if a not in known and b not in known:
            return found[0]
        return f"{space}setp.{OPPOSITE[how]}.f32 {p}, {a}, {b}; not.pred {p}, {p};"

    return COMPARED.sub(turn, ptx)


def _ranged(ptx: str) -> tuple[set[str], set[str]]:
    """Registers that hold |x| or 2^x and nothing else, and all that ptxas may know the range of."""
    made = [(op, *_operands(rest)) for op, rest in INSTRUCTION.findall(ptx)]
    first = {r for op, to, _ in made if RANGED.match(op) for r in to}
    known, before = set(first), 0
    while len(known) > before:  # until what comes back at the head of a loop is known too
        before = len(known)
        known.update(r for _, to, of in made if not known.isdisjoint(of) for r in to)
    other = {r for op, to, _ in made if not RANGED.match(op) for r in to}
    return first - other, known


def _operands(text: str) -> tuple[list[str], list[str]]:
    """Registers that an instruction writes, and all others."""
    to, _, of = text.partition("}" if text.startswith("{") else ",")
    return REGISTER.findall(to), REGISTER.findall(of)


def _ptx(kernel: Any) -> str:
    if "ptx" not in kernel.asm:
        wrong = "Triton kept only the binary of this kernel, so that it cannot be checked"
        asked = f"compile {kernel.name} for sm_{kernel.metadata.target.arch}"
        remedy = "unset TRITON_STORE_BINARY_ONLY and empty Triton's cache"
        raise EngineError(wrong, asked=asked, remedy=remedy)
    return str(kernel.asm["ptx"])


@contextmanager
def _file(ptx: str) -> Iterator[str]:
    """A file with this text. Its name is part of the key under which Triton keeps the binary, so
    it says what is in it; in a read-only home it costs one compilation per process."""
    name = hashlib.sha256(ptx.encode()).hexdigest()[:32] + ".ptx"
    path = cache_dir() / "ptx" / name
    try:
        write_atomic(path, ptx)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="deuteron-") as own:
            path = Path(own) / name
            path.write_text(ptx)
            yield str(path)
    else:
        yield str(path)
