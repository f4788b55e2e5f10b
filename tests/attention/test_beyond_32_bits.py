"""Arrays of more than 2^31 elements, NaN except for the last sequences or heads, which are checked.

A wrapped 32-bit offset reads NaN, or leaves NaN in the output.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cukit.array_api import QuantizedArray, float8_e4m3
from cukit.attention import block_sparse_attention, flash_attention, flash_attention_backward
from cukit.reference import attention as reference
from cukit.reference import block_sparse_attention as block_sparse_reference
from tests.contract import BFLOAT16, assert_close, random

pytestmark = pytest.mark.gpu

MAX = 1 << 31
GIB = 1 << 30
LAST = 3  # sequences that are checked
HEADS, WIDTH = 2, 64
FLOAT8_NAN = 0x7F
FLOAT8_ERROR = 3e-2  # probabilities have three bits of mantissa

OPTIONS = {
    "no mask": {},
    "causal": {"causal": True},
    "window": {"window_size": (60, 10)},
}


@pytest.fixture(autouse=True)
def room():
    """Frees the memory pool before and after the test, which needs most of the GPU's memory."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def need(gib):
    import cupy

    free = cupy.cuda.Device().mem_info[0]
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / GIB:.0f} are free")


def nans(shape, dtype=BFLOAT16):
    """An array on the GPU, filled with NaN."""
    import cupy

    array = cupy.empty(shape, dtype)
    array.view(np.uint8).fill(FLOAT8_NAN if array.dtype.itemsize == 1 else 0xFF)
    return array


def ends_with(tail):
    """An array of more than 2^31 elements that ends with `tail`, a NumPy array [sequences, ...]."""
    import cupy

    count = MAX // tail[0].size + 1 + len(tail)
    array = nans((count, *tail.shape[1:]), tail.dtype)
    array[-len(tail) :] = cupy.asarray(tail)
    return array


def tails(rng, length, count=3):
    return [random(rng, (LAST, length, HEADS, WIDTH), "bfloat16") for _ in range(count)]


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


def check_forward(out, lse, q, k, v, **options):
    """Compares the results for the last sequences with float64."""
    exact, exact_lse = reference.flash_attention(*wide(q, k, v), return_lse=True, **options)
    low, low_lse = reference.flash_attention(q, k, v, return_lse=True, **options)
    assert_close("out", out[-len(q) :], low, exact)
    assert_close("lse", lse[-len(q) :], low_lse, exact_lse, 1e-5)


