"""generate: equal to generation without a cache; sampling options, long texts, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cukit.errors import ConfigError, DataError
from cukit.models import generate
from tests.models.small import small_model, small_tokens


@pytest.mark.parametrize("split", [1, 4, 6])
def test_cache_equals_full_forward(split: int, rng: np.random.Generator) -> None:
    model = small_model()
    tokens = small_tokens(rng, batch=2, seq_len=7)
    whole = model.forward(tokens, keep=False).hidden.reshape(2, 7, -1)
    cache = model.new_cache(batch=2)
    parts = [tokens[:, :split], *(tokens[:, i : i + 1] for i in range(split, 7))]
    hidden = [
        model.forward(np.ascontiguousarray(part), keep=False, cache=cache).hidden.reshape(
            2, part.shape[1], -1
        )
        for part in parts
    ]
    assert cache.length == 7
    np.testing.assert_allclose(np.concatenate(hidden, 1), whole, rtol=1e-10, atol=1e-12)


def test_greedy_takes_the_best_of_the_full_forward() -> None:
    model = small_model()
    text = [3, 1, 4]
    for token in generate(model, text, 8, temperature=0):
        logits = model.logits(model.forward(np.array([text], np.int32), keep=False).hidden)
        assert token == int(logits[-1].argmax())
        text.append(token)


def test_top_1_is_greedy_and_seeds_repeat() -> None:
    model = small_model()
    greedy = generate(model, [5], 9, temperature=0)
    assert generate(model, [5], 9, top_k=1, seed=7) == greedy
    assert generate(model, [5], 9, seed=7) == generate(model, [5], 9, seed=7)
    assert generate(model, [5], 9, seed=7) != generate(model, [5], 9, seed=8)


def test_text_longer_than_max_positions_continues() -> None:
    model = small_model()
    prompt = list(range(20))
    tokens = generate(model, prompt, 30, temperature=0)
    assert len(tokens) == 30
    # Only the last max_positions tokens of a long prompt are used.
    end = prompt[-model.config.max_positions :]
    assert generate(model, end, 30, temperature=0) == tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [99]}, "prompt"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_tokens": 2.5}, "num_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
    ],
)
def test_errors_name_the_option(options: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"prompt": [1], "num_tokens": 2} | options
    with pytest.raises(ConfigError, match=named):
        generate(small_model(), **arguments)


def test_only_likely_tokens_are_drawn() -> None:
    model, text = small_model(), [3, 1, 4]
    greedy = generate(model, text, 6, temperature=0)
    assert generate(model, text, 6, top_p=0.0, seed=3) == greedy
    assert generate(model, text, 6, min_p=1.0, seed=3) == greedy


def test_nan_logits_are_rejected() -> None:
    model = small_model()
    for array in model.parameters.values():
        array[...] = np.nan
    with pytest.raises(DataError, match="token 0 are not finite"):
        generate(model, [3, 1, 4], 2)
