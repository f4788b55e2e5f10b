"""The options of a memory pool, checked on construction."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from cukit.errors import ConfigError

ALIGNMENT = 512
"""Every block starts and ends at a multiple of this many bytes, as in CuPy's own pool."""


@dataclass(frozen=True)
class MemoryPoolConfig:
    """The options of a :class:`MemoryPool`. Sizes in bytes.

    >>> MemoryPoolConfig(max_pool_size=8 << 30, enable_defrag=True, defrag_threshold=0.3).block_size
    2097152
    """

    initial_pool_size: int = 0
    """Memory taken from the device when the pool is created."""
    max_pool_size: int | None = None
    """The pool never holds more than this. None: all device memory."""
    block_size: int = 2 << 20
    """The pool grows by multiples of this, rounded up to pages."""
    growth_factor: float = 1.0
    """The pool grows to at least this multiple of its size, as far as the limit and the device
    allow. 1: only by what is needed."""
    enable_defrag: bool = True
    """Defragment automatically when fragmentation exceeds `defrag_threshold`. Regardless of this,
    the pool defragments before an allocation fails."""
    defrag_threshold: float = 0.5
    """Fragmentation is 1 - largest free block / free bytes; in (0, 1]."""
    call_site_depth: int = 0
    """Stack frames of the caller recorded with each allocation; 0: none (fastest)."""
    on_out_of_memory: Callable[[int], bool] | None = None
    """Last resort: called with the requested bytes; returns True if it freed memory."""

    def __post_init__(self) -> None:
        for name in ("initial_pool_size", "max_pool_size", "block_size", "call_site_depth"):
            value = getattr(self, name)
            if name == "max_pool_size" and value is None:
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                _check(name, value, "a whole number", False)
        for name in ("growth_factor", "defrag_threshold"):
            value = getattr(self, name)
            _check(name, value, "a number", isinstance(value, (int, float)))
        flag = self.enable_defrag
        _check("enable_defrag", flag, "True or False", isinstance(flag, bool))
        callback = self.on_out_of_memory
        legal = callback is None or callable(callback)
        _check("on_out_of_memory", callback, "None or a function", legal)
        _check(
            "initial_pool_size", self.initial_pool_size, "at least 0", self.initial_pool_size >= 0
        )
        if self.max_pool_size is not None:
            least = max(1, self.initial_pool_size)
            legal = self.max_pool_size >= least
            _check("max_pool_size", self.max_pool_size, f"None or at least {least}", legal)
        power = self.block_size > 0 and self.block_size & (self.block_size - 1) == 0
        legal = power and self.block_size >= ALIGNMENT
        _check("block_size", self.block_size, f"a power of two of at least {ALIGNMENT}", legal)
        legal = 1 <= self.growth_factor <= 16
        _check("growth_factor", self.growth_factor, "between 1 and 16", legal)
        legal = 0 < self.defrag_threshold <= 1
        _check("defrag_threshold", self.defrag_threshold, "above 0 and at most 1", legal)
        _check("call_site_depth", self.call_site_depth, "at least 0", self.call_site_depth >= 0)


def _check(name: str, value: object, expected: str, legal: bool) -> None:
    if not legal:
        raise ConfigError(f"MemoryPoolConfig: {name}: expected {expected}, got {value!r}")
