"""rope and its backward."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayLayoutError,
    ArrayShapeError,
    ConfigError,
)
from cukit.layers import rope, rope_backward
from cukit.layers.rope import plan_rope
from cukit.reference import rope as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    random,
    to_device,
    to_host,
)

# batch, seq_len, num_heads_q, num_heads_k, head_dim, rotary_dim
SIZES = [
    (2, 17, 4, 2, 64, 64),
    (1, 33, 8, 1, 128, 128),
    (2, 5, 3, 3, 96, 32),  # partial, 16-byte accesses
    (1, 7, 5, 2, 80, 40),  # partial, narrower accesses
    (3, 3, 2, 1, 14, 10),  # odd half: scalar accesses
    (1, 1, 1, 1, 2, 2),
    (1, 9, 32, 8, 256, 256),
]


def tables(max_positions, rotary_dim, dtype=np.float32):
    frequencies = 1e4 ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(max_positions)[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def heads(rng, size, dtype):
    batch, seq_len, num_heads_q, num_heads_k, head_dim, _ = size
    return (
        random(rng, (batch, seq_len, num_heads_q, head_dim), dtype),
        random(rng, (batch, seq_len, num_heads_k, head_dim), dtype),
    )


def positions(rng, kind, size, max_positions):
    batch, seq_len = size[:2]
    if kind is None:
        return None
    shape, dtype = kind
    return rng.integers(0, max_positions, (batch, seq_len)[-shape:]).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "dtype"), [*(("rope", dtype) for dtype in DTYPES), ("rope_backward", "bfloat16")]
)
@pytest.mark.parametrize(
    ("interleaved", "kind"), [(False, None), (True, (1, np.int32)), (False, (2, np.int64))]
)
def test_matches_reference(device, rng, size, op, dtype, interleaved, kind):
    cos, sin = tables(50, size[5])
    check_against_reference(
        {"rope": rope, "rope_backward": rope_backward}[op],
        getattr(reference, op),
        (*heads(rng, size, dtype), cos, sin, positions(rng, kind, size, 50)),
        device=device,
        names=("q", "k"),
        interleaved=interleaved,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("function", [rope, rope_backward])
@pytest.mark.parametrize("size", SIZES)
def test_in_place_equals_out_of_place(device, rng, interleaved, function, size):
    placed = to_device(device, *heads(rng, size, "bfloat16"), *tables(50, size[5]))
    expected = function(*placed, interleaved=interleaved)
    results = function(*placed, interleaved=interleaved, inplace=True)
    for result, array, want in zip(results, placed, expected, strict=False):
        assert result is array
        assert to_host(result).tobytes() == to_host(want).tobytes()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_slices_of_a_fused_projection(device, rng, inplace, offset):
    """q, k and v side by side in one row; an offset of 3 elements rules out 16-byte accesses."""
    batch, seq_len, num_heads_q, num_heads_k, head_dim = 2, 6, 4, 2, 64
    width = (num_heads_q + 2 * num_heads_k) * head_dim
    flat = random(rng, (batch * seq_len * width + offset,), "float16")
    (placed,) = to_device(device, flat)
    cos, sin = tables(seq_len, head_dim)
    placed_cos, placed_sin = to_device(device, cos, sin)

    def split(array):
        fused = array[offset:].reshape(batch, seq_len, -1, head_dim)
        return fused[:, :, :num_heads_q], fused[:, :, num_heads_q : num_heads_q + num_heads_k]

    expected = reference.rope(*split(flat.copy()), cos, sin)
    v_before = to_host(placed).copy()[offset:].reshape(batch, seq_len, -1, head_dim)[:, :, 6:]
    results = rope(*split(placed), placed_cos, placed_sin, inplace=inplace)
    for result, want in zip(results, expected, strict=True):
        assert result.flags.c_contiguous or inplace
        np.testing.assert_allclose(
            to_host(result).astype(np.float32), want.astype(np.float32), rtol=2e-3, atol=1e-3
        )
    v_after = to_host(placed)[offset:].reshape(batch, seq_len, -1, head_dim)[:, :, 6:]
    assert v_after.tobytes() == v_before.tobytes()


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_out_may_be_parts_of_one_array(device, rng, rotary_dim):
    """Gradients of a fused projection are adjacent parts of one array, here with space for v."""
    batch, seq_len, heads_q, heads_k, head_dim = 2, 5, 4, 2, 8
    q = random(rng, (batch, seq_len, heads_q, head_dim), "bfloat16")
    k = random(rng, (batch, seq_len, heads_k, head_dim), "bfloat16")
    cos, sin = tables(seq_len, rotary_dim or head_dim)
    joined = random(rng, (batch, seq_len, heads_q + 2 * heads_k, head_dim), "bfloat16")
    q, k, cos, sin, joined = to_device(device, q, k, cos, sin, joined)
    kept = to_host(joined[:, :, heads_q + heads_k :]).copy()
    out = joined[:, :, :heads_q], joined[:, :, heads_q : heads_q + heads_k]
    options = {"rotary_dim": rotary_dim}
    results = rope_backward(q, k, cos, sin, out=out, **options)
    for result, part, expected in zip(
        results, out, rope_backward(q, k, cos, sin, **options), strict=True
    ):
        assert result is part
        np.testing.assert_array_equal(to_host(part), to_host(expected))
    np.testing.assert_array_equal(to_host(joined[:, :, heads_q + heads_k :]), kept)


def test_heads_before_tokens(device, rng):
    """Views of memory in the order [batch, heads, seq_len, head_dim]."""
    q, k = (random(rng, (2, num_heads, 7, 32), "float32") for num_heads in (4, 2))
    cos, sin = tables(7, 32)
    placed = to_device(device, q, k, cos, sin)
    got = rope(placed[0].transpose(0, 2, 1, 3), placed[1].transpose(0, 2, 1, 3), *placed[2:])
    want = reference.rope(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), cos, sin)
    for result, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(to_host(result), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_by_finite_differences(rng, interleaved):
    cos, sin = tables(9, 6, np.float64)
    position_ids = rng.integers(0, 9, (2, 3))
    options = {
        "cos": cos,
        "sin": sin,
        "position_ids": position_ids,
        "interleaved": interleaved,
        "rotary_dim": 6,
    }

    def joined(function, q, k, **more):
        return np.concatenate(function(q, k, **options, **more), axis=2)

    def backward(grad_out, q, k):
        return reference.rope_backward(grad_out[:, :, :4], grad_out[:, :, 4:], **options)

    inputs = rng.standard_normal((2, 3, 4, 10)), rng.standard_normal((2, 3, 2, 10))
    check_gradient(partial(joined, reference.rope), backward, inputs, rng)


def test_backward_inverts_forward(device, rng):
    placed = to_device(device, *heads(rng, SIZES[0], "float32"), *tables(50, 64))
    there = rope(*placed)
    back = rope_backward(*there, *placed[2:])
    for result, array in zip(back, placed[:2], strict=True):
        np.testing.assert_allclose(to_host(result), to_host(array), rtol=1e-5, atol=1e-5)


def test_no_tokens(device):
    q = np.zeros((2, 0, 4, 8), np.float32)
    placed = to_device(device, q, q[:, :, :1].copy(), *tables(4, 8))
    q_out, k_out = rope(*placed)
    assert q_out.shape == (2, 0, 4, 8)
    assert k_out.shape == (2, 0, 1, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [-1, 50, 2**31 - 1])
def test_positions_outside_the_tables_give_nan(rng, position):
    position_ids = np.array([[0, position]], np.int32)
    q, k = heads(rng, (1, 2, 2, 1, 16, 8), "bfloat16")
    placed = to_device("gpu", q, k, *tables(50, 8), position_ids)
    for result, original in zip(rope(*placed), (q, k), strict=True):
        values = to_host(result).astype(np.float32)
        assert np.isfinite(values[:, 0]).all()
        assert np.isnan(values[:, 1, :, :8]).all()
        np.testing.assert_array_equal(values[:, 1, :, 8:], original[:, 1, :, 8:])


def test_errors_of_out():
    q, cos_sin = np.ones((1, 2, 1, 4), np.float32), tables(2, 4)
    with pytest.raises(ConfigError, match="inplace=True and out are mutually exclusive"):
        rope(q, q.copy(), *cos_sin, inplace=True, out=(q.copy(), q.copy()))
    with pytest.raises(ArrayLayoutError, match="q overlaps k in memory"):
        rope(q, q, *cos_sin, inplace=np.True_)
    with pytest.raises(ConfigError, match="out must be a pair of arrays, got 3 elements"):
        rope(q, q, *cos_sin, out=(q, q, q))
    with pytest.raises(ConfigError, match="out must be a pair of arrays, got ndarray"):
        rope(q, q, *cos_sin, out=q.copy())
    with pytest.raises(ArrayLayoutError, match="q_out overlaps q in memory"):
        rope(q, q, *cos_sin, out=(q, q.copy()))
    with pytest.raises(ArrayShapeError, match="k_out must have shape"):
        rope(q, q, *cos_sin, out=(q.copy(), q[:, :1].copy()))


def test_positions_outside_the_tables_raise_on_the_cpu():
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(ArrayError, match="position_ids must be 0 to 2, got -1 to 1"):
        rope(q, q, *tables(3, 4), np.array([1, -1]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": np.ones((3, 2, 4), np.float32)}, ArrayShapeError, "q must have 4 axes"),
        ({"k": np.ones((1, 4, 2, 4), np.float32)}, ArrayShapeError, "k must have shape"),
        ({"k": np.ones((1, 3, 2, 4), np.float16)}, ArrayDtypeError, "k must have the dtype of q"),
        ({"cos": np.ones((3, 2), np.float16)}, ArrayDtypeError, "cos must be float32"),
        ({"sin": np.ones((3, 1), np.float32)}, ArrayShapeError, "sin must have shape"),
        ({"rotary_dim": 2}, ArrayShapeError, r"cos must have shape \(any, rotary_dim / 2\)"),
        (
            {"cos": np.ones((3, 3), np.float32), "sin": np.ones((3, 3), np.float32)},
            ArrayShapeError,
            "cos must have 1 to head_dim / 2 = 2 columns",
        ),
        (
            {"cos": np.ones((2, 2), np.float32), "sin": np.ones((2, 2), np.float32)},
            ArrayShapeError,
            "cos must have a row for each of the 3 positions",
        ),
        ({"position_ids": np.zeros(2, np.int32)}, ArrayShapeError, "position_ids must have shape"),
        ({"position_ids": np.zeros(3)}, ArrayDtypeError, "position_ids must be int32"),
        (
            {"q": np.ones((1, 3, 4, 2), np.float32).transpose(0, 1, 3, 2)},
            ArrayLayoutError,
            "the last axis of q must be contiguous",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {
        "q": np.ones((1, 3, 2, 4), np.float32),
        "k": np.ones((1, 3, 1, 4), np.float32),
        "cos": np.ones((3, 2), np.float32),
        "sin": np.ones((3, 2), np.float32),
    }
    with pytest.raises(error, match=f"rope: {message}"):
        rope(**{**good, **arguments})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("heads_per_thread", [1, 2, 4, 8])
def test_plan_covers_every_element(size, inplace, heads_per_thread):
    batch, seq_len, num_heads_q, num_heads_k, head_dim, rotary_dim = size
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    vec = next(v for v in (8, 4, 2, 1) if half % v == 0 and rest % v == 0)
    config = plan_rope(
        batch * seq_len,
        num_heads_q,
        num_heads_k,
        head_dim,
        rotary_dim,
        "bfloat16",
        vec,
        inplace=inplace,
        heads_per_thread=heads_per_thread,
    )
    lanes = config.half_vecs + config.copy_vecs
    assert vec * (2 * config.half_vecs + config.copy_vecs) == (rotary_dim if inplace else head_dim)
    groups = -(-(num_heads_q + num_heads_k) // config.heads_per_thread)
    assert config.num_blocks * config.threads >= batch * seq_len * groups * lanes
