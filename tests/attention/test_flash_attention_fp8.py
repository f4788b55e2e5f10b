"""Attention of float8 inputs: the kernel, the decoded way around it, and what both must keep.

The oracle is the reference in float64 on the decoded inputs. The yardstick of the error is the same
computation with probabilities rounded to float8, which is what the kernel's products are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cukit
from cukit.array_api import NarrowArray, float8_e4m3, float8_e5m2
from cukit.attention import flash_attention, flash_attention_backward, flash_fp8
from cukit.attention import flash_fp8_plan as plan
from cukit.core.device import typical_device
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.reference import attention as reference
from tests.contract import another_order, poison_pool, poisoned, to_device, to_host
from tests.quick_run import emulated

E4M3 = ml_dtypes.float8_e4m3fn
LSE_ATOL = {"cpu": 1e-4, "emulator": 1e-5, "gpu": 4e-3}
"""Hopper adds float8 products with about 14 bits."""
LSE_RTOL = {"cpu": 1e-2, "emulator": 1e-5, "gpu": 1e-3}
"""On the CPU inputs times their descales are rounded to bfloat16."""
ONE_SIGN = 2.5e-2
"""Error of sums that the tensor core has added over at most 1024 keys, values of one sign."""
PRECISE = 3e-3
"""Error with probabilities of sixteen bits: bfloat16's rounding of the output is 1.7e-3 of it."""
FACTOR = 1.3
"""Kernel's error over the yardstick's: it keeps its sums of unrounded probabilities and scales by
another power of two than the yardstick, nothing else."""


@pytest.fixture
def hopper(request, device, monkeypatch) -> Iterator[str]:
    """The `device`; the emulator as a Hopper GPU, since no other has a kernel for float8."""
    if device != "emulator":
        yield device
        return
    with cukit.backend("emulator", arch="sm_90"):
        yield device


def encode(values):
    """A NarrowArray of NumPy values."""
    return NarrowArray(values.astype(E4M3).view(np.uint8), float8_e4m3, values.shape)


def random_heads(rng, lengths, heads, head_dim, batch=1):
    (seq_q, seq_kv), (heads_q, heads_kv) = lengths, heads
    shapes = ((seq_q, heads_q), (seq_kv, heads_kv), (seq_kv, heads_kv))
    return [encode(rng.standard_normal((batch, *shape, head_dim))) for shape in shapes]


def place(device, array):
    return NarrowArray(*to_device(device, array.storage), array.dtype, array.shape)


def decoded(arrays, descales=(None, None, None)):
    """float64 values times their descales."""
    wide = []
    heads_kv = arrays[1].shape[2]
    for array, factors in zip(arrays, descales, strict=True):
        values = array.storage.view(E4M3).astype(np.float64)
        if factors is not None:
            full = np.broadcast_to(factors, (values.shape[0], heads_kv)).astype(np.float64)
            values = values * full.repeat(values.shape[2] // heads_kv, axis=1)[:, None, :, None]
        wide.append(values)
    return wide


def yardstick(wide, causal, scale):
    """float64 attention whose probabilities, up to 256, are rounded to float8."""
    q, k, v = wide
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
    scores = q.transpose(0, 2, 1, 3) @ k.swapaxes(-1, -2) * scale
    if causal:
        seq_q, seq_kv = scores.shape[-2:]
        scores[..., np.arange(seq_kv) > np.arange(seq_q)[:, None] + seq_kv - seq_q] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    weights = 256 * np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    rounded = weights.astype(E4M3).astype(np.float64)
    return (rounded @ v / np.where(total == 0, 1, total)).transpose(0, 2, 1, 3)


def relative_error(got, exact):
    norm = np.linalg.norm(exact)
    return np.linalg.norm(to_host(got).astype(np.float64) - exact) / (norm if norm else 1.0)


def check(
    device,
    arrays,
    causal=False,
    descales=(None, None, None),
    scale=None,
    dtype="bfloat16",
    precise=False,
):
    wide = decoded(arrays, descales)
    exact, exact_lse = reference.flash_attention(*wide, causal=causal, scale=scale, return_lse=True)
    out = poisoned(device, exact.shape, dtype)
    poison_pool(device)
    names = ("q_descale", "k_descale", "v_descale")
    got, lse = flash_attention(
        *(place(device, x) for x in arrays),
        causal=causal,
        scale=scale,
        return_lse=True,
        out=out,
        precise=precise,
        **dict(zip(names, to_device(device, *descales), strict=True)),
    )
    assert got is out
    if precise:
        assert relative_error(got, exact) <= PRECISE
    else:
        factor = 1 / math.sqrt(arrays[0].shape[-1]) if scale is None else scale
        allowed = FACTOR * relative_error(yardstick(wide, causal, factor), exact) + 4e-3
        assert relative_error(got, exact) <= allowed
    lse = to_host(lse)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact_lse))
    seen = np.isfinite(exact_lse)
    np.testing.assert_allclose(
        lse[seen], exact_lse[seen], rtol=LSE_RTOL[device], atol=LSE_ATOL[device]
    )
    hidden = ~seen.transpose(0, 2, 1)
    assert not to_host(got).astype(np.float32)[hidden].any()
    return got


