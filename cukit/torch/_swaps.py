"""The swaps of `optimize`: the modules it recognises and their replacements.

A swap changes no parameter, name or state dict: it replaces the `forward` of a module, or a
function in a modelling file of transformers, and can restore it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from cukit.torch import functional
from cukit.torch.transformers import register_attention

KINDS = ("attention", "rope", "projection", "norm", "mlp", "residual", "activation")
"""Kinds of swaps, in the order in which they are tried on a module."""

_ATTENTION = "cukit"

_MIN_TOKENS = 4096  # concatenating the weights then takes less than a tenth of the product's time

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}


@dataclass
class Swap:
    """A reversible replacement.

    name: of the module, or of the first of several. kind: one of KINDS. module: the module to
    verify and time, called as the model calls it. enable, disable: apply and undo the swap.
    """

    name: str
    kind: str
    module: nn.Module
    enable: Callable[[], None]
    disable: Callable[[], None]
    members: tuple[str, ...] = field(default=())
    """Names of all modules that this swap changes, if there are several."""
    trial: Callable[..., Any] | None = None
    """Verified and timed instead of the module, if its new forward may call the original."""


def find_swaps(model: nn.Module, kinds: tuple[str, ...]) -> Iterator[list[Swap]]:
    """For each module, the swaps to try, the most likely to match first."""
    named = list(model.named_modules())
    if "attention" in kinds or "rope" in kinds:
        yield from _of_transformers(model, named, kinds)
    for name, module in named:
        if "projection" in kinds and (forwards := _attention_layer(module)):
            swap = _with_forward(name, "projection", module, forwards[0])
            swap.trial = forwards[1]
            yield [swap]
        if "norm" in kinds and (norms := _norms(name, module)):
            yield norms
        if "mlp" in kinds and (forward := _gated_mlp(module)):
            yield [_with_forward(name, "mlp", module, forward)]
        if "residual" in kinds and (forward := _decoder_layer(module)):
            yield [_with_forward(name, "residual", module, forward)]
        if "activation" in kinds and (forward := _linear_activation(module)):
            yield [_with_forward(name, "activation", module, forward)]


def _with_forward(name: str, kind: str, module: nn.Module, forward: Callable[..., Any]) -> Swap:
    before = module.__dict__.get("forward")

    def enable() -> None:
        module.forward = forward

    def disable() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return Swap(name, kind, module, enable, disable)


# --- Projections of attention ---------------------------------------------------------------------

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_ATTENTION_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the KV cache argument in transformers: from 5.24 on, and before."""
_ATTENTION_NAMES = frozenset({
    *_ATTENTION_PARTS, "shape", "head_dim", "view", "transpose", "apply_rotary_pos_emb", "update",
    "layer_idx", "Callable", "ALL_ATTENTION_FUNCTIONS", "get_interface", "config",
    "_attn_implementation", "eager_attention_forward", "training", "attention_dropout", "scaling",
    "reshape", "contiguous",
})  # fmt: skip
"""Names that the forward of Llama's attention uses. A forward that uses other names has options,
such as a window, that the sample may not exercise."""
_ATTENTION_OPTIONS = ("is_causal", "sliding_window", "softcap", "s_aux", "position_bias")
"""Keywords of attention_forward that _RotatedAttention does not have."""


def _rotated_projection(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads_q: int) -> Any:
    """(q, k, v): views of the product of x [batch, seq_len, k] and weight [heads * head_dim, k]; q
    and k are rotated."""
    head_dim = 2 * cos.shape[-1]
    heads = weight.shape[0] // head_dim
    heads_k = (heads - heads_q) // 2
    qkv = torch.ops.cukit.linear_rope(x, weight, cos, sin, heads_q + heads_k)
    split = heads_q, heads_k, heads_k
    return qkv.view(*x.shape[:-1], heads, head_dim).split(split, dim=2)


