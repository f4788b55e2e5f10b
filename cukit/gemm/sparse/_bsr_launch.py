"""Launches of the block-sparse kernels, each for one pattern and fixed shapes and strides."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.core.arrays import Array, HostArray, bfloat16
from cukit.core.device import current_device
from cukit.core.kernel import Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.gemm.sparse._bsr_plan import TILE_SM80, BsrMatmulConfig, BsrSampledConfig
from cukit.gemm.sparse._bsr_schedule import (
    group_rows,
    matmul_work,
    pad_groups,
    sampled_pieces,
    sampled_work,
)
from cukit.gemm.sparse.block_sparse import BlockPattern

_AHEAD = 32
"""Entries whose indices the producer warp loads at a time."""

_ZERO_ROWS = 4096
"""Rows of the array of zeros from which missing blocks are loaded. With a single block, all these
loads would access one slice of L2, and its bandwidth would limit the kernel."""

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["BsrParameters"]


class MatmulSm90:
    """A launch of bsr_matmul_sm90.cu: op(sparse) @ op(dense), [m, n].

    xp: the namespace of the arrays.
    """

    __slots__ = ("_dense", "_index", "_launch", "_out", "_values", "_zeros")

    def __init__(
        self, config: BsrMatmulConfig, pattern: BlockPattern, m: int, n: int, xp: Any
    ) -> None:
        tiling, transposed = config.tiling, config.transposed
        assert tiling is not None
        k = pattern.shape[not transposed.sparse]
        entries = group_rows(*pattern.entries(transposed.sparse), k // tiling.block, tiling.slots)
        groups = pad_groups(entries, tiling.stage_entries)
        cluster = tiling.cluster
        num_clusters = current_device().num_sms // cluster
        work = matmul_work(
            groups.starts,
            n,
            tiling.block,
            tiling.columns * cluster,
            num_clusters,
            padding=tiling.stage_entries,
        )
        # After the last entry: the entries of empty groups, and entries that a warp reads ahead.
        columns = np.append(groups.columns, np.full(_AHEAD, -1, np.int32))
        no_blocks = np.full((_AHEAD, tiling.slots), -1, np.int32)
        block_indices = np.append(groups.block_indices, no_blocks, axis=0)
        self._zeros = xp.zeros((_ZERO_ROWS, tiling.block), _dtype(config.dtype))
        self._index = _copied(xp, work, columns, block_indices)
        rows, turns, _ = work.shape
        scalars = (np.int32(n), np.int32(turns))
        self._launch = Launch(load_kernel(config.spec()), (rows * cluster,), scalars)
        box_rows, box_columns = _box(
            tiling.part_k, tiling.block, not transposed.sparse, tiling.block
        )
        self._values = _maps(box_rows // cluster, box_columns)
        self._out = _maps(64, 64)
        if config.wide_box:
            box = (tiling.width // 64, tiling.part_k, 64)
            self._dense = TensorMapCache(partial(_encode_parts, box=box))
        else:
            self._dense = _maps(*_box(tiling.part_k, tiling.width, transposed.dense))

    def __call__(self, values: Array, dense: Array, out: Array) -> None:
        self._launch(
            self._values(_rows(values)),
            self._values(self._zeros),
            self._dense(_rows(dense)),
            self._out(_rows(out)),
            *self._index,
        )


class SampledSm90:
    """A launch of bsr_sampled_sm90.cu: blocks of op(a) @ op(b), inner extent k."""

    __slots__ = ("_a", "_b", "_index", "_launch", "_values")

    def __init__(self, config: BsrSampledConfig, pattern: BlockPattern, k: int, xp: Any) -> None:
        tiling = config.tiling
        assert tiling is not None
        block = tiling.block
        groups = group_rows(*pattern.entries(False), pattern.grid[1], tiling.slots)
        steps, most = -(-k // tiling.tile_k), tiling.columns // block
        work = sampled_work(groups.starts, steps, most, current_device().num_sms)
        self._index = _copied(xp, work, groups.columns, groups.block_indices)
        num_blocks, turns, _ = work.shape
        self._launch = Launch(load_kernel(config.spec()), (num_blocks,), (np.int32(turns),))
        self._a = _maps(*_box(tiling.tile_k, tiling.rows, not config.a_transposed))
        self._b = _maps(*_box(tiling.tile_k, block, config.b_transposed, block))
        self._values = _maps(min(block, 64), min(block, 64))

    def __call__(self, a: Array, b: Array, values: Array) -> None:
        self._launch(self._a(_rows(a)), self._b(b), self._values(_rows(values)), *self._index)


class MatmulSm80:
    """A launch of bsr_matmul_sm80.cu: op(sparse) @ op(dense), [m, n]."""

    __slots__ = ("_index", "_launch")

    def __init__(
        self, config: BsrMatmulConfig, pattern: BlockPattern, m: int, n: int, xp: Any
    ) -> None:
        block = config.block
        indptr, entries = pattern.entries(config.transposed.sparse)
        k = pattern.shape[not config.transposed.sparse]
        groups = group_rows(indptr, entries, k // block, TILE_SM80 // block)
        order = np.argsort(-np.diff(groups.starts), kind="stable").astype(np.int32)
        self._index = _copied(xp, order, *groups)
        parameters = _PARAMETERS.pack(m=m, n=n, k=k, groups=order.size)
        grid = (order.size * -(-n // TILE_SM80),)
        self._launch = Launch(load_kernel(config.spec()), grid, (parameters,))

    def __call__(self, values: Array, dense: Array, out: Array) -> None:
        self._launch(values, dense, out, *self._index)


class SampledSm80:
    """A launch of bsr_sampled_sm80.cu: blocks of op(a) @ op(b), inner extent k."""

    __slots__ = ("_index", "_launch")

    def __init__(self, config: BsrSampledConfig, pattern: BlockPattern, k: int, xp: Any) -> None:
        (m, n), slots = pattern.shape, TILE_SM80 // config.block
        groups = group_rows(*pattern.entries(False), n // config.block, slots)
        tiles = sampled_pieces(groups.starts, slots)
        self._index = _copied(xp, tiles, groups.columns, groups.block_indices)
        parameters = _PARAMETERS.pack(m=m, n=n, k=k, groups=groups.starts.size - 1)
        self._launch = Launch(load_kernel(config.spec()), (len(tiles),), (parameters,))

    def __call__(self, a: Array, b: Array, values: Array) -> None:
        self._launch(a, b, values, *self._index)


def _copied(xp: Any, *arrays: HostArray) -> tuple[Array, ...]:
    """Copies arrays to the device and synchronises the current stream, because later launches on
    other streams do not wait for these copies."""
    copies = tuple(map(xp.asarray, arrays))
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return copies


def _box(tile_k: int, extent: int, k_major: bool, width: int = 64) -> tuple[int, int]:
    """The TMA box of an operand, (rows, columns). k_major: k is its last axis, else its first."""
    return (extent, tile_k) if k_major else (tile_k, min(width, 64))


def _dtype(name: str) -> np.dtype[Any]:
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def _maps(rows: int, columns: int) -> TensorMapCache:
    encode = partial(encode_tensor_map, box=(rows, columns), swizzle_bytes=2 * columns)
    return TensorMapCache(encode)


def _encode_parts(array: Array, *, box: tuple[int, int, int]) -> Any:
    """A tensor map of [k, n] as [n / 64, k, 64]."""
    k, n = array.shape
    return encode_tensor_map(array.reshape(k, n // 64, 64).transpose(1, 0, 2), box)


def _rows(array: Array) -> Array:
    """The array with all axes but the last flattened, which stacks the blocks of values."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])
