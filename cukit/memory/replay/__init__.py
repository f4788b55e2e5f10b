"""Allocation logs replayed on memory pools."""
