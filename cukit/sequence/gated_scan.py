"""Gated linear recurrences: whole sequences on tensor cores, and one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    float64,
    int32,
    runs_kernel,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import sequence as reference
from cukit.reference.sequence import Scan
from cukit.registry import register

_STRUCTS = parameter_structs("sequence/parameters.cuh")
_THREADS = 128
_CHUNK = 64
_COLUMNS = 64
"""Of a head, a block of the scan."""
_STATE_TILES = (64, 128)
_LEAST_CHUNKS = 4
"""Of a segment: each costs a second reading of keys and values."""
_BLOCKS_PER_SM = 2
_JOIN_THREADS = 256
_STEP_THREADS = 256
_ACCESS = 8
"""Elements of a 16-byte copy."""


def gated_scan(
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    *,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
) -> Scan:
    """`h_t = exp(l_t) h_{t-1} + b_t x_t^T`, `y_t = h_t^T c_t`: linear attention with decay.

    The recurrence of Mamba-2 (x with the step size multiplied in, B and C), of retention and of
    gated linear attention with one decay a head (values x, keys b, queries c).

    Args:
        x: float16|bfloat16 [batch, seq_len, num_heads, head_dim]; float32 and float64 on the CPU
            only. On the GPU head_dim is a multiple of 8.
        b, c: as x, [batch, seq_len, num_groups, state_dim]; heads of a group share them. On the GPU
            state_dim is a multiple of 8, up to 128.
        log_decay: float32 [batch, seq_len, num_heads], l_t <= 0 (what is above counts as 0, what is
            below -104 as -104: a decay of 0 in float32).
        initial_state: float32 [num_sequences, num_heads, state_dim, head_dim]; None for zero.
        cu_seqlens: int32 [num_sequences + 1], where the sequences of a batch of one begin and end,
            from 0 to seq_len; never read on the host. None: a sequence a batch.

    Returns:
        `Scan(y, final_state)`: y like x; final_state float32, shaped like initial_state. The state
        of one call is the next one's initial state.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: a size that the kernel does not take.

    Long sequences are split over the GPU: the state behind each segment first, then all outputs.
    Runs on CuPy's current stream without synchronisation; accumulates in float32, and rounds the
    state to x's dtype where outputs are read from it. Deterministic. Papers: Dao and Gu,
    arXiv:2405.21060; Yang et al., arXiv:2312.06635.

    >>> import numpy as np, cukit as ck
    >>> ones = np.ones((1, 4, 1, 1), np.float32)
    >>> halved = ck.gated_scan(ones, ones, ones, np.log(0.5 * ones[..., 0]))
    >>> halved.y.ravel(), halved.final_state.item()
    (array([1.   , 1.5  , 1.75 , 1.875], dtype=float32), 1.875)
    """
    op = "gated_scan"
    arrays = adopt(op, x, b, c, log_decay, initial_state, cu_seqlens)
    x, b, c, log_decay, initial_state, cu_seqlens = arrays
    if not runs_kernel(op, *arrays):
        _check(*arrays)
        return reference.gated_scan(
            x, b, c, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    prepared = _prepare(*arrays)
    y = empty(x, x.shape)
    final = empty(x, prepared.state_shape, float32)
    if not final.size:
        return Scan(y, final)
    before = initial_state
    if prepared.states is not None and prepared.join is not None:
        sequences, heads, *state = prepared.state_shape
        before = empty(x, (sequences, prepared.segments, heads, *state), float32)
        decays = empty(x, (sequences, prepared.segments, heads), float32)
        prepared.states(x, b, NULL, log_decay, cu_seqlens, NULL, NULL, before, decays)
        prepared.join(initial_state, decays, before)
    prepared.outputs(x, b, c, log_decay, cu_seqlens, before, y, final, NULL)
    return Scan(y, final)


def gated_scan_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> Array:
    """One token of each sequence of :func:`gated_scan`: what decoding does.

    Args:
        state: float32 [batch, num_heads, state_dim, head_dim]; changed in place.
        x: float32|float16|bfloat16 [batch, num_heads, head_dim].
        b, c: like x, [batch, num_groups, state_dim].
        log_decay: float32 [batch, num_heads].

    Returns:
        y, shape and dtype of x.

    Raises:
        ArrayError: dtype, shape or layout of an argument.

    Runs on CuPy's current stream without synchronisation; computes in float32, deterministic.

    >>> import numpy as np, cukit as ck
    >>> state, ones = np.ones((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    >>> ck.gated_scan_step(state, ones, ones, ones, np.log(0.5 * ones[..., 0])).item()
    1.5
    """
    op = "gated_scan_step"
    arrays = adopt(op, state, x, b, c, log_decay)
    state, x, b, c, log_decay = arrays
    if not runs_kernel(op, *arrays):
        _check_step(*arrays)
        return reference.gated_scan_step(*arrays)
    launch = _prepare_step(*arrays)
    y = empty(x, x.shape)
    if y.size:
        launch(state, x, b, c, log_decay, y)
    return y


@dataclass(frozen=True)
class ScanConfig:
    """One way to run the kernels of a scan."""

    dtype: str
    state_tile: int
    padded: bool
    segments: int
    """Of each sequence."""

    def spec(self, states: bool) -> KernelSpec:
        """The kernel of the outputs, or that of the states behind segments."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("STATE_TILE", self.state_tile),
            ("STATES", states),
            ("PADDED", self.padded),
            ("THREADS", _THREADS),
        )
        keys = _CHUNK * self.state_tile * 2
        stage = keys * (1 if states else 2) + _CHUNK * _COLUMNS * 2
        shared = 2 * stage + (0 if states else self.state_tile * _COLUMNS * 2)
        return KernelSpec("sequence/gated_scan.cu", "gated_scan", defines, _THREADS, shared)


@cache
def plan_gated_scan(
    num_sequences: int,
    seq_len: int,
    num_heads: int,
    head_dim: int,
    state_dim: int,
    dtype: str,
    device: Device,
) -> ScanConfig:
    """A block for each head and each 64 of its columns; several for a long sequence, with a segment
    each, where heads alone would leave multiprocessors idle.

    seq_len: of the longest sequence that there may be.
    """
    tile = next(tile for tile in _STATE_TILES if state_dim <= tile)
    blocks = num_sequences * num_heads * -(-head_dim // _COLUMNS)
    chunks = -(-seq_len // _CHUNK)
    wanted = _BLOCKS_PER_SM * device.num_sms
    segments = 1
    if blocks and 2 * blocks <= wanted:
        segments = max(1, min(wanted // blocks, chunks // _LEAST_CHUNKS))
    padded = state_dim != tile or head_dim % _COLUMNS != 0
    return ScanConfig(dtype, tile, padded, segments)


class _Prepared(NamedTuple):
    outputs: Launch
    states: Launch | None
    join: Launch | None
    segments: int
    state_shape: tuple[int, ...]


@launch_plan
def _prepare(
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    initial_state: Array | None,
    cu_seqlens: Array | None,
) -> _Prepared:
    state_shape = _check(x, b, c, log_decay, initial_state, cu_seqlens)
    _check_kernel(x, b, c, log_decay, initial_state)
    _, seq_len, num_heads, head_dim = x.shape
    num_sequences, _, state_dim, _ = state_shape
    config = plan_gated_scan(
        num_sequences, seq_len, num_heads, head_dim, state_dim, x.dtype.name, current_device()
    )
    scalars = (
        _STRUCTS["ScanParameters"].pack(
            num_sequences=num_sequences,
            seq_len=seq_len,
            num_heads=num_heads,
            num_groups=b.shape[2],
            head_dim=head_dim,
            state_dim=state_dim,
            segments=config.segments,
        ),
    )
    heads = num_sequences * num_heads
    columns = -(-head_dim // _COLUMNS)
    grid = (config.segments, columns, heads)
    outputs = Launch(load_kernel(config.spec(states=False)), grid, scalars)
    if config.segments == 1:
        return _Prepared(outputs, None, None, 1, state_shape)
    grid = (config.segments - 1, columns, heads)
    states = Launch(load_kernel(config.spec(states=True)), grid, scalars)
    parts = -(-state_dim * head_dim // _JOIN_THREADS)
    join = Launch(load_kernel(_join_spec()), (parts, heads), scalars)
    return _Prepared(outputs, states, join, config.segments, state_shape)


@cache
def _join_spec() -> KernelSpec:
    defines = (("THREADS", _JOIN_THREADS),)
    return KernelSpec("sequence/join_segments.cu", "join_segments", defines, _JOIN_THREADS)


@launch_plan
def _prepare_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> Launch:
    _check_step(state, x, b, c, log_decay)
    op = "gated_scan_step"
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    for name, array in (("state", state), ("log_decay", log_decay)):
        check_array(op, name, array, dtypes=(float32,))
    batch, num_heads, state_dim, head_dim = state.shape
    spec = _step_spec(x.dtype.name, state_dim, access_width(head_dim, state))
    scalars = _STRUCTS["StepParameters"].pack(
        batch=batch,
        num_heads=num_heads,
        num_groups=b.shape[1],
        head_dim=head_dim,
        state_dim=state_dim,
    )
    if spec.shared_bytes > current_device().shared_bytes_per_block:
        raise ConfigError(f"{op}: state_dim is too large for the GPU, got {state_dim}")
    return Launch(load_kernel(spec), (batch * num_heads,), (scalars,))


def _step_spec(dtype: str, state_dim: int, vec: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("THREADS", _STEP_THREADS))
    shared = 4 * (2 * state_dim + _STEP_THREADS * vec)
    source = "sequence/gated_scan_step.cu"
    return KernelSpec(source, "gated_scan_step", defines, _STEP_THREADS, shared)


def _check(
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    initial_state: Array | None,
    cu_seqlens: Array | None,
) -> tuple[int, ...]:
    """Raises ArrayError; returns the shape of the states."""
    op = "gated_scan"
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=4)
    batch, seq_len, num_heads, head_dim = x.shape
    check_array(op, "b", b, dtypes=FLOAT_DTYPES, shape=(batch, seq_len, None, None))
    check_array(op, "c", c, dtypes=FLOAT_DTYPES, shape=b.shape)
    check_same_dtype(op, x=x, b=b, c=c)
    _check_groups(op, num_heads, b.shape[2])
    decays = (batch, seq_len, num_heads)
    check_array(op, "log_decay", log_decay, dtypes=(float32, float64), shape=decays)
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


def _check_groups(op: str, num_heads: int, num_groups: int) -> None:
    if num_groups < 1 or num_heads % num_groups:
        raise ArrayShapeError(
            f"{op}: b must have a number of groups that divides num_heads ({num_heads}), "
            f"got {num_groups}"
        )


def _check_kernel(
    x: Array, b: Array, c: Array, log_decay: Array, initial_state: Array | None
) -> None:
    op = "gated_scan"
    check_array(op, "x", x, dtypes=(float16, bfloat16))
    check_array(op, "log_decay", log_decay, dtypes=(float32,))
    if initial_state is not None:
        check_array(op, "initial_state", initial_state, dtypes=(float32,))
    head_dim, state_dim = x.shape[3], b.shape[3]
    if head_dim % _ACCESS:
        raise ConfigError(f"{op}: head_dim must be a multiple of 8 on the GPU, got {head_dim}")
    if state_dim % _ACCESS or not 0 < state_dim <= _STATE_TILES[-1]:
        raise ConfigError(
            f"{op}: state_dim must be a multiple of 8 and at most {_STATE_TILES[-1]} on the GPU, "
            f"got {state_dim}"
        )
    for name, array in (("x", x), ("b", b), ("c", c)):
        if access_width(_ACCESS, array) < _ACCESS:
            raise ArrayLayoutError(f"{op}: {name} must begin at a multiple of 16 bytes; copy it")


def _check_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> None:
    op = "gated_scan_step"
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=3)
    batch, num_heads, head_dim = x.shape
    check_array(op, "b", b, dtypes=FLOAT_DTYPES, shape=(batch, None, None))
    check_array(op, "c", c, dtypes=FLOAT_DTYPES, shape=b.shape)
    check_same_dtype(op, x=x, b=b, c=c)
    _check_groups(op, num_heads, b.shape[1])
    shape = (batch, num_heads, b.shape[2], head_dim)
    check_array(op, "state", state, dtypes=(float32, float64), shape=shape)
    check_array(op, "log_decay", log_decay, dtypes=(float32, float64), shape=(batch, num_heads))


def _specs(device: Device) -> list[KernelSpec]:
    configs = [
        plan_gated_scan(sequences, length, 32, head_dim, state_dim, dtype.name, device)
        for dtype in (float16, bfloat16)
        for sequences, length, head_dim, state_dim in (
            (1, 65536, 64, 64),
            (1, 65536, 64, 128),
            (2, 2048, 48, 72),
        )
    ]
    return [*(config.spec(states) for config in configs for states in (False, True)), _join_spec()]


def _step_specs(device: Device) -> list[KernelSpec]:
    return [
        _step_spec(dtype.name, 128, vec)
        for dtype, vec in zip(KERNEL_DTYPES, (4, 2, 1), strict=True)
    ]


register(
    name="gated_scan",
    family="sequence",
    function=gated_scan,
    reference=reference.gated_scan,
    specs=_specs,
)
register(
    name="gated_scan_step",
    family="sequence",
    function=gated_scan_step,
    reference=reference.gated_scan_step,
    specs=_step_specs,
)
