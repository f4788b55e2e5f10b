"""GELU's two forms by the names that PyTorch gave them."""

from __future__ import annotations

from cukit.errors import ConfigError

_ACTIVATIONS = {"none": "GeluErf", "tanh": "GeluTanh"}


def check_approximate(op: str, approximate: str) -> None:
    """Raises ConfigError for anything but `"none"` and `"tanh"`."""
    if approximate not in _ACTIVATIONS:
        raise ConfigError(f"{op}: approximate must be 'none' or 'tanh', got {approximate!r}")


def gelu_macro(approximate: str) -> tuple[str, str]:
    """The macro that chooses the form of a kernel."""
    return "ACTIVATION", _ACTIVATIONS[approximate]


def gelu_macros() -> list[tuple[str, str]]:
    """Both choices."""
    return [gelu_macro(approximate) for approximate in _ACTIVATIONS]
