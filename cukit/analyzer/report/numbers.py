"""Formats numbers and sanitises text, in the same way for the terminal, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def digits(value: float, significant: int = 3) -> str:
    """At least `significant` digits, with thousands separated and no exponent."""
    size = abs(value)
    if size == 0:
        return "0"
    decimals = 0
    while size < 10 ** (significant - 1) and decimals < 8:
        size *= 10
        decimals += 1
    return f"{value:,.{decimals}f}"


def tick(value: float) -> str:
    """The shortest form of an axis label: 0.5, 20, 1,000."""
    return f"{value:,.6f}".rstrip("0").rstrip(".") if value != int(value) else f"{value:,.0f}"


def microseconds(value: float) -> str:
    """A time in microseconds, from 10 ms on in milliseconds, from 1 s on in seconds."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size * (1 if unit == "s" else 10):
            return f"{digits(value / size)} {unit}"
    return f"{digits(value)} µs"


def seconds(value: float) -> str:
    """`"2 min 05 s"`, `"12.3 s"`."""
    if value >= 60:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{value:.1f} s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def num_bytes(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B" if value else "0"


def count(value: float) -> str:
    """`"65.1 M"`, `"21.6 K"`, `"800"`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f}"


def tflops(value: float) -> str:
    return f"{digits(value)} TFLOP/s"


def gbps(value: float) -> str:
    """A bandwidth, in TB/s from 1000 GB/s on."""
    return f"{value / 1e3:.2f} TB/s" if value >= 1e3 else f"{digits(value)} GB/s"


def printable(text: str) -> str:
    """The text without control characters, which terminals interpret and pages must not contain."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def all_printable(content: Any) -> Any:
    """Applies `printable` to every text in JSON content."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, Mapping):
        return {all_printable(key): all_printable(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [all_printable(value) for value in content]
    return content
