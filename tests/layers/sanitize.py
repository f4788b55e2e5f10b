"""Groups for `tests.sanitize`: short, ragged and long rows, an address off 16-byte alignment."""

from __future__ import annotations

import itertools

import numpy as np

from cukit import layers
from tests.contract import random, to_device
from tests.layers.test_embedding import KINDS, ids_of
from tests.layers.test_linear_rope import check_fused
from tests.layers.test_rope import SIZES, heads, positions, tables
from tests.sanitize import Group

NORM_SHAPES = [(1, 8), (3, 3), (5, 257), (37, 264), (7, 4096), (2, 16384), (1, 32768)]
GATED_SHAPES = [(3, 2), (5, 514), (33, 2752)]


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def norms() -> None:
    rng = _rng()
    for (rows, cols), dtype in itertools.product(NORM_SHAPES, ("float32", "bfloat16")):
        x, other, grad = (random(rng, (rows, cols), dtype) for _ in range(3))
        weight, bias = random(rng, (cols,), dtype), random(rng, (cols,), dtype)
        x, other, grad, weight, bias = to_device("gpu", x, other, grad, weight, bias)
        layers.rms_norm(x, weight)
        layers.rms_norm(x, weight, residual=other)
        layers.rms_norm_backward(grad, x, weight, grad_residual=other)
        layers.layer_norm(x, weight, bias, residual=other)
        layers.layer_norm_backward(grad, x, weight)


def activations() -> None:
    rng = _rng()
    for shape, dtype in itertools.product(GATED_SHAPES, ("float32", "float16")):
        half = (shape[0], shape[1] // 2)
        x, grad = to_device("gpu", random(rng, shape, dtype), random(rng, half, dtype))
        layers.silu_and_mul(x)
        layers.silu_and_mul_backward(grad, x)
        for approximate in ("none", "tanh"):
            layers.gelu(x, approximate=approximate)
            layers.gelu_backward(x, x, approximate=approximate)
            layers.gelu_and_mul(x, approximate=approximate)
            layers.gelu_and_mul_backward(grad, x, approximate=approximate)
    (flat,) = to_device("gpu", random(rng, (1003,), "bfloat16"))
    layers.gelu(flat[1:])


def rope() -> None:
    rng = _rng()
    for size, interleaved in itertools.product(SIZES, (False, True)):
        q, k = heads(rng, size, "bfloat16")
        at = positions(rng, (2, np.int32), size, 50)
        for rows in (None, at):
            placed = to_device("gpu", q, k, *tables(50, size[5]), rows)
            layers.rope(*placed, interleaved=interleaved)
            layers.rope_backward(*placed, interleaved=interleaved, inplace=True)


def embedding() -> None:
    rng = _rng()
    sizes = [(5, 8, 3), (256, 129, 200), (1024, 2056, 130), (70_001, 16, 4500)]
    for (rows, cols, tokens), kind in itertools.product(sizes, KINDS):
        ids = ids_of(rng, kind, tokens, rows).astype(np.int32)
        weight, grad = random(rng, (rows, cols), "float16"), random(rng, (tokens, cols), "float16")
        ids, weight, grad = to_device("gpu", ids, weight, grad)
        layers.embedding(ids, weight)
        layers.embedding_backward(grad, ids, rows)


def linear_with_rope() -> None:
    for head_dim in (64, 128):
        check_fused("gpu", _rng(), head_dim, 3)


GROUPS = {
    "norms": Group(norms, shares=True, quick=True),
    "activations": Group(activations),
    "rope": Group(rope),
    "embedding": Group(embedding, shares=True, quick=True),
    "linear with rope": Group(linear_with_rope, shares=True),
}
