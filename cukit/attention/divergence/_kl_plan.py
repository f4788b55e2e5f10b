"""Plans of the attention KL: the kernel variants for a problem and a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cukit.attention.flash._flash_plan import kernel_class, query_raster_group
from cukit.attention.flash._flash_plan_sm90 import (
    WarpgroupForwardConfig,
    covers,
    items_per_head,
    sequences_spec,
)
from cukit.attention.flash._flash_tilings import (
    BOX_COLUMNS,
    ITEM_BYTES,
    KEY_WIDTHS,
    QUERY_TILINGS,
    UNEQUAL_KEY_WIDTHS,
    QueryTiling,
    WarpgroupTiling,
    first_fit,
)
from cukit.attention.flash._problem import (
    AttentionProblem,
    Defines,
    ceil_div,
    common_defines,
    feature_defines,
    width_for,
)
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_STEP = 16  # K of one wgmma
_ONE_PASS_COLUMNS = 128  # largest head_dim


@dataclass(frozen=True)
class KnownLse:
    """Which log-sum-exps a sweep over the scores reads, and how it sums the divergence."""

    teacher: bool = False
    """Whether the teacher's lse is known."""
    student: bool = False
    """Whether the student's lse is known."""
    precise: bool = False
    """Sum non-negative terms; requires both lse."""

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
    """The configuration of a sweep of class sm80."""

    kernel_class: str
    problem: AttentionProblem
    width: int
    value_width: int
    tiling: QueryTiling
    raster_group: int
    known: KnownLse

    def num_blocks(self, seq_len_q: int) -> int:
        """The grid size."""
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


def _padded_columns(*widths: int) -> int:
    """The sum of `widths`, each rounded up to whole TMA boxes."""
    return sum(ceil_div(width, BOX_COLUMNS) * BOX_COLUMNS for width in widths)


@dataclass(frozen=True)
class KlTiling(WarpgroupTiling):
    """The tiling of Hopper's sweep: as for the forward, with queries and keys of both models."""

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of the stages of both models' queries and keys, in boxes of 64 columns."""
        columns = _padded_columns(width, value_width)
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        return ITEM_BYTES * columns * rows


KL_TILINGS: dict[int, KlTiling] = {
    128: KlTiling(2, 128, num_stages=3),
    192: KlTiling(2, 128),
    256: KlTiling(2, 128, query_stages=1),
    384: KlTiling(2, 64, query_stages=1),
    512: KlTiling(2, 32, query_stages=1),
}
"""Keyed by the largest sum of the two models' padded head_dims."""
_NARROW_CAUSAL = KlTiling(4, 64, num_stages=3)
_NARROW_KNOWN = KlTiling(3, 96, num_stages=3)


def _kl_tiling(problem: AttentionProblem, known: KnownLse) -> KlTiling:
    """The fastest tiling, as measured on an H200 (profiling/notes/attention_distillation.md).

    Heads of up to 64 columns, without a window, variable lengths or `precise`, use more consumer
    warpgroups: with a causal mask if both log-sum-exps are known or neither is, without one if both
    are known.
    """
    columns = _padded_columns(problem.head_dim, problem.head_dim_v)
    plain = not problem.features & {"window", "varlen"}
    if columns == 2 * BOX_COLUMNS and plain and not known.precise:
        if problem.causal and known.teacher == known.student:
            return _NARROW_CAUSAL
        if not problem.causal and known.teacher and known.student:
            return _NARROW_KNOWN
    return next(each for most, each in KL_TILINGS.items() if columns <= most)


@dataclass(frozen=True)
class WarpgroupKlConfig:
    """The configuration of a sweep of class sm90. HEAD_DIM of the kernel is the teacher's."""

    problem: AttentionProblem
    tiling: KlTiling
    num_sms: int
    """SMs of the device; each runs one persistent block."""
    known: KnownLse

    def num_blocks(self, seq_len_q: int) -> int:
        """The grid size: persistent blocks (kernels_cu/attention/query_work.cuh)."""
        problem = self.problem
        items = items_per_head(problem, self.tiling, seq_len_q)
        return min(problem.batch * problem.num_heads_q * items, self.num_sms)

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
        """The kernel that schedules variable-length sequences, if there are any."""
        return sequences_spec(self.tiling.tile_m) if self.problem.varlen else None


def plan_attention_kl_sm90(
    problem: AttentionProblem, known: KnownLse, device: Device
) -> WarpgroupKlConfig:
    """The configuration of a sweep that class sm90 covers (_flash_plan_sm90.covers)."""
    return WarpgroupKlConfig(problem, _kl_tiling(problem, known), device.num_sms, known)


