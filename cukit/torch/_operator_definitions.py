"""The operators `torch.ops.cukit.<name>`, one row each.

A new loss is one line in LOSSES or HEAD_LOSSES; its options are those of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cukit
from cukit.core.arrays import access_width, namespace
from cukit.core.narrow_dtype import NARROW_DTYPES
from cukit.distill import (
    LinearCrossEntropyResult,
    LinearKlResult,
    distillation_attention,
    linear_sampled_distillation_loss,
    linear_topk_distillation_loss,
    sampled_distillation_loss,
)
from cukit.gemm.quantized.weight_only_layout import PackedWeight, WeightDescription
from cukit.torch._arrays import NUMPY_DTYPES
from cukit.torch._operators import Operator, arguments_of, define, names_of

Array = Any


def _like(x: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor on the device of `x`."""
    return torch.empty(x.shape if shape is None else shape, dtype=dtype or x.dtype, device=x.device)


def _statistic(x: Tensor) -> torch.dtype:
    """Dtype of losses and log-sum-exps: float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nothing(like: Array) -> Array:
    """An empty array in place of a result that a call does not compute."""
    return namespace(like).empty(0, like.dtype)


# --- Layers ---------------------------------------------------------------------------------------


def _activation_rows(
    name: str, function: Callable[..., Array], backward: Callable[..., Array]
) -> tuple[Operator, Operator]:
    """Forward and backward of an activation, whose result has x's shape or half its last axis."""
    options = arguments_of(function, drop=("x", "out"))
    rest = f", {options}" if options else ""
    gated = name.endswith("_and_mul")

    def shapes(x: Tensor, **_: Any) -> Tensor:
        return _like(x, (*x.shape[:-1], x.shape[-1] // 2)) if gated else _like(x)

    return (
        Operator(
            f"{name}(Tensor x{rest}) -> Tensor out", function, shapes, backward=f"{name}_backward"
        ),
        Operator(f"{name}_backward(Tensor grad_out, Tensor x{rest}) -> Tensor grad_x", backward),
    )


def _rotated(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return _like(x), _like(other)


_ROPE = "Tensor cos, Tensor sin, Tensor? position_ids=None, bool interleaved=False"


def _rope_qkv_backward(
    grad_q_out: Array, grad_k_out: Array, grad_v: Array, **options: Any
) -> Array:
    """Gradients of q, k and v in one array, [batch, seq_len, heads, head_dim]."""
    xp = namespace(grad_v)
    batch, seq_len, heads_k, head_dim = grad_v.shape
    keys = grad_q_out.shape[2]
    values = keys + heads_k
    grad = xp.empty((batch, seq_len, values + heads_k, head_dim), grad_v.dtype)
    cukit.rope_backward(
        grad_q_out, grad_k_out, out=(grad[:, :, :keys], grad[:, :, keys:values]), **options
    )
    # Copied in words of 16 bytes: CuPy copies single bfloat16 elements slowly.
    width = access_width(head_dim, grad_v)
    wide = np.complex128 if width * grad_v.itemsize == 16 else grad_v.dtype
    grad.view(wide)[:, :, values:] = grad_v.view(wide)
    return grad


LAYERS = (
    Operator(
        "rms_norm(Tensor x, Tensor weight, float eps=1e-06) -> Tensor out",
        cukit.rms_norm,
        lambda x, **_: _like(x),
        backward="rms_norm_backward",
    ),
    Operator(
        "rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps=1e-06)"
        " -> (Tensor grad_x, Tensor grad_weight)",
        cukit.rms_norm_backward,
    ),
    Operator(
        "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-06)"
        " -> (Tensor out, Tensor total)",
        cukit.rms_norm,
        lambda x, **_: (_like(x), _like(x)),
        backward="add_rms_norm_backward",
        shared={"residual": "x"},
    ),
    Operator(
        "add_rms_norm_backward(Tensor grad_out, Tensor? grad_total, Tensor total, Tensor weight,"
        " float eps=1e-06) -> (Tensor grad_x, Tensor grad_weight)",
        lambda grad_out, grad_total, total, weight, eps: cukit.rms_norm_backward(
            grad_out, total, weight, eps, grad_residual=grad_total
        ),
        lambda total, weight, **_: (_like(total), _like(weight)),
    ),
    Operator(
        "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-05) -> Tensor out",
        cukit.layer_norm,
        lambda x, **_: _like(x),
        backward="layer_norm_backward",
    ),
    Operator(
        "layer_norm_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor bias,"
        " float eps=1e-05) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
        lambda grad_out, x, weight, bias, eps: cukit.layer_norm_backward(grad_out, x, weight, eps),
    ),
    Operator(
        f"rope(Tensor q, Tensor k, {_ROPE}) -> (Tensor q_out, Tensor k_out)",
        cukit.rope,
        lambda q, k, **_: _rotated(q, k),
        strided=("q", "k"),
        backward="rope_backward",
    ),
    Operator(
        f"rope_backward(Tensor grad_q_out, Tensor grad_k_out, {_ROPE})"
        " -> (Tensor grad_q, Tensor grad_k)",
        lambda grad_q_out, grad_k_out, **options: cukit.rope_backward(
            grad_q_out, grad_k_out, **options
        ),
        lambda grad_q_out, grad_k_out, **_: _rotated(grad_q_out, grad_k_out),
        strided=("grad_q_out", "grad_k_out"),
    ),
    Operator(
        f"rope_qkv_backward(Tensor grad_q_out, Tensor grad_k_out, Tensor grad_v, {_ROPE})"
        " -> Tensor grad_qkv",
        _rope_qkv_backward,
        lambda grad_q_out, grad_k_out, grad_v, **_: _like(
            grad_v,
            (
                *grad_v.shape[:2],
                sum(x.shape[2] for x in (grad_q_out, grad_k_out, grad_v)),
                grad_v.shape[3],
            ),
        ),
        strided=("grad_q_out", "grad_k_out", "grad_v"),
    ),
    Operator(
        "linear_rope(Tensor x, Tensor w, Tensor cos, Tensor sin, SymInt rotated_heads)"
        " -> Tensor out",
        cukit.linear_rope,
        lambda x, w, **_: _like(x, (*x.shape[:-1], w.shape[0])),
    ),
    *_activation_rows("silu_and_mul", cukit.silu_and_mul, cukit.silu_and_mul_backward),
    *_activation_rows("gelu_and_mul", cukit.gelu_and_mul, cukit.gelu_and_mul_backward),
    *_activation_rows("gelu", cukit.gelu, cukit.gelu_backward),
)

# --- Attention ------------------------------------------------------------------------------------

_SCORES = (
    "Tensor q, Tensor k, Tensor v, bool causal=False, SymInt? window_left=None,"
    " SymInt? window_right=None, float? softcap=None, float? scale=None,"
    " Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? bias=None, Tensor? mask=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, SymInt? max_seqlen_q=None,"
    " SymInt? max_seqlen_kv=None, bool deterministic=False"
)


def _window(options: dict[str, Any]) -> dict[str, Any]:
    left, right = options.pop("window_left"), options.pop("window_right")
    return options if left is right is None else {**options, "window_size": (left, right)}


def _attend(q: Array, k: Array, v: Array, *, deterministic: bool, **options: Any) -> Any:
    return cukit.flash_attention(q, k, v, return_lse=True, **_window(options))


def _attend_backward(
    grad_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, **options: Any
) -> Any:
    gradients = cukit.flash_attention_backward(grad_out, q, k, v, out, lse, **_window(options))
    return gradients if len(gradients) == 4 else (*gradients, _nothing(q))


def _qkv_backward(
    grad_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, cos: Array, sin: Array,
    **options: Any,
) -> Array:  # fmt: skip
    """Gradients of q, k and v before rope in one array, [batch, seq_len, heads, head_dim]."""
    batch, seq_len, heads_q, head_dim = q.shape
    keys, values = heads_q, heads_q + k.shape[2]
    grad = namespace(q).empty((batch, seq_len, values + v.shape[2], head_dim), q.dtype)
    if len(cos) > seq_len:
        cos, sin = (each.reshape(batch, seq_len, -1) for each in (cos, sin))
    cukit.flash_attention_backward(
        grad_out, q, k, v, out, lse, rope=(cos, sin),
        gradients=(grad[:, :, :keys], grad[:, :, keys:values], grad[:, :, values:]),
        **options,
    )  # fmt: skip
    return grad


def _attended(q: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    *batch, rows, heads, _dim = q.shape
    return _like(q, (*q.shape[:-1], v.shape[-1])), _like(q, (*batch, heads, rows), _statistic(q))


ATTENTION = (
    Operator(
        f"flash_attention({_SCORES}) -> (Tensor out, Tensor lse)",
        _attend,
        _attended,
        strided=("q", "k", "v", "bias", "mask"),
        backward="flash_attention_backward",
        constants=("lse",),
    ),
    Operator(
        f"flash_attention_backward(Tensor grad_out, Tensor out, Tensor lse, {_SCORES})"
        " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)",
        _attend_backward,
        lambda q, k, v, sinks=None, **_: (
            _like(q), _like(k), _like(v), _like(q, (0,)) if sinks is None else _like(sinks),
        ),
        strided=("grad_out", "q", "k", "v", "out", "bias", "mask"),
    ),
    Operator(
        "flash_attention_qkv_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out,"
        " Tensor lse, Tensor cos, Tensor sin, bool causal=False, float? scale=None,"
        " bool deterministic=False) -> Tensor grad_qkv",
        _qkv_backward,
        lambda q, k, v, **_: _like(
            q, (*q.shape[:2], q.shape[2] + k.shape[2] + v.shape[2], q.shape[3])
        ),
        strided=("grad_out", "q", "k", "v", "out"),
    ),
)  # fmt: skip

_PAIRS = (
    arguments_of(
        cukit.attention_kl,
        drop=("window_size", "return_lse"),
        types={"normalizer": "Tensor?", "head_map": "SymInt[]?"},
    )
    + ", SymInt? window_left=None, SymInt? window_right=None, bool deterministic=False"
)


def _attention_kl(*, deterministic: bool, **options: Any) -> Any:
    return cukit.attention_kl(**_window(options), return_lse=True)


def _attention_kl_backward(
    *, teacher_lse: Array, student_lse: Array, precise: bool, **options: Any
) -> Any:
    options.update(lse_t=teacher_lse, lse_s=student_lse)
    return cukit.attention_kl_backward(**_window(options))


def _attention_kl_shapes(q_s: Tensor, reduction: str, **_: Any) -> tuple[Tensor, ...]:
    *batch, rows, heads, _dim = q_s.shape
    row_shape = (*batch, heads, rows)
    exact = _statistic(q_s)
    loss = _like(q_s, row_shape if reduction == "none" else (), exact)
    return loss, _like(q_s, row_shape, exact), _like(q_s, row_shape, exact)


ATTENTION_KL = (
    Operator(
        f"attention_kl({_PAIRS}) -> (Tensor loss, Tensor teacher_lse, Tensor student_lse)",
        _attention_kl,
        _attention_kl_shapes,
        strided=("q_t", "k_t", "q_s", "k_s"),
        backward="attention_kl_backward",
        constants=("teacher_lse", "student_lse"),
    ),
    Operator(
        f"attention_kl_backward(Tensor grad_loss, Tensor teacher_lse, Tensor student_lse, {_PAIRS})"
        " -> (Tensor grad_q_s, Tensor grad_k_s)",
        _attention_kl_backward,
        strided=("q_t", "k_t", "q_s", "k_s"),
    ),
)

_DISTILLED = (
    arguments_of(
        distillation_attention,
        drop=("window_size",),
        types={"normalizer": "Tensor?", "head_map": "SymInt[]?"},
    )
    + ", SymInt? window_left=None, SymInt? window_right=None, bool deterministic=False"
)


def _distill(*, deterministic: bool, lse_t: Array | None, **options: Any) -> tuple[Array, ...]:
    """The results; arrays are empty for out_t without v_t, teacher_lse if lse_t is given, and
    student_lse if it equals lse."""
    found = distillation_attention(lse_t=lse_t, **_window(options))
    return (
        found.out,
        found.loss,
        _nothing(found.out) if found.out_t is None else found.out_t,
        found.lse,
        _nothing(found.lse) if lse_t is not None else found.lse_t,
        _nothing(found.lse) if options["temperature"] == 1 else found.lse_s,
    )


def _distilled(
    q_t: Tensor,
    v_t: Tensor | None,
    q_s: Tensor,
    v_s: Tensor,
    reduction: str,
    lse_t: Tensor | None,
    temperature: float,
    **_: Any,
) -> tuple[Tensor, ...]:
    out, lse = _attended(q_s, v_s)
    loss = _like(lse, None if reduction == "none" else ())
    out_t = _like(q_t, (0,)) if v_t is None else _like(q_t, (*q_t.shape[:-1], v_t.shape[-1]))
    teacher_lse = _like(lse) if lse_t is None else _like(lse, (0,))
    return out, loss, out_t, lse, teacher_lse, _like(lse, (0,) if temperature == 1 else None)


def _distilled_gradients(
    *,
    grad_out: Tensor | None = None,
    grad_loss: Tensor | None = None,
    q_s: Tensor,
    k_s: Tensor,
    v_s: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_t: Tensor | None,
    teacher_lse: Tensor,
    student_lse: Tensor,
    scale_s: float | None,
    temperature: float,
    **options: Any,
) -> dict[str, Tensor | None]:
    """The sum of the gradients through `out` (flash_attention) and through `loss` (attention_kl);
    each is computed only if its result has a gradient."""
    found: dict[str, Tensor | None] = {"q_s": None, "k_s": None, "v_s": None}
    if grad_out is not None:
        masks = {each: options[each] for each in _MASKS}
        *gradients, _sinks = torch.ops.cukit.flash_attention_backward(
            grad_out, out, lse, q_s, k_s, v_s, scale=scale_s, **masks
        )
        found.update(zip(found, gradients, strict=True))
    if grad_loss is not None:
        gradients = torch.ops.cukit.attention_kl_backward(
            grad_loss,
            teacher_lse if lse_t is None else lse_t,
            lse if temperature == 1 else student_lse,
            q_s=q_s, k_s=k_s, scale_s=scale_s, temperature=temperature, **options,
        )  # fmt: skip
        for name, gradient in zip(("q_s", "k_s"), gradients, strict=True):
            before = found[name]
            found[name] = gradient if before is None else before + gradient
    return found


_MASKS = (
    "causal", "window_left", "window_right", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q",
    "max_seqlen_kv", "deterministic",
)  # fmt: skip
_DISTILLED_RESULTS = ("out", "loss", "out_t", "lse", "teacher_lse", "student_lse")

DISTILLATION_ATTENTION = (
    Operator(
        f"distillation_attention({_DISTILLED})"
        f" -> ({', '.join(f'Tensor {each}' for each in _DISTILLED_RESULTS)})",
        _distill,
        _distilled,
        strided=("q_t", "k_t", "v_t", "q_s", "k_s", "v_s"),
        backward=_distilled_gradients,
        needs=(
            *("grad_out", "grad_loss", "out", "lse", "teacher_lse", "student_lse"),
            *(each for each in names_of(_DISTILLED) if each not in ("v_t", "precise")),
        ),
        constants=("out_t", "lse", "teacher_lse", "student_lse"),
    ),
)

_INDEXER = arguments_of(
    cukit.indexer_kl, drop=("return_statistics",), types={"normalizer": "Tensor?"}
)


def _indexer_shapes(q_s: Tensor, reduction: str, **_: Any) -> tuple[Tensor, ...]:
    rows, exact = q_s.shape[:-2], _statistic(q_s)
    loss = _like(q_s, rows if reduction == "none" else (), exact)
    return loss, _like(q_s, rows, exact), _like(q_s, rows, exact)


INDEXER_KL = (
    Operator(
        f"indexer_kl({_INDEXER}) -> (Tensor loss, Tensor lse_s, Tensor mass_t)",
        lambda **options: cukit.indexer_kl(**options, return_statistics=True),
        _indexer_shapes,
        strided=("q_t", "k_t", "q_s", "k_s", "weights"),
        backward="indexer_kl_backward",
        constants=("lse_s", "mass_t"),
    ),
    Operator(
        f"indexer_kl_backward(Tensor grad_loss, Tensor lse_s, Tensor mass_t, {_INDEXER})"
        " -> (Tensor grad_q_s, Tensor grad_k_s, Tensor grad_weights)",
        lambda **options: cukit.indexer_kl_backward(**options),
        strided=("q_t", "k_t", "q_s", "k_s", "weights"),
    ),
)

# --- Linear layers --------------------------------------------------------------------------------


def _linear(
    x: Array, w: Array, bias: Array | None, activation: str | None, keep: bool
) -> tuple[Array, Array]:
    result = cukit.linear(x, w, bias, activation, return_preactivation=keep)
    return result if keep else (result, _nothing(x))


def _linear_backward(
    grad_out: Array, x: Array, w: Array, bias: Array | None, preactivation: Array,
    activation: str | None,
) -> tuple[Array, ...]:  # fmt: skip
    z = None if activation is None else preactivation
    options = {"with_bias": bias is not None}
    gradients = cukit.linear_backward(grad_out, x, w, z, activation, **options)
    return gradients if bias is not None else (*gradients, _nothing(x))


def _gated_linear(
    x: Array, w_gate: Array, w_up: Array, activation: str, keep: bool
) -> tuple[Array, Array]:
    result = cukit.gated_linear(x, (w_gate, w_up), activation, return_preactivation=keep)
    return result if keep else (result, _nothing(x))


def _gated_linear_backward(
    grad_out: Array, x: Array, w_gate: Array, w_up: Array, preactivation: Array, activation: str
) -> tuple[Array, ...]:
    arguments = grad_out, x, w_gate, w_up, None, preactivation, activation
    grad_x, grad_w = _gated_mlp_backward(*arguments)
    half = w_gate.shape[0]
    return grad_x, grad_w[:half], grad_w[half:]


def _gated_mlp_backward(
    grad_out: Array, x: Array, w_gate: Array, w_up: Array, w_down: Array | None,
    preactivation: Array, activation: str,
) -> tuple[Array, ...]:  # fmt: skip
    w = namespace(x).concatenate((w_gate, w_up))
    return cukit.gated_linear_backward(grad_out, x, w, preactivation, activation, down=w_down)


def _gated_mlp(
    x: Array, w_gate: Array, w_up: Array, w_down: Array, activation: str
) -> tuple[Array, ...]:
    hidden, z = cukit.gated_linear(x, (w_gate, w_up), activation, return_preactivation=True)
    return cukit.linear(hidden, w_down), hidden, z


def _gated_mlp_gradients(
    grad_out: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str,
    hidden: Tensor, preactivation: Tensor,
) -> dict[str, Tensor | None]:  # fmt: skip
    grad_x, grad_w = torch.ops.cukit.gated_mlp_backward(
        grad_out, x, w_gate, w_up, w_down, preactivation, activation
    )
    grad_gate, grad_up = grad_w.split(w_gate.shape[0])
    rows, of_down = (each.reshape(-1, each.shape[-1]) for each in (grad_out, hidden))
    return {"x": grad_x, "w_gate": grad_gate, "w_up": grad_up, "w_down": rows.T @ of_down}


def _kept(x: Tensor, rows: int, keep: bool, parts: int = 1) -> tuple[Tensor, Tensor]:
    out = (*x.shape[:-1], rows)
    return _like(x, out), _like(x, (*x.shape[:-1], parts * rows) if keep else (0,))


_WEIGHT = (
    "Tensor blocks, Tensor? row_scales, str dtype, SymInt rows, SymInt columns, SymInt group_size,"
    " str scale_dtype, bool zero_points"
)


def packed_weight(
    blocks: Array, row_scales: Array | None, dtype: str, rows: int, columns: int, group_size: int,
    scale_dtype: str, zero_points: bool,
) -> PackedWeight:  # fmt: skip
    """The packed weight described by an operator's arguments; group_size 0: one scale per row."""
    narrow = next(each for each in NARROW_DTYPES if each.name == dtype)
    scales = NUMPY_DTYPES[getattr(torch, scale_dtype)]
    group = group_size or None
    description = WeightDescription(narrow, (rows, columns), group, scales, zero_points)
    return PackedWeight(description, blocks, row_scales)


def _quantized_linear(x: Array, bias: Array | None, **weight: Any) -> Array:
    return cukit.quantized_linear(x, packed_weight(**weight), bias)


def _quantized_linear_backward(grad_out: Array, **weight: Any) -> Array:
    values = packed_weight(**weight).unpack().decode().astype(grad_out.dtype)
    rows = grad_out.reshape(-1, values.shape[0])
    return cukit.matmul(rows, values).reshape(*grad_out.shape[:-1], -1)


def _quantized_linear_gradients(grad_out: Tensor, bias: Tensor | None, **weight: Any) -> Any:
    gradients = {"x": torch.ops.cukit.quantized_linear_backward(grad_out, **weight)}
    if bias is not None:
        gradients["bias"] = grad_out.reshape(-1, grad_out.shape[-1]).sum(0)
    return gradients


LINEAR = (
    Operator(
        "linear(Tensor x, Tensor w, Tensor? bias=None, str? activation=None, bool keep=False)"
        " -> (Tensor out, Tensor preactivation)",
        _linear,
        lambda x, w, keep, **_: _kept(x, w.shape[0], keep),
        backward="linear_backward",
        constants=("preactivation",),
    ),
    Operator(
        "linear_backward(Tensor grad_out, Tensor x, Tensor w, Tensor? bias, Tensor preactivation,"
        " str? activation) -> (Tensor grad_x, Tensor grad_w, Tensor grad_bias)",
        _linear_backward,
        lambda x, w, bias, **_: (
            _like(x), _like(w), _like(x, (0,)) if bias is None else _like(bias),
        ),
    ),
    Operator(
        "gated_linear(Tensor x, Tensor w_gate, Tensor w_up, str activation='silu',"
        " bool keep=False) -> (Tensor out, Tensor preactivation)",
        _gated_linear,
        lambda x, w_gate, keep, **_: _kept(x, w_gate.shape[0], keep, 2),
        backward="gated_linear_backward",
        constants=("preactivation",),
    ),
    Operator(
        "gated_linear_backward(Tensor grad_out, Tensor x, Tensor w_gate, Tensor w_up,"
        " Tensor preactivation, str activation)"
        " -> (Tensor grad_x, Tensor grad_w_gate, Tensor grad_w_up)",
        _gated_linear_backward,
    ),
    Operator(
        "gated_mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, str activation='silu')"
        " -> (Tensor out, Tensor hidden, Tensor preactivation)",
        _gated_mlp,
        lambda x, w_gate, w_down, **_: (
            _like(x, (*x.shape[:-1], w_down.shape[0])),
            *_kept(x, w_gate.shape[0], True, 2),
        ),
        backward=_gated_mlp_gradients,
        needs=(
            "grad_out", "x", "w_gate", "w_up", "w_down", "activation", "hidden", "preactivation",
        ),
        constants=("hidden", "preactivation"),
    ),
    Operator(
        "gated_mlp_backward(Tensor grad_out, Tensor x, Tensor w_gate, Tensor w_up,"
        " Tensor w_down, Tensor preactivation, str activation)"
        " -> (Tensor grad_x, Tensor grad_weights)",
        _gated_mlp_backward,
        lambda x, w_gate, **_: (
            _like(x), _like(w_gate, (2 * w_gate.shape[0], w_gate.shape[1])),
        ),
    ),
    Operator(
        f"quantized_linear(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor out",
        _quantized_linear,
        lambda x, rows, **_: _like(x, (*x.shape[:-1], rows)),
        backward=_quantized_linear_gradients,
        needs=(
            "grad_out", "bias", "blocks", "row_scales", "dtype", "rows", "columns", "group_size",
            "scale_dtype", "zero_points",
        ),
    ),
    Operator(
        f"quantized_linear_backward(Tensor grad_out, {_WEIGHT}) -> Tensor grad_x",
        _quantized_linear_backward,
        lambda grad_out, columns, **_: _like(grad_out, (*grad_out.shape[:-1], columns)),
    ),
)  # fmt: skip

# --- Losses ---------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """A loss on logits, or on a head's input and weight.

    function: the function of arrays. It has options return_grad and grad_loss, or returns `result`.
    student: the argument with a gradient; a head loss has further gradients, named in `result`.
    teachers: arguments that must not require grad.
    """

    function: Callable[..., Any]
    student: str
    teachers: tuple[str, ...] = ()
    result: Any = None

    @property
    def name(self) -> str:
        """The name of the function and of the operator."""
        return self.function.__name__


LOSSES = (
    Loss(cukit.cross_entropy, "logits"),
    Loss(cukit.kl_divergence, "student_logits", ("teacher_logits",)),
    Loss(cukit.distillation_loss, "student_logits", ("teacher_logits",)),
    Loss(cukit.topk_distillation_loss, "student_logits", ("teacher_log_probs",)),
    Loss(sampled_distillation_loss, "student_logits", ("sample_weights", "teacher_log_probs")),
)

_HEAD_TEACHERS = ("teacher_hidden", "teacher_weight")

HEAD_LOSSES = (
    Loss(cukit.linear_cross_entropy, "hidden", result=LinearCrossEntropyResult),
    Loss(cukit.linear_kl_divergence, "hidden", _HEAD_TEACHERS, LinearKlResult),
    Loss(cukit.linear_distillation_loss, "hidden", _HEAD_TEACHERS, LinearKlResult),
    Loss(linear_topk_distillation_loss, "hidden", ("teacher_log_probs",), LinearKlResult),
    Loss(
        linear_sampled_distillation_loss,
        "hidden",
        ("sample_weights", "teacher_log_probs"),
        LinearKlResult,
    ),
)

NOT_OPTIONS = ("return_grad", "grad_loss", "inplace", "grad_weight", "grad_bias")
"""Options of a loss on arrays that autograd replaces."""

_TYPES = {"normalizer": "Tensor?"}


def _rows_of_loss(loss: Loss) -> tuple[Operator, Operator]:
    """Forward: the loss alone. Backward: the gradient, times the upstream one, in one launch."""
    arguments = arguments_of(loss.function, drop=NOT_OPTIONS, types=_TYPES)
    student = loss.student

    def shapes(**values: Any) -> Tensor:
        logits = values[student]
        rows = (math.prod(logits.shape[:-1]),) if values["reduction"] == "none" else ()
        return _like(logits, rows, _statistic(logits))

    def gradient(**values: Any) -> Array:
        return loss.function(**values, return_grad=True)[1]

    explicit = getattr(cukit, f"{loss.name}_backward", gradient)
    backward = f"{loss.name}_backward"
    return (
        Operator(f"{loss.name}({arguments}) -> Tensor loss", loss.function, shapes,
                 backward=backward),
        Operator(f"{backward}(Tensor grad_loss, {arguments}) -> Tensor grad_{student}", explicit),
    )  # fmt: skip


def _without_aliases(arrays: Iterable[Array]) -> tuple[Array, ...]:
    """The arrays, with a copy for each that occurs twice: torch operators' results may not alias.

    Without cross-entropy, the rows' losses and divergences are the same array.
    """
    found: list[Array] = []
    for array in arrays:
        found.append(array.copy() if any(array is each for each in found) else array)
    return tuple(found)


def _rows_of_head_loss(loss: Loss) -> tuple[Operator, Operator]:
    """Forward: loss and gradients from one call. Backward: multiplies these gradients by the
    upstream gradient; with reduction "none", where the upstream gradient has one value per row,
    recomputes them."""
    arguments = arguments_of(loss.function, drop=NOT_OPTIONS, types=_TYPES)
    names = names_of(arguments)
    fields = loss.result._fields
    gradients = tuple(each for each in fields if each.startswith("grad_"))
    trained = tuple(each.removeprefix("grad_") for each in gradients)

    def run(**values: Any) -> tuple[Array, ...]:
        found = loss.function(**values)
        like = values[loss.student]
        return _without_aliases(_nothing(like) if each is None else each for each in found)

    def run_backward(grad_loss: Array, **values: Any) -> tuple[Array, ...]:
        found = run(**values, grad_loss=grad_loss)
        return tuple(found[fields.index(each)] for each in gradients)

    def gradient_shapes(**values: Any) -> tuple[Tensor, ...]:
        like = values[loss.student]
        return tuple(
            _like(like, (0,)) if values[each] is None else _like(values[each]) for each in trained
        )

    def shapes(**values: Any) -> tuple[Tensor, ...]:
        like = values[loss.student]
        rows = (math.prod(like.shape[:-1]),) if values.get("reduction") == "none" else ()
        made = iter(gradient_shapes(**values))
        return tuple(
            next(made) if each in gradients else _like(like, rows, _statistic(like))
            for each in fields
        )

    def backward(grad_loss: Tensor, **values: Any) -> dict[str, Tensor | None]:
        found = [values.pop(each) for each in gradients]
        if values.get("reduction") == "none":
            operator = getattr(torch.ops.cukit, f"{loss.name}_backward")
            found = operator(grad_loss, **values)
        else:
            found = [torch.ops.cukit.scale(each, grad_loss) for each in found]
        return dict(zip(trained, found, strict=True))

    def unless(values: Mapping[str, Any]) -> tuple[str, ...]:
        if values.get("reduction") == "none":
            return gradients
        return tuple(each for each in names if isinstance(values[each], Tensor))

    results = ", ".join(f"Tensor {each}" for each in fields)
    returned = ", ".join(f"Tensor {each}" for each in gradients)
    return (
        Operator(
            f"{loss.name}({arguments}) -> ({results})", run, shapes, backward=backward,
            needs=("grad_loss", *names, *gradients), unless=unless,
            constants=tuple(each for each in fields if each != "loss"),
        ),
        Operator(
            f"{loss.name}_backward(Tensor grad_loss, {arguments}) -> ({returned})",
            run_backward, gradient_shapes,
        ),
    )  # fmt: skip


def _top_k(teacher_logits: Array, k: int, temperature: float) -> tuple[Array, Array]:
    return cukit.teacher_top_k(teacher_logits, k, temperature=temperature)


TEACHERS = (
    Operator(
        "teacher_top_k(Tensor teacher_logits, SymInt k, float temperature=1.0)"
        " -> (Tensor log_probs, Tensor ids)",
        _top_k,
        lambda teacher_logits, k, **_: (
            _like(teacher_logits, (*teacher_logits.shape[:-1], k), torch.float32),
            _like(teacher_logits, (*teacher_logits.shape[:-1], k), torch.int32),
        ),
    ),
)

OPERATORS = (
    *LAYERS,
    *ATTENTION,
    *ATTENTION_KL,
    *DISTILLATION_ATTENTION,
    *INDEXER_KL,
    *LINEAR,
    *(row for loss in LOSSES for row in _rows_of_loss(loss)),
    *(row for loss in HEAD_LOSSES for row in _rows_of_head_loss(loss)),
    *TEACHERS,
)

define(OPERATORS)


@torch.library.custom_op("cukit::scale", mutates_args=())
def scale(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor` for a float32 scalar tensor, computed in float32 and rounded once.

    torch would round a 0-d factor to the dtype of `x` first.
    """
    return torch.mul(x, factor.reshape(1).expand(x.shape), out=torch.empty_like(x))


@scale.register_fake
def _(x: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(x)
