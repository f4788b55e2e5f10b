"""One call of every op that has kernels, small enough for the emulator.

A sample is a function of a random generator that returns the op's arguments as NumPy arrays.
Results come back as a flat list of arrays, so that every op can be checked alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukit.array_api import NarrowDtype, QuantizedArray, float8_e4m3, float8_e5m2, int4, int8
from cukit.distill.losses.topk_distillation_loss import teacher_top_k
from cukit.distill.optimizer.adamw import AdamWState
from cukit.gemm import BlockSparseMatrix, adaptive_depth, bsr_from_mask
from cukit.graph_memory import Transition
from cukit.quantization.encode import encode
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


def _linear_rope(rng: Rng) -> Arguments:
    angles = rng.uniform(0, 6, (65, 32))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return (*_rows(rng, (130, 72), (5 * 64, 72)), *tables, 3), {}


def _attention(rng: Rng) -> list[Any]:
    return _rows(rng, (1, 70, 2, 64), (1, 135, 1, 64), (1, 135, 1, 64))


def _append(rng: Rng) -> Arguments:
    q, k, v, *caches = _rows(rng, (5, 3, 32), (5, 1, 32), (5, 1, 16), (3, 4, 1, 32), (3, 4, 1, 16))
    cos, sin = rng.standard_normal((2, 7, 8)).astype(np.float32)
    rotary = {"q": q, "cos": cos, "sin": sin, "position_ids": np.arange(5, dtype=np.int32)}
    return (k, v, *caches, np.array([3, 0, -1, 11, 6])), rotary


def _pack(rng: Rng) -> Arguments:
    k, v = _rows(rng, (2, 64, 1, 32), (2, 64, 1, 32))
    caches = []
    for axis, size, shape in ((1, 64, (3, 1, 1, 32)), (3, 32, (3, 64, 1, 1))):
        factors = [np.ones(shape, np.float16) for _ in range(2)]
        storage = np.zeros((3, 64, 1, 16), np.uint8)
        caches.append(QuantizedArray(storage, int4, (3, 64, 1, 32), *factors, axis, size))
    return (k, v, *caches, np.array([1, 0, -1]), np.array([0, 2, 1])), {}


def _paged(rng: Rng) -> Arguments:
    q, k, v = _rows(rng, (2, 1, 4, 64), (9, 16, 2, 64), (9, 16, 2, 64))
    table = rng.permutation(9)[:8].reshape(2, 4).astype(np.int32)
    return (q, k, v, table, np.array([60, 33], np.int32)), {"return_lse": True}


def _cascade(rng: Rng) -> Arguments:
    q, k, v = _rows(rng, (4, 1, 4, 64), (9, 16, 2, 64), (9, 16, 2, 64))
    table = np.array([[8, 3, b] for b in range(4)], np.int32)
    return (q, k, v, table, np.array([40, 33, 48, 36], np.int32), 32), {"return_lse": True}


def _latents(rng: Rng) -> Arguments:
    q, cache = _rows(rng, (2, 2, 5, 576), (6, 64, 1, 576), dtype="float16")
    table = rng.permutation(6).reshape(2, 3).astype(np.int32)
    return (q, cache, table, np.array([190, 33], np.int32)), {"return_lse": True}


def _states(rng: Rng) -> Arguments:
    a, b = _rows(rng, (2, 3, 4, 64), (2, 3, 4, 64))
    lse = rng.standard_normal((2, 2, 4, 3)).astype(np.float32)
    lse[0, 0, 0] = -np.inf
    return (a, lse[0], b, lse[1]), {}


def _attention_backward(rng: Rng) -> Arguments:
    from cukit.reference.attention import flash_attention

    q, k, v = _attention(rng)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    options = {"causal": True, "deterministic": True}
    return (random(rng, q.shape, "bfloat16"), q, k, v, out, lse), options


def _teacher_and_student(rng: Rng) -> tuple[Any, ...]:
    """Queries and keys of both, with different head_dims and numbers of heads."""
    return tuple(_rows(rng, (1, 70, 2, 72), (1, 135, 1, 72), (1, 70, 4, 64), (1, 135, 2, 64)))


def _attention_kl(rng: Rng) -> Arguments:
    options = {"causal": True, "temperature": 2.0, "head_map": (0, 1, 1, 0), "return_lse": True}
    options["row_weights"] = rng.random((1, 70)).astype(np.float32)
    return _teacher_and_student(rng), options


def _attention_kl_backward(rng: Rng) -> Arguments:
    from cukit.reference.attention_kl import attention_kl

    arrays = _teacher_and_student(rng)
    _, *both = attention_kl(*arrays, causal=True, return_lse=True)
    return (*arrays, *both), {"causal": True, "deterministic": True}


def _indexer(rng: Rng) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from cukit.reference.attention import flash_attention

    q_t, k_t, q_s, k_s = _rows(rng, (1, 70, 4, 72), (1, 135, 2, 72), (1, 70, 3, 64), (1, 135, 64))
    _, lse = flash_attention(q_t, k_t, k_t, causal=True, return_lse=True)
    weights = rng.standard_normal((1, 70, 3)).astype(np.float32)
    options = {"causal": True, "scale_s": 0.1}
    options["topk_indices"] = rng.integers(-1, 135, (1, 70, 30)).astype(np.int32)
    options["row_weights"] = rng.random((1, 70)).astype(np.float32)
    return (q_t, k_t, lse.astype(np.float32), q_s, k_s, weights), options


def _indexer_kl(rng: Rng) -> Arguments:
    arrays, options = _indexer(rng)
    return arrays, {**options, "return_statistics": True}


def _indexer_kl_backward(rng: Rng) -> Arguments:
    from cukit.reference.indexer_kl import indexer_kl

    arrays, options = _indexer(rng)
    _, *statistics = indexer_kl(*arrays, **options, return_statistics=True)
    return (*arrays, *statistics), options


def _groups(rng: Rng) -> tuple[Any, ...]:
    """Rows of three groups, one of them empty, and a matrix per group."""
    x, weights = _rows(rng, (70, 72), (3, 48, 72))
    return x, weights, np.array([0, 66, 66, 70], np.int32)


def _grouped_backward(rng: Rng) -> Arguments:
    x, weights, offsets = _groups(rng)
    return (random(rng, (70, 48), "bfloat16"), x, weights, offsets), {}


def _grouped_fp8(rng: Rng) -> Arguments:
    x, weights, offsets = _groups(rng)
    scales = rng.uniform(0.5, 2, (70, 1)).astype(np.float32)
    codes = encode(x[:, :64].copy(), float8_e4m3, scales=scales, axis=1, group_size=128)
    scales = rng.uniform(0.5, 2, (3, 1, 1)).astype(np.float32)
    own = encode(weights[..., :64].copy(), float8_e4m3, scales=scales, axis=(1, 2), group_size=128)
    return (codes, own, offsets), {"out_dtype": np.float16}


def _routing(rng: Rng, tokens: int = 20) -> Any:
    from cukit.reference.moe import topk_router

    return topk_router(random(rng, (tokens, 9), "float32"), 2)


def _retrieval(rng: Rng) -> Arguments:
    """Small integers: their products are exact, and many are equal."""
    queries, memory = (
        rng.integers(-2, 3, shape).astype(np.float16) for shape in ((3, 16), (90, 16))
    )
    return (queries, memory, 7), {}


def _read_backward(rng: Rng) -> Arguments:
    from cukit.reference.graph_memory import memory_read

    grad, queries, memory = _rows(rng, (5, 64), (5, 64), (130, 64))
    return (grad, queries, memory, *memory_read(queries, memory, return_lse=True)), {}


def _writes(rng: Rng) -> tuple[Any, ...]:
    memory, values = _rows(rng, (9, 24), (17, 24))
    indices = rng.integers(-1, 10, 17).astype(np.int32)
    return memory, indices, values, rng.uniform(-0.1, 0.7, 17).astype(np.float32)


def _write_backward(rng: Rng) -> Arguments:
    from cukit.reference.graph_memory import memory_write

    memory, indices, values, gates = _writes(rng)
    out, totals = memory_write(memory, indices, values, gates, keep=True)
    (grad,) = _rows(rng, memory.shape)
    return (grad, memory, out, indices, values, gates, totals), {}


def _graph(rng: Rng) -> tuple[Any, ...]:
    """A gradient, a memory and a transition; the gradient's dtype is the memory's."""
    grad, memory = _rows(rng, (20, 16), (20, 16), dtype="float32")
    columns = rng.integers(0, 20, 60).astype(np.int32)
    offsets = np.arange(21, dtype=np.int32) * 3
    return grad, memory, Transition(offsets, columns, rng.random(60).astype(np.float32) / 3)


def _sampling(rng: Rng) -> Arguments:
    options = {
        "temperature": np.array([1, 0.5, 0, 2], np.float32),
        "top_k": np.array([0, 5, 1, 600], np.int32),
        "top_p": 0.8,
        "history": rng.integers(-1, 1000, (4, 9)).astype(np.int32),
        "prompt_lengths": np.array([0, 9, 4, 2], np.int32),
        "frequency_penalty": 0.5,
        "seed": np.arange(4),
        "logprobs": 2,
    }
    return (random(rng, (4, 1000), "bfloat16"),), options


def _drafts(rng: Rng) -> Arguments:
    probs = rng.random((2, 2, 300))
    probs /= probs.sum(axis=-1, keepdims=True)
    drafts = rng.integers(0, 300, (2, 2)).astype(np.int32)
    return (drafts, random(rng, (2, 3, 300), "float16")), {"draft_probs": probs.astype(np.float32)}


def _scan(rng: Rng) -> tuple[Any, ...]:
    x, b, c = _rows(rng, (2, 300, 2, 24), (2, 300, 1, 40), (2, 300, 1, 40))
    decay = -np.abs(random(rng, (2, 300, 2), "float32"))
    return x, b, c, decay, random(rng, (2, 2, 40, 24), "float32")


def _conv(rng: Rng) -> tuple[Any, ...]:
    """x, weight, bias, initial_state."""
    return tuple(_rows(rng, (2, 70, 40), (40, 4), (40,), (2, 3, 40)))


def _conv_backward(rng: Rng) -> Arguments:
    x, weight, bias, state = _conv(rng)
    return (random(rng, x.shape, "bfloat16"), x, weight, bias), {"initial_state": state}


def _conv_step(rng: Rng) -> Arguments:
    x, weight, bias, state = _conv(rng)
    return (state, x[:, 0].copy(), weight, bias), {}


def _scan_backward(rng: Rng) -> Arguments:
    x, b, c, decay, state = _scan(rng)
    grad = random(rng, x.shape, "bfloat16")
    states = {"initial_state": state, "grad_final_state": random(rng, state.shape, "float32")}
    return (grad, x, b, c, decay), states


def _router_backward(rng: Rng) -> Arguments:
    logits, routing = random(rng, (20, 9), "float32"), _routing(rng)
    grad = random(rng, (20, 2), "float32")
    losses = {"grad_balance_loss": 1.0, "grad_z_loss": 1.0}
    return (grad, logits, routing.experts, routing.rows, routing.expert_counts), losses


def _expert_rows(rng: Rng) -> tuple[Any, Any, Any]:
    """Rows of 20 tokens for two experts each, in expert order; the routing's rows and weights."""
    routing = _routing(rng)
    return random(rng, (40, 72), "bfloat16"), routing.rows, routing.weights


