"""Exact top-k retrieval by inner product, without a matrix of scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    access_width,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    int32,
    runs_kernel,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_integer
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import graph_memory as reference
from cukit.reference.graph_memory import Retrieved
from cukit.registry import register

_STRUCTS = parameter_structs("graph_memory/parameters.cuh")
GROUP = 32
"""Rows per group; the first pass keeps only the best score of a group."""
_ACCESS = 8
"""Elements of a 16-byte copy."""
_MAX_DIM = 256
MAX_K = 256
_MAXIMA_BYTES = 128 << 20
"""Limit of the group maxima of a batch of queries. A batch of 256, the smallest, may exceed it."""
_CAPACITY = 4096
"""Keys of 8 bytes that a block can sort in shared memory."""
_MAX_ROWS = 2**31 - 4097
"""Row numbers are int32, and tiles may extend past the last row."""


def retrieve_top_k(queries: Array, memory: Array, k: int) -> Retrieved:
    """Exact (brute-force) retrieval of the `k` rows with the largest inner product, per query.

    Args:
        queries: float16|bfloat16 [num_queries, dim]; float32 and float64 on the CPU only. On the
            GPU dim must be a multiple of 8, at most 256.
        memory: dtype of queries, [num_rows, dim], C-contiguous.
        k: 1 to 256, at most num_rows.

    Returns:
        `Retrieved(scores, indices)`: float32 (float64 for float64) and int32 [num_queries, k], best
        first. Ties are ordered by index, lowest first; a score of NaN is treated as -infinity.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: `k` out of range, or a size that the kernel does not support.

    The matrix of scores is not stored: a first pass writes the best score of every 32 rows, then
    the k best groups, which contain the k best rows, are scored again. The run time does not depend
    on the scores. Runs on CuPy's current stream without synchronisation; accumulates in float32,
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> memory = np.array([[1, 0], [0, 2], [1, 1], [1, 0]], np.float32)
    >>> ck.retrieve_top_k(np.array([[1, 0]], np.float32), memory, 3).indices
    array([[0, 2, 3]], dtype=int32)
    """
    op = "retrieve_top_k"
    queries, memory = adopt(op, queries, memory)
    check_integer(op, "k", k, least=1, most=MAX_K)
    k = int(k)
    if not runs_kernel(op, queries, memory):
        _check(queries, memory, k)
        return reference.retrieve_top_k(queries, memory, k)
    prepared = _prepare(queries, memory, k)
    scores = empty(queries, (len(queries), k), float32)
    indices = empty(queries, (len(queries), k), int32)
    for first, launches in prepared:
        part = slice(first, first + launches.queries)
        _retrieve(launches, queries[part], memory, scores[part], indices[part], k)
    return Retrieved(scores, indices)


def _retrieve(
    launches: _Launches, queries: Array, memory: Array, scores: Array, indices: Array, k: int
) -> None:
    num_queries = len(queries)
    maxima = empty(queries, (num_queries, launches.groups), float32)
    launches.maxima(queries, memory, maxima)
    keys = empty(queries, (num_queries, launches.parts, k), np.uint64)
    launches.select(maxima, NULL, keys, NULL, NULL)
    for merge, parts in launches.merges:
        merged = empty(queries, (num_queries, parts, k), np.uint64)
        merge(NULL, keys, merged, NULL, NULL)
        keys = merged
    rescored = empty(queries, (num_queries, k, GROUP), np.uint64)
    launches.rescore(queries, memory, keys, rescored)
    launches.last(NULL, rescored, NULL, scores, indices)


@dataclass(frozen=True)
class MaximaConfig:
    """The launch configuration of the pass over all scores."""

    dtype: str
    width: int
    query_tiles: int
    query_warps: int
    row_warps: int
    rows: int
    """Rows per tile."""
    stages: int
    blocks: int

    @property
    def queries(self) -> int:
        """Queries per block."""
        return 16 * self.query_tiles * self.query_warps

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
        threads = 32 * self.query_warps * self.row_warps
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("WIDTH", self.width),
            ("QUERY_TILES", self.query_tiles),
            ("QUERY_WARPS", self.query_warps),
            ("ROW_WARPS", self.row_warps),
            ("ROWS", self.rows),
            ("STAGES", self.stages),
            ("THREADS", threads),
        )
        shared = self.stages * self.rows * self.width * 2
        return KernelSpec("graph_memory/group_maxima.cu", "group_maxima", defines, threads, shared)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


@cache
def plan_maxima(
    num_queries: int, num_rows: int, dim: int, dtype: str, device: Device
) -> MaximaConfig:
    """The launch configuration. All queries of a block share its loads of the memory, so a block
    has the most queries that fit in registers."""
    width = -(-dim // 64) * 64
    max_tiles = next(tiles for tiles in (4, 2, 1) if tiles * width <= 512)
    query_tiles = min(max_tiles, _power_of_two(-(-num_queries // 16)))
    query_warps = min(4, _power_of_two(-(-num_queries // (16 * query_tiles))))
    wide = width > 128
    rows = 64 if wide else 128
    row_warps = 2 if wide or query_warps == 4 else 4
    stage = rows * width * 2
    stages = min(4 if query_warps == 4 else 3, device.shared_bytes_per_block // stage)
    resident = 1 if query_warps == 4 else device.shared_bytes_per_sm // (stages * stage + 1024)
    blocks = max(1, min(-(-num_rows // rows), max(1, resident) * device.num_sms))
    return MaximaConfig(dtype, width, query_tiles, query_warps, row_warps, rows, stages, blocks)


@dataclass(frozen=True)
class SelectConfig:
    """The launch configuration of a selection of the k best entries of each query."""

    threads: int
    capacity: int
    parts: int

    def spec(self, from_scores: bool, last: bool) -> KernelSpec:
        """The kernel variant. from_scores: inputs are scores, not keys. last: outputs are scores
        and indices, not keys."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("FROM_SCORES", from_scores),
            ("LAST", last),
            ("CAPACITY", self.capacity),
            ("THREADS", self.threads),
        )
        return KernelSpec(
            "graph_memory/select_top.cu", "select_top", defines, self.threads, 8 * self.capacity
        )


