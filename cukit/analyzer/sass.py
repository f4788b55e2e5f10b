"""How wide a kernel's memory instructions are, read from the instruction words of its cubin.

Since Volta an instruction is 128 bits. The opcode is in bits 0..11 (the operand forms of one
instruction differ in bits 9..11), and memory instructions keep the width of an access in bits
73..75. The codes below hold from sm_70 to sm_121; tests compile kernels whose widths are known for
every one of them. This counts instructions, not executions: one in a loop counts once.
"""

from __future__ import annotations

import struct
from collections import Counter

from cukit.analyzer.schema import AccessWidth, MemoryAccess

_OPCODES = {
    0x381: "load",
    0x981: "load",
    0x386: "store",
    0x986: "store",
    0xFAE: "async copy",
    0x983: "local load",
    0x387: "local store",
    0x984: "shared load",
    0x388: "shared store",
    0x988: "shared store",
}
_ATOMICS = {0x3A8, 0x9A8, 0x3A9, 0x98E, 0x9A6}  # ATOMG, compare and swap, RED
# UBLKCP (bulk copy), UTMALDG, UTMASTG, UTMAREDG: one instruction moves a whole tile.
_BULK_COPIES = {0x3BA, 0x5B4, 0x3B5, 0x3B6}

_WIDTH_BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 64, 6: 128}


def memory_access(code: bytes) -> MemoryAccess:
    """Counts the memory instructions in the code of one kernel."""
    widths: Counter[tuple[str, int]] = Counter()
    bulk_copies = atomics = 0
    for low, high in struct.iter_unpack("<QQ", code):
        opcode = low & 0xFFF
        if opcode in _OPCODES:
            bits = _WIDTH_BITS.get(high >> 9 & 7)
            if bits is not None:
                widths[_OPCODES[opcode], bits] += 1
        atomics += opcode in _ATOMICS
        bulk_copies += opcode in _BULK_COPIES
    rows = tuple(AccessWidth(name, bits, n) for (name, bits), n in sorted(widths.items()))
    return MemoryAccess("decoded", rows, bulk_copies, atomics)