def _unpermute_backward(rng: Rng) -> Arguments:
    return (random(rng, (20, 72), "bfloat16"), *_expert_rows(rng)), {}


def _experts(rng: Rng) -> tuple[Any, Any, Any]:
    gate_up, down = _rows(rng, (9, 48, 72), (9, 72, 24))
    return _routing(rng), gate_up, down


def _ffn_backward(rng: Rng) -> Arguments:
    from cukit.reference.moe_ffn import moe_ffn

    x, grad = _rows(rng, (20, 72), (20, 72))
    experts = _experts(rng)
    _, activations = moe_ffn(x, *experts, keep=True)
    return (grad, activations, *experts), {}


def _bank(rng: Rng) -> tuple[Any, ...]:
    grad, x, layers = _rows(rng, (3, 5, 72), (3, 5, 72), (4, 72, 72))
    return grad, x, random(rng, (4, 72), "float32"), (layers * 72**-0.5).astype(x.dtype), 2


def _bank_backward(rng: Rng) -> Arguments:
    from cukit.reference.layer_bank import layer_bank

    grad, x, router, layers, top_k = _bank(rng)
    _, kept = layer_bank(x, router, layers, top_k, keep=True)
    return (grad, kept, router, layers), {}


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


def _ema_update(rng: Rng) -> Arguments:
    shapes = (300,), (17, 20)
    averages = _rows(rng, *shapes, dtype="float32")
    values, copies = (_rows(rng, *shapes) for _ in range(2))
    return (averages, values, 0.9, copies), {}


