"""Attention over a KVCacheManager: finds shared prefixes, stores new keys and values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.attention import PagedAttention, RecentKV, append_kv, pack_kv, paged_attention
from cukit.core.arrays import Array, adopt, check_array, empty, namespace
from cukit.core.scalars import check_integer
from cukit.errors import ConfigError
from cukit.kv_cache.manager import KVCacheManager, Tokens

_OP = "RadixAttention"


class _PromptStep(NamedTuple):
    """The arrays of a prompt step over an int4 cache, which all layers share.

    Attention reads the step's keys and values unquantised from a temporary array of `num_rows`
    rows, the ring buffer of the step's only request. Full blocks are quantised afterwards.
    """

    table: Array
    lengths: Array
    num_rows: int
    slots: Array
    """Rows of the step's tokens in the temporary array."""
    rings: Array
    packed_lens: Array
    sources: Array
    """Blocks of the temporary array to quantise."""
    targets: Array
    """Blocks of the cache that receive them."""
    remainder: slice
    """Rows of the last, partial block, which are copied to the request's ring buffer."""


class RadixAttention:
    """Attention of many requests over one cache, in which shared prefixes are computed once.

    Each forward pass of a model is a step: `add`, `append` or `resume` starts it, `attend` stores
    the new keys and values of a layer and computes its attention, `advance` ends it. Other calls of
    the manager (`fork`, `preempt`, `statistics`) are made on `cache` between steps.

    Args:
        cache: the manager of keys and values.
        num_heads_q: number of query heads.
        max_batch: maximum requests per step.
        max_blocks: maximum blocks per request; default all blocks of the cache.
        dtype: of q, k and v; required with an int8 or float8_e4m3 cache.
        window_size, softcap, sinks, scale, batch_invariant, checked: as for
            :func:`paged_attention`. Attention is causal.

    Raises:
        ConfigError: a step is started before the previous step has ended; or as for the manager.
        OutOfMemoryError: as for the manager. The failed call changes nothing.

    This object owns the tables, slots and positions of steps of at most max_batch tokens, so a
    decode step captured in a CUDA graph can be replayed after any `append` to the same number of
    requests.
    Paper: Zheng et al., SGLang (RadixAttention), arXiv:2312.07104.

    >>> import numpy as np, cukit as ck
    >>> cache = ck.KVCacheManager(8, 4, num_heads_kv=1, head_dim=8, dtype=np.float32)
    >>> attention = ck.RadixAttention(cache, num_heads_q=1, max_batch=4)
    >>> def attend(num_tokens):
    ...     ones = np.ones((1, num_tokens, 1, 8), np.float32)
    ...     return attention.attend(ones, ones, ones, 0)[0].shape
    >>> attention.add("a", [1, 2, 3, 4, 5])     # number of cached tokens
    0
    >>> attend(5), attention.advance()
    ((1, 5, 1, 8), None)
    >>> attention.add("b", [1, 2, 3, 4, 9, 9])
    4
    >>> attend(2), attention.positions.tolist()
    ((1, 2, 1, 8), [[4, 5]])
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        num_heads_q: int,
        max_batch: int,
        max_blocks: int | None = None,
        **options: Any,
    ) -> None:
        slab = cache.slab.array
        self.cache = cache
        self._max_batch = max_batch
        self._max_blocks = cache.num_blocks if max_blocks is None else max_blocks
        layers = range(slab.shape[1])
        self._caches = [(cache.keys(layer), cache.values(layer)) for layer in layers]
        """The keys and values of each layer. Slots are rows of these arrays, except with int4."""
        rings = cache.slab.recent
        if rings is not None:
            options.setdefault("dtype", rings.dtype)
            options["recent"] = rings[0], rings[1]
        self._rings = None if rings is None else [(rings[0, i], rings[1, i]) for i in layers]
        self._prompt: _PromptStep | None = None
        self._options = {
            name: options[name]
            for name in ("window_size", "softcap", "sinks", "scale", "batch_invariant")
            if name in options
        }
        self._attention = PagedAttention(
            [k for k, _ in self._caches], [v for _, v in self._caches], num_heads_q=num_heads_q,
            max_batch=max_batch, max_blocks=self._max_blocks, **options,
        )  # fmt: skip
        xp = namespace(slab)
        self._memory = xp.zeros(max_batch, np.int64), xp.zeros(max_batch, np.int32)
        self._requests: tuple[Hashable, ...] = ()
        """The requests of the current step; none between steps."""
        self._publishes = False
        self._slots: Array = self._memory[0][:0]
        self.positions: Array = self._memory[1][:0]
        """Positions of the step's tokens, int32 [requests, tokens], for `rope`."""
        self.length = 0
        """Tokens of the longest request before the step."""

    # Steps ----------------------------------------------------------------------------------------

    def add(
        self, request: Hashable, tokens: Tokens, *, salt: Hashable = None, priority: int = 0
    ) -> int:
        """Starts a request, and the step that computes its uncached tokens.

        Returns the number of cached tokens; the step computes `tokens[cached:]`, at least one.
        """
        self._check_between("add")
        self._check_room("add", 1, len(tokens))
        cached = self.cache.allocate(request, tokens, salt=salt, priority=priority)
        self._begin([request], self.cache.slots(request, cached), publishes=True)
        return cached

    def append(self, requests: Sequence[Hashable], tokens: Tokens) -> None:
        """Starts a decode step: appends one token to each of `requests`."""
        self._check_between("append")
        longest = max(map(self.cache.num_tokens, requests), default=0)
        self._check_room("append", len(requests), longest + 1)
        slots = self.cache.append_each(requests, tokens)
        self._begin(requests, slots, publishes=False)

    def resume(self, request: Hashable) -> int:
        """Assigns blocks to a preempted request again; returns how many of its first tokens have
        keys and values. If not all have them, the call starts the step that computes the others."""
        self._check_between("resume")
        ready = self.cache.resume(request)
        slots = self.cache.slots(request, ready)
        if slots.size:
            self._begin([request], slots, publishes=True)
        return ready

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        layer: int,
        *,
        cos: Array | None = None,
        sin: Array | None = None,
        interleaved: bool = False,
    ) -> tuple[Array, Array]:
        """Stores the step's keys and values of a layer, and computes the layer's attention.

        Args:
            q: [requests, tokens, num_heads_q, head_dim] of the step's tokens, in the dtype of the
                cache or, if it is quantised, in the `dtype` of the constructor.
            k, v: as q, with num_heads_kv.
            layer: index of the layer; each layer once per step, in any order.
            cos, sin, interleaved: as for :func:`append_kv`, which then rotates q and k by
                `positions`. Without them q and k are expected to be rotated already, if at all.

        Returns:
            `(out, lse)` as :func:`paged_attention`.
        """
        if not self._requests:
            raise ConfigError(
                f"{_OP}.attend: no step has been started; add, append or resume first"
            )
        check_integer(f"{_OP}.attend", "layer", layer, least=0, most=len(self._caches) - 1)
        q, k, v = adopt(_OP, q, k, v)
        shape = (*self.positions.shape, *self._caches[layer][0].shape[2:])
        for name, array in (("k", k), ("v", v)):
            dtypes = (self._attention.dtype,)
            check_array(_OP, name, array, dtypes=dtypes, shape=shape, contiguous=False)
        rows = tuple(array.reshape(-1, *array.shape[2:]) for array in (k, v))
        rotary: dict[str, Any] = {}
        if cos is not None:
            rotary = {
                "q": q.reshape(-1, *q.shape[2:]), "cos": cos, "sin": sin,
                "position_ids": self.positions.reshape(-1), "interleaved": interleaved,
            }  # fmt: skip
        if self._prompt is not None:
            return self._attend_prompt(q, rows, layer, rotary)
        k_cache, v_cache = (self._caches if self._rings is None else self._rings)[layer]
        rotated = append_kv(rows[0], rows[1], k_cache, v_cache, self._slots.reshape(-1), **rotary)
        if rotated is not None:
            q = rotated.reshape(q.shape)
        attended: tuple[Array, Array] = self._attention.run(q, layer, return_lse=True)
        return attended

    def advance(self, num_tokens: int | None = None) -> None:
        """Ends a step, after `attend` of all layers.

        The full blocks of an added request become available to others. num_tokens: expected tokens
        per request of the step, checked if given.
        """
        if not self._requests:
            raise ConfigError(f"{_OP}.advance: no step has been started")
        if num_tokens is not None and num_tokens != self.positions.shape[1]:
            raise ConfigError(
                f"{_OP}.advance: the step has {self.positions.shape[1]} tokens per request, got "
                f"{num_tokens}"
            )
        if self._rings is not None:
            self.cache.pack()
        if self._publishes:
            for request in self._requests:
                self.cache.publish(request)
        self._requests = ()

    def free(self, request: Hashable, *, keep: bool = True) -> None:
        """Ends a request. keep: its full blocks stay cached until they are evicted.

        If the current step has only this request, the step is aborted and nothing is kept.
        """
        if request in self._requests:
            if len(self._requests) > 1:
                raise ConfigError(
                    f"{_OP}.free: {request!r} is in a step with other requests; attend and advance "
                    "first"
                )
            keep = False
        self.cache.free(request, keep=keep)
        if request in self._requests:
            self._requests = ()

    # Implementation -------------------------------------------------------------------------------

    def _begin(
        self, requests: Sequence[Hashable], slots: npt.NDArray[np.int64], *, publishes: bool
    ) -> None:
        table, lengths = self.cache.block_table(requests)
        num_tokens = slots.size // len(requests)
        positions = lengths[:, None] + np.arange(-num_tokens, 0, dtype=np.int32)
        recent = {}
        if self._rings is not None:
            recent = dict(zip(("rings", "packed_lens"), self.cache.recent(requests), strict=True))
        self._prompt = None
        if publishes and recent:
            self._prompt = self._prompt_step(table, lengths, num_tokens)
        else:
            self._attention.plan(table, lengths, seq_len_q=num_tokens, **recent)
        self._slots = _placed(self._memory[0], slots)
        self.positions = _placed(self._memory[1], positions)
        self.length = int(lengths.max()) - num_tokens
        self._publishes = publishes
        self._requests = tuple(requests)

    def _prompt_step(
        self, table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], num_tokens: int
    ) -> _PromptStep:
        xp = namespace(self.cache.slab.array)
        size, first = self.cache.block_size, int(lengths[0]) - num_tokens
        num_rows = -(-num_tokens // size) * size
        full = np.arange(first // size, int(lengths[0]) // size)  # the new full blocks
        rest = min(int(lengths[0]) % size, num_tokens)
        begin = (int(lengths[0]) - rest) % num_rows
        return _PromptStep(
            table=xp.asarray(table),
            lengths=xp.asarray(lengths),
            num_rows=num_rows,
            slots=xp.asarray((first + np.arange(num_tokens)) % num_rows),
            rings=xp.zeros(1, np.int32),
            packed_lens=xp.full(1, first, np.int32),
            sources=xp.asarray(full * size % num_rows // size),
            targets=xp.asarray(table[0, full].astype(np.int64)),
            remainder=slice(begin, begin + rest),
        )

    def _attend_prompt(
        self, q: Array, rows: tuple[Array, ...], layer: int, rotary: dict[str, Any]
    ) -> tuple[Array, Array]:
        """`attend` of a prompt step, whose only request is new or resumed."""
        assert self._prompt is not None
        assert self._rings is not None
        step = self._prompt
        new_k, new_v = (empty(x, (1, step.num_rows, *x.shape[1:])) for x in rows)
        rotated = append_kv(rows[0], rows[1], new_k, new_v, step.slots, **rotary)
        if rotated is not None:
            q = rotated.reshape(q.shape)
        k_cache, v_cache = self._caches[layer]
        attended: tuple[Array, Array] = paged_attention(
            q,
            k_cache,
            v_cache,
            step.table,
            step.lengths,
            recent=RecentKV(new_k, new_v, step.rings, step.packed_lens),
            return_lse=True,
            **self._options,
        )
        pack_kv(new_k, new_v, k_cache, v_cache, step.sources, step.targets)
        rest_k, rest_v = (x[0, step.remainder] for x in (new_k, new_v))
        if len(rest_k):
            slots = self._slots.reshape(-1)[-len(rest_k) :]
            append_kv(rest_k, rest_v, *self._rings[layer], slots)
        return attended

    def _check_between(self, name: str) -> None:
        if self._requests:
            raise ConfigError(
                f"{_OP}.{name}: the step of {', '.join(map(repr, self._requests))} has not ended; "
                "attend in all layers and advance first"
            )

    def _check_room(self, name: str, num_requests: int, num_tokens: int) -> None:
        if not 1 <= num_requests <= self._max_batch:
            raise ConfigError(
                f"{_OP}.{name}: a step must have 1 to {self._max_batch} requests, "
                f"got {num_requests}"
            )
        most = self._max_blocks * self.cache.block_size
        if not 1 <= num_tokens <= most:
            raise ConfigError(
                f"{_OP}.{name}: a request must have 1 to {most} tokens, got {num_tokens}"
            )


def _placed(memory: Array, host: npt.NDArray[Any]) -> Array:
    """A copy of `host` at the start of `memory`, or in new memory if that is too small."""
    if host.size > memory.size:
        return namespace(memory).asarray(host)
    part = memory[: host.size]
    part[...] = namespace(memory).asarray(host.reshape(-1))
    return part.reshape(host.shape)
