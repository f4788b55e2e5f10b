"""Gradients of gated linear recurrences."""

from __future__ import annotations

from typing import NamedTuple

from cukit.core.arrays import Array, adopt, check_array, empty, float32, float64, runs_kernel
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan
from cukit.errors import ConfigError
from cukit.reference import sequence as reference
from cukit.reference.sequence import ScanGradients
from cukit.registry import register
from cukit.sequence._plan import (
    CHUNK,
    CHUNK_STATES,
    COLUMNS,
    SEGMENT_STATES,
    THREADS,
    ChannelLaunch,
    HeadRange,
    ScanConfig,
    SegmentStates,
    check_kernel,
    check_scan,
    chunk_slots,
    join_spec,
    representative_configs,
    scan_launches,
    sum_launch,
    sum_spec,
)

_STATIC_BYTES = 3072
"""Upper bound of the static shared memory of the gradient kernels."""
WORKSPACE_BYTES = 7 << 28
"""Maximum workspace of a pass over a range of heads. A pass of this size takes milliseconds, so the
cost of its launches is negligible."""


def gated_scan_backward(
    grad_y: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    *,
    grad_final_state: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
) -> ScanGradients:
    """Gradients of :func:`gated_scan`, given those of its output and of its final state.

    Args:
        grad_y: dtype and shape of x.
        x, b, c, log_decay, initial_state, cu_seqlens: as in the forward.
        grad_final_state: float32 [num_sequences, num_heads, state_dim, head_dim]; None for zeros.

    Returns:
        `ScanGradients(x, b, c, log_decay, initial_state)`, each shaped like its argument, those of
        log_decay and of initial_state in float32. The gradient of log_decay is 0 where the forward
        clamps it, outside [-104, 0].

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: a size that the kernel does not support.

    Needs no intermediate results of the forward. Workspace: the state before each chunk of 64
    tokens is recomputed and stored in the dtype of x, which takes `state_dim / 64` times the bytes
    of x. If several heads share a group, or head_dim is above 64, partial gradients of b and c are
    also stored, per head and 64 columns of head_dim. If all heads then need more than 1.75 GiB,
    they are computed in several passes of at most that size (at least one head each); the gradients
    of b and c of a group that is split between passes are accumulated in float32. A decay per
    channel without shared groups always takes one pass. Runs on CuPy's current stream without
    synchronisation, accumulates in float32 and is deterministic. Papers: Dao and Gu,
    arXiv:2405.21060; Yang et al., arXiv:2312.06635.

    >>> import numpy as np, cukit as ck
    >>> ones = np.ones((1, 3, 1, 1), np.float32)
    >>> grads = ck.gated_scan_backward(ones, ones, ones, ones, np.log(0.5 * ones[..., 0]))
    >>> grads.x.ravel(), grads.log_decay.ravel()
    (array([1.75, 1.5 , 1.  ], dtype=float32), array([0.  , 0.75, 0.75], dtype=float32))
    """
    op = "gated_scan_backward"
    arrays = adopt(op, grad_y, x, b, c, log_decay, grad_final_state, initial_state, cu_seqlens)
    grad_y, x, b, c, log_decay, grad_final_state, initial_state, cu_seqlens = arrays
    if not runs_kernel(op, *arrays):
        _check(*arrays)
        return reference.gated_scan_backward(
            grad_y,
            x,
            b,
            c,
            log_decay,
            grad_final_state=grad_final_state,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )
    prepared = _prepare(*arrays)
    grad_x, grad_b, grad_c = (empty(array, array.shape) for array in (x, b, c))
    grad_decay = empty(x, log_decay.shape, float32)
    grad_initial = empty(x, prepared.state_shape, float32)
    grads = ScanGradients(grad_x, grad_b, grad_c, grad_decay, grad_initial)
    if grad_initial.size:
        kept = _Kept(NULL, NULL, grad_decay)
        if prepared.kept_shape is not None:
            kept = kept._replace(b=empty(x, prepared.kept_shape, float32))
            kept = kept._replace(c=empty(x, prepared.kept_shape, float32))
        if prepared.sum_decays is not None:
            kept = kept._replace(decay=empty(x, prepared.decays_shape, float32))
        for part in prepared.passes:
            part.run(arrays, grads, kept)
        if prepared.sum_decays is not None:
            prepared.sum_decays(kept.decay, NULL, NULL, grad_decay)
    return grads