def plan_attention_kl(
    problem: AttentionProblem, known: KnownLse, device: Device
) -> AttentionKlConfig:
    """The configuration of a sweep. Raises UnsupportedDeviceError if no tiling fits the device."""
    widths = UNEQUAL_KEY_WIDTHS if "value_dim" in problem.features else KEY_WIDTHS
    width, value_width = (width_for(n, widths) for n in (problem.head_dim, problem.head_dim_v))
    tiling = first_fit(QUERY_TILINGS[max(width, value_width)], width, value_width, device)
    return AttentionKlConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        width=width,
        value_width=value_width,
        tiling=tiling,
        raster_group=query_raster_group(problem, tiling, device),
        known=known,
    )


@dataclass(frozen=True, kw_only=True)
class AttentionWithKlConfig(WarpgroupForwardConfig):
    """The configuration of a student's attention that also yields its divergence from a teacher's
    (flash_attention_sm90.cu, TEACHER)."""

    teacher_dim: int
    """head_dim of the teacher."""
    known_teacher: bool
    """Whether the teacher's lse is known."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        spec, tiling = super().spec(), self.tiling
        defines: Defines = (
            ("TEACHER", True),
            ("TEACHER_DIM", ceil_div(self.teacher_dim, _STEP) * _STEP),
            ("KNOWN_T", self.known_teacher),
            ("KNOWN_S", 2),
        )
        rows = tiling.query_stages * tiling.tile_m + tiling.num_stages * tiling.tile_n
        shared = spec.shared_bytes + ITEM_BYTES * _padded_columns(self.teacher_dim) * rows
        return replace(spec, defines=(*spec.defines, *defines), shared_bytes=shared)


_ONE_PASS_NARROW = WarpgroupTiling(3, 64, num_stages=3)  # up to 64 columns
_ONE_PASS_WIDE = WarpgroupTiling(2, 96, query_stages=1)  # up to 128
_ONE_PASS_UNSPILLED = WarpgroupTiling(2, 80, query_stages=1)


def _one_pass_tiling(problem: AttentionProblem, teacher_dim: int, known: bool) -> WarpgroupTiling:
    """The fastest tiling, as measured on an H200 (profiling/notes/attention_distillation.md).

    With the teacher's lse known, tiles of 96 keys spill 56 bytes and are slower than tiles of 80,
    except with a causal mask and neither window nor variable lengths.
    """
    if max(problem.head_dim, problem.head_dim_v, teacher_dim) <= BOX_COLUMNS:
        return _ONE_PASS_NARROW
    plain_causal = problem.causal and not problem.features & {"window", "varlen"}
    return _ONE_PASS_UNSPILLED if known and not plain_causal else _ONE_PASS_WIDE


def plan_attention_with_kl(
    problem: AttentionProblem, teacher_dim: int, known_teacher: bool, device: Device
) -> AttentionWithKlConfig | None:
    """The configuration of the student's attention and its divergence in one pass.

    None where class sm90 does not cover the problem, or a head is too wide: the output and both
    models' scores would not fit in registers.

    problem: the student's attention, with no options other than masks.
    """
    widest = max(problem.head_dim, problem.head_dim_v, teacher_dim)
    if not covers(problem, device) or widest > _ONE_PASS_COLUMNS:
        return None
    return AttentionWithKlConfig(
        problem,
        _one_pass_tiling(problem, teacher_dim, known_teacher),
        device.num_sms,
        teacher_dim=teacher_dim,
        known_teacher=known_teacher,
    )


def attention_with_kl_specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: two widths with and without a causal mask, with the
    teacher's lse known or not; float16; unequal head_dims; a window and variable lengths."""
    many = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)
    cases = [
        (replace(many, head_dim=width, causal=causal), width, known)
        for width in (64, 128)
        for causal in (False, True)
        for known in (False, True)
    ]
    cases += [
        (replace(many, head_dim=64, dtype="float16"), 64, False),
        (replace(many, head_dim=64, value_dim=128), 72, True),
        (replace(many, window=(256, None), varlen=True), 128, False),
    ]
    configs = [plan_attention_with_kl(*case, device) for case in cases]
    return [config.spec() for config in configs if config is not None]


def representative_pairs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """A representative set of variants: two widths with and without a causal mask, two more with
    one; float16; unequal head_dims; windows and variable lengths."""
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
