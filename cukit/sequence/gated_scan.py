"""Gated linear recurrences: full sequences on tensor cores, and single decode steps."""

from __future__ import annotations

from typing import NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.errors import ConfigError
from cukit.reference import sequence as reference
from cukit.reference.sequence import Scan
from cukit.registry import register
from cukit.sequence._plan import (
    OUTPUTS,
    SEGMENT_STATES,
    STRUCTS,
    ChannelLaunch,
    SegmentStates,
    check_decays,
    check_groups,
    check_kernel,
    check_scan,
    join_spec,
    representative_configs,
    scan_launches,
)

_STEP_THREADS = 128, 512
"""Minimum and maximum threads per state of a step."""
_STEP_VECTORS = 4
"""kBatch in gated_scan_step.cu: vectors of a state that a thread loads before it uses the first.
The block gets more threads while a thread has more vectors than this."""


def gated_scan(
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    *,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
) -> Scan:
    """Linear attention with decay: `h_t = exp(l_t) h_{t-1} + b_t x_t^T`, `y_t = h_t^T c_t`.

    l_t is one number per head, or one per head and channel of the state (a row of h). Models with a
    decay per head: Mamba-2 (x is the input times the step size; b and c are B and C), retention and
    simple gated linear attention (x, b and c are the values, keys and queries). With a decay per
    channel: gated linear attention.

    Args:
        x: float16|bfloat16 [batch, seq_len, num_heads, head_dim]; float32 and float64 on the CPU
            only. On the GPU head_dim must be a multiple of 8, and num_sequences * num_heads at
            most 65535.
        b, c: dtype of x, [batch, seq_len, num_groups, state_dim]; num_groups divides num_heads, and
            the heads of a group share b and c. On the GPU state_dim must be a multiple of 8, at
            most 128.
        log_decay: float32 [batch, seq_len, num_heads] or [batch, seq_len, num_heads, state_dim],
            l_t; clamped to [-104, 0] (exp(-104) is 0 in float32).
        initial_state: float32 [num_sequences, num_heads, state_dim, head_dim]; None for zeros.
        cu_seqlens: int32 [num_sequences + 1], the boundaries of variable-length sequences packed
            into a batch of one, from 0 to seq_len; never read on the host. None: one sequence per
            batch entry.

    Returns:
        `Scan(y, final_state)`: y like x; final_state float32, shaped like initial_state. Pass it as
        the initial state of the next call to continue the sequences.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: a size that the kernel does not support.

    If there are too few sequences and heads to fill the GPU, long sequences are split into
    segments: one pass computes the segments' states, a second one all outputs. With a decay per
    channel, a first launch writes decayed b and c per head, and the decayed scores of all chunks of
    64 tokens, in the dtype of x. Runs on CuPy's current stream without synchronisation; accumulates
    in float32, and rounds the state to the dtype of x for the products that read it. Deterministic.
    Papers: Dao and Gu, arXiv:2405.21060; Yang et al., arXiv:2312.06635.

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
        check_scan(op, *arrays)
        return reference.gated_scan(
            x, b, c, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    prepared = _prepare(*arrays)
    y = empty(x, x.shape)
    final = empty(x, prepared.state_shape, float32)
    if not final.size:
        return Scan(y, final)
    scores: Array | object = NULL
    if prepared.channels is not None:
        b, c, log_decay, scores = prepared.channels.run(b, c, log_decay, cu_seqlens)
    before = initial_state
    if prepared.segments is not None:
        parts = prepared.segments.start(x, b, log_decay, cu_seqlens)
        before = prepared.segments.finish(*parts, initial_state)
    prepared.outputs(x, b, c, log_decay, scores, cu_seqlens, before, y, final, NULL)
    return Scan(y, final)


def gated_scan_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> Array:
    """One decode step of :func:`gated_scan`: one token per sequence.

    Args:
        state: float32 [batch, num_heads, state_dim, head_dim]; updated in place.
        x: float32|float16|bfloat16 [batch, num_heads, head_dim].
        b, c: dtype of x, [batch, num_groups, state_dim].
        log_decay: float32 [batch, num_heads] or [batch, num_heads, state_dim].

    Returns:
        y, shape and dtype of x.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: state_dim too large for the shared memory of the GPU.

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
    if launch is not None:
        launch(state, x, b, c, log_decay, y)
    return y


