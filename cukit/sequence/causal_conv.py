"""Short causal convolutions along time, fused with SiLU."""

from __future__ import annotations

from functools import partial
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
    runs_kernel,
)
from cukit.core.column_sum import column_sum, column_sum_spec
from cukit.core.device import MAX_GRID_YZ, Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import convolution as reference
from cukit.reference.convolution import ACTIVATIONS, ConvGradients
from cukit.registry import register
from cukit.sequence._plan import STRUCTS

_THREADS = 128
_TOKENS = 64
"""Maximum tokens per thread. Fewer give more blocks, but more redundant loads at boundaries."""
_MIN_TOKENS = 16
_MAX_BACKWARD = 4
"""Maximum channels per thread in the backward: the accumulators of eight would spill."""
_WIDTHS = (2, 3, 4)
_NAMES = {"silu": "Silu", "none": "NoActivation"}


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str = "silu",
) -> Array:
    """Causal depthwise convolution along time with an optional SiLU.

    `z[t] = bias + sum_k weight[:, k] x[t - (width - 1) + k]`, `y = activation(z)`.

    Args:
        x: float32|float16|bfloat16 [batch, seq_len, channels]; float64 on the CPU only.
        weight: dtype of x, [channels, width], width 2, 3 or 4; the last column multiplies the
            current token.
        bias: dtype of x, [channels].
        initial_state: dtype of x, [batch, width - 1, channels], the inputs before x; None for
            zeros.
        activation: `"silu"` or `"none"`.

    Returns:
        y, shape and dtype of x. To continue the sequences, pass the last width - 1 tokens of
        initial_state and x, concatenated, as the initial_state of the next call.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation; on the GPU, a batch above 65535, or more than 65535
            blocks of 16 to 64 tokens.

    Runs on CuPy's current stream without synchronisation; computes in float32, deterministic.

    >>> import numpy as np, cukit as ck
    >>> x, weight = np.ones((1, 4, 1), np.float32), np.ones((1, 3), np.float32)
    >>> ck.causal_conv(x, weight, activation="none").ravel()
    array([1., 2., 3., 3.], dtype=float32)
    """
    op = "causal_conv"
    x, weight, bias, initial_state = arrays = adopt(op, x, weight, bias, initial_state)
    if not runs_kernel(op, *arrays):
        _check(op, x, weight, bias, initial_state, activation)
        return reference.causal_conv(
            x, weight, bias, initial_state=initial_state, activation=activation
        )
    launch = _prepare(*arrays, activation)
    y = empty(x, x.shape)
    if y.size:
        launch(x, weight, bias, initial_state, y)
    return y


def causal_conv_backward(
    grad_y: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str = "silu",
) -> ConvGradients:
    """Gradients of :func:`causal_conv`. Needs no intermediate results of the forward.

    Args:
        grad_y: dtype and shape of x.
        x, weight, bias, initial_state, activation: as in the forward.

    Returns:
        `ConvGradients(x, weight, bias, initial_state)`, each with dtype and shape of its argument;
        None for an argument that is None.

    Raises:
        ArrayError, ConfigError: as :func:`causal_conv`.

    Runs on CuPy's current stream without synchronisation; accumulates in float32 in a fixed order:
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> x, weight = np.ones((1, 4, 1), np.float32), np.ones((1, 3), np.float32)
    >>> ck.causal_conv_backward(x, x, weight, activation="none").x.ravel()
    array([3., 3., 2., 1.], dtype=float32)
    """
    op = "causal_conv_backward"
    arrays = adopt(op, grad_y, x, weight, bias, initial_state)
    grad_y, x, weight, bias, initial_state = arrays
    if not runs_kernel(op, *arrays):
        _check_backward(grad_y, x, weight, bias, initial_state, activation)
        return reference.causal_conv_backward(
            grad_y, x, weight, bias, initial_state=initial_state, activation=activation
        )
    prepared = _prepare_backward(*arrays, activation)
    channels, width = weight.shape
    grad_x = empty(x, x.shape)
    grad_state = None if initial_state is None else empty(x, initial_state.shape)
    partial_weight = empty(x, (prepared.rows, channels * width), float32)
    partial_bias = empty(x, (prepared.rows, channels), float32)
    if prepared.rows and channels:
        grads = (grad_x, grad_state, partial_weight, partial_bias)
        prepared.launch(grad_y, x, weight, bias, initial_state, *grads)
    elif grad_state is not None:
        grad_state.fill(0)
    grad_weight = column_sum(partial_weight, x.dtype).reshape(weight.shape)
    grad_bias = None if bias is None else column_sum(partial_bias, x.dtype)
    return ConvGradients(grad_x, grad_weight, grad_bias, grad_state)


