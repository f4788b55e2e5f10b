"""Compares the outputs of an implementation with the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.core.device import gpu_available, require_cupy


def relative_error(outputs: Any, expected: Any) -> float:
    """Largest ||out - expected|| / ||expected|| over all outputs.

    Either side is an array, a torch tensor or a sequence of them. A `None` on either side marks an
    output that this side does not have; it is not compared. The result is infinite if the numbers
    of outputs or their shapes differ, if no output can be compared, or if an error is NaN.
    """
    ours, theirs = _sequence(outputs), _sequence(expected)
    if len(ours) != len(theirs):
        return math.inf
    errors = [
        _error(_array(out), _array(reference))
        for out, reference in zip(ours, theirs, strict=True)
        if out is not None and reference is not None
    ]
    if not errors or any(math.isnan(error) for error in errors):
        return math.inf
    return max(errors)


def array_module() -> Any:
    """CuPy if there is a GPU, else NumPy."""
    return require_cupy("arrays on the GPU") if gpu_available() else np


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _array(value: Any) -> Any:
    """A NumPy or CuPy view of an array or a tensor."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach()
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()
    return array_module().from_dlpack(tensor)


def _error(out: Any, expected: Any) -> float:
    if out.shape != expected.shape:
        return math.inf
    xp = array_module()
    kind = xp.float64 if expected.dtype == xp.float64 else xp.float32
    reference = expected.astype(kind)
    difference = out.astype(kind) - reference
    return float(_norm(difference) / max(float(_norm(reference)), 1e-30))


def _norm(x: Any) -> Any:
    """Euclidean norm of all elements, with squares summed in float64."""
    xp = array_module()
    return xp.sqrt(xp.sum(xp.square(x), dtype=xp.float64))
