"""Quality of a model with compressed caches: bits per byte, and the error of attention outputs.

    python -m profiling.kv_compression runs/distill/teacher.safetensors
    python -m profiling.kv_compression MODEL --write      # into docs/kv_cache.md

Each validation window has a prompt, its first three quarters, whose keys and values are rounded to
16 bits and then compressed. The model predicts every byte of the last quarter from the compressed
keys and values of the prompt and the uncompressed ones of the last quarter. Nothing is timed.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cukit.attention import flash_attention, merge_attention_states
from cukit.distill import cross_entropy, read_corpus
from cukit.distill.training.data import validation_batches
from cukit.kv_cache import CompressedKV, compress_kv
from cukit.models import Transformer, load_model
from profiling.tables import ROOT, markdown, replace_between_marks

DOCUMENT = "docs/kv_cache.md"
MARKS = re.compile(r"(<!-- compression -->\n).*?(<!-- /compression -->)", re.DOTALL)

BATCH = 8
PROMPT_SHARE = 0.75
Options = dict[str, Any]


def strategies(prompt: int) -> list[tuple[str, str, Options]]:
    """Title, strategy and options of each row, for the given prompt length."""
    bits: list[tuple[str, str, Options]] = [
        (f"`{name}`", name, options)
        for name, options in (
            ("int8", {}),
            ("float8", {}),
            ("kivi4", {"window": 32}),
            ("kivi2", {"window": 32}),
        )
    ]
    budgets: list[tuple[str, str, Options]] = [
        (f"`{name}`, 1/{part} of the tokens", name, {"budget": prompt // part})
        for name in ("sink_window", "heavy_hitters", "snapkv")
        for part in (2, 4)
    ]
    return bits + budgets


@dataclass(frozen=True)
class Row:
    """The result of one strategy.

    ratio: compression ratio; error: of attention outputs. Both are means over layers and batches.
    bits: bits per byte of each window.
    """

    title: str
    ratio: float
    error: float
    bits: np.ndarray[Any, Any]

    @property
    def bits_per_byte(self) -> float:
        """The mean over the windows."""
        return float(self.bits.mean())

    def difference_from(self, other: Row) -> tuple[float, float]:
        """Mean difference in bits per byte on the same windows, and twice its standard error."""
        difference = self.bits - other.bits
        error = difference.std(ddof=1) / math.sqrt(difference.size)
        return float(difference.mean()), 2 * float(error)


class CompressedPrompt:
    """Caches of all layers (cukit.models.LayerCaches), filled and compressed by the first pass.

    strategy: None keeps the prompt uncompressed, in 16 bits.
    """

    positions = None

    def __init__(self, strategy: str | None, options: Options) -> None:
        self.length = 0
        self.layers: list[Any] = []
        self._strategy, self._options = strategy, options

    def attend(self, q: Any, k: Any, v: Any, layer: int) -> tuple[Any, Any]:
        """Attend without compression in the prompt, later to its compressed form and new tokens."""
        dtype = q.dtype
        q, k, v = (array.astype(np.float16) for array in (q, k, v))
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        if self.length:
            old = self.layers[layer].attend(q, first_position=self.length, return_lse=True)
            out, lse = merge_attention_states(*old, out, lse)
        elif self._strategy is None:
            self.layers.append(compress_kv(k, v, "sink_window", budget=k.shape[1]))
        else:
            self.layers.append(compress_kv(k, v, self._strategy, queries=q, **self._options))
        return out.astype(dtype), lse

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of the prompt or of the rest, after all layers have processed them."""
        self.length += num_tokens


def measure(
    model: Transformer, batches: Iterable[tuple[Any, Any]], title: str, strategy: str | None,
    options: Options,
) -> Row:  # fmt: skip
    """Measure a strategy: bits per byte of the last quarter of each window, ratio and error."""
    losses: list[Any] = []
    compressed: list[CompressedKV] = []
    for tokens, targets in batches:
        prompt = int(tokens.shape[1] * PROMPT_SHARE)
        caches = CompressedPrompt(strategy, options)
        for part in (slice(0, prompt), slice(prompt, None)):
            hidden = model.forward(
                np.ascontiguousarray(tokens[:, part]), keep=False, cache=caches
            ).hidden
        rest = np.ascontiguousarray(targets[:, prompt:]).reshape(-1)
        bits = cross_entropy(model.logits(hidden), rest, reduction="none") / math.log(2)
        losses.append(bits.reshape(len(tokens), -1).mean(-1, dtype=np.float64))
        compressed += caches.layers
    errors = [each.error for each in compressed if each.error is not None]
    return Row(
        title,
        float(np.mean([each.ratio for each in compressed])),
        float(np.mean(errors)) if errors else 0.0,
        np.concatenate(losses),
    )


def measure_all(model: Transformer, text: Any, num_windows: int) -> list[Row]:
    """Return a row without compression, then one for each strategy."""
    seq_len = model.config.max_positions
    batches = list(validation_batches(text, batch=BATCH, seq_len=seq_len, max_windows=num_windows))
    rows: list[tuple[str, str | None, Options]] = [("none", None, {})]
    rows += strategies(int(seq_len * PROMPT_SHARE))
    return [measure(model, batches, *row) for row in rows]


def table(model: Transformer, rows: Sequence[Row], num_windows: int) -> str:
    """Format the rows as Markdown, with a sentence about the model."""
    config = model.config
    prompt = int(config.max_positions * PROMPT_SHARE)
    cells = []
    for row in rows:
        difference, uncertainty = row.difference_from(rows[0])
        shown = f"{difference:+.3f} ± {uncertainty:.3f}" if row is not rows[0] else ""
        figures = [f"{row.ratio:.2f}", f"{row.error:.1%}", f"{row.bits_per_byte:.3f}", shown]
        cells.append([row.title, *figures])
    header = ["strategy", "times fewer bytes", "output error", "bits per byte", "added"]
    return (
        f"{markdown(header, cells, left=1)}\n"
        f"A small model on the CPU: {config.num_layers} layers, {config.hidden_size} wide, "
        f"{config.num_heads_kv} heads of {config.head_dim}; {num_windows} windows of "
        f"{config.max_positions} bytes, prompts of {prompt}. ± is twice the standard error of the "
        "difference.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with --write, update the document."""
    parser = argparse.ArgumentParser(prog="python -m profiling.kv_compression")
    parser.add_argument("model", type=Path, help="a model of `cukit distill`")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT}")
    options = parser.parse_args(arguments)
    model = load_model(options.model, dtype="float32")
    rows = measure_all(model, read_corpus().validation, options.windows)
    made = table(model, rows, options.windows)
    print(made)
    if options.write:
        replace_between_marks(ROOT / DOCUMENT, MARKS, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
