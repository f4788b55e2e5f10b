"""Latent attention over a paged cache, with NaN in everything that must not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.paged import mla
from cukit.attention.paged._mla_plan import plan_mla_attention
from cukit.core.arrays import bfloat16, float16, namespace
from cukit.core.device import typical_device
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayLayoutError,
    ArrayShapeError,
    ConfigError,
)
from cukit.reference import mla_attention as reference
from tests.contract import offset_by
from tests.quick_run import emulated

DTYPES = (float16, bfloat16)
ROUNDING = {float16: 2.0**-11, bfloat16: 2.0**-8}
BLOCK, LATENT, WIDTH = 64, 512, 576
HUGE = 2**30


class Latents:
    """A cache with shuffled blocks; rows of no request are NaN."""

    def __init__(
        self, lengths: list[int], *, heads: int = 16, seq_q: int = 1, dtype: Any = bfloat16,
        spread: float = 1.0, coded: bool = False, outlier: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        """coded: FP8 latents of different magnitudes. spread: standard deviation of the queries;
        large values update the row maxima often. outlier: factor of the latent of each request's
        first key; if it is not 1, no query attends to that key."""
        generator = np.random.default_rng(seed)
        counts = [-(-length // BLOCK) for length in lengths]
        order = generator.permutation(sum(counts) + 2).astype(np.int32)
        self.cache = np.full((order.size, BLOCK, 1, WIDTH), np.nan, dtype)
        if coded:
            self.cache = np.full((order.size, BLOCK, 1, reference.CODE_BYTES), 0xFF, np.uint8)
        self.table = np.full((len(lengths), max(counts, default=0) + 1), HUGE, np.int32)
        firsts = []
        for b, (length, end) in enumerate(zip(lengths, np.cumsum(counts), strict=True)):
            blocks = order[end - counts[b] : end]
            self.table[b, : counts[b]] = blocks
            rows = generator.standard_normal((length, 1, WIDTH), np.float32)
            rows[:1, 0, :LATENT] *= outlier
            firsts.append(rows[:1, 0, :LATENT].copy())
            if coded:
                magnitudes = 10 ** generator.uniform(-2, 0, (length, 1, LATENT // reference.GROUP))
                rows[..., :LATENT] *= magnitudes.repeat(reference.GROUP, axis=-1)
                rows = ck.encode_mla_latents(rows)
            places = np.arange(length)
            self.cache[blocks[places // BLOCK], places % BLOCK] = rows.astype(self.cache.dtype)
        self.lengths = np.asarray(lengths, np.int32)
        shape = (len(lengths), seq_q, heads, WIDTH)
        self.spread = spread
        q = spread * generator.standard_normal(shape, np.float32)
        for row, first in zip(q, firsts, strict=True):
            if outlier != 1 and first.size:
                direction = first[0] / np.linalg.norm(first)
                along = row[..., :LATENT] @ direction + 3 * spread
                row[..., :LATENT] -= along[..., None] * direction
        self.q = q.astype(dtype)

    def arrays(self, xp: Any) -> list[Any]:
        return [xp.asarray(a) for a in (self.q, self.cache, self.table, self.lengths)]

    def rows(self) -> Any:
        """The cache in float64, with zeros for NaN."""
        rows = self.cache
        if rows.dtype == np.uint8:
            rows = reference.decode_latents(rows)
        return np.nan_to_num(rows.astype(np.float64))

    def check(self, device: str, **options: Any) -> None:
        """Checks result and lse, and that a second call gives the same bits."""
        xp = pytest.importorskip("cupy") if device == "gpu" else np
        arrays = self.arrays(xp)
        out, lse = ck.mla_attention(*arrays, return_lse=True, **options)
        again = ck.mla_attention(*arrays, **options)
        host = np.asarray if xp is np else xp.asnumpy
        assert namespace(out) is xp
        assert host(out).tobytes() == host(again).tobytes()
        want, want_lse = reference.mla_attention(
            self.q.astype(np.float64),
            self.rows(),
            np.where(self.table == HUGE, 0, self.table),
            self.lengths,
            return_lse=True,
            **options,
        )
        got = host(out).astype(np.float64)
        assert np.isfinite(got).all()
        # Probabilities and output are rounded to 16 bits.
        bound = 2 * ROUNDING[np.dtype(self.q.dtype)] * (np.abs(want).max(initial=0) + 0.1)
        assert np.abs(got - want).max(initial=0) <= bound
        empty = np.isneginf(want_lse)
        assert (np.isneginf(host(lse)) == empty).all()
        # FP8 latents times their scales are rounded to float16.
        error = 1e-3 * self.spread if self.cache.dtype == np.uint8 and device != "cpu" else 5e-5
        np.testing.assert_allclose(host(lse)[~empty], want_lse[~empty], atol=error, rtol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths", [[1], [64], [0, 7, 200, 0, 65], [300, 1, 1, 1, 130, 64, 33], [1000]]
)
@emulated(lambda lengths: len(lengths) == 5)
def test_any_lengths(device: str, dtype: Any, lengths: list[int]) -> None:
    Latents(lengths, dtype=dtype).check(device)


@pytest.mark.parametrize("seq_q", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 16, 24, 64, 128])
@emulated(lambda heads, seq_q: (heads, seq_q) in ((24, 4), (64, 3), (128, 1)))
def test_any_heads_and_queries(device: str, heads: int, seq_q: int) -> None:
    """A tile holds several queries, or a query spans several tiles; one request has fewer keys than
    queries."""
    Latents([70, seq_q - 1, 0, 130], heads=heads, seq_q=seq_q).check(device)


@pytest.mark.parametrize(("heads", "seq_q"), [(16, 1), (5, 4), (64, 3), (128, 2)])
@emulated(lambda heads: heads != 128)
def test_float8_latents(device: str, heads: int, seq_q: int) -> None:
    """FP8 latents whose scales differ greatly between tokens; NaN in unused rows; tiles of 16, 32
    and 64 rows."""
    Latents([200, 0, 65, 3], heads=heads, seq_q=seq_q, coded=True).check(device)


@pytest.mark.parametrize("outlier", [1e5, 1e-5])
def test_a_latent_much_larger_or_smaller_than_the_others(device: str, outlier: float) -> None:
    """Trained models have an outlier at the first token, which must not affect other latents."""
    Latents([150, 70], heads=24, coded=True, outlier=outlier).check(device)


@pytest.mark.parametrize("spread", [1e-6, 16.0])
def test_queries_of_any_magnitude(device: str, spread: float) -> None:
    Latents([150, 3], heads=16, coded=True, spread=spread).check(device)


def test_latents_are_encoded(device: str, rng: np.random.Generator) -> None:
    """The error of latents is at most half a step and 0 for zeros; rotated columns are rounded to
    bfloat16."""
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    rows = rng.standard_normal((5, 2, WIDTH)).astype(np.float32)
    rows[1, 0, :300] = 0
    encoded = ck.encode_mla_latents(xp.asarray(rows))
    assert (encoded.shape, encoded.dtype) == ((5, 2, 656), np.uint8)
    decoded = reference.decode_latents(encoded if xp is np else xp.asnumpy(encoded))
    groups = np.abs(rows[..., :LATENT]).reshape(5, 2, -1, reference.GROUP)
    half_step = groups.max(axis=-1).repeat(reference.GROUP, axis=-1) * 16.01 / 448
    assert (np.abs(decoded - rows)[..., :LATENT] <= half_step).all()
    assert (decoded[..., LATENT:] == rows[..., LATENT:].astype(bfloat16)).all()
    with pytest.raises(ArrayShapeError, match="latents"):
        ck.encode_mla_latents(xp.asarray(rows[..., :-1]))


@pytest.mark.parametrize("options", [{"causal": False}, {"scale": 0.3}], ids=str)
def test_options(device: str, options: dict[str, Any]) -> None:
    Latents([90, 2], heads=3, seq_q=2, dtype=float16).check(device, **options)


@pytest.mark.parametrize(
    ("num_blocks", "heads", "seq_q", "coded"),
    [
        (1, 16, 1, False),
        (7, 5, 1, False),
        (3, 128, 1, False),
        (1, 16, 1, True),
        (2, 16, 2, True),
        (3, 64, 1, True),
    ],
)
def test_a_few_thread_blocks_share_requests(
    num_blocks: int, heads: int, seq_q: int, coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a thread block starts or ends within a request, or includes whole requests; row
    maxima change often; the order of threads does not matter."""

    def planned(*args: Any, **options: Any) -> Any:
        config = plan_mla_attention(*args, **options)
        return replace(config, num_blocks=num_blocks * config.team)

    monkeypatch.setattr(mla, "plan_mla_attention", planned)
    dtype = bfloat16 if coded else float16
    latents = Latents(
        [500, 3, 150, 0, 70], heads=heads, seq_q=seq_q, dtype=dtype, coded=coded, spread=4.0
    )
    mla._prepare.forget()  # type: ignore[attr-defined]
    try:
        with ck.backend("emulator"):
            latents.check("emulator")
            first: Any = ck.mla_attention(*latents.arrays(np))
        with ck.backend("emulator", seed=1, late=True):
            again: Any = ck.mla_attention(*latents.arrays(np))
        assert (again == first).all()
    finally:
        mla._prepare.forget()  # type: ignore[attr-defined]


