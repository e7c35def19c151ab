"""``python -m tests.fuzz_codegen --count 10000 --engine interpret|triton``

Random regions against the float64 reference; a failure is reduced to the smallest graph that
still fails and printed with its program, ready to be kept as a test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from deuteron.codegen.interpret import interpret
from deuteron.ir import Graph
from tests.codegen_cases import Case, case_of, compare, random_region

Verdict = Callable[[Case], str]


def by_torch(case: Case) -> str:
    outputs = case.empty_outputs()
    interpret(case.program, case.feed, outputs)
    return compare(case, outputs)


def by_triton() -> Verdict:
    """On the GPU if there is one, else in the interpreter."""
    if torch.cuda.is_available():
        from tests.gpu_codegen import run_case

        return run_case
    from tests.triton_interpreter import install
    from tests.triton_interpreter import run_case as interpreted

    install()
    return interpreted


def judged(verdict: Verdict, case: Case) -> str:
    try:
        return verdict(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def smaller(case: Case) -> list[Case]:
    """The case with one node or one output less, where it still has a program."""
    found = []
    graph = case.graph
    for k in range(len(graph.nodes)):
        nodes = [n for i, n in enumerate(graph.nodes) if i != k]
        gone = set(graph.nodes[k].outputs)
        kept: list = []
        for node in nodes:  # whatever read the node goes with it
            if gone & set(node.uses):
                gone |= set(node.outputs)
            else:
                kept.append(node)
        if kept:
            found.append(_with(case, tuple(kept)))
    return [c for c in found if c is not None]


def _with(case: Case, nodes: tuple) -> Case | None:
    read = {v for node in nodes for v in node.uses}
    ends = [v for node in nodes for v in node.outputs if v not in read]
    inputs = tuple(v for v in case.graph.inputs if v in read)
    known = {*inputs, *(v for node in nodes for v in node.outputs)}
    constants = {k: c for k, c in case.graph.constants.items() if k in read}
    types = {v: t for v, t in case.graph.types.items() if v in known or v in constants}
    graph = Graph(
        name=case.graph.name, inputs=inputs, nodes=nodes, types=types, constants=constants,
        outputs=tuple((f"y{i}", v) for i, v in enumerate(ends)),
    )  # fmt: skip
    return case_of(case.name, graph, {k: case.feed[k] for k in inputs})


def reduced(verdict: Verdict, case: Case) -> Case:
    """The smallest case found by leaving nodes out one at a time."""
    again = True
    while again:
        again = False
        for trial in smaller(case):
            if judged(verdict, trial):
                case, again = trial, True
                break
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--engine", choices=("interpret", "triton"), default="interpret")
    parser.add_argument("--nodes", type=int, default=6)
    args = parser.parse_args()
    verdict = by_torch if args.engine == "interpret" else by_triton()
    tried = failed = 0
    for seed in range(args.first, args.first + args.count):
        graph, feed = random_region(seed, args.nodes)
        case = case_of(f"seed {seed}", graph, feed) if graph.nodes else None
        if case is None:
            continue
        tried += 1
        wrong = judged(verdict, case)
        if wrong:
            failed += 1
            case = reduced(verdict, case)
            print(f"seed {seed}: {judged(verdict, case)}\n{case.graph}\n{case.program}\n")
        if tried % 500 == 0:
            print(f"{tried} tried, {failed} failed", flush=True)
    print(f"{tried} tried, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
