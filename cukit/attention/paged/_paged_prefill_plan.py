"""Plans of paged attention with many queries per request (prefill) on Hopper, and the choice
between this kernel and the decode kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cukit.attention.flash._flash_plan_sm90 import (
    WarpgroupForwardConfig,
    covers,
    sequences_spec,
    tilings_of,
)
from cukit.attention.flash._flash_tilings import WARPGROUP_ROWS
from cukit.attention.flash._problem import AttentionProblem, ceil_div
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

_SWIZZLE_ROWS = 8  # rows per swizzle period; TMA boxes hold whole periods
_TILE_M = 2 * WARPGROUP_ROWS
_NARROW = 64  # largest head_dim with three consumer warpgroups
_DECODE_ROWS = 32  # query rows per tile of the decode kernel
# Nanoseconds per key of 128 columns, measured on an H200.
_DECODE_TILE = 0.13  # per row tile, on the whole GPU: 512 bytes at 4 TB/s
_PREFILL_TILE = 14.5  # per query tile, on one of 132 SMs: 65536 FLOP at 600 TFLOP/s
# Time of the forward relative to cache blocks of whole tiles: row by row, and
# 1 + (constant / rows)^2 with boxes of 8, 16, 32 or 64 rows.
_ROW_BY_ROW = 2.1
_BOXES = 4.1
_NARROW_BOXES = 2.5  # three consumer warpgroups
# Packed batches that may hold decode steps.
_MIXED_BATCH = 8
_MIXED_QUERIES = 256  # on average
_SHORT_ROWS = 16  # query rows per KV head that the decode kernel then handles
_GATHER_RATE = 4200.0  # bytes per nanosecond, read and written
_GATHER_LAUNCH = 4000.0  # nanoseconds
# Time of the decode kernel with full tiles on a quantised cache, relative to 16 bits.
_DECODE_CODES = {"": 1.0, "float8_e4m3": 0.66, "int8": 0.88, "int4": 1.7}
_FORMATS = {"float8_e4m3": "E4M3", "int8": "INT8", "int4": "INT4"}
_CODE_BYTES = {"": 2.0, "float8_e4m3": 1.0, "int8": 1.0, "int4": 0.5}
_GATHER_THREADS = 256
_GATHER_ROWS = 16  # keys per thread block


@dataclass(frozen=True)
class PagedForwardConfig(WarpgroupForwardConfig):
    """The configuration of the Hopper forward over a paged cache."""

    page_rows: int = 0
    """Rows of a cache block per TMA box; 0: warps copy row by row."""

    @property
    def slowdown(self) -> float:
        """Estimated time relative to cache blocks of whole tiles."""
        if not self.page_rows:
            return _ROW_BY_ROW
        constant = _BOXES if self.tiling.consumers == 2 else _NARROW_BOXES
        return 1.0 + (constant / self.page_rows) ** 2

    def grid(self, rows: int, batch: int) -> int:
        """Grid size for `rows` queries of all requests; tiles are assigned by a counter."""
        tiles = rows // self.tiling.tile_m + batch
        return min(self.problem.num_heads_q * tiles, self.num_sms)

    @property
    def ping_pong(self) -> bool:
        """Whether the consumers are scheduled ping-pong."""
        return False

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        spec = super().spec()
        paged = ("PAGED", True), ("PAGE_ROWS", self.page_rows)
        return replace(spec, defines=(*spec.defines, *paged))

    def plan_spec(self) -> KernelSpec:
        """The scheduling kernel, which sorts requests by length."""
        return sequences_spec(self.tiling.tile_m, paged=True)


def plan_paged_prefill(
    problem: AttentionProblem, block_size: int, mapped: bool, device: Device
) -> PagedForwardConfig:
    """The configuration of a problem that class sm90 covers (_flash_plan_sm90.covers).

    It depends on neither lengths nor batch, so the bits of a request's result do not depend on the
    rest of its batch. mapped: whether the cache's strides fit tensor maps.
    """
    mapped = mapped and block_size % _SWIZZLE_ROWS == 0
    tilings = tilings_of(problem)
    narrow = max(problem.head_dim, problem.head_dim_v) <= _NARROW and problem.window is None
    if not (mapped and narrow):
        # Otherwise three consumer warpgroups would leave too few registers.
        tilings = tuple(each for each in tilings if each.consumers == 2)
    rows = math.gcd(tilings[0].tile_n, block_size) if mapped else 0
    return PagedForwardConfig(problem, tilings[0], device.num_sms, page_rows=rows)


@dataclass(frozen=True)
class GatherConfig:
    """The configuration of the copy of keys and values that the forward reads.

    cache_format: element format of the cache; "" if it is that of the queries. group: keys of int4
    that share a channel's scale. recent: whether the newest keys are in ring buffers. block: keys
    per block of the copy: a tile of the forward.
    """

    problem: AttentionProblem
    cache_format: str
    group: int
    recent: bool
    block: int

    def grid(self, blocks: int) -> int:
        """Grid size for this many blocks of keys and of values."""
        return 2 * blocks * (self.block // _GATHER_ROWS)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            ("DTYPE", self.problem.dtype),
            *((("FORMAT", _FORMATS[self.cache_format]),) if self.cache_format else ()),
            ("GROUP", self.group),
            ("RECENT", int(self.recent)),
            ("HEAD_DIM", self.problem.head_dim),
            ("VALUE_DIM", self.problem.head_dim_v),
            ("BLOCK", self.block),
            ("THREADS", _GATHER_THREADS),
        )
        return KernelSpec("attention/gather_kv.cu", "gather_kv", defines, _GATHER_THREADS)


def plan_gather(
    problem: AttentionProblem,
    cache_format: str,
    group: int,
    device: Device,
    *,
    recent: bool = False,
) -> GatherConfig:
    """The configuration of the copy for a problem that class sm90 covers."""
    tile = plan_paged_prefill(problem, _SWIZZLE_ROWS, True, device).tiling.tile_n
    return GatherConfig(problem, cache_format, group, recent, tile)


def prefers_gather(
    problem: AttentionProblem, slowdown: float, device: Device, *, batch_invariant: bool
) -> bool:
    """Whether copying the cache and running the forward over the copy is faster than the forward
    over the cache itself, which takes `slowdown` (PagedForwardConfig) times as long as over the
    copy. The bits of the result are the same."""
    batch, queries = problem.batch, problem.seq_len_q
    if problem.varlen:
        # The host does not read the numbers of queries: assume equal ones.
        queries = ceil_div(queries, max(1, batch))
    elif batch_invariant:
        batch = device.num_sms
    if (batch, queries) != (problem.batch, problem.seq_len_q):
        problem = problem.at_lengths(queries, 1, batch)
    # Assume a prompt: on average, half of its keys are visible to a query, in whole tiles.
    visible = min(1.0, (queries + _TILE_M) / (2 * queries)) if problem.causal else 1.0
    saved = (slowdown - 1.0) * visible * prefill_time(problem, device)
    return saved > gather_time(problem, "")


def prefers_prefill(
    problem: AttentionProblem, device: Device, cache_format: str = "", *, batch_invariant: bool
) -> bool:
    """Whether the Hopper forward is faster than the decode kernel, for `batch` requests of
    seq_len_q queries each.

    The decode kernel splits the keys over all thread blocks, but reads them again for every 32 rows
    of a KV head. The forward reads them once per 128 queries of a head, but without splitting them,
    so few tiles leave SMs idle; quantised keys are decoded first. The estimates are times per key
    of every request. With batch_invariant the choice must not depend on the batch, which is assumed
    to be large.
    """
    if problem.group * problem.seq_len_q <= _DECODE_ROWS or not covers(problem, device):
        return False
    if batch_invariant:  # whole waves of tiles
        problem = problem.at_lengths(problem.seq_len_q, problem.seq_len_kv, device.num_sms)
    prefill = prefill_time(problem, device) + (
        gather_time(problem, cache_format) if cache_format else 0.0
    )
    return decode_time(problem, cache_format) > prefill


def short_queries(problem: AttentionProblem) -> int:
    """The number of packed queries up to which a request runs on the decode kernel, in a separate
    launch; 0 for none.

    The forward has tiles of 128 queries of one head; a decode step fills only one row of a tile.
    The host does not read the lengths: a batch with many queries per request is assumed to have no
    decode steps, which saves a launch.
    """
    few = _SHORT_ROWS // problem.group
    mixed = problem.batch >= _MIXED_BATCH
    mixed &= problem.seq_len_q <= _MIXED_QUERIES * problem.batch
    return few if problem.varlen and mixed else 0


def few_packed_queries(problem: AttentionProblem) -> bool:
    """Whether the decode kernel runs all requests of a small batch with packed queries: on average,
    the rows of a request fit in one of its tiles."""
    rows = problem.group * problem.seq_len_q
    return problem.batch < _MIXED_BATCH and rows <= _DECODE_ROWS * problem.batch


def gather_time(problem: AttentionProblem, cache_format: str) -> float:
    """Nanoseconds to copy the keys and values, per 128-column key of every request.

    The launch's time is divided by seq_len_q, a lower bound of the number of keys, because the host
    does not read seq_lens.
    """
    moved = _CODE_BYTES[cache_format] + _CODE_BYTES[""]
    copied = problem.batch * problem.num_heads_kv * 2 * 128 * moved / _GATHER_RATE
    return copied + _GATHER_LAUNCH / problem.seq_len_q


def decode_time(problem: AttentionProblem, cache_format: str = "") -> float:
    """Nanoseconds of the decode kernel, per 128-column key of every request."""
    tiles = ceil_div(problem.group * problem.seq_len_q, _DECODE_ROWS)
    return problem.batch * problem.num_heads_kv * tiles * _DECODE_TILE * _DECODE_CODES[cache_format]


def prefill_time(problem: AttentionProblem, device: Device) -> float:
    """The same for the Hopper forward."""
    tiles = problem.batch * problem.num_heads_q * ceil_div(problem.seq_len_q, _TILE_M)
    return ceil_div(tiles, device.num_sms) * _PREFILL_TILE


def prefill_specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: common widths, TMA and row by row, and each option."""
    many = AttentionProblem(8, 2048, 1, 32, 8, 128, "bfloat16", True)
    if not covers(many, device):
        return []
    options = replace(many, window=(256, None), sinks=True, varlen=True)
    problems = [
        *((replace(many, head_dim=width), 16) for width in (64, 96, 128, 192, 256)),
        *((replace(many, head_dim=width), 7) for width in (64, 128, 256)),
        (replace(many, head_dim=192, value_dim=128), 64),
        (replace(many, causal=False), 64),
        (replace(many, head_dim=80, softcap=True), 8),
        *((options, block_size) for block_size in (1, 16)),
    ]
    configs = [plan_paged_prefill(problem, size, True, device) for problem, size in problems]
    specs = [each.spec() for each in configs] + [each.plan_spec() for each in configs]
    copies = (("", 0), ("float8_e4m3", 0), ("int8", 0), ("int4", 32))
    specs += [plan_gather(many, *copy, device).spec() for copy in copies]
    specs.append(plan_gather(many, "int4", 64, device, recent=True).spec())
    return list(dict.fromkeys(specs))
