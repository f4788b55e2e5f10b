"""Divergences of attention between a teacher and a student, on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukit.errors import ArrayShapeError
from cukit.torch._checks import refuse_gradient
from cukit.torch.functional import Window
from cukit.torch.losses import TEACHER, as_scalar

_ops: Any = torch.ops.cukit


def attention_kl(
    q_t: Tensor,
    k_t: Tensor,
    q_s: Tensor,
    k_s: Tensor,
    *,
    window_size: Window | None = None,
    head_map: Sequence[int] | None = None,
    normalizer: float | Tensor | None = None,
    deterministic: bool | None = None,
    **options: Any,
) -> Tensor:
    """:func:`cukit.attention_kl` with gradients for `q_s` and `k_s`.

    Args:
        q_t, k_t: the teacher's queries and keys, [batch, seq, heads, head_dim].
        q_s, k_s: the student's, likewise.
        deterministic: whether the backward is deterministic; None follows
            `torch.use_deterministic_algorithms`.
        Other arguments: as in :func:`cukit.attention_kl`.

    Returns:
        The loss, float32 0-d; with reduction="none" [batch, num_heads_s, seq_len_q].

    Raises:
        ArrayError, ConfigError: as :func:`cukit.attention_kl`; a teacher's tensor requires grad.
    """
    refuse_gradient("attention_kl", TEACHER.format(name="q_t"), q_t=q_t)
    refuse_gradient("attention_kl", TEACHER.format(name="k_t"), k_t=k_t)
    loss: Tensor = _ops.attention_kl(
        q_t, k_t, q_s, k_s,
        **_settings(q_s, window_size, head_map, normalizer, deterministic), **options,
    )[0]  # fmt: skip
    return loss


def distillation_attention(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor | None,
    q_s: Tensor,
    k_s: Tensor,
    v_s: Tensor,
    *,
    window_size: Window | None = None,
    head_map: Sequence[int] | None = None,
    normalizer: float | Tensor | None = None,
    deterministic: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`cukit.distill.distillation_attention` with gradients for the student's tensors.

    Args:
        q_t, k_t, v_t: the teacher's, [batch, seq, heads, head_dim]. v_t may be None: it is used
            only for `out_t`.
        q_s, k_s, v_s: the student's.
        deterministic: whether the backward is deterministic; None follows
            `torch.use_deterministic_algorithms`.
        Other arguments: as in :func:`cukit.distill.distillation_attention`.

    Returns:
        `(out, loss, out_t)`: the student's attention, the divergence, and the teacher's attention
        or None. On Hopper one kernel computes the first two where supported.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.distill.distillation_attention`; a teacher's tensor
            requires grad.
    """
    for name, x in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
        refuse_gradient("distillation_attention", TEACHER.format(name=name), **{name: x})
    out, loss, out_t, *_ = _ops.distillation_attention(
        q_t, k_t, v_t, q_s, k_s, v_s,
        **_settings(q_s, window_size, head_map, normalizer, deterministic), **options,
    )  # fmt: skip
    return out, loss, None if v_t is None else out_t


def _settings(
    like: Tensor,
    window_size: Window | None,
    head_map: Sequence[int] | None,
    normalizer: float | Tensor | None,
    deterministic: bool | None,
) -> dict[str, Any]:
    """Arguments in the types of the operators."""
    left, right = (None, None) if window_size is None else window_size
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if normalizer is not None and not isinstance(normalizer, Tensor):
        normalizer = as_scalar(normalizer, like)
    return {
        "window_left": left,
        "window_right": right,
        "head_map": None if head_map is None else list(head_map),
        "normalizer": normalizer,
        "deterministic": deterministic,
    }


def relation_kl(
    x_t: Tensor, x_s: Tensor, *, relation_heads: int | None = None, **options: Any
) -> Tensor:
    """:func:`cukit.distill.relation_kl` with gradients for `x_s`: MiniLM's relations of queries,
    keys or values with themselves.

    Args:
        x_t, x_s: [batch, seq, heads, head_dim] of teacher and student.
        relation_heads: number of heads into which the columns of both are regrouped.
        Other arguments: as in :func:`attention_kl`.

    Returns:
        The loss, as :func:`attention_kl` returns it.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.distill.relation_kl`.
    """
    if relation_heads is not None:
        for name, x in (("x_t", x_t), ("x_s", x_s)):
            columns = x.shape[-2] * x.shape[-1]
            if columns % relation_heads:
                raise ArrayShapeError(
                    f"relation_kl: relation_heads must divide the {columns} columns of {name}, got "
                    f"{relation_heads}"
                )
        x_t, x_s = (x.reshape(*x.shape[:-2], relation_heads, -1) for x in (x_t, x_s))
    return attention_kl(x_t, x_t, x_s, x_s, **options)


def indexer_kl(
    q_t: Tensor,
    k_t: Tensor,
    lse_t: Tensor,
    q_s: Tensor,
    k_s: Tensor,
    weights: Tensor,
    *,
    normalizer: float | Tensor | None = None,
    return_statistics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`cukit.indexer_kl` with gradients for `q_s`, `k_s` and `weights`.

    Args:
        q_t, k_t, lse_t: attention's queries and keys, [batch, seq, heads, head_dim], and the
            log-sum-exps that :func:`flash_attention` returns.
        q_s, k_s: the indexer's queries, [batch, seq, heads, head_dim], and its single key head,
            [batch, seq, head_dim].
        weights: of the indexer's heads, float32 [batch, seq, heads].
        return_statistics: also return the log-sum-exps of the indexer's scores and the share of the
            attention probability on the selected keys, per query.
        Other arguments: as in :func:`cukit.indexer_kl`.

    Returns:
        The loss, float32 0-d; with reduction="none" [batch, seq_len_q].

    Raises:
        ArrayError, ConfigError: as :func:`cukit.indexer_kl`; an attention tensor requires grad.
    """
    for name, x in (("q_t", q_t), ("k_t", k_t), ("lse_t", lse_t)):
        refuse_gradient("indexer_kl", TEACHER.format(name=name), **{name: x})
    if normalizer is not None and not isinstance(normalizer, Tensor):
        normalizer = as_scalar(normalizer, q_s)
    found: tuple[Tensor, Tensor, Tensor] = _ops.indexer_kl(
        q_t, k_t, lse_t, q_s, k_s, weights, normalizer=normalizer, **options
    )
    return found if return_statistics else found[0]
