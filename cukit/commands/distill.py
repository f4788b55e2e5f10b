"""`cukit distill` trains a teacher, distils a student and compares it with the same student trained
alone; `cukit generate` continues a prompt with one of the models."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console

from cukit.analyzer.report import generate_report
from cukit.analyzer.report.numbers import printable
from cukit.analyzer.report.terminal import print_report
from cukit.commands._console import stdout
from cukit.commands._distill_display import ProgressDisplay, show_plan, show_report
from cukit.core.device import current_device, gpu_available
from cukit.core.interrupts import INTERRUPTED
from cukit.distill.run.folder import (
    REPORT,
    check_resumable,
    exclusive,
    is_finished,
    start_run,
    stored_run,
)
from cukit.distill.run.memory import POOLS
from cukit.distill.run.pipeline import DistillRun, Interrupted
from cukit.distill.run.settings import DEFAULTS
from cukit.distill.training.data import VOCAB_SIZE, read_corpus
from cukit.errors import ConfigError, DataError, MissingDependencyError
from cukit.models import generate as generate_tokens
from cukit.models import load_model
from cukit.models.parameters import namespace_for

_SIZES, _TRAINING, _RUN = "Sizes", "Training", "Run"


def distill(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for models, checkpoints and report.")
    ] = Path("runs/distill"),
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file or folder to train on; may be repeated. "
            "Default: the Python standard library's source."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu or auto.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run in the output folder.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of both students.", rich_help_panel=_TRAINING)
    ] = None,
    teacher_steps: Annotated[
        int | None, typer.Option(help="Training steps of the teacher.", rich_help_panel=_TRAINING)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows per batch.", rich_help_panel=_TRAINING)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Bytes per window.", rich_help_panel=_TRAINING)
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(help="Batches accumulated per step.", rich_help_panel=_TRAINING),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="CPU threads.", rich_help_panel=_TRAINING)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Students' learning rate.", rich_help_panel=_TRAINING)
    ] = None,
    teacher_lr: Annotated[
        float | None, typer.Option(help="Teacher's learning rate.", rich_help_panel=_TRAINING)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of the soft loss.", rich_help_panel=_TRAINING)
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Weight of the soft loss; cross-entropy has 1 - alpha.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    hidden_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of the loss on hidden states; 0 for none.", rich_help_panel=_TRAINING
        ),
    ] = None,
    attention_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of the loss on attention distributions; 0 for none.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    ablation: Annotated[
        bool | None,
        typer.Option(
            "--ablation/--no-ablation",
            help="Also distil one student with the loss on hidden states and one with the loss on "
            "attention.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    packages: Annotated[
        bool | None,
        typer.Option(
            "--packages/--no-packages",
            help="Without --text: also train on the source of installed packages.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed gives the same result.", rich_help_panel=_TRAINING),
    ] = None,
    teacher_hidden: Annotated[
        int | None, typer.Option(help="Teacher's hidden size.", rich_help_panel=_SIZES)
    ] = None,
    teacher_layers: Annotated[
        int | None, typer.Option(help="Teacher's layers.", rich_help_panel=_SIZES)
    ] = None,
    student_hidden: Annotated[
        int | None, typer.Option(help="Student's hidden size.", rich_help_panel=_SIZES)
    ] = None,
    student_layers: Annotated[
        int | None, typer.Option(help="Student's layers.", rich_help_panel=_SIZES)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of an attention head.", rich_help_panel=_SIZES)
    ] = None,
    tie_embeddings: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            help="Share the embedding with the output head.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="On the CPU float32, float64 or bfloat16; on the GPU bfloat16.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", rich_help_panel=_RUN)
    ] = None,
    eval_windows: Annotated[
        int | None, typer.Option(help="Maximum number of validation windows.", rich_help_panel=_RUN)
    ] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            help="Also evaluate the student with weights in this format: int8, int4 or fp8; may be "
            "repeated. For a finished run, add --resume.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    pool: Annotated[
        str,
        typer.Option(help="Memory pool on the GPU: cukit or cupy.", rich_help_panel=_RUN),
    ] = POOLS[0],
) -> None:
    """Train a teacher on real text, distil a small student from it, and measure the gain.

    The same student is also trained without the teacher, from the same initial weights on the same
    batches; the report states whether distillation helped, and how much. Ctrl-C saves and stops;
    --resume continues from the last checkpoint, with the same result as an uninterrupted run.
    """
    options: dict[str, Any] = {
        "steps": steps, "teacher_steps": teacher_steps, "batch": batch, "seq_len": seq_len,
        "accumulate": accumulate, "lr": lr, "teacher_lr": teacher_lr, "temperature": temperature,
        "alpha": alpha, "hidden_weight": hidden_weight, "seed": seed,
        "teacher_hidden": teacher_hidden, "teacher_layers": teacher_layers,
        "student_hidden": student_hidden, "student_layers": student_layers, "head_dim": head_dim,
        "tie_embeddings": tie_embeddings, "dtype": dtype, "checkpoint_every": checkpoint_every,
        "eval_windows": eval_windows, "workers": workers, "attention_weight": attention_weight,
        "ablation": ablation, "packages": packages,
    }  # fmt: skip
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    if resume:
        stored, stored_text, facts = stored_run(output)
        place = None if device is None else _place(device)
        settings = stored.with_options(device=place, **options)
        corpus = read_corpus(text or stored_text, packages=settings.packages)
        check_resumable(output, stored, settings, facts, corpus)
        _place(settings.device)
    else:
        settings = DEFAULTS[_place(device or "auto")].with_options(**options)
        corpus = read_corpus(text or [], packages=settings.packages)
        if not overwrite and not quantize and is_finished(output, settings, corpus):
            _show_finished(output)
            return
    display = ProgressDisplay(Console(stderr=True))
    run = DistillRun(settings, corpus, output, display, pool=pool, quantize=quantize or ())
    with exclusive(output):
        if not resume:
            start_run(output, settings, corpus, text or [], overwrite=overwrite)
        show_plan(stdout(), settings, corpus, _device_name(settings.device))
        try:
            report = run.run()
        except (Interrupted, KeyboardInterrupt):
            display.close()
            command = f"cukit distill -o {quote(str(output))} --resume"
            print(f"stopped; continue with `{command}`", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            display.close()
        show_report(stdout(), report, output)
        _write_page(output)


def _show_finished(folder: Path) -> None:
    """Prints the result of a finished run, and how to run it again."""
    made = generate_report([folder / REPORT], title="cukit distill")
    print_report(stdout(), made.title, made.sections)
    stdout().print(
        f"\nThis run is finished, in {folder}. --overwrite runs it again, -o NAME runs it in "
        "another folder.",
        markup=False,
        soft_wrap=True,
    )


def _write_page(folder: Path) -> None:
    """Writes report.html next to report.json, or prints why it cannot."""
    page = folder / "report.html"
    try:
        generate_report([folder / REPORT], [page], title="cukit distill")
    except MissingDependencyError as error:
        stdout().print(f"no report.html: {error}", markup=False)
    else:
        stdout().print(f"Curves and tables of this run: {page}", markup=False, soft_wrap=True)


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .safetensors file of `cukit distill`, or its folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Bytes to generate.")] = 400,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest byte.")] = 0.7,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k likeliest bytes only.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest bytes with this total probability."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample from bytes at least this fraction as likely as the likeliest."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, gpu or auto.")] = "auto",
) -> None:
    """Continue a prompt with a model that `cukit distill` trained."""
    place = _place(device)
    path = checkpoint / "student.safetensors" if checkpoint.is_dir() else checkpoint
    if not prompt:
        raise ConfigError("--prompt: expected at least one character")
    if seed < 0:
        raise ConfigError(f"--seed: expected 0 or more, got {seed}")
    # On the CPU, models run in float32 whatever dtype they were trained in.
    model = load_model(path, namespace_for(place), dtype="float32" if place == "cpu" else None)
    if model.config.vocab_size != VOCAB_SIZE:
        raise DataError(f"{path}: its tokens are not bytes")
    new_tokens = generate_tokens(
        model,
        list(os.fsencode(prompt)),
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    text = os.fsencode(prompt) + bytes(new_tokens)
    print(printable(text.decode("utf-8", errors="replace")))


def _place(device: str) -> str:
    """ "cpu" or "gpu" for an option's value. Raises if a GPU is requested and there is none."""
    if device == "auto":
        return "gpu" if gpu_available() else "cpu"
    if device == "gpu":
        current_device()
    elif device != "cpu":
        raise ConfigError(f"--device: expected cpu, gpu or auto, got {device!r}")
    return device


def _device_name(place: str) -> str:
    return current_device().name if place == "gpu" else f"CPU ({platform.machine()}), NumPy"
