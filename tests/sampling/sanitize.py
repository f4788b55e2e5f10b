"""Groups for `tests.sanitize`: thread blocks and clusters, all options, penalties, drafts."""

from __future__ import annotations

import numpy as np

from cukit import sampling
from tests.contract import random, to_device
from tests.sampling.test_sample import OPTIONS
from tests.sampling.test_speculative import OPTIONS as DRAFT_OPTIONS
from tests.sanitize import Group


def tokens() -> None:
    rng = np.random.default_rng(3)
    for shape in ((3, 1), (5, 33), (2, 6001), (2, 40000)):
        logits = random(rng, shape, "bfloat16", scale=3)
        history = rng.integers(-1, shape[1], (shape[0], 30)).astype(np.int32)
        logits, history = to_device("gpu", logits, history)
        for options in OPTIONS:
            most = min(options.get("logprobs") or 0, shape[1])
            settings = {**options, "logprobs": most} if "logprobs" in options else options
            sampling.sample(logits, **settings)
        sampling.sample(logits, top_k=3, history=history, frequency_penalty=0.5)
    (equal,) = to_device("gpu", np.zeros((2, 6001), np.float32))
    sampling.sample(equal, top_k=20)
    sampling.sample(equal, top_p=0.5)


def drafts() -> None:
    rng = np.random.default_rng(3)
    for batch, num_drafts, vocab_size in ((5, 3, 300), (2, 2, 20000), (4, 2, 20000)):
        logits = random(rng, (batch, num_drafts + 1, vocab_size), "float16")
        tokens = rng.integers(0, vocab_size, (batch, num_drafts)).astype(np.int32)
        probs = np.full((batch, num_drafts, vocab_size), 1 / vocab_size, np.float32)
        logits, tokens, probs = to_device("gpu", logits, tokens, probs)
        for options in DRAFT_OPTIONS:
            sampling.speculative_verify(tokens, logits, draft_probs=probs, **options)
            sampling.speculative_verify(tokens, logits, **options)


GROUPS = {
    "tokens": Group(tokens, shares=True, quick=True),
    "drafts": Group(drafts, shares=True),
}
