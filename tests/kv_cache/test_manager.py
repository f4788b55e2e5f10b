"""KVCacheManager: results, errors, and random use checked against the contents of the slab."""

from __future__ import annotations

import itertools
import random
import signal
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import pytest

from cukit.core.arrays import bfloat16, is_gpu_array, namespace
from cukit.errors import ArrayDtypeError, ConfigError, CukitError, OutOfMemoryError
from cukit.kv_cache import KVCacheManager
from cukit.memory import HostProvider, MemoryPool
from tests.memory.invariants import check_invariants
from tests.quick_run import emulated


def manager(
    num_blocks: int = 8, block_size: int = 4, device: str = "cpu", **options: Any
) -> KVCacheManager:
    options = {"num_heads_kv": 1, "head_dim": 8, **options}
    if device != "gpu":
        options.setdefault("pool", MemoryPool(provider=HostProvider()))
    cache = KVCacheManager(num_blocks, block_size, **options)
    assert is_gpu_array(cache.slab.array) == (device == "gpu")
    return cache


def test_tokens_are_stored_in_the_blocks_of_the_table() -> None:
    cache = manager()
    assert cache.allocate("a", range(6)) == 0
    assert cache.allocate("b", range(10, 13)) == 0
    table, lengths = cache.block_table(["b", "a"])
    assert table.tolist() == [[2, -1], [0, 1]]
    assert lengths.tolist() == [3, 6]
    assert cache.slots("a").tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.append("b", [13, 14]).tolist() == [11, 12]
    assert cache.append_each(["a", "b"], [6, 15]).tolist() == [6, 13]
    cache.check_invariants()


def test_a_prompt_finds_published_blocks_except_its_last_token() -> None:
    cache = manager()
    cache.allocate("a", range(8))
    assert cache.allocate("before", range(8)) == 0
    assert cache.publish("a") == 2
    assert cache.allocate("b", range(8)) == 4
    assert cache.allocate("c", range(9)) == 8
    assert cache.lookup(range(8)) == 8
    assert cache.lookup(range(8), salt="tenant") == 0
    statistics = cache.statistics()
    assert (statistics.prompt_tokens, statistics.cached_tokens) == (33, 12)
    assert statistics.hit_rate == 12 / 33
    cache.check_invariants()


def test_cached_blocks_are_evicted_and_held_ones_are_not() -> None:
    cache = manager(num_blocks=4)
    cache.allocate("a", range(8))
    cache.free("a")
    assert cache.statistics().evictable_blocks == 2
    cache.allocate("b", range(100, 112))
    assert cache.statistics().evicted_blocks == 1
    with pytest.raises(OutOfMemoryError, match="2 blocks are needed, but only 0 are free and 1 ev"):
        cache.allocate("c", range(200, 208))
    with pytest.raises(ConfigError, match="no request 'c'"):
        cache.free("c")
    assert cache.lookup(range(8)) == 4
    cache.check_invariants()


def test_errors_name_the_method_that_was_called() -> None:
    cache = manager(num_blocks=2)
    cache.allocate("a", range(5))
    cache.preempt("a", by="recompute")
    cache.allocate("b", range(100, 108))
    with pytest.raises(OutOfMemoryError, match=r"^resume: 2 blocks are needed"):
        cache.resume("a")
    with pytest.raises(OutOfMemoryError, match=r"^append_each: 1 blocks are needed"):
        cache.append_each(["b"], [9])


def test_forks_share_until_they_write(device: str) -> None:
    cache = manager(num_layers=2, device=device)
    cache.allocate("a", range(6))
    cache.slab.array[:, :, 1] = 7
    for name in ("b", "c"):
        cache.fork("a", name)
    assert cache.block(1).references == 3
    slots = cache.append_each(["a", "b", "c"], [6, 7, 8])
    assert sorted(slots.tolist())[0] == 6, "the last holder keeps the block"
    assert cache.statistics().held_blocks == 4
    for block in slots // 4:
        assert (cache.slab.array[:, :, block] == 7).all()
    cache.check_invariants()


def test_the_last_owner_of_a_forks_blocks_publishes_them() -> None:
    cache = manager()
    cache.allocate("a", range(9))
    cache.fork("a", "b")
    cache.free("a")
    assert cache.lookup(range(9)) == 0
    cache.free("b")
    assert cache.lookup(range(9)) == 8
    cache.check_invariants()


