"""Functions of arrays in which fused ops replace sequences of operations."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.errors import ConfigError
from cukit.fusion import Optimized, optimize
from tests.contract import random, to_device, to_host

special = ModuleType("scipy.special")
special.erf = np.vectorize(math.erf, [np.float32])  # type: ignore[attr-defined]
special.expit = lambda x: 1 / (1 + np.exp(-x))  # type: ignore[attr-defined]
"""Replaces scipy.special, because the tests do not require SciPy."""


@pytest.fixture(autouse=True)
def special_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", special)


def rms_norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def softmax(scores):
    e = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def attention(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])) @ v


def causal(q, k, v):
    scores = (q * 0.25) @ k.transpose(0, 1, 3, 2)
    seen = np.tril(np.ones(scores.shape[-2:], bool))
    return softmax(np.where(seen, scores, -np.inf)) @ v


def masked(q, k, v, mask):
    scores = np.matmul(q, k.mT) * 0.25
    return softmax(np.where(mask, scores, np.finfo(np.float32).min)) @ v


def biased(q, k, v, bias):
    return softmax(q @ np.transpose(k, (0, 1, 3, 2)) * 0.25 + bias) @ v


def layer_norm(x, weight, bias):
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(np.var(x, axis=-1, keepdims=True) + 1e-5) * weight + bias


def layer_norm_by_hand(x, weight):
    centred = x - x.mean(axis=2, keepdims=True)
    return weight * (centred / np.sqrt((centred * centred).mean(axis=2, keepdims=True) + 1e-5))


def gelu(x):
    return 0.5 * x * (1 + special.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * np.power(x, 3))))


def dense(x, w, bias):
    return x @ w.T + bias


def dense_gelu(x, w, bias):
    return gelu_tanh(np.matmul(x, w.T) + bias)


def dense_silu(x, w):
    y = x @ w.T
    return y * special.expit(y)


def dense_relu(x, w):
    return np.maximum(x @ w.T, 0)


def product(x, w):
    return x @ w


def residual(x, w):
    return x + np.dot(x.reshape(-1, 16), w.T).reshape(x.shape)


def low_precision_norm(x, weight):
    wide = x.astype(np.float32)
    normed = wide * (1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6))
    return normed.astype(x.dtype) * weight


HEADS = (2, 3, 8, 16)
ROWS = (2, 5, 16)
FUNCTIONS: list[tuple[Callable[..., Any], str, tuple[tuple[int, ...], ...]]] = [
    (rms_norm, "rms_norm", (ROWS, (16,))),
    (low_precision_norm, "rms_norm", (ROWS, (16,))),
    (layer_norm, "layer_norm", (ROWS, (16,), (16,))),
    (layer_norm_by_hand, "layer_norm", (ROWS, (16,))),
    (attention, "flash_attention", (HEADS,) * 3),
    (attention, "flash_attention", (HEADS[1:],) * 3),
    (attention, "flash_attention", (HEADS[2:],) * 3),
    (causal, "flash_attention", (HEADS,) * 3),
    (masked, "flash_attention", (*(HEADS,) * 3, (8, 8))),
    (biased, "flash_attention", (*(HEADS,) * 3, (3, 8, 8))),
    (gelu, "gelu", (ROWS,)),
    (gelu_tanh, "gelu", (ROWS,)),
    (dense, "linear", (ROWS, (24, 16), (24,))),
    (dense_gelu, "linear", (ROWS, (24, 16), (24,))),
    (dense_silu, "linear", (ROWS, (24, 16))),
    (dense_relu, "linear", (ROWS, (24, 16))),
    (product, "linear", (ROWS, (16, 24))),
    (product, "linear", ((5, 16), (16, 24))),
    (residual, "linear", (ROWS, (16, 16))),
]


def arrays_for(function, shapes, rng, dtype="float32"):
    arrays = [random(rng, shape, dtype) for shape in shapes]
    if function is masked:
        arrays[-1] = np.eye(8, dtype=bool) | (rng.random((8, 8)) < 0.5)
    return arrays


@pytest.mark.parametrize(("function", "op", "shapes"), FUNCTIONS)
def test_a_function_that_computes_an_op_is_replaced_by_it(function, op, shapes, rng):
    arrays = arrays_for(function, shapes, rng)
    optimized = optimize(function, tuple(arrays), dry_run=False)
    assert [(row.op, row.outcome) for row in optimized.report] == [(op, "fused")]
    assert optimized.error < 1e-5
    others = arrays_for(function, shapes, rng)
    assert optimized._program is not None
    assert optimized._program.fits(tuple(others), {})
    np.testing.assert_allclose(optimized(*others), function(*others), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("function", [rms_norm, low_precision_norm, gelu_tanh])
def test_casts_are_ignored_and_dtypes_preserved(function, rng):
    shapes = next(shapes for each, _, shapes in FUNCTIONS if each is function)
    arrays = arrays_for(function, shapes, rng, "float16")
    optimized = optimize(function, tuple(arrays), dry_run=False)
    assert [row.outcome for row in optimized.report] == ["fused"]
    assert optimized(*arrays).dtype == function(*arrays).dtype == np.float16


def test_a_block_of_a_transformer(rng):
    """Several ops, operations between them, a dictionary of weights, a result of several parts."""

    def block(x, p):
        batch, positions, width = x.shape
        n = rms_norm(x, p["norm"])
        q, k, v = (
            (n @ p[name]).reshape(batch, positions, 2, width // 2).transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        mixed = causal(q, k, v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + mixed
        return {"x": x + dense_gelu(x, p["up"], p["bias"]) @ p["down"], "mixed": (mixed, 7)}

    weights = {name: random(rng, (16, 16), "float32") / 4 for name in "qkv"}
    weights |= {"norm": random(rng, (16,), "float32"), "bias": random(rng, (64,), "float32")}
    weights |= {"up": random(rng, (64, 16), "float32"), "down": random(rng, (64, 16), "float32")}
    x = random(rng, (2, 8, 16), "float32")
    optimized = optimize(block, {"x": x, "p": weights}, dry_run=False)
    ops = [row.op for row in optimized.report]
    assert sorted(ops) == ["flash_attention", *["linear"] * 5, "rms_norm"]
    assert [row.operations for row in optimized.report if row.op == "linear"][-2:] == [10, 1]
    x = random(rng, (2, 8, 16), "float32")
    mine, theirs = optimized(x=x, p=weights), block(x, weights)
    np.testing.assert_allclose(mine["x"], theirs["x"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mine["mixed"][0], theirs["mixed"][0], rtol=1e-4, atol=1e-4)
    assert mine["mixed"][1] == 7


def test_a_triangular_mask_is_causal(rng):
    arrays = arrays_for(causal, (HEADS,) * 3, rng)
    optimized = optimize(causal, tuple(arrays), dry_run=False)
    assert optimized._program is not None
    (fusion,) = [fusion for _, fusion in optimized._program._steps if fusion is not None]
    assert fusion.arguments["causal"] is True
    assert fusion.arguments["mask"] is None


def not_over_the_last_axis(x, weight):
    return x / np.sqrt((x * x).mean(0, keepdims=True) + 1e-6) * weight


def with_weights_returned(q, k, v):
    weights = softmax(q @ np.swapaxes(k, -1, -2))
    return weights @ v, weights


def hardly_masked(q, k, v, mask):
    return softmax(np.where(mask, q @ k.swapaxes(-1, -2), -1.0)) @ v


def of_another(x, weight):
    return x / np.sqrt((weight * weight).mean(-1, keepdims=True) + 1e-6) * weight


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (not_over_the_last_axis, ((5, 16), (16,))),
        (with_weights_returned, (HEADS,) * 3),
        (hardly_masked, (*(HEADS,) * 3, (8, 8))),
        (of_another, ((16,), (16,))),
    ],
)
def test_similar_operations_are_not_replaced(function, shapes, rng):
    arrays = [random(rng, shape, "float32") for shape in shapes]
    if function is hardly_masked:
        arrays[-1] = arrays[-1] > 0
    optimized = optimize(function, tuple(arrays), dry_run=False)
    assert optimized.report == []


def test_the_report_has_the_error_of_an_op_that_rejects_its_arguments(rng):
    optimized = optimize(
        lambda x, w, b: x @ w[:, ::2] + b,
        tuple(random(rng, shape, "float32") for shape in ((4, 8), (8, 12), (6,))),
        dry_run=False,
    )
    (row,) = optimized.report
    assert row.outcome.startswith("kept: linear: w must be C-contiguous or the transpose")
    assert math.isnan(row.error)


def reads(x):
    return x / float(x.max())


def branches(x):
    return x if x.sum() > 0 else -x


def assigns(x):
    y = x + 1
    y[0] = 0
    return y


def adds_in_place(x):
    y = x + 1
    y += 1
    return y


def writes_out(x):
    y = np.empty_like(x)
    np.exp(x + 0, out=y)
    return y


def converts(x):
    return np.asarray(x).sum()


def sorts(x):
    y = x + 1
    y.sort()
    return y


def adds_at(x):
    y = x + 1
    np.add.at(y, (0, 0), 1)
    return y


def copies_to(x):
    y = x + 1
    np.copyto(y, -x)
    return y


def writes_positional_out(x):
    y = x + 1
    np.cumsum(x, 1, None, y)
    return y


def writes_out_of_a_method(x):
    y = x + 1
    x.cumsum(1, None, y)
    return y


def steps(x):
    state = (x + 1).reshape(2, 2, 8)
    ck.causal_conv_step(state, x[:2], np.ones((8, 3), np.float32))
    return state + 0


@pytest.mark.parametrize(
    "function",
    [
        reads, branches, assigns, adds_in_place, converts, writes_out, sorts, adds_at, copies_to,
        writes_positional_out, writes_out_of_a_method, steps,
    ],
)  # fmt: skip
def test_functions_that_cannot_be_traced_are_unchanged(function, rng):
    x = random(rng, (4, 8), "float32")
    optimized = optimize(function, x, dry_run=False)
    assert optimized.report == []
    assert "nothing was replaced: " in optimized.note
    np.testing.assert_array_equal(optimized(x), function(x))


def draws(x):
    return x + np.random.default_rng().standard_normal(x.shape)


def test_values_that_change_between_calls_are_not_constants(rng):
    x = random(rng, (4, 8), "float32")
    optimized = optimize(draws, x, dry_run=False)
    assert "change from call to call" in optimized.note
    assert (optimized(x) != optimized(x)).any()


def test_exceptions_of_the_function_propagate():
    with pytest.raises(ZeroDivisionError):
        optimize(lambda x: x + 1 / 0, np.ones(3))


def test_other_inputs_run_the_original(rng):
    calls = []

    def norm(x, weight, eps=1e-6):
        calls.append(x.shape)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    x, weight = random(rng, (4, 16), "float32"), random(rng, (16,), "float32")
    optimized = optimize(norm, {"x": x, "weight": weight}, dry_run=False)
    calls.clear()
    optimized(x=x + 1, weight=weight)
    assert calls == []
    for args, kwargs in (
        ((x, weight), {}),
        ((), {"x": x[:2], "weight": weight}),
        ((), {"x": x.astype(np.float64), "weight": weight}),
        ((), {"x": x, "weight": weight, "eps": 0.1}),
        ((), {"x": np.asfortranarray(x), "weight": weight}),
    ):
        calls.clear()
        np.testing.assert_array_equal(optimized(*args, **kwargs), norm(*args, **kwargs))
        assert len(calls) == 2


def test_restore_returns_the_original_function(rng):
    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    with optimize(rms_norm, tuple(arrays), dry_run=False) as optimized:
        assert optimized._program is not None
    assert optimized._program is None
    assert optimized.restore() is rms_norm
    np.testing.assert_array_equal(optimized(*arrays), rms_norm(*arrays))


def test_without_a_gpu_there_is_only_a_report(rng):
    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    optimized = optimize(rms_norm, tuple(arrays))
    assert [row.outcome for row in optimized.report] == ["would fuse"]
    assert "references" in optimized.note
    assert optimized._program is None
    text = str(optimized)
    assert "rms_norm" in text
    assert "whole function" in text


def test_one_argument_disables_it(rng):
    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    optimized = optimize(rms_norm, tuple(arrays), use_cuda_kernels=False)
    assert optimized.report == []
    np.testing.assert_array_equal(optimized(*arrays), rms_norm(*arrays))


def test_a_result_that_changes_too_much_is_not_kept(rng):
    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    optimized = optimize(rms_norm, tuple(arrays), tolerance=0.0, dry_run=False)
    assert all(row.outcome.startswith("kept: error") for row in optimized.report) or (
        optimized.error == 0
    )


def test_array_api_namespaces_are_traced(rng):
    def norm(x, weight):
        xp = x.__array_namespace__()
        return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight

    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    optimized = optimize(norm, tuple(arrays), dry_run=False)
    assert [row.op for row in optimized.report] == ["rms_norm"]


def test_ops_of_cukit_are_traced(rng):
    def function(x, weight):
        return gelu(ck.rms_norm(x, weight))

    arrays = arrays_for(rms_norm, (ROWS, (16,)), rng)
    optimized = optimize(function, tuple(arrays), dry_run=False)
    assert [row.op for row in optimized.report] == ["gelu"]
    np.testing.assert_allclose(optimized(*arrays), function(*arrays), atol=1e-5)


def test_the_result_of_a_forward_is_an_input_of_its_backward(rng):
    """Its parameter `out` has no default."""
    memory, queries = random(rng, (8, 16), "float32"), random(rng, (4, 16), "float32")
    out, lse = ck.memory_read(queries, memory, return_lse=True)
    optimized = optimize(
        lambda grad: ck.memory_read_backward(grad, queries, memory, out, lse)[0], out
    )
    assert "nothing was replaced" not in optimized.note


def test_functions_of_cupy_are_traced(rng):
    """On the stand-in for CuPy, whose functions are replaced during the trace."""
    with ck.emulate_cupy():
        import cupy

        before = cupy.exp

        def norm(x, weight):
            return x / cupy.sqrt(cupy.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight

        x, weight = (cupy.asarray(random(rng, s, "float32")) for s in ((4, 16), (16,)))
        optimized = optimize(norm, (x, weight))
        assert [row.op for row in optimized.report] == ["rms_norm"]
        optimized = optimize(lambda x: cupy.add.reduce(x) + 1, x)
        assert "nothing was replaced" not in optimized.note
        assert cupy.exp is before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tolerance": -1}, "tolerance"),
        ({"repeats": 0}, "repeats"),
        ({"cuda_graph": True}, "cuda_graph"),
        ({"cuda_graph": 1}, "cuda_graph"),
        ({"dry_run": "no"}, "dry_run"),
        ({"only_faster": 1}, "only_faster"),
        ({"use_cuda_kernels": None}, "use_cuda_kernels"),
    ],
)
def test_errors_name_the_argument(options, words):
    with pytest.raises(ConfigError, match=words):
        optimize(rms_norm, (np.ones((2, 4), np.float32), np.ones(4, np.float32)), **options)
    with pytest.raises(ConfigError, match="function"):
        optimize(SimpleNamespace(), np.ones(3))


def block_of_cupy(cupy, x, weight, w, bias, down):
    normed = x / cupy.sqrt(cupy.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight
    y = normed @ w.T + bias
    y = y * 0.5 * (1 + cupy.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return x + cupy.sin(y @ down)


BLOCK = ((512, 256), (256,), (320, 256), (320,), (320, 256))


def arrays_of_block(rng, dtype):
    return to_device("gpu", *(random(rng, shape, dtype) / 4 for shape in BLOCK))


def check_block(optimized, arrays):
    mine = to_host(optimized(*arrays)).astype(np.float64)
    theirs = to_host(optimized.function(*arrays)).astype(np.float64)
    assert np.abs(mine - theirs).max() < 6e-2  # sin of float16 values of up to about 14


@pytest.mark.gpu
@pytest.mark.timing
def test_on_the_gpu_a_block_is_fused_captured_and_timed(rng):
    """Later calls pass other arrays, an array changed in place, and the arrays of the capture."""
    import cupy

    arrays = list(arrays_of_block(rng, "float16"))
    block = functools.partial(block_of_cupy, cupy)
    optimized = optimize(block, tuple(arrays), only_faster=False, cuda_graph=True)
    assert isinstance(optimized, Optimized)
    assert [row.op for row in optimized.report] == ["rms_norm", "linear", "linear"]
    assert [row.outcome for row in optimized.report] == ["fused"] * 3
    assert all(row.before_us is not None for row in optimized.report)
    assert optimized._graph is not None, optimized.note
    assert optimized.after_us < optimized.before_us
    check_block(optimized, arrays)
    others = arrays_of_block(rng, "float16")
    check_block(optimized, [others[0], *arrays[1:]])
    arrays[2] *= 0.5
    check_block(optimized, [others[0], *arrays[1:]])
    check_block(optimized, arrays)
    for _ in range(2):
        check_block(optimized, others)


@pytest.mark.gpu
def test_on_the_gpu_remaining_cublas_products_are_named(rng):
    import cupy

    arrays = arrays_of_block(rng, "float32")
    optimized = optimize(functools.partial(block_of_cupy, cupy), tuple(arrays))
    outcomes = [row.outcome for row in optimized.report]
    assert len(outcomes) == 3
    assert all("must be float16, bfloat16, got float32" in each for each in outcomes[1:])
    assert "no CUDA graph: matmul of [512, 256] float32 and [256, 320] float32" in optimized.note
    assert "cukit's linear replaces products of contiguous float16" in optimized.note
    check_block(optimized, arrays)


@pytest.mark.gpu
def test_on_the_gpu_the_operation_that_cannot_be_captured_is_named(rng):
    (x,) = to_device("gpu", random(rng, (64, 64), "float32"))
    optimized = optimize(lambda x: x / float(x.max()), x)
    assert "no CUDA graph" in optimized.note
    np.testing.assert_allclose(to_host(optimized(x)), to_host(x / float(x.max())))


@pytest.mark.gpu
@pytest.mark.parametrize("function", [assigns, adds_in_place])
def test_on_the_gpu_functions_that_write_in_place_are_not_captured(function, rng):
    """CUDA graphs are captured only of functions that write to no array in place."""
    (x,) = to_device("gpu", random(rng, (4, 8), "float32"))
    optimized = optimize(function, x)
    assert optimized._graph is None
