"""Cascade attention over shared prefixes, compared with attention over all keys per request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.paged import _cascade_plan
from cukit.attention.paged._cascade_plan import Pass, Prefix, plan_cascade
from cukit.core.arrays import bfloat16, float16, namespace
from cukit.core.device import current_device, typical_device
from cukit.errors import ArrayShapeError, ConfigError
from tests.attention.test_paged_attention import DTYPES, ROUNDING, Cache
from tests.contract import array_module
from tests.quick_run import emulated

H200 = typical_device("sm_90")


class SharedCache(Cache):
    """A cache in which neighbouring requests share the blocks of their common prefixes."""

    def __init__(
        self, lengths: list[int], prefixes: tuple[tuple[int, int], ...], **shape: Any
    ) -> None:
        super().__init__(lengths, **shape)
        block_size = self.k.shape[1]
        for keys, requests in reversed(prefixes):
            for first in range(0, len(lengths), requests):
                count = keys // block_size
                self.table[first : first + requests, :count] = self.table[first, :count]
        self.prefixes = prefixes

    def check_shared(self, device: str, **options: Any) -> None:
        """Checks the output and lse, and that a second call is bitwise equal."""
        xp = array_module(device)
        arrays = [xp.asarray(a) for a in (self.q, self.k, self.v, self.table, self.lengths)]
        given = {n: xp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        out, lse = ck.cascade_attention(*arrays, self.prefixes, return_lse=True, **given)
        into = xp.empty(out.shape, out.dtype)
        again = ck.cascade_attention(*arrays, self.prefixes, out=into, **given)
        assert again is into
        want, want_lse = self.expected(**options)
        host = (lambda a: a) if xp is np else xp.asnumpy
        used = self.lengths > 0
        got = host(out)[used].astype(np.float64)
        assert host(again)[used].tobytes() == host(out)[used].tobytes()
        assert namespace(out) is xp
        # Probabilities, the output of each pass, and the merged output are rounded.
        bound = 3.0 * ROUNDING[np.dtype(self.q.dtype)] * (np.abs(want).max(initial=0) + 0.1)
        assert np.isfinite(got).all()
        assert np.abs(got - want[used]).max(initial=0) <= bound
        np.testing.assert_allclose(host(lse)[used], want_lse[used], atol=2e-5, rtol=2e-5)


@pytest.fixture
def shared(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`device`, with a separate pass for every prefix."""
    monkeypatch.setattr(_cascade_plan, "_PASS_TIME", -1e30)
    return device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("seq_q", [1, 3])
@emulated(lambda dtype, block_size, seq_q: (dtype == float16) == (block_size in (7, 64)))
def test_one_prefix(shared: str, dtype: Any, block_size: int, seq_q: int) -> None:
    """Shuffled blocks, unequal lengths, suffixes with only the keys of the queries, a request of
    length 0."""
    keys = -(-90 // block_size) * block_size
    lengths = [keys + seq_q, keys + 40, 0, keys + 7, keys + 65, keys + seq_q]
    cache = SharedCache(
        lengths, ((keys, 6),), block_size=block_size, dtype=dtype, seq_q=seq_q, head_dim=64
    )
    cache.check_shared(shared)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (6, 2), (8, 1)])
@emulated(lambda head_dim, heads_q: head_dim == {4: 64, 6: 128, 8: 256}[heads_q])
def test_levels(shared: str, head_dim: int, heads_q: int, heads_kv: int) -> None:
    """Prefixes shared by all requests, by groups of four, and by pairs."""
    prefixes = ((64, 8), (96, 4), (112, 2))
    lengths = [120, 113, 114, 200, 150, 113, 160, 180]
    shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim}
    SharedCache(lengths, prefixes, **shape).check_shared(shared)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"softcap": 2.0, "scale": 0.7},
        {"sinks": np.linspace(-3, 3, 4, dtype=np.float32)},
        {"sinks": np.full(4, -np.inf, np.float32), "softcap": 1.5},
    ],
    ids=str,
)
def test_options(shared: str, options: dict[str, Any]) -> None:
    SharedCache([90, 100, 66, 130], ((64, 4),), seq_q=2).check_shared(shared, **options)


