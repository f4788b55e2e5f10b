"""Attention of FP8 inputs: the kernel, and the fallback that decodes the inputs.

The oracle is the reference in float64 on the decoded inputs. The tolerance is the error of the same
computation with probabilities rounded to FP8, as the kernel rounds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cukit
from cukit.array_api import QuantizedArray, float8_e4m3, float8_e5m2
from cukit.attention import flash_attention, flash_attention_backward
from cukit.attention.flash import _flash_launch_sm90
from cukit.attention.flash import _flash_plan_sm90 as plan
from cukit.attention.flash._flash_tilings import Float8Tiling
from cukit.attention.flash._problem import FLOAT8, AttentionProblem
from cukit.core.device import typical_device
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.reference import attention as reference
from tests.attention import plain
from tests.attention.checks import on_device
from tests.attention.options import OPTIONS, options_of
from tests.contract import another_order, poison_pool, poisoned, to_device, to_host
from tests.quick_run import emulated

E4M3 = ml_dtypes.float8_e4m3fn
LSE_ATOL = {"cpu": 1e-4, "emulator": 1e-5, "gpu": 4e-3}
"""Hopper's tensor cores accumulate FP8 products with about 14 bits."""
LSE_RTOL = {"cpu": 1e-2, "emulator": 1e-5, "gpu": 1e-3}
"""On the CPU, inputs times their descales are rounded to BF16."""
ONE_SIGN = 2.5e-2
"""Error for values of one sign, with accumulators that are promoted at least every 1024 keys."""
PRECISE = 3e-3
"""Error with 16-bit probabilities; 1.7e-3 of it is the rounding of the output to BF16."""
SEQUENCES = 3e-2
"""Error with probabilities rounded to FP8: 2.7e-2 for values of both signs."""
FACTOR = 1.15
"""Bound of the kernel's error divided by that of `attention_with_rounding`. Both sum unrounded
probabilities; only the power of two that scales the probabilities differs."""


@pytest.fixture
def hopper(device) -> Iterator[str]:
    """As `device`; the emulator is a Hopper GPU, because only Hopper has an FP8 kernel."""
    if device != "emulator":
        yield device
        return
    with cukit.backend("emulator", arch="sm_90"):
        yield device


def encode(values):
    """NumPy values as a QuantizedArray."""
    return QuantizedArray(values.astype(E4M3).view(np.uint8), float8_e4m3, values.shape)


def random_heads(rng, lengths, heads, head_dim, batch=1, value_dim=None):
    (seq_q, seq_kv), (heads_q, heads_kv) = lengths, heads
    shapes = (
        (seq_q, heads_q, head_dim),
        (seq_kv, heads_kv, head_dim),
        (seq_kv, heads_kv, value_dim or head_dim),
    )
    return [encode(rng.standard_normal((batch, *shape))) for shape in shapes]


def place(device, array):
    return QuantizedArray(*to_device(device, array.storage), array.dtype, array.shape)


