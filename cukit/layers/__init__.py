"""Normalisation, positions, activations and embeddings."""

from cukit.layers.rms_norm import rms_norm, rms_norm_backward

__all__ = [
    "rms_norm",
    "rms_norm_backward",
]
