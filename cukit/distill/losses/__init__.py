"""Losses on logits, alone and fused with the output head, and on attention maps."""
