"""Which kernel variant attention runs, decided from shapes and facts of the GPU alone.

A kernel class is a set of kernels written for one generation of tensor cores. `"sm80"` (mma.sync,
cp.async) runs on everything from Ampere on. :mod:`flash_plan_sm90` plans Hopper's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cukit.attention._flash_tilings import (
    CROWDED_FORWARD_TILINGS,
    FORWARD_TILINGS,
    ITEM_BYTES,
    KEY_TILINGS,
    KEY_WIDTHS,
    QUERY_TILINGS,
    UNLIKE_KEY_WIDTHS,
    ForwardTiling,
    KeyTiling,
    QueryTiling,
    WarpgroupKeyTiling,
    WarpgroupQueryTiling,
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
from cukit.errors import UnsupportedDeviceError

if TYPE_CHECKING:
    from typing_extensions import Self

_SECTION_WAVES = 4
_SHARING_BLOCKS = 16


@dataclass(frozen=True)
class FlashAttentionConfig:
    """How one forward call runs."""

    kernel_class: str
    problem: AttentionProblem
    tiling: ForwardTiling
    section: int
    """Heads whose blocks run together (kernels_cu/attention/block_order.cuh)."""

    def num_blocks(self, seq_len_q: int) -> int:
        """Blocks of the grid."""
        problem = self.problem
        return problem.batch * problem.num_heads_q * ceil_div(seq_len_q, self.tiling.tile_m)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        defines = (
            *common_defines(self.problem),
            ("CAUSAL", self.problem.causal),
            ("TILE_M", tiling.tile_m),
            ("M_TILES", tiling.m_tiles),
            ("TILE_N", tiling.tile_n),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("Q_IN_REGISTERS", tiling.q_in_registers),
            *feature_defines(self.problem),
        )
        entry = f"flash_attention_{self.kernel_class}"
        shared = tiling.shared_bytes(self.problem.width, self.problem.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)


@dataclass(frozen=True)
class FlashAttentionBackwardConfig:
    """How one backward call runs: prepare, keys, then finish or (not sums_queries) queries."""

    kernel_class: str
    problem: AttentionProblem
    width: int
    """Width of the tiles of q and k."""
    value_width: int
    """Width of the tiles of v and out."""
    deterministic: bool
    keys: KeyTiling | WarpgroupKeyTiling
    queries: QueryTiling | WarpgroupQueryTiling
    splits: int
    """Blocks that share a key head, each with group / splits query heads."""
    key_section: int
    query_section: int

    def at_lengths(self, seq_len_q: int, seq_len_kv: int) -> Self:
        """The same for other lengths that round alike (AttentionProblem.at_lengths)."""
        config = object.__new__(type(self))
        config.__dict__.update(self.__dict__)
        config.__dict__["problem"] = self.problem.at_lengths(seq_len_q, seq_len_kv)
        return config

    @property
    def sums_queries(self) -> bool:
        """Whether the kernel of the keys adds dQ up in float32 scratch; else dQ has a kernel of its
        own, which adds in a fixed order."""
        return not self.deterministic

    def scratch_rows(self, total_q: int) -> tuple[int, int]:
        """Heads of the scratch arrays, and the rows that each has: whole tiles.

        total_q: rows of q where sequences of different lengths lie one behind the other. There
        every sequence begins with a tile of its own (kernels_cu/attention/scratch_rows.cuh).
        """
        problem, tile = self.problem, self.keys.tile_m
        heads = problem.num_heads_q * (1 if problem.varlen else problem.batch)
        rows = total_q + problem.batch * tile if problem.varlen else problem.seq_len_q
        return heads, ceil_div(rows, tile) * tile

    @property
    def counted(self) -> bool:
        """Whether counters say how far each tile of the sum of dQ is; else it starts with zeros."""
        return False

    @property
    def _sum_defines(self) -> Defines:
        """What else prepare and finish have to know of the sum of dQ."""
        return ()

    def counters(self, total_q: int) -> int:
        """Those of the tiles, and one for the call."""
        heads, rows = self.scratch_rows(total_q)
        return 1 + heads * rows // self.keys.tile_m if self.counted else 0

    def prepare_blocks(self, total_q: int) -> int:
        """Blocks of the grid of prepare."""
        heads, rows = self.scratch_rows(total_q)
        return ceil_div(heads * rows * self._prepare_lanes, _ROW_THREADS)

    @property
    def key_blocks(self) -> int:
        """Blocks of the grid that computes dK and dV."""
        problem = self.problem
        tiles = ceil_div(problem.seq_len_kv, self.keys.tile_n)
        return problem.batch * problem.num_heads_kv * self.splits * tiles

    @property
    def query_blocks(self) -> int:
        """Blocks of the grid of the kernel that computes dQ alone."""
        problem = self.problem
        tiles = ceil_div(problem.seq_len_q, self.queries.tile_m)
        return problem.batch * problem.num_heads_q * tiles

    def finish_blocks(self, total_q: int) -> int:
        """Blocks of the grid that turns the sum of dQ into dQ."""
        heads, rows = self.scratch_rows(total_q)
        return heads * rows // self.keys.tile_m

    @staticmethod
    def sum_blocks(rows: int, head_dim: int) -> int:
        """Blocks of the grid that adds the splits of `rows` rows of dK or of dV."""
        return ceil_div(rows * (head_dim // 8), _ROW_THREADS)

    def _common_defines(self) -> Defines:
        return common_defines(self.problem, self.width, self.value_width)

    @property
    def _prepare_lanes(self) -> int:
        """Lanes a row: one for eight elements, rounded up to a power of two."""
        return 1 << (max(self.width, self.value_width) // 8 - 1).bit_length()

    def _row_spec(self, entry: str, shared_bytes: int = 0) -> KernelSpec:
        defines = (
            *self._common_defines(),
            ("THREADS", _ROW_THREADS),
            ("LANES", self._prepare_lanes),
            ("QUERY_GRADIENT", self.sums_queries),
            ("TILE_M", self.keys.tile_m),
            *self._sum_defines,
            *((("VARLEN", True),) if self.problem.varlen else ()),
        )
        source = "attention/flash_attention_backward_rows.cu"
        return KernelSpec(source, entry, defines, _ROW_THREADS, shared_bytes)

    def prepare_spec(self) -> KernelSpec:
        """Row statistics, and zeroing the sum of dQ."""
        family = "attention_kl" if self.problem.distills else "flash_attention"
        return self._row_spec(f"{family}_backward_prepare")

    def finish_spec(self) -> KernelSpec:
        """dQ from its sum."""
        shared = self.keys.tile_m * self.width * ITEM_BYTES
        return self._row_spec("flash_attention_backward_finish", shared)

    def sum_spec(self) -> KernelSpec:
        """dK or dV from the sums of the splits."""
        return self._row_spec("flash_attention_backward_sum")

    def keys_spec(self) -> KernelSpec:
        """dK and dV; with sums_queries, the sum of dQ as well."""
        tiling = self.keys
        defines = (
            *self._common_defines(),
            ("CAUSAL", self.problem.causal),
            ("QUERY_GRADIENT", self.sums_queries),
            ("SPLIT", self.splits > 1),
            *tiling.defines,
            *feature_defines(self.problem),
        )
        entry = f"flash_attention_backward_{self.kernel_class}"
        shared = tiling.shared_bytes(self.width, self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def queries_spec(self) -> KernelSpec:
        """dQ in a fixed order."""
        tiling = self.queries
        defines = (
            *self._common_defines(),
            ("CAUSAL", self.problem.causal),
            *tiling.defines,
            *feature_defines(self.problem),
            *((("SCRATCH_TILE", self.keys.tile_m),) if self.problem.varlen else ()),
        )
        entry = f"flash_attention_backward_query_{self.kernel_class}"
        shared = tiling.shared_bytes(self.width, self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def sinks_spec(self) -> KernelSpec:
        """The gradient of the sinks."""
        return self._row_spec("flash_attention_backward_sinks")

    def specs(self) -> tuple[KernelSpec, ...]:
        """All variants that this configuration launches, in order."""
        last = self.finish_spec() if self.sums_queries else self.queries_spec()
        splits = (self.sum_spec(),) if self.splits > 1 else ()
        sinks = (self.sinks_spec(),) if self.problem.sinks else ()
        return self.prepare_spec(), self.keys_spec(), *splits, last, *sinks


_ROW_THREADS = 256


KERNEL_CLASSES: tuple[tuple[tuple[int, int], str], ...] = (((8, 0), "sm80"),)
"""Oldest compute capability of each kernel class, newest class first."""


def kernel_class(device: Device) -> str:
    """The newest class of kernels that runs on `device`."""
    for oldest, name in KERNEL_CLASSES:
        if device.compute_capability >= oldest:
            return name
    raise UnsupportedDeviceError(f"attention needs sm_80 or newer, {device.name} is {device.arch}")


def choose_section(heads: int, tiles: int, bytes_per_head: int, slots: int, device: Device) -> int:
    """How many heads' blocks of a causal call run together, longest first.

    Few heads leave long tiles for the very end, where they run alone: a section should fill the
    GPU's `slots` several times with its `tiles` a head. Many heads push each other's data
    (`bytes_per_head`) out of L2, unless enough blocks of each are at work to share what they read.
    Unequal sections end badly too, so one of equal size is preferred.
    """
    fits_l2 = device.l2_bytes // 2 // max(1, bytes_per_head)
    fills_gpu = ceil_div(_SECTION_WAVES * slots, max(1, tiles))
    least = max(1, fits_l2, min(fills_gpu, slots // _SHARING_BLOCKS))
    if least >= heads:
        return max(1, heads)
    for section in range(least, 2 * least):
        if heads % section == 0:
            return section
    return ceil_div(heads, heads // least)


def choose_splits(group: int, blocks: int, enough: int, teacher_group: int | None = None) -> int:
    """The fewest blocks a key head, dividing its group, that make `enough` of `blocks`.

    teacher_group: query heads that share a key head of a teacher, as those of a block then do.
    """
    for splits in range(1, group):
        shared = teacher_group is None or teacher_group % max(1, group // splits) == 0
        if group % splits == 0 and shared and blocks * splits >= enough:
            return splits
    return max(1, group)


def plan_flash_attention(problem: AttentionProblem, device: Device) -> FlashAttentionConfig:
    """The forward's configuration. Raises UnsupportedDeviceError where nothing fits."""
    width, value_width = problem.width, problem.value_width
    tilings = CROWDED_FORWARD_TILINGS if problem.crowded else FORWARD_TILINGS
    tiling = first_fit(tilings[max(width, value_width)], width, value_width, device)
    return FlashAttentionConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        tiling=tiling,
        section=query_section(problem, tiling, device),
    )


