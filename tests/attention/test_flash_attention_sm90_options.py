"""Class sm90 of the forward: every option, head_dim and varlen."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.attention import flash_attention
from cukit.reference import attention as reference
from tests.attention import plain
from tests.attention.checks import LSE_ATOL, check_forward, inputs_of
from tests.attention.options import OPTIONS, options_of
from tests.contract import (
    assert_close,
    poison_pool,
    poisoned,
    random,
    to_device,
    to_host,
)
from tests.quick_run import emulated

EVERY_OPTION = {
    **OPTIONS,
    "bias of aligned rows": {"bias": "bhqk", "bias_dtype": "float32"},
    "mask of keys": {"mask": "bk", "causal": True},
}
EMULATED = ("window", "causal window, sinks", "bias, mask", "bias of aligned rows", "everything")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", EVERY_OPTION)
@emulated(lambda name, head_dim: name in EMULATED and head_dim != 256)
def test_options(sm90_device, rng, name, head_dim):
    """Lengths are not multiples of the tiles; bias and mask end within the last tile."""
    lengths = (70, 304) if sm90_device == "emulator" else (300, 528)
    heads, batch = ((2, 1), 1) if sm90_device == "emulator" else ((4, 2), 2)
    q, k, v, _ = inputs_of(rng, lengths, heads, head_dim, batch=batch)
    options = options_of(rng, EVERY_OPTION[name], batch, heads[0], lengths, "bfloat16")
    check_forward(sm90_device, q, k, v, options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(96, 96), (72, 72), (80, 80), (192, 192), (192, 128), (40, 200), (104, 64), (256, 8)],
)
@emulated(lambda head_dim, causal: causal == (head_dim == 192))
def test_widths(sm90_device, rng, head_dim, value_dim, causal):
    lengths = (70, 250) if sm90_device == "emulator" else (300, 528)
    q, k, v, _ = inputs_of(rng, lengths, (2, 1), head_dim, value_dim)
    check_forward(sm90_device, q, k, v, {"causal": causal})


# Queries and keys per sequence: none, one, partial tiles, whole tiles, fewer keys.
SEQUENCES = [(70, 70), (0, 9), (13, 0), (1, 200), (128, 128), (150, 64), (64, 135)]


def sequences_of(rng, heads, head_dim, repeat=1):
    lengths = SEQUENCES * repeat
    ends = np.zeros((2, len(lengths) + 1), np.int32)
    ends[:, 1:] = np.cumsum(lengths, axis=0).T
    q = random(rng, (int(ends[0, -1]), heads[0], head_dim), "bfloat16")
    k, v = (random(rng, (int(ends[1, -1]), heads[1], head_dim), "bfloat16") for _ in range(2))
    return (q, k, v), {
        "cu_seqlens_q": ends[0].copy(),
        "cu_seqlens_kv": ends[1].copy(),
        "max_seqlen_q": 150,
        "max_seqlen_kv": 200,
    }


def check_sequences(device, arrays, lengths, **options):
    """Compares a packed call with a separate call for each sequence."""
    q, k, v = arrays
    (placed_q, placed_k, placed_v, *ends) = to_device(
        device, q, k, v, lengths["cu_seqlens_q"], lengths["cu_seqlens_kv"]
    )
    longest = {name: lengths[name] for name in ("max_seqlen_q", "max_seqlen_kv")}
    out = poisoned(device, q.shape, "bfloat16")
    poison_pool(device)
    _, lse = flash_attention(
        placed_q,
        placed_k,
        placed_v,
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[1],
        return_lse=True,
        out=out,
        **longest,
        **options,
    )
    out, lse = to_host(out), to_host(lse)
    bounds = zip(lengths["cu_seqlens_q"], lengths["cu_seqlens_q"][1:], strict=False)
    keys = zip(lengths["cu_seqlens_kv"], lengths["cu_seqlens_kv"][1:], strict=False)
    for (a, b), (c, d) in zip(bounds, keys, strict=True):
        one = q[None, a:b], k[None, c:d], v[None, c:d]
        wide = (x.astype(np.float64) for x in one)
        exact, exact_lse = reference.flash_attention(*wide, return_lse=True, **options)
        if a == b:
            continue
        if c == d:
            assert (out[a:b] == 0).all()
            assert np.isneginf(lse[:, a:b]).all()
            continue
        low_options = dict(options)
        low, low_lse = plain.forward(*one, low_options.pop("causal", False), **low_options)
        assert_close("out", out[None, a:b], low, exact)
        assert_close("lse", lse[None, :, a:b], low_lse, exact_lse, LSE_ATOL)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (30, 20)}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@emulated(lambda head_dim, options: (head_dim == 256) == ("causal" in options))
def test_sequences_of_any_lengths(sm90_device, rng, head_dim, options):
    heads, repeat = ((2, 1), 1) if sm90_device == "emulator" else ((4, 2), 9)
    check_sequences(sm90_device, *sequences_of(rng, heads, head_dim, repeat), **options)


@pytest.mark.emulator
def test_late_completion(late_completion_emulator, rng):
    check_sequences(late_completion_emulator, *sequences_of(rng, (2, 1), 128), causal=True)


def test_nan_in_a_neighbouring_sequence_is_ignored(sm90_device, rng):
    """A sequence's last tiles include rows of the next sequence, which are multiplied by zeros."""
    (q, k, v), lengths = sequences_of(rng, (2, 1), 64)
    broken = [x.copy() for x in (q, k, v)]
    for x, ends in zip(broken, ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv"), strict=True):
        for sequence in (3, 5):
            x[lengths[ends][sequence] : lengths[ends][sequence + 1]] = np.nan
    ends = to_device(sm90_device, lengths.pop("cu_seqlens_q"), lengths.pop("cu_seqlens_kv"))
    results = []
    for arrays in ((q, k, v), broken):
        out, lse = flash_attention(
            *to_device(sm90_device, *arrays),
            cu_seqlens_q=ends[0],
            cu_seqlens_kv=ends[1],
            return_lse=True,
            **lengths,
        )
        results.append((to_host(out), to_host(lse)))
    bounds = to_host(ends[0])
    for sequence in (0, 1, 2, 4, 6):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        np.testing.assert_array_equal(results[0][0][rows], results[1][0][rows])
        np.testing.assert_array_equal(results[0][1][:, rows], results[1][1][:, rows])


@pytest.mark.parametrize("lengths", [((0, 0), (3, 2)), ((3, 2), (0, 0)), ((0, 0), (0, 0))])
def test_all_sequences_empty(sm90_device, rng, lengths):
    """No sequence has queries, or none has keys, although max_seqlen is above 0."""
    ends = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    q, k = (random(rng, (int(each[-1]), 2, 64), "bfloat16") for each in ends)
    q, k, *ends = to_device(sm90_device, q, k, *ends)
    out, lse = flash_attention(
        q,
        k,
        k,
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[1],
        max_seqlen_q=5,
        max_seqlen_kv=7,
        return_lse=True,
    )
    assert out.shape == q.shape
    assert (to_host(out) == 0).all()
    assert np.isneginf(to_host(lse)).all()


def test_memory_between_output_rows_is_unchanged(sm90_device, rng):
    """Rows after the last sequence, and other heads of the array that contains `out`, are not
    written."""
    (q, k, v), lengths = sequences_of(rng, (2, 1), 64)
    ends = to_device(sm90_device, lengths.pop("cu_seqlens_q"), lengths.pop("cu_seqlens_kv"))
    wide = poisoned(sm90_device, (q.shape[0] + 40, 6, 64), "bfloat16")
    flash_attention(
        *to_device(sm90_device, q, k, v),
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[1],
        out=wide[: q.shape[0], 2:4],
        **lengths,
    )
    got = to_host(wide).astype(np.float32)
    assert np.isfinite(got[: q.shape[0], 2:4]).all()
    assert np.isnan(got[q.shape[0] :]).all()
    assert np.isnan(got[:, [0, 1, 4, 5]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window_size": (99, 50)}, {"causal": True}])
def test_reruns_are_bitwise_equal(rng, options):
    """The assignment of query tiles to blocks, which varies, does not affect the results."""
    arrays, lengths = sequences_of(rng, (8, 2), 128, repeat=20)
    placed = to_device("gpu", *arrays)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        (lengths[name],) = to_device("gpu", lengths[name])
    first: list[bytes] = []
    for _ in range(20):
        poison_pool("gpu")
        results = flash_attention(*placed, return_lse=True, **lengths, **options)
        bits = [to_host(x).tobytes() for x in results]
        first = first or bits
        assert bits == first


@pytest.mark.gpu
def test_more_elements_than_fit_in_32_bits(rng):
    """Sequences and heads that start beyond 2^31 elements, of inputs and output."""
    import cupy

    total, heads, width = (1 << 16) + 300, 512, 64
    q = cupy.zeros((total, heads, width), np.float16)
    assert q.size > 1 << 31
    tail = cupy.asarray(random(rng, (300, 8, width), "float16"))
    q[-300:, -8:] = tail
    ends = cupy.asarray(np.array([0, 1, total - 300, total], np.int32))
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "causal": True}
    out = flash_attention(q, q, q, max_seqlen_q=total, max_seqlen_kv=total, **options)
    expected = flash_attention(*[tail[None]] * 3, causal=True)
    np.testing.assert_array_equal(to_host(out[-300:, -8:]), to_host(expected[0]))
