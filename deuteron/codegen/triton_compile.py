"""The only place where Triton functions are compiled; it corrects what Triton 3.6 and its assembler
get wrong.

Fences. Matrix units of Hopper (``wgmma``) read shared memory on a path of their own, the async
proxy, which sees what ``cp.async`` wrote only after ``fence.proxy.async``. Triton puts none between
the two (triton-lang/triton#9610 does, from 3.7.1 on): now and then a product is made of what was
there before. So every thread that has waited for its copies executes such a fence.

The ptxas of CUDA 12.8 and 12.9, which Triton brings along, is wrong in three places:

Sums of matrix units. Behind a loop of products (``wgmma``) that may run zero times two paths of the
program meet, and there Triton waits for the last product. If ptxas unrolls such a loop, it reads
the sums before that wait: columns of a result lack the last products. So the exit of the loop waits
too.

Packed additions. On Hopper LLVM packs two 16-bit additions into ``add.s16x2``, for indices of small
ranges among others. ptxas drops the constant of some of them (``VIADD.16x2 R2, R2, 0x0``) at every
optimisation level above 0: numbers are stored at wrong addresses. So such an addition is split into
two plain ones.

Comparisons. ptxas knows that ``|x|`` and ``2^x`` are not negative, and what follows for their sums,
products and choices. With that it takes ``|x| >= -1`` for true, and forgets nan, for which it is
false. It makes no such mistake with the opposite: so where ranges are known, a comparison that is
false for nan is passed to it as the negation of one that is true for nan, which costs no
instruction.

All corrections are made between LLVM and ptxas, so that a kernel is compiled once. A mark at the
end of the PTX tells whoever finds it in Triton's cache later that it is corrected.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deuteron.errors import EngineError

PACKED = re.compile(r"\badd\.[su]16x2\s+(%\w+), (%\w+), (%\w+);")
TWO = (
    "{{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {{%al, %ah}}, {1}; mov.b32 {{%bl, %bh}}, {2}; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 {0}, {{%al, %ah}}; }}"
)
COPIED = re.compile(r"(?m)^(\s*)(cp\.async\.wait_(?:group\s+\d+|all);)(?!\s*fence\.proxy\.async)")
FENCED = r"\1\2\n\1fence.proxy.async.shared::cta;"
BACK = re.compile(r"(?m)^\s*@!?%\w+ bra(?:\.uni)?\s+(\$\w+);")
LABEL = re.compile(r"(?m)^(\$\w+):")
WAIT = "wgmma.wait_group.sync.aligned 0;"
PRODUCT = re.compile(r"wgmma\.(?:mma_async|wait_group)[^;]*;")
MARK = f"\n// mended by {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}\n"
RANGES = ("abs.", "ex2.approx", ".sat.")  # a text that RANGED matches has one of these in it
RANGED = re.compile(r"\b(?:abs(?:\.ftz)?\.f32|ex2\.approx\b|\w+(?:\.\w+)*\.sat\.)")
COMPARED = re.compile(r"(?m)^(\s*)setp\.(ge|gt|le|lt)\.f32\s+(%\w+), ([^,;\s]+), ([^,;\s]+);")
OPPOSITE = {"ge": "ltu", "gt": "leu", "le": "gtu", "lt": "geu"}
SINGLE = re.compile(r"0f([0-9A-F]{8})")
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s+([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"%\w+")


# A GPU that is not here, for which kernels are compiled into Triton's cache and never launched
elsewhere: Any = None
most_shared = 0  # bytes of shared memory that a block has there

# What processes that compile side by side enter with the digest of a kernel, so that one of them
# compiles it and the others find it in Triton's cache
alone: Callable[[str], AbstractContextManager[Any]] = nullcontext


def compile_triton(source: Any, options: Mapping[str, Any], target: Any = None) -> Any:
    """``source``, an ASTSource, compiled for ``target``, a GPU that need not be there, or for the
    current one."""
    import triton

    target = target or elsewhere or _here()
    # Triton writes out checks for overflow even where nothing is asserted, which takes time
    options = {"sanitize_overflow": False, **options}
    for fn in (source.fn, *source.constants.values()):
        settle(fn)
    digest = hashlib.sha256(f"{source.hash()} {sorted(options.items())} {target}".encode())
    try:
        with alone(digest.hexdigest()), _mending():
            kernel = triton.compile(source, target=target, options=options)
            if not _is_mended(kernel):  # out of a cache that others filled
                with triton.knobs.compilation.scope():
                    triton.knobs.compilation.always_compile = True
                    kernel = triton.compile(source, target=target, options=options)
    except RuntimeError as failure:  # of a pass, after it has printed the program it failed at
        wrong = f"triton {triton.__version__} cannot compile this kernel: {failure}"
        remedy = "report it to Triton with what it printed; other sizes may do"
        raise EngineError(wrong, asked=f"compile {source.name}", remedy=remedy) from failure
    if not _is_mended(kernel):
        wrong = "a fence, a packed 16-bit addition or a comparison of this kernel is wrong, and"
        wrong += f" triton {triton.__version__} does not let its PTX be replaced"
        asked = f"compile {kernel.name} for sm_{kernel.metadata.target.arch}"
        remedy = "use triton 3.6, which asks add_stages_inspection_hook"
        raise EngineError(wrong, asked=asked, remedy=remedy)
    return kernel


def settle(fn: Any, seen: set[int] | None = None) -> None:
    """Compute the key of a Triton function, by which compiled kernels are found again, after those
    of all functions that it calls. Triton takes the constants of a called function into the key
    only if that function has its own by then: another process, which comes across them in another
    order, would compile everything again."""
    from triton.runtime.jit import JITCallable

    seen = set() if seen is None else seen
    if not isinstance(fn, JITCallable) or fn.hash is not None or id(fn) in seen:
        return
    seen.add(id(fn))
    within, names = fn.get_capture_scope(), fn.fn.__code__.co_names
    for called in [within[name] for name in names if name in within]:
        settle(called, seen)
        for part in names if isinstance(called, ModuleType) else ():
            settle(getattr(called, part, None), seen)
    fn.cache_key  # noqa: B018


def _is_mended(kernel: Any) -> bool:
    ptx = _ptx(kernel)
    return ptx.endswith(MARK) or mended(ptx) == ptx


class _Compiling(threading.local):
    """Whether this thread compiles a kernel of ours."""

    ours = False


_compiling = _Compiling()


@contextmanager
def _mending() -> Iterator[None]:
    """A context in which what this thread compiles is mended. Triton calls one function about the
    stages of whatever any thread compiles, so ours stays there, and leaves the kernels of others
    alone."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook
    if not hasattr(before, "mends"):

        def stages(backend: Any = None, found: Any = None, *how: Any) -> Any:
            asked = () if found is None else (backend, found, *how)  # or only for this hook's key
            told = ("", "") if before is None else before(*asked)
            if asked and _compiling.ours:
                plain = found["ptx"]
                found["ptx"] = lambda source, known: mended(plain(source, known)) + MARK
            return told

        stages.mends = True  # type: ignore[attr-defined]
        knobs.runtime.add_stages_inspection_hook = stages
    _compiling.ours = True
    try:
        yield
    finally:
        _compiling.ours = False


