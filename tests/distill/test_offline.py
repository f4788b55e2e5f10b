"""A recorded teacher: recording, resuming, prefetching, and distillation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.core.files import read_arrays
from cukit.distill import (
    Distiller,
    HiddenStateTerm,
    LanguageModelling,
    OfflineBatches,
    OfflineTeacher,
    SignalWriter,
    TeacherSignals,
    Trainer,
    Windows,
    record_teacher,
    restore_checkpoint,
    save_checkpoint,
)
from cukit.distributed import Ranks
from cukit.errors import ArrayShapeError, ConfigError, DataError
from tests.contract import to_host
from tests.distributed.ranks import run_ranks
from tests.models.small import CPU_AND_GPU, small_model

TEXT = np.frombuffer(b"peter piper picked a peck of pickled peppers " * 9, np.uint8) % 23
TEACHER = {"hidden_size": 24, "num_layers": 3, "num_heads_q": 2}
VOCAB = 23


def windows(batch: int = 2, xp: Any = np) -> Windows:
    return Windows(TEXT, batch=batch, seq_len=8, seed=3, xp=xp)


def record(folder: Path, steps: int = 4, **options: Any) -> Any:
    teacher = small_model(1, **TEACHER)
    options = {"k": VOCAB, "temperature": 2.0, "batches_per_shard": 3, "accumulate": 2} | options
    record_teacher(folder, teacher, windows(), steps=steps, **options)
    return teacher


def trainer(objective: Any, batches: Any, **options: Any) -> Trainer:
    return Trainer(objective, batches, lr=1e-2, accumulate=2, **options)


def test_a_recording_of_all_tokens_equals_the_teacher(tmp_path: Path) -> None:
    teacher = record(tmp_path)
    options: dict[str, Any] = {"alpha": 0.7, "temperature": 2.0}
    online = trainer(Distiller(small_model(), teacher, **options), windows())
    batches = OfflineBatches(tmp_path, accumulate=2)
    offline = trainer(Distiller(small_model(), batches.teacher(), **options), batches)
    assert batches.num_batches == 8
    assert batches.every_target_counts
    for _ in range(4):
        expected = online.train_step().read()
        assert offline.train_step().read() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(
        offline.objective.model.parameters.flat, online.objective.model.parameters.flat, rtol=1e-3,
        atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_ordered_and_repeatable_from_any_step(tmp_path: Path, prefetch: int) -> None:
    record(tmp_path, k=4)
    batches = OfflineBatches(tmp_path, accumulate=2, prefetch=prefetch)
    for step in (0, 1, 2, 3, 1, 4, 5, 7):
        for part in range(2):
            tokens, targets, signals = batches(step, part)
            expected = windows()(step % 4, part)
            assert np.array_equal(tokens, expected[0])
            assert np.array_equal(targets, expected[1])
            assert signals.ids.shape == signals.log_probs.shape == (2, 8, 4)
            assert signals.log_probs.dtype == np.float32


def test_a_killed_recording_resumes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    record(whole, k=5)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(killed, k=5, progress=stop)
    seen: list[int] = []
    record(killed, k=5, progress=lambda done, total: seen.append(done))
    assert seen[0] == 4  # after the one complete shard of three batches
    assert sorted(path.name for path in killed.iterdir() if not path.name.startswith(".")) == [
        "index.json", "signals-000000.safetensors", "signals-000001.safetensors",
        "signals-000002.safetensors",
    ]  # fmt: skip
    assert (killed / "index.json").read_bytes() == (whole / "index.json").read_bytes()
    for path in whole.glob("*.safetensors"):
        arrays, description = read_arrays(path)
        again, same = read_arrays(killed / path.name)
        assert description == same
        assert all(array.tobytes() == again[name].tobytes() for name, array in arrays.items())
    record(killed, steps=5, k=5)  # a longer run begins a new shard
    assert OfflineBatches(killed).num_batches == 10


def test_ranks_share_the_batches(tmp_path: Path) -> None:
    record(tmp_path, k=4, accumulate=1)
    alone = OfflineBatches(tmp_path)
    for rank in range(2):
        batches = OfflineBatches(tmp_path, ranks=Ranks(rank, 2))
        own = OfflineBatches(tmp_path, ranks=Ranks(rank, 2), shared=False)
        for step in range(2):
            assert np.array_equal(batches(step)[0], alone(2 * step + rank)[0])
            assert np.array_equal(own(step)[0], alone(step)[0])


def test_two_processes_train_from_a_folder(tmp_path: Path) -> None:
    record(tmp_path, k=4)

    def work(comm: Any) -> Any:
        batches = OfflineBatches(tmp_path, accumulate=2, ranks=comm)
        objective = Distiller(small_model(comm.rank), batches.teacher(), temperature=2.0)
        ours = trainer(objective, batches, communicator=comm)
        return [ours.train_step().read() for _ in range(2)]

    first, second = run_ranks(2, work)
    assert first == second


def test_a_resumed_run_continues_reading(tmp_path: Path) -> None:
    record(tmp_path, k=4)
    path = tmp_path / "c.safetensors"

    def fresh(seed: int) -> Trainer:
        batches = OfflineBatches(tmp_path, accumulate=2)
        objective = Distiller(small_model(seed), batches.teacher(), temperature=2.0)
        return trainer(objective, batches)

    unbroken = fresh(0)
    for step in range(5):
        if step == 3:
            save_checkpoint(path, unbroken)
        unbroken.train_step()
    resumed = fresh(9)
    restore_checkpoint(path, resumed)
    for _ in range(2):
        resumed.train_step()
    for name, array in unbroken.state().items():
        assert array.tobytes() == resumed.state()[name].tobytes(), name


def test_ignored_targets_are_counted_for_every_objective(tmp_path: Path) -> None:
    class Ignoring(Windows):
        def __call__(self, step: int, part: int = 0) -> tuple[Any, Any]:
            tokens, targets = super().__call__(step, part)
            return tokens, np.where(targets % 4 == 0, -100, targets)

    source = Ignoring(TEXT, batch=2, seq_len=8, seed=3)
    teacher = small_model(1, **TEACHER)
    record_teacher(tmp_path, teacher, source, steps=2, k=3, dtype="float16")
    batches = OfflineBatches(tmp_path)
    assert not batches.every_target_counts
    ours = Trainer(LanguageModelling(small_model()), batches, lr=1e-2, workers=2)
    loss = ours.train_step().read()["loss"]
    assert 0 < loss < 10


def test_workers_split_the_signals(tmp_path: Path) -> None:
    record(tmp_path, k=6)
    losses = []
    for workers in (1, 2):
        batches = OfflineBatches(tmp_path, accumulate=2)
        objective = Distiller(small_model(), batches.teacher(), temperature=2.0)
        losses.append(trainer(objective, batches, workers=workers).train_step().read())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_errors_name_the_mismatch(tmp_path: Path) -> None:
    folder = tmp_path / "signals"
    with pytest.raises(DataError, match=r"index\.json: no such file"):
        OfflineBatches(folder)
    teacher = record(folder, k=4)
    with pytest.raises(DataError, match="contains signals with k=4, not 5"):
        record(folder, k=5)
    with pytest.raises(DataError, match="contains signals with source=parameters of crc32"):
        record_teacher(folder, small_model(2, **TEACHER), windows(), steps=4, k=4, temperature=2.0)
    source = json.loads((folder / "index.json").read_text())["source"]
    writer: dict[str, Any] = {"k": 4, "temperature": 2.0, "vocab_size": VOCAB, "source": source}
    writer |= {"batch": 2, "seq_len": 8}
    held = SignalWriter(folder, **writer)
    with pytest.raises(DataError, match="another run is writing there"):
        SignalWriter(folder, **writer)
    signals = TeacherSignals(np.zeros((2, 8, 3), np.float32), np.zeros((2, 8, 3), np.int32))
    with pytest.raises(DataError, match=r"log_probs must have shape \(2, 8, 4\)"):
        held.write(*windows()(0), signals)
    del held
    batches = OfflineBatches(folder, accumulate=2)
    for options, message in (
        ({"divergence": "jsd"}, "divergence: must be 'forward_kl' with an offline teacher"),
        ({"teacher_softcap": 3.0}, "teacher_softcap"),
        ({"terms": [HiddenStateTerm({1: 1}, small_model().config, teacher.config)]}, "terms: an"),
    ):
        with pytest.raises(ConfigError, match=message):
            Distiller(small_model(), batches.teacher(), **options)
    with pytest.raises(ArrayShapeError, match="teacher has 23"):
        Distiller(small_model(vocab_size=29), batches.teacher())
    with pytest.raises(ConfigError, match=r"temperature must be 2\.0"):
        trainer(Distiller(small_model(), batches.teacher()), batches).train_step()
    objective = Distiller(small_model(), OfflineTeacher(1.0, VOCAB))
    with pytest.raises(ConfigError, match="needs OfflineBatches"):
        trainer(objective, windows()).train_step()
    shard = folder / "signals-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(DataError, match="signals-000001"):
        OfflineBatches(folder, prefetch=0)(3)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"format": "other"}))
    with pytest.raises(DataError, match="is not an index"):
        OfflineBatches(folder)


@CPU_AND_GPU
def test_on_any_device(device: str, tmp_path: Path) -> None:
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    dtype = "bfloat16" if device == "gpu" else "float32"
    sizes = {"num_heads_q": 2, "num_heads_kv": 1, "head_dim": 16, "hidden_size": 32, "dtype": dtype}
    teacher = small_model(1, xp, **sizes)
    record_teacher(tmp_path, teacher, windows(xp=xp), steps=6, k=4, batches_per_shard=2)
    batches = OfflineBatches(tmp_path, xp=xp)
    for step in range(9):
        tokens, _, signals = batches(step)
        assert np.array_equal(to_host(tokens), windows()(step % 6)[0])
        log_probs = to_host(signals.log_probs)
        assert (np.diff(log_probs, axis=-1) <= 0).all()
        assert (np.exp(log_probs).sum(axis=-1) <= 1 + 1e-5).all()
    objective = Distiller(small_model(0, xp, **sizes), batches.teacher("renormalise"))
    ours = Trainer(objective, batches, lr=1e-2)
    losses = [ours.train_step().read()["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]