@cache
def plan_select(count: int, k: int, num_queries: int | None, device: Device) -> SelectConfig:
    """The launch configuration. The `count` entries of a query are split into parts whose
    candidates fit in shared memory and, if `num_queries` is given and small, into enough parts to
    fill the GPU."""
    threads = 1024 if count > 4096 else 256
    capacity = _CAPACITY
    max_part = capacity // k * threads
    fill = 1
    if num_queries is not None:
        fill = min(count // (16 * threads), device.num_sms // max(num_queries, 1))
    return SelectConfig(threads, capacity, max(1, -(-count // max_part), fill))


class _Launches(NamedTuple):
    queries: int
    groups: int
    parts: int
    maxima: Launch
    select: Launch
    merges: list[tuple[Launch, int]]
    """Launches that merge the parts of a query until one is left, and the parts left after each."""
    rescore: Launch
    last: Launch


@launch_plan
def _prepare(queries: Array, memory: Array, k: int) -> list[tuple[int, _Launches]]:
    """First query and launches of each batch of queries."""
    _check(queries, memory, k)
    _check_limits_of_kernel(queries, memory)
    num_queries, num_rows = len(queries), len(memory)
    groups = -(-num_rows // GROUP)
    batch = max(256, _MAXIMA_BYTES // (4 * groups) // 256 * 256)
    by_count: dict[int, _Launches] = {}
    batches = []
    for first in range(0, num_queries, batch):
        count = min(batch, num_queries - first)
        if count not in by_count:
            by_count[count] = _launches(count, num_rows, queries.shape[1], queries.dtype.name, k)
        batches.append((first, by_count[count]))
    return batches


def _launches(num_queries: int, num_rows: int, dim: int, dtype: str, k: int) -> _Launches:
    device = current_device()
    config = plan_maxima(num_queries, num_rows, dim, dtype, device)
    groups = -(-num_rows // GROUP)
    scalars = (
        _STRUCTS["RetrieveParameters"].pack(
            num_queries=num_queries, num_rows=num_rows, dim=dim, num_groups=groups, k=k
        ),
    )
    grid = (config.blocks, -(-num_queries // config.queries))
    maxima = Launch(load_kernel(config.spec()), grid, scalars)
    rescore_spec = _rescore_spec(dtype, config.width)
    grid = (num_queries, -(-k // (rescore_spec.threads // 32)))
    rescore = Launch(load_kernel(rescore_spec), grid, scalars)
    select, parts = _select(groups, k, num_queries, device, from_scores=True)
    merges = []
    remaining = parts
    while remaining > 1:
        merge, remaining = _select(remaining * k, k, num_queries, device)
        merges.append((merge, remaining))
    last, _ = _select(k * GROUP, k, num_queries, device, last=True)
    return _Launches(num_queries, groups, parts, maxima, select, merges, rescore, last)


def _select(
    count: int,
    k: int,
    num_queries: int,
    device: Device,
    *,
    from_scores: bool = False,
    last: bool = False,
) -> tuple[Launch, int]:
    """A selection, and the number of parts per query after it."""
    config = plan_select(count, k, num_queries if from_scores else None, device)
    scalars = (_STRUCTS["SelectParameters"].pack(count=count, parts=config.parts, k=k),)
    spec = config.spec(from_scores, last)
    return Launch(load_kernel(spec), (num_queries, config.parts), scalars), config.parts


def _rescore_spec(dtype: str, width: int) -> KernelSpec:
    threads = 128
    defines = (("DTYPE", dtype), ("WIDTH", width), ("THREADS", threads))
    source = "graph_memory/rescore_groups.cu"
    return KernelSpec(source, "rescore_groups", defines, threads, threads // 32 * 64 * width)


def _check(queries: Array, memory: Array, k: int) -> None:
    op = "retrieve_top_k"
    check_array(op, "queries", queries, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(op, "memory", memory, dtypes=FLOAT_DTYPES, shape=(None, queries.shape[1]))
    check_same_dtype(op, queries=queries, memory=memory)
    if k > len(memory):
        raise ConfigError(f"{op}: k must be at most the number of rows ({len(memory)}), got {k}")


def _check_limits_of_kernel(queries: Array, memory: Array) -> None:
    op = "retrieve_top_k"
    check_array(op, "queries", queries, dtypes=(float16, bfloat16))
    dim = queries.shape[1]
    if dim % _ACCESS or not 0 < dim <= _MAX_DIM:
        raise ConfigError(
            f"{op}: dim must be a multiple of 8 and at most {_MAX_DIM} on the GPU, got {dim}"
        )
    if len(memory) > _MAX_ROWS:
        raise ArrayShapeError(f"{op}: memory must have at most {_MAX_ROWS} rows, got {len(memory)}")
    for name, array in (("queries", queries), ("memory", memory)):
        if access_width(_ACCESS, array) < _ACCESS:
            raise ArrayLayoutError(f"{op}: {name} must be 16-byte aligned; copy it")


def _specs(device: Device) -> list[KernelSpec]:
    specs: list[KernelSpec] = []
    for dtype in (float16.name, bfloat16.name):
        for num_queries, dim in ((256, 128), (4, 128), (64, 72), (300, 256)):
            specs.append(plan_maxima(num_queries, 1_000_000, dim, dtype, device).spec())
        specs += [_rescore_spec(dtype, width) for width in (128, 256)]
    for threads in (256, 1024):
        config = SelectConfig(threads, _CAPACITY, 1)
        specs += [config.spec(*which) for which in ((True, False), (False, False), (False, True))]
    return list(dict.fromkeys(specs))


register(
    name="retrieve_top_k",
    family="graph_memory",
    function=retrieve_top_k,
    reference=reference.retrieve_top_k,
    specs=_specs,
)
