"""The checks of attention and of its gradients: they give the shape of the result, or an error that
says what is wrong with the inputs and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deuteron.errors import GraphError
from deuteron.ir.dtype import bool_, float32, int32, int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import broadcast, check_index, one_dtype
from deuteron.ops.opdef import Given
from deuteron.ops.score_program import READS, program


def checked(
    name: str,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    bias: Given,
    slopes: Given = None,
    seed: Given = None,
    *more: Given,
    **how: Any,
) -> Shape:
    """Return the shape of the result; raise a GraphError if the inputs do not fit."""
    one_dtype(name, q=q, k=k, v=v)
    if q.rank not in (3, 4) or not k.rank == v.rank == q.rank:
        wrong = f"{name} needs q, k and v of rank 4, not {q.rank}, {k.rank} and {v.rank}"
        remedy = "reshape them to [batch, heads, length, features]; all may be without a batch"
        raise GraphError(wrong, remedy=remedy)
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        wrong = f"{name} got batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]} in q, k and v"
        raise GraphError(wrong, remedy="give q, k and v one batch size (expand)")
    if q.shape[-1] != k.shape[-1]:
        wrong = f"q has {q.shape[-1]} features and k has {k.shape[-1]}"
        raise GraphError(wrong, remedy="the last sizes of q and k must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        wrong = f"k {list(k.shape)} and v {list(v.shape)} differ in heads or length"
        raise GraphError(wrong, remedy="give one value for each key")
    heads, shared = q.shape[-3], k.shape[-3]
    if heads % shared if shared else heads:
        wrong = f"{heads} query heads cannot share {shared} key heads"
        raise GraphError(wrong, remedy="the query heads must be a multiple of the key heads")
    scores = (*q.shape[:-1], k.shape[-2])
    if bias is not None and bias.dtype not in (bool_, float32, q.dtype):
        wrong = f"the bias of {name} is {bias.dtype.name}, q is {q.dtype.name}"
        remedy = "give bool (true: may look), float32 or the element type of q"
        raise GraphError(wrong, remedy=remedy)
    if bias is not None and (bias.rank > q.rank or broadcast(bias.shape, scores) != scores):
        wrong = f"the bias {list(bias.shape)} of {name} does not broadcast to scores {list(scores)}"
        raise GraphError(wrong, remedy="give [heads, Sq, Sk] sizes that are equal or 1")
    if slopes is not None and (slopes.shape, slopes.dtype) != ((heads,), float32):
        wrong = f"the slopes of {name} are {slopes}, and there are {heads} heads of queries"
        raise GraphError(wrong, remedy=f"give one float32 for each head, [{heads}]")
    _check_sight(name, seed, **how)
    rest: list[Given] = [*more, *[None] * (4 + READS)]
    of_queries, of_keys, blocks, turned, *captured = rest
    _check_lengths(name, q, bias, of_queries, of_keys, **how)
    several = of_queries is not None or of_keys is not None
    _check_blocks(name, q, k, blocks, turned, several, **how)
    _check_functions(name, slopes, captured, **how)
    return (*q.shape[:-1], v.shape[-1])


def _check_sight(
    name: str,
    seed: Given,
    window: Shape | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    **_: Any,
) -> None:
    if window is not None and (len(window) != 2 or min(window) < -1):
        wrong = f"the window {window} of {name} is not (left, right)"
        raise GraphError(wrong, remedy="give how many keys a query sees on each side, -1 for all")
    if not 0.0 <= softcap < math.inf:
        raise GraphError(f"softcap={softcap} of {name}", remedy="give a positive number, or 0")
    if not 0.0 <= dropout < 1.0:
        raise GraphError(f"dropout={dropout} of {name}", remedy="give a number from 0 to below 1")
    if dropout and seed is None:
        raise GraphError(f"dropout={dropout} of {name} without a seed", remedy="give a seed")
    if seed is not None and (seed.rank, seed.dtype) != (0, int64):
        raise GraphError(f"the seed is {seed}, not one int64", remedy="give a rank-0 int64 tensor")


def _check_lengths(
    name: str,
    q: TensorType,
    bias: Given,
    of_queries: Given = None,
    of_keys: Given = None,
    packed: bool = False,
    **_: Any,
) -> None:
    given = [t for t in (of_queries, of_keys) if t is not None]
    for t in given:
        check_index(t, int64, int32)
    if packed:
        alone = q.rank == 3 or q.shape[0] == 1
        if len(given) < 2 or not alone or given[0].rank != 1 or given[0].shape != given[1].shape:
            wrong = f"{name} of packed sequences got q {list(q.shape)} and starts {given}"
            remedy = "give q [heads, tokens, features], and [sequences + 1] starts for q and for k"
            raise GraphError(wrong, remedy=remedy)
        if not given[0].numel:
            raise GraphError(
                "there are no starts", remedy="give [0, …] and where the last one ends"
            )
        if bias is not None:
            raise GraphError(f"{name} of packed sequences with a bias", remedy="give a function")
    elif given and (q.rank != 4 or any(t.shape != q.shape[:1] for t in given)):
        wrong = f"{name} got lengths {[list(t.shape) for t in given]} for q {list(q.shape)}"
        raise GraphError(wrong, remedy="give q a batch, and one length for each of its elements")


def _check_blocks(
    name: str,
    q: TensorType,
    k: TensorType,
    blocks: Given = None,
    turned: Given = None,
    lengths: bool = False,
    side: int = 0,
    **how: Any,
) -> None:
    given = [t for t in (blocks, turned) if t is not None]
    if not given and not side:
        return
    if len(given) != 2 or side < 1:
        raise GraphError(
            f"{name} got half a table of blocks", remedy="give one of dt.functional.block_mask"
        )
    if lengths or how["causal"] or how["window"] is not None:
        wrong = f"{name} got a table of blocks beside causal, a window or lengths"
        raise GraphError(wrong, remedy="put them in the mask that the table is made of")
    lines, columns = (-(-t.shape[-2] // side) for t in (q, k))
    front = (q.shape[0] if q.rank > 3 else 1, q.shape[-3])
    for t, ends in ((given[0], (lines, 3 + columns)), (given[1], (columns, 3 + lines))):
        fits = t.rank == 4 and t.dtype == int32 and t.shape[2:] == ends
        if not fits or any(n not in (1, most) for n, most in zip(t.shape, front, strict=False)):
            wrong = f"a table of blocks {t} is not one for q {list(q.shape)} and k {list(k.shape)}"
            raise GraphError(
                wrong, remedy="make it with dt.functional.block_mask for these lengths"
            )


def _check_functions(
    name: str,
    slopes: Given,
    captured: Sequence[Given],
    score: str,
    mask: str,
    softcap: float,
    **_: Any,
) -> None:
    if score and (softcap or slopes is not None):
        raise GraphError(f"{name} got a function of scores beside a soft cap or slopes",
                         remedy="write them in the function")  # fmt: skip
    for text in filter(None, (score, mask)):
        for step in program(text).steps:
            at = step.reads
            tensor = None if at is None else captured[at]
            if at is not None and (tensor is None or tensor.rank != len(step.args)):
                wrong = f"{step} does not fit what is captured, {tensor}"
                raise GraphError(wrong, remedy="give attention the function itself")
