"""PagedAttention: the same bits as paged_attention, with scratch memory of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.paged import _paged_arguments, _paged_gather, _paged_prefill, paged
from cukit.attention.paged._paged_arguments import COPIES
from cukit.core import backend
from cukit.core.arrays import float16
from cukit.core.device import current_device
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from tests.attention.test_paged_attention import Cache
from tests.contract import array_module
from tests.devices import kernels_only


def steps(device: str, cache: Cache, **options: Any) -> ck.PagedAttention:
    xp = array_module(device)
    options = {"max_batch": 5, "max_blocks": 20, **options}
    return ck.PagedAttention(
        [xp.asarray(cache.k)] * 2, [xp.asarray(cache.v)] * 2,
        num_heads_q=cache.q.shape[2], **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_invariant": True}, {"window_size": (20, 0), "softcap": 2.0, "scale": 0.7}],
    ids=str,
)
def test_steps_are_bitwise_equal_to_single_calls(device: str, options: dict[str, Any]) -> None:
    """Different requests in each step, tables on host and device, one and two queries each."""
    xp = array_module(device)
    cache = Cache([90, 0, 200, 7], seq_q=2, heads_q=4, heads_kv=2)
    attention = steps(device, cache, **options)
    for rows, seq_q, on_host in (([0, 1, 2], 1, True), ([2], 2, False), ([3, 0, 1, 2], 1, False)):
        table, lengths = cache.table[rows], cache.lengths[rows]
        placed = xp.asarray(table), xp.asarray(lengths)
        attention.plan(*((table, lengths) if on_host else placed), seq_len_q=seq_q)
        q = xp.asarray(cache.q[rows][:, :seq_q])
        arrays = q, xp.asarray(cache.k), xp.asarray(cache.v), *placed
        want, want_lse = ck.paged_attention(*arrays, return_lse=True, **options)
        out, lse = attention.run(q, 1, return_lse=True)
        assert (out == want).all()
        assert (lse == want_lse).all()


@contextmanager
def no_allocations(device: str) -> Iterator[None]:
    """Every allocation of an op's output or scratch memory fails."""

    def refused(*_: Any) -> None:
        raise AssertionError("memory was allocated")

    with pytest.MonkeyPatch.context() as patch:
        if device == "gpu":
            cupy = pytest.importorskip("cupy")
            with cupy.cuda.using_allocator(refused):
                yield
            return
        if device == "emulator":
            patch.setattr(type(backend.active), "poison", refused)  # empty() calls it
            patch.setattr(paged, "zero_counters", refused)
        yield


KERNELS = ("decode", "forward", "copy")


