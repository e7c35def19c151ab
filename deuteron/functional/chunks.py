"""How many logits of a linear loss exist at a time."""

from __future__ import annotations

import math

SMALL = 2**25  # logits that are no burden: 64 MB of 16-bit numbers


def tokens_at_once(
    tokens: int, hidden: int, classes: int, chunk: int | None, fast: bool = False
) -> int:
    """Enough rows for a product to run at full speed: half of H makes their logits half as large
    as the weight. The fast way holds the weight's gradient meanwhile and takes an eighth."""
    wanted = chunk or max(hidden // (8 if fast else 2), SMALL // classes, 1)
    parts = max(1, math.ceil(tokens / wanted))
    return max(1, math.ceil(tokens / parts))


def classes_at_once(tokens: int, hidden: int, classes: int, chunk: int | None) -> int:
    """A power of two of classes whose logits are about a sixteenth of the weight; with a chunk,
    no more numbers than it has."""
    if chunk:
        most = max(1, min(chunk, tokens) * classes // max(tokens, 1))
        return min(classes, 1 << (most.bit_length() - 1))
    wanted = max(hidden * classes // 16, SMALL) / max(tokens, 1)
    return min(classes, 1 << max(0, round(math.log2(wanted))))
