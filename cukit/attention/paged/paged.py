"""Attention over a paged KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._arguments import (
    PARAMETERS,
    ScoreArrays,
    ScoreOptions,
    check_kernel_layout,
    dense_strides,
    fits_tensor_maps,
    scales_of,
    score_options,
    score_settings,
    strides_of,
)
from cukit.attention.flash._problem import Window
from cukit.attention.paged._paged_arguments import (
    PagedArrays,
    PagedScratch,
    check_arrays,
    check_contents,
    check_layout,
    is_checked,
    paged_plan_key,
)
from cukit.attention.paged._paged_gather import prepare_prefill
from cukit.attention.paged._paged_plan import (
    CODE_HEAD_DIMS,
    GROUP_HEAD_DIMS,
    HEAD_DIMS,
    PagedConfig,
    plan_paged_attention,
)
from cukit.attention.paged._paged_prefill import PagedForward, PreparedForward, problem_of_pages
from cukit.attention.paged._paged_prefill_plan import prefill_specs
from cukit.attention.paged.cache_arrays import (
    GROUP_ROWS,
    RecentKV,
    check_group_layout,
    recent_arrays,
    scale_strides,
    stored_parts,
)
from cukit.core.arrays import (
    Array,
    adopt,
    empty,
    int32,
    runs_kernel,
    write_out,
)
from cukit.core.constants import constant
from cukit.core.counters import zero_counters
from cukit.core.device import Device, current_device
from cukit.core.kernel import (
    NULL,
    KernelSpec,
    Launch,
    Launches,
    changed_by_value,
    int32s,
    launch_plan,
    load_kernel,
)
from cukit.core.narrow_dtype import NARROW_DTYPES
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_flag
from cukit.errors import ArrayLayoutError, ArrayShapeError
from cukit.reference import paged_attention as reference
from cukit.registry import register

_OP = "paged_attention"
_FLOAT8_ARCH = (8, 9)


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    causal: bool = True,
    window_size: Window | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    recent: RecentKV | None = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    checked: bool | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of each request's last queries over its keys and values in a paged cache.

    Key `j` of request `b` is `k_cache[block_table[b, j // block_size], j % block_size]`; scores,
    masks and softmax are those of :func:`flash_attention`.

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads_q, head_dim]; on the CPU float32|float64
            too. Strides, address and head_dim as for flash_attention. The queries of a request are
            the last seq_len_q of its tokens: 1 in a decode step, more in a prefill or a chunk of
            one.
        k_cache: dtype of q, [num_blocks, block_size, num_heads_kv, head_dim], any block_size, any
            strides with a contiguous last axis, e.g. `KVCacheManager.keys(layer)`. Or a
            QuantizedArray of float8_e4m3 or int8 whose scales, if any, are float32 and shared
            along head_dim: one per cache, per head, or per key and head. Then head_dim is a
            multiple of 16 on the GPU, and q must be within the range of float16. Or a
            QuantizedArray of int4 (KIVI) with float16 scales and zero points: for keys along axis 1
            in groups of 32 or 64 that divide block_size, for values along axis 3, one per row and
            head; on the GPU head_dim is then a multiple of 32 up to 128, and the values' scales are
            contiguous along rows.
        v_cache: as k_cache; its head_dim must not be larger.
        block_table: int32 [batch, max_blocks], its last axis contiguous. Entries after a request's
            last key, or left of its window, are not read.
        seq_lens: int32 [batch], the keys of each request, queries included; 0 for an unused row.
            Never read on the host.
        causal: mask keys right of the diagonal, which is each query's own key.
        window_size: (left, right), visible keys on each side of the diagonal key; None: all.
        softcap: positive bound on the magnitude of the scores.
        sinks: float32 [num_heads_q], one score per head, whose exponential is added to the softmax
            denominator.
        cu_seqlens_q: int32 [batch + 1], for packed queries: the queries of request b are rows
            cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q [total_q, num_heads_q, head_dim],
            possibly none.
        recent: with int4 caches, the newest keys and values, not quantised yet. One launch reads
            these and the caches.
        scale: positive factor of the scores; default 1 / sqrt(head_dim).
        batch_invariant: the bits of a request's result depend on its own length only, not on the
            rest of the batch. Costs a few percent for requests with many keys.
        checked: for debugging on the GPU: compare lengths and table entries with the cache before
            the launch, which synchronises with the GPU. None: the value of CUKIT_CHECKED (0 or 1)
            at import. On the CPU they are always checked.
        return_lse: also return the log-sum-exp, for `merge_attention_states`.
        out: output array; as q with v_cache's head_dim. It must not overlap the inputs.

    Returns:
        `out`, or `(out, lse)` with lse float32 [batch, num_heads_q, seq_len_q], with cu_seqlens_q
        [num_heads_q, total_q], natural logarithm. A fully masked query gets zeros and -inf.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value; on the CPU or where `checked` also a length beyond the block
            table, a block outside the cache (with request, entry and value), or a cu_seqlens_q that
            decreases, or does not start at 0 and end at total_q.

    With few queries per request, the keys of the batch are split evenly over all thread blocks, on
    the device, from `seq_lens`; the last thread block to finish its part of a request reduces the
    partial results of the request in a fixed order. With many queries per request, Hopper runs the
    forward of :func:`flash_attention` with a dynamic tile scheduler, and loads cache blocks of a
    multiple of 8 keys by TMA. Quantised caches and, where that is faster, small blocks are first
    copied to large blocks of 16-bit elements. The scratch memory of the copy is at most 1 GiB or,
    if larger, that of one request's full block table; a copy that saves only a few percent takes
    at most 256 MiB.
    Packed queries of a mixed batch (at least 8 requests, at most 256 queries each on average) take
    two launches on Hopper: requests of up to 16 rows per KV head use the first kernel, the others
    the second. Smaller batches of at most 32 rows on average use the first kernel for all requests.
    Other GPUs always use the first kernel, but run the reference for batch_invariant calls with
    cu_seqlens_q and, below sm_89, for float8 caches. In all cases lengths may differ by any factor,
    a captured graph replays with other lengths and tables, and repeated calls give the same bits.
    Runs on CuPy's current stream.
    Papers: Kwon et al., PagedAttention, arXiv:2309.06180; Dao et al., Flash-Decoding.

    >>> import numpy as np, cukit as ck
    >>> k = np.zeros((2, 4, 1, 8), np.float32)       # two blocks of four keys
    >>> v = np.arange(64, dtype=np.float32).reshape(2, 4, 1, 8)
    >>> table, lengths = np.array([[1, 0]], np.int32), np.array([5], np.int32)
    >>> ck.paged_attention(np.zeros((1, 1, 1, 8), np.float32), k, v, table, lengths)[0, 0, 0, :2]
    array([35.2, 36.2], dtype=float32)
    """
    cache_format, k_cache, k_scales, v_cache, v_scales, *zeros = stored_parts(_OP, k_cache, v_cache)
    arrays = PagedArrays(
        *adopt(
            _OP, q, k_cache, v_cache, k_scales, v_scales, block_table, seq_lens, sinks, out,
            cu_seqlens_q, *zeros, *recent_arrays(_OP, recent),
        )
    )  # fmt: skip
    check_flag(_OP, "causal", causal)
    check_flag(_OP, "batch_invariant", batch_invariant)
    check_flag(_OP, "return_lse", return_lse)
    checked = is_checked(_OP, checked)
    check_overlap(
        _OP, arrays.out, q=arrays.q, k_cache=arrays.k_cache, v_cache=arrays.v_cache,
        k_scales=arrays.k_scales, v_scales=arrays.v_scales, block_table=arrays.block_table,
        seq_lens=arrays.seq_lens, cu_seqlens_q=arrays.cu_seqlens_q, k_zeros=arrays.k_zeros,
        v_zeros=arrays.v_zeros, recent_k=arrays.recent_k, recent_v=arrays.recent_v,
        rings=arrays.rings, packed_lens=arrays.packed_lens, sinks=arrays.sinks,
    )  # fmt: skip
    options = score_options(_OP, causal, window_size, softcap, scale, None, None)
    return attend(arrays, cache_format, options, bool(batch_invariant), checked, bool(return_lse))


