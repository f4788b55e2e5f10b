"""Plans of paged attention with few queries per request (decoding).

A problem is one KV head and one tile of query rows of a request (paged_work.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.attention.flash._flash_tilings import RESERVED_BYTES
from cukit.attention.paged.cache_arrays import CODES
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Tile widths; other head_dims use the next larger one."""
CODE_HEAD_DIMS = (64, 128, 192, 256)
"""The same for 8-bit codes."""
GROUP_HEAD_DIMS = (128,)
"""The same for int4."""

_OP = "paged_attention"
_STEP_BYTES = 32
"""Keys per warp and step, times bytes per element: 16 keys of 16-bit elements, 32 of 8-bit."""
_QUERY_TILE = 8
_NARROW_STEP = 32
"""Keys per warp and step of heads of 64 with many problems, in three thread blocks per SM."""
_RECENT_STEP = 16
"""Recent keys per warp and step."""
_MAX_WARPS = 4
_MAX_TEAM = 8
_UNIT_KEYS = 1024
"""Keys per split of a batch-invariant call, the same on every device."""
_CLUSTER = 16
"""Thread blocks of a cluster: twice the portable size. Eight clusters of 16 are resident at once on
an H200 only with two thread blocks per SM."""
_CLUSTER_SHARE = 0.8
"""Minimum share of the SMs that clusters must fill: idle SMs would delay a long request."""
_MANY_PROBLEMS = 6
"""Problems per SM from which thread blocks have one warp: most blocks process whole problems."""
_ONE_WARP_GROUP = 64
"""Keys per int4 group with which thread blocks of one warp were measured."""


