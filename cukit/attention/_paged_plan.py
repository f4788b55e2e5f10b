"""How paged attention runs: a pure function of the shape of a call and the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.attention.cache_arrays import CODES
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

HEAD_DIMS = (64, 96, 128, 192, 256)
CODE_HEAD_DIMS = (64, 128, 192, 256)
GROUP_HEAD_DIMS = (128,)
"""Of tiles, of codes of 8 and of 4 bits: the next larger one serves other widths."""

_OP = "paged_attention"
_STEP_BYTES = 32
"""A warp's keys of a step, times the bytes of an element: 16 of 16 bits, 32 of 8."""
_QUERY_TILE = 8
_RECENT_STEP = 16
"""A warp's recent keys of a step."""
_MOST_WARPS = 4
_MOST_TEAM = 8
_UNIT_KEYS = 1024
"""Keys of a unit of a batch-invariant call: a fixed number, whatever the device."""
_SYSTEM_BYTES = 1024
"""Of shared memory, for each thread block."""


@dataclass(frozen=True)
class PagedConfig:
    """How a call runs.

    codes: of the caches; "" where they hold `dtype`.
    head_dim: columns of the tiles. row_tiles: of 8 * query_tiles query rows, of a key head.
    warps: of a thread block; each has its own `step` keys of a tile.
    stages: copies of a step's keys and values that a warp has under way or in use.
    unit_tiles: tiles of keys of a unit, in a batch-invariant call; 0 otherwise.
    team: thread blocks that work on neighbouring heads of the same keys.
    recent: whether the last keys lie in rings, in 16 bits.
    """

    dtype: str
    codes: str
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

    def spec(self) -> KernelSpec:
        """What is launched."""
        defines = (
            ("DTYPE", self.dtype),
            ("CODE", CODES[self.codes]),
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
        )
        stage = _stage_bytes(self.head_dim, self.codes, self.step, recent=self.recent)
        ring = self.warps * self.stages * stage
        shared = ring + _query_bytes(self.head_dim, self.query_tiles, recent=self.recent)
        return KernelSpec("attention/paged_attention.cu", _OP, defines, 32 * self.warps, shared)

    def slots(
        self, batch: int, problems: int, most_keys: int, recent_rows: int = 0
    ) -> tuple[int, int]:
        """Sums of pieces, and counters, that a call may need at most. recent_rows: of most_keys."""
        if not self.unit_tiles:
            return 2 * self.num_blocks, self.num_blocks
        recent_tiles = -(-recent_rows // (_RECENT_STEP * self.warps))
        tiles = -(-(most_keys - recent_rows) // self.tile) + recent_tiles
        units = -(-tiles // self.unit_tiles) + 1
        return batch * problems * units, batch * problems

    @property
    def tile(self) -> int:
        """Keys that a thread block works on at once."""
        return self.step * self.warps

    @property
    def slot_floats(self) -> int:
        """One piece's outputs, maxima and sums."""
        return _QUERY_TILE * self.query_tiles * (self.head_dim + 2)


def _stage_bytes(head_dim: int, codes: str, step: int, *, recent: bool = False) -> int:
    """A warp's keys and values of one tile, and their scales."""
    if codes == "int4":
        rows = max(step * head_dim, 4 * _RECENT_STEP * head_dim if recent else 0)
        return rows + 4 * (head_dim + step)
    return 2 * step * (head_dim + 4 if codes else 2 * head_dim)


def _static_bytes(query_tiles: int, places: int, warps: int) -> int:
    """Maxima and sums of rows, and places of keys."""
    return 8 * warps * _QUERY_TILE * query_tiles + 16 * warps * places


def _query_bytes(head_dim: int, query_tiles: int, *, recent: bool = False) -> int:
    """In the order of the cache's columns, and where `recent` in their own."""
    return 2 * (1 + recent) * _QUERY_TILE * query_tiles * head_dim


@lru_cache(maxsize=1024)
def plan_paged_attention(
    head_dim: int,
    value_dim: int,
    heads_kv: int,
    rows: int,
    dtype: str,
    device: Device,
    *,
    codes: str = "",
    causal: bool = True,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    batch_invariant: bool = False,
    group_rows: int = 0,
    recent: bool = False,
) -> PagedConfig:
    """Two thread blocks on an SM for narrow heads, three where codes are decoded, and as many warps
    and then stages as fit.

    rows: query rows that share a key head: heads of the group times queries of a request.
    group_rows: keys of int4 that share scales: those of a step. recent: int4 with recent keys.
    """
    narrowest = codes == "int4"
    widths = GROUP_HEAD_DIMS if narrowest else CODE_HEAD_DIMS if codes else HEAD_DIMS
    width = next(each for each in widths if each >= head_dim)
    step = group_rows or _STEP_BYTES // (1 if codes else 2)
    # Scores of 64 keys and scaled queries of a second tile do not fit the registers.
    most_tiles = 1 if narrowest else 2 if width > 128 else 4
    query_tiles = min(most_tiles, 1 if rows <= _QUERY_TILE else 2 if rows <= 2 * _QUERY_TILE else 4)
    three = codes and not narrowest and query_tiles < 4
    blocks = 1 if width > 128 else 3 if three else 2
    stage_bytes = _stage_bytes(width, codes, step, recent=recent)
    places = _RECENT_STEP if narrowest else step
    static_bytes = _SYSTEM_BYTES + 64 + _static_bytes(query_tiles, places, _MOST_WARPS)
    room = device.shared_bytes_per_sm // blocks - static_bytes
    room = min(room, device.shared_bytes_per_block - static_bytes + _SYSTEM_BYTES)
    room -= _query_bytes(width, query_tiles, recent=recent)
    warps = _MOST_WARPS
    while 2 * warps * stage_bytes > room:
        warps //= 2
    # The largest team, among those that leave the fewest thread blocks idle.
    num_blocks = blocks * device.num_sms
    sizes = [size for size in range(1, _MOST_TEAM + 1) if heads_kv % size == 0]
    team = min(sizes, key=lambda size: (num_blocks % size * 50 // num_blocks, -size))
    return PagedConfig(
        dtype=dtype,
        codes=codes,
        head_dim=width,
        padded=head_dim < width,
        value_padded=value_dim < width,
        query_tiles=query_tiles,
        row_tiles=-(-rows // (_QUERY_TILE * query_tiles)),
        step=step,
        warps=warps,
        stages=min(8, room // (warps * stage_bytes)),
        unit_tiles=_UNIT_KEYS // (step * warps) if batch_invariant else 0,
        team=team,
        blocks_per_sm=blocks,
        num_blocks=num_blocks // team * team,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        recent=recent,
    )