def plan_flash_attention_backward(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> FlashAttentionBackwardConfig:
    """The backward's configuration. Raises UnsupportedDeviceError where nothing fits."""
    widths = UNLIKE_KEY_WIDTHS if "value_dim" in problem.features else KEY_WIDTHS
    heads_of = problem.head_dim, problem.head_dim_v
    widest = width_for(max(heads_of), widths)
    # Warps that cut 256 columns in eight parts need 128 at least.
    width, value_width = (max(width_for(each, widths), widest // 2) for each in heads_of)
    keys = first_fit(KEY_TILINGS[widest], width, value_width, device)
    if problem.crowded:
        keys = keys.crowded(width)
    queries = first_fit(QUERY_TILINGS[widest], width, value_width, device)
    tiles = ceil_div(problem.seq_len_kv, keys.tile_n)
    heads = problem.batch * problem.num_heads_kv
    slots = device.num_sms * keys.blocks_per_sm
    splits = choose_splits(problem.group, heads * tiles, slots, problem.teacher_group)
    section = 1
    if problem.bounded:
        # What the blocks of a key head read again and again: Q, dO and the float32 sum of dQ.
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES + problem.head_dim * 4
        head_bytes = problem.group // splits * problem.seq_len_q * row_bytes
        section = choose_section(heads * splits, tiles, head_bytes, slots, device)
    return FlashAttentionBackwardConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        width=width,
        value_width=value_width,
        deterministic=deterministic,
        keys=keys,
        queries=queries,
        splits=splits,
        key_section=section,
        query_section=query_section(problem, queries, device),
    )


def query_section(
    problem: AttentionProblem, tiling: ForwardTiling | QueryTiling, device: Device
) -> int:
    """The section of a kernel whose blocks own queries: they read K and V again and again."""
    if not problem.bounded:
        return 1
    heads = problem.batch * problem.num_heads_q
    tiles = ceil_div(problem.seq_len_q, tiling.tile_m)
    row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES
    head_bytes = problem.seq_len_kv * row_bytes // problem.group
    slots = device.num_sms * tiling.blocks_per_sm
    return choose_section(heads, tiles, head_bytes, slots, device)


def representative_specs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """The variants for every width with and without a mask, one padded head, one float16, and every
    option in some company."""
    many = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)
    problems = [
        replace(many, head_dim=width, causal=causal)
        for width in (64, 96, 128, 256)
        for causal in (False, True)
    ]
    problems += [
        replace(many, head_dim=80),
        replace(many, dtype="float16"),
        replace(many, head_dim=192),
        replace(many, head_dim=192, value_dim=128),
        replace(many, window=(256, None), sinks=True, varlen=True),
        replace(
            many, head_dim=64, causal=False, window=(9, 9), mask=True, softcap=True, alibi=True
        ),
        replace(many, causal=False, bias="float32"),
    ]
    return [spec for problem in problems for spec in plan(problem)]
