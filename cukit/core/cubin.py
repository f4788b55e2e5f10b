"""Reads the resource usage of a compiled kernel: registers, shared memory, parameters.

A cubin is an ELF file. Every entry `k` has a `.text.k` section, an optional `.nv.shared.k` (static
shared memory) and a `.nv.info.k` list of attributes, of which EIATTR_KPARAM_INFO holds the offset
and size of each parameter. The file-wide `.nv.info` has an EIATTR_REGCOUNT and an EIATTR_FRAME_SIZE
for each entry.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cukit.errors import CompileError

_EIFMT_SVAL = 4
_EIATTR_REGCOUNT = 0x2F
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MAX_THREADS = 0x05
_EIATTR_KPARAM_INFO = 0x17
_SHT_NOBITS = 8
_SYMBOL_BYTES = 24
# CUDA reserves 1 KiB of shared memory per block since sm_80; since sm_90, ELF sections include it.
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
    """Size of each parameter, in order."""
    frame_bytes: int
    """Local memory per thread: spilled registers, and arrays that are not kept in registers (for
    example, dynamically indexed)."""
    max_threads_per_block: int | None
    """The limit set by `__launch_bounds__`; None without one."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    data: bytes


def read_cubin(cubin: bytes, entry: str, log: str = "") -> CubinInfo:
    """Resources of `entry`. `log` is ptxas' verbose output, the only source of spill counts."""
    sections = _sections_with(cubin, entry)
    parameters: dict[int, int] = {}
    max_threads: int | None = None
    for attribute, payload in _attributes(sections[f".nv.info.{entry}"].data):
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            parameters[ordinal] = packed >> 18
        elif attribute == _EIATTR_MAX_THREADS:
            max_threads = math.prod(struct.unpack("<III", payload))
    shared = sections.get(f".nv.shared.{entry}")
    static_shared = shared.size if shared else 0
    if ".nv.shared.reserved.0" in sections:
        static_shared = max(0, static_shared - _RESERVED_SHARED_BYTES)
    stores, loads = _spills(log, entry)
    return CubinInfo(
        entry=entry,
        registers=_of_entry(sections, entry, _EIATTR_REGCOUNT),
        static_shared_bytes=static_shared,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        parameter_bytes=tuple(parameters[i] for i in sorted(parameters)),
        frame_bytes=_of_entry(sections, entry, _EIATTR_FRAME_SIZE),
        max_threads_per_block=max_threads,
    )


def kernel_code(cubin: bytes, entry: str) -> bytes:
    """The machine code of `entry`."""
    return _sections_with(cubin, entry)[f".text.{entry}"].data


def _sections_with(cubin: bytes, entry: str) -> dict[str, _Section]:
    """All sections of a cubin. Raises CompileError if it has no kernel `entry`."""
    sections = {section.name: section for section in _sections(cubin)}
    if f".text.{entry}" not in sections:
        entries = [name[6:] for name in sections if name.startswith(".text.")]
        raise CompileError(f'no extern "C" entry {entry!r} in the cubin; it has {entries}')
    return sections


def _of_entry(sections: dict[str, _Section], entry: str, wanted: int) -> int:
    """The value of a file-wide attribute, which pairs a symbol index with a number."""
    symbols, names = sections[".symtab"].data, sections[".strtab"].data
    for attribute, payload in _attributes(sections[".nv.info"].data):
        if attribute == wanted:
            symbol, count = struct.unpack("<II", payload)
            (name_offset,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
            if names[name_offset : names.index(b"\0", name_offset)] == entry.encode():
                return int(count)
    raise CompileError(f"the cubin has no attribute {wanted:#x} for {entry!r}")


def _spills(log: str, entry: str) -> tuple[int, int]:
    """Spill bytes that ptxas reported for `entry`; (0, 0) if the log does not mention it."""
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
    """EIATTR records: format, attribute, 16-bit value or length; EIFMT_SVAL has a payload."""
    position = 0
    while position + 4 <= len(data):
        kind, attribute, length = struct.unpack_from("<BBH", data, position)
        position += 4
        if kind == _EIFMT_SVAL:
            yield attribute, data[position : position + length]
            position += length
