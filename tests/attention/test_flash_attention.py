"""flash_attention and its backward: values, special rows, layouts, reproducibility, errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.attention import flash_attention, flash_attention_backward
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import attention as reference
from tests.attention.checks import check, check_forward, exact_forward, inputs_of
from tests.contract import (
    assert_close,
    check_gradient,
    poison_pool,
    random,
    to_device,
    to_host,
)
from tests.quick_run import emulated

# (seq_len_q, seq_len_kv): one key, queries without keys, partial tiles, whole tiles.
LENGTHS = [(1, 1), (239, 1), (1, 239), (113, 203), (203, 113)]
LONG = [(799, 3), (512, 512), (1023, 1024)]  # slow where a CPU computes both sides
HEADS = [(4, 4), (6, 2), (5, 1)]  # MHA, GQA, MQA
HEAD_DIMS = [8, 40, 64, 72, 80, 96, 128, 136, 192, 256]
EMULATED_HEAD_DIMS = (64, 72, 128, 256)


def check_shape(device, rng, lengths, heads, head_dim, dtype, causal, batch=2):
    inputs = inputs_of(rng, lengths, heads, head_dim, batch=batch, dtype=dtype)
    check(device, *inputs, {"causal": causal}, strict_lse=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
@emulated(lambda heads: heads == (6, 2))  # one GQA group size covers the kernels
def test_ragged_lengths(device, rng, lengths, heads, causal):
    check_shape(
        device, rng, lengths, heads, 64, "bfloat16", causal, batch=2 if device == "gpu" else 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LONG)
def test_long_lengths(rng, lengths, heads, causal):
    check_shape("gpu", rng, lengths, heads, 128, "bfloat16", causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@emulated(lambda head_dim, dtype: head_dim in EMULATED_HEAD_DIMS and dtype == "bfloat16")
def test_head_dims(device, rng, head_dim, dtype, causal):
    if device == "gpu":
        check_shape(device, rng, (150, 215), (4, 2), head_dim, dtype, causal)
        return
    check_shape(device, rng, (70, 135), (2, 1), head_dim, dtype, causal, batch=1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles(rng, head_dim, causal):
    check_shape("gpu", rng, (4224, 4224), (2, 1), head_dim, "bfloat16", causal, batch=1)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_gqa_groups_that_fill_the_gpu_without_a_split(rng, causal):
    check_shape("gpu", rng, (300, 2100), (8, 4), 64, "bfloat16", causal, batch=5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_finite_differences(rng, causal):
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((5, 4), (7, 2), (7, 2)))
    options = {"causal": causal, "scale": 0.7}

    def backward(grad_out, q, k, v):
        out, lse = reference.flash_attention(q, k, v, return_lse=True, **options)
        return reference.flash_attention_backward(grad_out, q, k, v, out, lse, **options)

    check_gradient(partial(reference.flash_attention, **options), backward, (q, k, v), rng)


def test_reference_equals_a_softmax_written_out(rng):
    q, k, v = (rng.standard_normal((1, 4, 1, 8)) for _ in range(3))
    out, lse = reference.flash_attention(q, k, v, causal=True, scale=0.5, return_lse=True)
    for i in range(4):
        scores = np.exp(0.5 * k[0, : i + 1, 0] @ q[0, i, 0])
        np.testing.assert_allclose(out[0, i, 0], scores @ v[0, : i + 1, 0] / scores.sum())
        np.testing.assert_allclose(lse[0, 0, i], np.log(scores.sum()))


def test_rows_without_keys(device, rng):
    """Bottom-right alignment: the first 5 of 8 queries attend to none of the 3 keys."""
    q, k, v, grad_out = to_device(
        device, *inputs_of(rng, (8, 3), (2, 2), 64, batch=2, dtype="float16")
    )
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert (to_host(out)[:, :5] == 0).all()
    assert np.isneginf(to_host(lse)[:, :, :5]).all()
    assert np.isfinite(to_host(lse)[:, :, 5:]).all()
    # Query 5 has key 0 only.
    np.testing.assert_array_equal(to_host(out)[:, 5], to_host(v)[:, 0])
    for deterministic in (False, True):
        grad_q, _, grad_v = flash_attention_backward(
            grad_out, q, k, v, out, lse, causal=True, deterministic=deterministic
        )
        assert (to_host(grad_q)[:, :5] == 0).all()
        assert np.isfinite(to_host(grad_v).astype(np.float32)).all()


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
def test_empty_sequences(device, rng, lengths):
    q, k, v, grad_out = to_device(
        device, *inputs_of(rng, lengths, (2, 1), 64, batch=2, dtype="float16")
    )
    poison_pool(device)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert (to_host(out) == 0).all()
    assert np.isneginf(to_host(lse)).all()
    for deterministic in (False, True):
        poison_pool(device)
        gradients = flash_attention_backward(
            grad_out, q, k, v, out, lse, deterministic=deterministic
        )
        for gradient, like in zip(gradients, (q, k, v), strict=True):
            assert gradient.shape == like.shape
            assert (to_host(gradient) == 0).all()


def test_large_scores_do_not_overflow(device, rng):
    """Row maxima that change from tile to tile and are far beyond the range of exp."""
    q, k, v, _ = inputs_of(rng, (130, 700), (1, 1), 64, dtype="bfloat16")
    k = (k * np.linspace(100, 0.01, 700)[None, :, None, None]).astype(k.dtype)
    check_forward(device, q, k, v, {})


def test_strided_views_need_no_copy(device, rng):
    """[batch, heads, seq, d] viewed as [batch, seq, heads, d], and slices of a fused projection."""
    q, k, v, grad_out = inputs_of(rng, (70, 90), (4, 2), 64, batch=2, dtype="float16")
    dense = to_device(device, q, k, v, grad_out)
    transposed = [
        to_device(device, np.ascontiguousarray(x.swapaxes(1, 2)))[0].swapaxes(1, 2)
        for x in (q, k, v, grad_out)
    ]
    (fused,) = to_device(device, np.concatenate([k, v], axis=2))
    k_view, v_view = fused[:, :, :2], fused[:, :, 2:]
    (wide_out,) = to_device(device, np.full((2, 70, 8, 64), np.nan, np.float16))
    strided_out = wide_out[:, :, 2:6]

    expected, lse = flash_attention(*dense[:3], causal=True, return_lse=True)
    for views in (transposed[:3], (transposed[0], k_view, v_view)):
        out = flash_attention(*views, causal=True, out=strided_out)
        np.testing.assert_array_equal(to_host(out), to_host(expected))
    assert np.isnan(to_host(wide_out)[:, :, [0, 1, 6, 7]]).all()

    gradients = flash_attention_backward(
        dense[3], *dense[:3], expected, lse, causal=True, deterministic=True
    )
    again = flash_attention_backward(
        transposed[3],
        transposed[0],
        k_view,
        v_view,
        strided_out,
        lse,
        causal=True,
        deterministic=True,
    )
    for one, other in zip(gradients, again, strict=True):
        np.testing.assert_array_equal(to_host(one), to_host(other))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
def test_reruns_are_bitwise_equal(rng, heads):
    """Everything except the grad_q of the default backward, which is summed by atomics."""
    q, k, v, grad_out = to_device(
        "gpu", *inputs_of(rng, (600, 777), heads, 128, batch=2, dtype="bfloat16")
    )
    first: list[bytes] = []
    for _ in range(20):
        poison_pool("gpu")
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        arguments = (grad_out, q, k, v, out, lse)
        fixed = flash_attention_backward(*arguments, causal=True, deterministic=True)
        _, *keys = flash_attention_backward(*arguments, causal=True)
        bits = [to_host(x).tobytes() for x in (out, lse, *fixed, *keys)]
        first = first or bits
        assert bits == first


@pytest.mark.gpu
def test_offsets_beyond_32_bits(rng):
    """A view with a batch stride of 2^31 elements."""
    import cupy

    room = cupy.zeros((1 << 31) + (1 << 20), dtype=np.float16)
    step = 1 << 31
    view = cupy.ndarray(
        (2, 64, 2, 64), np.float16, room.data, strides=(2 * step, 2 * 128, 2 * 64, 2)
    )
    values = cupy.asarray(random(rng, (2, 64, 2, 64), "float16"))
    view[...] = values
    np.testing.assert_array_equal(
        to_host(flash_attention(view, view, view)), to_host(flash_attention(values, values, values))
    )


def test_scale(device, rng):
    q, k, v, _ = inputs_of(rng, (20, 30), (2, 2), 64, batch=2, dtype="float16")
    exact, _ = exact_forward(q, k, v, {"scale": 0.3})
    low = reference.flash_attention(q, k, v, scale=0.3)
    assert_close("out", flash_attention(*to_device(device, q, k, v), scale=0.3), low, exact)


def test_errors_name_the_argument(device, rng):
    q, k, v, grad_out = to_device(
        device, *inputs_of(rng, (8, 8), (4, 2), 64, batch=2, dtype="float16")
    )
    with pytest.raises(ArrayShapeError, match="flash_attention: q must have 4 axes"):
        flash_attention(q[0], k, v)
    with pytest.raises(ArrayShapeError, match=r"flash_attention: k must have shape"):
        flash_attention(q, k[..., :32], v)
    with pytest.raises(ArrayShapeError, match=r"flash_attention: v must have shape"):
        flash_attention(q, k, v[:, :4])
    with pytest.raises(ArrayShapeError, match=r"heads of k .* must divide those of q, got 2 and 3"):
        flash_attention(q[:, :, :3], k, v)
    with pytest.raises(ArrayDtypeError, match="v must have the dtype of q"):
        flash_attention(q, k, v.astype(np.float32))
    with pytest.raises(ArrayDtypeError, match="q must be"):
        flash_attention(q.astype(np.int32), k, v)
    with pytest.raises(ArrayLayoutError, match="last axis of q must be contiguous"):
        flash_attention(q[..., ::2], k[..., :32], v[..., :32])
    with pytest.raises(ConfigError, match="scale must be positive"):
        flash_attention(q, k, v, scale=-1.0)
    with pytest.raises(ArrayShapeError, match="out must have shape"):
        flash_attention(q, k, v, out=q[:, :4])
    out, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ArrayShapeError, match="flash_attention_backward: lse must have shape"):
        flash_attention_backward(grad_out, q, k, v, out, lse[:, :2])
    with pytest.raises(ArrayDtypeError, match="lse must be float32"):
        flash_attention_backward(grad_out, q, k, v, out, lse.astype(np.float16))


@pytest.mark.gpu
def test_errors_for_requirements_of_the_kernels(rng):
    q, k, v, _ = to_device("gpu", *inputs_of(rng, (8, 8), (1, 1), 96, batch=2, dtype="float16"))
    with pytest.raises(ArrayShapeError, match="multiple of 8 up to 256 on the GPU, got 60"):
        flash_attention(q[..., :60], k[..., :60], v[..., :60])
    with pytest.raises(
        ArrayLayoutError, match="start and the strides of q must be multiples of 16"
    ):
        flash_attention(q[..., 4:68], k[..., :64], v[..., :64])
    with pytest.raises(ArrayDtypeError, match="q must be float16, bfloat16, got float32"):
        flash_attention(*(x.astype(np.float32) for x in (q, k, v)))
