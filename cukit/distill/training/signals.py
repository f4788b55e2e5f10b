"""Signals of a recorded teacher, which does not run while its student trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cukit.core.arrays import Array
from cukit.errors import ConfigError


class TeacherSignals(NamedTuple):
    """A teacher's k likeliest tokens at every position of a batch."""

    log_probs: Array
    """float32 [batch, seq_len, k]: log of softmax(teacher / T) over the whole vocabulary."""
    ids: Array
    """int32 [batch, seq_len, k]: the ids of these tokens, likeliest first."""


@dataclass(frozen=True)
class OfflineTeacher:
    """The teacher argument of `Distiller` if the batches contain the teacher's signals.

    Attributes:
        temperature: of the recording; the distillation must use the same.
        vocab_size: of the teacher.
        tail: treatment of the teacher's other tokens, "bucket" or "renormalise"; see
            :func:`topk_distillation_loss`.
    """

    temperature: float
    vocab_size: int
    tail: str = "bucket"

    def check(self, temperature: float, step: int) -> None:
        """Raises ConfigError unless the signals were recorded at this temperature."""
        if temperature != self.temperature:
            raise ConfigError(
                f"step {step}: temperature must be {self.temperature}, that of the teacher's "
                f"recording, got {temperature}"
            )
