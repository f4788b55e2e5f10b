"""How good a model is on text it has not seen, alone and beside its teacher."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cukit.core.arrays import Array
from cukit.distill.cross_entropy import cross_entropy
from cukit.distill.kl_divergence import kl_divergence
from cukit.errors import DataError
from cukit.models import Transformer


@dataclass(frozen=True)
class Evaluation:
    """Means over validation tokens. A token is a byte, so bits per token are bits per byte."""

    bits_per_byte: float
    accuracy: float
    """Share of tokens that the model's first choice gets right."""
    teacher_kl_bits: float | None
    """KL(teacher || model) in bits per token; None without a teacher."""
    teacher_agreement: float | None
    """Share of tokens where the model's first choice is the teacher's."""


def evaluate(
    model: Transformer,
    batches: Iterable[tuple[Array, Array]],
    teacher: Transformer | None = None,
    *,
    workers: int = 1,
) -> Evaluation:
    """Run `model` over `batches` of (tokens, targets); the sums stay on the device to the end.

    workers: batches that are looked at at once, on threads; for the CPU.
    """
    sums: dict[str, Array] = {}
    num_tokens = 0

    def judge(batch: tuple[Array, Array]) -> tuple[int, dict[str, Array]]:
        tokens, targets = batch
        flat = targets.reshape(-1)
        logits = model.logits(model.forward(tokens, keep=False).hidden)
        choice = logits.astype(np.float32).argmax(-1)
        found = {
            "loss": cross_entropy(logits, flat, reduction="sum"),
            "right": (choice == flat).sum(),
        }
        if teacher is not None:
            teacher_logits = teacher.logits(teacher.forward(tokens, keep=False).hidden)
            teacher_choice = teacher_logits.astype(np.float32).argmax(-1)
            found["kl"] = kl_divergence(logits, teacher_logits, reduction="sum")
            found["agree"] = (choice == teacher_choice).sum()
        return flat.size, found

    with ThreadPoolExecutor(workers) as pool:
        # A GPU's current stream belongs to its thread, so one worker is this thread itself.
        for size, found in map(judge, batches) if workers == 1 else pool.map(judge, batches):
            num_tokens += size
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
    if num_tokens == 0:
        raise DataError("evaluation: no validation text")
    means = {name: float(value) / num_tokens for name, value in sums.items()}
    return Evaluation(
        bits_per_byte=means["loss"] / math.log(2),
        accuracy=means["right"],
        teacher_kl_bits=means["kl"] / math.log(2) if teacher is not None else None,
        teacher_agreement=means.get("agree"),
    )