def _values(rng: Rng) -> Any:
    return random(rng, (5, 37), "float32", 3.0)


def _quantized_linear(rng: Rng) -> Arguments:
    x, weight, bias = _rows(rng, (20, 264), (136, 264), (136,))
    scales = rng.uniform(0.1, 0.3, (136, 3)).astype(np.float16)
    zero_points = rng.integers(-8, 8, (136, 3)).astype(np.int8)
    codes = QuantizedArray.encode(
        weight, int4, scales=scales, zero_points=zero_points, axis=1, group_size=128
    )
    return (x, codes, bias), {}


def _quantized(rng: Rng) -> Any:
    codes = random(rng, (6, 77), "float32", 3.0)
    factors = rng.uniform(0.5, 2, (6, 3)).astype(np.float32), np.ones((6, 3), np.int8)
    return QuantizedArray(encode(codes, int4).storage, int4, (6, 77), *factors, -1, 32)


def _slides(rng: Rng) -> Arguments:
    """Closes gaps of several sizes; the moves take several thread blocks."""
    memory = rng.integers(0, 256, 150_000).astype(np.uint8)
    moves = [(0, 16, 70_000), (70_000, 70_512, 30_000), (100_016, 110_000, 33_024)]
    return (memory, moves), {}


def _block_sparse_product(rng: Rng) -> Arguments:
    """A weight with an empty block row, and a partial tile of rows."""
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
    x, weight = _rows(rng, (40, 48), (48, 48))
    return (x, bsr_from_mask(weight, mask, 16)), {"transpose_b": True}


