"""Smaller caches: fewer bits for each key and value, or fewer of them."""

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
from cukit.kv_cache.group_codes import GroupCodes
from cukit.kv_cache.key_scores import attention_received, pooled, top_positions
from cukit.quantization import quantize

_OP = "compress_kv"
_MOST_ERROR_QUERIES = 16
"""Of whose outputs the error is. Tokens that come later are what the cache is for; earlier queries
look at neighbours that need not be kept."""


@dataclass(frozen=True)
class CompressedKV:
    """Keys and values of one layer after :func:`compress_kv`.

    strategy: what made it.
    k, v: [batch, kept, num_heads_kv, head_dim]: arrays of the original dtype, or QuantizedArrays
        with a scale for each token and head, or GroupCodes of the older tokens.
    recent: with GroupCodes: k and v of the newest tokens as they were.
    positions: int32 [batch, num_heads_kv, kept], ascending: where each key stood originally. Keys
        keep the rotation of that position.
    seq_len: tokens of the original; the next token's position.
    dtype: of the original k and v. original_nbytes: of both.
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
        """Bytes of what attention reads: keys, values, their scales."""
        return sum(int(part.nbytes) for part in (self.k, self.v, *(self.recent or ())))

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the original."""
        return self.original_nbytes / self.nbytes

    @property
    def num_kept(self) -> int:
        """Keys of each head."""
        return int(self.positions.shape[-1])

    def dense(self) -> tuple[Array, Array]:
        """k and v as arrays, [batch, kept, num_heads_kv, head_dim]."""
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
        """k_cache, v_cache, block_table and seq_lens for :func:`paged_attention`: one block of all
        kept tokens a request. GroupCodes are decoded; all else is read as it lies."""
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
        """Attention of queries over what was kept; a query sees keys up to its own position.

        Args:
            q: [batch, seq_len_q, num_heads_q, head_dim], as for :func:`flash_attention`.
            first_position: of q; omitted: they are the last of the seq_len tokens. From seq_len on
                they are new tokens, whose own keys `merge_attention_states` adds.
            scale, return_lse: as for :func:`flash_attention`.

        Returns:
            `out`, or `(out, lse)`.
        """
        seq_q = q.shape[1]
        first = self.seq_len - seq_q if first_position is None else first_position
        hides = first + 1 < self.seq_len
        aligned = self.num_kept == self.seq_len and first == self.seq_len - seq_q
        options: dict[str, Any] = {
            "causal": hides and aligned, "scale": scale, "return_lse": return_lse
        }  # fmt: skip
        if isinstance(self.k, QuantizedArray) and (aligned or not hides):
            return paged_attention(q, *self.paged(), **options)
        k, v = self.dense()
        if hides and not aligned:
            xp = namespace(self.positions)
            own = xp.arange(first, first + seq_q)[:, None]
            mask = xp.repeat(self.positions, q.shape[2] // k.shape[2], axis=1)[:, :, None] <= own
            options["mask"] = mask
        return flash_attention(q, k, v, **options)


class _Asked(NamedTuple):
    """Arguments of a call, checked."""

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
        """The parts of a result that holds these positions, int [batch, heads, kept]."""
        xp = namespace(self.k)
        rows = positions.swapaxes(1, 2)[..., None]
        bits = f"u{self.k.itemsize}"  # a copy of bits, whatever the dtype
        k, v = (
            xp.take_along_axis(part.view(bits), rows, axis=1).view(part.dtype)
            for part in (self.k, self.v)
        )
        return {"k": k, "v": v, "positions": positions}

    def newest(self, default: int) -> int:
        """The tokens at the end that are kept as they are."""
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
    """A smaller cache of the same tokens, which attention reads: see :class:`CompressedKV`.

    | strategy | what is stored |
    | --- | --- |
    | `"int8"`, `"float8"` | all tokens, 8 bits, a float32 scale for each token and head |
    | `"kivi4"`, `"kivi2"` | 4 or 2 bits: keys in groups of `group_size` tokens of a channel, values in groups of `group_size` channels of a token; the `window` newest tokens (128) as they are |
    | `"sink_window"` | the first `sinks` tokens and the newest of a `budget` |
    | `"heavy_hitters"` | of a `budget` the `window` newest (half), and those that the `queries` attended to most |
    | `"snapkv"` | of a `budget` the `window` newest (32, at most half), and those that their queries attended to most, after a maximum over `pool_size` neighbours |

    Args:
        k: float32|float16|bfloat16 [batch, seq_len, num_heads_kv, head_dim], rotated already.
        v: as k; its head_dim may differ.
        strategy: see above.
        queries: dtype of k, [batch, seq_len_q, num_heads_q, head_dim], of the last seq_len_q tokens.
            They rank keys for heavy_hitters (give it all) and snapkv, and measure the error.
        budget: tokens to keep, for the last three strategies.
        window: see above; with kivi up to group_size - 1 more, so that groups are whole.
        sinks, group_size, pool_size: see above.
        scale: factor of the scores; 1 / sqrt(head_dim) where omitted.

    Returns:
        CompressedKV. Its error is measured with the last 16 of the queries at most; measuring it
        waits for the GPU, nothing else does.

    Raises:
        ArrayError: dtype, shape or device of an argument.
        ConfigError: an option outside its range, or one that the strategy needs and lacks.

    Attention that keys received comes from the kernels of flash attention's backward, without a
    matrix of scores. Runs on CuPy's current stream.
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
        raise ArrayShapeError(f"{_OP}: there is nothing to compress in {k.shape} and {v.shape}")
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
        raise ConfigError(f"{_OP}: {strategy} needs a budget, the tokens to keep")
    if strategy in _RANKING and queries is None:
        raise ConfigError(f"{_OP}: {strategy} needs queries, which rank the keys")
    seq_len = k.shape[1]
    kept = seq_len if budget is None else min(budget, seq_len)
    asked = _Asked(k, v, queries, kept, window, sinks, group_size, pool_size, scale)
    if strategy in _SELECTING and kept == seq_len:
        parts = asked.kept(_every_position(k))
    else:
        parts = _STRATEGIES[strategy](asked)
    positions = parts.pop("positions").astype(np.int32)
    compressed = CompressedKV(
        strategy=strategy, positions=positions, seq_len=seq_len, dtype=k.dtype,
        original_nbytes=k.nbytes + v.nbytes, **{"recent": None, **parts},
    )  # fmt: skip
    if queries is None:
        return compressed
    return replace(compressed, error=_error(compressed, asked))


def _check_queries(queries: Array, k: Array) -> None:
    shape = (k.shape[0], None, None, k.shape[3])
    check_array(_OP, "queries", queries, dtypes=(k.dtype,), shape=shape, contiguous=False)
    _, seq_q, heads_q, _ = queries.shape
    if not 1 <= seq_q <= k.shape[1] or not heads_q or heads_q % k.shape[2]:
        raise ArrayShapeError(
            f"{_OP}: queries must be of 1 to {k.shape[1]} tokens, with a multiple of k's "
            f"{k.shape[2]} heads, got {queries.shape}"
        )


def _error(compressed: CompressedKV, asked: _Asked) -> float:
    """Of the outputs of the last queries."""
    assert asked.queries is not None
    queries = asked.queries[:, -_MOST_ERROR_QUERIES:]
    exact: Any = flash_attention(queries, asked.k, asked.v, causal=True, scale=asked.scale)
    exact = exact.astype(np.float32)
    difference = compressed.attend(queries, scale=asked.scale).astype(np.float32) - exact
    size = float((exact * exact).sum())
    error = float((difference * difference).sum())
    return math.sqrt(error / size) if size else math.sqrt(error)


def _every_position(k: Array) -> Array:
    batch, seq_len, heads, _ = k.shape
    xp = namespace(k)
    return xp.broadcast_to(xp.arange(seq_len), (batch, heads, seq_len))


def _quantized(asked: _Asked, dtype: Any) -> dict[str, Any]:
    k, v = (quantize(part, dtype) for part in (asked.k, asked.v))
    return {"k": k, "v": v, "positions": _every_position(asked.k)}


def _kivi(asked: _Asked, bits: int) -> dict[str, Any]:
    size = asked.group_size
    value_size = min(size, asked.v.shape[-1])
    old = max(0, asked.k.shape[1] - asked.newest(128)) // size * size
    return {
        "k": GroupCodes.encode(asked.k[:, :old], bits, axis=1, group_size=size),
        "v": GroupCodes.encode(asked.v[:, :old], bits, axis=3, group_size=value_size),
        # Copies: a view would keep all of the original alive.
        "recent": (asked.k[:, old:].copy(), asked.v[:, old:].copy()),
        "positions": _every_position(asked.k),
    }


def _sink_window(asked: _Asked) -> dict[str, Any]:
    every = _every_position(asked.k)
    sinks = min(asked.sinks, asked.budget)
    newest = asked.k.shape[1] - (asked.budget - sinks)
    xp = namespace(every)
    return asked.kept(xp.concatenate([every[..., :sinks], every[..., newest:]], axis=-1))


def _heavy_hitters(asked: _Asked) -> dict[str, Any]:
    newest = min(asked.newest(asked.budget // 2), asked.budget)
    received = attention_received(asked.queries, asked.k, scale=asked.scale)
    seq_len = asked.k.shape[1]
    return asked.kept(top_positions(received[..., : seq_len - newest], seq_len, asked.budget))


def _snapkv(asked: _Asked) -> dict[str, Any]:
    assert asked.queries is not None
    newest = min(asked.newest(min(32, asked.budget // 2)), asked.budget)
    observing = asked.queries[:, -max(1, newest) :]
    received = attention_received(observing, asked.k, scale=asked.scale)
    seq_len = asked.k.shape[1]
    scores = pooled(received[..., : seq_len - newest], asked.pool_size)
    return asked.kept(top_positions(scores, seq_len, asked.budget))


_STRATEGIES: dict[str, Callable[[_Asked], dict[str, Any]]] = {
    "int8": lambda asked: _quantized(asked, int8),
    "float8": lambda asked: _quantized(asked, float8_e4m3),
    "kivi4": lambda asked: _kivi(asked, 4),
    "kivi2": lambda asked: _kivi(asked, 2),
    "sink_window": _sink_window,
    "heavy_hitters": _heavy_hitters,
    "snapkv": _snapkv,
}
_SELECTING = ("sink_window", "heavy_hitters", "snapkv")
_RANKING = ("heavy_hitters", "snapkv")