def attend(
    arrays: PagedArrays,
    cache_format: str,
    options: ScoreOptions,
    batch_invariant: bool,
    checked: bool,
    return_lse: bool,
    scratch: PagedScratch | None = None,
) -> Array | tuple[Array, Array]:
    """`paged_attention` with adopted arrays and converted options.

    scratch: memory of the caller; None allocates it.
    """
    if runs_kernel(_OP, *arrays) and not _lacks_kernel(arrays, cache_format, batch_invariant):
        prepared = _prepare(cache_format, options, batch_invariant, *arrays)
        if checked:
            check_contents(_OP, arrays, options, checked=True)
        attended: Array | tuple[Array, Array] = prepared(arrays, return_lse, scratch)
        return attended
    check_arrays(arrays, cache_format, options)
    check_contents(_OP, arrays, options, checked=checked)
    wide = np.float32 if cache_format else arrays.k_cache.dtype
    k, v = (
        _decoded(*parts).astype(wide, copy=False)
        for parts in (
            (arrays.k_cache, arrays.k_scales, arrays.k_zeros, cache_format, 1),
            (arrays.v_cache, arrays.v_scales, arrays.v_zeros, cache_format, 3),
        )
    )
    result, lse = reference.paged_attention(
        *(arrays.q, k, v, arrays.block_table, arrays.seq_lens),
        causal=options.causal,
        window_size=options.window_size,
        softcap=options.softcap,
        sinks=arrays.sinks,
        cu_seqlens_q=arrays.cu_seqlens_q,
        recent=arrays.recent,
        scale=options.scale,
        return_lse=True,
    )
    written = write_out(arrays.out, result)
    return (written, lse) if return_lse else written