def _depth(rng: Rng) -> tuple[Any, Any, Any]:
    """Router logits, the residual stream, and the block's rows for five of 19 tokens."""
    logits = random(rng, (2, 19), "float32")
    return logits, *_rows(rng, (2, 19, 72), (2, 5, 72))


def _depth_routing(logits: np.ndarray[Any, Any]) -> Any:
    from cukit.reference.depth import depth_router

    return depth_router(logits, 5)


def _depth_gather(rng: Rng) -> Arguments:
    logits, x, _ = _depth(rng)
    return (x, _depth_routing(logits).indices), {}


def _depth_combine(rng: Rng) -> Arguments:
    logits, x, y = _depth(rng)
    routing = _depth_routing(logits)
    return (x, y, routing.weights, routing.slots), {}


def _depth_combine_backward(rng: Rng) -> Arguments:
    logits, grad_out, y = _depth(rng)
    routing = _depth_routing(logits)
    return (grad_out, y, routing.weights, routing.indices), {}


def _depth_router_backward(rng: Rng) -> Arguments:
    routing = _depth_routing(_depth(rng)[0])
    return (random(rng, (2, 5), "float32"), routing.weights, routing.slots), {}


def _adaptive_depth(rng: Rng) -> Arguments:
    x, weights = _rows(rng, (21, 24), (3, 24, 24))
    return (x, weights, rng.integers(0, 4, 21).astype(np.int32), "silu"), {}


def _adaptive_depth_backward(rng: Rng) -> Arguments:
    (x, weights, depth, activation), _ = _adaptive_depth(rng)
    _, states = adaptive_depth(x, weights, depth, activation, return_states=True)
    return (random(rng, x.shape, "bfloat16"), weights, states, activation), {}


def _blocks(rng: Rng) -> Arguments:
    mask = rng.random((2, 2, 3)) < 0.6
    return (*_attention(rng), mask), {"block_size": (48, 64), "return_lse": True}


