"""Attention of float8 (e4m3) inputs: Hopper's kernel, and decoding for everything it leaves out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.attention.flash_fp8_plan import Float8Config, Float8Problem, covers, plan_float8
from cukit.attention.flash_maps import TensorMaps
from cukit.attention.flash_options import ScoreOptions
from cukit.core.arrays import (
    Array,
    address_of,
    bfloat16,
    empty,
    float16,
    float32,
    namespace,
    runs_kernel,
)
from cukit.core.device import current_device
from cukit.core.kernel import NULL, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import float8_e4m3
from cukit.core.quantized_array import QuantizedArray, is_float8
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError

OUT_DTYPES = (bfloat16, float16)
"""What attention of float8 inputs can return."""

_OP = "flash_attention"
_ALIGNMENT = 16

Descales = tuple[Any, Any, Any]


def refuse_float8(op: str, *arrays: Any) -> None:
    """Raises ArrayDtypeError for float8 arrays."""
    if is_float8(*arrays):
        raise ArrayDtypeError(f"{op}: float8 inputs have a forward only; pass their dense() values")


def attend_float8(
    q: QuantizedArray,
    k: QuantizedArray,
    v: QuantizedArray,
    descales: Descales,
    options: ScoreOptions,
    others: tuple[Array | None, ...],
    out: Array | None,
    precise: bool,
) -> tuple[Array, Array] | None:
    """(out, lse) from the float8 kernel; None where it does not serve these arrays or options.

    q, k, v: storage with a contiguous last axis, other strides any multiples of 16 bytes.
    descales: of q, k and v, each None, a number, or float32 [], [heads_kv] or [batch, heads_kv].
    others: the arrays among the options.
    precise: probabilities of sixteen bits.
    """
    _check_inputs(q, k, v, out)
    factors = _factors(q, k, descales)
    options.check(_OP)
    causal, window = options.visible
    plain = options.softcap is None and window is None and all(x is None for x in others)
    arrays = (q.storage, k.storage, v.storage)
    if not plain or not runs_kernel(_OP, *arrays, *factors, out):
        return None
    launch = _prepare(*arrays, out, *factors, causal, precise, options.scale)
    return None if launch is None else launch(*arrays, out, factors)


def decode_inputs(
    q: QuantizedArray,
    k: QuantizedArray,
    v: QuantizedArray,
    descales: Descales,
    out: Array | None,
) -> tuple[Array, Array, Array]:
    """q, k and v times their descales, in the dtype of `out` (bfloat16 where there is none)."""
    _check_inputs(q, k, v, out)
    dtype = bfloat16 if out is None else out.dtype
    decoded = []
    for array, factors in zip((q, k, v), _factors(q, k, descales), strict=True):
        values = array.dense()
        if factors is not None and factors.ndim:
            factors = factors[..., None].repeat(array.shape[-2] // k.shape[-2], axis=-2)
            values = values * (factors[:, None] if factors.ndim == 3 else factors)
        elif factors is not None:
            values = values * factors
        decoded.append(values.astype(dtype))
    return decoded[0], decoded[1], decoded[2]


def _check_inputs(
    q: QuantizedArray, k: QuantizedArray, v: QuantizedArray, out: Array | None
) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, QuantizedArray) or array.dtype != float8_e4m3:
            got = getattr(array.dtype, "name", array.dtype)
            raise ArrayDtypeError(
                f"{_OP}: {name} must be {float8_e4m3.name} where another input is float8, got {got}"
            )
        if array.scales is not None:
            raise ArrayError(f"{_OP}: {name} has scales; pass them as {name}_descale")
    if out is not None and out.dtype not in OUT_DTYPES:
        raise ArrayDtypeError(
            f"{_OP}: out of float8 inputs must be bfloat16 or float16, got {out.dtype.name}"
        )


def _factors(q: QuantizedArray, k: QuantizedArray, given: Descales) -> Descales:
    xp = namespace(q.storage)
    return tuple(  # type: ignore[return-value]
        None if factors is None else _factor(name, factors, q, k, xp)
        for name, factors in zip(("q_descale", "k_descale", "v_descale"), given, strict=True)
    )


def _factor(name: str, given: Any, q: QuantizedArray, k: QuantizedArray, xp: Any) -> Array:
    factors = xp.float32(given) if isinstance(given, (int, float)) else given
    factors = xp.asarray(factors)
    if factors.dtype != float32:
        raise ArrayDtypeError(f"{_OP}: {name} must be float32, got {factors.dtype.name}")
    heads, batch = k.shape[-2], q.shape[0]
    allowed = [(), (1,), (heads,)] + ([(batch, heads)] if len(q.shape) == 4 else [])
    if factors.shape not in allowed:
        raise ArrayShapeError(
            f"{_OP}: {name} must be a scalar, [heads_kv] or [batch, heads_kv], "
            f"got shape {factors.shape} for {heads} heads_kv"
        )
    return factors.reshape(()) if factors.size == 1 else factors


@launch_plan
def _prepare(
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    q_descale: Array | None,
    k_descale: Array | None,
    v_descale: Array | None,
    causal: bool,
    precise: bool,
    scale: float | None,
) -> _Float8Launch | None:
    if q.ndim != 4 or k.ndim != 4 or not all(_readable(array) for array in (q, k, v)):
        return None
    batch, seq_len_q, num_heads_q, head_dim = q.shape
    seq_len_kv, num_heads_kv = k.shape[1:3]
    fits = v.shape == k.shape == (batch, seq_len_kv, num_heads_kv, head_dim)
    if not fits or num_heads_kv == 0 or num_heads_q % num_heads_kv:
        return None
    if out is not None and not _writable(out, q.shape):
        return None
    problem = Float8Problem(
        batch,
        seq_len_q,
        seq_len_kv,
        num_heads_q,
        num_heads_kv,
        head_dim,
        "bfloat16" if out is None else out.dtype.name,
        causal,
        precise,
    )
    device = current_device()
    if not covers(problem, device):
        return None
    factor = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    config = plan_float8(problem, device)
    scalars = (
        *_out_strides(out, q.shape),
        *(np.int32(n) for d in (q_descale, k_descale, v_descale) for n in _steps(d)),
        np.int32(batch),
        np.int32(num_heads_q),
        np.int32(problem.group),
        np.int32(seq_len_q),
        np.int32(seq_len_kv),
        np.int32(head_dim),
        np.float32(factor / math.log(2.0)),
    )
    return _Float8Launch(config, scalars)


def _readable(array: Array) -> bool:
    """Whether the copy engine can walk the array."""
    axes = zip(array.strides[:3], array.shape[:3], strict=True)
    return (
        (array.shape[-1] == 1 or array.strides[-1] == 1)
        and address_of(array) % _ALIGNMENT == 0
        and all(stride > 0 and stride % _ALIGNMENT == 0 for stride, n in axes if n > 1)
    )


def _writable(out: Array, shape: tuple[int, ...]) -> bool:
    """Whether results can be written 16 bytes at a time."""
    axes = zip(out.strides[:3], out.shape[:3], strict=True)
    return (
        out.shape == shape
        and out.strides[-1] == out.itemsize
        and address_of(out) % _ALIGNMENT == 0
        and all(stride % _ALIGNMENT == 0 for stride, n in axes if n > 1)
    )


def _out_strides(out: Array | None, shape: tuple[int, ...]) -> tuple[np.int64, ...]:
    if out is None:
        _, rows, heads, width = shape
        return np.int64(rows * heads * width), np.int64(heads * width), np.int64(width)
    return tuple(np.int64(stride // out.itemsize) for stride in out.strides[:3])


def _steps(factors: Array | None) -> tuple[int, int]:
    """Strides over batches and key heads, in elements."""
    if factors is None or factors.ndim == 0:
        return 0, 0
    strides = [stride // factors.itemsize for stride in factors.strides]
    return (0, strides[0]) if factors.ndim == 1 else (strides[0], strides[1])


class _Float8Launch:
    """The launches of a call, for arrays of one description."""

    __slots__ = ("_config", "_k", "_main", "_q", "_v", "_values")

    def __init__(self, config: Float8Config, scalars: tuple[Any, ...]) -> None:
        problem, tiling = config.problem, config.tiling
        part = min(problem.width, 128)
        self._config = config
        key_box = (1, tiling.tile_n, 1, part)
        self._q = TensorMaps((1, tiling.tile_m, 1, part))
        self._k = TensorMaps(key_box)
        self._v = TensorMaps(key_box)
        self._values: Launch | None = None
        if not tiling.prepares:
            tiles, heads, _ = config.values_grid
            kernel = load_kernel(config.values_spec())
            self._values = Launch(kernel, config.values_grid, (np.int32(tiles), np.int32(heads)))
        self._main = Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)

    def __call__(
        self, q: Array, k: Array, v: Array, out: Array | None, factors: Descales
    ) -> tuple[Array, Array]:
        """Launches on the current stream."""
        problem = self._config.problem
        if out is None:
            out = empty(q, q.shape, bfloat16)
        lse = empty(q, (problem.batch, problem.num_heads_q, problem.seq_len_q), float32)
        values = self._v(v)
        prepared = NULL
        if self._values is not None:
            prepared = empty(q, (self._config.values_bytes,), np.uint8)
            self._values(values, prepared)
        self._main(self._q(q), self._k(k), values, prepared, out, lse, *factors)
        return out, lse
