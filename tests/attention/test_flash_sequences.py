"""Packed variable-length sequences."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.attention import flash_attention, flash_attention_backward
from tests.attention import plain
from tests.attention.checks import compare_with_float64, run_forward_and_backward
from tests.attention.options import OPTIONS, options_of
from tests.contract import random, to_device, to_host
from tests.quick_run import emulated

SEQUENCES = {
    "some empty": ([5, 0, 70, 3, 0], [9, 4, 135, 0, 0]),
    "one": ([70], [31]),
    "all empty": ([0, 0], [0, 0]),
}
MANY = ([1, 239, 0, 799, 113, 203, 64, 128, 1023], [1, 1, 17, 3, 203, 113, 64, 0, 1024])


def check_sequences(device, rng, requested, lengths, heads=(2, 1), head_dim=64, value_dim=None,
                    room=0):  # fmt: skip
    dtype, value_dim = "bfloat16", value_dim or head_dim
    ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in lengths]
    total_q, total_kv = (int(each[-1]) for each in ends)
    most = [max(each) + room for each in lengths]
    q = random(rng, (total_q, heads[0], head_dim), dtype)
    k = random(rng, (total_kv, heads[1], head_dim), dtype)
    v = random(rng, (total_kv, heads[1], value_dim), dtype)
    grad_out = random(rng, (total_q, heads[0], value_dim), dtype)
    values = options_of(rng, requested, len(lengths[0]), heads[0], most, dtype)
    options = {
        **values,
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": most[0],
        "max_seqlen_kv": most[1],
    }
    low = plain_sequences(q, k, v, grad_out, values, ends)
    results = run_forward_and_backward(device, q, k, v, grad_out, options)
    compare_with_float64(results, q, k, v, grad_out, options, low)


def plain_sequences(q, k, v, grad_out, options, ends):
    """Output and gradients of tests.attention.plain, computed one sequence at a time."""
    out, gradients = np.zeros_like(grad_out), [np.zeros_like(x) for x in (q, k, v)]
    if "sinks" in options:
        gradients.append(np.zeros_like(options["sinks"]))
    for b in range(len(ends[0]) - 1):
        of_q, of_kv = (slice(each[b], each[b + 1]) for each in ends)
        lengths = [int(each[b + 1] - each[b]) for each in ends]
        part = {"causal": False, **options}
        for name in ("bias", "mask"):
            if name in part:
                matrix = part[name].reshape((1,) * (4 - part[name].ndim) + part[name].shape)
                matrix = matrix[b : b + 1] if matrix.shape[0] > 1 else matrix
                rows, columns = (
                    n if e > 1 else 1 for n, e in zip(lengths, matrix.shape[2:], strict=True)
                )
                part[name] = matrix[:, :, :rows, :columns]
        if "alibi_slopes" in part and part["alibi_slopes"].ndim == 2:
            part["alibi_slopes"] = part["alibi_slopes"][b : b + 1]
        arrays = (q[None, of_q], k[None, of_kv], v[None, of_kv])
        out[of_q] = plain.forward(*arrays, **part)[0][0]
        some = plain.backward(grad_out[None, of_q], *arrays, **part)
        for gradient, rows, value in zip(gradients, (of_q, of_kv, of_kv), some, strict=False):
            gradient[rows] = value[0]
        if "sinks" in options:
            gradients[3] += some[3]
    return (out, None), gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
@emulated(lambda name: name != "one")
def test_sequences_of_any_lengths(device_and_class, rng, name, causal):
    check_sequences(device_and_class, rng, {"causal": causal}, SEQUENCES[name])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (72, 40)])
def test_tiles_wider_than_the_heads(device, rng, head_dim, value_dim):
    """TMA boxes wholly beyond the last column are not loaded: TMA would access the base address of
    the tensor map, which may be outside the array. A GPU faults if that address is unmapped; the
    emulator always reports the access."""
    lengths = ([5, 0, 70, 130], [9, 4, 135, 140])
    check_sequences(device, rng, {"causal": True}, lengths, (2, 1), head_dim, value_dim, room=5)


@pytest.mark.parametrize("name", ["everything", "causal window, sinks"])
@emulated(lambda name: name == "everything")
def test_sequences_with_options(device_and_class, rng, name):
    check_sequences(device_and_class, rng, OPTIONS[name], SEQUENCES["some empty"], room=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "name"),
    [
        *((64, 64, name) for name in (None, *OPTIONS)),
        *((192, 128, name) for name in (None, *OPTIONS)),
        *((*dims, name) for dims in ((128, 128), (72, 40)) for name in (None, "everything")),
    ],
)
def test_many_sequences(gpu, rng, head_dim, value_dim, name):
    requested = {"causal": True} if name is None else OPTIONS[name]
    check_sequences(gpu, rng, requested, MANY, (6, 2), head_dim, value_dim, room=5)


def test_sequences_are_independent(device_and_class, rng):
    """NaN in the keys and values of one sequence does not affect the other sequences."""
    ends = np.array([0, 20, 45, 60], np.int32)
    q, k, v, grad_out = (random(rng, (60, 2, 64), "bfloat16") for _ in range(4))
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 25, "max_seqlen_kv": 25}
    clean = run_forward_and_backward(device_and_class, q, k, v, grad_out, options)
    for x in (k, v):
        x[20:45] = np.nan
    spoilt = run_forward_and_backward(device_and_class, q, k, v, grad_out, options)
    for row in (slice(0, 20), slice(45, 60)):
        np.testing.assert_array_equal(clean[0][row], spoilt[0][row])
        np.testing.assert_array_equal(clean[1][:, row], spoilt[1][:, row])
        for name in ("grad_q", "grad_k", "grad_v"):
            np.testing.assert_array_equal(clean[2][1][name][row], spoilt[2][1][name][row])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_captured_graph_replays_with_other_lengths(gpu, rng, causal):
    """Only the kernels read cu_seqlens, so a replay uses its current contents."""
    import cupy

    total, lengths = 900, [[100, 0, 500, 300], [300, 299, 1, 300], [0, 0, 512, 388]]
    q, k, v, grad_out = to_device("gpu", *(random(rng, (total, 2, 64), "bfloat16") for _ in "qkvg"))
    ends = cupy.zeros(5, np.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "causal": causal}
    options |= {"max_seqlen_q": 512, "max_seqlen_kv": 512}

    def attend():
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        arguments = (grad_out, q, k, v, out, lse)
        return out, lse, *flash_attention_backward(*arguments, deterministic=True, **options)

    def write(each):
        ends.set(np.cumsum([0, *each]).astype(np.int32))

    write(lengths[0])
    cupy.cuda.Device().synchronize()  # wait for the inputs: the other stream does not
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend()  # allocate memory before the capture
        stream.synchronize()
        stream.begin_capture()
        captured = attend()
        graph = stream.end_capture()
        for each in lengths:
            write(each)
            graph.launch(stream)
            stream.synchronize()
            replayed = [to_host(x).tobytes() for x in captured]
            assert replayed == [to_host(x).tobytes() for x in attend()]


def test_sequences_equal_a_batch(rng):
    """In the reference, packed sequences of equal length give the same bits as a batch."""
    q, k, v, grad_out = (random(rng, (2, 40, 2, 64), "bfloat16") for _ in range(4))
    ends = np.array([0, 40, 80], np.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 40, "max_seqlen_kv": 40}
    dense = run_forward_and_backward("cpu", q, k, v, grad_out, {"causal": True})
    flat = (x.reshape(80, 2, 64) for x in (q, k, v, grad_out))
    packed = run_forward_and_backward("cpu", *flat, {"causal": True, **options})
    np.testing.assert_array_equal(dense[0].reshape(80, 2, 64), packed[0])
    np.testing.assert_array_equal(dense[1].transpose(1, 0, 2).reshape(2, 80), packed[1])
    for name, gradient in dense[2][1].items():
        np.testing.assert_array_equal(gradient.reshape(80, 2, 64), packed[2][1][name])