def reserve(
    arrays: PagedArrays,
    cache_format: str,
    options: ScoreOptions,
    batch_invariant: bool,
    scratch: PagedScratch,
) -> None:
    """Checks a call, loads its kernels and takes their memory from `scratch`."""
    if not runs_kernel(_OP, *arrays) or _lacks_kernel(arrays, cache_format, batch_invariant):
        check_arrays(arrays, cache_format, options)
        return
    _prepare(cache_format, options, batch_invariant, *arrays).reserve(arrays, scratch)


def _decoded(
    storage: Array, scales: Array | None, zeros: Array | None, cache_format: str, axis: int
) -> Array:
    """The dense values of a cache. axis: the axis of int4 groups."""
    if not cache_format:
        return storage
    dtype = next(each for each in NARROW_DTYPES if each.name == cache_format)
    if zeros is not None and scales is not None:
        shape = (*storage.shape[:-1], 2 * storage.shape[-1])
        group_size = shape[axis] // scales.shape[axis]
        return QuantizedArray(storage, dtype, shape, scales, zeros, axis, group_size).dense()
    values = QuantizedArray(storage, dtype, storage.shape).dense()
    return values if scales is None else values * scales


def _lacks_kernel(arrays: PagedArrays, cache_format: str, batch_invariant: bool) -> bool:
    """Whether the device lacks instructions for these codes, or a batch-invariant kernel for packed
    queries."""
    device = current_device()
    if arrays.cu_seqlens_q is not None and batch_invariant and device.arch != "sm_90":
        return True
    return cache_format == "float8_e4m3" and device.compute_capability < _FLOAT8_ARCH


