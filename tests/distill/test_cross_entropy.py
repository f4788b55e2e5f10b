"""cross_entropy and its backward."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.distill import cross_entropy, cross_entropy_backward
from cukit.distill.losses._cross_entropy_rows import plan_cross_entropy
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError, ConfigError
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

# One column, rows that begin in the middle of a vector, one warp, a block that holds its row, rows
# shared by a cluster (ragged and not), rows too long to be kept.
SHAPES = [(2, 1), (5, 7), (2, 3, 256), (9, 1001), (6, 32768), (3, 50257), (2, 131071), (2, 500001)]
IGNORE = -100


def targets_for(rng, shape, dtype="int64", ignored=True):
    targets = rng.integers(0, shape[-1], shape[:-1]).astype(dtype)
    if ignored:
        targets.flat[0] = IGNORE
    return targets


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_matches_reference(device, rng, shape, dtype, reduction):
    logits, targets = random(rng, shape, dtype, scale=3), targets_for(rng, shape)
    check_against_reference(
        cross_entropy,
        reference.cross_entropy,
        (logits, targets),
        device=device,
        names=("loss", "grad_logits"),
        reduction=reduction,
        return_grad=True,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_of_the_gradient(device, rng, shape, dtype):
    logits, targets = random(rng, shape, dtype, scale=3), targets_for(rng, shape)
    exact = reference.cross_entropy_backward(
        1.0, logits.astype(np.float64), targets, reduction="sum"
    )
    placed = to_device(device, logits, targets)
    got = cross_entropy_backward(1.0, *placed, reduction="sum")
    assert_elements_close(got, exact, softmax(logits) + np.abs(exact))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_without_its_gradient_is_the_same(device, rng, shape):
    logits = random(rng, shape, "bfloat16", scale=3)
    placed = to_device(device, logits, targets_for(rng, shape, "int32"))
    alone = to_host(cross_entropy(*placed, reduction="none"))
    with_grad = to_host(cross_entropy(*placed, reduction="none", return_grad=True)[0])
    np.testing.assert_allclose(alone, with_grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_by_finite_differences(rng, reduction):
    logits, targets = rng.standard_normal((4, 9)), targets_for(rng, (4, 9))

    def loss(z):
        return reference.cross_entropy(z, targets, reduction=reduction)

    def gradient(grad_loss, z):
        return reference.cross_entropy_backward(grad_loss, z, targets, reduction=reduction)

    assert_gradient(loss, gradient, logits, rng)


def test_the_reference_equals_the_textbook_formula(rng):
    logits, targets = rng.standard_normal((6, 11)), targets_for(rng, (6, 11), ignored=False)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(q[np.arange(6), targets])
    rows = reference.cross_entropy(logits, targets, reduction="none")
    np.testing.assert_allclose(rows, expected, rtol=1e-12)
    np.testing.assert_allclose(reference.cross_entropy(logits, targets), expected.mean())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_rows_sum_to_zero(device, rng, dtype):
    logits, targets = random(rng, (8, 1000), dtype), targets_for(rng, (8, 1000))
    _, grad = cross_entropy(*to_device(device, logits, targets), reduction="sum", return_grad=True)
    bound = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
    assert np.abs(to_host(grad).astype(np.float64).sum(-1)).max() < bound


def test_ignored_rows_do_not_count_even_if_not_finite(device, rng):
    logits, targets = random(rng, (5, 300), "float32"), targets_for(rng, (5, 300), ignored=False)
    expected = reference.cross_entropy(logits[1:4].astype(np.float64), targets[1:4])
    logits[0], logits[4], targets[[0, 4]] = np.nan, np.inf, -1
    placed = to_device(device, logits, targets)
    poison_pool(device)
    loss, grad = cross_entropy(*placed, ignore_index=-1, return_grad=True)
    np.testing.assert_allclose(to_host(loss), expected, rtol=1e-6)
    assert (to_host(grad)[[0, 4]] == 0).all()
    assert np.isfinite(to_host(grad)).all()


def test_all_rows_ignored(device):
    placed = to_device(device, np.ones((3, 8), np.float32), np.full(3, IGNORE))
    loss, grad = cross_entropy(*placed, return_grad=True)
    assert float(loss) == 0
    assert not to_host(grad).any()


@pytest.mark.parametrize("mask", [-np.inf, float(np.finfo(np.float32).min)])
def test_masked_logits(device, rng, mask):
    logits, targets = random(rng, (4, 33), "float32"), np.array([0, 3, 5, 2])
    logits[:, 10:] = mask
    logits[3] = mask  # fully masked row: zero loss and gradient
    loss, grad = cross_entropy(
        *to_device(device, logits, targets), reduction="none", return_grad=True
    )
    expected = reference.cross_entropy(
        logits[:3, :10].astype(np.float64), targets[:3], reduction="none"
    )
    np.testing.assert_allclose(to_host(loss)[:3], expected, rtol=1e-5)
    assert to_host(loss)[3] == 0
    assert (to_host(grad)[:, 10:] == 0).all()
    assert (to_host(grad)[3] == 0).all()


def test_large_logits_do_not_overflow(device):
    logits = np.array([[1e4, 9.99e3, -1e4], [-1e4, -1.0001e4, -2e4]], np.float32)
    loss = cross_entropy(*to_device(device, logits, np.array([0, 1])), reduction="none")
    np.testing.assert_allclose(
        to_host(loss), [np.log1p(np.exp(-10)), 1 + np.log1p(np.exp(-1))], rtol=2e-3
    )


def test_an_upstream_gradient_scales_the_gradient(device, rng):
    logits, targets = random(rng, (6, 50), "float32"), targets_for(rng, (6, 50))
    placed = to_device(device, logits, targets)
    unit = to_host(cross_entropy(*placed, return_grad=True)[1])
    (scalar,) = to_device(device, np.array(-2.5, np.float32))
    for grad_loss in (-2.5, scalar):
        scaled = cross_entropy_backward(grad_loss, *placed)
        np.testing.assert_allclose(to_host(scaled), -2.5 * unit, rtol=1e-5, atol=1e-8)
    rows = np.linspace(-1, 1, 6).astype(np.float32)
    each = cross_entropy_backward(to_device(device, rows)[0], *placed, reduction="none")
    kept = (targets != IGNORE).sum()
    np.testing.assert_allclose(to_host(each), rows[:, None] * unit * kept, rtol=1e-5, atol=1e-7)


def test_normalizer_replaces_the_count(device, rng):
    logits, targets = random(rng, (6, 50), "float32"), targets_for(rng, (6, 50))
    placed = to_device(device, logits, targets)
    total, total_grad = cross_entropy(*placed, reduction="sum", return_grad=True)
    (scalar,) = to_device(device, np.array(16, np.float32))
    for normalizer in (16, scalar):
        loss, grad = cross_entropy(*placed, normalizer=normalizer, return_grad=True)
        np.testing.assert_allclose(to_host(loss), to_host(total) / 16, rtol=1e-6)
        np.testing.assert_allclose(to_host(grad), to_host(total_grad) / 16, rtol=1e-6)


@pytest.mark.gpu
def test_a_smaller_vocabulary_does_not_reduce_shared_memory_of_a_larger_one(rng):
    """Both run the same cubin, with different shared memory sizes."""
    for vocab_size in (50257, 40000, 50257):
        logits, targets = (
            random(rng, (2, vocab_size), "bfloat16"),
            targets_for(rng, (2, vocab_size)),
        )
        loss, _ = cross_entropy(*to_device("gpu", logits, targets), return_grad=True)
        expected = reference.cross_entropy(logits.astype(np.float64), targets)
        np.testing.assert_allclose(to_host(loss), expected, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [257, 40000, 500001])
def test_the_gradient_may_overwrite_the_logits(device, rng, vocab_size):
    logits, targets = random(rng, (4, vocab_size), "bfloat16"), targets_for(rng, (4, vocab_size))
    placed = to_device(device, logits.copy(), targets)
    apart = to_host(cross_entropy(*placed, return_grad=True)[1])
    _, grad = cross_entropy(*placed, return_grad=True, inplace=True)
    assert grad is placed[0]
    np.testing.assert_array_equal(to_host(grad).view(np.uint16), apart.view(np.uint16))
    again = to_device(device, logits.copy())[0]
    assert cross_entropy_backward(1.0, again, placed[1], inplace=True) is again
    np.testing.assert_array_equal(to_host(again).view(np.uint16), apart.view(np.uint16))


@pytest.mark.gpu
def test_a_target_outside_the_vocabulary_is_nan_on_the_gpu(rng):
    placed = to_device("gpu", random(rng, (3, 40), "float32"), np.array([1, 40, 2]))
    loss, grad = cross_entropy(*placed, reduction="none", return_grad=True)
    assert np.isnan(to_host(loss)).tolist() == [False, True, False]
    assert np.isnan(to_host(grad)).all(axis=1).tolist() == [False, True, False]


def test_a_view_that_is_not_aligned(device, rng):
    flat, targets = random(rng, (1 + 4 * 64,), "bfloat16"), targets_for(rng, (4, 64))
    flat_placed, placed = to_device(device, flat, targets)
    got = cross_entropy(flat_placed[1:].reshape(4, 64), placed)
    np.testing.assert_allclose(
        to_host(got), reference.cross_entropy(flat[1:].reshape(4, 64), targets), rtol=1e-5
    )


@pytest.mark.gpu
def test_more_than_2_31_elements(rng):
    import cupy

    vocab_size = 1 << 17
    rows = 2**31 // vocab_size + 2
    logits = cupy.zeros((rows, vocab_size), cupy.float16)
    last = random(rng, (vocab_size,), "float16")
    logits[-1] = cupy.asarray(last)
    targets = cupy.full(rows, 5, cupy.int32)
    loss, grad = cross_entropy(logits, targets, reduction="none", return_grad=True, inplace=True)
    wide, wide_grad = reference.cross_entropy(
        last[None].astype(np.float64), np.array([5]), reduction="none", return_grad=True
    )
    np.testing.assert_allclose(to_host(loss)[:-1], np.log(vocab_size), rtol=1e-5)
    np.testing.assert_allclose(to_host(loss)[-1:], wide, rtol=1e-5)
    np.testing.assert_allclose(to_host(grad[-1:]), wide_grad, rtol=2e-2, atol=1e-6)


GOOD = {"logits": np.ones((2, 4), np.float32), "targets": np.array([0, 1])}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": np.ones((2, 4), np.int32)}, ArrayDtypeError, "logits must be float32"),
        ({"logits": np.ones((4, 2), np.float32).T}, ArrayLayoutError, "logits must be C-contig"),
        ({"targets": np.array([0])}, ArrayShapeError, r"targets must have shape \(2,\)"),
        ({"targets": np.array([0.0, 1.0])}, ArrayDtypeError, "targets must be int32, int64"),
        ({"targets": np.array([0, 4])}, ArrayError, r"targets must be in 0\.\.3 .*got 4"),
        ({"reduction": "average"}, ConfigError, "reduction must be one of"),
        ({"normalizer": 3, "reduction": "sum"}, ConfigError, "normalizer needs"),
        ({"normalizer": 0}, ConfigError, "normalizer must be above 0"),
        ({"grad_loss": np.ones(2, np.float32)}, ArrayShapeError, "grad_loss must have shape"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"cross_entropy: {message}"):
        cross_entropy(**{**GOOD, **arguments}, return_grad=True)


@pytest.mark.parametrize("vocab_size", [1, 256, 4096, 32768, 50257, 128256, 256000, 1 << 20])
@pytest.mark.parametrize("num_sweeps", [1, 2])
def test_plan_fits_the_device(vocab_size, num_sweeps):
    for device in TYPICAL_DEVICES.values():
        config = plan_cross_entropy(
            vocab_size, "float32", 4, "int64", 4, num_sweeps == 2, False, device
        )
        split = config.split
        assert split.threads % 32 == 0
        assert 32 <= split.threads <= 1024
        assert split.cluster == 1 or device.compute_capability[0] in (9, 10)
        assert split.shared_bytes + 2048 <= device.shared_bytes_per_block
        assert split.shared_bytes == split.cached * split.threads * 16
        assert num_sweeps == 2 or not split.cached
