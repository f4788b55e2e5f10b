"""memory_read: compared with softmax attention, for any split of the memory; gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayShapeError, ConfigError
from cukit.graph_memory import memory_read, memory_read_backward, read
from cukit.graph_memory.read import plan_parts
from cukit.reference import graph_memory as reference
from tests.contract import assert_close, check_against_reference, check_gradient, random, to_device


@dataclass(frozen=True)
class Size:
    queries: int
    rows: int
    dim: int
    parts: int


SIZES = [Size(5, 70, 64, 1), Size(3, 96, 64, 4)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_reference(device, rng, size, dtype, monkeypatch):
    monkeypatch.setattr(read, "plan_parts", lambda *_: size.parts)
    queries = random(rng, (size.queries, size.dim), dtype)
    memory = random(rng, (size.rows, size.dim), dtype)
    check_against_reference(
        memory_read,
        reference.memory_read,
        (queries, memory),
        device=device,
        names=("out", "lse"),
        return_lse=True,
        atol=2e-2 if dtype == "bfloat16" else 3e-3,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_backward_matches_reference(device, rng, dtype, parts, monkeypatch):
    monkeypatch.setattr(read, "plan_parts", lambda *_: parts)
    grad, queries, memory = (random(rng, (rows, 64), dtype, 0.5) for rows in (5, 5, 70))
    kept = reference.memory_read(queries, memory, return_lse=True)
    arrays = (grad, queries, memory, *kept)
    low = reference.memory_read_backward(*arrays)
    wide = reference.memory_read_backward(*(array.astype(np.float64) for array in arrays))
    got = memory_read_backward(*to_device(device, *arrays))
    for name, result, plain, exact in zip(("queries", "memory"), got, low, wide, strict=True):
        assert_close(name, result, plain, exact, 2e-2 if dtype == "bfloat16" else 3e-3)


def test_gradients_by_finite_differences(rng):
    def backward(grad, queries, memory):
        out, lse = memory_read(queries, memory, scale=0.7, return_lse=True)
        return memory_read_backward(grad, queries, memory, out, lse, scale=0.7)

    inputs = rng.standard_normal((4, 6)), rng.standard_normal((9, 6))
    check_gradient(lambda q, m: memory_read(q, m, scale=0.7), backward, inputs, rng)


def test_reads_are_convex_combinations_of_rows(rng):
    """Weights sum to 1; a query equal to a row, with a large scale, reads that row."""
    memory = rng.standard_normal((20, 5))
    out = memory_read(rng.standard_normal((7, 5)), memory)
    assert (out <= memory.max(axis=0)).all()
    assert (out >= memory.min(axis=0)).all()
    memory /= np.linalg.norm(memory, axis=1, keepdims=True)
    np.testing.assert_allclose(memory_read(memory, memory, scale=1e4), memory, atol=1e-6)


def test_errors_name_the_argument(rng):
    queries, memory = random(rng, (3, 8), "float32"), random(rng, (9, 8), "float32")
    with pytest.raises(ArrayShapeError, match="memory must have rows"):
        memory_read(queries, memory[:0])
    with pytest.raises(ConfigError, match="scale"):
        memory_read(queries, memory, scale=0.0)


def test_the_plan_fills_the_gpu():
    device = TYPICAL_DEVICES["sm_90"]
    assert plan_parts(4, 65536, device) == 128
    assert plan_parts(300, 65536, device) == 32
    assert plan_parts(4, 65537, device) == 1
    assert plan_parts(1 << 20, 65536, device) == 1
