"""What ptxas gets wrong does not reach it: see codegen/triton_compile.py."""

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from deuteron.codegen import triton_compile
from deuteron.codegen.triton_compile import PACKED, compile_triton, mended
from deuteron.codegen.triton_load import functions
from deuteron.codegen.triton_render import Knobs, render
from deuteron.errors import EngineError
from deuteron.kernels.triton import batch_norm_passes
from tests.codegen_cases import graph_of
from tests.codegen_kept import kept_cases
from tests.ptx import assemble, read_early
from tests.sweeps import one_in

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": False}


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    """These tests look at what the assembler made, which others can do without."""
    assembled = getattr(CUDABackend, "assembled", CUDABackend.make_cubin)
    monkeypatch.setattr(CUDABackend, "make_cubin", assembled)


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A kernel whose indices are added in pairs; nothing of it is found in a cache."""
    monkeypatch.setenv("DEUTERON_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "tritons"))
    case = next(c for c in kept_cases() if c.name == "bytes repeated, in another order")
    rendered = render(case.program, Knobs("rows", 8192, warps=16))
    fn = functions(rendered.source)[rendered.launches[0].function]
    kinds = [rendered.pointers[a] for a in rendered.launches[0].arguments]
    attrs = {(k,): [["tt.divisibility", 16]] for k in range(len(kinds))}
    return ASTSource(fn, dict(zip(fn.arg_names, kinds, strict=True)), attrs=attrs)


def instructions(kernel, folder: Path) -> str:
    tool = triton.knobs.nvidia.nvdisasm.path
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    done = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True)
    return done.stdout


def test_packed_additions_are_taken_apart(source, tmp_path):
    plain = triton.compile(source, target=HOPPER, options=OPTIONS)
    assert PACKED.search(plain.asm["ptx"]), "nothing to take apart: this test needs another kernel"
    ours = compile_triton(source, OPTIONS, HOPPER)
    assert not PACKED.search(ours.asm["ptx"])
    lost = r"VIADD\.16x2 R\d+, R\d+(\.\w+)?, 0x0 "
    assert not re.search(lost, instructions(ours, tmp_path))
    assert ours.metadata.shared == plain.metadata.shared


def test_a_kernel_is_compiled_once(source, monkeypatch):
    """Mended on the way to the assembler, and not looked at again when it is found in the cache."""
    made, looked = [], []
    make, mend = CUDABackend.make_ptx, triton_compile.mended
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *a: made.append(1) or make(*a))
    monkeypatch.setattr(triton_compile, "mended", lambda ptx: looked.append(1) or mend(ptx))
    first = compile_triton(source, OPTIONS, HOPPER)
    assert compile_triton(source, OPTIONS, HOPPER).asm["ptx"] == first.asm["ptx"]
    assert (len(made), len(looked)) == (1, 1)


@pytest.fixture
def products(monkeypatch, tmp_path) -> str:
    """The PTX of a loop of three products, with code behind it that reads all sums at once."""
    from deuteron.kernels.triton.conv import NO_DEPTH, Sizes, Tile, Window, _run

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = Sizes(*[("i32", False)] * len(Sizes._fields))
    sizes = (1, 1, 1, 1, 0, 0, 1, 1, 72, 72, 64, 1, False, 0.0, *NO_DEPTH, 0, 0, 1)
    half, single, window = (torch.float16, True), (torch.float32, True), Window(*sizes)
    fixed = {"W": window, "T": Tile(64, 64, 32, 1, 1, False), "FINISH": None}
    kinds = [half, half, None, half, (), (single, single, ("i32", False)), numbers]
    ptx = _run.compile(kinds, fixed, 4, 3, HOPPER).asm["ptx"]
    assert "wgmma.mma_async" in ptx and mended(ptx) == ptx
    return str(ptx)


def test_matrix_units_read_what_was_copied(products):
    """Their way to shared memory is another one than that of copies: see triton_compile.py."""
    waits = re.findall(r"cp\.async\.wait_group\s+\d+;\s*(\S+)", products)
    assert waits and set(waits) == {"fence.proxy.async.shared::cta;"}
    assert "fence" not in mended("cp.async.wait_group 0;")  # nobody reads by that way


def test_sums_of_matrix_units_are_waited_for(products, tmp_path):
    assert products.count(triton_compile.WAIT) == 2
    plain = products.replace(triton_compile.WAIT, "", 1)
    assert triton_compile.waiting(plain).count(triton_compile.WAIT) == 2
    file = tmp_path / "kernel"
    assemble(plain, 90, file)
    assert read_early(file), "nothing to wait for: this test needs another kernel"
    assemble(products, 90, file)
    assert not read_early(file)


def test_what_others_left_in_the_cache_is_compiled_again(source):
    options = {"sanitize_overflow": False, **OPTIONS}
    assert PACKED.search(triton.compile(source, target=HOPPER, options=options).asm["ptx"])
    assert not PACKED.search(compile_triton(source, OPTIONS, HOPPER).asm["ptx"])


def test_kernels_of_others_are_left_as_they_are(source, monkeypatch):
    told = []
    monkeypatch.setattr(
        triton.knobs.runtime, "add_stages_inspection_hook", lambda *a: told.append(a)
    )
    assert not PACKED.search(compile_triton(source, OPTIONS, HOPPER).asm["ptx"])
    assert PACKED.search(triton.compile(source, target=HOPPER, options=OPTIONS).asm["ptx"])
    assert len(told) == 2, "whoever else looks at the stages of a kernel still does"


def test_a_triton_that_does_not_replace_ptx_is_refused(source, monkeypatch):
    monkeypatch.setattr(triton_compile, "_mending", nullcontext)
    with pytest.raises(EngineError, match="packed 16-bit addition"):
        compile_triton(source, OPTIONS, HOPPER)


def test_a_binary_that_cannot_be_checked_is_refused(source, monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "store_binary_only", True)
    with pytest.raises(EngineError, match="TRITON_STORE_BINARY_ONLY"):
        compile_triton(source, OPTIONS, HOPPER)


def test_only_packed_additions_change():
    ptx = "add.s16x2 \t%r3, %r1, %r2;\nadd.s16 \t%rs3, %rs1, %rs2;\nmin.s16x2 %r4, %r1, %r2;"
    first, *others = mended(ptx).splitlines()
    assert "16x2" not in first and first.count("add.s16 ") == 2 and "mov.b32 %r3," in first
    assert others == ptx.splitlines()[1:]
    assert mended("ret;") == "ret;"


RANGES = {
    "absolute": lambda g, x: g.ge(g.abs(x * 3.0), -1.0),
    "power of two": lambda g, x: g.ge(g.exp2(x), 0.0),
    "chosen": lambda g, x: g.ge(g.where(g.gt(x, 1.0), g.abs(x * 3.0), 2.0), -1.0),
}


@pytest.mark.parametrize("arch", one_in(3, [80, 90]))
@pytest.mark.parametrize("name", RANGES)
def test_comparisons_of_nan_are_made(name, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "tritons"))
    case = graph_of(name, RANGES[name], x=torch.randn(512))
    rendered = render(case.program, Knobs("flat", 512, 4))
    fn = functions(rendered.source)[rendered.launches[0].function]
    kinds = [rendered.pointers[a] for a in rendered.launches[0].arguments]
    source = ASTSource(fn, dict(zip(fn.arg_names, kinds, strict=True)))
    target = GPUTarget("cuda", arch, 32)
    plain = instructions(triton.compile(source, target=target, options=OPTIONS), tmp_path)
    ours = instructions(compile_triton(source, OPTIONS, target), tmp_path)
    assert ours.count("FSETP") > plain.count("FSETP"), "ptxas knows about nan: nothing to mend"


def test_only_comparisons_of_known_ranges_turn():
    ptx = """\
        abs.f32  %r2, %r1;
        setp.ge.f32  %p1, %r2, 0fBF800000;
        setp.gt.f32  %p2, %r2, 0f3F800000;
        setp.lt.f32  %p3, %r2, 0fBF800000;
        setp.ge.f32  %p4, %r1, 0fBF800000;
        mov.b64  {%r3, %r4}, %rd1;
        mov.b64  %rd1, {%r5, %r2};
        setp.le.f32  %p5, %r6, %r4;
        @%p1 setp.ge.f32  %p6, %r2, 0fBF800000;
        setp.ge.f64  %p7, %rd1, 0dBFF0000000000000;"""
    found = mended(ptx).splitlines()
    changed = [k for k, (a, b) in enumerate(zip(ptx.splitlines(), found, strict=True)) if a != b]
    assert changed == [1, 7]
    assert found[1].split(maxsplit=1)[1] == "%p1, %r2, 0fBF800000; not.pred %p1, %p1;"
    assert "setp.ltu.f32" in found[1] and "setp.gtu.f32 %p5, %r6, %r4;" in found[7]
    assert mended("\n".join(found)) == "\n".join(found)


def test_a_kernel_that_triton_cannot_compile_is_refused(source, monkeypatch):
    def failing(source, target, options):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton, "compile", failing)
    with pytest.raises(EngineError, match="cannot compile this kernel: PassManager"):
        compile_triton(source, OPTIONS, HOPPER)


def test_keys_do_not_depend_on_the_order_in_which_functions_are_met(monkeypatch):
    """Builders and the process that waits for them meet kernels in different orders."""
    fns = {n: f for n, f in vars(batch_norm_passes).items() if isinstance(f, JITFunction)}

    def keys(order):
        for fn in fns.values():
            monkeypatch.setattr(fn, "hash", None)
            monkeypatch.setattr(fn, "used_global_vals", {})
        for name in order:
            triton_compile.settle(fns[name])
        return {name: fn.cache_key for name, fn in fns.items()}

    assert fns
    assert keys(fns) == keys(reversed(fns))
