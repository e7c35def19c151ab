"""The kernels of augmentation compiled for GPUs that are not there, without spilling a register.

The interpreter accepts what the compiler refuses, such as a name that changes its type in a loop.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from augment_cases import AFFINE, FORWARD, GEOMETRY, JITTER, NORMAL, PIPELINES, images

from deuteron.augment import Brightness, HSVShift, Perspective, Pipeline, ToDtype, run
from tests.sweeps import one_in

pytest.importorskip("triton")
BENT = Perspective(0.3)
# What has the most code: (pipeline, type, channels, architecture, images), forward and, of floats,
# backward. Many images own a program each; of few the grey is summed in parts.
HEAVIEST = {
    "training": (PIPELINES["acceptance"](), torch.uint8, 3, 90, 256),
    "training, few": (PIPELINES["acceptance"](), torch.uint8, 3, 80, 1),
    "bicubic": (
        Pipeline([AFFINE, BENT, HSVShift(0.1), NORMAL], interpolation="bicubic"),
        torch.float32,
        3,
        90,
        2,
    ),
    "nearest": (
        Pipeline([AFFINE, BENT, Brightness(0.1), ToDtype("u8")], interpolation="nearest"),
        torch.bfloat16,
        2,
        80,
        2,
    ),
    "double": (Pipeline([AFFINE, BENT, JITTER]), torch.float64, 3, 90, 256),
    "double, few": (Pipeline([AFFINE, JITTER]), torch.float64, 3, 80, 1),
}


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    """What is launched, not run: (kernel, kinds of its arguments, constants, warps, stages)."""
    from deuteron.kernels.triton import augment
    from deuteron.kernels.triton.launch import Launchable, described

    seen: list[Any] = []

    def record(self, grid, *args, warps=4, stages=2, **constants):
        seen.append((self, tuple(described(args)[1]), tuple(constants.items()), warps, stages))

    def planned(spec, sampled, result, device):
        """The gradient of colours is planned, and compiled elsewhere."""
        return SimpleNamespace(run=lambda **given: {"grad_sampled": given["sampled"]})

    monkeypatch.setattr(Launchable, "__call__", record)
    monkeypatch.setattr(augment, "_parts", lambda n, pixels, device, split: 64 if n == 1 else 1)
    monkeypatch.setattr(run, "_finish_plan", planned)
    return seen


def launch(aug: Pipeline, x: torch.Tensor, back: bool) -> None:
    from deuteron.augment import gpu

    table, y = aug.table(x, step=1), run.empty_result(x, aug.spec.text)
    gpu.forward(x, table, y, aug.spec.text)
    if back:
        run.backward_kernel(y, x, table, torch.empty_like(x), aug.spec.text)


def compiled(launches: list[Any], arch: int) -> list[Any]:
    from triton.backends.compiler import GPUTarget

    assert launches
    return [
        kernel.compile(kinds, dict(constants), warps, stages, GPUTarget("cuda", arch, 32))
        for kernel, kinds, constants, warps, stages in dict.fromkeys(launches)
    ]


@pytest.mark.parametrize("name", one_in(2, HEAVIEST))
def test_the_most_code_does_not_spill(name, launches):
    from test_triton_gen import spilled

    aug, kind, channels, arch, count = HEAVIEST[name]
    launch(aug, images((count, channels, 32, 40), kind, False), kind.is_floating_point)
    assert [spilled(k, arch) for k in compiled(launches, arch)] == [0] * len(launches)


@pytest.mark.parametrize("name", one_in(4, ["nothing", "everything", "to bytes", *GEOMETRY]))
def test_it_compiles(name, launches):
    """In the type that comes first in the tests on a GPU; "everything" has all colours."""
    kind, shape, nhwc = next(rest for case, *rest in FORWARD if case == name)
    aug = PIPELINES[name]()
    launch(aug, images(shape, kind, nhwc), kind.is_floating_point and name in GEOMETRY)
    compiled(launches, 90)
