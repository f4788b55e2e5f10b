"""Attention options for tests: the cases and their values."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.contract import random

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


def options_of(rng, requested, batch, heads, lengths, dtype):
    """The options `requested`, with arrays for "alibi_slopes", "sinks", "bias" and "mask"."""
    extents = dict(zip("bhqk", (batch, heads, *lengths), strict=True))
    options = dict(requested)
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
