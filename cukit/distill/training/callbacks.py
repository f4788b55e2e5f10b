"""Callbacks of `Trainer.fit`: progress, checkpoints, a clean stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cukit.core.interrupts import StopRequest
from cukit.distill.training.checkpoint import restore_checkpoint, save_checkpoint
from cukit.distill.training.trainer import StepStatistics, Trainer
from cukit.errors import ConfigError


class Progress:
    """Writes step, statistics and tokens per second on rank 0, every `every` steps.

    Reading the statistics waits for the GPU; the steps in between do not.

    Args:
        steps: steps of the whole run.
        every: steps between lines.
        write: function that receives each line; by default writes to stderr.
    """

    def __init__(
        self, steps: int, *, every: int = 10, write: Callable[[str], Any] | None = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"every: expected 1 or more, got {every}")
        self._steps, self._every = steps, every
        self._write = write or _to_stderr
        self._since: tuple[float, int] | None = None

    def __call__(self, trainer: Trainer, statistics: StepStatistics) -> None:
        """Write a line if one is due after this step."""
        step = statistics.step
        if step % self._every and step != self._steps:
            return
        values = statistics.read()
        now = time.perf_counter()
        words = [f"step {step}/{self._steps}"]
        words += [f"{name} {value:.4g}" for name, value in values.items()]
        if self._since is not None:
            seconds, steps = now - self._since[0], step - self._since[1]
            words.append(f"{steps * trainer.tokens_per_step / seconds:,.0f} tokens/s")
        self._since = now, step
        if trainer.communicator.rank == 0:
            self._write(", ".join(words))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Checkpoints:
    """Saves the trainer every `every` steps, and restores it; call `save` for a last checkpoint.

    Args:
        path: the file, replaced atomically.
        every: steps between checkpoints.
        extra: stored with the state, see `save_checkpoint`.
    """

    def __init__(self, path: Path, *, every: int = 1000, **extra: Any) -> None:
        if every < 1:
            raise ConfigError(f"every: expected 1 or more, got {every}")
        self._path, self._every, self._extra = path, every, extra

    def restore(self, trainer: Trainer) -> bool:
        """Restore the trainer from the file; returns False if there is none."""
        if not self._path.exists():
            return False
        restore_checkpoint(self._path, trainer)
        return True

    def __call__(self, trainer: Trainer, statistics: StepStatistics) -> None:
        """Save the trainer if a checkpoint is due after this step."""
        if statistics.step % self._every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save the trainer now."""
        save_checkpoint(self._path, trainer, **self._extra)


def stop_on_request(stop: StopRequest) -> Callable[[Trainer, StepStatistics], None]:
    """A callback that raises KeyboardInterrupt after the step in which any process received Ctrl-C,
    so that all stop after the same step. Several processes exchange a flag in every step."""

    def check(trainer: Trainer, statistics: StepStatistics) -> None:
        if b"1" in trainer.communicator.exchange(b"1" if stop.requested else b"0"):
            raise KeyboardInterrupt

    return check
