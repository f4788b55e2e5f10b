"""The symbol table of an ELF shared library, parsed in Python."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<16s2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_SYMBOL = struct.Struct("<I2BH2Q")
_SYMBOL_TABLE = 2
_THREAD_LOCAL = 6


@dataclass(frozen=True)
class Symbol:
    """A defined symbol. name: mangled. value: address, or offset of a thread-local variable.
    section: the name of its section."""

    name: str
    value: int
    size: int
    thread_local: bool
    section: str


def symbols_of(library: bytes) -> list[Symbol]:
    """The symbols of a 64-bit little-endian ELF file."""
    header = _HEADER.unpack_from(library)
    start, count, names_section = header[6], header[12], header[13]
    sections = [_SECTION.unpack_from(library, start + i * _SECTION.size) for i in range(count)]

    def text(strings: tuple[int, ...], offset: int) -> str:
        first = strings[4] + offset
        return library[first : library.index(b"\0", first)].decode()

    names = [text(sections[names_section], section[0]) for section in sections]
    found = []
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        offset, size, strings = section[4], section[5], sections[section[6]]
        table = library[offset : offset + size]
        for name, kind, _, where, value, length in _SYMBOL.iter_unpack(table):
            if 0 < where < count and name:
                local = kind & 15 == _THREAD_LOCAL
                found.append(Symbol(text(strings, name), value, length, local, names[where]))
    return found


def demangled(names: Sequence[str]) -> list[str]:
    """The names as in the C++ source, demangled by c++filt."""
    if not any(name.startswith("_Z") for name in names):
        return list(names)
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def shared_variables(symbols: Iterable[Symbol]) -> list[tuple[int, int]]:
    """First byte and size of each `__shared__` variable, in order of address."""
    return sorted({(each.value, each.size) for each in symbols if each.thread_local})


def static_shared_bytes(symbols: Iterable[Symbol], entry: str) -> int:
    """The total size of one kernel's `__shared__` variables; a file may have several kernels."""
    of_entry = f"_ZZ{len(entry)}{entry}"
    return sum(
        each.size for each in symbols if each.thread_local and each.name.startswith(of_entry)
    )


def cluster_shapes(symbols: Iterable[Symbol]) -> dict[str, tuple[int, int, int]]:
    """The `__cluster_dims__` of kernels by demangled name, decoded from the names of the kernels'
    sections (common/emulator/platform.h)."""
    found = {}
    for each in symbols:
        if match := re.fullmatch(r"cukit_cluster_(\d+)_(\d+)_(\d+)", each.section):
            found[each.name] = (int(match[1]), int(match[2]), int(match[3]))
    return dict(zip(demangled(list(found)), found.values(), strict=True))
