"""The memory of a KV cache: one slab of blocks, copies within it, and copies to host memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cukit.core.arrays import Array, is_gpu_array, namespace
from cukit.core.device import gpu_available
from cukit.errors import ConfigError
from cukit.memory import HostProvider, MemoryPool, batched_copy, default_pool

_STAGING_BYTES = 64 << 20
"""A piece takes 1.2 ms at 55 GB/s, so the launches between pieces do not show."""
_ALIGNMENT = 16
"""Of the runs that batched_copy moves on a GPU."""


class KVCacheSlab:
    """Blocks of keys and values for every layer, in one allocation of a memory pool.

    array: [2, num_layers, num_blocks, block_size, num_heads_kv, head_dim]; keys, then values. A
        block has the same number in all layers.
    block_bytes: of one block, keys and values of all layers together.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: np.dtype[Any], pool: MemoryPool | None
    ) -> None:
        """`shape`: num_layers, num_blocks, block_size, num_heads_kv, head_dim. `pool`: None takes
        the default pool of the current device, or host memory without a GPU."""
        num_layers, num_blocks, *block = shape
        part_bytes = math.prod(block) * dtype.itemsize
        if part_bytes % _ALIGNMENT:
            raise ConfigError(
                "KVCacheManager: a layer's keys of one block (block_size x num_heads_kv x head_dim "
                f"of {dtype}) must be a multiple of {_ALIGNMENT} bytes, got {part_bytes}"
            )
        num_parts = 2 * num_layers
        self.block_bytes = num_parts * part_bytes
        num_bytes = self.block_bytes * num_blocks
        if pool is None:
            pool = default_pool() if gpu_available() else MemoryPool(provider=HostProvider())
        self._buffer = pool.allocate_buffer(num_bytes)
        self.array: Array = self._buffer.array((2, *shape), dtype)
        self._bytes: Array = self._buffer.array((num_bytes,), np.uint8)
        self._words: Array = self._buffer.array((num_parts, num_blocks, part_bytes // 8), np.int64)
        self._part_bytes = part_bytes
        self._part_starts = np.arange(num_parts)[:, None] * num_blocks
        self._blocks_at_once = max(1, _STAGING_BYTES // self.block_bytes)
        self._side_stream: Any = None
        self._under_way: list[HostBlocks] = []
        """Whose latest copy may not be through: their memory must not be given to others."""

    def copy_blocks(self, destinations: Sequence[int], sources: Sequence[int]) -> None:
        """Copies blocks onto others, all layers in one launch on the current stream."""
        if not destinations:
            return
        moves = np.empty((self._part_starts.size, len(sources), 3), np.int64)
        moves[:, :, 0] = (self._part_starts + np.asarray(destinations)) * self._part_bytes
        moves[:, :, 1] = (self._part_starts + np.asarray(sources)) * self._part_bytes
        moves[:, :, 2] = self._part_bytes
        batched_copy(self._bytes, moves.reshape(-1, 3))

    def to_host(self, blocks: Sequence[int]) -> HostBlocks:
        """Copies blocks to host memory: pinned on a GPU, on a stream beside the current one.

        They may be written again by work that waits for the result (`wait`).
        """
        host = HostBlocks(self, len(blocks))
        if not is_gpu_array(self._words):
            for piece, words in self._pieces(blocks, host):
                self._words.take(piece, axis=1, out=words)
            return host
        with self._copy_stream() as stream:
            try:
                for piece, words in self._pieces(blocks, host):
                    staged = self._staging[: words.size].reshape(words.shape)
                    self._words.take(namespace(staged).asarray(piece), axis=1, out=staged)
                    _copy_async(words.ctypes.data, staged.data.ptr, words.nbytes, stream)
            finally:
                self._mark(host, stream)
        return host

    def from_host(self, host: HostBlocks, blocks: Sequence[int]) -> None:
        """Copies blocks back, to blocks of any numbers. What is queued later sees them there."""
        if not is_gpu_array(self._words):
            for piece, words in self._pieces(blocks, host):
                self._words[:, piece] = words
            return
        try:
            with self._copy_stream() as stream:
                try:
                    for piece, words in self._pieces(blocks, host):
                        staged = self._staging[: words.size].reshape(words.shape)
                        _copy_async(staged.data.ptr, words.ctypes.data, words.nbytes, stream)
                        self._words[:, namespace(staged).asarray(piece)] = staged
                finally:
                    self._mark(host, stream)
        finally:
            self.wait(host)  # also where it fails: the blocks are then given to others

    def wait(self, host: HostBlocks) -> None:
        """Lets the current stream wait until the latest copy of `host` is through."""
        if host.arrived is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(host.arrived)

    def _mark(self, host: HostBlocks, stream: Any) -> None:
        """Records the end of the copies of `host`, and keeps its memory until then."""
        self._under_way = [each for each in self._under_way if not each.arrived.done]
        host.arrived = stream.record()
        self._under_way.append(host)

    def _pieces(
        self, blocks: Sequence[int], host: HostBlocks
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Blocks, as many as the staging memory holds, and their place in host memory."""
        numbers = np.asarray(blocks, np.int64)
        num_parts, _, part_words = self._words.shape
        for begin in range(0, len(numbers), self._blocks_at_once):
            piece = numbers[begin : begin + self._blocks_at_once]
            first, size = begin * num_parts * part_words, piece.size * num_parts * part_words
            yield piece, host.words[first : first + size].reshape(num_parts, -1, part_words)

    def _copy_stream(self) -> Any:
        """The stream of all copies to and from the host, so that they share staging memory.

        What it is given from here on follows what the current stream was given before.
        """
        import cupy

        if self._side_stream is None:
            self._side_stream = cupy.cuda.Stream(non_blocking=True)
            self._staging = cupy.empty(self._blocks_at_once * self.block_bytes // 8, np.int64)
        self._side_stream.wait_event(cupy.cuda.get_current_stream().record())
        return self._side_stream


class HostBlocks:
    """Blocks that were copied out of a slab, in the order of the copy.

    The memory is pinned and goes back to CuPy's pool only after the latest copy: who gets it from
    there writes at once.
    """

    def __init__(self, slab: KVCacheSlab, num_blocks: int) -> None:
        self.nbytes = num_blocks * slab.block_bytes
        self._arrived: list[Any] = []
        weakref.finalize(self, _synchronize, self._arrived)
        if is_gpu_array(slab.array):
            import cupyx

            self.words = cupyx.empty_pinned(self.nbytes // 8, np.int64)
        else:
            self.words = np.empty(self.nbytes // 8, np.int64)

    @property
    def arrived(self) -> Any:
        """The event of the latest copy to or from here; None for a slab in host memory."""
        return self._arrived[0] if self._arrived else None

    @arrived.setter
    def arrived(self, event: Any) -> None:
        self._arrived[:] = [event]


def _synchronize(events: list[Any]) -> None:
    for event in events:
        event.synchronize()


def _copy_async(destination: int, source: int, size: int, stream: Any) -> None:
    from cupy.cuda import runtime

    runtime.memcpyAsync(destination, source, size, runtime.memcpyDefault, stream.ptr)
