"""Exponential moving averages of many tensors per launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt_arrays,
    check_array,
    float32,
    float64,
    identify,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.core.scalars import check_number
from cukit.distill.optimizer._tensor_table import CHUNK, TableCache
from cukit.errors import ArrayShapeError
from cukit.reference import optimizer as reference
from cukit.registry import register

_THREADS = 256
_OP = "ema_update"


def ema_update(
    averages: Sequence[Array],
    values: Sequence[Array],
    decay: float,
    copies: Sequence[Array] | None = None,
) -> None:
    """`average += (1 - decay) (value - average)` in place; many tensors per launch.

    Args:
        averages: float32 arrays [...], C-contiguous; also float64 on the CPU.
        values: one per average, of the same shape; float32|float16|bfloat16.
        decay: 0..1. 0 copies the values.
        copies: one per average, of the same shape; float32|float16|bfloat16: set to the rounded
            averages, for example a model's parameters.

    Returns:
        Nothing.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: decay outside 0..1.

    One launch for each combination of dtypes. The table of addresses on the GPU is cached for later
    calls with the same arrays. Runs on CuPy's current stream; deterministic.
    Paper: Polyak and Juditsky 1992; as a teacher: Tarvainen and Valpola, arXiv:1703.01780.

    >>> import numpy as np
    >>> average = np.zeros(2, np.float32)
    >>> ema_update([average], [np.ones(2, np.float32)], 0.75)
    >>> average
    array([0.25, 0.25], dtype=float32)
    """
    check_number(_OP, "decay", decay, least=0, most=1)
    averages = adopt_arrays(_OP, "averages", averages)
    values = adopt_arrays(_OP, "values", values)
    copies = None if copies is None else adopt_arrays(_OP, "copies", copies)
    lists = (averages, values) if copies is None else (averages, values, copies)
    if len({len(arrays) for arrays in lists}) != 1:
        raise ArrayShapeError(
            f"{_OP}: averages, values and copies must have the same length, got "
            f"{[len(column) for column in lists]}"
        )
    arrays = [array for column in lists for array in column]
    if not runs_kernel(_OP, *arrays):
        _check(lists, FLOAT_DTYPES)
        reference.ema_update(averages, values, decay, copies)
        return
    key = identify(*arrays), len(lists)
    for spec, table in _TABLES.tables(key, partial(_grouped, lists)):
        load_kernel(spec)(
            (table.num_blocks,),
            (table.tensors, table.tensor_of_block, np.float32(1.0 - decay)),
            reachable=arrays,
        )


_TABLES = TableCache()


def _grouped(lists: Sequence[Sequence[Array]]) -> dict[KernelSpec, list[tuple[Array, ...]]]:
    """The arrays of each average by kernel variant, checked."""
    _check(lists, KERNEL_DTYPES)
    groups: dict[KernelSpec, list[tuple[Array, ...]]] = {}
    for average, value, *copy in zip(*lists, strict=True):
        if average.size:
            spec = plan_ema_update(value.dtype.name, copy[0].dtype.name if copy else None)
            row = (average, value, copy[0] if copy else average)
            groups.setdefault(spec, []).append(row)
    return groups


@cache
def plan_ema_update(value_dtype: str, copy_dtype: str | None) -> KernelSpec:
    """The variant for values of `value_dtype`, with or without rounded copies."""
    defines = (
        ("DTYPE", copy_dtype or "float32"),
        ("VALUE", value_dtype),
        ("COPY", copy_dtype is not None),
        ("THREADS", _THREADS),
        ("CHUNK", CHUNK),
    )
    return KernelSpec("distill/ema_update.cu", "ema_update", defines, _THREADS)


def _check(lists: Sequence[Sequence[Array]], dtypes: Sequence[np.dtype[Any]]) -> None:
    wide = (float32, float64) if float64 in dtypes else (float32,)
    for index, (average, value, *copy) in enumerate(zip(*lists, strict=True)):
        check_array(_OP, f"averages[{index}]", average, dtypes=wide)
        check_array(_OP, f"values[{index}]", value, dtypes=dtypes, shape=average.shape)
        if copy:
            check_array(_OP, f"copies[{index}]", copy[0], dtypes=dtypes, shape=average.shape)


def _specs(device: Device) -> list[KernelSpec]:
    kinds = (("float32", None), *((each.name, each.name) for each in KERNEL_DTYPES))
    wide = (("float32", each.name) for each in KERNEL_DTYPES[1:])
    return [plan_ema_update(*kind) for kind in (*kinds, *wide)]


register(
    name=_OP,
    family="distill",
    function=ema_update,
    reference=reference.ema_update,
    specs=_specs,
    writes=("averages", "copies"),
)
