"""topk_distillation_loss and teacher_top_k."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import distillation_loss, teacher_top_k, topk_distillation_loss
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.reference import losses as reference
from tests.contract import (
    DTYPES,
    poison_pool,
    random,
    to_device,
    to_host,
)
from tests.distill.gradients import assert_elements_close, assert_gradient, softmax

# Shape of the logits, and known tokens per row: one column, rows that are not 16-byte aligned, rows
# shared by a cluster, rows too long to be kept on chip.
CASES = [((2, 1), 1), ((5, 7), 3), ((9, 1001), 40), ((2, 32768), 512), ((1, 300001), 1024)]
TAILS = ("renormalise", "bucket")
IGNORE = -100


def signal(rng, shape, known, dtype="float32", temperature=1.0):
    """Student logits; log-probabilities and ids of the teacher's `known` most likely tokens."""
    student, teacher = random(rng, shape, dtype, scale=2), random(rng, shape, "float32", scale=2)
    return student, *teacher_top_k(teacher, known, temperature=temperature)


def textbook(student, log_probs, ids, tail, temperature=1.0):
    """Losses [rows], in float64."""
    q = softmax(student.astype(np.float64) / temperature)
    p, q = np.exp(log_probs.astype(np.float64)), np.take_along_axis(q, ids.astype(int), -1)
    if tail == "renormalise":
        p = p / p.sum(-1, keepdims=True)
    else:
        p, q = (np.append(each, 1 - each.sum(-1, keepdims=True), -1) for each in (p, q))
    return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_reference_equals_the_textbook_formula(rng, tail, temperature):
    student, log_probs, ids = signal(rng, (6, 40), 9, temperature=temperature)
    student = student.astype(np.float64)
    options = {"tail": tail, "temperature": temperature}
    rows = topk_distillation_loss(student, log_probs, ids, reduction="none", **options)
    expected = textbook(student, log_probs, ids, tail, temperature)
    np.testing.assert_allclose(rows, expected, rtol=1e-9)
    squared = topk_distillation_loss(
        student, log_probs, ids, scale_by_temperature_squared=True, **options
    )
    np.testing.assert_allclose(squared, expected.mean() * temperature**2, rtol=1e-9)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_by_finite_differences(rng, tail, reduction):
    student, log_probs, ids = signal(rng, (3, 12), 4)
    options = {
        "tail": tail, "temperature": 1.5, "reduction": reduction,
        "scale_by_temperature_squared": True, "targets": np.array([0, IGNORE, 1]),
    }  # fmt: skip

    def loss(z):
        return topk_distillation_loss(z, log_probs, ids, **options)

    def gradient(grad_loss, z):
        return topk_distillation_loss(
            z, log_probs, ids, return_grad=True, grad_loss=grad_loss, **options
        )[1]

    assert_gradient(loss, gradient, student.astype(np.float64), rng)


