"""Trainer.fit: progress, checkpoints, and a stop in all processes at the same step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cukit.distill import (
    Checkpoints,
    ExponentialAverage,
    LanguageModelling,
    Progress,
    Trainer,
    Windows,
    save_checkpoint,
    stop_on_request,
)
from cukit.errors import ConfigError, CukitError
from tests.distributed.ranks import run_ranks
from tests.models.small import small_model

TEXT = np.frombuffer(b"how much wood would a woodchuck chuck " * 9, np.uint8) % 23


def trainer(seed: int = 0, comm: Any = None) -> Trainer:
    model = small_model(seed)
    windows = Windows(TEXT, batch=2, seq_len=8, seed=1, ranks=comm)
    average = ExponentialAverage(model, 0.9)
    return Trainer(LanguageModelling(model), windows, lr=1e-2, communicator=comm, average=average)


def test_progress_is_reported_periodically() -> None:
    lines: list[str] = []
    trainer().fit(7, [Progress(7, every=3, write=lines.append)])
    assert [line.split(",")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert "loss " in lines[0]
    assert "gradient norm" in lines[0]
    assert "tokens/s" in lines[1]


@pytest.mark.parametrize("killed_at", [1, 4, 5])
def test_a_run_killed_at_any_step_ends_in_the_same_bits(tmp_path: Path, killed_at: int) -> None:
    unbroken = trainer()
    unbroken.fit(6)
    checkpoints = Checkpoints(tmp_path / "c.safetensors", every=2)

    def kill(trainer: Trainer, statistics: Any) -> None:
        if statistics.step == killed_at:
            raise KeyboardInterrupt

    first = trainer()
    assert not checkpoints.restore(first)
    with pytest.raises(KeyboardInterrupt):
        first.fit(6, [checkpoints, kill])
    second = trainer(seed=4)
    if not checkpoints.restore(second):
        second = trainer()
    assert second.step == killed_at // 2 * 2
    second.fit(6, [checkpoints])
    for name, array in unbroken.state().items():
        assert array.tobytes() == second.state()[name].tobytes(), name


def test_a_checkpoint_that_cannot_be_written_fails_on_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "missing" / "checkpoint.safetensors"

    def work(comm: Any) -> str:
        with pytest.raises((OSError, MemoryError, CukitError)) as caught:
            save_checkpoint(path, trainer(comm=comm))
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first in second
    assert "rank 0 wrote no checkpoint" in second

    def silent(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("cukit.distill.training.checkpoint.write_arrays", silent)
    assert run_ranks(2, work)[1] == "rank 0 wrote no checkpoint: MemoryError: "


def test_all_processes_stop_at_the_same_step() -> None:
    def work(comm: Any) -> int:
        ours = trainer(comm=comm)
        stop = SimpleNamespace(requested=False)

        def request_stop(trainer: Trainer, statistics: Any) -> None:
            stop.requested = comm.rank == 1 and statistics.step == 3

        with pytest.raises(KeyboardInterrupt):
            ours.fit(9, [request_stop, stop_on_request(stop)])  # type: ignore[arg-type]
        return ours.step

    assert run_ranks(2, work) == [3, 3]


def test_every_must_be_at_least_one_step() -> None:
    for make in (lambda: Progress(5, every=0), lambda: Checkpoints(Path(), every=0)):
        with pytest.raises(ConfigError, match="every: expected 1 or more, got 0"):
            make()
