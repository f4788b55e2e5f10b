"""A decoder-only transformer with an explicit backward pass, built from the public ops.

    x_0     = embed(tokens)
    x_mid   = x_l + attention(rope(q, k), v) W_o      [q | k | v] = rms_norm(x_l) W_qkv
    x_{l+1} = x_mid + (silu(m W_gate) * (m W_up)) W_down          m = rms_norm(x_mid)
    hidden  = rms_norm(x_L),   logits = hidden W_head^T

There is no tape: `forward` stores what the gradients need in an `Activations`, which `backward`
consumes in reverse order. The same code runs on NumPy and on CuPy arrays; on the GPU every call is
asynchronous on CuPy's current stream. `matmul(precision="auto")` chooses the kernel of each product
by a cost model from shapes, strides and dtypes, so the choice is the same in every run on a GPU
model, unless `tune_matmul` has timed the kernels.

Papers: RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020), GQA
(Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cukit.attention import flash_attention, flash_attention_backward
from cukit.core.arrays import Array
from cukit.errors import ArrayError, ConfigError
from cukit.gemm import gated_linear, matmul
from cukit.layers import (
    embedding,
    embedding_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_backward,
    silu_and_mul_backward,
)
from cukit.models.config import TransformerConfig
from cukit.models.parameters import Parameters


@dataclass
class LayerActivations:
    """Activations of one layer. rows = batch * seq_len."""

    x: Array
    """The residual stream before the layer: [rows, hidden_size]."""
    attention_in: Array
    q: Array
    """After rotation: [batch, seq_len, num_heads_q, head_dim]; k and v with num_heads_kv. All three
    are views of one array."""
    k: Array
    v: Array
    attention_out: Array
    lse: Array
    x_mid: Array
    mlp_in: Array
    gate_up: Array
    mlp_act: Array


@dataclass
class Activations:
    """The result of a forward pass, with the activations for `backward` and distillation terms."""

    tokens: Array
    hidden: Array
    """The head's input, after the last norm: [rows, hidden_size]."""
    x_last: Array
    """The residual stream after the last layer: [rows, hidden_size]."""
    layers: list[LayerActivations] = field(default_factory=list)
    """Empty unless the forward pass kept them."""

    def residual_stream(self, layer: int) -> Array:
        """The residual stream after `layer` layers (0: the embeddings): [rows, hidden_size]."""
        return self.x_last if layer == len(self.layers) else self.layers[layer].x


@dataclass
class StateGradients:
    """Gradients of distillation terms with respect to states inside a model, by layer number.

    residual[l] has the shape of `Activations.residual_stream(l)`, 0 <= l <= num_layers; q, k and v
    the shapes of the layer's. float32 arrays; absent entries are zero.
    """

    residual: dict[int, Array] = field(default_factory=dict)
    q: dict[int, Array] = field(default_factory=dict)
    k: dict[int, Array] = field(default_factory=dict)
    v: dict[int, Array] = field(default_factory=dict)

    def add(self, place: dict[int, Array], layer: int, gradient: Array) -> None:
        """Adds `gradient` to an entry of one of the four dictionaries."""
        place[layer] = place[layer] + gradient if layer in place else gradient


_LAYER_WEIGHTS = ("input_norm", "qkv_proj", "o_proj", "mlp_norm", "gate_up_proj", "down_proj")


class LayerCaches(Protocol):
    """Cached keys and values of earlier tokens, to which a forward pass appends its own.

    `KvCache`, or `cukit.RadixAttention` during a step.
    """

    @property
    def length(self) -> int:
        """Tokens of the longest sequence before this pass."""

    @property
    def positions(self) -> Array | None:
        """Positions of the pass's tokens, int32 [batch, seq_len]; None: from `length` on for all
        sequences."""

    def attend(self, q: Array, k: Array, v: Array, layer: int) -> tuple[Array, Array]:
        """Stores k and v, and returns (out, lse) of q over all keys and values of the layer."""

    def advance(self, num_tokens: int) -> None:
        """Ends a pass of `num_tokens` tokens per sequence."""