def test_absorbed_projections_equal_flash_attention_of_the_prompt(device: str) -> None:
    """flash_attention of a prompt with head_dims 192 and 128, and mla_attention of its last queries
    on latents, give the same outputs."""
    rng = np.random.default_rng(2)
    heads, seq, last, hidden, q_rank = 3, 70, 2, 40, 24
    shapes = {
        "w_q": (heads * 192, q_rank), "w_o": (hidden, heads * 128),
        "w_uk": (heads, 128, LATENT), "w_uv": (heads, 128, LATENT),
    }  # fmt: skip
    weights = {n: rng.standard_normal(s) / np.sqrt(s[-1]) for n, s in shapes.items()}
    x, row = rng.standard_normal((seq, q_rank)), rng.standard_normal((seq, WIDTH))
    keys = np.concatenate(
        (
            np.einsum("hnl,sl->shn", weights["w_uk"], row[:, :LATENT]),
            np.broadcast_to(row[:, None, LATENT:], (seq, heads, WIDTH - LATENT)),
        ),
        axis=-1,
    )
    values = np.einsum("hvl,sl->shv", weights["w_uv"], row[:, :LATENT])
    queries = (x @ weights["w_q"].T).reshape(seq, heads, 192)
    dtype = np.float64 if device == "cpu" else np.float16
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    placed = [xp.asarray(a[None].astype(dtype)) for a in (queries, keys, values)]
    host = np.asarray if xp is np else xp.asnumpy
    prefill = host(ck.flash_attention(*placed, causal=True))[0, -last:]
    want = prefill.reshape(last, -1).astype(np.float64) @ weights["w_o"].T

    w_q, w_o = ck.absorb_mla_projections(*weights.values())
    q = (x[-last:] @ w_q.T).reshape(1, last, heads, WIDTH)
    cache = np.zeros((2, BLOCK, 1, WIDTH))
    cache.reshape(-1, WIDTH)[:seq] = row
    table, lengths = np.array([[0, 1]], np.int32), np.array([seq], np.int32)
    arrays = [xp.asarray(a) for a in (q.astype(dtype), cache.astype(dtype), table, lengths)]
    got = host(ck.mla_attention(*arrays)).reshape(last, -1).astype(np.float64) @ w_o.T
    assert np.abs(got - want).max() <= (1e-10 if device == "cpu" else 5e-3) * np.abs(want).max()


