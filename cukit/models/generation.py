"""Token-by-token generation with a KV cache."""

from __future__ import annotations

import math

import numpy as np

from cukit.core.scalars import check_integer
from cukit.errors import ConfigError, DataError
from cukit.models.parameters import host_array
from cukit.models.transformer import Transformer
from cukit.sampling import sample

MAX_TOKENS = 1_000_000
"""Maximum num_tokens. Catches mistyped values: a call returns only after the last token."""


def generate(
    model: Transformer,
    prompt: list[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
) -> list[int]:
    """Continues `prompt` by `num_tokens` tokens, sampled from softmax(logits / temperature).

    New tokens attend to cached keys and values, so a step processes a single position. The same
    seed gives the same tokens.

    Args:
        prompt: at least one token id; only the last max_positions are used.
        num_tokens: number of tokens to generate. If the text exceeds max_positions, its older half
            is dropped and the rest is processed again.
        temperature: 0 always takes the likeliest token; values above 1 flatten the distribution.
        top_k: sample only from the k likeliest tokens.
        top_p: sample only from the smallest set of tokens with this total probability.
        min_p: sample only from tokens at least this fraction as likely as the likeliest.

    Returns:
        The new tokens only.

    Raises:
        ConfigError: an option out of range.
        DataError: logits are not finite.
    """
    config = model.config
    if not prompt:
        raise ConfigError("prompt: expected at least one token")
    if not all(0 <= token < config.vocab_size for token in prompt):
        raise ConfigError(f"prompt: tokens must be in 0..{config.vocab_size - 1}")
    check_integer("generate", "num_tokens", num_tokens, least=0, most=MAX_TOKENS)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature: expected a finite number of 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: expected 1 or more, got {top_k}")

    text = list(prompt[-config.max_positions :])
    cache = model.new_cache(batch=1)
    uncached = text
    new_tokens: list[int] = []
    for step in range(num_tokens):
        if cache.length + len(uncached) > config.max_positions:
            uncached = text = text[-max(1, config.max_positions // 2) :]
            cache.length = 0
        tokens = model.xp.asarray(np.array([uncached], np.int32))
        hidden = model.forward(tokens, keep=False, cache=cache).hidden
        drawn = sample(
            model.logits(hidden[-1:]),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            step=step,
        )
        token = int(host_array(drawn.tokens)[0])
        if token < 0:
            raise DataError(f"generate: the logits of token {step} are not finite numbers")
        new_tokens.append(token)
        text.append(token)
        uncached = [token]
    return new_tokens