class PreparedPaged(NamedTuple):
    """A checked and planned call, for arrays of the same shapes, strides and dtypes."""

    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    floats: int
    counters: int
    coded: bool
    packed: bool
    launch: Launch
    prefill: PreparedForward | None  # for requests with many packed queries

    def __call__(
        self, arrays: PagedArrays, return_lse: bool, scratch: PagedScratch | None = None
    ) -> Array | tuple[Array, Array]:
        """Launches the kernel."""
        q, k_cache, v_cache, k_scales, v_scales, block_table, seq_lens, sinks, out, *_ = arrays
        if out is None:
            out = empty(q, self.shape)
        lse = empty(q, self.lse_shape, np.float32) if return_lse else NULL
        if out.size:
            sums, counters = self.reserve(arrays, scratch)
            if self.coded:
                k_scales = constant(q, 1, 1, np.float32) if k_scales is None else k_scales
                v_scales = constant(q, 1, 1, np.float32) if v_scales is None else v_scales
            self.launch(
                *(q, k_cache, v_cache, k_scales, v_scales, arrays.k_zeros, arrays.v_zeros),
                *(out, lse, block_table, seq_lens, arrays.recent_k, arrays.recent_v),
                *(arrays.rings, arrays.packed_lens, sinks, sums, counters),
                *((arrays.cu_seqlens_q,) if self.packed else ()),
            )
            if self.prefill is not None:
                self.prefill.launch(arrays, out, lse, scratch)
        return (out, lse) if return_lse else out

    def reserve(self, arrays: PagedArrays, scratch: PagedScratch | None) -> tuple[Array, Array]:
        """Memory for partial results, and counters, which each launch resets to zero; both from
        `scratch`, or newly allocated memory and the counters of `zero_counters`."""
        like = arrays.q
        if scratch is None:
            return empty(like, (self.floats,), np.float32), zero_counters(like, self.counters)
        if self.prefill is not None:
            self.prefill.reserve(arrays, scratch)
        sums = scratch.take(like, "sums", self.floats, np.float32)
        return sums, scratch.take(like, "counters", self.counters, int32)


class _Planned:
    """The checked options and loaded kernels of a call, for any numbers of requests, queries and
    table columns."""

    def __init__(self, arrays: PagedArrays, cache_format: str, options: ScoreOptions) -> None:
        _, k_cache, v_cache, k_scales, v_scales, _, _, sinks, *_ = arrays
        recent_k, recent_v = arrays.recent_k, arrays.recent_v
        self.problem = problem_of_pages(arrays, cache_format, options)
        self.cache_format = cache_format
        self.options = options
        self.sinks = sinks is not None
        self.packed = arrays.cu_seqlens_q is not None
        self.mapped = fits_tensor_maps(arrays.q)
        self.block_size = k_cache.shape[1]
        self.recent = recent_k is not None
        self.recent_rows = 0 if recent_k is None else recent_k.shape[1]
        self.group_rows = 0
        if cache_format == "int4" and k_scales is not None:
            self.group_rows = k_cache.shape[1] // k_scales.shape[1]
        self._forward: PagedForward | None = None
        self._variants: dict[tuple[int, bool, int], tuple[PagedConfig, Launches]] = {}
        # The kernel has neither bias nor mask, and cu_seqlens_q is an argument of its own.
        given = ScoreArrays(None, sinks, None, None, None, None)
        shape = 1, self.problem.num_heads_q, 1, 1
        self._parameters = _PARAMETERS.pack(
            **dict.fromkeys(_VARYING, 0),
            q=(0, 0, 0),
            k=strides_of(k_cache),
            v=strides_of(v_cache),
            out=(0, 0, 0),
            k_scales=scale_strides(k_scales),
            v_scales=scale_strides(v_scales),
            recent_k=(0, 0, 0) if recent_k is None else strides_of(recent_k),
            recent_v=(0, 0, 0) if recent_v is None else strides_of(recent_v),
            heads_q=self.problem.num_heads_q,
            heads_kv=self.problem.num_heads_kv,
            group=self.problem.group,
            recent_rows=self.recent_rows,
            block_size=k_cache.shape[1],
            head_dim=self.problem.head_dim,
            value_dim=self.problem.head_dim_v,
            scale_log2=scales_of(arrays.q, options)[1],
            settings=score_settings(arrays.q, options, given, shape),
        )

    def forward(self, arrays: PagedArrays) -> PagedForward:
        """The Hopper forward over the caches."""
        if self._forward is None:
            self._forward = PagedForward(self.problem, self.options, arrays)
        return self._forward

    def variant(self, rows: int, batch_invariant: bool, batch: int) -> tuple[PagedConfig, Launches]:
        """The configuration for `rows` query rows per KV head of `batch` requests (0: any number),
        and its kernel's launches."""
        key = rows, batch_invariant, batch
        found = self._variants.get(key)
        if found is None:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            problem = self.problem
            config = plan_paged_attention(
                problem.head_dim, problem.head_dim_v, problem.num_heads_kv, rows, problem.dtype,
                current_device(), cache_format=self.cache_format, causal=problem.causal,
                window=problem.window is not None, softcap=problem.softcap, sinks=self.sinks,
                batch_invariant=batch_invariant, group_rows=self.group_rows,
                recent=self.recent, packed=self.packed, batch=batch,
            )  # fmt: skip
            found = self._variants[key] = config, _launches(config)
        return found

    def parameters(self, **varying: Any) -> Any:
        """The PagedParameters struct, as a launch argument. varying: q, out, and each of
        _VARYING."""
        return changed_by_value(_PARAMETERS, self._parameters, varying)


