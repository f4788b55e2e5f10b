"""What `Trainer.fit` may call after every step: progress, checkpoints, a stop in good order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cukit.core.interrupts import StopRequest
from cukit.distill.checkpoint import restore_checkpoint, save_checkpoint
from cukit.distill.trainer import StepStatistics, Trainer
from cukit.errors import ConfigError


class Progress:
    """Tells step, statistics and tokens a second, every so many steps, from rank 0.

    Reading the statistics waits for the GPU; the steps between are not waited for.

    Args:
        steps: of the whole run.
        every: steps from one line to the next.
        write: what takes a line; by default stderr.
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
        """After a step."""
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
    """Saves the trainer every so many steps and at the end, and restores what is there.

    Args:
        path: of the file; replaced whole or not at all.
        every: steps from one to the next.
        extra: kept beside, see `save_checkpoint`.
    """

    def __init__(self, path: Path, *, every: int = 1000, **extra: Any) -> None:
        if every < 1:
            raise ConfigError(f"every: expected 1 or more, got {every}")
        self._path, self._every, self._extra = path, every, extra

    def restore(self, trainer: Trainer) -> bool:
        """Put the trainer where the file says, if there is one; whether there is."""
        if not self._path.exists():
            return False
        restore_checkpoint(self._path, trainer)
        return True

    def __call__(self, trainer: Trainer, statistics: StepStatistics) -> None:
        """After a step."""
        if statistics.step % self._every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Now."""
        save_checkpoint(self._path, trainer, **self._extra)


def stop_on_request(stop: StopRequest) -> Callable[[Trainer, StepStatistics], None]:
    """Raises KeyboardInterrupt after the step in which Ctrl-C came to any of the processes, so that
    all stop at the same one. With several processes it asks the others in every step."""

    def check(trainer: Trainer, statistics: StepStatistics) -> None:
        if b"1" in trainer.communicator.exchange(b"1" if stop.requested else b"0"):
            raise KeyboardInterrupt

    return check