def decoded(arrays, descales=(None, None, None)):
    """float64 values times their descales, each [], [heads_kv] or [batch, heads_kv]."""
    wide = []
    heads_kv = arrays[1].shape[2]
    for array, factors in zip(arrays, descales, strict=True):
        values = array.storage.view(E4M3).astype(np.float64)
        if factors is not None:
            full = np.broadcast_to(factors, (values.shape[0], heads_kv)).astype(np.float64)
            values = values * full.repeat(values.shape[2] // heads_kv, axis=1)[:, None, :, None]
        wide.append(values)
    return wide


def attention_with_rounding(wide, causal=False, sinks=None, scale=None, **options):
    """Attention with probabilities (scaled to at most 256) rounded to FP8, otherwise float64."""
    q, k, v = wide
    if scale is not None:
        q = q * (scale * np.sqrt(q.shape[-1]))
    scores, _ = plain.scores_of(q, k, causal, **options)
    top = scores.max(axis=-1, keepdims=True)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    top = np.maximum(top, sink)
    top = np.where(top == -np.inf, 0, top)
    weights = 256 * np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + 256 * np.exp(sink - top)
    rounded = weights.astype(E4M3).astype(np.float64)
    values = np.repeat(v, q.shape[2] // k.shape[2], axis=2).transpose(0, 2, 1, 3)
    return (rounded @ values / np.where(total == 0, 1, total)).transpose(0, 2, 1, 3)


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
    options=None,
):
    wide = decoded(arrays, descales)
    options = {"causal": causal, "scale": scale} | (options or {})
    exact, exact_lse = reference.flash_attention(*wide, return_lse=True, **options)
    out = poisoned(device, exact.shape, dtype)
    poison_pool(device)
    names = ("q_descale", "k_descale", "v_descale")
    got, lse = flash_attention(
        *(place(device, x) for x in arrays),
        return_lse=True,
        out=out,
        precise=precise,
        **dict(zip(names, to_device(device, *descales), strict=True)),
        **on_device(device, options),
    )
    assert got is out
    if precise:
        assert relative_error(got, exact) <= PRECISE
    else:
        allowed = FACTOR * relative_error(attention_with_rounding(wide, **options), exact) + 4e-3
        assert relative_error(got, exact) <= allowed
    check_lse(device, lse, exact_lse)
    masked = np.isneginf(exact_lse).swapaxes(-1, -2)
    assert not to_host(got).astype(np.float32)[masked].any()
    return got


def check_lse(device, lse, exact):
    lse = to_host(lse)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact))
    seen = np.isfinite(exact)
    np.testing.assert_allclose(lse[seen], exact[seen], rtol=LSE_RTOL[device], atol=LSE_ATOL[device])


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
    """Each block widens V or, if more than eight query tiles read V, a separate kernel does."""
    if hopper == "cpu" and lengths != (70, 333):
        pytest.skip("slow: the CPU would compute both results")
    for heads in (2, 10) if head_dim == 64 else (2,) if head_dim == 80 else (10,):
        arrays = random_heads(rng, lengths, (heads, 1), head_dim)
        check(hopper, arrays, causal, precise=True)


@pytest.mark.parametrize("head_dim", [48, 80, 144])
def test_padded_heads(hopper, rng, head_dim):
    check(hopper, random_heads(rng, (70, 100), (2, 2), head_dim), True)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(hopper, rng, name, precise):
    """For windows and sinks, each block prepares V or, with ten heads per KV head, a separate
    kernel does; for per-score options, always the separate kernel."""
    if hopper == "emulator" and precise and name not in ("causal window, sinks", "everything"):
        pytest.skip("precise changes only the product with V")
    shapes = [((70, 333), (2, 1), 64)]
    if hopper == "gpu":
        shapes = [((150, 900), (4, 2), 128), ((150, 900), (20, 2), 128), ((300, 250), (4, 2), 256)]
    for lengths, heads, head_dim in shapes:
        batch = 2 if hopper == "gpu" else 1
        options = options_of(rng, OPTIONS[name], batch, heads[0], lengths, "bfloat16")
        arrays = random_heads(rng, lengths, heads, head_dim, batch)
        check(hopper, arrays, precise=precise, options=options)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window_size": (20, 3)}])
def test_descales_with_options(hopper, rng, options):
    """The softcap applies to the descaled products."""
    descales = [np.float32([0.4, 2.5]), np.float32(1.7), None]
    check(hopper, random_heads(rng, (40, 70), (4, 2), 64), descales=descales, options=options)


