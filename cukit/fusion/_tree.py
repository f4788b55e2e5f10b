"""Nested arguments and results: tuples, lists, dictionaries and slices with leaves in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy or CuPy array."""
    if isinstance(value, np.ndarray):
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def tree_map(value: Any, is_leaf: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """`value` with `change(leaf)` for every leaf in it."""
    if is_leaf(value):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [tree_map(item, is_leaf, change) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        return {key: tree_map(item, is_leaf, change) for key, item in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(tree_map(part, is_leaf, change) for part in parts))
    return value


def leaves(value: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves of `value`, in order."""
    found: list[Any] = []
    tree_map(value, is_leaf, found.append)
    return found


def arrays_of(value: Any) -> list[Any]:
    """The arrays in `value`, in order."""
    return leaves(value, is_array)


def signature(value: Any) -> Any:
    """`value` with arrays replaced by type, shape, dtype and strides, for comparing calls."""
    return tree_map(
        value,
        is_array,
        lambda array: (type(array).__name__, array.shape, array.dtype.str, array.strides),
    )