def causal_conv_step(
    state: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str = "silu",
) -> Array:
    """One decode step of :func:`causal_conv`: one token per sequence.

    Args:
        state: dtype of x, [batch, width - 1, channels], the inputs before x; updated in place.
        x: float32|float16|bfloat16 [batch, channels].
        weight, bias, activation: as in :func:`causal_conv`.

    Returns:
        y, shape and dtype of x.

    Raises:
        ArrayError, ConfigError: as :func:`causal_conv`.

    >>> import numpy as np, cukit as ck
    >>> state, weight = np.zeros((1, 2, 1), np.float32), np.ones((1, 3), np.float32)
    >>> x = np.ones((1, 1), np.float32)
    >>> [ck.causal_conv_step(state, x, weight, activation="none").item() for _ in range(4)]
    [1.0, 2.0, 3.0, 3.0]
    """
    op = "causal_conv_step"
    state, x, weight, bias = arrays = adopt(op, state, x, weight, bias)
    if not runs_kernel(op, *arrays):
        _check_step(state, x, weight, bias, activation)
        return reference.causal_conv_step(state, x, weight, bias, activation=activation)
    launch = _prepare_step(*arrays, activation)
    y = empty(x, x.shape)
    if y.size:
        launch(state, x, weight, bias, y)
    return y


class _Backward(NamedTuple):
    launch: Launch
    rows: int
    """Rows of partial sums."""


@launch_plan
def _prepare(
    x: Array, weight: Array, bias: Array | None, initial_state: Array | None, activation: str
) -> Launch:
    op = "causal_conv"
    _check(op, x, weight, bias, initial_state, activation)
    return _launch(op, x, weight, activation, x, initial_state)


@launch_plan
def _prepare_backward(
    grad_y: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial_state: Array | None,
    activation: str,
) -> _Backward:
    op = "causal_conv_backward"
    _check_backward(grad_y, x, weight, bias, initial_state, activation)
    launch = _launch(op, x, weight, activation, grad_y, x, initial_state)
    return _Backward(launch, launch.grid[1] * launch.grid[2])


@launch_plan
def _prepare_step(
    state: Array, x: Array, weight: Array, bias: Array | None, activation: str
) -> Launch:
    op = "causal_conv_step"
    _check_step(state, x, weight, bias, activation)
    return _launch(op, x[:, None], weight, activation, state, x)


