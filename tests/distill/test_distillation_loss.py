"""distillation_loss: every divergence compared with its textbook formula; near convergence."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import cross_entropy, distillation_loss, kl_divergence
from cukit.distill.losses._loss_options import DIVERGENCES
from cukit.errors import ConfigError
from cukit.reference import losses as reference
from tests.contract import DTYPES, check_against_reference, poison_pool, random, to_device, to_host
from tests.distill.gradients import assert_elements_close, assert_gradient, softmax
from tests.quick_run import emulated

# One column, rows that begin in the middle of a vector, a block that holds its rows, rows shared by
# a cluster, rows too long to be kept.
SHAPES = [(2, 1), (5, 7), (9, 1001), (2, 32768), (1, 300001)]
BETAS = {"jsd": (0.1, 0.5), "skewed_forward_kl": (0.1,), "skewed_reverse_kl": (0.9,)}
CASES = [(name, beta) for name in DIVERGENCES for beta in BETAS.get(name, (0.5,))]
CENTRED = CASES[1:]
IGNORE = -100


def textbook(student, teacher, divergence, beta, temperature=1.0, dtype=np.float64):
    """Losses [rows], by the formulas of the docstring."""

    def log_softmax(z):
        z = z.astype(dtype) / temperature
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    beta = dtype(beta)  # the weights of a mixture add up to 1
    log_q, log_p = log_softmax(student), log_softmax(teacher)
    p, q = np.exp(log_p), np.exp(log_q)

    def kl(log_a, log_b):
        a = np.exp(log_a)
        return np.where(a > 0, a * (log_a - log_b), 0).sum(-1)

    def mixture(share):
        return np.log(share * p + (1 - share) * q)

    if divergence == "jsd":
        return beta * kl(log_p, mixture(beta)) + (1 - beta) * kl(log_q, mixture(beta))
    return {
        "forward_kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "skewed_forward_kl": lambda: kl(log_p, mixture(beta)),
        "skewed_reverse_kl": lambda: kl(log_q, mixture(1 - beta)),
        "total_variation": lambda: np.abs(p - q).sum(-1) / 2,
    }[divergence]()


@pytest.mark.parametrize(("divergence", "beta"), CASES)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_reference_equals_the_textbook_formula(rng, divergence, beta, temperature):
    student, teacher = 3 * rng.standard_normal((6, 40)), 3 * rng.standard_normal((6, 40))
    options = {"divergence": divergence, "beta": beta, "temperature": temperature}
    rows = distillation_loss(student, teacher, reduction="none", **options)
    expected = textbook(student, teacher, divergence, beta, temperature)
    np.testing.assert_allclose(rows, expected, rtol=1e-11)
    squared = distillation_loss(student, teacher, scale_by_temperature_squared=True, **options)
    np.testing.assert_allclose(squared, expected.mean() * temperature**2, rtol=1e-11)


@pytest.mark.parametrize(("divergence", "beta"), CASES)
@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_by_finite_differences(rng, divergence, beta, scale, reduction):
    """Far from the teacher and near it, with cross-entropy mixed in."""
    teacher = rng.standard_normal((3, 8))
    student = teacher + scale * rng.standard_normal((3, 8))
    options = {
        "divergence": divergence, "beta": beta, "temperature": 1.5, "reduction": reduction,
        "scale_by_temperature_squared": True, "soft_weight": 0.7, "hard_weight": 0.2,
        "targets": np.array([0, IGNORE, 1]),
    }  # fmt: skip

    def loss(z):
        return distillation_loss(z, teacher, **options)

    def gradient(grad_loss, z):
        return distillation_loss(z, teacher, return_grad=True, grad_loss=grad_loss, **options)[1]

    assert_gradient(loss, gradient, student, rng)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("divergence", "beta"), CENTRED)
def test_matches_reference(device, rng, shape, dtype, divergence, beta):
    student, teacher = random(rng, shape, dtype, scale=2), random(rng, shape, dtype, scale=2)
    check_against_reference(
        distillation_loss,
        reference.distillation_loss,
        (student, teacher),
        device=device,
        names=("loss", "grad_logits"),
        return_grad=True,
        divergence=divergence,
        beta=beta,
        temperature=2.0,
        reduction="none",
        # |p - q| is first order in the rounding errors of the logits.
        atol=1e-6 if divergence == "total_variation" else None,
    )


@emulated(lambda vocab_size: vocab_size == 1001)
@pytest.mark.parametrize("vocab_size", [7, 1001, 40000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("divergence", "beta"), CENTRED[:-1])
@pytest.mark.parametrize("distance", [1.0, 0.1])
def test_every_element_of_the_gradient(device, rng, vocab_size, dtype, divergence, beta, distance):
    """Except for the total variation, whose gradient is discontinuous at p = q."""
    student = random(rng, (2, vocab_size), dtype, scale=2)
    noise = distance * rng.standard_normal(student.shape)
    teacher = (student.astype(np.float64) + noise).astype(student.dtype)
    options = {"divergence": divergence, "beta": beta, "reduction": "none", "return_grad": True}
    wide = student.astype(np.float64), teacher.astype(np.float64)
    exact_loss, exact = reference.distillation_loss(*wide, **options)
    placed = to_device(device, student, teacher)
    poison_pool(device)
    loss, grad = distillation_loss(*placed, **options)
    np.testing.assert_allclose(to_host(loss), exact_loss, rtol=1e-5)
    # Slopes are about as large as the distance, and cancel in the gradient's sum.
    sizes = softmax(student) * max(distance, 0.25)
    assert_elements_close(grad, exact, sizes + np.abs(exact))


@emulated(lambda vocab_size: vocab_size == 100)
@pytest.mark.parametrize("vocab_size", [100, 10000])
@pytest.mark.parametrize(("divergence", "beta"), CASES)
@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1.4e-3])
def test_accurate_near_convergence(device, rng, vocab_size, divergence, beta, distance):
    """At a divergence of 1e-6, float32 sums by the textbook formula have no correct digit. The
    remaining error is the rounding of the differences of logits, relative to their size."""
    student = random(rng, (2, vocab_size), "float32", scale=2)
    teacher = student + np.float32(distance) * random(rng, student.shape, "float32")
    exact = textbook(student, teacher, divergence, beta, dtype=np.longdouble)
    assert (exact > 0).all()
    options = {"divergence": divergence, "beta": beta, "reduction": "none"}
    got = to_host(distillation_loss(*to_device(device, student, teacher), **options))
    np.testing.assert_allclose(got, exact.astype(np.float64), rtol=max(1e-5, 4e-7 / distance))
    wide = student.astype(np.float64), teacher.astype(np.float64)
    wide = reference.distillation_loss(*wide, **options)
    np.testing.assert_allclose(wide, exact.astype(np.float64), rtol=1e-9)


@pytest.mark.parametrize(("divergence", "beta"), CASES)
def test_never_negative_and_zero_for_equal_logits(device, rng, divergence, beta):
    student = random(rng, (16, 1001), "bfloat16", scale=4)
    nearly = student.copy()
    nearly[:, ::7] = np.nextafter(nearly[:, ::7], np.array(9, student.dtype))
    same, other = to_device(device, student, nearly)
    options = {"divergence": divergence, "beta": beta, "reduction": "none"}
    loss, grad = distillation_loss(same, same.copy(), return_grad=True, **options)
    assert not to_host(loss).any()
    assert not to_host(grad).any()
    assert (to_host(distillation_loss(same, other, **options)) > 0).all()


@pytest.mark.parametrize("mask", [-np.inf, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize(("divergence", "beta"), CASES)
def test_columns_masked_in_both(device, rng, mask, divergence, beta):
    """A padded vocabulary gives the same results as the vocabulary without padding."""
    student, teacher = random(rng, (3, 40), "float32"), random(rng, (3, 40), "float32")
    student[:, 11:], teacher[:, 11:] = mask, mask
    options = {"divergence": divergence, "beta": beta, "reduction": "none", "return_grad": True}
    loss, grad = distillation_loss(*to_device(device, student, teacher), **options)
    short_loss, short = distillation_loss(student[:, :11].copy(), teacher[:, :11].copy(), **options)
    np.testing.assert_allclose(to_host(loss), short_loss, rtol=1e-5)
    np.testing.assert_allclose(to_host(grad)[:, :11], short, rtol=1e-4, atol=1e-6)
    assert not to_host(grad)[:, 11:].any()


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("divergence", "beta"), CENTRED)
def test_columns_masked_in_one(device, divergence, beta):
    """Only the reverse KL is infinite if only the teacher excludes a token."""
    minus = -np.inf
    student = np.array([[0, 0, 0], [0, 0, minus], [minus] * 3, [0, 0, 0]], np.float32)
    teacher = np.array([[0, 0, minus], [0, 0, 0], [0, 0, 0], [minus] * 3], np.float32)
    options = {"divergence": divergence, "beta": beta, "reduction": "none", "return_grad": True}
    loss, grad = distillation_loss(*to_device(device, student, teacher), **options)
    expected = textbook(student[:2], teacher[:2], divergence, beta)
    assert np.isinf(expected).tolist() == [divergence == "reverse_kl", False]
    np.testing.assert_allclose(to_host(loss), [*expected, 0, 0], rtol=1e-5)
    finite = np.isfinite(to_host(loss))
    np.testing.assert_allclose(to_host(grad)[finite].sum(-1), 0, atol=1e-6)
    assert not to_host(grad)[2:].any()


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("columns", [3, 1001])
def test_an_infinite_divergence_with_weight_0_is_dropped(device, rng, columns):
    """From the gradient too, whose other columns one thread or several compute."""
    student, teacher = random(rng, (2, columns), "float32"), random(rng, (2, columns), "float32")
    teacher[0, -1] = -np.inf
    *placed, targets = to_device(device, student, teacher, np.array([1, 2]))
    options = {"divergence": "reverse_kl", "soft_weight": 0.0, "hard_weight": 2.0}
    loss, grad = distillation_loss(*placed, targets=targets, return_grad=True, **options)
    expected = cross_entropy(placed[0], targets, return_grad=True, grad_loss=2.0)
    np.testing.assert_allclose(to_host(loss), 2 * to_host(expected[0]), rtol=1e-6)
    np.testing.assert_allclose(to_host(grad), to_host(expected[1]), rtol=1e-5, atol=1e-8)
    (upstream,) = to_device(device, np.array([0, 1], np.float32))
    options = {"divergence": "reverse_kl", "reduction": "none", "grad_loss": upstream}
    _, grad = distillation_loss(*placed, return_grad=True, **options)
    assert not to_host(grad)[0].any()
    assert to_host(grad)[1].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equals_the_weighted_sum_with_cross_entropy(device, rng, reduction, divergence):
    """One launch gives the results of two."""
    student, teacher = random(rng, (6, 50), "float32"), random(rng, (6, 50), "float32")
    targets = np.array([0, 5, IGNORE, 49, 7, 7])
    *placed, ids = to_device(device, student, teacher, targets)
    options = {"targets": ids, "reduction": reduction, "return_grad": True}
    soft, soft_grad = distillation_loss(*placed, divergence=divergence, **options)
    hard, hard_grad = cross_entropy(placed[0], ids, reduction=reduction, return_grad=True)
    weights = {"soft_weight": 0.25, "hard_weight": 3.0}
    both, grad = distillation_loss(*placed, divergence=divergence, **weights, **options)
    np.testing.assert_allclose(to_host(both), to_host(0.25 * soft + 3 * hard), rtol=1e-5)
    expected = 0.25 * to_host(soft_grad) + 3 * to_host(hard_grad)
    np.testing.assert_allclose(to_host(grad), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("divergence", "beta", "same"),
    [
        ("jsd", 0, "forward_kl"),
        ("jsd", 1, "reverse_kl"),
        ("skewed_forward_kl", 0, "forward_kl"),
        ("skewed_reverse_kl", 0, "reverse_kl"),
    ],
)
def test_limits_of_beta(device, rng, divergence, beta, same):
    placed = to_device(device, random(rng, (6, 50), "float32"), random(rng, (6, 50), "float32"))
    at_limit = distillation_loss(*placed, divergence=divergence, beta=beta, return_grad=True)
    named = distillation_loss(*placed, divergence=same, return_grad=True)
    for a, b in zip(at_limit, named, strict=True):
        assert to_host(a).tobytes() == to_host(b).tobytes()
    direct = reference.distillation_loss(*map(to_host, placed), divergence=divergence, beta=beta)
    assert float(direct) == pytest.approx(float(to_host(named[0])), rel=1e-5)


def test_the_default_is_kl_divergence(device, rng):
    placed = to_device(device, random(rng, (6, 50), "float32"), random(rng, (6, 50), "float32"))
    for a, b in zip(
        distillation_loss(*placed, return_grad=True),
        kl_divergence(*placed, return_grad=True),
        strict=True,
    ):
        assert to_host(a).tobytes() == to_host(b).tobytes()


@emulated(lambda vocab_size: vocab_size == 1001)
@pytest.mark.parametrize("vocab_size", [1001, 40000])
@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_the_gradient_may_overwrite_the_logits(device, rng, vocab_size, divergence):
    student, teacher = (random(rng, (4, vocab_size), "bfloat16") for _ in range(2))
    placed = to_device(device, student, teacher)
    options = {"divergence": divergence, "return_grad": True}
    apart = to_host(distillation_loss(*placed, **options)[1])
    _, grad = distillation_loss(*placed, inplace=True, **options)
    assert grad is placed[0]
    np.testing.assert_array_equal(to_host(grad).view(np.uint16), apart.view(np.uint16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "divergence must be one of"),
        (
            {"divergence": "jsd", "beta": 1.5},
            "beta must be a finite number of 0 or more and at most 1",
        ),
        ({"divergence": "skewed_forward_kl", "beta": 1}, "beta must be below 1 for skewed_forward"),
        ({"hard_weight": 0.5}, "hard_weight=0.5 needs targets"),
        ({"soft_weight": float("nan")}, "soft_weight must be a finite number"),
    ],
)
def test_errors_name_the_argument(options, message):
    logits = np.ones((2, 4), np.float32)
    with pytest.raises(ConfigError, match=f"distillation_loss: {message}"):
        distillation_loss(logits, logits, **options)
