"""The arguments of attention: options, array checks, and the scalars that kernels take."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._flash_tilings import MAX_HEAD_DIM
from cukit.attention.flash._problem import AttentionProblem, Window, rounded_length
from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    Array,
    Described,
    address_of,
    bfloat16,
    check_array,
    check_same_dtype,
    float16,
    is_contiguous,
    is_gpu_array,
    namespace,
)
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError

ATTENTION_DTYPES = (float16, bfloat16)
"""Dtypes of the kernels; the references take float32 and float64 too."""

PARAMETERS = "attention/parameters.cuh"
"""Header of the parameter structs that the kernels take by value."""


class GradientLayout(NamedTuple):
    """The row strides of the gradients that a backward writes, and the layout of rotary tables."""

    q: int
    """Elements from one row of grad_q to the next."""
    k: int
    v: int
    tables_per_sequence: bool | None = None
    """Whether each sequence has rotary tables of its own; None: no rope, or tables that attention's
    kernels cannot read."""

    @classmethod
    def contiguous(cls, problem: AttentionProblem) -> GradientLayout:
        """C-contiguous gradients, no rope."""
        heads_q, heads_kv = problem.num_heads_q, problem.num_heads_kv
        rows = (heads_q * problem.head_dim, heads_kv * problem.head_dim)
        return cls(*rows, heads_kv * problem.head_dim_v)

    def key_rows(self, problem: AttentionProblem, splits: int) -> tuple[int, int]:
        """Row strides, in elements, of dK and dV, or of their partial sums if there are splits."""
        if splits == 1:
            return self.k, self.v
        heads = problem.num_heads_kv * splits
        return heads * problem.head_dim, heads * problem.head_dim_v


GRADIENTS = "grad_q", "grad_k", "grad_v"


def gradient_layout(
    op: str,
    inputs: tuple[Array, Array, Array],
    targets: tuple[Array, ...],
    tables: tuple[Array, ...],
    others: dict[str, Any],
) -> GradientLayout:
    """Checks the arrays that a backward writes into, and the rotary tables.

    inputs: q, k and v. targets: their gradients, or none. tables: cos and sin, or none. others: the
    other arguments, by name.
    """
    q, k, _ = inputs
    rows = [int(x.shape[-2] * x.shape[-1]) for x in inputs]
    named = dict(zip(GRADIENTS, targets, strict=False))
    others = {**others, **dict(zip(("q", "k", "v"), inputs, strict=True))}
    others.update(zip(("cos", "sin"), tables, strict=False))
    for index, (name, target) in enumerate(named.items()):
        rows[index] = _gradient_row(op, name, target, inputs[index])
        following = {each: named[each] for each in GRADIENTS[index + 1 :]}
        check_overlap(op, target, name=name, **others, **following)
    tables_per_sequence = _check_rope(op, q, k, *tables) if tables else None
    return GradientLayout(rows[0], rows[1], rows[2], tables_per_sequence)


def _gradient_row(op: str, name: str, gradient: Array, like: Array) -> int:
    """Elements from one row of a gradient to the next, for all rows of all sequences."""
    check_array(op, name, gradient, dtypes=(like.dtype,), shape=like.shape, contiguous=False)
    *batch, seq_len, heads, head_dim = gradient.shape
    *batch_strides, row, head, column = (each // gradient.itemsize for each in gradient.strides)
    if seq_len == 1:
        row = batch_strides[0] if batch and batch[0] > 1 else heads * head_dim
    equal = (
        (column == 1 or head_dim == 1)
        and (head == head_dim or heads == 1)
        and row >= heads * head_dim
        and all(stride == seq_len * row for stride in batch_strides if batch[0] > 1)
    )
    if not equal:
        raise ArrayLayoutError(
            f"{op}: the heads of {name} must be adjacent and its rows equally spaced, got shape "
            f"{gradient.shape} and strides {gradient.strides}"
        )
    return int(row)


def _check_rope(op: str, q: Array, k: Array, cos: Array, sin: Array) -> bool | None:
    """Whether each sequence has tables of its own; None if the tables are not aligned to 16 bytes,
    as attention's kernels require."""
    if q.ndim != _DENSE_AXES:
        raise ConfigError(f"{op}: rope does not support cu_seqlens")
    batch, seq_len, _, head_dim = q.shape
    if k.shape[1] != seq_len:
        raise ArrayShapeError(
            f"{op}: with rope q and k must have the same length, got {seq_len} and {k.shape[1]}"
        )
    own = cos.ndim == _DENSE_AXES - 1
    dtypes = _statistic_dtypes(q)
    check_array(op, "cos", cos, dtypes=dtypes, ndim=cos.ndim if own else 2)
    check_array(op, "sin", sin, dtypes=(cos.dtype,), shape=cos.shape)
    shape = (batch, seq_len, head_dim / 2) if own else (max(seq_len, len(cos)), head_dim / 2)
    if cos.shape != shape:
        raise ArrayShapeError(
            f"{op}: cos must have shape ({seq_len} or more, {head_dim / 2:g}) or "
            f"({batch}, {seq_len}, {head_dim / 2:g}), got {cos.shape}"
        )
    return None if (address_of(cos) | address_of(sin)) % ACCESS_BYTES else own


