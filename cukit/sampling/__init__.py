"""Tokens from logits: sampling, and checks of tokens that a draft model proposed."""

from cukit.reference.sampling import Sample, Verified
from cukit.sampling.sample import sample
from cukit.sampling.speculative import speculative_verify

__all__ = ["Sample", "Verified", "sample", "speculative_verify"]