class _Kept(NamedTuple):
    """Arrays that several passes write."""

    b: Array | object
    """Float sums of the gradients of b for one group, [tokens, state_dim]; NULL if not needed."""
    c: Array | object
    decay: Array
    """Gradients of log_decay; with several column tiles their parts, [tokens, num_heads, tiles]."""


class _Finish(NamedTuple):
    """The launch that computes the gradients of b, c and the decays per channel."""

    launch: Launch
    key_shape: tuple[int, ...]
    """[tokens, heads, column tiles, state_dim]"""
    chunk_shape: tuple[int, ...]
    """[slots, heads, column tiles]"""

    def allocate(self, x: Array, grad_b: Array, grad_c: Array) -> tuple[Array, ...]:
        """The arrays that the gradient kernel writes and this launch reads: gradients of decayed b
        and c (overwritten with the final ones if there is one column tile), inner products of
        states and their gradients (per channel), and gradients of the scores."""
        tiles, state_dim = self.key_shape[2:]
        if tiles > 1:
            grad_b, grad_c = (empty(x, self.key_shape) for _ in range(2))
        products = empty(x, (*self.chunk_shape, state_dim), float32)
        return grad_b, grad_c, products, empty(x, (*self.chunk_shape, CHUNK, CHUNK))


class _Pass(NamedTuple):
    """The launches for a range of heads."""

    gradients: Launch
    channels: ChannelLaunch | None
    finish: _Finish | None
    chunk_states: Launch
    states: SegmentStates | None
    grad_states: SegmentStates | None
    sum_keys: Launch | None
    first: bool
    """Whether the pass is the first of its groups."""
    last: bool
    chunk_shape: tuple[int, ...]
    parts_shape: tuple[int, ...]

    def run(self, arrays: tuple[Array | None, ...], grads: ScanGradients, kept: _Kept) -> None:
        """Writes the heads' gradients. The next pass may reuse the workspace: its first launch
        is not a dependent launch, so it starts after this pass has ended."""
        grad_y, x, b, c, log_decay, grad_final_state, initial_state, cu_seqlens = arrays
        raw = (b, c, log_decay)
        scores: Array | object = NULL
        if self.channels is not None:
            b, c, log_decay, scores = self.channels.run(b, c, log_decay, cu_seqlens)
        before, grad_after = initial_state, grad_final_state
        if self.states is not None and self.grad_states is not None:
            parts = self.states.start(x, b, log_decay, cu_seqlens)
            grad_parts = self.grad_states.start(grad_y, c, log_decay, cu_seqlens)
            before = self.states.finish(*parts, initial_state)
            grad_after = self.grad_states.finish(*grad_parts, grad_final_state)
        chunk_states = empty(x, self.chunk_shape)
        self.chunk_states(x, b, NULL, log_decay, NULL, cu_seqlens, before, chunk_states, NULL, NULL)
        parts_b, parts_c = grads.b, grads.c
        if self.sum_keys is not None:
            parts_b, parts_c = (empty(x, self.parts_shape) for _ in range(2))
        inputs = (grad_y, x, b, c, log_decay, cu_seqlens, chunk_states, scores, grad_after, grads.x)
        if self.finish is None:
            self.gradients(*inputs, parts_b, parts_c, kept.decay, NULL, grads.initial_state)
        else:
            shared = self.finish.allocate(x, parts_b, parts_c)
            self.gradients(*inputs, *shared, grads.initial_state)
            self.finish.launch(*raw, cu_seqlens, *shared, parts_b, parts_c, grads.log_decay)
        if self.sum_keys is not None:
            for partial, sums, out in ((parts_b, kept.b, grads.b), (parts_c, kept.c, grads.c)):
                before, after = NULL if self.first else sums, NULL if self.last else sums
                self.sum_keys(partial, before, after, out)


