"""Permutation of tokens to expert order and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
from cukit.core.compiler import MacroValue
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import MAX_INT32, check_integer
from cukit.errors import ArrayShapeError
from cukit.reference import moe as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("moe/parameters.cuh")["PermuteParameters"]
_WARP = 32
_FEWEST_THREADS = 128
"""Minimum threads per block for long rows: with blocks of one warp, an SM would reach its limit of
thread blocks at half of its threads."""


def moe_permute(
    x: Array, rows: Array, *, num_rows: int | None = None, out: Array | None = None
) -> Array:
    """Copies each token to the rows of its experts: `y[rows[t, s]] = x[t]`.

    Args:
        x: float32|float16|bfloat16 [num_tokens, hidden], C-contiguous; float64 on the CPU only.
        rows: int32 [num_tokens, top_k], from :func:`topk_router` or :func:`expert_order`; -1 for
            a choice without a row. All others are distinct and below `num_rows`.
        num_rows: rows of `y`: num_tokens * top_k (default), or num_experts * capacity.
        out: array to write `y` into; dtype of `x`, [num_rows, hidden]. It must not overlap an
            input.

    Returns:
        `y`, [num_rows, hidden], dtype of `x`. Rows that belong to no choice are not written.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: `num_rows` out of range.

    Runs on CuPy's current stream. Values are copied exactly.

    >>> import numpy as np, cukit as ck
    >>> x, experts = np.array([[1.0], [2.0]], np.float32), np.array([[2, 0], [2, 1]], np.int32)
    >>> ck.moe_permute(x, ck.expert_order(experts, 3).rows).ravel()
    array([1., 2., 1., 2.], dtype=float32)
    """
    x, rows, out = adopt("moe_permute", x, rows, out)
    check_overlap("moe_permute", out, x=x, rows=rows)
    if num_rows is not None:
        check_integer("moe_permute", "num_rows", num_rows, least=0, most=MAX_INT32)
        num_rows = int(num_rows)
    if not runs_kernel("moe_permute", x, rows, out):
        _check_permute(x, rows, num_rows, out)
        return write_out(out, reference.moe_permute(x, rows, num_rows))
    launch = _prepare_permute(x, rows, num_rows, out)
    if out is None:
        out = empty(x, (rows.size if num_rows is None else num_rows, x.shape[1]))
    launch(x, rows, out)
    return out


def moe_permute_backward(grad_out: Array, rows: Array) -> Array:
    """Gradient of :func:`moe_permute` for `x`: `grad_x[t] = sum_s grad_out[rows[t, s]]`.

    Args:
        grad_out: gradient of `y`, float32|float16|bfloat16 [num_rows, hidden].
        rows: as in the forward.

    Returns:
        `grad_x`, [num_tokens, hidden], dtype of `grad_out`; accumulated in float32, deterministic.

    Raises:
        ArrayError: as :func:`moe_permute`.
    """
    return _unpermute("moe_permute_backward", grad_out, rows, None, None)


def moe_unpermute(
    y: Array, rows: Array, weights: Array | None = None, *, out: Array | None = None
) -> Array:
    """The weighted sum of each token's rows: `x[t] = sum_s weights[t, s] y[rows[t, s]]`.

    Args:
        y: float32|float16|bfloat16 [num_rows, hidden], C-contiguous; float64 on the CPU only.
        rows: int32 [num_tokens, top_k], as in :func:`moe_permute`; choices with -1 are skipped.
        weights: float32 [num_tokens, top_k]; None for the unweighted sum.
        out: array to write `x` into; dtype of `y`, [num_tokens, hidden]. It must not overlap an
            input.

    Returns:
        `x`, [num_tokens, hidden], dtype of `y`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.

    Runs on CuPy's current stream. Accumulates in float32 in the order of the choices:
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> y, rows = np.array([[1.0], [2.0], [4.0]], np.float32), np.array([[2, 0], [1, -1]], np.int32)
    >>> ck.moe_unpermute(y, rows, np.array([[0.5, 0.5], [1, 0]], np.float32)).ravel()
    array([2.5, 2. ], dtype=float32)
    """
    return _unpermute("moe_unpermute", y, rows, weights, out)


def moe_unpermute_backward(
    grad_out: Array, y: Array, rows: Array, weights: Array
) -> tuple[Array, Array]:
    """Gradients of :func:`moe_unpermute` with respect to `y` and `weights`, in one pass.

    Args:
        grad_out: gradient of `x`, [num_tokens, hidden], dtype of `y`.
        y, rows, weights: as in the forward.

    Returns:
        `(grad_y, grad_weights)`: [num_rows, hidden], dtype of `y`, where rows that belong to no
        choice are not written; float32 [num_tokens, top_k], 0 for choices without a row.

    Raises:
        ArrayError: as :func:`moe_unpermute`.
    """
    op = "moe_unpermute_backward"
    grad_out, y, rows, weights = adopt(op, grad_out, y, rows, weights)
    if not runs_kernel(op, grad_out, y, rows, weights):
        _check_backward(grad_out, y, rows, weights)
        return reference.moe_unpermute_backward(grad_out, y, rows, weights)
    launch = _prepare_backward(grad_out, y, rows, weights)
    grad_y, grad_weights = empty(y, y.shape), empty(weights, weights.shape)
    launch(grad_out, y, rows, weights, grad_y, grad_weights)
    return grad_y, grad_weights


def _unpermute(op: str, y: Array, rows: Array, weights: Array | None, out: Array | None) -> Array:
    y, rows, weights, out = adopt(op, y, rows, weights, out)
    check_overlap(op, out, y=y, rows=rows, weights=weights)
    if not runs_kernel(op, y, rows, weights, out):
        _check_unpermute(op, y, rows, weights, out)
        return write_out(out, reference.moe_unpermute(y, rows, weights))
    launch = _prepare_unpermute(op, y, rows, weights, out)
    if out is None:
        out = empty(y, (rows.shape[0], y.shape[1]))
    launch(y, rows, weights, out)
    return out


@dataclass(frozen=True)
class SliceConfig:
    """Each row is divided into slices of `threads * vecs_per_thread` accesses, one per block."""

    threads: int
    vecs_per_thread: int
    slices: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernels."""
        return ("THREADS", self.threads), ("VECS_PER_THREAD", self.vecs_per_thread)