def check_backward(gradients, grad_out, q, k, v, **options):
    exact, exact_lse = reference.flash_attention(*wide(q, k, v), return_lse=True, **options)
    expected = reference.flash_attention_backward(
        *wide(grad_out, q, k, v), exact, exact_lse, **options
    )
    for name, got, exact in zip(("grad_q", "grad_k", "grad_v"), gradients, expected, strict=True):
        low = exact.astype(q.dtype)
        assert_close(name, got[-len(q) :], low, exact, 2e-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_forward(gpu, rng, name):
    need(20)
    last = tails(rng, 128)
    out, lse = flash_attention(*map(ends_with, last), return_lse=True, **OPTIONS[name])
    check_forward(out, lse, *last, **OPTIONS[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_backward(gpu, rng, name, deterministic):
    need(60)
    *last, last_grad = tails(rng, 128, 4)
    q, k, v, grad_out = map(ends_with, (*last, last_grad))
    out, lse = flash_attention(q, k, v, return_lse=True, **OPTIONS[name])
    gradients = flash_attention_backward(
        grad_out, q, k, v, out, lse, deterministic=deterministic, **OPTIONS[name]
    )
    check_backward(gradients, last_grad, *last, **OPTIONS[name])


@pytest.mark.parametrize("axis", ["batch", "row", "head"])
def test_strides(gpu, rng, axis):
    """Batch, row or head strides that span 2^31 elements, in all inputs and in the output."""
    import cupy

    need(20)
    shape = {"batch": (2, 40, 2, 64), "row": (1, 260, 2, 64), "head": (1, 40, 2, 64)}[axis]
    at = ("batch", "row", "head").index(axis)
    steps = [np.prod(shape[i + 1 :]) for i in range(4)]
    steps[at] = -(-(MAX + 1024) // (shape[at] - 1) // 64) * 64
    if axis == "head":  # rows are contiguous within a head
        steps[0], steps[1] = 64 * 40, 64

    def spread():
        memory = nans((MAX + (1 << 22),))
        return cupy.ndarray(shape, memory.dtype, memory.data, strides=[2 * int(n) for n in steps])

    dense = [cupy.asarray(random(rng, shape, "bfloat16")) for _ in range(4)]
    inputs = spread(), spread()  # k and v are one array
    inputs[0][...], inputs[1][...] = dense[0], dense[1]
    q, kv = inputs
    out, lse = flash_attention(q, kv, kv, causal=True, return_lse=True, out=spread())
    expected, expected_lse = flash_attention(
        dense[0], dense[1], dense[1], causal=True, return_lse=True
    )
    for got, wanted in ((out, expected), (lse, expected_lse)):
        np.testing.assert_array_equal(got.get(), wanted.get())
    gradients = flash_attention_backward(
        dense[3], q, kv, kv, out, lse, causal=True, deterministic=True
    )
    expected_gradients = flash_attention_backward(
        dense[3], dense[0], dense[1], dense[1], expected, lse, causal=True, deterministic=True
    )
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_array_equal(got.get(), wanted.get())


@pytest.mark.parametrize("causal", [False, True])
def test_sequences(gpu, rng, causal):
    """Packed sequences with enough heads that the last ones start beyond 2^31."""
    import cupy

    need(60)
    heads, length = 512, 200
    last = [random(rng, (1, length, 4, WIDTH), "bfloat16") for _ in range(4)]
    count = MAX // (length * heads * WIDTH) + 2
    arrays = []
    for tail in last:
        array = nans((count * length, heads, WIDTH))
        array[-length:, -4:] = cupy.asarray(tail[0])
        arrays.append(array)
    q, k, v, grad_out = arrays
    ends = cupy.arange(count + 1, dtype=np.int32) * length
    options = {
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": length,
        "max_seqlen_kv": length,
        "causal": causal,
    }
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    check_forward(out[None, -length:, -4:], lse[None, -4:, -length:], *last[:3], causal=causal)
    gradients = flash_attention_backward(grad_out, q, k, v, out, lse, **options)
    check_backward(
        [each[None, -length:, -4:] for each in gradients], last[3], *last[:3], causal=causal
    )


@pytest.mark.parametrize("name", ["bias", "float32 bias", "mask"])
def test_bias_and_mask(gpu, rng, name):
    """One matrix per head; that of the last head starts beyond 2^31 elements."""
    import cupy

    need(40)
    length, heads = 8192, 33
    dtype = {"bias": BFLOAT16, "float32 bias": np.dtype(np.float32), "mask": np.dtype(bool)}[name]
    matrix = (
        nans((1, heads, length, length), dtype)
        if name != "mask"
        else cupy.zeros((1, heads, length, length), dtype)
    )
    assert matrix[:, :-1].size >= MAX
    option = name.split()[-1]
    generator = cupy.random.default_rng(5)
    drawn = generator.standard_normal((length, length), dtype=np.float32)
    matrix[0, -1] = drawn > 0 if option == "mask" else drawn.astype(dtype)
    del drawn
    q, k, v, grad_out = (
        cupy.asarray(random(rng, (1, length, heads, WIDTH), "bfloat16")) for _ in range(4)
    )
    out, lse = flash_attention(q, k, v, return_lse=True, **{option: matrix})
    gradients = flash_attention_backward(grad_out, q, k, v, out, lse, **{option: matrix})
    of_last = [x[:, :, -1:].astype(np.float64) for x in (grad_out, q, k, v)]
    settings = {option: matrix[:, -1:].astype(np.float64 if option == "bias" else bool)}
    exact, exact_lse = reference.flash_attention(*of_last[1:], return_lse=True, **settings)
    expected = reference.flash_attention_backward(*of_last, exact, exact_lse, **settings)
    assert_close("lse", lse[:, -1:], exact_lse, exact_lse, 1e-5)
    for name, got, wanted in zip(
        ("out", "grad_q", "grad_k", "grad_v"), (out, *gradients), (exact, *expected), strict=True
    ):
        assert_close(name, got[:, :, -1:], wanted.astype(BFLOAT16), wanted)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("length", [384, 1152])
def test_float8(rng, length, precise):
    """V prepared by each block, and by a separate kernel."""
    need(20)
    last = [
        random(rng, (LAST, length, HEADS, WIDTH), "float32").astype(ml_dtypes.float8_e4m3fn)
        for _ in range(3)
    ]
    arrays = [ends_with(each.view(np.uint8)) for each in last]
    assert len(arrays[0]) <= 65535, "one sequence per block along a grid axis"
    out, lse = flash_attention(
        *(QuantizedArray(each, float8_e4m3, each.shape) for each in arrays),
        precise=precise,
        return_lse=True,
    )
    exact, exact_lse = reference.flash_attention(*wide(*last), return_lse=True)
    got = out[-LAST:].get().astype(np.float64)
    assert np.linalg.norm(got - exact) <= FLOAT8_ERROR * np.linalg.norm(exact)
    np.testing.assert_allclose(lse[-LAST:].get(), exact_lse, atol=4e-3)


def test_whole_blocks(rng):
    import cupy

    need(20)
    last = tails(rng, 300)
    mask = rng.random((HEADS, 3, 3)) < 0.6
    out, lse = block_sparse_attention(
        *map(ends_with, last), cupy.asarray(mask), block_size=128, return_lse=True
    )
    options = {"block_size": (128, 128), "return_lse": True}
    exact, exact_lse = block_sparse_reference.block_sparse_attention(*wide(*last), mask, **options)
    low, low_lse = block_sparse_reference.block_sparse_attention(*last, mask, **options)
    assert_close("out", out[-LAST:], low, exact)
    assert_close("lse", lse[-LAST:], low_lse, exact_lse, 1e-5)
