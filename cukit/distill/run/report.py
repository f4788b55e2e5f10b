"""The results of a distillation run, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from cukit.distill.run._op_timer import OpTime
from cukit.distill.run._quantized_student import QuantizedEvaluation
from cukit.distill.run.settings import DistillSettings
from cukit.distill.training.evaluation import (
    FEWEST_WINDOWS,
    Evaluation,
    Gain,
    Share,
    gain_of,
    share_of_gap,
)
from cukit.memory import PoolStatistics

PHASES = ("teacher", "student", "student-alone")
"""The models of a run, in the order of their training."""

ABLATIONS = ("student-attention", "student-hidden")
"""Students distilled with one more term, if the settings request them; trained last."""

TITLES = {
    "teacher": "teacher",
    "student": "student, distilled",
    "student-alone": "student, alone",
    "student-attention": "with attention",
    "student-hidden": "with hidden states",
}


def phases_of(settings: DistillSettings) -> tuple[str, ...]:
    """The models of a run with these settings."""
    return (*PHASES, *ABLATIONS) if settings.ablation else PHASES


@dataclass
class TrainingRecord:
    """Progress and cost of one model's training, kept across interruptions."""

    steps: int = 0
    tokens: int = 0
    timed_tokens: int = 0
    """Tokens processed in `seconds`, without the first step after each start, in which kernels
    are compiled."""
    seconds: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) at about a hundred steps, up to the last checkpoint."""

    @property
    def tokens_per_second(self) -> float:
        return self.timed_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class DistillReport:
    """The results of a run; report.json contains `to_dict`."""

    settings: DistillSettings
    corpus: dict[str, Any]
    evaluations: dict[str, Evaluation]
    training: dict[str, TrainingRecord]
    num_parameters: dict[str, int]
    op_times: list[OpTime]
    sample: str
    peak_memory_bytes: int
    seconds: float
    pool: PoolStatistics | None = None
    """Statistics of the run's own memory pool, if it had one."""
    quantized: list[QuantizedEvaluation] = field(default_factory=list)
    """The distilled student with its weights in the requested formats."""

    @property
    def gain(self) -> Gain:
        """Bits per byte that the distilled student saves over the student trained alone."""
        return gain_of(self.evaluations["student"], self.evaluations["student-alone"])

    @property
    def helped(self) -> bool | None:
        """Whether distillation helped; None if the gain's confidence interval includes zero."""
        gain = self.gain
        return None if gain.low <= 0 <= gain.high else gain.low > 0

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        gain, helped = self.gain, self.helped
        if gain.num_windows < FEWEST_WINDOWS:
            return (
                f"No significant difference: {gain.num_windows} windows of validation text are too "
                f"few to compare the students; at least {FEWEST_WINDOWS} are needed. Use more text."
            )
        size = abs(gain.bits_per_byte)
        evidence = (
            f"(95% interval {gain.low:+.4f} to {gain.high:+.4f}, {gain.num_windows} windows of "
            "validation text)"
        )
        if helped is None:
            way = "better" if gain.bits_per_byte > 0 else "worse"
            return (
                f"No significant difference: the distilled student is {size:.4f} bits per byte "
                f"{way} than the same student trained alone {evidence}."
            )
        if not helped:
            return (
                f"The teacher did not help: the distilled student is {size:.4f} bits per byte "
                f"worse than the same student trained alone {evidence}."
            )
        closed = self.gap_closed
        if closed is None:
            beside = ""
        elif closed.share <= 1:
            beside = (
                f"; that is {closed.share:.1%} ({closed.low:.1%} to {closed.high:.1%}) of the gap "
                "to the teacher"
            )
        else:
            beside = ", and better than the teacher itself"
        return (
            f"The teacher helped: the distilled student is {size:.4f} bits per byte better than "
            f"the same student trained alone {evidence}{beside}."
        )

    @property
    def gap_closed(self) -> Share | None:
        """Share of the gap between the student alone and the teacher that distillation closed."""
        return self._gap_closed_by("student")

    def _gap_closed_by(self, phase: str) -> Share | None:
        found = self.evaluations
        return share_of_gap(found[phase], found["student-alone"], found["teacher"])

    @property
    def ways(self) -> list[dict[str, Any]]:
        """The gain of each distilled student over the student alone, with 95% intervals."""
        found = []
        for phase in ("student", *ABLATIONS):
            if phase not in self.evaluations:
                continue
            gain = gain_of(self.evaluations[phase], self.evaluations["student-alone"])
            share = self._gap_closed_by(phase)
            found.append(
                {
                    "model": phase,
                    "bits_per_byte": self.evaluations[phase].bits_per_byte,
                    "gain_bits_per_byte": gain.bits_per_byte,
                    "gain_interval": _interval(gain),
                    "gap_closed": None if share is None else share.share,
                    "gap_closed_interval": None if share is None else _interval(share),
                }
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        models = {
            phase: {
                "parameters": self.num_parameters[phase],
                **_means(self.evaluations[phase]),
                **asdict(self.training[phase]),
                "tokens_per_second": self.training[phase].tokens_per_second,
            }
            for phase in self.evaluations
        }
        return {
            "verdict": self.verdict,
            "distilled_beats_alone": self.helped,
            "gain_bits_per_byte": self.gain.bits_per_byte,
            "gain_interval": _interval(self.gain),
            "ways": self.ways,
            "validation_windows": self.gain.num_windows,
            "settings": self.settings.to_dict(),
            "corpus": self.corpus,
            "models": models,
            "quantized": [
                {
                    "format": each.format,
                    "weight_bytes": each.weight_bytes,
                    "bits_per_weight": each.bits_per_weight,
                    **_means(each.evaluation),
                }
                for each in self.quantized
            ],
            "milliseconds_per_step_by_op": [asdict(entry) for entry in self.op_times],
            "peak_memory_bytes": self.peak_memory_bytes,
            "pool": _pool_facts(self.pool),
            "seconds": self.seconds,
            "sample": self.sample,
        }


def _interval(found: Gain | Share) -> list[float] | None:
    """The interval, or None if there are too few windows for one."""
    return None if math.isinf(found.low) else [found.low, found.high]


def _means(evaluation: Evaluation) -> dict[str, Any]:
    return {key: value for key, value in asdict(evaluation).items() if key != "window_bits"}


_POOL_FACTS = (
    "peak_live_bytes",
    "peak_reserved_bytes",
    "num_allocations",
    "hit_rate",
    "fragmentation",
    "pages_remapped",
    "num_defragments",
    "bytes_moved",
)


def _pool_facts(pool: PoolStatistics | None) -> dict[str, Any] | None:
    return None if pool is None else {name: getattr(pool, name) for name in _POOL_FACTS}