class _Prepared(NamedTuple):
    passes: tuple[_Pass, ...]
    sum_decays: Launch | None
    state_shape: tuple[int, ...]
    kept_shape: tuple[int, ...] | None
    decays_shape: tuple[int, ...]


@launch_plan
def _prepare(
    grad_y: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    grad_final_state: Array | None,
    initial_state: Array | None,
    cu_seqlens: Array | None,
) -> _Prepared:
    op = "gated_scan_backward"
    arrays = (grad_y, x, b, c, log_decay, grad_final_state, initial_state, cu_seqlens)
    state_shape = _check(*arrays)
    num_heads = x.shape[2]
    num_groups, state_dim = b.shape[2:]
    check_kernel(
        op,
        x,
        state_dim,
        grad_y=grad_y,
        b=b,
        c=c,
        log_decay=log_decay,
        grad_final_state=grad_final_state,
        initial_state=initial_state,
    )
    channels = log_decay.ndim == 4
    tokens, tiles = x.shape[0] * x.shape[1], -(-x.shape[3] // COLUMNS)
    head_bytes = workspace_per_head(tokens, state_shape, channels=channels)
    partial = num_heads > num_groups or (tiles > 1 and not channels)
    passes = plan_passes(num_heads, num_groups, head_bytes) if partial else ()
    passes = passes or (HeadRange(0, num_heads),)
    sum_decays = None
    if tiles > 1 and not channels:
        sum_decays = sum_launch("float32", tokens * num_heads, tiles, 1)
    return _Prepared(
        passes=tuple(_prepare_pass(x, num_groups, state_shape, channels, part) for part in passes),
        sum_decays=sum_decays,
        state_shape=state_shape,
        kept_shape=(tokens, state_dim) if len(passes) > num_groups else None,
        decays_shape=(tokens, num_heads, tiles),
    )


def _prepare_pass(
    x: Array, num_groups: int, state_shape: tuple[int, ...], channels: bool, part: HeadRange
) -> _Pass:
    device = current_device()
    launches = scan_launches(
        x, num_groups, state_shape, device, channels=channels, backward=True, heads=part
    )
    config = launches.config
    spec = _spec(config, device)
    state_dim = state_shape[2]
    if spec.shared_bytes + _STATIC_BYTES > device.shared_bytes_per_block:
        raise ConfigError(
            f"gated_scan_backward: state_dim is too large for the GPU, got {state_dim}"
        )
    tokens, tiles, slots = launches.tokens, launches.grid[1], launches.slots
    finish = None
    if channels:
        finish = _Finish(
            launches.channel_launch("gated_scan_channels_backward"),
            (tokens, part.heads, tiles, state_dim),
            (slots, part.heads, tiles),
        )
        tiles = 1  # the `finish` launch sums over column tiles
    per_group = max(1, x.shape[2] // num_groups)
    groups = max(1, part.heads // per_group)
    parts = part.heads // groups * tiles
    end = part.first + part.heads
    sum_keys = None
    if per_group * tiles > 1:
        sum_keys = sum_launch(
            x.dtype.name,
            tokens,
            parts,
            state_dim,
            num_groups=num_groups,
            first_group=part.first // per_group,
            groups=groups,
        )
    return _Pass(
        gradients=launches.launch(spec),
        channels=launches.channels(),
        finish=finish,
        chunk_states=launches.launch(config.spec(CHUNK_STATES), dependent=False),
        states=launches.segment_states(),
        grad_states=launches.segment_states(reverse=True),
        sum_keys=sum_keys,
        first=part.first % per_group == 0,
        last=end % per_group == 0,
        chunk_shape=(slots, part.heads, *state_shape[2:]),
        parts_shape=(tokens, part.heads, tiles, state_dim),
    )


def workspace_per_head(tokens: int, state_shape: tuple[int, ...], *, channels: bool) -> int:
    """Bytes of the workspace per head, with partial gradients of b and c. The few states at segment
    boundaries are not counted.

    state_shape: [num_sequences, num_heads, state_dim, head_dim].
    """
    num_sequences, _, state_dim, head_dim = state_shape
    slots, tiles = chunk_slots(tokens, num_sequences), -(-head_dim // COLUMNS)
    keys = 2 * tokens * state_dim * 2
    total = slots * state_dim * head_dim * 2 + tiles * keys
    if channels:
        of_chunks = slots * (CHUNK * CHUNK * 2 + state_dim * 4)
        total += (keys + of_chunks) + tiles * of_chunks + (keys if tiles > 1 else 0)
    return total


def plan_passes(num_heads: int, num_groups: int, head_bytes: int) -> tuple[HeadRange, ...]:
    """Ranges of heads whose workspace is at most WORKSPACE_BYTES (single heads if they need more):
    all heads, several whole groups, or heads of one group."""
    most = max(1, WORKSPACE_BYTES // max(1, head_bytes))
    per_group = max(1, num_heads // num_groups)
    if most >= per_group:
        step = per_group * _even(num_groups, most // per_group)
        starts = range(0, num_heads, step)
        return tuple(HeadRange(first, min(step, num_heads - first)) for first in starts)
    step = _even(per_group, most)
    return tuple(
        HeadRange(group * per_group + first, min(step, per_group - first))
        for group in range(num_groups)
        for first in range(0, per_group, step)
    )


def _even(count: int, most: int) -> int:
    """The largest part if `count` is split evenly into the fewest parts of at most `most`."""
    return -(-count // -(-count // most))


def _spec(config: ScanConfig, device: Device) -> KernelSpec:
    """The gradient kernel. The mma.sync version has two stages if two blocks of two stages
    fit on an SM."""
    entry, square = "gated_scan_backward", CHUNK * CHUNK * 2
    stage = 2 * config.key_bytes + 2 * CHUNK * COLUMNS * 2 + config.state_bytes
    if config.hopper:
        shared = stage + config.state_bytes + 2 * square + CHUNK * COLUMNS * 2
        source = "sequence/gated_scan_backward_sm90.cu"
        threads = 2 * THREADS
        return KernelSpec(source, entry, config.defines(threads), threads, shared)
    others = config.state_bytes + 2 * square
    most = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // 2 - 1024)
    stages = 2 if 2 * stage + others + _STATIC_BYTES <= most else 1
    defines = (*config.defines(), ("STAGES", stages))
    source = "sequence/gated_scan_backward_sm80.cu"
    return KernelSpec(source, entry, defines, THREADS, stages * stage + others)


def _check(
    grad_y: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    grad_final_state: Array | None,
    initial_state: Array | None,
    cu_seqlens: Array | None,
) -> tuple[int, ...]:
    """Checks the arguments; returns the shape of the states. Raises ArrayError."""
    op = "gated_scan_backward"
    shape = check_scan(op, x, b, c, log_decay, initial_state, cu_seqlens)
    check_array(op, "grad_y", grad_y, dtypes=(x.dtype,), shape=x.shape)
    if grad_final_state is not None:
        name, dtypes = "grad_final_state", (float32, float64)
        check_array(op, name, grad_final_state, dtypes=dtypes, shape=shape)
    return shape


def _specs(device: Device) -> list[KernelSpec]:
    configs = representative_configs(device)
    return [
        *(_spec(config, device) for config in configs),
        *(config.spec(CHUNK_STATES) for config in configs),
        *(
            config.channel_spec(entry)
            for entry in ("gated_scan_channels", "gated_scan_channels_backward")
            for config in configs
            if config.channels
        ),
        *(config.spec(SEGMENT_STATES, reverse) for config in configs for reverse in (False, True)),
        *(join_spec(reverse, channels) for reverse in (False, True) for channels in (False, True)),
        *(sum_spec(dtype) for dtype in ("float16", "bfloat16", "float32")),
    ]


register(
    name="gated_scan_backward",
    family="sequence",
    function=gated_scan_backward,
    reference=reference.gated_scan_backward,
    specs=_specs,
)
