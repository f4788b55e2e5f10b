"""A run of `cukit distill`: trains a teacher, a distilled student and the same student alone, and
compares them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cukit.core.files import read_arrays, write_json
from cukit.core.interrupts import StopRequest
from cukit.distill.run._host_workers import keep_freed_memory, one_thread_each
from cukit.distill.run._op_timer import time_by_op
from cukit.distill.run._quantized_student import check_formats, evaluate_quantized
from cukit.distill.run.folder import CHECKPOINT, REPORT, model_file
from cukit.distill.run.memory import POOLS, RunMemory
from cukit.distill.run.report import DistillReport, TrainingRecord, phases_of
from cukit.distill.run.settings import DistillSettings
from cukit.distill.training.checkpoint import restore_checkpoint, save_checkpoint
from cukit.distill.training.data import Corpus, Windows, check_length, validation_batches
from cukit.distill.training.distiller import Distiller, LanguageModelling, Objective
from cukit.distill.training.evaluation import evaluate
from cukit.distill.training.schedule import WarmupCosine
from cukit.distill.training.terms import (
    AttentionTerm,
    HiddenStateTerm,
    StateTerm,
    evenly_spaced_map,
)
from cukit.distill.training.trainer import StepStatistics, Trainer
from cukit.errors import ConfigError, DataError, OutOfMemoryError
from cukit.models import Transformer, TransformerConfig, generate, load_model, save_model
from cukit.models.parameters import namespace_for

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 320
PROFILED_STEPS = 4

ABLATION_HIDDEN_WEIGHT, ABLATION_ATTENTION_WEIGHT = 0.5, 0.1
"""Weights of the terms that an ablation adds, if the settings have none."""

CURVE_POINTS = 100
"""Approximate number of losses recorded per training."""


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """A stop was requested; the checkpoint contains all finished steps."""


class Observer(Protocol):
    """Receives the events of a run. Implementations decide when to read statistics, because reading
    waits for the GPU."""

    def phase_started(self, phase: str, first_step: int, trainer: Trainer, steps: int) -> None: ...

    def step_done(self, phase: str, statistics: StepStatistics) -> None: ...

    def phase_finished(self, phase: str, record: TrainingRecord) -> None: ...

    def message(self, text: str) -> None: ...


class DistillRun:
    """One run in one output folder.

    Args:
        settings: see `DistillSettings`.
        corpus: the text.
        output: the folder that `start_run` prepared, or one with a run to resume.
        observer: receives the events of the run.
        pool: the memory pool on a GPU, one of `cukit.distill.run.memory.POOLS`.
        quantize: names of weight formats (`_quantized_student.FORMATS`) in which the distilled
            student is also evaluated.

    Raises:
        ConfigError: an invalid `pool` or `quantize`.
        DataError: the training or validation text is too short for one window.
    """

    def __init__(
        self,
        settings: DistillSettings,
        corpus: Corpus,
        output: Path,
        observer: Observer,
        *,
        pool: str = POOLS[0],
        quantize: Sequence[str] = (),
    ) -> None:
        check_formats(quantize)
        check_length(corpus.train, settings.seq_len, "training text")
        check_length(corpus.validation, settings.seq_len, "validation text")
        self.settings, self.corpus = settings, corpus
        self.output, self.observer = output, observer
        self._formats = tuple(quantize)
        self.xp: ModuleType = namespace_for(settings.device)
        self._checkpoint = output / CHECKPOINT
        self._memory = RunMemory(self.xp, pool)
        with self._memory.in_use():
            self._windows = Windows(
                corpus.train,
                batch=settings.batch,
                seq_len=settings.seq_len,
                seed=settings.seed,
                xp=self.xp,
            )

    def run(self) -> DistillReport:
        """Train the models that are not finished, compare them, and write report.json.

        Raises:
            Interrupted: Ctrl-C during the training of a model, whose state is saved.
            ConfigError: the loss became infinite or NaN.
            DataError: a file of the run is damaged, or cannot be written.
            OutOfMemoryError: the models or batches are too large for this machine.
        """
        try:
            if self.settings.device == "gpu":
                with self._memory.in_use():
                    return self._run()
            keep_freed_memory()
            with one_thread_each():
                return self._run()
        except MemoryError as error:  # NumPy's, CuPy's and the pool's all derive from it
            explained = OutOfMemoryError(
                "these sizes need more memory than is available; a smaller --batch with "
                f"--accumulate needs less: {error}"
            )
            explained.report = getattr(error, "report", None)
            raise explained from error

    def _run(self) -> DistillReport:
        started = time.perf_counter()
        models: dict[str, Transformer] = {}
        records: dict[str, TrainingRecord] = {}
        phases = phases_of(self.settings)
        for phase in phases:
            done = self._finished(phase)
            models[phase], records[phase] = done or self._train(phase, models)
        self._checkpoint.unlink(missing_ok=True)
        self.observer.message("evaluating on validation text")
        teacher = models["teacher"]
        evaluations = {
            phase: evaluate(
                models[phase],
                self._validation(),
                None if phase == "teacher" else teacher,
                workers=self.settings.workers,
            )
            for phase in phases
        }
        if self._formats:
            self.observer.message("evaluating quantised weights")
        quantized = evaluate_quantized(
            models["student"],
            teacher,
            self._validation,
            self._formats,
            workers=self.settings.workers,
        )
        sample = generate(
            models["student"],
            list(SAMPLE_PROMPT.encode()),
            SAMPLE_TOKENS,
            temperature=0.7,
            top_k=40,
            seed=self.settings.seed,
        )
        self.observer.message("timing the ops of a distillation step")
        # Last, because the timed steps continue to train the student in memory.
        objective = self._objective("student", models["student"], teacher)
        profiled = Trainer(
            objective, self._windows, lr=self.settings.lr, accumulate=self.settings.accumulate
        )
        op_times = time_by_op(profiled.train_step, self.xp, PROFILED_STEPS)
        report = DistillReport(
            settings=self.settings,
            corpus=self.corpus.facts(),
            evaluations=evaluations,
            training=records,
            num_parameters={phase: models[phase].config.num_parameters for phase in phases},
            op_times=op_times,
            sample=SAMPLE_PROMPT + bytes(sample).decode("utf-8", errors="replace"),
            peak_memory_bytes=self._memory.peak_bytes(),
            seconds=time.perf_counter() - started,
            pool=self._memory.statistics(),
            quantized=quantized,
        )
        write_json(self.output / REPORT, report.to_dict())
        return report

    def _validation(self) -> Iterator[tuple[Any, Any]]:
        s = self.settings
        return validation_batches(
            self.corpus.validation,
            batch=s.batch,
            seq_len=s.seq_len,
            max_windows=s.eval_windows,
            xp=self.xp,
        )

    def _objective(self, phase: str, model: Transformer, teacher: Transformer | None) -> Objective:
        s = self.settings
        if phase in ("teacher", "student-alone"):
            return LanguageModelling(model)
        assert teacher is not None
        terms: list[StateTerm] = []
        layer_map = evenly_spaced_map(model.config.num_layers, teacher.config.num_layers)
        hidden, attention = s.hidden_weight, s.attention_weight
        if phase == "student-hidden":
            hidden = hidden or ABLATION_HIDDEN_WEIGHT
        if phase == "student-attention":
            attention = attention or ABLATION_ATTENTION_WEIGHT
        if attention > 0:
            terms.append(AttentionTerm(layer_map, model.config, teacher.config, weight=attention))
        if hidden > 0:
            terms.append(
                HiddenStateTerm(
                    layer_map,
                    model.config,
                    teacher.config,
                    weight=hidden,
                    seed=s.seed,
                    xp=self.xp,
                )
            )
        return Distiller(model, teacher, alpha=s.alpha, temperature=s.temperature, terms=terms)

    def _finished(self, phase: str) -> tuple[Transformer, TrainingRecord] | None:
        path = model_file(self.output, phase)
        if not path.exists():
            return None
        model = load_model(path, self.xp)
        if model.config != self._config(phase):
            raise DataError(f"{path}: contains a model of another shape than this run's {phase}")
        return model, _record(path, read_arrays(path)[1])

    def _config(self, phase: str) -> TransformerConfig:
        s = self.settings
        return s.teacher_config() if phase == "teacher" else s.student_config()

    def _train(
        self, phase: str, models: dict[str, Transformer]
    ) -> tuple[Transformer, TrainingRecord]:
        s = self.settings
        is_teacher = phase == "teacher"
        # All students start from the same weights and read the same batches.
        model = Transformer.initialise(
            self._config(phase),
            seed=s.seed if is_teacher else s.seed + 1,
            xp=self.xp,
        )
        steps = s.teacher_steps if is_teacher else s.steps
        trainer = Trainer(
            self._objective(phase, model, models.get("teacher")),
            self._windows,
            lr=WarmupCosine(
                s.teacher_lr if is_teacher else s.lr, int(steps * s.warmup_share), steps
            ),
            accumulate=s.accumulate,
            workers=s.workers,
            max_grad_norm=s.max_grad_norm,
            weight_decay=s.weight_decay,
        )
        record = TrainingRecord()
        if self._checkpoint.exists():
            _, description = read_arrays(self._checkpoint)
            if description.get("phase") == phase:
                restore_checkpoint(self._checkpoint, trainer)
                record = _record(self._checkpoint, description)
        self.observer.phase_started(phase, trainer.step, trainer, steps)
        self._loop(phase, trainer, steps, record)
        save_model(model_file(self.output, phase), model, phase=phase, training=asdict(record))
        self.observer.phase_finished(phase, record)
        return model, record

    def _loop(self, phase: str, trainer: Trainer, steps: int, record: TrainingRecord) -> None:
        clock = _Clock(trainer, record)
        every = max(1, steps // CURVE_POINTS)
        unread: list[StepStatistics] = []
        with StopRequest() as stop:
            while trainer.step < steps:
                statistics = trainer.train_step()
                self.observer.step_done(phase, statistics)
                if not clock.running:
                    statistics.read()  # the first step compiles kernels: wait, then start the clock
                    clock.start()
                due = trainer.step % self.settings.checkpoint_every == 0
                due = due or stop.requested or trainer.step == steps
                if due or trainer.step % every == 0:
                    unread.append(statistics)
                if due:
                    # Reading the loss waits for the device: the time is that of finished steps.
                    losses = [(each.step, each.read()["loss"]) for each in unread]
                    unread.clear()
                    step, loss = next((p for p in losses if not math.isfinite(p[1])), losses[-1])
                    if not math.isfinite(loss):
                        raise ConfigError(
                            f"{phase}: the loss is {loss} after step {step}; "
                            "a lower learning rate may help"
                        )
                    record.history += losses
                    clock.lap()
                    if trainer.step < steps or stop.requested:
                        save_checkpoint(
                            self._checkpoint, trainer, phase=phase, training=asdict(record)
                        )
                    clock.start()
                if stop.requested:
                    raise Interrupted


class _Clock:
    """Adds to a record the training time, without the time for saving checkpoints, and the number
    of tokens processed in it."""

    def __init__(self, trainer: Trainer, record: TrainingRecord) -> None:
        self._trainer, self._record = trainer, record
        self.running = False

    def start(self) -> None:
        self.running = True
        self._since, self._from_step = time.perf_counter(), self._trainer.step

    def lap(self) -> None:
        record, trainer = self._record, self._trainer
        record.seconds += time.perf_counter() - self._since
        record.timed_tokens += (trainer.step - self._from_step) * trainer.tokens_per_step
        record.steps, record.tokens = trainer.step, trainer.step * trainer.tokens_per_step


def _record(path: Path, description: dict[str, Any]) -> TrainingRecord:
    try:
        return TrainingRecord(**description["training"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: contains no valid training record ({error})") from error
