"""What the contents of lengths and block tables must be: compared on the CPU, and on request."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from cukit.attention.cache_arrays import RecentKV
from cukit.attention.flash_options import ScoreOptions, Window
from cukit.core.arrays import Array, is_gpu_array, namespace
from cukit.core.scalars import check_flag
from cukit.errors import ConfigError
from cukit.reference import paged_attention as reference

if TYPE_CHECKING:
    from cukit.attention.paged import PagedArrays

_CHECKED = os.environ.get("CUKIT_CHECKED", "") == "1"
"""Whether calls on the GPU are checked that leave `checked` to the environment."""


def is_checked(op: str, checked: bool | None) -> bool:
    """Whether a call on the GPU compares its tables with the cache."""
    if checked is None:
        return _CHECKED
    check_flag(op, "checked", checked)
    return bool(checked)


def check_contents(op: str, arrays: PagedArrays, options: ScoreOptions, *, checked: bool) -> None:
    """As check_table, and cu_seqlens_q."""
    seq_lens, ends = arrays.seq_lens, arrays.cu_seqlens_q
    seq_q: int | Array = arrays.q.shape[1]
    if is_gpu_array(seq_lens) and not checked:
        return
    if ends is not None:
        rows = arrays.q.shape[0]
        counts = namespace(ends).diff(ends)
        if int(ends[0]) != 0 or int(ends[-1]) != rows or bool((counts < 0).any()):
            raise ConfigError(
                f"{op}: cu_seqlens_q must rise from 0 to {rows}, the rows of q, got {ends}"
            )
        seq_q = counts
    check_table(
        *(op, arrays.k_cache, arrays.block_table, seq_lens, seq_q, options.window_size),
        recent=arrays.recent,
        checked=checked,
    )


def check_table(
    op: str,
    k_cache: Array,
    block_table: Array,
    seq_lens: Array,
    seq_q: int | Array,
    window_size: Window | None = None,
    *,
    recent: RecentKV | None = None,
    checked: bool = False,
) -> None:
    """Compares lengths, blocks and rings with the cache, on the CPU; on the GPU, which then waits,
    only where `checked`."""
    if is_gpu_array(seq_lens) and not checked:
        return
    xp = namespace(seq_lens)
    if xp is not np and xp.cuda.runtime.streamIsCapturing(xp.cuda.get_current_stream().ptr):
        raise ConfigError(
            f"{op}: checked calls wait for the GPU, which is not possible while a graph is "
            "captured; capture with checked=False"
        )
    num_blocks, block_size = k_cache.shape[:2]
    room = block_table.shape[1] * block_size
    in_cache = seq_lens
    if recent is not None:
        in_cache = xp.minimum(recent.packed_lens, seq_lens)
        _check_rings(op, recent, room, seq_lens)
        room += recent.k.shape[1]
    wrong = (seq_lens < 0) | (seq_lens > room)
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: seq_lens must lie from 0 to {room}, the keys of max_blocks blocks"
            f"{' and a ring' if recent is not None else ''}, but "
            f"seq_lens[{b}] is {int(seq_lens[b])}"
        )
    first = reference.first_key(seq_lens, seq_q, window_size)[:, None]
    starts = xp.arange(block_table.shape[1]) * block_size
    used = (starts < in_cache[:, None]) & (starts + block_size > first)
    wrong = used & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        b, entry = divmod(int(wrong.argmax()), block_table.shape[1])
        raise ConfigError(
            f"{op}: block_table[{b}, {entry}] is {int(block_table[b, entry])}, but the cache has "
            f"{num_blocks} blocks"
        )


def _check_rings(op: str, recent: RecentKV, room: int, seq_lens: Array) -> None:
    num_rings, num_rows = recent.k.shape[:2]
    wrong = (recent.packed_lens < 0) | (recent.packed_lens > room)
    wrong |= seq_lens - recent.packed_lens > num_rows
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: recent.packed_lens must lie from 0 to {room}, the keys of max_blocks blocks, "
            f"and at most {num_rows} rows of a ring below seq_lens, but packed_lens[{b}] is "
            f"{int(recent.packed_lens[b])} and seq_lens[{b}] is {int(seq_lens[b])}"
        )
    wrong = (seq_lens > recent.packed_lens) & ((recent.rings < 0) | (recent.rings >= num_rings))
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: recent.rings must lie from 0 to {num_rings - 1}, but rings[{b}] is "
            f"{int(recent.rings[b])}"
        )
