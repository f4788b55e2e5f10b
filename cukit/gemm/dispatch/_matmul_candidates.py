"""The kernels that `matmul` can choose from: what each supports, and a model of its time.

`plan_matmul` ranks them; it is a pure function of the product's description and the device. To add
a kernel, add a `MatmulKernel` to KERNELS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cukit.core.arrays import Array, empty
from cukit.core.device import Device
from cukit.core.narrow_dtype import float8_e4m3
from cukit.gemm.dense._dense import CheckedProduct, plan_product, run_product
from cukit.gemm.dense._linear_launch import prepare_linear
from cukit.gemm.dense._linear_plan import HOPPER, Product, Sm90Config, estimate_us, plan_linear
from cukit.gemm.dense.gemv import MAX_TOKENS, prepare_gemv
from cukit.gemm.quantized.fp8 import matmul_fp8

FLOAT8 = float8_e4m3.name
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "float64": ("float64",),
    "float32": ("float32", "tf32", "bfloat16", FLOAT8),
    "float16": ("float16", FLOAT8),
    "bfloat16": ("bfloat16", FLOAT8),
}
"""The precisions in which operands of a dtype may be multiplied, most accurate first."""

_ITEMSIZE = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, FLOAT8: 1}


@dataclass(frozen=True)
class MatmulProblem:
    """The description of a product [m, k] @ [k, n] by which a kernel is chosen.

    dtype, out: dtypes of the operands and of the result.
    flat: whether operands and `out` are C-contiguous and have two axes.
    aligned: whether the rows of both operands are 16-byte aligned.
    """

    m: int
    n: int
    k: int
    dtype: str
    out: str
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: bool = False
    flat: bool = True
    aligned: bool = True

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition per term."""
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Memory traffic if operands are read once and the result is written once."""
        operands = (self.m + self.n) * self.k * _ITEMSIZE[self.dtype]
        return operands + self.m * self.n * _ITEMSIZE[self.out] * (2 if self.accumulate else 1)


@dataclass(frozen=True)
class Rates:
    """Rates that large products reach: memory in GB/s, each precision in TFLOP/s."""

    memory: float
    half: float
    tf32: float
    float32: float
    float64: float

    def flops_us(self, problem: MatmulProblem, precision: str) -> float:
        """Microseconds for the floating-point operations."""
        rate = getattr(self, "half" if precision in ("float16", "bfloat16") else precision)
        return float(problem.flops / rate / 1e6)

    def bytes_us(self, size: float) -> float:
        """Microseconds for moving `size` bytes."""
        return size / self.memory / 1e3


# SMs and rates of a typical device, by compute capability; FLOP rates scale with the SMs.
_RATES = {
    (8, 0): (108, Rates(1400, 270, 130, 18, 17)),
    (8, 6): (82, Rates(850, 65, 33, 30, 0.5)),
    (8, 9): (128, Rates(930, 150, 75, 70, 1.2)),
    (9, 0): (132, Rates(4300, 760, 380, 52, 58)),
    (10, 0): (148, Rates(7000, 1500, 700, 70, 38)),
    (12, 0): (170, Rates(1600, 200, 100, 95, 1.5)),
}


def rates_of(device: Device) -> Rates:
    """Rates of the newest known architecture that is not newer than the device."""
    known = [each for each in _RATES if each <= device.compute_capability] or [min(_RATES)]
    sms, rates = _RATES[max(known)]
    share = device.num_sms / sms
    return Rates(
        rates.memory, rates.half * share, rates.tf32 * share, rates.float32 * share,
        rates.float64 * share,
    )  # fmt: skip


class MatmulOptions(NamedTuple):
    """Options of a product, in the order of `plan_product`."""

    transpose_a: bool
    transpose_b: bool
    accumulate: bool
    out_dtype: Any


Run = Callable[[Array, Array, Array | None], Array]
"""Multiplies a and b, which must match the description that it was prepared for, into `out` or a
new array."""


@dataclass(frozen=True)
class MatmulKernel:
    """A kernel that can compute products.

    precisions: the precisions it supports.
    reason_against: why it cannot compute a problem on a device, or None.
    time_us: a model of its time on the device.
    prepare: takes arrays (operands in the precision's dtype; for float8, QuantizedArrays with a
        scale for each row), precision and options; returns `run(a, b, out)` for arrays like these.
    """

    name: str
    precisions: tuple[str, ...]
    reason_against: Callable[[MatmulProblem, Device], str | None]
    time_us: Callable[[MatmulProblem, str, Device, Rates], float]
    prepare: Callable[[Array, Array, Array | None, str, MatmulOptions], Run]


def _cublas_us(problem: MatmulProblem, precision: str, device: Device, rates: Rates) -> float:
    """About 8 us on an H200 for small products; large ones reach 90 % of the bandwidth."""
    memory = rates.bytes_us(problem.bytes) / 0.9
    return 8 + max(memory, rates.flops_us(problem, precision))


def _prepare_cublas(
    a: Array, b: Array, out: Array | None, precision: str, options: MatmulOptions
) -> Run:
    product = plan_product("matmul", a, b, out, *options)
    return partial(
        _run_cublas, product, {"accumulate": options.accumulate, "tf32": precision == "tf32"}
    )


def _run_cublas(
    product: CheckedProduct, how: dict[str, bool], a: Array, b: Array, out: Array | None
) -> Array:
    return run_product(product, a, b, out, **how)


def _gemv_reason(problem: MatmulProblem, device: Device) -> str | None:
    if min(problem.m, problem.n) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} rows and columns"
    if problem.accumulate:
        return "it does not accumulate"
    return None


def _gemv_us(problem: MatmulProblem, precision: str, device: Device, rates: Rates) -> float:
    """Starts 2 us faster than cuBLAS, but reaches a smaller share of the bandwidth.

    The shares were measured on an H200: weights contiguous along the depth, along the columns, and
    unaligned.
    """
    few_rows = problem.m <= problem.n
    along_depth = problem.transpose_b if few_rows else not problem.transpose_a
    share = (0.75 if along_depth else 0.45) if problem.aligned else 0.2
    filled = min(1.0, max(problem.m, problem.n, 1) / device.num_sms)
    return 6 + rates.bytes_us(problem.bytes) / share / filled


def _prepare_gemv(
    a: Array, b: Array, out: Array | None, precision: str, options: MatmulOptions
) -> Run:
    run: Run = prepare_gemv(a, b, out, options.transpose_a, options.transpose_b, options.out_dtype)
    return run


def _linear_reason(problem: MatmulProblem, device: Device) -> str | None:
    if not problem.flat:
        return "it needs contiguous matrices"
    if min(problem.m, problem.n, problem.k) == 0:
        return "there is nothing to multiply"
    if problem.accumulate or problem.out != problem.dtype:
        return "it neither accumulates nor changes the dtype"
    return None


def _linear_product(problem: MatmulProblem) -> Product:
    return Product(
        problem.m,
        problem.n,
        problem.k,
        problem.dtype,
        "MN" if problem.transpose_a else "K",
        "K" if problem.transpose_b else "MN",
    )


_GENERAL_SHARE = 0.6
"""Speed of linear_sm80.cu relative to cuBLAS."""


def _linear_us(problem: MatmulProblem, precision: str, device: Device, rates: Rates) -> float:
    product = _linear_product(problem)
    config = plan_linear(product, problem.aligned, device)
    if isinstance(config, Sm90Config):
        return estimate_us(product, config.tiling, device.num_sms)
    return _cublas_us(problem, precision, device, rates) / _GENERAL_SHARE


def _prepare_linear(
    a: Array, b: Array, out: Array | None, precision: str, options: MatmulOptions
) -> Run:
    plan = plan_product("matmul", a, b, out, *options)
    (k, m) = a.shape if options.transpose_a else a.shape[::-1]
    n = b.shape[0] if options.transpose_b else b.shape[1]
    major_a, major_b = "MN" if options.transpose_a else "K", "K" if options.transpose_b else "MN"
    product = Product(m, n, k, a.dtype.name, major_a, major_b)
    launch = prepare_linear(product, a, b, out)

    def run(a: Array, b: Array, out: Array | None) -> Array:
        result = empty(a, plan.shape, plan.dtype) if out is None else out
        launch(a, b, None, None, result, None)
        return result

    return run


_FLOAT8_SPEEDUP = 1.7
"""Speed of large float8 products relative to 16-bit ones."""


def _fp8_reason(problem: MatmulProblem, device: Device) -> str | None:
    if device.arch != HOPPER:
        return f"it does not use float8 tensor cores on {device.arch}"
    if problem.transpose_a or not problem.transpose_b:
        return "scales are per row along k: it needs a [m, k] and b [n, k]"
    if not problem.flat:
        return "it needs contiguous matrices"
    if problem.accumulate:
        return "it does not accumulate"
    return None


def _fp8_us(problem: MatmulProblem, precision: str, device: Device, rates: Rates) -> float:
    memory = rates.bytes_us(problem.bytes) / 0.9
    return 8 + max(memory, rates.flops_us(problem, "bfloat16") / _FLOAT8_SPEEDUP)


def _prepare_fp8(
    a: Array, b: Array, out: Array | None, precision: str, options: MatmulOptions
) -> Run:
    def run(a: Array, b: Array, out: Array | None) -> Array:
        return matmul_fp8(a, b, out_dtype=options.out_dtype, out=out)

    return run


KERNELS: tuple[MatmulKernel, ...] = (
    MatmulKernel(
        "cublas",
        ("float64", "float32", "tf32", "float16", "bfloat16"),
        lambda problem, device: None,
        _cublas_us,
        _prepare_cublas,
    ),
    MatmulKernel("gemv", ("float16", "bfloat16"), _gemv_reason, _gemv_us, _prepare_gemv),
    MatmulKernel("linear", ("float16", "bfloat16"), _linear_reason, _linear_us, _prepare_linear),
    MatmulKernel("fp8", (FLOAT8,), _fp8_reason, _fp8_us, _prepare_fp8),
)


@dataclass(frozen=True)
class Estimate:
    """A candidate for a product.

    time_us: modelled, or `measured`; includes the conversion of the operands.
    reason: why the candidate cannot run; None if it can.
    """

    kernel: str
    precision: str
    time_us: float
    measured: bool = False
    reason: str | None = None


Times = Mapping[tuple[str, str], float]
"""Measured microseconds by (kernel, precision)."""


@lru_cache(maxsize=4096)
def _modelled(problem: MatmulProblem, device: Device) -> tuple[Estimate, ...]:
    rates = rates_of(device)
    estimates = []
    for precision in PRECISIONS[problem.dtype]:
        converts = precision not in (problem.dtype, "tf32")
        narrowed = replace(problem, dtype=precision) if converts else problem
        size = (problem.m + problem.n) * problem.k
        both = _ITEMSIZE[problem.dtype] + _ITEMSIZE[precision]
        converting = 6 + rates.bytes_us(size * both) / 0.9 if converts else 0.0
        for kernel in KERNELS:
            if precision in kernel.precisions:
                reason = kernel.reason_against(narrowed, device)
                model = 0.0 if reason else kernel.time_us(narrowed, precision, device, rates)
                estimates.append(
                    Estimate(kernel.name, precision, converting + model, reason=reason)
                )
    return tuple(estimates)


def plan_matmul(
    problem: MatmulProblem, device: Device, times: Times | None = None
) -> tuple[Estimate, ...]:
    """All candidates, fastest first, followed by those that cannot run."""
    estimates = [
        replace(each, time_us=times[each.kernel, each.precision], measured=True)
        if times and not each.reason and (each.kernel, each.precision) in times
        else each
        for each in _modelled(problem, device)
    ]
    return tuple(sorted(estimates, key=lambda each: (each.reason is not None, each.time_us)))
