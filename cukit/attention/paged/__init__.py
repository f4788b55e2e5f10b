"""Attention over paged KV caches, and writes to them; cascades; latent attention."""
