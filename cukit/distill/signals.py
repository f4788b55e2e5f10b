"""What is known of a teacher that does not run beside its student."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cukit.core.arrays import Array
from cukit.errors import ConfigError


class TeacherSignals(NamedTuple):
    """What a teacher says of a batch."""

    log_probs: Array
    """float32 [batch, seq_len, k]: of softmax(teacher / T) over the whole vocabulary."""
    ids: Array
    """int32 [batch, seq_len, k]: the tokens they belong to, likeliest first."""


@dataclass(frozen=True)
class OfflineTeacher:
    """What `Distiller` takes for a teacher whose signals come with the batches.

    Attributes:
        temperature: at which they were recorded, which the distillation must have too.
        vocab_size: of the teacher.
        tail: what becomes of the teacher's other tokens, "bucket" or "renormalise"; see
            :func:`topk_distillation_loss`.
    """

    temperature: float
    vocab_size: int
    tail: str = "bucket"

    def check(self, temperature: float, step: int) -> None:
        """Raises ConfigError unless the signals were recorded at this temperature."""
        if temperature != self.temperature:
            raise ConfigError(
                f"step {step}: temperature must be {self.temperature}, at which the teacher's "
                f"signals were recorded, got {temperature}"
            )