@pytest.mark.parametrize(("shape", "known"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", TAILS)
def test_matches_reference(device, rng, shape, known, dtype, tail):
    student, log_probs, ids = signal(rng, shape, known, dtype, 2.0)
    options = {"tail": tail, "temperature": 2.0, "reduction": "none", "return_grad": True}
    wide = student.astype(np.float64), log_probs, ids
    exact_loss, exact = reference.topk_distillation_loss(*wide, **options)
    placed = to_device(device, student, log_probs, ids)
    poison_pool(device)
    loss, grad = topk_distillation_loss(*placed, **options)
    again = topk_distillation_loss(*placed, **options)[1]
    np.testing.assert_allclose(to_host(loss), exact_loss, rtol=1e-5, atol=2e-6)
    probabilities = softmax(student / student.dtype.type(2)) + np.abs(exact)
    # With a bucket, the gradient of unknown tokens is q (1 - p_r / q_r). The bucket's probability
    # q_r is 1 minus the known tokens' sum, which cancels digits.
    assert_elements_close(grad, exact, probabilities * (4 if tail == "bucket" else 1))
    assert to_host(grad).tobytes() == to_host(again).tobytes()


@pytest.mark.parametrize("shape", [(4, 33), (3, 1001)])
@pytest.mark.parametrize("tail", TAILS)
def test_equals_the_forward_kl_if_all_tokens_are_known(device, rng, shape, tail):
    student, teacher = random(rng, shape, "float32"), random(rng, shape, "float32")
    log_probs, ids = teacher_top_k(teacher, shape[1])
    placed = to_device(device, student, log_probs, ids)
    loss, grad = topk_distillation_loss(*placed, tail=tail, return_grad=True)
    expected, expected_grad = distillation_loss(student, teacher, return_grad=True)
    np.testing.assert_allclose(to_host(loss), to_host(expected), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(to_host(grad), to_host(expected_grad), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tail", TAILS)
def test_never_negative(device, rng, tail):
    student = random(rng, (32, 500), "bfloat16", scale=4)
    log_probs, ids = teacher_top_k(student, 20)
    placed = to_device(device, student, log_probs, ids)
    loss = to_host(topk_distillation_loss(*placed, tail=tail, reduction="none"))
    assert (loss >= 0).all()
    if tail == "bucket":
        assert (loss < 1e-6).all(), "the student is its teacher"


def test_ignored_and_empty_rows(device, rng):
    student, log_probs, ids = signal(rng, (4, 60), 5)
    student[0], student[2] = np.nan, -np.inf
    targets = np.array([IGNORE, 0, 0, 0])
    placed = to_device(device, student, log_probs, ids, targets)
    loss, grad = topk_distillation_loss(
        *placed[:3], targets=placed[3], reduction="none", return_grad=True
    )
    assert to_host(loss)[[0, 2]].tolist() == [0, 0]
    assert not to_host(grad)[[0, 2]].any()
    assert (to_host(loss)[[1, 3]] > 0).all()


@pytest.mark.parametrize("vocab_size", [257, 40000])
@pytest.mark.parametrize("tail", TAILS)
def test_the_gradient_may_overwrite_the_logits(device, rng, vocab_size, tail):
    placed = to_device(device, *signal(rng, (3, vocab_size), 50, "bfloat16"))
    apart = to_host(topk_distillation_loss(*placed, tail=tail, return_grad=True)[1])
    _, grad = topk_distillation_loss(*placed, tail=tail, return_grad=True, inplace=True)
    assert grad is placed[0]
    np.testing.assert_array_equal(to_host(grad).view(np.uint16), apart.view(np.uint16))


@pytest.mark.gpu
def test_a_token_outside_the_vocabulary_on_the_gpu(rng):
    """Only the row with the invalid token becomes NaN."""
    student, log_probs, ids = signal(rng, (3, 60), 5)
    ids[1, 2] = 60
    placed = to_device("gpu", student, log_probs, ids)
    loss, grad = topk_distillation_loss(*placed, reduction="none", return_grad=True)
    assert np.isnan(to_host(loss)).tolist() == [False, True, False]
    assert np.isnan(to_host(grad)).any(-1).tolist() == [False, True, False]


def test_a_token_outside_the_vocabulary(rng):
    student, log_probs, ids = signal(rng, (3, 60), 5)
    ids[1, 2] = 60
    with pytest.raises(ArrayError, match=r"teacher_ids must be in 0\.\.59, got 60"):
        topk_distillation_loss(student, log_probs, ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_teacher_top_k(device, rng, dtype, temperature):
    logits = random(rng, (2, 3, 200), dtype, scale=3)
    log_probs, ids = map(
        to_host, teacher_top_k(*to_device(device, logits), 7, temperature=temperature)
    )
    assert log_probs.shape == ids.shape == (2, 3, 7)
    p = softmax(logits.astype(np.float64) / temperature)
    assert (np.diff(log_probs, axis=-1) <= 0).all()
    chosen = np.take_along_axis(p, ids.astype(int), -1)
    np.testing.assert_allclose(np.exp(log_probs), chosen, rtol=1e-5)
    np.testing.assert_allclose(np.sort(p, -1)[..., -7], chosen[..., -1], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tail": "drop"}, ConfigError, "tail must be one of"),
        ({"temperature": 0}, ConfigError, "temperature must be"),
        (
            {"teacher_ids": np.zeros((2, 2), np.int32)},
            ArrayShapeError,
            "teacher_log_probs must have shape",
        ),
        (
            {
                "teacher_ids": np.zeros((2, 9), np.int32),
                "teacher_log_probs": np.zeros((2, 9), np.float32),
            },
            ArrayShapeError,
            "teacher_ids must have 1 to 4 tokens",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {
        "student_logits": np.ones((2, 4), np.float32),
        "teacher_log_probs": np.full((2, 3), -1, np.float32),
        "teacher_ids": np.array([[0, 1, 2]] * 2, np.int32),
    }
    with pytest.raises(error, match=f"topk_distillation_loss: {message}"):
        topk_distillation_loss(**{**good, **arguments})
    with pytest.raises(ConfigError, match="teacher_top_k: k must be"):
        teacher_top_k(good["student_logits"], 5)
