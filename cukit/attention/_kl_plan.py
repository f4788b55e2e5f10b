"""Which kernels the divergence of two models' attention runs, decided from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cukit.attention._flash_plan import kernel_class, query_section
from cukit.attention._flash_plan_sm90 import pieces_of, sequences_spec
from cukit.attention._flash_tilings import (
    ITEM_BYTES,
    KEY_WIDTHS,
    PART,
    QUERY_TILINGS,
    UNLIKE_KEY_WIDTHS,
    QueryTiling,
    WarpgroupTiling,
    first_fit,
)
from cukit.attention._problem import (
    AttentionProblem,
    Defines,
    ceil_div,
    common_defines,
    feature_defines,
    width_for,
)
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_STEP = 16  # columns that are multiplied at a time


@dataclass(frozen=True)
class Knowledge:
    """What a sweep over the scores is given, and how it adds."""

    teacher: bool = False
    """Whether the teacher's lse is known."""
    student: bool = False
    precise: bool = False
    """Terms of which none is negative; both lse are known."""

    @property
    def defines(self) -> Defines:
        """Macros of kl_rows.cuh."""
        return (
            ("KNOWN_T", self.teacher),
            ("KNOWN_S", self.student),
            ("PRECISE", self.precise),
        )


@dataclass(frozen=True)
class AttentionKlConfig:
    """How one sweep of class sm80 runs."""

    kernel_class: str
    problem: AttentionProblem
    width: int
    value_width: int
    tiling: QueryTiling
    section: int
    known: Knowledge

    def num_blocks(self, seq_len_q: int) -> int:
        """Blocks of the grid."""
        problem = self.problem
        return problem.batch * problem.num_heads_q * ceil_div(seq_len_q, self.tiling.tile_m)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        defines = (
            *common_defines(self.problem, self.width, self.value_width),
            ("CAUSAL", self.problem.causal),
            *tiling.defines,
            *feature_defines(self.problem),
            *self.known.defines,
        )
        entry = f"attention_kl_{self.kernel_class}"
        shared = tiling.shared_bytes(self.width, self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)


@dataclass(frozen=True)
class KlTiling(WarpgroupTiling):
    """A block of Hopper's sweep: as in Hopper's forward, with queries of both models."""

    def shared_bytes(self, width: int, value_width: int) -> int:
        """The stages of both models' queries and keys, in parts of 64 columns."""
        columns = sum(ceil_div(each, PART) * PART for each in (width, value_width))
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        return ITEM_BYTES * columns * rows


KL_TILINGS: dict[int, KlTiling] = {
    128: KlTiling(2, 128, num_stages=3),
    192: KlTiling(2, 128),
    256: KlTiling(2, 128, query_stages=1),
    384: KlTiling(2, 64, query_stages=1),
    512: KlTiling(2, 32, query_stages=1),
}
"""By the most columns of both models' heads together."""


@dataclass(frozen=True)
class WarpgroupKlConfig:
    """How one sweep of class sm90 runs. The teacher's heads are the kernel's HEAD_DIM."""

    problem: AttentionProblem
    tiling: KlTiling
    slots: int
    """Blocks that the GPU runs at once."""
    known: Knowledge

    def num_blocks(self, seq_len_q: int) -> int:
        """Blocks of the grid: they walk over the tiles (kernels_cu/attention/query_work.cuh)."""
        problem = self.problem
        pieces = pieces_of(problem, self.tiling, seq_len_q)
        return min(problem.batch * problem.num_heads_q * pieces, self.slots)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        problem, tiling = self.problem, self.tiling
        width, teacher_width = (
            ceil_div(each, _STEP) * _STEP for each in (problem.head_dim, problem.head_dim_v)
        )
        defines: Defines = (
            ("DTYPE", problem.dtype),
            ("HEAD_DIM", teacher_width),
            ("VALUE_DIM", width),
            ("VALUE_PADDED", problem.head_dim != width),
            ("CAUSAL", problem.causal),
            ("CONSUMERS", tiling.consumers),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("QUERY_STAGES", tiling.query_stages),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("DISTILL", True),
            *feature_defines(problem),
            *self.known.defines,
        )
        shared = tiling.shared_bytes(width, teacher_width)
        entry = "attention_kl_sm90"
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def plan_spec(self) -> KernelSpec | None:
        """The kernel that sorts sequences of different lengths for this one."""
        return sequences_spec(self.tiling.tile_m) if self.problem.varlen else None


def plan_attention_kl_sm90(
    problem: AttentionProblem, known: Knowledge, device: Device
) -> WarpgroupKlConfig:
    """The configuration of a sweep that class sm90 covers (flash_plan_sm90.covers)."""
    columns = sum(ceil_div(each, PART) * PART for each in (problem.head_dim, problem.head_dim_v))
    tiling = next(each for most, each in KL_TILINGS.items() if columns <= most)
    return WarpgroupKlConfig(problem, tiling, device.num_sms, known)


def plan_attention_kl(
    problem: AttentionProblem, known: Knowledge, device: Device
) -> AttentionKlConfig:
    """The configuration of a sweep. Raises UnsupportedDeviceError where nothing fits."""
    widths = UNLIKE_KEY_WIDTHS if "value_dim" in problem.features else KEY_WIDTHS
    width, value_width = (width_for(n, widths) for n in (problem.head_dim, problem.head_dim_v))
    tiling = first_fit(QUERY_TILINGS[max(width, value_width)], width, value_width, device)
    return AttentionKlConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        width=width,
        value_width=value_width,
        tiling=tiling,
        section=query_section(problem, tiling, device),
        known=known,
    )


def representative_pairs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """The variants of two widths with and without a mask, of the others with one, of unlike heads
    and of every option."""
    many = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True, teacher_group=4)
    problems = [
        replace(many, head_dim=width, causal=causal)
        for width in (64, 128)
        for causal in (False, True)
    ]
    problems += [
        replace(many, head_dim=256),
        replace(many, head_dim=80),
        replace(many, dtype="float16"),
        replace(many, head_dim=64, value_dim=128),
        replace(many, head_dim=64, value_dim=72, teacher_group=1),
        replace(many, window=(256, None), varlen=True),
        replace(many, head_dim=64, causal=False, window=(9, 9)),
    ]
    return [spec for problem in problems for spec in plan(problem)]
