"""A radix tree over tokens that maps prefixes to the cache blocks of their keys and values.

An edge holds one or more whole blocks of tokens, and is split between blocks where two sequences
diverge. Nodes on the path of a running sequence are locked; eviction takes blocks from the ends of
unlocked leaves, in the order of a policy.

Invariants between calls:
    a node's locks >= the sum of its children's locks
    evictable_blocks = blocks of all nodes without locks
    every unlocked leaf has an entry in the eviction queue
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

TOKEN_BYTES = 4
"""Tokens are int32, and runs of tokens are `bytes`: they compare at the speed of memcmp and hash
without a tuple of integers."""


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
        """Keyed by the tokens of their first block."""
        self.locks = 0
        self.last_use = 0
        self.uses = 0
        self.priority = 0
        self.queued = False


class Root(Node):
    """The root of all sequences with one salt; holds no tokens."""

    __slots__ = ("salt",)

    def __init__(self, salt: Hashable) -> None:
        super().__init__(None, b"", [])
        self.salt = salt


POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_use,),
    "lfu": lambda node: (node.uses, node.last_use),
    "priority": lambda node: (node.priority, node.last_use),
}
"""Eviction ranks: the smallest is evicted first. A rank never decreases while a node is cached."""


class RadixTree:
    """Prefixes of token sequences, separate for each salt. block_size: tokens per block."""

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

        If the prefix ends within a node, the node is split, so that a lock covers only the prefix.
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
        """The number of blocks that `match` would find; changes nothing."""
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
        """Adds a sequence of whole blocks; returns the node where it ends, and how many of its
        blocks were cached before.

        The tree takes over the blocks that were not cached before; the caller keeps the others.
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
        """Protects a node and its ancestors from eviction until the matching `unlock`."""
        for each in self._path(node):
            if not each.locks:
                self.evictable_blocks -= len(each.blocks)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Reverts one `lock`."""
        for each in self._path(node):
            each.locks -= 1
            if not each.locks:
                self.evictable_blocks += len(each.blocks)
        self._enqueue(node)

    def evict(self, count: int) -> list[int]:
        """Removes up to `count` unlocked blocks from the tree, and returns them."""
        evicted: list[int] = []
        while len(evicted) < count and self._candidates:
            rank, _, node = heapq.heappop(self._candidates)
            node.queued = False
            if rank != self._rank(node):
                self._enqueue(node)  # used in the meantime: back into the queue
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
        """All nodes except the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def check_invariants(self) -> None:
        """Raises AssertionError if an invariant of the module docstring does not hold."""
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
        assert len(blocks) == len(set(blocks)) == self.num_blocks, "a block is in the tree twice"
        assert evictable == self.evictable_blocks

    def _path(self, node: Node) -> Iterator[Node]:
        """A node and its ancestors, without the root."""
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
        """Moves the first `count` blocks of a node to a new parent, and returns the parent.

        The old node keeps the rest, so references to it still cover the whole path.
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
        """Adds an unlocked leaf to the eviction queue, unless it is there already."""
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
