"""Hits of the prefix cache on a trace of conversations, compared with an exact simulator."""

from __future__ import annotations

import random

import pytest

from cukit.errors import OutOfMemoryError
from cukit.kv_cache import KVCacheManager
from cukit.memory import HostProvider, MemoryPool
from tests.kv_cache.prefix_simulator import PrefixCacheSimulator, Turn, conversations

BLOCK_SIZE = 4


def replay(turns: list[Turn], num_blocks: int, policy: str, concurrent: int) -> tuple[int, ...]:
    """Runs manager and simulator together, comparing hits and evictions after every step."""
    cache = KVCacheManager(
        num_blocks, BLOCK_SIZE, num_heads_kv=1, head_dim=4, policy=policy,
        pool=MemoryPool(provider=HostProvider()),
    )  # fmt: skip
    model = PrefixCacheSimulator(num_blocks, BLOCK_SIZE, policy)
    random_ = random.Random(num_blocks)
    waiting, running = list(enumerate(turns)), list[tuple[int, list[int]]]()

    def allowed(call: object, *arguments: object, **options: object) -> bool:
        try:
            call(*arguments, **options)  # type: ignore[operator]
        except OutOfMemoryError:
            return False
        return True

    while waiting or running:
        if waiting and len(running) < concurrent:
            number, turn = waiting.pop(0)
            fits = allowed(cache.allocate, number, turn.prompt, priority=turn.priority)
            assert fits == model.begin(number, turn.prompt, turn.priority)
            if fits:
                running.append((number, list(turn.answer)))
        else:
            number, answer = random_.choice(running)
            fits = bool(answer) and allowed(cache.append, number, answer[:1])
            assert not answer or fits == model.append(number, answer[0])
            if fits:
                del answer[0]
            else:  # the answer is complete, or the cache is full
                running.remove((number, answer))
                cache.free(number)
                model.end(number)
        statistics = cache.statistics()
        assert (statistics.cached_tokens, statistics.evicted_blocks) == (model.hits, model.evicted)
    cache.check_invariants()
    assert cache.available_blocks == num_blocks
    return model.hits, model.evicted, model.refused


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@pytest.mark.parametrize("concurrent", [1, 5])
def test_hits_equal_an_exact_simulator(policy: str, concurrent: int) -> None:
    turns = conversations(seed=concurrent, num_turns=250)
    curve = [replay(turns, size, policy, concurrent) for size in (24, 48, 96, 192, 4096)]
    hits, evicted, refused = zip(*curve, strict=True)
    assert hits[0] < hits[2] < hits[-1]
    assert evicted[0] > evicted[-1] == 0
    assert refused[0] > 0 or concurrent == 1


def test_without_eviction_every_earlier_prefix_is_found() -> None:
    """One request at a time: the hits are the whole blocks of the longest earlier prefix."""
    turns = conversations(seed=9, num_turns=200)
    said: set[tuple[int, ...]] = set()
    expected = 0
    for turn in turns:
        most = (len(turn.prompt) - 1) // BLOCK_SIZE
        ends = [BLOCK_SIZE * (i + 1) for i in range(most)]
        expected += BLOCK_SIZE * sum(turn.prompt[:end] in said for end in ends)
        text = turn.prompt + turn.answer
        said.update(text[:end] for end in range(BLOCK_SIZE, len(text) + 1, BLOCK_SIZE))
    for policy in ("lru", "lfu", "priority"):
        assert replay(turns, 1 << 14, policy, 1) == (expected, 0, 0)
