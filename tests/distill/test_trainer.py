"""The training loop: accumulation equals a larger batch, clipping works, a resumed run equals an
uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.distill.training.checkpoint import restore_checkpoint, save_checkpoint
from cukit.distill.training.data import Windows
from cukit.distill.training.distiller import Distiller, LanguageModelling, Objective
from cukit.distill.training.schedule import WarmupCosine
from cukit.distill.training.terms import HiddenStateTerm
from cukit.distill.training.trainer import Trainer
from cukit.errors import ConfigError, DataError
from cukit.models import Transformer, TransformerConfig, load_model
from tests.contract import array_module
from tests.models.small import CPU_AND_GPU

TEXT = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)


def config(device: str = "cpu", **changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads_q": 2,
        "num_heads_kv": 1, "head_dim": 16, "intermediate_size": 48, "max_positions": 16,
        "dtype": "bfloat16" if device == "gpu" else "float32",
    }  # fmt: skip
    return TransformerConfig(**sizes | changes)


def make_trainer(device: str = "cpu", *, batch: int = 3, distilled: bool = False,
                 **options: Any) -> Trainer:  # fmt: skip
    xp = array_module(device)
    student = Transformer.initialise(config(device), seed=1, xp=xp)
    objective: Objective = LanguageModelling(student)
    if distilled:
        teacher = Transformer.initialise(config(device, num_layers=3), seed=2, xp=xp)
        term = HiddenStateTerm({2: 3}, student.config, teacher.config, weight=0.1, xp=xp)
        objective = Distiller(student, teacher, alpha=0.7, terms=[term])
    windows = Windows(TEXT, batch=batch, seq_len=16, seed=5, xp=xp)
    return Trainer(objective, windows, **{"lr": WarmupCosine(1e-2, 2, 12)} | options)


def bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.state().items()}


@CPU_AND_GPU
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(device: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    uninterrupted = make_trainer(device, distilled=True, accumulate=2)
    for _ in range(7):
        uninterrupted.train_step()

    first = make_trainer(device, distilled=True, accumulate=2)
    for _ in range(4):
        first.train_step()
    save_checkpoint(path, first, phase="student")
    second = make_trainer(device, distilled=True, accumulate=2)
    assert restore_checkpoint(path, second)["phase"] == "student"
    assert second.step == 4
    assert bits(second) == bits(first)
    for _ in range(3):
        second.train_step()
    assert bits(second) == bits(uninterrupted)


def test_state_covers_parameters_moments_and_terms() -> None:
    trainer = make_trainer(distilled=True)
    trainer.train_step()
    names = set(trainer.state())
    assert set(trainer.objective.model.parameters) < names
    assert "terms.0" in names
    assert sum("exp_avg_sq" in name for name in names) == 3  # two groups, and the projection


def test_a_checkpoint_can_be_loaded_as_a_model(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train_step()
    save_checkpoint(tmp_path / "c.safetensors", trainer)
    model = load_model(tmp_path / "c.safetensors")
    expected = trainer.objective.model.parameters.flat
    assert model.parameters.flat.tobytes() == expected.tobytes()


def test_invalid_checkpoints_change_nothing(tmp_path: Path) -> None:
    trainer = make_trainer()
    before = bits(trainer)
    path = tmp_path / "c.safetensors"
    other = Trainer(
        LanguageModelling(Transformer.initialise(config(num_layers=1), seed=1)),
        trainer.windows,
        lr=1e-3,
    )
    save_checkpoint(path, other)
    with pytest.raises(DataError, match="another shape"):
        restore_checkpoint(path, trainer)
    save_checkpoint(path, make_trainer(), phase="x")
    with pytest.raises(DataError, match="missing"):
        restore_checkpoint(path, make_trainer(distilled=True))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a readable safetensors"):
        restore_checkpoint(path, trainer)
    assert bits(trainer) == before
    assert trainer.step == 0


class FixedWindows(Windows):
    """Four windows, as one batch of four or as two of two."""

    def __call__(self, step: int, part: int = 0) -> tuple[Any, Any]:
        tokens, targets = Windows(TEXT, batch=4, seq_len=16, seed=9)(0)
        rows = slice(part * self.batch, (part + 1) * self.batch)
        return np.ascontiguousarray(tokens[rows]), np.ascontiguousarray(targets[rows])


def test_accumulation_equals_a_larger_batch() -> None:
    results = []
    for batch, accumulate in ((4, 1), (2, 2)):
        model = Transformer.initialise(config(dtype="float64"), seed=1)
        trainer = Trainer(
            LanguageModelling(model),
            FixedWindows(TEXT, batch=batch, seq_len=16, seed=9),
            lr=1e-2,
            accumulate=accumulate,
        )
        assert trainer.tokens_per_step == 64
        loss = trainer.train_step().read()["loss"]
        results.append((loss, model.parameters.flat))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6, atol=1e-9)


def test_gradients_are_clipped_to_the_norm() -> None:
    """The norms are those of the first moments: Adam's first update does not depend on the norm."""
    norms = []
    for limit in (1e9, 1e-3):
        trainer = make_trainer(max_grad_norm=limit, weight_decay=0.0, lr=1e-3)
        norm = trainer.train_step().read()["gradient norm"]
        moments = trainer.state()["optimizer.0.exp_avg"].astype(np.float64)
        others = trainer.state()["optimizer.1.exp_avg"].astype(np.float64)
        norms.append(np.sqrt((moments**2).sum() + (others**2).sum()) / 0.1)
    assert norms[0] == pytest.approx(norm, rel=1e-4)
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_only_matrices_decay() -> None:
    trainer = make_trainer(lr=0.5, weight_decay=1.0, max_grad_norm=1e-30)
    trainer.train_step()
    parameters = trainer.objective.model.parameters
    fresh = make_trainer().objective.model.parameters
    for name, array in parameters.items():
        expected = fresh[name] * (0.5 if array.ndim > 1 else 1.0)
        np.testing.assert_allclose(array, expected, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("options", [{"accumulate": 0}, {"max_grad_norm": 0.0}, {"workers": 9}])
def test_errors_name_the_option(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_trainer(**options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_workers_share_a_batch_without_changing_the_step(accumulate: int) -> None:
    results = []
    for workers in (1, 2, 3):
        trainer = make_trainer(distilled=True, workers=workers, accumulate=accumulate)
        losses = [trainer.train_step().read() for _ in range(3)]
        results.append((losses, trainer.objective.model.parameters.flat))
    for losses, parameters in results[1:]:
        for ours, expected in zip(losses, results[0][0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4)
        np.testing.assert_allclose(parameters, results[0][1], rtol=1e-3, atol=1e-4)


def test_workers_repeat_bit_for_bit() -> None:
    first, second = make_trainer(workers=3, distilled=True), make_trainer(workers=3, distilled=True)
    for _ in range(4):
        first.train_step()
        second.train_step()
    assert bits(first) == bits(second)
