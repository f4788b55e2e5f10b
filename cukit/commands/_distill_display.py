"""Terminal output of `cukit distill`: the plan, progress and results."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from cukit.analyzer.report.numbers import num_bytes, printable
from cukit.distill.run.report import PHASES, TITLES, DistillReport, TrainingRecord
from cukit.distill.run.settings import DistillSettings
from cukit.distill.training.data import Corpus
from cukit.distill.training.trainer import StepStatistics, Trainer
from cukit.memory import PoolStatistics

REFRESH_SECONDS = 0.5
"""Minimum time between updates of the loss; an update synchronises with the GPU."""
PLAIN_SECONDS = 15.0
"""Time between progress lines if the output is not a terminal."""


class ProgressDisplay:
    """An `Observer` of the run: a progress bar per model on a terminal, else occasional lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def phase_started(self, phase: str, first_step: int, trainer: Trainer, steps: int) -> None:
        self._steps, self._tokens_per_step = steps, trainer.tokens_per_step
        self._first_step, self._started = first_step, time.monotonic()
        self._shown, self._timed = 0.0, False
        if first_step:
            self.message(f"{TITLES[phase]}: continuing after step {first_step}")
        if not self._live:
            self._console.print(f"{TITLES[phase]}: {steps - first_step} steps")
            self._shown = self._started
            return
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[loss]}[/]"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(
            TITLES[phase], total=steps, completed=first_step, loss="", speed="compiling"
        )
        self._progress.start()

    def step_done(self, phase: str, statistics: StepStatistics) -> None:
        if not self._timed:  # the first step compiles kernels: exclude it from the speed
            statistics.read()
            self._timed, self._first_step, self._started = True, statistics.step, time.monotonic()
            return
        now = time.monotonic()
        due = REFRESH_SECONDS if self._live else PLAIN_SECONDS
        if now - self._shown < due and statistics.step < self._steps:
            return
        values = statistics.read()
        self._shown = now = time.monotonic()
        done = statistics.step - self._first_step
        speed = done * self._tokens_per_step / max(now - self._started, 1e-9)
        loss = f"loss {values['loss']:.3f}"
        if self._progress is not None:
            self._progress.update(
                self._task, completed=statistics.step, loss=loss, speed=f"{speed:,.0f} tok/s"
            )
        else:
            left = (self._steps - statistics.step) * self._tokens_per_step / max(speed, 1e-9)
            self._console.print(
                f"  step {statistics.step}/{self._steps}  {loss}  {speed:,.0f} tok/s  "
                f"ETA {left:.0f} s"
            )

    def phase_finished(self, phase: str, record: TrainingRecord) -> None:
        self.close()

    def message(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]")

    def close(self) -> None:
        """Stops the live bar, finished or not."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def show_plan(
    console: Console, settings: DistillSettings, corpus: Corpus, device_name: str
) -> None:
    """Prints the text, models and device of the run, in three lines."""
    teacher, student = settings.teacher_config(), settings.student_config()
    console.print(
        f"[bold]text[/]     {escape(corpus.description)}: {len(corpus.train) / 1e6:.1f} MB in "
        f"{corpus.num_train_files} files to train on, {len(corpus.validation) / 1e6:.1f} MB in "
        f"{corpus.num_validation_files} to validate on"
    )
    console.print(
        f"[bold]models[/]   teacher {teacher.num_parameters / 1e6:.2f} M parameters, "
        f"{settings.teacher_steps} steps; student {student.num_parameters / 1e6:.2f} M, "
        f"{settings.steps} steps, with and without the teacher"
    )
    console.print(
        f"[bold]device[/]   {escape(device_name)}, {settings.dtype}, "
        f"{settings.batch * settings.accumulate} windows of {settings.seq_len} bytes a step\n"
    )


def show_report(console: Console, report: DistillReport, folder: Path) -> None:
    """Prints tables of the results, the sample and the verdict."""
    console.print(_models_table(report))
    if len(report.ways) > 1:
        console.print(_variants_table(report))
    if report.quantized:
        console.print(_quantized_table(report))
    console.print(_ops_table(report))
    console.print(
        Panel(
            Text(printable(report.sample)),
            title="the distilled student continues a prompt",
            title_align="left",
        )
    )
    if report.pool is not None:
        console.print(pool_line(report.pool))
    console.print(f"[bold {'green' if report.helped else 'yellow'}]{report.verdict}[/]")
    console.print(
        f"{report.seconds:.0f} s in total, peak memory {report.peak_memory_bytes / 1e6:,.0f} MB. "
        f"Models and report.json are in {escape(str(folder))}; generate text with\n"
        f"  cukit generate {escape(quote(str(folder / 'student.safetensors')))} --prompt 'import '",
        soft_wrap=True,
    )


def pool_line(pool: PoolStatistics) -> str:
    """The statistics of the memory pool in one line."""
    copied = f"{num_bytes(pool.bytes_moved)} moved" if pool.bytes_moved else "nothing copied"
    return (
        f"[bold]memory pool[/]  peak {num_bytes(pool.peak_live_bytes)} live, "
        f"{num_bytes(pool.peak_reserved_bytes)} reserved; {pool.hit_rate:.1%} of "
        f"{pool.num_allocations:,} allocations from a free list; {pool.pages_remapped:,} pages "
        f"remapped, {copied}; fragmentation {pool.fragmentation:.0%} at the end"
    )


def _models_table(report: DistillReport) -> Table:
    table = Table(title="on validation text", title_justify="left")
    table.add_column("model")
    for heading in (
        "parameters",
        "bits per byte",
        "KL to teacher (bits)",
        "top-1 agreement",
        "top-1 accuracy",
        "tokens/s",
    ):
        table.add_column(heading, justify="right")
    best = min(PHASES[1:], key=lambda phase: report.evaluations[phase].bits_per_byte)
    for phase in report.evaluations:
        result = report.evaluations[phase]
        kl, agreement = result.teacher_kl_bits, result.teacher_agreement
        table.add_row(
            TITLES[phase],
            f"{report.num_parameters[phase]:,}",
            f"{result.bits_per_byte:.4f}",
            "" if kl is None else f"{kl:.4f}",
            "" if agreement is None else f"{agreement:.1%}",
            f"{result.accuracy:.1%}",
            f"{report.training[phase].tokens_per_second:,.0f}",
            style="bold" if phase == best else "",
        )
    return table


def _variants_table(report: DistillReport) -> Table:
    table = Table(title="gain from distillation, and with each term", title_justify="left")
    table.add_column("model")
    for heading in ("bits per byte", "gain over training alone", "gap to the teacher closed"):
        table.add_column(heading, justify="right")
    for variant in report.ways:
        gain, interval = variant["gain_bits_per_byte"], variant["gain_interval"]
        closed, around = variant["gap_closed"], variant["gap_closed_interval"]
        table.add_row(
            TITLES[variant["model"]],
            f"{variant['bits_per_byte']:.4f}",
            f"{gain:+.4f}" + (f" ({interval[0]:+.4f} to {interval[1]:+.4f})" if interval else ""),
            ""
            if closed is None
            else f"{closed:.1%}" + (f" ({around[0]:.1%} to {around[1]:.1%})" if around else ""),
        )
    return table


def _quantized_table(report: DistillReport) -> Table:
    table = Table(title="the distilled student with quantised layers", title_justify="left")
    table.add_column("weights")
    for heading in ("bits per weight", "bits per byte", "change", "KL to teacher (bits)"):
        table.add_column(heading, justify="right")
    plain = report.evaluations["student"]
    table.add_row(
        report.settings.dtype, "", f"{plain.bits_per_byte:.4f}", "", f"{plain.teacher_kl_bits:.4f}"
    )
    for each in report.quantized:
        result = each.evaluation
        table.add_row(
            each.format,
            f"{each.bits_per_weight:.2f}",
            f"{result.bits_per_byte:.4f}",
            f"{result.bits_per_byte - plain.bits_per_byte:+.4f}",
            f"{result.teacher_kl_bits:.4f}",
        )
    return table


def _ops_table(report: DistillReport) -> Table:
    place = "the GPU" if report.settings.device == "gpu" else "one core"
    table = Table(title=f"time of a distillation step on {place}, by op", title_justify="left")
    table.add_column("op")
    for heading in ("calls", "ms", "share"):
        table.add_column(heading, justify="right")
    whole = sum(entry.milliseconds for entry in report.op_times)
    for entry in report.op_times:
        table.add_row(
            entry.name,
            f"{entry.calls:.0f}" if entry.calls else "",
            f"{entry.milliseconds:.2f}",
            f"{entry.milliseconds / max(whole, 1e-12):.1%}",
        )
    table.add_row("whole step", "", f"{whole:.2f}", "100.0%", style="bold")
    return table
