"""Generation one token at a time over a key-value cache."""

from __future__ import annotations

import math

import numpy as np

from cukit.errors import ConfigError, DataError
from cukit.models.parameters import host_array
from cukit.models.transformer import Transformer
from cukit.sampling import sample

MOST_TOKENS = 1_000_000
"""A call returns when the last token is drawn: more than this is a slip of the keyboard."""


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
    """Continue `prompt` by `num_tokens` tokens, drawn from softmax(logits / temperature).

    Each new token attends to the cached keys and values of all before it, so a step costs one
    position however long the text already is. The same seed draws the same tokens.

    Args:
        prompt: at least one token id; a longer one than the model holds keeps its end.
        num_tokens: how many to add. Prompt and new tokens together may exceed max_positions: the
            older half is then forgotten and the rest read again.
        temperature: 0 takes the most likely token each time; above 1 flattens the choice.
        top_k: only the k most likely tokens can be drawn.
        top_p: only the fewest tokens that together have this part of the probability.
        min_p: only tokens at least this part as likely as the most likely.

    Returns:
        The new tokens only.

    Raises:
        ConfigError: an option out of range.
        DataError: logits that are not numbers.
    """
    config = model.config
    if not prompt:
        raise ConfigError("prompt: expected at least one token")
    if not all(0 <= token < config.vocab_size for token in prompt):
        raise ConfigError(f"prompt: tokens must lie in 0..{config.vocab_size - 1}")
    if not 0 <= num_tokens <= MOST_TOKENS:
        raise ConfigError(f"num_tokens: expected 0 to {MOST_TOKENS}, got {num_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature: expected a finite number from 0 on, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: expected 1 or more, got {top_k}")

    text = list(prompt[-config.max_positions :])
    cache = model.new_cache(batch=1)
    unread = text
    new_tokens: list[int] = []
    for step in range(num_tokens):
        if cache.length + len(unread) > config.max_positions:
            unread = text = text[-max(1, config.max_positions // 2) :]
            cache.length = 0
        tokens = model.xp.asarray(np.array([unread], np.int32))
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
        unread = [token]
    return new_tokens
