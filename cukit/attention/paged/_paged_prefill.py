"""Launches of the Hopper forward over a paged cache."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from cukit.attention.flash._arguments import (
    PARAMETERS,
    ScoreArrays,
    ScoreOptions,
    dense_strides,
    fits_tensor_maps,
    scales_of,
    score_settings,
    strides_of,
)
from cukit.attention.flash._flash_launch_sm90 import NO_FLOAT8, MappedLaunch, Prologue, encoder
from cukit.attention.flash._flash_plan_sm90 import covers, sequences_plan_size
from cukit.attention.flash._flash_tilings import WARPGROUP_ROWS
from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.paged._paged_arguments import PagedArrays, PagedScratch
from cukit.attention.paged._paged_prefill_plan import (
    PagedForwardConfig,
    few_packed_queries,
    plan_paged_prefill,
    prefers_prefill,
)
from cukit.core.arrays import Array, empty
from cukit.core.device import current_device
from cukit.core.kernel import (
    NULL,
    Launches,
    by_value,
    changed_by_value,
    int32s,
    launch_plan,
    load_kernel,
)
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache


def problem_of_pages(
    arrays: PagedArrays, cache_format: str, options: ScoreOptions
) -> AttentionProblem:
    """The attention problem of a call, with a seq_len_kv of 1: the host does not read seq_lens."""
    q, k_cache, v_cache = arrays.q, arrays.k_cache, arrays.v_cache
    head_dim, value_dim = q.shape[-1], v_cache.shape[-1] * (2 if cache_format == "int4" else 1)
    causal, window = options.visible
    return AttentionProblem(
        len(arrays.seq_lens), q.shape[-3], 1, q.shape[-2], k_cache.shape[2], head_dim,
        q.dtype.name, causal, value_dim=None if value_dim == head_dim else value_dim,
        window=window, softcap=options.softcap is not None, sinks=arrays.sinks is not None,
        varlen=arrays.cu_seqlens_q is not None,
    )  # fmt: skip


def uses_forward(
    problem: AttentionProblem, cache_format: str, *, mapped: bool, batch_invariant: bool
) -> bool:
    """Whether a call runs on the Hopper forward. mapped: whether TMA can read the queries."""
    device = current_device()
    if not mapped:
        return False
    if problem.varlen:
        few = few_packed_queries(problem) and not batch_invariant
        return covers(problem, device) and not few
    return prefers_prefill(problem, device, cache_format, batch_invariant=batch_invariant)


class PreparedForward:
    """A planned call of the Hopper forward, for arrays of the same shapes, strides and dtypes."""

    __slots__ = ("_lse_shape", "_shape")

    def __init__(self, queries: tuple[int, ...], value_dim: int) -> None:
        """queries: the shape of q."""
        *rows, heads_q, _ = queries
        self._shape = (*rows, heads_q, value_dim)
        self._lse_shape = (*rows[:-1], heads_q, rows[-1])

    def __call__(
        self, arrays: PagedArrays, return_lse: bool, scratch: PagedScratch | None = None
    ) -> Array | tuple[Array, Array]:
        """Launches the kernels. scratch: as in `launch`."""
        out = empty(arrays.q, self._shape) if arrays.out is None else arrays.out
        lse = empty(arrays.q, self._lse_shape, np.float32) if return_lse else NULL
        if out.size:
            self.launch(arrays, out, lse, scratch)
        return (out, lse) if return_lse else out

    def launch(
        self, arrays: PagedArrays, out: Array, lse: Any, scratch: PagedScratch | None = None
    ) -> None:
        """Launches the kernels; `out` is not empty. lse: an array or NULL. scratch: memory of the
        caller; None allocates it."""
        raise NotImplementedError

    def reserve(self, arrays: PagedArrays, scratch: PagedScratch) -> None:
        """Takes the memory of a launch from `scratch`."""
        raise NotImplementedError


class _Kernels:
    """The loaded kernels of a configuration, for calls of any lengths."""

    def __init__(self, config: PagedForwardConfig) -> None:
        self.launches = Launches(load_kernel(config.spec()))
        self.plan_launches = Launches(load_kernel(config.plan_spec()))
        queries = encoder((1, WARPGROUP_ROWS, 1, config.box_columns(config.width)))
        box = 1, config.page_rows, 1, config.box_columns(config.width)
        self.encoders = (queries, *(encoder(box) if config.page_rows else queries for _ in "kv"))


_loaded = launch_plan(_Kernels)
_STRUCTS = parameter_structs(PARAMETERS)
_KEYS, _FORWARD = _STRUCTS["PagedKeys"], _STRUCTS["MappedForwardParameters"]


class PagedForward:
    """The Hopper forward over caches of one layout, for any number of requests and queries."""

    def __init__(
        self, problem: AttentionProblem, options: ScoreOptions, arrays: PagedArrays
    ) -> None:
        """problem, arrays: of any lengths and batch."""
        q, k_cache, v_cache = arrays.q, arrays.k_cache, arrays.v_cache
        block_size, mapped = k_cache.shape[1], fits_tensor_maps(k_cache, v_cache)
        problem = problem.at_lengths(1, 1, 1)
        self.config = plan_paged_prefill(problem, block_size, mapped, current_device())
        self._packed_keys = _KEYS.pack(
            k=strides_of(k_cache),
            v=strides_of(v_cache),
            block_size=block_size,
            table_row=0,
            head_dim=problem.head_dim,
        )
        self._keys: tuple[int, Any] = 0, by_value(self._packed_keys)
        given = ScoreArrays(None, arrays.sinks, None, None, None, None)
        shape = 1, problem.num_heads_q, 1, 1
        self.parameters = _FORWARD.pack(
            out=(0, 0, 0),
            batch=0,
            heads_q=problem.num_heads_q,
            group=problem.group,
            seq_q=0,
            seq_kv=0,
            value_dim=problem.head_dim_v,
            mask_heads=1,
            scale_log2=scales_of(q, options)[1],
            settings=score_settings(q, options, given, shape),
            float8=NO_FLOAT8,
        )

    def keys_for(self, table_row: int) -> Any:
        """The PagedKeys struct for block tables of this row stride, as a launch argument."""
        known, keys = self._keys
        if known != table_row:
            keys = changed_by_value(_KEYS, self._packed_keys, {"table_row": table_row})
            self._keys = table_row, keys
        return keys

    @cached_property
    def kernels(self) -> _Kernels:
        """The kernels, loaded on first use: calls that read a copy of the cache need none."""
        kernels: _Kernels = _loaded(self.config)
        return kernels

    @cached_property
    def cache_maps(self) -> tuple[TensorMapCache, ...]:
        """The tensor maps of the caches."""
        return tuple(map(TensorMapCache, self.kernels.encoders[1:]))


class PreparedPrefill(PreparedForward):
    """A planned call that reads the cache directly, not a copy."""

    __slots__ = ("_boxes", "_launch", "_schedule_size")

    def __init__(
        self,
        forward: PagedForward,
        problem: AttentionProblem,
        arrays: PagedArrays,
        max_keys: int | None = None,
        min_queries: int = 1,
    ) -> None:
        """max_keys: bound of the lengths; None: the capacity of the block table. min_queries:
        requests with fewer are skipped."""
        q, _, v_cache, _, _, block_table, _, _, out, cu_seqlens_q, *_ = arrays
        *_, block_size, _, value_dim = v_cache.shape
        kernels = forward.kernels
        if max_keys is None:
            max_keys = block_table.shape[1] * block_size
        packed = cu_seqlens_q is not None
        seq_q = 0 if packed else problem.seq_len_q
        batch, heads_q = problem.batch, problem.num_heads_q
        *rows, _, _ = q.shape
        super().__init__(q.shape, value_dim)
        self._boxes = forward.config.page_rows > 0
        table_row = block_table.strides[0] // block_table.itemsize
        changes: dict[str, Any] = {
            "out": dense_strides(self._shape) if out is None else strides_of(out),
            "batch": batch,
            "seq_q": seq_q,
            "seq_kv": max_keys,
        }
        if packed:
            changes["settings.total_q"] = q.shape[0]
        parameters = changed_by_value(_FORWARD, forward.parameters, changes)
        blocks = forward.config.grid(math.prod(rows), batch)
        launch = kernels.launches((blocks,), (forward.keys_for(table_row), parameters))
        scalars = int32s(batch, heads_q, max_keys, seq_q, min_queries, blocks)
        self._schedule_size = sequences_plan_size(batch)
        plan = Prologue(kernels.plan_launches((1,), scalars), self._schedule_size)
        maps = (TensorMapCache(kernels.encoders[0]), *forward.cache_maps)
        self._launch = MappedLaunch(launch, maps, plan, None, None)

    def reserve(self, arrays: PagedArrays, scratch: PagedScratch) -> None:
        """Takes the memory of the schedule."""
        scratch.take(arrays.q, "schedule", self._schedule_size, np.int32)

    def launch(
        self, arrays: PagedArrays, out: Array, lse: Any, scratch: PagedScratch | None = None
    ) -> None:
        """Launches the kernels; `out` is not empty."""
        schedule = None
        if scratch is not None:
            schedule = scratch.take(arrays.q, "schedule", self._schedule_size, np.int32)
        q, k_cache, v_cache, _, _, block_table, seq_lens, sinks, _, cu_seqlens_q, *_ = arrays
        options = ScoreArrays(None, sinks, None, None, cu_seqlens_q, seq_lens)
        # Without TMA boxes the kernel reads no tensor map of the cache; pass that of q.
        maps = (k_cache, v_cache) if self._boxes else (q, q)
        pages = (block_table,) if self._boxes else (block_table, k_cache, v_cache)
        self._launch(q, *maps, out, lse, *options, more=pages, schedule=schedule)