@pytest.mark.usefixtures("fresh_plans")
def test_rows_of_a_prefill(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of all requests packed into tiles of the Hopper forward."""
    from cukit.attention.paged import _paged_prefill

    if shared == "gpu" and current_device().arch != "sm_90":
        pytest.skip("the kernel is for Hopper")
    monkeypatch.setattr(_paged_prefill, "prefers_prefill", lambda *_, **__: True)
    SharedCache([150, 100, 66, 130] * 2, ((64, 8),), heads_q=2).check_shared(shared)


def test_out_may_be_strided(shared: str) -> None:
    xp = array_module(shared)
    cache = SharedCache([90, 100, 66], ((64, 3),))
    arrays = [xp.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    want = ck.cascade_attention(*arrays, 64)
    wide = xp.zeros((3, 1, 4, 128), bfloat16)
    got = ck.cascade_attention(*arrays, 64, out=wide[..., :64])
    assert got.base is wide or got.base is wide.base
    assert (wide[..., :64] == want).all()
    assert not wide[..., 64:].any()


def test_equals_paged_attention_without_separate_passes(device: str) -> None:
    """Bitwise equal if the plan has no separate pass for a prefix."""
    xp = array_module(device)
    cache = SharedCache([90, 100, 66], ((64, 3),))
    arrays = [xp.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    assert (ck.cascade_attention(*arrays, 64) == ck.paged_attention(*arrays)).all()
    assert (ck.cascade_attention(*arrays, ()) == ck.paged_attention(*arrays)).all()


@pytest.mark.gpu
def test_a_graph_replays_with_other_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(_cascade_plan, "_PASS_TIME", -1e30)
    cache = SharedCache([700, 900, 650, 800], ((640, 4),), seed=3)
    arrays = [cupy.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    out = cupy.empty_like(arrays[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ck.cascade_attention(*arrays, 640, out=out)
        stream.begin_capture()
        ck.cascade_attention(*arrays, 640, out=out)
        graph = stream.end_capture()
        for lengths in ([700, 900, 650, 800], [641, 642, 650, 700]):
            arrays[4][...] = cupy.asarray(lengths, np.int32)
            graph.launch(stream)
            stream.synchronize()
            assert (out == ck.cascade_attention(*arrays, 640)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prefixes": 20}, ConfigError, "multiples of block_size = 16"),
        ({"prefixes": 64}, ConfigError, "fit in the 3 blocks"),
        ({"prefixes": -16}, ConfigError, "must not decrease"),
        ({"prefixes": 1.5}, ConfigError, "integer or pairs"),
        ({"prefixes": ((16, 3),)}, ConfigError, "divide those of the previous"),
        ({"prefixes": ((16, 2), (32, 4))}, ConfigError, "divide those of the previous"),
        ({"prefixes": ((32, 4), (16, 2))}, ConfigError, "must not decrease"),
        ({"prefixes": 32}, ConfigError, "the same blocks"),
        ({"seq_lens": np.array([16, 20, 20, 20], np.int32)}, ConfigError, r"seq_lens\[0\] is 16"),
        ({"q": np.zeros((4, 4, 64), np.float32)}, ArrayShapeError, "q must have 4 axes"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "q": np.zeros((4, 1, 4, 64), np.float32),
        "k_cache": np.zeros((16, 16, 2, 64), np.float32),
        "v_cache": np.zeros((16, 16, 2, 64), np.float32),
        "block_table": np.array([[0, 1 + b, 8 + b] for b in range(4)], np.int32),
        "seq_lens": np.array([33, 40, 48, 0], np.int32),
        "prefixes": 16,
    }
    ck.cascade_attention(**arguments)
    with pytest.raises(error, match=message):
        ck.cascade_attention(**(arguments | change))


def test_choice_of_prefixes_with_a_separate_pass() -> None:
    def passes(batch: int, *prefixes: tuple[int, int]) -> tuple[Pass, ...]:
        problem = AttentionProblem(batch, 1, 1, 32, 8, 128, "bfloat16", False)
        return plan_cascade(tuple(Prefix(*each) for each in prefixes), problem, 2, H200)

    assert passes(32, (8192, 32)) == (Pass(0, 8192, 32),)
    assert passes(128, (8192, 128))
    assert passes(64, (32768, 64))
    assert not passes(8, (4000, 8)), "the merge costs more than it saves"
    assert not passes(1, (100000, 1))
    assert not passes(32, (0, 32))
    assert passes(64, (16, 64), (8192, 32)) == (Pass(0, 8192, 32),), "the next pass covers it"
    assert passes(64, (8192, 64), (16384, 32)) == (Pass(0, 8192, 64), Pass(8192, 16384, 32))
