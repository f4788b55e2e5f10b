"""Attention distillation: a student's attention with its divergence from a teacher's, and the
divergence between both models' relations of positions (MiniLM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.attention import (
    attention_kl,
    attention_kl_backward,
    flash_attention,
    flash_attention_backward,
)
from cukit.attention.divergence.attention_with_kl import attention_with_kl
from cukit.attention.divergence.kl_pairs import RowArrays, head_map_of, kl_options
from cukit.core.arrays import Array, adopt, namespace
from cukit.core.scalars import check_flag, check_integer
from cukit.errors import ArrayShapeError

Window = tuple[int | None, int | None]


class DistillationAttention(NamedTuple):
    """The result of `distillation_attention`."""

    out: Array
    """The student's attention, as flash_attention returns it."""
    loss: Array
    out_t: Array | None
    """The teacher's attention; None without v_t."""
    lse: Array
    """Log-sum-exps of the student's scores, for flash_attention_backward."""
    lse_t: Array
    """Log-sum-exps of the teacher's scores at the temperature, one for each student head."""
    lse_s: Array
    """The same for the student's scores; equals `lse` at a temperature of 1."""


def distillation_attention(
    q_t: Array,
    k_t: Array,
    v_t: Array | None,
    q_s: Array,
    k_s: Array,
    v_s: Array,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    scale_t: float | None = None,
    scale_s: float | None = None,
    head_map: Sequence[int] | None = None,
    row_weights: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    lse_t: Array | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    precise: bool = False,
) -> DistillationAttention:
    """A student's attention, and its divergence from a teacher's, in O(seq_len) memory.

        out = softmax(scale_s q_s k_s^T) v_s
        loss = KL(softmax(scale_t q_t k_t^T / T) || softmax(scale_s q_s k_s^T / T))

    At T = 1 and without `precise`, Hopper computes both in one pass over the student's scores if no
    head_dim exceeds 128. Otherwise the student's attention runs first, and at T = 1 the divergence
    reuses its log-sum-exps. The teacher's log-sum-exps are not recomputed if `lse_t` is given or,
    at T = 1, `v_t`.

    Args:
        q_t: the teacher's queries, [batch, seq_len_q, num_heads_t, head_dim_t].
        k_t: the teacher's keys, [batch, seq_len_kv, num_kv_heads_t, head_dim_t].
        v_t: the teacher's values, as k_t; None: the teacher's output is not computed.
        q_s: the student's queries, [batch, seq_len_q, num_heads_s, head_dim_s].
        k_s: the student's keys, [batch, seq_len_kv, num_kv_heads_s, head_dim_s].
        v_s: the student's values, as k_s; their head_dim may differ.
        lse_t: as in attention_kl.

    All other arguments as in :func:`~cukit.attention.divergence.attention_kl.attention_kl`.

    Returns:
        A DistillationAttention.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value.
    """
    masks: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    out_t = None
    shares = temperature == 1
    if v_t is not None:
        out_t, teacher_lse = flash_attention(q_t, k_t, v_t, scale=scale_t, return_lse=True, **masks)
        if shares and lse_t is None:
            lse_t = _by_student_heads(q_t, q_s, teacher_lse, head_map)
    options: dict[str, Any] = {
        "scale_by_temperature_squared": scale_by_temperature_squared,
        "scale_t": scale_t, "scale_s": scale_s, "head_map": head_map, "row_weights": row_weights,
        "lse_t": lse_t, "reduction": reduction, "normalizer": normalizer, **masks,
    }  # fmt: skip
    if shares and not precise:
        scalars = kl_options(
            "distillation_attention", causal, window_size, 1.0, scale_by_temperature_squared,
            scale_t, scale_s, reduction, normalizer, max_seqlen_q, max_seqlen_kv,
        )  # fmt: skip
        arrays = RowArrays(row_weights, cu_seqlens_q, cu_seqlens_kv, lse_t, None)
        both = attention_with_kl(q_t, k_t, q_s, k_s, v_s, scalars, arrays, head_map, normalizer)
        if both is not None:
            return DistillationAttention(
                both.out, both.loss, out_t, both.lse_s, both.lse_t, both.lse_s
            )
    out, lse = flash_attention(q_s, k_s, v_s, scale=scale_s, return_lse=True, **masks)
    loss, lse_t, lse_s = attention_kl(
        q_t, k_t, q_s, k_s,
        temperature=temperature, lse_s=lse if shares else None,
        precise=precise, return_lse=True, **options,
    )  # fmt: skip
    return DistillationAttention(out, loss, out_t, lse, lse_t, lse_s)