@dataclass(frozen=True)
class PagedConfig:
    """The configuration of a call.

    cache_format: element format of the caches; "" if it is `dtype`.
    head_dim: columns per tile. row_tiles: tiles of 8 * query_tiles query rows per KV head.
    warps: per thread block; each has its own `step` keys of a tile.
    stages: pipeline stages of each warp's keys and values.
    unit_tiles: key tiles per split of a batch-invariant call; 0 otherwise.
    team: thread blocks that process neighbouring heads of the same keys.
    recent: whether the newest keys are in ring buffers, in 16 bits.
    packed: whether each request has its own number of queries.
    cluster: thread blocks of a cluster, which processes one problem; 1: no clusters.
    """

    dtype: str
    cache_format: str
    head_dim: int
    padded: bool
    value_padded: bool
    query_tiles: int
    row_tiles: int
    step: int
    warps: int
    stages: int
    unit_tiles: int
    team: int
    blocks_per_sm: int
    num_blocks: int
    causal: bool
    window: bool
    softcap: bool
    sinks: bool
    recent: bool = False
    packed: bool = False
    cluster: int = 1

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            ("DTYPE", self.dtype),
            ("CODE", CODES[self.cache_format]),
            ("HEAD_DIM", self.head_dim),
            ("PADDED", int(self.padded)),
            ("VALUE_DIM", self.head_dim),
            ("VALUE_PADDED", int(self.value_padded)),
            ("QUERY_TILES", self.query_tiles),
            ("STEP", self.step),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("UNIT_TILES", self.unit_tiles),
            ("TEAM", self.team),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("CAUSAL", int(self.causal)),
            ("WINDOW", int(self.window)),
            ("SOFTCAP", int(self.softcap)),
            ("SINKS", int(self.sinks)),
            *((("RECENT", 1),) if self.recent else ()),
            *((("PACKED", 1),) if self.packed else ()),
            *((("CLUSTER", self.cluster),) if self.cluster > 1 else ()),
        )
        stage = _stage_bytes(self.head_dim, self.cache_format, self.step, recent=self.recent)
        stages = self.warps * self.stages * stage
        shared = stages + _query_bytes(self.head_dim, self.query_tiles, recent=self.recent)
        shared += _cluster_bytes(self.head_dim, self.query_tiles, self.cluster)
        return KernelSpec("attention/paged_attention.cu", _OP, defines, 32 * self.warps, shared)

    def slots(
        self, batch: int, problems_per_request: int, max_keys: int, recent_rows: int = 0
    ) -> tuple[int, int]:
        """Upper bounds of partial results and counters.

        problems_per_request: with packed queries, problems per tile of rows. recent_rows: included
        in max_keys.
        """
        if not self.unit_tiles:
            return 2 * self.num_blocks, self.num_blocks
        recent_tiles = -(-recent_rows // (_RECENT_STEP * self.warps))
        tiles = -(-(max_keys - recent_rows) // self.tile) + recent_tiles
        units = -(-tiles // self.unit_tiles) + 1
        problems = batch * problems_per_request
        return problems * units, problems

    @property
    def tile(self) -> int:
        """Keys per step of a thread block."""
        return self.step * self.warps

    @property
    def rows(self) -> int:
        """Query rows per tile."""
        return _QUERY_TILE * self.query_tiles

    @property
    def slot_floats(self) -> int:
        """float32 elements of one partial result: outputs, row maxima and row sums."""
        return self.rows * (self.head_dim + 2)


def _stage_bytes(head_dim: int, cache_format: str, step: int, *, recent: bool = False) -> int:
    """Bytes of a warp's keys and values in one stage, with their scales."""
    if cache_format == "int4":
        rows = max(step * head_dim, 4 * _RECENT_STEP * head_dim if recent else 0)
        return rows + 4 * (head_dim + step)
    return 2 * step * (head_dim + 4 if cache_format else 2 * head_dim)


def _static_bytes(query_tiles: int, places: int, warps: int) -> int:
    """Bytes of row maxima, row sums and key addresses."""
    return 8 * warps * _QUERY_TILE * query_tiles + 16 * warps * places


def _query_bytes(head_dim: int, query_tiles: int, *, recent: bool = False) -> int:
    """Bytes of the queries: permuted like the cache's columns and, with `recent`, in order too."""
    return 2 * (1 + recent) * _QUERY_TILE * query_tiles * head_dim


def _cluster_bytes(head_dim: int, query_tiles: int, cluster: int) -> int:
    """Bytes of the sums that a thread block merges for its cluster."""
    rows = _QUERY_TILE * query_tiles
    return rows * (4 * head_dim + 8 * cluster) if cluster > 1 else 0


@lru_cache(maxsize=1024)
def plan_paged_attention(
    head_dim: int,
    value_dim: int,
    heads_kv: int,
    rows: int,
    dtype: str,
    device: Device,
    *,
    cache_format: str = "",
    causal: bool = True,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    batch_invariant: bool = False,
    group_rows: int = 0,
    recent: bool = False,
    packed: bool = False,
    batch: int = 0,
) -> PagedConfig:
    """The configuration of a call: one thread block per SM for heads wider than 128, else three for
    8-bit codes with few rows, else two; the most warps, then the most stages, that fit.

    If clusters, one per problem, fill the GPU just once, each problem uses a cluster. Many problems
    with quantised caches use thread blocks of one warp, which have fewer results to merge and no
    synchronisation between warps. With 16-bit caches, heads of 64 use longer steps if there is at
    least one problem per SM; with fewer problems, heads of 128 with 9 to 16 rows use one thread
    block per SM, so that problems are split into fewer pieces.

    rows: query rows per KV head: group size times queries per request. group_rows: int4 keys that
    share a scale; also the keys per step. recent: int4 with recent keys. packed: packed queries; a
    tile then holds `rows` rows or, if they are more, its maximum. batch: requests; 0 if unknown.
    """
    narrowest = cache_format == "int4"
    widths = GROUP_HEAD_DIMS if narrowest else CODE_HEAD_DIMS if cache_format else HEAD_DIMS
    width = next(each for each in widths if each >= head_dim)
    step = group_rows or _STEP_BYTES // (1 if cache_format else 2)
    # A second query tile would need too many registers with the scores of 64 keys (int4).
    # Packed 8-bit codes: more tiles, or three thread blocks per SM with two tiles, would spill.
    max_tiles = 1 if narrowest else 2 if width > 128 or (cache_format and packed) else 4
    query_tiles = min(max_tiles, 1 if rows <= _QUERY_TILE else 2 if rows <= 2 * _QUERY_TILE else 4)
    three = cache_format and not narrowest and query_tiles < (2 if packed else 4)
    row_tiles = -(-rows // (_QUERY_TILE * query_tiles))
    # Choices that depend on the number of problems were measured on sm_90 only.
    known = device.arch == "sm_90" and not (packed or batch_invariant)
    problems = batch * heads_kv * row_tiles if known else 0
    many = problems >= _MANY_PROBLEMS * device.num_sms
    one_warp = many and bool(cache_format) and width == 128 and query_tiles == 1 and not recent
    one_warp &= not narrowest or step == _ONE_WARP_GROUP
    fills = _CLUSTER_SHARE * device.num_sms <= _CLUSTER * problems <= device.num_sms
    cluster = _CLUSTER if known and fills and width <= 128 else 1
    one_block = width > 128
    if known and not cache_format and cluster == 1:
        one_block |= width == 128 and query_tiles == 2 and 0 < problems < device.num_sms
        if width == 64 and query_tiles == 1 and problems >= device.num_sms:
            step, three = _NARROW_STEP, True
    blocks = 8 if one_warp else 1 if one_block else 3 if three and cluster == 1 else 2
    stage_bytes = _stage_bytes(width, cache_format, step, recent=recent)
    places = _RECENT_STEP if narrowest else step
    warps = 2 * _MAX_WARPS if one_block and width == 128 else _MAX_WARPS
    static_bytes = RESERVED_BYTES + 64 + _static_bytes(query_tiles, places, warps)
    room = device.shared_bytes_per_sm // blocks - static_bytes
    room = min(room, device.shared_bytes_per_block - static_bytes + RESERVED_BYTES)
    room -= _query_bytes(width, query_tiles, recent=recent)
    room -= _cluster_bytes(width, query_tiles, cluster)
    while 2 * warps * stage_bytes > room:
        warps //= 2
    # The largest team among those that leave the fewest thread blocks idle, in steps of 2 %.
    num_blocks = blocks * device.num_sms
    sizes = [size for size in range(1, _MAX_TEAM + 1) if heads_kv % size == 0]
    sizes = [1] if cluster > 1 else sizes
    team = min(sizes, key=lambda size: (num_blocks % size * 50 // num_blocks, -size))
    return PagedConfig(
        dtype=dtype,
        cache_format=cache_format,
        head_dim=width,
        padded=head_dim < width,
        value_padded=value_dim < width,
        query_tiles=query_tiles,
        row_tiles=row_tiles,
        step=step,
        warps=warps,
        stages=min(8, room // (warps * stage_bytes)),
        unit_tiles=_UNIT_KEYS // (step * warps) if batch_invariant else 0,
        team=team,
        blocks_per_sm=blocks,
        num_blocks=cluster * problems if cluster > 1 else num_blocks // team * team,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        recent=recent,
        packed=packed,
        cluster=cluster,
    )
