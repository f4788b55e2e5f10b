"""Distillation from a teacher's top-k or sampled tokens, fused with the student's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, check_array, float64, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch
from cukit.core.scalars import check_choice
from cukit.distill.losses._linear_loss import (
    Head,
    HeadOptions,
    LinearLossConfig,
    RowLaunch,
    evaluate_head,
    linear_result,
)
from cukit.distill.losses._loss_options import LossOptions, RowOptions, common_vocabulary
from cukit.distill.losses._row_loss import count_spec, total_spec
from cukit.distill.losses._topk_rows import (
    SAMPLED,
    TAILS,
    TeacherTokens,
    prepare_rows,
    topk_specs,
)
from cukit.reference import losses as reference
from cukit.reference.losses import LinearKlResult
from cukit.registry import register

_TOPK = "linear_topk_distillation_loss"
_SAMPLED = "linear_sampled_distillation_loss"


def linear_topk_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    bias: Array | None = None,
    tail: str = "renormalise",
    targets: Array | None = None,
    token_weights: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """:func:`topk_distillation_loss` of the logits `hidden @ weight^T + bias`, never fully stored.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; leading axes index rows.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        teacher_log_probs: float32 [..., k], C-contiguous, k up to 1024; see :func:`teacher_top_k`.
        teacher_ids: int32 [..., k]: the ids of these tokens, distinct within a row.
        tail: "renormalise" or "bucket".
        Other arguments: as in :func:`linear_distillation_loss`.

    Returns:
        :class:`LinearKlResult`, as :func:`linear_distillation_loss`.

    Raises:
        ArrayError, ConfigError: as :func:`linear_distillation_loss` and
            :func:`topk_distillation_loss`.

    Memory besides the results: one chunk of logits.

    >>> import numpy as np, cukit as ck
    >>> eye = np.eye(3, dtype=np.float32)
    >>> log_probs, ids = ck.teacher_top_k(2 * eye, 1)
    >>> round(float(ck.linear_topk_distillation_loss(eye, eye, log_probs, ids).loss), 4)
    0.5514
    """
    options = LossOptions(
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared,
        soft_weight=soft_weight, hard_weight=hard_weight, logit_scale=logit_scale, softcap=softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    check_choice(_TOPK, "tail", tail, TAILS)
    return _evaluate(
        _TOPK, Head(hidden, weight, bias), TeacherTokens(teacher_ids, None, teacher_log_probs),
        options, rows,
        HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes), tail,
    )  # fmt: skip


def linear_sampled_distillation_loss(
    hidden: Array,
    weight: Array,
    sample_ids: Array,
    sample_weights: Array | None = None,
    *,
    teacher_log_probs: Array | None = None,
    bias: Array | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """:func:`sampled_distillation_loss` of logits `hidden @ weight^T + bias`, never fully stored.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; leading axes index rows.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        sample_ids, sample_weights, teacher_log_probs: as in :func:`sampled_distillation_loss`.
        Other arguments: as in :func:`linear_distillation_loss`.

    Returns:
        :class:`LinearKlResult`, as :func:`linear_distillation_loss`.

    Raises:
        ArrayError, ConfigError: as :func:`linear_distillation_loss` and
            :func:`sampled_distillation_loss`.

    Memory besides the results: one chunk of logits.

    >>> import numpy as np, cukit as ck
    >>> eye, ids = np.eye(3, dtype=np.float32), np.array([[0], [1], [2]], np.int32)
    >>> round(float(ck.linear_sampled_distillation_loss(eye, eye, ids).loss), 4)
    0.5514
    """
    options = LossOptions(
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared,
        soft_weight=soft_weight, hard_weight=hard_weight, logit_scale=logit_scale, softcap=softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    return _evaluate(
        _SAMPLED, Head(hidden, weight, bias),
        TeacherTokens(sample_ids, sample_weights, teacher_log_probs), options, rows,
        HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes), SAMPLED,
    )  # fmt: skip


def _evaluate(
    op: str,
    head: Head,
    tokens: TeacherTokens,
    options: LossOptions,
    rows: RowOptions,
    head_options: HeadOptions,
    tail: str,
) -> LinearKlResult:
    head, head_options, rows = head.adopt(op), head_options.adopt(op), rows.adopt(op)
    tokens = TeacherTokens(*adopt(op, *tokens))
    options = options.check(op, rows.targets)
    on_gpu = runs_kernel(op, *head, *tokens, *head_options.arrays, *rows.arrays)
    columns = _check(op, head, tokens, rows, head_options, options.hard, tail)
    if not on_gpu:
        function: Callable[..., LinearKlResult] = getattr(reference, op)
        extra = {} if tail == SAMPLED else {"tail": tail}
        return function(
            *head[:2], bias=head.bias, **tokens.named(tail), **extra, **options.of_student(),
            **rows._asdict(), **head_options._asdict(),
        )  # fmt: skip
    check_array(op, "hidden", head.hidden, dtypes=KERNEL_DTYPES)
    k = tokens.ids.shape[-1]
    values = (tokens.log_probs, tokens.weights, tokens.ids)
    flat = [None if value is None else value.reshape(-1, k) for value in values]
    kind = (tail, options.hard, options.transforms, rows.ignore_index)

    def row_launch(config: LinearLossConfig) -> RowLaunch:
        def launch(chunk: slice, logits: Array) -> tuple[Launch, tuple[Array | None, ...]]:
            log_probs, weights, ids = (None if each is None else each[chunk] for each in flat)
            prepared = prepare_rows(logits, ids, *rows.part(chunk), *kind)
            return prepared, (logits, log_probs, weights, ids)

        return launch

    losses, gradients = evaluate_head(op, head, columns, rows, options, head_options, row_launch)
    return linear_result(losses, gradients, head.hidden)


def _check(
    op: str,
    head: Head,
    tokens: TeacherTokens,
    rows: RowOptions,
    head_options: HeadOptions,
    hard: bool,
    tail: str,
) -> int:
    """Checks the arrays; returns the number of vocabulary columns in use."""
    head.check(op, "", None)
    row_shape = head.hidden.shape[:-1]
    columns = common_vocabulary(op, rows.vocab_size, weight=head.weight.shape[0])
    tokens.check(op, row_shape, columns, tail, wide=head.hidden.dtype == float64)
    rows.check(op, row_shape, columns if hard else None)
    head_options.check(op, head)
    return columns


def _specs_topk(device: Device) -> list[KernelSpec]:
    kinds = (("bucket", True, False, False), ("bucket", True, True, True))
    return [*topk_specs(device, kinds), count_spec("int32"), total_spec()]


def _specs_sampled(device: Device) -> list[KernelSpec]:
    kinds = ((SAMPLED, True, False, False), (SAMPLED, True, True, True))
    return [*topk_specs(device, kinds), count_spec("int32"), total_spec()]


register(
    name=_TOPK,
    family="distill",
    function=linear_topk_distillation_loss,
    reference=reference.linear_topk_distillation_loss,
    specs=_specs_topk,
)
register(
    name=_SAMPLED,
    family="distill",
    function=linear_sampled_distillation_loss,
    reference=reference.linear_sampled_distillation_loss,
    specs=_specs_sampled,
)
