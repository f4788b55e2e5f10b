"""Options of the losses on logits: checks, and packing into the kernels' parameter structs."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import INDEX_DTYPES, Array, adopt, check_array
from cukit.core.kernel import by_value, launch_plan
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import (
    adopt_scalars,
    arrays_among,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_real,
    check_scalar,
    scalar_dtypes,
)
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.reference.divergences import divergence_at

DIVERGENCES = (
    "forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation",
)  # fmt: skip
"""In the order of the kernel macro DIVERGENCE."""

REDUCTIONS = ("mean", "tokens", "sum", "none")

_MEANS = ("mean", "tokens")

_STRUCTS = parameter_structs("distill/parameters.cuh")


class LossOptions(NamedTuple):
    """Options of the loss soft_weight * divergence + hard_weight * cross-entropy on scaled and
    capped logits. The temperature applies to the divergence only."""

    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None

    @property
    def square(self) -> float:
        """The factor on the divergence and its gradient: T^2 or 1."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @property
    def hard(self) -> bool:
        return self.hard_weight != 0.0

    @property
    def transforms(self) -> bool:
        """Whether logits are scaled or capped."""
        return self[6:] != (1.0, None, 1.0, None)

    def check(self, op: str, targets: Array | None) -> LossOptions:
        """Raises ConfigError for a value outside its range; returns the options with the divergence
        that `divergence_at` gives for `beta`."""
        check_choice(op, "divergence", self.divergence, DIVERGENCES)
        check_flag(op, "scale_by_temperature_squared", self.scale_by_temperature_squared)
        check_number(op, "temperature", self.temperature, above=0)
        for name in ("soft_weight", "hard_weight"):
            check_number(op, name, getattr(self, name))
        for name in ("logit_scale", "teacher_logit_scale"):
            check_number(op, name, getattr(self, name), above=0)
        for name in ("softcap", "teacher_softcap"):
            if getattr(self, name) is not None:
                check_number(op, name, getattr(self, name), above=0)
        if self.hard and targets is None:
            raise ConfigError(f"{op}: hard_weight={self.hard_weight} needs targets")
        check_number(op, "beta", self.beta, least=0, most=1)
        if self.divergence.startswith("skewed") and self.beta == 1:
            raise ConfigError(f"{op}: beta must be below 1 for {self.divergence}, got {self.beta}")
        return self._replace(divergence=divergence_at(self.divergence, self.beta))

    def of_student(self) -> dict[str, Any]:
        """The options without those of a teacher's logits."""
        known = self._asdict()
        for name in ("divergence", "beta", "teacher_logit_scale", "teacher_softcap"):
            del known[name]
        return known


class RowOptions(NamedTuple):
    """Targets, weights and columns of the rows, and the reduction of their losses."""

    targets: Array | None = None
    token_weights: Array | None = None
    ignore_index: int = -100
    vocab_size: int | None = None
    reduction: str = "mean"
    normalizer: Any = None
    grad_loss: Any = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The options that are arrays."""
        return arrays_among(self.targets, self.token_weights, self.normalizer, self.grad_loss)

    def adopt(self, op: str) -> RowOptions:
        """These options with other libraries' arrays adopted; checks the scalar options."""
        targets, token_weights = adopt(op, self.targets, self.token_weights)
        normalizer, grad_loss = adopt_scalars(op, self.normalizer, self.grad_loss)
        rows = self._replace(
            targets=targets, token_weights=token_weights, normalizer=normalizer,
            grad_loss=grad_loss,
        )  # fmt: skip
        rows._check_scalars(op)
        return rows

    def _check_scalars(self, op: str) -> None:
        if isinstance(self.grad_loss, numbers.Real):
            check_real(op, "grad_loss", self.grad_loss)
        check_choice(op, "reduction", self.reduction, REDUCTIONS)
        check_integer(op, "ignore_index", self.ignore_index, least=-(1 << 31), most=(1 << 31) - 1)
        if self.vocab_size is not None:
            check_integer(op, "vocab_size", self.vocab_size, least=1)
        if self.normalizer is None:
            return
        if self.reduction not in _MEANS:
            raise ConfigError(
                f"{op}: normalizer needs reduction='mean' or 'tokens', got {self.reduction!r}"
            )
        check_scalar(op, "normalizer", self.normalizer)
        if isinstance(self.normalizer, numbers.Real) and not float(self.normalizer) > 0:
            raise ConfigError(f"{op}: normalizer must be above 0, got {self.normalizer}")

    def check(
        self, op: str, row_shape: tuple[int, ...], classes: int | None, *, required: bool = False
    ) -> None:
        """Raises ArrayError unless the arrays fit rows of this shape.

        classes: number of classes if targets are class indices, None if they only mark ignored
        rows. required: targets must be given. Arrays on the GPU are not read: the kernel makes a
        row with an invalid target NaN.
        """
        if self.targets is not None or required:
            check_array(op, "targets", self.targets, dtypes=INDEX_DTYPES, shape=row_shape)
        if classes is not None and isinstance(self.targets, np.ndarray):
            targets = self.targets
            bad = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
            if bad.any():
                raise ArrayError(
                    f"{op}: targets must be in 0..{classes - 1} or be ignore_index "
                    f"({self.ignore_index}), got {targets[bad].flat[0]}"
                )
        if self.token_weights is not None:
            weights = self.token_weights
            dtypes = scalar_dtypes(weights)
            check_array(op, "token_weights", weights, dtypes=dtypes, shape=row_shape)
            if isinstance(weights, np.ndarray) and not (weights >= 0).all():
                bad = ~(weights >= 0)
                raise ArrayError(
                    f"{op}: token_weights must be 0 or more, got {weights[bad].flat[0]}"
                )
        if self.grad_loss is not None and not isinstance(self.grad_loss, numbers.Real):
            shape = (math.prod(row_shape),) if self.reduction == "none" else ()
            dtypes = scalar_dtypes(self.grad_loss)
            check_array(op, "grad_loss", self.grad_loss, dtypes=dtypes, shape=shape)

    def upstream(self) -> tuple[float, Array | None]:
        """The upstream gradient as (number, None) or (1.0, array)."""
        if self.grad_loss is None:
            return 1.0, None
        if isinstance(self.grad_loss, numbers.Real):
            return float(self.grad_loss), None
        return 1.0, self.grad_loss

    def part(self, rows: slice) -> tuple[Array | None, Array | None]:
        """Targets and upstream gradient of the given rows, as arrays."""
        return part_of(self.targets, rows), part_of(self.upstream()[1], rows)


