"""KL divergences between attention distributions, and of sparse-attention indexers."""