def test_the_plan() -> None:
    """The team size divides the row tiles of a request and the grid; the merge kernel has enough
    blocks."""
    h200 = typical_device("sm_90")
    for heads, seq_q, tiles in ((16, 1, 1), (128, 1, 2), (64, 3, 3), (128, 4, 8), (5, 1, 1)):
        config = plan_mla_attention(heads, seq_q, "bfloat16", h200)
        assert config.row_tiles == tiles
        assert config.row_tiles % config.team == 0
        assert config.num_blocks % config.team == 0
        assert config.num_blocks > h200.num_sms - config.team
        assert config.causal == (seq_q > 1)
    wide = plan_mla_attention(128, 1, "bfloat16", h200)
    assert [wide.units_per_merge_block(batch) for batch in (1, 32, 10**4)] == [1, 4, 64]
    with ck.backend("emulator"):
        assert ck.mla_metadata(128)[1:] == (2, 2, 4 * wide.scratch_floats)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((1, 1, 3, 512), np.float32)}, ArrayShapeError, "kv_cache"),
        ({"kv_cache": np.zeros((4, 64, 2, 576), np.float32)}, ArrayShapeError, "kv_cache"),
        ({"kv_cache": np.zeros((0, 64, 1, 576), np.float32)}, ArrayShapeError, "must not be 0"),
        ({"kv_cache": np.zeros((4, 64, 1, 576), np.float16)}, ArrayDtypeError, "kv_cache"),
        ({"block_table": np.zeros((1, 2), np.int64)}, ArrayDtypeError, "block_table"),
        ({"seq_lens": np.array([129], np.int32)}, ConfigError, "from 0 to 128"),
        ({"block_table": np.array([[4, 0]], np.int32)}, ConfigError, r"block_table\[0, 0\] is 4"),
        ({"latent_dim": 577}, ConfigError, "latent_dim"),
        ({"scale": 0.0}, ConfigError, "scale"),
        ({"causal": 1}, ConfigError, "causal"),
        ({"out": np.zeros((1, 1, 3, 576), np.float32)}, ArrayError, "out"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "q": np.zeros((1, 1, 3, 576), np.float32),
        "kv_cache": np.zeros((4, 64, 1, 576), np.float32),
        "block_table": np.array([[0, 1]], np.int32),
        "seq_lens": np.array([20], np.int32),
    }
    ck.mla_attention(**arguments)
    with pytest.raises(error, match=message):
        ck.mla_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 32}, "blocks must have 64 keys"),
        ({"width": 512}, "576 columns"),
        ({"dtype": np.float32}, "float16, bfloat16"),
        ({"columns": 656, "cache": np.uint8}, "bfloat16"),
        ({"columns": 576, "cache": np.uint8}, "656"),
    ],
    ids=str,
)
def test_errors_for_requirements_of_the_kernel(changes: dict[str, Any], message: str) -> None:
    block, width = changes.get("block", BLOCK), changes.get("width", WIDTH)
    dtype = changes.get("dtype", np.float16)
    q = np.zeros((1, 1, 3, width), dtype)
    columns = changes.get("columns", width)
    cache = np.zeros((4, block, 1, columns), changes.get("cache", dtype))
    table, lengths = np.array([[0, 1]], np.int32), np.array([20], np.int32)
    with ck.backend("emulator"), pytest.raises(ArrayError, match=message):
        ck.mla_attention(q, cache, table, lengths, latent_dim=min(width, LATENT))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", ["q", "kv_cache", "out"])