def choose(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every call run `kernel`, one of KERNELS."""
    if device != "cpu" and kernel != "decode" and current_device().arch != "sm_90":
        pytest.skip("the kernel is for Hopper")
    monkeypatch.setattr(_paged_prefill, "prefers_prefill", lambda *_, **__: kernel != "decode")
    monkeypatch.setattr(_paged_gather, "prefers_gather", lambda *_, **__: kernel == "copy")
    monkeypatch.setattr(_paged_gather, "_MAX_REQUESTS", 3)


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("seq_q", [1, 3, 20])
@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_allocate_nothing(
    device: str, kernel: str, seq_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For different numbers of queries and requests. With one query each, four requests run on
    clusters, and one request is split across more thread blocks, with partial results."""
    choose(kernel, device, monkeypatch)
    xp = array_module(device)
    cache = Cache([90, 300, 200, 7], seq_q=seq_q, heads_q=8, heads_kv=2)
    attention = steps(device, cache, max_batch=4)
    for rows in ([0, 1, 2, 3], [1], [0, 1, 2, 3]):
        attention.plan(cache.table[rows], cache.lengths[rows], seq_len_q=seq_q)
        q = xp.asarray(cache.q[rows])
        out = xp.zeros_like(q)
        for layer in (0, 1):
            with no_allocations(device):
                attention.run(q, layer, out=out)
        arrays = cache.k, cache.v, cache.table[rows], cache.lengths[rows]
        assert (out == ck.paged_attention(q, *map(xp.asarray, arrays))).all()


def test_layers_of_several_formats_share_their_scratch_memory(device: str) -> None:
    """An int8 layer needs more scratch memory than a 16-bit layer; `plan` allocates all of it."""
    cache = Cache([90, 300, 200, 7] * 4, heads_q=8, heads_kv=2)
    narrow = [ck.quantize(each.astype(np.float32), ck.int8) for each in (cache.k, cache.v)]
    if device == "gpu":
        narrow = [each.to_device("gpu") for each in narrow]
    xp = array_module(device)
    q, table, lengths = (xp.asarray(each) for each in (cache.q, cache.table, cache.lengths))
    layers = [(xp.asarray(cache.k), xp.asarray(cache.v)), tuple(narrow)]
    sizes = {"max_batch": len(cache.lengths), "max_blocks": cache.table.shape[1]}
    caches, dtype = zip(*layers, strict=True), cache.q.dtype
    attention = ck.PagedAttention(*caches, num_heads_q=8, dtype=dtype, **sizes)
    attention.plan(table, lengths)
    before = dict(attention._scratch._arrays)
    for layer, (k, v) in enumerate(layers):
        assert (attention.run(q, layer) == ck.paged_attention(q, k, v, table, lengths)).all()
    assert all(attention._scratch._arrays[name] is array for name, array in before.items())
    assert attention._scratch._arrays.keys() == before.keys()


@kernels_only
@pytest.mark.usefixtures("fresh_plans")
def test_copies_are_freed_by_a_plan_of_other_queries(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("copy", device, monkeypatch)
    xp = array_module(device)
    cache = Cache([100, 250, 3], seq_q=20, heads_q=8)
    attention = steps(device, cache)
    for seq_q in (20, 2):
        attention.plan(cache.table, cache.lengths, seq_len_q=seq_q)
        copies = [weakref.ref(attention._scratch._arrays[name]) for name in COPIES]
        q = xp.asarray(cache.q[:, :seq_q])
        arrays = q, *map(xp.asarray, (cache.k, cache.v, cache.table, cache.lengths))
        out = xp.empty_like(q)
        with no_allocations(device):
            attention.run(q, out=out)
        assert (out == ck.paged_attention(*arrays)).all()
        attention.plan(cache.table, cache.lengths, seq_len_q=1)
        assert not any(copy() is not None for copy in copies)
    assert not attention._scratch._kept


class Memory:
    """Scratch memory on the CPU; the test sets the current stream and whether it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scratch = _paged_arguments.PagedScratch()
        self.stream, self.captures = 1, False
        monkeypatch.setattr(_paged_arguments, "current_stream", lambda _: self.stream)
        monkeypatch.setattr(_paged_arguments, "is_captured", lambda _: self.captures)

    def take(self, size: int) -> weakref.ref[Any]:
        like = np.zeros(1)
        self.scratch.begin(like)
        return weakref.ref(self.scratch.take(like, "keys", size, np.float32))

    def release(self) -> bool:
        return self.scratch.release(np.zeros(1), "keys", "values")


def test_outgrown_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    first = memory.take(5)
    assert memory.take(3)() is first()
    second = memory.take(6)
    assert first() is None
    assert memory.release()
    assert second() is None
    assert not memory.release()


def test_memory_of_graphs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    first = memory.take(5)
    memory.captures = True
    assert memory.take(4)() is first()
    own = memory.take(8)  # allocated during capture: not shared
    memory.captures = False
    assert not memory.release()
    assert memory.take(5)() is first()
    larger = memory.take(8)
    assert first() is not None
    assert own() is not None
    assert larger() is not own()
    assert memory.release()
    assert larger() is None


def test_memory_of_another_stream_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If freed, it could be reused on the stream where it was allocated, while work of the current
    stream still accesses it."""
    memory = Memory(monkeypatch)
    first = memory.take(5)
    memory.stream = 2
    second = memory.take(6)
    assert first() is not None
    assert memory.release()
    assert second() is None


def test_plans_take_no_memory_for_queries() -> None:
    k = np.zeros((4, 16, 64, 128), np.float16)
    attention = ck.PagedAttention([k], [k], num_heads_q=64, max_batch=256, max_blocks=4)
    attention.plan([[0, 1, 2, 3]], [64], seq_len_q=1 << 20)  # 4 TiB of queries for 256 requests


def test_quantised_caches_and_sinks(device: str) -> None:
    xp = array_module(device)
    generator = np.random.default_rng(0)
    k, v = (
        ck.quantize(generator.standard_normal((6, 16, 2, 64), np.float32), ck.int8)
        for _ in range(2)
    )
    if device == "gpu":
        k, v = k.to_device("gpu"), v.to_device("gpu")
    sinks = xp.asarray([0.5, 1.0, -2.0, 3.0], dtype=np.float32)
    with pytest.raises(ConfigError, match="dtype of the queries"):
        ck.PagedAttention([k], [v], num_heads_q=4, max_batch=2, max_blocks=3)
    attention = ck.PagedAttention(
        [k], [v], num_heads_q=4, max_batch=2, max_blocks=3, dtype=float16, sinks=sinks
    )
    table, lengths = np.array([[5, 0, 3], [1, 2, 4]], np.int32), np.array([40, 3], np.int32)
    q = xp.asarray(generator.standard_normal((2, 1, 4, 64), np.float32).astype(float16))
    attention.plan(table, lengths)
    out = xp.zeros_like(q)
    assert attention.run(q, out=out) is out
    want = ck.paged_attention(q, k, v, xp.asarray(table), xp.asarray(lengths), sinks=sinks)
    assert (out == want).all()


def test_checked_steps_are_checked_when_they_are_planned(device: str) -> None:
    attention = steps(device, Cache([40]), checked=True)
    with pytest.raises(ConfigError, match=r"block_table\[1, 2\] is -9"):
        attention.plan([[0, 1, 2], [0, 1, -9]], [48, 33])
    with pytest.raises(ConfigError, match=r"seq_lens\[0\] is 321"):
        attention.plan([[0, 1, 2]], [321])


def test_invalid_arguments_are_rejected() -> None:
    cache = Cache([40], dtype=np.float32)
    attention = steps("cpu", cache)
    with pytest.raises(ArrayShapeError, match="at most max_batch x max_blocks"):
        attention.plan(np.zeros((6, 1), np.int32), np.zeros(6, np.int32))
    with pytest.raises(ArrayError, match="seq_lens"):
        attention.plan([[0]], [1, 2])
    with pytest.raises(ArrayError, match="block_table"):
        attention.plan(np.zeros((1, 1)), [1])
    attention.plan([[0]], [1])
    with pytest.raises(ArrayShapeError, match="as planned, got float32 of"):
        attention.run(np.zeros((2, 1, 4, 64), np.float32))
    with pytest.raises(ConfigError, match=r"layer must be .* at most 1, got 2"):
        attention.run(np.zeros((1, 1, 4, 64), np.float32), 2)
    with pytest.raises(ConfigError, match="num_heads_q"):
        ck.PagedAttention(cache.k[None], cache.v[None], num_heads_q=0, max_batch=1, max_blocks=1)
    with pytest.raises(ArrayShapeError, match="must divide those of q"):
        ck.PagedAttention(cache.k[None], cache.v[None], num_heads_q=3, max_batch=1, max_blocks=1)
    with pytest.raises(ArrayShapeError, match="the same number of layers"):
        ck.PagedAttention(cache.k[None], [], num_heads_q=2, max_batch=1, max_blocks=1)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("seq_q", [1, 20])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_of_runs_replays_after_other_plans(
    kernel: str, seq_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays do not write to memory that was allocated after the capture, even if later plans need
    more scratch memory."""
    import cupy

    choose(kernel, "gpu", monkeypatch)
    cache = Cache([100, 250, 3], seed=3, seq_q=seq_q, heads_q=8)
    attention = steps("gpu", cache)
    q = cupy.asarray(cache.q)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention.plan(cache.table, cache.lengths, seq_len_q=seq_q)
        stream.begin_capture()
        with no_allocations("gpu"):
            attention.run(q, 1, out=out)
        graph = stream.end_capture()
        attention.plan(cache.table, cache.lengths, seq_len_q=3 * seq_q)
        others = [cupy.zeros(1 << n, cupy.float32) for n in range(4, 24)]
        for lengths in ([100, 250, 3], [5, 1, 0], [100, 200, 2]):
            lengths = np.asarray(lengths, np.int32)
            attention.plan(cache.table, lengths, seq_len_q=seq_q)
            graph.launch(stream)
            arrays = q, *map(cupy.asarray, (cache.k, cache.v, cache.table, lengths))
            assert (out == ck.paged_attention(*arrays)).all()
        assert not any(other.any() for other in others)
