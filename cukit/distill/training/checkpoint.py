"""Training state on disk: everything the next step depends on, in one file, written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cukit.core.files import read_arrays, write_arrays
from cukit.distill.training.trainer import Trainer
from cukit.errors import DataError


def save_checkpoint(path: Path, trainer: Trainer, **extra: Any) -> None:
    """Save parameters, optimiser state and position of `trainer`, and `extra` with them.

    The position is only the step: batches and schedules are functions of the step (and of the seed,
    which is not stored). The model in the file can be read with `load_model`.

    With several processes, whose states are the same, rank 0 writes the file; the function returns
    on every process after the file is written.
    """
    failure: Exception | None = None
    if trainer.communicator.rank == 0:
        description = {
            "config": trainer.objective.model.config.to_dict(),
            "step": trainer.step,
            **extra,
        }
        try:
            write_arrays(path, trainer.state(), description)
        except Exception as error:
            failure = error
    (message, *_) = trainer.communicator.exchange(
        b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
    )
    if failure is not None:
        raise failure
    if message:
        raise DataError(f"rank 0 wrote no checkpoint: {message.decode()}")


def restore_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore `trainer` to the saved state, bit for bit; returns the description.

    Raises DataError if the file is missing or damaged, or contains a model of another shape; the
    trainer is then unchanged.
    """
    arrays, description = read_arrays(path)
    if description.get("config") != trainer.objective.model.config.to_dict():
        raise DataError(f"{path}: contains a model of another shape")
    step = description.get("step")
    if not isinstance(step, int) or step < 0:
        raise DataError(f"{path}: contains no step to resume from")
    trainer.restore(arrays, step, str(path))
    return description
