"""Launches of attention kernels that read through the copy engine."""

from __future__ import annotations

from typing import Any

from cukit.attention.flash_tilings import WarpgroupTiling
from cukit.core.arrays import Array, address_of
from cukit.core.kernel import Launch
from cukit.core.tensor_map import encode_tensor_map

_PART = 64  # elements in a row of 128 swizzled bytes
_MOST_MAPS = 256


class MappedLaunch:
    """A launch of `flash_attention_sm90`, for arrays of one description.

    A tensor map holds nothing but that description and an address. Memory pools hand out the same
    addresses again and again, so maps are kept by address instead of encoded for every call.
    """

    __slots__ = ("_key_box", "_key_maps", "_launch", "_query_box", "_query_maps", "_value_maps")

    def __init__(self, launch: Launch, tiling: WarpgroupTiling) -> None:
        self._launch = launch
        self._query_box = (1, tiling.tile_m, 1, _PART)
        self._key_box = (1, tiling.tile_n, 1, _PART)
        self._query_maps: dict[int, Any] = {}
        self._key_maps: dict[int, Any] = {}
        self._value_maps: dict[int, Any] = {}

    def __call__(self, q: Array, k: Array, v: Array, out: Array, lse: Array) -> None:
        """Launches on the current stream."""
        self._launch(
            _map(self._query_maps, q, self._query_box),
            _map(self._key_maps, k, self._key_box),
            _map(self._value_maps, v, self._key_box),
            out,
            lse,
        )


def _map(known: dict[int, Any], array: Array, box: tuple[int, ...]) -> Any:
    address = address_of(array)
    found = known.get(address)
    if found is None:
        found = encode_tensor_map(array, box)
        if len(known) >= _MOST_MAPS:
            known.clear()
        known[address] = found
    return found
