"""Every launch that the GPU tests of augmentation make, compiled for an H200 that is not there.

The interpreter accepts what the compiler refuses, such as a name that changes its type in a loop.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from augment_cases import BACKWARD, FORWARD, PIPELINES, images

from deuteron.augment import run

pytest.importorskip("triton")


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    """What is launched, not run: (kernel, kinds of its arguments, constants, warps, stages)."""
    from deuteron.kernels.triton import augment
    from deuteron.kernels.triton.launch import Launchable, described

    seen: list[Any] = []

    def record(self, grid, *args, warps=4, stages=2, **constants):
        seen.append((self, tuple(described(args)[1]), tuple(constants.items()), warps, stages))

    monkeypatch.setattr(Launchable, "__call__", record)
    monkeypatch.setattr(augment, "_processors", lambda device: 132)
    return seen


def compile_all(launches: list[Any]) -> None:
    from triton.backends.compiler import GPUTarget

    assert launches
    for kernel, kinds, constants, warps, stages in dict.fromkeys(launches):
        kernel.compile(kinds, dict(constants), warps, stages, GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("name", PIPELINES)
def test_forward(name, launches):
    for case, kind, shape, nhwc in FORWARD:
        if case == name:
            x, aug = images(shape, kind, nhwc), PIPELINES[name]()
            run.forward_kernel(x, aug.table(x, step=1), aug.recipe.text)
    compile_all(launches)


@pytest.mark.parametrize("name", [name for name, _, _ in BACKWARD])
def test_backward(name, launches, monkeypatch):
    """The gather and the sampling before it; the gradient of colours between them is planned, and
    compiled elsewhere."""

    def planned(recipe, sampled, result, device):
        return SimpleNamespace(run=lambda **given: {"grad_sampled": given["sampled"]})

    monkeypatch.setattr(run, "_finish_plan", planned)
    for case, kind, shape in BACKWARD:
        x, aug = images(shape, kind, False), PIPELINES[name]()
        if case == name and aug.recipe.geometric:
            grad = torch.empty_like(run._empty_result(aug.recipe, x))
            run.backward_kernel(grad, x, aug.table(x, step=1), aug.recipe.text)
            compile_all(launches)
