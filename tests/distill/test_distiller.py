"""The distillation objective: gradients of the whole loss, schedules, and a loss that falls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cukit.distill.run._host_workers import one_thread_each
from cukit.distill.training.data import Windows, validation_batches
from cukit.distill.training.distiller import Distiller, LanguageModelling, Objective
from cukit.distill.training.evaluation import evaluate
from cukit.distill.training.schedule import Linear
from cukit.distill.training.terms import HiddenStateTerm
from cukit.distill.training.trainer import Trainer
from cukit.errors import ArrayShapeError, ConfigError
from cukit.models import Transformer, TransformerConfig
from tests.models.small import CPU_AND_GPU, small_model, small_tokens
from tests.tolerances import FINITE_DIFFERENCE

TEACHER = {"hidden_size": 24, "num_layers": 3, "num_heads_q": 2}
STEP = 1e-5


def statistics_of(objective: Objective, tokens: Any, targets: Any, step: int = 0) -> Any:
    gradients = [parameters.zeros_like() for parameters in objective.trained()]
    statistics = objective.loss_and_gradients(
        tokens, targets, gradients, step=step, normalizer=float(tokens.size)
    )
    return statistics, gradients


@pytest.mark.parametrize(
    "kind", ["alone", "untied", "mixed", "hot", "jsd", "options", "hidden states"]
)
def test_whole_loss_by_finite_differences(kind: str, rng: np.random.Generator) -> None:
    """For every trained tensor, including the term's projections."""
    student = small_model(tie_embeddings=kind != "untied")
    teacher = small_model(seed=1, **TEACHER)
    tokens, targets = small_tokens(rng), small_tokens(rng)
    targets[0, :2] = -100
    targets[targets > 20] = 3
    terms = [HiddenStateTerm({1: 2, 2: 3}, student.config, teacher.config, weight=0.7)]
    objective: Objective = {
        "alone": lambda: LanguageModelling(student),
        "untied": lambda: Distiller(student, teacher, alpha=0.6),
        "mixed": lambda: Distiller(student, teacher, alpha=0.6),
        "hot": lambda: Distiller(student, teacher, alpha=1.0, temperature=2.5),
        "jsd": lambda: Distiller(student, teacher, divergence="jsd", beta=0.3),
        "options": lambda: Distiller(
            student,
            teacher,
            alpha=0.6,
            softcap=1.5,
            teacher_logit_scale=0.5,
            vocab_size=21,
            token_weights=lambda tokens, targets: (tokens % 3).astype(np.float32),
        ),
        "hidden states": lambda: Distiller(student, teacher, alpha=0.5, terms=terms),
    }[kind]()
    _, gradients = statistics_of(objective, tokens, targets)
    for parameters, own in zip(objective.trained(), gradients, strict=True):
        for name, array in parameters.items():
            direction = rng.standard_normal(array.shape)
            kept = array.copy()
            losses = []
            for sign in (1, -1):
                array[...] = kept + sign * STEP * direction
                losses.append(float(statistics_of(objective, tokens, targets)[0]["loss"]))
            array[...] = kept
            expected = (losses[0] - losses[1]) / (2 * STEP)
            actual = float((own[name] * direction).sum())
            assert abs(expected) > 1e-7, f"{name}: this direction tests nothing"
            assert abs(actual - expected) < FINITE_DIFFERENCE * max(1, abs(expected)), name


