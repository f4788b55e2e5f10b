"""The KV cache manager: assigns cache blocks to requests, shares prefixes, evicts and swaps."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cukit.attention.paged.cache_arrays import GROUP_ROWS
from cukit.core.arrays import Array, bfloat16, float16, float32
from cukit.core.narrow_dtype import NarrowDtype, float8_e4m3, int4, int8
from cukit.core.scalars import check_choice, check_flag, check_integer
from cukit.errors import ArrayDtypeError, ConfigError, OutOfMemoryError
from cukit.kv_cache._slab import HostBlocks, KVCacheSlab
from cukit.kv_cache.radix_tree import POLICIES, TOKEN_BYTES, Node, RadixTree
from cukit.kv_cache.statistics import KVCacheBlock, KVCacheStatistics
from cukit.memory import MemoryPool
from cukit.memory.uninterrupted import Uninterrupted

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

_OP = "KVCacheManager"


class _Sequence:
    """The state of a request: its tokens, its blocks, and the tree node that it locks."""

    __slots__ = ("blocks", "host", "node", "priority", "salt", "tokens")

    def __init__(self, tokens: array[int], salt: Hashable, priority: int) -> None:
        self.tokens = tokens
        self.blocks = array("i")
        self.node: Node | None = None
        self.salt = salt
        self.priority = priority
        self.host: HostBlocks | None = None

    @property
    def running(self) -> bool:
        """Whether the request has blocks; a preempted one has none."""
        return self.node is not None


class KVCacheManager:
    """Keys and values of many requests in blocks of one slab, with shared prefixes.

    Each block holds `block_size` tokens of a request. Requests with a common prefix share its
    blocks: `publish` and `free` keep full blocks in a radix tree, `allocate` finds them there, and
    blocks that no request holds are evicted when new ones are needed. Forks share all blocks; the
    first fork to write to a shared block gets a copy.

    The manager assigns blocks and never reads keys or values, except to copy blocks. Every call
    either succeeds or changes nothing. Not thread-safe.

    Args:
        num_blocks: number of blocks in the slab.
        block_size: tokens per block.
        num_layers, num_heads_kv, head_dim: dimensions of the model.
        dtype: float16, bfloat16 or float32; int8 or float8_e4m3 (`ck.int8`), with one float32
            scale per token and head for keys and for values, written by `append_kv`; or int4
            (`ck.int4`, KIVI), with blocks of 32 or 64 tokens, see `pack`.
        num_rings: with int4, the number of 16-bit ring buffers. Each partly filled block needs one,
            so num_rings limits how many requests run at once.
        recent_dtype: with int4, the dtype of the ring buffers: float16 or bfloat16.
        policy: eviction order: "lru" least recently used first, "lfu" least frequently used first,
            "priority" lowest priority first.
        pool: the memory pool of the slab; None: the default pool of the current device, or host
            memory without a GPU.

    Raises:
        ConfigError: an argument outside its range, an unknown request, or one that exists already.
        ArrayDtypeError: an unsupported dtype of the cache or of tokens.
        OutOfMemoryError: more blocks are needed than are free or evictable.

    References: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180) for blocks and copy-on-write;
    Zheng et al. 2024 (SGLang, arXiv:2312.07104) for the radix tree.

    >>> cache = KVCacheManager(num_blocks=8, block_size=4, num_heads_kv=1, head_dim=8)
    >>> cache.allocate("a", [1, 2, 3, 4, 5])   # number of cached tokens
    0
    >>> cache.slots("a").tolist()              # where the keys and values are to be written
    [0, 1, 2, 3, 4]
    >>> cache.free("a")
    >>> cache.allocate("b", [1, 2, 3, 4, 9, 9])
    4
    >>> cache.append("b", [7]).tolist()        # row 2 of block 2
    [10]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_layers: int = 1,
        num_heads_kv: int,
        head_dim: int,
        dtype: Any = np.float16,
        num_rings: int = 64,
        recent_dtype: Any = np.float16,
        policy: str = "lru",
        pool: MemoryPool | None = None,
    ) -> None:
        shape = {
            "num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size,
            "num_heads_kv": num_heads_kv, "head_dim": head_dim,
        }  # fmt: skip
        for name, value in shape.items():
            check_integer(_OP, name, value, least=1, most=2**31 - 1)
        check_choice(_OP, "policy", policy, (*POLICIES,))
        if not isinstance(dtype, NarrowDtype):
            dtype = np.dtype(dtype)
        if dtype not in (float16, bfloat16, float32, int8, float8_e4m3, int4):
            raise ArrayDtypeError(
                f"{_OP}: dtype must be float16, bfloat16, float32, int8, float8_e4m3 or int4, got "
                f"{dtype}"
            )
        sizes = [int(value) for value in shape.values()]
        if dtype is int4:
            self._check_groups(sizes[2], sizes[4], num_rings, np.dtype(recent_dtype))
        self.slab = KVCacheSlab(
            (sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), dtype, pool,
            num_rings if dtype is int4 else 0, np.dtype(recent_dtype),
        )  # fmt: skip
        self._packs = dtype is int4
        self._ring_of_block: dict[int, int] = {}
        """The ring buffer of each block that is not packed yet."""
        self._free_rings = deque(range(num_rings if dtype is int4 else 0))
        self.num_blocks, self.block_size = sizes[1], sizes[2]
        self._tree = RadixTree(self.block_size, policy)
        self._free = deque(range(self.num_blocks))
        self._references = [0] * self.num_blocks
        self._sequences: dict[Hashable, _Sequence] = {}
        self._copying_to_host: dict[int, HostBlocks] = {}
        """Free blocks whose copy to the host may still be in progress."""
        self._prompt_tokens = self._cached_tokens = self._evicted_blocks = 0

    # Requests -------------------------------------------------------------------------------------

    def allocate(
        self, request: Hashable, tokens: Tokens, *, salt: Hashable = None, priority: int = 0
    ) -> int:
        """Starts a request; returns the length of its cached prefix in tokens.

        The prefix never includes the last token, because its output must be computed. salt: only
        requests with equal salts share blocks. priority: rank of the request's cached blocks with
        policy "priority".
        With int4, the caller packs the new full blocks as they are computed (`pack_kv`).
        """
        if request in self._sequences:
            raise ConfigError(f"allocate: the request {request!r} exists already")
        check_integer("allocate", "priority", priority)
        sequence = _Sequence(_tokens("allocate", tokens), salt, int(priority))
        cached = self._start("allocate", sequence)
        self._sequences[request] = sequence
        self._prompt_tokens += len(sequence.tokens)
        self._cached_tokens += cached
        return cached

    def append(self, request: Hashable, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Appends tokens to a request; returns the slots of their keys and values.

        Slot s is row `s % block_size` of block `s // block_size`.
        """
        sequence = self._running("append", request)
        added = _tokens("append", tokens)
        if self._packs and len(added) > 1:
            raise ConfigError(
                f"append: with int4, one token at a time can be appended, got {len(added)}"
            )
        self._extend("append", [sequence], [added])
        return self._slots(sequence, len(sequence.tokens) - len(added))

    def append_each(self, requests: Sequence[Hashable], tokens: Tokens) -> npt.NDArray[np.int64]:
        """A decode step: appends a token to each request; returns the slots, int64 [requests].

        One launch copies all shared blocks that must be copied.
        """
        sequences = [self._running("append_each", request) for request in requests]
        added = _tokens("append_each", tokens)
        if len(added) != len(sequences) or len(set(map(id, sequences))) != len(sequences):
            raise ConfigError(
                f"append_each: got {len(added)} tokens for {len(sequences)} requests, which must "
                "be distinct and have one token each"
            )
        self._extend("append_each", sequences, [added[i : i + 1] for i in range(len(added))])
        size = self.block_size
        last = [len(sequence.tokens) - 1 for sequence in sequences]
        blocks = [sequence.blocks[-1] for sequence in sequences]
        if self._packs:
            blocks = [self._ring_of_block[block] for block in blocks]
        return np.asarray(blocks, np.int64) * size + np.asarray(last, np.int64) % size

    def pack(self) -> int:
        """int4: quantises newly filled blocks, all layers in one launch; returns their number.

        Call it after the writes of their keys and values have been enqueued, and before the next
        token is appended. Until a request's last block is packed, its keys and values are in a
        16-bit ring buffer: `slots` and `append` return rows of the ring buffers `recent_keys` and
        `recent_values`, and `recent` returns the arguments of :func:`paged_attention`.
        """
        full = dict.fromkeys(
            sequence.blocks[-1]
            for sequence in self._sequences.values()
            if sequence.blocks
            and len(sequence.tokens) % self.block_size == 0
            and sequence.blocks[-1] in self._ring_of_block
        )
        self.slab.pack([self._ring_of_block[block] for block in full], [*full])
        with Uninterrupted():
            for block in full:
                self._free_rings.append(self._ring_of_block.pop(block))
        return len(full)

    def publish(self, request: Hashable) -> int:
        """Makes the full blocks of a request available to others; returns their number.

        Call it after the writes of its keys and values have been enqueued. Blocks that other
        requests have already published are not replaced; blocks shared with a fork are published by
        the last of the forks.
        """
        return self._publish(self._running("publish", request))

    def fork(self, request: Hashable, new_request: Hashable) -> None:
        """Starts a request with the same tokens and blocks, which are copied on write."""
        sequence = self._running("fork", request)
        if new_request in self._sequences:
            raise ConfigError(f"fork: the request {new_request!r} exists already")
        twin = _Sequence(sequence.tokens[:], sequence.salt, sequence.priority)
        twin.blocks = sequence.blocks[:]
        self._acquire(twin, sequence.node)
        self._sequences[new_request] = twin

    def free(self, request: Hashable, *, keep: bool = True) -> None:
        """Ends a request, running or preempted. keep: publish its full blocks first."""
        check_flag("free", "keep", keep)
        sequence = self._known("free", request)
        if sequence.running:
            self._release_all(sequence, keep=keep)
        del self._sequences[request]

    # Preemption -----------------------------------------------------------------------------------

    def preempt(self, request: Hashable, by: str = "swap") -> None:
        """Releases a request's blocks until `resume`.

        by: "swap" copies its keys and values to host memory; "recompute" discards them, except that
            full blocks stay cached until they are evicted.
        """
        check_choice("preempt", "by", by, ("swap", "recompute"))
        if by == "swap":
            self.swap_blocks_to_cpu(request)
        else:
            self._release_all(self._running("preempt", request), keep=True)

    def resume(self, request: Hashable) -> int:
        """Assigns blocks to a preempted request again; returns how many of its leading tokens have
        keys and values: all of them after a swap."""
        sequence = self._known("resume", request)
        if sequence.host is not None:
            self.swap_blocks_from_cpu(request)
            return len(sequence.tokens)
        if sequence.running:
            raise ConfigError(f"resume: the request {request!r} is running")
        return self._start("resume", sequence)

    def swap_blocks_to_cpu(self, request: Hashable) -> int:
        """Copies a request's blocks to host memory and releases them; returns the bytes copied.

        Copies run on a separate stream. Shared blocks stay with the other requests. After any
        exception, Ctrl-C included, the request is either running or swapped.
        """
        sequence = self._running("swap_blocks_to_cpu", request)
        last = sequence.blocks[-1] if sequence.blocks else -1
        host = self.slab.to_host(sequence.blocks, self._ring_of_block.get(last))
        blocks = sequence.blocks
        with Uninterrupted():
            sequence.host = host
            self._release_all(sequence, keep=False)
            freed = (block for block in blocks if not self._references[block])
            self._copying_to_host.update((block, host) for block in freed)
        return host.nbytes

    def swap_blocks_from_cpu(self, request: Hashable) -> int:
        """Copies a swapped request's blocks back, bit for bit; returns the bytes copied.

        After any exception the request is either swapped or running.
        """
        sequence = self._known("swap_blocks_from_cpu", request)
        host = sequence.host
        if host is None:
            raise ConfigError(f"swap_blocks_from_cpu: the request {request!r} was not swapped")
        blocks: list[int] = []
        try:
            with Uninterrupted():
                self._check_rings("swap_blocks_from_cpu", int(host.ring is not None))
                blocks = self._take("swap_blocks_from_cpu", self._blocks_for(len(sequence.tokens)))
                if host.ring is not None:
                    self._assign_rings("swap_blocks_from_cpu", blocks[-1:])
            self.slab.from_host(
                host, blocks, self._ring_of_block.get(blocks[-1]) if blocks else None
            )
            with Uninterrupted():
                root, _ = self._tree.match(b"", sequence.salt)
                self._acquire(sequence, root)
                sequence.blocks.extend(blocks)
                sequence.host = None
        except BaseException:
            if sequence.host is not None:
                with Uninterrupted():
                    self._release(blocks)
            raise
        return host.nbytes

    # Arguments of attention -----------------------------------------------------------------------

    def keys(self, layer: int) -> Any:
        """The keys of a layer, [num_blocks, block_size, num_heads_kv, head_dim], as a view of the
        slab: an array, or a QuantizedArray."""
        return self.slab.layer_cache(0, layer)

    def values(self, layer: int) -> Any:
        """The values of a layer; see `keys`."""
        return self.slab.layer_cache(1, layer)

    def recent_keys(self, layer: int) -> Array:
        """int4: a layer's ring buffers of keys, [num_rings, block_size, num_heads_kv, head_dim], a
        view; see `pack`."""
        assert self.slab.recent is not None
        return self.slab.recent[0, layer]

    def recent_values(self, layer: int) -> Array:
        """int4: a layer's ring buffers of values; see `recent_keys`."""
        assert self.slab.recent is not None
        return self.slab.recent[1, layer]

    def recent(
        self, requests: Sequence[Hashable]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """int4: rings and packed_lens of requests, int32 on the host; see :class:`RecentKV`."""
        sequences = [self._running("recent", request) for request in requests]
        rings = [
            self._ring_of_block.get(each.blocks[-1], -1) if each.blocks else -1
            for each in sequences
        ]
        packed = [self._packed_tokens(sequence) for sequence in sequences]
        return np.asarray(rings, np.int32), np.asarray(packed, np.int32)

    def slots(self, request: Hashable, begin: int = 0) -> npt.NDArray[np.int64]:
        """The slots of a request's tokens from index `begin` on; see `append`. With int4, -1 for
        tokens that are not in a ring buffer."""
        check_integer("slots", "begin", begin, least=0)
        return self._slots(self._running("slots", request), int(begin))

    def block_table(
        self, requests: Sequence[Hashable], fill: int = -1
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The blocks of each request, int32 [requests, max blocks], padded with `fill`, and the
        token counts, int32 [requests]; both on the host."""
        sequences = [self._running("block_table", request) for request in requests]
        longest = max((len(sequence.blocks) for sequence in sequences), default=0)
        table = np.full((len(sequences), longest), fill, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        lengths = [len(sequence.tokens) for sequence in sequences]
        return table, np.asarray(lengths, np.int32)

    # Statistics -----------------------------------------------------------------------------------

    @property
    def available_blocks(self) -> int:
        """The number of blocks that are free or evictable."""
        return len(self._free) + self._tree.evictable_blocks

    def num_tokens(self, request: Hashable) -> int:
        """The number of tokens of a request, running or preempted."""
        return len(self._known("num_tokens", request).tokens)

    def lookup(self, tokens: Tokens, *, salt: Hashable = None) -> int:
        """The number of leading `tokens` that are cached; changes nothing."""
        return self._tree.peek(_tokens("lookup", tokens).tobytes(), salt) * self.block_size

    def block(self, number: int) -> KVCacheBlock:
        """The state of block `number`."""
        check_integer("block", "number", number, least=0, most=self.num_blocks - 1)
        cached = any(number in node.blocks for node in self._tree.nodes())
        return KVCacheBlock(int(number), self._references[number], cached)

    def statistics(self) -> KVCacheStatistics:
        """The current statistics."""
        swapped = (sequence.host for sequence in self._sequences.values())
        return KVCacheStatistics(
            num_blocks=self.num_blocks,
            free_blocks=len(self._free),
            evictable_blocks=self._tree.evictable_blocks,
            held_blocks=self.num_blocks - self.available_blocks,
            cached_blocks=self._tree.num_blocks,
            swapped_bytes=sum(host.nbytes for host in swapped if host is not None),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            evicted_blocks=self._evicted_blocks,
        )

    def check_invariants(self) -> None:
        """Recounts every reference. Raises AssertionError if the bookkeeping is inconsistent."""
        self._tree.check_invariants()
        references = [0] * self.num_blocks
        locks: dict[int, int] = {}
        for sequence in self._sequences.values():
            expected = self._blocks_for(len(sequence.tokens)) if sequence.running else 0
            assert len(sequence.blocks) == expected
            assert not (sequence.running and sequence.host)
            for block in sequence.blocks:
                references[block] += 1
            node = sequence.node
            while node is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        for node in self._tree.nodes():
            assert node.locks == locks.get(id(node), 0)
            for block in node.blocks:
                assert node.locks or not references[block], "a held block is evictable"
                references[block] += 1
        assert references == self._references
        assert sorted(self._free) == [b for b, count in enumerate(references) if not count]
        assert not self._copying_to_host.keys() - set(self._free)
        lasts = {s.blocks[-1] for s in self._sequences.values() if s.blocks}
        assert not self._ring_of_block.keys() - lasts
        num_rings = 0 if self.slab.recent is None else self.slab.recent.shape[2]
        assert sorted([*self._free_rings, *self._ring_of_block.values()]) == list(range(num_rings))

    # Implementation -------------------------------------------------------------------------------

    def _known(self, op: str, request: Hashable) -> _Sequence:
        sequence = self._sequences.get(request)
        if sequence is None:
            raise ConfigError(f"{op}: there is no request {request!r}")
        return sequence

    def _running(self, op: str, request: Hashable) -> _Sequence:
        sequence = self._known(op, request)
        if not sequence.running:
            raise ConfigError(f"{op}: the request {request!r} is preempted; resume it first")
        return sequence

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _slots(self, sequence: _Sequence, begin: int) -> npt.NDArray[np.int64]:
        positions = np.arange(begin, len(sequence.tokens))
        blocks = np.array(sequence.blocks, np.int64)
        if self._packs:
            packed = self._packed_tokens(sequence)
            ring = self._ring_of_block.get(sequence.blocks[-1], 0) if sequence.blocks else 0
            slots = ring * self.block_size + positions % self.block_size
            return np.where(positions < packed, -1, slots)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _start(self, op: str, sequence: _Sequence) -> int:
        """Assigns blocks to all tokens of a sequence; returns how many tokens were cached."""
        num_tokens = len(sequence.tokens)
        most = max(0, num_tokens - 1) // self.block_size
        prefix = sequence.tokens[: most * self.block_size].tobytes()
        node, blocks = self._tree.match(prefix, sequence.salt)
        sequence.blocks.extend(blocks)
        self._acquire(sequence, node)
        new_rings = int(self._packs and num_tokens % self.block_size > 0)
        try:
            self._check_rings(op, new_rings)  # before cached blocks are evicted
            sequence.blocks.extend(self._take(op, self._blocks_for(num_tokens) - len(blocks)))
            if new_rings:
                self._assign_rings(op, sequence.blocks[-1:])
        except BaseException:
            self._release_all(sequence, keep=False)
            raise
        return len(blocks) * self.block_size

    def _acquire(self, sequence: _Sequence, node: Node | None) -> None:
        assert node is not None
        for block in sequence.blocks:
            self._references[block] += 1
        self._tree.lock(node)
        sequence.node = node

    def _release_all(self, sequence: _Sequence, *, keep: bool) -> None:
        if keep:
            self._publish(sequence)
        assert sequence.node is not None
        self._tree.unlock(sequence.node)
        self._release(sequence.blocks)
        sequence.node = None
        sequence.blocks = array("i")

    def _publish(self, sequence: _Sequence) -> int:
        num_full = len(sequence.tokens) // self.block_size
        if self._packs:
            num_full = self._packed_tokens(sequence) // self.block_size
        tokens = sequence.tokens[: num_full * self.block_size].tobytes()
        blocks = sequence.blocks[:num_full].tolist()
        known = self._tree.peek(tokens, sequence.salt)
        # The last owner publishes a block shared with a fork: the forks' locks on tree nodes would
        # not protect it from eviction.
        end = next((i for i in range(known, num_full) if self._references[blocks[i]] > 1), num_full)
        step = self.block_size * TOKEN_BYTES
        node, known = self._tree.insert(
            tokens[: end * step], blocks[:end], sequence.salt, sequence.priority
        )
        for block in blocks[known:end]:
            self._references[block] += 1
        assert sequence.node is not None
        self._tree.lock(node)
        self._tree.unlock(sequence.node)
        sequence.node = node
        return num_full

    def _extend(self, op: str, sequences: Sequence[_Sequence], added: Sequence[array[int]]) -> None:
        """Appends tokens to sequences: takes new blocks, copies shared ones (copy on write)."""
        size, references = self.block_size, self._references
        needed = 0
        new_rings = 0
        writers: dict[int, list[_Sequence]] = {}
        for sequence, tokens in zip(sequences, added, strict=True):
            used = len(sequence.tokens)
            needed += -(-(used + len(tokens)) // size) - len(sequence.blocks)
            if self._packs and tokens and used % size == 0:
                new_rings += 1
                if sequence.blocks and sequence.blocks[-1] in self._ring_of_block:
                    raise ConfigError(
                        f"{op}: the last block is full but not packed; call pack first"
                    )
            if used % size and tokens and references[last := sequence.blocks[-1]] > 1:
                writers.setdefault(last, []).append(sequence)
        # If all holders of a shared block write in this step, one of them keeps the original.
        copying = [
            (sequence, block)
            for block, sharing in writers.items()
            for sequence in sharing[: references[block] - 1]
        ]
        if self._packs:
            self._check_rings(op, new_rings + len(copying))
        taken = self._take(op, needed + len(copying))
        if copying:
            copies = [taken.pop() for _ in copying]
            try:
                self.slab.copy_blocks(copies, [block for _, block in copying])
                if self._packs:
                    self._assign_rings(op, copies)
                    self.slab.copy_rings(
                        [self._ring_of_block[copy] for copy in copies],
                        [self._ring_of_block[block] for _, block in copying],
                    )
            except BaseException:
                self._release([*taken, *copies])
                raise
            for (sequence, block), copy in zip(copying, copies, strict=True):
                sequence.blocks[-1] = copy
                references[block] -= 1
        for sequence, tokens in zip(sequences, added, strict=True):
            sequence.tokens += tokens
            while len(sequence.blocks) * size < len(sequence.tokens):
                sequence.blocks.append(taken.pop())
                if self._packs:
                    self._assign_rings(op, sequence.blocks[-1:])

    def _take(self, op: str, count: int) -> list[int]:
        """Takes free blocks, with one reference each; evicts cached ones if there are too few."""
        if not count:
            return []
        if count > self.available_blocks:
            raise OutOfMemoryError(
                f"{op}: {count} blocks are needed, but only {len(self._free)} are free and "
                f"{self._tree.evictable_blocks} evictable of {self.num_blocks}; running requests "
                "hold the others; free or preempt one"
            )
        missing = count - len(self._free)
        if missing > 0:
            evicted = self._tree.evict(missing)
            self._evicted_blocks += len(evicted)
            self._release(evicted)
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        if self._copying_to_host:
            copying = self._copying_to_host
            hosts = [copying.pop(block) for block in taken if block in copying]
            for host in dict.fromkeys(hosts):
                self.slab.wait(host)
        return taken

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
                if block in self._ring_of_block:
                    self._free_rings.append(self._ring_of_block.pop(block))

    # Ring buffers (int4) --------------------------------------------------------------------------

    def _packed_tokens(self, sequence: _Sequence) -> int:
        """int4: the number of leading tokens that are not in a ring buffer."""
        if sequence.blocks and sequence.blocks[-1] in self._ring_of_block:
            return (len(sequence.blocks) - 1) * self.block_size
        return len(sequence.tokens)

    def _check_rings(self, op: str, count: int) -> None:
        if count > len(self._free_rings):
            assert self.slab.recent is not None
            raise OutOfMemoryError(
                f"{op}: ring buffers needed: {count}, free: {len(self._free_rings)} of "
                f"{self.slab.recent.shape[2]}; a larger num_rings allows more running requests"
            )

    def _assign_rings(self, op: str, blocks: Iterable[int]) -> None:
        """Assigns a ring buffer to each block."""
        blocks = [*blocks]
        self._check_rings(op, len(blocks))
        for block in blocks:
            self._ring_of_block[block] = self._free_rings.popleft()

    @staticmethod
    def _check_groups(
        block_size: int, head_dim: int, num_rings: int, recent_dtype: np.dtype[Any]
    ) -> None:
        """Checks the requirements of int4."""
        check_integer(_OP, "num_rings", num_rings, least=1, most=2**31 - 1)
        if block_size not in GROUP_ROWS or head_dim % 32:
            raise ConfigError(
                f"{_OP}: int4 blocks must have {' or '.join(map(str, GROUP_ROWS))} tokens, and "
                f"head_dim must be a multiple of 32, got {block_size} and {head_dim}"
            )
        if recent_dtype not in (float16, bfloat16):
            raise ArrayDtypeError(
                f"{_OP}: recent_dtype must be float16 or bfloat16, got {recent_dtype}"
            )


def _tokens(op: str, tokens: Tokens) -> array[int]:
    """Tokens as an array of int32. Raises ArrayDtypeError, ConfigError."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ArrayDtypeError(
                f"{op}: tokens must be a 1-d array of integers, got {tokens.dtype} with "
                f"{tokens.ndim} axes"
            )
        if tokens.size and not -(2**31) <= int(tokens.min()) <= int(tokens.max()) < 2**31:
            raise ConfigError(
                f"{op}: tokens must fit in 32 bits, got {tokens.min()} to {tokens.max()}"
            )
        return array("i", np.ascontiguousarray(tokens, np.int32).tobytes())
    try:
        return array("i", tokens)
    except OverflowError:
        raise ConfigError(f"{op}: tokens must fit in 32 bits") from None
    except TypeError:
        raise ArrayDtypeError(f"{op}: tokens must be integers, got {tokens!r:.80}") from None
