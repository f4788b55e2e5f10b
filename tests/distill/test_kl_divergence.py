"""kl_divergence and its backward."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES, current_device
from cukit.distill import kl_divergence, kl_divergence_backward
from cukit.distill.losses import _divergence_rows
from cukit.distill.losses._divergence_rows import plan_divergence
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import losses as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    poison_pool,
    random,
    to_device,
    to_host,
)
from tests.distill.gradients import assert_elements_close, assert_gradient, softmax

# One column, rows that begin in the middle of a vector, one warp, a block that holds its rows, rows
# shared by a cluster (ragged and not), rows too long to be kept.
SHAPES = [(2, 1), (5, 7), (2, 3, 256), (9, 1001), (6, 32768), (3, 50257), (2, 131071), (2, 300001)]
IGNORE = -100


def textbook(student, teacher, temperature):
    """sum p (log p - log q), in float64."""
    log_q, log_p = (
        z / temperature - np.log(np.exp(z / temperature).sum(-1, keepdims=True))
        for z in (student.astype(np.float64), teacher.astype(np.float64))
    )
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "none", "temperature": 2.0, "scale_by_temperature_squared": True},
    ],
)
def test_matches_reference(device, rng, shape, dtype, options):
    student, teacher = random(rng, shape, dtype, scale=2), random(rng, shape, dtype, scale=2)
    check_against_reference(
        kl_divergence,
        reference.kl_divergence,
        (student, teacher),
        device=device,
        names=("loss", "grad_logits"),
        return_grad=True,
        **options,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", [1.0, 0.1])
def test_every_element_of_the_gradient(device, rng, shape, dtype, distance):
    """Also near the teacher, where q - p is a small difference."""
    student = random(rng, shape, dtype, scale=2)
    teacher = (student.astype(np.float64) + distance * rng.standard_normal(shape)).astype(
        student.dtype
    )
    wide = student.astype(np.float64), teacher.astype(np.float64)
    options = {"temperature": 2.0, "reduction": "sum"}
    exact = reference.kl_divergence_backward(1.0, *wide, **options)
    placed = to_device(device, student, teacher)
    got = kl_divergence_backward(1.0, *placed, **options)
    assert_elements_close(got, exact, softmax(teacher / student.dtype.type(2)) + np.abs(exact))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_without_its_gradient_is_the_same(device, rng, shape):
    placed = to_device(device, random(rng, shape, "bfloat16"), random(rng, shape, "bfloat16"))
    alone = to_host(kl_divergence(*placed, reduction="none"))
    with_grad = to_host(kl_divergence(*placed, reduction="none", return_grad=True)[0])
    np.testing.assert_allclose(alone, with_grad, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_by_finite_differences(rng, temperature, squared, reduction):
    student, teacher = rng.standard_normal((3, 8)), rng.standard_normal((3, 8))
    options = {
        "temperature": temperature,
        "scale_by_temperature_squared": squared,
        "reduction": reduction,
        "targets": np.array([0, IGNORE, 1]),
    }

    def loss(z):
        return reference.kl_divergence(z, teacher, **options)

    def gradient(grad_loss, z):
        return reference.kl_divergence_backward(grad_loss, z, teacher, **options)

    assert_gradient(loss, gradient, student, rng)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_reference_equals_the_textbook_formula(rng, temperature):
    student, teacher = 3 * rng.standard_normal((6, 40)), 3 * rng.standard_normal((6, 40))
    rows = reference.kl_divergence(student, teacher, temperature=temperature, reduction="none")
    np.testing.assert_allclose(rows, textbook(student, teacher, temperature), rtol=1e-11)
    squared = reference.kl_divergence(
        student, teacher, temperature=temperature, scale_by_temperature_squared=True
    )
    np.testing.assert_allclose(squared, rows.mean() * temperature**2, rtol=1e-12)


@pytest.mark.parametrize("vocab_size", [100, 32768, 300001])
@pytest.mark.parametrize(
    ("distance", "rtol"), [(1e-1, 1e-5), (1e-2, 1e-5), (1.4e-3, 1e-5), (1e-4, 1e-3)]
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_accurate_near_convergence(device, rng, vocab_size, distance, rtol, temperature):
    """The relative error is 1e-5 at a divergence of 1e-6, where a float32 sum of p (log p - log q)
    has no correct digit. The remaining absolute error, about 1e-13, is half the square of the error
    in the ratio of the two softmax denominators.
    """
    student = random(rng, (4, vocab_size), "float32", scale=2)
    teacher = student + np.float32(distance) * random(rng, student.shape, "float32")
    options = {"temperature": temperature, "reduction": "none"}
    wide = student.astype(np.float64), teacher.astype(np.float64)
    exact = reference.kl_divergence(*wide, **options)
    assert (exact > 0).all()
    got = kl_divergence(*to_device(device, student, teacher), **options)
    np.testing.assert_allclose(to_host(got), exact, rtol=rtol)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_common_offset_costs_no_accuracy(device, rng, dtype):
    """Teacher = student + 16, except for a difference of 1/8 in a few unlikely tokens."""
    student = np.round(8 * rng.standard_normal((3, 32768))) / 8
    teacher = student + 16
    teacher[:, ::5000] += 0.125
    exact = reference.kl_divergence(student, teacher, reduction="none")
    assert (exact < 1e-4).all()
    low = [z.astype(random(rng, (1,), dtype).dtype) for z in (student, teacher)]
    assert (low[1].astype(np.float64) == teacher).all()
    got = kl_divergence(*to_device(device, *low), reduction="none")
    np.testing.assert_allclose(to_host(got), exact, rtol=1e-5)


def test_never_negative_and_zero_for_equal_logits(device, rng):
    student = random(rng, (64, 2000), "bfloat16", scale=4)
    nearly = student.copy()
    nearly[:, ::7] = np.nextafter(nearly[:, ::7], np.array(9, student.dtype))
    same, other = to_device(device, student, nearly)
    assert (to_host(kl_divergence(same, same.copy(), reduction="none")) == 0).all()
    assert (to_host(kl_divergence(same, other, reduction="none")) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_rows_sum_to_zero(device, rng, dtype):
    placed = to_device(device, random(rng, (8, 1000), dtype), random(rng, (8, 1000), dtype))
    _, grad = kl_divergence(*placed, reduction="sum", return_grad=True)
    bound = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
    assert np.abs(to_host(grad).astype(np.float64).sum(-1)).max() < bound


def test_ignored_rows_do_not_count_even_if_not_finite(device, rng):
    student, teacher = random(rng, (5, 300), "float32"), random(rng, (5, 300), "float32")
    expected = textbook(student[1:4], teacher[1:4], 1.0).mean()
    student[0], teacher[4] = np.nan, np.inf
    placed = to_device(device, student, teacher, np.array([-1, 0, 0, 0, -1]))
    poison_pool(device)
    loss, grad = kl_divergence(*placed[:2], targets=placed[2], ignore_index=-1, return_grad=True)
    np.testing.assert_allclose(to_host(loss), expected, rtol=1e-6)
    assert (to_host(grad)[[0, 4]] == 0).all()
    assert np.isfinite(to_host(grad)).all()


def test_all_rows_ignored(device):
    ones = np.ones((3, 8), np.float32)
    student, teacher, targets = to_device(device, ones, 2 * ones, np.full(3, IGNORE, np.int32))
    loss, grad = kl_divergence(student, teacher, targets=targets, return_grad=True)
    assert float(loss) == 0
    assert not to_host(grad).any()


@pytest.mark.parametrize("mask", [-np.inf, float(np.finfo(np.float32).min)])
def test_logits_masked_in_both(device, rng, mask):
    student, teacher = random(rng, (3, 40), "float32"), random(rng, (3, 40), "float32")
    student[:, 11:], teacher[:, 11:] = mask, mask
    loss, grad = kl_divergence(
        *to_device(device, student, teacher), reduction="none", return_grad=True
    )
    expected = textbook(student[:, :11], teacher[:, :11], 1.0)
    np.testing.assert_allclose(to_host(loss), expected, rtol=1e-5)
    assert (to_host(grad)[:, 11:] == 0).all()
    assert np.isfinite(to_host(grad)).all()


def test_logits_masked_in_one(device):
    """The teacher may exclude a token; if only the student does, the divergence is infinite."""
    minus = -np.inf
    student = np.array([[0, 0, 0], [0, 0, minus], [minus] * 3, [0, 0, 0]], np.float32)
    teacher = np.array([[0, 0, minus], [0, 0, 0], [0, 0, 0], [minus] * 3], np.float32)
    loss, grad = kl_divergence(
        *to_device(device, student, teacher), reduction="none", return_grad=True
    )
    np.testing.assert_allclose(to_host(loss), [np.log(1.5), np.inf, 0, 0], rtol=1e-6)
    expected = [[-1 / 6, -1 / 6, 1 / 3], [1 / 6, 1 / 6, -1 / 3], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(to_host(grad), expected, atol=1e-6)


def test_an_upstream_gradient_scales_the_gradient(device, rng):
    placed = to_device(device, random(rng, (6, 50), "float32"), random(rng, (6, 50), "float32"))
    unit = to_host(kl_divergence(*placed, temperature=2, return_grad=True)[1])
    (scalar,) = to_device(device, np.array(-2.5, np.float32))
    for grad_loss in (-2.5, scalar):
        scaled = kl_divergence_backward(grad_loss, *placed, temperature=2)
        np.testing.assert_allclose(to_host(scaled), -2.5 * unit, rtol=1e-5, atol=1e-8)
    rows = np.linspace(-1, 1, 6).astype(np.float32)
    (placed_rows,) = to_device(device, rows)
    each = kl_divergence_backward(placed_rows, *placed, temperature=2, reduction="none")
    np.testing.assert_allclose(to_host(each), rows[:, None] * unit * 6, rtol=1e-5, atol=1e-7)


def test_normalizer_replaces_the_count(device, rng):
    placed = to_device(device, random(rng, (6, 50), "float32"), random(rng, (6, 50), "float32"))
    total, total_grad = kl_divergence(*placed, reduction="sum", return_grad=True)
    (scalar,) = to_device(device, np.array(16, np.float32))
    for normalizer in (16, scalar):
        loss, grad = kl_divergence(*placed, normalizer=normalizer, return_grad=True)
        np.testing.assert_allclose(to_host(loss), to_host(total) / 16, rtol=1e-6)
        np.testing.assert_allclose(to_host(grad), to_host(total_grad) / 16, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [257, 40000, 300001])
def test_the_gradient_may_overwrite_the_logits(device, rng, vocab_size):
    student, teacher = (random(rng, (4, vocab_size), "bfloat16") for _ in range(2))
    placed = to_device(device, student.copy(), teacher.copy())
    apart = to_host(kl_divergence(*placed, return_grad=True)[1])
    _, grad = kl_divergence(*placed, return_grad=True, inplace=True)
    assert grad is placed[0]
    np.testing.assert_array_equal(to_host(grad).view(np.uint16), apart.view(np.uint16))
    assert to_host(placed[1]).tobytes() == teacher.tobytes()


@pytest.fixture
def split_as(monkeypatch):
    """Makes the op split its rows in the given way."""

    def choose(**choice):
        plan = partial(plan_divergence, **choice)
        monkeypatch.setattr(_divergence_rows, "plan_divergence", plan)
        ops = sys.modules["cukit.distill.losses.distillation_loss"]
        monkeypatch.setattr(ops, "_prepare", ops._prepare.__wrapped__)

    return choose


def check_split(device, rng, shape, distance):
    """Loss and gradient of a student near the teacher (distance 0.01) or far (1)."""
    student = random(rng, shape, "bfloat16", scale=2)
    noise = distance * rng.standard_normal(shape)
    teacher = (student.astype(np.float64) + noise).astype(student.dtype)
    wide = student.astype(np.float64), teacher.astype(np.float64)
    exact = reference.kl_divergence(*wide, reduction="none", return_grad=True)
    placed = to_device(device, student, teacher)
    loss, grad = kl_divergence(*placed, reduction="none", return_grad=True)
    np.testing.assert_allclose(to_host(loss), exact[0], rtol=1e-5)
    assert_elements_close(grad, exact[1], softmax(teacher) + np.abs(exact[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("threads", [32, 256, 1024])
@pytest.mark.parametrize("distance", [0.01, 1.0])
def test_every_split_of_a_row_agrees(rng, split_as, cluster, cached, threads, distance):
    """Equal results within rounding for any number of blocks per row and of kept vectors."""
    if cluster > 1 and current_device().compute_capability < (9, 0):
        pytest.skip("clusters came with sm_90")
    split_as(cluster=cluster, cached=cached, threads=threads)
    check_split("gpu", rng, (3, 20001), distance)


@pytest.mark.parametrize("vocab_size", [9, 2003])
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("cached", [0, 1, 16])
@pytest.mark.parametrize("distance", [0.01, 1.0])
def test_partly_kept_rows(device, rng, split_as, vocab_size, cluster, cached, distance):
    """Blocks without vectors; threads that keep none, some or all of their vectors; elements
    outside vectors."""
    if device == "gpu" and cluster > 1 and current_device().compute_capability < (9, 0):
        pytest.skip("clusters came with sm_90")
    split_as(cluster=cluster, cached=cached, threads=32)
    check_split(device, rng, (3, vocab_size), distance)


@pytest.mark.gpu
def test_more_than_2_31_elements(rng):
    import cupy

    vocab_size = 1 << 17
    rows = 2**31 // vocab_size + 2
    student = cupy.zeros((rows, vocab_size), cupy.float16)
    teacher = cupy.zeros((rows, vocab_size), cupy.float16)
    last = random(rng, (2, vocab_size), "float16")
    student[-1], teacher[-1] = cupy.asarray(last[0]), cupy.asarray(last[1])
    loss, grad = kl_divergence(student, teacher, reduction="none", return_grad=True, inplace=True)
    assert not to_host(loss)[:-1].any()
    wide = last.astype(np.float64)
    expected = reference.kl_divergence(wide[:1], wide[1:], reduction="none", return_grad=True)
    np.testing.assert_allclose(to_host(loss)[-1:], expected[0], rtol=1e-5)
    np.testing.assert_allclose(to_host(grad[-1:]), expected[1], rtol=2e-2, atol=1e-6)


GOOD = {
    "student_logits": np.ones((2, 4), np.float32),
    "teacher_logits": np.ones((2, 4), np.float32),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"student_logits": np.ones((2, 4), int)}, ArrayDtypeError, "student_logits must be float"),
        (
            {"teacher_logits": np.ones((2, 5), np.float32)},
            ArrayShapeError,
            "vocabularies must be the same",
        ),
        (
            {"teacher_logits": np.ones((2, 4))},
            ArrayDtypeError,
            "teacher_logits must have the dtype",
        ),
        ({"teacher_logits": np.ones((4, 2), np.float32).T}, ArrayLayoutError, "teacher_logits"),
        ({"targets": np.array([0])}, ArrayShapeError, r"targets must have shape \(2,\)"),
        ({"temperature": 0}, ConfigError, "temperature must be a finite number above 0"),
        ({"temperature": float("nan")}, ConfigError, "temperature must be a finite number"),
        ({"reduction": "batchmean"}, ConfigError, "reduction must be one of"),
        ({"normalizer": 3, "reduction": "none"}, ConfigError, "normalizer needs"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"kl_divergence: {message}"):
        kl_divergence(**{**GOOD, **arguments})


@pytest.mark.parametrize("vocab_size", [1, 256, 4096, 32768, 50257, 128256, 256000, 1 << 20])
def test_plan_fits_the_device(vocab_size):
    for device in TYPICAL_DEVICES.values():
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            split = plan_divergence(
                vocab_size,
                dtype,
                itemsize,
                "int64",
                16 // itemsize,
                "forward_kl",
                True,
                True,
                False,
                device,
            ).split
            assert split.threads % 32 == 0
            assert 32 <= split.threads <= 1024
            assert split.cluster == 1 or device.compute_capability[0] in (9, 10)
            assert split.shared_bytes + 2048 <= device.shared_bytes_per_block
            assert split.shared_bytes == split.cached * split.threads * 32
