"""expert_order: a stable counting sort, with and without a capacity."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.moe import expert_order
from cukit.moe.order import plan_expert_order
from tests.contract import another_order, to_device, to_host
from tests.quick_run import possible


# num_tokens, top_k, num_experts: one token, no tokens, partial chunks, experts that no token
# chooses, more experts than threads in a block, chunks of several rounds.
@dataclass(frozen=True)
class Size:
    num_tokens: int
    top_k: int
    num_experts: int


SIZES = [
    Size(1, 1, 1),
    Size(0, 4, 8),
    Size(65, 2, 40),
    Size(300, 3, 1000),
    Size(700, 8, 128),
    Size(1100, 32, 1000),
    Size(20_000, 8, 64),
]
KINDS = ["uniform", "one", "outside"]


def choices(rng, kind, size):
    """Expert ids: uniformly distributed, all equal, or some out of range."""
    num_tokens, top_k, num_experts = astuple(size)
    if kind == "one":
        return np.full((num_tokens, top_k), num_experts - 1, np.int32)
    low, high = (-2, num_experts + 3) if kind == "outside" else (0, num_experts)
    return rng.integers(low, high, (num_tokens, top_k)).astype(np.int32)


def check_order(order, ids, num_experts, capacity):
    """Compares an order with the definition, choice by choice."""
    rows, counts, offsets = map(to_host, order)
    expected = np.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(offsets, [0, *np.cumsum(expected)])
    seen = np.zeros(num_experts, np.int64)
    for expert, row in zip(ids.ravel(), rows.ravel(), strict=True):
        if not 0 <= expert < num_experts:
            assert row == -1
            continue
        rank, start = seen[expert], offsets[expert]
        if capacity is not None:
            start = expert * capacity
        assert row == (-1 if capacity is not None and rank >= capacity else start + rank)
        seen[expert] += 1


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 5])
@possible(lambda device, size: device == "gpu" or size.num_tokens < 2000)
def test_places_every_choice(device, rng, size, kind, capacity):
    ids = choices(rng, kind, size)
    (placed,) = to_device(device, ids)
    first = None
    for repeat in range(2):
        with another_order(device, repeat):
            order = expert_order(placed, size.num_experts, capacity=capacity)
        check_order(order, ids, size.num_experts, capacity)
        rows = to_host(order.rows)
        assert first is None or (rows == first).all()
        first = rows


def test_errors_name_the_argument():
    ids = np.zeros((3, 2), np.int32)
    with pytest.raises(ArrayDtypeError, match="expert_order: experts must be int32"):
        expert_order(ids.astype(np.int64), 4)
    with pytest.raises(ArrayShapeError, match="experts must have 2 axes"):
        expert_order(ids[0], 4)
    with pytest.raises(ConfigError, match=r"num_experts must be an integer of 1 or more .* got 0"):
        expert_order(ids, 0)
    with pytest.raises(ConfigError, match="capacity must be an integer of 1 or more and at most"):
        expert_order(ids, 4, capacity=0)


def test_limits_of_the_kernel_are_named(device):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    (ids,) = to_device(device, np.zeros((3, 2), np.int32))
    with pytest.raises(ConfigError, match="num_experts must be at most 1024 on the GPU, got 1025"):
        expert_order(ids, 1025)


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 4096, 10**6])
@pytest.mark.parametrize("num_experts", [1, 32, 33, 128, 256, 1024])
def test_the_plan(num_tokens, num_experts):
    config = plan_expert_order(num_tokens, num_experts, 132)
    assert config.bins >= num_experts
    assert config.num_chunks * config.chunk >= num_tokens
    assert 1 <= config.num_chunks <= 132
    assert config.bins * (config.threads // 32 + 1) * 4 <= 48 * 1024


def test_the_choices_of_a_chunk_can_be_counted():
    """A sum of four counts must fit in 16 bits."""
    for num_tokens, top_k in ((100, 15_000), (2**20, 32), (2**24, 1)):
        config = plan_expert_order(num_tokens, 128, 132, top_k)
        assert 4 * config.chunk * top_k < 2**16
        assert config.num_chunks * config.chunk >= num_tokens


def test_more_choices_than_fit_in_a_count_are_rejected(device):
    if device == "cpu":
        pytest.skip("a limit of the kernels")
    (ids,) = to_device(device, np.zeros((1, 2**14), np.int32))
    with pytest.raises(ArrayShapeError, match="at most 16383 columns"):
        expert_order(ids, 2)
