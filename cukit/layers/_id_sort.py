"""Sorts tokens by id: a stable LSD radix sort on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cukit.core.arrays import Array, empty
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel

_THREADS = 256
_FEWEST_DIGIT_BITS = 8  # one bin per thread
_MAX_DIGIT_BITS = 10  # 36 KiB of shared memory
_SMALLEST_CHUNK = 2048
_MAX_CHUNKS = 64
"""Limited, because every block reads the counts of all chunks."""


@dataclass(frozen=True)
class IdSortConfig:
    """`num_passes` passes over digits of `digit_bits` bits, one block per `chunk` tokens."""

    digit_bits: int
    num_passes: int
    chunk: int
    num_chunks: int

    def specs(self, id_dtype: str) -> list[tuple[KernelSpec, KernelSpec]]:
        """The two kernels of each pass."""
        return [self._pass(index, id_dtype) for index in range(self.num_passes)]

    def _pass(self, index: int, id_dtype: str) -> tuple[KernelSpec, KernelSpec]:
        defines = (
            ("ID", "uint32" if index else id_dtype),
            ("DIGIT_BITS", self.digit_bits),
            ("SHIFT", index * self.digit_bits),
            ("CHUNK", self.chunk),
            ("THREADS", _THREADS),
        )
        scatter_defines = (*defines, ("FIRST", index == 0))
        return (
            KernelSpec("layers/count_digits.cu", "count_digits", defines, _THREADS),
            KernelSpec("layers/scatter_by_digit.cu", "scatter_by_digit", scatter_defines, _THREADS),
        )


@cache
def plan_id_sort(num_tokens: int, num_keys: int) -> IdSortConfig:
    """The fewest passes for the key range, and few enough chunks to keep the prefix sum cheap."""
    key_bits = num_keys.bit_length()  # the largest key, num_keys, is that of ids out of range
    num_passes = max(1, -(-key_bits // _MAX_DIGIT_BITS))
    digit_bits = max(_FEWEST_DIGIT_BITS, -(-key_bits // num_passes))
    chunk = _SMALLEST_CHUNK
    while -(-num_tokens // chunk) > _MAX_CHUNKS:
        chunk *= 2
    return IdSortConfig(digit_bits, num_passes, chunk, -(-num_tokens // chunk))


def sort_ids(ids: Array, num_keys: int) -> tuple[Array, Array]:
    """`(keys, tokens)`, uint32 and int32 [num_tokens]: ascending ids and the indices of their
    tokens.

    The sort is stable. Ids outside [0, num_keys) get the key `num_keys` and come last.
    """
    passes, counts_shape = _prepare(ids, num_keys)
    keys, tokens = ids, NULL
    for count, scatter in passes:
        counts = empty(ids, counts_shape, np.int32)
        count(keys, counts)
        keys_out, tokens_out = empty(ids, (ids.size,), np.uint32), empty(ids, (ids.size,), np.int32)
        scatter(keys, tokens, counts, keys_out, tokens_out)
        keys, tokens = keys_out, tokens_out
    return keys, tokens


@launch_plan
def _prepare(ids: Array, num_keys: int) -> tuple[list[tuple[Launch, Launch]], tuple[int, int]]:
    config = plan_id_sort(ids.size, num_keys)
    grid, scalars = (config.num_chunks,), (np.int32(ids.size), np.int32(num_keys))

    def launch(spec: KernelSpec) -> Launch:
        return Launch(load_kernel(spec), grid, scalars)

    passes = [(launch(count), launch(scatter)) for count, scatter in config.specs(ids.dtype.name)]
    return passes, (config.num_chunks, 2**config.digit_bits)