def test_the_teacher_does_not_change(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    before = teacher.parameters.flat.copy()
    statistics_of(Distiller(student, teacher), small_tokens(rng), small_tokens(rng))
    assert np.array_equal(teacher.parameters.flat, before)


def test_a_student_equal_to_its_teacher_has_no_loss_or_gradient(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model()
    objective = Distiller(student, teacher, alpha=1.0, temperature=2.0)
    statistics, gradients = statistics_of(objective, small_tokens(rng), small_tokens(rng))
    assert 0 <= float(statistics["soft"]) < 1e-15
    assert np.abs(gradients[0].flat).max() < 1e-12


def test_terms_of_one_kind_have_separate_statistics(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens, targets = small_tokens(rng), small_tokens(rng)
    first, second = (
        HiddenStateTerm({layer: layer}, student.config, teacher.config) for layer in (1, 2)
    )
    both, _ = statistics_of(Distiller(student, teacher, terms=[first, second]), tokens, targets)
    for name, term in (("hidden states", first), ("hidden states 2", second)):
        alone, _ = statistics_of(Distiller(student, teacher, terms=[term]), tokens, targets)
        assert float(both[name]) == float(alone["hidden states"])
    assert float(both["hidden states"]) != float(both["hidden states 2"])


def test_schedules_are_read_at_the_step(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens, targets = small_tokens(rng), small_tokens(rng)
    objective = Distiller(student, teacher, alpha=Linear(0, 1, 4), temperature=1.0)
    for step, alpha in ((0, 0.0), (2, 0.5), (4, 1.0)):
        statistics, _ = statistics_of(objective, tokens, targets, step)
        mixed = alpha * float(statistics["soft"]) + (1 - alpha) * float(statistics["hard"])
        assert float(statistics["loss"]) == pytest.approx(mixed, rel=1e-9)
    with pytest.raises(ConfigError, match="step 0: alpha"):
        statistics_of(Distiller(student, teacher, alpha=1.5), tokens, targets)
    with pytest.raises(ConfigError, match="temperature above 0"):
        statistics_of(Distiller(student, teacher, temperature=0.0), tokens, targets)


def test_the_divergence_must_be_known() -> None:
    with pytest.raises(ConfigError, match="Distiller: divergence must be one of"):
        Distiller(small_model(), small_model(), divergence="kl")


def test_vocabularies_must_agree() -> None:
    student, teacher = small_model(), small_model(vocab_size=29)
    with pytest.raises(ArrayShapeError, match=r"teacher has 29 and .* vocab_size=23"):
        Distiller(student, teacher)
    with pytest.raises(ArrayShapeError, match="vocab_size must be at most 23"):
        Distiller(student, teacher, vocab_size=29)
    Distiller(student, teacher, vocab_size=23)


def text_of_words() -> np.ndarray[Any, Any]:
    """A small random language that a model learns in seconds."""
    rng = np.random.default_rng(0)
    words = [b"alpha ", b"beta ", b"gamma ", b"delta, ", b"epsilon. "]
    return np.frombuffer(b"".join(words[i] for i in rng.integers(0, 5, 4000)), np.uint8)


def train(objective: Objective, steps: int) -> list[float]:
    xp = objective.model.xp
    windows = Windows(text_of_words(), batch=3, seq_len=32, seed=0, xp=xp)
    trainer = Trainer(objective, windows, lr=1e-2)
    with one_thread_each():
        return [trainer.train_step().read()["loss"] for _ in range(steps)]


@CPU_AND_GPU
def test_a_short_distillation_learns(device: str) -> None:
    """The loss falls, the student approaches its teacher, and the teacher is better."""
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    dtype = "bfloat16" if device == "gpu" else "float32"

    def config(hidden: int, layers: int) -> TransformerConfig:
        return TransformerConfig(256, hidden, layers, 2, 1, 16, 2 * hidden, 32, dtype=dtype)

    teacher = Transformer.initialise(config(48, 2), seed=0, xp=xp)
    losses = train(LanguageModelling(teacher), 40)
    assert losses[-1] < 0.6 * losses[0]

    student = Transformer.initialise(config(32, 1), seed=1, xp=xp)
    batches = list(validation_batches(text_of_words(), batch=8, seq_len=32, max_windows=16, xp=xp))
    before = evaluate(student, batches, teacher)
    losses = train(Distiller(student, teacher, alpha=0.9), 40)
    after = evaluate(student, batches, teacher)
    assert losses[-1] < 0.6 * losses[0]
    assert after.bits_per_byte < 0.7 * before.bits_per_byte
    assert before.teacher_kl_bits is not None
    assert after.teacher_kl_bits is not None
    assert after.teacher_kl_bits < 0.5 * before.teacher_kl_bits
