"""The output folder of a run.

settings.json              written first; a resumed run is checked against it
checkpoint.safetensors     the model in training, replaced at intervals
teacher.safetensors        finished models
student.safetensors
student-alone.safetensors
student-attention.safetensors, student-hidden.safetensors   with an ablation
report.json                written last; `cukit distill` also writes report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cukit.core.files import write_json
from cukit.distill.run.report import ABLATIONS, PHASES, phases_of
from cukit.distill.run.settings import DistillSettings
from cukit.distill.training.data import Corpus
from cukit.errors import ConfigError, DataError

SETTINGS = "settings.json"
CHECKPOINT = "checkpoint.safetensors"
REPORT = "report.json"

_ADAMW_BYTES = 12
"""Bytes of AdamW state per parameter: master copy and two moments in float32."""


def model_file(folder: Path, phase: str) -> Path:
    """The file of a finished model."""
    return folder / f"{phase}.safetensors"


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Locks `folder` against other runs within the block. Raises DataError if it is locked."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, not a folder")
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written to ({error.strerror})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{folder}: another run is writing there; wait for it, or use another folder"
            ) from None
        except OSError:
            pass  # a network file system without locks
        yield
    finally:
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):  # not empty: keep it
                folder.rmdir()


def is_finished(folder: Path, settings: DistillSettings, corpus: Corpus) -> bool:
    """Whether `folder` contains the result of a run with these settings on this text."""
    if not (folder / REPORT).exists():
        return False
    try:
        stored, _, facts = stored_run(folder)
    except DataError:  # not a run's folder, or damaged
        return False
    return not stored.changed(settings) and facts.get("fingerprint") == corpus.fingerprint


def start_run(
    folder: Path,
    settings: DistillSettings,
    corpus: Corpus,
    text: Sequence[Path],
    *,
    overwrite: bool = False,
) -> None:
    """Prepare the folder for a new run. Raises DataError, before anything is changed, if a run is
    there or the folder cannot be used."""
    own_files = [folder / name for name in (SETTINGS, CHECKPOINT, REPORT)]
    own_files += [model_file(folder, phase) for phase in (*PHASES, *ABLATIONS)]
    present = [file for file in own_files if file.exists()]
    if present and not overwrite:
        raise DataError(
            f"{folder}: already contains a run; --resume continues it, --overwrite replaces it"
        )
    ground = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not ground.is_dir() or not os.access(ground, os.W_OK | os.X_OK):
        raise DataError(f"{folder}: cannot be written to")
    _check_space(folder, ground, settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be created ({error.strerror})") from error
    try:
        for file in present:
            file.unlink()
    except OSError as error:
        raise DataError(f"{folder}: cannot be cleared ({error.strerror})") from error
    write_json(
        folder / SETTINGS,
        {
            "settings": settings.to_dict(),
            "text": [str(path.resolve()) for path in text],
            "corpus": corpus.facts(),
        },
    )


def stored_run(folder: Path) -> tuple[DistillSettings, list[Path], dict[str, Any]]:
    """Settings, text paths and corpus facts of the run in `folder`, or DataError."""
    path = folder / SETTINGS
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        settings = DistillSettings.from_dict(stored["settings"])
        return settings, [Path(text) for text in stored["text"]], dict(stored["corpus"])
    except FileNotFoundError:
        raise DataError(f"{folder}: contains no run to resume") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error})") from error


def check_resumable(
    folder: Path,
    stored: DistillSettings,
    requested: DistillSettings,
    stored_corpus: dict[str, Any],
    corpus: Corpus,
) -> None:
    """Raise ConfigError or DataError unless a resumed run would equal an uninterrupted one."""
    if changes := stored.changed(requested):
        raise ConfigError(
            f"{folder}: the run there has other settings: {', '.join(changes)}; "
            "omit them to resume, or use another folder"
        )
    if stored_corpus.get("fingerprint") != corpus.fingerprint:
        raise DataError(
            f"{folder}: the text ({corpus.description}) is not the one that the run started with"
        )


def _check_space(folder: Path, ground: Path, settings: DistillSettings) -> None:
    """Raise DataError unless there is space for two checkpoints (one is written before the other is
    replaced) and the finished models."""
    teacher, student = settings.teacher_config(), settings.student_config()
    itemsize = teacher.array_dtype.itemsize
    largest = max(teacher.num_parameters, student.num_parameters)
    needed = 2 * largest * (itemsize + _ADAMW_BYTES)
    students = len(phases_of(settings)) - 1
    needed += (teacher.num_parameters + students * student.num_parameters) * itemsize
    free = shutil.disk_usage(ground).free
    if free < needed:
        raise DataError(
            f"{folder}: the run needs {needed / 1e6:.0f} MB there, {free / 1e6:.0f} MB are free"
        )
