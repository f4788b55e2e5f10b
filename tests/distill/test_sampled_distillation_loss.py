"""sampled_distillation_loss: its formula, repeated samples, convergence to the exact loss."""

from __future__ import annotations

import numpy as np
import pytest

from cukit import distill
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError
from cukit.reference import losses as reference
from tests.contract import DTYPES, poison_pool, random, to_device, to_host
from tests.distill.gradients import assert_elements_close, assert_gradient, softmax

# Shape of the logits, and samples per row: rows that are not 16-byte aligned, rows shared by a
# cluster, rows too long to be kept on chip.
CASES = [((5, 7), 40), ((9, 1001), 40), ((2, 32768), 512), ((1, 300001), 1024)]
IGNORE = -100


def samples(rng, shape, count):
    """Token ids, half of them from the first five, and weights."""
    ids = rng.integers(0, shape[1], (shape[0], count))
    ids[:, ::2] = rng.integers(0, min(5, shape[1]), ids[:, ::2].shape)
    return ids.astype(np.int32), rng.uniform(0.1, 1, ids.shape).astype(np.float32)


def textbook(student, ids, weights, log_probs, temperature):
    """The losses [rows], and the gradient of the logits, in float64."""
    q = softmax(student.astype(np.float64) / temperature)
    rows, weights = np.arange(len(ids))[:, None], weights.astype(np.float64)
    loss = (weights * (log_probs - np.log(q[rows, ids]))).sum(-1)
    grad = q * weights.sum(-1, keepdims=True)
    for row, (tokens, shares) in enumerate(zip(ids, weights, strict=True)):
        for token, share in zip(tokens, shares, strict=True):
            grad[row, token] -= share
    return loss, grad / temperature


