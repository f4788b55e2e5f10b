"""Shared by the gated scan and its backward: argument checks, launch configurations, and the
kernels that compute states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    access_width,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    float64,
    int32,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import MAX_GRID_YZ, Device
from cukit.core.kernel import NULL, KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError

STRUCTS = parameter_structs("sequence/parameters.cuh")
THREADS = 128
CHUNK = 64
COLUMNS = 64
"""Columns of head_dim per block."""
STATE_TILES = (64, 128)
_MIN_CHUNKS = 4
"""Minimum chunks per segment: splitting costs a second pass over keys and values."""
_BLOCKS_PER_SM = 2
_JOIN_THREADS = 256
_SUM_THREADS = 256
_DECAY_PADDING = 8
_ACCESS = 8
"""16-bit elements of a 16-byte copy."""

OUTPUTS, SEGMENT_STATES, CHUNK_STATES = range(3)
"""Values of the kernel's STATES macro."""


@dataclass(frozen=True)
class ScanConfig:
    """The launch configuration of a scan's kernels."""

    dtype: str
    state_tile: int
    padded: bool
    segments: int
    """Segments per sequence."""
    hopper: bool = False
    """Use wgmma."""
    channels: bool = False
    """A decay per channel of the state, instead of one per head."""

    def defines(self, threads: int = THREADS) -> tuple[tuple[str, MacroValue], ...]:
        """The macros common to all kernels."""
        return (
            ("DTYPE", self.dtype),
            ("STATE_TILE", self.state_tile),
            ("PADDED", self.padded),
            ("CHANNELS", self.channels),
            ("THREADS", threads),
        )

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys, or of the queries, of a chunk."""
        return CHUNK * self.state_tile * 2

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in 16 bits."""
        return self.state_tile * COLUMNS * 2

    def spec(self, states: int, reverse: bool = False) -> KernelSpec:
        """The kernel that computes `states`: OUTPUTS, SEGMENT_STATES or CHUNK_STATES."""
        threads = 2 * THREADS if self.hopper and states == CHUNK_STATES else THREADS
        defines = (*self.defines(threads), ("STATES", states), ("REVERSE", reverse))
        values = CHUNK * COLUMNS * 2
        stage = self.key_bytes * (2 if states == OUTPUTS else 1) + values
        shared = 2 * stage + (0 if states == SEGMENT_STATES else self.state_bytes)
        if self.hopper:
            shared += values
        source = f"sequence/gated_scan_{'sm90' if self.hopper else 'sm80'}.cu"
        return KernelSpec(source, "gated_scan", defines, threads, shared)

    def channel_spec(self, entry: str = "gated_scan_channels") -> KernelSpec:
        """The kernel that applies the decays of channels to queries, keys and scores, or the one
        that computes their gradients."""
        shared = 2 * self.key_bytes + CHUNK * (self.state_tile + _DECAY_PADDING) * 4
        if entry != "gated_scan_channels":
            shared += CHUNK * CHUNK * 2
        return KernelSpec(f"sequence/{entry}.cu", entry, self.defines(), THREADS, shared)