SAMPLES: dict[str, Callable[[Rng], Arguments]] = {
    "adamw": _adamw,
    "adaptive_depth": _adaptive_depth,
    "adaptive_depth_backward": _adaptive_depth_backward,
    "attention_kl": _attention_kl,
    "attention_kl_backward": _attention_kl_backward,
    "indexer_kl": _indexer_kl,
    "indexer_kl_backward": _indexer_kl_backward,
    "batched_copy": _slides,
    "block_sparse_attention": _blocks,
    "bsr_matmul": _block_sparse_product,
    "cascade_attention": _cascade,
    "causal_conv": lambda rng: (_conv(rng)[:3], {"initial_state": _conv(rng)[3]}),
    "causal_conv_backward": _conv_backward,
    "causal_conv_step": _conv_step,
    "cross_entropy": lambda rng: (_logits(rng), {"return_grad": True}),
    "cross_entropy_backward": lambda rng: ((np.float32(0.5), *_logits(rng)), {}),
    "decode": lambda rng: ((encode(_values(rng), float8_e4m3),), {}),
    "depth_combine": _depth_combine,
    "depth_combine_backward": _depth_combine_backward,
    "depth_gather": _depth_gather,
    "depth_router": lambda rng: ((_depth(rng)[0], 5), {}),
    "depth_router_backward": _depth_router_backward,
    "dequantize": lambda rng: ((_quantized(rng),), {}),
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
    "retrieve_top_k": _retrieval,
    "memory_read": lambda rng: (tuple(_rows(rng, (5, 64), (130, 64))), {"return_lse": True}),
    "memory_read_backward": _read_backward,
    "memory_write": lambda rng: (_writes(rng), {"keep": True}),
    "memory_write_backward": _write_backward,
    "graph_diffusion": lambda rng: (_graph(rng)[1:], {"steps": 2}),
    "graph_diffusion_backward": lambda rng: (
        _graph(rng),
        {"steps": 2, "method": "heat", "values": True},
    ),
    "gated_scan": lambda rng: (_scan(rng)[:4], {"initial_state": _scan(rng)[4]}),
    "gated_scan_backward": _scan_backward,
    "gated_scan_step": lambda rng: ((_scan(rng)[4], *(a[:, 0].copy() for a in _scan(rng)[:4])), {}),
    "gelu": lambda rng: (tuple(_rows(rng, (7, 200))), {}),
    "gelu_and_mul": lambda rng: (tuple(_rows(rng, (7, 400))), {}),
    "gelu_and_mul_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 400))), {}),
    "gelu_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 200))), {}),
    "gemv": lambda rng: (tuple(_rows(rng, (3, 264), (264, 72))), {}),
    "ema_update": _ema_update,
    "global_norm": lambda rng: ((_rows(rng, (300,), (17, 20)),), {}),
    "distillation_loss": lambda rng: (
        _divergence(rng)[0],
        {**_divergence(rng)[1], "divergence": "jsd"},
    ),
    "kl_divergence": _divergence,
    "kl_divergence_backward": _divergence_backward,
    "layer_norm": lambda rng: (tuple(_rows(rng, (37, 264), (264,), (264,))), {}),
    "layer_norm_backward": _norm_backward,
    "linear_cross_entropy": lambda rng: (
        (*_linear(rng), rng.integers(0, 500, 40)),
        {"chunk_tokens": 16},
    ),
    "expert_order": lambda rng: ((rng.integers(-1, 10, (20, 2)).astype(np.int32), 9), {}),
    "grouped_gated_linear": lambda rng: (_groups(rng), {}),
    "grouped_gemm": lambda rng: (_groups(rng), {}),
    "grouped_gemm_backward": _grouped_backward,
    "grouped_gemm_fp8": _grouped_fp8,
    "moe_ffn": lambda rng: ((random(rng, (20, 72), "bfloat16"), *_experts(rng)), {}),
    "moe_ffn_backward": _ffn_backward,
    "layer_bank": lambda rng: (_bank(rng)[1:], {"keep": True}),
    "layer_bank_backward": _bank_backward,
    "moe_permute": lambda rng: (
        (random(rng, (20, 72), "bfloat16"), _routing(rng).rows),
        {"num_rows": 40},
    ),
    "moe_permute_backward": lambda rng: (_expert_rows(rng)[:2], {}),
    "moe_unpermute": lambda rng: (_expert_rows(rng), {}),
    "moe_unpermute_backward": _unpermute_backward,
    "topk_router": lambda rng: ((random(rng, (20, 9), "float32"), 2), {"losses": True}),
    "topk_router_backward": _router_backward,
    "linear_distillation_loss": lambda rng: (
        _linear_divergence(rng)[0],
        {**_linear_divergence(rng)[1], "divergence": "reverse_kl"},
    ),
    "linear_kl_divergence": _linear_divergence,
    "linear": lambda rng: ((*_rows(rng, (70, 72), (136, 72), (136,)), "gelu"), {}),
    "linear_backward": lambda rng: (
        (*_rows(rng, (70, 136), (70, 72), (136, 72), (70, 136)), "silu"),
        {"with_bias": True},
    ),
    "speculative_verify": _drafts,
    "topk_distillation_loss": lambda rng: (
        (_logits(rng)[0], *teacher_top_k(random(rng, (5, 1003), "float32"), 30)),
        {"tail": "bucket", "return_grad": True},
    ),
    "sampled_distillation_loss": lambda rng: (
        (_logits(rng)[0], rng.integers(0, 1003, (5, 12)).astype(np.int32)),
        {"return_grad": True, "logit_scale": 0.5, "vocab_size": 1003},
    ),
    "linear_topk_distillation_loss": lambda rng: (
        (*_linear(rng), *teacher_top_k(random(rng, (40, 500), "float32"), 9)),
        {"chunk_tokens": 16},
    ),
    "linear_rope": _linear_rope,
    "linear_sampled_distillation_loss": lambda rng: (
        (*_linear(rng), rng.integers(0, 500, (40, 7)).astype(np.int32)),
        {"workspace_bytes": 40000, "token_weights": np.ones(40, np.float32)},
    ),
    "matmul_fp8": lambda rng: (
        tuple(encode(x, float8_e4m3) for x in _rows(rng, (70, 272), (136, 272))),
        {"out_dtype": np.float32},
    ),
    "matmul_int8": lambda rng: (
        tuple(encode(8 * x, int8) for x in _rows(rng, (70, 272), (136, 272), dtype="float32")),
        {},
    ),
    "matmul_tma": lambda rng: (tuple(_rows(rng, (70, 72), (136, 72))), {}),
    "quantized_linear": _quantized_linear,
    "append_kv": _append,
    "pack_kv": _pack,
    "merge_attention_states": _states,
    "mla_attention": _latents,
    "paged_attention": _paged,
    "quantize": lambda rng: ((_values(rng), int8), {"group_size": 32}),
    "rms_norm": lambda rng: (tuple(_rows(rng, (37, 264), (264,))), {}),
    "rms_norm_backward": _norm_backward,
    "rope": _rope,
    "rope_backward": _rope,
    "sample": _sampling,
    "silu_and_mul": lambda rng: (tuple(_rows(rng, (7, 400))), {}),
    "silu_and_mul_backward": lambda rng: (tuple(_rows(rng, (7, 200), (7, 400))), {}),
    "tree_matmul": lambda rng: (tuple(_rows(rng, (7, 100), (100, 24))), {"leaf": 16}),
}


