"""A decoder-only transformer built from the public ops: forward, backward, generation."""

from cukit.models.config import TransformerConfig
from cukit.models.files import load_model, save_model
from cukit.models.generation import generate
from cukit.models.meta_attention import (
    MetaAttention,
    MetaAttentionActivations,
    MetaAttentionConfig,
    MetaAttentionState,
)
from cukit.models.parameters import Parameters
from cukit.models.transformer import Activations, KvCache, LayerCaches, StateGradients, Transformer

__all__ = [
    "Activations",
    "KvCache",
    "LayerCaches",
    "MetaAttention",
    "MetaAttentionActivations",
    "MetaAttentionConfig",
    "MetaAttentionState",
    "Parameters",
    "StateGradients",
    "Transformer",
    "TransformerConfig",
    "generate",
    "load_model",
    "save_model",
]
