"""A gated mixture of causal convolution, scan with decay, attention and spectral filter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.attention import flash_attention, flash_attention_backward
from cukit.core.arrays import Array, check_array, namespace
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm import linear, linear_backward
from cukit.sequence import (
    causal_conv,
    causal_conv_backward,
    causal_conv_step,
    gated_scan,
    gated_scan_backward,
    gated_scan_step,
)

_BRANCHES = 4
_CONV_WIDTH = 4


@dataclass(frozen=True)
class MetaAttentionConfig:
    """Sizes of a :class:`MetaAttention`.

    hidden: a multiple of num_heads; head_dim is their quotient.
    state_dim: rows of a head's scan state.
    num_groups: groups of the scan's keys and queries; divides num_heads.
    filter_length: taps of the spectral filter, including the current token.
    """

    hidden: int
    num_heads: int
    state_dim: int = 64
    num_groups: int = 1
    filter_length: int = 1024

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "state_dim", "num_groups", "filter_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"MetaAttentionConfig: {name} must be 1 or more, got {value!r}")
        if self.hidden % self.num_heads:
            raise ConfigError(
                f"MetaAttentionConfig: hidden must be a multiple of num_heads ({self.num_heads}), "
                f"got {self.hidden}"
            )
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"MetaAttentionConfig: num_groups must divide num_heads ({self.num_heads}), "
                f"got {self.num_groups}"
            )

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.hidden // self.num_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, then keys and queries of the scan."""
        return self.hidden + 2 * self.num_groups * self.state_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name. `in_proj` is one matrix for the convolution's channels,
        q, k and v; `gate_proj` one for the decays and the gates of the four branches."""
        return {
            "in_proj": (self.channels + 3 * self.hidden, self.hidden),
            "gate_proj": (self.num_heads * (1 + _BRANCHES), self.hidden),
            "gate_bias": (self.num_heads * (1 + _BRANCHES),),
            "conv_weight": (self.channels, _CONV_WIDTH),
            "conv_bias": (self.channels,),
            "filter": (self.hidden, self.filter_length),
            "out_proj": (self.hidden, self.hidden),
        }


@dataclass
class MetaAttentionState:
    """The state of :meth:`MetaAttention.step` after the tokens so far; updated in place."""

    conv: Array
    """The convolution's last 3 inputs: [batch, 3, channels]."""
    scan: Array
    """float32 (float64 for float64 parameters) [batch, num_heads, state_dim, head_dim]."""
    k: Array
    v: Array
    """Keys `k` and values `v` of the attention: [batch, max_len, num_heads, head_dim]."""
    values: Array
    """The convolution's first outputs u, inputs of the filter: [batch, max_len, hidden]."""
    length: int = 0


@dataclass(frozen=True)
class MetaAttentionActivations:
    """Activations of a forward call, for the backward."""

    x: Array
    raw: Array
    """Inputs of the convolution."""
    mixed: Array
    """Outputs of the convolution: values, then keys and queries of the scan."""
    gates: Array
    decay_input: Array
    log_decay: Array
    q: Array
    k: Array
    v: Array
    lse: Array
    branches: tuple[Array, ...]
    mixture: Array
    """The gated sum of the branches, input of `out_proj`."""