IN_PLACE = ("adamw", "ema_update", "pack_kv")
"""Ops that write their results to arguments."""


def run(
    op: Op, place: Place, *, reference: bool = False, wide: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Results of the op's sample, or of its reference (in float64 where `wide`), on the host."""
    args, options = SAMPLES[op.name](np.random.default_rng(5))
    if reference and op.name in ("quantize", "dequantize"):  # the CPU's results are bitwise equal
        return [array.astype(np.float64) for array in _flat(op.function(*args, **options))]
    if reference and op.name == "adaptive_depth_backward":  # recomputes the layers
        (x, weights, depth, activation), _ = _adaptive_depth(np.random.default_rng(5))
        args = (args[0], x, weights, depth, activation)
    if wide and not any(isinstance(value, QuantizedArray) for value in args):
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
    return [_host(array) for array in _flat(args if op.name in IN_PLACE else result)]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to every array in it."""
    if isinstance(value, np.ndarray):
        return function(value)
    if isinstance(value, QuantizedArray) and function is _widen:
        return value  # exact in float32
    if isinstance(value, BlockSparseMatrix):
        return value.with_values(function(value.values))
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if hasattr(value, "_make"):  # a NamedTuple
        return value._make(_map(each, function) for each in value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, NarrowDtype):
        given = [f.name for f in dataclasses.fields(value) if f.init]
        fields = {name: _map(getattr(value, name), function) for name in given}
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