NO_TEACHER = {"teacher_group": 1, "teacher_scale_log2": 0.0}
"""Teacher parameters of plain attention, for kernels that also compute the attention KL."""

LOG2_E = 1.0 / math.log(2.0)

_UNBOUNDED = 1 << 29  # above any sequence length, with room for sums in int32
_CACHED_STRIDES = 256
_CACHED_SETTINGS = 256  # few: they rarely depend on lengths
_MATRIX_AXES = ("batch", "head", "row", "column")
_NO_STRIDES = (0,) * len(_MATRIX_AXES)
_HEAD_DIM_STEP = 8  # elements in one 16-byte access
_MAX_ROW_STRIDE = (1 << 26) - 1  # offsets of up to 32 rows are 32-bit (TileCopy)
_MAX_MAP_STRIDE = 1 << 40  # bytes
_CACHED_PROBLEMS = 4096
_DENSE_AXES = 4  # axes of q, k and v unless sequences are packed


class ScoreOptions(NamedTuple):
    """The scalar options of a call: hashable, part of a launch's cache key."""

    causal: bool
    window_size: Window | None
    softcap: float | None
    scale: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    @property
    def left(self) -> int | None:
        """Visible keys left of the diagonal; None: all."""
        return self.window_size[0] if self.window_size else None

    @property
    def bounded_left(self) -> int:
        """`left` for kernels: a number above any sequence length instead of None."""
        return _bound(self.left)

    @property
    def right(self) -> int | None:
        """Visible keys right of the diagonal; None: all."""
        return 0 if self.causal else self.window_size[1] if self.window_size else None

    @property
    def visible(self) -> tuple[bool, Window | None]:
        """Whether the mask is causal (0 on the right), and the window if kernels must test one."""
        causal = self.right == 0
        bounded = self.left is not None or (self.right is not None and not causal)
        return causal, (self.left, self.right) if bounded else None

    def check(self, op: str) -> None:
        """Raises ConfigError that names the invalid option."""
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
        """The softmax scale."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else float(self.scale)


class ScoreArrays(NamedTuple):
    """The array options of a call, in the order of the kernels' arguments."""

    alibi_slopes: Array | None
    sinks: Array | None
    bias: Array | None
    mask: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed (cu_seqlens)."""
        return self.cu_seqlens_q is not None or self.cu_seqlens_kv is not None


_LENGTHS = ScoreOptions._fields.index("max_seqlen_q")  # index of the first max_seqlen field
_BIAS_FROM_END = len(ScoreArrays._fields) - ScoreArrays._fields.index("bias")
_MASK_FROM_END = len(ScoreArrays._fields) - ScoreArrays._fields.index("mask")


def score_options(
    op: str,
    causal: bool,
    window_size: Window | None,
    softcap: float | None,
    scale: float | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> ScoreOptions:
    """The scalar options, converted to types that compare and hash consistently."""
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
    """The `ScoreSettings` struct of a call.

    shape: (batch, heads_q, seq_q, seq_kv), to which bias and mask are broadcast.
    """
    slopes = arrays.alibi_slopes
    settings = _settings(
        ScoreOptions(
            options.causal, options.window_size, options.softcap, options.scale, None, None
        )
        if arrays.varlen
        else options,
        q.shape[-1],
        slopes.shape[1] if slopes is not None and slopes.ndim == 2 else 0,
        _matrix_strides(arrays.bias, shape),
        _matrix_strides(arrays.mask, shape),
    )
    if not arrays.varlen:
        return settings
    return parameter_structs(PARAMETERS)["ScoreSettings"].changed(settings, total_q=q.shape[0])


def _matrix_strides(matrix: Array | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a matrix broadcast to `shape`."""
    if matrix is None:
        return _NO_STRIDES
    steps = namespace(matrix).broadcast_to(matrix, shape).strides
    return tuple(step // matrix.itemsize for step in steps)


@lru_cache(maxsize=_CACHED_SETTINGS)
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
        inner = 2.0 * LOG2_E * options.factor(head_dim) / options.softcap
        outer = LOG2_E * options.softcap
    return parameter_structs(PARAMETERS)["ScoreSettings"].pack(
        **{f"bias_{axis}": step for axis, step in zip(_MATRIX_AXES, bias, strict=True)},
        **{f"mask_{axis}": step for axis, step in zip(_MATRIX_AXES, mask, strict=True)},
        window_left=options.bounded_left,
        window_right=_bound(options.right),
        alibi_batch=alibi_batch,
        total_q=0,
        cap_inner=inner,
        cap_outer=outer,
    )


def _bound(side: int | None) -> int:
    return _UNBOUNDED if side is None else min(side, _UNBOUNDED)


def scales_of(q: Array, options: ScoreOptions) -> tuple[float, float]:
    """The softmax scale, for base e and for base 2."""
    factor = options.factor(q.shape[-1])
    return factor, factor * LOG2_E


def refuse_dropout(op: str, dropout: float) -> None:
    """Raises ConfigError unless `dropout` is 0: the backward would have to regenerate the mask."""
    if not (isinstance(dropout, (int, float)) and dropout == 0):
        raise ConfigError(
            f"{op}: attention dropout is not supported, got dropout={dropout}; "
            "apply dropout to the output or the residual instead"
        )


def _check_heads(
    op: str, q: Array, k: Array, v: Array, varlen: bool, dtypes: tuple[Any, ...] = FLOAT_DTYPES
) -> None:
    """Checks shapes and dtypes of q, k and v."""
    check_array(op, "q", q, dtypes=dtypes, ndim=3 if varlen else 4, contiguous=False)
    batch, head_dim = q.shape[:-3], q.shape[-1]
    check_array(op, "k", k, dtypes=dtypes, shape=(*batch, None, None, head_dim), contiguous=False)
    check_array(op, "v", v, dtypes=dtypes, shape=(*k.shape[:-1], None), contiguous=False)
    check_same_dtype(op, q=q, k=k, v=v)
    check_head_counts(op, "q", q, "k", k)
    check_head_dim(op, "q", q)
    check_head_dim(op, "v", v)


def check_head_counts(op: str, q_name: str, q: Array, k_name: str, k: Array) -> None:
    """Checks that the number of KV heads divides the number of query heads."""
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q == 0 or heads_q % heads_kv:
        raise ArrayShapeError(
            f"{op}: the heads of {k_name} (axis {k.ndim - 2}) must divide those of {q_name}, "
            f"got {heads_kv} and {heads_q}"
        )


def check_head_dim(op: str, name: str, array: Array) -> None:
    """Checks that head_dim is not 0."""
    if array.shape[-1] == 0:
        raise ArrayShapeError(f"{op}: head_dim (the last axis of {name}) must not be 0")


def _check_options(
    op: str, q: Array, k: Array, options: ScoreOptions, arrays: ScoreArrays, dtype: Any = None
) -> None:
    """Checks slopes, sinks, bias and mask. dtype: of a bias other than float32; default q's."""
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
    """Checks an array that is broadcast to the score matrix."""
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
            f"{op}: the strides of {name} must be multiples of its element size, "
            f"got {array.strides} bytes"
        )


