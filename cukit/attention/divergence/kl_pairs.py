"""Arguments of the attention KL: queries and keys of a teacher and a student, and the head map."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._arguments import (
    LOG2_E,
    ScoreArrays,
    ScoreOptions,
    check_head_counts,
    check_head_dim,
    check_sequences,
    lse_shape,
    score_options,
    score_shape,
)
from cukit.attention.flash._problem import AttentionProblem, Window
from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    check_array,
    check_same_dtype,
    float32,
    float64,
    namespace,
)
from cukit.core.scalars import check_choice, check_flag, check_number, check_scalar
from cukit.errors import ArrayError, ConfigError

REDUCTIONS = ("mean", "sum", "none")


class KlOptions(NamedTuple):
    """The scalar options of a call, checked."""

    scores: ScoreOptions
    """Shared by both models, without a scale."""
    temperature: float
    squared: bool
    scale_t: float | None
    scale_s: float | None
    reduction: str

    def factor_s(self, head_dim: int) -> float:
        """The student's score scale, temperature included."""
        return _factor(self.scale_s, head_dim) / self.temperature

    def factor_t(self, head_dim: int) -> float:
        """The teacher's score scale, temperature included."""
        return _factor(self.scale_t, head_dim) / self.temperature

    @property
    def loss_factor(self) -> float:
        """T^2 if requested, else 1."""
        return self.temperature**2 if self.squared else 1.0

    def student(self, head_dim: int) -> ScoreOptions:
        """The options of the student's scores."""
        return self.scores._replace(scale=self.factor_s(head_dim))