@pytest.mark.parametrize("by", ["swap", "recompute"])
def test_preempted_requests_are_restored(by: str, device: str) -> None:
    cache = manager(num_blocks=4, num_layers=3, device=device)
    cache.allocate("a", range(10))
    before = namespace(cache.slab.array).arange(cache.slab.array.size) % 1000
    before = before.reshape(cache.slab.array.shape)
    cache.slab.array[...] = before
    old, _ = cache.block_table(["a"])
    cache.preempt("a", by=by)
    with pytest.raises(ConfigError, match="'a' is preempted; resume it first"):
        cache.append("a", [1])
    assert cache.available_blocks == 4
    if by == "swap":
        cache.allocate("b", range(50, 66))  # every block, so that b overwrites them
        cache.slab.array[...] = 0
        cache.free("b", keep=False)
        assert cache.resume("a") == 10
        new, _ = cache.block_table(["a"])
        assert (cache.slab.array[:, :, new[0]] == before[:, :, old[0]]).all()
    else:
        assert cache.resume("a") == 8
    cache.check_invariants()


class Swapping:
    """A request that shares blocks with another, in a slab that is copied in several chunks."""

    def __init__(self, device: str) -> None:
        self.cache = manager(9, num_layers=2, head_dim=4, dtype=np.float32, device=device)
        self.cache.slab._blocks_at_once = 1
        self.writer = Writer(self.cache)
        for request, tokens in (("other", range(9)), ("swapped", [*range(8), 50, 51, 52])):
            cached = self.cache.allocate(request, tokens)
            self.writer.tokens[request] = list(tokens)
            self.writer.write(request, cached, self.cache.slots(request, cached))
            self.cache.publish(request)

    def check(self, *, swapped: bool) -> None:
        """Checks the invariants, that no data is lost, and that the request can continue."""
        self.cache.check_invariants()
        self.writer.check("other")
        if swapped:
            self.cache.allocate("new", range(100, 112))
            self.cache.slab.array[:, :, self.cache.block_table(["new"])[0][0]] = -1
            self.cache.free("new", keep=False)
            assert self.cache.resume("swapped") == 11
        self.writer.check("swapped")
        self.cache.append("swapped", [1])
        for request in ("other", "swapped"):
            self.cache.free(request)
        self.cache.check_invariants()
        assert self.cache.available_blocks == 9


