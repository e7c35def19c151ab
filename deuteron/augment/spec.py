"""A pipeline as data: its checked steps, the same as text, and size, type and layout of its
results.

The operators in ``torch.ops.deuteron`` take the text as an argument, so a traced or exported
program can rebuild the steps without any Python object of ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch

from deuteron.augment.colours import COLOURS, WIDTH, Colour
from deuteron.augment.places import PLACES, Geometric
from deuteron.augment.step import Normalize, Size, Step, ToDtype, ToLayout
from deuteron.errors import GraphError
from deuteron.ir import dtype as element_type

MATRIX = 9  # the first columns of a table are the matrix, column by column
MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border")
IMAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALL = (*PLACES, *COLOURS, Normalize, ToDtype, ToLayout)
STEPS: dict[str, type[Step]] = {kind.__name__: kind for kind in _ALL}
STAGES = ("geometric", "colour", "Normalize", "ToDtype", "ToLayout")


def wrong(what: str, remedy: str, asked: str = "Pipeline") -> GraphError:
    return GraphError(what, asked=asked, remedy=remedy)


@dataclass(frozen=True)
class Spec:
    """The steps, how pixels are interpolated, and what lies outside the image."""

    steps: tuple[Step, ...]
    interpolation: str
    padding: str

    def __post_init__(self) -> None:
        """Compute all cached properties now: the first access to one takes a lock, which
        torch.compile cannot trace."""
        for name, kept in vars(type(self)).items():
            if isinstance(kept, cached_property):
                getattr(self, name)

    @staticmethod
    def make(steps: Sequence[Step], interpolation: str, padding: str | None) -> Spec:
        """Return a checked and complete spec, or raise a GraphError that names the wrong step."""
        if isinstance(steps, Step):
            name = type(steps).__name__
            raise wrong(f"{name} is one step, not a list of them", f"Pipeline([{name}(…)])")
        for step in steps:
            if not isinstance(step, Step):
                raise wrong(f"{step!r} is not a step of a pipeline", f"use {', '.join(STEPS)}")
        simple = tuple(part for step in steps for part in step.parts())
        _check_order(simple)
        if interpolation not in MODES:
            known = f"use one of {', '.join(MODES)}"
            raise wrong(f"interpolation {interpolation!r} is not known", known)
        if padding is None:
            leaves = any(isinstance(s, Geometric) and s.leaves_the_image for s in simple)
            padding = "zeros" if leaves else "border"
        if padding not in PADDINGS:
            known = 'use "zeros", "border", or None to let the steps decide'
            raise wrong(f"padding {padding!r} is not known", known)
        return Spec(simple, interpolation, padding)

    # ---- as text

    @cached_property
    def text(self) -> str:
        steps = [[type(s).__name__, asdict(s)] for s in self.steps]
        return json.dumps([steps, self.interpolation, self.padding])

    # ---- the steps by what they do

    @cached_property
    def geometric(self) -> tuple[tuple[int, Geometric], ...]:
        """The geometric steps with their places in the pipeline, which select their random
        numbers."""
        return tuple((i, s) for i, s in enumerate(self.steps) if isinstance(s, Geometric))

    @cached_property
    def colours(self) -> tuple[tuple[int, Colour], ...]:
        return tuple((i, s) for i, s in enumerate(self.steps) if isinstance(s, Colour))

    @cached_property
    def normalize(self) -> Normalize | None:
        return next((s for s in self.steps if isinstance(s, Normalize)), None)

    @property
    def projective(self) -> bool:
        return any(s.projective for _, s in self.geometric)

    @property
    def columns(self) -> int:
        """Numbers per image: the matrix, then room for three per colour step."""
        return MATRIX + WIDTH * len(self.colours)

    # ---- what it makes of an image

    def result_size(self, size: Size) -> Size:
        for _, step in self.geometric:
            size = step.result_size(size)
        return size

    def result_dtype(self, given: torch.dtype) -> torch.dtype:
        """The type that ToDtype asks for, else that of the image; but float32 where Normalize is
        applied to uint8, which could not hold the result."""
        asked = next((s for s in self.steps if isinstance(s, ToDtype)), None)
        if asked is not None:
            return element_type(asked.dtype).torch
        return torch.float32 if given == torch.uint8 and self.normalize else given

    def compute_dtype(self, given: torch.dtype) -> torch.dtype:
        """The type of the arithmetic: float64 if the image or the result has it, else float32."""
        wide = torch.float64 in (given, self.result_dtype(given))
        return torch.float64 if wide else torch.float32

    def layout(self, nhwc: bool) -> str:
        """The result's memory order, "nhwc" or "contiguous": ToLayout's, else the image's."""
        asked = next((s.layout for s in self.steps if isinstance(s, ToLayout)), None)
        return "nhwc" if (nhwc if asked is None else asked == "nhwc") else "contiguous"

    def check_image(self, shape: Sequence[Any], dtype: torch.dtype) -> None:
        """Raise a GraphError unless this is a batch of images that the steps can take."""
        asked = f"a pipeline on {shown(dtype, shape)}"
        if len(shape) != 4:
            what = f"images have 4 dimensions, [N, C, H, W], not {len(shape)}"
            raise wrong(what, "for one image, x[None]", asked)
        if dtype not in IMAGES:
            remedy = "use uint8 from 0 to 255, or floats from 0 to 1"
            raise wrong(f"images of {shown(dtype)} are not taken", remedy, asked)
        if min(shape[1:]) < 1:
            raise wrong("the images have no pixels", "only N may be 0", asked)
        channels = shape[1]
        for _, step in self.colours:
            if step.channels and channels not in step.channels:
                what = f"{type(step).__name__} of {channels} channels is not defined"
                fitting = " or ".join(map(str, step.channels))
                raise wrong(what, f"give {fitting} channels, or leave the step out", asked)
        if self.normalize and len(self.normalize.mean) not in (1, channels):
            what = f"Normalize has {len(self.normalize.mean)} means for {channels} channels"
            raise wrong(what, f"give 1 or {channels}", asked)

    def scale_and_shift(self, channels: int, kind: torch.dtype) -> torch.Tensor | None:
        """Normalize as x · scale + shift, [2, channels], computed in float64."""
        if self.normalize is None:
            return None
        both = torch.tensor((self.normalize.mean, self.normalize.std), dtype=torch.float64)
        mean, std = both.expand(2, channels)
        return torch.stack([1 / std, -mean / std]).to(kind)


def shown(dtype: torch.dtype, shape: Sequence[Any] | None = None) -> str:
    """A type and a shape as text: float32[2, 3]"""
    return str(dtype).removeprefix("torch.") + ("" if shape is None else str(list(shape)))


@lru_cache(maxsize=256)
def spec_of(text: str) -> Spec:
    """Rebuild a spec from its ``text``; each step turns the lists of JSON into tuples."""
    steps, interpolation, padding = json.loads(text)
    made = (STEPS[name](**arguments) for name, arguments in steps)
    return Spec(tuple(made), interpolation, padding)


def _check_order(steps: Sequence[Step]) -> None:
    for before, after in pairwise(steps):
        first, second = type(before).__name__, type(after).__name__
        if after.stage < before.stage:
            order = f"put the steps in the order {', '.join(STAGES)}"
            raise wrong(f"{second} comes after {first}", order)
        if after.stage == before.stage >= Normalize.stage:
            raise wrong(f"{second} is there twice", "keep one")
    contrasts = sum(isinstance(s, Colour) and s.needs_mean for s in steps)
    if contrasts > 1:
        what = f"{contrasts} steps change the contrast, and each needs the mean of a whole image"
        raise wrong(what, "keep one, or run two pipelines after each other")