def check_sequences(op: str, options: ScoreOptions, arrays: ScoreArrays) -> None:
    """Checks that both cu_seqlens and both max_seqlens are given, or none of the four."""
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
            f"{op}: variable-length sequences need cu_seqlens_q, cu_seqlens_kv, "
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
    """Checks the contents of cu_seqlens on the CPU. On the GPU the host never reads them."""
    for name, ends, total, longest in (
        ("cu_seqlens_q", arrays.cu_seqlens_q, q.shape[0], options.max_seqlen_q),
        ("cu_seqlens_kv", arrays.cu_seqlens_kv, k.shape[0], options.max_seqlen_kv),
    ):
        if ends is None or longest is None or is_gpu_array(ends) or not len(ends):
            continue
        lengths = np.diff(ends)
        if ends[0] != 0 or ends[-1] != total or (lengths < 0).any():
            raise ConfigError(
                f"{op}: {name} must be non-decreasing from 0 to {total}, the rows of its array, "
                f"got {ends}"
            )
        if lengths.max(initial=0) > longest:
            raise ConfigError(
                f"{op}: the longest sequence of {name} has {lengths.max()} rows, "
                f"more than max_seqlen_{name.removeprefix('cu_seqlens_')}={longest}"
            )


def check_forward(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
    decoded: Any = None,
) -> None:
    """Checks the arguments of the forward, on either device.

    decoded: for FP8 inputs, the dtype to which they are decoded; q, k and v are then their storage.
    """
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
    """Checks the arguments of the backward, on either device."""
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
    """Dtypes of per-head and per-row arrays; the last is that of lse."""
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    return (single, double) if q.dtype == np.float64 else (single,)


