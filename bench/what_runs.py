"""What runs: ``python -m bench.what_runs`` writes docs/what-runs.md."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import deuteron as dt
from bench.module_cases import RANDOM, Case
from tests.tolerances import allowed, error

WORK = 4096  # elements that meet in one, at most: what the error bound is told


def _call(case: Case, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as ``case.call`` gives them: a tuple, or a pair of a tuple and keywords."""
    torch.manual_seed(seed)
    given = case.call()
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given
    return given, {}


def differs(got: Any, want: Any) -> str:
    """What distinguishes a result from eager's, or ""."""
    ours, theirs = pytree.tree_flatten(got), pytree.tree_flatten(want)
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


def outcome(case: Case) -> tuple[str, str]:
    """ "runs", "random", "refused" or "wrong", and the reason."""
    module = case.make()
    args, kwargs = _call(case, 1)
    try:
        torch.manual_seed(2)
        fast = dt.optimize(module, args, kwargs, find=False)
        calls = [_call(case, seed) for seed in (3, 4)]
        with torch.no_grad():
            if case.says == RANDOM:
                (args, kwargs), _ = calls
                same = not differs(fast(*args, **kwargs), fast(*args, **kwargs))
                return ("wrong", "the same numbers twice") if same else ("random", "")
        for args, kwargs in calls:
            again = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            got = fast(*args, **kwargs)
            with torch.no_grad():
                wrong = differs(got, module(*again[0], **again[1]))
            if wrong:
                return "wrong", wrong
    except dt.DeuteronError as refusal:
        return "refused", str(refusal)
    return "runs", ""
