"""Which kernels the divergence of two models' attention runs, decided from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cukit.attention.flash_plan import query_section, kernel_class
from cukit.attention.flash_problem import (
    AttentionProblem,
    Defines,
    ceil_div,
    common_defines,
    feature_defines,
    width_for,
)
from cukit.attention.flash_tilings import (
    KEY_WIDTHS,
    QUERY_TILINGS,
    UNLIKE_KEY_WIDTHS,
    QueryTiling,
    first_fit,
)
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_TOTAL_THREADS = 512
_ROWS_PER_BLOCK = 4096
_MOST_BLOCKS = 1024


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


def total_blocks(rows: int) -> int:
    """Blocks that sum `rows` rows of a loss."""
    return min(_MOST_BLOCKS, max(1, ceil_div(rows, _ROWS_PER_BLOCK)))


def sum_spec() -> KernelSpec:
    """The kernel that sums shares of the rows."""
    return _total_spec("attention_kl_sum", False)


def total_spec(weighed: bool) -> KernelSpec:
    """The kernel that adds those sums up. weighed: and divides by the sum of the weights."""
    return _total_spec("attention_kl_total", weighed)


def _total_spec(entry: str, weighed: bool) -> KernelSpec:
    defines = (("THREADS", _TOTAL_THREADS), ("WEIGHED", weighed))
    return KernelSpec("attention/attention_kl_total.cu", entry, defines, _TOTAL_THREADS)


def representative_pairs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """The variants of every width with and without a mask, unlike heads, and every option."""
    many = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True, teacher_group=4)
    problems = [
        replace(many, head_dim=width, causal=causal)
        for width in (64, 96, 128, 256)
        for causal in (False, True)
    ]
    problems += [
        replace(many, head_dim=80),
        replace(many, dtype="float16"),
        replace(many, head_dim=64, value_dim=128),
        replace(many, head_dim=64, value_dim=72, teacher_group=1),
        replace(many, window=(256, None), varlen=True),
        replace(many, head_dim=64, causal=False, window=(9, 9)),
    ]
    return [spec for problem in problems for spec in plan(problem)]
