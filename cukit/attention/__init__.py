"""Attention."""

from cukit.attention.flash import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]
