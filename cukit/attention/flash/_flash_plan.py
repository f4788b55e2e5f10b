"""Plans of attention: the kernel variant for a problem and a device.

A kernel class is a set of kernels written for one generation of tensor cores. Class `"sm80"`
(mma.sync, cp.async), planned here, runs on Ampere and newer; :mod:`_flash_plan_sm90` plans class
`"sm90"` (wgmma, TMA) for Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cukit.attention.flash._flash_tilings import (
    FORWARD_TILINGS,
    ITEM_BYTES,
    KEY_TILINGS,
    KEY_WIDTHS,
    QUERY_TILINGS,
    REGISTER_LIMITED_FORWARD_TILINGS,
    UNEQUAL_KEY_WIDTHS,
    ForwardTiling,
    KeyTiling,
    QueryTiling,
    WarpgroupKeyTiling,
    WarpgroupQueryTiling,
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
from cukit.errors import UnsupportedDeviceError

if TYPE_CHECKING:
    from typing_extensions import Self

_GROUP_WAVES = 4  # target waves of blocks per rasterisation group
_SHARING_BLOCKS = 16  # concurrent blocks of a head that read its data from L2 together
_ROW_THREADS = 256


@dataclass(frozen=True)
class FlashAttentionConfig:
    """The configuration of a forward call."""

    kernel_class: str
    problem: AttentionProblem
    tiling: ForwardTiling
    raster_group: int
    """Heads in a rasterisation group (kernels_cu/attention/block_order.cuh)."""

    def num_blocks(self, seq_len_q: int) -> int:
        """The grid size."""
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
    """The configuration of a backward call: the kernels prepare, keys, then finish or queries."""

    kernel_class: str
    problem: AttentionProblem
    width: int
    """Tile width of q and k."""
    value_width: int
    """Tile width of v and out."""
    deterministic: bool
    keys: KeyTiling | WarpgroupKeyTiling
    queries: QueryTiling | WarpgroupQueryTiling
    splits: int
    """Blocks that share a KV head, each with group / splits query heads."""
    key_raster_group: int
    query_raster_group: int

    def at_lengths(self, seq_len_q: int, seq_len_kv: int) -> Self:
        """A copy for other lengths that round to the same values (AttentionProblem.at_lengths)."""
        config = object.__new__(type(self))
        config.__dict__.update(self.__dict__)
        config.__dict__["problem"] = self.problem.at_lengths(seq_len_q, seq_len_kv)
        return config

    @property
    def accumulates_grad_q(self) -> bool:
        """Whether the dK/dV kernel accumulates dQ in float32 scratch; otherwise a separate kernel
        computes dQ, in a fixed order."""
        return not self.deterministic

    def scratch_rows(self, total_q: int) -> tuple[int, int]:
        """Heads of the scratch arrays, and rows per head, rounded up to whole tiles.

        total_q: rows of q for packed sequences; each sequence starts at a new tile
        (kernels_cu/attention/scratch_rows.cuh).
        """
        problem, tile = self.problem, self.keys.tile_m
        heads = problem.num_heads_q * (1 if problem.varlen else problem.batch)
        rows = total_q + problem.batch * tile if problem.varlen else problem.seq_len_q
        return heads, ceil_div(rows, tile) * tile

    @property
    def counted(self) -> bool:
        """Whether counters track the progress of each dQ tile; otherwise dQ is zeroed first."""
        return False

    @property
    def _accumulator_defines(self) -> Defines:
        """Macros of prepare and finish for the layout of the dQ accumulators."""
        return ()

    def counters(self, total_q: int) -> int:
        """Number of counters: one per dQ tile, and one for the call."""
        heads, rows = self.scratch_rows(total_q)
        return 1 + heads * rows // self.keys.tile_m if self.counted else 0

    def prepare_blocks(self, total_q: int) -> int:
        """Grid size of prepare."""
        heads, rows = self.scratch_rows(total_q)
        return ceil_div(heads * rows * self._prepare_lanes, _ROW_THREADS)

    @property
    def key_blocks(self) -> int:
        """Grid size of the dK/dV kernel."""
        problem = self.problem
        tiles = ceil_div(problem.seq_len_kv, self.keys.tile_n)
        return problem.batch * problem.num_heads_kv * self.splits * tiles

    @property
    def query_blocks(self) -> int:
        """Grid size of the separate dQ kernel."""
        problem = self.problem
        tiles = ceil_div(problem.seq_len_q, self.queries.tile_m)
        return problem.batch * problem.num_heads_q * tiles

    def finish_blocks(self, total_q: int) -> int:
        """Grid size of finish, which converts the accumulated dQ."""
        heads, rows = self.scratch_rows(total_q)
        return heads * rows // self.keys.tile_m

    @staticmethod
    def sum_blocks(rows: int, head_dim: int) -> int:
        """Grid size of the kernel that reduces the splits of `rows` rows of dK or dV."""
        return ceil_div(rows * (head_dim // 8), _ROW_THREADS)

    def _common_defines(self) -> Defines:
        return common_defines(self.problem, self.width, self.value_width)

    @property
    def _prepare_lanes(self) -> int:
        """Lanes per row: one for eight elements, rounded up to a power of two."""
        return 1 << (max(self.width, self.value_width) // 8 - 1).bit_length()

    def _row_spec(self, entry: str, shared_bytes: int = 0) -> KernelSpec:
        defines = (
            *self._common_defines(),
            ("THREADS", _ROW_THREADS),
            ("LANES", self._prepare_lanes),
            ("QUERY_GRADIENT", self.accumulates_grad_q),
            ("TILE_M", self.keys.tile_m),
            *self._accumulator_defines,
            *((("VARLEN", True),) if self.problem.varlen else ()),
        )
        source = "attention/flash_attention_backward_rows.cu"
        return KernelSpec(source, entry, defines, _ROW_THREADS, shared_bytes)

    def prepare_spec(self) -> KernelSpec:
        """The kernel that computes row statistics and zeroes the dQ accumulators or counters."""
        family = "attention_kl" if self.problem.distills else "flash_attention"
        return self._row_spec(f"{family}_backward_prepare")

    @property
    def rotates(self) -> bool:
        """Whether the kernels can apply the inverse rotary embedding to dQ and dK."""
        return False

    def finish_spec(self, rope: bool = False) -> KernelSpec:
        """The kernel that converts the float32 dQ accumulators to dQ. rope: it also applies the
        inverse rotary embedding."""
        shared = self.keys.tile_m * self.width * ITEM_BYTES
        return _rotating(self._row_spec("flash_attention_backward_finish", shared), rope)

    def sum_spec(self) -> KernelSpec:
        """The kernel that reduces the splits of dK or dV."""
        return self._row_spec("flash_attention_backward_sum")

    def keys_spec(self, rope: bool = False) -> KernelSpec:
        """The kernel that computes dK and dV; with accumulates_grad_q it also accumulates dQ. rope:
        it also applies the inverse rotary embedding to dK."""
        tiling = self.keys
        defines = (
            *self._common_defines(),
            ("CAUSAL", self.problem.causal),
            ("QUERY_GRADIENT", self.accumulates_grad_q),
            ("SPLIT", self.splits > 1),
            *tiling.defines,
            *feature_defines(self.problem),
        )
        entry = f"flash_attention_backward_{self.kernel_class}"
        shared = tiling.shared_bytes(self.width, self.value_width)
        spec = KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)
        return _rotating(spec, rope)

    def queries_spec(self) -> KernelSpec:
        """The kernel that computes dQ in a fixed order."""
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
        """The kernel that computes the gradient of the sinks."""
        return self._row_spec("flash_attention_backward_sinks")

    def specs(self) -> tuple[KernelSpec, ...]:
        """All kernel variants of this configuration, in launch order, those with rope last."""
        last = self.finish_spec() if self.accumulates_grad_q else self.queries_spec()
        splits = (self.sum_spec(),) if self.splits > 1 else ()
        sinks = (self.sinks_spec(),) if self.problem.sinks else ()
        rotating = (self.keys_spec(True), self.finish_spec(True)) if self.rotates else ()
        return self.prepare_spec(), self.keys_spec(), *splits, last, *sinks, *rotating


def _rotating(spec: KernelSpec, rope: bool) -> KernelSpec:
    return replace(spec, defines=(*spec.defines, ("ROPE", True))) if rope else spec


KERNEL_CLASSES: tuple[tuple[tuple[int, int], str], ...] = (((8, 0), "sm80"),)
"""Minimum compute capability of each kernel class, newest class first."""


def kernel_class(device: Device) -> str:
    """The newest kernel class that runs on `device`."""
    for minimum, name in KERNEL_CLASSES:
        if device.compute_capability >= minimum:
            return name
    raise UnsupportedDeviceError(f"attention needs sm_80 or newer, {device.name} is {device.arch}")


def choose_raster_group(
    heads: int, tiles: int, bytes_per_head: int, resident_blocks: int, device: Device
) -> int:
    """The number of heads in a rasterisation group of a causal call.

    The blocks of a group run together, longest tiles first. With few heads per group, the long
    tiles of the last group run alone at the end: a group, with `tiles` per head, should make
    several waves of `resident_blocks`. With many heads, their data (`bytes_per_head` each) must fit
    in L2, unless enough blocks of a head run concurrently to share its reads. Groups of equal size
    are preferred, because a small last group leaves SMs idle.
    """
    fits_l2 = device.l2_bytes // 2 // max(1, bytes_per_head)
    fills_gpu = ceil_div(_GROUP_WAVES * resident_blocks, max(1, tiles))
    least = max(1, fits_l2, min(fills_gpu, resident_blocks // _SHARING_BLOCKS))
    if least >= heads:
        return max(1, heads)
    for size in range(least, 2 * least):
        if heads % size == 0:
            return size
    return ceil_div(heads, heads // least)


def choose_splits(group: int, blocks: int, enough: int, teacher_group: int | None = None) -> int:
    """The smallest number of blocks per KV head with which `blocks * splits` reaches `enough`.

    The result divides `group`, the query heads per KV head. teacher_group: query heads per KV head
    of a teacher; the query heads of a block then share one KV head of the teacher too.
    """
    for splits in range(1, group):
        shared = teacher_group is None or teacher_group % max(1, group // splits) == 0
        if group % splits == 0 and shared and blocks * splits >= enough:
            return splits
    return max(1, group)


def plan_flash_attention(problem: AttentionProblem, device: Device) -> FlashAttentionConfig:
    """The forward's configuration. Raises UnsupportedDeviceError if no tiling fits the device."""
    width, value_width = problem.width, problem.value_width
    tilings = REGISTER_LIMITED_FORWARD_TILINGS if problem.register_limited else FORWARD_TILINGS
    tiling = first_fit(tilings[max(width, value_width)], width, value_width, device)
    return FlashAttentionConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        tiling=tiling,
        raster_group=query_raster_group(problem, tiling, device),
    )


