"""Plans of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.reference.mla_attention import LATENT_DIM, ROPE_DIM

TILE_ROWS = 64
"""Query rows (queries times heads) per tile."""
BLOCK_SIZE = 64
"""Keys per cache block."""
BOX_COLUMNS = 64
"""16-bit columns of a TMA box: the width of a 128-byte swizzle."""

_THREADS = 384
_MERGE_THREADS = 128
_MOST_TEAM = 4
_CLUSTER = 2
_STAGES = 2
_EARLY = 2
_DECODER_EARLY = 1
_PRODUCER_REGISTERS = 56
_DECODER_REGISTERS = 104  # per producer thread where the producer decodes FP8 latents
_MERGE_BLOCKS_PER_SM = 4


@dataclass(frozen=True)
class MlaConfig:
    """The configuration of a call.

    row_tiles: tiles of 64 rows (queries times heads) per request.
    team: thread blocks that process neighbouring tiles of the same keys.
    cluster: thread blocks of a team that load each page with TMA multicast, 1 or 2.
    num_blocks: grid size, one block per SM.
    coded: whether the cache holds FP8 latents.
    early: column ranges of a page, out of three, whose score products are issued before the product
        with the other warpgroup's probabilities.
    prefetch: pages prefetched to L2 ahead of the pipeline, 0 or 1.
    """

    dtype: str
    coded: bool
    causal: bool
    row_tiles: int
    team: int
    cluster: int
    num_blocks: int
    early: int
    prefetch: int

    def spec(self) -> KernelSpec:
        """The attention kernel."""
        defines = (
            *self._defines(),
            ("CODES", int(self.coded)),
            ("CLUSTER", self.cluster),
            ("EARLY", self.early),
            ("PREFETCH", self.prefetch),
            ("PRODUCER_REGISTERS", _DECODER_REGISTERS if self.coded else _PRODUCER_REGISTERS),
            ("THREADS", _THREADS),
        )
        shared = 2 * (
            (TILE_ROWS + _STAGES * BLOCK_SIZE) * (LATENT_DIM + ROPE_DIM) + TILE_ROWS * BLOCK_SIZE
        )
        source = "attention/mla_attention_sm90.cu"
        return KernelSpec(source, "mla_attention_sm90", defines, _THREADS, shared)

    def merge_spec(self) -> KernelSpec:
        """The kernel that merges the partial results of requests split over several blocks."""
        defines = (*self._defines(), ("THREADS", _MERGE_THREADS))
        return KernelSpec("attention/mla_merge.cu", "mla_merge", defines, _MERGE_THREADS)

    def _defines(self) -> tuple[tuple[str, str | int], ...]:
        return ("DTYPE", self.dtype), ("TEAM", self.team), ("CAUSAL", int(self.causal))

    @property
    def page_box(self) -> tuple[int, int, int]:
        """The TMA box: cache blocks, tokens and columns (bytes of an FP8 cache)."""
        columns = 2 * BOX_COLUMNS if self.coded else BOX_COLUMNS
        return 1, BLOCK_SIZE // self.cluster, columns

    @property
    def scratch_floats(self) -> int:
        """float32 elements of the partial results, at most two per thread block: outputs, row
        maxima and row sums."""
        return 2 * self.num_blocks * TILE_ROWS * (LATENT_DIM + 2)

    def merge_rows(self, batch: int) -> int:
        """Rows per block of the merge kernel: a power of two, smaller for small batches."""
        rows, most = TILE_ROWS, _MERGE_BLOCKS_PER_SM * self.num_blocks
        while rows > 1 and batch * self.row_tiles * TILE_ROWS // rows < most:
            rows //= 2
        return rows


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
    """The configuration of a call: one thread block per SM, in the largest teams that divide the
    tiles of a request and leave the fewest SMs idle."""
    row_tiles = -(-heads * seq_len_q // TILE_ROWS)
    sizes = [size for size in range(1, _MOST_TEAM + 1) if row_tiles % size == 0]
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
        early=_DECODER_EARLY if coded else _EARLY,
        # Without a cluster, L2 requests are the bottleneck, and a prefetch would double them.
        prefetch=int(cluster > 1),
    )
