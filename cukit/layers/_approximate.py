"""GELU's two forms by the names that PyTorch gave them."""

from __future__ import annotations

from cukit.core.scalars import check_choice

_ACTIVATIONS = {"none": "GeluErf", "tanh": "GeluTanh"}


def check_approximate(op: str, approximate: str) -> None:
    """Raises ConfigError for anything but `"none"` and `"tanh"`."""
    check_choice(op, "approximate", approximate, tuple(_ACTIVATIONS))


def gelu_macro(approximate: str) -> tuple[str, str]:
    """The macro that chooses the form of a kernel."""
    return "ACTIVATION", _ACTIVATIONS[approximate]


def gelu_macros() -> list[tuple[str, str]]:
    """Both choices."""
    return [gelu_macro(approximate) for approximate in _ACTIVATIONS]
