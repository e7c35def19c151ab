"""Where the rows of a product, or of a convolution as a product, lie: offsets of runs of
numbers."""

from dataclasses import dataclass, field

import numpy as np

from deuteron.kernels.cpu import lanes

STRETCH = 512  # numbers of k in a stretch: so much of a panel stays in L1 beside the rows
# Floats in a vector → a k up to this is a single stretch: its panel then takes three quarters of
# L1, or is so wide that it is in L2 anyway, and storing and reading sums again would cost more
WHOLE = {4: 768, 8: 768, 16: 1024}


def row_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The offset of every row, [rows, 1], in row-major order over ``shape``."""
    total = np.zeros((), np.int64)
    for size, stride in zip(shape, strides, strict=True):
        total = np.add.outer(total, np.arange(size, dtype=np.int64) * stride)
    return total.reshape(-1, 1)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a product are: offsets [rows, segments] of A, and [rows, 1] of C and R.

    ``groups`` [groups, 4] says where each of several products of the same shape begins: the
    offset of its A, the number of its matrix among the packed ones, the offsets of its C and R.
    """

    a: np.ndarray
    c: np.ndarray
    r: np.ndarray | None
    length: int
    groups: np.ndarray = field(default_factory=lambda: np.zeros((1, 4), np.int64))
    spare: int = 0  # rows at the end of a panel that are not read


@dataclass(frozen=True)
class OuterRows:
    """:class:`Rows` where A is packed into panels as B is, so that the numbers of one k lie side by
    side: ``a`` [2, segments] says how far into a panel of A, and of B, each run begins. Panels lie
    ``pitch`` apart, and one k of a run lies ``steps`` behind the one before (in A, in B).
    ``groups`` begins with the offsets of the first panels of A, and of B."""

    a: np.ndarray
    c: np.ndarray
    r: np.ndarray | None
    length: int
    pitch: tuple[int, int]
    steps: tuple[int, int]
    groups: np.ndarray


def in_pieces(
    a: np.ndarray, length: int, steps: tuple[int, ...], fold: int
) -> tuple[np.ndarray, int, int]:
    """Cut runs that begin at ``a`` [rows, segments] into equal pieces if they are long. Returns
    where the pieces begin, their length, and how many of them make up a stretch. A run whose length
    has no fitting divisor stays whole: the kernel then sums it in parts."""
    fitting = [d for d in range(fold, fold // 4, -1) if length % d == 0 and d % 4 == 0]
    piece = fitting[0] if length > fold and fitting else length
    cuts = np.multiply.outer(np.array(steps), np.arange(length // piece) * piece)
    offsets = np.where(a[:, :, None] < 0, -1, a[:, :, None] + cuts[:, None])
    whole = a.shape[1] * length <= WHOLE[lanes()]
    offsets = offsets.reshape(len(a), -1)
    return offsets, piece, max(1, offsets.shape[1] if whole else STRETCH // piece)
