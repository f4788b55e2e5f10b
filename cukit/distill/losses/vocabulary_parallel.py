"""Exact losses of language-model heads whose vocabulary is sharded over processes.

Each process holds some rows of the heads' weights and computes the corresponding columns of the
logits. Processes exchange a few floats per row: the softmax statistics of both distributions, a
moment, the target's logit. Each process computes the gradient of its own weights; the gradients of
the hidden states are summed over processes in float32.

Per chunk of rows (`|` separates concurrent launches and collectives):

    logits of both models                        two GEMMs
    statistics of the first half
    statistics of the second half    |   all-gather those of the first half, 48 bytes a row
    gradient of the first half       |   all-gather those of the second half
    gradient of the second half
    grad_hidden                                  a GEMM
    grad_weight                      |   all-reduce grad_hidden

Divergences other than the forward KL also all-reduce two floats per row, in a phase between
statistics and gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import (
    KERNEL_DTYPES,
    Array,
    check_array,
    check_same_dtype,
    empty,
    runs_kernel,
)
from cukit.core.kernel import Launch
from cukit.distill.losses import _cross_entropy_rows, _divergence_rows
from cukit.distill.losses._linear_loss import (
    Head,
    HeadOptions,
    LinearLossConfig,
    RowLaunch,
    empty_logits,
    evaluate_head,
    linear_result,
)
from cukit.distill.losses._loss_options import LossOptions, RowOptions, RowShard
from cukit.distributed import Communicator
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import losses as reference
from cukit.reference.losses import LinearCrossEntropyResult, LinearKlResult

_ALIGNMENT = 8
_STATE_FLOATS = 12
"""Floats of softmax statistics per row and process, see kernels_cu/distill/row_shard.cuh."""
_FEWEST_ROWS = 128
"""Minimum rows of half a chunk: a chunk with fewer than twice as many rows is not split."""


@dataclass(frozen=True)
class VocabularyShard:
    """This process's contiguous range of a vocabulary's tokens; ranges are in rank order.

    Args:
        communicator: the processes, all of which call the same losses.
        vocab_size: of the whole vocabulary, without padding.

    Raises:
        ConfigError: too few tokens for each process to have at least one; on all processes.
    """

    communicator: Communicator
    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < self.communicator.size:
            raise ConfigError(
                f"VocabularyShard: vocab_size must be at least {self.communicator.size}, the "
                f"number of processes, got {self.vocab_size}"
            )
        if (self.communicator.size - 1) * self.share >= self.vocab_size:
            raise ConfigError(
                f"VocabularyShard: {self.vocab_size} tokens in shards of {self.share} leave none "
                f"for the last of {self.communicator.size} processes; use fewer processes"
            )

    @property
    def share(self) -> int:
        """Tokens per process, fewer on the last; a multiple of 8, for vector accesses, if that
        leaves at least one token for the last process."""
        count = self.communicator.size
        share = -(-self.vocab_size // count)
        aligned = -(-share // _ALIGNMENT) * _ALIGNMENT
        return aligned if (count - 1) * aligned < self.vocab_size else share

    @property
    def first(self) -> int:
        """The first token of this process."""
        return min(self.communicator.rank * self.share, self.vocab_size)

    @property
    def size(self) -> int:
        """Number of tokens of this process."""
        return min(self.first + self.share, self.vocab_size) - self.first

    def part(self, whole: Array) -> Array:
        """A view of this process's rows of a full weight or bias [vocab_size or more, ...]."""
        return whole[self.first : self.first + self.size]

    def rows(self) -> RowShard:
        """The description of the shard for kernels."""
        processes = self.communicator
        return RowShard(self.first, self.vocab_size, processes.rank, processes.size)