def plan_flash_attention_backward(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> FlashAttentionBackwardConfig:
    """The backward's configuration. Raises UnsupportedDeviceError if no tiling fits the device."""
    widths = UNEQUAL_KEY_WIDTHS if "value_dim" in problem.features else KEY_WIDTHS
    head_dims = problem.head_dim, problem.head_dim_v
    widest = width_for(max(head_dims), widths)
    # The warp layout of width 256 needs tiles of at least 128 columns.
    width, value_width = (max(width_for(each, widths), widest // 2) for each in head_dims)
    keys = first_fit(KEY_TILINGS[widest], width, value_width, device)
    if problem.register_limited:
        keys = keys.register_limited(width)
    queries = first_fit(QUERY_TILINGS[widest], width, value_width, device)
    tiles = ceil_div(problem.seq_len_kv, keys.tile_n)
    heads = problem.batch * problem.num_heads_kv
    resident = device.num_sms * keys.blocks_per_sm
    splits = choose_splits(problem.group, heads * tiles, resident, problem.teacher_group)
    raster_group = 1
    if problem.bounded:
        # Every block of a KV head accesses Q, dO and the float32 dQ accumulators.
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES + problem.head_dim * 4
        head_bytes = problem.group // splits * problem.seq_len_q * row_bytes
        raster_group = choose_raster_group(heads * splits, tiles, head_bytes, resident, device)
    return FlashAttentionBackwardConfig(
        kernel_class=kernel_class(device),
        problem=problem,
        width=width,
        value_width=value_width,
        deterministic=deterministic,
        keys=keys,
        queries=queries,
        splits=splits,
        key_raster_group=raster_group,
        query_raster_group=query_raster_group(problem, queries, device),
    )


def query_raster_group(
    problem: AttentionProblem, tiling: ForwardTiling | QueryTiling, device: Device
) -> int:
    """The rasterisation group of a kernel whose blocks own queries and stream K and V."""
    if not problem.bounded:
        return 1
    heads = problem.batch * problem.num_heads_q
    tiles = ceil_div(problem.seq_len_q, tiling.tile_m)
    row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES
    head_bytes = problem.seq_len_kv * row_bytes // problem.group
    resident = device.num_sms * tiling.blocks_per_sm
    return choose_raster_group(heads, tiles, head_bytes, resident, device)


def representative_specs(
    plan: Callable[[AttentionProblem], Sequence[KernelSpec]],
) -> list[KernelSpec]:
    """A representative set of variants: every width with a causal mask and, except 192, without; a
    padded head, float16, unequal head_dims, and each option in some combination."""
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
