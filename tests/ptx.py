"""Kernels compiled for GPUs that are not there: as far as PTX, and what ptxas says where asked."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def stop_at_ptx() -> None:
    """Triton assembles everything it compiles; without a GPU nobody loads the binary, and
    :func:`spilled` asks the assembler for itself. What was compiled so must not reach a cache that
    others read: it has no binary."""
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.assembled = CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda self, ptx, metadata, options, capability: b""


def spilled(kernel: Any, arch: int) -> int:
    """Bytes that the assembler spills to local memory. Where warps divide the work, a warning that
    it makes products wait for each other is an error."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch).path  # which Triton itself would ask
    ptx = kernel.asm["ptx"]
    name = re.search(r"\.target (sm_\w+)", ptx)
    assert name is not None and name[1].startswith(f"sm_{arch}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        done = subprocess.run(
            [str(tool), "-v", f"--gpu-name={name[1]}", str(file), "-o", str(Path(folder) / "out")],
            capture_output=True,
            text=True,
            check=True,
        )
    assert "setmaxnreg" not in ptx or "serialized" not in done.stderr, done.stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
