"""Latent attention over a cache in blocks, with everything that may not be read poisoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention import mla
from cukit.attention.mla_plan import plan_mla_attention
from cukit.core.arrays import bfloat16, float16, namespace
from cukit.core.device import typical_device
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.reference import mla_attention as reference
from tests.quick_run import emulated

DTYPES = (float16, bfloat16)
ROUNDING = {float16: 2.0**-11, bfloat16: 2.0**-8}
BLOCK, LATENT, WIDTH = 64, 512, 576
HUGE = 2**30


class Latents:
    """A cache whose blocks lie in any order; what no request's rows are is NaN."""

    def __init__(
        self, lengths: list[int], *, heads: int = 16, seq_q: int = 1, dtype: Any = bfloat16,
        spread: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        """`spread`: standard deviation of the queries; large ones renew maxima often."""
        generator = np.random.default_rng(seed)
        counts = [-(-length // BLOCK) for length in lengths]
        order = generator.permutation(sum(counts) + 2).astype(np.int32)
        self.cache = np.full((order.size, BLOCK, 1, WIDTH), np.nan, dtype)
        self.table = np.full((len(lengths), max(counts, default=0) + 1), HUGE, np.int32)
        for b, (length, end) in enumerate(zip(lengths, np.cumsum(counts), strict=True)):
            blocks = order[end - counts[b] : end]
            self.table[b, : counts[b]] = blocks
            rows = generator.standard_normal((length, 1, WIDTH), np.float32).astype(dtype)
            places = np.arange(length)
            self.cache[blocks[places // BLOCK], places % BLOCK] = rows
        self.lengths = np.asarray(lengths, np.int32)
        shape = (len(lengths), seq_q, heads, WIDTH)
        self.q = (spread * generator.standard_normal(shape, np.float32)).astype(dtype)

    def arrays(self, xp: Any) -> list[Any]:
        return [xp.asarray(a) for a in (self.q, self.cache, self.table, self.lengths)]

    def check(self, device: str, **options: Any) -> None:
        """Result and lse, and the same bits again."""
        xp = pytest.importorskip("cupy") if device == "gpu" else np
        arrays = self.arrays(xp)
        out, lse = ck.mla_attention(*arrays, return_lse=True, **options)
        again = ck.mla_attention(*arrays, **options)
        host = np.asarray if xp is np else xp.asnumpy
        assert namespace(out) is xp
        assert host(out).tobytes() == host(again).tobytes()
        wide = np.nan_to_num(self.cache.astype(np.float64))
        want, want_lse = reference.mla_attention(
            self.q.astype(np.float64), wide, np.where(self.table == HUGE, 0, self.table),
            self.lengths, return_lse=True, **options,
        )  # fmt: skip
        got = host(out).astype(np.float64)
        assert np.isfinite(got).all()
        # P is rounded to 16 bits, and so is the output.
        bound = 2 * ROUNDING[np.dtype(self.q.dtype)] * (np.abs(want).max(initial=0) + 0.1)
        assert np.abs(got - want).max(initial=0) <= bound
        empty = np.isneginf(want_lse)
        assert (np.isneginf(host(lse)) == empty).all()
        np.testing.assert_allclose(host(lse)[~empty], want_lse[~empty], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths", [[1], [64], [0, 7, 200, 0, 65], [300, 1, 1, 1, 130, 64, 33], [1000]]
)
@emulated(lambda lengths, dtype: len(lengths) == 5)
def test_any_lengths(device: str, dtype: Any, lengths: list[int]) -> None:
    Latents(lengths, dtype=dtype).check(device)
