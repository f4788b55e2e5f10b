"""layer_bank: definition, reference, gradients, importance, pruning and growth."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.moe import LayerBank, layer_bank, layer_bank_backward
from cukit.reference import layer_bank as reference
from tests.contract import (
    another_order,
    assert_close,
    check_gradient,
    poison_pool,
    random,
    to_device,
    to_host,
)

SHAPES = [(1, 1, 8, 1, 1), (3, 37, 72, 5, 2), (4, 40, 64, 3, 3)]
"""batch, tokens, dim, layers, top_k."""


def make(rng, shape, dtype):
    """x, router, layers, grad_out."""
    batch, seq_len, dim, num_layers, _ = shape
    return (
        random(rng, (batch, seq_len, dim), dtype),
        random(rng, (num_layers, dim), "float64" if dtype == "float64" else "float32", 2.0),
        random(rng, (num_layers, dim, dim), dtype, dim**-0.5),
        random(rng, (batch, seq_len, dim), dtype),
    )


def flat(y, kept, gradients):
    """The compared results, by name."""
    weights = kept.routing.weights
    return {"y": y, "weights": weights, "logits": kept.logits, **gradients._asdict()}


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda n: "x".join(map(str, SHAPES[n])))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("activation", "renormalize"), [("silu", False), ("gelu", True), ("relu", False)]
)
def test_matches_reference(device, rng, number, dtype, activation, renormalize):
    shape = SHAPES[number]
    arrays, top_k = make(rng, shape, dtype), shape[-1]
    options = {"activation": activation, "renormalize": renormalize}

    def run(forward, backward, x, router, layers, grad):
        y, kept = forward(x, router, layers, top_k, keep=True, **options)
        return flat(y, kept, backward(grad, kept, router, layers, **options))

    low = run(reference.layer_bank, reference.layer_bank_backward, *arrays)
    wide = run(
        reference.layer_bank,
        reference.layer_bank_backward,
        *(array.astype(np.float64) for array in arrays),
    )
    placed = to_device(device, *arrays)
    first = {}
    for repeat in range(2):
        poison_pool(device)
        with another_order(device, repeat):
            got = run(layer_bank, layer_bank_backward, *placed)
        for name, value in got.items():
            assert_close(name, value, low[name], wide[name])
            bits = to_host(value).tobytes()
            assert first.setdefault(name, bits) == bits, f"{name}: bits differ"


def test_the_definition(rng):
    x, router, layers, _ = make(rng, (4, 6, 10, 5, 2), "float64")
    logits = x.mean(axis=1) @ router.T
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    want = x.copy()
    for sample in range(4):
        for layer in np.argsort(-p[sample])[:2]:
            want[sample] += p[sample, layer] * np.maximum(x[sample] @ layers[layer].T, 0)
    np.testing.assert_allclose(layer_bank(x, router, layers, 2, activation="relu"), want)


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_match_finite_differences(rng, renormalize):
    """Through the routing weights and through the layers; the choice of layers is constant."""
    x, router, layers, _ = make(rng, (3, 4, 6, 4, 2), "float64")
    options = {"activation": "gelu", "renormalize": renormalize}

    def forward(x, router, layers):
        return layer_bank(x, router, layers, 2, **options)

    def backward(grad, x, router, layers):
        _, kept = layer_bank(x, router, layers, 2, keep=True, **options)
        return layer_bank_backward(grad, kept, router, layers, **options)

    check_gradient(forward, backward, (x, router, layers), rng)


def test_a_sample_does_not_depend_on_the_batch(device, rng):
    x, router, layers, _ = make(rng, (5, 24, 64, 6, 2), "bfloat16")
    placed, on_router, on_layers = to_device(device, x, router, layers)
    together = to_host(layer_bank(placed, on_router, on_layers, 2))
    alone = to_host(layer_bank(placed[3:4], on_router, on_layers, 2))
    assert alone.tobytes() == together[3:4].tobytes()


def test_importance_is_the_moving_average_of_p(device, rng):
    x, router, layers, _ = make(rng, (3, 8, 16, 4, 2), "float16")
    placed, *parts = to_device(device, x, router, layers)
    bank = LayerBank(*parts, 2, decay=0.75)
    np.testing.assert_allclose(to_host(bank.importance), 0.25)
    y, kept = bank.forward(placed)
    logits = x.astype(np.float64).mean(axis=1) @ router.astype(np.float64).T
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    want = 0.75 * 0.25 + 0.25 * p.mean(axis=0)
    np.testing.assert_allclose(to_host(bank.importance), want, rtol=1e-4)
    assert to_host(bank(placed)).tobytes() == to_host(y).tobytes()
    gradients = bank.backward(y, kept)
    assert gradients.layers.shape == layers.shape
    np.testing.assert_allclose(to_host(bank.importance), want, rtol=1e-4)


def test_prune_and_grow(rng):
    bank = LayerBank.initialise(6, 8, 2, seed=3)
    router, layers = bank.router, bank.layers
    bank.importance = np.array([0.1, 0.3, 0.05, 0.3, 0.05, 0.2], np.float32)
    np.testing.assert_array_equal(bank.prune(2), [0, 1, 3, 5])
    np.testing.assert_array_equal(bank.router, router[[0, 1, 3, 5]])
    np.testing.assert_array_equal(bank.layers, layers[[0, 1, 3, 5]])
    np.testing.assert_allclose(bank.importance.sum(), 1, rtol=1e-6)
    with pytest.raises(ConfigError, match="count must be an integer of 0 or more and at most 2"):
        bank.prune(3)
    bank.grow(3, seed=1)
    assert bank.router.shape == (7, 8)
    assert bank.layers.shape == (7, 8, 8)
    np.testing.assert_array_equal(bank.layers[:4], layers[[0, 1, 3, 5]])
    np.testing.assert_allclose(bank.importance.sum(), 1, rtol=1e-6)
    y, _ = bank.forward(random(rng, (2, 5, 8), "float32"))
    assert np.isfinite(y).all()
    again = LayerBank.initialise(6, 8, 2, seed=3)
    again.importance = np.array([0.1, 0.3, 0.05, 0.3, 0.05, 0.2], np.float32)
    again.prune(2)
    again.grow(3, seed=1)
    np.testing.assert_array_equal(again.layers, bank.layers)


def test_an_unused_layer_can_be_pruned(rng):
    """Pruning a layer that no sample chooses keeps the outputs, up to its share of the softmax."""
    x, router, layers, _ = make(rng, (6, 4, 8, 4, 1), "float64")
    router[2] = 0
    router[2, 0] = -1000
    x[:, :, 0] = np.abs(x[:, :, 0]) + 1
    bank = LayerBank(router, layers, 1, decay=0.0)
    before, _ = bank.forward(x)
    np.testing.assert_array_equal(bank.prune(1), [0, 1, 3])
    np.testing.assert_allclose(bank(x), before)


def test_errors_name_the_argument(rng):
    x, router, layers, grad = make(rng, (2, 3, 8, 4, 2), "float32")
    with pytest.raises(ConfigError, match=r"top_k must be at most num_layers \(4\), got 5"):
        layer_bank(x, router, layers, 5)
    with pytest.raises(ArrayShapeError, match=r"layers must have shape \(4, 8, 8\)"):
        layer_bank(x, router, layers[:3].copy(), 2)
    with pytest.raises(ConfigError, match="activation"):
        layer_bank(x, router, layers, 2, activation="tan")
    with pytest.raises(ArrayShapeError, match="must not be empty"):
        layer_bank(x[:0], router, layers, 2)
    with pytest.raises(ArrayError, match="activations must be BankActivations, got NoneType"):
        layer_bank_backward(grad, None, router, layers)
    _, kept = layer_bank(x, router, layers, 2, keep=True)
    with pytest.raises(ArrayShapeError, match=r"activations.hidden must have shape \(4, 3, 8\)"):
        layer_bank_backward(grad, kept._replace(hidden=kept.hidden[:3]), router, layers)
    with pytest.raises(ConfigError, match="decay"):
        LayerBank(router, layers, 2, decay=2.0)
