"""The exact and the tanh form of GELU, named as in PyTorch."""

from __future__ import annotations

from cukit.core.scalars import check_choice

_ACTIVATIONS = {"none": "GeluErf", "tanh": "GeluTanh"}


def check_approximate(op: str, approximate: str) -> None:
    """Raises ConfigError unless `approximate` is `"none"` or `"tanh"`."""
    check_choice(op, "approximate", approximate, tuple(_ACTIVATIONS))


def gelu_macro(approximate: str) -> tuple[str, str]:
    """The macro that selects the form in a kernel."""
    return "ACTIVATION", _ACTIVATIONS[approximate]


def gelu_macros() -> list[tuple[str, str]]:
    """The macros of both forms."""
    return [gelu_macro(approximate) for approximate in _ACTIVATIONS]