def vocabulary_parallel_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    *,
    shard: VocabularyShard,
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """:func:`linear_distillation_loss` of heads that are sharded over processes: the same loss and
    gradients. Each of n processes does 1/n of the products and stores 1/n of the weights and
    logits.

    Args:
        hidden, teacher_hidden: of all rows, the same on every process, as in
            :func:`linear_distillation_loss`.
        weight, teacher_weight: `shard.size` rows of the full weights, `shard.part(whole)`.
        shard: this process's tokens.
        bias, teacher_bias, grad_weight, grad_bias: likewise, of this process's tokens.
        targets: tokens of the full vocabulary.
        Other arguments: as in :func:`linear_distillation_loss`, the same on every process.

    Returns:
        :class:`LinearKlResult`: losses and `grad_hidden` of the full vocabulary, bitwise identical
        on every process; `grad_weight` and `grad_bias` of this process's tokens.

    Raises:
        ArrayError, ConfigError: as :func:`linear_distillation_loss`; a weight whose number of rows
            is not `shard.size`.

    All processes must make these calls in the same order. Per row, each process sends 48 bytes (8
    more if the gradient needs a sum over the row: all divergences but the forward KL) and its
    float32 gradient of `hidden`, overlapped with kernels and GEMMs, without synchronising with the
    GPU. On the CPU the weights are gathered and every process computes the whole loss.
    """
    op = "vocabulary_parallel_distillation_loss"
    student, teacher = (
        Head(hidden, weight, bias),
        Head(teacher_hidden, teacher_weight, teacher_bias),
    )
    options = LossOptions(
        divergence, beta, temperature, scale_by_temperature_squared, soft_weight, hard_weight,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    rows = RowOptions(targets, token_weights, ignore_index, None, reduction, normalizer, grad_loss)
    head_options = HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes)
    student, teacher, head_options = student.adopt(op), teacher.adopt(op), head_options.adopt(op)
    rows = rows.adopt(op)
    options = options.check(op, rows.targets)
    on_gpu = runs_kernel(op, *student, *teacher, *head_options.arrays, *rows.arrays)
    _check(op, student, rows, head_options, shard, options.hard)
    teacher.check(op, "teacher_", math.prod(student.hidden.shape[:-1]))
    check_same_dtype(op, hidden=student.hidden, teacher_hidden=teacher.hidden)
    _check_size(op, "teacher_weight", teacher.weight, shard)
    if not on_gpu:
        whole = [_gathered(shard, array) for array in (*student[1:], *teacher[1:])]
        given = {**options._asdict(), **rows._asdict(), "vocab_size": shard.vocab_size}
        result = reference.linear_distillation_loss(
            student.hidden, whole[0], teacher.hidden, whole[2], bias=whole[1],
            teacher_bias=whole[3], **given,
        )  # fmt: skip
        grads = _own_part(shard, result.grad_weight, result.grad_bias, head_options)
        return LinearKlResult(*result[:4], *grads)
    check_array(op, "hidden", student.hidden, dtypes=KERNEL_DTYPES)
    flat = teacher.flat(shard.size)
    kind = (options.divergence, options.hard, options.transforms, rows.ignore_index)

    def row_launch(config: LinearLossConfig) -> RowLaunch:
        buffer = empty_logits(flat.hidden, config.chunk_tokens, shard.size)

        def phase(number: int, arrays: tuple[Any, ...]) -> Launch:
            student_logits, teacher_logits, chunk_targets, *_ = arrays
            launch: Launch = _divergence_rows.prepare_phase(
                number, shard.rows(), student_logits, teacher_logits, chunk_targets, arrays[-2],
                *kind,
            )  # fmt: skip
            return launch

        sharded_rows = _ShardedRows(shard.communicator, phase, options.divergence != "forward_kl")

        def of_chunk(chunk: slice, logits: Array) -> tuple[Any, tuple[Array, Array]]:
            return sharded_rows, (logits, flat.project(chunk, buffer))

        return of_chunk

    losses, gradients = evaluate_head(
        op, student, shard.size, rows, options, head_options, row_launch, tensors=2,
        communicator=shard.communicator,
    )  # fmt: skip
    return linear_result(losses, gradients, student.hidden)


def vocabulary_parallel_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    shard: VocabularyShard,
    bias: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearCrossEntropyResult:
    """:func:`linear_cross_entropy` of a head that is sharded over processes.

    Arguments, results and exchange as in :func:`vocabulary_parallel_distillation_loss`, without a
    teacher.
    """
    op = "vocabulary_parallel_cross_entropy"
    head = Head(hidden, weight, bias).adopt(op)
    head_options = HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes).adopt(op)
    rows = RowOptions(targets, token_weights, ignore_index, None, reduction, normalizer, grad_loss)
    rows = rows.adopt(op)
    options = _cross_entropy_rows.OPTIONS._replace(logit_scale=logit_scale, softcap=softcap)
    options = options.check(op, rows.targets)
    on_gpu = runs_kernel(op, *head, *head_options.arrays, *rows.arrays)
    _check(op, head, rows, head_options, shard, True)
    if not on_gpu:
        whole, whole_bias = (_gathered(shard, array) for array in head[1:])
        given = {**rows._asdict(), "vocab_size": shard.vocab_size, "bias": whole_bias}
        given |= {"logit_scale": logit_scale, "softcap": softcap}
        result = reference.linear_cross_entropy(head.hidden, whole, **given)
        grads = _own_part(shard, result.grad_weight, result.grad_bias, head_options)
        return LinearCrossEntropyResult(*result[:2], *grads)
    check_array(op, "hidden", head.hidden, dtypes=KERNEL_DTYPES)

    def phase(number: int, arrays: tuple[Any, ...]) -> Launch:
        launch: Launch = _cross_entropy_rows.prepare_phase(
            number, shard.rows(), arrays[0], arrays[1], arrays[-2], options.transforms, ignore_index
        )
        return launch

    sharded_rows = _ShardedRows(shard.communicator, phase, False)
    losses, gradients = evaluate_head(
        op, head, shard.size, rows, options, head_options,
        lambda config: lambda chunk, logits: (sharded_rows, (logits,)), soft=False,
        communicator=shard.communicator,
    )  # fmt: skip
    grad_hidden = gradients.grad_hidden.reshape(head.hidden.shape)
    return LinearCrossEntropyResult(
        losses.loss, grad_hidden, gradients.grad_weight, gradients.grad_bias
    )


