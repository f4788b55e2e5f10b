"""Checks of flash attention, forward and backward, against the float64 reference.

The error of plain low-precision code (`tests.attention.plain`) sets the scale of the tolerances.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.attention import flash_attention, flash_attention_backward
from cukit.reference import attention as reference
from tests.attention import plain
from tests.contract import (
    BFLOAT16,
    assert_close,
    poison_pool,
    poisoned,
    random,
    to_device,
    to_host,
)

LSE_ATOL = 1e-5  # float32 sums of a few hundred exponentials
NAMES = ("grad_q", "grad_k", "grad_v")


def inputs_of(rng, lengths, heads, head_dim, value_dim=None, *, batch=1, dtype="bfloat16"):
    """Random q, k, v and grad_out."""
    (seq_q, seq_kv), (heads_q, heads_kv) = lengths, heads
    value_dim = value_dim or head_dim
    q = random(rng, (batch, seq_q, heads_q, head_dim), dtype)
    k = random(rng, (batch, seq_kv, heads_kv, head_dim), dtype)
    v = random(rng, (batch, seq_kv, heads_kv, value_dim), dtype)
    return q, k, v, random(rng, (batch, seq_q, heads_q, value_dim), dtype)


def widened(value: Any) -> Any:
    """The value in float64 if it is a floating-point array."""
    floating = isinstance(value, np.ndarray) and value.dtype.kind not in "bi"
    return (
        value.astype(np.float64) if floating or getattr(value, "dtype", None) == BFLOAT16 else value
    )


def on_device(device, options):
    """The options with their arrays on the device."""
    return {
        name: to_device(device, value)[0] if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def exact_forward(q, k, v, options):
    """(out, lse) in float64."""
    options = {name: widened(value) for name, value in options.items()}
    return reference.flash_attention(*map(widened, (q, k, v)), return_lse=True, **options)


def exact_backward(q, k, v, grad_out, options):
    """(out, lse) and the gradients in float64."""
    out, lse = exact_forward(q, k, v, options)
    wide = map(widened, (grad_out, q, k, v))
    options = {name: widened(value) for name, value in options.items()}
    return (out, lse), reference.flash_attention_backward(*wide, out, lse, **options)


def run_forward(device, q, k, v, options):
    """(out, lse), computed into a poisoned output."""
    out = poisoned(device, (*q.shape[:-1], v.shape[-1]), np.dtype(q.dtype).name)
    placed, options = to_device(device, q, k, v), on_device(device, options)
    poison_pool(device)
    result, lse = flash_attention(*placed, return_lse=True, out=out, **options)
    assert result is out
    return out, lse


def run_forward_and_backward(device, q, k, v, grad_out, options):
    """(out, lse) on the host, and two dicts of gradients by name: of the default backward, and of
    the deterministic backward."""
    out, lse = run_forward(device, q, k, v, options)
    grad_out, q, k, v = to_device(device, grad_out, q, k, v)
    options = on_device(device, options)
    both = []
    for deterministic in (False, True):
        poison_pool(device)
        gradients = flash_attention_backward(
            grad_out, q, k, v, out, lse, deterministic=deterministic, **options
        )
        assert len(gradients) == (4 if options.get("sinks") is not None else 3)
        names = (*NAMES, "grad_sinks")
        both.append(dict(zip(names, map(to_host, gradients), strict=False)))
    return to_host(out), to_host(lse), both


def compare_with_float64(results, q, k, v, grad_out, options, low):
    """Compares the results of `run_forward_and_backward` with float64.

    low: (out, lse) and gradients of tests.attention.plain; if its lse is None, the error of lse may
    be LSE_ATOL at most.
    """
    out, lse, both = results
    (exact, exact_lse), expected = exact_backward(q, k, v, grad_out, options)
    (low_out, low_lse), low_gradients = low
    assert_close("out", out, low_out, exact)
    assert_close("lse", lse, exact_lse if low_lse is None else low_lse, exact_lse, LSE_ATOL)
    for way, gradients in zip(("atomic", "deterministic"), both, strict=True):
        for (name, got), low_one, wide in zip(
            gradients.items(), low_gradients, expected, strict=True
        ):
            # grad_sinks is a sum over all queries of values rounded to bfloat16.
            atol = 2e-2 if name == "grad_sinks" else None
            assert_close(f"{name} ({way})", got, low_one, wide, atol)


def check(device, q, k, v, grad_out, options, *, strict_lse=True):
    """Checks forward and both backwards.

    strict_lse: the error of lse may be LSE_ATOL at most; if False, LSE_ATOL plus twice the error of
    plain code.
    """
    settings = {"causal": False, **options}
    low_out, low_lse = plain.forward(q, k, v, **settings)
    low = (low_out, None if strict_lse else low_lse), plain.backward(grad_out, q, k, v, **settings)
    results = run_forward_and_backward(device, q, k, v, grad_out, options)
    compare_with_float64(results, q, k, v, grad_out, options, low)


def check_forward(device, q, k, v, options):
    """Checks out and lse of the forward."""
    out, lse = run_forward(device, q, k, v, options)
    exact, exact_lse = exact_forward(q, k, v, options)
    low, low_lse = plain.forward(q, k, v, **{"causal": False, **options})
    assert_close("out", out, low, exact)
    assert_close("lse", lse, low_lse, exact_lse, LSE_ATOL)


def run_backward(device, q, k, v, grad_out, options, deterministic=False):
    """Gradients for the output of an exact forward, and the gradients in float64."""
    (out, lse), expected = exact_backward(q, k, v, grad_out, options)
    kept = out.astype(q.dtype), lse.astype(np.float32)
    placed = to_device(device, grad_out, q, k, v, *map(np.ascontiguousarray, kept))
    options = on_device(device, options)
    poison_pool(device)
    gradients = flash_attention_backward(*placed, deterministic=deterministic, **options)
    return gradients, expected


def check_backward(device, q, k, v, grad_out, options, deterministic=False):
    """Checks the gradients of q, k and v for the output of an exact forward."""
    gradients, expected = run_backward(device, q, k, v, grad_out, options, deterministic)
    low = plain.backward(grad_out, q, k, v, **{"causal": False, **options})
    for name, *of_input in zip(NAMES, gradients, low, expected, strict=False):
        assert_close(name, *of_input)
