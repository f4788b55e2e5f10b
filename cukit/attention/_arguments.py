"""The arguments of attention: options, array checks, and the scalars that kernels take."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cukit.attention._flash_tilings import MAX_HEAD_DIM
from cukit.attention._problem import AttentionProblem, Window, rounded_length
from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    Array,
    address_of,
    bfloat16,
    check_array,
    check_same_dtype,
    describe,
    float16,
    is_gpu_array,
    namespace,
)
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError

ATTENTION_DTYPES = (float16, bfloat16)
"""Element types of the kernels. References take float32 and float64 as well."""

PARAMETERS = "attention/parameters.cuh"
"""Where the structs are defined that attention's kernels take by value."""
NO_TEACHER = {"teacher_group": 1, "teacher_scale_log2": 0.0}
"""What kernels that serve attention and the divergence of two models take of the second model."""

_EVERYTHING = 1 << 29  # wider than any sequence, far from the end of int32
_LOG2_E = 1.0 / math.log(2.0)
_MOST_SETTINGS = 256  # kept: most do not depend on lengths
_MATRIX_AXES = ("batch", "head", "row", "column")
_NO_STRIDES = (0,) * len(_MATRIX_AXES)
_HEAD_DIM_STEP = 8  # elements in one 16-byte access
_MAX_ROW_STRIDE = (1 << 26) - 1  # offsets of up to 32 rows are 32-bit (TileCopy)
_MAX_MAP_STRIDE = 1 << 40  # bytes
_MOST_PROBLEMS = 4096
_DENSE_AXES = 4


class ScoreOptions(NamedTuple):
    """Options that are plain values: hashable, a part of what a launch is remembered by."""

    causal: bool
    window_size: Window | None
    softcap: float | None
    scale: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    @property
    def left(self) -> int | None:
        """Keys to the left that a query sees; None is all of them."""
        return self.window_size[0] if self.window_size else None

    @property
    def right(self) -> int | None:
        """Keys to the right that a query sees; None is all of them."""
        return 0 if self.causal else self.window_size[1] if self.window_size else None

    @property
    def visible(self) -> tuple[bool, Window | None]:
        """Causal or not, and the window that is left to test: a right side of 0 is causal."""
        causal = self.right == 0
        bounded = self.left is not None or (self.right is not None and not causal)
        return causal, (self.left, self.right) if bounded else None

    def check(self, op: str) -> None:
        """Raises ConfigError naming the option."""
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{op}: {name} must be positive and finite, got {value}")
        window = self.window_size
        if window is not None and (
            len(window) != 2 or any(side is not None and side < 0 for side in window)
        ):
            raise ConfigError(
                f"{op}: window_size must be (left, right), each None or at least 0, got {window}"
            )

    def factor(self, head_dim: int) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else float(self.scale)


class ScoreArrays(NamedTuple):
    """Options that are arrays, in the order in which every kernel takes them."""

    alibi_slopes: Array | None
    sinks: Array | None
    bias: Array | None
    mask: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None

    @property
    def varlen(self) -> bool:
        """Whether the sequences lie one behind the other."""
        return self.cu_seqlens_q is not None or self.cu_seqlens_kv is not None


_LONGEST = ScoreOptions._fields.index("max_seqlen_q")  # and of the keys, the last options
_LAST_OF_BIAS = len(ScoreArrays._fields) - ScoreArrays._fields.index("bias")
_LAST_OF_MASK = len(ScoreArrays._fields) - ScoreArrays._fields.index("mask")


