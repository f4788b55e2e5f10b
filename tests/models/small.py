"""Models small enough for finite differences and float64 references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cukit.models import Transformer, TransformerConfig

CPU_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
"""Devices for whole models: the tests of the ops cover the emulator."""

SMALL = TransformerConfig(
    vocab_size=23,
    hidden_size=16,
    num_layers=2,
    num_heads_q=4,
    num_heads_kv=2,
    head_dim=4,
    intermediate_size=24,
    max_positions=12,
    dtype="float64",
)


def small_model(seed: int = 0, xp: Any = np, **changes: Any) -> Transformer:
    """A new model whose norm weights are not all one, so that their gradients are tested."""
    model = Transformer.initialise(replace(SMALL, **changes), seed=seed, xp=xp)
    rng = np.random.default_rng(seed + 100)
    for array in model.parameters.values():
        if array.ndim == 1:
            array[...] = xp.asarray(rng.uniform(0.5, 1.5, array.shape).astype(array.dtype))
    return model


def small_tokens(rng: np.random.Generator, batch: int = 2, seq_len: int = 7) -> Any:
    return rng.integers(0, SMALL.vocab_size, (batch, seq_len)).astype(np.int32)
