"""Distils a model with `cukit.distill` alone: CuPy on a GPU, NumPy without one, no PyTorch.

    python examples/distill_cupy.py                                   # a teacher trained here
    python examples/distill_cupy.py --teacher runs/distill/teacher.safetensors --text corpus/

The student is taught twice, by the teacher itself and by its likeliest tokens alone, as they would
come from a disk: an offline teacher. `cukit distill` is the same with checkpoints, resumption and a
report.
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
    Distiller,
    LanguageModelling,
    Linear,
    Trainer,
    WarmupCosine,
    Windows,
    evaluate,
    read_corpus,
    validation_batches,
)
from cukit.models import Parameters, Transformer, TransformerConfig, load_model, save_model


class OfflineTeacher:
    """An objective of your own: KL from the k likeliest tokens of a teacher.

    Where a real offline teacher would read them from files, this one computes them when asked.
    """

    def __init__(self, student: Transformer, teacher: Transformer, k: int) -> None:
        self.model, self.teacher, self.k = student, teacher, k

    def trained(self) -> list[Parameters]:
        """What the optimizer updates."""
        return [self.model.parameters]

    def loss_and_gradients(
        self, tokens: Any, targets: Any, gradients: Sequence[Parameters], *, step: int,
        normalizer: float,
    ) -> dict[str, Any]:  # fmt: skip
        """The loss; gradients are added to those given."""
        student, teacher = self.model, self.teacher
        teacher_logits = teacher.logits(teacher.forward(tokens, keep=False).hidden)
        log_probs, ids = ck.teacher_top_k(teacher_logits, self.k)
        activations = student.forward(tokens)
        hidden = activations.hidden.reshape(-1, activations.hidden.shape[-1])
        logits = student.logits(hidden)
        loss, grad_logits = ck.topk_distillation_loss(
            logits, log_probs.reshape(-1, self.k), ids.reshape(-1, self.k), tail="bucket",
            normalizer=normalizer, return_grad=True,
        )  # fmt: skip
        grad_hidden, grad_head = ck.linear_backward(grad_logits, hidden, student.head)
        head_gradient = gradients[0][student.config.head_name]
        head_gradient += grad_head
        student.backward(activations, grad_hidden.reshape(activations.hidden.shape), gradients[0])
        return {"loss": loss}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, distils, compares; prints and returns bits per byte."""
    parser = argparse.ArgumentParser(description="Distil a model with cukit alone.")
    parser.add_argument("--teacher", type=Path, help="a model of `cukit distill`")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files and folders")
    parser.add_argument("--output", type=Path, default=Path("runs/distill_cupy"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    options = parser.parse_args(arguments)
    xp = importlib.import_module("cupy" if ck.default_device() == "gpu" else "numpy")
    dtype = "float32" if xp is np else "bfloat16"
    corpus = read_corpus(options.text)
    windows = Windows(corpus.train, batch=options.batch, seq_len=options.seq, seed=0, xp=xp)

    def model(hidden: int, layers: int, seed: int) -> Transformer:
        heads = hidden // 32
        config = TransformerConfig(
            256, hidden, layers, heads, heads, 32, 2 * hidden, options.seq, dtype=dtype
        )
        return Transformer.initialise(config, seed=seed, xp=xp)

    def fit(objective: Any, steps: int) -> None:
        rate = WarmupCosine(3e-3, warmup=max(1, steps // 10), steps=steps)
        trainer = Trainer(objective, windows, lr=rate)
        for _ in range(steps):
            statistics = trainer.train_step()
        print(type(objective).__name__, statistics.read())

    if options.teacher is None:
        teacher = model(128, 2, seed=0)
        fit(LanguageModelling(teacher), 2 * options.steps)
    else:
        teacher = load_model(options.teacher, xp, dtype=dtype)
    held_out = list(
        validation_batches(
            corpus.validation, batch=options.batch, seq_len=options.seq, max_windows=32, xp=xp
        )
    )
    results = {"teacher": evaluate(teacher, held_out).bits_per_byte}
    students = {name: model(64, 1, seed=1) for name in ("alone", "distilled", "from top 16")}
    alpha = Linear(1.0, 0.7, options.steps)  # from the teacher alone to some of the text
    objectives = {
        "alone": LanguageModelling(students["alone"]),
        "distilled": Distiller(students["distilled"], teacher, alpha=alpha, temperature=2.0),
        "from top 16": OfflineTeacher(students["from top 16"], teacher, 16),
    }
    for name, student in students.items():
        fit(objectives[name], options.steps)
        results[name] = evaluate(student, held_out).bits_per_byte
    options.output.mkdir(parents=True, exist_ok=True)
    save_model(options.output / "student.safetensors", students["distilled"])
    for name, bits in results.items():
        print(f"{name:>11}: {bits:.3f} bits per byte")
    return results


if __name__ == "__main__":
    main()