@pytest.mark.parametrize("offset", [2, 8])
def test_unaligned_arrays_are_rejected(device: str, name: str, offset: int, coded: bool) -> None:
    """Also after a call with aligned arrays of the same shapes; the reference takes any address."""
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    names = "q", "kv_cache", "block_table", "seq_lens"
    latents = Latents([70], heads=2, coded=coded)
    arguments = dict(zip(names, latents.arrays(xp), strict=True))
    want: Any = ck.mla_attention(**arguments)
    arguments["out"] = xp.empty_like(want)
    arguments[name] = offset_by(arguments[name], offset)
    if device == "cpu":
        result: Any = ck.mla_attention(**arguments)
        assert (result == want).all()
        return
    with pytest.raises(ArrayLayoutError, match=f"mla_attention: {name} must be 16-byte aligned"):
        ck.mla_attention(**arguments)


@pytest.mark.parametrize("coded", [False, True])
def test_strides_of_the_cache(device: str, coded: bool) -> None:
    """Every second block of a larger array; strides that TMA does not support are rejected."""
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    q, cache, table, lengths = Latents([150], heads=2, coded=coded).arrays(xp)
    want: Any = ck.mla_attention(q, cache, table, lengths)
    wide = xp.zeros((2 * len(cache), *cache.shape[1:]), cache.dtype)
    wide[::2] = cache
    spaced: Any = ck.mla_attention(q, wide[::2], table, lengths)
    assert (spaced == want).all()
    padded = xp.zeros((len(cache), cache[0].size + 4), cache.dtype)
    padded[:, :-4] = cache.reshape(len(cache), -1)
    strides = (padded.strides[0], *cache.strides[1:])
    odd = xp.lib.stride_tricks.as_strided(padded, cache.shape, strides)
    for view in (odd, xp.ascontiguousarray(cache[::-1])[::-1]):
        if device == "cpu":
            result: Any = ck.mla_attention(q, view, table, lengths)
            assert (result == want).all()
        else:
            with pytest.raises(ArrayLayoutError, match="strides of kv_cache must be positive"):
                ck.mla_attention(q, view, table, lengths)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("w_q", (31, 7)), ("w_o", (9, 9)), ("w_uk", (2, 40, 6)), ("w_uv", (3, 4, 6))],
)
def test_projections_of_the_wrong_shape_are_rejected(name: str, shape: tuple[int, ...]) -> None:
    shapes = {"w_q": (32, 7), "w_o": (9, 8), "w_uk": (2, 3, 6), "w_uv": (2, 4, 6)}
    arrays = {n: np.zeros(s, np.float32) for n, s in (shapes | {name: shape}).items()}
    with pytest.raises(ArrayShapeError, match=r"absorb_mla_projections: w_"):
        ck.absorb_mla_projections(**arrays)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths() -> None:
    import cupy

    arrays = Latents([100, 700, 3], heads=128, seed=3).arrays(cupy)
    out = cupy.empty((*arrays[0].shape[:-1], LATENT), arrays[0].dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ck.mla_attention(*arrays, out=out)
        stream.begin_capture()
        ck.mla_attention(*arrays, out=out)
        graph = stream.end_capture()
        for lengths in ([100, 700, 3], [5, 1, 0], [100, 650, 2]):
            arrays[3][...] = cupy.asarray(lengths, np.int32)
            graph.launch(stream)
            stream.synchronize()
            assert (out == ck.mla_attention(*arrays)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_large_batches_of_unequal_lengths(heads: int) -> None:
    lengths = np.random.default_rng(5).zipf(1.3, 40).clip(0, 9000).tolist()
    Latents([*lengths, 20000], heads=heads).check("gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [132, 128, 66])
def test_requests_of_one_length(batch: int) -> None:
    """Requests that are not split, so that nothing is merged."""
    Latents([300] * batch, heads=64).check("gpu")
