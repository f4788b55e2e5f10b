"""Small models of the transformers library, with random weights."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

FAMILIES = ("llama", "gemma3", "qwen3")


def small_model(family: str, **options: Any) -> Any:
    """A causal language model with the same random weights in each call."""
    import torch
    import transformers

    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
            "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
        }),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "helium": ("HeliumConfig", "HeliumForCausalLM", {
            "num_attention_heads": 3, "num_key_value_heads": 3,
        }),
    }  # fmt: skip
    config, model, own = names[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**COMMON, **own, **options})
    return getattr(transformers, model)(made).eval()
