"""Attention options for tests: the cases, how to run them and how to check the results."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.attention import flash_attention, flash_attention_backward
from cukit.reference import attention as reference
from tests.contract import (
    BFLOAT16,
    assert_close,
    poison_pool,
    poisoned,
    random,
    to_device,
    to_host,
)

LSE_ATOL = 1e-5

# "bias" and "mask" name the axes that are not broadcast, of [b, h, q, k].
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (30, 20)},
    "window right": {"window_size": (None, 7)},
    "window of one": {"window_size": (0, 0)},
    "window far left": {"window_size": (100000, 0)},
    "causal window, sinks": {"causal": True, "window_size": (40, None), "sinks": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": "h"},
    "alibi of each sequence, softcap": {"alibi_slopes": "bh", "softcap": 2.0},
    "bias": {"bias": "bhqk", "causal": True},
    "bias of keys": {"bias": "k", "bias_dtype": "float32"},
    "bias, mask": {"bias": "hqk", "mask": "bk"},
    "mask": {"mask": "bhqk"},
    "sinks": {"sinks": True},
    "everything": {
        "window_size": (50, 31),
        "softcap": 3.0,
        "alibi_slopes": "h",
        "bias": "qk",
        "mask": "bqk",
        "sinks": True,
    },
}


def options_of(rng, asked, batch, heads, lengths, dtype):
    """Option values as described by `asked`."""
    extents = dict(zip("bhqk", (batch, heads, *lengths), strict=True))
    options = dict(asked)
    bias_dtype = options.pop("bias_dtype", dtype)

    def shape(axes):
        return tuple(extents[axis] if axis in axes else 1 for axis in "bhqk")

    if "alibi_slopes" in options:
        slopes = [extents[axis] for axis in options["alibi_slopes"]]
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, slopes).astype(np.float32)
    if "sinks" in options:
        options["sinks"] = random(rng, (heads,), "float32")
    if "bias" in options:
        axes = options["bias"]
        whole = random(rng, shape(axes), bias_dtype)
        options["bias"] = whole.reshape(extents["k"]) if axes == "k" else whole
    if "mask" in options:
        options["mask"] = rng.random(shape(options["mask"])) < 0.6
    return options


def widened(value: Any) -> Any:
    floating = isinstance(value, np.ndarray) and value.dtype.kind not in "bi"
    return (
        value.astype(np.float64) if floating or getattr(value, "dtype", None) == BFLOAT16 else value
    )


def run(place, q, k, v, grad_out, options, names=("grad_q", "grad_k", "grad_v", "grad_sinks")):
    """(out, lse), and the gradients, default and deterministic."""
    (q, k, v, grad_out) = to_device(place, q, k, v, grad_out)
    options = {
        name: to_device(place, value)[0] if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    shape = (*q.shape[:-1], v.shape[-1])
    out = poisoned(place, shape, np.dtype(q.dtype).name)
    poison_pool(place)
    result, lse = flash_attention(q, k, v, out=out, return_lse=True, **options)
    assert result is out
    both = []
    for deterministic in (False, True):
        poison_pool(place)
        gradients = flash_attention_backward(
            grad_out, q, k, v, out, lse, deterministic=deterministic, **options
        )
        assert len(gradients) == (4 if options.get("sinks") is not None else 3)
        both.append(dict(zip(names, map(to_host, gradients), strict=False)))
    return to_host(out), to_host(lse), both


def judge(results, q, k, v, grad_out, options, low):
    """Compares the results of `run` with float64; `low` is plain's forward and backward."""
    out, lse, both = results
    q, k, v, grad_out = (x.astype(np.float64) for x in (q, k, v, grad_out))
    options = {name: widened(value) for name, value in options.items()}
    exact, exact_lse = reference.flash_attention(q, k, v, return_lse=True, **options)
    expected = reference.flash_attention_backward(grad_out, q, k, v, exact, exact_lse, **options)
    (low_out, _), low_gradients = low
    assert_close("out", out, low_out, exact)
    assert_close("lse", lse, exact_lse, exact_lse, LSE_ATOL)
    for way, gradients in zip(("atomic", "deterministic"), both, strict=True):
        for (name, got), low_one, wide in zip(
            gradients.items(), low_gradients, expected, strict=True
        ):
            # A sum over all queries, of values rounded to bfloat16.
            atol = 2e-2 if name == "grad_sinks" else None
            assert_close(f"{name} ({way})", got, low_one, wide, atol)