@dataclass
class KvCache:
    """Keys and values of the tokens so far: one contiguous pair of arrays per layer.

    Each is [batch, max_positions, num_heads_kv, head_dim]; the first `length` positions are valid.
    """

    keys: list[Array]
    values: list[Array]
    length: int = 0

    @property
    def positions(self) -> None:
        """None: all sequences have the same length."""

    def attend(self, q: Array, k: Array, v: Array, layer: int) -> tuple[Array, Array]:
        """See `LayerCaches.attend`."""
        end = self.length + q.shape[1]
        keys, values = self.keys[layer][:, :end], self.values[layer][:, :end]
        keys[:, self.length :] = k
        values[:, self.length :] = v
        attended: tuple[Array, Array] = flash_attention(
            q, keys, values, causal=True, return_lse=True
        )
        return attended

    def advance(self, num_tokens: int) -> None:
        """See `LayerCaches.advance`."""
        self.length += num_tokens


class Transformer:
    """A model: a config and its parameters, on the CPU (NumPy) or on a GPU (CuPy).

    Args:
        config: the architecture.
        parameters: arrays with the names and shapes of `config.parameter_shapes()`; see
            `Transformer.initialise`.
    """

    def __init__(self, config: TransformerConfig, parameters: Parameters) -> None:
        if parameters.shapes != config.parameter_shapes():
            raise ConfigError("parameters: names and shapes do not match the config")
        self.config = config
        self.parameters = parameters
        angles = _rope_angles(config)
        self._cos = self.xp.asarray(np.cos(angles).astype(np.float32))
        self._sin = self.xp.asarray(np.sin(angles).astype(np.float32))

    @property
    def xp(self) -> ModuleType:
        """numpy or cupy: the library of the model's arrays."""
        return self.parameters.xp

    @property
    def head(self) -> Array:
        """The weight of the output head: [vocab_size, hidden_size] (if tied, the embedding)."""
        return self.parameters[self.config.head_name]

    @classmethod
    def initialise(
        cls, config: TransformerConfig, *, seed: int, xp: ModuleType = np
    ) -> Transformer:
        """A new model: normal weights of standard deviation 1/sqrt(fan in), norm weights of one.

        Projections into the residual stream are scaled down by 1/sqrt(2 num_layers), so that its
        magnitude is independent of the depth. The same seed gives the same weights on every device.
        """
        rng = np.random.default_rng(seed)
        host = Parameters(config.parameter_shapes(), config.array_dtype)
        for name, shape in config.parameter_shapes().items():
            if len(shape) == 1:
                host[name][...] = 1
                continue
            std = shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * config.num_layers) ** -0.5
            host[name][...] = rng.standard_normal(shape, np.float32) * np.float32(std)
        parameters = Parameters(config.parameter_shapes(), config.array_dtype, xp)
        parameters.load_flat(host.flat)
        return cls(config, parameters)

    # -- forward -------------------------------------------------------------------------------

    def forward(
        self, tokens: Array, *, keep: bool = True, cache: LayerCaches | None = None
    ) -> Activations:
        """Hidden states of `tokens`, with causal attention.

        Args:
            tokens: int32 [batch, seq_len]; seq_len plus the cache's length <= max_positions.
            keep: keep the activations for `backward` and distillation terms in the result.
            cache: continue after the cached tokens, and append these.
        """
        config, p = self.config, self.parameters
        batch, seq_len = tokens.shape
        start = cache.length if cache is not None else 0
        if start + seq_len > config.max_positions:
            raise ArrayError(
                f"tokens: {start + seq_len} positions, but max_positions is {config.max_positions}"
            )
        positions = cache.positions if cache is not None else None
        cos, sin = self._cos, self._sin
        if positions is None:
            cos, sin = cos[start : start + seq_len], sin[start : start + seq_len]
        x = embedding(tokens, p["embed_tokens.weight"]).reshape(-1, config.hidden_size)
        delta = None
        layers: list[LayerActivations] = []
        for index in range(config.num_layers):
            weight = self._layer_weights(index, p)
            attention_in, x = self._norm(x, delta, weight["input_norm"])
            qkv = _project(attention_in, weight["qkv_proj"])
            q, k, v = self._heads(qkv.reshape(batch, seq_len, -1, config.head_dim))
            q, k = rope(q, k, cos, sin, positions, inplace=True)
            if cache is None:
                attention_out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
            else:
                attention_out, lse = cache.attend(q, k, v, index)
            x_in = x
            delta = _project(_rows(attention_out), weight["o_proj"])
            mlp_in, x = self._norm(x, delta, weight["mlp_norm"])
            gate_up = None
            mlp_act = gated_linear(mlp_in, weight["gate_up_proj"], return_preactivation=keep)
            if keep:
                mlp_act, gate_up = mlp_act
            delta = _project(mlp_act, weight["down_proj"])
            if keep:
                layers.append(
                    LayerActivations(
                        x_in, attention_in, q, k, v, attention_out, lse, x, mlp_in, gate_up, mlp_act
                    )
                )
        if cache is not None:
            cache.advance(seq_len)
        hidden, x = self._norm(x, delta, p["norm.weight"])
        return Activations(tokens, hidden, x, layers)

    def logits(self, hidden: Array) -> Array:
        """hidden W_head^T: [rows, vocab_size]."""
        return _project(hidden, self.head)

    def new_cache(self, batch: int, max_positions: int | None = None) -> KvCache:
        """An empty cache for `batch` sequences of up to `max_positions` tokens."""
        config = self.config
        positions = max_positions or config.max_positions
        shape = (batch, positions, config.num_heads_kv, config.head_dim)

        def arrays() -> list[Array]:
            return [self.xp.empty(shape, config.array_dtype) for _ in range(config.num_layers)]

        return KvCache(arrays(), arrays())

    # -- backward ------------------------------------------------------------------------------

    def backward(
        self,
        activations: Activations,
        grad_hidden: Array,
        gradients: Parameters,
        state_gradients: StateGradients | None = None,
    ) -> None:
        """Adds the gradients of all parameters except an untied head to `gradients`.

        The loss computes the head's gradient (`linear_kl_divergence` does so without storing all
        logits); a tied head shares the embedding's entry.

        Args:
            activations: result of a forward pass with keep=True. Its layers are removed one by
                one, which frees their memory during the pass.
            grad_hidden: gradient of `activations.hidden`, same shape and dtype.
            gradients: float arrays by parameter name, added to. The pass reports completed
                gradients (`Parameters.finish`), so nothing may be added to them afterwards.
            state_gradients: gradients of further terms with respect to residual streams, q, k, v.
        """
        if len(activations.layers) != self.config.num_layers:
            raise ArrayError("activations: need the layers of a forward pass with keep=True")
        state = state_gradients or StateGradients()
        p, eps = self.parameters, self.config.norm_eps
        grad_x, grad_weight = rms_norm_backward(
            grad_hidden, activations.x_last, p["norm.weight"], eps
        )
        _add_to(gradients["norm.weight"], grad_weight)
        if not self.config.tie_embeddings:
            gradients.finish(self.config.head_name)
        gradients.finish("norm.weight")
        for index in reversed(range(self.config.num_layers)):
            grad_x = _with_extra(grad_x, state.residual.get(index + 1))
            grad_x = self._layer_backward(index, activations.layers.pop(), grad_x, gradients, state)
            gradients.finish(*self._layer_names(index))
        grad_x = _with_extra(grad_x, state.residual.get(0))
        _add_to(
            gradients["embed_tokens.weight"],
            embedding_backward(
                grad_x.reshape(*activations.tokens.shape, -1),
                activations.tokens,
                self.config.vocab_size,
                dtype=gradients.flat.dtype,
            ),
        )
        gradients.finish("embed_tokens.weight")

    def _layer_backward(
        self,
        index: int,
        kept: LayerActivations,
        grad_x: Array,
        gradients: Parameters,
        state: StateGradients,
    ) -> Array:
        """The gradient of the residual stream before the layer, from the gradient after it."""
        eps = self.config.norm_eps
        weight = self._layer_weights(index, self.parameters)
        grad = self._layer_weights(index, gradients)

        grad_act = _product(grad_x, weight["down_proj"])
        _add_product(grad["down_proj"], grad_x, kept.mlp_act)
        grad_gate_up = silu_and_mul_backward(grad_act, kept.gate_up)
        grad_in = _product(grad_gate_up, weight["gate_up_proj"])
        _add_product(grad["gate_up_proj"], grad_gate_up, kept.mlp_in)
        grad_x, grad_weight = rms_norm_backward(
            grad_in, kept.x_mid, weight["mlp_norm"], eps, grad_residual=grad_x
        )
        _add_to(grad["mlp_norm"], grad_weight)

        grad_out = _product(grad_x, weight["o_proj"]).reshape(kept.attention_out.shape)
        _add_product(grad["o_proj"], grad_x, _rows(kept.attention_out))
        # Deterministic, so that a resumed run equals an uninterrupted one bit for bit.
        grad_q, grad_k, grad_v = flash_attention_backward(
            grad_out, kept.q, kept.k, kept.v, kept.attention_out, kept.lse,
            causal=True, deterministic=True,
        )  # fmt: skip
        grad_q = _with_extra(grad_q, state.q.get(index))
        grad_k = _with_extra(grad_k, state.k.get(index))
        grad_v = _with_extra(grad_v, state.v.get(index))
        batch, seq_len, num_heads_q, head_dim = grad_q.shape
        num_heads = num_heads_q + 2 * grad_k.shape[2]
        grad_qkv = self.xp.empty((batch, seq_len, num_heads, head_dim), grad_q.dtype)
        q_part, k_part, _ = self._heads(grad_qkv)
        angles = self._cos[:seq_len], self._sin[:seq_len]
        rope_backward(grad_q, grad_k, *angles, out=(q_part, k_part))
        *_, v_part = self._heads(_in_pairs(grad_qkv))
        v_part[...] = _in_pairs(grad_v)
        grad_qkv = _rows(grad_qkv)
        grad_in = _product(grad_qkv, weight["qkv_proj"])
        _add_product(grad["qkv_proj"], grad_qkv, kept.attention_in)
        grad_x, grad_weight = rms_norm_backward(
            grad_in, kept.x, weight["input_norm"], eps, grad_residual=grad_x
        )
        _add_to(grad["input_norm"], grad_weight)
        return grad_x

    # -- shared --------------------------------------------------------------------------------

    def _norm(self, x: Array, delta: Array | None, weight: Array) -> tuple[Array, Array]:
        """(norm(x + delta), x + delta) in one pass over memory; the first norm has no delta."""
        if delta is None:
            return rms_norm(x, weight, self.config.norm_eps), x
        normed, new_x = rms_norm(delta, weight, self.config.norm_eps, residual=x)
        return normed, new_x

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Views of queries, keys and values in [batch, seq_len, all heads, head_dim]."""
        keys = self.config.num_heads_q
        values = keys + self.config.num_heads_kv
        return qkv[:, :, :keys], qkv[:, :, keys:values], qkv[:, :, values:]

    @staticmethod
    def _layer_weights(index: int, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {name: parameters[f"layers.{index}.{name}.weight"] for name in _LAYER_WEIGHTS}

    @staticmethod
    def _layer_names(index: int) -> list[str]:
        return [f"layers.{index}.{name}.weight" for name in _LAYER_WEIGHTS]


def _rope_angles(config: TransformerConfig) -> np.ndarray[Any, Any]:
    """Angle of each pair at each position: [max_positions, head_dim / 2], float64."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    return np.outer(np.arange(config.max_positions), config.rope_theta**-exponents)


