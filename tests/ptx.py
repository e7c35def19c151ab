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
    it makes products wait for each other is an error, and so is reading their sums early."""
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel"
        said = assemble(ptx, arch, file)
        early = read_early(file) if "wgmma.mma_async" in ptx else []
    assert "setmaxnreg" not in ptx or "serialized" not in said, said
    assert not early, early
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def assemble(ptx: str, arch: int, to: Path) -> str:
    """Writes the binary to a file; what the assembler says of it."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch).path  # which Triton itself would ask
    name = re.search(r"\.target (sm_\w+)", ptx)
    assert name is not None and name[1].startswith(f"sm_{arch}")
    source = to.with_suffix(".ptx")
    source.write_text(ptx)
    asked = [str(tool), "-v", f"--gpu-name={name[1]}", str(source), "-o", str(to)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stderr


def instructions(binary: Path) -> list[str]:
    """Those of a binary, in order."""
    from triton import knobs

    tool = knobs.nvidia.nvdisasm.path
    done = subprocess.run([tool, "-c", str(binary)], capture_output=True, text=True, check=True)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", done.stdout)


def asked_ahead(kernel: Any, arch: int) -> int:
    """How many loads of 16 bytes that leave out L1 come before the first product."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel"
        assemble(kernel.asm["ptx"], arch, file)
        found = instructions(file)
    first = next(i for i, line in enumerate(found) if "HMMA" in line)
    return sum("LDG.E.128.STRONG" in line for line in found[:first])


def first_wait(kernel: Any, arch: int) -> float:
    """After which part of the last loop's instructions one first waits for a load from memory."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel"
        assemble(kernel.asm["ptx"], arch, file)
        asked = [knobs.nvidia.nvdisasm.path, "-c", "-hex", str(file)]
        lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    code, labels, loop = list[tuple[str, int]](), dict[str, int](), (0, 0)
    words = r"/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/"
    for label, text, high in re.findall(rf"^(\.L_x_\d+):|(\S.*?);\s*{words}", lines, re.M):
        if label:
            labels[label] = len(code)
            continue
        code.append((text, int(high, 16) >> 41))
        to = re.search(r"BRA `\((\.L_x_\d+)\)", text)
        if to and to[1] in labels and len(code) - labels[to[1]] > 1:
            loop = labels[to[1]], len(code)
    body, due = code[slice(*loop)], set[int]()  # counters of loads, by what control bits say
    for i, (text, control) in enumerate(body * 2):
        awaited = {c for c in due if control >> 11 >> c & 1}
        if awaited and i >= len(body):
            return i / len(body) - 1
        due -= awaited
        if "LDG" in text:
            due.add(control >> 5 & 7)
    return 1.0


PRODUCT = re.compile(r"HGMMA\.\d+x(\d+)x\d+\.(F16|F32|S32)?\S* R(\d+)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")


def read_early(binary: Path) -> list[str]:
    """Instructions that read sums of matrix units before they have waited for them, in a binary
    for a Hopper. Products end in groups, of which all but the last few are waited for."""
    found, groups, due = list[str](), [set[int]()], set[int]()
    for line in instructions(binary):
        if product := PRODUCT.search(line):
            columns, kind, first = product.groups()
            count = int(columns) // (4 if kind == "F16" else 2)
            sums = range(int(first), int(first) + count)
            groups[-1].update(sums)
            due.update(sums)
            if "gsb0" in line:
                groups.append(set())
        elif wait := WAIT.search(line):
            groups = groups[len(groups) - 1 - min(int(wait[1], 16), len(groups) - 1) :]
            due = set().union(*groups)
        elif due and due.intersection(map(int, re.findall(r"\bR(\d+)\b", line))):
            found.append(line)
    return found
