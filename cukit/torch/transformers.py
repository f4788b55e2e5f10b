"""cukit's attention as an attention implementation of Hugging Face transformers.

Usage:

    cukit.torch.register_attention()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cukit")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cukit.errors import ConfigError, MissingDependencyError
from cukit.torch import functional

_OLDEST = (5, 4)
"""The first version of transformers whose mask functions take the arguments of `attention_mask`."""


def register_attention(name: str = "cukit", *, plain_batches: bool = False) -> str:
    """Registers cukit's attention with transformers under `name`.

    Grouped heads, sliding windows, softcaps, sinks and any scale are options of the kernel. Causal
    and windowed masks that follow from the lengths alone need no mask tensor; padding, packed
    sequences and other patterns become a boolean mask for the kernel.

    Args:
        name: the value for `attn_implementation`.
        plain_batches: asserts that batches are neither padded nor packed. Inside torch.compile,
            transformers cannot read position ids and creates a mask for every batch as if it were
            packed; with this assertion it creates none.

    Returns:
        `name`.

    Raises:
        MissingDependencyError: transformers is not installed, or older than 5.4.
    """
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise MissingDependencyError(_needed("it is not installed")) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
        raise MissingDependencyError(_needed(f"{transformers.__version__} is installed"))
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, _no_mask if plain_batches else attention_mask)
    return name


def _needed(found: str) -> str:
    return (
        f"register_attention needs transformers 5.4 or newer, {found}: pip install -U transformers"
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls.

    Args:
        module: the calling layer; `module.is_causal` is used if `is_causal` is None.
        query: [batch, heads, seq_len_q, head_dim], any strides with a contiguous last axis.
        key, value: [batch, kv_heads, seq_len_kv, head_dim].
        attention_mask: the result of :func:`attention_mask`: None, or a bool mask, True for visible
            keys, that includes causality and window. Numeric masks are added to the scores.
        dropout: must be 0.
        sliding_window: number of keys visible to a query, including its own.
        s_aux: [heads], sinks.

    Returns:
        `(out, None)`, out [batch, seq_len_q, heads, head_dim].

    Raises:
        ConfigError: dropout is not 0, or a position bias or numeric mask requires grad.
    """
    if dropout:
        raise ConfigError(
            f"cukit's attention has no dropout, got {dropout}; set attention_dropout=0.0 in the "
            "model's config"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: dict[str, Any] = {"softcap": softcap, "scale": scaling}
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    bias = position_bias
    if attention_mask is None:
        options["causal"] = bool(is_causal)
        if sliding_window is not None:
            left = sliding_window - 1
            options["window_size"] = (left, 0 if is_causal else left)
    else:
        seq_len_kv = key.shape[2]
        attention_mask = attention_mask[..., :seq_len_kv]
        if attention_mask.dtype == torch.bool:
            options["mask"] = attention_mask
        else:
            bias = attention_mask if bias is None else attention_mask + bias
    if bias is not None:
        options["bias"] = bias.to(query.dtype)
    if s_aux is not None:
        options["sinks"] = s_aux.to(
            torch.float64 if query.dtype == torch.float64 else torch.float32
        )
    out = functional.flash_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options
    )
    return out, None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for :func:`attention_forward`, None if the kernel's options are sufficient.

    They are sufficient if nothing is padded and the mask is either causal or windowed, with the
    last query aligned with the last key, or hides no key. The arguments are those of transformers'
    mask functions.
    """
    from transformers.masking_utils import sdpa_mask

    config = kwargs.get("config")
    own_window = local_size is None or (
        local_size == getattr(config, "sliding_window", None)
        and getattr(config, "attention_chunk_size", None) is None
    )
    if own_window and _nothing_padded(attention_mask):
        ends_meet = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        if allow_is_causal_skip and ends_meet:
            return None
        if allow_is_bidirectional_skip and local_size is None:
            return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )
    return mask


def _nothing_padded(mask: Tensor | None) -> bool:
    """Whether the mask masks no position; False if it cannot be read, during torch.compile and CUDA
    graph capture. Reading it synchronises, as in transformers' own implementations."""
    if mask is None:
        return True
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(mask.all())


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ConfigError("plain_batches: expected batches without a mask, got one")