@pytest.mark.parametrize("way", ["to_host", "from_host"])
@pytest.mark.parametrize("chunks", range(4))
def test_a_swap_that_fails_after_some_chunks_loses_nothing(
    way: str, chunks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapping = Swapping(device)
    cache = swapping.cache
    copies = cache.slab._chunks

    def failing(*arguments: Any) -> Iterator[Any]:
        yield from itertools.islice(copies(*arguments), chunks)
        raise RuntimeError("the copy failed")

    if way == "from_host":
        cache.preempt("swapped")
    monkeypatch.setattr(cache.slab, "_chunks", failing)
    with pytest.raises(RuntimeError, match="the copy failed"):
        cache.resume("swapped") if way == "from_host" else cache.preempt("swapped")
    monkeypatch.undo()
    swapping.check(swapped=way == "from_host")


@pytest.mark.parametrize("way", ["preempt", "resume"])
def test_an_interrupt_at_any_line_of_a_swap_loses_nothing(way: str) -> None:
    """Raises SIGINT before each line of cukit.kv_cache that a swap executes, one run per line."""
    for line in itertools.count():
        swapping = Swapping("cpu")
        cache = swapping.cache
        if way == "resume":
            cache.preempt("swapped")
        lines = itertools.count()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if "kv_cache" not in frame.f_code.co_filename:
                return None
            if event == "line" and next(lines) == line:  # noqa: B023
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        interrupted = False
        sys.settrace(trace)
        try:
            getattr(cache, way)("swapped")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        swapping.check(swapped=cache.statistics().swapped_bytes > 0)
        if not interrupted:
            break
    assert line > 30


def test_a_slab_is_returned_to_its_pool() -> None:
    pool = MemoryPool(provider=HostProvider())
    cache = manager(pool=pool, dtype=bfloat16, num_layers=2)
    assert cache.slab.array.dtype == bfloat16
    assert cache.keys(1).shape == cache.values(1).shape == (8, 4, 1, 8)
    assert pool.statistics().live_bytes >= cache.slab.block_bytes * 8
    del cache
    assert pool.statistics().live_bytes == 0
    check_invariants(pool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.allocate("a", [1]), ConfigError, "'a' exists already"),
        (lambda c: c.fork("a", "a"), ConfigError, "'a' exists already"),
        (lambda c: c.fork("z", "y"), ConfigError, "no request 'z'"),
        (lambda c: c.append("a", [1.5]), ArrayDtypeError, "must be integers"),
        (lambda c: c.append("a", np.ones(2)), ArrayDtypeError, "float64"),
        (lambda c: c.append("a", 3), ArrayDtypeError, "must be integers"),
        (lambda c: c.append("a", [2**31]), ConfigError, "32 bits"),
        (lambda c: c.append("a", np.array([2**31])), ConfigError, "32 bits"),
        (lambda c: c.append_each(["a", "a"], [1, 2]), ConfigError, "be distinct"),
        (lambda c: c.append_each(["a"], [1, 2]), ConfigError, "2 tokens for 1"),
        (lambda c: c.resume("a"), ConfigError, "is running"),
        (lambda c: c.swap_blocks_from_cpu("a"), ConfigError, "was not swapped"),
        (lambda c: c.preempt("a", by="hope"), ConfigError, "'swap', 'recompute'"),
        (lambda c: c.block(8), ConfigError, "at most 7"),
        (lambda c: c.free("a", keep=1), ConfigError, "True or False"),
        (lambda c: c.append("a", range(100)), OutOfMemoryError, "25 blocks are needed"),
        (lambda c: manager(0), ConfigError, "num_blocks"),
        (lambda c: manager(policy="fifo"), ConfigError, "policy"),
        (lambda c: manager(dtype="int8"), ArrayDtypeError, "int8"),
        (lambda c: manager(1, 1, head_dim=3), ConfigError, "multiple of 16 bytes, got 6"),
    ],
)
def test_rejected_calls_change_nothing(call: Any, error: type[CukitError], message: str) -> None:
    cache = manager()
    cache.allocate("a", range(6))
    before = cache.statistics()
    with pytest.raises(error, match=message):
        call(cache)
    assert cache.statistics() == before
    assert cache.slots("a").tolist() == list(range(6))
    cache.check_invariants()


