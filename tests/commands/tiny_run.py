"""Options of `cukit distill` for models that train within seconds on a CPU."""

from __future__ import annotations

TINY_RUN = (
    "--device", "cpu", "--teacher-hidden", "32", "--teacher-layers", "1", "--teacher-steps", "6",
    "--student-hidden", "16", "--student-layers", "1", "--steps", "5", "--head-dim", "16",
    "--batch", "2", "--seq-len", "16", "--checkpoint-every", "2", "--eval-windows", "8",
)  # fmt: skip
