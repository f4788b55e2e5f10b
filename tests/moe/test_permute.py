"""moe_permute and moe_unpermute, with their gradients: bytes moved, sums, choices without a row."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.moe import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)
from cukit.moe.permute import plan_slices
from cukit.reference import moe as reference
from tests.contract import (
    DTYPES,
    another_order,
    check_against_reference,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)
from tests.quick_run import possible


# num_tokens, hidden, top_k: accesses of one element, several accesses per thread, several slices,
# more choices than loads in flight.
@dataclass(frozen=True)
class Size:
    num_tokens: int
    hidden: int
    top_k: int


SIZES = [
    Size(1, 8, 1),
    Size(5, 3, 2),
    Size(7, 4104, 8),
    Size(3, 9000, 3),
    Size(20, 72, 11),
    Size(0, 8, 2),
]
LARGE = [Size(512, 7168, 8)]


def order_of(rng, num_tokens, top_k, capacity=None, num_experts=5):
    """Rows of random choices, and the number of rows."""
    experts = rng.integers(0, num_experts, (num_tokens, top_k)).astype(np.int32)
    rows = reference.expert_order(experts, num_experts, capacity=capacity).rows
    return rows, rows.size if capacity is None else num_experts * capacity


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [None, 3])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_permute_moves_rows(device, rng, size, dtype, capacity):
    num_tokens, hidden, top_k = astuple(size)
    rows, num_rows = order_of(rng, num_tokens, top_k, capacity)
    x = random(rng, (num_tokens, hidden), dtype)
    placed_x, placed_rows = to_device(device, x, rows)
    out = poisoned(device, (num_rows, hidden), dtype)
    if device == "cpu":
        out[...] = 0
    assert moe_permute(placed_x, placed_rows, num_rows=num_rows, out=out) is out
    expected = np.full_like(x, np.nan if device != "cpu" else 0, shape=(num_rows, hidden))
    token, choice = np.nonzero(rows >= 0)
    expected[rows[token, choice]] = x[token]
    assert to_host(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("weighted", [True, False])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_unpermute_matches_reference(device, rng, size, dtype, capacity, weighted):
    num_tokens, hidden, top_k = astuple(size)
    rows, num_rows = order_of(rng, num_tokens, top_k, capacity)
    y = random(rng, (num_rows, hidden), dtype)
    weights = (random(rng, (num_tokens, top_k), "float32"),) if weighted else ()
    check_against_reference(
        moe_unpermute if weighted else moe_permute_backward,
        reference.moe_unpermute,
        (y, rows, *weights),
        device=device,
        names=("x",),
    )


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [None, 3])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_unpermute_backward_matches_reference(device, rng, size, dtype, capacity):
    num_tokens, hidden, top_k = astuple(size)
    rows, num_rows = order_of(rng, num_tokens, top_k, capacity)
    used = np.sort(rows[rows >= 0])

    def at_used_rows(function):
        def run(*inputs):
            grad_y, grad_weights = function(*inputs)
            return to_host(grad_y)[used], grad_weights

        return run

    check_against_reference(
        at_used_rows(moe_unpermute_backward),
        at_used_rows(reference.moe_unpermute_backward),
        (
            random(rng, (num_tokens, hidden), dtype, scale=hidden**-0.5),
            random(rng, (num_rows, hidden), dtype),
            rows,
            random(rng, (num_tokens, top_k), "float32"),
        ),
        device=device,
        names=("grad_y", "grad_weights"),
    )


def test_rows_of_dropped_choices_are_never_read(device):
    """A choice without a row contributes nothing, even if its weight is NaN."""
    rows = np.array([[0, -1], [-1, -1]], np.int32)
    y, weights = np.ones((1, 16), np.float32), np.array([[2, np.nan], [np.nan, 1]], np.float32)
    with another_order(device, 0):
        x = moe_unpermute(*to_device(device, y, rows, weights))
    np.testing.assert_array_equal(to_host(x), [[2] * 16, [0] * 16])


def test_gradients_by_finite_differences(rng):
    rows, num_rows = order_of(rng, 6, 3, capacity=3)
    assert (rows < 0).any()
    check_gradient(
        lambda x: reference.moe_permute(x, rows, num_rows),
        lambda grad, x: reference.moe_permute_backward(grad, rows),
        (rng.standard_normal((6, 4)),),
        rng,
    )
    check_gradient(
        lambda y, weights: reference.moe_unpermute(y, rows, weights),
        lambda grad, y, weights: reference.moe_unpermute_backward(grad, y, rows, weights),
        (rng.standard_normal((num_rows, 4)), rng.standard_normal((6, 3))),
        rng,
    )


def test_errors_name_the_argument():
    x, rows = np.zeros((3, 8), np.float32), np.zeros((3, 2), np.int32)
    with pytest.raises(ArrayShapeError, match=r"moe_permute: x must have shape \(3, any\)"):
        moe_permute(x[:2], rows)
    with pytest.raises(ArrayDtypeError, match="moe_permute: rows must be int32"):
        moe_permute(x, rows.astype(np.int64))
    with pytest.raises(ConfigError, match="num_rows must be an integer of 0 or more"):
        moe_permute(x, rows, num_rows=-1)
    with pytest.raises(ArrayShapeError, match=r"moe_unpermute: weights must have shape \(3, 2\)"):
        moe_unpermute(x, rows, np.zeros((2, 2), np.float32))
    with pytest.raises(ArrayShapeError, match=r"out must have shape \(3, 8\)"):
        moe_unpermute(x, rows, out=x[:2].copy())
    with pytest.raises(ArrayLayoutError, match="moe_unpermute: out overlaps y in memory"):
        moe_unpermute(x, rows, out=x)
    with pytest.raises(ArrayShapeError, match=r"grad_out must have shape \(3, 8\)"):
        moe_unpermute_backward(x[:2], x, rows, np.zeros((3, 2), np.float32))


@pytest.mark.parametrize("vecs", [0, 1, 31, 896, 1025, 100_000])
@pytest.mark.parametrize("vecs_per_thread", [1, 4])
def test_slices_cover_a_row(vecs, vecs_per_thread):
    config = plan_slices(vecs, vecs_per_thread)
    assert config.slices * config.threads * config.vecs_per_thread >= vecs
    assert config.threads % 32 == 0
    assert config.threads <= 256
