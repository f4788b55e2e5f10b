"""The forward on Hopper: what class sm90 (wgmma, TMA) covers, and how it cuts the work.

Every other GPU, and what this class does not cover, is served by :mod:`flash_plan`'s class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from cukit.attention.flash_problem import (
    AttentionProblem,
    ceil_div,
    common_defines,
)
from cukit.attention.flash_tilings import WARPGROUP_TILINGS, WarpgroupTiling
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_ARCH = "sm_90"

SUPPORTED: frozenset[str] = frozenset()
"""The members of flash_problem.FEATURES that this class has kernels for."""


@dataclass(frozen=True)
class WarpgroupForwardConfig:
    """How one forward call runs."""

    problem: AttentionProblem
    tiling: WarpgroupTiling
    num_blocks: int
    """Blocks of the grid: they walk over the tiles (kernels_cu/attention/query_tiles.cuh)."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        defines = (
            *common_defines(self.problem),
            ("CAUSAL", self.problem.causal),
            ("CONSUMERS", tiling.consumers),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("QUERY_STAGES", tiling.query_stages),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
        )
        entry = "flash_attention_sm90"
        shared = tiling.shared_bytes(self.problem.width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a kernel for this problem on this device: no empty array, a width of
    head that has a tiling, and no feature that it lacks."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    return (
        device.arch == _ARCH
        and problem.features <= SUPPORTED
        and problem.width in WARPGROUP_TILINGS
        and min(sizes) > 0
    )


def _cost(problem: AttentionProblem, tiling: WarpgroupTiling) -> float:
    """Relative time of a head: its scores, in whole tiles."""
    rows = range(0, problem.seq_len_q, tiling.tile_m)
    tiles = len(rows) * ceil_div(problem.seq_len_kv, tiling.tile_n)
    if problem.causal:
        past = problem.seq_len_kv - problem.seq_len_q
        ends = (past + min(row + tiling.tile_m, problem.seq_len_q) for row in rows)
        tiles = sum(ceil_div(max(1, end), tiling.tile_n) for end in ends)
    return tiling.cost * tiling.tile_m * tiling.tile_n * tiles


@cache
def plan_flash_attention_sm90(problem: AttentionProblem, device: Device) -> WarpgroupForwardConfig:
    """The configuration of a problem that the class covers."""
    tilings = WARPGROUP_TILINGS[problem.width]
    tiling = min(tilings, key=lambda each: _cost(problem, each))
    tiles = ceil_div(problem.seq_len_q, tiling.tile_m)
    pieces = ceil_div(tiles, 2) if problem.causal else tiles
    slots = device.num_sms * tiling.blocks_per_sm
    return WarpgroupForwardConfig(
        problem=problem,
        tiling=tiling,
        num_blocks=min(problem.batch * problem.num_heads_q * pieces, slots),
    )


def specs_of(problem: AttentionProblem, device: Device) -> list[KernelSpec]:
    """The variants for problems of this width, whichever tiling their lengths ask for."""
    config = plan_flash_attention_sm90(problem, device)
    return [replace(config, tiling=tiling).spec() for tiling in WARPGROUP_TILINGS[problem.width]]
