"""Compares settings of `cukit distill` by the gap between teacher and student:

    python -m profiling.demo_settings [--small | --brief]

For each setting, prints bits per byte of the teacher and of the student alone, then of the student
distilled with several objectives, with the gain over the student alone (95% interval over
validation windows) and the share of the gap between student and teacher that it closes. Conclusions
are in profiling/notes/distillation_step.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cukit.core.device import gpu_available
from cukit.distill.run.settings import DEFAULTS, DistillSettings
from cukit.distill.training.data import Corpus, Windows, read_corpus, validation_batches
from cukit.distill.training.distiller import Distiller, LanguageModelling, Objective
from cukit.distill.training.evaluation import Evaluation, evaluate, gain_of
from cukit.distill.training.schedule import WarmupCosine
from cukit.distill.training.terms import AttentionTerm, HiddenStateTerm, evenly_spaced_map
from cukit.distill.training.trainer import Trainer
from cukit.models import Transformer
from cukit.models.parameters import namespace_for


@dataclass(frozen=True)
class Setting:
    """Options of `cukit distill`, and the distillation objectives to compare."""

    name: str
    options: Mapping[str, Any]
    packages: bool
    objectives: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: {"logits": {}})
    """Name -> `alpha` and `temperature`, where they differ from the options, and the weights
    `hidden` and `attention` of the terms on hidden states and attention."""


_STUDENT = {"student_hidden": 256, "student_layers": 4}
_OBJECTIVES: dict[str, dict[str, float]] = {
    "logits": {},
    "and attention": {"attention": 0.1},
    "and hidden states": {"hidden": 0.5},
}

SETTINGS = (
    Setting(
        "brief",
        {**_STUDENT, "teacher_hidden": 512, "teacher_layers": 8, "teacher_steps": 250,
         "steps": 150, "eval_windows": 128, "alpha": 1.0},
        True, _OBJECTIVES,
    ),
    Setting(
        "packages, 768x10", {**_STUDENT, "teacher_steps": 1000, "steps": 1000}, True, _OBJECTIVES
    ),
    Setting(
        "packages, 512x8",
        {**_STUDENT, "teacher_hidden": 512, "teacher_layers": 8, "teacher_steps": 900},
        True,
    ),
    Setting(
        "standard library, 512x8",
        {**_STUDENT, "teacher_hidden": 512, "teacher_layers": 8, "teacher_steps": 600},
        False,
    ),
)  # fmt: skip

SMALL = (
    Setting(
        "small",
        {"teacher_steps": 30, "steps": 20, "teacher_hidden": 64, "teacher_layers": 2,
         "student_hidden": 32, "student_layers": 1, "eval_windows": 16},
        False, _OBJECTIVES,
    ),
)  # fmt: skip


class Bench:
    """Trains and evaluates models on one corpus."""

    def __init__(self, settings: DistillSettings, corpus: Corpus) -> None:
        self.settings, self._corpus = settings, corpus
        self.xp = namespace_for(settings.device)
        self._windows = Windows(
            corpus.train, batch=settings.batch, seq_len=settings.seq_len, seed=settings.seed,
            xp=self.xp,
        )  # fmt: skip

    def train(self, objective: Objective, steps: int, lr: float) -> float:
        """Train for `steps` steps; return the seconds that they took."""
        s = self.settings
        schedule = WarmupCosine(lr, int(steps * s.warmup_share), steps)
        trainer = Trainer(
            objective, self._windows, lr=schedule, workers=s.workers,
            max_grad_norm=s.max_grad_norm, weight_decay=s.weight_decay,
        )  # fmt: skip
        started = time.perf_counter()
        for _ in range(steps):
            statistics = trainer.train_step()
        statistics.read()
        return time.perf_counter() - started

    def evaluate(self, model: Transformer) -> Evaluation:
        """Evaluate `model` on the validation text."""
        return evaluate(model, self._validation(), workers=self.settings.workers)

    def _validation(self) -> Iterator[tuple[Any, Any]]:
        s = self.settings
        return validation_batches(
            self._corpus.validation, batch=s.batch, seq_len=s.seq_len, max_windows=s.eval_windows,
            xp=self.xp,
        )  # fmt: skip

    def distiller(
        self, student: Transformer, teacher: Transformer, objective: Mapping[str, float]
    ) -> Distiller:
        """Return the distiller for the weights and options in `objective`."""
        s = self.settings
        layers = evenly_spaced_map(student.config.num_layers, teacher.config.num_layers)
        terms: list[Any] = []
        if "hidden" in objective:
            terms.append(
                HiddenStateTerm(
                    layers, student.config, teacher.config, weight=objective["hidden"], xp=self.xp
                )
            )
        if "attention" in objective:
            terms.append(
                AttentionTerm(layers, student.config, teacher.config, weight=objective["attention"])
            )
        return Distiller(
            student, teacher, alpha=objective.get("alpha", s.alpha),
            temperature=objective.get("temperature", s.temperature), terms=terms,
        )  # fmt: skip


@lru_cache
def _corpus(packages: bool) -> Corpus:
    return read_corpus(packages=packages)


def run(setting: Setting, device: str) -> None:
    """Train and evaluate the models of one setting; print one line per model."""
    settings = DEFAULTS[device].with_options(**setting.options)
    corpus = _corpus(setting.packages)
    bench = Bench(settings, corpus)
    print(f"{setting.name}: {len(corpus.train) / 1e6:.1f} MB of training text", flush=True)

    def report(what: str, seconds: float, found: Evaluation, more: str = "") -> None:
        print(f"  {what:<28}{seconds:6.1f} s  {found.bits_per_byte:.4f}{more}", flush=True)

    teacher = Transformer.initialise(settings.teacher_config(), seed=settings.seed, xp=bench.xp)
    seconds = bench.train(LanguageModelling(teacher), settings.teacher_steps, settings.teacher_lr)
    of_teacher = bench.evaluate(teacher)
    report(f"teacher {teacher.config.num_parameters / 1e6:.1f} M", seconds, of_teacher)

    def student() -> Transformer:
        return Transformer.initialise(
            settings.student_config(), seed=settings.seed + 1, xp=bench.xp
        )

    model = student()
    seconds = bench.train(LanguageModelling(model), settings.steps, settings.lr)
    alone = bench.evaluate(model)
    report(f"student {model.config.num_parameters / 1e6:.1f} M alone", seconds, alone)
    gap = alone.bits_per_byte - of_teacher.bits_per_byte
    for name, objective in setting.objectives.items():
        model = student()
        distiller = bench.distiller(model, teacher, objective)
        seconds = bench.train(distiller, settings.steps, settings.lr)
        found = bench.evaluate(model)
        gain = gain_of(found, alone)
        report(
            f"distilled: {name}", seconds, found,
            f"  gain {gain.bits_per_byte:+.4f} ({gain.low:+.4f} to {gain.high:+.4f}), "
            f"{gain.bits_per_byte / gap:.0%} of the gap",
        )  # fmt: skip


def main() -> int:
    """Run the settings that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--brief", action="store_true", help="twenty seconds on a GPU")
    given = parser.parse_args()
    for setting in SMALL if given.small else SETTINGS[: 1 if given.brief else None]:
        run(setting, "gpu" if gpu_available() else "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
