"""Normalisation, rotary embeddings, activations and token embeddings."""

from cukit.layers.embedding import embedding, embedding_backward
from cukit.layers.gelu import gelu, gelu_backward
from cukit.layers.gelu_and_mul import gelu_and_mul, gelu_and_mul_backward
from cukit.layers.layer_norm import layer_norm, layer_norm_backward
from cukit.layers.linear_rope import linear_rope
from cukit.layers.rms_norm import rms_norm, rms_norm_backward
from cukit.layers.rope import rope, rope_backward
from cukit.layers.silu_and_mul import silu_and_mul, silu_and_mul_backward

__all__ = [
    "embedding",
    "embedding_backward",
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_backward",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear_rope",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "silu_and_mul",
    "silu_and_mul_backward",
]
