"""Reads what a compiled kernel says about itself: registers, shared memory, parameters.

A cubin is an ELF file. Every entry `k` has a `.text.k` section, an optional `.nv.shared.k` (static
shared memory) and a `.nv.info.k` list of attributes, of which EIATTR_KPARAM_INFO gives offset and
size of each parameter. The file-wide `.nv.info` has an EIATTR_REGCOUNT for each entry.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cukit.errors import CompileError

_EIFMT_SVAL = 4
_EIATTR_REGCOUNT = 0x2F
_EIATTR_KPARAM_INFO = 0x17
_SHT_NOBITS = 8
_SYMBOL_BYTES = 24
# From Hopper on the system keeps the first KiB of a block's shared memory; ELF sections include it.
_RESERVED_SHARED_BYTES = 1024

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CubinInfo:
    """Resources of one kernel entry."""

    entry: str
    registers: int
    static_shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    parameter_bytes: tuple[int, ...]
    """Size of each parameter in order."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    data: bytes


def read_cubin(cubin: bytes, entry: str, log: str = "") -> CubinInfo:
    """Resources of `entry`. `log` is ptxas' verbose output, the one place that counts spills."""
    sections = {section.name: section for section in _sections(cubin)}
    if f".text.{entry}" not in sections:
        entries = [name[6:] for name in sections if name.startswith(".text.")]
        raise CompileError(f'no extern "C" entry {entry!r} in the cubin; it has {entries}')
    parameters: dict[int, int] = {}
    for attribute, payload in _attributes(sections[f".nv.info.{entry}"].data):
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            parameters[ordinal] = packed >> 18
    shared = sections.get(f".nv.shared.{entry}")
    static_shared = shared.size if shared else 0
    if ".nv.shared.reserved.0" in sections:
        static_shared = max(0, static_shared - _RESERVED_SHARED_BYTES)
    stores, loads = _spills(log, entry)
    return CubinInfo(
        entry=entry,
        registers=_registers(sections, entry),
        static_shared_bytes=static_shared,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        parameter_bytes=tuple(parameters[i] for i in sorted(parameters)),
    )


def _registers(sections: dict[str, _Section], entry: str) -> int:
    """The REGCOUNT attribute pairs a symbol's index with its register count."""
    symbols, names = sections[".symtab"].data, sections[".strtab"].data
    for attribute, payload in _attributes(sections[".nv.info"].data):
        if attribute == _EIATTR_REGCOUNT:
            symbol, count = struct.unpack("<II", payload)
            (name_offset,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
            if names[name_offset : names.index(b"\0", name_offset)] == entry.encode():
                return int(count)
    raise CompileError(f"the cubin does not say how many registers {entry!r} uses")


def _spills(log: str, entry: str) -> tuple[int, int]:
    """Spill bytes that ptxas reported for `entry` (0, 0 where the log does not speak of it)."""
    _, _, after = log.partition(f"Function properties for {entry}\n")
    match = _SPILLS.search(after.split("Function properties", 1)[0])
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:4] != b"\x7fELF" or cubin[4] != 2:
        raise CompileError("not a 64-bit ELF cubin")
    (table_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table_offset + i * entry_size)
        for i in range(count)
    ]
    names = cubin[headers[names_index][4] :]
    for header in headers:
        name_offset, kind, _, _, offset, size = header[:6]
        name = names[name_offset : names.index(b"\0", name_offset)].decode()
        data = b"" if kind == _SHT_NOBITS else cubin[offset : offset + size]
        yield _Section(name, kind, size, data)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """EIATTR records: format, attribute, 16-bit value or length; a payload follows EIFMT_SVAL."""
    position = 0
    while position + 4 <= len(data):
        kind, attribute, length = struct.unpack_from("<BBH", data, position)
        position += 4
        if kind == _EIFMT_SVAL:
            yield attribute, data[position : position + length]
            position += length