@pytest.mark.parametrize(("shape", "count"), CASES[:2])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_reference_equals_the_textbook_formula(rng, shape, count, temperature):
    student = 2 * rng.standard_normal(shape)
    ids, weights = samples(rng, shape, count)
    log_probs = rng.standard_normal(ids.shape).astype(np.float32)
    loss, grad = distill.sampled_distillation_loss(
        student, ids, weights, teacher_log_probs=log_probs, temperature=temperature,
        reduction="none", return_grad=True,
    )  # fmt: skip
    expected, expected_grad = textbook(student, ids, weights, log_probs, temperature)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9, atol=1e-12)
    same = distill.sampled_distillation_loss(student, ids, np.full_like(weights, 1 / count))
    plain = distill.sampled_distillation_loss(student, ids)
    np.testing.assert_allclose(same, plain, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_by_finite_differences(rng, reduction):
    ids, weights = samples(rng, (3, 12), 6)
    options = {
        "temperature": 1.5, "reduction": reduction, "scale_by_temperature_squared": True,
        "targets": np.array([0, IGNORE, 1]), "hard_weight": 0.4,
    }  # fmt: skip

    def loss(z):
        return distill.sampled_distillation_loss(z, ids, weights, **options)

    def gradient(grad_loss, z):
        return distill.sampled_distillation_loss(
            z, ids, weights, return_grad=True, grad_loss=grad_loss, **options
        )[1]

    assert_gradient(loss, gradient, rng.standard_normal((3, 12)), rng)


@pytest.mark.parametrize(("shape", "count"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(device, rng, shape, count, dtype):
    student = random(rng, shape, dtype, scale=2)
    ids, weights = samples(rng, shape, count)
    options = {"temperature": 2.0, "reduction": "none", "return_grad": True}
    wide = student.astype(np.float64), ids, weights
    exact_loss, exact = reference.sampled_distillation_loss(*wide, **options)
    placed = to_device(device, student, ids, weights)
    poison_pool(device)
    loss, grad = distill.sampled_distillation_loss(*placed, **options)
    again = distill.sampled_distillation_loss(*placed, **options)[1]
    np.testing.assert_allclose(to_host(loss), exact_loss, rtol=1e-5)
    # Weights are summed in float32.
    sizes = (softmax(student / student.dtype.type(2)) + np.abs(exact)) * weights.sum()
    assert_elements_close(grad, exact, sizes)
    assert to_host(grad).tobytes() == to_host(again).tobytes()


def test_samples_estimate_the_divergence(rng):
    """With many samples, the loss and its gradient approach the KL divergence and its gradient."""
    student, teacher = rng.standard_normal((1, 9)), rng.standard_normal((1, 9))
    p = np.exp(teacher) / np.exp(teacher).sum()
    proposal = p**0.5 / (p**0.5).sum()
    draws = 40000
    ids = rng.choice(9, (1, draws), p=proposal[0]).astype(np.int32)
    exact_loss, exact = distill.distillation_loss(student, teacher, return_grad=True)
    sums = [0.0, 0.0]
    for start in range(0, draws, 1000):
        part = ids[:, start : start + 1000]
        weights = np.take_along_axis(p / proposal, part.astype(int), 1) / draws
        log_probs = np.take_along_axis(np.log(p), part.astype(int), 1)
        loss, grad = distill.sampled_distillation_loss(
            student, part, weights, teacher_log_probs=log_probs, return_grad=True
        )
        sums = [sums[0] + loss, sums[1] + grad]
    np.testing.assert_allclose(sums[0], exact_loss, atol=0.02)
    np.testing.assert_allclose(sums[1], exact, atol=0.02)


def test_samples_of_weight_zero_are_not_read(device, rng):
    student = random(rng, (3, 40), "float32")
    ids = np.array([[1, 5, -1], [2, 2, 99], [0, 39, -7]], np.int32)
    weights = np.array([[0.5, 0.5, 0], [0.25, 0.5, 0], [1, 2, 0]], np.float32)
    short = to_device(device, student, ids[:, :2].copy(), weights[:, :2].copy())
    placed = to_device(device, student, ids, weights)
    expected = distill.sampled_distillation_loss(*short, return_grad=True)
    got = distill.sampled_distillation_loss(*placed, return_grad=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(to_host(a), to_host(b), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("vocab_size", [257, 40000])
def test_the_gradient_may_overwrite_the_logits(device, rng, vocab_size):
    student = random(rng, (3, vocab_size), "bfloat16")
    placed = to_device(device, student, *samples(rng, student.shape, 20))
    apart = to_host(distill.sampled_distillation_loss(*placed, return_grad=True)[1])
    _, grad = distill.sampled_distillation_loss(*placed, return_grad=True, inplace=True)
    assert grad is placed[0]
    np.testing.assert_array_equal(to_host(grad).view(np.uint16), apart.view(np.uint16))


@pytest.mark.gpu
def test_a_token_outside_the_vocabulary_on_the_gpu(rng):
    """Only the row with the invalid token becomes NaN."""
    student = random(rng, (3, 60), "float32")
    ids, weights = samples(rng, (3, 60), 5)
    ids[1, 2] = 60
    placed = to_device("gpu", student, ids, weights)
    loss, grad = distill.sampled_distillation_loss(*placed, reduction="none", return_grad=True)
    assert np.isnan(to_host(loss)).tolist() == [False, True, False]
    assert np.isnan(to_host(grad)).any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"sample_ids": np.array([[0], [4]], np.int32)},
            ArrayError,
            r"sample_ids must be in 0\.\.3",
        ),
        ({"sample_ids": np.zeros((2, 1))}, ArrayDtypeError, "sample_ids must be int32"),
        (
            {"sample_ids": np.zeros((2, 1025), np.int32)},
            ArrayShapeError,
            "sample_ids must have 1 to",
        ),
        (
            {"sample_weights": np.ones((2, 2), np.float32)},
            ArrayShapeError,
            "sample_weights must have shape",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {"student_logits": np.ones((2, 4), np.float32), "sample_ids": np.zeros((2, 1), np.int32)}
    with pytest.raises(error, match=f"sampled_distillation_loss: {message}"):
        distill.sampled_distillation_loss(**{**good, **arguments})