def _factor(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(max(1, head_dim)) if scale is None else scale


class RowArrays(NamedTuple):
    """The optional arrays of a call."""

    row_weights: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    lse_t: Array | None
    lse_s: Array | None

    @property
    def scores(self) -> ScoreArrays:
        """The arrays that flash_attention also takes."""
        return ScoreArrays(None, None, None, None, self.cu_seqlens_q, self.cu_seqlens_kv)

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed (cu_seqlens)."""
        return self.cu_seqlens_q is not None


def kl_options(
    op: str,
    causal: bool,
    window_size: Window | None,
    temperature: float,
    squared: bool,
    scale_t: float | None,
    scale_s: float | None,
    reduction: str,
    normalizer: Any,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> KlOptions:
    """The scalar options of a call. Raises ConfigError."""
    scores = score_options(op, causal, window_size, None, None, max_seqlen_q, max_seqlen_kv)
    scores.check(op)
    check_number(op, "temperature", temperature, above=0)
    check_flag(op, "scale_by_temperature_squared", squared)
    for name, scale in (("scale_t", scale_t), ("scale_s", scale_s)):
        if scale is not None:
            check_number(op, name, scale, above=0)
    if reduction is None:
        raise ConfigError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got None")
    check_choice(op, "reduction", reduction, REDUCTIONS)
    if normalizer is not None:
        if reduction != "mean":
            raise ConfigError(f"{op}: normalizer requires reduction='mean', got {reduction!r}")
        if isinstance(normalizer, numbers.Real):
            check_number(op, "normalizer", normalizer, above=0)
    return KlOptions(
        scores,
        float(temperature),
        bool(squared),
        None if scale_t is None else float(scale_t),
        None if scale_s is None else float(scale_s),
        reduction,
    )


def check_optional_scalar(op: str, name: str, value: Any, shape: tuple[int, ...] = ()) -> None:
    """Checks that `value` is None, a finite number (only if `shape` is ()), or a float32 array of
    `shape`; on the CPU also float64."""
    if value is not None:
        check_scalar(op, name, value, finite=True, shape=shape)


def check_pairs(
    op: str,
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    arrays: RowArrays,
    options: KlOptions,
) -> None:
    """Checks shapes and dtypes, on either device."""
    check_sequences(op, options.scores, arrays.scores)
    axes = 3 if arrays.varlen else 4
    check_array(op, "q_s", q_s, dtypes=FLOAT_DTYPES, ndim=axes, contiguous=False)
    lengths = q_s.shape[:-2]
    batch, width_s = q_s.shape[:-3], q_s.shape[-1]
    check_array(
        op, "k_s", k_s, dtypes=FLOAT_DTYPES, shape=(*batch, None, None, width_s), contiguous=False
    )
    check_array(op, "q_t", q_t, dtypes=FLOAT_DTYPES, shape=(*lengths, None, None), contiguous=False)
    shape = (*k_s.shape[:-2], None, q_t.shape[-1])
    check_array(op, "k_t", k_t, dtypes=FLOAT_DTYPES, shape=shape, contiguous=False)
    check_same_dtype(op, q_s=q_s, k_s=k_s, q_t=q_t, k_t=k_t)
    for model, q, k in (("s", q_s, k_s), ("t", q_t, k_t)):
        check_head_counts(op, f"q_{model}", q, f"k_{model}", k)
        check_head_dim(op, f"q_{model}", q)
    exact = (float32, float64) if q_s.dtype == float64 else (float32,)
    check_row_weights(op, arrays.row_weights, exact, lengths)
    for name in ("lse_t", "lse_s"):
        lse = getattr(arrays, name)
        if lse is not None:
            check_array(op, name, lse, dtypes=exact[-1:], shape=lse_shape(q_s))


def check_row_weights(
    op: str, weights: Array | None, dtypes: tuple[Any, ...], shape: tuple[int, ...]
) -> None:
    """Checks the weights of the queries; the values only on the CPU."""
    if weights is None:
        return
    check_array(op, "row_weights", weights, dtypes=dtypes, shape=shape)
    if isinstance(weights, np.ndarray) and not (weights >= 0).all():
        raise ArrayError(f"{op}: row_weights must be at least 0, got {weights.min()}")


def head_map_of(op: str, head_map: Any, heads_t: int, heads_s: int) -> tuple[int, ...] | None:
    """The teacher's head for each of the student's heads; None for the identity."""
    if head_map is None:
        if heads_t == heads_s:
            return None
        return tuple(head * heads_t // heads_s for head in range(heads_s))
    try:
        heads = tuple(map(operator.index, head_map))
    except TypeError:
        heads = ()
    if len(heads) != heads_s or not all(0 <= head < heads_t for head in heads):
        raise ConfigError(
            f"{op}: head_map must name, for each of the student's {heads_s} heads, a head of the "
            f"teacher, 0 to {heads_t - 1}, got {head_map!r}"
        )
    return None if heads == tuple(range(heads_t)) else heads


def mapped_teacher(q_t: Array, k_t: Array, head_map: tuple[int, ...] | None) -> tuple[Array, Array]:
    """The teacher's arrays with one query head per head of the student.

    Query head h is the teacher's head for head h of the student; neighbouring heads share a KV head
    where possible. The results are views if the mapped heads are equally spaced, otherwise copies.
    """
    if head_map is None:
        return q_t, k_t
    group = q_t.shape[-2] // k_t.shape[-2]
    key_heads = tuple(head // group for head in head_map)
    shared = len(key_heads)
    while shared > 1 and not (
        len(key_heads) % shared == 0
        and all(head == key_heads[h // shared * shared] for h, head in enumerate(key_heads))
    ):
        shared -= 1
    return _heads(q_t, head_map), _heads(k_t, key_heads[::shared])


def _heads(array: Array, heads: Sequence[int]) -> Array:
    if heads == tuple(range(array.shape[-2])):
        return array
    first = heads[0]
    step = heads[1] - first if len(heads) > 1 else 1
    if step > 0 and all(head == first + step * i for i, head in enumerate(heads)):
        return array[..., first : heads[-1] + 1 : step, :]
    return namespace(array).take(array, namespace(array).asarray(heads), axis=array.ndim - 2)


def problem_of_pairs(
    k_t: Array, q_s: Array, k_s: Array, options: KlOptions, arrays: RowArrays
) -> AttentionProblem:
    """The problem of a call: the student's attention, with k_t in place of v."""
    student = options.student(q_s.shape[-1])
    batch, heads, seq_q, seq_kv = score_shape(q_s, k_s, student, arrays.scores)
    causal, window = student.visible
    width_s, width_t = q_s.shape[-1], k_t.shape[-1]
    return AttentionProblem(
        *(batch, seq_q, seq_kv, heads, k_s.shape[-2], width_s, q_s.dtype.name, causal),
        value_dim=None if width_t == width_s else width_t,
        window=window,
        varlen=arrays.varlen,
        teacher_group=heads // k_t.shape[-2],
    )


def teacher_settings(options: KlOptions, problem: AttentionProblem) -> dict[str, float]:
    """The teacher's kernel parameters."""
    return {
        "teacher_group": problem.teacher_group or 1,
        "teacher_scale_log2": options.factor_t(problem.head_dim_v) * LOG2_E,
    }
