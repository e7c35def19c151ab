"""``python -m tests.fuzz_codegen --count 10000 --engine interpret|cpu_gen|triton``

Random regions against the float64 reference; a failure is reduced to the smallest graph that
still fails and printed with its program, ready to be kept as a test. ``--workers`` spreads the
seeds over several processes and replaces each after a hundred seeds, because kernels that were
loaded stay in memory; a process that crashes counts as one wrong seed. ``--limit`` ends the search
after so many seconds with what was done until then.

``--engine triton`` runs in Triton's interpreter, with ``--device cuda`` natively on the GPU.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from deuteron.errors import EngineError
from deuteron.ir import Graph, Node
from deuteron.ir.region import Region
from tests.codegen_cases import Case, case_of, compare, laid_out, some_way
from tests.random_regions import random_region
from tests.scalar_interpreter import interpret

Verdict = Callable[[Case], str]
REFUSED = "refused: "


def by_torch(case: Case) -> str:
    outputs = case.empty_outputs()
    interpret(case.program, case.feed, outputs)
    return compare(case, outputs)


def by_cpu() -> Verdict:
    """The CPU engine, as a plan would use it, with a cache of its own."""
    own = tempfile.TemporaryDirectory(prefix="deuteron-fuzz-")
    atexit.register(own.cleanup)
    os.environ["DEUTERON_CACHE"] = own.name
    from deuteron.engines.base import BuildContext
    from deuteron.engines.cpu.generated import CpuGen
    from deuteron.policy import Policy
    from deuteron.target import target

    engine, cpu, policy = CpuGen(), target("cpu"), Policy()
    ctx = BuildContext(cpu, torch.device("cpu"), policy, {})

    def run(case: Case) -> str:
        region = Region(case.graph)
        refusal = engine.refuse(region, cpu, policy)
        if refusal is not None:
            return REFUSED + refusal.reason
        kernel = engine.build(region, engine.candidates(region, cpu, policy)[0], ctx)
        outputs = case.empty_outputs()
        kernel.fill([case.feed[v] for v in region.inputs], [outputs[v] for v in region.outputs])
        return compare(case, outputs)

    return run


def by_triton(device: str) -> Verdict:
    if device == "cuda":
        from tests.gpu_codegen import run_case as run
    else:
        from tests.triton_interpreter import install
        from tests.triton_interpreter import run_case as run

        install()
    return lambda case: run(case, some_way(case))


def verdict_of(engine: str, device: str) -> Verdict:
    if engine == "interpret":
        return by_torch
    return by_cpu() if engine == "cpu_gen" else by_triton(device)


def judged(verdict: Verdict, case: Case) -> str:
    try:
        return verdict(case)
    except EngineError as refusal:  # no kernel, so that a plan takes another
        return f"{REFUSED}{refusal.wrong}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- the smallest graph that still fails


def smaller(case: Case) -> list[Case]:
    """The case with one node less, where it still has a program."""
    found = []
    graph = case.graph
    for k in range(len(graph.nodes)):
        gone = set(graph.nodes[k].outputs)
        kept: list[Node] = []
        for node in (*graph.nodes[:k], *graph.nodes[k + 1 :]):
            if gone & set(node.uses):  # whatever read the node goes with it
                gone |= set(node.outputs)
            else:
                kept.append(node)
        if kept:
            found.append(_with(case, tuple(kept), {}))
        for out in graph.nodes[k].outputs:  # or what it made is handed in
            if k and any(out in node.uses for node in graph.nodes[k + 1 :]):
                rest = tuple(n for n in graph.nodes if out not in n.outputs)
                found.append(_with(case, rest, {out: _known(case, out)}))
    return [c for c in found if c is not None]


def _known(case: Case, value: str) -> torch.Tensor:
    from deuteron.ops.evaluate import evaluate

    graph = case.graph
    part = Graph(
        graph.name, graph.inputs, (("y", value),), graph.nodes, graph.types, graph.constants
    )
    return laid_out(evaluate(part, case.feed)["y"], graph.types[value].strides)


def _with(case: Case, nodes: tuple[Node, ...], more: dict[str, torch.Tensor]) -> Case | None:
    read = {v for node in nodes for v in node.uses}
    made = {v for node in nodes for v in node.outputs}
    feed = {k: t for k, t in {**case.feed, **more}.items() if k in read}
    constants = {k: c for k, c in case.graph.constants.items() if k in read}
    if read - made - set(feed) - set(constants):
        return None
    ends = [v for node in nodes for v in node.outputs if v not in read]
    types = {v: t for v, t in case.graph.types.items() if v in {*feed, *made, *constants}}
    outputs = tuple((f"y{i}", v) for i, v in enumerate(ends))
    graph = Graph(case.graph.name, tuple(feed), outputs, nodes, types, constants)
    return case_of(case.name, graph, feed)


def reduced(verdict: Verdict, case: Case) -> Case:
    """The smallest case found by leaving nodes out one at a time."""
    for trial in smaller(case):
        wrong = judged(verdict, trial)
        if wrong and not wrong.startswith(REFUSED):
            return reduced(verdict, trial)
    return case


# ---- counting


@dataclass
class Counts:
    run: int = 0
    refused: int = 0
    wrong: list[int] = field(default_factory=list)

    def add(self, seed: int, verdict: str) -> None:
        """``verdict`` is one of "right", "refused" and "wrong"."""
        self.run += verdict != "refused"
        self.refused += verdict == "refused"
        if verdict == "wrong":
            self.wrong.append(seed)

    def __str__(self) -> str:
        seeds = f" (seeds {', '.join(map(str, sorted(self.wrong)))})" if self.wrong else ""
        return f"run {self.run}, refused {self.refused}, wrong {len(self.wrong)}{seeds}"


def search(args: argparse.Namespace) -> Counts:
    warnings.simplefilter("ignore")
    verdict, counts = verdict_of(args.engine, args.device), Counts()
    end = time.monotonic() + args.limit
    for seed in range(args.first, args.first + args.count):
        if time.monotonic() > end:
            break
        graph, feed = random_region(seed, args.nodes)
        case = case_of(f"seed {seed}", graph, feed) if graph.nodes else None
        wrong = REFUSED if case is None else judged(verdict, case)
        how = "refused" if wrong.startswith(REFUSED) else "wrong" if wrong else "right"
        counts.add(seed, how)
        if args.device == "cuda" and "CUDA error" in wrong:
            raise SystemExit(f"seed {seed}: {wrong}")  # nothing runs on the GPU after that
        if how == "wrong":
            assert case is not None
            case = reduced(verdict, case)
            print(f"seed {seed}: {judged(verdict, case)}\n{case.graph}\n{case.program}\n")
        if args.verdicts:
            print(f"{VERDICT}{seed} {how}", flush=True)
        elif counts.run % 500 == 0:
            print(f"{args.engine}: {counts}", flush=True)
    return counts


# ---- several processes

VERDICT = "# "  # opens the line in which a process says how one seed went
# The last line of a process that was not in the way of a crash. Its exit code will not do: another
# thread that starts a process asks for it too, and of two only one is told.
DONE = "# done"
CHUNK = 100  # seeds after which a process is replaced: loaded kernels are never freed
# from a process that has imported everything: starting costs little more than a CUDA context
FORKS = multiprocessing.get_context("forkserver")


@dataclass
class Spread:
    """Seeds handed out in chunks to processes that live for one chunk each. What is finished is
    counted at once, so that a time limit or a crash loses nothing but the seed it happened in."""

    args: argparse.Namespace
    counts: Counts = field(default_factory=Counts)

    def __call__(self) -> Counts:
        first, last = self.args.first, self.args.first + self.args.count
        self.end = time.monotonic() + self.args.limit
        compiler = ["triton.compiler"] if self.args.device == "cuda" else []
        FORKS.set_forkserver_preload(["tests.codegen_cases", "tests.gpu_codegen", *compiler])
        with ThreadPoolExecutor(self.args.workers) as pool:
            starts = range(first, last, CHUNK)
            list(pool.map(self._chunk, [range(k, min(k + CHUNK, last)) for k in starts]))
        return self.counts

    def _chunk(self, seeds: range) -> None:
        left = self.end - time.monotonic()
        if not seeds or left <= 0:
            return
        own = {"first": seeds.start, "count": len(seeds), "limit": left, "verdicts": True}
        with tempfile.NamedTemporaryFile("r", prefix="deuteron-fuzz-") as told_in:
            args = argparse.Namespace(**{**vars(self.args), **own})
            process = FORKS.Process(target=_told, args=(args, told_in.name))
            process.start()
            process.join()
            lines = told_in.read().splitlines()
        done = DONE in lines
        lines = [line for line in lines if line != DONE]
        told = [line.removeprefix(VERDICT).split() for line in lines if line.startswith(VERDICT)]
        for seed, how in told:
            self.counts.add(int(seed), how)
        shown = [line for line in lines if not line.startswith(VERDICT)]
        if not done:
            crashed = seeds.start + len(told)
            self.counts.add(crashed, "wrong")
            shown.append(f"seed {crashed}: the process ended with {process.exitcode}")
            self._chunk(range(crashed + 1, seeds.stop))
        print("\n".join([*shown, f"{self.args.engine}: {self.counts}"]), flush=True)


def _told(args: argparse.Namespace, file: str) -> None:
    """The search of one process, which says in ``file`` how it went."""
    with open(file, "w", buffering=1) as out, contextlib.redirect_stdout(out):
        torch.set_num_threads(1)  # as many processes as cores
        search(args)
        print(DONE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--engine", choices=("interpret", "cpu_gen", "triton"), default="interpret")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one does it all")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    args = parser.parse_args(namespace=argparse.Namespace(verdicts=False))
    counts = Spread(args)() if args.workers else search(args)
    last = args.first + args.count - 1
    print(f"{args.engine} on {args.device}, seeds {args.first} to {last}: {counts}")
    return int(bool(counts.wrong))


if __name__ == "__main__":
    sys.exit(main())
