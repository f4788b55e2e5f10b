"""Grouped products, in which each group of rows has its own matrix: mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    int32,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.scalars import MAX_INT32, check_choice, check_flag
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm.dense._linear_plan import HOPPER, Product
from cukit.gemm.grouped import _grouped_plan as grouped_plan
from cukit.gemm.grouped._grouped_launch import GroupedSm80, GroupedSm90, prepare_grouped
from cukit.gemm.grouped._grouped_plan import MAX_GROUPS, GroupedProblem, Layout, plan_grouped_sm80
from cukit.reference import grouped_gemm as reference
from cukit.registry import register

_DTYPES = (float16, bfloat16)
_GATES = ("silu", "gelu", "gelu_tanh")


def grouped_gemm(
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    transpose_weights: bool = False,
    out: Array | None = None,
) -> Array:
    """Multiplies each group of rows by the group's own matrix: `y[r] = weights[g] x[r]`.

    Groups may have any number of rows, including 0; nothing is padded. They are either contiguous,
    or each has a fixed capacity:

    | layout         | x                     | rows of group g                            |
    | -------------- | --------------------- | ------------------------------------------ |
    | contiguous     | [rows, k]             | expert_offsets[g] to expert_offsets[g + 1] |
    | fixed capacity | [groups, capacity, k] | the first expert_counts[g] of x[g]         |

    Args:
        x: float16|bfloat16, see above, C-contiguous; float32|float64 on the CPU only.
        weights: dtype of `x`, [groups, n, k]; [groups, k, n] with `transpose_weights`. On the GPU
            at most 512 groups; fastest if k and n are multiples of 8.
        expert_offsets: int32 [groups + 1], ascending from 0 to at most `rows`.
        expert_counts: int32 [groups]; counts above the capacity are treated as the capacity.
        out: array to write into; dtype of `x`, [rows, n] or [groups, capacity, n]. It must not
            overlap an input.

    Returns:
        `y`. On the GPU, rows that belong to no group are not written.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: neither or both of `expert_offsets` and `expert_counts`, too many groups.

    Runs on CuPy's current stream. Offsets and counts are read only on the device: there is no
    synchronisation, and the call can be captured in a graph. Accumulates in float32; deterministic.
    Paper: Gale et al., "MegaBlocks", arXiv:2211.15841.

    >>> import numpy as np, cukit as ck
    >>> x, weights = np.ones((3, 8), np.float16), np.arange(2).repeat(8).reshape(2, 1, 8)
    >>> ck.grouped_gemm(x, weights.astype(np.float16), np.array([0, 1, 3], np.int32)).ravel()
    array([0., 8., 8.], dtype=float16)
    """
    op = "grouped_gemm"
    x, weights, expert_offsets, expert_counts, out = adopt(
        op, x, weights, expert_offsets, expert_counts, out
    )
    check_flag(op, "transpose_weights", transpose_weights)
    check_overlap(
        op, out, x=x, weights=weights, expert_offsets=expert_offsets, expert_counts=expert_counts
    )
    if not runs_kernel(op, x, weights, expert_offsets, expert_counts, out):
        _check(op, x, weights, expert_offsets, expert_counts, out, transpose_weights)
        y = reference.grouped_gemm(
            x,
            weights,
            expert_offsets,
            expert_counts=expert_counts,
            transpose_weights=transpose_weights,
        )
        return write_out(out, y)
    launch = _prepare(x, weights, expert_offsets, expert_counts, out, transpose_weights)
    if out is None:
        out = empty(x, (*x.shape[:-1], weights.shape[2 if transpose_weights else 1]))
    if out.size:
        launch(x, weights, out, None, _either(expert_offsets, expert_counts))
    return out


def grouped_gemm_backward(
    grad_out: Array,
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of :func:`grouped_gemm` with respect to `x` and `weights`.

    `grad_x[r] = weights[g]^T grad_out[r]`; `grad_weights[g]` is the sum of `grad_out[r]^T x[r]`
    over the rows of the group, 0 for an empty group.

    Args:
        grad_out: gradient of `y`, [rows, n] or [groups, capacity, n], dtype of `x`.
        x, weights, expert_offsets, expert_counts: as in the forward, `weights` as [groups, n, k].

    Returns:
        `(grad_x, grad_weights)`, shapes and dtypes of `x` and `weights`; on the GPU, rows that
        belong to no group are not written.

    Raises:
        ArrayError, ConfigError: as :func:`grouped_gemm`.
    """
    op = "grouped_gemm_backward"
    grad_out, x, weights, expert_offsets, expert_counts = adopt(
        op, grad_out, x, weights, expert_offsets, expert_counts
    )
    if not runs_kernel(op, grad_out, x, weights, expert_offsets, expert_counts):
        _check_backward(grad_out, x, weights, expert_offsets, expert_counts)
        return reference.grouped_gemm_backward(
            grad_out, x, weights, expert_offsets, expert_counts=expert_counts
        )
    of_x, of_weights = _prepare_backward(grad_out, x, weights, expert_offsets, expert_counts)
    grad_x, grad_weights = empty(x, x.shape), empty(weights, weights.shape)
    ends = _either(expert_offsets, expert_counts)
    if x.size and grad_out.size:
        of_x(grad_out, weights, grad_x, None, ends)
        of_weights(grad_out, x, grad_weights, None, ends)
    else:
        grad_weights.fill(0)
    return grad_x, grad_weights