class Writer:
    """Writes stand-ins for keys and values: a function of all tokens up to each position."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.tokens: dict[Hashable, list[int]] = {}

    def expected(self, request: Hashable) -> np.ndarray[Any, Any]:
        state, sums = 1, []
        for token in self.tokens[request]:
            state = (state * 31 + token + 1) % 1_000_003
            sums.append(state)
        return np.asarray(sums, np.float32)

    def write(self, request: Hashable, begin: int, slots: Any) -> None:
        rows = self.cache.slab.array
        values = namespace(rows).asarray(self.expected(request)[begin:])
        blocks, places = np.divmod(slots, self.cache.block_size)
        for layer in range(rows.shape[1]):
            rows[0, layer, blocks, places] = (values + layer)[:, None, None]
            rows[1, layer, blocks, places] = -(values + layer)[:, None, None]

    def check(self, request: Hashable) -> None:
        rows = self.cache.slab.array
        blocks, places = np.divmod(self.cache.slots(request), self.cache.block_size)
        for layer in range(rows.shape[1]):
            values = namespace(rows).asarray(self.expected(request) + layer)[:, None, None]
            assert (rows[0, layer, blocks, places] == values).all()
            assert (rows[1, layer, blocks, places] == -values).all()


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@pytest.mark.parametrize("seed", range(6))
@emulated(lambda policy, seed: (policy, seed) == ("lru", 0))
def test_random_requests_read_what_they_wrote(policy: str, seed: int, device: str) -> None:
    """Prompts with common prefixes, forks and swaps, in a slab too small for all requests."""
    random_ = random.Random(f"{policy} {seed}")
    cache = manager(
        random_.choice([6, 12, 24]), random_.choice([1, 3, 4]), num_layers=2,
        head_dim=4, dtype=np.float32, policy=policy, device=device,
    )  # fmt: skip
    writer = Writer(cache)
    running: set[int] = set()
    waiting: set[int] = set()
    refused = 0
    for step in range(500):
        choice = random_.random()
        try:
            if choice < 0.25 or not running | waiting:
                count = random_.randrange(1, 20)
                tokens = [random_.randrange(2) if i > 2 else 0 for i in range(count)]
                cached = cache.allocate(step, tokens, salt=step % 2, priority=random_.randrange(3))
                running.add(step)
                writer.tokens[step] = tokens
                writer.write(step, cached, cache.slots(step, cached))
            elif choice < 0.35 and waiting:
                request = random_.choice(sorted(waiting))
                cached = cache.resume(request)
                waiting.remove(request)
                running.add(request)
                writer.write(request, cached, cache.slots(request, cached))
            elif not running or choice < 0.4:
                request = random_.choice(sorted(running | waiting))
                cache.free(request, keep=random_.random() < 0.8)
                running.discard(request)
                waiting.discard(request)
            elif choice < 0.6:
                batch = random_.sample(sorted(running), random_.randrange(len(running)) + 1)
                tokens = [random_.randrange(2) for _ in batch]
                slots = cache.append_each(batch, tokens)
                for request, token, slot in zip(batch, tokens, slots, strict=True):
                    writer.tokens[request].append(token)
                    writer.write(request, len(writer.tokens[request]) - 1, slot[None])
            else:
                request = random_.choice(sorted(running))
                if choice < 0.7:
                    tokens = [random_.randrange(2) for _ in range(random_.randrange(6))]
                    slots = cache.append(request, tokens)
                    begin = len(writer.tokens[request])
                    writer.tokens[request] += tokens
                    writer.write(request, begin, slots)
                elif choice < 0.8:
                    cache.fork(request, step)
                    running.add(step)
                    writer.tokens[step] = list(writer.tokens[request])
                elif choice < 0.9:
                    cache.publish(request)
                else:
                    cache.preempt(request, by=random_.choice(["swap", "recompute"]))
                    running.remove(request)
                    waiting.add(request)
        except OutOfMemoryError:
            refused += 1
        cache.check_invariants()
        for request in running:
            writer.check(request)
    assert refused
    for request in running | waiting:
        cache.free(request)
    assert cache.available_blocks == cache.num_blocks


@pytest.mark.gpu
def test_swapped_blocks_are_reused_only_after_their_copy() -> None:
    """The next request overwrites the blocks while 0.5 GB are still being copied to the host."""
    import cupy

    cache = manager(64, 64, num_layers=32, num_heads_kv=8, head_dim=128, device="gpu")
    cache.allocate("a", range(64 * 64))
    rows = cache.slab.array
    rows[...] = cupy.random.default_rng(0).standard_normal(rows.shape, np.float32)
    before = rows.copy()
    cache.preempt("a")
    cache.allocate("b", range(1, 64 * 64))
    rows[...] = 0
    cache.free("b", keep=False)
    assert cache.resume("a") == 64 * 64
    table, _ = cache.block_table(["a"])
    assert (rows[:, :, table[0]] == before).all()


@pytest.mark.gpu
def test_host_memory_of_a_swap_is_kept_until_its_copies_complete() -> None:
    """Overwrites new pinned memory of the same size while the copies of a swap may still run."""
    import cupy
    import cupyx

    cache = manager(64, 64, num_layers=32, num_heads_kv=8, head_dim=128, device="gpu")
    cache.allocate("a", range(64 * 32))
    rows = cache.slab.array
    rows[...] = cupy.random.default_rng(0).standard_normal(rows.shape, np.float32)
    table, _ = cache.block_table(["a"])
    before = rows[:, :, table[0]]
    size = cache.swap_blocks_to_cpu("a")
    cache.swap_blocks_from_cpu("a")
    cupyx.empty_pinned(size // 8, np.int64)[...] = -1
    table, _ = cache.block_table(["a"])
    assert (rows[:, :, table[0]] == before).all()
    cache.preempt("a")
    cache.free("a")
    stolen = cupyx.empty_pinned(size // 8, np.int64)
    stolen[...] = -1
    cupy.cuda.Device().synchronize()
    assert (stolen == -1).all()