@pytest.mark.parametrize("widths", [(192, 128), (64, 128), (48, 80), (128, 16), (96, 256)])
def test_head_dims_of_values_may_differ(hopper, rng, widths):
    for heads in ((2, 2), (10, 1)):
        arrays = random_heads(rng, (70, 300), heads, widths[0], value_dim=widths[1])
        check(hopper, arrays, True, precise=heads == (2, 2) and widths[0] < 128)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(
    "requested", [{}, {"causal": True}, {"window_size": (60, 9), "sinks": True}]
)
@pytest.mark.parametrize("group", [1, 9])
def test_sequences(hopper, rng, group, requested, precise):
    """Packed sequences, some without queries, without keys, or both. Keys and values of sequences
    without queries are NaN; tiles of adjacent sequences include some of these rows."""
    if hopper == "emulator" and precise and not requested:
        pytest.skip("precise changes only the product with V")
    lengths_q, lengths_kv = [30, 0, 110, 64, 0, 1, 0], [100, 41, 0, 230, 0, 7, 60]
    if hopper == "gpu":
        lengths_q, lengths_kv = [30, 0, 110, 700, 0, 1, 512, 0], [100, 41, 0, 1500, 0, 7, 512, 300]
    ends = [np.cumsum([0, *each]).astype(np.int32) for each in (lengths_q, lengths_kv)]
    totals = sum(lengths_q), sum(lengths_kv)
    arrays = [
        QuantizedArray(x.storage[0], x.dtype, x.shape[1:])
        for x in random_heads(rng, totals, (2 * group, 2), 128)
    ]
    unseen = np.repeat(np.equal(lengths_q, 0), lengths_kv)
    zeroed = [x.storage.copy() for x in arrays]
    for array, other in zip(arrays[1:], zeroed[1:], strict=True):
        array.storage[unseen] = 0x7F  # NaN
        other[unseen] = 0
    # Powers of two, because on the CPU inputs times descales are rounded.
    descales = [np.float32(2.0 ** rng.integers(-1, 2, (len(lengths_q), 2))) for _ in range(3)]
    options = options_of(rng, requested, len(lengths_q), 2 * group, (1, 1), "bfloat16") | {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_kv": max(lengths_kv),
    }
    sequences = [np.repeat(np.arange(len(n)), n) for n in (lengths_q, lengths_kv, lengths_kv)]
    wide = []
    for array, factors, of in zip(zeroed, descales, sequences, strict=True):
        values = array.view(E4M3).astype(np.float64)
        factors = factors.repeat(values.shape[1] // 2, axis=1).astype(np.float64)
        wide.append(values * factors[of][..., None])
    exact, exact_lse = reference.flash_attention(*wide, return_lse=True, **options)
    names = ("q_descale", "k_descale", "v_descale")
    got, lse = flash_attention(
        *(place(hopper, x) for x in arrays),
        return_lse=True,
        precise=precise,
        **dict(zip(names, to_device(hopper, *descales), strict=True)),
        **on_device(hopper, options),
    )
    assert relative_error(got, exact) <= (SEQUENCES if hopper != "cpu" and not precise else PRECISE)
    check_lse(hopper, lse, exact_lse)
    masked = np.isneginf(exact_lse).swapaxes(-1, -2)
    assert not to_host(got).astype(np.float32)[masked].any()


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_descales(hopper, rng, shape):
    """One descale for all, per KV head, and per sequence and KV head."""
    arrays = random_heads(rng, (40, 70), (4, 2), 64, batch=2)
    descales = [np.asarray(rng.uniform(0.3, 3, shape), np.float32) for _ in range(3)]
    check(hopper, arrays, True, descales)


def test_descales_may_be_python_numbers(hopper, rng):
    arrays = [place(hopper, x) for x in random_heads(rng, (20, 30), (1, 1), 64)]
    numbers = flash_attention(*arrays, q_descale=0.5, k_descale=2.0, v_descale=3.0)
    without = flash_attention(*arrays)
    np.testing.assert_allclose(
        to_host(numbers).astype(np.float32),
        3 * to_host(without).astype(np.float32),
        rtol=2e-2,
        atol=1e-3,
    )


def test_float16_out_and_a_scale(hopper, rng):
    check(hopper, random_heads(rng, (70, 100), (2, 1), 128), scale=0.2, dtype="float16")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_partial_outputs(hopper, rng, monkeypatch, head_dim):
    """Accumulators are promoted after every tile of 32 keys, so that few tiles suffice. Tiles are
    processed from the last key to the first; the first keys have the largest weights, so that
    partial outputs are rescaled. Plans are cached, so no other test may use these lengths."""

    def small(problem, device, block_size):
        config = plan.plan_flash_attention_sm90(problem, device, block_size)
        return replace(config, tiling=replace(config.tiling, tile_n=32, promotion_interval=1))

    monkeypatch.setattr(_flash_launch_sm90, "plan_flash_attention_sm90", small)
    arrays = random_heads(rng, (41, 131), (1, 1), head_dim)
    k = arrays[1].storage.view(E4M3).astype(np.float32)
    arrays[1] = encode(k * np.linspace(6, 1, 131)[None, :, None, None])
    check(hopper, arrays, True)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 9])