def grouped_gated_linear(
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    activation: str = "silu",
    keep: bool = False,
) -> Array | tuple[Array, Array]:
    """A gated layer for each group, in one kernel: `y[r] = f(gate[g] x[r]) * (up[g] x[r])`.

    Args:
        x, expert_offsets, expert_counts: as for :func:`grouped_gemm`.
        weights: dtype of `x`, [groups, 2 n, k]: the rows of gate, then those of up.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU).
        keep: also return `joined`, which a backward pass needs.

    Returns:
        `y`, [rows, n] or [groups, capacity, n]; with `keep` also `joined`, the product
        `weights[g] x[r]` with 2 n columns, rounded to the dtype of `x`.

    Raises:
        ArrayError, ConfigError: as :func:`grouped_gemm`.

    Streams and determinism: see :func:`grouped_gemm`. Paper: Shazeer, arXiv:2002.05202.
    """
    op = "grouped_gated_linear"
    x, weights, expert_offsets, expert_counts = adopt(op, x, weights, expert_offsets, expert_counts)
    check_choice(op, "activation", activation, _GATES)
    check_flag(op, "keep", keep)
    if not runs_kernel(op, x, weights, expert_offsets, expert_counts):
        _check_gated(x, weights, expert_offsets, expert_counts)
        groups: dict[str, Any] = {"expert_offsets": expert_offsets, "expert_counts": expert_counts}
        y = reference.grouped_gated_linear(x, weights, **groups, activation=activation)
        return (y, reference.grouped_gemm(x, weights, **groups)) if keep else y
    launch = _prepare_gated(x, weights, expert_offsets, expert_counts, activation, keep)
    columns = weights.shape[1]
    y = empty(x, (*x.shape[:-1], columns // 2))
    joined = empty(x, (*x.shape[:-1], columns)) if keep else None
    if y.size:
        launch(x, weights, y, joined, _either(expert_offsets, expert_counts))
    return y if joined is None else (y, joined)


def _either(expert_offsets: Array | None, expert_counts: Array | None) -> Array:
    return expert_counts if expert_offsets is None else expert_offsets


# ---- Checks and plans ----


def layout_of(
    op: str, x: Array, groups: int, expert_offsets: Array | None, expert_counts: Array | None
) -> Layout:
    """Checks shape and layout of `x` and of the offsets or counts; returns the groups' layout."""
    if (expert_offsets is None) == (expert_counts is None):
        raise ConfigError(f"{op}: give either expert_offsets or expert_counts")
    if expert_offsets is not None:
        check_array(op, "x", x, dtypes=(x.dtype,), ndim=2)
        check_array(op, "expert_offsets", expert_offsets, dtypes=(int32,), shape=(groups + 1,))
        layout = Layout(groups, x.shape[0], x.shape[0], False)
    else:
        check_array(op, "x", x, dtypes=(x.dtype,), shape=(groups, None, None))
        check_array(op, "expert_counts", expert_counts, dtypes=(int32,), shape=(groups,))
        layout = Layout(groups, groups * x.shape[1], x.shape[1], True)
    if layout.rows > MAX_INT32:
        raise ArrayShapeError(f"{op}: at most {MAX_INT32} rows, got {layout.rows}")
    return layout


def _check_layout(
    op: str, x: Array, weights: Array, expert_offsets: Array | None, expert_counts: Array | None
) -> Layout:
    check_array(op, "weights", weights, dtypes=FLOAT_DTYPES, ndim=3)
    check_array(op, "x", x, dtypes=FLOAT_DTYPES)
    layout = layout_of(op, x, weights.shape[0], expert_offsets, expert_counts)
    check_same_dtype(op, x=x, weights=weights)
    return layout


def _check_inner(op: str, x: Array, weights: Array, axis: int) -> None:
    if x.shape[-1] != weights.shape[axis]:
        raise ArrayShapeError(
            f"{op}: x of shape {x.shape} and weights of shape {weights.shape} do not match: "
            f"{x.shape[-1]} columns and {weights.shape[axis]} (axis {axis})"
        )


def _check(
    op: str,
    x: Array,
    weights: Array,
    expert_offsets: Array | None,
    expert_counts: Array | None,
    out: Array | None,
    transpose_weights: bool,
) -> Layout:
    layout = _check_layout(op, x, weights, expert_offsets, expert_counts)
    _check_inner(op, x, weights, 1 if transpose_weights else 2)
    if out is not None:
        columns = weights.shape[2 if transpose_weights else 1]
        check_array(op, "out", out, shape=(*x.shape[:-1], columns))
        check_same_dtype(op, x=x, out=out)
    return layout


def _check_backward(
    grad_out: Array,
    x: Array,
    weights: Array,
    expert_offsets: Array | None,
    expert_counts: Array | None,
) -> Layout:
    op = "grouped_gemm_backward"
    layout = _check_layout(op, x, weights, expert_offsets, expert_counts)
    _check_inner(op, x, weights, 2)
    check_array(op, "grad_out", grad_out, shape=(*x.shape[:-1], weights.shape[1]))
    check_same_dtype(op, x=x, grad_out=grad_out)
    return layout


def _check_gated(
    x: Array, weights: Array, expert_offsets: Array | None, expert_counts: Array | None
) -> Layout:
    op = "grouped_gated_linear"
    layout = _check_layout(op, x, weights, expert_offsets, expert_counts)
    _check_inner(op, x, weights, 2)
    if weights.shape[1] % 2:
        raise ArrayShapeError(
            f"{op}: weights hold gate and up rows, so axis 1 must be even; "
            f"got shape {weights.shape}"
        )
    return layout


def _check_kernel(op: str, x: Array, groups: int) -> None:
    check_array(op, "x", x, dtypes=_DTYPES)
    if groups > MAX_GROUPS:
        raise ConfigError(f"{op}: at most {MAX_GROUPS} groups on the GPU, got {groups}")


@launch_plan
def _prepare(
    x: Array,
    weights: Array,
    expert_offsets: Array | None,
    expert_counts: Array | None,
    out: Array | None,
    transpose_weights: bool,
) -> GroupedSm90 | GroupedSm80:
    op = "grouped_gemm"
    layout = _check(op, x, weights, expert_offsets, expert_counts, out, transpose_weights)
    k, n = weights.shape[1:] if transpose_weights else weights.shape[:0:-1]
    _check_kernel(op, x, layout.groups)
    major = "MN" if transpose_weights else "K"
    product = Product(layout.rows, n, k, x.dtype.name, major_b=major)
    return prepare_grouped(GroupedProblem(product, layout.groups), layout, x, weights, out)


@launch_plan
def _prepare_backward(
    grad_out: Array,
    x: Array,
    weights: Array,
    expert_offsets: Array | None,
    expert_counts: Array | None,
) -> tuple[GroupedSm90 | GroupedSm80, GroupedSm90 | GroupedSm80]:
    op = "grouped_gemm_backward"
    layout = _check_backward(grad_out, x, weights, expert_offsets, expert_counts)
    groups, n, k = weights.shape
    _check_kernel(op, x, groups)
    of_x = Product(layout.rows, k, n, x.dtype.name, major_b="MN")
    of_weights = replace(of_x, m=n, n=k, k=layout.rows, major_a="MN")
    return (
        prepare_grouped(GroupedProblem(of_x, groups), layout, grad_out, weights),
        prepare_grouped(GroupedProblem(of_weights, groups, ragged="k"), layout, grad_out, x),
    )


@launch_plan
def _prepare_gated(
    x: Array,
    weights: Array,
    expert_offsets: Array | None,
    expert_counts: Array | None,
    activation: str,
    keep: bool,
) -> GroupedSm90 | GroupedSm80:
    layout = _check_gated(x, weights, expert_offsets, expert_counts)
    groups, columns, k = weights.shape
    _check_kernel("grouped_gated_linear", x, groups)
    product = Product(
        layout.rows, columns // 2, k, x.dtype.name, activation=activation, gated=True, keeps=keep
    )
    return prepare_grouped(GroupedProblem(product, groups), layout, x, weights)


def _specs(kind: str, device: Device) -> list[KernelSpec]:
    """The kernel variants of an op. kind: "forward", "gated" or "backward"."""

    def belongs(problem: GroupedProblem) -> bool:
        product = problem.product
        if product.gated:
            return kind == "gated"
        return kind == ("forward" if product.major_b == "K" else "backward")

    # bfloat16: every tiling. float16 compiles to similar code: only the planned tiling.
    problems = [each for each in grouped_plan.representative("bfloat16") if belongs(each)]
    planned = [each for each in grouped_plan.representative("float16") if belongs(each)]
    specs = [
        plan_grouped_sm80(problem, aligned, device.num_sms).spec()
        for problem in problems
        for aligned in (True, False)
    ]
    if device.arch == HOPPER:
        configs = [
            grouped_plan.configure(problem, tiling, device.num_sms)
            for problem in problems
            for tiling in grouped_plan.candidates(problem)
        ]
        configs += [grouped_plan.plan_grouped_sm90(problem, device.num_sms) for problem in planned]
        specs += [config.spec() for config in configs]
    return list(dict.fromkeys(specs))


for _function, _reference, _kind in (
    (grouped_gemm, reference.grouped_gemm, "forward"),
    (grouped_gemm_backward, reference.grouped_gemm_backward, "backward"),
    (grouped_gated_linear, reference.grouped_gated_linear, "gated"),
):
    register(
        name=_function.__name__,
        family="gemm",
        function=_function,
        reference=_reference,
        specs=partial(_specs, _kind),
    )
