"""adamw compared with the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import AdamWState, adamw
from cukit.distill.optimizer._tensor_table import CHUNK
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from tests.contract import DTYPES, dtype_of, random, to_device, to_host

# A scalar, odd sizes, exactly one block's chunk, one more, several chunks, no elements.
SHAPES = [(), (1,), (3, 5), (CHUNK,), (CHUNK + 1,), (7, 9001), (0, 4)]
OPTIONS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}


def textbook(weight, grads, *, lr, beta1, beta2, eps, weight_decay):
    """Every step as written in the paper, in float64."""
    weight, m, v = weight.astype(np.float64), 0.0, 0.0
    for step, grad in enumerate(grads, 1):
        g = grad.astype(np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        weight = weight - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * weight)
    return weight, m, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", ["same", "float32"])
def test_three_steps_match_the_paper(device, rng, dtype, grad_dtype):
    grad_dtype = dtype if grad_dtype == "same" else grad_dtype
    start = [np.asarray(random(rng, shape, dtype)) for shape in SHAPES]
    grads = [[np.asarray(random(rng, shape, grad_dtype)) for shape in SHAPES] for _ in range(3)]
    params = list(to_device(device, *(p.copy() for p in start)))
    state = AdamWState.for_params(params)
    for step, each in enumerate(grads, 1):
        adamw(params, to_device(device, *each), state, step=step, **OPTIONS)
    for index, (param, first) in enumerate(zip(params, start, strict=True)):
        weight, m, v = textbook(first, [each[index] for each in grads], **OPTIONS)
        np.testing.assert_allclose(to_host(state.master[index]), weight, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(to_host(state.exp_avg[index]), m, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(to_host(state.exp_avg_sq[index]), v, rtol=2e-5, atol=1e-6)
        rounded = to_host(state.master[index]).astype(dtype_of(dtype))
        assert to_host(param).tobytes() == rounded.tobytes()
        assert param.dtype == dtype_of(dtype)


def test_a_float32_parameter_is_its_own_master(device, rng):
    params = list(to_device(device, random(rng, (5,), "float32"), random(rng, (5,), "float16")))
    state = AdamWState.for_params(params)
    assert state.master[0] is params[0]
    assert state.master[1].dtype == np.float32


def test_mixed_dtypes_in_one_call(device, rng):
    dtypes = ("float32", "bfloat16", "bfloat16", "float16")
    start = [random(rng, (300,), dtype) for dtype in dtypes]
    grads = [random(rng, (300,), dtype) for dtype in ("float32", "bfloat16", "float32", "float16")]
    params = list(to_device(device, *(p.copy() for p in start)))
    state = AdamWState.for_params(params)
    adamw(params, to_device(device, *grads), state, step=1, **OPTIONS)
    for index, grad in enumerate(grads):
        weight, _, _ = textbook(start[index], [grad], **OPTIONS)
        np.testing.assert_allclose(to_host(state.master[index]), weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_grad_scale_scales_the_gradient(device, rng, on_device):
    start, grad = random(rng, (1000,), "float32"), random(rng, (1000,), "float32")
    param, placed_grad, scalar = to_device(
        device, start.copy(), grad.copy(), np.array(0.25, np.float32)
    )
    state = AdamWState.for_params([param])
    scale = scalar if on_device else 0.25
    adamw([param], [placed_grad], state, step=1, grad_scale=scale, **OPTIONS)
    weight, m, _ = textbook(start, [0.25 * grad], **OPTIONS)
    np.testing.assert_allclose(to_host(param), weight, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(to_host(state.exp_avg[0]), m, rtol=1e-5)
    assert to_host(placed_grad).tobytes() == grad.tobytes()


def test_new_gradient_arrays_in_the_same_list_are_used(device, rng):
    """The table of addresses is cached for the arrays, not for the list."""
    (param,) = to_device(device, np.zeros(64, np.float32))
    state = AdamWState.for_params([param])
    history = [random(rng, (64,), "float32") for _ in range(4)]
    kept = []
    for step, grad in enumerate(history, 1):
        kept.append(to_device(device, grad)[0])
        adamw([param], [kept[-1]], state, step=step, **OPTIONS)
    weight, _, _ = textbook(np.zeros(64), history, **OPTIONS)
    np.testing.assert_allclose(to_host(param), weight, rtol=2e-5, atol=2e-6)


def test_views_that_are_not_aligned(device, rng):
    start, grad = random(rng, (1003,), "bfloat16"), random(rng, (1003,), "bfloat16")
    whole, whole_grad = to_device(device, start.copy(), grad)
    params = [whole[1:]]
    adamw(params, [whole_grad[1:]], AdamWState.for_params(params), step=1, **OPTIONS)
    weight, _, _ = textbook(start[1:], [grad[1:]], **OPTIONS)
    got = to_host(whole)
    assert got[0] == start[0]
    np.testing.assert_allclose(got[1:].astype(np.float64), weight, rtol=8e-3, atol=1e-3)


def test_repeated_runs_are_bitwise_equal(device, rng):
    start, grad = random(rng, (CHUNK + 77,), "bfloat16"), random(rng, (CHUNK + 77,), "bfloat16")
    results = []
    for _ in range(2):
        params = [to_device(device, start.copy())[0]]
        state = AdamWState.for_params(params)
        adamw(params, to_device(device, grad), state, step=1, **OPTIONS)
        results.append(to_host(state.master[0]).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 0}, ConfigError, "step must be an integer of 1 or more"),
        ({"lr": -1.0}, ConfigError, "lr must be a finite number"),
        ({"beta2": 1.0}, ConfigError, "beta2 must be"),
        ({"grad_scale": np.ones(2, np.float32)}, ArrayShapeError, "grad_scale must have"),
        ({"grads": [np.ones(3, np.float32)]}, ArrayShapeError, r"grads\[0\] must have shape"),
        ({"grads": [np.ones(2, np.int32)]}, ArrayDtypeError, r"grads\[0\] must be float32"),
        ({"grads": []}, ArrayShapeError, "params, grads and state must have the same length"),
    ],
)
def test_errors_name_the_argument(options, error, message):
    params = [np.ones(2, np.float32)]
    good = {"grads": [np.ones(2, np.float32)], "lr": 0.1, "step": 1}
    with pytest.raises(error, match=f"adamw: {message}"):
        adamw(params, state=AdamWState.for_params(params), **{**good, **options})
    assert (params[0] == 1).all()
