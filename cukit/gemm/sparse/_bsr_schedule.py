"""Static tile schedules of block-sparse products.

Computed on the host with NumPy, once per pattern and shape.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import HostArray

_EPILOGUE = 128
"""Cost of a tile's epilogue, in rows of the dense matrix that could be multiplied in that time."""

_MAX_EXCHANGES = 1000
_PARTNERS = 8  # number of least loaded blocks that are tried for an exchange


def assign_tiles(
    items: HostArray, costs: HostArray, num_blocks: int, exchange_keys: HostArray | None = None
) -> HostArray:
    """Assigns tiles to the blocks of a grid, so that all blocks finish at about the same time.

    items: int32 [tiles, 4]: the description of each tile. costs: int [tiles], in any unit. In the
    given order, each tile is assigned to the block that is free first. Then the most loaded blocks
    exchange tiles with the least loaded ones; if `exchange_keys` (int [tiles]) is given, only tiles
    with equal keys are exchanged.

    Returns int32 [blocks, turns, 4]: the tiles of each block in order; a first value of -1 ends the
    list. At most `num_blocks` blocks.
    """
    num_blocks = max(1, min(num_blocks, len(items)))
    owners = np.empty(len(items), np.int64)
    free = [(0, block) for block in range(num_blocks)]
    for index, cost in enumerate(costs.tolist()):
        at, block = free[0]
        owners[index] = block
        heapq.heapreplace(free, (at + cost, block))
    _exchange_tiles(owners, costs, num_blocks, exchange_keys)
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=num_blocks)
    turns = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
    work = np.full((num_blocks, int(counts.max(initial=0)) + 1, 4), -1, np.int32)
    work[owners[order], turns] = items[order]
    return work


def _exchange_tiles(
    owners: HostArray, costs: HostArray, num_blocks: int, exchange_keys: HostArray | None
) -> None:
    """Balances the total cost of each owner; modifies `owners`.

    Greedy assignment does not balance the last tiles: with few tiles of different costs, exchanges
    gain a few per cent.
    """
    loads = np.bincount(owners, costs, num_blocks).astype(np.int64)
    for _ in range(_MAX_EXCHANGES):
        last = loads.argmax()
        given = np.flatnonzero(owners == last)
        for first in np.argsort(loads, kind="stable")[:_PARTNERS]:
            gap = loads[last] - loads[first]
            taken = np.flatnonzero(owners == first)
            gains = costs[given][:, None] - costs[taken]
            useful = (gains > 0) & (gains < gap)
            if exchange_keys is not None:
                useful &= exchange_keys[given][:, None] == exchange_keys[taken]
            if useful.any():
                best = np.where(useful, abs(2 * gains - gap), gap).argmin()
                give, take = np.unravel_index(best, gains.shape)
                owners[given[give]], owners[taken[take]] = first, last
                loads[last] -= gains[give, take]
                loads[first] += gains[give, take]
                break
        else:
            return


def matmul_work(
    indptr: HostArray, n: int, block: int, tile_columns: int, num_blocks: int, *, padding: int = 1
) -> HostArray:
    """The schedule of sparse times dense: each tile's group, first column, entry begin and end.

    indptr: entries before each group of block rows. The tile of an empty group has the `padding`
    entries that are stored after all others.

    Tiles of the same columns are adjacent, groups with most entries first: concurrent tiles then
    read the same columns of the dense matrix, and the last tiles are short.
    """
    counts = np.diff(indptr)
    rows = np.argsort(-counts, kind="stable")
    starts = np.arange(0, n, tile_columns)
    items = np.empty((starts.size, rows.size, 4), np.int32)
    items[..., 0] = rows
    items[..., 1] = starts[:, None]
    items[..., 2] = np.where(counts[rows], indptr[rows], indptr[-1])
    items[..., 3] = np.where(counts[rows], indptr[rows + 1], indptr[-1] + padding)
    costs = np.tile(counts[rows] * block + _EPILOGUE, starts.size)
    return assign_tiles(
        items.reshape(-1, 4), costs, num_blocks, exchange_keys=np.repeat(starts, rows.size)
    )


def sampled_work(indptr: HostArray, steps: int, most: int, num_blocks: int) -> HostArray:
    """The schedule of a sampled product: each tile's group, first entry, entry count and k steps.

    Each group is divided into the fewest tiles of at most `most` entries, as even as possible.
    indptr: entries before each group of block rows.
    """
    counts = np.diff(indptr)
    pieces = -(-counts // most)
    rows = np.repeat(np.arange(counts.size), pieces)
    within = np.arange(rows.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = counts[rows] * within // pieces[rows]
    end = counts[rows] * (within + 1) // pieces[rows]
    items = np.stack([rows, indptr[rows] + first, end - first, np.full_like(rows, steps)], axis=1)
    return assign_tiles(items.astype(np.int32), np.ones(rows.size, np.int64), num_blocks)


class RowGroups(NamedTuple):
    """A pattern in groups of adjacent block rows, which share the reads of the dense matrix."""

    starts: HostArray
    """int32 [groups + 1]: entries before each group."""
    columns: HostArray
    """int32 [entries]: a block column in which a row of the group has a block; ascending."""
    block_indices: HostArray
    """int32 [entries, rows of a group]: the index of each row's block in that column, or -1."""


def group_rows(indptr: HostArray, entries: HostArray, num_columns: int, size: int) -> RowGroups:
    """Groups of `size` block rows. entries: block column and index of each block, by rows."""
    counts = np.diff(indptr)
    num_groups = -(-counts.size // size)
    rows = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    keys, places = np.unique(rows // size * num_columns + entries[:, 0], return_inverse=True)
    block_indices = np.full((keys.size, size), -1, np.int32)
    block_indices[places.ravel(), rows % size] = entries[:, 1]
    starts = np.searchsorted(keys, np.arange(num_groups + 1, dtype=np.int64) * num_columns)
    columns = keys % max(num_columns, 1)
    return RowGroups(starts.astype(np.int32), columns.astype(np.int32), block_indices)


def pad_groups(groups: RowGroups, count: int) -> RowGroups:
    """The groups with a multiple of `count` entries each. Padding has no blocks and column -1."""
    if count == 1:
        return groups
    counts = np.diff(groups.starts)
    padded = -(-counts // count) * count
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    places = np.arange(groups.columns.size) + np.repeat(starts[:-1] - groups.starts[:-1], counts)
    columns = np.full(starts[-1], -1, np.int32)
    columns[places] = groups.columns
    block_indices = np.full((starts[-1], groups.block_indices.shape[1]), -1, np.int32)
    block_indices[places] = groups.block_indices
    return RowGroups(starts, columns, block_indices)


def sampled_pieces(starts: HostArray, most: int) -> HostArray:
    """Tiles of at most `most` entries, int32 [tiles, 4]: group, entry begin and end, 0."""
    counts = np.diff(starts)
    groups = np.repeat(np.arange(counts.size), -(-counts // most))
    first_tiles = np.concatenate([[0], np.cumsum(-(-counts // most))])[:-1]
    within = np.arange(groups.size) - np.repeat(first_tiles, -(-counts // most))
    begin = starts[groups] + within * most
    end = np.minimum(begin + most, starts[groups + 1])
    return np.stack([groups, begin, end, np.zeros_like(begin)], axis=1).astype(np.int32)
