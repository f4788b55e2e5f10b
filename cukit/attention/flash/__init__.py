"""Exact attention: plans, launches, forward, backward, FP8, block masks."""