def _rows(array: Array) -> Array:
    """[batch, seq_len, heads, head_dim] -> [batch * seq_len, heads * head_dim]."""
    return array.reshape(array.shape[0] * array.shape[1], -1)


def _in_pairs(heads: Array) -> Array:
    """A view with two elements as one, so that copies move half as many elements."""
    return heads.view(f"u{2 * heads.dtype.itemsize}") if heads.dtype.itemsize < 8 else heads


def _project(x: Array, weight: Array) -> Array:
    """x weight^T, for a weight matrix [out, in]."""
    return matmul(x, weight, transpose_b=True, precision="auto")


def _product(grad_out: Array, weight: Array) -> Array:
    """grad_out weight, the gradient of a projection's input."""
    return matmul(grad_out, weight, precision="auto")


def _add_product(gradient: Array, grad_out: Array, inputs: Array) -> None:
    """gradient += grad_out^T inputs, the gradient of a weight matrix."""
    matmul(grad_out, inputs, transpose_a=True, out=gradient, accumulate=True, precision="auto")


def _add_to(gradient: Array, extra: Array) -> None:
    """gradient += extra, summed in float32 or wider."""
    if gradient.dtype.itemsize >= 4:
        gradient += extra.astype(gradient.dtype, copy=False)
    else:
        gradient[...] = (gradient.astype(np.float32) + extra.astype(np.float32)).astype(
            gradient.dtype
        )


def _with_extra(gradient: Array, extra: Array | None) -> Array:
    """gradient + extra in gradient's dtype; the gradient itself if extra is None."""
    if extra is None:
        return gradient
    wide = gradient if gradient.dtype.itemsize >= 4 else gradient.astype(np.float32)
    return (wide + extra).astype(gradient.dtype)
