"""linear_distillation_loss: the fused head equals the unfused one, for every option."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.arrays import float16
from cukit.distill import (
    cross_entropy,
    distillation_loss,
    linear_distillation_loss,
)
from cukit.distill.losses._linear_loss import exact_scale, plan_linear_loss
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.gemm import matmul
from cukit.reference import losses as reference
from tests.contract import (
    DTYPES,
    assert_close,
    dtype_of,
    poison_pool,
    random,
    to_device,
    to_host,
)

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCAB = 70, 24, 40, 1003
IGNORE = -100
FIELDS = ("loss", "soft_loss", "hard_loss", "grad_hidden", "grad_weight")
"""Compared results of a head without bias."""

OPTIONS = [
    {},
    {"temperature": 2.0},
    {"temperature": 2.0, "scale_by_temperature_squared": True},
    {"temperature": 3.0, "soft_weight": 0.7, "hard_weight": 0.3},
    {"soft_weight": 0.0, "hard_weight": 1.0},
    {"normalizer": 100.0, "soft_weight": 2.5},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd", "beta": 0.3, "temperature": 2.0, "hard_weight": 0.3},
]


def head(rng, dtype, tokens=TOKENS, vocab=VOCAB):
    """hidden, weight, teacher_hidden, teacher_weight, targets with some ignored."""
    targets = rng.integers(0, vocab, tokens)
    targets[::9] = IGNORE
    return (
        random(rng, (tokens, HIDDEN), dtype),
        random(rng, (vocab, HIDDEN), dtype, scale=0.3),
        random(rng, (tokens, TEACHER_HIDDEN), dtype),
        random(rng, (vocab, TEACHER_HIDDEN), dtype, scale=0.3),
        targets,
    )


def widen(arrays):
    return [a if a.dtype.kind == "i" else a.astype(np.float64) for a in arrays]


def unfused(arrays, device, options):
    """FIELDS by matmul, distillation_loss and cross_entropy, with all logits in memory."""
    hidden, weight, teacher_hidden, teacher_weight, targets = to_device(device, *arrays)
    options = dict(options)
    soft_weight, hard_weight = options.pop("soft_weight", 1.0), options.pop("hard_weight", 0.0)
    logits = matmul(hidden, weight, transpose_b=True)
    teacher_logits = matmul(teacher_hidden, teacher_weight, transpose_b=True)
    soft, soft_grad = distillation_loss(
        logits, teacher_logits, targets=targets, return_grad=True, **options
    )
    hard, hard_grad = cross_entropy(
        logits, targets, normalizer=options.get("normalizer"), return_grad=True
    )
    grad = soft_grad.astype(np.float32) * np.float32(soft_weight)
    grad += hard_grad.astype(np.float32) * np.float32(hard_weight)
    grad = grad.astype(hidden.dtype)
    return (
        soft * np.float32(soft_weight) + hard * np.float32(hard_weight),
        soft,
        hard if hard_weight else 0 * hard,
        matmul(grad, weight),
        matmul(grad, hidden, transpose_a=True),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [None, 32])
def test_matches_reference_and_the_unfused_ops(device, rng, dtype, options, chunk_tokens):
    arrays = head(rng, dtype)
    *wide, wide_targets = widen(arrays)
    exact = reference.linear_distillation_loss(*wide, targets=wide_targets, **options)
    plain = unfused(arrays, "cpu", options)
    *placed, targets = to_device(device, *arrays)
    poison_pool(device)
    got = linear_distillation_loss(*placed, targets=targets, chunk_tokens=chunk_tokens, **options)
    again = linear_distillation_loss(*placed, targets=targets, chunk_tokens=chunk_tokens, **options)
    for name, value, repeat, low, expected in zip(FIELDS, got, again, plain, exact, strict=False):
        assert to_host(value).tobytes() == to_host(repeat).tobytes(), name
        # Gradients are small, so the absolute part of the tolerance is small too.
        scale = float(np.abs(expected).max())
        assert_close(name, value, low, expected, atol=4 * float(np.finfo(np.float32).eps) + (
            {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype] * scale
        ))  # fmt: skip
    assert got.grad_hidden.dtype == got.grad_weight.dtype == dtype_of(dtype)
    assert got.loss.dtype == np.float32


@pytest.mark.parametrize("options", [*OPTIONS[:4], OPTIONS[-1]], ids=str)
def test_gradients_by_finite_differences(rng, options):
    hidden, weight, *teacher, targets = widen(head(rng, "float32", tokens=5, vocab=11))

    def loss(h, w):
        return reference.linear_distillation_loss(h, w, *teacher, targets=targets, **options).loss

    result = reference.linear_distillation_loss(
        hidden, weight, *teacher, targets=targets, **options
    )
    step = 1e-6
    for _ in range(4):
        along_hidden, along_weight = (
            rng.standard_normal((5, HIDDEN)),
            rng.standard_normal((11, HIDDEN)),
        )
        difference = loss(hidden + step * along_hidden, weight + step * along_weight) - loss(
            hidden - step * along_hidden, weight - step * along_weight
        )
        expected = (result.grad_hidden * along_hidden).sum()
        expected += (result.grad_weight * along_weight).sum()
        np.testing.assert_allclose(difference / (2 * step), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 70, 1000])
def test_chunks_change_only_rounding(device, rng, chunk_tokens):
    *placed, targets = to_device(device, *head(rng, "float32"))
    options = {"targets": targets, "temperature": 2.0, "hard_weight": 0.5}
    whole = linear_distillation_loss(*placed, **options)
    parts = linear_distillation_loss(*placed, chunk_tokens=chunk_tokens, **options)
    for name, a, b in zip(FIELDS, whole, parts, strict=False):
        np.testing.assert_allclose(to_host(a), to_host(b), rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float32"])
def test_accumulates_into_grad_weight(device, rng, grad_dtype):
    arrays = head(rng, "bfloat16")
    *placed, targets = to_device(device, *arrays)
    start = random(rng, (VOCAB, HIDDEN), grad_dtype, scale=1e-2)
    (grad_weight,) = to_device(device, start.copy())
    fresh = linear_distillation_loss(*placed, targets=targets, chunk_tokens=32)
    added = linear_distillation_loss(
        *placed, targets=targets, chunk_tokens=32, grad_weight=grad_weight
    )
    assert added.grad_weight is grad_weight
    expected = start.astype(np.float64) + to_host(fresh.grad_weight).astype(np.float64)
    np.testing.assert_allclose(to_host(grad_weight).astype(np.float64), expected, atol=2e-4)


def test_leading_axes_and_missing_targets(device, rng):
    hidden, weight, teacher_hidden, teacher_weight, _ = to_device(device, *head(rng, "float32"))
    flat = linear_distillation_loss(hidden, weight, teacher_hidden, teacher_weight)
    folded = linear_distillation_loss(
        hidden.reshape(2, 35, -1), weight, teacher_hidden.reshape(2, 35, -1), teacher_weight
    )
    assert folded.grad_hidden.shape == (2, 35, HIDDEN)
    for a, b in zip(flat[:-1], folded[:-1], strict=True):
        assert to_host(a).tobytes() == to_host(b).tobytes()


def test_ignored_tokens_get_no_gradient(device, rng):
    *placed, targets = to_device(device, *head(rng, "float32"))
    result = linear_distillation_loss(*placed, targets=targets, hard_weight=0.5)
    grad = to_host(result.grad_hidden)
    assert (grad[::9] == 0).all()
    assert (np.abs(np.delete(grad, np.s_[::9], axis=0)).max(axis=1) > 0).all()


def test_no_tokens(device):
    placed = to_device(device, *(np.zeros(s, np.float32) for s in ((0, 8), (5, 8), (0, 8), (5, 8))))
    result = linear_distillation_loss(*placed)
    assert float(result.loss) == 0
    assert result.grad_hidden.shape == (0, 8)
    assert not to_host(result.grad_weight).any()


@pytest.mark.gpu
def test_float16_gradients_survive_many_tokens(rng):
    """The matrix products divide by the normalizer, because 1 / 65536 of a probability would
    underflow in a float16 gradient of the logits. The weight's gradient is accumulated in float32,
    so that its own rounding does not hide an underflow."""
    arrays = head(rng, "float16")
    *placed, targets = to_device("gpu", *arrays)
    sums = to_device("gpu", np.zeros(arrays[1].shape, np.float32))[0]
    got = linear_distillation_loss(*placed, targets=targets, normalizer=65536.0, grad_weight=sums)
    *wide, _ = widen(arrays)
    expected = reference.linear_distillation_loss(*wide, targets=arrays[-1], normalizer=65536.0)
    error = to_host(got.grad_weight).astype(np.float64) - expected.grad_weight
    assert np.linalg.norm(error) < 2e-2 * np.linalg.norm(expected.grad_weight)


def test_the_boost_is_a_power_of_two_near_the_divisor():
    assert exact_scale(float16, 4096.0, 9, divisor_on_gpu=False) == 4096
    assert exact_scale(float16, 5000.0, 9, divisor_on_gpu=False) == 4096
    assert exact_scale(float16, 1.0, 70, divisor_on_gpu=True) == 64
    assert exact_scale(float16, 0.25, 9, divisor_on_gpu=False) == 1


@pytest.mark.parametrize("tokens", [0, 1, 100, 2048, 2049, 4096, 100_000])
@pytest.mark.parametrize("hidden_size", [64, 768, 2304, 8192])
@pytest.mark.parametrize("vocab_size", [32000, 256000])
def test_plan_covers_every_token_once(tokens, hidden_size, vocab_size):
    config = plan_linear_loss(tokens, hidden_size, 2 * vocab_size)
    covered = [t for chunk in config.chunks() for t in range(chunk.start, chunk.stop)]
    assert covered == list(range(tokens))
    assert config.chunk_tokens <= max(2048, (512 << 20) // (2 * vocab_size))


@pytest.mark.parametrize(
    ("hidden_size", "vocab_size", "chunk_tokens"),
    [
        (256, 32000, 8320),  # limited by the memory for logits
        (384, 32000, 8192),
        (768, 32000, 4096),  # grad_hidden fills the GPU
        (1024, 151936, 1664),
        (2048, 32768, 2048),
        (768, 256000, 1024),
        (2304, 256000, 2048),
        (4096, 32000, 2048),
    ],
)
def test_chunks_of_small_models_are_larger(hidden_size, vocab_size, chunk_tokens):
    config = plan_linear_loss(3 << 20, hidden_size, 2 * vocab_size)
    assert config.chunk_tokens == chunk_tokens


def test_plan_of_the_large_vocabulary_leaves_room():
    """BT 4096, H 2304, V 256000 in bfloat16: one chunk of student and teacher logits, and the
    gradients, take less than 3.2 GiB."""
    config = plan_linear_loss(4096, 2304, 2 * 256000)
    logits = 2 * config.chunk_tokens * 256000 * 2
    assert logits + 256000 * 2304 * 2 + 4096 * 2304 * 2 < 3.2 * 2**30


GOOD = {
    "hidden": np.ones((3, 4), np.float32),
    "weight": np.ones((5, 4), np.float32),
    "teacher_hidden": np.ones((3, 6), np.float32),
    "teacher_weight": np.ones((5, 6), np.float32),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight": np.ones((5, 3), np.float32)}, ArrayShapeError, r"weight must have shape"),
        ({"weight": np.ones((5, 4))}, ArrayDtypeError, "weight must have the dtype of hidden"),
        ({"teacher_hidden": np.ones((2, 6), np.float32)}, ArrayShapeError, "teacher_hidden must"),
        (
            {"teacher_weight": np.ones((6, 6), np.float32)},
            ArrayShapeError,
            "vocabularies must be the same",
        ),
        ({"targets": np.array([0, 1])}, ArrayShapeError, "targets must have shape"),
        ({"targets": np.array([0, 1, 5]), "hard_weight": 1.0}, ArrayError, "targets must be in"),
        ({"hard_weight": 1.0}, ConfigError, "hard_weight=1.0 needs targets"),
        ({"temperature": -1.0}, ConfigError, "temperature must be"),
        ({"chunk_tokens": 0}, ConfigError, "chunk_tokens must be an integer of 1 or more"),
        ({"grad_weight": np.ones((5, 5), np.float32)}, ArrayShapeError, "grad_weight must have"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"linear_distillation_loss: {message}"):
        linear_distillation_loss(**{**GOOD, **arguments})
