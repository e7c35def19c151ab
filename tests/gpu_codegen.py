"""Running a case with generated Triton on the GPU that is there."""

from __future__ import annotations

import torch

from deuteron.codegen.triton_knobs import choices
from deuteron.codegen.triton_load import Launcher
from deuteron.codegen.triton_render import Knobs, render
from tests.codegen_cases import Case, compare, laid_out


def run_case(case: Case, knobs: Knobs | None = None, ways: int = 1) -> str:
    """What is wrong with the case on the GPU, or nothing."""
    device = torch.device("cuda")
    tried = [knobs] if knobs else choices(case.program)[:ways]
    rendered = [render(case.program, k) for k in tried]
    for way, text in zip(tried, rendered, strict=True):
        inputs = [laid_out(t, t.stride(), "cuda") for t in case.feed.values()]
        outputs = case.empty_outputs("cuda")
        Launcher(text, (*case.feed, *outputs), device)(*inputs, *outputs.values())
        wrong = compare(case, outputs)
        if wrong:
            return f"{way}: {wrong}\n{text.source}"
    return ""
