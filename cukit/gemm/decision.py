"""Choosing a kernel and an arithmetic for a product, once for each description of its operands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.core import backend
from cukit.core.arrays import ACCESS_BYTES, Array, address_of, bfloat16, describe, is_gpu_array
from cukit.core.device import current_device
from cukit.errors import ConfigError
from cukit.gemm import measured_times
from cukit.gemm.candidates import (
    KERNELS,
    PRECISIONS,
    Estimate,
    MatmulProblem,
    plan_matmul,
)
from cukit.gemm.dense import Product, multiply, plan_product
from cukit.gemm.sampled_error import sampled_error

_LOG = logging.getLogger("cukit.gemm")
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
_MOST_DECISIONS = 4096


@dataclass(frozen=True)
class MatmulPlan:
    """What `matmul` decided, and between what.

    kernel: name of the one that runs; `"reference"` for arrays on the CPU.
    precision: of the multiplications.
    rtol: what was allowed; None where nothing but the operands' own precision was.
    errors: sampled errors of the precisions that were looked at.
    estimates: all candidates, the fastest first, then those that cannot be taken.
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
    """A plan, and what carries it out: `run(a, b, out)`."""

    plan: MatmulPlan
    run: Callable[[Array, Array, Array | None], Array]


_decisions: dict[Hashable, Decision] = {}


def recall(
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
    """The decision for operands of this description; made, with a sample of errors, the first time.

    The arrays are of NumPy or CuPy. A repeated call costs one look-up.
    """
    options = (transpose_a, transpose_b, accumulate, out_dtype, precision, rtol)
    key = (backend.active and backend.active.key, *describe(a, b, out, *options))
    decision = _decisions.get(key)
    if decision is None:
        decision = decide(a, b, out, *options)
        if len(_decisions) >= _MOST_DECISIONS:
            _decisions.clear()
        _decisions[key] = decision
    return decision


def forget_decisions() -> None:
    """Makes `matmul` choose, and sample errors, anew: for other data, or after `tune_matmul`."""
    _decisions.clear()


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
    """Chooses, logs the choice at level DEBUG of the logger "cukit.gemm", and returns it."""
    product = plan_product("matmul", a, b, out, transpose_a, transpose_b, accumulate, out_dtype)
    problem = describe_problem(product, a, b, accumulate)
    options = {
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "accumulate": accumulate,
        "out_dtype": product.dtype if out is None else None,
    }
    own = PRECISIONS[problem.dtype]
    if precision != "auto" and precision not in own:
        raise ConfigError(
            f"matmul: precision of {problem.dtype} operands must be auto, {', '.join(own)}, "
            f"got {precision!r}"
        )
    if rtol is not None and not rtol >= 0:
        raise ConfigError(f"matmul: rtol must not be negative, got {rtol}")
    if not is_gpu_array(a) and backend.active is None:
        plan = MatmulPlan(problem, "reference", own[0], rtol)
        return Decision(plan, partial(_run, multiply, options, None))
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

    chosen = None
    for each in estimates:
        if each.reason is None and allows(each.precision):
            chosen = each
            break
    assert chosen is not None  # cuBLAS does everything in the operands' own precision
    plan = MatmulPlan(
        problem, chosen.kernel, chosen.precision, rtol, tuple(errors.items()), estimates
    )
    _LOG.debug("%s", plan)
    return Decision(plan, runner(chosen, problem, options))


def runner(
    estimate: Estimate, problem: MatmulProblem, options: dict[str, Any]
) -> Callable[[Array, Array, Array | None], Array]:
    """What carries out a candidate."""
    kernel = _BY_NAME[estimate.kernel]
    options = {**options, "precision": estimate.precision}
    operand_dtype = None
    if estimate.precision not in (problem.dtype, "tf32"):
        operand_dtype = bfloat16 if estimate.precision == "bfloat16" else estimate.precision
    return partial(_run, kernel.run, options, operand_dtype)


def _run(
    function: Callable[..., Array],
    options: dict[str, Any],
    operand_dtype: Any,
    a: Array,
    b: Array,
    out: Array | None,
) -> Array:
    if operand_dtype is not None:
        a, b = a.astype(operand_dtype), b.astype(operand_dtype)
    return function(a, b, out=out, **options)


def describe_problem(product: Product, a: Array, b: Array, accumulate: bool) -> MatmulProblem:
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
        flat=all(array.ndim == 2 and array.flags.c_contiguous for array in (a, b)),
        aligned=aligned,
    )
