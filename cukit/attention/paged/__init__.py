"""Attention over paged KV caches, with cascade and latent attention, and writes to the caches."""
