"""Which kernel variant attention runs, decided from shapes and facts of the GPU alone.

A kernel class is a set of kernels written for one generation of tensor cores. `"sm80"` (mma.sync,
cp.async) runs on everything from Ampere on. Each class lists, per width of head, its tilings from
the preferred one down; the first whose blocks fit the shared memory of the GPU is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from cukit.core.compiler import KernelSpec
from cukit.core.device import KIB, Device
from cukit.errors import ArrayShapeError, UnsupportedDeviceError

HEAD_WIDTHS = (64, 96, 128, 256)
"""Widths of a tile: a head of any other size is padded with zeros to the next one."""

MAX_HEAD_DIM = HEAD_WIDTHS[-1]

_ITEM_BYTES = 2
_WARP = 32
_RESERVED_BYTES = KIB  # what the system takes of each block's shared memory


@dataclass(frozen=True)
class AttentionProblem:
    """What a plan needs to know of the arguments."""

    batch: int
    seq_len_q: int
    seq_len_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // max(1, self.num_heads_kv)

    @property
    def width(self) -> int:
        """Width of the tiles: the smallest that holds head_dim."""
        for width in HEAD_WIDTHS:
            if self.head_dim <= width:
                return width
        raise ArrayShapeError(f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}")


@dataclass(frozen=True)
class ForwardTiling:
    """A block takes tile_m queries, 16 * m_tiles a warp, and walks over tile_n keys at a time."""

    tile_m: int
    m_tiles: int
    tile_n: int
    blocks_per_sm: int = 1
    q_in_registers: bool = False

    def shared_bytes(self, width: int) -> int:
        """Q, and two stages of K and of V."""
        return _ITEM_BYTES * width * (self.tile_m + 4 * self.tile_n)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // (16 * self.m_tiles) * _WARP


@dataclass(frozen=True)
class KeyTiling:
    """Backward: a block takes tile_n keys and walks over tile_m queries at a time.

    The warps split queries x keys, keys x head_dim and queries x head_dim into score_warps,
    key_warps and query_warps rows.
    """

    tile_m: int
    tile_n: int
    warps: int
    score_warps: int
    key_warps: int
    query_warps: int
    num_stages: int = 2
    blocks_per_sm: int = 1

    def shared_bytes(self, width: int) -> int:
        """K, V, stages of Q and dO, P and dS, stages of lse and delta."""
        tiles = _ITEM_BYTES * width * 2 * (self.tile_n + self.num_stages * self.tile_m)
        scores = 2 * _ITEM_BYTES * self.tile_m * self.tile_n
        return tiles + scores + 8 * self.num_stages * self.tile_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * _WARP


@dataclass(frozen=True)
class QueryTiling:
    """Deterministic dQ: a block takes tile_m queries, 16 a warp, and walks over tile_n keys."""

    tile_m: int
    tile_n: int
    blocks_per_sm: int = 1

    def shared_bytes(self, width: int) -> int:
        """Q, dO, and two stages of K and of V."""
        return _ITEM_BYTES * width * (2 * self.tile_m + 4 * self.tile_n)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // 16 * _WARP


FORWARD_TILINGS: dict[int, tuple[ForwardTiling, ...]] = {
    64: (ForwardTiling(128, 2, 64, 2, q_in_registers=True),),
    96: (ForwardTiling(128, 2, 64, 2), ForwardTiling(128, 2, 32, 2)),
    128: (
        ForwardTiling(128, 2, 64, 2),
        ForwardTiling(128, 2, 32, 2),
        ForwardTiling(64, 1, 32, 2),
    ),
    256: (ForwardTiling(128, 1, 64), ForwardTiling(128, 1, 32), ForwardTiling(64, 1, 32)),
}
KEY_TILINGS: dict[int, tuple[KeyTiling, ...]] = {
    64: (KeyTiling(128, 128, 8, 4, 4, 4), KeyTiling(64, 128, 8, 2, 4, 2)),
    96: (
        KeyTiling(64, 64, 4, 2, 4, 4, 2, 2),
        KeyTiling(64, 64, 4, 2, 4, 4, 1, 2),
        KeyTiling(64, 64, 4, 2, 4, 4, 2, 1),
    ),
    128: (KeyTiling(64, 128, 8, 2, 4, 2), KeyTiling(64, 64, 4, 2, 4, 4, 1)),
    256: (
        KeyTiling(64, 64, 8, 4, 4, 2),
        KeyTiling(64, 64, 8, 4, 4, 2, 1),
        KeyTiling(32, 32, 4, 2, 2, 2, 1),
    ),
}
QUERY_TILINGS: dict[int, tuple[QueryTiling, ...]] = {
    64: (QueryTiling(128, 64),),
    96: (QueryTiling(128, 64), QueryTiling(64, 64)),
    128: (QueryTiling(128, 64), QueryTiling(64, 32)),
    256: (QueryTiling(128, 32), QueryTiling(64, 32), QueryTiling(64, 16)),
}

Tiling = TypeVar("Tiling", ForwardTiling, KeyTiling, QueryTiling)


def first_fit(tilings: Sequence[Tiling], width: int, device: Device) -> Tiling:
    """The first tiling whose blocks_per_sm blocks fit the shared memory of an SM of `device`."""
    for tiling in tilings:
        needed = tiling.shared_bytes(width)
        per_sm = tiling.blocks_per_sm * (needed + _RESERVED_BYTES)
        if needed <= device.shared_bytes_per_block and per_sm <= device.shared_bytes_per_sm:
            return tiling
    smallest = min(tiling.shared_bytes(width) for tiling in tilings)
    raise UnsupportedDeviceError(
        f"attention with head_dim up to {width} needs {smallest} bytes of shared memory a block, "
        f"{device.name} has {device.shared_bytes_per_block}"
    )


def _common_defines(problem: AttentionProblem) -> tuple[tuple[str, str | int | bool], ...]:
    return (
        ("DTYPE", problem.dtype),
        ("HEAD_DIM", problem.width),
        ("PADDED", problem.head_dim != problem.width),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class FlashAttentionConfig:
    """How one forward call runs."""

    kernel_class: str
    problem: AttentionProblem
    tiling: ForwardTiling
    section: int
    """Heads whose blocks run together (kernels_cu/attention/block_order.cuh)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid."""
        problem = self.problem
        tiles = _ceil_div(problem.seq_len_q, self.tiling.tile_m)
        return problem.batch * problem.num_heads_q * tiles

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        defines = (
            *_common_defines(self.problem),
            ("CAUSAL", self.problem.causal),
            ("TILE_M", tiling.tile_m),
            ("M_TILES", tiling.m_tiles),
            ("TILE_N", tiling.tile_n),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("Q_IN_REGISTERS", tiling.q_in_registers),
        )
        entry = f"flash_attention_{self.kernel_class}"
        shared = tiling.shared_bytes(self.problem.width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)


@dataclass(frozen=True)
class FlashAttentionBackwardConfig:
    """How one backward call runs: prepare, keys, then finish or (deterministic) queries."""

    kernel_class: str
    problem: AttentionProblem
    deterministic: bool
    keys: KeyTiling
    queries: QueryTiling
    key_section: int
    query_section: int

    @property
    def seq_len_q_padded(self) -> int:
        """Rows that the scratch arrays have for a head: whole tiles."""
        return _ceil_div(self.problem.seq_len_q, self.keys.tile_m) * self.keys.tile_m

    @property
    def prepare_blocks(self) -> int:
        """Blocks of the grid of prepare."""
        rows = self.problem.batch * self.problem.num_heads_q * self.seq_len_q_padded
        return _ceil_div(rows * _prepare_lanes(self.problem.width), _ROW_THREADS)

    @property
    def key_blocks(self) -> int:
        """Blocks of the grid that computes dK and dV."""
        problem = self.problem
        tiles = _ceil_div(problem.seq_len_kv, self.keys.tile_n)
        return problem.batch * problem.num_heads_kv * tiles

    @property
    def query_blocks(self) -> int:
        """Blocks of the grid that writes dQ."""
        problem = self.problem
        tile = self.queries.tile_m if self.deterministic else self.keys.tile_m
        return problem.batch * problem.num_heads_q * _ceil_div(problem.seq_len_q, tile)

    def prepare_spec(self) -> KernelSpec:
        """Row statistics, and zeroing the sum of dQ."""
        defines = (
            *_common_defines(self.problem),
            ("THREADS", _ROW_THREADS),
            ("LANES", _prepare_lanes(self.problem.width)),
            ("QUERY_GRADIENT", not self.deterministic),
            ("TILE_M", self.keys.tile_m),
        )
        return KernelSpec(_ROWS_SOURCE, "flash_attention_backward_prepare", defines, _ROW_THREADS)

    def keys_spec(self) -> KernelSpec:
        """dK and dV; unless deterministic, the sum of dQ as well."""
        tiling = self.keys
        defines = (
            *_common_defines(self.problem),
            ("CAUSAL", self.problem.causal),
            ("QUERY_GRADIENT", not self.deterministic),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("SCORE_WARPS", tiling.score_warps),
            ("KEY_WARPS", tiling.key_warps),
            ("QUERY_WARPS", tiling.query_warps),
        )
        entry = f"flash_attention_backward_{self.kernel_class}"
        shared = tiling.shared_bytes(self.problem.width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def finish_spec(self) -> KernelSpec:
        """dQ from its sum."""
        tile_m = self.keys.tile_m
        defines = (
            *_common_defines(self.problem),
            ("THREADS", _ROW_THREADS),
            ("LANES", _prepare_lanes(self.problem.width)),
            ("QUERY_GRADIENT", True),
            ("TILE_M", tile_m),
        )
        shared = tile_m * self.problem.width * _ITEM_BYTES
        entry = "flash_attention_backward_finish"
        return KernelSpec(_ROWS_SOURCE, entry, defines, _ROW_THREADS, shared)

    def queries_spec(self) -> KernelSpec:
        """dQ in a fixed order."""
        tiling = self.queries
        defines = (
            *_common_defines(self.problem),
            ("CAUSAL", self.problem.causal),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
        )
        entry = f"flash_attention_backward_query_{self.kernel_class}"
        shared = tiling.shared_bytes(self.problem.width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def specs(self) -> tuple[KernelSpec, ...]:
        """All variants that this configuration launches, in order."""
        last = self.queries_spec() if self.deterministic else self.finish_spec()
        return self.prepare_spec(), self.keys_spec(), last


_ROWS_SOURCE = "attention/flash_attention_backward_rows.cu"
_ROW_THREADS = 256


def _prepare_lanes(width: int) -> int:
    """Lanes a row: one for eight elements, rounded up to a power of two."""
    return 1 << (width // 8 - 1).bit_length()


KERNEL_CLASSES: tuple[tuple[tuple[int, int], str], ...] = (((8, 0), "sm80"),)
"""Oldest compute capability of each kernel class, newest class first."""


def kernel_class(device: Device) -> str:
    """The newest class of kernels that runs on `device`."""
    for oldest, name in KERNEL_CLASSES:
        if device.compute_capability >= oldest:
            return name
    raise UnsupportedDeviceError(f"attention needs sm_80 or newer, {device.name} is {device.arch}")


def _section(problem: AttentionProblem, bytes_per_head: int, heads: int, device: Device) -> int:
    """Causal: as many heads together as half of L2 holds, so that long tiles can go first and
    still share it. Otherwise one head after the other: all tiles are equally long."""
    if not problem.causal:
        return 1
    return max(1, min(heads, device.l2_bytes // 2 // max(1, bytes_per_head)))


@cache
def plan_flash_attention(problem: AttentionProblem, device: Device) -> FlashAttentionConfig:
    """The forward's configuration. Raises UnsupportedDeviceError where nothing fits."""
    width = problem.width
    heads = problem.batch * problem.num_heads_q
    key_bytes = 2 * problem.seq_len_kv * problem.head_dim * _ITEM_BYTES // problem.group
    return FlashAttentionConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        tiling=first_fit(FORWARD_TILINGS[width], width, device),
        section=_section(problem, key_bytes, heads, device),
    )


