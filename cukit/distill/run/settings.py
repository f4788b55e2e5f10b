"""Settings of a distillation run: sizes, steps, seeds. The same settings give the same result."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cukit.distill.run._host_workers import available_cores
from cukit.distill.training.data import VOCAB_SIZE
from cukit.errors import ConfigError
from cukit.models import TransformerConfig

# Attention has no float32 kernel, and float16 gradients underflow without loss scaling.
_DTYPES = {"cpu": ("float32", "float64", "bfloat16"), "gpu": ("bfloat16",)}

# Outside these limits the softened distributions are one-hot or uniform in float32.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 1000.0


@dataclass(frozen=True)
class DistillSettings:
    """Everything that determines the result of `cukit distill`, except the text."""

    device: str
    dtype: str
    seed: int
    batch: int
    seq_len: int
    accumulate: int
    workers: int
    """Threads that share a batch on the CPU; a setting, because it affects rounding."""

    teacher_hidden: int
    teacher_layers: int
    teacher_steps: int
    teacher_lr: float

    student_hidden: int
    student_layers: int
    steps: int
    """Training steps of each student."""
    lr: float
    """Peak learning rate of each student."""

    head_dim: int
    tie_embeddings: bool
    temperature: float
    alpha: float
    """Weight of the soft loss; the cross-entropy has weight 1 - alpha."""
    hidden_weight: float
    """Weight of the hidden-state term; 0 for none."""
    attention_weight: float
    """Weight of the attention term; 0 for none."""
    ablation: bool
    """Whether to distil further students, one with each of these terms."""
    packages: bool
    """Whether to train on the sources of installed packages as well."""

    weight_decay: float
    max_grad_norm: float
    warmup_share: float
    checkpoint_every: int
    eval_windows: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{_option(field.name)}: expected an integer, got {value!r}")
            if field.type == "float" and not math.isfinite(value):
                raise ConfigError(f"{_option(field.name)}: expected a number, got {value!r}")
            if field.type == "int" and field.name != "seed" and value < 1:
                raise ConfigError(f"{_option(field.name)}: expected 1 or more, got {value}")
        if self.device not in ("cpu", "gpu"):
            raise ConfigError(f"--device: expected cpu or gpu, got {self.device!r}")
        if self.workers > (self.batch if self.device == "cpu" else 1):
            raise ConfigError(
                f"--workers: 1 on the GPU, at most --batch ({self.batch}) on the CPU, "
                f"got {self.workers}"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed: expected 0 or more, got {self.seed}")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"--alpha: expected a number between 0 and 1, got {self.alpha}")
        if not _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE:
            raise ConfigError(
                f"--temperature: expected {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}, "
                f"got {self.temperature}"
            )
        for name in ("lr", "teacher_lr", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{_option(name)}: expected more than 0")
        for name in ("hidden_weight", "attention_weight", "weight_decay", "warmup_share"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_option(name)}: expected 0 or more")
        for name in ("teacher_hidden", "student_hidden"):
            if getattr(self, name) % self.head_dim:
                raise ConfigError(
                    f"{_option(name)}: must be a multiple of --head-dim ({self.head_dim}), "
                    f"got {getattr(self, name)}"
                )
        if self.dtype not in _DTYPES[self.device]:
            raise ConfigError(
                f"--dtype: expected {' or '.join(_DTYPES[self.device])} on the {self.device}, "
                f"got {self.dtype!r}"
            )
        if self.device == "gpu" and (self.head_dim % 8 or self.head_dim > 256):
            raise ConfigError(
                f"--head-dim: on the GPU a multiple of 8 up to 256, got {self.head_dim}"
            )
        self.teacher_config()
        self.student_config()

    def teacher_config(self) -> TransformerConfig:
        """The teacher's architecture."""
        return self._model_config(self.teacher_hidden, self.teacher_layers)

    def student_config(self) -> TransformerConfig:
        """The architecture of all students."""
        return self._model_config(self.student_hidden, self.student_layers)

    def _model_config(self, hidden_size: int, num_layers: int) -> TransformerConfig:
        num_heads = hidden_size // self.head_dim
        return TransformerConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads_q=num_heads,
            # Two query heads share a KV head if the number of heads is even.
            num_heads_kv=num_heads // 2 if num_heads % 2 == 0 else num_heads,
            head_dim=self.head_dim,
            # At 8/3 of the hidden size, SwiGLU's three matrices equal a plain MLP's two in size.
            intermediate_size=-(-hidden_size * 8 // (3 * 32)) * 32,
            max_positions=self.seq_len,
            tie_embeddings=self.tie_embeddings,
            dtype=self.dtype,
        )

    def changed(self, other: DistillSettings) -> list[str]:
        """The options in which `other` differs, as "--lr (0.1, here 0.2)"."""
        return [
            f"{_option(field.name)} ({getattr(self, field.name)}, "
            f"here {getattr(other, field.name)})"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    def with_options(self, **options: Any) -> DistillSettings:
        """A copy with every option that is not None. With a new `batch` but no new `workers`,
        the workers are limited to the batch size."""
        given = {name: value for name, value in options.items() if value is not None}
        if "workers" not in given and isinstance(given.get("batch"), int):
            given["workers"] = max(1, min(self.workers, given["batch"]))
        return replace(self, **given)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DistillSettings:
        """The settings from `to_dict`. Raises ConfigError if names are missing or unknown."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"settings: {error}") from None


def _option(name: str) -> str:
    """The option of `cukit distill` for a setting."""
    return "--tied" if name == "tie_embeddings" else "--" + name.replace("_", "-")


DEFAULTS: dict[str, DistillSettings] = {
    # Two CPU cores, under four minutes.
    "cpu": DistillSettings(
        device="cpu",
        dtype="float32",
        seed=0,
        batch=8,
        seq_len=128,
        accumulate=1,
        workers=min(available_cores(), 8),
        teacher_hidden=128,
        teacher_layers=4,
        teacher_steps=1000,
        teacher_lr=3e-3,
        student_hidden=96,
        student_layers=2,
        steps=400,
        lr=3e-3,
        head_dim=32,
        tie_embeddings=True,
        temperature=1.0,
        alpha=0.9,
        hidden_weight=0.0,
        attention_weight=0.0,
        ablation=False,
        packages=False,
        weight_decay=0.1,
        max_grad_norm=1.0,
        warmup_share=0.05,
        checkpoint_every=100,
        eval_windows=256,
    ),
    # One data-centre GPU, a few minutes. The teacher reads 39 MB: less than one pass over
    # MAX_TEXT bytes (data.py). The student is too small to match the teacher.
    "gpu": DistillSettings(
        device="gpu",
        dtype="bfloat16",
        seed=0,
        batch=32,
        seq_len=1024,
        accumulate=1,
        workers=1,
        teacher_hidden=768,
        teacher_layers=10,
        teacher_steps=1200,
        teacher_lr=6e-4,
        student_hidden=256,
        student_layers=4,
        steps=1200,
        lr=1e-3,
        head_dim=64,
        tie_embeddings=True,
        temperature=1.0,
        alpha=1.0,
        hidden_weight=0.0,
        attention_weight=0.0,
        ablation=True,
        packages=True,
        weight_decay=0.1,
        max_grad_norm=1.0,
        warmup_share=0.05,
        checkpoint_every=500,
        eval_windows=256,
    ),
}
"""Default settings by device."""
