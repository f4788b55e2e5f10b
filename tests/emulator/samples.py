"""One call of every op that has kernels, small enough for the emulator.

A sample is a function of a random generator that returns the op's arguments as NumPy arrays.
Results come back as a flat list of arrays, so that every op can be judged alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukit.array_api import NarrowDtype, QuantizedArray, float8_e4m3, float8_e5m2
from cukit.array_api.narrow import encode
from cukit.distill.adamw import AdamWState
from cukit.registry import Op
from tests.contract import random

Rng = np.random.Generator
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Place = Callable[[np.ndarray[Any, Any]], Any]


def _rows(rng: Rng, *shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    return [random(rng, shape, dtype) for shape in shapes]


def _norm_backward(rng: Rng) -> Arguments:
    grad, x, weight = _rows(rng, (37, 264), (37, 264), (264,))
    return (grad, x, weight), {"grad_residual": random(rng, (37, 264), "bfloat16")}


def _rope(rng: Rng) -> Arguments:
    q, k = _rows(rng, (2, 9, 4, 64), (2, 9, 2, 64))
    angles = rng.uniform(0, 6, (12, 32))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = rng.integers(0, 12, (2, 9)).astype(np.int32)
    return (q, k, *tables, positions), {}


def _attention(rng: Rng) -> list[Any]:
    return _rows(rng, (1, 70, 2, 64), (1, 135, 1, 64), (1, 135, 1, 64))


def _attention_backward(rng: Rng) -> Arguments:
    from cukit.reference.attention import flash_attention

    q, k, v = _attention(rng)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    options = {"causal": True, "deterministic": True}
    return (random(rng, q.shape, "bfloat16"), q, k, v, out, lse), options


def _logits(rng: Rng) -> tuple[Any, Any]:
    targets = rng.integers(0, 1003, 5)
    targets[3] = -100
    return random(rng, (5, 1003), "bfloat16", 3.0), targets


def _divergence(rng: Rng) -> Arguments:
    logits, targets = _logits(rng)
    options = {"temperature": 2.0, "targets": targets, "return_grad": True}
    return (logits, random(rng, (5, 1003), "bfloat16", 3.0)), options


def _divergence_backward(rng: Rng) -> Arguments:
    (student, teacher), options = _divergence(rng)
    return (np.float32(0.5), student, teacher), {
        key: options[key] for key in ("temperature", "targets")
    }


def _linear(rng: Rng) -> list[Any]:
    return _rows(rng, (40, 64), (500, 64), dtype="float32")


def _linear_divergence(rng: Rng) -> Arguments:
    return (*_linear(rng), *_rows(rng, (40, 48), (500, 48), dtype="float32")), {
        "temperature": 2.0,
        "chunk_tokens": 16,
    }


def _adamw(rng: Rng) -> Arguments:
    params = _rows(rng, (300,), (17, 20))
    return (params, _rows(rng, (300,), (17, 20)), AdamWState.for_params(params)), {
        "lr": 0.01,
        "step": 3,
        "weight_decay": 0.1,
    }


def _values(rng: Rng) -> Any:
    return random(rng, (5, 37), "float32", 3.0)


def _slides(rng: Rng) -> Arguments:
    """Holes of several sizes are closed, in memory of more than one block."""
    memory = rng.integers(0, 256, 150_000).astype(np.uint8)
    moves = [(0, 16, 70_000), (70_000, 70_512, 30_000), (100_016, 110_000, 33_024)]
    return (memory, moves), {}


def _blocks(rng: Rng) -> Arguments:
    mask = rng.random((2, 2, 3)) < 0.6
    return (*_attention(rng), mask), {"block_size": (48, 64), "return_lse": True}


SAMPLES: dict[str, Callable[[Rng], Arguments]] = {
    "adamw": _adamw,
    "batched_copy": _slides,
    "block_sparse_attention": _blocks,
    "cross_entropy": lambda rng: (_logits(rng), {"return_grad": True}),
    "cross_entropy_backward": lambda rng: ((np.float32(0.5), *_logits(rng)), {}),
    "decode": lambda rng: ((encode(_values(rng), float8_e4m3),), {}),
    "embedding": lambda rng: (
        (rng.integers(0, 300, (4, 9)), random(rng, (300, 72), "bfloat16")),
        {},
    ),
    "embedding_backward": lambda rng: (
        (random(rng, (4, 40, 72), "bfloat16"), rng.integers(0, 30, (4, 40)), 300),
        {},
    ),
    "encode": lambda rng: ((_values(rng), float8_e5m2), {}),
    "flash_attention": lambda rng: (
        tuple(_attention(rng)),
        {"causal": True, "return_lse": True},
    ),
    "flash_attention_backward": _attention_backward,
    "gated_linear": lambda rng: (tuple(_rows(rng, (70, 72), (272, 72))), {}),
    "gated_linear_backward": lambda rng: (
        tuple(_rows(rng, (70, 136), (70, 72), (272, 72), (70, 272))),
        {},
    ),
    "gelu": lambda rng: (tuple(_rows(rng, (7, 200))), {}),
    "gelu_and_mul": lambda rng: (tuple(_rows(rng, (7, 400))), {}),
    "gelu_and_mul_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 400))), {}),
    "gelu_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 200))), {}),
    "global_norm": lambda rng: ((_rows(rng, (300,), (17, 20)),), {}),
    "kl_divergence": _divergence,
    "kl_divergence_backward": _divergence_backward,
    "layer_norm": lambda rng: (tuple(_rows(rng, (37, 264), (264,), (264,))), {}),
    "layer_norm_backward": _norm_backward,
    "linear_cross_entropy": lambda rng: (
        (*_linear(rng), rng.integers(0, 500, 40)),
        {"chunk_tokens": 16},
    ),
    "linear_kl_divergence": _linear_divergence,
    "linear": lambda rng: ((*_rows(rng, (70, 72), (136, 72), (136,)), "gelu"), {}),
    "linear_backward": lambda rng: (
        (*_rows(rng, (70, 136), (70, 72), (136, 72), (70, 136)), "silu"),
        {"with_bias": True},
    ),
    "matmul_tma": lambda rng: (tuple(_rows(rng, (70, 72), (136, 72))), {}),
    "rms_norm": lambda rng: (tuple(_rows(rng, (37, 264), (264,))), {}),
    "rms_norm_backward": _norm_backward,
    "rope": _rope,
    "rope_backward": _rope,
    "silu_and_mul": lambda rng: (tuple(_rows(rng, (7, 400))), {}),
    "silu_and_mul_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 400))), {}),
}


def run(
    op: Op, place: Place, *, reference: bool = False, wide: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Results of the op's sample, or of its reference (in float64 where `wide`), on the host."""
    args, options = SAMPLES[op.name](np.random.default_rng(5))
    if wide:
        args, options = _map(args, _widen), _map(options, _widen)
    args, options = _map(args, place), _map(options, place)
    if reference and op.name == "encode":
        x, dtype = args
        return [x.astype(np.float64)] if wide else [_host(op.reference(x, dtype.name))]
    if reference and op.name == "matmul_tma":
        options = {"transpose_b": True}
    if reference and op.name == "decode":
        return [args[0].dense().astype(np.float64)]
    result = (op.reference if reference else op.function)(*args, **options)
    return [_host(array) for array in _flat(args if op.name == "adamw" else result)]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to every array in it."""
    if isinstance(value, np.ndarray):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, NarrowDtype):
        fields = {f.name: _map(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _flat(value: Any) -> list[Any]:
    if value is None or (isinstance(value, (int, float, str, tuple)) and not value):
        return []
    if isinstance(value, Sequence):
        return [array for each in value for array in _flat(each)]
    if isinstance(value, QuantizedArray):
        return [value.dense()]
    if dataclasses.is_dataclass(value):
        return [array for f in dataclasses.fields(value) for array in _flat(getattr(value, f.name))]
    return [value] if hasattr(value, "dtype") else []


def _host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array.get() if hasattr(array, "get") else array)


def _widen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float64) if array.dtype.kind not in "iu" else array
