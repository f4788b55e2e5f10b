"""adaptive_depth: tokens that pass through some of the layers, and its backward."""

from __future__ import annotations

import numpy as np
import pytest

from cukit import gemm, moe
from cukit.errors import ArrayError, ArrayShapeError
from cukit.moe import adaptive_depth, adaptive_depth_backward, create_adaptive_depth_mask
from cukit.reference import depth as reference
from tests.contract import check_against_reference, check_gradient, random, to_device
from tests.quick_run import emulated

HIDDEN = 24
DEPTHS = {
    "mixed": [2, 0, 3, 1, 3, 0, 1, 2, 2],
    "none": [0, 0, 0],
    "all": [3, 3],
    "no token in the last layer": [1, 2, 0, 2],
}


@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("activation", [None, "silu"])
@emulated(
    lambda depth, activation: depth == DEPTHS["mixed"] and activation
)  # each number of tokens in a layer compiles a kernel
def test_matches_reference(device, rng, depth, activation):
    depth = np.array(depth)
    x = random(rng, (len(depth), HIDDEN), "bfloat16")
    weights = random(rng, (3, HIDDEN, HIDDEN), "bfloat16", scale=HIDDEN**-0.5)
    check_against_reference(
        adaptive_depth,
        reference.adaptive_depth,
        (x, weights, depth, activation),
        device=device,
        atol=0.02,
    )


@pytest.mark.parametrize("activation", [None, "silu"])
@emulated(lambda activation: activation is not None)
def test_backward_matches_reference(device, rng, activation):
    """No token reaches the last layer."""
    depth = np.array(DEPTHS["mixed"])
    x = random(rng, (len(depth), HIDDEN), "bfloat16")
    weights = random(rng, (4, HIDDEN, HIDDEN), "bfloat16", scale=HIDDEN**-0.5)
    grad_out = random(rng, x.shape, "bfloat16")

    def backward(grad_out, x, weights, depth):
        _, states = adaptive_depth(x, weights, depth, activation, return_states=True)
        return adaptive_depth_backward(grad_out, weights, states, activation)

    def plain(grad_out, x, weights, depth):
        return reference.adaptive_depth_backward(grad_out, x, weights, depth, activation)

    names = ("grad_x", "grad_weights")
    inputs = (grad_out, x, weights, depth)
    check_against_reference(backward, plain, inputs, device=device, names=names, atol=0.02)


def test_gradient(rng):
    depth = np.array(DEPTHS["mixed"])
    inputs = rng.standard_normal((len(depth), 5)), rng.standard_normal((3, 5, 5))

    def backward(grad_out, x, weights):
        _, states = adaptive_depth(x, weights, depth, "silu", return_states=True)
        return adaptive_depth_backward(grad_out, weights, states, "silu")

    check_gradient(lambda x, w: adaptive_depth(x, w, depth, "silu"), backward, inputs, rng)


def test_the_mask():
    mask = create_adaptive_depth_mask(np.array([0, 3, 1]), 3)
    np.testing.assert_array_equal(mask, [[0, 1, 1], [0, 1, 0], [0, 1, 0]])


@pytest.mark.gpu
def test_depth_may_be_on_the_gpu(rng):
    x = random(rng, (9, HIDDEN), "bfloat16")
    weights = random(rng, (3, HIDDEN, HIDDEN), "bfloat16")
    depth = np.array(DEPTHS["mixed"])
    placed = to_device("gpu", x, weights, depth)
    assert (adaptive_depth(*placed) == adaptive_depth(*placed[:2], depth)).all()


def test_errors_name_the_argument():
    x, weights = np.ones((3, 4), np.float32), np.ones((2, 4, 4), np.float32)
    depth = np.array([0, 1, 2])
    with pytest.raises(ArrayError, match="0 to the number of layers, 2, got 0 to 3"):
        adaptive_depth(x, weights, np.array([0, 1, 3]))
    with pytest.raises(ArrayShapeError, match=r"weights must have shape \(any, 4, 4\)"):
        adaptive_depth(x, weights[..., :3].copy(), depth)
    with pytest.raises(ArrayShapeError, match="depth must have shape"):
        adaptive_depth(x, weights, depth[:2])


def test_former_names_in_gemm_are_aliases():
    assert gemm.adaptive_depth is adaptive_depth
    assert gemm.depth_router is moe.depth_router
