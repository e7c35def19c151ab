"""Every family of Triton kernels on small shapes under NVIDIA's compute-sanitizer.

``python -m tests.sanitize`` on a machine with a GPU and the CUDA toolkit runs all of them under
memcheck, which finds reads and writes out of bounds; ``python -m tests.sanitize norm rope`` runs
some. ``--tool racecheck`` looks for accesses of shared memory that no barrier orders.

PyTorch's allocator would hide a small step over the end of a tensor in a larger block, so it is
told to give every tensor memory of its own. Kernels of PyTorch are left out: they take long.
Results are compared as well, as in the tests marked ``gpu``, whose cases these are.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer")
Check = tuple[str, Callable[[], str]]  # a name, and what is wrong or nothing


def norm() -> Iterator[Check]:
    import deuteron as dt
    from tests.norm_cases import small_cases, wrong

    target = dt.target("cuda")
    for case in itertools.islice(small_cases(), 0, None, 3):
        yield str(case), lambda case=case: wrong(case, target, "cuda")


def batch_norm() -> Iterator[Check]:
    from tests.batch_norm_cases import cases, run

    for k, case in enumerate(cases()):
        if k % 6 == 0 or case.signs:
            yield str(case), lambda case=case: run(case, "cuda")


def rope() -> Iterator[Check]:
    from tests.rope_cases import cases, compare

    for case in itertools.islice(cases("bf16"), 0, None, 3):
        yield case.name, lambda case=case: "\n".join(compare(case, "cuda", most=1)[1])


def product() -> Iterator[Check]:
    """Products with what follows them, by weights of 8 and 4 bits, and of experts; attention."""
    import torch

    from tests import attention_cases, moe_cases, product_cases, quantized_cases

    looked_up = attention_cases.cases, attention_cases.gradients, attention_cases.pages
    looked_up = (*looked_up, attention_cases.turned, attention_cases.windows)
    for made in (product_cases.cases, quantized_cases.cases, moe_cases.cases, *looked_up):
        for case in made(torch.bfloat16):
            yield case.name, lambda case=case: "\n".join(product_cases.compare(case, "cuda", 1)[1])


def scan() -> Iterator[Check]:
    import torch

    from tests.test_triton_scan import SHAPES, case, wrong_over_blocks, wrong_with

    for shape in SHAPES:
        x = case(shape, torch.float32)
        yield f"cumsum {shape}", lambda x=x: "\n".join(wrong_with("cumsum", x, "cuda"))
    yield "over blocks", lambda: "\n".join(wrong_over_blocks(False, "cuda"))


def histogram() -> Iterator[Check]:
    import torch

    from tests.test_triton_histogram import RANGES, SHAPES, case, wrong_with

    for shape, given in itertools.product(SHAPES, RANGES):
        x = case(shape, torch.float32)
        yield f"{shape} {given}", lambda x=x, given=given: "\n".join(wrong_with(x, *given, "cuda"))


def embedding_grad() -> Iterator[Check]:
    import torch

    from tests.test_triton_embedding_grad import CASES, wrong_with

    for name, onto in itertools.product(CASES, (False, True)):
        given = name, torch.float32, onto, "cuda"
        yield f"{name} {onto}", lambda given=given: "\n".join(wrong_with(*given))


def sparse() -> Iterator[Check]:
    """Rows of all lengths, blocks, and structures that point outside."""
    import torch

    from tests.sparse_cases import cases, compare
    from tests.test_triton_sparse import never_outside

    for op, case in cases(torch.bfloat16, "cuda"):
        name = f"{op} {case.name}"
        given = (op, case, torch.bfloat16, "cuda", 1)
        yield name, lambda given=given: "\n".join(compare(*given)[1])
    yield "outside", lambda: "\n".join(never_outside("cuda"))


def cross_entropy() -> Iterator[Check]:
    """The losses, the sums around them and the gradients, of short, long, odd and far rows."""
    import torch

    from tests.loss_cases import wrong

    ways = (("classes", False, "mean", 0.0, 0.0), ("probabilities", True, "none", 0.1, 0.01))
    shapes = ((5, 13), (3, 6, 5), (5, 4097), (3, 50257), (2, 128256), (2, 300, 33), (40000, 3))
    for shape, way in itertools.product(shapes, ways):
        for inplace in (False, True):
            yield (
                f"{shape} {way} in place: {inplace}",
                lambda case=(shape, *way), inplace=inplace: wrong(
                    case, torch.bfloat16, "cuda", inplace_backward=inplace
                ),
            )


def augment() -> Iterator[Check]:
    import torch

    from tests.augment_cases import GRADIENTS, PIPELINES, images

    def run(name: str) -> str:
        x = images((2, 3, 9, 13), torch.float32, False).cuda().requires_grad_(name in GRADIENTS)
        out = PIPELINES[name]()(x, step=1)
        if name in GRADIENTS:
            out.sum().backward()
        return ""

    for name in ("acceptance", "bicubic border", "everything", "to bytes", "contrast"):
        yield name, lambda name=name: run(name)


def resample() -> Iterator[Check]:
    from deuteron.target import target
    from tests.test_triton_resample import samples, wrong_with

    for op, sample in itertools.islice(samples(), 0, None, 4):
        yield (
            f"{op} {sample}",
            lambda op=op, sample=sample: "\n".join(
                wrong_with(op, sample, "f32", target("cuda"), "cuda")
            ),
        )


def max_pool() -> Iterator[Check]:
    import torch

    from deuteron.target import target
    from tests.test_max_pool import ADAPTIVE, CASES, wrong_with

    for case in (*CASES[:8], *ADAPTIVE):
        yield (
            str(case),
            lambda case=case: "\n".join(wrong_with(target("cuda"), "cuda", case, torch.float32, 1)),
        )


def optim() -> Iterator[Check]:
    import torch

    from tests.optim_cases import cases, check

    for case in itertools.islice(cases(), 0, None, 3):
        yield case.name, lambda case=case: check(case, torch.float32, "cuda", steps=2)


def optim8() -> Iterator[Check]:
    from tests.optim_cases import eight_bits

    yield "8-bit AdamW", lambda: eight_bits("cuda")


def generated() -> Iterator[Check]:
    from tests.codegen_cases import kind_cases
    from tests.gpu_codegen import run_case

    for case, knobs in kind_cases("f32"):
        yield f"{case.name} {knobs}", lambda case=case, knobs=knobs: run_case(case, knobs)


FAMILIES = {
    f.__name__: f
    for f in (
        norm,
        batch_norm,
        rope,
        product,
        scan,
        histogram,
        embedding_grad,
        sparse,
        cross_entropy,
        augment,
        resample,
        max_pool,
        optim,
        optim8,
        generated,
    )
}


def run_here(families: list[str]) -> int:
    """The families in this process, which the sanitizer watches: how many checks failed."""
    import torch

    failed = 0
    for name in families:
        count = 0
        for what, check in FAMILIES[name]():
            count += 1
            try:
                wrong = check()
                torch.cuda.synchronize()
            except Exception:
                wrong = traceback.format_exc(limit=-4)
            if wrong:
                failed += 1
                print(f"{name}: {what}\n{wrong}", flush=True)
        print(f"{name}: {count} checks", flush=True)
    return failed


def sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    found = [path for place in PLACES for path in glob.glob(f"{place}/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or (found[0] if found else None)


def watched(tool: str, program: str, families: list[str]) -> int:
    """The families in a process of their own under a tool: its exit status."""
    print(f"---- {tool}", flush=True)
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",
        "20",
        "--kernel-name-exclude",
        "kns=at6native",
        sys.executable,
        "-m",
        "tests.sanitize",
        "--here",
        *families,
    ]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=env, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="family", help=", ".join(FAMILIES))
    parser.add_argument("--tool", choices=TOOLS, default=TOOLS[0])
    parser.add_argument("--here", action="store_true", help="run them without a sanitizer")
    args = parser.parse_args()
    families = args.families or list(FAMILIES)
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"no family is called {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if args.here:
        return 1 if run_here(families) else 0
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    end = watched(args.tool, program, families)
    print("clean" if not end else f"not clean: {end}")
    return int(bool(end))


if __name__ == "__main__":
    sys.exit(main())
