"""A radix tree over tokens: which blocks of the cache hold the keys and values of a prefix.

An edge holds whole blocks of tokens, at least one, and splits between blocks where two sequences
part. Nodes on the path of a running sequence are locked; eviction takes blocks from the ends of
unlocked leaves, in the order of a policy.

Invariants, between any two calls:
    a node's locks >= the sum of its children's locks
    evictable_blocks = blocks of all nodes without locks
    every unlocked leaf has an entry in the queue of candidates
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

TOKEN_BYTES = 4
"""Tokens are int32, and a run of tokens is the bytes of its array: equal runs compare at the speed
of memcmp and hash without a tuple of integers."""


class Node:
    """The tokens between two branches, and their blocks."""

    __slots__ = (
        "blocks", "children", "last_use", "locks", "parent", "priority", "queued", "tokens", "uses",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        """By the tokens of their first block."""
        self.locks = 0
        self.last_use = 0
        self.uses = 0
        self.priority = 0
        self.queued = False


class Root(Node):
    """Where the sequences of one salt begin; holds no tokens."""

    __slots__ = ("salt",)

    def __init__(self, salt: Hashable) -> None:
        super().__init__(None, b"", [])
        self.salt = salt


POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_use,),
    "lfu": lambda node: (node.uses, node.last_use),
    "priority": lambda node: (node.priority, node.last_use),
}
"""What is evicted first: the smallest of these. None of them falls while a node is cached."""


class RadixTree:
    """Prefixes of token sequences, for each salt apart. `block_size`: tokens in a block."""

    def __init__(self, block_size: int, policy: str = "lru") -> None:
        self.num_blocks = 0
        self.evictable_blocks = 0
        self._block_bytes = block_size * TOKEN_BYTES
        self._rank = POLICIES[policy]
        self._roots: dict[Hashable, Root] = {}
        self._clock = itertools.count(1)
        self._order = itertools.count()
        self._candidates: list[tuple[tuple[int, ...], int, Node]] = []

    def match(self, tokens: bytes, salt: Hashable = None) -> tuple[Node, list[int]]:
        """The longest cached prefix in whole blocks: the node where it ends, and its blocks.

        A node that the prefix leaves midway is split, so that a lock covers the prefix alone.
        """
        now, step = next(self._clock), self._block_bytes
        node: Node = self._roots.get(salt) or Root(salt)
        begin, blocks = 0, list[int]()
        while child := node.children.get(tokens[begin : begin + step]):
            size = len(child.tokens)
            if tokens[begin : begin + size] != child.tokens:
                child = self._split(child, self._common_blocks(child.tokens, tokens[begin:]))
                size = len(child.tokens)
            child.last_use = now
            child.uses += 1
            blocks += child.blocks
            node, begin = child, begin + size
        return node, blocks

    def peek(self, tokens: bytes, salt: Hashable = None) -> int:
        """How many blocks `match` would find; changes nothing."""
        node: Node = self._roots.get(salt) or Root(salt)
        begin, step = 0, self._block_bytes
        while child := node.children.get(tokens[begin : begin + step]):
            size = len(child.tokens)
            if tokens[begin : begin + size] != child.tokens:
                return begin // step + self._common_blocks(child.tokens, tokens[begin:])
            node, begin = child, begin + size
        return begin // step

    def insert(
        self, tokens: bytes, blocks: list[int], salt: Hashable = None, priority: int = 0
    ) -> tuple[Node, int]:
        """Adds a sequence of whole blocks: the node where it ends, and how many were there before.

        The tree adopts `blocks` from that number on; what it had stays as it is.
        """
        node, found = self.match(tokens, salt)
        known = len(found)
        if known < len(blocks):
            if isinstance(node, Root):
                self._roots[salt] = node
            leaf = Node(node, tokens[known * self._block_bytes :], blocks[known:])
            leaf.last_use = next(self._clock)
            leaf.uses = 1
            node.children[leaf.tokens[: self._block_bytes]] = leaf
            self.num_blocks += len(leaf.blocks)
            self.evictable_blocks += len(leaf.blocks)
            node = leaf
        for each in self._path(node):
            each.priority = max(each.priority, priority)
        self._enqueue(node)
        return node, known

    def lock(self, node: Node) -> None:
        """Keeps a node and all before it until as many `unlock`s."""
        for each in self._path(node):
            if not each.locks:
                self.evictable_blocks -= len(each.blocks)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        for each in self._path(node):
            each.locks -= 1
            if not each.locks:
                self.evictable_blocks += len(each.blocks)
        self._enqueue(node)

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` blocks that no lock keeps, and returns them."""
        evicted: list[int] = []
        while len(evicted) < count and self._candidates:
            rank, _, node = heapq.heappop(self._candidates)
            node.queued = False
            if rank != self._rank(node):
                self._enqueue(node)  # used since; its turn comes later
                continue
            if node.locks or node.children or not node.parent:
                continue
            keep = max(0, len(node.blocks) - (count - len(evicted)))
            evicted += reversed(node.blocks[keep:])
            if keep:
                del node.blocks[keep:]
                node.tokens = node.tokens[: keep * self._block_bytes]
                self._enqueue(node)
            else:
                self._remove(node)
        self.num_blocks -= len(evicted)
        self.evictable_blocks -= len(evicted)
        return evicted

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def check_invariants(self) -> None:
        """Raises AssertionError unless the equations above hold."""
        queued = {id(node) for _, _, node in self._candidates}
        blocks: list[int] = []
        evictable = 0
        for node in self.nodes():
            assert node.blocks, "a node without blocks"
            assert len(node.tokens) == len(node.blocks) * self._block_bytes
            assert node.parent is not None
            assert node.parent.children[node.tokens[: self._block_bytes]] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            blocks += node.blocks
            if not node.locks:
                evictable += len(node.blocks)
                assert node.children or id(node) in queued, "an unlocked leaf is not a candidate"
        assert len(blocks) == len(set(blocks)) == self.num_blocks, "a block twice in the tree"
        assert evictable == self.evictable_blocks

    def _path(self, node: Node) -> Iterator[Node]:
        """A node and those before it, without the root."""
        while node.parent:
            yield node
            node = node.parent

    def _common_blocks(self, one: bytes, other: bytes) -> int:
        size = min(len(one), len(other))
        differs = np.frombuffer(one, np.int32, size // TOKEN_BYTES) != np.frombuffer(
            other, np.int32, size // TOKEN_BYTES
        )
        first: Any = differs.argmax() if differs.any() else differs.size
        return int(first) * TOKEN_BYTES // self._block_bytes

    def _split(self, lower: Node, count: int) -> Node:
        """Gives the first `count` blocks of a node to a new parent, and returns that.

        The old node keeps the end, so what refers to it goes on covering the whole path.
        """
        step, cut = self._block_bytes, count * self._block_bytes
        assert lower.parent is not None
        upper = Node(lower.parent, lower.tokens[:cut], lower.blocks[:count])
        upper.locks, upper.last_use = lower.locks, lower.last_use
        upper.uses, upper.priority = lower.uses, lower.priority
        upper.parent.children[upper.tokens[:step]] = upper  # type: ignore[union-attr]
        lower.parent, lower.tokens, lower.blocks = upper, lower.tokens[cut:], lower.blocks[count:]
        upper.children[lower.tokens[:step]] = lower
        return upper

    def _enqueue(self, node: Node) -> None:
        """Makes an unlocked leaf a candidate for eviction, once."""
        if node.parent and not (node.locks or node.children or node.queued):
            node.queued = True
            heapq.heappush(self._candidates, (self._rank(node), next(self._order), node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[: self._block_bytes]]
        node.parent = None
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.salt]
        self._enqueue(parent)
