"""The memory of a KV cache: a slab of blocks, copies within it, and copies to and from the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cukit.attention import pack_kv
from cukit.core.arrays import Array, address_of, is_gpu_array, namespace
from cukit.core.device import gpu_available
from cukit.core.narrow_dtype import NarrowDtype, int4
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ConfigError
from cukit.memory import HostProvider, MemoryPool, batched_copy, default_pool

_STAGING_BYTES = 64 << 20
"""Bytes per chunk of a copy to or from the host: 1.2 ms at 55 GB/s, enough to hide the launches
between chunks."""
_ALIGNMENT = 16
"""Alignment of the ranges that batched_copy moves on a GPU."""


class KVCacheSlab:
    """Blocks of keys and values for every layer, in one allocation of a memory pool.

    array: [2, num_layers, num_blocks, block_size, num_heads_kv, head_dim]; keys, then values. With
        int4 the last axis has head_dim / 2 bytes. A block has the same number in all layers.
    scales: with 8-bit codes, float32 [2, num_layers, num_blocks, block_size, num_heads_kv, 1]; else
        None. Scales are stored after the codes of their block, head by head, so that one copy moves
        both; the same holds for the scales and zero points of int4 codes. int4 codes are also
        stored head by head, because a row of a head is only half of a cache line (head_dim 128).
    recent: with int4, [2, num_layers, num_rings, block_size, num_heads_kv, head_dim] in 16 bits,
        the ring buffers of blocks that are not packed yet; else None.
    block_bytes: bytes of a block: keys and values of all layers, with their scales.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: np.dtype[Any] | NarrowDtype,
        pool: MemoryPool | None,
        num_rings: int = 0,
        recent_dtype: np.dtype[Any] | None = None,
    ) -> None:
        """Allocates the slab.

        shape: num_layers, num_blocks, block_size, num_heads_kv, head_dim. pool: None for the
        default pool of the current device, or host memory without a GPU. num_rings, recent_dtype:
        number and dtype of the ring buffers.
        """
        num_layers, num_blocks, *block = shape
        codes = dtype if isinstance(dtype, NarrowDtype) else None
        stored = dtype.storage_dtype if isinstance(dtype, NarrowDtype) else dtype
        row_bytes = math.prod(block) * stored.itemsize
        scale_bytes = 4 * math.prod(block[:2]) if codes else 0
        if codes is int4:
            row_bytes //= 2
            # Two float16 per channel (keys) or per row (values).
            scale_bytes = 4 * block[1] * max(block[0], block[2])
        part_bytes = row_bytes + scale_bytes
        if row_bytes % _ALIGNMENT or scale_bytes % _ALIGNMENT:
            scales = f", and their scales, {scale_bytes}" if codes else ""
            raise ConfigError(
                "KVCacheManager: a layer's keys of one block (block_size x num_heads_kv x head_dim "
                f"of {dtype}) must be a multiple of {_ALIGNMENT} bytes, got {row_bytes}{scales}"
            )
        num_parts = 2 * num_layers
        self.block_bytes = num_parts * part_bytes
        num_bytes = self.block_bytes * num_blocks
        if pool is None:
            pool = default_pool() if gpu_available() else MemoryPool(provider=HostProvider())
        self._buffer = pool.allocate_buffer(num_bytes)
        self._codes = codes
        if codes is int4:
            self._factors = self._group_factors(shape, row_bytes, part_bytes)
            shape = (*shape[:4], shape[4] // 2)
        self.array, self.scales = self._parts(shape, stored, row_bytes, scale_bytes)
        self.recent: Array | None = None
        self._ring_buffer = None
        if codes is int4:
            self._ring_buffer = pool.allocate_buffer(4 * num_layers * num_rings * math.prod(block))
            self.recent = self._ring_buffer.array((2, num_layers, num_rings, *block), recent_dtype)
            self._ring_bits: Array = self._ring_buffer.array(self.recent.shape, np.uint16)
        self._bytes: Array = self._buffer.array((num_bytes,), np.uint8)
        self._words: Array = self._buffer.array((num_parts, num_blocks, part_bytes // 8), np.int64)
        self._part_bytes = part_bytes
        self._part_starts = np.arange(num_parts)[:, None] * num_blocks
        self._blocks_at_once = max(1, _STAGING_BYTES // self.block_bytes)
        self._side_stream: Any = None
        self._in_flight: list[HostBlocks] = []
        """Copies that may not have finished; keeps their host memory allocated."""

    def layer_cache(self, kind: int, layer: int) -> Array | QuantizedArray:
        """The keys (0) or values (1) of a layer, a view."""
        rows = self.array[kind, layer]
        if self._codes is int4:
            return self._grouped(kind, slice(layer, layer + 1))
        if self._codes is None or self.scales is None:
            return rows
        return QuantizedArray(rows, self._codes, rows.shape, self.scales[kind, layer], axis=-1)

    def pack(self, rings: Sequence[int], blocks: Sequence[int]) -> None:
        """int4: quantises ring buffers to blocks, all layers in one launch."""
        assert self.recent is not None
        if not rings:
            return
        num_layers, num_blocks = self.array.shape[1:3]
        layers = np.arange(num_layers)[:, None]
        groups = (
            (layers * self.recent.shape[2] + np.asarray(rings)).reshape(-1),
            (layers * num_blocks + np.asarray(blocks)).reshape(-1),
        )
        xp = namespace(self.array)
        new = self.recent.reshape(2, -1, *self.recent.shape[3:])
        caches = (self._grouped(kind, slice(None)) for kind in range(2))
        pack_kv(*new, *caches, *(xp.asarray(each) for each in groups))

    def copy_rings(self, destinations: Sequence[int], sources: Sequence[int]) -> None:
        """Copies ring buffers onto others, on the current stream."""
        for destination, source in zip(destinations, sources, strict=True):
            self._ring_bits[:, :, destination] = self._ring_bits[:, :, source]

    def _grouped(self, kind: int, layers: slice) -> QuantizedArray:
        """The int4 keys (0) or values (1) of layers, with their blocks along one axis."""
        rows = self.array[kind, layers]
        rows, scales, zeros = (
            _joined(x) for x in (rows, *(each[layers] for each in self._factors[kind]))
        )
        shape = (*rows.shape[:-1], 2 * rows.shape[-1])
        axis, size = (1, shape[1]) if kind == 0 else (3, shape[3])
        return QuantizedArray(rows, int4, shape, scales, zeros, axis=axis, group_size=size)

    def _group_factors(
        self, shape: tuple[int, ...], row_bytes: int, part_bytes: int
    ) -> list[tuple[Array, Array]]:
        """int4: scales and zero points of keys, [num_layers, num_blocks, 1, heads, head_dim], and
        of values, [num_layers, num_blocks, block_size, heads, 1]."""
        num_layers, num_blocks, size, heads, head_dim = shape
        halves = self._buffer.array((2, num_layers, num_blocks, part_bytes // 2), np.float16)
        halves = halves[..., row_bytes // 2 :]
        factors = []
        for kind, columns in ((0, head_dim), (1, size)):
            both = halves[kind, ..., : 2 * heads * columns]
            both = both.reshape(num_layers, num_blocks, 2, heads, columns)
            if kind == 0:
                pair = both[:, :, 0, None], both[:, :, 1, None]
            else:
                pair = (
                    both[:, :, 0].swapaxes(-1, -2)[..., None],
                    both[:, :, 1].swapaxes(-1, -2)[..., None],
                )
            factors.append(pair)
        return factors

    def _parts(
        self, shape: tuple[int, ...], stored: np.dtype[Any], row_bytes: int, scale_bytes: int
    ) -> tuple[Array, Array | None]:
        """Views of the rows and of the scales of all blocks."""
        if not scale_bytes:
            return self._buffer.array((2, *shape), stored), None
        part_bytes = row_bytes + scale_bytes
        parts = self._buffer.array((2, *shape[:2], part_bytes // stored.itemsize), stored)
        if self._codes is int4:  # head by head
            layers, blocks, size, heads, width = shape
            rows = parts[..., :row_bytes].reshape(2, layers, blocks, heads, size, width)
            return rows.swapaxes(3, 4), None
        words = self._buffer.array((2, *shape[:2], part_bytes // 4), np.float32)
        rows = parts[..., : row_bytes // stored.itemsize].reshape(2, *shape)
        scales = words[..., row_bytes // 4 :].reshape(2, *shape[:2], shape[3], shape[2])
        return rows, scales.swapaxes(-1, -2)[..., None]

    def copy_blocks(self, destinations: Sequence[int], sources: Sequence[int]) -> None:
        """Copies blocks onto others, all layers in one launch, on the current stream."""
        if not destinations:
            return
        moves = np.empty((self._part_starts.size, len(sources), 3), np.int64)
        moves[:, :, 0] = (self._part_starts + np.asarray(destinations)) * self._part_bytes
        moves[:, :, 1] = (self._part_starts + np.asarray(sources)) * self._part_bytes
        moves[:, :, 2] = self._part_bytes
        batched_copy(self._bytes, moves.reshape(-1, 3))

    def to_host(self, blocks: Sequence[int], ring: int | None = None) -> HostBlocks:
        """Copies blocks and a ring buffer to host memory; on a GPU to pinned memory, on a separate
        stream.

        Only work enqueued after `wait` may overwrite the blocks; the ring buffer may be overwritten
        at once.
        """
        host = HostBlocks(self, len(blocks))
        staged_ring = None
        if ring is not None:
            staged_ring = host.hold_ring(self._ring_bits[:, :, ring])
        if not is_gpu_array(self._words):
            for chunk, words in self._chunks(blocks, host):
                self._words.take(chunk, axis=1, out=words)
            return host
        with self._copy_stream() as stream:
            try:
                if host.ring is not None and staged_ring is not None:
                    _copy_async(
                        host.ring.ctypes.data, staged_ring.data.ptr, staged_ring.nbytes, stream
                    )
                for chunk, words in self._chunks(blocks, host):
                    staged = self._staging[: words.size].reshape(words.shape)
                    self._words.take(namespace(staged).asarray(chunk), axis=1, out=staged)
                    _copy_async(words.ctypes.data, staged.data.ptr, words.nbytes, stream)
            finally:
                self._mark(host, stream)
        return host

    def from_host(self, host: HostBlocks, blocks: Sequence[int], ring: int | None = None) -> None:
        """Copies `host` to `blocks`, which may differ from the copied ones, and its ring buffer to
        `ring`. Later work on the current stream waits for the copies."""
        if ring is not None:
            self.wait(host)
            self._ring_bits[:, :, ring] = namespace(self._ring_bits).asarray(host.ring)
        if not is_gpu_array(self._words):
            for chunk, words in self._chunks(blocks, host):
                self._words[:, chunk] = words
            return
        try:
            with self._copy_stream() as stream:
                try:
                    for chunk, words in self._chunks(blocks, host):
                        staged = self._staging[: words.size].reshape(words.shape)
                        _copy_async(staged.data.ptr, words.ctypes.data, words.nbytes, stream)
                        self._words[:, namespace(staged).asarray(chunk)] = staged
                finally:
                    self._mark(host, stream)
        finally:
            self.wait(host)  # also on failure: the blocks may then be reused

    def wait(self, host: HostBlocks) -> None:
        """Makes the current stream wait for the latest copy of `host`."""
        if host.arrived is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(host.arrived)

    def _mark(self, host: HostBlocks, stream: Any) -> None:
        """Records an event after the copies of `host`, and keeps `host` allocated until then."""
        self._in_flight = [each for each in self._in_flight if not each.arrived.done]
        host.arrived = stream.record()
        self._in_flight.append(host)

    def _chunks(
        self, blocks: Sequence[int], host: HostBlocks
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Chunks of blocks that fit in the staging memory, each with its range of host memory."""
        numbers = np.asarray(blocks, np.int64)
        num_parts, _, part_words = self._words.shape
        for begin in range(0, len(numbers), self._blocks_at_once):
            chunk = numbers[begin : begin + self._blocks_at_once]
            first, size = begin * num_parts * part_words, chunk.size * num_parts * part_words
            yield chunk, host.words[first : first + size].reshape(num_parts, -1, part_words)

    def _copy_stream(self) -> Any:
        """The stream of all copies to and from the host, which share the staging memory.

        Later work on it waits for the work enqueued on the current stream so far.
        """
        import cupy

        if self._side_stream is None:
            self._side_stream = cupy.cuda.Stream(non_blocking=True)
            self._staging = cupy.empty(self._blocks_at_once * self.block_bytes // 8, np.int64)
        self._side_stream.wait_event(cupy.cuda.get_current_stream().record())
        return self._side_stream


class HostBlocks:
    """A host copy of blocks of a slab, in the order of the copy.

    The pinned memory returns to CuPy's pool only after the latest copy has finished, because its
    next owner may write to it immediately.
    """

    def __init__(self, slab: KVCacheSlab, num_blocks: int) -> None:
        self.nbytes = num_blocks * slab.block_bytes
        self.ring: Any = None
        """A copy of a ring buffer, or None."""
        self._staged: Any = None
        self._arrived: list[Any] = []
        weakref.finalize(self, _synchronize, self._arrived)
        if is_gpu_array(slab.array):
            import cupyx

            self.words = cupyx.empty_pinned(self.nbytes // 8, np.int64)
        else:
            self.words = np.empty(self.nbytes // 8, np.int64)

    def hold_ring(self, rows: Array) -> Array | None:
        """Allocates host memory for a ring buffer and returns a device copy of the ring buffer. If
        the slab is in host memory, copies the ring buffer immediately and returns None."""
        if not is_gpu_array(rows):
            self.ring = rows.copy()
            return None
        import cupyx

        self._staged = rows.copy()
        self.ring = cupyx.empty_pinned(rows.shape, rows.dtype)
        return self._staged

    @property
    def arrived(self) -> Any:
        """The event after the latest copy; None for a slab in host memory."""
        return self._arrived[0] if self._arrived else None

    @arrived.setter
    def arrived(self, event: Any) -> None:
        self._arrived[:] = [event]


def _joined(x: Array) -> Array:
    """A view of x with its first two axes merged."""
    joined = x.reshape(-1, *x.shape[2:])
    assert address_of(joined) == address_of(x)
    return joined


def _synchronize(events: list[Any]) -> None:
    for event in events:
        event.synchronize()


def _copy_async(destination: int, source: int, size: int, stream: Any) -> None:
    from cupy.cuda import runtime

    runtime.memcpyAsync(destination, source, size, runtime.memcpyDefault, stream.ptr)