@cache
def plan_slices(vecs: int, vecs_per_thread: int, max_threads: int = 256) -> SliceConfig:
    """The fewest slices that `max_threads` allows, and the threads that divide a slice evenly.

    vecs: accesses per row. vecs_per_thread: the most accesses that a thread has in flight.
    """
    vecs_per_thread = max(1, min(vecs_per_thread, vecs // _FEWEST_THREADS))
    slices = max(1, -(-vecs // (max_threads * vecs_per_thread)))
    share = -(-vecs // (slices * vecs_per_thread))
    return SliceConfig(max(_WARP, -(-share // _WARP) * _WARP), vecs_per_thread, slices)


PERMUTE_VECS = 4
UNPERMUTE_VECS = 1
BACKWARD_VECS = 4
_BACKWARD_THREADS = 256


def _permute_spec(config: SliceConfig, access_bytes: int) -> KernelSpec:
    defines = (("ACCESS_BYTES", access_bytes), *config.defines())
    return KernelSpec("moe/moe_permute.cu", "moe_permute", defines, config.threads)


def _unpermute_spec(config: SliceConfig, dtype: str, vec: int, weighted: bool) -> KernelSpec:
    defines: tuple[tuple[str, MacroValue], ...] = (
        ("DTYPE", dtype),
        ("VEC", vec),
        ("WEIGHTED", weighted),
        *config.defines(),
    )
    return KernelSpec("moe/moe_unpermute.cu", "moe_unpermute", defines, config.threads)


def _backward_spec(dtype: str, vec: int) -> KernelSpec:
    defines = (
        ("DTYPE", dtype),
        ("VEC", vec),
        ("THREADS", _BACKWARD_THREADS),
        ("VECS_PER_THREAD", BACKWARD_VECS),
    )
    entry = "moe_unpermute_backward"
    return KernelSpec(f"moe/{entry}.cu", entry, defines, _BACKWARD_THREADS)


def _check_rows(op: str, rows: Array, weights: Array | None) -> None:
    check_array(op, "rows", rows, dtypes=(int32,), ndim=2)
    if rows.size > MAX_INT32:
        raise ArrayShapeError(f"{op}: rows may have up to {MAX_INT32} elements, got {rows.size}")
    if weights is not None:
        check_array(op, "weights", weights, dtypes=(float32, float64), shape=rows.shape)


def _check_permute(x: Array, rows: Array, num_rows: int | None, out: Array | None) -> None:
    op = "moe_permute"
    _check_rows(op, rows, None)
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, shape=(rows.shape[0], None))
    if out is not None:
        extent = rows.size if num_rows is None else num_rows
        check_array(op, "out", out, shape=(extent, x.shape[1]))
    check_same_dtype(op, x=x, out=out)


def _check_unpermute(
    op: str, y: Array, rows: Array, weights: Array | None, out: Array | None
) -> None:
    name = "y" if op == "moe_unpermute" else "grad_out"
    _check_rows(op, rows, weights)
    check_array(op, name, y, dtypes=FLOAT_DTYPES, ndim=2)
    if out is not None:
        check_array(op, "out", out, shape=(rows.shape[0], y.shape[1]))
    check_same_dtype(op, **{name: y}, out=out)


def _check_backward(grad_out: Array, y: Array, rows: Array, weights: Array) -> None:
    op = "moe_unpermute_backward"
    _check_rows(op, rows, None)
    check_array(op, "weights", weights, dtypes=(float32, float64), shape=rows.shape)
    check_array(op, "y", y, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(op, "grad_out", grad_out, shape=(rows.shape[0], y.shape[1]))
    check_same_dtype(op, y=y, grad_out=grad_out)


def _launch(spec: KernelSpec, grid: tuple[int, ...], rows: Array, vecs: int) -> Launch:
    num_tokens, top_k = rows.shape
    parameters = _PARAMETERS.pack(num_tokens=num_tokens, top_k=top_k, vecs=vecs)
    return Launch(load_kernel(spec), grid, (parameters,))


@launch_plan
def _prepare_permute(x: Array, rows: Array, num_rows: int | None, out: Array | None) -> Launch:
    _check_permute(x, rows, num_rows, out)
    check_array("moe_permute", "x", x, dtypes=KERNEL_DTYPES)
    hidden = x.shape[1]
    vec = access_width(hidden, x, out)
    config = plan_slices(hidden // vec, PERMUTE_VECS)
    spec = _permute_spec(config, vec * x.itemsize)
    return _launch(spec, (rows.shape[0], config.slices), rows, hidden // vec)


@launch_plan
def _prepare_unpermute(
    op: str, y: Array, rows: Array, weights: Array | None, out: Array | None
) -> Launch:
    _check_unpermute(op, y, rows, weights, out)
    check_array(op, "y", y, dtypes=KERNEL_DTYPES)
    if weights is not None:
        check_array(op, "weights", weights, dtypes=(float32,))
    hidden = y.shape[1]
    vec = access_width(hidden, y, out)
    config = plan_slices(hidden // vec, UNPERMUTE_VECS)
    spec = _unpermute_spec(config, y.dtype.name, vec, weights is not None)
    return _launch(spec, (rows.shape[0], config.slices), rows, hidden // vec)


@launch_plan
def _prepare_backward(grad_out: Array, y: Array, rows: Array, weights: Array) -> Launch:
    _check_backward(grad_out, y, rows, weights)
    check_array("moe_unpermute_backward", "y", y, dtypes=KERNEL_DTYPES)
    check_array("moe_unpermute_backward", "weights", weights, dtypes=(float32,))
    hidden = y.shape[1]
    vec = access_width(hidden, grad_out, y)
    spec = _backward_spec(y.dtype.name, vec)
    return _launch(spec, (-(-rows.size // (_BACKWARD_THREADS // _WARP)),), rows, hidden // vec)


def _specs_permute(device: Device) -> list[KernelSpec]:
    return [
        _permute_spec(plan_slices(vecs, PERMUTE_VECS), access_bytes)
        for vecs in (128, 896)
        for access_bytes in (2, 16)
    ]


def _specs_unpermute(device: Device, weighted: bool = True) -> list[KernelSpec]:
    config = plan_slices(896, UNPERMUTE_VECS)
    return [
        _unpermute_spec(config, dtype.name, vec, weighted)
        for dtype in KERNEL_DTYPES
        for vec in (1, 16 // dtype.itemsize)
    ]


def _specs_backward(device: Device) -> list[KernelSpec]:
    return [
        _backward_spec(dtype.name, vec)
        for dtype in KERNEL_DTYPES
        for vec in (1, 16 // dtype.itemsize)
    ]


register(
    name="moe_permute",
    family="moe",
    function=moe_permute,
    reference=reference.moe_permute,
    specs=_specs_permute,
)
register(
    name="moe_permute_backward",
    family="moe",
    function=moe_permute_backward,
    reference=reference.moe_permute_backward,
    specs=lambda device: _specs_unpermute(device, weighted=False),
)
register(
    name="moe_unpermute",
    family="moe",
    function=moe_unpermute,
    reference=reference.moe_unpermute,
    specs=_specs_unpermute,
)
register(
    name="moe_unpermute_backward",
    family="moe",
    function=moe_unpermute_backward,
    reference=reference.moe_unpermute_backward,
    specs=_specs_backward,
)
