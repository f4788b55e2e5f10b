"""Products of groups of rows where there is no TMA, or rows are not aligned for it."""

from __future__ import annotations

from dataclasses import dataclass

from cukit.core.arrays import Array
from cukit.core.kernel import NULL, KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.gemm.grouped_plan import GroupedProblem, Layout, most_groups
from cukit.gemm.linear_sm80 import Sm80Config

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["GroupedDenseParameters"]


@dataclass(frozen=True)
class GroupedSm80Config:
    """How one call runs: a block for each tile that groups may have."""

    problem: GroupedProblem
    tiles: Sm80Config

    @property
    def num_blocks(self) -> int:
        """Where m is ragged the last tile of each group may be another one."""
        tiles, groups = self.tiles, self.problem.groups
        if self.problem.ragged == "k":
            return groups * tiles.num_blocks
        return (tiles.tiles_m + groups) * tiles.tiles_n

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiles, problem = self.tiles, self.problem
        defines = (
            *tiles.defines,
            ("RAGGED", problem.ragged.upper()),
            ("GROUPS", most_groups(problem.groups)),
        )
        entry = "grouped_gemm_sm80"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, tiles.threads, tiles.shared_bytes)


def plan_grouped_sm80(problem: GroupedProblem, aligned: bool, num_sms: int) -> GroupedSm80Config:
    """Tiles of 128 x 128, or of 64 x 64 where groups are short or the large ones would leave
    multiprocessors idle.

    aligned: whether rows of the operands can be copied 16 bytes at a time.
    """
    large, small = (
        GroupedSm80Config(problem, Sm80Config(problem.product, tile, aligned)) for tile in (128, 64)
    )
    short = problem.ragged == "m" and problem.rows_each <= small.tiles.tile
    return small if short or large.num_blocks < num_sms else large


class GroupedSm80:
    """A launch, for arrays that were checked before."""

    __slots__ = ("_launch", "config")

    def __init__(self, config: GroupedSm80Config, layout: Layout) -> None:
        product, ragged = config.problem.product, config.problem.ragged
        parameters = _PARAMETERS.pack(
            m=0 if ragged == "m" else product.m,
            n=product.n,
            k=0 if ragged == "k" else product.k,
            groups=layout.groups,
            longest=layout.longest,
            set_aside=layout.set_aside,
        )
        self.config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))

    def __call__(self, a: Array, b: Array, out: Array, kept: Array | None, ends: Array) -> None:
        self._launch(a, b, out, NULL if kept is None else kept, ends)
