"""gemv: every layout of few rows or columns, with any alignment and split of k."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.device import typical_device
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.gemm import gemv
from cukit.gemm.dense.cublas import Matrix
from cukit.gemm.dense.gemv import Operands, operands_of, plan_gemv
from cukit.reference import gemm as reference
from tests.contract import check_against_reference, poisoned, random, to_device, to_host

SIZES = [
    (1, 64, 256),
    (3, 200, 520),
    (8, 72, 2048),
    (16, 40, 264),
    (9, 17, 33),
    (1, 1, 1),
    (130, 5, 136),
    (70, 16, 100),
    (2, 130, 8200),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_every_layout(device, rng, m, n, k, dtype, transpose_a, transpose_b):
    a = random(rng, (k, m) if transpose_a else (m, k), dtype)
    b = random(rng, (n, k) if transpose_b else (k, n), dtype)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check_against_reference(gemv, reference.matmul, (a, b), device=device, **options)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("m", range(1, 17))
def test_every_number_of_tokens(device, rng, m, transpose_b):
    a = random(rng, (m, 264), "bfloat16")
    b = random(rng, (72, 264) if transpose_b else (264, 72), "bfloat16")
    options = {"transpose_b": transpose_b, "out_dtype": np.float32}
    check_against_reference(gemv, reference.matmul, (a, b), device=device, repeats=1, **options)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_views_with_gaps(device, rng, transpose_b):
    """Rows at any offset; memory between them is not changed."""
    a, b = random(rng, (4, 80), "float16"), random(rng, (64, 96), "float16")
    placed_a, placed_b = to_device(device, a, b)
    inner = slice(5, 69) if transpose_b else slice(3, 67)
    out = poisoned(device, (4, 100), "float16")
    target = out[:, 10:74] if transpose_b else out[:, 7:68]
    right, wide = (
        (placed_b[:, 3:67], b[:, 3:67].T) if transpose_b else (placed_b[:, 9:70], b[:, 9:70])
    )
    gemv(placed_a[:, inner], right, transpose_b=transpose_b, out=target)
    got = to_host(out).astype(np.float32)
    want = a[:, inner].astype(np.float32) @ wide.astype(np.float32)
    columns = slice(10, 74) if transpose_b else slice(7, 68)
    np.testing.assert_allclose(got[:, columns], want, rtol=2e-3, atol=2e-2)
    got[:, columns] = np.nan
    assert np.isnan(got).all()


def test_nonfinite_values_affect_only_their_own_results(device, rng):
    a, b = random(rng, (2, 72), "bfloat16"), random(rng, (40, 72), "bfloat16")
    b[7, 71] = np.nan
    out = to_host(gemv(*to_device(device, a, b), transpose_b=True)).astype(np.float32)
    assert np.isnan(out[:, 7]).all()
    assert np.isfinite(np.delete(out, 7, axis=1)).all()


def test_an_empty_k_gives_zeros(device):
    a, b = to_device(device, np.ones((2, 0), np.float16), np.ones((0, 9), np.float16))
    assert not to_host(gemv(a, b)).any()


def test_the_narrow_side_is_x():
    m_rows = (Matrix(3, 64, 64), Matrix(64, 200, 208), Matrix(3, 200, 200))
    assert operands_of(m_rows) == Operands(3, 200, 64, 64, 1, 208, True, 200, 1, False)
    n_columns = (Matrix(200, 64, 64), Matrix(64, 3, 3), Matrix(200, 3, 3))
    assert operands_of(n_columns) == Operands(3, 200, 64, 1, 3, 64, False, 1, 3, True)
    transposed = (Matrix(64, 200, 200, True), Matrix(3, 64, 64, True), Matrix(200, 3, 3))
    assert operands_of(transposed) == Operands(3, 200, 64, 64, 1, 200, True, 1, 3, True)


def test_plans_split_k_only_with_few_columns():
    def plan(columns, depth, along, arch="sm_90"):
        operands = Operands(1, columns, depth, depth, 1, depth, along, columns, 1, False)
        return plan_gemv(operands, "bfloat16", "bfloat16", typical_device(arch))

    for along in (False, True):
        assert plan(28672, 8192, along).cluster == 1
        assert plan(512, 8192, along).cluster > 1
        assert plan(512, 8192, along, "sm_80").cluster == 1
        assert plan(512, 64, along).cluster == 1
    assert [plan(n, 8192, False).tiles for n in (1024, 2048, 4096, 8192)] == [1, 2, 4, 4]
    for arch in ("sm_80", "sm_86", "sm_90"):
        config = plan(8192, 8192, True, arch)
        assert config.stages >= 3
        assert config.shared_bytes <= typical_device(arch).shared_bytes_per_block


ONES = np.ones((4, 8), np.float16)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (
            ONES.astype(np.float32),
            np.ones((8, 4), np.float32),
            ArrayDtypeError,
            "a must be float16",
        ),
        (np.ones((17, 8), np.float16), np.ones((8, 17), np.float16), ArrayShapeError, "at most 16"),
        (ONES, ONES, ArrayShapeError, "inner extents 8 and 4"),
    ],
)
def test_errors_name_the_argument(device, a, b, error, message):
    with pytest.raises(error, match=f"gemv: .*{message}"):
        gemv(*to_device(device, a, b))
