"""How paged attention runs: a pure function of the shape of a call and the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

HEAD_DIMS = (64, 96, 128, 192, 256)
CODE_HEAD_DIMS = (64, 128, 192, 256)
"""Of tiles: the next larger one serves other widths."""
CODES = {"": 0, "float8_e4m3": 1, "int8": 2}
"""What a cache may hold, by its number in the kernel; "" is q's dtype."""

_OP = "paged_attention"
_STEP = 16
_MOST_WARPS = 4
_MOST_TEAM = 8
_UNIT_KEYS = 1024
"""Keys of a unit of a batch-invariant call: a fixed number, whatever the device."""
_RESERVED_BYTES = 3072
"""Of shared memory, for each thread block: the system's own and static arrays."""


@dataclass(frozen=True)
class PagedConfig:
    """How a call runs.

    codes: of the caches; "" where they hold `dtype`.
    head_dim: columns of the tiles. row_tiles: of 16 * m_tiles query rows, of a key head.
    warps: of a thread block; each has its own 16 keys of a tile.
    stages: copies of 16 keys and values that a warp has under way or in use.
    unit_tiles: tiles of keys of a unit, in a batch-invariant call; 0 otherwise.
    team: thread blocks that work on neighbouring heads of the same keys.
    """

    dtype: str
    codes: str
    head_dim: int
    padded: bool
    value_padded: bool
    m_tiles: int
    row_tiles: int
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

    def spec(self) -> KernelSpec:
        """What is launched."""
        defines = (
            ("DTYPE", self.dtype),
            ("CODE", CODES[self.codes]),
            ("HEAD_DIM", self.head_dim),
            ("PADDED", int(self.padded)),
            ("VALUE_DIM", self.head_dim),
            ("VALUE_PADDED", int(self.value_padded)),
            ("M_TILES", self.m_tiles),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("UNIT_TILES", self.unit_tiles),
            ("TEAM", self.team),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("CAUSAL", int(self.causal)),
            ("WINDOW", int(self.window)),
            ("SOFTCAP", int(self.softcap)),
            ("SINKS", int(self.sinks)),
        )
        ring = self.warps * self.stages * _stage_bytes(self.head_dim, self.codes)
        shared = ring + _query_bytes(self.head_dim, self.m_tiles)
        return KernelSpec("attention/paged_attention.cu", _OP, defines, 32 * self.warps, shared)

    def slots(self, batch: int, problems: int, most_keys: int) -> tuple[int, int]:
        """Sums of pieces, and counters, that a call may need at most."""
        if not self.unit_tiles:
            return 2 * self.num_blocks, self.num_blocks
        units = -(-most_keys // _UNIT_KEYS) + 1
        return batch * problems * units, batch * problems

    @property
    def slot_floats(self) -> int:
        """One piece's outputs, maxima and sums."""
        return 16 * self.m_tiles * (self.head_dim + 2)


def _stage_bytes(head_dim: int, codes: str) -> int:
    """A warp's keys and values of one tile, and their scales."""
    return 2 * _STEP * (head_dim + 4 if codes else 2 * head_dim)


def _query_bytes(head_dim: int, m_tiles: int) -> int:
    return 16 * m_tiles * head_dim * 2


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
) -> PagedConfig:
    """Two thread blocks on an SM for narrow heads, three where codes are decoded, and as many warps
    and then stages as fit.

    rows: query rows that share a key head: heads of the group times queries of a request.
    """
    widths = CODE_HEAD_DIMS if codes else HEAD_DIMS
    width = next(each for each in widths if each >= head_dim)
    m_tiles = 1 if rows <= 16 or width > 128 else 2
    blocks = 1 if width > 128 else 3 if codes and m_tiles == 1 else 2
    room = device.shared_bytes_per_sm // blocks - _RESERVED_BYTES
    room = min(room, device.shared_bytes_per_block) - _query_bytes(width, m_tiles)
    warps = _MOST_WARPS
    while 2 * warps * _stage_bytes(width, codes) > room:
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
        m_tiles=m_tiles,
        row_tiles=-(-rows // (16 * m_tiles)),
        warps=warps,
        stages=min(8, room // (warps * _stage_bytes(width, codes))),
        unit_tiles=_UNIT_KEYS // (_STEP * warps) if batch_invariant else 0,
        team=team,
        blocks_per_sm=blocks,
        num_blocks=num_blocks // team * team,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
