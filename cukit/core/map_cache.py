"""Tensor maps kept from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukit.core.arrays import Array, address_of
from cukit.core.kernel import by_value

_MOST_MAPS = 256


class TensorMapCache:
    """Tensor maps of arrays of one description, by address.

    A map holds nothing but that and the address; encoding one takes longer than a launch. Memory
    pools hand out the same addresses again and again.
    """

    __slots__ = ("_encode", "_known")

    def __init__(self, encode: Callable[[Array], Any]) -> None:
        """`encode`: from an array to its map (cukit.core.tensor_map)."""
        self._encode = encode
        self._known: dict[int, Any] = {}

    def __call__(self, array: Array) -> Any:
        """The map of an array, in the form that a launch takes."""
        address = address_of(array)
        found = self._known.get(address)
        if found is None:
            found = by_value(self._encode(array))
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            self._known[address] = found
        return found
