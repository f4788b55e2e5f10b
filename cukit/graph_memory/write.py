"""Gated writes to a memory, bitwise independent of the order of the writes."""

from __future__ import annotations

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    int32,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import MAX_INT32, check_flag
from cukit.errors import ArrayShapeError
from cukit.reference import graph_memory as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("graph_memory/parameters.cuh")["WriteParameters"]
_THREADS = 128
_WARP = 32


def memory_write(
    memory: Array,
    indices: Array,
    values: Array,
    gates: Array,
    *,
    keep: bool = False,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """Writes rows to a memory through gates; several writes may target the same row.

        s = sum_w gates[w],  c = max(1, s)      over the writes w with indices[w] = i
        memory[i] <- (1 - s / c) memory[i] + sum_w gates[w] values[w] / c

    The result is a convex combination: a gate of 1 replaces the row, and writes whose gates sum to
    more than 1 replace it by their weighted mean.

    Args:
        memory: float32|float16|bfloat16 [num_rows, dim], C-contiguous; float64 on the CPU only.
        indices: int32 [num_writes]; writes with an index out of range are ignored.
        values: dtype of `memory`, [num_writes, dim].
        gates: float32 [num_writes]; negative gates are treated as 0.
        keep: also return the sums of gates, which the backward needs.
        inplace: update and return `memory` itself.

    Returns:
        The memory after the writes; with `keep`, `(memory, totals)`, totals float32 [num_rows].

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: `keep` or `inplace` is not a bool.

    Results are bitwise independent of the order of the writes: terms are summed as fixed-point
    integers, scaled by the largest term. Elements with a non-finite term become NaN. Runs on CuPy's
    current stream without synchronisation; computes in float32.

    >>> import numpy as np, cukit as ck
    >>> memory, rows = np.array([[4.0], [8.0]]), np.array([0, 0, 1], np.int32)
    >>> values, gates = np.array([[1.0], [3.0], [0.0]]), np.array([1, 1, 0.25])
    >>> ck.memory_write(memory, rows, values, gates).ravel()
    array([2., 6.])
    """
    op = "memory_write"
    arrays = adopt(op, memory, indices, values, gates)
    memory, indices, values, gates = arrays
    check_flag(op, "keep", keep)
    check_flag(op, "inplace", inplace)
    on_kernel = runs_kernel(op, *arrays)
    _check(op, *arrays)
    if inplace:
        check_overlap(op, memory, name="memory", indices=indices, values=values, gates=gates)
    if not on_kernel:
        return reference.memory_write(memory, indices, values, gates, keep=keep, inplace=inplace)
    link, write = _prepare(memory, indices, values, gates)
    heads, chain = empty(indices, (len(memory),)), empty(indices, indices.shape)
    heads.fill(-1)
    link(indices, heads, chain)
    out = memory if inplace else empty(memory, memory.shape)
    totals = empty(gates, (len(memory),))
    write(heads, chain, values, gates, memory, out, totals)
    return (out, totals) if keep else out


def memory_write_backward(
    grad_out: Array,
    memory: Array,
    out: Array,
    indices: Array,
    values: Array,
    gates: Array,
    totals: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`memory_write` with respect to memory, values and gates.

    Args:
        grad_out: gradient of the written memory, shape and dtype of `memory`.
        memory: the memory before the writes.
        out, totals: results of the forward with `keep`.
        indices, values, gates: as in the forward.

    Returns:
        `(grad_memory, grad_values, grad_gates)`, shapes and dtypes of memory, values and gates. If
        the gates of a row sum to exactly 1, its gradient is that for sums above 1.

    Raises:
        ArrayError: as :func:`memory_write`.
    """
    op = "memory_write_backward"
    arrays = adopt(op, grad_out, memory, out, indices, values, gates, totals)
    grad_out, memory, out, indices, values, gates, totals = arrays
    on_kernel = runs_kernel(op, *arrays)
    _check(op, memory, indices, values, gates)
    for name, array in (("grad_out", grad_out), ("out", out)):
        check_array(op, name, array, dtypes=FLOAT_DTYPES, shape=memory.shape)
        check_same_dtype(op, memory=memory, **{name: array})
    check_array(op, "totals", totals, dtypes=(float32, float64), shape=(len(memory),))
    if not on_kernel:
        return reference.memory_write_backward(*arrays)
    launch = _prepare_backward(*arrays)
    grad_memory, grad_values = empty(memory, memory.shape), empty(values, values.shape)
    grad_gates = empty(gates, gates.shape)
    launch(*arrays, grad_memory, grad_values, grad_gates)
    return grad_memory, grad_values, grad_gates


@launch_plan
def _prepare(memory: Array, indices: Array, values: Array, gates: Array) -> tuple[Launch, Launch]:
    """The launches that link the writes of each row and then apply them."""
    _check_kernel("memory_write", memory, gates)
    vec = access_width(memory.shape[1], memory, values)
    spec = _spec("memory_write", memory.dtype.name, vec)
    return (
        _launch(_link_spec(), memory, indices, len(indices)),
        _launch(spec, memory, indices, _WARP * len(memory)),
    )


@launch_plan
def _prepare_backward(
    grad_out: Array,
    memory: Array,
    out: Array,
    indices: Array,
    values: Array,
    gates: Array,
    totals: Array,
) -> Launch:
    op = "memory_write_backward"
    _check_kernel(op, memory, gates)
    check_array(op, "totals", totals, dtypes=(float32,))
    vec = access_width(memory.shape[1], grad_out, memory, out, values)
    spec = _spec(op, memory.dtype.name, vec)
    return _launch(spec, memory, indices, _WARP * (len(memory) + len(indices)))


def _launch(spec: KernelSpec, memory: Array, indices: Array, threads: int) -> Launch:
    num_rows, dim = memory.shape
    scalars = (_PARAMETERS.pack(num_rows=num_rows, num_writes=len(indices), dim=dim),)
    return Launch(load_kernel(spec), (-(-threads // _THREADS),), scalars)


def _spec(entry: str, dtype: str, vec: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("THREADS", _THREADS))
    return KernelSpec(f"graph_memory/{entry}.cu", entry, defines, _THREADS)


def _link_spec() -> KernelSpec:
    defines = (("THREADS", _THREADS),)
    return KernelSpec("graph_memory/link_writes.cu", "link_writes", defines, _THREADS)


def _check(op: str, memory: Array, indices: Array, values: Array, gates: Array) -> None:
    check_array(op, "memory", memory, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(op, "indices", indices, dtypes=(int32,), ndim=1)
    shape = (len(indices), memory.shape[1])
    check_array(op, "values", values, dtypes=FLOAT_DTYPES, shape=shape)
    check_same_dtype(op, memory=memory, values=values)
    check_array(op, "gates", gates, dtypes=(float32, float64), shape=indices.shape)
    if len(memory) + len(indices) > MAX_INT32:
        raise ArrayShapeError(
            f"{op}: the number of rows plus writes must be less than 2^31, got {len(memory)} + "
            f"{len(indices)}"
        )


def _check_kernel(op: str, memory: Array, gates: Array) -> None:
    check_array(op, "memory", memory, dtypes=KERNEL_DTYPES)
    check_array(op, "gates", gates, dtypes=(float32,))


def _specs(entry: str) -> list[KernelSpec]:
    widths = zip(KERNEL_DTYPES, (4, 8, 8), strict=True)
    return [_spec(entry, dtype.name, vec) for dtype, vec in widths]


def _write_specs(device: Device) -> list[KernelSpec]:
    return [*_specs("memory_write"), _link_spec()]


def _backward_specs(device: Device) -> list[KernelSpec]:
    return _specs("memory_write_backward")


register(
    name="memory_write",
    family="graph_memory",
    function=memory_write,
    reference=reference.memory_write,
    specs=_write_specs,
)
register(
    name="memory_write_backward",
    family="graph_memory",
    function=memory_write_backward,
    reference=reference.memory_write_backward,
    specs=_backward_specs,
)
