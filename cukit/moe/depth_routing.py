"""Mixture of depths: a block of layers processes only the tokens that a router chooses."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_dtype, check_integer
from cukit.reference import depth as reference
from cukit.reference.depth import DepthRouting
from cukit.registry import register

_THREADS = 256
_SELECT_THREADS = 1024
_REPRESENTATIVE_VEC = 8
_WEIGHT_DTYPES = (float32, float64)


def depth_router(logits: Array, capacity: int) -> DepthRouting:
    """Chooses the `capacity` tokens of each sequence with the largest logits.

    The router of a mixture of depths (Raposo et al., arXiv:2404.02258). Every sequence sends the
    same number of tokens through a block, so all shapes are known in advance:

        routing = depth_router(x @ router_weight, capacity)
        y = block(depth_gather(x, routing.indices))
        x = depth_combine(x, y, routing.weights, routing.slots)

    Args:
        logits: float32|float16|bfloat16|float64 [batch, seq_len], C-contiguous. Among equal logits
            the first are chosen; NaN ranks below every number.
        capacity: 1 to seq_len.

    Returns:
        `DepthRouting(indices, slots, weights)`: int32 [batch, capacity], positions of the chosen
        tokens, ascending; int32 [batch, seq_len], each token's index in `indices`, or -1; float32
        (float64 for float64) [batch, capacity], sigmoids of the chosen logits.

    Raises:
        ArrayError: dtype, shape or layout of the logits.
        ConfigError: `capacity` out of range.

    Runs on CuPy's current stream without synchronisation; deterministic. Later tokens influence
    whether earlier ones are chosen, which suits training and prefill; decoding needs a threshold.

    >>> import numpy as np, cukit as ck
    >>> routing = ck.depth_router(np.array([[1.0, 3.0, 2.0, 3.0]], np.float32), 2)
    >>> routing.indices, routing.slots
    (array([[1, 3]], dtype=int32), array([[-1,  0, -1,  1]], dtype=int32))
    """
    (logits,) = adopt("depth_router", logits)
    _check_router(logits, capacity)
    if not runs_kernel("depth_router", logits):
        return reference.depth_router(logits, capacity)
    launch = _prepare_router(logits, capacity)
    shape = (logits.shape[0], capacity)
    indices, slots = empty(logits, shape, np.int32), empty(logits, logits.shape, np.int32)
    weights = empty(logits, shape, np.float32)
    launch(logits, indices, slots, weights)
    return DepthRouting(indices, slots, weights)


def depth_router_backward(
    grad_weights: Array, weights: Array, slots: Array, *, dtype: Any = None
) -> Array:
    """The gradient of :func:`depth_router` with respect to its logits.

    Args:
        grad_weights: gradient of the weights, float32 (float64 on the CPU) [batch, capacity].
        weights, slots: as the router returned them; slots outside [0, capacity) are ignored.
        dtype: of the result, float32|float16|bfloat16 (float64 on the CPU). Default: the dtype of
            `weights`.

    Returns:
        [batch, seq_len]; zero for tokens that were not chosen.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
    """
    op = "depth_router_backward"
    grad_weights, weights, slots = adopt(op, grad_weights, weights, slots)
    _check_router_backward(grad_weights, weights, slots)
    result_dtype = weights.dtype if dtype is None else check_dtype(op, "dtype", dtype)
    if not runs_kernel(op, grad_weights, weights, slots):
        return reference.depth_router_backward(grad_weights, weights, slots, result_dtype)
    launch = _prepare_router_backward(grad_weights, weights, slots, result_dtype)
    grad_logits = empty(weights, slots.shape, result_dtype)
    launch(grad_weights, weights, slots, grad_logits)
    return grad_logits


def depth_gather(x: Array, indices: Array) -> Array:
    """The chosen rows, `out[b, i] = x[b, indices[b, i]]`.

    Its gradient is `depth_combine(zeros, grad_out, ones, slots)`.

    Args:
        x: float32|float16|bfloat16|float64 [batch, seq_len, hidden], C-contiguous.
        indices: int32 [batch, capacity], from :func:`depth_router`. An index outside the sequence
            gives a row of NaN on the GPU and an ArrayError on the CPU.

    Returns:
        A new array [batch, capacity, hidden]. Raises ArrayError: dtype, shape or layout.
    """
    x, indices = adopt("depth_gather", x, indices)
    if not runs_kernel("depth_gather", x, indices):
        _check_gather(x, indices)
        return reference.depth_gather(x, indices)
    launch = _prepare_gather(x, indices)
    out = empty(x, (*indices.shape, x.shape[2]))
    launch(x, indices, out)
    return out


def depth_combine(
    x: Array, y: Array, weights: Array, slots: Array, *, out: Array | None = None
) -> Array:
    """Adds a block's results to the residual stream: `x + weight * y` for chosen tokens, else `x`.

    Args:
        x: float32|float16|bfloat16|float64 [batch, seq_len, hidden], C-contiguous.
        y: dtype of `x`, [batch, capacity, hidden].
        weights, slots: from :func:`depth_router`; slots outside [0, capacity) are ignored.
        out: written in place; shape and dtype of `x`. It may be `x` itself.

    Returns:
        `out` or a new array. Raises ArrayError: dtype, shape or layout of an argument.
    """
    op = "depth_combine"
    x, y, weights, slots, out = adopt(op, x, y, weights, slots, out)
    check_overlap(op, out, itself="x", x=x, y=y, weights=weights, slots=slots)
    if not runs_kernel(op, x, y, weights, slots, out):
        _check_combine(x, y, weights, slots, out)
        return write_out(out, reference.depth_combine(x, y, weights, slots))
    launch = _prepare_combine(x, y, weights, slots, out)
    result = empty(x, x.shape) if out is None else out
    launch(x, y, weights, slots, result)
    return result


def depth_combine_backward(
    grad_out: Array, y: Array, weights: Array, indices: Array
) -> tuple[Array, Array]:
    """Gradients of :func:`depth_combine` for `y` and `weights`; the gradient of `x` is `grad_out`.

    Args:
        grad_out: float32|float16|bfloat16|float64 [batch, seq_len, hidden], C-contiguous.
        y, weights: as in the forward, [batch, capacity, hidden] and [batch, capacity].
        indices: from :func:`depth_router`, as for :func:`depth_gather`.

    Returns:
        `(grad_y, grad_weights)`, as `y` and `weights`. Raises ArrayError: dtype, shape or layout.
    """
    op = "depth_combine_backward"
    grad_out, y, weights, indices = adopt(op, grad_out, y, weights, indices)
    if not runs_kernel(op, grad_out, y, weights, indices):
        _check_combine_backward(grad_out, y, weights, indices)
        return reference.depth_combine_backward(grad_out, y, weights, indices)
    launch = _prepare_combine_backward(grad_out, y, weights, indices)
    grad_y, grad_weights = empty(y, y.shape), empty(weights, weights.shape)
    launch(grad_out, y, weights, indices, grad_y, grad_weights)
    return grad_y, grad_weights


# ---- Checks and launches ----


def _check_router(logits: Array, capacity: int) -> None:
    check_array("depth_router", "logits", logits, dtypes=FLOAT_DTYPES, ndim=2)
    check_integer("depth_router", "capacity", capacity, least=1, most=logits.shape[1])


@launch_plan
def _prepare_router(logits: Array, capacity: int) -> Launch:
    check_array("depth_router", "logits", logits, dtypes=KERNEL_DTYPES)
    batch, seq_len = logits.shape
    scalars = (np.int32(seq_len), np.int32(capacity))
    return Launch(load_kernel(_router_spec(logits.dtype.name)), (batch,), scalars)


def _check_router_backward(grad_weights: Array, weights: Array, slots: Array) -> None:
    op = "depth_router_backward"
    check_array(op, "weights", weights, dtypes=_WEIGHT_DTYPES, ndim=2)
    check_array(op, "slots", slots, dtypes=(int32,), shape=(weights.shape[0], None))
    check_array(op, "grad_weights", grad_weights, dtypes=(weights.dtype,), shape=weights.shape)


@launch_plan
def _prepare_router_backward(
    grad_weights: Array, weights: Array, slots: Array, dtype: np.dtype[Any]
) -> Launch:
    op = "depth_router_backward"
    _check_router_backward(grad_weights, weights, slots)
    check_array(op, "weights", weights, dtypes=(float32,))
    if dtype not in KERNEL_DTYPES:
        check_dtype(op, "dtype", dtype, KERNEL_DTYPES)
    tokens, seq_len = slots.size, slots.shape[1]
    scalars = (np.int64(tokens), np.int32(seq_len), np.int32(weights.shape[1]))
    spec = _router_backward_spec(dtype.name)
    return Launch(load_kernel(spec), (-(-tokens // _THREADS),), scalars)


def _check_gather(x: Array, indices: Array) -> None:
    check_array("depth_gather", "x", x, dtypes=FLOAT_DTYPES, ndim=3)
    check_array("depth_gather", "indices", indices, dtypes=(int32,), shape=(x.shape[0], None))


@launch_plan
def _prepare_gather(x: Array, indices: Array) -> Launch:
    _check_gather(x, indices)
    sizes = (indices.size, x.shape[1], indices.shape[1])
    return _row_launch("depth_gather", "x", x, (x,), *sizes)


def _check_combine(x: Array, y: Array, weights: Array, slots: Array, out: Array | None) -> None:
    op = "depth_combine"
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=3)
    check_array(op, "y", y, shape=(x.shape[0], None, x.shape[2]))
    if out is not None:
        check_array(op, "out", out, shape=x.shape)
    check_same_dtype(op, x=x, y=y, out=out)
    check_array(op, "weights", weights, dtypes=_WEIGHT_DTYPES, shape=y.shape[:2])
    check_array(op, "slots", slots, dtypes=(int32,), shape=x.shape[:2])


@launch_plan
def _prepare_combine(x: Array, y: Array, weights: Array, slots: Array, out: Array | None) -> Launch:
    _check_combine(x, y, weights, slots, out)
    check_array("depth_combine", "weights", weights, dtypes=(float32,))
    rows = (x, y) if out is None else (x, y, out)
    return _row_launch("depth_combine", "x", x, rows, slots.size, x.shape[1], y.shape[1])


def _check_combine_backward(grad_out: Array, y: Array, weights: Array, indices: Array) -> None:
    op = "depth_combine_backward"
    check_array(op, "grad_out", grad_out, dtypes=FLOAT_DTYPES, ndim=3)
    check_array(op, "y", y, shape=(grad_out.shape[0], None, grad_out.shape[2]))
    check_same_dtype(op, grad_out=grad_out, y=y)
    check_array(op, "weights", weights, dtypes=_WEIGHT_DTYPES, shape=y.shape[:2])
    check_array(op, "indices", indices, dtypes=(int32,), shape=y.shape[:2])


@launch_plan
def _prepare_combine_backward(grad_out: Array, y: Array, weights: Array, indices: Array) -> Launch:
    _check_combine_backward(grad_out, y, weights, indices)
    op = "depth_combine_backward"
    check_array(op, "weights", weights, dtypes=(float32,))
    sizes = (indices.size, grad_out.shape[1], y.shape[1])
    return _row_launch(op, "grad_out", grad_out, (grad_out, y), *sizes)


def _row_launch(
    entry: str,
    name: str,
    array: Array,
    rows: tuple[Array, ...],
    blocks: int,
    seq_len: int,
    capacity: int,
) -> Launch:
    """A launch with one thread block per row, for the dtype and the row length of `array`, the
    argument `name`; the arrays in `rows` limit the access width."""
    check_array(entry, name, array, dtypes=KERNEL_DTYPES)
    hidden = array.shape[-1]
    spec = _row_spec(entry, array.dtype.name, access_width(hidden, *rows))
    scalars = (np.int32(seq_len), np.int32(capacity), np.int32(hidden))
    return Launch(load_kernel(spec), (blocks,), scalars)


def _router_spec(dtype: str) -> KernelSpec:
    defines = (("DTYPE", dtype), ("THREADS", _SELECT_THREADS))
    return KernelSpec("moe/depth_router.cu", "depth_router", defines, _SELECT_THREADS)


def _router_backward_spec(dtype: str) -> KernelSpec:
    entry = "depth_router_backward"
    defines = (("DTYPE", dtype), ("THREADS", _THREADS))
    return KernelSpec(f"moe/{entry}.cu", entry, defines, _THREADS)


def _row_spec(entry: str, dtype: str, vec: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("THREADS", _THREADS))
    return KernelSpec(f"moe/{entry}.cu", entry, defines, _THREADS)


def row_specs(entry: str) -> Any:
    """The `specs` of an op that launches the row kernel `entry`."""

    def specs(device: Device) -> list[KernelSpec]:
        return [
            _row_spec(entry, "bfloat16", _REPRESENTATIVE_VEC),
            _row_spec(entry, "float16", _REPRESENTATIVE_VEC),
            _row_spec(entry, "float32", 1),
        ]

    return specs


register(
    name="depth_router",
    family="moe",
    function=depth_router,
    reference=reference.depth_router,
    specs=lambda device: [_router_spec(dtype.name) for dtype in KERNEL_DTYPES],
)
register(
    name="depth_router_backward",
    family="moe",
    function=depth_router_backward,
    reference=reference.depth_router_backward,
    specs=lambda device: [_router_backward_spec(dtype.name) for dtype in KERNEL_DTYPES],
)
register(
    name="depth_gather",
    family="moe",
    function=depth_gather,
    reference=reference.depth_gather,
    specs=row_specs("depth_gather"),
)
register(
    name="depth_combine",
    family="moe",
    function=depth_combine,
    reference=reference.depth_combine,
    specs=row_specs("depth_combine"),
)
register(
    name="depth_combine_backward",
    family="moe",
    function=depth_combine_backward,
    reference=reference.depth_combine_backward,
    specs=row_specs("depth_combine_backward"),
)
