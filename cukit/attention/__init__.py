"""Attention."""

from cukit.attention.flash import flash_attention
from cukit.attention.flash_backward import flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]