def score_options(
    op: str,
    causal: bool,
    window_size: Window | None,
    softcap: float | None,
    scale: float | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> ScoreOptions:
    """The values of a call, in types that compare and hash alike."""
    check_flag(op, "causal", causal)
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None:
            check_number(op, name, value)
    try:
        return ScoreOptions(
            bool(causal),
            None if window_size is None else tuple(_integer(side) for side in window_size),  # type: ignore[arg-type]
            None if softcap is None else float(softcap),
            None if scale is None else float(scale),
            _integer(max_seqlen_q),
            _integer(max_seqlen_kv),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{op}: window_size must be a pair of integers or None, softcap and scale numbers, "
            f"max_seqlen_q and max_seqlen_kv integers: {error}"
        ) from None


def _integer(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def score_settings(
    q: Array, options: ScoreOptions, arrays: ScoreArrays, shape: tuple[int, int, int, int]
) -> Any:
    """The `ScoreSettings` of a call, for the parameters of its kernels.

    shape: batch, heads_q, seq_q, seq_kv, to which bias and mask are broadcast.
    """
    slopes = arrays.alibi_slopes
    settings = _settings(
        options._replace(max_seqlen_q=None, max_seqlen_kv=None) if arrays.varlen else options,
        q.shape[-1],
        slopes.shape[1] if slopes is not None and slopes.ndim == 2 else 0,
        _matrix_strides(arrays.bias, shape),
        _matrix_strides(arrays.mask, shape),
    )
    if not arrays.varlen:
        return settings
    return parameter_structs(PARAMETERS)["ScoreSettings"].changed(settings, total_q=q.shape[0])


def _matrix_strides(matrix: Array | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a matrix broadcast to `shape`."""
    if matrix is None:
        return _NO_STRIDES
    steps = namespace(matrix).broadcast_to(matrix, shape).strides
    return tuple(step // matrix.itemsize for step in steps)


@lru_cache(maxsize=_MOST_SETTINGS)
def _settings(
    options: ScoreOptions,
    head_dim: int,
    alibi_batch: int,
    bias: tuple[int, ...],
    mask: tuple[int, ...],
) -> Any:
    inner = outer = 0.0
    if options.softcap is not None:
        # tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x))
        inner = 2.0 * _LOG2_E * options.factor(head_dim) / options.softcap
        outer = _LOG2_E * options.softcap
    return parameter_structs(PARAMETERS)["ScoreSettings"].pack(
        **{f"bias_{axis}": step for axis, step in zip(_MATRIX_AXES, bias, strict=True)},
        **{f"mask_{axis}": step for axis, step in zip(_MATRIX_AXES, mask, strict=True)},
        window_left=_bound(options.left),
        window_right=_bound(options.right),
        alibi_batch=alibi_batch,
        total_q=0,
        cap_inner=inner,
        cap_outer=outer,
    )


def _bound(side: int | None) -> int:
    return _EVERYTHING if side is None else min(side, _EVERYTHING)


def scales_of(q: Array, options: ScoreOptions) -> tuple[float, float]:
    """The factor of the scores, and the same for powers of two."""
    factor = options.factor(q.shape[-1])
    return factor, factor * _LOG2_E


def refuse_dropout(op: str, dropout: float) -> None:
    """Dropout inside attention is not built: its mask would have to be drawn again, bit by bit, in
    the backward."""
    if not (isinstance(dropout, (int, float)) and dropout == 0):
        raise ConfigError(
            f"{op}: dropout is out of scope, got dropout={dropout}; "
            "drop parts of the output or of the residual instead"
        )


def _check_heads(
    op: str, q: Array, k: Array, v: Array, varlen: bool, dtypes: tuple[Any, ...] = FLOAT_DTYPES
) -> None:
    """Shapes and dtypes of the three inputs."""
    check_array(op, "q", q, dtypes=dtypes, ndim=3 if varlen else 4, contiguous=False)
    batch, (num_heads_q, head_dim) = q.shape[:-3], q.shape[-2:]
    check_array(op, "k", k, dtypes=dtypes, shape=(*batch, None, None, head_dim), contiguous=False)
    check_array(op, "v", v, dtypes=dtypes, shape=(*k.shape[:-1], None), contiguous=False)
    check_same_dtype(op, q=q, k=k, v=v)
    num_heads_kv = k.shape[-2]
    if num_heads_kv == 0 or num_heads_q == 0 or num_heads_q % num_heads_kv:
        raise ArrayShapeError(
            f"{op}: the heads of k (axis {k.ndim - 2}) must divide those of q, "
            f"got {num_heads_kv} and {num_heads_q}"
        )
    for name, array in (("q", q), ("v", v)):
        if array.shape[-1] == 0:
            raise ArrayShapeError(f"{op}: head_dim (the last axis of {name}) must not be 0")


def _check_options(
    op: str, q: Array, k: Array, options: ScoreOptions, arrays: ScoreArrays, dtype: Any = None
) -> None:
    """`dtype`: of a bias, beside float32; q's where omitted."""
    batch, heads_q, seq_len_q, seq_len_kv = score_shape(q, k, options, arrays)
    exact = _statistic_dtypes(q)
    slopes, sinks = arrays.alibi_slopes, arrays.sinks
    if slopes is not None:
        shape = (heads_q,) if slopes.ndim == 1 else (batch, heads_q)
        check_array(op, "alibi_slopes", slopes, dtypes=exact, shape=shape)
    if sinks is not None:
        check_array(op, "sinks", sinks, dtypes=exact, shape=(heads_q,))
    full = (batch, heads_q, seq_len_q, seq_len_kv)
    if arrays.bias is not None:
        _check_matrix(op, "bias", arrays.bias, (dtype or q.dtype, *exact), full)
    if arrays.mask is not None:
        _check_matrix(op, "mask", arrays.mask, (np.dtype(bool),), full)


def _check_matrix(
    op: str, name: str, array: Array, dtypes: tuple[Any, ...], full: tuple[int, ...]
) -> None:
    """Something that is broadcast to the score matrix."""
    if array.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise ArrayDtypeError(f"{op}: {name} must be {allowed}, got {array.dtype.name}")
    tail = full[len(full) - array.ndim :] if array.ndim <= len(full) else ()
    if array.ndim > len(full) or any(
        got not in (1, want) for got, want in zip(array.shape, tail, strict=True)
    ):
        raise ArrayShapeError(
            f"{op}: {name} must be broadcastable to [batch, heads_q, seq_len_q, seq_len_kv] = "
            f"{full}, got shape {array.shape}"
        )
    if any(stride % array.itemsize for stride in array.strides):
        raise ArrayLayoutError(
            f"{op}: the strides of {name} must be whole elements, got {array.strides} bytes"
        )


def check_sequences(op: str, options: ScoreOptions, arrays: ScoreArrays) -> None:
    """Both cu_seqlens and both longest lengths, or none of them."""
    given: dict[str, Any] = {
        "cu_seqlens_q": arrays.cu_seqlens_q,
        "cu_seqlens_kv": arrays.cu_seqlens_kv,
        "max_seqlen_q": options.max_seqlen_q,
        "max_seqlen_kv": options.max_seqlen_kv,
    }
    present = [name for name, value in given.items() if value is not None]
    if not present:
        return
    if len(present) < len(given):
        absent = [name for name in given if name not in present]
        raise ConfigError(
            f"{op}: sequences of different lengths need cu_seqlens_q, cu_seqlens_kv, "
            f"max_seqlen_q and max_seqlen_kv, got no {', '.join(absent)}"
        )
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        check_array(op, name, given[name], dtypes=(np.dtype(np.int32),), ndim=1)
    counts = [len(given[name]) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
    if counts[0] != counts[1] or counts[0] == 0:
        raise ArrayShapeError(
            f"{op}: cu_seqlens_q and cu_seqlens_kv must both have num_sequences + 1 entries, "
            f"got {counts[0]} and {counts[1]}"
        )
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if given[name] < 0:
            raise ConfigError(f"{op}: {name} must be at least 0, got {given[name]}")


def check_sequence_ends(
    op: str, q: Array, k: Array, options: ScoreOptions, arrays: ScoreArrays
) -> None:
    """Contents of cu_seqlens on the CPU. On the GPU nobody reads them before the kernel does."""
    for name, ends, total, longest in (
        ("cu_seqlens_q", arrays.cu_seqlens_q, q.shape[0], options.max_seqlen_q),
        ("cu_seqlens_kv", arrays.cu_seqlens_kv, k.shape[0], options.max_seqlen_kv),
    ):
        if ends is None or longest is None or is_gpu_array(ends) or not len(ends):
            continue
        lengths = np.diff(ends)
        if ends[0] != 0 or ends[-1] != total or (lengths < 0).any():
            raise ConfigError(
                f"{op}: {name} must rise from 0 to {total}, the rows of its array, got {ends}"
            )
        if lengths.max(initial=0) > longest:
            raise ConfigError(
                f"{op}: the longest sequence of {name} has {lengths.max()} rows, "
                f"more than max_seqlen_{name.removeprefix('cu_seqlens_')}={longest}"
            )


def check_forward(
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
    decoded: Any = None,
) -> None:
    """Arguments of the forward, wherever they live. `decoded`: q, k and v are the bytes of narrow
    arrays, and this is the dtype that stands for their values."""
    op = "flash_attention"
    options.check(op)
    check_sequences(op, options, arrays)
    stored = FLOAT_DTYPES if decoded is None else (np.dtype(np.uint8),)
    _check_heads(op, q, k, v, arrays.varlen, stored)
    _check_options(op, q, k, options, arrays, decoded)
    if out is not None:
        check_array(op, "out", out, shape=(*q.shape[:-1], v.shape[-1]), contiguous=False)
        if decoded is None:
            check_same_dtype(op, q=q, out=out)


def check_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: ScoreOptions,
    arrays: ScoreArrays,
) -> None:
    """Arguments of the backward, wherever they live."""
    op = "flash_attention_backward"
    options.check(op)
    check_sequences(op, options, arrays)
    _check_heads(op, q, k, v, arrays.varlen)
    _check_options(op, q, k, options, arrays)
    shape = (*q.shape[:-1], v.shape[-1])
    check_array(op, "grad_out", grad_out, shape=shape, contiguous=False)
    check_array(op, "out", out, shape=shape, contiguous=False)
    check_same_dtype(op, q=q, grad_out=grad_out, out=out)
    check_array(op, "lse", lse, dtypes=_statistic_dtypes(q)[-1:], shape=lse_shape(q))


def _statistic_dtypes(q: Array) -> tuple[np.dtype[Any], ...]:
    """Of what there is one number a head or a row of; the last is that of lse."""
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    return (single, double) if q.dtype == np.float64 else (single,)


def lse_shape(q: Array) -> tuple[int, ...]:
    """[batch, heads_q, seq_q], or [heads_q, total_q] of sequences one behind the other."""
    *batch, rows, heads, _ = q.shape
    return (*batch, heads, rows)


def score_shape(
    q: Array, k: Array, options: ScoreOptions, arrays: ScoreArrays
) -> tuple[int, int, int, int]:
    """[batch, heads_q, seq_len_q, seq_len_kv]; of sequences, their number and the longest."""
    if arrays.cu_seqlens_q is None:
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    batch = len(arrays.cu_seqlens_q) - 1
    return batch, q.shape[1], options.max_seqlen_q or 0, options.max_seqlen_kv or 0


def check_kernel_layout(op: str, **arrays: Array | None) -> None:
    """What the kernels ask for beyond the reference: dtype, head_dim, 16-byte access."""
    for name, array in arrays.items():
        if array is None:
            continue
        if array.dtype not in ATTENTION_DTYPES:
            check_array(op, name, array, dtypes=ATTENTION_DTYPES, contiguous=False)
        *extents, head_dim = array.shape
        if head_dim % _HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
            raise ArrayShapeError(
                f"{op}: head_dim (the last axis of {name}) must be a multiple of {_HEAD_DIM_STEP} "
                f"up to {MAX_HEAD_DIM} on the GPU, got {head_dim}"
            )
        strides = array.strides
        odd = address_of(array)
        for stride, extent in zip(strides, extents, strict=False):
            if extent > 1:
                odd |= stride
        if odd % ACCESS_BYTES:
            raise ArrayLayoutError(
                f"{op}: the start and the strides of {name} must be multiples of {ACCESS_BYTES} "
                f"bytes on the GPU, got strides {strides}; "
                f"pass cupy.ascontiguousarray({name})"
            )
        row_stride = strides[-3] // array.itemsize
        if abs(row_stride) > _MAX_ROW_STRIDE and extents[-2] > 1:
            raise ArrayLayoutError(
                f"{op}: neighbouring positions (axis {array.ndim - 3}) of {name} must lie within "
                f"{_MAX_ROW_STRIDE} elements on the GPU, got {row_stride}"
            )


def fits_tensor_maps(*arrays: Array) -> bool:
    """Whether the copy engine can walk the arrays: something in each, every axis forwards."""
    for array in arrays:
        for stride, extent in zip(array.strides, array.shape, strict=True):
            if extent == 0 or (extent > 1 and not 0 < stride < _MAX_MAP_STRIDE):
                return False
    return True


def describe_forward(
    device: Hashable,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    *others: Any,
) -> Hashable:
    """What the checks and the plan of a forward depend on, whatever its lengths: see
    _describe_but_lengths. others: what follows options in a call, ScoreArrays last."""
    queries = (q,) if out is None else (q, out)
    return _describe_but_lengths(device, queries, (k, v), options, others)


def describe_backward(
    device: Hashable,
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: ScoreOptions,
    deterministic: bool,
    *given: Array | None,
) -> Hashable:
    """The same of a backward."""
    queries, others = (q, grad_out, out), (deterministic, *given)
    if q is None or lse is None:  # the checks name it
        return describe(device, *queries, k, v, lse, options, *others)
    if q.ndim < _DENSE_AXES - 1 or lse.shape != lse_shape(q) or not lse.flags.c_contiguous:
        return describe(device, *queries, k, v, lse, options, *others)
    return lse.dtype, _describe_but_lengths(device, queries, (k, v), options, others)


def _describe_but_lengths(
    device: Hashable,
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    options: ScoreOptions,
    others: tuple[Any, ...],
) -> Hashable:
    """A description with lengths rounded (rounded_length) and without what else a length changes,
    the strides of batches. Calls that share it pass the same checks.

    The whole description where that may not be so: lengths that do not agree, empty arrays, batches
    that lie unevenly, bias and mask.

    queries, keys: the arrays that have the length of the queries, of the keys.
    """
    if any(array is None for array in (*queries, *keys)):  # the checks name it
        return describe(device, *queries, *keys, options, *others)
    rows_q, rows_kv = queries[0].shape[-3:-2], keys[0].shape[-3:-2]
    most_q, most_kv = options.max_seqlen_q, options.max_seqlen_kv
    inputs = [_describe_but_length(array, rows_q) for array in queries]
    inputs += [_describe_but_length(array, rows_kv) for array in keys]
    if (
        None in inputs
        or others[-_LAST_OF_BIAS] is not None
        or others[-_LAST_OF_MASK] is not None
        or (most_q is not None and most_q < 0)
        or (most_kv is not None and most_kv < 0)
    ):
        return describe(device, *queries, *keys, options, *others)
    rounded = (
        rounded_length(rows_q[0] if most_q is None else most_q),
        rounded_length(rows_kv[0] if most_kv is None else most_kv),
    )
    ragged = most_q is not None, most_kv is not None
    return device, rounded, len(queries), *inputs, options[:_LONGEST], ragged, describe(*others)


def _describe_but_length(array: Array, rows: tuple[int, ...]) -> Hashable:
    """None where the length may decide whether the array passes the checks, as one that is not
    `rows` does."""
    shape, strides = array.shape, array.strides
    if len(shape) == _DENSE_AXES:
        batch, step = shape[0], strides[0]
        even = batch == 1 or (0 < step < _MAX_MAP_STRIDE and step % ACCESS_BYTES == 0)
    else:
        batch, even = None, len(shape) == _DENSE_AXES - 1
    if not even or shape[-3:-2] != rows or rows[0] == 0:
        return None
    place = address_of(array) % ACCESS_BYTES
    return batch, rows[0] > 1, shape[-2:], strides[-3:], array.dtype, place


def problem_of(
    q: Array,
    k: Array,
    v: Array,
    options: ScoreOptions,
    arrays: ScoreArrays,
    *,
    rounded: bool = False,
    dtype: str | None = None,
    out_dtype: str | None = None,
    precise: bool = False,
) -> AttentionProblem:
    """What a plan needs to know of a call; `rounded`: of all whose lengths round to the same.

    dtype, out_dtype, precise: of float8 inputs, whose arrays hold bytes.
    """
    batch, heads_q, seq_len_q, seq_len_kv = score_shape(q, k, options, arrays)
    if rounded:
        seq_len_q, seq_len_kv = rounded_length(seq_len_q), rounded_length(seq_len_kv)
    causal, window = options.visible
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    return _known_problem(
        batch,
        seq_len_q,
        seq_len_kv,
        heads_q,
        k.shape[-2],
        head_dim,
        dtype or q.dtype.name,
        causal,
        value_dim=None if value_dim == head_dim else value_dim,
        window=window,
        softcap=options.softcap is not None,
        alibi=arrays.alibi_slopes is not None,
        bias=None if arrays.bias is None else arrays.bias.dtype.name,
        mask=arrays.mask is not None,
        sinks=arrays.sinks is not None,
        varlen=arrays.varlen,
        out_dtype=out_dtype,
        precise=precise,
    )


# Making one takes as long as all checks of a call.
_known_problem = lru_cache(maxsize=_MOST_PROBLEMS)(AttentionProblem)


Strides = tuple[int, int, int]


def strides_of(array: Array) -> Strides:
    """Batch, row and head strides in elements. Sequences one behind the other have no batch."""
    *batch, row, head, _ = (stride // array.itemsize for stride in array.strides)
    return batch[0] if batch else 0, row, head


def dense_strides(shape: tuple[int, ...]) -> Strides:
    """The same of a C-contiguous array."""
    *batch, rows, heads, head_dim = shape
    row = heads * head_dim
    return rows * row if batch else 0, row, head_dim
