"""Heads sharded over ranks give the loss and the gradients of the whole head."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.core.kernel import Launch
from cukit.distill import (
    VocabularyShard,
    linear_distillation_loss,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_distillation_loss,
)
from cukit.distill.losses import vocabulary_parallel
from cukit.distributed import Alone, HostCommunicator
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.reference import losses as reference
from tests.contract import random, to_device, to_host
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


def head(
    rng: np.random.Generator, dtype: str, *, close: bool = False, rows: int = ROWS
) -> tuple[Any, ...]:
    """hidden, weight, teacher_hidden, teacher_weight, targets; close: the models nearly agree."""
    hidden = random(rng, (rows, HIDDEN), dtype)
    weight = random(rng, (VOCAB, HIDDEN), dtype, scale=0.3)
    teacher = random(rng, (rows, TEACHER_HIDDEN), dtype)
    teacher_weight = random(rng, (VOCAB, TEACHER_HIDDEN), dtype, scale=0.3)
    if close:
        teacher, teacher_weight = hidden.copy(), weight.copy()
        teacher_weight[::7] *= teacher_weight.dtype.type(1.01)
    targets = rng.integers(0, VOCAB, rows).astype(np.int32)
    targets[::5] = -100
    return hidden, weight, teacher, teacher_weight, targets


def sharded(size: int, arrays: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
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
    check(sharded(3, (*wide, targets), options), expected, 1e-12, 1e-13)


class ThroughHost:
    """Collectives of CuPy arrays through host memory, for ranks that share a GPU."""

    def __init__(self, comm: HostCommunicator) -> None:
        import cupy

        cupy.cuda.Device(0).use()
        cupy.cuda.runtime.free(0)  # sets the thread's context, which launches require
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.beside, self.join = comm.beside, comm.join

    def all_reduce(self, array: Any, op: str = "sum") -> None:
        host = array.get()
        self._comm.all_reduce(host, op)
        array.set(host)

    def all_gather(self, array: Any, out: Any) -> Any:
        out.set(self._comm.all_gather(array.get()))
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_the_gpu(rng: np.random.Generator, dtype: str, options: dict[str, Any]) -> None:
    arrays = to_device("gpu", *head(rng, dtype, rows=300))
    hidden, weight, teacher, teacher_weight, targets = arrays
    expected = linear_distillation_loss(*arrays[:4], targets=targets, **options)

    def work(comm: HostCommunicator) -> Any:
        shard = VocabularyShard(ThroughHost(comm), VOCAB)  # type: ignore[arg-type]
        return vocabulary_parallel_distillation_loss(
            hidden, shard.part(weight), teacher, shard.part(teacher_weight), shard=shard,
            targets=targets, **options,
        )  # fmt: skip

    rtol, atol = {"float32": (1e-4, 1e-4), "bfloat16": (2e-2, 1e-2)}[dtype]
    check(run_ranks(2, work), expected, rtol, atol)


class OneAtATime:
    """Runs one emulated kernel at a time: the emulator has one set of thread indices."""

    lock = threading.Lock()
    call = Launch.__call__

    def __call__(self, launch: Launch, *args: Any, **options: Any) -> None:
        with self.lock:
            OneAtATime.call(launch, *args, **options)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    turns = OneAtATime()
    monkeypatch.setattr(Launch, "__call__", lambda self, *a, **o: turns(self, *a, **o))
    with cukit.backend("emulator"):
        yield


SLOW = [
    pytest.param(options, marks=[] if index in (1, 4) else pytest.mark.slow, id=str(options))
    for index, options in enumerate(OPTIONS)
]
"""Each case compiles two or three kernels for the emulator."""


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("options", SLOW)
def test_kernels(
    rng: np.random.Generator, options: dict[str, Any], close: bool, emulated: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(vocabulary_parallel, "_FEWEST_ROWS", 3)
    arrays = head(rng, "float32", close=close)
    *wide, targets = (a if a.dtype.kind == "i" else a.astype(np.float64) for a in arrays)
    with cukit.backend("gpu"):  # NumPy arrays run the reference
        expected = linear_distillation_loss(*wide, targets=targets, **options)
    # Gradients of models that nearly agree are small differences of float32 values.
    atol = 1e-3 if close else 2e-5
    check(sharded(2, arrays, {**options, "chunk_tokens": 8}), expected, 2e-5, atol)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
def test_cross_entropy(rng: np.random.Generator, dtype: str, emulated: None) -> None:
    hidden, weight, _, _, targets = head(rng, dtype)
    exact = reference.linear_cross_entropy(
        hidden.astype(np.float64), weight.astype(np.float64), targets, softcap=5.0
    )

    def work(comm: HostCommunicator) -> Any:
        shard = VocabularyShard(comm, VOCAB)
        own = np.ascontiguousarray(shard.part(weight))
        into = np.ones(own.shape, np.float32)
        result = vocabulary_parallel_cross_entropy(
            hidden, own, targets, shard=shard, softcap=5.0, grad_weight=into
        )
        assert result.grad_weight is into
        into -= 1
        return result

    tolerance = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    check(run_ranks(2, work), exact, tolerance, tolerance)


def test_targets_outside_the_vocabulary_are_rejected(rng: np.random.Generator) -> None:
    hidden, weight, _, _, targets = head(rng, "float32")
    targets[1] = VOCAB
    shard = VocabularyShard(_FixedRank(1, 2), VOCAB)
    with pytest.raises(ArrayError, match=r"targets must be in 0\.\.1002"):
        vocabulary_parallel_cross_entropy(hidden, shard.part(weight), targets, shard=shard)


def test_shards_cover_the_vocabulary() -> None:
    for vocab_size, size in ((1003, 2), (23, 3), (8, 2), (5, 4), (256000, 2), (4, 4)):
        try:
            shards = [VocabularyShard(_FixedRank(rank, size), vocab_size) for rank in range(size)]
        except ConfigError:
            assert (vocab_size, size) == (5, 4)
            continue
        tokens = [token for each in shards for token in each.part(np.arange(vocab_size + 5))]
        assert tokens == list(range(vocab_size))
    with pytest.raises(ConfigError, match="vocab_size must be at least 3"):
        VocabularyShard(_FixedRank(0, 3), 2)
    for rank in range(6):  # on all processes, or the others would wait for the last
        with pytest.raises(
            ConfigError, match="9 tokens in shards of 2 leave none for the last of 6"
        ):
            VocabularyShard(_FixedRank(rank, 6), 9)


class _FixedRank(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_errors_name_the_argument(rng: np.random.Generator) -> None:
    hidden, weight, teacher, teacher_weight, targets = head(rng, "float32")
    shard = VocabularyShard(_FixedRank(1, 2), VOCAB)
    with pytest.raises(ArrayShapeError, match=r"weight must have 499 rows, tokens 504..1002"):
        vocabulary_parallel_cross_entropy(hidden, weight, targets, shard=shard)
    with pytest.raises(ArrayShapeError, match=r"teacher_weight must have 499 rows"):
        vocabulary_parallel_distillation_loss(
            hidden, shard.part(weight), teacher, teacher_weight, shard=shard
        )
    with pytest.raises(ConfigError, match="shard must be a VocabularyShard"):
        vocabulary_parallel_cross_entropy(hidden, weight, targets, shard=None)  # type: ignore[arg-type]
