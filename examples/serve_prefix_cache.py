"""Serves requests that share prompts, with and without a prefix cache.

    python examples/serve_prefix_cache.py                      # a small random model
    python examples/serve_prefix_cache.py --model runs/distill/student.safetensors

Each request has one of a few long prompts and a question of its own. A batch of requests runs at a
time: a new request computes only the tokens that are not cached, then all running requests decode a
token together. The same requests are served again without sharing, and must give the same text.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cukit as ck
from cukit.distill import read_corpus
from cukit.models import Transformer, TransformerConfig, load_model

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Outcome:
    """The results of serving all requests."""

    answers: list[list[int]]
    seconds: float
    hit_rate: float
    computed_tokens: int
    """Prompt tokens that were computed, not cached."""
    peak_bytes: int
    """Peak size of the running requests' keys and values."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, including the time for prompts."""
        return sum(map(len, self.answers)) / self.seconds


def serve(
    model: Transformer, prompts: list[list[int]], *, num_new: int, batch: int, share: bool
) -> Outcome:
    """Answers all prompts, `batch` at a time, with greedy decoding."""
    config = model.config
    longest = max(map(len, prompts)) + num_new
    blocks = -(-longest // BLOCK_SIZE) * batch
    cache = ck.KVCacheManager(
        2 * blocks, BLOCK_SIZE, num_layers=config.num_layers, num_heads_kv=config.num_heads_kv,
        head_dim=config.head_dim, dtype=config.array_dtype,
    )  # fmt: skip
    attention = ck.RadixAttention(cache, num_heads_q=config.num_heads_q, max_batch=batch)

    def next_tokens(tokens: Any) -> list[int]:
        """The next token after each row of tokens [requests, tokens]."""
        rows = model.xp.asarray(np.asarray(tokens, np.int32))
        hidden = model.forward(rows, keep=False, cache=attention).hidden
        last = hidden.reshape(*rows.shape, -1)[:, -1]
        return ck.to_numpy(model.logits(last).astype(np.float32).argmax(-1)).tolist()

    answers: list[list[int]] = [[] for _ in prompts]
    waiting, running = list(range(len(prompts))), list[int]()
    peak_blocks = 0
    begin = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < batch:
            request = waiting.pop(0)
            # Requests with different salts share nothing.
            cached = attention.add(request, prompts[request], salt=None if share else request)
            answers[request] += next_tokens([prompts[request][cached:]])
            running.append(request)
        peak_blocks = max(peak_blocks, cache.statistics().held_blocks)
        for request in [each for each in running if len(answers[each]) >= num_new]:
            attention.free(request)
            running.remove(request)
        if running:
            last = [answers[request][-1] for request in running]
            attention.append(running, last)
            for request, token in zip(running, next_tokens([[each] for each in last]), strict=True):
                answers[request].append(token)
    seconds = time.perf_counter() - begin
    statistics = cache.statistics()
    return Outcome(
        answers,
        seconds,
        statistics.hit_rate,
        statistics.prompt_tokens - statistics.cached_tokens,
        peak_blocks * cache.slab.block_bytes,
    )


def shared_prompts(
    text: np.ndarray[Any, Any], num_requests: int, num_prompts: int, shared: int, own: int
) -> list[list[int]]:
    """Prompts that start with one of `num_prompts` prefixes of `shared` bytes, whose popularity is
    Zipf-distributed, and end with `own` bytes from a random place."""
    generator = np.random.default_rng(0)
    popularity = 1 / np.arange(1, num_prompts + 1)
    chosen = generator.choice(num_prompts, num_requests, p=popularity / popularity.sum())
    places = generator.integers(0, len(text) - own, num_requests)
    return [
        [*text[which * shared : (which + 1) * shared].tolist(), *text[at : at + own].tolist()]
        for which, at in zip(chosen, places, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> tuple[Outcome, Outcome]:
    """Serves the requests with and without sharing; prints and returns both outcomes."""
    parser = argparse.ArgumentParser(description="Serve requests that share prompts.")
    parser.add_argument("--model", type=Path, help="a student from `cukit distill`")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4, help="number of shared prefixes")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="concurrent requests")
    options = parser.parse_args(arguments)
    xp = importlib.import_module("cupy" if ck.default_device() == "gpu" else "numpy")
    dtype = "float32" if xp is np else "bfloat16"
    if options.model is None:
        config = TransformerConfig(256, 128, 2, 4, 2, 32, 256, 256, dtype=dtype)
        model = Transformer.initialise(config, seed=0, xp=xp)
    else:
        model = load_model(options.model, xp, dtype=dtype)
    room = model.config.max_positions - options.new_tokens
    if room < 8:
        parser.error(f"--new-tokens: the model supports {model.config.max_positions} tokens in all")
    own = room // 8
    prompts = shared_prompts(
        read_corpus().validation, options.requests, options.prompts, room - own, own
    )
    settings = {"num_new": options.new_tokens, "batch": options.batch}
    serve(model, prompts[:2], share=True, **settings)  # compiles kernels
    shared, alone = (serve(model, prompts, share=share, **settings) for share in (True, False))
    print(f"{options.requests} requests of {room} + {options.new_tokens} tokens")
    for name, outcome in (("prefix cache", shared), ("nothing shared", alone)):
        print(
            f"{name:>14}: hit rate {outcome.hit_rate:4.0%}, {outcome.computed_tokens:6} prompt "
            f"tokens computed, {outcome.tokens_per_second:7.0f} new tokens/s, "
            f"{outcome.peak_bytes / 2**20:6.2f} MiB of keys and values at the peak"
        )
    saved = 1 - shared.peak_bytes / alone.peak_bytes
    same = sum(map(list.__eq__, shared.answers, alone.answers))
    print(f"memory saved: {saved:.0%}; the same text: {same} of {options.requests} requests")
    return shared, alone


if __name__ == "__main__":
    main()
