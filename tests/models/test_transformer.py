"""The model: finite differences, consistency, causality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cukit.distill.losses.cross_entropy import cross_entropy
from cukit.errors import ArrayError
from cukit.gemm import matmul
from cukit.models import Activations, StateGradients, Transformer
from tests.contract import to_host
from tests.models.small import small_model, small_tokens
from tests.tolerances import FINITE_DIFFERENCE

STEP = 1e-5  # of the central differences, whose own error is near 1e-10 here


def gradients_of(
    model: Transformer,
    tokens: Any,
    targets: Any,
    state_gradients: Callable[[Activations], StateGradients] | None = None,
) -> Any:
    """All gradients of the mean cross-entropy, head included."""
    gradients = model.parameters.zeros_like()
    activations = model.forward(tokens)
    logits = model.logits(activations.hidden)
    _, grad_logits = cross_entropy(logits, targets.reshape(-1), return_grad=True)
    head = gradients[model.config.head_name]
    matmul(grad_logits, activations.hidden, transpose_a=True, out=head, accumulate=True)
    extra = state_gradients(activations) if state_gradients else None
    model.backward(activations, matmul(grad_logits, model.head), gradients, extra)
    return gradients


def loss_of(model: Transformer, tokens: Any, targets: Any) -> float:
    hidden = model.forward(tokens, keep=False).hidden
    return float(cross_entropy(model.logits(hidden), targets.reshape(-1)))


def assert_gradients_match(
    model: Transformer, gradients: Any, loss: Callable[[], float], rng: np.random.Generator
) -> None:
    """Checks every parameter tensor along random directions, in which all elements change."""
    for name, array in model.parameters.items():
        for _ in range(2):
            direction = rng.standard_normal(array.shape)
            kept = array.copy()
            array[...] = kept + STEP * direction
            above = loss()
            array[...] = kept - STEP * direction
            below = loss()
            array[...] = kept
            expected = (above - below) / (2 * STEP)
            actual = float((gradients[name] * direction).sum())
            assert abs(expected) > 1e-7, f"{name}: this direction tests nothing"
            assert abs(actual - expected) < FINITE_DIFFERENCE * max(1, abs(expected)), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_gradient_by_finite_differences(tied: bool, rng: np.random.Generator) -> None:
    model = small_model(tie_embeddings=tied)
    tokens, targets = small_tokens(rng), small_tokens(rng)
    gradients = gradients_of(model, tokens, targets)
    assert_gradients_match(model, gradients, lambda: loss_of(model, tokens, targets), rng)


def test_gradients_from_the_middle_by_finite_differences(rng: np.random.Generator) -> None:
    """A loss that also reads residual streams, q, k and v of each layer."""
    model = small_model(seed=3)
    tokens, targets = small_tokens(rng), small_tokens(rng)
    probe = model.forward(tokens)
    factors = {
        "residual": {n: rng.standard_normal(probe.x_last.shape) for n in range(3)},
        **{
            kind: {n: rng.standard_normal(getattr(probe.layers[n], kind).shape) for n in range(2)}
            for kind in "qkv"
        },
    }

    def loss() -> float:
        activations = model.forward(tokens)
        total = loss_of(model, tokens, targets)
        for layer, factor in factors["residual"].items():
            total += float((activations.residual_stream(layer) * factor).sum())
        for kind in "qkv":
            for layer, factor in factors[kind].items():
                total += float((getattr(activations.layers[layer], kind) * factor).sum())
        return total

    gradients = gradients_of(model, tokens, targets, lambda _: StateGradients(**factors))
    assert_gradients_match(model, gradients, loss, rng)


def test_gradients_accumulate(rng: np.random.Generator) -> None:
    model = small_model()
    tokens, targets = small_tokens(rng), small_tokens(rng)
    once = gradients_of(model, tokens, targets)
    activations = model.forward(tokens)
    _, grad_logits = cross_entropy(
        model.logits(activations.hidden), targets.reshape(-1), return_grad=True
    )
    twice = model.parameters.zeros_like()
    twice.flat[...] = once.flat
    matmul(grad_logits, activations.hidden, transpose_a=True,
           out=twice[model.config.head_name], accumulate=True)  # fmt: skip
    model.backward(activations, matmul(grad_logits, model.head), twice)
    np.testing.assert_allclose(twice.flat, 2 * once.flat, rtol=1e-12, atol=1e-14)


def test_no_token_depends_on_later_ones(rng: np.random.Generator) -> None:
    model = small_model()
    tokens = small_tokens(rng, batch=1)
    changed = tokens.copy()
    changed[0, 4] += 1
    changed %= model.config.vocab_size
    before, after = (model.forward(t, keep=False).hidden for t in (tokens, changed))
    assert np.array_equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(axis=1).all()


def test_initial_loss_is_near_that_of_uniform_probabilities(rng: np.random.Generator) -> None:
    model = Transformer.initialise(small_model().config, seed=1)
    loss = loss_of(model, small_tokens(rng, 4, 12), small_tokens(rng, 4, 12))
    assert abs(loss - np.log(model.config.vocab_size)) < 1.0


def test_same_seed_same_model() -> None:
    first, second, other = small_model(seed=4), small_model(seed=4), small_model(seed=5)
    assert first.parameters.flat.tobytes() == second.parameters.flat.tobytes()
    assert first.parameters.flat.tobytes() != other.parameters.flat.tobytes()


def test_a_text_that_is_too_long_is_rejected(rng: np.random.Generator) -> None:
    with pytest.raises(ArrayError, match="max_positions is 12"):
        small_model().forward(small_tokens(rng, seq_len=13))


def test_backward_needs_activations_kept_by_forward(rng: np.random.Generator) -> None:
    model = small_model()
    activations = model.forward(small_tokens(rng), keep=False)
    with pytest.raises(ArrayError, match="keep=True"):
        model.backward(activations, activations.hidden, model.parameters.zeros_like())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_agrees_with_cpu(dtype: str, rng: np.random.Generator) -> None:
    """The same rounded parameters, evaluated in float64 on the CPU and in `dtype` on the GPU."""
    import cupy

    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "num_heads_q": 2,
                             "num_heads_kv": 1, "max_positions": 40}  # fmt: skip
    low = small_model(xp=cupy, dtype=dtype, **sizes)
    exact = small_model(dtype="float64", **sizes)
    for name, array in low.parameters.items():
        exact.parameters[name][...] = to_host(array).astype(np.float64)
    tokens, targets = small_tokens(rng, 3, 37), small_tokens(rng, 3, 37)
    on_gpu = cupy.asarray(tokens), cupy.asarray(targets)
    hidden = to_host(low.forward(on_gpu[0]).hidden).astype(np.float64)
    wide = exact.forward(tokens).hidden
    assert np.abs(hidden - wide).max() < 0.05 * np.abs(wide).max()

    gradients = low.parameters.zeros_like(np.float32)
    activations = low.forward(on_gpu[0])
    _, grad_logits = cross_entropy(
        low.logits(activations.hidden), on_gpu[1].reshape(-1), return_grad=True
    )
    head = gradients[low.config.head_name]
    matmul(grad_logits, activations.hidden, transpose_a=True, out=head, accumulate=True)
    low.backward(activations, matmul(grad_logits, low.head), gradients)
    expected = gradients_of(exact, tokens, targets)
    for name in expected:
        got, want = to_host(gradients[name]).astype(np.float64), expected[name]
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want), name
