"""``python -m bench.run --device cuda --only models --out bench/results``"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile

from bench import apart
from bench.harness import WARM_COMPILE, Record

ALL = """overhead planning models networks training eager architectures prediction generated norms
    rope products convolutions attention quantized fp8 moe sparse batch_norm conv_batch_norm
    cpu_products cpu_convolutions optim augment loss functional cpu_rows cpu_operators pyramid_pool
    by_hand small delegation one_rank""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Deuteron against its peers.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="*", choices=ALL, help="these benchmarks and no others")
    parser.add_argument("--out", default="bench/results", help="folder for the records")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--cache", help="keep measurements in this folder (default: start empty)")
    parser.add_argument(
        "--compile-cache",
        help="keep torch.compile's kernels in this folder (default: start empty); what it takes "
        "to a first result is not recorded then",
    )
    parser.add_argument(
        "--apart",
        type=int,
        metavar="N",
        help="every case in a process of its own, N of which get ready side by side",
    )
    args = parser.parse_args()
    os.environ["DEUTERON_CACHE"] = args.cache or tempfile.mkdtemp(prefix="deuteron-bench-")
    # torch.compile starts cold as well, or its time to a first result would be a cache's
    inductor = args.compile_cache or tempfile.mkdtemp(prefix="deuteron-bench-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    if args.compile_cache:
        os.environ[WARM_COMPILE] = "1"
    Record.folder = args.out
    for name in args.only or ALL:
        print(f"{name} on {args.device}", flush=True)
        module = importlib.import_module(f"bench.{name}")
        if args.apart:
            apart.run(module, args.device, not args.no_compile, args.apart)
        else:
            module.run(args.device, compile_peer=not args.no_compile)


if __name__ == "__main__":
    main()
