"""Plans of cascade attention: which shared prefixes of a batch are worth a separate pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cukit.attention.flash._flash_plan_sm90 import covers
from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.paged._paged_prefill_plan import decode_time, prefill_time
from cukit.core.device import Device

# Measured on an H200.
_FLAT_RATE = 8e3  # bytes per nanosecond where requests read the same keys from L2
_PASS_TIME = 15e3  # nanoseconds of one more attention launch and its merge


@dataclass(frozen=True)
class Prefix:
    """Keys that neighbouring requests share.

    keys: counted from the first key of each request. requests: how many share them.
    """

    keys: int
    requests: int


@dataclass(frozen=True)
class Pass:
    """A pass over keys begin .. end - 1, read once for `requests` neighbouring requests."""

    begin: int
    end: int
    requests: int


def plan_cascade(
    prefixes: tuple[Prefix, ...], problem: AttentionProblem, item_bytes: int, device: Device
) -> tuple[Pass, ...]:
    """The passes over shared keys; none where plain paged attention is as fast.

    A prefix that saves too little time is merged into the next one.

    prefixes: shortest first. problem: with the batch and seq_len_q of the call. item_bytes: element
    size of the cache.
    """

    def passes() -> Iterator[Pass]:
        begin = 0
        for prefix in prefixes:
            own = Pass(begin, prefix.keys, prefix.requests)
            if _gain(own, problem, item_bytes, device) > _PASS_TIME:
                yield own
                begin = prefix.keys

    return tuple(passes())


def _gain(own: Pass, problem: AttentionProblem, item_bytes: int, device: Device) -> float:
    """Nanoseconds saved by reading the keys once."""
    columns = problem.head_dim + problem.head_dim_v
    bytes_per_key = problem.batch * problem.num_heads_kv * columns * item_bytes
    stacked = replace(
        problem,
        batch=problem.batch // own.requests,
        seq_len_q=problem.seq_len_q * own.requests,
        causal=False,
        sinks=False,
    )
    shared = decode_time(stacked)
    if item_bytes > 1 and covers(stacked, device):
        shared = min(shared, prefill_time(stacked, device))
    return (own.end - own.begin) * (bytes_per_key / _FLAT_RATE - shared * columns / 256)
