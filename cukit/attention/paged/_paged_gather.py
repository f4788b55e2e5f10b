"""Prefill over a copy of a paged cache's keys and values.

The Hopper forward loads cache blocks of 16-bit elements by TMA. A TMA box holds at most one block,
so small blocks take longer; blocks that are not a multiple of 8 keys are loaded row by row, and
quantised keys are not supported. Copying the keys to 16-bit blocks of one tile reads them once
more, but is faster if there are many queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukit.attention.flash._arguments import PARAMETERS, ScoreOptions, strides_of
from cukit.attention.flash._problem import AttentionProblem, ceil_div
from cukit.attention.paged._paged_arguments import COPIES, PagedArrays, PagedScratch, take
from cukit.attention.paged._paged_prefill import (
    PagedForward,
    PreparedForward,
    PreparedPrefill,
    problem_of_pages,
    uses_forward,
)
from cukit.attention.paged._paged_prefill_plan import (
    GatherConfig,
    plan_gather,
    prefers_gather,
    short_queries,
)
from cukit.attention.paged.cache_arrays import scale_strides
from cukit.core.arrays import Array, int32
from cukit.core.device import current_device
from cukit.core.kernel import NULL, Launch, load_kernel
from cukit.core.parameters import parameter_structs

ANY_QUERIES = 2**31 - 1
_SCRATCH_BYTES = 1 << 30
"""Upper bound of the copy, unless a single request needs more: requests are processed in parts."""
_SMALL_BYTES = 256 << 20
"""Upper bound of a copy that saves little: with boxes of 16 rows, at most 7 % of the time."""
_MUCH_SLOWER = 1.2
"""PagedForwardConfig.slowdown from which _SMALL_BYTES does not apply."""
_MAX_REQUESTS = 1 << 16
"""Requests per part."""


def prepare_prefill(
    arrays: PagedArrays,
    cache_format: str,
    options: ScoreOptions,
    problem: AttentionProblem,
    forward: Callable[[], PagedForward],
    *,
    mapped: bool,
    batch_invariant: bool,
) -> tuple[PreparedForward | None, int]:
    """The launches of a call on the Hopper forward, or None, and the number of queries up to which
    requests run on the decode kernel.

    problem: from problem_of_pages. forward: returns the forward over the caches. mapped: whether
    TMA can read the queries.
    """
    if not uses_forward(problem, cache_format, mapped=mapped, batch_invariant=batch_invariant):
        return None, ANY_QUERIES
    max_queries = 0 if batch_invariant else short_queries(problem)
    device = current_device()
    block_size = arrays.k_cache.shape[1]
    if not cache_format:  # the forward does not read quantised keys
        direct = forward()
        slowdown = direct.config.slowdown
        copied = prefers_gather(problem, slowdown, device, batch_invariant=batch_invariant)
        if not copied or (
            slowdown < _MUCH_SLOWER
            and arrays.batch * _bytes_of_request(arrays, problem) > _SMALL_BYTES
        ):
            prefill = PreparedPrefill(direct, problem, arrays, min_queries=max_queries + 1)
            return prefill, max_queries
    group = 0
    if cache_format == "int4" and arrays.k_scales is not None:
        group = block_size // arrays.k_scales.shape[1]
    recent = arrays.recent_k is not None
    config = plan_gather(problem, cache_format, group, device, recent=recent)
    return PreparedGather(config, options, arrays, max_queries + 1), max_queries


class _Copy:
    """A copy of the keys and values of consecutive requests, and the forward over it."""

    __slots__ = ("_attend", "_gather", "_keys", "_options", "_shapes")

    def __init__(
        self, config: GatherConfig, options: ScoreOptions, arrays: PagedArrays, min_queries: int
    ) -> None:
        q, k_cache, v_cache, k_scales, v_scales, block_table, *_ = arrays
        batch = arrays.batch
        _, block_size, heads, _ = k_cache.shape
        recent_rows = 0 if arrays.recent_k is None else arrays.recent_k.shape[1]
        max_keys = block_table.shape[1] * block_size + recent_rows
        tiles = ceil_div(max_keys, config.block)
        blocks = batch * tiles, config.block, heads
        widths = config.problem.head_dim, config.problem.head_dim_v
        self._shapes = (*((*blocks, width) for width in widths), (batch, tiles))
        parameters = parameter_structs(PARAMETERS)["GatherParameters"].pack(
            k=strides_of(k_cache),
            v=strides_of(v_cache),
            k_factors=scale_strides(k_scales),
            v_factors=scale_strides(v_scales),
            recent_k=(0, 0, 0) if arrays.recent_k is None else strides_of(arrays.recent_k),
            recent_v=(0, 0, 0) if arrays.recent_v is None else strides_of(arrays.recent_v),
            heads=heads,
            seq_q=0 if arrays.cu_seqlens_q is not None else q.shape[1],
            max_keys=max_keys,
            recent_rows=recent_rows,
            block_size=block_size,
            table_row=block_table.strides[0] // block_table.itemsize,
            tiles=tiles,
            window_left=options.bounded_left,
            min_queries=min_queries,
        )
        grid = config.grid(batch * tiles)
        self._gather = Launch(load_kernel(config.spec()), (grid,), (parameters,))
        self._options = options
        self._keys = max_keys, min_queries
        self._attend: PreparedPrefill | None = None  # planned with the first copy

    def reserve(self, arrays: PagedArrays, scratch: PagedScratch) -> None:
        """Takes the memory of the copy and of the forward from `scratch`."""
        copied = self._copied(arrays, *self._blocks(arrays.q, scratch))
        self._forward(copied).reserve(copied, scratch)

    def __call__(
        self, arrays: PagedArrays, out: Array, lse: Any, scratch: PagedScratch | None
    ) -> None:
        """Launches the kernels."""
        blocks = self._blocks(arrays.q, scratch)
        self._gather(
            *(arrays.k_cache, arrays.v_cache, arrays.k_scales, arrays.v_scales),
            *(arrays.k_zeros, arrays.v_zeros, arrays.block_table, arrays.seq_lens),
            *(arrays.cu_seqlens_q, arrays.recent_k, arrays.recent_v, arrays.rings),
            *(arrays.packed_lens, *blocks),
        )
        copied = self._copied(arrays, *blocks)
        self._forward(copied).launch(copied, out, lse, scratch)

    def _forward(self, copied: PagedArrays) -> PreparedPrefill:
        """The forward over the copy."""
        if self._attend is None:
            problem = problem_of_pages(copied, "", self._options)
            forward = PagedForward(problem, self._options, copied)
            self._attend = PreparedPrefill(forward, problem, copied, *self._keys)
        return self._attend

    def _blocks(self, like: Array, scratch: PagedScratch | None) -> tuple[Array, Array, Array]:
        """The copied keys and values, and their block table."""
        dtypes = like.dtype, like.dtype, int32
        k, v, table = (
            take(scratch, like, name, shape, dtype)
            for name, shape, dtype in zip(COPIES, self._shapes, dtypes, strict=True)
        )
        return k, v, table

    @staticmethod
    def _copied(arrays: PagedArrays, k: Array, v: Array, blocks: Array) -> PagedArrays:
        """The call with the copy as its cache."""
        q, *_, seq_lens, sinks, out, cu_seqlens_q = arrays[:10]
        return PagedArrays(q, k, v, None, None, blocks, seq_lens, sinks, out, cu_seqlens_q)


class PreparedGather(PreparedForward):
    """A planned call through a copy of the cache."""

    __slots__ = ("_copies",)

    def __init__(
        self, config: GatherConfig, options: ScoreOptions, arrays: PagedArrays, min_queries: int
    ) -> None:
        problem = config.problem
        super().__init__(arrays.q.shape, problem.head_dim_v)
        bytes_each = max(1, _bytes_of_request(arrays, problem))
        most = min(_MAX_REQUESTS, max(1, _SCRATCH_BYTES // bytes_each))
        size = max(1, ceil_div(arrays.batch, max(1, ceil_div(arrays.batch, most))))
        self._copies: list[tuple[slice, _Copy]] = []
        planned: dict[int, _Copy] = {}
        for first in range(0, arrays.batch, size):
            requests = slice(first, min(first + size, arrays.batch))
            part = _part(arrays, requests)
            if part.batch not in planned:
                planned[part.batch] = _Copy(config, options, part, min_queries)
            self._copies.append((requests, planned[part.batch]))

    def reserve(self, arrays: PagedArrays, scratch: PagedScratch) -> None:
        """Takes the memory that all copies share from `scratch`."""
        for requests, copy in self._copies:
            copy.reserve(_part(arrays, requests), scratch)

    def launch(
        self, arrays: PagedArrays, out: Array, lse: Any, scratch: PagedScratch | None = None
    ) -> None:
        """Launches the kernels; `out` is not empty."""
        if len(self._copies) == 1:
            self._copies[0][1](arrays, out, lse, scratch)
            return
        packed = arrays.cu_seqlens_q is not None
        for requests, copy in self._copies:
            rows = slice(None) if packed else requests
            copy(_part(arrays, requests), out[rows], lse if lse is NULL else lse[rows], scratch)


def _bytes_of_request(arrays: PagedArrays, problem: AttentionProblem) -> int:
    """Bytes of the copy of a request whose row of the block table is full."""
    block_size, heads = arrays.k_cache.shape[1:3]
    width = problem.head_dim + problem.head_dim_v
    return int(arrays.block_table.shape[1] * block_size * heads * width * arrays.q.itemsize)


def _part(arrays: PagedArrays, requests: slice) -> PagedArrays:
    """The arrays of some of the requests. Packed queries and outputs stay as they are."""
    ends = arrays.cu_seqlens_q
    fields: tuple[str, ...] = ("block_table", "seq_lens", "rings", "packed_lens")
    if ends is None:
        fields = (*fields, "q", "out")
    else:
        arrays = arrays._replace(cu_seqlens_q=ends[requests.start : requests.stop + 1])
    given = ((name, getattr(arrays, name)) for name in fields)
    return arrays._replace(**{name: array[requests] for name, array in given if array is not None})