@emulated(lambda precise: not precise)  # the emulator accumulates exactly
def test_values_of_one_sign(hopper, rng, group, causal, precise):
    """The tensor core truncates its FP8 sums, so values of one sign accumulate error. V is prepared
    by each block, or by a separate kernel if many query tiles read it."""
    lengths = (700, 9000) if hopper == "gpu" else (20, 500)
    arrays = random_heads(rng, lengths, (group, 1), 128)
    values = np.abs(arrays[2].storage.view(E4M3).astype(np.float32))
    arrays[2] = encode(values)
    wide = decoded(arrays)
    exact = reference.flash_attention(*wide, causal=causal)
    got = flash_attention(*(place(hopper, x) for x in arrays), causal=causal, precise=precise)
    assert relative_error(got, exact) < (PRECISE if precise else ONE_SIGN)


def test_strided_storage(hopper, rng):
    """[batch, heads, seq, d] viewed as [batch, seq, heads, d]; k and v as slices of one array."""
    arrays = [place(hopper, x) for x in random_heads(rng, (70, 100), (2, 2), 64, batch=2)]
    expected = to_host(flash_attention(*arrays, causal=True))

    def heads_first(x):
        storage = x.storage.swapaxes(1, 2).copy(order="C").swapaxes(1, 2)
        return QuantizedArray(storage, x.dtype, x.shape)

    got = flash_attention(*map(heads_first, arrays), causal=True)
    assert to_host(got).tobytes() == expected.tobytes()
    q, k, v = arrays
    fused = type(k.storage)((2, 100, 4, 64), np.uint8)
    fused[:, :, :2], fused[:, :, 2:] = k.storage, v.storage
    halves = [QuantizedArray(x, k.dtype, k.shape) for x in (fused[:, :, :2], fused[:, :, 2:])]
    assert to_host(flash_attention(q, *halves, causal=True)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_reruns_are_bitwise_equal(hopper, rng, causal, precise):
    lengths, heads = ((1600, 1777), (40, 8)) if hopper == "gpu" else ((40, 500), (2, 1))
    arrays = [place(hopper, x) for x in random_heads(rng, lengths, heads, 128)]
    first = None
    for repeat in range({"gpu": 20, "emulator": 3, "cpu": 2}[hopper]):
        poison_pool(hopper)
        with another_order(hopper, repeat):
            out, lse = flash_attention(*arrays, causal=causal, return_lse=True, precise=precise)
        bits = to_host(out).tobytes(), to_host(lse).tobytes()
        first = first or bits
        assert bits == first


def test_unsupported_head_dims_are_decoded(hopper, rng):
    """TMA needs rows of a multiple of 16 bytes; these rows have 24 bytes."""
    check(hopper, random_heads(rng, (30, 40), (2, 1), 24), True)


def test_no_keys(hopper, rng):
    arrays = [place(hopper, x) for x in random_heads(rng, (5, 0), (2, 1), 64)]
    out, lse = flash_attention(*arrays, return_lse=True)
    assert not to_host(out).astype(np.float32).any()
    assert np.isneginf(to_host(lse)).all()


def test_invalid_arguments_are_rejected(rng):
    q, k, v = random_heads(rng, (5, 6), (2, 1), 64)
    dense = np.zeros((1, 6, 1, 64), np.float32)
    with pytest.raises(ArrayDtypeError, match="k must be float8_e4m3"):
        flash_attention(q, dense, v)
    with pytest.raises(ArrayDtypeError, match="v must be float8_e4m3"):
        flash_attention(q, k, QuantizedArray(v.storage, float8_e5m2, v.shape))
    with pytest.raises(ArrayDtypeError, match="bfloat16 or float16"):
        flash_attention(q, k, v, out=np.zeros(q.shape, np.float32))
    with pytest.raises(ArrayShapeError, match="q_descale must be"):
        flash_attention(q, k, v, q_descale=np.ones(3, np.float32))
    with pytest.raises(ArrayDtypeError, match="k_descale must be float32"):
        flash_attention(q, k, v, k_descale=np.ones(1))
    with pytest.raises(ArrayDtypeError, match="have only a forward"):
        flash_attention_backward(dense, q, k, v, dense, dense)


PROBLEM = AttentionProblem(2, 5000, 5000, 4, 2, 64, FLOAT8, True, out_dtype="bfloat16")
HOPPER = typical_device("sm_90")


def test_class_sm90_covers_rows_of_whole_16_byte_accesses():
    assert plan.covers(PROBLEM, HOPPER)
    assert not plan.covers(PROBLEM, typical_device("sm_80"))
    for change in ({"head_dim": 24}, {"seq_len_kv": 0}, {"value_dim": 40}, {"head_dim": 272}):
        assert not plan.covers(replace(PROBLEM, **change), HOPPER), change


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("option", [{}, {"varlen": True}, {"bias": "float32"}, {"mask": True}])
@pytest.mark.parametrize("length", [100, 5000])
def test_plans_fit_an_sm(length, option, precise):
    static = 1024  # barriers, and the producer's data on each stage
    for widths in itertools.product(range(16, 257, 16), repeat=2):
        problem = replace(PROBLEM, seq_len_q=length, seq_len_kv=length, precise=precise, **option)
        config = plan.plan_flash_attention_sm90(
            replace(problem, head_dim=widths[0], value_dim=widths[1]), HOPPER
        )
        tiling = config.tiling
        assert isinstance(tiling, Float8Tiling)
        assert tiling.precise == precise
        assert config.spec().shared_bytes + static <= HOPPER.shared_bytes_per_block
        assert config.width % 32 == 0
        assert tiling.tile_n % 32 == 0
        values = config.values_spec()
        assert (values is None) == tiling.prepares
        if values is not None:
            assert values.shared_bytes <= HOPPER.shared_bytes_per_block


def test_blocks_prepare_values_if_there_are_few_query_tiles():
    def prepares(**fields):
        config = plan.plan_flash_attention_sm90(replace(PROBLEM, **fields), HOPPER)
        return config.tiling.prepares

    assert prepares(seq_len_q=256, num_heads_q=2)
    assert not prepares(seq_len_q=256, num_heads_q=20)
    assert not prepares(seq_len_q=2048, num_heads_q=2)
    assert not prepares(seq_len_q=256, num_heads_q=2, head_dim=256)


def test_every_sequence_has_its_own_tiles():
    """The planned number of tiles of V suffices for any lengths with the same total."""
    problem = replace(PROBLEM, batch=7, varlen=True)
    config = plan.plan_flash_attention_sm90(problem, HOPPER)
    tile = config.tiling.tile_n
    for lengths in ([1] * 7, [0] * 6 + [1000], [tile] * 7, [tile + 1] * 7, [3, 0, 900, 1, 0, 0, 2]):
        ends = np.cumsum([0, *lengths])
        first = [end // tile + b for b, end in enumerate(ends)]
        behind = [at + max(1, -(-n // tile)) for at, n in zip(first[:-1], lengths, strict=True)]
        assert all(end <= start for end, start in zip(behind, first[1:], strict=True))
        assert behind[-1] <= config.value_tiles(int(ends[-1]))
