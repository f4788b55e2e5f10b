"""Grouped products."""
