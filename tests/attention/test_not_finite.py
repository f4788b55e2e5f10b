"""Infinities and NaN affect only the results that depend on them; masked values affect none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cukit
from cukit.attention import flash_attention
from cukit.reference import attention as reference
from tests.attention import plain
from tests.attention.checks import check
from tests.attention.conftest import choose_class
from tests.contract import assert_close, random, to_device
from tests.quick_run import emulated

LSE_ATOL = 1e-5


@pytest.fixture(
    params=[
        "cpu",
        *(
            pytest.param(f"emulator {arch}", marks=pytest.mark.emulator)
            for arch in ("sm_80", "sm_90")
        ),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "gpu sm80")),
    ]
)
def anywhere(request, monkeypatch) -> Iterator[str]:
    """Both kernel classes, in the emulator too."""
    kind, _, name = request.param.partition(" ")
    if kind != "emulator":
        choose_class(request.param, monkeypatch)
        yield kind
        return
    with cukit.backend("emulator", arch=name):
        yield kind


def inputs_of(rng, seq_q=70, seq_kv=150):
    q, grad_out = (random(rng, (1, seq_q, 2, 64), "bfloat16") for _ in range(2))
    k, v = (random(rng, (1, seq_kv, 1, 64), "bfloat16") for _ in range(2))
    return q, k, v, grad_out


def check_quietly(device, q, k, v, grad_out, **options):
    with np.errstate(invalid="ignore"):
        check(device, q, k, v, grad_out, options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@emulated(lambda dtype: dtype == "bfloat16")
def test_a_bias_of_minus_infinity_masks(anywhere, rng, dtype):
    """Like a mask; some queries and some tiles are then fully masked."""
    bias = random(rng, (70, 150), dtype)
    bias[rng.random(bias.shape) < 0.4] = -np.inf
    bias[5:20] = -np.inf
    bias[:, :20] = -np.inf
    check_quietly(anywhere, *inputs_of(rng), bias=bias, causal=True)


@emulated(lambda anywhere: anywhere != "emulator sm_80")
def test_nan_of_a_query_stays_in_its_row(anywhere, rng):
    """In grad_k and grad_v, the NaN affects all keys that are visible to the query."""
    q, k, v, grad_out = inputs_of(rng)
    q[0, 7, 1, 3] = np.nan
    check_quietly(anywhere, q, k, v, grad_out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_value_stays_in_its_column(anywhere, rng, value):
    q, k, v, _ = inputs_of(rng)
    v[0, 130, 0, 5] = value
    out, lse = flash_attention(*to_device(anywhere, q, k, v), return_lse=True)
    wide = (x.astype(np.float64) for x in (q, k, v))
    exact, exact_lse = reference.flash_attention(*wide, return_lse=True)
    low, low_lse = plain.forward(q, k, v, False)
    assert_close("out", out, low, exact)
    assert_close("lse", lse, low_lse, exact_lse, LSE_ATOL)


def test_infinite_scores_are_nan(anywhere, rng):
    """Infinity minus infinity is NaN, only in the row of that query."""
    q, k, v, _ = inputs_of(rng)
    q[0, 9, 0, 2] = np.inf
    with np.errstate(invalid="ignore"):
        wide = (x.astype(np.float64) for x in (q, k, v))
        exact, exact_lse = reference.flash_attention(*wide, return_lse=True)
        low, low_lse = plain.forward(q, k, v, False)
        out, lse = flash_attention(*to_device(anywhere, q, k, v), return_lse=True)
    assert np.isnan(exact[0, 9, 0]).all()
    assert_close("out", out, low, exact)
    assert_close("lse", lse, low_lse, exact_lse, LSE_ATOL)
