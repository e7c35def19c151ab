"""``dt.augment.Pipeline``: random changes to a batch of images, in one kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deuteron.augment import run
from deuteron.augment.draw import PLACES, drawn, table_for
from deuteron.augment.emit import emit
from deuteron.augment.spec import Spec, shown, wrong
from deuteron.augment.step import Size, Step
from deuteron.errors import BindError, EngineError
from deuteron.frontends.builder import Graph
from deuteron.functional.explain import explain
from deuteron.ops import Sym


class Pipeline(nn.Module):
    """Steps that change each image of a batch in its own random way, all in one kernel.

    >>> aug = dt.augment.Pipeline([
    ...     RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)),
    ...     RandomResizedCrop(224), HorizontalFlip(0.5),
    ...     ColorJitter(0.4, 0.4, 0.4, 0.1),
    ...     Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ...     ToDtype(torch.float16), ToLayout("nhwc"),
    ... ], seed=0)
    >>> y = aug(x)                      # x [N, C, H, W], uint8 0…255 or floats 0…1, CPU or GPU
    >>> y = aug(x, index=ids, step=3)   # parameters by the numbers of the images, of step 3
    >>> aug.parameters_for(4, step=3, size=(224, 224))["0.RandomAffine.angle"]

    ``steps`` come in this order: geometric ones, colours, Normalize, ToDtype, ToLayout. The
    geometric ones are multiplied to one matrix per image, so pixels are interpolated once, however
    many there are. ``interpolation`` is "bilinear", "nearest" or "bicubic"; ``padding`` says what
    lies outside the image, "zeros" or "border" (None: border if there are only crops and flips,
    else zeros).

    An image's random parameters depend on ``seed``, the step (each call is one; ``state_dict`` has
    the count) and the image's number, which is its place in the batch, or what ``index`` says. They
    are the same on every device. Gradients reach ``x`` if it is a float;
    ``torch.compile(fullgraph=True)`` takes the call as one operator.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        seed: int = 0,
        interpolation: str = "bilinear",
        padding: str | None = None,
    ) -> None:
        super().__init__()
        if not _is_int64(seed):
            raise wrong(f"seed={seed!r} is not a 64-bit integer", "e.g. seed=0")
        self.spec = Spec.make(steps, interpolation, padding)
        count = len(self.spec.steps)
        if count > PLACES:
            raise wrong(f"{count} steps are more than {PLACES}", "run two pipelines one by one")
        self.seed = seed
        self._step = torch.zeros((), dtype=torch.int64)  # a tensor, so that a trace can count

    def forward(
        self, x: torch.Tensor, *, index: torch.Tensor | None = None, step: int | None = None
    ) -> torch.Tensor:
        """Return the changed images. ``index``: the images' numbers, their places in the batch if
        it is None. ``step``: which step's parameters to use; without it the pipeline counts its
        calls.
        """
        _check_call(x, index, step)
        self.spec.check_image(x.shape, x.dtype)
        if torch.compiler.is_compiling():
            traced = self._step.clone() if step is None else torch.tensor(step)
            table = run.augment_draw(x.detach(), traced, index, self.spec.text, self.seed)
        else:
            table = self.table(x, step=self.step if step is None else step, index=index)
        if step is None:
            self._step.add_(1)
        return self.with_table(x, table)

    def table(
        self, x: torch.Tensor, *, step: int, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parameters of ``step`` for images like ``x``, as :meth:`with_table` wants
        them.

        [N, columns]: a 3×3 matrix from places of the result to those of the image, by columns,
        then three numbers per colour step. Do not write to it: it is shared; clone it instead.
        """
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            wrong = "a captured call would repeat its random parameters for ever"
            remedy = "capture aug.with_table(x, table) and copy aug.table(x, step=…) into it"
            raise EngineError(wrong, asked="a pipeline under CUDA Graph capture", remedy=remedy)
        return table_for(self.spec, self.seed, step, x, index)

    def with_table(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the images changed with the parameters in ``table``; nothing is drawn or counted.

        A table that requires a gradient gets one, computed by torch's operators. Clone the result
        of :meth:`table` before you require one.
        """
        return run.call(x, table, self.spec.text)

    def explain(self, x: torch.Tensor) -> str:
        """Say what a call with images like ``x`` runs and what that costs; no call is counted.

        On a GPU that is one launch of the kernel, or two where images are few and large, with the
        bytes and the time that they take; on the CPU it is a plan.
        """
        return explain(self, x, step=self.step)

    def parameters_for(
        self, n: int | torch.Tensor, step: int = 0, size: Size = (224, 224)
    ) -> dict[str, torch.Tensor]:
        """Return by name the parameters that ``n`` images of ``size`` (or those with the numbers in
        a tensor ``n``) get at ``step``.

        The keys are ``"<place>.<step>.<parameter>"`` and ``"matrix"``; angles are in degrees,
        moves in pixels.
        """
        _check_wanted(n, step, size)
        which = n.to("cpu", torch.int64) if isinstance(n, torch.Tensor) else torch.arange(n)
        named, _ = drawn(self.spec, self.seed, torch.tensor([step]), which, size)
        return {name: value[0] for name, value in named.items()}

    def emit(self, g: Graph, x: Sym, table: Sym | None = None, name: str = "augment") -> Sym:
        """Add this pipeline to ``g`` as nodes, to be planned with what follows.

        The table of parameters becomes an input called ``name`` unless a handle is given; bind
        it to ``aug.table(tensor, step=…)`` in every run.
        """
        if table is None:
            table = g.tensor(name, *run.table_type(self.spec, x.type))
        return emit(g, self.spec, x, table)

    # ---- state

    @property
    def step(self) -> int:
        """How many batches have gone through: the step of the next call."""
        return int(self._step)

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed, "step": self.step}

    def set_extra_state(self, state: Any) -> None:
        self.seed = int(state["seed"])
        self._step.fill_(int(state["step"]))

    def extra_repr(self) -> str:
        steps = ",\n".join(map(repr, self.spec.steps))
        return f"{steps},\nseed={self.seed}, interpolation={self.spec.interpolation!r}"


