"""Distils a model with `cukit.distill` and no PyTorch: with CuPy on a GPU, else with NumPy.

    python examples/distill_cupy.py                                   # trains a teacher first
    python examples/distill_cupy.py --teacher runs/distill/teacher.safetensors --text corpus/
    torchrun --nproc-per-node 2 examples/distill_cupy.py              # two GPUs (or mpirun -n 2)

Three students of the same size start from the same weights: one is trained on the text alone, one
with the teacher, one with the recorded 16 most likely tokens of the teacher at each position.
Each process has its own batches of `--batch` windows. A run that was killed continues from its last
checkpoint if it is started with the same options. `cukit distill` also writes a report.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cukit as ck
from cukit.distill import (
    Checkpoints,
    Distiller,
    ExponentialAverage,
    LanguageModelling,
    Linear,
    OfflineBatches,
    Progress,
    Trainer,
    WarmupCosine,
    WarmupDecay,
    Windows,
    evaluate,
    read_corpus,
    record_teacher,
    validation_batches,
)
from cukit.distributed import communicator
from cukit.models import Transformer, TransformerConfig, load_model, save_model

TOP_K = 16
TEMPERATURE = 2.0


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, distils and compares models; prints and returns bits per byte."""
    parser = argparse.ArgumentParser(description="Distil a model with cukit alone.")
    parser.add_argument("--teacher", type=Path, help="a model from `cukit distill`")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files and folders")
    parser.add_argument("--output", type=Path, default=Path("runs/distill_cupy"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    options = parser.parse_args(arguments)
    steps, output = options.steps, options.output
    output.mkdir(parents=True, exist_ok=True)
    xp = importlib.import_module("cupy" if ck.default_device() == "gpu" else "numpy")
    processes = communicator(xp)  # a single process unless started by torchrun or mpirun
    dtype = "float32" if xp is np else "bfloat16"
    corpus = read_corpus(options.text)
    windows = Windows(
        corpus.train, batch=options.batch, seq_len=options.seq, seed=0, xp=xp, ranks=processes
    )

    def model(hidden: int, layers: int, seed: int) -> Transformer:
        heads = hidden // 32
        config = TransformerConfig(
            256, hidden, layers, heads, heads, 32, 2 * hidden, options.seq, dtype=dtype
        )
        return Transformer.initialise(config, seed=seed, xp=xp)

    def fit(name: str, objective: Any, batches: Any, steps: int, **more: Any) -> None:
        rate = WarmupCosine(3e-3, warmup=max(1, steps // 10), steps=steps)
        trainer = Trainer(objective, batches, lr=rate, communicator=processes, **more)
        checkpoints = Checkpoints(output / f"{name}.checkpoint", every=max(1, steps // 2))
        checkpoints.restore(trainer)
        progress = Progress(steps, every=max(1, steps // 3), write=lambda line: print(name, line))
        trainer.fit(steps, [progress, checkpoints])

    teacher = model(128, 2, seed=0)
    if options.teacher is None:
        fit("teacher", LanguageModelling(teacher), windows, 2 * steps)
    else:
        teacher = load_model(options.teacher, xp, dtype=dtype)

    # Every process records the teacher's signals for the batches that it will train on.
    folder = output / f"signals-{processes.rank}-of-{processes.size}"
    record_teacher(folder, teacher, windows, steps=steps, k=TOP_K, temperature=TEMPERATURE)
    offline = OfflineBatches(folder, xp=xp, ranks=processes, shared=False)

    students = {name: model(64, 1, seed=1) for name in ("alone", "distilled", "offline")}
    average = ExponentialAverage(students["distilled"], WarmupDecay(0.99))
    soft = {"alpha": Linear(1.0, 0.7, steps), "temperature": TEMPERATURE}
    fit("alone", LanguageModelling(students["alone"]), windows, steps)
    online = Distiller(students["distilled"], teacher, **soft)
    fit("distilled", online, windows, steps, average=average)
    fit("offline", Distiller(students["offline"], offline.teacher(), **soft), offline, steps)

    held_out = list(
        validation_batches(
            corpus.validation, batch=options.batch, seq_len=options.seq, max_windows=32, xp=xp
        )
    )
    models = {"teacher": teacher, **students, "distilled, averaged": average.model}
    results = {name: evaluate(each, held_out).bits_per_byte for name, each in models.items()}
    if processes.rank == 0:
        save_model(output / "student.safetensors", students["distilled"])
        for name, bits in results.items():
            print(f"{name:>19}: {bits:.3f} bits per byte")
    processes.close()
    return results


if __name__ == "__main__":
    main()
