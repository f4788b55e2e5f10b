"""Cases for `tests.sanitize`: both kernel classes, all widths, options, varlen, caches and FP8."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukit.array_api import QuantizedArray, float8_e4m3, int4, int8
from cukit.attention import (
    RecentKV,
    append_kv,
    attention_kl,
    attention_kl_backward,
    block_sparse_attention,
    cascade_attention,
    encode_mla_latents,
    flash_attention,
    flash_attention_backward,
    indexer_kl,
    indexer_kl_backward,
    merge_attention_states,
    mla_attention,
    pack_kv,
    paged_attention,
)
from cukit.attention.paged import _cascade_plan
from tests.attention.checks import inputs_of, run_forward_and_backward
from tests.attention.conftest import choose_class
from tests.attention.options import OPTIONS, options_of
from tests.contract import poisoned, random, to_device, to_host
from tests.sanitize import Group

LENGTHS = [(130, 200), (200, 130)]
SEQUENCES = ([70, 0, 13, 130, 1, 64], [70, 9, 0, 200, 1, 128])
TOGETHER = ("everything", "causal window, sinks", "bias, mask", "alibi of each sequence, softcap")

Dims = tuple[int, int]


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _attend(requested: dict[str, Any], dims: Dims, lengths: tuple[int, int]) -> None:
    """Forward, default backward and deterministic backward."""
    rng = _rng()
    q = random(rng, (1, lengths[0], 2, dims[0]), "bfloat16")
    k = random(rng, (1, lengths[1], 1, dims[0]), "bfloat16")
    v = random(rng, (1, lengths[1], 1, dims[1]), "bfloat16")
    grad_out = random(rng, (1, lengths[0], 2, dims[1]), "bfloat16")
    options = options_of(rng, requested, 1, 2, lengths, "bfloat16")
    out, _, gradients = run_forward_and_backward("gpu", q, k, v, grad_out, options)
    for array in (out, *(x for way in gradients for x in way.values())):
        assert np.isfinite(array.astype(np.float32)).all()


def plain(*widths: Dims) -> None:
    """With and without a causal mask; more keys than queries, and more queries than keys."""
    for dims, lengths, causal in itertools.product(widths, LENGTHS, (False, True)):
        _attend({"causal": causal}, dims, lengths)


def with_options(dims: Dims, names: tuple[str, ...]) -> None:
    for name in names:
        _attend(OPTIONS[name], dims, LENGTHS[0])


def gradients_side_by_side() -> None:
    """The backward with rope, into slices of one array. Four query heads per KV head produce
    partial sums, which a separate launch adds and rotates; other shapes need no such launch."""
    for width, heads, seq_len in ((64, (2, 2), 200), (128, (2, 2), 200), (64, (4, 1), 70)):
        arrays = inputs_of(_rng(), (seq_len, seq_len), heads, width)
        q, k, v, grad_out = to_device("gpu", *arrays)
        angles = _rng().random((seq_len, width // 2), np.float32)
        tables = to_device("gpu", np.cos(angles), np.sin(angles))
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        whole = poisoned("gpu", (1, seq_len, sum(heads) + heads[1], width), "bfloat16")
        targets = np.split(np.arange(whole.shape[2]), np.cumsum(heads))
        flash_attention_backward(
            grad_out, q, k, v, out, lse, causal=True, rope=tuple(tables),
            gradients=tuple(whole[:, :, each[0] : each[-1] + 1] for each in targets),
        )  # fmt: skip
        assert np.isfinite(to_host(whole).astype(np.float32)).all()


def sequences(dims: Dims) -> None:
    """Many packed sequences of different lengths, some empty; without options and with all."""
    rng = _rng()
    ends = [np.cumsum([0, *each]).astype(np.int32) for each in SEQUENCES]
    most = [max(each) + 5 for each in SEQUENCES]
    q = random(rng, (int(ends[0][-1]), 4, dims[0]), "bfloat16")
    k = random(rng, (int(ends[1][-1]), 2, dims[0]), "bfloat16")
    v = random(rng, (int(ends[1][-1]), 2, dims[1]), "bfloat16")
    grad_out = random(rng, (int(ends[0][-1]), 4, dims[1]), "bfloat16")
    packed = {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": most[0],
        "max_seqlen_kv": most[1],
    }
    for requested in ({}, {"causal": True}, OPTIONS["everything"]):
        options = options_of(rng, requested, len(SEQUENCES[0]), 4, most, "bfloat16")
        run_forward_and_backward("gpu", q, k, v, grad_out, {**options, **packed})


def block_sparse(head_dim: int) -> None:
    rng = _rng()
    q = random(rng, (1, 200, 2, head_dim), "bfloat16")
    k = random(rng, (1, 300, 1, head_dim), "bfloat16")
    for size in (128, 64, 50):
        mask = rng.random((2, -(-200 // size), -(-300 // size))) < 0.6
        for options in ({}, {"causal": True}, {"window_size": (90, 20), "softcap": 3.0}):
            placed = to_device("gpu", q, k, k, mask)
            to_host(block_sparse_attention(*placed, block_size=size, **options))


def float8(head_dim: int) -> None:
    """FP8 with V prepared by each block, and by a separate kernel."""
    rng = _rng()
    for length in (130, 1200):
        arrays = [
            rng.standard_normal((1, n, heads, head_dim)).astype(ml_dtypes.float8_e4m3fn)
            for n, heads in ((length, 1), (300, 1), (300, 1))
        ]
        for causal, precise in itertools.product((False, True), (False, True)):
            placed = to_device("gpu", *(x.view(np.uint8) for x in arrays))
            narrow = (QuantizedArray(x, float8_e4m3, x.shape) for x in placed)
            out = flash_attention(*narrow, causal=causal, q_descale=0.5, precise=precise)
            assert np.isfinite(to_host(out).astype(np.float32)).all()


def paged(head_dim: int, **options: Any) -> None:
    """Requests of different lengths, one of them empty, that share thread blocks."""
    rng = _rng()
    q = random(rng, (4, 2, 6, head_dim), "bfloat16")
    k = random(rng, (60, 16, 2, head_dim), "bfloat16")
    v = random(rng, (60, 16, 2, head_dim), "bfloat16")
    table = rng.permutation(60)[:56].reshape(4, 14).astype(np.int32)
    lengths = np.array([200, 0, 3, 130], np.int32)
    placed = to_device("gpu", q, k, v, table, lengths)
    out, lse = paged_attention(*placed, return_lse=True, **options)
    to_host(merge_attention_states(out, lse, out, lse)[0])


def two_requests(rng: np.random.Generator, packed: bool) -> tuple[Any, dict[str, Any]]:
    """Queries of two requests of at least three keys: one each or, packed, 150 and 1."""
    if not packed:
        return random(rng, (2, 1, 6, 128), "bfloat16"), {}
    (ends,) = to_device("gpu", np.array([0, 150, 151], np.int32))
    return random(rng, (151, 6, 128), "bfloat16"), {"cu_seqlens_q": ends}


def paged_codes(codes: Any, packed: bool = False) -> None:
    """paged_attention over 8-bit caches, with one scale per key and head."""
    rng = _rng()
    q, given = two_requests(rng, packed)
    storage = rng.integers(0, 100, (30, 16, 2, 128)).astype(np.int8).view(codes.storage_dtype)
    scales = np.full((30, 16, 2, 1), 0.01, np.float32)
    table = rng.permutation(30)[:28].reshape(2, 14).astype(np.int32)
    lengths = np.array([200, 3], np.int32)
    q, storage, scales, table, lengths = to_device("gpu", q, storage, scales, table, lengths)
    cache = QuantizedArray(storage, codes, storage.shape, scales=scales, axis=-1)
    assert np.isfinite(
        to_host(paged_attention(q, cache, cache, table, lengths, **given)).astype(float)
    ).all()


def paged_groups(packed: bool = False) -> None:
    """paged_attention over int4 caches; the last key is within a group of a partly filled block."""
    rng = _rng()
    q, given = two_requests(rng, packed)
    storage = rng.integers(0, 256, (6, 128, 2, 64)).astype(np.uint8)
    table = rng.permutation(6)[:4].reshape(2, 2).astype(np.int32)
    lengths = np.array([200, 3], np.int32)
    factors = [np.full((6, 2, 2, 128), 0.1, np.float16), np.full((6, 2, 128, 1), 0.1, np.float16)]
    placed = to_device("gpu", q, storage, table, lengths, *factors)
    q, storage, table, lengths, columns, rows = placed
    rows = rows.swapaxes(1, 2)
    shape = (6, 128, 2, 128)
    k = QuantizedArray(storage, int4, shape, columns, columns, 1, 64)
    v = QuantizedArray(storage, int4, shape, rows, rows, 3, 128)
    out = to_host(paged_attention(q, k, v, table, lengths, **given))
    assert np.isfinite(out.astype(np.float32)).all()


def recent_groups(packed_queries: bool = False) -> None:
    """Keys in ring buffers are packed to int4; paged_attention then reads both formats."""
    rng = _rng()
    q, given = two_requests(rng, packed_queries)
    k, v = (random(rng, (2, 128, 2, 128), "bfloat16") for _ in range(2))
    storage = np.zeros((6, 64, 2, 64), np.uint8)
    table = rng.permutation(6)[:4].reshape(2, 2).astype(np.int32)
    lengths, packed = np.array([100, 3], np.int32), np.array([64, 0], np.int32)
    factors = [np.zeros((6, 1, 2, 128), np.float16), np.zeros((6, 2, 64, 1), np.float16)] * 2
    groups = np.array([2]), table[1, :1].astype(np.int64)
    placed = to_device("gpu", q, k, v, storage, storage, table, lengths, packed, *factors, *groups)
    q, k, v, k_codes, v_codes, table, lengths, packed, *rest = placed
    shape = (6, 64, 2, 128)
    k_cache = QuantizedArray(k_codes, int4, shape, rest[0], rest[2], 1, 64)
    rows = [each.swapaxes(1, 2) for each in (rest[1], rest[3])]
    v_cache = QuantizedArray(v_codes, int4, shape, *rows, 3, 128)
    rings = to_device("gpu", np.array([1, 0], np.int32))[0]
    pack_kv(k, v, k_cache, v_cache, *rest[4:])
    pack_kv(k, v, k_cache, v_cache, rest[4], table[0, :1].astype("int64"))
    recent = RecentKV(k, v, rings, packed)
    out = to_host(paged_attention(q, k_cache, v_cache, table, lengths, recent=recent, **given))
    assert np.isfinite(out.astype(np.float32)).all()


def append(codes: Any) -> None:
    """append_kv to a cache, with skipped rows, rotated queries and an odd number of heads."""
    rng = _rng()
    q, k, v = (random(rng, (9, heads, 80), "bfloat16") for heads in (3, 2, 2))
    slots, positions = np.arange(-1, 17, 2), np.arange(9, dtype=np.int32)
    cos, sin = rng.standard_normal((2, 9, 16)).astype(np.float32)
    arrays = to_device("gpu", q, k, v, slots, positions, cos, sin)
    q, k, v, slots, positions, cos, sin = arrays
    shape = (3, 5, 2, 80)
    caches = []
    for _ in range(2):
        storage = np.zeros(shape, codes.storage_dtype if codes else ml_dtypes.bfloat16)
        scales = np.ones((*shape[:3], 1), np.float32)
        storage, scales = to_device("gpu", storage, scales)
        caches.append(QuantizedArray(storage, codes, shape, scales, axis=-1) if codes else storage)
    append_kv(k, v, *caches, slots, q=q, cos=cos, sin=sin, position_ids=positions, out=q)
    assert np.isfinite(to_host(q).astype(np.float32)).all()


def prefill(head_dim: int, block_size: int, **options: Any) -> None:
    """A mixed batch (prompts, a chunk, decode steps and empty requests), which runs two kernels."""
    rng = _rng()
    counts = [150, 70, 0, 1, 1, 6, 0, 2]
    lengths = np.array([150, 300, 20, 210, 1, 80, 0, 33], np.int32)
    q = random(rng, (sum(counts), 6, head_dim), "bfloat16")
    blocks = -(-300 // block_size)
    k = random(rng, (8 * blocks, block_size, 2, head_dim), "bfloat16")
    table = rng.permutation(8 * blocks).reshape(8, blocks).astype(np.int32)
    ends = np.cumsum([0, *counts]).astype(np.int32)
    q, k, table, lengths, ends = to_device("gpu", q, k, table, lengths, ends)
    to_host(paged_attention(q, k, k, table, lengths, cu_seqlens_q=ends, **options))


def cascade(head_dim: int) -> None:
    """Two levels of shared keys."""
    rng = _rng()
    q = random(rng, (8, 2, 6, head_dim), "bfloat16")
    k = random(rng, (60, 16, 2, head_dim), "bfloat16")
    table = rng.permutation(60)[:56].reshape(8, 7).astype(np.int32)
    table[:, :3] = table[0, :3]
    table[:, 3] = table[:, 3].reshape(2, 4)[:, :1].repeat(4, 1).ravel()
    lengths = np.array([70, 66, 100, 112, 80, 81, 82, 83], np.int32)
    placed = to_device("gpu", q, k, k, table, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cascade_plan, "_PASS_TIME", -1e30)
        to_host(cascade_attention(*placed, prefixes=((48, 8), (64, 4))))


def mla(heads: int, seq_q: int, coded: bool = False) -> None:
    """Requests of different lengths, one of them empty, that share thread blocks."""
    rng = _rng()
    q = random(rng, (4, seq_q, heads, 576), "bfloat16")
    cache = random(rng, (60, 64, 1, 576), "bfloat16")
    table = rng.permutation(60)[:56].reshape(4, 14).astype(np.int32)
    lengths = np.array([800, 0, 3, 130], np.int32)
    q, cache, table, lengths = to_device("gpu", q, cache, table, lengths)
    cache = encode_mla_latents(cache) if coded else cache
    out, _ = mla_attention(q, cache, table, lengths, return_lse=True)
    assert np.isfinite(to_host(out).astype(np.float32)).all()


def divergence(dims: Dims) -> None:
    """attention_kl with and without given lse, atomic and deterministic backward; varlen."""
    rng = _rng()
    q_t, k_t, q_s, k_s = (
        random(rng, (1, length, heads, width), "bfloat16")
        for length, heads, width in zip(
            (70, 135) * 2, (2, 1, 4, 2), (dims[0], dims[0], dims[1], dims[1]), strict=True
        )
    )
    for causal in (False, True):
        placed = to_device("gpu", q_t, k_t, q_s, k_s)
        _, lse_t, lse_s = attention_kl(*placed, causal=causal, return_lse=True)
        for options in ({"lse_t": lse_t, "lse_s": lse_s}, {"lse_t": lse_t}, {"precise": True}):
            attention_kl(*placed, causal=causal, **options)
        for deterministic in (False, True):
            gradients = attention_kl_backward(
                *placed, lse_t, lse_s, causal=causal, deterministic=deterministic
            )
            for gradient in gradients:
                assert np.isfinite(to_host(gradient).astype(np.float32)).all()
    ends = [np.array([0, 0, 30, 70], np.int32), np.array([0, 10, 100, 135], np.int32)]
    packed = {"max_seqlen_q": 45, "max_seqlen_kv": 95}
    placed = to_device("gpu", *(x[0] for x in (q_t, k_t, q_s, k_s)))
    packed["cu_seqlens_q"], packed["cu_seqlens_kv"] = to_device("gpu", *ends)
    _, lse_t, lse_s = attention_kl(*placed, **packed, return_lse=True)
    for gradient in attention_kl_backward(*placed, lse_t, lse_s, **packed):
        assert np.isfinite(to_host(gradient).astype(np.float32)).all()


def indexer(dims: Dims) -> None:
    """indexer_kl over all keys and over selected keys; varlen."""
    rng = _rng()
    q_t, k_t, q_s, k_s = (
        random(rng, shape, "bfloat16")
        for shape in (
            (1, 150, 2, dims[0]), (1, 200, 1, dims[0]), (1, 150, 3, dims[1]), (1, 200, dims[1]),
        )
    )  # fmt: skip
    lse = np.full((1, 2, 150), 6, np.float32)
    weights = rng.standard_normal((1, 150, 3)).astype(np.float32) / 8
    indices = rng.integers(-2, 202, (1, 150, 40)).astype(np.int32)
    ends = np.array([0, 0, 60, 150], np.int32), np.array([0, 10, 100, 200], np.int32)
    arrays = to_device("gpu", q_t, k_t, lse, q_s, k_s, weights, indices, *ends)
    *arrays, indices, ends_q, ends_kv = arrays
    packed = {
        "cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv, "max_seqlen_q": 95, "max_seqlen_kv": 105,
    }  # fmt: skip
    for options in ({"causal": True}, {"topk_indices": indices}, packed):
        given = arrays
        if options is packed:
            given = [x[0] for x in arrays]
        _, *statistics = indexer_kl(*given, **options, return_statistics=True)
        for gradient in indexer_kl_backward(*given, *statistics, **options):
            assert np.isfinite(to_host(gradient).astype(np.float32)).all()


def _as_class(name: str, run: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose_class("gpu sm80" if name == "sm80" else "gpu", patch)
        run()


_NAMES = tuple(OPTIONS)


def _of_class(name: str) -> dict[str, Group]:
    """The groups that run with the kernels of one class."""

    def group(run: Callable[..., None], *arguments: Any, **marks: bool) -> Group:
        return Group(partial(_as_class, name, partial(run, *arguments)), **marks)

    found = {
        "d64": group(plain, (64, 64)),
        "d80 d96": group(plain, (80, 80), (96, 96)),
        "d128": group(plain, (128, 128), quick=True),
        "d192 d192/128": group(plain, (192, 192), (192, 128)),
        "d256": group(plain, (256, 256)),
        "d72/40": group(plain, (72, 40)),
        "d64 options, first half": group(with_options, (64, 64), _NAMES[::2]),
        "d64 options, second half": group(with_options, (64, 64), _NAMES[1::2]),
    }
    for dims in ((128, 128), (256, 256), (192, 128)):
        title = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]}"
        found[f"{title} options together"] = group(with_options, dims, TOGETHER)
    for dims in ((64, 64), (128, 128), (192, 128), (72, 40), (256, 256)):
        title = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]}"
        quick = dims == (192, 128)
        found[f"{title} many sequences"] = group(sequences, dims, quick=quick)
    for width in (64, 128, 256):  # small enough for racecheck
        one = ({"causal": True}, (width, width), (70, 135))
        found[f"d{width} once"] = group(_attend, *one, shares=True)
    for dims in ((64, 64), (128, 72), (256, 128)):
        quick = dims == (128, 72)
        title = f"divergence d{dims[0]}/{dims[1]}"
        found[title] = group(divergence, dims, shares=dims == (64, 64), quick=quick)
    return {f"{name} {title}": each for title, each in found.items()}


GROUPS = {
    **_of_class("sm90"),
    **_of_class("sm80"),
    **{f"blocks d{width}": Group(partial(block_sparse, width)) for width in (64, 128, 256)},
    **{
        f"float8 d{width}": Group(partial(float8, width), quick=width == 128)
        for width in (64, 128, 256)
    },
    "gradients side by side": Group(gradients_side_by_side, quick=True),
    "latents": Group(partial(mla, 16, 1), shares=True, quick=True),
    "latents, float8": Group(partial(mla, 16, 1, coded=True)),
    "latents, teams and a mask": Group(partial(mla, 128, 2)),
    "paged d64": Group(partial(paged, 64), quick=True),
    "paged d128 window": Group(partial(paged, 128, window_size=(70, 0), softcap=2.0)),
    "indexer d128": Group(partial(indexer, (128, 128)), quick=True),
    "indexer d192/64": Group(partial(indexer, (192, 64))),
    "append": Group(partial(append, None), quick=True),
    "append int8": Group(partial(append, int8)),
    "append float8": Group(partial(append, float8_e4m3)),
    "paged int8": Group(partial(paged_codes, int8), shares=True),
    "paged int4": Group(paged_groups, shares=True),
    "pack and read int4": Group(recent_groups, shares=True),
    "paged float8": Group(partial(paged_codes, float8_e4m3)),
    "prefill int8": Group(partial(paged_codes, int8, True), quick=True),
    "prefill float8": Group(partial(paged_codes, float8_e4m3, True)),
    "prefill int4": Group(partial(paged_groups, True)),
    "prefill int4 with recent keys": Group(partial(recent_groups, True), quick=True),
    **{
        f"prefill d{width} page {size}": Group(partial(prefill, width, size), quick=size == 16)
        for width, size in ((64, 7), (128, 16), (128, 7), (256, 64))
    },
    "prefill d128 window": Group(partial(prefill, 128, 8, window_size=(70, 0), softcap=2.0)),
    "cascade d64": Group(partial(cascade, 64), quick=True),
    "paged d128 batch_invariant": Group(partial(paged, 128, batch_invariant=True), shares=True),
}
