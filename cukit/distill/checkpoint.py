"""Training state on disk: everything the next step depends on, in one file, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cukit.core.files import read_arrays, write_arrays
from cukit.distill.trainer import Trainer
from cukit.errors import DataError


def save_checkpoint(path: Path, trainer: Trainer, **extra: Any) -> None:
    """Parameters, optimizer state and position of `trainer`; `extra` is kept beside them.

    The position is the step alone: batches and schedules are functions of it (and of the seed,
    which is part of the settings). The model in the file can be read with `load_model`.

    Of several processes, which all hold the same, rank 0 writes; all return when it has.
    """
    communicator = trainer.communicator
    if communicator.rank:
        communicator.barrier()
        return
    description = {
        "config": trainer.objective.model.config.to_dict(),
        "step": trainer.step,
        **extra,
    }
    write_arrays(path, trainer.state(), description)
    communicator.barrier()


def restore_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put `trainer` where it was when `path` was saved, bit for bit; returns the description.

    Raises DataError, with the trainer unchanged, if the file is absent, damaged or another model's.
    """
    arrays, description = read_arrays(path)
    if description.get("config") != trainer.objective.model.config.to_dict():
        raise DataError(f"{path}: holds a model of another shape")
    step = description.get("step")
    if not isinstance(step, int) or step < 0:
        raise DataError(f"{path}: names no step to go on from")
    trainer.restore(arrays, step, str(path))
    return description
