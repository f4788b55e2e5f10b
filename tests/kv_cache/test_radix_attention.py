"""RadixAttention equals uncached attention after sharing, forks, swaps and evictions."""

from __future__ import annotations

import random
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.core.arrays import bfloat16, namespace
from cukit.errors import ArrayError, ConfigError, OutOfMemoryError
from cukit.models import Transformer, TransformerConfig
from cukit.reference import attention as reference
from cukit.reference.pack_kv import group_codes

LAYERS, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 4, 2, 64
GROUP = 32


@lru_cache(maxsize=4096)
def row_of(layer: int, state: int) -> Any:
    """q, k and v heads of one token; `state` encodes this token and all earlier ones."""
    shape = HEADS_Q + 2 * HEADS_KV, HEAD_DIM
    return np.random.default_rng([layer, state]).standard_normal(shape, np.float32)


class Model:
    """Queries, keys and values that depend on their token and all earlier ones."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def rows(self, tokens: list[int], layer: int) -> list[Any]:
        """q, k and v of all tokens, [1, tokens, heads, head_dim]."""
        state, rows = 0, []
        for token in tokens:
            state = (state * 31 + token + 1) % (2**61 - 1)
            rows.append(row_of(layer, state))
        both = np.stack(rows).astype(self.dtype)[None]
        return np.split(both, [HEADS_Q, HEADS_Q + HEADS_KV], axis=2)

    def uncached(self, tokens: list[int], layer: int, packed: int = 0) -> Any:
        """Uncached attention of all tokens in float64. The first `packed` keys and values are
        rounded to int4 in groups of GROUP tokens."""
        q, k, v = self.rows(tokens, layer)
        wide = [array.astype(np.float64) for array in (q, k, v)]
        for begin in range(0, packed, GROUP):
            for place, axis in ((1, 1), (2, 3)):
                group = (q, k, v)[place][:, begin : begin + GROUP]
                codes, *factors = group_codes(group, axis)
                shape = GROUP if axis == 1 else HEAD_DIM
                decoded = ck.QuantizedArray(codes, ck.int4, group.shape, *factors, axis, shape)
                wide[place][:, begin : begin + GROUP] = decoded.dense()
        return reference.flash_attention(*wide, causal=True)


class Server:
    """Runs steps, each compared with the uncached computation."""

    def __init__(self, num_blocks: int, block_size: int, dtype: Any, **options: Any) -> None:
        stored = options.pop("stored", dtype)
        self.packs = stored is ck.int4
        self.cache = ck.KVCacheManager(
            num_blocks, block_size, num_layers=LAYERS, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM,
            dtype=stored, **options,
        )  # fmt: skip
        self.xp = namespace(self.cache.slab.array)
        given = {} if stored is dtype else {"dtype": dtype}
        self.attention = ck.RadixAttention(self.cache, num_heads_q=HEADS_Q, max_batch=8, **given)
        self.model = Model(dtype)
        self.tolerance = 2e-6 if dtype == np.float32 else 3e-2
        self.tokens: dict[Hashable, list[int]] = {}

    def add(self, request: Hashable, tokens: list[int], **options: Any) -> int:
        cached = self.attention.add(request, tokens, **options)
        self.tokens[request] = list(tokens)
        self.step([request], cached)
        return cached

    def append(self, chosen: dict[Hashable, int]) -> None:
        self.attention.append([*chosen], [*chosen.values()])
        for request, token in chosen.items():
            self.tokens[request].append(token)
        self.step([*chosen], -1)

    def step(self, requests: list[Hashable], begin: int) -> None:
        """Runs all layers for the tokens from index `begin` on."""
        lengths = [len(self.tokens[request]) for request in requests]
        positions = np.stack([np.arange(length)[begin:] for length in lengths])
        assert (self.attention.positions == self.xp.asarray(positions)).all()
        assert self.attention.length == max(lengths) - positions.shape[1]
        packed = [0] * len(requests)
        if self.packs:  # the new keys of a prompt are read unquantised
            packed = [begin] if begin >= 0 else self.cache.recent(requests)[1].tolist()
        for layer in range(LAYERS):
            parts = [self.model.rows(self.tokens[request], layer) for request in requests]
            arrays = [
                self.xp.asarray(np.concatenate([array[:, begin:] for array in arrays]))
                for arrays in zip(*parts, strict=True)
            ]
            out, _ = self.attention.attend(*arrays, layer)
            got = out if self.xp is np else out.get()
            for row, request, coded in zip(got, requests, packed, strict=True):
                want = self.model.uncached(self.tokens[request], layer, coded)[0, begin:]
                assert np.abs(row.astype(np.float64) - want).max() <= self.tolerance
        self.attention.advance()
        self.cache.check_invariants()


def server(device: str, num_blocks: int, block_size: int, **options: Any) -> Server:
    made = Server(num_blocks, block_size, np.float32 if device == "cpu" else bfloat16, **options)
    if (device == "gpu") != (made.xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    return made


def test_a_second_request_computes_only_new_tokens(device: str) -> None:
    served = server(device, 16, 4)
    assert served.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert served.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1]) == 8
    assert served.add("tenant", [1, 2, 3, 4, 5], salt="other") == 0
    served.append({"b": 3, "a": 7})
    served.append({"a": 1, "tenant": 2, "b": 9})
    served.attention.free("a")
    assert served.add("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 1]) == 8


def int4_server(device: str, num_blocks: int, num_rings: int = 6) -> Server:
    made = Server(
        num_blocks, GROUP, bfloat16, stored=ck.int4, recent_dtype=bfloat16, num_rings=num_rings
    )
    if (device == "gpu") != (made.xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    return made


def test_int4_keeps_blocks_exact_until_they_are_full(device: str) -> None:
    """Prompts with and without a cached prefix, forks of a ring buffer, filled blocks, swaps."""
    served = int4_server(device, 16)
    prompt = [*range(60)]
    assert served.add("a", prompt) == 0
    assert served.add("b", [*prompt[:40], *range(900, 923)]) == 32
    assert served.add("short", [7, 8]) == 0
    served.cache.fork("a", "fork")
    served.tokens["fork"] = list(served.tokens["a"])
    for i in range(6):
        served.append({"a": i, "b": 2 * i, "fork": 500 + i})
    served.cache.preempt("a", by="swap")
    served.append({"short": 3})
    assert served.attention.resume("a") == 66
    served.append({"a": 1, "short": 4, "b": 1})
    served.cache.preempt("b", by="recompute")
    assert served.attention.resume("b") == 64
    served.step(["b"], 64)
    served.append({"b": 9, "fork": 3})
    for request in ("a", "b", "fork", "short"):
        served.attention.free(request)
    assert served.add("again", [*prompt, *range(4), 5]) == 64
    served.cache.check_invariants()


def test_int4_needs_a_ring_for_each_block_that_is_not_full(device: str) -> None:
    served = int4_server(device, 16, num_rings=1)
    served.add("a", [1, 2, 3])
    with pytest.raises(OutOfMemoryError, match="allocate: ring buffers needed: 1, free: 0 of 1"):
        served.attention.add("b", [1, 2])
    served.cache.check_invariants()
    served.add("cached", [*range(GROUP, 2 * GROUP)])
    served.attention.free("cached")
    with pytest.raises(OutOfMemoryError, match="ring buffers needed"):
        served.attention.add("b", [*range(15 * GROUP - 1)])
    assert served.cache.lookup([*range(GROUP, 2 * GROUP)]) == GROUP, "nothing was evicted"
    assert served.add("full", [*range(GROUP)]) == 0
    with pytest.raises(OutOfMemoryError, match="append_each: ring buffers needed: 1"):
        served.attention.append(["full"], [3])
    served.cache.check_invariants()
    served.append({"a": 4})
    with pytest.raises(ConfigError, match="one token at a time"):
        served.cache.append("a", [1, 2])


@pytest.mark.parametrize("stored", [ck.int8, ck.float8_e4m3], ids=lambda dtype: dtype.name)
def test_caches_of_8_bit_codes(device: str, stored: Any) -> None:
    made = Server(16, 4, bfloat16, stored=stored)
    if (device == "gpu") != (made.xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    made.tolerance = 0.15
    assert made.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert made.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1]) == 8
    made.append({"b": 3, "a": 7})


def test_attend_rotates_queries_and_keys(device: str) -> None:
    """`attend` with rotary tables gives the results of rows rotated beforehand."""
    outs = []
    for fused in (False, True):
        made = int4_server(device, 16)
        xp = made.xp
        angles = np.random.default_rng(0).uniform(0, 6, (128, HEAD_DIM // 2)).astype(np.float32)
        cos, sin = xp.asarray(np.cos(angles)), xp.asarray(np.sin(angles))
        assert made.attention.add("a", [*range(40)]) == 0
        q, k, v = (xp.asarray(x) for x in made.model.rows([*range(40)], 0))
        if fused:
            out, _ = made.attention.attend(q, k, v, 0, cos=cos, sin=sin)
        else:
            ids = made.attention.positions
            q, k = ck.rope(q, k, cos, sin, ids)
            out, _ = made.attention.attend(q, k, v, 0)
        outs.append(np.asarray(out if xp is np else out.get(), np.float32))
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-2)


def test_beams_equal_an_uncached_recomputation(device: str) -> None:
    """Each step continues four random beams, as in beam search: some are forked several times,
    others end."""
    served = server(device, 24, 4)
    random_ = random.Random(1)
    served.add(0, [3, 1, 4, 1, 5, 9])
    beams: list[Hashable] = [0]
    forks = 0
    for step in range(8 if device == "cpu" else 4):
        parents = [random_.choice(beams) for _ in range(4)]
        chosen: dict[Hashable, int] = {}
        for number, parent in enumerate(parents):
            child = (step, number)
            served.attention.cache.fork(parent, child)
            served.tokens[child] = list(served.tokens[parent])
            chosen[child] = random_.randrange(3)
        forks += len(parents) - len(set(parents))
        for beam in beams:
            served.attention.free(beam)
        served.append(chosen)
        beams = [*chosen]
    assert forks
    for beam in beams:
        served.attention.free(beam)
    assert served.cache.available_blocks == 24


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_equal_an_uncached_recomputation(seed: int) -> None:
    """Shared prompts, forks and both kinds of preemption, in a cache too small for all requests."""
    random_ = random.Random(seed)
    served = Server(14, 3, np.float32, policy=["lru", "lfu", "priority"][seed])
    attention, running, waiting = served.attention, list[int](), list[int]()
    refused = 0
    for step in range(150):
        choice = random_.random()
        try:
            if choice < 0.3 or not running:
                tokens = [0] * 4 + [random_.randrange(2) for _ in range(random_.randrange(1, 9))]
                served.add(step, tokens, priority=step % 3)
                running.append(step)
            elif choice < 0.6:
                batch = random_.sample(running, random_.randrange(len(running)) + 1)
                served.append({request: random_.randrange(2) for request in batch})
            elif choice < 0.7:
                attention.free(running.pop(random_.randrange(len(running))))
            elif choice < 0.8 and len(running) < 8:
                parent = random_.choice(running)
                attention.cache.fork(parent, step)
                served.tokens[step] = list(served.tokens[parent])
                running.append(step)
            elif choice < 0.9:
                request = running.pop(random_.randrange(len(running)))
                attention.cache.preempt(request, by=random_.choice(["swap", "recompute"]))
                waiting.append(request)
            elif waiting:
                ready = attention.resume(waiting[0])
                request = waiting.pop(0)
                running.append(request)
                if ready < len(served.tokens[request]):
                    served.step([request], ready)
        except OutOfMemoryError:
            refused += 1
            if len(running) > 1:
                attention.free(running.pop(0))
    assert refused


def test_steps_must_alternate() -> None:
    served = Server(8, 4, np.float32)
    attention, cache = served.attention, served.cache
    rows = np.ones((1, 3, HEADS_KV, HEAD_DIM), np.float32)
    for call in (lambda: attention.attend(rows, rows, rows, 0), attention.advance):
        with pytest.raises(ConfigError, match="no step has been started"):
            call()
    attention.add("a", [1, 2, 3])
    for call in (
        lambda: attention.add("b", [1]),
        lambda: attention.append(["a"], [1]),
        lambda: attention.resume("a"),
    ):
        with pytest.raises(ConfigError, match="the step of 'a' has not ended"):
            call()
    with pytest.raises(ArrayError, match="k must have shape"):
        attention.attend(rows, rows[:, :2], rows, 0)
    with pytest.raises(ConfigError, match="layer"):
        attention.attend(rows, rows, rows, 2)
    with pytest.raises(ConfigError, match="3 tokens per request, got 1"):
        attention.advance(1)
    attention.free("a")
    assert cache.statistics().cached_blocks == 0, "unwritten tokens are not kept"
    served.add("a", [1, 2, 3, 4, 5])
    served.add("b", [2, 3])
    attention.append(["a", "b"], [7, 7])
    with pytest.raises(ConfigError, match="in a step with other requests"):
        attention.free("b")
    attention.advance()
    with pytest.raises(ConfigError, match="1 to 8 requests, got 0"):
        attention.append([], [])
    with pytest.raises(ConfigError, match="1 to 32 tokens, got 33"):
        attention.add("c", [0] * 33)
    with pytest.raises(OutOfMemoryError):
        attention.add("c", [0] * 32)
    cache.check_invariants()


def test_a_model_gives_the_results_of_its_own_cache() -> None:
    config = TransformerConfig(50, 32, 2, 4, 2, 16, 48, 64)
    model = Transformer.initialise(config, seed=0)
    cache = ck.KVCacheManager(32, 4, num_layers=2, num_heads_kv=2, head_dim=16, dtype=np.float32)
    attention = ck.RadixAttention(cache, num_heads_q=4, max_batch=2)

    def logits(tokens: Any, where: Any) -> Any:
        hidden = model.forward(np.asarray(tokens, np.int32), keep=False, cache=where).hidden
        return model.logits(hidden.reshape(*np.shape(tokens), -1)[:, -1])

    prompts = {"a": [*range(20)], "b": [*range(13), 40, 41]}
    alone = {}
    for name, prompt in prompts.items():
        alone[name] = model.new_cache(1)
        cached = attention.add(name, prompt)
        got, want = logits([prompt[cached:]], attention), logits([prompt], alone[name])
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert cache.statistics().cached_tokens == 12
    for token in (7, 11, 13):
        attention.append(["a", "b"], [token, token + 1])
        got = logits([[token], [token + 1]], attention)
        want = [logits([[token + i]], alone[name]) for i, name in enumerate(prompts)]
        np.testing.assert_allclose(got, np.concatenate(want), atol=1e-5)


@pytest.mark.gpu
def test_a_captured_decode_step_replays_after_each_append() -> None:
    import cupy

    served = Server(32, 4, bfloat16)
    attention = served.attention
    served.add("a", [1, 2, 3])
    served.add("b", [1, 2, 3, 4, 5, 6, 7])
    served.append({"a": 1, "b": 2})
    heads = HEADS_Q, HEADS_KV, HEADS_KV
    inputs = [
        [cupy.empty((2, 1, count, HEAD_DIM), bfloat16) for count in heads] for _ in range(LAYERS)
    ]
    stream = cupy.cuda.Stream(non_blocking=True)
    graph, states = None, []
    with stream:
        for token in range(6):  # enough to fill the last blocks and allocate new ones
            attention.append(["a", "b"], [token, token])
            for request in ("a", "b"):
                served.tokens[request].append(token)
            for layer in range(LAYERS):
                for row, request in enumerate(("a", "b")):
                    rows = served.model.rows(served.tokens[request], layer)
                    for array, values in zip(inputs[layer], rows, strict=True):
                        array[row] = cupy.asarray(values[0, -1:])
            if graph is None:
                stream.begin_capture()
                states = [attention.attend(*inputs[layer], layer) for layer in range(LAYERS)]
                graph = stream.end_capture()
            graph.launch(stream)
            for layer, (out, _) in enumerate(states):
                for row, request in enumerate(("a", "b")):
                    want = served.model.uncached(served.tokens[request], layer)[0, -1]
                    assert np.abs(out[row, 0].get().astype(np.float64) - want).max() <= 3e-2
            attention.advance()