def _launch(op: str, x: Array, weight: Array, activation: str, *accessed: Array | None) -> Launch:
    """A launch of the op's kernel over x [batch, seq_len, channels].

    accessed: arrays with vectorised accesses.
    """
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    batch, seq_len, channels = x.shape
    if batch > MAX_GRID_YZ:
        raise ConfigError(f"{op}: x must have a batch of at most {MAX_GRID_YZ}, got {batch}")
    vec = access_width(channels, *accessed) if channels else 1
    if op == "causal_conv_backward":
        vec = min(vec, _MAX_BACKWARD)
    columns = -(-channels // (vec * _THREADS))
    tokens = _plan_tokens(batch, seq_len, columns, current_device())
    if seq_len > MAX_GRID_YZ * tokens:
        raise ConfigError(
            f"{op}: x must have a seq_len of at most {MAX_GRID_YZ * tokens}, got {seq_len}"
        )
    spec = _spec(op, x.dtype.name, weight.shape[1], vec, activation, tokens)
    scalars = (STRUCTS["ConvParameters"].pack(seq_len=seq_len, channels=channels),)
    return Launch(load_kernel(spec), (columns, -(-seq_len // tokens), batch), scalars)


def _plan_tokens(batch: int, seq_len: int, columns: int, device: Device) -> int:
    """Tokens per thread: _TOKENS, halved down to _MIN_TOKENS until an SM has eight blocks."""
    tokens = _TOKENS
    while tokens > _MIN_TOKENS and batch * columns * -(-seq_len // tokens) < 8 * device.num_sms:
        tokens //= 2
    return tokens


def _spec(op: str, dtype: str, width: int, vec: int, activation: str, tokens: int) -> KernelSpec:
    defines = (
        ("DTYPE", dtype),
        ("ACTIVATION", _NAMES[activation]),
        ("WIDTH", width),
        ("VEC", vec),
        ("TOKENS", tokens),
        ("THREADS", _THREADS),
    )
    return KernelSpec(f"sequence/{op}.cu", op, defines, _THREADS)


def _check(
    op: str,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial_state: Array | None,
    activation: str,
) -> None:
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=3)
    batch, _, channels = x.shape
    _check_weights(op, x, channels, weight, bias, activation)
    if initial_state is not None:
        shape = (batch, weight.shape[1] - 1, channels)
        check_array(op, "initial_state", initial_state, dtypes=(x.dtype,), shape=shape)


def _check_backward(
    grad_y: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial_state: Array | None,
    activation: str,
) -> None:
    op = "causal_conv_backward"
    _check(op, x, weight, bias, initial_state, activation)
    check_array(op, "grad_y", grad_y, dtypes=(x.dtype,), shape=x.shape)


def _check_step(state: Array, x: Array, weight: Array, bias: Array | None, activation: str) -> None:
    op = "causal_conv_step"
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, ndim=2)
    batch, channels = x.shape
    _check_weights(op, x, channels, weight, bias, activation)
    shape = (batch, weight.shape[1] - 1, channels)
    check_array(op, "state", state, dtypes=(x.dtype,), shape=shape)


def _check_weights(
    op: str, x: Array, channels: int, weight: Array, bias: Array | None, activation: str
) -> None:
    check_array(op, "weight", weight, dtypes=FLOAT_DTYPES, shape=(channels, None))
    if weight.shape[1] not in _WIDTHS:
        raise ArrayShapeError(f"{op}: weight must have a width of 2, 3 or 4, got {weight.shape[1]}")
    if bias is not None:
        check_array(op, "bias", bias, dtypes=FLOAT_DTYPES, shape=(channels,))
    check_same_dtype(op, x=x, weight=weight, bias=bias)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(f"{op}: activation must be 'silu' or 'none', got {activation!r}")


def _specs(op: str, device: Device) -> list[KernelSpec]:
    most = _MAX_BACKWARD if op == "causal_conv_backward" else 8
    specs = [
        _spec(op, dtype.name, 4, min(16 // dtype.itemsize, most), "silu", _TOKENS)
        for dtype in KERNEL_DTYPES
    ]
    specs += [_spec(op, "bfloat16", 3, 1, "none", _TOKENS)]
    if op == "causal_conv_backward":
        specs += [column_sum_spec(dtype.name) for dtype in KERNEL_DTYPES]
    return specs


def _register() -> None:
    for function in (causal_conv, causal_conv_backward, causal_conv_step):
        name = function.__name__
        register(
            name=name,
            family="sequence",
            function=function,
            reference=getattr(reference, name),
            specs=partial(_specs, name),
            writes=("state",) if function is causal_conv_step else (),
        )


_register()