@cache
def plan_flash_attention_backward(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> FlashAttentionBackwardConfig:
    """The backward's configuration. Raises UnsupportedDeviceError where nothing fits."""
    width = problem.width
    # What the blocks of a key head read again and again: Q, dO and the float32 sum of dQ.
    query_bytes = problem.group * problem.seq_len_q * problem.head_dim * (2 * _ITEM_BYTES + 4)
    key_bytes = 2 * problem.seq_len_kv * problem.head_dim * _ITEM_BYTES // problem.group
    heads_kv, heads_q = (problem.batch * n for n in (problem.num_heads_kv, problem.num_heads_q))
    return FlashAttentionBackwardConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        deterministic=deterministic,
        keys=first_fit(KEY_TILINGS[width], width, device),
        queries=first_fit(QUERY_TILINGS[width], width, device),
        key_section=_section(problem, query_bytes, heads_kv, device),
        query_section=_section(problem, key_bytes, heads_q, device),
    )


def representative_specs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """The variants for every width, dtype and mask, and one padded head."""
    problems = [
        AttentionProblem(4, 4096, 4096, 32, 8, head_dim, dtype, causal)
        for head_dim in (*HEAD_WIDTHS, 80)
        for dtype in ("float16", "bfloat16")
        for causal in (False, True)
    ]
    return [spec for problem in problems for spec in plan(problem)]
