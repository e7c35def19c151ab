"""``python -m bench.what_runs`` runs every module of bench/module_cases.py and the architectures of
transformers, holds them against eager torch, and writes docs/what-runs.md.

Without transformers the part about it stays as it is.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import deuteron as dt
from bench.architectures import ARCHITECTURES
from bench.module_cases import CASES, RANDOM, Case
from bench.networks import language, tokens
from deuteron.files import write_atomic
from deuteron.frontends.state import opened
from tests.tolerances import allowed, error

PAGE = Path(__file__).resolve().parent.parent / "docs" / "what-runs.md"
BEGIN, END = "<!-- {} -->", "<!-- /{} -->"
WORK = 4096  # elements that meet in one, at most: what the error bound is told
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
MORE = {
    "fnet (Fourier transforms)": (language("FNetModel", "FNetConfig", **SMALL), tokens(32, 500)),
    "gpt2 with its cache": (
        language("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=2, vocab_size=500),
        tokens(32, 500),
    ),
}


class Outcome(NamedTuple):
    """``what`` is "runs", "random", "refused" or "wrong"; then reason, remedy and place."""

    what: str
    reason: str = ""
    remedy: str = ""
    where: str = ""


def differs(got: Any, want: Any) -> str:
    """What distinguishes a result from eager's, or ""."""
    ours, theirs = (pytree.tree_flatten(opened(result)[0]) for result in (got, want))
    if ours[1] != theirs[1]:
        return f"{ours[1]} instead of {theirs[1]}"
    for a, b in zip(ours[0], theirs[0], strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"{a!r} instead of {b!r}"
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        off = error(a, b)
        if off > allowed(0.0, b.dtype, WORK):
            return f"off by {off:.1e}"
    return ""


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, one place further in memory and with a gap behind each."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    apart = tensor.new_zeros((*tensor.shape, 2))
    apart[..., 1] = tensor
    return apart[..., 1]


def outcome(case: Case) -> Outcome:
    """What comes of a module: planned on one example, called with two others, the second of which
    lies in memory in another way."""
    torch.manual_seed(0)
    module = case.make()
    try:
        args, kwargs = case.call()
        fast = dt.optimize(module, args, kwargs, find=False)
        for turn in range(2):
            args, kwargs = case.call()
            if turn:
                args, kwargs = pytree.tree_map_only(torch.Tensor, elsewhere, (args, kwargs))
            copies = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            got = fast(*args, **kwargs)
            with torch.no_grad():
                wrong = differs(got, module(*copies[0], **copies[1]))
            if case.says == RANDOM:
                again = differs(got, fast(*args, **kwargs))
                return Outcome(RANDOM) if again else Outcome("wrong", "the same numbers twice")
            if wrong:
                return Outcome("wrong", wrong)
    except dt.DeuteronError as refusal:
        return Outcome("refused", refusal.wrong, refusal.remedy, refusal.where)
    return Outcome("runs")


def as_expected(case: Case, came: Outcome) -> bool:
    if case.says in ("", RANDOM):
        return came.what == (case.says or "runs")
    return came.what == "refused" and case.says in f"{came.reason} {came.remedy}"


def section(title: str, came: dict[str, Outcome]) -> str:
    """One group of modules as Markdown: those that run by name, the others with their reasons."""

    def listed(what: str) -> str:
        return ", ".join(name for name, found in came.items() if found.what == what)

    lines = [f"### {title[0].upper()}{title[1:]}", ""]
    for what, words in (("runs", "Run"), (RANDOM, "Run, with other numbers each time")):
        if listed(what):
            lines += [f"{words}: {listed(what)}.", ""]
    rows = {name: found for name, found in came.items() if found.what not in ("runs", RANDOM)}
    if rows:
        lines += ["| refused | because | remedy |", "|---|---|---|"]
    lines += [row(name, found) for name, found in rows.items()]
    return "\n".join([*lines, ""])


def row(name: str, found: Outcome) -> str:
    cells = (name, found.reason, found.remedy)
    return f"| {' | '.join(cell.strip().replace('|', '/') for cell in cells)} |"


def modules() -> str:
    """All groups of small modules. One that does not do as its case says stops everything."""
    parts = []
    for title, cases in CASES.items():
        came = {}
        for name, case in cases.items():
            came[name] = outcome(case)
            if not as_expected(case, came[name]):
                raise SystemExit(f"{title}, {name}: {came[name]}, where {case.says!r} is expected")
        parts.append(section(title, came))
    return "\n".join(parts)


def architectures() -> str:
    came = {}
    for name, (make, inputs) in {**ARCHITECTURES, **MORE}.items():
        came[name] = outcome(
            Case(lambda make=make: make().eval(), lambda inputs=inputs: ((inputs(1),), {}))
        )
        if came[name].what == "wrong":
            raise SystemExit(f"{name}: {came[name]}")
    return section("architectures of transformers", came)


def updated(page: str, part: str, text: str) -> str:
    """The page with what stands between the marks of a part written anew."""
    begin, end = BEGIN.format(part), END.format(part)
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}{end}", page, flags=re.DOTALL)


def main() -> None:
    warnings.simplefilter("ignore")
    page = PAGE.read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):  # one of the modules prints
        page = updated(page, "modules", modules())
        if find_spec("transformers"):
            page = updated(page, "architectures", architectures())
    write_atomic(PAGE, page)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
