"""Checks of scalar options; errors name the option, its value and the allowed values.

Some options, such as an upstream gradient, are a number or a 0-d array, which may be on the GPU.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    float32,
    float64,
    is_gpu_array,
)
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError

MAX_INT32 = 2**31 - 1
"""Kernels index rows and choices with int32."""


def check_number(
    op: str,
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
) -> None:
    """Raises ConfigError unless `value` is a finite real number in [least, most], not a bool.

    above: exclusive lower bound.
    """
    legal = isinstance(value, numbers.Real) and not isinstance(value, bool)
    legal = legal and _is_finite(value) and least <= value <= most
    if legal and (above is None or value > above):
        return
    raise ConfigError(
        f"{op}: {name} must be {_range('a finite number', least, most, above)}, got {value!r}"
    )


def _is_finite(value: Any) -> bool:
    """False also for integers that overflow a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_real(op: str, name: str, value: numbers.Real) -> None:
    """Raises ConfigError for an integer that overflows a float. Infinity is allowed."""
    try:
        float(value)
    except OverflowError:
        raise ConfigError(
            f"{op}: {name} must be a number in the range of a float, got {value!r}"
        ) from None


def check_scalar(
    op: str, name: str, value: Any, *, finite: bool = False, shape: tuple[int, ...] = ()
) -> None:
    """Raises ConfigError or ArrayError unless `value` is a Python or NumPy number, or a 0-d float32
    array; in host memory also float64.

    finite: whether a number must be finite; the contents of arrays are not checked. shape: if not
    (), only arrays of this shape are allowed.
    """
    if isinstance(value, numbers.Real) and shape == ():
        (check_number if finite else check_real)(op, name, value)
    else:
        check_array(op, name, value, dtypes=scalar_dtypes(value), shape=shape)


def scalar_dtypes(value: Array) -> tuple[np.dtype[Any], ...]:
    """The dtypes allowed for an array in place of a number, or with one number per row."""
    return (float32,) if is_gpu_array(value) else (float32, float64)


def adopt_scalars(op: str, *values: Any) -> tuple[Any, ...]:
    """Like `adopt`, for arguments that may be plain numbers."""
    return tuple(v if _is_number(v) else adopt(op, v)[0] for v in values)


def arrays_among(*values: Any) -> tuple[Array, ...]:
    """The arguments that are not plain numbers or None."""
    return tuple(v for v in values if not _is_number(v))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, numbers.Real)


def check_integer(
    op: str, name: str, value: Any, *, least: float = -math.inf, most: float = math.inf
) -> None:
    """Raises ConfigError unless `value` is an integer (Python or NumPy, not a bool) in
    [least, most]."""
    try:
        legal = not isinstance(value, (bool, np.bool_)) and least <= operator.index(value) <= most
    except TypeError:
        legal = False
    if not legal:
        raise ConfigError(
            f"{op}: {name} must be {_range('an integer', least, most, None)}, got {value!r}"
        )


def check_shape(op: str, value: Any, name: str = "shape") -> tuple[int, ...]:
    """`value`, an integer or a sequence of integers, as a tuple. Raises ArrayShapeError."""
    try:
        given = tuple(value) if isinstance(value, Sequence) else (value,)
        extents = tuple(map(operator.index, given))
    except TypeError:
        raise ArrayShapeError(f"{op}: {name} must be integers, got {value!r}") from None
    if min(extents, default=0) < 0:
        raise ArrayShapeError(f"{op}: {name} must not be negative, got {value!r}")
    return extents


def check_path(op: str, name: str, value: Any) -> Path:
    """`value`, a string or a Path, as a Path. Raises ConfigError."""
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise ConfigError(f"{op}: {name} must be the path of a file, got {value!r}")
    return Path(value)


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{op}: {name} must be True or False, got {value!r}")


def check_choice(op: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ConfigError unless `value` is one of `choices`, strings or None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ConfigError(f"{op}: {name} must be one of {allowed}, got {value!r}")


def _range(kind: str, least: float, most: float, above: float | None) -> str:
    limits = []
    if above is not None:
        limits.append(f"above {_show(above)}")
    elif least > -math.inf:
        limits.append(f"of {_show(least)} or more")
    if most < math.inf:
        limits.append(f"{'and ' if limits else ''}at most {_show(most)}")
    return " ".join([kind, *limits])


def _show(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def check_dtype(
    op: str, name: str, value: Any, allowed: Sequence[np.dtype[Any]] = FLOAT_DTYPES
) -> np.dtype[Any]:
    """`value`, in any form that NumPy accepts, as a dtype. Raises ArrayDtypeError unless it is one
    of `allowed`."""
    try:
        dtype = bfloat16 if isinstance(value, str) and value == "bfloat16" else np.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if value is None or dtype is None or dtype not in allowed:  # np.dtype(None) is float64
        names = ", ".join(each.name for each in allowed)
        shown = value if dtype is None or value is None else dtype.name
        raise ArrayDtypeError(f"{op}: {name} must be {names}, got {shown!r}")
    return dtype
