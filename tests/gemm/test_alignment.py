"""Arrays that do not start at a multiple of 16 bytes, such as views of a buffer of parameters."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import cukit as ck
from cukit.errors import ArrayLayoutError
from cukit.gemm import BlockPattern, BlockSparseMatrix, pack_weight
from tests.contract import poisoned, random, to_device, to_host

M, N, K = 40, 48, 64
PATTERN = BlockPattern.from_mask(np.ones((2, 2), bool), 32)


def codes(storage, scales, dtype, axis, group_size=None):
    shape = storage.shape
    return ck.QuantizedArray(storage, dtype, shape, scales, axis=axis, group_size=group_size)


def rows_of(storage, scales, dtype=ck.float8_e4m3):
    return codes(storage, scales, dtype, 1)


def blocks_of(storage, scales, axis=1):
    return codes(storage, scales, ck.float8_e4m3, axis, 128)


def sparse(values):
    return BlockSparseMatrix(values, PATTERN)


def quantised(x, codes, scales, out):
    weight = ck.QuantizedArray(codes, ck.int4, (N, K), scales, axis=1, group_size=64)
    return ck.quantized_linear(x, pack_weight(weight), out=out)


# Shapes of the arguments: `codes` are bytes, `scales` float32, `ends` int32, others float16.
DENSE = {"a": (M, K), "b": (N, K), "out": (M, N)}
BYTES = {
    "a_codes": (M, K),
    "a_scales": (M, 1),
    "b_codes": (N, K),
    "b_scales": (N, 1),
    "out": (M, N),
}
WEIGHT = {"codes": (N, K // 2), "scales": (N, 1), "out": (M, N)}
OPS = {
    "matmul": (lambda a, b, out: ck.matmul(a, b, transpose_b=True, out=out), DENSE),
    "gemv": (
        lambda a, b, out: ck.gemv(a, b, transpose_b=True, out=out),
        {"a": (2, K), "b": (N, K), "out": (2, N)},
    ),
    "linear": (lambda a, b, out: ck.linear(a, b, None, "gelu", out=out), DENSE),
    "gated_linear": (
        lambda a, b, out: ck.gated_linear(a, b, out=out),
        {"a": (M, K), "b": (2 * N, K), "out": (M, N)},
    ),
    "quantized_linear": (quantised, {"x": (M, K), **WEIGHT}),
    "quantized_linear, many tokens": (quantised, {"x": (200, K), **WEIGHT, "out": (200, N)}),
    "matmul_fp8": (
        lambda a_codes, a_scales, b_codes, b_scales, out: ck.matmul_fp8(
            rows_of(a_codes, a_scales), rows_of(b_codes, b_scales), out=out
        ),
        BYTES,
    ),
    "matmul_fp8, scales of blocks": (
        lambda a_codes, a_scales, b_codes, b_scales, out: ck.matmul_fp8(
            blocks_of(a_codes, a_scales), blocks_of(b_codes, b_scales, (0, 1)), out=out
        ),
        BYTES | {"b_scales": (1, 1)},
    ),
    "matmul_int8": (
        lambda a_codes, a_scales, b_codes, b_scales, out: ck.matmul_int8(
            rows_of(a_codes.view(np.int8), a_scales, ck.int8),
            rows_of(b_codes.view(np.int8), b_scales, ck.int8),
            out=out,
        ),
        BYTES,
    ),
    "grouped_gemm": (
        lambda a, b, ends, out: ck.grouped_gemm(a, b, ends, out=out),
        {"a": (M, K), "b": (2, N, K), "ends": (3,), "out": (M, N)},
    ),
    "grouped_gemm_fp8": (
        lambda a_codes, a_scales, b_codes, b_scales, ends, out: ck.grouped_gemm_fp8(
            blocks_of(a_codes, a_scales), blocks_of(b_codes, b_scales, (1, 2)), ends, out=out
        ),
        BYTES | {"b_codes": (2, N, K), "b_scales": (2, 1, 1), "ends": (3,), "out": (M, N)},
    ),
    "bsr_matmul": (
        lambda values, b, out: ck.bsr_matmul(sparse(values), b, out=out),
        {"values": (4, 32, 32), "b": (64, N), "out": (64, N)},
    ),
    "bsr_matmul, sparse on the right": (
        lambda values, a, out: ck.bsr_matmul(a, sparse(values), transpose_b=True, out=out),
        {"values": (4, 32, 32), "a": (M, 64), "out": (M, 64)},
    ),
    "bsr_matmul, sampled": (
        lambda a, b, out: ck.bsr_matmul(a, b, pattern=PATTERN, out=sparse(out)).values,
        {"a": (64, N), "b": (N, 64), "out": (4, 32, 32)},
    ),
    "tree_matmul": (
        lambda a, b, out: ck.tree_matmul(a, b, transpose_b=True, leaf=32, out=out),
        DENSE,
    ),
}


def argument(rng, name, shape):
    if name.endswith("codes"):
        return rng.integers(0, 96, shape).astype(np.uint8)  # as float8_e4m3, at most 30
    if name.endswith("scales"):
        return rng.uniform(0.01, 0.02, shape).astype(np.float32)
    if name == "ends":
        return np.array([0, 10, M], np.int32)
    return random(rng, shape, "float16", scale=0.3)


def shifted(array):
    """A copy that starts one element after a multiple of 16 bytes."""
    xp = np if isinstance(array, np.ndarray) else __import__("cupy")
    memory = xp.empty(array.size + 32, array.dtype)
    address = memory.ctypes.data if xp is np else memory.data.ptr
    first = -address % 16 // array.itemsize + 1
    copy = memory[first : first + array.size].reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.filterwarnings("ignore:.*running the reference")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", OPS)
def test_correct_result_or_error_that_names_the_argument(device, rng, name, arch):
    """Each argument is misaligned in turn: a fault on the GPU would end the process."""
    if device == "cpu" or (device == "gpu" and arch == "sm_80"):
        pytest.skip("a requirement of the kernels; one GPU")
    function, shapes = OPS[name]
    arrays = {key: argument(rng, key, shape) for key, shape in shapes.items() if key != "out"}
    op = name.split(",")[0]
    arrays["out"] = np.zeros(shapes["out"], np.float16)
    want = np.array(function(**arrays)).astype(np.float64)
    for moved in arrays:
        placed = {key: to_device(device, value)[0] for key, value in arrays.items()}
        placed["out"] = poisoned(device, shapes["out"], "float16")
        placed[moved] = shifted(placed[moved])
        message = ""
        try:
            with ck.backend("emulator", arch=arch) if device == "emulator" else nullcontext():
                got = function(**placed)
        except ArrayLayoutError as error:
            message = str(error)
        if message:
            assert message.startswith(f"{op}: "), f"{moved}: {message}"
            assert "16-byte aligned on the GPU, got the address" in message
            continue
        error = np.abs(to_host(got).astype(np.float64) - want).max()
        assert error <= 2e-2 * np.abs(want).max(), f"{moved}: {error}"
