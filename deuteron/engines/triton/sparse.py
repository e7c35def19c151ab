"""Sparse matrices times dense ones: the recipes around ``kernels/triton/sparse.py``."""

from collections.abc import Sequence
from math import prod

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import SPARSE as OPS
from deuteron.engines.libraries import gathered_bytes
from deuteron.engines.recipes import Knobs
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton.common import MOST, one_operator, tensors_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.sparse import check_structure, column_count
from deuteron.target import Target

SIDES = (16, 32, 64)  # sides of blocks that tensor cores take
CHUNK, BLOCKS = 512, 32  # entries of a chunk, if they are numbers, and if they are blocks
IN_L2 = 2.0  # rows of x come out of L2 this many times as fast as a copy moves bytes
MOST_ACROSS = 65535  # most programs side by side


def _block(region: Region) -> tuple[int, ...]:
    """Height and width of an entry, () for numbers."""
    node = region.nodes[0]
    if node.op == "sddmm_csr":
        return tuple(node.attrs["block"])
    return region.graph.types[node.uses[2]].shape[1:]


def _dense(region: Region) -> list[TensorType]:
    """The dense factors: x, or left and right."""
    node, types = region.nodes[0], region.graph.types
    return [types[v] for v in node.uses[(2 if node.op == "sddmm_csr" else 3) : 4]]


def _refuse(region: Region, node: Node, target: Target) -> None:
    types, block, dense = region.graph.types, _block(region), _dense(region)
    for value in node.uses[: 4 - len(dense)]:
        apart = not types[value].is_layout("contiguous")
        refuse_if(apart, f"{value} is not in row-major order", f"to_layout({value}) first")
    for t in dense:
        apart = t.strides[1] != 1 and t.shape[1] > 1
        refuse_if(apart, f"numbers of a row of {t} are not adjacent", "to_layout(x) first")
    if block:
        odd = any(side not in SIDES for side in block)
        refuse_if(odd, f"blocks of {block}", f"use sides of {', '.join(map(str, SIDES))}")
        double = dense[0].dtype.short == "f64"
        refuse_if(double, "tensor cores take no blocks of f64", "use float32")
    entries, rows = types[node.uses[1]].shape[0], types[node.uses[0]].shape[0]
    many = max(entries, rows) > MOST or dense[0].shape[1] > 16 * MOST_ACROSS
    refuse_if(many, "has more rows, entries or columns than 32 bits count", "split the matrix")


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    """A warp reads 16 bytes per lane of a row, and several rows at once."""
    dense, block = _dense(region)[0], _block(region)
    wide, product = power_of_two(dense.shape[1]), region.ops[0] == "spmm_csr"
    tiles: Sequence[tuple[int, int, int]]
    if block:
        heavy = dense.dtype.bits == 32 and prod(block) > 1024  # float32 takes three products
        tiles = ((32, 8, 3), (32, 8, 2)) if heavy else ((128, 4, 3), (64, 4, 4))
        if not product:
            tiles = ((32, 8, 2), (16, 8, 2)) if heavy else ((64, 4, 2), (32, 4, 2))
        ways = [(max(min(c, wide), 16), 1, w, s) for c, w, s in tiles]
    elif product:
        lanes = 32 * 16 // (dense.dtype.bits // 8)  # numbers that a warp reads at once
        few = 4 if dense.dtype.is_low else 8  # entries that fit in registers beside the sums
        tiles = ((lanes, few, 1), (2 * lanes, 4, 2), (lanes, few // 2, 1), (lanes, 2 * few, 2))
        ways = [(min(c, wide), min(e * max(c // wide, 1), 64), w, 2) for c, e, w in tiles]
    else:
        ways = [(min(c, wide), e, 4, 2) for c, e in ((128, 16), (64, 16), (256, 8))]
    keys = ("columns", "entries", "warps", "stages")
    return [dict(zip(keys, way, strict=True)) for way in dict.fromkeys(ways)]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds to read a row of x for every entry out of L2, or to move all tensors once, whichever
    is longer."""
    gathered = gathered_bytes(region.graph, region.nodes[0])
    return max(gathered / IN_L2, region_cost(region).bytes) / target.stream + target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.sparse import Matrix, Tile, prepare_sddmm, prepare_spmm

    node, types = region.nodes[0], region.graph.types
    starts, columns = (types[v] for v in node.uses[:2])
    dense, block = _dense(region), _block(region)
    size = column_count(node, region.graph.in_types(node))
    split = _may_be_long(region, size, ctx)
    out, rows = types[region.outputs[0]], starts.shape[0] - 1
    lines = dense[0].strides[0], out.strides[0], dense[-1].strides[0]
    at = Matrix(rows, columns.shape[0], size, dense[0].shape[1], *lines, rows.bit_length())
    chunk = BLOCKS if block else CHUNK
    precision = "tf32" if ctx.policy.allow_tf32 else "tf32x3"
    h, w = block or (0, 0)
    tile = Tile(h, w, knobs["columns"], knobs["entries"], chunk, precision)
    kind, how = dense[0].dtype.torch, (knobs["warps"], knobs["stages"])
    assert kind is not None
    given = tensors_of(region, (*node.uses[:4], *region.outputs))
    if node.op == "sddmm_csr":
        call = prepare_sddmm(at, tile, kind, *how)
        return Kernel(lambda *ts: call(*given(ts)), writes=True, note="1 kernel")
    run, room = prepare_spmm(at, tile, kind, split, *how)
    note = "2 kernels" if room else "1 kernel"
    return Kernel(lambda *ts: run(*given(ts)), writes=True, workspace=room, note=note)


def _may_be_long(region: Region, size: int, ctx: BuildContext) -> bool:
    """Whether a row of the sparse matrix may have too many entries for one program. A structure
    that is known ahead is checked, which raises if it is invalid."""
    starts, columns = (ctx.constants.get(v) for v in region.nodes[0].uses[:2])
    if starts is None or starts.is_meta:
        return True
    if columns is not None:
        check_structure(starts, columns, size, region.ops[0])
    longest = int(starts.diff().max()) if starts.numel() > 1 else 0
    return longest >= 2 * (BLOCKS if _block(region) else CHUNK)


SPARSE = one_operator("sparse", OPS, _refuse, _knobs, _seconds, _build)
