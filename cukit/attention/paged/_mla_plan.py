"""Plans of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.reference.mla_attention import CODE_BYTES, LATENT_DIM, ROPE_DIM

TILE_ROWS = 64
"""Query rows (queries times heads) per tile."""
BLOCK_SIZE = 64
"""Keys per cache block."""
BOX_COLUMNS = 64
"""16-bit columns of a TMA box: the width of a 128-byte swizzle."""

_THREADS = 384
_MERGE_THREADS = 128
_MAX_TEAM = 4
_CLUSTER = 2
_STAGES = 2
_EARLY = 2  # of three column sections of Q K^T: issued before P V of the other consumer's page
_PRODUCER_REGISTERS = 56
_CODED_THREADS = 512
_CODED_ROWS = (16, 32, 64)
_SCORE_REGISTERS = 136  # per thread that computes scores of FP8 latents
_SLOT_BYTES = 16 * CODE_BYTES  # a quarter of a page
_SLOT_BUDGET = 232448 - 5 * 1024  # bytes of dynamic shared memory: 227 KiB less the static part
_MERGE_BLOCKS_PER_SM = 4


@dataclass(frozen=True)
class MlaConfig:
    """The configuration of a call.

    row_tiles: tiles of 64 rows (queries times heads) per request.
    team: thread blocks that process neighbouring tiles of the same keys.
    cluster: thread blocks of a team that load each page with TMA multicast, 1 or 2.
    num_blocks: grid size, one block per SM.
    coded: whether the cache holds FP8 latents.
    rows: rows of a tile that are computed: 64; with FP8 latents 16 or 32 if a request has no more.
    prefetch: pages prefetched to L2 ahead of the pipeline, 0 or 1.
    """

    dtype: str
    coded: bool
    causal: bool
    row_tiles: int
    team: int
    cluster: int
    num_blocks: int
    rows: int
    prefetch: int

    def spec(self) -> KernelSpec:
        """The attention kernel."""
        return self._coded_spec() if self.coded else self._plain_spec()

    def _plain_spec(self) -> KernelSpec:
        defines = (
            *self._defines(),
            ("CLUSTER", self.cluster),
            ("EARLY", _EARLY),
            ("PREFETCH", self.prefetch),
            ("PRODUCER_REGISTERS", _PRODUCER_REGISTERS),
            ("THREADS", _THREADS),
        )
        shared = 2 * (
            (TILE_ROWS + _STAGES * BLOCK_SIZE) * (LATENT_DIM + ROPE_DIM) + TILE_ROWS * BLOCK_SIZE
        )
        source = "attention/mla_attention_sm90.cu"
        return KernelSpec(source, "mla_attention_sm90", defines, _THREADS, shared)

    def _coded_spec(self) -> KernelSpec:
        operands = 2 * self.rows * (LATENT_DIM + ROPE_DIM + 2 * BLOCK_SIZE)
        slots = (_SLOT_BUDGET - operands) // _SLOT_BYTES
        defines = (
            *self._defines(),
            ("HEADS", self.rows),
            ("SLOTS", slots),
            ("SCORE_REGISTERS", _SCORE_REGISTERS),
            ("THREADS", _CODED_THREADS),
        )
        shared = operands + slots * _SLOT_BYTES
        source = "attention/mla_attention_float8_sm90.cu"
        return KernelSpec(source, "mla_attention_float8_sm90", defines, _CODED_THREADS, shared)

    def merge_spec(self) -> KernelSpec:
        """The kernel that merges the partial results of requests split over several blocks."""
        defines = (
            *self._defines(),
            ("FRAGMENT_ROWS", self.rows if self.coded else 0),
            ("THREADS", _MERGE_THREADS),
        )
        return KernelSpec("attention/mla_merge.cu", "mla_merge", defines, _MERGE_THREADS)

    def _defines(self) -> tuple[tuple[str, str | int], ...]:
        return ("DTYPE", self.dtype), ("TEAM", self.team), ("CAUSAL", int(self.causal))

    @property
    def query_box(self) -> tuple[int, int, int]:
        """The TMA box of the queries: requests, rows and columns."""
        return 1, self.rows, BOX_COLUMNS

    @property
    def page_box(self) -> tuple[int, int, int]:
        """The TMA box of 16-bit latents: cache blocks, tokens and columns."""
        return 1, BLOCK_SIZE // self.cluster, BOX_COLUMNS

    @property
    def scratch_floats(self) -> int:
        """float32 elements of the partial results, at most two per thread block: outputs, row
        maxima and row sums."""
        return 2 * self.num_blocks * TILE_ROWS * (LATENT_DIM + 2)

    def units_per_merge_block(self, batch: int) -> int:
        """Units (mla_merge.cu) per block of the merge kernel: a power of two, smaller for small
        batches."""
        units, enough_blocks = self.rows, _MERGE_BLOCKS_PER_SM * self.num_blocks
        while units > 1 and batch * self.row_tiles * self.rows // units < enough_blocks:
            units //= 2
        return units


@lru_cache(maxsize=1024)
def plan_mla_attention(
    heads: int,
    seq_len_q: int,
    dtype: str,
    device: Device,
    *,
    coded: bool = False,
    causal: bool = True,
) -> MlaConfig:
    """The configuration of a call: one thread block per SM, in teams.

    The team size divides the tiles of a request and leaves the fewest SMs idle; of several such
    sizes, the largest is used.
    """
    row_tiles = -(-heads * seq_len_q // TILE_ROWS)
    sizes = [size for size in range(1, _MAX_TEAM + 1) if row_tiles % size == 0]
    team = min(sizes, key=lambda size: (device.num_sms % size, -size))
    cluster = 1 if coded or team % _CLUSTER else _CLUSTER
    return MlaConfig(
        dtype=dtype,
        coded=coded,
        causal=causal and seq_len_q > 1,
        row_tiles=row_tiles,
        team=team,
        cluster=cluster,
        num_blocks=device.num_sms // team * team,
        rows=next((n for n in _CODED_ROWS if coded and heads * seq_len_q <= n), TILE_ROWS),
        # Without a cluster, L2 requests are the bottleneck, and a prefetch would double them.
        prefetch=int(cluster > 1),
    )
