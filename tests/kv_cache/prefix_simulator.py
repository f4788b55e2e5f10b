"""An exact model of a prefix cache's policies: which blocks it must find and evict.

It has no tree, slots or locks: a cached block is a key (all tokens up to its end) with its own
times and counts, and the blocks held by running requests are counted. It is short enough to be
verified by reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Key = tuple[int, ...]


@dataclass
class CachedBlock:
    """The times and counts of a block, by which the policies rank it."""

    last_use: int
    uses: int
    priority: int


RANKS: dict[str, Callable[[CachedBlock], tuple[int, ...]]] = {
    "lru": lambda block: (block.last_use,),
    "lfu": lambda block: (block.uses, block.last_use),
    "priority": lambda block: (block.priority, block.last_use),
}


@dataclass
class _Request:
    tokens: list[int]
    priority: int
    num_found: int
    """Blocks found in the cache at the start."""


class PrefixCacheSimulator:
    """Requests that start, grow and end in `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.hits = self.evicted = self.refused = 0
        self._rank = RANKS[policy]
        self._cached: dict[Key, CachedBlock] = {}
        self._requests: dict[int, _Request] = {}
        self._time = 0

    def begin(self, name: int, tokens: Sequence[int], priority: int) -> bool:
        """Starts a request; returns whether there was room.

        The last token is always computed, never found in the cache.
        """
        found = self._touch(tokens, (len(tokens) - 1) // self.block_size)
        self._requests[name] = _Request(list(tokens), priority, found)
        if not self._make_room():
            del self._requests[name]
            self.refused += 1
            return False
        self.hits += found * self.block_size
        return True

    def append(self, name: int, token: int) -> bool:
        """Appends a token; returns whether there was room."""
        request = self._requests[name]
        request.tokens.append(token)
        if not self._make_room():
            request.tokens.pop()
            self.refused += 1
            return False
        return True

    def end(self, name: int) -> None:
        """Ends a request; its full blocks stay cached."""
        request = self._requests.pop(name)
        num_full = len(request.tokens) // self.block_size
        known = self._touch(request.tokens, num_full)
        keys = self._keys(request.tokens, num_full)
        if known < num_full:
            self._time += 1
        for key in keys[known:]:
            self._cached[key] = CachedBlock(self._time, 1, request.priority)
        for key in keys:
            block = self._cached[key]
            block.priority = max(block.priority, request.priority)

    def _keys(self, tokens: Sequence[int], num_blocks: int) -> list[Key]:
        return [tuple(tokens[: (i + 1) * self.block_size]) for i in range(num_blocks)]

    def _touch(self, tokens: Sequence[int], most: int) -> int:
        """Marks the cached blocks among the first `most` as used; returns their number."""
        self._time += 1
        found = 0
        for key in self._keys(tokens, most):
            if key not in self._cached:
                break
            self._cached[key].last_use = self._time
            self._cached[key].uses += 1
            found += 1
        return found

    def _make_room(self) -> bool:
        """Evicts blocks until everything fits, in the order of the policy: only blocks that no
        running request found at its start and that no cached block follows. Evicts nothing if
        these are not enough."""
        held = {
            key
            for request in self._requests.values()
            for key in self._keys(request.tokens, request.num_found)
        }
        own = sum(
            -(-len(request.tokens) // self.block_size) - request.num_found
            for request in self._requests.values()
        )
        excess = own + len(self._cached) - self.num_blocks
        if excess > len(self._cached) - len(held):
            return False
        for _ in range(excess):
            followed = {key[: -self.block_size] for key in self._cached}
            leaves = self._cached.keys() - followed - held
            lowest = min(leaves, key=lambda key: self._rank(self._cached[key]))
            del self._cached[lowest]
            self.evicted += 1
        return True


@dataclass(frozen=True)
class Turn:
    """A request of a conversation, and the answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    priority: int


def conversations(
    seed: int, num_turns: int, *, num_prompts: int = 8, block_size: int = 4
) -> list[Turn]:
    """A trace of multi-turn conversations over shared system prompts with Zipf popularity.

    The prompt of a turn is the system prompt, all earlier questions and answers, and a question.
    """
    generator = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, num_prompts + 1)
    popularity /= popularity.sum()
    systems = [
        tuple(generator.integers(100, 200, generator.integers(1, 6) * block_size + 1).tolist())
        for _ in range(num_prompts)
    ]
    open_texts: list[tuple[tuple[int, ...], int]] = []
    turns = []
    for _ in range(num_turns):
        if not open_texts or generator.random() < 0.4:
            which = int(generator.choice(num_prompts, p=popularity))
            text, priority = systems[which], which % 3
        else:
            text, priority = open_texts.pop(int(generator.integers(len(open_texts))))
        question = tuple(generator.integers(0, 50, generator.integers(1, 7)).tolist())
        answer = tuple(generator.integers(0, 50, generator.integers(1, 9)).tolist())
        turns.append(Turn(text + question, answer, priority))
        if generator.random() < 0.7:
            open_texts.append((text + question + answer, priority))
    return turns
