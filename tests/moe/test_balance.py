"""balance_experts: every expert is placed, device loads are even, results are deterministic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cukit.errors import ArrayShapeError, ConfigError
from cukit.moe import balance_experts
from cukit.moe.balance import pack_evenly, replicate


def check_placement(placement, loads, num_slots, num_devices):
    experts, replicas, slots, device_loads = placement
    assert experts.shape == (num_slots,)
    np.testing.assert_array_equal(replicas, np.bincount(experts, minlength=len(loads)))
    assert (replicas >= 1).all()
    for expert, own in enumerate(slots):
        np.testing.assert_array_equal(own[: replicas[expert]], np.flatnonzero(experts == expert))
        assert (own[replicas[expert] :] == -1).all()
    shares = (np.asarray(loads) / replicas)[experts]
    np.testing.assert_allclose(device_loads, shares.reshape(num_devices, -1).sum(axis=1))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_invariants(data):
    num_nodes = data.draw(st.integers(1, 3))
    num_groups = num_nodes * data.draw(st.integers(1, 3))
    num_experts = num_groups * data.draw(st.integers(1, 4))
    num_devices = num_nodes * data.draw(st.integers(1, 3))
    slots_each = -(-num_experts // num_devices) + data.draw(st.integers(0, 3))
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    arguments = (loads, num_devices * slots_each, num_devices)
    options = {"num_nodes": num_nodes, "num_groups": num_groups}
    placement = balance_experts(*arguments, **options)
    check_placement(placement, *arguments)
    again = balance_experts(*arguments, **options)
    assert all((a == b).all() for a, b in zip(placement, again, strict=True))
    # No group spans two nodes.
    nodes = np.arange(arguments[1]) // (arguments[1] // num_nodes)
    groups = placement.experts // (num_experts // num_groups)
    assert all(len(set(nodes[groups == group])) == 1 for group in range(num_groups))


def test_layers_are_placed_independently(rng):
    loads = rng.integers(0, 100, (3, 8))
    placement = balance_experts(loads, 12, 4)
    for layer in range(3):
        alone = balance_experts(loads[layer], 12, 4)
        np.testing.assert_array_equal(placement.experts[layer], alone.experts)
        np.testing.assert_array_equal(placement.device_loads[layer], alone.device_loads)


def test_packing_is_near_optimal(rng):
    """Greedy packing, heaviest first, is within 4/3 of the optimum."""
    for _ in range(20):
        loads = rng.integers(1, 50, 6)
        packs = pack_evenly(loads, 2)
        greedy = max(loads[packs == pack].sum() for pack in (0, 1))
        best = min(
            max(loads[list(half)].sum(), loads.sum() - loads[list(half)].sum())
            for half in itertools.combinations(range(6), 3)
        )
        assert greedy <= best * 4 / 3


def test_replicas_balance_skewed_loads(rng):
    """A quarter more slots than experts: no device is more than 10 % above the mean."""
    loads = rng.zipf(1.5, 256).clip(max=40)
    placement = balance_experts(loads, 320, 16)
    assert placement.device_loads.max() <= 1.1 * placement.device_loads.mean()
    np.testing.assert_array_equal(placement.replicas, replicate(loads, 320))


def test_zero_load():
    check_placement(balance_experts(np.zeros(4), 8, 2), np.zeros(4), 8, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[[1.0]]], 1, 1), ArrayShapeError, "loads must have shape"),
        (([], 1, 1), ArrayShapeError, "loads must have shape"),
        (([1, -1], 2, 1), ConfigError, "finite and not negative"),
        (([1, np.nan], 2, 1), ConfigError, "finite and not negative"),
        (([1, 1, 1], 2, 1), ConfigError, "at least the 3 experts, got 2 slots"),
        (([1, 1], 3, 2), ConfigError, "multiple of num_devices"),
        (([1, 1], 4, 2, 3, 1), ConfigError, r"num_nodes must divide num_devices \(2\), got 3"),
        (([1, 1], 4, 2, 2, 1), ConfigError, "num_groups must divide num_experts"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    loads, num_slots, num_devices, *rest = arguments
    options = dict(zip(("num_nodes", "num_groups"), rest, strict=False))
    with pytest.raises(error, match=message):
        balance_experts(loads, num_slots, num_devices, **options)


def test_packs_must_divide_the_items():
    with pytest.raises(ConfigError, match="num_packs must divide the 3 items, got 2"):
        pack_evenly([1, 2, 3], 2)
