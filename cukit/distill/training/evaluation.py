"""Quality of a model on validation text, alone and compared with its teacher."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cukit.core.arrays import Array
from cukit.distill.losses.cross_entropy import cross_entropy
from cukit.distill.losses.kl_divergence import kl_divergence
from cukit.errors import DataError
from cukit.models import Transformer
from cukit.models.parameters import host_array


@dataclass(frozen=True)
class Evaluation:
    """Means over validation tokens. A token is a byte, so bits per token are bits per byte."""

    bits_per_byte: float
    accuracy: float
    """Share of tokens where the model's top-1 token is the target."""
    teacher_kl_bits: float | None
    """KL(teacher || model) in bits per token; None without a teacher."""
    teacher_agreement: float | None
    """Share of tokens where the model's top-1 token is the teacher's."""
    window_bits: tuple[float, ...] = ()
    """Bits per byte of each window."""


@dataclass(frozen=True)
class Gain:
    """Bits per byte that a model saves over another on the same text; negative if it needs more."""

    bits_per_byte: float
    low: float
    """The ends of the 95% confidence interval."""
    high: float
    num_windows: int


def gain_of(model: Evaluation, other: Evaluation) -> Gain:
    """The mean difference over validation windows, with its interval by Student's t.

    Differences are paired by window, so the varying difficulty of windows cancels. Windows are
    assumed independent. Fewer than FEWEST_WINDOWS have no interval (infinite ends).
    """
    differences = np.subtract(other.window_bits, model.window_bits)
    mean, count = float(differences.mean()), len(differences)
    if count < FEWEST_WINDOWS:
        return Gain(mean, -math.inf, math.inf, count)
    half = _student_t(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return Gain(mean, mean - half, mean + half, count)


@dataclass(frozen=True)
class Share:
    """The share of the gap to a teacher that a model closes."""

    share: float
    low: float
    """The ends of the 95% confidence interval."""
    high: float


def share_of_gap(model: Evaluation, other: Evaluation, teacher: Evaluation) -> Share | None:
    """The share of the gap between `other` and `teacher` that the model closes; None if the teacher
    is not better.

    A ratio of means over the same windows; its interval comes from the windows' residuals (delta
    method).
    """
    gains = np.subtract(other.window_bits, model.window_bits)
    gaps = np.subtract(other.window_bits, teacher.window_bits)
    gap, count = float(gaps.mean()), len(gaps)
    if gap <= 0:
        return None
    share = float(gains.mean()) / gap
    if count < FEWEST_WINDOWS:
        return Share(share, -math.inf, math.inf)
    spread = float((gains - share * gaps).std(ddof=1)) / gap
    half = _student_t(count - 1) * spread / math.sqrt(count)
    return Share(share, share - half, share + half)


FEWEST_WINDOWS = 8
"""Minimum number of windows for a confidence interval."""


def _student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t distribution (Cornish-Fisher; Abramowitz and Stegun,
    26.7.5), accurate to 0.001 for 7 or more degrees of freedom."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(degrees**power) for power, term in enumerate(terms))


def evaluate(
    model: Transformer,
    batches: Iterable[tuple[Array, Array]],
    teacher: Transformer | None = None,
    *,
    workers: int = 1,
) -> Evaluation:
    """Evaluate `model` on `batches` of (tokens, targets); sums stay on the device until the end.

    workers: number of threads, each of which evaluates one batch at a time; more than 1 only on
        the CPU.
    """
    sums: dict[str, Array] = {}
    windows: list[Array] = []
    num_tokens = 0

    def score(batch: tuple[Array, Array]) -> tuple[Array, dict[str, Array]]:
        tokens, targets = batch
        flat = targets.reshape(-1)
        logits = model.logits(model.forward(tokens, keep=False).hidden)
        choice = logits.astype(np.float32).argmax(-1)
        losses: Array = cross_entropy(logits, flat, reduction="none")
        rows = losses.reshape(targets.shape)
        found = {"right": (choice == flat).sum()}
        if teacher is not None:
            teacher_logits = teacher.logits(teacher.forward(tokens, keep=False).hidden)
            teacher_choice = teacher_logits.astype(np.float32).argmax(-1)
            found["kl"] = kl_divergence(logits, teacher_logits, reduction="sum")
            found["agree"] = (choice == teacher_choice).sum()
        return rows, found

    with ThreadPoolExecutor(workers) as pool:
        # A single worker is the calling thread, because CuPy's current stream is per thread.
        scored = map(score, batches) if workers == 1 else pool.map(score, batches)
        for rows, found in scored:
            num_tokens += rows.size
            windows.append(rows.mean(axis=-1))
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
    if num_tokens == 0:
        raise DataError("evaluation: no validation text")
    means = {name: float(value) / num_tokens for name, value in sums.items()}
    window_bits = np.concatenate([host_array(each) for each in windows]) / math.log(2)
    return Evaluation(
        bits_per_byte=float(window_bits.mean(dtype=np.float64)),
        accuracy=means["right"],
        teacher_kl_bits=means["kl"] / math.log(2) if teacher is not None else None,
        teacher_agreement=means.get("agree"),
        window_bits=tuple(window_bits.tolist()),
    )