def _here() -> Any:
    """The current GPU, without Triton's own driver, which a C compiler would have to write."""
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, 32)


def mended(ptx: str) -> str:
    """Return PTX that ptxas gets right, and whose matrix units read what was copied."""
    if "wgmma.mma_async" in ptx:
        ptx = waiting(COPIED.sub(FENCED, ptx))
    if "add.s16x2" in ptx or "add.u16x2" in ptx:
        ptx = PACKED.sub(lambda found: TWO.format(*found.groups()), ptx)
    return turned(ptx) if any(word in ptx for word in RANGES) else ptx


def waiting(ptx: str) -> str:
    """Return PTX in which a loop of products ends with a wait, if what follows waits for them."""
    starts = {found[1]: found.start() for found in LABEL.finditer(ptx)}
    parts, done = list[str](), 0
    for found in BACK.finditer(ptx):
        start, end = starts.get(found[1], len(ptx)), found.end()
        if "wgmma.mma_async" not in ptx[start : found.start()]:
            continue
        after = PRODUCT.search(ptx, end)
        if after and after[0] == WAIT and ptx[end : after.start()].strip():
            parts += ptx[done:end], f"\n\t{WAIT}"
            done = end
    return "".join((*parts, ptx[done:]))


def turned(ptx: str) -> str:
    """Return PTX that compares numbers with a known range by the opposite comparison, negated."""
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
    """Return registers that hold |x| or 2^x and nothing else, and all whose range ptxas may
    know."""
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
