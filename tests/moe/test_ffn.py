"""moe_ffn and its backward, with and without a capacity."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError
from cukit.moe import moe_ffn, moe_ffn_backward
from cukit.reference import moe as routing_reference
from cukit.reference import moe_ffn as reference
from tests.contract import assert_close, check_gradient, random, to_device, to_host

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 30, 72, 40, 6, 2


def make(rng, dtype):
    """x, logits, gate_up, down, grad_out."""
    return (
        random(rng, (TOKENS, HIDDEN), dtype),
        random(rng, (TOKENS, EXPERTS), "float32"),
        random(rng, (EXPERTS, 2 * WIDTH, HIDDEN), dtype, HIDDEN**-0.5),
        random(rng, (EXPERTS, HIDDEN, WIDTH), dtype, WIDTH**-0.5),
        random(rng, (TOKENS, HIDDEN), dtype),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("capacity", [None, 8])
def test_matches_reference(device, rng, dtype, capacity):
    """Rows that belong to no expert are undefined, so only results that do not depend on them are
    compared."""
    x, logits, gate_up, down, grad = make(rng, dtype)
    routing = routing_reference.topk_router(logits, TOP_K, capacity=capacity)
    if capacity is not None:
        assert (routing.rows < 0).any()
    placed_routing = routing._make(to_device(device, *routing))
    placed_x, placed_up, placed_down, placed_grad = to_device(device, x, gate_up, down, grad)
    experts = (placed_routing, placed_up, placed_down)
    y, kept = moe_ffn(placed_x, *experts, capacity=capacity, keep=True)
    plain = moe_ffn(placed_x, *experts, capacity=capacity)
    assert to_host(y).tobytes() == to_host(plain).tobytes()
    gradients = moe_ffn_backward(placed_grad, kept, *experts, capacity=capacity)

    def expected(convert):
        own = (convert(x), routing, convert(gate_up), convert(down))
        y, kept = reference.moe_ffn(*own, capacity=capacity, keep=True)
        return y, *reference.moe_ffn_backward(convert(grad), kept, *own[1:], capacity=capacity)

    low, wide = expected(lambda a: a), expected(lambda a: a.astype(np.float64))
    names = ("y", *gradients._fields)
    for name, got, plain, exact in zip(names, (y, *gradients), low, wide, strict=True):
        assert_close(name, got, plain, exact)


def test_the_reference_follows_the_definition(rng):
    x, logits, gate_up, down, _ = make(rng, "float64")
    routing = routing_reference.topk_router(logits.astype(np.float64), TOP_K)
    expected = np.zeros_like(x)
    for token in range(TOKENS):
        for expert, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            expected[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(moe_ffn(x, routing, gate_up, down), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("capacity", [None, 8])
def test_gradients_by_finite_differences(rng, capacity):
    x, logits, gate_up, down, _ = make(rng, "float64")
    routing = routing_reference.topk_router(logits.astype(np.float64), TOP_K, capacity=capacity)

    def function(x, weights, gate_up, down):
        now = routing._replace(weights=weights)
        return reference.moe_ffn(x, now, gate_up, down, capacity=capacity)

    def backward(grad, x, weights, gate_up, down):
        own = (routing._replace(weights=weights), gate_up, down)
        _, kept = reference.moe_ffn(x, *own, capacity=capacity, keep=True)
        return tuple(reference.moe_ffn_backward(grad, kept, *own, capacity=capacity))

    check_gradient(function, backward, (x, routing.weights, gate_up, down), rng)


def test_errors_name_the_argument(rng):
    x, logits, gate_up, down, _ = make(rng, "float32")
    routing = routing_reference.topk_router(logits, TOP_K)
    with pytest.raises(ArrayShapeError, match=r"moe_ffn: x must have shape \(30, any\)"):
        moe_ffn(x[:3], routing, gate_up, down)
    with pytest.raises(ArrayShapeError, match=r"gate_up must have shape \(6, any, 72\)"):
        moe_ffn(x, routing, gate_up[:, :, :8].copy(), down)
    with pytest.raises(ArrayShapeError, match="axis 1 must be even"):
        moe_ffn(x, routing, gate_up[:, 1:].copy(), down)
    with pytest.raises(ArrayShapeError, match=r"down must have shape \(6, 72, 40\)"):
        moe_ffn(x, routing, gate_up, down[:, :, :8].copy())
    with pytest.raises(ConfigError, match=r"capacity must be an integer of 1 or more .* got 0"):
        moe_ffn(x, routing, gate_up, down, capacity=0)
