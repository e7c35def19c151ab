"""The one way a Triton function is compiled, with what the assembler gets wrong taken out.

On Hopper LLVM packs two 16-bit additions into ``add.s16x2``, for indices of small ranges among
others. The ptxas of CUDA 12.8 and 12.9, which Triton brings along, then drops the constant of some
of them (``VIADD.16x2 R2, R2, 0x0``) at every optimisation level above 0: numbers are stored at
wrong addresses. So such an addition reaches it as two plain ones.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deuteron.errors import EngineError
from deuteron.files import cache_dir, write_atomic

PACKED = re.compile(r"\badd\.[su]16x2\s+(%\w+), (%\w+), (%\w+);")
TWO = (
    "{{ .reg .b16 %al, %ah, %bl, %bh; mov.b32 {{%al, %ah}}, {1}; mov.b32 {{%bl, %bh}}, {2}; "
    "add.s16 %al, %al, %bl; add.s16 %ah, %ah, %bh; mov.b32 {0}, {{%al, %ah}}; }}"
)


def compile_triton(source: Any, options: Mapping[str, Any], target: Any = None) -> Any:
    """``source``, an ASTSource, compiled for ``target``, a GPU that need not be there, or for the
    current one."""
    import triton

    kernel = triton.compile(source, target=target, options=dict(options))
    ptx = _ptx(kernel)
    if "16x2" not in ptx or not PACKED.search(ptx):
        return kernel
    with _file(unpacked(ptx)) as path:
        kernel = triton.compile(source, target=target, options={**options, "ir_override": path})
    if PACKED.search(_ptx(kernel)):
        raise EngineError(
            "ptxas may drop the constant of a packed 16-bit addition of this kernel, and triton "
            f"{triton.__version__} does not let its PTX be replaced",
            asked=f"compile {kernel.name} for sm_{kernel.metadata.target.arch}",
            remedy="use triton 3.6, whose option ir_override does",
        )
    return kernel


def unpacked(ptx: str) -> str:
    """PTX without packed 16-bit additions."""
    return PACKED.sub(lambda found: TWO.format(*found.groups()), ptx)


def _ptx(kernel: Any) -> str:
    if "ptx" not in kernel.asm:
        raise EngineError(
            "Triton kept only the binary of this kernel, so that it cannot be checked",
            asked=f"compile {kernel.name} for sm_{kernel.metadata.target.arch}",
            remedy="unset TRITON_STORE_BINARY_ONLY and empty Triton's cache",
        )
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
