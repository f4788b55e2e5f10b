"""Merged attention over two parts of the keys, against attention over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.core.arrays import bfloat16, float16
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.reference.attention import flash_attention as attend
from tests.contract import offset_by, to_device, to_host

TOLERANCES = {float16: 2.0**-9, bfloat16: 2.0**-6, np.dtype(np.float32): 1e-5}


def parts(dtype: Any, seed: int = 0) -> tuple[list[Any], Any, Any]:
    """Two states, of 30 and 50 keys, and the result of attention over all keys."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, 4, 64)) for n in (5, 80, 80))
    states: list[Any] = []
    for keys in (slice(0, 30), slice(30, 80)):
        out, lse = attend(q, k[:, keys], v[:, keys], return_lse=True)
        states += [np.ascontiguousarray(out.astype(dtype)), lse.astype(np.float32)]
    return states, *attend(q, k, v, return_lse=True)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_merged_parts_equal_the_full_attention(device: str, dtype: Any) -> None:
    states, want, want_lse = parts(dtype)
    out, lse = ck.merge_attention_states(*to_device(device, *states))
    assert np.abs(to_host(out).astype(np.float64) - want).max() < TOLERANCES[np.dtype(dtype)]
    np.testing.assert_allclose(to_host(lse), want_lse, atol=1e-5)


def test_a_state_without_keys_is_ignored(device: str) -> None:
    """Even where its output is NaN; without keys on both sides the result is zeros."""
    (a, lse_a, b, lse_b), *_ = parts(bfloat16)
    lse_b[0, 1], b[0, :, 1] = -np.inf, np.nan
    lse_a[1, 2], a[1, :, 2] = -np.inf, np.nan
    lse_a[0, 3] = lse_b[0, 3] = -np.inf
    a[0, :, 3] = np.nan
    out, lse = (
        to_host(x) for x in ck.merge_attention_states(*to_device(device, a, lse_a, b, lse_b))
    )
    assert (out[0, :, 1] == a[0, :, 1]).all()
    assert (out[1, :, 2] == b[1, :, 2]).all()
    assert (out[0, :, 3] == 0).all()
    assert np.isneginf(lse[0, 3]).all()
    assert (lse[1, 2] == lse_b[1, 2]).all()


def test_invalid_arguments_are_rejected(device: str) -> None:
    states, *_ = parts(bfloat16)
    placed = to_device(device, *states)
    with pytest.raises(ArrayShapeError, match="lse_b"):
        ck.merge_attention_states(placed[0], placed[1], placed[2], placed[3][:1])
    with pytest.raises(ArrayDtypeError, match="out_b"):
        ck.merge_attention_states(placed[0], placed[1], placed[2].astype(np.float16), placed[3])


@pytest.mark.parametrize("name", ["out_a", "out_b"])
def test_unaligned_arrays_are_rejected(device: str, name: str) -> None:
    """Also after a call with aligned arrays of the same shapes; the reference takes any address."""
    states, *_ = parts(bfloat16)
    placed = dict(
        zip(("out_a", "lse_a", "out_b", "lse_b"), to_device(device, *states), strict=True)
    )
    want, _ = ck.merge_attention_states(**placed)
    placed[name] = offset_by(placed[name], 8)
    if device == "cpu":
        assert (ck.merge_attention_states(**placed)[0] == want).all()
        return
    with pytest.raises(ArrayLayoutError, match=f"merge_attention_states: {name} must be 16-byte"):
        ck.merge_attention_states(**placed)
