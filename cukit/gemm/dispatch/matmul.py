"""The matrix product: one function for all arrays, layouts, kernels and precisions."""

from __future__ import annotations

from functools import partial
from typing import Any

from cukit.core.arrays import Array, adopt, foreign_namespace, is_gpu_array, runs_kernel
from cukit.core.device import current_device, require_cupy
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ConfigError, UnsupportedDeviceError
from cukit.gemm.dense._dense import check_call, multiply
from cukit.gemm.dispatch import _matmul_times as measured_times
from cukit.gemm.dispatch._matmul_candidates import MatmulOptions
from cukit.gemm.dispatch._matmul_decision import (
    MatmulPlan,
    decide,
    forget_decisions,
    prepare,
    recall,
)
from cukit.reference import gemm as reference
from cukit.registry import register

_MEASURED_CALLS = 7


def matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    rtol: float | None = None,
    return_plan: bool = False,
) -> Any:
    """The matrix product `op(a) @ op(b)`, accumulated in float32 (float64 for float64).

    All axes of an operand but its last are flattened to rows: activations
    `[batch, seq_len, features]` need no reshape, and `transpose_a` sums over all tokens.

    Args:
        a: float32|float16|bfloat16|float64 [..., k]; [..., m] with `transpose_a`, with k rows.
        b: dtype of `a`, [k, n]; [n, k] with `transpose_b`.
        transpose_a, transpose_b: multiply by the transpose.
        out: written in place; dtype of `a`, or float32. Must not overlap an operand.
        accumulate: add to the values in `out`.
        out_dtype: of the result if `out` is not given: the dtype of `a` (default) or float32.
        precision: None: cuBLAS in the operands' own precision. `"auto"`: the fastest kernel and
            precision that `rtol` allows. Or a precision by name, in the fastest kernel: the dtype
            of `a`, for float32 operands also `"tf32"` and `"bfloat16"`, and on Hopper, except for
            float64 operands, `"float8_e4m3"`, for which each call first quantises both operands by
            rows.
        rtol: with `"auto"`: the largest ||row - exact row|| / ||exact row|| that a lower precision
            may have. None: the operands' own precision; no error is sampled.
        return_plan: also return the :class:`MatmulPlan`: the choice and the estimates behind it.

    Any array may have gaps between its rows, as long as its last axis is contiguous and its leading
    axes collapse into one stride. Arrays of other libraries that follow the array API standard
    (JAX, also on a TPU) are multiplied by their own library, in its precision, whatever
    `rtol` allows; a precision by name, `out`, `accumulate` and `return_plan` need NumPy or CuPy
    operands.

    Returns:
        `out` or a new array [..., n]; [m, n] with `transpose_a`; with `return_plan` a pair.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: `accumulate` without `out`; an unknown precision; a negative rtol; float8 by
            name where no kernel supports it.

    `"auto"` decides once for each description of the operands (shapes, strides, dtypes, rtol);
    later calls cost a look-up. The first call ranks kernels by a cost model, or by times from
    :func:`tune_matmul`. With an rtol, it also computes 8 rows and 256 columns in float64 to measure
    the error of lower precisions, which synchronises and cannot be captured in a graph. Later data
    are assumed to be similar; to sample again, call `cukit.gemm.forget_decisions()`.

    On the GPU, float32 is not multiplied in TF32 unless `precision` allows it, and partial sums are
    never 16-bit. Runs on CuPy's current stream. CuPy cannot capture cuBLAS calls in a graph; the
    other kernels can be captured. Deterministic on one stream.

    >>> import numpy as np, cukit as ck
    >>> ck.matmul(np.ones((2, 3, 4), np.float32), np.ones((4, 5), np.float32)).shape
    (2, 3, 5)
    """
    xp = foreign_namespace(a)
    if xp is not None:
        needs_kernels = out is not None or accumulate or return_plan
        if needs_kernels or (precision is not None and precision != "auto"):
            raise ConfigError(
                "matmul: out, accumulate, return_plan and a precision by name need NumPy or CuPy "
                f"operands, got {type(a).__module__}.{type(a).__name__}"
            )
        if rtol is not None:
            check_number("matmul", "rtol", rtol, least=0)
        return reference.matmul_standard(
            xp, a, b, transpose_a=transpose_a, transpose_b=transpose_b, out_dtype=out_dtype
        )
    check_flag("matmul", "return_plan", return_plan)
    if precision is None:
        if rtol is not None or return_plan:
            raise ConfigError("matmul: rtol and return_plan need a precision, such as 'auto'")
        return multiply(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out, accumulate=accumulate,
            out_dtype=out_dtype,
        )  # fmt: skip
    a, b, out = adopt("matmul", a, b, out)
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
    check_call("matmul", a, b, out, **flags)
    decision = recall(a, b, out, transpose_a, transpose_b, accumulate, out_dtype, precision, rtol)
    result = decision.run(a, b, out)
    return (result, decision.plan) if return_plan else result


def explain_matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
    precision: str = "auto",
    rtol: float | None = None,
) -> MatmulPlan:
    """Returns what :func:`matmul` would choose for these operands, and why; computes no product.

    Arguments and errors are those of `matmul`. Printing the plan lists every candidate with its
    time and its sampled error, or the reason why it cannot run.

    >>> import numpy as np, cukit as ck
    >>> print(ck.explain_matmul(np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)))
    [2, 4] x [4, 3] float32: reference in float32
    """
    a, b, out = adopt("matmul", a, b, out)
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
    check_call("matmul", a, b, out, **flags)
    return decide(a, b, out, transpose_a, transpose_b, accumulate, out_dtype, precision, rtol).plan


def tune_matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
) -> MatmulPlan:
    """Times every candidate for these operands; `matmul(precision="auto")` then uses these times.

    Arguments are those of :func:`matmul`. Operands that fit into L2 are timed with a warm L2. The
    medians of seven calls are stored in the kernel cache for later processes. Returns the new plan.
    Raises UnsupportedDeviceError for arrays that are not on a GPU.
    """
    a, b, out = adopt("tune_matmul", a, b, out)
    if not is_gpu_array(a) or not runs_kernel("matmul", a, b, out):
        raise UnsupportedDeviceError("tune_matmul: the arrays must be on a GPU")
    options = MatmulOptions(transpose_a, transpose_b, accumulate, out_dtype)
    plan = explain_matmul(a, b, out=out, **options._asdict())
    target = out.copy() if accumulate and out is not None else out
    times = {}
    for each in plan.estimates:
        if each.reason is None:
            run = prepare(each, a, b, target, options)
            times[each.kernel, each.precision] = _median_us(partial(run, a, b, target))
    measured_times.remember(current_device(), plan.problem, times)
    forget_decisions()
    return explain_matmul(a, b, out=out, **options._asdict())


def _median_us(call: Any) -> float:
    """The median time of single calls, measured with CUDA events."""
    cuda = require_cupy("measuring products").cuda
    call()
    samples = []
    for _ in range(_MEASURED_CALLS):
        start, end = cuda.Event(), cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(cuda.get_elapsed_time(start, end) * 1e3)
    return float(sorted(samples)[_MEASURED_CALLS // 2])


register(name="matmul", family="gemm", function=matmul, reference=reference.matmul)
