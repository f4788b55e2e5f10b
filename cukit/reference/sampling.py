"""Sampling of tokens in float64: penalties, truncation, draws, verification of drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace

Array = Any

DRAW, ACCEPT, RESAMPLE = 0, 1, 2
"""Streams of random numbers."""


class Sample(NamedTuple):
    """Sampled tokens and their log-probabilities.

    tokens: int32 [batch]; -1 if logits or options are invalid.
    logprobs: float32 [batch] (float64 for float64 logits), None if not requested.
    top_tokens: int32 [batch, n], the most likely tokens, most likely first; None if not requested.
    top_logprobs: dtype of logprobs [batch, n].
    """

    tokens: Array
    logprobs: Array | None = None
    top_tokens: Array | None = None
    top_logprobs: Array | None = None


class Verified(NamedTuple):
    """The tokens that verification appends to each request.

    tokens: int32 [batch, num_drafts + 1]: the accepted drafts and one more token, then -1.
    num_accepted: int32 [batch]; -1 if logits or options are invalid.
    """

    tokens: Array
    num_accepted: Array


def philox_uint64(seed: Array, step: Array, stream: int) -> Array:
    """64 bits of Philox4x32-10 per key `seed` and counter `(step, stream, 0)`, all uint64."""
    xp = array_namespace(seed)
    low, shift = xp.uint64(0xFFFFFFFF), xp.uint64(32)
    c0, c1 = step & low, step >> shift
    c2, c3 = xp.full_like(c0, stream), xp.zeros_like(c0)
    k0, k1 = seed & low, seed >> shift
    for _ in range(10):
        p0, p1 = c0 * xp.uint64(0xD2511F53), c2 * xp.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + xp.uint64(0x9E3779B9)) & low, (k1 + xp.uint64(0xBB67AE85)) & low
    return c1 << shift | c0


def count_tokens(history: Array, vocab_size: int, prompt_lengths: Array | None = None) -> Array:
    """Counts how often each token was generated; the highest bit marks tokens in `history`.

    history: int32 [batch, length]; ids outside the vocabulary are ignored. The first
    `prompt_lengths[b]` tokens belong to the prompt. Returns int32 [batch, vocab_size].
    """
    xp = array_namespace(history)
    batch, length = history.shape
    counts, present = xp.zeros((2, batch, vocab_size), xp.int64)
    known = (history >= 0) & (history < vocab_size)
    drawn = xp.ones_like(known)
    if prompt_lengths is not None:
        drawn = xp.arange(length)[None, :] >= prompt_lengths[:, None]
    rows = xp.broadcast_to(xp.arange(batch)[:, None], history.shape)
    xp.add.at(counts, (rows[known & drawn], history[known & drawn]), 1)
    present[rows[known], history[known]] = 1
    return (counts - (present << 31)).astype(xp.int32)


def sample(
    logits: Array,
    *,
    temperature: Array | float = 1.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    min_p: Array | float | None = None,
    repetition_penalty: Array | float | None = None,
    presence_penalty: Array | float | None = None,
    frequency_penalty: Array | float | None = None,
    history: Array | None = None,
    prompt_lengths: Array | None = None,
    seed: Array | int = 0,
    step: Array | int = 0,
    logprobs: int | None = None,
) -> Sample:
    """Samples a token from each row of `logits [batch, vocab_size]`."""
    xp = array_namespace(logits)
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    z = _penalized(xp, logits, history, prompt_lengths, penalties)
    rows = _Rows(xp, z, temperature, top_k, top_p, min_p)
    seeds, steps = _counters(xp, seed, step, len(z))
    tokens = rows.draw(rows.weights, philox_uint64(seeds, steps, DRAW))
    tokens = xp.where(rows.invalid, -1, tokens).astype(xp.int32)
    if logprobs is None:
        return Sample(tokens)
    dtype = logits.dtype if logits.dtype == np.float64 else np.float32
    all_logprobs = xp.where(rows.invalid[:, None], xp.nan, rows.logprobs()).astype(dtype)
    drawn = xp.take_along_axis(all_logprobs, xp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    if logprobs == 0:
        return Sample(tokens, drawn)
    best = rows.order[:, :logprobs]
    top_logprobs = xp.take_along_axis(all_logprobs, best, axis=1)
    top_tokens = xp.where(rows.invalid[:, None], -1, best).astype(xp.int32)
    return Sample(tokens, drawn, top_tokens, top_logprobs)


def kept_tokens(
    logits: Array,
    *,
    temperature: Array | float = 1.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    min_p: Array | float | None = None,
) -> Array:
    """bool [batch, vocab_size]: the tokens that remain after truncation."""
    xp = array_namespace(logits)
    return _Rows(xp, logits.astype(np.float64), temperature, top_k, top_p, min_p).weights > 0


def speculative_verify(
    draft_tokens: Array,
    logits: Array,
    *,
    draft_probs: Array | None = None,
    temperature: Array | float = 1.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    min_p: Array | float | None = None,
    seed: Array | int = 0,
    step: Array | int = 0,
) -> Verified:
    """Verifies drafts `[batch, num_drafts]` with `logits [batch, num_drafts + 1, vocab_size]`."""
    xp = array_namespace(logits)
    batch, num_drafts = draft_tokens.shape
    vocab_size = logits.shape[-1]
    positions = num_drafts + 1
    options = [_repeated(xp, option, positions) for option in (temperature, top_k, top_p, min_p)]
    rows = _Rows(xp, logits.reshape(-1, vocab_size).astype(np.float64), *options)
    seeds, steps = _counters(xp, seed, step, batch)
    seeds = xp.repeat(seeds, positions)
    steps = (steps[:, None] + xp.arange(positions).astype(xp.uint64)).reshape(-1)

    drafts = xp.full((batch, positions), -1, xp.int64)
    drafts[:, :num_drafts] = draft_tokens
    drafts = drafts.reshape(-1)
    exists = ((drafts >= 0) & (drafts < vocab_size))[:, None]
    one_hot = exists & (xp.arange(vocab_size)[None, :] == drafts[:, None])
    expected = one_hot.astype(np.float64)
    if draft_probs is not None:
        expected = xp.zeros((batch, positions, vocab_size))
        expected[:, :num_drafts] = draft_probs
        expected = expected.reshape(-1, vocab_size)
    share = rows.weights / xp.maximum(rows.weights.sum(axis=1, keepdims=True), 1e-300)

    at = xp.where(exists, drafts[:, None], 0)
    uniform = (philox_uint64(seeds, steps, ACCEPT) >> xp.uint64(11)).astype(np.float64) * 2.0**-53
    prob = xp.take_along_axis(share, at, axis=1)[:, 0]
    ratio = uniform * xp.take_along_axis(expected, at, axis=1)[:, 0]
    accepted = exists[:, 0] & (ratio < prob)
    excess = xp.maximum(share - expected, 0) if draft_probs is not None else share * ~one_hot
    is_draft = (xp.arange(len(drafts)) % positions) < num_drafts
    empty = excess.sum(axis=1, keepdims=True) == 0
    excess = xp.where(is_draft[:, None] & ~empty, excess, share)
    bits = xp.where(
        is_draft, philox_uint64(seeds, steps, RESAMPLE), philox_uint64(seeds, steps, DRAW)
    )
    replacements = rows.draw(excess, bits)

    accepted, invalid = accepted.reshape(batch, positions), rows.invalid.reshape(batch, positions)
    indices = xp.arange(positions)[None, :]
    count = xp.cumprod((accepted & ~invalid).astype(xp.int64), axis=1)[:, :num_drafts].sum(axis=1)
    drawn = xp.where(
        accepted, drafts.reshape(batch, positions), replacements.reshape(batch, positions)
    )
    drawn = xp.where(invalid, -1, drawn)
    tokens = xp.where(indices <= count[:, None], drawn, -1)
    stopped = xp.take_along_axis(invalid, count[:, None], axis=1)[:, 0]
    return Verified(tokens.astype(xp.int32), xp.where(stopped, -1, count).astype(xp.int32))


class _Rows:
    """Rows of logits after truncation."""

    def __init__(
        self, xp: Any, z: Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any
    ) -> None:
        vocab_size = z.shape[1]
        temperature = _column(xp, temperature, 1.0)
        top_k, top_p = _column(xp, top_k, 0), _column(xp, top_p, 1.0)
        min_p = _column(xp, min_p, 0.0)
        legal = (temperature >= 0) & (temperature < np.inf) & (top_k >= 0)  # [batch, 1] or [1, 1]
        legal = legal & (top_p >= 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)
        invalid = ~legal[:, 0] | xp.isnan(z).any(axis=1) | (z == np.inf).any(axis=1)
        invalid |= (z == -np.inf).all(axis=1)
        z = xp.where(invalid[:, None], 0.0, z)
        top_k = xp.where(temperature == 0, 1, xp.where(top_k <= 0, vocab_size, top_k))
        self.xp, self.invalid = xp, invalid
        self.order = xp.argsort(-z, axis=1, kind="stable")
        temperature = xp.where(legal & (temperature > 0), temperature, 1.0)
        self.scaled = (z - z.max(axis=1, keepdims=True)) / temperature
        weights = xp.exp(self.scaled)
        ranked = xp.take_along_axis(weights, self.order, axis=1)
        ranked = xp.where(xp.arange(vocab_size)[None, :] < top_k, ranked, 0.0)
        total = ranked.sum(axis=1, keepdims=True)
        before = xp.cumsum(ranked, axis=1) - ranked
        # The token that crosses top_p is kept; the most likely token is kept even for top_p = 0.
        kept = (top_p >= 1) | (before < top_p * total) | (xp.arange(vocab_size)[None, :] == 0)
        ranked = xp.where(kept & (ranked >= min_p), ranked, 0.0)
        self.weights = xp.take_along_axis(ranked, xp.argsort(self.order, axis=1), axis=1)

    def draw(self, weights: Array, bits: Array) -> Array:
        """Inverse CDF: the first token of each row whose cumulative weight exceeds bits / 2^64 of
        the row's total."""
        xp = self.xp
        cumulative = xp.cumsum(weights, axis=1)
        target = cumulative[:, -1:] * (bits.astype(np.float64) * 2.0**-64)[:, None]
        # If `target` is rounded up to the total, the last token with a positive weight is drawn.
        last = weights.shape[1] - 1 - xp.argmax(weights[:, ::-1] > 0, axis=1)
        return xp.minimum((cumulative <= target).sum(axis=1), last)

    def logprobs(self) -> Array:
        """Log-probabilities of all tokens, before truncation."""
        xp = self.xp
        return self.scaled - xp.log(xp.exp(self.scaled).sum(axis=1, keepdims=True))