_PARAMETERS = parameter_structs(PARAMETERS)["PagedParameters"]
_VARYING = "batch", "seq_q", "problems", "max_keys", "table_row", "tile_blocks", "tile_rows"
_MAX_VARIANTS = 256  # per _Planned; plan_paged_attention caches the configurations, too


@launch_plan
def _launches(config: PagedConfig) -> Launches:
    return Launches(load_kernel(config.spec()))


def _planned(
    cache_format: str, options: ScoreOptions, batch_invariant: bool, *given: Array | None
) -> _Planned:
    """Checks a call and plans it for any numbers of requests, queries and table columns."""
    arrays = PagedArrays(*given)
    check_arrays(arrays, cache_format, options)
    check_layout(arrays, cache_format)
    if cache_format == "int4" and arrays.k_scales is not None:
        factors = {
            "k_cache.scales": arrays.k_scales, "v_cache.scales": arrays.v_scales,
            "k_cache.zeros": arrays.k_zeros, "v_cache.zeros": arrays.v_zeros,
        }  # fmt: skip
        check_group_layout(_OP, **factors)
        check_kernel_layout(_OP, **{"recent.k": arrays.recent_k, "recent.v": arrays.recent_v})
        if arrays.q.shape[-1] > GROUP_HEAD_DIMS[-1]:
            raise ArrayShapeError(
                f"{_OP}: head_dim must be at most {GROUP_HEAD_DIMS[-1]} for int4 on the GPU, got "
                f"{arrays.q.shape[-1]}"
            )
    return _Planned(arrays, cache_format, options)