def _is_int64(number: Any) -> bool:
    whole = isinstance(number, int) and not isinstance(number, bool)
    return whole and -(2**63) <= number < 2**63


def _check_call(x: Any, index: Any, step: Any) -> None:
    asked = "a pipeline on images"
    for name, given in (("x", x), ("index", index)):
        if not isinstance(given, torch.Tensor) and (given is not None or name == "x"):
            what = f"{name} is a {type(given).__name__}, not a tensor"
            raise BindError(what, asked=asked, remedy=f"torch.as_tensor({name})")
    if step is not None and not _is_int64(step):
        what = f"step={step!r} is not a 64-bit integer"
        raise BindError(what, asked=asked, remedy="count from 0, or leave it out")
    if index is not None and (index.shape != x.shape[:1] or index.is_floating_point()):
        what = f"index is {shown(index.dtype, index.shape)}"
        raise BindError(what, asked=asked, remedy=f"give {x.shape[0]} integers, one per image")


def _check_wanted(n: Any, step: Any, size: Any) -> None:
    numbers = isinstance(n, torch.Tensor) and n.ndim == 1 and not n.is_floating_point()
    sides = tuple(size) if isinstance(size, tuple | list) else ()
    fine = len(sides) == 2 and all(_is_int64(s) and s > 0 for s in sides)
    if not ((numbers or (_is_int64(n) and n >= 0)) and fine and _is_int64(step)):
        wrong = f"n={n!r}, step={step!r}, size={size!r} are not images, a step and their size"
        remedy = "e.g. n=4 or a tensor of their numbers, step=0, size=(224, 320)"
        raise BindError(wrong, asked="parameters_for", remedy=remedy)
