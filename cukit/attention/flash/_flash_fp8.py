"""Attention of FP8 (e4m3) inputs: the Hopper forward, or inputs converted to 16 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

from cukit.attention.flash._arguments import (
    ScoreArrays,
    ScoreOptions,
    check_forward,
    check_sequence_ends,
    fits_tensor_maps,
    forward_plan_key,
    lse_shape,
    problem_of,
)
from cukit.attention.flash._flash_launch_sm90 import (
    MappedCall,
    MappedForward,
    MappedLaunch,
    mapped_forward,
)
from cukit.attention.flash._problem import FLOAT8
from cukit.core.arrays import (
    ACCESS_BYTES,
    Array,
    address_of,
    bfloat16,
    empty,
    float16,
    float32,
    namespace,
    runs_kernel,
)
from cukit.core.kernel import NULL, launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray, is_float8
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError

OUT_DTYPES = (bfloat16, float16)
"""Output dtypes for FP8 inputs."""

_OP = "flash_attention"

Descales = tuple[Any, Any, Any]
_DESCALES = ("q_descale", "k_descale", "v_descale")


def refuse_float8(op: str, *arrays: Any) -> None:
    """Raises ArrayDtypeError for FP8 arrays."""
    if is_float8(*arrays):
        raise ArrayDtypeError(f"{op}: float8 inputs have only a forward; pass their dense() values")


def attend_float8(
    q: QuantizedArray,
    k: QuantizedArray,
    v: QuantizedArray,
    descales: Descales,
    options: ScoreOptions,
    arrays: ScoreArrays,
    out: Array | None,
    precise: bool,
    return_lse: bool,
) -> tuple[Array, Array | None] | None:
    """(out, lse) from Hopper's forward; None where it does not cover the call.

    The kernel needs q, k, v (their storage) and out with a contiguous last axis, and with addresses
    and other strides that are multiples of 16 bytes.

    descales: of q, k and v, each None, a number, or float32 [], [heads_kv] or [batch, heads_kv].
    precise: keep the probabilities in float16.
    """
    _check_inputs(q, k, v, out, arrays.varlen)
    factors = _factors(q, k, descales, arrays)
    stored = (q.storage, k.storage, v.storage)
    if not runs_kernel(_OP, *stored, *factors, out, *arrays):
        return None
    prepared = _prepare(*stored, out, options, precise, *factors, *arrays)
    if prepared is None:
        return None
    launch, out_shape, row_shape = prepared
    scales = dict(zip(_DESCALES, factors, strict=True))
    check_overlap(_OP, out, q=q.storage, k=k.storage, v=v.storage, **scales, **arrays._asdict())
    if arrays.varlen:
        check_sequence_ends(_OP, q.storage, k.storage, options, arrays)
    if out is None:
        out = empty(q.storage, out_shape, bfloat16)
    lse = empty(q.storage, row_shape, float32) if return_lse else None
    launch(*stored, out, NULL if lse is None else lse, *arrays, descales=factors)
    return out, lse


def decode_inputs(
    q: QuantizedArray,
    k: QuantizedArray,
    v: QuantizedArray,
    descales: Descales,
    options: ScoreOptions,
    arrays: ScoreArrays,
    out: Array | None,
) -> tuple[Array, Array, Array]:
    """q, k and v times their descales, in the dtype of `out` (bfloat16 without `out`)."""
    dtype = bfloat16 if out is None else out.dtype
    check_forward(_OP, q.storage, k.storage, v.storage, out, options, arrays, decoded=dtype)
    ends = (arrays.cu_seqlens_q, arrays.cu_seqlens_kv, arrays.cu_seqlens_kv)
    factors = _factors(q, k, descales, arrays)
    decoded = []
    for array, factor, end in zip((q, k, v), factors, ends, strict=True):
        values = array.dense()
        if factor is not None and factor.ndim:
            factor = factor[..., None].repeat(array.shape[-2] // k.shape[-2], axis=-2)
            if factor.ndim == 3:
                factor = factor[:, None] if end is None else factor[_sequences(end, values)]
            values = values * factor
        elif factor is not None:
            values = values * factor
        decoded.append(values.astype(dtype))
    return decoded[0], decoded[1], decoded[2]


def _sequences(ends: Array, rows: Array) -> Array:
    """The index of the sequence that each row belongs to."""
    xp = namespace(rows)
    return xp.searchsorted(xp.asarray(ends)[1:], xp.arange(len(rows)), side="right")


def _check_inputs(
    q: QuantizedArray, k: QuantizedArray, v: QuantizedArray, out: Array | None, varlen: bool
) -> None:
    ndim = 3 if varlen else 4
    for name, array in (("q", q), ("k", k), ("v", v)):
        dtype = getattr(array, "dtype", type(array))
        got = getattr(dtype, "name", dtype)
        if not is_float8(array) or got != FLOAT8:
            raise ArrayDtypeError(
                f"{_OP}: {name} must be {FLOAT8} where another input is float8, got {got}"
            )
        if array.ndim != ndim:
            raise ArrayShapeError(f"{_OP}: {name} must have {ndim} axes, got shape {array.shape}")
        if array.scales is not None:
            raise ArrayError(f"{_OP}: {name} has scales; pass them as {name}_descale")
    if out is not None and out.dtype not in OUT_DTYPES:
        raise ArrayDtypeError(
            f"{_OP}: out of float8 inputs must be bfloat16 or float16, got {out.dtype.name}"
        )


def _factors(
    q: QuantizedArray, k: QuantizedArray, given: Descales, arrays: ScoreArrays
) -> Descales:
    xp = namespace(q.storage)
    ends = arrays.cu_seqlens_kv
    batch = q.shape[0] if ends is None else ends.size - 1
    return tuple(  # type: ignore[return-value]
        None if factors is None else _factor(name, factors, batch, k.shape[-2], xp)
        for name, factors in zip(_DESCALES, given, strict=True)
    )


def _factor(name: str, given: Any, batch: int, heads: int, xp: Any) -> Array:
    try:
        factors = xp.asarray(xp.float32(given) if isinstance(given, (int, float)) else given)
    except (TypeError, ValueError):
        raise ArrayError(
            f"{_OP}: {name} must be a number or an array, got {type(given).__name__}"
        ) from None
    if factors.dtype != float32:
        raise ArrayDtypeError(f"{_OP}: {name} must be float32, got {factors.dtype.name}")
    if factors.shape not in ((), (1,), (heads,), (batch, heads)):
        raise ArrayShapeError(
            f"{_OP}: {name} must be a scalar, [heads_kv] or [batch, heads_kv], "
            f"got shape {factors.shape} for {heads} heads_kv"
        )
    return factors.reshape(()) if factors.size == 1 else factors


def _planned(
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    precise: bool,
    q_descale: Array | None,
    k_descale: Array | None,
    v_descale: Array | None,
    *given: Array | None,
) -> MappedCall | None:
    """Checks a call and plans it. Calls whose lengths round to the same values share the plan."""
    arrays = ScoreArrays(*given)
    dtype = bfloat16 if out is None else out.dtype
    check_forward(_OP, q, k, v, out, options, arrays, decoded=dtype)
    if not all(_aligned(array) for array in (q, k, v, out)) or not fits_tensor_maps(q, k, v):
        return None
    problem = problem_of(
        *(q, k, v, options, arrays),
        rounded=True,
        dtype=FLOAT8,
        out_dtype=dtype.name,
        precise=precise,
    )
    mapped: MappedForward | None = mapped_forward(problem)
    if mapped is None:
        return None
    descales = q_descale, k_descale, v_descale
    return MappedCall(mapped, q, k, options, arrays, descales=descales)


@partial(launch_plan, plan=_planned, shorten=forward_plan_key)
def _prepare(
    call: MappedCall | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    *others: Any,
) -> tuple[MappedLaunch, tuple[int, ...], tuple[int, ...]] | None:
    """The launch, and the shapes of out and lse; None where the Hopper forward does not apply."""
    if call is None:
        return None
    arrays = ScoreArrays(*others[-len(ScoreArrays._fields) :])
    launch = call.launch(q, k, v, out, options, arrays)
    return launch, (*q.shape[:-1], v.shape[-1]), lse_shape(q)


def _aligned(array: Array | None) -> bool:
    """Whether rows are contiguous and 16-byte aligned."""
    if array is None:
        return True
    axes = zip(array.strides[:-1], array.shape[:-1], strict=True)
    return (
        (array.shape[-1] == 1 or array.strides[-1] == array.itemsize)
        and address_of(array) % ACCESS_BYTES == 0
        and all(stride % ACCESS_BYTES == 0 for stride, n in axes if n > 1)
    )
