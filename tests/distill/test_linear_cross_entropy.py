"""linear_cross_entropy: the fused head equals the unfused one."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import cross_entropy, linear_cross_entropy
from cukit.errors import ArrayShapeError
from cukit.gemm import matmul
from cukit.reference import losses as reference
from tests.contract import DTYPES, assert_close, poison_pool, random, to_device, to_host

TOKENS, HIDDEN, VOCAB = 70, 24, 1003
IGNORE = -100
FIELDS = ("loss", "grad_hidden", "grad_weight")


def head(rng, dtype, tokens=TOKENS, vocab=VOCAB):
    targets = rng.integers(0, vocab, tokens)
    targets[::9] = IGNORE
    return (
        random(rng, (tokens, HIDDEN), dtype),
        random(rng, (vocab, HIDDEN), dtype, scale=0.3),
        targets,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_tokens", [None, 32])
@pytest.mark.parametrize("normalizer", [None, 300.0])
def test_matches_reference_and_the_unfused_ops(device, rng, dtype, chunk_tokens, normalizer):
    hidden, weight, targets = arrays = head(rng, dtype)
    exact = reference.linear_cross_entropy(
        hidden.astype(np.float64), weight.astype(np.float64), targets, normalizer=normalizer
    )
    loss, grad = cross_entropy(
        matmul(hidden, weight, transpose_b=True), targets, normalizer=normalizer, return_grad=True
    )
    plain = loss, matmul(grad, weight), matmul(grad, hidden, transpose_a=True)
    placed = to_device(device, *arrays)
    poison_pool(device)
    got = linear_cross_entropy(*placed, chunk_tokens=chunk_tokens, normalizer=normalizer)
    for name, value, low, expected in zip(FIELDS, got, plain, exact, strict=False):
        rounding = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        assert_close(name, value, low, expected, atol=rounding * float(np.abs(expected).max()))


def test_gradients_by_finite_differences(rng):
    hidden, weight, targets = head(rng, "float64", tokens=5, vocab=11)
    result = reference.linear_cross_entropy(hidden, weight, targets)
    step = 1e-6
    for _ in range(4):
        h, w = rng.standard_normal(hidden.shape), rng.standard_normal(weight.shape)
        above = reference.linear_cross_entropy(hidden + step * h, weight + step * w, targets).loss
        below = reference.linear_cross_entropy(hidden - step * h, weight - step * w, targets).loss
        expected = (result.grad_hidden * h).sum() + (result.grad_weight * w).sum()
        np.testing.assert_allclose((above - below) / (2 * step), expected, rtol=1e-6, atol=1e-8)


def test_accumulates_into_grad_weight(device, rng):
    placed = to_device(device, *head(rng, "float32"))
    (grad_weight,) = to_device(device, np.ones((VOCAB, HIDDEN), np.float32))
    fresh = linear_cross_entropy(*placed)
    added = linear_cross_entropy(*placed, grad_weight=grad_weight, chunk_tokens=32)
    assert added.grad_weight is grad_weight
    np.testing.assert_allclose(to_host(grad_weight), 1 + to_host(fresh.grad_weight), rtol=1e-5)


def test_errors_name_the_argument(rng):
    hidden, weight, targets = head(rng, "float32")
    with pytest.raises(ArrayShapeError, match="linear_cross_entropy: targets must have shape"):
        linear_cross_entropy(hidden, weight, targets[1:])