@partial(launch_plan, plan=_planned, shorten=paged_plan_key)
def _prepare(
    planned: _Planned,
    cache_format: str,
    options: ScoreOptions,
    batch_invariant: bool,
    *given: Array | None,
) -> PreparedPaged | PreparedForward:
    """The launches of a call."""
    arrays = PagedArrays(*given)
    q, out, block_table, packed, batch = (
        arrays.q, arrays.out, arrays.block_table, planned.packed, arrays.batch
    )  # fmt: skip
    *leading, seq_q, heads_q, _ = q.shape
    problem = planned.problem.at_lengths(seq_q, 1, batch)
    prefill, max_queries = prepare_prefill(
        arrays, cache_format, options, problem,
        lambda: planned.forward(arrays), mapped=planned.mapped, batch_invariant=batch_invariant,
    )  # fmt: skip
    if prefill is not None and not max_queries:
        return prefill
    if packed and batch_invariant and q.size:
        raise ArrayLayoutError(
            f"{_OP}: with cu_seqlens_q and batch_invariant, the strides of q must be positive on "
            f"the GPU, got {q.strides}"
        )
    queries = min(max_queries, -(-seq_q // max(batch, 1)) if packed else seq_q)
    config, launches = planned.variant(
        problem.group * queries, batch_invariant and not packed, 0 if packed else batch
    )
    shape = (*leading, seq_q, heads_q, problem.head_dim_v)
    block_size = planned.block_size
    max_keys = block_table.shape[1] * block_size + planned.recent_rows
    problems = problem.num_heads_kv * (1 if packed else config.row_tiles)
    parameters = planned.parameters(
        q=strides_of(q),
        out=dense_strides(shape) if out is None else strides_of(out),
        batch=batch,
        seq_q=seq_q,
        problems=problems,
        max_keys=max_keys,
        table_row=block_table.strides[0] // block_table.itemsize,
        tile_blocks=config.tile // block_size,
        tile_rows=config.tile % block_size,
    )
    slots, counters = config.slots(batch, problems, max_keys, planned.recent_rows)
    scalars = (*int32s(max_queries), parameters) if packed else (parameters,)
    launch = launches((config.num_blocks,), scalars)
    row_shape = (heads_q, seq_q) if packed else (batch, heads_q, seq_q)
    floats = slots * config.slot_floats
    return PreparedPaged(
        shape, row_shape, floats, counters, bool(cache_format), packed, launch, prefill
    )


def _specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: each width, query tile and option."""

    def spec(head_dim: int, rows: int = 4, **options: Any) -> KernelSpec:
        shape = head_dim, head_dim, 8, rows
        dtype = options.pop("dtype", "bfloat16")
        return plan_paged_attention(*shape, dtype, device, **options).spec()

    too_old = device.compute_capability < _FLOAT8_ARCH
    specs = [
        *prefill_specs(device),
        *(spec(width) for width in HEAD_DIMS),
        spec(128, 32),
        spec(128, dtype="float16"),
        spec(120, 32, window=True, softcap=True, sinks=True),
        spec(128, batch_invariant=True),
        *(spec(128, rows, packed=True) for rows in (16, 32)),
        *(spec(width, cache_format="int8") for width in CODE_HEAD_DIMS),
        *(spec(128, rows, cache_format="float8_e4m3") for rows in (4, 32) if not too_old),
        *(spec(128, 4, cache_format="int4", group_rows=rows) for rows in GROUP_ROWS),
        spec(120, 32, cache_format="int4", group_rows=64, window=True),
        spec(128, 16, cache_format="int8", packed=True),
        spec(128, 4, cache_format="int4", group_rows=64, recent=True, packed=True),
        *(spec(128, 4, cache_format="int4", group_rows=rows, recent=True) for rows in GROUP_ROWS),
        spec(
            96,
            4,
            cache_format="int4",
            group_rows=64,
            recent=True,
            window=True,
            batch_invariant=True,
        ),
        *(spec(128, rows, batch=1) for rows in (4, 32)),
        spec(128, cache_format="int8", batch=1),
        *(
            spec(128, cache_format="int4", group_rows=64, recent=new, batch=1)
            for new in (False, True)
        ),
        spec(128, cache_format="int4", group_rows=64, batch=128),
        spec(128, cache_format="int8", batch=128),
        *([] if too_old else [spec(128, cache_format="float8_e4m3", batch=128)]),
        spec(64, batch=32),
        spec(128, 16, batch=2),
    ]
    return [*dict.fromkeys(specs)]


register(
    name=_OP,
    family="attention",
    function=paged_attention,
    reference=reference.paged_attention,
    specs=_specs,
)