def part_of(array: Array | None, rows: slice) -> Array | None:
    """The given rows of an array; scalars and None are returned unchanged."""
    return array if array is None or array.ndim == 0 else array.reshape(-1)[rows]


def common_vocabulary(op: str, vocab_size: int | None, **sizes: int) -> int:
    """The number of columns in use, given those of each argument.

    Raises ArrayShapeError if the sizes differ and `vocab_size` is None, or if `vocab_size` exceeds
    one of them.
    """
    fewest = min(sizes.values())
    if vocab_size is None and len(set(sizes.values())) > 1:
        found = " and ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ArrayShapeError(
            f"{op}: vocabularies must be the same, but {found} tokens; if those from {fewest} on "
            f"are padding, pass vocab_size={fewest}, else first map one vocabulary to the other"
        )
    if vocab_size is None:
        return fewest
    for name, size in sizes.items():
        if vocab_size > size:
            raise ArrayShapeError(
                f"{op}: vocab_size must be at most {size}, the size of {name}, got {vocab_size}"
            )
    return int(vocab_size)


def pack_rows(
    rows: RowOptions,
    columns: int,
    *,
    width: int,
    row_stride: int,
    teacher_stride: int = 0,
    grad_loss: Array | None = None,
) -> Any:
    """The kernels' struct LogitRows; strides in elements."""
    return _STRUCTS["LogitRows"].pack(
        ignore_index=rows.ignore_index,
        row_stride=row_stride,
        teacher_stride=teacher_stride,
        columns=columns,
        width=width,
        grad_loss_stride=1 if grad_loss is not None and grad_loss.ndim else 0,
    )


class RowShard(NamedTuple):
    """This process's shard of each row, which starts at column `first` of `columns`."""

    first: int
    columns: int
    rank: int
    size: int

    def pack(self, rows: int) -> Any:
        """The kernels' struct RowShard, for a launch over `rows` rows."""
        return _STRUCTS["RowShard"].pack(
            first_column=self.first, columns=self.columns, rows=rows, rank=self.rank, size=self.size
        )


@launch_plan
def factors_of(options: LossOptions, factor: float) -> Any:
    """The kernels' struct LossFactors: the factors on logits, losses and gradients."""
    soft_factor = options.soft_weight * options.square * factor
    return by_value(
        _STRUCTS["LossFactors"].pack(
            inverse_temperature=1.0 / options.temperature,
            soft_loss=options.square,
            soft_gradient=soft_factor / options.temperature,
            hard_gradient=options.hard_weight * factor,
            beta=options.beta,
            student=_transform(options.logit_scale, options.softcap),
            teacher=_transform(options.teacher_logit_scale, options.teacher_softcap),
        )
    )


def _transform(scale: float, softcap: float | None) -> tuple[float, float, float]:
    return (scale, 0.0, 0.0) if softcap is None else (scale, softcap, 1.0 / softcap)
