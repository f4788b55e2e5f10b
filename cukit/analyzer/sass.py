"""The kind and the access width of a kernel's instructions, decoded from its cubin.

Since Volta an instruction has 128 bits. The opcode is in bits 0..8, the form of its operands in
bits 9..11, and the width of a memory access in bits 73..75. The codes below are valid from sm_70 to
sm_121 (one opcode and the widths of one instruction changed with sm_100); for each architecture,
tests compile kernels with known instructions. Instructions are counted, not executions: an
instruction in a loop counts once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cukit.analyzer.schema import AccessWidth, InstructionMix, MemoryAccess

INSTRUCTION_CLASSES = (
    "tensor core",
    "floating point",
    "special and conversion",
    "integer and moves",
    "shared memory",
    "global memory",
    "local memory",
    "control",
    "other",
)

# Opcodes of each class; the comments name their instructions.
_CLASSES: Mapping[str, tuple[int, ...]] = {
    "tensor core": (
        0x037, 0x03C, 0x03D, 0x03F, 0x07A,  # IMMA, HMMA, BMMA, DMMA, QMMA
        0x1F0, 0x1F1, 0x1F2, 0x1F3,  # HGMMA, IGMMA, BGMMA, QGMMA
        0x1EA,  # UTCHMMA, UTCIMMA, UTCQMMA
    ),
    "floating point": (
        0x008, 0x009, 0x00A, 0x00B, 0x076,  # FSEL, FMNMX, FSET, FSETP, FMNMX3
        0x020, 0x021, 0x023, 0x054, 0x056,  # FMUL, FADD, FFMA, UFADD, UFMUL
        0x028, 0x029, 0x02A, 0x02B,  # DMUL, DADD, DSETP, DFMA
        0x030, 0x031, 0x032, 0x033, 0x034, 0x035, 0x040, 0x047,  # HADD2, HFMA2...
        0x102,  # FCHK
    ),
    "special and conversion": (
        0x108, 0x107,  # MUFU, FRND
        0x03E, 0x045, 0x104, 0x105, 0x106, 0x110, 0x111, 0x112, 0x05A, 0x05C,  # F2FP, I2FP, F2F...
    ),
    "integer and moves": (
        0x002, 0x003, 0x004, 0x005, 0x006, 0x007, 0x00C, 0x00F,  # MOV, P2R, R2P, CS2R, VOTE, SEL...
        0x010, 0x011, 0x012, 0x013, 0x015, 0x016, 0x017, 0x019, 0x01C,  # IADD3, LEA, LOP3...
        0x024, 0x025, 0x026, 0x027, 0x02F, 0x036, 0x03A,  # IMAD, IDP, ELECT, VIADD, MOVM
        0x046, 0x048, 0x04A,  # VIADDMNMX, VIMNMX, UVIMNMX
        0x082, 0x085, 0x086, 0x087, 0x08C, 0x090, 0x091, 0x092, 0x096, 0x097, 0x099,  # UMOV...
        0x0A4, 0x0A5, 0x0A6, 0x0B9, 0x0BD, 0x0BF, 0x0CA, 0x0CC,  # UIMAD, ULDC, R2UR...
        0x100, 0x101, 0x109, 0x119, 0x182, 0x189,  # FLO, BREV, POPC, S2R, LDC, SHFL
        0x1A1, 0x1AC, 0x1C2, 0x1C3, 0x1C4,  # MATCH, LDCU, R2UR, S2UR, REDUX
    ),
    "shared memory": (
        0x03B, 0x044, 0x184, 0x188, 0x18C, 0x18D,  # LDSM, STSM, LDS, STS, ATOMS
        0x1BD, 0x1E7, 0x1ED, 0x1EE,  # STAS, UTCCP, STTM, LDTM
    ),
    "global memory": (
        0x180, 0x181, 0x185, 0x186, 0x18E, 0x18F, 0x1A6, 0x1A8, 0x1A9,  # LDG, STG, RED, ATOMG...
        0x1AE, 0x1B4, 0x1B5, 0x1B6, 0x1BA, 0x1BB,  # LDGSTS, UTMALDG, UBLKCP...
    ),
    "local memory": (0x183, 0x187),  # LDL, STL
    "control": (
        0x11A, 0x11B, 0x11D, 0x141, 0x142, 0x144, 0x145, 0x146, 0x147, 0x148, 0x149,  # BAR, BRA...
        0x14D, 0x150, 0x15C, 0x15D, 0x192, 0x1A7, 0x1AB, 0x1AF, 0x1B2,  # EXIT, RET, MEMBAR, SYNCS
        0x1B7, 0x1B9, 0x1C5, 0x1C6, 0x1C7, 0x1C8,  # UTMACMDFLUSH, WARPGROUP, FENCE, USETMAXREG
        0x1E3, 0x1E9,  # UTCATOMSWS, UTCBAR
    ),
}  # fmt: skip
_NOP = 0x118
_NEVER = 0xF
"""The predicate !PT, in bits 12..15: ptxas adds loads with it before asynchronous copies."""
_IADD_SINCE_BLACKWELL = 0x035
"""HFMA2.MMA on earlier architectures."""

# Opcodes of memory instructions, and their operations.
_ACCESSES = {
    0x181: "load",  # LDG
    0x186: "store",  # STG
    0x1AE: "async copy",  # LDGSTS
    0x183: "local load",  # LDL
    0x187: "local store",  # STL
    0x184: "shared load",  # LDS
    0x188: "shared store",  # STS
}
_ATOMICS = (0x1A8, 0x1A9, 0x18E, 0x1A6)  # ATOMG, compare and swap, RED, REDG
# One instruction copies a whole tile: UBLKCP, UBLKRED, UTMALDG, UTMASTG, UTMAREDG.
_BULK_COPIES = (0x1BA, 0x1BB, 0x1B4, 0x1B5, 0x1B6)

_WIDTH_BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 64, 6: 128}
_ASYNC_COPY_BITS_SINCE_BLACKWELL = {0: 32, 2: 64, 4: 128}


def memory_access(code: bytes, compute_capability: tuple[int, int]) -> MemoryAccess:
    """Counts the memory instructions in the code of one kernel."""
    low, high = _words(code)
    opcodes, widths = low & np.uint64(0x1FF), high >> np.uint64(9) & np.uint64(7)
    counts = np.bincount((opcodes << np.uint64(3) | widths).astype(np.intp), minlength=1 << 12)
    rows = [
        AccessWidth(operation, bits, int(counts[opcode << 3 | encodings].sum()))
        for opcode, operation in _ACCESSES.items()
        for bits, encodings in _encodings_by_width(operation, compute_capability).items()
    ]
    by_opcode = counts.reshape(-1, 8).sum(axis=1)
    bulk_copies, atomics = (int(by_opcode[list(c)].sum()) for c in (_BULK_COPIES, _ATOMICS))
    present = sorted((row for row in rows if row.instructions), key=lambda r: (r.operation, r.bits))
    return MemoryAccess("decoded", tuple(present), bulk_copies, atomics)


def _encodings_by_width(
    operation: str, compute_capability: tuple[int, int]
) -> dict[int, npt.NDArray[np.intp]]:
    """By access width in bits: the values of the width field that encode it."""
    since_blackwell = operation == "async copy" and compute_capability >= (10, 0)
    table = _ASYNC_COPY_BITS_SINCE_BLACKWELL if since_blackwell else _WIDTH_BITS
    return {
        bits: np.array([encoding for encoding in table if table[encoding] == bits])
        for bits in table.values()
    }


def instruction_mix(code: bytes, compute_capability: tuple[int, int]) -> InstructionMix:
    """Counts the instructions of one kernel by class, without NOPs."""
    low, _ = _words(code)
    counts = np.bincount((low & np.uint64(0x1FF)).astype(np.intp), minlength=1 << 9)
    counts[_NOP] = 0
    by_class = {
        name: int(counts[list(_opcodes_of(name, compute_capability))].sum())
        for name in INSTRUCTION_CLASSES[:-1]
    }
    by_class["other"] = int(counts.sum()) - sum(by_class.values())
    return InstructionMix(
        "decoded", int(counts.sum()), {name: n for name, n in by_class.items() if n}
    )


def _opcodes_of(name: str, compute_capability: tuple[int, int]) -> tuple[int, ...]:
    moved_to = "integer and moves" if compute_capability >= (10, 0) else "floating point"
    kept = tuple(code for code in _CLASSES[name] if code != _IADD_SINCE_BLACKWELL)
    return (*kept, _IADD_SINCE_BLACKWELL) if name == moved_to else kept


def _words(code: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Lower and upper halves of all instructions except those predicated off by the compiler."""
    halves = np.frombuffer(code, dtype="<u8").reshape(-1, 2)
    runs = (halves[:, 0] >> np.uint64(12) & np.uint64(0xF)) != _NEVER
    return halves[runs, 0], halves[runs, 1]
