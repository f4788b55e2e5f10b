"""The norm of a list of arrays and its clipping factor, computed on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt_arrays,
    check_array,
    empty,
    identify,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.distill.optimizer._tensor_table import CHUNK, TableCache
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import optimizer as reference
from cukit.registry import register

_THREADS = 256
_OP = "global_norm"


def global_norm(grads: Sequence[Array]) -> Array:
    """Euclidean norm of all elements of all arrays together: `sqrt(sum_i sum(g_i^2))`.

    Args:
        grads: one or more float32|float16|bfloat16 arrays [...], C-contiguous; float64 on the CPU
            only.

    Returns:
        float32 0-d array (float64 for float64 arrays), on the device of `grads`.

    Raises:
        ArrayError: `grads` is empty, or an array has an invalid dtype, layout or device.

    Two launches, one more for each further dtype, without synchronising. Deterministic: sums in a
    fixed order, in float32.

    >>> import numpy as np
    >>> float(global_norm([np.full(4, 1.0, np.float32), np.full(5, 1.0, np.float32)]))
    3.0
    """
    grads = adopt_arrays(_OP, "grads", grads)
    if not grads:
        raise ArrayShapeError(f"{_OP}: grads must hold at least one array")
    if not runs_kernel(_OP, *grads):
        for index, grad in enumerate(grads):
            check_array(_OP, f"grads[{index}]", grad, dtypes=FLOAT_DTYPES)
        return reference.global_norm(grads)
    tables = _TABLES.tables(identify(*grads), partial(_grouped, grads))
    num_blocks = sum(table.num_blocks for _, table in tables)
    partials = empty(grads[0], (num_blocks,), np.float32)
    start = 0
    for spec, table in tables:
        part = partials[start : start + table.num_blocks]
        load_kernel(spec)(
            (table.num_blocks,),
            (table.tensors, table.tensor_of_block, part),
            reachable=grads,
        )
        start += table.num_blocks
    norm = empty(grads[0], (), np.float32)
    load_kernel(_total_spec())((1,), (partials, norm, np.int32(num_blocks)))
    return norm


def clip_scale(norm: Array, max_norm: float) -> Array:
    """The factor that scales gradients of norm `norm` to a norm of at most `max_norm`.

    Args:
        norm: float32 0-d array, the result of :func:`global_norm`.
        max_norm: above 0.

    Returns:
        float32 0-d array in (0, 1], for :func:`adamw`'s `grad_scale`.

    Raises:
        ConfigError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_scale: max_norm must be above 0, got {max_norm}")
    xp = namespace(norm)
    one = norm.dtype.type(1)
    return xp.minimum(one, norm.dtype.type(max_norm) / (norm + norm.dtype.type(1e-6)))


_TABLES = TableCache()


def _grouped(grads: Sequence[Array]) -> dict[KernelSpec, list[tuple[Array, ...]]]:
    """The arrays by kernel variant, checked."""
    groups: dict[KernelSpec, list[tuple[Array, ...]]] = {}
    for index, grad in enumerate(grads):
        check_array(_OP, f"grads[{index}]", grad, dtypes=KERNEL_DTYPES)
        if grad.size:
            spec = plan_global_norm(grad.dtype.name, grad.itemsize)
            groups.setdefault(spec, []).append((grad,))
    return groups


@cache
def plan_global_norm(dtype: str, itemsize: int) -> KernelSpec:
    """The variant that sums the squares of arrays of `dtype`."""
    return _spec("sum_of_squares", dtype, ACCESS_BYTES // itemsize, _THREADS)


def _total_spec() -> KernelSpec:
    return _spec("norm_of_partials", "float32", 1, 1024)


def _spec(entry: str, dtype: str, vec: int, threads: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("THREADS", threads), ("CHUNK", CHUNK))
    return KernelSpec("distill/global_norm.cu", entry, defines, threads)


def _specs(device: Device) -> list[KernelSpec]:
    return [*(plan_global_norm(d.name, d.itemsize) for d in KERNEL_DTYPES), _total_spec()]


register(
    name=_OP,
    family="distill",
    function=global_norm,
    reference=reference.global_norm,
    specs=_specs,
)
