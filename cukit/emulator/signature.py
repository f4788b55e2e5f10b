"""A kernel's signature as the compiler prints it, and whether a launch's arguments match it.

A pointer takes arrays of its own element type. Some other arguments are accepted because kernels
use them on purpose: arrays of bytes for any pointer, any array for a pointer to bytes or to a type
that NumPy does not have, signed integers for unsigned ones, numbers that the kernel moves as
unsigned integers or as vectors of integers at least as wide, and integers that hold the bits of one
or two 16-bit floats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

_SCALARS = {
    "bool": ("i", 1),
    "char": ("i", 1),
    "signed char": ("i", 1),
    "unsigned char": ("u", 1),
    "short": ("i", 2),
    "short int": ("i", 2),
    "unsigned short": ("u", 2),
    "short unsigned int": ("u", 2),
    "int": ("i", 4),
    "unsigned int": ("u", 4),
    "long": ("i", 8),
    "long int": ("i", 8),
    "unsigned long": ("u", 8),
    "long unsigned int": ("u", 8),
    "long long": ("i", 8),
    "long long int": ("i", 8),
    "unsigned long long": ("u", 8),
    "long long unsigned int": ("u", 8),
    "float": ("f", 4),
    "double": ("f", 8),
    "__half": ("f", 2),
    "__nv_bfloat16": ("b", 2),
}
_VECTOR = re.compile(r"(u?)(char|short|int|longlong|long|float|double)([1-4])")
_PACKED = {"__half2": ("f", 2), "__nv_bfloat162": ("b", 2)}
_QUALIFIERS = re.compile(r"\b(const|volatile|__restrict__|__restrict)\b")


@dataclass(frozen=True)
class _Type:
    """kind: i, u, f, or b for bfloat16. element_bytes: size of a scalar or vector element."""

    kind: str
    element_bytes: int
    count: int = 1


def parameter_name(printed: str) -> str:
    """`"const float*"`, from a function's name that ends in `[with T = const float*]`."""
    name = printed.rpartition("T = ")[2].rstrip("]").partition("; ")[0]
    return re.sub(r" ?\*", "*", re.sub(r" ?__restrict(__)?", "", name)).strip()


def mismatch(name: str, argument: Any) -> str | None:
    """A description of `argument` if a parameter of the type `name` cannot take it; else None."""
    is_pointer = name.endswith("*")
    known = _type_of(name.rstrip("*") if name.count("*") <= 1 else "")
    if argument is None:
        return "a null pointer" if known is not None and not is_pointer else None
    if isinstance(argument, np.ndarray):
        if argument.dtype.type is np.void:
            return None
        if is_pointer:
            return f"an array of {argument.dtype}" if _differs(known, argument.dtype) else None
        return f"an array of {argument.dtype}" if known is not None else None
    dtype = np.dtype(type(argument))
    if is_pointer:
        return None if dtype.kind in "iu" else f"{_article(dtype)} {dtype}"  # an address
    if known is None or known.count > 1 or known.element_bytes <= 2 or not _kind(dtype):
        return None
    same = _kind(dtype) == known.kind.replace("u", "i")
    return None if same else f"{_article(dtype)} {dtype}"


def _differs(known: _Type | None, dtype: np.dtype[Any]) -> bool:
    kind, size = _kind(dtype), dtype.itemsize
    if known is None or known.element_bytes == 1 or size == 1 or not kind:
        return False
    whole = known.element_bytes * known.count
    if known.kind in "iu":
        raw = known.kind == "u" or known.count > 1 or size <= 2
        return size > whole or (not raw and (kind != "i" or size != known.element_bytes))
    if kind == "i":
        return size != whole or whole > 4 or (known.count == 1 and whole > 2)
    if dtype.kind == "c":
        size //= 2
    return kind != known.kind or size != known.element_bytes


def _kind(dtype: np.dtype[Any]) -> str:
    """The kind, as in `_Type`; empty for a type that is none of them."""
    if dtype.kind in "iub":
        return "i"
    if dtype.kind in "fc":
        return "f"
    return "b" if dtype.name == "bfloat16" else ""


def _type_of(name: str) -> _Type | None:
    bare = " ".join(_QUALIFIERS.sub("", name).split())
    if bare in _SCALARS:
        return _Type(*_SCALARS[bare])
    if bare in _PACKED:
        return _Type(*_PACKED[bare], 2)
    vector = _VECTOR.fullmatch(bare)
    if vector is None:
        return None
    scalar = {"longlong": "long long"}.get(vector[2], vector[2])
    return _Type(*_SCALARS[f"unsigned {scalar}" if vector[1] else scalar], int(vector[3]))


def _article(dtype: np.dtype[Any]) -> str:
    return "an" if dtype.name[0] in "aeiou" else "a"