RAGGED = [(1, 1), (70, 333), (203, 113)]
LONG = [(239, 1), (1, 239), (799, 3), (1023, 1024), (2100, 2100), (100, 9000)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", RAGGED)
def test_ragged_lengths(hopper, rng, lengths, head_dim, causal):
    check(hopper, random_heads(rng, lengths, (2, 1), head_dim), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", LONG)
def test_ragged_lengths_on_the_gpu(rng, lengths, head_dim, causal, heads):
    check("gpu", random_heads(rng, lengths, heads, head_dim, batch=2), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("lengths", [(70, 333), *LONG])
@emulated(lambda lengths, head_dim, causal: lengths == (70, 333) and causal != (head_dim < 128))
def test_precise(hopper, rng, lengths, head_dim, causal):
    """Values that every block widens by itself and, from nine tiles of queries on, those of a pass
    before."""
    if hopper == "cpu" and lengths != (70, 333):
        pytest.skip("slow where a CPU computes both sides")
    for heads in (2, 10) if head_dim == 64 else (2,) if head_dim == 80 else (10,):
        arrays = random_heads(rng, lengths, (heads, 1), head_dim)
        check(hopper, arrays, causal, precise=True)


@pytest.mark.parametrize("head_dim", [48, 80, 144])
def test_padded_heads(hopper, rng, head_dim):
    check(hopper, random_heads(rng, (70, 100), (2, 2), head_dim), True)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_descales(hopper, rng, shape):
    """A factor for all, for each key head, for each sequence and key head."""
    arrays = random_heads(rng, (40, 70), (4, 2), 64, batch=2)
    descales = [np.asarray(rng.uniform(0.3, 3, shape), np.float32) for _ in range(3)]
    check(hopper, arrays, True, descales)


def test_descales_are_numbers_too(hopper, rng):
    arrays = [place(hopper, x) for x in random_heads(rng, (20, 30), (1, 1), 64)]
    numbers = flash_attention(*arrays, q_descale=0.5, k_descale=2.0, v_descale=3.0)
    plain = flash_attention(*arrays)
    np.testing.assert_allclose(
        to_host(numbers).astype(np.float32),
        3 * to_host(plain).astype(np.float32),
        rtol=2e-2,
        atol=1e-3,
    )


def test_float16_out_and_a_scale(hopper, rng):
    check(hopper, random_heads(rng, (70, 100), (2, 1), 128), scale=0.2, dtype="float16")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_that_are_kept_outside_the_tensor_core(hopper, rng, monkeypatch, head_dim):
    """After every tile of 32 keys here, so that few tiles show it. Tiles come last keys first: the
    first ones weigh most, so that what was kept is rescaled. Lengths that no other test has: what
    is prepared for them is remembered."""

    def small(problem, device):
        config = plan.plan_float8(problem, device)
        tiling = replace(plan.TILINGS[problem.width], tile_n=32, kept_tiles=1)
        return replace(config, tiling=tiling)

    monkeypatch.setattr(flash_fp8, "plan_float8", small)
    arrays = random_heads(rng, (41, 131), (1, 1), head_dim)
    k = arrays[1].storage.view(E4M3).astype(np.float32)
    arrays[1] = encode(k * np.linspace(6, 1, 131)[None, :, None, None])
    check(hopper, arrays, True)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 9])
@emulated(lambda precise: not precise)  # its sums are exact
def test_values_of_one_sign(hopper, rng, group, causal, precise):
    """Errors of one sign would add up: the tensor core's sums are cut, not rounded. Values
    that one head reads, and that so many read that a pass over them comes first."""
    lengths = (700, 9000) if hopper == "gpu" else (20, 500)
    arrays = random_heads(rng, lengths, (group, 1), 128)
    values = np.abs(arrays[2].storage.view(E4M3).astype(np.float32))
    arrays[2] = encode(values)
    wide = decoded(arrays)
    exact = reference.flash_attention(*wide, causal=causal)
    got = flash_attention(*(place(hopper, x) for x in arrays), causal=causal, precise=precise)
    assert relative_error(got, exact) < (PRECISE if precise else ONE_SIGN)


def test_strided_storage(hopper, rng):
    """[batch, heads, seq, d] seen as [batch, seq, heads, d], and keys and values of one array."""
    arrays = [place(hopper, x) for x in random_heads(rng, (70, 100), (2, 2), 64, batch=2)]
    expected = to_host(flash_attention(*arrays, causal=True))

    def heads_first(x):
        storage = x.storage.swapaxes(1, 2).copy(order="C").swapaxes(1, 2)
        return NarrowArray(storage, x.dtype, x.shape)

    got = flash_attention(*map(heads_first, arrays), causal=True)
    assert to_host(got).tobytes() == expected.tobytes()
    q, k, v = arrays
    fused = type(k.storage)((2, 100, 4, 64), np.uint8)
    fused[:, :, :2], fused[:, :, 2:] = k.storage, v.storage
    halves = [NarrowArray(x, k.dtype, k.shape) for x in (fused[:, :, :2], fused[:, :, 2:])]
    assert to_host(flash_attention(q, *halves, causal=True)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_reruns_agree_to_the_bit(hopper, rng, causal, precise):
    lengths, heads = ((1600, 1777), (40, 8)) if hopper == "gpu" else ((40, 500), (2, 1))
    arrays = [place(hopper, x) for x in random_heads(rng, lengths, heads, 128)]
    first = None
    for repeat in range({"gpu": 20, "emulator": 3, "cpu": 1}[hopper]):
        poison_pool(hopper)
        with another_order(hopper, repeat):
            out, lse = flash_attention(*arrays, causal=causal, return_lse=True, precise=precise)
        bits = to_host(out).tobytes(), to_host(lse).tobytes()
        first = first or bits
        assert bits == first


def test_heads_that_the_kernel_does_not_serve_are_decoded(hopper, rng):
    """24 bytes a row are no whole chunks for the copy engine."""
    check(hopper, random_heads(rng, (30, 40), (2, 1), 24), True)


def test_options_that_the_kernel_does_not_serve_are_decoded(hopper, rng):
    arrays = random_heads(rng, (30, 40), (2, 1), 64)
    exact = reference.flash_attention(*decoded(arrays), causal=True, softcap=2.0)
    got = flash_attention(*(place(hopper, x) for x in arrays), causal=True, softcap=2.0)
    assert relative_error(got, exact) < 1e-2


def test_no_keys(hopper, rng):
    arrays = [place(hopper, x) for x in random_heads(rng, (5, 0), (2, 1), 64)]
    out, lse = flash_attention(*arrays, return_lse=True)
    assert not to_host(out).astype(np.float32).any()
    assert np.isneginf(to_host(lse)).all()


def test_refusals(rng):
    q, k, v = random_heads(rng, (5, 6), (2, 1), 64)
    dense = np.zeros((1, 6, 1, 64), np.float32)
    with pytest.raises(ArrayDtypeError, match="k must be float8_e4m3"):
        flash_attention(q, dense, v)
    with pytest.raises(ArrayDtypeError, match="v must be float8_e4m3"):
        flash_attention(q, k, NarrowArray(v.storage, float8_e5m2, v.shape))
    with pytest.raises(ArrayDtypeError, match="bfloat16 or float16"):
        flash_attention(q, k, v, out=np.zeros(q.shape, np.float32))
    with pytest.raises(ArrayShapeError, match="q_descale must be"):
        flash_attention(q, k, v, q_descale=np.ones(3, np.float32))
    with pytest.raises(ArrayDtypeError, match="k_descale must be float32"):
        flash_attention(q, k, v, k_descale=np.ones(1))
    with pytest.raises(ArrayDtypeError, match="forward only"):
        flash_attention_backward(dense, q, k, v, dense, dense)


def test_plan_serves_whole_chunks_on_hopper_alone():
    hopper, ampere = typical_device("sm_90"), typical_device("sm_80")
    problem = plan.Float8Problem(1, 64, 64, 2, 1, 64, "bfloat16", False)
    assert plan.covers(problem, hopper)
    assert not plan.covers(problem, ampere)
    for refused in ({"head_dim": 24}, {"seq_len_kv": 0}, {"batch": 1 << 17}, {"head_dim": 272}):
        fields = {**problem.__dict__, **refused}
        assert not plan.covers(plan.Float8Problem(**fields), hopper), refused
    for width, length, precise in itertools.product(plan.WIDTHS, (100, 5000), (False, True)):
        problem = plan.Float8Problem(
            2, length, length, 4, 2, width, "bfloat16", True, precise=precise
        )
        config = plan.plan_float8(problem, hopper)
        assert config.tiling.halves == precise
        assert config.spec().shared_bytes <= hopper.shared_bytes_per_block
        assert config.values_spec().shared_bytes <= hopper.shared_bytes_per_block
        slots = math.prod(config.values_grid) * config.tiling.tile_n * width
        assert config.values_bytes == (1 + precise) * slots
