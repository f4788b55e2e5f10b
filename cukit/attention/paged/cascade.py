"""Cascade attention: keys that requests share as a prefix are read once for all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.flash.merge_states import merge_shared_states, merge_specs
from cukit.attention.paged._cascade_plan import Pass, Prefix, plan_cascade
from cukit.attention.paged._paged_arguments import check_table, is_checked
from cukit.attention.paged.cache_arrays import cache_parts
from cukit.attention.paged.paged import paged_attention
from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    empty,
    int32,
    runs_kernel,
    write_out,
)
from cukit.core.constants import constant
from cukit.core.device import current_device
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ConfigError
from cukit.reference import paged_attention as reference
from cukit.registry import register

_OP = "cascade_attention"
_DTYPES = (*FLOAT_DTYPES, np.dtype(np.uint8), np.dtype(np.int8))


def cascade_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    prefixes: int | Sequence[tuple[int, int]],
    *,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    checked: bool | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`paged_attention` of requests whose first keys are in the same blocks: a system prompt,
    several samples of one prompt, beams.

    Shared keys are read once for the queries of all requests, the others per request, and the two
    results are merged by their log-sum-exps. Where this would not be faster, the call falls back to
    `paged_attention`; the decision depends only on shapes.

    Args:
        q: as in `paged_attention`, [batch, seq_len_q, num_heads_q, head_dim].
        k_cache: as in `paged_attention`.
        v_cache: as in `paged_attention`.
        block_table: int32 [batch, max_blocks], the blocks of each request, the shared ones first,
            as `KVCacheManager.block_table` returns it.
        seq_lens: int32 [batch], the keys of each request, including shared keys and queries; 0 for
            an unused row, whose output is undefined. Never read on the host.
        prefixes: the number of keys that all requests share. Or pairs `(keys, requests)`, shortest
            prefix first: each group of `requests` neighbours shares its first `keys` keys. `keys`
            is a multiple of block_size and at least that of the previous pair; `requests` divides
            that of the previous pair or, in the first pair, the batch. For instance
            [(4096, 32), (4608, 4)] is a system prompt of 4096 keys followed by eight prompts of
            512, with four samples each.
        causal: as in `paged_attention`. All shared keys are visible to a request's queries, because
            each request has at least `keys + seq_len_q` keys.
        softcap: as in `paged_attention`.
        sinks: as in `paged_attention`.
        scale: as in `paged_attention`.
        checked: as in `paged_attention`.
        return_lse: also return the log-sum-exp.
        out: output array; as q with v_cache's head_dim. It must not overlap the inputs.

    Returns:
        `out`, or `(out, lse)`, as `paged_attention` up to rounding: the merged partial outputs have
        q's dtype.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value; on the CPU or where `checked` also as `paged_attention`, and
            requests that do not share the blocks of `prefixes`, or have too few keys.

    Runs on CuPy's current stream; deterministic; a captured graph replays with other lengths and
    tables while the lengths of the prefixes stay the same.
    Papers: Ye et al., FlashInfer, arXiv:2501.01005; Juravsky et al., Hydragen, arXiv:2402.05099.

    >>> import numpy as np, cukit as ck
    >>> k = np.zeros((3, 4, 1, 8), np.float32)       # three blocks of four keys
    >>> v = np.arange(96, dtype=np.float32).reshape(3, 4, 1, 8)
    >>> table = np.array([[0, 1], [0, 2]], np.int32)  # block 0 is shared
    >>> lengths = np.array([5, 5], np.int32)
    >>> q = np.zeros((2, 1, 1, 8), np.float32)
    >>> ck.cascade_attention(q, k, v, table, lengths, prefixes=4)[:, 0, 0, 0]
    array([16. , 22.4], dtype=float32)
    """
    q, block_table, seq_lens, sinks, out = adopt(_OP, q, block_table, seq_lens, sinks, out)
    k_cache, v_cache = (
        cache if isinstance(cache, QuantizedArray) else adopt(_OP, cache)[0]
        for cache in (k_cache, v_cache)
    )
    _check(q, k_cache, v_cache, block_table, seq_lens, sinks, out)
    levels = _prefixes(q, k_cache, block_table, prefixes)
    checked = is_checked(_OP, checked)
    on_gpu = runs_kernel(_OP, q, block_table, seq_lens, sinks, out)
    if checked or not on_gpu:
        table = cache_parts(_OP, k_cache, v_cache)[1], block_table, seq_lens, q.shape[1]
        check_table(_OP, *table, checked=checked)
        _check_sharing(block_table, seq_lens, levels, k_cache.shape[1], q.shape[1])
    scoring: dict[str, Any] = {"softcap": softcap, "scale": scale, "checked": False}
    plain: dict[str, Any] = {**scoring, "causal": causal, "sinks": sinks}
    passes = _passes(q, k_cache, v_cache, levels) if on_gpu else ()
    if not passes:
        return paged_attention(
            q, k_cache, v_cache, block_table, seq_lens, **plain, return_lse=return_lse, out=out
        )
    block_size, shared = k_cache.shape[1], passes[-1].end
    own_table = block_table[:, shared // block_size :]
    result: Any
    result, lse = paged_attention(
        q, k_cache, v_cache, own_table, seq_lens - np.int32(shared), **plain, return_lse=True
    )
    for each in passes:
        shared_out, shared_lse = paged_attention(
            q.reshape(-1, each.requests * q.shape[1], *q.shape[2:]),
            k_cache,
            v_cache,
            block_table[:: each.requests, each.begin // block_size : each.end // block_size],
            constant(q, len(q) // each.requests, each.end - each.begin, np.int32),
            **scoring,
            causal=False,
            return_lse=True,
        )
        last = each is passes[-1] and out is not None and out.flags.c_contiguous
        merged = out if last else empty(q, result.shape)
        merged_lse = empty(q, lse.shape, np.float32)
        merge_shared_states(
            shared_out.reshape(result.shape), shared_lse, result, lse, merged, merged_lse,
            each.requests,
        )  # fmt: skip
        result, lse = merged, merged_lse
    if result is not out:
        result = write_out(out, result)
    return (result, lse) if return_lse else result


def _check(
    q: Array,
    k_cache: Any,
    v_cache: Any,
    block_table: Array,
    seq_lens: Array,
    sinks: Array | None,
    out: Array | None,
) -> None:
    """Checks the properties that are used before paged_attention checks its arguments."""
    _, k_storage, k_scales, v_storage, v_scales = cache_parts(_OP, k_cache, v_cache)
    for name, array in (("q", q), ("k_cache", k_storage), ("v_cache", v_storage)):
        check_array(_OP, name, array, dtypes=_DTYPES, ndim=4, contiguous=False)
    shape = (len(q), None)
    check_array(_OP, "block_table", block_table, dtypes=(int32,), shape=shape, contiguous=False)
    check_array(_OP, "seq_lens", seq_lens, dtypes=(int32,), shape=shape[:1])
    if out is not None:
        shape = (*q.shape[:-1], v_cache.shape[-1])
        check_array(_OP, "out", out, dtypes=(q.dtype,), shape=shape, contiguous=False)
        check_overlap(
            _OP, out, q=q, k_cache=k_storage, v_cache=v_storage, k_scales=k_scales,
            v_scales=v_scales, block_table=block_table, seq_lens=seq_lens, sinks=sinks,
        )  # fmt: skip


def _prefixes(
    q: Array, k_cache: Any, block_table: Array, prefixes: int | Sequence[tuple[int, int]]
) -> tuple[Prefix, ...]:
    """`prefixes` as a tuple of Prefix, checked against the shapes of the call."""
    try:
        pairs = prefixes if isinstance(prefixes, Sequence) else ((prefixes, len(q)),)
        levels = tuple(Prefix(*map(operator.index, pair)) for pair in pairs)
    except TypeError as error:
        raise ConfigError(
            f"{_OP}: prefixes must be an integer or pairs (keys, requests), got {prefixes!r}"
        ) from error
    block_size = k_cache.shape[1]
    before = Prefix(0, len(q))
    for level in levels:
        if level.keys < before.keys or level.keys % max(1, block_size):
            raise ConfigError(
                f"{_OP}: the keys of prefixes must not decrease and must be multiples of "
                f"block_size = {block_size}, got {prefixes}"
            )
        if level.keys > block_table.shape[1] * block_size:
            raise ConfigError(
                f"{_OP}: prefixes must fit in the {block_table.shape[1]} blocks of a row of "
                f"block_table, got {prefixes}"
            )
        if len(q) and (level.requests < 1 or before.requests % level.requests):
            raise ConfigError(
                f"{_OP}: the requests of prefixes must divide those of the previous one, the first "
                f"the batch of {len(q)}, got {prefixes}"
            )
        before = level
    return levels


def _passes(q: Array, k_cache: Any, v_cache: Any, levels: tuple[Prefix, ...]) -> tuple[Pass, ...]:
    """The passes over shared keys; empty if plain paged_attention is as fast."""
    batch, seq_q, heads_q, head_dim = q.shape
    heads_kv, value_dim = v_cache.shape[2:]
    if not q.size or not heads_kv:
        return ()
    problem = AttentionProblem(
        batch, seq_q, 1, heads_q, heads_kv, head_dim, q.dtype.name, False, value_dim=value_dim
    )
    coded = isinstance(k_cache, QuantizedArray)
    item_bytes = k_cache.storage.itemsize if coded else k_cache.dtype.itemsize
    return plan_cascade(levels, problem, item_bytes, current_device())


def _check_sharing(
    block_table: Array, seq_lens: Array, levels: tuple[Prefix, ...], block_size: int, seq_q: int
) -> None:
    """Checks that requests share the blocks of the prefixes, and have enough keys."""
    if not len(seq_lens):
        return
    keys = max((level.keys for level in levels), default=0)
    short = (seq_lens != 0) & (seq_lens < keys + seq_q)
    if short.any():
        b = int(short.argmax())
        raise ConfigError(
            f"{_OP}: a request must have at least the {keys} shared keys and {seq_q} queries, but "
            f"seq_lens[{b}] is {int(seq_lens[b])}"
        )
    for level in levels:
        groups = block_table.reshape(-1, level.requests, block_table.shape[1])
        rows = groups[:, :, : level.keys // block_size]
        used = (seq_lens != 0).reshape(-1, level.requests, 1)
        if (used & (rows != rows[:, :1])).any():
            raise ConfigError(
                f"{_OP}: each {level.requests} neighbouring rows of block_table must have the same "
                f"blocks for their first {level.keys} keys"
            )


register(
    name=_OP,
    family="attention",
    function=cascade_attention,
    reference=reference.cascade_attention,
    specs=merge_specs,
)