def _projection_gradients(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """Gradients of x and weight from that of the product, [..., heads, head_dim], before rope."""
    grad = grad.view(-1, weight.shape[0])
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x = (grad @ weight).view(x.shape) if needs_x else None
    return grad_x, grad.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None


class _RotatedAttention(torch.autograd.Function):
    """(x, weight, tables, ...) -> attention of the rotated projections of x, [batch, seq_len,
    heads_q, head_dim]. The attention's backward kernels apply the inverse rotation to the gradients
    of q and k, and write the gradients of q, k and v into one array, which the backward of the
    projection reads."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads_q: int, causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        q, k, v = _rotated_projection(x, weight, cos, sin, heads_q)
        out, lse = torch.ops.cukit.flash_attention(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(x, weight, cos, sin, q, k, v, out, lse)
        ctx.options = causal, scale, torch.are_deterministic_algorithms_enabled()
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, weight, cos, sin, *attention = ctx.saved_tensors
        grad = torch.ops.cukit.flash_attention_qkv_backward(
            grad_out, *attention, cos, sin, *ctx.options
        )
        return (*_projection_gradients(ctx, grad, x, weight), None, None, None, None, None)


class _RotatedProjection(torch.autograd.Function):
    """(x, weight, tables, heads_q) -> the rotated projections (q, k, v) of x, for other
    implementations of attention. The backward writes the three gradients into one array."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads_q: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight, cos, sin)
        q, k, v = _rotated_projection(x, weight, cos, sin, heads_q)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
        x, weight, cos, sin = ctx.saved_tensors
        positions = None
        if cos.shape[0] > x.shape[1]:
            positions = torch.arange(cos.shape[0], dtype=torch.int32, device=cos.device)
            positions = positions.view(x.shape[:-1])
        grad = torch.ops.cukit.rope_qkv_backward(grad_q, grad_k, grad_v, cos, sin, positions)
        return (*_projection_gradients(ctx, grad, x, weight), None, None, None)


def _attention_layer(module: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Two forwards of Llama's attention layer that compute queries, keys and values in one product.
    Both call the original forward if there is a cache or no rotary table for whole heads; the first
    also does with fewer than _MIN_TOKENS tokens. None for other modules."""
    if {name for name, _ in module.named_children()} != set(_ATTENTION_PARTS):
        return None
    layer: Any = module
    layers = (layer.q_proj, layer.k_proj, layer.v_proj)
    if not all(type(each) is nn.Linear for each in layers):
        return None
    if len({(each.bias, each.in_features, each.weight.dtype) for each in layers}) != 1:
        return None  # also if there is a bias
    original, head_dim = layer.forward, getattr(layer, "head_dim", None)
    own = inspect.unwrap(type(layer).forward)
    arguments = tuple(inspect.signature(own).parameters)[1:]
    cache_argument = next((name for name in CACHE_ARGUMENTS if name in arguments), "")
    if arguments != (*_ATTENTION_ARGUMENTS, cache_argument, "kwargs"):
        return None
    if head_dim is None or not set(own.__code__.co_names) <= _ATTENTION_NAMES:
        return None
    file = sys.modules[own.__module__]
    if not _rotates_halves(file):
        return None
    heads_q = layer.q_proj.out_features // head_dim

    def projected(
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        named = [kwargs.pop(name, None) for name in CACHE_ARGUMENTS]
        cache = next((each for each in (cache, *named) if each is not None), None)
        cos, sin = (None, None) if position_embeddings is None else position_embeddings
        if cache is not None or cos is None or cos.shape[-1] != head_dim:
            kwargs[cache_argument] = cache
            return original(
                hidden_states, position_embeddings=position_embeddings,
                attention_mask=attention_mask, **kwargs,
            )  # fmt: skip
        weight = torch.cat([functional.autocast(each.weight) for each in layers])
        x = functional.autocast(hidden_states)
        given = x, weight, *_rope_tables(cos, sin), heads_q
        if attention_mask is None and _uses_only_causal_and_scale(layer, kwargs):
            causal = bool(getattr(layer, "is_causal", True))
            out = _RotatedAttention.apply(*given, causal, layer.scaling)
            return layer.o_proj(out.reshape(*x.shape[:-1], -1)), None
        q, k, v = _RotatedProjection.apply(*given)
        attend = file.ALL_ATTENTION_FUNCTIONS.get_interface(
            layer.config._attn_implementation, file.eager_attention_forward
        )
        out, weights = attend(
            layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask,
            dropout=layer.attention_dropout if layer.training else 0.0, scaling=layer.scaling,
            **kwargs,
        )  # fmt: skip
        return layer.o_proj(out.reshape(*x.shape[:-1], -1)), weights

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        few = hidden_states.numel() < _MIN_TOKENS * layer.q_proj.in_features
        return (original if few else projected)(hidden_states, *args, **kwargs)

    return forward, projected


def _uses_only_causal_and_scale(layer: Any, options: dict[str, Any]) -> bool:
    """Whether attention_forward would pass only causality and scale to flash_attention."""
    if layer.config._attn_implementation != _ATTENTION:
        return False
    dropout = layer.attention_dropout if layer.training else 0.0
    given = any(options.get(name) is not None for name in _ATTENTION_OPTIONS)
    return not dropout and not given and getattr(layer, "sliding_window", None) is None


# --- Norms ----------------------------------------------------------------------------------------


def _norms(name: str, module: nn.Module) -> list[Swap]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return []
    if type(module) is nn.LayerNorm:

        def layer_norm(x: Tensor) -> Tensor:
            return functional.layer_norm(x, module.weight, module.bias, module.eps)

        return [_with_forward(name, "norm", module, layer_norm)]
    eps = _rms_eps(module)
    if eps is None and type(module) is not nn.RMSNorm:
        return []

    def rms_norm(x: Tensor) -> Any:
        own = torch.finfo(x.dtype).eps if eps is None else eps
        return functional.rms_norm(x, module.weight, own)

    def rms_norm_of_offset(x: Tensor) -> Any:  # Gemma stores weights minus 1
        return functional.rms_norm(x, module.weight.float() + 1.0, eps or 0.0)

    forwards: list[Callable[..., Any]] = [rms_norm, rms_norm_of_offset]
    if "Gemma" in type(module).__name__:
        forwards.reverse()
    return [_with_forward(name, "norm", module, each) for each in forwards]


def _rms_eps(module: Any) -> float | None:
    """The epsilon of an RMSNorm; None for other modules and for torch's default."""
    if "RMSNorm" not in type(module).__name__:
        return None
    eps: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps


# --- Decoder layers -------------------------------------------------------------------------------

_DECODER_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def _decoder_layer(module: nn.Module) -> Callable[..., Any] | None:
    """Llama's decoder layer with the addition before its second norm fused with that norm."""
    if {name for name, _ in module.named_children()} != set(_DECODER_PARTS):
        return None
    # Learned scales of residuals (as in Doge) may be 1 when the swap is verified and change later.
    if next(module.parameters(recurse=False), None) is not None:
        return None
    dropout = any("dropout" in name and value for name, value in vars(module).items())
    layer: Any = module
    original, norm = layer.forward, layer.post_attention_layernorm
    eps = _rms_eps(norm)
    if eps is None or _gated_mlp(layer.mlp) is None:
        return None

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or (dropout and layer.training):
            return original(hidden_states, *args, **kwargs)
        x = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
        if not x.dtype == hidden_states.dtype == norm.weight.dtype:  # autocast
            total = hidden_states + x
            return total + layer.mlp(layer.post_attention_layernorm(total))
        x, total = functional.rms_norm(x, norm.weight, eps, residual=hidden_states)
        return total + layer.mlp(x)

    return forward


# --- Feed-forward layers --------------------------------------------------------------------------


def activation_name(module: Any) -> str | None:
    """cukit's name for an activation module, None for others."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(type(module).__name__)


def _gated_mlp(module: nn.Module) -> Callable[..., Any] | None:
    """The fused forward of a module with Llama's gate_proj, up_proj, down_proj and act_fn; None for
    other modules."""
    parts: list[Any] = [getattr(module, f"{each}_proj", None) for each in ("gate", "up", "down")]
    activation = activation_name(getattr(module, "act_fn", None))
    if activation is None or not all(type(each) is nn.Linear for each in parts):
        return None
    gate, up, down = parts
    if gate.bias is not None or up.bias is not None:
        return None

    def forward(x: Tensor) -> Any:
        return functional.gated_mlp(x, gate.weight, up.weight, down.weight, activation)

    def forward_with_bias(x: Tensor) -> Any:
        return down(functional.gated_linear(x, gate.weight, up.weight, activation))

    return forward if down.bias is None else forward_with_bias


def _linear_activation(module: nn.Module) -> Callable[..., Any] | None:
    """The fused forward of linear layers followed by an activation: in an nn.Sequential, or BERT's
    `dense` and `intermediate_act_fn`."""
    dense: Any = getattr(module, "dense", None)
    activation = activation_name(getattr(module, "intermediate_act_fn", None))
    if type(dense) is nn.Linear and activation is not None:
        return lambda x: functional.linear(x, dense.weight, dense.bias, activation)
    if type(module) is not nn.Sequential:
        return None
    steps: list[Callable[..., Any]] = []
    layers = list(module)
    fused = 0
    while layers:
        layer = layers.pop(0)
        activation = activation_name(layers[0]) if layers else None
        if type(layer) is nn.Linear and activation is not None:
            layers.pop(0)
            steps.append(_fused(layer, activation))
            fused += 1
        else:
            steps.append(layer)
    if not fused:
        return None

    def forward(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return forward


def _fused(layer: nn.Linear, activation: str) -> Callable[..., Any]:
    return lambda x: functional.linear(x, layer.weight, layer.bias, activation)


# --- Models of transformers -----------------------------------------------------------------------


def _of_transformers(
    model: nn.Module, named: list[tuple[str, nn.Module]], kinds: tuple[str, ...]
) -> Iterator[list[Swap]]:
    """Swaps of attention, which is selected in a model's config, and of rotary positions, a
    function in its modelling file."""
    layers = [
        (name, module)
        for name, module in named
        if type(module).__name__.endswith("Attention")
        and getattr(getattr(module, "config", None), "_attn_implementation", None) is not None
    ]
    if not layers or not hasattr(model, "config"):
        return
    members = tuple(name for name, _ in layers)
    if "attention" in kinds:
        register_attention(_ATTENTION)
        configs = {id(module.config): module.config for _, module in layers}
        before = {key: config._attn_implementation for key, config in configs.items()}

        def choose() -> None:
            for config in configs.values():
                config._attn_implementation = _ATTENTION

        def restore() -> None:
            for key, config in configs.items():
                config._attn_implementation = before[key]

        yield [Swap(*layers[0][:1], "attention", layers[0][1], choose, restore, members)]
    if "rope" in kinds:
        files = {sys.modules[type(module).__module__] for _, module in layers}
        files = {file for file in files if callable(getattr(file, _ROPE, None))}
        if files:

            def rotate() -> None:
                for file in files:
                    _rotate(file)

            def unrotate() -> None:
                for file in files:
                    _unrotate(file)

            yield [Swap(layers[0][0], "rope", layers[0][1], rotate, unrotate, members)]


_ROPE = "apply_rotary_pos_emb"

_rotated: dict[ModuleType, tuple[Callable[..., Any], int]] = {}
"""For each file with a swapped function: the original, and the number of models that use the
swap."""


def _rotate(file: ModuleType) -> None:
    original, users = _rotated.get(file, (None, 0))
    if original is None:
        original = getattr(file, _ROPE)
        setattr(file, _ROPE, _rotation(original))
    _rotated[file] = original, users + 1


def _unrotate(file: ModuleType) -> None:
    original, users = _rotated.pop(file)
    if users > 1:
        _rotated[file] = original, users - 1
    else:
        setattr(file, _ROPE, original)


def _rotates_halves(file: ModuleType) -> bool:
    """Whether the rotary function of a modelling file rotates pairs of elements half a head apart,
    not adjacent ones."""
    original = _rotated[file][0] if file in _rotated else getattr(file, _ROPE, None)
    if original is None:
        return False
    x = torch.arange(1.0, 9.0).view(1, 1, 2, 4)  # [batch, heads, seq_len, head_dim]
    angles = torch.arange(4.0).view(1, 2, 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, dim=-1)
    expected = x * cos + torch.cat((-right, left), dim=-1) * sin
    try:
        return all(torch.allclose(each, expected) for each in original(x, x, cos, sin))
    except Exception:  # a function of that name with other arguments or results
        return False


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' rotary function for the half-split layout, on :func:`cukit.torch.rope`."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *args, **kwargs)
        tables = _rope_tables(cos, sin)
        batch, seq_len, _head_dim = cos.shape
        positions = None
        if batch > 1:
            positions = torch.arange(batch * seq_len, dtype=torch.int32, device=q.device)
            positions = positions.view(batch, seq_len)
        rotated = functional.rope(q.transpose(1, 2), k.transpose(1, 2), *tables, positions)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    return apply_rotary_pos_emb


def _rope_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cukit's tables from transformers' cos and sin, [batch or 1, seq_len, head_dim]."""
    batch, seq_len, head_dim = cos.shape
    half = head_dim // 2
    cos, sin = (each[..., :half].float().reshape(batch * seq_len, half) for each in (cos, sin))
    return cos, sin
