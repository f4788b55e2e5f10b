"""Hidden-state distillation: equation, gradients, layer map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cukit.distill.training.terms import HiddenStateTerm, evenly_spaced_map
from cukit.errors import ConfigError
from cukit.models import StateGradients
from tests.models.small import SMALL, small_model, small_tokens

TEACHER = {"hidden_size": 24, "num_layers": 3, "num_heads_q": 2}


def test_loss_is_the_mean_squared_error_of_the_projection(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens = small_tokens(rng)
    states = student.forward(tokens), teacher.forward(tokens)
    term = HiddenStateTerm({1: 2}, student.config, teacher.config)
    assert term.parameters is not None
    gradients = term.parameters.zeros_like()
    loss = term(*states, None, StateGradients(), gradients, weight=1.0, normalizer=14.0)
    projected = states[0].residual_stream(1) @ term.parameters["projection.1.weight"].T
    expected = np.mean((projected - states[1].residual_stream(2)) ** 2)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_gradients_scale_with_weight_and_skip_ignored_rows(
    rng: np.random.Generator,
) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens = small_tokens(rng)
    states = student.forward(tokens), teacher.forward(tokens)
    term = HiddenStateTerm({0: 0, 2: 3}, student.config, teacher.config)
    assert term.parameters is not None
    valid = np.ones(14)
    valid[[2, 9]] = 0
    results = []
    for weight in (1.0, 0.25):
        into, own = StateGradients(), term.parameters.zeros_like()
        term(*states, valid, into, own, weight=weight, normalizer=12.0)
        assert set(into.residual) == {0, 2}
        assert not into.residual[2][[2, 9]].any()
        assert into.residual[2][[0, 1]].any()
        results.append((into.residual[2], own.flat))
    for whole, quarter in zip(*results, strict=True):
        np.testing.assert_allclose(quarter, whole / 4, rtol=1e-12)


@pytest.mark.parametrize("error", ["mse", "cosine"])
def test_gradients_are_the_derivatives(rng: np.random.Generator, error: str) -> None:
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens = small_tokens(rng)
    states = student.forward(tokens), teacher.forward(tokens)
    term = HiddenStateTerm({1: 2}, student.config, teacher.config, error=error)
    assert term.parameters is not None
    valid = np.ones(14)
    valid[4] = 0

    def loss_of() -> tuple[float, np.ndarray, np.ndarray]:
        into, own = StateGradients(), term.parameters.zeros_like()
        loss = term(*states, valid, into, own, weight=1.0, normalizer=13.0)
        return float(loss), into.residual[1], own.flat

    _, *gradients = loss_of()
    places = [states[0].layers[1].x, term.parameters.flat]
    directions = [rng.standard_normal(place.shape) for place in places]
    step, ends = 1e-6, []
    for sign in (1, -2):
        for place, direction in zip(places, directions, strict=True):
            place += sign * step * direction
        ends.append(loss_of()[0])
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_cosine_ignores_lengths(rng: np.random.Generator) -> None:
    student, teacher = small_model(), small_model(seed=1)
    tokens = small_tokens(rng)
    states = student.forward(tokens), teacher.forward(tokens)
    term = HiddenStateTerm({1: 1}, student.config, teacher.config, error="cosine")
    losses = []
    for factor in (1, 7):
        states[1].layers[1].x = factor * states[1].layers[1].x
        into, own = StateGradients(), term.parameters.zeros_like()
        losses.append(float(term(*states, None, into, own, weight=1.0, normalizer=14.0)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    with pytest.raises(ConfigError, match="error must be one of 'mse', 'cosine'"):
        HiddenStateTerm({1: 1}, student.config, teacher.config, error="l1")


def test_layer_map_is_spread_over_the_depth() -> None:
    assert evenly_spaced_map(2, 4) == {1: 2, 2: 4}
    assert evenly_spaced_map(3, 3) == {1: 1, 2: 2, 3: 3}
    assert evenly_spaced_map(4, 1) == {1: 1, 2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize("layers", [{}, {5: 1}, {1: 9}, {-1: 0}])
def test_invalid_layer_maps_are_rejected(layers: dict[int, int]) -> None:
    with pytest.raises(ConfigError, match="layer_map"):
        HiddenStateTerm(layers, SMALL, replace(SMALL, **TEACHER))
