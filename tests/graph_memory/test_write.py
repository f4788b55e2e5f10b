"""memory_write: bitwise independence of order, invariants, gradients."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.graph_memory import memory_write, memory_write_backward
from cukit.reference import graph_memory as reference
from tests.contract import check_against_reference, check_gradient, random, to_device, to_host

SIZES = [(1, 1, 8), (20, 45, 24), (6, 70, 129)]  # rows, writes, dim


def writes(rng, size, dtype):
    """memory, indices (some out of range, row 0 often), values, gates (some below 0)."""
    rows, count, dim = size
    indices = rng.integers(-1, rows + 1, count).astype(np.int32)
    indices[: count // 3] = 0
    gates = rng.uniform(-0.1, 0.6, count).astype("float64" if dtype == "float64" else "float32")
    return random(rng, (rows, dim), dtype), indices, random(rng, (count, dim), dtype), gates


@pytest.mark.parametrize("number", range(len(SIZES)), ids=lambda n: "x".join(map(str, SIZES[n])))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matches_reference(device, rng, number, dtype):
    check_against_reference(
        memory_write,
        reference.memory_write,
        writes(rng, SIZES[number], dtype),
        device=device,
        names=("memory", "totals"),
        keep=True,
    )


def test_the_definition(rng):
    memory, indices, values, gates = writes(rng, (7, 30, 5), "float64")
    want = memory.copy()
    for row in range(7):
        own = np.flatnonzero(indices == row)
        g = np.maximum(gates[own], 0)
        c = max(1.0, g.sum())
        want[row] = (1 - g.sum() / c) * memory[row] + (g[:, None] * values[own]).sum(axis=0) / c
    got = memory_write(memory, indices, values, gates)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_order_of_writes_changes_no_bits(device, rng, dtype):
    """Terms of very different sizes, whose float sums depend on the order."""
    memory, indices, values, gates = writes(rng, (5, 60, 40), dtype)
    sizes = 10.0 ** rng.integers(-6, 6, (60, 1))
    values = (values.astype(np.float64) * sizes).astype(values.dtype)
    results = set()
    for _ in range(4):
        order = rng.permutation(60)
        shuffled = [array[order] for array in (indices, values, gates)]
        results.add(to_host(memory_write(*to_device(device, memory, *shuffled))).tobytes())
    assert len(results) == 1


def test_common_offsets_are_kept(device, rng):
    """Weights sum to 1: constant values written to a constant memory do not change it."""
    _, indices, _, gates = writes(rng, (8, 40, 16), "float32")
    memory, values = np.full((8, 16), 3.0, np.float32), np.full((40, 16), 3.0, np.float32)
    out = to_host(memory_write(*to_device(device, memory, indices, values, gates)))
    np.testing.assert_allclose(out, 3.0, rtol=1e-6)


def test_a_gate_of_one_replaces(device, rng):
    memory, values = random(rng, (3, 16), "float32"), random(rng, (2, 16), "float32")
    memory[1] = np.nan
    indices, gates = np.array([1, 7], np.int32), np.ones(2, np.float32)
    placed = to_device(device, memory, indices, values, gates)
    out = to_host(memory_write(*placed))
    np.testing.assert_array_equal(out[1], values[0])
    np.testing.assert_array_equal(out[[0, 2]], memory[[0, 2]])
    assert memory_write(*placed, inplace=True) is placed[0]
    np.testing.assert_array_equal(to_host(placed[0]), out)


def test_nonfinite_values_stay_in_their_row_and_column(device, rng):
    memory, values = random(rng, (3, 8), "float32"), random(rng, (4, 8), "float32")
    values[1, 2], values[2, 3] = np.inf, np.nan
    indices, gates = np.array([0, 0, 0, 1], np.int32), np.full(4, 0.25, np.float32)
    out = to_host(memory_write(*to_device(device, memory, indices, values, gates)))
    assert np.argwhere(~np.isfinite(out)).tolist() == [[0, 2], [0, 3]]


def test_only_a_memory_that_is_written_has_to_be_writable(rng):
    memory, indices, values, gates = writes(rng, SIZES[0], "float32")
    memory.flags.writeable = False
    memory_write(memory, indices, values, gates)
    with pytest.raises(ArrayLayoutError, match="memory_write: memory is read-only"):
        memory_write(memory, indices, values, gates, inplace=True)


def test_nothing_to_write(device, rng):
    memory = random(rng, (4, 8), "float32")
    none = np.zeros(0, np.int32), np.zeros((0, 8), np.float32), np.zeros(0, np.float32)
    out, totals = memory_write(*to_device(device, memory, *none), keep=True)
    np.testing.assert_array_equal(to_host(out), memory)
    np.testing.assert_array_equal(to_host(totals), 0)


@pytest.mark.parametrize("number", range(len(SIZES)), ids=lambda n: "x".join(map(str, SIZES[n])))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_matches_reference(device, rng, number, dtype):
    memory, indices, values, gates = writes(rng, SIZES[number], dtype)
    out, totals = reference.memory_write(memory, indices, values, gates, keep=True)
    check_against_reference(
        memory_write_backward,
        reference.memory_write_backward,
        (random(rng, memory.shape, dtype), memory, out, indices, values, gates, totals),
        device=device,
        names=("memory", "values", "gates"),
    )


def test_gradients_match_finite_differences(rng):
    memory, indices, values, gates = writes(rng, (6, 25, 4), "float64")
    gates = np.abs(gates) + 0.02

    def forward(memory, values, gates):
        return memory_write(memory, indices, values, gates)

    def backward(grad, memory, values, gates):
        out, totals = memory_write(memory, indices, values, gates, keep=True)
        return memory_write_backward(grad, memory, out, indices, values, gates, totals)

    check_gradient(forward, backward, (memory, values, gates), rng)


def test_errors_name_the_argument(rng):
    memory, indices, values, gates = writes(rng, (5, 9, 8), "float32")
    with pytest.raises(ArrayDtypeError, match="indices must be int32"):
        memory_write(memory, indices.astype(np.int64), values, gates)
    with pytest.raises(ArrayShapeError, match=r"values must have shape \(9, 8\)"):
        memory_write(memory, indices, values[:, :4].copy(), gates)
    with pytest.raises(ArrayShapeError, match=r"gates must have shape \(9,\)"):
        memory_write(memory, indices, values, gates[:3].copy())