class _ShardedRows:
    """Runs the phases of a loss over a chunk of rows, and the exchanges between them.

    phase: prepares the launch of a phase, given its number and the kernel's arrays, [rows, ...] or
    None; the last three are the gradient, the upstream gradient and the normalizer.

    Phases (row_shard.cuh): 1 statistics; 2 sums, if `centred`; 3 gradient.
    """

    def __init__(
        self,
        communicator: Communicator,
        phase: Callable[[int, tuple[Any, ...]], Launch],
        centred: bool,
    ) -> None:
        self._communicator, self._phase, self._centred = communicator, phase, centred

    def __call__(self, *arrays: Any, trailing_args: tuple[Any, ...]) -> None:
        logits, communicator = arrays[0], self._communicator
        halves = _halves(len(logits))
        parts = [tuple(_rows(array, half) for array in arrays) for half in halves]
        states = [empty(logits, (len(part[0]), _STATE_FLOATS), np.float32) for part in parts]
        gathered = [empty(state, (communicator.size, *state.shape)) for state in states]
        sums: list[Array | None] = [None] * len(parts)
        if self._centred:
            sums = [empty(logits, (len(part[0]), 2), np.float32) for part in parts]
        for number in (1, 2, 3) if self._centred else (1, 3):
            for index, part in enumerate(parts):
                if number == 1:
                    self._run(1, part, None, states[index], trailing_args)
                else:
                    self._run(number, part, gathered[index], sums[index], trailing_args)
                # Wait for the other half's exchange, which overlaps this launch.
                communicator.join()
                if number < 3:
                    with communicator.beside():
                        if number == 1:
                            communicator.all_gather(states[index], gathered[index])
                        else:
                            communicator.all_reduce(sums[index])
                if len(parts) == 1:
                    communicator.join()

    def _run(
        self,
        number: int,
        arrays: tuple[Any, ...],
        gathered: Any,
        own: Any,
        trailing_args: tuple[Any, ...],
    ) -> None:
        *inputs, grad, grad_loss, normalizer = arrays
        if number < 3:
            grad = None
        launch = self._phase(number, arrays)
        launch(*inputs, grad, grad_loss, normalizer, gathered, own, trailing_args=trailing_args)


def _halves(rows: int) -> list[slice]:
    if rows < 2 * _FEWEST_ROWS:
        return [slice(0, rows)]
    middle = rows // 2
    return [slice(0, middle), slice(middle, rows)]


def _rows(array: Any, rows: slice) -> Any:
    return array if array is None or array.ndim == 0 else array[rows]


def _check(
    op: str,
    head: Head,
    rows: RowOptions,
    head_options: HeadOptions,
    shard: VocabularyShard,
    hard: bool,
) -> None:
    if not isinstance(shard, VocabularyShard):
        raise ConfigError(f"{op}: shard must be a VocabularyShard, got {type(shard).__name__}")
    head.check(op, "", None)
    _check_size(op, "weight", head.weight, shard)
    rows.check(op, head.hidden.shape[:-1], shard.vocab_size if hard else None, required=hard)
    head_options.check(op, head)


def _check_size(op: str, name: str, weight: Array, shard: VocabularyShard) -> None:
    if weight.shape[0] != shard.size:
        raise ArrayShapeError(
            f"{op}: {name} must have {shard.size} rows, tokens {shard.first}.."
            f"{shard.first + shard.size - 1} of {shard.vocab_size} (shard.part(whole)), got "
            f"{weight.shape[0]}"
        )


def _gathered(shard: VocabularyShard, part: Array | None) -> Array | None:
    """The full weight or bias, gathered from all processes."""
    if part is None:
        return None
    padded = np.zeros((shard.share, *part.shape[1:]), part.dtype)
    padded[: len(part)] = part
    whole = shard.communicator.all_gather(padded).reshape(-1, *part.shape[1:])
    return whole[: shard.vocab_size]


def _own_part(
    shard: VocabularyShard, grad_weight: Array, grad_bias: Array | None, head_options: HeadOptions
) -> tuple[Array, Array | None]:
    """This process's part of the head's gradients, added to the given arrays if there are any."""
    found = []
    for grad, into in (
        (grad_weight, head_options.grad_weight),
        (grad_bias, head_options.grad_bias),
    ):
        part = None if grad is None else shard.part(grad)
        if part is not None and into is not None:
            into += part.astype(into.dtype)
            part = into
        found.append(part)
    return found[0], found[1]
