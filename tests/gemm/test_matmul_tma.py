"""matmul_tma: the product without bias or activation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.gemm import matmul_tma
from cukit.reference import gemm as reference
from tests.contract import check_against_reference, poisoned, to_device
from tests.gemm.test_linear import operands

transposed = partial(reference.matmul, transpose_b=True)


@pytest.mark.parametrize(("m", "n", "k"), [(130, 136, 72), (5, 7, 9), (0, 8, 8)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_reference(device, rng, m, n, k, dtype):
    inputs = operands(rng, m, n, k, dtype)
    check_against_reference(matmul_tma, transposed, inputs, device=device)


def test_out_is_returned(device, rng):
    a, b = to_device(device, *operands(rng, 20, 40, 64, "float16"))
    out = poisoned(device, (20, 40), "float16")
    assert matmul_tma(a, b, out=out) is out


def test_errors_name_the_argument(device):
    (a,) = to_device(device, np.ones((4, 16), np.float16))
    with pytest.raises(ArrayShapeError, match=r"matmul_tma: b must have shape \(any, 16\)"):
        matmul_tma(a, a[:, :8].copy())
    with pytest.raises(ArrayDtypeError, match="b must have the dtype of a"):
        matmul_tma(a, a.astype(np.float32))
