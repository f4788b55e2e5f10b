"""The choice of a kernel and a precision for `matmul`, made once per description of operands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.core import backend
from cukit.core.arrays import ACCESS_BYTES, Array, address_of, is_gpu_array, runs_kernel
from cukit.core.device import current_device
from cukit.core.kernel import launch_plan
from cukit.core.scalars import check_number
from cukit.errors import ConfigError
from cukit.gemm.dense._dense import CheckedProduct, plan_product
from cukit.gemm.dispatch import _matmul_times as measured_times
from cukit.gemm.dispatch._matmul_candidates import (
    KERNELS,
    PRECISIONS,
    Estimate,
    MatmulOptions,
    MatmulProblem,
    Run,
    plan_matmul,
)
from cukit.gemm.dispatch._matmul_narrowing import NARROWING, sampled_error
from cukit.reference import gemm as reference

_LOG = logging.getLogger("cukit.gemm")
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}


@dataclass(frozen=True)
class MatmulPlan:
    """What `matmul` chose, and the candidates it chose from.

    kernel: name of the kernel that runs; `"reference"` for arrays on the CPU.
    precision: of the multiplications.
    rtol: the tolerance; None if only the operands' own precision was allowed.
    errors: sampled errors of the precisions that were considered.
    estimates: all candidates, fastest first, followed by those that cannot run.
    """

    problem: MatmulProblem
    kernel: str
    precision: str
    rtol: float | None
    errors: tuple[tuple[str, float], ...] = ()
    estimates: tuple[Estimate, ...] = ()

    def __str__(self) -> str:
        problem, errors = self.problem, dict(self.errors)
        shape = f"[{problem.m}, {problem.k}] x [{problem.k}, {problem.n}] {problem.dtype}"
        lines = [f"{shape}: {self.kernel} in {self.precision}"]
        for each in self.estimates:
            error = f"error {errors[each.precision]:.1e}" if each.precision in errors else ""
            kind = "measured" if each.measured else "modelled"
            verdict = each.reason or f"{each.time_us:8.1f} us {kind:<9}{error}"
            lines.append(f"  {each.kernel:<12}{each.precision:<10}{verdict}".rstrip())
        return "\n".join(lines)


class Decision(NamedTuple):
    """A plan and the function that carries it out."""

    plan: MatmulPlan
    run: Run


def decide(
    a: Array,
    b: Array,
    out: Array | None,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
    out_dtype: Any,
    precision: str,
    rtol: float | None,
) -> Decision:
    """Makes the choice and logs it at DEBUG level to the logger "cukit.gemm"."""
    options = MatmulOptions(transpose_a, transpose_b, accumulate, out_dtype)
    product = plan_product("matmul", a, b, out, *options)
    problem = describe_problem(product, a, b, out, accumulate)
    own = PRECISIONS[problem.dtype]
    if not isinstance(precision, str) or (precision != "auto" and precision not in own):
        raise ConfigError(
            f"matmul: precision of {problem.dtype} operands must be auto, {', '.join(own)}, "
            f"got {precision!r}"
        )
    if rtol is not None:
        check_number("matmul", "rtol", rtol, least=0)
    if not runs_kernel("matmul", a, b, out):
        plan = MatmulPlan(problem, "reference", own[0], rtol)
        return Decision(plan, partial(_run_reference, options))
    device = current_device()
    estimates = plan_matmul(problem, device, measured_times.recall(device, problem))
    errors: dict[str, float] = {}

    def allows(candidate: str) -> bool:
        if precision != "auto":
            return candidate == precision
        if candidate == own[0] or rtol is None:
            return candidate == own[0]
        if candidate not in errors:
            errors[candidate] = sampled_error(
                a, b, candidate, transpose_a=transpose_a, transpose_b=transpose_b
            )
        return errors[candidate] <= rtol

    chosen = next((e for e in estimates if e.reason is None and allows(e.precision)), None)
    if chosen is None:  # only for float8: cuBLAS supports every other precision
        reasons = [f"{e.kernel}: {e.reason}" for e in estimates if e.precision == precision]
        raise ConfigError(f"matmul: no kernel can multiply in {precision}; {', '.join(reasons)}")
    plan = MatmulPlan(
        problem, chosen.kernel, chosen.precision, rtol, tuple(errors.items()), estimates
    )
    _LOG.debug("%s", plan)
    return Decision(plan, prepare(chosen, a, b, out, options))


_recall = launch_plan(decide)


def recall(a: Array, b: Array, out: Array | None, *options: Any) -> Decision:
    """:func:`decide`, memoised per description of the operands where kernels run."""
    if not is_gpu_array(a) and backend.active is None:
        return decide(a, b, out, *options)
    decision: Decision = _recall(a, b, out, *options)
    return decision


def forget_decisions() -> None:
    """Makes `matmul` choose and sample errors again: for new data, or after `tune_matmul`."""
    _recall.forget()  # type: ignore[attr-defined]


def prepare(
    estimate: Estimate, a: Array, b: Array, out: Array | None, options: MatmulOptions
) -> Run:
    """The function that runs a candidate on arrays like these."""
    kernel = _BY_NAME[estimate.kernel]
    if estimate.precision in (a.dtype.name, "tf32"):
        return kernel.prepare(a, b, out, estimate.precision, options)
    out_dtype = a.dtype if options.out_dtype is None and out is None else options.out_dtype
    options = options._replace(out_dtype=out_dtype)
    narrow = NARROWING[estimate.precision]
    run = kernel.prepare(narrow(a), narrow(b), out, estimate.precision, options)
    return partial(_run_narrowed, run, narrow)


def _run_narrowed(
    run: Run, narrow: Callable[[Array], Array], a: Array, b: Array, out: Array | None
) -> Array:
    return run(narrow(a), narrow(b), out)


def _run_reference(options: MatmulOptions, a: Array, b: Array, out: Array | None) -> Array:
    return reference.matmul(a, b, out=out, **options._asdict())


def describe_problem(
    product: CheckedProduct, a: Array, b: Array, out: Array | None, accumulate: bool
) -> MatmulProblem:
    """The description of a checked product."""
    left, right, target = product.layouts
    aligned = all(
        layout.leading * array.itemsize % ACCESS_BYTES == 0
        and address_of(array) % ACCESS_BYTES == 0
        for layout, array in ((left, a), (right, b))
    )
    return MatmulProblem(
        m=target.rows,
        n=target.columns,
        k=left.rows if left.transposed else left.columns,
        dtype=a.dtype.name,
        out=np.dtype(product.dtype).name,
        transpose_a=left.transposed,
        transpose_b=right.transposed,
        accumulate=accumulate,
        flat=all(
            array is None or (array.ndim == 2 and array.flags.c_contiguous) for array in (a, b, out)
        ),
        aligned=aligned,
    )