@cache
def plan_gated_scan(
    num_sequences: int,
    seq_len: int,
    num_heads: int,
    head_dim: int,
    state_dim: int,
    dtype: str,
    device: Device,
    *,
    channels: bool = False,
    backward: bool = False,
) -> ScanConfig:
    """The launch configuration: one block per sequence, head and 64 columns of the head; if these
    do not fill the GPU, long sequences are split into segments with a block each.

    seq_len: upper bound of the sequence lengths. channels: see `ScanConfig`. backward: plan for the
    gradient kernels; fewer of their blocks fit on an SM.
    """
    tile = next(tile for tile in STATE_TILES if state_dim <= tile)
    blocks = num_sequences * num_heads * -(-head_dim // COLUMNS)
    chunks = -(-seq_len // CHUNK)
    hopper = device.compute_capability[0] == 9
    per_sm = 3 if hopper and tile == STATE_TILES[0] and not backward else _BLOCKS_PER_SM
    wanted = per_sm * device.num_sms
    segments = 1
    if blocks and 2 * blocks <= wanted:
        segments = max(1, min(wanted // blocks, chunks // _MIN_CHUNKS))
    padded = state_dim != tile or head_dim % COLUMNS != 0
    return ScanConfig(dtype, tile, padded, segments, hopper, channels)


class ChannelInputs(NamedTuple):
    """With a decay per channel: the arrays that replace b, c and log_decay, and the scores.

    s_i is the sum of a chunk's log decays up to token i; see :func:`chunk_slots` for slots.
    """

    b: Array
    """exp(s_last - s_j) b_j, [tokens, heads, state_dim]"""
    c: Array
    """exp(s_i) c_i, as b"""
    decay: Array
    """s_last * log2(e), float32 [slots, heads, state_dim]"""
    scores: Array
    """sum over channels of exp(s_i - s_j) c_i b_j for j <= i, [slots, heads, CHUNK, CHUNK]"""


class ChannelLaunch(NamedTuple):
    """The launch that applies the decays of channels."""

    launch: Launch
    key_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """[slots, heads, state_dim]"""

    def run(self, b: Array, c: Array, log_decay: Array, cu_seqlens: Array | None) -> ChannelInputs:
        """Decayed queries, keys and scores, and the chunks' decays."""
        keys, queries = (empty(b, self.key_shape) for _ in range(2))
        decay = empty(b, self.chunk_shape, float32)
        scores = empty(b, (*self.chunk_shape[:2], CHUNK, CHUNK))
        self.launch(b, c, log_decay, cu_seqlens, keys, queries, decay, scores)
        return ChannelInputs(keys, queries, decay, scores)


class SegmentStates(NamedTuple):
    """Launches that compute the states at segment boundaries, or their gradients."""

    states: Launch
    join: Launch
    shape: tuple[int, ...]
    """[num_sequences, segments, heads, state_dim, head_dim]"""
    channels: bool = False

    def start(
        self, x: Array, b: Array, log_decay: Array, cu_seqlens: Array | None
    ) -> tuple[Array, Array]:
        """The final states of all segments but the last, for initial states of 0, and the sums of
        the segments' decays; float32.

        Reversed launches compute the gradients of the initial states of all segments but the first;
        pass grad_y for x and c for b. With a decay per channel, b (or c) and log_decay are those of
        `ChannelInputs`.
        """
        states = empty(x, self.shape, float32)
        decays = empty(x, self.shape[: 4 if self.channels else 3], float32)
        self.states(x, b, NULL, log_decay, NULL, cu_seqlens, NULL, NULL, states, decays)
        return states, decays

    def finish(self, states: Array, decays: Array, outer: Array | None) -> Array:
        """Overwrites and returns `states`: the initial states of all segments, given that of the
        first (`outer`), or, reversed, the gradients of all final states, given that of the last."""
        self.join(outer, decays, states)
        return states


class HeadRange(NamedTuple):
    """The heads that launches compute."""

    first: int
    heads: int


class ScanLaunches(NamedTuple):
    """The parts common to all launches of a scan over a range of heads."""

    config: ScanConfig
    scalars: tuple[object, ...]
    grid: tuple[int, int, int]
    state_shape: tuple[int, ...]
    """[num_sequences, heads, state_dim, head_dim]"""
    tokens: int
    channel_scalars: tuple[object, ...]

    def launch(self, spec: KernelSpec, *, dependent: bool = True) -> Launch:
        """A launch over all segments.

        dependent: make it a programmatic dependent launch if it follows launches of the segments'
            states. Its blocks are placed as SMs become free, so no more of them may fit on an SM
            than the plan assumes.
        """
        dependent = dependent and self.config.segments > 1
        return Launch(load_kernel(spec), self.grid, self.scalars, dependent=dependent)

    @property
    def slots(self) -> int:
        """See :func:`chunk_slots`."""
        return chunk_slots(self.tokens, self.state_shape[0])

    def channel_launch(self, entry: str) -> Launch:
        """A launch over all chunks and heads."""
        spec = self.config.channel_spec(entry)
        return Launch(load_kernel(spec), (self.slots, self.state_shape[1]), self.channel_scalars)

    def channels(self) -> ChannelLaunch | None:
        """The launch that applies the decays of channels; None with a decay per head."""
        if not self.config.channels:
            return None
        _, heads, state_dim, _ = self.state_shape
        return ChannelLaunch(
            self.channel_launch("gated_scan_channels"),
            (self.tokens, heads, state_dim),
            (self.slots, heads, state_dim),
        )

    def segment_states(self, reverse: bool = False) -> SegmentStates | None:
        """The launches for the segments' states; None if sequences are not split.

        All are dependent launches except the first of an op (not `reverse`), which starts only when
        all arguments of the op have been written: later kernels read the arguments before they call
        `wait_for_previous_grids()`.
        """
        segments, columns, all_heads = self.grid
        if segments == 1:
            return None
        spec = self.config.spec(SEGMENT_STATES, reverse)
        grid = (segments - 1, columns, all_heads)
        states = Launch(load_kernel(spec), grid, self.scalars, dependent=reverse)
        sequences, heads, state_dim, head_dim = self.state_shape
        parts = -(-state_dim * head_dim // _JOIN_THREADS)
        channels = self.config.channels
        join_kernel = load_kernel(join_spec(reverse, channels))
        join = Launch(join_kernel, (parts, all_heads), self.scalars, dependent=True)
        shape = (sequences, segments, heads, state_dim, head_dim)
        return SegmentStates(states, join, shape, channels)


def scan_launches(
    x: Array,
    num_groups: int,
    state_shape: tuple[int, ...],
    device: Device,
    *,
    channels: bool,
    backward: bool = False,
    heads: HeadRange | None = None,
) -> ScanLaunches:
    """Plans a scan over checked arrays. heads: None for all. Raises ConfigError."""
    batch, seq_len, num_heads, head_dim = x.shape
    num_sequences, _, state_dim, _ = state_shape
    if heads is None:
        heads = HeadRange(0, num_heads)
    if num_sequences * heads.heads > MAX_GRID_YZ:
        raise ConfigError(
            f"gated_scan: num_sequences * num_heads must be at most {MAX_GRID_YZ} on the GPU, got "
            f"{num_sequences} * {heads.heads}"
        )
    sizes = (num_sequences, seq_len, heads.heads, head_dim, state_dim)
    config = plan_gated_scan(*sizes, x.dtype.name, device, channels=channels, backward=backward)
    # With a decay per channel, the decayed keys have one group per head.
    scalars, channel_scalars = (
        STRUCTS["ScanParameters"].pack(
            num_sequences=num_sequences,
            seq_len=seq_len,
            num_heads=num_heads,
            num_groups=groups,
            head_dim=head_dim,
            state_dim=state_dim,
            segments=config.segments,
            first_head=heads.first,
            heads=heads.heads,
        )
        for groups in (heads.heads if channels else num_groups, num_groups)
    )
    grid = (config.segments, -(-head_dim // COLUMNS), num_sequences * heads.heads)
    shape = (num_sequences, heads.heads, state_dim, head_dim)
    return ScanLaunches(config, (scalars,), grid, shape, batch * seq_len, (channel_scalars,))


def chunk_slots(tokens: int, num_sequences: int) -> int:
    """Chunks for which there is memory: the last one of each sequence may be partial."""
    return tokens // CHUNK + num_sequences


@cache
def join_spec(reverse: bool, channels: bool = False) -> KernelSpec:
    """The kernel that combines the segments' contributions to their initial states."""
    defines = (("REVERSE", reverse), ("CHANNELS", channels), ("THREADS", _JOIN_THREADS))
    return KernelSpec("sequence/join_segments.cu", "join_segments", defines, _JOIN_THREADS)


@cache
def sum_spec(dtype: str) -> KernelSpec:
    """The kernel that sums partial results."""
    defines = (("DTYPE", dtype), ("THREADS", _SUM_THREADS))
    return KernelSpec("sequence/sum_parts.cu", "sum_parts", defines, _SUM_THREADS)


def sum_launch(
    dtype: str,
    tokens: int,
    parts: int,
    cols: int,
    *,
    num_groups: int = 1,
    first_group: int = 0,
    groups: int = 1,
) -> Launch:
    """A launch that sums parts [tokens, groups, parts, cols] over axis 2 and writes the sums to an
    array [tokens, num_groups, cols], from group `first_group` on."""
    scalars = STRUCTS["SumParameters"].pack(
        tokens=tokens, num_groups=num_groups, first_group=first_group, parts=parts, cols=cols
    )
    grid = (-(-tokens * cols // _SUM_THREADS), groups)
    return Launch(load_kernel(sum_spec(dtype)), grid, (scalars,))


def check_scan(
    op: str,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    initial_state: Array | None,
    cu_seqlens: Array | None,
) -> tuple[int, ...]:
    """Checks the arguments; returns the shape of the states. Raises ArrayError."""
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=4)
    batch, seq_len, num_heads, head_dim = x.shape
    check_array(op, "b", b, dtypes=FLOAT_DTYPES, shape=(batch, seq_len, None, None))
    check_array(op, "c", c, dtypes=FLOAT_DTYPES, shape=b.shape)
    check_same_dtype(op, x=x, b=b, c=c)
    check_groups(op, num_heads, b.shape[2])
    check_decays(op, log_decay, (batch, seq_len, num_heads), b.shape[3])
    num_sequences = batch
    if cu_seqlens is not None:
        check_array(op, "cu_seqlens", cu_seqlens, dtypes=(int32,), ndim=1)
        if batch != 1:
            raise ArrayShapeError(f"{op}: with cu_seqlens x must have a batch of 1, got {batch}")
        num_sequences = len(cu_seqlens) - 1
        if num_sequences < 0:
            raise ArrayShapeError(f"{op}: cu_seqlens must have at least one element, got none")
    shape = (num_sequences, num_heads, b.shape[3], head_dim)
    if initial_state is not None:
        check_array(op, "initial_state", initial_state, dtypes=(float32, float64), shape=shape)
    return shape


def check_decays(op: str, log_decay: Array, shape: tuple[int, ...], state_dim: int) -> None:
    """Raises ArrayError unless the decays are one per head, or one per head and channel."""
    check_array(op, "log_decay", log_decay, dtypes=(float32, float64))
    if log_decay.ndim not in (len(shape), len(shape) + 1):
        raise ArrayShapeError(
            f"{op}: log_decay must have {len(shape)} axes (a decay per head) or {len(shape) + 1} "
            f"(a decay per channel of the state), got shape {log_decay.shape}"
        )
    whole = shape if log_decay.ndim == len(shape) else (*shape, state_dim)
    check_array(op, "log_decay", log_decay, shape=whole)


def check_groups(op: str, num_heads: int, num_groups: int) -> None:
    """Raises ArrayShapeError unless num_groups divides num_heads."""
    if num_groups < 1 or num_heads % num_groups:
        raise ArrayShapeError(
            f"{op}: the number of groups of b must divide num_heads ({num_heads}), got {num_groups}"
        )


def check_kernel(op: str, x: Array, state_dim: int, **arrays: Array | None) -> None:
    """Checks the kernels' requirements: dtypes, sizes, alignment.

    arrays: each must be float32, or have the dtype of x and be 16-byte aligned. A log_decay per
    channel must be float32 and 16-byte aligned.
    """
    check_array(op, "x", x, dtypes=(float16, bfloat16))
    for name, array in arrays.items():
        if array is not None and array.dtype != x.dtype:
            check_array(op, name, array, dtypes=(float32,))
    head_dim = x.shape[3]
    if head_dim % _ACCESS:
        raise ConfigError(f"{op}: head_dim must be a multiple of 8 on the GPU, got {head_dim}")
    if state_dim % _ACCESS or not 0 < state_dim <= STATE_TILES[-1]:
        raise ConfigError(
            f"{op}: state_dim must be a multiple of 8 and at most {STATE_TILES[-1]} on the GPU, "
            f"got {state_dim}"
        )
    for name, array in (("x", x), *arrays.items()):
        wide = name == "log_decay" and array is not None and array.ndim == 4
        if array is None or (array.dtype != x.dtype and not wide):
            continue
        if access_width(_ACCESS, array) < (4 if wide else _ACCESS):
            raise ArrayLayoutError(f"{op}: {name} must be 16-byte aligned; copy it")


REPRESENTATIVE = ((1, 65536, 64, 64), (1, 65536, 64, 128), (2, 2048, 48, 72))
"""[sequences, tokens, head_dim, state_dim] for which kernels are compiled ahead of time."""


def representative_configs(device: Device) -> list[ScanConfig]:
    """The configurations for `REPRESENTATIVE`, in both dtypes, with both kinds of decay."""
    return [
        plan_gated_scan(
            sequences, length, 32, head_dim, state_dim, dtype.name, device, channels=channels
        )
        for channels in (False, True)
        for dtype in (float16, bfloat16)
        for sequences, length, head_dim, state_dim in REPRESENTATIVE
    ]
