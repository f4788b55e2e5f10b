"""Runs NumPy/CuPy array code on arrays of any library that follows the array API standard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cukit.core.arrays import adopt, foreign_namespace


def on_any_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function`, written for NumPy and CuPy arrays, to accept other array-API libraries.

    CPU arrays of other libraries with `__array_namespace__` (JAX, array-api-strict, ...), also
    inside lists, tuples, dictionaries and dataclasses, are converted through DLPack. They share
    memory with the caller's arrays, so in-place writes are visible to the caller. NumPy results are
    converted to the library of the first such argument, except those of a dtype that it lacks. All
    other arguments are passed through: NumPy and CuPy arrays, torch tensors (which have no
    `__array_namespace__`), other libraries' arrays on a CUDA device.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []

        def enter(array: Any) -> Any:
            namespace = foreign_namespace(array)
            if namespace is None:
                return array
            found.append(namespace)
            return adopt(function.__name__, array)[0]

        given = _each(args, enter), _each(kwargs, enter)
        if not found:
            return function(*args, **kwargs)
        result = function(*given[0], **given[1])
        return _each(result, lambda array: _converted_back(found[0], array))

    return call


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to every array in it; `value` itself if nothing changes."""
    if isinstance(value, dict):
        parts = {key: _each(part, change) for key, part in value.items()}
        return parts if any(parts[key] is not part for key, part in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [_each(part, change) for part in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = _each(fields, change)
        return value if changed is fields else dataclasses.replace(value, **changed)
    is_array = hasattr(value, "__dlpack__") and not isinstance(value, type)
    return change(value) if is_array else value


def _converted_back(namespace: Any, array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    try:
        return namespace.asarray(array)
    except (TypeError, ValueError):  # a dtype that the library lacks
        return array
