"""The plain product of two matrices with Hopper's TMA and wgmma."""

from __future__ import annotations

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.core.overlap import check_overlap
from cukit.core.support import Support
from cukit.gemm.dense._linear_plan import CLUSTER_TILING, HOPPER, Product, configure
from cukit.gemm.dense.linear import linear
from cukit.reference import gemm as reference
from cukit.registry import register


def matmul_tma(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`out = a b^T`: :func:`linear` without an epilogue, for two plain matrices.

    Args:
        a: float16|bfloat16 [m, k], C-contiguous; float32|float64 on the CPU only.
        b: dtype of `a`, [n, k].
        out: array to write into; dtype of `a`, [m, n]. It must not overlap the operands.

    Returns:
        `out` or a new array [m, n], dtype of `a`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.

    Hopper only; other devices run the reference. Runs on CuPy's current stream. Accumulates in
    float32; deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.matmul_tma(np.ones((2, 8), np.float16), np.ones((3, 8), np.float16)).shape
    (2, 3)
    """
    a, b, out = adopt("matmul_tma", a, b, out)
    check_array("matmul_tma", "a", a, dtypes=FLOAT_DTYPES, ndim=2)
    check_array("matmul_tma", "b", b, shape=(None, a.shape[1]))
    if out is not None:
        check_array("matmul_tma", "out", out, shape=(a.shape[0], b.shape[0]))
    check_same_dtype("matmul_tma", a=a, b=b, out=out)
    check_overlap("matmul_tma", out, a=a, b=b)
    if not runs_kernel("matmul_tma", a, b, out):
        return reference.matmul(a, b, transpose_b=True, out=out)
    return linear(a, b, out=out)


def _specs(device: Device) -> list[KernelSpec]:
    """The tiling that no plan selects; the others are among the specs of `linear`."""
    if device.arch != HOPPER:
        return []
    return [
        configure(Product(4096, 4096, 4096, dtype), CLUSTER_TILING, device.num_sms).spec()
        for dtype in ("bfloat16", "float16")
    ]


register(
    name="matmul_tma",
    family="gemm",
    function=matmul_tma,
    reference=reference.matmul,
    specs=_specs,
    support=Support(HOPPER, HOPPER),
)
