"""Class sm90 of the backward: what changes scores, who sees whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cukit.attention import flash_attention_backward
from cukit.reference import attention as reference
from tests.attention import plain
from tests.attention.options import OPTIONS, options_of, widened
from tests.contract import assert_close, poison_pool, random, to_device

NAMES = ("grad_q", "grad_k", "grad_v")
# What users combine, beside tests/attention/options.py.
EVERY_OPTION: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "window, sinks": {"window_size": (40, 9), "sinks": True},
    "window causal": {"causal": True, "window_size": (70, None)},
}
EMULATED = {
    # name: head_dim, deterministic
    "window, sinks": (64, True),
    "window causal": (128, False),
    "window": (256, True),
}


@pytest.fixture
def hopper(device) -> str:
    """A place where class sm90 runs."""
    if device == "cpu":
        pytest.skip("the class needs a GPU, or the emulator")
    return device


def inputs_of(rng, lengths, heads, head_dim, batch=1, dtype="bfloat16"):
    (seq_q, seq_kv), (heads_q, heads_kv) = lengths, heads
    q, grad_out = (random(rng, (batch, seq_q, heads_q, head_dim), dtype) for _ in range(2))
    k, v = (random(rng, (batch, seq_kv, heads_kv, head_dim), dtype) for _ in range(2))
    return q, k, v, grad_out


def check(place, q, k, v, grad_out, options: dict[str, Any], deterministic=False):
    """Gradients beside float64, given what an exact forward returns."""
    wide_options = {name: widened(value) for name, value in options.items()}
    wide = [x.astype(np.float64) for x in (grad_out, q, k, v)]
    exact, exact_lse = reference.flash_attention(*wide[1:], return_lse=True, **wide_options)
    expected = reference.flash_attention_backward(*wide, exact, exact_lse, **wide_options)
    low = plain.backward(grad_out, q, k, v, **{"causal": False, **options})
    out, lse = exact.astype(q.dtype), exact_lse.astype(np.float32)
    placed = to_device(place, grad_out, q, k, v, *map(np.ascontiguousarray, (out, lse)))
    placed_options = {
        name: to_device(place, value)[0] if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    poison_pool(place)
    grads = flash_attention_backward(*placed, deterministic=deterministic, **placed_options)
    for name, *of_input in zip(NAMES, grads, low, expected, strict=False):
        assert_close(name, *of_input)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_options(hopper, rng, name, head_dim):
    """Several tiles both ways, keys that end inside one, and blocks that see no query."""
    if hopper == "emulator":
        if EMULATED.get(name, (0, False))[0] != head_dim:
            pytest.skip("the emulator runs what differs most; the rest is for the GPU")
        lengths, heads, batch = (200, 300), (2, 1), 1
        ways: tuple[bool, ...] = (EMULATED[name][1],)
    else:
        lengths, heads, batch = (700, 600), (4, 2), 2
        ways = (False, True)
    inputs = inputs_of(rng, lengths, heads, head_dim, batch)
    options = options_of(rng, EVERY_OPTION[name], batch, heads[0], lengths, "bfloat16")
    for deterministic in ways:
        check(hopper, *inputs, options, deterministic)
