"""Mixture of depths: the router's choice of tokens, the gather and the combine."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.gemm import (
    depth_combine,
    depth_combine_backward,
    depth_gather,
    depth_router,
    depth_router_backward,
)
from cukit.reference import depth as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)

BATCH, SEQ_LEN, CAPACITY = 3, 70, 19
ROUTING = ("indices", "slots", "weights")


def logits_of(rng, dtype):
    """Logits with ties within and across the capacity boundary, both zeros, infinities and NaN."""
    logits = random(rng, (BATCH, SEQ_LEN), dtype).round(1)
    logits[0, :40] = 0.5
    logits[1, ::3] = -0.0
    logits[1, 1::3] = 0.0
    logits[2, :60] = np.nan
    logits[2, 60:64] = np.inf, -np.inf, np.inf, np.nan
    return logits


def routing_of(rng):
    return reference.depth_router(random(rng, (BATCH, SEQ_LEN), "float32"), CAPACITY)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, CAPACITY, SEQ_LEN])
def test_the_router_matches_its_reference(device, rng, dtype, capacity):
    inputs = (logits_of(rng, dtype), capacity)
    check_against_reference(
        depth_router, reference.depth_router, inputs, device=device, names=ROUTING
    )


def test_more_tokens_than_threads(device, rng):
    inputs = (random(rng, (2, 2500), "bfloat16"), 1100)
    check_against_reference(
        depth_router, reference.depth_router, inputs, device=device, names=ROUTING
    )


@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 33), ("bfloat16", 40), ("float16", 600)])
def test_rows_are_gathered_and_scattered_back(device, rng, dtype, hidden):
    routing = routing_of(rng)
    x = random(rng, (BATCH, SEQ_LEN, hidden), dtype)
    y, grad = random(rng, (BATCH, CAPACITY, hidden), dtype), random(rng, x.shape, dtype)
    check_against_reference(
        depth_gather, reference.depth_gather, (x, routing.indices), device=device
    )
    check_against_reference(
        depth_combine,
        reference.depth_combine,
        (x, y, routing.weights, routing.slots),
        device=device,
    )
    check_against_reference(
        depth_combine_backward,
        reference.depth_combine_backward,
        (grad, y, routing.weights, routing.indices),
        device=device,
        names=("grad_y", "grad_weights"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_router(device, rng, dtype):
    routing = routing_of(rng)
    grad = random(rng, routing.weights.shape, "float32")
    placed = to_device(device, grad, routing.weights, routing.slots)
    got = depth_router_backward(*placed, dtype=random(rng, (1,), dtype).dtype)
    expected = reference.depth_router_backward(grad, routing.weights, routing.slots)
    assert got.dtype == dtype
    np.testing.assert_allclose(to_host(got).astype(np.float32), expected, rtol=1e-2, atol=1e-6)


def test_combine_may_write_over_x(device, rng):
    routing = routing_of(rng)
    x, y = random(rng, (BATCH, SEQ_LEN, 8), "float32"), random(rng, (BATCH, CAPACITY, 8), "float32")
    placed = to_device(device, x.copy(), y, routing.weights, routing.slots)
    assert depth_combine(*placed, out=placed[0]) is placed[0]
    expected = reference.depth_combine(x, y, routing.weights, routing.slots)
    np.testing.assert_allclose(to_host(placed[0]), expected, rtol=1e-6, atol=1e-6)
    out = poisoned(device, x.shape, "float32")
    depth_combine(*to_device(device, x), *placed[1:], out=out)
    np.testing.assert_allclose(to_host(out), expected, rtol=1e-6, atol=1e-6)


def test_gradients_through_all_steps(rng):
    """Router, gather, squares, and combine, compared with finite differences."""
    x, logits = rng.standard_normal((2, 6, 3)), rng.standard_normal((2, 6))
    routing = reference.depth_router(logits, 3)

    def forward(x, logits):
        chosen = reference.depth_router(logits, 3)
        y = reference.depth_gather(x, chosen.indices) ** 2
        return reference.depth_combine(x, y, chosen.weights, chosen.slots)

    def backward(grad_out, x, logits):
        rows = reference.depth_gather(x, routing.indices)
        grad_y, grad_weights = reference.depth_combine_backward(
            grad_out, rows**2, routing.weights, routing.indices
        )
        ones = np.ones_like(routing.weights)
        grad_x = reference.depth_combine(grad_out, 2 * rows * grad_y, ones, routing.slots)
        return grad_x, reference.depth_router_backward(grad_weights, routing.weights, routing.slots)

    check_gradient(forward, backward, (x, logits), rng)


def test_slots_outside_the_capacity_are_none(device, rng):
    routing = routing_of(rng)
    slots = routing.slots.copy()
    slots[:, ::5] = CAPACITY
    slots[:, 1::5] = -(2**31)
    inputs = (*_combined(rng), routing.weights, slots)
    check_against_reference(depth_combine, reference.depth_combine, inputs, device=device)
    inputs = (random(rng, (BATCH, CAPACITY), "float32"), routing.weights, slots)
    check_against_reference(
        depth_router_backward, reference.depth_router_backward, inputs, device=device
    )


def test_indices_outside_the_sequence(device, rng):
    """The kernels return rows of NaN; the CPU raises."""
    x, y = _combined(rng)
    routing = routing_of(rng)
    indices = routing.indices.copy()
    indices[1, :2] = SEQ_LEN, -1
    x, y, weights, indices = to_device(device, x, y, routing.weights, indices)
    calls = (
        lambda: depth_gather(x, indices),
        lambda: depth_combine_backward(x, y, weights, indices)[0],
        lambda: depth_combine_backward(x, y, weights, indices)[1],
    )
    for call in calls:
        if device == "cpu":
            with pytest.raises(ArrayError, match=f"indices must be 0 to {SEQ_LEN - 1}, got -1"):
                call()
            continue
        wrong = np.isnan(to_host(call()).astype(np.float32)).reshape(BATCH, CAPACITY, -1)
        assert wrong[1, :2].all()
        assert wrong.sum() == wrong[1, :2].size


def _combined(rng):
    return random(rng, (BATCH, SEQ_LEN, 24), "bfloat16"), random(
        rng, (BATCH, CAPACITY, 24), "bfloat16"
    )


def test_errors_name_the_argument():
    logits = np.zeros((2, 4), np.float32)
    routing = depth_router(logits, 2)
    x, y = np.zeros((2, 4, 8), np.float32), np.zeros((2, 2, 8), np.float32)
    for capacity in (0, 5):
        with pytest.raises(
            ConfigError,
            match=f"capacity must be an integer .* at most 4, got {capacity}",
        ):
            depth_router(logits, capacity)
    with pytest.raises(ArrayShapeError, match="depth_router: logits must have 2 axes"):
        depth_router(logits[0], 1)
    with pytest.raises(ArrayDtypeError, match="depth_gather: indices must be int32"):
        depth_gather(x, routing.indices.astype(np.int64))
    with pytest.raises(ArrayShapeError, match=r"depth_combine: y must have shape \(2, any, 8\)"):
        depth_combine(x, y[..., :4].copy(), routing.weights, routing.slots)
    with pytest.raises(ArrayShapeError, match=r"depth_combine: slots must have shape \(2, 4\)"):
        depth_combine(x, y, routing.weights, routing.slots[:, :3].copy())
