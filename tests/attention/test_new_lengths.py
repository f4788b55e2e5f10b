"""Calls with new lengths: what they plan, load and launch."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.attention.flash import _flash_fp8, flash, flash_backward
from cukit.attention.paged import mla
from cukit.attention.paged import paged as paged_module
from cukit.core import backend
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayError, ArrayLayoutError, ArrayShapeError, ConfigError
from tests.recorder import Recorder

LENGTHS = range(1025, 1400)
MAX_LOADED = 3  # variants of one kernel, at most: lengths round up to 1152, 1280 or 1408


@pytest.fixture(params=["sm_90", "sm_80"])
def recorder(request):
    recorder = Recorder(request.param)
    before = backend.activate(recorder)
    yield recorder
    backend.activate(before)


def cache(dtype=ml_dtypes.bfloat16):
    return np.zeros((2, LENGTHS.stop, 2, 64), dtype)


def decode(keys, length, **options):
    return ck.flash_attention(keys[:, :1], keys[:, :length], keys[:, :length], **options)


def test_a_new_length_of_a_known_bucket_loads_nothing(recorder):
    keys = cache()
    for length in LENGTHS:
        decode(keys, length, causal=True)
    assert len(recorder.loaded) <= MAX_LOADED
    assert len(recorder.launches) == len(LENGTHS)


def test_every_length_has_its_own_launch(recorder):
    keys = cache()
    for length in (1100, 1101, 1100):
        decode(keys, length)
    bytes_of = [
        [arg.tobytes() for arg in args if getattr(arg, "dtype", None) and arg.dtype.type is np.void]
        for _, _, args in recorder.launches
    ]
    first, other, again = bytes_of
    assert first != other
    assert first == again


def test_new_lengths_of_sequences_block_masks_and_float8_load_nothing(recorder):
    if recorder.device.arch != "sm_90":
        pytest.skip("class sm80 has only one kernel for each call")
    keys = cache()
    flat = keys.reshape(-1, 2, 64)
    codes = cache(np.uint8)
    for length in LENGTHS:
        ends = np.array([0, 5, length], np.int32)
        rows = flat[:length]
        most = {"max_seqlen_q": length, "max_seqlen_kv": length}
        ck.flash_attention(rows, rows, rows, cu_seqlens_q=ends, cu_seqlens_kv=ends, **most)
        part = codes[:, :length]
        narrow = QuantizedArray(part, ck.float8_e4m3, part.shape)
        ck.flash_attention(narrow, narrow, narrow)
        mask = np.ones((-(-length // 128),) * 2, bool)
        part = keys[:, :length]
        ck.block_sparse_attention(part, part, part, mask)
    names = [spec.entry for spec in recorder.loaded]
    assert {"plan_sequences", "plan_blocks", "flash_attention_fp8_values"} < set(names)
    assert max(map(names.count, set(names))) <= 3 * MAX_LOADED
    assert len(recorder.launches) == 6 * len(LENGTHS)


def test_a_new_length_repeats_no_check(recorder, monkeypatch):
    checked = []
    for module, name in (
        (flash, "check_forward"),
        (_flash_fp8, "check_forward"),
        (flash_backward, "check_backward"),
    ):
        bare = getattr(module, name)

        def check(*args, bare=bare, **options):
            checked.append(args)
            bare(*args, **options)

        monkeypatch.setattr(module, name, check)
    keys, codes = cache(), cache(np.uint8)
    lse = np.zeros((2, 2, LENGTHS.stop), np.float32)
    for length in LENGTHS:
        part, narrow = keys[:, :length], codes[:, :length]
        decode(keys, length)
        rows = np.ascontiguousarray(lse[..., :length])
        ck.flash_attention_backward(part, part, part, part, part, rows)
        if recorder.device.arch == "sm_90":
            ck.flash_attention(*[QuantizedArray(narrow, ck.float8_e4m3, narrow.shape)] * 3)
    assert 0 < len(checked) <= 3 * MAX_LOADED


def wrong_lengths():
    """Calls that differ from valid ones only in their lengths, and the errors they raise."""
    keys, part = cache(), cache()[:, :1100]
    lse = np.zeros((2, 2, 1100), np.float32)
    uneven = np.zeros((2, 1100 * 2 * 64 + 4), keys.dtype)[:, :-4].reshape(2, 1100, 2, 64)
    attend, backward = partial(ck.flash_attention, keys[:, :1]), ck.flash_attention_backward
    return {
        "k and v": (ArrayShapeError, partial(attend, keys, part)),
        "batches": (ArrayLayoutError, partial(attend, uneven, uneven)),
        "out": (ArrayShapeError, partial(ck.flash_attention, part, keys, keys, out=cache())),
        "lse": (ArrayShapeError, partial(backward, *[keys[:, :1101]] * 5, lse)),
        "grad_out": (ArrayShapeError, partial(backward, keys[:, :1099], *[part] * 4, lse)),
    }


@pytest.mark.parametrize("wrong", wrong_lengths())
def test_invalid_lengths_are_rejected_after_valid_calls(recorder, wrong):
    keys = cache()
    for length in (1100, LENGTHS.stop):
        part, lse = keys[:, :length], np.zeros((2, 2, length), np.float32)
        decode(keys, length)
        ck.flash_attention(part, part, part, out=np.empty_like(part))
        ck.flash_attention_backward(part, part, part, part, part, lse)
    error, call = wrong_lengths()[wrong]
    with pytest.raises(error):
        call()


def test_strides_of_axes_of_extent_1_are_ignored(recorder):
    rows = np.zeros((1, 2, 132), ml_dtypes.bfloat16)[..., :128].reshape(1, 2, 2, 64)
    assert rows.strides[1] % 16
    keys = cache()[:1]
    ck.flash_attention(rows[:, :1], keys, keys)
    with pytest.raises(ArrayLayoutError, match="of q"):
        ck.flash_attention(rows, keys, keys)


def test_a_negative_max_seqlen_is_rejected_after_valid_calls(recorder):
    rows, ends = cache()[0], np.array([0, 5, LENGTHS.stop], np.int32)
    call = partial(ck.flash_attention, rows, rows, rows, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    call(max_seqlen_q=LENGTHS.stop, max_seqlen_kv=LENGTHS.stop)
    with pytest.raises(ConfigError, match="max_seqlen_q"):
        call(max_seqlen_q=-1, max_seqlen_kv=LENGTHS.stop)


PAGES = np.zeros((64, 16, 2, 64), ml_dtypes.bfloat16)


def paged(batch, rows, columns, packed=False, **options):
    """Calls `paged_attention` with `rows` queries per request, packed or not, and a block table of
    `columns` columns."""
    table, lengths = np.zeros((batch, columns), np.int32), np.ones(batch, np.int32)
    q = np.zeros((batch, rows, 8, 64), PAGES.dtype)
    if packed:
        q = np.zeros((batch * rows, 8, 64), PAGES.dtype)
        options["cu_seqlens_q"] = np.arange(batch + 1, dtype=np.int32) * rows
    return ck.paged_attention(q, PAGES, PAGES, table, lengths, **options)


@pytest.fixture
def unchecked_contents(monkeypatch):
    """Omits the comparison of lengths and tables with the cache, as on the GPU."""
    monkeypatch.setattr(paged_module, "check_contents", lambda *_, **__: None)


def test_other_requests_of_a_paged_cache_repeat_neither_plan_nor_check(
    recorder, monkeypatch, unchecked_contents
):
    checked, bare = [], paged_module.check_arrays
    monkeypatch.setattr(
        paged_module, "check_arrays", lambda *args: (checked.append(args), bare(*args))
    )
    for step in range(1, 40):
        paged(step, 1, 4)  # other requests
        paged(3, 1, step)  # other table widths
        paged(3, 100 + step, 4)  # a prefill
        paged(step + 8, 7, 4, packed=True)
    assert 0 < len(checked) <= 6
    assert len(set(recorder.loaded)) <= 8
    launches = [(spec.entry, grid, *map(repr, args)) for spec, grid, args in recorder.launches]
    assert len(launches) >= 4 * 39
    assert len(set(launches)) > 3 * 39


def test_launches_over_a_paged_cache_have_the_sizes_of_their_call(recorder, unchecked_contents):
    struct = parameter_structs("attention/parameters.cuh")["PagedParameters"].dtype
    for batch, columns in ((2, 3), (5, 3), (2, 9)):
        paged(batch, 1, columns)
        values = next(
            arg.view(struct)[0]
            for arg in recorder.launches[-1][2]
            if getattr(arg, "dtype", None) is not None
            and arg.nbytes == struct.itemsize
            and arg.dtype.type is np.void
        )
        assert (values["batch"], values["seq_q"]) == (batch, 1)
        assert (values["max_keys"], values["table_row"]) == (16 * columns, columns)


def wrong_requests():
    """Calls that differ from valid ones only in arguments that do not select a plan, and their
    errors."""
    q, table, lengths = (
        np.zeros((4, 1, 8, 64), PAGES.dtype), np.zeros((4, 3), np.int32), np.ones(4, np.int32)
    )  # fmt: skip
    caches = PAGES, PAGES
    wide = np.zeros((4, 1, 8, 68), PAGES.dtype)[..., :64]
    attend = ck.paged_attention
    return {
        "table": (ArrayShapeError, partial(attend, q, *caches, table[:3], lengths)),
        "lengths": (ArrayShapeError, partial(attend, q, *caches, table, lengths[:3])),
        "strided lengths": (
            ArrayLayoutError, partial(attend, q, *caches, table, np.ones(8, np.int32)[::2])
        ),
        "columns": (
            ArrayLayoutError,
            partial(attend, q, *caches, np.zeros((4, 6), np.int32)[:, ::2], lengths),
        ),
        "strides": (ArrayLayoutError, partial(attend, wide, *caches, table, lengths)),
        "out": (ArrayShapeError, partial(attend, q, *caches, table, lengths, out=q[:3].copy())),
        "ends": (
            ArrayShapeError,
            partial(attend, q[:, 0], *caches, table, lengths, cu_seqlens_q=np.zeros(4, np.int32)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("wrong", wrong_requests())
def test_invalid_requests_are_rejected_after_valid_calls(recorder, unchecked_contents, wrong):
    for batch in (3, 4, 5):
        paged(batch, 1, 3)
        paged(batch, 1, 3, out=np.zeros((batch, 1, 8, 64), PAGES.dtype))
        paged(batch, 1, 3, packed=True)
    error, call = wrong_requests()[wrong]
    with pytest.raises(error):
        call()


LATENTS = np.zeros((8, 64, 1, 576), ml_dtypes.bfloat16)


def latent(batch, columns, **options):
    q = np.zeros((batch, 1, 16, 576), LATENTS.dtype)
    table, lengths = np.zeros((batch, columns), np.int32), np.ones(batch, np.int32)
    return ck.mla_attention(q, LATENTS, options.pop("table", table), lengths, **options)


def test_other_requests_of_latents_repeat_neither_plan_nor_check(recorder, monkeypatch):
    if recorder.device.arch != "sm_90":
        pytest.skip("MLA has kernels for Hopper only")
    checked, bare = [], mla._check
    monkeypatch.setattr(mla, "_check", lambda *args: (checked.append(args), bare(*args)))
    for step in range(1, 40):
        latent(step, 4)
        latent(3, step)
    assert len(checked) == 1
    assert len(recorder.loaded) == 2
    assert len(recorder.launches) == 4 * 39
    for options in ({"table": np.zeros((2, 4), np.int32)}, {"out": np.zeros((2, 1, 16, 512))}):
        with pytest.raises(ArrayError):
            latent(3, 4, **options)