def _penalized(
    xp: Any, logits: Array, history: Array | None, prompt_lengths: Array | None, penalties: Any
) -> Array:
    """Logits in float64, after the penalties; NaN where a penalty is out of range."""
    z = logits.astype(np.float64)
    if history is None:
        return z
    repetition, presence, frequency = (
        _column(xp, value, default)
        for value, default in zip(penalties, (1.0, 0.0, 0.0), strict=True)
    )
    legal = (repetition > 0) & (repetition < np.inf)
    legal = legal & xp.isfinite(presence) & xp.isfinite(frequency)
    repetition = xp.where(legal, repetition, 1.0)
    presence, frequency = (xp.where(legal, value, 0.0) for value in (presence, frequency))
    counts = count_tokens(history, z.shape[1], prompt_lengths)
    drawn = counts & 0x7FFFFFFF
    z = xp.where(counts != 0, xp.where(z > 0, z / repetition, z * repetition), z)
    z = z - xp.where(drawn > 0, presence + frequency * drawn, 0.0)
    return xp.where(legal, z, np.nan)


def _column(xp: Any, value: Any, default: float) -> Array:
    """[batch, 1] or [1, 1], float64."""
    if value is None:
        value = default
    return xp.asarray(value, dtype=np.float64).reshape(-1, 1)


def _counters(xp: Any, seed: Any, step: Any, batch: int) -> tuple[Array, Array]:
    """Seeds and steps of the requests, uint64 [batch]; with a scalar seed, row r has seed + r."""
    if isinstance(seed, int):
        seeds = xp.arange(batch).astype(xp.uint64) + xp.uint64(seed % 2**64)
    else:
        seeds = seed.astype(xp.int64).view(xp.uint64)
    steps = (
        xp.full(batch, step % 2**64, xp.uint64)
        if isinstance(step, int)
        else step.astype(xp.int64).view(xp.uint64)
    )
    return seeds, steps


def _repeated(xp: Any, option: Any, times: int) -> Any:
    """A per-request array repeated for each of the request's rows; numbers are returned as is."""
    return xp.repeat(option, times) if getattr(option, "ndim", 0) else option
