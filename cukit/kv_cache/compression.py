"""KV cache compression: fewer bits per key and value, or fewer keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cukit.attention import flash_attention, paged_attention
from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, check_array, check_same_dtype, namespace
from cukit.core.narrow_dtype import float8_e4m3, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_choice, check_integer
from cukit.errors import ArrayShapeError, ConfigError
from cukit.kv_cache._key_scores import attention_received, pooled, top_positions
from cukit.kv_cache.group_codes import GroupCodes
from cukit.quantization import quantize

_OP = "compress_kv"
_MAX_ERROR_QUERIES = 16
"""The error is measured with at most this many of the last queries: the cache serves later tokens,
and earlier queries attend to nearby keys that need not be kept."""


@dataclass(frozen=True)
class CompressedKV:
    """Keys and values of one layer after :func:`compress_kv`.

    strategy: the strategy of :func:`compress_kv`.
    k, v: [batch, kept, num_heads_kv, head_dim]: arrays of the original dtype, or QuantizedArrays
        with one scale per token and head, or GroupCodes of the older tokens.
    recent: with GroupCodes, the unquantised k and v of the newest tokens.
    positions: int32 [batch, num_heads_kv, kept], ascending: the original position of each key; a
        key keeps the RoPE rotation of this position.
    seq_len: tokens of the original; the position of the next token.
    dtype: dtype of the original k and v.
    original_nbytes: bytes of the original k and v.
    error: |out - exact| / |exact| of attention's outputs, in the 2-norm; None without queries.
    """

    strategy: str
    k: Array | QuantizedArray | GroupCodes
    v: Array | QuantizedArray | GroupCodes
    recent: tuple[Array, Array] | None
    positions: Array
    seq_len: int
    dtype: np.dtype[Any]
    original_nbytes: int
    error: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys and values and of their scales."""
        return sum(int(part.nbytes) for part in (self.k, self.v, *(self.recent or ())))

    @property
    def ratio(self) -> float:
        """The compression ratio: original bytes divided by compressed bytes."""
        return self.original_nbytes / self.nbytes

    @property
    def num_kept(self) -> int:
        """Kept keys per head."""
        return int(self.positions.shape[-1])

    def dense(self) -> tuple[Array, Array]:
        """k and v as dense arrays, [batch, kept, num_heads_kv, head_dim]."""
        parts: tuple[Any, Any] = (self.k, self.v)
        k, v = (
            part.decode(self.dtype) if isinstance(part, (QuantizedArray, GroupCodes)) else part
            for part in parts
        )
        if self.recent is not None:
            xp = namespace(k)
            k, v = (xp.concatenate(both, axis=1) for both in zip((k, v), self.recent, strict=True))
        return k, v

    def paged(self) -> tuple[Any, Any, Array, Array]:
        """k_cache, v_cache, block_table and seq_lens for :func:`paged_attention`.

        Each request has one block of all its kept tokens. GroupCodes are decoded; other formats are
        read in place.
        """
        xp = namespace(self.positions)
        k, v = self.dense() if self.recent is not None else (self.k, self.v)
        batch = self.positions.shape[0]
        table = xp.arange(batch, dtype=np.int32).reshape(batch, 1)
        return k, v, table, xp.full(batch, self.num_kept, np.int32)

    def attend(
        self,
        q: Array,
        *,
        first_position: int | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of queries over the kept keys, causal by original positions.

        Args:
            q: [batch, seq_len_q, num_heads_q, head_dim], as for :func:`flash_attention`.
            first_position: position of the first query; by default q are the last of the seq_len
                tokens. Queries at positions from seq_len on belong to new tokens;
                `merge_attention_states` can add the attention over the keys of new tokens.
            scale, return_lse: as for :func:`flash_attention`.

        Returns:
            `out`, or `(out, lse)`.
        """
        seq_q = q.shape[1]
        first = self.seq_len - seq_q if first_position is None else first_position
        masked = first + 1 < self.seq_len
        aligned = self.num_kept == self.seq_len and first == self.seq_len - seq_q
        options: dict[str, Any] = {
            "causal": masked and aligned, "scale": scale, "return_lse": return_lse
        }  # fmt: skip
        if isinstance(self.k, QuantizedArray) and (aligned or not masked):
            return paged_attention(q, *self.paged(), **options)
        k, v = self.dense()
        if masked and not aligned:
            xp = namespace(self.positions)
            own = xp.arange(first, first + seq_q)[:, None]
            mask = xp.repeat(self.positions, q.shape[2] // k.shape[2], axis=1)[:, :, None] <= own
            options["mask"] = mask
        return flash_attention(q, k, v, **options)


class _Call(NamedTuple):
    """The checked arguments of :func:`compress_kv`."""

    k: Array
    v: Array
    queries: Array | None
    budget: int
    window: int | None
    sinks: int
    group_size: int
    pool_size: int
    scale: float | None

    def kept(self, positions: Array) -> dict[str, Any]:
        """The result's fields for the keys at `positions`, int [batch, heads, kept]."""
        xp = namespace(self.k)
        rows = positions.swapaxes(1, 2)[..., None]
        bits = f"u{self.k.itemsize}"  # gather as unsigned integers, for any dtype
        k, v = (
            xp.take_along_axis(part.view(bits), rows, axis=1).view(part.dtype)
            for part in (self.k, self.v)
        )
        return {"k": k, "v": v, "positions": positions}

    def newest(self, default: int) -> int:
        """The number of newest tokens that are always kept, and not quantised."""
        return default if self.window is None else self.window


def compress_kv(
    k: Array,
    v: Array,
    strategy: str,
    *,
    queries: Array | None = None,
    budget: int | None = None,
    window: int | None = None,
    sinks: int = 4,
    group_size: int = 32,
    pool_size: int = 7,
    scale: float | None = None,
) -> CompressedKV:
    """Compresses the keys and values of one layer; :class:`CompressedKV` computes attention on them.

    | strategy | what is stored |
    | --- | --- |
    | `"int8"`, `"float8"` | all tokens in 8 bits, one float32 scale per token and head |
    | `"kivi4"`, `"kivi2"` | 4 or 2 bits: keys in groups of `group_size` tokens per channel, values in groups of `group_size` channels per token; the `window` newest tokens (default 128) unquantised |
    | `"sink_window"` | the first `sinks` tokens, and the newest up to `budget` tokens in total |
    | `"heavy_hitters"` | `budget` tokens: the `window` newest (default half), and those with the most attention from `queries` |
    | `"snapkv"` | `budget` tokens: the `window` newest (default 32, at most half), and those with the most attention from the queries of these newest tokens, max-pooled over `pool_size` neighbours |

    Args:
        k: float32|float16|bfloat16 [batch, seq_len, num_heads_kv, head_dim], after RoPE.
        v: as k; its head_dim may differ.
        strategy: see above.
        queries: dtype of k, [batch, seq_len_q, num_heads_q, head_dim], of the last seq_len_q tokens.
            They rank the keys for heavy_hitters (pass all queries) and snapkv, and measure the
            error.
        budget: tokens to keep, for the last three strategies.
        window: see above; kivi leaves up to group_size - 1 more tokens unquantised, so that groups
            are whole.
        sinks, group_size, pool_size: see above.
        scale: factor of the scores; default 1 / sqrt(head_dim).

    Returns:
        CompressedKV. Its error is measured with the last 16 queries at most; this measurement is
        the only synchronisation with the GPU.

    Raises:
        ArrayError: dtype, shape or device of an argument.
        ConfigError: an option outside its range, or a missing one that the strategy requires.

    The attention that keys receive is computed by the backward of flash attention, without a score
    matrix. Runs on CuPy's current stream.
    Papers: Liu et al., KIVI, arXiv:2402.02750; Xiao et al., StreamingLLM, arXiv:2309.17453; Zhang
    et al., H2O, arXiv:2306.14048; Li et al., SnapKV, arXiv:2404.14469.

    >>> import numpy as np, cukit as ck
    >>> k, v = np.random.default_rng(0).standard_normal((2, 1, 256, 2, 64), np.float32)
    >>> ck.compress_kv(k, v, "sink_window", budget=6).positions[0, 0]
    array([  0,   1,   2,   3, 254, 255], dtype=int32)
    >>> small = ck.compress_kv(k, v, "int8", queries=k[:, -1:])
    >>> round(small.ratio, 2), small.error < 0.02
    (3.76, True)
    """  # noqa: E501  rows of a table
    check_choice(_OP, "strategy", strategy, (*_STRATEGIES,))
    k, v, queries = adopt(_OP, k, v, queries)
    check_array(_OP, "k", k, dtypes=KERNEL_DTYPES, ndim=4, contiguous=None)
    shape = (*k.shape[:-1], None)
    check_array(_OP, "v", v, dtypes=KERNEL_DTYPES, shape=shape, contiguous=None)
    check_same_dtype(_OP, k=k, v=v)
    if not k.size or not v.size:
        raise ArrayShapeError(f"{_OP}: k and v must not be empty, got {k.shape} and {v.shape}")
    k, v = (namespace(k).ascontiguousarray(part) for part in (k, v))
    options = {
        "budget": budget, "window": window, "sinks": sinks, "group_size": group_size,
        "pool_size": pool_size,
    }  # fmt: skip
    for name, value in options.items():
        if value is not None:
            check_integer(_OP, name, value, least=0 if name in ("sinks", "window") else 1)
    if queries is not None:
        _check_queries(queries, k)
    if strategy in _SELECTING and budget is None:
        raise ConfigError(f"{_OP}: {strategy} requires a budget, the number of tokens to keep")
    if strategy in _RANKING and queries is None:
        raise ConfigError(f"{_OP}: {strategy} requires queries, which rank the keys")
    seq_len = k.shape[1]
    kept = seq_len if budget is None else min(budget, seq_len)
    call = _Call(k, v, queries, kept, window, sinks, group_size, pool_size, scale)
    if strategy in _SELECTING and kept == seq_len:
        parts = call.kept(_every_position(k))
    else:
        parts = _STRATEGIES[strategy](call)
    positions = parts.pop("positions").astype(np.int32)
    compressed = CompressedKV(
        strategy=strategy, positions=positions, seq_len=seq_len, dtype=k.dtype,
        original_nbytes=k.nbytes + v.nbytes, **{"recent": None, **parts},
    )  # fmt: skip
    if queries is None:
        return compressed
    return replace(compressed, error=_error(compressed, call))


def _check_queries(queries: Array, k: Array) -> None:
    shape = (k.shape[0], None, None, k.shape[3])
    check_array(_OP, "queries", queries, dtypes=(k.dtype,), shape=shape, contiguous=False)
    _, seq_q, heads_q, _ = queries.shape
    if not 1 <= seq_q <= k.shape[1] or not heads_q or heads_q % k.shape[2]:
        raise ArrayShapeError(
            f"{_OP}: queries must have 1 to {k.shape[1]} tokens and a multiple of k's "
            f"{k.shape[2]} heads, got {queries.shape}"
        )


def _error(compressed: CompressedKV, call: _Call) -> float:
    """The relative error of the outputs of the last queries."""
    assert call.queries is not None
    queries = call.queries[:, -_MAX_ERROR_QUERIES:]
    exact: Any = flash_attention(queries, call.k, call.v, causal=True, scale=call.scale)
    exact = exact.astype(np.float32)
    difference = compressed.attend(queries, scale=call.scale).astype(np.float32) - exact
    norm = float((exact * exact).sum())
    error = float((difference * difference).sum())
    return math.sqrt(error / norm) if norm else math.sqrt(error)


def _every_position(k: Array) -> Array:
    batch, seq_len, heads, _ = k.shape
    xp = namespace(k)
    return xp.broadcast_to(xp.arange(seq_len), (batch, heads, seq_len))


def _quantized(call: _Call, dtype: Any) -> dict[str, Any]:
    k, v = (quantize(part, dtype) for part in (call.k, call.v))
    return {"k": k, "v": v, "positions": _every_position(call.k)}


def _kivi(call: _Call, bits: int) -> dict[str, Any]:
    size = call.group_size
    value_size = min(size, call.v.shape[-1])
    old = max(0, call.k.shape[1] - call.newest(128)) // size * size
    return {
        "k": GroupCodes.encode(call.k[:, :old], bits, axis=1, group_size=size),
        "v": GroupCodes.encode(call.v[:, :old], bits, axis=3, group_size=value_size),
        # Copies, because a view would keep the whole original alive.
        "recent": (call.k[:, old:].copy(), call.v[:, old:].copy()),
        "positions": _every_position(call.k),
    }


def _sink_window(call: _Call) -> dict[str, Any]:
    every = _every_position(call.k)
    sinks = min(call.sinks, call.budget)
    newest = call.k.shape[1] - (call.budget - sinks)
    xp = namespace(every)
    return call.kept(xp.concatenate([every[..., :sinks], every[..., newest:]], axis=-1))


def _heavy_hitters(call: _Call) -> dict[str, Any]:
    newest = min(call.newest(call.budget // 2), call.budget)
    received = attention_received(call.queries, call.k, scale=call.scale)
    seq_len = call.k.shape[1]
    return call.kept(top_positions(received[..., : seq_len - newest], seq_len, call.budget))


def _snapkv(call: _Call) -> dict[str, Any]:
    assert call.queries is not None
    newest = min(call.newest(min(32, call.budget // 2)), call.budget)
    observed = call.queries[:, -max(1, newest) :]
    received = attention_received(observed, call.k, scale=call.scale)
    seq_len = call.k.shape[1]
    scores = pooled(received[..., : seq_len - newest], call.pool_size)
    return call.kept(top_positions(scores, seq_len, call.budget))


_STRATEGIES: dict[str, Callable[[_Call], dict[str, Any]]] = {
    "int8": lambda call: _quantized(call, int8),
    "float8": lambda call: _quantized(call, float8_e4m3),
    "kivi4": lambda call: _kivi(call, 4),
    "kivi2": lambda call: _kivi(call, 2),
    "sink_window": _sink_window,
    "heavy_hitters": _heavy_hitters,
    "snapkv": _snapkv,
}
_SELECTING = ("sink_window", "heavy_hitters", "snapkv")
_RANKING = ("heavy_hitters", "snapkv")