def distillation_attention_backward(
    grad_out: Array,
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    v_s: Array,
    result: DistillationAttention,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    scale_t: float | None = None,
    scale_s: float | None = None,
    head_map: Sequence[int] | None = None,
    row_weights: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`distillation_attention` for the student's queries, keys and values.

    Args:
        grad_out: gradient of the student's output, with its shape and dtype.
        result: the result of :func:`distillation_attention`.
        grad_loss: upstream gradient of the loss, as in attention_kl_backward.
        deterministic: as in flash_attention_backward.

    All other arguments as in the forward.

    Returns:
        `(grad_q_s, grad_k_s, grad_v_s)`, C-contiguous, like the student's arrays. The first two are
        sums of an attention and a divergence gradient, each rounded to its dtype, added in float32.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value.
    """
    masks: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    grad_q, grad_k, grad_v = flash_attention_backward(
        grad_out, q_s, k_s, v_s, result.out, result.lse,
        scale=scale_s, deterministic=deterministic, **masks,
    )  # fmt: skip
    more_q, more_k = attention_kl_backward(
        q_t, k_t, q_s, k_s, result.lse_t, result.lse_s,
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared,
        scale_t=scale_t, scale_s=scale_s, head_map=head_map, row_weights=row_weights,
        reduction=reduction, normalizer=normalizer, grad_loss=grad_loss,
        deterministic=deterministic, **masks,
    )  # fmt: skip
    return _sum(grad_q, more_q), _sum(grad_k, more_k), grad_v


def relation_kl(
    x_t: Array,
    x_s: Array,
    *,
    relation_heads: int | None = None,
    causal: bool = False,
    window_size: Window | None = None,
    temperature: float = 1.0,
    row_weights: Array | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    precise: bool = False,
    return_grad: bool = False,
    grad_loss: Any = None,
    deterministic: bool = False,
) -> Array | tuple[Array, Array]:
    """Divergence between a teacher's and a student's relations of positions (MiniLM, MiniLMv2):

        KL(softmax(x_t x_t^T / (sqrt(d_t) T)) || softmax(x_s x_s^T / (sqrt(d_s) T)))

    where x are queries, keys or values. This is attention_kl with x as queries and as keys.

    Args:
        x_t: the teacher's queries, keys or values, [batch, seq_len, num_heads_t, head_dim_t].
        x_s: the student's, [batch, seq_len, num_heads_s, head_dim_s]; dtype of x_t.
        relation_heads: number of heads into which the columns of both models are regrouped
            (MiniLMv2). It divides num_heads * head_dim of both; on the GPU a head has at most 256
            columns. None: the models' own heads; both models must have the same number.
        causal, window_size, temperature, row_weights: as in attention_kl.
        reduction, normalizer, precise: as in attention_kl.
        return_grad: also return the gradient of x_s.
        grad_loss, deterministic: as in attention_kl_backward.

    Returns:
        The loss; with `return_grad`, `(loss, grad_x_s)`, where grad_x_s has the shape and dtype of
        x_s and is C-contiguous.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value.

    Papers: Wang et al., MiniLM, arXiv:2002.10957; Wang et al., MiniLMv2, arXiv:2012.15828.
    """
    op = "relation_kl"
    check_flag(op, "return_grad", return_grad)
    x_t, x_s = adopt(op, x_t, x_s)
    for name, x in (("x_t", x_t), ("x_s", x_s)):
        if getattr(x, "ndim", 0) != 4:
            raise ArrayShapeError(
                f"{op}: {name} must be [batch, seq_len, heads, head_dim], "
                f"got shape {getattr(x, 'shape', None)}"
            )
    teacher, student = (
        _relation_view(op, name, x, relation_heads) for name, x in (("x_t", x_t), ("x_s", x_s))
    )
    if teacher.shape[2] != student.shape[2]:
        raise ArrayShapeError(
            f"{op}: without relation_heads both models need the same number of heads, "
            f"got {teacher.shape[2]} and {student.shape[2]}"
        )
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "temperature": temperature,
        "row_weights": row_weights,
        "reduction": reduction,
        "normalizer": normalizer,
    }
    loss, lse_t, lse_s = attention_kl(
        teacher, teacher, student, student, precise=precise, return_lse=True, **options
    )
    if not return_grad:
        return loss
    both = attention_kl_backward(
        teacher, teacher, student, student, lse_t, lse_s,
        grad_loss=grad_loss, deterministic=deterministic, **options,
    )  # fmt: skip
    return loss, _sum(*both).reshape(x_s.shape)


def _relation_view(op: str, name: str, x: Array, relation_heads: int | None) -> Array:
    """x with its columns regrouped into `relation_heads` heads; a copy if they are not adjacent."""
    if relation_heads is None:
        return x
    check_integer(op, "relation_heads", relation_heads, least=1)
    batch, seq, heads, width = x.shape
    if heads * width % relation_heads:
        raise ArrayShapeError(
            f"{op}: relation_heads must divide the {heads * width} columns of {name}, "
            f"got {relation_heads}"
        )
    return x.reshape(batch, seq, relation_heads, heads * width // relation_heads)


def _by_student_heads(q_t: Array, q_s: Array, lse: Array, head_map: Sequence[int] | None) -> Array:
    heads = head_map_of("distillation_attention", head_map, q_t.shape[-2], q_s.shape[-2])
    if heads is None:
        return lse
    xp = namespace(lse)
    return xp.take(lse, xp.asarray(heads), axis=-2)


def _sum(a: Array, b: Array) -> Array:
    wide = np.promote_types(a.dtype, np.float32)
    return (a.astype(wide) + b.astype(wide)).astype(a.dtype)
