"""Heads spread over processes give the loss and the gradients of the whole head."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cukit.core.kernel import Launch
from cukit.distill import (
    VocabularyShard,
    linear_cross_entropy,
    linear_distillation_loss,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_distillation_loss,
)
from cukit.distill import vocabulary_parallel
from cukit.distributed import Alone, Ranks
from cukit.errors import ArrayShapeError, ConfigError
from tests.contract import random, to_host
from tests.distributed.ranks import run_ranks

ROWS, HIDDEN, TEACHER_HIDDEN, VOCAB = 13, 16, 24, 1003

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0, "hard_weight": 0.3, "scale_by_temperature_squared": True},
    {"softcap": 3.0, "teacher_softcap": 4.0, "logit_scale": 0.7, "hard_weight": 0.5},
    {"divergence": "reverse_kl", "hard_weight": 0.5},
    {"divergence": "jsd", "beta": 0.3},
    {"divergence": "skewed_forward_kl", "beta": 0.1},
    {"divergence": "skewed_reverse_kl", "beta": 0.1, "hard_weight": 0.2},
    {"divergence": "total_variation"},
    {"reduction": "none", "hard_weight": 0.5},
    {"normalizer": 40.0, "grad_loss": 0.5},
]


def head(rng: np.random.Generator, dtype: str, *, close: bool = False) -> tuple[Any, ...]:
    """hidden, weight, teacher_hidden, teacher_weight, targets; close: of models that nearly agree."""
    hidden = random(rng, (ROWS, HIDDEN), dtype)
    weight = random(rng, (VOCAB, HIDDEN), dtype, scale=0.3)
    teacher = random(rng, (ROWS, TEACHER_HIDDEN), dtype)
    teacher_weight = random(rng, (VOCAB, TEACHER_HIDDEN), dtype, scale=0.3)
    if close:
        teacher, teacher_weight = hidden.copy(), weight.copy()
        teacher_weight[::7] *= teacher_weight.dtype.type(1.01)
    targets = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    targets[::5] = -100
    return hidden, weight, teacher, teacher_weight, targets


def spread(size: int, arrays: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    hidden, weight, teacher, teacher_weight, targets = arrays

    def work(comm: Any) -> Any:
        shard = VocabularyShard(comm, VOCAB)
        own = [np.ascontiguousarray(shard.part(each)) for each in (weight, teacher_weight)]
        return vocabulary_parallel_distillation_loss(
            hidden, own[0], teacher, own[1], shard=shard, targets=targets, **options
        )

    return run_ranks(size, work)


def check(results: list[Any], expected: Any, rtol: float, atol: float) -> None:
    for result in results:
        for name in ("loss", "soft_loss", "hard_loss", "grad_hidden"):
            if not hasattr(expected, name):
                continue
            value = to_host(getattr(expected, name)).astype(np.float64)
            scale = float(np.abs(value).max())
            np.testing.assert_allclose(
                to_host(getattr(result, name)).astype(np.float64), value, rtol=rtol,
                atol=atol * max(scale, 1e-6), err_msg=name,
            )  # fmt: skip
            assert getattr(result, name).tobytes() == getattr(results[0], name).tobytes(), name
    weights = np.concatenate([to_host(each.grad_weight) for each in results]).astype(np.float64)
    exact = to_host(expected.grad_weight).astype(np.float64)
    np.testing.assert_allclose(weights, exact, rtol=rtol, atol=atol * np.abs(exact).max())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_processes_without_a_gpu(rng: np.random.Generator, options: dict[str, Any]) -> None:
    *wide, targets = head(rng, "float64")
    expected = linear_distillation_loss(*wide, targets=targets, **options)
    check(spread(3, (*wide, targets), options), expected, 1e-12, 1e-13)


class OneAtATime:
    """Kernels in the emulator take turns: it has one set of thread indices."""

    lock = threading.Lock()
    call = Launch.__call__

    def __call__(self, launch: Launch, *args: Any, **options: Any) -> None:
        with self.lock:
            OneAtATime.call(launch, *args, **options)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    import cukit

    turns = OneAtATime()
    monkeypatch.setattr(Launch, "__call__", lambda self, *a, **o: turns(self, *a, **o))
    with cukit.backend("emulator"):
        yield


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernels(
    rng: np.random.Generator, options: dict[str, Any], close: bool, emulated: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(vocabulary_parallel, "_FEWEST_ROWS", 3)
    arrays = head(rng, "float32", close=close)
    *wide, targets = (a if a.dtype.kind == "i" else a.astype(np.float64) for a in arrays)
    import cukit

    active, cukit.core.backend.active = cukit.core.backend.active, None
    try:
        expected = linear_distillation_loss(*wide, targets=targets, **options)
    finally:
        cukit.core.backend.active = active
    # Gradients of close models are differences of float32 logits.
    atol = 1e-3 if close else 2e-5
    check(spread(2, arrays, {**options, "chunk_tokens": 8}), expected, 2e-5, atol)