def lse_shape(q: Array) -> tuple[int, ...]:
    """The shape of lse: [batch, heads_q, seq_q]; [heads_q, total_q] for packed sequences."""
    *batch, rows, heads, _ = q.shape
    return (*batch, heads, rows)


def score_shape(
    q: Array, k: Array, options: ScoreOptions, arrays: ScoreArrays
) -> tuple[int, int, int, int]:
    """(batch, heads_q, seq_len_q, seq_len_kv); for packed sequences their count and max lengths."""
    if arrays.cu_seqlens_q is None:
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    batch = len(arrays.cu_seqlens_q) - 1
    return batch, q.shape[1], options.max_seqlen_q or 0, options.max_seqlen_kv or 0


def check_kernel_layout(op: str, **arrays: Array | None) -> None:
    """Checks what the kernels require beyond the reference: dtype, head_dim, 16-byte alignment and
    the row stride."""
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
                f"{op}: the stride of axis {array.ndim - 3} of {name} must be at most "
                f"{_MAX_ROW_STRIDE} elements on the GPU, got {row_stride}"
            )


def fits_tensor_maps(*arrays: Array) -> bool:
    """Whether TMA can read the arrays: none empty, all strides positive and in range."""
    for array in arrays:
        for stride, extent in zip(array.strides, array.shape, strict=True):
            if extent == 0 or (extent > 1 and not 0 < stride < _MAX_MAP_STRIDE):
                return False
    return True


def forward_plan_key(key: tuple[Any, ...]) -> Hashable:
    """`key` of a forward, (device, q, k, v, out, options, others), with rounded lengths if
    possible.

    others: further arguments, ScoreArrays last.
    """
    device, q, k, v, out, options, *others = key
    queries = (q,) if out is None else (q, out)
    return _rounded_key(device, queries, (k, v), options, others) or key


