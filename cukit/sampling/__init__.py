"""Sampling of tokens from logits, and verification of drafted tokens."""

from cukit.reference.sampling import Sample, Verified
from cukit.sampling.sample import sample
from cukit.sampling.speculative import speculative_verify

__all__ = ["Sample", "Verified", "sample", "speculative_verify"]
