"""append_kv: new rows of a cache; all other rows must stay unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.paged.append_kv import plan_append_kv
from cukit.core.arrays import bfloat16, float16, namespace
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.reference import narrow
from cukit.reference.append_kv import append_kv as reference
from tests.quick_run import emulated

CODES: dict[str, Any] = {"": None, "int8": ck.int8, "float8_e4m3": ck.float8_e4m3}
STEP = {"int8": 1 / 127, "float8_e4m3": 1 / 14}
"""Largest distance between adjacent codes, relative to the largest value of a row."""


class Step:
    """New tokens in a strided projection, and a cache with random contents."""

    def __init__(
        self,
        codes: str,
        *,
        dtype: Any = bfloat16,
        tokens: int = 9,
        heads_q: int = 3,
        heads_kv: int = 2,
        head_dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 5,
        rotary_dim: int = 0,
    ) -> None:
        generator = np.random.default_rng(0)
        value_dim = value_dim or head_dim
        self.codes, self.block_size = codes, block_size
        widths = (heads_q * head_dim, heads_kv * head_dim, heads_kv * value_dim)
        projected = generator.standard_normal((tokens, sum(widths)), np.float32).astype(dtype)
        parts = np.split(projected, np.cumsum(widths)[:-1], axis=1)
        self.q, self.k, self.v = (
            part.reshape(tokens, heads, -1)
            for part, heads in zip(parts, (heads_q, heads_kv, heads_kv), strict=True)
        )
        blocks = 4 + tokens // block_size
        self.slots = generator.permutation(blocks * block_size)[:tokens]
        self.slots[1::4] = -1
        self.slots[2::7] = blocks * block_size + 2**33
        self.caches = []
        for width in (head_dim, value_dim):
            shape = blocks, block_size, heads_kv, width
            if codes:
                storage = generator.integers(0, 100, shape).astype(CODES[codes].storage_dtype)
                scales = np.full((blocks, heads_kv, block_size, 1), 7, np.float32).swapaxes(1, 2)
                self.caches.append((storage, scales))
            else:
                self.caches.append((np.full(shape, 7, dtype), None))
        self.rope_arguments: dict[str, Any] = {}
        if rotary_dim:
            angles = generator.uniform(0, 6, (50, rotary_dim // 2)).astype(np.float32)
            positions = generator.integers(0, 50, tokens).astype(np.int32)
            self.rope_arguments = {
                "q": self.q,
                "cos": np.cos(angles),
                "sin": np.sin(angles),
                "position_ids": positions,
            }

    def expected(self, **options: Any) -> tuple[Any, list[Any]]:
        """The expected queries and decoded caches, unchanged rows included."""
        exact = {n: a.astype(np.float64) if n == "q" else a for n, a in self.rope_arguments.items()}
        caches = [np.array(cache.astype(np.float64)) for cache in self.values()]
        q = reference(
            *(array.astype(np.float64) for array in (self.k, self.v)),
            *(*caches, self.slots),
            **(exact | options),
        )
        return q, caches

    def values(self) -> list[Any]:
        """The decoded caches, in float32."""
        return [self.decoded(storage, scales) for storage, scales in self.caches]

    def decoded(self, storage: Any, scales: Any) -> Any:
        """Codes times scales, or the storage of a float cache."""
        if scales is None:
            return storage.astype(np.float32)
        return narrow.decode(storage, self.codes, storage.shape[-1]) * scales

    def check(self, device: str, **options: Any) -> None:
        """Checks new rows to within rounding, all others bit for bit."""
        xp = pytest.importorskip("cupy") if device == "gpu" else np
        host = np.asarray if xp is np else xp.asnumpy
        q_want, want = self.expected(**options)
        copies: list[Any] = [
            [None if array is None else xp.asarray(array.copy(order="K")) for array in cache]
            for cache in self.caches
        ]
        given: list[Any] = [
            ck.QuantizedArray(storage, CODES[self.codes], storage.shape, scales=scales, axis=-1)
            if self.codes
            else storage
            for storage, scales in copies
        ]
        rope_arguments = {name: xp.asarray(array) for name, array in self.rope_arguments.items()}
        k, v, slots = (xp.asarray(array) for array in (self.k, self.v, self.slots))
        q: Any = ck.append_kv(k, v, given[0], given[1], slots, **rope_arguments, **options)
        assert (q is None) == ("q" not in rope_arguments)
        if q is not None:
            assert namespace(q) is xp
            error = np.abs(host(q).astype(np.float64) - q_want).max()
            assert error <= 2.0**-8 * np.abs(q_want).max()
        rows = np.zeros(want[0].shape[:2], bool)
        kept = self.slots[(self.slots >= 0) & (self.slots < rows.size)]
        rows.reshape(-1)[kept] = True
        for (storage, scales), before, expected in zip(copies, self.values(), want, strict=True):
            got = self.decoded(host(storage), None if scales is None else host(scales))
            assert (got[~rows] == before[~rows]).all()
            largest = np.abs(expected[rows]).max(axis=-1, keepdims=True)
            step = STEP[self.codes] * 0.52 if self.codes else 2.0**-8
            assert (np.abs(got[rows] - expected[rows]) <= step * largest + 1e-6).all()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@emulated(lambda head_dim, dtype: head_dim == 80 or (head_dim == 16 and dtype == bfloat16))
def test_new_rows_match_the_reference(device: str, codes: str, dtype: Any, head_dim: int) -> None:
    step = Step(codes, dtype=dtype, head_dim=head_dim, value_dim=head_dim // 16 * 8 or 8)
    if codes:
        step = Step(codes, dtype=dtype, head_dim=head_dim, value_dim=max(16, head_dim // 32 * 16))
    step.check(device)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32), (256, 128)])
@emulated(lambda head_dim: head_dim in (64, 80))
def test_rotated_rows(
    device: str, codes: str, interleaved: bool, head_dim: int, rotary_dim: int
) -> None:
    Step(codes, head_dim=head_dim, rotary_dim=rotary_dim).check(device, interleaved=interleaved)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3"])
def test_codes_equal_those_of_quantize(device: str, codes: str) -> None:
    """Bit for bit, for rows of zeros and of tiny values. Rows with an infinity or NaN have the same
    scales, but any codes."""
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    host = np.asarray if xp is np else xp.asnumpy
    new = np.random.default_rng(0).standard_normal((6, 2, 64)).astype(float16)
    new[0], new[1, 0, 3], new[2, 1, 5] = 0, np.inf, np.nan
    new[3] *= 1e-4
    shape = 3, 2, 2, 64
    caches: list[Any] = [
        ck.QuantizedArray(
            xp.zeros(shape, CODES[codes].storage_dtype),
            CODES[codes],
            shape,
            scales=xp.ones((*shape[:3], 1), xp.float32),
            axis=-1,
        )
        for _ in range(2)
    ]
    ck.append_kv(xp.asarray(new), xp.asarray(-new), caches[0], caches[1], xp.arange(6))
    for cache, values in zip(caches, (new, -new), strict=True):
        want: Any = ck.quantize(values, CODES[codes])
        scales = host(cache.scales).reshape(want.scales.shape)
        np.testing.assert_array_equal(scales, want.scales)
        finite = np.isfinite(scales[..., 0])
        got = host(cache.storage).reshape(want.storage.shape)
        assert (got[finite] == want.storage[finite]).all()


def test_a_step_of_the_manager(device: str) -> None:
    """Queries are rotated in place; paged_attention then reads the whole sequence."""
    cache = ck.KVCacheManager(16, 4, num_heads_kv=2, head_dim=64)
    xp = namespace(cache.slab.array)
    if (device == "gpu") != (xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    generator = np.random.default_rng(0)
    shape = 11, 2, 64
    k, v, q = (
        xp.asarray(generator.standard_normal(shape, np.float32).astype(np.float16))
        for _ in range(3)
    )
    cache.allocate("a", range(11))
    slots = xp.asarray(cache.slots("a"))
    angles = generator.uniform(0, 6, (11, 32)).astype(np.float32)
    tables = xp.asarray(np.cos(angles)), xp.asarray(np.sin(angles))
    positions = xp.arange(11, dtype=xp.int32)
    turned_q, turned_k = ck.rope(q[None], k[None], *tables)
    q_out: Any = ck.append_kv(
        *(k, v, cache.keys(0), cache.values(0), slots),
        q=q, cos=tables[0], sin=tables[1], position_ids=positions, out=q,
    )  # fmt: skip
    assert q_out is q
    table, lengths = map(xp.asarray, cache.block_table(["a"]))
    out: Any = ck.paged_attention(q[None], cache.keys(0), cache.values(0), table, lengths)
    want: Any = ck.flash_attention(turned_q, turned_k, v[None], causal=True)
    assert float(abs(out.astype(np.float32) - want.astype(np.float32)).max()) < 4e-3


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3"])
def test_codes_in_the_managers_slab(device: str, codes: str) -> None:
    """Codes are shared with a fork that appends a token and is swapped out and back; then
    paged_attention reads them."""
    cache = ck.KVCacheManager(8, 4, num_layers=2, num_heads_kv=2, head_dim=64, dtype=CODES[codes])
    xp = namespace(cache.slab.array)
    if (device == "gpu") != (xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    assert cache.slab.block_bytes == 2 * 2 * 4 * 2 * (64 + 4)
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((2, 11, 2, 64), np.float32).astype(np.float16)
    k, v, q = (xp.asarray(x) for x in (*rows, rows[0]))
    cache.allocate("a", range(10))
    ck.append_kv(k[:10], v[:10], cache.keys(1), cache.values(1), xp.asarray(cache.slots("a")))
    cache.fork("a", "b")
    slots = cache.append("b", [10])
    ck.append_kv(k[10:], v[10:], cache.keys(1), cache.values(1), xp.asarray(slots))
    cache.preempt("b", by="swap")
    cache.keys(1).scales[...] = xp.where(
        xp.asarray([cache.block(i).references == 0 for i in range(8)])[:, None, None, None],
        xp.float32(np.nan),
        cache.keys(1).scales,
    )
    cache.resume("b")
    table, lengths = map(xp.asarray, cache.block_table(["b"]))
    out: Any = ck.paged_attention(q[None, -1:], cache.keys(1), cache.values(1), table, lengths)
    want: Any = ck.flash_attention(q[None, -1:], k[None], v[None], causal=True)
    assert float(abs(out.astype(np.float32) - want.astype(np.float32)).max()) < 3 * STEP[codes]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": np.zeros((2, 1, 8), np.float32)}, ArrayDtypeError, "dtype"),
        ({"v": np.zeros((3, 1, 8), np.float16)}, ArrayShapeError, "v"),
        ({"k_cache": np.zeros((2, 4, 2, 8), np.float16)}, ArrayShapeError, "k_cache"),
        ({"slots": np.zeros(3, np.int64)}, ArrayShapeError, "slots"),
        ({"slots": np.zeros(2, np.float32)}, ArrayDtypeError, "slots"),
        ({"q": np.zeros((2, 1, 8), np.float16)}, ConfigError, "q requires cos"),
        ({"cos": np.zeros((4, 4), np.float32)}, ConfigError, "go together"),
        ({"out": np.zeros((2, 1, 8), np.float16)}, ConfigError, "out requires q"),
        ({"interleaved": 1}, ConfigError, "interleaved"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "k": np.zeros((2, 1, 8), np.float16),
        "v": np.zeros((2, 1, 8), np.float16),
        "k_cache": np.zeros((2, 4, 1, 8), np.float16),
        "v_cache": np.zeros((2, 4, 1, 8), np.float16),
        "slots": np.zeros(2, np.int64),
    }
    with pytest.raises(error, match=message):
        ck.append_kv(**(arguments | change))


def test_overlapping_caches_are_rejected() -> None:
    cache, new = np.zeros((2, 4, 1, 8), np.float16), np.zeros((2, 1, 8), np.float16)
    with pytest.raises(ArrayError, match="overlaps"):
        ck.append_kv(new, new, cache, cache, np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "team"), [(8, 8, 1), (64, 64, 4), (80, 64, 8), (128, 256, 16)]
)
def test_team_sizes(head_dim: int, value_dim: int, team: int) -> None:
    assert plan_append_kv("float16", 0, 1, head_dim, value_dim).team == team
