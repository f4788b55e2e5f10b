"""Ops and their references on arrays of a library that implements only the array API standard."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest

from cukit.distill import AdamWState, adamw
from cukit.registry import Op, get_kernel, ops
from tests.emulator.samples import SAMPLES, run

ON_OTHER_DTYPES = {"gemv", "pack_kv"}
"""Ops that support no dtype of array-api-strict, which lacks float16 and bfloat16."""
SAMPLED = [op for op in ops() if op.name in SAMPLES and op.name not in ON_OTHER_DTYPES]


def strict(array: np.ndarray) -> object:
    if array.dtype.kind not in "biu" and array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32)
    return array_api_strict.asarray(array.copy())


def plain(array: np.ndarray) -> np.ndarray:
    narrow = array.dtype.kind not in "biu" and array.dtype not in (np.float32, np.float64)
    return array.astype(np.float32) if narrow else array.copy()


@pytest.mark.parametrize("reference", [False, True], ids=["op", "reference"])
@pytest.mark.parametrize("op", SAMPLED, ids=lambda op: op.name)
def test_results_equal_those_of_numpy(op: Op, reference: bool):
    expected = run(op, plain, reference=reference)
    got = run(op, strict, reference=reference)
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_references_return_arrays_of_the_callers_library():
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 16), (16,)))
    rms_norm = get_kernel("rms_norm", platform="cpu")
    result = rms_norm(array_api_strict.asarray(x), array_api_strict.asarray(weight))
    assert result.__array_namespace__() is array_api_strict
    np.testing.assert_array_equal(np.from_dlpack(result), rms_norm(x, weight))
    assert type(rms_norm(x, weight)) is np.ndarray


def test_in_place_writes_are_visible_to_the_caller():
    weight = array_api_strict.ones(3, dtype=array_api_strict.float32)
    zeros = [array_api_strict.zeros(3, dtype=array_api_strict.float32) for _ in range(2)]
    state = AdamWState([weight], *([each] for each in zeros))
    adamw([weight], [weight * 0.5], state, lr=0.1, step=1)
    np.testing.assert_allclose(np.from_dlpack(weight), 0.9, rtol=2e-2)
