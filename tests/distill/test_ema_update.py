"""ema_update, and averages of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cukit.distill import (
    Cosine,
    Distiller,
    ExponentialAverage,
    LanguageModelling,
    Trainer,
    WarmupDecay,
    Windows,
    ema_update,
    restore_checkpoint,
    save_checkpoint,
)
from cukit.distill.optimizer._tensor_table import CHUNK
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError, DataError
from tests.contract import DTYPES, dtype_of, random, to_device, to_host
from tests.models.small import small_model

SHAPES = [(), (3, 5), (CHUNK + 1,), (0, 4)]
TEXT = np.frombuffer(b"she sells sea shells by the sea shore " * 9, np.uint8) % 23


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [None, "same", "bfloat16"])
def test_three_updates(device, rng, dtype, copies):
    start = [random(rng, shape, "float32") for shape in SHAPES]
    values = [[np.asarray(random(rng, shape, dtype)) for shape in SHAPES] for _ in range(3)]
    averages = list(to_device(device, *(np.array(each) for each in start)))
    into = None
    if copies is not None:
        kind = dtype_of(dtype if copies == "same" else copies)
        into = list(to_device(device, *(np.full(each.shape, 9, kind) for each in start)))
    exact = [np.asarray(each, np.float64) for each in start]
    for decay, each in zip((0.9, 0.5, 0.99), values, strict=True):
        ema_update(averages, to_device(device, *each), decay, into)
        exact = [
            decay * a + (1 - decay) * v.astype(np.float64) for a, v in zip(exact, each, strict=True)
        ]
    for index, average in enumerate(averages):
        np.testing.assert_allclose(to_host(average), exact[index], rtol=1e-5, atol=1e-6)
        if into is not None:
            rounded = to_host(average).astype(into[index].dtype)
            assert to_host(into[index]).tobytes() == rounded.tobytes()


def test_views_that_are_not_aligned(device, rng):
    start, value = random(rng, (103,), "float32"), random(rng, (103,), "bfloat16")
    average, placed = to_device(device, start.copy(), value)
    ema_update([average[1:]], [placed[1:]], 0.0)
    got = to_host(average)
    assert got[0] == start[0]
    np.testing.assert_allclose(got[1:], value[1:].astype(np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([np.ones(2, np.float32)], [np.ones(2, np.float32)], 1.5), ConfigError, "decay"),
        (([np.ones(2, np.float16)], [np.ones(2, np.float32)], 0.5), ArrayDtypeError, "averages"),
        (([np.ones(2, np.float32)], [np.ones(3, np.float32)], 0.5), ArrayShapeError, "values"),
        (([np.ones(2, np.float32)], [], 0.5), ArrayShapeError, "the same length"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"ema_update: .*{message}"):
        ema_update(*arguments)


def trainer(dtype: str = "float64", seed: int = 0) -> Trainer:
    """A student trained on its own average and on the text."""
    student = small_model(seed, dtype=dtype)
    average = ExponentialAverage(student, WarmupDecay(0.9))
    objective = Distiller(student, average.model, alpha=0.5)
    windows = Windows(TEXT, batch=2, seq_len=8, seed=1)
    return Trainer(objective, windows, lr=1e-2, average=average)


def test_a_teacher_follows_its_student():
    ours = trainer()
    expected = ours.objective.model.parameters.flat.copy()
    for step in range(5):
        ours.train_step()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * ours.objective.model.parameters.flat
    np.testing.assert_allclose(ours.average.model.parameters.flat, expected, rtol=1e-12)


def test_the_average_is_of_the_master_weights():
    ours = trainer("bfloat16")
    for _ in range(3):
        ours.train_step()
    assert ours.average.flat.dtype == np.float32
    rounded = ours.average.flat.astype(dtype_of("bfloat16"))
    assert ours.average.model.parameters.flat.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_resumed_run_has_the_same_average(tmp_path: Path, dtype: str):
    path = tmp_path / "c.safetensors"
    uninterrupted = trainer(dtype)
    for _ in range(2):
        uninterrupted.train_step()
    save_checkpoint(path, uninterrupted)
    resumed = trainer(dtype, seed=5)
    restore_checkpoint(path, resumed)
    for each in (uninterrupted, resumed):
        each.train_step()
    for name, array in uninterrupted.state().items():
        assert array.tobytes() == resumed.state()[name].tobytes(), name
    assert (
        uninterrupted.average.model.parameters.flat.tobytes()
        == resumed.average.model.parameters.flat.tobytes()
    )
    plain = Trainer(LanguageModelling(small_model(dtype=dtype)), uninterrupted.windows, lr=1e-2)
    save_checkpoint(path, plain)
    with pytest.raises(DataError, match="average is missing"):
        restore_checkpoint(path, resumed)


def test_errors_name_the_average():
    average = ExponentialAverage(small_model(num_layers=1))
    windows = Windows(TEXT, batch=2, seq_len=8, seed=1)
    with pytest.raises(ConfigError, match="average: its model has another shape"):
        Trainer(LanguageModelling(small_model()), windows, lr=1e-2, average=average)
    bad = ExponentialAverage(small_model(), Cosine(1.5, 1, 4))
    ours = Trainer(LanguageModelling(small_model()), windows, lr=1e-2, average=bad)
    with pytest.raises(ConfigError, match=r"step 0: decay must be in 0\.\.1"):
        ours.train_step()
