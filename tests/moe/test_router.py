"""topk_router and its backward: every option, ties, NaN, capacity, gradients."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.moe import expert_order, topk_router, topk_router_backward
from cukit.moe.router import plan_topk_router
from cukit.reference import moe as reference
from tests.contract import (
    DTYPES,
    another_order,
    assert_close,
    check_against_reference,
    check_gradient,
    dtype_of,
    random,
    to_device,
    to_host,
)
from tests.quick_run import possible


class Options(NamedTuple):
    scoring: str = "softmax"
    renormalize: bool = True
    biased: bool = False
    capacity: int | None = None
    losses: bool = True


OPTIONS = [
    Options(),
    Options(renormalize=False, losses=False),
    Options("sigmoid", biased=True, capacity=9),
    Options("sigmoid", renormalize=False),
    Options(biased=True, renormalize=False, capacity=3),
]


@dataclass(frozen=True)
class Size:
    num_tokens: int
    num_experts: int
    top_k: int


# One and several thread blocks, fewer experts than lanes, loads of a single logit, numbers of
# experts that leave some lanes with fewer logits, the largest top_k, no tokens.
SIZES = [
    Size(1, 8, 2),
    Size(3, 60, 4),
    Size(16, 64, 8),
    Size(64, 256, 8),
    Size(130, 128, 32),
    Size(90, 1000, 6),
    Size(3, 600, 4),
    Size(0, 8, 2),
]
LARGE = [Size(4096, 128, 8), Size(5000, 257, 9), Size(20_000, 64, 8)]


def spread(rng, num_tokens, num_experts, dtype):
    """Permuted, equally spaced logits: with at most 256 experts, rounding keeps their order."""
    levels = np.linspace(-4, 4, num_experts)
    rows = [rng.permutation(levels) for _ in range(num_tokens)]
    return np.array(rows).reshape(num_tokens, num_experts).astype(dtype_of(dtype))


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_matches_reference(device, rng, size, options, dtype):
    num_tokens, num_experts, top_k = astuple(size)
    logits = spread(rng, num_tokens, num_experts, dtype)
    bias = np.zeros(num_experts, np.float32) if options.biased else None
    settings = {
        "scoring": options.scoring,
        "renormalize": options.renormalize,
        "capacity": options.capacity,
        "losses": options.losses,
    }
    low = reference.topk_router(logits, top_k, bias=bias, **settings)
    wide = reference.topk_router(logits.astype(np.float64), top_k, bias=bias, **settings)
    placed, placed_bias = to_device(device, logits, bias)
    bits = None
    for repeat in range(2):
        with another_order(device, repeat):
            got = topk_router(placed, top_k, bias=placed_bias, **settings)
        present = [to_host(value) for value in got if value is not None]
        assert bits in (None, [value.tobytes() for value in present])
        bits = [value.tobytes() for value in present]
    assert got.weights.dtype == np.float32
    for name in ("expert_counts", "expert_offsets", "experts", "rows"):
        if name == "experts" and num_experts > 256 and dtype != "float32":
            continue  # adjacent levels may be equal after rounding; ties have their own test
        np.testing.assert_array_equal(
            np.sort(to_host(got.experts)) if name == "experts" else to_host(getattr(got, name)),
            np.sort(low.experts) if name == "experts" else getattr(low, name),
            err_msg=name,
        )
    assert_close("weights", got.weights, low.weights, wide.weights)
    if options.losses:
        assert_close("balance_loss", got.balance_loss, low.balance_loss, wide.balance_loss)
        assert_close("z_loss", got.z_loss, low.z_loss, wide.z_loss)
    else:
        assert got.balance_loss is None
        assert got.z_loss is None


def test_ties_go_to_the_lowest_expert(device):
    logits = np.array([[0, 1, 1, 0, 1], [0.0, -0.0, 0, -0.0, 0], [-np.inf] * 4 + [0]], np.float32)
    routing = topk_router(*to_device(device, logits), 3)
    np.testing.assert_array_equal(to_host(routing.experts), [[1, 2, 4], [0, 1, 2], [4, 0, 1]])
    np.testing.assert_allclose(to_host(routing.weights)[1:], [[1 / 3] * 3, [1, 0, 0]], rtol=1e-6)


def test_undefined_rows_have_valid_experts(device):
    """Weights are NaN in rows whose softmax is NaN; other rows are unaffected."""
    logits = np.zeros((5, 6), np.float32)
    logits[0, 2], logits[1, :5], logits[2], logits[3, 1] = np.nan, np.nan, -np.inf, np.inf
    routing = topk_router(*to_device(device, logits), 2)
    np.testing.assert_array_equal(
        to_host(routing.experts), [[0, 1], [5, 0], [0, 1], [1, 0], [0, 1]]
    )
    weights = to_host(routing.weights)
    assert np.isnan(weights[:4]).all()
    np.testing.assert_allclose(weights[4], 0.5)


def test_the_bias_affects_choices_but_not_weights(device):
    logits = np.zeros((1, 4), np.float32)
    bias = np.array([0, 0, 5, 1], np.float32)
    routing = topk_router(
        *to_device(device, logits), 2, scoring="sigmoid", bias=to_device(device, bias)[0]
    )
    np.testing.assert_array_equal(to_host(routing.experts), [[2, 3]])
    np.testing.assert_allclose(to_host(routing.weights), [[0.5, 0.5]])


def test_scores_of_zero_do_not_divide(device):
    logits = np.full((1, 4), -200, np.float32)
    weights = to_host(topk_router(*to_device(device, logits), 2, scoring="sigmoid").weights)
    assert not weights.any()


def test_an_even_load_has_a_balance_loss_of_one(device):
    logits = np.eye(8, dtype=np.float32) * 5
    routing = topk_router(*to_device(device, logits), 1, losses=True)
    np.testing.assert_allclose(to_host(routing.balance_loss), 1, rtol=1e-6)


def test_the_order_is_that_of_expert_order(device, rng):
    (logits,) = to_device(device, random(rng, (100, 16), "float32"))
    routing = topk_router(logits, 3, capacity=7)
    order = expert_order(routing.experts, 16, capacity=7)
    for name in order._fields:
        np.testing.assert_array_equal(
            to_host(getattr(routing, name)), to_host(getattr(order, name))
        )
    assert ((to_host(routing.rows) < 0) == (to_host(routing.weights) == 0)).all()


# Backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_backward_matches_reference(device, rng, size, options, dtype):
    num_tokens, num_experts, top_k = astuple(size)
    logits = random(rng, (num_tokens, num_experts), dtype)
    routing = reference.topk_router(
        logits, top_k, scoring=options.scoring, capacity=options.capacity
    )
    grad_weights = random(rng, (num_tokens, top_k), "float32")
    check_against_reference(
        topk_router_backward,
        reference.topk_router_backward,
        (grad_weights, logits, routing.experts, routing.rows, routing.expert_counts),
        device=device,
        names=("grad_logits",),
        scoring=options.scoring,
        renormalize=options.renormalize,
        grad_balance_loss=3.0 * options.losses,
        grad_z_loss=2.0 * options.losses,
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_by_finite_differences(rng, scoring, renormalize):
    """Gradients of the weights, some dropped, and of both losses at once."""
    logits = spread(rng, 6, 5, "float64")
    options = {"scoring": scoring, "renormalize": renormalize}
    routing = reference.topk_router(logits, 3, capacity=3, **options)
    assert (routing.rows < 0).any()

    def function(logits):
        now = reference.topk_router(logits, 3, capacity=3, losses=True, **options)
        assert (now.experts == routing.experts).all()
        return np.concatenate([now.weights.ravel(), [now.balance_loss, now.z_loss]])

    def backward(grad_out, logits):
        return reference.topk_router_backward(
            grad_out[:-2].reshape(6, 3),
            logits,
            routing.experts,
            routing.rows,
            routing.expert_counts,
            grad_balance_loss=grad_out[-2],
            grad_z_loss=grad_out[-1],
            **options,
        )

    check_gradient(function, backward, (logits,), rng)


# Errors and the plan ---------------------------------------------------------------------------


def test_errors_name_the_argument():
    logits = np.zeros((3, 8), np.float32)
    with pytest.raises(ArrayDtypeError, match="topk_router: logits must be float32"):
        topk_router(logits.astype(np.int32), 2)
    with pytest.raises(ArrayShapeError, match="logits must have 2 axes"):
        topk_router(logits[0], 2)
    with pytest.raises(ConfigError, match=r"top_k must be 1 to 8 \(num_experts\), got 9"):
        topk_router(logits, 9)
    with pytest.raises(ConfigError, match="must be one of 'softmax', 'sigmoid', got 'relu'"):
        topk_router(logits, 2, scoring="relu")
    with pytest.raises(ArrayShapeError, match=r"bias must have shape \(8,\)"):
        topk_router(logits, 2, bias=np.zeros(7, np.float32))
    routing = topk_router(logits, 2)
    with pytest.raises(ArrayShapeError, match=r"grad_weights must have shape \(3, 2\)"):
        topk_router_backward(logits, logits, routing.experts, routing.rows, routing.expert_counts)


def test_limits_of_the_kernel_are_named(device):
    if device == "cpu":
        pytest.skip("requirements of the kernels")
    with pytest.raises(ConfigError, match="num_experts must be at most 1024"):
        topk_router(*to_device(device, np.zeros((1, 1025), np.float32)), 2)
    with pytest.raises(ConfigError, match="top_k must be at most 32"):
        topk_router(*to_device(device, np.zeros((1, 64), np.float32)), 33)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "single_launch", "chunks"),
    [
        (1, 128, True, 1),
        (16, 256, True, 1),
        (65, 128, False, 9),
        (4096, 128, False, 128),
        (10**6, 128, False, 132),
    ],
)
def test_the_plan(num_tokens, num_experts, single_launch, chunks):
    config = plan_topk_router(num_tokens, num_experts, 132, "float32", 4)
    assert config.single_launch == single_launch
    assert config.order.num_chunks == chunks
    assert config.order.chunk * chunks >= num_tokens
    assert 4 * config.order.chunk < 2**16, "a sum of four counts has 16 bits"
    assert num_experts % config.vec == 0