def backward_plan_key(key: tuple[Any, ...]) -> Hashable:
    """`key` of a backward, (device, grad_out, q, k, v, out, lse, options, others), with rounded
    lengths if possible."""
    device, grad_out, q, k, v, out, lse, options, *others = key
    if q is None or lse is None or len(q[0]) < _DENSE_AXES - 1:  # the checks name the invalid one
        return key
    *batch, rows, heads, _ = q[0]
    if lse[0] != (*batch, heads, rows) or not is_contiguous(lse):
        return key
    short = _rounded_key(device, (q, grad_out, out), (k, v), options, others)
    return key if short is None else (lse[2:], short)


def _rounded_key(
    device: Hashable,
    queries: tuple[Described, ...],
    keys: tuple[Described, ...],
    options: ScoreOptions,
    others: list[Any],
) -> Hashable | None:
    """A key with rounded lengths (rounded_length) and without batch strides, which change with the
    length. Calls with equal keys pass the same checks.

    None where that is not certain: inconsistent lengths, empty arrays, unaligned batch strides,
    bias or mask.

    queries, keys: the arrays with the length of the queries and with that of the keys.
    """
    if None in queries or None in keys:  # the checks name the missing argument
        return None
    rows_q, rows_kv = queries[0][0][-3:-2], keys[0][0][-3:-2]
    max_q, max_kv = options.max_seqlen_q, options.max_seqlen_kv
    inputs = [without_length(array, rows_q) for array in queries]
    inputs += [without_length(array, rows_kv) for array in keys]
    if (
        None in inputs
        or others[-_BIAS_FROM_END] is not None
        or others[-_MASK_FROM_END] is not None
        or (max_q is not None and max_q < 0)
        or (max_kv is not None and max_kv < 0)
    ):
        return None
    rounded = (
        rounded_length(rows_q[0] if max_q is None else max_q),
        rounded_length(rows_kv[0] if max_kv is None else max_kv),
    )
    ragged = max_q is not None, max_kv is not None
    return device, rounded, len(queries), *inputs, options[:_LENGTHS], ragged, *others


def without_length(array: Described, rows: tuple[int, ...]) -> tuple[Any, ...] | None:
    """The description of an array without its length, batch first. None where the length may decide
    whether the array passes the checks, for instance where it differs from `rows`."""
    shape, strides, dtype, misalignment, place = array
    if len(shape) == _DENSE_AXES:
        batch, step = shape[0], strides[0]
        even = batch == 1 or (0 < step < _MAX_MAP_STRIDE and step % ACCESS_BYTES == 0)
    else:
        batch, even = None, len(shape) == _DENSE_AXES - 1
    if not even or shape[-3:-2] != rows or rows[0] == 0:
        return None
    return batch, rows[0] > 1, shape[-2:], strides[-3:], dtype, misalignment, place


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
    """The problem of a call. rounded: with rounded lengths, so that calls of similar lengths share
    it.

    dtype, out_dtype, precise: for FP8 inputs, whose arrays hold bytes.
    """
    batch, heads_q, seq_len_q, seq_len_kv = score_shape(q, k, options, arrays)
    if rounded:
        seq_len_q, seq_len_kv = rounded_length(seq_len_q), rounded_length(seq_len_kv)
    causal, window = options.visible
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    return _cached_problem(
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


# Cached, because constructing a problem takes as long as all checks of a call.
_cached_problem = lru_cache(maxsize=_CACHED_PROBLEMS)(AttentionProblem)


Strides = tuple[int, int, int]


def strides_of(array: Array) -> Strides:
    """Batch, row and head strides in elements; packed sequences have a batch stride of 0."""
    return _in_elements(array.strides, array.itemsize)


@lru_cache(maxsize=_CACHED_STRIDES)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> Strides:
    """Cached, because calls use few distinct layouts."""
    *batch, row, head, _ = (stride // itemsize for stride in strides)
    return batch[0] if batch else 0, row, head


def dense_strides(shape: tuple[int, ...]) -> Strides:
    """`strides_of` a C-contiguous array of this shape."""
    *batch, rows, heads, head_dim = shape
    row = heads * head_dim
    return rows * row if batch else 0, row, head_dim