class MetaAttention:
    """`y = W_o sum_i p_i branch_i`, where p is the softmax of four gates for each token and head.

    `in_proj` computes q, k, v and the inputs of a causal convolution (width 4, SiLU), whose outputs
    are u, b, c. `gate_proj` computes the gates and the decay input a of each head.

    branch 0: u.
    branch 1: the scan `c_t h_t`, where `h_t = exp(l_t) h_{t-1} + b_t u_t^T`, `l = -softplus(a)`.
    branch 2: causal attention of q, k and v.
    branch 3: the causal filter `sum_j f_j u_{t-j}`, by FFT along time with zero padding.

    parameters: arrays with the names and shapes of `config.shapes()`, all of one dtype: float16 or
        bfloat16 on the GPU, float32 or float64 on the CPU. Not copied.
    """

    def __init__(self, config: MetaAttentionConfig, parameters: Mapping[str, Array]) -> None:
        shapes = config.shapes()
        if parameters.keys() != shapes.keys():
            raise ConfigError(
                f"MetaAttention: parameters must be {', '.join(shapes)}, "
                f"got {', '.join(parameters)}"
            )
        dtype = parameters["in_proj"].dtype
        for name, shape in shapes.items():
            check_array("MetaAttention", name, parameters[name], dtypes=(dtype,), shape=shape)
        self.config = config
        self.parameters = dict(parameters)

    @classmethod
    def initialise(
        cls, config: MetaAttentionConfig, *, seed: int = 0, dtype: Any = np.float32, xp: Any = np
    ) -> MetaAttention:
        """Normal weights, filters with exponential decay, zero biases. xp: numpy or cupy."""
        rng = np.random.default_rng(seed)
        scale = {"conv_weight": _CONV_WIDTH**-0.5, "gate_bias": 0.0, "conv_bias": 0.0}
        values = {
            name: rng.standard_normal(shape) * scale.get(name, config.hidden**-0.5)
            for name, shape in config.shapes().items()
        }
        values["filter"] *= np.exp(-np.arange(config.filter_length) / 32)
        return cls(config, {name: xp.asarray(v.astype(dtype)) for name, v in values.items()})

    def forward(self, x: Array) -> tuple[Array, MetaAttentionActivations]:
        """x [batch, seq_len, hidden] -> y like x, and the activations for `backward`."""
        config, p = self.config, self.parameters
        self._check("x", x, (None, None, config.hidden))
        batch, seq_len, _ = x.shape
        xp = namespace(x)
        projected = linear(x, p["in_proj"])
        raw, q, k, v = self._split(xp, projected)
        mixed = causal_conv(raw, p["conv_weight"], p["conv_bias"])
        u, b, c = self._scan_inputs(xp, mixed)
        gates, decay_input = self._gates(xp, linear(x, p["gate_proj"]))
        log_decay = _log_decay(xp, decay_input)
        scanned = gated_scan(u, b, c, log_decay).y
        attended, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        filtered = self._filter(xp, u)
        branches = (u, scanned, attended, filtered)
        mixture = self._mix(xp, gates, branches)
        y = linear(mixture.reshape(batch, seq_len, config.hidden), p["out_proj"])
        kept = (x, raw, mixed, gates, decay_input, log_decay, q, k, v, lse, branches, mixture)
        return y, MetaAttentionActivations(*kept)

    def backward(
        self, grad_y: Array, kept: MetaAttentionActivations
    ) -> tuple[Array, dict[str, Array]]:
        """Gradients of x and of the parameters by name, in their dtypes."""
        config, p = self.config, self.parameters
        x = kept.x
        self._check("grad_y", grad_y, x.shape)
        xp = namespace(x)
        batch, seq_len, _ = x.shape
        heads = (batch, seq_len, config.num_heads, config.head_dim)
        grads: dict[str, Array] = {}
        grad_mixture, grads["out_proj"] = linear_backward(
            grad_y, kept.mixture.reshape(x.shape), p["out_proj"]
        )
        wide = _widen(grad_mixture).reshape(heads)
        grad_branches = [
            (wide * kept.gates[..., i, None]).astype(x.dtype) for i in range(_BRANCHES)
        ]
        grad_gates = xp.stack([(wide * _widen(each)).sum(-1) for each in kept.branches], axis=-1)
        grad_logits = kept.gates * (grad_gates - (kept.gates * grad_gates).sum(-1, keepdims=True))

        u, b, c = self._scan_inputs(xp, kept.mixed)
        scan_gradients = gated_scan_backward(grad_branches[1], u, b, c, kept.log_decay)
        grad_q, grad_k, grad_v = flash_attention_backward(
            grad_branches[2], kept.q, kept.k, kept.v, kept.branches[2], kept.lse, causal=True
        )[:3]
        grad_filter_input, grads["filter"] = self._filter_backward(xp, grad_branches[3], u)
        grad_u = _widen(grad_branches[0]) + _widen(scan_gradients.x) + grad_filter_input
        flat = (batch, seq_len, -1)
        grad_inputs = (grad_u.astype(x.dtype), scan_gradients.b, scan_gradients.c)
        grad_mixed = xp.concatenate([each.reshape(flat) for each in grad_inputs], axis=-1)
        conv_gradients = causal_conv_backward(
            grad_mixed, kept.raw, p["conv_weight"], p["conv_bias"]
        )
        grads["conv_weight"], grads["conv_bias"] = conv_gradients.weight, conv_gradients.bias
        grad_projected = xp.concatenate(
            [conv_gradients.x, grad_q.reshape(flat), grad_k.reshape(flat), grad_v.reshape(flat)],
            axis=-1,
        )
        grad_x, grads["in_proj"] = linear_backward(grad_projected, x, p["in_proj"])

        # l = -softplus(a): dl/da = -sigmoid(a) = expm1(l)
        grad_decay = _widen(scan_gradients.log_decay) * xp.expm1(kept.log_decay)
        grad_gate_rows = xp.concatenate([grad_decay, grad_logits.reshape(flat)], axis=-1)
        grads["gate_bias"] = grad_gate_rows.sum((0, 1)).astype(x.dtype)
        through_gates, grads["gate_proj"] = linear_backward(
            grad_gate_rows.astype(x.dtype), x, p["gate_proj"]
        )
        return (_widen(grad_x) + _widen(through_gates)).astype(x.dtype), grads

    def start(self, batch: int, max_len: int) -> MetaAttentionState:
        """An empty state for `batch` sequences of up to max_len tokens."""
        config, like = self.config, self.parameters["in_proj"]
        xp = namespace(like)
        heads, width = config.num_heads, config.head_dim
        wide = np.float64 if like.dtype == np.float64 else np.float32
        tokens = (batch, max_len, heads, width)
        return MetaAttentionState(
            conv=xp.zeros((batch, _CONV_WIDTH - 1, config.channels), like.dtype),
            scan=xp.zeros((batch, heads, config.state_dim, width), wide),
            k=xp.zeros(tokens, like.dtype),
            v=xp.zeros(tokens, like.dtype),
            values=xp.zeros((batch, max_len, config.hidden), like.dtype),
        )

    def step(self, x: Array, state: MetaAttentionState) -> Array:
        """Processes the next token of each sequence: x [batch, hidden] -> y like x.

        Raises ArrayShapeError if the state is full.
        """
        config, p = self.config, self.parameters
        batch, max_len, _ = state.values.shape
        self._check("x", x, (batch, config.hidden))
        if state.length >= max_len:
            raise ArrayShapeError(f"MetaAttention: the state is full, with {max_len} tokens")
        xp = namespace(x)
        raw, q, k, v = self._split(xp, linear(x, p["in_proj"])[:, None])
        mixed = causal_conv_step(
            state.conv, xp.ascontiguousarray(raw[:, 0]), p["conv_weight"], p["conv_bias"]
        )
        u, b, c = self._scan_inputs(xp, mixed[:, None])
        gates, decay_input = self._gates(xp, linear(x, p["gate_proj"])[:, None])
        one = [xp.ascontiguousarray(a[:, 0]) for a in (u, b, c, _log_decay(xp, decay_input))]
        scanned = gated_scan_step(state.scan, *one)[:, None]
        at = state.length
        state.k[:, at], state.v[:, at] = k[:, 0], v[:, 0]
        state.values[:, at] = u.reshape(batch, config.hidden)
        end = state.length = at + 1
        attended = flash_attention(q, state.k[:, :end], state.v[:, :end], causal=True)
        first = max(0, end - config.filter_length)
        taps = _widen(p["filter"])[:, : end - first][:, ::-1]
        filtered = xp.einsum("dt,btd->bd", taps, _widen(state.values[:, first:end]))
        filtered = filtered.reshape(u.shape).astype(x.dtype)
        mixture = self._mix(xp, gates, (u, scanned, attended, filtered))
        return linear(mixture.reshape(batch, config.hidden), p["out_proj"])

    def _check(self, name: str, array: Array, shape: tuple[int | None, ...]) -> None:
        dtype = self.parameters["in_proj"].dtype
        check_array("MetaAttention", name, array, dtypes=(dtype,), shape=shape)

    def _split(self, xp: Any, projected: Array) -> list[Array]:
        """The convolution's channels, q, k and v of [batch, seq_len, channels + 3 hidden]."""
        config = self.config
        ends = [config.channels + i * config.hidden for i in range(3)]
        raw, *rest = xp.split(projected, ends, axis=-1)
        heads = (*projected.shape[:2], config.num_heads, config.head_dim)
        return [xp.ascontiguousarray(raw), *(xp.ascontiguousarray(a).reshape(heads) for a in rest)]

    def _scan_inputs(self, xp: Any, mixed: Array) -> list[Array]:
        """u, b and c from the convolution's outputs."""
        config = self.config
        keys = config.num_groups * config.state_dim
        parts = xp.split(mixed, [config.hidden, config.hidden + keys], axis=-1)
        shapes = [(config.num_heads, config.head_dim)] + 2 * [(config.num_groups, config.state_dim)]
        return [
            xp.ascontiguousarray(part).reshape(*mixed.shape[:2], *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _gates(self, xp: Any, rows: Array) -> tuple[Array, Array]:
        """Softmax of the gates [batch, seq_len, heads, 4], and the decay inputs [batch, seq_len,
        heads], in float32 or float64."""
        heads = self.config.num_heads
        wide = _widen(rows) + _widen(self.parameters["gate_bias"])
        logits = wide[..., heads:].reshape(*rows.shape[:2], heads, _BRANCHES)
        powers = xp.exp(logits - logits.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True), xp.ascontiguousarray(wide[..., :heads])

    def _mix(self, xp: Any, gates: Array, branches: tuple[Array, ...]) -> Array:
        total = sum(_widen(each) * gates[..., i, None] for i, each in enumerate(branches))
        return xp.ascontiguousarray(total.astype(branches[0].dtype))

    def _spectra(self, xp: Any, u: Array) -> tuple[Array, Array, int]:
        """Spectra of u along time and of the filter, both zero-padded to `size`; and `size`."""
        seq_len = u.shape[1]
        taps = _widen(self.parameters["filter"])[:, :seq_len]
        size = 2 * seq_len
        filter_spectrum = xp.fft.rfft(taps, size, axis=-1).T.reshape(-1, *u.shape[2:])
        return xp.fft.rfft(_widen(u), size, axis=1), filter_spectrum, size

    def _filter(self, xp: Any, u: Array) -> Array:
        u_spectrum, filter_spectrum, size = self._spectra(xp, u)
        full = xp.fft.irfft(u_spectrum * filter_spectrum, size, axis=1)
        return xp.ascontiguousarray(full[:, : u.shape[1]].astype(u.dtype))

    def _filter_backward(self, xp: Any, grad: Array, u: Array) -> tuple[Array, Array]:
        """Gradients of u, in float32 or float64, and of the filter."""
        seq_len = u.shape[1]
        u_spectrum, filter_spectrum, size = self._spectra(xp, u)
        grad_spectrum = xp.fft.rfft(_widen(grad), size, axis=1)
        grad_u = xp.fft.irfft(grad_spectrum * xp.conj(filter_spectrum), size, axis=1)[:, :seq_len]
        lags = xp.fft.irfft((grad_spectrum * xp.conj(u_spectrum)).sum(0), size, axis=0)
        filters = self.parameters["filter"]
        grad_filter = xp.zeros(filters.shape, filters.dtype)
        count = min(seq_len, filters.shape[1])
        grad_filter[:, :count] = lags[:count].reshape(count, -1).T
        return grad_u.astype(_widen(u).dtype), grad_filter


def _widen(array: Array) -> Array:
    """`array` in float32; float64 stays float64."""
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def _log_decay(xp: Any, inputs: Array) -> Array:
    """-softplus(inputs), without overflow."""
    return -(xp.maximum(inputs, 0) + xp.log1p(xp.exp(-xp.abs(inputs))))