class _Prepared(NamedTuple):
    outputs: Launch
    segments: SegmentStates | None
    channels: ChannelLaunch | None
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
    op = "gated_scan"
    state_shape = check_scan(op, x, b, c, log_decay, initial_state, cu_seqlens)
    check_kernel(op, x, b.shape[3], b=b, c=c, log_decay=log_decay, initial_state=initial_state)
    channels = log_decay.ndim == 4
    launches = scan_launches(x, b.shape[2], state_shape, current_device(), channels=channels)
    outputs = launches.launch(launches.config.spec(OUTPUTS))
    return _Prepared(outputs, launches.segment_states(), launches.channels(), state_shape)


@launch_plan
def _prepare_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> Launch | None:
    """None: the arrays are empty."""
    _check_step(state, x, b, c, log_decay)
    op = "gated_scan_step"
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    for name, array in (("state", state), ("log_decay", log_decay)):
        check_array(op, name, array, dtypes=(float32,))
    if not x.size:
        return None
    batch, num_heads, state_dim, head_dim = state.shape
    channels = log_decay.ndim == 3
    vec = access_width(head_dim, state)
    spec = _step_spec(x.dtype.name, state_dim, head_dim, vec, channels)
    scalars = STRUCTS["StepParameters"].pack(
        num_heads=num_heads,
        num_groups=b.shape[1],
        heads_per_group=num_heads // max(1, b.shape[1]),
    )
    if spec.shared_bytes > current_device().shared_bytes_per_block:
        raise ConfigError(f"{op}: state_dim is too large for the GPU, got {state_dim}")
    return Launch(load_kernel(spec), (batch * num_heads,), (scalars,))


def _step_spec(dtype: str, state_dim: int, head_dim: int, vec: int, channels: bool) -> KernelSpec:
    threads, most = _STEP_THREADS
    while threads < most and threads * _STEP_VECTORS * vec < state_dim * head_dim:
        threads *= 2
    defines = (
        ("DTYPE", dtype),
        ("STATE_DIM", state_dim),
        ("HEAD_DIM", head_dim),
        ("VEC", vec),
        ("CHANNELS", channels),
        ("THREADS", threads),
    )
    shared = 4 * ((3 if channels else 2) * state_dim + threads * vec)
    source = "sequence/gated_scan_step.cu"
    return KernelSpec(source, "gated_scan_step", defines, threads, shared)


def _check_step(state: Array, x: Array, b: Array, c: Array, log_decay: Array) -> None:
    op = "gated_scan_step"
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=3)
    batch, num_heads, head_dim = x.shape
    check_array(op, "b", b, dtypes=FLOAT_DTYPES, shape=(batch, None, None))
    check_array(op, "c", c, dtypes=FLOAT_DTYPES, shape=b.shape)
    check_same_dtype(op, x=x, b=b, c=c)
    check_groups(op, num_heads, b.shape[1])
    shape = (batch, num_heads, b.shape[2], head_dim)
    check_array(op, "state", state, dtypes=(float32, float64), shape=shape)
    check_decays(op, log_decay, (batch, num_heads), b.shape[2])


def _specs(device: Device) -> list[KernelSpec]:
    configs = representative_configs(device)
    kinds = (OUTPUTS, SEGMENT_STATES)
    return [
        *(config.spec(kind) for config in configs for kind in kinds),
        *(config.channel_spec() for config in configs if config.channels),
        *(join_spec(False, channels) for channels in (False, True)),
    ]


def _step_specs(device: Device) -> list[KernelSpec]:
    return [
        _step_spec(dtype.name, 128, 64, vec, channels)
        for dtype, vec in zip(KERNEL_DTYPES, (4, 2, 1), strict=True)
        for channels in (False, True)
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
    writes=("state",),
)
